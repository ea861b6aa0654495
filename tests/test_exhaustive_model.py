"""The model of docs/model: its rules hold in every state, each broken rule is found out, and it can replay records."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs.model import __main__ as command  # noqa: E402
from docs.model.actions import steps  # noqa: E402
from docs.model.configs import FULL, QUICK, Config  # noqa: E402
from docs.model.mutations import MUTATIONS, Mutation, run  # noqa: E402
from docs.model.properties import NAMES  # noqa: E402
from docs.model.rules import Design  # noqa: E402
from docs.model.search import Forms, Violation, search  # noqa: E402

CLASSES = ("pure", "idempotent", "side_effecting")
SMALL = [
    Config(f"{effect}{', keys' if keys else ''}", (effect,), faults=1, orders=1, repeats=int(keys), keys=keys)
    for effect in CLASSES
    for keys in (False, True)
]


@pytest.mark.parametrize("config", SMALL, ids=lambda c: c.name)
def test_every_property_holds_in_every_state(config: Config) -> None:
    result = search(config)
    assert result.violations == {}
    assert result.states > 100
    assert set(result.checked) == set(NAMES)


def test_two_jobs_and_two_workers_hold_too() -> None:
    result = search(Config("two", ("side_effecting", "pure"), faults=1, orders=0, max_attempts=1))
    assert result.violations == {}
    assert result.states > 1000


@cache
def violations_of(config: Config) -> dict[str, Violation]:
    return search(config).violations


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_broken_rule_is_found_out_by_its_property(mutation: Mutation) -> None:
    result = run(mutation)
    found = [v for v in result.violations.values() if v.name in mutation.breaks]
    assert found, result.violations
    assert len(found[0].trace) >= 3
    whole = replace(mutation.config, name="whole", design=Design(), requests_outlive=False)
    assert violations_of(whole) == {}, "the world of the mutation is sound without it"


def test_no_rule_is_left_unbroken() -> None:
    broken = {f.name for m in MUTATIONS for f in fields(Design) if not getattr(m.config.design, f.name)}
    assert broken == {f.name for f in fields(Design)}
    assert {name for m in MUTATIONS for name in m.breaks} >= set(NAMES)


@pytest.mark.parametrize("keys", [False, True], ids=["no keys", "keys"])
@pytest.mark.parametrize("effect", CLASSES)
def test_leaving_out_what_cannot_matter_leaves_out_no_state(effect: str, keys: bool) -> None:
    config = Config("small", (effect,), faults=1, orders=0, keys=keys)
    forms = Forms(config)
    todo = [config.initial()]
    seen = set(todo)
    said = set()
    for state in todo:
        taken = list(steps(state, config))
        said |= {step.what for step in taken}
        after = [step.state for step in taken]
        todo.extend(new for new in dict.fromkeys(after) if new not in seen)
        seen.update(after)
    assert len({forms.lowest(state) for state in seen}) == search(config).states < len(seen) / 3
    harmless = ["confirmed by the record", "changes nothing, fenced out"]
    harmless += ["-> refused"] if effect == "side_effecting" else []
    assert [words for words in harmless if not any(words in what for what in said)] == []


def test_the_search_goes_where_it_must() -> None:
    """What the properties are about does happen: faults, late ends, resolutions, and each way for a job to end."""
    said: set[str] = set()
    config = Config("all", ("side_effecting",), faults=2, orders=1)
    forms = Forms(config)
    todo = [forms.lowest(config.initial())]
    seen = set(todo)
    for packed in todo:
        for step in steps(forms.unpack(packed), config):
            said.add(step.what)
            if (form := forms.lowest(step.state)) not in seen:
                seen.add(form)
                todo.append(form)
    wanted = (
        "dies",
        "stalls, and its lease runs out",
        "renews its lease after all",
        "the leader settles job 0: unknown",
        "the leader settles job 0: failed",
        "the answer is lost",
        "the effect start is refused, fenced out",
        "THE EFFECT",
        "still runs at its timeout: unknown",
        "its last message is lost",
        "without a body: it is released",
        "did not happen -> pending",
        "did not happen -> cancelled",
        "did not happen -> failed",
        "happened -> succeeded",
        "'succeeded' is committed: succeeded",
        "'failed' is committed: cancelled",
        "'retry' is committed: failed",
        "is asked to cancel: requested",
        "is reopened by an operator",
    )
    assert [words for words in wanted if not any(words in what for what in said)] == []


def test_the_command_tells_what_holds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["docs.model", "--faults", "0"])
    monkeypatch.setattr(command, "QUICK", SMALL)
    assert command.main() == 0
    told = capsys.readouterr().out
    assert all(name in told for name in NAMES)
    assert told.count(" yes\n") == len(NAMES)


def test_the_command_shows_the_way_to_a_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = next(m for m in MUTATIONS if m.name == "started_is_kept")
    monkeypatch.setattr(sys, "argv", ["docs.model"])
    monkeypatch.setattr(command, "QUICK", [broken.config])
    assert command.main() == 1
    told = capsys.readouterr().out
    assert "one_body_may_start does not hold after:" in told
    assert "the effect start is committed" in told


def test_the_configurations_are_named_once() -> None:
    assert len({c.name for c in FULL}) == len(FULL) > len(QUICK)

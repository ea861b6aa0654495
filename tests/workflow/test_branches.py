"""Branches: the guard of each arm, the value that is merged, and arms that are total."""
# ruff: noqa: PT012 (what must be refused is a whole function)

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from plan_kit import args_of, guards, wires
from wiring_kit import (
    Paid,
    Way,
    faults,
    refused,
    sink,
    source,
    task,
    wired,
)

from taskq import (
    TaskQ,
    branch,
    collect,
    or_skip,
)

# Branches -------------------------------------------------------------------------------------------------------------


def test_a_branch_guards_each_arm_and_merges_their_values(nowhere: TaskQ) -> None:
    decide, fly, ship = source(nowhere, Paid, "decide"), task(nowhere, "fly", str, x=Any), task(nowhere, "ship", str)
    take = sink(nowhere, str)

    def flow() -> str:
        paid = decide.step()
        text = branch(paid.way, {Way.AIR: lambda: fly.step(fly.step(1)), Way.SEA: ship.step})
        take.step(text)
        return text

    plan = wired(nowhere, flow)
    assert guards(plan) == {("decide", "fly", "air"), ("decide", "fly-2", "air"), ("decide", "ship", "sea")}
    assert {tuple(e["when"]["path"]) for e in plan["edges"] if "when" in e} == {("way",)}
    case = {
        "case": {
            "on": {"node": 0, "path": ["way"]},
            "arms": [["air", {"node": 2, "path": []}], ["sea", {"node": 3, "path": []}]],
        }
    }
    assert args_of(plan)["sink"] == {"x": case}
    assert plan["result"] == case
    names = [node["name"] for node in plan["nodes"]]
    merged = {(names[e["from"]], names[e["to"]]) for e in plan["edges"] if e.get("merge")}
    assert merged == {("fly-2", "sink"), ("ship", "sink")}
    assert ("decide", "sink", "fail") in wires(plan)


def test_branches_within_branches_have_the_guards_of_both(nowhere: TaskQ) -> None:
    decide, again = source(nowhere, bool, "decide"), source(nowhere, bool, "again")
    a, b, c = (source(nowhere, int, name) for name in "abc")
    take = sink(nowhere, int | None)

    def flow() -> None:
        inner = lambda: branch(again.step(), {True: a.step, False: b.step})  # noqa: E731
        take.step(branch(decide.step(), {True: inner, False: lambda: None}))
        c.node(after=[take.step(None)]).step()

    plan_faults = faults(nowhere, flow)
    assert [fault[:30] for fault in plan_faults] == ["node c: its result is never us"]

    def second() -> int:
        inner = lambda: branch(again.step(), {True: a.step, False: b.step})  # noqa: E731
        take.step(branch(decide.step(), {True: inner, False: lambda: None}))
        return c.step()

    plan = wired(nowhere, second)
    assert guards(plan) == {
        ("decide", "again", True),
        ("decide", "a", True),
        ("decide", "b", True),
        ("again", "a", True),
        ("again", "b", False),
    }
    on, within = {"node": 0, "path": []}, {"node": 1, "path": []}
    arms = [[True, {"node": 2, "path": []}], [False, {"node": 3, "path": []}]]
    assert args_of(plan)["sink"]["x"] == {
        "case": {"on": on, "arms": [[True, {"case": {"on": within, "arms": arms}}], [False, {"value": None}]]}
    }
    names = [node["name"] for node in plan["nodes"]]
    into = {(names[e["from"]], bool(e.get("merge"))) for e in plan["edges"] if names[e["to"]] == "sink"}
    assert into == {("decide", False), ("again", True), ("a", True), ("b", True)}


def test_what_a_skippable_decision_guards_is_skipped_with_it(nowhere: TaskQ) -> None:
    decide, a = source(nowhere, bool, "decide"), task(nowhere, "a")

    def flow() -> None:
        branch(or_skip(decide.step()), {True: a.step, False: lambda: None})

    [guard] = wired(nowhere, flow)["edges"]
    assert guard == {"from": 0, "to": 1, "policy": "skip", "when": {"path": [], "equals": True}}


@pytest.mark.parametrize(
    ("returns", "arms", "said"),
    [
        (bool, [True], ["there is no arm for False; add one, lambda: None for nothing"]),
        (Way, [], ["there is no arm for <Way.AIR: 'air'>", "there is no arm for <Way.SEA: 'sea'>"]),
        (Way, [Way.AIR, Way.SEA, "land"], ["the arm 'land' is none of its values; take it out"]),
        (Way, ["air", Way.SEA], ["there is no arm for <Way.AIR: 'air'>", "the arm 'air' is none of its values"]),
        (Literal["a", "b"], ["a", "c"], ["there is no arm for 'b'", "the arm 'c' is none of its values"]),
        (bool | None, [True, False], ["there is no arm for None"]),
        (str, ["a"], ["its type is str, whose values cannot be listed; annotate it as a bool, a Literal or an Enum"]),
        (Any, ["a"], ["its type is Any, whose values cannot be listed"]),
    ],
    ids=str,
)
def test_arms_are_total(nowhere: TaskQ, returns: Any, arms: list[Any], said: list[str]) -> None:
    decide, a = source(nowhere, returns, "decide"), task(nowhere, "a")

    def flow() -> None:
        a.node(after=[branch(decide.step(), {key: lambda: None for key in arms})]).step()

    found = faults(nowhere, flow)
    assert len(found) == len(said)
    for fault, part in zip(found, said, strict=True):
        assert fault.startswith("branch on the result of decide: ")
        assert part in fault


@pytest.mark.parametrize("on", ["argument", "constant", "outcome", "branch"])
def test_a_branch_decides_on_results_of_steps(nowhere: TaskQ, on: str) -> None:
    decide = source(nowhere, bool, "decide")

    def flow(n: bool) -> Any:
        arms: dict[Any, Callable[[], Any]] = {True: lambda: None, False: lambda: None}
        given: Any = {
            "argument": lambda: n,
            "constant": lambda: True,
            "outcome": lambda: collect(decide.step()).status,
            "branch": lambda: branch(decide.step(), arms),
        }[on]()
        return branch(given, arms)

    said = refused(nowhere, flow)
    assert said.startswith("branch() decides on ")
    assert "; give it the result of a step, or a part of one: an argument of the run is known to the caller" in said


def test_the_value_of_a_branch_has_the_type_of_its_arms(nowhere: TaskQ) -> None:
    decide, a, b = source(nowhere, bool, "decide"), source(nowhere, int, "a"), source(nowhere, str, "b")
    take = sink(nowhere, str)

    def alike() -> None:
        take.step(branch(decide.step(), {True: a.step, False: a.step}))

    assert faults(nowhere, alike) == [
        "node sink: x takes str, and the value of the branch on the result of decide is int"
    ]

    def unlike() -> None:
        take.step(branch(decide.step(), {True: a.step, False: b.step}))

    assert wired(nowhere, unlike)

    def perhaps() -> str:
        value = branch(decide.step(), {True: b.step, False: lambda: None})
        take.step(value)
        return value

    assert faults(nowhere, perhaps) == [
        "node sink: x takes str, and the value of the branch on the result of decide is str | None",
        "it returns str, and the value of the branch on the result of decide is str | None",
    ]

    def part() -> None:
        take.step(branch(decide.step(), {True: a.step, False: a.step}).x)  # type: ignore[attr-defined]

    assert refused(nowhere, part).endswith("is asked for ('x'), which a branch chooses; hand the whole value to a task")


def test_an_arm_that_raises_leaves_no_guard_behind(nowhere: TaskQ) -> None:
    decide, a = source(nowhere, bool, "decide"), task(nowhere, "a")

    def fail() -> None:
        raise LookupError

    def flow() -> bool:
        decided = decide.step()
        with pytest.raises(LookupError):
            branch(decided, {True: fail, False: fail})
        a.step()
        return decided

    assert guards(wired(nowhere, flow)) == set()

"""Durations, backoff, retries, policies and their resolver."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskq.errors import InvalidDuration, InvalidPolicy
from taskq.policy import (
    UNLIMITED,
    Backoff,
    ExecutionPolicy,
    PolicyLayer,
    Retry,
    constant,
    exponential,
    linear,
    parse_duration,
    resolve,
)


@pytest.mark.parametrize(
    ("given_as", "seconds"),
    [
        ("30s", 30),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("500ms", 0.5),
        ("2.5m", 150),
        ("1d", 86_400),
        ("1w", 604_800),
        (5, 5),
        (2.5, 2.5),
        (0, 0),
        (timedelta(minutes=1), 60),
    ],
)
def test_durations_are_read(given_as: Any, seconds: float) -> None:
    assert parse_duration(given_as) == seconds


@pytest.mark.parametrize(
    "wrong",
    ["", "x", "5", "-1s", "1h-", "1 year", -1, float("nan"), float("inf"), 10**400, True, None, timedelta(-1), "９s"],
)
def test_durations_that_cannot_be_read_are_shown(wrong: Any) -> None:
    with pytest.raises(InvalidDuration) as caught:
        parse_duration(wrong)
    assert repr(wrong)[:70] in str(caught.value)


@pytest.mark.parametrize("attempt", [1, 17, 60, 1100, 2**31, 10**400])
@pytest.mark.parametrize("rand", [0.0, 0.5, 0.999999])
@pytest.mark.parametrize(
    "curve",
    [exponential(5), exponential(5, factor=1000, jitter=0.9), linear(5), constant(5), exponential("1ms", cap="1ms")],
)
def test_backoff_never_overflows(curve: Backoff, attempt: int, rand: float) -> None:
    assert 0 < curve.delay(attempt, rand) <= curve.cap


@given(
    base=st.floats(0.001, 3600),
    factor=st.floats(1, 1000),
    attempt=st.integers(1, 2**31),
    rand=st.floats(0, 1, exclude_max=True),
)
def test_backoff_grows_to_its_cap(base: float, factor: float, attempt: int, rand: float) -> None:
    curve = exponential(base, factor=factor, jitter=0)
    assert curve.delay(attempt, rand) <= curve.delay(attempt + 1, rand) <= 3600
    assert curve.delay(1, rand) == base


def test_backoff_curves() -> None:
    assert [exponential("1s", jitter=0).delay(n, 0) for n in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert [linear("2s", jitter=0).delay(n, 0) for n in (1, 2, 3)] == [2, 4, 6]
    assert [constant("2s").delay(n, 0.5) for n in (1, 9)] == [2, 2]
    assert constant(0).delay(1, 0.5) == 0
    assert exponential("10s", jitter=0.5).delay(1, 0.5) == 7.5


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: exponential("2h"),
        lambda: exponential(1, factor=0.5),
        lambda: exponential(1, factor=float("nan")),
        lambda: exponential(1, jitter=1),
        lambda: exponential(0, cap=0),
        lambda: exponential("soon"),
    ],
)
def test_backoff_refuses_what_it_cannot_keep(wrong: Any) -> None:
    with pytest.raises(InvalidPolicy, match="backoff"):
        wrong()


class Flaky(ConnectionError):
    pass


def test_retries_go_by_the_kind_of_failure() -> None:
    assert Retry().retries(ValueError())
    only = Retry(on=[ConnectionError])
    assert only.retries(Flaky())
    assert not only.retries(ValueError())
    assert not Retry(give_up_on=(ConnectionError,)).retries(Flaky())
    assert not Retry(on=[OSError], give_up_on=[Flaky]).retries(Flaky())
    named = ExecutionPolicy.from_spec(json.loads(json.dumps(ExecutionPolicy(retry=only).spec()))).retry
    assert named == only
    assert named.retries(Flaky())


def test_without_a_limit_attempts_are_as_many_as_the_column_holds() -> None:
    assert Retry(max_attempts=None).max_attempts == UNLIMITED == 2**31 - 1


POLICIES = [
    ExecutionPolicy(),
    ExecutionPolicy(queue="mail", priority=9, timeout=30, deadline=3600.5, effect_class="pure"),
    ExecutionPolicy(retry=Retry(7, linear("1s", cap="1m"), on=[ValueError], give_up_on=[KeyError]), max_recoveries=0),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_survives_its_spec(policy: ExecutionPolicy) -> None:
    spec = json.loads(json.dumps(policy.spec()))
    again = ExecutionPolicy.from_spec(spec)
    assert again == policy
    assert again.id == policy.id
    assert ExecutionPolicy.from_spec({**spec, "of_a_later_release": 1}) == policy


def test_ids_tell_policies_apart_and_stay() -> None:
    assert len({policy.id for policy in POLICIES}) == len(POLICIES)
    # Rows in databases carry these: if one changes, a default or the form has changed, and FORMAT must be raised.
    assert ExecutionPolicy().id == "1-798e1fee104b349b1678455f"
    # What was not there when policies were first stored is part of the name only where it is said.
    assert "ordering" not in ExecutionPolicy().spec()
    for word in ("halt", "continue"):
        policy = ExecutionPolicy.from_spec({"ordering": word})
        assert policy.spec()["ordering"] == word
        assert policy.id not in (ExecutionPolicy().id, ExecutionPolicy(queue="mail").id)
    assert ExecutionPolicy(queue="mail", timeout=30).id == ExecutionPolicy(queue="mail", timeout=30.0).id
    assert ExecutionPolicy.from_spec({}).id == ExecutionPolicy().id


def test_the_spec_has_the_paths_that_sql_reads() -> None:
    spec = ExecutionPolicy(queue="mail", priority=1, deadline=60, retry=Retry(4), max_recoveries=2).spec()
    assert (spec["queue"], spec["priority"], spec["effect_class"], spec["deadline"]) == ("mail", 1, "idempotent", 60)
    assert (spec["max_recoveries"], spec["retry"]["max_attempts"]) == (2, 4)


def test_the_nearest_layer_wins() -> None:
    call = PolicyLayer(priority=9, max_attempts=8)
    task = PolicyLayer(queue="mail", priority=1, retry=Retry(2, constant(1)), timeout="30s")
    app = PolicyLayer(queue="default", timeout="1h", deadline="1d", max_snoozes=1)
    policy = resolve(call, task, app)
    assert (policy.queue, policy.priority, policy.timeout, policy.deadline) == ("mail", 9, 30, 86_400)
    assert policy.retry == Retry(8, constant(1))
    assert policy.max_snoozes == 1
    assert resolve() == ExecutionPolicy()
    assert resolve(PolicyLayer(timeout=None), app).timeout is None
    # A retry that is nearer than max_attempts replaces it whole.
    assert resolve(PolicyLayer(retry=Retry(2)), PolicyLayer(max_attempts=9)).retry.max_attempts == 2


@pytest.mark.parametrize(
    ("layer", "field"),
    [
        ({"priority": 10}, "priority"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"queue": "a b"}, "queue"),
        ({"queue": ""}, "queue"),
        ({"queue": "ä"}, "queue"),
        ({"queue": "q" * 129}, "queue"),
        ({"timeout": "soon"}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"deadline": -1}, "deadline"),
        ({"priority": 10**5000}, "priority is a int that cannot be shown"),
        ({"retry": 3}, "retry"),
        ({"retry": 3, "max_attempts": 3}, "retry is 3"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"max_recoveries": -1}, "max_recoveries"),
        ({"max_retry_afters": 1.5}, "max_retry_afters"),
        ({"max_snoozes": None}, "max_snoozes"),
        ({"effect_class": "harmless"}, "effect_class"),
    ],
)
def test_every_field_is_checked_and_named(layer: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidPolicy, match=field):
        resolve(PolicyLayer(**layer))


def test_a_side_effecting_body_that_fails_has_failed_unless_its_errors_are_named() -> None:
    task = PolicyLayer(effect_class="side_effecting")
    alone = resolve(task)
    assert (alone.retry.max_attempts, alone.required_worker_schema) == (1, 2)
    assert resolve(PolicyLayer()).required_worker_schema is None
    app = PolicyLayer(retry=Retry(5, give_up_on=(KeyError,)))
    assert resolve(task, app).retry == Retry(1, app.retry.backoff, give_up_on=(KeyError,))  # type: ignore[union-attr]
    named = Retry(5, on=(TimeoutError,))
    assert resolve(task, PolicyLayer(retry=named)).retry == named
    assert resolve(PolicyLayer(effect_class="side_effecting", retry=named)).retry == named
    assert resolve(PolicyLayer(effect_class="side_effecting", retry=Retry(1))).retry == Retry(1)


@pytest.mark.parametrize(
    "layers",
    [
        (PolicyLayer(effect_class="side_effecting", retry=Retry(2)),),
        (PolicyLayer(effect_class="side_effecting", max_attempts=2),),
        (PolicyLayer(retry=Retry()), PolicyLayer(effect_class="side_effecting")),
        (PolicyLayer(max_attempts=None), PolicyLayer(effect_class="side_effecting")),
    ],
)
def test_more_attempts_at_a_side_effect_need_the_errors_that_are_worth_them(layers: tuple[PolicyLayer, ...]) -> None:
    with pytest.raises(InvalidPolicy, match=r"retry\.on names no errors.*on=\(\.\.\.,\)"):
        resolve(*layers)


def test_a_backoff_is_made_by_its_functions() -> None:
    with pytest.raises(InvalidPolicy, match=r"retry\.backoff is 5; use exponential"):
        Retry(backoff=5)  # type: ignore[arg-type]


def test_a_layer_shows_what_it_leaves_to_others() -> None:
    assert "queue='mail', priority=UNSET" in repr(PolicyLayer(queue="mail"))


@pytest.mark.parametrize("wrong", [ValueError, "ValueError", [3], [int]])
def test_exception_classes_are_checked(wrong: Any) -> None:
    with pytest.raises(InvalidPolicy, match="retry.on"):
        Retry(on=wrong)

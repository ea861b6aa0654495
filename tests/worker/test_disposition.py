"""What the end of an attempt means: every branch, without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from worker_kit import claim_of

from taskq import errors
from taskq.outcomes import OutcomeUnknown, RetryAfter, Snooze
from taskq.policy import ExecutionPolicy, Retry, constant
from taskq.worker.disposition import (
    BodyEnd,
    Disposition,
    FencedOut,
    Interrupted,
    Raised,
    RaisedElsewhere,
    Returned,
    Unproven,
    decide,
)

POLICY = ExecutionPolicy(
    retry=Retry(3, constant("7s"), give_up_on=(KeyError,)), timeout=2.0, max_retry_afters=2, max_snoozes=2
)
CANCELLED = errors.JobCancelled(UUID(int=1))

CASES: list[tuple[str, dict[str, Any], BodyEnd, str, str | None, float]] = [
    # what, counters at the claim, how the body ended, outcome, type of the error on record, delay
    ("returned", {}, Returned("1"), "succeeded", None, 0),
    ("shutdown", {}, Interrupted("shutdown"), "release", "Released", 0),
    ("lease", {}, Interrupted("lease"), "release", "Released", 0),
    ("cancel", {}, Interrupted("cancel"), "cancelled", None, 0),
    ("told to cancel", {}, Raised(CANCELLED), "cancelled", None, 0),
    ("timeout", {}, Interrupted("timeout"), "retry", "AttemptTimeout", 7),
    ("last timeout", {"attempt": 2}, Interrupted("timeout"), "failed", "AttemptTimeout", 0),
    ("error", {}, Raised(ValueError("x")), "retry", "ValueError", 7),
    ("second error", {"attempt": 1}, Raised(ValueError("x")), "retry", "ValueError", 7),
    ("last error", {"attempt": 2}, Raised(ValueError("x")), "failed", "ValueError", 0),
    ("exit", {}, Raised(SystemExit(1)), "retry", "SystemExit", 7),
    ("given up on", {}, Raised(KeyError("x")), "failed", "KeyError", 0),
    ("payload", {}, Raised(errors.PayloadError("x")), "failed", "PayloadError", 0),
    ("misfit", {}, Raised(errors.PayloadMisfit("x")), "retry_after", "PayloadMisfit", 5),
    ("misfit, again", {"retry_afters": 1}, Raised(errors.PayloadMisfit("x")), "retry_after", "PayloadMisfit", 15),
    ("misfit, last attempt", {"attempt": 2}, Raised(errors.PayloadMisfit("x")), "retry_after", "PayloadMisfit", 5),
    ("misfit, spent", {"retry_afters": 2}, Raised(errors.PayloadMisfit("x")), "failed", "PayloadMisfit", 0),
    (
        "misfit in a child process",
        {"retry_afters": 1},
        RaisedElsewhere({"type": "PayloadMisfit"}, ("taskq.errors.PayloadMisfit", "taskq.errors.PayloadError")),
        "retry_after",
        "PayloadMisfit",
        15,
    ),
    ("error in a child process", {}, RaisedElsewhere({"type": "E"}, ("m.E", "builtins.Exception")), "retry", "E", 7),
    ("last error in a child process", {"attempt": 2}, RaisedElsewhere({"type": "E"}, ("m.E",)), "failed", "E", 0),
    (
        "given up on in a child process",
        {},
        RaisedElsewhere({"type": "E"}, ("m.E", "builtins.KeyError")),
        "failed",
        "E",
        0,
    ),
    (
        "result of a child process",
        {},
        RaisedElsewhere({"type": "ResultNotStorable"}, ("taskq.errors.ResultNotStorable",)),
        "failed",
        "ResultNotStorable",
        0,
    ),
    ("result", {}, Raised(errors.ResultNotStorable("x")), "failed", "ResultNotStorable", 0),
    ("retry after", {"retry_afters": 1}, Raised(RetryAfter(5)), "retry_after", "RetryAfter", 5),
    ("retry after, spent", {"retry_afters": 2}, Raised(RetryAfter(5)), "retry_after_spent", "RetryAfterExhausted", 0),
    ("retry after, last attempt", {"attempt": 2}, Raised(RetryAfter(5)), "retry_after", "RetryAfter", 5),
    ("snooze", {"snoozes": 1}, Raised(Snooze(5)), "snooze", "Snooze", 5),
    ("snooze, spent", {"snoozes": 2}, Raised(Snooze(5)), "snooze_spent", "SnoozeExhausted", 0),
    ("snooze, last attempt", {"attempt": 2}, Raised(Snooze(5)), "snooze", "Snooze", 5),
]


@pytest.mark.parametrize(("what", "counters", "end", "outcome", "error", "delay"), CASES, ids=[c[0] for c in CASES])
def test_how_a_body_ends_decides_the_outcome(
    what: str, counters: dict[str, Any], end: BodyEnd, outcome: str, error: str | None, delay: float
) -> None:
    decided = decide(claim_of("t", **counters), POLICY, end)
    assert decided.outcome == outcome
    assert (decided.error or {}).get("type") == error
    assert decided.delay == delay
    assert (decided.error_text is None) == (error is None)
    assert decided.result == (end.result if isinstance(end, Returned) else None)


def test_a_timeout_names_its_limit_and_may_have_none() -> None:
    assert "timeout of 2 s" in (decide(claim_of("t"), POLICY, Interrupted("timeout")).error_text or "")
    without = replace(POLICY, timeout=None)
    assert decide(claim_of("t"), without, Interrupted("timeout")).outcome == "retry"


@pytest.mark.parametrize("attempt", [16, 59, 1_099, 2**31 - 2])
def test_however_often_it_has_failed_the_next_try_has_a_date(attempt: int) -> None:
    policy = ExecutionPolicy(retry=Retry(None))
    decided = decide(claim_of("t", attempt=attempt, max_attempts=2**31 - 1), policy, Raised(ValueError()))
    wanted = "retry" if attempt + 1 < 2**31 - 1 else "failed"
    assert decided.outcome == wanted
    assert wanted == "failed" or 0 < decided.delay <= 3600


NAMED = replace(POLICY, effect_class="side_effecting", retry=Retry(3, constant("7s"), on=(TimeoutError,)))
NOT_STORABLE = ("taskq.errors.ResultNotStorable",)
UNPROVEN = errors.OwnershipNotProven("x")
OWNED = replace(NAMED, retry=Retry(3, on=(errors.OwnershipNotProven,)))
LOST_CHILD = errors.ProcessDied("gone", signal=9)
EFFECTS: list[tuple[str, ExecutionPolicy, BodyEnd, str, str | None, str | None]] = [
    # what, policy, how the body ended that had started its effect, outcome, type of the error, reason for being unknown
    ("returned", NAMED, Returned("1"), "succeeded", None, None),
    ("error", POLICY, Raised(ValueError("x")), "failed", "ValueError", None),
    ("error that is not named", NAMED, Raised(ValueError("x")), "failed", "ValueError", None),
    ("error that is named", NAMED, Raised(TimeoutError("x")), "retry", "TimeoutError", None),
    ("misfit that the body raised", NAMED, Raised(errors.PayloadMisfit("x")), "failed", "PayloadMisfit", None),
    ("in a child", POLICY, RaisedElsewhere({"type": "E"}, ("m.E",)), "failed", "E", None),
    ("named in a child", NAMED, RaisedElsewhere({"type": "E"}, ("builtins.TimeoutError",)), "retry", "E", None),
    ("retry after", NAMED, Raised(RetryAfter(5)), "retry_after", "RetryAfter", None),
    ("snooze", NAMED, Raised(Snooze(5)), "snooze", "Snooze", None),
    ("gave up when told to cancel", NAMED, Raised(CANCELLED), "cancelled", None, None),
    ("result", NAMED, Raised(errors.ResultNotStorable("x")), "unknown", "ResultNotStorable", "told"),
    ("result of a child", NAMED, RaisedElsewhere({"type": "E"}, NOT_STORABLE), "unknown", "E", "told"),
    ("not owned any more", NAMED, Raised(errors.FencedOut("x")), "unknown", "FencedOut", "not_confirmed"),
    ("not proven to be owned", NAMED, Raised(UNPROVEN), "unknown", "OwnershipNotProven", "not_confirmed"),
    ("not owned, and named", OWNED, Raised(UNPROVEN), "retry", "OwnershipNotProven", None),
    ("told", NAMED, Raised(OutcomeUnknown("x")), "unknown", "OutcomeUnknown", "told"),
    (
        "told in a child",
        NAMED,
        RaisedElsewhere({"type": "OutcomeUnknown"}, ("taskq.outcomes.OutcomeUnknown",)),
        "unknown",
        "OutcomeUnknown",
        "told",
    ),
    ("timeout", NAMED, Interrupted("timeout"), "unknown", "AttemptTimeout", "timed_out"),
    ("shutdown", NAMED, Interrupted("shutdown"), "unknown", "OutcomeUnknown", "shutdown"),
    ("lease", NAMED, Interrupted("lease"), "unknown", "OutcomeUnknown", "shutdown"),
    ("cancel", NAMED, Interrupted("cancel"), "unknown", "OutcomeUnknown", "shutdown"),
    ("child died", NAMED, Raised(LOST_CHILD), "unknown", "ProcessDied", "process_died"),
    ("lost from sight", NAMED, Unproven(errors.TaskQError("x")), "unknown", "TaskQError", "not_confirmed"),
]


@pytest.mark.parametrize(("what", "policy", "end", "outcome", "error", "reason"), EFFECTS, ids=[e[0] for e in EFFECTS])
def test_a_started_effect_ends_as_told_and_is_unknown_where_nobody_told(
    what: str, policy: ExecutionPolicy, end: BodyEnd, outcome: str, error: str | None, reason: str | None
) -> None:
    now = datetime.now(UTC)
    decided = decide(claim_of("t", effect_class="side_effecting", effect_started_at=now), policy, end)
    assert decided.outcome == outcome
    assert (decided.error or {}).get("type") == error
    assert (decided.error or {}).get("reason") == reason


def test_without_an_effect_start_it_goes_back_like_any_other() -> None:
    claim = claim_of("t", effect_class="side_effecting")
    assert decide(claim, NAMED, Interrupted("shutdown", started=False)).outcome == "release"
    assert decide(claim, NAMED, Interrupted("cancel", started=False)).outcome == "cancelled"
    unproven = decide(claim, NAMED, Unproven(errors.EffectStartNotProven("x", "status")))
    assert (unproven.outcome, unproven.delay) == ("unknown", 5.0)
    assert (unproven.error or {})["body_started"] is False


def test_what_is_no_end_is_refused() -> None:
    with pytest.raises(AssertionError):
        decide(claim_of("t"), POLICY, object())  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        decide(claim_of("t", effect_started_at=datetime.now(UTC)), POLICY, FencedOut())
    assert Disposition("succeeded").error_text is None

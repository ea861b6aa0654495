"""What the end of an attempt means: the one place that turns how a body ended into an outcome.

Pure functions on the claim, its policy and what happened. The database has the last word where other sessions may
have spoken meanwhile: a cancel request turns everything but a success into ``cancelled``, and a wait that would pass
the deadline ends the job (``end_attempts`` in the migrations).
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID

from taskq import errors
from taskq.outcomes import OutcomeUnknown, RetryAfter, Snooze, is_suspension
from taskq.policy import ExecutionPolicy, kind_name
from taskq.steps import Key
from taskq.worker.claims import Claim, Interrupt, Outcome


@dataclass(slots=True)  # not frozen, for a frozen one takes three times as long to make
class Returned:
    """The body returned; ``result`` is JSON text."""

    result: str


@dataclass(frozen=True, slots=True)
class Raised:
    """The body raised."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Suspends:
    """The body sleeps or waits for signals, by these steps."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class RaisedElsewhere:
    """The body raised in a child process; what is known of it are the record and the names of its classes."""

    error: dict[str, Any]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The worker stopped the body, and it has ended; or it had not started."""

    by: Interrupt
    started: bool = True


@dataclass(frozen=True, slots=True)
class Unproven:
    """What the database holds of the attempt is not known; its body was not called, or what became of it is lost."""

    error: errors.TaskQError


@dataclass(frozen=True, slots=True)
class FencedOut:
    """The attempt was another's before its body was called: there is nothing to say about it."""


@dataclass(frozen=True, slots=True)
class NotPrepared:
    """Its preparation has kept it from the attempt, and the database has taken the claim back with that."""

    answer: str
    became: str
    incident: UUID | None
    why: str | None


UnknownReason = Literal["timed_out", "process_died", "shutdown", "told", "not_confirmed"]
ReleaseReason = Literal["shutdown", "lease", "stale", "stopped"]
BodyEnd = Returned | Raised | Suspends | RaisedElsewhere | Interrupted | Unproven | FencedOut | NotPrepared
_LAST: Final = (
    errors.PayloadError,
    errors.ResultNotStorable,
    errors.StepFailed,
    errors.TransactionEndedInside,
    errors.TransactionalStepUnsupported,
)
_FINAL: Final = frozenset(map(kind_name, _LAST))
"""Errors of a child process after which trying again cannot help."""
_MISFIT: Final = kind_name(errors.PayloadMisfit)
_UNKNOWN: Final = kind_name(OutcomeUnknown)
_NOT_STORABLE: Final = kind_name(errors.ResultNotStorable)
UNPROVEN_DELAY: Final = 5.0
"""Seconds that a job waits whose effect start was not proven, where the database knows that there was none."""
MISFIT_DELAYS: Final = (5.0, 15.0, 45.0, 135.0, 405.0, 600.0)
"""Seconds that a job waits each time its payload does not fit, about 20 minutes in all, before that ends it."""


@dataclass(slots=True)  # not frozen, as Returned
class Disposition:
    """An outcome, ready to be sent."""

    outcome: Outcome
    result: str | None = None
    error: dict[str, Any] | None = None
    delay: float = 0.0

    @property
    def error_text(self) -> str | None:
        """The error as JSON text."""
        return None if self.error is None else json.dumps(self.error)


def decide(claim: Claim, policy: ExecutionPolicy, end: BodyEnd) -> Disposition:
    """Decide what this end of an attempt means.

    Args:
        claim: The attempt, with the job's counters as they were at the claim; the fence keeps them from moving.
        policy: The policy that was in force at enqueue.
        end: How the body ended.
    """
    if claim.open_step is not None:
        return _of_step(claim.open_step, policy, end)
    match end:
        case Returned(result):
            return Disposition("succeeded", result=result)
        case Suspends(keys):
            return Disposition("suspend", error=_waits_for(keys))
        case Unproven(exc):
            started = claim.effect_started_at is not None
            error = {**errors.describe(exc), "reason": "not_confirmed", "body_started": started}
            return Disposition("unknown", error=error, delay=UNPROVEN_DELAY)
        case Raised(OutcomeUnknown() as exc):
            return unknown("told", errors.describe(exc))
        case RaisedElsewhere(error, kinds) if _UNKNOWN in kinds:
            return unknown("told", error)
        case _ if claim.effect_started_at is not None and (decided := _of_effect(claim, policy, end)) is not None:
            return decided
        case Interrupted("shutdown" | "lease" as reason, started):
            return Disposition("release", error=released(reason, started))
        case Interrupted("cancel") | Raised(errors.JobCancelled()):
            return Disposition("cancelled")
        case Interrupted(_):
            return _failure(claim, policy, _timeout(policy))
        case Raised(RetryAfter() as later):
            if claim.retry_afters + 1 > policy.max_retry_afters:
                return Disposition(
                    "retry_after_spent",
                    error=errors.describe(
                        errors.RetryAfterExhausted(f"RetryAfter was raised more than {policy.max_retry_afters} times")
                    ),
                )
            return Disposition("retry_after", error=_reason(later), delay=later.delay)
        case Raised(Snooze() as later):
            if claim.snoozes + 1 > policy.max_snoozes:
                return Disposition(
                    "snooze_spent",
                    error=errors.describe(
                        errors.SnoozeExhausted(f"the body snoozed more than {policy.max_snoozes} times")
                    ),
                )
            return Disposition("snooze", error=_reason(later), delay=later.delay)
        case Raised(errors.PayloadMisfit() as exc):
            return _misfit(claim, policy, errors.describe(exc))
        case Raised(exc) if issubclass(type(exc), _LAST):
            # Trying again cannot help: the arguments and the code stay as they are, or the body's work was done.
            return Disposition("failed", error=errors.describe(exc))
        case Raised(exc):
            return _failure(claim, policy, exc)
        case RaisedElsewhere(error, kinds) if _MISFIT in kinds:
            return _misfit(claim, policy, error)
        case RaisedElsewhere(error, kinds):
            return _charged(claim, policy, error, _FINAL.isdisjoint(kinds) and policy.retry.retries_kinds(kinds))
    raise AssertionError(end)


_OWN_WORD: Final = (
    errors.JobCancelled,
    RetryAfter,
    Snooze,
    errors.TransactionEndedInside,
    errors.TransactionalStepUnsupported,
)
"""What a side-effecting body may raise that means the same as from any other."""


def _of_effect(claim: Claim, policy: ExecutionPolicy, end: BodyEnd) -> Disposition | None:
    """What is different where an effect was allowed to start; None for what is not.

    What stopped the body leaves its outcome unknown. What it raised is its own word, and ends the job, unless the
    policy names that error as one to try again after.
    """
    match end:
        case Interrupted("timeout"):
            return unknown("timed_out", errors.describe(_timeout(policy)))
        case Interrupted(reason):
            why = _RELEASED.get(reason, "it was stopped")
            return unknown("shutdown", {"type": "OutcomeUnknown", "message": f"its body still ran: {why}"})
        case Raised(errors.ProcessDied() as exc):
            return unknown("process_died", errors.describe(exc))
        case Raised(errors.ResultNotStorable() as exc):
            return unknown("told", errors.describe(exc))  # it returned, but with what is not known
        case RaisedElsewhere(error, kinds) if _NOT_STORABLE in kinds:
            return unknown("told", error)
        case Raised(exc) if not isinstance(exc, _OWN_WORD):
            named = policy.retry.on is not None and policy.retry.retries(exc)
            if isinstance(exc, (errors.FencedOut, errors.OwnershipNotProven)) and not named:
                # It says where the body stopped, not how far it had come before.
                return unknown("not_confirmed", errors.describe(exc))
            return _charged(claim, policy, errors.describe(exc), named)
        case RaisedElsewhere(error, kinds):
            named = policy.retry.on is not None and _FINAL.isdisjoint(kinds) and policy.retry.retries_kinds(kinds)
            return _charged(claim, policy, error, named)
    return None


def _of_step(key: Key, policy: ExecutionPolicy, end: BodyEnd) -> Disposition:
    """Nobody has told what became of a step's effect, so however the body has ended, the outcome is unknown.

    Where the database knows better, since nothing was started or all is recorded, the job goes back after the delay.
    """
    reason: UnknownReason = "told"
    error: Mapping[str, Any]
    match end:
        case Interrupted("timeout"):
            reason, error = "timed_out", errors.describe(_timeout(policy))
        case Interrupted(by):
            reason = "shutdown"
            error = {"type": "OutcomeUnknown", "message": f"its body still ran: {_RELEASED.get(by, 'it was stopped')}"}
        case Raised(exc) | Unproven(exc):
            error = errors.describe(exc)
        case _:
            error = {"type": "OutcomeUnknown", "message": "the body went on without knowing what became of the step"}
    decided = unknown(reason, {**error, "step": key.name, "occurrence": key.occurrence})
    decided.delay = UNPROVEN_DELAY
    return decided


def unknown(reason: UnknownReason, error: Mapping[str, Any]) -> Disposition:
    """The outcome of an attempt that nobody knows, with what is known of it."""
    return Disposition("unknown", error={**error, "reason": reason})


def _timeout(policy: ExecutionPolicy) -> errors.AttemptTimeout:
    return errors.AttemptTimeout(f"the body still ran at its timeout of {policy.timeout or 0.0:g} s")


_RELEASED: Final[Mapping[str, str]] = {
    "shutdown": "its worker was asked to stop",
    "lease": "its worker could not renew its lease in time",
    "stale": "its worker had no slot for it in time, or had lost sight of it",
    "stopped": "its worker had to stop for a body that could not be stopped",
}


def released(reason: ReleaseReason, body_started: bool) -> dict[str, Any]:
    """What the record says about an attempt that was handed back."""
    before = "after its body had started" if body_started else "before its body started"
    return {
        "type": "Released",
        "message": f"handed back {before}: {_RELEASED[reason]}",
        "body_started": body_started,
        "reason": reason,
    }


def _misfit(claim: Claim, policy: ExecutionPolicy, error: dict[str, Any]) -> Disposition:
    """No body has run, and in a deploy another worker may have the version that the arguments fit: wait for it."""
    waits = min(len(MISFIT_DELAYS), policy.max_retry_afters)
    if claim.retry_afters >= waits:
        return Disposition("failed", error=error)
    return Disposition("retry_after", error=error, delay=MISFIT_DELAYS[claim.retry_afters])


def _failure(claim: Claim, policy: ExecutionPolicy, exc: BaseException) -> Disposition:
    may_retry = claim.attempt + 1 < claim.max_attempts and policy.retry.retries(exc)
    return _charged(claim, policy, errors.describe(exc), may_retry)


def _charged(claim: Claim, policy: ExecutionPolicy, error: dict[str, Any], may_retry: bool) -> Disposition:
    used = claim.attempt + 1
    if used >= claim.max_attempts or not may_retry:
        return Disposition("failed", error=error)
    return Disposition("retry", error=error, delay=policy.retry.backoff.delay(used, random.random()))


def of_suspended(end: BodyEnd, keys: Sequence[Key]) -> BodyEnd:
    """How a body has ended that ``ctx.sleep``, ``ctx.wait_for`` or ``ctx.child`` had suspended, by these steps."""
    match end:
        case Raised(exc) if is_suspension(exc):
            return Suspends(tuple(keys))
        case Returned():
            return Raised(
                errors.SuspensionSwallowed(
                    f"the body returned although it was suspended ({_waits_for(keys)['message']}): it has caught "
                    "taskq.outcomes.Suspended. Catch Exception, never BaseException, or raise what was caught again"
                )
            )
    return end


def _waits_for(keys: Sequence[Key]) -> dict[str, Any]:
    words = {"sleep": "sleep", "wait": "signal", "child": "child"}
    return {
        "type": "Suspended",
        "message": ", ".join(f"{words[key.kind]} {key}" for key in keys),
        "for": [key._asdict() for key in keys],
    }


def _reason(later: RetryAfter | Snooze) -> dict[str, Any]:
    return {"type": type(later).__name__, "message": errors.describe(later)["message"], "delay": later.delay}

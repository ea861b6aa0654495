"""What is told of claims and ends: the events of ``taskq.telemetry.events``, and the worker's counts.

What goes well is told at level debug alone, and costs a look at the level otherwise: no job of its own makes a line in
the log of a worker at its usual level.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from taskq.errors import OutcomeNotProven
from taskq.reconcile_hooks import asked_by, is_hook
from taskq.steps import Key
from taskq.telemetry import get_logger
from taskq.worker.claims import Claim, Counts, End
from taskq.worker.complete import Outbox, make_end
from taskq.worker.disposition import Disposition, NotPrepared, ReleaseReason

log = get_logger("worker")
_levels: Final = logging.getLogger("taskq.worker")


def report(counts: Counts, claim: Claim, decided: Disposition) -> None:
    """Count an end, and tell of it.

    What the database makes of it may differ: after a cancel request all but a success ends the job as cancelled.
    """
    outcome = decided.outcome
    if outcome == "succeeded":
        counts.succeeded += 1
        if _levels.isEnabledFor(logging.DEBUG):
            of_attempt = _about(claim, decided)
            log.debug("job.succeeded", **of_attempt)
        return
    error = decided.error or {}
    if outcome == "suspend":
        counts.suspended += 1
        if _levels.isEnabledFor(logging.DEBUG):
            of_attempt = _about(claim, decided)
            log.debug("job.suspended", **of_attempt, waits_for=error.get("message"))
        return
    of_attempt = _about(claim, decided)
    said = {} if decided.error is None else {"error": f"{error.get('type')}: {error.get('message')}"}
    if outcome in ("failed", "retry_after_spent", "snooze_spent"):
        counts.failed += 1
        log.error("job.failed", **of_attempt, error_type=error.get("type"), **said)
        if is_hook(claim.task):
            log.error("reconcile.exhausted", **_asked(claim), reconcile_job=claim.job_id, **said)
    elif outcome == "cancelled":
        counts.cancelled += 1
        log.info("job.cancelled", **of_attempt)
    elif outcome == "unknown":
        counts.unknown += 1
        if error.get("reason") == "not_confirmed" and claim.effect_started_at is None:
            log.error("job.effect_start_not_proven", **of_attempt, **said)
        else:
            log.warning("job.unknown", **of_attempt, reason=error.get("reason"), **said)
    elif outcome == "release":
        counts.released += 1
        reason = error.get("reason")
        if error.get("body_started"):
            log.info("job.released", **of_attempt, reason=reason)
        else:
            log.debug("job.handed_back", **of_attempt, reason=reason)
    else:
        counts.retried += 1
        again_in = round(decided.delay, 3)
        log.warning(f"job.{outcome}", **of_attempt, error_type=error.get("type"), again_in=again_in, **said)


def keep_end(outbox: Outbox, counts: Counts, claim: Claim, decided: Disposition) -> None:
    """Keep the end of an attempt, and report it: at once, or where it started an effect once its record proves it.

    Told to be unknown twice, an attempt is told once; what its body says afterwards comes behind that.
    """
    if decided.outcome == "unknown":
        if claim.is_unknown:
            return
        claim.is_unknown = True
    end = make_end(claim, decided)
    if claim.effect_started_at is not None:
        end.on_proven = lambda proven: report(counts, claim, _as_sent(decided, proven))
    # Kept before it is told: whatever telling does, the body is not run again.
    outbox.put(end)
    if end.on_proven is None:
        report(counts, claim, decided)


def _as_sent(decided: Disposition, end: End) -> Disposition:
    if not end.minimal:
        return decided
    return Disposition(end.outcome, error=json.loads(end.error or "{}"))


def not_proven(counts: Counts, end: End, exc: OutcomeNotProven) -> None:
    """Count and tell of an end that was answered as applied, while the record does not say so."""
    counts.not_proven += 1
    log.error(
        "job.outcome_not_proven",
        job_id=end.job_id,
        task=end.task,
        claim_epoch=end.claim_epoch,
        outcome=end.outcome,
        reason=exc.reason,
        error=str(exc),
    )


def after_commit(attempt: Claim | End, body: str) -> None:
    """Tell of what came after an attempt had ended in its body's own transaction, and had no effect."""
    log.warning(
        "job.after_commit", job_id=attempt.job_id, task=attempt.task, claim_epoch=attempt.claim_epoch, body=body
    )


def steps_left(claim: Claim, left: Iterable[Key]) -> None:
    """Tell of recorded steps that a body which has returned did not ask for, such as those of a name it has no more."""
    log.warning(
        "job.steps_left",
        job_id=claim.job_id,
        task=claim.task,
        claim_epoch=claim.claim_epoch,
        steps=", ".join(map(str, left)),
    )


def fenced_out(counts: Counts, claim: Claim) -> None:
    """Count and tell of an attempt that was another's before its body was called."""
    counts.fenced_out += 1
    log.warning(
        "job.fenced_out",
        job_id=claim.job_id,
        task=claim.task,
        claim_epoch=claim.claim_epoch,
        outcome=None,
        on_record=None,
    )


def not_prepared(counts: Counts, claim: Claim, end: NotPrepared) -> None:
    """Count and tell of a claim that its preparation has kept from the attempt, and the database has taken back."""
    counts.released += 1
    tell = log.info if end.became in ("released", "ended") else log.warning
    tell(
        "job.not_prepared",
        **_of_job(claim),
        worker_id=claim.worker_id,
        answer=end.answer,
        became=end.became,
        incident=end.incident,
        why=end.why,
    )


def claimed(claims: Iterable[Claim]) -> None:
    """Tell of claims, at level debug; ``waited`` is for how many seconds each had been due."""
    if _levels.isEnabledFor(logging.DEBUG):
        for claim in claims:
            of_job = _of_job(claim)
            waited = round((claim.claimed_at - claim.run_at).total_seconds(), 3)
            log.debug("job.claimed", **of_job, worker_id=claim.worker_id, waited=waited)


def handed_back(claim: Claim, reason: ReleaseReason) -> None:
    """Tell of a claim that is released before its body has started, at level debug."""
    if _levels.isEnabledFor(logging.DEBUG):
        of_attempt = _about(claim, Disposition("release"))
        log.debug("job.handed_back", **of_attempt, reason=reason)


def _of_job(claim: Claim) -> dict[str, Any]:
    return {
        "job_id": claim.job_id,
        "task": claim.task,
        "queue": claim.queue,
        "claim_epoch": claim.claim_epoch,
        "attempt": claim.attempt + 1,
    }


def _asked(claim: Claim) -> dict[str, Any]:
    """The attempt that the job of a hook asks about."""
    task, step = asked_by(claim.task)
    with suppress(ValueError):
        told = json.loads(claim.payload)
        return {"job_id": told.get("job_id"), "task": task, "claim_epoch": told.get("claim_epoch"), "step": step}
    return {"job_id": None, "task": task, "claim_epoch": None, "step": step}


def _about(claim: Claim, decided: Disposition) -> dict[str, Any]:
    seconds = asyncio.get_running_loop().time() - claim.started if claim.started else None
    return {
        **_of_job(claim),
        "worker_id": claim.worker_id,
        "outcome": decided.outcome,
        "seconds": None if seconds is None else round(seconds, 6),
    }

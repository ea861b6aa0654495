"""What is told of an end: one event for each that is not a success, and the worker's counts. Nothing for a success."""

from __future__ import annotations

from taskq.telemetry import get_logger
from taskq.worker.claims import Claim, Counts
from taskq.worker.disposition import Disposition

log = get_logger("worker")


def report(counts: Counts, claim: Claim, decided: Disposition) -> None:
    """Count an end, and tell of it unless it is a success.

    What the database makes of it may differ: after a cancel request all but a success ends the job as cancelled.
    """
    outcome = decided.outcome
    if outcome == "succeeded":
        counts.succeeded += 1
        return
    about = {"job_id": claim.job_id, "task": claim.task, "claim_epoch": claim.claim_epoch}
    error = decided.error
    said = {} if error is None else {"error": f"{error.get('type')}: {error.get('message')}"}
    if outcome in ("failed", "retry_after_spent", "snooze_spent"):
        counts.failed += 1
        log.error("job.failed", **about, attempt=claim.attempt + 1, **said)
    elif outcome == "cancelled":
        counts.cancelled += 1
        log.info("job.cancelled", **about)
    elif outcome == "release":
        counts.released += 1
        log.info("job.released", **about)
    else:
        counts.retried += 1
        log.warning(f"job.{outcome}", **about, attempt=claim.attempt + 1, again_in=round(decided.delay, 3), **said)

"""Which log event tells of which transition of a job, and what each of them says.

``taskq.transitions`` lists what may happen to a job; here stands, for each transition that a worker or a leader carries
out, the event by which it is told. Clients and operators leave rows in ``audit`` instead. A worker tells what it has
decided when a body has ended; the database may make something else of it (after a cancel request all but a success
ends a job as cancelled; a wait that would pass the deadline fails it), and ``taskq jobs show`` has the record.
"""

from __future__ import annotations

from typing import Final

from taskq.transitions import TRANSITIONS, Transition

__all__ = ["OF_ATTEMPT", "OF_JOB", "events_of", "told"]

OF_JOB: Final = ("job_id", "task", "queue", "claim_epoch", "attempt")
"""Fields of every event about a transition; ``attempt`` is the attempt's number, from 1."""
OF_ATTEMPT: Final = (*OF_JOB, "worker_id", "outcome", "seconds")
"""Fields of every event about an attempt that its worker has ended: besides, how, and how long the body ran; with
``error_type`` and ``error`` where there was an error."""

_BACK: Final = {
    "failed": ("job.retry",),
    "retry_after": ("job.retry_after",),
    "snoozed": ("job.snooze",),
    "suspended": ("job.suspended",),
    "released": ("job.released", "job.handed_back"),
}


def events_of(transition: Transition) -> tuple[str, ...]:
    """The names of the events that tell of a transition: one, or two that tell its cases apart.

    Empty for what no worker and no leader does.
    """
    match transition.function:
        case "claim" | "claim_suspect":
            return ("job.claimed",)
        case "settle_lost" | "hold_exhausted":
            return ("job.settled",)
        case "sweep":
            return ("job.expired",)
        case "answer_reconcile":
            return ("job.resolved",)
        case "end_preparation":
            return ("job.not_prepared",)
        case "end_step":
            return ("job.step_told_late",)
        case "end_attempts" if transition.target in ("pending", "held"):
            return _BACK[transition.outcome or ""]
        case "end_attempts" if transition.outcome == "suspended":
            return _BACK["suspended"]
        case "end_attempts":
            return (f"job.{transition.target}",)
    return ()


def told() -> frozenset[str]:
    """The names of all these events."""
    return frozenset(name for transition in TRANSITIONS for name in events_of(transition))

"""The life of a job as one table: every transition that exists, who makes it, and what it leaves on record.

The triggers in ``migrations/00.01.00_03_pre_laws.sql`` refuse what is not listed here, for any role;
``tests/test_transitions.py`` compares the two, pair by pair. ``docs/laws.md`` shows the same list to people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

__all__ = ["FINISHED", "LIVE", "TRANSITIONS", "Status", "Transition", "exists", "refusal"]

Status: TypeAlias = Literal["pending", "running", "held", "unknown", "succeeded", "failed", "cancelled"]
LIVE: Final[tuple[Status, ...]] = ("pending", "running", "held", "unknown")
"""Statuses of jobs that stand in ``jobs``."""
FINISHED: Final[tuple[Status, ...]] = ("succeeded", "failed", "cancelled")
"""Statuses of jobs that stand in ``history``."""


@dataclass(frozen=True, slots=True)
class Transition:
    """One way from a status to another.

    Attributes:
        source: The status before; None for a job that is born.
        target: The status after.
        by: Who may: ``client``, ``worker`` (under its fence), ``leader`` (a sweep) or ``operator``.
        function: The SQL function that does it; None where no function does yet.
        outcome: What the record says about the attempt that ends with it; None where none ends.
        counter: The column that it raises by one, or None.
        when: What makes it happen, in a few words.
    """

    source: Status | None
    target: Status
    by: Literal["client", "worker", "leader", "operator"]
    function: str | None
    outcome: str | None
    counter: str | None
    when: str


_T = Transition
TRANSITIONS: Final[tuple[Transition, ...]] = (
    _T(None, "pending", "client", "enqueue_many", None, None, "enqueued"),
    _T(None, "held", "client", "enqueue_many", None, None, "enqueued with an ordering key"),
    _T("pending", "running", "worker", "claim", None, "claim_epoch", "claimed"),
    _T("pending", "running", "worker", "claim_suspect", None, "claim_epoch", "claimed alone, after two lost workers"),
    _T("pending", "held", "worker", None, None, None, "must wait for a signal, a limit or its order"),
    _T("pending", "held", "operator", "pause_run", None, None, "its run was paused"),
    _T("pending", "cancelled", "operator", "cancel", None, None, "cancelled before it started"),
    _T("pending", "failed", "leader", "sweep", None, None, "its deadline passed, or its attempts are used up"),
    _T(
        "held",
        "pending",
        "worker",
        None,
        None,
        None,
        "what it waited for has come, such as its turn, its time, a child's end",
    ),
    _T("held", "pending", "client", "send_signal", None, None, "the signal that it waited for was sent"),
    _T("held", "pending", "client", "send_run_signal", None, None, "its run was sent the signal that it waited for"),
    _T("held", "pending", "operator", "resume_run", None, None, "its run, which was paused, goes on"),
    _T("held", "pending", "operator", "grant_recovery", None, None, "its incident was granted one more recovery"),
    _T("held", "cancelled", "operator", "cancel", None, None, "cancelled while it waited"),
    _T("held", "failed", "leader", "sweep", None, None, "its deadline passed"),
    _T("running", "succeeded", "worker", "end_attempts", "succeeded", None, "the body returned"),
    _T("running", "failed", "worker", "end_attempts", "failed", "attempt", "the body failed, and is not tried again"),
    _T(
        "running",
        "failed",
        "worker",
        "end_attempts",
        "retry_after",
        "retry_afters",
        "waited past its deadline or bound",
    ),
    _T("running", "failed", "worker", "end_attempts", "snoozed", "snoozes", "snoozed past its deadline or bound"),
    _T("running", "failed", "worker", "end_attempts", "suspended", None, "sleeps past its deadline"),
    _T("running", "failed", "leader", "settle_lost", "lost", "recoveries", "its worker is lost once too often"),
    _T(
        "running", "cancelled", "worker", "end_attempts", "cancelled", None, "ended otherwise than well after a request"
    ),
    _T(
        "running",
        "cancelled",
        "leader",
        "settle_lost",
        "lost",
        None,
        "pure or not begun, its worker is lost after a request",
    ),
    _T("running", "pending", "worker", "end_attempts", "failed", "attempt", "the body failed, and is tried again"),
    _T("running", "pending", "worker", "end_attempts", "retry_after", "retry_afters", "the body raised RetryAfter"),
    _T("running", "pending", "worker", "end_attempts", "snoozed", "snoozes", "the body raised Snooze"),
    _T(
        "running",
        "pending",
        "worker",
        "end_attempts",
        "suspended",
        None,
        "sleeps, or what it waits for came just now",
    ),
    _T("running", "pending", "worker", "end_attempts", "released", "releases", "its worker stops and hands it back"),
    _T(
        "running",
        "pending",
        "worker",
        "end_preparation",
        "released",
        "releases",
        "its preparation failed, or it was not met",
    ),
    _T("running", "held", "worker", "end_preparation", "released", "releases", "not prepared: an incident, or a pause"),
    _T("running", "cancelled", "worker", "end_preparation", "cancelled", None, "not prepared, after a request"),
    _T("running", "pending", "leader", "settle_lost", "lost", "recoveries", "its worker is lost"),
    _T("running", "held", "worker", "end_attempts", "failed", "attempt", "tried again, out of its line or in a pause"),
    _T(
        "running",
        "held",
        "worker",
        "end_attempts",
        "retry_after",
        "retry_afters",
        "waits, out of its line or in a pause",
    ),
    _T("running", "held", "worker", "end_attempts", "snoozed", "snoozes", "snoozes, out of its line or in a pause"),
    _T(
        "running",
        "held",
        "worker",
        "end_attempts",
        "suspended",
        None,
        "waits for a signal or child, or sleeps out of line, or in a pause",
    ),
    _T(
        "running",
        "held",
        "worker",
        "end_attempts",
        "released",
        "releases",
        "handed back, to start later in its line or after a pause",
    ),
    _T("running", "held", "leader", "settle_lost", "lost", "recoveries", "its worker is lost, and its run paused"),
    _T(
        "running",
        "held",
        "leader",
        "hold_exhausted",
        "lost",
        "recoveries",
        "its worker is lost once too often, and it is held",
    ),
    _T(
        "running",
        "unknown",
        "leader",
        "settle_lost",
        None,
        None,
        "its worker is lost, and its effect may have happened",
    ),
    _T("running", "unknown", "worker", "end_attempts", None, None, "its effect may have happened, and nobody knows"),
    _T("unknown", "succeeded", "worker", "end_attempts", "succeeded", None, "its own late end"),
    _T("unknown", "succeeded", "operator", "resolve", "resolved", None, "decided: it happened"),
    _T("unknown", "succeeded", "worker", "answer_reconcile", "resolved", None, "its reconcile hook says: it happened"),
    _T("unknown", "failed", "worker", "end_attempts", "failed", "attempt", "its own late end"),
    _T("unknown", "cancelled", "worker", "end_attempts", "cancelled", None, "its own late end, after a request"),
    _T(
        "unknown", "cancelled", "operator", "resolve", "resolved", None, "decided: it did not happen, and was cancelled"
    ),
    _T(
        "unknown",
        "failed",
        "worker",
        "end_attempts",
        "retry_after",
        "retry_afters",
        "its own late end past the deadline",
    ),
    _T("unknown", "failed", "worker", "end_attempts", "snoozed", "snoozes", "its own late end past the deadline"),
    _T("unknown", "pending", "worker", "end_attempts", "failed", "attempt", "its own late end: the body failed"),
    _T("unknown", "pending", "worker", "end_attempts", "retry_after", "retry_afters", "its own late end: RetryAfter"),
    _T("unknown", "pending", "worker", "end_attempts", "snoozed", "snoozes", "its own late end: Snooze"),
    _T("unknown", "pending", "worker", "end_attempts", "released", "releases", "its own late end: handed back"),
    _T(
        "unknown",
        "pending",
        "operator",
        "resolve",
        "resolved",
        "recoveries",
        "decided: it did not, or of its step what became of it",
    ),
    _T("unknown", "pending", "worker", "end_step", "resolved", "recoveries", "what became of its step, told late"),
    _T(
        "unknown",
        "cancelled",
        "worker",
        "answer_reconcile",
        "resolved",
        None,
        "its hook: it did not, or of its step what became of it; was cancelled",
    ),
    _T("unknown", "cancelled", "worker", "end_step", "resolved", None, "its step was told late, after a request"),
    _T(
        "unknown",
        "pending",
        "worker",
        "answer_reconcile",
        "resolved",
        "recoveries",
        "its hook says: it did not happen, or of its step what became of it",
    ),
    _T(
        "unknown",
        "failed",
        "worker",
        "answer_reconcile",
        "resolved",
        "recoveries",
        "its hook: it did not, once too often or past its deadline",
    ),
    _T(
        "unknown",
        "held",
        "worker",
        "end_attempts",
        "failed",
        "attempt",
        "its own late end, back in its line, or in a pause",
    ),
    _T(
        "unknown",
        "held",
        "worker",
        "end_attempts",
        "retry_after",
        "retry_afters",
        "its own late end, back in line, or in a pause",
    ),
    _T(
        "unknown",
        "held",
        "worker",
        "end_attempts",
        "snoozed",
        "snoozes",
        "its own late end, back in its line, or in a pause",
    ),
    _T(
        "unknown",
        "held",
        "worker",
        "end_attempts",
        "released",
        "releases",
        "its own late end, back in its line, or in a pause",
    ),
    _T(
        "unknown",
        "held",
        "operator",
        "resolve",
        "resolved",
        "recoveries",
        "decided: it did not; back in its line, or in a pause",
    ),
    _T(
        "unknown",
        "held",
        "worker",
        "end_step",
        "resolved",
        "recoveries",
        "its step was told late; back in its line, or in a pause",
    ),
    _T(
        "unknown",
        "held",
        "worker",
        "answer_reconcile",
        "resolved",
        "recoveries",
        "its hook: it did not, or of its step what became of it; back in line, or in a pause",
    ),
    _T("failed", "pending", "operator", "retry", None, "generation", "reopened"),
    _T("failed", "held", "operator", "retry", None, "generation", "reopened, back in its line"),
    _T("cancelled", "pending", "operator", "retry", None, "generation", "reopened"),
    _T("cancelled", "held", "operator", "retry", None, "generation", "reopened, back in its line"),
)

_PAIRS: Final = frozenset((t.source, t.target) for t in TRANSITIONS)


def exists(source: Status | None, target: Status) -> bool:
    """Whether there is any transition from one status to the other."""
    return (source, target) in _PAIRS


def refusal(source: Status | None, target: Status) -> str | None:
    """The SQLSTATE with which a trigger refuses to go from one status to the other; None if it does not.

    A finished job is never rewritten (WF004); every other way that is not listed does not exist (WF003). The functions
    look before, and say what is the matter: ``taskq.retry`` answers WF012 for a job that has succeeded.
    """
    if exists(source, target) or source == target:
        return None
    return "WF004" if source in FINISHED and target in FINISHED else "WF003"

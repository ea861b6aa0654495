"""What the database's answers must prove before the worker acts on them: claims, effect starts, and ends.

Pure functions on what was asked and what was answered. An answer that does not fit leads to no body, no success and no
repetition by itself: what the database holds then is for the fence, for ``settle_lost`` and for people to decide.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from taskq.errors import ClaimNotProven, EffectStartNotProven, OutcomeNotProven
from taskq.tasks import Task
from taskq.worker.claims import Claim, End

if TYPE_CHECKING:
    from taskq.context import JobContext
    from taskq.steps import Key

SAME: Final = (
    "task",
    "queue",
    "priority",
    "run_at",
    "policy_id",
    "attempt",
    "max_attempts",
    "recoveries",
    "retry_afters",
    "snoozes",
    "releases",
    "generation",
    "key_generation",
    "cohort",
    "deadline",
    "claimed_at",
)
"""What the answer to an effect start repeats of the claim, word for word."""
Start = Literal["started", "cancelled", "fenced_out", "no_lease"]
"""What an effect start came to: the body may be called; a cancel request came first; the attempt is another's; nothing
was started, since the database says that the worker's lease does not hold."""

_ON_RECORD: Final[Mapping[str, frozenset[str]]] = {
    "succeeded": frozenset({"succeeded"}),
    # A cancel request turns all but a success into cancelled; without one there is nothing to be cancelled.
    "failed": frozenset({"failed", "cancelled"}),
    "cancelled": frozenset({"failed", "cancelled"}),
    "retry": frozenset({"failed", "cancelled"}),
    "retry_after": frozenset({"retry_after", "cancelled"}),
    "retry_after_spent": frozenset({"retry_after", "cancelled"}),
    "snooze": frozenset({"snoozed", "cancelled"}),
    "snooze_spent": frozenset({"snoozed", "cancelled"}),
    "suspend": frozenset({"suspended", "cancelled"}),
}


def prove_claim(claim: Claim, task: Task[..., Any] | None) -> None:
    """A claim must be of a task that this worker knows, within its bounds, and of the class that its code declares.

    Args:
        claim: What was answered.
        task: The task of that name, if there is one here.

    Raises:
        ClaimNotProven: It is not; the body must not be called.
    """
    if task is None:
        raise _claim(claim, "unknown_task", f"this worker has no task {claim.task}")
    if claim.claim_epoch < 1:
        raise _claim(claim, "epoch", f"its claim epoch is {claim.claim_epoch}, and a claim raises it to 1 at least")
    if not 0 <= claim.attempt < claim.max_attempts:
        raise _claim(claim, "attempt", f"{claim.attempt} of its {claim.max_attempts} attempts are used up")
    declared = task.policy.effect_class
    if claim.effect_class != declared:
        raise _claim(
            claim,
            "effect_class",
            f"it was enqueued as {claim.effect_class}, and the code here declares {claim.task} {declared}; it waits "
            "for a worker whose code fits, or until it is cancelled",
        )


def _claim(claim: Claim, reason: str, why: str) -> ClaimNotProven:
    return ClaimNotProven(f"job {claim.job_id} is not run here: {why}", reason)


def prove_start(claim: Claim, row: Mapping[str, Any] | None) -> Start:
    """The body may be called only if the whole answer fits: this attempt runs here, its effect start is set.

    Args:
        claim: The attempt.
        row: The row of ``start_effects`` that answers for it; None where there is none.

    Returns:
        What it came to; ``started`` is the only word after which the body may be called.

    Raises:
        EffectStartNotProven: The answer fits neither a start nor one of the plain refusals.
    """
    if row is None:
        raise EffectStartNotProven(f"nothing was answered about the effect start of job {claim.job_id}", "no_answer")
    if row["job_id"] is None:
        return "fenced_out"
    if row["job_id"] != claim.job_id:
        raise _start(claim, "job_id")
    if (row["claim_epoch"], row["claimed_by"]) != (claim.claim_epoch, claim.worker_id):
        return "fenced_out"
    expected: dict[str, Any] = {
        "status": "running",
        "effect_class": "side_effecting",
        "payload_sha256": _sha256(claim.payload),
        "meta_sha256": _sha256(claim.meta),
        **{name: getattr(claim, name) for name in SAME},
    }
    for name, value in expected.items():
        if row[name] != value:
            raise _start(claim, name)
    if row["cancel_requested_at"] is not None:
        return "cancelled"
    if row["effect_started_at"] is None and not row["lease_holds"]:
        return "no_lease"
    if not isinstance(row["effect_started_at"], datetime):
        raise _start(claim, "effect_started_at")
    if not row["lease_holds"]:
        raise _start(claim, "lease_holds")
    return "started"


def prove_step_start(ctx: JobContext, key: Key, row: Mapping[str, Any]) -> None:
    """The answer that allows a step to start its effect must be about that step of that attempt.

    Args:
        ctx: The attempt.
        key: The step.
        row: The row of ``start_step``, which said ``started``.

    Raises:
        EffectStartNotProven: It is about something else, or has no start.
    """
    expected = {
        "job_id": ctx.job_id,
        "claim_epoch": ctx.claim_epoch,
        "claimed_by": ctx.worker_id,
        "name": key.name,
        "occurrence": key.occurrence,
    }
    wrong = [name for name, value in expected.items() if row[name] != value]
    if not isinstance(row["effect_started_at"], datetime):
        wrong.append("effect_started_at")
    if wrong:
        raise EffectStartNotProven(
            f"the answer to the effect start of step {key} of job {ctx.job_id} differs in {wrong[0]} from what was "
            "asked; its function was not called",
            wrong[0],
        )


def _start(claim: Claim, field: str) -> EffectStartNotProven:
    return EffectStartNotProven(
        f"the answer to the effect start of job {claim.job_id}, attempt {claim.claim_epoch}, differs in {field} from "
        "what was claimed; its body was not called",
        field,
    )


def _sha256(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def prove_end(end: End, records: Sequence[Mapping[str, Any]]) -> None:
    """The record of an attempt that started its effect must be what was sent, effect start and all.

    Args:
        end: What was sent and answered as applied.
        records: What stands on record of its job, as ``attempt_records`` gives it.

    Raises:
        OutcomeNotProven: It is not, or not there.
    """
    mine = [r for r in records if (r["job_id"], r["claim_epoch"]) == (end.job_id, end.claim_epoch)]
    if len(mine) != 1:
        raise _end(end, "records", f"{len(mine)} records are there of it")
    [record] = mine
    if record["worker_id"] != end.worker_id:
        raise _end(end, "worker_id", "another worker stands on record")
    if record["effect_started_at"] != end.effect_started_at:
        raise _end(end, "effect_started_at", "its effect start is not the one that was answered before its body")
    if end.outcome in ("unknown", "release"):
        # Somebody may have decided it by now: that is for the record, not for this worker.
        if not record["ended"] and record["outcome"] != "unknown":
            raise _end(end, "outcome", f"the job is {record['outcome']}")
        return
    if not record["ended"]:
        raise _end(end, "ended", f"the job is {record['outcome']}")
    if record["outcome_id"] != end.outcome_id:
        raise _end(end, "outcome_id", f"an outcome of somebody else stands on record: {record['outcome']}")
    if record["outcome"] not in _ON_RECORD[end.outcome]:
        raise _end(end, "outcome", f"it stands on record as {record['outcome']}")


def _end(end: End, field: str, why: str) -> OutcomeNotProven:
    return OutcomeNotProven(
        f"{end.outcome} was sent for job {end.job_id}, attempt {end.claim_epoch}, and answered as applied, but {why}",
        field,
    )

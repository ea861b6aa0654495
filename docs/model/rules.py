"""What one transaction does to one job: each function is a decision of the database on a locked row.

``None`` means that the fence did not match, or that there is nothing to do: nothing changes. The switches of ``Design``
are the rules that the search proves necessary: ``mutations`` turns each of them off.
"""

from __future__ import annotations

from dataclasses import dataclass

from .state import IDEMPOTENT, NOBODY, OPEN, PURE, SIDE_EFFECTING, Entry, Job, Owner


@dataclass(frozen=True)
class Design:
    """The rules that may be broken, one switch each; all true is the design."""

    fenced: bool = True
    """Ends and effect starts match worker and epoch."""
    ends_by_epoch: bool = True
    """Ends match the epoch, not the worker alone."""
    start_by_fence: bool = True
    """An effect start matches worker and epoch."""
    start_checks_cancel: bool = True
    """No effect starts after a cancel request."""
    start_is_recorded: bool = True
    """The effect start is committed before the body begins."""
    start_is_proven: bool = True
    """The body begins only if the answer to its effect start says that it may."""
    started_is_kept: bool = True
    """A started effect whose worker is lost is not run again by itself."""
    lost_is_not_cancelled: bool = True
    """A started effect whose worker is lost after a cancel request is not called cancelled."""
    running_is_told: bool = True
    """Cancelling a running job only asks."""
    started_is_not_interrupted: bool = True
    """A cancel does not interrupt a started side-effecting body."""
    handed_back_is_unknown: bool = True
    """A started effect that its worker hands back is not run again by itself."""
    timeout_is_unknown: bool = True
    """A body that runs past its timeout and cannot be stopped is unknown, not failed."""
    unknown_keeps_claim: bool = True
    """An unknown job is claimed by nobody else."""
    did_not_happen_is_final: bool = True
    """DidNotHappen is said only when it can no longer happen."""
    happened_is_seen: bool = True
    """Happened is said only when it has happened."""
    resolved_by_epoch: bool = True
    """A resolution names the attempt that it is about."""
    did_not_happen_is_bounded: bool = True
    """A hook's DidNotHappen runs the job again only as often as it may be recovered."""
    epoch_rises: bool = True
    """Every claim raises the epoch."""
    one_transaction: bool = True
    """A job leaves jobs and enters history at once."""
    settled_apart: bool = True
    """Lost claims are settled again and again, and a claim locks its worker's row."""
    key_of_the_job: bool = True
    """The provider gets the same key on every attempt."""
    loss_is_recorded: bool = True
    """A lost attempt leaves a row in the ledger."""


def claim(job: Job, owner: Owner, design: Design) -> Job | None:
    """``claim``: pending to running, with the next epoch."""
    if job.status != "pending" and (design.unknown_keeps_claim or job.status != "unknown"):
        return None
    epoch = job.epoch + 1
    if not design.epoch_rises and job.record and job.record[-1].outcome == "lost":
        epoch = job.epoch
    return job._replace(status="running", epoch=epoch, owner=owner, started=False)


def owned(job: Job, owner: Owner, epoch: int, design: Design) -> bool:
    """Whether an end by this attempt matches the fence of the open claim."""
    if job.status not in OPEN:
        return False
    if not design.fenced:
        return True
    return job.owner == owner and (job.epoch == epoch or not design.ends_by_epoch)


def start(job: Job, owner: Owner, epoch: int, lease_holds: bool, design: Design) -> Job | None:
    """``start_effects``: may this attempt start its effect? If so, that is on record from now on."""
    if design.start_by_fence and not (job.status == "running" and job.owner == owner and job.epoch == epoch):
        return None
    if design.start_by_fence and not lease_holds:
        return None
    if design.start_checks_cancel and job.cancel:
        return None
    return job._replace(started=True) if design.start_is_recorded else job


def back(job: Job, outcome: str, by: int, *, attempt: int = 0, recoveries: int = 0) -> Job:
    """To pending again, and the ended attempt goes on record."""
    return job._replace(
        status="pending",
        owner=NOBODY,
        started=False,
        attempt=job.attempt + attempt,
        recoveries=job.recoveries + recoveries,
        record=(*job.record, Entry(job.epoch, outcome, by)),
    )


def finish(job: Job, final: str, outcome: str, by: int, design: Design, *, attempt: int = 0) -> Job:
    """To history, with the final attempt."""
    return job._replace(
        status="" if design.one_transaction else job.status,
        final=final,
        owner=NOBODY if design.one_transaction else job.owner,
        attempt=job.attempt + attempt,
        record=(*job.record, Entry(job.epoch, outcome, by)),
    )


def end(job: Job, owner: Owner, epoch: int, says: str, max_attempts: int, design: Design) -> Job | None:
    """``end_attempts``: what a worker says of its attempt, under the fence."""
    if not owned(job, owner, epoch, design):
        return None
    if says == "unknown" or (says == "release" and is_kept(job) and design.handed_back_is_unknown):
        return enter_unknown(job)
    if says == "succeeded":
        return finish(job, "succeeded", "succeeded", epoch, design)
    if says == "interrupted":
        # The worker's word, not the body's: nobody knows how far it had got.
        return finish(job, "cancelled", "cancelled", 0, design)
    if job.cancel:
        return finish(job, "cancelled", "cancelled", epoch, design)
    match says:
        case "retry" if job.attempt + 1 < max_attempts:
            return back(job, "failed", epoch, attempt=1)
        case "retry" | "failed" | "cancelled":
            return finish(job, "failed", "failed", epoch, design, attempt=1)
        case "wait":
            return back(job, "waited", epoch)
        case "release":
            return back(job, "released", epoch)
    raise AssertionError(says)


def enter_unknown(job: Job) -> Job | None:
    """``enter_unknown``: running to unknown; the claim stays, so that its own late end still counts."""
    return job._replace(status="unknown") if job.status == "running" else None


def is_kept(job: Job) -> bool:
    """Whether the open attempt may have had an effect that must not be repeated."""
    return job.effect == SIDE_EFFECTING and job.started


def becomes_unknown(job: Job) -> bool:
    """Whether a running job whose worker is lost must not be run again, nor called cancelled."""
    return is_kept(job) or (job.effect == IDEMPOTENT and job.cancel)


def settle(job: Job, max_recoveries: int, design: Design) -> Job | None:
    """``settle_lost``: what becomes of a running job whose worker is lost."""
    if job.status != "running":
        return None
    if becomes_unknown(job) and design.started_is_kept and (design.lost_is_not_cancelled or not job.cancel):
        return enter_unknown(job)
    if job.cancel:
        return finish(job, "cancelled", "lost", 0, design)
    if job.recoveries + 1 > max_recoveries:
        return finish(job._replace(recoveries=job.recoveries + 1), "failed", "lost", 0, design)
    returned = back(job, "lost", 0, recoveries=1)
    return returned if design.loss_is_recorded else returned._replace(record=job.record)


def cancel(job: Job, design: Design) -> tuple[str, Job]:
    """``cancel``: its answer, and the job after it."""
    match job.status:
        case "pending":
            return "cancelled", job._replace(status="", final="cancelled", unattempted=True)
        case "running" if design.running_is_told:
            return "requested", job._replace(cancel=True)
        case "running":
            return "cancelled", finish(job._replace(cancel=True), "cancelled", "cancelled", 0, design)
        case "unknown":
            return "unknown", job
    return ("finished" if job.final else "not_found"), job


def reopen(job: Job) -> Job | None:
    """``retry`` of a finished job: fresh counters, the next generation, the same epoch and record."""
    if job.final not in ("failed", "cancelled"):
        return None
    return job._replace(
        status="pending",
        final="",
        started=False,
        cancel=False,
        attempt=0,
        recoveries=0,
        generation=job.generation + 1,
        unattempted=False,
    )


def resolve(job: Job, epoch: int, happened: bool, design: Design, max_recoveries: int, *, operator: bool) -> Job | None:
    """``resolve_attempt`` and ``answer_reconcile``: what became of an unknown attempt, once."""
    if job.status != "unknown" or (job.epoch != epoch and design.resolved_by_epoch):
        return None
    if happened:
        return finish(job, "succeeded", "happened", 0, design)
    if job.cancel:
        return finish(job, "cancelled", "did_not_happen", 0, design)
    if not operator and job.recoveries + 1 > max_recoveries and design.did_not_happen_is_bounded:
        return finish(job._replace(recoveries=job.recoveries + 1), "failed", "did_not_happen", 0, design)
    return back(job, "did_not_happen", 0, recoveries=1)


def must_be_proven(job: Job) -> bool:
    """Whether a body of this job may begin only after its effect start."""
    return job.effect == SIDE_EFFECTING


def may_be_interrupted(job: Job, begun: bool) -> bool:
    """Whether the worker may stop this body for a cancel, a shutdown or a lost lease."""
    return job.effect in (PURE, IDEMPOTENT) or not begun

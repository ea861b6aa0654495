"""What can no longer matter is left out of a state, so that the states that are left are few.

Each rule drops a difference that no later step and no property can see: words that the fence will refuse whatever
happens, attempts long on record, numbers that only count. Properties are checked before anything is dropped. A design
whose fences are broken is searched unreduced: there the old words do matter.
"""

from __future__ import annotations

from .configs import Config
from .rules import Design
from .state import IDEMPOTENT, NOBODY, PURE, SIDE_EFFECTING, Attempt, Case, Entry, Job, Provider, State, Verdict, Worker


def is_reducible(design: Design) -> bool:
    """Whether the rules hold that make old words harmless."""
    return (
        design.fenced
        and design.ends_by_epoch
        and design.start_by_fence
        and design.epoch_rises
        and design.one_transaction
        and design.unknown_keeps_claim
        and design.loss_is_recorded
        and design.key_of_the_job
        and design.settled_apart
    )


def reduced(state: State, config: Config) -> State:
    """The same state without what can no longer matter."""
    attempts = [kept for a in state.attempts if (kept := _kept(a, state.cases[a.job], config))]
    cases = list(state.cases)
    for n, case in enumerate(cases):
        if case.job.epoch:
            cases[n], attempts = _case(n, case, attempts, state, config)
    workers = list(state.workers)
    for slot, worker in enumerate(workers):
        owners = {c.job.owner for c in cases if c.job.owner[0] == slot} | {
            a.owner for a in attempts if a.owner[0] == slot
        }
        used = sorted({o[1] for o in owners})
        if worker.registration not in used:
            worker = Worker(True, worker.registration, "live")  # noqa: PLW2901
            used.append(worker.registration)
        to = {old: new for new, old in enumerate(used, 1)}
        workers[slot] = worker._replace(registration=len(used))
        if any(old != new for old, new in to.items()):
            attempts = [a._replace(owner=(slot, to[a.owner[1]])) if a.owner[0] == slot else a for a in attempts]
            for n, case in enumerate(cases):
                if case.job.owner[0] == slot:
                    job = case.job._replace(owner=(slot, to[case.job.owner[1]]))
                    cases[n] = case._replace(job=job)
    return state._replace(cases=tuple(cases), workers=tuple(workers), attempts=tuple(sorted(attempts)))


def _kept(a: Attempt, case: Case, config: Config) -> Attempt | None:
    """What of this attempt can still change anything."""
    job, (journal, closed) = case.job, case.provider
    if job.status in ("running", "unknown") and job.owner == a.owner and job.epoch == a.epoch:
        return a
    # Fenced out for good: only an effect that it has not had yet is left to it.
    if a.did or job.effect == PURE or a.epoch <= closed or a.phase in ("telling", "stray"):
        return None
    if config.keys and journal:
        return None
    if job.effect == IDEMPOTENT:
        return a._replace(phase="body")
    return a if a.phase != "claimed" else None


def _case(n: int, case: Case, attempts: list[Attempt], state: State, config: Config) -> tuple[Case, list[Attempt]]:
    job, (journal, closed), verdicts = case
    mine = [a for a in attempts if a.job == n]
    if job.final and not mine and (job.final == "succeeded" or not state.orders):
        return _done(job.effect), attempts
    if config.design.resolved_by_epoch:
        verdicts = tuple(v for v in verdicts if job.status == "unknown" and v.epoch == job.epoch)
    # Ended attempts that nobody holds any more are neither told apart nor counted; only a finished job's last one is.
    held = min((*(a.epoch for a in mine), *(v.epoch for v in verdicts)), default=job.epoch + 1)
    ended = job.record[:-1] if job.final and not job.unattempted else job.record
    past = sum(1 for e in ended if e.epoch < held)
    if past:
        job = job._replace(
            epoch=job.epoch - past,
            record=tuple(Entry(e.epoch - past, e.outcome, max(e.by - past, 0)) for e in job.record[past:]),
        )
        verdicts = tuple(Verdict(v.epoch - past, v.happened, v.operator) for v in verdicts)
        journal = tuple((max(epoch - past, 0), key) for epoch, key in journal)
        closed = max(closed - past, 0)
        attempts = [a._replace(epoch=a.epoch - past) if a.job == n else a for a in attempts]
    if job.effect != SIDE_EFFECTING or config.keys:
        job = job._replace(generation=0)
    if job.effect == IDEMPOTENT and not config.keys:
        journal = tuple(sorted(set(journal)))
    return Case(job, Provider(journal, closed), verdicts), attempts


def _done(effect: str) -> Case:
    """A job that has ended for good, however it did."""
    job = Job(effect, final="succeeded", epoch=1, owner=NOBODY, record=(Entry(1, "succeeded", 1),))
    return Case(job, Provider(((1, 0),)))

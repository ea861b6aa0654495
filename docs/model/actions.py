"""Who may do what next. Every step is one transaction, one message or one act of a body; any order of them is searched.

A worker that is slow, frozen or cut off simply does not take its steps while others take theirs, and acts on what it
knew when it takes them at last; a lease can run out at any time. A step that is not ``fair`` is a fault of the world,
or an order that nobody need give: progress must not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from . import rules
from .configs import Config
from .state import NOBODY, PURE, SIDE_EFFECTING, Attempt, Case, Job, Owner, Provider, State, Verdict, Worker


class Step(NamedTuple):
    """What happens, in words; the state after it; whether it happens some time if nothing hinders it."""

    what: str
    state: State
    fair: bool = True


def steps(state: State, config: Config) -> Iterator[Step]:
    """Every step that is possible in this state."""
    for n, case in enumerate(state.cases):
        yield from _client(state, n, case)
        yield from _operator(state, n, case, config)
        yield from _reconcile(state, n, case, config)
        yield from _leader(state, n, case, config)
    for slot, worker in enumerate(state.workers):
        yield from _process(state, slot, worker, config)
        yield from _claims(state, slot, worker, config)
    for n in range(len(state.attempts)):
        yield from _attempt(state, n, config)


# Clients, operators, the reconcile job --------------------------------------------------------------------------------


def _client(state: State, n: int, case: Case) -> Iterator[Step]:
    if not case.job.status and not case.job.final:
        yield Step(f"job {n} is enqueued", _job(state, n, case.job._replace(status="pending")))


def _operator(state: State, n: int, case: Case, config: Config) -> Iterator[Step]:
    if not state.orders:
        return
    ordered = state._replace(orders=state.orders - 1)
    if case.job.status in ("pending", "running") and not case.job.cancel:
        answer, job = rules.cancel(case.job, config.design)
        yield Step(f"job {n} is asked to cancel: {answer}", _job(ordered, n, job), fair=False)
    if reopened := rules.reopen(case.job):
        yield Step(f"job {n} is reopened by an operator", _job(ordered, n, reopened), fair=False)
    if case.job.status == "unknown":
        yield from _ask(ordered, n, case, config, operator=True)


def _reconcile(state: State, n: int, case: Case, config: Config) -> Iterator[Step]:
    if config.hook and case.job.status == "unknown":
        yield from _ask(state, n, case, config, operator=False)
    for verdict in case.verdicts:
        rest = tuple(v for v in case.verdicts if v is not verdict)
        epoch, happened, operator = verdict
        after = rules.resolve(case.job, epoch, happened, config.design, config.max_recoveries, operator=operator)
        who = "an operator" if operator else "the hook"
        what = "happened" if happened else "did not happen"
        answer = "refused" if after is None else after.final or after.status
        resolved = _case(state, n, case._replace(job=after or case.job, verdicts=rest))
        yield Step(f"{who} says of job {n}, epoch {epoch}: {what} -> {answer}", resolved)


def _ask(state: State, n: int, case: Case, config: Config, *, operator: bool) -> Iterator[Step]:
    """Ask the provider; the answer is said later, when much may have changed."""
    job, provider = case.job, case.provider
    if any(v.operator == operator and v.epoch == job.epoch for v in case.verdicts):
        return
    who = "an operator asks" if operator else "the hook asks"
    happened = any(epoch == job.epoch for epoch, _ in provider.journal)
    if config.keys:
        happened = bool(provider.journal)
    if happened or not config.design.happened_is_seen:
        yield _found(state, n, case, Verdict(job.epoch, True, operator), f"{who} the provider of job {n}: happened")
        return
    # A process that has ended tells nothing about a request that it has sent: config.requests_outlive shows it.
    dead = not any(a.job == n and a.epoch == job.epoch and a.phase in LIVING for a in state.attempts)
    if config.keys:
        closed = case._replace(provider=provider._replace(closed=job.epoch))
        what = f"{who} the provider of job {n} to close the key: it had not happened"
        yield _found(state, n, closed, Verdict(job.epoch, False, operator), what)
    elif dead or not config.design.did_not_happen_is_final:
        what = f"{who} the provider of job {n}: it has not happened" + (", and its process is dead" if dead else "")
        yield _found(state, n, case, Verdict(job.epoch, False, operator), what)


LIVING = ("claimed", "allowed", "body")


def _found(state: State, n: int, case: Case, verdict: Verdict, what: str) -> Step:
    found = case._replace(verdicts=tuple(sorted((*case.verdicts, verdict))))
    return Step(what, _case(state, n, found), fair=not verdict.operator)


# The leader and the leases --------------------------------------------------------------------------------------------


def _leader(state: State, n: int, case: Case, config: Config) -> Iterator[Step]:
    job = case.job
    if job.status and job.final and not config.design.one_transaction:
        gone = job._replace(status="", owner=NOBODY)
        yield Step(f"job {n} leaves jobs in a transaction of its own", _job(state, n, gone))
    if config.design.settled_apart and job.status == "running" and _is_lost(state, job.owner):
        yield from _settled(state, n, config)


def _settled(state: State, n: int, config: Config) -> Iterator[Step]:
    after = rules.settle(state.cases[n].job, config.max_recoveries, config.design)
    if after is not None:
        yield Step(f"the leader settles job {n}: {after.final or after.status}", _job(state, n, after))


def _process(state: State, slot: int, worker: Worker, config: Config) -> Iterator[Step]:
    name = f"worker {'AB'[slot]}{worker.registration}"
    if worker.alive and state.faults:
        yield Step(f"{name} dies", _crash(state, slot, worker, config), fair=False)
    if worker.row == "live" and worker.alive and state.faults:
        expired = _worker(_fault(state), slot, worker._replace(row="expired"))
        yield Step(f"{name} stalls, and its lease runs out", expired, fair=False)
    if worker.row == "expired" and worker.alive:
        yield Step(f"{name} renews its lease after all", _worker(state, slot, worker._replace(row="live")))
    if worker.row == "expired" or not worker.alive:
        # Its slot is taken at once by the same process under a new registration, or by a new process.
        lost = state
        if not config.design.settled_apart:
            for n, case in enumerate(lost.cases):
                if case.job.status == "running" and case.job.owner == (slot, worker.registration):
                    lost = next(_settled(lost, n, config)).state
        fresh = Worker(True, worker.registration + 1, "live")
        yield Step(f"the leader declares {name} lost; the next one registers", _worker(lost, slot, fresh))


def _crash(state: State, slot: int, worker: Worker, config: Config) -> State:
    kept: list[Attempt] = []
    for a in state.attempts:
        if a.owner[0] != slot or a.phase in ("stray", "request", "claiming"):
            kept.append(a)
        elif a.phase == "telling":
            kept.append(a._replace(phase="stray"))
        elif config.requests_outlive and a.phase == "body" and not a.did and state.cases[a.job].job.effect != PURE:
            kept.append(a._replace(phase="request"))
    after = state._replace(attempts=tuple(sorted(kept)))
    return _worker(_fault(after), slot, worker._replace(alive=False))


# Claims ---------------------------------------------------------------------------------------------------------------


def _claims(state: State, slot: int, worker: Worker, config: Config) -> Iterator[Step]:
    if not worker.alive:
        return
    owner = (slot, worker.registration)
    for n, case in enumerate(state.cases):
        job = case.job
        if not config.design.settled_apart:
            if (
                worker.row == "live"
                and job.status == "pending"
                and not any(a.phase == "claiming" for a in state.attempts)
            ):
                what = f"worker {'AB'[slot]}{worker.registration} may claim job {n}: its lease holds"
                yield Step(what, _add(state, Attempt(n, 0, owner, "claiming")))
        elif worker.row == "live" and (claimed := rules.claim(job, owner, config.design)):
            name = f"worker {'AB'[slot]}{worker.registration} claims job {n} at epoch {claimed.epoch}"
            after = _job(state, n, claimed)
            yield Step(name, _add(after, Attempt(n, claimed.epoch, owner, "claimed")))
            if state.faults:
                yield Step(f"{name}; the answer is lost", _fault(after), fair=False)
        if (
            job.status == "running"
            and job.owner == owner
            and not any(a.job == n and a.epoch == job.epoch and a.owner == owner for a in state.attempts)
        ):
            released = rules.end(job, owner, job.epoch, "release", config.max_attempts, config.design)
            if released:
                yield Step(f"a renewal shows job {n} without a body: it is released", _job(state, n, released))


# One attempt ----------------------------------------------------------------------------------------------------------


def _attempt(state: State, n: int, config: Config) -> Iterator[Step]:
    a = state.attempts[n]
    job = state.cases[a.job].job
    name = f"job {a.job}, epoch {a.epoch} at {'AB'[a.owner[0]]}{a.owner[1]}"
    match a.phase:
        case "claiming":
            claimed = rules.claim(job, a.owner, config.design)
            gone = _put(state, n, None)
            if claimed and _is_lost(state, a.owner):
                yield Step(f"job {a.job} is claimed for a worker that is lost meanwhile", _job(gone, a.job, claimed))
            elif claimed:
                body = a._replace(epoch=claimed.epoch, phase="claimed")
                yield Step(f"job {a.job} is claimed", _job(_put(state, n, body), a.job, claimed))
            else:
                yield Step(f"job {a.job} is not there any more", gone)
        case "claimed" if rules.must_be_proven(job):
            yield from _start(state, n, a, job, name, config)
            yield from _interrupt(state, n, a, job, name, config, begun=False)
        case "claimed" | "allowed":
            yield Step(f"{name}: the body begins", _put(state, n, a._replace(phase="body")))
            yield from _interrupt(state, n, a, job, name, config, begun=False)
        case "body":
            yield from _body(state, n, a, job, name, config)
            yield from _interrupt(state, n, a, job, name, config, begun=True)
        case "telling" | "stray":
            yield from _tell(state, n, a, job, name, config)
        case "request":
            yield Step(f"{name}: its last request arrives at the provider", _effect(_put(state, n, None), a, config)[0])
            yield Step(f"{name}: its last request is lost", _put(state, n, None))


def _start(state: State, n: int, a: Attempt, job: Job, name: str, config: Config) -> Iterator[Step]:
    if not config.design.start_is_recorded:
        yield Step(f"{name}: nothing is recorded before the body", _put(state, n, a._replace(phase="allowed")))
        return
    lease_holds = not _is_lost(state, a.owner) and state.workers[a.owner[0]].row == "live"
    after = rules.start(job, a.owner, a.epoch, lease_holds, config.design)
    if after is not None:
        committed = _job(state, a.job, after)
        yield Step(f"{name}: the effect start is committed", _put(committed, n, a._replace(phase="allowed")))
        if state.faults and after != job:
            yield Step(f"{name}: the effect start is committed; the answer is lost", _fault(committed), fair=False)
        return
    if not config.design.start_is_proven:
        yield Step(f"{name}: the refused effect start is overlooked", _put(state, n, a._replace(phase="allowed")))
    elif not (job.status == "running" and job.owner == a.owner and job.epoch == a.epoch):
        yield Step(f"{name}: the effect start is refused, fenced out", _put(state, n, None))
    # Otherwise a cancel or the lease stands in the way: _interrupt goes on.


def _interrupt(state: State, n: int, a: Attempt, job: Job, name: str, config: Config, *, begun: bool) -> Iterator[Step]:
    """The worker stops a body, or has none yet: for a cancel, a lost lease, or because it must end itself."""
    may_stop = rules.may_be_interrupted(job, begun)
    how = "the body is stopped" if begun else "it has not begun"
    asked = job.cancel and job.epoch == a.epoch and job.owner == a.owner
    if asked and (may_stop or not config.design.started_is_not_interrupted):
        told = _put(state, n, a._replace(phase="telling", says="cancelled" if may_stop else "interrupted"))
        yield Step(f"{name}: told to cancel, {how}", told)
    released = _put(state, n, a._replace(phase="telling", says="release"))
    if may_stop and _is_lost(state, a.owner):
        yield Step(f"{name}: its lease is lost, {how}", released)
    elif state.faults:
        yield Step(f"{name}: the worker is asked to stop, {how}", _fault(released), fair=False)


def _body(state: State, n: int, a: Attempt, job: Job, name: str, config: Config) -> Iterator[Step]:
    if not a.did and job.effect != PURE:
        after, did = _effect(state, a, config)
        if did:
            yield Step(f"{name}: THE EFFECT", _put(after, n, a._replace(did=True)))
    for says in _words(a, job, state, config):
        told = _put(state, n, a._replace(phase="telling", says=says))
        if says == "wait":
            told = told._replace(repeats=state.repeats - 1)
        elif says == "unknown":
            told = _fault(told)
        yield Step(f"{name}: the body ends, {says}", told, fair=says != "unknown")
    if state.faults and job.effect == SIDE_EFFECTING and rules.owned(job, a.owner, a.epoch, config.design):
        word = "unknown" if config.design.timeout_is_unknown else "retry"
        if (late := rules.end(job, a.owner, a.epoch, word, config.max_attempts, config.design)) and late != job:
            what = f"{name}: still runs at its timeout: {late.final or late.status}"
            yield Step(what, _fault(_job(state, a.job, late)), fair=False)


def _words(a: Attempt, job: Job, state: State, config: Config) -> Iterator[str]:
    """What an honest body may say: success only after the effect, and "again" only where a repetition is harmless."""
    if a.did or job.effect == PURE:
        yield "succeeded"
    if job.effect != SIDE_EFFECTING or not a.did:
        yield "retry"
        if state.repeats:
            yield "wait"
    if job.effect == SIDE_EFFECTING:
        yield "failed"
    if job.effect != PURE and state.faults:
        yield "unknown"


def _effect(state: State, a: Attempt, config: Config) -> tuple[State, bool]:
    """A request arrives at the provider; whether it answers as done."""
    case = state.cases[a.job]
    journal, closed = case.provider
    if a.epoch <= closed:
        return state, False
    key = 0 if config.design.key_of_the_job else a.epoch
    if config.keys and any(k == key for _, k in journal):
        return state, True
    done = Provider((*journal, (a.epoch, key)), closed)
    return _case(state, a.job, case._replace(provider=done)), True


def _tell(state: State, n: int, a: Attempt, job: Job, name: str, config: Config) -> Iterator[Step]:
    after = rules.end(job, a.owner, a.epoch, a.says, config.max_attempts, config.design)
    gone = _put(state, n, None)
    if a.phase == "stray":
        yield Step(f"{name}: its last message is lost", gone)
    if after is None:
        own = any(e.by == a.epoch for e in job.record)
        yield Step(f"{name}: '{a.says}' changes nothing, {'confirmed by the record' if own else 'fenced out'}", gone)
        return
    result = after.final or after.status
    yield Step(f"{name}: '{a.says}' is committed: {result}", _job(gone, a.job, after))
    if state.faults:
        again = _fault(_job(state, a.job, after))
        yield Step(f"{name}: '{a.says}' is committed: {result}; the answer is lost", again, fair=False)


# Small changes --------------------------------------------------------------------------------------------------------


def _is_lost(state: State, owner: Owner) -> bool:
    return owner[1] < state.workers[owner[0]].registration


def _fault(state: State) -> State:
    return state._replace(faults=state.faults - 1)


def _case(state: State, n: int, case: Case) -> State:
    return state._replace(cases=(*state.cases[:n], case, *state.cases[n + 1 :]))


def _job(state: State, n: int, job: Job) -> State:
    return _case(state, n, state.cases[n]._replace(job=job))


def _worker(state: State, slot: int, worker: Worker) -> State:
    return state._replace(workers=(*state.workers[:slot], worker, *state.workers[slot + 1 :]))


def _add(state: State, attempt: Attempt) -> State:
    return state._replace(attempts=tuple(sorted((*state.attempts, attempt))))


def _put(state: State, n: int, attempt: Attempt | None) -> State:
    rest = (*state.attempts[:n], *state.attempts[n + 1 :])
    return state._replace(attempts=tuple(sorted((*rest, attempt))) if attempt else rest)

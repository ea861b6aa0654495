"""The queue as plain Python: what the database must answer to each call, and what must stand in its tables after it.

Written from the words of docs/laws.md and not from the SQL, so that a test can compare the two. One model is one
database; a call either answers and changes the model, or raises ``Refused`` and changes nothing that anyone sees: the
caller throws the model away and goes on with the copy from before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta
from typing import NamedTuple
from uuid import UUID

CLASSES = ("pure", "idempotent", "side_effecting")
BACK = {"retry": "failed", "retry_after": "retry_after", "snooze": "snoozed", "release": "released"}
"""Outcomes after which a job waits again, and what the record says about the attempt."""
WAITS = ("retry_after", "retry_after_spent", "snooze", "snooze_spent")
SUSPECT = 2
"""Lost workers after which a job is claimed alone."""
MAX_RECOVERIES = {"p": 10, "once": 1, "thrice": 3}
"""The policies of the tests, by their bound of lost workers."""
HISTORY_RETENTION = timedelta(days=2)
KEY_RETENTION = timedelta(days=3)
WORKER_RETENTION = timedelta(days=7)
PARTITIONS_AHEAD = 1
DAY = timedelta(days=1)


class Refused(Exception):  # noqa: N818 (an answer, not an error of the tests)
    """The database refuses the call with this SQLSTATE."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


@dataclass(frozen=True, slots=True)
class Job:
    """A job, finished or not; ``worker`` is that of the open or of the final attempt. ``error`` is its type alone."""

    id: UUID
    created_at: datetime
    run_at: datetime
    deadline: datetime | None
    queue: str
    task: str
    priority: int
    max_attempts: int
    effect_class: str
    policy_id: str
    required_worker_schema: int | None
    payload: int
    unique_scope: str | None
    unique_key: str | None
    status: str = "pending"
    claim_epoch: int = 0
    worker: UUID | None = None
    claimed_at: datetime | None = None
    effect_started_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    attempt: int = 0
    recoveries: int = 0
    retry_afters: int = 0
    snoozes: int = 0
    releases: int = 0
    generation: int = 0
    pruned_attempts: int = 0
    finished_at: datetime | None = None
    outcome: str | None = None
    outcome_id: int | None = None
    result: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """A row of the ledger; ``error`` is its type alone."""

    job_id: UUID
    claim_epoch: int
    generation: int
    attempt: int
    worker_id: UUID
    outcome: str
    outcome_id: int | None
    claimed_at: datetime
    effect_started_at: datetime | None
    ended_at: datetime
    error: str | None


@dataclass(frozen=True, slots=True)
class Worker:
    """A registered worker; ``lease`` in seconds."""

    id: UUID
    status: str
    capability_level: int
    lease: float
    renewed_at: datetime
    lease_expires_at: datetime
    ended_at: datetime | None = None


class UniqueKey(NamedTuple):
    """Who holds a key; free from ``expires_at`` on."""

    job_id: UUID
    hold_for: timedelta | None
    expires_at: datetime | None


class IdempotencyKey(NamedTuple):
    """Which request a key stands for."""

    request: tuple[str, int]
    job_id: UUID
    created_at: datetime
    expires_at: datetime


class Spec(NamedTuple):
    """What the jobs of one enqueue have in common; times in seconds from now."""

    task: str = "t"
    queue: str = "q"
    priority: int = 5
    max_attempts: int = 3
    effect_class: str = "idempotent"
    policy_id: str = "p"
    required_worker_schema: int | None = None
    run_in: float = 0
    deadline_in: float | None = None
    unique_scope: str | None = None
    unique_hold: float | None = None


class Item(NamedTuple):
    """One job of an enqueue."""

    payload: int = 0
    unique: str | None = None
    idempotency: str | None = None


class Told(NamedTuple):
    """One end as a worker tells it; delay in seconds."""

    job: UUID
    epoch: int
    outcome: str
    outcome_id: int
    delay: float = 0


Key = tuple[str, str]
Claimed = tuple[UUID, int]


class Model:
    """The state of a queue and what each call does to it; every method is named for the call that it answers."""

    def __init__(self, now: datetime, partitions: Iterable[tuple[str, date]]) -> None:
        self.now = now
        self.jobs: dict[UUID, Job] = {}
        self.ledger: dict[tuple[UUID, int], Attempt] = {}
        self.workers: dict[UUID, Worker] = {}
        self.unique: dict[Key, UniqueKey] = {}
        self.idempotency: dict[Key, IdempotencyKey] = {}
        self.queues: dict[str, datetime | None] = {}
        self.audit: list[tuple[str, str]] = []
        self.unknowns: dict[Claimed, datetime] = {}
        self.partitions = set(partitions)

    def copy(self) -> Model:
        """Another model in the same state."""
        other = Model(self.now, self.partitions)
        other.jobs = self.jobs.copy()
        other.ledger = self.ledger.copy()
        other.workers = self.workers.copy()
        other.unique = self.unique.copy()
        other.idempotency = self.idempotency.copy()
        other.queues = self.queues.copy()
        other.unknowns = self.unknowns.copy()
        other.audit = self.audit.copy()
        return other

    # Enqueue ----------------------------------------------------------------------------------------------------------

    def enqueue_many(
        self, spec: Spec, items: Sequence[Item], on_conflict: str = "existing", answered: Sequence[UUID] = ()
    ) -> list[tuple[UUID, bool]]:
        """Each item's job and whether it is new; new ones get the ids that the database answered."""
        if not (0 <= spec.priority <= 9 and spec.max_attempts >= 1 and spec.effect_class in CLASSES):
            raise Refused("WF009")
        own = [UUID(int=n + 1) for n in range(len(items))]
        ids, new = own.copy(), [True] * len(items)
        for n in sorted(
            (n for n, item in enumerate(items) if item.idempotency), key=lambda n: str(items[n].idempotency)
        ):
            self._idempotency(spec, items[n], n, ids, new)
        for n in _in_key_order([item.unique for item in items]):
            if new[n]:
                self._unique(spec, items, n, ids, new, on_conflict)
        real = {own[n]: answered[n] for n in range(len(items)) if new[n] and n < len(answered)}
        self.unique = {k: v._replace(job_id=real.get(v.job_id, v.job_id)) for k, v in self.unique.items()}
        self.idempotency = {k: v._replace(job_id=real.get(v.job_id, v.job_id)) for k, v in self.idempotency.items()}
        ids = [real.get(job, job) for job in ids]
        for job, item in (pair for pair, is_new in zip(zip(ids, items, strict=True), new, strict=True) if is_new):
            self.jobs[job] = self._born(spec, item, job)
        return list(zip(ids, new, strict=True))

    def _idempotency(self, spec: Spec, item: Item, n: int, ids: list[UUID], new: list[bool]) -> None:
        key, request = (spec.task, str(item.idempotency)), (spec.task, item.payload)
        known = self.idempotency.get(key)
        if known is None or known.expires_at <= self.now:
            self.idempotency[key] = IdempotencyKey(request, ids[n], self.now, self.now + KEY_RETENTION)
            return
        if known.request != request:
            raise Refused("WF008")
        ids[n], new[n] = known.job_id, False

    def _unique(
        self, spec: Spec, items: Sequence[Item], n: int, ids: list[UUID], new: list[bool], on_conflict: str
    ) -> None:
        key = (spec.unique_scope or spec.task, str(items[n].unique))
        held = self.unique.get(key)
        if held is None or (held.expires_at is not None and held.expires_at <= self.now):
            hold = None if spec.unique_hold is None else timedelta(seconds=spec.unique_hold)
            self.unique[key] = UniqueKey(ids[n], hold, None)
            return
        if on_conflict == "raise" and held.job_id not in {job for job, is_new in zip(ids, new, strict=True) if is_new}:
            raise Refused("WF007")
        mine = ids[n]
        if items[n].idempotency:
            # Whoever shares the idempotency key is answered with the job that is there, too.
            same = {k: v._replace(job_id=held.job_id) for k, v in self.idempotency.items() if v.job_id == mine}
            self.idempotency |= same
            ids[:] = [held.job_id if job == mine else job for job in ids]
        ids[n], new[n] = held.job_id, False

    def _born(self, spec: Spec, item: Item, job: UUID) -> Job:
        deadline = None if spec.deadline_in is None else self.now + timedelta(seconds=spec.deadline_in)
        return Job(
            id=job,
            created_at=self.now,
            run_at=self.now + timedelta(seconds=spec.run_in),
            deadline=deadline,
            queue=spec.queue,
            task=spec.task,
            priority=spec.priority,
            max_attempts=spec.max_attempts,
            effect_class=spec.effect_class,
            policy_id=spec.policy_id,
            required_worker_schema=(
                max(spec.required_worker_schema or 0, 2)
                if spec.effect_class == "side_effecting"
                else spec.required_worker_schema
            ),
            payload=item.payload,
            unique_scope=(spec.unique_scope or spec.task) if item.unique else None,
            unique_key=item.unique,
        )

    # Claims and ends --------------------------------------------------------------------------------------------------

    def claim(
        self,
        worker: UUID,
        limit: int,
        tasks: Collection[str],
        lanes: Sequence[tuple[str, int]],
        skip: Collection[UUID] = (),
    ) -> list[Claimed] | None:
        """The claims, by lane; None where the worker's lease does not hold."""
        if limit <= 0:
            return []
        if not self._may_claim(worker):
            return None
        due = [
            job
            for lane in lanes
            for job in self._due(worker, tasks)
            if (job.queue, job.priority) == lane and job.recoveries < SUSPECT and job.id not in skip
        ]
        return [self._start(job, worker) for job in due[:limit]]

    def claim_suspect(self, worker: UUID, tasks: Collection[str], queues: Collection[str]) -> list[Claimed]:
        """At most one claim, for a worker that holds nothing."""
        if not self._may_claim(worker) or self._runs(worker):
            return []
        due = [job for job in self._due(worker, tasks) if job.queue in queues and job.recoveries >= SUSPECT]
        return [self._start(job, worker) for job in due[:1]]

    def _may_claim(self, worker: UUID) -> bool:
        found = self.workers.get(worker)
        return found is not None and found.status == "live" and found.lease_expires_at > self.now

    def _due(self, worker: UUID, tasks: Collection[str]) -> list[Job]:
        level = self.workers[worker].capability_level
        due = (
            job
            for job in self.unfinished("pending")
            if job.run_at <= self.now
            and job.task in tasks
            and job.attempt < job.max_attempts
            and (job.deadline is None or job.deadline > self.now)
            and (job.required_worker_schema or 0) <= level
            and self.queues.get(job.queue) is None
        )
        return sorted(due, key=lambda job: (job.run_at, job.id))

    def _start(self, job: Job, worker: UUID) -> Claimed:
        epoch = job.claim_epoch + 1
        self._put(job, status="running", claim_epoch=epoch, worker=worker, claimed_at=self.now)
        return job.id, epoch

    def start_effect(self, worker: UUID, job_id: UUID, epoch: int) -> datetime | None:
        """When the attempt was allowed to start its effect; None if it was not."""
        job = self.jobs[job_id]
        found = self.workers.get(worker)
        holds = found is not None and _open(found) and found.lease_expires_at > self.now
        if (
            holds
            and (job.worker, job.claim_epoch, job.status) == (worker, epoch, "running")
            and job.effect_class == "side_effecting"
            and job.cancel_requested_at is None
            and job.effect_started_at is None
        ):
            self._put(job, effect_started_at=self.now)
        return self.jobs[job_id].effect_started_at

    def end_attempts(self, worker: UUID, ends: Sequence[Told]) -> int:
        """How many were applied; told twice, an attempt ends as told first."""
        first = {(told.job, told.epoch): told for told in reversed(ends)}
        return sum(self._end(worker, told) for told in first.values())

    def missed(self, worker: UUID, ends: Sequence[Told]) -> list[Claimed]:
        """Those of these ends that are not on record, nor what keeps an attempt open."""
        return [(e.job, e.epoch) for e in ends if not self._on_record(e) and not self._is_open(worker, e)]

    def _is_open(self, worker: UUID, told: Told) -> bool:
        job = self.jobs.get(told.job)
        return (
            told.outcome in ("unknown", "release")
            and job is not None
            and (job.status, job.worker, job.claim_epoch) == ("unknown", worker, told.epoch)
        )

    def _on_record(self, told: Told) -> bool:
        ended = self.ledger.get((told.job, told.epoch))
        job = self.jobs.get(told.job)
        last = job is not None and job.finished_at is not None and job.worker is not None
        return (ended is not None and ended.outcome_id == told.outcome_id) or (
            job is not None and last and (job.claim_epoch, job.outcome_id) == (told.epoch, told.outcome_id)
        )

    def _end(self, worker: UUID, told: Told) -> bool:
        job = self.jobs.get(told.job)
        if job is None or job.status not in ("running", "unknown"):
            return False
        if (job.worker, job.claim_epoch) != (worker, told.epoch):
            return False
        effect = job.effect_class == "side_effecting" and job.effect_started_at is not None
        if told.outcome == "unknown" or (told.outcome == "release" and effect):
            self._unknown(job)
            return True
        start = self.now + timedelta(seconds=max(told.delay, 0))
        late = told.outcome != "release" and job.deadline is not None and start > job.deadline
        last = told.outcome == "retry" and job.attempt + 1 >= job.max_attempts
        if told.outcome in BACK and job.cancel_requested_at is None and not late and not last:
            counted = _counted(job, told.outcome)
            self._record(counted, BACK[told.outcome], told.outcome_id, "E")
            run_at = job.run_at if told.outcome == "release" and told.delay <= 0 else start
            self._put(counted, status="pending", run_at=run_at, **_UNCLAIMED)
            return True
        if told.outcome == "succeeded":
            self._finish(job, "succeeded", "succeeded", told.outcome_id, result=told.outcome_id)
        elif job.cancel_requested_at is not None:
            error = "Cancelled" if told.outcome == "release" else "E"
            self._finish(job, "cancelled", "cancelled", told.outcome_id, error)
        else:
            outcome = {"retry_after": "retry_after", "snooze": "snoozed"}.get(told.outcome.removesuffix("_spent"))
            error = "DeadlineExceeded" if told.outcome in BACK and not last else "E"
            self._finish(_counted(job, told.outcome), "failed", outcome or "failed", told.outcome_id, error)
        return True

    # Workers and the leader -------------------------------------------------------------------------------------------

    def register_worker(self, worker: UUID, queues: Iterable[str], level: int, lease: float) -> None:
        """A new live worker, with the id that the database answered."""
        until = self.now + timedelta(seconds=lease)
        self.workers[worker] = Worker(worker, "live", level, lease, self.now, until)
        for queue in queues:
            self.queues.setdefault(queue, None)

    def renew(self, worker: UUID) -> tuple[str, set[tuple[UUID, int, bool]]]:
        """The worker's status, and its claims with whether cancelling was asked for."""
        found = self.workers.get(worker)
        if found is not None and found.status in ("live", "draining"):
            until = self.now + timedelta(seconds=found.lease)
            self.workers[worker] = replace(found, renewed_at=self.now, lease_expires_at=until)
        held = {(job.id, job.claim_epoch, job.cancel_requested_at is not None) for job in self.held_by(worker)}
        return (found.status if found else "absent"), held

    def drain_worker(self, worker: UUID) -> None:
        """No more claims."""
        found = self.workers.get(worker)
        if found is not None and found.status == "live":
            self.workers[worker] = replace(found, status="draining")

    def stop_worker(self, worker: UUID) -> None:
        """Stopped, unless it holds claims."""
        found = self.workers.get(worker)
        if found is not None and found.status in ("live", "draining") and not self._runs(worker):
            self.workers[worker] = replace(found, status="stopped", ended_at=self.now)

    def mark_lost(self, limit: int = 100, busy: Collection[UUID] = ()) -> set[UUID]:
        """Workers whose lease has run out."""
        late = sorted(w.id for w in self.workers.values() if _open(w) and w.lease_expires_at <= self.now)
        lost = [worker for worker in late if worker not in busy][:limit]
        for worker in lost:
            self.workers[worker] = replace(self.workers[worker], status="lost", ended_at=self.now)
        return set(lost)

    def settle_lost(
        self, limit: int = 200, skip: Collection[UUID] = (), busy: Collection[UUID] = ()
    ) -> dict[UUID, str]:
        """What became of each claim whose worker is lost or absent."""
        waiting = sorted(
            (job for job in self.unfinished("running") if not self._works(job.worker) and job.id not in {*skip, *busy}),
            key=lambda job: job.id,
        )
        return {job.id: self._each(self._settle, job) for job in waiting[:limit]}

    def _works(self, worker: UUID | None) -> bool:
        found = self.workers.get(worker) if worker else None
        return found is not None and _open(found)

    def _settle(self, job: Job) -> str:
        asked = job.cancel_requested_at is not None
        started = job.effect_class == "side_effecting" and job.effect_started_at is not None
        if started or (asked and job.effect_class == "idempotent"):
            self._unknown(job)
            return "unknown"
        if asked:
            self._finish(job, "cancelled", "lost", None, "Cancelled")
            return "cancelled"
        lost = replace(job, recoveries=job.recoveries + 1)
        if lost.recoveries > MAX_RECOVERIES[job.policy_id]:
            self._finish(lost, "failed", "lost", None, "RecoveryExhausted")
            return "failed"
        self._record(lost, "lost", None, "WorkerLost")
        self._put(lost, status="pending", **_UNCLAIMED)
        return "pending"

    def sweep(self, limit: int = 500, skip: Collection[UUID] = (), busy: Collection[UUID] = ()) -> dict[UUID, str]:
        """Waiting jobs that were ended, and those that could not be."""
        left = {*skip, *busy}
        late = [j for j in self.unfinished("pending", "held") if j.deadline is not None and j.deadline <= self.now]
        late = sorted((j for j in late if j.id not in left), key=lambda j: (j.deadline, j.id))[:limit]
        swept = {job.id: self._each(lambda job: self._expire(job, "DeadlineExceeded"), job) for job in late}
        spent = [j for j in self.unfinished("pending") if j.attempt >= j.max_attempts and j.id not in left]
        for job in sorted(spent, key=lambda j: j.id)[:limit]:
            swept[job.id] = self._each(lambda job: self._expire(job, "AttemptsExhausted"), job)
        return swept

    def _expire(self, job: Job, error: str) -> str:
        self._finish(job, "failed", None, None, error)
        return "failed"

    def prune(self) -> int:
        """How many keys, workers and unknowns of dropped jobs were forgotten."""
        keys = len(self.unique) + len(self.idempotency) + len(self.workers) + len(self.unknowns)
        before = self.now - HISTORY_RETENTION
        self.unknowns = {k: at for k, at in self.unknowns.items() if at >= before or k[0] in self.jobs}
        self.idempotency = {k: v for k, v in self.idempotency.items() if v.expires_at > self.now}
        self.unique = {k: v for k, v in self.unique.items() if v.expires_at is None or v.expires_at > self.now}
        old = self.now - WORKER_RETENTION
        gone = [w.id for w in self.workers.values() if w.ended_at is not None and w.ended_at < old]
        for worker in gone:
            if not any(self.held_by(worker)):
                del self.workers[worker]
        return keys - len(self.unique) - len(self.idempotency) - len(self.workers) - len(self.unknowns)

    def ensure_partitions(self) -> int:
        """How many days' partitions were made."""
        first = self.now.date() - DAY
        days = [first + n * DAY for n in range(PARTITIONS_AHEAD + 2)]
        missing = {(parent, day) for parent in ("history", "ledger") for day in days} - self.partitions
        self.partitions |= missing
        return len(missing)

    def drop_expired_partition(self) -> str | None:
        """The partition that was dropped: its jobs are gone, and its attempts are noted as pruned."""
        limit = (self.now - HISTORY_RETENTION).date()
        old = sorted((day, parent) for parent, day in self.partitions if day < limit)
        if not old:
            return None
        day, parent = old[0]
        self.partitions.remove((parent, day))
        if parent == "history":
            self.jobs = {k: j for k, j in self.jobs.items() if j.finished_at is None or j.finished_at.date() != day}
        else:
            for key, ended in list(self.ledger.items()):
                if ended.ended_at.date() == day:
                    del self.ledger[key]
                    if (job := self.jobs.get(ended.job_id)) is not None:
                        self._put(job, pruned_attempts=job.pruned_attempts + 1)
        return f"{parent}_{day:%Y%m%d}"

    # Operators --------------------------------------------------------------------------------------------------------

    def cancel(self, job_id: UUID) -> str:
        """The answer to a request to cancel."""
        self._ensure_today()
        job = self.jobs.get(job_id)
        if job is None:
            return "not_found"
        if job.finished_at is not None:
            return "finished"
        if job.status == "unknown":
            return "unknown"
        self.audit.append(("cancel", str(job_id)))
        if job.status == "running":
            self._put(job, cancel_requested_at=job.cancel_requested_at or self.now)
            return "requested"
        self._finish(job, "cancelled", None, None, "Cancelled")
        return "cancelled"

    def retry(self, job_id: UUID) -> str:
        """Due now, or reopened."""
        self._ensure_today()
        job = self.jobs.get(job_id)
        if job is None:
            raise Refused("WF011")
        if job.status == "pending":
            self._put(job, run_at=min(job.run_at, self.now))
        elif job.status not in ("failed", "cancelled"):
            raise Refused("WF012")
        else:
            self._reopen(job)
        self.audit.append(("retry", str(job_id)))
        return "due" if job.status == "pending" else "reopened"

    def _reopen(self, job: Job) -> None:
        if job.unique_scope is not None and job.unique_key is not None:
            key = (job.unique_scope, job.unique_key)
            held = self.unique.get(key)
            free = held is None or (held.expires_at is not None and held.expires_at <= self.now)
            if not free and held is not None and held.job_id != job.id:
                raise Refused("WF007")
            self.unique[key] = UniqueKey(job.id, held.hold_for if held else None, None)
        if job.worker is not None:
            assert job.finished_at is not None
            self._record(job, str(job.outcome), job.outcome_id, job.error, job.finished_at)
        self.jobs[job.id] = Job(
            id=job.id,
            created_at=job.created_at,
            run_at=self.now,
            deadline=job.deadline if job.deadline is not None and job.deadline > self.now else None,
            queue=job.queue,
            task=job.task,
            priority=job.priority,
            max_attempts=job.max_attempts,
            effect_class=job.effect_class,
            policy_id=job.policy_id,
            required_worker_schema=job.required_worker_schema,
            payload=job.payload,
            unique_scope=job.unique_scope,
            unique_key=job.unique_key,
            claim_epoch=job.claim_epoch,
            generation=job.generation + 1,
            pruned_attempts=job.pruned_attempts,
        )

    def resolve(self, job_id: UUID, happened: bool | None, reason: str | None) -> str:
        """What an unknown outcome was decided to be."""
        self._ensure_today()
        job = self.jobs.get(job_id)
        if job is None:
            raise Refused("WF011")
        if job.status != "unknown":
            record = self.ledger.get((job.id, job.claim_epoch))
            final = job.outcome if job.finished_at is not None and job.worker is not None else None
            outcome = final if record is None else record.outcome
            was_unknown = outcome is not None and (job.id, job.claim_epoch) in self.unknowns
            raise Refused("WF016" if outcome == "resolved" or was_unknown else "WF012")
        if happened is None or not (reason or "").strip():
            raise Refused("WF009")
        self.audit.append(("resolve", str(job_id)))
        if happened:
            self._finish(job, "succeeded", "resolved", None, result=7)
            return "succeeded"
        if job.cancel_requested_at is not None:
            self._finish(job, "cancelled", "resolved", None, "Cancelled")
            return "cancelled"
        again = replace(job, recoveries=job.recoveries + 1)
        self._record(again, "resolved", None, "DidNotHappen")
        self._put(again, status="pending", **_UNCLAIMED)
        return "pending"

    def unstarted(self) -> set[tuple[str, UUID]]:
        """All that may be reported: a worker, here a lying one, told a success without having started the effect."""
        return {
            ("succeeded_without_effect_start", job.id)
            for job in self.jobs.values()
            if job.effect_class == "side_effecting" and job.outcome == "succeeded" and job.effect_started_at is None
        }

    def pause_queue(self, queue: str) -> bool:
        """Whether that changed anything."""
        if self.queues.get(queue) is not None:
            return False
        self.queues[queue] = self.now
        self.audit.append(("pause", queue))
        return True

    def resume_queue(self, queue: str) -> bool:
        """Whether that changed anything."""
        if self.queues.get(queue) is None:
            return False
        self.queues[queue] = None
        self.audit.append(("resume", queue))
        return True

    # Rows -------------------------------------------------------------------------------------------------------------

    def unfinished(self, *statuses: str) -> list[Job]:
        """Jobs in one of these statuses."""
        return [job for job in self.jobs.values() if job.status in statuses]

    def held_by(self, worker: UUID) -> list[Job]:
        """The claims of a worker, unknown ones included."""
        return [job for job in self.unfinished("running", "unknown") if job.worker == worker]

    def _unknown(self, job: Job) -> None:
        if job.status == "running":
            self.unknowns[(job.id, job.claim_epoch)] = self.now
        self._put(job, status="unknown")

    def _runs(self, worker: UUID) -> bool:
        return any(job.status == "running" for job in self.held_by(worker))

    def _put(self, job: Job, **changes: object) -> None:
        self.jobs[job.id] = replace(job, **changes)  # type: ignore[arg-type]

    def _each(self, settle: object, job: Job) -> str:
        """One of many: where it cannot be settled, it stays as it was."""
        assert callable(settle)
        before = self.copy()
        try:
            return str(settle(job))
        except Refused as refused:
            self.__dict__.update(before.__dict__)
            return f"error: {refused.sqlstate}"

    def _ensure_today(self) -> None:
        if any((parent, self.now.date()) not in self.partitions for parent in ("history", "ledger")):
            self.ensure_partitions()

    def _record(
        self, job: Job, outcome: str, outcome_id: int | None, error: str | None, at: datetime | None = None
    ) -> None:
        at = at or self.now
        if ("ledger", at.date()) not in self.partitions:
            raise Refused("23514")
        assert job.worker is not None
        assert job.claimed_at is not None
        assert (job.id, job.claim_epoch) not in self.ledger, "an attempt is recorded once"
        self.ledger[job.id, job.claim_epoch] = Attempt(
            job.id,
            job.claim_epoch,
            job.generation,
            job.attempt,
            job.worker,
            outcome,
            outcome_id,
            job.claimed_at,
            job.effect_started_at,
            at,
            error,
        )

    def _finish(
        self,
        job: Job,
        status: str,
        outcome: str | None,
        outcome_id: int | None,
        error: str | None = None,
        result: int | None = None,
    ) -> None:
        if ("history", self.now.date()) not in self.partitions:
            raise Refused("23514")
        if job.unique_scope is not None and job.unique_key is not None:
            key = self.unique.get((job.unique_scope, job.unique_key))
            if key is not None and key.job_id == job.id:
                del self.unique[job.unique_scope, job.unique_key]
                if key.hold_for is not None:
                    left = key._replace(expires_at=self.now + key.hold_for)
                    self.unique[job.unique_scope, job.unique_key] = left
        self._put(
            job,
            status=status,
            finished_at=self.now,
            outcome=outcome,
            outcome_id=outcome_id,
            error=error,
            result=result,
        )


_UNCLAIMED: dict[str, None] = {"worker": None, "claimed_at": None, "effect_started_at": None}


def _in_key_order(keys: Sequence[str | None]) -> list[int]:
    """Where the keys stand, in the order of the keys, then of their places."""
    return [n for _, n in sorted((key, n) for n, key in enumerate(keys) if key is not None)]


def _open(worker: Worker) -> bool:
    return worker.status in ("live", "draining")


def _counted(job: Job, outcome: str) -> Job:
    """The job with the one counter raised that this outcome stands for."""
    match outcome.removesuffix("_spent"):
        case "retry_after":
            return replace(job, retry_afters=job.retry_afters + 1)
        case "snooze":
            return replace(job, snoozes=job.snoozes + 1)
        case "release":
            return replace(job, releases=job.releases + 1)
        case _:
            return replace(job, attempt=job.attempt + 1)

"""Long random lives of a queue: one session makes any call with right and wrong arguments at any time, while the clock
moves, and after each call answers and tables are those of the model and no law is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import psycopg
import sql
from database import differences, empty, look, reported, set_clock
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model import Item, Model, Refused, Spec, Told
from profiles import profile

T = TypeVar("T")

QUEUES, TASKS, PRIORITIES = ("q", "r"), ("t", "u"), (5, 9)
LANES = [(queue, priority) for priority in (9, 5) for queue in QUEUES]
LEASE = 60.0
NOBODY = UUID("99999999-9999-7999-8999-999999999999")
PICKS = st.integers(0, 7)
KEYS = st.sampled_from([None, None, "a", "b", "c"])
OUTCOMES = st.sampled_from([*sql.OUTCOMES, "succeeded", "retry", "unknown"])

SPECS = st.builds(
    Spec,
    task=st.sampled_from([*TASKS, "t"]),
    queue=st.sampled_from([*QUEUES, "q"]),
    priority=st.sampled_from(PRIORITIES),
    max_attempts=st.sampled_from([1, 2, 3]),
    effect_class=st.sampled_from(["idempotent", "pure", "side_effecting", "side_effecting"]),
    policy_id=st.sampled_from(["p", "once", "thrice"]),
    required_worker_schema=st.sampled_from([None, None, None, 2]),
    run_in=st.sampled_from([0, 0, 0, 30, -30]),
    deadline_in=st.sampled_from([None, None, 45, 3600]),
    unique_scope=st.sampled_from([None, None, "s"]),
    unique_hold=st.sampled_from([None, 0, 100]),
)
ITEMS = st.lists(st.builds(Item, st.integers(0, 1), KEYS, KEYS), min_size=1, max_size=4)
ADVANCES = st.sampled_from([1, 1, 5, 31, 31, 61, 101, 4000, -5])


class Queue(RuleBasedStateMachine):
    """Calls on a real database beside the same calls on the model."""

    conn: sql.Conn

    @initialize()
    def begin(self) -> None:
        self.model = empty(self.conn)
        self.known: list[UUID] = []
        self.workers: list[UUID] = []
        self.attempts: list[tuple[UUID, int, UUID]] = []
        self.sent: list[tuple[UUID, Told]] = []
        for level in (1, 2):
            self._register(level)

    # Both sides -------------------------------------------------------------------------------------------------------

    def both(self, ask: Callable[[sql.Conn], T], say: Callable[[Model, Any], object]) -> T | str:
        """Make a call and compare its answer with the model's; ``say`` also gets the database's answer."""
        answer: T | str
        try:
            answer = ask(self.conn)
        except psycopg.Error as error:
            answer = f"refused: {error.sqlstate}"
        before = self.model.copy()
        try:
            expected = say(self.model, answer)
        except Refused as refused:
            self.model, expected = before, f"refused: {refused.sqlstate}"
        assert answer == expected, f"the database answers {answer!r}, the model {expected!r}"
        return answer

    @invariant()
    def tables_and_laws(self) -> None:
        if not hasattr(self, "model"):
            return
        found, broken = look(self.conn)
        assert differences(self.model, found) == []
        assert reported(broken) == self.model.unstarted()

    # Picking ----------------------------------------------------------------------------------------------------------

    def job(self, pick: int, *statuses: str) -> UUID:
        """A job that was enqueued, in one of these statuses where there is one, the youngest first."""
        fits = [job for job in self.known if job in self.model.jobs and self.model.jobs[job].status in statuses]
        found = (fits or self.known)[::-1]
        return found[pick % len(found)] if found else NOBODY

    def worker(self, pick: int) -> UUID:
        """A worker that was registered, the youngest first."""
        return self.workers[::-1][pick % len(self.workers)]

    def open_attempts(self) -> list[tuple[UUID, int, UUID]]:
        """Attempts that have not ended."""
        return [
            (job.id, job.claim_epoch, job.worker)
            for job in self.model.unfinished("running", "unknown")
            if job.worker is not None
        ]

    # Clients ----------------------------------------------------------------------------------------------------------

    @rule(
        spec=SPECS,
        items=ITEMS,
        on_conflict=st.sampled_from(["existing", "existing", "raise"]),
    )
    def enqueue(self, spec: Spec, items: list[Item], on_conflict: str) -> None:
        def ask(conn: sql.Conn) -> list[tuple[UUID, bool]]:
            answer = sql.enqueue_many(
                conn,
                len(items),
                unique=[item.unique for item in items],
                idempotency=[item.idempotency for item in items],
                on_conflict=on_conflict,
                payloads=[{"n": item.payload} for item in items],
                **spec._asdict(),
            )
            return [(row["job_id"], row["inserted"]) for row in answer]

        def say(model: Model, answer: Any) -> list[tuple[UUID, bool]]:
            answered = [] if isinstance(answer, str) else [job for job, _ in answer]
            return model.enqueue_many(spec, items, on_conflict, answered)

        answer = self.both(ask, say)
        if not isinstance(answer, str):
            self.known += [job for job, inserted in answer if inserted]

    @rule(
        wrong=st.sampled_from([{"priority": 10}, {"priority": -1}, {"max_attempts": 0}, {"effect_class": "harmless"}]),
        key=KEYS,
    )
    def enqueue_what_is_refused(self, wrong: dict[str, Any], key: str | None) -> None:
        self.enqueue_as(Spec()._replace(**wrong), [Item(0, key, key)])

    def enqueue_as(self, spec: Spec, items: list[Item]) -> None:
        self.both(
            lambda conn: sql.enqueue_many(
                conn,
                len(items),
                unique=[item.unique for item in items],
                idempotency=[item.idempotency for item in items],
                payloads=[{"n": item.payload} for item in items],
                **spec._asdict(),
            ),
            lambda model, _: model.enqueue_many(spec, items),
        )

    # Workers ----------------------------------------------------------------------------------------------------------

    def _register(self, level: int) -> None:
        worker = sql.register(self.conn, queues=QUEUES, tasks=TASKS, level=level, lease=LEASE)
        self.model.register_worker(worker, QUEUES, level, LEASE)
        self.workers.append(worker)

    @rule(level=st.sampled_from([2, 2, 1]), limit=st.sampled_from([4, 4, 1]), pick=PICKS)
    @precondition(lambda self: self.model.unfinished("pending"))
    def work(self, level: int, limit: int, pick: int) -> None:
        """A worker whose lease holds claims what it can, alone where it must."""
        able = [w.id for w in self.model.workers.values() if w.status == "live" and w.capability_level == level]
        if not able:
            self._register(level)
            able = [self.workers[-1]]
        worker = able[pick % len(able)]
        self.renew_as(worker)
        if any(job.recoveries > 1 for job in self.model.unfinished("pending")) and not self.model.held_by(worker):
            self.suspect_as(worker)
        self.send(worker, [], limit)

    @rule(
        pick=PICKS,
        limit=st.integers(0, 4),
        tasks=st.sampled_from([TASKS, TASKS, ("t",)]),
        lanes=st.sampled_from([LANES, LANES, LANES[::-1], LANES[:2]]),
        skip=st.booleans(),
        ends=st.lists(st.tuples(PICKS, st.sampled_from([0, 0, 0, 0, -1, 1]), OUTCOMES, st.booleans()), max_size=3),
        delay=st.sampled_from([0, 0, 10, 50, 100_000, -5]),
    )
    @precondition(lambda self: self.known)
    def exchange(
        self,
        pick: int,
        limit: int,
        tasks: tuple[str, ...],
        lanes: list[tuple[str, int]],
        skip: bool,
        ends: list[tuple[int, int, str, bool]],
        delay: float,
    ) -> None:
        """Ends, some with a wrong epoch, foreign, told twice or sent again; then claims."""
        worker = self.worker(pick)
        told = []
        for at, off, outcome, again in ends:
            mine = [found for found in self.open_attempts() if found[2] == worker] or self.attempts[::-1]
            sent = [one for by, one in self.sent if by == worker][::-1]
            if again and sent:
                told.append(sent[at % len(sent)])
            elif mine:
                job, epoch, _ = mine[at % len(mine)]
                told.append(Told(job, epoch + off, outcome, len(self.sent) + len(told) + 1, delay))
        self.send(worker, told, limit, tasks, lanes, [self.job(pick, "pending")] if skip else [])

    @rule(pick=PICKS, outcome=OUTCOMES, delay=st.sampled_from([0, 0, 10, 50]), as_worker=st.sampled_from([0, 0, 0, 1]))
    @precondition(lambda self: self.open_attempts())
    def end_one(self, pick: int, outcome: str, delay: float, as_worker: int) -> None:
        """One end of an open attempt, by its worker or by another."""
        job, epoch, worker = self.open_attempts()[::-1][pick % len(self.open_attempts())]
        by = self.worker(pick) if as_worker else worker
        self.send(by, [Told(job, epoch, outcome, len(self.sent) + 1, delay)], 0)

    def send(
        self,
        worker: UUID,
        told: list[Told],
        limit: int,
        tasks: tuple[str, ...] = TASKS,
        lanes: list[tuple[str, int]] = LANES,
        skip: list[UUID] | None = None,
    ) -> None:
        """One exchange."""
        ends = [
            sql.End(
                end.job,
                end.epoch,
                end.outcome,
                end.outcome_id,
                end.outcome_id if end.outcome == "succeeded" else None,
                None if end.outcome == "succeeded" else {"type": "E"},
                end.delay,
            )
            for end in told
        ]

        def ask(conn: sql.Conn) -> list[tuple[str, UUID | None, int | None]]:
            rows = sql.exchange(conn, worker, ends, limit, tasks=tasks, lanes=lanes, skip=skip or [])
            return sorted(((row["kind"], row["job_id"], row["claim_epoch"]) for row in rows), key=str)

        def say(model: Model, _: Any) -> list[tuple[str, UUID | None, int | None]]:
            model.end_attempts(worker, told)
            missed = [("missed", *end) for end in model.missed(worker, told)]
            claims = model.claim(worker, limit, tasks, lanes, skip or [])
            claimed = [("lease", None, None)] if claims is None else [("job", *claim) for claim in claims]
            return sorted([*missed, *claimed], key=str)

        answer = self.both(ask, say)
        if not isinstance(answer, str):
            self.sent += [(worker, end) for end in told]
            self.attempts += [(job, epoch, worker) for kind, job, epoch in answer if kind == "job" and job and epoch]

    @rule(pick=PICKS)
    @precondition(lambda self: any(job.recoveries > 1 for job in self.model.jobs.values()))
    def claim_suspect(self, pick: int) -> None:
        self.suspect_as(self.worker(pick))

    def suspect_as(self, worker: UUID) -> None:
        answer = self.both(
            lambda conn: [
                (row["job_id"], row["claim_epoch"])
                for row in sql.rows(
                    conn, "select * from taskq.claim_suspect(%s, %s, %s)", worker, list(TASKS), list(QUEUES)
                )
            ],
            lambda model, _: model.claim_suspect(worker, TASKS, QUEUES),
        )
        assert not isinstance(answer, str)
        self.attempts += [(job, epoch, worker) for job, epoch in answer]

    @rule(pick=PICKS)
    @precondition(lambda self: any(job.worker for job in self.model.unfinished("running")))
    def start_effect(self, pick: int) -> None:
        """Under the fence, not after a cancel request, and once."""
        running = self.model.unfinished("running")
        job = running[pick % len(running)]
        assert job.worker is not None
        worker, epoch = job.worker, job.claim_epoch
        self.both(
            lambda conn: [row["effect_started_at"] for row in sql.start_effects(conn, worker, (job.id, epoch))],
            lambda model, _: [model.start_effect(worker, job.id, epoch)],
        )

    @rule(pick=PICKS)
    def renew(self, pick: int) -> None:
        self.renew_as(self.worker(pick))

    def renew_as(self, worker: UUID) -> None:
        def ask(conn: sql.Conn) -> tuple[str, set[tuple[UUID, int, bool]]]:
            first, *claims = sql.rows(conn, "select * from taskq.renew(%s)", worker)
            return first["status"], {(c["job_id"], c["claim_epoch"], c["cancel_requested"]) for c in claims}

        self.both(ask, lambda model, _: model.renew(worker))

    @rule(pick=PICKS, call=st.sampled_from(["drain_worker", "stop_worker", "vanish"]))
    def leave(self, pick: int, call: str) -> None:
        """A worker stops, or its row is gone, as after a restore: its claims are settled all the same."""
        worker = self.worker(pick)
        if call == "vanish":
            self.conn.execute("delete from taskq.workers where id = %s", (worker,))
            self.model.workers.pop(worker, None)
            return
        self.both(
            lambda conn: sql.rows(conn, f"select taskq.{call}(%s)", worker) and None,
            lambda model, _: getattr(model, call)(worker),
        )

    # The leader -------------------------------------------------------------------------------------------------------

    @rule(seconds=ADVANCES)
    def advance(self, seconds: float) -> None:
        self.model.now += timedelta(seconds=seconds)
        set_clock(self.conn, self.model.now)

    @rule(limit=st.sampled_from([1, 100]))
    def mark_lost(self, limit: int) -> None:
        self.both(
            lambda conn: {row["w"] for row in sql.rows(conn, "select taskq.mark_lost(%s) as w", limit)},
            lambda model, _: model.mark_lost(limit),
        )

    @rule(limit=st.sampled_from([1, 200]), skip=st.booleans(), pick=PICKS)
    @precondition(lambda self: self.model.unfinished("running"))
    def settle_lost(self, limit: int, skip: bool, pick: int) -> None:
        left = [self.job(pick, "running")] if skip else []
        self.both(
            lambda conn: self._settled(conn, "settle_lost", limit, left),
            lambda model, _: model.settle_lost(limit, left),
        )

    @rule(limit=st.sampled_from([1, 500]), skip=st.booleans(), pick=PICKS)
    @precondition(lambda self: self.known)
    def sweep(self, limit: int, skip: bool, pick: int) -> None:
        left = [self.job(pick, "pending")] if skip else []
        self.both(
            lambda conn: self._settled(conn, "sweep", limit, left),
            lambda model, _: model.sweep(limit, left),
        )

    @staticmethod
    def _settled(conn: sql.Conn, call: str, limit: int, skip: list[UUID]) -> dict[UUID, str]:
        found = sql.rows(conn, f"select * from taskq.{call}(%s, %s::uuid[])", limit, skip)
        assert len({row["job_id"] for row in found}) == len(found), f"answered twice: {found}"
        return {row["job_id"]: row["settled"] for row in found}

    @rule(pick=PICKS)
    @precondition(lambda self: self.model.unfinished("running"))
    def lose(self, pick: int) -> None:
        """A worker with claims goes silent; the others renew; the leader finds out."""
        running = self.model.unfinished("running")
        silent = running[pick % len(running)].worker
        self.advance(LEASE)
        for worker in [worker.id for worker in self.model.workers.values() if worker.id != silent]:
            self.renew_as(worker)
        self.mark_lost(100)
        self.settle_lost(200, False, 0)

    @rule(pick=PICKS)
    @precondition(lambda self: self.model.unfinished("pending"))
    def lower_max_attempts(self, pick: int) -> None:
        """By hand: a job that waits with its attempts used up is for the sweep."""
        job = self.job(pick, "pending")
        self.conn.execute("update taskq.jobs set max_attempts = 1 where id = %s", (job,))
        self.model.jobs[job] = replace(self.model.jobs[job], max_attempts=1)

    @rule(days=st.sampled_from([0, 0, 0, 1, 2, 3, 8]), behind=st.booleans())
    def keep(self, days: int, behind: bool) -> None:
        """Days pass, with the leader's upkeep or, at first, without: an end then finds no partition."""
        if days:
            self.advance(days * 86_400)
        if days and behind:
            return
        self.plain("ensure_partitions")
        for _ in range(2):
            # An autovacuum of the partition makes it give up at once, as documented: then it is asked again.
            self.both(sql.drop_expired, lambda model, _: model.drop_expired_partition())
        self.plain("prune")

    # Operators --------------------------------------------------------------------------------------------------------

    @rule(pick=PICKS, status=st.sampled_from(["pending", "running", "running", "unknown", "failed"]))
    @precondition(lambda self: self.known)
    def cancel(self, pick: int, status: str) -> None:
        job = self.job(pick, status)
        self.both(lambda conn: sql.cancel(conn, job), lambda model, _: model.cancel(job))

    @rule(pick=PICKS, statuses=st.sampled_from([("failed", "cancelled"), ("failed", "cancelled"), ("pending",), ()]))
    @precondition(lambda self: self.known)
    def retry(self, pick: int, statuses: tuple[str, ...]) -> None:
        job = self.job(pick, *statuses)
        self.both(lambda conn: sql.retry(conn, job), lambda model, _: model.retry(job))

    @rule(
        pick=PICKS,
        happened=st.sampled_from([True, False, None]),
        reason=st.sampled_from(["looked", "looked", " ", None]),
    )
    @precondition(lambda self: self.model.unfinished("unknown") or len(self.known) > 5)
    def resolve(self, pick: int, happened: bool | None, reason: str | None) -> None:
        job = self.job(pick, "unknown")
        self.both(
            lambda conn: sql.one(conn, "select taskq.resolve(%s, %s, '7', %s)", job, happened, reason),
            lambda model, _: model.resolve(job, happened, reason),
        )

    @rule(call=st.sampled_from(["pause_queue", "resume_queue", "resume_queue"]), queue=st.sampled_from(QUEUES))
    def steer(self, call: str, queue: str) -> None:
        self.plain(call, queue)

    def plain(self, call: str, *args: object) -> None:
        """A call that is named alike on both sides and answers one value."""
        query = f"select taskq.{call}({', '.join(['%s'] * len(args))})"
        self.both(lambda conn: sql.one(conn, query, *args), lambda model, _: getattr(model, call)(*args))

    # By hand, what the triggers refuse --------------------------------------------------------------------------------

    @rule(
        pick=PICKS,
        forged=st.sampled_from(
            [
                ("update taskq.jobs set claim_epoch = claim_epoch + 1 where id = %s", "WF002", ("pending", "running")),
                ("update taskq.jobs set status = 'unknown' where id = %s", "WF003", ("pending",)),
                ("update taskq.jobs set claimed_by = taskq.new_id() where id = %s", "WF003", ("running", "unknown")),
                ("update taskq.history set status = 'failed' where id = %s", "WF004", ("succeeded", "cancelled")),
            ]
        ),
    )
    @precondition(lambda self: self.known)
    def forge(self, pick: int, forged: tuple[str, str, tuple[str, ...]]) -> None:
        """A change by the owner that the triggers are there for."""
        query, sqlstate, statuses = forged
        job = self.job(pick, *statuses)
        if job in self.model.jobs and self.model.jobs[job].status in statuses:
            assert sql.refused(self.conn, query, job) == sqlstate


def test_any_life_of_a_queue_is_the_models(model_dsn: str) -> None:
    with psycopg.connect(model_dsn, autocommit=True) as conn:
        machine = type("AnyQueue", (Queue,), {"conn": conn})
        run_state_machine_as_test(machine, settings=profile(12, steps=40))

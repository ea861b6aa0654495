"""Short programs of several sessions at once, statement by statement, with commits and rollbacks between.

Transactions of one statement must look as if they had run one after the other: some order in which each comes after
those that were over before it began explains every answer and every row, by the model. A call that leaves out what
others have locked may answer with less while others are at work. Transactions of several statements, as clients may
make them, need not; of them it is asked that nothing is lost, doubled or ended twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sql
from database import differences, empty, keep, look, reported, restore
from hypothesis import given
from hypothesis import strategies as st
from lines import DEADLOCK, Call, Lines, Transaction
from model import Item, Model, Refused, Spec, Told
from profiles import profile
from psycopg.types.json import Jsonb

LANES = [("q", 5)]
KNOWN_KEY = "known"
Program = list[list[Transaction]]


class Scene:
    """The same start for each program: jobs in every status, and workers of every kind."""

    def __init__(self, conn: sql.Conn) -> None:
        empty(conn)
        self.lost, self.silent, self.alive = (sql.register(conn, queues=("q",)) for _ in range(3))
        self.idle = sql.register(conn, queues=("q",))
        self.jobs: list[UUID] = []
        self._unknown = self._running(conn, self.lost)
        sql.cancel(conn, self._unknown)
        expire = "update taskq.workers set lease_expires_at = taskq.now() - interval '1 s' where id = %s"
        conn.execute(expire, (self.lost,))
        conn.execute("select taskq.mark_lost()")
        sql.settle(conn)
        late = self._running(conn, self.silent, unique_key="b")
        asked = self._running(conn, self.silent, effect_class="pure")
        sql.cancel(conn, asked)
        conn.execute(expire, (self.silent,))
        failed = self._running(conn, self.alive, unique_key="c")
        sql.end(conn, self.alive, sql.End(failed, 1, "failed", 0, None, {"type": "E"}))
        fine = self._running(conn, self.alive, unique_key="a")
        last = self._running(conn, self.alive, max_attempts=1)
        overdue = self._new(conn, deadline_in=-1)
        first = self._new(conn, unique_key="d", idempotency_key=KNOWN_KEY)
        second = self._new(conn)
        self.jobs = [fine, last, first, second, failed, self._unknown, late, asked, overdue]
        self.workers = [self.idle, self.alive, self.silent]
        self.owners = {fine: self.alive, last: self.alive, late: self.silent, asked: self.silent}
        self.owners[self._unknown] = self.lost
        self.model, _ = look(conn)
        for key, held in self.model.idempotency.items():
            self.model.idempotency[key] = held._replace(request=("t", 0))
        keep(conn)

    @staticmethod
    def _new(conn: sql.Conn, **spec: Any) -> UUID:
        return sql.enqueue(conn, payload={"n": 0}, **spec)

    def _running(self, conn: sql.Conn, worker: UUID, **spec: Any) -> UUID:
        return sql.running(conn, worker, payload={"n": 0}, **spec)[1]


# Calls ----------------------------------------------------------------------------------------------------------------


def exchange(scene: Scene, worker: UUID, ends: Sequence[tuple[UUID, str, int]], limit: int) -> Call:
    """Ends of first attempts, then claims."""
    told = [Told(job, 1, outcome, number) for job, outcome, number in ends]
    sent = [
        sql.End(end.job, 1, end.outcome, end.outcome_id, end.outcome_id if end.outcome == "succeeded" else None)
        if end.outcome == "succeeded"
        else sql.End(end.job, 1, end.outcome, end.outcome_id, None, {"type": "E"})
        for end in told
    ]

    def ask(conn: sql.Conn) -> list[tuple[str, UUID | None, int | None]]:
        found = sql.exchange(conn, worker, sent, limit)
        return sorted(((row["kind"], row["job_id"], row["claim_epoch"]) for row in found), key=str)

    def say(model: Model, answer: Any, alone: bool) -> object:
        model.end_attempts(worker, told)
        missed = [("missed", *end) for end in model.missed(worker, told)]
        seen = {job for kind, job, _ in answer if kind == "job"}
        claims = model.claim(worker, limit, ("t",), LANES, () if alone else model.jobs.keys() - seen)
        claimed = [("lease", None, None)] if claims is None else [("job", *claim) for claim in claims]
        return sorted([*missed, *claimed], key=str)

    what = f"{_name(scene, worker)}, {[_told(scene, end) for end in ends]}, claim {limit}"
    return Call("exchange", what, ask, say, (worker, told))


def enqueue(items: Sequence[Item], on_conflict: str, hold: float | None) -> Call:
    spec = Spec(unique_hold=hold)

    def ask(conn: sql.Conn) -> list[tuple[UUID, bool]]:
        found = sql.rows(
            conn,
            "select * from taskq.enqueue_many(%s, %s::int[], %s::text[], %s::text[], %s::text[], %s)",
            Jsonb([spec._asdict()]),
            [1] * len(items),
            [Jsonb({"n": item.payload}) for item in items],
            [item.unique for item in items],
            [item.idempotency for item in items],
            on_conflict,
        )
        return [(row["job_id"], row["inserted"]) for row in found]

    def say(model: Model, answer: Any, _: bool) -> object:
        answered = [] if isinstance(answer, str) else [job for job, _ in answer]
        return model.enqueue_many(spec, items, on_conflict, answered)

    what = f"{[tuple(item) for item in items]}, {on_conflict}, hold {hold}"
    return Call("enqueue", what, ask, say, tuple(items))


def of_job(scene: Scene, name: str, job: UUID) -> Call:
    """cancel, retry or one of the two answers of resolve."""
    what = f"job {scene.jobs.index(job)}"
    match name:
        case "cancel":
            return Call(name, what, lambda conn: sql.cancel(conn, job), lambda model, *_: model.cancel(job), job)
        case "retry":
            return Call(name, what, lambda conn: sql.retry(conn, job), lambda model, *_: model.retry(job), job)
        case _:
            happened = name == "happened"
            return Call(
                name,
                what,
                lambda conn: sql.resolve(conn, job, happened, 7 if happened else None),
                lambda model, *_: model.resolve(job, happened, "looked"),
            )


def of_leader(name: str) -> Call:
    """mark_lost, settle_lost or sweep."""
    if name == "mark_lost":
        return Call(
            name,
            "",
            lambda conn: {row["w"] for row in sql.rows(conn, "select taskq.mark_lost() as w")},
            lambda model, answer, alone: model.mark_lost(busy=() if alone else model.workers.keys() - answer),
        )
    return Call(
        name,
        "",
        lambda conn: {row["job_id"]: row["settled"] for row in sql.rows(conn, f"select * from taskq.{name}()")},
        lambda model, answer, alone: getattr(model, name)(busy=() if alone else model.jobs.keys() - answer.keys()),
    )


def of_worker(scene: Scene, name: str, worker: UUID) -> Call:
    """renew, drain_worker or stop_worker."""
    what = _name(scene, worker)
    if name != "renew":
        return Call(
            name,
            what,
            lambda conn: sql.rows(conn, f"select taskq.{name}(%s)", worker) and None,
            lambda model, *_: getattr(model, name)(worker),
        )

    def ask(conn: sql.Conn) -> tuple[str, set[tuple[UUID, int, bool]]]:
        first, *claims = sql.rows(conn, "select * from taskq.renew(%s)", worker)
        return first["status"], {(c["job_id"], c["claim_epoch"], c["cancel_requested"]) for c in claims}

    return Call(name, what, ask, lambda model, *_: model.renew(worker))


def of_queue(name: str) -> Call:
    return Call(
        name,
        "q",
        lambda conn: sql.one(conn, f"select taskq.{name}('q')"),
        lambda model, *_: getattr(model, name)("q"),
    )


def _name(scene: Scene, worker: UUID) -> str:
    return {scene.idle: "idle", scene.alive: "alive", scene.silent: "silent", scene.lost: "lost"}[worker]


def _told(scene: Scene, end: tuple[UUID, str, int]) -> tuple[int, str, int]:
    return (scene.jobs.index(end[0]), *end[1:])


# Programs -------------------------------------------------------------------------------------------------------------

OPEN, FINISHED, UNKNOWN = (0, 1, 6, 7), (4,), (5,)
KEYS = st.sampled_from([None, "a", "b", "c", "d", "e"])
ENDS = st.lists(
    st.tuples(st.sampled_from([0, 0, 1, 5, 6, 7]), st.sampled_from([*sql.OUTCOMES, "succeeded", "retry"])),
    min_size=1,
    max_size=2,
)
CALLS = st.one_of(
    st.tuples(st.just("exchange"), ENDS, st.sampled_from([0, 0, 1, 3])),
    st.tuples(st.just("claim"), st.sampled_from([0, 0, 0, 1, 2]), st.sampled_from([1, 3])),
    st.tuples(
        st.just("enqueue"),
        st.lists(
            st.builds(Item, st.sampled_from([0, 0, 1]), KEYS, st.sampled_from([None, None, "x", KNOWN_KEY])),
            min_size=1,
            max_size=2,
        ),
        st.sampled_from(["existing", "existing", "raise"]),
        st.sampled_from([None, None, 100]),
    ),
    st.tuples(st.just("cancel"), st.sampled_from([0, 2, 2, 3, 4, 5, 6])),
    st.tuples(st.just("retry"), st.sampled_from([4, 4, 4, 2, 0])),
    st.tuples(st.sampled_from(["happened", "did not happen"]), st.just(5)),
    st.tuples(st.sampled_from(["mark_lost", "settle_lost", "sweep"])),
    st.tuples(st.sampled_from(["renew", "drain_worker", "stop_worker"]), st.sampled_from([0, 0, 1, 2])),
    st.tuples(st.sampled_from(["pause_queue", "resume_queue"])),
)
COMMITS = st.sampled_from([True, True, True, False])
SCHEDULES = st.lists(st.integers(0, 11), min_size=4, max_size=24)


def programs(calls: int, transactions: int) -> st.SearchStrategy[list[list[tuple[list[Any], bool]]]]:
    """Programs of two to four lines, each of at most so many transactions of at most so many calls."""
    transaction = st.tuples(st.lists(CALLS, min_size=1, max_size=calls), COMMITS)
    return st.lists(st.lists(transaction, min_size=1, max_size=transactions), min_size=2, max_size=4)


def written(scene: Scene, drawn: list[list[tuple[list[Any], bool]]]) -> Program:
    """The program that was drawn, on these jobs and workers."""
    numbers = iter(range(1, 1000))
    return [
        [
            Transaction([call for one in calls for call in _call(scene, one, numbers)], commits)
            for calls, commits in line
        ]
        for line in drawn
    ]


def _call(scene: Scene, drawn: Any, numbers: Iterator[int]) -> list[Call]:
    match drawn:
        case ("exchange", ends, limit):
            worker = scene.owners[scene.jobs[ends[0][0]]]
            mine = {scene.jobs[at]: outcome for at, outcome in ends if scene.owners[scene.jobs[at]] == worker}
            return [exchange(scene, worker, [(job, outcome, next(numbers)) for job, outcome in mine.items()], limit)]
        case ("claim", worker, limit):
            return [exchange(scene, scene.workers[worker], [], limit)]
        case ("enqueue", items, on_conflict, hold):
            return [enqueue(items, on_conflict, hold)]
        case ("cancel" | "retry" | "happened" | "did not happen" as name, job):
            return [of_job(scene, name, scene.jobs[job])]
        case ("renew" | "drain_worker" | "stop_worker" as name, worker):
            return [of_worker(scene, name, scene.workers[worker])]
        case ("pause_queue" | "resume_queue" as name,):
            return [of_queue(name)]
        case (name,):
            return [of_leader(name)]
    raise AssertionError(drawn)


# One after the other --------------------------------------------------------------------------------------------------


def explained(before: Model, transactions: Sequence[Transaction], after: Model) -> bool:
    """Whether some order of the transactions gives all their answers, and what stands in the tables after them."""
    told = [t for t in transactions if t.committed or (t.refused is not None and t.commits)]
    met = [t for t in transactions if t.began]

    def alone(one: Transaction) -> bool:
        return not any(other is not one and other.began < one.ended and one.began < other.ended for other in met)

    def search(model: Model, left: list[Transaction]) -> bool:
        if not left:
            return differences(model, after) == []
        for one in left:
            if any(other.ended < one.began for other in left):
                continue
            then = model.copy()
            if _answers(then, one, alone(one)) and search(
                then if one.committed else model, [t for t in left if t is not one]
            ):
                return True
        return False

    return search(before, told)


def _answers(model: Model, one: Transaction, alone: bool) -> bool:
    for call, answer in zip(one.calls, one.answers, strict=False):
        try:
            said = call.say(model, answer, alone)
        except Refused as refused:
            said = f"refused: {refused.sqlstate}"
        except AttributeError:
            return False  # refused here, answered by the model
        if said != answer:
            return False
    return True


@pytest.fixture(scope="module")
def lines(model_dsn: str) -> Iterator[Lines]:
    opened = Lines(model_dsn, 4)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def watch(model_dsn: str) -> Iterator[sql.Conn]:
    with psycopg.connect(model_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="module")
def scene(watch: sql.Conn) -> Scene:
    return Scene(watch)


@profile(60)
@given(drawn=programs(1, 2), schedule=SCHEDULES)
def test_single_statements_are_as_if_one_after_the_other(
    lines: Lines, watch: sql.Conn, scene: Scene, drawn: list[Any], schedule: list[int]
) -> None:
    restore(watch)
    program = written(scene, drawn)
    lines.run(program, schedule)
    done = [transaction for line in program for transaction in line]
    assert not [transaction for transaction in done if transaction.refused == DEADLOCK]
    assert not [transaction for transaction in done if transaction.refused and transaction.refused[:2] != "WF"]
    assert held_up(done) == []
    after, broken = look(watch)
    assert reported(broken) == after.unstarted()
    if not explained(scene.model, done, after):
        told = "\n".join(map(repr, done))
        raise AssertionError(f"no order explains:\n{told}\n{chr(10).join(differences(scene.model, after))}")


def held_up(done: Sequence[Transaction]) -> list[Transaction]:
    """Exchanges that waited for a transaction which does nothing but enqueue: clients may keep those open for long."""
    return [
        one
        for one in done
        if all(call.name == "exchange" for call in one.calls)
        and any(all(call.name == "enqueue" for call in other.calls) for other in one.waited_for)
    ]


# Several statements ---------------------------------------------------------------------------------------------------


@profile(30)
@given(drawn=programs(3, 1), schedule=SCHEDULES)
def test_transactions_of_several_statements_lose_and_double_nothing(
    lines: Lines, watch: sql.Conn, scene: Scene, drawn: list[Any], schedule: list[int]
) -> None:
    restore(watch)
    program = written(scene, drawn)
    lines.run(program, schedule)
    done = [transaction for line in program for transaction in line]
    after, broken = look(watch)
    assert reported(broken) == after.unstarted()
    # Clients that take locks in an order of their own may meet in a deadlock; the calls of taskq alone do not.
    assert held_up(done) == []
    may_meet = any(len(transaction.calls) > 1 for transaction in done)
    assert not [t for t in done if t.refused and t.refused[:2] != "WF" and not (may_meet and t.refused == DEADLOCK)]
    told = "\n".join(map(repr, done))
    wrong = [*wrong_ends(done, after), *wrong_enqueues(scene, done, after), *wrong_cancels(scene, done, after)]
    assert not wrong, f"{wrong}\n{told}"


def said(done: Sequence[Transaction], name: str) -> Iterator[tuple[Call, Any]]:
    """What calls of this name were answered in transactions that committed."""
    for transaction in done:
        if transaction.committed:
            for call, answer in zip(transaction.calls, transaction.answers, strict=True):
                if call.name == name:
                    yield call, answer


def wrong_ends(done: Sequence[Transaction], after: Model) -> list[str]:
    """Each claim went to one worker, and is open or on record as its; each end that was confirmed is on record."""
    wrong: list[str] = []
    record: dict[tuple[UUID, int], tuple[UUID | None, int | None]] = {
        key: (ended.worker_id, ended.outcome_id) for key, ended in after.ledger.items()
    }
    record |= {(job.id, job.claim_epoch): (job.worker, job.outcome_id) for job in after.jobs.values() if job.worker}
    claims: Counter[tuple[UUID, int]] = Counter()
    for call, answer in said(done, "exchange"):
        worker, told = call.given
        for claim in [(job, epoch) for kind, job, epoch in answer if kind == "job"]:
            claims[claim] += 1
            if record.get(claim, (None, None))[0] != worker:
                wrong.append(f"{claim} was claimed by {worker}, the record says {record.get(claim)}")
        missed = {(job, epoch) for kind, job, epoch in answer if kind == "missed"}
        for end in told:
            confirmed = (end.job, end.epoch) not in missed
            if confirmed != (record.get((end.job, end.epoch)) == (worker, end.outcome_id)):
                wrong.append(f"{end} by {worker}: confirmed {confirmed}, the record says {record}")
    return wrong + [f"{claim} was claimed {n} times" for claim, n in claims.items() if n > 1]


def wrong_enqueues(scene: Scene, done: Sequence[Transaction], after: Model) -> list[str]:
    """There are the jobs of before and those that were answered as new; a key stands for one of them."""
    new = [job for _, answer in said(done, "enqueue") for job, inserted in answer if inserted]
    wrong = [f"the jobs are {after.jobs.keys()}"] if after.jobs.keys() != {*scene.jobs, *new} else []
    if len(set(new)) != len(new):
        wrong.append(f"answered as new twice: {new}")
    keys: dict[str, set[UUID]] = {}
    for call, answer in said(done, "enqueue"):
        for item, (job, _) in zip(call.given, answer, strict=True):
            if job not in after.jobs:
                wrong.append(f"answered with {job}, which is not there")
            if item.idempotency:
                keys.setdefault(item.idempotency, set()).add(job)
    return wrong + [f"idempotency key {key} stands for {jobs}" for key, jobs in keys.items() if len(jobs) > 1]


def wrong_cancels(scene: Scene, done: Sequence[Transaction], after: Model) -> list[str]:
    """A job that nobody reopened is what its cancel said."""
    reopened = {call.given for call, answer in said(done, "retry") if answer == "reopened"}
    fits = {
        "cancelled": ("cancelled",),
        "requested": ("running", "succeeded", "cancelled", "unknown"),
        "finished": ("succeeded", "failed", "cancelled"),
        # Unknown, or decided later.
        "unknown": ("unknown", "succeeded", "failed", "cancelled", "pending", "running"),
    }
    return [
        f"cancel of job {scene.jobs.index(call.given)} answered {answer}, it is {after.jobs[call.given].status}"
        for call, answer in said(done, "cancel")
        if call.given not in reopened and after.jobs[call.given].status not in fits.get(answer, ())
    ]

"""Parents and child runs at once: parents are locked before children, those before jobs; nobody waits in a circle.

The job that waits for a child run is locked by nobody who does not hold that run, so that its end finds it free.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
from children_kit import Family, cancel_run, child_of, fail_child, family, plans, retry_run
from runs_kit import do, edge, finish, info, job_of, node, start, store, take, tree, worker_for
from sql import BOUND, Conn, End, cancel, claim, end, exchange, get, one, rows, sessions, violations

WRITES = "select from taskq.runs where id = %s for update"


def lock(conn: Conn, table: str, row: UUID) -> None:
    """Fails where anybody has it."""
    conn.execute(f"select from taskq.{table} where id = %s for update nowait", (row,))  # type: ignore[arg-type]


def waits_without(
    dsn: str, held: UUID, call: Callable[[Conn], Any], *, runs: tuple[UUID, ...] = (), jobs: tuple[UUID, ...] = ()
) -> Any:
    """While somebody holds a run the call waits for it, and has locked neither these runs nor these jobs."""
    with sessions(dsn) as [holder, other]:
        holder.begin()
        holder.do(lambda c: c.execute(WRITES, (held,)))
        waiting = other.start(call)
        other.waits_for(holder)
        for table, ids in (("runs", runs), ("jobs", jobs)):
            for each in ids:
                holder.do(lambda c, table=table, each=each: lock(c, table, each))  # type: ignore[misc]
        holder.commit()
        return waiting.result(BOUND)


def half_way(conn: Conn, **more: Any) -> tuple[Family, UUID, dict[str, Any]]:
    """A family whose child has only its last node left, which runs; with the child and that claim."""
    made = family(conn, **more)
    do(conn, made.worker, "x")
    return made, child_of(conn, made.parent), take(conn, made.worker, "y")["y"]


def ends(made: Family, claimed: dict[str, Any], outcome: str = "succeeded") -> Callable[[Conn], Any]:
    return lambda c: end(c, made.worker, End(claimed["job_id"], claimed["claim_epoch"], outcome))


# Who is locked first --------------------------------------------------------------------------------------------------


def steer(*jobs: UUID) -> Callable[[Conn], Any]:
    return lambda c: rows(c, "select answer from taskq.steer_many('cancel', %s::uuid[])", list(jobs))


@pytest.mark.parametrize("by", ["job", "batch", "run"])
def test_a_cancel_takes_parent_and_child_before_any_job(dsn: str, conn: Conn, by: str) -> None:
    made = family(conn, edge="collect")
    child = child_of(conn, made.parent)
    x = job_of(conn, child, "x")
    call = {
        "job": lambda c: cancel(c, made.job),
        "batch": steer(made.job),
        "run": lambda c: cancel_run(c, made.parent),
    }[by]
    waits_without(dsn, child, call, jobs=(made.job, x))
    assert info(conn, child)["status"] == "cancelled"
    assert tree(conn, made.parent)["kid"] == "cancelled"


@pytest.mark.parametrize("by", ["job", "batch", "run"])
def test_a_cancel_takes_the_parent_before_the_child(dsn: str, conn: Conn, by: str) -> None:
    made = family(conn, edge="collect")
    child = child_of(conn, made.parent)
    x = job_of(conn, child, "x")
    call = {
        "job": lambda c: cancel(c, made.job),
        "batch": steer(x, made.job),
        "run": lambda c: cancel_run(c, made.parent),
    }[by]
    waits_without(dsn, made.parent, call, runs=(child,), jobs=(made.job, x))
    assert info(conn, child)["finished_at"] is not None


def test_runs_are_taken_by_depth_before_they_are_by_id(dsn: str, conn: Conn) -> None:
    made = family(conn)
    child = child_of(conn, made.parent)
    later = start(conn, store(conn, [node("z")], workflow="later"))
    assert later > child
    answer = waits_without(dsn, later, steer(job_of(conn, child, "x"), job_of(conn, later, "z")), runs=(child,))
    assert [row["answer"] for row in answer] == ["cancelled", "cancelled"]


def test_a_retry_takes_the_parent_before_its_children_and_those_before_any_job(dsn: str, conn: Conn) -> None:
    made = family(conn)
    child = fail_child(conn, made)
    assert waits_without(dsn, made.parent, lambda c: retry_run(c, made.parent), runs=(child,)) == "reopened"
    assert tree(conn, child)["x"] == "pending"


def test_a_retry_waits_for_who_is_at_a_child(dsn: str, conn: Conn) -> None:
    made = family(conn)
    child = fail_child(conn, made)
    assert waits_without(dsn, child, lambda c: retry_run(c, made.parent)) == "reopened"


# Who waits for nobody -------------------------------------------------------------------------------------------------


def test_the_end_of_a_child_waits_for_nobody_who_is_at_its_parent(dsn: str, conn: Conn) -> None:
    made, child, y = half_way(conn)
    with sessions(dsn) as [holder, other]:
        holder.begin()
        holder.do(lambda c: c.execute(WRITES, (made.parent,)))
        assert other.do(ends(made, y)) == 1
        assert info(conn, child)["status"] == "succeeded"
        assert get(conn, made.job)["status"] == "pending"
        holder.commit()


def test_children_of_one_parent_end_beside_each_other(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    inner = store(conn, [node("x")], workflow="inner")
    kids = [node(f"k{n}", task="inner:await", child=inner) for n in range(2)]
    parent = start(conn, store(conn, [*kids, node("join")], [edge(0, 2), edge(1, 2)], workflow="outer"))
    claims = claim(conn, worker, 10, tasks=["x"])
    made = Family(parent, worker, parent)
    with sessions(dsn) as [first, second]:
        first.begin()
        first.do(ends(made, claims[0]))
        second.begin()
        second.do(ends(made, claims[1]))
        second.commit()
        first.commit()
    waits = claim(conn, worker, 10, tasks=["inner:await"])
    assert exchange(conn, worker, [End(each["job_id"], 1, "succeeded") for each in waits]) == []
    assert tree(conn, parent)["join"] == "pending"


# Both at once ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_a_cancel_of_the_parent_and_the_last_end_of_its_child_agree(
    dsn: str, conn: Conn, cancelled_first: bool
) -> None:
    made, child, y = half_way(conn)
    calls = [lambda c: cancel_run(c, made.parent), ends(made, y)]
    with sessions(dsn) as [first, second]:
        first.begin()
        first.do(calls[0 if cancelled_first else 1])
        waiting = second.start(calls[1 if cancelled_first else 0])
        second.waits_for(first)
        first.commit()
        waiting.result(BOUND)
    # Either way its body has returned, and so the node succeeds, and the parent is cancelled.
    assert info(conn, child)["status"] == "succeeded"
    do(conn, made.worker, "inner:await")
    assert tree(conn, made.parent) == {"a": "succeeded", "kid": "succeeded", "b": "cancelled"}
    assert info(conn, made.parent)["status"] == "cancelled"


@pytest.mark.parametrize("cancelled_first", [True, False])
def test_a_cancel_and_the_start_of_a_child_agree(dsn: str, conn: Conn, cancelled_first: bool) -> None:
    worker = worker_for(conn)
    parent = start(conn, plans(conn))
    a = take(conn, worker, "a")["a"]
    made = Family(parent, worker, parent)
    calls = [lambda c: cancel_run(c, parent), ends(made, a)]
    with sessions(dsn) as [first, second]:
        first.begin()
        first.do(calls[0 if cancelled_first else 1])
        waiting = second.start(calls[1 if cancelled_first else 0])
        second.waits_for(first)
        first.commit()
        waiting.result(BOUND)
    found = rows(conn, "select status from taskq.runs where parent_run = %s", parent)
    assert [row["status"] for row in found] == ([] if cancelled_first else ["cancelled"])
    assert tree(conn, parent) == {"a": "succeeded", "kid": "cancelled", "b": "cancelled"}


def test_a_cancel_of_a_child_and_one_of_its_parent_agree(dsn: str, conn: Conn) -> None:
    made = family(conn)
    child = child_of(conn, made.parent)
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: cancel_run(c, child)) == "cancelled"
        waiting = second.start(lambda c: cancel_run(c, made.parent))
        second.waits_for(first)
        first.commit()
        assert waiting.result(BOUND) == "cancelled"
    assert tree(conn, made.parent) == {"a": "succeeded", "kid": "cancelled", "b": "cancelled"}


def test_a_child_that_somebody_was_at_is_stopped_a_moment_later(dsn: str, conn: Conn) -> None:
    made = family(conn, nodes=[node("beside")])
    child = child_of(conn, made.parent)
    beside = take(conn, made.worker, "beside")["beside"]
    with psycopg.connect(dsn) as holder:
        holder.execute("select from taskq.runs where id = %s for update", (child,))
        finish(conn, made.worker, beside, "failed")
        assert tree(conn, made.parent) == {"a": "succeeded", "kid": "held", "b": "cancelled", "beside": "failed"}
        assert violations(conn) == []
        stop = "select answer from taskq.stop_children()"
        assert [row["answer"] for row in rows(conn, stop)] == ["left alone"]
        look = "select name from taskq.look(%s, 10, null, '{}', '{}') where kind = 'duty'"
        assert "stop_children" in [row["name"] for row in rows(conn, look, made.worker)]
    assert [row["answer"] for row in rows(conn, stop)] == ["stopped"]
    assert rows(conn, stop) == []
    assert "stop_children" not in [row["name"] for row in rows(conn, look, made.worker)]
    assert info(conn, child)["status"] == "cancelled"
    do(conn, made.worker, "inner:await", "failed")
    assert (info(conn, made.parent)["status"], tree(conn, made.parent)["kid"]) == ("failed", "cancelled")


# All at once ----------------------------------------------------------------------------------------------------------

TASKS = ["a", "b", "x", "y", "beside", "inner:await"]
ROUNDS = 60


def fuss(dsn: str, worker: UUID, seed: int) -> Counter[str]:
    """Claim, end, cancel, retry, heal and sweep at random; what was refused, by SQLSTATE."""
    chance = random.Random(seed)
    refusals: Counter[str] = Counter()
    held: list[dict[str, Any]] = []
    with psycopg.connect(dsn, autocommit=True) as conn:

        def some(query: str, most: int) -> list[UUID]:
            found = [row[0] for row in conn.execute(query).fetchall()]  # type: ignore[arg-type]
            return chance.sample(found, min(most, len(found)))

        def does(claimed: dict[str, Any]) -> str:
            if claimed["task"] == "inner:await":  # its body says what became of the child
                status = one(conn, "select status from taskq.runs where parent_node = %s", claimed["job_id"])
                return "succeeded" if status == "succeeded" else "failed"
            return chance.choice(["succeeded", "succeeded", "failed"])

        def ends_some() -> None:
            batch = [held.pop() for _ in range(min(len(held), 3))]
            outcomes = [does(each) for each in batch]
            given = [End(c["job_id"], c["claim_epoch"], o) for c, o in zip(batch, outcomes, strict=True)]
            answers = exchange(conn, worker, given)
            busy = {row["job_id"] for row in answers if row["kind"] == "busy"}
            held.extend(each for each in batch if each["job_id"] in busy)

        def operates() -> None:
            for run in some("select id from taskq.runs", 1):
                one(conn, chance.choice(["select taskq.cancel_run(%s)", "select taskq.retry_run(%s)"]), run)

        def steers() -> None:
            jobs = some("select id from taskq.jobs", 4)
            action = chance.choice(["cancel", "retry"])
            rows(conn, "select * from taskq.steer_many(%s, %s::uuid[])", action, jobs)

        def sweeps() -> None:
            for function in ("heal_runs", "stop_children", "settle_lost", "sweep"):
                rows(conn, f"select * from taskq.{function}()")

        for _ in range(ROUNDS):
            held += claim(conn, worker, 3, tasks=TASKS)
            try:
                chance.choice([ends_some, ends_some, ends_some, ends_some, steers, operates, sweeps])()
            except psycopg.Error as error:
                refusals[error.sqlstate or "?"] += 1
        while held:
            ends_some()
    return refusals


def test_whoever_does_what_nobody_waits_in_a_circle(dsn: str, conn: Conn) -> None:
    plan = plans(conn, nodes=[node("beside")], edge="collect")
    for _ in range(6):
        start(conn, plan)
    workers = [worker_for(conn) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        refusals = sum(pool.map(lambda each: fuss(dsn, each[1], each[0]), enumerate(workers)), Counter())
    assert set(refusals) <= {"WF026"}, refusals  # a run that is not to be retried
    assert violations(conn) == []

"""Work budgets under several hands at once: never more begin than may, and what waits is told when more may."""

from __future__ import annotations

from uuid import UUID

import psycopg
import pytest
from runs_kit import do, edge, finish, node, start, store, take, tree, worker_for
from sql import BOUND, Conn, one, rows, sessions, violations

ALLOW = "select taskq.set_work_budget(%s, %s, 'why', 'me')"


def begun(conn: Conn, run: UUID) -> int:
    return int(one(conn, "select begun from taskq.work_budgets where run_id = %s", run))


def carry_on(conn: Conn) -> list[UUID]:
    return [row["run_id"] for row in rows(conn, "select * from taskq.carry_on_run()")]


def twins(conn: Conn, budget: int) -> UUID:
    """A run of two child runs, of x1 and y1 and of x2 and y2, each in a row."""
    kids = []
    for n in (1, 2):
        inner = store(conn, [node(f"x{n}"), node(f"y{n}")], [edge(0, 1)], workflow=f"inner{n}")
        kids.append(node(f"kid{n}", task="inner:await", child=inner))
    return start(conn, store(conn, kids, work_budget=budget))


def test_two_runs_of_a_tree_that_go_on_at_once_begin_no_more_than_they_may(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run = twins(conn, 5)
    claims = take(conn, worker, "x1", "x2")
    assert (set(claims), begun(conn, run)) == ({"x1", "x2"}, 4)
    with sessions(dsn) as [one_end, other]:
        one_end.begin()
        one_end.do(lambda c: finish(c, worker, claims["x1"]))
        # It does not wait for the first, which may go on for long, and leaves what is ready to later.
        other.do(lambda c: finish(c, worker, claims["x2"]))
        one_end.commit()
    assert begun(conn, run) == 5
    assert carry_on(conn) == []
    assert list(take(conn, worker, "y1", "y2")) == ["y1"]
    assert one(conn, ALLOW, run, 6) == "set"
    assert len(carry_on(conn)) == 1
    assert list(take(conn, worker, "y1", "y2")) == ["y2"]
    assert violations(conn, "all") == []


def test_what_finds_the_budget_taken_is_tried_again_by_the_leader(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run = twins(conn, 9)
    claims = take(conn, worker, "x1", "x2")
    with sessions(dsn) as [one_end, other], psycopg.connect(dsn, autocommit=True) as told:
        told.execute("listen taskq_due")
        one_end.begin()
        one_end.do(lambda c: finish(c, worker, claims["x1"]))
        other.do(lambda c: finish(c, worker, claims["x2"]))
        assert next(told.notifies(timeout=BOUND)).channel == "taskq_due"
        # Nothing to do before the other has ended; asked again and again it would keep the leader busy.
        assert other.do(carry_on) == []
        assert list(told.notifies(timeout=0.2)) == []
        one_end.commit()
        assert len(other.do(carry_on)) == 1
    assert set(take(conn, worker, "y1", "y2")) == {"y1", "y2"}
    assert begun(conn, run) == 6


def test_a_map_that_finds_the_budget_taken_is_tried_again_by_the_leader(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    inner = store(conn, [node("x1"), node("y1")], [edge(0, 1)], workflow="inner1")
    each = node("each", {"x": {"input": "x", "path": []}})
    items = store(conn, [each], workflow="flow:each", map={"item": "x", "most": 9, "at_once": 1}, parameters=["x"])
    over = node("over", {"x": {"value": [1, 2]}}, task="flow:await", child=items)
    start(conn, store(conn, [node("kid1", task="inner:await", child=inner), over], work_budget=9))
    assert len(carry_on(conn)) == 1
    claims = take(conn, worker, "x1", "each")
    with sessions(dsn) as [one_end, other], psycopg.connect(dsn, autocommit=True) as told:
        told.execute("listen taskq_due")
        one_end.begin()
        one_end.do(lambda c: finish(c, worker, claims["x1"]))
        other.do(lambda c: finish(c, worker, claims["each"]))
        assert next(told.notifies(timeout=BOUND)).channel == "taskq_due"
        one_end.commit()
    assert len(carry_on(conn)) == 1
    assert set(take(conn, worker, "y1", "each")) == {"y1", "each"}


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_more_that_is_allowed_while_an_end_finds_nothing_left_reaches_what_waits(
    dsn: str, conn: Conn, level: str
) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)], work_budget=1))
    claims = take(conn, worker, "a")
    with sessions(dsn) as [ending, allowing], psycopg.connect(dsn, autocommit=True) as told:
        told.execute("listen taskq_due")
        ending.begin()
        ending.do(lambda c: finish(c, worker, claims["a"]))
        allowing.do(lambda c: c.execute(f"set default_transaction_isolation = '{level}'"))
        waiting = allowing.start(lambda c: one(c, ALLOW, run, 2))
        allowing.waits_for(ending)
        ending.commit()
        assert waiting.result(BOUND) == "set"
        assert next(told.notifies(timeout=BOUND)).payload == str(run)
    assert carry_on(conn) == [run]
    do(conn, worker, "b")
    assert violations(conn, "all") == []


def test_an_end_beside_more_that_is_being_allowed_waits_for_nobody(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)], work_budget=1))
    claims = take(conn, worker, "a")
    with sessions(dsn) as [allowing, ending], psycopg.connect(dsn, autocommit=True) as told:
        allowing.begin()
        assert allowing.do(lambda c: one(c, ALLOW, run, 2)) == "set"
        ending.do(lambda c: finish(c, worker, claims["a"]))
        assert (tree(conn, run)["b"], ending.do(carry_on)) == ("waiting", [])
        # The leader, who was told by the end, has passed over it: it is told again.
        told.execute("listen taskq_due")
        allowing.commit()
        assert next(told.notifies(timeout=BOUND)).payload == str(run)
    assert carry_on(conn) == [run]
    do(conn, worker, "b")
    assert violations(conn, "all") == []


def test_a_budget_that_is_set_to_what_it_is_tells_whom_it_kept_from_it(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)], work_budget=5))
    claims = take(conn, worker, "a")
    with sessions(dsn) as [allowing, ending], psycopg.connect(dsn, autocommit=True) as told:
        allowing.begin()
        assert allowing.do(lambda c: one(c, ALLOW, run, 5)) == "already"
        ending.do(lambda c: finish(c, worker, claims["a"]))
        assert carry_on(conn) == []
        told.execute("listen taskq_due")
        allowing.commit()
        assert next(told.notifies(timeout=BOUND)).payload == str(run)
    assert carry_on(conn) == [run]
    assert list(take(conn, worker, "b")) == ["b"]

"""Ends of children against suspensions, cancels and locks of their parents, by real sessions: none is missed."""

from __future__ import annotations

from uuid import UUID

import pytest
from runs_kit import node, store, worker_for
from signals_kit import child, held_for_child, send, suspend
from sql import (
    Conn,
    End,
    cancel,
    claim,
    claim_one,
    end,
    get,
    lose,
    one,
    policy,
    retry,
    rows,
    running,
    sessions,
    settle,
    status,
    violations,
)

CHILD = ("child", "c", 1)


def parent(conn: Conn) -> tuple[UUID, UUID]:
    policy(conn)
    return running(conn, worker_for(conn))


def claim_child(conn: Conn, worker: UUID) -> UUID:
    [row] = claim(conn, worker, 1, tasks=["c"], lanes=[("c", 5)])
    return UUID(str(row["job_id"]))


def rechecks(conn: Conn) -> list[UUID]:
    return [row["job_id"] for row in rows(conn, "select job_id from taskq.child_rechecks")]


def test_a_suspension_that_waited_for_the_end_of_a_child_leaves_the_job_due(dsn: str, conn: Conn) -> None:
    worker, job = parent(conn)
    started = child(conn, worker, job)[3]
    claim_child(conn, worker)
    with sessions(dsn) as [of_child, of_parent]:
        of_child.begin()
        assert of_child.do(lambda c: end(c, worker, End(started))) == 1
        waiting = of_parent.start(lambda c: suspend(c, worker, job, CHILD))
        of_parent.waits_for(of_child)
        of_child.commit()
        assert waiting.result() == 1
    assert status(conn, job) == "pending"
    assert rechecks(conn) == []
    assert violations(conn) == []


@pytest.mark.parametrize("undone", [False, True])
def test_the_end_of_a_child_waits_for_no_suspension_and_the_sweep_looks(dsn: str, conn: Conn, undone: bool) -> None:
    worker, job = parent(conn)
    started = child(conn, worker, job)[3]
    claim_child(conn, worker)
    with sessions(dsn, 1) as [of_parent]:
        of_parent.begin()
        assert of_parent.do(lambda c: suspend(c, worker, job, CHILD)) == 1
        assert end(conn, worker, End(started)) == 1
        assert rechecks(conn) == [job]
        assert one(conn, "select taskq.sweep_children()") == 0, "somebody still has it"
        assert rechecks(conn) == [job]
        if undone:
            of_parent.rollback()
        else:
            of_parent.commit()
    conn.execute("update taskq.child_rechecks set due_at = taskq.now()")
    assert status(conn, job) == ("running" if undone else "held")
    assert violations(conn) == []
    assert one(conn, "select taskq.sweep_children()") == int(not undone)
    assert status(conn, job) == ("running" if undone else "pending")
    assert rechecks(conn) == []
    assert violations(conn) == []


def test_the_end_of_a_child_waits_for_no_sender_that_has_its_parent(dsn: str, conn: Conn) -> None:
    worker, job = parent(conn)
    started = held_for_child(conn, worker, job)
    claim_child(conn, worker)
    with sessions(dsn, 1) as [sender]:
        sender.begin()
        assert sender.do(lambda c: send(c, job)) == "sent"
        assert end(conn, worker, End(started)) == 1
        sender.commit()
    assert rechecks(conn) == [job]
    assert one(conn, "select taskq.sweep_children()") == 1
    assert status(conn, job) == "pending"


def test_an_end_that_is_undone_wakes_nobody(dsn: str, conn: Conn) -> None:
    worker, job = parent(conn)
    started = held_for_child(conn, worker, job)
    claim_child(conn, worker)
    with sessions(dsn, 1) as [of_child]:
        of_child.begin()
        assert of_child.do(lambda c: end(c, worker, End(started))) == 1
        of_child.rollback()
    assert (get(conn, job)["held_reason"], status(conn, started)) == ("child", "running")
    assert violations(conn) == []


def test_above_read_committed_the_sweep_tells_the_parent(dsn: str, conn: Conn) -> None:
    worker, job = parent(conn)
    started = held_for_child(conn, worker, job)
    with sessions(dsn, 1) as [caller]:
        caller.do(lambda c: c.execute("begin isolation level repeatable read"))
        assert caller.do(lambda c: cancel(c, started)) == "cancelled"
        assert caller.do(lambda c: one(c, "select taskq.sweep_children()")) == 0
        caller.commit()
    assert rechecks(conn) == [job]
    assert one(conn, "select taskq.sweep_children()") == 1
    assert claim_one(conn, worker)["job_id"] == job


def test_two_starts_of_one_child_start_one(dsn: str, conn: Conn) -> None:
    worker, job = parent(conn)
    with sessions(dsn) as [first, second]:
        first.begin()
        started = first.do(lambda c: child(c, worker, job))[3]
        waiting = second.start(lambda c: child(c, worker, job))
        second.waits_for(first)
        first.commit()
        assert waiting.result()[3] == started
    assert one(conn, "select count(*) from taskq.jobs where task = 'c'") == 1


def test_a_start_that_waited_for_the_loss_of_its_claim_starts_nothing(dsn: str, conn: Conn) -> None:
    worker, job = parent(conn)
    lose(conn, worker)
    with sessions(dsn) as [leader, late]:
        leader.begin()
        assert leader.do(settle) == {job: "pending"}
        waiting = late.start(lambda c: child(c, worker, job))
        late.waits_for(leader)
        leader.commit()
        assert waiting.result()[0] == "fenced"
    assert one(conn, "select count(*) from taskq.jobs where task = 'c'") == 0


def test_a_cancel_waits_for_none_that_has_a_child_and_the_sweep_cancels_it(dsn: str, conn: Conn) -> None:
    worker, job = parent(conn)
    mine = child(conn, worker, job)[3]
    run = child(conn, worker, job, "run", plan=store(conn, [node("a")]))[3]
    assert suspend(conn, worker, job, CHILD) == 1
    with sessions(dsn) as [sender, operator]:
        sender.begin()
        assert sender.do(lambda c: send(c, mine)) == "sent"
        operator.begin()
        operator.do(lambda c: c.execute("select from taskq.runs where id = %s for update", (run,)))
        assert cancel(conn, job) == "cancelled"
        assert (status(conn, mine), rechecks(conn)) == ("pending", [job])
        assert violations(conn) == []
        assert one(conn, "select taskq.sweep_children()") == 1
        assert rechecks(conn) == [job]
        sender.commit()
        operator.commit()
    assert one(conn, "select taskq.sweep_children()") == 1
    assert status(conn, mine) == "cancelled"
    assert one(conn, "select status from taskq.runs where id = %s", run) == "cancelled"
    assert rechecks(conn) == []
    assert violations(conn) == []


def test_a_child_that_ends_while_its_parent_is_cancelled_keeps_its_end(dsn: str, conn: Conn) -> None:
    worker, job = parent(conn)
    started = held_for_child(conn, worker, job)
    claim_child(conn, worker)
    with sessions(dsn, 1) as [of_child]:
        of_child.begin()
        assert of_child.do(lambda c: end(c, worker, End(started))) == 1
        of_child.commit()
    assert cancel(conn, job) == "cancelled"
    assert status(conn, started) == "succeeded"
    assert violations(conn) == []


def test_a_child_that_is_reopened_while_its_parent_is_cancelled_is_cancelled_by_the_sweep(dsn: str, conn: Conn) -> None:
    worker, job = parent(conn)
    started = held_for_child(conn, worker, job)
    claim_child(conn, worker)
    end(conn, worker, End(started, outcome="failed", error={"type": "E", "message": "m"}))
    with sessions(dsn, 1) as [operator]:
        operator.begin()
        assert operator.do(lambda c: cancel(c, job)) == "cancelled"
        assert retry(conn, started) == "reopened"
        operator.commit()
    assert status(conn, started) == "pending"
    assert violations(conn) == []
    assert one(conn, "select taskq.sweep_children()") == 1
    assert status(conn, started) == "cancelled"
    assert rechecks(conn) == []

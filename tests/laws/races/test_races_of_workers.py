"""Workers, the leader and each other: ends, claims, lost leases and sweeps, each driven into its lock wait before it
goes on. The outcome is one of the listed ones whoever commits first, and the record is whole."""

from __future__ import annotations

from uuid import UUID

import pytest
from helpers import eventually
from sql import (
    OUTCOMES,
    Conn,
    End,
    attempts,
    claim,
    claim_one,
    end,
    enqueue,
    enqueue_many,
    exchange,
    get,
    lose,
    make_due,
    one,
    register,
    rows,
    running,
    sessions,
    settle,
)


def expire(conn: Conn, worker: UUID) -> None:
    conn.execute("update taskq.workers set lease_expires_at = '-infinity' where id = %s", (worker,))


def mark_lost(conn: Conn) -> list[UUID]:
    return [row["id"] for row in rows(conn, "select m as id from taskq.mark_lost() m")]


# Two ends of one attempt ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", OUTCOMES)
@pytest.mark.parametrize("first", ["succeeded", "failed", "retry", "release"])
def test_two_outcomes_at_once_end_the_attempt_once(dsn: str, conn: Conn, first: str, second: str) -> None:
    worker, job = running(conn, max_attempts=9)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: exchange(c, worker, [End(job, 1, first, 1)])) == []
        answer = b.start(lambda c: exchange(c, worker, [End(job, 1, second, 2)]))
        b.waits_for(a)
        a.commit()
        [missed] = answer.result(20)
    assert (missed["kind"], missed["job_id"]) == ("missed", job)
    [record] = rows(conn, "select outcome_id from taskq.attempts where job_id = %s", job)
    assert record["outcome_id"] == 1


@pytest.mark.parametrize("finish", ["commit", "rollback"])
@pytest.mark.parametrize("outcome", ["succeeded", "failed", "retry", "snooze"])
def test_an_end_sent_again_while_the_first_is_in_progress_is_confirmed(
    dsn: str, conn: Conn, outcome: str, finish: str
) -> None:
    worker, job = running(conn)
    sent = End(job, 1, outcome, 7, delay=60)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: exchange(c, worker, [sent])) == []
        answer = b.start(lambda c: exchange(c, worker, [sent]))
        b.waits_for(a)
        # While the first has not ended there is no record: neither ours nor another's.
        assert attempts(conn, job) == []
        getattr(a, finish)()
        assert answer.result(20) == []
    [record] = rows(conn, "select outcome_id from taskq.attempts where job_id = %s", job)
    assert record["outcome_id"] == 7


# Claims ---------------------------------------------------------------------------------------------------------------


def test_two_claims_at_once_share_nothing(dsn: str, conn: Conn) -> None:
    jobs = {row["job_id"] for row in enqueue_many(conn, 20)}
    one_worker, other = register(conn), register(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        first = a.do(lambda c: claim(c, one_worker))
        second = b.do(lambda c: claim(c, other))
        a.commit()
    assert len(first) == len(second) == 10
    assert {row["job_id"] for row in first} | {row["job_id"] for row in second} == jobs


def test_a_claim_in_progress_keeps_its_worker_from_being_declared_lost(dsn: str, conn: Conn) -> None:
    job = enqueue(conn)
    worker = register(conn)
    with sessions(dsn, 1) as [a]:
        a.begin()
        assert a.do(lambda c: claim_one(c, worker))["job_id"] == job
        expire_later = "update taskq.workers set lease_expires_at = '-infinity' where id = %s"
        conn.execute(expire_later, (worker,))
        assert mark_lost(conn) == []
        # Nor does settling see it, which would leave it running for good: its worker still counts as live.
        assert settle(conn) == {}
        a.commit()
    assert mark_lost(conn) == [worker]
    assert settle(conn) == {job: "pending"}
    assert attempts(conn, job) == [(1, "lost")]


def test_a_claim_of_a_suspect_keeps_its_worker_from_being_declared_lost(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    for _ in range(2):
        lose(conn, worker)
        assert settle(conn) == {job: "pending"}
        worker = register(conn)
        claim(conn, worker)
    with sessions(dsn, 1) as [a]:
        a.begin()
        [row] = a.do(lambda c: rows(c, "select * from taskq.claim_suspect(%s, '{t}', '{q}')", worker))
        assert row["job_id"] == job
        expire(conn, worker)
        assert mark_lost(conn) == []
        a.commit()
    assert mark_lost(conn) == [worker]
    assert settle(conn) == {job: "pending"}


def test_a_claim_waits_for_the_mark_and_then_takes_nothing(dsn: str, conn: Conn) -> None:
    job = enqueue(conn)
    worker = register(conn, lease=0.001)
    eventually(lambda: one(conn, "select lease_expires_at < now() from taskq.workers where id = %s", worker))
    with sessions(dsn) as [leader, late]:
        # The clock reads differently to the claim than to the leader, as if it had begun while the lease still held.
        leader.begin()
        assert leader.do(mark_lost) == [worker]
        answer = late.start(lambda c: exchange(c, worker, (), 10))
        late.waits_for(leader)
        leader.commit()
        assert [row["kind"] for row in answer.result(20)] == ["lease"]
    assert get(conn, job)["status"] == "pending"
    assert settle(conn) == {}


def test_a_claim_behind_a_mark_that_is_undone_goes_on(dsn: str, conn: Conn) -> None:
    """The mark waits in the order workers, jobs: the claim holds no job while it waits for its worker."""
    job = enqueue(conn)
    worker = register(conn)
    with sessions(dsn) as [leader, late]:
        leader.begin()
        leader.do(lambda c: c.execute("select from taskq.workers where id = %s for update", (worker,)))
        answer = late.start(lambda c: exchange(c, worker, (), 10))
        late.waits_for(leader)
        assert conn.execute("select from taskq.jobs for update nowait").rowcount == 1
        leader.rollback()
        assert [row["job_id"] for row in answer.result(20)] == [job]


def test_an_exchange_locks_its_worker_before_its_jobs(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [leader, late]:
        leader.begin()
        leader.do(lambda c: c.execute("select from taskq.workers where id = %s for update", (worker,)))
        answer = late.start(lambda c: exchange(c, worker, [End(job, 1)]))
        late.waits_for(leader)
        assert leader.do(lambda c: c.execute("select from taskq.jobs for update nowait").rowcount) == 1
        leader.rollback()
        assert answer.result(20) == []


def test_a_renewal_in_progress_keeps_its_worker_and_one_behind_the_mark_is_told(dsn: str, conn: Conn) -> None:
    worker = register(conn)
    expire(conn, worker)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: rows(c, "select status from taskq.renew(%s)", worker)) == [{"status": "live"}]
        assert mark_lost(conn) == []
        a.commit()
        assert mark_lost(conn) == []
        expire(conn, worker)
        a.begin()
        assert a.do(mark_lost) == [worker]
        told = b.start(lambda c: rows(c, "select status from taskq.renew(%s)", worker))
        b.waits_for(a)
        a.commit()
        assert told.result(20) == [{"status": "lost"}]


def test_a_renewal_waits_for_no_claim(dsn: str, conn: Conn) -> None:
    worker, _ = running(conn)
    enqueue(conn)
    with sessions(dsn, 1) as [a]:
        a.begin()
        a.do(lambda c: claim_one(c, worker))
        conn.execute("set lock_timeout = '1ms'")
        assert rows(conn, "select status from taskq.renew(%s)", worker)[0]["status"] == "live"
        a.commit()


def test_settling_skips_a_job_whose_end_is_in_progress(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    _, other = running(conn, worker)
    lose(conn, worker)
    with sessions(dsn, 1) as [a]:
        a.begin()
        assert a.do(lambda c: end(c, worker, End(job, 1))) == 1
        assert settle(conn) == {other: "pending"}
        a.commit()
    assert settle(conn) == {}
    assert get(conn, job)["status"] == "succeeded"


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_end_behind_the_settling_of_its_loss_changes_nothing(dsn: str, conn: Conn, outcome: str) -> None:
    worker, job = running(conn)
    lose(conn, worker)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(settle) == {job: "pending"}
        answer = b.start(lambda c: exchange(c, worker, [End(job, 1, outcome, 3)]))
        b.waits_for(a)
        a.commit()
        assert [row["kind"] for row in answer.result(20)] == ["missed"]
    assert (get(conn, job)["status"], attempts(conn, job)) == ("pending", [(1, "lost")])


def test_two_settlings_at_once_share_nothing(dsn: str, conn: Conn) -> None:
    worker = register(conn)
    enqueue_many(conn, 6)
    claim(conn, worker)
    lose(conn, worker)
    with sessions(dsn, 1) as [a]:
        a.begin()
        first = a.do(lambda c: settle(c, 3))
        second = settle(conn)
        a.commit()
    assert len(first) == len(second) == 3
    assert not first.keys() & second.keys()


# Sweeping -------------------------------------------------------------------------------------------------------------


def test_the_sweep_skips_what_is_being_claimed_or_cancelled(dsn: str, conn: Conn) -> None:
    job = enqueue(conn)
    worker = register(conn)
    conn.execute("update taskq.jobs set deadline = taskq.now() + interval '1 s'")
    with sessions(dsn, 1) as [a]:
        a.begin()
        a.do(lambda c: claim_one(c, worker))
        # It was claimed in time: a sweep after the deadline must not end it.
        eventually(lambda: one(conn, "select deadline < taskq.now() from taskq.jobs"))
        assert one(conn, "select count(*) from taskq.sweep()") == 0
        a.commit()
    assert one(conn, "select count(*) from taskq.sweep()") == 0
    assert get(conn, job)["status"] == "running"


# Locks in one order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["succeeded", "retry"])
def test_batches_of_ends_in_opposite_orders_do_not_deadlock(dsn: str, conn: Conn, outcome: str) -> None:
    worker = register(conn)
    jobs = sorted(row["job_id"] for row in enqueue_many(conn, 3))
    claim(conn, worker)
    ends = [End(job, 1, outcome, n, delay=60) for n, job in enumerate(jobs)]
    with sessions(dsn, 3) as [holder, a, b]:
        holder.begin()
        holder.do(lambda c: c.execute("select from taskq.jobs where id = %s for update", (jobs[1],)))
        forwards = a.start(lambda c: end(c, worker, *ends))
        a.waits_for(holder)
        backwards = b.start(lambda c: end(c, worker, *ends[::-1]))
        b.waits_for(a)
        holder.rollback()
        assert forwards.result(20) + backwards.result(20) == 3
    make_due(conn, jobs[0])


def test_a_worker_is_not_stopped_over_a_claim_in_progress(dsn: str, conn: Conn) -> None:
    worker = register(conn)
    job = enqueue(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: claim_one(c, worker))["job_id"] == job
        stopped = b.start(lambda c: c.execute("select taskq.stop_worker(%s)", (worker,)))
        b.waits_for(a)
        a.commit()
        stopped.result(20)
    [row] = rows(conn, "select status from taskq.workers where id = %s", worker)
    assert row["status"] == "live"
    # Its lease is what ends the claim, or its own end.
    assert settle(conn) == {}


# Publishing -----------------------------------------------------------------------------------------------------------


def test_a_hook_that_is_being_published_is_not_switched_off_meanwhile(dsn: str, conn: Conn) -> None:
    """By a worker of the release before, which starts at the same time."""
    publish = "select taskq.publish_task(%s, 't', 'q', 5, 3, 'idempotent', 'p', null, %s)"
    conn.execute(publish, (None, None))
    with sessions(dsn) as [newer, older]:
        newer.begin()
        newer.do(lambda c: c.execute(publish, (register(c, tasks=("t:reconcile", "t")), "t:reconcile")))
        done = older.start(lambda c: c.execute(publish, (None, None)))
        older.waits_for(newer)
        newer.commit()
        done.result(20)
    assert one(conn, "select reconcile_task from taskq.task_config where task = 't'") == "t:reconcile"

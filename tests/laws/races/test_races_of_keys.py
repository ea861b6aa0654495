"""Enqueues in open transactions, and the ends of the jobs whose keys they asked for."""

from __future__ import annotations

from uuid import UUID

import pytest
from sql import (
    POLICY,
    Conn,
    End,
    Session,
    attempts,
    claim,
    enqueue,
    enqueue_many,
    exchange,
    policy,
    register,
    retry,
    rows,
    running,
    sessions,
)


def holders(conn: Conn) -> dict[str, UUID]:
    return {row["key"]: row["job_id"] for row in rows(conn, "select key, job_id from taskq.unique_keys")}


def test_an_open_transaction_that_was_answered_with_a_job_does_not_hold_up_its_end(dsn: str, conn: Conn) -> None:
    worker, job = running(conn, unique_key="k", idempotency_key="i")
    with sessions(dsn) as [client, ending]:
        client.begin()
        [unique] = client.do(lambda c: enqueue_many(c, unique=["k"]))
        [repeated] = client.do(lambda c: enqueue_many(c, idempotency=["i"]))
        assert unique["job_id"] == repeated["job_id"] == job
        assert ending.do(lambda c: exchange(c, worker, [End(job)])) == []
        client.commit()
    assert attempts(conn, job) == [(1, "succeeded")]


def test_repeated_requests_do_not_wait_for_each_other(dsn: str, conn: Conn) -> None:
    job = enqueue(conn, idempotency_key="i")
    with sessions(dsn) as [first, second]:
        first.begin()
        for client in (first, second):
            [answer] = client.do(lambda c: enqueue_many(c, idempotency=["i"]))
            assert answer["job_id"] == job
        first.commit()


def test_ends_and_an_enqueue_with_several_unique_keys_do_not_deadlock(dsn: str, conn: Conn) -> None:
    worker = register(conn)
    policy(conn, POLICY)
    # Ends give the keys back in the order of the jobs, enqueue takes them in their own.
    late, early = (enqueue(conn, unique_key=key) for key in ("b", "a"))
    assert len(claim(conn, worker)) == 2
    with sessions(dsn, 3) as [holder, client, ending]:
        holder.begin()
        holder.do(lambda c: c.execute("select from taskq.unique_keys where key = 'a' for update"))
        ends = ending.start(lambda c: exchange(c, worker, [End(late), End(early)]))
        ending.waits_for(holder)
        answer = client.start(lambda c: enqueue_many(c, 2, unique=["a", "b"]))
        client.waits_for(ending)
        holder.commit()
        assert ends.result(20) == []
        answered = {row["job_id"] for row in answer.result(20)}
    # Whether a's job had ended when the enqueue looked is left open; b's had.
    assert late not in answered
    assert holders(conn)["b"] in answered


@pytest.mark.parametrize("finish", [Session.commit, Session.rollback])
def test_two_that_take_an_expired_key_get_one_job(dsn: str, conn: Conn, finish: object) -> None:
    worker, old = running(conn, unique_key="k", idempotency_key="i", unique_hold=3600)
    exchange(conn, worker, [End(old, 1, "failed")])
    conn.execute("update taskq.unique_keys set expires_at = taskq.now()")
    conn.execute("update taskq.idempotency_keys set expires_at = taskq.now()")
    with sessions(dsn) as [first, second]:
        first.begin()
        [one] = first.do(lambda c: enqueue_many(c, unique=["k"], idempotency=["i"]))
        waiting = second.start(lambda c: enqueue_many(c, unique=["k"], idempotency=["i"]))
        second.waits_for(first)
        assert callable(finish)
        finish(first)
        [other] = waiting.result(20)
    assert one["inserted"]
    assert one["job_id"] != old
    assert (other["job_id"] == one["job_id"]) == (finish is Session.commit) == (not other["inserted"])
    assert holders(conn) == {"k": other["job_id"]}


def test_a_reopening_that_takes_an_expired_key_goes_before_an_enqueue_that_wants_it(dsn: str, conn: Conn) -> None:
    worker, old = running(conn, unique_key="k", unique_hold=3600)
    exchange(conn, worker, [End(old, 1, "failed")])
    conn.execute("update taskq.unique_keys set expires_at = taskq.now()")
    with sessions(dsn) as [operator, client]:
        operator.begin()
        assert operator.do(lambda c: retry(c, old)) == "reopened"
        waiting = client.start(lambda c: enqueue_many(c, unique=["k"]))
        client.waits_for(operator)
        operator.commit()
        [answer] = waiting.result(20)
    assert (answer["job_id"], answer["inserted"]) == (old, False)

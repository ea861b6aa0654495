"""Side-effecting steps, while other sessions cancel, take claims away, end, and decide."""

from __future__ import annotations

from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb
from sql import (
    Conn,
    End,
    attempts,
    cancel,
    claim_one,
    end,
    get,
    lose,
    make_due,
    one,
    register,
    resolve,
    rows,
    running,
    sessions,
    settle,
    status,
)


def start(conn: Conn, worker: UUID, job: UUID, epoch: int = 1, name: str = "pay") -> str:
    [row] = rows(conn, "select answer from taskq.start_step(%s, %s, %s, %s, 1)", worker, job, epoch, name)
    answer: str = row["answer"]
    return answer


def tell(conn: Conn, worker: UUID, job: UUID, value: object = 7) -> str:
    query = "select taskq.end_step(%s, %s, 1, 'pay', 1, %s, %s, null)"
    # As it was answered to the start: the row may be changing just now.
    answer: str = one(conn, query, worker, job, one(conn, STARTED, job), Jsonb(value))
    return answer


STARTED = "select effect_started_at from taskq.steps where job_id = %s"


def untold(conn: Conn, job: UUID) -> int:
    n: int = one(conn, "select count(*) from taskq.steps where job_id = %s and not done", job)
    return n


def test_of_a_start_and_a_cancel_request_whichever_commits_first_wins(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [body, operator]:
        body.begin()
        assert body.do(lambda c: start(c, worker, job)) == "started"
        asking = operator.start(lambda c: cancel(c, job))
        operator.waits_for(body)
        body.commit()
        assert asking.result() == "requested"
    assert untold(conn, job) == 1
    worker, job = running(conn)
    with sessions(dsn) as [operator, body]:
        operator.begin()
        assert operator.do(lambda c: cancel(c, job)) == "requested"
        starting = body.start(lambda c: start(c, worker, job))
        body.waits_for(operator)
        operator.commit()
        assert starting.result() == "cancelled"
    assert untold(conn, job) == 0


def test_a_start_that_waited_for_the_loss_of_its_claim_starts_nothing(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    lose(conn, worker)
    with sessions(dsn) as [leader, body]:
        leader.begin()
        assert leader.do(settle) == {job: "pending"}
        starting = body.start(lambda c: start(c, worker, job))
        body.waits_for(leader)
        leader.commit()
        assert starting.result() == "fenced"
    assert untold(conn, job) == 0


def test_a_start_that_is_on_its_way_is_seen_by_the_loss(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn, 1) as [body]:
        body.begin()
        assert body.do(lambda c: start(c, worker, job)) == "started"
        conn.execute("update taskq.workers set lease_expires_at = '-infinity'")
        assert rows(conn, "select * from taskq.mark_lost()") == [], "the start holds the worker's row"
        body.commit()
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}


def test_two_starts_at_once_start_one(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: start(c, worker, job)) == "started"
        other = second.start(lambda c: start(c, worker, job, name="mail"))
        second.waits_for(first)
        first.commit()
        assert other.result() == "another"
    assert untold(conn, job) == 1


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "retry"])
def test_an_end_that_waited_for_a_start_does_not_pass_over_it(dsn: str, conn: Conn, outcome: str) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [body, outbox]:
        body.begin()
        assert body.do(lambda c: start(c, worker, job)) == "started"
        ending = outbox.start(lambda c: end(c, worker, End(job, 1, outcome)))
        outbox.waits_for(body)
        body.commit()
        assert ending.result() == 1
    assert (status(conn, job), untold(conn, job)) == ("unknown", 1)


def test_a_start_that_waited_for_an_end_starts_nothing(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [outbox, body]:
        outbox.begin()
        assert outbox.do(lambda c: end(c, worker, End(job))) == 1
        starting = body.start(lambda c: start(c, worker, job))
        body.waits_for(outbox)
        outbox.commit()
        assert starting.result() == "fenced"


def test_what_is_told_just_before_the_loss_is_recorded_and_the_job_goes_on(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    start(conn, worker, job)
    lose(conn, worker)
    with sessions(dsn, 1) as [body]:
        body.begin()
        assert body.do(lambda c: tell(c, worker, job)) == "recorded"
        assert settle(conn) == {}, "the leader leaves the row to it"
        body.commit()
    assert settle(conn) == {job: "pending"}
    assert untold(conn, job) == 0


def test_what_waited_for_the_loss_is_told_late(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    start(conn, worker, job)
    lose(conn, worker)
    with sessions(dsn) as [leader, body]:
        leader.begin()
        assert leader.do(settle) == {job: "unknown"}
        telling = body.start(lambda c: tell(c, worker, job))
        body.waits_for(leader)
        leader.commit()
        assert telling.result() == "late"
    assert (status(conn, job), attempts(conn, job)) == ("pending", [(1, "resolved")])
    make_due(conn, job)
    worker = register(conn)
    claim_one(conn, worker)
    assert start(conn, worker, job, 2) == "done"


def test_of_a_decision_and_a_late_word_whichever_commits_first_stands(dsn: str, conn: Conn) -> None:
    def doubtful() -> tuple[UUID, UUID]:
        worker, job = running(conn)
        start(conn, worker, job)
        lose(conn, worker)
        assert settle(conn) == {job: "unknown"}
        return worker, job

    worker, job = doubtful()
    with sessions(dsn) as [operator, body]:
        operator.begin()
        assert operator.do(lambda c: resolve(c, job, happened=False)) == "pending"
        telling = body.start(lambda c: tell(c, worker, job))
        body.waits_for(operator)
        operator.commit()
        assert telling.result() == "fenced"
    assert one(conn, "select count(*) from taskq.steps") == 0
    assert cancel(conn, job) == "cancelled"
    worker, job = doubtful()
    with sessions(dsn) as [body, operator]:
        body.begin()
        assert body.do(lambda c: tell(c, worker, job)) == "late"
        deciding = operator.start(lambda c: resolve(c, job, happened=False))
        operator.waits_for(body)
        body.commit()
        with pytest.raises(psycopg.errors.DatabaseError, match="resolved before"):
            deciding.result()
    assert get(conn, job)["status"] == "pending"
    assert one(conn, "select value from taskq.steps") == 7


@pytest.mark.parametrize("happened", [True, False])
def test_of_a_hooks_answer_and_a_late_word_whichever_commits_first_stands(dsn: str, conn: Conn, happened: bool) -> None:
    """The worker was only frozen: it tells what its step gave, just as the hook says what became of it."""

    def doubtful() -> tuple[UUID, UUID]:
        worker, job = running(conn)
        start(conn, worker, job)
        lose(conn, worker)
        assert settle(conn) == {job: "unknown"}
        return worker, job

    def answer(c: Conn, job: UUID) -> str:
        query = "select taskq.answer_reconcile(%s, 1, %s, '8', 'asked', 'reconcile:x', 'pay')"
        said: str = one(c, query, job, happened)
        return said

    (worker, first), (frozen, second) = doubtful(), doubtful()
    with sessions(dsn) as [hook, body]:
        hook.begin()
        assert hook.do(lambda c: answer(c, first)) == "pending"
        telling = body.start(lambda c: tell(c, worker, first))
        body.waits_for(hook)
        hook.commit()
        assert telling.result() == "fenced"
    with sessions(dsn) as [body, hook]:
        body.begin()
        assert body.do(lambda c: tell(c, frozen, second)) == "late"
        answering = hook.start(lambda c: answer(c, second))
        hook.waits_for(body)
        body.commit()
        with pytest.raises(psycopg.errors.DatabaseError, match="resolved before"):
            answering.result()
    found = {row["job_id"]: row["value"] for row in rows(conn, "select job_id, value from taskq.steps")}
    assert found == {second: 7} | ({first: 8} if happened else {})
    assert {status(conn, job) for job in (first, second)} == {"pending"}

"""Steps, while other sessions take claims away, settle and end."""

from __future__ import annotations

from uuid import UUID

from psycopg.types.json import Jsonb
from sql import Conn, End, claim_one, end, lose, make_due, one, register, rows, running, sessions, settle, status


def record(
    conn: Conn, worker: UUID, job: UUID, epoch: int, value: object = 1, name: str = "x", wait: bool = True
) -> str:
    [row] = rows(
        conn,
        "select * from taskq.record_steps(array[%s], array[%s], array[%s]::bigint[], array[%s], array[1], array[%s],"
        " %s)",
        worker,
        job,
        epoch,
        name,
        Jsonb(value),
        wait,
    )
    answer: str = row["answer"]
    return answer


def test_a_step_that_waited_for_the_loss_of_its_claim_is_fenced_out(dsn: str, conn: Conn) -> None:
    old, job = running(conn)
    lose(conn, old)
    with sessions(dsn) as [leader, late]:
        leader.begin()
        assert leader.do(settle) == {job: "pending"}
        waiting = late.start(lambda c: record(c, old, job, 1))
        late.waits_for(leader)
        leader.commit()
        assert waiting.result() == "fenced"
    assert one(conn, "select count(*) from taskq.steps") == 0


def test_one_that_may_not_wait_is_told_busy(dsn: str, conn: Conn) -> None:
    old, job = running(conn)
    lose(conn, old)
    with sessions(dsn, 1) as [leader]:
        leader.begin()
        assert leader.do(settle) == {job: "pending"}
        assert record(conn, old, job, 1, wait=False) == "busy"
        leader.rollback()
    assert record(conn, old, job, 1, wait=False) == "recorded"


def test_a_successor_finds_the_step_that_came_just_before_the_loss(dsn: str, conn: Conn) -> None:
    old, job = running(conn)
    lose(conn, old)
    with sessions(dsn, 1) as [late]:
        late.begin()
        assert late.do(lambda c: record(c, old, job, 1)) == "recorded"
        assert settle(conn) == {}, "the leader leaves the row to it"
        late.commit()
    assert settle(conn) == {job: "pending"}
    make_due(conn, job)
    new = register(conn)
    claim_one(conn, new)
    assert record(conn, new, job, 2) == "replay"


def test_an_end_waits_for_a_step_that_is_being_recorded(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [body, outbox]:
        body.begin()
        assert body.do(lambda c: record(c, worker, job, 1)) == "recorded"
        waiting = outbox.start(lambda c: end(c, worker, End(job, 1)))
        outbox.waits_for(body)
        body.commit()
        assert waiting.result() == 1
    assert status(conn, job) == "succeeded"


def test_steps_of_one_body_do_not_wait_for_each_other(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [one_step, other]:
        one_step.begin()
        assert one_step.do(lambda c: record(c, worker, job, 1)) == "recorded"
        assert other.do(lambda c: record(c, worker, job, 1, name="y")) == "recorded"
        one_step.commit()


def test_two_values_for_one_step_at_once_leave_one_record(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: record(c, worker, job, 1, 1)) == "recorded"
        same = second.start(lambda c: record(c, worker, job, 1, 1))
        second.waits_for(first)
        first.commit()
        assert same.result() == "replay"
    assert record(conn, worker, job, 1, 2) == "conflict"

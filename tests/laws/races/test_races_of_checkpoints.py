"""Checkpoints and ends inside of transactions, while other sessions settle, claim and ask."""

from __future__ import annotations

from uuid import UUID

from psycopg.types.json import Jsonb
from sql import Conn, attempts, claim_one, get, lose, make_due, one, register, running, sessions, settle, status


def save(conn: Conn, worker: UUID, job: UUID, epoch: int, version: int, value: object) -> str:
    answer: str = one(
        conn, "select answer from taskq.checkpoint(%s, %s, %s, %s, %s)", worker, job, epoch, version, Jsonb(value)
    )
    return answer


def end_inside(conn: Conn, worker: UUID, job: UUID, epoch: int) -> str:
    answer: str = one(
        conn,
        "select taskq.end_inside(%s, %s, %s, 7, '1', pg_current_xact_id()::text)",
        worker,
        job,
        epoch,
    )
    return answer


def ended_inside(conn: Conn, worker: UUID, job: UUID, epoch: int) -> str:
    answer: str = one(conn, "select taskq.ended_inside(%s, %s, %s, 7)", worker, job, epoch)
    return answer


def test_a_checkpoint_that_waited_for_its_successors_claim_is_fenced_out(dsn: str, conn: Conn) -> None:
    old, job = running(conn)
    lose(conn, old)
    with sessions(dsn) as [leader, late]:
        leader.begin()
        assert leader.do(settle) == {job: "pending"}
        waiting = late.start(lambda c: save(c, old, job, 1, 0, "old"))
        late.waits_for(leader)
        leader.commit()
        assert waiting.result() == "fenced"
    assert get(conn, job)["checkpoint_version"] is None


def test_a_successor_finds_the_checkpoint_that_came_just_before_the_loss(dsn: str, conn: Conn) -> None:
    old, job = running(conn)
    lose(conn, old)
    with sessions(dsn, 1) as [late]:
        late.begin()
        assert late.do(lambda c: save(c, old, job, 1, 0, "old")) == "moved"
        assert settle(conn) == {}, "the leader leaves the row to it"
        late.commit()
    assert settle(conn) == {job: "pending"}
    make_due(conn, job)
    new = register(conn)
    claim_one(conn, new)
    assert save(conn, old, job, 1, 1, "older") == "fenced"
    assert save(conn, new, job, 2, 1, "new") == "moved"
    assert get(conn, job)["checkpoint"] == "new"


def test_two_that_save_from_one_version_move_it_once(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: save(c, worker, job, 1, 0, "first")) == "moved"
        waiting = second.start(lambda c: save(c, worker, job, 1, 0, "second"))
        second.waits_for(first)
        first.commit()
        assert waiting.result() == "conflict"
    assert (get(conn, job)["checkpoint"], get(conn, job)["checkpoint_version"]) == ("first", 1)


def test_what_became_of_a_commit_is_told_once_its_transaction_is_over(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    for ending, word in (("rollback", "open"), ("commit", "committed")):
        with sessions(dsn) as [body, asking]:
            body.begin()
            assert body.do(lambda c: end_inside(c, worker, job, 1)) == "ended"
            asked = asking.start(lambda c: ended_inside(c, worker, job, 1))
            asking.waits_for(body)
            body.do(lambda c, how=ending: c.execute(how))
            assert asked.result() == word
    assert attempts(conn, job) == [(1, "succeeded")]


def test_an_end_inside_that_waited_for_the_settling_of_its_loss_changes_nothing(dsn: str, conn: Conn) -> None:
    old, job = running(conn)
    lose(conn, old)
    with sessions(dsn) as [leader, late]:
        leader.begin()
        assert leader.do(settle) == {job: "pending"}
        late.begin()
        waiting = late.start(lambda c: end_inside(c, old, job, 1))
        late.waits_for(leader)
        leader.commit()
        assert waiting.result() == "fenced"
        late.commit()
    assert status(conn, job) == "pending"
    assert ended_inside(conn, old, job, 1) == "taken"

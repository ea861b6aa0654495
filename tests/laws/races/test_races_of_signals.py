"""Signals against suspensions, takings and ends, by real sessions: none falls between."""

from __future__ import annotations

from uuid import UUID

import psycopg
import pytest
from signals_kit import held, send, suspend, take, wait
from sql import Conn, End, cancel, claim_one, end, get, lose, one, running, sessions, settle, status, violations

WAIT = ("wait", "go", 1)


def waits(conn: Conn) -> tuple[UUID, UUID]:
    worker, job = running(conn)
    assert wait(conn, worker, job)[0] == "waits"
    return worker, job


def test_a_suspension_that_waited_for_a_signal_leaves_the_job_due(dsn: str, conn: Conn) -> None:
    worker, job = waits(conn)
    with sessions(dsn) as [sender, outbox]:
        sender.begin()
        assert sender.do(lambda c: send(c, job)) == "sent"
        waiting = outbox.start(lambda c: suspend(c, worker, job, WAIT))
        outbox.waits_for(sender)
        sender.commit()
        assert waiting.result() == 1
    assert claim_one(conn, worker)["claim_epoch"] == 2
    assert violations(conn) == []


def test_a_signal_that_was_rolled_back_leaves_the_job_held(dsn: str, conn: Conn) -> None:
    worker, job = waits(conn)
    with sessions(dsn) as [sender, outbox]:
        sender.begin()
        assert sender.do(lambda c: send(c, job)) == "sent"
        waiting = outbox.start(lambda c: suspend(c, worker, job, WAIT))
        outbox.waits_for(sender)
        sender.rollback()
        assert waiting.result() == 1
    assert get(conn, job)["held_reason"] == "signal"
    assert violations(conn) == []


def test_a_signal_that_waited_for_a_suspension_wakes_the_job(dsn: str, conn: Conn) -> None:
    worker, job = waits(conn)
    with sessions(dsn) as [outbox, sender]:
        outbox.begin()
        assert outbox.do(lambda c: suspend(c, worker, job, WAIT)) == 1
        waiting = sender.start(lambda c: send(c, job))
        sender.waits_for(outbox)
        outbox.commit()
        assert waiting.result() == "sent"
    assert claim_one(conn, worker)["claim_epoch"] == 2
    assert violations(conn) == []


def test_a_signal_that_waited_for_the_end_is_refused(dsn: str, conn: Conn) -> None:
    worker, job = waits(conn)
    with sessions(dsn) as [outbox, sender]:
        outbox.begin()
        assert outbox.do(lambda c: end(c, worker, End(job))) == 1
        waiting = sender.start(lambda c: send(c, job))
        sender.waits_for(outbox)
        outbox.commit()
        with pytest.raises(psycopg.Error) as caught:
            waiting.result()
    assert caught.value.sqlstate == "WF012"
    assert one(conn, "select count(*) from taskq.signals") == 0


def test_two_senders_under_one_key_send_once(dsn: str, conn: Conn) -> None:
    worker, job = waits(conn)
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: send(c, job, 1, key="k")) == "sent"
        waiting = second.start(lambda c: send(c, job, 1, key="k"))
        second.waits_for(first)
        first.commit()
        assert waiting.result() == "already"
    assert one(conn, "select count(*) from taskq.signals") == 1
    assert status(conn, job) == "running"
    assert worker is not None


def test_two_waits_that_take_one_signal_at_once_take_it_once(dsn: str, conn: Conn) -> None:
    worker, job = waits(conn)
    wait(conn, worker, job, occurrence=2)
    send(conn, job)
    _, signal, _, _ = wait(conn, worker, job)
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: take(c, worker, job, signal)) == "taken"
        waiting = second.start(lambda c: take(c, worker, job, signal, occurrence=2))
        second.waits_for(first)
        first.commit()
        assert waiting.result() == "gone"
    assert violations(conn) == []


def test_a_taking_that_waited_for_the_loss_of_its_claim_takes_nothing(dsn: str, conn: Conn) -> None:
    worker, job = waits(conn)
    send(conn, job)
    _, signal, _, _ = wait(conn, worker, job)
    lose(conn, worker)
    with sessions(dsn) as [leader, late]:
        leader.begin()
        assert leader.do(settle) == {job: "pending"}
        waiting = late.start(lambda c: take(c, worker, job, signal))
        late.waits_for(leader)
        leader.commit()
        assert waiting.result() == "fenced"
    assert one(conn, "select count(*) from taskq.signals where taken_at is null") == 1


def test_a_suspension_that_waited_for_a_cancel_ends_the_job(dsn: str, conn: Conn) -> None:
    worker, job = waits(conn)
    with sessions(dsn) as [operator, outbox]:
        operator.begin()
        assert operator.do(lambda c: cancel(c, job)) == "requested"
        waiting = outbox.start(lambda c: suspend(c, worker, job, WAIT))
        outbox.waits_for(operator)
        operator.commit()
        assert waiting.result() == 1
    assert status(conn, job) == "cancelled"


def test_the_sweep_leaves_a_job_to_the_signal_that_wakes_it(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    held(conn, worker, job, seconds=0.001)
    with sessions(dsn, 1) as [sender]:
        sender.begin()
        assert sender.do(lambda c: send(c, job)) == "sent"
        assert one(conn, "select taskq.wake_waiting()") == 0
        sender.commit()
    assert claim_one(conn, worker)["claim_epoch"] == 2
    assert wait(conn, worker, job, epoch=2)[0] == "signal"
    assert violations(conn) == []


def test_two_senders_at_the_bound_send_one(dsn: str, conn: Conn) -> None:
    conn.execute("update taskq.installation set max_waiting_signals = 1")
    _, job = waits(conn)
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: send(c, job, 1)) == "sent"
        waiting = second.start(lambda c: send(c, job, 2))
        second.waits_for(first)
        first.commit()
        with pytest.raises(psycopg.Error) as caught:
            waiting.result()
    assert caught.value.sqlstate == "WF040"
    assert one(conn, "select count(*) from taskq.signals") == 1

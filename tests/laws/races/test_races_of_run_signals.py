"""Signals to runs against suspensions, ends and each other, by real sessions: one takes each, none is lost."""

from __future__ import annotations

from uuid import UUID

import psycopg
import pytest
from children_kit import child_of, family
from runs_kit import finish, job_of, node, start, store, worker_for
from runs_kit import take as claim_tasks
from signals_kit import held, send, send_run, suspension, take, wait
from sql import Conn, End, exchange, one, rows, sessions, status, violations

WAIT = ("wait", "go", 1)


def running_nodes(conn: Conn, *names: str) -> tuple[UUID, UUID, list[UUID]]:
    """A run of nodes beside each other that run; its worker and jobs."""
    run = start(conn, store(conn, [node(name) for name in names], on_failure="finish"))
    worker = worker_for(conn)
    claimed = claim_tasks(conn, worker, *names)
    return run, worker, [UUID(str(claimed[name]["job_id"])) for name in names]


def states(conn: Conn) -> list[str]:
    found = rows(conn, "select state from taskq.run_signals order by id")
    return [row["state"] for row in found]


def test_a_suspension_is_sent_again_while_somebody_sends_to_the_run_and_then_finds_the_signal(
    dsn: str, conn: Conn
) -> None:
    run, worker, [job] = running_nodes(conn, "a")
    assert wait(conn, worker, job)[0] == "waits"
    with sessions(dsn, 1) as [sender]:
        sender.begin()
        assert sender.do(lambda c: send_run(c, run)) == "kept"
        [row] = exchange(conn, worker, [suspension(job, WAIT)])
        assert (row["kind"], row["job_id"]) == ("busy", job)
        sender.commit()
    assert exchange(conn, worker, [suspension(job, WAIT)]) == []
    assert status(conn, job) == "pending"
    assert violations(conn) == []


def test_a_signal_that_waited_for_a_suspension_is_given(dsn: str, conn: Conn) -> None:
    run, worker, [job] = running_nodes(conn, "a")
    assert wait(conn, worker, job)[0] == "waits"
    with sessions(dsn) as [outbox, sender]:
        outbox.begin()
        assert outbox.do(lambda c: exchange(c, worker, [suspension(job, WAIT)])) == []
        waiting = sender.start(lambda c: send_run(c, run))
        sender.waits_for(outbox)
        outbox.commit()
        assert waiting.result() == "given"
    assert status(conn, job) == "pending"
    assert violations(conn) == []


def test_a_signal_that_waited_for_a_suspension_in_a_child_run_is_given(dsn: str, conn: Conn) -> None:
    made = family(conn)
    x = job_of(conn, child_of(conn, made.parent), "x")
    claim_tasks(conn, made.worker, "x")
    assert wait(conn, made.worker, x)[0] == "waits"
    with sessions(dsn) as [outbox, sender]:
        outbox.begin()
        assert outbox.do(lambda c: exchange(c, made.worker, [suspension(x, WAIT)])) == []
        waiting = sender.start(lambda c: send_run(c, made.parent))
        sender.waits_for(outbox)
        outbox.commit()
        assert waiting.result() == "given"
    assert violations(conn) == []


def test_a_suspension_in_a_child_run_is_sent_again_while_somebody_sends_to_its_parent(dsn: str, conn: Conn) -> None:
    made = family(conn)
    x = job_of(conn, child_of(conn, made.parent), "x")
    claim_tasks(conn, made.worker, "x")
    assert wait(conn, made.worker, x)[0] == "waits"
    with sessions(dsn, 1) as [sender]:
        sender.begin()
        assert sender.do(lambda c: send_run(c, made.parent)) == "kept"
        assert [row["kind"] for row in exchange(conn, made.worker, [suspension(x, WAIT)])] == ["busy"]
        sender.commit()
    assert exchange(conn, made.worker, [suspension(x, WAIT)]) == []
    assert status(conn, x) == "pending"


def test_a_signal_that_waited_for_the_runs_end_is_refused(dsn: str, conn: Conn) -> None:
    run, worker, [job] = running_nodes(conn, "a")
    with sessions(dsn) as [outbox, sender]:
        outbox.begin()
        assert outbox.do(lambda c: exchange(c, worker, [End(job)])) == []
        waiting = sender.start(lambda c: send_run(c, run))
        sender.waits_for(outbox)
        outbox.commit()
        with pytest.raises(psycopg.Error) as caught:
            waiting.result()
    assert caught.value.sqlstate == "WF026"
    assert one(conn, "select count(*) from taskq.signals") == 0


def test_two_senders_give_two_signals_to_two_nodes(dsn: str, conn: Conn) -> None:
    run, worker, jobs = running_nodes(conn, "a", "b", "c")
    for job in jobs:
        held(conn, worker, job)
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: send_run(c, run, 1)) == "given"
        waiting = second.start(lambda c: send_run(c, run, 2))
        second.waits_for(first)
        first.commit()
        assert waiting.result() == "given"
    assert [status(conn, job) for job in jobs] == ["pending", "pending", "held"]
    assert violations(conn) == []


def test_a_node_that_somebody_wakes_just_now_stands_in_no_others_way(dsn: str, conn: Conn) -> None:
    run, worker, [first, second] = running_nodes(conn, "a", "b")
    held(conn, worker, first)
    held(conn, worker, second)
    with sessions(dsn, 1) as [sender]:
        sender.begin()
        assert sender.do(lambda c: send(c, first)) == "sent"
        assert send_run(conn, run) == "given"
        sender.commit()
    assert [status(conn, job) for job in (first, second)] == ["pending", "pending"]
    assert one(conn, "select job_id from taskq.run_signals") == second
    assert violations(conn) == []


@pytest.mark.parametrize("undone", [False, True])
def test_where_the_only_one_that_waits_is_woken_just_now_the_sender_waits_to_see(
    dsn: str, conn: Conn, undone: bool
) -> None:
    run, worker, [job] = running_nodes(conn, "a")
    held(conn, worker, job)
    with sessions(dsn) as [direct, sender]:
        direct.begin()
        assert direct.do(lambda c: send(c, job)) == "sent"
        waiting = sender.start(lambda c: send_run(c, run))
        sender.waits_for(direct)
        if undone:
            direct.rollback()
        else:
            direct.commit()
        assert waiting.result() == ("given" if undone else "kept")
    assert status(conn, job) == "pending"
    assert violations(conn) == []


def test_two_nodes_that_take_what_is_kept_at_once_take_it_once(dsn: str, conn: Conn) -> None:
    run, worker, [job, other] = running_nodes(conn, "a", "b")
    assert send_run(conn, run) == "kept"
    _, signal, _, _ = wait(conn, worker, job)
    assert wait(conn, worker, other)[1] == signal
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: take(c, worker, job, signal)) == "taken"
        waiting = second.start(lambda c: take(c, worker, other, signal))
        second.waits_for(first)
        first.commit()
        assert waiting.result() == "gone"
    assert states(conn) == ["taken"]
    assert violations(conn) == []


def test_two_senders_under_one_key_send_to_a_run_once(dsn: str, conn: Conn) -> None:
    run, _, _ = running_nodes(conn, "a")
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: send_run(c, run, 1, key="k")) == "kept"
        waiting = second.start(lambda c: send_run(c, run, 1, key="k"))
        second.waits_for(first)
        first.commit()
        assert waiting.result() == "already"
    assert states(conn) == ["kept"]


def test_the_sweep_passes_a_run_that_somebody_is_at(dsn: str, conn: Conn) -> None:
    run, worker, [job, other] = running_nodes(conn, "a", "b")
    held(conn, worker, job)
    assert send_run(conn, run) == "given"
    [claimed] = claim_tasks(conn, worker, "a").values()
    finish(conn, worker, claimed)
    with sessions(dsn, 1) as [sender]:
        sender.begin()
        assert sender.do(lambda c: send_run(c, run, name="other")) == "kept"
        assert one(conn, "select taskq.return_signals()") == 0
        sender.commit()
    assert one(conn, "select taskq.return_signals()") == 1
    assert states(conn) == ["kept", "kept"]
    assert wait(conn, worker, other)[0] == "signal"

"""Pauses of runs under several hands at once: whoever commits first wins, and nothing paused is left to start."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from children_kit import child_of, family
from runs_kit import do, edge, finish, info, node, start, store, take, tree, worker_for
from signals_kit import held, send
from sql import BOUND, Conn, End, end, get, one, rows, sessions, violations

PAUSE = "select taskq.pause_run(%s, 'why', 'me')"
RESUME = "select taskq.resume_run(%s, 'well again', 'me')"
CANCEL = "select taskq.cancel_run(%s)"


def pair(conn: Conn) -> UUID:
    return start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)]))


def race(dsn: str, first: Any, second: Any) -> tuple[Any, Any]:
    """The second waits for the first, which commits then."""
    with sessions(dsn) as [winner, loser]:
        winner.begin()
        won = winner.do(first)
        waiting = loser.start(second)
        loser.waits_for(winner)
        winner.commit()
        return won, waiting.result(BOUND)


def test_a_claim_and_a_pause_of_its_run_agree(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    claims, answer = race(dsn, lambda c: take(c, worker, "a"), lambda c: one(c, PAUSE, run))
    assert (list(claims), answer) == (["a"], "paused")
    assert tree(conn, run)["a"] == "running"
    other = pair(conn)
    with sessions(dsn) as [pausing, claiming]:
        pausing.begin()
        pausing.do(lambda c: one(c, PAUSE, other))
        # What somebody is at is skipped.
        assert claiming.do(lambda c: take(c, worker, "a")) == {}
        pausing.commit()
        assert claiming.do(lambda c: take(c, worker, "a")) == {}
    assert tree(conn, other)["a"] == "held"


@pytest.mark.parametrize("first", ["pause", "end"])
@pytest.mark.parametrize("last", [False, True])
def test_a_pause_beside_the_end_of_the_body_that_runs(dsn: str, conn: Conn, first: str, last: bool) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    if last:
        do(conn, worker, "a")
    [claimed] = take(conn, worker, "a", "b").values()
    calls = {
        "pause": lambda c: one(c, PAUSE, run),
        "end": lambda c: end(c, worker, End(claimed["job_id"], 1)),
    }
    won, lost = race(dsn, calls[first], calls["end" if first == "pause" else "pause"])
    answer = won if first == "pause" else lost
    assert answer == ("finished" if last and first == "end" else "paused")
    if last:
        assert info(conn, run)["status"] == "succeeded"
    else:
        assert (info(conn, run)["status"], tree(conn, run)["b"]) == ("paused", "held")
        assert take(conn, worker, "b") == {}
    assert violations(conn) == []


@pytest.mark.parametrize("other", ["pause", "resume", "cancel"])
@pytest.mark.parametrize("first", [True, False])
def test_a_pause_beside_what_another_operator_does(dsn: str, conn: Conn, other: str, first: bool) -> None:
    run = pair(conn)
    query = {"pause": PAUSE, "resume": RESUME, "cancel": CANCEL}[other]
    calls = [lambda c: one(c, PAUSE, run), lambda c: one(c, query, run)]
    if not first:
        calls.reverse()
    answers = race(dsn, *calls)
    expected = {
        ("pause", True): ("paused", "already"),
        ("pause", False): ("paused", "already"),
        ("resume", True): ("paused", "resumed"),
        ("resume", False): ("not_paused", "paused"),
        ("cancel", True): ("paused", "cancelled"),
        ("cancel", False): ("cancelled", "finished"),
    }
    assert answers == expected[other, first]
    end_status = {"pause": "paused", "resume": "running" if first else "paused", "cancel": "cancelled"}[other]
    assert info(conn, run)["status"] == end_status
    assert violations(conn) == []


@pytest.mark.parametrize("query", [PAUSE, RESUME])
@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_a_job_that_a_signal_has_just_woken_is_held_by_a_pause_and_let_go_by_its_end(
    dsn: str, conn: Conn, query: str, ending: str
) -> None:
    """The sender holds the job alone: the pause, or its end, waits for that, and looks again."""
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    job = take(conn, worker, "a")["a"]["job_id"]
    held(conn, worker, job)
    if query == RESUME:
        one(conn, PAUSE, run)
    with sessions(dsn) as [sender, operator]:
        sender.begin()
        assert sender.do(lambda c: send(c, job)) == "sent"
        waiting = operator.start(lambda c: one(c, query, run))
        operator.waits_for(sender)
        sender.do(lambda c: c.execute(ending))
        waiting.result(BOUND)
    row = get(conn, job)
    woken = ("held", "paused") if query == PAUSE else ("pending", None)
    assert (row["status"], row["held_reason"]) == (woken if ending == "commit" else ("held", "signal"))
    assert violations(conn) == []


def test_a_signal_that_waited_for_a_pause_sees_it(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    job = take(conn, worker, "a")["a"]["job_id"]
    held(conn, worker, job)
    race(dsn, lambda c: one(c, PAUSE, run), lambda c: send(c, job))
    assert get(conn, job)["held_reason"] == "paused"
    race(
        dsn,
        lambda c: one(c, RESUME, run),
        lambda c: c.execute("select from taskq.jobs where id = %s for update", (job,)),
    )
    assert get(conn, job)["status"] == "pending"


@pytest.mark.parametrize("query", [PAUSE, RESUME])
def test_the_end_of_a_child_run_beside_a_pause_of_the_run_above(dsn: str, conn: Conn, query: str) -> None:
    made = family(conn)
    do(conn, made.worker, "x")
    y = take(conn, made.worker, "y")["y"]
    if query == RESUME:
        one(conn, PAUSE, made.parent)
    ends = lambda c: end(c, made.worker, End(y["job_id"], 1, result=1))  # noqa: E731
    race(dsn, ends, lambda c: one(c, query, made.parent))
    row = get(conn, made.job)
    assert (row["status"], row["held_reason"]) == (("held", "paused") if query == PAUSE else ("pending", None))
    assert violations(conn) == []


def test_a_failure_in_a_paused_run_is_sent_again_while_a_child_run_is_busy(dsn: str, conn: Conn) -> None:
    """Else the child run, which is just ending, would leave the job that waits for it held for ever."""
    made = family(conn, nodes=[node("beside")])
    do(conn, made.worker, "x")
    claims = take(conn, made.worker, "y", "beside")
    one(conn, PAUSE, made.parent)
    fails = End(claims["beside"]["job_id"], 1, "failed", error={"type": "Boom", "message": "boom"})
    with sessions(dsn) as [ending, failing]:
        ending.begin()
        ending.do(lambda c: end(c, made.worker, End(claims["y"]["job_id"], 1, result=1)))
        with pytest.raises(psycopg.errors.LockNotAvailable):
            failing.do(lambda c: end(c, made.worker, fails))
        ending.commit()
        failing.do(lambda c: end(c, made.worker, fails))
    do(conn, made.worker, "inner:await")
    assert info(conn, made.parent)["status"] == "failed"
    assert violations(conn) == []


def test_a_pause_of_the_run_above_waits_for_who_is_at_a_child_run(dsn: str, conn: Conn) -> None:
    made = family(conn)
    inner = child_of(conn, made.parent)
    won, lost = race(dsn, lambda c: one(c, PAUSE, inner), lambda c: one(c, PAUSE, made.parent))
    assert (won, lost) == ("paused", "paused")
    assert [row["code"] for row in rows(conn, "select code from taskq.run_pauses")] == ["operator"] * 2
    won, lost = race(dsn, lambda c: one(c, RESUME, made.parent), lambda c: one(c, RESUME, inner))
    assert (won, lost) == ("resumed", "not_paused")
    finish(conn, made.worker, take(conn, made.worker, "x")["x"])

"""Loops under several hands at once: a cancel beside the end of a round, signals beside suspensions, a busy parent."""

from __future__ import annotations

from uuid import UUID

import pytest
from loops_kit import LOOP, again, claimed, looped, told
from runs_kit import finish, info, take, tree
from signals_kit import held, send_run, suspension, wait
from sql import BOUND, Conn, End, end, exchange, one, rows, sessions, violations

WRITES = "select from taskq.runs where id = %s for update"


@pytest.mark.parametrize("first", ["cancel", "end"])
@pytest.mark.parametrize("word", ["again", "done"])
def test_a_cancel_beside_the_end_of_a_round(dsn: str, conn: Conn, first: str, word: str) -> None:
    """Whichever commits first wins; the other waits for it. No round begins that nobody cancels."""
    made = looped(conn)
    again(conn, made, 1)
    round_ = claimed(conn, made)
    ended = End(round_["job_id"], round_["claim_epoch"], result={"n": 2, "word": word})
    calls = {
        "cancel": lambda c: one(c, "select taskq.cancel_run(%s)", made.run),
        "end": lambda c: end(c, made.worker, ended),
    }
    other = "end" if first == "cancel" else "cancel"
    with sessions(dsn) as [winner, loser]:
        winner.begin()
        winner.do(calls[first])
        waiting = loser.start(calls[other])
        loser.waits_for(winner)
        winner.commit()
        waiting.result(BOUND)
    loop = info(conn, made.loop)
    assert loop["status"] == ("succeeded" if word == "done" else "cancelled")
    assert loop["written"] == (3 if (first, word) == ("end", "again") else 2)
    if (first, word) != ("end", "again"):
        # Else nothing of it ran, and the cancel has ended both.
        outcome = "succeeded" if word == "done" else "failed"
        finish(conn, made.worker, take(conn, made.worker, LOOP)[LOOP], outcome, {"n": 2, "word": word})
    assert info(conn, made.run)["status"] == "cancelled"
    assert tree(conn, made.run)["last"] == "cancelled"
    assert violations(conn) == []


def test_the_end_of_a_round_waits_for_nobody_who_is_at_the_run_of_the_loop(dsn: str, conn: Conn) -> None:
    made = looped(conn)
    round_ = claimed(conn, made)
    with sessions(dsn) as [holder, other]:
        holder.begin()
        holder.do(lambda c: c.execute(WRITES, (made.run,)))
        ended = End(round_["job_id"], round_["claim_epoch"], result={"word": "again"})
        other.start(lambda c: end(c, made.worker, ended)).result(BOUND)
        holder.commit()
    again(conn, made, 2, "done")
    assert told(conn, made) == {"n": 2, "word": "done"}
    assert violations(conn) == []


def test_a_signal_that_waited_for_the_suspension_of_a_round_ends_the_time_that_does_not_count(
    dsn: str, conn: Conn
) -> None:
    made = looped(conn, within=3600)
    job = UUID(str(claimed(conn, made)["job_id"]))
    assert wait(conn, made.worker, job)[0] == "waits"
    with sessions(dsn) as [body, sender]:
        body.begin()
        assert body.do(lambda c: exchange(c, made.worker, [suspension(job, ("wait", "go", 1))])) == []
        waiting = sender.start(lambda c: send_run(c, made.run))
        sender.waits_for(body)
        body.commit()
        assert waiting.result(BOUND) == "given"
    assert take(conn, made.worker, "more").keys() == {"more"}
    found = rows(conn, "select run_id, ix, until is null as open from taskq.loop_holds")
    assert found == [{"run_id": made.loop, "ix": 0, "open": False}]


@pytest.mark.parametrize("first", ["wake", "cancel"])
def test_a_wait_that_is_over_beside_a_cancel(dsn: str, conn: Conn, first: str) -> None:
    made = looped(conn, within=3600)
    held(conn, made.worker, UUID(str(claimed(conn, made)["job_id"])), seconds=0.001)
    calls = {
        "wake": lambda c: one(c, "select taskq.wake_waiting()"),
        "cancel": lambda c: one(c, "select taskq.cancel_run(%s)", made.run),
    }
    with sessions(dsn) as [winner, loser]:
        winner.begin()
        winner.do(calls[first])
        if first == "cancel":
            # What somebody is at is skipped.
            assert loser.do(calls["wake"]) == 0
            winner.commit()
        else:
            waiting = loser.start(calls["cancel"])
            loser.waits_for(winner)
            winner.commit()
            assert waiting.result(BOUND) == "cancelled"
    assert info(conn, made.run)["status"] == "cancelled"
    assert one(conn, "select bool_and(until is not null) from taskq.loop_holds")
    assert violations(conn) == []

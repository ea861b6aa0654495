"""Ends, cancels, reopenings and settlings at once: one promise an end, and no owner goes on over an open effect."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import psycopg
import pytest
from effects_kit import effect, effects, intents, jobs_of, owner, promising
from sql import (
    Conn,
    End,
    cancel,
    claim_one,
    end,
    get,
    one,
    register,
    retry,
    running,
    sessions,
    status,
    violations,
)


def sqlstate_of(call: Callable[[], object]) -> str:
    try:
        call()
    except psycopg.Error as error:
        return error.sqlstate or "?"
    return ""


def settle_effect(conn: Conn, key: str) -> str:
    answer: str = one(conn, "select taskq.settle_effect(%s, 'looked')", key)
    return answer


def failed_owner(conn: Conn) -> tuple[UUID, UUID, str]:
    """A failed job with one effect that waits; gives owner, effect's job and key."""
    worker, job = running(conn, **promising(conn, effect()))
    end(conn, worker, End(job, 1, "failed"))
    [intent] = intents(conn, job)
    return job, intent["job_id"], intent["effect_key"]


@pytest.mark.parametrize("first", ["end", "cancel"])
@pytest.mark.parametrize("finish", ["commit", "rollback"])
def test_an_end_and_a_cancel_at_once_promise_once(dsn: str, conn: Conn, first: str, finish: str) -> None:
    worker, job = running(conn, **promising(conn, effect()))
    with sessions(dsn) as [a, b]:
        calls: dict[str, Callable[[Conn], object]] = {
            "end": lambda c: end(c, worker, End(job, 1, "failed")),
            "cancel": lambda c: cancel(c, job),
        }
        a.begin()
        a.do(calls[first])
        [second] = set(calls) - {first}
        late = b.start(calls[second])
        b.waits_for(a)
        getattr(a, finish)() if finish == "commit" else a.do(lambda c: c.execute("rollback"))
        late.result(20)
    if status(conn, job) == "running":
        assert end(conn, worker, End(job, 1, "failed")) == 1
    told = (first, finish) in {("end", "commit"), ("cancel", "rollback")}
    assert status(conn, job) == ("failed" if told else "cancelled")
    assert len(intents(conn, job)) == len(jobs_of(conn, job)) == 1
    assert violations(conn) == []


def test_two_cancels_of_a_pending_job_promise_once(dsn: str, conn: Conn) -> None:
    job = owner(conn, effect())
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: cancel(c, job)) == "cancelled"
        late = b.start(lambda c: cancel(c, job))
        b.waits_for(a)
        a.commit()
        assert late.result(20) == "finished"
    assert len(intents(conn, job)) == len(jobs_of(conn, job)) == 1


def test_one_end_sent_on_two_connections_promises_once(dsn: str, conn: Conn) -> None:
    worker, job = running(conn, **promising(conn, effect()))
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: end(c, worker, End(job, 1, "failed"))) == 1
        late = b.start(lambda c: end(c, worker, End(job, 1, "failed")))
        b.waits_for(a)
        a.commit()
        assert late.result(20) == 0
    assert len(intents(conn, job)) == len(jobs_of(conn, job)) == 1


@pytest.mark.parametrize(("finish", "expected"), [("commit", ""), ("rollback", "WF020")])
def test_a_reopening_beside_the_end_of_an_effect_goes_by_what_is_committed(
    dsn: str, conn: Conn, finish: str, expected: str
) -> None:
    job, made, _ = failed_owner(conn)
    worker = register(conn)
    assert claim_one(conn, worker)["job_id"] == made
    with sessions(dsn) as [a, b]:
        a.begin()
        a.do(lambda c: end(c, worker, End(made, 1, "succeeded")))
        # Not committed: the effect still runs, for everybody else.
        assert b.do(lambda c: sqlstate_of(lambda: retry(c, job))) == "WF020"
        a.do(lambda c: c.execute(finish))
        assert b.do(lambda c: sqlstate_of(lambda: retry(c, job))) == expected
    assert violations(conn) == []


@pytest.mark.parametrize(("first", "expected"), [("owner", "WF012"), ("effect", "WF020")])
def test_an_owner_and_its_cancelled_effect_are_not_both_reopened(
    dsn: str, conn: Conn, first: str, expected: str
) -> None:
    """Either goes on, and the other is refused; whoever comes first."""
    job, made, _ = failed_owner(conn)
    cancel(conn, made)
    one_, two = (job, made) if first == "owner" else (made, job)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: retry(c, one_)) == "reopened"
        late = b.start(lambda c: sqlstate_of(lambda: retry(c, two)))
        b.waits_for(a)
        a.commit()
        assert late.result(20) == expected
    assert violations(conn) == []


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("first", ["owner", "effect"])
def test_an_owner_and_its_cancelled_effect_are_not_both_reopened_from_an_older_snapshot(
    dsn: str, conn: Conn, first: str, level: str
) -> None:
    """The later one has looked before the other was reopened, and would still find it as it was."""
    job, made, _ = failed_owner(conn)
    cancel(conn, made)
    one_, two = (job, made) if first == "owner" else (made, job)
    with sessions(dsn) as [a, b]:
        b.do(lambda c: c.execute(f"begin isolation level {level}"))
        b.do(lambda c: c.execute("select count(*) from taskq.history"))
        assert a.do(lambda c: retry(c, one_)) == "reopened"
        assert b.do(lambda c: sqlstate_of(lambda: retry(c, two))) == "40001"
        b.rollback()
    assert {status(conn, one_), status(conn, two)} != {"pending"}
    assert violations(conn) == []


def test_a_settling_and_a_reopening_of_its_job_are_one_after_the_other(dsn: str, conn: Conn) -> None:
    job, made, key = failed_owner(conn)
    worker = register(conn)
    claim_one(conn, worker)
    end(conn, worker, End(made, 1, "failed"))
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: retry(c, made)) == "reopened"
        late = b.start(lambda c: settle_effect(c, key))
        b.waits_for(a)
        a.commit()
        assert late.result(20) == "settled"
    # It saw the reopened job, and cancelled it.
    assert status(conn, made) == "cancelled"
    with sessions(dsn) as [a, b]:
        assert b.do(lambda c: sqlstate_of(lambda: retry(c, made))) == "WF012"
    assert violations(conn) == []


def test_a_reopening_behind_a_settling_sees_it(dsn: str, conn: Conn) -> None:
    job, made, key = failed_owner(conn)
    worker = register(conn)
    claim_one(conn, worker)
    end(conn, worker, End(made, 1, "failed"))
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: settle_effect(c, key)) == "settled"
        of_job = b.start(lambda c: sqlstate_of(lambda: retry(c, made)))
        b.waits_for(a)
        a.commit()
        assert of_job.result(20) == "WF012"
    assert retry(conn, job) == "reopened"
    assert get(conn, job)["key_generation"] is None


def test_a_claim_and_a_settling_of_an_effect_decide_once(dsn: str, conn: Conn) -> None:
    _, made, key = failed_owner(conn)
    worker = register(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: claim_one(c, worker))["job_id"] == made
        late = b.start(lambda c: sqlstate_of(lambda: settle_effect(c, key)))
        b.waits_for(a)
        a.commit()
        assert late.result(20) == "WF012"
    assert status(conn, made) == "running"


def test_two_retries_of_a_broken_effect_make_one_job(dsn: str, conn: Conn) -> None:
    job = owner(conn, effect(policy_id="late"))
    cancel(conn, job)
    [intent] = intents(conn, job)
    conn.execute("select taskq.ensure_policy('late', 1, '{}')")
    call = "select taskq.retry_effect(%s)"
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: one(c, call, intent["effect_key"])) == "enqueued"
        late = b.start(lambda c: sqlstate_of(lambda: one(c, call, intent["effect_key"])))
        b.waits_for(a)
        a.commit()
        assert late.result(20) == "WF012"
    assert len(jobs_of(conn, job)) == 1
    assert [e["status"] for e in effects(conn, job)] == ["pending"]

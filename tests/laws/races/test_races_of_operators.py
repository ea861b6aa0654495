"""Operators and applications against workers and each other: cancel, resolve, retry, and keys. Each is driven into its
lock wait before it goes on; the outcome is one of the listed ones whoever commits first, and the record is whole."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import psycopg
import pytest
from sql import (
    BACK,
    OUTCOMES,
    Conn,
    End,
    attempts,
    cancel,
    claim,
    claim_one,
    end,
    enqueue,
    enqueue_many,
    get,
    lose,
    one,
    register,
    resolve,
    retry,
    running,
    sessions,
    settle,
    unknown,
)


def sqlstate_of(call: Callable[[], object]) -> str:
    try:
        call()
    except psycopg.Error as error:
        return error.sqlstate or "?"
    return ""


# Cancel ---------------------------------------------------------------------------------------------------------------


def test_a_cancel_behind_a_claim_is_a_request(dsn: str, conn: Conn) -> None:
    job = enqueue(conn)
    worker = register(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        a.do(lambda c: claim_one(c, worker))
        answer = b.start(lambda c: cancel(c, job))
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == "requested"
    assert get(conn, job)["cancel_requested_at"] is not None


def test_a_claim_beside_a_cancel_takes_nothing(dsn: str, conn: Conn) -> None:
    job = enqueue(conn)
    worker = register(conn)
    for finish in ("rollback", "commit"):
        with sessions(dsn, 1) as [a]:
            a.begin()
            assert a.do(lambda c: cancel(c, job)) == "cancelled"
            assert claim(conn, worker) == []
            getattr(a, finish)()
    assert get(conn, job)["status"] == "cancelled"
    assert claim(conn, worker) == []


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_end_behind_a_cancel_request_sees_it(dsn: str, conn: Conn, outcome: str) -> None:
    """The request commits after the body has ended but before its end is written: no further attempt, or a success."""
    worker, job = running(conn, max_attempts=9)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: cancel(c, job)) == "requested"
        answer = b.start(lambda c: end(c, worker, End(job, 1, outcome)))
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == 1
    final = "succeeded" if outcome == "succeeded" else "cancelled"
    found = get(conn, job)
    assert (found["status"], attempts(conn, job)) == (final, [(1, final)])
    assert found["cancel_requested_at"] is not None
    assert claim(conn, register(conn)) == []


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_cancel_behind_an_end_answers_by_what_came_of_it(dsn: str, conn: Conn, outcome: str) -> None:
    worker, job = running(conn, max_attempts=9)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: end(c, worker, End(job, 1, outcome))) == 1
        answer = b.start(lambda c: cancel(c, job))
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == ("cancelled" if outcome in BACK else "finished")
    found = get(conn, job)
    assert found["status"] == ("succeeded" if outcome == "succeeded" else "cancelled" if outcome in BACK else "failed")
    assert found["cancel_requested_at"] is None


@pytest.mark.parametrize("effect", ["pure", "idempotent"])
def test_cancel_and_settling_in_both_orders(dsn: str, conn: Conn, effect: str) -> None:
    worker, job = running(conn, effect_class=effect)
    lose(conn, worker)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(settle) == {job: "pending"}
        answer = b.start(lambda c: cancel(c, job))
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == "cancelled"
    assert attempts(conn, job) == [(1, "lost")]
    worker, job = running(conn, effect_class=effect)
    lose(conn, worker)
    with sessions(dsn, 1) as [a]:
        a.begin()
        assert a.do(lambda c: cancel(c, job)) == "requested"
        assert settle(conn) == {}
        a.commit()
    assert settle(conn) == {job: "cancelled" if effect == "pure" else "unknown"}


def test_a_cancel_beside_a_reopening_answers_by_who_was_first(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "failed"))
    with sessions(dsn, 1) as [a]:
        a.begin()
        assert a.do(lambda c: retry(c, job)) == "reopened"
        assert cancel(conn, job) == "finished"
        a.commit()
        assert cancel(conn, job) == "cancelled"


# Resolving and reopening ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_two_resolutions_at_once_decide_once(dsn: str, conn: Conn, first: bool, second: bool) -> None:
    _, job = unknown(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        answer = a.do(lambda c: resolve(c, job, first))
        late = b.start(lambda c: sqlstate_of(lambda: resolve(c, job, second)))
        b.waits_for(a)
        a.commit()
        assert late.result(20) == "WF016"
    assert get(conn, job)["status"] == answer
    assert attempts(conn, job) == [(1, "resolved")]


@pytest.mark.parametrize("hook_first", [True, False])
def test_an_operator_and_a_hook_at_once_decide_once(dsn: str, conn: Conn, hook_first: bool) -> None:
    def ask(c: Conn) -> object:
        return one(c, "select taskq.answer_reconcile(%s, 1, true, null, 'asked', 'reconcile:x')", job)

    def decide(c: Conn) -> object:
        return resolve(c, job, happened=False)

    _, job = unknown(conn)
    first, second = (ask, decide) if hook_first else (decide, ask)
    with sessions(dsn) as [a, b]:
        a.begin()
        answer = a.do(first)
        late = b.start(lambda c: sqlstate_of(lambda: second(c)))
        b.waits_for(a)
        a.commit()
        assert late.result(20) == "WF016"
    assert get(conn, job)["status"] == answer == ("succeeded" if hook_first else "cancelled")
    assert attempts(conn, job) == [(1, "resolved")]
    assert one(conn, "select count(*) from taskq.audit where action = 'resolve'") == 1


def test_a_resolution_and_the_late_end_decide_once_in_both_orders(dsn: str, conn: Conn) -> None:
    worker, job = unknown(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: end(c, worker, End(job, 1))) == 1
        late = b.start(lambda c: sqlstate_of(lambda: resolve(c, job, happened=False)))
        b.waits_for(a)
        a.commit()
        assert late.result(20) == "WF016"
    assert attempts(conn, job) == [(1, "succeeded")]
    worker, job = unknown(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: resolve(c, job, happened=False)) == "cancelled"
        answer = b.start(lambda c: end(c, worker, End(job, 1)))
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == 0
    assert attempts(conn, job) == [(1, "resolved")]


def test_two_reopenings_at_once_reopen_once(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "failed"))
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: retry(c, job)) == "reopened"
        answer = b.start(lambda c: retry(c, job))
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == "due"
    assert get(conn, job)["generation"] == 1


def test_a_reopening_behind_an_end_sees_it(dsn: str, conn: Conn) -> None:
    worker, job = running(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: end(c, worker, End(job, 1, "failed"))) == 1
        answer = b.start(lambda c: retry(c, job))
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == "reopened"
    assert attempts(conn, job) == [(1, "failed")]


def moved_there_and_back(conn: Conn, job: UUID) -> None:
    """In one transaction out of history and into it again, or out of jobs and into it again."""
    if get(conn, job)["finished_at"] is None:
        if get(conn, job)["status"] == "unknown":
            resolve(conn, job, False)
        assert cancel(conn, job) == "cancelled"
        assert retry(conn, job) == "reopened"
    else:
        assert retry(conn, job) == "reopened"
        assert cancel(conn, job) == "cancelled"


@pytest.mark.parametrize("call", ["cancel", "retry", "resolve"])
@pytest.mark.parametrize("before", ["pending", "unknown", "cancelled"])
def test_a_job_that_moves_twice_while_it_is_looked_for_is_found(dsn: str, conn: Conn, call: str, before: str) -> None:
    job = unknown(conn)[1] if before == "unknown" else enqueue(conn)
    if before == "unknown":
        conn.execute("update taskq.jobs set cancel_requested_at = null")
    if before == "cancelled":
        cancel(conn, job)
    expected = {
        "cancel": "finished" if before == "cancelled" else "cancelled",
        "retry": "reopened" if before == "cancelled" else "due",
        "resolve": "WF016" if before == "unknown" else "WF012",
    }
    ask: dict[str, Callable[[Conn], str]] = {
        "cancel": lambda c: cancel(c, job),
        "retry": lambda c: retry(c, job),
        "resolve": lambda c: sqlstate_of(lambda: resolve(c, job, True)),
    }
    with sessions(dsn) as [a, b]:
        a.begin()
        a.do(lambda c: moved_there_and_back(c, job))
        answer = b.start(ask[call])
        if before != "cancelled" or call == "retry":
            b.waits_for(a)
        a.commit()
        assert answer.result(20) == expected[call]


@pytest.mark.parametrize(("call", "expected"), [("cancel", "finished"), ("retry", "reopened"), ("resolve", "WF012")])
def test_a_job_that_ends_between_two_looks_is_found(dsn: str, conn: Conn, call: str, expected: str) -> None:
    """It is waiting when it is looked for in history, and has ended when it is looked for in jobs again."""
    job = enqueue(conn)
    # A look into history waits here, after it has taken its snapshot.
    conn.execute(
        "create or replace function taskq.id_time(p_id uuid) returns timestamptz language plpgsql stable"
        " as $$ begin perform pg_advisory_lock_shared(7), pg_advisory_unlock_shared(7); return '-infinity'; end $$"
    )
    ask: dict[str, Callable[[Conn, UUID], str]] = {
        "cancel": cancel,
        "retry": lambda c, j: sqlstate_of(lambda: retry(c, j)) or "reopened",
        "resolve": lambda c, j: sqlstate_of(lambda: resolve(c, j, True)),
    }
    with sessions(dsn, 3) as [a, b, gate]:
        # Its plans are made before, so that it waits while they run.
        b.do(lambda c: c.execute("set plan_cache_mode = force_generic_plan"))
        b.do(lambda c: ask[call](c, UUID(int=7)))
        a.begin()
        a.do(lambda c: moved_there_and_back(c, job))
        gate.do(lambda c: c.execute("select pg_advisory_lock(7)"))
        answer = b.start(lambda c: ask[call](c, job))
        b.waits_for(a)
        a.commit()
        b.waits_for(gate)
        assert gate.do(lambda c: cancel(c, job)) == "cancelled"
        gate.do(lambda c: c.execute("select pg_advisory_unlock(7)"))
        assert answer.result(20) == expected


# Keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unique", "idempotency"])
@pytest.mark.parametrize("finish", ["commit", "rollback"])
def test_two_enqueues_of_one_key_at_once_make_one_job(dsn: str, conn: Conn, kind: str, finish: str) -> None:
    enqueue(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        [first] = a.do(lambda c: enqueue_many(c, **{kind: ["k"]}))  # type: ignore[arg-type]
        answer = b.start(lambda c: enqueue_many(c, **{kind: ["k"]}))  # type: ignore[arg-type]
        b.waits_for(a)
        getattr(a, finish)()
        [second] = answer.result(20)
    assert first["inserted"]
    assert second["inserted"] is (finish == "rollback")
    assert (second["job_id"] == first["job_id"]) is (finish == "commit")
    assert one(conn, "select count(*) from taskq.jobs") == 2


def test_batches_with_the_same_keys_in_opposite_orders_do_not_deadlock(dsn: str, conn: Conn) -> None:
    enqueue(conn)
    with sessions(dsn, 3) as [holder, a, b]:
        # Both batches wait for the middle key; each in its own order, they would hold each other's.
        holder.begin()
        holder.do(lambda c: enqueue_many(c, unique=["m"]))
        one_way = a.start(lambda c: enqueue_many(c, 3, unique=["a", "m", "z"]))
        a.waits_for(holder)
        other_way = b.start(lambda c: enqueue_many(c, 3, unique=["z", "m", "a"]))
        b.waits_for(a)
        holder.commit()
        first = [row["job_id"] for row in one_way.result(20)]
        second = [row["job_id"] for row in other_way.result(20)]
    assert first == second[::-1]


def test_an_enqueue_behind_the_end_of_the_holder_takes_the_key(dsn: str, conn: Conn) -> None:
    worker, job = running(conn, unique_key="k")
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: end(c, worker, End(job, 1))) == 1
        answer = b.start(lambda c: enqueue_many(c, unique=["k"]))
        b.waits_for(a)
        a.commit()
        [row] = answer.result(20)
    assert row["inserted"]
    assert row["job_id"] != job


def test_a_reopening_behind_an_enqueue_of_its_key_is_refused(dsn: str, conn: Conn) -> None:
    worker, job = running(conn, unique_key="k")
    end(conn, worker, End(job, 1, "failed"))
    with sessions(dsn) as [a, b]:
        a.begin()
        a.do(lambda c: enqueue_many(c, unique=["k"]))
        answer = b.start(lambda c: sqlstate_of(lambda: retry(c, job)))
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == "WF007"
    assert get(conn, job)["status"] == "failed"

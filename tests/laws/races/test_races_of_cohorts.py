"""Cohorts under every order of commits: never more at once than the limit lets, and nobody waits for a cohort."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sql import Conn, End, claim, end, enqueue, enqueue_many, exchange, one, policy, register, rows, sessions

FINISH = pytest.mark.parametrize("finish", ["commit", "rollback"])


@pytest.fixture(autouse=True)
def known(conn: Conn) -> None:
    """Stored before, as clients do: an open transaction must not hold one."""
    policy(conn)
    conn.execute("select taskq.ensure_limit('a', 1), taskq.ensure_limit('b', 1)")


def claimed(conn: Conn, worker: UUID, **options: Any) -> list[UUID]:
    return [row["job_id"] for row in claim(conn, worker, **options)]


@FINISH
def test_of_two_claims_at_once_one_has_the_slot_and_the_other_goes_on_without(
    dsn: str, conn: Conn, finish: str
) -> None:
    # Of different tasks: neither would take the other's job in any case.
    first, second = enqueue(conn, cohort="a"), enqueue(conn, cohort="a", task="u")
    plain, other = enqueue(conn, task="u"), enqueue(conn, cohort="b", task="u")
    workers = register(conn), register(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: claimed(c, workers[0])) == [first]
        # Waits for nothing, and takes what is there for it.
        assert set(b.do(lambda c: claimed(c, workers[1], tasks=["u"]))) == {plain, other}
        getattr(a, finish)()
        assert b.do(lambda c: claimed(c, workers[1], tasks=["u"])) == ([] if finish == "commit" else [second])


@FINISH
def test_a_claim_beside_an_end_that_has_not_committed_finds_no_slot(dsn: str, conn: Conn, finish: str) -> None:
    jobs = [enqueue(conn, cohort="a") for _ in range(2)]
    workers = register(conn), register(conn)
    assert claimed(conn, workers[0]) == jobs[:1]
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: end(c, workers[0], End(jobs[0]))) == 1
        assert b.do(lambda c: claimed(c, workers[1])) == []
        getattr(a, finish)()
        assert b.do(lambda c: claimed(c, workers[1])) == (jobs[1:] if finish == "commit" else [])


@FINISH
def test_one_exchange_gives_up_a_slot_and_takes_it_again_and_nobody_comes_between(
    dsn: str, conn: Conn, finish: str
) -> None:
    jobs = [enqueue(conn, cohort="a") for _ in range(3)]
    workers = register(conn), register(conn)
    assert claimed(conn, workers[0]) == jobs[:1]
    with sessions(dsn) as [a, b]:
        a.begin()
        answer = a.do(lambda c: exchange(c, workers[0], [End(jobs[0])], 5))
        assert [row["job_id"] for row in answer] == [jobs[1]]
        assert b.do(lambda c: claimed(c, workers[1])) == []
        getattr(a, finish)()
        assert b.do(lambda c: claimed(c, workers[1])) == []
    if finish == "commit":
        [first, second] = rows(
            conn,
            "select ended_at as at from taskq.attempts union all"
            " select claimed_at from taskq.jobs where status = 'running'",
        )
        assert first["at"] <= second["at"]


@pytest.mark.parametrize("slots", [0, 2])
def test_a_change_of_the_limit_waits_for_a_claim_in_progress(dsn: str, conn: Conn, slots: int) -> None:
    jobs = [enqueue(conn, cohort="a") for _ in range(3)]
    workers = register(conn), register(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        assert a.do(lambda c: claimed(c, workers[0])) == jobs[:1]
        answer = b.start(lambda c: one(c, "select taskq.set_limit('a', %s, 'why')", slots))
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == "set"
    assert claimed(conn, workers[1]) == jobs[1:slots]


@FINISH
def test_a_claim_beside_a_change_of_the_limit_leaves_the_cohort_out(dsn: str, conn: Conn, finish: str) -> None:
    jobs = [enqueue(conn, cohort="a") for _ in range(3)]
    plain = enqueue(conn)
    worker = register(conn)
    with sessions(dsn) as [a, b]:
        a.begin()
        a.do(lambda c: one(c, "select taskq.set_limit('a', 2, 'why')"))
        assert b.do(lambda c: claimed(c, worker)) == [plain]
        getattr(a, finish)()
        assert b.do(lambda c: claimed(c, worker)) == jobs[: 2 if finish == "commit" else 1]


def test_workers_that_publish_the_same_limits_in_another_order_do_not_deadlock(dsn: str, conn: Conn) -> None:
    publish = "select count(*) from taskq.publish_limits(%s, %s)"
    with sessions(dsn, 3) as [holder, a, b]:
        holder.begin()
        holder.do(lambda c: one(c, "select taskq.set_limit('b', 5, 'why')"))
        one_way = a.start(lambda c: one(c, publish, ["b", "a"], [2, 2]))
        a.waits_for(holder)
        other_way = b.start(lambda c: one(c, publish, ["a", "b"], [3, 3]))
        b.waits_for(a)
        holder.commit()
        assert one_way.result(20) == other_way.result(20) == 2


def test_claims_by_hand_wait_for_one_another_and_the_second_is_refused(dsn: str, conn: Conn) -> None:
    jobs = [enqueue(conn, cohort="a") for _ in range(2)]
    worker = register(conn)
    by_hand = (
        "update taskq.jobs set status = 'running', claim_epoch = claim_epoch + 1, claimed_by = %s, claimed_at = now()"
        " where id = %s"
    )
    with sessions(dsn) as [a, b]:
        a.begin()
        a.do(lambda c: c.execute(by_hand, (worker, jobs[0])))
        second = b.start(lambda c: c.execute(by_hand, (worker, jobs[1])))
        b.waits_for(a)
        a.commit()
        with pytest.raises(psycopg.Error) as caught:
            second.result(20)
        assert caught.value.sqlstate == "WF027"


def test_above_read_committed_no_job_of_a_cohort_is_claimed(dsn: str, conn: Conn) -> None:
    """A count there would be older than the lock: what another has claimed meanwhile would not be seen."""
    jobs = [enqueue(conn, cohort="a") for _ in range(2)]
    plain = enqueue(conn)
    workers = register(conn), register(conn)
    with sessions(dsn, 1) as [a]:
        a.do(lambda c: c.execute("begin isolation level repeatable read"))
        a.do(lambda c: c.execute("select 1"))
        assert claimed(conn, workers[0], limit=1) == jobs[:1]
        assert end(conn, workers[0], End(jobs[0])) == 1
        assert a.do(lambda c: claimed(c, workers[1])) == [plain]
        with pytest.raises(psycopg.Error) as caught:
            a.do(
                lambda c: c.execute(
                    "update taskq.jobs set status = 'running', claim_epoch = claim_epoch + 1, claimed_by = %s,"
                    " claimed_at = now() where id = %s",
                    (workers[1], jobs[1]),
                )
            )
        assert caught.value.sqlstate == "WF027"
        a.rollback()


def test_a_cohort_may_be_new_to_a_transaction_whose_snapshot_is_older(dsn: str, conn: Conn) -> None:
    with sessions(dsn, 1) as [a]:
        a.do(lambda c: c.execute("begin isolation level repeatable read"))
        a.do(lambda c: c.execute("select 1"))
        conn.execute("select taskq.ensure_limit('new', 1)")
        found = a.do(
            lambda c: one(
                c,
                'select job_id from taskq.enqueue_many(\'[{"task": "t", "queue": "q", "cohort": "new",'
                ' "effect_class": "pure", "policy_id": "p", "max_attempts": 1}]\', \'{1}\', \'{"{}"}\')',
            )
        )
        a.commit()
    assert claimed(conn, register(conn)) == [found]


def test_enqueues_under_one_cohort_do_not_wait_for_one_another_nor_claims_for_them(dsn: str, conn: Conn) -> None:
    with sessions(dsn) as [a, b]:
        a.begin()
        first = a.do(lambda c: enqueue(c, cohort="a"))
        second = b.do(lambda c: enqueue(c, cohort="a"))
        b.do(lambda c: c.execute("select taskq.ensure_limit('a', 1)"))
        assert b.do(lambda c: claimed(c, register(c))) == [second]
        a.commit()
    assert one(conn, "select status from taskq.jobs where id = %s", first) == "pending"


def most_at_once(conn: Conn) -> dict[str, int]:
    """By record: of each cohort the most attempts that were claimed and not ended at one instant."""
    found = rows(
        conn,
        "with a as (select h.cohort, a.claimed_at, a.ended_at from taskq.attempts a"
        " join taskq.all_jobs h on h.id = a.job_id)"
        " select x.cohort, max((select count(*) from a y where y.cohort = x.cohort and y.claimed_at <= x.claimed_at"
        " and y.ended_at > x.claimed_at))::int as n from a x group by 1",
    )
    return {row["cohort"]: row["n"] for row in found}


def test_in_a_storm_of_sessions_never_more_run_than_the_limit_lets(dsn: str, conn: Conn) -> None:
    limits, n = {"a": 1, "b": 3, "c": 7}, 60
    for cohort, most in limits.items():
        conn.execute("select taskq.publish_limits(%s, %s)", ([cohort], [most]))
    for cohort in (*limits, None):
        for task in ("t", "u"):
            enqueue_many(conn, n // 2, cohort=cohort, task=task)
    running: dict[str, set[UUID]] = {cohort: set() for cohort in limits}
    over: list[str] = []
    lock = threading.Lock()
    left = 4 * n

    def work(seed: int) -> None:
        nonlocal left
        with psycopg.connect(dsn, autocommit=True) as mine:
            worker = register(mine)
            ends: list[End] = []
            gone: list[tuple[str | None, UUID]] = []
            turn = 0
            while left > 0:
                turn += 1
                with lock:
                    # Told as ended: from here on its slot may be another's.
                    for cohort, job in gone:
                        if cohort is not None:
                            running[cohort].discard(job)
                answer = exchange(
                    mine, worker, ends, 1 + (seed + turn) % 4, tasks=(("t",), ("u",), ("u", "t"))[seed % 3]
                )
                assert {row["kind"] for row in answer} <= {"job"}
                with lock:
                    left -= sum(each.outcome == "succeeded" for each in ends)
                    for row in answer:
                        if row["cohort"] is not None:
                            running[row["cohort"]].add(row["job_id"])
                            if len(running[row["cohort"]]) > limits[row["cohort"]]:
                                over.append(row["cohort"])
                ends = [
                    End(row["job_id"], row["claim_epoch"], "succeeded" if row["releases"] else "release", turn)
                    for row in answer
                ]
                gone = [(row["cohort"], row["job_id"]) for row in answer]

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, seed) for seed in range(8)]:
            done.result(120)
    assert over == []
    most = most_at_once(conn)
    most.pop(None, None)  # type: ignore[call-overload]
    assert set(most) == set(limits)
    assert all(most[cohort] <= limits[cohort] for cohort in limits), most
    # It was a storm: the larger ones were full at some time.
    assert most["b"] > 1, most
    assert one(conn, "select count(*) from taskq.history where status = 'succeeded'") == 4 * n

"""The plans of the hot statements, inside their functions: which index, how many rows thrown away, how many buffers.

The server explains them as they run (auto_explain, sent to the client), so what is looked at is the plan that was
cached, not one made for the test. Each connection first calls the functions while the table is empty and analysed as
empty: the plan that a worker has cached on a new installation must do for a burst as well. Time is never asserted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from plans_kit import Explained, buffers, discarded, explain_all, explained, nodes, scans
from sql import (
    BACK,
    Conn,
    End,
    claim,
    end,
    enqueue,
    exchange,
    one,
    policy,
    register,
    rows,
)

ALL_LANES = [(queue, priority) for priority in range(9, -1, -1) for queue in ("mail",)]


@pytest.fixture
def conn(dsn: str) -> Iterator[Conn]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        explain_all(connection)
        connection.execute("alter table taskq.jobs set (autovacuum_enabled = off)")
        yield connection


def fill(conn: Conn, n: int, *, queue: str = "q", run_at: str = "now() - interval '1 hour'") -> None:
    """Waiting jobs in random order of their due time within a minute, and in random order on disk."""
    conn.execute(
        "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload, priority)"
        f" select {run_at} + random() * interval '1 min', now(), 3, %s, 't', 'p', '{{}}', 5"
        " from generate_series(1, %s)",
        (queue, n),
    )


def warm_up(conn: Conn, queue: str = "q") -> Any:
    """Call every hot path once while jobs is empty and known to be, so that its plans are cached; gives a worker."""
    policy(conn)
    worker = register(conn, queues=(queue,), lease=3600)
    conn.execute("analyze taskq.jobs")
    # Often enough for a plan without parameters to be settled on, where the function's settings do not say so at once.
    for n in range(8):
        ends = [End(uuid4(), 1, outcome, n) for outcome in ("succeeded", *BACK)]
        assert {row["kind"] for row in exchange(conn, worker, ends, 10, lanes=[(queue, 5)])} == {"missed"}
    return worker


@pytest.mark.parametrize("statistics", ["stale", "fresh"])
def test_claims_and_ends_go_by_their_indexes_at_every_size(conn: Conn, statistics: str) -> None:
    worker = warm_up(conn)
    fill(conn, 200_000)
    if statistics == "fresh":
        conn.execute("analyze taskq.jobs")
    for n in (10, 500):
        for outcome in ("succeeded", "failed", "retry", "release"):
            with explained(conn) as notices:
                claimed = claim(conn, worker, n)
            assert len(claimed) == n
            plan = Explained(notices).of("for update skip locked")
            assert scans(plan) == {("Index Scan", "jobs_claim"), ("Tid Scan", "")}, (n, outcome)
            assert discarded(plan) <= 1_000
            assert buffers(plan) <= 200 + 20 * n

            ends = [End(row["job_id"], row["claim_epoch"], outcome, 1, delay=3600) for row in claimed]
            with explained(conn) as notices:
                assert end(conn, worker, *ends) == n
            found = Explained(notices)
            plan = found.of("delete from taskq.jobs")
            assert scans(plan) == {("Index Scan", "jobs_pkey")}, (n, outcome)
            assert discarded(plan) <= 2 * n
            assert buffers(plan) <= 200 + 20 * n
            if outcome in BACK:
                for text in ("order by j.id for update", "set status = 'pending'"):
                    plan = found.of(text)
                    assert scans(plan) == {("Index Scan", "jobs_pkey")}, (n, outcome)
                    assert discarded(plan) <= 2 * n
                    assert buffers(plan) <= 200 + 30 * n


def test_whether_ends_are_alone_is_looked_up_by_primary_key(conn: Conn) -> None:
    worker = warm_up(conn)
    assert one(conn, "select taskq.are_ends_alone('{}')")
    fill(conn, 50_000)
    jobs = [row["job_id"] for row in claim(conn, worker, 500)]
    with explained(conn) as notices:
        assert one(conn, "select taskq.are_ends_alone(%s::uuid[])", jobs)
    plan = Explained(notices).of("j.cancel_requested_at is not null")
    assert scans(plan) == {("Index Scan", "jobs_pkey")}
    assert buffers(plan) <= 200 + 5 * len(jobs)


@pytest.mark.parametrize("statistics", ["stale", "fresh"])
def test_a_claim_is_not_slowed_by_the_backlog_of_another_queue_or_by_what_is_due_later(
    conn: Conn, statistics: str
) -> None:
    worker = warm_up(conn, "mail")
    fill(conn, 200_000, queue="bulk", run_at="now() - interval '1 day'")
    fill(conn, 200_000, queue="mail", run_at="now() + interval '30 days'")
    fill(conn, 10, queue="mail")
    if statistics == "fresh":
        conn.execute("analyze taskq.jobs")
    for limit in (10, 500):
        with conn.transaction(force_rollback=True):
            with explained(conn) as notices:
                assert len(claim(conn, worker, limit, lanes=ALL_LANES)) == 10
            plan = Explained(notices).of("for update skip locked")
            assert scans(plan) == {("Index Scan", "jobs_claim"), ("Tid Scan", "")}
            assert buffers(plan) < 200
            assert discarded(plan) < 1_000


def test_the_cost_of_a_claim_does_not_grow_with_what_is_due_later(conn: Conn) -> None:
    worker = warm_up(conn)
    cost = []
    for far in (10_000, 190_000):
        fill(conn, far, run_at="now() + interval '30 days'")
        for statistics in ("stale", "fresh"):
            if statistics == "fresh":
                conn.execute("analyze taskq.jobs")
            fill(conn, 100)
            with explained(conn) as notices:
                claimed = claim(conn, worker, 200)
            assert len(claimed) == 100
            plan = Explained(notices).of("for update skip locked")
            assert scans(plan) == {("Index Scan", "jobs_claim"), ("Tid Scan", "")}
            assert discarded(plan) == 0
            cost.append(buffers(plan))
            assert end(conn, worker, *(End(row["job_id"], 1) for row in claimed)) == 100
    assert max(cost[2:]) <= 2 * min(cost[:2]), cost


def test_jobs_that_do_not_fit_are_counted_against_the_claim_once(conn: Conn) -> None:
    """Unknown tasks and used-up jobs at the front are walked over, never claimed, and found by their own indexes."""
    worker = warm_up(conn)
    fill(conn, 500)
    conn.execute("update taskq.jobs set attempt = max_attempts")
    fill(conn, 10, run_at="now() - interval '1 min'")
    conn.execute("analyze taskq.jobs")
    with explained(conn) as notices:
        assert len(claim(conn, worker, 10)) == 10
    assert discarded(Explained(notices).of("for update skip locked")) <= 500
    fill(conn, 100_000)
    with explained(conn) as notices:
        assert rows(conn, "select count(*)::int as n from taskq.sweep()") == [{"n": 500}]
    plan = Explained(notices).of("j.attempt >= j.max_attempts and j.id <> all(p_skip)")
    assert scans(plan) == {("Index Scan", "jobs_exhausted")}
    assert discarded(plan) == 0


@pytest.mark.parametrize("known", [0, 500])
def test_a_portion_of_the_sweep_reads_no_more_than_it_deals_with(conn: Conn, known: int) -> None:
    warm_up(conn)
    fill(conn, known)
    conn.execute("update taskq.jobs set attempt = max_attempts")
    conn.execute("analyze taskq.jobs")
    fill(conn, 20_000)
    conn.execute("update taskq.jobs set attempt = max_attempts")
    with explained(conn) as notices:
        assert rows(conn, "select count(*)::int as n from taskq.sweep(100)") == [{"n": 100}]
    plan = Explained(notices).of("j.attempt >= j.max_attempts and j.id <> all(p_skip)")
    assert scans(plan) == {("Index Scan", "jobs_exhausted")}


def test_the_bound_on_signals_reads_no_more_of_them_than_it_allows(conn: Conn) -> None:
    worker = warm_up(conn)
    fill(conn, 1)
    [job] = claim(conn, worker, 1)
    conn.execute("update taskq.installation set max_waiting_signals = 100")
    conn.execute(
        "insert into taskq.signals (job_id, generation, name, sent_at, taken_at, payload)"
        " select %s, g, 'go', now(), case when g = 0 and n > 99 then now() end, '1'"
        " from generate_series(0, 1) g, generate_series(1, 20000) n",
        (job["job_id"],),
    )
    for statistics in ("stale", "fresh"):
        if statistics == "fresh":
            conn.execute("analyze taskq.signals")
        with conn.transaction(force_rollback=True), explained(conn) as notices:
            rows(conn, f"select taskq.send_signal('{job['job_id']}', 'go')")
        plan = Explained(notices).of("g.refused_at is null offset")
        found = {n.get("Index Name") for n in nodes(plan) if n.get("Relation Name") == "signals"}
        assert found == {"signals_waiting"}, statistics
        assert discarded(plan) == 0
        assert buffers(plan) <= 150


def test_what_the_leader_and_a_renewal_look_for_goes_by_indexes(conn: Conn) -> None:
    worker = warm_up(conn)
    fill(conn, 100_000)
    lost = register(conn)
    claim(conn, lost, 300)
    claim(conn, worker, 20)
    enqueue(conn, deadline_in=0.001)
    conn.execute("update taskq.workers set status = 'lost' where id = %s", (lost,))
    conn.execute("analyze taskq.jobs")
    look = f"taskq.look('{worker}', 30, null, '{{default}}', '{{noop}}')"
    for call, text, index, most in (
        ("taskq.settle_lost(200)", "order by j.id limit p_limit", "jobs_claimed_by", 5_000),
        (f"taskq.renew('{worker}')", "j.cancel_requested_at is not null", "jobs_claimed_by", 200),
        ("taskq.sweep()", "order by j.deadline, j.id limit p_limit", "jobs_deadline", 50),
        (look, "r.status = 'running'", "jobs_claimed_by", 5_000),
        ("taskq.sweep()", "j.held_reason in ('signal', 'child') and j.run_at", "jobs_signal", 50),
        (look, "d.deadline <= taskq.now()", "jobs_deadline jobs_exhausted jobs_signal", 50),
    ):
        with explained(conn) as notices:
            rows(conn, f"select * from {call}")
        found = [plan for query, plan in Explained(notices).plans if text in query]
        assert found, text
        assert {name for _, name in scans(found[0])} == set(index.split()), text
        assert buffers(found[0]) <= most, text

"""What claims cost where cohorts are in use: the jobs of a full one, however many, add nothing to what others read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from plans_kit import Explained, buffers, discarded, explain_all, explained, scans
from sql import Conn, End, claim, end, exchange, one, policy, register, rows

LANES = [("q", priority) for priority in range(9, -1, -1)]
MOST = 500
"""Blocks that a claim may read beside what it reads and writes for each job that it takes."""


@pytest.fixture
def conn(dsn: str) -> Iterator[Conn]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        explain_all(connection)
        connection.execute("alter table taskq.jobs set (autovacuum_enabled = off)")
        yield connection


def fill(conn: Conn, n: int, cohort: str | None = None, *, priority: int = 5) -> None:
    conn.execute(
        "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload, priority, cohort)"
        " select now() - interval '1 hour' + random() * interval '1 min', now(), 3, 'q', 't', 'p', '{}', %s, %s"
        " from generate_series(1, %s)",
        (priority, cohort, n),
    )


def warm_up(conn: Conn, *limits: tuple[str, int]) -> Any:
    policy(conn)
    for cohort, limit in limits:
        conn.execute("select taskq.ensure_limit(%s, %s)", (cohort, limit))
    worker = register(conn, lease=3600)
    conn.execute("analyze taskq.jobs")
    for n in range(8):
        exchange(conn, worker, [End(uuid4(), 1, "succeeded", n)], 10, lanes=LANES)
    return worker


def cost(conn: Conn, worker: Any, n: int) -> tuple[int, list[Any], Explained]:
    """Blocks that one claim of n reads, whole, what it claims, and the plans of its parts."""
    with explained(conn) as notices:
        found = claim(conn, worker, n, lanes=LANES)
    whole = [p for p in notices if "taskq.exchange(" in p["Query Text"]]
    assert len(whole) == 1
    return buffers(whole[0]["Plan"]), found, Explained(notices)


@pytest.mark.parametrize("statistics", ["stale", "fresh"])
def test_the_jobs_of_a_full_cohort_do_not_raise_what_other_claims_read(conn: Conn, statistics: str) -> None:
    worker = warm_up(conn, ("full", 1), ("open", 100))
    fill(conn, 1, "full")
    assert len(claim(conn, worker, 1, lanes=LANES)) == 1
    seen = []
    for waiting in (10, 30_000):
        fill(conn, waiting, "full")
        fill(conn, 50)
        fill(conn, 50, "open")
        if statistics == "fresh":
            conn.execute("analyze taskq.jobs")
        for n in (1, 20):
            read, found, plans = cost(conn, worker, n)
            assert len(found) == n
            assert {row["cohort"] for row in found} <= {None, "open"}
            plan = plans.of("update taskq.jobs j set status")
            assert scans(plan) <= {("Index Scan", "jobs_claim"), ("Tid Scan", "")}
            for text in ("cross join unnest(p_lane_queues", "outside as materialized", "for update skip locked"):
                for each in [p for q, p in plans.plans if text in q]:
                    assert {name for _, name in scans(each)} <= {"jobs_cohort", "jobs_claim", "jobs_pkey", ""}, text
                    assert discarded(each) <= 200, text
            seen.append((waiting, n, read))
            assert end(conn, worker, *(End(row["job_id"], row["claim_epoch"]) for row in found)) == n
    for (_, n, before), (_, _, after) in zip(seen[:2], seen[2:], strict=True):
        assert after <= 1.5 * before + 60, seen
        assert after <= MOST + 60 * n, seen


def test_a_full_cohort_costs_a_claim_a_few_blocks_and_writes_nothing(conn: Conn) -> None:
    worker = warm_up(conn, ("full", 3))
    fill(conn, 3, "full")
    assert len(claim(conn, worker, 3, lanes=LANES)) == 3
    fill(conn, 30_000, "full")
    locked = rows(conn, "select xmin, xmax from taskq.limits")
    read, found, _ = cost(conn, worker, 20)
    assert found == []
    assert read <= MOST, read
    assert rows(conn, "select xmin, xmax from taskq.limits") == locked


def test_what_runs_is_counted_up_to_the_limit_by_its_index(conn: Conn) -> None:
    worker = warm_up(conn, ("wide", 200))
    fill(conn, 300, "wide")
    assert len(claim(conn, worker, 200, lanes=LANES)) == 200
    conn.execute("analyze taskq.jobs")
    with explained(conn) as notices:
        assert one(conn, "select taskq.cohort_free('wide')") == 0
    [plan] = [p for q, p in Explained(notices).plans if "j.status = 'running' limit v_limit" in q]
    assert {name for _, name in scans(plan)} == {"jobs_cohort_running"}


def test_without_any_cohort_a_claim_is_what_it_was(conn: Conn) -> None:
    worker = warm_up(conn)
    fill(conn, 1000)
    _, found, plans = cost(conn, worker, 10)
    assert len(found) == 10
    asked = [q for q, _ in plans.plans if "choose_in_cohorts" in q]
    assert asked == []
    plan = plans.of("update taskq.jobs j set status")
    assert scans(plan) == {("Index Scan", "jobs_claim"), ("Tid Scan", "")}
    assert discarded(plan) == 0

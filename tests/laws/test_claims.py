"""What a claim takes: order, lanes, marks, paused queues, tasks that the worker knows, capability levels."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sql import (
    NOBODY,
    claim,
    claim_one,
    control_clock,
    detail,
    enqueue,
    enqueue_many,
    exchange,
    get,
    one,
    register,
    rows,
    shift_clock,
)

Conn = psycopg.Connection[Any]


def test_a_claim_answers_with_what_the_body_needs(conn: Conn) -> None:
    worker = register(conn)
    job = enqueue(conn, payload={"n": 1}, meta={"trace": "x"}, deadline_in=60)
    row = claim_one(conn, worker)
    now = get(conn, job)
    assert (row["kind"], row["job_id"], row["claim_epoch"]) == ("job", job, 1)
    assert (row["payload"], row["meta"]) == ('{"n": 1}', '{"trace": "x"}')
    for name in (
        "task",
        "queue",
        "priority",
        "run_at",
        "policy_id",
        "attempt",
        "max_attempts",
        "recoveries",
        "retry_afters",
    ):
        assert row[name] == now[name], name
    for name in ("snoozes", "generation", "effect_class", "deadline", "claimed_at"):
        assert row[name] == now[name], name
    assert (now["status"], now["worker_id"]) == ("running", worker)


def test_a_claim_takes_due_jobs_by_run_at_and_id_lane_by_lane(conn: Conn) -> None:
    control_clock(conn)
    worker = register(conn, lease=600)
    late = enqueue(conn, run_in=5)
    low = enqueue(conn)
    first, second = (enqueue(conn, priority=9) for _ in range(2))
    conn.execute("update taskq.jobs set run_at = run_at - interval '1 min' where id = %s", (second,))
    lanes = [("q", 9), ("q", 5)]
    assert claim_one(conn, worker, lanes=lanes)["job_id"] == second
    assert claim_one(conn, worker, lanes=lanes)["job_id"] == first
    assert claim_one(conn, worker, lanes=lanes)["job_id"] == low
    assert claim(conn, worker, lanes=lanes) == []
    shift_clock(conn, "5 s")
    assert claim_one(conn, worker, lanes=lanes)["job_id"] == late


def test_a_claim_takes_no_more_than_its_limit_over_all_lanes(conn: Conn) -> None:
    worker = register(conn)
    for priority in (9, 5):
        enqueue_many(conn, 5, priority=priority)
    claimed = claim(conn, worker, 7, lanes=[("q", 9), ("q", 5)])
    assert sorted(row["priority"] for row in claimed) == [5, 5, 9, 9, 9, 9, 9]


def test_a_claim_keeps_to_its_queues_tasks_and_skips(conn: Conn) -> None:
    worker = register(conn)
    enqueue(conn, queue="other")
    enqueue(conn, task="strange")
    skipped, wanted = enqueue(conn), enqueue(conn)
    assert [row["job_id"] for row in claim(conn, worker, skip=[skipped])] == [wanted]


def test_a_claim_starts_behind_the_mark_and_a_rescan_finds_what_came_late(conn: Conn) -> None:
    worker = register(conn)
    jobs = [row["job_id"] for row in enqueue_many(conn, 6)]
    same = one(conn, "select run_at from taskq.jobs where id = %s", jobs[0])
    back_dated = enqueue(conn)
    conn.execute("update taskq.jobs set run_at = run_at - interval '1 min' where id = %s", (back_dated,))
    # All six have one run_at, so the id decides: the mark is the pair.
    claimed = claim(conn, worker, 2, mark=(same, jobs[1]))
    assert {row["job_id"] for row in claimed} == set(jobs[2:4])
    claimed = claim(conn, worker, mark=(same, jobs[3]))
    assert {row["job_id"] for row in claimed} == set(jobs[4:])
    claimed = claim(conn, worker, mark=("-infinity", NOBODY))
    assert {row["job_id"] for row in claimed} == {back_dated, *jobs[:2]}


def test_nothing_is_claimed_from_a_paused_queue(conn: Conn) -> None:
    worker = register(conn, queues=("q", "z"))
    paused, open_ = enqueue(conn), enqueue(conn, queue="z")
    assert one(conn, "select taskq.pause_queue('q', 'because', 'me')") is True
    assert one(conn, "select taskq.pause_queue('q')") is False
    lanes = [("q", 5), ("z", 5)]
    assert [row["job_id"] for row in claim(conn, worker, lanes=lanes)] == [open_]
    assert one(conn, "select taskq.resume_queue('q')") is True
    assert one(conn, "select taskq.resume_queue('q')") is False
    assert [row["job_id"] for row in claim(conn, worker, lanes=lanes)] == [paused]
    noted = rows(conn, "select action, subject, reason, actor from taskq.audit order by id")
    assert [(n["action"], n["subject"], n["reason"]) for n in noted] == [
        ("pause", "q", "because"),
        ("resume", "q", None),
    ]
    assert noted[0]["actor"] == "me"


def test_claims_leave_jobs_above_the_level_of_the_worker(conn: Conn) -> None:
    high = enqueue(conn, required_worker_schema=3)
    plain, fitting = enqueue(conn), enqueue(conn, required_worker_schema=2)
    worker = register(conn, level=2)
    assert {row["job_id"] for row in claim(conn, worker)} == {plain, fitting}
    assert claim_one(conn, register(conn, level=3))["job_id"] == high


BY_HAND = "update taskq.jobs set status = 'running', claimed_by = %s, claimed_at = now(), claim_epoch = claim_epoch + 1"


def test_the_database_refuses_an_incapable_worker_whatever_the_claim_says(conn: Conn) -> None:
    job = enqueue(conn, required_worker_schema=3)
    for worker in (register(conn, level=2), NOBODY):
        with pytest.raises(psycopg.Error, match="capability level") as caught, conn.transaction():
            conn.execute(BY_HAND, (worker,))
        assert caught.value.sqlstate == "WF001"
        assert detail(caught.value)["job_id"] == str(job)
        assert detail(caught.value)["required"] == 3
    conn.execute(BY_HAND, (register(conn, level=3),))
    assert get(conn, job)["status"] == "running"


def test_an_exchange_without_room_claims_nothing(conn: Conn) -> None:
    worker = register(conn)
    enqueue(conn)
    assert exchange(conn, worker) == []

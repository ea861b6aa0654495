"""What a claim takes: order, lanes, marks, paused queues, tasks that the worker knows, capability levels."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sql import (
    NOBODY,
    End,
    claim,
    claim_one,
    control_clock,
    detail,
    end,
    enqueue,
    enqueue_many,
    exchange,
    get,
    one,
    refused,
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


# Instants and durations that some client could not read ---------------------------------------------------------------

BAD_SPECS = [
    *((name, at) for name in ("run_at", "deadline") for at in ("infinity", "-infinity", "9000-01-01", "20000-01-01")),
    *((name, at) for name in ("run_at", "deadline") for at in ("1969-12-31 23:59:59+00", "0044-03-15 BC")),
    *((name, n) for name in ("run_in", "deadline_in", "unique_hold") for n in (1e18, "NaN", "Infinity", -1e18)),
]


@pytest.mark.parametrize(("name", "value"), BAD_SPECS)
def test_an_instant_or_duration_out_of_the_calendar_is_refused(conn: Conn, name: str, value: object) -> None:
    with pytest.raises(psycopg.Error) as caught:
        enqueue(conn, unique_key="k", **{name: value})
    assert caught.value.sqlstate == "WF009"
    assert f"{name} is " in str(caught.value)


def test_enqueue_refuses_them_and_takes_the_first_and_the_last_that_fit(conn: Conn) -> None:
    enqueue(conn)
    for given in ("run_at => 'infinity'", "run_at => '1969-01-01'", "deadline => '20000-01-01'", "run_in => '5000 y'"):
        query = f"select taskq.enqueue('t', policy => 'p', {given})"
        assert refused(conn, query) == "WF009", given
    for given in ("run_at => '1970-01-01 00:00:00+00'", "deadline => '8999-12-31 23:59:59+00'", "run_in => '99 y'"):
        assert refused(conn, f"select taskq.enqueue('t', policy => 'p', {given})") == "", given


@pytest.mark.parametrize("recoveries", [0, 2])
def test_a_claim_answers_what_every_client_can_read_whatever_is_stored(conn: Conn, recoveries: int) -> None:
    """An instant after the year 9999 or before 1 stops a worker that reads it, and then the next."""
    job = enqueue(conn)
    conn.execute(
        "update taskq.jobs set deadline = 'infinity', run_at = '-infinity', recoveries = %s where id = %s",
        (recoveries, job),
    )
    worker = register(conn)
    if recoveries:
        [row] = rows(conn, "select * from taskq.claim_suspect(%s, '{t}', '{q}')", worker)
    else:
        row = claim_one(conn, worker)
    assert (row["job_id"], row["deadline"], row["run_at"].year) == (job, None, 1)


@pytest.mark.parametrize("outcome", ["retry", "retry_after", "snooze", "release"])
def test_a_wait_that_would_leave_the_calendar_is_a_hundred_years(conn: Conn, outcome: str) -> None:
    worker = register(conn)
    for delay in (1e18, float("inf"), float("nan")):
        job = enqueue(conn)
        claim_one(conn, worker)
        assert end(conn, worker, End(job, 1, outcome, delay=delay)) == 1
        assert one(conn, "select run_at - taskq.now() < '36526 days' from taskq.jobs where id = %s", job)
        assert one(conn, "select run_at - taskq.now() > '36524 days' from taskq.jobs where id = %s", job)

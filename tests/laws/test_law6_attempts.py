"""Law 6: attempts are consumed by failures of the body only; everything else has a counter of its own."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from sql import (
    OUTCOMES,
    SPENT,
    End,
    attempts,
    cancel,
    claim,
    claim_one,
    end,
    enqueue,
    get,
    lose,
    make_due,
    one,
    policy,
    register,
    retry,
    rows,
    running,
    settle,
    violations,
)

Conn = psycopg.Connection[Any]
COUNTERS = ("attempt", "retry_afters", "snoozes", "releases", "recoveries")


def counters(conn: Conn, job: UUID) -> tuple[int, ...]:
    found = get(conn, job)
    return tuple(found[name] for name in COUNTERS)


def suspect(
    conn: Conn, worker: UUID, *, tasks: tuple[str, ...] = ("t",), queues: tuple[str, ...] = ("q",)
) -> list[UUID]:
    found = rows(conn, "select * from taskq.claim_suspect(%s, %s, %s)", worker, list(tasks), list(queues))
    return [row["job_id"] for row in found]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("retry", (1, 0, 0, 0, 0)),
        ("retry_after", (0, 1, 0, 0, 0)),
        ("retry_after_spent", (0, 1, 0, 0, 0)),
        ("snooze", (0, 0, 1, 0, 0)),
        ("snooze_spent", (0, 0, 1, 0, 0)),
        ("release", (0, 0, 0, 1, 0)),
        ("lost", (0, 0, 0, 0, 1)),
        ("failed", (1, 0, 0, 0, 0)),
        ("succeeded", (0, 0, 0, 0, 0)),
    ],
)
def test_each_outcome_moves_its_own_counter(conn: Conn, outcome: str, expected: tuple[int, ...]) -> None:
    worker, job = running(conn)
    if outcome == "lost":
        lose(conn, worker)
        settle(conn)
    else:
        end(conn, worker, End(job, 1, outcome))
    assert counters(conn, job) == expected
    assert violations(conn) == []


@pytest.mark.parametrize("outcome", [outcome for outcome in OUTCOMES if outcome != "succeeded"])
def test_an_end_after_a_cancel_request_moves_no_counter(conn: Conn, outcome: str) -> None:
    worker, job = running(conn)
    cancel(conn, job)
    assert end(conn, worker, End(job, 1, outcome)) == 1
    assert get(conn, job)["status"] == "cancelled"
    assert counters(conn, job) == (0, 0, 0, 0, 0)
    assert attempts(conn, job) == [(1, "cancelled")]
    assert violations(conn) == []


@pytest.mark.parametrize("outcome", SPENT)
def test_asking_once_more_than_the_bound_allows_fails_the_job_without_using_an_attempt(
    conn: Conn, outcome: str
) -> None:
    worker, job = running(conn)
    assert end(conn, worker, End(job, 1, outcome, error={"type": "E"})) == 1
    found = get(conn, job)
    assert (found["status"], found["error"], found["attempt"]) == ("failed", {"type": "E"}, 0)
    assert attempts(conn, job) == [(1, {"retry_after_spent": "retry_after", "snooze_spent": "snoozed"}[outcome])]
    assert violations(conn) == []


def test_a_release_after_a_cancel_request_says_that_the_job_was_cancelled(conn: Conn) -> None:
    worker, job = running(conn)
    cancel(conn, job)
    end(conn, worker, End(job, 1, "release", error={"type": "Released"}))
    found = get(conn, job)
    assert (found["status"], found["error"]["type"]) == ("cancelled", "Cancelled")


def test_a_claim_consumes_no_attempt(conn: Conn) -> None:
    _, job = running(conn)
    assert counters(conn, job) == (0, 0, 0, 0, 0)


def test_the_last_failure_ends_the_job_though_it_asked_for_a_retry(conn: Conn) -> None:
    worker = register(conn)
    job = enqueue(conn, max_attempts=2)
    claim_one(conn, worker)
    end(conn, worker, End(job, 1, "retry", error={"type": "E", "n": 1}))
    assert get(conn, job)["status"] == "pending"
    make_due(conn, job)
    claim_one(conn, worker)
    end(conn, worker, End(job, 2, "retry", error={"type": "E", "n": 2}))
    found = get(conn, job)
    assert (found["status"], found["attempt"], found["error"]) == ("failed", 2, {"type": "E", "n": 2})
    assert attempts(conn, job) == [(1, "failed"), (2, "failed")]
    assert violations(conn) == []


@pytest.mark.parametrize("outcome", ["snooze", "retry_after", "release"])
def test_what_consumes_no_attempt_goes_on_though_one_attempt_is_left(conn: Conn, outcome: str) -> None:
    worker = register(conn)
    job = enqueue(conn, max_attempts=1)
    for epoch in (1, 2, 3):
        make_due(conn, job)
        assert claim_one(conn, worker)["claim_epoch"] == epoch
        assert end(conn, worker, End(job, epoch, outcome)) == 1
    assert get(conn, job)["status"] == "pending"
    assert counters(conn, job)[0] == 0
    assert violations(conn) == []


def lose_times(conn: Conn, job: UUID, times: int) -> list[str]:
    settled = []
    for _ in range(times):
        worker = register(conn)
        assert claim(conn, worker) or suspect(conn, worker) == [job]
        lose(conn, worker)
        settled.append(settle(conn)[job])
    return settled


def test_running_out_of_recoveries_fails_the_job(conn: Conn) -> None:
    policy(conn, "two", max_recoveries=2)
    job = enqueue(conn, policy_id="two")
    assert lose_times(conn, job, 3) == ["pending", "pending", "failed"]
    found = get(conn, job)
    assert (found["error"]["type"], found["recoveries"], found["attempt"]) == ("RecoveryExhausted", 3, 0)
    assert attempts(conn, job) == [(1, "lost"), (2, "lost"), (3, "lost")]
    assert violations(conn) == []
    assert retry(conn, job) == "reopened"
    assert counters(conn, job) == (0, 0, 0, 0, 0)
    assert violations(conn) == []


def test_without_a_limit_in_its_policy_a_job_is_recovered_ten_times(conn: Conn) -> None:
    job = enqueue(conn)
    assert lose_times(conn, job, 11) == ["pending"] * 10 + ["failed"]
    assert violations(conn) == []


def test_a_job_that_was_on_a_lost_worker_twice_is_claimed_alone(conn: Conn) -> None:
    job = enqueue(conn)
    assert lose_times(conn, job, 2) == ["pending", "pending"]
    worker = register(conn)
    other = enqueue(conn)
    # Never beside others, also where the marks let everything through and the limit is one.
    assert [row["job_id"] for row in claim(conn, worker)] == [other]
    assert claim(conn, worker) == []
    # Not while the worker holds anything.
    assert suspect(conn, worker) == []
    end(conn, worker, End(other, 1))
    assert suspect(conn, worker) == [job]
    # One at a time.
    second = enqueue(conn)
    conn.execute("update taskq.jobs set recoveries = 2 where id = %s", (second,))
    assert suspect(conn, worker) == []
    assert suspect(conn, register(conn)) == [second]
    assert get(conn, job)["claim_epoch"] == 3


def test_a_suspect_is_claimed_under_the_rules_of_every_claim(conn: Conn) -> None:
    job = enqueue(conn, deadline_in=600, required_worker_schema=1)
    conn.execute("update taskq.jobs set recoveries = 2 where id = %s", (job,))
    worker = register(conn)
    assert suspect(conn, worker, tasks=("other",)) == []
    assert suspect(conn, worker, queues=("other",)) == []
    for change in (
        "update taskq.workers set lease_expires_at = taskq.now()",
        "update taskq.workers set status = 'draining'",
        "update taskq.workers set capability_level = 0",
        "update taskq.jobs set deadline = taskq.now()",
        "update taskq.jobs set run_at = taskq.now() + interval '1 min'",
        "update taskq.jobs set max_attempts = 1, attempt = 1",
        "update taskq.jobs set recoveries = 1",
        "select taskq.pause_queue('q')",
    ):
        with conn.transaction(force_rollback=True):
            conn.execute(change)
            assert suspect(conn, worker) == [], change
    assert suspect(conn, worker) == [job]


def test_survey_tells_of_suspects_and_of_unknown_tasks(conn: Conn) -> None:
    for n in range(3):
        job = enqueue(conn, task="strange")
        if n == 0:
            conn.execute("update taskq.jobs set recoveries = 2, task = 't' where id = %s", (job,))
    enqueue(conn)
    found = rows(conn, "select * from taskq.survey('{q}', '{t}')")
    assert [(row["kind"], row["name"], row["n"]) for row in found] == [
        ("suspect", "q", 1),
        ("unknown_task", "strange", 2),
    ]


def test_used_up_jobs_do_not_eat_the_quota_of_a_claim_and_are_swept(conn: Conn) -> None:
    worker = register(conn)
    used_up = [enqueue(conn, priority=9) for _ in range(5)]
    conn.execute("update taskq.jobs set max_attempts = 1, attempt = 1, run_at = run_at - interval '1 day'")
    ordinary = [enqueue(conn, priority=9) for _ in range(5)]
    claimed = claim(conn, worker, 5, lanes=[("q", 9), ("q", 5)])
    assert {row["job_id"] for row in claimed} == set(ordinary)
    assert one(conn, "select count(*) from taskq.sweep(3)") == 3
    assert one(conn, "select count(*) from taskq.sweep()") == 2
    for job in used_up:
        assert (get(conn, job)["status"], get(conn, job)["error"]["type"]) == ("failed", "AttemptsExhausted")

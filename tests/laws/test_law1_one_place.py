"""Law 1: a job is in exactly one of jobs and history."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from sql import (
    BACK,
    TERMINAL,
    End,
    cancel,
    claim_one,
    end,
    enqueue,
    get,
    make_due,
    one,
    refused,
    register,
    retry,
    running,
    violations,
)

Conn = psycopg.Connection[Any]


def place(conn: Conn, job: UUID) -> tuple[int, int]:
    return (
        one(conn, "select count(*) from taskq.jobs where id = %s", job),
        one(conn, "select count(*) from taskq.history where id = %s", job),
    )


@pytest.mark.parametrize("outcome", TERMINAL)
def test_a_terminal_end_moves_the_job_to_history(conn: Conn, outcome: str) -> None:
    worker, job = running(conn)
    assert place(conn, job) == (1, 0)
    error = None if outcome == "succeeded" else {"type": "E", "message": "m"}
    result = {"answer": 42} if outcome == "succeeded" else None
    assert end(conn, worker, End(job, 1, outcome, result=result, error=error)) == 1
    assert place(conn, job) == (0, 1)
    kept = get(conn, job)
    # Without a cancel request nothing is cancelled: a body that raises so has failed.
    assert kept["status"] == {"cancelled": "failed"}.get(outcome, outcome)
    assert (kept["result"], kept["error"]) == (result, error)
    assert violations(conn) == []


@pytest.mark.parametrize("outcome", BACK)
def test_an_end_that_goes_back_leaves_the_job_in_jobs(conn: Conn, outcome: str) -> None:
    worker, job = running(conn)
    assert end(conn, worker, End(job, 1, outcome)) == 1
    assert place(conn, job) == (1, 0)
    assert get(conn, job)["status"] == "pending"
    assert violations(conn) == []


def test_an_end_carries_every_column_to_history(conn: Conn) -> None:
    worker = register(conn, level=3)
    job = enqueue(
        conn,
        payload={"n": 1},
        deadline_in=3600,
        required_worker_schema=2,
        tags=["a"],
        meta={"trace": "x"},
        unique_key="k",
        unique_scope="s",
        effect_class="side_effecting",
        max_attempts=9,
    )
    for outcome in BACK:
        make_due(conn, job)
        epoch = claim_one(conn, worker)["claim_epoch"]
        assert end(conn, worker, End(job, epoch, outcome)) == 1
    make_due(conn, job)
    conn.execute("update taskq.jobs set pruned_attempts = 0 where id = %s", (job,))
    claim_one(conn, worker)
    conn.execute("update taskq.jobs set effect_started_at = taskq.now() where id = %s", (job,))
    assert cancel(conn, job) == "requested"
    before = get(conn, job)
    assert end(conn, worker, End(job, 5, result=[1])) == 1
    after = get(conn, job)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"status", "result", "finished_at"}
    assert violations(conn) == []


def test_a_finished_job_is_not_born_again_while_history_has_it(conn: Conn) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "retry"))
    claim_one(conn, worker)
    end(conn, worker, End(job, 2, "failed"))
    copy = (
        "insert into taskq.jobs (id, run_at, created_at, claim_epoch, generation, max_attempts, queue, task, policy_id,"
        " payload) select id, run_at, created_at, claim_epoch, 1, max_attempts, queue, task, policy_id, payload"
        " from taskq.history where id = %s"
    )
    assert refused(conn, copy, job) == "WF003"
    assert place(conn, job) == (0, 1)


def test_reopening_moves_the_job_back(conn: Conn) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "failed"))
    assert retry(conn, job) == "reopened"
    assert place(conn, job) == (1, 0)
    assert violations(conn) == []


def test_cancelling_a_waiting_job_moves_it(conn: Conn) -> None:
    job = enqueue(conn)
    assert cancel(conn, job) == "cancelled"
    assert place(conn, job) == (0, 1)
    assert get(conn, job)["worker_id"] is None
    assert violations(conn) == []

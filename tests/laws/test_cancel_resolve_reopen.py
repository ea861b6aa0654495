"""What operators do to a job: cancel, resolve and retry, each answering with what it found and leaving its audit."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sql import (
    TERMINAL,
    End,
    attempts,
    cancel,
    claim,
    claim_one,
    control_clock,
    detail,
    dump,
    end,
    enqueue,
    get,
    lose,
    one,
    refused,
    register,
    resolve,
    retry,
    rows,
    running,
    settle,
    shift_clock,
    unknown,
    violations,
)

Conn = psycopg.Connection[Any]


def audited(conn: Conn, job: UUID) -> list[str]:
    return [
        row["action"] for row in rows(conn, "select action from taskq.audit where subject = %s order by id", str(job))
    ]


def assert_refused(conn: Conn, call: Any, sqlstate: str) -> psycopg.Error:
    before = dump(conn)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        call()
    assert caught.value.sqlstate == sqlstate
    assert dump(conn) == before
    return caught.value


# Cancel ---------------------------------------------------------------------------------------------------------------


def test_cancel_answers_with_what_it_found(conn: Conn) -> None:
    assert cancel(conn, enqueue(conn)) == "cancelled"
    held = enqueue(conn)
    conn.execute("update taskq.jobs set status = 'held', held_reason = 'signal' where id = %s", (held,))
    assert cancel(conn, held) == "cancelled"
    worker, job = running(conn)
    assert cancel(conn, job) == "requested"
    assert cancel(conn, job) == "requested"
    end(conn, worker, End(job, 1))
    for call in range(2):
        before = dump(conn)
        assert cancel(conn, job) == "finished", call
        assert dump(conn) == before
    _, lost = unknown(conn)
    before = dump(conn)
    assert cancel(conn, lost) == "unknown"
    assert cancel(conn, uuid4()) == "not_found"
    assert dump(conn) == before
    assert audited(conn, job) == ["cancel", "cancel"]
    assert violations(conn) == []


def test_a_cancel_request_keeps_the_time_of_the_first(conn: Conn) -> None:
    control_clock(conn)
    _, job = running(conn)
    cancel(conn, job)
    first = get(conn, job)["cancel_requested_at"]
    assert first is not None
    shift_clock(conn, "1 min")
    cancel(conn, job)
    assert get(conn, job)["cancel_requested_at"] == first


@pytest.mark.parametrize(
    ("outcome", "final"),
    [
        ("succeeded", "succeeded"),
        ("failed", "cancelled"),
        ("cancelled", "cancelled"),
        ("retry", "cancelled"),
        ("retry_after", "cancelled"),
        ("snooze", "cancelled"),
        ("release", "cancelled"),
    ],
)
def test_after_a_cancel_request_a_body_that_returns_has_succeeded_and_anything_else_is_cancelled(
    conn: Conn, outcome: str, final: str
) -> None:
    worker, job = running(conn, max_attempts=9)
    cancel(conn, job)
    assert end(conn, worker, End(job, 1, outcome)) == 1
    found = get(conn, job)
    assert found["status"] == final
    assert attempts(conn, job) == [(1, final)]
    assert (found["error"] or {}).get("type") == (None if final == "succeeded" else "Cancelled")
    assert violations(conn) == []


def test_an_attempt_after_a_clean_retry_starts_without_cancel_marks(conn: Conn) -> None:
    worker, job = running(conn)
    cancel(conn, job)
    end(conn, worker, End(job, 1, "retry"))
    assert get(conn, job)["status"] == "cancelled"
    assert retry(conn, job) == "reopened"
    claim_one(conn, worker)
    assert get(conn, job)["cancel_requested_at"] is None
    assert cancel(conn, job) == "requested"
    end(conn, worker, End(job, 2, "retry"))
    assert get(conn, job)["status"] == "cancelled"
    assert violations(conn) == []


# Resolve --------------------------------------------------------------------------------------------------------------


def started_effect(conn: Conn) -> tuple[UUID, UUID]:
    worker, job = running(conn, effect_class="side_effecting")
    conn.execute("update taskq.jobs set effect_started_at = taskq.now() where id = %s", (job,))
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    return worker, job


def test_an_effect_that_happened_has_succeeded(conn: Conn) -> None:
    _, job = started_effect(conn)
    assert resolve(conn, job, happened=True, result=[1]) == "succeeded"
    assert (get(conn, job)["status"], get(conn, job)["result"]) == ("succeeded", [1])
    assert attempts(conn, job) == [(1, "resolved")]
    assert violations(conn) == []


def test_an_effect_that_did_not_happen_goes_on_unless_it_was_to_be_cancelled(conn: Conn) -> None:
    worker, job = started_effect(conn)
    assert resolve(conn, job, happened=False) == "pending"
    assert attempts(conn, job) == [(1, "resolved")]
    [again] = claim(conn, register(conn))
    assert (again["job_id"], again["claim_epoch"], again["attempt"], again["recoveries"]) == (job, 2, 0, 1)
    assert get(conn, job)["effect_started_at"] is None
    worker, job = unknown(conn)
    assert resolve(conn, job, happened=False) == "cancelled"
    assert get(conn, job)["status"] == "cancelled"
    assert attempts(conn, job) == [(1, "resolved")]
    assert violations(conn) == []


@pytest.mark.parametrize("happened", [True, False])
def test_an_outcome_is_resolved_once_and_only_where_it_is_unknown(conn: Conn, happened: bool) -> None:
    for make in (started_effect, unknown):
        _, job = make(conn)
        resolve(conn, job, happened)
        for again in (True, False):
            error = assert_refused(conn, lambda job=job, again=again: resolve(conn, job, again), "WF016")
            became = "succeeded" if happened else "cancelled" if make is unknown else "pending"
            assert (detail(error)["resolved_to"], detail(error)["claim_epoch"]) == (became, 1)
        assert audited(conn, job)[-1:] == ["resolve"]
        cancel(conn, job)
    _, job = running(conn)
    error = assert_refused(conn, lambda: resolve(conn, job, happened), "WF012")
    assert detail(error)["status"] == "running"
    waiting = enqueue(conn)
    assert_refused(conn, lambda: resolve(conn, waiting, happened), "WF012")
    assert_refused(conn, lambda: resolve(conn, uuid4(), happened), "WF011")


@pytest.mark.parametrize("reason", [None, "", "  "])
def test_resolving_needs_a_reason(conn: Conn, reason: str | None) -> None:
    _, job = unknown(conn)
    assert_refused(conn, lambda: resolve(conn, job, happened=True, reason=reason), "WF009")


def test_unknown_outcomes_are_listed(conn: Conn) -> None:
    worker, job = unknown(conn)
    [row] = rows(conn, "select * from taskq.unknown_outcomes")
    assert (row["job_id"], row["worker_id"], row["worker"], row["claim_epoch"]) == (job, worker, "w", 1)


# Retry ----------------------------------------------------------------------------------------------------------------


def failed(conn: Conn, **spec: Any) -> UUID:
    worker, job = running(conn, **spec)
    end(conn, worker, End(job, 1, "failed", 42, error={"type": "E", "message": "m"}))
    return job


def test_reopening_keeps_the_epoch_raises_the_generation_and_moves_the_final_attempt_to_the_ledger(conn: Conn) -> None:
    job = failed(conn, payload={"n": 1}, tags=["a"], meta={"m": 1}, priority=5, max_attempts=4, effect_class="pure")
    before = get(conn, job)
    assert retry(conn, job) == "reopened"
    after = get(conn, job)
    assert (after["status"], after["claim_epoch"], after["generation"]) == ("pending", 1, 1)
    assert (after["attempt"], after["recoveries"], after["error"], after["worker_id"]) == (0, 0, None, None)
    for name in (
        "payload",
        "tags",
        "meta",
        "priority",
        "max_attempts",
        "effect_class",
        "queue",
        "task",
        "created_at",
        "policy_id",
    ):
        assert after[name] == before[name], name
    [record] = rows(conn, "select * from taskq.ledger where job_id = %s", job)
    assert (record["claim_epoch"], record["outcome"], record["outcome_id"], record["generation"]) == (
        1,
        "failed",
        42,
        0,
    )
    assert (record["ended_at"], record["claimed_at"]) == (before["finished_at"], before["claimed_at"])
    assert (record["error"], record["attempt"]) == ({"type": "E", "message": "m"}, 1)
    assert audited(conn, job) == ["retry"]
    assert violations(conn) == []


def test_a_reopened_job_runs_and_ends_like_any_other(conn: Conn) -> None:
    job = failed(conn)
    worker = register(conn)
    for generation, final in enumerate(("failed", "failed", "succeeded"), 1):
        assert retry(conn, job) == "reopened"
        epoch = claim_one(conn, worker)["claim_epoch"]
        assert epoch == generation + 1
        end(conn, worker, End(job, epoch, final))
        assert get(conn, job)["generation"] == generation
        assert violations(conn) == []
    assert [outcome for _, outcome in attempts(conn, job)] == ["failed", "failed", "failed", "succeeded"]


def test_a_job_cancelled_before_it_started_is_reopened_without_an_attempt(conn: Conn) -> None:
    job = enqueue(conn)
    cancel(conn, job)
    assert retry(conn, job) == "reopened"
    assert attempts(conn, job) == []
    assert get(conn, job)["claim_epoch"] == 0
    assert violations(conn) == []


def test_retrying_a_waiting_job_makes_it_due(conn: Conn) -> None:
    job = enqueue(conn, run_in=3600)
    assert claim(conn, register(conn)) == []
    assert retry(conn, job) == "due"
    assert [row["job_id"] for row in claim(conn, register(conn))] == [job]


def test_only_failed_and_cancelled_jobs_are_reopened(conn: Conn) -> None:
    for state in ("running", "unknown", "succeeded"):
        worker, job = unknown(conn) if state == "unknown" else running(conn)
        if state == "succeeded":
            end(conn, worker, End(job, 1))
        error = assert_refused(conn, lambda job=job: retry(conn, job), "WF012")
        assert detail(error)["status"] == state
    assert_refused(conn, lambda: retry(conn, uuid4()), "WF011")


def test_a_deadline_that_has_passed_is_dropped_by_reopening(conn: Conn) -> None:
    control_clock(conn)
    passed, kept = failed(conn, deadline_in=10), failed(conn, deadline_in=1000)
    shift_clock(conn, "20 s")
    retry(conn, passed)
    retry(conn, kept)
    assert get(conn, passed)["deadline"] is None
    assert get(conn, kept)["deadline"] is not None
    assert one(conn, "select count(*) from taskq.sweep()") == 0


@pytest.mark.parametrize("final", TERMINAL)
def test_every_operator_action_is_refused_or_noted(conn: Conn, final: str) -> None:
    worker, job = running(conn)
    cancel(conn, job)
    end(conn, worker, End(job, 1, final))
    if final == "succeeded":
        assert_refused(conn, lambda: retry(conn, job), "WF012")
        assert audited(conn, job) == ["cancel"]
    else:
        retry(conn, job)
        assert audited(conn, job) == ["cancel", "retry"]


def test_resolving_needs_to_know_whether_it_happened(conn: Conn) -> None:
    # Taken for "did not happen", it would run again.
    _, job = unknown(conn)
    assert refused(conn, "select taskq.resolve(%s, null, null, 'looked')", job) == "WF009"
    assert get(conn, job)["status"] == "unknown"

"""Slim jobs: a told success goes into history without payload and result; whatever may need them keeps both."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import effect, jobs_of
from sql import End, claim_one, end, enqueue, one, policy, register, resolve, retry, rows, running, unknown, violations

Conn = psycopg.Connection[Any]
ARGS = {"n": 1}


@pytest.fixture
def slim(conn: Conn) -> str:
    return policy(conn, "slim", history="slim")


def kept(conn: Conn, job: UUID) -> tuple[object, object]:
    [row] = rows(conn, "select payload, result from taskq.history where id = %s", job)
    return row["payload"], row["result"]


def ended(conn: Conn, policy_id: str, outcome: str = "succeeded") -> UUID:
    worker, job = running(conn, policy_id=policy_id, payload=ARGS)
    error = None if outcome == "succeeded" else {"type": "E", "message": "m"}
    assert end(conn, worker, End(job, 1, outcome, result=7, error=error)) == 1
    return job


def test_a_success_goes_without_payload_and_result(conn: Conn, slim: str) -> None:
    assert kept(conn, ended(conn, slim)) == (None, None)
    assert kept(conn, ended(conn, "p")) == (ARGS, 7)
    assert violations(conn) == []


def test_what_did_not_succeed_keeps_its_payload_and_can_be_reopened(conn: Conn, slim: str) -> None:
    job = ended(conn, slim, "failed")
    assert kept(conn, job) == (ARGS, None)
    assert retry(conn, job) == "reopened"
    assert one(conn, "select payload from taskq.jobs where id = %s", job) == ARGS
    worker = register(conn)
    assert claim_one(conn, worker)["claim_epoch"] == 2
    assert end(conn, worker, End(job, 2, result=8)) == 1
    # Somebody had to look at this one: its record stays whole.
    assert kept(conn, job) == (ARGS, 8)
    assert violations(conn) == []


def test_a_decided_outcome_keeps_what_was_decided(conn: Conn, slim: str) -> None:
    _, job = unknown(conn, policy_id=slim, payload=ARGS)
    assert resolve(conn, job, True, result=9) == "succeeded"
    assert kept(conn, job) == (ARGS, 9)


def test_one_that_promises_effects_keeps_both_and_so_do_their_jobs(conn: Conn, slim: str) -> None:
    told = effect("told", on=("succeeded",), policy_id=slim, payload={"n": {"arg": "n"}, "got": {"of": "result"}})
    policy(conn, "promises", history="slim", effects=[told])
    job = ended(conn, "promises")
    assert kept(conn, job) == (ARGS, 7)
    [made] = jobs_of(conn, job)
    assert made["payload"] == {"n": 1, "got": 7}
    assert one(conn, "select slim from taskq.jobs where id = %s", made["id"]) is None
    assert violations(conn) == []


@pytest.mark.parametrize("change", ["status = 'failed', outcome = 'failed'", "result = '1'", "has_effects = true"])
def test_the_table_refuses_an_end_without_a_payload_that_is_needed(conn: Conn, slim: str, change: str) -> None:
    job = ended(conn, slim)
    conn.execute("alter table taskq.history disable trigger history_append_only")
    with pytest.raises(psycopg.errors.CheckViolation, match="history_payload"):
        conn.execute(f"update taskq.history set {change} where id = %s", (job,))


def test_keys_answer_as_ever(conn: Conn, slim: str) -> None:
    worker, job = running(conn, policy_id=slim, payload=ARGS, idempotency_key="i", unique_key="u")
    assert end(conn, worker, End(job)) == 1
    assert enqueue(conn, policy_id=slim, payload=ARGS, idempotency_key="i") == job
    assert enqueue(conn, policy_id=slim, payload=ARGS, unique_key="u") != job
    assert violations(conn) == []

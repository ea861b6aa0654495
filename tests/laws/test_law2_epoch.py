"""Law 2: the claim epoch rises by exactly one with every claim, and survives reopening; for any role, by trigger."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sql import End, claim_one, detail, end, enqueue, get, make_due, refused, register, retry, running, violations

Conn = psycopg.Connection[Any]

CLAIM = (
    "update taskq.jobs set status = 'running', claimed_by = %s, claimed_at = now(), claim_epoch = claim_epoch + {}"
    " where id = %s"
)


@pytest.mark.parametrize("step", [-1, 0, 2])
def test_a_claim_by_hand_must_raise_the_epoch_by_one(conn: Conn, step: int) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "release"))
    assert refused(conn, CLAIM.format(step), worker, job) == "WF002"
    assert refused(conn, CLAIM.format(1), worker, job) == ""


@pytest.mark.parametrize("step", [-1, 1])
@pytest.mark.parametrize("where", ["pending", "running"])
def test_the_epoch_moves_with_nothing_but_a_claim(conn: Conn, step: int, where: str) -> None:
    worker, job = running(conn)
    if where == "pending":
        end(conn, worker, End(job, 1, "release"))
    assert refused(conn, "update taskq.jobs set claim_epoch = claim_epoch + %s where id = %s", step, job) == "WF002"
    back = (
        "update taskq.jobs set status = 'pending', claimed_by = null, claimed_at = null,"
        " claim_epoch = claim_epoch + %s where id = %s"
    )
    assert refused(conn, back, step, job) == "WF002"


def test_a_refusal_names_the_job_and_both_epochs(conn: Conn) -> None:
    _, job = running(conn)
    with pytest.raises(psycopg.Error, match="claim epoch must advance") as caught:
        conn.execute("update taskq.jobs set claim_epoch = 7 where id = %s", (job,))
    assert caught.value.sqlstate == "WF002"
    found = detail(caught.value)
    assert found == {"job_id": str(job), "from": "running", "to": "running", "old_epoch": 1, "new_epoch": 7}
    assert caught.value.diag.message_hint


def test_every_claim_raises_the_epoch_whatever_ended_the_last_attempt(conn: Conn) -> None:
    worker = register(conn)
    job = enqueue(conn, max_attempts=9)
    for n, outcome in enumerate(["retry", "retry_after", "snooze", "release", "failed"], 1):
        make_due(conn, job)
        claimed = claim_one(conn, worker)
        assert (claimed["job_id"], claimed["claim_epoch"]) == (job, n)
        assert end(conn, worker, End(job, n, outcome)) == 1
    assert retry(conn, job) == "reopened"
    assert get(conn, job)["claim_epoch"] == 5
    assert claim_one(conn, worker)["claim_epoch"] == 6
    assert violations(conn) == []


def test_a_job_is_born_with_epoch_zero(conn: Conn) -> None:
    enqueue(conn)
    born = (
        "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload, claim_epoch,"
        " generation, pruned_attempts) values (now(), now(), 1, 'q', 't', 'p', '{}', %s, %s, %s)"
    )
    assert refused(conn, born, 0, 0, 0) == ""
    assert refused(conn, born, 1, 0, 0) == "WF003"
    assert refused(conn, born, 1, 0, 1) == "WF003"
    # One of a later generation must bring its record: none of its attempts is in the ledger or known to be pruned.
    assert refused(conn, born, 1, 1, 0) == "WF003"
    assert refused(conn, born, 1, 1, 1) == ""

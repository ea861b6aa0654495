"""Hooks of side-effecting steps in the database: which is asked, who takes it away, and what its answer decides."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb
from sql import (
    Conn,
    attempts,
    cancel,
    claim_one,
    dump,
    enqueue,
    get,
    lose,
    make_due,
    one,
    policy,
    refused,
    register,
    resolve,
    rows,
    settle,
    status,
    violations,
)

BODY, PAY, MAIL = "t:reconcile", "t:reconcile:pay", "t:reconcile:mail"
PUBLISH = "select taskq.publish_task(%s, 't', 'q', 5, 3, 'idempotent', 'p', null, %s, %s)"
HOURLY = {"kind": "constant", "base": 3600, "cap": 3600, "jitter": 0}


def publish(conn: Conn, *steps: str, body: str | None = BODY, worker: UUID | None = None) -> None:
    """What a worker publishes at boot whose task t has hooks for these steps, and one for its body."""
    policy(conn, "h")
    for task in (BODY, PAY, MAIL):
        conn.execute("select taskq.publish_task(null, %s, 'hooks', 7, 20, 'pure', 'h')", (task,))
    conn.execute(PUBLISH, (worker, body, Jsonb({step: f"{BODY}:{step}" for step in steps})))


def start(conn: Conn, job: UUID, name: str = "pay", occurrence: int = 1) -> str:
    query = "select s.answer from taskq.jobs j, taskq.start_step(j.claimed_by, j.id, j.claim_epoch, %s, %s) s"
    answer: str = one(conn, f"{query} where j.id = %s", name, occurrence, job)
    return answer


def run(conn: Conn, job: UUID) -> UUID:
    """Have a worker claim it; gives the worker."""
    worker = register(conn)
    make_due(conn, job)
    # One that was recovered twice is claimed alone.
    found = rows(conn, "select * from taskq.claim_suspect(%s, '{t}', '{q}')", worker) or [claim_one(conn, worker)]
    assert [row["job_id"] for row in found] == [job]
    return worker


def doubtful(conn: Conn, name: str = "pay", occurrence: int = 1, job: UUID | None = None, **spec: Any) -> UUID:
    """A job that is unknown for a step of it, for its worker is lost."""
    job = job or enqueue(conn, **spec)
    worker = run(conn, job)
    assert start(conn, job, name, occurrence) == "started"
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    return job


def unsure(conn: Conn) -> UUID:
    """One that is unknown as a whole: it was to be cancelled when its worker was lost."""
    job = enqueue(conn)
    worker = run(conn, job)
    cancel(conn, job)
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    return job


def outcome(conn: Conn, job: UUID) -> dict[str, Any]:
    [row] = rows(conn, "select * from taskq.unknown_outcomes where job_id = %s", job)
    return row


def answer(conn: Conn, job: UUID, happened: bool, epoch: int = 1, step: str | None = "pay") -> str:
    query = "select taskq.answer_reconcile(%s, %s, %s, %s, 'asked', 'reconcile:x', %s)"
    value: str = one(conn, query, job, epoch, happened, Jsonb({"id": 7}) if happened else None, step)
    return value


def reconcile(conn: Conn, job: UUID) -> tuple[str, UUID]:
    [row] = rows(conn, "select * from taskq.reconcile(%s, 'now', 'me')", job)
    return row["answer"], row["reconcile_job"]


def hooks(conn: Conn) -> dict[str, str] | None:
    found: dict[str, str] | None = one(conn, "select reconcile_steps from taskq.task_config where task = 't'")
    return found


# Asking ---------------------------------------------------------------------------------------------------------------


def test_what_is_unknown_is_asked_about_by_its_own_hook_in_one_job(conn: Conn) -> None:
    publish(conn, "pay", "mail")
    for job, task, step in ((doubtful(conn, "mail"), MAIL, "mail"), (doubtful(conn), PAY, "pay")):
        found = outcome(conn, job)
        asking = get(conn, found["reconcile_job"])
        assert (asking["task"], asking["queue"], asking["priority"], asking["policy_id"]) == (task, "q", 7, "h")
        assert asking["payload"] == {"job_id": str(job), "claim_epoch": 1}
        assert (found["step"], found["reconcile_status"]) == (step, "pending")
        conn.execute("select taskq.request_reconcile(j) from taskq.jobs j where j.id = %s", (job,))
        assert reconcile(conn, job) == ("due", asking["id"])
    whole = unsure(conn)
    assert (get(conn, outcome(conn, whole)["reconcile_job"])["task"], outcome(conn, whole)["step"]) == (BODY, None)
    assert one(conn, "select count(*) from taskq.jobs where task like 't:%%'") == 3
    assert violations(conn) == []


def test_no_other_hook_is_asked_about_a_step_that_has_none(conn: Conn) -> None:
    publish(conn, "mail")
    job = doubtful(conn)
    assert outcome(conn, job)["reconcile_job"] is None
    assert rows(conn, "select * from taskq.reconcile_missing()") == []
    with pytest.raises(psycopg.Error, match="step pay of task t has no hook that could be asked") as caught:
        with conn.transaction():
            reconcile(conn, job)
    assert (caught.value.sqlstate, "reconcile_steps=" in (caught.value.diag.message_hint or "")) == ("WF012", True)
    assert one(conn, "select count(*) from taskq.jobs where task like 't:%%'") == 0
    assert resolve(conn, job, happened=True) == "pending"


def test_a_hook_that_comes_with_a_deploy_is_asked_about_older_steps(conn: Conn) -> None:
    publish(conn)
    before, other = doubtful(conn), doubtful(conn, "mail")
    publish(conn, "pay")
    [row] = rows(conn, "select * from taskq.reconcile_missing()")
    assert (row["job_id"], row["reconcile_job"]) == (before, outcome(conn, before)["reconcile_job"])
    assert rows(conn, "select * from taskq.reconcile_missing()") == []
    assert outcome(conn, other)["reconcile_job"] is None


@pytest.mark.parametrize(("newer", "kept"), [("live", True), ("draining", False), ("lost", False), ("has none", False)])
def test_a_worker_takes_away_no_hook_of_a_step_that_another_has(conn: Conn, newer: str, kept: bool) -> None:
    publish(conn, "pay", "mail")
    worker = register(conn, tasks=("t", MAIL) if newer == "has none" else ("t", PAY, MAIL))
    if newer != "has none":
        conn.execute("update taskq.workers set status = %s where id = %s", (newer, worker))
    # One of the release before, which knows of the one and not of the other.
    publish(conn, "mail", worker=register(conn, tasks=("t", MAIL)))
    assert hooks(conn) == ({"pay": PAY, "mail": MAIL} if kept else {"mail": MAIL})
    conn.execute("update taskq.workers set status = 'stopped'")
    publish(conn)
    assert hooks(conn) is None


# Answering ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("occurrence", [1, 2])
@pytest.mark.parametrize("happened", [True, False])
def test_an_answer_tells_of_the_step_and_the_job_goes_on(conn: Conn, happened: bool, occurrence: int) -> None:
    publish(conn, "pay")
    job = doubtful(conn, occurrence=occurrence)
    step = "pay" if occurrence == 1 else "pay #2"
    assert answer(conn, job, happened, step=step) == "pending"
    found = rows(conn, "select done, value from taskq.steps where job_id = %s", job)
    assert found == ([{"done": True, "value": {"id": 7}}] if happened else [])
    assert attempts(conn, job) == [(1, "resolved")]
    [noted] = rows(conn, "select actor, details from taskq.audit where subject = %s", str(job))
    details = {"step": step, "answer": "pending", "happened": happened, "claim_epoch": 1}
    assert noted == {"actor": "reconcile:x", "details": details}
    run(conn, job)
    assert start(conn, job, occurrence=occurrence) == ("done" if happened else "started")
    assert violations(conn) == []


def test_an_answer_decides_nothing_but_what_it_names(conn: Conn) -> None:
    publish(conn, "pay", "mail")
    job, whole = doubtful(conn, occurrence=2), unsure(conn)
    before = dump(conn)
    for asked, step in ((job, None), (job, "mail"), (job, "pay"), (whole, "pay")):
        with pytest.raises(psycopg.Error, match="and what is unknown is") as caught, conn.transaction():
            answer(conn, asked, True, step=step)
        assert (caught.value.sqlstate, dump(conn) == before) == ("WF012", True)
    assert answer(conn, whole, True, step=None) == "succeeded"


@pytest.mark.parametrize("happened", [True, False])
def test_an_answer_about_an_attempt_that_is_over_changes_nothing(conn: Conn, happened: bool) -> None:
    publish(conn, "pay")
    job = doubtful(conn)
    assert resolve(conn, job, happened=False) == "pending"
    assert refused(conn, "select taskq.answer_reconcile(%s, 1, true, '1', 'r', 'a', 'pay')", job) == "WF016"
    doubtful(conn, job=job)
    before = dump(conn)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        answer(conn, job, happened, epoch=1)
    assert (caught.value.sqlstate, dump(conn) == before) == ("WF017", True)


def test_what_did_not_happen_waits_and_is_bounded_and_what_happened_is_neither(conn: Conn) -> None:
    policy(conn, "once", max_recoveries=1, retry={"backoff": HOURLY})
    job = doubtful(conn, policy_id="once")
    assert answer(conn, job, False) == "pending"
    delay = (
        "select extract(epoch from j.run_at - l.ended_at)::int from taskq.jobs j join taskq.ledger l on l.job_id = j.id"
    )
    assert (one(conn, delay), get(conn, job)["recoveries"]) == (3600, 1)
    doubtful(conn, job=job)
    assert answer(conn, job, True, epoch=2) == "pending"
    assert (one(conn, "select run_at <= taskq.now() from taskq.jobs"), get(conn, job)["recoveries"]) == (True, 2)
    doubtful(conn, "mail", job=job)
    assert answer(conn, job, False, epoch=3, step="mail") == "failed"
    assert get(conn, job)["error"] == {
        "type": "RecoveryExhausted",
        "message": "its effect of step mail did not happen, and it has been recovered 2 times already, the limit is 1",
        "reason": "asked",
    }
    assert attempts(conn, job) == [(n, "resolved") for n in (1, 2, 3)]
    assert violations(conn) == []


def test_what_would_start_again_after_its_deadline_fails_and_what_happened_goes_on(conn: Conn) -> None:
    policy(conn, "hourly", retry={"backoff": HOURLY})
    did, did_not = (doubtful(conn, policy_id="hourly", deadline_in=1800) for _ in range(2))
    assert (answer(conn, did, True), answer(conn, did_not, False)) == ("pending", "failed")
    assert get(conn, did_not)["error"]["type"] == "DeadlineExceeded"
    assert violations(conn) == []


@pytest.mark.parametrize("happened", [True, False])
def test_after_a_cancel_request_an_answer_ends_the_job(conn: Conn, happened: bool) -> None:
    job = enqueue(conn)
    worker = run(conn, job)
    start(conn, job)
    assert cancel(conn, job) == "requested"
    lose(conn, worker)
    settle(conn)
    assert answer(conn, job, happened) == "cancelled"
    assert (status(conn, job), one(conn, "select count(*) from taskq.steps where done")) == ("cancelled", int(happened))
    assert violations(conn) == []

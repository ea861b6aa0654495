"""Side-effecting steps in the database: started once under the fence, told once, never passed over by any way out."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
from effects_kit import effect, promising
from psycopg.types.json import Jsonb
from sql import (
    NOBODY,
    OUTCOMES,
    Conn,
    End,
    Row,
    attempts,
    cancel,
    claim,
    claim_one,
    dump,
    end,
    exchange,
    get,
    lose,
    make_due,
    one,
    refused,
    register,
    resolve,
    retry,
    rows,
    running,
    settle,
    status,
    violations,
)


def start(conn: Conn, worker: UUID, job: UUID, epoch: int = 1, name: str = "pay", occurrence: int = 1) -> Row:
    [row] = rows(conn, "select * from taskq.start_step(%s, %s, %s, %s, %s)", worker, job, epoch, name, occurrence)
    return row


def tell(
    conn: Conn,
    worker: UUID,
    job: UUID,
    value: object = None,
    error: object = None,
    epoch: int = 1,
    name: str = "pay",
    at: datetime | None = None,
) -> str:
    """Record what the step gave, or how it failed; with neither, that it did not happen."""
    said = [None if each is None else Jsonb(each) for each in (value, error)]
    started = at if at is not None else one(conn, STARTED, job, name, epoch)
    query = "select taskq.end_step(%s, %s, %s, %s, 1, %s, %s, %s)"
    answer: str = one(conn, query, worker, job, epoch, name, started, *said)
    return answer


def recorded(conn: Conn, job: UUID) -> list[tuple[Any, ...]]:
    found = rows(
        conn,
        "select name, occurrence, claim_epoch, done, value, error, effect_started_at is not null from taskq.steps"
        " where job_id = %s order by 1, 2",
        job,
    )
    return [tuple(row.values()) for row in found]


STARTED = (
    "select max(effect_started_at) from taskq.steps where job_id = %s and name = %s and claim_epoch = %s and"
    " occurrence = 1"
)
UNTOLD = [("pay", 1, 1, False, None, None, True)]


def started(conn: Conn, **spec: Any) -> tuple[UUID, UUID]:
    """A job that runs, a step of which has started its effect; gives worker and job."""
    worker, job = running(conn, **spec)
    assert start(conn, worker, job)["answer"] == "started"
    return worker, job


def doubtful(conn: Conn, **spec: Any) -> tuple[UUID, UUID]:
    """The same, and its worker is lost."""
    worker, job = started(conn, **spec)
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    return worker, job


def again(conn: Conn, job: UUID) -> UUID:
    """Claim it anew."""
    worker = register(conn)
    make_due(conn, job)
    claim_one(conn, worker)
    return worker


# Starting ------------------------------------------------------------------------------------------------------------


def test_a_start_is_committed_once_under_the_fence_and_repeats_what_it_is_about(conn: Conn) -> None:
    worker, job = running(conn)
    other = register(conn)
    for fence in ((other, job, 1), (worker, job, 2), (worker, NOBODY, 1)):
        assert start(conn, *fence)["answer"] == "fenced"
    assert recorded(conn, job) == []
    first = start(conn, worker, job)
    assert first.pop("effect_started_at") == get(conn, job)["effect_started_at"] is not None
    assert first == {
        "answer": "started",
        "job_id": job,
        "claim_epoch": 1,
        "claimed_by": worker,
        "name": "pay",
        "occurrence": 1,
        "value": None,
        "error": None,
    }
    before = dump(conn)
    assert start(conn, worker, job)["answer"] == "started"
    assert dump(conn) == before
    assert recorded(conn, job) == UNTOLD
    assert violations(conn) == []


def test_what_may_not_start_says_why_and_leaves_nothing(conn: Conn) -> None:
    worker, job = started(conn)
    assert start(conn, worker, job, name="other")["answer"] == "another"
    worker, job = running(conn, effect_class="side_effecting")
    assert start(conn, worker, job)["answer"] == "class"
    worker, asked = running(conn)
    assert cancel(conn, asked) == "requested"
    assert start(conn, worker, asked)["answer"] == "cancelled"
    worker, late = running(conn)
    conn.execute("update taskq.workers set lease_expires_at = '-infinity' where id = %s", (worker,))
    assert start(conn, worker, late)["answer"] == "lease"
    assert one(conn, "select count(*) from taskq.steps where job_id = any(%s)", [job, asked, late]) == 0
    assert violations(conn) == []


def test_what_is_told_stands_and_is_given_instead_of_a_start(conn: Conn) -> None:
    worker, job = started(conn)
    assert tell(conn, register(conn), job, 7) == tell(conn, worker, job, 7, epoch=2) == "fenced"
    assert tell(conn, worker, job, {"id": 7}) == "recorded"
    assert get(conn, job)["effect_started_at"] is None
    before = dump(conn)
    assert tell(conn, worker, job, {"id": 7}) == "replay"
    assert [tell(conn, worker, job, 8), tell(conn, worker, job), tell(conn, worker, job, error={})] == ["conflict"] * 3
    assert tell(conn, worker, job, 1, name="other") == "conflict"
    found = start(conn, worker, job)
    assert (found["answer"], found["value"]) == ("done", '{"id": 7}')
    assert dump(conn) == before
    assert start(conn, worker, job, name="mail")["answer"] == "started"
    assert tell(conn, worker, job, error={"type": "Refused"}, name="mail") == "recorded"
    assert start(conn, worker, job, name="mail")["error"] == '{"type": "Refused"}'
    assert end(conn, worker, End(job)) == 1
    assert violations(conn) == []


def test_one_that_did_not_happen_may_start_again(conn: Conn) -> None:
    worker, job = started(conn)
    assert [tell(conn, worker, job), tell(conn, worker, job)] == ["recorded", "replay"]
    assert (recorded(conn, job), get(conn, job)["effect_started_at"]) == ([], None)
    assert end(conn, worker, End(job, 1, "retry")) == 1
    worker = again(conn, job)
    assert start(conn, worker, job, 2)["answer"] == "started"
    assert violations(conn) == []


def test_what_is_told_of_a_start_that_was_taken_back_says_nothing_of_the_next(conn: Conn) -> None:
    worker, job = running(conn)
    first = start(conn, worker, job)["effect_started_at"]
    assert tell(conn, worker, job) == "recorded"
    assert start(conn, worker, job)["answer"] == "started"
    before = dump(conn)
    assert tell(conn, worker, job, at=first) == "conflict", "a statement that was given up, and comes after all"
    assert dump(conn) == before


def test_a_started_step_is_not_recorded_as_an_ordinary_one(conn: Conn) -> None:
    worker, job = started(conn)
    query = (
        "select answer from taskq.record_steps(array[%s], array[%s], array[1]::bigint[], '{pay}', '{1}', '{1}', true)"
    )
    assert one(conn, query, worker, job) == "conflict"
    assert recorded(conn, job) == UNTOLD


# Ways out ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [*OUTCOMES, "suspend", "unknown"])
@pytest.mark.parametrize("asked", [False, True], ids=["", "cancel-requested"])
def test_however_its_attempt_ends_the_job_is_unknown(conn: Conn, outcome: str, asked: bool) -> None:
    worker, job = started(conn, effect_class="pure" if outcome == "retry" else "idempotent")
    neighbour = running(conn, worker)[1]
    if asked:
        cancel(conn, job)
    assert exchange(conn, worker, [End(job, 1, outcome), End(neighbour)]) == []
    assert (status(conn, job), status(conn, neighbour)) == ("unknown", "succeeded")
    assert recorded(conn, job) == UNTOLD
    [(code, step)] = [
        tuple(r.values())
        for r in rows(
            conn, "select error ->> 'step', step from taskq.unknown_outcomes o join taskq.unknowns u using (job_id)"
        )
    ]
    assert (code, step) == ("pay", "pay")
    before = dump(conn)
    assert exchange(conn, worker, [End(job, 1, outcome)]) == []
    assert dump(conn) == before, "told again, or late, nothing is passed over"
    assert violations(conn) == []


@pytest.mark.parametrize("effect_class", ["pure", "idempotent"])
@pytest.mark.parametrize("asked", [False, True], ids=["", "cancel-requested"])
def test_of_a_lost_worker_it_is_unknown_whatever_the_class_of_the_job(
    conn: Conn, effect_class: str, asked: bool
) -> None:
    worker, job = started(conn, effect_class=effect_class)
    if asked:
        cancel(conn, job)
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    assert cancel(conn, job) == "unknown"
    assert recorded(conn, job) == UNTOLD
    assert violations(conn) == []


def test_told_as_unknown_for_a_step_that_the_row_knows_better_it_goes_back(conn: Conn) -> None:
    worker, job = running(conn)
    assert end(conn, worker, End(job, 1, "unknown", error={"step": "pay", "reason": "shutdown"})) == 1
    assert (status(conn, job), attempts(conn, job)) == ("pending", [(1, "released")])
    assert violations(conn) == []


def test_a_bodys_own_transaction_does_not_end_the_job_over_it(conn: Conn) -> None:
    worker, job = started(conn)
    query = "select taskq.end_inside(%s, %s, 1, 7, 'null', pg_current_xact_id()::text)"
    with conn.transaction(force_rollback=True):
        assert one(conn, query, worker, job) == "step"
    tell(conn, worker, job, 1)
    assert one(conn, query, worker, job) == "ended"


@pytest.mark.parametrize(
    "write",
    [
        "update taskq.jobs set status = 'pending', claimed_by = null, claimed_at = null where id = %s",
        "update taskq.jobs set status = 'held', held_reason = 'signal', claimed_by = null, claimed_at = null"
        " where id = %s",
        "delete from taskq.jobs where id = %s",
    ],
)
def test_the_database_itself_refuses_to_pass_over_it(conn: Conn, write: str) -> None:
    worker, job = started(conn)
    assert refused(conn, write, job) == "WF003"
    tell(conn, worker, job, 1)
    assert refused(conn, write, job) == ""


def test_one_that_an_earlier_attempt_left_untold_is_never_started(conn: Conn) -> None:
    """Nothing leads there but a row that was changed by hand; and what is not known is not called."""
    worker, job = started(conn)
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        conn.execute("update taskq.jobs set effect_started_at = null where id = %s", (job,))
    end(conn, worker, End(job, 1, "retry"))
    assert violations(conn) == [("step_untold", job)]
    worker = again(conn, job)
    assert start(conn, worker, job, 2)["answer"] == "untold"
    end(conn, worker, End(job, 2, "retry"))
    assert status(conn, job) == "unknown"
    assert violations(conn) == []


# Deciding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("happened", [True, False])
def test_what_somebody_decides_is_about_the_step_and_the_job_goes_on(conn: Conn, happened: bool) -> None:
    _, job = doubtful(conn)
    assert resolve(conn, job, happened, {"id": 7} if happened else None) == "pending"
    assert attempts(conn, job) == [(1, "resolved")]
    [audit] = rows(conn, "select details from taskq.audit where action = 'resolve' and subject = %s", str(job))
    assert audit["details"] == {"step": "pay", "answer": "pending", "happened": happened, "claim_epoch": 1}
    assert recorded(conn, job) == ([("pay", 1, 1, True, {"id": 7}, None, True)] if happened else [])
    assert refused(conn, "select taskq.resolve(%s, true, '1', 'again')", job) == "WF016"
    worker = again(conn, job)
    assert start(conn, worker, job, 2)["answer"] == ("done" if happened else "started")
    if not happened:
        assert tell(conn, worker, job, 8, epoch=2) == "recorded"
    assert end(conn, worker, End(job, 2)) == 1
    assert get(conn, job)["recoveries"] == 1
    assert violations(conn) == []


@pytest.mark.parametrize("happened", [True, False])
def test_after_a_cancel_request_the_job_does_not_go_on(conn: Conn, happened: bool) -> None:
    worker, job = started(conn)
    cancel(conn, job)
    lose(conn, worker)
    settle(conn)
    assert resolve(conn, job, happened) == "cancelled"
    assert [row[3] for row in recorded(conn, job)] == ([True] if happened else [])
    assert violations(conn) == []


@pytest.mark.parametrize("told", [{"value": 7}, {"error": {"type": "Refused"}}, {}])
def test_a_worker_that_tells_late_is_heard_as_long_as_nobody_has_decided(conn: Conn, told: dict[str, Any]) -> None:
    worker, job = doubtful(conn)
    assert tell(conn, register(conn), job, **told) == "fenced"
    assert tell(conn, worker, job, **told) == "late"
    assert (status(conn, job), attempts(conn, job)) == ("pending", [(1, "resolved")])
    assert [(row[4], row[5]) for row in recorded(conn, job)] == (
        [(told.get("value"), told.get("error"))] if told else []
    )
    before = dump(conn)
    assert tell(conn, worker, job, **told) == "fenced"
    assert end(conn, worker, End(job)) == 0
    assert dump(conn) == before
    assert start(conn, again(conn, job), job, 2)["answer"] == ("done" if told else "started")
    assert violations(conn) == []


def test_a_reopened_job_keeps_what_had_happened_and_calls_anew_what_had_failed(conn: Conn) -> None:
    worker, job = started(conn)
    tell(conn, worker, job, 7)
    start(conn, worker, job, name="mail")
    tell(conn, worker, job, error={"type": "Refused"}, name="mail")
    end(conn, worker, End(job, 1, "failed"))
    assert retry(conn, job) == "reopened"
    assert violations(conn) == []
    worker = again(conn, job)
    assert (start(conn, worker, job, 2)["answer"], start(conn, worker, job, 2)["value"]) == ("done", "7")
    assert start(conn, worker, job, 2, name="mail")["answer"] == "started"
    tell(conn, worker, job, 8, epoch=2, name="mail")
    end(conn, worker, End(job, 2, "failed"))
    assert retry(conn, job) == "reopened"
    assert start(conn, again(conn, job), job, 3, name="mail")["value"] == "8"
    assert violations(conn) == []


def test_one_that_an_effect_has_undone_is_done_anew(conn: Conn) -> None:
    worker, job = started(conn, **promising(conn, effect("refund", ["failed"], undoes=True, task="r")))
    tell(conn, worker, job, 7)
    end(conn, worker, End(job, 1, "failed"))
    [refund] = claim(conn, worker, tasks=["r"])
    end(conn, worker, End(refund["job_id"]))
    assert retry(conn, job) == "reopened"
    assert start(conn, again(conn, job), job, 2)["answer"] == "started"


def test_one_that_tells_after_the_decision_changes_nothing(conn: Conn) -> None:
    worker, job = doubtful(conn)
    resolve(conn, job, happened=False)
    other = again(conn, job)
    assert start(conn, other, job, 2)["answer"] == "started"
    before = dump(conn)
    assert tell(conn, worker, job, 7) == "fenced"
    assert dump(conn) == before

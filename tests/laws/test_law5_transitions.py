"""Law 5: only the listed transitions exist. Refused by trigger, for any role."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from sql import (
    End,
    attempts,
    claim,
    control_clock,
    detail,
    end,
    enqueue,
    get,
    make_due,
    one,
    refused,
    register,
    running,
    shift_clock,
    stop_clock,
    unknown,
    violations,
)

Conn = psycopg.Connection[Any]

STATES = ("pending", "held", "running", "unknown")
LISTED = {
    ("pending", "running"),
    ("pending", "held"),
    ("held", "pending"),
    ("running", "pending"),
    ("running", "held"),
    ("running", "unknown"),
    ("unknown", "pending"),
}


def job_in(conn: Conn, state: str) -> tuple[UUID, UUID]:
    if state == "unknown":
        return unknown(conn)
    worker, job = running(conn)
    if state != "running":
        end(conn, worker, End(job, 1, "release"))
    if state == "held":
        conn.execute("update taskq.jobs set status = 'held', held_reason = 'signal' where id = %s", (job,))
    return worker, job


def to_state(state: str, old: str) -> str:
    """An update as plausible as can be: all columns fit the new status."""
    claimed = state in ("running", "unknown")
    was_claimed = old in ("running", "unknown")
    sets = ["status = '" + state + "'", "held_reason = " + ("'signal'" if state == "held" else "null")]
    if claimed and not was_claimed:
        sets += ["claimed_by = (select id from taskq.workers limit 1)", "claimed_at = taskq.now()"]
    if not claimed:
        sets += ["claimed_by = null", "claimed_at = null"]
    if (old, state) == ("pending", "running"):
        sets.append("claim_epoch = claim_epoch + 1")
    return "update taskq.jobs set " + ", ".join(sets) + " where id = %s"


@pytest.mark.parametrize("old", STATES)
@pytest.mark.parametrize("new", STATES)
def test_an_update_by_hand_makes_only_listed_transitions(conn: Conn, old: str, new: str) -> None:
    if old == new:
        return
    _, job = job_in(conn, old)
    assert refused(conn, to_state(new, old), job) == ("" if (old, new) in LISTED else "WF003")


@pytest.mark.parametrize("old", STATES)
@pytest.mark.parametrize("new", ["succeeded", "failed", "cancelled", "paused", ""])
def test_no_job_finishes_or_gets_an_unheard_of_status_in_place(conn: Conn, old: str, new: str) -> None:
    _, job = job_in(conn, old)
    assert refused(conn, "update taskq.jobs set status = %s where id = %s", new, job) == "WF003"


@pytest.mark.parametrize("state", ["running", "unknown"])
@pytest.mark.parametrize(
    ("key", "reason", "sqlstate"), [("k", "ordering", ""), ("k", "paused", "WF003"), (None, "ordering", "WF003")]
)
def test_an_attempt_ends_held_only_in_the_line_of_an_ordering_key_or_for_a_signal(
    conn: Conn, state: str, key: str | None, reason: str, sqlstate: str
) -> None:
    _, job = job_in(conn, state)
    update = (
        "update taskq.jobs set status = 'held', held_reason = %s, ordering_key = %s, claimed_by = null,"
        " claimed_at = null where id = %s"
    )
    assert refused(conn, update, reason, key, job) == sqlstate
    assert refused(conn, update, "signal", key, job) == ("" if state == "running" else "WF003")


@pytest.mark.parametrize("state", ["running", "unknown"])
def test_a_claim_changes_hands_only_through_pending(conn: Conn, state: str) -> None:
    _, job = job_in(conn, state)
    other = register(conn)
    assert refused(conn, "update taskq.jobs set claimed_by = %s where id = %s", other, job) == "WF003"
    # Taking the owner away alone leaves a running job without one.
    assert refused(conn, "update taskq.jobs set claimed_by = null where id = %s", job) == "23514"


@pytest.mark.parametrize("state", ["pending", "held"])
def test_a_waiting_job_has_no_owner(conn: Conn, state: str) -> None:
    worker, job = job_in(conn, state)
    update = "update taskq.jobs set claimed_by = %s, claimed_at = taskq.now() where id = %s"
    assert refused(conn, update, worker, job) == "23514"
    assert refused(conn, "update taskq.jobs set claimed_at = taskq.now() where id = %s", job) == "23514"


def test_a_refusal_names_the_job_and_the_transition(conn: Conn) -> None:
    _, job = job_in(conn, "pending")
    with pytest.raises(psycopg.Error, match="does not exist") as caught:
        conn.execute("update taskq.jobs set status = 'succeeded' where id = %s", (job,))
    found = detail(caught.value)
    assert (found["job_id"], found["from"], found["to"]) == (str(job), "pending", "succeeded")


BORN = (
    "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload, {0})"
    " values (now(), now(), 1, 'q', 't', 'p', '{{}}', {1})"
)


@pytest.mark.parametrize(
    ("columns", "values", "sqlstate"),
    [
        ("status", "'pending'", ""),
        ("status, held_reason", "'held', 'ordering'", ""),
        ("status, held_reason", "'held', 'boredom'", "23514"),
        ("status, claimed_by, claimed_at, claim_epoch", "'running', taskq.new_id(), now(), 1", "WF003"),
        ("status, claimed_by, claimed_at, claim_epoch", "'unknown', taskq.new_id(), now(), 1", "WF003"),
        ("status", "'succeeded'", "WF003"),
        ("claimed_by", "taskq.new_id()", "WF003"),
        ("attempt", "1", "WF003"),
        ("recoveries", "1", "WF003"),
        ("retry_afters", "1", "WF003"),
        ("snoozes", "1", "WF003"),
        ("releases", "1", "WF003"),
        ("recoveries", "-1", "23514"),
        ("priority", "10", "23514"),
        ("priority", "-1", "23514"),
        ("effect_class", "'harmless'", "23514"),
        ("unique_key", "'k'", "23514"),
        ("unique_scope", "'s'", "23514"),
    ],
)
def test_a_job_is_born_waiting_unclaimed_and_fresh(conn: Conn, columns: str, values: str, sqlstate: str) -> None:
    assert refused(conn, BORN.format(columns, values)) == sqlstate


@pytest.mark.parametrize("payload", ["[]", "1", "null", '"x"'])
def test_a_payload_is_an_object(conn: Conn, payload: str) -> None:
    insert = (
        "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload)"
        " values (now(), now(), 1, 'q', 't', 'p', %s::jsonb)"
    )
    assert refused(conn, insert, payload) == "23514"
    assert refused(conn, insert, "{}") == ""


def test_a_job_does_not_succeed_without_an_attempt(conn: Conn) -> None:
    job = enqueue(conn)
    finish = "select taskq.finish(j, %s, null, null, null) from taskq.jobs j where id = %s"
    assert refused(conn, finish, "succeeded", job) == "WF003"
    assert refused(conn, finish, "pending", job) == "23514"
    assert refused(conn, finish, "cancelled", job) == ""
    assert refused(conn, finish, "failed", job) == ""


# Deadlines ------------------------------------------------------------------------------------------------------------


def test_a_job_past_its_deadline_is_not_claimed_and_swept(conn: Conn) -> None:
    control_clock(conn)
    worker = register(conn, lease=3600)
    late = enqueue(conn, deadline_in=10)
    held = enqueue(conn, deadline_in=10)
    conn.execute("update taskq.jobs set status = 'held', held_reason = 'signal' where id = %s", (held,))
    later = enqueue(conn, deadline_in=100)
    assert one(conn, "select count(*) from taskq.sweep()") == 0
    shift_clock(conn, "10 s")
    assert [row["job_id"] for row in claim(conn, worker)] == [later]
    assert one(conn, "select count(*) from taskq.sweep()") == 2
    for job in (late, held):
        found = get(conn, job)
        assert (found["status"], found["error"]["type"], found["claim_epoch"]) == ("failed", "DeadlineExceeded", 0)
        assert attempts(conn, job) == []
    # A running one is let finish: the deadline is about starting.
    shift_clock(conn, "100 s")
    assert one(conn, "select count(*) from taskq.sweep()") == 0
    assert end(conn, worker, End(later, 1, "succeeded")) == 1
    assert violations(conn) == []


@pytest.mark.parametrize(
    ("outcome", "recorded", "counters"),
    [("retry", "failed", (1, 0, 0)), ("retry_after", "retry_after", (0, 1, 0)), ("snooze", "snoozed", (0, 0, 1))],
)
def test_a_wait_that_would_pass_the_deadline_ends_the_job(
    conn: Conn, outcome: str, recorded: str, counters: tuple[int, ...]
) -> None:
    control_clock(conn)
    stop_clock(conn)
    worker, job = running(conn, deadline_in=10)
    assert end(conn, worker, End(job, 1, outcome, error={"type": "E"}, delay=10.5)) == 1
    found = get(conn, job)
    assert (found["status"], found["error"]["type"]) == ("failed", "DeadlineExceeded")
    assert found["error"]["cause"] == {"type": "E"}
    assert tuple(found[name] for name in ("attempt", "retry_afters", "snoozes")) == counters
    assert attempts(conn, job) == [(1, recorded)]
    # Up to the deadline itself it waits.
    worker, job = running(conn, deadline_in=10)
    assert end(conn, worker, End(job, 1, outcome, delay=10)) == 1
    assert get(conn, job)["status"] == "pending"
    assert violations(conn) == []


def test_a_release_goes_back_whatever_the_deadline_and_keeps_its_place(conn: Conn) -> None:
    control_clock(conn)
    stop_clock(conn)
    worker, job = running(conn, deadline_in=10)
    before = get(conn, job)["run_at"]
    shift_clock(conn, "20 s")
    assert end(conn, worker, End(job, 1, "release")) == 1
    after = get(conn, job)
    assert (after["status"], after["run_at"]) == ("pending", before)
    assert one(conn, "select count(*) from taskq.sweep()") == 1
    assert get(conn, job)["status"] == "failed"
    assert violations(conn) == []
    # With a delay, because its body may still run for a moment, it waits that long.
    worker, job = running(conn, deadline_in=10)
    assert end(conn, worker, End(job, 1, "release", delay=30)) == 1
    assert get(conn, job)["run_at"] == one(conn, "select taskq.now() + interval '30 s'")
    assert get(conn, job)["status"] == "pending"


def test_a_retry_waits_from_the_time_of_its_end(conn: Conn) -> None:
    control_clock(conn)
    stop_clock(conn)
    worker, job = running(conn)
    shift_clock(conn, "7 s")
    end(conn, worker, End(job, 1, "retry", delay=5))
    assert get(conn, job)["run_at"] == one(conn, "select taskq.now() + interval '5 s'")
    make_due(conn, job)

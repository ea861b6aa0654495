"""Leases: what a worker's claims live by, how they are settled once it is lost or absent, and who looks after that."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from sql import (
    End,
    attempts,
    cancel,
    claim,
    claim_one,
    control_clock,
    end,
    enqueue,
    enqueue_many,
    exchange,
    get,
    lose,
    one,
    policy,
    register,
    rows,
    running,
    settle,
    shift_clock,
    stop_clock,
    violations,
)

Conn = psycopg.Connection[Any]


def mark_lost(conn: Conn) -> set[UUID]:
    return {row["id"] for row in rows(conn, "select m as id from taskq.mark_lost() m")}


def renew(conn: Conn, worker: UUID) -> list[tuple[Any, ...]]:
    found = rows(conn, "select * from taskq.renew(%s)", worker)
    return [(row["status"], row["job_id"], row["claim_epoch"], row["cancel_requested"]) for row in found]


# Declaring ------------------------------------------------------------------------------------------------------------


def test_only_a_worker_whose_lease_has_run_out_is_declared_lost(conn: Conn) -> None:
    control_clock(conn)
    stop_clock(conn)
    short, long = register(conn, lease=30), register(conn, lease=60)
    draining, stopped = register(conn, lease=30), register(conn, lease=30)
    conn.execute("select taskq.drain_worker(%s)", (draining,))
    conn.execute("select taskq.stop_worker(%s)", (stopped,))
    shift_clock(conn, "29.9 s")
    assert mark_lost(conn) == set()
    shift_clock(conn, "0.1 s")
    assert mark_lost(conn) == {short, draining}
    assert mark_lost(conn) == set()
    states = {row["id"]: row["status"] for row in rows(conn, "select id, status from taskq.workers")}
    assert states == {short: "lost", draining: "lost", long: "live", stopped: "stopped"}


def test_a_renewal_extends_the_lease_and_tells_of_the_claims(conn: Conn) -> None:
    control_clock(conn)
    worker, job = running(conn, register(conn, lease=30))
    shift_clock(conn, "20 s")
    cancel(conn, job)
    assert renew(conn, worker) == [("live", None, None, None), ("running", job, 1, True)]
    shift_clock(conn, "20 s")
    assert mark_lost(conn) == set()
    # Run out but not declared lost: nothing has been taken away yet.
    shift_clock(conn, "20 s")
    assert renew(conn, worker)[0][0] == "live"
    assert mark_lost(conn) == set()


def test_a_worker_that_was_declared_lost_cannot_renew(conn: Conn) -> None:
    worker, job = running(conn)
    lose(conn, worker)
    assert renew(conn, worker) == [("lost", None, None, None), ("running", job, 1, False)]
    assert one(conn, "select lease_expires_at < now() from taskq.workers where id = %s", worker)
    [answer] = exchange(conn, worker, (), 1)
    assert answer["kind"] == "lease"
    conn.execute("delete from taskq.workers where id = %s", (worker,))
    assert renew(conn, worker)[0][0] == "absent"


def test_a_worker_stops_only_without_claims_and_drains_until_then(conn: Conn) -> None:
    worker, job = running(conn)
    conn.execute("select taskq.drain_worker(%s)", (worker,))
    [answer] = exchange(conn, worker, (), 1)
    assert answer["kind"] == "lease"
    conn.execute("select taskq.stop_worker(%s)", (worker,))
    assert renew(conn, worker)[0][0] == "draining"
    end(conn, worker, End(job, 1))
    conn.execute("select taskq.stop_worker(%s)", (worker,))
    assert renew(conn, worker)[0][0] == "stopped"


# Settling -------------------------------------------------------------------------------------------------------------

CASES = [
    ("pure", False, False, "pending"),
    ("pure", True, False, "cancelled"),
    ("idempotent", False, False, "pending"),
    ("idempotent", True, False, "unknown"),
    ("side_effecting", False, False, "pending"),
    ("side_effecting", False, True, "unknown"),
    ("side_effecting", True, False, "cancelled"),
    ("side_effecting", True, True, "unknown"),
]


@pytest.mark.parametrize("how", ["lost", "absent", "stopped"])
@pytest.mark.parametrize(("effect", "cancelled", "started", "expected"), CASES)
def test_claims_of_a_lost_or_absent_worker_are_settled_by_effect_class(
    conn: Conn, how: str, effect: str, cancelled: bool, started: bool, expected: str
) -> None:
    worker, job = running(conn, effect_class=effect)
    if cancelled:
        cancel(conn, job)
    if started:
        conn.execute("update taskq.jobs set effect_started_at = taskq.now() where id = %s", (job,))
    if how == "lost":
        lose(conn, worker)
    elif how == "absent":
        conn.execute("delete from taskq.workers where id = %s", (worker,))
    else:
        conn.execute("update taskq.workers set status = 'stopped' where id = %s", (worker,))
    assert settle(conn) == {job: expected}
    assert settle(conn) == {}
    found = get(conn, job)
    assert found["status"] == expected
    assert found["worker_id"] == (None if expected == "pending" else worker)
    assert attempts(conn, job) == ([] if expected == "unknown" else [(1, "lost")])
    assert found["attempt"] == 0
    assert found["recoveries"] == int(expected == "pending")
    assert violations(conn) == []


def test_claims_of_live_and_draining_workers_are_left_alone(conn: Conn) -> None:
    control_clock(conn)
    worker, _ = running(conn)
    draining, _ = running(conn)
    conn.execute("select taskq.drain_worker(%s)", (draining,))
    # Also where the lease has run out: nobody has declared them lost.
    shift_clock(conn, "1 h")
    assert settle(conn) == {}


def test_settling_is_bounded_and_repeated(conn: Conn) -> None:
    worker = register(conn)
    enqueue_many(conn, 7)
    claim(conn, worker)
    lose(conn, worker)
    assert [len(settle(conn, 3)) for _ in range(4)] == [3, 3, 1, 0]
    assert violations(conn) == []


def test_a_recovered_job_is_claimed_again_at_once_in_its_place(conn: Conn) -> None:
    worker, job = running(conn)
    due = get(conn, job)["run_at"]
    lose(conn, worker)
    settle(conn)
    later = enqueue(conn)
    row = claim_one(conn, register(conn))
    assert (row["job_id"], row["claim_epoch"], row["run_at"], row["recoveries"]) == (job, 2, due, 1)
    assert get(conn, later)["status"] == "pending"


def test_workers_that_ended_long_ago_are_forgotten_unless_a_job_names_them(conn: Conn) -> None:
    control_clock(conn)
    gone, _ = register(conn), register(conn)
    conn.execute("select taskq.stop_worker(%s)", (gone,))
    worker, job = running(conn)
    cancel(conn, job)
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    shift_clock(conn, "6 days")
    assert one(conn, "select taskq.prune()") == 0
    shift_clock(conn, "2 days")
    assert one(conn, "select taskq.prune()") == 1
    assert {row["id"] for row in rows(conn, "select id from taskq.workers")} >= {worker}
    assert one(conn, "select count(*) from taskq.workers where id = %s", gone) == 0


@pytest.mark.parametrize(
    ("limit", "after_one_loss"),
    [
        (0, "failed"),
        (1, "pending"),
        (-3e9, "failed"),
        (3e9, "pending"),
        (1e300, "pending"),
        ("many", "pending"),
        ([], "pending"),
    ],
)
def test_any_policy_row_tells_a_number_of_recoveries(conn: Conn, limit: object, after_one_loss: str) -> None:
    policy(conn, "odd", max_recoveries=limit)
    worker, job = running(conn, policy_id="odd")
    lose(conn, worker)
    assert settle(conn) == {job: after_one_loss}
    assert violations(conn) == []


def refuse_to_end(conn: Conn, job: UUID) -> None:
    """A row that no function can settle: every write to it fails."""
    conn.execute(
        "create function public.refuse_it() returns trigger language plpgsql as"
        " $$ begin raise exception using errcode = '22003'; end $$"
    )
    conn.execute(
        f"create trigger refuse_it before update or delete on taskq.jobs for each row when (old.id = '{job}')"
        " execute function public.refuse_it()"
    )


def test_a_claim_that_cannot_be_settled_keeps_no_other_from_it(conn: Conn) -> None:
    worker = register(conn)
    enqueue_many(conn, 5)
    jobs = sorted(row["job_id"] for row in claim(conn, worker))
    refuse_to_end(conn, jobs[1])
    lose(conn, worker)
    assert settle(conn, 3) == {jobs[0]: "pending", jobs[1]: "error: 22003", jobs[2]: "pending"}
    left = rows(conn, "select * from taskq.settle_lost(3, %s)", [jobs[1]])
    assert [(row["job_id"], row["settled"]) for row in left] == [(jobs[3], "pending"), (jobs[4], "pending")]
    assert rows(conn, "select * from taskq.settle_lost(3, %s)", [jobs[1]]) == []
    assert get(conn, jobs[1])["status"] == "running"
    assert violations(conn) == []


@pytest.mark.parametrize("why", ["deadline = '1999-01-01'", "attempt = max_attempts"])
def test_a_job_that_cannot_be_swept_keeps_no_other_from_it(conn: Conn, why: str) -> None:
    jobs = [row["job_id"] for row in enqueue_many(conn, 3)]
    conn.execute(f"update taskq.jobs set {why}")
    refuse_to_end(conn, jobs[0])
    swept = {row["job_id"]: row["settled"] for row in rows(conn, "select * from taskq.sweep(2)")}
    assert swept == {jobs[0]: "error: 22003", jobs[1]: "failed"}
    assert [row["job_id"] for row in rows(conn, "select * from taskq.sweep(2, %s)", jobs[:1])] == [jobs[2]]
    assert get(conn, jobs[0])["status"] == "pending"


# The leader -----------------------------------------------------------------------------------------------------------

ROLE = "maintenance"


def lead(conn: Conn, worker: UUID, lease: float = 30, elapsed: float | None = None) -> tuple[bool, bool]:
    [row] = rows(conn, "select * from taskq.lead(%s, %s, %s, %s)", worker, ROLE, lease, elapsed)
    return row["is_leader"], row["quiet"]


def settled_leader(conn: Conn) -> tuple[UUID, UUID]:
    """A leader whose quiet time has passed, looking every 10 of its 30 seconds; and another worker."""
    control_clock(conn)
    stop_clock(conn)
    leader, other = register(conn, lease=30), register(conn, lease=30)
    assert lead(conn, leader) == (True, True)
    for _ in range(2):
        shift_clock(conn, "10 s")
        assert lead(conn, leader) == (True, True)
    shift_clock(conn, "10 s")
    assert lead(conn, leader) == (True, False)
    return leader, other


def test_one_worker_leads_at_a_time_until_it_resigns_or_its_lease_runs_out(conn: Conn) -> None:
    leader, other = settled_leader(conn)
    assert lead(conn, other) == (False, False)
    shift_clock(conn, "10 s")
    assert lead(conn, other) == (False, False)
    shift_clock(conn, "10 s")
    assert lead(conn, leader) == (True, False)
    conn.execute("select taskq.resign(%s, %s)", (other, ROLE))
    assert lead(conn, other) == (False, False)
    conn.execute("select taskq.resign(%s, %s)", (leader, ROLE))
    assert lead(conn, other) == (True, False)
    assert lead(conn, leader) == (False, False)
    for _ in range(2):
        shift_clock(conn, "14 s")
        assert lead(conn, leader)[0] is False
    shift_clock(conn, "2 s")
    assert lead(conn, leader)[0] is True


@pytest.mark.parametrize(
    "change",
    [
        "server_started_at = server_started_at - interval '1 h'",
        "timeline = timeline + 1",
        "timeline = timeline - 1",
    ],
)
def test_after_a_restart_or_a_promotion_it_is_quiet_for_one_lease(conn: Conn, change: str) -> None:
    leader, _ = settled_leader(conn)
    conn.execute(f"update taskq.leader set {change}")
    assert lead(conn, leader) == (True, True)
    for step, quiet in (("14 s", True), ("14 s", True), ("1.9 s", True), ("0.1 s", False)):
        shift_clock(conn, step)
        assert lead(conn, leader) == (True, quiet), step


@pytest.mark.parametrize("step", ["16 s", "1 h", "-1 s", "-1 h"])
def test_after_a_step_of_the_clock_it_is_quiet_for_one_lease(conn: Conn, step: str) -> None:
    leader, other = settled_leader(conn)
    shift_clock(conn, step)
    first = other if step == "1 h" else leader
    assert lead(conn, first)[1] is True
    for wait, quiet in (("10 s", True), ("10 s", True), ("9.9 s", True), ("0.1 s", False)):
        shift_clock(conn, wait)
        assert lead(conn, first) == (True, quiet), wait


def test_after_a_step_back_the_old_lease_does_not_last_for_ever(conn: Conn) -> None:
    _, other = settled_leader(conn)
    shift_clock(conn, "-1 day")
    assert lead(conn, other) == (True, True)


def test_a_role_whose_row_was_deleted_starts_anew_and_quiet(conn: Conn) -> None:
    leader, other = settled_leader(conn)
    conn.execute("delete from taskq.leader")
    assert lead(conn, other) == (True, True)
    assert lead(conn, leader) == (False, True)


def test_it_is_quiet_for_the_longest_lease_of_all_workers(conn: Conn) -> None:
    leader, _ = settled_leader(conn)
    register(conn, lease=90)
    conn.execute("update taskq.leader set timeline = timeline + 1")
    assert lead(conn, leader) == (True, True)
    for _ in range(8):
        shift_clock(conn, "10 s")
        assert lead(conn, leader) == (True, True)
    shift_clock(conn, "10 s")
    assert lead(conn, leader) == (True, False)


def test_a_worker_with_a_shorter_lease_does_not_take_the_role(conn: Conn) -> None:
    leader, _ = settled_leader(conn)
    hasty = register(conn, lease=3)
    assert lead(conn, hasty, 3)[0] is False
    assert lead(conn, leader)[0] is True


def test_a_look_that_came_late_is_no_step_of_the_clock(conn: Conn) -> None:
    leader, _ = settled_leader(conn)
    for gap, elapsed in ((16, 16), (40, 42.9), (3600, 3597.1)):
        shift_clock(conn, f"{gap} s")
        assert lead(conn, leader, elapsed=elapsed) == (True, False), gap


@pytest.mark.parametrize("elapsed", [10, 12.9, 19.1, 3600, float("nan"), None])
def test_a_step_of_the_clock_is_no_look_that_came_late(conn: Conn, elapsed: float | None) -> None:
    leader, _ = settled_leader(conn)
    shift_clock(conn, "16 s")
    assert lead(conn, leader, elapsed=elapsed) == (True, True)


def test_after_another_workers_look_its_own_clock_says_nothing(conn: Conn) -> None:
    leader, other = settled_leader(conn)
    shift_clock(conn, "2 s")
    assert lead(conn, other, elapsed=2) == (False, False)
    shift_clock(conn, "16 s")
    assert lead(conn, leader, elapsed=16) == (True, True)

"""Law 4: a write whose fence does not match changes nothing anywhere."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sql import (
    NOBODY,
    OUTCOMES,
    End,
    attempts,
    cancel,
    claim_one,
    control_clock,
    dump,
    end,
    enqueue,
    exchange,
    get,
    lose,
    make_due,
    register,
    resolve,
    running,
    settle,
    shift_clock,
    unknown,
    violations,
)

Conn = psycopg.Connection[Any]


def assert_nothing_changes(conn: Conn, worker: UUID, job: UUID, epoch: int, outcome: str, **options: Any) -> None:
    before = dump(conn)
    sent = End(job, epoch, outcome, 99, error={"type": "E"} if outcome != "succeeded" else None, **options)
    assert end(conn, worker, sent) == 0
    assert dump(conn) == before
    [missed] = exchange(conn, worker, [sent])
    assert (missed["kind"], missed["job_id"], missed["claim_epoch"]) == ("missed", job, epoch)
    assert dump(conn) == before


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_end_by_another_worker_changes_nothing(conn: Conn, outcome: str) -> None:
    owner, job = running(conn)
    other = register(conn)
    for worker in (other, NOBODY, uuid4()):
        assert_nothing_changes(conn, worker, job, 1, outcome)
    assert end(conn, owner, End(job, 1, outcome)) == 1


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_end_of_an_older_or_later_epoch_changes_nothing(conn: Conn, outcome: str) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "release", 1))
    claim_one(conn, worker)
    for epoch in (0, 1, 3):
        assert_nothing_changes(conn, worker, job, epoch, outcome)
    assert end(conn, worker, End(job, 2, outcome)) == 1


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_end_of_an_older_epoch_changes_nothing_in_a_batch_with_a_good_one(conn: Conn, outcome: str) -> None:
    worker, stale = running(conn)
    end(conn, worker, End(stale, 1, "release", 1))
    good = enqueue(conn)
    assert {claim_one(conn, worker)["job_id"], claim_one(conn, worker)["job_id"]} == {stale, good}
    before = get(conn, stale)
    answer = exchange(conn, worker, [End(stale, 1, outcome, 98), End(good, 1, outcome, 99)])
    assert [(row["kind"], row["job_id"]) for row in answer] == [("missed", stale)]
    assert get(conn, stale) == before
    assert attempts(conn, stale) == [(1, "released")]
    assert len(attempts(conn, good)) == 1


@pytest.mark.parametrize("outcome", OUTCOMES)
@pytest.mark.parametrize("finished", ["succeeded", "failed", "cancelled"])
def test_an_end_of_a_finished_job_changes_nothing(conn: Conn, outcome: str, finished: str) -> None:
    worker, job = running(conn)
    if finished == "cancelled":
        cancel(conn, job)
    end(conn, worker, End(job, 1, finished, 1))
    assert get(conn, job)["status"] == finished
    assert_nothing_changes(conn, worker, job, 1, outcome)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_end_of_a_job_that_went_back_changes_nothing(conn: Conn, outcome: str) -> None:
    """Pending again, held, claimed by another worker, cancelled while pending: the old attempt has no say any more."""
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "release", 1))
    assert_nothing_changes(conn, worker, job, 1, outcome)
    conn.execute("update taskq.jobs set status = 'held', held_reason = 'signal' where id = %s", (job,))
    assert_nothing_changes(conn, worker, job, 1, outcome)
    conn.execute("update taskq.jobs set status = 'pending', held_reason = null where id = %s", (job,))
    claim_one(conn, register(conn))
    assert_nothing_changes(conn, worker, job, 1, outcome)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_an_end_after_the_loss_was_settled_changes_nothing(conn: Conn, outcome: str) -> None:
    worker, job = running(conn)
    lose(conn, worker)
    assert settle(conn) == {job: "pending"}
    assert_nothing_changes(conn, worker, job, 1, outcome)
    # Not even once the very same worker id could have it again under a later epoch.
    conn.execute("update taskq.workers set status = 'live', lease_expires_at = 'infinity' where id = %s", (worker,))
    assert claim_one(conn, worker)["claim_epoch"] == 2
    assert_nothing_changes(conn, worker, job, 1, outcome)


def test_an_end_of_a_job_that_is_not_there_changes_nothing(conn: Conn) -> None:
    worker, _ = running(conn)
    for outcome in OUTCOMES:
        assert_nothing_changes(conn, worker, uuid4(), 1, outcome)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_worker_that_was_declared_lost_still_ends_what_is_its_own(conn: Conn, outcome: str) -> None:
    worker, job = running(conn)
    lose(conn, worker)
    answer = exchange(conn, worker, [End(job, 1, outcome, 5)], 10)
    assert [row["kind"] for row in answer] == ["lease"]
    assert [epoch for epoch, _ in attempts(conn, job)] == [1]
    assert settle(conn) == {}
    assert violations(conn) == []


def test_a_late_end_of_an_unknown_job_resolves_it_under_its_fence_only(conn: Conn) -> None:
    worker, job = unknown(conn)
    other = register(conn)
    for outcome in OUTCOMES:
        assert_nothing_changes(conn, other, job, 1, outcome)
        assert_nothing_changes(conn, worker, job, 2, outcome)
    assert end(conn, worker, End(job, 1, "succeeded", result={"n": 1})) == 1
    assert (get(conn, job)["status"], get(conn, job)["result"]) == ("succeeded", {"n": 1})
    # Once resolved by an operator, the late end comes too late.
    worker, job = unknown(conn)
    resolve(conn, job, happened=True)
    for outcome in OUTCOMES:
        assert_nothing_changes(conn, worker, job, 1, outcome)
    assert violations(conn) == []


@pytest.mark.parametrize(
    ("outcome", "recorded", "counters"),
    [
        ("retry", "failed", (1, 0, 0, 0)),
        ("retry_after", "retry_after", (0, 1, 0, 0)),
        ("snooze", "snoozed", (0, 0, 1, 0)),
    ],
)
def test_a_late_end_that_goes_back_takes_an_unknown_effect_back_to_pending(
    conn: Conn, outcome: str, recorded: str, counters: tuple[int, ...]
) -> None:
    worker, job = running(conn, effect_class="side_effecting")
    conn.execute("update taskq.jobs set effect_started_at = taskq.now() where id = %s", (job,))
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    assert end(conn, worker, End(job, 1, outcome)) == 1
    after = get(conn, job)
    assert after["status"] == "pending"
    assert tuple(after[name] for name in ("attempt", "retry_afters", "snoozes", "releases")) == counters
    assert attempts(conn, job) == [(1, recorded)]
    assert violations(conn) == []


def test_a_claim_without_a_valid_lease_takes_nothing(conn: Conn) -> None:
    control_clock(conn)
    job = enqueue(conn)
    worker = register(conn, lease=300)
    for change in (
        "status = 'draining'",
        "status = 'stopped'",
        "status = 'lost'",
        "lease_expires_at = taskq.now()",
    ):
        with conn.transaction(force_rollback=True):
            conn.execute(f"update taskq.workers set {change} where id = %s", (worker,))
            before = dump(conn)
            [answer] = exchange(conn, worker, (), 10)
            assert answer["kind"] == "lease", change
            assert dump(conn) == before, change
    [answer] = exchange(conn, uuid4(), (), 10)
    assert answer["kind"] == "lease"
    shift_clock(conn, "301 s")
    [answer] = exchange(conn, worker, (), 10)
    assert answer["kind"] == "lease"
    shift_clock(conn, "-100 s")
    assert claim_one(conn, worker)["job_id"] == job


def test_one_end_that_does_not_match_holds_up_no_other(conn: Conn) -> None:
    worker = register(conn)
    jobs = [enqueue(conn) for _ in range(4)]
    for _ in jobs:
        claim_one(conn, worker)
    other = register(conn)
    theirs = enqueue(conn)
    claim_one(conn, other)
    ends = [
        End(jobs[0], 1, "succeeded", 1),
        End(jobs[1], 2, "succeeded", 2),
        End(theirs, 1, "succeeded", 3),
        End(jobs[2], 1, "retry", 4),
        End(jobs[3], 1, "failed", 5),
    ]
    answer = exchange(conn, worker, ends)
    assert {(row["kind"], row["job_id"]) for row in answer} == {("missed", jobs[1]), ("missed", theirs)}
    assert [get(conn, job)["status"] for job in jobs] == ["succeeded", "running", "pending", "failed"]
    assert get(conn, theirs)["status"] == "running"
    make_due(conn, jobs[2])
    assert violations(conn) == []


def test_an_outcome_that_is_not_known_is_refused_and_changes_nothing(conn: Conn) -> None:
    worker, job = running(conn)
    before = dump(conn)
    with pytest.raises(psycopg.DatabaseError) as refused, conn.transaction():
        end(conn, worker, End(job, 1, "suceeded"))
    assert refused.value.sqlstate == "WF009"
    assert dump(conn) == before

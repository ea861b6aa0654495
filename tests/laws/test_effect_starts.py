"""Effect starts and unknown outcomes in the database: who may start, what follows, and who wins a race."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from sql import (
    End,
    attempts,
    cancel,
    claim_one,
    control_clock,
    dump,
    end,
    enqueue,
    enqueue_many,
    exchange,
    get,
    lose,
    one,
    policy,
    refused,
    register,
    resolve,
    rows,
    running,
    sessions,
    settle,
    shift_clock,
    start_effects,
    status,
    violations,
)

Conn = psycopg.Connection[Any]


def effect(conn: Conn, **spec: Any) -> tuple[UUID, UUID]:
    """A claimed job of a side-effecting task; gives worker and job."""
    return running(conn, effect_class="side_effecting", **spec)


def started(conn: Conn, **spec: Any) -> tuple[UUID, UUID]:
    """The same, and its effect may have begun."""
    worker, job = effect(conn, **spec)
    assert start_effects(conn, worker, (job, 1))[0]["effect_started_at"] is not None
    return worker, job


def unknowns(conn: Conn, job: UUID) -> list[tuple[int, str]]:
    found = rows(conn, "select * from taskq.unknowns where job_id = %s order by claim_epoch", job)
    return [(row["claim_epoch"], row["reason"]) for row in found]


# Enqueue --------------------------------------------------------------------------------------------------------------


def test_only_workers_that_start_effects_get_side_effecting_jobs_whoever_enqueues(conn: Conn) -> None:
    job = enqueue(conn, effect_class="side_effecting")
    assert get(conn, job)["required_worker_schema"] == 2
    higher = enqueue(conn, effect_class="side_effecting", required_worker_schema=3)
    assert get(conn, higher)["required_worker_schema"] == 3
    # Of several at once, which goes another way.
    for made in enqueue_many(conn, 2, effect_class="side_effecting"):
        assert get(conn, made["job_id"])["required_worker_schema"] == 2
    assert get(conn, enqueue(conn, queue="other"))["required_worker_schema"] is None
    policy(conn, "effects", effect_class="side_effecting")
    foreign: UUID = one(conn, "select taskq.enqueue('t', queue => 'q', policy => 'effects')")
    assert (get(conn, foreign)["effect_class"], get(conn, foreign)["required_worker_schema"]) == ("side_effecting", 2)
    old = register(conn, level=1)
    assert exchange(conn, old, (), 10) == []
    for level in ("null", "1"):
        update = "update taskq.jobs set required_worker_schema = " + level + " where id = %s"
        assert refused(conn, update, job) == "23514"


# Effect starts --------------------------------------------------------------------------------------------------------


def test_a_start_is_set_once_and_answered_again(conn: Conn) -> None:
    control_clock(conn)
    worker, job = effect(conn)
    [first] = start_effects(conn, worker, (job, 1))
    assert (first["job_id"], first["claim_epoch"], first["claimed_by"]) == (job, 1, worker)
    assert (first["status"], first["effect_class"], first["lease_holds"]) == ("running", "side_effecting", True)
    assert first["cancel_requested_at"] is None
    shift_clock(conn, "1 s")
    before = dump(conn)
    assert start_effects(conn, worker, (job, 1)) == [first]
    assert dump(conn) == before
    assert get(conn, job)["effect_started_at"] == first["effect_started_at"] is not None
    assert violations(conn) == []


@pytest.mark.parametrize(
    "case", ["epoch", "worker", "absent", "cancelled", "idempotent", "lease", "lost", "stopped", "unknown", "ended"]
)
def test_nothing_starts_but_under_the_fence_the_lease_and_before_a_cancel(conn: Conn, case: str) -> None:
    control_clock(conn)
    worker, job = running(conn, effect_class="idempotent" if case == "idempotent" else "side_effecting")
    asked, asker = (job, 1), worker
    if case == "epoch":
        asked = (job, 2)
    elif case == "worker":
        asker = register(conn)
    elif case == "absent":
        asked = (uuid4(), 1)
    elif case == "cancelled":
        assert cancel(conn, job) == "requested"
    elif case == "lease":
        shift_clock(conn, "1 h")
    elif case in ("lost", "stopped"):
        conn.execute("update taskq.workers set status = %s where id = %s", (case, worker))
    elif case == "unknown":
        end(conn, worker, End(job, 1, "unknown"))
    elif case == "ended":
        end(conn, worker, End(job, 1))
    before = dump(conn)
    [answer] = start_effects(conn, asker, asked)
    assert dump(conn) == before
    assert answer["effect_started_at"] is None
    assert answer["lease_holds"] == (case not in ("lease", "lost", "stopped"))
    if case in ("absent", "ended"):
        assert answer["job_id"] is None
    else:
        assert (answer["job_id"], answer["claim_epoch"], answer["claimed_by"]) == (job, 1, worker)


def test_a_draining_worker_starts_what_it_has_claimed(conn: Conn) -> None:
    worker, job = effect(conn)
    conn.execute("select taskq.drain_worker(%s)", (worker,))
    assert start_effects(conn, worker, (job, 1))[0]["effect_started_at"] is not None


def test_many_are_answered_in_the_order_in_which_they_were_asked_for(conn: Conn) -> None:
    worker = register(conn)
    jobs = [running(conn, worker, effect_class="side_effecting")[1] for _ in range(3)]
    nowhere = uuid4()
    asked = [(jobs[2], 1), (nowhere, 1), (jobs[0], 1)]
    answer = start_effects(conn, worker, *asked)
    assert [row["job_id"] for row in answer] == [jobs[2], None, jobs[0]]
    assert get(conn, jobs[1])["effect_started_at"] is None


def test_a_second_attempt_has_a_start_of_its_own(conn: Conn) -> None:
    worker, job = started(conn)
    first = get(conn, job)["effect_started_at"]
    assert end(conn, worker, End(job, 1, "retry_after")) == 1
    assert get(conn, job)["effect_started_at"] is None
    [record] = rows(conn, "select * from taskq.ledger where job_id = %s", job)
    assert record["effect_started_at"] == first
    claim_one(conn, worker)
    assert get(conn, job)["effect_started_at"] is None
    assert violations(conn) == []


# Unknown --------------------------------------------------------------------------------------------------------------


def test_what_nobody_knows_keeps_its_claim_and_is_on_record_once(conn: Conn) -> None:
    worker, job = started(conn)
    told = End(job, 1, "unknown", error={"type": "E", "reason": "timed_out"})
    assert end(conn, worker, told) == 1
    before = dump(conn)
    assert end(conn, worker, told) == 1, "told again, it counts as applied"
    assert end(conn, worker, told, told) == 1
    assert exchange(conn, worker, [told], 0) == [], "and is not asked for again"
    assert dump(conn) == before
    row = get(conn, job)
    assert (row["status"], row["worker_id"], row["claim_epoch"]) == ("unknown", worker, 1)
    assert unknowns(conn, job) == [(1, "timed_out")]
    assert attempts(conn, job) == []
    assert violations(conn) == []
    conn.execute("select taskq.stop_worker(%s)", (worker,))
    assert one(conn, "select status from taskq.workers where id = %s", worker) == "stopped", "it has nothing to settle"


@pytest.mark.parametrize("reason", ["timed_out", "process_died", "shutdown", "not_confirmed", "told", "made up", None])
def test_the_reason_is_one_of_those_that_are_listed(conn: Conn, reason: str | None) -> None:
    worker, job = started(conn)
    assert end(conn, worker, End(job, 1, "unknown", error={"reason": reason} if reason else None)) == 1
    listed = ("timed_out", "process_died", "shutdown", "not_confirmed")
    assert unknowns(conn, job) == [(1, reason if reason in listed else "told")]


@pytest.mark.parametrize("other", ["epoch", "worker"])
def test_only_its_own_worker_says_that_it_does_not_know(conn: Conn, other: str) -> None:
    worker, job = started(conn)
    by = register(conn) if other == "worker" else worker
    told = End(job, 2 if other == "epoch" else 1, "unknown")
    before = dump(conn)
    assert end(conn, by, told) == 0
    assert [row["kind"] for row in exchange(conn, by, [told], 0)] == ["missed"]
    assert dump(conn) == before


def test_any_body_may_say_that_it_does_not_know(conn: Conn) -> None:
    for effect_class in ("pure", "idempotent"):
        worker, job = running(conn, effect_class=effect_class)
        assert end(conn, worker, End(job, 1, "unknown")) == 1
        assert (status(conn, job), unknowns(conn, job)) == ("unknown", [(1, "told")])
        assert resolve(conn, job, happened=False) == "pending"
        conn.execute("delete from taskq.jobs where id = %s", (job,))
        conn.execute("set local session_replication_role = replica")
        conn.execute("delete from taskq.ledger where job_id = %s", (job,))
        conn.execute("set local session_replication_role = origin")
    assert violations(conn) == []


def test_a_start_that_was_not_confirmed_and_never_was_goes_back(conn: Conn) -> None:
    """The worker does not know, and says so; the row does."""
    worker, job = effect(conn)
    told = End(job, 1, "unknown", error={"reason": "not_confirmed"}, delay=5)
    assert end(conn, worker, told) == 1
    row = get(conn, job)
    assert (row["status"], row["releases"], row["attempt"]) == ("pending", 1, 0)
    assert attempts(conn, job) == [(1, "released")]
    assert exchange(conn, worker, [told], 0) == [], "sent again, it is on record"
    assert unknowns(conn, job) == []
    assert violations(conn) == []


@pytest.mark.parametrize("asked", [False, True])
def test_what_has_started_is_never_handed_back(conn: Conn, asked: bool) -> None:
    worker, job = started(conn)
    if asked:
        assert cancel(conn, job) == "requested"
    assert exchange(conn, worker, [End(job, 1, "release")], 0) == []
    assert (status(conn, job), unknowns(conn, job)) == ("unknown", [(1, "shutdown")])
    assert end(conn, worker, End(job, 1, "release", 2)) == 1
    assert status(conn, job) == "unknown"
    assert violations(conn) == []


def test_a_batch_keeps_its_ends_apart(conn: Conn) -> None:
    worker = register(conn)
    one_, two, three, four = (running(conn, worker, effect_class="side_effecting")[1] for _ in range(4))
    start_effects(conn, worker, *((job, 1) for job in (one_, two, three)))
    ends = [End(one_, 1, "unknown"), End(two, 1), End(three, 1, "release"), End(four, 1, "release")]
    assert end(conn, worker, *ends) == 4
    assert [status(conn, job) for job in (one_, two, three, four)] == ["unknown", "succeeded", "unknown", "pending"]
    assert violations(conn) == []


def test_told_that_it_is_unknown_and_how_it_ended_in_one_call_the_first_counts(conn: Conn) -> None:
    worker, job = started(conn)
    assert end(conn, worker, End(job, 1, "unknown"), End(job, 1, "succeeded", 2)) == 1
    assert status(conn, job) == "unknown"
    assert end(conn, worker, End(job, 1, "succeeded", 2)) == 1
    assert (status(conn, job), attempts(conn, job)) == ("succeeded", [(1, "succeeded")])
    assert unknowns(conn, job) == [(1, "told")], "how it came to be unknown stays on record"


@pytest.mark.parametrize("late", ["succeeded", "failed", "retry_after"])
def test_after_a_lost_worker_its_own_late_end_resolves_it(conn: Conn, late: str) -> None:
    worker, job = started(conn)
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    assert unknowns(conn, job) == [(1, "worker_lost")]
    assert end(conn, worker, End(job, 1, late)) == 1
    assert status(conn, job) == {"retry_after": "pending"}.get(late, late)
    assert violations(conn) == []


def test_what_had_not_started_goes_back_from_a_lost_worker(conn: Conn) -> None:
    worker, job = effect(conn)
    lose(conn, worker)
    assert settle(conn) == {job: "pending"}
    assert unknowns(conn, job) == []
    # The answer that comes late changes nothing.
    [answer] = start_effects(conn, worker, (job, 1))
    assert (answer["effect_started_at"], answer["claimed_by"], answer["status"]) == (None, None, "pending")


def test_what_was_cancelled_and_had_not_started_is_cancelled_with_its_worker(conn: Conn) -> None:
    worker, job = effect(conn)
    assert cancel(conn, job) == "requested"
    lose(conn, worker)
    assert settle(conn) == {job: "cancelled"}
    assert unknowns(conn, job) == []
    row = get(conn, job)
    assert (row["status"], row["effect_started_at"], row["error"]["type"]) == ("cancelled", None, "Cancelled")
    assert attempts(conn, job) == [(1, "lost")]
    # The start that comes late is nobody's.
    [answer] = start_effects(conn, worker, (job, 1))
    assert answer["job_id"] is None
    assert end(conn, worker, End(job, 1)) == 0
    assert violations(conn) == []


def test_how_a_job_came_to_be_unknown_is_forgotten_with_the_job(conn: Conn) -> None:
    control_clock(conn)
    worker, job = started(conn)
    end(conn, worker, End(job, 1, "unknown"))
    shift_clock(conn, "40 days")
    one(conn, "select taskq.prune()")
    assert unknowns(conn, job) == [(1, "told")], "the job is still there"
    conn.execute("select taskq.ensure_partitions()")
    assert resolve(conn, job, happened=True) == "succeeded"
    one(conn, "select taskq.prune()")
    assert unknowns(conn, job) == [(1, "told")], "it is in history"
    conn.execute("delete from taskq.history where id = %s", (job,))
    one(conn, "select taskq.prune()")
    assert unknowns(conn, job) == []


# Cancelling -----------------------------------------------------------------------------------------------------------


def test_the_answer_to_a_cancel_says_whether_the_effect_had_started(conn: Conn) -> None:
    for make, expected in ((effect, False), (started, True)):
        worker, job = make(conn)
        assert cancel(conn, job) == "requested"
        details = one(conn, "select details from taskq.audit where subject = %s", str(job))
        assert details == {"answer": "requested", "effect_started": expected}
        assert end(conn, worker, End(job, 1, "failed", error={})) == 1
        assert status(conn, job) == "cancelled"


def test_a_start_that_waits_for_a_cancel_is_refused(races_dsn: str) -> None:
    with sessions(races_dsn) as [canceller, starter]:
        worker, job = starter.do(effect)
        canceller.begin()
        assert canceller.do(lambda conn: cancel(conn, job)) == "requested"
        waiting = starter.start(lambda conn: start_effects(conn, worker, (job, 1)))
        starter.waits_for(canceller)
        canceller.commit()
        [answer] = waiting.result(20)
        assert answer["effect_started_at"] is None
        assert answer["cancel_requested_at"] is not None
        assert starter.do(lambda conn: get(conn, job))["effect_started_at"] is None
        assert starter.do(violations) == []


def test_a_cancel_that_waits_for_a_start_says_that_it_has_started(races_dsn: str) -> None:
    with sessions(races_dsn) as [canceller, starter]:
        worker, job = starter.do(effect)
        starter.begin()
        [answer] = starter.do(lambda conn: start_effects(conn, worker, (job, 1)))
        assert answer["effect_started_at"] is not None
        waiting = canceller.start(lambda conn: cancel(conn, job))
        canceller.waits_for(starter)
        starter.commit()
        assert waiting.result(20) == "requested"
        details = canceller.do(lambda conn: one(conn, "select details from taskq.audit where subject = %s", str(job)))
        assert details["effect_started"] is True


def test_a_start_in_progress_keeps_its_worker_from_being_declared_lost(races_dsn: str) -> None:
    with sessions(races_dsn) as [leader, starter]:
        worker, job = starter.do(effect)
        starter.begin()
        assert starter.do(lambda conn: start_effects(conn, worker, (job, 1)))[0]["lease_holds"]
        expire = "update taskq.workers set lease_expires_at = '-infinity' where id = %s"
        leader.do(lambda conn: conn.execute(expire, (worker,)))
        lost = leader.do(lambda conn: rows(conn, "select * from taskq.mark_lost()"))
        assert lost == []
        starter.commit()
        leader.do(lambda conn: lose(conn, worker))
        assert leader.do(settle) == {job: "unknown"}
        assert leader.do(violations) == []


def test_a_start_after_its_worker_was_declared_lost_starts_nothing(races_dsn: str) -> None:
    with sessions(races_dsn) as [leader, starter]:
        worker, job = starter.do(effect)
        leader.begin()
        leader.do(lambda conn: lose(conn, worker))
        waiting = starter.start(lambda conn: start_effects(conn, worker, (job, 1)))
        starter.waits_for(leader)
        leader.commit()
        [answer] = waiting.result(20)
        assert (answer["lease_holds"], answer["effect_started_at"]) == (False, None)
        assert leader.do(settle) == {job: "pending"}


def test_settling_leaves_a_start_in_progress_alone(races_dsn: str) -> None:
    with sessions(races_dsn) as [leader, starter]:
        worker, job = starter.do(effect)
        # Stopped by hand: only settling can meet a start of its claim.
        starter.begin()
        starter.do(lambda conn: start_effects(conn, worker, (job, 1)))
        assert leader.do(settle) == {}
        starter.commit()
        leader.do(lambda conn: conn.execute("update taskq.workers set status = 'stopped' where id = %s", (worker,)))
        assert leader.do(settle) == {job: "unknown"}


@pytest.mark.parametrize("first", ["settle", "end"])
def test_a_late_end_and_settling_agree_whoever_comes_first(races_dsn: str, first: str) -> None:
    with sessions(races_dsn) as [leader, worker_session]:
        worker, job = worker_session.do(started)
        leader.do(lambda conn: lose(conn, worker))
        if first == "settle":
            leader.begin()
            assert leader.do(settle) == {job: "unknown"}
            waiting = worker_session.start(lambda conn: end(conn, worker, End(job, 1)))
            worker_session.waits_for(leader)
            leader.commit()
            assert waiting.result(20) == 1
        else:
            worker_session.begin()
            assert worker_session.do(lambda conn: end(conn, worker, End(job, 1))) == 1
            assert leader.do(settle) == {}, "it skips what is being ended"
            worker_session.commit()
            assert leader.do(settle) == {}
        assert leader.do(lambda conn: attempts(conn, job)) == [(1, "succeeded")]
        assert leader.do(violations) == []

"""Sleeps, waits and signals in the database: what suspends, what wakes, and what is given to whom, once."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

import psycopg
import pytest
from signals_kit import held, send, sleep, suspend, suspension, take, wait
from sql import (
    NOBODY,
    End,
    attempts,
    cancel,
    claim_one,
    control_clock,
    detail,
    drop_expired,
    dump,
    end,
    enqueue,
    get,
    lose,
    make_due,
    one,
    refused,
    register,
    retry,
    rows,
    running,
    settle,
    shift_clock,
    status,
    stop_clock,
    unknown,
    violations,
)

Conn = psycopg.Connection[Any]
SLEEP, WAIT = ("sleep", "s", 1), ("wait", "go", 1)


def signals(conn: Conn, job: UUID) -> list[tuple[Any, ...]]:
    query = "select payload, taken_at is not null, refused_why from taskq.signals where job_id = %s order by id"
    return [tuple(row.values()) for row in rows(conn, query, job)]


def later(conn: Conn, by: str, worker: UUID) -> None:
    """Move the clock, and have the worker renew its lease, which might have run out."""
    shift_clock(conn, by)
    assert one(conn, "select status from taskq.renew(%s) limit 1", worker) == "live"


# Sleep ---------------------------------------------------------------------------------------------------------------


def test_the_instant_of_a_sleep_is_recorded_once_by_the_databases_clock(conn: Conn) -> None:
    control_clock(conn)
    worker, job = running(conn)
    stop_clock(conn)
    assert sleep(conn, worker, job, 60) == ("sleeps", 60)
    shift_clock(conn, "20 s")
    assert sleep(conn, worker, job, 999) == ("sleeps", 40)
    assert sleep(conn, worker, job, 1e12, occurrence=2) == ("sleeps", 3155760000)
    before = dump(conn)
    assert sleep(conn, NOBODY, job, 1, "x") == sleep(conn, worker, job, 1, "x", epoch=2) == ("fenced", None)
    assert dump(conn) == before
    assert violations(conn) == []


def test_a_suspended_attempt_uses_up_nothing_and_is_due_when_its_first_sleep_ends(conn: Conn) -> None:
    worker, job = running(conn, max_attempts=1)
    sleep(conn, worker, job, 3600)
    sleep(conn, worker, job, 60, "short")
    sleep(conn, worker, job, 5, "of-another-branch")
    before = get(conn, job)
    assert suspend(conn, worker, job, SLEEP, ("sleep", "short", 1)) == 1
    row = get(conn, job)
    assert row["status"] == "pending"
    assert row["run_at"] == one(conn, "select until from taskq.steps where name = 'short'")
    counters = ("attempt", "recoveries", "retry_afters", "snoozes", "releases", "claim_epoch")
    assert {name: row[name] for name in counters} == {name: before[name] for name in counters}
    assert attempts(conn, job) == [(1, "suspended")]
    assert one(conn, "select outcome_id from taskq.attempts where job_id = %s", job) == 1
    assert violations(conn) == []
    make_due(conn, job)
    assert claim_one(conn, worker)["claim_epoch"] == 2


def test_one_that_waits_for_nothing_is_due_at_once(conn: Conn) -> None:
    control_clock(conn)
    worker, job = running(conn)
    sleep(conn, worker, job, 60)
    later(conn, "61 s", worker)
    assert suspend(conn, worker, job, SLEEP) == 1
    assert claim_one(conn, worker)["claim_epoch"] == 2
    assert end(conn, worker, End(job, 2, "suspend", error={"for": 7})) == 1
    assert claim_one(conn, worker)["claim_epoch"] == 3
    assert violations(conn) == []


@pytest.mark.parametrize("twice", [False, True])
def test_told_again_it_is_on_record_once(conn: Conn, twice: bool) -> None:
    worker, job = running(conn)
    sleep(conn, worker, job, 60)
    told = suspension(job, SLEEP)
    assert end(conn, worker, told, *([told] if twice else [])) == 1
    assert end(conn, worker, told) == 0
    assert attempts(conn, job) == [(1, "suspended")]


def test_a_suspension_is_fenced(conn: Conn) -> None:
    worker, job = running(conn)
    sleep(conn, worker, job, 60)
    before = dump(conn)
    assert suspend(conn, register(conn), job, SLEEP) == suspend(conn, worker, job, SLEEP, epoch=2) == 0
    assert {k: v for k, v in dump(conn).items() if k != "workers"} == {
        k: v for k, v in before.items() if k != "workers"
    }


def test_a_sleep_past_the_deadline_ends_the_job_and_uses_no_attempt(conn: Conn) -> None:
    worker, job = running(conn)
    conn.execute("update taskq.jobs set deadline = taskq.now() + interval '1 min' where id = %s", (job,))
    sleep(conn, worker, job, 120)
    assert suspend(conn, worker, job, SLEEP) == 1
    row = get(conn, job)
    assert (row["status"], row["attempt"], row["error"]["type"]) == ("failed", 0, "DeadlineExceeded")
    assert row["error"]["cause"]["type"] == "Suspended"
    assert attempts(conn, job) == [(1, "suspended")]
    assert violations(conn) == []


def test_after_a_cancel_request_a_suspension_ends_the_job(conn: Conn) -> None:
    worker, job = running(conn)
    assert cancel(conn, job) == "requested"
    sleep(conn, worker, job, 60)
    assert suspend(conn, worker, job, SLEEP) == 1
    assert status(conn, job) == "cancelled"
    assert attempts(conn, job) == [(1, "cancelled")]
    lost, doubtful = unknown(conn)
    assert suspend(conn, lost, doubtful, SLEEP) == 1
    assert status(conn, doubtful) == "cancelled"
    assert violations(conn) == []


def test_retry_ends_the_sleeps_of_a_job_and_of_no_other(conn: Conn) -> None:
    worker, job = running(conn)
    _, other = running(conn)
    for each in (job, other):
        sleep(conn, get(conn, each)["worker_id"], each, 3600)
    assert suspend(conn, worker, job, SLEEP) == 1
    assert retry(conn, job) == "due"
    assert claim_one(conn, worker)["job_id"] == job
    _, remaining = sleep(conn, worker, job, 3600, epoch=2)
    assert remaining is not None
    assert remaining <= 0
    assert one(conn, "select count(*) from taskq.steps where until > taskq.now()") == 1


def test_a_sleeping_job_keeps_the_rules_of_its_line(conn: Conn) -> None:
    """As a snooze does: under halt it keeps its turn, under continue others go before it meanwhile."""
    worker = register(conn)
    for effect in ("halt", "continue"):
        name = f"of {effect}"
        conn.execute("select taskq.ensure_policy(%s, 1, jsonb_build_object('ordering', %s::text))", (effect, effect))
        first = enqueue(conn, ordering_key=name, policy_id=effect)
        second = enqueue(conn, ordering_key=name, policy_id=effect)
        assert claim_one(conn, worker)["job_id"] == first
        sleep(conn, worker, first, 3600)
        assert suspend(conn, worker, first, SLEEP) == 1
        assert (status(conn, first), status(conn, second)) == (
            ("pending", "held") if effect == "halt" else ("held", "pending")
        )
        assert attempts(conn, first) == [(1, "suspended")]
        for job in (second, first):
            cancel(conn, job)
    assert violations(conn) == []


def test_a_job_that_waits_for_a_signal_keeps_its_place_in_line(conn: Conn) -> None:
    worker = register(conn)
    first, second = enqueue(conn, ordering_key="k"), enqueue(conn, ordering_key="k")
    assert claim_one(conn, worker)["job_id"] == first
    held(conn, worker, first)
    assert (get(conn, second)["status"], get(conn, second)["held_reason"]) == ("held", "ordering")
    assert violations(conn) == []
    assert send(conn, first) == "sent"
    assert claim_one(conn, worker)["job_id"] == first
    end(conn, worker, End(first, 2))
    assert claim_one(conn, worker)["job_id"] == second
    assert violations(conn) == []


# Signals -------------------------------------------------------------------------------------------------------------


def test_a_signal_wakes_the_job_that_waits_for_it(conn: Conn) -> None:
    worker, job = running(conn)
    held(conn, worker, job)
    [waiting] = rows(conn, "select * from taskq.waiting_for_signals")
    assert (waiting["job_id"], waiting["name"], waiting["until"], waiting["held_reason"]) == (job, "go", None, "signal")
    assert send(conn, job, {"n": 1}, "other") == "sent"
    assert status(conn, job) == "held"
    assert send(conn, job, {"n": 2}) == "sent"
    assert claim_one(conn, worker)["claim_epoch"] == 2
    answer, signal, payload, _ = wait(conn, worker, job, epoch=2)
    assert (answer, payload) == ("signal", '{"n": 2}')
    assert take(conn, worker, job, signal, epoch=2) == "taken"
    assert signals(conn, job) == [({"n": 1}, False, None), ({"n": 2}, True, None)]
    assert rows(conn, "select * from taskq.waiting_for_signals") == []
    assert violations(conn) == []


def test_signals_are_given_in_order_each_once_and_to_one_wait(conn: Conn) -> None:
    worker, job = running(conn)
    for n in range(3):
        assert send(conn, job, n) == "sent"
    first = wait(conn, worker, job)
    assert wait(conn, worker, job, occurrence=2) == first, "not taken yet"
    assert first[2] == "0"
    assert take(conn, worker, job, first[1]) == "taken"
    assert take(conn, worker, job, first[1]) == "taken", "a lost answer"
    assert take(conn, worker, job, first[1], occurrence=2) == "gone"
    assert wait(conn, worker, job) == ("taken", first[1], "0", None)
    second = wait(conn, worker, job, occurrence=2)
    assert second[2] == "1"
    assert wait(conn, worker, job, "other")[0] == "waits"
    assert take(conn, worker, job, second[1], "other") == take(conn, worker, job, second[1]) == "gone"
    assert take(conn, worker, job, second[1], occurrence=2) == "taken"
    assert signals(conn, job) == [(0, True, None), (1, True, None), (2, False, None)]
    assert violations(conn) == []


def test_under_one_key_a_signal_is_there_once(conn: Conn) -> None:
    worker, job = running(conn)
    assert send(conn, job, 1, key="k") == "sent"
    assert send(conn, job, 1, key="k") == "already"
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        send(conn, job, 2, key="k")
    assert (caught.value.sqlstate, detail(caught.value)["key"]) == ("WF030", "k")
    assert send(conn, job, 2, "other", key="k") == "sent"
    _, signal, _, _ = wait(conn, worker, job)
    take(conn, worker, job, signal)
    assert send(conn, job, 1, key="k") == "already", "also when it was taken"
    assert [payload for payload, _, _ in signals(conn, job)] == [1, 2]


def test_a_refused_signal_is_given_to_nobody_and_says_why(conn: Conn) -> None:
    worker, job = running(conn)
    send(conn, job, "bad")
    _, signal, _, _ = wait(conn, worker, job)
    before = dump(conn)
    assert take(conn, NOBODY, job, signal) == take(conn, worker, job, signal, epoch=2) == "fenced"
    assert dump(conn) == before
    assert take(conn, worker, job, signal, refused="fits nothing") == "refused"
    assert take(conn, worker, job, signal, refused="again") == "refused"
    assert take(conn, worker, job, signal) == "gone"
    assert wait(conn, worker, job)[0] == "waits"
    assert suspend(conn, worker, job, WAIT) == 1
    assert status(conn, job) == "held"
    assert signals(conn, job) == [("bad", False, "fits nothing")]
    assert violations(conn) == []


def test_a_signal_that_came_before_the_suspension_leaves_the_job_due(conn: Conn) -> None:
    worker, job = running(conn)
    assert wait(conn, worker, job)[0] == "waits"
    assert send(conn, job) == "sent"
    assert suspend(conn, worker, job, WAIT) == 1
    assert claim_one(conn, worker)["claim_epoch"] == 2
    assert violations(conn) == []


def test_a_wait_that_the_body_asks_for_no_more_is_woken_by_nothing(conn: Conn) -> None:
    """As after a deploy that has renamed it."""
    worker, job = running(conn)
    assert wait(conn, worker, job, "old")[0] == "waits"
    end(conn, worker, End(job, 1, "retry"))
    make_due(conn, job)
    claim_one(conn, worker)
    send(conn, job, 1, "old")
    assert wait(conn, worker, job, "new", epoch=2)[0] == "waits"
    assert suspend(conn, worker, job, ("wait", "new", 1), epoch=2) == 1
    assert (status(conn, job), violations(conn)) == ("held", [])
    assert [row["name"] for row in rows(conn, "select name from taskq.waiting_for_signals")] == ["new"]
    send(conn, job, 2, "old")
    assert status(conn, job) == "held"
    send(conn, job, 3, "new")
    assert status(conn, job) == "pending"
    claim_one(conn, worker)
    assert wait(conn, worker, job, "old", epoch=3)[2] == "1"
    assert violations(conn) == []


def test_a_wait_ends_when_its_time_is_up_or_a_sleep_beside_it(conn: Conn) -> None:
    control_clock(conn)
    worker, job = running(conn)
    other_worker, other = running(conn)
    held(conn, worker, job, seconds=60)
    wait(conn, other_worker, other, seconds=600)
    sleep(conn, other_worker, other, 30)
    assert suspend(conn, other_worker, other, WAIT, SLEEP) == 1
    assert one(conn, "select taskq.wake_waiting()") == 0
    shift_clock(conn, "31 s")
    assert "sweep" in duties(conn)
    conn.execute("select * from taskq.sweep()")
    assert (status(conn, job), status(conn, other)) == ("held", "pending")
    shift_clock(conn, "30 s")
    assert one(conn, "select taskq.wake_waiting(1)") == 1
    assert one(conn, "select taskq.wake_waiting(1)") == 0
    later(conn, "1 s", worker)
    claim_one(conn, worker)
    claim_one(conn, worker)
    assert wait(conn, worker, job, epoch=2) == ("timed_out", None, None, None)
    assert send(conn, job) == "sent", "too late for that wait"
    assert wait(conn, worker, job, epoch=2) == ("timed_out", None, None, None)
    assert wait(conn, worker, job, epoch=2, occurrence=2)[0] == "signal"
    assert violations(conn) == []


def duties(conn: Conn) -> list[str]:
    leader = register(conn)
    found = rows(conn, "select * from taskq.look(%s, 30, null, '{q}', '{t}')", leader)
    return [row["name"] for row in found if row["kind"] == "duty"]


def test_a_signal_that_came_in_time_is_given_though_the_time_is_up(conn: Conn) -> None:
    control_clock(conn)
    worker, job = running(conn)
    held(conn, worker, job, seconds=60)
    assert send(conn, job, 7) == "sent"
    later(conn, "2 min", worker)
    claim_one(conn, worker)
    assert wait(conn, worker, job, epoch=2)[0] == "signal"


def test_a_deadline_and_a_cancel_end_a_job_that_waits(conn: Conn) -> None:
    worker, job = running(conn)
    _, other = running(conn)
    held(conn, worker, job)
    held(conn, get(conn, other)["worker_id"], other)
    assert cancel(conn, job) == "cancelled"
    conn.execute("update taskq.jobs set deadline = taskq.now() where id = %s", (other,))
    [row] = rows(conn, "select * from taskq.sweep()")
    assert (row["job_id"], row["settled"], row["why"]) == (other, "failed", "DeadlineExceeded")
    assert violations(conn) == []


def test_a_wait_with_a_deadline_before_its_time_is_held_all_the_same(conn: Conn) -> None:
    worker, job = running(conn)
    conn.execute("update taskq.jobs set deadline = taskq.now() + interval '1 min' where id = %s", (job,))
    held(conn, worker, job, seconds=600)


def test_what_is_sent_to_nobody_is_refused(conn: Conn) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job))
    call = "select taskq.send_signal(%s, %s, %s, %s)"
    assert refused(conn, call, job, "go", "1", None) == "WF012"
    assert refused(conn, call, NOBODY, "go", "1", None) == "WF011"
    _, live = running(conn)
    for name, key in (("a b", None), ("", None), (None, None), ("go", ""), ("go", "x" * 513)):
        assert refused(conn, call, live, name, "1", key) == "WF009"
    conn.execute("update taskq.installation set max_payload_bytes = 10")
    assert refused(conn, call, live, "go", '"12345678901"', None) == "WF009"
    assert refused(conn, call, live, "go", None, None) == ""


def most(conn: Conn, n: int) -> None:
    conn.execute("update taskq.installation set max_waiting_signals = %s", (n,))


def test_of_a_job_only_so_many_signals_wait(conn: Conn) -> None:
    assert one(conn, "select max_waiting_signals from taskq.installation") == 10_000
    most(conn, 3)
    worker, job = running(conn)
    _, other = running(conn)
    for n in range(3):
        assert send(conn, job, n, key=f"k{n}") == "sent"
    before = dump(conn)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        send(conn, job, 3, "other")
    assert (caught.value.sqlstate, detail(caught.value)) == ("WF040", {"job_id": str(job), "waiting": 3, "limit": 3})
    assert "3 signals" in str(caught.value)
    assert dump(conn) == before
    assert send(conn, job, 2, key="k2") == "already"
    call = "select taskq.send_signal(%s, %s, %s, %s)"
    assert refused(conn, call, job, "go", "7", "k2") == "WF030"
    assert send(conn, other) == "sent"
    assert enqueue(conn)
    # What was taken or refused waits no more.
    for nth, refusal in ((1, None), (2, "fits nothing")):
        _, signal, _, _ = wait(conn, worker, job, occurrence=nth)
        take(conn, worker, job, signal, occurrence=nth, refused=refusal)
        assert send(conn, job, 9) == "sent"
        assert refused(conn, call, job, "go", "9", None) == "WF040"
    # Nor does what was sent to another generation.
    end(conn, worker, End(job, 1, "failed"))
    assert retry(conn, job) == "reopened"
    for _ in range(3):
        assert send(conn, job) == "sent"
    assert refused(conn, call, job, "go", "9", None) == "WF040"
    assert violations(conn) == []


def test_a_reopened_job_is_given_no_signals_of_the_last_generation(conn: Conn) -> None:
    worker, job = running(conn)
    send(conn, job, 1, key="k")
    end(conn, worker, End(job, 1, "failed"))
    assert retry(conn, job) == "reopened"
    assert send(conn, job, 2, key="k") == "sent"
    claim_one(conn, worker)
    assert wait(conn, worker, job, epoch=2)[2] == "2"
    assert violations(conn) == []


def test_a_job_that_waits_is_not_made_due_by_hand(conn: Conn) -> None:
    worker, job = running(conn)
    held(conn, worker, job)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        retry(conn, job)
    assert caught.value.sqlstate == "WF012"
    assert "taskq jobs signal" in (caught.value.diag.message_hint or "")


def test_a_worker_that_is_lost_leaves_a_wait_to_the_next(conn: Conn) -> None:
    worker, job = running(conn)
    send(conn, job, 1)
    _, signal, _, _ = wait(conn, worker, job)
    lose(conn, worker)
    assert settle(conn) == {job: "pending"}
    assert take(conn, worker, job, signal) == "fenced"
    assert wait(conn, worker, job)[0] == "fenced"
    new = register(conn)
    claim_one(conn, new)
    assert wait(conn, new, job, epoch=2)[:2] == ("signal", signal)
    assert take(conn, new, job, signal, epoch=2) == "taken"
    assert violations(conn) == []


def test_signals_are_forgotten_with_their_job(conn: Conn) -> None:
    control_clock(conn)
    worker, job = running(conn)
    for n in range(3):
        send(conn, job, n)
    shift_clock(conn, "40 days")
    assert one(conn, "select taskq.prune_steps()") == 0
    conn.execute("select taskq.ensure_partitions()")
    end(conn, worker, End(job))
    assert one(conn, "select taskq.prune_steps()") == 0
    conn.execute("delete from taskq.history where id = %s", (job,))
    assert one(conn, "select taskq.prune_steps(2)") == 2
    assert one(conn, "select taskq.prune_steps(2)") == 1
    assert signals(conn, job) == []


@pytest.mark.parametrize(
    "row",
    [
        "'step', 'x', 1, 1, now(), null, true, null, null",
        "'step', 'x', 1, 1, now(), null, false, '1', null",
        "'sleep', 'x', 1, 1, now(), null, true, null, null",
        "'sleep', 'x', 1, 1, now(), now(), true, '1', null",
        "'wait', 'x', 1, 1, now(), null, true, '1', null",
        "'wait', 'x', 1, 1, now(), null, false, '1', 1",
        "'other', 'x', 1, 1, now(), null, true, '1', null",
    ],
)
def test_the_table_refuses_rows_that_are_none(conn: Conn, row: str) -> None:
    _, job = running(conn)
    insert = (
        "insert into taskq.steps (job_id, generation, kind, name, occurrence, claim_epoch, recorded_at, until, done,"
        f" value, signal_id) values (%s, 0, {row})"
    )
    assert refused(conn, insert, job) == "23514"


# The check -----------------------------------------------------------------------------------------------------------


def waiting(conn: Conn) -> UUID:
    """A job that is held for a signal, after it has taken another."""
    worker, job = running(conn)
    send(conn, job, 1)
    _, signal, _, _ = wait(conn, worker, job, occurrence=2)
    take(conn, worker, job, signal, occurrence=2)
    held(conn, worker, job)
    return job


FORGERIES: list[tuple[str, str]] = [
    ("held_for_no_signal", "delete from taskq.steps where not done and job_id = %s"),
    (
        "signal_not_given",
        "insert into taskq.signals (job_id, generation, name, sent_at, payload) values (%s, 0, 'go', now(), '1')",
    ),
    (
        "signal_taken_by_nobody",
        "insert into taskq.signals (job_id, generation, name, sent_at, taken_at, payload)"
        " values (%s, 0, 'go', now(), now(), '1')",
    ),
    ("wait_without_its_signal", "update taskq.steps set value = '2' where signal_id is not null and job_id = %s"),
    ("wait_without_its_signal", "delete from taskq.signals where job_id = %s"),
    ("wait_without_its_signal", "update taskq.signals set taken_at = null, name = 'x' where job_id = %s"),
]


@pytest.mark.parametrize(("code", "forge"), FORGERIES)
def test_a_forged_wait_is_reported_for_its_job(conn: Conn, code: str, forge: str) -> None:
    bystander, job = waiting(conn), waiting(conn)
    assert violations(conn) == []
    assert conn.execute(forge, (job,)).rowcount == 1
    assert violations(conn, "live") == [(code, job)]
    assert bystander != job


def test_each_check_of_signals_has_its_forgery(conn: Conn) -> None:
    text = one(conn, "select prosrc from pg_proc where oid = 'taskq.check_steps(text)'::regprocedure")
    checks = {code for code in re.findall(r"select \d+, '(\w+)'", text) if not code.startswith(("step", "run"))}
    assert checks == {code for code, _ in FORGERIES}


def test_what_is_half_forgotten_is_no_fault(conn: Conn) -> None:
    control_clock(conn)
    worker, job = running(conn)
    sleep(conn, worker, job, 0)
    sleep(conn, worker, job, 0, occurrence=2)
    send(conn, job)
    _, signal, _, _ = wait(conn, worker, job)
    assert take(conn, worker, job, signal) == "taken"
    end(conn, worker, End(job))
    conn.execute("select taskq.ensure_partitions()")
    shift_clock(conn, "40 days")
    conn.execute("select taskq.ensure_partitions()")
    while drop_expired(conn):
        pass
    assert one(conn, "select count(*) from taskq.history") == 0
    while one(conn, "select taskq.prune_steps(1)"):
        assert violations(conn) == []

"""Pausing runs: nothing of a paused run starts, whatever makes it ready; what runs goes on; and all comes back."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from children_kit import cancel_run, child_of, fail_child, family, retry_run
from emits_kit import emit_of, emitted, page
from loops_kit import again, claimed, looped
from loops_kit import progress as loop_progress
from maps_kit import MAP, doubled, ends, mapped
from runs_kit import do, edge, finish, info, job_of, kinds, node, result_of, start, store, take, tree, worker_for
from signals_kit import child, held, held_for_child, send, send_run, sleep, suspend
from sql import (
    Conn,
    End,
    attempts,
    cancel,
    claim,
    control_clock,
    detail,
    enqueue,
    exchange,
    get,
    lose,
    make_due,
    one,
    refused,
    resolve,
    retry,
    rows,
    settle,
    shift_clock,
    violations,
)

NOBODY = UUID(int=77)


def pause(conn: Conn, run: UUID, code: str = "operator", reason: str | None = "why") -> str:
    return str(one(conn, "select taskq.pause_run(%s, %s, 'me', %s)", run, reason, code))


def resume(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.resume_run(%s, 'well again', 'me')", run))


def chain(conn: Conn, **first: Any) -> UUID:
    """A run of a, b and c in a row."""
    nodes = [node("a", **first), node("b", {"x": result_of(0)}), node("c")]
    return start(conn, store(conn, nodes, [edge(0, 1), edge(1, 2)]))


def starts(conn: Conn, worker: UUID) -> list[dict[str, Any]]:
    """Claim whatever there is, of any task and in either queue."""
    tasks = [row["task"] for row in rows(conn, "select distinct task from taskq.jobs")]
    return claim(conn, worker, 100, tasks=tasks, lanes=(("q", 5), ("c", 5)))


def state(conn: Conn, job: UUID) -> tuple[str, str | None]:
    row = get(conn, job)
    return row["status"], row["held_reason"]


def statuses(conn: Conn) -> dict[str, str]:
    return {row["workflow"]: row["status"] for row in rows(conn, "select workflow, status from taskq.runs")}


def paused(conn: Conn, run: UUID) -> dict[str, Any]:
    [row] = rows(conn, "select * from taskq.paused_runs where run_id = %s", run)
    return row


HELD = ("held", "paused")


# What waits, and what becomes ready -----------------------------------------------------------------------------------


def test_nothing_of_a_paused_run_starts_and_all_of_it_comes_back_when_it_was_due(conn: Conn) -> None:
    worker = worker_for(conn)
    run = chain(conn, run_in=3600)
    job = job_of(conn, run, "a")
    due = get(conn, job)["run_at"]
    assert pause(conn, run) == "paused"
    assert info(conn, run)["status"] == "paused"
    assert state(conn, job) == HELD
    assert tree(conn, run) == {"a": "held", "b": "waiting", "c": "waiting"}
    assert violations(conn) == []
    make_due(conn, job)
    assert starts(conn, worker) == []
    conn.execute("update taskq.jobs set run_at = %s where id = %s", (due, job))
    assert resume(conn, run) == "resumed"
    assert (state(conn, job), get(conn, job)["run_at"]) == (("pending", None), due)
    make_due(conn, job)
    for name in "abc":
        do(conn, worker, name)
    assert info(conn, run)["status"] == "succeeded"
    assert (get(conn, job)["attempt"], attempts(conn, job)) == (0, [(1, "succeeded")])
    assert violations(conn) == []


def test_what_runs_when_the_pause_comes_ends_as_always_and_what_it_makes_ready_is_held(conn: Conn) -> None:
    worker = worker_for(conn)
    run = chain(conn)
    [claimed_a] = take(conn, worker, "a").values()
    assert pause(conn, run) == "paused"
    assert (paused(conn, run)["running"], paused(conn, run)["held"]) == (1, 0)
    finish(conn, worker, claimed_a, result=1)
    assert tree(conn, run) == {"a": "succeeded", "b": "held", "c": "waiting"}
    assert state(conn, job_of(conn, run, "b")) == HELD
    assert starts(conn, worker) == []
    assert violations(conn) == []
    assert resume(conn, run) == "resumed"
    do(conn, worker, "b")
    do(conn, worker, "c")
    assert info(conn, run)["status"] == "succeeded"


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_the_last_running_body_ends_a_paused_run_as_it_would_have(conn: Conn, outcome: str) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    [claimed_a] = take(conn, worker, "a").values()
    pause(conn, run)
    finish(conn, worker, claimed_a, outcome)
    assert info(conn, run)["status"] == outcome
    assert rows(conn, "select * from taskq.run_pauses") == []
    assert resume(conn, run) == "finished"
    assert violations(conn) == []


def test_a_failure_that_stops_the_rest_ends_the_pause(conn: Conn) -> None:
    """What is being cancelled must come to its end: the job that waits for a child run tells of that."""
    nodes = [node("beside"), node("twin")]
    made = family(conn, nodes=nodes)
    claims = take(conn, made.worker, "beside", "twin", "x")
    pause(conn, made.parent)
    finish(conn, made.worker, claims["beside"], "failed")
    assert statuses(conn) == {"outer": "running", "inner": "running"}
    assert kinds(conn, made.parent)[-3:] == ["interrupted", "ended", "recovered"]
    assert rows(conn, "select * from taskq.run_pauses") == []
    finish(conn, made.worker, claims["twin"], "failed")
    finish(conn, made.worker, claims["x"], "failed")
    do(conn, made.worker, "inner:await", "failed")
    assert info(conn, made.parent)["status"] == "failed"
    assert violations(conn) == []


@pytest.mark.parametrize("how", ["retry", "retry_after", "snooze", "release"])
def test_an_attempt_that_is_to_be_repeated_is_held(conn: Conn, how: str) -> None:
    worker = worker_for(conn)
    run = chain(conn, max_attempts=3)
    [claimed_a] = take(conn, worker, "a").values()
    job = claimed_a["job_id"]
    pause(conn, run)
    error = {"type": "Boom", "message": "boom"}
    assert exchange(conn, worker, [End(job, 1, how, error=error, delay=0)]) == []
    assert state(conn, job) == HELD
    assert starts(conn, worker) == []
    assert violations(conn) == []
    resume(conn, run)
    assert get(conn, job)["attempt"] == int(how == "retry")
    assert take(conn, worker, "a").keys() == {"a"}


def test_a_lost_lease_and_an_unknown_outcome_that_did_not_happen_are_held(conn: Conn) -> None:
    worker, other = worker_for(conn), worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b", effect_class="side_effecting", required_worker_schema=3)]))
    [a] = take(conn, worker, "a").values()
    [b] = take(conn, other, "b").values()
    assert exchange(conn, other, [End(b["job_id"], 1, "unknown", error={"type": "Gone", "message": "m"})]) == []
    pause(conn, run)
    lose(conn, worker)
    assert settle(conn) == {a["job_id"]: "pending"}
    assert state(conn, a["job_id"]) == HELD
    assert resolve(conn, b["job_id"], False) == "pending"
    assert state(conn, b["job_id"]) == HELD
    assert kinds(conn, run)[-3:] == ["interrupted", "lost", "resolved"]
    assert violations(conn) == []
    resume(conn, run)
    assert get(conn, a["job_id"])["recoveries"] == 1
    assert take(conn, other, "a", "b").keys() == {"a", "b"}


# Signals, sleeps, children --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["job", "run"])
def test_a_signal_is_given_and_what_it_wakes_stays_held(conn: Conn, to: str) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    [a] = take(conn, worker, "a").values()
    held(conn, worker, a["job_id"])
    pause(conn, run)
    assert state(conn, a["job_id"]) == ("held", "signal")
    if to == "job":
        assert send(conn, a["job_id"]) == "sent"
    else:
        assert send_run(conn, run) == "given"
        assert send_run(conn, run) == "kept"
    assert state(conn, a["job_id"]) == HELD
    assert starts(conn, worker) == []
    assert violations(conn) == []
    resume(conn, run)
    assert take(conn, worker, "a").keys() == {"a"}
    assert violations(conn) == []


def test_what_waits_for_a_signal_still_waits_when_the_run_goes_on(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    [a] = take(conn, worker, "a").values()
    pause(conn, run)
    held(conn, worker, a["job_id"])
    resume(conn, run)
    assert state(conn, a["job_id"]) == ("held", "signal")
    send_run(conn, run)
    assert take(conn, worker, "a").keys() == {"a"}


def test_a_wait_whose_time_is_up_and_a_sleep_that_is_over_are_held(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")]))
    both = take(conn, worker, "a", "b")
    held(conn, worker, both["a"]["job_id"], seconds=0.001)
    pause(conn, run)
    assert sleep(conn, worker, both["b"]["job_id"], 0.001)[0] == "sleeps"
    assert suspend(conn, worker, both["b"]["job_id"], ("sleep", "s", 1)) == 1
    conn.execute("select pg_sleep(0.01)")
    assert one(conn, "select taskq.wake_waiting()") == 1
    assert [state(conn, each["job_id"]) for each in both.values()] == [HELD, HELD]
    assert starts(conn, worker) == []
    assert violations(conn) == []
    resume(conn, run)
    assert take(conn, worker, "a", "b").keys() == {"a", "b"}


def test_a_body_whose_child_ends_during_the_pause_is_held(conn: Conn) -> None:
    """The child itself is no part of the run: it goes on."""
    worker = worker_for(conn, queues=["q", "c"])
    run = start(conn, store(conn, [node("a")]))
    [a] = take(conn, worker, "a").values()
    kid = held_for_child(conn, worker, a["job_id"])
    pause(conn, run)
    assert state(conn, kid)[0] == "pending"
    [c] = starts(conn, worker)
    finish(conn, worker, c)
    assert state(conn, a["job_id"]) == HELD
    assert violations(conn) == []
    resume(conn, run)
    assert take(conn, worker, "a").keys() == {"a"}


def test_above_read_committed_a_signal_sees_a_pause_that_it_has_not_seen(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn, psycopg.connect(dsn, autocommit=True) as old:
        worker = worker_for(conn)
        run = start(conn, store(conn, [node("a")]))
        [a] = take(conn, worker, "a").values()
        held(conn, worker, a["job_id"])
        old.execute("begin isolation level repeatable read")
        old.execute("select from taskq.runs")
        pause(conn, run)
        with pytest.raises(psycopg.errors.SerializationFailure):
            send(old, a["job_id"])
        old.rollback()
        assert violations(conn) == []


@pytest.mark.parametrize("call", [pause, resume])
def test_above_read_committed_an_attempt_that_came_back_is_not_overlooked(dsn: str, call: Any) -> None:
    """Its job runs in the old snapshot, and its run is as it was."""
    with psycopg.connect(dsn, autocommit=True) as conn, psycopg.connect(dsn, autocommit=True) as old:
        worker = worker_for(conn)
        run = start(conn, store(conn, [node("a", max_attempts=2)]))
        [a] = take(conn, worker, "a").values()
        if call is resume:
            pause(conn, run)
        old.execute("begin isolation level repeatable read")
        old.execute("select from taskq.runs")
        exchange(conn, worker, [End(a["job_id"], 1, "retry", error={"type": "Boom", "message": "boom"})])
        with pytest.raises(psycopg.errors.SerializationFailure):
            call(old, run)
        old.rollback()
        call(conn, run)
        assert state(conn, a["job_id"]) == (("pending", None) if call is resume else HELD)
        assert violations(conn) == []


# The guards -----------------------------------------------------------------------------------------------------------


def test_a_forged_pending_job_of_a_paused_run_is_not_claimed(conn: Conn) -> None:
    worker = worker_for(conn)
    run = chain(conn)
    job = job_of(conn, run, "a")
    pause(conn, run)
    conn.execute("update taskq.jobs set status = 'pending', held_reason = null where id = %s", (job,))
    assert state(conn, job) == HELD
    conn.execute("alter table taskq.jobs disable trigger paused_stays_held")
    conn.execute("update taskq.jobs set status = 'pending', held_reason = null where id = %s", (job,))
    conn.execute("alter table taskq.jobs enable trigger paused_stays_held")
    assert ("pending_in_paused_run", run) in violations(conn)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        starts(conn, worker)
    assert caught.value.sqlstate == "WF023"
    assert "paused" in str(caught.value)


def test_retrying_a_job_that_a_pause_holds_says_what_to_do(conn: Conn) -> None:
    run = chain(conn)
    job = job_of(conn, run, "a")
    pause(conn, run)
    with pytest.raises(psycopg.Error) as caught:
        retry(conn, job)
    assert caught.value.sqlstate == "WF012"
    assert f"taskq runs resume {run}" in (caught.value.diag.message_hint or "")


# Answers --------------------------------------------------------------------------------------------------------------


def test_what_pausing_and_resuming_answer_and_that_repeating_changes_nothing(conn: Conn) -> None:
    run = chain(conn)
    assert resume(conn, run) == "not_paused"
    assert pause(conn, run, "incident-42") == "paused"
    before = kinds(conn, run), rows(conn, "select * from taskq.audit"), rows(conn, "select * from taskq.run_pauses")
    assert pause(conn, run, "other", "another reason") == "already"
    assert (kinds(conn, run), *(rows(conn, f"select * from taskq.{t}") for t in ("audit", "run_pauses"))) == before
    row = paused(conn, run)
    assert (row["code"], row["reason"], row["actor"], row["resume"]) == ("incident-42", "why", "me", run)
    assert resume(conn, run) == "resumed"
    assert resume(conn, run) == "not_paused"
    assert kinds(conn, run)[-2:] == ["interrupted", "recovered"]
    told = rows(conn, "select action, reason, actor, details - 'since' as details from taskq.audit order by id")
    assert [(t["action"], t["reason"], t["actor"]) for t in told] == [
        ("pause_run", "why", "me"),
        ("resume_run", "well again", "me"),
    ]
    assert [t["details"] for t in told] == [
        {"code": "incident-42", "runs": 1, "jobs": 1},
        {"code": "incident-42", "jobs": 1},
    ]
    assert cancel_run(conn, run) == "cancelled"
    assert (pause(conn, run), resume(conn, run)) == ("finished", "finished")


def test_a_run_that_is_being_cancelled_is_not_paused(conn: Conn) -> None:
    worker = worker_for(conn)
    run = chain(conn)
    take(conn, worker, "a")
    assert cancel_run(conn, run) == "requested"
    assert (pause(conn, run), resume(conn, run)) == ("cancelling", "not_paused")
    assert info(conn, run)["status"] == "running"


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("select taskq.pause_run(%s, 'why')", "WF025"),
        ("select taskq.resume_run(%s, 'why')", "WF025"),
        ("select taskq.pause_run(%s, ' ')", "WF009"),
        ("select taskq.resume_run(%s)", "WF009"),
        ("select taskq.pause_run(%s, 'why', null, 'two words')", "WF009"),
        ("select taskq.pause_run(%s, 'why', null, null)", "WF009"),
    ],
)
def test_what_cannot_be_paused_is_refused(conn: Conn, query: str, code: str) -> None:
    assert refused(conn, query, NOBODY) == code


# Cancelling, retrying, healing ----------------------------------------------------------------------------------------


def test_cancelling_a_paused_run_ends_it(conn: Conn) -> None:
    worker = worker_for(conn)
    run, other = chain(conn), chain(conn)
    pause(conn, run)
    assert cancel_run(conn, run) == "cancelled"
    [claimed_a] = take(conn, worker, "a").values()
    pause(conn, other)
    assert cancel_run(conn, other) == "requested"
    assert rows(conn, "select * from taskq.run_pauses") == []
    finish(conn, worker, claimed_a, "failed")
    assert info(conn, other)["status"] == "cancelled"
    assert violations(conn) == []


def test_cancelling_a_node_that_a_pause_holds_ends_it(conn: Conn) -> None:
    run = chain(conn)
    pause(conn, run)
    assert cancel(conn, job_of(conn, run, "a")) == "cancelled"
    assert info(conn, run)["status"] == "failed"
    assert violations(conn) == []


def test_a_run_that_was_reopened_is_paused_and_one_that_has_ended_is_reopened_without_its_pause(conn: Conn) -> None:
    worker = worker_for(conn)
    run = chain(conn)
    [a] = take(conn, worker, "a").values()
    pause(conn, run)
    finish(conn, worker, a, "failed")
    assert retry_run(conn, run) == "reopened"
    assert info(conn, run)["status"] == "running"
    assert pause(conn, run) == "paused"
    assert state(conn, job_of(conn, run, "a")) == HELD
    assert resume(conn, run) == "resumed"
    for name in "abc":
        do(conn, worker, name)
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_paused_run_is_healed_and_carried_on_without_a_start(conn: Conn) -> None:
    conn.execute(
        "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
        " as 'select 1'"
    )
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b"), node("c")], [edge(0, 2)]))
    [a] = take(conn, worker, "a").values()
    pause(conn, run)
    conn.execute("alter table taskq.history disable trigger run_goes_on")
    finish(conn, worker, a)
    conn.execute("alter table taskq.history enable trigger run_goes_on")
    assert [row["answer"] for row in rows(conn, "select * from taskq.heal_runs()")] == ["healed"]
    while rows(conn, "select * from taskq.carry_on_run()"):
        pass
    assert tree(conn, run) == {"a": "succeeded", "b": "held", "c": "held"}
    assert info(conn, run)["status"] == "paused"
    assert starts(conn, worker) == []
    assert violations(conn) == []
    resume(conn, run)
    assert take(conn, worker, "b", "c").keys() == {"b", "c"}


def test_a_deadline_goes_on_counting(conn: Conn) -> None:
    control_clock(conn)
    worker_for(conn)
    run = chain(conn, deadline_in=60)
    pause(conn, run)
    shift_clock(conn, "2 min")
    assert [row["settled"] for row in rows(conn, "select * from taskq.sweep()")] == ["failed"]
    assert info(conn, run)["status"] == "failed"
    assert violations(conn) == []


# Child runs -----------------------------------------------------------------------------------------------------------


def test_child_runs_are_paused_and_resumed_with_the_run_above_also_one_that_was_paused_by_itself(conn: Conn) -> None:
    made = family(conn)
    inner = child_of(conn, made.parent)
    assert pause(conn, inner, "mine") == "paused"
    assert statuses(conn) == {"outer": "running", "inner": "paused"}
    assert pause(conn, made.parent, "all") == "paused"
    assert (paused(conn, inner)["code"], paused(conn, made.parent)["code"]) == ("mine", "all")
    assert paused(conn, inner)["resume"] == made.parent
    assert starts(conn, made.worker) == []
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        resume(conn, inner)
    assert (caught.value.sqlstate, detail(caught.value)["paused_run"]) == ("WF026", str(made.parent))
    assert f"taskq runs resume {made.parent}" in (caught.value.diag.message_hint or "")
    assert violations(conn) == []
    assert resume(conn, made.parent) == "resumed"
    assert statuses(conn) == {"outer": "running", "inner": "running"}
    for name in ("x", "y", "inner:await", "b"):
        do(conn, made.worker, name)
    assert info(conn, made.parent)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_child_run_that_is_paused_alone_leaves_the_run_above_at_work(conn: Conn) -> None:
    made = family(conn, nodes=[node("beside")])
    inner = child_of(conn, made.parent)
    assert pause(conn, inner) == "paused"
    assert take(conn, made.worker, "x", "beside").keys() == {"beside"}
    assert resume(conn, inner) == "resumed"
    assert take(conn, made.worker, "x").keys() == {"x"}
    assert violations(conn) == []


def test_a_child_run_that_is_admitted_during_a_pause_is_born_paused(conn: Conn) -> None:
    worker = worker_for(conn)
    inner = store(conn, [node("x")], workflow="inner")
    kid = node("kid", task="inner:await", child=inner)
    run = start(conn, store(conn, [node("a"), kid], [edge(0, 1)], workflow="outer"))
    [a] = take(conn, worker, "a").values()
    pause(conn, run, "incident")
    finish(conn, worker, a)
    assert statuses(conn) == {"outer": "paused", "inner": "paused"}
    child_run = child_of(conn, run)
    assert paused(conn, child_run)["code"] == "incident"
    assert rows(conn, "select kind, status from taskq.receipts where run_id = %s and sequence = 1", child_run) == [
        {"kind": "admitted", "status": "paused"}
    ]
    assert starts(conn, worker) == []
    assert violations(conn) == []
    resume(conn, run)
    do(conn, worker, "x")
    do(conn, worker, "inner:await")
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_child_run_that_ends_during_the_pause_is_told_of_afterwards(conn: Conn) -> None:
    made = family(conn)
    do(conn, made.worker, "x")
    [y] = take(conn, made.worker, "y").values()
    pause(conn, made.parent)
    finish(conn, made.worker, y)
    assert statuses(conn) == {"outer": "paused", "inner": "succeeded"}
    assert state(conn, made.job) == HELD
    assert violations(conn) == []
    resume(conn, made.parent)
    do(conn, made.worker, "inner:await")
    do(conn, made.worker, "b")
    assert info(conn, made.parent)["status"] == "succeeded"


def test_cancelling_a_paused_run_with_a_child_that_has_succeeded_lets_that_be_told(conn: Conn) -> None:
    made = family(conn)
    do(conn, made.worker, "x")
    [y] = take(conn, made.worker, "y").values()
    pause(conn, made.parent)
    finish(conn, made.worker, y)
    assert cancel_run(conn, made.parent) == "requested"
    do(conn, made.worker, "inner:await")
    assert info(conn, made.parent)["status"] == "cancelled"
    assert violations(conn) == []


def test_a_child_run_that_is_reopened_during_a_pause_is_paused(conn: Conn) -> None:
    made = family(conn)
    inner = fail_child(conn, made)
    # More is ready than one transaction takes on: so the child is not reopened yet.
    conn.execute(
        "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
        " as 'select 0'"
    )
    assert retry_run(conn, made.parent) == "reopened"
    assert info(conn, inner)["status"] == "failed"
    pause(conn, made.parent)
    conn.execute(
        "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
        " as 'select 1'"
    )
    rows(conn, "select * from taskq.carry_on_run()")
    assert statuses(conn) == {"outer": "paused", "inner": "paused"}
    assert starts(conn, made.worker) == []
    assert violations(conn) == []
    resume(conn, made.parent)
    for name in ("x", "y", "inner:await", "b"):
        do(conn, made.worker, name)
    assert info(conn, made.parent)["status"] == "succeeded"
    assert violations(conn) == []


# Maps, emits, loops ---------------------------------------------------------------------------------------------------


def test_a_map_begins_no_item_during_a_pause_and_no_more_at_once_after_it(conn: Conn) -> None:
    made = mapped(conn, list(range(6)), at_once=2)
    [first, second] = claim(conn, made.worker, 2, tasks=["each"])
    pause(conn, made.run)
    for each in (first, second):
        finish(conn, made.worker, each, result=1)
    each = child_of(conn, made.run)
    assert info(conn, each)["active"] == 2
    assert [row["status"] for row in rows(conn, "select status from taskq.jobs where run_id = %s", each)] == [
        "held"
    ] * 2
    assert starts(conn, made.worker) == []
    assert violations(conn) == []
    resume(conn, made.run)
    assert ends(conn, made, 10, doubled) == [2, 3]
    assert ends(conn, made, 10, doubled) == [4, 5]
    do(conn, made.worker, MAP, result=6)
    do(conn, made.worker, "last")
    assert info(conn, made.run)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_map_that_is_started_during_a_pause_is_held_whole(conn: Conn) -> None:
    made = mapped(conn, [1])
    run = start(conn, one(conn, "select plan_hash from taskq.runs where id = %s", made.run))
    [first] = take(conn, made.worker, "first").values()
    pause(conn, run)
    finish(conn, made.worker, first, result=[7, 8])
    assert paused(conn, child_of(conn, run))["held"] == 2
    assert ends(conn, made, 10, doubled) == [1]
    assert violations(conn) == []
    resume(conn, run)
    assert ends(conn, made, 10, doubled) == [7, 8]


def test_an_emit_asks_for_no_page_during_a_pause(conn: Conn) -> None:
    made = emitted(conn)
    [asked] = take(conn, made.worker, "list").values()
    pause(conn, made.run)
    finish(conn, made.worker, asked, result={"items": [1, 2], "cursor": "a"})
    assert info(conn, emit_of(conn, made))["active"] == 3
    assert starts(conn, made.worker) == []
    assert violations(conn) == []
    resume(conn, made.run)
    assert page(conn, made, [3])["cursor"] == "a"
    assert sorted(ends(conn, made, 10, doubled)) == [1, 2, 3]
    assert violations(conn) == []


@pytest.mark.parametrize("whom", ["run", "loop"])
def test_the_time_of_a_paused_loop_does_not_count(conn: Conn, whom: str) -> None:
    control_clock(conn)
    made = looped(conn, within=60)
    shift_clock(conn, "30 s")
    round_ = claimed(conn, made)
    which = made.run if whom == "run" else made.loop
    pause(conn, which)
    shift_clock(conn, "1 h")
    # The body ends during the pause, and the next round begins in it.
    finish(conn, made.worker, round_, result={"n": 1, "word": "again"})
    assert info(conn, made.loop)["written"] == 2
    assert starts(conn, made.worker) == []
    shift_clock(conn, "1 h")
    assert loop_progress(conn, made)["counted"] == pytest.approx(30, abs=5)
    resume(conn, which)
    shift_clock(conn, "10 s")
    assert loop_progress(conn, made)["counted"] == pytest.approx(40, abs=5)
    again(conn, made, 2)
    assert info(conn, made.loop)["written"] == 3
    shift_clock(conn, "30 s")
    again(conn, made, 3)
    assert info(conn, made.loop)["error"]["type"] == "LoopExhausted"
    assert violations(conn) == []


def test_the_time_of_a_loop_a_round_of_which_is_paused_does_not_count(conn: Conn) -> None:
    control_clock(conn)
    inner = store(conn, [node("body")], workflow="inner", result={"value": {"word": "again"}})
    made = looped(conn, child=inner, within=60)
    round_run = UUID(str(one(conn, "select id from taskq.runs where workflow = 'inner'")))
    [body] = take(conn, made.worker, "body").values()
    pause(conn, round_run)
    shift_clock(conn, "1 h")
    assert loop_progress(conn, made)["counted"] < 10
    # It ends in its pause.
    finish(conn, made.worker, body)
    shift_clock(conn, "20 s")
    assert 20 <= loop_progress(conn, made)["counted"] < 30
    assert one(conn, "select bool_and(until is not null) from taskq.loop_holds")
    assert violations(conn) == []


def test_a_loop_that_begins_during_a_pause_counts_from_its_end(conn: Conn) -> None:
    control_clock(conn)
    made = looped(conn, within=60)
    run = start(conn, one(conn, "select plan_hash from taskq.runs where id = %s", made.run))
    [first] = take(conn, made.worker, "first").values()
    pause(conn, run)
    finish(conn, made.worker, first, result={"n": 0})
    shift_clock(conn, "1 h")
    resume(conn, run)
    [counted] = rows(conn, "select counted from taskq.loop_progress where run_id = %s", run)
    assert counted["counted"] < 10
    assert violations(conn) == []


def test_cancelling_a_paused_loop_closes_its_times(conn: Conn) -> None:
    made = looped(conn, within=60)
    pause(conn, made.run)
    assert cancel_run(conn, made.run) == "cancelled"
    assert one(conn, "select bool_and(until is not null) from taskq.loop_holds")
    assert info(conn, made.run)["status"] == "cancelled"
    assert violations(conn) == []


# Other reasons to be held ---------------------------------------------------------------------------------------------


def test_resuming_gives_a_full_cohort_no_slot_too_many(conn: Conn) -> None:
    worker = worker_for(conn)
    one(conn, "select taskq.set_limit('narrow', 1, 'why')")
    run = start(conn, store(conn, [node("a", cohort="narrow"), node("b", cohort="narrow")]))
    [running] = starts(conn, worker)
    pause(conn, run)
    assert starts(conn, worker) == []
    resume(conn, run)
    assert starts(conn, worker) == []
    finish(conn, worker, running)
    assert len(starts(conn, worker)) == 1
    assert violations(conn) == []


def test_a_cohort_that_is_full_of_paused_runs_has_slots_for_others(conn: Conn) -> None:
    worker = worker_for(conn)
    one(conn, "select taskq.set_limit('narrow', 1, 'why')")
    run = start(conn, store(conn, [node("a", cohort="narrow")]))
    pause(conn, run)
    start(conn, store(conn, [node("b", cohort="narrow")]))
    assert take(conn, worker, "a", "b").keys() == {"b"}


def test_a_job_of_an_ordering_key_keeps_its_place_and_jumps_over_nobody(conn: Conn) -> None:
    """No node has an ordering key today; one that had would wait in its line, also over a pause."""
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    job = job_of(conn, run, "a")
    pause(conn, run)
    behind = enqueue(conn, ordering_key="k")
    conn.execute("update taskq.jobs set ordering_key = 'k', ordering_halt = false where id = %s", (job,))
    first, second = sorted([job, behind])
    assert first == job
    assert state(conn, second)[0] == "pending"
    resume(conn, run)
    assert state(conn, job) == ("held", "ordering")
    [claimed_t] = starts(conn, worker)
    assert claimed_t["job_id"] == second
    finish(conn, worker, claimed_t)
    assert take(conn, worker, "a").keys() == {"a"}


def test_child_runs_of_bodies_are_paused_by_their_own_id(conn: Conn) -> None:
    worker = worker_for(conn)
    inner = store(conn, [node("x")], workflow="inner")
    run = start(conn, store(conn, [node("a")], workflow="outer"))
    [a] = take(conn, worker, "a").values()
    _, _, _, started = child(conn, worker, a["job_id"], plan=inner)
    pause(conn, run)
    assert statuses(conn) == {"outer": "paused", "inner": "running"}
    assert pause(conn, UUID(str(started))) == "paused"
    assert starts(conn, worker) == []
    assert violations(conn) == []

"""Children of durable bodies in the database: started once, waited for without a slot, told of once, cancelled too."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

import psycopg
import pytest
from runs_kit import do, info, node, result_of, store, worker_for
from signals_kit import child, held_for_child, send, sleep, suspend, suspension, wait
from sql import (
    NOBODY,
    Conn,
    End,
    attempts,
    cancel,
    claim,
    claim_one,
    control_clock,
    dump,
    end,
    enqueue,
    get,
    lose,
    make_due,
    one,
    policy,
    refused,
    register,
    resolve,
    retry,
    rows,
    running,
    settle,
    shift_clock,
    status,
    violations,
)

CHILD = ("child", "c", 1)


def parent(conn: Conn) -> tuple[UUID, UUID]:
    """A job that runs, and its worker, which takes what is in queue c as well."""
    policy(conn)
    worker, job = running(conn, worker_for(conn))
    return worker, job


def claim_child(conn: Conn, worker: UUID) -> UUID:
    [row] = claim(conn, worker, 1, tasks=["c"], lanes=[("c", 5)])
    return UUID(str(row["job_id"]))


def reason(conn: Conn, job: UUID) -> tuple[str, str | None]:
    row = get(conn, job)
    return row["status"], row["held_reason"]


# Started once ---------------------------------------------------------------------------------------------------------


def test_a_child_is_started_once_under_the_fence_in_one_transaction_with_its_record(conn: Conn) -> None:
    worker, job = parent(conn)
    before = dump(conn)
    assert child(conn, NOBODY, job)[0] == child(conn, worker, job, epoch=2)[0] == "fenced"
    assert dump(conn) == before
    with conn.transaction(force_rollback=True):
        child(conn, worker, job)
    assert dump(conn) == before
    answer, value, error, first = child(conn, worker, job, payload='{"n": 1}')
    assert (answer, value, error) == ("waits", None, None)
    assert child(conn, worker, job, payload='{"n": 2}') == ("waits", None, None, first), "a lost answer"
    second = child(conn, worker, job, occurrence=2, ordering_key="k")[3]
    third = child(conn, worker, job, "d")[3]
    found = rows(conn, "select id, parent_job, payload, ordering_key from taskq.jobs where task = 'c' order by id")
    assert [(row["id"], row["parent_job"], row["ordering_key"]) for row in found] == [
        (first, job, None),
        (second, job, "k"),
        (third, job, None),
    ]
    assert found[0]["payload"] == {"n": 1}
    shown = rows(conn, "select child_job, status, told from taskq.children order by child_job")
    assert [(row["child_job"], row["status"], row["told"]) for row in shown][0] == (first, "pending", False)
    assert violations(conn) == []


def test_what_cannot_be_enqueued_starts_nothing(conn: Conn) -> None:
    worker, job = parent(conn)
    query = "select * from taskq.start_child(%s, %s, 1, 'c', 1, %s, '{}', null, null, null)"
    assert refused(conn, query, worker, job, '{"task": "c"}') == "WF009"
    call = "select * from taskq.start_child(%s, %s, 1, 'c', 1, null, '{}', null, 'nothing', null)"
    assert refused(conn, call, worker, job) == "WF024"
    assert one(conn, "select count(*) from taskq.steps") == 0


# Waited for -----------------------------------------------------------------------------------------------------------


def test_a_parent_is_held_and_goes_on_with_the_end_of_its_child(conn: Conn) -> None:
    worker, job = parent(conn)
    started = held_for_child(conn, worker, job)
    assert attempts(conn, job) == [(1, "suspended")]
    assert get(conn, job)["attempt"] == 0
    assert claim_child(conn, worker) == started
    assert end(conn, worker, End(started, result={"n": 7})) == 1
    assert status(conn, job) == "pending"
    assert claim_one(conn, worker)["claim_epoch"] == 2
    assert child(conn, worker, job, epoch=2) == ("succeeded", '{"n": 7}', None, started)
    conn.execute("delete from taskq.history where id = %s", (started,))
    assert child(conn, worker, job, epoch=2) == ("succeeded", '{"n": 7}', None, started), "it is recorded"
    end(conn, worker, End(job, 2, "retry"))
    make_due(conn, job)
    claim_one(conn, worker)
    assert child(conn, worker, job, epoch=3)[:2] == ("succeeded", '{"n": 7}')
    assert rows(conn, "select claim_epoch, done from taskq.steps") == [{"claim_epoch": 2, "done": True}]
    assert violations(conn) == []


def test_a_child_that_gives_nothing_gives_null(conn: Conn) -> None:
    worker, job = parent(conn)
    started = child(conn, worker, job)[3]
    claim_child(conn, worker)
    end(conn, worker, End(started))
    assert child(conn, worker, job)[:2] == ("succeeded", "null")


def test_one_whose_child_has_ended_before_it_suspends_is_due_at_once(conn: Conn) -> None:
    worker, job = parent(conn)
    started = child(conn, worker, job)[3]
    claim_child(conn, worker)
    end(conn, worker, End(started))
    assert status(conn, job) == "running"
    assert suspend(conn, worker, job, CHILD) == 1
    assert claim_one(conn, worker)["claim_epoch"] == 2
    assert violations(conn) == []


def test_parent_and_child_may_end_in_one_call(conn: Conn) -> None:
    worker, job = parent(conn)
    started = child(conn, worker, job)[3]
    claim_child(conn, worker)
    assert end(conn, worker, suspension(job, CHILD), End(started)) == 2
    assert status(conn, job) == "pending"
    assert violations(conn) == []


def test_a_child_that_fails_or_is_cancelled_is_told_of_and_that_stands(conn: Conn) -> None:
    worker, job = parent(conn)
    failing = held_for_child(conn, worker, job)
    claim_child(conn, worker)
    end(conn, worker, End(failing, 1, "failed", error={"type": "Boom", "message": "m"}))
    claim_one(conn, worker)
    answer, value, error, _ = child(conn, worker, job, epoch=2)
    assert (answer, value, error) == ("failed", None, {"status": "failed", "type": "Boom", "message": "m"})
    assert retry(conn, failing) == "reopened"
    assert get(conn, failing)["status"] == "pending"
    assert one(conn, "select parent_job from taskq.jobs where id = %s", failing) is None, "told already"
    assert child(conn, worker, job, epoch=2)[0] == "failed"
    other = child(conn, worker, job, "d", epoch=2)[3]
    assert cancel(conn, other) == "cancelled"
    answer, _, error, _ = child(conn, worker, job, "d", epoch=2)
    assert (answer, error["status"], error["type"]) == ("failed", "cancelled", "Cancelled")
    assert violations(conn) == []


def test_a_child_that_is_reopened_before_its_parent_has_looked_is_waited_for_again(conn: Conn) -> None:
    worker, job = parent(conn)
    started = held_for_child(conn, worker, job)
    claim_child(conn, worker)
    end(conn, worker, End(started, 1, "failed", error={"type": "Boom", "message": "m"}))
    assert retry(conn, started) == "reopened"
    claim_one(conn, worker)
    assert child(conn, worker, job, epoch=2)[0] == "waits"
    assert suspend(conn, worker, job, CHILD, epoch=2) == 1
    assert reason(conn, job) == ("held", "child")
    assert violations(conn) == []
    claim_child(conn, worker)
    end(conn, worker, End(started, 2))
    assert status(conn, job) == "pending"
    assert violations(conn) == []


def test_a_child_that_retention_has_dropped_before_its_parent_looked_counts_as_failed(conn: Conn) -> None:
    worker, job = parent(conn)
    started = held_for_child(conn, worker, job)
    claim_child(conn, worker)
    end(conn, worker, End(started))
    conn.execute("delete from taskq.history where id = %s", (started,))
    claim_one(conn, worker)
    answer, _, error, _ = child(conn, worker, job, epoch=2)
    assert (answer, error["status"], error["type"]) == ("failed", "gone", "JobNotFound")


def test_a_parent_that_asks_for_a_child_no_more_is_not_woken_by_it(conn: Conn) -> None:
    worker, job = parent(conn)
    old = child(conn, worker, job, "old")[3]
    end(conn, worker, End(job, 1, "retry"))
    make_due(conn, job)
    claim_one(conn, worker)
    held_for_child(conn, worker, job, "new", epoch=2)
    assert claim_child(conn, worker) == old
    end(conn, worker, End(old))
    assert reason(conn, job) == ("held", "child")
    assert violations(conn) == []


def test_a_run_is_waited_for_likewise(conn: Conn) -> None:
    worker, job = parent(conn)
    plan = store(conn, [node("a")], result=result_of(0))
    started = held_for_child(conn, worker, job, plan=plan)
    assert info(conn, started)["started_by"] == job
    do(conn, worker, "a", result={"n": 7})
    assert status(conn, job) == "pending"
    claim_one(conn, worker)
    assert child(conn, worker, job, plan=plan, epoch=2) == ("succeeded", '{"n": 7}', None, started)
    failing = child(conn, worker, job, "d", plan=plan, epoch=2)[3]
    do(conn, worker, "a", "failed")
    answer, _, error, _ = child(conn, worker, job, "d", plan=plan, epoch=2)
    assert (answer, error["status"], error["type"]) == ("failed", "failed", "RunFailed")
    assert rows(conn, "select child_run, status from taskq.children order by child_run") == [
        {"child_run": started, "status": "succeeded"},
        {"child_run": failing, "status": "failed"},
    ]
    assert violations(conn) == []


def test_a_signal_and_a_sleep_beside_a_child_wake_too(conn: Conn) -> None:
    control_clock(conn)
    worker, job = parent(conn)
    assert wait(conn, worker, job)[0] == "waits"
    started = child(conn, worker, job)[3]
    keys = [CHILD, ("wait", "go", 1), ("sleep", "s", 1)]
    assert suspend(conn, worker, job, *keys[:2]) == 1
    assert reason(conn, job) == ("held", "signal")
    assert send(conn, job) == "sent"
    claim_one(conn, worker)
    wait(conn, worker, job, "other", epoch=2)
    child(conn, worker, job, epoch=2)
    assert suspend(conn, worker, job, CHILD, ("wait", "other", 1), epoch=2) == 1
    assert reason(conn, job) == ("held", "signal")
    claim_child(conn, worker)
    end(conn, worker, End(started))
    assert status(conn, job) == "pending"
    claim_one(conn, worker)
    child(conn, worker, job, "d", epoch=3)
    sleep(conn, worker, job, 60, epoch=3)
    assert suspend(conn, worker, job, ("child", "d", 1), keys[2], epoch=3) == 1
    assert reason(conn, job) == ("held", "child")
    shift_clock(conn, "61 s")
    assert one(conn, "select taskq.wake_waiting()") == 1
    assert status(conn, job) == "pending"
    assert violations(conn) == []


def test_a_reopened_parent_starts_its_children_anew(conn: Conn) -> None:
    worker, job = parent(conn)
    first = child(conn, worker, job)[3]
    end(conn, worker, End(job, 1, "failed"))
    assert status(conn, first) == "pending", "a failure leaves them alone"
    assert retry(conn, job) == "reopened"
    claim_one(conn, worker)
    second = held_for_child(conn, worker, job, epoch=2)
    assert second != first
    assert claim_child(conn, worker) == first
    end(conn, worker, End(first))
    assert reason(conn, job) == ("held", "child")
    assert violations(conn) == []


def test_children_of_children_have_a_bound(conn: Conn) -> None:
    worker, job = parent(conn)
    started = child(conn, worker, job)[3]
    assert one(conn, "select depth from taskq.steps") == 1
    claim_child(conn, worker)
    assert child(conn, worker, started)[0] == "waits"
    plan = store(conn, [node("a")])
    run = child(conn, worker, started, "d", plan=plan)[3]
    [claimed] = claim(conn, worker, 1, tasks=["a"])
    assert child(conn, worker, claimed["job_id"])[0] == "waits"
    assert one(conn, "select array_agg(depth order by recorded_at) from taskq.steps") == [1, 2, 2, 3]
    conn.execute("update taskq.steps set depth = 100 where child_job = %s or child_run = %s", (started, run))
    call = "select * from taskq.start_child(%s, %s, 1, 'x', 1, '{}', '{}', null, null, null)"
    assert refused(conn, call, worker, started) == refused(conn, call, worker, claimed["job_id"]) == "WF041"


def test_a_child_cannot_stand_in_line_behind_who_waits_for_it(conn: Conn) -> None:
    policy(conn)
    worker = worker_for(conn)
    job = enqueue(conn, ordering_key="k")
    [row] = claim(conn, worker, 1)
    assert row["job_id"] == job
    call = "select * from taskq.start_child(%s, %s, 1, 'x', 1, '{}', '{}', 'k', null, null)"
    assert refused(conn, call, worker, job) == "WF042"
    started = held_for_child(conn, worker, job)
    claim_child(conn, worker)
    assert refused(conn, call, worker, started) == "WF042"
    assert child(conn, worker, started, ordering_key="other")[0] == "waits"
    assert violations(conn) == []


# Cancelled with their parent ------------------------------------------------------------------------------------------


def test_cancelling_a_parent_cancels_its_children_and_theirs(conn: Conn) -> None:
    worker, job = parent(conn)
    mine = child(conn, worker, job)[3]
    claim_child(conn, worker)
    theirs = held_for_child(conn, worker, mine)
    told = child(conn, worker, job, "told")[3]
    plan = store(conn, [node("a"), node("b")], on_failure="finish")
    run = child(conn, worker, job, "run", plan=plan)[3]
    [of_run] = claim(conn, worker, 1, tasks=["a"])
    runs = child(conn, worker, job, "runs")[3]
    assert suspend(conn, worker, job, CHILD) == 1
    assert {row["job_id"] for row in claim(conn, worker, 9, tasks=["c"], lanes=[("c", 5)])} == {theirs, told, runs}
    end(conn, worker, End(told))
    assert cancel(conn, job) == "cancelled"
    assert [status(conn, each) for each in (mine, theirs, told, runs)] == [
        "cancelled",
        "running",
        "succeeded",
        "running",
    ]
    requested = rows(conn, "select id from taskq.jobs where cancel_requested_at is not null")
    assert {row["id"] for row in requested} == {theirs, runs, of_run["job_id"]}
    assert info(conn, run)["cancel_requested_at"] is not None
    assert str(job) in get(conn, mine)["error"]["message"]
    assert one(conn, "select count(*) from taskq.child_rechecks") == 0
    assert violations(conn) == []


def test_one_that_is_cancelled_while_it_runs_takes_its_children_with_it_at_its_end(conn: Conn) -> None:
    worker, job = parent(conn)
    started = child(conn, worker, job)[3]
    assert cancel(conn, job) == "requested"
    assert status(conn, started) == "pending"
    assert suspend(conn, worker, job, CHILD) == 1
    assert (status(conn, job), status(conn, started)) == ("cancelled", "cancelled")
    worker, job = parent(conn)
    started = child(conn, worker, job)[3]
    conn.execute("update taskq.jobs set effect_class = 'pure' where id = %s", (job,))
    assert cancel(conn, job) == "requested"
    lose(conn, worker)
    assert settle(conn)[job] == "cancelled"
    assert status(conn, started) == "cancelled"
    assert violations(conn) == []


def test_a_long_line_of_children_is_cancelled_to_its_end(conn: Conn) -> None:
    worker, job = parent(conn)
    line = [job]
    for _ in range(12):
        line.append(held_for_child(conn, worker, line[-1]))
        assert claim_child(conn, worker) == line[-1]
    end(conn, worker, End(line[-1], 1, "release"))
    assert cancel(conn, job) == "cancelled"
    assert 5 < sum(status(conn, each) == "cancelled" for each in line) < 13
    assert "sweep" in duties(conn)
    assert violations(conn) == []
    for _ in range(3):
        conn.execute("select * from taskq.sweep()")
    assert {status(conn, each) for each in line} == {"cancelled"}
    assert "sweep" not in duties(conn)
    assert violations(conn) == []


def duties(conn: Conn) -> list[str]:
    found = rows(conn, "select * from taskq.look(%s, 30, null, '{q}', '{t}')", register(conn))
    return [row["name"] for row in found if row["kind"] == "duty"]


# The check ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    ["null, null, 1, false, null, null", "{id}, {id}, 1, false, null, null", "{id}, null, null, false, null, null"]
    + ["{id}, null, 1, true, null, null", "{id}, null, 1, true, '1', '1'", "{id}, null, 1, false, '1', null"]
    + ["{id}, null, 0, false, null, null"],
)
def test_the_table_refuses_children_that_are_none(conn: Conn, row: str) -> None:
    _, job = parent(conn)
    insert = (
        "insert into taskq.steps (job_id, generation, kind, name, occurrence, claim_epoch, recorded_at, child_job,"
        " child_run, depth, done, value, error) values (%s, 0, 'child', 'x', 1, 1, now(), "
    )
    given = row.format(id=f"'{job}'")
    assert refused(conn, f"{insert}{given})", job) == "23514"
    step = insert.replace("'child'", "'step'")
    assert refused(conn, f"{step}'{job}', null, null, true, '1', null)", job) == "23514"


FORGERIES: list[tuple[str, str]] = [
    ("held_for_no_child", "delete from taskq.steps where job_id = %s"),
    ("child_not_told", "delete from taskq.jobs where parent_job = %s"),
    ("child_of_another", "update taskq.jobs set parent_job = null where parent_job = %s"),
    (
        "child_outlives_cancelled",
        "update taskq.history set status = 'cancelled' where id = %s",
    ),
]


@pytest.mark.parametrize(("code", "forge"), FORGERIES)
def test_a_forged_child_is_reported_for_its_parent(conn: Conn, code: str, forge: str) -> None:
    held_for_child(conn, *parent(conn))
    worker, job = parent(conn)
    held_for_child(conn, worker, job)
    if code == "child_outlives_cancelled":
        conn.execute("alter table taskq.history disable trigger history_append_only")
        conn.execute("update taskq.jobs set deadline = taskq.now() where id = %s", (job,))
        conn.execute("select * from taskq.sweep()")
        conn.execute("delete from taskq.ledger where job_id = %s" if False else "select %s", (job,))
    assert conn.execute("alter table taskq.jobs disable trigger parent_told")
    before = set(violations(conn, "live"))
    assert conn.execute(forge, (job,)).rowcount == 1
    assert set(violations(conn, "live")) - before == {(code, job)}


def test_each_check_of_children_has_its_forgery(conn: Conn) -> None:
    text = one(conn, "select prosrc from pg_proc where oid = 'taskq.check_children()'::regprocedure")
    assert set(re.findall(r"select \d+, '(\w+)'", text)) == {code for code, _ in FORGERIES}


def test_a_line_in_the_rechecks_is_no_fault(conn: Conn) -> None:
    worker, job = parent(conn)
    started: Any = held_for_child(conn, worker, job)
    conn.execute("alter table taskq.jobs disable trigger parent_told")
    claim_child(conn, worker)
    end(conn, worker, End(started))
    assert violations(conn, "live") == [("child_not_told", job)]
    conn.execute("insert into taskq.child_rechecks values (%s, taskq.now())", (job,))
    assert violations(conn) == []
    assert "sweep" in duties(conn)
    conn.execute("select * from taskq.sweep()")
    assert status(conn, job) == "pending"
    assert "sweep" not in duties(conn)
    assert isinstance(conn, psycopg.Connection)


def test_a_child_whose_outcome_is_unknown_does_not_run_again_once_its_parent_was_cancelled(conn: Conn) -> None:
    worker, job = parent(conn)
    started = held_for_child(conn, worker, job)
    claim_child(conn, worker)
    assert end(conn, worker, End(started, outcome="unknown", error={"reason": "timed_out"})) == 1
    assert cancel(conn, job) == "cancelled"
    assert status(conn, started) == "unknown"
    assert violations(conn) == []
    assert resolve(conn, started, happened=False) == "cancelled"
    assert violations(conn) == []


def test_a_child_that_is_reopened_after_its_parent_was_cancelled_is_on_its_own(conn: Conn) -> None:
    worker, job = parent(conn)
    started = child(conn, worker, job)[3]
    run = child(conn, worker, job, "run", plan=store(conn, [node("a")]))[3]
    assert suspend(conn, worker, job, CHILD, ("child", "run", 1)) == 1
    assert cancel(conn, job) == "cancelled"
    assert status(conn, started) == "cancelled"
    assert retry(conn, started) == "reopened"
    assert one(conn, "select taskq.retry_run(%s)", run) == "reopened"
    assert violations(conn) == []
    assert one(conn, "select taskq.sweep_children()") == 0
    assert status(conn, started) == "pending"
    assert info(conn, run)["status"] == "running"


def test_a_child_of_a_run_below_cannot_stand_in_line_behind_who_waits_for_that_run(conn: Conn) -> None:
    policy(conn)
    worker, job = running(conn, worker_for(conn), ordering_key="k")
    run = child(conn, worker, job, "run", plan=store(conn, [node("a")]))[3]
    [of_run] = claim(conn, worker, 1, tasks=["a"])
    assert one(conn, "select run_id from taskq.jobs where id = %s", of_run["job_id"]) == run
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        child(conn, worker, of_run["job_id"], ordering_key="k")
    assert caught.value.sqlstate == "WF042"
    below = child(conn, worker, of_run["job_id"], "below")[3]
    claim_child(conn, worker)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        child(conn, worker, below, ordering_key="k")
    assert caught.value.sqlstate == "WF042"


def test_a_child_that_was_left_and_is_asked_for_again_is_no_fault(conn: Conn) -> None:
    worker, job = parent(conn)
    child(conn, worker, job)
    assert wait(conn, worker, job)[0] == "waits"
    assert suspend(conn, worker, job, CHILD) == 1
    claim_child(conn, worker)
    end(conn, worker, End(one(conn, "select child_job from taskq.steps where kind = 'child'")))
    claim_one(conn, worker)
    left = "select taskq.leave_steps(%s, %s, 2, array['child', 'wait'], array['c', 'go'], array[1, 1])"
    assert one(conn, left, worker, job) == 2
    lose(conn, worker)
    assert settle(conn)[job] == "pending"
    worker = worker_for(conn)
    claim_one(conn, worker)
    assert wait(conn, worker, job, epoch=3)[0] == "waits"
    assert child(conn, worker, job, epoch=3)[0] == "succeeded"
    assert violations(conn) == []

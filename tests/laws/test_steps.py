"""Recorded steps in the database: under the fence, once, by generation, kept with their job and no longer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb
from sql import (
    NOBODY,
    End,
    claim_one,
    control_clock,
    dump,
    end,
    enqueue,
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
    shift_clock,
    unknown,
    violations,
)

Conn = psycopg.Connection[Any]
Step = tuple[UUID, UUID, int, str, int, object]


def record(conn: Conn, *steps: Step, wait: bool = True) -> list[str]:
    """Record (worker, job, epoch, name, occurrence, value); the answers, in order."""
    columns = [list(column) for column in zip(*steps, strict=True)]
    columns[5] = [Jsonb(value) for value in columns[5]]
    found = rows(
        conn,
        "select * from taskq.record_steps(%s::uuid[], %s::uuid[], %s::bigint[], %s::text[], %s::int[], %s::jsonb[],"
        " %s)",
        *columns,
        wait,
    )
    return [row["answer"] for row in sorted(found, key=lambda row: row["n"])]


def steps(conn: Conn, job: UUID) -> list[tuple[Any, ...]]:
    found = rows(
        conn,
        "select generation, name, occurrence, claim_epoch, value from taskq.steps where job_id = %s order by 1, 2, 3",
        job,
    )
    return [tuple(row.values()) for row in found]


def leave(conn: Conn, worker: UUID, job: UUID, epoch: int, *names: str) -> int:
    n: int = one(
        conn,
        "select taskq.leave_steps(%s, %s, %s, %s::text[], %s::text[], %s::int[])",
        worker,
        job,
        epoch,
        ["step"] * len(names),
        list(names),
        [1] * len(names),
    )
    return n


def test_steps_of_many_jobs_are_recorded_in_one_call_each_under_its_own_fence(conn: Conn) -> None:
    worker, a = running(conn)
    other, b = running(conn)
    answers = record(
        conn,
        (worker, a, 1, "x", 1, {"n": 1}),
        (other, b, 1, "x", 1, None),
        (other, a, 1, "y", 1, 1),
        (worker, a, 2, "y", 1, 1),
        (NOBODY, NOBODY, 1, "y", 1, 1),
        (worker, a, 1, "x", 2, [2]),
    )
    assert answers == ["recorded", "recorded", "fenced", "fenced", "fenced", "recorded"]
    assert steps(conn, a) == [(0, "x", 1, 1, {"n": 1}), (0, "x", 2, 1, [2])]
    assert steps(conn, b) == [(0, "x", 1, 1, None)]
    assert one(conn, "select value::text from taskq.steps where job_id = %s", b) == "null"
    assert violations(conn) == []


@pytest.mark.parametrize(
    ("value", "answer"), [({"n": 1, "m": 2}, "replay"), ({"m": 2, "n": 1}, "replay"), ({"n": 1}, "conflict")]
)
def test_the_same_again_is_a_replay_another_value_a_conflict_and_neither_changes_anything(
    conn: Conn, value: object, answer: str
) -> None:
    worker, job = running(conn)
    record(conn, (worker, job, 1, "x", 1, {"n": 1, "m": 2}))
    before = dump(conn)
    assert record(conn, (worker, job, 1, "x", 1, value)) == [answer]
    assert dump(conn) == before


def test_a_later_attempt_finds_the_record_and_cannot_change_it(conn: Conn) -> None:
    old, job = running(conn)
    record(conn, (old, job, 1, "x", 1, 1))
    lose(conn, old)
    assert settle(conn) == {job: "pending"}
    new = register(conn)
    make_due(conn, job)
    claim_one(conn, new)
    assert record(conn, (old, job, 1, "y", 1, 1)) == ["fenced"]
    assert record(conn, (new, job, 2, "x", 1, 1), (new, job, 2, "x", 1, 2)) == ["replay", "conflict"]
    assert steps(conn, job) == [(0, "x", 1, 1, 1)]
    assert violations(conn) == []


def test_an_attempt_that_is_over_or_unknown_records_nothing(conn: Conn) -> None:
    worker, job = running(conn)
    lost, doubtful = unknown(conn)
    end(conn, worker, End(job, 1))
    before = dump(conn)
    assert record(conn, (worker, job, 1, "x", 1, 1), (lost, doubtful, 1, "x", 1, 1)) == ["fenced", "fenced"]
    assert dump(conn) == before


def test_a_reopened_job_has_a_generation_of_its_own(conn: Conn) -> None:
    worker, job = running(conn)
    record(conn, (worker, job, 1, "x", 1, 1))
    end(conn, worker, End(job, 1, "failed"))
    assert retry(conn, job) == "reopened"
    make_due(conn, job)
    claim_one(conn, worker)
    assert record(conn, (worker, job, 2, "x", 1, 2)) == ["recorded"]
    assert steps(conn, job) == [(0, "x", 1, 1, 1), (1, "x", 1, 2, 2)]
    shown = rows(conn, "select generation, current, left_out from taskq.job_steps where job_id = %s order by 1", job)
    assert [tuple(row.values()) for row in shown] == [(0, False, False), (1, True, False)]
    assert violations(conn) == []


def test_what_was_left_is_noted_under_the_fence_and_shown_once_the_attempt_has_succeeded(conn: Conn) -> None:
    worker, job = running(conn)
    record(conn, (worker, job, 1, "x", 1, 1), (worker, job, 1, "y", 1, 1))
    end(conn, worker, End(job, 1, "retry"))
    assert leave(conn, worker, job, 1, "x") == 0
    make_due(conn, job)
    claim_one(conn, worker)
    assert leave(conn, worker, job, 1, "x") == leave(conn, NOBODY, job, 2, "x") == 0
    assert leave(conn, worker, job, 2, "x", "z") == 1
    shown = "select name from taskq.job_steps where job_id = %s and left_out"
    assert rows(conn, shown, job) == []
    assert violations(conn) == []
    end(conn, worker, End(job, 2))
    assert [row["name"] for row in rows(conn, shown, job)] == ["x"]
    assert violations(conn) == []


@pytest.mark.parametrize(("name", "occurrence"), [("a b", 1), ("", 1), ("x" * 129, 1), ("x", 0)])
def test_the_table_refuses_names_that_are_none(conn: Conn, name: str, occurrence: int) -> None:
    worker, job = running(conn)
    with pytest.raises(psycopg.errors.CheckViolation), conn.transaction():
        record(conn, (worker, job, 1, name, occurrence, 1))
    assert refused(conn, "update taskq.jobs set id = id") == ""


def test_steps_are_forgotten_with_their_job_a_bounded_number_at_a_time(conn: Conn) -> None:
    control_clock(conn)
    worker, job = running(conn)
    record(conn, *[(worker, job, 1, "x", n, n) for n in range(1, 4)])
    shift_clock(conn, "40 days")
    assert one(conn, "select taskq.prune_steps()") == 0, "the job is still there"
    conn.execute("select taskq.ensure_partitions()")
    end(conn, worker, End(job, 1))
    assert one(conn, "select taskq.prune_steps()") == 0, "it is in history"
    conn.execute("delete from taskq.history where id = %s", (job,))
    assert one(conn, "select taskq.prune_steps(2)") == 2
    assert one(conn, "select taskq.prune()") == 1
    assert steps(conn, job) == []


# The check -----------------------------------------------------------------------------------------------------------


def waiting(conn: Conn) -> UUID:
    """A job that failed after it had recorded a step, and runs in its second attempt, which has recorded another."""
    worker, job = running(conn)
    record(conn, (worker, job, 1, "first", 1, 1))
    end(conn, worker, End(job, 1, "retry"))
    make_due(conn, job)
    claim_one(conn, worker)
    record(conn, (worker, job, 2, "second", 1, 1))
    return job


def done(conn: Conn) -> UUID:
    """A job that has succeeded in its second attempt, each of which recorded a step."""
    job = waiting(conn)
    end(conn, get(conn, job)["worker_id"], End(job, 2))
    return job


def reopened(conn: Conn) -> UUID:
    job = waiting(conn)
    end(conn, get(conn, job)["worker_id"], End(job, 2, "failed"))
    assert retry(conn, job) == "reopened"
    return job


UNTOLD = "set done = false, value = null, effect_started_at = recorded_at"
FORGERIES: list[tuple[str, Callable[[Conn], UUID], str, str]] = [
    # code, of which job, how it is forged, the smallest scope that reports it
    ("step_of_no_attempt", waiting, "set claim_epoch = 3 where name = 'second' and job_id = %s", "live"),
    ("step_of_no_attempt", reopened, "set claim_epoch = 3 where name = 'second' and job_id = %s", "live"),
    ("step_of_no_attempt", done, "set claim_epoch = 3 where name = 'second' and job_id = %s", "all"),
    ("step_of_other_generation", waiting, "set generation = 1 where name = 'first' and job_id = %s", "live"),
    ("step_of_other_generation", waiting, "set generation = 1 where name = 'second' and job_id = %s", "live"),
    ("step_of_other_generation", reopened, "set generation = 1 where name = 'second' and job_id = %s", "live"),
    ("step_left_by_no_attempt", waiting, "set left_by = 3 where name = 'first' and job_id = %s", "live"),
    ("step_left_by_no_attempt", waiting, "set left_by = 1 where name = 'second' and job_id = %s", "live"),
    ("step_untold", waiting, "{untold} where name = 'second' and job_id = %s", "live"),
    ("step_untold", done, "{untold} where name = 'second' and job_id = %s", "all"),
    ("step_of_no_job", waiting, "set job_id = '{nowhere}' where name = 'first' and job_id = %s", "all"),
]


@pytest.mark.parametrize(("code", "of", "forge", "scope"), FORGERIES)
def test_a_forged_step_is_reported_for_its_job(
    conn: Conn, code: str, of: Callable[[Conn], UUID], forge: str, scope: str
) -> None:
    bystander, job = waiting(conn), of(conn)
    assert violations(conn) == []
    assert conn.execute(f"update taskq.steps {forge.format(nowhere=NOBODY, untold=UNTOLD)}", (job,)).rowcount == 1
    whose = NOBODY if code == "step_of_no_job" else job
    assert set(violations(conn)) == {(code, whose)}
    assert violations(conn, "live") == ([(code, whose)] if scope == "live" else [])
    assert bystander != job


def test_each_check_of_steps_has_its_forgery(conn: Conn) -> None:
    text = one(conn, "select prosrc from pg_proc where oid = 'taskq.check_steps(text)'::regprocedure")
    live, every = text.split("if scope = 'all' then", 1)
    checks = {
        (scope, code)
        for scope, part in (("live", live), ("all", every))
        for code in re.findall(r"select \d+, '(step_\w+)'", part)
    }
    assert checks == {(scope, code) for code, _, _, scope in FORGERIES}


def test_steps_of_attempts_that_were_pruned_or_resolved_are_no_violation(conn: Conn) -> None:
    job = waiting(conn)
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        conn.execute("delete from taskq.ledger where job_id = %s", (job,))
        conn.execute("update taskq.jobs set pruned_attempts = 1 where id = %s", (job,))
    _, doubtful = unknown(conn)
    resolve(conn, doubtful, happened=False)
    assert violations(conn) == []
    assert enqueue(conn) != job

"""The table of transitions in code against the triggers of the database, pair by pair, as a superuser with raw SQL."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import psycopg
import pytest

from taskq.transitions import FINISHED, LIVE, TRANSITIONS, Status, exists, refusal

WORKER = UUID(int=7)
_COLUMNS = """run_at, created_at, claimed_at, claim_epoch, deadline, attempt, max_attempts, recoveries, retry_afters,
    snoozes, releases, generation, priority, effect_class, queue, task, policy_id, payload"""


def place(conn: psycopg.Connection, status: Status) -> UUID:
    """A job in a status, brought there by listed steps only."""
    row = conn.execute(
        "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload) "
        "values (now(), now(), 3, 'q', 't', 'p', '{}') returning id"
    ).fetchone()
    assert row is not None
    job: UUID = row[0]
    steps: dict[str, tuple[Status, ...]] = {
        "pending": (),
        "held": ("held",),
        "running": ("running",),
        "unknown": ("running", "unknown"),
        "succeeded": ("running", "succeeded"),
        "failed": ("running", "failed"),
        "cancelled": ("running", "cancelled"),
    }
    at: Status = "pending"
    for target in steps[status]:
        move(conn, job, at, target)
        at = target
    return job


def move(conn: psycopg.Connection, job: UUID, source: Status, target: Status) -> None:
    """Go from a status to another by raw statements, as well as anybody could who has no function to call."""
    if target in FINISHED:
        finish(conn, job, source, target)
    elif source in FINISHED:
        reopen(conn, job, target)
    else:
        claims = source == "pending" and target == "running"
        claimed = target in ("running", "unknown")
        held = None if target != "held" else "ordering" if source in ("running", "unknown") else "paused"
        conn.execute(
            "update taskq.jobs set status = %s, claim_epoch = claim_epoch + %s, claimed_by = %s, "
            "claimed_at = case when %s then now() end, held_reason = %s, ordering_key = %s where id = %s",
            [target, int(claims), WORKER if claimed else None, claimed, held, "k" if held == "ordering" else None, job],
        )


def finish(conn: psycopg.Connection, job: UUID, source: Status, target: Status) -> None:
    if source in FINISHED:
        conn.execute("update taskq.history set status = %s, outcome = %s where id = %s", [target, target, job])
        return
    conn.execute(
        f"with gone as (delete from taskq.jobs where id = %s returning *) "
        f"insert into taskq.history (id, finished_at, worker_id, outcome, status, {_COLUMNS}) "
        f"select id, now(), claimed_by, case when claimed_by is not null then %s end, %s, {_COLUMNS} from gone",
        [job, target, target],
    )


def reopen(conn: psycopg.Connection, job: UUID, target: Status) -> None:
    """The whole move that ``retry`` makes, with the status of one's choice, and no look at what the job was."""
    claimed = target in ("running", "unknown")
    conn.execute(
        "insert into taskq.ledger (job_id, ended_at, claimed_at, claim_epoch, worker_id, attempt, generation, outcome) "
        "select id, finished_at, claimed_at, claim_epoch, worker_id, attempt, generation, outcome from taskq.history "
        "where id = %s",
        [job],
    )
    row = conn.execute("delete from taskq.history where id = %s returning claim_epoch, generation", [job]).fetchone()
    assert row is not None
    conn.execute(
        "insert into taskq.jobs (id, run_at, created_at, max_attempts, queue, task, policy_id, payload, claim_epoch, "
        "generation, status, claimed_by, claimed_at, held_reason) "
        "values (%s, now(), now(), 3, 'q', 't', 'p', '{}', %s, %s, %s, %s, case when %s then now() end, %s)",
        [job, row[0], row[1] + 1, target, WORKER if claimed else None, claimed, "paused" if target == "held" else None],
    )


def refused_with(conn: psycopg.Connection, action: Callable[[], object]) -> tuple[str, str] | None:
    """SQLSTATE and detail of a refusal, nothing having changed; None if the action went through."""
    try:
        with conn.transaction():
            action()
    except psycopg.Error as exc:
        return exc.sqlstate or "", exc.diag.message_detail or ""
    return None


PAIRS = [(a, b) for a in (*LIVE, *FINISHED) for b in (*LIVE, *FINISHED) if a != b]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_pair_goes_as_the_table_says(conn: psycopg.Connection, source: Status, target: Status) -> None:
    job = place(conn, source)
    got = refused_with(conn, lambda: move(conn, job, source, target))
    assert (got[0] if got else None) == refusal(source, target)
    if got:
        assert str(job) in got[1]
    row = conn.execute("select status from taskq.all_jobs where id = %s", [job]).fetchall()
    assert row == [(source if got else target,)]


@pytest.mark.parametrize("target", [*LIVE, *FINISHED])
def test_a_job_is_born_as_the_table_says(conn: psycopg.Connection, target: Status) -> None:
    claimed = target in ("running", "unknown")
    values = [target, WORKER if claimed else None, claimed, int(claimed), "paused" if target == "held" else None]
    insert = (
        "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload, status, "
        "claimed_by, claimed_at, claim_epoch, held_reason) "
        "values (now(), now(), 3, 'q', 't', 'p', '{}', %s, %s, case when %s then now() end, %s, %s)"
    )
    got = refused_with(conn, lambda: conn.execute(insert, values))
    assert (got[0] if got else None) == refusal(None, target)


@pytest.mark.parametrize("source", FINISHED)
def test_reopening_is_for_what_has_not_succeeded(conn: psycopg.Connection, source: Status) -> None:
    job = place(conn, source)
    got = refused_with(conn, lambda: conn.execute("select taskq.retry(%s)", [job]))
    assert (got[0] if got else None) == (None if exists(source, "pending") else "WF012")


def test_the_table_names_functions_outcomes_and_counters_that_are_there(conn: psycopg.Connection) -> None:
    functions = {
        name for (name,) in conn.execute("select proname from pg_proc where pronamespace = 'taskq'::regnamespace")
    }
    columns = {
        name for (name,) in conn.execute("select attname from pg_attribute where attrelid = 'taskq.jobs'::regclass")
    }
    (check,) = conn.execute(
        "select pg_get_constraintdef(oid) from pg_constraint "
        "where conname = 'ledger_outcome' and conrelid = 'taskq.ledger'::regclass"
    ).fetchone() or ("",)
    for t in TRANSITIONS:
        assert t.function is None or t.function in functions, t
        assert t.counter is None or t.counter in columns, t
        assert t.outcome is None or f"'{t.outcome}'" in check, t
        # An attempt ends exactly where a job leaves running or unknown, but for waiting for its outcome.
        assert (t.outcome is not None) == (t.source in ("running", "unknown") and t.target != "unknown"), t
    assert len(set(TRANSITIONS)) == len(TRANSITIONS)

"""The database under the model: made small, emptied before each program, and read into the model's own terms."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg
from model import (
    HISTORY_RETENTION,
    KEY_RETENTION,
    MAX_RECOVERIES,
    PARTITIONS_AHEAD,
    Attempt,
    IdempotencyKey,
    Job,
    Model,
    UniqueKey,
    Worker,
)
from psycopg import sql
from psycopg.rows import class_row, dict_row
from sql import Conn, Row, control_clock, policy, rows

NOON = datetime.now(UTC).replace(hour=12, minute=0, second=0, microsecond=0)
"""Where the clock starts. Of today, since ids carry the time of day that they were made at."""
EMPTIED = (
    "jobs",
    "history",
    "ledger",
    "workers",
    "unique_keys",
    "idempotency_keys",
    "queues",
    "audit",
    "unknowns",
    "sleepers",
)
PARTITIONS = "select parent, name, day from taskq.partitions"

UNFINISHED = """
    select id, created_at, run_at, deadline, queue, task, priority, max_attempts, effect_class, policy_id,
           required_worker_schema, (payload->>'n')::int as payload, unique_scope, unique_key, status, claim_epoch,
           claimed_by as worker, claimed_at, effect_started_at, cancel_requested_at, attempt, recoveries, retry_afters,
           snoozes, releases, generation, pruned_attempts, null::timestamptz as finished_at, null as outcome,
           null::bigint as outcome_id, null::int as result, null as error
      from taskq.jobs
"""
FINISHED = """
    select id, created_at, run_at, deadline, queue, task, priority, max_attempts, effect_class, policy_id,
           required_worker_schema, (payload->>'n')::int as payload, unique_scope, unique_key, status, claim_epoch,
           worker_id as worker, claimed_at, effect_started_at, cancel_requested_at, attempt, recoveries, retry_afters,
           snoozes, releases, generation, pruned_attempts, finished_at, outcome, outcome_id, (result #>> '{}')::int,
           error->>'type'
      from taskq.history
"""
LEDGER = """
    select job_id, claim_epoch, generation, attempt, worker_id, outcome, outcome_id, claimed_at, effect_started_at,
           ended_at, error->>'type' as error
      from taskq.ledger
"""
WORKERS = """
    select id, status, capability_level, extract(epoch from lease)::float8 as lease, renewed_at, lease_expires_at,
           ended_at
      from taskq.workers
"""


def prepare(conn: Conn) -> None:
    """Stop the clock, store the policies, and keep only a few days' partitions."""
    control_clock(conn)
    for name, bound in MAX_RECOVERIES.items():
        policy(conn, name, max_recoveries=bound)
    conn.execute(
        "update taskq.installation set history_retention = %s, key_retention = %s, partitions_ahead = %s",
        (HISTORY_RETENTION, KEY_RETENTION, PARTITIONS_AHEAD),
    )
    empty(conn)


def empty(conn: Conn) -> Model:
    """Put the database back to its start; gives the model of it."""
    emptied = "; ".join(f"delete from taskq.{name}" for name in EMPTIED)
    conn.execute(f"begin; set local session_replication_role = replica; {emptied}; commit")
    set_clock(conn, NOON)
    first = {(parent, NOON.date()) for parent in ("history", "ledger")}
    model = Model(NOON, first)
    model.ensure_partitions()
    there = rows(conn, PARTITIONS)
    if {(found["parent"], found["day"]) for found in there} != model.partitions:
        for found in there:
            if (found["parent"], found["day"]) not in model.partitions:
                conn.execute(sql.SQL("drop table taskq.{}").format(sql.Identifier(found["name"])))
        conn.execute("select taskq.ensure_partitions()")
    return model


def keep(conn: Conn) -> None:
    """Keep the rows that are there now, for ``restore``."""
    conn.execute("drop schema if exists kept cascade; create schema kept")
    for name in EMPTIED:
        conn.execute(sql.SQL("create table kept.{0} as table taskq.{0}").format(sql.Identifier(name)))


def restore(conn: Conn) -> None:
    """Put the database back to what was kept, in one round trip; the clock and the partitions stay."""
    back = "; ".join(f"delete from taskq.{name}; insert into taskq.{name} table kept.{name}" for name in EMPTIED)
    conn.execute(f"begin; set local session_replication_role = replica; {back}; commit")


def set_clock(conn: Conn, now: datetime) -> None:
    """Stop the database's clock at an instant."""
    conn.execute("update public.clock set stopped = %s", (now,))


def reported(broken: list[Row]) -> set[tuple[str, UUID]]:
    """What ``check_invariants`` has found, as codes with their jobs."""
    return {(row["code"], row["job_id"]) for row in broken}


def look(conn: Conn) -> tuple[Model, list[Row]]:
    """All that the model knows, as it stands in the tables, and what ``check_invariants`` reports of everything.

    Raises:
        AssertionError: A job or an attempt stands there twice.
    """
    # One round trip for all, which halves the time that the tests take.
    with conn.pipeline(), ExitStack() as stack:
        cursors = [stack.enter_context(psycopg.Cursor(conn, row_factory=factory)) for factory, _ in READS]
        for cursor, (_, query) in zip(cursors, READS, strict=True):
            cursor.execute(query)
        jobs, ended, workers, unique, idempotency, queues, audit, unknowns, parts, clock, broken = (
            c.fetchall() for c in cursors
        )
    found = Model(clock[0]["now"], {(row["parent"], row["day"]) for row in parts})
    found.jobs = {job.id: job for job in jobs}
    assert len(found.jobs) == len(jobs), "a job stands in two places"
    found.ledger = {(attempt.job_id, attempt.claim_epoch): attempt for attempt in ended}
    assert len(found.ledger) == len(ended), "an attempt is on record twice"
    found.workers = {worker.id: worker for worker in workers}
    for row in unique:
        found.unique[row["scope"], row["key"]] = UniqueKey(row["job_id"], row["hold_for"], row["expires_at"])
    for row in idempotency:
        found.idempotency[row["scope"], row["key"]] = IdempotencyKey(
            row["fingerprint"], row["job_id"], row["created_at"], row["expires_at"]
        )
    found.queues = {row["name"]: row["paused_at"] for row in queues}
    found.audit = [(row["action"], row["subject"]) for row in audit]
    found.unknowns = {(row["job_id"], row["claim_epoch"]): row["since"] for row in unknowns}
    return found, broken


READS: tuple[tuple[Any, str], ...] = (
    (class_row(Job), f"{UNFINISHED} union all {FINISHED}"),
    (class_row(Attempt), LEDGER),
    (class_row(Worker), WORKERS),
    (dict_row, "select * from taskq.unique_keys"),
    (dict_row, "select * from taskq.idempotency_keys"),
    (dict_row, "select name, paused_at from taskq.queues"),
    (dict_row, "select action, subject from taskq.audit"),
    (dict_row, "select job_id, claim_epoch, since from taskq.unknowns"),
    (dict_row, PARTITIONS),
    (dict_row, "select taskq.now() as now"),
    (dict_row, "select * from taskq.check_invariants('all')"),
)


def differences(expected: Model, found: Model) -> list[str]:
    """What stands in the tables otherwise than the model says; empty where all agrees."""
    lines: list[str] = []
    for name in ("jobs", "ledger", "workers", "unique", "idempotency", "queues", "unknowns"):
        want, have = getattr(expected, name), getattr(found, name)
        if name == "idempotency":  # the model remembers the request, the database its hash
            want = {key: value._replace(request="") for key, value in want.items()}
            have = {key: value._replace(request="") for key, value in have.items()}
        for key in sorted(want.keys() | have.keys(), key=str):
            if want.get(key) != have.get(key):
                lines.append(f"{name} {key}: expected {want.get(key)}, found {have.get(key)}")
    if sorted(expected.audit) != sorted(found.audit):
        lines.append(f"audit: expected {expected.audit}, found {found.audit}")
    if expected.partitions != found.partitions:
        lines.append(f"partitions: expected {sorted(expected.partitions)}, found {sorted(found.partitions)}")
    return lines

"""Preparations and incidents by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import psycopg
import pytest
from helpers import eventually
from psycopg.types.json import Jsonb
from runs_kit import edge, node, result_of, start, store, take
from sql import BOUND, Conn, detail, one, policy, rows

HOLDS = "holds"
"""A policy whose jobs are held once they have been recovered twice."""
FAILED = {"type": "Boom", "message": "connection 17 to 10.0.0.1 is gone"}


def holding(conn: Conn, recoveries: int = 2) -> str:
    # Without a delay, so that what comes back is due.
    curve = {"kind": "constant", "base": 0, "factor": 2, "cap": 1, "jitter": 0}
    return policy(conn, HOLDS, on_exhausted="hold", max_recoveries=recoveries, retry={"backoff": curve})


def pair(conn: Conn, recoveries: int = 2, **more: Any) -> UUID:
    """A run of a and b in a row; both are held once their recoveries are exhausted."""
    of = {"policy_id": holding(conn, recoveries)}
    nodes = [node("a", **of), node("b", {"x": result_of(0), "rate": {"value": 3}}, **of)]
    return start(conn, store(conn, nodes, [edge(0, 1)], **more))


def begin(conn: Conn, worker: UUID, claimed: Mapping[str, Any]) -> dict[str, Any]:
    """Begin a preparation; what it is told."""
    [row] = rows(
        conn,
        "select * from taskq.begin_preparation(%s, %s, %s)",
        worker,
        claimed["job_id"],
        claimed["claim_epoch"],
    )
    return {
        "answer": row["answer"],
        "facts": {} if row["facts"] is None else json.loads(row["facts"]),
        "approved": [] if row["approved"] is None else json.loads(row["approved"]),
    }


def answer(
    conn: Conn, worker: UUID, claimed: Mapping[str, Any], said: str, details: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Answer a preparation, again while somebody is at its run; what became of the claim."""
    query = "select * from taskq.end_preparation(%s, %s, %s, %s, %s)"
    told = (worker, claimed["job_id"], claimed["claim_epoch"], said, Jsonb(dict(details or {})))
    return eventually(lambda: busy_as_none(rows(conn, query, *told)[0]), BOUND)


def busy_as_none(row: dict[str, Any]) -> dict[str, Any] | None:
    return None if row["became"] == "busy" else row


def prepare(
    conn: Conn, worker: UUID, task: str, said: str, details: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], str]:
    """Claim the one due job of a task and have its preparation answer so; the claim, and what became of it."""
    # What came back comes back after a moment.
    soon = "task = %s and status = 'pending' and run_at < now() + interval '1 s'"
    conn.execute(f"update taskq.jobs set run_at = now() where {soon}", (task,))
    [claimed] = take(conn, worker, task).values()
    assert begin(conn, worker, claimed)["answer"] == "go"
    return claimed, answer(conn, worker, claimed, said, details)["became"]


def grant(conn: Conn, incident: UUID, reason: str | None = "it is mended") -> str:
    return str(one(conn, "select taskq.grant_recovery(%s, %s, 'me')", incident, reason))


def refusal(conn: Conn, state: str, incident: UUID, reason: str = "why") -> dict[str, Any]:
    """The detail of what the database says to that grant."""
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        grant(conn, incident, reason)
    assert caught.value.sqlstate == state, caught.value
    return detail(caught.value)


def current(conn: Conn, job: UUID) -> dict[str, Any]:
    [row] = rows(conn, "select * from taskq.incidents where job_id = %s and is_current", job)
    return row


def events(conn: Conn, incident: UUID) -> list[str]:
    found = rows(conn, "select kind from taskq.incident_events where incident_id = %s order by n", incident)
    return [row["kind"] for row in found]

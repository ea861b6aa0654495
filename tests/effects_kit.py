"""Jobs that promise terminal effects, by hand: policies with promises, and what came of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import UUID

import psycopg
from sql import enqueue, policy, rows

Conn = psycopg.Connection[Any]
Row = dict[str, Any]
EVERY = ("succeeded", "failed", "cancelled")
WHOLE = {
    "why": {"of": "error"},
    "came": {"of": "result"},
    "how": {"of": "status"},
    "whose": {"of": "job_id"},
    "again": {"of": "generation"},
    "order": {"arg": "order", "default": 0},
    "fixed": {"value": 7},
}


def effect(
    name: str = "refund",
    on: Iterable[str] = EVERY,
    *,
    task: str = "t",
    queue: str = "q",
    policy_id: str = "p",
    payload: Mapping[str, Any] | None = None,
    **more: Any,
) -> Row:
    """One promise, as the spec of a policy has it."""
    return {
        "name": name,
        "on": list(on),
        "task": task,
        "queue": queue,
        "priority": 5,
        "max_attempts": 2,
        "effect_class": "idempotent",
        "policy_id": policy_id,
        "payload": {} if payload is None else dict(payload),
    } | more


def promising(conn: Conn, *effects: Any, name: str | None = None) -> Row:
    """The part of a spec of enqueue_many that names a policy with these promises."""
    policy(conn)
    name = name or hashlib.sha256(json.dumps(effects).encode()).hexdigest()[:24]
    policy(conn, name, effects=list(effects))
    return {"policy_id": name}


def owner(conn: Conn, *effects: Any, **spec: Any) -> UUID:
    """A pending job that promises these effects."""
    return enqueue(conn, **promising(conn, *effects), **spec)


def intents(conn: Conn, job: UUID) -> list[Row]:
    """The intents of a job's ends, in order."""
    return rows(conn, "select * from taskq.effect_intents where owner_job_id = %s order by id", job)


def effects(conn: Conn, job: UUID) -> list[Row]:
    """How they stand."""
    return rows(conn, "select * from taskq.effects where owner_job_id = %s order by id", job)


def jobs_of(conn: Conn, job: UUID) -> list[Row]:
    """The jobs that were made for a job's effects, by the mark that they carry."""
    return rows(
        conn, "select * from taskq.all_jobs where meta #>> '{effect,owner_job_id}' = %s::text order by id", str(job)
    )

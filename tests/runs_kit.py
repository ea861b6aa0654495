"""Runs by hand: plans written out, and their nodes ended through the queue's own functions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.types.json import Jsonb
from sql import POLICY, End, claim, exchange, one, policy, register, rows

Conn = psycopg.Connection[Any]
LEVEL = 3
"""What a worker must understand to be given nodes."""


def node(name: str, args: Mapping[str, Any] | None = None, **job: Any) -> dict[str, Any]:
    """A node whose task has its name; with ``child=`` one that stands for a run of that plan."""
    compensate, child = job.pop("compensate", None), job.pop("child", None)
    spec = {
        "task": job.pop("task", name),
        "queue": "q",
        "priority": 5,
        "max_attempts": 1,
        "effect_class": "pure" if child else "idempotent",
        "policy_id": POLICY,
        **job,
    }
    made = {"name": name, "job": spec, "args": dict(args or {})}
    return made | ({"compensate": compensate} if compensate else {}) | ({"child": child} if child else {})


def edge(source: int, target: int, policy: str = "fail", **more: Any) -> dict[str, Any]:
    return {"from": source, "to": target, "policy": policy, **more}


def result_of(ix: int, *path: str | int) -> dict[str, Any]:
    return {"node": ix, "path": list(path)}


def plan_text(
    nodes: Sequence[dict[str, Any]], edges: Sequence[dict[str, Any]] = (), *, workflow: str = "flow", **more: Any
) -> str:
    body = {
        "format": 1,
        "workflow": workflow,
        "on_failure": "cancel",
        "receipts": 100,
        "parameters": [],
        "nodes": list(nodes),
        "edges": list(edges),
        "result": {"value": None},
        "effects": [],
        **more,
    }
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def store(conn: Conn, nodes: Sequence[dict[str, Any]], edges: Sequence[dict[str, Any]] = (), **more: Any) -> str:
    policy(conn)
    return str(one(conn, "select taskq.store_plan(%s)", plan_text(nodes, edges, **more)))


def start(conn: Conn, plan: str, payload: Mapping[str, Any] | None = None, key: str | None = None) -> UUID:
    return UUID(str(one(conn, "select run_id from taskq.start_run(%s, %s, %s)", plan, Jsonb(dict(payload or {})), key)))


def worker_for(conn: Conn, **options: Any) -> UUID:
    return register(conn, level=LEVEL, **options)


def tree(conn: Conn, run: UUID) -> dict[str, str]:
    """The status of each node, as the view shows it."""
    found = rows(conn, "select name, status from taskq.run_tree where run_id = %s order by ix", run)
    return {row["name"]: row["status"] for row in found}


def info(conn: Conn, run: UUID) -> dict[str, Any]:
    [row] = rows(conn, "select * from taskq.runs where id = %s", run)
    return row


def kinds(conn: Conn, run: UUID) -> list[str]:
    found = rows(conn, "select kind from taskq.receipts where run_id = %s order by sequence", run)
    return [row["kind"] for row in found]


def job_of(conn: Conn, run: UUID, name: str) -> UUID:
    return UUID(str(one(conn, "select job_id from taskq.run_tree where run_id = %s and name = %s", run, name)))


def take(conn: Conn, worker: UUID, *tasks: str, limit: int = 100) -> dict[str, dict[str, Any]]:
    """Claim what is due of these tasks; the claims by task."""
    return {row["task"]: row for row in claim(conn, worker, limit, tasks=list(tasks))}


def finish(
    conn: Conn, worker: UUID, claimed: Mapping[str, Any], outcome: str = "succeeded", result: object = None
) -> None:
    error = {"type": "Boom", "message": "boom"} if outcome != "succeeded" else None
    given = End(claimed["job_id"], claimed["claim_epoch"], outcome, result=result, error=error)
    assert exchange(conn, worker, [given]) == []


def nodes_of_others(conn: Conn, n: int) -> UUID:
    """Nodes of another run, which are to be deleted before the invariants are looked at; that run's id."""
    run = uuid4()
    query = (
        "insert into taskq.nodes (id, run_id, ix, unmet, status, finished_at, result)"
        " select taskq.new_id(), %s, n, 0, 'succeeded', now(), '1' from generate_series(1, %s) n"
    )
    conn.execute(query, (run, n))
    return run


def do(conn: Conn, worker: UUID, task: str, outcome: str = "succeeded", result: object = None) -> None:
    """Claim the one due job of a task and end it so."""
    [claimed] = take(conn, worker, task).values()
    finish(conn, worker, claimed, outcome, result)

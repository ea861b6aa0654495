"""Runs with a map, by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

from runs_kit import do, edge, finish, node, result_of, start, store, worker_for
from sql import Conn, End, claim, exchange, one, rows

MAP = "flow:await"
"""The task of the job that waits for a map."""


class Mapped(NamedTuple):
    """A run of first, a map of each over what it returned, and last, which takes the results; and a worker."""

    run: UUID
    worker: UUID


def plan_of(
    conn: Conn,
    *,
    most: int = 100_000,
    at_once: int = 1000,
    on_failure: str = "cancel",
    takes: str = "results",
    policy: str = "fail",
    item: dict[str, Any] | None = None,
    **more: Any,
) -> str:
    """The plan: ``takes`` is what the last node takes of the map, ``item`` options of the node of each item."""
    each = node("each", {"x": {"input": "x", "path": []}, "k": {"input": "k", "path": []}}, **(item or {}))
    bounds = {"item": "x", "most": most, "at_once": at_once}
    inner = store(conn, [each], workflow="flow:each", map=bounds, parameters=["x", "k"], on_failure=on_failure)
    args = {"x": result_of(0, *more.pop("path", ())), "k": {"value": 7}}
    over = node("each", args, task=MAP, child=inner, compensate=more.pop("compensate", None))
    last = node("last", {"got": {takes: 1, "path": []}})
    return store(conn, [node("first"), over, last], [edge(0, 1), edge(1, 2, policy)], **more)


def mapped(conn: Conn, items: Any, **more: Any) -> Mapped:
    """The map has just started."""
    worker = worker_for(conn)
    run = start(conn, plan_of(conn, **more))
    do(conn, worker, "first", result=items)
    return Mapped(run, worker)


def child_of(conn: Conn, run: UUID) -> UUID:
    return UUID(str(one(conn, "select id from taskq.runs where parent_run = %s", run)))


def ends(conn: Conn, made: Mapped, n: int, body: Callable[[Any], tuple[str, Any]]) -> list[Any]:
    """Claim up to ``n`` items and end them in one statement, each as the body says; the items in order of claim."""
    # As the worker does: the statement answers in the order in which the rows lie.
    claims = sorted(claim(conn, made.worker, n, tasks=["each"]), key=lambda each: (each["run_at"], each["job_id"]))
    told = []
    items = [json.loads(each["payload"])["x"] for each in claims]
    for each, item in zip(claims, items, strict=True):
        outcome, value = body(item)
        error = {"type": "Boom", "message": str(value)} if outcome != "succeeded" else None
        told.append(End(each["job_id"], each["claim_epoch"], outcome, result=None if error else value, error=error))
    assert exchange(conn, made.worker, told) == []
    return items


def doubled(item: Any) -> tuple[str, Any]:
    return "succeeded", item * 2


def all_end(conn: Conn, made: Mapped, body: Callable[[Any], tuple[str, Any]] = doubled, portion: int = 100) -> int:
    """End items until none is due; gives how many there were."""
    n = 0
    while got := ends(conn, made, portion, body):
        n += len(got)
    return n


def given(conn: Conn, made: Mapped) -> Any:
    """End the job that waits for the map as it has ended, and what last is given, if it runs."""
    [child] = rows(conn, "select status, result from taskq.runs where parent_run = %s", made.run)
    do(conn, made.worker, MAP, "succeeded" if child["status"] == "succeeded" else "failed", child["result"])
    found = claim(conn, made.worker, 1, tasks=["last"])
    return json.loads(found[0]["payload"])["got"] if found else None


def end_last(conn: Conn, made: Mapped, outcome: str = "succeeded") -> None:
    """End what takes the results, which has been claimed."""
    [last] = rows(conn, "select id as job_id, claim_epoch from taskq.jobs where task = 'last'")
    finish(conn, made.worker, last, outcome)


def progress(conn: Conn, made: Mapped) -> dict[str, Any]:
    [row] = rows(conn, "select * from taskq.map_progress where run_id = %s", made.run)
    return row


def due(conn: Conn, run: UUID) -> int:
    return int(one(conn, "select count(*) from taskq.nodes where run_id = %s and due", run))

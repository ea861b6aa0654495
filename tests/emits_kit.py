"""Runs with an emit, by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID

from maps_kit import MAP, Mapped, child_of
from runs_kit import do, edge, finish, node, result_of, start, store, take, worker_for
from sql import Conn, rows


def plan_of(
    conn: Conn,
    *,
    most: int = 100_000,
    at_once: int = 1000,
    ahead: int = 2,
    on_failure: str = "cancel",
    takes: str = "results",
    policy: str = "fail",
    child: str | None = None,
    **more: Any,
) -> str:
    """A plan of first, an emit of each over what list gives, and last; ``takes`` is what last takes of the emit."""
    each = node("each", {"x": {"input": "each", "path": ["x"]}, "k": {"input": "each", "path": ["k"]}}, child=child)
    if child:
        each["job"]["task"] = "inner:await"
    source = node("each.page", {"cursor": {"value": None}, "root": {"input": "source", "path": ["root"]}}, task="list")
    bounds = {"item": "x", "most": most, "at_once": at_once, "pages": {"item": "cursor", "ahead": ahead}}
    inner = store(
        conn, [each, source], workflow="flow:each", map=bounds, parameters=["each", "source"], on_failure=on_failure
    )
    args = {
        "each": {"object": {"k": {"value": 7}}},
        "source": {"object": {"root": result_of(0)}},
    }
    over = node("each", args, task=MAP, child=inner, compensate=more.pop("compensate", None))
    last = node("last", {"got": {takes: 1, "path": []}})
    return store(conn, [node("first"), over, last], [edge(0, 1), edge(1, 2, policy)], **more)


def emitted(conn: Conn, **more: Any) -> Mapped:
    """The emit has just started: its first page is asked for."""
    worker = worker_for(conn, lease=1e7)
    run = start(conn, plan_of(conn, **more))
    do(conn, worker, "first", result="here")
    return Mapped(run, worker)


def asked(conn: Conn, made: Mapped) -> dict[str, Any] | None:
    """Claim the page that is asked for; None where none is."""
    return take(conn, made.worker, "list").get("list")


def page(conn: Conn, made: Mapped, items: list[Any], cursor: Any = None) -> Any:
    """The page that is asked for ends and gives these items; the arguments that it had."""
    claimed = asked(conn, made)
    assert claimed is not None
    finish(conn, made.worker, claimed, result={"items": items, "cursor": cursor})
    return json.loads(claimed["payload"])


def pages(conn: Conn, made: Mapped) -> list[dict[str, Any]]:
    """What is on record of each page."""
    found = rows(
        conn,
        "select status, item from taskq.nodes where run_id = %s and ix >= 1000000 order by ix",
        child_of(conn, made.run),
    )
    return [{"status": row["status"], **row["item"]} for row in found]


def emit_of(conn: Conn, made: Mapped) -> UUID:
    return child_of(conn, made.run)


def body_of(outcome: str, value: Any) -> Callable[[Any], tuple[str, Any]]:
    return lambda _: (outcome, value)

"""Runs with a child run, by hand."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from runs_kit import do, edge, job_of, node, result_of, start, store, worker_for
from sql import Conn, one


class Family(NamedTuple):
    """A run of a, then a child run of x and y, then b; and a worker."""

    parent: UUID
    worker: UUID
    job: UUID


def plans(conn: Conn, *, inner: dict[str, Any] | None = None, **more: Any) -> str:
    """The plan of the parent; ``inner`` and the rest are options of the two plans."""
    x, y = node("x", {"n": {"input": "n", "path": []}}), node("y", {"n": result_of(0)})
    given = {"result": result_of(1), "parameters": ["n"], **(inner or {})}
    child = store(conn, [x, y], [edge(0, 1)], workflow="inner", **given)
    policy_of_edge = more.pop("edge", "fail")
    kid = node("kid", {"n": result_of(0)}, task="inner:await", child=child, compensate=more.pop("compensate", None))
    takes = {"got": {"outcome": 1} if policy_of_edge == "collect" else result_of(1)}
    nodes = [node("a"), kid, node("b", takes), *more.pop("nodes", [])]
    return store(conn, nodes, [edge(0, 1), edge(1, 2, policy_of_edge)], workflow="outer", **more)


def family(conn: Conn, **more: Any) -> Family:
    """The child has just started."""
    worker = worker_for(conn)
    parent = start(conn, plans(conn, **more))
    do(conn, worker, "a", result={"deep": 1})
    return Family(parent, worker, job_of(conn, parent, "kid"))


def child_of(conn: Conn, run: UUID) -> UUID:
    return UUID(str(one(conn, "select id from taskq.runs where parent_run = %s", run)))


def cancel_run(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.cancel_run(%s, 'why')", run))


def retry_run(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.retry_run(%s)", run))


def fail_child(conn: Conn, made: Family) -> UUID:
    """The child fails at x, and its parent by that."""
    child = child_of(conn, made.parent)
    do(conn, made.worker, "x", "failed")
    do(conn, made.worker, "inner:await", "failed")
    return child

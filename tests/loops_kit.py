"""Runs with a loop, by hand."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from uuid import UUID

from runs_kit import do, edge, node, result_of, start, store, take, worker_for
from sql import Conn, one, rows

LOOP = "flow:await"
"""The task of the job that waits for a loop."""


class Looped(NamedTuple):
    """A run of first, a loop of more from what it returned, and last, which takes what the loop gave; and a worker."""

    run: UUID
    worker: UUID
    loop: UUID


def plan_of(
    conn: Conn,
    *,
    most: int = 5,
    within: float | None = None,
    exhausted: str = "fail",
    policy: str = "fail",
    child: str | None = None,
    **more: Any,
) -> str:
    """The plan: a round takes ``x`` and gives an object, which is the end once its ``word`` is done or lost."""
    round_ = node("more", {"x": {"input": "x", "path": []}, "k": {"input": "k", "path": []}}, child=child)
    if child:
        round_["job"]["task"] = "inner:await"
    bounds = {"item": "x", "most": most, "path": ["word"], "ends": ["done", "lost"], "exhausted": exhausted}
    if within is not None:
        bounds["within"] = within
    inner = store(conn, [round_], workflow="flow:more", loop=bounds, parameters=["x", "k"])
    args = {"x": result_of(0), "k": {"value": 7}}
    over = node("more", args, task=LOOP, child=inner, compensate=more.pop("compensate", None))
    takes = {"outcome": 1, "path": []} if policy == "collect" else result_of(1)
    nodes = [node("first"), over, node("last", {"got": takes})]
    return store(conn, nodes, [edge(0, 1), edge(1, 2, policy)], **more)


def looped(conn: Conn, state: Any = None, **more: Any) -> Looped:
    """The loop has just started."""
    worker = worker_for(conn, lease=1e7)
    run = start(conn, plan_of(conn, **more))
    do(conn, worker, "first", result={"n": 0} if state is None else state)
    return Looped(run, worker, loop_of(conn, run))


def loop_of(conn: Conn, run: UUID) -> UUID:
    return UUID(str(one(conn, "select id from taskq.runs where parent_run = %s", run)))


def claimed(conn: Conn, made: Looped) -> dict[str, Any]:
    """Claim the round that is due."""
    return take(conn, made.worker, "more")["more"]


def given(conn: Conn, made: Looped) -> Any:
    """Claim the round that is due and give back what it was given."""
    return json.loads(claimed(conn, made)["payload"])


def again(conn: Conn, made: Looped, n: int, word: str = "again") -> None:
    """A round ends, and gives its number and a word."""
    do(conn, made.worker, "more", result={"n": n, "word": word})


def told(conn: Conn, made: Looped) -> Any:
    """End the job that waits for the loop as it has ended, and what last is given, if it runs."""
    [loop] = rows(conn, "select status, result from taskq.runs where id = %s", made.loop)
    do(conn, made.worker, LOOP, "succeeded" if loop["status"] == "succeeded" else "failed", loop["result"])
    found = take(conn, made.worker, "last")
    return json.loads(found["last"]["payload"])["got"] if found else None


def progress(conn: Conn, made: Looped) -> dict[str, Any]:
    [row] = rows(conn, "select * from taskq.loop_progress where run_id = %s", made.run)
    return row

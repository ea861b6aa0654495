"""A client that starts a run with a map of so many items, and is killed while it does: alone, or in a transaction."""

from __future__ import annotations

import os
import sys

import psycopg

from taskq import TaskQ

app = TaskQ()


@app.task
async def each(n: int) -> int:
    return n


@app.task
async def total(ns: list[int]) -> int:
    return sum(ns)


@app.workflow
def flow(ns: list[int]) -> int:
    return total.step(each.map(ns))


if __name__ == "__main__":
    _, way, n = sys.argv
    if way == "alone":
        flow.start_sync(list(range(int(n))))
    else:
        with psycopg.connect(os.environ["TASKQ_DSN"]) as conn:
            flow.using(connection=conn).start_sync(list(range(int(n))))

"""Workflows of nodes with priorities of their own, whose bodies wait at gates, and of very many nodes."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import psycopg
from app_under_test import BOUND, note

from taskq import JobContext, TaskQ

app = TaskQ(queue="floor")


@app.task(queue="entry")
async def admits(order: int) -> int:
    return order


@app.task
async def waits(ctx: JobContext, order: int) -> None:
    note("start", ctx)
    gate = Path(os.environ["GATES"]) / f"gate.{ctx.job_id}"
    end = time.monotonic() + BOUND
    while not gate.exists():
        if time.monotonic() > end:
            raise AssertionError(f"nobody opened {gate}")
        await asyncio.sleep(0.02)


@app.workflow
def hurries(order: int) -> None:
    waits.node("urgent", priority=8).step(admits.step(order))


@app.task
async def item(n: int) -> int:
    return 2 * n


@app.task
async def joins(ctx: JobContext, ns: list[int]) -> list[int]:
    """How many it was given, their sum, and how many items had not ended when it began."""
    async with await psycopg.AsyncConnection.connect(os.environ["TASKQ_DSN"]) as conn:
        found = await conn.execute(
            "select count(*) from taskq.nodes n join taskq.runs c on c.id = n.run_id"
            " where c.parent_run = %s and n.finished_at is null",
            (ctx.meta["run"]["id"],),
        )
        [(left,)] = await found.fetchall()
    return [len(ns), sum(ns), left]


@app.workflow
def spreads(ns: list[int]) -> list[int]:
    return joins.step(item.map(ns))

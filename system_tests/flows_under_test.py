"""Workflows whose nodes have priorities of their own, in a queue with a backlog; bodies wait at gates."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

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

"""The application of the test of two cohorts; gates and journal are those of its neighbour."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from app_under_test import BOUND, note

from taskq import Cohort, JobContext, TaskQ

app = TaskQ()
a = Cohort("a", limit=int(os.environ.get("LIMIT_OF_A", "3")))
b = Cohort("b", limit=2)


@app.task(cohort=a)
async def holds(ctx: JobContext, gate: str) -> None:
    note("start", ctx)
    end = time.monotonic() + BOUND
    while not Path(os.environ["GATES"], gate).exists():
        if time.monotonic() > end:
            raise AssertionError(f"nobody opened {gate}")
        await asyncio.sleep(0.02)


@app.task(cohort=b)
async def works(ctx: JobContext) -> None:
    note("start", ctx)

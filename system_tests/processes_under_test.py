"""The application of the tests of child processes and supervisors; gates and journal are those of its neighbour."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from app_under_test import BOUND, note

from taskq import JobContext, Retry, TaskQ, constant

if os.environ.get("BREAKS"):
    raise SystemExit(int(os.environ["BREAKS"]))
if delay := os.environ.get("IMPORTS_FOR"):
    Path(os.environ["GATES"], "importing").touch()
    time.sleep(float(delay))

app = TaskQ()


def is_open(gate: str) -> bool:
    return Path(os.environ["GATES"], gate).exists()


def pid_of(event: str) -> None:
    Path(os.environ["GATES"], f"{event}.{os.getpid()}").touch()


@app.task(process=True, retry=Retry(3, constant(0)), max_recoveries=5)
def waits_in_child(ctx: JobContext, gate: str = "gate") -> str:
    note("start", ctx)
    pid_of("child")
    end = time.monotonic() + BOUND
    while not is_open(gate):
        if time.monotonic() > end:
            raise AssertionError(f"nobody opened {gate}")
        time.sleep(0.02)
    note("end", ctx)
    return f"epoch {ctx.claim_epoch}"


@app.task(process=True, max_recoveries=5)
def holds_the_gil(ctx: JobContext) -> int:
    """Never lets another thread of its process run: one call of the re module, for hours; the first time only."""
    import re

    note("start", ctx)
    pid_of("child")
    if ctx.claim_epoch == 1:
        re.match(r"(a|aa)+$", "a" * 60 + "b")
    return ctx.claim_epoch


@app.task(retry=Retry(3, constant(0)))
async def waits(ctx: JobContext, gate: str = "gate") -> str:
    note("start", ctx)
    end = time.monotonic() + BOUND
    while not is_open(gate):
        if time.monotonic() > end:
            raise AssertionError(f"nobody opened {gate}")
        await asyncio.sleep(0.02)
    note("end", ctx)
    return f"epoch {ctx.claim_epoch}"


@app.task(max_recoveries=50)
async def quick(ctx: JobContext) -> int:
    note("end", ctx)
    return os.getpid()


leaked: list[bytes] = []


@app.task
async def leaks(ctx: JobContext, megabytes: int) -> int:
    leaked.append(b"x" * (megabytes * 1024 * 1024))
    note("end", ctx)
    return os.getpid()


@app.task(max_attempts=1)
def loops_for(ctx: JobContext, seconds: float) -> int:
    """A plain function that computes, and lets go of the GIL only when the interpreter makes it."""
    note("start", ctx)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    note("end", ctx)
    return ctx.claim_epoch


@app.task(max_attempts=1)
async def blocks_the_loop(ctx: JobContext, seconds: float) -> int:
    note("start", ctx)
    time.sleep(seconds)  # noqa: ASYNC251
    note("end", ctx)
    return ctx.claim_epoch

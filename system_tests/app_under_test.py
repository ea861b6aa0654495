"""The application whose workers the system tests start: bodies that write a journal, wait at gates and misbehave.

A gate is a file: a body waits until it is there, and fails at a bound if nobody makes it.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from taskq import Happened, JobContext, OutcomeUnknown, ReconcileContext, Retry, Snooze, TaskQ
from taskq.errors import JobCancelled
from taskq.policy import constant
from taskq.worker import wake

app = TaskQ()
BOUND = float(os.environ.get("BOUND", "40"))
if "CHECK_LISTENER" in os.environ:
    # Sooner than in life, for a test that waits for it.
    wake.CHECK_EVERY = float(os.environ["CHECK_LISTENER"])
    wake.ANSWER_WITHIN = float(os.environ["CHECK_LISTENER"])


def note(event: str, ctx: JobContext | ReconcileContext) -> None:
    """One line, in one write, on a file that is only appended to: lines of many processes do not mix."""
    line = f"{event} {ctx.job_id} {ctx.claim_epoch}\n".encode()
    handle = os.open(os.environ["JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)


def _is_open(gate: str) -> bool:
    return (Path(os.environ["GATES"]) / gate).exists()


@app.task(max_recoveries=50)
async def work(ctx: JobContext, seconds: float) -> int:
    note("start", ctx)
    await asyncio.sleep(seconds)
    note("end", ctx)
    return ctx.claim_epoch


@app.task(retry=Retry(3, constant(0)))
async def fails_once(ctx: JobContext) -> None:
    note("start", ctx)
    if ctx.attempt == 1:
        raise ValueError("the first attempt fails")


@app.task(effect_class="side_effecting")
async def pays(ctx: JobContext) -> int:
    note("start", ctx)
    return ctx.claim_epoch


@app.task(effect_class="side_effecting")
async def pays_at_a_gate(ctx: JobContext, gate: str = "paid") -> int:
    note("start", ctx)
    end = time.monotonic() + BOUND
    while not _is_open(gate):
        if time.monotonic() > end:
            raise AssertionError(f"nobody opened {gate}")
        await asyncio.sleep(0.02)
    return ctx.claim_epoch


def looks_at_a_gate(ctx: ReconcileContext) -> Happened[str]:
    """A hook in a thread, which cannot be stopped."""
    note("asked", ctx)
    end = time.monotonic() + BOUND
    while not _is_open("answered"):
        if time.monotonic() > end:
            raise AssertionError("nobody opened answered")
        time.sleep(0.02)
    return Happened("it did")


@app.task(effect_class="side_effecting", reconcile=looks_at_a_gate)
async def does_not_know(ctx: JobContext) -> str:
    raise OutcomeUnknown("no answer")


@app.task(retry=Retry(3, constant(0)))
async def waits(ctx: JobContext, gate: str = "gate", then: str = "succeed") -> str:
    """Wait at a gate, blocking nothing, then end as told."""
    note("start", ctx)
    end = time.monotonic() + BOUND
    try:
        while not _is_open(gate):
            if time.monotonic() > end:
                raise AssertionError(f"nobody opened {gate}")
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        note("cancelled", ctx)
        raise
    note("end", ctx)
    return finish(ctx, then)


@app.task(retry=Retry(3, constant(0)))
def waits_in_thread(ctx: JobContext, gate: str = "gate", then: str = "succeed") -> str:
    """The same in a thread, deaf to all requests."""
    note("start", ctx)
    end = time.monotonic() + BOUND
    while not _is_open(gate):
        if time.monotonic() > end:
            raise AssertionError(f"nobody opened {gate}")
        time.sleep(0.02)
    note("end", ctx)
    return finish(ctx, then)


@app.task
async def deaf(ctx: JobContext, gate: str = "gate") -> str:
    """Wait at a gate, whatever is thrown at it."""
    note("start", ctx)
    end = time.monotonic() + BOUND
    while not _is_open(gate) and time.monotonic() < end:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)
    return f"epoch {ctx.claim_epoch}"


@app.task(timeout=0.3, max_attempts=1)
def outlives_its_timeout(ctx: JobContext) -> None:
    note("start", ctx)
    time.sleep(BOUND)


@app.task(max_recoveries=2)
async def kills_its_worker(ctx: JobContext) -> None:
    note("start", ctx)
    await asyncio.sleep(0.3)
    os._exit(9)


@app.task(max_recoveries=0)
async def is_lost_once(ctx: JobContext) -> None:
    note("start", ctx)
    await asyncio.sleep(BOUND)


@app.task(max_attempts=1)
async def sleeps(ctx: JobContext, seconds: float) -> int:
    note("start", ctx)
    await asyncio.sleep(seconds)
    note("end", ctx)
    return ctx.attempt


def finish(ctx: JobContext, then: str) -> Any:
    match then:
        case "fail":
            raise ValueError("told to fail")
        case "snooze":
            raise Snooze(0)
        case "cancel":
            raise JobCancelled(ctx.job_id)
        case _:
            return f"epoch {ctx.claim_epoch}"

"""An application whose worker is killed right before, or right after, a statement of a durable body.

``KILLED`` is ``query:before|after:n``: the n-th time that this query is sent; or a fault of ``taskq.testing.faults``.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

from taskq import JobContext, Retry, TaskQ, constant
from taskq.testing import faults
from taskq.worker.safe import SafeBodies

app = TaskQ()
_rows = SafeBodies._rows
_sent: list[str] = []


async def _killed(self: SafeBodies, query: str, limit: float, *args: Any) -> list[Any]:
    which, when, n = os.environ["KILLED"].split(":")
    _sent.append(query)
    strikes = query == which and _sent.count(query) == int(n)
    if strikes and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    found = await _rows(self, query, limit, *args)
    if strikes:
        os.kill(os.getpid(), signal.SIGKILL)
    return found


if "kill" in os.environ.get("KILLED", ""):
    faults.arm_from_environment({faults.VARIABLE: os.environ["KILLED"]})
elif os.environ.get("KILLED"):
    SafeBodies._rows = _killed  # type: ignore[method-assign]


async def note(ctx: JobContext, name: str) -> str:
    async with await _connect() as conn:
        await conn.execute("insert into public.called values (%s, %s, %s)", (ctx.job_id, ctx.claim_epoch, name))
    return f"{name}{ctx.claim_epoch}"


async def _connect() -> Any:
    import psycopg

    return await psycopg.AsyncConnection.connect(os.environ["TASKQ_DSN"], autocommit=True)


@app.task(retry=Retry(max_attempts=9, backoff=constant(0)))
async def steps(ctx: JobContext) -> str:
    first = await ctx.step("first", note, ctx, "first")
    if ctx.attempt == 1 and ctx.claim_epoch == 1:
        await ctx.step("old", note, ctx, "old")
        raise ConnectionError("again")
    return first + await ctx.step("second", note, ctx, "second")


@app.task(retry=Retry(max_attempts=9, backoff=constant(0)))
async def waits(ctx: JobContext) -> str:
    await ctx.sleep("1200ms")
    got = [await ctx.wait_for("n", int) for _ in range(2)]
    return f"{got} {await ctx.step('once', note, ctx, 'once')}"


@app.task(retry=Retry(max_attempts=9, backoff=constant(0)))
async def child(ctx: JobContext, name: str) -> str:
    return await ctx.step("once", note, ctx, name)


@app.task(retry=Retry(max_attempts=9, backoff=constant(0)))
async def starts(ctx: JobContext) -> list[str]:
    first = await ctx.child(child.using(queue=ctx.queue), "first")
    return [first, await ctx.child(child.using(queue=ctx.queue), "second")]


@app.task(retry=Retry(max_attempts=9, backoff=constant(0)))
async def pays(ctx: JobContext) -> str:
    paid: str = await ctx.step("pay", note, ctx, "pay", effect_class="side_effecting")
    await ctx.step("mail", note, ctx, "mail", effect_class="side_effecting")
    return paid


_few = asyncio.Semaphore(5)


@app.task(retry=Retry(max_attempts=9, backoff=constant(0)))
async def gathers(ctx: JobContext, seed: int) -> list[str]:
    """Three steps beside each other, begun and ended in an order of its own in each attempt.

    In the first attempt one of them, another for each seed, never returns.
    """
    rand = random.Random(100 * seed + ctx.claim_epoch)
    pauses = {(name, when): rand.random() / 20 for name in "abc" for when in ("before", "within")}
    stuck = "abc"[seed % 3] if ctx.claim_epoch == 1 else None

    async def part(name: str) -> str:
        await asyncio.sleep(pauses[name, "within"])
        if name == stuck:
            await asyncio.Event().wait()
        async with _few:
            return await note(ctx, name)

    async def step(name: str) -> str:
        await asyncio.sleep(pauses[name, "before"])
        return await ctx.step(name, part, name)

    return await asyncio.gather(*map(step, "abc"))

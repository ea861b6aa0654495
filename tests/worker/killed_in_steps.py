"""An application whose worker is killed right before, or right after, a statement of a durable body.

``KILLED`` is ``query:before|after:n``: the n-th time that this query is sent; or a fault of ``taskq.testing.faults``;
or ``page:at:n`` and ``item:at:n``, within the body of an emit that is at this item.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from typing import Any

from taskq import DidNotHappen, Happened, JobContext, Page, ReconcileContext, Retry, TaskQ, constant
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
elif os.environ.get("KILLED") and ":at:" not in os.environ["KILLED"]:
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


def _dies(at: str) -> None:
    """The process of whom ``KILLED`` names, within the body of a page or of an item."""
    if os.environ.get("KILLED") == at:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(retry=Retry(max_attempts=9, backoff=constant(0)))
async def numbers(after: int | None, upto: int) -> Page[int, int]:
    start = after or 0
    _dies(f"page:at:{start}")
    end = min(start + 7, upto)
    return Page(list(range(start, end)), end if end < upto else None)


@app.task(retry=Retry(max_attempts=9, backoff=constant(0)))
async def double(ctx: JobContext, n: int) -> int:
    async with await _connect() as conn:
        await conn.execute("insert into public.called values (%s, %s, %s)", (ctx.job_id, ctx.claim_epoch, str(n)))
    _dies(f"item:at:{n}")
    return 2 * n


@app.task(retry=Retry(max_attempts=9, backoff=constant(0)))
async def emits(ctx: JobContext) -> list[int]:
    pages = numbers.node(queue=ctx.queue).pages(upto=30)
    found = await ctx.emit(double.using(queue=ctx.queue), pages, at_once=4, ahead=2)
    return found + await ctx.map(double.using(queue=ctx.queue), [100])


async def look(ctx: ReconcileContext) -> Happened[str] | DidNotHappen:
    """Asked once the first worker is dead: what it has not noted then it never will."""
    async with await _connect() as conn:
        query = "select count(*) from public.called where job = %s and name = %s"
        found = await (await conn.execute(query, (ctx.job_id, ctx.step))).fetchone()
    return Happened("asked") if found[0] else DidNotHappen()


asks = app.task(name="asks", retry=Retry(9, constant(0)), reconcile_steps={"pay": look, "mail": look})(pays.fn)


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

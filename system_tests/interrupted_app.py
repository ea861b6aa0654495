"""Runs whose nodes are prepared, and held once they were lost too often: for workers that are killed in their midst."""

from __future__ import annotations

import asyncio
import os
from datetime import timedelta
from pathlib import Path

from app_under_test import note

from taskq import DidNotHappen, Happened, JobContext, PrepareContext, Ready, ReconcileContext, Retry, TaskQ, constant

app = TaskQ()
AGAIN = Retry(3, constant("100ms"))


async def look(ctx: PrepareContext, n: int) -> Ready:
    await asyncio.sleep(0.05)
    return Ready({f"seen-{ctx.task}": ctx.claim_epoch})


@app.task(prepare=look, on_exhausted="hold", max_recoveries=0, retry=AGAIN)
async def fetches(ctx: JobContext, n: int) -> int:
    note("start", ctx)
    await asyncio.sleep(0.8)
    return n + 1


async def ask(ctx: ReconcileContext, n: int) -> Happened[int] | DidNotHappen:
    """What the world knows: whether a file was left by the body's last act; a killed process sends nothing more."""
    done = Path(os.environ["GATES"]) / f"charge.{ctx.idempotency_key}"
    return Happened(2 * n) if done.exists() else DidNotHappen()


@app.task(
    effect_class="side_effecting",
    prepare=look,
    on_exhausted="hold",
    max_recoveries=0,
    retry=Retry(1, constant("100ms")),
    reconcile=ask,
    reconcile_retry=Retry(50, constant(timedelta(milliseconds=100))),
)
async def charges(ctx: JobContext, n: int) -> int:
    note("start", ctx)
    await asyncio.sleep(0.6)
    # In one act: it is there or not, and a second time would fail.
    (Path(os.environ["GATES"]) / f"charge.{ctx.idempotency_key}").touch(exist_ok=False)
    await asyncio.sleep(0.05)
    return 2 * n


@app.task(on_exhausted="hold", max_recoveries=0, retry=AGAIN)
async def tells(ctx: JobContext, a: int, b: int) -> int:
    note("start", ctx)
    await asyncio.sleep(0.6)
    return a + b


@app.workflow
def order(n: int) -> int:
    fetched = fetches.step(n)
    return tells.step(fetched, charges.step(fetched))

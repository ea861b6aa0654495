"""Workflows that are started, and workers that run them in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from worker_kit import BOUND, Gates

from taskq import (
    Retry,
    TaskQ,
)
from taskq.worker import Worker, WorkerOptions
from taskq.workflow import Workflow


@asynccontextmanager
async def working(app: TaskQ, dsn: str) -> AsyncIterator[Worker]:
    worker = Worker(app.tasks, dsn, options=WorkerOptions(concurrency=10, lease=3, poll_interval=0.2))
    task = asyncio.create_task(worker.run())
    await asyncio.wait_for(worker.ready.wait(), BOUND)
    try:
        yield worker
    finally:
        worker.stop()
        assert await asyncio.wait_for(task, BOUND) == 0


def simple(app: TaskQ) -> Workflow[[int], int]:
    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.workflow
    def flow(n: int) -> int:
        return double.step(double.step(n))

    return flow


def failing(app: TaskQ, gates: Gates) -> Workflow[[int], int]:
    """``n`` below 0 fails; a gate before it is opened by the test."""

    @app.task(retry=Retry(max_attempts=1))
    async def check(n: int) -> int:
        await gates.wait()
        if n < 0:
            raise ValueError(f"{n} is below 0")
        return n

    @app.workflow
    def flow(n: int) -> int:
        return check.step(check.node("first").step(n))

    return flow


def count(conn: psycopg.Connection[Any], table: str) -> int:
    [row] = conn.execute(f"select count(*) from taskq.{table}").fetchall()  # type: ignore[arg-type]
    return int(row[0])

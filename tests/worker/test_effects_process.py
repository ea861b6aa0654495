"""Side-effecting bodies in child processes: what ends the process leaves the outcome unknown; a cancel is told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import process_app as bodies
import pytest
from helpers import aeventually
from worker_kit import RunWorker, outcomes, until_status

from taskq import TaskQ

pytestmark = pytest.mark.anyio
LONG = 60.0
"""Seconds; children import the application on a machine that may be busy."""
SLOW: dict[str, Any] = {"lease": 10, "grace": 8}


@pytest.fixture
async def app(dsn: str, anyio_backend: str) -> AsyncIterator[TaskQ]:
    bodies.app.use_database(dsn)
    yield bodies.app
    await bodies.app.close()
    bodies.app._async_client = bodies.app._sync_client = None


async def test_a_child_that_died_or_was_killed_leaves_its_job_unknown(
    run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    async with run_worker(concurrency=2, **SLOW):
        wanted: dict[UUID, str] = {}
        for how, reason in (("die", "process_died"), ("hang", "timed_out")):
            wanted[(await bodies.pays.enqueue(how)).id] = reason
        for job, reason in wanted.items():
            await until_status(aconn, job, "unknown", within=LONG)
            assert await aconn.fetchval("select reason from taskq.unknowns where job_id = $1", job) == reason
    for job in wanted:
        await until_status(aconn, job, "unknown")
        assert await outcomes(aconn, job) == []


async def test_a_child_is_told_of_a_cancel_and_not_stopped(run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    async with run_worker(concurrency=1, **SLOW) as worker:
        job = await bodies.pays.enqueue("told")
        await aeventually(lambda: any(r.phase == "effect" for r in worker.parts.executor.running.values()), LONG)
        assert await job.cancel() == "requested"
        assert await job.result(timeout=LONG) == "told"
    assert await outcomes(aconn, job.id) == ["succeeded"]

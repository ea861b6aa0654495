"""Workers in the test's own process, on the test's own database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from sql import violations
from worker_kit import BOUND, Events, Gates, RunWorker

from taskq import TaskQ
from taskq.worker import Worker, WorkerOptions


@pytest.fixture
def gates() -> Gates:
    return Gates()


@pytest.fixture
def events() -> Iterator[Events]:
    handler = Events()
    logger = logging.getLogger("taskq")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
async def app(dsn: str, anyio_backend: str) -> AsyncIterator[TaskQ]:
    async with TaskQ(dsn) as made:
        yield made


@pytest.fixture
async def made(aconn: asyncpg.Connection) -> asyncpg.Connection:
    """A connection to the test's database, which has a table of what bodies have made."""
    await aconn.execute(
        "create table public.made (job uuid, epoch bigint, unique (job, epoch) deferrable initially deferred)"
    )
    return aconn


@pytest.fixture
def run_worker(dsn: str, app: TaskQ) -> RunWorker:
    """Run a worker on the test's app until the block ends; its exit code must be 0 and no law broken."""

    @asynccontextmanager
    async def run(
        *, to: str | None = None, of: TaskQ | None = None, exit_code: int = 0, **options: Any
    ) -> AsyncIterator[Worker]:
        chosen = {"concurrency": 10, "lease": 3, "grace": 5, "poll_interval": 0.2} | options
        worker = Worker((of or app).tasks, to or dsn, options=WorkerOptions(**chosen))
        task = asyncio.create_task(worker.run())
        ready = asyncio.create_task(worker.ready.wait())
        try:
            await asyncio.wait([task, ready], timeout=BOUND, return_when=asyncio.FIRST_COMPLETED)
            assert worker.ready.is_set(), task
            yield worker
            assert not task.done(), task
        finally:
            ready.cancel()
            worker.stop()
            try:
                code = await asyncio.wait_for(task, BOUND)
            finally:
                task.cancel()
        assert code == exit_code
        with psycopg.connect(dsn) as check:
            assert violations(check) == []

    return run

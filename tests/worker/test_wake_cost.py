"""What a notification costs: how often idle workers look for a job, and how much each is sent."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import asyncpg
import pytest
from helpers import aeventually
from servers import serve

from taskq import TaskQ, migrate
from taskq.worker import Worker, WorkerOptions

pytestmark = pytest.mark.anyio
IDLE = 20
INSERTS = 1000


@pytest.fixture(scope="module")
def counting_dsn() -> Iterator[str]:
    """A server that counts the calls of functions."""
    with serve(settings={"track_functions": "all", "max_connections": "300"}) as server:
        migrate.up(server.dsn())
        yield server.dsn()


@asynccontextmanager
async def workers(app: TaskQ, dsn: str, n: int) -> AsyncIterator[list[Worker]]:
    """So many workers in this process, all asleep."""
    made = [Worker(app.tasks, dsn, options=WorkerOptions(concurrency=10, lease=60)) for _ in range(n)]
    async with AsyncExitStack() as stack:
        tasks = [asyncio.create_task(worker.run()) for worker in made]

        async def stop() -> None:
            for worker in made:
                worker.stop()
            assert await asyncio.gather(*tasks) == [0] * n

        stack.push_async_callback(stop)
        for worker in made:
            await asyncio.wait_for(worker.ready.wait(), 60)
        yield made


async def test_single_inserts_wake_few_of_many_idle_workers(counting_dsn: str) -> None:
    app = TaskQ(counting_dsn)

    @app.task
    async def nothing(n: int) -> None: ...

    async with app, AsyncExitStack() as stack:
        watch = await asyncpg.connect(counting_dsn)
        stack.push_async_callback(watch.close)

        async def calls() -> int:
            return await watch.fetchval(
                "select coalesce(sum(calls), 0)::int from pg_stat_user_functions where funcname = 'claim'"
            )

        async with workers(app, counting_dsn, IDLE):

            async def all_asleep() -> bool:
                return await watch.fetchval("select count(distinct worker_id) from taskq.sleepers") == IDLE

            await aeventually(all_asleep, 60)
            await asyncio.sleep(1.2)  # counts are written once a second, at the end of a transaction
            before = await calls()
            started = asyncio.get_running_loop().time()
            for n in range(INSERTS):
                await nothing.enqueue(n)

            async def done() -> bool:
                return await watch.fetchval("select count(*) from taskq.jobs") == 0

            await aeventually(done, 60)
            took = asyncio.get_running_loop().time() - started
            # Each worker's own looks go on, once a second.
            await asyncio.sleep(1.5)
            claims = await calls() - before
            waits = await watch.fetch(
                "select extract(epoch from claimed_at - created_at)::float8 * 1000 as ms from taskq.history"
            )
        polls = (took + 3) * IDLE
        per_insert = (claims - polls) / INSERTS
        median = statistics.median(row["ms"] for row in waits)
        print("claims", claims, "took", took, "per insert", per_insert, "median ms", median)
        assert per_insert < 4, (claims, took)

"""Chancy: its async executor with 500 at once, eager polling and results sent every 0.1 s gave it the best rate.

Finished jobs wait in memory for up to that interval; here a job counts as done once its row says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

from chancy import Chancy, Job, Queue, Worker

from benchmarks.peers.bodies import BODIES, payload
from benchmarks.peers.kit import Client, Gate, Traits, main, queue_name

SEND_EVERY = 0.1
SILENT = logging.getLogger("benchmarks.chancy")
SILENT.setLevel(logging.ERROR)


class ChancyClient:
    """An app with one connection."""

    def __init__(self, app: Chancy) -> None:
        self._app = app

    async def one(self, kind: str, number: int) -> None:
        await self._app.push(make_job(kind, number, 1, None))

    async def many(self, kind: str, numbers: Sequence[int], queues: int, later: float | None) -> None:
        at = None if later is None else datetime.now(UTC) + timedelta(seconds=later)
        async for _ in self._app.push_many([make_job(kind, number, queues, at) for number in numbers]):
            pass

    async def close(self) -> None:
        await self._app.pool.close()


def make_job(kind: str, number: int, queues: int, at: datetime | None) -> Job:
    """One job; the function is found by its import path."""
    given: dict[str, Any] = {} if at is None else {"scheduled_at": at}
    return Job.from_func(BODIES[kind], queue=queue_name(number, queues), kwargs=payload(number), **given)


class ChancyAdapter:
    """Chancy."""

    traits = Traits(
        name="chancy",
        version=version("chancy"),
        settings=f"async executor, 500 at once where the measure does not name a concurrency, eager polling, "
        f"send_outgoing_interval={SEND_EVERY}; push_many by 1,000",
        done="select count(*) from chancy_jobs where state = 'succeeded'",
        keeps=True,
        loop="asyncio",
        concurrency=500,
    )

    async def setup(self, dsn: str) -> None:
        async with Chancy(dsn, log=SILENT) as app:
            await app.migrate()
            # Every worker declares this queue, for which it would start a pool of processes; without tags no worker
            # serves it, and nothing here uses it.
            await app.declare(Queue("default", tags=set()), upsert=True)

    async def client(self, dsn: str) -> Client:
        app = Chancy(dsn, log=SILENT, max_connection_pool_size=1)
        await app.pool.open()
        return ChancyClient(app)

    async def work(self, dsn: str, concurrency: int, queues: int, gate: Gate) -> None:
        async with Chancy(dsn, log=SILENT) as app:
            # The bound on concurrency is a property of the queue, so it is declared here and not by setup.
            await app.declare(
                Queue(queue_name(0, 1), concurrency=concurrency, executor=Chancy.Executor.Async, eager_polling=True),
                upsert=True,
            )
            worker = Worker(app, register_signal_handlers=False, shutdown_timeout=5)
            worker.send_outgoing_interval = SEND_EVERY
            await gate.ready()
            async with worker:
                await gate.stop.wait()


if __name__ == "__main__":
    main(ChancyAdapter())

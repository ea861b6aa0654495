"""PgQueuer: batches of 200 and one connection gave it the best rate; the default of 10 gives a third of it.

A finished job is deleted and leaves a row without its payload in the log.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import version

import asyncpg
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from benchmarks.peers.bodies import BODIES, payload
from benchmarks.peers.kit import Client, Gate, Traits, main

BATCH = 200
CHUNK = 10_000


def entrypoint(kind: str, number: int, queues: int) -> str:
    """An entrypoint is both task and queue."""
    return kind if queues == 1 else f"{kind}{number % queues}"


class PgQueuerClient:
    """One connection."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection
        self._queries = Queries(AsyncpgDriver(connection))

    async def one(self, kind: str, number: int) -> None:
        await self._queries.enqueue(kind, json.dumps(payload(number)).encode())

    async def many(self, kind: str, numbers: Sequence[int], queues: int, later: float | None) -> None:
        after = None if later is None else timedelta(seconds=later)
        for start in range(0, len(numbers), CHUNK):
            part = numbers[start : start + CHUNK]
            await self._queries.enqueue(
                [entrypoint(kind, number, queues) for number in part],
                [json.dumps(payload(number)).encode() for number in part],
                [0] * len(part),
                [after] * len(part),
            )

    async def close(self) -> None:
        await self._connection.close()


class PgQueuerAdapter:
    """PgQueuer."""

    traits = Traits(
        name="pgqueuer",
        version=version("pgqueuer"),
        settings=f"batch_size={BATCH}, one QueueManager on one asyncpg connection; no bound on concurrency of its own; "
        f"enqueue by {CHUNK:,}",
        done="select count(*) from pgqueuer_log where status = 'successful' and job_id > %(mark)s",
        mark="select coalesce(max(job_id), 0) from pgqueuer_log",
        keeps=False,
        loop="uvloop",
        later=True,
        queues=True,
        finished="pgqueuer_log",
        fresh={"id": "", "aggregated": "true"},
    )

    async def setup(self, dsn: str) -> None:
        connection = await asyncpg.connect(dsn)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    async def client(self, dsn: str) -> Client:
        return PgQueuerClient(await asyncpg.connect(dsn))

    async def work(self, dsn: str, concurrency: int, queues: int, gate: Gate) -> None:
        connection = await asyncpg.connect(dsn)
        queue = PgQueuer(AsyncpgDriver(connection))

        def register(kind: str, name: str) -> None:
            @queue.entrypoint(name)
            async def run(job: Job) -> None:
                assert job.payload is not None
                await BODIES[kind](**json.loads(job.payload))

        for kind in BODIES:
            for number in range(queues):
                register(kind, entrypoint(kind, number, queues))
        await gate.ready()
        running = asyncio.create_task(queue.run(batch_size=BATCH))
        stopping = asyncio.create_task(gate.stop.wait())
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        queue.shutdown.set()
        await running


if __name__ == "__main__":
    main(PgQueuerAdapter(), uvloop.new_event_loop)

"""DBOS: workflows on a queue, jobs being those without steps; 500 at once, polled each 50 ms, a pool of 20."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import sqlalchemy
from dbos import DBOS, DBOSClient

from benchmarks.peers.bodies import BODIES, LINKS, TEXT, add
from benchmarks.peers.kit import Client, Gate, Traits, main, queue_name

QUEUE = queue_name(0, 1)
POLL = 0.05
POOL = 20
CHUNK = 500


def start(dsn: str, concurrency: int) -> None:
    """Make the application of this process and launch it."""
    DBOS(
        config={
            "name": "bench",
            "system_database_url": dsn,
            "sys_db_pool_size": POOL,
            "application_version": "1",
            "log_level": "ERROR",
        }
    )
    for name, body in BODIES.items():
        DBOS.workflow(name=name)(body)

    @DBOS.workflow(name="add")
    async def child(number: int) -> int:
        return await add(number)

    @DBOS.step(name="step")
    async def step(number: int) -> int:
        return await add(number)

    @DBOS.workflow(name="steps")
    async def steps(number: int) -> int:
        for _ in range(LINKS):
            number = await step(number)
        return number

    @DBOS.workflow(name="fan")
    async def fan(number: int) -> int:
        handles = [await DBOS.enqueue_workflow_async(QUEUE, child, each) for each in range(number)]
        return sum([await handle.get_result() for handle in handles])

    DBOS.launch()
    DBOS.register_queue(QUEUE, worker_concurrency=concurrency, polling_interval_sec=POLL, on_conflict="always_update")


class DbosClient:
    """A client with one connection; its calls block, as its async ones do in a thread."""

    def __init__(self, dsn: str) -> None:
        url = sqlalchemy.make_url(dsn).set(drivername="postgresql+psycopg")
        self._engine = sqlalchemy.create_engine(url, pool_size=1)
        self._client = DBOSClient(system_database_engine=self._engine)

    async def one(self, kind: str, number: int) -> None:
        self._client.enqueue({"workflow_name": kind, "queue_name": QUEUE}, number, TEXT)

    async def many(self, kind: str, numbers: Sequence[int], queues: int, later: float | None) -> None:
        for begin in range(0, len(numbers), CHUNK):
            with self._engine.begin() as connection:
                for number in numbers[begin : begin + CHUNK]:
                    options: Any = {"workflow_name": kind, "queue_name": QUEUE}
                    self._client.enqueue_in_transaction(connection, options, number, TEXT)
            await asyncio.sleep(0)

    async def flows(self, kind: str, number: int) -> None:
        arguments = [number] if kind == "fan" else range(number)
        with self._engine.begin() as connection:
            for each in arguments:
                # What is a chain of jobs elsewhere is a workflow of steps here.
                name = "fan" if kind == "fan" else "steps"
                options: Any = {"workflow_name": name, "queue_name": QUEUE}
                self._client.enqueue_in_transaction(connection, options, each)

    async def close(self) -> None:
        self._client.destroy()


class DbosAdapter:
    """DBOS."""

    traits = Traits(
        name="dbos",
        version=version("dbos"),
        settings=f"worker_concurrency=500 where the measure does not name one, polling_interval_sec={POLL}, pool of "
        f"{POOL}; enqueue_in_transaction by {CHUNK}",
        done="select count(*) from dbos.workflow_status where status = 'SUCCESS'",
        keeps=True,
        flows={
            kind: f"select count(*) from dbos.workflow_status where name = '{name}' and status = 'SUCCESS'"
            for kind, name in (("fan", "fan"), ("chain", "steps"), ("steps", "steps"))
        },
        loop="asyncio, in a thread of its own",
        concurrency=500,
    )

    async def setup(self, dsn: str) -> None:
        await asyncio.to_thread(start, dsn, 500)

    async def client(self, dsn: str) -> Client:
        return DbosClient(dsn)

    async def work(self, dsn: str, concurrency: int, queues: int, gate: Gate) -> None:
        await gate.ready()
        await asyncio.to_thread(start, dsn, concurrency)
        await gate.stop.wait()
        await asyncio.to_thread(DBOS.destroy)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(DbosAdapter())

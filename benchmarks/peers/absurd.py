"""Absurd: 500 at once gave it the best rate. It has no notifications and no bulk enqueue; absurdctl has the schema."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import absurdctl
import psycopg
from absurd_sdk import AsyncAbsurd

from benchmarks.peers.bodies import BODIES, LINKS, add, payload
from benchmarks.peers.kit import Client, Gate, Traits, main, queue_name

QUEUE = queue_name(0, 1)
CHILDREN = "children"
"""A task may wait only for tasks of another queue."""


class AbsurdClient:
    """One connection."""

    def __init__(self, connection: psycopg.AsyncConnection[Any]) -> None:
        self._connection = connection
        self._app = AsyncAbsurd(connection, queue_name=QUEUE)

    async def one(self, kind: str, number: int) -> None:
        await self._app.spawn(kind, payload(number), queue=QUEUE)

    async def many(self, kind: str, numbers: Sequence[int], queues: int, later: float | None) -> None:
        async with self._connection.transaction():
            for number in numbers:
                await self._app.spawn(kind, payload(number), queue=QUEUE)

    async def flows(self, kind: str, number: int) -> None:
        name = "fan" if kind == "fan" else "steps"
        async with self._connection.transaction():
            for each in [number] if kind == "fan" else range(number):
                await self._app.spawn(name, {"number": each}, queue=QUEUE)

    async def close(self) -> None:
        await self._connection.close()


class AbsurdAdapter:
    """Absurd."""

    traits = Traits(
        name="absurd",
        version=version("absurd-sdk"),
        settings="concurrency and batch 500 where the measure does not name one, poll_interval 0.25 (the default); "
        "many are spawned one by one in one transaction",
        done=f"select count(*) from absurd.t_{QUEUE} where state = 'completed'",
        keeps=True,
        flows={
            kind: f"select count(*) from absurd.t_{QUEUE} where task_name = '{name}' and state = 'completed'"
            for kind, name in (("fan", "fan"), ("chain", "steps"), ("steps", "steps"))
        },
        loop="asyncio",
        concurrency=500,
    )

    async def setup(self, dsn: str) -> None:
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
            await connection.execute(absurdctl.BUNDLED_SCHEMA_SQL.encode())
            for queue in (QUEUE, CHILDREN):
                await AsyncAbsurd(connection, queue_name=queue).create_queue()

    async def client(self, dsn: str) -> Client:
        return AbsurdClient(await psycopg.AsyncConnection.connect(dsn, autocommit=True))

    async def work(self, dsn: str, concurrency: int, queues: int, gate: Gate) -> None:
        app = AsyncAbsurd(dsn, queue_name=QUEUE)

        def register(kind: str) -> None:
            @app.register_task(kind)
            async def run(params: Any, ctx: Any) -> None:
                await BODIES[kind](**params)

        for kind in BODIES:
            register(kind)
        below = AsyncAbsurd(dsn, queue_name=CHILDREN)

        @below.register_task("add")
        async def child(params: Any, ctx: Any) -> int:
            return await add(**params)

        @app.register_task("steps")
        async def steps(params: Any, ctx: Any) -> int:
            number: int = params["number"]
            for step in range(LINKS):
                number = await ctx.step(f"add{step}", lambda number=number: add(number))
            return number

        @app.register_task("fan")
        async def fan(params: Any, ctx: Any) -> int:
            async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
                starter = AsyncAbsurd(connection, queue_name=CHILDREN)
                ids = [
                    (await starter.spawn("add", {"number": n}, queue=CHILDREN))["task_id"]
                    for n in range(params["number"])
                ]
            ends = [await ctx.await_task_result(each, queue_name=CHILDREN) for each in ids]
            return len(ends)

        await gate.ready()
        running = [asyncio.create_task(each.start_worker(concurrency=concurrency)) for each in (app, below)]
        stopping = asyncio.create_task(gate.stop.wait())
        await asyncio.wait((*running, stopping), return_when=asyncio.FIRST_COMPLETED)
        for each in (app, below):
            each.stop_worker()
        await asyncio.gather(*running)


if __name__ == "__main__":
    main(AbsurdAdapter())

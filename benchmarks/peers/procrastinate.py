"""Procrastinate: concurrency 50 and a pool of 20 gave it the best rate; more of either gave less."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import procrastinate

from benchmarks.peers.bodies import BODIES, TEXT, payload
from benchmarks.peers.kit import Client, Gate, Traits, main, queue_name

POOL = 20


def make_app(dsn: str, pool: int) -> procrastinate.App:
    """An app whose tasks are the bodies."""
    app = procrastinate.App(
        connector=procrastinate.PsycopgConnector(conninfo=dsn, min_size=1, max_size=pool), import_paths=[]
    )
    for name, body in BODIES.items():
        app.task(name=name, queue=queue_name(0, 1))(body)
    return app


class ProcrastinateClient:
    """An open app with one connection."""

    def __init__(self, app: procrastinate.App) -> None:
        self._app = app

    async def one(self, kind: str, number: int) -> None:
        await self._app.tasks[kind].defer_async(number=number, text=TEXT)

    async def many(self, kind: str, numbers: Sequence[int], queues: int, later: float | None) -> None:
        given: dict[str, Any] = {} if later is None else {"schedule_in": {"seconds": int(later)}}
        for queue in range(queues):
            deferrer = self._app.tasks[kind].configure(queue=queue_name(queue, queues), **given)
            mine = numbers[queue::queues]
            for start in range(0, len(mine), 10_000):
                await deferrer.batch_defer_async(*(payload(number) for number in mine[start : start + 10_000]))

    async def close(self) -> None:
        await self._app.close_async()


class Procrastinate:
    """Procrastinate."""

    traits = Traits(
        name="procrastinate",
        version=version("procrastinate"),
        settings=f"pool of {POOL}; concurrency 50 where the measure does not name one; batch_defer_async by 10,000",
        done="select count(*) from procrastinate_jobs where status = 'succeeded' and id > %(mark)s",
        mark="select coalesce(max(id), 0) from procrastinate_jobs",
        keeps=True,
        loop="asyncio",
        concurrency=50,
        later=True,
        queues=True,
        finished="procrastinate_jobs",
        fresh={"id": ""},
    )

    async def setup(self, dsn: str) -> None:
        app = make_app(dsn, 1)
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    async def client(self, dsn: str) -> Client:
        app = make_app(dsn, 1)
        await app.open_async()
        return ProcrastinateClient(app)

    async def work(self, dsn: str, concurrency: int, queues: int, gate: Gate) -> None:
        app = make_app(dsn, POOL)
        async with app.open_async():
            await gate.ready()
            running = asyncio.create_task(
                app.run_worker_async(
                    queues=None if queues > 1 else [queue_name(0, 1)],
                    concurrency=concurrency,
                    install_signal_handlers=False,
                )
            )
            stopping = asyncio.create_task(gate.stop.wait())
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main(Procrastinate())

"""Oban for Python, without its paid additions: a limit of 200 gave it the best rate, in uvloop as its CLI does."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import uvloop
from oban import Oban, worker
from oban.schema import install

from benchmarks.peers.bodies import BODIES, payload
from benchmarks.peers.kit import Client, Gate, Traits, main, queue_name

POOL = 10


def make_worker(kind: str) -> Any:
    """A worker class for one body."""

    class Body:
        async def process(self, job: Any) -> None:
            await BODIES[kind](**job.args)

    Body.__name__ = Body.__qualname__ = kind.capitalize()
    return worker(queue=queue_name(0, 1))(Body)


WORKERS = {kind: make_worker(kind) for kind in BODIES}


class ObanClient:
    """An instance without queues, on a pool of one."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._oban = Oban(pool=pool)

    async def one(self, kind: str, number: int) -> None:
        await self._oban.enqueue(WORKERS[kind].new(payload(number)))

    async def many(self, kind: str, numbers: Sequence[int], queues: int, later: float | None) -> None:
        given: dict[str, Any] = {} if later is None else {"scheduled_in": timedelta(seconds=later)}
        await self._oban.enqueue_many(
            WORKERS[kind].new(payload(number), queue=queue_name(number, queues), **given) for number in numbers
        )

    async def close(self) -> None:
        await self._pool.close()


class ObanAdapter:
    """Oban."""

    traits = Traits(
        name="oban",
        version=version("oban"),
        settings=f"limit 200 where the measure does not name a concurrency, pool of {POOL}; "
        "enqueue_many, which sends one statement a job in one transaction",
        done="select count(*) from oban_jobs where state = 'completed' and id > %(mark)s",
        mark="select coalesce(max(id), 0) from oban_jobs",
        keeps=True,
        loop="uvloop",
        concurrency=200,
        finished="oban_jobs",
        fresh={"id": ""},
    )

    async def setup(self, dsn: str) -> None:
        pool = await Oban.create_pool(dsn, min_size=1, max_size=1)
        await install(pool)
        await pool.close()

    async def client(self, dsn: str) -> Client:
        return ObanClient(await Oban.create_pool(dsn, min_size=1, max_size=1))

    async def work(self, dsn: str, concurrency: int, queues: int, gate: Gate) -> None:
        pool = await Oban.create_pool(dsn, min_size=1, max_size=POOL)
        oban = Oban(pool=pool, queues={queue_name(number, queues): concurrency for number in range(queues)})
        await gate.ready()
        await oban.start()
        await gate.stop.wait()
        await oban.stop()


if __name__ == "__main__":
    main(ObanAdapter(), uvloop.new_event_loop)

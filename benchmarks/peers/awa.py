"""Awa: a core in Rust that calls async bodies in Python; 300 workers on its queue storage gave it the best rate.

``install_queue_storage`` makes it so; a fresh ``migrate`` alone left it on the slower storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

from awa import AsyncClient

from benchmarks.peers.bodies import BODIES, payload
from benchmarks.peers.kit import Client, Gate, Traits, main, queue_name

STORAGE = "awa"
POOL = 10


@dataclass
class Noop:
    """Arguments of the no-op."""

    number: int
    text: str


@dataclass
class Sleep:
    """Arguments of the job that waits."""

    number: int
    text: str


@dataclass
class Probe:
    """Arguments of the probe."""

    number: int
    text: str


ARGUMENTS: dict[str, Any] = {"noop": Noop, "sleep": Sleep, "probe": Probe}


def connect(dsn: str, connections: int) -> AsyncClient:
    """A client; its driver wants a host before the path as well, and takes the socket's folder from ``?host=``."""
    return AsyncClient(dsn.replace("@/", "@localhost/"), max_connections=connections)


class AwaClient:
    """A client with one connection."""

    def __init__(self, dsn: str) -> None:
        self._client = connect(dsn, 1)

    async def one(self, kind: str, number: int) -> None:
        await self._client.insert(ARGUMENTS[kind](**payload(number)), queue=queue_name(0, 1))

    async def many(self, kind: str, numbers: Sequence[int], queues: int, later: float | None) -> None:
        at = None if later is None else datetime.now(UTC) + timedelta(seconds=later)
        await self._client.enqueue_many_copy(
            [ARGUMENTS[kind](**payload(number)) for number in numbers], queue=queue_name(0, 1), run_at=at
        )

    async def close(self) -> None:
        await self._client.close()


class AwaAdapter:
    """Awa."""

    traits = Traits(
        name="awa",
        version=version("awa-pg"),
        settings="queue storage, 300 workers where the measure does not name a concurrency; enqueue_many_copy",
        done="select (select coalesce(sum(completed_count), 0) from awa.receipt_completion_batches) "
        "+ (select count(*) from awa.done_entries where state = 'completed')",
        # Seconds after its end a job is gone: its segment is truncated, and a count stays (queue_terminal_rollups).
        keeps=False,
        core="rust",
        loop="asyncio, called from Rust",
        concurrency=300,
    )

    async def setup(self, dsn: str) -> None:
        client = connect(dsn, POOL)
        await client.migrate()
        await client.install_queue_storage(schema=STORAGE)
        await client.close()

    async def client(self, dsn: str) -> Client:
        return AwaClient(dsn)

    async def work(self, dsn: str, concurrency: int, queues: int, gate: Gate) -> None:
        client = connect(dsn, POOL)

        def register(kind: str) -> None:
            @client.task(ARGUMENTS[kind], queue=queue_name(0, 1))
            async def run(job: Any) -> None:
                await BODIES[kind](job.args.number, job.args.text)

        for kind in BODIES:
            register(kind)
        await gate.ready()
        await client.start([(queue_name(0, 1), concurrency)])
        await gate.stop.wait()
        await client.shutdown()


if __name__ == "__main__":
    main(AwaAdapter())

"""What tests of the worker share: gates that bodies wait at, events that were logged, jobs that are watched.

A gate is a row: the body waits until the test has opened it, so that a test acts exactly while a body runs. A gate that
nobody opens fails the body, and with it the test.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
from helpers import aeventually

from taskq.worker import Worker
from taskq.worker.claims import Claim

BOUND = 15.0
"""Seconds until something that a test waits for counts as never happening."""


class Gates:
    """Gates that bodies of this process wait at; ``reached`` says who has come."""

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}
        self.reached: list[str] = []

    def _of(self, name: str) -> asyncio.Event:
        return self._open.setdefault(name, asyncio.Event())

    async def wait(self, name: str = "gate") -> None:
        """For bodies: say that the gate was reached, and wait until it opens."""
        self.reached.append(name)
        async with asyncio.timeout(BOUND):
            await self._of(name).wait()

    def open(self, name: str = "gate") -> None:
        self._of(name).set()

    async def until_reached(self, name: str = "gate", times: int = 1) -> None:
        await aeventually(lambda: self.reached.count(name) >= times, BOUND)


class Events(logging.Handler):
    """What taskq has logged, by event."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        self.records.append({"event": getattr(record, "event", record.getMessage()), **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [r for r in self.records if r["event"] == event]


RunWorker: TypeAlias = Callable[..., AbstractAsyncContextManager[Worker]]


def claim_of(task: str, **values: Any) -> Claim:
    """A claim as the worker would have got it, for parts that are tested without a database."""
    now = datetime.now(UTC)
    whole: dict[str, Any] = {
        "worker_id": UUID(int=1),
        "job_id": uuid4(),
        "claim_epoch": 1,
        "task": task,
        "payload": "{}",
        "queue": "default",
        "priority": 5,
        "run_at": now,
        "policy_id": "p",
        "attempt": 0,
        "max_attempts": 3,
        "recoveries": 0,
        "retry_afters": 0,
        "snoozes": 0,
        "generation": 0,
        "effect_class": "idempotent",
        "deadline": None,
        "claimed_at": now,
        "meta": None,
    }
    return Claim(**(whole | values))


async def declare_lost(aconn: asyncpg.Connection, worker: UUID | None = None) -> None:
    """Declare workers lost, all or one, and settle what they had.

    Locked first, as ``mark_lost`` does: a claim that is on its way comes before. And all at once, so that nothing which
    a worker says or notices comes in between.
    """
    async with aconn.transaction():
        await aconn.execute(
            "select from taskq.workers w where $1::uuid is null or w.id = $1 order by w.id for update", worker
        )
        await aconn.execute(
            "update taskq.workers set status = 'lost', lease_expires_at = now(), ended_at = now()"
            " where ($1::uuid is null or id = $1) and status in ('live', 'draining')",
            worker,
        )
        await aconn.execute("select * from taskq.settle_lost()")


async def status_of(aconn: asyncpg.Connection, job: UUID) -> str:
    value: str = await aconn.fetchval("select status from taskq.all_jobs where id = $1", job)
    return value


async def until_status(aconn: asyncpg.Connection, job: UUID, *statuses: str, within: float = BOUND) -> dict[str, Any]:
    """Wait until a job has one of these statuses; give its row."""

    async def look() -> Any:
        row = await aconn.fetchrow("select * from taskq.all_jobs where id = $1", job)
        assert row is not None, f"job {job} is gone"
        assert row["status"] in statuses, row["status"]
        return row

    return dict(await aeventually(look, within))


async def outcomes(aconn: asyncpg.Connection, job: UUID) -> list[str]:
    """How each ended attempt of a job ended, in order."""
    found = await aconn.fetch("select outcome from taskq.attempts where job_id = $1 order by claim_epoch", job)
    return [row["outcome"] for row in found]

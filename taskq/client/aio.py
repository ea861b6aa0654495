"""The async sender, on asyncpg; a caller's own connection may be of another kind, see ``connections``."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID
from weakref import WeakKeyDictionary

import anyio
import asyncpg

from taskq.client.answers import OUTCOMES, Awaited, Waiting, job_info, placed, role_for, translated
from taskq.client.connections import kind_for, send
from taskq.client.requests import Batch, merge
from taskq.db.pools import AsyncPool
from taskq.db.queries import load
from taskq.db.shared import SharedStatements
from taskq.durations import Duration, parse_duration
from taskq.effects import EffectInfo
from taskq.errors import DatabaseRefusal
from taskq.handle import JobInfo
from taskq.policy import FORMAT, ExecutionPolicy
from taskq.promises import policies_of

if TYPE_CHECKING:
    from taskq.workflow.runs import Admission

__all__ = ["AsyncClient"]

Shared: TypeAlias = SharedStatements[Batch, tuple[UUID, bool]]
AT_ONCE: Final = 3
"""Enqueues under way before others wait: the server works on one while others are flushed and read."""
MOST_JOBS: Final = 500
MOST_CHARACTERS: Final = 4_000_000
"""Of the payloads of one statement."""
PATIENCE: Final = 0.1
"""Seconds."""
_OF_DATA: Final = ("22", "23")
"""Classes of SQLSTATE that are about what was sent."""


class AsyncClient:
    """Sends requests; keeps which policies are stored already.

    Args:
        dsn: Where the database is.
        schema: The schema of taskq.
        pool_size: The most connections for each event loop.
    """

    def __init__(self, dsn: str, schema: str, *, pool_size: int = 10) -> None:
        self.pool = AsyncPool(dsn, size=pool_size)
        self._schema = schema
        self._queries = load("client", schema)
        self._stored: set[str] = set()
        self._plans: set[str] = set()
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, Shared] = WeakKeyDictionary()

    async def ensure_policy(self, policy: ExecutionPolicy, policy_id: str | None = None) -> str:
        """Store a policy if this process has not seen it stored; give its id."""
        policy_id = policy_id or policy.id
        if policy_id not in self._stored:
            for each_id, each in policies_of(policy):
                await self._fetch("ensure_policy", each_id, FORMAT, json.dumps(each.spec()))
                if each.cohort is not None and each.cohort.limit is not None:
                    await self._fetch("ensure_limit", each.cohort.name, each.cohort.limit)
            self._stored.add(policy_id)
        return policy_id

    async def enqueue(self, batch: Batch) -> list[tuple[UUID, bool]]:
        """Send a batch, on its own connection if it names one; ids in input order, and whether each is new.

        Plain ones that come while others of this event loop are under way share a statement.
        """
        if not batch.is_plain:
            return await self._enqueue(batch)
        loop = asyncio.get_running_loop()
        shared = self._shared.get(loop)
        if shared is None:
            shared = self._shared[loop] = SharedStatements(
                lambda batches: self._enqueue(merge(batches)),
                undone=_about_one,
                size=lambda one: len(one.payload[0]),
                at_once=AT_ONCE,
                most=MOST_JOBS,
                most_size=MOST_CHARACTERS,
                patience=PATIENCE,
            )
        return [await shared.ask(batch)]

    async def close(self) -> None:
        """Close this event loop's connections, once what was asked for before is done."""
        if shared := self._shared.pop(asyncio.get_running_loop(), None):
            await shared.settle()
        await self.pool.close()

    async def _enqueue(self, batch: Batch) -> list[tuple[UUID, bool]]:
        kind = None if batch.connection is None else kind_for(batch.connection, awaited=True)
        for policy_id, policy in batch.policies.items():
            if policy_id not in self._stored:
                await self.ensure_policy(policy, policy_id)
        sql = self._queries["enqueue_many"]
        with translated(self._schema):
            if kind is not None:
                return placed(await send(kind, batch.connection, sql, batch))
            async with self.pool.connection() as connection:
                return placed(await connection.fetch(sql, *batch.arguments))

    async def store_plan(self, admission: Admission) -> None:
        """Store the plan of a run and its policies, each in a transaction of its own, unless this process has."""
        if admission.plan.hash not in self._plans:
            for policy_id, policy in admission.policies.items():
                await self.ensure_policy(policy, policy_id)
            for plan in admission.plan.whole():
                if plan.hash not in self._plans:
                    await self._fetch("store_plan", plan.text)
                    self._plans.add(plan.hash)

    async def start_run(self, admission: Admission) -> tuple[UUID, bool]:
        """Admit a run, on its own connection if it names one; its id, and whether it is new."""
        kind = None if admission.connection is None else kind_for(admission.connection, awaited=True)
        await self.store_plan(admission)
        sql = self._queries["start_run"]
        with translated(self._schema):
            if kind is not None:
                return placed(await send(kind, admission.connection, sql, admission))[0]
            async with self.pool.connection() as connection:
                return placed(await connection.fetch(sql, *admission.arguments))[0]

    async def wait(
        self, job_id: UUID, timeout: Duration | None, *, may_appear: bool, of: Awaited = "job"
    ) -> str | None:
        """Wait until a job or run has finished; the JSON text of its result."""
        limit = None if timeout is None else parse_duration(timeout)
        end = None if limit is None else time.monotonic() + limit
        waiting = Waiting(job_id, may_appear=may_appear, of=of)
        while True:
            rows = await self._fetch(OUTCOMES[of], str(job_id))
            over, text = waiting.look(rows[0] if rows else None)
            if over:
                return text
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise waiting.timed_out(limit or 0.0)
            await anyio.sleep(waiting.next_pause(left))

    async def get(self, job_id: UUID) -> JobInfo | None:
        """All about a job, or None."""
        rows = await self._fetch("get", str(job_id))
        return job_info(rows[0]) if rows else None

    async def effects(self, job_id: UUID) -> list[EffectInfo]:
        """The effects that the ends of a job have caused, the newest first."""
        return [EffectInfo.from_row(row) for row in await self._fetch("effects", str(job_id))]

    async def call(self, query: str, *arguments: Any) -> Any:
        """The one value that a query answers with."""
        return (await self._fetch(query, *arguments))[0][0]

    async def rows(self, query: str, *arguments: Any) -> Any:
        """The rows that a query answers with, their values in the order of its columns."""
        return await self._fetch(query, *arguments)

    async def _fetch(self, query: str, *arguments: Any) -> Any:
        with translated(self._schema, role_for(query)):
            async with self.pool.connection() as connection:
                return await connection.fetch(self._queries[query], *arguments)


def _about_one(exc: Exception) -> bool:
    """Whether nothing of a statement was done for the sake of one of its jobs.

    What would refuse each of them alike, such as a lock timeout or a full disk, is told to all at once: sent again
    apart, hundreds would wait for it in turn.
    """
    if isinstance(exc, DatabaseRefusal):
        return True
    return isinstance(exc, asyncpg.PostgresError) and str(exc.sqlstate)[:2] in _OF_DATA

"""The async sender, on asyncpg; a caller's own connection may be of another kind, see ``connections``."""

from __future__ import annotations

import json
import time
from typing import Any
from uuid import UUID

import anyio

from taskq.client.answers import Waiting, job_info, placed, role_for, translated
from taskq.client.connections import kind_for, send
from taskq.client.requests import Batch
from taskq.db.pools import AsyncPool
from taskq.db.queries import load
from taskq.durations import Duration, parse_duration
from taskq.effects import EffectInfo
from taskq.handle import JobInfo
from taskq.policy import FORMAT, ExecutionPolicy
from taskq.promises import policies_of

__all__ = ["AsyncClient"]


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

    async def ensure_policy(self, policy: ExecutionPolicy, policy_id: str | None = None) -> str:
        """Store a policy if this process has not seen it stored; give its id."""
        policy_id = policy_id or policy.id
        if policy_id not in self._stored:
            for each_id, each in policies_of(policy):
                await self._fetch("ensure_policy", each_id, FORMAT, json.dumps(each.spec()))
            self._stored.add(policy_id)
        return policy_id

    async def enqueue(self, batch: Batch) -> list[tuple[UUID, bool]]:
        """Send a batch, on its own connection if it names one; ids in input order, and whether each is new."""
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

    async def wait(self, job_id: UUID, timeout: Duration | None, *, may_appear: bool) -> str | None:
        """Wait until a job has finished; the JSON text of its result."""
        limit = None if timeout is None else parse_duration(timeout)
        end = None if limit is None else time.monotonic() + limit
        waiting = Waiting(job_id, may_appear=may_appear)
        while True:
            rows = await self._fetch("outcome", str(job_id))
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

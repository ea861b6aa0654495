"""The sync sender, on psycopg, for code without an event loop."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row, tuple_row

from taskq.client.answers import OUTCOMES, Awaited, Waiting, job_info, placed, role_for, translated
from taskq.client.connections import adapt, kind_for, send_sync
from taskq.client.requests import Batch
from taskq.db.pools import SyncPool
from taskq.db.queries import load
from taskq.durations import Duration, parse_duration
from taskq.effects import EffectInfo
from taskq.handle import JobInfo
from taskq.policy import FORMAT, ExecutionPolicy
from taskq.promises import policies_of

if TYPE_CHECKING:
    from taskq.workflow.runs import Admission

__all__ = ["SyncClient"]


class SyncClient:
    """Sends requests; keeps which policies are stored already. Safe to share between threads.

    Args:
        dsn: Where the database is.
        schema: The schema of taskq.
        pool_size: The most connections.
    """

    def __init__(self, dsn: str, schema: str, *, pool_size: int = 10) -> None:
        self.pool = SyncPool(dsn, size=pool_size)
        self._schema = schema
        self._queries = load("client", schema)
        self._stored: set[str] = set()
        self._plans: set[str] = set()

    def ensure_policy(self, policy: ExecutionPolicy, policy_id: str | None = None) -> str:
        """Store a policy if this process has not seen it stored; give its id."""
        policy_id = policy_id or policy.id
        if policy_id not in self._stored:
            for each_id, each in policies_of(policy):
                self._fetch("ensure_policy", each_id, FORMAT, json.dumps(each.spec()))
                if each.cohort is not None and each.cohort.limit is not None:
                    self._fetch("ensure_limit", each.cohort.name, each.cohort.limit)
            self._stored.add(policy_id)
        return policy_id

    def enqueue(self, batch: Batch) -> list[tuple[UUID, bool]]:
        """Send a batch, on its own connection if it names one; ids in input order, and whether each is new."""
        kind = None if batch.connection is None else kind_for(batch.connection, awaited=False)
        for policy_id, policy in batch.policies.items():
            if policy_id not in self._stored:
                self.ensure_policy(policy, policy_id)
        sql = self._queries["enqueue_many"]
        with translated(self._schema):
            if kind is not None:
                return placed(send_sync(kind, batch.connection, sql, batch))
            with self.pool.connection() as connection, psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
                adapt(cursor)
                return placed(cursor.execute(sql.encode(), batch.arguments).fetchall())

    def start_run(self, admission: Admission) -> tuple[UUID, bool]:
        """Admit a run, on its own connection if it names one; its id, and whether it is new."""
        kind = None if admission.connection is None else kind_for(admission.connection, awaited=False)
        if admission.plan.hash not in self._plans:
            for policy_id, policy in admission.policies.items():
                self.ensure_policy(policy, policy_id)
            for plan in admission.plan.whole():
                if plan.hash not in self._plans:
                    self._fetch("store_plan", plan.text)
                    self._plans.add(plan.hash)
        sql = self._queries["start_run"]
        with translated(self._schema):
            if kind is not None:
                return placed(send_sync(kind, admission.connection, sql, admission))[0]
            with self.pool.connection() as connection, psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
                adapt(cursor)
                return placed(cursor.execute(sql.encode(), admission.arguments).fetchall())[0]

    def wait(self, job_id: UUID, timeout: Duration | None, *, may_appear: bool, of: Awaited = "job") -> str | None:
        """Wait until a job or run has finished; the JSON text of its result."""
        limit = None if timeout is None else parse_duration(timeout)
        end = None if limit is None else time.monotonic() + limit
        waiting = Waiting(job_id, may_appear=may_appear, of=of)
        while True:
            rows = self._fetch(OUTCOMES[of], str(job_id))
            over, text = waiting.look(rows[0] if rows else None)
            if over:
                return text
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise waiting.timed_out(limit or 0.0)
            time.sleep(waiting.next_pause(left))

    def get(self, job_id: UUID) -> JobInfo | None:
        """All about a job, or None."""
        with translated(self._schema), self.pool.connection() as connection:
            cursor = psycopg.RawCursor(connection, row_factory=dict_row)
            row = cursor.execute(self._queries["get"].encode(), [str(job_id)], prepare=True).fetchone()
        return None if row is None else job_info(row)

    def effects(self, job_id: UUID) -> list[EffectInfo]:
        """The effects that the ends of a job have caused, the newest first."""
        return [EffectInfo.from_row(row) for row in self._fetch("effects", str(job_id))]

    def call(self, query: str, *arguments: Any) -> Any:
        """The one value that a query answers with."""
        return self._fetch(query, *arguments)[0][0]

    def rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """The rows that a query answers with, their values in the order of its columns."""
        return self._fetch(query, *arguments)

    def _fetch(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        with translated(self._schema, role_for(query)), self.pool.connection() as connection:
            cursor = psycopg.RawCursor(connection, row_factory=tuple_row)
            return cursor.execute(self._queries[query].encode(), arguments, prepare=True).fetchall()

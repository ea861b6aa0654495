"""The policies that a worker has met, read once each: a policy is immutable, so there is nothing to refresh."""

from __future__ import annotations

import json
from collections.abc import Iterable, KeysView, Mapping
from typing import Any

from taskq import errors
from taskq.policy import ExecutionPolicy
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.worker.connection import DATABASE_ERRORS, Connection

log = get_logger("worker")


class PolicyCache:
    """Policies by id.

    Args:
        queries: The named statements of ``db/sql/worker.sql``.
        tasks: The worker's tasks by name; their own policy stands in for one that cannot be read.
    """

    def __init__(self, queries: Mapping[str, str], tasks: Mapping[str, Task[..., Any]]) -> None:
        self._sql = queries
        self._tasks = tasks
        self._policies: dict[str, ExecutionPolicy] = {t.policy.id: t.policy for t in tasks.values()}
        self._missing: set[str] = set()

    @property
    def known(self) -> KeysView[str]:
        """The ids for which nothing need be read."""
        return self._policies.keys()

    def get(self, policy_id: str, task: str) -> ExecutionPolicy:
        """The policy of a job; the task's own, with one warning, where the row is missing or cannot be read."""
        policy = self._policies.get(policy_id)
        if policy is None:
            if policy_id not in self._missing:
                self._missing.add(policy_id)
                log.warning("policy.missing", policy_id=policy_id, task=task, used="the task's own policy")
            policy = self._tasks[task].policy
        return policy

    async def load(self, conn: Connection, ids: Iterable[str]) -> None:
        """Read policies; one that fails to be read now is tried again with the next claim that needs it."""
        try:
            rows = await conn.fetch(self._sql["policies"], list(ids))
        except DATABASE_ERRORS as exc:
            log.warning("policy.unavailable", error=str(exc))
            return
        for row in rows:
            try:
                self._policies[row["id"]] = ExecutionPolicy.from_spec(json.loads(row["spec"]))
            except (errors.TaskQError, AttributeError, TypeError, ValueError) as exc:
                log.error("policy.unreadable", policy_id=row["id"], error=str(exc))

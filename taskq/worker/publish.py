"""What a worker publishes about its tasks at boot, so that ``taskq.enqueue`` knows them in SQL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from taskq.policy import FORMAT
from taskq.promises import policies_of
from taskq.tasks import Task
from taskq.worker.connection import Connection


async def publish(
    queries: Mapping[str, str], conn: Connection, worker_id: UUID, tasks: Mapping[str, Task[..., Any]]
) -> None:
    """Tell the database of every task and of its policy."""
    for task in tasks.values():
        policy = task.policy
        for policy_id, each in policies_of(policy):
            await conn.fetch(queries["ensure_policy"], policy_id, FORMAT, json.dumps(each.spec()))
        await conn.fetch(
            queries["publish_task"],
            worker_id,
            task.name,
            policy.queue,
            policy.priority,
            policy.retry.max_attempts,
            policy.effect_class,
            policy.id,
            task.required_worker_schema,
            None if task.reconcile_task is None else task.reconcile_task.name,
        )

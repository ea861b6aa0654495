"""What a worker publishes at boot: its tasks, so that ``taskq.enqueue`` knows them in SQL, and its cohorts' limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from taskq.cohorts import Cohort
from taskq.policy import FORMAT
from taskq.promises import policies_of
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.worker.connection import Connection

log = get_logger("worker")


async def publish(
    queries: Mapping[str, str], conn: Connection, worker_id: UUID, tasks: Mapping[str, Task[..., Any]]
) -> None:
    """Tell the database of every task and of its policy, and of the limits of cohorts."""
    await publish_limits(queries, conn, cohorts_of(tasks))
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
            json.dumps({step: hook.name for step, hook in task.reconcile_steps.items()}),
        )


def cohorts_of(tasks: Mapping[str, Task[..., Any]]) -> dict[str, int]:
    """The limits that the code of these tasks has, by cohort: those of the tasks, and what their applications know."""
    found: dict[str, Cohort] = {}
    for task in tasks.values():
        found |= task._app.cohorts
        found |= {each.cohort.name: each.cohort for _, each in policies_of(task.policy) if each.cohort is not None}
    return {name: cohort.limit for name, cohort in sorted(found.items()) if cohort.limit is not None}


async def publish_limits(queries: Mapping[str, str], conn: Connection, limits: Mapping[str, int]) -> None:
    """Tell the database what limits the code has, and the log where that is news: changed, or not what counts."""
    if not limits:
        return
    for row in await conn.fetch(queries["publish_limits"], list(limits), list(limits.values())):
        was, now, operators = row["was"], row["code_limit"], row["operator_limit"]
        if was != now:
            log.info("limit.code_changed", cohort=row["name"], was=was, limit=now)
        if operators is not None and operators != now:
            log.warning("limit.operator_override", cohort=row["name"], operator_limit=operators, code_limit=now)

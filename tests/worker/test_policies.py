"""The policies that a worker meets: read once, and never a reason why a job cannot end."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from helpers import aeventually
from proxy import proxy
from worker_kit import Events, RunWorker, outcomes, until_status

from taskq import Retry, TaskQ
from taskq.db.queries import load
from taskq.policy import ExecutionPolicy
from taskq.tasks import Task
from taskq.worker.connection import Connection
from taskq.worker.policies import PolicyCache

pytestmark = pytest.mark.anyio


@pytest.fixture
async def side(dsn: str, anyio_backend: str) -> AsyncIterator[Connection]:
    connection = Connection(dsn, "taskq side")
    yield connection
    await connection.close()


def cache_of(task: Task[..., Any]) -> PolicyCache:
    return PolicyCache(load("worker", "taskq"), {task.name: task})


async def store(aconn: asyncpg.Connection, name: str, spec: object) -> None:
    await aconn.execute("select taskq.ensure_policy($1, 1, $2)", name, json.dumps(spec))


async def test_a_policy_is_read_as_it_was_stored(app: TaskQ, aconn: asyncpg.Connection, side: Connection) -> None:
    @app.task(max_attempts=2)
    async def nothing() -> None: ...

    stored = ExecutionPolicy(retry=Retry(17), timeout=30.0)
    await store(aconn, stored.id, stored.spec())
    policies = cache_of(nothing)
    assert set(policies.known) == {nothing.policy.id}
    await policies.load(side, [stored.id, "of nobody"])
    assert set(policies.known) == {nothing.policy.id, stored.id}
    assert policies.get(stored.id, nothing.name) == stored
    assert policies.get(nothing.policy.id, nothing.name) == nothing.policy


async def test_a_policy_without_a_row_is_told_of_once_and_the_tasks_own_is_used(
    app: TaskQ, side: Connection, events: Events
) -> None:
    @app.task(max_attempts=2)
    async def nothing() -> None: ...

    policies = cache_of(nothing)
    await policies.load(side, ["of nobody"])
    for _ in range(2):
        assert policies.get("of nobody", nothing.name) is nothing.policy
    [told] = events.of("policy.missing")
    assert (told["policy_id"], told["task"]) == ("of nobody", nothing.name)


@pytest.mark.parametrize(
    "spec",
    [
        {"priority": 5000},
        {"retry": {"max_attempts": "many"}},
        {"retry": {"backoff": {"of_a_later_release": 1}}},
        {"retry": {"backoff": 5}},
        {"retry": "often"},
        [1],
        None,
    ],
    ids=json.dumps,
)
async def test_a_policy_that_cannot_be_read_is_told_of_and_the_others_are_read(
    spec: object, app: TaskQ, aconn: asyncpg.Connection, side: Connection, events: Events
) -> None:
    @app.task
    async def nothing() -> None: ...

    good = ExecutionPolicy(priority=9)
    await store(aconn, "bad", spec)
    await store(aconn, good.id, good.spec())
    policies = cache_of(nothing)
    await policies.load(side, ["bad", good.id])
    assert [told["policy_id"] for told in events.of("policy.unreadable")] == ["bad"]
    assert policies.get("bad", nothing.name) is nothing.policy
    assert policies.get(good.id, nothing.name) == good


async def test_policies_that_cannot_be_asked_for_now_are_read_later(
    app: TaskQ, aconn: asyncpg.Connection, dsn: str, events: Events
) -> None:
    @app.task
    async def nothing() -> None: ...

    stored = ExecutionPolicy(priority=9)
    await store(aconn, stored.id, stored.spec())
    policies = cache_of(nothing)
    with proxy(dsn) as way:
        side = Connection(way.dsn, "taskq side")
        way.cut()
        await policies.load(side, [stored.id])
        assert len(events.of("policy.unavailable")) == 1
        assert stored.id not in policies.known
        way.restore()
        await policies.load(side, [stored.id])
        assert policies.get(stored.id, nothing.name) == stored
        await side.close()


async def test_a_job_ends_by_the_policy_that_was_in_force_when_it_was_enqueued(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str, events: Events
) -> None:
    @app.task(name="changed", max_attempts=5)
    async def before() -> None: ...

    old = await before.enqueue()
    async with TaskQ(dsn) as newer:

        @newer.task(name="changed", max_attempts=1)
        async def after() -> None:
            raise ValueError("no")

        async def ends() -> Any:
            return await outcomes(aconn, old.id)

        async with run_worker(of=newer):
            assert await aeventually(ends) == ["failed"]
        assert (await until_status(aconn, old.id, "pending"))["policy_id"] == before.policy.id
    assert events.of("policy.missing") == []

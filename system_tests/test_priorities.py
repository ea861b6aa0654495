"""A priority that a workflow lowers to one of its nodes, across real processes: what is claimed first, by record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from conftest import Journal, StartWorker, _module, until

from taskq import Run, TaskQ, Workflow

pytestmark = pytest.mark.anyio
LONG = 60.0
BACKLOG = 6


@pytest.fixture
async def app(dsn: str, anyio_backend: str) -> AsyncIterator[TaskQ]:
    made: TaskQ = _module("app_of_the_flows", Path(__file__).with_name("flows_under_test.py")).app
    made.use_database(dsn)
    yield made
    await made.close()


def rows(dsn: str, query: str, *args: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as conn:
        return conn.execute(query, args).fetchall()  # type: ignore[arg-type]


def claims(dsn: str, worker: str) -> list[tuple[UUID, int]]:
    """What a worker has claimed of the floor, in order, with the priorities."""
    return rows(
        dsn,
        "select j.id, j.priority from taskq.all_jobs j join taskq.workers w on w.id = j.worker_id"
        " where w.name = %s and j.queue = 'floor' and j.claimed_at is not null order by j.claimed_at, j.id",
        worker,
    )


async def lowered(
    app: TaskQ, start_worker: StartWorker, dsn: str, flow: Workflow[[int], None], backlog_priority: int
) -> tuple[Run[None], UUID, list[UUID]]:
    """A run whose second node has just become ready, behind a backlog; nobody serves their queue yet.

    Its node was made ready by the end of the first one, on a worker that has exited since.
    """
    waits = app.get_task("waits").using(priority=backlog_priority)
    backlog = [(await waits.enqueue(n)).id for n in range(BACKLOG)]
    entry = start_worker("entry", queue="entry", concurrency=1, app="flows_under_test:app")
    run = await flow.start(7)
    until(lambda: rows(dsn, "select from taskq.jobs where run_id = %s and queue = 'floor'", run.id), LONG)
    assert entry.stop() == 0
    [(node, status)] = rows(dsn, "select id, status from taskq.jobs where run_id = %s", run.id)
    assert status == "pending"
    assert rows(dsn, "select count(*) from taskq.jobs where queue = 'floor' and status = 'pending'") == [(BACKLOG + 1,)]
    return run, node, backlog


async def joined(start_worker: StartWorker, journal: Journal, dsn: str) -> tuple[UUID, UUID]:
    """One worker of one slot, and once its claim is seen a second; what each of them has claimed."""
    found: list[UUID] = []
    for n, name in enumerate(("first", "second"), 1):
        start_worker(name, queue="floor", concurrency=1, app="flows_under_test:app")
        until(lambda n=n: len(journal.of("start")) == n, LONG)
        [(job, _)] = claims(dsn, name)
        found.append(job)
    assert [UUID(job) for job, _ in journal.of("start")] == found
    return found[0], found[1]


async def test_a_high_priority_lowered_to_a_node_is_claimed_before_the_backlog(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    run, node, backlog = await lowered(app, start_worker, dsn, app.get_workflow("hurries"), 5)
    assert await joined(start_worker, journal, dsn) == (node, backlog[0])
    for job in (node, *backlog):
        journal.open_gate(f"gate.{job}")
    await run.result(timeout=LONG)
    until(lambda: rows(dsn, "select count(*) from taskq.jobs") == [(0,)], LONG)
    assert sorted(claims(dsn, "first") + claims(dsn, "second")) == sorted([(node, 8), *((job, 5) for job in backlog)])


async def test_a_backlog_of_a_higher_priority_goes_before_a_node_whose_own_was_raised(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    run, node, backlog = await lowered(app, start_worker, dsn, app.get_workflow("hurries"), 9)
    assert await joined(start_worker, journal, dsn) == (backlog[0], backlog[1])
    for job in (node, *backlog):
        journal.open_gate(f"gate.{job}")
    await run.result(timeout=LONG)
    assert UUID(journal.of("start")[-1][0]) == node

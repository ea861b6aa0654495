"""What a worker with nothing to do costs the database: counted by the server itself, one of the test's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import asyncpg
import pytest
from helpers import aeventually
from servers import Server, serve

from taskq import TaskQ, migrate
from taskq.worker import Worker, WorkerOptions

pytestmark = pytest.mark.anyio

SECONDS = 8.0
PER_SECOND = 1.5
"""Statements of one idle worker that leads: a poll a second, three renewals and looks a lease, pings now and then."""


@pytest.fixture(scope="module")
def counting_server() -> Iterator[Server]:
    with serve(settings={"shared_preload_libraries": "pg_stat_statements"}) as server:
        yield server


async def counted(conn: asyncpg.Connection) -> dict[str, int]:
    """Calls since the last reset, without this session's own; each under the name of the function that it calls."""
    rows = await conn.fetch(
        "select query, calls from pg_stat_statements s join pg_database d on d.oid = s.dbid"
        " where d.datname = current_database() and query not like '%pg_stat_statements%'"
    )
    found: dict[str, int] = {}
    for row in rows:
        name = row["query"].partition("taskq.")[2].partition("(")[0] or row["query"]
        found[name] = found.get(name, 0) + row["calls"]
    return found


async def test_an_idle_worker_that_leads_makes_few_statements(counting_server: Server) -> None:
    dsn = counting_server.dsn()
    await asyncio.to_thread(migrate.up, dsn)
    conn = await asyncpg.connect(dsn)
    await conn.execute("create extension pg_stat_statements")
    app = TaskQ(dsn)

    @app.task
    async def nothing() -> int:
        return 1

    worker = Worker(app.tasks, dsn, options=WorkerOptions())
    running = asyncio.create_task(worker.run())
    try:
        await asyncio.wait_for(worker.ready.wait(), 15)
        # All that is done once has been done: it leads, has made its first rounds, and has fallen asleep.
        assert await (await nothing.enqueue()).result(timeout=10) == 1
        await aeventually(lambda: worker.parts.maintenance.is_leader and worker.parts.maintenance._retention_at > 0)
        await aeventually(lambda: worker.parts.exchanger._asleep and worker.parts.exchanger._naps > 2)
        await conn.execute("select pg_stat_statements_reset()")
        started = time.monotonic()
        await asyncio.sleep(SECONDS)
        found = await counted(conn)
        took = time.monotonic() - started
    finally:
        worker.stop()
        assert await asyncio.wait_for(running, 15) == 0
        await app.close()
        await conn.close()
    # The leader's duties only where there is something to do.
    assert set(found) <= {"exchange", "renew", "look", "select $1"}, found
    assert {"exchange", "renew", "look"} <= set(found), found
    assert sum(found.values()) <= PER_SECOND * took + 3, (found, took)

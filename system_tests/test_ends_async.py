"""Ends that were committed asynchronously, and a server that crashes before it has written them.

The process that writes the log of writes in the background is stopped for the time being, and killing it crashes the
server: what no commit has waited for is gone then, each time.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from uuid import UUID

import psycopg
import pytest
from cluster import BOUND, Cluster
from conftest import until
from helpers import aeventually
from sql import End, attempts, claim_one, end, exchange, lose, one, register, running, settle, status, violations

from taskq import TaskQ
from taskq.worker import Worker, WorkerOptions
from taskq.worker.claims import End as Sent

pytestmark = pytest.mark.anyio
QUIET = {"autovacuum": "off", "max_wal_size": "1GB"}
"""Nothing but the tests' own commits."""


def stop_writer(cluster: Cluster) -> int:
    """Stop the background writer of the log of writes; give its process id."""
    pid = cluster.value("select pid from pg_stat_activity where backend_type = 'walwriter'")
    os.kill(pid, signal.SIGSTOP)
    return pid


def crash(cluster: Cluster, writer: int) -> None:
    """Crash the server, and wait until it has recovered by itself."""
    before = cluster.log.count("ready to accept connections")
    os.kill(writer, signal.SIGKILL)
    until(lambda: cluster.log.count("ready to accept connections") > before, BOUND)


@pytest.mark.parametrize("cluster", [QUIET], indirect=True)
@pytest.mark.parametrize("lost", [True, False], ids=["async", "sync"])
def test_an_end_that_a_crash_has_lost_runs_again_under_the_next_epoch(cluster: Cluster, lost: bool) -> None:
    with psycopg.connect(cluster.dsn, autocommit=True) as conn:
        worker, job = running(conn)
        writer = stop_writer(cluster)
        assert exchange(conn, worker, [End(job, result=1)], 5, ends_async=lost) == []
        assert status(conn, job) == "succeeded"
        crash(cluster, writer)
    with psycopg.connect(cluster.dsn, autocommit=True) as conn:
        assert status(conn, job) == ("running" if lost else "succeeded")
        if lost:
            lose(conn, worker)
            assert settle(conn) == {job: "pending"}
            other = register(conn)
            assert claim_one(conn, other)["claim_epoch"] == 2
            # What the first worker still says comes too late.
            assert [row["kind"] for row in exchange(conn, worker, [End(job, result=1)])] == ["missed"]
            assert end(conn, other, End(job, 2, result=2)) == 1
            assert attempts(conn, job) == [(1, "lost"), (2, "succeeded")]
        assert violations(conn) == []


@pytest.mark.parametrize("cluster", [QUIET], indirect=True)
def test_what_a_worker_does_next_makes_ends_last(cluster: Cluster) -> None:
    with psycopg.connect(cluster.dsn, autocommit=True) as conn:
        worker, job = running(conn)
        writer = stop_writer(cluster)
        assert exchange(conn, worker, [End(job)], ends_async=True) == []
        # What the worker sends to be sure: nothing to end and nothing to claim.
        assert exchange(conn, worker) == []
        crash(cluster, writer)
    with psycopg.connect(cluster.dsn, autocommit=True) as conn:
        assert status(conn, job) == "succeeded"


@pytest.mark.parametrize("cluster", [QUIET], indirect=True)
async def test_a_worker_that_outlives_the_crash_sends_the_end_again(cluster: Cluster, anyio_backend: str) -> None:
    app = TaskQ(cluster.dsn)
    ran: list[int] = []
    seen: list[str] = []

    @app.task
    async def work(n: int) -> int:
        ran.append(n)
        return 2 * n

    worker = Worker(app.tasks, cluster.dsn, options=WorkerOptions(ends_commit="async", lease=60, listen=False))
    running_worker = asyncio.create_task(worker.run())
    await asyncio.wait_for(worker.ready.wait(), BOUND)
    unflushed = worker.parts.exchanger._unflushed
    answered = unflushed.answered
    writer = stop_writer(cluster)

    def crashes(ends: list[Sent], now: float, *, flushed: bool) -> None:
        """The first time that an end was answered and not written: crash, and look what is left of it."""
        answered(ends, now, flushed=flushed)
        if unflushed and not seen:
            crash(cluster, writer)
            seen.append(str(cluster.query("select status from taskq.all_jobs")[0]["status"]))

    unflushed.answered = crashes  # type: ignore[method-assign]
    try:
        job = await work.enqueue(21)
        await aeventually(lambda: seen, BOUND)
        assert seen == ["running"]

        async def ended() -> bool:
            with suppress(psycopg.Error):
                return cluster.query("select status from taskq.all_jobs")[0]["status"] == "succeeded"
            return False

        await aeventually(ended, BOUND)
        await aeventually(lambda: worker.parts.outbox.pending == 0)
    finally:
        worker.stop()
        assert await asyncio.wait_for(running_worker, BOUND) == 0
        await app.close()
    with psycopg.connect(cluster.dsn, autocommit=True) as conn:
        assert one(conn, "select result from taskq.history where id = %s", job.id) == 42
        assert attempts(conn, UUID(str(job.id))) == [(1, "succeeded")]
        assert violations(conn) == []
    assert ran == [21]

"""The lease: renewed while bodies live, given up in time when it cannot be, and taken anew after a loss."""

from __future__ import annotations

import asyncio
import threading
import time

import asyncpg
import psycopg
import pytest
from helpers import aeventually
from proxy import proxy
from worker_kit import Events, Gates, RunWorker, declare_lost, outcomes

from taskq import TaskQ
from taskq.worker import Worker
from taskq.worker.lease import LeaseKeeper, Progress, Renewal, boot_clock

pytestmark = pytest.mark.anyio


async def lease_of(aconn: asyncpg.Connection, worker: Worker) -> float:
    """Seconds until the worker's lease runs out, by the database."""
    left: float = await aconn.fetchval(
        "select extract(epoch from lease_expires_at - taskq.now())::float8 from taskq.workers where id = $1",
        worker.worker_id,
    )
    return left


async def test_a_blocked_loop_keeps_the_lease_and_is_told_of_with_its_job(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str, events: Events
) -> None:
    @app.task
    async def blocks_the_loop() -> str:
        time.sleep(3.5)
        return "done"

    left: list[float] = []

    def watch() -> None:
        # From a thread, since the test's own loop is the one that is blocked.
        with psycopg.connect(dsn, autocommit=True) as conn:
            while not stop.wait(0.1):
                row = conn.execute(
                    "select extract(epoch from min(lease_expires_at) - taskq.now())::float8 from taskq.workers"
                ).fetchone()
                assert row is not None
                left.append(row[0])

    stop = threading.Event()
    async with run_worker(lease=2):
        thread = threading.Thread(target=watch)
        thread.start()
        job = await blocks_the_loop.enqueue()
        assert await job.result(timeout=10) == "done"
        stop.set()
        thread.join()
        assert min(left) > 0.5
        assert await outcomes(aconn, job.id) == ["succeeded"]
        [said] = events.of("loop.blocked")
        assert (said["task"], said["job_id"]) == ("blocks_the_loop", str(job.id))
        assert "time.sleep(3.5)" in said["stack"]


@pytest.mark.parametrize("how", ["declared lost", "row deleted"])
async def test_a_worker_that_lost_its_lease_cancels_its_bodies_and_starts_over(
    how: str, app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    cancelled: list[str] = []

    @app.task
    async def waits(n: int) -> int:
        try:
            await gates.wait(f"gate{n}")
        except asyncio.CancelledError:
            cancelled.append(f"gate{n}")
            raise
        return n

    async with run_worker() as worker:
        first = worker.worker_id
        job = await waits.enqueue(1)
        await gates.until_reached("gate1")
        gates.open("gate2")
        if how == "row deleted":
            # Both at once, so that the body's own last words cannot come in between.
            async with aconn.transaction():
                await aconn.execute("delete from taskq.workers where id = $1", first)
                await aconn.execute("select * from taskq.settle_lost()")
        else:
            await declare_lost(aconn, first)
        await aeventually(lambda: cancelled == ["gate1"])
        gates.open("gate1")
        # It goes on under a new id, and does the same job again.
        assert await job.result(timeout=10) == 1
        assert await (await waits.enqueue(2)).result(timeout=10) == 2
        assert worker.worker_id != first
        assert await outcomes(aconn, job.id) == ["lost", "succeeded"]
        await aeventually(lambda: worker.counts.fenced_out == 1)
        assert len(events.of("worker.registered_anew")) == 1


async def test_an_unreachable_database_cancels_bodies_before_the_lease_ends(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, dsn: str
) -> None:
    left: list[float] = []

    @app.task
    async def waits() -> int:
        try:
            await gates.wait()
        except asyncio.CancelledError:
            left.append(await lease_of(aconn, running))
            raise
        return 1

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn, lease=3) as running:
            job = await waits.enqueue()
            await gates.until_reached()
            way.blackhole()
            await aeventually(lambda: left)
            assert 0 < left[0] < 3
            way.restore()
            gates.open()
            assert await job.result(timeout=15) == 1
            assert (await outcomes(aconn, job.id))[-1] == "succeeded"


async def test_renewal_goes_on_after_a_renewal_that_got_no_answer(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str
) -> None:
    @app.task
    async def nothing() -> None: ...

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn, lease=3) as worker:
            way.blackhole()
            await aeventually(lambda: worker.parts.keeper.remaining < 0.5)
            way.restore()

            async def renewed() -> bool:
                return worker.parts.keeper.remaining > 1.5

            await aeventually(renewed)
            await (await nothing.enqueue()).result(timeout=10)


@pytest.mark.parametrize("silent", ["loop", "pool"])
async def test_a_loop_or_pool_without_progress_is_not_renewed_for_ever(silent: str, dsn: str, app: TaskQ) -> None:
    from taskq.db.queries import load

    renewals: list[Renewal] = []
    expiring = threading.Event()
    progress = Progress()
    keeper = LeaseKeeper(
        dsn=dsn,
        query=load("worker", "taskq")["renew"],
        lease=1.0,
        progress=progress,
        tolerance=1.0,
        bodies=lambda: 0,
        effects=lambda: 0,
        on_renewed=renewals.append,
        on_expiring=expiring.set,
    )
    conn = await asyncpg.connect(dsn)
    worker = await conn.fetchval("select taskq.register_worker('w', 'h', 1, '{q}', '{t}', 1, 1, '0', 1)")
    keeper.hold(worker, boot_clock())
    keeper.start()
    try:
        await aeventually(lambda: len(renewals) >= 2)

        def lives() -> bool:
            # The other of the two goes on.
            (progress.pool if silent == "loop" else progress.loop)()
            return expiring.is_set()

        await aeventually(lives)
    finally:
        keeper.halt()
        keeper.join(5)
        await conn.close()


async def test_a_worker_with_every_slot_taken_still_asks_whether_its_connection_lives(
    app: TaskQ, run_worker: RunWorker, gates: Gates
) -> None:
    @app.task
    async def waits() -> None:
        await gates.wait()

    async with run_worker(concurrency=1, tolerance=1, lease=1) as worker:
        job = await waits.enqueue()
        await gates.until_reached()
        before = worker.parts.progress.pool_at
        await aeventually(lambda: worker.parts.progress.pool_at > before + 2)
        assert worker.parts.keeper.remaining > 0
        gates.open()
        await job.result(timeout=5)


async def test_few_lines_are_logged_while_the_database_is_away(
    app: TaskQ, run_worker: RunWorker, dsn: str, events: Events
) -> None:
    @app.task
    async def nothing() -> int:
        return 1

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn, lease=15):
            job = await nothing.enqueue()
            assert await job.result(timeout=5) == 1
            events.records.clear()
            before = way.connections
            way.cut()
            end = time.monotonic() + 8
            await aeventually(lambda: time.monotonic() > end)
            tries, lines = way.connections - before, len(events.records)
            way.restore()
            again = time.monotonic()
            assert await (await nothing.enqueue()).result(timeout=5) == 1
            assert time.monotonic() - again < 5
            assert lines <= 18, events.records
            assert tries <= 60

"""Stopping: what is on its way when the signal comes, and an end without a database."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from proxy import proxy
from worker_kit import Gates, RunWorker, outcomes, status_of

from taskq import TaskQ
from taskq.worker import Worker, WorkerOptions
from taskq.worker.shutdown import GONE_WITHIN, PATIENCE

pytestmark = pytest.mark.anyio


async def released_as(aconn: asyncpg.Connection, job: UUID) -> tuple[bool, str]:
    """What the record says of the only attempt: whether its body had started, and why it was handed back."""
    [row] = await aconn.fetch("select error from taskq.attempts where job_id = $1", job)
    error = json.loads(row["error"])
    assert error["type"] == "Released"
    assert ("after" if error["body_started"] else "before") in error["message"]
    return error["body_started"], error["reason"]


async def test_claims_whose_answer_arrives_after_the_signal_are_handed_back(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str
) -> None:
    ran: list[int] = []

    @app.task(name="claimed_too_late")
    async def runs() -> None:
        ran.append(1)

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn, lease=10) as worker:
            held = way.hold(answer="claimed_too_late")
            job = await runs.enqueue()
            await aeventually(held.is_set)
            assert await status_of(aconn, job.id) == "running"
            worker.stop()
            await aeventually(lambda: worker.parts.exchanger.is_blocked("draining"))
            way.restore()
    assert ran == []
    assert await status_of(aconn, job.id) == "pending"
    assert await outcomes(aconn, job.id) == ["released"]
    assert await released_as(aconn, job.id) == (False, "shutdown")
    assert await aconn.fetchval("select status from taskq.workers") == "stopped"


async def test_claims_whose_answer_was_lost_are_handed_back_at_the_end(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str
) -> None:
    @app.task(name="its_answer_is_lost")
    async def runs() -> None: ...

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn, lease=30) as worker:
            swallowed = way.swallow(answer="its_answer_is_lost")
            job = await runs.enqueue()
            await aeventually(swallowed.is_set)
            worker.stop()
    assert await status_of(aconn, job.id) == "pending"
    assert await outcomes(aconn, job.id) == ["released"]


async def test_without_a_database_an_idle_worker_stops_in_a_few_seconds(
    app: TaskQ, run_worker: RunWorker, dsn: str
) -> None:
    @app.task
    async def nothing() -> int:
        return 1

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn):
            assert await (await nothing.enqueue()).result(timeout=5) == 1
            way.cut()
            start = time.monotonic()
        assert time.monotonic() - start < 10


async def test_outcomes_that_could_not_be_told_are_an_exit_code(
    app: TaskQ, run_worker: RunWorker, dsn: str, gates: Gates
) -> None:
    @app.task
    async def waits() -> None:
        await gates.wait()

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn, exit_code=1, lease=5):
            await waits.enqueue()
            await gates.until_reached()
            way.cut()
            gates.open()


async def test_a_worker_returns_promptly_from_bodies_that_swallow_their_cancellation(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    over = asyncio.Event()

    @app.task
    async def deaf() -> None:
        gates.reached.append("gate")
        while not over.is_set():
            with suppress(asyncio.CancelledError):
                await over.wait()

    try:
        async with run_worker(grace=0) as worker:
            job = await deaf.enqueue()
            await gates.until_reached()
            start = time.monotonic()
        assert time.monotonic() - start < PATIENCE + 1.5
        assert worker.has_abandoned
        assert await outcomes(aconn, job.id) == ["released"]
        assert await released_as(aconn, job.id) == (True, "shutdown")
    finally:
        over.set()


async def test_a_blocked_loop_does_not_keep_a_process_whose_bodies_were_left_behind(
    app: TaskQ, dsn: str, gates: Gates
) -> None:
    calls: list[tuple[float, int]] = []
    blocked_at = 0.0

    @app.task
    async def blocks() -> None:
        nonlocal blocked_at
        gates.reached.append("gate")
        while not worker.has_abandoned:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        blocked_at = time.monotonic()
        while not calls and time.monotonic() < blocked_at + 10:
            time.sleep(0.01)

    worker = Worker(
        app.tasks,
        dsn,
        options=WorkerOptions(grace=0, lease=30),
        on_abandoned=lambda code: calls.append((time.monotonic(), code)),
    )
    run = asyncio.create_task(worker.run())
    await asyncio.wait_for(worker.ready.wait(), 10)
    await blocks.enqueue()
    await gates.until_reached()
    worker.stop()
    await asyncio.wait_for(run, 20)
    assert calls[0][1] == 1
    assert calls[0][0] - blocked_at < GONE_WITHIN + 0.5


async def test_a_worker_that_an_operator_drains_lets_its_body_end_and_exits_in_good_order(
    app: TaskQ, gates: Gates, aconn: asyncpg.Connection, dsn: str
) -> None:
    @app.task(name="waits_at_a_gate")
    async def waits() -> None:
        await gates.wait()

    worker = Worker(app.tasks, dsn, options=WorkerOptions(concurrency=1, lease=3, grace=20, poll_interval=0.2))
    running = asyncio.create_task(worker.run())
    try:
        await worker.ready.wait()
        job = await waits.enqueue()
        later = await waits.enqueue()
        await gates.until_reached()
        assert await aconn.fetchval("select taskq.drain($1, 'a new machine', 'ann')", worker.worker_id) == "requested"
        await aeventually(lambda: worker.parts.exchanger.is_blocked("draining"))
        assert await aconn.fetchval("select taskq.drain($1)", worker.worker_id) == "draining"
        gates.open()
        assert await asyncio.wait_for(running, 20) == 0
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert (await status_of(aconn, job.id), await status_of(aconn, later.id)) == ("succeeded", "pending")
    assert await aconn.fetchval("select taskq.drain($1)", worker.worker_id) == "stopped"
    told = await aconn.fetch("select action, actor, reason, subject from taskq.audit")
    assert [tuple(row) for row in told] == [("drain", "ann", "a new machine", str(worker.worker_id))]

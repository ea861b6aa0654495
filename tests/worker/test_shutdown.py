"""Stopping: what is on its way when the signal comes, and an end without a database."""

from __future__ import annotations

import time

import asyncpg
import pytest
from helpers import aeventually
from proxy import proxy
from worker_kit import Gates, RunWorker, outcomes, status_of

from taskq import TaskQ

pytestmark = pytest.mark.anyio


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
            await aeventually(lambda: worker._exchanger.is_blocked("draining"))
            way.restore()
    assert ran == []
    assert await status_of(aconn, job.id) == "pending"
    assert await outcomes(aconn, job.id) == ["released"]
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

"""Cancelling and timeouts: what running bodies are told, and how their jobs end."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import suppress

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import Gates, RunWorker, outcomes, status_of, until_status

from taskq import JobContext, Retry, TaskQ
from taskq.policy import constant

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[True, False], ids=["notified", "by renewal"])
def listen(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_a_running_coroutine_is_cancelled(
    listen: bool, app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task(max_attempts=3)
    async def waits() -> None:
        await gates.wait()

    async with run_worker(listen=listen, lease=3):
        job = await waits.enqueue()
        await gates.until_reached()
        asked = time.monotonic()
        assert await job.cancel() == "requested"
        await until_status(aconn, job.id, "cancelled")
        assert time.monotonic() - asked < (0.8 if listen else 2.5)
        assert await outcomes(aconn, job.id) == ["cancelled"]
        assert await job.cancel() == "finished"


async def test_a_waiting_job_is_cancelled_and_never_runs(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    ran: list[str] = []

    @app.task
    async def waits() -> None:
        await gates.wait()

    @app.task
    async def never() -> None:
        ran.append("ran")

    async with run_worker(concurrency=1):
        first, job = await waits.enqueue(), await never.enqueue()
        await gates.until_reached()
        assert await job.cancel() in ("cancelled", "requested")
        gates.open()
        await first.result(timeout=5)
        await until_status(aconn, job.id, "cancelled")
        assert ran == []


async def test_a_function_in_a_thread_is_told(
    listen: bool, app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    started = threading.Event()

    @app.task
    def polls(ctx: JobContext) -> None:
        started.set()
        for _ in range(2000):
            ctx.raise_if_cancelled()
            time.sleep(0.005)

    async with run_worker(listen=listen):
        job = await polls.enqueue()
        await aeventually(started.is_set)
        assert await job.cancel() == "requested"
        await until_status(aconn, job.id, "cancelled", within=5)


async def test_a_body_that_returns_in_spite_of_a_cancel_has_succeeded(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task
    async def swallows() -> str:
        with suppress(asyncio.CancelledError):
            await gates.wait()
        return "all the same"

    async with run_worker():
        job = await swallows.enqueue()
        await gates.until_reached()
        assert await job.cancel() == "requested"
        assert await job.result(timeout=5) == "all the same"
        assert await outcomes(aconn, job.id) == ["succeeded"]


async def test_an_error_after_a_cancel_request_is_no_retry(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task(max_attempts=5)
    async def fails_meanwhile() -> None:
        with suppress(asyncio.CancelledError):
            await gates.wait()
        raise ValueError("before it looked")

    @app.task
    async def next_one() -> int:
        return 1

    async with run_worker(concurrency=1):
        job = await fails_meanwhile.enqueue()
        await gates.until_reached()
        await job.cancel()
        await until_status(aconn, job.id, "cancelled", within=5)
        assert await outcomes(aconn, job.id) == ["cancelled"]
        start = time.monotonic()
        assert await (await next_one.enqueue()).result(timeout=5) == 1
        assert time.monotonic() - start < 1


async def test_a_cancel_between_the_error_and_its_retry_ends_the_job(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, dsn: str
) -> None:
    ran: list[int] = []

    @app.task(retry=Retry(5, constant(0)))
    async def fails() -> None:
        ran.append(1)
        await gates.wait()
        raise ValueError("retryable")

    other = await asyncpg.connect(dsn)
    async with run_worker(listen=False):
        job = await fails.enqueue()
        await gates.until_reached()
        transaction = other.transaction()
        await transaction.start()
        # Holds the row's lock: the retry that follows waits for it, and then sees the request.
        assert await other.fetchval("select taskq.cancel($1)", job.id) == "requested"
        gates.open()

        async def the_retry_waits() -> bool:
            return await aconn.fetchval(
                "select exists (select from pg_stat_activity where application_name = 'taskq exchange'"
                " and wait_event_type = 'Lock' and datname = current_database())"
            )

        await aeventually(the_retry_waits)
        await transaction.commit()
        await until_status(aconn, job.id, "cancelled", within=5)
        assert ran == [1]
    await other.close()


async def test_a_retry_starts_without_marks_and_can_be_cancelled(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    marks: list[bool] = []

    @app.task(retry=Retry(5, constant(0)))
    async def fails_first(ctx: JobContext) -> None:
        marks.append(ctx.cancel_requested)
        if ctx.attempt == 1:
            raise ValueError("retryable")
        await gates.wait("second")

    async with run_worker():
        job = await fails_first.enqueue()
        await gates.until_reached("second")
        assert await job.cancel() == "requested"
        await until_status(aconn, job.id, "cancelled", within=5)
        assert marks == [False, False]
        assert await outcomes(aconn, job.id) == ["failed", "cancelled"]


async def test_who_wins_is_what_the_answer_says(app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    rand = random.Random(7)

    @app.task
    async def short(seconds: float) -> int:
        await asyncio.sleep(seconds)
        return 1

    async with run_worker():
        answers: dict[str, int] = {}
        for _ in range(150):
            job = await short.enqueue(rand.random() * 0.01)
            await asyncio.sleep(rand.random() * 0.015)
            answer = await job.cancel()
            answers[answer] = answers.get(answer, 0) + 1
            row = await until_status(aconn, job.id, "succeeded", "cancelled", within=5)
            assert answer != "cancelled" or row["status"] == "cancelled"
            assert answer != "finished" or row["status"] == "succeeded"
            ended = await outcomes(aconn, job.id)
            assert ended == ([] if answer == "cancelled" else [row["status"]])
        assert len(answers) >= 2, answers


# Timeouts -------------------------------------------------------------------------------------------------------------


async def test_a_coroutine_past_its_timeout_is_stopped_and_has_failed(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    ran: list[float] = []

    @app.task(retry=Retry(2, constant(0)), timeout=0.2)
    async def too_slow() -> None:
        start = time.monotonic()
        try:
            await asyncio.sleep(30)
        finally:
            ran.append(time.monotonic() - start)

    async with run_worker():
        job = await too_slow.enqueue()
        row = await until_status(aconn, job.id, "failed", within=10)
        assert row["attempt"] == 2
        assert "AttemptTimeout" in row["error"]
        assert all(0.2 <= seconds < 1 for seconds in ran)
        assert await outcomes(aconn, job.id) == ["failed", "failed"]


async def test_a_thread_that_ends_soon_after_its_timeout_needs_no_exit(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(timeout=0.2, max_attempts=1)
    def polite(ctx: JobContext) -> None:
        while not ctx.cancel_requested:
            time.sleep(0.01)
        ctx.raise_if_cancelled()

    async with run_worker() as worker:
        job = await polite.enqueue()
        row = await until_status(aconn, job.id, "failed", within=5)
        assert "AttemptTimeout" in row["error"]
        assert await status_of(aconn, job.id) == "failed"
        assert worker.parts.exchanger.claiming

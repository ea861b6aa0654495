"""Side-effecting bodies: called only after a proven effect start, never called again by themselves."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Events, Gates, RunWorker, outcomes, until_status

from taskq import JobContext, OutcomeUnknown, Retry, RetryAfter, TaskQ, constant

pytestmark = pytest.mark.anyio


async def unknown_of(aconn: asyncpg.Connection, job: UUID) -> dict[str, Any]:
    row = await aconn.fetchrow("select * from taskq.unknowns where job_id = $1", job)
    assert row is not None, "there is no record of how it became unknown"
    return dict(row)


async def test_the_effect_start_is_committed_before_the_body_and_kept_on_record(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    seen: list[Any] = []

    @app.task(effect_class="side_effecting")
    async def pay(ctx: JobContext) -> str:
        seen.append(await aconn.fetchval("select effect_started_at from taskq.jobs where id = $1", ctx.job_id))
        return "paid"

    async with run_worker() as worker:
        job = await pay.enqueue()
        assert await job.result(timeout=BOUND) == "paid"
        await aeventually(lambda: worker.counts.succeeded == 1, BOUND)
    row = await aconn.fetchrow("select * from taskq.history where id = $1", job.id)
    assert row["effect_started_at"] == seen[0] is not None
    assert (row["max_attempts"], row["required_worker_schema"]) == (1, 2)
    assert len(events.of("job.succeeded")) == 1


async def test_many_that_wait_start_in_few_statements(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(effect_class="side_effecting")
    async def pay(n: int) -> int:
        return n

    async with run_worker(concurrency=20):
        jobs = await app.enqueue_many(pay.job(n) for n in range(60))
        assert [await job.result(timeout=BOUND) for job in jobs] == list(range(60))


async def test_an_error_ends_the_job_unless_the_retry_names_it(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(effect_class="side_effecting")
    async def fails() -> None:
        raise ValueError("no")

    @app.task(effect_class="side_effecting", retry=Retry(3, constant(0), on=(ConnectionRefusedError,)))
    async def names(ctx: JobContext) -> None:
        raise ConnectionRefusedError if ctx.attempt == 1 else ValueError

    @app.task(effect_class="side_effecting")
    async def later(ctx: JobContext) -> None:
        if ctx.claim_epoch == 1:
            raise RetryAfter(0)

    async with run_worker():
        one, two, three = await fails.enqueue(), await names.enqueue(), await later.enqueue()
        await until_status(aconn, three.id, "succeeded")
        row = await until_status(aconn, two.id, "failed")
        assert (await until_status(aconn, one.id, "failed"))["attempt"] == 1
    assert await outcomes(aconn, one.id) == ["failed"]
    assert await outcomes(aconn, two.id) == ["failed", "failed"]
    assert row["error"] is not None
    assert await outcomes(aconn, three.id) == ["retry_after", "succeeded"]
    started = await aconn.fetch("select effect_started_at from taskq.attempts where job_id = $1", three.id)
    assert len({row["effect_started_at"] for row in started} - {None}) == 2, "each attempt has its own effect start"


async def test_a_body_that_does_not_know_leaves_its_job_unknown(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task(effect_class="side_effecting")
    async def pay() -> None:
        raise OutcomeUnknown("the bank did not answer")

    async with run_worker() as worker:
        job = await pay.enqueue()
        await until_status(aconn, job.id, "unknown")
        await aeventually(lambda: worker.counts.unknown == 1, BOUND)
        row = await unknown_of(aconn, job.id)
        assert (row["reason"], row["claim_epoch"]) == ("told", 1)
        assert "the bank did not answer" in row["error"]
    assert await until_status(aconn, job.id, "unknown"), "a worker that stops leaves it as it is"
    [event] = events.of("job.unknown")
    assert (event["job_id"], event["reason"]) == (str(job.id), "told")


async def test_a_timeout_leaves_the_job_unknown_unless_the_body_returns(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(effect_class="side_effecting", timeout=0.2)
    async def hangs() -> None:
        await asyncio.sleep(60)

    @app.task(effect_class="side_effecting", timeout=0.2)
    async def finishes() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "it happened"
        return ""

    async with run_worker():
        lost, done = await hangs.enqueue(), await finishes.enqueue()
        assert await done.result(timeout=BOUND) == "it happened"
        await until_status(aconn, lost.id, "unknown")
        assert (await unknown_of(aconn, lost.id))["reason"] == "timed_out"


async def test_a_cancel_does_not_stop_what_has_started_and_says_so(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    contexts: list[JobContext] = []

    @app.task(effect_class="side_effecting")
    async def pay(ctx: JobContext) -> str:
        contexts.append(ctx)
        await gates.wait()
        return "paid"

    async with run_worker():
        job = await pay.enqueue()
        await gates.until_reached()
        assert await job.cancel() == "requested"
        details = await aconn.fetchval("select details from taskq.audit where subject = $1", str(job.id))
        assert '"effect_started": true' in details
        await aeventually(lambda: contexts[0].cancel_requested, BOUND)
        gates.open()
        assert await job.result(timeout=BOUND) == "paid"
    assert await outcomes(aconn, job.id) == ["succeeded"]

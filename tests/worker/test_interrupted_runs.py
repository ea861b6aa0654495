"""Failures, cancels and deploys that meet nodes of runs, and the durable bodies in them, as they meet any job."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Gates, RunWorker, outcomes, status_of

from taskq import Cohort, JobContext, Retry, Run, RunCancelled, TaskQ, Workflow, constant, exponential

pytestmark = pytest.mark.anyio
AGAIN = Retry(5, constant(0))


async def job_of(run: Run[int]) -> UUID:
    """The job of its only node."""
    [node] = await run.nodes()
    assert node.job_id is not None
    return node.job_id


async def test_however_often_a_node_has_failed_it_waits_for_a_date_and_its_worker_goes_on(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(retry=Retry(None, exponential("1s", factor=5, cap="2h")))
    async def fails() -> int:
        raise ValueError("again")

    @app.task
    async def next_one() -> int:
        return 1

    @app.workflow
    def flow() -> int:
        return fails.step()

    failed = {17: await flow.start(), 60: await flow.start(), 1100: await flow.start()}
    jobs = {n: await job_of(run) for n, run in failed.items()} | {1101: (await fails.enqueue()).id}
    for n, job in jobs.items():
        await aconn.execute("update taskq.jobs set attempt = $2 where id = $1", job, n)
    async with run_worker():
        for n, job in jobs.items():

            async def waits(n: int = n, job: UUID = job) -> bool:
                return bool(
                    await aconn.fetchval(
                        "select status = 'pending' and attempt = $2 + 1 and run_at > now()"
                        " and run_at <= now() + interval '2 h' from taskq.jobs where id = $1",
                        job,
                        n,
                    )
                )

            await aeventually(waits, BOUND)
            assert await outcomes(aconn, job) == ["failed"]
            # What it had failed before is not on record, as the laws ask at the end.
            await aconn.execute("update taskq.jobs set attempt = 1 where id = $1", job)
        assert await (await next_one.enqueue()).result(timeout=BOUND) == 1
    for run in failed.values():
        assert (await run.info()).status == "running"


async def test_deploys_use_no_attempt_of_a_node_repeat_no_step_of_it_and_free_its_limit(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    """Five workers that stop in the midst of it; with their leases of a minute nothing waits for the end of one."""
    called: list[str] = []

    async def pay() -> int:
        called.append("pay")
        return 7

    @app.task(retry=Retry(max_attempts=3), cohort=Cohort("one", limit=1))
    async def works(ctx: JobContext, n: int) -> int:
        paid = await ctx.step("pay", pay)
        await gates.wait(f"{n} {ctx.claim_epoch}")
        return paid + n

    @app.workflow
    def flow(n: int) -> int:
        return works.step(n)

    run, behind = await flow.start(1), await works.enqueue(2)
    job = await job_of(run)
    for n in range(1, 6):
        async with run_worker(grace=0.1, lease=60):
            await gates.until_reached(f"1 {n}")
        row = await aconn.fetchrow("select status, attempt, recoveries, releases from taskq.jobs where id = $1", job)
        assert tuple(row) == ("pending", 0, 0, n)
        assert await status_of(aconn, behind.id) == "pending"
    gates.open("1 6")
    gates.open("2 1")
    async with run_worker(lease=60):
        assert await run.result(timeout=BOUND) == 8
        assert await behind.result(timeout=BOUND) == 9
    assert called == ["pay", "pay"]
    assert await outcomes(aconn, job) == ["released"] * 5 + ["succeeded"]
    assert await outcomes(aconn, behind.id) == ["succeeded"]


@pytest.mark.parametrize("where", ["body", "step"])
async def test_an_error_after_its_run_was_cancelled_is_no_retry(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, where: str
) -> None:
    async def fails_meanwhile() -> int:
        with suppress(asyncio.CancelledError):
            await gates.wait()
        raise ValueError("before it looked")

    @app.task(retry=AGAIN)
    async def fails(ctx: JobContext) -> int:
        return await (ctx.step("fails", fails_meanwhile) if where == "step" else fails_meanwhile())

    @app.task
    async def next_one() -> int:
        return 1

    @app.workflow
    def flow() -> int:
        return fails.step()

    async with run_worker(concurrency=1):
        run = await flow.start()
        await gates.until_reached()
        assert await run.cancel("enough") == "requested"
        with pytest.raises(RunCancelled):
            await run.result(timeout=BOUND)
        assert await (await next_one.enqueue()).result(timeout=BOUND) == 1
    assert gates.reached == ["gate"]
    assert await outcomes(aconn, await job_of(run)) == ["cancelled"]
    assert await aconn.fetchval("select count(*) from taskq.jobs") == 0


def failing_first(app: TaskQ, gates: Gates, marks: list[tuple[int, bool]]) -> Workflow[[], int]:
    """A node whose first attempt fails; later ones wait at gates under their epochs."""

    @app.task(retry=AGAIN)
    async def fails_first(ctx: JobContext) -> int:
        marks.append((ctx.claim_epoch, ctx.cancel_requested))
        if ctx.claim_epoch == 1:
            raise ValueError("retryable")
        await gates.wait(f"epoch {ctx.claim_epoch}")
        return ctx.claim_epoch

    @app.workflow
    def flow() -> int:
        return fails_first.step()

    return flow


async def test_an_attempt_of_a_node_starts_without_cancel_marks_after_a_retry_of_it_or_of_its_run(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    marks: list[tuple[int, bool]] = []
    flow = failing_first(app, gates, marks)
    async with run_worker():
        run = await flow.start()
        for epoch in (2, 3):
            await gates.until_reached(f"epoch {epoch}")
            assert await run.cancel() == "requested"
            # Its body is interrupted, or it would wait at the gate until that fails it.
            with pytest.raises(RunCancelled):
                await run.result(timeout=BOUND / 2)
            assert await run.retry("after all") == "reopened"
        gates.open("epoch 4")
        assert await run.result(timeout=BOUND) == 4
    assert marks == [(epoch, False) for epoch in (1, 2, 3, 4)]
    assert await outcomes(aconn, await job_of(run)) == ["failed", "cancelled", "cancelled", "succeeded"]

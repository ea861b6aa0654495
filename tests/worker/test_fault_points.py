"""Every fault point, on both sides, by an exception and by a cut connection: each job ends exactly as promised."""

from __future__ import annotations

import asyncio
from typing import get_args
from uuid import UUID

import asyncpg
import pytest
from fault_kit import SIDES, check, promise
from helpers import aeventually
from worker_kit import BOUND, Events, RunWorker, outcomes, until_status

from taskq import JobContext, Retry, TaskQ, constant
from taskq.errors import ConfigurationError, FaultInjected
from taskq.testing import Fault, How, Point, When, faults
from taskq.testing.points import parse_fault
from taskq.worker import Worker, WorkerOptions, points

pytestmark = pytest.mark.anyio
OPTIONS = WorkerOptions(concurrency=10, lease=1, grace=2, poll_interval=0.05)
WAYS = [(point, when, how) for point in Point for when in SIDES for how in get_args(How) if how != "kill"]


class Work:
    """Jobs that succeed and jobs that fail once, and the runs of their bodies."""

    def __init__(self, app: TaskQ) -> None:
        self.app = app
        self.runs: list[tuple[UUID, int]] = []

        @app.task(retry=Retry(5, constant(0)))
        async def succeeds(ctx: JobContext) -> None:
            self.runs.append((ctx.job_id, ctx.claim_epoch))

        @app.task(retry=Retry(5, constant(0)))
        def fails_once(ctx: JobContext) -> None:
            self.runs.append((ctx.job_id, ctx.claim_epoch))
            if ctx.attempt == 1:
                raise ValueError("the first attempt fails")

        self.succeeds, self.fails_once = succeeds, fails_once

    async def enqueue(self) -> dict[UUID, list[str]]:
        """Enqueue a handful; give how the attempts of each end without faults."""
        jobs = await self.app.enqueue_many([self.succeeds.job() for _ in range(4)] + [self.fails_once.job()])
        return {job.id: ["succeeded"] for job in jobs[:4]} | {jobs[4].id: ["failed", "succeeded"]}


@pytest.mark.parametrize(("point", "when", "how"), WAYS, ids=lambda value: str(value))
async def test_a_fault_costs_no_more_than_is_promised(
    point: Point, when: When, how: How, app: TaskQ, dsn: str, aconn: asyncpg.Connection
) -> None:
    work = Work(app)
    wanted = await work.enqueue()
    promised = promise(point, when, how)

    async def is_done() -> bool:
        return not await aconn.fetchval("select exists (select from taskq.jobs)")

    with faults.at(point, when, how) as fault:
        worker = Worker(app.tasks, dsn, options=OPTIONS)
        running = asyncio.create_task(worker.run())
        try:
            await aeventually(lambda: fault.fired, BOUND)
            if promised.kills:
                with pytest.raises(FaultInjected, match=f"{when} {point}"):
                    await asyncio.wait_for(running, BOUND)
                worker = Worker(app.tasks, dsn, options=OPTIONS)
                running = asyncio.create_task(worker.run())
            await aeventually(is_done, BOUND)
            assert not running.done()
        finally:
            if not running.done():
                await worker.ready.wait()
                worker.stop()
                assert await asyncio.wait_for(running, BOUND) == 0
    [struck] = fault.fired
    assert (struck.point, struck.when) == (point, when)
    check(dsn, promised, hit=struck.jobs, wanted=wanted, runs=work.runs)

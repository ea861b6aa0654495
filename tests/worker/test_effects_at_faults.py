"""Terminal effects under faults: a worker that is cut off at an end leaves the end with its effect, or neither."""

from __future__ import annotations

import asyncio
from collections import Counter
from uuid import UUID

import asyncpg
import pytest
from fault_kit import SIDES
from helpers import aeventually

from taskq import JobContext, Ref, TaskQ, TerminalEffect
from taskq.errors import FaultInjected
from taskq.testing import How, Point, When, faults
from taskq.worker import Worker, WorkerOptions

pytestmark = pytest.mark.anyio
OPTIONS = WorkerOptions(concurrency=10, lease=1, grace=2, poll_interval=0.05)
BOUND = 40.0
WITHOUT = """
select count(*) from taskq.history h where h.has_effects
   and not exists (select from taskq.effect_intents i where i.owner_job_id = h.id)
"""
TOO_EARLY = "select count(*) from taskq.effect_intents i where i.owner_job_id in (select j.id from taskq.jobs j)"


@pytest.mark.parametrize("how", ["raise", "drop"])
@pytest.mark.parametrize("when", SIDES)
@pytest.mark.parametrize("point", [Point.END_SENT, Point.END_COMMITTED, Point.END_RECEIVED])
async def test_an_end_and_its_effects_are_there_together_or_not_at_all(
    point: Point, when: When, how: How, app: TaskQ, dsn: str, aconn: asyncpg.Connection
) -> None:
    told: list[UUID] = []

    @app.task
    async def tell(ctx: JobContext, whose: str) -> None:
        told.append(UUID(whose))

    @app.task(max_attempts=1, effects=[TerminalEffect(tell, payload={"whose": Ref.job_id()})])
    async def work(good: bool) -> None:
        if not good:
            raise ValueError("bad")

    jobs = await app.enqueue_many([work.job(n % 2 == 0) for n in range(6)])

    async def is_done() -> bool:
        assert await aconn.fetchval(WITHOUT) == await aconn.fetchval(TOO_EARLY) == 0
        return not await aconn.fetchval("select exists (select from taskq.jobs)")

    with faults.at(point, when, how) as fault:
        worker = Worker(app.tasks, dsn, options=OPTIONS)
        running = asyncio.create_task(worker.run())
        try:
            await aeventually(lambda: fault.fired, BOUND)
            assert await aconn.fetchval(WITHOUT) == await aconn.fetchval(TOO_EARLY) == 0
            if how == "raise":
                await asyncio.wait([running], timeout=2)
            if running.done():
                with pytest.raises(FaultInjected):
                    await running
                worker = Worker(app.tasks, dsn, options=OPTIONS)
                running = asyncio.create_task(worker.run())
            await aeventually(is_done, BOUND)
        finally:
            if not running.done():
                await worker.ready.wait()
                worker.stop()
            await asyncio.wait_for(running, BOUND)
    made = await aconn.fetch("select owner_job_id, count(*)::int as n from taskq.effect_intents group by 1")
    assert {r["owner_job_id"]: r["n"] for r in made} == {job.id: 1 for job in jobs}
    assert await aconn.fetchval("select count(*) from taskq.history where task = 'tell'") == len(jobs)
    assert set(Counter(told)) == {job.id for job in jobs}
    assert await aconn.fetch("select * from taskq.check_invariants('all')") == []

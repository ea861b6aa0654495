"""Every fault point, on both sides, by an exception and by a cut connection: each job ends exactly as promised."""

from __future__ import annotations

import asyncio
from typing import get_args
from uuid import UUID

import asyncpg
import pytest
from fault_kit import SIDES, check, promise
from helpers import aeventually
from worker_kit import Events, RunWorker, outcomes, until_status

from taskq import JobContext, Retry, TaskQ, constant
from taskq.errors import ConfigurationError, FaultInjected
from taskq.testing import Fault, How, Point, When, faults
from taskq.testing.points import parse_fault
from taskq.worker import Worker, WorkerOptions, points

pytestmark = pytest.mark.anyio
OPTIONS = WorkerOptions(concurrency=10, lease=1, grace=2, poll_interval=0.05)
BOUND = 40.0
"""Seconds; a worker may be ended and its claims settled meanwhile, on a busy machine."""
ALL = [f"{point}:{when}" for point in Point for when in SIDES if point is not Point.EFFECT_START_COMMITTED]
OF_EFFECTS = [f"{point}:{when}" for point in Point for when in SIDES]
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

        @app.task(effect_class="side_effecting")
        async def pays(ctx: JobContext) -> None:
            self.runs.append((ctx.job_id, ctx.claim_epoch))

        self.succeeds, self.fails_once, self.pays = succeeds, fails_once, pays

    async def enqueue(self) -> dict[UUID, list[str]]:
        """Enqueue a handful; give how the attempts of each end without faults."""
        jobs = await self.app.enqueue_many([self.succeeds.job() for _ in range(4)] + [self.fails_once.job()])
        return {job.id: ["succeeded"] for job in jobs[:4]} | {jobs[4].id: ["failed", "succeeded"]}


@pytest.mark.parametrize(("point", "when", "how"), WAYS, ids=str)
async def test_a_fault_costs_no_more_than_is_promised(
    point: Point, when: When, how: How, app: TaskQ, dsn: str, aconn: asyncpg.Connection, events: Events
) -> None:
    work = Work(app)
    wanted = await work.enqueue()
    effect = await work.pays.enqueue()
    promised = promise(point, when, how)

    async def is_done() -> bool:
        return not await aconn.fetchval("select exists (select from taskq.jobs where status <> 'unknown')")

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
    assert events.of("job.fenced_out") == []
    hit = [job for job in struck.jobs if job != effect.id]
    check(dsn, promised, hit=hit, wanted=wanted, runs=[run for run in work.runs if run[0] != effect.id])
    await check_effect(aconn, effect.id, [run for run in work.runs if run[0] == effect.id])
    if point is Point.EFFECT_START_COMMITTED:
        assert struck.jobs == (effect.id,)
        assert await outcomes(aconn, effect.id) == ["succeeded"], "asked again, the start is answered"


async def check_effect(aconn: asyncpg.Connection, job: UUID, runs: list[tuple[UUID, int]]) -> None:
    """Whatever struck it: it has run once and succeeded, or it is unknown and has run at most once."""
    row = await aconn.fetchrow("select * from taskq.all_jobs where id = $1", job)
    assert row is not None
    assert len(runs) <= 1, "no second start"
    if row["status"] == "unknown":
        assert await aconn.fetchval("select count(*) from taskq.unknowns where job_id = $1", job) == 1
    else:
        assert (row["status"], len(runs)) == ("succeeded", 1)
    assert row["effect_started_at"] is not None


async def test_a_job_passes_the_points_in_order(app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    work = Work(app)
    with faults.trace() as trace:
        wanted = await work.enqueue()
        async with run_worker(poll_interval=0.05):
            for job in wanted:
                await until_status(aconn, job, "succeeded")
    for job, asked in wanted.items():
        passed = trace.of(job)
        if len(asked) == 1:
            assert passed == ALL
        else:
            # The exchange that ends the first attempt may claim the second: the points of each stay in order.
            assert passed[: len(ALL[:8])] == ALL[:8]
            assert [point for point in passed if not point.startswith("end")] == ALL[:8] * 2
            assert [point for point in passed if point.startswith("end")] == ALL[8:] * 2
    assert points.watch is None


async def test_a_side_effecting_job_passes_one_point_more(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    work = Work(app)
    with faults.trace() as trace:
        async with run_worker():
            job = await work.pays.enqueue()
            await until_status(aconn, job.id, "succeeded")
    assert trace.of(job.id) == OF_EFFECTS


async def test_a_suspect_passes_the_same_points(app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    work = Work(app)
    job = await work.succeeds.enqueue()
    for _ in range(2):
        await aconn.execute(
            "select * from taskq.claim(taskq.register_worker('gone', 'h', 1, '{default}', '{succeeds}', 1, 1, '0', 60),"
            " 1, '{succeeds}', '{default}', '{5}', '{-infinity}',"
            " array['00000000-0000-0000-0000-000000000000'::uuid])"
        )
        await aconn.execute("update taskq.workers set lease_expires_at = '-infinity'")
        await aconn.execute("select * from taskq.mark_lost()")
        await aconn.execute("select * from taskq.settle_lost()")
    with faults.trace() as trace:
        async with run_worker():
            await until_status(aconn, job.id, "succeeded")
    assert trace.of(job.id) == ALL
    assert await outcomes(aconn, job.id) == ["lost", "lost", "succeeded"]


async def test_a_fault_strikes_as_often_as_it_is_told_after_those_that_it_skips(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    work = Work(app)
    with (
        faults.trace() as trace,
        faults.at(Point.BODY_DONE, "before", "raise", skip=2, times=2) as fault,
    ):
        async with run_worker(concurrency=1):
            for _ in range(6):
                await until_status(aconn, (await work.succeeds.enqueue()).id, "succeeded")
    ended = [passage for passage in trace.passages if str(passage) == "body_done:before"]
    assert fault.fired == ended[2:4]
    assert fault.passed == len(ended)
    # The second struck where the first had left an end to be kept: nothing of it is on record, so the body runs again,
    # and the worker has lost no slot.
    [again] = {job for passage in fault.fired for job in passage.jobs}
    assert await outcomes(aconn, again) == ["released", "succeeded"]


async def test_a_fault_behind_the_end_of_a_body_lets_that_end_stand(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    work = Work(app)
    with faults.at(Point.BODY_DONE, "after", "raise") as fault:
        async with run_worker():
            job = await work.succeeds.enqueue()
            await until_status(aconn, job.id, "succeeded")
    assert [passage.jobs for passage in fault.fired] == [(job.id,)]
    assert len(events.of("job.end_not_decided")) == 1
    assert await outcomes(aconn, job.id) == ["succeeded"]
    assert events.of("job.fenced_out") == []


async def test_an_answer_that_a_fault_swallows_was_committed(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    """Seen from a second connection at the very moment: the end is in history, and the worker does not know."""
    work = Work(app)
    with faults.at(Point.END_COMMITTED, "after", "drop") as fault:
        async with run_worker() as worker:
            job = await work.succeeds.enqueue()
            await aeventually(lambda: fault.fired, BOUND)
            assert await aconn.fetchval("select status from taskq.history where id = $1", job.id) == "succeeded"
            assert worker.parts.outbox.holds(job.id, 1)
            await aeventually(lambda: not worker.parts.outbox.pending, BOUND)
    assert await outcomes(aconn, job.id) == ["succeeded"]
    assert [e["connection"] for e in events.of("database.unavailable")] == ["taskq exchange"]


async def test_what_a_fault_rolls_back_was_not_committed(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    work = Work(app)
    with faults.at(Point.END_COMMITTED, "before", "drop") as fault:
        async with run_worker() as worker:
            job = await work.succeeds.enqueue()
            await aeventually(lambda: fault.fired, BOUND)
            assert await aconn.fetchval("select status from taskq.jobs where id = $1", job.id) == "running"
            assert worker.parts.outbox.holds(job.id, 1)
            await until_status(aconn, job.id, "succeeded")
    assert await outcomes(aconn, job.id) == ["succeeded"]


def test_the_environment_arms_a_fault_only_on_request() -> None:
    assert faults.arm_from_environment({}) is None
    assert points.watch is None
    for text in ("end_committed:before:kill:skip=3", " end_committed:before:kill:skip=3,times=2 "):
        fault = parse_fault(text)
        assert (fault.point, fault.when, fault.how, fault.skip) == (Point.END_COMMITTED, "before", "kill", 3)
    assert points.watch is None


@pytest.mark.parametrize(
    "text",
    [
        "somewhere:before:kill",
        "body_done",
        "body_done:during:kill",
        "body_done:before:explode",
        "body_done:before:kill:skip=-1",
        "body_done:before:kill:often=2",
        "body_done:before:kill:times=0",
    ],
)
def test_a_fault_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_fault(text)


def test_a_fault_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="claim_sent, claim_committed"):
        Fault("effect_started", "before", "kill")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="raise, kill or drop"), faults.at(Point.BODY_DONE, how="burn"):  # type: ignore[arg-type]
        pass

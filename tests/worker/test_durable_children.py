"""Bodies that start children, by workers: each once, waited for without a slot, its end given once and for all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import Gates, RunWorker, claim_of, outcomes, until_status

from taskq import ChildFailed, ChildrenTooDeep, Cohort, JobContext, OutcomeUnknown, Retry, TaskQ, constant, gather
from taskq.errors import FencedOut, PayloadError, StepMisfit, StepRefused
from taskq.steps import Key
from taskq.testing import drain
from taskq.worker.disposition import Suspends, decide

pytestmark = pytest.mark.anyio
AGAIN = Retry(max_attempts=5, backoff=constant(0))
ONCE = Retry(max_attempts=1)


@dataclass
class Size:
    width: int
    height: int


async def held(aconn: asyncpg.Connection, job: UUID) -> None:
    async def look() -> bool:
        row = await aconn.fetchrow("select status, held_reason from taskq.all_jobs where id = $1", job)
        return tuple(row) == ("held", "child")

    await aeventually(look)


async def execute(dsn: str, query: str, *args: Any) -> None:
    """On a connection of its own: for bodies, which run beside their test."""
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(query, *args)
    finally:
        await conn.close()


async def children(aconn: asyncpg.Connection, job: UUID) -> list[tuple[Any, ...]]:
    query = "select name, occurrence, status, told from taskq.children where parent_job = $1 order by name, occurrence"
    return [tuple(row) for row in await aconn.fetch(query, job)]


async def test_a_body_gets_what_its_child_gave_and_holds_no_slot_meanwhile(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    passed: list[int] = []

    @app.task
    async def measure(name: str, *, scale: int = 1) -> Size:
        return Size(len(name) * scale, 2)

    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> int:
        passed.append(ctx.claim_epoch)
        size = await ctx.child(measure, "seven", scale=10)
        assert isinstance(size, Size)
        return size.width * size.height * ctx.attempt

    async with run_worker(concurrency=1):
        job = await works.enqueue()
        assert await job.result(timeout="60s") == 100
    assert passed == [1, 2]
    assert await outcomes(aconn, job.id) == ["suspended", "succeeded"]
    assert await children(aconn, job.id) == [("measure", 1, "succeeded", True)]


async def test_children_of_a_gather_are_started_together_and_each_once(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task
    async def part(n: int) -> int:
        await gates.wait()
        return 2 * n

    async def step(n: int) -> int:
        return n

    @app.task
    async def works(ctx: JobContext) -> list[int]:
        one, *rest = await asyncio.gather(ctx.step("one", step, 1), *(ctx.child(part, n) for n in range(5)))
        return [one, *rest]

    async with run_worker(concurrency=6):
        job = await works.enqueue()
        await held(aconn, job.id)
        assert [row[:2] for row in await children(aconn, job.id)] == [("part", n) for n in range(1, 6)]
        gates.open()
        assert await job.result(timeout="60s") == [1, 0, 2, 4, 6, 8]
    assert await aconn.fetchval("select count(*) from taskq.history where task = 'part'") == 5
    assert set(await outcomes(aconn, job.id)) == {"suspended", "succeeded"}


async def test_a_failed_child_fails_the_call_each_time_and_may_be_caught(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    seen: list[ChildFailed] = []

    @app.task(retry=ONCE)
    async def breaks() -> None:
        raise ValueError("out of paper")

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> str:
        try:
            await ctx.child(breaks)
        except ChildFailed as exc:
            seen.append(exc)
        if len(seen) == 1:
            raise ConnectionError
        return "made do"

    async with run_worker():
        job = await works.enqueue()
        assert await job.result(timeout="60s") == "made do"
    first, second = seen
    child = await aconn.fetchval("select child_job from taskq.children")
    assert (first.child_id, first.status, first.name, first.occurrence) == (child, "failed", "breaks", 1)
    assert (first.error["type"], first.error["message"]) == ("ValueError", "out of paper")
    assert "ValueError: out of paper" in str(first)
    assert str(second) == str(first)
    assert await aconn.fetchval("select count(*) from taskq.history where task = 'breaks'") == 1


async def test_a_child_that_has_failed_is_on_record_and_the_next_of_its_name_is_another(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task(retry=ONCE)
    async def part(n: int) -> int:
        if n < 3:
            raise ValueError(f"{n} is below 3")
        return n

    @app.task
    async def works(ctx: JobContext) -> int:
        for n in range(5):
            try:
                return await ctx.child(part, n)
            except ChildFailed:
                continue
        raise AssertionError

    async with run_worker():
        job = await works.enqueue()
        assert await job.result(timeout="60s") == 3
    assert [row[1:3] for row in await children(aconn, job.id)] == [
        (1, "failed"),
        (2, "failed"),
        (3, "failed"),
        (4, "succeeded"),
    ]


async def test_a_workflow_runs_as_a_child(run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection) -> None:
    @app.task(retry=ONCE)
    async def double(n: int) -> int:
        if n < 0:
            raise ValueError("below 0")
        return 2 * n

    @app.workflow
    def both(n: int, m: int = 7) -> tuple[int, int]:
        return gather(double.node("a").step(n), double.node("b").step(m))

    @app.task(retry=ONCE)
    async def works(ctx: JobContext) -> list[Any]:
        pair = await ctx.child(both, 1)
        got: list[Any] = [*pair]
        try:
            await ctx.child(both.using(meta={"why": "test"}), -1)
        except ChildFailed as exc:
            got += [exc.status, exc.error["type"], exc.error["node"]]
        return got

    async with run_worker():
        job = await works.enqueue()
        assert await job.result(timeout="60s") == [2, 14, "failed", "RunFailed", "a"]
    runs = await aconn.fetch("select started_by, meta from taskq.runs order by created_at")
    assert [(row["started_by"], row["meta"]) for row in runs] == [(job.id, None), (job.id, '{"why": "test"}')]


async def test_a_plain_function_waits_for_its_child_likewise(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task(cohort=Cohort("presses", limit=3))
    def press(n: int) -> int:
        return n + 1

    @app.task
    def works(ctx: JobContext) -> int:
        return ctx.child_sync(press.using(priority=9, ordering_key="k", cohort=Cohort("others", limit=2)), 6)

    async with run_worker():
        job = await works.enqueue()
        assert await job.result(timeout="60s") == 7
    row = await aconn.fetchrow("select priority, ordering_key, cohort from taskq.history where task = 'press'")
    assert tuple(row) == (9, "k", "others")
    assert await aconn.fetchval("select code_limit from taskq.limits where name = 'others'") == 2


async def test_a_child_whose_outcome_is_unknown_is_waited_for_until_it_is_decided(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task(effect_class="side_effecting")
    async def charge(cents: int) -> int:
        raise OutcomeUnknown("the provider did not answer")

    @app.task
    async def works(ctx: JobContext) -> int:
        return await ctx.child(charge, 995) + 1

    async with run_worker():
        job = await works.enqueue()
        await held(aconn, job.id)
        child = await aconn.fetchval("select child_job from taskq.children")
        await until_status(aconn, child, "unknown")
        await held(aconn, job.id)
        assert await app.resolve(child, happened=True, result=995, reason="it is on the statement") == "succeeded"
        assert await job.result(timeout="60s") == 996


async def test_cancelling_the_parent_cancels_the_child_that_runs(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task
    async def part() -> None:
        await gates.wait()

    @app.task
    async def works(ctx: JobContext) -> None:
        await ctx.child(part)

    async with run_worker():
        job = await works.enqueue()
        await held(aconn, job.id)
        child = await aconn.fetchval("select child_job from taskq.children")
        await until_status(aconn, child, "running")
        assert await job.cancel() == "cancelled"
        await until_status(aconn, child, "cancelled")


async def test_what_cannot_be_a_child_is_refused_and_starts_nothing(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def part(n: int) -> int:
        return n

    @app.workflow
    def flow(n: int) -> int:
        return part.step(n)

    async def inside(ctx: JobContext) -> None:
        await ctx.child(part, 1)

    refused: list[str] = []

    @app.task(retry=ONCE)
    async def works(ctx: JobContext) -> None:
        asked: list[Any] = [
            ctx.child(inside),  # type: ignore[call-overload]
            ctx.child(part.using(unique_key="k"), 1),
            ctx.child(part.using(idempotency_key="k"), 1),
            ctx.child(flow.using(run_key="k"), 1),
            ctx.step("inside", inside, ctx),
        ]
        for each in asked:
            try:
                await each
            except StepRefused as exc:
                refused.append(str(exc))
        try:
            await ctx.child(part, "seven", 8)  # type: ignore[call-overload]
        except PayloadError as exc:
            refused.append(str(exc))

    @app.task(retry=ONCE, effect_class="side_effecting")
    async def starts(ctx: JobContext) -> None:
        await ctx.child(part, 1)

    async with run_worker():
        await (await works.enqueue()).result(timeout="60s")
        job = await starts.enqueue()
        await until_status(aconn, job.id, "failed")
    words = ["neither", "unique_key=", "idempotency_key=", "run_key=", "inside of the function of step"]
    assert len(refused) == len(words) + 1
    assert all(word in said for word, said in zip(words, refused, strict=False)), refused
    assert await aconn.fetchval("select count(*) from taskq.steps where kind = 'child'") == 0
    assert await aconn.fetchval("select count(*) from taskq.history where task = 'part'") == 0


async def test_a_body_that_starts_itself_without_end_is_stopped(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, dsn: str
) -> None:
    caught: list[ChildrenTooDeep] = []

    @app.task(retry=ONCE)
    async def part() -> None: ...

    @app.task(retry=ONCE)
    async def works(ctx: JobContext) -> None:
        await execute(dsn, "update taskq.steps set depth = 100 where child_job = $1", ctx.job_id)
        try:
            await ctx.child(works)
        except ChildrenTooDeep as exc:
            caught.append(exc)
            raise

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "failed")
    [exc] = caught
    assert exc.detail["depth"] == 100
    assert await aconn.fetchval("select error ->> 'type' from taskq.history where id = $1", job.id) == "ChildFailed"


async def test_a_result_that_no_longer_fits_is_a_misfit(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, dsn: str
) -> None:
    @app.task
    async def part() -> int:
        return 7

    @app.task(retry=ONCE)
    async def works(ctx: JobContext) -> None:
        await execute(dsn, "update taskq.steps set value = '\"seven\"' where kind = 'child' and done")
        if ctx.claim_epoch == 2:
            assert await ctx.child(part) == 7
            await ctx.sleep("2h")
        await ctx.child(part)

    async with run_worker():
        job = await works.enqueue()

        async def sleeps() -> bool:
            row = await aconn.fetchrow("select claim_epoch, status from taskq.jobs where id = $1", job.id)
            return tuple(row) == (2, "pending")

        await aeventually(sleeps)
        await job.retry()
        await until_status(aconn, job.id, "failed")
    error = await aconn.fetchval("select error ->> 'type' from taskq.history where id = $1", job.id)
    assert error == StepMisfit.__name__


async def test_drain_runs_children_too(app: TaskQ) -> None:
    @app.task
    async def part(n: int) -> int:
        return 2 * n

    @app.task
    async def works(ctx: JobContext) -> int:
        return await ctx.child(part, await ctx.child(part, 3))

    async with app:
        job = await works.enqueue()
        await drain(app)
        assert await job.result(timeout=1) == 12


async def test_a_plain_call_calls_the_functions_of_its_children(app: TaskQ) -> None:
    @app.task
    async def part(n: int) -> Size:
        if n < 0:
            raise ValueError("below 0")
        return Size(n, n)

    @app.task
    def plain(n: int) -> int:
        return n + 1

    @app.workflow
    def flow(n: int) -> int:
        return plain.step(n)

    @app.task
    async def works(ctx: JobContext, n: int) -> Size:
        return await ctx.child(part, await ctx.child(plain, n))

    @app.task
    def blocking(ctx: JobContext) -> int:
        return ctx.child_sync(plain, 1)

    @app.task
    async def sleeps() -> int:
        await asyncio.sleep(0.01)
        return 3

    @app.task
    def awaits(ctx: JobContext) -> int:
        return ctx.child_sync(sleeps)

    @app.task
    async def wired(ctx: JobContext) -> int:
        return await ctx.child(flow, 1)

    assert await works(6) == Size(7, 7)
    with pytest.raises(ChildFailed, match="ValueError: below 0") as caught:
        await works(-7)
    assert caught.value.child_id is None
    assert await asyncio.to_thread(blocking) == 2
    with pytest.raises(StepRefused, match="plain call"):
        await wired()
    assert (await asyncio.to_thread(awaits), awaits()) == (3, 3)


def test_a_suspension_names_the_children_that_it_waits_for() -> None:
    claim = claim_of("t")
    decided = decide(claim, claim_policy(), Suspends((Key("child", "part", 2),)))
    assert decided.outcome == "suspend"
    assert decided.error is not None
    assert decided.error["message"] == "child part #2"


def claim_policy() -> Any:
    return TaskQ("postgresql://nowhere").resolve_policy()


async def test_one_whose_claim_was_taken_away_starts_nothing(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, dsn: str
) -> None:
    caught: list[type[BaseException]] = []

    @app.task
    async def part() -> None: ...

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        if ctx.claim_epoch == 1:
            await execute(dsn, "update taskq.jobs set status = 'unknown' where id = $1", ctx.job_id)
            try:
                await ctx.child(part)
            except BaseException as exc:
                caught.append(type(exc))
                raise

    async with run_worker():
        await works.enqueue()

        await aeventually(lambda: caught == [FencedOut])
    assert await aconn.fetchval("select count(*) from taskq.all_jobs where task = 'part'") == 0

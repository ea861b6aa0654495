"""Bodies that run a task for each item of a list, or of the pages of a source: started once, whoever is killed."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import Gates, RunWorker, outcomes, until_status

from taskq import ChildFailed, JobContext, Page, Retry, Tally, TaskQ, constant
from taskq.errors import PayloadError, PlanError, StepRefused, TaskQError
from taskq.testing import drain

pytestmark = pytest.mark.anyio
AGAIN = Retry(max_attempts=5, backoff=constant(0))
ONCE = Retry(max_attempts=1)


async def held(aconn: asyncpg.Connection, job: UUID) -> None:
    async def look() -> bool:
        row = await aconn.fetchrow("select status, held_reason from taskq.all_jobs where id = $1", job)
        return tuple(row) == ("held", "child")

    await aeventually(look)


async def children(aconn: asyncpg.Connection, job: UUID) -> list[tuple[Any, ...]]:
    query = "select name, occurrence, status, told from taskq.children where parent_job = $1 order by name, occurrence"
    return [tuple(row) for row in await aconn.fetch(query, job)]


def pages_of(app: TaskQ, items: int, at_a_time: int = 7, **options: Any) -> Any:
    """A source of so many numbers."""

    @app.task(**options)
    async def numbers(after: int | None, first: int = 0) -> Page[int, int]:
        start = first if after is None else after
        end = min(start + at_a_time, items)
        return Page(list(range(start, end)), end if end < items else None)

    return numbers


async def test_a_body_gets_the_results_of_all_pages_in_order_and_holds_no_slot_meanwhile(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    numbers = pages_of(app, 30)

    @app.task
    async def double(n: int, *, plus: int = 0) -> int:
        return 2 * n + plus

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> list[int]:
        found = await ctx.emit(double, numbers.pages(first=2), also={"plus": 1}, at_once=4, ahead=5)
        if ctx.attempt == 1:
            raise ConnectionError("what has been given is given again")
        return found

    async with run_worker(concurrency=3):
        job = await works.enqueue()
        assert await job.result(timeout="60s") == [2 * n + 1 for n in range(2, 30)]
    assert await outcomes(aconn, job.id) == ["suspended", "failed", "succeeded"]
    assert await children(aconn, job.id) == [("numbers/double:emit", 1, "succeeded", True)]
    assert await aconn.fetchval("select count(*) from taskq.history where task = 'double'") == 28
    assert await aconn.fetchval("select count(*) from taskq.history where task = 'numbers'") == 4
    names = await aconn.fetch("select workflow from taskq.runs where parent_run is null")
    assert [row["workflow"] for row in names] == ["numbers/double:emit"]


async def test_each_call_is_a_run_of_its_own_and_beside_each_other_they_go_on_together(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    numbers = pages_of(app, 3, at_a_time=2)

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.workflow
    def twice(n: int, times: int = 1) -> int:
        return double.step(double.step(n))

    @app.task
    async def works(ctx: JobContext) -> list[Any]:
        *lists, told = await asyncio.gather(
            ctx.map(double, [1, 2]),
            ctx.map(double, (3,)),
            ctx.map(double.using(priority=9), [4], name="urgent"),
            ctx.map(twice, [5, 6], also={"times": 7}),
            ctx.map(double, []),
            ctx.emit(twice, numbers.pages()),
            ctx.emit(double, numbers.pages(first=3), gives="tally"),
        )
        return [*lists, [told.ok, told.total]]

    async with run_worker():
        job = await works.enqueue()
        got = await job.result(timeout="60s")
    assert got == [[2, 4], [6], [8], [20, 24], [], [0, 4, 8], [True, 0]]
    assert await children(aconn, job.id) == [
        ("double:map", 1, "succeeded", True),
        ("double:map", 2, "succeeded", True),
        ("double:map", 3, "succeeded", True),
        ("numbers/double:emit", 1, "succeeded", True),
        ("numbers/twice:emit", 1, "succeeded", True),
        ("twice:map", 1, "succeeded", True),
        ("urgent", 1, "succeeded", True),
    ]
    urgent = await aconn.fetch(
        "select payload::jsonb ->> 'n' as n from taskq.history where task = 'double' and priority = 9"
    )
    assert [row["n"] for row in urgent] == ["4"]


async def test_a_plain_function_maps_likewise(run_worker: RunWorker, app: TaskQ) -> None:
    numbers = pages_of(app, 9)

    @app.task
    def double(n: int) -> int:
        return 2 * n

    @app.task
    def works(ctx: JobContext) -> list[int]:
        return ctx.map_sync(double, [1]) + ctx.emit_sync(double, numbers.pages(first=6), ahead=0)

    async with run_worker():
        assert await (await works.enqueue()).result(timeout="60s") == [2, 12, 14, 16]


async def test_an_item_that_fails_is_told_and_stops_the_rest_unless_outcomes_are_wanted(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    numbers = pages_of(app, 12, at_a_time=3)
    caught: list[ChildFailed] = []

    @app.task(retry=ONCE)
    async def odd(n: int) -> int:
        if n == 4:
            raise ValueError("4 is even")
        return n

    @app.task
    async def works(ctx: JobContext) -> list[Any]:
        try:
            await ctx.emit(odd, numbers.pages(), ahead=0)
            raise AssertionError
        except ChildFailed as exc:
            caught.append(exc)
        told = await ctx.emit(odd, numbers.pages(), gives="tally")
        got: list[Any] = [told.total, told.succeeded, told.failed, [end.node for end in told.failures]]
        got += [end.status for end in await ctx.map(odd, [3, 4, 5], gives="outcomes", at_most=3)]
        [end] = (await ctx.map(odd, [1, 2, 3], gives="tally", at_most=2)).failures
        return [*got, (end.error or {})["type"]]

    async with run_worker():
        job = await works.enqueue()
        got = await job.result(timeout="60s")
    assert got == [12, 11, 1, ["odd[4]"], "succeeded", "failed", "succeeded", "TooManyItems"]
    exc = caught[0]
    assert {str(each) for each in caught} == {str(exc)}
    assert (exc.name, exc.status) == ("numbers/odd:emit", "failed")
    assert (exc.error["type"], exc.error["node"]) == ("RunFailed", "odd")
    assert "node odd[4] has failed: 4 is even" in str(exc)
    # It stopped the source with the rest.
    asked = "select count(*) from taskq.history where task = 'numbers'"
    assert await aconn.fetchval(asked) == 2 + 4


async def test_cancelling_the_parent_cancels_items_and_pages(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    numbers = pages_of(app, 30)

    @app.task
    async def waits(n: int) -> None:
        await gates.wait()

    @app.task
    async def works(ctx: JobContext) -> None:
        await ctx.emit(waits, numbers.pages(), ahead=3)

    async with run_worker():
        job = await works.enqueue()
        await gates.until_reached(times=7)
        await held(aconn, job.id)
        assert await job.cancel() == "cancelled"

        async def ended() -> bool:
            query = "select count(*) from taskq.runs where status <> 'cancelled'"
            return bool(await aconn.fetchval(query) == 0)

        await aeventually(ended)
    assert (
        await aconn.fetchval("select count(*) from taskq.all_jobs where task = 'waits' and status <> 'cancelled'") == 0
    )
    assert await aconn.fetchval("select count(*) from taskq.all_jobs where task = 'numbers'") == 1


async def test_what_a_deploy_changes_goes_on_as_it_was_started(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, dsn: str, gates: Gates
) -> None:
    numbers = pages_of(app, 6, at_a_time=2)

    @app.task
    async def double(n: int) -> int:
        await gates.wait()
        return 2 * n

    @app.task
    async def works(ctx: JobContext) -> list[int]:
        return await ctx.emit(double, numbers.pages(), at_once=2, ahead=1)

    async with run_worker():
        job = await works.enqueue()
        await held(aconn, job.id)
        gates.open()
    async with TaskQ(dsn) as later:
        numbers = pages_of(later, 6, at_a_time=3)

        @later.task(name="double")
        async def triple(n: int) -> int:
            return 3 * n

        @later.task(name="works")
        async def changed(ctx: JobContext) -> list[int]:
            return await ctx.emit(triple, numbers.pages(first=5), at_once=9)

        async with run_worker(of=later):
            got = await job.result(timeout="60s")
    assert len(got) == 6
    assert {n // 2 for n in got[:2]} == {0, 1}
    assert await aconn.fetchval("select count(*) from taskq.runs where parent_run is null") == 1
    bounds = await aconn.fetch("select map ->> 'at_once' as n from taskq.plans where map is not null")
    assert [row["n"] for row in bounds] == ["2"]


async def test_items_may_be_run_by_workers_that_know_nothing_of_the_body(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, dsn: str
) -> None:
    numbers = pages_of(app, 9, queue="far")

    @app.task(queue="far")
    async def double(n: int) -> int:
        raise AssertionError

    @app.task
    async def works(ctx: JobContext) -> list[int]:
        return await ctx.emit(double, numbers.pages())

    async with TaskQ(dsn) as far:
        pages_of(far, 9, queue="far")

        @far.task(name="double", queue="far")
        async def doubles(n: int) -> int:
            return 2 * n

        async with run_worker(queues=("default",)), run_worker(of=far):
            assert await (await works.enqueue()).result(timeout="60s") == [2 * n for n in range(9)]
    served = "select distinct task from taskq.unserved_nodes"
    assert await aconn.fetch(served) == []


async def test_what_cannot_be_mapped_is_refused_and_starts_nothing(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    numbers = pages_of(app, 9)
    refused: list[tuple[type[TaskQError], str]] = []

    @app.task
    async def double(n: int, plus: int = 0) -> int:
        return 2 * n

    @app.task
    async def nothing() -> None: ...

    @app.task
    async def text(line: str) -> None: ...

    @app.workflow
    def flow(n: int) -> int:
        return double.step(n)

    async def inside(ctx: JobContext) -> None:
        await ctx.map(double, [1])

    @app.task(retry=ONCE)
    async def works(ctx: JobContext) -> None:
        any_: Any = ctx
        asked = [
            any_.map(inside, [1]),
            any_.map(flow.using(meta={}), [1]),
            any_.map(nothing, [1]),
            any_.map(double, "123"),
            any_.map(double, {1, 2}),
            any_.map(double, [1], gives="all"),
            any_.map(double, [1], also=[1]),
            any_.emit(double, [1]),
            any_.emit(double, numbers),
            any_.emit(double, nothing.pages()),
            ctx.step("inside", inside, ctx),
            any_.map(double, [1], name="two words"),
            any_.map(double, [1], also={"n": 1}),
            any_.map(double, [1], also={"m": 1}),
            any_.map(double, ["one"]),
            any_.emit(double, numbers.pages(frist=1)),
            any_.map(double, [1], at_once=[2]),
            any_.emit(double, numbers.pages(), ahead=-1),
            any_.map(double.using(unique_key="k"), [1]),
            any_.emit(text, numbers.pages()),
        ]
        for each in asked:
            with pytest.raises(TaskQError) as caught:
                await each
            refused.append((caught.type, str(caught.value)))

    async with run_worker():
        await (await works.enqueue()).result(timeout="60s")
    words = [
        (StepRefused, "to run for each item; give a task, task.using(...) or a workflow"),
        (StepRefused, "to run for each item; give a task, task.using(...) or a workflow"),
        (StepRefused, "nothing cannot be run for each item: it takes none"),
        (StepRefused, "ctx.map(double) goes over a list, and was given '123'; give it a list"),
        (StepRefused, "goes over a list, and was given {1, 2}"),
        (StepRefused, "gives is 'all'; there are 'results', 'outcomes', 'tally'"),
        (StepRefused, "also is [1]; give what double takes besides the item by name"),
        (StepRefused, "was given [1]; give it source.pages(...)"),
        (StepRefused, "was given <Task numbers>; give it source.pages(...)"),
        (StepRefused, "the source nothing takes no cursor"),
        (StepRefused, "inside of the function of step inside"),
        (StepRefused, "the name of a child is 'two words'"),
        (PayloadError, "also has n, which takes the items"),
        (PayloadError, "unexpected keyword argument 'm'"),
        (PayloadError, "n[0]"),
        (PayloadError, "unexpected keyword argument 'frist'"),
        (PlanError, "double: at_once is [2]; give a number from 1 to 10000"),
        (PlanError, "double: ahead is -1; give a number of items"),
        (PlanError, "unique_key is for jobs that are enqueued, not for nodes"),
        (PlanError, "line takes str, and the pages of numbers have items of int"),
    ]
    assert [kind for kind, _ in refused] == [kind for kind, _ in words]
    assert [said for (_, word), (_, said) in zip(words, refused, strict=True) if word not in said] == []
    assert await aconn.fetchval("select count(*) from taskq.runs") == 0
    assert await aconn.fetchval("select count(*) from taskq.steps") == 0


async def test_a_side_effecting_body_cannot_map(run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection) -> None:
    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task(retry=ONCE, effect_class="side_effecting")
    async def works(ctx: JobContext) -> None:
        await ctx.map(double, [1])

    async with run_worker():
        job = await works.enqueue()
        row = await until_status(aconn, job.id, "failed")
    assert '"StepRefused"' in row["error"]


async def test_drain_runs_maps_and_emits_too(app: TaskQ) -> None:
    numbers = pages_of(app, 9)

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task
    async def works(ctx: JobContext) -> list[int]:
        return await ctx.map(double, await ctx.emit(double, numbers.pages()))

    async with app:
        job = await works.enqueue()
        await drain(app)
        assert await job.result(timeout=1) == [4 * n for n in range(9)]


async def test_a_plain_call_calls_the_function_for_each_item(app: TaskQ) -> None:
    numbers = pages_of(app, 5, at_a_time=2)

    @app.task(retry=ONCE)
    async def odd(n: int, plus: int = 0) -> int:
        if n == 4:
            raise ValueError("4 is even")
        return n + plus

    @app.task
    def plain(n: int) -> int:
        return n

    @app.workflow
    def flow(n: int) -> int:
        return plain.step(n)

    @app.task
    async def works(ctx: JobContext, first: int) -> tuple[list[int], list[str], Tally]:
        return (
            await ctx.emit(odd, numbers.pages(first=first), also={"plus": 1}),
            [end.status for end in await ctx.emit(odd, numbers.pages(2), gives="outcomes")],
            await ctx.map(plain, [7, 8], gives="tally"),
        )

    @app.task
    def blocking(ctx: JobContext) -> list[int]:
        return ctx.map_sync(odd, [1])

    @app.task
    async def wired(ctx: JobContext) -> list[int]:
        return await ctx.map(flow, [1])

    assert await works(5) == ([], ["succeeded", "succeeded", "failed"], Tally(2, 2, 0, 0, []))
    with pytest.raises(ChildFailed, match="4 is even"):
        await works(4)
    assert await asyncio.to_thread(blocking) == [1]
    with pytest.raises(StepRefused, match="plain call"):
        await wired()

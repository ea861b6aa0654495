"""Bodies in their consumers: kept apart from each other, interrupted one at a time, and never the end of the worker."""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, TypeAlias
from uuid import UUID

import anyio
import asyncpg
import pytest
from helpers import aeventually
from worker_kit import Events, Gates, RunWorker, claim_of, outcomes, until_status

from taskq import JobContext, TaskQ
from taskq.errors import JobCancelled
from taskq.policy import ExecutionPolicy
from taskq.worker import timeouts
from taskq.worker.claims import Claim
from taskq.worker.disposition import BodyEnd, Interrupted, Raised, Returned
from taskq.worker.execute import Executor
from taskq.worker.lease import LeaseKeeper

pytestmark = pytest.mark.anyio

POLICY = ExecutionPolicy()


class Bench:
    """An executor alone, with what its bodies' ends were."""

    def __init__(self, app: TaskQ, concurrency: int = 4) -> None:
        self.ends: dict[UUID, BodyEnd] = {}
        self.executor = Executor(dict(app.tasks), concurrency, self._ended)
        self.executor.start()

    def _ended(self, claim: Claim, policy: ExecutionPolicy, end: BodyEnd) -> None:
        assert claim.job_id not in self.ends, "ended twice"
        self.ends[claim.job_id] = end

    def put(self, task: str, payload: str = "{}", policy: ExecutionPolicy = POLICY) -> UUID:
        claim = claim_of(task, payload=payload)
        self.executor.put([(claim, policy)])
        return claim.job_id

    async def end_of(self, job: UUID) -> BodyEnd:
        await aeventually(lambda: job in self.ends, interval=0.001)
        return self.ends[job]

    async def run(self, task: str, payload: str = "{}") -> BodyEnd:
        return await self.end_of(self.put(task, payload))


BenchOf: TypeAlias = Callable[..., Bench]


@pytest.fixture
async def bench_of(anyio_backend: str) -> AsyncIterator[BenchOf]:
    """Makes executors that are closed after the test."""
    made: list[Bench] = []

    def make(*args: Any) -> Bench:
        made.append(Bench(*args))
        return made[-1]

    yield make
    for bench in made:
        await bench.executor.close()


async def test_a_body_that_swallows_its_timeout_is_told_of_once_and_asked_again(
    local_app: TaskQ, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "ASK_AGAIN", 0.2)
    asked: list[str] = []

    @local_app.task
    async def swallows() -> None:
        while len(asked) < 4:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                asked.append("again")

    bench = Bench(local_app)
    job = bench.put("swallows", policy=ExecutionPolicy(timeout=0.1))
    await aeventually(lambda: len(asked) == 2)
    monkeypatch.setattr(timeouts, "ASK_AGAIN", 60)
    assert bench.executor.interrupt(job, "cancel"), "an operator's cancel"
    await aeventually(lambda: len(asked) == 3)
    monkeypatch.setattr(timeouts, "ASK_AGAIN", 0.2)
    await bench.end_of(job)
    [told] = events.of("job.timeout_ignored")
    assert told["job_id"] == str(job)
    await bench.executor.close()


async def test_no_body_starts_once_the_lease_is_over(local_app: TaskQ) -> None:
    holds = True
    ran: list[int] = []

    @local_app.task
    async def freezes() -> None:
        nonlocal holds
        ran.append(1)
        holds = False

    bench = Bench(local_app, 2)
    bench.executor._may_start = lambda: holds
    first, second, third = (bench.put("freezes") for _ in range(3))
    assert await bench.end_of(third) == Interrupted("lease", started=False)
    assert bench.ends[second] == Interrupted("lease", started=False)
    assert bench.ends[first] == Returned("null")
    assert (len(ran), bench.executor.busy, bench.executor.waiting) == (1, 0, 0)
    await bench.executor.close()


async def test_a_claim_that_outlasted_the_lease_is_handed_back_without_a_start(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeaseKeeper, "remaining", property(lambda _: left))
    left = -1.0
    ran: list[int] = []

    @app.task
    async def runs(ctx: JobContext) -> None:
        ran.append(ctx.claim_epoch)

    async with run_worker():
        job = await runs.enqueue()
        await aeventually(lambda: aconn.fetchval("select count(*) > 1 from taskq.attempts where outcome = 'released'"))
        assert ran == []
        left = 1.0
        await until_status(aconn, job.id, "succeeded")
    assert len(ran) == 1
    error = await aconn.fetchval("select error from taskq.attempts where job_id = $1 and claim_epoch = 1", job.id)
    assert (json.loads(error)["reason"], json.loads(error)["body_started"]) == ("lease", False)


@pytest.fixture
def local_app() -> TaskQ:
    """An app whose tasks are run without a database."""
    return TaskQ("postgresql://nowhere")


# Apart from each other ------------------------------------------------------------------------------------------------

seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


async def test_what_a_body_sets_in_its_context_no_other_body_sees(local_app: TaskQ, bench_of: BenchOf) -> None:
    @local_app.task
    async def sets(n: int) -> str:
        before = seen.get()
        seen.set(f"by {n}")
        await asyncio.sleep(0)
        child = asyncio.create_task(reads())
        assert await child == f"by {n}"
        await asyncio.sleep(0)
        return f"{before}, {seen.get()}"

    async def reads() -> str:
        return seen.get()

    @local_app.task
    def sets_in_thread(n: int) -> str:
        before = seen.get()
        seen.set(f"thread {n}")
        return f"{before}, {seen.get()}"

    bench = bench_of(local_app, 1)
    for n in range(5):
        assert await bench.run("sets", f'{{"n": {n}}}') == Returned(f'"nothing, by {n}"')
        assert await bench.run("sets_in_thread", f'{{"n": {n}}}') == Returned(f'"nothing, thread {n}"')
    assert seen.get() == "nothing"


async def test_timeouts_groups_and_scopes_work_inside_a_body(local_app: TaskQ, bench_of: BenchOf) -> None:
    @local_app.task
    async def uses_them_all() -> list[str]:
        got = []
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(10)
        except TimeoutError:
            got.append("timeout")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(10))
                group.create_task(fails())
        except* ValueError:
            got.append("group")
        with anyio.move_on_after(0.01) as scope:
            await anyio.sleep(10)
        assert scope.cancelled_caught
        got.append("scope")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 10)
            tasks.cancel_scope.cancel()
        got.append("task group")
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10), 0.01)
        got.append("wait_for")
        return got

    async def fails() -> None:
        raise ValueError("on purpose")

    @local_app.task
    async def plain() -> int:
        await asyncio.sleep(0.001)
        return 1

    bench = bench_of(local_app, 1)
    for _ in range(3):
        end = await bench.run("uses_them_all")
        assert end == Returned('["timeout","group","scope","task group","wait_for"]')
        assert await bench.run("plain") == Returned("1")


# Interrupted ----------------------------------------------------------------------------------------------------------


async def test_a_body_that_cancels_itself_fails_and_the_next_body_is_not_hit(
    local_app: TaskQ, bench_of: BenchOf
) -> None:
    @local_app.task
    async def cancels_itself_and_returns() -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return 1

    @local_app.task
    async def cancels_itself() -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(10)
        return 1

    @local_app.task
    async def awaits_the_cancelled() -> None:
        task = asyncio.create_task(asyncio.sleep(10))
        task.cancel()
        await task

    @local_app.task
    async def innocent() -> int:
        await asyncio.sleep(0.001)
        return 2

    bench = bench_of(local_app, 1)
    for guilty in ("cancels_itself", "awaits_the_cancelled", "cancels_itself_and_returns"):
        first = bench.put(guilty)
        second = bench.put("innocent")
        end = await bench.end_of(first)
        if guilty == "cancels_itself_and_returns":
            assert end == Returned("1")
        else:
            assert isinstance(end, Raised)
            assert "cancelled by itself" in str(end.error)
        assert await bench.end_of(second) == Returned("2"), guilty


async def test_a_body_that_swallows_its_cancellation_ends_as_it_likes(local_app: TaskQ, bench_of: BenchOf) -> None:
    @local_app.task
    async def swallows() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        await asyncio.sleep(0.001)
        return "done all the same"

    @local_app.task
    async def other_error() -> str:
        try:
            await asyncio.sleep(10)
        finally:
            raise ValueError("cleaning up failed")

    bench = bench_of(local_app, 1)
    for task, wanted in (("swallows", Returned('"done all the same"')), ("other_error", Interrupted("cancel"))):
        job = bench.put(task)
        await aeventually(lambda job=job: job in bench.executor.running)
        assert bench.executor.interrupt(job, "cancel")
        assert await bench.end_of(job) == wanted


async def test_a_body_that_went_on_is_told_again_at_shutdown_and_at_the_end_of_the_lease(
    local_app: TaskQ, bench_of: BenchOf
) -> None:
    told = []

    @local_app.task
    async def stubborn() -> None:
        for _ in range(3):
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                told.append(1)
        raise ValueError("enough")

    bench = bench_of(local_app, 1)
    job = bench.put("stubborn")
    await aeventually(lambda: job in bench.executor.running)
    for n, by in enumerate(("cancel", "cancel", "shutdown", "shutdown", "lease")):
        bench.executor.interrupt(job, by)  # type: ignore[arg-type]
        await asyncio.sleep(0.005)
        assert len(told) == [1, 1, 2, 2, 3][n]
    assert await bench.end_of(job) == Interrupted("cancel")


async def test_two_thousand_late_cancels_hit_no_later_body(local_app: TaskQ, bench_of: BenchOf) -> None:
    @local_app.task
    async def short(n: int) -> int:
        for _ in range(n % 4):
            await asyncio.sleep(0)
        return n

    @local_app.task
    async def innocent(n: int) -> int:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return n

    bench = bench_of(local_app, 2)
    rand = random.Random(1)
    cancelled = 0
    for n in range(2000):
        first = bench.put("short", f'{{"n": {n}}}')
        second = bench.put("innocent", f'{{"n": {n}}}')
        for _ in range(rand.randrange(6)):
            await asyncio.sleep(0)
        bench.executor.interrupt(first, "cancel")
        while first not in bench.ends or second not in bench.ends:
            await asyncio.sleep(0)
        assert bench.ends[second] == Returned(str(n))
        assert bench.ends[first] in (Returned(str(n)), Interrupted("cancel"))
        cancelled += bench.ends[first] == Interrupted("cancel")
    assert 100 < cancelled < 1900


async def test_a_claim_that_is_cancelled_before_its_body_starts_never_runs(local_app: TaskQ, bench_of: BenchOf) -> None:
    ran = []

    @local_app.task
    async def blocks() -> None:
        await asyncio.sleep(0.05)

    @local_app.task
    async def waits_its_turn() -> None:
        ran.append(1)

    bench = bench_of(local_app, 1)
    first, second = bench.put("blocks"), bench.put("waits_its_turn")
    await aeventually(lambda: first in bench.executor.running)
    assert not bench.executor.interrupt(second, "cancel", 2)
    assert bench.executor.interrupt(second, "cancel", 1)
    assert bench.ends[second] == Interrupted("cancel")
    await bench.end_of(first)
    await bench.run("blocks")
    assert ran == []


# Functions in threads -------------------------------------------------------------------------------------------------


async def test_a_function_in_a_thread_sees_that_it_should_stop(local_app: TaskQ, bench_of: BenchOf) -> None:
    started = threading.Event()

    @local_app.task
    def polite(ctx: JobContext) -> str:
        started.set()
        for _ in range(1000):
            ctx.raise_if_cancelled()
            time.sleep(0.005)
        return "never told"

    bench = bench_of(local_app, 1)
    job = bench.put("polite")
    await aeventually(started.is_set)
    bench.executor.interrupt(job, "cancel")
    assert await bench.end_of(job) == Interrupted("cancel")


async def test_what_a_function_in_a_thread_raises_ends_its_attempt(local_app: TaskQ, bench_of: BenchOf) -> None:
    @local_app.task
    def raises(what: str) -> None:
        raise {
            "stop": StopIteration(1),
            "exit": SystemExit(3),
            "key": KeyboardInterrupt(),
            "cancelled": asyncio.CancelledError(),
            "told": JobCancelled(UUID(int=1)),
        }[what]

    bench = bench_of(local_app, 1)
    for what in ("stop", "exit", "key", "cancelled", "told"):
        assert isinstance(await bench.run("raises", f'{{"what": "{what}"}}'), Raised)


# What bodies raise and return -----------------------------------------------------------------------------------------


class Odd(Exception):
    def __str__(self) -> str:
        raise SystemExit("even its message")


class Unprintable(Exception):
    def __str__(self) -> str:
        return "a\x00b \ud800 " + "x" * 1_000_000


ODD: dict[str, Any] = {
    "exit": SystemExit(1),
    "key": KeyboardInterrupt(),
    "generator": GeneratorExit(),
    "odd": Odd(),
    "unprintable": Unprintable(),
    "nul": ValueError("NUL \x00 here"),
    "group": ExceptionGroup("several", [ValueError("a\x00"), TypeError("b")]),
    "stop": StopAsyncIteration(),
}


async def test_no_exception_ends_the_worker_and_each_ends_its_job(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(max_attempts=1)
    async def raises(what: str) -> None:
        await asyncio.sleep(0)
        raise ODD[what]

    @app.task(max_attempts=1)
    def raises_in_thread(what: str) -> None:
        raise ODD[what]

    @app.task
    async def ordinary() -> int:
        return 1

    async with run_worker():
        jobs = [(what, await task.enqueue(what)) for what in ODD for task in (raises, raises_in_thread)]
        for what, job in jobs:
            row = await until_status(aconn, job.id, "failed")
            assert row["attempt"] == 1, what
            assert await outcomes(aconn, job.id) == ["failed"]
        assert await (await ordinary.enqueue()).result(timeout=5) == 1


RESULTS: dict[str, Any] = {
    "nul": {"r": "a\x00b"},
    "nan": float("nan"),
    "infinite": -float("inf"),
    "surrogate": "\ud800",
    "object": object(),
    "keys": {1: 2},
    "huge": "x" * 9_000_000,
}


async def test_a_result_that_cannot_be_stored_fails_its_job_once(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    ran: list[str] = []
    loop_itself: list[Any] = []
    loop_itself.append(loop_itself)

    @app.task(max_attempts=3)
    async def returns(what: str) -> Any:
        ran.append(what)
        return loop_itself if what == "loop" else RESULTS[what]

    @app.task
    async def ordinary() -> int:
        return 1

    async with run_worker():
        jobs = [(what, await returns.enqueue(what)) for what in (*RESULTS, "loop")]
        for what, job in jobs:
            row = await until_status(aconn, job.id, "failed", within=5)
            assert "ResultNotStorable" in row["error"], what
            assert ran.count(what) == 1
        assert await (await ordinary.enqueue()).result(timeout=5) == 1


async def test_the_end_of_a_body_is_told_even_if_it_cannot_be_decided(local_app: TaskQ, bench_of: BenchOf) -> None:
    @local_app.task
    async def returns() -> int:
        return 1

    ends: list[BodyEnd] = []

    def ended(claim: Claim, policy: ExecutionPolicy, end: BodyEnd) -> None:
        if isinstance(end, Returned):
            raise RuntimeError("a defect")
        ends.append(end)

    bench = bench_of(local_app, 1)
    bench.executor._on_end = ended
    for n in (1, 2):
        bench.put("returns")
        await aeventually(lambda n=n: len(ends) == n)
    assert all(isinstance(end, Raised) and "could not be decided" in str(end.error) for end in ends)


async def test_bodies_enqueue_jobs(app: TaskQ, run_worker: RunWorker, gates: Gates) -> None:
    ran: list[str] = []

    @app.task
    async def leaf(by: str) -> None:
        ran.append(by)

    @app.task
    def from_thread() -> None:
        leaf.enqueue_sync("thread")

    @app.task
    async def from_loop() -> None:
        await leaf.enqueue("loop")

    @app.task(max_attempts=1)
    async def by_mistake() -> None:
        leaf.enqueue_sync("mistake")

    async with run_worker():
        await from_thread.enqueue()
        await from_loop.enqueue()
        mistake = await by_mistake.enqueue()
        await aeventually(lambda: sorted(ran) == ["loop", "thread"])
        with pytest.raises(Exception, match=r"await enqueue\(\.\.\.\)"):
            await mistake.result(timeout=5)
    assert sorted(ran) == ["loop", "thread"]

"""Steps of durable bodies, by workers: recorded once, given to later attempts, under the fence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar
from uuid import UUID

import asyncpg
import msgspec
import pytest
from worker_kit import Events, Gates, RunWorker, outcomes, until_status

from taskq import JobContext, Retry, TaskQ, constant
from taskq.errors import (
    DatabaseUnavailable,
    FencedOut,
    StepConflict,
    StepMisfit,
    StepNotStorable,
    StepRefused,
    SyncCallInEventLoop,
)
from taskq.idempotency import step_key

pytestmark = pytest.mark.anyio
AGAIN = Retry(max_attempts=5, backoff=constant(0))
UNTOLD: dict[str, Any] = {"concurrency": 1, "lease": 60}


@dataclass
class Paid:
    order: int
    by: str


class Stop(Exception):
    """What a body stops an attempt with."""


async def recorded(aconn: asyncpg.Connection, job: UUID) -> list[tuple[Any, ...]]:
    found = await aconn.fetch(
        "select name, occurrence, claim_epoch, value::text from taskq.steps where job_id = $1 "
        "order by name, occurrence",
        job,
    )
    return [tuple(row) for row in found]


async def take_away(aconn: asyncpg.Connection, job: UUID) -> None:
    """Declare the worker of a job lost, and settle its claims, before any leader does."""
    ends = "update taskq.workers set lease_expires_at = '-infinity' where id = $1"
    async with aconn.transaction():
        await aconn.execute(ends, await aconn.fetchval("select claimed_by from taskq.jobs where id = $1", job))
        await aconn.execute("select taskq.mark_lost()")
        assert [r["job_id"] for r in await aconn.fetch("select * from taskq.settle_lost()")] == [job]


async def test_a_step_is_called_once_and_later_attempts_are_given_what_it_returned(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[str] = []
    got: list[Any] = []

    async def pay(order: int, *, by: str) -> Paid:
        calls.append("pay")
        return Paid(order, by)

    def count(word: str) -> int:
        calls.append("count")
        return len(word)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> int:
        paid = await ctx.step("pay", pay, 7, by="card")
        got.append(paid)
        if ctx.attempt == 1:
            raise Stop
        n = await ctx.step("count", count, "four")
        if ctx.attempt == 2:
            raise Stop
        return n + paid.order

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
        assert await job.result() == 11
    assert calls == ["pay", "count"]
    assert got == [Paid(7, "card")] * 3
    assert await recorded(aconn, job.id) == [("count", 1, 2, "4"), ("pay", 1, 1, '{"by": "card", "order": 7}')]
    assert await outcomes(aconn, job.id) == ["failed", "failed", "succeeded"]


async def test_a_plain_function_has_the_same_steps_in_its_thread(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[str] = []

    def pay(order: int) -> Paid:
        calls.append(threading.current_thread().name)
        return Paid(order, "card")

    @app.task(retry=AGAIN)
    def works(ctx: JobContext) -> int:
        paid = ctx.step_sync("pay", pay, 7)
        if ctx.attempt == 1:
            raise Stop
        return paid.order

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
    assert len(calls) == 1
    assert str(job.id) in calls[0]
    assert await recorded(aconn, job.id) == [("pay", 1, 1, '{"by": "card", "order": 7}')]


async def test_what_a_step_raises_is_not_recorded_and_goes_through_the_body(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    tries: list[int] = []

    async def flaky(ctx: JobContext) -> str:
        tries.append(ctx.attempt)
        if len(tries) < 4:
            raise Stop
        return "there"

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> str:
        for _ in range(2):
            try:
                return await ctx.step("ask", flaky, ctx)
            except Stop:
                pass
        raise Stop

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
    assert tries == [1, 1, 2, 2]
    # A loop that tries again is one step, whichever try succeeds.
    assert await recorded(aconn, job.id) == [("ask", 1, 2, '"there"')]


async def test_steps_beside_each_other_replay_in_the_order_in_which_they_began(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    """Fifty rounds: a group of steps is cut after two are recorded, and the next attempt is given just those."""
    rounds: dict[UUID, list[list[int]]] = {}

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext, seed: int) -> list[int]:
        called = rounds.setdefault(ctx.job_id, [])
        called.append([])
        two = asyncio.Event()
        done = 0

        async def page(n: int) -> int:
            nonlocal done
            called[-1].append(n)
            if ctx.attempt == 1 and n not in (seed % 7, (seed + 3) % 7):
                await two.wait()
                raise Stop
            for _ in range((seed * 5 + n * 3) % 4):
                await asyncio.sleep(0)
            return n * 100 + ctx.attempt

        async def counted(n: int) -> int:
            nonlocal done
            value = await ctx.step("page", page, n)
            done += 1
            if done == 2:
                two.set()
            return value

        return await asyncio.gather(*(counted(n) for n in range(7)))

    async with run_worker():
        jobs = await app.enqueue_many([works.job(seed) for seed in range(50)])
        for seed, job in enumerate(jobs):
            await until_status(aconn, job.id, "succeeded")
            first, second = rounds[job.id]
            kept = {seed % 7, (seed + 3) % 7}
            assert first == list(range(7))
            assert second == [n for n in range(7) if n not in kept]
            assert await job.result() == [n * 100 + (1 if n in kept else 2) for n in range(7)]
            assert len(await recorded(aconn, job.id)) == 7


async def test_of_steps_beside_each_other_under_one_name_one_that_raised_keeps_its_number(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def works(ctx: JobContext) -> None:
        async def first() -> int:
            await asyncio.sleep(0)
            raise Stop

        found = await asyncio.gather(ctx.step("n", first), ctx.step("n", int, "2"), return_exceptions=True)
        assert isinstance(found[0], Stop)
        assert await ctx.step("n", int, "3") == 3

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
    assert await recorded(aconn, job.id) == [("n", 2, 1, "2"), ("n", 3, 1, "3")]


async def test_the_key_inside_of_a_step_is_the_steps_own(run_worker: RunWorker, app: TaskQ) -> None:
    @app.task
    async def works(ctx: JobContext) -> list[str]:
        async def key() -> str:
            return ctx.idempotency_key

        async def outer() -> list[str]:
            inner = await ctx.step("inner", key)
            return [inner, ctx.idempotency_key, await asyncio.to_thread(lambda: ctx.idempotency_key)]

        found = [ctx.idempotency_key, await ctx.step("pay", key), await ctx.step("pay", key)]
        return found + await ctx.step("outer", outer) + [ctx.idempotency_key]

    async with run_worker():
        job = await works.enqueue()
        own = str(job.id)
        suffixes = ["", ":pay", ":pay#2", ":inner", ":outer", ":outer", ""]
        assert await job.result(15) == [own + suffix for suffix in suffixes]
    assert step_key("k:g2", "pay", 3) == "k:g2:pay#3"


async def test_another_context_keeps_its_key_inside_of_a_step(app: TaskQ) -> None:
    one, other = JobContext.local("t"), JobContext.local("t")
    other.step_sync("x", int)

    async def key() -> str:
        return other.idempotency_key

    assert await one.step("s", key) == str(other.job_id)


async def test_a_step_of_an_attempt_that_was_taken_away_is_fenced_out(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    calls: list[tuple[str, int]] = []
    refused: list[str] = []

    @app.task
    async def works(ctx: JobContext) -> str:
        async def slow(name: str) -> str:
            calls.append((name, ctx.claim_epoch))
            if ctx.claim_epoch == 1 and name == "b":
                await gates.wait()
            return f"{name}{ctx.claim_epoch}"

        try:
            return await ctx.step("a", slow, "a") + await ctx.step("b", slow, "b")
        except FencedOut as exc:
            refused.append(str(exc))
            raise

    async with run_worker(**UNTOLD):
        job = await works.enqueue()
        await gates.until_reached()
        await take_away(aconn, job.id)
        gates.open()
        await until_status(aconn, job.id, "succeeded")
        assert await job.result() == "a1b2"
    assert calls == [("a", 1), ("b", 1), ("b", 2)]
    assert len(refused) == 1
    assert await outcomes(aconn, job.id) == ["lost", "succeeded"]
    assert [(name, epoch) for name, _, epoch, _ in await recorded(aconn, job.id)] == [("a", 1), ("b", 2)]


async def test_what_cannot_be_loaded_under_the_fence_is_fenced_out(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    refused: list[int] = []

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        if ctx.claim_epoch == 1:
            raise Stop
        if ctx.claim_epoch == 2:
            await gates.wait()
        try:
            await ctx.step("a", int)
        except FencedOut:
            refused.append(ctx.claim_epoch)
            raise

    async with run_worker(**UNTOLD):
        job = await works.enqueue()
        await gates.until_reached()
        await take_away(aconn, job.id)
        gates.open()
        await until_status(aconn, job.id, "succeeded")
    assert refused == [2]


async def test_a_reopened_job_starts_without_steps(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[int] = []

    async def work(ctx: JobContext) -> int:
        calls.append(ctx.generation)
        return ctx.generation

    @app.task
    async def works(ctx: JobContext) -> int:
        value = await ctx.step("work", work, ctx)
        if ctx.generation == 0:
            raise Stop
        return value

    async with run_worker():
        job = await works.using(max_attempts=1).enqueue()
        await until_status(aconn, job.id, "failed")
        await job.retry("again")
        await until_status(aconn, job.id, "succeeded")
        assert await job.result() == 1
    assert calls == [0, 1]
    rows = await aconn.fetch("select generation, current from taskq.job_steps where job_id = $1 order by 1", job.id)
    assert [tuple(row) for row in rows] == [(0, False), (1, True)]


async def test_recorded_steps_that_the_body_does_not_ask_for_any_more_are_told_of(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        await ctx.step("kept", int)
        if ctx.attempt == 1:
            await ctx.step("old", int)
            await ctx.step("old", int)
            raise Stop
        await ctx.step("new", int)

    @app.task(retry=AGAIN)
    def plain(ctx: JobContext) -> None:
        ctx.step_sync("old" if ctx.attempt == 1 else "new", int)
        if ctx.attempt == 1:
            raise Stop

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
        [told] = events.of("job.steps_left")
        assert (told["job_id"], told["claim_epoch"], told["steps"]) == (str(job.id), 2, "old, old #2")
        rows = await aconn.fetch("select name, left_out from taskq.job_steps where job_id = $1 order by 1, 2", job.id)
        assert [tuple(row) for row in rows] == [("kept", False), ("new", False), ("old", True), ("old", True)]
        threaded = await plain.enqueue()
        await until_status(aconn, threaded.id, "succeeded")
        assert [e["steps"] for e in events.of("job.steps_left") if e["job_id"] == str(threaded.id)] == ["old"]


async def test_what_is_left_is_told_even_if_it_cannot_be_noted(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskq.worker.safe import SafeBodies

    async def fails(*args: object) -> None:
        raise DatabaseUnavailable("gone")

    monkeypatch.setattr(SafeBodies, "leave_steps", fails)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        await ctx.step(f"try-{ctx.attempt}", int)
        if ctx.attempt == 1:
            raise Stop

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
    assert [e["steps"] for e in events.of("job.steps_left")] == ["try-1"]


# Values --------------------------------------------------------------------------------------------------------------


async def test_what_cannot_be_recorded_ends_the_job_and_names_the_step_and_the_place(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[str] = []

    async def broken() -> dict[str, Any]:
        calls.append("broken")
        return {"a": [1, float("nan")]}

    async def wrong() -> int:
        calls.append("wrong")
        return "1"  # type: ignore[return-value]

    async def large() -> str:
        return "x" * (8 * 1024 * 1024)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext, which: str) -> None:
        await ctx.step("does", {"broken": broken, "wrong": wrong, "large": large}[which])

    async with run_worker():
        for which, said in (("broken", "step does.a[1]"), ("wrong", "step does"), ("large", "8388608")):
            job = await works.enqueue(which)
            row = await until_status(aconn, job.id, "failed")
            error = msgspec.json.decode(row["error"])
            assert error["type"] == "StepNotStorable"
            assert said in error["message"]
            assert await recorded(aconn, job.id) == []
            assert await outcomes(aconn, job.id) == ["failed"]
    assert calls == ["broken", "wrong"]


async def test_without_an_annotation_each_attempt_is_given_the_same_json(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    got: list[Any] = []

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        got.append(await ctx.step("pair", lambda: (1, Paid(2, "card"))))
        if ctx.attempt == 1:
            raise Stop

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
    assert got == [[1, {"order": 2, "by": "card"}]] * 2


async def test_a_record_that_does_not_fit_any_more_is_refused_with_step_job_and_cure(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[int] = []
    caught: list[StepMisfit] = []

    async def text() -> str:
        return "seven"

    async def number() -> int:
        calls.append(1)
        return 7

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            await ctx.step("ask", text)
            raise Stop
        try:
            await ctx.step("ask", number)
        except StepMisfit as exc:
            caught.append(exc)

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
    [exc] = caught
    assert (exc.name, exc.occurrence) == ("ask", 1)
    for part in ("step ask", str(job.id), "another name"):
        assert part in str(exc)
    assert calls == []


async def test_two_values_for_one_step_are_refused_and_the_record_stands(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, dsn: str
) -> None:
    caught: list[StepConflict] = []
    other = await asyncpg.connect(dsn)

    @app.task
    async def works(ctx: JobContext) -> None:
        async def gives(value: int) -> int:
            # As another hand would: under the name and place of this step.
            await other.execute(
                "insert into taskq.steps (job_id, generation, name, occurrence, claim_epoch, recorded_at, value) "
                "values ($1, 0, $2, 1, 1, taskq.now(), '1')",
                ctx.job_id,
                f"is-{value}",
            )
            return value

        assert await ctx.step("is-1", gives, 1) == 1
        try:
            await ctx.step("is-2", gives, 2)
        except StepConflict as exc:
            caught.append(exc)

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
    await other.close()
    [exc] = caught
    assert (exc.name, exc.occurrence) == ("is-2", 1)
    assert [row[3] for row in await recorded(aconn, job.id)] == ["1", "1"]


# The database --------------------------------------------------------------------------------------------------------


async def test_a_step_whose_answer_was_lost_is_recorded_once(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskq.worker.safe import SafeBodies

    sent: list[int] = []
    real = SafeBodies._record

    async def loses(self: SafeBodies, entries: Any, wait: bool) -> Any:
        answers = await real(self, entries, wait)
        sent.append(len(entries))
        if len(sent) == 1:
            raise DatabaseUnavailable("the answer was lost")
        return answers

    monkeypatch.setattr(SafeBodies, "_record", loses)

    @app.task
    async def works(ctx: JobContext) -> int:
        return await ctx.step("one", int, "7")

    async with run_worker():
        job = await works.enqueue()
        assert await job.result(15) == 7
    assert sent == [1, 1]
    assert await recorded(aconn, job.id) == [("one", 1, 1, "7")]


async def test_a_step_that_cannot_be_recorded_is_an_error_of_the_body(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskq.worker.safe import SafeBodies

    async def fails(*args: object) -> Any:
        raise DatabaseUnavailable("gone")

    @app.task
    async def works(ctx: JobContext) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(SafeBodies, "_rows", fails)
            with pytest.raises(DatabaseUnavailable):
                await ctx.step("one", int)
        await ctx.step("one", int)
        return "there"

    async with run_worker():
        job = await works.enqueue()
        assert await job.result(15) == "there"
    assert await recorded(aconn, job.id) == [("one", 1, 1, "0")]


async def test_a_step_whose_record_nobody_confirmed_is_not_called_again_by_its_attempt(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskq.worker.safe import SafeBodies

    calls: list[str] = []
    sent: list[int] = []
    real = SafeBodies._record

    async def loses(self: SafeBodies, entries: Any, wait: bool) -> Any:
        answers = await real(self, entries, wait)
        sent.append(len(entries))
        if len(sent) <= 2:
            raise DatabaseUnavailable("the answer was lost")
        return answers

    def charge(kind: str) -> int:
        calls.append(kind)
        return len(calls)

    @app.task
    async def works(ctx: JobContext) -> int:
        with pytest.raises(DatabaseUnavailable):
            await ctx.step("one", charge, "async")
        return await ctx.step("one", charge, "again")

    @app.task
    def plain(ctx: JobContext) -> int:
        with pytest.raises(DatabaseUnavailable):
            ctx.step_sync("one", charge, "plain")
        return ctx.step_sync("one", charge, "again")

    monkeypatch.setattr(SafeBodies, "_record", loses)
    async with run_worker():
        assert await (await works.enqueue()).result(15) == 1
        sent.clear()
        assert await (await plain.enqueue()).result(15) == 2
    assert calls == ["async", "plain"]


async def test_a_job_whose_row_is_locked_does_not_hold_up_the_steps_of_others(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task
    async def works(ctx: JobContext, n: int) -> int:
        await gates.wait()
        return await ctx.step("one", int, n)

    async with run_worker():
        jobs = [await works.enqueue(n) for n in range(6)]
        await gates.until_reached(times=6)
        async with aconn.transaction():
            await aconn.execute("select from taskq.jobs where id = $1 for update", jobs[2].id)
            gates.open()
            for n in (0, 1, 3, 4, 5):
                assert await jobs[n].result(15) == n
            assert await recorded(aconn, jobs[2].id) == []
        assert await jobs[2].result(15) == 2


# What is no step -----------------------------------------------------------------------------------------------------


class Callable_:
    def __call__(self) -> int:
        return 3

    def method(self) -> int:
        return 4


X = TypeVar("X")


def later(value: X) -> Awaitable[int]:
    return asyncio.sleep(0, 5)


def same(value: X) -> X:
    return value


def annotated() -> Annotated[int, ["not hashable"]]:
    return 8


async def test_functions_of_all_kinds_are_steps() -> None:
    ctx = JobContext.local("t")
    thing = Callable_()
    assert await ctx.step("a", thing) == 3
    assert await ctx.step("b", thing.method) == 4
    assert await ctx.step("c", later, 1) == 5
    assert await ctx.step("d", partial(partial(same, 6))) == 6
    assert await ctx.step("e", int, "7", effect_class="pure") == 7
    assert await ctx.step("f", annotated) == 8
    assert ctx.step_sync("g", annotated) == 8


async def test_a_task_is_called_as_its_function(app: TaskQ) -> None:
    @app.task
    async def pays(order: int) -> Paid:
        return Paid(order, "card")

    assert await JobContext.local("t").step("a", pays, 1) == Paid(1, "card")


def missing() -> Missing:  # type: ignore[name-defined]  # noqa: F821
    return 1


def unreadable() -> threading.Thread:
    return threading.current_thread()


@pytest.mark.parametrize(
    ("name", "fn", "said"),
    [
        ("a b", int, "the name of a step"),
        ("", int, "the name of a step"),
        ("a#2", int, "'#'"),
        ("g2:a", int, "g2:"),
        ("g2", int, "g2:"),
        ("a", 7, "no function"),
        ("a", missing, "Missing"),
        ("a", unreadable, "Thread"),
    ],
)
async def test_what_cannot_be_a_step_is_refused_before_anything_is_called(name: str, fn: Any, said: str) -> None:
    ctx = JobContext.local("t")
    with pytest.raises(StepRefused, match=said):
        await ctx.step(name, fn)
    with pytest.raises(StepRefused, match=said):
        ctx.step_sync(name, fn)


async def test_a_step_of_another_class_is_refused() -> None:
    called: list[int] = []
    ctx = JobContext.local("t")
    with pytest.raises(StepRefused, match="'idempotent', 'pure' or 'side_effecting'"):
        ctx.step_sync("pay", called.append, 1, effect_class="other")  # type: ignore[call-arg]
    assert called == []


async def test_an_async_function_in_step_sync_is_refused() -> None:
    async def asks() -> int:
        return 1

    ctx = JobContext.local("t")
    with pytest.raises(StepRefused, match="async"):
        ctx.step_sync("a", asks)  # type: ignore[unused-coroutine]
    with pytest.raises(StepRefused, match="async"):
        ctx.step_sync("a", lambda: asyncio.get_running_loop().create_future())


async def test_step_sync_in_the_event_loop_is_refused(run_worker: RunWorker, app: TaskQ) -> None:
    @app.task
    async def works(ctx: JobContext) -> str:
        with pytest.raises(SyncCallInEventLoop, match="step_sync"):
            ctx.step_sync("a", int)
        return "refused"

    async with run_worker():
        job = await works.enqueue()
        assert await job.result(15) == "refused"


def test_errors_of_steps_say_which() -> None:
    assert issubclass(StepNotStorable, Exception)
    assert isinstance(StepConflict("m", name="n", occurrence=2), Exception)

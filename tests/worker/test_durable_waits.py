"""Bodies that sleep and wait for signals, by workers: they hold no slot, use up no attempt, and lose nothing."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Annotated, Any
from uuid import UUID

import asyncpg
import msgspec
import pytest
from helpers import aeventually
from worker_kit import Events, Gates, RunWorker, claim_of, outcomes, until_status

from taskq import JobContext, Retry, TaskQ, TimedOut, constant
from taskq.errors import (
    DatabaseUnavailable,
    FencedOut,
    InvalidDuration,
    InvalidRequest,
    JobNotFound,
    PayloadError,
    SignalConflict,
    StepMisfit,
    StepRefused,
    SuspensionSwallowed,
    WrongState,
)
from taskq.outcomes import Suspended, is_suspension
from taskq.steps import Key
from taskq.testing import drain
from taskq.worker.disposition import Interrupted, Raised, Returned, Suspends, decide, of_suspended

pytestmark = pytest.mark.anyio
AGAIN = Retry(max_attempts=5, backoff=constant(0))


class Approval(msgspec.Struct, tag=True):
    by: str


class Rejection(msgspec.Struct, tag=True):
    why: str


@dataclass
class Note:
    text: str


async def row_of(aconn: asyncpg.Connection, job: UUID) -> Any:
    return await aconn.fetchrow("select * from taskq.all_jobs where id = $1", job)


async def until_held(aconn: asyncpg.Connection, job: UUID) -> Any:
    async def look() -> Any:
        row = await row_of(aconn, job)
        assert (row["status"], row["held_reason"]) == ("held", "signal")
        return row

    return await aeventually(look)


async def until_waits(aconn: asyncpg.Connection, job: UUID, attempts: int = 1) -> Any:
    """Wait until a job is pending after so many attempts."""

    async def look() -> Any:
        row = await row_of(aconn, job)
        assert (row["status"], row["claim_epoch"]) == ("pending", attempts)
        return row

    return await aeventually(look)


async def wake(aconn: asyncpg.Connection, job: UUID) -> None:
    """Have its sleep end now, as time would: nothing but instants are moved."""
    await aconn.execute("update taskq.steps set until = taskq.now() where job_id = $1 and kind <> 'step'", job)
    await aconn.execute("update taskq.jobs set run_at = taskq.now() where id = $1", job)


# Sleep ---------------------------------------------------------------------------------------------------------------


async def test_a_body_that_sleeps_holds_no_slot_and_uses_up_no_attempt(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, events: Events
) -> None:
    passed: list[tuple[str, int]] = []

    async def step(name: str, ctx: JobContext) -> None:
        passed.append((name, ctx.claim_epoch))

    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> int:
        await ctx.step("before", step, "before", ctx)
        try:
            await ctx.sleep("2h")
        except Exception:
            passed.append(("swallowed", 0))
        await ctx.step("after", step, "after", ctx)
        return ctx.attempt

    async with run_worker(concurrency=1):
        job = await works.enqueue()
        row = await until_waits(aconn, job.id)
        until = await aconn.fetchval("select until from taskq.steps where job_id = $1 and kind = 'sleep'", job.id)
        assert row["run_at"] == until
        assert (row["attempt"], row["snoozes"], row["retry_afters"], row["recoveries"], row["releases"]) == (0,) * 5
        [told] = events.of("job.suspended")
        assert (told["waits_for"], told["outcome"]) == ("sleep sleep", "suspend")
        # Its slot is free.
        assert await (await works.using(tags=["x"]).enqueue()).info() is not None
        other = await app.enqueue_many([works.job()])
        await until_waits(aconn, other[0].id)
        await wake(aconn, job.id)
        await until_status(aconn, job.id, "succeeded")
        assert await job.result() == 1
    assert [p for p in passed if p[0] != "before"] == [("after", 2)]
    assert await outcomes(aconn, job.id) == ["suspended", "succeeded"]


async def test_a_short_sleep_is_waited_out_and_two_of_one_name_are_two(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    slept: list[float] = []

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        begun = time.monotonic()
        await ctx.sleep(0.2)
        await ctx.sleep(0.1)
        slept.append(time.monotonic() - begun)
        if ctx.attempt == 1:
            raise ValueError

    @app.task(retry=AGAIN)
    def plain(ctx: JobContext) -> None:
        begun = time.monotonic()
        ctx.sleep_sync("300ms", "nap")
        slept.append(time.monotonic() - begun)
        ctx.sleep_sync("2h", "night")

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
        assert await outcomes(aconn, job.id) == ["failed", "succeeded"]
        first, again = slept
        assert first >= 0.3
        assert again < first
        assert await aconn.fetchval("select count(*) from taskq.steps where job_id = $1", job.id) == 2
        threaded = await plain.enqueue()
        await until_waits(aconn, threaded.id)
        assert slept[-1] >= 0.3
        await wake(aconn, threaded.id)
        await until_status(aconn, threaded.id, "succeeded")
        assert await outcomes(aconn, threaded.id) == ["suspended", "succeeded"]


async def test_sleeps_beside_each_other_wake_the_body_at_the_first_and_steps_beside_them_are_let_finish(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    calls: list[int] = []

    async def slow(ctx: JobContext) -> int:
        calls.append(ctx.claim_epoch)
        await gates.wait()
        await ctx.step("inner", int)
        return 7

    @app.task
    async def works(ctx: JobContext) -> int:
        _, _, value = await asyncio.gather(
            ctx.sleep("3h", "long"), ctx.sleep("1h", "short"), ctx.step("slow", slow, ctx)
        )
        return value

    async with run_worker():
        job = await works.enqueue()
        await gates.until_reached()
        await asyncio.sleep(0.1)
        assert (await row_of(aconn, job.id))["status"] == "running"
        gates.open()
        row = await until_waits(aconn, job.id)
        short = await aconn.fetchval("select until from taskq.steps where job_id = $1 and name = 'short'", job.id)
        assert row["run_at"] == short
        await wake(aconn, job.id)
        assert await job.result(15) == 7
    assert calls == [1]


async def test_a_task_group_that_sleeps_suspends_and_one_that_also_fails_has_failed(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    async def fails(ctx: JobContext) -> None:
        while not ctx._own_steps.suspended:
            await asyncio.sleep(0)
        raise ValueError("on purpose")

    @app.task(max_attempts=1)
    async def works(ctx: JobContext, well: bool) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(ctx.sleep("1h"))
            group.create_task(ctx.sleep("2h") if well else fails(ctx))

    async with run_worker():
        job = await works.enqueue(True)
        await until_waits(aconn, job.id)
        bad = await works.enqueue(False)
        await until_status(aconn, bad.id, "failed")
    assert await outcomes(aconn, bad.id) == ["failed"]


async def test_a_body_that_swallows_its_suspension_has_failed_and_is_told_why(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    after: list[BaseException] = []

    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> str:
        with contextlib.suppress(BaseException):
            await ctx.sleep("1h", "rest")
        for again in (ctx.step("x", int), ctx.sleep(0), ctx.wait_for("s", timeout=0)):
            try:
                await again
            except BaseException as exc:
                after.append(exc)
        return "went on"

    async with run_worker():
        job = await works.enqueue()
        row = await until_status(aconn, job.id, "failed")
    error = msgspec.json.decode(row["error"])
    assert error["type"] == "SuspensionSwallowed"
    assert "sleep rest" in error["message"]
    assert [type(exc) for exc in after] == [Suspended] * 3
    assert await aconn.fetchval("select count(*) from taskq.steps where kind = 'step'") == 0


async def test_a_cancel_ends_a_body_that_sleeps_or_is_about_to(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def works(ctx: JobContext) -> None:
        await ctx.sleep("1h")

    async with run_worker():
        job = await works.enqueue()
        await until_waits(aconn, job.id)
        assert await job.cancel() == "cancelled"
        assert await outcomes(aconn, job.id) == ["suspended"]


async def test_a_sleep_past_the_deadline_ends_the_job(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def works(ctx: JobContext) -> None:
        await ctx.sleep("2h")

    async with run_worker():
        job = await works.using(deadline="1h").enqueue()
        row = await until_status(aconn, job.id, "failed")
    error = msgspec.json.decode(row["error"])
    assert (error["type"], error["cause"]["type"]) == ("DeadlineExceeded", "Suspended")
    assert (row["attempt"], await outcomes(aconn, job.id)) == (0, ["suspended"])


async def test_what_an_operator_makes_due_sleeps_no_more(app: TaskQ, aconn: asyncpg.Connection) -> None:
    @app.task
    async def works(ctx: JobContext) -> str:
        await ctx.sleep("2h")
        await ctx.sleep("3h")
        return "rested"

    job = await works.enqueue()
    assert (await drain(app)).waiting == 1
    assert (await drain(app, later=True)).succeeded == 1
    assert await job.result() == "rested"
    assert await outcomes(aconn, job.id) == ["suspended", "suspended", "succeeded"]


# Signals -------------------------------------------------------------------------------------------------------------


async def test_a_body_waits_for_a_signal_without_a_slot_and_goes_on_when_it_comes(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> str:
        match await ctx.wait_for("approval", Approval | Rejection, timeout="3d"):
            case Approval(by):
                return f"approved by {by}"
            case Rejection(why):
                return f"rejected: {why}"
            case TimedOut():
                return "nobody came"
        raise AssertionError

    async with run_worker(concurrency=1):
        jobs = await app.enqueue_many([works.job() for _ in range(3)])
        for job in jobs:
            row = await until_held(aconn, job.id)
            assert row["attempt"] == 0
        waiting = await aconn.fetch("select job_id, name from taskq.waiting_for_signals")
        assert {(r["job_id"], r["name"]) for r in waiting} == {(job.id, "approval") for job in jobs}
        assert await jobs[0].signal("approval", Approval("ann"), key="k1") == "sent"
        assert await jobs[0].result(15) == "approved by ann"
        assert await jobs[1].signal("approval", Rejection("late")) == "sent"
        assert await jobs[1].result(15) == "rejected: late"
        await wake(aconn, jobs[2].id)
        assert await jobs[2].result(15) == "nobody came"
        for job in jobs:
            assert await outcomes(aconn, job.id) == ["suspended", "succeeded"]


async def test_signals_sent_before_the_wait_are_kept_and_given_in_order(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> list[Any]:
        if ctx.claim_epoch == 1:
            await gates.wait()
        got = [await ctx.wait_for("note", Note) for _ in range(3)]
        if ctx.claim_epoch == 1:
            raise ValueError("again")
        return [note.text for note in got]

    @app.task
    def plain(ctx: JobContext) -> list[Any]:
        return [str(ctx.wait_for_sync("note", Note, timeout="1h")), ctx.wait_for_sync("more")]

    async with run_worker():
        job = await works.enqueue()
        await gates.until_reached()
        for text, key, answer in (("a", "1", "sent"), ("b", None, "sent"), ("a", "1", "already"), ("c", "2", "sent")):
            assert await job.signal("note", Note(text), key=key) == answer
        await job.signal("other", 1)
        gates.open()
        assert await job.result(15) == ["a", "b", "c"]
        assert await outcomes(aconn, job.id) == ["failed", "succeeded"]
        threaded = await plain.enqueue()
        await until_held(aconn, threaded.id)
        assert await asyncio.to_thread(threaded.signal_sync, "note", Note("d")) == "sent"
        await until_held(aconn, threaded.id)
        await threaded.signal("more", [1])
        assert await threaded.result(15) == ["Note(text='d')", [1]]
        assert await outcomes(aconn, threaded.id) == ["suspended", "suspended", "succeeded"]


async def test_a_payload_that_fits_no_type_is_refused_and_the_wait_goes_on(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def works(ctx: JobContext) -> str:
        return (await ctx.wait_for("note", Note)).text

    async with run_worker():
        job = await works.enqueue()
        await job.signal("note", 7)
        await job.signal("note", {"text": 8})
        await until_held(aconn, job.id)
        await aeventually(
            lambda: aconn.fetchval("select count(*) = 2 from taskq.signals where refused_why like 'Note%'")
        )
        await job.signal("note", Note("fits"))
        assert await job.result(15) == "fits"


async def test_two_waits_beside_each_other_take_a_signal_each(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def works(ctx: JobContext) -> list[Any]:
        return sorted(await asyncio.gather(*(ctx.wait_for("n", int) for _ in range(3)), ctx.wait_for("m", int)))

    async with run_worker():
        job = await works.enqueue()
        await until_held(aconn, job.id)
        for n in range(3):
            await job.signal("n", n)
        await job.signal("m", 9)
        assert await job.result(15) == [0, 1, 2, 9]


async def test_a_short_wait_is_waited_out_in_its_slot(run_worker: RunWorker, app: TaskQ) -> None:
    @app.task
    async def works(ctx: JobContext) -> bool:
        return await ctx.wait_for("never", timeout="200ms") == TimedOut()

    @app.task
    def plain(ctx: JobContext) -> bool:
        return ctx.wait_for_sync("never", timeout="200ms") == TimedOut()

    async with run_worker():
        for job in (await works.enqueue(), await plain.enqueue()):
            assert await job.result(15) is True
            assert (await job.info()).claim_epoch == 1


async def test_what_a_wait_has_taken_is_given_again_and_must_still_fit(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    caught: list[str] = []

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        if ctx.attempt == 1:
            await ctx.wait_for("n", int)
            raise ValueError("again")
        try:
            await ctx.wait_for("n", str)
        except StepMisfit as exc:
            caught.append(str(exc))

    async with run_worker():
        job = await works.enqueue()
        await job.signal("n", 7)
        await until_status(aconn, job.id, "succeeded")
    assert len(caught) == 1


async def test_an_attempt_that_was_taken_away_neither_sleeps_nor_waits_nor_takes(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    refused: list[str] = []

    @app.task
    async def works(ctx: JobContext) -> str:
        if ctx.claim_epoch > 1:
            return "another"
        await gates.wait()
        for name, call in {
            "sleep": lambda: ctx.sleep("1h"),
            "wait": lambda: ctx.wait_for("s"),
            "take": lambda: ctx._bodies.take_signal(ctx, Key("wait", "s", 1), 1, None),
        }.items():
            try:
                await call()
            except FencedOut:
                refused.append(name)
        return "none"

    async with run_worker(concurrency=1, lease=60):
        job = await works.enqueue()
        await gates.until_reached()
        async with aconn.transaction():
            ends = "update taskq.workers set lease_expires_at = '-infinity' where id = $1"
            await aconn.execute(ends, await aconn.fetchval("select claimed_by from taskq.jobs where id = $1", job.id))
            await aconn.execute("select taskq.mark_lost()")
            await aconn.fetch("select * from taskq.settle_lost()")
        gates.open()
        assert await job.result(15) == "another"
    assert refused == ["sleep", "wait", "take"]
    assert await aconn.fetchval("select count(*) from taskq.steps") == 0


@pytest.mark.parametrize("lost", ["begin_sleep", "begin_wait", "take_signal"])
async def test_an_answer_that_was_lost_is_asked_for_again_and_nothing_is_done_twice(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    from taskq.worker.safe import SafeBodies

    sent: list[str] = []
    real = SafeBodies._rows

    async def loses(self: SafeBodies, query: str, limit: float, *args: Any) -> Any:
        found = await real(self, query, limit, *args)
        sent.append(query)
        if query == lost and sent.count(query) == 1:
            raise DatabaseUnavailable("the answer was lost")
        return found

    monkeypatch.setattr(SafeBodies, "_rows", loses)

    @app.task
    async def works(ctx: JobContext) -> list[Any]:
        await ctx.sleep("100ms")
        return [await ctx.wait_for("n", int), await ctx.wait_for("n", int), str(await ctx.wait_for("x", timeout=0))]

    async with run_worker():
        job = await works.using(run_in="1h").enqueue()
        await job.signal("n", 1)
        await job.signal("n", 2)
        await job.retry()
        assert (await job.result(15))[:2] == [1, 2]
    assert sent.count(lost) >= 2
    assert await aconn.fetchval("select count(*) from taskq.signals where taken_at is not null") == 2


async def test_a_wait_that_was_answered_and_asked_for_again_is_the_same(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def works(ctx: JobContext) -> list[Any]:
        first = [await ctx.wait_for("n", int), str(await ctx.wait_for("late", timeout=0))]
        # As a body that has lost the answers would, and asks anew in the same attempt.
        ctx._own_steps._begun.clear()
        return first + [await ctx.wait_for("n", int), str(await ctx.wait_for("late", timeout=0))]

    async with run_worker():
        job = await works.using(run_in="1h").enqueue()
        await job.signal("n", 1)
        await job.retry()
        assert await job.result(15) == [1, "TimedOut()"] * 2


async def test_signals_that_cannot_be_sent_are_refused(app: TaskQ, aconn: asyncpg.Connection) -> None:
    @app.task
    async def works(ctx: JobContext) -> None: ...

    job = await works.enqueue()
    assert await job.signal("n", 1, key="k") == "sent"
    with pytest.raises(SignalConflict):
        await job.signal("n", 2, key="k")
    assert await job.signal("m", 2, key="k") == "sent"
    for name, key in (("a b", None), ("", None), ("n", ""), ("n", "x" * 513)):
        with pytest.raises(InvalidRequest):
            await job.signal(name, 1, key=key)
    with pytest.raises(PayloadError):
        await job.signal("n", float("nan"))
    with pytest.raises(JobNotFound):
        await app.signal(UUID(int=7), "n")
    await drain(app)
    with pytest.raises(WrongState, match="succeeded"):
        await job.signal("n", 1)


# What cannot wait ----------------------------------------------------------------------------------------------------


async def test_a_side_effecting_body_neither_sleeps_nor_waits(run_worker: RunWorker, app: TaskQ) -> None:
    @app.task(effect_class="side_effecting")
    async def pays(ctx: JobContext) -> list[str]:
        said = []
        for call in (ctx.sleep("1h"), ctx.wait_for("s")):
            try:
                await call
            except StepRefused as exc:
                said.append(str(exc))
        return [*said, await ctx.step("one", str, "recorded")]

    async with run_worker():
        one, other, step = await (await pays.enqueue()).result(15)
    assert "side_effecting" in one
    assert "side_effecting" in other
    assert step == "recorded"


async def test_what_cannot_be_waited_for_is_refused() -> None:
    ctx = JobContext.local("t")

    async def rests() -> None:
        await ctx.sleep("1h")

    with pytest.raises(StepRefused, match="inside of the function of step x"):
        await ctx.step("x", rests)
    with pytest.raises(InvalidDuration):
        await ctx.sleep("soon")
    with pytest.raises(InvalidDuration):
        await ctx.wait_for("s", timeout="soon")
    assert await ctx.wait_for("s", Annotated[int, ["not hashable"]], timeout=0) == TimedOut()
    with pytest.raises(StepRefused, match="name of a sleep"):
        await ctx.sleep("1h", "a b")
    with pytest.raises(StepRefused, match="Thread"):
        await ctx.wait_for("s", threading.Thread | int)


async def test_a_plain_call_neither_sleeps_nor_waits() -> None:
    ctx = JobContext.local("t")
    await ctx.sleep("2h")
    assert await ctx.wait_for("s", int, timeout="2h") == TimedOut()
    with pytest.raises(StepRefused, match="no job"):
        await ctx.wait_for("s", int)
    assert await ctx._bodies.take_signal(ctx, Key("wait", "s", 1), 1, None) is False
    await ctx._bodies.leave_steps(ctx, [])


# What it means -------------------------------------------------------------------------------------------------------


def test_a_suspension_is_one_alone_or_in_groups_of_them() -> None:
    stop, other = Suspended("x"), ValueError("y")
    assert not isinstance(stop, Exception)
    assert is_suspension(stop)
    assert is_suspension(BaseExceptionGroup("g", [stop, BaseExceptionGroup("h", [stop, asyncio.CancelledError()])]))
    assert not is_suspension(BaseExceptionGroup("g", [stop, other]))
    assert not is_suspension(BaseExceptionGroup("g", [asyncio.CancelledError()]))


def test_the_end_of_a_suspended_body_is_decided_by_how_it_ended() -> None:
    keys = [Key("sleep", "s", 1), Key("wait", "w", 2)]
    end = of_suspended(Raised(Suspended("x")), keys)
    assert end == Suspends(tuple(keys))
    claim = claim_of("t")
    decided = decide(claim, None, end)  # type: ignore[arg-type]
    assert decided.outcome == "suspend"
    assert decided.error is not None
    assert decided.error["message"] == "sleep s, signal w #2"
    assert decided.error["for"][1] == {"kind": "wait", "name": "w", "occurrence": 2}
    failed = of_suspended(Returned("1"), keys)
    assert isinstance(failed, Raised)
    assert isinstance(failed.error, SuspensionSwallowed)
    for other in (Raised(ValueError()), Interrupted("cancel")):
        assert of_suspended(other, keys) is other


async def test_draining_leaves_what_waits_for_a_signal_until_it_is_sent(app: TaskQ) -> None:
    @app.task
    async def works(ctx: JobContext) -> int:
        return await ctx.wait_for("n", int)

    job = await works.enqueue()
    left = await drain(app)
    assert (left.held, left.waiting) == (1, 0)
    await job.signal("n", 3)
    assert (await drain(app)).succeeded == 1
    assert await job.result() == 3

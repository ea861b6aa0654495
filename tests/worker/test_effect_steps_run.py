"""Side-effecting steps, by workers: called once, told once, and unknown wherever nobody can tell."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Events, Gates, RunWorker, claim_of, declare_lost, outcomes, until_status

from taskq import JobContext, OutcomeUnknown, Retry, RetryAfter, TaskQ, constant
from taskq.errors import (
    DatabaseUnavailable,
    EffectStartNotProven,
    FencedOut,
    JobFailed,
    StepFailed,
    StepNotStorable,
    StepRefused,
)
from taskq.idempotency import step_key
from taskq.policy import ExecutionPolicy
from taskq.steps import Key
from taskq.telemetry.events import OF_JOB
from taskq.worker import Worker, WorkerOptions
from taskq.worker.disposition import Interrupted, Raised, RaisedElsewhere, Returned, Suspends, Unproven, decide
from taskq.worker.safe import SafeBodies

pytestmark = pytest.mark.anyio
AGAIN = Retry(max_attempts=5, backoff=constant(0))
UNTOLD: dict[str, Any] = {"concurrency": 1, "lease": 60}
"""A worker that is not told of what happens to its jobs, and declares nobody lost."""


@dataclass
class Paid:
    cents: int


class Refused(Exception):
    """What a provider answers when nothing has happened."""


class Stop(Exception):
    """What a body stops an attempt with."""


async def recorded(aconn: asyncpg.Connection, job: UUID) -> list[tuple[Any, ...]]:
    query = (
        "select name, occurrence, claim_epoch, done, value::text, error ->> 'type' from taskq.steps where job_id = $1"
        " order by 1, 2"
    )
    return [tuple(row) for row in await aconn.fetch(query, job)]


async def unknown_of(aconn: asyncpg.Connection, job: UUID) -> tuple[str, str, int]:
    await until_status(aconn, job, "unknown")
    row = await aconn.fetchrow("select reason, error from taskq.unknowns where job_id = $1 order by since desc", job)
    error = json.loads(row["error"])
    return row["reason"], error["step"], error["occurrence"]


async def by_hand(dsn: str, query: str, *args: object) -> Any:
    """On a connection of its own: the test's may be in use just then."""
    conn = await asyncpg.connect(dsn)
    try:
        return await conn.fetchval(query, *args)
    finally:
        await conn.close()


Sent = list[tuple[str, str]]


@pytest.fixture
def swallow(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, bool], Sent]:
    """Let the answers to a statement get lost so many times, after it was done or before."""
    rows = SafeBodies._rows

    def arm(query: str, times: int, done: bool) -> Sent:
        lost: Sent = []

        async def losing(self: SafeBodies, asked: str, limit: float, *args: Any) -> list[Any]:
            if asked == query and len(lost) < times:
                lost.append((query, args[1]))
                if done:
                    await rows(self, asked, limit, *args)
                raise DatabaseUnavailable("the answer was lost")
            return await rows(self, asked, limit, *args)

        monkeypatch.setattr(SafeBodies, "_rows", losing)
        return lost

    return arm


# Once ----------------------------------------------------------------------------------------------------------------


async def test_it_is_called_once_under_its_key_and_later_attempts_are_given_its_value(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[str] = []

    async def pay(ctx: JobContext, cents: int) -> Paid:
        calls.append(ctx.idempotency_key)
        row = await by_hand(dsn, "select effect_started_at is not null from taskq.jobs where id = $1", ctx.job_id)
        assert row is True, "its start is committed before it is called"
        return Paid(cents)

    dsn = app.find_dsn()

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> int:
        paid = await ctx.step("pay", pay, ctx, 7, effect_class="side_effecting")
        if ctx.attempt < 3:
            raise Stop
        assert paid == Paid(7)
        return paid.cents

    async with run_worker():
        job = await works.enqueue()
        assert await job.result(BOUND) == 7
    assert calls == [step_key(str(job.id), "pay", 1)]
    assert await recorded(aconn, job.id) == [("pay", 1, 1, True, '{"cents": 7}', None)]
    assert await outcomes(aconn, job.id) == ["failed", "failed", "succeeded"]


async def test_a_plain_function_has_them_too(run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection) -> None:
    calls: list[str] = []

    def pay() -> int:
        calls.append("pay")
        return 7

    def refuses() -> int:
        calls.append("refuses")
        raise Refused

    @app.task(retry=AGAIN)
    def works(ctx: JobContext) -> int:
        paid: int = ctx.step_sync("pay", pay, effect_class="side_effecting")
        for _ in range(2):
            with pytest.raises(StepFailed, match="Refused"):
                ctx.step_sync("refuses", refuses, effect_class="side_effecting")
        if ctx.attempt == 1:
            raise Stop
        return paid

    async with run_worker():
        assert await (await works.enqueue()).result(BOUND) == 7
    assert calls == ["pay", "refuses"]


async def test_in_a_plain_call_it_calls_its_function_and_says_how_that_failed() -> None:
    def refuses() -> int:
        raise Refused("no")

    ctx = JobContext.local("t")
    assert await ctx.step("a", int, "7", effect_class="side_effecting") == 7
    assert ctx.step_sync("b", int, "8", effect_class="side_effecting") == 8
    with pytest.raises(StepFailed, match="Refused: no") as caught:
        await ctx.step("c", refuses, effect_class="side_effecting")
    assert (caught.value.name, caught.value.occurrence, caught.value.error["type"]) == ("c", 1, "Refused")
    assert isinstance(caught.value.__cause__, Refused)


# What it raises ------------------------------------------------------------------------------------------------------


async def test_what_it_raises_is_its_last_word_and_ends_the_job_unless_the_body_catches_it(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[str] = []

    async def pay(which: str) -> None:
        calls.append(which)
        raise ConnectionResetError("in the middle of it")

    @app.task(retry=AGAIN)
    async def fails(ctx: JobContext) -> None:
        await ctx.step("pay", pay, "fails", effect_class="side_effecting")

    @app.task(retry=AGAIN)
    async def catches(ctx: JobContext) -> str:
        for _ in range(2):
            try:
                await ctx.step("pay", pay, "catches", effect_class="side_effecting")
            except StepFailed as exc:
                said: str = exc.error["type"]
        if ctx.attempt == 1:
            raise Stop
        return said

    async with run_worker():
        failing, catching = await fails.enqueue(), await catches.enqueue()
        with pytest.raises(JobFailed, match="StepFailed"):
            await failing.result(BOUND)
        assert await catching.result(BOUND) == "ConnectionResetError"
    assert sorted(calls) == ["catches", "fails"]
    assert await outcomes(aconn, failing.id) == ["failed"]
    assert await recorded(aconn, catching.id) == [("pay", 1, 1, True, None, "ConnectionResetError")]


async def test_an_error_that_says_that_nothing_happened_lets_it_start_again(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[int] = []

    async def pay(ctx: JobContext) -> int:
        calls.append(ctx.claim_epoch)
        match len(calls):
            case 1:
                raise Refused
            case 2:
                raise RetryAfter(0)
        return 7

    @app.task(retry=Retry(max_attempts=3, on=(Refused,), backoff=constant(0)))
    async def works(ctx: JobContext) -> int:
        paid: int = await ctx.step("pay", pay, ctx, effect_class="side_effecting")
        return paid

    async with run_worker():
        job = await works.enqueue()
        assert await job.result(BOUND) == 7
    assert calls == [1, 2, 3]
    assert await outcomes(aconn, job.id) == ["failed", "retry_after", "succeeded"]
    assert await recorded(aconn, job.id) == [("pay", 1, 3, True, "7", None)]


@pytest.mark.parametrize("caught", [False, True], ids=["", "and-the-body-goes-on"])
@pytest.mark.parametrize("exc", [OutcomeUnknown("no answer"), FencedOut("stop"), StepNotStorable("too large")])
async def test_one_that_cannot_tell_makes_the_job_unknown_whatever_the_body_does_then(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, exc: Exception, caught: bool
) -> None:
    calls: list[int] = []

    async def pay(ctx: JobContext) -> int:
        calls.append(ctx.claim_epoch)
        raise exc

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> str:
        try:
            await ctx.step("pay", pay, ctx, effect_class="side_effecting")
        except type(exc):
            if not caught:
                raise
        with pytest.raises(StepRefused, match="step pay is under way, or nobody knows"):
            await ctx.step("pay", pay, ctx, effect_class="side_effecting")
        return "went on"

    async with run_worker(**UNTOLD):
        job = await works.enqueue()
        assert await unknown_of(aconn, job.id) == ("told", "pay", 1)
    assert calls == [1]
    assert await recorded(aconn, job.id) == [("pay", 1, 1, False, None, None)]


async def test_what_somebody_decides_is_given_to_the_body_and_checked(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[int] = []

    async def pay(ctx: JobContext) -> Paid:
        calls.append(ctx.claim_epoch)
        if ctx.claim_epoch == 1:
            raise OutcomeUnknown("no answer")
        return Paid(ctx.claim_epoch)

    @app.task(retry=Retry(max_attempts=1))
    async def works(ctx: JobContext) -> int:
        paid: Paid = await ctx.step("pay", pay, ctx, effect_class="side_effecting")
        return paid.cents

    async with run_worker():
        happened, did_not, wrong = [await works.enqueue() for _ in range(3)]
        for job in (happened, did_not, wrong):
            await until_status(aconn, job.id, "unknown")
        decided = {"reason": "asked them", "claim_epoch": 1}
        assert await app.resolve(happened.id, happened=True, result=Paid(9), **decided) == "pending"
        assert await app.resolve(did_not.id, happened=False, **decided) == "pending"
        assert await app.resolve(wrong.id, happened=True, result="9", **decided) == "pending"
        assert [await happened.result(BOUND), await did_not.result(BOUND)] == [9, 2]
        with pytest.raises(JobFailed, match="StepMisfit.*do not rename the step: its effect has happened"):
            await wrong.result(BOUND)
    assert calls == [1, 1, 1, 2]
    assert await outcomes(aconn, happened.id) == await outcomes(aconn, did_not.id) == ["resolved", "succeeded"]


# What stops it -------------------------------------------------------------------------------------------------------


async def test_a_cancel_request_that_was_first_lets_it_not_start(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    calls: list[int] = []

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        # Nobody tells this worker.
        await by_hand(app.find_dsn(), "update taskq.jobs set cancel_requested_at = now() where id = $1", ctx.job_id)
        await ctx.step("pay", calls.append, 1, effect_class="side_effecting")

    async with run_worker(**UNTOLD):
        job = await works.enqueue()
        await until_status(aconn, job.id, "cancelled")
    assert calls == []
    assert await recorded(aconn, job.id) == []


async def test_one_that_is_under_way_is_let_finish_and_stopped_after_it(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    async def pay(ctx: JobContext) -> bool:
        await gates.wait()
        await aeventually(lambda: ctx.cancel_requested, BOUND)
        return True

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        await ctx.step("pay", pay, ctx, effect_class="side_effecting")
        await gates.wait("never")

    async with run_worker():
        job = await works.enqueue()
        await gates.until_reached()
        assert await job.cancel() == "requested"
        gates.open()
        await until_status(aconn, job.id, "cancelled")
    assert await recorded(aconn, job.id) == [("pay", 1, 1, True, "true", None)]
    assert gates.reached == ["gate", "never"], "it is stopped where it next waits"


async def test_one_that_stops_itself_for_a_cancel_request_ends_the_job_cancelled(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    async def pay(ctx: JobContext) -> None:
        await gates.wait()
        await aeventually(lambda: ctx.cancel_requested, BOUND)
        ctx.raise_if_cancelled()

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        await ctx.step("pay", pay, ctx, effect_class="side_effecting")

    async with run_worker():
        job = await works.enqueue()
        await gates.until_reached()
        await job.cancel()
        gates.open()
        await until_status(aconn, job.id, "cancelled")
    assert [row[3] for row in await recorded(aconn, job.id)] == [True]


async def test_its_timeout_leaves_it_unknown_in_a_coroutine_and_in_a_thread_that_ends(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    opened = threading.Event()

    @app.task(retry=AGAIN, timeout=0.3)
    async def hangs(ctx: JobContext) -> None:
        await ctx.step("pay", gates.wait, effect_class="side_effecting")

    def blocks() -> str:
        assert opened.wait(BOUND)
        raise OutcomeUnknown("it was told to stop")

    @app.task(retry=AGAIN, timeout=0.3)
    def thread(ctx: JobContext) -> None:
        ctx.step_sync("pay", blocks, effect_class="side_effecting")

    async with run_worker() as worker:
        job, threaded = await hangs.enqueue(), await thread.enqueue()
        assert await unknown_of(aconn, job.id) == ("timed_out", "pay", 1)
        await aeventually(lambda: any(r.interrupt for r in worker.parts.executor.running.values()), BOUND)
        opened.set()
        assert await unknown_of(aconn, threaded.id) == ("timed_out", "pay", 1)
    assert gates.reached == ["gate"]


@pytest.mark.parametrize("returned", [False, True], ids=["under-way", "not-recorded-yet"])
async def test_a_worker_that_has_to_stop_leaves_it_unknown(
    app: TaskQ,
    dsn: str,
    aconn: asyncpg.Connection,
    gates: Gates,
    swallow: Callable[[str, int, bool], Sent],
    returned: bool,
) -> None:
    lost = swallow("end_step", 10**6, False)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        await ctx.step("pay", gates.wait, effect_class="side_effecting")

    worker = Worker(app.tasks, dsn, options=WorkerOptions(lease=60, grace=0))
    running = asyncio.create_task(worker.run())
    job = await works.enqueue()
    await gates.until_reached()
    if returned:
        gates.open()
        await aeventually(lambda: lost, BOUND)
    worker.stop()
    await asyncio.wait_for(running, BOUND)
    assert await unknown_of(aconn, job.id) == ("shutdown", "pay", 1)


async def test_a_lost_worker_that_tells_late_is_heard_and_the_job_goes_on_elsewhere(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    calls: list[int] = []

    async def pay(ctx: JobContext) -> int:
        calls.append(ctx.claim_epoch)
        await gates.wait()
        return 7

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> int:
        paid: int = await ctx.step("pay", pay, ctx, effect_class="side_effecting")
        return paid

    async with run_worker() as worker:
        first = worker.worker_id
        job = await works.enqueue()
        await gates.until_reached()
        await declare_lost(aconn)
        assert await unknown_of(aconn, job.id) == ("worker_lost", "pay", 1)
        await aeventually(lambda: worker.worker_id != first, BOUND)
        gates.open()
        assert await job.result(BOUND) == 7
    assert calls == [1]
    # Its own worker may claim it again before the first body has ended, and hands it back then.
    found = await outcomes(aconn, job.id)
    assert (found[0], set(found[1:-1]) <= {"released"}, found[-1]) == ("resolved", True, "succeeded")
    [told] = events.of("job.step_told_late")
    assert (told["step"], told["recorded"]) == ("pay", True)
    assert set(OF_JOB) <= set(told)


# Refused -------------------------------------------------------------------------------------------------------------


async def test_one_at_a_time_and_none_in_a_side_effecting_job(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    async def pay(ctx: JobContext) -> str:
        with pytest.raises(StepRefused, match="step pay is under way"):
            await ctx.step("inner", int, effect_class="side_effecting")
        return "paid"

    @app.task
    async def works(ctx: JobContext) -> str:
        said: str = await ctx.step("pay", pay, ctx, effect_class="side_effecting")
        return said

    @app.task(effect_class="side_effecting")
    async def itself(ctx: JobContext) -> str:
        with pytest.raises(StepRefused, match="the task is side_effecting"):
            await ctx.step("pay", int, effect_class="side_effecting")
        return "refused"

    async with run_worker():
        assert await (await works.enqueue()).result(BOUND) == "paid"
        assert await (await itself.enqueue()).result(BOUND) == "refused"


async def test_a_bodys_own_transaction_ends_no_job_whose_step_nobody_can_tell_of(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    await aconn.execute("create table public.made (job uuid)")

    async def pay() -> None:
        raise OutcomeUnknown("no answer")

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await tx.conn.execute("insert into public.made values ($1)", ctx.job_id)
            with pytest.raises(OutcomeUnknown):
                await ctx.step("pay", pay, effect_class="side_effecting")

    async with run_worker(**UNTOLD):
        job = await works.enqueue()
        assert (await unknown_of(aconn, job.id))[1:] == ("pay", 1)
    assert await aconn.fetchval("select count(*) from public.made") == 0


# Answers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("done", [True, False], ids=["started", "not-started"])
async def test_a_start_without_any_answer_calls_nothing_and_the_row_decides(
    run_worker: RunWorker,
    app: TaskQ,
    aconn: asyncpg.Connection,
    swallow: Callable[[str, int, bool], Sent],
    done: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskq.worker.disposition.UNPROVEN_DELAY", 0.0)
    calls: list[int] = []
    lost = swallow("start_step", 2, done)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        await ctx.step("pay", calls.append, ctx.claim_epoch, effect_class="side_effecting")

    async with run_worker():
        job = await works.enqueue()
        if done:
            assert (await unknown_of(aconn, job.id))[1:] == ("pay", 1)
        else:
            await until_status(aconn, job.id, "succeeded")
            assert await outcomes(aconn, job.id) == ["released", "succeeded"]
    assert calls == ([] if done else [2])
    assert len(lost) == 2


@pytest.mark.parametrize("done", [True, False], ids=["recorded", "not-recorded"])
async def test_what_it_gave_is_sent_until_there_is_an_answer(
    run_worker: RunWorker,
    app: TaskQ,
    aconn: asyncpg.Connection,
    swallow: Callable[[str, int, bool], Sent],
    done: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskq.worker.safe.PAUSE", 0.01)
    calls: list[int] = []
    lost = swallow("end_step", 3, done)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        await ctx.step("pay", calls.append, ctx.claim_epoch, effect_class="side_effecting")

    async with run_worker():
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
    assert (calls, len(lost)) == ([1], 3)
    assert await outcomes(aconn, job.id) == ["succeeded"]


@pytest.mark.parametrize("done", [True, False], ids=["recorded", "not-recorded"])
async def test_without_any_answer_about_what_it_gave_the_row_decides(
    run_worker: RunWorker,
    app: TaskQ,
    aconn: asyncpg.Connection,
    swallow: Callable[[str, int, bool], Sent],
    done: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskq.worker.safe.PAUSE", 0.1)
    monkeypatch.setattr("taskq.worker.disposition.UNPROVEN_DELAY", 0.0)
    calls: list[int] = []
    swallow("end_step", 10**6, done)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        await ctx.step("pay", calls.append, ctx.claim_epoch, effect_class="side_effecting")

    async with run_worker(**UNTOLD) as worker:
        worker.parts.safe._patience = 2.0
        job = await works.enqueue()
        if done:
            await until_status(aconn, job.id, "succeeded")
            assert await outcomes(aconn, job.id) == ["released", "succeeded"]
        else:
            assert (await unknown_of(aconn, job.id))[1:] == ("pay", 1)
    assert calls == [1]


async def test_another_value_on_record_is_a_conflict_and_stands(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskq.worker.disposition.UNPROVEN_DELAY", 0.0)

    async def pay(ctx: JobContext) -> int:
        started = "(select effect_started_at from taskq.steps where job_id = $2)"
        query = f"select taskq.end_step($1, $2, $3, 'pay', 1, {started}, '8', null)"
        await by_hand(app.find_dsn(), query, ctx.worker_id, ctx.job_id, ctx.claim_epoch)
        return 7

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> int:
        paid: int = await ctx.step("pay", pay, ctx, effect_class="side_effecting")
        return paid

    async with run_worker():
        assert await (await works.enqueue()).result(BOUND) == 8


@pytest.mark.parametrize(
    ("end", "reason", "said"),
    [
        (Returned("null"), "told", "went on"),
        (Suspends(()), "told", "went on"),
        (RaisedElsewhere({"type": "E", "message": "m"}, ()), "told", "went on"),
        (Raised(Stop("stopped")), "told", "stopped"),
        (Unproven(DatabaseUnavailable("no answer")), "told", "no answer"),
        (Interrupted("timeout"), "timed_out", "timeout of 3 s"),
        (Interrupted("lease"), "shutdown", "could not renew"),
        (Interrupted("cancel"), "shutdown", "it was stopped"),
    ],
)
def test_with_an_open_step_every_end_is_unknown(end: Any, reason: str, said: str) -> None:
    claim = claim_of("t", open_step=Key("step", "pay", 2))
    decided = decide(claim, ExecutionPolicy(timeout=3), end)
    assert decided.outcome == "unknown"
    assert decided.error is not None
    assert (decided.error["reason"], decided.error["step"], decided.error["occurrence"]) == (reason, "pay", 2)
    assert said in decided.error["message"]


@pytest.mark.parametrize("field", ["job_id", "claim_epoch", "claimed_by", "name", "occurrence", "effect_started_at"])
async def test_an_answer_about_something_else_lets_nothing_start(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    calls: list[int] = []
    rows = SafeBodies._rows

    async def altered(self: SafeBodies, asked: str, limit: float, *args: Any) -> list[Any]:
        found = await rows(self, asked, limit, *args)
        return [dict(row) | {field: None} for row in found] if asked == "start_step" else found

    monkeypatch.setattr(SafeBodies, "_rows", altered)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        with pytest.raises(EffectStartNotProven, match=field):
            await ctx.step("pay", calls.append, 1, effect_class="side_effecting")

    async with run_worker(**UNTOLD):
        job = await works.enqueue()
        assert (await unknown_of(aconn, job.id))[1:] == ("pay", 1)
    assert calls == []


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ("fenced", FencedOut),
        ("lease", FencedOut),
        ("another", StepRefused),
        ("class", StepRefused),
        ("untold", EffectStartNotProven),
    ],
)
async def test_what_the_database_refuses_has_an_error_of_its_own(
    run_worker: RunWorker, app: TaskQ, monkeypatch: pytest.MonkeyPatch, answer: str, error: type[Exception]
) -> None:
    calls: list[int] = []
    said: list[BaseException] = []
    rows = SafeBodies._rows

    async def refusing(self: SafeBodies, asked: str, limit: float, *args: Any) -> list[Any]:
        return [{"answer": answer}] if asked == "start_step" else await rows(self, asked, limit, *args)

    monkeypatch.setattr(SafeBodies, "_rows", refusing)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        try:
            await ctx.step("pay", calls.append, 1, effect_class="side_effecting")
        except Exception as exc:
            said.append(exc)

    async with run_worker(**UNTOLD):
        await works.enqueue()
        await aeventually(lambda: said, BOUND)
    assert (type(said[0]), calls) == (error, [])


async def test_a_lease_that_ended_while_the_start_was_on_its_way_takes_it_back(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    asked: list[int] = []

    def checks(self: SafeBodies, ctx: JobContext) -> None:
        asked.append(ctx.claim_epoch)
        if asked == [1, 1]:
            raise FencedOut("by its clock")

    monkeypatch.setattr(SafeBodies, "_check_clock", checks)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        await ctx.step("pay", calls.append, ctx.claim_epoch, effect_class="side_effecting")

    async with run_worker(**UNTOLD):
        job = await works.enqueue()
        await until_status(aconn, job.id, "succeeded")
    assert calls == [2]
    assert await recorded(aconn, job.id) == [("pay", 1, 2, True, "null", None)]

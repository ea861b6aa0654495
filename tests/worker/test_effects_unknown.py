"""Every way for a side-effecting job to become unknown, and its own late end that resolves it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Events, Gates, RunWorker, declare_lost, outcomes, status_of, until_status

from taskq import JobContext, TaskQ
from taskq.errors import DatabaseUnavailable
from taskq.worker import Worker, WorkerOptions
from taskq.worker.connection import Connection

pytestmark = pytest.mark.anyio


async def reason_of(aconn: asyncpg.Connection, job: UUID) -> str:
    await until_status(aconn, job, "unknown")
    value: str = await aconn.fetchval("select reason from taskq.unknowns where job_id = $1", job)
    return value


async def by_hand(dsn: str, query: str, *args: object) -> Any:
    """On a connection of its own: the test's may be in use just then."""
    conn = await asyncpg.connect(dsn)
    try:
        return await conn.fetchval(query, *args)
    finally:
        await conn.close()


async def test_a_started_body_survives_the_loss_of_its_lease_and_its_late_end_resolves_the_job(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    stopped: list[str] = []

    @app.task(effect_class="side_effecting")
    async def pay(ctx: JobContext) -> str:
        try:
            await gates.wait()
        except asyncio.CancelledError:
            stopped.append("pay")
            raise
        return f"paid, told: {ctx.cancel_requested}"

    @app.task
    async def other() -> None:
        try:
            await gates.wait("never")
        except asyncio.CancelledError:
            stopped.append("other")
            raise

    async with run_worker() as worker:
        first = worker.worker_id
        job, beside = await pay.enqueue(), await other.enqueue()
        await gates.until_reached()
        await gates.until_reached("never")
        await declare_lost(aconn)
        assert await reason_of(aconn, job.id) == "worker_lost"
        await aeventually(lambda: worker.worker_id != first, BOUND)
        assert stopped == ["other"], "an idempotent body is stopped, a started effect goes on"
        # The worker works on under its new name while the body of the old one still runs.
        gates.open("never")
        await until_status(aconn, beside.id, "succeeded")
        assert await status_of(aconn, job.id) == "unknown"
        gates.open()
        assert await job.result(timeout=BOUND) == "paid, told: True"
        row = await until_status(aconn, job.id, "succeeded")
        assert row["worker_id"] == first
    assert await outcomes(aconn, job.id) == ["succeeded"]
    assert stopped == ["other"]
    assert events.of("job.fenced_out") == [] or all(e["job_id"] != str(job.id) for e in events.of("job.fenced_out"))


async def test_a_late_end_after_a_decision_is_fenced_out(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    @app.task(effect_class="side_effecting")
    async def pay() -> None:
        await gates.wait()

    async with run_worker(lease=60) as worker:
        job = await pay.enqueue()
        await gates.until_reached()
        await aconn.execute("select taskq.enter_unknown(j, 'worker_lost', null) from taskq.jobs j")
        await aconn.execute("select taskq.resolve($1, false, null, 'it did not')", job.id)
        # Pending again: claimed here, it is not run beside its own earlier body.
        worker.parts.exchanger.notified()
        await aeventually(lambda: events.of("job.claim_not_proven"), BOUND)
        assert events.of("job.claim_not_proven")[0]["reason"] == "still_runs"
        gates.open()
        await aeventually(lambda: events.of("job.fenced_out"), BOUND)
        assert worker.counts.succeeded == 0
    assert gates.reached == ["gate"]
    assert await outcomes(aconn, job.id) == ["resolved", "released"]


async def test_a_thread_past_its_timeout_is_unknown_at_once_and_its_return_resolves_it(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    opened = threading.Event()

    @app.task(effect_class="side_effecting", timeout=0.2)
    def pay() -> str:
        assert opened.wait(BOUND)
        return "paid"

    @app.task
    async def long() -> None:
        await gates.wait()

    async with run_worker() as worker:
        # Beside another body the worker does not give up yet.
        beside = await long.enqueue()
        await gates.until_reached()
        job = await pay.enqueue()
        assert await reason_of(aconn, job.id) == "timed_out"
        opened.set()
        assert await job.result(timeout=BOUND) == "paid"
        gates.open()
        await until_status(aconn, beside.id, "succeeded")
        await aeventually(lambda: worker.counts.succeeded == 2, BOUND)
        assert worker.counts.unknown == 1
    assert await outcomes(aconn, job.id) == ["succeeded"]
    assert len(events.of("job.unknown")) == 1


async def test_a_thread_that_never_returns_stays_unknown_when_its_worker_gives_up(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    opened = threading.Event()

    @app.task(effect_class="side_effecting", timeout=0.2)
    def pay() -> None:
        opened.wait(BOUND)
        raise ValueError("too late to mean anything")

    worker = Worker(app.tasks, app.find_dsn(), options=WorkerOptions(lease=3, poll_interval=0.05))
    running = asyncio.create_task(worker.run())
    await worker.ready.wait()
    job = await pay.enqueue()
    try:
        assert await asyncio.wait_for(running, BOUND) == 76
    finally:
        opened.set()
    assert await reason_of(aconn, job.id) == "timed_out"
    assert len(events.of("job.unknown")) == 1
    assert await outcomes(aconn, job.id) == []


async def test_what_still_runs_when_a_worker_must_end_is_unknown(
    app: TaskQ, dsn: str, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    @app.task(effect_class="side_effecting")
    async def pay() -> None:
        await gates.wait()

    worker = Worker(app.tasks, dsn, options=WorkerOptions(lease=3, grace=0.3, poll_interval=0.05))
    running = asyncio.create_task(worker.run())
    await worker.ready.wait()
    job = await pay.enqueue()
    await gates.until_reached()
    worker.stop()
    await asyncio.wait_for(running, BOUND)
    assert worker.has_abandoned
    assert await reason_of(aconn, job.id) == "shutdown"
    assert len(events.of("job.unknown")) == 1


async def test_a_body_that_ends_within_the_grace_is_not_interrupted(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task(effect_class="side_effecting")
    async def pay(ctx: JobContext) -> bool:
        await gates.wait()
        return ctx.cancel_requested

    async with run_worker() as worker:
        job = await pay.enqueue()
        await gates.until_reached()
        worker.stop()
        await aeventually(lambda: worker.parts.exchanger.is_blocked("draining"), BOUND)
        gates.open()
        assert await job.result(timeout=BOUND) is False


async def test_a_body_that_waits_for_its_start_when_the_worker_drains_is_allowed_to_start(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the grace it is like any other: what drains still holds its lease, and its claims."""

    @app.task(effect_class="side_effecting")
    async def pay() -> str:
        return "paid"

    fetch = Connection.fetch

    async def late(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
        if ".start_effects(" in query:
            await gates.wait()
        return await fetch(conn, query, *args, **options)

    monkeypatch.setattr(Connection, "fetch", late)

    async def drains() -> bool:
        return bool(await aconn.fetchval("select count(*) from taskq.workers where status = 'draining'") == 1)

    async with run_worker() as worker:
        job = await pay.enqueue()
        await gates.until_reached()
        worker.stop()
        await aeventually(drains, BOUND)
        gates.open()
        assert await job.result(timeout=BOUND) == "paid"


@pytest.mark.parametrize("times", [2, 3])
async def test_a_start_whose_answer_cannot_be_read_is_asked_again_and_then_given_up(
    app: TaskQ,
    run_worker: RunWorker,
    aconn: asyncpg.Connection,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
) -> None:
    called: list[UUID] = []

    @app.task(effect_class="side_effecting")
    async def pay(ctx: JobContext) -> None:
        called.append(ctx.job_id)

    fetch = Connection.fetch
    left = [ValueError("unreadable")] * times

    async def failing(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
        rows = await fetch(conn, query, *args, **options)
        if ".start_effects(" in query and left:
            raise left.pop()
        return rows

    monkeypatch.setattr(Connection, "fetch", failing)
    async with run_worker():
        job = await pay.enqueue()
        if times == 2:
            await until_status(aconn, job.id, "succeeded")
            assert called == [job.id]
        else:
            assert await reason_of(aconn, job.id) == "not_confirmed"
            [event] = events.of("job.effect_start_not_proven")
            assert event["job_id"] == str(job.id)
            assert called == []


async def test_a_start_without_an_answer_goes_back_where_the_row_says_that_nothing_started(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []

    @app.task(effect_class="side_effecting")
    async def pay(ctx: JobContext) -> None:
        called.append(ctx.claim_epoch)

    fetch = Connection.fetch
    left = [ValueError("nothing was sent")] * 3

    async def failing(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
        if ".start_effects(" in query and left:
            raise left.pop()
        return await fetch(conn, query, *args, **options)

    monkeypatch.setattr(Connection, "fetch", failing)
    async with run_worker():
        job = await pay.enqueue()
        await aeventually(lambda: events.of("job.effect_start_not_proven"), BOUND)
        row = await until_status(aconn, job.id, "pending")
        assert row["releases"] == 1
        [error] = [json.loads(r["error"]) for r in await aconn.fetch("select error from taskq.ledger")]
        assert (error["type"], error["body_started"]) == ("EffectStartNotProven", False)
        await aconn.execute("update taskq.jobs set run_at = now()")
        await until_status(aconn, job.id, "succeeded")
    assert called == [2]


async def test_a_stop_while_a_start_is_on_its_way_calls_no_body(
    app: TaskQ, dsn: str, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[UUID] = []
    asked = asyncio.Event()

    @app.task(effect_class="side_effecting")
    async def pay(ctx: JobContext) -> None:
        called.append(ctx.job_id)

    fetch = Connection.fetch

    async def no_answer(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
        rows = await fetch(conn, query, *args, **options)
        if ".start_effects(" in query:
            asked.set()
            raise DatabaseUnavailable("the answer is lost")
        return rows

    monkeypatch.setattr(Connection, "fetch", no_answer)
    worker = Worker(app.tasks, dsn, options=WorkerOptions(lease=10, grace=0.2, poll_interval=0.05))
    running = asyncio.create_task(worker.run())
    await worker.ready.wait()
    job = await pay.enqueue()
    await asked.wait()
    assert await job.cancel() == "requested", "it does not interrupt: the start's answer says who was first"
    worker.stop()
    assert await asyncio.wait_for(running, BOUND) == 0
    assert called == []
    assert await reason_of(aconn, job.id) == "not_confirmed"


async def test_a_cancel_before_the_start_ends_the_job_without_a_body(
    app: TaskQ, dsn: str, run_worker: RunWorker, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[UUID] = []

    @app.task(effect_class="side_effecting")
    async def pay(ctx: JobContext) -> None:
        called.append(ctx.job_id)

    fetch = Connection.fetch

    async def cancelled_first(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
        if ".start_effects(" in query:
            assert await by_hand(dsn, "select taskq.cancel($1)", args[1][0]) == "requested"
        return await fetch(conn, query, *args, **options)

    monkeypatch.setattr(Connection, "fetch", cancelled_first)
    async with run_worker() as worker:
        job = await pay.enqueue()
        row = await until_status(aconn, job.id, "cancelled")
        assert row["effect_started_at"] is None
        details = await aconn.fetchval("select details from taskq.audit where subject = $1", str(job.id))
        assert json.loads(details) == {"answer": "requested", "effect_started": False}
        await aeventually(lambda: worker.counts.cancelled == 1, BOUND)
    assert called == []
    assert await outcomes(aconn, job.id) == ["cancelled"]


async def test_a_job_that_was_taken_away_before_its_start_is_let_go(
    app: TaskQ,
    dsn: str,
    run_worker: RunWorker,
    aconn: asyncpg.Connection,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[int] = []

    @app.task(effect_class="side_effecting")
    async def pay(ctx: JobContext) -> None:
        called.append(ctx.claim_epoch)

    fetch = Connection.fetch
    once = [True]

    async def lost_first(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
        if ".start_effects(" in query and once:
            once.clear()
            await by_hand(
                dsn,
                "select taskq.end_attempts(claimed_by, array[id], array[claim_epoch], '{release}', '{1}', '{null}',"
                " '{null}', '{3600}') from taskq.jobs",
            )
        return await fetch(conn, query, *args, **options)

    monkeypatch.setattr(Connection, "fetch", lost_first)
    async with run_worker() as worker:
        job = await pay.enqueue()
        await aeventually(lambda: events.of("job.fenced_out"), BOUND)
        assert worker.counts.fenced_out == 1
        assert (await until_status(aconn, job.id, "pending"))["releases"] == 1
    assert called == []
    assert await outcomes(aconn, job.id) == ["released"]


async def test_a_start_waits_for_a_lease_that_the_database_does_not_see(
    app: TaskQ, dsn: str, run_worker: RunWorker, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock has stepped, say: the renewal that follows at once sets it right."""

    @app.task(effect_class="side_effecting")
    async def pay() -> None:
        pass

    fetch = Connection.fetch
    answers: list[bool] = []

    async def expired_first(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
        if ".start_effects(" not in query:
            return await fetch(conn, query, *args, **options)
        if not answers:
            # Whatever renews it meanwhile.
            await by_hand(dsn, "update taskq.workers set lease = '1 us', lease_expires_at = now()")
        rows = await fetch(conn, query, *args, **options)
        answers.append(rows[0]["lease_holds"])
        await by_hand(dsn, "update taskq.workers set lease = '30 s'")
        return rows

    monkeypatch.setattr(Connection, "fetch", expired_first)
    async with run_worker(lease=30):
        job = await pay.enqueue()
        await until_status(aconn, job.id, "succeeded")
    assert answers[0] is False
    assert answers[-1] is True
    assert await outcomes(aconn, job.id) == ["succeeded"]


async def test_arguments_that_do_not_fit_start_no_effect(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(effect_class="side_effecting")
    async def pay(n: int) -> None:
        raise AssertionError(n)

    job = await pay.enqueue(1)
    await aconn.execute('update taskq.jobs set payload = \'{"n": "x"}\'')
    async with run_worker():
        await until_status(aconn, job.id, "pending")
        await aeventually(lambda: True)

        async def misfit() -> bool:
            return await outcomes(aconn, job.id) == ["retry_after"]

        await aeventually(misfit, BOUND)
    assert await aconn.fetchval("select effect_started_at from taskq.ledger") is None

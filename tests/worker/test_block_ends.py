"""How the end of a block is told where its COMMIT has no answer for long, or another end crosses it: in one way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from helpers import aeventually
from proxy import proxy
from test_safe_bodies import UNTOLD, claim_by_hand, take_away
from test_transaction import AGAIN, epochs, keep_out, lose_it, make
from worker_kit import BOUND, Events, Gates, RunWorker, outcomes, until_status

from taskq import CommitNotConfirmed, FencedOut, JobContext, TaskQ
from taskq.db.queries import load
from taskq.worker import Worker, WorkerOptions, safe_block
from taskq.worker.safe_block import BlockEnd, Blocks
from taskq.worker.shutdown import EXIT_NOT_FLUSHED

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_commit_that_was_lost_together_with_the_attempt_is_fenced_out(
    run_worker: RunWorker,
    app: TaskQ,
    made: asyncpg.Connection,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    gates: Gates,
    events: Events,
    stopped: bool,
) -> None:
    found: list[type[BaseException]] = []
    monkeypatch.setattr(safe_block, "FIRST_WAIT", 0.001)

    @app.task
    async def works(ctx: JobContext) -> None:
        if ctx.claim_epoch > 1:
            await gates.wait()
        try:
            async with ctx.transaction() as tx:
                await make(tx, ctx)
        except BaseException as exc:
            found.append(type(exc))
            raise

    def nobody_answers_any_more() -> None:
        way.stall("taskq transaction")
        # Not before: a busy machine needs longer than that for a connection.
        worker.parts.blocks._patience = 0.3

    with proxy(dsn) as way:
        lose_it(dsn, monkeypatch, nobody_answers_any_more)
        async with run_worker(to=way.dsn, **UNTOLD) as worker:
            job = await works.enqueue()
            await aeventually(lambda: events.of("job.commit_unconfirmed"), BOUND)
            if stopped:
                assert worker.parts.executor.interrupt(job.id, "cancel")
                await aeventually(lambda: worker.parts.outbox.pending == 1, BOUND)
            await take_away(made, job.id)
            # While nobody answers it goes on asking, and tells of it less and less often.
            await aeventually(lambda: len(events.of("job.commit_unconfirmed")) == 4, BOUND)
            way.restore()
            await aeventually(lambda: worker.counts.fenced_out == 1, BOUND)
            gates.open()
            await until_status(made, job.id, "succeeded")
            await aeventually(lambda: worker.counts.succeeded == 1)
            assert (worker.counts.fenced_out, worker.parts.outbox.pending) == (1, 0)
    assert [event["tries"] for event in events.of("job.commit_unconfirmed")] == [1, 2, 3, 10]
    assert found == [asyncio.CancelledError if stopped else FencedOut]
    assert await epochs(made, job.id) == [2]
    assert await outcomes(made, job.id) == ["lost", "succeeded"]


async def test_a_worker_that_stops_before_anybody_could_tell_leaves_it_to_the_record(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, dsn: str, events: Events
) -> None:
    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            worker.parts.blocks._patience = 2
            way.swallow(request="COMMIT")

    with proxy(dsn) as way:
        keep_out(way)
        async with run_worker(to=way.dsn, exit_code=EXIT_NOT_FLUSHED) as worker:
            worker.parts.shutdown._flush_within = 0.3
            job = await works.enqueue()
            await aeventually(lambda: events.of("job.commit_unconfirmed"), BOUND)
            assert worker.parts.executor.interrupt(job.id, "cancel")
            await aeventually(lambda: worker.parts.outbox.pending == 1, BOUND)
        assert (worker.counts.succeeded, worker.counts.failed, worker.counts.fenced_out) == (0, 0, 0)
    assert await outcomes(made, job.id) == ["succeeded"]
    assert await epochs(made, job.id) == [1]


async def test_a_body_that_is_left_behind_at_its_commit_tells_nothing_more(
    app: TaskQ, made: asyncpg.Connection, dsn: str, gates: Gates, events: Events
) -> None:
    ended = asyncio.Event()

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> int:
        try:
            async with ctx.transaction() as tx:
                await make(tx, ctx)
                tx.complete(1)
                held.append(way.hold(answer="COMMIT"))
        except asyncio.CancelledError:
            gates.reached.append("stopped")
        while not ended.is_set():
            with suppress(asyncio.CancelledError):
                await ended.wait()
        return 2

    held: list[Any] = []
    with proxy(dsn) as way:
        worker = Worker(app.tasks, way.dsn, options=WorkerOptions(lease=3, grace=0.2, poll_interval=0.05))
        running = asyncio.create_task(worker.run())
        await worker.ready.wait()
        job = await works.enqueue()
        await aeventually(lambda: held and held[0].is_set(), BOUND)
        worker.stop()
        assert await asyncio.wait_for(running, BOUND) == 0
        assert worker.has_abandoned
        assert gates.reached == ["stopped"]
        ended.set()
        await aeventually(lambda: worker.parts.executor.left_behind == 0)
    assert (worker.counts.succeeded, worker.counts.failed, worker.counts.fenced_out) == (0, 0, 0)
    assert (await until_status(made, job.id, "succeeded"))["result"] == "1"
    assert await outcomes(made, job.id) == ["succeeded"]
    # It was handed back meanwhile, which came too late.
    [said] = events.of("job.after_commit")
    assert said["body"].startswith("Released: ")


@pytest.mark.parametrize("ended", ["before", "meanwhile"])
async def test_in_a_thread_a_commit_without_an_answer_cannot_be_asked_for_once_the_worker_has_ended(
    app: TaskQ, made: asyncpg.Connection, dsn: str, events: Events, ended: str
) -> None:
    @app.task
    def works(ctx: JobContext) -> None: ...

    loop = asyncio.new_event_loop()
    served = threading.Thread(target=loop.run_forever)
    ctx = JobContext(**await claim_by_hand(made, await works.enqueue()))

    async def blocks_of(dsn: str) -> Blocks:
        return Blocks(queries=load("worker", "taskq"), dsn=dsn, tasks=app.tasks, concurrency=1, patience=0.3)

    def end() -> None:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])

    def stop() -> None:
        loop.call_soon_threadsafe(loop.stop)
        served.join()
        loop.close()

    def body() -> str:
        try:
            with blocks.block_sync(ctx) as tx:
                tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))
                way.swallow(request="COMMIT")
        except CommitNotConfirmed as exc:
            return str(exc)
        return "committed"

    with proxy(dsn) as way:
        keep_out(way)
        served.start()
        blocks = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(blocks_of(way.dsn), loop))
        if ended == "before":
            stop()
        thread = asyncio.create_task(asyncio.to_thread(body))
        try:
            if ended == "meanwhile":
                await aeventually(lambda: events.of("job.commit_unconfirmed"), BOUND)
                end()
            assert "the worker has ended" in await asyncio.wait_for(asyncio.shield(thread), BOUND)
        finally:
            # Whatever went wrong, the thread must end: the tests' loop waits for it.
            way.restore()
            await thread
            if ended == "meanwhile":
                stop()
    assert await outcomes(made, ctx.job_id) == ["succeeded"], "what stands on record stands"


async def test_a_thread_whose_timeout_comes_while_its_block_ends_has_succeeded_and_is_not_called_fenced_out(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, dsn: str, events: Events
) -> None:
    inside, goes_on = threading.Event(), threading.Event()

    @app.task(effect_class="side_effecting", timeout=0.5)
    def works(ctx: JobContext) -> None:
        way.stall("taskq exchange")
        with ctx.transaction_sync() as tx:
            tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))
            inside.set()
            assert goes_on.wait(BOUND)

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn) as worker:
            job = await works.enqueue()
            await aeventually(lambda: inside.is_set() and worker.parts.outbox.pending == 1)
            # That it has timed out is on its way, and comes behind the end of the block.
            goes_on.set()
            await until_status(made, job.id, "succeeded")
            way.restore()
            await aeventually(lambda: worker.counts.succeeded == 1 and worker.parts.outbox.pending == 0)
            assert (worker.counts.fenced_out, worker.counts.unknown) == (0, 0)
    assert events.of("job.fenced_out") == []
    [said] = events.of("job.after_commit")
    assert said["body"] == "AttemptTimeout: the body still ran at its timeout of 0.5 s"
    assert await outcomes(made, job.id) == ["succeeded"]


async def test_a_cancellation_is_not_lost_in_what_a_connection_says_as_it_is_given_up(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks(queries=load("worker", "taskq"), dsn=dsn, tasks={}, concurrency=1, patience=BOUND)
    asked = asyncio.Event()

    class Silent:
        async def fetch(self, *_: object) -> None:
            asked.set()
            await asyncio.sleep(BOUND)

        def terminate(self) -> None: ...

    @asynccontextmanager
    async def connection() -> AsyncIterator[Silent]:
        if asked.is_set():
            raise LookupError("it asks again")
        try:
            yield Silent()
        finally:
            raise asyncpg.InterfaceError("the connection was lost")

    monkeypatch.setattr(blocks._pool, "connection", connection)
    asking = asyncio.create_task(blocks.records(BlockEnd(uuid4(), uuid4(), 1, "works", 1, "null", "1")))
    await asyncio.wait_for(asked.wait(), BOUND)
    asking.cancel()
    await asyncio.wait([asking], timeout=BOUND / 2)
    assert asking.cancelled()

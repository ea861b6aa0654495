"""Workers that commit ends asynchronously: what they keep until it is on disk, and what they refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID, uuid4

import asyncpg
import pytest
from helpers import aeventually
from proxy import proxy
from worker_kit import Gates, RunWorker, outcomes, until_status

from taskq import JobContext, TaskQ
from taskq.errors import ConfigurationError, TransactionalStepUnsupported
from taskq.worker import Worker, WorkerOptions
from taskq.worker.claims import End
from taskq.worker.complete import BATCH, Outbox
from taskq.worker.unflushed import LONGEST, Unflushed

pytestmark = pytest.mark.anyio


@dataclass
class Opened:
    opened: int = 1


def sent(outbox: Outbox, n: int = 1) -> list[End]:
    for _ in range(n):
        outbox.put(End(UUID(int=1), uuid4(), 1, "succeeded", 1))
    return outbox.take()


@pytest.fixture
def conn() -> Opened:
    return Opened()


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def unflushed(outbox: Outbox, conn: Opened) -> Unflushed:
    return Unflushed(outbox, cast(Any, conn), allowed=True)


def test_an_end_is_kept_until_a_commit_that_waits_has_followed(outbox: Outbox, unflushed: Unflushed) -> None:
    [end] = sent(outbox)
    assert unflushed.oldest is None
    unflushed.answered([end], 0.0, flushed=False)
    assert outbox.holds(end.job_id, 1)
    assert unflushed.oldest is end
    unflushed.answered([], 0.1, flushed=False)
    assert (outbox.pending, len(unflushed)) == (1, 1)
    unflushed.answered([], 0.2, flushed=True)
    assert (outbox.pending, len(unflushed), len(outbox)) == (0, 0, 0)


@pytest.mark.parametrize("flushed", [True, False])
def test_after_a_new_connection_it_is_sent_again(
    outbox: Outbox, unflushed: Unflushed, conn: Opened, flushed: bool
) -> None:
    [first] = sent(outbox)
    unflushed.answered([first], 0.0, flushed=False)
    [second] = sent(outbox)
    conn.opened += 1
    unflushed.answered([second], 0.1, flushed=flushed)
    assert outbox.take() == [first]
    assert outbox.holds(first.job_id, 1)
    assert outbox.holds(second.job_id, 1) is not flushed


def test_neither_long_nor_many_wait(outbox: Outbox, unflushed: Unflushed) -> None:
    assert unflushed.may_wait(0.0)
    unflushed.answered(sent(outbox), 0.0, flushed=False)
    assert unflushed.may_wait(LONGEST - 0.01)
    assert not unflushed.may_wait(LONGEST)
    assert unflushed.is_due(LONGEST)
    unflushed.answered(sent(outbox, BATCH - 1), 0.1, flushed=False)
    assert not unflushed.may_wait(0.1)


async def test_ends_last_soon_and_before_the_worker_stops(run_worker: RunWorker, app: TaskQ, gates: Gates) -> None:
    @app.task
    async def waits(name: str) -> None:
        await gates.wait(name)

    async with run_worker(ends_commit="async", poll_interval=30, listen=False) as worker:
        unflushed, kept = worker.parts.exchanger._unflushed, []
        answered = unflushed.answered

        def seen(ends: list[End], now: float, *, flushed: bool) -> None:
            answered(ends, now, flushed=flushed)
            kept.append(len(unflushed))

        unflushed.answered = seen  # type: ignore[method-assign]
        job = await waits.enqueue("a")
        worker.parts.exchanger.notified()
        await gates.until_reached("a")
        gates.open("a")
        await job.result(timeout="30s")
        # With half a minute until the next look, within its own time.
        await aeventually(lambda: max(kept) == 1 and kept[-1] == 0 and worker.parts.outbox.pending == 0, 5)
        await waits.enqueue("b")
        worker.parts.exchanger.notified()
        await gates.until_reached("b")
        gates.open("b")
    assert worker.parts.outbox.pending == 0


async def test_a_connection_that_breaks_ends_nothing_twice(
    run_worker: RunWorker, app: TaskQ, dsn: str, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def work() -> int:
        return 1

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn, ends_commit="async", lease=10) as worker:
            unflushed, again = worker.parts.exchanger._unflushed, []
            answered = unflushed.answered

            def breaks(ends: list[End], now: float, *, flushed: bool) -> None:
                answered(ends, now, flushed=flushed)
                if unflushed and not again:
                    again.append(unflushed.oldest)
                    worker.parts.conn._drop()

            unflushed.answered = breaks  # type: ignore[method-assign]
            job = await work.enqueue()
            await until_status(aconn, job.id, "succeeded")
            await aeventually(lambda: again and worker.parts.outbox.pending == 0)
            assert worker.counts.fenced_out == 0
    assert await outcomes(aconn, job.id) == ["succeeded"]


async def test_a_block_of_its_own_is_refused_at_the_call(run_worker: RunWorker, app: TaskQ) -> None:
    refused: list[str] = []

    @app.task
    async def settles(ctx: JobContext) -> None:
        try:
            async with ctx.transaction() as tx:
                await tx.conn.execute("select 1")
        except TransactionalStepUnsupported as exc:
            refused.append(str(exc))

    @app.task
    def settles_in_a_thread(ctx: JobContext) -> None:
        try:
            with ctx.transaction_sync() as tx:
                tx.conn.execute("select 1")
        except TransactionalStepUnsupported as exc:
            refused.append(str(exc))

    async with run_worker(ends_commit="async"):
        await (await settles.enqueue()).result(timeout="30s")
        await (await settles_in_a_thread.enqueue()).result(timeout="30s")
    assert len(refused) == 2
    assert all("ends_commit='async'" in text and "queue default by a worker with" in text for text in refused)


def test_a_queue_with_a_side_effecting_task_is_refused_at_the_start() -> None:
    app = TaskQ("postgresql://nobody@nowhere.invalid/none")

    @app.task(queue="payments", effect_class="side_effecting")
    async def pay() -> None: ...

    @app.task(queue="bulk")
    async def count() -> None: ...

    dsn = app.find_dsn()
    with pytest.raises(
        ConfigurationError, match="the task pay of queue payments is side_effecting.*queue of their own"
    ):
        Worker(app.tasks, dsn, options=WorkerOptions(ends_commit="async"))
    Worker(app.tasks, dsn, options=WorkerOptions(ends_commit="async", queues=("bulk",)))
    with pytest.raises(ConfigurationError, match="ends_commit is 'never'; give 'sync' or 'async'"):
        WorkerOptions(ends_commit="never")  # type: ignore[arg-type]

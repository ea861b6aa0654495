"""Blocks of ``ctx.transaction()``: writes, follow-up jobs and the job's own success commit together, or none do."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from helpers import aeventually
from proxy import proxy
from test_safe_bodies import UNTOLD, claim_by_hand, take_away
from worker_kit import BOUND, Events, Gates, RunWorker, outcomes, until_status

from taskq import (
    CommitNotConfirmed,
    FencedOut,
    JobContext,
    Retry,
    TaskQ,
    Transaction,
    TransactionalStepUnsupported,
    constant,
)
from taskq.errors import DatabaseBusy, DatabaseUnavailable, TransactionEndedInside
from taskq.testing import faults
from taskq.worker.safe_block import BlockEnd, Blocks

pytestmark = pytest.mark.anyio
AGAIN = Retry(max_attempts=2, backoff=constant(0))
AGAIN_AFTER_ALL = Retry(max_attempts=2, backoff=constant(0), on=(ValueError,))


async def make(tx: Transaction, ctx: JobContext) -> None:
    """What a body writes."""
    await tx.conn.execute("insert into public.made values ($1, $2)", ctx.job_id, ctx.claim_epoch)


async def epochs(made: asyncpg.Connection, job: UUID) -> list[int]:
    """Which attempts of a job have written, and committed it."""
    return [r["epoch"] for r in await made.fetch("select epoch from public.made where job = $1 order by 1", job)]


def sessions(made: asyncpg.Connection) -> Any:
    return made.fetchval(
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'taskq transaction' and state <> 'idle'"
    )


async def test_writes_a_follow_up_and_the_success_commit_together(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, gates: Gates
) -> None:
    @app.task
    async def follows(n: int) -> int:
        return n + 1

    @app.task
    async def works(ctx: JobContext) -> str:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            next_ = await follows.using(connection=tx.conn).enqueue(1)
            tx.complete("first")
            tx.complete(str(next_.id))
            await gates.wait()
        return str(next_.id)

    with faults.trace() as trace:
        async with run_worker() as worker:
            job = await works.enqueue()
            await gates.until_reached()
            assert await made.fetchval("select count(*) from taskq.all_jobs") == 1, "nobody sees the other yet"
            assert await epochs(made, job.id) == []
            gates.open()
            follow = UUID(await job.result(timeout=BOUND))
            await until_status(made, follow, "succeeded")
            await aeventually(lambda: worker.counts.succeeded == 2)
    assert await epochs(made, job.id) == [1]
    assert await outcomes(made, job.id) == ["succeeded"]
    together = (
        "select m.xmin::text = h.xmin::text from public.made m join taskq.history h on h.id = m.job where job = $1"
    )
    assert await made.fetchval(together, job.id) is True
    assert not [p for p in trace.of(job.id) if p.startswith(("end_", "body_"))], "no end is sent again"


async def test_without_a_result_the_job_succeeds_with_none(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, events: Events
) -> None:
    @app.task
    async def works(ctx: JobContext) -> str | None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
        return "ignored"

    async with run_worker():
        job = await works.enqueue()
        await until_status(made, job.id, "succeeded")
        assert await job.result(timeout=BOUND) is None
        await aeventually(lambda: events.of("job.after_commit"))
    assert "another result" in events.of("job.after_commit")[0]["body"]


@pytest.mark.parametrize("effect_class", ["pure", "idempotent", "side_effecting"])
async def test_a_block_that_raises_leaves_nothing_and_the_next_attempt_does_it_all(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, effect_class: Any
) -> None:
    @app.task
    async def follows() -> None: ...

    @app.task(retry=AGAIN_AFTER_ALL, effect_class=effect_class)
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            await follows.using(connection=tx.conn).enqueue()
            if ctx.attempt == 1:
                raise ValueError("the card was refused")

    async with run_worker():
        job = await works.enqueue()
        await until_status(made, job.id, "succeeded")
        await aeventually(lambda: made.fetchval("select count(*) = 1 from taskq.history where task = 'follows'"))
    assert await epochs(made, job.id) == [2]
    assert await outcomes(made, job.id) == ["failed", "succeeded"]
    assert await made.fetchval("select count(*) from taskq.all_jobs") == 2


@pytest.mark.parametrize("field", ["effect_started_at", "outcome_id", "worker_id"])
async def test_a_started_effect_has_succeeded_once_the_record_proves_it(
    run_worker: RunWorker,
    app: TaskQ,
    made: asyncpg.Connection,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
) -> None:
    @app.task(effect_class="side_effecting")
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)

    records = Blocks.records

    async def forged(self: Blocks, end: BlockEnd) -> list[Any]:
        return [dict(row) | {field: None} for row in await records(self, end)]

    async with run_worker() as worker:
        await until_status(made, (await works.enqueue()).id, "succeeded")
        await aeventually(lambda: worker.counts.succeeded == 1)
        monkeypatch.setattr(Blocks, "records", forged)
        await until_status(made, (await works.enqueue()).id, "succeeded")
        await aeventually(lambda: worker.counts.not_proven == 1)
        assert worker.counts.succeeded == 1
    [told] = events.of("job.outcome_not_proven")
    assert told["reason"] == field


async def test_a_block_that_was_left_by_an_error_may_be_followed_by_another(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    @app.task
    async def works(ctx: JobContext) -> None:
        for last in (False, True):
            try:
                async with ctx.transaction() as tx:
                    await make(tx, ctx)
                    if not last:
                        # Refused at the COMMIT alone, since the constraint is deferred.
                        await make(tx, ctx)
            except asyncpg.UniqueViolationError:
                pass

    async with run_worker():
        job = await works.enqueue()
        await until_status(made, job.id, "succeeded")
    assert await epochs(made, job.id) == [1]


async def test_a_result_that_cannot_be_stored_rolls_back_and_is_not_tried_again(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> int:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            tx.complete("one")
        return 1

    async with run_worker():
        job = await works.enqueue()
        row = await until_status(made, job.id, "failed")
    assert "ResultNotStorable" in row["error"]
    assert await outcomes(made, job.id) == ["failed"]
    assert await epochs(made, job.id) == []


async def test_a_fence_that_is_lost_inside_of_the_block_takes_everything_back(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    found: list[type[BaseException]] = []

    @app.task
    async def works(ctx: JobContext) -> None:
        try:
            async with ctx.transaction() as tx:
                await make(tx, ctx)
                if ctx.claim_epoch == 1:
                    await gates.wait()
        except BaseException as exc:
            found.append(type(exc))
            raise

    async with run_worker(**UNTOLD) as worker:
        job = await works.enqueue()
        await gates.until_reached()
        await take_away(made, job.id)
        gates.open()
        await until_status(made, job.id, "succeeded")
        await aeventually(lambda: worker.counts.fenced_out == 1)
    assert found == [FencedOut]
    assert await epochs(made, job.id) == [2]
    assert await outcomes(made, job.id) == ["lost", "succeeded"]
    assert len(events.of("job.fenced_out")) == 1


@pytest.mark.parametrize("in_a_thread", [False, True])
async def test_a_block_does_not_begin_on_an_attempt_that_was_taken_away(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, gates: Gates, in_a_thread: bool
) -> None:
    began: list[int] = []
    opened = threading.Event()

    @app.task
    async def works(ctx: JobContext) -> None:
        if ctx.claim_epoch == 1:
            await gates.wait()
        async with ctx.transaction():
            began.append(ctx.claim_epoch)

    @app.task
    def works_in_a_thread(ctx: JobContext) -> None:
        if ctx.claim_epoch == 1:
            gates.reached.append("gate")
            assert opened.wait(BOUND)
        with ctx.transaction_sync():
            began.append(ctx.claim_epoch)

    async with run_worker(**UNTOLD):
        job = await (works_in_a_thread if in_a_thread else works).enqueue()
        await gates.until_reached()
        await take_away(made, job.id)
        gates.open()
        opened.set()
        await until_status(made, job.id, "succeeded")
    assert began == [2]


# A COMMIT without an answer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
async def test_a_commit_whose_answer_was_lost_has_happened_once(
    run_worker: RunWorker,
    app: TaskQ,
    made: asyncpg.Connection,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    again: bool,
) -> None:
    settle = Blocks._settle

    async def lost_too(self: Blocks, end: BlockEnd, exc: BaseException) -> None:
        if again:
            lost.append(way.swallow(request="ended_inside"))
        await settle(self, end, exc)

    monkeypatch.setattr(Blocks, "_settle", lost_too)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> int:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            tx.complete(7)
            lost.append(way.swallow(request="COMMIT"))
        return 7

    lost: list[Any] = []
    with proxy(dsn) as way:
        async with run_worker(to=way.dsn) as worker:
            job = await works.enqueue()
            assert await job.result(timeout=BOUND) == 7
            await aeventually(lambda: worker.counts.succeeded == 1)
        assert [one.is_set() for one in lost] == [True] * (1 + again)
    assert await epochs(made, job.id) == [1]
    assert await outcomes(made, job.id) == ["succeeded"]


async def test_a_commit_that_never_arrived_has_not_happened_and_the_body_is_told(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[type[BaseException]] = []
    lose_it(dsn, monkeypatch)

    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        try:
            async with ctx.transaction() as tx:
                await make(tx, ctx)
        except DatabaseUnavailable as exc:
            told.append(type(exc))
            raise

    async with run_worker():
        job = await works.enqueue()
        await until_status(made, job.id, "succeeded")
    assert len(told) == 1
    assert await epochs(made, job.id) == [2]
    assert await outcomes(made, job.id) == ["failed", "succeeded"]


@pytest.mark.parametrize("killed", ["before", "after"])
async def test_a_worker_that_is_killed_at_the_commit_leaves_all_of_it_or_nothing(
    made: asyncpg.Connection, dsn: str, killed: str
) -> None:
    worker = [sys.executable, "-m", "taskq", "worker", "killed_in_block:app", "--lease", "3"]
    environment = os.environ | {
        "TASKQ_DSN": dsn,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    async with TaskQ(dsn) as app:

        @app.task
        async def works() -> int:
            raise AssertionError

        job = await works.enqueue()
        first = await asyncio.create_subprocess_exec(*worker, env=environment | {"KILLED": killed})
        assert await asyncio.wait_for(first.wait(), 60) == -signal.SIGKILL
        assert await epochs(made, job.id) == ([] if killed == "before" else [1])
        second = await asyncio.create_subprocess_exec(*worker, env=environment)
        try:
            assert await job.result(timeout=60) == (2 if killed == "before" else 1)
        finally:
            second.terminate()
            await asyncio.wait_for(second.wait(), 60)
    assert await epochs(made, job.id) == ([2] if killed == "before" else [1])
    assert await outcomes(made, job.id) == (["lost", "succeeded"] if killed == "before" else ["succeeded"])


async def test_a_rollback_without_an_answer_closes_the_connection(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, dsn: str
) -> None:
    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            way.stall("taskq transaction")
            worker.parts.blocks._patience = 0.3
            raise ValueError("the card was refused")

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn) as worker:
            job = await works.enqueue()
            row = await until_status(made, job.id, "failed")
            assert "the card was refused" in row["error"]
            way.restore()
            await aeventually(lambda: sessions_are_idle(made))
    assert await epochs(made, job.id) == []


def lose_it(dsn: str, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object] = lambda: None) -> None:
    """End the server's process of a block right before its COMMIT, once, and do something else then."""
    commit = asyncpg.transaction.Transaction.commit
    left = [1]

    async def lost(self: Any) -> None:
        if left[0] > 0 and self._connection._params.server_settings.get("application_name") == "taskq transaction":
            left[0] -= 1
            pid = self._connection.get_server_pid()
            other = await asyncpg.connect(dsn)
            await other.execute("select pg_terminate_backend($1)", pid)
            gone = "select not exists (select from pg_stat_activity where pid = $1)"
            await aeventually(lambda: other.fetchval(gone, pid))
            await other.close()
            # The word of it is on its way still, and must not be caught by what is done next.
            await aeventually(self._connection.is_closed)
            then()
        await commit(self)

    monkeypatch.setattr(asyncpg.transaction.Transaction, "commit", lost)


@pytest.mark.parametrize("happened", [True, False])
@pytest.mark.parametrize("swallows", [False, True])
async def test_what_nobody_can_tell_yet_is_told_in_one_way_once_it_can(
    run_worker: RunWorker,
    app: TaskQ,
    made: asyncpg.Connection,
    dsn: str,
    monkeypatch: pytest.MonkeyPatch,
    events: Events,
    happened: bool,
    swallows: bool,
) -> None:
    @app.task(retry=AGAIN, timeout=1.0)
    async def works(ctx: JobContext) -> int:
        try:
            async with ctx.transaction() as tx:
                await make(tx, ctx)
                tx.complete(1)
                if ctx.attempt == 1:
                    if happened:
                        way.swallow(request="COMMIT")
                    way.stall("taskq transaction") if not happened else None
        except asyncio.CancelledError:
            if not swallows:
                raise
        return 1

    if not happened:
        lose_it(dsn, monkeypatch)
    with proxy(dsn) as way:
        if happened:
            keep_out(way)
        async with run_worker(to=way.dsn) as worker:
            job = await works.enqueue()
            await aeventually(lambda: events.of("job.commit_unconfirmed") or not worker.parts.executor.busy, BOUND)
            await aeventually(lambda: worker.parts.outbox.pending == 1, BOUND)
            assert not worker.parts.executor.busy, "the body has ended, and nobody knows how"
            assert (worker.counts.succeeded, worker.counts.retried) == (0, 0)
            way.restore()
            await until_status(made, job.id, "succeeded")
            await aeventually(lambda: worker.counts.succeeded == 1, BOUND)
            assert worker.parts.outbox.pending == 0
    assert await outcomes(made, job.id) == (["succeeded"] if happened else ["failed", "succeeded"])
    assert await epochs(made, job.id) == ([1] if happened else [2])


def keep_out(way: Any) -> None:
    """Once an answer is swallowed, let no connection of a block through any more."""
    # By the proxy itself: a connection that is let through half-way may take its time to be given up.
    way.swallow = functools.partial(way.swallow, then_stall="taskq transaction")


# Cancelling and timeouts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["cancel", "timeout"])
async def test_a_body_that_is_stopped_inside_of_its_block_leaves_nothing(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, gates: Gates, by: str
) -> None:
    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            await gates.wait()

    async with run_worker():
        job = await works.using(timeout=0.2 if by == "timeout" else None).enqueue()
        await gates.until_reached()
        if by == "cancel":
            assert await app.cancel(job.id) == "requested"
        row = await until_status(made, job.id, "cancelled" if by == "cancel" else "failed")
        await aeventually(lambda: sessions_are_idle(made))
    assert by == "cancel" or "AttemptTimeout" in row["error"]
    assert await epochs(made, job.id) == []


async def sessions_are_idle(made: asyncpg.Connection) -> bool:
    return bool(await sessions(made) == 0)


async def test_a_cancel_that_comes_after_the_commit_finds_a_success(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    @app.task
    async def works(ctx: JobContext) -> int:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            tx.complete(1)
        await gates.wait()
        return 2

    async with run_worker() as worker:
        job = await works.enqueue()
        await gates.until_reached()
        assert await app.cancel(job.id) == "finished"
        assert worker.parts.executor.interrupt(job.id, "cancel")
        await aeventually(lambda: events.of("job.after_commit"))
    assert await job.result(timeout=BOUND) == 1
    assert events.of("job.after_commit")[0]["body"] == "was stopped: cancel"


async def test_a_result_of_the_body_that_cannot_be_stored_is_none_after_the_commit(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, events: Events
) -> None:
    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> Any:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            tx.complete("stored")
        return object()

    async with run_worker() as worker:
        job = await works.enqueue()
        assert await job.result(timeout=BOUND) == "stored"
        await aeventually(lambda: worker.counts.succeeded == 1)
    assert events.of("job.after_commit") == []


async def test_what_a_body_raises_after_the_commit_changes_nothing_and_is_told(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, events: Events
) -> None:
    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
        raise ValueError("too late")

    async with run_worker() as worker:
        job = await works.enqueue()
        await until_status(made, job.id, "succeeded")
        await aeventually(lambda: events.of("job.after_commit"))
        assert worker.counts.failed == 0
    assert events.of("job.after_commit")[0]["body"] == "raised ValueError: too late"
    assert await epochs(made, job.id) == [1]


# What is refused -----------------------------------------------------------------------------------------------------


async def test_a_second_and_a_nested_block_are_refused_before_they_run(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    said: list[str] = []

    @app.task
    async def twice(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
        try:
            async with ctx.transaction():
                said.append("ran")
        except TransactionalStepUnsupported as exc:
            said.append(str(exc))

    @app.task(retry=AGAIN)
    async def nested(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            async with ctx.transaction():
                said.append("ran")

    async with run_worker():
        first, second = await twice.enqueue(), await nested.enqueue()
        await until_status(made, first.id, "succeeded")
        row = await until_status(made, second.id, "failed")
    assert "an earlier block" in said[0]
    assert len(said) == 1
    assert "TransactionalStepUnsupported" in row["error"]
    assert await outcomes(made, second.id) == ["failed"], "the next attempt could not do better"
    assert (await epochs(made, first.id), await epochs(made, second.id)) == ([1], [])


@pytest.mark.parametrize("by_hand", ["commit", "rollback", "commit; begin"])
@pytest.mark.parametrize("form", ["async", "sync"])
async def test_a_block_that_ends_its_own_transaction_completes_nothing(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, by_hand: str, form: str
) -> None:
    @app.task(retry=AGAIN)
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            await tx.conn.execute(by_hand)
            await tx.conn.execute("insert into public.made values ($1, 99)", ctx.job_id)

    @app.task(retry=AGAIN)
    def works_in_a_thread(ctx: JobContext) -> None:
        with ctx.transaction_sync() as tx:
            tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))
            tx.conn.execute(by_hand.encode())
            tx.conn.execute("insert into public.made values (%s, 99)", (ctx.job_id,))

    async with run_worker():
        job = await (works if form == "async" else works_in_a_thread).enqueue()
        row = await until_status(made, job.id, "failed")
    assert TransactionEndedInside.__name__ in row["error"]
    assert await outcomes(made, job.id) == ["failed"], "it is not tried again: that would do twice what it committed"
    kept = {"commit": [1, 99], "rollback": [99], "commit; begin": [1]}[by_hand]
    assert await epochs(made, job.id) == kept


async def test_an_error_of_the_database_that_the_block_has_swallowed_comes_back_at_its_end(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)
            with pytest.raises(asyncpg.UndefinedTableError):
                await tx.conn.execute("select * from nowhere")

    async with run_worker():
        job = await works.enqueue()
        row = await until_status(made, job.id, "failed")
    assert "InFailedSQLTransactionError" in row["error"]
    assert await epochs(made, job.id) == []


async def test_a_block_belongs_to_the_loop_of_the_worker(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    @app.task(retry=AGAIN)
    def works(ctx: JobContext) -> None:
        async def elsewhere() -> None:
            async with ctx.transaction():
                raise AssertionError

        asyncio.run(elsewhere())

    async with run_worker():
        job = await works.enqueue()
        row = await until_status(made, job.id, "failed")
    assert "another" in row["error"]
    assert await outcomes(made, job.id) == ["failed"]


async def test_a_block_that_gets_no_connection_in_time_does_not_run(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    said: list[BaseException] = []

    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> None:
        try:
            async with ctx.transaction():
                raise AssertionError
        except DatabaseBusy as exc:
            said.append(exc)
        async with ctx.transaction() as tx:
            await make(tx, ctx)

    async with run_worker(concurrency=1) as worker:
        blocks = worker.parts.blocks
        blocks._patience = 0.3
        async with blocks._pool.connection():
            job = await works.enqueue()
            await aeventually(lambda: said)
            blocks._patience = 10
        await until_status(made, job.id, "succeeded")
    assert "no connection within 0.3 s" in str(said[0])


# The connection ------------------------------------------------------------------------------------------------------


async def test_the_session_is_as_the_worker_s_dsn_says_and_read_committed_whatever_the_database_defaults_to(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, dsn: str
) -> None:
    await made.execute("create schema mine")
    name = await made.fetchval("select current_database()")
    await made.execute(f"alter database {name} set default_transaction_isolation = 'serializable'")
    asked = "select current_setting('search_path') || ' ' || current_setting('transaction_isolation')"

    @app.task
    async def works(ctx: JobContext) -> str | None:
        async with ctx.transaction() as tx:
            tx.complete(await tx.conn.fetchval(asked))
            await tx.conn.execute("set search_path = other")
        return None

    @app.task
    def works_in_a_thread(ctx: JobContext) -> str | None:
        with ctx.transaction_sync() as tx:
            row = tx.conn.execute(asked.encode()).fetchone()
            tx.complete(row and row[0])
        return None

    async with run_worker(to=f"{dsn}&options=-csearch_path%3Dmine", concurrency=1):
        for task in (works, works, works_in_a_thread):
            assert await (await task.enqueue()).result(timeout=BOUND) == "mine read committed"


async def test_a_connection_that_is_kept_beyond_its_block_does_nothing(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    kept: list[Any] = []

    @app.task
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            kept.append(tx.conn)

    @app.task
    def works_in_a_thread(ctx: JobContext) -> None:
        with ctx.transaction_sync() as tx:
            kept.append(tx.conn)

    async with run_worker():
        for task in (works, works_in_a_thread):
            await (await task.enqueue()).result(timeout=BOUND)
    with pytest.raises(asyncpg.InterfaceError, match="released back"):
        await kept[0].execute("select 1")
    assert kept[1].closed


async def test_a_job_that_runs_alone_and_ends_in_its_block_frees_its_worker(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    @app.task
    async def works(ctx: JobContext) -> None:
        async with ctx.transaction() as tx:
            await make(tx, ctx)

    suspect = await works.enqueue()
    for _ in range(2):
        await claim_by_hand(made, suspect)
        await take_away(made, suspect.id)
    async with run_worker():
        await until_status(made, suspect.id, "succeeded")
        other = await works.enqueue()
        await until_status(made, other.id, "succeeded")


# Plain functions in threads ------------------------------------------------------------------------------------------


async def test_in_a_thread_all_commits_together_too(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    @app.task
    def follows() -> None: ...

    @app.task(retry=AGAIN)
    def works(ctx: JobContext) -> str:
        with ctx.transaction_sync() as tx:
            tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))
            job = follows.using(connection=tx.conn).enqueue_sync()
            with tx.conn.transaction():
                tx.conn.execute("select 1")
            tx.complete(str(job.id))
            if ctx.attempt == 1:
                raise ValueError
        return ""

    async with run_worker() as worker:
        job = await works.enqueue()
        follow = UUID(await job.result(timeout=BOUND))
        await until_status(made, follow, "succeeded")
        await aeventually(lambda: worker.counts.succeeded == 2)
    assert await epochs(made, job.id) == [2]
    assert await outcomes(made, job.id) == ["failed", "succeeded"]
    assert await made.fetchval("select count(*) from taskq.all_jobs") == 2


@pytest.mark.parametrize("happened", [True, False])
async def test_in_a_thread_a_commit_without_an_answer_is_settled_by_the_record(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, dsn: str, happened: bool
) -> None:
    told: list[type[BaseException]] = []

    @app.task(retry=AGAIN)
    def works(ctx: JobContext) -> int:
        try:
            with ctx.transaction_sync() as tx:
                tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))
                tx.complete(1)
                if ctx.attempt == 1 and happened:
                    way.swallow(request="COMMIT")
                elif ctx.attempt == 1:
                    way.swallow(answer="ended")
        except DatabaseUnavailable as exc:
            told.append(type(exc))
            raise
        return 1

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn):
            job = await works.enqueue()
            assert await job.result(timeout=BOUND) == 1
    assert await epochs(made, job.id) == ([1] if happened else [2])
    assert len(told) == (0 if happened else 1)


async def test_in_a_thread_a_body_that_is_to_stop_does_not_wait_for_word(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, dsn: str, events: Events
) -> None:
    told: list[type[BaseException]] = []

    @app.task(retry=AGAIN)
    def works(ctx: JobContext) -> int:
        try:
            with ctx.transaction_sync() as tx:
                tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))
                tx.complete(1)
                worker.parts.blocks._patience = 2
                way.swallow(request="COMMIT")
        except CommitNotConfirmed as exc:
            told.append(type(exc))
            raise
        return 1

    with proxy(dsn) as way:
        keep_out(way)
        async with run_worker(to=way.dsn) as worker:
            job = await works.enqueue()
            await aeventually(lambda: events.of("job.commit_unconfirmed"), BOUND)
            assert worker.parts.executor.interrupt(job.id, "cancel")
            await aeventually(lambda: told, BOUND)
            await aeventually(lambda: worker.parts.outbox.pending == 1, BOUND)
            way.restore()
            await aeventually(lambda: worker.counts.succeeded == 1, BOUND)
    assert await outcomes(made, job.id) == ["succeeded"]
    assert told == [CommitNotConfirmed]


async def test_in_a_thread_a_commit_that_never_arrived_is_told_to_the_body(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[type[BaseException]] = []
    leave = psycopg.Transaction.__exit__

    def lost(self: Any, *args: Any) -> Any:
        if self.connection.info.get_parameters().get("application_name") == "taskq transaction" and not told:
            with psycopg.connect(dsn, autocommit=True) as other:
                other.execute("select pg_terminate_backend(%s, 5000)", (self.connection.info.backend_pid,))
        return leave(self, *args)

    @app.task(retry=AGAIN)
    def works(ctx: JobContext) -> None:
        try:
            with ctx.transaction_sync() as tx:
                tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))
        except DatabaseUnavailable as exc:
            told.append(type(exc))
            raise

    monkeypatch.setattr(psycopg.Transaction, "__exit__", lost)
    async with run_worker():
        job = await works.enqueue()
        await until_status(made, job.id, "succeeded")
    assert told == [DatabaseUnavailable]
    assert await epochs(made, job.id) == [2]
    assert await outcomes(made, job.id) == ["failed", "succeeded"]


async def test_in_a_thread_a_block_that_loses_its_connection_before_it_begins_may_be_done_again(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection, dsn: str
) -> None:
    told: list[type[BaseException]] = []

    @app.task(max_attempts=1)
    def works(ctx: JobContext) -> None:
        lost = way.swallow(request="pg_current_xact_id")
        try:
            with ctx.transaction_sync():
                raise AssertionError
        except DatabaseUnavailable as exc:
            told.append(type(exc))
        assert lost.is_set()
        with ctx.transaction_sync() as tx:
            tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn):
            await until_status(made, (await works.enqueue()).id, "succeeded")
    assert told == [DatabaseUnavailable]


async def test_in_a_thread_an_error_that_the_block_has_swallowed_comes_back_at_its_end_too(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    @app.task(max_attempts=1)
    def works(ctx: JobContext) -> None:
        with ctx.transaction_sync() as tx:
            tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))
            with pytest.raises(psycopg.errors.UndefinedTable):
                tx.conn.execute("select * from nowhere")

    async with run_worker():
        job = await works.enqueue()
        row = await until_status(made, job.id, "failed")
    assert "InFailedSqlTransaction" in row["error"]
    assert await epochs(made, job.id) == []


async def test_a_started_effect_in_a_thread_that_times_out_after_its_commit_has_succeeded_once(
    run_worker: RunWorker, app: TaskQ, made: asyncpg.Connection
) -> None:
    goes_on = threading.Event()

    @app.task(effect_class="side_effecting", timeout=0.3)
    def works(ctx: JobContext) -> None:
        with ctx.transaction_sync() as tx:
            tx.conn.execute("insert into public.made values (%s, %s)", (ctx.job_id, ctx.claim_epoch))
        goes_on.wait(BOUND)

    async with run_worker() as worker:
        job = await works.enqueue()
        await until_status(made, job.id, "succeeded")
        await aeventually(worker.parts.executor.stuck)
        assert worker.parts.outbox.pending == 0, "nothing is sent for what has ended"
        goes_on.set()
        await aeventually(lambda: worker.counts.succeeded == 1)
        assert (worker.counts.unknown, worker.counts.fenced_out) == (0, 0)
    assert await outcomes(made, job.id) == ["succeeded"]

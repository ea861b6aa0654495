"""What a body asks its context for before and while it does dangerous work: ownership, checkpoints, its key."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from proxy import proxy
from worker_kit import Gates, RunWorker, outcomes, until_status

from taskq import JobContext, Retry, RetryAfter, TaskQ, constant
from taskq.db.queries import load
from taskq.errors import (
    CheckpointConflict,
    CheckpointNotLoaded,
    DatabaseUnavailable,
    FencedOut,
    OwnershipNotProven,
    PayloadError,
    SyncCallInEventLoop,
    TransactionalStepUnsupported,
)
from taskq.idempotency import idempotency_key
from taskq.worker import safe
from taskq.worker.process_context import ProcessContext
from taskq.worker.safe import SafeBodies
from taskq.worker.safe_block import Blocks

pytestmark = pytest.mark.anyio
UNTOLD: dict[str, Any] = {"concurrency": 1, "lease": 60}
"""A worker whose lease was taken does not learn it while its only body runs: it claims nothing and renews seldom."""


class Clock:
    """A lease that holds as many looks as it is told."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.remaining = 9.0

    def holds_for(self, worker_id: UUID | None) -> bool:
        self.looks -= 1
        return self.looks >= 0


def services(dsn: str, looks: int = 9, patience: float = 5) -> SafeBodies:
    queries = load("worker", "taskq")
    blocks = Blocks(queries=queries, dsn=dsn, tasks={}, concurrency=2, patience=patience)
    return SafeBodies(queries=queries, dsn=dsn, lease=Clock(looks), blocks=blocks, concurrency=2, patience=patience)


async def take_away(aconn: asyncpg.Connection, job: UUID) -> None:
    """Declare the worker of a job lost, and settle its claims, before any leader does."""
    ends = "update taskq.workers set lease_expires_at = '-infinity' where id = $1"
    async with aconn.transaction():
        await aconn.execute(ends, await aconn.fetchval("select claimed_by from taskq.jobs where id = $1", job))
        await aconn.execute("select taskq.mark_lost()")
        assert [r["job_id"] for r in await aconn.fetch("select * from taskq.settle_lost()")] == [job]


# The key -------------------------------------------------------------------------------------------------------------


async def test_the_key_is_the_same_for_each_attempt_and_another_for_a_later_generation_of_effects(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    keys: list[str] = []

    @app.task
    async def asks(ctx: JobContext) -> None:
        keys.append(ctx.idempotency_key)
        if len(keys) < 3:
            raise RetryAfter(0)

    async with run_worker():
        first = await asks.enqueue()
        await until_status(aconn, first.id, "succeeded")
        later = await asks.using(run_in="1h").enqueue()
        await aconn.execute("update taskq.jobs set key_generation = 2, run_at = taskq.now() where id = $1", later.id)
        await until_status(aconn, later.id, "succeeded")
    assert keys == [str(first.id)] * 3 + [f"{later.id}:g2"]


def test_the_key_of_a_job_is_its_id_and_its_generation() -> None:
    job = uuid4()
    assert idempotency_key(job) == str(job)
    assert idempotency_key(job, 0) == f"{job}:g0"


# Ownership -----------------------------------------------------------------------------------------------------------


async def test_ownership_holds_while_it_runs_and_no_longer_than_the_claim(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    found: list[str] = []

    @app.task
    async def works(ctx: JobContext) -> None:
        await ctx.assert_owned()
        if ctx.claim_epoch == 1:
            await gates.wait()
            try:
                await ctx.assert_owned()
            except FencedOut as exc:
                found.append(str(exc))
                raise

    async with run_worker(**UNTOLD):
        job = await works.enqueue()
        await gates.until_reached()
        await take_away(aconn, job.id)
        gates.open()
        await until_status(aconn, job.id, "succeeded")
        assert await outcomes(aconn, job.id) == ["lost", "succeeded"]
    assert "is not this worker's any more" in found[0]


@pytest.mark.parametrize(
    "change",
    [
        "update taskq.workers set lease_expires_at = '-infinity'",
        "update taskq.workers set status = 'lost'",
        "update taskq.jobs set status = 'unknown'",
        "delete from taskq.jobs",
    ],
)
async def test_ownership_is_the_claim_with_a_live_lease(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates, dsn: str, change: str
) -> None:
    @app.task
    async def works(ctx: JobContext) -> None:
        gates.reached.append("here")

    bodies = services(dsn)
    row = await claim_by_hand(aconn, await works.enqueue())
    ctx = JobContext(services=bodies, **row)
    await bodies.assert_owned(ctx)
    for wrong in ({"worker_id": uuid4()}, {"claim_epoch": 2}, {"job_id": uuid4()}):
        with pytest.raises(FencedOut):
            await bodies.assert_owned(JobContext(services=bodies, **(row | wrong)))
    await aconn.execute(change)
    with pytest.raises(FencedOut):
        await bodies.assert_owned(ctx)
    await bodies.close()


async def claim_by_hand(aconn: asyncpg.Connection, job: Any) -> dict[str, Any]:
    """Claim the job for a worker that is there in name only; what its context is made of."""
    worker = await aconn.fetchval("select taskq.register_worker('w', 'h', 1, '{default}', '{works}', 1, 1, '0', 60)")
    [row] = await aconn.fetch(
        "select * from taskq.claim($1, 1, '{works}', '{default}', '{5}', '{-infinity}',"
        " '{00000000-0000-0000-0000-000000000000}')",
        worker,
    )
    assert row["job_id"] == job.id
    return {"job_id": job.id, "task": "works", "claim_epoch": 1, "worker_id": worker}


async def test_ownership_ends_with_the_workers_own_clock_also_while_the_database_is_asked(
    app: TaskQ, aconn: asyncpg.Connection, dsn: str
) -> None:
    @app.task
    async def works(ctx: JobContext) -> None: ...

    row = await claim_by_hand(aconn, await works.enqueue())
    for looks in (0, 1):
        bodies = services(dsn, looks)
        with pytest.raises(FencedOut, match="run out by its own clock"):
            await bodies.assert_owned(JobContext(services=bodies, **row))
        assert bool(bodies._pool._pools) == (looks == 1), "without the lease nothing is asked"
        await bodies.close()


async def test_ownership_that_cannot_be_asked_for_is_not_proven(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe, "PROOF_WITHIN", 0.5)
    found: list[type[BaseException]] = []

    def note(exc: BaseException) -> None:
        found.append(type(exc))

    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> None:
        await ctx.assert_owned()
        way.stall("taskq bodies")
        try:
            await ctx.assert_owned()
        except Exception as exc:
            note(exc)
        way.restore()
        await ctx.assert_owned()

    @app.task(max_attempts=1)
    def works_in_a_thread(ctx: JobContext) -> None:
        way.stall("taskq bodies")
        try:
            ctx.assert_owned_sync()
        except Exception as exc:
            note(exc)
        way.restore()
        ctx.assert_owned_sync()

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn):
            for task in (works, works_in_a_thread):
                await until_status(aconn, (await task.enqueue()).id, "succeeded")
    assert found == [OwnershipNotProven] * 2


async def test_a_statement_that_is_refused_proves_nothing(app: TaskQ, aconn: asyncpg.Connection, dsn: str) -> None:
    @app.task
    async def works(ctx: JobContext) -> None: ...

    bodies = services(dsn)
    ctx = JobContext(services=bodies, **await claim_by_hand(aconn, await works.enqueue()))
    await aconn.execute("alter table taskq.workers rename to gone")
    with pytest.raises(OwnershipNotProven, match="gone|workers"):
        await ctx.assert_owned()
    with pytest.raises(asyncpg.UndefinedTableError):
        await bodies._ask("owned", 5, ctx)
    await aconn.execute("alter table taskq.gone rename to workers")
    await bodies.close()


async def test_a_database_that_cannot_be_reached_proves_nothing_and_saves_nothing(anyio_backend: str) -> None:
    bodies = services("postgresql://taskq@127.0.0.1:1/nothing")
    ctx = JobContext(job_id=uuid4(), task="t", worker_id=uuid4(), services=bodies)
    with pytest.raises(OwnershipNotProven, match="could not be asked"):
        await ctx.assert_owned()
    with pytest.raises(DatabaseUnavailable) as caught:
        await ctx.checkpoint(1, version=0)
    assert "no answer" not in str(caught.value), "nothing was sent"
    await bodies.close()


async def test_a_thread_does_not_wait_for_ever_for_a_loop_that_is_blocked_or_gone(dsn: str) -> None:
    bodies = services(dsn, patience=-0.25)
    ctx = JobContext(job_id=uuid4(), task="t", worker_id=uuid4(), services=bodies)
    found: list[BaseException] = []

    def ask() -> None:
        for call in (ctx.assert_owned_sync, ctx.load_checkpoint_sync):
            try:
                call()
            except Exception as exc:
                found.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()  # the loop stands still meanwhile
    assert [type(exc) for exc in found] == [OwnershipNotProven, DatabaseUnavailable]
    assert "blocked" in str(found[0])
    await asyncio.sleep(0)
    await bodies.close()


# Checkpoints ---------------------------------------------------------------------------------------------------------


@dataclass
class Cursor:
    page: int
    done: list[str]


async def test_the_next_attempt_goes_on_from_the_checkpoint(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    seen: list[Any] = []

    @app.task(retry=Retry(max_attempts=5, backoff=constant(0)))
    async def pages(ctx: JobContext) -> int:
        with pytest.raises(CheckpointNotLoaded):
            print(ctx.checkpoint_value)
        cursor = await ctx.load_checkpoint(Cursor) or Cursor(0, [])
        seen.append((cursor.page, ctx.checkpoint_version))
        cursor.page += 1
        assert await ctx.checkpoint(cursor) == cursor.page
        assert (ctx.checkpoint_value, ctx.checkpoint_version) == ({"page": cursor.page, "done": []}, cursor.page)
        if cursor.page < 3:
            raise ValueError("again")
        return cursor.page

    async with run_worker():
        job = await pages.enqueue()
        assert await job.result(timeout=15) == 3
    assert seen == [(0, 0), (1, 1), (2, 2)]
    row = await aconn.fetchrow("select checkpoint, checkpoint_version from taskq.history where id = $1", job.id)
    assert tuple(row) == ('{"done": [], "page": 3}', 3)


async def test_threads_have_the_same_by_other_names_and_loops_are_not_blocked_by_them(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    refused: list[str] = []

    @app.task
    def works(ctx: JobContext) -> Any:
        ctx.assert_owned_sync()
        assert ctx.load_checkpoint_sync() is None
        assert ctx.checkpoint_sync([1]) == 1
        assert ctx.checkpoint_sync([2], version=1) == 2
        return ctx.load_checkpoint_sync(list[int])

    @app.task
    async def awaits(ctx: JobContext) -> None:
        for call in (ctx.assert_owned_sync, ctx.load_checkpoint_sync, lambda: ctx.checkpoint_sync(1)):
            try:
                call()
            except SyncCallInEventLoop as exc:
                refused.append(str(exc))

    async with run_worker():
        assert await (await works.enqueue()).result(timeout=10) == [2]
        await (await awaits.enqueue()).result(timeout=10)
    assert len(refused) == 3
    assert "await assert_owned(" in refused[0]


async def test_a_checkpoint_whose_answer_was_lost_has_moved_once(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, dsn: str
) -> None:
    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> int:
        lost = way.swallow(answer="moved")
        version = await ctx.checkpoint("a")
        assert lost.is_set()
        return version

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn):
            job = await works.enqueue()
            assert await job.result(timeout=10) == 1
    assert await aconn.fetchval("select checkpoint_version from taskq.history where id = $1", job.id) == 1


async def test_a_wrong_version_is_refused_with_what_stands_and_the_body_can_go_on_from_it(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task(max_attempts=1)
    async def works(ctx: JobContext) -> Any:
        await ctx.checkpoint({"n": 1})
        try:
            await ctx.checkpoint({"n": 9}, version=0)
        except CheckpointConflict as exc:
            stands = exc
        await ctx.checkpoint({"n": stands.value["n"] + 1}, version=stands.version)
        return await ctx.load_checkpoint(), ctx.checkpoint_version

    async with run_worker():
        assert await (await works.enqueue()).result(timeout=10) == [{"n": 2}, 2]


async def test_an_attempt_that_was_taken_away_saves_and_loads_nothing(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, gates: Gates
) -> None:
    refused: list[str] = []

    @app.task
    async def works(ctx: JobContext) -> Any:
        if ctx.claim_epoch == 1:
            await ctx.checkpoint("mine")
            await gates.wait()
            for call in (lambda: ctx.checkpoint("late"), ctx.load_checkpoint):
                try:
                    await call()
                except FencedOut:
                    refused.append("fenced")
        return await ctx.load_checkpoint()

    async with run_worker(**UNTOLD):
        job = await works.enqueue()
        await gates.until_reached()
        await take_away(aconn, job.id)
        gates.open()
        assert await job.result(timeout=15) == "mine"
    assert refused == ["fenced", "fenced"]


async def test_what_cannot_be_saved_is_refused_with_its_path_before_anything_is_sent(dsn: str) -> None:
    bodies = services(dsn)
    ctx = JobContext(job_id=uuid4(), task="t", worker_id=uuid4(), services=bodies)
    for value, path in (({"x": [1, float("nan")]}, "checkpoint.x[1]"), (object(), "checkpoint"), ("\0", "checkpoint")):
        with pytest.raises(PayloadError) as caught:
            await ctx.checkpoint(value)
        assert caught.value.path == path
    with pytest.raises(PayloadError, match="the limit is"):
        await ctx.checkpoint("x" * (8 * 1024 * 1024))
    assert not bodies._pool._pools
    await bodies.close()


async def test_a_checkpoint_of_another_type_is_refused(app: TaskQ, aconn: asyncpg.Connection, dsn: str) -> None:
    @app.task
    async def works(ctx: JobContext) -> None: ...

    bodies = services(dsn)
    ctx = JobContext(services=bodies, **await claim_by_hand(aconn, await works.enqueue()))
    assert await ctx.load_checkpoint(Cursor) is None
    await ctx.checkpoint({"page": "one"})
    with pytest.raises(PayloadError, match="does not fit Cursor"):
        await ctx.load_checkpoint(Cursor)
    await bodies.close()


# Where no worker stands behind it ------------------------------------------------------------------------------------


async def test_a_plain_call_owns_itself_and_keeps_its_checkpoint_in_memory() -> None:
    ctx = JobContext.local("t")
    await ctx.assert_owned()
    assert await ctx.load_checkpoint() is None
    assert await ctx.checkpoint({"n": 1}) == 1
    assert await ctx.checkpoint({"n": 1}, version=0) == 1, "a replay"
    with pytest.raises(CheckpointConflict) as caught:
        await ctx.checkpoint({"n": 2}, version=0)
    assert (caught.value.version, caught.value.value) == (1, {"n": 1})
    assert await ctx.load_checkpoint(dict[str, int]) == {"n": 1}


def test_a_plain_call_of_a_plain_function_has_the_same_by_other_names() -> None:
    ctx = JobContext.local("t")
    ctx.assert_owned_sync()
    assert ctx.checkpoint_sync(1) == 1
    assert ctx.load_checkpoint_sync() == 1
    for call in (ctx.transaction, ctx.transaction_sync):
        with pytest.raises(TransactionalStepUnsupported, match="plain call"):
            call()


def test_a_child_process_has_no_transactions() -> None:
    ctx = ProcessContext(job_id=uuid4(), task="t")
    for call in (ctx.transaction, ctx.transaction_sync):
        with pytest.raises(TransactionalStepUnsupported, match="process=True"):
            call()


async def test_bodies_that_ask_for_none_of_it_cost_no_connection(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def works(ctx: JobContext) -> str:
        return ctx.idempotency_key

    async with run_worker() as worker:
        jobs = [await works.enqueue() for _ in range(5)]
        for job in jobs:
            assert await job.result(timeout=10) == str(job.id)
        assert not worker.parts.safe._pool._pools
        assert not worker.parts.blocks._pool._pools

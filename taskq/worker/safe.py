"""What bodies get for dangerous work: proof of ownership, checkpoints and steps; ``safe_block`` has the transactions.

Nothing here runs for a body that asks for none of it, and nothing goes over the exchange's connection: bodies have a
pool of their own, opened when first used. Thread bodies wait for what the event loop does for them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from uuid import UUID

import asyncpg

from taskq.checkpoints import conflict, decode, encode
from taskq.children import Child, Start
from taskq.context import JobContext, Saved
from taskq.db.dsn import describe_dsn
from taskq.db.pools import AsyncPool, drop, refuse_in_event_loop
from taskq.errors import (
    DatabaseUnavailable,
    EffectStartNotProven,
    FencedOut,
    JobCancelled,
    OwnershipNotProven,
    PoolerInBetween,
    StepRefused,
    TaskQError,
    from_sqlstate,
)
from taskq.policy import FORMAT
from taskq.steps import Key, Offer, Record, conflicting
from taskq.telemetry import get_logger
from taskq.worker.connection import DATABASE_ERRORS, is_connection_failure
from taskq.worker.forked import keep_from_copies
from taskq.worker.proofs import prove_step_start
from taskq.worker.safe_steps import Entry, Recorder

if TYPE_CHECKING:
    from taskq.transaction import SyncTransaction, Transaction
    from taskq.worker.safe_block import Blocks

__all__ = ["Lease", "SafeBodies"]

log = get_logger("worker")

T = TypeVar("T")
PAUSE: Final = 0.5
"""Seconds until what became of a side-effecting step is sent again where there was no answer."""
PROOF_WITHIN: Final = 5.0
"""Seconds after which ownership counts as not proven, if the lease does not end before."""
MARGIN: Final = 1.0
"""Seconds that a thread waits longer than what it waits for is bounded by."""


class Lease(Protocol):
    """The worker's own clock; the lease thread."""

    @property
    def remaining(self) -> float:
        """Seconds until this worker must have stopped, as far as it knows."""

    def holds_for(self, worker_id: UUID | None) -> bool:
        """Whether that registration is the one that is renewed, and its lease has not run out."""


class SafeBodies:
    """The services of one worker; see ``taskq.context.BodyServices``.

    Args:
        queries: The named statements of ``db/sql/worker.sql``.
        dsn: Where the database is.
        lease: The worker's own clock.
        blocks: What makes transactions.
        concurrency: The most connections for statements; as many bodies run at once.
        patience: Seconds that one statement may take.
    """

    def __init__(
        self, *, queries: Mapping[str, str], dsn: str, lease: Lease, blocks: Blocks, concurrency: int, patience: float
    ) -> None:
        self._sql = queries
        self._dsn = dsn
        self._lease = lease
        self._blocks = blocks
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._pool = AsyncPool(dsn, size=concurrency, name="taskq bodies", on_open=keep_from_copies)
        self._recorder = Recorder(self._record)
        self._stored: set[str] = set()
        self._telling: set[asyncio.Task[None]] = set()

    async def assert_owned(self, ctx: JobContext) -> None:
        """By the clock, by the database, and by the clock again: the answer may have taken long."""
        self._check_clock(ctx)
        limit = max(0.05, min(self._patience, self._lease.remaining, PROOF_WITHIN))
        try:
            row = await self._ask("owned", limit, ctx)
        except (DatabaseUnavailable, PoolerInBetween, asyncpg.PostgresError) as exc:
            self._check_clock(ctx)
            raise OwnershipNotProven(
                f"the database could not be asked within {limit:.1f} s whether job {ctx.job_id} is still this worker's "
                f"({exc}); do nothing that may not be done twice, and let the body fail or raise RetryAfter"
            ) from exc
        if not row["owned"]:
            raise self._taken(ctx)
        self._check_clock(ctx)

    async def save(self, ctx: JobContext, value: Any, version: int | None) -> Saved:
        """Compare and swap; sent once more where the answer was lost, which is answered as a replay then."""
        text = encode(value)
        if version is None:
            version = (ctx._saved or await self.load(ctx, Any)).version
        row = await self._twice("checkpoint", ctx, version, text)
        if row["answer"] == "fenced":
            raise self._taken(ctx)
        if row["answer"] == "conflict":
            raise conflict(ctx.job_id, version, row["version"], row["value"])
        return Saved(row["version"], decode(text))

    async def load(self, ctx: JobContext, kind: Any) -> Saved:
        """Read it, under the fence."""
        row = await self._ask("load_checkpoint", self._patience, ctx)
        if row is None:
            raise self._taken(ctx)
        return Saved(row["version"], decode(row["value"], kind))

    async def load_steps(self, ctx: JobContext) -> dict[Key, Record]:
        """Read what earlier attempts have recorded, under the fence; the first attempt of a job has none before it."""
        if ctx.claim_epoch == 1:
            return {}
        rows = await self._rows("load_steps", self._patience, *_attempt(ctx))
        if not rows:
            raise self._taken(ctx)
        now = time.monotonic()
        return {
            Key(row["kind"], row["name"], row["occurrence"]): Record(
                row["value"],
                row["done"],
                now + row["remaining"] if row["kind"] == "sleep" else None,
                row["error"],
                row["child"],
            )
            for row in rows
            if row["name"] is not None
        }

    async def start_step(self, ctx: JobContext, key: Key) -> Record | datetime:
        """By the clock, by the database, and by the clock again; asked once more where the answer was lost."""
        self._check_clock(ctx)
        row = await self._twice("start_step", ctx, key.name, key.occurrence)
        match row["answer"]:
            case "done":
                return Record(row["value"], error=row["error"])
            case "started":
                prove_step_start(ctx, key, row)
            case answer:
                raise self._not_started(ctx, key, answer)
        try:
            self._check_clock(ctx)
        except FencedOut:
            # Its function was not called, and will not be.
            await self.end_step(ctx, key, row["effect_started_at"], None, None)
            raise
        started: datetime = row["effect_started_at"]
        return started

    async def end_step(self, ctx: JobContext, key: Key, at: datetime, text: str | None, error: str | None) -> None:
        """Record under the fence, whatever stops the body meanwhile: nobody else can say what its function did."""
        telling = self._loop.create_task(self._tell_step(ctx, key, at, text, error))
        self._telling.add(telling)
        telling.add_done_callback(self._told)
        await asyncio.shield(telling)

    async def begin_sleep(self, ctx: JobContext, key: Key, seconds: float) -> float:
        """Record it under the fence; sent once more where the answer was lost, and answered by what stands then."""
        row = await self._twice("begin_sleep", ctx, key.name, key.occurrence, seconds)
        if row["answer"] == "fenced":
            raise self._taken(ctx)
        remaining: float = row["remaining"]
        return remaining

    async def begin_wait(self, ctx: JobContext, key: Key, seconds: float | None) -> Offer:
        """Likewise."""
        row = await self._twice("begin_wait", ctx, key.name, key.occurrence, seconds)
        if row["answer"] == "fenced":
            raise self._taken(ctx)
        return Offer(*row.values())

    async def take_signal(self, ctx: JobContext, key: Key, signal: int, refused: str | None) -> bool:
        """Likewise."""
        answer = (await self._twice("take_signal", ctx, key.name, key.occurrence, signal, refused))["answer"]
        if answer == "fenced":
            raise self._taken(ctx)
        return bool(answer == "taken")

    async def begin_child(self, ctx: JobContext, key: Key, start: Start, new: bool) -> Child:
        """Likewise; what its job or run points to is stored before, in transactions of its own."""
        if new:
            await self._store(start)
        what = (start.spec, start.payload, start.ordering_key, start.plan, start.meta) if new else (None,) * 5
        try:
            row = await self._twice("start_child", ctx, key.name, key.occurrence, *what)
        except asyncpg.PostgresError as exc:
            raise from_sqlstate(exc) or exc from exc
        if row["answer"] == "fenced":
            raise self._taken(ctx)
        return Child(*row.values())

    async def record_step(self, ctx: JobContext, key: Key, text: str) -> None:
        """Record under the fence; sent once more where the answer was lost, which is answered as a replay then."""
        entry = Entry(str(ctx.worker_id), str(ctx.job_id), ctx.claim_epoch, key.name, key.occurrence, text)
        try:
            answer = await self._recorder.record(entry)
        except DatabaseUnavailable:
            answer = await self._recorder.record(entry)
        if answer == "fenced":
            raise self._taken(ctx)
        if answer == "conflict":
            raise conflicting(ctx.job_id, key)

    async def leave_steps(self, ctx: JobContext, left: Sequence[Key]) -> None:
        """Note them, once: what is lost of it is a note."""
        await self._rows("leave_steps", self._patience, *_attempt(ctx), *map(list, zip(*left, strict=True)))

    def transaction(self, ctx: JobContext) -> AbstractAsyncContextManager[Transaction]:
        """See ``safe_block``."""
        return self._blocks.block(ctx)

    def transaction_sync(self, ctx: JobContext) -> AbstractContextManager[SyncTransaction]:
        """See ``safe_block``."""
        refuse_in_event_loop("transaction_sync")
        return self._blocks.block_sync(ctx)

    def wait(self, call: str, asked: Coroutine[Any, Any, T]) -> T:
        """Wait in a thread for what the loop does; longer than that takes only where the loop is blocked."""
        try:
            refuse_in_event_loop(call)
            future = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except BaseException:
            asked.close()
            raise
        try:
            # Three statements at most, each bounded.
            return future.result(3 * self._patience + MARGIN)
        except (TimeoutError, concurrent.futures.CancelledError) as exc:
            future.cancel()
            kind = OwnershipNotProven if call == "assert_owned_sync" else DatabaseUnavailable
            raise kind(f"ctx.{call}() had no answer: the worker's event loop is blocked, or has ended") from exc

    async def close(self) -> None:
        """Close the pool, whoever still uses it."""
        self._recorder.close()
        for telling in self._telling:
            telling.cancel()
        await self._pool.terminate()

    async def _tell_step(self, ctx: JobContext, key: Key, at: datetime, text: str | None, error: str | None) -> None:
        """Sent again for a while where there is no answer, which is answered as a replay then."""
        until = self._loop.time() + self._patience
        while True:
            try:
                row = await self._ask("end_step", self._patience, ctx, key.name, key.occurrence, at, text, error)
                answer = row["answer"]
                break
            except DatabaseUnavailable:
                if self._loop.time() > until:
                    raise
                await asyncio.sleep(PAUSE)
        if answer == "conflict":
            raise conflicting(ctx.job_id, key)
        if answer in ("late", "fenced"):
            log.warning(
                "job.step_told_late",
                job_id=ctx.job_id,
                task=ctx.task,
                queue=ctx.queue,
                claim_epoch=ctx.claim_epoch,
                attempt=ctx.attempt,
                step=str(key),
                recorded=answer == "late",
            )
            raise self._taken(ctx)

    def _told(self, telling: asyncio.Task[None]) -> None:
        self._telling.discard(telling)
        if not telling.cancelled():
            telling.exception()  # whoever waited was told; where the body was stopped nobody did

    def _not_started(self, ctx: JobContext, key: Key, answer: str) -> TaskQError:
        """Why the function of a side-effecting step must not be called."""
        match answer:
            case "cancelled":
                return JobCancelled(ctx.job_id)
            case "lease":
                return FencedOut(
                    f"the database says that the lease of worker {ctx.worker_id} has run out, so step {key} of job "
                    f"{ctx.job_id} was not started; stop without doing anything more"
                )
            case "untold":
                return EffectStartNotProven(
                    f"step {key} of job {ctx.job_id} was started by an earlier attempt, and nobody has told what "
                    "became of it; its function was not called",
                    "untold",
                )
            case "another" | "class":
                return StepRefused(
                    f"step {key} of job {ctx.job_id}: the effect of another step is under way, or the job itself is "
                    "side_effecting; an attempt has one effect at a time"
                )
        return self._taken(ctx)

    async def _store(self, start: Start) -> None:
        """Store policies and plans that this worker has not seen stored."""
        for policy_id, policy in start.policies.items():
            if policy_id not in self._stored:
                await self._rows("ensure_policy", self._patience, policy_id, FORMAT, json.dumps(policy.spec()))
                if policy.cohort is not None and policy.cohort.limit is not None:
                    await self._rows("ensure_limit", self._patience, policy.cohort.name, policy.cohort.limit)
                self._stored.add(policy_id)
        for plan, text in start.plans.items():
            if plan not in self._stored:
                await self._rows("store_plan", self._patience, text)
                self._stored.add(plan)

    async def _ask(self, query: str, limit: float, ctx: JobContext, *args: Any) -> Any:
        """One row of a statement about an attempt, or None; raises what ``_rows`` does."""
        rows = await self._rows(query, limit, *_attempt(ctx), *args)
        return rows[0] if rows else None

    async def _twice(self, query: str, ctx: JobContext, *args: Any) -> Any:
        """A statement that may be sent again where its answer was lost."""
        try:
            return await self._ask(query, self._patience, ctx, *args)
        except DatabaseUnavailable:
            return await self._ask(query, self._patience, ctx, *args)

    async def _record(self, entries: Sequence[Entry], wait: bool) -> Sequence[str]:
        rows = await self._rows("record_steps", self._patience, *map(list, zip(*entries, strict=True)), wait)
        return [row["answer"] for row in sorted(rows, key=lambda row: row["n"])]

    async def _rows(self, query: str, limit: float, *args: Any) -> list[Any]:
        """The rows of a statement.

        Raises:
            DatabaseUnavailable: There was no answer within ``limit`` seconds; what was asked may have been done.
        """
        try:
            async with asyncio.timeout(limit), self._pool.connection() as conn:
                try:
                    rows: list[Any] = await conn.fetch(self._sql[query], *args)
                    return rows
                except BaseException as exc:
                    if not isinstance(exc, asyncpg.PostgresError):
                        # Nobody waits for the rest of its answer.
                        drop(conn)
                    raise
        except DatabaseUnavailable:
            raise
        except DATABASE_ERRORS as exc:
            if not is_connection_failure(exc):
                raise
            said = " ".join(str(exc).split()) or type(exc).__name__
            raise DatabaseUnavailable(
                f"there was no answer from {describe_dsn(self._dsn)} within {limit:.1f} s ({said}); what was asked may "
                "have been done: let the body fail, or try again"
            ) from exc

    def _check_clock(self, ctx: JobContext) -> None:
        if not self._lease.holds_for(ctx.worker_id):
            raise FencedOut(
                f"the lease of worker {ctx.worker_id} has run out by its own clock, so job {ctx.job_id} may be "
                "another's by now; stop without doing anything more"
            )

    def _taken(self, ctx: JobContext) -> FencedOut:
        return FencedOut(
            f"attempt {ctx.claim_epoch} of job {ctx.job_id} is not this worker's any more: it was taken away or is "
            "over; stop without doing anything more"
        )


def _attempt(ctx: JobContext) -> tuple[str, str, int]:
    return str(ctx.worker_id), str(ctx.job_id), ctx.claim_epoch

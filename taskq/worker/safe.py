"""What bodies get for dangerous work: proof of ownership and checkpoints; ``safe_block`` has the transactions.

Nothing here runs for a body that asks for none of it, and nothing goes over the exchange's connection: bodies have a
pool of their own, opened when first used. Thread bodies wait for what the event loop does for them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar
from uuid import UUID

import asyncpg

from taskq.checkpoints import conflict, decode, encode
from taskq.context import JobContext, Saved
from taskq.db.dsn import describe_dsn
from taskq.db.pools import AsyncPool, drop, refuse_in_event_loop
from taskq.errors import DatabaseUnavailable, FencedOut, OwnershipNotProven, PoolerInBetween
from taskq.worker.connection import DATABASE_ERRORS, is_connection_failure
from taskq.worker.forked import keep_from_copies

if TYPE_CHECKING:
    from taskq.transaction import SyncTransaction, Transaction
    from taskq.worker.safe_block import Blocks

__all__ = ["Lease", "SafeBodies"]

T = TypeVar("T")
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
        try:
            row = await self._ask("checkpoint", self._patience, ctx, version, text)
        except DatabaseUnavailable:
            row = await self._ask("checkpoint", self._patience, ctx, version, text)
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
        await self._pool.terminate()

    async def _ask(self, query: str, limit: float, ctx: JobContext, *args: Any) -> Any:
        """One row of a statement about an attempt.

        Raises:
            DatabaseUnavailable: There was no answer within ``limit`` seconds; what was asked may have been done.
        """
        try:
            async with asyncio.timeout(limit), self._pool.connection() as conn:
                try:
                    return await conn.fetchrow(
                        self._sql[query], str(ctx.worker_id), str(ctx.job_id), ctx.claim_epoch, *args
                    )
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

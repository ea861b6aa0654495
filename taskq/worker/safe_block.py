"""A body's own transaction, in which its job ends: begun, and ended by the fence, on a connection of the worker's.

The fenced end is the last statement before the COMMIT. A COMMIT without an answer is settled by what stands on record,
which is read once the transaction is over for certain; until then the attempt has not ended for this worker, whatever
its body does, and ``safe_settle`` tells its end.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias
from uuid import UUID

import psycopg
from psycopg.rows import tuple_row

from taskq.client.connections import adapt
from taskq.context import JobContext
from taskq.db.dsn import describe_dsn
from taskq.db.pools import AsyncPool, connect_sync, drop
from taskq.errors import (
    CommitNotConfirmed,
    DatabaseBusy,
    DatabaseUnavailable,
    FencedOut,
    TransactionalStepUnsupported,
    TransactionEndedInside,
)
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.transaction import SyncTransaction, Transaction
from taskq.worker.claims import Claim
from taskq.worker.complete import next_outcome_id
from taskq.worker.connection import DATABASE_ERRORS, FIRST_WAIT, LONGEST_WAIT, is_connection_failure
from taskq.worker.forked import keep_from_copies

__all__ = ["BlockEnd", "Blocks"]

log = get_logger("worker")

POLL: Final = 0.1
"""Seconds between a thread's looks whether it is to stop, while it waits for word of its COMMIT."""
_Over: TypeAlias = "asyncio.Task[None] | concurrent.futures.Future[None]"


@dataclass(slots=True, eq=False)
class BlockEnd:
    """The end of an attempt in its body's own transaction.

    Attributes:
        over: Done once it is known; with an error where it was not committed.
    """

    worker_id: UUID
    job_id: UUID
    claim_epoch: int
    task: str
    outcome_id: int
    result: str
    xid: str
    over: _Over | None = None

    @property
    def attempt(self) -> tuple[str, str, int]:
        """The fence, as the statements take it."""
        return str(self.worker_id), str(self.job_id), self.claim_epoch


class Blocks:
    """The transactions of one worker's bodies.

    Args:
        queries: The named statements of ``db/sql/worker.sql``.
        dsn: Where the database is; the session is as it says, role and search path included.
        tasks: The tasks that the worker knows, for their results.
        concurrency: The most connections of asyncpg's; a body in a thread opens one for its block, so there are no more
            of those than bodies either.
        patience: Seconds that getting a connection, the end and the COMMIT may take, each.
    """

    def __init__(
        self,
        *,
        queries: Mapping[str, str],
        dsn: str,
        tasks: Mapping[str, Task[..., Any]],
        concurrency: int,
        patience: float,
        ends_async: bool = False,
    ) -> None:
        self._sql = queries
        self._dsn = dsn
        self._tasks = tasks
        self._ends_async = ends_async
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._pool = AsyncPool(dsn, size=concurrency, name="taskq transaction", resets=True, on_open=keep_from_copies)
        self._open: set[tuple[UUID, int]] = set()
        self._ends: dict[tuple[UUID, int], BlockEnd] = {}
        self._cleaning: set[asyncio.Task[None]] = set()

    def has(self, claim: Claim) -> bool:
        """Whether an attempt has ended in a block, or may have."""
        return bool(self._ends) and (claim.job_id, claim.claim_epoch) in self._ends

    def take(self, claim: Claim) -> BlockEnd | None:
        """The end that the body of an attempt has sent in its own transaction, if there is one."""
        return self._ends.pop((claim.job_id, claim.claim_epoch), None) if self._ends else None

    async def close(self) -> None:
        """Roll back what is open, and ask no more."""
        pending = [end.over for end in self._ends.values() if isinstance(end.over, asyncio.Task)]
        tasks = [*pending, *self._cleaning]
        for task in tasks:
            task.cancel()
        await self._pool.terminate()
        if tasks:
            await asyncio.wait(tasks, timeout=1)

    # On asyncpg -----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def block(self, ctx: JobContext) -> AsyncIterator[Transaction]:
        """See ``JobContext.transaction``."""
        if asyncio.get_running_loop() is not self._loop:
            raise TransactionalStepUnsupported(
                "ctx.transaction() belongs to the worker's event loop, and this is another; use ctx.transaction_sync() "
                "in a plain function"
            )
        key = self._begin(ctx)
        try:
            async with AsyncExitStack() as stack:
                conn, transaction, xid = await self._begun(ctx, stack)
                tx = Transaction(conn)
                try:
                    yield tx
                    end = self._end(ctx, tx._result, xid)
                except BaseException as exc:
                    cleaning = self._loop.create_task(self._roll_back(conn, transaction, stack.pop_all()))
                    self._cleaning.add(cleaning)
                    cleaning.add_done_callback(self._cleaning.discard)
                    if not isinstance(exc, (asyncio.CancelledError, GeneratorExit)):
                        await asyncio.shield(cleaning)
                    raise
                self._ends[key] = end
                # A task of its own: what stops the body does not stop this half-way.
                end.over = self._loop.create_task(self._finish(end, conn, transaction, stack.pop_all()))
            try:
                await asyncio.shield(end.over)
            except BaseException as exc:
                if end.over.done() and not end.over.cancelled() and end.over.exception() is exc:
                    # It was not committed, and the body is told so: it may try again, or end as it likes.
                    self._ends.pop(key, None)
                raise
        finally:
            self._open.discard(key)

    async def _begun(self, ctx: JobContext, stack: AsyncExitStack) -> tuple[Any, Any, str]:
        conn: Any = None
        try:
            async with asyncio.timeout(self._patience):
                conn = await stack.enter_async_context(self._pool.connection())
                transaction = conn.transaction()
                await transaction.start()
                row = await conn.fetchrow(
                    self._sql["begin_inside"], str(ctx.worker_id), str(ctx.job_id), ctx.claim_epoch
                )
            if not row["owned"]:
                raise self._fenced(ctx.job_id, ctx.claim_epoch)
        except BaseException as exc:
            if conn is not None:
                drop(conn)
            if isinstance(exc, TimeoutError):
                raise DatabaseBusy(
                    f"ctx.transaction() got no connection within {self._patience:g} s; nothing of the block has run: "
                    "let the body fail, or raise RetryAfter"
                ) from exc
            self._raise(exc)
        return conn, transaction, row["xid"]

    async def _roll_back(self, conn: Any, transaction: Any, stack: AsyncExitStack) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await transaction.rollback()
        except BaseException:
            drop(conn)
        finally:
            with suppress(*DATABASE_ERRORS):
                await stack.aclose()

    async def _finish(self, end: BlockEnd, conn: Any, transaction: Any, stack: AsyncExitStack) -> None:
        """End the attempt on the block's connection, and commit.

        Raises:
            TransactionEndedInside, FencedOut, Exception: It was not committed.
        """
        try:
            if not conn.is_closed() and not conn.is_in_transaction():
                raise self._ended_by_hand(end)
            row = await conn.fetchrow(
                self._sql["end_inside"], *end.attempt, end.outcome_id, end.result, end.xid, timeout=self._patience
            )
            self._check(end, row["answer"])
        except BaseException as exc:
            await self._roll_back(conn, transaction, stack)
            self._raise(exc)
        try:
            async with asyncio.timeout(self._patience):
                await transaction.commit()
        except asyncio.CancelledError:
            drop(conn)
            raise
        except BaseException as exc:
            # Refused, most likely; lost, perhaps. The record says which.
            drop(conn)
            await self._settle(end, exc)
        finally:
            with suppress(*DATABASE_ERRORS):
                await stack.aclose()

    # On psycopg, in a thread ----------------------------------------------------------------------------------------

    @contextmanager
    def block_sync(self, ctx: JobContext) -> Iterator[SyncTransaction]:
        """See ``JobContext.transaction_sync``."""
        key = self._begin(ctx)
        try:
            with self._connected() as conn:
                try:
                    # Inside of it, psycopg refuses commit() and rollback().
                    outer = conn.transaction()
                    outer.__enter__()
                    xid, owned = self._run(conn, "begin_inside", str(ctx.worker_id), str(ctx.job_id), ctx.claim_epoch)[
                        :2
                    ]
                except psycopg.Error as exc:
                    self._raise(exc)
                if not owned:
                    raise self._fenced(ctx.job_id, ctx.claim_epoch)
                tx = SyncTransaction(conn)
                yield tx
                end = self._end(ctx, tx._result, xid)
                self._finish_sync(ctx, key, end, conn, outer)
        finally:
            self._open.discard(key)

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection of the block's own; closed with it, which rolls back what was not committed."""
        conn = connect_sync(
            self._dsn,
            name="taskq transaction",
            connect_timeout=max(2, int(self._patience)),
            tcp_user_timeout=int(self._patience * 1000),
        )
        try:
            yield conn
        finally:
            with suppress(psycopg.Error):
                conn.close()

    def _run(self, conn: psycopg.Connection[Any], query: str, *args: Any) -> tuple[Any, ...]:
        with psycopg.RawCursor(conn, row_factory=tuple_row) as cursor:
            adapt(cursor)
            row = cursor.execute(self._sql[query].encode(), args).fetchone()
        assert row is not None
        return row

    def _finish_sync(
        self, ctx: JobContext, key: tuple[UUID, int], end: BlockEnd, conn: psycopg.Connection[Any], outer: Any
    ) -> None:
        if conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
            raise self._ended_by_hand(end)
        try:
            answer = self._run(conn, "end_inside", *end.attempt, end.outcome_id, end.result, end.xid)[0]
        except psycopg.Error as exc:
            self._raise(exc)
        self._check(end, answer)
        over: concurrent.futures.Future[None] = concurrent.futures.Future()
        end.over = over
        self._ends[key] = end
        try:
            outer.__exit__(None, None, None)
        except BaseException as exc:
            with suppress(psycopg.Error):
                conn.close()
            self._ask_loop(end, exc, over)
            self._await_word(ctx, key, end, over)
        else:
            over.set_result(None)

    def _ask_loop(self, end: BlockEnd, exc: BaseException, over: concurrent.futures.Future[None]) -> None:
        """Have the event loop settle it, and tell ``over``."""

        def told(asked: concurrent.futures.Future[None]) -> None:
            if asked.cancelled():
                over.cancel()
            elif (error := asked.exception()) is not None:
                over.set_exception(error)
            else:
                over.set_result(None)

        asking = self._settle(end, exc)
        try:
            asyncio.run_coroutine_threadsafe(asking, self._loop).add_done_callback(told)
        except RuntimeError:
            # The loop has ended, and with it the worker; what stands on record stands.
            asking.close()
            over.cancel()

    def _await_word(
        self, ctx: JobContext, key: tuple[UUID, int], end: BlockEnd, over: concurrent.futures.Future[None]
    ) -> None:
        while not over.done():
            if ctx.cancel_requested:
                raise CommitNotConfirmed(
                    f"the COMMIT of job {end.job_id} had no answer, and the body is to stop before anybody could be "
                    "asked; the attempt ends by what stands on record: stop without doing anything more"
                )
            concurrent.futures.wait([over], POLL)
        if over.cancelled():
            raise CommitNotConfirmed(f"the COMMIT of job {end.job_id} had no answer, and the worker has ended")
        if (error := over.exception()) is not None:
            self._ends.pop(key, None)
            raise error

    # What both need -------------------------------------------------------------------------------------------------

    def _begin(self, ctx: JobContext) -> tuple[UUID, int]:
        if self._ends_async:
            raise TransactionalStepUnsupported(
                "this worker commits ends asynchronously (ends_commit='async'), and a block of ctx.transaction() "
                f"promises that its end lasts; serve the queue {ctx.queue} by a worker with ends_commit='sync', and "
                "retry the job"
            )
        key = (ctx.job_id, ctx.claim_epoch)
        if key in self._open:
            raise TransactionalStepUnsupported(
                "a block of ctx.transaction() is open in this attempt, and an attempt ends once; use a savepoint on "
                "tx.conn inside of it"
            )
        if key in self._ends:
            raise TransactionalStepUnsupported(
                "this attempt has ended with an earlier block of ctx.transaction(), which is the body's last act; put "
                "all that belongs together into one block"
            )
        self._open.add(key)
        return key

    def _end(self, ctx: JobContext, result: Any, xid: str) -> BlockEnd:
        assert ctx.worker_id is not None
        text = self._tasks[ctx.task].codec.encode_result(result)
        return BlockEnd(ctx.worker_id, ctx.job_id, ctx.claim_epoch, ctx.task, next_outcome_id(), text, xid)

    def _check(self, end: BlockEnd, answer: str) -> None:
        if answer == "another transaction":
            raise self._ended_by_hand(end)
        if answer == "step":
            raise TransactionalStepUnsupported(
                f"the effect of a step of job {end.job_id} is under way, or nobody knows what became of it, so the "
                "block cannot end the job; nothing of it was committed"
            )
        if answer != "ended":
            raise self._fenced(end.job_id, end.claim_epoch)

    async def _settle(self, end: BlockEnd, exc: BaseException) -> None:
        """What became of a COMMIT that raised; returns where it had happened.

        Raises:
            FencedOut, BaseException: It had not.
        """
        [row] = await self._until_answered(end, "ended_inside", *end.attempt, end.outcome_id)
        word = row["answer"]
        if word == "committed":
            return
        if word == "taken":
            raise self._fenced(end.job_id, end.claim_epoch) from exc
        self._raise(exc)

    async def records(self, end: BlockEnd) -> list[Any]:
        """What stands on record of the job's attempts; asked for until there is an answer."""
        return await self._until_answered(end, "attempt_records", [end.job_id])

    async def _until_answered(self, end: BlockEnd, query: str, *args: Any) -> list[Any]:
        tries = 0
        me = asyncio.current_task()
        assert me is not None
        asked = me.cancelling()
        while True:
            try:
                async with asyncio.timeout(self._patience), self._pool.connection() as conn:
                    try:
                        rows: list[Any] = await conn.fetch(self._sql[query], *args)
                        return rows
                    except BaseException:
                        drop(conn)
                        raise
            except DATABASE_ERRORS as exc:
                if me.cancelling() > asked:
                    # What a connection says as it is given up must not hide that its user was cancelled.
                    raise asyncio.CancelledError from exc
                tries += 1
                if tries <= 3 or tries % 10 == 0:
                    log.warning(
                        "job.commit_unconfirmed",
                        job_id=end.job_id,
                        task=end.task,
                        claim_epoch=end.claim_epoch,
                        tries=tries,
                        error=f"{type(exc).__name__}: {exc}".splitlines()[0],
                    )
                await asyncio.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(tries, 10)))

    def _raise(self, exc: BaseException) -> NoReturn:
        """Raise what went wrong in our own statements: a lost connection by one name, the rest as it is."""
        lost = isinstance(exc, psycopg.OperationalError) and (exc.sqlstate or "08")[:3] in ("08", "080", "57P")
        if not isinstance(exc, DatabaseUnavailable) and (lost or is_connection_failure(exc)):
            raise DatabaseUnavailable(
                f"the connection of ctx.transaction() to {describe_dsn(self._dsn)} was lost "
                f"({' '.join(str(exc).split()) or type(exc).__name__}); nothing that the block did was committed: let "
                "the body fail, or do the block again"
            ) from exc
        raise exc

    def _fenced(self, job_id: UUID, epoch: int) -> FencedOut:
        return FencedOut(
            f"attempt {epoch} of job {job_id} is not this worker's any more: it was taken away or is over; all that "
            "the block of ctx.transaction() did was rolled back: stop without doing anything more"
        )

    def _ended_by_hand(self, end: BlockEnd) -> TransactionEndedInside:
        return TransactionEndedInside(
            f"the block of ctx.transaction() in {end.task} ended its own transaction, so the job was not completed "
            "with it; leave COMMIT and ROLLBACK to the block, and use savepoints (tx.conn.transaction()) inside of it"
        )

"""What becomes of ends and claims that the database refused, or whose answer was lost.

Ends are sent again until they are confirmed. What is on record decides about an end that changed no row; only a value
that cannot be stored is given up, alone, and a row whose claim is refused is claimed around.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from uuid import UUID

import asyncpg

from taskq import errors
from taskq.telemetry import get_logger
from taskq.worker.claims import Counts, End
from taskq.worker.complete import Outbox, cannot_be_stored, partition_is_missing
from taskq.worker.connection import DATABASE_ERRORS, Connection
from taskq.worker.proofs import prove_end
from taskq.worker.report import after_commit, not_proven
from taskq.worker.unflushed import Unflushed

log = get_logger("worker")

BUSY = (0.001, 0.008)
"""Seconds until an end is sent again whose run was busy, at random within, so that two workers do not keep meeting."""
PATIENT, DOUBLINGS = 3, 5
"""After so many times that is doubled with each, so many times at most: somebody holds the run up for good."""


class Resender:
    """Decides for one exchanger.

    Args:
        queries: The named statements of ``db/sql/worker.sql``.
        conn: The exchange's connection.
        outbox: Where ends are kept.
        counts: What is counted.
        unflushed: Ends that the server may still lose.
    """

    def __init__(
        self, queries: Mapping[str, str], conn: Connection, outbox: Outbox, counts: Counts, unflushed: Unflushed
    ) -> None:
        self._sql = queries
        self._conn = conn
        self._outbox = outbox
        self._counts = counts
        self._unflushed = unflushed
        self.ends_only = False
        """Whether to send ends without claims, to find out which of the two is refused."""
        self.skip: list[UUID] = []
        """Jobs to claim around."""

    def later(self, busy: list[End], batch: list[End], nudge: Callable[[], None]) -> list[End]:
        """Ends whose run somebody else is at just now: send them again in a moment. Gives the rest of the batch."""

        def again() -> None:
            self._outbox.again(busy)
            nudge()

        for end in busy:
            end.busy += 1
        # Of a batch with a new one the new one counts: it may well be free by then.
        times = max(0, min(end.busy for end in busy) - PATIENT)
        asyncio.get_running_loop().call_later(random.uniform(*BUSY) * 2 ** min(times, DOUBLINGS), again)
        taken = set(map(id, busy))
        return [end for end in batch if id(end) not in taken]

    async def settle_missed(self, end: End) -> None:
        """An end changed no row: read what stands on record, in a new statement, and learn whose it is."""
        try:
            rows = await self._conn.fetch(
                self._sql["attempt_record"], end.job_id, end.claim_epoch, end.worker_id, recovers=False
            )
        except DATABASE_ERRORS as exc:
            self._outbox.again([end])
            await self._conn.pause_after_failure(exc)
            return
        mine = any(row["ended"] and row["outcome_id"] == end.outcome_id for row in rows)
        if mine or (end.outcome == "unknown" and any(row["outcome"] == "unknown" for row in rows)):
            if end.effect_started_at is None:
                # Whether that commit has waited for the disk is not known here.
                self._unflushed.answered([end], asyncio.get_running_loop().time(), flushed=False)
            else:
                await self.prove([end])
        elif any(not row["ended"] for row in rows):
            # Nothing on record yet and the claim still stands: an earlier sending is in progress. Ask again.
            self._outbox.again([end])
            await asyncio.sleep(0.05)
        elif end.outcome != "succeeded" and any(_succeeded_by(end.worker_id, row) for row in rows):
            # Its body has ended it in its own transaction, which tells of it; this was said while that was on its way.
            self._outbox.confirmed([end])
            after_commit(
                end, "{type}: {message}".format(**json.loads(end.error)) if end.error else f"was {end.outcome}"
            )
        else:
            self._outbox.confirmed([end])
            self._counts.fenced_out += 1
            log.warning(
                "job.fenced_out",
                job_id=end.job_id,
                task=end.task,
                claim_epoch=end.claim_epoch,
                outcome=end.outcome,
                on_record=next((row["outcome"] for row in rows if row["ended"]), None),
            )

    async def prove(self, ends: list[End]) -> None:
        """Ends of attempts that started an effect: read what stands on record, and let only that count as done."""
        try:
            rows = await self._conn.fetch(self._sql["attempt_records"], [end.job_id for end in ends], recovers=False)
        except DATABASE_ERRORS as exc:
            self._outbox.again(ends)
            await self._conn.pause_after_failure(exc)
            return
        for end in ends:
            try:
                prove_end(end, rows)
            except errors.OutcomeNotProven as exc:
                not_proven(self._counts, end, exc)
            else:
                if end.on_proven is not None:
                    end.on_proven(end)
            self._outbox.confirmed([end])

    async def failed(self, batch: list[End], limit: int, exc: Exception) -> None:
        """An exchange failed: decide what is sent next, and when.

        Args:
            batch: The ends that were sent.
            limit: How many claims were asked for; 0 for none.
            exc: What the database or the connection said.
        """
        refusal = errors.from_sqlstate(exc)
        if isinstance(refusal, errors.WorkerNotCapable) and limit and self._leave_out(refusal):
            self._outbox.again(batch)
            return
        if partition_is_missing(exc):
            self._outbox.again(batch)
            try:
                [made] = await self._conn.fetch(self._sql["ensure_partitions"], recovers=False)
            except DATABASE_ERRORS as again:
                await self._conn.pause_after_failure(again)
            else:
                if not made["n"]:
                    await self._conn.pause_after_failure(exc)
            return
        # A slot that was not free a moment ago may be in the next one: such a row is not given up.
        lasts = refusal if not isinstance(refusal, errors.CohortFull) else None
        if isinstance(lasts, errors.DatabaseRefusal) and limit and not batch and self._leave_out(lasts):
            return
        if cannot_be_stored(exc) and batch:
            if limit:
                # Ends or claims? Send the ends alone to find out.
                self._outbox.again(batch)
                self.ends_only = True
                return
            assert isinstance(exc, asyncpg.PostgresError)
            culprit = self._outbox.refused(batch, exc)
            if culprit is not None:
                log.error(
                    "job.outcome_not_stored",
                    job_id=culprit.job_id,
                    task=culprit.task,
                    claim_epoch=culprit.claim_epoch,
                    outcome=culprit.outcome,
                    sqlstate=exc.sqlstate,
                    error=str(exc).splitlines()[0],
                )
                if culprit.minimal:
                    await self._conn.pause_after_failure(exc)
            return
        self._outbox.again(batch)
        await self._conn.pause_after_failure(exc)

    async def unreadable(self, batch: list[End], exc: Exception) -> None:
        """An answer could not be read: its ends are sent again, and its claims are released by the next renewal.

        The connection was thrown away, as the rest of the answer may still be on it.

        Args:
            batch: The ends that were sent.
            exc: What went wrong while reading.
        """
        self._outbox.again(batch)
        log.error("exchange.unreadable", error=f"{type(exc).__name__}: {exc}".splitlines()[0], ends=len(batch))
        await self._conn.pause_after_failure(exc, report=False)

    def _leave_out(self, refusal: errors.DatabaseRefusal) -> bool:
        """Claim around a row whose claim the database refused; answers whether that is anything new."""
        if refusal.job_id is None or refusal.job_id in self.skip:
            return False
        log.warning("job.stranded", job_id=refusal.job_id, sqlstate=refusal.sqlstate, reason=str(refusal))
        self.skip.append(refusal.job_id)
        return True


def _succeeded_by(worker_id: UUID, row: Mapping[str, object]) -> bool:
    return row["outcome"] == "succeeded" and row["worker_id"] == worker_id

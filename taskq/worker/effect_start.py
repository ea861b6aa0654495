"""Effect starts: committed under the fence before a side-effecting body is called, one statement for all that wait.

While one statement is on its way, others gather for the next. It is sent again until there is an answer or the lease
has ended: asked twice, the database answers the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from uuid import UUID

from taskq.errors import EffectStartNotProven
from taskq.worker import points
from taskq.worker.claims import Claim
from taskq.worker.connection import DATABASE_ERRORS, Connection
from taskq.worker.proofs import Start, prove_start

BATCH = 500
UNREADABLE = 3
"""Answers that cannot be read, one after the other, until nothing counts as proven."""
LEASE_PAUSE = 0.2
"""Seconds before it is asked again where the database says that the lease does not hold."""


class EffectStart:
    """One attempt that wants to start its effect.

    Attributes:
        claim: The attempt.
        sent: Whether it was sent: from then on it may be committed.
        answer: What it came to.
        started_at: When the database says that it may have started; None before that.
    """

    __slots__ = ("answer", "claim", "sent", "started_at", "unreadable")

    def __init__(self, claim: Claim, answer: asyncio.Future[Start]) -> None:
        self.claim = claim
        self.answer = answer
        self.sent = False
        self.started_at: datetime | None = None
        self.unreadable = 0


class EffectStarts:
    """Asks for effect starts.

    Args:
        query: The statement, with worker, ids and epochs.
        conn: The connection that it goes over.
        may_go_on: Whether the lease still holds, by this worker's clock.
        on_lease_refused: Called when the database says that it does not.
    """

    def __init__(
        self, query: str, conn: Connection, may_go_on: Callable[[], bool], on_lease_refused: Callable[[], None]
    ) -> None:
        self._query = query
        self._conn = conn
        self._may_go_on = may_go_on
        self._on_lease_refused = on_lease_refused
        self._waiting: list[EffectStart] = []
        self._asking: asyncio.Task[None] | None = None

    def ask(self, claim: Claim) -> EffectStart:
        """Ask for one; whoever waits no more cancels its ``answer``."""
        loop = asyncio.get_running_loop()
        start = EffectStart(claim, loop.create_future())
        self._waiting.append(start)
        if self._asking is None or self._asking.done():
            self._asking = loop.create_task(self._ask_all(), name="taskq-effect-starts")
        return start

    async def close(self) -> None:
        """Ask no more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    async def _ask_all(self) -> None:
        while batch := self._next_batch():
            if not self._may_go_on():
                for start in batch:
                    self._give_up(start)
                continue
            try:
                rows = await self._send(batch)
            except DATABASE_ERRORS as exc:
                self._waiting[:0] = batch
                await self._conn.pause_after_failure(exc)
            except Exception as exc:
                # Nothing was learned of it; the connection, which may hold the rest of the answer, was thrown away.
                self._again_unless_unreadable(batch, exc)
                await self._conn.pause_after_failure(exc, report=False)
            else:
                again = [start for n, start in enumerate(batch) if not self._settle(start, rows[n : n + 1])]
                if again:
                    self._waiting += again
                    self._on_lease_refused()
                    await asyncio.sleep(LEASE_PAUSE)

    def _next_batch(self) -> list[EffectStart]:
        self._waiting = [start for start in self._waiting if not start.answer.done()]
        worker: UUID | None = self._waiting[0].claim.worker_id if self._waiting else None
        batch = [start for start in self._waiting if start.claim.worker_id == worker][:BATCH]
        self._waiting = [start for start in self._waiting if start not in batch]
        return batch

    async def _send(self, batch: list[EffectStart]) -> list[object]:
        for start in batch:
            start.sent = True
        ids = [start.claim.job_id for start in batch]
        watch = points.watch
        return await self._conn.fetch(
            self._query,
            batch[0].claim.worker_id,
            ids,
            [start.claim.claim_epoch for start in batch],
            through=None if watch is None else watch.effect_start(ids),
        )

    def _settle(self, start: EffectStart, rows: list[object]) -> bool:
        """Judge one answer; False if it must be asked again."""
        row = rows[0] if rows else None
        try:
            verdict = prove_start(start.claim, row)  # type: ignore[arg-type]  # asyncpg's records are untyped
        except EffectStartNotProven as exc:
            self._fail(start, exc)
            return True
        if verdict == "no_lease":
            return start.answer.done()
        if not start.answer.done():
            start.started_at = row["effect_started_at"]  # type: ignore[index]
            start.answer.set_result(verdict)
        return True

    def _again_unless_unreadable(self, batch: list[EffectStart], exc: Exception) -> None:
        for start in batch:
            start.unreadable += 1
            if start.unreadable >= UNREADABLE:
                why = f"its answer could not be read {UNREADABLE} times: {type(exc).__name__}"
                self._fail(start, _unknown(start, why))
            else:
                self._waiting.append(start)

    def _give_up(self, start: EffectStart) -> None:
        if start.sent:
            self._fail(start, _unknown(start, "it had no answer until the lease ended"))
        else:
            start.answer.set_result("no_lease")

    def _fail(self, start: EffectStart, exc: EffectStartNotProven) -> None:
        if not start.answer.done():
            start.answer.set_exception(exc)


def _unknown(start: EffectStart, why: str) -> EffectStartNotProven:
    return EffectStartNotProven(
        f"whether job {start.claim.job_id} may start its effect is not known: {why}; its body was not called",
        "no_answer",
    )

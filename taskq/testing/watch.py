"""The watch over this process's workers: it follows the points that jobs pass, and lets armed faults strike there."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal
from uuid import UUID
from weakref import WeakKeyDictionary, WeakSet

import asyncpg

from taskq.errors import FaultInjected
from taskq.telemetry import get_logger
from taskq.testing.points import Fault, Passage, Point, When
from taskq.worker import points
from taskq.worker.claims import End
from taskq.worker.complete import Outbox
from taskq.worker.connection import Connection

__all__ = ["WATCH", "FaultWatch"]

log = get_logger("testing")

_CLAIM = (Point.CLAIM_SENT, Point.CLAIM_COMMITTED, Point.CLAIM_RECEIVED)
_END = (Point.END_SENT, Point.END_COMMITTED, Point.END_RECEIVED)


class FaultWatch:
    """Watches while there is something to watch for.

    Attributes:
        faults: Those that are armed.
        traces: Lists that each passage is added to.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.traces: list[list[Passage]] = []
        self._connections: WeakKeyDictionary[Outbox, Connection] = WeakKeyDictionary()
        self._to_cut: WeakSet[Outbox] = WeakSet()

    def look(self) -> None:
        """Begin to watch, or stop it, by whether there is anything to watch for."""
        points.watch = self if self.faults or self.traces else None

    def exchange(self, conn: Connection, outbox: Outbox, ends: Sequence[End], limit: int) -> points.WatchedExchange:
        """See ``taskq.worker.points.Watch``."""
        self._connections[outbox] = conn
        cut_first = outbox in self._to_cut
        self._to_cut.discard(outbox)
        return _Exchange(self, tuple(end.job_id for end in ends), limit, cut_first)

    def effect_start(self, jobs: Sequence[UUID]) -> points.WatchedExchange:
        """See ``taskq.worker.points.Watch``."""
        return _EffectStart(self, tuple(jobs))

    def keep(self, outbox: Outbox, end: End) -> None:
        """See ``taskq.worker.points.Watch``."""
        if end.outcome == "release":
            outbox.keep(end)
            return

        def cut() -> None:
            conn = self._connections.get(outbox)
            if conn is None or conn._conn is None:
                self._to_cut.add(outbox)  # before its next use, which comes to the same
            else:
                _cut(conn._conn)

        self.passes(Point.BODY_DONE, "before", (end.job_id,), cut)
        outbox.keep(end)
        self.passes(Point.BODY_DONE, "after", (end.job_id,), cut)

    def passes(self, point: Point, when: When, jobs: tuple[UUID, ...], cut: Callable[[], None]) -> Passage:
        """Note a passage, and let the first fault strike that is armed there.

        Raises:
            FaultInjected: The fault strikes by an exception.
        """
        passage = Passage(point, when, jobs)
        for trace in self.traces:
            trace.append(passage)
        fault = next((f for f in self.faults if f.is_hit(passage)), None)
        if fault is None:
            return passage
        log.warning("fault.fired", point=str(point), when=when, how=fault.how, jobs=",".join(map(str, jobs)))
        if fault.how == "raise":
            raise FaultInjected(f"a test's fault struck {when} {point}")
        if fault.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        cut()
        return passage


WATCH: Final = FaultWatch()
"""The one watch of this process."""


class _Exchange:
    """One exchange that is watched, in a transaction of its own."""

    def __init__(self, watch: FaultWatch, ends: tuple[UUID, ...], limit: int, cut_first: bool) -> None:
        self._watch = watch
        self._ends = ends
        self._limit = limit
        self._cut_first = cut_first
        self._claims: tuple[UUID, ...] = ()
        self._conn: Any = None
        self._is_cut = False
        self._sent: list[Passage] = []

    async def __call__(self, conn: Any, query: str, args: Sequence[Any], timeout: float) -> list[Any]:
        self._conn = conn
        async with asyncio.timeout(timeout):
            return await self._run(query, args)

    def acted(self, upon: Literal["claims", "ends"]) -> None:
        if upon == "ends" and self._ends:
            self._watch.passes(Point.END_RECEIVED, "after", self._ends, self._cut)
        elif upon == "claims" and self._claims:
            self._watch.passes(Point.CLAIM_RECEIVED, "after", self._claims, self._cut)

    async def _run(self, query: str, args: Sequence[Any]) -> list[Any]:
        conn = self._conn
        if self._cut_first:
            self._cut()
        self._pass(0, "before")
        transaction = conn.transaction()
        await transaction.start()
        try:
            rows = await self._send(query, args)
        except asyncpg.PostgresError:
            if not conn.is_closed():
                await transaction.rollback()
            raise
        self._claims = tuple(row["job_id"] for row in rows if row["kind"] == "job")
        for passage in self._sent:
            passage.jobs = self._claims
        self._pass(1, "before")
        await transaction.commit()
        self._pass(1, "after")
        if self._is_cut:
            # The commit was answered, so that it is known; what the worker gets is what a lost answer gives it.
            raise ConnectionResetError("a test's fault cut the connection before the answer")
        self._pass(2, "before")
        return rows

    async def _send(self, query: str, args: Sequence[Any]) -> list[Any]:
        statement = await self._conn.prepare(query)
        sending = asyncio.ensure_future(statement.fetch(*args))
        try:
            # It is written as soon as the task has run; under uvloop at the end of the loop's turn.
            for _ in range(3):
                await asyncio.sleep(0)
            self._pass(0, "after")
            rows: list[Any] = await sending
        except BaseException:
            if not sending.done():
                self._conn.terminate()
                with suppress(Exception):
                    await sending
            raise
        return rows

    def _pass(self, stage: int, when: When) -> None:
        if self._ends:
            self._watch.passes(_END[stage], when, self._ends, self._cut)
        if self._claims or (stage == 0 and self._limit):
            passage = self._watch.passes(_CLAIM[stage], when, self._claims, self._cut)
            if stage == 0:
                self._sent.append(passage)

    def _cut(self) -> None:
        self._is_cut = True
        _cut(self._conn)


class _EffectStart:
    """One statement that starts effects and is watched, in a transaction of its own."""

    def __init__(self, watch: FaultWatch, jobs: tuple[UUID, ...]) -> None:
        self._watch = watch
        self._jobs = jobs
        self._is_cut = False

    async def __call__(self, conn: Any, query: str, args: Sequence[Any], timeout: float) -> list[Any]:
        def cut() -> None:
            self._is_cut = True
            _cut(conn)

        async with asyncio.timeout(timeout):
            transaction = conn.transaction()
            await transaction.start()
            rows: list[Any] = await conn.fetch(query, *args)
            self._watch.passes(Point.EFFECT_START_COMMITTED, "before", self._jobs, cut)
            await transaction.commit()
            self._watch.passes(Point.EFFECT_START_COMMITTED, "after", self._jobs, cut)
        if self._is_cut:
            raise ConnectionResetError("a test's fault cut the connection before the answer")
        return rows

    def acted(self, upon: Literal["claims", "ends"]) -> None:
        """Nothing follows that would be watched."""


def _cut(conn: Any) -> None:
    """Cut a connection under its user's feet: no goodbye, and what was not written yet is gone."""
    conn._transport.abort()

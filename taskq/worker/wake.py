"""Notifications: what makes a worker start a job, or hear of a cancel, at once instead of at its next poll.

Nothing depends on it: a lost notification costs latency only, and where LISTEN is not to be had (behind a pooler in
transaction mode) one warning is given and polling goes on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any
from uuid import UUID

from taskq.db.pools import connect_async
from taskq.db.queries import load
from taskq.telemetry import get_logger
from taskq.worker.connection import DATABASE_ERRORS, OWN_LIMITS

log = get_logger("worker")

CHECK_EVERY = 20.0
"""Seconds between looks whether the listening connection still answers."""
ANSWER_WITHIN = 10.0


class Listener:
    """Keeps one connection listening, and comes back with growing waits when it breaks.

    Args:
        dsn: Where to connect.
        schema: Prefix of the channels.
        queues: Notifications of other queues are not for this worker.
        worker_id: The current registration; notifications that name others are not for it.
        on_wake: Called when jobs were enqueued in one of the queues.
        on_cancel: Called with worker, job and epoch when cancelling was asked for.
        on_due: Called when more of a run became ready than one transaction gives jobs.
    """

    def __init__(
        self,
        dsn: str,
        schema: str,
        queues: Collection[str],
        worker_id: Callable[[], UUID | None],
        on_wake: Callable[[], None],
        on_cancel: Callable[[UUID, UUID, int], None],
        on_due: Callable[[], None],
    ) -> None:
        self._dsn = dsn
        self._wake = f"{schema}_wake"
        self._cancel = f"{schema}_cancel"
        self._due = f"{schema}_due"
        self._ping = load("worker", schema)["ping"]
        self._queues = frozenset(queues)
        self._worker_id = worker_id
        self._on_wake = on_wake
        self._on_cancel = on_cancel
        self._on_due = on_due
        self._again = asyncio.Event()

    def retry_now(self) -> None:
        """The database answers others: do not wait out the pause."""
        self._again.set()

    async def run(self) -> None:
        """Listen until cancelled."""
        failures = 0
        while True:
            try:
                conn = await connect_async(self._dsn, name="taskq listen", server_settings=OWN_LIMITS)
                try:
                    gone = asyncio.Event()
                    conn.add_termination_listener(lambda _, gone=gone: gone.set())
                    await conn.add_listener(self._wake, self._woken)
                    await conn.add_listener(self._cancel, self._cancelled)
                    await conn.add_listener(self._due, lambda *_: self._on_due())
                    if failures:
                        log.info("listen.resumed", after_failures=failures)
                    failures = 0
                    # Whatever was notified while nobody listened.
                    self._on_wake()
                    while True:
                        with suppress(TimeoutError):
                            async with asyncio.timeout(CHECK_EVERY):
                                await gone.wait()
                        await conn.execute(self._ping, timeout=ANSWER_WITHIN)
                finally:
                    with suppress(Exception):
                        conn.terminate()
            except DATABASE_ERRORS as exc:
                failures += 1
                wait = min(30.0, 0.5 * 2 ** min(failures - 1, 10)) * (0.5 + random.random() / 2)
                if failures <= 2 or failures % 20 == 0:
                    log.warning(
                        "listen.unavailable",
                        error=str(exc).splitlines()[0] if str(exc) else type(exc).__name__,
                        failures=failures,
                        next_try_in=round(wait, 1),
                        meanwhile="polling",
                    )
                self._again.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._again.wait()

    def _woken(self, _conn: Any, _pid: int, _channel: str, payload: object) -> None:
        queue, *named = str(payload).split(" ")
        if queue in self._queues and (not named or str(self._worker_id())[-12:] in named):
            self._on_wake()

    def _cancelled(self, _conn: Any, _pid: int, _channel: str, payload: object) -> None:
        with suppress(ValueError):
            worker, job, epoch = str(payload).split()
            self._on_cancel(UUID(worker), UUID(job), int(epoch))

"""Bodies past their timeout are looked for, all at once and only while there are any that have one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from uuid import UUID

from taskq.telemetry import get_logger
from taskq.worker.claims import Interrupt
from taskq.worker.running import Running

log = get_logger("worker")

ASK_AGAIN = 5.0
"""Seconds after which a body that goes on in spite of its timeout is cancelled again, each time."""
SWEEP = 0.05
"""Seconds between looks for bodies past their timeout."""


class Sweeper:
    """Interrupts bodies that run longer than their timeout.

    Args:
        loop: The worker's loop.
        running: The bodies that run; read at every look.
        interrupt: Stops one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        running: Mapping[UUID, Running],
        interrupt: Callable[[UUID, Interrupt], object],
    ) -> None:
        self._loop = loop
        self._running = running
        self._interrupt = interrupt
        self._armed = False
        self._closed = False

    def watch(self) -> None:
        """A body with a timeout has started."""
        if not self._armed and not self._closed:
            self._armed = True
            self._loop.call_later(SWEEP, self._sweep)

    def close(self) -> None:
        """Look no more."""
        self._closed = True

    def _sweep(self) -> None:
        self._armed = False
        now = self._loop.time()
        again = False
        for run in list(self._running.values()):
            timeout = run.policy.timeout
            if timeout is None or run.interrupt not in (None, "timeout"):
                continue
            again = True
            if run.interrupt is None and now - run.started >= timeout:
                run.timed_out_at = run.asked_at = now
                self._interrupt(run.claim.job_id, "timeout")
            elif (
                run.interrupt is not None and not run.thread and run.process is None and now - run.asked_at >= ASK_AGAIN
            ):
                self._ask_again(run, now)
        if again:
            self.watch()

    def _ask_again(self, run: Running, now: float) -> None:
        """A coroutine that swallowed its timeout holds its slot: tell once, and cancel it again."""
        run.asked_at = now
        if run.task is not None:
            run.task.cancel()
        if not run.deaf:
            run.deaf = True
            log.warning(
                "job.timeout_ignored",
                job_id=run.claim.job_id,
                task=run.claim.task,
                timeout=run.policy.timeout,
                seconds=round(now - run.started, 1),
            )

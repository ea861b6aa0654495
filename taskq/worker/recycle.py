"""When a worker process has done or grown enough, and should make way for a fresh one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Final

from taskq.telemetry import get_logger
from taskq.worker.claims import Counts
from taskq.worker.memory import resident_bytes
from taskq.worker.options import WorkerOptions

log = get_logger("worker")

LOOK_EVERY: Final = 0.25
SPREAD: Final = 0.1
"""Each process takes bounds of its own, up to so much below or above those given, so that many do not end at once."""


class Recycler:
    """Looks whether a bound is reached.

    Args:
        options: With ``max_jobs`` and ``max_memory``.
        counts: What the worker has done.
        on_due: Called once, when a bound is reached.
    """

    def __init__(self, options: WorkerOptions, counts: Counts, on_due: Callable[[], object]) -> None:
        self._counts = counts
        self._on_due = on_due
        spread = 1 + random.uniform(-SPREAD, SPREAD)
        self._max_jobs = None if options.max_jobs is None else max(1, round(options.max_jobs * spread))
        self._max_memory = None if options.max_memory is None else options.max_memory * spread

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            if reason := self._reached():
                break
        log.info("worker.recycling", reason=reason, jobs=self._jobs, resident=resident_bytes())
        self._on_due()
        await asyncio.get_running_loop().create_future()

    @property
    def _jobs(self) -> int:
        counts = self._counts
        return counts.succeeded + counts.failed + counts.cancelled + counts.retried

    def _reached(self) -> str | None:
        if self._max_jobs is not None and self._jobs >= self._max_jobs:
            return "max_jobs"
        if self._max_memory is not None and resident_bytes() >= self._max_memory:
            return "max_memory"
        return None

"""How a worker comes to rest: draining, bodies that cannot be stopped, and the last words to the database.

The first signal drains: nothing more is claimed, bodies go on, lease and cancels are still served. What still runs when
the grace is over is interrupted and handed back without using an attempt. A second signal, at least a second later,
ends the grace at once. Functions in threads cannot be stopped, nor can coroutines that swallow their cancellation; a
process that leaves some behind must be gone before another worker may start their jobs.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import UUID

from taskq.telemetry import get_logger
from taskq.worker.claims import Claim, Counts
from taskq.worker.complete import Outbox
from taskq.worker.connection import DATABASE_ERRORS, Connection
from taskq.worker.disposition import Interrupted, decide
from taskq.worker.exchange import Exchanger
from taskq.worker.execute import Executor
from taskq.worker.registration import Registration
from taskq.worker.report import keep_end
from taskq.worker.running import Running

log = get_logger("worker")

EXIT_OK = 0
EXIT_NOT_FLUSHED = 1
"""Outcomes were left that the database had not confirmed."""
EXIT_STUCK = 76
"""A function in a thread outlived its timeout; the process must end to end it, and should be started again."""
EXIT_RECYCLED = 77
"""The worker had done ``max_jobs``, or grown to ``max_memory``; it should be started again."""

TICK = 0.25
SECOND_SIGNAL_AFTER = 1.0
"""Signals closer together than this are one: some supervisors send each twice."""
PATIENCE = 1.0
"""Seconds that bodies which were told to stop are waited for, before the process ends without them."""
ABANDON_DELAY = 3.0
"""Seconds after which a body that was left running may start elsewhere: this process must be gone by then."""
GONE_WITHIN = ABANDON_DELAY - 1.0
"""Seconds after the first sending of such a hand-back at which the process is ended, whatever the database does."""
LAST_WORDS = 2.0
"""Seconds that the database gets for each courtesy at the end."""


class Shutdown:
    """Stops the parts of one worker in good order.

    Args:
        queries: The named statements of ``db/sql/worker.sql``.
        conn: A connection for statements beside the exchange.
        executor: The bodies.
        exchanger: The main loop.
        outbox: Ends that are not confirmed yet.
        registration: The worker's registration.
        counts: What is counted.
        grace: Seconds that bodies get to end after the first signal.
        flush_within: Seconds that the database gets to confirm what has ended.
        on_abandoned: Ends the process with the exit code that it is given, from any thread; None where the caller of
            the worker sees to it.
    """

    def __init__(
        self,
        *,
        queries: Mapping[str, str],
        conn: Connection,
        executor: Executor,
        exchanger: Exchanger,
        outbox: Outbox,
        registration: Registration,
        counts: Counts,
        grace: float,
        flush_within: float,
        on_abandoned: Callable[[int], object] | None = None,
    ) -> None:
        self._sql = queries
        self._conn = conn
        self._executor = executor
        self._exchanger = exchanger
        self._outbox = outbox
        self._registration = registration
        self._counts = counts
        self._grace = grace
        self._flush_within = flush_within
        self._on_abandoned = on_abandoned
        self._loop = asyncio.get_running_loop()
        self._abandoned: set[tuple[UUID, int]] = set()

    @property
    def has_abandoned(self) -> bool:
        """Whether bodies were left running."""
        return bool(self._abandoned)

    def is_abandoned(self, claim: Claim) -> bool:
        """Whether this attempt has been ended without its body, so that what the body says comes too late."""
        return bool(self._abandoned) and (claim.job_id, claim.claim_epoch) in self._abandoned

    async def drain(self, force: asyncio.Event) -> int:
        """End in good order; ``force`` ends the grace. Returns the exit code."""
        executor = self._executor
        log.info("worker.draining", worker_id=self._registration.worker_id, bodies=executor.busy, grace=self._grace)
        self._exchanger.block("draining")
        telling = self._loop.create_task(self._tell("drain_worker"))
        if not await self._bodies_end(self._grace, until=force):
            log.warning("worker.grace_over", bodies=executor.busy)
            executor.interrupt_all("shutdown")
            await self._bodies_end(PATIENCE)
        flushed = await self.flush() and await self._release_strays()
        telling.cancel()
        code = EXIT_OK if flushed else EXIT_NOT_FLUSHED
        if executor.busy:
            # Last, since from now on another worker may start them.
            return await self._leave_behind(list(executor.running.values()), code)
        return code

    async def until_stuck(self) -> int:
        """Return the exit code once nothing is left but threads that have outlived their timeout, and cannot end."""
        since: float | None = None
        while True:
            await asyncio.sleep(TICK)
            now = self._loop.time()
            stuck = [r for r in self._executor.stuck() if now - (r.timed_out_at or now) > PATIENCE]
            if not stuck:
                if since is not None:
                    since = None
                    self._exchanger.unblock("stuck")
                continue
            if since is None:
                since = now
                log.error(
                    "worker.stuck_thread",
                    jobs=",".join(str(r.claim.job_id) for r in stuck),
                    exit_code=EXIT_STUCK,
                    action="draining, then exit: a thread cannot be stopped",
                )
            self._exchanger.block("stuck")
            if self._executor.busy == len(stuck) and not self._exchanger.in_flight:
                if not await self.flush():
                    return EXIT_NOT_FLUSHED
                return await self._leave_behind(stuck, EXIT_STUCK)

    async def flush(self) -> bool:
        """Wait until every end is confirmed and no claim is on its way; False when the database does not answer."""
        deadline = self._loop.time() + self._flush_within
        while self._outbox.pending or self._exchanger.in_flight:
            if not self._exchanger.in_flight:
                self._exchanger.nudge()
            if self._loop.time() > deadline:
                log.error("worker.outcomes_not_sent", outcomes=self._outbox.pending)
                return False
            await asyncio.sleep(0.01)
        return True

    async def say_goodbye(self) -> None:
        """The worker's row is stopped, unless claims are left: then its lease runs out and they are settled."""
        await self._tell("stop_worker")

    async def _tell(self, query: str) -> list[Any]:
        worker_id = self._registration.worker_id
        if worker_id is None:
            return []
        with suppress(*DATABASE_ERRORS):
            async with asyncio.timeout(LAST_WORDS):
                return await self._conn.fetch(self._sql[query], worker_id)
        return []

    async def _release_strays(self) -> bool:
        """Hand back claims that the database says are held here, and whose answer was lost on the way."""
        worker_id = self._registration.worker_id
        here = {(r.claim.job_id, r.claim.claim_epoch) for r in self._executor.running.values()}
        for row in await self._tell("renew"):
            key = (row["job_id"], row["claim_epoch"])
            if row["job_id"] is None or row["status"] == "unknown":
                continue
            if key not in here and worker_id is not None:
                self._exchanger.release(worker_id, *key)
                log.warning("job.claim_without_body", job_id=key[0], claim_epoch=key[1], action="released")
        return await self.flush()

    async def _bodies_end(self, within: float, until: asyncio.Event | None = None) -> bool:
        """Wait until no body runs; False when the time is over, or ``until`` is set, before."""
        waits: list[asyncio.Task[Any]] = [self._loop.create_task(self._executor.until_empty())]
        if until is not None:
            waits.append(self._loop.create_task(until.wait()))
        await asyncio.wait(waits, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return not self._executor.busy

    async def _leave_behind(self, runs: Iterable[Running], code: int) -> int:
        """End attempts whose bodies cannot be stopped, and with them the process, if that is ours to end.

        A timer of its own thread ends it when database or loop stall: it is armed before anything is sent.
        """
        if self._on_abandoned is not None:
            timer = threading.Timer(GONE_WITHIN, self._on_abandoned, (EXIT_NOT_FLUSHED,))
            timer.daemon = True
            timer.start()
        for run in runs:
            self._abandon(run)
        if not await self.flush():
            code = EXIT_NOT_FLUSHED
        if self._on_abandoned is not None:
            self._on_abandoned(code)
        return code

    def _abandon(self, run: Running) -> None:
        """End an attempt whose body cannot be stopped: timed out if it has outlived its timeout, else handed back.

        One that may have begun its effect becomes unknown.
        """
        claim = run.claim
        timed_out = run.interrupt == "timeout" and run.phase != "preparing"
        self._abandoned.add((claim.job_id, claim.claim_epoch))
        decided = decide(claim, run.policy, Interrupted("timeout" if timed_out else "shutdown"))
        decided = replace(decided, delay=max(decided.delay, ABANDON_DELAY))
        keep_end(self._outbox, self._counts, claim, decided)
        self._exchanger.nudge()
        log.warning("job.abandoned", job_id=claim.job_id, task=claim.task, timed_out=timed_out)

"""The registration of a worker: its row, its lease, and what follows when the lease fails.

Everything here runs in the event loop; the lease thread hands its news over with ``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from uuid import UUID

from taskq.telemetry import get_logger
from taskq.worker.complete import Outbox
from taskq.worker.connection import DATABASE_ERRORS, Connection
from taskq.worker.exchange import Exchanger
from taskq.worker.execute import Executor
from taskq.worker.lease import LeaseKeeper, Renewal, boot_clock

log = get_logger("worker")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says about itself when it registers."""

    name: str
    hostname: str
    pid: int
    queues: tuple[str, ...]
    tasks: tuple[str, ...]
    concurrency: int
    capability_level: int
    version: str
    lease: float


class Registration:
    """Registers, keeps claims and bodies in agreement at each renewal, and registers anew after a loss.

    Args:
        identity: What to register.
        queries: The named statements of ``db/sql/worker.sql``.
        conn: A connection for statements beside the exchange.
        executor: The bodies.
        exchanger: The main loop.
        outbox: Ends that are not confirmed yet.
        on_registered: Called with each new worker id.
        on_drain: Called when the database says that an operator asked this worker to stop.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        queries: Mapping[str, str],
        conn: Connection,
        executor: Executor,
        exchanger: Exchanger,
        outbox: Outbox,
        on_registered: Callable[[UUID], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._identity = identity
        self._sql = queries
        self._conn = conn
        self._executor = executor
        self._exchanger = exchanger
        self._outbox = outbox
        self._on_registered = on_registered
        self._on_drain = on_drain
        self._unmatched: dict[tuple[UUID, int], int] = {}
        self._anew: asyncio.Task[None] | None = None
        self._drained = False
        self.keeper: LeaseKeeper | None = None
        self.worker_id: UUID | None = None

    async def register(self) -> UUID:
        """Register once; the lease begins when the statement is sent."""
        i = self._identity
        sent_at = boot_clock()
        [row] = await self._conn.fetch(
            self._sql["register_worker"],
            i.name,
            i.hostname,
            i.pid,
            list(i.queues),
            list(i.tasks),
            i.concurrency,
            i.capability_level,
            i.version,
            i.lease,
        )
        worker_id: UUID = row["id"]
        self.worker_id = worker_id
        self._unmatched = {}
        self._on_registered(worker_id)
        self._exchanger.registered_anew(worker_id)
        if self.keeper is not None:
            self.keeper.hold(worker_id, sent_at)
        self._exchanger.unblock("lease")
        self._exchanger.unblock("registering")
        return worker_id

    def expiring(self) -> None:
        """The lease could not be renewed in time: stop every body before the database would declare the worker lost."""
        self._exchanger.block("lease")
        self._executor.interrupt_all("lease")

    def renewed(self, renewal: Renewal) -> None:
        """A renewal was answered."""
        if renewal.worker_id != self.worker_id:
            return
        if renewal.status not in ("live", "draining"):
            self._lost(renewal.status)
            return
        # A worker that stops by itself has said so in its row, which is no news.
        stops = self._drained or self._exchanger.is_blocked("draining") or self._exchanger.is_blocked("stuck")
        if renewal.status == "draining" and not stops:
            self._drained = True
            log.info("worker.drain_requested", worker_id=self.worker_id)
            self._on_drain()
        if self._exchanger.is_blocked("lease") and not self._executor.interruptible:
            self._exchanger.unblock("lease")
            log.info("lease.renewed_again", worker_id=self.worker_id)
        for held in renewal.held:
            if held.cancel_requested:
                self._executor.interrupt(held.job_id, "cancel", held.claim_epoch)
        self._compare(renewal)
        self._exchanger.nudge()

    def _compare(self, renewal: Renewal) -> None:
        """Release claims that have no body here: their answer was lost on the way.

        A claim counts as such only if it was unmatched at two renewals, and no exchange that was on its way at the
        first is still on its way at the second.
        """
        waiting = self._executor.waiting_keys()
        before, self._unmatched = self._unmatched, {}
        for held in renewal.held:
            key = (held.job_id, held.claim_epoch)
            run = self._executor.running.get(held.job_id)
            if run is not None and run.claim.claim_epoch == held.claim_epoch:
                continue
            # What is unknown has no body to come, and is not for a worker to hand back.
            if held.status == "unknown" or key in waiting or self._outbox.holds(*key):
                continue
            sent_when_seen = before.get(key)
            if sent_when_seen is None or 0 < self._exchanger.in_flight <= sent_when_seen:
                self._unmatched[key] = self._exchanger.started if sent_when_seen is None else sent_when_seen
            else:
                self._exchanger.release(renewal.worker_id, *key)
                log.warning("job.claim_without_body", job_id=key[0], claim_epoch=key[1], action="released")

    def _lost(self, status: str) -> None:
        if self._anew is not None and not self._anew.done():
            return
        bodies = self._executor.busy
        self._exchanger.block("registering")
        self._executor.interrupt_all("lease")
        log.error("worker.lease_taken", worker_id=self.worker_id, status=status, bodies=bodies)
        self._anew = asyncio.get_running_loop().create_task(self._register_anew(), name="taskq-register-anew")

    async def _register_anew(self) -> None:
        """Start over under a new id once every body has ended that can be stopped.

        Ends of the old id are fenced out, or settle an unknown job: a body that may have begun its effect goes on.
        """
        await self._executor.until_interrupted()
        while True:
            try:
                worker_id = await self.register()
            except DATABASE_ERRORS as exc:
                await self._conn.pause_after_failure(exc)
            else:
                log.warning("worker.registered_anew", worker_id=worker_id)
                return

    async def close(self) -> None:
        """Stop a re-registration that is under way."""
        if self._anew is not None:
            self._anew.cancel()
            await asyncio.gather(self._anew, return_exceptions=True)

"""The parts of a worker: how they are wired to each other, and how they are closed."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from uuid import UUID

from taskq.db.queries import load
from taskq.policy import ExecutionPolicy
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.version import CAPABILITY_LEVEL, __version__
from taskq.worker.claims import Claim, Counts
from taskq.worker.complete import Outbox
from taskq.worker.connection import DATABASE_ERRORS, Connection
from taskq.worker.disposition import BodyEnd, ReleaseReason
from taskq.worker.effect_start import EffectStarts
from taskq.worker.exchange import Exchanger
from taskq.worker.execute import Executor
from taskq.worker.health import Vitals
from taskq.worker.lease import LeaseKeeper, Progress, Renewal
from taskq.worker.maintenance import Maintenance
from taskq.worker.options import WorkerOptions
from taskq.worker.policies import PolicyCache
from taskq.worker.preparing import Preparer
from taskq.worker.process_pool import Launch
from taskq.worker.registration import Identity, Registration
from taskq.worker.running import effects, overlapping
from taskq.worker.safe import SafeBodies
from taskq.worker.safe_block import Blocks
from taskq.worker.safe_settle import BlockSettler
from taskq.worker.shutdown import LAST_WORDS, Shutdown
from taskq.worker.wake import Listener

log = get_logger("worker")

PING_EVERY = 5.0
AT_ONCE = 0.5
"""Seconds for closing what can be closed when bodies were left behind."""


class Hooks(Protocol):
    """What the parts tell the worker that they belong to."""

    def body_ended(self, claim: Claim, policy: ExecutionPolicy, end: BodyEnd) -> None:
        """A body has ended."""

    def why_released(self) -> ReleaseReason:
        """Why claims are handed back just now."""

    def surveyed(self, rows: list[Any]) -> None:
        """A survey has come, in rows of ``kind``, ``name`` and ``n``."""

    def renewed(self, renewal: Renewal) -> None:
        """The lease was renewed; called from the keeper's thread."""

    def expiring(self) -> None:
        """The lease is about to end; called from the keeper's thread."""

    def cancel_requested(self, worker_id: UUID, job_id: UUID, claim_epoch: int) -> None:
        """Somebody wants a running job cancelled."""

    def drain(self) -> None:
        """An operator wants this worker to drain."""


@dataclass(slots=True)
class Parts:
    """The parts, each of which has a module of its own; there is one set for each run of a worker."""

    queries: Mapping[str, str]
    progress: Progress
    conn: Connection
    side: Connection
    upkeep: Connection
    preparing: Connection
    outbox: Outbox
    starts: EffectStarts
    executor: Executor
    exchanger: Exchanger
    maintenance: Maintenance
    registration: Registration
    keeper: LeaseKeeper
    shutdown: Shutdown
    listener: Listener
    blocks: Blocks
    safe: SafeBodies
    settler: BlockSettler

    def vitals(self, options: WorkerOptions) -> Vitals:
        """What the health endpoint looks at."""
        return Vitals(
            progress=self.progress,
            keeper=self.keeper,
            exchanger=self.exchanger,
            lease=options.lease,
            tolerance=options.tolerance,
        )

    async def close(
        self, running: Sequence[asyncio.Task[Any]], code: int, on_abandoned: Callable[[int], object] | None
    ) -> bool:
        """End the parts that run, and close all.

        Args:
            running: The tasks of the parts.
            code: The exit code of the worker.
            on_abandoned: Ends the process where bodies are left behind.

        Returns:
            Whether all is closed; otherwise bodies are left, and the process must end.
        """
        self.exchanger.close()
        if self.shutdown.has_abandoned:
            await self._close_at_once(running)
            return False
        # More than once: before Python 3.12 wait_for drops a cancellation that arrives with what it waited for.
        while any(not part.done() for part in running):
            for part in running:
                part.cancel()
            await asyncio.wait(running, timeout=0.5)
        await asyncio.gather(*running, return_exceptions=True)
        await self.registration.close()
        await self.executor.close()
        await self.starts.close()
        if self.executor.left_behind:
            # Their claims stand, so the lease is kept: when it ends with the loop, the keeper ends the process.
            log.critical("worker.bodies_left", bodies=self.executor.left_behind, exit_code=code)
            if on_abandoned is not None:
                on_abandoned(code)
            return False
        with suppress(*DATABASE_ERRORS):
            async with asyncio.timeout(LAST_WORDS):
                await self.maintenance.resign()
        if self.side.is_open:
            await self.shutdown.say_goodbye()
        if self.keeper.is_alive():
            self.keeper.halt()
            await asyncio.to_thread(self.keeper.join, LAST_WORDS)
        for conn in (self.conn, self.side, self.upkeep, self.preparing):
            await conn.close()
        await self._close_safe()
        return True

    async def _close_safe(self) -> None:
        self.settler.close()
        await self.blocks.close()
        await self.safe.close()

    async def _close_at_once(self, running: Sequence[asyncio.Task[Any]]) -> None:
        """Their jobs may start elsewhere soon: wait for nothing that a body or the database could hold up."""
        for part in running:
            part.cancel()
        if self.keeper.is_alive():
            self.keeper.halt()
        with suppress(TimeoutError):
            async with asyncio.timeout(AT_ONCE):
                await self.executor.close(within=0)
                await self.starts.close()
                await self.registration.close()
                closing = (c.close() for c in (self.conn, self.side, self.upkeep, self.preparing))
                await asyncio.gather(*running, *closing, self._close_safe(), return_exceptions=True)


def build_parts(
    hooks: Hooks,
    tasks: dict[str, Task[..., Any]],
    queues: Sequence[str],
    dsn: str,
    schema: str,
    options: WorkerOptions,
    counts: Counts,
    launch: Launch,
    on_abandoned: Callable[[int], object] | None,
) -> Parts:
    """The parts of one run, wired to each other; nothing connects or starts yet."""

    # These are made in a circle: some call those that are made later.
    def recovered() -> None:
        listener.retry_now()

    def may_start() -> bool:
        return keeper.remaining > 0

    def lease_refused() -> None:
        keeper.renew_soon()

    def registered(worker_id: UUID) -> None:
        maintenance.worker_id = worker_id

    queries = load("worker", schema)
    progress = Progress()
    # What is not answered within a lease is better asked anew: sent again, nothing happens twice.
    patience = max(5.0, options.lease)
    conn = Connection(
        dsn,
        "taskq exchange",
        timeout=patience,
        on_progress=progress.pool,
        on_recovered=recovered,
    )
    side = Connection(dsn, "taskq side", timeout=patience)
    upkeep = Connection(dsn, "taskq maintenance", timeout=120)
    preparing = Connection(dsn, "taskq prepare", timeout=patience)
    outbox = Outbox(hooks.why_released)
    starts = EffectStarts(queries["start_effects"], side, may_start, lease_refused)
    executor = Executor(
        tasks,
        options.concurrency,
        hooks.body_ended,
        may_start,
        launch,
        starts.ask,
        Preparer(queries, preparing, may_start),
    )
    exchanger = Exchanger(
        queries=queries,
        conn=conn,
        executor=executor,
        outbox=outbox,
        tasks=tasks,
        queues=list(queues),
        concurrency=options.concurrency,
        poll_interval=options.poll_interval,
        ping_every=min(PING_EVERY, options.tolerance / 4),
        policies=PolicyCache(queries, tasks),
        counts=counts,
        ends_async=options.ends_commit == "async",
        on_lease_refused=lease_refused,
    )
    maintenance = Maintenance(
        queries, upkeep, options.lease, queues=queues, tasks=sorted(tasks), on_survey=hooks.surveyed
    )
    registration = Registration(
        identity=Identity(
            name=options.name,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            queues=tuple(queues),
            tasks=tuple(sorted(tasks)),
            concurrency=options.concurrency,
            capability_level=CAPABILITY_LEVEL,
            version=__version__,
            lease=options.lease,
        ),
        queries=queries,
        conn=side,
        executor=executor,
        exchanger=exchanger,
        outbox=outbox,
        on_registered=registered,
        on_drain=hooks.drain,
    )
    keeper = LeaseKeeper(
        dsn=dsn,
        query=queries["renew"],
        lease=options.lease,
        progress=progress,
        tolerance=options.tolerance,
        bodies=lambda: overlapping(executor.running.values()),
        effects=lambda: effects(executor.running.values()),
        on_renewed=hooks.renewed,
        on_expiring=hooks.expiring,
    )
    registration.keeper = keeper
    blocks = Blocks(
        queries=queries,
        dsn=dsn,
        tasks=tasks,
        concurrency=options.concurrency,
        patience=patience,
        ends_async=options.ends_commit == "async",
    )
    safe = SafeBodies(
        queries=queries, dsn=dsn, lease=keeper, blocks=blocks, concurrency=options.concurrency, patience=patience
    )
    executor.services = safe
    settler = BlockSettler(blocks, executor, outbox, exchanger, counts, hooks.body_ended)
    shutdown = Shutdown(
        queries=queries,
        conn=side,
        executor=executor,
        exchanger=exchanger,
        outbox=outbox,
        registration=registration,
        counts=counts,
        grace=options.grace,
        flush_within=max(5.0, options.lease),
        on_abandoned=on_abandoned,
    )
    listener = Listener(
        dsn,
        schema,
        queues,
        worker_id=lambda: registration.worker_id,
        on_wake=exchanger.notified,
        on_cancel=hooks.cancel_requested,
        on_due=maintenance.told,
    )
    return Parts(
        queries=queries,
        progress=progress,
        conn=conn,
        side=side,
        upkeep=upkeep,
        preparing=preparing,
        outbox=outbox,
        starts=starts,
        executor=executor,
        exchanger=exchanger,
        maintenance=maintenance,
        registration=registration,
        keeper=keeper,
        shutdown=shutdown,
        listener=listener,
        blocks=blocks,
        safe=safe,
        settler=settler,
    )

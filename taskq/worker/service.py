"""The worker as a whole: it boots, runs its parts, and closes them; ``shutdown`` has how they come to rest."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from uuid import UUID

from taskq import errors, migrate
from taskq.db.dsn import describe_dsn
from taskq.db.queries import load
from taskq.policy import ExecutionPolicy
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.version import CAPABILITY_LEVEL, __version__
from taskq.worker.admission import until_admitted
from taskq.worker.claims import Claim, Counts
from taskq.worker.complete import Outbox, make_end
from taskq.worker.connection import DATABASE_ERRORS, Connection
from taskq.worker.disposition import BodyEnd, ReleaseReason, decide
from taskq.worker.exchange import Exchanger
from taskq.worker.execute import Executor
from taskq.worker.health import HealthServer, Vitals
from taskq.worker.lease import LeaseKeeper, Progress, Renewal
from taskq.worker.maintenance import Maintenance
from taskq.worker.options import WorkerOptions
from taskq.worker.policies import PolicyCache
from taskq.worker.process_pool import Launch
from taskq.worker.process_tasks import check_findable, place_of
from taskq.worker.publish import publish
from taskq.worker.recycle import Recycler
from taskq.worker.registration import Identity, Registration
from taskq.worker.report import report
from taskq.worker.shutdown import (
    EXIT_NOT_FLUSHED,
    EXIT_OK,
    EXIT_RECYCLED,
    EXIT_STUCK,
    LAST_WORDS,
    SECOND_SIGNAL_AFTER,
    Shutdown,
)
from taskq.worker.wake import Listener

log = get_logger("worker")

__all__ = ["EXIT_NOT_FLUSHED", "EXIT_OK", "EXIT_RECYCLED", "EXIT_STUCK", "Worker", "WorkerOptions"]

TICK = 0.25
PING_EVERY = 5.0
AT_ONCE = 0.5
"""Seconds for closing what can be closed when bodies were left behind."""


class Worker:
    """One worker in this process.

    Args:
        tasks: The tasks that it knows, by name.
        dsn: The database.
        schema: taskq's schema there.
        options: How it works.
        on_abandoned: Ends the process with the exit code that it is given, and never returns; called, from any thread,
            when bodies are left behind that could not be stopped. Without it ``run`` returns, and the caller must end
            the process: three seconds after their hand-back those jobs may start elsewhere.
        app: The application as ``module:attribute``, for child processes to import; without it they import the modules
            of the functions with ``process=True``.
        on_recycle: Called once when ``max_jobs`` or ``max_memory`` is reached, and the worker goes on until it is
            stopped; without it the worker stops by itself then, and ``run`` returns ``EXIT_RECYCLED``.

    Raises:
        ConfigurationError: There are no tasks, or one with ``process=True`` that no child process could find.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task[..., Any]],
        dsn: str,
        schema: str = "taskq",
        options: WorkerOptions | None = None,
        *,
        on_abandoned: Callable[[int], object] | None = None,
        app: str | None = None,
        on_recycle: Callable[[], object] | None = None,
    ) -> None:
        self.options = options or WorkerOptions()
        self._on_abandoned = on_abandoned
        self._code = EXIT_NOT_FLUSHED
        self._tasks = dict(tasks)
        if not self._tasks:
            raise errors.ConfigurationError("the app has no tasks, so a worker has nothing to run; register some first")
        self._in_processes = [task for task in self._tasks.values() if task.process]
        check_findable(self._in_processes, app)
        self._app = app
        self._dsn = dsn
        self._schema = schema
        self._queues = self.options.queues or tuple(sorted({t.policy.queue for t in self._tasks.values()}))
        self.counts = Counts()
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._on_recycle = on_recycle
        self._recycled = False
        self._first_stop: float | None = None
        self._reported_unknown: set[str] = set()
        self.ready = asyncio.Event()
        """Set once the worker is registered and claims."""

    @property
    def has_abandoned(self) -> bool:
        """Whether bodies were left running that could not be stopped: the process must end at once."""
        return hasattr(self, "_shutdown") and (self._shutdown.has_abandoned or self._executor.left_behind > 0)

    @property
    def worker_id(self) -> UUID | None:
        """The current registration."""
        return self._registration.worker_id if hasattr(self, "_registration") else None

    def stop(self) -> None:
        """Drain and stop; called again at least a second later, stop at once. For signal handlers."""
        now = asyncio.get_running_loop().time()
        if self._first_stop is None:
            self._first_stop = now
            self._stop.set()
        elif now - self._first_stop >= SECOND_SIGNAL_AFTER:
            self._force.set()

    async def run(self, *, signals: bool = False) -> int:
        """Work until stopped.

        At boot it waits for a database that answers and takes no worker just now: without a free connection, starting,
        or read-only, as a standby is until it is promoted.

        Args:
            signals: Whether SIGTERM and SIGINT stop it.

        Returns:
            The exit code: 0, ``EXIT_STUCK``, ``EXIT_NOT_FLUSHED`` or ``EXIT_RECYCLED``. Stopped before it was ready,
            it has claimed nothing, and gives 0 whatever else was wrong.

        Raises:
            ConfigurationError: The health endpoint cannot listen at its port.
            MigrationError: The schema is behind or ahead of this code.
            OSError, asyncpg.PostgresError: The database cannot be reached at boot.
        """
        options = self.options
        if options.health_port is None:
            return await self._run_safely(None, signals)
        health = HealthServer(options.health_host, options.health_port)
        try:
            health.start()
            log.info("health.listening", host=options.health_host, port=health.port)
            return await self._run_safely(health, signals)
        finally:
            health.close()

    async def _run_safely(self, health: HealthServer | None, signals: bool) -> int:
        try:
            return await self._run(health, signals)
        except Exception:
            if self._stop.is_set() and not self.ready.is_set():
                log.info("worker.stopped_at_boot")
                return EXIT_OK
            raise

    async def _run(self, health: HealthServer | None, signals: bool) -> int:
        loop = asyncio.get_running_loop()
        if signals:
            for sig in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(sig, self.stop)
        await until_admitted(
            lambda: asyncio.to_thread(migrate.check_compatible, self._dsn, self._schema), self._stop, self._dsn
        )
        self._build()
        try:
            await self._boot()
            if health is not None:
                health.vitals = self._vitals()
            code = await self._serve()
            self._code = EXIT_RECYCLED if self._recycled and code == EXIT_OK else code
            return self._code
        except Exception:
            if self._executor.busy:
                log.exception("worker.failed", bodies=self._executor.busy)
            raise
        finally:
            await self._close()
            if signals:
                for sig in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(sig)

    # Building and booting -----------------------------------------------------------------------------------------

    def _vitals(self) -> Vitals:
        return Vitals(
            progress=self._progress,
            keeper=self._keeper,
            exchanger=self._exchanger,
            lease=self.options.lease,
            tolerance=self.options.tolerance,
        )

    def _build(self) -> None:
        options = self.options
        self._loop = asyncio.get_running_loop()
        self._sql = load("worker", self._schema)
        self._progress = Progress()
        # What is not answered within a lease is better asked anew: sent again, nothing happens twice.
        patience = max(5.0, options.lease)
        self._conn = Connection(
            self._dsn,
            "taskq exchange",
            timeout=patience,
            on_progress=self._progress.pool,
            on_recovered=self._listen_now,
        )
        self._side = Connection(self._dsn, "taskq side", timeout=patience)
        self._upkeep = Connection(self._dsn, "taskq maintenance", timeout=120)
        self._outbox = Outbox(self._why_released)
        launch = Launch(
            app=self._app,
            tasks=tuple(map(place_of, self._in_processes)),
            dsn=self._dsn,
            schema=self._schema,
            max_bodies=options.child_max_jobs,
            max_memory=options.child_max_memory,
        )
        self._executor = Executor(self._tasks, options.concurrency, self._ended, self._may_start, launch)
        self._exchanger = Exchanger(
            queries=self._sql,
            conn=self._conn,
            executor=self._executor,
            outbox=self._outbox,
            tasks=sorted(self._tasks),
            queues=list(self._queues),
            concurrency=options.concurrency,
            poll_interval=options.poll_interval,
            ping_every=min(PING_EVERY, options.tolerance / 4),
            policies=PolicyCache(self._sql, self._tasks),
            counts=self.counts,
            on_lease_refused=self._lease_refused,
        )
        self._maintenance = Maintenance(
            self._sql,
            self._upkeep,
            options.lease,
            queues=self._queues,
            tasks=sorted(self._tasks),
            on_survey=self._surveyed,
        )
        self._registration = Registration(
            identity=Identity(
                name=options.name,
                hostname=socket.gethostname(),
                pid=os.getpid(),
                queues=tuple(self._queues),
                tasks=tuple(sorted(self._tasks)),
                concurrency=options.concurrency,
                capability_level=CAPABILITY_LEVEL,
                version=__version__,
                lease=options.lease,
            ),
            queries=self._sql,
            conn=self._side,
            executor=self._executor,
            exchanger=self._exchanger,
            outbox=self._outbox,
            on_registered=self._registered,
            on_drain=self._stop.set,
        )
        self._keeper = LeaseKeeper(
            dsn=self._dsn,
            query=self._sql["renew"],
            lease=options.lease,
            progress=self._progress,
            tolerance=options.tolerance,
            bodies=lambda: self._executor.busy,
            on_renewed=self._from_thread_renewed,
            on_expiring=lambda: self._from_thread(self._registration.expiring),
        )
        self._registration.keeper = self._keeper
        self._shutdown = Shutdown(
            queries=self._sql,
            conn=self._side,
            executor=self._executor,
            exchanger=self._exchanger,
            outbox=self._outbox,
            registration=self._registration,
            counts=self.counts,
            grace=options.grace,
            flush_within=max(5.0, options.lease),
            on_abandoned=self._on_abandoned,
        )
        self._listener = Listener(
            self._dsn,
            self._schema,
            self._queues,
            worker_id=lambda: self.worker_id,
            on_wake=self._exchanger.notified,
            on_cancel=self._cancel_requested,
        )
        self._background: list[asyncio.Task[None]] = []

    async def _boot(self) -> None:
        """Register and begin to claim, unless it is stopped before that."""
        worker_id = await until_admitted(self._registration.register, self._stop, self._dsn)
        await until_admitted(lambda: publish(self._sql, self._side, worker_id, self._tasks), self._stop, self._dsn)
        self._keeper.start()
        self._executor.start()
        create = self._loop.create_task
        self._main = create(self._exchanger.run(), name="taskq-exchange")
        self._background = [
            create(self._tick(), name="taskq-tick"),
            create(self._maintenance.run(), name="taskq-maintenance"),
        ]
        if self.options.max_jobs or self.options.max_memory:
            recycler = Recycler(self.options, self.counts, self._recycle)
            self._background.append(create(recycler.run(), name="taskq-recycle"))
        if self.options.listen:
            self._background.append(create(self._listener.run(), name="taskq-listen"))
        log.info(
            "worker.started",
            worker_id=worker_id,
            name=self.options.name,
            queues=",".join(self._queues),
            tasks=len(self._tasks),
            concurrency=self.options.concurrency,
            database=describe_dsn(self._dsn),
        )
        self.ready.set()

    def _registered(self, worker_id: UUID) -> None:
        self._maintenance.worker_id = worker_id

    # While it runs --------------------------------------------------------------------------------------------------

    async def _serve(self) -> int:
        stop = self._loop.create_task(self._stop.wait())
        stuck = self._loop.create_task(self._shutdown.until_stuck(), name="taskq-stuck")
        try:
            await asyncio.wait([stop, stuck, self._main, *self._background], return_when=asyncio.FIRST_COMPLETED)
            if stuck.done() and not stuck.cancelled() and stuck.exception() is None:
                return stuck.result()
            parts: list[asyncio.Task[Any]] = [stuck, self._main, *self._background]
            for part in parts:
                if part.done():
                    # A part never ends by itself: this is a defect of ours, and better a dead worker than a half one.
                    part.result()
                    raise RuntimeError(f"{part.get_name()} ended by itself")
            stuck.cancel()
            return await self._until_drained()
        finally:
            stop.cancel()
            stuck.cancel()
            await asyncio.gather(stop, stuck, return_exceptions=True)

    async def _until_drained(self) -> int:
        drained = self._loop.create_task(self._shutdown.drain(self._force))
        try:
            await asyncio.wait([drained, self._main], return_when=asyncio.FIRST_COMPLETED)
            if not drained.done():
                self._main.result()
                raise RuntimeError(f"{self._main.get_name()} ended by itself")
            return drained.result()
        finally:
            drained.cancel()
            await asyncio.gather(drained, return_exceptions=True)

    def _ended(self, claim: Claim, policy: ExecutionPolicy, end: BodyEnd) -> None:
        if self._shutdown.is_abandoned(claim):
            return
        decided = decide(claim, policy, end)
        # Kept before it is told: whatever telling does, the body is not run again.
        self._outbox.put(make_end(claim, decided))
        self._exchanger.nudge()
        report(self.counts, claim, decided)

    def _why_released(self) -> ReleaseReason:
        blocked = self._exchanger.is_blocked
        if blocked("lease") or blocked("registering"):
            return "lease"
        if blocked("draining"):
            return "shutdown"
        return "stopped" if blocked("stuck") else "stale"

    def _may_start(self) -> bool:
        return self._keeper.remaining > 0

    async def _tick(self) -> None:
        while True:
            self._progress.loop()
            await asyncio.sleep(TICK)

    def _surveyed(self, rows: list[Any]) -> None:
        self._exchanger.suspects_wait(any(row["kind"] == "suspect" for row in rows))
        for row in rows:
            if row["kind"] == "unknown_task" and row["name"] not in self._reported_unknown:
                self._reported_unknown.add(row["name"])
                log.warning(
                    "task.unknown",
                    task=row["name"],
                    waiting=row["n"],
                    hint="left alone; start a worker whose app registers it",
                )

    def _recycle(self) -> None:
        if self._on_recycle is not None:
            self._on_recycle()
        else:
            self._recycled = True
            self._stop.set()

    # News from other threads and sessions ---------------------------------------------------------------------------

    def _from_thread(self, call: Any, *args: Any) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *args)

    def _from_thread_renewed(self, renewal: Renewal) -> None:
        self._from_thread(self._registration.renewed, renewal)

    def _listen_now(self) -> None:
        self._listener.retry_now()

    def _lease_refused(self) -> None:
        self._keeper.renew_soon()

    def _cancel_requested(self, worker_id: UUID, job_id: UUID, claim_epoch: int) -> None:
        if worker_id == self.worker_id:
            self._executor.interrupt(job_id, "cancel", claim_epoch)

    # The end --------------------------------------------------------------------------------------------------------

    async def _close(self) -> None:
        self._exchanger.close()
        if self._shutdown.has_abandoned:
            await self._close_at_once()
            return
        parts = [p for p in (getattr(self, "_main", None), *self._background) if p is not None]
        # More than once: before Python 3.12 wait_for drops a cancellation that arrives with what it waited for.
        while any(not part.done() for part in parts):
            for part in parts:
                part.cancel()
            await asyncio.wait(parts, timeout=0.5)
        await asyncio.gather(*parts, return_exceptions=True)
        await self._registration.close()
        await self._executor.close()
        if self._executor.left_behind:
            # Their claims stand, so the lease is kept: when it ends with the loop, the keeper ends the process.
            log.critical("worker.bodies_left", bodies=self._executor.left_behind, exit_code=self._code)
            if self._on_abandoned is not None:
                self._on_abandoned(self._code)
            return
        with suppress(*DATABASE_ERRORS):
            async with asyncio.timeout(LAST_WORDS):
                await self._maintenance.resign()
        if self._side.is_open:
            await self._shutdown.say_goodbye()
        if self._keeper.is_alive():
            self._keeper.halt()
            await asyncio.to_thread(self._keeper.join, LAST_WORDS)
        for conn in (self._conn, self._side, self._upkeep):
            await conn.close()
        log.info(
            "worker.stopped", worker_id=self.worker_id, **{k: getattr(self.counts, k) for k in self.counts.__slots__}
        )

    async def _close_at_once(self) -> None:
        """Their jobs may start elsewhere soon: wait for nothing that a body or the database could hold up."""
        parts = [self._main, *self._background]
        for part in parts:
            part.cancel()
        if self._keeper.is_alive():
            self._keeper.halt()
        with suppress(TimeoutError):
            async with asyncio.timeout(AT_ONCE):
                await self._executor.close(within=0)
                await self._registration.close()
                closing = (c.close() for c in (self._conn, self._side, self._upkeep))
                await asyncio.gather(*parts, *closing, return_exceptions=True)

"""The worker as a whole: it boots, runs its parts, and closes them; ``shutdown`` has how they come to rest."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

from taskq import errors, migrate
from taskq.db.dsn import describe_dsn
from taskq.policy import ExecutionPolicy
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.worker.admission import until_admitted
from taskq.worker.claims import Claim, Counts
from taskq.worker.disposition import BodyEnd, FencedOut, NotPrepared, ReleaseReason, decide
from taskq.worker.health import HealthServer
from taskq.worker.lease import Renewal
from taskq.worker.options import WorkerOptions
from taskq.worker.parts import build_parts
from taskq.worker.process_pool import Launch
from taskq.worker.process_tasks import check_findable, place_of
from taskq.worker.publish import publish
from taskq.worker.recycle import Recycler
from taskq.worker.report import fenced_out, keep_end, not_prepared
from taskq.worker.shutdown import (
    EXIT_NOT_FLUSHED,
    EXIT_OK,
    EXIT_RECYCLED,
    EXIT_STUCK,
    SECOND_SIGNAL_AFTER,
)

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
        ConfigurationError: There are no tasks, or one with ``process=True`` that no child process could find, or ends
            are to be committed asynchronously and a served queue has a side-effecting task.
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
        for app_of in {task._app for task in self._tasks.values() if task.takes_context}:
            # For the maps and emits of durable bodies; in the queues that these are served in.
            self._tasks |= {each.name: each for each in app_of._of_bodies}
        if self.options.ends_commit == "async":
            _refuse_side_effects(self._tasks, self._queues)
        self.counts = Counts()
        self._stop = asyncio.Event()
        self._force = asyncio.Event()
        self._on_recycle = on_recycle
        self._recycled = False
        self._first_stop: float | None = None
        self._reported_unknown: set[str] = set()
        self._running: list[asyncio.Task[Any]] = []
        self.ready = asyncio.Event()
        """Set once the worker is registered and claims."""

    @property
    def has_abandoned(self) -> bool:
        """Whether bodies were left running that could not be stopped: the process must end at once."""
        return self._is_built and (self.parts.shutdown.has_abandoned or self.parts.executor.left_behind > 0)

    @property
    def worker_id(self) -> UUID | None:
        """The current registration."""
        return self.parts.registration.worker_id if self._is_built else None

    @property
    def _is_built(self) -> bool:
        return hasattr(self, "parts")

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
            NotPermitted: The database's user has not the rights of a worker.
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
        except Exception as exc:
            if self._stop.is_set() and not self.ready.is_set():
                log.info("worker.stopped_at_boot")
                return EXIT_OK
            cause = exc.__cause__ if isinstance(exc, errors.MigrationError) and exc.__cause__ else exc
            denied = errors.not_permitted(cause, f"{self._schema}_worker")
            if denied is not None and not self.ready.is_set():
                raise denied from exc
            raise

    async def _run(self, health: HealthServer | None, signals: bool) -> int:
        self._loop = loop = asyncio.get_running_loop()
        if signals:
            for sig in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(sig, self.stop)
        await until_admitted(
            lambda: asyncio.to_thread(migrate.check_compatible, self._dsn, self._schema), self._stop, self._dsn
        )
        launch = Launch(
            app=self._app,
            tasks=tuple(map(place_of, self._in_processes)),
            dsn=self._dsn,
            schema=self._schema,
            max_bodies=self.options.child_max_jobs,
            max_memory=self.options.child_max_memory,
        )
        self.parts = build_parts(
            self,
            self._tasks,
            self._queues,
            self._dsn,
            self._schema,
            self.options,
            self.counts,
            launch,
            self._on_abandoned,
        )
        try:
            await self._boot()
            if health is not None:
                health.vitals = self.parts.vitals(self.options)
            code = await self._serve()
            self._code = EXIT_RECYCLED if self._recycled and code == EXIT_OK else code
            return self._code
        except Exception:
            if self.parts.executor.busy:
                log.exception("worker.failed", bodies=self.parts.executor.busy)
            raise
        finally:
            closed = await self.parts.close(self._running, self._code, self._on_abandoned)
            if closed and self.worker_id is not None:
                log.info(
                    "worker.stopped",
                    worker_id=self.worker_id,
                    **{k: getattr(self.counts, k) for k in self.counts.__slots__},
                )
            if signals:
                for sig in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(sig)

    # Booting ------------------------------------------------------------------------------------------------------

    async def _boot(self) -> None:
        """Register and begin to claim, unless it is stopped before that."""
        worker_id = await until_admitted(self.parts.registration.register, self._stop, self._dsn)
        await until_admitted(
            lambda: publish(self.parts.queries, self.parts.side, worker_id, self._tasks), self._stop, self._dsn
        )
        self.parts.keeper.start()
        self.parts.executor.start()
        create = self._loop.create_task
        self._main = create(self.parts.exchanger.run(), name="taskq-exchange")
        self._running = [
            self._main,
            create(self._tick(), name="taskq-tick"),
            create(self.parts.maintenance.run(), name="taskq-maintenance"),
        ]
        if self.options.max_jobs or self.options.max_memory:
            recycler = Recycler(self.options, self.counts, self._recycle)
            self._running.append(create(recycler.run(), name="taskq-recycle"))
        if self.options.listen:
            self._running.append(create(self.parts.listener.run(), name="taskq-listen"))
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

    # While it runs --------------------------------------------------------------------------------------------------

    async def _serve(self) -> int:
        stop = self._loop.create_task(self._stop.wait())
        stuck = self._loop.create_task(self.parts.shutdown.until_stuck(), name="taskq-stuck")
        try:
            await asyncio.wait([stop, stuck, *self._running], return_when=asyncio.FIRST_COMPLETED)
            if stuck.done() and not stuck.cancelled() and stuck.exception() is None:
                return stuck.result()
            parts: list[asyncio.Task[Any]] = [stuck, *self._running]
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
        drained = self._loop.create_task(self.parts.shutdown.drain(self._force))
        try:
            await asyncio.wait([drained, self._main], return_when=asyncio.FIRST_COMPLETED)
            if not drained.done():
                self._main.result()
                raise RuntimeError(f"{self._main.get_name()} ended by itself")
            return drained.result()
        finally:
            drained.cancel()
            await asyncio.gather(drained, return_exceptions=True)

    # What the parts tell -------------------------------------------------------------------------------------------

    def body_ended(self, claim: Claim, policy: ExecutionPolicy, end: BodyEnd) -> None:
        """Decide what the end of a body means, and keep that until it is confirmed."""
        if isinstance(end, FencedOut):
            fenced_out(self.counts, claim)
            return
        if isinstance(end, NotPrepared):
            not_prepared(self.counts, claim, end)
            self.parts.exchanger.ended_elsewhere(claim)
            return
        if self.parts.settler.takes(claim, policy, end):
            return
        # What is unknown stays open for what its body still says.
        if self.parts.shutdown.is_abandoned(claim) and not claim.is_unknown:
            return
        keep_end(self.parts.outbox, self.counts, claim, decide(claim, policy, end))
        self.parts.exchanger.nudge()

    def why_released(self) -> ReleaseReason:
        """Why claims are handed back just now."""
        blocked = self.parts.exchanger.is_blocked
        if blocked("lease") or blocked("registering"):
            return "lease"
        if blocked("draining"):
            return "shutdown"
        return "stopped" if blocked("stuck") else "stale"

    async def _tick(self) -> None:
        while True:
            self.parts.progress.loop()
            await asyncio.sleep(TICK)

    def surveyed(self, rows: list[Any]) -> None:
        """Look for suspects if there are any, and name each unknown task once."""
        self.parts.exchanger.suspects_wait(any(row["kind"] == "suspect" for row in rows))
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

    def renewed(self, renewal: Renewal) -> None:
        """The lease was renewed; from the keeper's thread."""
        self._from_thread(self.parts.registration.renewed, renewal)

    def expiring(self) -> None:
        """The lease is about to end; from the keeper's thread."""
        self._from_thread(self.parts.registration.expiring)

    def cancel_requested(self, worker_id: UUID, job_id: UUID, claim_epoch: int) -> None:
        """Interrupt a body that somebody wants cancelled."""
        if worker_id == self.worker_id:
            self.parts.executor.interrupt(job_id, "cancel", claim_epoch)

    def drain(self) -> None:
        """Stop as after SIGTERM, since an operator wants it."""
        self._stop.set()


def _refuse_side_effects(tasks: Mapping[str, Task[..., Any]], queues: Sequence[str]) -> None:
    """Refuse to commit ends asynchronously where one could be that of a side effect.

    One that was enqueued into such a queue for once is ended by a commit that waits: the database sees to that.
    """
    found = sorted(
        t.name for t in tasks.values() if t.policy.effect_class == "side_effecting" and t.policy.queue in queues
    )
    if found:
        queue = tasks[found[0]].policy.queue
        raise errors.ConfigurationError(
            f"ends_commit is 'async', and the task {found[0]} of queue {queue} is side_effecting: its end must not be "
            "lost, or nobody knows whether its effect has happened; give such tasks a queue of their own, served by a "
            "worker with ends_commit='sync', and name the other queues here (--queue)"
        )

"""Running a worker in this process, for the commands that do: its event loop, its log, its exit code."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import asyncpg

import taskq
from taskq import boot
from taskq.app import TaskQ
from taskq.cli.database import not_allowed
from taskq.cli.output import note
from taskq.db.dsn import explain_connection_error, parse_dsn
from taskq.errors import ConfigurationError, DatabaseUnavailable, TaskQError, from_sqlstate
from taskq.policy import check_name
from taskq.settings import Settings
from taskq.telemetry import get_logger
from taskq.worker import Worker, WorkerOptions
from taskq.worker.supervised import READY, WANTS_SUCCESSOR, Supervised

__all__ = ["check_origin", "choose_database", "options_of", "run_worker"]

log = get_logger("worker")

KEEP_EVERY = 0.5
"""Seconds between looks whether SIGTERM and SIGINT still reach the worker."""
LEAVE_WITHIN = 0.5
"""Seconds for what is still to be flushed when the process is ended under bodies that cannot be stopped."""


def check_origin() -> None:
    """Say where taskq was imported from, and refuse to work if it is not from where ``TASKQ_UNDER_TEST`` says.

    ``TASKQ_PRINT_ORIGIN=1`` prints the folder; otherwise it is an event of level debug.

    Raises:
        ConfigurationError: It was imported from elsewhere, so the wrong code would run.
    """
    found = Path(taskq.__file__ or "").resolve().parent
    if os.environ.get("TASKQ_PRINT_ORIGIN") == "1":
        note(f"taskq imported from {found}")
    get_logger("worker").debug("worker.origin", folder=found)
    if wanted := os.environ.get("TASKQ_UNDER_TEST"):
        folder = Path(wanted).resolve()
        if found not in {folder, folder / "taskq"}:
            raise ConfigurationError(
                f"taskq was imported from {found}, but TASKQ_UNDER_TEST names {folder}: the wrong code would run; "
                "correct PYTHONPATH or the environment's installation"
            )


def options_of(settings: Settings, name: str | None = None) -> WorkerOptions:
    """The worker's options out of the settings.

    Raises:
        InvalidPolicy: The name is not valid.
    """
    options = WorkerOptions(
        queues=settings.queues,
        concurrency=settings.concurrency,
        lease=settings.lease,
        grace=settings.grace,
        poll_interval=settings.poll_interval,
        max_jobs=settings.max_jobs,
        max_memory=settings.max_memory,
        ends_commit="async" if settings.ends_commit == "async" else "sync",
        child_max_jobs=settings.child_max_jobs,
        child_max_memory=settings.child_max_memory,
        health_port=settings.health_port,
        health_host=settings.health_host,
    )
    return options if name is None else replace(options, name=check_name("the worker's name", name))


def choose_database(app: TaskQ, settings: Settings) -> str:
    """Make app and worker agree on database and schema; give the DSN: the flag's, else the app's, else the settings'.

    Raises:
        ConfigurationError: No database is named, its DSN cannot be read, or the settings name another schema than the
            app has.
    """
    if settings.sources.get("schema", "").startswith("the flag"):
        app.use_database(schema=settings.schema)
    elif "schema" in settings.sources and settings.schema != app.schema:
        raise ConfigurationError(
            f"the app uses the schema {app.schema}, but {settings.sources['schema']} says {settings.schema}; make "
            f"TaskQ(schema={settings.schema!r}), or pass --schema"
        )
    if settings.sources.get("dsn", "").startswith("the flag"):
        app.use_database(settings.dsn)
    try:
        dsn = app.find_dsn()
    except ConfigurationError as exc:
        raise ConfigurationError(f"{exc}; or pass --dsn") if not settings.dsn else exc from None
    parse_dsn(dsn)
    return dsn


def run_worker(
    app: TaskQ,
    dsn: str,
    options: WorkerOptions,
    *,
    reference: str | None = None,
    link: Supervised | None = None,
    at_exit: Callable[[], None] | None = None,
) -> int:
    """Run a worker until it is stopped by SIGTERM or SIGINT; give its exit code.

    Ends the process itself, with that code, where bodies are left that cannot be stopped: their jobs may soon start
    elsewhere, and the interpreter would wait for them at its exit. What the caller has to do at the end is then done by
    ``at_exit``, which gets half a second.

    Args:
        app: The application.
        dsn: Its database.
        options: How the worker works.
        reference: The application as ``module:attribute``, for child processes.
        link: To the supervisor, if one has started this process.
        at_exit: What is still to be done when the process ends itself.

    Raises:
        DatabaseUnavailable: The database cannot be reached at boot.
        TaskQError: The schema does not fit, or something else kept the worker from starting.
    """

    def leave(code: int) -> NoReturn:
        _leave(code, at_exit)

    recycle = None if link is None else partial(link.say, WANTS_SUCCESSOR)
    worker = Worker(app.tasks, dsn, app.schema, options, on_abandoned=leave, app=reference, on_recycle=recycle)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        loop = runner.get_loop()
        main = loop.create_task(_run(worker, app, dsn, link))
        while True:
            try:
                return loop.run_until_complete(main)
            except asyncio.CancelledError:
                raise TaskQError(
                    "the worker's own tasks were cancelled, so it has ended: code in this process cancels all of "
                    "asyncio.all_tasks(); make it cancel only what it has started, and start the worker again"
                ) from None
            except (SystemExit, KeyboardInterrupt, RuntimeError) as exc:
                # A body has stopped the loop, or raised in a task or callback beside it what a loop lets out. The
                # worker is as it was: whether it stops is for signals to say.
                if main.done() or not worker.ready.is_set():
                    raise
                log.error("loop.interrupted", error=f"{type(exc).__name__}: {exc}", action="a body did this; going on")


def _leave(code: int, at_exit: Callable[[], None] | None) -> NoReturn:
    """End the process from any thread, whatever a handler, a pipe or ``at_exit`` is stuck in."""
    hard = threading.Timer(LEAVE_WITHIN, os._exit, (code,))
    hard.daemon = True
    hard.start()
    for last in (at_exit, logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        if last is not None:
            with suppress(BaseException):
                last()
    os._exit(code)


async def _run(worker: Worker, app: TaskQ, dsn: str, link: Supervised | None) -> int:
    loop = asyncio.get_running_loop()
    for number in boot.SIGNALS:
        loop.add_signal_handler(number, worker.stop)
    boot.release()
    keeping = loop.create_task(_keep_signals(worker), name="taskq-signals")
    telling = None if link is None else loop.create_task(_tell(worker, link))
    try:
        return await worker.run()
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as exc:
        if worker.ready.is_set():
            raise
        if ours := from_sqlstate(exc):
            raise ours from None
        if isinstance(exc, asyncpg.InsufficientPrivilegeError):
            raise not_allowed(exc.message, f"{app.schema}_worker") from None
        raise DatabaseUnavailable(explain_connection_error(exc, dsn)) from None
    finally:
        keeping.cancel()
        if telling is not None:
            telling.cancel()
        await app.close()
        if boot.is_held():
            # All is done; a signal that comes now must not change the exit code.
            signal.pthread_sigmask(signal.SIG_BLOCK, boot.SIGNALS)


async def _keep_signals(worker: Worker) -> None:
    """Take back what a body has taken: without its signals, a worker could not be stopped in good order."""
    loop = asyncio.get_running_loop()
    ours = {number: signal.getsignal(number) for number in boot.SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    while True:
        await asyncio.sleep(KEEP_EVERY)
        taken = [number for number, handler in ours.items() if signal.getsignal(number) != handler]
        for number in taken:
            loop.add_signal_handler(number, worker.stop)
        if signal.set_wakeup_fd(wakeup) != wakeup or taken:
            names = ",".join(signal.Signals(number).name for number in taken)
            log.error("signals.taken", signals=names, action="taken back: a body had changed what they do")


async def _tell(worker: Worker, link: Supervised) -> None:
    link.watch(worker.stop)
    await worker.ready.wait()
    link.say(READY)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop

"""Running what is due, in this process and with the real worker, until nothing is due any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

from taskq.app import TaskQ
from taskq.db.pools import refuse_in_event_loop
from taskq.db.queries import load
from taskq.durations import Duration, parse_duration
from taskq.errors import NotDrained
from taskq.worker import Worker, WorkerOptions
from taskq.workflow.hidden import AWAIT_ANY, COLLECT

__all__ = ["Drained", "drain", "drain_sync"]

LOOK_EVERY = 0.02
"""Seconds between looks at what is left."""
GRACE = 1.0
"""Seconds that bodies get which still run when the time is over."""


@dataclass(slots=True)
class Drained:
    """What a drain has done; numbers of attempts, but for ``waiting`` and ``held``.

    Attributes:
        succeeded: Jobs that succeeded.
        failed: Jobs that failed for good.
        cancelled: Jobs that were cancelled while they ran.
        retried: Attempts after which the job waited again: failures, retry-afters and snoozes.
        waiting: Jobs that are left: they wait for a later time, in a paused queue, in a cohort whose limit is 0, or for
            a child run.
        held: Jobs that are left because they wait for a signal, or their run is paused; or in the line of an ordering
            key, behind one that has failed and halts it, whose outcome is unknown, or that waits itself.
    """

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    waiting: int = 0
    held: int = 0


async def drain(app: TaskQ, *, timeout: Duration = "30s", later: bool = False, concurrency: int = 10) -> Drained:
    """Run what is due with a real worker in this process, and all that becomes due by it, until nothing is.

    What waits for a later time (a delay, a retry, a sleep) is left, unless ``later`` says otherwise. So is what waits
    for a signal: send it, and drain again. A job that runs in another worker is waited for. Jobs in paused queues are
    left, and those of cohorts that let nobody run. The line of an ordering key is run to its end, in order; where
    something holds it up, ``held`` says how many jobs are left in it.

    Args:
        app: The application; its database is used.
        timeout: The bound for all of it.
        later: Make jobs due that wait for a later time, the earliest first, whenever nothing else is due. No clock is
            moved: it is what ``retry`` does for an operator, and stands in ``audit``. A body that always asks to be
            run again does not end by that.
        concurrency: How many bodies run at once.

    Raises:
        NotDrained: Something due was left when the time was over, or is of a task that the app does not have.
        ConfigurationError: No database is named, or the app has no tasks.
        DatabaseUnavailable: The database cannot be reached.
        FaultInjected: A fault that ends a worker has struck (see ``faults``).
    """
    end = asyncio.get_running_loop().time() + parse_duration(timeout)
    done = Drained()
    while (queues := await _queues_to_serve(app, later)) is not None:
        async with _worker(app, queues, concurrency, done) as running:
            await _until_done(app, queues, running, end, timeout, later)
    left = await _left(app)
    done.waiting = sum(row["n"] for row in left if not row["held_up"])
    done.held = sum(row["n"] for row in left if row["held_up"])
    return done


def drain_sync(app: TaskQ, *, timeout: Duration = "30s", later: bool = False, concurrency: int = 10) -> Drained:
    """Like ``drain``, for tests without an event loop."""
    refuse_in_event_loop("drain_sync")

    async def run() -> Drained:
        try:
            return await drain(app, timeout=timeout, later=later, concurrency=concurrency)
        finally:
            await (await app._open_async()).pool.close()

    return asyncio.run(run())


async def _queues_to_serve(app: TaskQ, later: bool) -> list[str] | None:
    """The queues of all that is due; None if nothing is."""
    left = await _left(app)
    if later and left and not _due(app, left):
        await _make_next_due(app)
        left = await _left(app)
    if not _due(app, left):
        return None
    return sorted({row["queue"] for row in left} | {task.policy.queue for task in app.tasks.values()})


async def _until_done(
    app: TaskQ, queues: Sequence[str], running: asyncio.Task[int], end: float, timeout: Duration, later: bool
) -> None:
    """Return once nothing is due, or something is in a queue that is not served."""
    loop = asyncio.get_running_loop()
    while True:
        due = _due(app, await _left(app))
        if any(row["queue"] not in queues for row in due):
            return
        if not due and not (later and await _make_next_due(app)):
            return
        if running.done():
            running.result()
            raise NotDrained(f"the worker ended by itself; left are {_named(due)}")
        if loop.time() > end:
            raise NotDrained(
                f"not done after {timeout if isinstance(timeout, str) else f'{timeout} s'}: left are {_named(due)}; "
                "give it more time, or see what these jobs wait for"
            )
        await asyncio.sleep(LOOK_EVERY)


@asynccontextmanager
async def _worker(app: TaskQ, queues: list[str], concurrency: int, done: Drained) -> AsyncIterator[asyncio.Task[int]]:
    options = WorkerOptions(
        queues=tuple(queues), concurrency=concurrency, lease=5, grace=GRACE, poll_interval=0.05, name="drain"
    )
    worker = Worker(app.tasks, app.find_dsn(), app.schema, options)
    running = asyncio.create_task(worker.run())
    try:
        yield running
        worker.stop()
        await running
    finally:
        if not running.done():
            worker.stop()
            await asyncio.wait([running])
        for field in fields(done):
            setattr(done, field.name, getattr(done, field.name) + getattr(worker.counts, field.name, 0))


def _due(app: TaskQ, left: Sequence[Any]) -> list[Any]:
    due = [row for row in left if row["due"]]
    if strange := [row for row in due if row["task"] not in {*app.tasks, AWAIT_ANY, COLLECT}]:
        raise NotDrained(
            f"the app has no task for {_named(strange)}; import the module that registers it, or give the test a "
            "database of its own"
        )
    return due


def _named(rows: Sequence[Any]) -> str:
    return "; ".join(
        f"{row['n']} {row['status']} of task {row['task']!r} in queue {row['queue']!r} "
        f"({', '.join(map(str, row['ids']))}{', ...' if row['n'] > len(row['ids']) else ''})"
        for row in rows
    )


async def _left(app: TaskQ) -> list[Any]:
    await _fetch(app, "carry_on_run")
    left = await _fetch(app, "left")
    if any(row["due"] and row["status"] == "held" for row in left):
        await _fetch(app, "sweep_orderings")
        await _fetch(app, "sweep_children")
        left = await _fetch(app, "left")
    return left


async def _make_next_due(app: TaskQ) -> bool:
    return bool(await _fetch(app, "make_next_due"))


async def _fetch(app: TaskQ, query: str) -> list[Any]:
    client = await app._open_async()
    async with client.pool.connection() as conn:
        rows: list[Any] = await conn.fetch(load("testing", app.schema)[query])
    return rows

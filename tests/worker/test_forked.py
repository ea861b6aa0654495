"""Bodies that fork: the copy of the worker's process ends with the body's code, and says nothing in its name."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator

import asyncpg
import pytest
from worker_kit import RunWorker, outcomes

from taskq import TaskQ
from taskq.worker.forked import EXIT_AWAITED

pytestmark = pytest.mark.anyio


def fork() -> int:
    """As ``os.fork``, with a bound for the copy: one that goes on is killed."""
    pid = os.fork()
    if not pid:
        signal.alarm(5)
    return pid


def how_it_ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("then", "wanted"), [("return", 0), ("raise", 1), ("exit", 3), ("leave", 0), ("await", EXIT_AWAITED)]
)
async def test_a_copy_ends_where_the_body_gives_way(
    then: str, wanted: int, app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    def go_on() -> None:
        if then == "raise":
            raise ValueError("in the copy")
        if then in ("exit", "leave"):
            sys.exit(3 if then == "exit" else None)

    @app.task(max_attempts=1)
    async def forks() -> int:
        if pid := fork():
            return how_it_ended(pid)
        go_on()
        if then == "await":
            # Not one of the loop's own awaitables, which refuse a copy of their process by themselves.
            await Suspends()
        return -1

    @app.task(max_attempts=1)
    def forks_in_thread() -> int:
        if pid := fork():
            return how_it_ended(pid)
        go_on()
        return -1

    async with run_worker():
        jobs = [await forks.enqueue()]
        if then != "await":
            jobs.append(await forks_in_thread.enqueue())
        for job in jobs:
            assert await job.result(timeout=10) == wanted
            assert await outcomes(aconn, job.id) == ["succeeded"]


class Suspends:
    def __await__(self) -> Generator[None, None, None]:
        yield

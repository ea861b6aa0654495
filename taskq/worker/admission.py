"""At boot: waiting for a database that answers and takes no worker just now.

Without a free connection, starting, or read-only as a standby is until it is promoted: all of these pass by themselves,
and many workers that start at once would otherwise end and start over together.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import asyncpg

from taskq import errors
from taskq.db.dsn import describe_dsn
from taskq.telemetry import get_logger

log = get_logger("worker")

T = TypeVar("T")
FIRST_WAIT = 0.2
LONGEST_WAIT = 5.0


class StoppedAtBoot(Exception):
    """The worker was told to stop before it had begun."""


async def until_admitted(ask: Callable[[], Awaitable[T]], stop: asyncio.Event, dsn: str) -> T:
    """What the database answers, once it takes this worker; the waits grow to 5 s.

    Args:
        ask: What is asked, again and again.
        stop: Set when the worker is to stop.
        dsn: Named in the log.

    Raises:
        StoppedAtBoot: ``stop`` was set before, or meanwhile.
        TaskQError, OSError, asyncpg.PostgresError: Whatever does not pass by itself.
    """
    failures = 0
    while not stop.is_set():
        try:
            answer = await ask()
        except (errors.DatabaseBusy, asyncpg.ReadOnlySQLTransactionError) as exc:
            failures += 1
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(failures - 1, 10)) * (0.5 + random.random() / 2)
            if failures <= 3 or failures % 10 == 0:
                log.warning(
                    "worker.waits",
                    error=str(exc).splitlines()[0],
                    server=describe_dsn(dsn),
                    failures=failures,
                    next_try_in=round(wait, 2),
                )
        else:
            if stop.is_set():
                break
            return answer
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                await stop.wait()
    raise StoppedAtBoot

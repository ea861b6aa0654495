"""One asyncpg connection that comes back: opened when first needed, opened again after it broke, with growing waits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import asyncpg

from taskq import errors
from taskq.db.dsn import describe_dsn
from taskq.db.pools import connect_async
from taskq.telemetry import get_logger
from taskq.worker.forked import keep_from_copies
from taskq.worker.points import WatchedExchange

log = get_logger("worker")

DATABASE_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    errors.DatabaseUnavailable,
    OSError,
    TimeoutError,
)
"""What a statement may raise that is the database's doing, or the network's."""
OWN_LIMITS = dict.fromkeys(
    ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout"), "0"
)
"""A worker limits its statements itself; limits of its role would keep it from settling and from listening."""
FIRST_WAIT = 0.1
LONGEST_WAIT = 3.0


def is_connection_failure(exc: BaseException) -> bool:
    """Whether an error means that the connection, not the statement, is at fault: trying again later may help."""
    if isinstance(exc, asyncpg.PostgresError):
        # 08 connection, 57 shutdown or cancelled by an operator, 53 out of resources, 25006 read-only (a standby).
        state = exc.sqlstate or ""
        return state[:2] in ("08", "57", "53") or state == "25006"
    return isinstance(exc, DATABASE_ERRORS)


class Connection:
    """A single connection for statements that must not interleave.

    Args:
        dsn: Where to connect.
        name: Appears as application_name, and in events.
        timeout: Seconds after which a statement is given up and the connection is thrown away.
        on_progress: Called after each statement that the database answered.
        on_recovered: Called when it answers again after failures.
    """

    def __init__(
        self,
        dsn: str,
        name: str,
        *,
        timeout: float = 30.0,
        on_progress: Callable[[], None] | None = None,
        on_recovered: Callable[[], None] | None = None,
    ) -> None:
        self._dsn = dsn
        self._name = name
        self._timeout = timeout
        self._on_progress = on_progress or (lambda: None)
        self._on_recovered = on_recovered or (lambda: None)
        self._conn: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()
        self._failures = 0
        self.opened = 0
        """How often it was opened: between two equal numbers the server has not gone."""
        self.on_open: Callable[[asyncpg.Connection], Any] | None = None
        """Awaited with each connection that was opened, before it is used."""

    async def fetch(
        self, query: str, *args: Any, through: WatchedExchange | None = None, recovers: bool = True
    ) -> list[Any]:
        """Run one statement; errors of database and connection are the caller's.

        Args:
            query: The statement.
            *args: Its arguments.
            through: Whoever watches it.
            recovers: Whether an answer means that all is well again; False for one that is asked only because another
                statement failed, which would be tried again without a pause.
        """
        async with self._lock:
            conn = self._conn
            if conn is None or conn.is_closed():
                conn = await self._open()
            try:
                rows: list[Any]
                if through is None:
                    rows = await conn.fetch(query, *args, timeout=self._timeout)
                else:
                    rows = await through(conn, query, args, self._timeout)
            except BaseException as exc:
                if not isinstance(exc, asyncpg.PostgresError) or is_connection_failure(exc) or conn.is_closed():
                    self._drop()
                raise
        if self._failures and recovers:
            self._failures = 0
            self._on_recovered()
        self._on_progress()
        return rows

    async def ensure_open(self) -> None:
        """Open the connection now, if it is not.

        Raises:
            OSError, asyncpg.PostgresError: It cannot be opened.
        """
        async with self._lock:
            if self._conn is None or self._conn.is_closed():
                await self._open()

    @property
    def is_open(self) -> bool:
        """Whether the connection stands, as far as is known."""
        return self._conn is not None and not self._conn.is_closed()

    async def pause_after_failure(self, exc: BaseException, *, report: bool = True) -> None:
        """Wait before the next try, longer each time and at most 3 s; the first failures and then few are reported."""
        self._failures += 1
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** min(self._failures - 1, 10)) * (0.5 + random.random() / 2)
        if report and (self._failures <= 3 or self._failures % 10 == 0):
            log.warning(
                "database.unavailable" if is_connection_failure(exc) else "database.refused",
                connection=self._name,
                server=describe_dsn(self._dsn),
                error=f"{type(exc).__name__}: {exc}".splitlines()[0],
                failures=self._failures,
                next_try_in=round(wait, 2),
            )
        await asyncio.sleep(wait)

    async def close(self) -> None:
        """Close it, politely if that is quick."""
        conn, self._conn = self._conn, None
        if conn is not None and not conn.is_closed():
            with suppress(Exception):
                await conn.close(timeout=2)

    async def _open(self) -> asyncpg.Connection:
        self._drop()
        conn = await connect_async(self._dsn, name=self._name, server_settings=OWN_LIMITS)
        if self.on_open is not None:
            try:
                await self.on_open(conn)
            except BaseException:
                conn.terminate()
                raise
        self._conn = conn
        self.opened += 1
        keep_from_copies(conn)
        return conn

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.terminate()

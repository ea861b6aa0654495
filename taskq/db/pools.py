"""The application's own connections: a pool for asyncpg, one for psycopg, both opened when they are first used.

An asyncpg pool belongs to the event loop that made it, and no connection survives a fork; so pools are kept by loop and
by process, and what another loop or process opened is left alone.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, TypeAlias
from weakref import WeakKeyDictionary

import asyncpg
import psycopg
from psycopg.rows import tuple_row

from taskq.db.dsn import Dsn, connection_error, describe_dsn, parse_dsn
from taskq.db.queries import load
from taskq.errors import PoolerInBetween, SyncCallInEventLoop

__all__ = ["AsyncPool", "SyncPool", "connect_async", "connect_sync", "drop", "refuse_in_event_loop"]

AsyncConnection: TypeAlias = Any  # asyncpg has no types
CONNECT_TIMEOUT: Final = 10.0
"""Seconds that one attempt to connect may take, unless the DSN has its own ``connect_timeout``."""
OWN_SETTINGS: Final = {
    "datestyle": "ISO, MDY",
    "intervalstyle": "postgres",
    "standard_conforming_strings": "on",
    "default_transaction_isolation": "read committed",
    "default_transaction_read_only": "off",
}
"""What sessions of taskq's own need, whatever role and database default to; the query ``own_session`` has the same.

psycopg reads dates and intervals in these styles alone, and the schema's functions decide under READ COMMITTED.
"""
_CANNOT_CONNECT = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


class AsyncPool:
    """A pool of asyncpg connections, at most ``size`` for each event loop.

    Args:
        dsn: Where the database is.
        size: The most connections.
        name: What ``pg_stat_activity`` shows as application_name.
        resets: Whether a connection's session is reset as it comes back; for those that are lent to code of others.
        on_open: Called with each connection that was opened.
    """

    def __init__(
        self,
        dsn: str,
        *,
        size: int = 10,
        name: str = "taskq",
        resets: bool = False,
        on_open: Callable[[AsyncConnection], object] | None = None,
    ) -> None:
        self._dsn = parse_dsn(dsn)
        self._size = size
        self._name = name
        self._resets = resets
        self._on_open = on_open
        self._pid = os.getpid()
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection]:
        """A connection of this loop's pool, for the length of the block.

        Raises:
            DatabaseUnavailable: The database cannot be reached.
        """
        pool = await self._pool()
        try:
            taken = await pool.acquire()
        except _CANNOT_CONNECT as exc:
            raise connection_error(exc, self._dsn) from exc
        except PoolerInBetween as exc:
            raise PoolerInBetween(f"{describe_dsn(self._dsn)}: {exc}") from None
        try:
            yield taken
        finally:
            await pool.release(taken)

    async def close(self) -> None:
        """Close this loop's pool; those of other loops end with them."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None and self._pid == os.getpid():
            await pool.close()

    async def terminate(self) -> None:
        """Close this loop's pool at once, whoever still holds a connection of it."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None and self._pid == os.getpid():
            pool.terminate()

    async def _opened(self, conn: AsyncConnection) -> None:
        await _refuse_pooler(conn)
        if self._on_open is not None:
            self._on_open(conn)

    async def _pool(self) -> Any:
        if self._pid != os.getpid():
            self._pools = WeakKeyDictionary()
            self._pid = os.getpid()
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            # No await between the look and the entry: two first users share one pool. It opens at its first acquire.
            pool = self._pools[loop] = asyncpg.create_pool(
                self._dsn.asyncpg_dsn,
                min_size=0,
                max_size=self._size,
                timeout=_timeout(self._dsn),
                server_settings={"application_name": self._name, **OWN_SETTINGS},
                init=self._opened,
                # Nothing of a session is changed here, so that a release need not cost a round trip to reset it.
                reset=None if self._resets else _leave_as_it_is,
            )
        await pool
        return pool


def drop(conn: AsyncConnection) -> None:
    """Close a connection of a pool at once; one that was lost has gone back already, and says so."""
    with suppress(asyncpg.InterfaceError):
        conn.terminate()


async def _leave_as_it_is(_: AsyncConnection) -> None:
    return None


async def connect_async(dsn: str, *, name: str = "taskq", **options: Any) -> AsyncConnection:
    """Open one asyncpg connection.

    Raises:
        DatabaseUnavailable: The database cannot be reached.
    """
    parsed = parse_dsn(dsn)
    options.setdefault("timeout", _timeout(parsed))
    settings = {"application_name": name, **OWN_SETTINGS, **options.pop("server_settings", {})}
    try:
        opened = await asyncpg.connect(parsed.asyncpg_dsn, server_settings=settings, **options)
    except _CANNOT_CONNECT as exc:
        raise connection_error(exc, parsed) from exc
    try:
        await _refuse_pooler(opened)
    except PoolerInBetween as exc:
        opened.terminate()
        raise PoolerInBetween(f"{describe_dsn(parsed)}: {exc}") from None
    except _CANNOT_CONNECT as exc:
        opened.terminate()
        raise connection_error(exc, parsed) from exc
    return opened


async def _refuse_pooler(conn: AsyncConnection) -> None:
    """Refuse a connection that shares its sessions with others.

    A pooler answers the start-up with a process id of its own making. Behind one in transaction mode a statement that
    is prepared under a name may turn out to be another client's: a retry was executed as a cancel.
    """
    # In a transaction, which pins the session; what is prepared here is not met by another client's.
    transaction = conn.transaction()
    try:
        await transaction.start()
        pid = await conn.fetchval(load("client", "taskq")["backend_pid"])
        await transaction.rollback()
    except (asyncpg.DuplicatePreparedStatementError, asyncpg.InvalidSQLStatementNameError):
        pid = None
    except BaseException:
        # At once: a rollback, and a close that says goodbye, would wait without a bound for a server that is silent.
        conn.terminate()
        raise
    if pid != conn.get_server_pid():
        raise PoolerInBetween(
            "a connection pooler stands in between; workers and the async client prepare statements and listen, which "
            "need sessions of their own: name the PostgreSQL server itself in the DSN"
        )


def connect_sync(dsn: str, *, name: str = "taskq", **options: Any) -> psycopg.Connection[Any]:
    """Open one psycopg connection, in autocommit unless ``options`` say otherwise.

    Raises:
        DatabaseUnavailable: The database cannot be reached.
    """
    parsed = parse_dsn(dsn)
    options.setdefault("autocommit", True)
    options.setdefault("connect_timeout", int(_timeout(parsed)))
    options.setdefault("application_name", name)
    # Unnamed statements only: behind a pooler in transaction mode a named one may be another client's.
    options.setdefault("prepare_threshold", None)
    options.setdefault("client_encoding", "UTF8")
    try:
        opened = psycopg.connect(parsed.conninfo, **options)
        set_up_session(opened)
    except psycopg.OperationalError as exc:
        raise connection_error(exc, parsed) from exc
    return opened


def set_up_session(connection: psycopg.Connection[Any]) -> None:
    """Set what the role or the database has set otherwise and taskq needs; one round trip.

    Not by the parameters of the start-up: a pooler refuses those that it does not know.
    """
    with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(load("client", "taskq")["own_session"].encode())
    if not connection.autocommit:
        connection.commit()


class SyncPool:
    """A small pool of psycopg connections in autocommit, for threads; at most ``size`` are out at a time.

    Args:
        dsn: Where the database is.
        size: The most connections.
        name: What ``pg_stat_activity`` shows as application_name.
    """

    def __init__(self, dsn: str, *, size: int = 10, name: str = "taskq") -> None:
        parse_dsn(dsn)
        self._dsn = dsn
        self._size = size
        self._name = name
        self._idle: list[psycopg.Connection[Any]] = []
        self._inherited: list[psycopg.Connection[Any]] = []
        self._forget()

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection, for the length of the block; one that breaks in it is thrown away.

        Raises:
            DatabaseUnavailable: The database cannot be reached.
        """
        if self._pid != os.getpid():
            self._forget()
        with self._slots:
            taken = self._take() or connect_sync(self._dsn, name=self._name)
            try:
                yield taken
            finally:
                idle = taken.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
                if taken.closed or not idle:
                    taken.close()
                else:
                    with self._lock:
                        self._idle.append(taken)

    def close(self) -> None:
        """Close the idle connections; those in use are closed when they come back. The pool can be used again."""
        with self._lock:
            idle, self._idle = self._idle, []
        for one in idle if self._pid == os.getpid() else ():
            one.close()

    def _take(self) -> psycopg.Connection[Any] | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                one = self._idle.pop()
            # An idle connection has nothing to say; if it does, the server has most likely ended it.
            if not one.closed and not select.select([one.fileno()], [], [], 0)[0]:
                return one
            one.close()

    def _forget(self) -> None:
        # After a fork the parent's connections are not ours to use or to close: keep them alive, out of sight.
        self._inherited += self._idle
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(self._size)
        self._idle = []


def _timeout(dsn: Dsn) -> float:
    told = dsn.params.get("connect_timeout", "")
    return float(told) if told.isdigit() and int(told) > 0 else CONNECT_TIMEOUT


def refuse_in_event_loop(name: str) -> None:
    """Raise if an event loop runs in this thread: a blocking call would stop everything in it.

    Args:
        name: The call, such as ``enqueue_sync``.

    Raises:
        SyncCallInEventLoop: One runs; the message names the call to await.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SyncCallInEventLoop(
        f"{name}() would block the event loop that runs here, so it did nothing; "
        f"use 'await {name.removesuffix('_sync')}(...)'"
    )

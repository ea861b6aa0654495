"""The caller's own connection, of whichever library: told apart, checked, and a statement sent on it.

SQLAlchemy and Django are told by the names of their classes, so that neither is imported, or needed, here. Their
connections are asked by their own means, so that what they keep account of (the begin of a transaction, broken atomic
blocks, lost connections, logged statements) stays right; plain driver connections are asked directly. Nothing of the
connection is changed: no setting, no adapter, no row factory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import asyncpg
import psycopg
from psycopg.rows import tuple_row
from psycopg.types.array import ListBinaryDumper
from psycopg.types.bool import BoolLoader
from psycopg.types.numeric import IntBinaryDumper
from psycopg.types.string import StrBinaryDumper, StrDumper
from psycopg.types.uuid import UUIDLoader

from taskq.client.requests import Batch
from taskq.errors import TaskQError, UnsupportedConnection, UnusableConnection

if TYPE_CHECKING:
    from taskq.workflow.runs import Admission

__all__ = ["Kind", "adapt", "driver_error", "kind_for", "send", "send_sync"]

Kind: TypeAlias = Literal["asyncpg", "async psycopg", "psycopg", "async SQLAlchemy", "SQLAlchemy", "Django"]
_ASYNC: Final = ("asyncpg", "async psycopg", "async SQLAlchemy")
_KINDS: Final[dict[tuple[str, str], Kind]] = {
    ("sqlalchemy.engine.base", "Connection"): "SQLAlchemy",
    ("sqlalchemy.orm.session", "Session"): "SQLAlchemy",
    ("sqlalchemy.orm.scoping", "scoped_session"): "SQLAlchemy",
    ("sqlalchemy.ext.asyncio.engine", "AsyncConnection"): "async SQLAlchemy",
    ("sqlalchemy.ext.asyncio.session", "AsyncSession"): "async SQLAlchemy",
    ("sqlalchemy.ext.asyncio.scoping", "async_scoped_session"): "async SQLAlchemy",
    ("django.db.backends.base.base", "BaseDatabaseWrapper"): "Django",
    ("django.utils.connection", "ConnectionProxy"): "Django",
}
_NEAR: Final[dict[tuple[str, str], str]] = {
    ("asyncpg.pool", "Pool"): "a pool; take a connection out of it: async with pool.acquire() as connection",
    ("psycopg_pool.base", "BasePool"): "a pool; take a connection out of it: with pool.connection() as connection",
    ("sqlalchemy.engine.base", "Engine"): "an engine; pass a connection of it: with engine.begin() as connection",
    ("sqlalchemy.ext.asyncio.engine", "AsyncEngine"): (
        "an engine; pass a connection of it: async with engine.begin() as connection"
    ),
    ("sqlalchemy.orm.session", "sessionmaker"): "a maker of sessions; call it, and pass the session",
    ("sqlalchemy.ext.asyncio.session", "async_sessionmaker"): "a maker of sessions; call it, and pass the session",
    ("django.utils.connection", "BaseConnectionHandler"): "all connections; pass one: connections['default']",
}
_TAKEN: Final = (
    "the async calls take an asyncpg connection (one of a pool, too), a psycopg AsyncConnection, or a SQLAlchemy "
    "AsyncSession or AsyncConnection (postgresql+asyncpg or postgresql+psycopg); the *_sync calls take a psycopg "
    "Connection, a SQLAlchemy Session or Connection (postgresql+psycopg), or Django's connection (psycopg 3)"
)
_BUSY: Final = "it is in the middle of another statement, a COPY or a stream; let that end first"
_CLOSED: Final = "it is closed, or was lost; nothing was enqueued: open another"
_REFUSED: Final = {
    "25P02": (
        "its transaction has failed before, and PostgreSQL takes nothing more in it; roll back, to a savepoint or as a "
        "whole, and enqueue again"
    ),
    "25006": "its transaction is read-only; enqueue in one that may write",
}
"""What PostgreSQL says by SQLSTATE about the state that the caller's transaction is in."""
_DRIVER_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError, psycopg.Error, ConnectionError)
_BUFFERED: Final = {"stream_results": False, "yield_per": None}
"""Of SQLAlchemy's execution options, those of the caller's that are about many rows."""
_PLACEHOLDER: Final = re.compile(r"\$\d+")
_NOT_ASCII: Final = re.compile(r"[^\x00-\x7f]+")


def kind_for(connection: object, *, awaited: bool) -> Kind:
    """What kind of connection was given.

    Args:
        connection: What the caller gave as ``connection=``.
        awaited: Whether it is for an async call.

    Raises:
        UnsupportedConnection: It is no connection that is known, or one for the other form of the call.
    """
    kind = _kind(connection)
    if kind is None:
        near = next(filter(None, map(_NEAR.get, _classes(connection))), "which is no connection that is known")
        raise UnsupportedConnection(f"connection= is a {_name(connection)}, {near}; {_TAKEN}")
    if awaited and kind not in _ASYNC:
        raise UnsupportedConnection(
            f"connection= is a {_name(connection)}, which blocks, so an async call cannot use it; call enqueue_sync() "
            f"or enqueue_many_sync() with it, in a thread where an event loop runs; {_TAKEN}"
        )
    if not awaited and kind in _ASYNC:
        raise UnsupportedConnection(
            f"connection= is a {_name(connection)}, which must be awaited, so a sync call cannot use it; "
            f"'await enqueue()' or 'await enqueue_many()' with it; {_TAKEN}"
        )
    return kind


async def send(kind: Kind, connection: Any, sql: str, batch: Batch | Admission) -> Sequence[Any]:
    """Send the statement of a batch on a caller's async connection; its rows.

    Args:
        kind: What ``kind_for`` said.
        connection: The caller's connection.
        sql: The statement, with ``$1`` and so on, each once and in order.
        batch: Where the arguments are.

    Raises:
        UnsupportedConnection: It is SQLAlchemy's, and not bound to PostgreSQL by a driver that is known.
        UnusableConnection: It is in a state in which it takes no statement.
    """
    with _in_words(connection):
        if kind == "asyncpg":
            if connection.is_closed():
                raise _unusable(connection, _CLOSED)
            return list(await connection.fetch(sql, *_carried(connection, batch, _encoding(connection))))
        if kind == "async psycopg":
            _check_psycopg(connection)
            async with psycopg.AsyncRawCursor(connection, row_factory=tuple_row) as cursor:
                adapt(cursor)
                await cursor.execute(sql.encode(), _carried(connection, batch, _encoding(connection)))
                return await cursor.fetchall()
        _check_dialect(connection, awaited=True)
        target = await connection.connection() if hasattr(connection, "get_bind") else connection
        raw = (await target.get_raw_connection()).driver_connection
        sql, arguments = _as_driver_takes_it(raw, sql, _carried(connection, batch, _encoding(raw)))
        return list((await target.exec_driver_sql(sql, arguments, _BUFFERED)).fetchall())


def send_sync(kind: Kind, connection: Any, sql: str, batch: Batch | Admission) -> Sequence[Any]:
    """Like ``send``, on a connection that blocks."""
    with _in_words(connection):
        if kind == "psycopg":
            _check_psycopg(connection)
            with psycopg.RawCursor(connection, row_factory=tuple_row) as cursor:
                adapt(cursor)
                cursor.execute(sql.encode(), _carried(connection, batch, _encoding(connection)))
                return cursor.fetchall()
        if kind == "Django":
            _check_django(connection)
            with connection.cursor() as cursor:
                raw = connection.connection
                sql, arguments = _as_driver_takes_it(raw, sql, _carried(connection, batch, _encoding(raw)))
                cursor.execute(sql, arguments)
                return list(cursor.fetchall())
        _check_dialect(connection, awaited=False)
        target = connection.connection() if hasattr(connection, "get_bind") else connection
        raw = target.connection.driver_connection
        sql, arguments = _as_driver_takes_it(raw, sql, _carried(connection, batch, _encoding(raw)))
        return list(target.exec_driver_sql(sql, arguments, _BUFFERED).fetchall())


def adapt(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> None:
    """Give a cursor the adapters that the statement is made for, whatever its connection has; only the cursor."""
    adapters = cursor.adapters
    for python, dumper in ((int, IntBinaryDumper), (str, StrDumper), (str, StrBinaryDumper), (list, ListBinaryDumper)):
        # As text each element of a list is escaped in Python: 50,000 took three times as long.
        adapters.register_dumper(python, dumper)
    adapters.register_loader("uuid", UUIDLoader)
    adapters.register_loader("bool", BoolLoader)


def driver_error(exc: BaseException | None) -> BaseException | None:
    """The driver's own error under what SQLAlchemy and Django make of it; None if there is none."""
    for _ in range(5):
        if exc is None or isinstance(exc, _DRIVER_ERRORS):
            return exc
        exc = getattr(exc, "orig", None) or exc.__cause__
    return None


# What kind it is -----------------------------------------------------------------------------------------------------


def _kind(connection: object) -> Kind | None:
    if isinstance(connection, (asyncpg.Connection, asyncpg.pool.PoolConnectionProxy)):
        return "asyncpg"
    if isinstance(connection, psycopg.AsyncConnection):
        return "async psycopg"
    if isinstance(connection, psycopg.Connection):
        return "psycopg"
    return next(filter(None, map(_KINDS.get, _classes(connection))), None)


def _classes(value: object) -> list[tuple[str, str]]:
    return [(one.__module__, one.__qualname__) for one in type(value).__mro__]


def _name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _check_dialect(connection: Any, *, awaited: bool) -> None:
    """Refuse a connection of SQLAlchemy that leads to another database, or there by another driver."""
    dialect = (connection.get_bind() if hasattr(connection, "get_bind") else connection).dialect
    if (dialect.name, dialect.driver) not in {
        ("postgresql", "psycopg"), ("postgresql", "psycopg_async"), ("postgresql", "asyncpg"),
    }:  # fmt: skip
        raise UnsupportedConnection(
            f"connection= is a {_name(connection)} of a {dialect.name}+{dialect.driver} engine; make the engine with "
            f"postgresql+psycopg{' or postgresql+asyncpg' if awaited else ''}, on the database where taskq is"
        )
    if dialect.is_async and not awaited:
        raise UnsupportedConnection(
            f"connection= is a {_name(connection)} of an async engine, so a sync call cannot use it; "
            "'await enqueue()' with the AsyncSession or AsyncConnection itself"
        )


def _check_django(connection: Any) -> None:
    if connection.vendor != "postgresql":
        raise UnsupportedConnection(
            f"connection= is Django's connection {connection.alias!r} to {connection.vendor}; pass the one to the "
            "PostgreSQL database where taskq is: django.db.connections[alias]"
        )
    connection.ensure_connection()
    if not isinstance(connection.connection, psycopg.Connection):
        raise UnsupportedConnection(
            f"connection= is Django's connection {connection.alias!r}, over {_name(connection.connection)}; Django "
            "takes psycopg 3 where it is installed and psycopg2 is not"
        )


# What state it is in -------------------------------------------------------------------------------------------------


def _check_psycopg(connection: Any) -> None:
    if connection.closed:
        raise _unusable(connection, _CLOSED)
    if connection.pgconn.pipeline_status != psycopg.pq.PipelineStatus.OFF:
        raise _unusable(connection, "it is in pipeline mode, where answers come late; leave the pipeline block first")
    # A COPY and a stream hold the connection's lock: whoever asks for it within their block waits for ever.
    if connection.info.transaction_status == psycopg.pq.TransactionStatus.ACTIVE:
        raise _unusable(connection, _BUSY)


@contextmanager
def _in_words(connection: Any) -> Iterator[None]:
    """Say what the state of the connection was, where that is why the statement was not taken.

    Raises:
        UnusableConnection: It was.
    """
    try:
        yield
    except TaskQError:
        raise
    except Exception as exc:
        if told := _state(connection, exc):
            raise _unusable(connection, told) from exc
        raise


def _state(connection: Any, exc: Exception) -> str | None:
    cause = driver_error(exc)
    if refused := _REFUSED.get(getattr(cause, "sqlstate", None) or ""):
        return refused
    said = " ".join(str(exc).split())
    if {("sqlalchemy.exc", "InvalidRequestError"), ("django.db.transaction", "TransactionManagementError")} & {
        *_classes(exc)
    }:
        return f"it says: {said}"
    if "operation is in progress" in said or "command is already in progress" in said:
        return _BUSY
    if isinstance(cause, asyncpg.InterfaceError) and "released back to the pool" in said:
        return "it has gone back to its pool; nothing was enqueued: enqueue before the block of the pool ends"
    # What was closed before says so itself; what is lost under way has another message.
    if re.search(r"connection (is|already) closed|the connection is closed", said):
        return _CLOSED
    return None


def _unusable(connection: Any, told: str) -> UnusableConnection:
    return UnusableConnection(f"connection= is a {_name(connection)}, and {told}")


# What is sent --------------------------------------------------------------------------------------------------------


def _encoding(raw: Any) -> str:
    """Python's name of the encoding that the session's client_encoding stands for."""
    if isinstance(raw, psycopg.BaseConnection):
        return "utf-8" if raw.info.encoding == "ascii" else raw.info.encoding
    return str(raw.get_settings().get_text_codec().name)


def _carried(connection: Any, batch: Batch | Admission, encoding: str) -> tuple[Any, ...]:
    """The arguments as the session's encoding can carry them: JSON has a spelling in ASCII, keys have not."""
    if encoding == "utf-8":
        return batch.arguments
    if not isinstance(batch, Batch):
        return tuple(_ascii(text) if isinstance(text, str) else text for text in batch.arguments)
    specs, spec, payload, unique, idempotency, conflict, ordering = batch.arguments
    for keys in (unique, idempotency, ordering):
        for key in keys or ():
            try:
                (key or "").encode(encoding)
            except UnicodeEncodeError:
                raise UnusableConnection(
                    f"connection= is a {_name(connection)} whose client_encoding, {encoding}, has no way to write the "
                    f"key {key!r}; use UTF8, or a key in ASCII"
                ) from None
    return (_ascii(specs), spec, [_ascii(text) for text in payload], unique, idempotency, conflict, ordering)


def _ascii(text: str) -> str:
    """The same JSON in ASCII: outside of strings it has nothing else."""
    return text if text.isascii() else _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _as_driver_takes_it(raw: Any, sql: str, arguments: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """The statement for the cursors of SQLAlchemy and Django: psycopg's have ``%s``, and adapters of their own.

    Lists go as PostgreSQL's own text of an array, so that nothing but texts is left to adapt.
    """
    if not isinstance(raw, psycopg.BaseConnection):
        return sql, arguments
    texts = tuple(_array(one) if isinstance(one, list) else one for one in arguments)
    return _PLACEHOLDER.sub("%s", sql.replace("%", "%%")), texts


def _array(values: list[Any]) -> str:
    return "{" + ",".join("NULL" if one is None else _element(one) for one in values) + "}"


def _element(value: Any) -> str:
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

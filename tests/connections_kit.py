"""Callers with a transaction of their own, one for each kind of connection that may be given as ``connection=``.

A caller hides what the libraries call things, so that one test asks the same of all. Those that block live in a thread
of their own, since Django ties a connection to its thread and a sync call is refused where an event loop runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import quote

import asyncpg
import django
import psycopg
import psycopg_pool
import sqlalchemy
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

from taskq import Job

LEVELS = {"read committed", "repeatable read", "serializable"}


class AsyncCaller:
    """A caller that awaits: ``given`` is the connection, the rest is how its library says it."""

    def __init__(
        self,
        given: Any,
        transaction: Callable[[str], AbstractAsyncContextManager[Any]],
        savepoint: Callable[[], AbstractAsyncContextManager[Any]],
        execute: Callable[[str], Any],
    ) -> None:
        self.given = given
        self.transaction = transaction
        self.savepoint = savepoint
        self._execute = execute

    async def execute(self, statement: str) -> None:
        await self._execute(statement)

    async def enqueue(self, task: Any, *args: Any, **options: Any) -> Job[Any]:
        return await task.using(connection=self.given, **options).enqueue(*args)

    async def enqueue_many(self, app: Any, requests: list[Any], **options: Any) -> list[Job[Any]]:
        return await app.enqueue_many(requests, connection=self.given, **options)


class SyncCaller:
    """A caller that blocks, in its own thread."""

    def __init__(
        self,
        call: Callable[..., Any],
        given: Any,
        transaction: Callable[[str], AbstractContextManager[Any]],
        savepoint: Callable[[], AbstractContextManager[Any]],
        execute: Callable[[str], Any],
    ) -> None:
        self.given = given
        self.call = call
        self.transaction = lambda level: self._entered(lambda: transaction(level))
        self.savepoint = lambda: self._entered(savepoint)
        self._execute = execute

    @asynccontextmanager
    async def _entered(self, make: Callable[[], AbstractContextManager[Any]]) -> AsyncIterator[None]:
        block = await self.call(make)
        await self.call(block.__enter__)
        try:
            yield
        except BaseException as caught:
            told = (type(caught), caught, caught.__traceback__)
            if not await self.call(block.__exit__, *told):
                raise
        else:
            await self.call(block.__exit__, None, None, None)

    async def execute(self, statement: str) -> None:
        await self.call(lambda: self._execute(statement))

    async def enqueue(self, task: Any, *args: Any, **options: Any) -> Job[Any]:
        bound = task.using(connection=self.given, **options)
        return await self.call(lambda: bound.enqueue_sync(*args))

    async def enqueue_many(self, app: Any, requests: list[Any], **options: Any) -> list[Job[Any]]:
        return await self.call(lambda: app.enqueue_many_sync(requests, connection=self.given, **options))


def url(dsn: str, driver: str) -> str:
    """The DSN as SQLAlchemy takes it."""
    found = conninfo_to_dict(dsn)
    host, port = quote(str(found["host"]), safe=""), found["port"]
    return f"postgresql+{driver}://{found['user']}@/{found['dbname']}?host={host}&port={port}"


# Those that await -----------------------------------------------------------------------------------------------------


def _asyncpg(given: Any) -> AsyncCaller:
    return AsyncCaller(
        given,
        lambda level: given.transaction(isolation=level.replace(" ", "_")),
        given.transaction,
        given.execute,
    )


@asynccontextmanager
async def asyncpg_connection(dsn: str) -> AsyncIterator[AsyncCaller]:
    connection = await asyncpg.connect(dsn)
    yield _asyncpg(connection)
    await connection.close(timeout=10)


@asynccontextmanager
async def asyncpg_pool(dsn: str) -> AsyncIterator[AsyncCaller]:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        yield _asyncpg(connection)


def _async_psycopg(given: Any) -> AsyncCaller:
    @asynccontextmanager
    async def transaction(level: str) -> AsyncIterator[None]:
        await given.set_isolation_level(psycopg.IsolationLevel[level.upper().replace(" ", "_")])
        async with given.transaction():
            yield

    return AsyncCaller(given, transaction, given.transaction, given.execute)


@asynccontextmanager
async def psycopg_async(dsn: str) -> AsyncIterator[AsyncCaller]:
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        yield _async_psycopg(connection)


@asynccontextmanager
async def psycopg_async_pool(dsn: str) -> AsyncIterator[AsyncCaller]:
    async with psycopg_pool.AsyncConnectionPool(dsn, min_size=1, open=False) as pool, pool.connection() as connection:
        yield _async_psycopg(connection)


def sa_async_connection(driver: str) -> Callable[[str], AbstractAsyncContextManager[AsyncCaller]]:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[AsyncCaller]:
        engine = sa_async.create_async_engine(url(dsn, driver))
        async with engine.connect() as connection:

            @asynccontextmanager
            async def transaction(level: str) -> AsyncIterator[None]:
                await connection.execution_options(isolation_level=level.upper())
                async with connection.begin():
                    yield

            yield AsyncCaller(
                connection, transaction, connection.begin_nested, lambda s: connection.execute(sqlalchemy.text(s))
            )
        await engine.dispose()

    return opened


def sa_async_session(driver: str, *, scoped: bool = False) -> Callable[[str], AbstractAsyncContextManager[AsyncCaller]]:
    @asynccontextmanager
    async def opened(dsn: str) -> AsyncIterator[AsyncCaller]:
        engine = sa_async.create_async_engine(url(dsn, driver))
        maker = sa_async.async_sessionmaker(engine)
        session: Any = sa_async.async_scoped_session(maker, asyncio.current_task) if scoped else maker()

        @asynccontextmanager
        async def transaction(level: str) -> AsyncIterator[None]:
            async with session.begin():
                if level != "read committed":
                    await session.connection(execution_options={"isolation_level": level.upper()})
                yield

        yield AsyncCaller(session, transaction, session.begin_nested, lambda s: session.execute(sqlalchemy.text(s)))
        await session.close()
        await engine.dispose()

    return opened


# Those that block -----------------------------------------------------------------------------------------------------


def in_thread(
    opened: Callable[[str], AbstractContextManager[tuple[Any, Any, Any, Any]]],
) -> Callable[[str], AbstractAsyncContextManager[SyncCaller]]:
    @asynccontextmanager
    async def caller(dsn: str) -> AsyncIterator[SyncCaller]:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as pool:

            async def call(fn: Callable[..., Any], *args: Any) -> Any:
                return await loop.run_in_executor(pool, fn, *args)

            block = opened(dsn)
            given, transaction, savepoint, execute = await call(block.__enter__)
            try:
                yield SyncCaller(call, given, transaction, savepoint, execute)
            finally:
                await call(block.__exit__, None, None, None)

    return caller


def _psycopg(given: Any) -> tuple[Any, Any, Any, Any]:
    @contextmanager
    def transaction(level: str) -> Iterator[None]:
        given.isolation_level = psycopg.IsolationLevel[level.upper().replace(" ", "_")]
        with given.transaction():
            yield

    return given, transaction, given.transaction, given.execute


@contextmanager
def psycopg_connection(dsn: str) -> Iterator[Any]:
    with psycopg.connect(dsn) as connection:
        yield _psycopg(connection)


@contextmanager
def psycopg_pool_connection(dsn: str) -> Iterator[Any]:
    with psycopg_pool.ConnectionPool(dsn, min_size=1, open=True) as pool, pool.connection() as connection:
        yield _psycopg(connection)


@contextmanager
def sa_connection(dsn: str) -> Iterator[Any]:
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    with engine.connect() as connection:

        @contextmanager
        def transaction(level: str) -> Iterator[None]:
            connection.execution_options(isolation_level=level.upper())
            with connection.begin():
                yield

        yield connection, transaction, connection.begin_nested, lambda s: connection.execute(sqlalchemy.text(s))
    engine.dispose()


def sa_session(*, scoped: bool = False) -> Callable[[str], AbstractContextManager[Any]]:
    @contextmanager
    def opened(dsn: str) -> Iterator[Any]:
        engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
        maker = orm.sessionmaker(engine)
        session: Any = orm.scoped_session(maker) if scoped else maker()

        @contextmanager
        def transaction(level: str) -> Iterator[None]:
            with session.begin():
                if level != "read committed":
                    session.connection(execution_options={"isolation_level": level.upper()})
                yield

        yield session, transaction, session.begin_nested, lambda s: session.execute(sqlalchemy.text(s))
        session.close()
        engine.dispose()

    return opened


def use_django(dsn: str) -> None:
    """Point Django's connections, which each thread opens for itself, to a database."""
    if not settings.configured:
        settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}}, USE_TZ=True)
        django.setup()
    from django.db import connections

    found = conninfo_to_dict(dsn)
    connections.settings["default"].update(
        NAME=found["dbname"], HOST=found["host"], PORT=found["port"], USER=found["user"]
    )


def django_connection(*, proxy: bool, at_server: bool = False) -> Callable[[str], AbstractContextManager[Any]]:
    @contextmanager
    def opened(dsn: str) -> Iterator[Any]:
        use_django(dsn)
        from django.db import connection, connections, transaction

        options = connections["default"].settings_dict["OPTIONS"]
        options["server_side_binding"] = at_server

        @contextmanager
        def begun(level: str) -> Iterator[None]:
            with transaction.atomic():
                execute(f"set transaction isolation level {level}")
                yield

        def execute(statement: str) -> None:
            with connection.cursor() as cursor:
                cursor.execute(statement)

        yield connection if proxy else connections["default"], begun, transaction.atomic, execute
        connections.close_all()

    return opened


CALLERS: dict[str, Callable[[str], AbstractAsyncContextManager[Any]]] = {
    "asyncpg": asyncpg_connection,
    "asyncpg-pool": asyncpg_pool,
    "psycopg-async": psycopg_async,
    "psycopg-async-pool": psycopg_async_pool,
    "sqlalchemy-AsyncConnection-asyncpg": sa_async_connection("asyncpg"),
    "sqlalchemy-AsyncConnection-psycopg": sa_async_connection("psycopg"),
    "sqlalchemy-AsyncSession-asyncpg": sa_async_session("asyncpg"),
    "sqlalchemy-AsyncSession-psycopg": sa_async_session("psycopg"),
    "sqlalchemy-async_scoped_session": sa_async_session("asyncpg", scoped=True),
    "psycopg": in_thread(psycopg_connection),
    "psycopg-pool": in_thread(psycopg_pool_connection),
    "sqlalchemy-Connection": in_thread(sa_connection),
    "sqlalchemy-Session": in_thread(sa_session()),
    "sqlalchemy-scoped_session": in_thread(sa_session(scoped=True)),
    "django": in_thread(django_connection(proxy=True)),
    "django-connections-item": in_thread(django_connection(proxy=False)),
    "django-server-side-binding": in_thread(django_connection(proxy=True, at_server=True)),
}
"""Each kind that is taken: with the DSN it gives a caller, for the length of a block."""
FEW = ("asyncpg", "psycopg-async", "sqlalchemy-AsyncSession-asyncpg", "sqlalchemy-Session", "psycopg", "django")
"""One of each way in which a statement is sent."""

"""The PostgreSQL that the tests run on: one server a session, a fresh database a test.

``TASKQ_TEST_PG`` picks the server's version (18, the default, or 15). ``TASKQ_UNDER_TEST`` names the folder that
``taskq`` must be imported from where that is not this checkout, such as an installed wheel's site-packages.
``TASKQ_TEST_MIGRATIONS`` names another folder of migrations to build the databases from, ``TASKQ_TEST_SERVER`` the
folder of a running server's socket, where starting one for each of many short sessions would take too long.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import asyncpg
import psycopg
import pytest
from psycopg import sql
from servers import Server, serve

import taskq
from taskq.embedded_binaries import ServerUser

TEMPLATE = f"template_{os.getpid()}"
_numbers = count(1)


# A shell starts what it runs in the background with Ctrl-C ignored, and every process of a test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart() -> None:
    found = Path(taskq.__file__ or "").resolve().parent
    wanted = Path(os.environ.get("TASKQ_UNDER_TEST") or Path(__file__).parents[1]).resolve()
    print(f"taskq under test: {found} (version {os.environ.get('TASKQ_TEST_PG') or '18'} of PostgreSQL)")
    if found not in {wanted, wanted / "taskq"}:
        pytest.exit(f"taskq was imported from {found}, not from {wanted}: the wrong code would be tested", returncode=4)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def pg_server() -> Iterator[Server]:
    """The session's throwaway server."""
    if running := os.environ.get("TASKQ_TEST_SERVER"):
        yield Server("", Path(), Path(), Path(running), Path(), 0, ServerUser.current())
        return
    with serve() as server:
        yield server


@pytest.fixture(scope="session")
def template(pg_server: Server) -> Iterator[str]:
    """The name of a database to which all migrations have been applied; every ``dsn`` is a clone of it."""
    from taskq import migrate

    _create(pg_server, TEMPLATE)
    try:
        folder = os.environ.get("TASKQ_TEST_MIGRATIONS")
        migrate.up(pg_server.dsn(TEMPLATE), folder=Path(folder) if folder else None)
        yield TEMPLATE
    finally:
        # Also where the migrations are broken: the next session of this process makes it anew.
        _drop(pg_server, TEMPLATE)


@pytest.fixture
def dsn(pg_server: Server, template: str) -> Iterator[str]:
    """A fresh migrated database, dropped after the test whoever is still connected."""
    name = _create(pg_server, f"test_{os.getpid()}_{next(_numbers)}", template=template)
    yield pg_server.dsn(name)
    _drop(pg_server, name)


@pytest.fixture
def empty_dsn(pg_server: Server) -> Iterator[str]:
    """A fresh database with nothing in it."""
    name = _create(pg_server, f"test_{os.getpid()}_{next(_numbers)}")
    yield pg_server.dsn(name)
    _drop(pg_server, name)


@pytest.fixture
def conn(dsn: str) -> Iterator[psycopg.Connection]:
    """A psycopg connection in autocommit to the test's database."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
async def aconn(dsn: str, anyio_backend: str) -> AsyncIterator[asyncpg.Connection]:
    """An asyncpg connection to the test's database."""
    connection = await asyncpg.connect(dsn)
    yield connection
    if not connection.is_closed():
        await connection.close(timeout=10)


def _create(server: Server, name: str, *, template: str = "template0") -> str:
    # Copying files clones in half the time of logging every block (22 against 40 ms); with fsync off it is safe enough.
    statement = sql.SQL("CREATE DATABASE {} TEMPLATE {} STRATEGY file_copy").format(
        sql.Identifier(name), sql.Identifier(template)
    )
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(statement)
    return name


def _drop(server: Server, name: str) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

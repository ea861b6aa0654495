"""A connection pooler in between is noticed and refused, before a statement can be another client's."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest
from proxy import proxy

from taskq import TaskQ
from taskq.db.pools import AsyncPool, connect_async, connect_sync
from taskq.errors import DatabaseUnavailable, PoolerInBetween

pytestmark = pytest.mark.anyio

# BackendKeyData: 'K', a length of 12, the process id, the secret.
KEY_DATA = re.compile(rb"K\x00\x00\x00\x0c(....)", re.DOTALL)


@contextmanager
def pooler(dsn: str, folder: Path) -> Iterator[str]:
    """A proxy that, as poolers do, names a process id of its own making at the start of each connection."""
    params = psycopg.conninfo.conninfo_to_dict(dsn)
    behind = f"{params['host']}/.s.PGSQL.{params['port']}"
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / ".s.PGSQL.5432"))
    server.listen()

    def pump(source: socket.socket, target: socket.socket, *, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(KEY_DATA.sub(b"K\x00\x00\x00\x0c\x00\x00\x00\x07", data, count=1) if answers else data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            real = socket.socket(socket.AF_UNIX)
            real.connect(behind)
            threading.Thread(target=pump, args=(client, real), kwargs={"answers": False}, daemon=True).start()
            threading.Thread(target=pump, args=(real, client), kwargs={"answers": True}, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"postgresql://{params['user']}@/{params['dbname']}?host={folder}&port=5432"
    finally:
        server.close()


@pytest.fixture
def pooled(dsn: str, tmp_path: Path) -> Iterator[str]:
    with pooler(dsn, tmp_path) as way:
        yield way


async def test_the_async_client_and_the_workers_connections_refuse_a_pooler(pooled: str) -> None:
    with pytest.raises(PoolerInBetween, match="a connection pooler stands in between"):
        await connect_async(pooled)
    app = TaskQ(pooled)

    @app.task
    async def work() -> None: ...

    with pytest.raises(PoolerInBetween, match="name the PostgreSQL server itself"):
        await work.enqueue()


def test_the_sync_client_prepares_nothing_under_a_name(pooled: str) -> None:
    with connect_sync(pooled) as conn:
        for _ in range(12):
            conn.execute("select 1")
        assert conn.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)


async def test_a_direct_connection_is_taken(dsn: str) -> None:
    conn = await connect_async(dsn)
    assert await conn.fetchval("select 1") == 1
    await conn.close()


@pytest.mark.parametrize("pooled_there", [True, False])
async def test_a_connection_that_stalls_while_it_is_looked_at_is_given_up_at_once(dsn: str, pooled_there: bool) -> None:
    with proxy(dsn) as way:
        pool = AsyncPool(way.dsn)

        async def opens() -> None:
            async with asyncio.timeout(0.3):
                if pooled_there:
                    async with pool.connection():
                        pass
                else:
                    await connect_async(way.dsn)

        held = way.hold(answer="pg_backend_pid")
        opening = asyncio.create_task(opens())
        await asyncio.wait([opening], timeout=5)
        ended = opening.done()
        # Whatever went wrong, the task must end: the tests' loop waits for it.
        way.restore()
        with pytest.raises((TimeoutError, DatabaseUnavailable)):
            await opening
        await pool.terminate()
    assert held.is_set()
    assert ended, "it waited for a server that does not answer, beyond its own limit"

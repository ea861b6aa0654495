"""The caller's own connection, of every library: its transaction decides about the job; nothing of it is changed."""
# ruff: noqa: PT012 (what must be refused is a whole block)

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from client_kit import Shop, stored
from connections_kit import CALLERS, FEW, url
from helpers import aeventually
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

from taskq import IdempotencyConflict, TaskQ, UniqueKeyHeld
from taskq.client.connections import driver_error
from taskq.errors import DatabaseUnavailable, SchemaBehind, UnsupportedConnection, UnusableConnection
from taskq.worker import Worker, WorkerOptions

pytestmark = pytest.mark.anyio
ODD = 'é "q" \\ {a,b} \' NULL % %s $1 :x 😀'
"""A text with everything that has a meaning to somebody on the way."""


class Undo(Exception):
    """Raised to leave a transaction by a rollback."""


@pytest.fixture
async def shop(dsn: str, anyio_backend: str) -> AsyncIterator[Shop]:
    made = Shop(dsn)
    yield made
    await made.app.close()


def seen(conn: psycopg.Connection) -> list[int]:
    return [n for (n,) in conn.execute("select (payload->>'n')::int from taskq.all_jobs order by 1").fetchall()]


@pytest.mark.parametrize("kind", CALLERS)
async def test_the_job_commits_or_vanishes_with_the_callers_transaction(
    shop: Shop, dsn: str, conn: psycopg.Connection, kind: str
) -> None:
    async with CALLERS[kind](dsn) as caller:
        async with caller.transaction("read committed"):
            first = await caller.enqueue(shop.double, 1)
            with pytest.raises(Undo):
                async with caller.savepoint():
                    await caller.enqueue(shop.double, 2)
                    raise Undo
            async with caller.savepoint():
                third = await caller.enqueue(shop.double, 3)
            assert first.inserted
            assert seen(conn) == []
        assert seen(conn) == [1, 3]
        with pytest.raises(Undo):
            async with caller.transaction("read committed"):
                await caller.enqueue(shop.double, 4)
                await caller.enqueue(shop.double, 5)
                raise Undo
        assert seen(conn) == [1, 3]
        # The connection is as good as before, also after a refusal was rolled back.
        async with caller.transaction("read committed"):
            await caller.enqueue(shop.double, 6, unique_key="k")
            with pytest.raises(UniqueKeyHeld):
                async with caller.savepoint():
                    await caller.enqueue(shop.double, 7)
                    await caller.enqueue(shop.double, 8, unique_key="k", on_conflict="raise")
            await caller.enqueue(shop.double, 9)
    assert seen(conn) == [1, 3, 6, 9]
    assert (await first.info()).id != (await third.info()).id


@pytest.mark.parametrize("kind", CALLERS)
async def test_what_is_sent_is_stored_as_it_is_and_answered_in_order(
    shop: Shop, dsn: str, conn: psycopg.Connection, kind: str
) -> None:
    taken = await shop.anything.using(unique_key=ODD).enqueue(0)
    async with CALLERS[kind](dsn) as caller:
        async with caller.transaction("read committed"):
            requests = [
                shop.anything.using(unique_key=key, idempotency_key=other, meta={"m": ODD}).job(ODD)
                for key, other in (("k1", None), (ODD, None), (None, ODD), ("k1", None), (None, None), (None, "NULL"))
            ]
            jobs = await caller.enqueue_many(shop.app, requests)
        assert [job.inserted for job in jobs] == [True, False, True, False, True, True]
        assert (jobs[1], jobs[3]) == (taken, jobs[0])
        assert (await jobs[2].info()).payload == {"x": ODD}
        assert (await jobs[2].info()).meta == {"m": ODD}
        keys = conn.execute("select key from taskq.idempotency_keys").fetchall()
        assert set(keys) == {(ODD,), ("NULL",)}
        assert (await jobs[0].info()).unique_key == "k1"
        with pytest.raises(IdempotencyConflict) as conflict:
            async with caller.transaction("read committed"):
                await caller.enqueue(shop.anything, 1, idempotency_key=ODD)
        assert conflict.value.job_id == jobs[2].id


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("kind", FEW)
async def test_above_read_committed_a_key_taken_meanwhile_is_a_serialization_failure_never_a_wrong_answer(
    shop: Shop, dsn: str, conn: psycopg.Connection, kind: str, level: str
) -> None:
    async with CALLERS[kind](dsn) as caller:
        async with caller.transaction(level):
            await caller.execute("select count(*) from taskq.jobs")
            # These commit after the caller's snapshot was taken, so it cannot see who has the keys.
            taken = await shop.double.using(unique_key="k").enqueue(1)
            known = await shop.double.using(idempotency_key="i").enqueue(2)
            plain = await caller.enqueue(shop.double, 3, unique_key="free", idempotency_key="free")
            for keys in ({"unique_key": "k"}, {"unique_key": "k", "on_conflict": "raise"}, {"idempotency_key": "i"}):
                with pytest.raises(Exception) as caught:  # noqa: PT011
                    async with caller.savepoint():
                        await caller.enqueue(shop.double, 2, **keys)
                assert getattr(driver_error(caught.value), "sqlstate", None) == "40001", repr(caught.value)
        assert (await plain.info()).payload == {"n": 3}
        # Tried again, the answer is the right one.
        async with caller.transaction(level):
            assert await caller.enqueue(shop.double, 9, unique_key="k") == taken
            assert await caller.enqueue(shop.double, 2, idempotency_key="i") == known
            with pytest.raises(IdempotencyConflict):
                async with caller.savepoint():
                    await caller.enqueue(shop.double, 9, idempotency_key="i")
    assert seen(conn) == [1, 2, 3]


@pytest.mark.parametrize("kind", FEW)
async def test_a_transaction_that_takes_nothing_is_named(
    shop: Shop, dsn: str, conn: psycopg.Connection, kind: str
) -> None:
    async with CALLERS[kind](dsn) as caller:
        with pytest.raises(UnusableConnection, match="is read-only; enqueue in one that may write"):
            async with caller.transaction("read committed"):
                await caller.execute("set transaction read only")
                await caller.enqueue(shop.double, 1)
        with pytest.raises(Undo):
            async with caller.transaction("read committed"):
                with pytest.raises(Exception, match="division by zero"):
                    await caller.execute("select 1/0")
                with pytest.raises(UnusableConnection, match="has failed before"):
                    await caller.enqueue(shop.double, 1)
                raise Undo
        async with caller.transaction("read committed"):
            await caller.enqueue(shop.double, 2)
    assert seen(conn) == [2]


async def test_without_a_transaction_the_job_commits_at_once(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    async with AsyncExitStack() as stack:
        one = await psycopg.AsyncConnection.connect(dsn, autocommit=True)
        stack.push_async_callback(one.close)
        await shop.double.using(connection=one).enqueue(1)
        two = await asyncpg.connect(dsn)
        stack.push_async_callback(two.close)
        await shop.double.using(connection=two).enqueue(2)
        for n, driver in enumerate(("asyncpg", "psycopg"), 3):
            engine = sa_async.create_async_engine(url(dsn, driver), isolation_level="AUTOCOMMIT")
            stack.push_async_callback(engine.dispose)
            three = await stack.enter_async_context(engine.connect())
            await shop.double.using(connection=three).enqueue(n)
        caller = await stack.enter_async_context(CALLERS["django"](dsn))
        await caller.enqueue(shop.double, 5)
        assert seen(conn) == [1, 2, 3, 4, 5]


async def test_sqlalchemy_commits_what_it_did_not_begin_itself(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    """The enqueue is the first thing that happens: the transaction begins with it, and the commit must know of it."""
    for n, driver in enumerate(("asyncpg", "psycopg")):
        engine = sa_async.create_async_engine(url(dsn, driver))
        async with engine.connect() as connection:
            await connection.execution_options(stream_results=True, yield_per=2)
            await shop.double.using(connection=connection).enqueue(10 + n)
            assert connection.in_transaction()
            await connection.commit()
            await shop.double.using(connection=connection).enqueue(99)
        async with sa_async.AsyncSession(engine) as session:
            await shop.double.using(connection=session).enqueue(20 + n)
            await session.commit()
            await shop.double.using(connection=session).enqueue(99)
        await engine.dispose()
    async with CALLERS["sqlalchemy-Session"](dsn) as caller:
        await caller.enqueue(shop.double, 30)
        await caller.call(caller.given.commit)
        await caller.enqueue(shop.double, 99)
    assert seen(conn) == [10, 11, 20, 21, 30]


async def test_a_worker_runs_the_job_once_it_has_committed_and_no_sooner(dsn: str, conn: psycopg.Connection) -> None:
    app = TaskQ(dsn)
    committed = False
    early: list[int] = []

    @app.task
    async def act(n: int) -> int:
        if not committed:
            early.append(n)
        return n

    worker = Worker(app.tasks, dsn, options=WorkerOptions(lease=5, grace=1, poll_interval=0.05))
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(30):
            await worker.ready.wait()
            async with CALLERS["sqlalchemy-AsyncSession-asyncpg"](dsn) as caller:
                async with caller.transaction("read committed"):
                    job = await caller.enqueue(act, 1)
                    # A later job comes and goes; its worker has looked, and found nothing else.
                    assert await (await act.enqueue(2)).result(timeout=20) == 2
                    assert early == [2]
                    committed = True
                assert await job.result(timeout=20) == 1
    finally:
        worker.stop()
        await running
        await app.close()
    assert early == [2]


# What the owner of the connection has set -----------------------------------------------------------------------------

SETTINGS = {
    "DateStyle": "German, DMY",
    "IntervalStyle": "sql_standard",
    "TimeZone": "Asia/Kathmandu",
    "search_path": "nowhere",
    "bytea_output": "escape",
    "client_encoding": "LATIN1",
    "standard_conforming_strings": "off",
}


@pytest.mark.parametrize("kind", FEW)
async def test_settings_of_the_session_neither_disturb_nor_change(
    shop: Shop, dsn: str, conn: psycopg.Connection, kind: str
) -> None:
    async with CALLERS[kind](dsn) as caller:
        async with caller.transaction("read committed"):
            for name, value in SETTINGS.items():
                await caller.execute(f"set {name} = '{value}'")
            job = await caller.enqueue(shop.anything, ODD, unique_key="é", run_in="1h", meta={"m": ODD})
            many = await caller.enqueue_many(shop.app, [shop.anything.job(ODD + "\\u00e9")])
            with pytest.raises(UnusableConnection, match="client_encoding, .* has no way to write the key '😀'"):
                await caller.enqueue(shop.anything, 1, idempotency_key="😀")
            names = ", ".join(f"current_setting('{name}')" for name in SETTINGS)
            values = ", ".join(f"'{value}'" for value in SETTINGS.values())
            await caller.execute(f"select 1 / (array[{names}] = array[{values}])::int")
            await caller.execute("set standard_conforming_strings = on")
        await caller.execute("reset all")
    info = await job.info()
    assert (info.payload, info.meta, info.unique_key) == ({"x": ODD}, {"m": ODD}, "é")
    assert (await many[0].info()).payload == {"x": ODD + "\\u00e9"}


async def test_codecs_and_adapters_of_its_owner_stay(shop: Shop, dsn: str, aconn: asyncpg.Connection) -> None:
    from psycopg.adapt import Dumper, Loader
    from psycopg.rows import dict_row

    class Loud(Loader):
        def load(self, data: Any) -> Any:
            raise AssertionError("the owner's loader was used")

    class LoudDumper(Dumper):
        def dump(self, obj: Any) -> Any:
            raise AssertionError("the owner's dumper was used")

    for kind in ("json", "jsonb", "uuid"):
        await aconn.set_type_codec(kind, encoder=str, decoder=lambda _: "mine", schema="pg_catalog")
    await aconn.reset_type_codec("uuid", schema="pg_catalog")
    await aconn.set_type_codec("uuid", encoder=str, decoder=str, schema="pg_catalog")
    job = await shop.double.using(connection=aconn).enqueue(1)
    assert (await job.info()).payload == {"n": 1}
    assert await aconn.fetchval("select '{}'::jsonb") == "mine"

    async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row, autocommit=True) as mine:
        for name in ("jsonb", "uuid", "bool", "int4", "text"):
            mine.adapters.register_loader(name, Loud)
        for python in (str, int, list):
            mine.adapters.register_dumper(python, LoudDumper)
        job = await shop.double.using(connection=mine, unique_key="k").enqueue(2)
        assert (await job.info()).payload == {"n": 2}
        assert mine.row_factory is dict_row
        with pytest.raises(AssertionError, match="the owner's loader"):
            await (await mine.execute("select true")).fetchone()
        with pytest.raises(AssertionError, match="the owner's dumper"):
            await mine.execute("select %s", ["x"])
        assert mine.cursor_factory is psycopg.AsyncCursor


# Wrong kinds and wrong states -----------------------------------------------------------------------------------------


async def refused(shop: Shop, connection: Any) -> str:
    with pytest.raises((UnsupportedConnection, UnusableConnection)) as caught:
        await shop.double.using(connection=connection).enqueue(1)
    return f"{type(caught.value).__name__}: {caught.value}"


async def refused_sync(shop: Shop, connection: Any) -> str:
    def enqueue() -> None:
        shop.double.using(connection=connection).enqueue_sync(1)

    with pytest.raises((UnsupportedConnection, UnusableConnection)) as caught:
        await asyncio.to_thread(enqueue)
    return f"{type(caught.value).__name__}: {caught.value}"


async def test_what_is_no_connection_or_for_the_other_call_is_named(
    shop: Shop, dsn: str, conn: psycopg.Connection
) -> None:
    import django.db
    import psycopg_pool

    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    async_engine = sa_async.create_async_engine(url(dsn, "asyncpg"))
    pool = asyncpg.create_pool(dsn)
    other_pool = psycopg_pool.ConnectionPool(dsn, open=False)
    for wrong, words in (
        ("postgresql:///x", "builtins.str, which is no connection that is known"),
        (3, "the async calls take an asyncpg connection"),
        (pool, r"asyncpg.pool.Pool, a pool; .* pool.acquire\(\)"),
        (other_pool, r"ConnectionPool, a pool; .* pool.connection\(\)"),
        (engine, r"Engine, an engine; .* engine.begin\(\)"),
        (async_engine, r"AsyncEngine, an engine; .*async with engine.begin\(\)"),
        (orm.sessionmaker(engine), "a maker of sessions"),
        (sa_async.async_sessionmaker(async_engine), "a maker of sessions"),
        (django.db.connections, r"connections\['default'\]"),
    ):
        for said in (await refused(shop, wrong), await refused_sync(shop, wrong)):
            assert said.startswith("UnsupportedConnection: connection= is a ")
            assert re.search(words, said), said
    with orm.Session(engine) as session, engine.connect() as connection:
        for blocking in (conn, session, connection, django.db.connection):
            said = await refused(shop, blocking)
            assert "blocks, so an async call cannot use it; call enqueue_sync()" in said
            assert type(blocking).__qualname__ in said
    async with await psycopg.AsyncConnection.connect(dsn) as mine, async_engine.connect() as theirs:
        for awaited in (mine, theirs, sa_async.AsyncSession(async_engine)):
            said = await refused_sync(shop, awaited)
            assert "must be awaited, so a sync call cannot use it; 'await enqueue()'" in said
        assert "of an async engine" in await refused_sync(shop, orm.Session(async_engine.sync_engine))
    engine.dispose()
    await async_engine.dispose()
    assert stored(conn) == 0


async def test_a_session_without_a_database_of_ours_is_named(shop: Shop, dsn: str) -> None:
    lite = sqlalchemy.create_engine("sqlite://")
    assert "a sqlite+pysqlite engine; make the engine with postgresql+psycopg" in await refused_sync(
        shop, orm.Session(lite)
    )
    assert "UnusableConnection" in await refused_sync(shop, orm.Session())
    assert "UnusableConnection" in await refused(shop, sa_async.AsyncSession())
    engine = sqlalchemy.create_engine(url(dsn, "psycopg"))
    assert "Autobegin is disabled" in await refused_sync(shop, orm.Session(engine, autobegin=False))
    with engine.connect() as closed:
        pass
    assert "This Connection is closed" in await refused_sync(shop, closed)
    async_engine = sa_async.create_async_engine(url(dsn, "asyncpg"))
    async with async_engine.connect() as gone:
        pass
    assert "closed" in await refused(shop, gone)
    async with sa_async.AsyncSession(async_engine) as session:
        with pytest.raises(sqlalchemy.exc.DBAPIError):
            await session.execute(sqlalchemy.text("select 1/0"))
        assert "has failed before" in await refused(shop, session)
    engine.dispose()
    await async_engine.dispose()
    from django.db.backends.sqlite3.base import DatabaseWrapper

    assert "Django's connection 'lite' to sqlite; pass the one" in await refused_sync(
        shop, DatabaseWrapper({"NAME": ":memory:"}, "lite")
    )


async def test_a_connection_in_the_wrong_state_is_named(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    mine = await asyncpg.connect(dsn)
    slow = asyncio.create_task(mine.execute("select pg_sleep(60)"))
    await aeventually(lambda: _sleeps(conn))
    assert "in the middle of another statement" in await refused(shop, mine)
    conn.execute("select pg_cancel_backend(pid) from pg_stat_activity where query = 'select pg_sleep(60)'")
    with pytest.raises(asyncpg.QueryCanceledError):
        await slow
    await mine.close()
    assert "UnusableConnection: connection= is a asyncpg.connection.Connection, and it is closed" in await refused(
        shop, mine
    )
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        async with pool.acquire() as proxy:
            pass
        assert "gone back to its pool" in await refused(shop, proxy)

    other = await psycopg.AsyncConnection.connect(dsn)
    async with other.cursor() as cursor, cursor.copy("copy (select generate_series(1, 10)) to stdout") as copy:
        await copy.read()
        assert "a COPY or a stream" in await refused(shop, other)
        while await copy.read():
            pass
    async with other.pipeline():
        assert "pipeline mode" in await refused(shop, other)
    await other.rollback()
    assert (await shop.double.using(connection=other).enqueue(1)).inserted
    await other.close()
    assert "it is closed, or was lost" in await refused(shop, other)
    plain = psycopg.connect(dsn)
    plain.close()
    assert "it is closed, or was lost" in await refused_sync(shop, plain)
    assert stored(conn) == 0


def _sleeps(conn: psycopg.Connection) -> bool:
    return bool(
        conn.execute(
            "select from pg_stat_activity where query = 'select pg_sleep(60)' and wait_event = 'PgSleep'"
        ).fetchall()
    )


async def test_a_lost_connection_is_not_taken_for_a_closed_one(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    for kind in FEW:
        async with CALLERS[kind](dsn) as caller:
            await caller.execute("select 'of the caller'")
            cut = conn.execute(
                "select pg_terminate_backend(pid, 10000) from pg_stat_activity where query = 'select ''of the caller'''"
            ).fetchall()
            assert cut == [(True,)], kind
            with pytest.raises((DatabaseUnavailable, UnusableConnection)):
                await caller.enqueue(shop.double, 1)
            if kind.startswith("sqlalchemy-Session"):
                await caller.call(caller.given.invalidate)
            elif kind.startswith("sqlalchemy"):
                await caller.given.invalidate()
    assert stored(conn) == 0


async def test_a_broken_atomic_block_of_django_is_named(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    from django.db import transaction

    async with CALLERS["django"](dsn) as caller:
        with pytest.raises(Undo):
            async with caller.transaction("read committed"):
                await caller.call(transaction.set_rollback, True)
                with pytest.raises(UnusableConnection, match="You can't execute queries until the end of the 'atomic'"):
                    await caller.enqueue(shop.double, 1)
                raise Undo
    assert stored(conn) == 0


async def test_a_database_without_the_schema_is_named_by_every_library(shop: Shop, empty_dsn: str) -> None:
    for kind in FEW:
        async with CALLERS[kind](empty_dsn) as caller:
            with pytest.raises(SchemaBehind, match="run 'taskq migrate up'"):
                async with caller.transaction("read committed"):
                    await caller.enqueue(shop.double, 1)


async def test_an_async_view_of_django_enqueues_in_its_thread(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    from asgiref.sync import sync_to_async
    from connections_kit import use_django
    from django.db import connection, connections, transaction

    use_django(dsn)
    await sync_to_async(connections.close_all)()
    await sync_to_async(lambda: connection.settings_dict.update(connections.settings["default"]))()

    def place(n: int, fail: bool) -> None:
        with transaction.atomic():
            shop.double.using(connection=connection).enqueue_sync(n)
            if fail:
                raise Undo

    await sync_to_async(place)(1, False)
    with pytest.raises(Undo):
        await sync_to_async(place)(2, True)
    await sync_to_async(connections.close_all)()
    assert seen(conn) == [1]


def test_neither_sqlalchemy_nor_django_is_imported() -> None:
    code = (
        "import sys, json, taskq.app, taskq.client.connections as c\n"
        "try: c.kind_for(3, awaited=True)\n"
        "except Exception: pass\n"
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] in ('sqlalchemy', 'django', 'psycopg_pool')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == []

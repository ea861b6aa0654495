"""What a role or a database sets for its sessions: a job runs all the same, from migration to result."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from psycopg import sql
from sql import violations

from taskq import TaskQ, migrate
from taskq.db.dsn import parse_dsn
from taskq.db.pools import OWN_SETTINGS, connect_async, connect_sync
from taskq.db.queries import load
from taskq.worker import Worker, WorkerOptions

pytestmark = pytest.mark.anyio
SETTINGS = {
    "formats": {
        "DateStyle": "German, DMY",
        "IntervalStyle": "iso_8601",
        "TimeZone": "Pacific/Chatham",
        "client_encoding": "LATIN1",
        "bytea_output": "escape",
        "extra_float_digits": "-5",
        "lc_messages": "C",
    },
    "other-formats": {"DateStyle": "SQL, DMY", "IntervalStyle": "sql_standard", "TimeZone": "America/New_York"},
    "serializable": {"default_transaction_isolation": "serializable"},
    "transactions": {
        "default_transaction_isolation": "repeatable read",
        "default_transaction_read_only": "on",
        "default_transaction_deferrable": "on",
    },
    "names": {"search_path": "nowhere", "standard_conforming_strings": "off", "backslash_quote": "on"},
    "plans": {
        "jit": "on",
        "jit_above_cost": "0",
        "plan_cache_mode": "force_custom_plan",
        "row_security": "off",
        "enable_indexscan": "off",
    },
}
ODD = 'it\'s \\ "é" 😀'


def set_for(dsn: str, of: str, settings: dict[str, str]) -> None:
    """Set for the database, or for the role in it."""
    params = parse_dsn(dsn).params
    database, user = sql.Identifier(params["dbname"]), sql.Identifier(params["user"])
    whose = sql.SQL("database {}").format(database)
    if of == "role":
        whose = sql.SQL("role {} in database {}").format(user, database)
    with psycopg.connect(dsn, autocommit=True) as conn:
        for name, value in settings.items():
            # search_path and the like take names or words: as a string each is one.
            conn.execute(sql.SQL("alter {} set {} = {}").format(whose, sql.SQL(name), sql.Literal(value)))


@pytest.mark.parametrize("kind", SETTINGS)
async def test_a_job_runs_whatever_the_sessions_default_to(empty_dsn: str, kind: str) -> None:
    of = "database" if kind in ("formats", "names", "transactions") else "role"
    set_for(empty_dsn, of, SETTINGS[kind])
    migrate.up(empty_dsn)
    assert migrate.status(empty_dsn)
    app = TaskQ(empty_dsn)

    @app.task
    async def say(text: str) -> str:
        return text

    worker = Worker(app.tasks, empty_dsn, options=WorkerOptions(lease=5, grace=1, poll_interval=0.1))
    running = asyncio.create_task(worker.run())
    try:
        async with asyncio.timeout(40):
            await worker.ready.wait()
            first = await say.using(run_in="0.1s", unique_key="k").enqueue(ODD)
            assert await first.result(timeout=20) == ODD
            second = await asyncio.to_thread(lambda: say.using(deadline="1h", meta={"m": ODD}).enqueue_sync(ODD))
            assert await asyncio.to_thread(second.result_sync, 20) == ODD
            info = await asyncio.to_thread(second.info_sync)
            assert info == await second.info()
            assert info.deadline is not None
            assert (info.deadline - info.created_at).total_seconds() == 3600
            # As a program in another language does it, in a session that has all of these settings.
            with psycopg.connect(empty_dsn) as theirs:
                theirs.read_only = False
                theirs.execute("set client_encoding = 'UTF8'")
                found = theirs.execute(
                    "select taskq.enqueue('say', jsonb_build_object('text', %s::text), run_at => now(), "
                    "run_in => interval '1 second', deadline => now() + interval '1 hour')::text",
                    [ODD],
                ).fetchone()
            assert found is not None
            assert await say.handle(found[0]).result(timeout=20) == ODD
            assert await app.cancel(first.id) == "finished"
            assert await asyncio.to_thread(app.cancel_sync, first.id) == "finished"
    finally:
        worker.stop()
        await running
        await app.close()
    with connect_sync(empty_dsn) as conn:
        assert violations(conn) == []


async def test_sessions_of_our_own_have_what_they_need_by_both_drivers(dsn: str) -> None:
    set_for(dsn, "role", {name: value for settings in SETTINGS.values() for name, value in settings.items()})
    wanted = load("client", "taskq")["own_session"]
    theirs = await connect_async(dsn)
    try:
        for name, value in OWN_SETTINGS.items():
            assert await theirs.fetchval("select current_setting($1)", name) == value
        assert await theirs.fetch(wanted) == [], "both drivers' sessions are set up alike"
    finally:
        await theirs.close()
    with connect_sync(dsn) as mine:
        for name, value in OWN_SETTINGS.items():
            assert mine.execute("select current_setting(%s)", [name]).fetchone() == (value,)
        assert mine.info.encoding == "utf-8"
        assert mine.info.transaction_status == psycopg.pq.TransactionStatus.IDLE

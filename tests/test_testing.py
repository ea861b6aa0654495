"""The kit for users' tests: a database for the length of a block, and a worker that runs what is due in it."""

from __future__ import annotations

import asyncio

import asyncpg
import psycopg
import pytest
from servers import Server
from sql import violations

from taskq import JobContext, PolicyLayer, Retry, Snooze, TaskQ, constant
from taskq.errors import DatabaseUnavailable, FaultInjected, NotDrained, SyncCallInEventLoop
from taskq.testing import Drained, Point, database, drain, drain_sync, faults

anyio = pytest.mark.anyio


def databases(server: Server) -> set[str]:
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        return {name for (name,) in conn.execute("select datname from pg_database where datname like 'taskq_test_%'")}


# Databases ------------------------------------------------------------------------------------------------------------


def test_a_database_has_the_schema_and_is_dropped_whoever_is_connected(pg_server: Server) -> None:
    before = databases(pg_server)
    with database(pg_server.dsn()) as made:
        [name] = databases(pg_server) - before
        stays = psycopg.connect(made.dsn, autocommit=True)
        assert stays.execute("select current_database()").fetchall() == [(name,)]
        app = TaskQ(made.dsn)

        @app.task
        def double(n: int) -> int:
            return 2 * n

        job = double.enqueue_sync(4)
        assert drain_sync(app) == Drained(succeeded=1)
        assert job.result_sync(timeout=1) == 8
        assert violations(stays) == []
    assert databases(pg_server) == before
    assert made.dsn == ""
    with pytest.raises(psycopg.OperationalError):
        stays.execute("select 1")
    stays.close()
    app.close_sync()


@anyio
async def test_a_database_in_an_event_loop(pg_server: Server) -> None:
    before = databases(pg_server)
    async with database(pg_server.dsn(), schema="other") as made:
        conn = await asyncpg.connect(made.dsn)
        assert await conn.fetchval("select count(*) from other.jobs") == 0
        await conn.close()
    assert databases(pg_server) == before


def test_a_database_is_dropped_when_its_block_or_its_migration_fails(
    pg_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = databases(pg_server)
    with pytest.raises(ZeroDivisionError), database(pg_server.dsn()):
        raise ZeroDivisionError

    def fails(*_: object, **__: object) -> None:
        assert len(databases(pg_server) - before) == 1
        raise RuntimeError("no migration today")

    monkeypatch.setattr("taskq.migrate.up", fails)
    with pytest.raises(RuntimeError, match="no migration today"), database(pg_server.dsn()):
        pass
    assert databases(pg_server) == before


def test_a_server_that_does_not_answer_is_told_of(tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("no_server")
    with pytest.raises(DatabaseUnavailable), database(f"postgresql://taskq@/postgres?host={empty}&port=5432"):
        pass


def test_without_a_dsn_the_embedded_server_is_used(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, pg_server: Server
) -> None:
    started = []

    class Embedded:
        dsn = pg_server.dsn()

        @classmethod
        def start(cls) -> Embedded:
            started.append(cls())
            return started[0]

        def stop(self) -> None:
            started.append("stopped")

    monkeypatch.setattr("taskq.testing.databases.EmbeddedPostgres", Embedded)
    with database() as made, psycopg.connect(made.dsn) as conn:
        assert len(started) == 1
        assert violations(conn) == []
    assert started[1:] == ["stopped"]


# Draining -------------------------------------------------------------------------------------------------------------


@anyio
async def test_a_drain_runs_what_is_due_and_what_becomes_due_by_it(dsn: str, aconn: asyncpg.Connection) -> None:
    async with TaskQ(dsn) as app:
        seen: list[str] = []

        @app.task(queue="second")
        async def follow_up(n: int) -> None:
            seen.append(f"follow-up {n}")

        @app.task(retry=Retry(3, constant(0)))
        async def first(ctx: JobContext, n: int) -> None:
            seen.append(f"first {n}")
            if ctx.attempt == 1:
                raise ValueError("once")
            await follow_up.using(queue="a-third").enqueue(n)

        @app.task
        async def fails() -> None:
            raise ValueError("always")

        await first.enqueue(1)
        await fails.using(max_attempts=1).enqueue()
        await follow_up.using(run_in="1h").enqueue(2)
        assert await drain(app) == Drained(succeeded=2, failed=1, retried=1, waiting=1)
        assert seen == ["first 1", "first 1", "follow-up 1"]
        assert await drain(app) == Drained(waiting=1)
        assert await drain(app, later=True) == Drained(succeeded=1)
        assert seen[3:] == ["follow-up 2"]
    assert await aconn.fetchval("select count(*) from taskq.check_invariants('all')") == 0


@anyio
async def test_what_waits_is_made_due_the_earliest_first(dsn: str) -> None:
    async with TaskQ(dsn) as app:
        seen: list[str] = []

        @app.task
        async def at(when: str, again: bool = False) -> None:
            seen.append(when)
            if again and seen.count(when) == 1:
                raise Snooze("90m")

        await at.using(run_in="2h").enqueue("two hours")
        await at.using(run_in="1d").enqueue("a day")
        await at.using(run_in="1h").enqueue("an hour", again=True)
        done = await drain(app, later=True)
        assert done == Drained(succeeded=3, retried=1)
        assert seen == ["an hour", "an hour", "two hours", "a day"]


@anyio
async def test_a_paused_queue_is_left(dsn: str, aconn: asyncpg.Connection) -> None:
    async with TaskQ(dsn, defaults=PolicyLayer(priority=4)) as app:

        @app.task(queue="mail")
        async def send() -> None: ...

        await send.enqueue()
        await aconn.execute("select taskq.pause_queue('mail')")
        assert await drain(app, later=True) == Drained(waiting=1)
        await aconn.execute("select taskq.resume_queue('mail')")
        assert await drain(app) == Drained(succeeded=1)


@anyio
async def test_a_line_is_run_to_its_end_in_order(dsn: str, aconn: asyncpg.Connection) -> None:
    async with TaskQ(dsn) as app:
        seen: list[int] = []

        @app.task
        async def step(n: int) -> None:
            seen.append(n)
            if n == 1 and seen.count(n) == 1:
                raise Snooze("1h")

        of_one = step.using(ordering_key="k")
        await app.enqueue_many([of_one.job(n) for n in range(5)])
        await of_one.using(run_in="1d").enqueue(5)
        assert await drain(app) == Drained(succeeded=4, retried=1, waiting=2)
        assert await drain(app, later=True) == Drained(succeeded=2)
        assert seen == [0, 1, 2, 3, 4, 1, 5]


@anyio
async def test_a_turn_that_could_not_be_given_at_once_is_given_by_the_drain(
    dsn: str, aconn: asyncpg.Connection
) -> None:
    async with TaskQ(dsn) as app:

        @app.task
        async def step(n: int) -> None: ...

        async with aconn.transaction(isolation="repeatable_read"):
            await aconn.fetch("select 1")
            job = await step.using(ordering_key="k", connection=aconn).enqueue(1)
        assert await job.status() == "held"
        assert await drain(app) == Drained(succeeded=1)


@anyio
async def test_what_is_left_in_a_line_that_is_held_up_is_told(dsn: str, aconn: asyncpg.Connection) -> None:
    async with TaskQ(dsn) as app:

        @app.task(ordering="halt", max_attempts=1)
        async def step(n: int) -> None:
            if n == 1:
                raise ValueError("no")

        of_one = step.using(ordering_key="k")
        await app.enqueue_many([of_one.job(n) for n in range(4)])
        assert await drain(app, later=True) == Drained(succeeded=1, failed=1, held=2)
        await aconn.execute("select taskq.resume_ordering('k', 'not needed')")
        assert await drain(app) == Drained(succeeded=2)


@anyio
async def test_what_a_paused_run_holds_is_told(dsn: str, aconn: asyncpg.Connection) -> None:
    async with TaskQ(dsn) as app:

        @app.task
        async def step(n: int) -> int:
            return n + 1

        @app.workflow
        def flow(n: int) -> int:
            return step.step(step.step(n))

        run = await flow.start(1)
        await run.pause("a look first")
        assert await drain(app, later=True) == Drained(held=1)
        await run.resume("looked")
        assert await drain(app) == Drained(succeeded=2)


@anyio
async def test_what_is_not_done_in_time_is_named(dsn: str, aconn: asyncpg.Connection) -> None:
    async with TaskQ(dsn) as app:

        @app.task
        async def takes_for_ever() -> None:
            await asyncio.sleep(60)

        job = await takes_for_ever.enqueue()
        with pytest.raises(
            NotDrained, match=rf"after 0\.5 s: left are 1 (running|pending) of task 'takes_for_ever' .*{job.id}"
        ):
            await drain(app, timeout=0.5)
        assert await aconn.fetchval("select status from taskq.jobs") == "pending"


@anyio
async def test_a_job_of_a_task_that_the_app_does_not_have_is_named_at_once(dsn: str) -> None:
    async with TaskQ(dsn) as app, TaskQ(dsn) as other:

        @app.task
        async def known() -> None: ...

        @other.task
        async def stranger() -> None: ...

        job = await stranger.enqueue()
        with pytest.raises(
            NotDrained, match=rf"no task for 1 pending of task 'stranger' .*{job.id}.*import the module"
        ):
            await drain(app)


@anyio
async def test_a_worker_that_a_fault_has_ended_fails_the_drain(dsn: str, aconn: asyncpg.Connection) -> None:
    async with TaskQ(dsn) as app:

        @app.task
        async def quick() -> None: ...

        await quick.enqueue()
        with faults.at(Point.END_RECEIVED, "after", "raise"), pytest.raises(FaultInjected, match="after end_received"):
            await drain(app)
        assert await aconn.fetchval("select status from taskq.history") == "succeeded"


@anyio
async def test_the_sync_form_refuses_an_event_loop(dsn: str) -> None:
    with pytest.raises(SyncCallInEventLoop, match=r"await drain\("):
        drain_sync(TaskQ(dsn))

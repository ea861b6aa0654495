"""Runs are started on every kind of connection, under keys, and only of what can run."""
# ruff: noqa: PT012 (what must be refused is a whole block)

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import killed_at_start
import psycopg
import pytest
from connections_kit import CALLERS, SyncCaller
from helpers import aeventually
from plan_kit import chain, spec
from runs_kit import edge, node
from started_kit import count, simple, working
from worker_kit import BOUND

from taskq import (
    InvalidRequest,
    PayloadError,
    PlanConflict,
    PlanError,
    Run,
    RunNotFound,
    TaskQ,
)
from taskq.errors import ConfigurationError, PlanRefused, ResultTimeout, UnsupportedConnection
from taskq.workflow import Plan, Workflow

pytestmark = pytest.mark.anyio


# On the caller's connection -------------------------------------------------------------------------------------------


class Undo(Exception):
    """Raised to leave a transaction by a rollback."""


async def start_on(caller: Any, flow: Workflow[[int], int], n: int, **options: Any) -> Run[int]:
    bound = flow.using(connection=caller.given, **options)
    if isinstance(caller, SyncCaller):
        started: Run[int] = await caller.call(lambda: bound.start_sync(n))
        return started
    return await bound.start(n)


@pytest.mark.parametrize("kind", CALLERS)
async def test_a_run_commits_or_vanishes_with_the_callers_transaction(
    app: TaskQ, dsn: str, conn: psycopg.Connection[Any], kind: str
) -> None:
    flow = simple(app)

    def seen() -> list[int]:
        found = conn.execute("select (input->>'n')::int from taskq.runs order by 1").fetchall()
        assert count(conn, "nodes") == 2 * len(found)
        assert count(conn, "jobs") == len(found)
        return [n for (n,) in found]

    async with CALLERS[kind](dsn) as caller:
        async with caller.transaction("read committed"):
            first = await start_on(caller, flow, 1, meta={"é": '"'})
            with pytest.raises(Undo):
                async with caller.savepoint():
                    await start_on(caller, flow, 2)
                    raise Undo
            async with caller.savepoint():
                await start_on(caller, flow, 3)
            assert first.created
            assert seen() == []
            with pytest.raises(RunNotFound, match="there is no run"):
                await first.info()
        assert seen() == [1, 3]
        with pytest.raises(Undo):
            async with caller.transaction("read committed"):
                await start_on(caller, flow, 4, run_key="gone")
                raise Undo
        assert seen() == [1, 3]
        # The key went with its run, and a refusal that was rolled back to a savepoint harms nothing.
        async with caller.transaction("read committed"):
            assert (await start_on(caller, flow, 5, run_key="gone")).created
            with pytest.raises(PlanConflict):
                async with caller.savepoint():
                    await start_on(caller, flow, 6, run_key="gone")
            assert not (await start_on(caller, flow, 5, run_key="gone")).created
    assert seen() == [1, 3, 5]
    assert (await first.info()).meta == {"é": '"'}


async def test_a_result_is_awaited_before_the_transaction_has_committed(app: TaskQ, dsn: str) -> None:
    flow = simple(app)
    async with working(app, dsn), AsyncExitStack() as stack:
        connection = await asyncpg.connect(dsn)
        stack.push_async_callback(connection.close)
        async with connection.transaction():
            run = await flow.using(connection=connection).start(5)
            waiting = asyncio.create_task(run.result(timeout=BOUND))
            with pytest.raises(ResultTimeout, match=str(run.id)):
                await run.result(timeout=0)
            assert not waiting.done()
        assert await waiting == 20


async def test_a_connection_of_the_other_kind_is_refused(app: TaskQ, dsn: str, conn: psycopg.Connection[Any]) -> None:
    flow = simple(app)
    with pytest.raises(UnsupportedConnection):
        await flow.using(connection=conn).start(1)
    with pytest.raises(UnsupportedConnection):
        await flow.using(connection=object()).start(1)
    assert count(conn, "runs") == 0


@pytest.mark.parametrize("way", ["alone", "in a transaction"])
async def test_a_client_that_is_killed_while_it_starts_a_run_leaves_all_of_it_or_nothing(
    dsn: str, conn: psycopg.Connection[Any], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More items than one transaction gives jobs, and it is killed when some of its rows are written."""
    n = 1100
    monkeypatch.setenv("TASKQ_DSN", dsn)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    at_it = "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with psycopg.connect(dsn) as holder:
        # The nodes are there when the first of their jobs waits for this.
        holder.execute("lock table taskq.jobs in share mode")
        client = await asyncio.create_subprocess_exec(sys.executable, killed_at_start.__file__, way, str(n))
        pid = await aeventually(lambda: conn.execute(at_it).fetchone(), 60)
        client.kill()
        assert await client.wait() == -signal.SIGKILL
    left = "select not exists (select from pg_stat_activity where pid = %s)"
    await aeventually(lambda: conn.execute(left, pid).fetchone() == (True,), BOUND)
    if way == "alone":
        [(run,)] = conn.execute("select id from taskq.runs where parent_run is null").fetchall()
        async with TaskQ(dsn) as app, working(killed_at_start.app, dsn):
            assert await Run(app, run).result(timeout=60) == n * (n - 1) // 2
    else:
        assert [count(conn, table) for table in ("runs", "nodes", "receipts", "jobs")] == [0, 0, 0, 0]
    assert conn.execute("select * from taskq.check_invariants('all')").fetchall() == []


# Keys -----------------------------------------------------------------------------------------------------------------


async def test_starters_that_race_for_a_key_get_one_run(app: TaskQ, dsn: str, conn: psycopg.Connection[Any]) -> None:
    flow = simple(app)
    for key in ("first", "second", "third"):
        async with AsyncExitStack() as stack:
            connections = [await asyncpg.connect(dsn) for _ in range(20)]
            for connection in connections:
                stack.push_async_callback(connection.close)
            started = asyncio.Barrier(20)

            async def start(
                connection: asyncpg.Connection, key: str = key, started: asyncio.Barrier = started
            ) -> Run[int]:
                await started.wait()
                return await flow.using(run_key=key, connection=connection).start(7)

            found = await asyncio.gather(*(start(connection) for connection in connections))
        assert len({run.id for run in found}) == 1
        assert sum(run.created for run in found) == 1
    # And by their own pools, in processes' stead: applications that know nothing of one another.
    apps = [TaskQ(dsn) for _ in range(4)]
    try:
        flows = [simple(each) for each in apps]
        found = await asyncio.gather(*(flow.using(run_key="fourth").start(7) for flow in flows for _ in range(5)))
        assert len({run.id for run in found}) == 1
        assert sum(run.created for run in found) == 1
    finally:
        for each in apps:
            await each.close()
    assert count(conn, "runs") == 4
    assert count(conn, "nodes") == 8
    assert count(conn, "plans") == 1


async def test_a_key_stands_for_one_plan_and_one_input(app: TaskQ, dsn: str, conn: psycopg.Connection[Any]) -> None:
    flow = simple(app)
    first = await flow.using(run_key="k").start(1)
    again = await flow.using(run_key="k", meta={"other": "meta"}).start(n=1)
    assert (first.created, again.created, again) == (True, False, first)
    assert len({first, again}) == 1
    with pytest.raises(PlanConflict, match="k") as caught:
        await flow.using(run_key="k").start(2)
    assert caught.value.run_id == first.id

    other_app = TaskQ(dsn)
    try:

        @other_app.task
        async def double(n: int) -> int:
            return 3 * n

        @other_app.workflow(name="flow")
        def changed(n: int) -> int:
            return double.step(n)

        @other_app.workflow
        def other(n: int) -> int:
            return double.step(n)

        with pytest.raises(PlanConflict) as caught:
            await changed.using(run_key="k").start(1)
        assert caught.value.run_id == first.id
        # Keys are those of one workflow.
        assert (await other.using(run_key="k").start(1)).created
    finally:
        await other_app.close()
    assert (await flow.start(1)).created
    assert (await flow.using(run_key=None).start(1)).created
    assert count(conn, "runs") == 4
    assert (await first.info()).meta is None


@pytest.mark.parametrize("key", ["", "two words", "é", "k" * 129, 5, b"k"])
def test_keys_are_words(key: Any) -> None:
    with pytest.raises(InvalidRequest, match="run_key is .*; give 1 to 128 printable ASCII characters without spaces"):
        simple(TaskQ("postgresql://nobody@127.0.0.1:1/x")).using(run_key=key)


@pytest.mark.parametrize(
    ("meta", "error", "said"),
    [
        ("x", InvalidRequest, "meta is of type str"),
        ({"x": "y" * 70_000}, InvalidRequest, "the limit is 65536"),
        ({"x": object()}, PayloadError, "meta.x"),
    ],
    ids=["text", "large", "object"],
)
def test_what_travels_with_a_run_is_checked(meta: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        simple(TaskQ("postgresql://nobody@127.0.0.1:1/x")).using(meta=meta)


# What is refused before anything is stored ----------------------------------------------------------------------------


def stored(conn: psycopg.Connection[Any]) -> dict[str, int]:
    return {
        table: count(conn, table)
        for table in ("policies", "plans", "plan_nodes", "plan_edges", "runs", "nodes", "receipts", "jobs")
    }


async def test_a_plan_that_is_wrong_leaves_no_row(app: TaskQ, conn: psycopg.Connection[Any]) -> None:
    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.workflow
    def flow(n: int) -> int:
        double.step("x")  # type: ignore[arg-type]
        return double.step(n)

    before = stored(conn)
    for _ in range(2):
        with pytest.raises(PlanError) as caught:
            await flow.start(1)
        assert len(caught.value.faults) == 2
        with pytest.raises(PlanError):
            await asyncio.to_thread(lambda: flow.start_sync(1))
    assert stored(conn) == before


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((), {}, "missing 1 required positional argument: 'n'"),
        ((1, 2), {}, "takes 1 positional argument but 2 were given"),
        ((1,), {"m": 2}, "unexpected keyword argument 'm'"),
        (("x",), {}, "n: Expected `int`, got `str`"),
        ((object(),), {}, "n: object cannot be written as JSON"),
    ],
    ids=["missing", "more", "unknown", "kind", "object"],
)
async def test_arguments_that_do_not_fit_leave_no_row(
    app: TaskQ, conn: psycopg.Connection[Any], args: tuple[Any, ...], kwargs: dict[str, Any], said: str
) -> None:
    flow, before = simple(app), stored(conn)
    with pytest.raises(PayloadError, match=said):
        await flow.start(*args, **kwargs)
    with pytest.raises(PayloadError, match=said):
        await flow.using(run_key="k").start(*args, **kwargs)
    assert stored(conn) == before


THREE = spec([node("a"), node("b"), node("c")])
CYCLES = {
    "self": (THREE | {"edges": [edge(0, 0)]}, "a -> a", "from 0 to 0"),
    "two": (THREE | {"edges": [edge(0, 1), edge(1, 0)]}, "a -> b -> a", "from 1 to 0"),
    "three in a thousand": (chain(1000, edge(502, 500)), "n500 -> n501 -> n502 -> n500", "from 502 to 500"),
    "unknown": (THREE | {"edges": [edge(0, 9)]}, "there is no node 9", "from 0 to 9, and there are 3 nodes"),
    "below": (THREE | {"edges": [edge(-1, 0)]}, "there is no node -1", "from -1 to 0"),
}


@pytest.mark.parametrize("kind", CYCLES)
def test_the_database_too_stores_no_plan_that_cannot_run(conn: psycopg.Connection[Any], kind: str) -> None:
    given, said, refused = CYCLES[kind]
    before = stored(conn)
    with pytest.raises(PlanError, match=said):
        Plan.from_spec(given)
    # One who goes around the check: what is handed to the database is what was refused.
    with pytest.raises(psycopg.errors.DatabaseError, match=f"the plan cannot be stored: edge .* {refused}") as caught:
        conn.execute("select taskq.store_plan(%s)", [Plan(given, {}).text])
    assert caught.value.sqlstate == PlanRefused.sqlstate
    conn.rollback()
    assert stored(conn) == before


async def test_a_run_of_a_plan_that_is_not_stored_is_refused(app: TaskQ, conn: psycopg.Connection[Any]) -> None:
    flow = simple(app)
    await flow.start(1)
    conn.execute("delete from taskq.runs")
    conn.execute("alter table taskq.plans disable trigger all")
    conn.execute("update taskq.plans set hash = 'p' || repeat('0', 64)")
    conn.commit()
    with pytest.raises(PlanRefused, match=flow.plan.hash):
        await flow.start(1)


async def test_without_a_database_there_is_no_run() -> None:
    app = TaskQ()
    flow = simple(app)
    assert flow.plan.names == ["double", "double-2"]
    with pytest.raises(ConfigurationError):
        await flow.start(1)

"""Signals to runs on workers: whichever node waits is given them, also in a child run, each once."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from helpers import aeventually
from msgspec import Struct
from sql import rows
from started_kit import working

from taskq import (
    InvalidRequest,
    JobContext,
    RunNotFound,
    RunWrongState,
    SignalConflict,
    TaskQ,
    TooManySignals,
    gather,
)
from taskq.errors import SyncCallInEventLoop
from taskq.workflow import Run

pytestmark = pytest.mark.anyio


class Approval(Struct):
    by: str


def held(conn: psycopg.Connection[Any]) -> int:
    return len(rows(conn, "select from taskq.waiting_for_signals where status = 'held'"))


async def test_nodes_of_a_run_and_of_its_child_take_each_one_signal(dsn: str, conn: psycopg.Connection[Any]) -> None:
    app = TaskQ(dsn)

    @app.task
    async def approved(ctx: JobContext, n: int) -> str:
        return f"{n} by {(await ctx.wait_for('approval', Approval)).by}"

    @app.workflow
    def inner(n: int) -> str:
        return approved.step(n)

    @app.workflow
    def outer(n: int) -> tuple[str, str, str]:
        return gather(approved.node("first").step(n), approved.node("second").step(n), inner.child(n))

    async with app, working(app, dsn):
        run = await outer.start(7)
        assert await run.signal("approval", {"who": "nobody"}) in ("given", "kept")
        for by in ("ann", "bob"):
            await run.signal("approval", Approval(by), key=by)
        assert await run.signal("approval", Approval("ann"), key="ann") == "already"
        await aeventually(lambda: held(conn) == 1)
        assert await run.signal("approval", Approval("eve")) == "given"
        got = await run.result(timeout="60s")
        assert sorted(got) == ["7 by ann", "7 by bob", "7 by eve"]
        with pytest.raises(RunWrongState, match="succeeded"):
            await run.signal("approval")
        states = [row["state"] for row in rows(conn, "select state from taskq.run_signals order by id")]
        assert states == ["refused", "taken", "taken", "taken"]


async def test_what_a_run_cannot_be_sent_is_refused_by_name(dsn: str, conn: psycopg.Connection[Any]) -> None:
    app = TaskQ(dsn)

    @app.task
    async def idle() -> None: ...

    @app.workflow
    def flow() -> None:
        return idle.step()

    async with app:
        run = await flow.start()
        assert await run.signal("go", 1, key="k") == "kept"
        with pytest.raises(SignalConflict):
            await run.signal("go", 2, key="k")
        for name, key in (("a b", None), ("go", "")):
            with pytest.raises(InvalidRequest):
                await run.signal(name, key=key)
        conn.execute("update taskq.installation set max_waiting_signals = 1")
        with pytest.raises(TooManySignals) as caught:
            await run.signal("go", 3)
        assert caught.value.waiting == 1
        with pytest.raises(RunNotFound):
            await Run[None](app, (await idle.enqueue()).id).signal("go")
        with pytest.raises(SyncCallInEventLoop):
            run.signal_sync("go")


def test_a_signal_to_a_run_is_sent_without_an_event_loop(dsn: str, conn: psycopg.Connection[Any]) -> None:
    app = TaskQ(dsn)

    @app.task
    def idle() -> None: ...

    @app.workflow
    def flow() -> None:
        return idle.step()

    run = flow.start_sync()
    assert run.signal_sync("go", Approval("ann"), key="k") == "kept"
    assert run.signal_sync("go", Approval("ann"), key="k") == "already"
    assert [row["payload"] for row in rows(conn, "select payload from taskq.run_signals")] == [{"by": "ann"}]
    app.close_sync()

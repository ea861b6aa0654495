"""Terminal effects that start a run: exactly one each, with checked arguments, and no chain of them without end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from cli_kit import Cli, make_cli  # noqa: F401
from helpers import aeventually
from plan_kit import NOWHERE, faults_of
from started_kit import count, working
from worker_kit import BOUND

from taskq import InvalidPolicy, JobContext, Ref, Retry, Run, TaskDefinitionError, TaskQ, TerminalEffect, Workflow

pytestmark = pytest.mark.anyio


@dataclass
class Basket:
    item: str
    n: int


def mending(app: TaskQ) -> Workflow[[int, Basket, str], str]:
    """What other ends start."""

    @app.task
    async def mend(ctx: JobContext, order_id: int, basket: Basket, note: str) -> str:
        assert ctx.effect is None  # it is the run that is one's
        return f"{order_id}: {basket.n} {basket.item}, {note}"

    @app.workflow
    def mending(order_id: int, basket: Basket, note: str = "as it was") -> str:
        return mend.step(order_id, basket, note)

    return mending


async def started(app: TaskQ, conn: psycopg.Connection[Any], of: Workflow[..., str]) -> Run[str]:
    """The one run that something has started."""
    found: list[Any] = []

    def there() -> bool:
        found[:] = conn.execute("select id from taskq.runs where started_by is not null").fetchall()
        conn.rollback()
        return bool(found)

    await aeventually(there, BOUND)
    [(run_id,)] = found
    return of.handle(run_id)


async def test_the_end_of_a_job_starts_a_run_with_what_it_refers_to(
    app: TaskQ, dsn: str, conn: psycopg.Connection[Any], cli: Cli
) -> None:
    flow = mending(app)
    effect = TerminalEffect(flow, on="failed", payload={"order_id": Ref.arg("order_id"), "basket": Ref.arg("basket")})
    assert effect.name == "mending"

    @app.task(retry=Retry(max_attempts=1), effects=[effect])
    async def sell(order_id: int, basket: Basket) -> None:
        raise ValueError("sold out")

    async with working(app, dsn):
        job = await sell.using(meta={"asked_by": "web"}).enqueue(7, Basket("chair", 2))
        run = await started(app, conn, flow)
        assert await run.result(timeout=BOUND) == "7: 2 chair, as it was"
        [told] = await job.effects()
        assert (told.name, told.task, told.status, told.settled) == ("mending", "mending:start", "succeeded", True)
    info = await run.info()
    assert (info.run_key, info.meta) == (f"job:{told.job_id}", {"asked_by": "web"})
    assert info.input == {"order_id": 7, "basket": {"item": "chair", "n": 2}, "note": "as it was"}
    shown = cli.ok("effects", "show", told.effect_key, "--json").json
    assert (shown["run_id"], shown["run_workflow"], shown["run_status"]) == (str(run.id), "mending", "succeeded")
    assert str(run.id) in cli.ok("effects", "show", told.effect_key).out


async def test_a_run_and_its_nodes_start_runs_too(app: TaskQ, dsn: str, conn: psycopg.Connection[Any]) -> None:
    flow = mending(app)

    @app.task
    async def work(n: int) -> Basket:
        return Basket("lamp", n)

    @app.task(retry=Retry(max_attempts=1))
    async def check(basket: Basket) -> str:
        if basket.n < 0:
            raise ValueError("too few")
        return "good"

    def starts(name: str, on: str, **more: Any) -> TerminalEffect:
        return TerminalEffect("mending", on=on, name=name, payload={"order_id": 1, **more})  # type: ignore[arg-type]

    @app.workflow(
        effects=[starts("well", "succeeded", basket=Basket("x", 1), note=Ref.result())],
    )
    def outer(n: int) -> str:
        undo = starts("undo", "succeeded", basket=Ref.result(), note=Ref.status())
        return check.step(work.node(compensate=undo).step(n))

    async with working(app, dsn):
        assert await (await outer.start(1)).result(timeout=BOUND) == "good"
        assert await (await started(app, conn, flow)).result(timeout=BOUND) == "1: 1 x, good"
        conn.execute("update taskq.runs set started_by = null")
        conn.commit()
        await outer.start(-1)
        assert await (await started(app, conn, flow)).result(timeout=BOUND) == "1: -1 lamp, succeeded"
    assert count(conn, "runs") == 4


async def test_one_effect_starts_one_run_whatever_is_killed(
    app: TaskQ, dsn: str, conn: psycopg.Connection[Any]
) -> None:
    flow = mending(app)
    basket = Basket("chair", 1)

    @app.task(effects=[TerminalEffect(flow, payload={"order_id": 1, "basket": basket})])
    async def sell() -> None: ...

    # A sequence goes on though its transaction is undone: the backend that starts the run dies twice.
    conn.execute("create sequence public.deaths")
    conn.execute(
        "create function public.die() returns trigger language plpgsql as $$ begin"
        " if new.task = 'mending:start' and nextval('public.deaths') <= 2 then"
        "   perform pg_terminate_backend(pg_backend_pid()); perform pg_sleep(10);"
        " end if; return null; end $$"
    )
    conn.execute("create trigger die after insert on taskq.history for each row execute function public.die()")
    conn.commit()
    async with working(app, dsn):
        job = await sell.enqueue()
        await job.result(timeout=BOUND)
        [effect] = await job.effects()
        assert effect.job_id is not None
        for died in (1, 2):

            def waits(died: int = died) -> bool:
                [[n]] = conn.execute("select count(*) from taskq.ledger where job_id = %s", [effect.job_id]).fetchall()
                conn.rollback()
                return int(n) == died

            await aeventually(waits, BOUND)
            assert count(conn, "runs") == 0
            conn.rollback()
            assert await app.retry(effect.job_id) == "due"
        run = await started(app, conn, flow)
        assert await run.result(timeout=BOUND) == "1: 1 chair, as it was"
    assert count(conn, "runs") == 1


async def test_a_chain_that_leads_through_runs_ends(app: TaskQ, dsn: str, conn: psycopg.Connection[Any]) -> None:
    @app.task(effects=[TerminalEffect("again", on="succeeded", payload={"n": Ref.arg("n")})])
    async def work(n: int) -> None: ...

    @app.workflow
    def again(n: int) -> None:
        work.step(n)

    def over() -> bool:
        [[n]] = conn.execute("select count(*) from taskq.effect_intents where fault = 'refused'").fetchall()
        conn.rollback()
        return bool(n)

    async with working(app, dsn):
        await again.start(3)
        await aeventually(over, BOUND)
    depths = conn.execute("select effect_depth, count(*) from taskq.runs group by 1 order by 1").fetchall()
    assert depths == [(depth, 1) for depth in range(9)]


def app_with_flow() -> tuple[TaskQ, Workflow[[int, Basket, str], str]]:
    app = TaskQ(NOWHERE)
    return app, mending(app)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({"order_id": 1}, "lacks 'basket'"),
        ({"order_id": 1, "basket": Basket("x", 1), "other": 1}, "no parameter 'other'"),
        ({"order_id": "x", "basket": Basket("x", 1)}, "order_id: Expected `int`"),
        ({"order_id": Ref.arg("nothing"), "basket": Basket("x", 1)}, "no parameter of sell"),
    ],
)
def test_arguments_are_checked_as_those_of_a_task(payload: dict[str, Any], said: str) -> None:
    app, flow = app_with_flow()
    with pytest.raises(InvalidPolicy, match=said):

        @app.task(effects=[TerminalEffect(flow, payload=payload)])
        async def sell() -> None: ...


def test_a_workflow_of_another_application_is_refused() -> None:
    _, flow = app_with_flow()
    app = TaskQ(NOWHERE)
    with pytest.raises(InvalidPolicy, match="of another TaskQ"):

        @app.task(effects=[TerminalEffect(flow, payload={"order_id": 1, "basket": Basket("x", 1)})])
        async def sell() -> None: ...


def test_runs_do_not_start_one_another_in_a_circle() -> None:
    app = TaskQ(NOWHERE)

    @app.task
    async def work() -> None: ...

    @app.workflow(effects=[TerminalEffect("second")])
    def first() -> None:
        work.step()

    @app.workflow(effects=[TerminalEffect("third", on="failed"), TerminalEffect(work)])
    def second() -> None:
        work.step()

    @app.workflow(effects=[TerminalEffect(first)])
    def third() -> None:
        work.step()

    @app.workflow(effects=[TerminalEffect("itself")])
    def itself() -> None:
        work.step()

    [fault] = faults_of(first)
    assert "effects of runs lead in a circle: first -> second -> third -> first; a chain of effects must end" in fault
    [fault] = faults_of(itself)
    assert "itself -> itself" in fault


def test_names_of_hidden_tasks_are_taken() -> None:
    app = TaskQ(NOWHERE)

    @app.task(name="flow:start")
    async def work() -> None: ...

    def flow() -> None:
        work.step()

    with pytest.raises(TaskDefinitionError, match="there is a task 'flow:start'"):
        app.workflow(flow)
    with pytest.raises(TaskDefinitionError, match="the name of a workflow has at most 122 characters"):
        app.workflow(name="f" * 123)(flow)
    assert list(app.workflows) == []
    app.workflow(name="g")(flow)
    with pytest.raises(TaskDefinitionError, match="two tasks are named 'g:start'"):
        app.task(name="g:start")(work.fn)

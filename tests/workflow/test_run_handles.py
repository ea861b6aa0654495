"""Runs from outside: awaited, looked at, cancelled and reopened, with an event loop and without."""
# ruff: noqa: PT012 (what must be refused is a whole block)

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import pytest
from helpers import aeventually
from started_kit import failing, simple, working
from worker_kit import BOUND, Gates

from taskq import (
    InvalidPolicy,
    InvalidRequest,
    PlanConflict,
    PlanError,
    Ref,
    Retry,
    Run,
    RunCancelled,
    RunFailed,
    RunNotFound,
    RunWrongState,
    TaskQ,
    TerminalEffect,
)
from taskq.errors import ResultTimeout, SyncCallInEventLoop
from taskq.workflow import NodeInfo, RunInfo
from taskq.workflow.show import text

pytestmark = pytest.mark.anyio


# How runs end ---------------------------------------------------------------------------------------------------------


async def test_a_run_that_failed_says_which_node_and_why(app: TaskQ, dsn: str, gates: Gates) -> None:
    flow = failing(app, gates)
    gates.open()
    async with working(app, dsn):
        run = await flow.start(-1)
        with pytest.raises(RunFailed, match="-1 is below 0") as caught:
            await run.result(timeout=BOUND)
    assert caught.value.run_id == run.id
    assert caught.value.error["node"] == "first"
    assert caught.value.error["cause"]["type"] == "ValueError"
    info = await run.info()
    assert (info.status, info.finished, info.workflow, info.plan_hash) == ("failed", True, "flow", flow.plan.hash)
    assert info.error == caught.value.error
    assert info.result is None
    assert info.open_nodes == 0
    first, second = await run.nodes()
    assert (first.name, first.status, first.blocked_by, first.claim_epoch) == ("first", "failed", None, 1)
    assert first.error is not None
    assert first.error["message"] == "-1 is below 0"
    assert (second.name, second.status, second.blocked_by) == ("check", "blocked", "first")


async def test_a_run_is_looked_at_while_it_runs_and_cancelled(app: TaskQ, dsn: str, gates: Gates) -> None:
    flow = failing(app, gates)
    async with working(app, dsn):
        run = await flow.using(run_key="k", meta={"a": 1}).start(1)
        await gates.until_reached()
        info = await run.info()
        assert isinstance(info, RunInfo)
        assert (info.id, info.run_key, info.status, info.finished, info.meta) == (
            run.id,
            "k",
            "running",
            False,
            {"a": 1},
        )
        assert (info.open_nodes, info.input, info.run_epoch, info.generation) == (2, {"n": 1}, 1, 0)
        nodes = await run.nodes()
        assert [(type(each), each.name, each.task, each.status) for each in nodes] == [
            (NodeInfo, "first", "check", "running"),
            (NodeInfo, "check", "check", "waiting"),
        ]
        assert [(each.ix, each.waits_for) for each in nodes] == [(0, ()), (1, ("first",))]
        assert isinstance(nodes[0].job_id, UUID)
        with pytest.raises(ResultTimeout, match=f"run {run.id}.*running"):
            await run.result(timeout=0.05)
        answer = await run.cancel("not wanted", actor="tester")
        assert answer == "requested"
        with pytest.raises(RunCancelled, match="was cancelled") as caught:
            await run.result(timeout=BOUND)
        assert caught.value.error["message"] == "cancelled on request: not wanted"
        assert caught.value.error["reason"] == "not wanted"
        assert await run.cancel() == "finished"
    assert {each.name: each.status for each in await run.nodes()} == {"first": "cancelled", "check": "cancelled"}


async def test_a_run_that_nobody_works_on_is_cancelled_at_once_and_reopened(app: TaskQ, dsn: str, gates: Gates) -> None:
    flow = failing(app, gates)
    run = await flow.start(1)
    with pytest.raises(RunWrongState):
        await run.retry("too early")
    assert await run.cancel() == "cancelled"
    assert (await run.info()).status == "cancelled"
    assert await run.retry("again", actor="tester") == "reopened"
    info = await run.info()
    assert (info.status, info.generation, info.finished) == ("running", 1, False)
    gates.open()
    async with working(app, dsn):
        assert await run.result(timeout=BOUND) == 1


async def test_a_run_is_paused_and_resumed(
    app: TaskQ, dsn: str, gates: Gates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "taskq")
    flow = failing(app, gates)
    run = await flow.start(1)
    assert await run.pause("a look first", code="look", actor="tester") == "paused"
    assert await run.pause("another", code="other") == "already"
    assert (await run.info()).status == "paused"
    assert [(each.status, each.held_reason) for each in await run.nodes()] == [("held", "paused"), ("waiting", None)]
    with pytest.raises(InvalidRequest, match="reason"):
        await run.pause(" ")
    with pytest.raises(InvalidRequest, match="code"):
        await run.pause("why", code="two words")
    assert await run.resume("looked") == "resumed"
    assert await run.resume("looked") == "not_paused"
    told = [record.getMessage() for record in caplog.records if "run." in record.getMessage()]
    assert (len(told), "run.paused" in told[0], "run.resumed" in told[1]) == (2, True, True)
    gates.open()
    async with working(app, dsn):
        assert await run.result(timeout=BOUND) == 1
    assert (await run.pause("late"), await run.resume("late")) == ("finished", "finished")


async def test_a_run_waits_for_its_work_budget_and_is_allowed_more(
    app: TaskQ, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "taskq")

    @app.task
    async def one(n: int) -> int:
        return n + 1

    @app.workflow(work_budget=1)
    def twice(n: int) -> int:
        return one.step(one.step(n))

    run = await twice.start(1)
    async with working(app, dsn):

        async def waits() -> bool:
            return [each.status for each in await run.nodes()] == ["succeeded", "waiting"]

        await aeventually(waits)
        with pytest.raises(InvalidRequest, match="reason"):
            await run.set_work_budget(2, " ")
        for wrong in (0, 10_000_001, True, "2", None):
            with pytest.raises(InvalidRequest, match="budget"):
                await run.set_work_budget(wrong, "why")  # type: ignore[arg-type]
        assert await run.set_work_budget(2, "one more") == "set"
        # Told of it, the worker goes on at once.
        assert await run.result(timeout=BOUND) == 3
    assert await run.set_work_budget(3, "late") == "finished"
    assert [r.getMessage() for r in caplog.records if "run.budget_set" in r.getMessage()] != []


def test_a_work_budget_is_set_without_an_event_loop(app: TaskQ) -> None:
    @app.task
    async def one(n: int) -> int:
        return n + 1

    @app.workflow(work_budget=1)
    def once(n: int) -> int:
        return one.step(n)

    @app.workflow
    def free(n: int) -> int:
        return one.step(n)

    run = once.start_sync(1)
    assert (run.set_work_budget_sync(7, "why"), run.set_work_budget_sync(7, "why")) == ("set", "already")
    with pytest.raises(RunWrongState, match="has no work budget"):
        free.start_sync(1).set_work_budget_sync(7, "why")


@pytest.mark.parametrize("wrong", [0, 10_000_001, True, 1.5, "5"])
def test_a_work_budget_that_cannot_be_is_refused(app: TaskQ, wrong: Any) -> None:
    with pytest.raises(InvalidPolicy, match="work_budget is"):

        @app.workflow(work_budget=wrong)
        def flow() -> None: ...


def test_a_plan_has_a_work_budget_only_where_one_is_declared(app: TaskQ) -> None:
    @app.task
    async def one(n: int) -> int:
        return n + 1

    @app.workflow(work_budget=7)
    def bounded(n: int) -> int:
        return one.step(n)

    @app.workflow
    def free(n: int) -> int:
        return one.step(n)

    @app.workflow
    def around(n: int) -> int:
        return bounded(n)

    assert ("work_budget" in free.plan.spec, bounded.plan.spec["work_budget"]) == (False, 7)
    assert "7 bodies in all" in text(bounded.plan)
    with pytest.raises(PlanError, match=r"bounded has a work budget .* bounded\.child"):
        _ = around.plan


def test_a_run_is_paused_without_an_event_loop(app: TaskQ, gates: Gates) -> None:
    run = failing(app, gates).start_sync(1)
    assert (run.pause_sync("why"), run.pause_sync("why")) == ("paused", "already")
    assert (run.resume_sync("why"), run.resume_sync("why")) == ("resumed", "not_paused")


async def test_effects_of_a_run_take_its_arguments_and_its_result(app: TaskQ, dsn: str, gates: Gates) -> None:
    told: list[tuple[Any, ...]] = []
    gates.open()

    @app.task
    async def tell(n: int, more: str, result: Any = None, status: str = "", run: str = "") -> None:
        told.append((n, more, result, status, run))

    @app.task(retry=Retry(max_attempts=1))
    async def check(n: int) -> int:
        if n < 0:
            raise ValueError
        return n

    payload = {"n": Ref.arg("n"), "more": Ref.arg("more"), "status": Ref.status(), "run": Ref.job_id()}

    @app.workflow(
        effects=[
            TerminalEffect(tell, on="succeeded", payload=payload | {"result": Ref.result()}, name="good"),
            TerminalEffect(tell, on="failed", payload=payload, name="bad"),
        ]
    )
    def flow(n: int, more: str = "default") -> int:
        return check.step(n)

    async with working(app, dsn):
        good, bad = await flow.start(5), await flow.start(-5, "given")
        expected = {(5, "default", 5, "succeeded", str(good.id)), (-5, "given", None, "failed", str(bad.id))}
        await aeventually(lambda: set(told) == expected, BOUND)


async def test_handles_of_runs_that_are_not_there(app: TaskQ) -> None:
    flow, run_id = simple(app), uuid4()
    run = flow.handle(str(run_id))
    assert (run.id, repr(run), run == flow.handle(run_id), run == run_id) == (run_id, f"<Run {run_id}>", True, False)
    for call in (run.info, lambda: run.result(timeout=5), run.retry, lambda: run.pause("w"), lambda: run.resume("w")):
        with pytest.raises(RunNotFound, match=str(run_id)) as caught:
            await call()
        assert caught.value.run_id == run_id
    assert await run.nodes() == []
    assert await run.cancel() == "not_found"
    with pytest.raises(InvalidRequest, match="'x'"):
        flow.handle("x")
    with pytest.raises(InvalidRequest, match="reason"):
        await run.cancel(reason=5)  # type: ignore[arg-type]


async def test_a_handle_decodes_the_result_of_a_run_that_was_started_elsewhere(app: TaskQ, dsn: str) -> None:
    flow = simple(app)
    async with working(app, dsn):
        run = await flow.start(2)
        assert await flow.handle(run.id).result(timeout=BOUND) == 8
        assert await Run(app, run.id).result(timeout=BOUND) == 8


# Without an event loop ------------------------------------------------------------------------------------------------


async def test_code_without_an_event_loop_has_the_same(app: TaskQ, dsn: str, gates: Gates) -> None:
    flow = failing(app, gates)

    def sync(fn: Callable[[], Any]) -> Any:
        return asyncio.wait_for(asyncio.to_thread(fn), BOUND)

    async with working(app, dsn):
        run: Run[int] = await sync(lambda: flow.using(run_key="k").start_sync(3))
        again: Run[int] = await sync(lambda: flow.using(run_key="k").start_sync(3))
        assert (again, again.created) == (run, False)
        with pytest.raises(PlanConflict):
            await sync(lambda: flow.using(run_key="k").start_sync(4))
        with pytest.raises(ResultTimeout):
            await sync(lambda: run.result_sync(timeout=0))
        await gates.until_reached()
        assert (await sync(run.info_sync)).status == "running"
        assert [each.status for each in await sync(run.nodes_sync)] == ["running", "waiting"]
        assert await sync(lambda: run.cancel_sync("no", actor="x")) == "requested"
        with pytest.raises(RunCancelled):
            await sync(lambda: run.result_sync(timeout=BOUND))
        gates.open()
        assert await sync(run.retry_sync) == "reopened"
        assert await sync(lambda: run.result_sync(timeout=BOUND)) == 3
        bad: Run[int] = await sync(lambda: flow.start_sync(-1))
        with pytest.raises(RunFailed, match="below 0"):
            await sync(lambda: bad.result_sync(timeout=BOUND))
    nobody = flow.handle(uuid4())
    for call in (nobody.info_sync, nobody.result_sync, nobody.retry_sync):
        with pytest.raises(RunNotFound):
            await sync(call)
    assert await sync(nobody.nodes_sync) == []
    assert await sync(nobody.cancel_sync) == "not_found"


async def test_calls_that_block_are_refused_in_an_event_loop(app: TaskQ) -> None:
    flow = simple(app)
    run = flow.handle(uuid4())
    calls: dict[str, Callable[[], Any]] = {
        "start_sync": lambda: flow.start_sync(1),
        "result_sync": run.result_sync,
        "info_sync": run.info_sync,
        "nodes_sync": run.nodes_sync,
        "cancel_sync": run.cancel_sync,
        "retry_sync": run.retry_sync,
    }
    for name, call in calls.items():
        with pytest.raises(SyncCallInEventLoop, match=name):
            call()

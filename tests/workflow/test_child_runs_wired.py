"""Child runs from Python: wired by ``child``, run by workers, and told of by what reads runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from cli_kit import Cli, make_cli  # noqa: F401
from helpers import aeventually
from plan_kit import NOWHERE, args_of, compiled, faults_of, wires
from started_kit import working
from worker_kit import BOUND, Gates

from taskq import (
    JobContext,
    Outcome,
    Ref,
    Retry,
    RetryAfter,
    RunCancelled,
    RunFailed,
    RunNotFound,
    RunWrongState,
    TaskQ,
    TerminalEffect,
    WiringError,
    Workflow,
    collect,
)
from taskq.workflow.show import mermaid, text

pytestmark = pytest.mark.anyio


@dataclass
class Parcel:
    number: int
    weight: float


def sending(app: TaskQ, gates: Gates | None = None) -> Workflow[[int, float], Parcel]:
    """What others have as a child; a weight below 0 fails."""

    @app.task(queue="parcels", retry=Retry(max_attempts=1))
    async def weigh(number: int, weight: float) -> Parcel:
        if gates is not None:
            await gates.wait("weigh")
        if weight < 0:
            raise ValueError("too light")
        return Parcel(number, weight)

    @app.workflow(on_failure="finish")
    def sending(number: int, weight: float = 1.5) -> Parcel:
        return weigh.step(number, weight)

    return sending


def label(app: TaskQ) -> Any:
    @app.task
    async def label(parcel: Parcel) -> str:
        return f"{parcel.number}: {parcel.weight} kg"

    return label


# Wiring ---------------------------------------------------------------------------------------------------------------


def test_a_child_is_one_node_that_names_the_plan_of_its_run(nowhere: TaskQ) -> None:
    child, labels = sending(nowhere), label(nowhere)

    def outer(n: int) -> str:
        return labels.step(child.child(n))

    plan = compiled(nowhere, outer)
    node = plan["nodes"][0]
    assert (node["name"], node["child"]) == ("sending", child.plan.hash)
    assert (node["job"]["task"], node["job"]["queue"], node["job"]["priority"]) == ("sending:await", "parcels", 9)
    assert node["job"]["effect_class"] == "pure"
    assert node["job"]["required_worker_schema"] == 3
    # Defaults are written down: the plan is frozen.
    assert args_of(plan)["sending"] == {"number": {"input": "n", "path": []}, "weight": {"value": 1.5}}
    assert wires(plan) == {("sending", "label", "fail")}
    whole = [each.workflow for each in nowhere.workflows["outer"].plan.whole()]
    assert whole == ["sending", "outer"]
    assert child.plan.policies.keys() <= nowhere.workflows["outer"].plan.policies.keys()


def test_a_child_has_a_name_and_what_undoes_it(nowhere: TaskQ) -> None:
    child, labels = sending(nowhere), label(nowhere)

    @nowhere.task
    async def recall(number: int, parcel: Parcel) -> None: ...

    def outer(n: int) -> None:
        undo = TerminalEffect(recall, payload={"number": Ref.arg("number"), "parcel": Ref.result()})
        first = child.node("first", compensate=undo).child(n)
        child.node("second", after=[first]).child(number=2, weight=2.0)
        labels.step(child.child(3))

    faults = faults_of(nowhere.workflow(outer))
    assert len(faults) == 2
    assert "node second: its result is never used" in faults[0]
    assert "annotate the workflow sending as returning None" in faults[0]


def test_a_child_is_checked_like_a_step(nowhere: TaskQ) -> None:
    child, labels = sending(nowhere), label(nowhere)

    @nowhere.workflow
    def outer(name: str) -> str:
        labels.step(child.child(name))  # type: ignore[arg-type]
        labels.step(child.child("x"))  # type: ignore[arg-type]
        labels.step(child.child())  # type: ignore[call-arg]
        return child.child(1)  # type: ignore[return-value]

    faults = faults_of(outer)
    said = "; ".join(faults)
    assert "node sending: number takes int, and the argument name is str" in said
    assert "node sending-2: number: Expected `int`, got `str`" in said
    assert "node sending-3: sending() missing 1 required positional argument" in said
    assert "it returns str, and the result of sending-4 is Parcel" in said


def test_a_child_of_another_application_or_one_that_cannot_run_is_a_fault(nowhere: TaskQ) -> None:
    other = TaskQ(NOWHERE)
    strange, labels = sending(other), label(nowhere)

    @nowhere.workflow
    def broken(n: int) -> str:
        labels.step(strange.child(n))
        return labels.step(7)  # type: ignore[arg-type]

    @nowhere.workflow
    def outer(n: int) -> str:
        return broken.child(n)

    found = faults_of(outer)
    assert len(found) == 1
    assert "node broken: workflow broken cannot run" in found[0]
    assert "the workflow sending belongs to another TaskQ" in found[0]


def test_workflows_that_are_children_of_themselves_are_refused(nowhere: TaskQ) -> None:
    @nowhere.task
    async def work() -> None: ...

    @nowhere.workflow
    def first() -> None:
        work.step()
        second()

    @nowhere.workflow
    def second() -> None:
        third.child()

    @nowhere.workflow
    def third() -> None:
        first.child()

    with pytest.raises(WiringError, match="workflow third is a child run of itself: third -> first -> second -> third"):
        third.plan  # noqa: B018
    with pytest.raises(WiringError, match=r"first.child\(\) stands outside of a workflow"):
        first.child()


def test_a_workflow_whose_own_words_would_be_ignored_is_not_wired_in(nowhere: TaskQ) -> None:
    child, labels = sending(nowhere), label(nowhere)

    @nowhere.workflow
    def outer(n: int) -> str:
        return labels.step(child(n))

    @nowhere.workflow(on_failure="finish")
    def same(n: int) -> str:
        return labels.step(child(n))

    @nowhere.workflow
    def says_nothing(n: int) -> str:
        return labels.step(n)  # type: ignore[arg-type]

    [fault] = faults_of(outer)
    assert "workflow sending says on_failure='finish', and is wired here as a part of a run with 'cancel'" in fault
    assert "wire a run of its own, sending.child(...)" in fault
    assert same.plan.names == ["weigh", "label"]


def test_too_many_levels_and_too_many_nodes_are_faults(nowhere: TaskQ) -> None:
    @nowhere.task
    async def work() -> None: ...

    def level(below: Workflow[[], None] | None, name: str, n: int) -> Workflow[[], None]:
        @nowhere.workflow(name=name)
        def flow() -> None:
            for _ in range(n):
                work.step() if below is None else below.child()

        return flow

    flow = level(None, "w0", 1)
    for depth in range(1, 9):
        flow = level(flow, f"w{depth}", 1)
    assert (flow.plan.depth, flow.plan.size) == (8, 9)
    assert "it has 9 levels" in faults_of(level(flow, "w9", 1))[0]
    wide = level(level(None, "inner", 1000), "wide", 100)
    assert "and 100100 nodes at a time, the limits are 8 and 100000" in faults_of(wide)[0]


def test_a_plan_with_a_child_is_shown(nowhere: TaskQ) -> None:
    child, labels = sending(nowhere), label(nowhere)

    @nowhere.workflow
    def outer(n: int) -> str:
        return labels.step(child.child(n))

    assert "run of sending" in text(outer.plan)
    assert f"a run of plan {child.plan.hash[:9]}" in text(outer.plan)
    assert 'n0{{"sending<br/>run of sending"}}' in mermaid(outer.plan)


# Running --------------------------------------------------------------------------------------------------------------


def outer_of(app: TaskQ, child: Workflow[[int, float], Parcel]) -> Workflow[[int, float], str]:
    labels = label(app)

    @app.task
    async def tell(out: Outcome[Parcel]) -> str:
        return f"{out.status} {(out.error or {}).get('type')}"

    @app.workflow
    def outer(n: int, weight: float) -> str:
        return labels.step(child.child(n, weight))

    @app.workflow
    def tells(n: int, weight: float) -> str:
        return tell.step(collect(child.child(n, weight)))

    return outer


async def test_a_child_run_gives_its_result_to_its_parent(app: TaskQ, dsn: str, cli: Cli) -> None:
    outer = outer_of(app, sending(app))
    async with working(app, dsn):
        run = await outer.using(meta={"who": "me"}).start(7, 2.25)
        assert await run.result(timeout=BOUND) == "7: 2.25 kg"
    node = (await run.nodes())[0]
    assert (node.name, node.task, node.status, node.child_status) == (
        "sending",
        "sending:await",
        "succeeded",
        "succeeded",
    )
    assert node.child_run is not None
    child = await app.workflows["sending"].handle(node.child_run).info()
    assert (child.parent_run, child.parent_node, child.input) == (run.id, "sending", {"number": 7, "weight": 2.25})
    assert (child.result, child.meta) == ({"number": 7, "weight": 2.25}, {"who": "me"})
    info = await run.info()
    assert (info.parent_run, info.parent_node, info.started_by) == (None, None, None)
    shown = cli.ok("runs", "tree", str(run.id)).out
    assert f"run {node.child_run} is succeeded" in shown
    lines = [line for line in shown.splitlines() if line.split()[:1] in (["sending"], ["weigh"], ["label"])]
    assert [(line.split()[0], len(line) - len(line.lstrip())) for line in lines] == [
        ("sending", 0),
        ("weigh", 2),
        ("label", 2),
    ]
    assert str(run.id) in cli.ok("runs", "show", str(node.child_run)).out
    [row] = [row for row in cli.ok("runs", "list", "--json").json if row["id"] == str(node.child_run)]
    assert row["parent"] == str(run.id)
    assert cli.ok("verify", "--all").code == 0


async def test_a_child_that_fails_is_a_typed_failure_of_its_node(app: TaskQ, dsn: str) -> None:
    outer = outer_of(app, sending(app))
    async with working(app, dsn):
        run = await outer.start(7, -1.0)
        with pytest.raises(RunFailed) as caught:
            await run.result(timeout=BOUND)
        told = await app.workflows["tells"].start(8, -1.0)
        assert await told.result(timeout=BOUND) == "failed ChildRunFailed"
    node = (await run.nodes())[0]
    assert caught.value.error["node"] == "sending"
    assert caught.value.error["cause"]["type"] == "ChildRunFailed"
    assert f"run {node.child_run} failed: node weigh has failed: too light" in caught.value.error["message"]
    assert node.attempt is None
    attempts = await app.get(node.job_id)
    assert attempts is not None
    assert attempts.attempt == 1  # final at once


async def test_a_child_cancelled_by_itself_is_a_typed_failure_of_its_node(app: TaskQ, dsn: str, gates: Gates) -> None:
    outer_of(app, sending(app, gates))
    async with working(app, dsn):
        run = await app.workflows["tells"].start(7, 1.0)
        await gates.until_reached("weigh")
        child = (await run.nodes())[0].child_run
        assert child is not None
        assert await app.workflows["sending"].handle(child).cancel() == "requested"
        assert await run.result(timeout=BOUND) == "failed ChildRunCancelled"


async def test_a_cancelled_parent_stops_what_its_child_runs(app: TaskQ, dsn: str, gates: Gates) -> None:
    outer = outer_of(app, sending(app, gates))
    async with working(app, dsn):
        run = await outer.start(7, 1.0)
        await gates.until_reached("weigh")
        assert await run.cancel("enough") == "requested"
        with pytest.raises(RunCancelled):
            await run.result(timeout=BOUND)
        node = (await run.nodes())[0]
        assert (node.status, node.child_status) == ("cancelled", "cancelled")


async def test_a_retried_parent_retries_its_child(app: TaskQ, dsn: str, conn: psycopg.Connection[Any]) -> None:
    tries = 0

    @app.task(retry=Retry(max_attempts=1))
    async def flaky() -> int:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise ValueError("not yet")
        return tries

    @app.task
    async def first() -> int:
        return 1

    @app.workflow
    def inner() -> int:
        return flaky.node(after=[first.step()]).step()

    @app.workflow
    def outer() -> int:
        return inner.child()

    async with working(app, dsn):
        run = await outer.start()
        with pytest.raises(RunFailed):
            await run.result(timeout=BOUND)
        child = (await run.nodes())[0].child_run
        assert child is not None
        with pytest.raises(RunWrongState, match="is a part of run"):
            await inner.handle(child).retry()
        assert await run.retry() == "reopened"
        assert await run.result(timeout=BOUND) == 2
        assert (await run.nodes())[0].child_run == child
        assert (await inner.handle(child).info()).generation == 1
    assert conn.execute("select claim_epoch from taskq.history where task = 'first'").fetchall() == [(1,)]


async def test_the_body_that_waits_says_when_there_is_nothing_to_tell(app: TaskQ, dsn: str, gates: Gates) -> None:
    outer = outer_of(app, sending(app, gates))
    body = app.workflows["sending"].await_task.fn
    with pytest.raises(RunNotFound, match="the child run of node .* is not there"):
        await body(JobContext(job_id=uuid4(), task="sending:await"))
    async with working(app, dsn):
        run = await outer.start(7, 1.0)
        await gates.until_reached("weigh")
        node = (await run.nodes())[0]
        with pytest.raises(RetryAfter, match=f"run {node.child_run} is running"):
            await body(JobContext(job_id=node.job_id, task="sending:await"), number=7, weight=1.0)
        gates.open("weigh")
        assert await run.result(timeout=BOUND) == "7: 1.0 kg"


async def test_a_child_that_was_busy_when_its_parent_was_stopped_is_stopped_by_the_leader(
    app: TaskQ, dsn: str, gates: Gates
) -> None:
    @app.task
    async def inside() -> None: ...

    @app.task(retry=Retry(max_attempts=1))
    async def beside() -> None:
        await gates.wait("beside")
        raise ValueError("no")

    @app.workflow
    def inner() -> None:
        inside.node(run_in="1d").step()

    @app.workflow
    def outer() -> None:
        inner.child()
        beside.step()

    async with working(app, dsn):
        run = await outer.start()
        await gates.until_reached("beside")
        child = (await run.nodes())[0].child_run
        with psycopg.connect(dsn) as holder:
            holder.execute("select from taskq.runs where id = %s for update", [child])
            gates.open("beside")

            async def stops() -> bool:
                return (await run.nodes())[1].status == "failed"

            await aeventually(stops, BOUND)
            assert (await run.info()).status == "running"
        with pytest.raises(RunFailed):
            await run.result(timeout=BOUND)
        assert (await run.nodes())[0].child_status == "cancelled"


async def test_a_child_of_a_child_is_looked_at_from_the_top(app: TaskQ, dsn: str, cli: Cli) -> None:
    @app.task
    async def leaf(ctx: JobContext, n: int) -> int:
        return n

    @app.workflow
    def low(ctx: int) -> int:
        return leaf.step(ctx)

    @app.workflow
    def middle(n: int) -> int:
        return low.child(n)

    @app.workflow
    def top(n: int) -> int:
        return middle.child(n)

    async with working(app, dsn):
        run = await top.start(4)
        assert await run.result(timeout=BOUND) == 4
        # And by the hidden task, for a parameter that is called as its context would be.
        job = await low.start_task.enqueue(5)
        started = await job.result(timeout=BOUND)
        assert await low.handle(started).result(timeout=BOUND) == 5
    lines = cli.ok("runs", "tree", str(run.id)).out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["middle", "low", "leaf"]

"""What workflow functions come to: nodes, edges, outcomes, chains, and workflows inside of others."""
# ruff: noqa: PT012 (what must be refused is a whole function)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plan_kit import args_of, compiled, faults_of, guards, wires
from wiring_kit import (
    Paid,
    Way,
    refused,
    sink,
    source,
    task,
    wired,
)

from taskq import (
    Outcome,
    Ref,
    TaskQ,
    TerminalEffect,
    branch,
    collect,
    gather,
    or_skip,
    then,
)
from taskq.errors import (
    WiringError,
)
from taskq.workflow import Workflow

# Nodes and edges ------------------------------------------------------------------------------------------------------


def test_a_wiring_comes_to_nodes_edges_and_expressions(nowhere: TaskQ) -> None:
    reserve, charge = task(nowhere, "reserve", str, order=int), task(nowhere, "charge", Paid, order=int, hold=str)
    notify = task(nowhere, "notify", None, order=int, text=str)

    def flow(order: int, cents: int = 5) -> str:
        """Orders."""
        hold = reserve.step(order)
        paid = charge.node("deposit", priority=7).step(order, hold=hold)
        notify.step(order, paid.receipt)
        return hold

    plan = compiled(nowhere, flow, on_failure="finish", receipts=7)
    assert {key: plan[key] for key in ("format", "workflow", "on_failure", "receipts", "parameters", "effects")} == {
        "format": 1,
        "workflow": "flow",
        "on_failure": "finish",
        "receipts": 7,
        "parameters": ["order", "cents"],
        "effects": [],
    }
    of_run = {"input": "order", "path": []}
    assert args_of(plan) == {
        "reserve": {"order": of_run},
        "deposit": {"order": of_run, "hold": {"node": 0, "path": []}},
        "notify": {"order": of_run, "text": {"node": 1, "path": ["receipt"]}},
    }
    assert wires(plan) == {("reserve", "deposit", "fail"), ("deposit", "notify", "fail")}
    assert plan["result"] == {"node": 0, "path": []}
    jobs = {each["name"]: each["job"] for each in plan["nodes"]}
    assert jobs["deposit"]["task"] == "charge"
    assert jobs["deposit"]["priority"] == 7
    assert jobs["reserve"]["priority"] != 7
    assert {job["required_worker_schema"] for job in jobs.values()} == {3}
    flow_ = nowhere.get_workflow("flow")
    assert (flow_.__doc__, repr(flow_)) == ("Orders.", "<Workflow flow>")
    assert set(flow_.plan.policies) == {job["policy_id"] for job in jobs.values()}
    assert flow_.plan is flow_.plan


def test_nodes_are_named_by_their_tasks_and_numbered(nowhere: TaskQ) -> None:
    a, b = task(nowhere, "a"), task(nowhere, "b")

    def flow() -> None:
        a.step()
        b.step()
        a.step()
        a.node("last").step()
        a.step()

    assert [node["name"] for node in wired(nowhere, flow)["nodes"]] == ["a", "b", "a-2", "last", "a-3"]


def test_what_nodes_wait_for_without_taking_it(nowhere: TaskQ) -> None:
    a, b = source(nowhere, int, "a"), source(nowhere, int, "b")
    c = task(nowhere, "c")

    def flow() -> None:
        one, two = a.step(), b.step()
        c.node("one", after=one).step()
        c.node("both", after=[one, collect(two)]).step()
        c.node("skipped", after=gather(or_skip(one), two)).step()
        c.node("none", after=()).step()

    assert wires(wired(nowhere, flow)) == {
        ("a", "one", "fail"),
        ("a", "both", "fail"),
        ("b", "both", "collect"),
        ("a", "skipped", "skip"),
        ("b", "skipped", "fail"),
    }


def test_what_is_taken_twice_is_one_edge(nowhere: TaskQ) -> None:
    a, b = source(nowhere, Paid, "a"), task(nowhere, "b", None, x=str, y=bool)

    def flow() -> None:
        paid = a.step()
        b.node(after=[paid]).step(paid.receipt, paid.ok)

    assert len(wired(nowhere, flow)["edges"]) == 1


def test_options_of_nodes_stand_in_their_jobs(nowhere: TaskQ) -> None:
    a = task(nowhere, "a")

    def flow() -> None:
        a.node(
            queue="mail", max_attempts=2, timeout="3s", deadline="1h", run_in="10s", tags=["x"], meta={"k": 1}
        ).step()

    [node] = wired(nowhere, flow)["nodes"]
    job = {key: node["job"].get(key) for key in ("queue", "max_attempts", "deadline_in", "run_in", "tags", "meta")}
    assert job == {
        "queue": "mail",
        "max_attempts": 2,
        "deadline_in": 3600,
        "run_in": 10,
        "tags": ["x"],
        "meta": {"k": 1},
    }
    assert "has_effects" not in node["job"]


def test_a_compensation_and_effects_of_the_run_are_promised(nowhere: TaskQ) -> None:
    charge, undo = task(nowhere, "charge", str, order=int), task(nowhere, "undo", None, order=int, why=str)
    effects = [
        TerminalEffect(undo, on="failed", payload={"order": Ref.arg("n"), "why": Ref.result()}, name="tell"),
        TerminalEffect(undo, on="cancelled", payload={"order": 5, "why": Ref.status()}, name="also"),
    ]

    def flow(n: int = 3) -> str:
        give_back = TerminalEffect(undo, payload={"order": Ref.arg("order"), "why": "failed"})
        return charge.node(compensate=give_back).step(n)

    plan = compiled(nowhere, flow, effects=effects)
    assert [(each["name"], each["task"]) for each in plan["effects"]] == [("also", "undo"), ("tell", "undo")]
    undone = plan["nodes"][0]["compensate"]
    assert (undone["task"], undone["undoes"]) == ("undo", True)
    policies = nowhere.get_workflow("flow").plan.policies
    assert {each["policy_id"] for each in [*plan["effects"], undone]} <= set(policies)


# Outcomes -------------------------------------------------------------------------------------------------------------


def test_an_outcome_is_taken_whole_or_by_its_fields(nowhere: TaskQ) -> None:
    give, take = source(nowhere, Paid), sink(nowhere)
    typed = task(nowhere, "typed", None, whole=Outcome[Paid], way=Way, status=str)

    def flow() -> None:
        end = collect(give.step())
        take.step(end)
        typed.step(end, end.value.way, end.status)  # type: ignore[union-attr]

    plan = wired(nowhere, flow)
    assert args_of(plan)["sink"] == {"x": {"outcome": 0, "path": []}}
    assert args_of(plan)["typed"] == {
        "whole": {"outcome": 0, "path": []},
        "way": {"outcome": 0, "path": ["value", "way"]},
        "status": {"outcome": 0, "path": ["status"]},
    }
    assert wires(plan) == {("source", "sink", "collect"), ("source", "typed", "collect")}


def test_an_outcome_says_whether_it_succeeded_to_bodies_only(nowhere: TaskQ) -> None:
    assert Outcome("a", "succeeded", 1, None).ok
    assert not Outcome("a", "failed", None, {}).ok
    give = source(nowhere, int)
    assert refused(nowhere, lambda: collect(give.step()).ok).startswith(
        "the outcome of source.ok is no part of what is"
    )


@pytest.mark.parametrize("call", [collect, or_skip])
def test_only_results_are_collected_or_skipped(nowhere: TaskQ, call: Callable[[Any], Any]) -> None:
    @nowhere.workflow
    def flow(n: int) -> Any:
        return call(n)

    with pytest.raises(WiringError, match=r"was given <the argument n>; give it the (whole )?result of a step"):
        flow.plan  # noqa: B018
    with pytest.raises(WiringError, match="was given 5; give it the"):
        call(5)


def test_an_outcome_is_that_of_a_whole_step(nowhere: TaskQ) -> None:
    give, decide = source(nowhere, Paid), source(nowhere, bool, "decide")
    for fn in (
        lambda: collect(give.step().receipt),
        lambda: collect(collect(give.step())),
        lambda: collect(branch(decide.step(), {True: give.step, False: give.step})),
    ):
        assert refused(nowhere, fn).endswith("; give it the whole result of a step")


# Chains, fan-in, workflows inside of workflows -----------------------------------------------------------------------


def test_chains_and_fan_in(nowhere: TaskQ) -> None:
    double, total, pair = (
        task(nowhere, "double", int, n=int),
        sink(nowhere, list[int], "total"),
        sink(nowhere, Any, "pair"),
    )

    def flow(n: int) -> None:
        one = then(then(n, double), double)
        two = then(5, double)
        total.step(gather([one, two]))
        pair.step(gather(one, two))
        pair.step(gather(one, two, one, two, one))

    plan = wired(nowhere, flow)
    args = args_of(plan)
    assert args["double-2"] == {"n": {"node": 0, "path": []}}
    assert args["double-3"] == {"n": {"value": 5}}
    assert args["total"]["x"] == {"list": [{"node": 1, "path": []}, {"node": 2, "path": []}]}
    assert args["pair"]["x"] == args["total"]["x"]
    assert len(args["pair-2"]["x"]["list"]) == 5


def test_a_workflow_inside_of_another_is_a_part_of_it(nowhere: TaskQ) -> None:
    a, b = task(nowhere, "a", int, n=int, m=int), task(nowhere, "b", int, n=int)

    @nowhere.workflow
    def inner(n: int, m: int = 7) -> int:
        return b.step(a.step(n, m))

    @nowhere.workflow
    def outer(n: int) -> list[int]:
        return [inner(n), inner(inner(5), m=n)]

    plan = outer.plan.spec
    assert outer.plan.names == ["a", "b", "a-2", "b-2", "a-3", "b-3"]
    args = args_of(plan)
    assert args["a"] == {"n": {"input": "n", "path": []}, "m": {"value": 7}}
    assert args["a-2"] == {"n": {"value": 5}, "m": {"value": 7}}
    assert args["a-3"] == {"n": {"node": 3, "path": []}, "m": {"input": "n", "path": []}}
    assert plan["result"] == {"list": [{"node": 1, "path": []}, {"node": 5, "path": []}]}
    assert plan["parameters"] == ["n"]
    assert inner.plan.names == ["a", "b"]


def test_a_workflow_in_an_arm_is_guarded_with_all_its_nodes(nowhere: TaskQ) -> None:
    decide, a = source(nowhere, bool, "decide"), task(nowhere, "a", int, n=int)

    @nowhere.workflow
    def inner(n: int) -> int:
        return a.step(a.step(n))

    @nowhere.workflow
    def outer(n: int) -> int | None:
        return branch(decide.step(), {True: lambda: inner(n), False: lambda: None})

    assert guards(outer.plan.spec) == {("decide", "a", True), ("decide", "a-2", True)}


def test_a_workflow_inside_of_another_is_called_as_it_is_declared(nowhere: TaskQ) -> None:
    a, undo = task(nowhere, "a", int, n=int), task(nowhere, "undo")
    give = source(nowhere, str)

    @nowhere.workflow(effects=[TerminalEffect(undo)])
    def inner(n: int) -> int:
        return a.step(n)

    @nowhere.workflow
    def outer() -> list[int]:
        return [inner("x"), inner(give.step()), inner(1)]  # type: ignore[arg-type]

    found = faults_of(outer)
    assert [fault for fault in found if "promises effects" in fault] == 3 * [
        "workflow inner promises effects for its runs, and is wired here as a part of another run: wire a run of its "
        "own, inner.child(...), or promise them on this workflow"
    ]
    rest = [fault for fault in found if fault.startswith("workflow inner, wired here: ")]
    assert rest[0].startswith("workflow inner, wired here: n: Expected `int`, got `str`; n takes int")
    assert rest[1:] == ["workflow inner, wired here: n takes int, and the result of source is str"]

    @nowhere.workflow
    def short() -> int:
        give.node("bad name").step()
        return inner()  # type: ignore[call-arg]

    assert [fault[:60] for fault in faults_of(short)][::2] == [
        "the name of a node is 'bad name'; give 1 to 128 printable AS",
        "workflow inner, wired here: inner() missing 1 required posit",
    ]


def test_a_workflow_does_not_wire_itself(nowhere: TaskQ) -> None:
    made: dict[str, Workflow[..., Any]] = {}

    def itself() -> Any:
        return made["itself"]()

    def first() -> Any:
        return made["second"]()

    def second() -> Any:
        return made["first"]()

    for fn in (itself, first, second):
        made[fn.__name__] = nowhere.workflow(fn)
    for name, path in [("itself", "itself -> itself"), ("first", "first -> second -> first")]:
        with pytest.raises(WiringError, match=f"wires itself: {path}; a plan is finite"):
            made[name].plan  # noqa: B018

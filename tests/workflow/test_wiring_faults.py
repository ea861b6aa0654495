"""Wirings that are refused: every fault is told at once, with its place and what to do."""
# ruff: noqa: PT012 (what must be refused is a whole function)

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import pytest
from plan_kit import NOWHERE
from wiring_kit import (
    Kind,
    UserId,
    faults,
    sink,
    source,
    task,
    wired,
)

from taskq import (
    JobContext,
    Ref,
    Retry,
    TaskQ,
    TerminalEffect,
    branch,
    collect,
)
from taskq.errors import (
    InvalidPolicy,
    InvalidRequest,
    PlanError,
    TaskDefinitionError,
    UnknownTask,
)
from taskq.workflow.parts import bare
from taskq.workflow.symbols import Symbol

# Faults of nodes ------------------------------------------------------------------------------------------------------


def test_all_faults_of_a_wiring_are_told_at_once(nowhere: TaskQ) -> None:
    other = task(TaskQ(NOWHERE), "foreign")
    a, take = source(nowhere, int, "a"), sink(nowhere, str)

    def flow(n: int) -> str:
        one = a.step()
        take.step()
        take.step(one, one)
        take.step(y=1)
        take.step(one)
        take.step(5)
        other.step()
        take.node("same").step("x")
        take.node("same").step("x")
        take.node("bad name").step("x")
        take.node(5).step("x")  # type: ignore[arg-type]
        a.step()
        return n  # type: ignore[return-value]

    assert faults(nowhere, flow) == [
        "node sink: sink() missing 1 required positional argument: 'x'; call it with the parameters of the task",
        "node sink-2: sink() takes 1 positional argument but 2 were given; call it with the parameters of the task",
        "node sink-3: sink() got an unexpected keyword argument 'y'; call it with the parameters of the task",
        "node sink-4: x takes str, and the result of a is int",
        "node sink-5: x: Expected `str`, got `int`; x takes str; pass that, or annotate the parameter with the type "
        "of the value",
        "node foreign: the task foreign belongs to another TaskQ; use tasks of the same one",
        "the name of a node is 'bad name'; give 1 to 128 printable ASCII characters without spaces",
        "the name of a node is 5; give 1 to 128 printable ASCII characters without spaces",
        "node a-2: its result is never used; hand it on, return it, name it in after=, or annotate the task a as "
        "returning None",
        "it returns str, and the argument n is int",
        "two nodes are named same; give one of them another: task.node('other name').step(...)",
    ]


def test_a_workflow_without_nodes_is_refused(nowhere: TaskQ) -> None:
    assert faults(nowhere, lambda: None, name="empty") == ["it has 0 nodes; a plan has 1 to 10000: step() wires one"]


@pytest.mark.parametrize(
    ("returns", "use", "unused"),
    [
        (int, lambda s, t: None, True),
        (int, lambda s, t: t.step(s), False),
        (int, lambda s, t: t.node(after=[s]).step(1), False),
        (int, lambda s, t: t.step([collect(s)]), False),
        (Any, lambda s, t: None, True),
        (None, lambda s, t: None, False),
        (type(None), lambda s, t: None, False),
    ],
)
def test_a_result_that_is_never_used_is_a_fault(
    nowhere: TaskQ, returns: Any, use: Callable[[Any, Any], Any], unused: bool
) -> None:
    give, take = source(nowhere, returns), sink(nowhere)

    def flow() -> None:
        use(give.step(), take)

    if unused:
        assert "node source: its result is never used" in faults(nowhere, flow)[0]
    else:
        assert wired(nowhere, flow)


def test_results_that_are_returned_or_decided_on_are_used(nowhere: TaskQ) -> None:
    give, decide = source(nowhere, int), source(nowhere, bool, "decide")

    def flow() -> Any:
        branch(decide.step(), {True: lambda: None, False: lambda: None})
        return [give.step()]

    # The value of the branch is not used, and so what it decides on is not.
    assert [fault[:38] for fault in faults(nowhere, flow)] == ["node decide: its result is never used;"]

    def second() -> Any:
        return branch(decide.step(), {True: give.step, False: lambda: None})

    assert wired(nowhere, second)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("unique_key", "k"),
        ("unique_scope", "k"),
        ("unique_hold", "1s"),
        ("on_conflict", "raise"),
        ("idempotency_key", "k"),
        ("idempotency_scope", "k"),
        ("ordering_key", "k"),
        ("run_at", datetime(2026, 1, 2, tzinfo=UTC)),
        ("connection", object()),
    ],
)
def test_options_of_one_enqueue_are_none_of_nodes(nowhere: TaskQ, option: str, value: Any) -> None:
    a = task(nowhere, "a")

    def flow() -> None:
        a.node(**{option: value}).step()

    assert faults(nowhere, flow) == [f"node a: {option} is for jobs that are enqueued, not for nodes; leave it out"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"deadline": datetime(2026, 1, 2, tzinfo=UTC)},
            "deadline is an instant; a plan serves many runs, so give a duration",
        ),
        ({"priority": 10}, "priority is 10"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"queue": "two words"}, "queue"),
        ({"timeout": "soon"}, "soon"),
        ({"run_in": "soon"}, "soon"),
        ({"tags": "x"}, "tags is the text 'x'"),
        ({"meta": 5}, "meta is of type int"),
        ({"colour": "red"}, "no option 'colour'"),
        ({"compensate": 5}, "compensate is 5; give a TerminalEffect"),
        ({"after": 5}, "after has 5; give results of steps"),
        ({"after": "ab"}, "after has 'ab'; give results of steps"),
        ({"after": [None]}, "after has None; give results of steps"),
    ],
    ids=str,
)
def test_an_option_that_is_not_valid_is_a_fault(nowhere: TaskQ, options: dict[str, Any], said: str) -> None:
    a = task(nowhere, "a")

    def flow() -> None:
        a.node(**options).step()

    [fault] = faults(nowhere, flow)
    assert fault.startswith("node a: ")
    assert said in fault


def test_an_argument_of_the_run_is_nothing_to_wait_for(nowhere: TaskQ) -> None:
    a = task(nowhere, "a")

    def flow(n: int) -> None:
        a.node(after=[n]).step()

    assert faults(nowhere, flow) == ["node a: after has <the argument n>; give results of steps"]


def test_effects_that_cannot_be_promised_are_faults(nowhere: TaskQ) -> None:
    charge, undo = task(nowhere, "charge", str, order=int), task(nowhere, "undo", None, order=int)
    foreign = task(TaskQ(NOWHERE), "foreign")

    def flow(n: int) -> None:
        charge.node(compensate=TerminalEffect(undo, payload={"order": Ref.arg("ordr")})).step(n)
        charge.node(compensate=TerminalEffect(undo)).step(n)
        charge.node(compensate=TerminalEffect(foreign)).step(n)
        charge.node(compensate=TerminalEffect("nobody")).step(n)

    effects = [TerminalEffect(undo, payload={"order": Ref.arg("m")})]
    found = [fault for fault in faults(nowhere, flow, effects=effects) if "never used" not in fault]
    assert len(found) == 5
    assert found[0].startswith("node charge: effect undo of task charge: Ref.arg('ordr') is no parameter of charge")
    assert found[1].startswith("node charge-2: effect undo of task charge: the payload lacks 'order'")
    assert found[2].startswith("node charge-3: effect foreign of task charge is the task 'foreign' of another TaskQ")
    assert found[3].startswith("node charge-4: effect nobody of task charge: ")
    assert found[4].startswith("effect undo of task flow: Ref.arg('m') is no parameter of flow; it has: n")


# Registering ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_a_workflow(nowhere: TaskQ) -> None:
    async def waits() -> None: ...

    def takes_context(ctx: JobContext, n: int) -> None: ...

    def takes_rest(n: int, **rest: int) -> None: ...

    def takes_many(*many: int) -> None: ...

    for given, said in [
        (waits, "is not a plain function; a workflow is written with def"),
        (dict, "is not a plain function"),
        (len, "is not a plain function"),
        (takes_context, "workflow takes_context takes a JobContext; only bodies have one"),
        (takes_rest, "workflow takes_rest takes **rest; a plan names every argument of a run"),
        (takes_many, "so *many cannot be"),
    ]:
        with pytest.raises(TaskDefinitionError, match=re.escape(said)):
            nowhere.workflow(given)  # type: ignore[arg-type]
    assert dict(nowhere.workflows) == {}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_failure": "stop"}, "on_failure is 'stop'; give 'cancel' or 'finish'"),
        ({"receipts": 0}, "receipts is 0; give a number from 1 to 10000"),
        ({"receipts": 10_001}, "receipts is 10001"),
        ({"receipts": True}, "receipts is True"),
        ({"receipts": "many"}, "receipts is 'many'"),
        ({"name": "two words"}, "the name of a workflow is 'two words'"),
        ({"name": ""}, "the name of a workflow is ''"),
    ],
    ids=str,
)
def test_options_of_workflows_are_checked(nowhere: TaskQ, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidPolicy, match=re.escape(said)):
        nowhere.workflow(**options)(lambda: None)


def test_workflows_are_known_by_name(nowhere: TaskQ) -> None:
    def flow() -> None: ...

    with pytest.raises(UnknownTask, match="there is no workflow 'flow'; known are: none. Import the module"):
        nowhere.get_workflow("flow")
    first = nowhere.workflow(flow)
    assert nowhere.get_workflow("flow") is first
    assert first.fn is flow
    with pytest.raises(TaskDefinitionError, match="two workflows are named 'flow'"):
        nowhere.workflow(flow)
    second = nowhere.workflow(name="other")(flow)
    assert dict(nowhere.workflows) == {"flow": first, "other": second}
    with pytest.raises(UnknownTask, match="known are: flow, other"):
        nowhere.get_workflow("third")
    with pytest.raises(InvalidRequest, match="a run has no option 'key'; there are: connection, meta, run_key"):
        first.using(key="x")  # type: ignore[call-arg]


def test_a_plan_that_is_wrong_is_wrong_each_time(nowhere: TaskQ) -> None:
    calls = []

    @nowhere.workflow
    def flow() -> None:
        calls.append(1)

    for _ in range(2):
        with pytest.raises(PlanError) as caught:
            flow.plan  # noqa: B018
    assert len(calls) == 2
    assert (caught.value.workflow, len(caught.value.faults)) == ("flow", 1)
    assert isinstance(caught.value, ValueError)


def test_bare_types() -> None:
    assert [bare(each) for each in (None, UserId, Kind, Annotated[int, 1], int)] == [
        type(None), int, Literal["big", "small"], int, int,
    ]  # fmt: skip


def test_a_policy_of_the_task_stands_in_its_nodes(nowhere: TaskQ) -> None:
    @nowhere.task(retry=Retry(max_attempts=9), queue="mail", effect_class="pure")
    def send() -> None: ...

    def flow() -> None:
        send.step()

    plan = wired(nowhere, flow)
    job = plan["nodes"][0]["job"]
    assert (job["max_attempts"], job["queue"], job["effect_class"]) == (9, "mail", "pure")
    assert isinstance(Symbol("x", {"value": 1}, (), Any), Symbol)

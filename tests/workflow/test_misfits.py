"""Wires of which the types say that no run could take them, and symbols where they do not belong."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, TypeVar
from uuid import UUID

import msgspec
import pytest

from taskq import PlanError, TaskQ, TerminalEffect, WiringError, branch, collect, or_skip
from taskq.errors import InvalidPolicy
from taskq.workflow import Plan
from taskq.workflow.fit import misfit
from taskq.workflow.parts import stored_of

NOWHERE = "postgresql://nobody@127.0.0.1:1/x"
T = TypeVar("T")


@pytest.fixture
def app() -> TaskQ:
    return TaskQ(NOWHERE)


def giving(app: TaskQ, returns: Any, name: str = "give") -> Any:
    def fn() -> Any: ...

    fn.__annotations__["return"] = returns
    return app.task(name=name)(fn)


def taking(app: TaskQ, takes: Any, name: str = "take") -> Any:
    def fn(x: Any) -> None: ...

    fn.__annotations__["x"] = takes
    return app.task(name=name)(fn)


def plan_of(app: TaskQ, fn: Callable[..., Any], **options: Any) -> Plan:
    return app.workflow(name=f"flow{len(app.workflows)}", **options)(fn).plan


def wires(task: Any) -> Callable[[], None]:
    """The function of a workflow of one step."""

    def flow() -> None:
        task.step()

    return flow


def faults_of(app: TaskQ, fn: Callable[..., Any], **options: Any) -> list[str]:
    try:
        plan_of(app, fn, **options)
    except PlanError as exc:
        return list(exc.faults)
    return []


# Types ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gives", "takes"),
    [
        (bool, int),
        (bool, float),
        (Literal[True], int),
        (list[bool], list[int]),
        (list[int], Sequence[str]),
        (dict[str, int], Mapping[str, str]),
    ],
    ids=str,
)
def test_what_would_not_be_read_does_not_fit(app: TaskQ, gives: Any, takes: Any) -> None:
    give, take = giving(app, gives), taking(app, takes)

    (fault,) = faults_of(app, lambda: take.step(give.step()))
    assert fault.startswith("node take: x takes ")
    assert ", and the result of give is " in fault


@pytest.mark.parametrize(
    ("gives", "takes"),
    [
        (int, float),
        (bool, bool | int),
        (list[int], Sequence[float]),
        (dict[str, int], Mapping[str, int]),
        (tuple[int, str], Sequence[Any]),
        (list, Sequence[str]),
    ],
    ids=str,
)
def test_what_is_read_fits(app: TaskQ, gives: Any, takes: Any) -> None:
    give, take = giving(app, gives), taking(app, takes)
    assert faults_of(app, lambda: take.step(give.step())) == []


@pytest.mark.parametrize("takes", [int, str, bool | None, UUID, Literal["a"], dict[str, int], "Colour"], ids=str)
def test_a_list_is_none_of_them(app: TaskQ, takes: Any) -> None:
    give, take = giving(app, int), taking(app, Colour if takes == "Colour" else takes)
    (fault,) = faults_of(app, lambda: take.step([give.step()]))
    assert fault.endswith(", and there is a list")


@pytest.mark.parametrize("takes", [int, str | None, list[int], tuple[int, ...], set[int]], ids=str)
def test_a_dict_is_none_of_them(app: TaskQ, takes: Any) -> None:
    give, take = giving(app, int), taking(app, takes)
    (fault,) = faults_of(app, lambda: take.step({"a": give.step()}))
    assert fault.endswith(", and there is a dict")


@pytest.mark.parametrize(
    "takes", [Any, list[int], int | list[int], Sequence[int], set[int], "Place", "Packed"], ids=str
)
def test_a_list_can_be_one_of_them(app: TaskQ, takes: Any) -> None:
    give, take = giving(app, int), taking(app, {"Place": Place, "Packed": Packed}.get(takes, takes))
    assert faults_of(app, lambda: take.step([give.step(), 1])) == []


class Colour(enum.Enum):
    RED = "red"


class Place(NamedTuple):
    x: int
    y: int


class Packed(msgspec.Struct, array_like=True):
    x: int
    y: int


@dataclass
class Line:
    text: str
    number: int = 0
    marks: list[int] = field(default_factory=list)
    length: int = field(default=0, init=False)


class Renamed(msgspec.Struct, rename="camel"):
    line_text: str
    number: int = 0


class Tagged(msgspec.Struct, tag=True):
    text: str


class Keyed(TypedDict):
    text: str
    number: NotRequired[int]


KINDS = {"dataclass": (Line, "text"), "struct": (Renamed, "lineText"), "TypedDict": (Keyed, "text")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_dict_that_stands_for_an_object_has_its_keys(app: TaskQ, kind: str) -> None:
    declared, key = KINDS[kind]
    give, count, take = giving(app, str), giving(app, int, "count"), taking(app, declared)
    take_none = taking(app, declared | None if kind != "TypedDict" else declared, "take_none")

    assert faults_of(app, lambda: take.step({key: give.step(), "number": count.step()})) == []
    assert faults_of(app, lambda: take_none.step({key: give.step()})) == []
    (lacking,) = faults_of(app, lambda: take.step({"number": count.step()}))
    assert lacking == f"node take: x takes {declared.__name__}, and there is no {key!r} in the dict"
    (unknown,) = faults_of(app, lambda: take.step({key: give.step(), "colour": 1}))
    assert unknown.endswith("and there is 'colour' in the dict, which it does not have")
    assert faults_of(app, lambda: take.step({key: count.step(), "number": "one"})) == [
        f"node take: x takes at [{key!r}] str, and the result of count is int",
        "node take: x takes at ['number'] int, and there is \"one\"",
    ]


def test_of_objects_that_say_more_in_json_nothing_is_told(app: TaskQ) -> None:
    give, take, packed = giving(app, str), taking(app, Tagged), taking(app, Packed, "packed")
    assert faults_of(app, lambda: take.step({"type": "Tagged", "text": give.step()})) == []
    assert faults_of(app, lambda: packed.step({"x": give.step()})) == []


# Branches -------------------------------------------------------------------------------------------------------------


def test_true_is_no_arm_for_one(app: TaskQ) -> None:
    give = giving(app, Literal[1, 2])
    arms: dict[Any, Any] = {True: lambda: None, 2: lambda: None}
    missing, unknown = faults_of(app, lambda: branch(give.step(), arms))
    assert "there is no arm for 1;" in missing
    assert "the arm True is none of its values" in unknown


def test_flags_can_be_joined_so_their_values_cannot_be_listed(app: TaskQ) -> None:
    class Way(enum.Flag):
        AIR = 1
        SEA = 2

    give = giving(app, Way)
    (fault,) = faults_of(app, lambda: branch(give.step(), {Way.AIR: lambda: None, Way.SEA: lambda: None}))
    assert "whose values cannot be listed" in fault


def test_an_arm_whose_value_cannot_be_stored_is_a_fault_with_its_path(app: TaskQ) -> None:
    give, take = giving(app, bool), taking(app, Any)

    def flow() -> None:
        take.step(branch(give.step(), {True: lambda: [0, object()], False: lambda: None}))

    (fault,) = faults_of(app, flow)
    assert fault.startswith("branch on the result of give: the value of the arm True[1]: ")


# Symbols of other wirings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["result", "part", "argument", "outcome", "skippable", "after", "arm", "returned"])
def test_a_symbol_that_was_kept_is_refused_in_another_wiring(app: TaskQ, kind: str) -> None:
    give, take = giving(app, dict[str, int]), taking(app, Any)
    kept: list[Any] = []

    def keeps(n: Any) -> None:
        given = give.step()
        made = {"part": given["part"], "argument": n, "outcome": collect(given), "skippable": or_skip(given)}
        kept.append(made.get(kind, given))
        take.step(given)

    plan_of(app, keeps)
    decide = giving(app, bool, "decide")

    def flow() -> Any:
        if kind == "after":
            take.node(after=kept).step(1)
        elif kind == "arm":
            take.step(branch(decide.step(), {True: lambda: kept[0], False: lambda: None}))
        elif kind == "returned":
            take.step(1)
            return kept[0]
        else:
            take.step(kept[0])
        return None

    (fault,) = faults_of(app, flow)
    assert "comes from another wiring, in which it was kept; take it from a step" in fault


def test_a_branch_on_a_symbol_that_was_kept_is_refused(app: TaskQ) -> None:
    give = giving(app, bool)
    kept: list[Any] = []
    app.workflow(name="keeps")(lambda: kept.append(give.step()))
    with pytest.raises(PlanError):
        app.get_workflow("keeps").plan  # noqa: B018
    with pytest.raises(
        WiringError, match="branch\\(\\) decides on the result of give, which comes from another wiring"
    ):
        plan_of(app, lambda: branch(kept[0], {True: lambda: None, False: lambda: None}))


# Effects of runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [True, False])
def test_an_effect_may_be_a_task_that_is_named_like_the_workflow(app: TaskQ, by_name: bool) -> None:
    refund = giving(app, None, "refund")
    effects = [TerminalEffect("refund" if by_name else refund)]
    flow = app.workflow(name="refund", effects=effects)(wires(refund))
    (promised,) = flow.plan.spec["effects"]
    assert promised["task"] == "refund"
    assert set(flow.plan.policies) == {refund.policy.id}


def test_effects_are_a_list_of_effects(app: TaskQ) -> None:
    refund = giving(app, None, "refund")
    with pytest.raises(InvalidPolicy, match=r"effects has <Task refund>; give a list of TerminalEffect"):
        app.workflow(effects=[refund])(wires(refund))
    flow = app.workflow(name="one", effects=TerminalEffect(refund))(wires(refund))  # type: ignore[call-overload]
    assert [each["name"] for each in flow.plan.spec["effects"]] == ["refund"]


# Plans from elsewhere -------------------------------------------------------------------------------------------------

A = {"name": "a", "job": {}, "args": {}}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ([], "it is list, not an object"),
        ({"nodes": None}, "its nodes are no list"),
        ({"nodes": [A, 1]}, "nodes has at 1 no object"),
        ({"nodes": [A | {"args": []}]}, "args of the node at 0 is no object"),
        ({"nodes": [A], "edges": {}}, "its edges are no list"),
        ({"nodes": [A], "edges": [5]}, "edges has at 0 no object"),
        ({"nodes": [A], "parameters": "n"}, "its parameters are no list"),
        (
            {"nodes": [A | {"args": {"x": {"case": {"on": {"value": 1}, "arms": [[1]]}}}}]},
            "x of node a is no expression",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_has_not_the_form_of_a_plan_is_told(spec: Any, said: str) -> None:
    whole = {"format": 1, "edges": [], "parameters": [], "result": {"value": None}} | spec if spec else spec
    with pytest.raises(PlanError) as caught:
        Plan.from_spec(whole)
    assert any(said in fault for fault in caught.value.faults), caught.value


@pytest.mark.parametrize("value", [[1], {"a": 1}])
def test_a_type_of_which_nothing_can_be_told_takes_anything(value: Any) -> None:
    assert misfit(T, value) is None
    assert stored_of(T) is None

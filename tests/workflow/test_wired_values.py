"""Values in wirings: constants of every kind, lists and dicts of results, and parts by where they are stored."""
# ruff: noqa: PT012 (what must be refused is a whole function)

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

import pytest
from plan_kit import args_of, compiled, wires
from wiring_kit import (
    Address,
    Bill,
    Box,
    Page,
    Paid,
    Parcel,
    Point,
    Row,
    Shape,
    Way,
    faults,
    refused,
    sink,
    source,
    task,
    wired,
)

from taskq import (
    TaskQ,
    branch,
    collect,
    gather,
)
from taskq.errors import (
    WiringError,
)
from taskq.workflow.parts import part_of

# Values -----------------------------------------------------------------------------------------------------------

CONSTANTS: dict[str, tuple[Any, Any, Any]] = {
    "None": (int | None, None, None),
    "bool": (bool, True, True),
    "int": (int, 2**70, 2**70),
    "float": (float, 0.5, 0.5),
    "str": (str, 'é"\\', 'é"\\'),
    "bytes": (bytes, b"ab", "YWI="),
    "list": (list[int], [1, 2], [1, 2]),
    "tuple": (tuple[int, str], (1, "a"), [1, "a"]),
    "set": (set[int], {3, 1, 2}, [1, 2, 3]),
    "dict": (dict[str, int], {"b": 1, "a": 2}, {"a": 2, "b": 1}),
    "dict by numbers": (dict[int, str], {1: "a"}, {"1": "a"}),
    "nested": (dict[str, list[dict[str, None]]], {"a": [{"b": None}]}, {"a": [{"b": None}]}),
    "dataclass": (Address, Address("x", 1), {"street": "x", "zip": 1}),
    "struct": (Parcel, Parcel("x", Way.SEA), {"trackingCode": "x", "wayOut": "sea"}),
    "struct as list": (Row, Row("x", 1), ["x", 1]),
    "model": (Box[int], Box[int](inside=3), {"inside": 3}),
    "named tuple": (Point, Point(1, "y"), [1, "y"]),
    "typed dict": (Shape, {"name": "x", "corners": []}, {"name": "x", "corners": []}),
    "enum": (Way, Way.AIR, "air"),
    "literal": (Literal["a", 1], "a", "a"),
    "uuid": (UUID, UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    "decimal": (Decimal, Decimal("1.50"), "1.50"),
    "datetime": (datetime, datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "2026-01-02T03:04:05Z"),
    "date": (date, date(2026, 1, 2), "2026-01-02"),
    "timedelta": (timedelta, timedelta(minutes=1), "PT60S"),
    "no annotation": (Any, [1, {"a": None}], [1, {"a": None}]),
}


@pytest.mark.parametrize("kind", CONSTANTS)
def test_constants_stand_in_the_plan_as_they_are_stored(nowhere: TaskQ, kind: str) -> None:
    declared, value, stored = CONSTANTS[kind]
    take = sink(nowhere, declared)

    def flow() -> None:
        take.step(value)

    plan = wired(nowhere, flow)
    assert args_of(plan) == {"sink": {"x": {"value": stored}}}
    # The same value is its own result.
    flow2 = lambda: (take.step(value), value)[1]  # noqa: E731
    flow2.__annotations__ = {"return": declared}
    assert compiled(nowhere, flow2, name="second")["result"] == {"value": stored}


@pytest.mark.parametrize(
    ("declared", "value", "path"),
    [
        (Any, object(), "x"),
        (Any, {"a": [1, object()]}, "x.a[1]"),
        (float, math.nan, "x"),
        (list[float], [1.0, math.inf], "x[1]"),
        (str, "a\0b", "x"),
        (datetime, datetime(2026, 1, 1), "x"),
        (int, "5", "x"),
        (list[int], [1, "2"], "x"),
        (Any, {1: 2}, "x[1]"),
        (dict[str, Any], {"a": {"b": {5}}}, "x"),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", repr(value)),
)
def test_a_constant_that_cannot_be_stored_is_a_fault_with_its_path(
    nowhere: TaskQ, declared: Any, value: Any, path: str
) -> None:
    take = sink(nowhere, declared)

    def flow() -> None:
        take.step(value)

    [fault] = faults(nowhere, flow)
    assert fault.startswith(f"node sink: {path}"), fault


def test_lists_tuples_and_dicts_of_results(nowhere: TaskQ) -> None:
    a, b = source(nowhere, int, "a"), source(nowhere, str, "b")
    take = sink(nowhere)

    def flow(n: int) -> dict[str, Any]:
        one, two = a.step(), b.step()
        take.step({"k": [one, {"deep": (two, 5, n)}], "plain": [1, 2], "none": None})
        take.step([[one], []])
        return {"one": one, "list": [two, Way.AIR]}

    plan = wired(nowhere, flow)
    one, two, n = {"node": 0, "path": []}, {"node": 1, "path": []}, {"input": "n", "path": []}
    assert args_of(plan)["sink"]["x"] == {
        "object": {
            "k": {"list": [one, {"object": {"deep": {"list": [two, {"value": 5}, n]}}}]},
            "plain": {"value": [1, 2]},
            "none": {"value": None},
        }
    }
    assert args_of(plan)["sink-2"]["x"] == {"list": [{"list": [one]}, {"value": []}]}
    assert plan["result"] == {"object": {"one": one, "list": {"list": [two, {"value": "air"}]}}}
    assert wires(plan) == {("a", "sink", "fail"), ("b", "sink", "fail"), ("a", "sink-2", "fail")}


def test_what_is_wrong_beside_results_is_a_fault_with_its_path(nowhere: TaskQ) -> None:
    a, take = source(nowhere, int, "a"), sink(nowhere)
    box = task(nowhere, "box", None, address=Address)

    def flow() -> Any:
        one = a.step()
        take.step([one, object()])
        take.step({"k": {5: one}})
        take.step({"k": one, "nan": math.nan})
        box.step(Address("x", one))
        return [one, math.inf]

    found = faults(nowhere, flow)
    assert [fault[:46] for fault in found] == [
        "node sink: x[1]: object cannot be written as J",
        "node sink-2: x.k has a key that is no text; ke",
        "node sink-3: x.nan: nan is not a number in JSO",
        "node box: address.zip is the result of a step ",
        "the result of the workflow cannot be stored: t",
    ]
    assert found[4] == (
        "the result of the workflow cannot be stored: the result[1]: inf is not a number in JSON; pass None or text "
        "instead"
    )


PARTS: dict[str, tuple[Any, Callable[[Any], Any], list[Any], Any]] = {
    "dataclass": (Paid, lambda p: p.receipt, ["receipt"], str),
    "optional": (Paid, lambda p: p.address.zip, ["address", "zip"], int),
    "list": (Paid, lambda p: p.lines[3].street, ["lines", 3, "street"], str),
    "dict": (Paid, lambda p: p.notes["k"].zip, ["notes", "k", "zip"], int),
    "tuple": (Paid, lambda p: p.pair[1].zip, ["pair", 1, "zip"], int),
    "literal": (Paid, lambda p: p.way, ["way"], Way),
    "struct, renamed": (Parcel, lambda p: p.tracking_code, ["trackingCode"], str),
    "struct as list": (Row, lambda p: p.count, [1], int),
    "model": (Bill, lambda p: p.total, ["total"], int),
    "model, alias": (Bill, lambda p: p.bill_to.zip, ["billTo", "zip"], int),
    "model, written under another name": (Bill, lambda p: p.sent_on, ["sentOn"], str),
    "generic model": (Box[int], lambda p: p.inside, ["inside"], int),
    "generic dataclass": (Page[int], lambda p: p.items[0], ["items", 0], int),
    "generic dataclass, optional": (Page[int], lambda p: p.first, ["first"], int | None),
    "generic dataclass, itself": (Page[Address], lambda p: p.one.zip, ["one", "zip"], int),
    "named tuple": (Point, lambda p: p.y, [1], str),
    "named tuple by place": (Point, lambda p: p[0], [0], int),
    "typed dict": (Shape, lambda p: p["corners"][2].y, ["corners", 2, 1], str),
    "long tuple": (tuple[int, ...], lambda p: p[7], [7], int),
    "bare tuple": (tuple, lambda p: p[7], [7], Any),
    "bare list": (list, lambda p: p[7], [7], Any),
    "bare dict": (dict, lambda p: p["a"], ["a"], Any),
    "any": (Any, lambda p: p.a["b"][0], ["a", "b", 0], Any),
    "union": (Address | Point, lambda p: p.a, ["a"], Any),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_of_a_result_is_taken_from_where_it_is_stored(nowhere: TaskQ, kind: str) -> None:
    returns, part, path, declared = PARTS[kind]
    give, take, refuse = source(nowhere, returns), sink(nowhere, declared), sink(nowhere, Decimal, "refuse")

    def flow() -> None:
        take.step(part(give.step()))

    assert args_of(wired(nowhere, flow)) == {"source": {}, "sink": {"x": {"node": 0, "path": path}}}

    def misfit() -> None:
        refuse.step(part(give.step()))

    if declared is Any:
        assert wired(nowhere, misfit)
    else:
        [fault] = faults(nowhere, misfit)
        assert fault.startswith("node refuse: x takes Decimal, and the result of source")


@pytest.mark.parametrize(
    ("returns", "part", "named"),
    [
        (Paid, lambda p: p.reciept, "the result of source.reciept"),
        (Paid, lambda p: p.short, "the result of source.short"),
        (Paid, lambda p: p.text(), "the result of source.text"),
        (Paid, lambda p: p.receipt.upper(), "the result of source.receipt.upper"),
        (Paid, lambda p: p.receipt[0], "the result of source.receipt[0]"),
        (Paid, lambda p: p.way.value, "the result of source.way.value"),
        (Paid, lambda p: p["receipt"], "the result of source['receipt']"),
        (Paid, lambda p: p.lines["x"], "the result of source.lines['x']"),
        (Paid, lambda p: p.lines.append(1), "the result of source.lines.append"),
        (Paid, lambda p: p.notes.items(), "the result of source.notes.items"),
        (Paid, lambda p: p.pair[2], "the result of source.pair[2]"),
        (Paid, lambda p: p.pair["x"], "the result of source.pair['x']"),
        (Parcel, lambda p: p.trackingCode, "the result of source.trackingCode"),
        (Bill, lambda p: p.billTo, "the result of source.billTo"),
        (Bill, lambda p: p.model_dump(), "the result of source.model_dump"),
        (Point, lambda p: p.z, "the result of source.z"),
        (Point, lambda p: p[2], "the result of source[2]"),
        (Shape, lambda p: p["nme"], "the result of source['nme']"),
        (set[int], lambda p: p[0], "the result of source[0]"),
        (Literal["a", "b"], lambda p: p[0], "the result of source[0]"),
        (datetime, lambda p: p.year, "the result of source.year"),
    ],
)
def test_what_is_not_stored_is_no_part(nowhere: TaskQ, returns: Any, part: Callable[[Any], Any], named: str) -> None:
    give = source(nowhere, returns)

    def flow() -> Any:
        return part(give.step())

    said = refused(nowhere, flow)
    assert said.startswith(f"{named} is no part of what is stored of ")
    assert said.endswith("; hand the whole value to a task, which can take anything from it")


def test_parts_of_arguments_of_the_run(nowhere: TaskQ) -> None:
    take = sink(nowhere, int)

    def flow(address: Address, rows: list[Address]) -> None:
        take.step(address.zip)
        take.step(rows[1].zip)
        take.step(rows[0].street)

    assert faults(nowhere, flow) == ["node sink-3: x takes int, and the argument rows[0].street is str"]
    assert part_of(Address, "zip", attribute=True) == ("zip", int)


@pytest.mark.parametrize("item", [-1, True, 1.5, None, slice(1), (1, 2), Way.AIR])
def test_items_are_asked_for_by_text_or_number(nowhere: TaskQ, item: Any) -> None:
    give = source(nowhere, list[int])
    said = refused(nowhere, lambda: give.step()[item])
    assert said == f"an item of the result of source is asked for by {item!r}; give a text, or a number from 0"


# What only a value can answer ---------------------------------------------------------------------------------------

ASKED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "bool": (bool, "asked whether it is true"),
    "if": (lambda s: 1 if s else 2, "asked whether it is true"),
    "not": (lambda s: not s, "asked whether it is true"),
    "iter": (list, "to be gone through"),
    "unpack": (lambda s: [*s], "to be gone through"),
    "len": (len, "asked for its length"),
    "in": (lambda s: 1 in s, "searched"),
    "call": (lambda s: s(), "called"),
    "str": (str, "made into a text"),
    "format": (lambda s: f"{s}", "made into a text"),
    "format of": (lambda s: f"{s:>5}", "made into a text"),
    "percent": (lambda s: "%s" % s, "made into a text"),  # noqa: UP031
    "int": (int, "made into a number"),
    "float": (float, "made into a number"),
    "index": (lambda s: [1, 2][s], "used as a number"),
    "range": (range, "used as a number"),
    "key": (lambda s: {s: 1}, "used as a key"),
    "set": (lambda s: {s}, "used as a key"),
    "eq": (lambda s: s == 1, "computed with or compared (__eq__)"),
    "ne": (lambda s: s != 1, "computed with or compared (__ne__)"),
    "lt": (lambda s: s < 1, "computed with or compared (__lt__)"),
    "le": (lambda s: s <= 1, "computed with or compared (__le__)"),
    "gt": (lambda s: s > 1, "computed with or compared (__gt__)"),
    "ge": (lambda s: s >= 1, "computed with or compared (__ge__)"),
    "compared": (lambda s: 1 < s, "computed with or compared (__gt__)"),  # noqa: SIM300
    "max": (lambda s: max(1, s), "computed with or compared (__gt__)"),
    "sum": (lambda s: sum([s]), "computed with or compared (__radd__)"),
    "add": (lambda s: s + 1, "computed with or compared (__add__)"),
    "text add": (lambda s: "a" + s, "computed with or compared (__radd__)"),
    "sub": (lambda s: 1 - s, "computed with or compared (__rsub__)"),
    "mul": (lambda s: s * 2, "computed with or compared (__mul__)"),
    "div": (lambda s: s / 2, "computed with or compared (__truediv__)"),
    "mod": (lambda s: s % 2, "computed with or compared (__mod__)"),
    "divmod": (lambda s: divmod(s, 2), "computed with or compared (__divmod__)"),
    "rdivmod": (lambda s: divmod(2, s), "computed with or compared (__rdivmod__)"),
    "pow": (lambda s: s**2, "computed with or compared (__pow__)"),
    "and": (lambda s: s & 1, "computed with or compared (__and__)"),
    "or": (lambda s: 1 | s, "computed with or compared (__ror__)"),
    "shift": (lambda s: 1 << s, "computed with or compared (__rlshift__)"),
    "neg": (lambda s: -s, "computed with or compared (__neg__)"),
    "abs": (abs, "computed with or compared (__abs__)"),
    "round": (round, "computed with or compared (__round__)"),
    "floor": (math.floor, "computed with or compared (__floor__)"),
    "complex": (complex, "computed with or compared (__complex__)"),
}


@pytest.mark.parametrize("kind", ASKED)
def test_a_workflow_function_only_wires(nowhere: TaskQ, kind: str) -> None:
    ask, said = ASKED[kind]
    give = source(nowhere, Any)
    assert refused(nowhere, lambda: ask(give.step())) == (
        f"the result of source is not known while the workflow is wired, and was {said}; a workflow function only "
        "wires: use branch() to decide on a result, or a task to compute with it"
    )


def test_a_symbol_can_be_looked_at(nowhere: TaskQ) -> None:
    give, seen = source(nowhere, Paid), []

    def flow(n: int) -> Any:
        paid = give.step()
        seen.append([repr(n), repr(paid), repr(paid.lines[0].zip), repr([collect(paid)]), hasattr(paid, "__await__")])
        return paid

    wired(nowhere, flow)
    assert seen == [
        [
            "<the argument n>",
            "<the result of source>",
            "<the result of source.lines[0].zip>",
            "[<the outcome of source>]",
            False,
        ]
    ]


def test_steps_stand_in_workflows_only(nowhere: TaskQ) -> None:
    a = task(nowhere, "a")

    @nowhere.workflow
    def flow() -> None:
        a.step()

    calls: dict[str, Callable[[], Any]] = {
        "a.step()": a.step,
        "a.node().step()": a.node("x").step,
        "gather()": lambda: gather(1, 2),
        "branch()": lambda: branch(True, {True: lambda: None}),
        "flow()": flow,
    }
    for name, call in calls.items():
        with pytest.raises(WiringError) as caught:
            call()
        assert str(caught.value) == (
            f"{name} stands outside of a workflow; call it in a function that @app.workflow decorates"
            + (", or start a run with flow.start()" if name == "flow()" else "")
        )
    assert isinstance(caught.value, TypeError)
    assert flow.plan.names == ["a"]


def test_a_task_that_is_called_instead_of_wired_is_told_of(nowhere: TaskQ) -> None:
    @nowhere.task
    def plain() -> int:
        return 1

    @nowhere.task
    async def waits() -> int:
        return 1

    def calls_plain() -> int:
        return plain()

    def calls_waits() -> Any:
        return waits()

    for flow, name in ((calls_plain, "plain"), (calls_waits, "waits")):
        with pytest.raises(WiringError, match=rf"^{name}\(\) would run its function.*{name}\.step\(\) is a node"):
            compiled(nowhere, flow)
    assert plain() == 1

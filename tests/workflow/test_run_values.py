"""What becomes of values in a run: arguments, parts, outcomes, branches, and what the run returns."""
# ruff: noqa: PT012 (what must be refused is a whole block)

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from started_kit import simple, working
from worker_kit import BOUND

from taskq import (
    Outcome,
    PayloadError,
    Retry,
    TaskQ,
    branch,
    collect,
    gather,
    or_skip,
)

pytestmark = pytest.mark.anyio


# Values ---------------------------------------------------------------------------------------------------------------


class Way(enum.Enum):
    AIR = "air"
    SEA = "sea"


@dataclass
class Address:
    street: str
    zip: int


class Parcel(msgspec.Struct, rename="camel"):
    tracking_code: str
    way_out: Way


class Row(msgspec.Struct, array_like=True):
    name: str
    count: int


class Bill(pydantic.BaseModel):
    total: int
    bill_to: Address = pydantic.Field(alias="billTo")


class Shape(TypedDict):
    name: str
    corners: list[tuple[int, int]]


NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


async def test_values_and_their_parts_reach_bodies_as_they_were_made(app: TaskQ, dsn: str) -> None:
    seen: dict[str, Any] = {}

    def take(declared: Any, name: str) -> Any:
        async def body(x: Any, y: Any = None) -> None:
            seen[name] = x

        body.__name__ = name
        body.__annotations__ = {"x": declared, "return": None}
        return app.task(body)

    @app.task
    async def parcel(n: int) -> Parcel:
        return Parcel(f"p{n}", Way.SEA)

    @app.task
    async def bill() -> Bill:
        return Bill(total=7, billTo=Address("x", 5))

    @app.task
    async def rows() -> list[Row]:
        return [Row("a", 1), Row("b", 2)]

    @app.task
    async def shape() -> Shape:
        return {"name": "s", "corners": [(1, 2), (3, 4)]}

    @app.task
    async def kind() -> Literal["big", "small"]:
        return "big"

    @app.task
    async def nothing() -> int | None:
        return None

    code, out, total, zip_, row = (take(t, n) for t, n in [
        (str, "code"), (Way, "out"), (int, "total"), (int, "zip_"), (int, "row")])  # fmt: skip
    whole, corner, word, none, mixed = (take(t, n) for t, n in [
        (Parcel, "whole"), (tuple[int, int], "corner"), (Literal["big", "small"], "word"), (int | None, "none"),
        (dict[str, list[Any]], "mixed")])  # fmt: skip
    constants, default, street, many = (take(t, n) for t, n in [
        (tuple[Address, Way, Decimal, datetime, set[int], UUID], "constants"), (datetime, "default"), (str, "street"),
        (tuple[Parcel, int, Way], "many")])  # fmt: skip

    @app.workflow
    def flow(n: int, address: Address, when: datetime = NOW, tags: tuple[str, ...] = ("x", "y")) -> dict[str, Any]:
        made, paid, table, drawn = parcel.step(n), bill.step(), rows.step(), shape.step()
        code.step(made.tracking_code)
        out.step(made.way_out)
        whole.step(made)
        total.step(paid.total)
        zip_.step(paid.bill_to.zip)
        row.step(table[1].count)
        corner.step(drawn["corners"][1])
        word.step(kind.step())
        none.step(nothing.step())
        mixed.step({"a": [made.tracking_code, {"deep": [table[0].name, n]}, None], "b": [], "c": [tags[1], address]})
        constants.step((Address("é", 1), Way.AIR, Decimal("1.50"), NOW, {3, 1}, UUID(int=5)))
        default.step(when)
        street.step(address.street)
        many.step(gather(made, n, made.way_out))
        return {"code": made.tracking_code, "bill": paid, "n": n, "none": nothing.step(), "tags": tags}

    async with working(app, dsn):
        run = await flow.start(4, Address("main", 9))
        assert await run.result(timeout=BOUND) == {
            "code": "p4", "bill": {"total": 7, "billTo": {"street": "x", "zip": 5}}, "n": 4, "none": None,
            "tags": ["x", "y"],
        }  # fmt: skip
    assert seen == {
        "code": "p4",
        "out": Way.SEA,
        "whole": Parcel("p4", Way.SEA),
        "total": 7,
        "zip_": 5,
        "row": 2,
        "corner": (3, 4),
        "word": "big",
        "none": None,
        "mixed": {"a": ["p4", {"deep": ["a", 4]}, None], "b": [], "c": ["y", {"street": "main", "zip": 9}]},
        "constants": (Address("é", 1), Way.AIR, Decimal("1.50"), NOW, {3, 1}, UUID(int=5)),
        "default": NOW,
        "street": "main",
        "many": (Parcel("p4", Way.SEA), 4, Way.SEA),
    }
    # What the defaults were when it started is on record.
    assert (await run.info()).input == {
        "n": 4, "address": {"street": "main", "zip": 9}, "when": "2026-01-02T03:04:05Z", "tags": ["x", "y"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("returns", "value"),
    [
        (Address, Address("x", 1)),
        (Parcel, Parcel("x", Way.AIR)),
        (Bill, Bill(total=1, billTo=Address("x", 1))),
        (Way, Way.SEA),
        (tuple[int, datetime], (1, NOW)),
        (None, None),
    ],
    ids=["dataclass", "struct", "model", "enum", "tuple", "none"],
)
async def test_a_result_is_decoded_to_what_the_workflow_returns(app: TaskQ, dsn: str, returns: Any, value: Any) -> None:
    async def make() -> Any:
        return value

    make.__annotations__ = {"return": returns}
    made = app.task(make)

    def fn() -> Any:
        return made.step()

    fn.__annotations__ = {"return": returns}
    flow = app.workflow(fn)
    async with working(app, dsn):
        result = await (await flow.start()).result(timeout=BOUND)
    assert (type(result), result) == (type(value), value)


async def test_outcomes_are_decoded_to_their_declared_types_by_the_bodies_that_take_them(app: TaskQ, dsn: str) -> None:
    seen: dict[str, Any] = {}

    @app.task(retry=Retry(max_attempts=1))
    async def make(n: int) -> Parcel:
        if n < 0:
            raise ValueError("below 0")
        return Parcel(f"p{n}", Way.AIR)

    @app.task
    async def decide() -> bool:
        return True

    @app.task
    async def nothing() -> None:
        return None

    @app.task
    async def behind(parcel: Parcel) -> Parcel:
        return parcel

    @app.task
    async def report(
        good: Outcome[Parcel], bad: Outcome[Parcel], blocked: Outcome[Parcel], skipped: Outcome[Parcel],
        none: Outcome[None], all_: list[Outcome[Parcel]], status: str,
    ) -> str:  # fmt: skip
        seen.update(good=good, bad=bad, blocked=blocked, skipped=skipped, none=none, all_=all_, status=status)
        return "reported"

    @app.workflow
    def flow() -> str:
        good, bad = make.node("good").step(1), make.node("bad").step(-1)
        arm: list[Any] = []

        def other() -> None:
            arm.append(make.node("other").step(2))

        branch(decide.step(), {True: lambda: None, False: other})
        ends = [collect(good), collect(bad)]
        return report.step(
            ends[0], ends[1], collect(behind.step(bad)), collect(arm[0]), collect(nothing.step()), ends, ends[1].status
        )

    async with working(app, dsn):
        run = await flow.start()
        assert await run.result(timeout=BOUND) == "reported"
    good = Outcome("good", "succeeded", Parcel("p1", Way.AIR), None)
    assert (seen["good"], seen["good"].ok) == (good, True)
    assert (seen["bad"].node, seen["bad"].status, seen["bad"].value, seen["bad"].ok) == ("bad", "failed", None, False)
    assert (seen["bad"].error["type"], seen["bad"].error["message"]) == ("ValueError", "below 0")
    assert (seen["blocked"].status, seen["blocked"].error["node"]) == ("blocked", "bad")
    assert (seen["skipped"].status, seen["skipped"].value) == ("skipped", None)
    assert seen["none"] == Outcome("nothing", "succeeded", None, None)
    assert seen["all_"] == [good, seen["bad"]]
    assert seen["status"] == "failed"
    statuses = {each.name: each.status for each in await run.nodes()}
    assert statuses["bad"] == "failed"
    assert statuses["behind"] == "blocked"
    assert statuses["other"] == "skipped"


async def test_branches_run_the_arm_that_is_chosen_and_skip_the_rest(app: TaskQ, dsn: str) -> None:
    ran: list[str] = []

    @app.task(retry=Retry(max_attempts=1))
    async def way_of(n: int) -> Way:
        if n > 9:
            raise ValueError("too many")
        return Way.AIR if n % 2 else Way.SEA

    @app.task
    async def is_small(n: int) -> bool:
        return n < 5

    @app.task
    async def note(text: str) -> str:
        ran.append(text)
        return text

    @app.workflow(on_failure="finish")
    def flow(n: int) -> str | None:
        way = way_of.step(n)
        by_size = {True: lambda: note.node("small").step("small"), False: lambda: note.node("large").step("large")}
        text = branch(or_skip(way), {Way.AIR: lambda: branch(is_small.step(n), by_size), Way.SEA: lambda: "by sea"})
        return note.node("last").step(text)

    async with working(app, dsn):
        found = {}
        for n in (1, 7, 2):
            run = await flow.start(n)
            found[n] = await run.result(timeout=BOUND)
            skipped = {each.name for each in await run.nodes() if each.status == "skipped"}
            assert skipped == {1: {"large"}, 7: {"small"}, 2: {"is_small", "small", "large"}}[n]
        # Where nothing is decided, all of it is skipped, and the workflow has no value.
        run = await flow.start(11)
        assert await run.result(timeout=BOUND) is None
        statuses = {each.name: each.status for each in await run.nodes()}
        assert statuses == {"way_of": "failed"} | dict.fromkeys(("is_small", "small", "large", "last"), "skipped")
    assert found == {1: "small", 7: "large", 2: "by sea"}
    assert ran == ["small", "small", "large", "large", "by sea"]


async def test_a_value_that_was_skipped_is_no_value_of_another_type(app: TaskQ, dsn: str) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def refuses(n: int) -> str:
        raise ValueError(n)

    @app.task
    async def note(text: str) -> str:
        return text

    @app.workflow(on_failure="finish")
    def flow(n: int) -> str:
        return note.step(or_skip(refuses.step(n)))

    @app.workflow(on_failure="finish")
    def listed(n: int) -> list[str]:
        return [note.step("there"), note.step(or_skip(refuses.step(n)))]

    async with working(app, dsn):
        for each, returns in ((flow, "str"), (listed, r"list\[str\]")):
            run = await each.start(1)
            said = rf"run {run.id} has succeeded, and has no value: .* annotate it to return {returns} \| None"
            with pytest.raises(PayloadError, match=said):
                await run.result(timeout=BOUND)
            assert (await run.info()).status == "succeeded"


async def test_a_workflow_inside_of_another_runs_as_a_part_of_it(app: TaskQ, dsn: str) -> None:
    inner = simple(app)

    @app.workflow
    def outer(n: int) -> int:
        return inner(inner(n))

    async with working(app, dsn):
        run = await outer.start(3)
        assert await run.result(timeout=BOUND) == 48
    assert [each.name for each in await run.nodes()] == ["double", "double-2", "double-3", "double-4"]


async def test_a_set_among_the_arguments_is_the_same_request_in_any_order(app: TaskQ, dsn: str) -> None:
    @app.task
    async def size(names: set[str]) -> int:
        return len(names)

    @app.workflow
    def flow(names: set[str]) -> int:
        return size.step(names)

    names = [f"name {n}" for n in range(50)]
    first = await flow.using(run_key="k").start(set(names))
    again = await flow.using(run_key="k").start({*reversed(names)})
    assert (again, again.created) == (first, False)
    assert (await first.info()).input["names"] == sorted(names)

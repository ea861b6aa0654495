"""Whether a value came back: the first field that differs is named, and what is equal is left alone."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest

from taskq.codec_compare import difference, instant
from taskq.errors import PayloadError

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HOUR = timezone(timedelta(hours=1))


class Pair(NamedTuple):
    a: Any
    b: Any


class Box(msgspec.Struct):
    inside: Any


@dataclasses.dataclass(eq=False)
class Card:
    """Without an equality of its own."""

    name: str
    tags: list[Any]


class Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    at: Any = None


class Secretive(Model):
    _hidden: int = 0


class Stubborn:
    def __eq__(self, other: object) -> bool:
        raise ValueError("never compare me")

    __hash__ = None  # type: ignore[assignment]


class Endless:
    def __eq__(self, other: object) -> bool:
        return self == other

    __hash__ = None  # type: ignore[assignment]


class Text(str):
    __slots__ = ()


def secretive(hidden: int) -> Secretive:
    made = Secretive(at=1)
    made._hidden = hidden
    return made


SAME = [
    (OrderedDict(a=1), {"a": 1}),
    ({NOON: 1}, {NOON.astimezone(HOUR): 1}),
    ((1, 2), (1, 2)),
    (Pair(1, [2]), Pair(1, [2])),
    ({1, 2}, {2, 1}),
    ({NOON}, {NOON.astimezone(HOUR)}),
    (frozenset({1}), frozenset({1})),
    (Box([1]), Box([1])),
    (Card("x", [1]), Card("x", [1])),
    (Model(at=1), Model(at=1)),
    (
        Model(at=datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1)),
        Model(at=datetime(2026, 10, 25, 1, 30, tzinfo=UTC)),
    ),
    (datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1), datetime(2026, 10, 25, 1, 30, tzinfo=UTC)),
    (time(1), time(1)),
    (time(1, tzinfo=UTC), time(2, tzinfo=HOUR)),
    (Decimal("1.50"), Decimal("1.50")),
    (Decimal("NaN"), Decimal("NaN")),
    (1, 1.0),
    (1, Decimal(1)),
    (bytearray(b"x"), b"x"),
    (Text("x"), "x"),
    (None, None),
]

DIFFERENT = [
    ([("a", 1)], {"a": 1}, "$"),
    ({"a": 1}, {"b": 1}, "$.a"),
    ({1: 1}, {"1": 1}, "$[1]"),
    ({True: 1}, {1: 1}, "$[True]"),
    ({"a": 1}, {"a": 1, "b": 2}, "$"),
    ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, "$.a.b[1]"),
    ((1, 2), [1, 2], "$"),
    ([1, 2], (1, 2), "$"),
    ([1], [1, 2], "$"),
    ((1, 2), Pair(1, 2), "$"),
    (Pair(1, 2), Pair(1, 3), "$[1]"),
    ([1], {1}, "$"),
    ({1, 2}, {1}, "$"),
    ({1}, {2}, "$"),
    ({"inside": 1}, Box(1), "$"),
    (Box({"a": True}), Box({"a": 1}), "$.inside.a"),
    (Card("x", [1]), Card("x", [2]), "$.tags[0]"),
    ({"at": 1}, Model(at=1), "$"),
    (Model(at=[1]), Model(at=[2]), "$.at[0]"),
    (Model.model_validate({"more": 1}), Model.model_validate({"more": 2}), "$"),
    (Model.model_construct(at=1), Model.model_construct({"at"}, at=1, more=1), "$"),
    (secretive(1), secretive(2), "$"),
    (True, 1, "$"),
    (0, False, "$"),
    (NOON, NOON.replace(tzinfo=None), "$"),
    (NOON, NOON + timedelta(microseconds=1), "$"),
    (time(1), time(1, tzinfo=UTC), "$"),
    (Decimal("1.5"), Decimal("1.50"), "$"),
    ("1", 1, "$"),
    (b"x", "x", "$"),
    (Stubborn(), Stubborn(), "$"),
]


@pytest.mark.parametrize(("given", "back"), SAME, ids=[str(n) for n in range(len(SAME))])
def test_what_is_equal_came_back(given: Any, back: Any) -> None:
    assert difference(given, back, "$") is None


@pytest.mark.parametrize(("given", "back", "path"), DIFFERENT, ids=[str(n) for n in range(len(DIFFERENT))])
def test_the_first_difference_is_named(given: Any, back: Any, path: str) -> None:
    assert difference(given, back, "$") == path


def test_an_object_that_lacks_a_field_differs_there() -> None:
    bare = Card("x", [])
    del bare.name
    assert difference(bare, Card("x", []), "$") == "$.name"


def test_a_model_whose_fields_were_taken_away_differs() -> None:
    bare = Model(at=1)
    del bare.at
    assert difference(bare, Model(at=1), "$") == "$"


def test_classes_of_attrs_are_looked_at_field_by_field() -> None:
    """Known by what ``attrs`` puts on them; the library itself need not be there."""

    class Field(NamedTuple):
        name: str

    class Point:
        __attrs_attrs__ = (Field("x"), Field("y"))

        def __init__(self, x: int, y: int) -> None:
            self.x, self.y = x, y

    assert difference(Point(1, 2), Point(1, 2), "$") is None
    assert difference(Point(1, 2), Point(1, 3), "$") == "$.y"


def test_an_endless_comparison_is_the_callers_to_refuse() -> None:
    with pytest.raises(RecursionError):
        difference(Endless(), Endless(), "$")


def test_an_instant_beyond_the_calendar_is_left_in_its_zone() -> None:
    first = datetime(1, 1, 1, tzinfo=HOUR)
    assert instant(first) is first
    assert instant(NOON.astimezone(HOUR)).tzinfo is UTC
    assert difference(first, datetime(1, 1, 1, tzinfo=HOUR), "$") is None


def test_a_float_where_a_decimal_came_back_is_refused_with_its_path() -> None:
    with pytest.raises(PayloadError, match=r"^\$\[1\]: 0\.5 is a float where Decimal is declared"):
        difference([1, 0.5], [1, Decimal("0.5")], "$")

"""Arguments and results: what is accepted comes back equal through jsonb, everything else is refused with its path."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import psycopg
import pytest
from codec_kit import codec, through_jsonb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import Server

from taskq.codec import MAX_PAYLOAD_BYTES, TaskCodec
from taskq.context import JobContext
from taskq.errors import PayloadError, ResultNotStorable, TaskDefinitionError


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: float
    label: str = ""


class Line(msgspec.Struct):
    a: Point
    b: Point | None = None


class Address(TypedDict):
    city: str


class Pair(NamedTuple):
    left: int
    right: str


@pytest.fixture(scope="module")
def conn(pg_server: Server) -> Iterator[psycopg.Connection]:
    """Any database will do: what is tested is jsonb."""
    with psycopg.connect(pg_server.dsn(), autocommit=True) as connection:
        yield connection


def jsonb(conn: psycopg.Connection, text: str) -> str:
    return through_jsonb(conn, [text])[0]


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (int, 7),
        (int, 2**63),
        (int, -(10**300)),
        (float, 3),
        (float, 0.1),
        (float, 1e16),
        (float, -1.7976931348623157e308),
        (float, 5e-324),
        (str, 'a"\\ \\u0000 ü 😀\n'),
        (str, ""),
        (bool, True),
        (None, None),
        (str | None, None),
        (int | str | None, "x"),
        (int | float, 1e22),
        (Any, {"a": [1, 2.5, "x", None, True, {"b": {}}], "": 1e300}),
        (Any, 2**70),
        (list[int], [1, 2, 3]),
        (dict[str, list[float]], {"a": [1.5, 1e17]}),
        (tuple[int, str], (1, "a")),
        (set[int], {1, 2}),
        (frozenset[str], frozenset({"a"})),
        (bytes, b"\0\xff"),
        (Decimal, Decimal("1.10")),
        (Decimal, Decimal("-1E+30")),
        (UUID, UUID("018f4b2c-0000-7000-8000-000000000001")),
        (UUID, UUID("018f4b2c-0000-8000-8000-000000000001")),
        (UUID, UUID(int=0)),
        (datetime, datetime(2024, 2, 29, 12, 0, 0, 123456, UTC)),
        (datetime, datetime(2024, 2, 29, 12, tzinfo=timezone(timedelta(hours=5, minutes=30)))),
        (date, date(2024, 2, 29)),
        (time, time(12, 30, 0, 1)),
        (timedelta, timedelta(days=-1, microseconds=1)),
        (Colour, Colour.RED),
        (Literal["a", "b"], "b"),
        (Point, Point(1.5, "p")),
        (Line, Line(Point(1), Point(2))),
        (Address, {"city": "Ulm"}),
        (Pair, Pair(1, "r")),
        (list[Point | None], [Point(1), None]),
        (dict[int, str], {1: "a", -5: "b", 2**70: "c"}),
    ],
)
def test_values_come_back_equal_and_of_their_type(conn: psycopg.Connection, declared: Any, value: Any) -> None:
    one = codec(declared)
    for text in (one.encode((value,), {}), one.encode((), {"x": value})):
        back = one.decode(jsonb(conn, text))["x"]
        assert back == value
        if declared is not Any and isinstance(declared, type) and declared is not float:
            assert type(back) is type(value)
    if isinstance(value, (Decimal, datetime)):
        assert str(back) == str(value) or back.utcoffset() is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(value=JSON)
def test_any_json_is_refused_or_comes_back_equal(conn: psycopg.Connection, value: Any) -> None:
    one = codec(Any)
    try:
        text = one.encode((value,), {})
    except PayloadError as exc:
        refused = exc
    else:
        assert one.decode(jsonb(conn, text)) == {"x": value}
        return
    assert refused.path.startswith("x")
    assert "NUL" in str(refused) or "surrogate" in str(refused)


@pytest.mark.parametrize(
    ("declared", "value", "path"),
    [
        (float, math.nan, "x"),
        (Any, [1, math.inf], "x[1]"),
        (Any, {"y": {"z": [math.nan]}}, "x.y.z[0]"),
        (list[Point], [Point(1), Point(-math.inf)], "x[1].x"),
        (Any, {1: 2, None: 3}, "x[1]"),
        (Any, {None: 3}, "x[None]"),
        (Any, {1: 2}, "x[1]"),
        (Any, {True: 4}, "x[True]"),
        (Any, {"m": {1: "a", "1": "b"}}, "x.m[1]"),
        (dict[int, str], {True: "b"}, "x[True]"),
        (dict[int, str], {"1": "a"}, "x['1']"),
        (dict[int | str, str], {1: "a", "1": "b"}, "x[1]"),
        (dict[str, list[int]], {"a": [1], "b c": [1, "2"]}, "x['b c'][1]"),
        (dict[str, dict[str, int]], {"a": {"b": 1}, "c": {"d": 2, "e": "x"}}, "x.c.e"),
        (str, "a\0b", "x"),
        (Any, ["\0"], "x[0]"),
        (Any, {"\0": 1}, "x['\\x00']"),
        (str, "\ud800", "x"),
        (Any, {"k": "\udfff"}, "x.k"),
        (datetime, datetime(2024, 1, 1), "x"),
        (list[datetime], [datetime(2024, 1, 1)], "x[0]"),
        (Decimal, Decimal("NaN"), "x"),
        (Any, Point(1), "x"),
        (Any, (1, 2), "x"),
        (Any, {"k": [(1, 2)]}, "x.k[0]"),
        (Any, {1, 2}, "x"),
        (Any, UUID(int=1), "x"),
        (Any, b"x", "x"),
        (Any, object(), "x"),
        (Any, {"a b": [object()]}, "x['a b'][0]"),
        (int, "1", "x"),
        (int, True, "x"),
        (int, 1.0, "x"),
        (str, 1, "x"),
        (list[int], ["a"], "x[0]"),
        (Point, {"x": "a"}, "x.x"),
        (Literal["a"], "b", "x"),
        pytest.param(int, 10**4400, "x", id="4400 digits"),
        pytest.param(int, 10**4000, "x", id="4000 digits"),
    ],
)
def test_what_would_change_or_not_come_back_is_refused_with_its_path(declared: Any, value: Any, path: str) -> None:
    with pytest.raises(PayloadError) as caught:
        codec(declared).encode((value,), {})
    assert caught.value.path == path
    assert path in str(caught.value)


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(PayloadError, match="contains itself"):
        codec(Any).encode((value,), {})


def test_the_limit_is_on_bytes_of_json() -> None:
    one = codec(str)
    room = MAX_PAYLOAD_BYTES - len('{"x":""}')
    assert len(one.encode(("a" * room,), {})) == MAX_PAYLOAD_BYTES
    for too_much in ("a" * (room + 1), "ü" * (room // 2 + 1)):
        with pytest.raises(PayloadError, match=rf"\d+ bytes.*limit is {MAX_PAYLOAD_BYTES}"):
            one.encode((too_much,), {})


async def greet(ctx: JobContext, name: str, times: int = 1, *, loud: bool = False) -> str:
    return name


async def open_ended(a: int, **rest: Any) -> None: ...


def test_arguments_are_bound_to_names_and_defaults_left_out() -> None:
    one = TaskCodec(greet)
    assert one.takes_context
    assert one.encode(("Ada",), {}) == '{"name":"Ada"}'
    assert one.encode(("Ada", 2), {"loud": True}) == '{"name":"Ada","times":2,"loud":true}'
    assert one.decode('{"loud": true, "name": "Ada"}') == {"name": "Ada", "loud": True}


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((), {}, "name"),
        (("Ada",), {"tims": 2}, "tims"),
        (("Ada", 1, True), {}, "positional"),
        (("Ada",), {"name": "Bob"}, "name"),
        (("Ada",), {"ctx": 1}, "ctx"),
    ],
)
def test_missing_and_unknown_arguments_are_named(args: Any, kwargs: Any, named: str) -> None:
    with pytest.raises(PayloadError, match=named) as caught:
        TaskCodec(greet).encode(args, kwargs)
    assert isinstance(caught.value, TypeError)


def test_further_keywords_are_json() -> None:
    one = TaskCodec(open_ended)
    assert one.decode(one.encode((1,), {"b": [1], "c": "x"})) == {"a": 1, "b": [1], "c": "x"}
    with pytest.raises(PayloadError) as caught:
        one.encode((1,), {"b": [math.nan]})
    assert caught.value.path == "b[0]"


@pytest.mark.parametrize("payload", ['{"name": 1}', '{"nam": "x"}', "{}", "[]", "nonsense", '{"name": "a", "more": 1}'])
def test_a_stored_payload_that_does_not_fit_is_an_error_of_its_own(payload: str) -> None:
    with pytest.raises(PayloadError, match="greet"):
        TaskCodec(greet).decode(payload)


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        *((value, value) for value in (None, 0, -1, 2**80, True, 1.5, 1e16, "x", [1], {"a": None})),
        (Point(1), {"x": 1, "label": ""}),
        ([Colour.RED], ["red"]),
        ((1, {2}), [1, [2]]),
        (UUID(int=1), str(UUID(int=1))),
    ],
)
def test_results_are_stored_as_json(conn: psycopg.Connection, value: Any, stored: Any) -> None:
    one = codec(Any)
    assert one.decode_result(jsonb(conn, one.encode_result(value))) == stored


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (-math.inf, "result: -inf"),
        ([{"a": math.nan}], r"result\[0\]\.a"),
        ("\0", "NUL"),
        ("\ud800", "surrogate"),
        ({1: 2}, "text keys"),
        (object(), "object"),
        (datetime(2024, 1, 1), "time zone"),
        ("a" * MAX_PAYLOAD_BYTES, "bytes"),
    ],
)
def test_results_that_cannot_be_stored_say_why(value: Any, said: str) -> None:
    with pytest.raises(ResultNotStorable, match=said):
        codec(Any).encode_result(value)


def test_results_come_back_as_the_annotated_type() -> None:
    def body() -> dict[str, Point]: ...

    one = TaskCodec(body, localns={"Point": Point})
    value = {"p": Point(1.5)}
    assert one.decode_result(one.encode_result(value)) == value
    assert one.decode_result(None) is None
    with pytest.raises(PayloadError, match="body returns"):
        one.decode_result('{"p": 1}')


def unknown_name(x: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


def two_texts(x: datetime | str) -> None: ...


def positional_only(x: int, /) -> None: ...


def star(*args: int) -> None: ...


def context_second(x: int, ctx: JobContext) -> None: ...


def context_or_none(ctx: JobContext | None) -> None: ...


def foreign(x: psycopg.Connection) -> None: ...


def foreign_by_default(x: psycopg.Connection | None = None, y: psycopg.Connection = None) -> None: ...  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (unknown_name, "Nowhere"),
        (two_texts, "parameter x"),
        (positional_only, "x cannot be positional-only"),
        (star, r"\*args"),
        (context_second, "only the first parameter can be the context"),
        (context_or_none, "only the first parameter can be the context"),
        (foreign, "x is annotated Connection, which cannot be made from JSON"),
    ],
)
def test_signatures_that_cannot_be_stored_are_refused(fn: Callable[..., Any], said: str) -> None:
    TaskCodec(foreign_by_default)  # its own default fills it
    with pytest.raises(TaskDefinitionError, match=said):
        TaskCodec(fn)


def test_sets_are_written_in_one_order_whatever_their_hashes() -> None:
    words = [f"word {n}" for n in range(50)]
    made = codec(set[str])
    assert made.encode((set(words),), {}) == made.encode(({*words[::-1]},), {})
    assert msgspec.json.decode(made.encode((set(words),), {}))["x"] == sorted(words)
    # Where elements cannot be compared, their texts are.
    mixed = codec(dict[str, list[frozenset[int | None | Colour]]])
    value: Any = {"a": [frozenset([3, None, Colour.RED, 1])]}
    assert mixed.encode((value,), {}) == '{"x":{"a":[["red",1,3,null]]}}'
    nested = codec(set[tuple[int | str, ...]])
    assert nested.encode(({(1, "a"), ("a", 1), (1, 2)},), {}) == '{"x":[["a",1],[1,"a"],[1,2]]}'

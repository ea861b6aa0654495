"""Every kind of declared type: values come back equal, or are refused with a path before any SQL."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, NewType, NotRequired, TypedDict, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import psycopg
import pydantic
import pytest
from codec_kit import MISSING, canonical, codec, shown, through_jsonb
from servers import Server

from taskq.codec import MAX_DEPTH, TaskCodec, decode_any
from taskq.context import JobContext
from taskq.errors import PayloadError, PayloadMisfit, ResultNotStorable, TaskDefinitionError

if TYPE_CHECKING:
    from nowhere import Missing  # type: ignore[import-not-found]

T = TypeVar("T")
BERLIN = ZoneInfo("Europe/Berlin")
OrderId = NewType("OrderId", int)


@pytest.fixture(scope="module")
def conn(pg_server: Server) -> Iterator[psycopg.Connection]:
    """Any database will do: what is tested is jsonb."""
    with psycopg.connect(pg_server.dsn(), autocommit=True) as connection:
        yield connection


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


class Level(enum.IntEnum):
    LOW = 1
    ALSO_LOW = 1
    HIGH = 2


class Colour(enum.StrEnum):
    RED = enum.auto()
    BLUE = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    sku: str
    count: int = 1
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Order:
    items: list[Item]
    by_id: dict[int, Item]
    parent: Order | None = None


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


@dataclasses.dataclass
class Computed:
    a: int
    double: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.double = self.a * 2


@dataclasses.dataclass(eq=False)
class NoEquality:
    a: int


@dataclasses.dataclass
class Half:
    a: int
    hidden: int = dataclasses.field(default=0, compare=False, init=False)


@dataclasses.dataclass
class WithInitVar:
    a: int
    b: dataclasses.InitVar[int] = 0


@dataclasses.dataclass
class Renewed:
    name: str

    def __post_init__(self) -> None:
        self.name += "!"


class Row(NamedTuple):
    left: int
    right: str = "r"


class Address(TypedDict):
    city: str
    zip: NotRequired[str]


class Loose(TypedDict, total=False):
    a: int
    b: list[date]


class Cat(msgspec.Struct, tag="cat", frozen=True, rename="camel"):
    lives_left: int = 9


class Dog(msgspec.Struct, tag="dog", forbid_unknown_fields=True):
    name: str


class Pair(msgspec.Struct, array_like=True):
    left: int
    right: Pair | None = None


class Partial(msgspec.Struct, omit_defaults=True):
    n: int | msgspec.UnsetType = msgspec.UNSET


class Wing(pydantic.BaseModel):
    kind: Literal["wing"] = "wing"
    span: float


class Leg(pydantic.BaseModel):
    kind: Literal["leg"] = "leg"
    count: int = pydantic.Field(alias="legCount", ge=0)


class Animal(pydantic.BaseModel):
    name: str
    limbs: list[Annotated[Wing | Leg, pydantic.Field(discriminator="kind")]] = []
    born: datetime | None = None
    price: Decimal = Decimal("0.00")
    by_id: dict[int, set[str]] = {}


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid", frozen=True)
    at: datetime
    id: UUID


class Lower(pydantic.BaseModel):
    name: str

    @pydantic.field_validator("name")
    @classmethod
    def lower(cls, value: str) -> str:
        return value.lower()


class Louder(pydantic.BaseModel):
    name: str

    @pydantic.field_validator("name")
    @classmethod
    def louder(cls, value: str) -> str:
        return value + "!"


class Ids(pydantic.RootModel[dict[int, UUID]]):
    pass


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Secret(pydantic.BaseModel):
    word: pydantic.SecretStr


class Dropped(pydantic.BaseModel):
    a: int
    b: int = pydantic.Field(0, exclude=True)


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (Order, Order([Item(sku="a", tags=["x"])], {-7: Item(sku="b")}, Order([], {}))),
        (Box[int], Box(1)),
        (Box[list[Item]], Box([Item(sku="a")])),
        (Computed, Computed(3)),
        (NoEquality, NoEquality(1)),
        (list[NoEquality], [NoEquality(1), NoEquality(2)]),
        (Row, Row(1)),
        (list[Row], [Row(1, "a")]),
        (Address, {"city": "Ulm"}),
        (Address, {"city": "Ulm", "zip": "89073"}),
        (Loose, {"b": [date(1, 1, 1)]}),
        (Cat | Dog, Cat()),
        (list[Cat | Dog], [Dog("Rex"), Cat(1)]),
        (Pair, Pair(1, Pair(2))),
        (Partial, Partial()),
        (Partial, Partial(0)),
        (Animal, Animal(name="a", limbs=[Wing(span=1.5), Leg(legCount=4)], by_id={1: {"x"}})),
        (Animal, Animal(name="a", born=datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN), price=Decimal("1.10"))),
        (Animal, Animal(name="naive, as pydantic allows", born=datetime(2024, 1, 1))),
        (Wing | Leg, Leg(legCount=2)),
        (list[Annotated[Wing | Leg, pydantic.Field(discriminator="kind")]], [Leg(legCount=2), Wing(span=1)]),
        (Animal | None, None),
        (Box[Animal], Box(Animal(name="b"))),
        (Strict, Strict(at=datetime(2024, 1, 1, tzinfo=UTC), id=UUID(int=7))),
        (Lower, Lower(name="ABC")),
        (Ids, Ids({1: UUID(int=2)})),
        (Page[Animal], Page[Animal](items=[Animal(name="a")])),
        (Page[int], Page[int](items=[1])),
        (datetime, datetime(2024, 10, 27, 2, 30, fold=0, tzinfo=BERLIN)),
        (datetime, datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN)),
        (datetime, datetime(2024, 3, 31, 2, 30, tzinfo=BERLIN)),
        (datetime, datetime(1800, 1, 1, tzinfo=BERLIN)),
        (datetime, datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5)))),
        (datetime, datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=timezone(timedelta(hours=-5)))),
        (set[datetime], {datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN)}),
        (dict[datetime, int], {datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=BERLIN): 1}),
        (time, time(1, 2, 3, 4, tzinfo=UTC)),
        (date, date.max),
        (timedelta, timedelta.max),
        (timedelta, timedelta.min),
        (timedelta, timedelta(microseconds=-1)),
        *((UUID, UUID(text)) for text in (
            "00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff",
            *(f"0190163d-8694-{version}39b-aea5-966c26f8ad91" for version in "12345678"),
        )),
        *((Decimal, Decimal(text)) for text in ("1.10", "1E+3", "-0", "0E-9", "1E-400", "1E+999999", "123456789" * 9)),
        (Rights, Rights.READ | Rights.WRITE),
        (Rights, Rights(0)),
        (Level, Level.ALSO_LOW),
        (Colour, Colour.BLUE),
        (dict[Colour, int], {Colour.RED: 1}),
        (dict[UUID, date], {UUID(int=1): date(2024, 1, 1)}),
        (Literal[True, "a"], True),
        (bytearray, bytearray(b"\0\xff")),
        (memoryview, memoryview(b"\0\xff")),
        (tuple[int, ...], (1, 2, 3)),
        (tuple[()], ()),
        (frozenset[tuple[int, str]], frozenset({(1, "a")})),
        (Sequence[int], [1]),
        (Mapping[str, int], {"a": 1}),
        (Annotated[int, msgspec.Meta(gt=3)], 4),
        (OrderId, OrderId(5)),
        (T, {"any": [1]}),
        (object, ["as Any"]),
        (list, [1, "a"]),
        (dict, {"a": 1}),
        (int, -(2**3000)),
        (float, -0.0),
        (float, 2.0**53),
        (str, "".join(map(chr, [*range(1, 0xD800), *range(0xE000, 0x11000), 0x10FFFF]))),
        (str, "\U0001f600" * 3000),
        (str, "x" * 5_000_000),
        (dict[str, str], {"z" * n: "v" for n in range(30)}),
    ],
    ids=shown,
)  # fmt: skip
def test_values_come_back_equal_as_arguments_and_as_results(
    conn: psycopg.Connection, declared: Any, value: Any
) -> None:
    one = codec(declared, declared)
    arguments, result = through_jsonb(conn, [one.encode((value,), {}), one.encode_result(value)])
    assert canonical(one.decode(arguments)["x"]) == canonical(value)
    assert canonical(one.decode_result(result)) == canonical(value)


class MyText(str):
    __slots__ = ()


class MyInt(int):
    pass


@pytest.mark.parametrize(
    ("declared", "value", "stored"),
    [
        (float, 3, "3"),
        (Decimal, 3, "3"),
        (int, Level.HIGH, "2"),
        (Level, 2, "2"),
        (str, Colour.RED, '"red"'),
        (str, MyText("a"), '"a"'),
        (Any, [MyText("a"), MyInt(3)], '["a", 3]'),
        (int, MyInt(3), "3"),
        (dict[str, int], collections.OrderedDict(b=1, a=2), '{"a": 2, "b": 1}'),
        (dict[str, int], collections.Counter("aab"), '{"a": 2, "b": 1}'),
        (bytes, bytearray(b"x"), '"eA=="'),
        (tuple[int, str], Row(1, "a"), '[1, "a"]'),
    ],
    ids=shown,
)
def test_equal_values_of_other_types_arrive_as_the_declared_type(
    conn: psycopg.Connection, declared: Any, value: Any, stored: str
) -> None:
    one = codec(declared)
    payload = through_jsonb(conn, [one.encode((value,), {})])[0]
    assert payload == f'{{"x": {stored}}}'
    back = one.decode(payload)["x"]
    assert back == value
    kind = typing.get_origin(declared) or declared
    assert declared is Any or type(back) is kind


@dataclasses.dataclass(frozen=True)
class Price:
    amount: Decimal


@pytest.mark.parametrize("number", [2.5, 3.0, 1e22, 0.0, 19.99, 0.1])
@pytest.mark.parametrize(
    ("declared", "wrap", "path"),
    [
        (Decimal, lambda f: f, "x"),
        (Decimal | None, lambda f: f, "x"),
        (list[Decimal], lambda f: [Decimal(1), f], "x[1]"),
        (tuple[int, Decimal], lambda f: (1, f), "x[1]"),
        (set[Decimal], lambda f: {f}, "x"),
        (frozenset[Price], lambda f: frozenset({Price(f)}), "x.amount"),
        (dict[str, Price], lambda f: {"a": Price(f)}, "x.a.amount"),
        (dict[Decimal, int], lambda f: {f: 1}, "x[{}]"),
    ],
    ids=["plain", "optional", "list", "tuple", "set", "frozenset", "dict", "key"],
)
def test_a_float_for_a_decimal_is_refused_whatever_its_number(
    declared: Any, wrap: Callable[[float], Any], path: str, number: float
) -> None:
    one = codec(declared, declared)
    path = path.format(number)
    cure = re.escape(f"{path}: {number!r} is a float") + ".*" + re.escape(f"such as Decimal('{number!r}')")
    with pytest.raises(PayloadError, match=cure) as caught:
        one.encode((wrap(number),), {})
    assert caught.value.path == path
    with pytest.raises(ResultNotStorable, match="is a float where Decimal is declared"):
        one.encode_result(wrap(number))


def test_a_float_is_taken_where_it_is_declared_beside_decimal() -> None:
    one = codec(Decimal | float)
    assert one.decode(one.encode((2.5,), {})) == {"x": 2.5}


@pytest.mark.parametrize(
    ("declared", "value", "path"),
    [
        (int, True, "x"),
        (float, 2**53 + 1, "x"),
        (float, True, "x"),
        (float, 10**400, "x"),
        (bool, 1, "x"),
        (str, b"a", "x"),
        (UUID, "0190163d-8694-739b-aea5-966c26f8ad91", "x"),
        (datetime, "2024-01-01T00:00:00Z", "x"),
        (date, datetime(2024, 1, 1, tzinfo=UTC), "x"),
        (time, time(1, tzinfo=BERLIN), "x"),
        (datetime, datetime.min.replace(tzinfo=timezone(timedelta(seconds=3))), "x"),
        (Decimal, 0.1, "x"),
        (Decimal, Decimal("sNaN"), "x"),
        (Decimal, Decimal("-Infinity"), "x"),
        (list[Any], (1, 2), "x"),
        (Sequence[int], (1, 2), "x"),
        (list[Order], [Order([], {}), Order([Item(sku="\0")], {})], "x[1].items[0].sku"),
        (Order, {"items": [], "by_id": {}}, "x"),
        (Order, Order([], {}, Order([], {1: Item(sku=1)})), "x.parent.by_id['1'].sku"),  # type: ignore[arg-type]
        (Box[int], Box("a"), "x.content"),
        (Renewed, Renewed("a"), "x.name"),
        (Address, {"city": "Ulm", "street": "A"}, "x.street"),
        (Cat, Dog("Rex"), "x.type"),
        (Louder, Louder(name="a"), "x.name"),
        (Secret, Secret(word="hidden"), "x.word"),  # type: ignore[arg-type]
        (Dropped, Dropped(a=1, b=2), "x.b"),
        (Annotated[int, msgspec.Meta(gt=3)], 3, "x"),
        (Any, [Level], "x[0]"),
        (Any, {"a": {"b": [1j]}}, "x.a.b[0]"),
        (Any, {(1, 2): 3}, "x[(1, 2)]"),
        (Any, {b"k": 3}, "x[b'k']"),
        (Any, [Decimal("1.5")], "x[0]"),
        (dict[float, int], {float("nan"): 1}, "x[nan]"),
        (msgspec.Raw | None, None, MISSING),
    ],
    ids=shown,
)  # fmt: skip
def test_what_would_not_come_back_is_refused_with_its_path(declared: Any, value: Any, path: Any) -> None:
    if path is MISSING:
        with pytest.raises(TaskDefinitionError):
            codec(declared)
        return
    with pytest.raises(PayloadError) as caught:
        codec(declared).encode((value,), {})
    assert not isinstance(caught.value, PayloadMisfit)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: ")


def test_a_field_that_is_not_compared_is_kept() -> None:
    value = Half(1)
    value.hidden = 5
    one = codec(Half)
    assert one.decode(one.encode((value,), {}))["x"].hidden == 5


class NamesTheMissing(msgspec.Struct):
    x: Missing


class Foreign(msgspec.Struct):
    inside: list[psycopg.Connection]


class Mixed(enum.Enum):
    A = "a"
    B = 2


@pytest.mark.parametrize(
    "declared",
    [
        psycopg.Connection,
        psycopg.Connection | None,
        list[psycopg.Connection],
        dict[str, tuple[int, psycopg.Connection]],
        Foreign,
        WithInitVar,
        Mixed,
        NamesTheMissing,
        complex,
        range,
        Callable[[int], int],
        type,
        Iterable[int],
        collections.OrderedDict[str, int],
        dict[tuple[int, int], str],
        dict[bool, str],
        dict[int | None, str],
        list[int] | set[int],
        datetime | str,
        Order | Item,
        msgspec.Raw,
        "list[",
        "datetime.nothing",
        "Missing",
    ],
    ids=shown,
)
def test_types_that_can_never_be_read_are_refused_when_the_task_is_declared(declared: Any) -> None:
    def body(x: Any) -> None: ...

    def returns() -> Any: ...

    body.__annotations__ = {"x": declared}
    returns.__annotations__ = {"return": declared}
    with pytest.raises(TaskDefinitionError, match="task body: (the parameter x|an annotation)"):
        TaskCodec(body)
    with pytest.raises(TaskDefinitionError, match="task returns: (the result|an annotation)"):
        TaskCodec(returns)


def test_names_for_type_checkers_only_are_named() -> None:
    def body(x: Missing) -> None: ...

    with pytest.raises(TaskDefinitionError, match="'Missing'.*TYPE_CHECKING"):
        TaskCodec(body)
    with pytest.raises(TaskDefinitionError, match="'Missing'.*TYPE_CHECKING"):
        codec(NamesTheMissing)


# Signatures -----------------------------------------------------------------------------------------------------------


def test_further_keywords_have_their_declared_type() -> None:
    def whole(a: int, **rest: int) -> None: ...

    def points(ctx: JobContext, **rest: Item) -> None: ...

    def options(a: int, **rest: typing.Unpack[Address]) -> None: ...

    one = TaskCodec(whole)
    assert one.decode(one.encode((1,), {"b": 2})) == {"a": 1, "b": 2}
    for wrong in ("2", True, 2.0):
        with pytest.raises(PayloadError) as caught:
            one.encode((1,), {"b": wrong})
        assert caught.value.path.startswith("b")
    two = TaskCodec(points)
    assert two.decode(two.encode((), {"b": Item(sku="a")})) == {"b": Item(sku="a")}
    with pytest.raises(PayloadError) as caught:
        two.encode((), {"ctx": Item(sku="a")})
    assert caught.value.path == "ctx"
    with pytest.raises(PayloadMisfit, match="ctx"):
        two.decode('{"ctx": {"sku": "a"}}')
    three = TaskCodec(options)
    assert three.decode(three.encode((1,), {"city": "Ulm"})) == {"a": 1, "city": "Ulm"}
    for given in ({}, {"city": "Ulm", "street": "A"}, {"city": 1}):
        with pytest.raises(PayloadError):
            three.encode((1,), given)
    with pytest.raises(PayloadMisfit, match="street"):
        three.decode('{"a": 1, "city": "Ulm", "street": "A"}')


def test_parameters_may_have_any_name() -> None:
    def odd(_bound: int, _MISSING: int = 1, *, s: int = 2, kwargs: int = 3, UNSET: int = 4, é: int = 5) -> None: ...

    one = TaskCodec(odd)
    assert one.decode(one.encode((1,), {})) == {"_bound": 1}
    assert one.decode(one.encode((1, 2), {"s": 3, "kwargs": 4, "UNSET": 5, "é": 6})) == {
        "_bound": 1, "_MISSING": 2, "s": 3, "kwargs": 4, "UNSET": 5, "é": 6,
    }  # fmt: skip


def test_the_type_statement_may_be_used() -> None:
    names: dict[str, Any] = {}
    if sys.version_info < (3, 12):
        return  # its syntax is newer
    exec(
        "type Pairs = list[tuple[int, str]]\nclass Own[T]:\n    pass\ndef body[T](x: Pairs, y: T) -> Pairs: ...", names
    )
    one = TaskCodec(names["body"])
    assert one.decode(one.encode(([(1, "a")], "y"), {})) == {"x": [(1, "a")], "y": "y"}
    exec("type Json = dict[str, Json] | list[Json] | str | int\ndef tree(x: Json) -> None: ...", names)
    try:
        one = TaskCodec(names["tree"])
    except TaskDefinitionError:
        return
    assert one.decode(one.encode(({"a": [1, "b"]},), {})) == {"x": {"a": [1, "b"]}}


# Depth and size -------------------------------------------------------------------------------------------------------


def nested(levels: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind == "list" else {"k": value}
    return value


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_nesting_has_a_limit_that_the_error_names(conn: psycopg.Connection, kind: str) -> None:
    one = codec(Any)
    deepest = nested(MAX_DEPTH, kind)
    assert one.decode(through_jsonb(conn, [one.encode((deepest,), {})])[0]) == {"x": deepest}
    for levels in (MAX_DEPTH + 1, 900, 100_000):
        value = nested(levels, kind)
        with pytest.raises(PayloadError, match=f"{MAX_DEPTH}") as caught:
            one.encode((value,), {})
        assert caught.value.path == "x"
        with pytest.raises(ResultNotStorable, match=f"{MAX_DEPTH}"):
            one.encode_result(value)
        while isinstance(value, (list, dict)):  # freed level by level: Python's own stack has limits, too
            value = value.pop() if isinstance(value, list) else value.pop("k")


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_deep_json_from_elsewhere_is_a_typed_error(kind: str) -> None:
    text = "[" * 90_000 + "]" * 90_000 if kind == "list" else '{"k":' * 90_000 + "1" + "}" * 90_000
    with pytest.raises(PayloadMisfit):
        codec(Any).decode(f'{{"x": {text}}}')
    with pytest.raises(PayloadError):
        codec(Any).decode_result(text)
    with pytest.raises(PayloadError, match="cannot be read"):
        decode_any(text)


def test_deep_values_of_declared_types_have_the_same_limit() -> None:
    one = codec(Pair)
    value = Pair(0)
    for n in range(5_000):
        value = Pair(n, value)
    with pytest.raises(PayloadError, match=f"{MAX_DEPTH}"):
        one.encode((value,), {})


# Results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("declared", "value", "said"),
    [
        (int, "1", "Expected `int`, got `str`.*annotated int"),
        (None, 1, "result: "),
        (dict[str, int], {"a": 1, "b": None}, r"result\.b: "),
        (list[Item], [Item(sku="a"), Item(sku="\0")], r"result\[1\]\.sku: .*NUL"),
        (tuple[int, int], [1, 2], "list would not come back equal"),
        (Louder, Louder(name="a"), r"result\.name"),
        (datetime, datetime(2024, 1, 1), "time zone"),
        (Any, {1: 2}, r"result\[1\]: the key 1 is int"),
        (Any, "x" * (8 * 1024 * 1024), r"8388610 bytes as JSON, the limit is 8388608"),
    ],
    ids=shown,
)
def test_results_that_would_not_come_back_say_why_and_that_the_body_has_run(
    declared: Any, value: Any, said: str
) -> None:
    with pytest.raises(ResultNotStorable, match=said) as caught:
        codec(Any, declared).encode_result(value)
    assert "The body has run, and is not run again" in str(caught.value)


def test_without_an_annotation_results_are_kept_as_plain_json() -> None:
    for one in (codec(int), codec(int, Any), codec(int, object)):
        assert one.decode_result(one.encode_result((Item(sku="a"), {Level.LOW}))) == [
            {"sku": "a", "count": 1, "tags": []}, [1],
        ]  # fmt: skip
    for declared in (typing.NoReturn, typing.Never):
        assert codec(int, declared).encode_result(None) == "null"


# Limits where SQL enqueues -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "fits", "too_much", "said"),
    [
        ("tags", ["t" * 256] * 64, ["t"] * 65, "tags, how many: 65, the limit is 64"),
        ("tags", ["é" * 256], ["é" * 257], "characters of the longest: 257, the limit is 256"),
        ("meta", '{"m": "small"}', '{"m": "' + "x" * 131_072 + '"}', "meta, bytes: 131081, the limit is 131072"),
        ("meta", "null", "[1]", "meta is a JSON array, not an object"),
        ("meta", "{}", '"text"', "meta is a JSON string, not an object"),
        ("payload", '{"x": ' + "[" * 200 + "]" * 200 + "}", '{"x": ' + "[" * 201 + "]" * 201 + "}", "the limit is 200"),
        ("payload", "{}", '{"x": "' + "x" * 8_388_608 + '"}', "has 8388617 bytes, the limit is 8388608"),
    ],
    ids=shown,
)
def test_sql_callers_have_the_same_limits(dsn: str, column: str, fits: Any, too_much: Any, said: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as own:
        own.execute("insert into taskq.policies (id, format, spec, created_at) values ('p', 1, '{}', now())")
        cast = "text[]" if column == "tags" else "jsonb"
        ask = f"select taskq.enqueue('t', policy => 'p', {column} => %s::{cast})"
        own.execute(ask, [fits])
        with pytest.raises(psycopg.Error, match=said) as caught:
            own.execute(ask, [too_much])
        assert caught.value.sqlstate == "WF009"
        assert own.execute("select count(*) from taskq.jobs").fetchone() == (1,)


def test_meta_of_sql_callers_is_kept_with_its_nulls(dsn: str) -> None:
    meta = {"a": None, "b": [None, {"c": None}]}
    with psycopg.connect(dsn, autocommit=True) as own:
        own.execute("insert into taskq.policies (id, format, spec, created_at) values ('p', 1, '{}', now())")
        for given in (json.dumps(meta), "null", None):
            own.execute("select taskq.enqueue('t', policy => 'p', meta => %s::jsonb)", [given])
        assert own.execute("select meta from taskq.jobs order by id").fetchall() == [(meta,), (None,), (None,)]

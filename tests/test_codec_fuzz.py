"""Declared types and values at random, through the codec and a jsonb column: equal, or refused with a path."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import random
import typing
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import psycopg
import pydantic
import pytest
from codec_kit import canonical, codec, refusal, through_jsonb
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from servers import Server

from taskq.codec import TaskCodec
from taskq.errors import PayloadError, PayloadMisfit, ResultNotStorable, TaskDefinitionError

BATCH = 25
"""Pairs in one statement."""
bounded = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a failure shows its batch; making it smaller would take minutes
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def conn(pg_server: Server) -> Iterator[psycopg.Connection]:
    """Any database will do: what is tested is jsonb."""
    with psycopg.connect(pg_server.dsn(), autocommit=True) as connection:
        yield connection


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high \u00fc"


class Count(enum.IntEnum):
    ONE = 1
    MANY = 2**40


class Rights(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()
    RUN = enum.auto()


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(alias="petName")
    born: datetime | date | None = None
    tags: dict[int, list[Decimal]] = {}


TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
ZONES = st.sampled_from(
    [UTC, ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kathmandu"), timezone(timedelta(hours=-11, minutes=-1))]
)
INSTANTS = st.datetimes(min_value=datetime(1, 1, 3), max_value=datetime(9999, 12, 29), timezones=ZONES)
HOURS_THAT_REPEAT = st.builds(
    lambda minutes, fold: datetime(2024, 10, 27, 2, minutes, fold=fold, tzinfo=ZoneInfo("Europe/Berlin")),
    st.integers(0, 59),
    st.integers(0, 1),
)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
Node = tuple[Any, st.SearchStrategy[Any]]
SCALARS: list[Node] = [
    (int, st.integers() | st.integers(-(10**40), 10**40)),
    (str, TEXT),
    (bool, st.booleans()),
    (date, st.dates()),
    (datetime, INSTANTS),
    (timedelta, st.timedeltas()),
    (UUID, st.integers(0, 2**128 - 1).map(lambda n: UUID(int=n))),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (Level, st.sampled_from(Level)),
    (Count, st.sampled_from(Count)),
    (bytes, st.binary(max_size=9)),
    (Literal["a", 1, None], st.sampled_from(["a", 1, None])),
]
KEYS = [node for node in SCALARS if node[0] not in (bool, datetime, SCALARS[-1][0])]
KEYS.append((datetime, st.datetimes(timezones=st.just(UTC)) | HOURS_THAT_REPEAT))
OTHERS: list[Node] = [
    (float, FLOATS),
    (None, st.none()),
    (time, st.times() | st.times(timezones=st.just(UTC))),
    (datetime, HOURS_THAT_REPEAT),
    (Rights, st.integers(0, 7).map(Rights)),
    (bytearray, st.binary(max_size=9).map(bytearray)),
    (int | float, st.integers() | FLOATS),
    (int | str | bool | None, st.integers() | TEXT | st.booleans() | st.none()),
    (Pet, st.builds(Pet, petName=TEXT, born=st.none() | st.dates() | HOURS_THAT_REPEAT,
                    tags=st.dictionaries(st.integers(), st.lists(st.decimals(allow_nan=False, allow_infinity=False),
                                                                 max_size=2), max_size=2))),
]  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
numbers = itertools.count()


def composite(rand: random.Random, pool: list[Node]) -> Node:
    """A type made of others, such as a dataclass of lists, and its values."""
    (declared, values), (second, seconds) = rand.choice(pool), rand.choice(pool)
    key, keys = rand.choice(KEYS)
    element, elements = rand.choice(SCALARS)
    fields = {name: rand.choice(pool) for name in rand.sample(["a", "bb", "c_d", "\u00e9", "count", "x"], 3)}
    types = {name: node[0] for name, node in fields.items()}
    called = f"Made{next(numbers)}"
    made: Any
    match rand.randrange(12):
        case 0:
            return list[declared], st.lists(values, max_size=3)  # type: ignore[valid-type]
        case 1:
            return tuple[declared, ...], st.lists(values, max_size=3).map(tuple)  # type: ignore[valid-type]
        case 2:
            return tuple[declared, second], st.tuples(values, seconds)  # type: ignore[valid-type]
        case 3:
            return typing.Optional[declared], st.none() | values  # noqa: UP045
        case 4:
            return dict[key, declared], st.dictionaries(keys, values, max_size=3)  # type: ignore[valid-type]
        case 5:
            return set[element], st.sets(elements, max_size=3)  # type: ignore[valid-type]
        case 6:
            return frozenset[element], st.frozensets(elements, max_size=3)  # type: ignore[valid-type]
        case 7:
            made = dataclasses.make_dataclass(called, types.items(), frozen=True, kw_only=True, slots=True)
        case 8:
            made = msgspec.defstruct(called, list(types.items()), tag=True, rename="camel", kw_only=True)
        case 9:
            made = msgspec.defstruct(called, list(types.items()), array_like=True, kw_only=True)
        case 10:
            made = collections.namedtuple(called, types, rename=False)  # noqa: PYI024
            made.__annotations__ = types
        case _:
            made = TypedDict(called, types)  # type: ignore[misc, operator]
    return made, st.fixed_dictionaries({n: node[1] for n, node in fields.items()}).map(lambda given: made(**given))


def all_nodes() -> list[tuple[Any, st.SearchStrategy[Any], TaskCodec]]:
    """Types of up to four levels with the strategies of their values; those that no task may declare are left out."""
    rand = random.Random(1)
    pool = [*SCALARS, *OTHERS, (Any, JSON)]
    for _ in range(3):
        pool += [composite(rand, pool) for _ in range(40)]
    found = []
    for declared, values in pool:
        with suppress(TaskDefinitionError):
            found.append((declared, values, codec(declared, declared)))
    return found


NODES = all_nodes()
PAIRS = st.lists(
    st.integers(0, len(NODES) - 1).flatmap(lambda n: st.tuples(st.just(NODES[n][2]), NODES[n][1])),
    min_size=BATCH,
    max_size=BATCH,
)


def test_most_types_may_be_declared() -> None:
    assert len(NODES) > 100
    assert {type(declared).__name__ for declared, *_ in NODES} > {"type", "StructMeta", "GenericAlias"}


@bounded
@given(known=PAIRS)
def test_values_of_the_declared_type_come_back_equal(
    conn: psycopg.Connection, known: list[tuple[TaskCodec, Any]]
) -> None:
    texts = [one.encode((value,), {}) for one, value in known]
    results = [one.encode_result(value) for one, value in known]
    backs = through_jsonb(conn, texts)
    for (one, value), text, back in zip(known, texts, backs, strict=True):
        assert canonical(one.decode(back)["x"]) == canonical(value)
        assert canonical(one.decode(text)["x"]) == canonical(value)
    for (one, value), back in zip(known, through_jsonb(conn, results), strict=True):
        assert canonical(one.decode_result(back)) == canonical(value)


@bounded
@given(known=PAIRS, shift=st.integers(1, BATCH - 1))
def test_values_of_other_types_are_refused_or_come_back_equal(
    conn: psycopg.Connection, known: list[tuple[TaskCodec, Any]], shift: int
) -> None:
    accepted = []
    for n, (one, _) in enumerate(known):
        value = known[(n + shift) % BATCH][1]
        refused = refusal(
            lambda one=one, value=value: accepted.append((one, value, one.encode((value,), {}))), PayloadError
        )
        assert refused is None or refused.path.startswith("x")
    for (one, value, _), back in zip(accepted, through_jsonb(conn, [t for *_, t in accepted]), strict=True):
        got = one.decode(back)["x"]
        assert canonical(got, strict=False) == canonical(value, strict=False) or got == value


class Hostile:
    """Whatever is asked of it raises."""

    def __repr__(self) -> str:
        raise ValueError("no")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no")

    __hash__ = object.__hash__


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


ODD = st.one_of(
    st.sampled_from(
        [object(), len, int, ..., NotImplemented, 1j, range(3), Text("t"), Whole(3), Level.LOW, Count.ONE,
         UUID(int=1), Decimal("NaN"), Decimal("sNaN"), date(2024, 1, 1), datetime(2024, 1, 1), b"x", bytearray(b"y"),
         memoryview(b"z"), ValueError("v"), (n for n in ()), msgspec.UNSET, msgspec.Raw(b"{"), Pet(petName="x")]
    ),  # fmt: skip
    st.builds(Hostile),
    st.floats(),
    st.text(max_size=4),
    st.integers(),
    st.none(),
    st.booleans(),
)  # fmt: skip
HASHABLE = st.one_of(
    st.integers(), st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.tuples(st.integers()),
    st.sampled_from([b"k", Level.LOW, Count.ONE, UUID(int=1), Text("k"), Whole(1), int, Decimal("1")]),
    st.builds(Hostile),
)  # fmt: skip
OBJECTS = st.recursive(
    ODD,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(HASHABLE, inner, max_size=3),
        st.tuples(inner, inner),
        st.sets(HASHABLE, max_size=3),
    ),
    max_leaves=8,
)


@bounded
@given(values=st.lists(OBJECTS, min_size=BATCH * 2, max_size=BATCH * 2))
def test_any_python_object_is_refused_or_comes_back_equal_from_any(conn: psycopg.Connection, values: list[Any]) -> None:
    one = codec(Any, Any)
    typed = codec(dict[str, Any], dict[int, Any])
    accepted = []
    for value in values:
        refused = refusal(lambda value=value: accepted.append((value, one.encode((value,), {}))), PayloadError)
        assert refused is None or (refused.path.startswith("x") and refused.path in str(refused))
        refused = refusal(lambda value=value: typed.encode((value,), {}), PayloadError)
        assert refused is None or refused.path.startswith("x")
        for other in (one, typed):
            refused = refusal(lambda value=value, other=other: other.encode_result(value), ResultNotStorable)
            assert refused is None or "result" in str(refused)
    for (value, _), back in zip(accepted, through_jsonb(conn, [t for _, t in accepted]), strict=True):
        assert one.decode(back)["x"] == value


NUMBERS = st.sampled_from(["1e400", "-1e400", "1e100000", "1e-16000", "1E5", "0.0", "-0.0", "1" * 5000])
LOOSE_JSON = st.recursive(
    JSON.map(lambda v: msgspec.json.encode(v).decode()) | NUMBERS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: f"[{','.join(parts)}]")
        | st.dictionaries(TEXT, inner, max_size=3).map(
            lambda d: "{" + ",".join(f"{msgspec.json.encode(k).decode()}:{v}" for k, v in d.items()) + "}"
        )
    ),
    max_leaves=6,
)


@bounded
@given(
    pairs=st.lists(st.tuples(st.sampled_from(NODES), LOOSE_JSON), min_size=BATCH, max_size=BATCH),
    noise=st.binary(max_size=30),
)
def test_json_put_in_by_sql_is_decoded_or_a_typed_error(
    conn: psycopg.Connection, pairs: list[tuple[Any, str]], noise: bytes
) -> None:
    texts = through_jsonb(conn, [t for _, text in pairs for t in (f'{{"x": {text}}}', text)])
    for n, ((_, _, one), _) in enumerate(pairs):
        for payload in (texts[2 * n], texts[2 * n + 1], noise):
            decoded: list[Any] = []
            refused = refusal(lambda one=one, p=payload, to=decoded: to.append(one.decode(p)), PayloadMisfit)
            assert decoded[0].keys() == {"x"} if refused is None else "parameters of body" in str(refused)
            refused = refusal(lambda one=one, p=payload: one.decode_result(p), PayloadError)
            assert refused is None or "body returns" in str(refused)

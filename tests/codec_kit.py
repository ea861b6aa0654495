"""Kit for tests of the codec: one-parameter tasks, jsonb round trips in bulk, and an oracle of equality."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import psycopg

from taskq.codec import TaskCodec

MISSING = object()


def codec(declared: Any, returns: Any = MISSING) -> TaskCodec:
    """The codec of ``def body(x: declared) -> returns``."""

    def body(x: Any) -> None: ...

    body.__annotations__ = {"x": declared} | ({} if returns is MISSING else {"return": returns})
    return TaskCodec(body)


def refusal(call: Callable[[], Any], kind: type[BaseException]) -> BaseException | None:
    """The error of that kind that a call raises, if it does."""
    try:
        call()
    except kind as exc:
        return exc
    return None


def shown(value: object) -> str:
    """The id of a parameter, the same in every process: sessions that share the tests must have them in common."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:40]


def through_jsonb(conn: psycopg.Connection, texts: Sequence[str]) -> list[str]:
    """JSON texts as a jsonb column gives them back, in one statement."""
    conn.execute("create temp table if not exists payloads (n int, payload jsonb)")
    conn.execute("truncate payloads")
    conn.execute(
        "insert into payloads select n, t::jsonb from unnest(%s::text[]) with ordinality as o(t, n)", [list(texts)]
    )
    return [row[0] for row in conn.execute("select payload::text from payloads order by n")]


def canonical(value: Any, *, strict: bool = True) -> Any:
    """A form of a value that is equal exactly for values that a task may take for the same.

    Strict tells types apart; otherwise only what Python itself calls unequal is.
    """

    def inner(v: Any) -> Any:
        return canonical(v, strict=strict)

    kind = type(value)
    if isinstance(value, datetime):
        try:
            return ("datetime", value.utcoffset() is None, value.astimezone(UTC).isoformat() if value.tzinfo else value)
        except OverflowError:
            return ("datetime", False, value.isoformat())
    if isinstance(value, enum.Enum) and strict:
        return (kind, value.name)
    if dataclasses.is_dataclass(value):
        return (kind, [(f.name, inner(getattr(value, f.name))) for f in dataclasses.fields(value)])
    if isinstance(value, msgspec.Struct):
        return (kind, [(n, inner(getattr(value, n))) for n in value.__struct_fields__])
    if hasattr(kind, "model_dump"):
        return (kind, inner(dict(vars(value))))
    if isinstance(value, dict):
        pairs = {repr(inner(k)): inner(v) for k, v in value.items()}
        return ("dict", len(value), sorted(pairs.items(), key=lambda pair: pair[0]))
    if isinstance(value, (list, tuple)):
        return (kind if strict or isinstance(value, list) else "tuple", [inner(v) for v in value])
    if isinstance(value, (set, frozenset)):
        return ("set", kind if strict else "", sorted(repr(inner(v)) for v in value))
    if isinstance(value, Decimal) and strict:
        return ("Decimal", str(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return (kind, value) if strict else value
    return (kind if strict else "number", 0 if value == 0 else value)

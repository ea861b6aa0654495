"""Whether a value came back: the same value of the same type, looked at field by field.

Used by ``codec`` alone, on what a caller gave and what its JSON was decoded into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import Any, Final

import msgspec

from taskq.codec_values import join
from taskq.errors import PayloadError

__all__ = ["difference", "instant"]

_BYTES: Final = (bytes, bytearray, memoryview)
_NUMBERS: Final = (int, float, Decimal)


def difference(given: Any, back: Any, path: str) -> str | None:
    """Where a value that came back differs from the one that was given; None where it is equal.

    Equal is what Python calls equal, with these differences: True and 1 differ; datetimes are equal if they name the
    same instant, whatever their zones; two Decimals must have the same digits; objects are equal if their fields are,
    whether or not their class defines ``==``. An instance of a subclass equals one of its builtin base class, an int
    the float or Decimal of the same number. A float equals no Decimal, not even where the number is the same: whether
    it is depends on the value, so what works in a test would fail with another.

    Raises:
        PayloadError: A float was given where a Decimal is declared.
    """
    kind, came = type(given), type(back)
    if came is dict:
        return _of_dicts(given, back, path) if isinstance(given, Mapping) else path
    if came is list or (came is tuple and isinstance(given, tuple)) or _is_named_tuple(came):
        if not isinstance(given, came) or len(given) != len(back):
            return path
        return _of_pairs(((a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(given, back, strict=True))), path)
    if came is set or came is frozenset:
        if not isinstance(given, came) or len(given) != len(back):
            return path
        return _of_sets(given, back, path)
    if isinstance(back, msgspec.Struct) or hasattr(came, "__dataclass_fields__") or hasattr(came, "__attrs_attrs__"):
        if kind is not came:
            return path
        names = _field_names(came)
        fields = ((getattr(given, n, _MISSING), getattr(back, n, _MISSING), f"{path}.{n}") for n in names)
        return _of_pairs(fields, path)
    if hasattr(came, "model_validate_json"):
        return _of_models(given, back, path)
    _refuse_float(given, back, path)
    return None if _same(given, back) else path


_MISSING: Final = object()


def instant(value: datetime) -> datetime:
    """The instant of an aware datetime, in UTC where UTC has it: near the years 1 and 9999 it may not."""
    try:
        return value.astimezone(UTC)
    except OverflowError:
        return value


def _of_sets(given: Any, back: Any, path: str) -> str | None:
    mine = {_settled(v): v for v in given}
    theirs = {_settled(v): v for v in back}
    alone = [v for k, v in theirs.items() if k not in mine]
    # Those without a counterpart in any order: they differ, and the look is for what has a message of its own.
    pairs = [(v, theirs[k] if k in theirs else alone.pop(), path) for k, v in mine.items() if k in theirs or alone]
    found = _of_pairs(pairs, path)
    return path if found or mine.keys() != theirs.keys() else None


def _of_dicts(given: Any, back: dict[Any, Any], path: str) -> str | None:
    mine = {_settled(k): (k, v) for k, v in given.items()}
    theirs = {_settled(k): (k, v) for k, v in back.items()}
    for k, (key, _) in mine.items():
        _refuse_float(key, theirs[k][0] if k in theirs else next(iter(theirs), None), join(path, key))
        if k not in theirs or not _same(key, theirs[k][0]):
            return join(path, key)
    if len(mine) != len(theirs):
        return path
    return _of_pairs(((v, theirs[k][1], join(path, key)) for k, (key, v) in mine.items()), path)


def _of_models(given: Any, back: Any, path: str) -> str | None:
    """Pydantic models, whose own equality is right but for datetimes in a repeated hour."""
    if type(given) is not type(back):
        return path
    if _equal(given, back):
        return None
    mine, theirs = vars(given), vars(back)
    if mine.keys() != theirs.keys():
        return path
    if found := _of_pairs(((mine[n], theirs[n], f"{path}.{n}") for n in mine), path):
        return found
    hidden = ("__pydantic_extra__", "__pydantic_private__")
    rest_is_equal = all(_equal(getattr(given, n, None), getattr(back, n, None)) for n in hidden)
    return None if rest_is_equal else path


def _of_pairs(pairs: Iterable[tuple[Any, Any, str]], path: str) -> str | None:
    for a, b, p in pairs:
        if a is not b and (found := difference(a, b, p)):
            return found
    return None


def _refuse_float(given: Any, back: Any, path: str) -> None:
    if isinstance(given, float) and isinstance(back, Decimal):
        said = float.__repr__(given)
        raise PayloadError(
            f"{path}: {said} is a float where Decimal is declared, and a float holds few decimal fractions exactly; "
            f"pass a Decimal made from text, such as Decimal('{said}')",
            path=path,
        )


def _same(given: Any, back: Any) -> bool:
    if isinstance(given, bool) is not isinstance(back, bool):
        return False
    if isinstance(given, datetime) and isinstance(back, datetime):
        if (given.utcoffset() is None) is not (back.utcoffset() is None):
            return False
        return _equal(given, back) or _equal(instant(given), instant(back))
    if isinstance(given, time) and isinstance(back, time):
        same_zone = (given.tzinfo is None) is (back.tzinfo is None)
        return same_zone and _equal(given, back)
    if isinstance(given, Decimal) and isinstance(back, Decimal):
        return given.as_tuple() == back.as_tuple()
    if not isinstance(given, type(back)) and not any(
        isinstance(given, kinds) and isinstance(back, kinds) for kinds in (_NUMBERS, _BYTES)
    ):
        return False
    return _equal(given, back)


def _equal(given: Any, back: Any) -> bool:
    try:
        return bool(given == back)
    except RecursionError:
        raise
    except Exception:
        return False


def _settled(value: Any) -> Any:
    return instant(value) if isinstance(value, datetime) and value.utcoffset() is not None else value


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _field_names(kind: Any) -> list[str]:
    if dataclasses.is_dataclass(kind):
        return [f.name for f in dataclasses.fields(kind)]
    if hasattr(kind, "__struct_fields__"):
        return list(kind.__struct_fields__)
    return [a.name for a in kind.__attrs_attrs__]

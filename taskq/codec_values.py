"""Single values on their way to JSON: taking typed values apart, and refusing what cannot be stored.

Used by ``codec`` alone.
"""

from __future__ import annotations

import dataclasses
import math
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import msgspec

from taskq.errors import PayloadError

__all__ = ["MAX_DEPTH", "check", "join", "plain"]

MAX_DEPTH: Final = 200
"""The most arrays and objects inside one another that an argument or a result may have."""

_KEPT: Final = (bytes, bytearray, datetime, date, time, timedelta, Decimal, UUID)
_WHOLE_MINUTE: Final = timedelta(minutes=1)


def plain(value: Any, path: str, *, text_keys: bool) -> Any:
    """Take dataclasses, structs, models, enums and sets apart; what ``check`` must see is left as it is.

    Args:
        value: The value.
        path: What to call it in complaints.
        text_keys: Whether keys that are not text are written as text, for a declared type that reads them back.

    Raises:
        PayloadError: Something in it cannot be taken apart.
    """
    try:
        try:
            # Sets in one order, whatever their hashes: equal values have one text.
            return msgspec.to_builtins(
                value, builtin_types=_KEPT, str_keys=text_keys, order="deterministic", enc_hook=_unknown_to_plain
            )
        except TypeError:
            steady = _in_order(value)
            return msgspec.to_builtins(steady, builtin_types=_KEPT, str_keys=text_keys, enc_hook=_unknown_to_plain)
    except RecursionError:
        raise
    except TypeError as exc:
        found = _first_unknown(value, path, 0)
        raise PayloadError(
            f"{found}: {exc}; pass JSON values, or an annotated dataclass, struct or pydantic model", path=found
        ) from None
    except Exception as exc:
        found = _first_unknown(value, path, 0)
        raise PayloadError(f"{found}: it cannot be written as JSON: {exc}", path=found) from exc


def check(value: Any, path: str, depth: int = 0) -> Any:
    """Refuse what JSON or PostgreSQL cannot hold; give the value in the form in which jsonb gives it back.

    Raises:
        PayloadError: It cannot be held; ``path`` of the error says where.
    """
    kind = type(value)
    if kind is str:
        _check_text(value, path)
        return value
    if kind is dict:
        _check_depth(depth, path)
        for key in value:
            _check_key(key, path)
        # In jsonb's order, which is that in which they are decoded.
        return {key: check(value[key], join(path, key), depth + 1) for key in sorted(value, key=_jsonb_order)}
    if kind is list or kind is tuple:
        _check_depth(depth, path)
        return [check(inner, f"{path}[{i}]", depth + 1) for i, inner in enumerate(value)]
    if kind is int:
        return _check_int(value, path)
    if isinstance(value, float):
        return _check_float(value, path)
    if isinstance(value, datetime):
        return _check_datetime(value, path)
    if isinstance(value, Decimal) and not value.is_finite():
        raise PayloadError(f"{path}: Decimal('{value}') is not a number that can be stored", path=path)
    return value


def join(path: str, key: object) -> str:
    """The path of what stands under a key."""
    if type(key) is str:
        return f"{path}.{key}" if key.isidentifier() else f"{path}[{_shown(key)}]"
    return f"{path}[{_shown(key)}]"


def _in_order(value: Any) -> Any:
    """Sets whose elements cannot be compared as lists in the order of their JSON texts."""
    if isinstance(value, (set, frozenset)):
        made = [_in_order(each) for each in value]
        return sorted(made, key=lambda each: msgspec.json.encode(each, enc_hook=_unknown_to_plain))
    if isinstance(value, (list, tuple)):
        return [_in_order(each) for each in value]
    return {key: _in_order(each) for key, each in value.items()} if isinstance(value, dict) else value


def _unknown_to_plain(value: Any) -> Any:
    """Msgspec's hook: pydantic models, and subclasses of scalars as what they are a kind of."""
    if hasattr(type(value), "model_validate_json"):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _jsonb_order(key: str) -> tuple[int, bytes]:
    data = key.encode()
    return len(data), data


def _check_depth(depth: int, path: str) -> None:
    if depth >= MAX_DEPTH:
        # The path itself would be as deep.
        top = path.partition(".")[0].partition("[")[0]
        raise PayloadError(
            f"{top}: more than {MAX_DEPTH} lists and objects are nested in one another, the limit is {MAX_DEPTH}, "
            "or it contains itself; pass a flatter form, such as a list with references",
            path=top,
        )


def _check_key(key: Any, path: str) -> None:
    where = join(path, key)
    if type(key) is not str:
        raise PayloadError(
            f"{where}: the key {_shown(key)} is {type(key).__name__}, and JSON has text keys only; annotate the "
            "mapping, such as dict[int, str], convert the keys, or pass a list of pairs",
            path=where,
        )
    _check_text(key, where)


def _check_text(value: str, path: str) -> None:
    if "\0" in value:
        raise PayloadError(f"{path}: it contains the character NUL, which PostgreSQL cannot hold; remove it", path=path)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise PayloadError(
                f"{path}: it contains a lone surrogate at {exc.start}, which is no character; decode the text anew",
                path=path,
            ) from None


def _check_float(value: float, path: str) -> Any:
    if not math.isfinite(value):
        raise PayloadError(f"{path}: {float(value)!r} is not a number in JSON; pass None or text instead", path=path)
    if value == 0:
        return 0.0  # jsonb knows no negative zero
    if abs(value) < 1e15:
        return value
    # As 1e+16 it would come back from jsonb as 10000000000000000, an integer.
    return msgspec.Raw(f"{value:.1f}".encode())


def _check_int(value: int, path: str) -> int:
    if value.bit_length() > 12_000:  # beyond Python's own limit on reading integers
        raise PayloadError(f"{path}: an integer of {value.bit_length()} bits is too large; pass it as text", path=path)
    return value


def _check_datetime(value: datetime, path: str) -> datetime:
    offset = value.utcoffset()
    if offset is None:
        raise PayloadError(
            f"{path}: {value!r} has no time zone, so it names no instant; use datetime.now(UTC) or add a tzinfo",
            path=path,
        )
    if offset % _WHOLE_MINUTE:
        # ISO 8601 has no seconds in offsets; local mean times before zones have them.
        try:
            return value.astimezone(UTC)
        except OverflowError:
            raise PayloadError(f"{path}: {value!r} cannot be written in UTC; use another zone", path=path) from None
    return value


def _first_unknown(value: Any, path: str, depth: int) -> str:
    """The path of the first value, or key, that cannot be taken apart."""
    if isinstance(value, dict):
        for key in value:
            if isinstance(key, bool) or key is None or _is_unknown({key: None}):
                return join(path, key)
        inner = [(v, join(path, k)) for k, v in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = [(v, f"{path}[{i}]") for i, v in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(getattr(value, f.name, None), f"{path}.{f.name}") for f in dataclasses.fields(value)]
    elif isinstance(value, msgspec.Struct):
        inner = [(getattr(value, n, None), f"{path}.{n}") for n in value.__struct_fields__]
    else:
        return path
    if depth < MAX_DEPTH:
        for v, p in inner:
            if _is_unknown(v):
                return _first_unknown(v, p, depth + 1)
    return path


def _is_unknown(value: Any) -> bool:
    try:
        msgspec.to_builtins(value, builtin_types=_KEPT, str_keys=True, enc_hook=_unknown_to_plain)
    except Exception:
        return True
    return False


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # whatever a caller's own class does
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:79] + "…"

"""Single values on their way to JSON and back: taking typed values apart, refusing what cannot be stored, comparing.

Used by ``codec`` alone.
"""

from __future__ import annotations

import dataclasses
import json
import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from taskq.errors import PayloadError

__all__ = ["check", "difference", "from_plain", "plain"]

_KEPT = (bytes, bytearray, datetime, date, time, timedelta, Decimal, UUID)


def plain(value: Any, path: str) -> Any:
    """Take dataclasses, structs, models, enums and sets apart; what ``check`` must see is left as it is."""
    try:
        return msgspec.to_builtins(value, builtin_types=_KEPT, enc_hook=_model_to_plain)
    except TypeError as exc:
        found = _first_unknown(value, path)
        raise PayloadError(
            f"{found}: {exc}; pass JSON values, or an annotated dataclass, struct or pydantic model", path=found
        ) from None
    except RecursionError:
        raise
    except Exception as exc:
        raise PayloadError(f"{path}: it cannot be written as JSON: {exc}", path=path) from exc


def check(value: Any, path: str) -> Any:
    """Refuse what JSON or PostgreSQL cannot hold; give the value in a form that msgspec writes exactly."""
    kind = type(value)
    if kind is str:
        _check_text(value, path)
        return value
    if kind is dict:
        checked = {}
        for key, inner in value.items():
            if type(key) is not str:
                raise PayloadError(
                    f"{path}: the key {key!r} is {type(key).__name__}, and JSON has text keys only; "
                    "convert the keys, or pass a list of pairs",
                    path=path,
                )
            _check_text(key, f"{path} (a key)")
            checked[key] = check(inner, _join(path, key))
        return checked
    if kind is list or kind is tuple:
        return [check(inner, f"{path}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, float):
        return _check_float(value, path)
    if isinstance(value, datetime) and value.tzinfo is None:
        raise PayloadError(
            f"{path}: {value!r} has no time zone, so it names no instant; use datetime.now(UTC) or add a tzinfo",
            path=path,
        )
    if isinstance(value, Decimal) and not value.is_finite():
        raise PayloadError(f"{path}: Decimal('{value}') is not a number that can be stored", path=path)
    if kind is int:
        return _check_int(value, path)
    return value


def from_plain(kind: type, value: Any) -> Any:
    """Msgspec's hook for types that it does not know: pydantic models, validated as JSON."""
    if hasattr(kind, "model_validate_json"):
        return kind.model_validate_json(json.dumps(value))
    raise TypeError(f"values of type {kind.__qualname__} cannot be made from JSON")


def difference(given: Any, back: Any, path: str) -> str | None:
    """Where a value that came back differs from the one that was given; None where it is equal."""
    try:
        if given == back and (type(given) is type(back) or not isinstance(given, (bool, datetime))):
            return None
    except Exception:
        return path
    if type(given) is dict and type(back) is dict and given.keys() == back.keys():
        pairs = [(given[k], back[k], _join(path, k)) for k in given]
    elif isinstance(given, (list, tuple)) and type(given) is type(back) and len(given) == len(back):
        pairs = [(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(given, back, strict=True))]
    elif dataclasses.is_dataclass(given) and type(given) is type(back):
        pairs = [(getattr(given, f.name), getattr(back, f.name), f"{path}.{f.name}") for f in dataclasses.fields(given)]
    else:
        return path
    return next((found for a, b, p in pairs if (found := difference(a, b, p))), path)


def _model_to_plain(value: Any) -> Any:
    if hasattr(value, "model_dump") and hasattr(type(value), "model_validate_json"):
        return value.model_dump(mode="json")
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


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
    if abs(value) < 1e15:
        return value
    # As 1e+16 it would come back from jsonb as 10000000000000000, an integer.
    return msgspec.Raw(f"{value:.1f}".encode())


def _check_int(value: int, path: str) -> int:
    if value.bit_length() > 12_000:  # beyond Python's own limit on reading integers
        raise PayloadError(f"{path}: an integer of {value.bit_length()} bits is too large; pass it as text", path=path)
    return value


def _first_unknown(value: Any, path: str) -> str:
    """The path of the first value that cannot be taken apart."""
    if isinstance(value, dict):
        inner = [(v, _join(path, k)) for k, v in value.items()]
    elif isinstance(value, (list, tuple)):
        inner = [(v, f"{path}[{i}]") for i, v in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [(getattr(value, f.name), f"{path}.{f.name}") for f in dataclasses.fields(value)]
    else:
        return path
    for v, p in inner:
        try:
            msgspec.to_builtins(v, builtin_types=_KEPT, enc_hook=_model_to_plain)
        except Exception:
            return _first_unknown(v, p)
    return path


def _join(path: str, key: object) -> str:
    text = str(key)
    return f"{path}.{text}" if text.isidentifier() else f"{path}[{text!r}]"

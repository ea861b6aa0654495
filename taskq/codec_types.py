"""Declared types: which can be read from JSON, and what reads them.

Msgspec reads most. Pydantic reads its own models, and unions of them, which msgspec cannot tell apart. Used by
``codec`` alone.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Final

import msgspec
import msgspec.inspect as mi

from taskq.errors import TaskDefinitionError

__all__ = ["decoder", "exact_types", "readable", "type_name"]

_SCALARS: Final[tuple[type, ...]] = (int, str, bool, float, NoneType)
_ANY: Final[frozenset[type]] = frozenset(_SCALARS)
_NO_KEYS: Final = (
    mi.BoolType,
    mi.NoneType,
    mi.ListType,
    mi.SetType,
    mi.FrozenSetType,
    mi.TupleType,
    mi.VarTupleType,
    mi.NamedTupleType,
    mi.DictType,
    mi.DataclassType,
    mi.StructType,
    mi.TypedDictType,
    mi.CustomType,
)


def readable(name: str, what: str, declared: Any, *, filled: bool = False) -> Any:
    """The type that is decoded for an annotation, mostly the annotation itself.

    Args:
        name: The task, for complaints.
        what: What is annotated, for complaints.
        declared: The annotation.
        filled: Whether a default fills it, so that no JSON ever need to.

    Raises:
        TaskDefinitionError: No value of it can ever come out of JSON.
    """
    if declared is object:
        return Any
    if declared is typing.Never or declared is typing.NoReturn:
        return None
    try:
        msgspec.json.Decoder(declared, dec_hook=_from_plain)
        foreign = _foreign(mi.type_info(declared), set())
    except RecursionError:
        raise TaskDefinitionError(
            f"task {name}: {what} is annotated {type_name(declared)}, which refers to itself in a way that cannot be "
            "followed; write the recursion with a dataclass, or annotate it Any"
        ) from None
    except NameError as exc:
        raise TaskDefinitionError(
            f"task {name}: {what} is annotated {type_name(declared)}, whose fields name {exc.name!r}, which cannot be "
            "found at run time; import it outside of 'if TYPE_CHECKING', and define it before the task"
        ) from exc
    except Exception as exc:
        if _has_model(declared):
            return _adapted(name, what, declared)
        said = str(exc).partition(" - type ")[0]
        raise TaskDefinitionError(
            f"task {name}: {what} is annotated {type_name(declared)}, which JSON cannot hold or tell apart: {said}"
        ) from exc
    if foreign and not filled:
        which = "which" if foreign == type_name(declared) else f"and {foreign}"
        raise TaskDefinitionError(
            f"task {name}: {what} is annotated {type_name(declared)}, {which} cannot be made from JSON, so "
            "it could never be read back; pass what is stored, such as an id, and make the object in the body "
            "(annotate it Any if it takes JSON of any kind, or give it a default)"
        )
    return declared


def decoder(declared: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a type that is ``readable``."""
    return msgspec.json.Decoder(declared, dec_hook=_from_plain)


def exact_types(declared: Any) -> frozenset[type] | None:
    """The types of values that need no look at their inside, if there are any for this annotation."""
    if declared is Any:
        return _ANY
    is_union = typing.get_origin(declared) in (typing.Union, UnionType)
    members = typing.get_args(declared) if is_union else (NoneType if declared is None else declared,)
    found = frozenset(kind for kind in _SCALARS if kind in members)
    return found if len(found) == len(members) else None


def type_name(declared: Any) -> str:
    """An annotation, as a reader would write it."""
    return declared.__name__ if isinstance(declared, type) and not typing.get_args(declared) else str(declared)


def _from_plain(kind: Any, value: Any) -> Any:
    """Msgspec's hook for types that it does not know: pydantic models, validated as JSON."""
    if isinstance(kind, _Adapted):
        return kind.adapter.validate_json(msgspec.json.encode(value))
    if hasattr(kind, "model_validate_json"):
        return kind.model_validate_json(msgspec.json.encode(value))
    raise TypeError(f"values of type {type_name(kind)} cannot be made from JSON")


class _Adapted(type):
    """The type of stand-ins for annotations that pydantic reads; every value is an instance of them."""

    adapter: Any

    def __instancecheck__(cls, instance: object) -> bool:
        return True


def _adapted(name: str, what: str, declared: Any) -> Any:
    try:
        adapter = sys.modules["pydantic"].TypeAdapter(declared)
    except Exception as exc:
        raise TaskDefinitionError(
            f"task {name}: {what} is annotated {type_name(declared)}, which neither msgspec nor pydantic can read: "
            f"{exc}"
        ) from exc
    return _Adapted("Adapted", (), {"adapter": adapter})


def _has_model(declared: Any) -> bool:
    if "pydantic" not in sys.modules:
        return False
    return hasattr(declared, "model_validate_json") or any(_has_model(part) for part in typing.get_args(declared))


def _foreign(info: Any, seen: set[int]) -> str | None:
    """What of an annotation can never be decoded; None if all of it can."""
    if id(info) in seen:
        return None
    seen.add(id(info))
    if isinstance(info, mi.CustomType):
        known = info.cls is msgspec.UnsetType or hasattr(info.cls, "model_validate_json")
        return None if known else type_name(info.cls)
    if isinstance(info, (mi.RawType, mi.ExtType)):
        return "raw data"
    if isinstance(info, mi.DictType):
        keys = info.key_type.types if isinstance(info.key_type, mi.UnionType) else (info.key_type,)
        if any(isinstance(key, _NO_KEYS) for key in keys):
            return "a key that is neither text, number, instant, UUID nor Enum"
    parts: Iterable[Any] = ()
    if isinstance(info, msgspec.Struct):
        parts = [getattr(info, n) for n in info.__struct_fields__ if not n.startswith("default")]
    for part in parts:
        for inner in part if isinstance(part, tuple) else (part,):
            if isinstance(inner, (mi.Type, mi.Field)) and (found := _foreign(inner, seen)):
                return found
    return None

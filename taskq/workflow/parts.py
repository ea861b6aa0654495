"""Where a part of a value stands in its JSON, by the declared type of the value.

An attribute is not always stored under its own name: structs and models rename, named tuples are lists. And not every
attribute is stored: what is computed (properties, methods, an enum's name) can be had only from the value itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

__all__ = ["bare", "part_of", "stored_of"]


def bare(declared: Any) -> Any:
    """A type without what only annotates or names it: ``Annotated``, ``type X = ...``, ``NewType``."""
    if declared is None:
        return type(None)
    if typing.get_origin(declared) is typing.Annotated:
        return bare(typing.get_args(declared)[0])
    for names in ("__value__", "__supertype__"):
        if not isinstance(declared, type) and hasattr(declared, names):
            return bare(getattr(declared, names))
    return declared


def part_of(declared: Any, step: str | int, *, attribute: bool) -> tuple[str | int, Any] | None:
    """Under which key or at which place a part of a value is stored, and its declared type.

    Args:
        declared: The type of the value.
        step: The attribute, or the item, that is asked for.
        attribute: Which of both it is.

    Returns:
        None if nothing is stored under that name; the type is ``Any`` where it cannot be told.
    """
    declared = bare(declared)
    origin, args = typing.get_origin(declared), typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        return part_of(rest[0], step, attribute=attribute) if len(rest) == 1 else (step, Any)
    if origin is typing.Literal:
        return None
    kind = origin or declared
    if not isinstance(kind, type) or kind in (Any, object):
        return step, Any
    if attribute:
        return _attribute(kind, args, str(step))
    return _item(kind, args, step)


def stored_of(declared: Any) -> dict[str, tuple[bool, Any]] | None:
    """The keys of a dataclass, struct or TypedDict as it is stored: whether each must be there, and its type.

    Returns:
        None for other types, and for structs that are stored as lists or with a tag.
    """
    declared = bare(declared)
    kind, args = typing.get_origin(declared) or declared, typing.get_args(declared)
    if not isinstance(kind, type):
        return None
    if typing.is_typeddict(kind):
        hints = _hints(kind)
        needed: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
        # Where annotations are texts, a class does not see its own NotRequired.
        told = _hints(kind, extras=True)
        return {
            name: (name in needed and typing.get_origin(told[name]) is not typing.NotRequired, hints[name])
            for name in hints
        }
    if issubclass(kind, msgspec.Struct):
        if kind.__struct_config__.array_like or kind.__struct_config__.tag is not None:
            return None
        fields = [(each.encode_name, each.required, each.name) for each in msgspec.structs.fields(kind)]
    elif dataclasses.is_dataclass(kind):
        none = dataclasses.MISSING
        fields = [
            (each.name, each.default is none and each.default_factory is none, each.name)
            for each in dataclasses.fields(kind)
            if each.init
        ]
    else:
        return None
    hints = _hints(kind)
    return {key: (needed, _with(kind, args, hints.get(name, Any))) for key, needed, name in fields}


def _item(kind: type, args: tuple[Any, ...], step: str | int) -> tuple[str | int, Any] | None:
    if typing.is_typeddict(kind):
        hints = _hints(kind)
        return (step, hints[str(step)]) if step in hints else None
    if issubclass(kind, (str, bytes, bytearray)):
        return None
    if issubclass(kind, tuple):
        fields: Sequence[str] = getattr(kind, "_fields", ())
        if not isinstance(step, int):
            return None
        if fields:
            return (step, _hints(kind).get(fields[step], Any)) if step < len(fields) else None
        if not args:
            return step, Any
        if args[-1] is Ellipsis:
            return step, args[0]
        return (step, args[step]) if step < len(args) else None
    if issubclass(kind, Mapping):
        return step, args[1] if len(args) == 2 else Any
    if issubclass(kind, Sequence):
        return (step, args[0] if args else Any) if isinstance(step, int) else None
    return None


def _attribute(kind: type, args: tuple[Any, ...], name: str) -> tuple[str | int, Any] | None:
    if issubclass(kind, msgspec.Struct):
        names: tuple[str, ...] = kind.__struct_fields__
        if name not in names:
            return None
        place = names.index(name)
        stored = place if kind.__struct_config__.array_like else kind.__struct_encode_fields__[place]
        return stored, _with(kind, args, _hints(kind).get(name, Any))
    model: Mapping[str, Any] | None = getattr(kind, "model_fields", None)
    if model is not None:
        if name not in model:
            return None
        field = model[name]
        return field.serialization_alias or field.alias or name, field.annotation
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        fields: Sequence[str] = kind._fields
        return (fields.index(name), _hints(kind).get(name, Any)) if name in fields else None
    attrs: Sequence[Any] = getattr(kind, "__attrs_attrs__", ())
    if dataclasses.is_dataclass(kind) or attrs:
        known = [each.name for each in (dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else attrs)]
        return (name, _with(kind, args, _hints(kind).get(name, Any))) if name in known else None
    return None


def _hints(kind: type, *, extras: bool = False) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(kind, localns={kind.__name__: kind}, include_extras=extras)
    except Exception:
        # Names that stand only where the class was written; what is stored is known all the same.
        return dict.fromkeys(inspect.get_annotations(kind), Any)


def _with(kind: type, args: tuple[Any, ...], found: Any) -> Any:
    """The type of a generic's field, under the generic's arguments."""
    names = dict(zip(getattr(kind, "__parameters__", ()), args, strict=False))
    if isinstance(found, TypeVar):
        return names.get(found, Any)
    parameters = getattr(found, "__parameters__", ())
    return found[tuple(names.get(each, Any) for each in parameters)] if parameters else found

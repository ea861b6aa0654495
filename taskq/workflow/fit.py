"""Whether a declared type fits another, as far as annotations tell, and which values a type can have."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from taskq.workflow.parts import bare, stored_of

__all__ = ["arms_of", "fits", "item_of_list", "misfit", "shown", "stands_in", "takes_of"]

_PLAIN: Final = (str, int, float, bool, bytes, type(None), enum.Enum, date, time, timedelta, Decimal, UUID)
"""What is neither list nor object in JSON."""


def shown(declared: Any) -> str:
    """A type as people write it."""
    if declared is None or declared is type(None):
        return "None"
    if isinstance(declared, type) and not typing.get_args(declared):
        return declared.__qualname__
    return str(declared).replace("typing.", "")


def arms_of(declared: Any) -> list[Any] | None:
    """All values of a type that has few: bool, Literal, Enum, None and unions of them; None for any other."""
    declared = bare(declared)
    origin, args = typing.get_origin(declared), typing.get_args(declared)
    if origin is typing.Literal:
        return list(args)
    if declared is bool:
        return [True, False]
    if declared is type(None):
        return [None]
    if isinstance(declared, type) and issubclass(declared, enum.Enum) and not issubclass(declared, enum.Flag):
        return list(declared)
    if origin in (typing.Union, types.UnionType):
        found = [arms_of(arg) for arg in args]
        return None if any(each is None for each in found) else [value for each in found if each for value in each]
    return None


def item_of_list(declared: Any) -> Any | None:
    """The type of the items of a list, set or tuple of any length; None for any other type."""
    declared = bare(declared)
    origin, args = typing.get_origin(declared), typing.get_args(declared)
    if not isinstance(origin, type) or not issubclass(origin, (Sequence, AbstractSet)) or not args:
        return None
    return args[0] if origin is not tuple or args[-1] is Ellipsis else None


def stands_in(value: object, known: Iterable[object]) -> bool:
    """Whether a value is among others; True is not 1, since JSON's true is not."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known)


def fits(given: Any, takes: Any) -> bool:
    """Whether a value of one declared type may be handed to a parameter of another; True where it cannot be told."""
    given, takes = bare(given), bare(takes)
    if given is Any or takes is Any or isinstance(given, typing.TypeVar) or isinstance(takes, typing.TypeVar):
        return True
    try:
        if given == takes or takes is object:
            return True
    except Exception:
        return True
    if _is_union(given):
        return all(fits(each, takes) for each in typing.get_args(given))
    if _is_union(takes):
        return any(fits(given, each) for each in typing.get_args(takes))
    if typing.get_origin(takes) is typing.Literal:
        values = arms_of(given)
        allowed = [(type(value), value) for value in typing.get_args(takes)]
        return values is not None and all((type(value), value) in allowed for value in values)
    if typing.get_origin(given) is typing.Literal:
        return all(fits(type(value), takes) for value in typing.get_args(given))
    source, target = typing.get_origin(given) or given, typing.get_origin(takes) or takes
    if not isinstance(source, type) or not isinstance(target, type):
        return True
    if source is bool and target in (int, float):
        return False  # JSON's true is no number, and is not read as one
    if source is int and target is float:
        return True
    try:
        if not issubclass(source, target):
            return False
    except TypeError:
        return True
    mine, theirs = typing.get_args(given), typing.get_args(takes)
    alike = source is target or (source is not tuple and target.__module__ == "collections.abc")
    if alike and mine and theirs and len(mine) == len(theirs):
        return all(fits(a, b) for a, b in zip(mine, theirs, strict=True))
    return True


def misfit(declared: Any, value: Sequence[Any] | Mapping[str, Any]) -> str | None:
    """Why a list, tuple or dict with results in it can be no value of a declared type; None if it can be one."""
    said: str | None = None
    for each in _members(declared):
        said = _misfit(each, value)
        if said is None:
            return None
    return said


def _misfit(declared: Any, value: Sequence[Any] | Mapping[str, Any]) -> str | None:
    kind = typing.get_origin(declared) or declared
    is_dict = isinstance(value, Mapping)
    what = "a dict" if is_dict else "a list"
    if kind is typing.Literal:
        return what
    if not isinstance(kind, type):
        return None
    if issubclass(kind, (*_PLAIN, *((list, tuple, set, frozenset) if is_dict else (dict,)))):
        return what
    if not is_dict or (stored := stored_of(kind)) is None:
        return None
    if lacking := [name for name, (needed, _) in stored.items() if needed and name not in value]:
        return f"no {lacking[0]!r} in the dict"
    if unknown := [name for name in value if name not in stored]:
        return f"{unknown[0]!r} in the dict, which it does not have"
    return None


def takes_of(declared: Any, value: object) -> Callable[[Any], Any]:
    """What the places of a list, tuple or dict take that is handed to a declared type; ``Any`` where not to be told."""
    declared = bare(declared)
    if _is_union(declared):
        rest = [arg for arg in typing.get_args(declared) if arg is not type(None)]
        return takes_of(rest[0], value) if len(rest) == 1 else lambda place: Any
    origin, args = typing.get_origin(declared), typing.get_args(declared)
    if isinstance(value, dict):
        stored = stored_of(declared)
        if stored is not None:
            return lambda place: stored[place][1] if place in stored else Any
        return lambda place: args[1] if len(args) == 2 and issubclass(origin, Mapping) else Any
    if origin is tuple and args and args[-1] is not Ellipsis:
        return lambda place: args[place] if place < len(args) else Any
    return lambda place: (
        args[0] if args and isinstance(origin, type) and issubclass(origin, (Sequence, AbstractSet)) else Any
    )


def _members(declared: Any) -> Iterator[Any]:
    declared = bare(declared)
    if _is_union(declared):
        for each in typing.get_args(declared):
            yield from _members(each)
    else:
        yield declared


def _is_union(declared: Any) -> bool:
    return typing.get_origin(declared) in (typing.Union, types.UnionType)

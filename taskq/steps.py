"""Steps as text: the names that they may have, what one gave on its way to the record, and back as it was.

What an attempt gets of a step is what a later one will get: a value of the type that the function is annotated to
return, checked to come back equal before anything is sent; without an annotation, in JSON's own types.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
import typing
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final, Literal, NamedTuple

from taskq.codec import MAX_PAYLOAD_BYTES, decode_any, encode_any, read_back
from taskq.codec_signature import hints_of
from taskq.codec_types import decoder, readable, type_name
from taskq.errors import (
    InvalidPolicy,
    PayloadError,
    StepConflict,
    StepMisfit,
    StepNotStorable,
    StepRefused,
    TaskDefinitionError,
)
from taskq.policy import check_name as check_any_name

__all__ = [
    "Key",
    "Offer",
    "Record",
    "awaited_type",
    "check_effect_class",
    "check_name",
    "conflicting",
    "decode",
    "encode",
    "misfit",
    "returned_type",
]

_LIKE_GENERATION: Final = re.compile(r"g\d+(:|$)")


class Key(NamedTuple):
    """What names a step within one generation of its job."""

    kind: str
    name: str
    occurrence: int

    def __str__(self) -> str:
        return self.name if self.occurrence == 1 else f"{self.name} #{self.occurrence}"


class Record(NamedTuple):
    """What is recorded of a step, a sleep, a wait or a child.

    Attributes:
        text: JSON; None for a sleep, for a wait that has taken nothing, for a child that has not succeeded, and for a
            side-effecting step that has failed.
        done: Whether it is over; a sleep is once ``ends`` has passed. False for a side-effecting step that nobody has
            told of.
        ends: When a sleep ends, on the clock of ``time.monotonic``; None for anything else.
        error: What a child, or a side-effecting step, has failed with, as JSON; None for anything else.
        child: The id of a child.
    """

    text: str | None
    done: bool = True
    ends: float | None = None
    error: str | None = None
    child: str | None = None


class Offer(NamedTuple):
    """What there is for a wait.

    Attributes:
        answer: ``signal`` (one that it may take), ``waits``, ``timed_out`` or ``taken``, by this very wait.
        signal: Which signal that is.
        text: Its payload as JSON.
        remaining: Seconds until its time is up; None for no limit.
    """

    answer: Literal["signal", "waits", "timed_out", "taken"]
    signal: int | None = None
    text: str | None = None
    remaining: float | None = None


def check_name(what: str, name: object) -> str:
    """A name that a step may have.

    Raises:
        StepRefused: It is none, or could be taken for another step's in an idempotency key.
    """
    try:
        known = check_any_name(what, name)
    except InvalidPolicy as exc:
        raise StepRefused(str(exc)) from None
    if "#" in known or _LIKE_GENERATION.match(known):
        raise StepRefused(
            f"{what} is {known!r}: '#' and a beginning like 'g2:' stand for something else in idempotency keys; "
            "give it another name"
        )
    return known


def check_effect_class(name: str, effect_class: object) -> bool:
    """Whether a step has an effect that must not be repeated.

    Raises:
        StepRefused: There is no such class.
    """
    if effect_class not in ("pure", "idempotent", "side_effecting"):
        raise StepRefused(
            f"step {name}: effect_class is {effect_class!r}; a step is 'idempotent', 'pure' or 'side_effecting'"
        )
    return effect_class == "side_effecting"


def returned_type(name: str, fn: Callable[..., Any]) -> Any:
    """The type that a step's function is annotated to return; ``Any`` where it is not.

    Raises:
        StepRefused: ``fn`` is no function, its annotation cannot be evaluated, or JSON cannot hold such values.
    """
    while isinstance(fn, partial):
        fn = fn.func
    if not callable(fn):
        raise StepRefused(f"step {name}: {fn!r} is no function; give the function, and its arguments behind it")
    if not inspect.isroutine(fn):
        # A task of taskq is called as the function that it was made of.
        fn = getattr(fn, "fn", fn if isinstance(fn, type) else type(fn).__call__)
    declared = getattr(fn, "__annotations__", {}).get("return", Any)
    try:
        if declared is not Any and (not isinstance(declared, type) or typing.get_args(declared)):
            declared = hints_of(_only_result(fn), name, None)["return"]
        if typing.get_origin(declared) in (collections.abc.Awaitable, collections.abc.Coroutine):
            declared = typing.get_args(declared)[-1]
        if isinstance(declared, typing.TypeVar):
            return Any
        try:
            return _readable(declared)
        except TypeError:  # not hashable, such as Annotated with a list
            return _readable.__wrapped__(declared)
    except TaskDefinitionError as exc:
        raise StepRefused(f"step {name}: {str(exc).partition(': ')[2]}") from exc


def encode(name: str, declared: Any, value: Any) -> tuple[str, Any]:
    """The JSON text of what a step gave, and what a later attempt will be given for it.

    Raises:
        StepNotStorable: JSON or PostgreSQL cannot hold it, or it would not come back equal.
    """
    path = f"step {name}"
    try:
        text = encode_any(value, path, MAX_PAYLOAD_BYTES, text_keys=declared is not Any)
        return text, read_back(value, text, declared, path, _read(declared))
    except PayloadError as exc:
        raise StepNotStorable(
            f"{exc}. The function of the step has run, and what it gave cannot be recorded, so the job is not run again"
        ) from exc


def awaited_type(name: str, kind: Any) -> Any:
    """The type of what a body waits for.

    Raises:
        StepRefused: JSON cannot hold such values, or tell them apart.
    """
    try:
        try:
            return _readable(kind)
        except TypeError:
            return _readable.__wrapped__(kind)
    except TaskDefinitionError as exc:
        said = str(exc).partition("is annotated ")[2] or str(exc)
        raise StepRefused(f"signal {name}: the body waits for {said}") from exc


def misfit(declared: Any, text: str) -> str | None:
    """Why a payload does not fit a type; None if it does."""
    try:
        _read(declared)(text)
    except Exception as exc:
        return f"{type_name(declared)}: {exc}"
    return None


def decode(job: object, key: Key, declared: Any, record: Record, *, effect: bool = False) -> Any:
    """What a step gave, of the type that its function is annotated to return now; or what a wait has taken.

    ``effect`` says that the step is side-effecting, for which another name is no cure: it would be done again.

    Raises:
        StepMisfit: It does not fit.
    """
    try:
        return decode_any(record.text) if declared is Any or record.text is None else _read(declared)(record.text)
    except Exception as exc:
        raise StepMisfit(
            f"step {key} of job {job}: {exc}; what an earlier attempt recorded does not fit {type_name(declared)}, "
            "which the body asks for now. The function was not called. Run it with a version that reads the record"
            + (
                f", such as '-> {type_name(declared)} | TYPE' with the type of what was recorded, and do not rename "
                "the step: its effect has happened, and would be repeated under another name"
                if effect
                else ", or give the step another name, so that it is done anew"
            ),
            name=key.name,
            occurrence=key.occurrence,
        ) from exc


def conflicting(job: object, key: Key) -> StepConflict:
    """The error for a step whose record is another than what it gave."""
    return StepConflict(
        f"step {key} of job {job} is recorded with another value than its function gave just now: two calls have had "
        "one name and one place. The record stands, and the next attempt is given it; give steps that run beside each "
        "other names of their own",
        name=key.name,
        occurrence=key.occurrence,
    )


@lru_cache(maxsize=512)
def _readable(declared: Any) -> Any:
    return readable("", "what the step returns", declared)


@lru_cache(maxsize=512)
def _decoder(declared: Any) -> Callable[[str], Any]:
    read: Callable[[str], Any] = decoder(declared).decode
    return read


def _read(declared: Any) -> Callable[[str], Any]:
    try:
        return _decoder(declared)
    except TypeError:
        return _decoder.__wrapped__(declared)


def _only_result(fn: Callable[..., Any]) -> Any:
    """Something with the same result alone: parameters may be annotated with anything."""

    def stand_in() -> None: ...

    stand_in.__annotations__ = {"return": fn.__annotations__["return"]}
    stand_in.__wrapped__ = fn  # type: ignore[attr-defined]  # whose globals the names are looked up in
    return stand_in

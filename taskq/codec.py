"""Arguments and results as JSON: bound to parameter names, checked before any SQL, decoded into the annotated types.

A value reaches the body equal and of the annotated type, or it is refused at enqueue with the path of the culprit.
Where a parameter has no annotation (or ``Any``) only JSON's own values pass. Refused everywhere, since JSON or
PostgreSQL cannot hold them or would change them: keys of mappings that are not text, NaN and infinities, NUL and lone
surrogates in text, naive datetimes, and more than 8 MiB.

Beyond JSON's own: dataclasses, msgspec structs, TypedDict, NamedTuple, pydantic models, aware datetime, date, time,
timedelta, UUID, Decimal, Enum, bytes, tuple, list, set, and unions of these as far as JSON can tell them apart.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Final

import msgspec
import msgspec.inspect

from taskq.codec_values import check, difference, from_plain, plain
from taskq.context import JobContext
from taskq.errors import PayloadError, ResultNotStorable, TaskDefinitionError

__all__ = ["MAX_PAYLOAD_BYTES", "TaskCodec", "decode_any", "encode_any"]

MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
"""The most bytes of JSON text that arguments or a result may have; the database has the same default."""

_encode_json = msgspec.json.Encoder().encode
_MISSING: Final = object()
_SCALARS: Final[tuple[type, ...]] = (int, str, bool, float, NoneType)
_ANY: frozenset[type] = frozenset({int, str, bool, float, NoneType})
_SAFE_INT: Final = 2**63


class TaskCodec:
    """The codec of one function, compiled once.

    Args:
        fn: The function. Its first parameter is left out if it is annotated as ``JobContext``.
        localns: Names of the place where it is defined, for annotations that are text.
        max_bytes: The limit on the JSON text of arguments and of results.

    Raises:
        TaskDefinitionError: The signature cannot be that of a task; the message says why and what to do.
    """

    __slots__ = (
        "_bind",
        "_call",
        "_decoder",
        "_fast",
        "_max_bytes",
        "_name",
        "_open",
        "_result",
        "_types",
        "takes_context",
    )

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        localns: Mapping[str, Any] | None = None,
        max_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._name = getattr(fn, "__name__", repr(fn))
        self._max_bytes = max_bytes
        hints = _hints(fn, self._name, localns)
        parameters = list(inspect.signature(fn).parameters.values())
        self.takes_context = bool(parameters) and hints.get(parameters[0].name) is JobContext
        """Whether the body's first parameter is its ``JobContext``."""
        if self.takes_context:
            parameters = parameters[1:]
        _check_hints(self._name, parameters, hints)
        self._open = _check_parameters(self._name, parameters)
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        self._types = {p.name: hints.get(p.name, Any) for p in named}
        self._fast = {name: kinds for name, t in self._types.items() if (kinds := _exact_types(t))}
        self._bind = _compile_bind(self._name, parameters)
        self._decoder, self._call = _compile_decode(self._name, named, self._types)
        self._result = _decoder(self._name, "the result", hints.get("return", Any))

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Bind arguments to parameter names and give the JSON text of the payload. Defaults are not written down.

        Raises:
            PayloadError: An argument is missing, unknown or cannot be stored; ``path`` says where.
        """
        try:
            bound: dict[str, Any] = self._bind(*args, **kwargs)
        except TypeError as exc:
            said = str(exc)
            if said.startswith(f"{self._name}()"):
                raise PayloadError(f"{said}; call it with the parameters of the task", path=_named_in(said)) from None
            raise
        for name, value in bound.items():
            kinds = self._fast.get(name)
            kind = type(value)
            if kinds is None or kind not in kinds:
                return self._encode_slowly(bound)
            if kind is float:
                if not -1e15 < value < 1e15:
                    return self._encode_slowly(bound)
            elif kind is int and not -_SAFE_INT < value < _SAFE_INT:
                return self._encode_slowly(bound)
        try:
            data: bytes = _encode_json(bound)
        except UnicodeEncodeError:
            return self._encode_slowly(bound)
        if b"\\u0000" in data or len(data) > self._max_bytes:
            return self._encode_slowly(bound)
        return data.decode()

    def decode(self, payload: str | bytes) -> dict[str, Any]:
        """The keyword arguments of the body, each of its annotated type.

        Raises:
            PayloadError: The payload does not fit the function: it was enqueued for another version of it, or by hand.
        """
        try:
            if self._open:
                return self._decode_open(payload)
            return self._call(self._decoder.decode(payload))
        except Exception as exc:
            raise _misfit(exc, f"the payload does not fit the parameters of {self._name}") from exc

    def encode_result(self, value: Any) -> str:
        """The JSON text of what a body returned.

        Raises:
            ResultNotStorable: JSON or PostgreSQL cannot hold it; the message says where and why.
        """
        kind = type(value)
        if kind is NoneType:
            return "null"
        if kind is bool or (kind is int and -_SAFE_INT < value < _SAFE_INT):
            return str(value).lower()
        try:
            return encode_any(value, "result", self._max_bytes)
        except PayloadError as exc:
            raise ResultNotStorable(f"the result of {self._name} cannot be stored: {exc}") from exc

    def decode_result(self, text: str | bytes | None) -> Any:
        """What the body returned, of the annotated type; None stands for a result that was not kept.

        Raises:
            PayloadError: The stored result does not fit the function's return annotation.
        """
        if text is None:
            return None
        try:
            return self._result.decode(text)
        except Exception as exc:
            raise _misfit(exc, f"the stored result does not fit what {self._name} returns") from exc

    def _encode_slowly(self, bound: dict[str, Any]) -> str:
        # One parameter at a time, so that a complaint names it.
        text = "{" + ",".join(f"{_key(n)}:{encode_any(v, n, self._max_bytes)}" for n, v in bound.items()) + "}"
        _check_size(text, self._max_bytes, "")
        decoded = self.decode(text)
        for name, value in bound.items():
            if path := difference(value, decoded[name], name):
                declared = self._types.get(name, Any)
                what = "JSON's own values only" if declared is Any else _type_name(declared)
                raise PayloadError(
                    f"{path}: {type(value).__name__} would not come back equal from a parameter that takes {what}; "
                    "annotate the parameter with the type of the value, or convert the value",
                    path=path,
                )
        return text

    def _decode_open(self, payload: str | bytes) -> dict[str, Any]:
        raw = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
        extra = {name: value for name, value in raw.items() if name not in self._types}
        known = b"{" + b",".join(_key(n).encode() + b":" + bytes(raw[n]) for n in raw if n in self._types) + b"}"
        kwargs: dict[str, Any] = self._call(self._decoder.decode(known))
        return kwargs | {name: msgspec.json.decode(value) for name, value in extra.items()}


def encode_any(value: Any, path: str, max_bytes: int = MAX_PAYLOAD_BYTES) -> str:
    """The JSON text of a value of any kind that can be stored.

    Args:
        value: The value.
        path: What to call it in complaints.
        max_bytes: The limit on the text.

    Raises:
        PayloadError: JSON or PostgreSQL cannot hold it; ``path`` of the error says where.
    """
    try:
        text: str = _encode_json(check(plain(value, path), path)).decode()
    except RecursionError:
        raise PayloadError(f"{path}: it is nested too deeply, or contains itself", path=path) from None
    _check_size(text, max_bytes, path)
    return text


def decode_any(text: str | bytes | None) -> Any:
    """What a JSON text says, in JSON's own types; None for no text."""
    return None if text is None else msgspec.json.decode(text)


def _check_size(text: str, limit: int, path: str) -> None:
    size = len(text.encode())
    if size > limit:
        where = f"{path}: it has" if path else "the arguments have together"
        raise PayloadError(
            f"{where} {size} bytes as JSON, the limit is {limit}; store it elsewhere and pass a reference",
            path=path,
        )


def _check_parameters(name: str, parameters: Sequence[inspect.Parameter]) -> bool:
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            raise TaskDefinitionError(
                f"task {name}: arguments are stored by name, so *{p.name} cannot be; take a list parameter instead"
            )
        if p.kind is p.POSITIONAL_ONLY:
            raise TaskDefinitionError(
                f"task {name}: arguments are stored by name, so {p.name} cannot be positional-only; remove the '/'"
            )
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _check_hints(name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> None:
    """Refuse a parameter that no payload could ever fill."""
    for p in parameters:
        declared = hints.get(p.name, Any)
        if declared is JobContext or JobContext in typing.get_args(declared):
            raise TaskDefinitionError(
                f"task {name}: the parameter {p.name} is annotated JobContext, and only the first parameter can be the "
                f"context, with no other annotation; write def {name}({p.name}: JobContext, ...)"
            )
        if p.default is p.empty and _is_foreign(declared):
            raise TaskDefinitionError(
                f"task {name}: the parameter {p.name} is annotated {_type_name(declared)}, which cannot be made from "
                "JSON, so no job could be run; pass what is stored, such as an id, and make the object in the body "
                "(annotate it Any if it takes JSON of any kind, or give it a default)"
            )


def _is_foreign(declared: Any) -> bool:
    """Whether values of an annotation can never be decoded: neither msgspec nor ``from_plain`` knows the class."""
    try:
        info = msgspec.inspect.type_info(declared)
    except Exception:
        return False  # What is wrong with it is said when its decoder is made.
    return isinstance(info, msgspec.inspect.CustomType) and not hasattr(info.cls, "model_validate_json")


def _hints(fn: Callable[..., Any], name: str, localns: Mapping[str, Any] | None) -> dict[str, Any]:
    # A module may import JobContext for its type checker only.
    names = {"JobContext": JobContext, **(localns or {})}
    try:
        return typing.get_type_hints(fn, localns=names, include_extras=True)
    except NameError as exc:
        raise TaskDefinitionError(
            f"task {name}: an annotation names {exc.name!r}, which cannot be found at run time; import it outside of "
            "'if TYPE_CHECKING', and define it before the task"
        ) from exc
    except TypeError as exc:
        raise TaskDefinitionError(f"task {name}: an annotation cannot be evaluated: {exc}") from exc


def _exact_types(declared: Any) -> frozenset[type] | None:
    """The types of values that need no look at their inside, if there are any for this annotation."""
    if declared is Any:
        return _ANY
    is_union = typing.get_origin(declared) in (typing.Union, UnionType)
    members = typing.get_args(declared) if is_union else (declared,)
    found = frozenset(kind for kind in _SCALARS if kind in members)
    return found if len(found) == len(members) else None


def _compile_bind(name: str, parameters: Sequence[inspect.Parameter]) -> Callable[..., dict[str, Any]]:
    """A function of the task's own signature that gives what it was called with; Python itself checks the call."""
    shown: list[str] = []
    required: list[str] = []
    optional: list[str] = []
    rest: str | None = None
    for p in parameters:
        if p.kind is p.VAR_KEYWORD:
            rest = p.name
            shown.append(f"**{p.name}")
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(p.name if p.default is p.empty else f"{p.name}=_MISSING")
        (required if p.default is p.empty else optional).append(p.name)
    source = [f"def _({', '.join(shown)}):", f"    _bound = {{{', '.join(f'{n!r}: {n}' for n in required)}}}"]
    for n in optional:
        source += [f"    if {n} is not _MISSING:", f"        _bound[{n!r}] = {n}"]
    if rest:
        source.append(f"    _bound.update({rest})")
    source.append("    return _bound")
    namespace: dict[str, Any] = {"_MISSING": _MISSING}
    exec("\n".join(source), namespace)  # noqa: S102
    bind: Callable[..., dict[str, Any]] = namespace["_"]
    bind.__name__ = bind.__qualname__ = name  # Python's complaints about a call show it
    return bind


def _compile_decode(
    name: str, parameters: Sequence[inspect.Parameter], types: Mapping[str, Any]
) -> tuple[msgspec.json.Decoder[Any], Callable[[Any], dict[str, Any]]]:
    """A decoder into a struct with a field for each parameter, and the way from there to keyword arguments."""
    struct_fields: list[Any] = []
    source, optional = [], []
    for i, p in enumerate(parameters):
        if p.default is p.empty:
            struct_fields.append((f"f{i}", types[p.name]))
            source.append(f"{p.name!r}: s.f{i}")
        else:
            struct_fields.append((f"f{i}", typing.Union[types[p.name], msgspec.UnsetType], msgspec.UNSET))  # noqa: UP007
            optional.append((p.name, f"f{i}"))
    try:
        struct = msgspec.defstruct(
            "Payload",
            struct_fields,
            rename={f"f{i}": p.name for i, p in enumerate(parameters)},
            forbid_unknown_fields=True,
            kw_only=True,
            gc=False,
        )
    except TypeError as exc:
        raise TaskDefinitionError(f"task {name}: {exc}") from exc
    for p in parameters:
        _decoder(name, f"parameter {p.name}", types[p.name])
    lines = ["def call(s):", f"    kwargs = {{{', '.join(source)}}}"]
    for n, f in optional:
        lines += [f"    if s.{f} is not UNSET:", f"        kwargs[{n!r}] = s.{f}"]
    lines.append("    return kwargs")
    namespace: dict[str, Any] = {"UNSET": msgspec.UNSET}
    exec("\n".join(lines), namespace)  # noqa: S102
    return _decoder(name, "the parameters", struct), namespace["call"]


def _decoder(name: str, what: str, declared: Any) -> msgspec.json.Decoder[Any]:
    try:
        return msgspec.json.Decoder(declared, dec_hook=from_plain)
    except TypeError as exc:
        said = str(exc).partition(" - type ")[0]
        raise TaskDefinitionError(
            f"task {name}: {what} is annotated {_type_name(declared)}, which JSON cannot hold or tell apart: {said}"
        ) from exc


def _misfit(exc: Exception, what: str) -> PayloadError:
    said, _, where = str(exc).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    return PayloadError(f"{path}: {said}; {what}" if path else f"{what}: {said}", path=path)


def _key(name: str) -> str:
    data: bytes = _encode_json(name)
    return data.decode()


def _named_in(said: str) -> str:
    parts = said.split("'")
    return parts[1] if len(parts) > 2 else ""


def _type_name(declared: Any) -> str:
    return declared.__name__ if isinstance(declared, type) and not typing.get_args(declared) else str(declared)

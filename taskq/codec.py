"""Arguments and results as JSON: bound to parameter names, checked before any SQL, decoded into the annotated types.

A value reaches the body equal and of the annotated type, or it is refused at enqueue with the path of the culprit:
whatever is not plain JSON is decoded again before it is sent, and compared. Where a parameter has no annotation (or
``Any``) only JSON's own values pass. Refused everywhere, since JSON or PostgreSQL cannot hold them or would change
them: NaN and infinities, NUL and lone surrogates in text, naive datetimes, keys that no annotation reads back, more
than 8 MiB and more than 200 levels.

Beyond JSON's own: dataclasses, msgspec structs, attrs classes, TypedDict, NamedTuple, pydantic models, aware datetime,
date, time, timedelta, UUID, Decimal, Enum, bytes, tuple, list, set, and unions of these as far as JSON can tell them
apart. The parts: ``codec_signature`` (calls), ``codec_types`` (annotations), ``codec_values`` (to JSON) and
``codec_compare`` (back and equal).
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Final

import msgspec

from taskq.codec_compare import difference
from taskq.codec_signature import check_parameters, compile_bind, compile_decode, hints_of
from taskq.codec_types import decoder, exact_types, readable, type_name
from taskq.codec_values import MAX_DEPTH, check, join, plain
from taskq.context import JobContext
from taskq.errors import PayloadError, PayloadMisfit, ResultNotStorable

__all__ = ["MAX_DEPTH", "MAX_PAYLOAD_BYTES", "TaskCodec", "decode_any", "encode_any", "read_back"]

MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
"""The most bytes of JSON text that arguments or a result may have; the database has the same default."""

_encode_json = msgspec.json.Encoder().encode
_SAFE_INT: Final = 2**63
_PLACE: Final = re.compile(r" - at `(?:key` in `)?\$([^`]*)`$")
_MOST_KEYS: Final = 1_000
"""Keys of a mapping that are tried one by one for the one to complain about."""


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
        "_context",
        "_declared",
        "_decoder",
        "_fast",
        "_max_bytes",
        "_name",
        "_rest",
        "_rest_type",
        "_result",
        "_result_fast",
        "_result_type",
        "_returns",
        "takes_context",
    )

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        localns: Mapping[str, Any] | None = None,
        max_bytes: int = MAX_PAYLOAD_BYTES,
    ) -> None:
        self._name = name = getattr(fn, "__name__", repr(fn))
        self._max_bytes = max_bytes
        hints = hints_of(fn, name, localns)
        parameters = list(inspect.signature(fn).parameters.values())
        self.takes_context = bool(parameters) and hints.get(parameters[0].name) is JobContext
        """Whether the body's first parameter is its ``JobContext``."""
        self._context = parameters.pop(0).name if self.takes_context else None
        check_parameters(name, parameters, hints)
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
        self._declared = {p.name: hints.get(p.name, Any) for p in named}
        types = {
            p.name: readable(name, f"the parameter {p.name}", self._declared[p.name], filled=p.default is not p.empty)
            for p in named
        }
        self._fast = {n: kinds for n, t in types.items() if (kinds := exact_types(t))}
        self._bind = compile_bind(name, parameters)
        self._decoder, self._call = compile_decode(named, types)
        self._rest: msgspec.json.Decoder[Any] | None = None
        self._rest_type: Any = None
        if len(named) < len(parameters):
            self._rest_type = _rest_type(name, parameters[-1].name, hints.get(parameters[-1].name, Any))
            self._rest = decoder(self._rest_type)
        self._returns = hints.get("return", Any)
        self._result_type = readable(name, "the result", self._returns)
        self._result_fast = exact_types(self._result_type) or frozenset()
        self._result = decoder(self._result_type)

    @property
    def result_type(self) -> Any:
        """The type that the function is annotated to return; ``Any`` where it is not."""
        return self._returns

    def declared(self, name: str) -> Any:
        """The type that a parameter is annotated with; ``Any`` where it is not."""
        return self._declared.get(name, Any)

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name, without defaults.

        Raises:
            PayloadError: One is missing or unknown.
        """
        try:
            bound: dict[str, Any] = self._bind(*args, **kwargs)
        except TypeError as exc:
            said = str(exc)
            if said.startswith(f"{self._name}()"):
                raise PayloadError(f"{said}; call it with the parameters of the task", path=_named_in(said)) from None
            raise
        return bound

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Bind arguments to parameter names and give the JSON text of the payload. Defaults are not written down.

        Raises:
            PayloadError: An argument is missing, unknown or cannot be stored; ``path`` says where.
        """
        bound = self.bind(args, kwargs)
        if self._rest is not None:
            return self._encode_slowly(bound)
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
            PayloadMisfit: The payload does not fit the function: it was enqueued for another version of it, or by hand.
        """
        try:
            if self._rest is not None:
                return self._decode_open(payload)
            return self._call(self._decoder.decode(payload))
        except Exception as exc:
            said, path = _said(exc)
            reason = f"{path}: {said}" if path else said
            raise PayloadMisfit(
                f"{reason}; the stored arguments do not fit the parameters of {self._name} as this process has it: "
                "they were enqueued for another version of it, or by hand",
                path=path,
                reason=reason,
            ) from exc

    def encode_argument(self, name: str, value: Any) -> str:
        """The JSON text of one argument by itself, checked like those of a call.

        Raises:
            PayloadError: It cannot be stored, or would not come back equal.
        """
        declared = self._declared.get(name, Any)
        text = encode_any(value, name, self._max_bytes, text_keys=declared is not Any)
        try:
            back = decoder(readable(self._name, f"the parameter {name}", declared)).decode(text)
        except Exception as exc:
            raise PayloadError(f"{name}: {_said(exc)[0]}; {self._takes(name)}", path=name) from None
        if found := difference(value, back, name):
            raise PayloadError(f"{found}: it would not come back equal; {self._takes(name)}", path=found)
        return text

    def encode_result(self, value: Any) -> str:
        """The JSON text of what a body returned.

        Raises:
            ResultNotStorable: JSON or PostgreSQL cannot hold it, or it would not come back equal from the annotated
                type; the message says where and why.
        """
        kind = type(value)
        exact = kind in self._result_fast
        if exact:
            if kind is NoneType:
                return "null"
            if kind is bool or (kind is int and -_SAFE_INT < value < _SAFE_INT):
                return str(value).lower()
        declared = self._result_type
        try:
            text = encode_any(value, "result", self._max_bytes, text_keys=declared is not Any)
            if not exact and declared is not Any:
                read_back(value, text, declared, "result", self._result.decode)
        except PayloadError as exc:
            raise ResultNotStorable(
                f"the result of {self._name} cannot be stored: {exc}. The body has run, and is not run again for this"
            ) from exc
        return text

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
            said, path = _said(exc)
            where = f"{path}: " if path else ""
            raise PayloadError(
                f"{where}{said}; the stored result does not fit what {self._name} returns", path=path
            ) from exc

    def _encode_slowly(self, bound: dict[str, Any]) -> str:
        if self._context in bound:
            raise PayloadError(
                f"{self._context} is the context, which the worker passes; leave it out", path=self._context or ""
            )
        path = ""
        try:
            # One parameter at a time, so that a complaint names it.
            texts = []
            for path, value in bound.items():
                typed = self._declared.get(path, self._rest_type) is not Any
                texts.append(f"{_key(path)}:{encode_any(value, path, self._max_bytes, text_keys=typed)}")
            text = "{" + ",".join(texts) + "}"
            _check_size(text, self._max_bytes, "")
            try:
                decoded = self.decode(text)
            except PayloadMisfit as exc:
                path = _pinpoint(self.decode, text, exc.path)
                said = _said(exc.__cause__ or exc)[0]
                raise PayloadError(f"{path}: {said}; {self._takes(path)}", path=path) from None
            for path, value in bound.items():
                if found := difference(value, decoded[path], path):
                    raise PayloadError(
                        f"{found}: {type(value).__name__} would not come back equal; {self._takes(path)}", path=found
                    )
        except RecursionError:
            raise _too_deep(path) from None
        return text

    def _takes(self, path: str) -> str:
        name = re.split(r"[.\[]", path, maxsplit=1)[0]
        declared = self._declared.get(name, Any)
        if declared is Any:
            return (
                f"{name} has no annotation and takes JSON's own values only; annotate the parameter with the type of "
                "the value, or convert the value"
            )
        return f"{name} takes {type_name(declared)}; pass that, or annotate the parameter with the type of the value"

    def _decode_open(self, payload: str | bytes) -> dict[str, Any]:
        raw = msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
        if self._context in raw:
            raise TypeError(f"{self._context} is the context, which the worker passes")
        known: dict[str, msgspec.Raw] = {}
        more: dict[str, msgspec.Raw] = {}
        for name, value in raw.items():
            (known if name in self._declared else more)[name] = value
        kwargs: dict[str, Any] = self._call(self._decoder.decode(_encode_json(known)))
        rest = self._decode_rest(more)
        if unknown := more.keys() - rest.keys():
            raise TypeError(f"Object contains unknown field `{min(unknown)}`")
        return kwargs | rest

    def _decode_rest(self, more: dict[str, msgspec.Raw]) -> dict[str, Any]:
        assert self._rest is not None
        try:
            rest: dict[str, Any] = self._rest.decode(_encode_json(more))
        except Exception:
            # Again one by one, so that the complaint names the argument.
            for name, value in more.items():
                try:
                    self._rest.decode(_encode_json({name: value}))
                except Exception as exc:
                    said, path = _said(exc)
                    if path.startswith("[...]"):
                        raise TypeError(f"{said} - at `$.{name}{path.removeprefix('[...]')}`") from None
            raise
        return rest


def encode_any(value: Any, path: str, max_bytes: int = MAX_PAYLOAD_BYTES, *, text_keys: bool = False) -> str:
    """The JSON text of a value of any kind that can be stored.

    Args:
        value: The value.
        path: What to call it in complaints.
        max_bytes: The limit on the text.
        text_keys: Whether keys that are not text may be written as text, for a declared type that reads them back.

    Raises:
        PayloadError: JSON or PostgreSQL cannot hold it; ``path`` of the error says where.
    """
    try:
        text: str = _encode_json(check(plain(value, path, text_keys=text_keys), path)).decode()
    except RecursionError:
        raise _too_deep(path) from None
    _check_size(text, max_bytes, path)
    return text


def read_back(value: Any, text: str, declared: Any, path: str, read: Callable[[Any], Any]) -> Any:
    """What is read back from the text of a value: the value itself where that is equal.

    Args:
        value: The value.
        text: What ``encode_any`` made of it.
        declared: Its type; with ``Any`` it comes back in JSON's own types, equal or not.
        path: What to call it in complaints.
        read: Decodes that type.

    Raises:
        PayloadError: It does not fit the type, or would not come back equal.
    """
    if declared is Any:
        return decode_any(text)
    try:
        back = read(text)
    except Exception as exc:
        where = join_paths(path, _pinpoint(read, text, _said(exc)[1]))
        raise PayloadError(f"{where}: {_said(exc)[0]}; it is annotated {type_name(declared)}", path=where) from None
    try:
        found = difference(value, back, path)
    except RecursionError:
        raise _too_deep(path) from None
    if found:
        raise PayloadError(
            f"{found}: {type(value).__name__} would not come back equal from {type_name(declared)}, as it is "
            "annotated; return what is annotated, or annotate what is returned",
            path=found,
        )
    return value


def decode_any(text: str | bytes | None) -> Any:
    """What a JSON text says, in JSON's own types; None for no text.

    Raises:
        PayloadError: It cannot be read, such as an integer of more digits than Python reads.
    """
    try:
        return None if text is None else msgspec.json.decode(text)
    except Exception as exc:
        raise PayloadError(f"what is stored cannot be read: {exc}; look at it with SQL") from exc


def join_paths(start: str, rest: str) -> str:
    """A path below another."""
    return start + rest if rest.startswith("[") or not rest else f"{start}.{rest}"


def _too_deep(path: str) -> PayloadError:
    return PayloadError(
        f"{path}: it is nested more than {MAX_DEPTH} levels deep, which is the limit, or contains itself", path=path
    )


def _check_size(text: str, limit: int, path: str) -> None:
    size = len(text) if text.isascii() else len(text.encode())
    if size > limit:
        where = f"{path}: it has" if path else "the arguments have together"
        raise PayloadError(
            f"{where} {size} bytes as JSON, the limit is {limit}; store it elsewhere and pass a reference",
            path=path,
        )


def _rest_type(name: str, parameter: str, declared: Any) -> Any:
    """The type of all that ``**parameter`` takes together."""
    if typing.get_origin(declared) is typing.Unpack:
        return readable(name, f"**{parameter}", typing.get_args(declared)[0])
    return dict[str, readable(name, f"**{parameter}", declared)]  # type: ignore[misc]


def _pinpoint(decode: Callable[[Any], Any], text: str, path: str) -> str:
    """A path whose ``[...]`` are the keys that they stand for, as far as trying them one by one finds out."""
    holder: Any = [msgspec.json.decode(text)]
    root, last = holder, 0
    found, *later = path.split("[...]")
    walked, known = found, 0
    while later:
        try:
            for word, index in re.findall(r"(\w+)|\[(\d+)\]", walked):
                holder, last = holder[last], word or int(index)
            here = holder[last]
        except (LookupError, TypeError):
            break
        if not isinstance(here, dict) or len(here) > _MOST_KEYS:
            break
        for key, value in here.items():
            holder[last] = {key: value}
            try:
                decode(_encode_json(root[0]))
            except Exception as exc:
                cause = exc.__cause__ if isinstance(exc, PayloadMisfit) else exc
                known += 1
                walked, *later = _said(cause or exc)[1].split("[...]", known)[-1].split("[...]")
                holder, last = holder[last], key
                found = join(found, key).lstrip(".") + walked
                break
        else:
            break
    return found + "".join(f"[...]{part}" for part in later)


def _said(exc: BaseException) -> tuple[str, str]:
    """What an error of decoding says, and the path that it names."""
    said = str(exc)
    place = _PLACE.search(said)
    if place is None:
        return said, ""
    return said[: place.start()], place[1].lstrip(".")


def _key(name: str) -> str:
    data: bytes = _encode_json(name)
    return data.decode()


def _named_in(said: str) -> str:
    parts = said.split("'")
    return parts[1] if len(parts) > 2 else ""

"""The signature of a task: its hints, what a call binds to which name, and the way from a payload to a call.

Used by ``codec`` alone.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from taskq.codec_types import decoder
from taskq.context import JobContext
from taskq.errors import TaskDefinitionError

__all__ = ["check_parameters", "compile_bind", "compile_decode", "hints_of"]

_MISSING: Final = object()


def hints_of(fn: Callable[..., Any], name: str, localns: Mapping[str, Any] | None) -> dict[str, Any]:
    """The annotations of a function, evaluated.

    Raises:
        TaskDefinitionError: One cannot be; the message names what is missing.
    """
    # A module may import JobContext for its type checker only.
    generic = {p.__name__: p for p in getattr(fn, "__type_params__", ())}
    names = {"JobContext": JobContext, **generic, **(localns or {})}
    try:
        return typing.get_type_hints(fn, localns=names, include_extras=True)
    except NameError as exc:
        raise TaskDefinitionError(
            f"task {name}: an annotation names {exc.name!r}, which cannot be found at run time; import it outside of "
            "'if TYPE_CHECKING', and define it before the task"
        ) from exc
    except Exception as exc:
        raise TaskDefinitionError(f"task {name}: an annotation cannot be evaluated: {exc}") from exc


def check_parameters(name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> None:
    """Refuse parameters that arguments by name cannot fill."""
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            raise TaskDefinitionError(
                f"task {name}: arguments are stored by name, so *{p.name} cannot be; take a list parameter instead"
            )
        if p.kind is p.POSITIONAL_ONLY:
            raise TaskDefinitionError(
                f"task {name}: arguments are stored by name, so {p.name} cannot be positional-only; remove the '/'"
            )
        declared = hints.get(p.name, Any)
        if declared is JobContext or JobContext in typing.get_args(declared):
            raise TaskDefinitionError(
                f"task {name}: the parameter {p.name} is annotated JobContext, and only the first parameter can be the "
                f"context, with no other annotation; write def {name}({p.name}: JobContext, ...)"
            )


def compile_bind(name: str, parameters: Sequence[inspect.Parameter]) -> Callable[..., dict[str, Any]]:
    """A function of the task's own signature that gives what it was called with; Python itself checks the call."""
    shown: list[str] = []
    required: list[str] = []
    optional: list[str] = []
    rest: str | None = None
    bound, missing = _unused("bound", parameters), _unused("MISSING", parameters)
    for p in parameters:
        if p.kind is p.VAR_KEYWORD:
            rest = p.name
            shown.append(f"**{p.name}")
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(p.name if p.default is p.empty else f"{p.name}={missing}")
        (required if p.default is p.empty else optional).append(p.name)
    source = [f"def _({', '.join(shown)}):", f"    {bound} = {{{', '.join(f'{n!r}: {n}' for n in required)}}}"]
    for n in optional:
        source += [f"    if {n} is not {missing}:", f"        {bound}[{n!r}] = {n}"]
    if rest:
        source.append(f"    {bound}.update({rest})")
    source.append(f"    return {bound}")
    namespace: dict[str, Any] = {missing: _MISSING}
    exec("\n".join(source), namespace)  # noqa: S102
    bind: Callable[..., dict[str, Any]] = namespace["_"]
    bind.__name__ = bind.__qualname__ = name  # Python's complaints about a call show it
    return bind


def compile_decode(
    parameters: Sequence[inspect.Parameter], types: Mapping[str, Any]
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
    struct = msgspec.defstruct(
        "Payload",
        struct_fields,
        rename={f"f{i}": p.name for i, p in enumerate(parameters)},
        forbid_unknown_fields=True,
        kw_only=True,
        gc=False,
    )
    lines = ["def call(s):", f"    kwargs = {{{', '.join(source)}}}"]
    for n, f in optional:
        lines += [f"    if s.{f} is not UNSET:", f"        kwargs[{n!r}] = s.{f}"]
    lines.append("    return kwargs")
    namespace: dict[str, Any] = {"UNSET": msgspec.UNSET}
    exec("\n".join(lines), namespace)  # noqa: S102
    return decoder(struct), namespace["call"]


def _unused(name: str, parameters: Sequence[inspect.Parameter]) -> str:
    """A variable's name that no parameter has."""
    taken = {p.name for p in parameters}
    while (name := f"_{name}") in taken:
        pass
    return name

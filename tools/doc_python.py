"""The Python interface for people: signatures and docstrings of the public classes and functions."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cached_property
from typing import Any

from doc_text import code, first_sentence, parse, plain, table

import taskq
from taskq import errors
from taskq.client.requests import Using
from taskq.handle import JobInfo
from taskq.worker import WorkerOptions

WIDE = 100
"""Signatures longer than this go over several lines."""
LEFT_OUT = {"ensure_policy", "retries_kinds", "spec", "from_spec", "from_row", "from_json", "policy_within"}
"""Public methods that only taskq itself has a use for."""


def signature(name: str, fn: Callable[..., Any], *, bound: bool = False) -> str:
    """How it is called, in a block of code."""
    of = inspect.signature(fn)
    params = list(of.parameters.values())[bound:]
    shown = [p.replace(annotation=_kind(p.annotation), default=p.default) for p in params]
    parts: list[str] = []
    for before, p in zip([None, *shown], shown, strict=False):
        if p.kind is p.KEYWORD_ONLY and (before is None or before.kind is not p.KEYWORD_ONLY):
            parts.append("*")
        default = "" if p.default is p.empty else f" = {p.default!r}"
        star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        parts.append(f"{star}{p.name}" + (f": {p.annotation}" if p.annotation else "") + default)
    gives = _kind(of.return_annotation)
    end = f" -> {gives}" if gives and gives != "None" else ""
    head = "async " if inspect.iscoroutinefunction(fn) else ""
    line = f"{head}{name}({', '.join(parts)}){end}"
    if len(line) > WIDE:
        line = f"{head}{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"
    return f"```text\n{line}\n```\n"


def _kind(annotation: Any) -> str:
    if annotation in (inspect.Parameter.empty, None):
        return ""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.replace(" | Unset", "").replace("R_co", "R").replace("Unpack[Using]", "...")


def entry(title: str, fn: Callable[..., Any], docstring: str | None, *, bound: bool, level: str, also: str = "") -> str:
    """One thing that is called: its signature and what its docstring says."""
    doc = parse(docstring)
    parts = [f"{level} {title}\n", signature(title, fn, bound=bound), f"{doc.text}{also}\n"]
    if doc.args:
        takes = inspect.signature(fn).parameters
        rows = [(code(n) if n in takes else "the others", about) for n, about in doc.args.items() if n != "fn"]
        parts.append(table(("argument", "meaning"), rows))
    if doc.returns:
        parts.append(f"Gives {doc.returns}\n")
    if doc.raises:
        parts.append(_raises(doc.raises))
    return "\n".join(parts)


def _raises(raises: Mapping[str, str]) -> str:
    return "Raises:\n\n" + "".join(f"- `{name}`: {about}\n" for name, about in raises.items())


def attributes(kind: type) -> str:
    """The attributes of a class, with their types and defaults where it is a dataclass."""
    doc = parse(kind.__doc__)
    found = {f.name: f for f in fields(kind)} if hasattr(kind, "__dataclass_fields__") else {}
    typed = any(f.default is not MISSING for f in found.values())
    rows = []
    for name, about in doc.args.items():
        row = [code(name), about]
        if typed:
            f = found[name]
            row[1:1] = [code(_kind(f.type)), code(repr(f.default)) if f.default is not MISSING else "-"]
        rows.append(row)
    return table(("field", "type", "default", "meaning") if typed else ("field", "meaning"), rows)


def methods(kind: type, *, level: str = "####") -> Iterator[str]:
    """The public methods and properties of a class; a form with ``_sync`` is told of at the other."""
    names = [n for base in kind.__mro__ if base.__module__.startswith("taskq") for n in vars(base)]
    for name in dict.fromkeys(names):
        thing = inspect.getattr_static(kind, name)
        if name.startswith("_") or name in LEFT_OUT:
            continue
        title = f"{kind.__name__}.{name}"
        if isinstance(thing, property):
            yield f"{level} {title}\n\n{parse(thing.fget.__doc__).text}\n" if thing.fget else ""
            continue
        if isinstance(thing, cached_property):
            yield f"{level} {title}\n\n{parse(thing.func.__doc__).text}\n"
            continue
        fn = getattr(thing, "__func__", thing)
        if not inspect.isfunction(fn) or not fn.__doc__ or first_sentence(fn.__doc__).startswith("Like `"):
            continue
        also = f" For code without an event loop: `{name}_sync`." if f"{name}_sync" in names else ""
        overloads = typing.get_overloads(fn)
        yield entry(title, overloads[-1] if overloads else fn, fn.__doc__, bound=True, level=level, also=also)


def of_class(kind: type, *, made: bool = False, more: str = "", calls: bool = True) -> str:
    """A class: how it is made if people make it, its attributes, its methods."""
    doc = parse(kind.__doc__)
    name = kind.__name__
    if made:
        init: Any = inspect.getattr_static(kind, "__init__")
        parts = [entry(name, init, kind.__doc__ if not _has_attributes(kind) else doc.text, bound=True, level="###")]
    else:
        parts = [f"### {name}\n", f"{doc.text}\n"]
    if _has_attributes(kind):
        parts.append(attributes(kind))
        if made and doc.raises:
            parts.append(_raises(doc.raises))
    parts += [more] if more else []
    parts += methods(kind) if calls else ()
    return "\n".join(parts)


def _has_attributes(kind: type) -> bool:
    return "\nAttributes:" in inspect.cleandoc(kind.__doc__ or "")


def python_app() -> str:
    """The application object."""
    return of_class(taskq.TaskQ, made=True)


def python_tasks() -> str:
    """Tasks, and what a call may say."""
    doc = parse(Using.__doc__)
    assert list(doc.args) == list(Using.__annotations__), "every option explains itself"
    using = table(("option", "meaning"), ((code(n), about) for n, about in doc.args.items()))
    return "\n".join((of_class(taskq.Task), f"### Options of a call\n\n{doc.text}\n", using))


def python_policy() -> str:
    """Policies, retries and delays."""
    default = taskq.ExecutionPolicy()
    about = parse(taskq.ExecutionPolicy.__doc__).args
    rows = []
    for f in fields(taskq.ExecutionPolicy):
        value = getattr(default, f.name)
        shown = "3 attempts, 5 s and 10 s apart" if f.name == "retry" else "no limit" if value is None else value
        rows.append((code(f.name), shown, about[f.name]))
    backoffs = (taskq.exponential, taskq.linear, taskq.constant)
    return "\n".join(
        (
            f"### ExecutionPolicy\n\n{parse(taskq.ExecutionPolicy.__doc__).text}\n",
            table(("field", "default", "meaning"), rows),
            of_class(taskq.PolicyLayer, calls=False),
            signature("PolicyLayer", taskq.PolicyLayer.__init__, bound=True),
            of_class(taskq.Retry, made=True),
            *(entry(fn.__name__, fn, fn.__doc__, bound=False, level="###") for fn in backoffs),
            of_class(taskq.TerminalEffect, made=True),
            of_class(taskq.Ref),
        )
    )


def python_bodies() -> str:
    """What a body gets, and what it may raise."""
    later = (taskq.RetryAfter, taskq.Snooze)
    inits = {kind: inspect.getattr_static(kind, "__init__") for kind in later}
    raised = (entry(k.__name__, inits[k], k.__doc__, bound=True, level="###") for k in later)
    prepares = (taskq.PrepareContext, taskq.Ready, taskq.Unmet, taskq.NeedsApproval, taskq.Pause, taskq.Cancelled)
    return "\n".join((of_class(taskq.JobContext), *(of_class(kind) for kind in prepares), *raised))


def python_jobs(comments: Mapping[str, str]) -> str:
    """Handles and what is known of jobs; the database's comments on columns explain the fields of ``JobInfo``."""
    rows = [(code(f.name), code(f.type), comments[f.name]) for f in fields(JobInfo)]
    info = f"### JobInfo\n\n{parse(JobInfo.__doc__).text}\n\n{table(('field', 'type', 'meaning'), rows)}"
    return "\n".join((of_class(taskq.Job), info, *methods(JobInfo), of_class(taskq.EffectInfo, calls=False)))


def python_worker() -> str:
    """The options of a worker."""
    return of_class(WorkerOptions)


def public_errors() -> str:
    """Every error: from where it is imported, what it is derived from, and when it is raised."""
    known = [
        thing
        for thing in vars(errors).values()
        if isinstance(thing, type) and issubclass(thing, errors.TaskQError) and thing.__module__ == errors.__name__
    ]
    rows = []
    for kind in known:
        where = "taskq" if kind.__name__ in taskq.__all__ else "taskq.errors"
        bases = " ".join(code(base.__name__) for base in kind.__bases__)
        rows.append((code(f"from {where} import {kind.__name__}"), bases, first_sentence(kind.__doc__)))
    return table(("import", "is a", "meaning"), rows)


def columns(rows: list[tuple[str, str]]) -> dict[str, str]:
    """The meaning of each field of ``JobInfo``: the first comment on a column of its name."""
    found: dict[str, str] = {}
    for name, about in rows:
        found.setdefault("worker_id" if name == "claimed_by" else name, re.sub(r"; half of the fence\.$", ".", about))
    found["status"] = "`pending`, `running`, `held`, `unknown`, `succeeded`, `failed` or `cancelled`."
    found["worker_id"] = "The worker of the current or the final attempt."
    return {name: plain(about) for name, about in found.items()}

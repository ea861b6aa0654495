"""Emits: a task, or a run of a workflow, for each item that a source gives page by page.

An emit is a map whose list is not known when it begins: its plan has a second node, the source, which every page is run
by. Each page is asked for with the cursor that the one before it gave.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from taskq.errors import PayloadError
from taskq.workflow.fit import fits, shown
from taskq.workflow.parts import bare
from taskq.workflow.symbols import Dep, Expr

if TYPE_CHECKING:
    from taskq.client.requests import Using
    from taskq.tasks import Task
    from taskq.workflow.definition import Workflow
    from taskq.workflow.wiring import Wiring

__all__ = ["Page", "Pages", "Source", "cursor_of", "source_of"]

MOST_AHEAD: Final = 100_000
T = TypeVar("T")
C = TypeVar("C")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Page(Generic[T, C]):
    """What a source gives each time that it is asked.

    Attributes:
        items: The next items, at most 10,000, which may be none.
        cursor: What the source is to be asked with for the page after this one; None where this is the last.
    """

    items: list[T]
    cursor: C | None = None


@dataclass(frozen=True, slots=True)
class Pages(Generic[T_co]):
    """The pages of a source, for ``emit``; made by ``task.pages(...)``.

    Attributes:
        task: The source.
        args: What it takes after the cursor.
        kwargs: The same by name.
        name: What its nodes are called; None for the name of the emit and ``.page``.
        options: How its jobs are enqueued.
    """

    task: Task[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    name: str | None = None
    options: Using | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A source as a plan has it.

    Attributes:
        name: What its node is called.
        job: How the job of each page is enqueued.
        cursor: The parameter that takes the cursor.
        args: For each other parameter of its task the expression that gives its value, in the outer run.
    """

    name: str
    job: dict[str, Any]
    cursor: str
    args: dict[str, Expr]

    def node(self) -> dict[str, Any]:
        """The node of the emit's own plan."""
        given = {name: {"input": "source", "path": [name]} for name in self.args}
        return {"name": self.name, "job": self.job, "args": {self.cursor: {"value": None}, **given}}


def source_of(
    wiring: Wiring,
    runs: Task[..., Any] | Workflow[..., Any],
    item: str | None,
    pages: object,
    deps: list[Dep],
    name: str,
) -> Source | None:
    """The source of an emit, as it was wired; None, with a fault, where there is none.

    Args:
        wiring: The wiring that is going on.
        runs: What is run for each item.
        item: The parameter of that which takes the item.
        pages: What ``emit`` was given.
        deps: What the source waits for is added to it.
        name: What the node of the emit is called.
    """
    where = f"node {name}"
    if not isinstance(pages, Pages):
        wiring.faults.append(f"{where}: emit() was given {pages!r}; give it the pages of a source: source.pages(...)")
        return None
    task = pages.task
    if task._app is not wiring.app:
        wiring.faults.append(f"{where}: the source {task.name} belongs to another TaskQ; use tasks of the same one")
        return None
    called = f"{name[:123]}.page" if pages.name is None else pages.name
    if called == name:
        wiring.faults.append(f"{where}: its pages are called {name}, too; give them, or it, another name")
    cursor = cursor_of(task)
    if cursor is None:
        wiring.faults.append(
            f"{where}: the source {task.name} takes no cursor; its first parameter is what it gave with the page "
            "before, and None for the first one"
        )
        return None
    _compare(wiring, task, cursor, runs, item, where)
    args: dict[str, Expr] = {}
    try:
        bound = task.codec.bind((None, *pages.args), dict(pages.kwargs))
    except PayloadError as exc:
        wiring.faults.append(f"{where}: the source {task.name}: {exc}")
        bound = {}
    said = f"{where}, its source {task.name}"
    for parameter, value in bound.items():
        if parameter != cursor:
            args[parameter] = wiring.argument(task, parameter, value, deps, said)
    return Source(called, wiring.spec(task, pages.options, said), cursor, args)


def cursor_of(task: Task[..., Any]) -> str | None:
    """The parameter of a source that takes the cursor: the first one; None where it takes none."""
    for p in list(inspect.signature(task.fn).parameters.values())[task.takes_context :]:
        return p.name if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY) else None
    return None


def _compare(
    wiring: Wiring,
    task: Task[..., Any],
    cursor: str,
    runs: Task[..., Any] | Workflow[..., Any],
    item: str | None,
    where: str,
) -> None:
    """Note where what a source gives is no page, or does not fit what takes the items, and the cursor."""
    returns = bare(task.codec.result_type)
    if returns is Any:
        return
    if (typing.get_origin(returns) or returns) is not Page:
        wiring.faults.append(
            f"{where}: the source {task.name} returns {shown(returns)}; a source returns Page[item, cursor]"
        )
        return
    of_items, of_cursor = typing.get_args(returns) or (Any, Any)
    if item is not None and not fits(of_items, takes := runs.codec.declared(item)):
        wiring.faults.append(
            f"{where}: {item} takes {shown(takes)}, and the pages of {task.name} have items of {shown(of_items)}"
        )
    takes = task.codec.declared(cursor)
    for given in (of_cursor, type(None)):
        if not fits(given, takes):
            why = " for the first page" if given is type(None) else " of its pages"
            wiring.faults.append(
                f"{where}: {cursor} of the source {task.name} takes {shown(takes)}, and the cursor{why} is "
                f"{shown(given)}"
            )

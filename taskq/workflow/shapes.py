"""Maps and emits of durable bodies: each is a run of a workflow that nobody has written, with that one shape.

What ``ctx.map`` and ``ctx.emit`` are given, but for the values, makes the workflow: so its plan is the same in every
process and in every attempt, is checked as a whole before any row is written, and is made once in a process. Items and
arguments are the input of its run.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, cast

from taskq.client.requests import check_options
from taskq.errors import PayloadError, PlanError, StepRefused, describe
from taskq.tasks import BoundTask, Task
from taskq.workflow.definition import Workflow, collect, tally
from taskq.workflow.emits import Pages, cursor_of
from taskq.workflow.maps import Over, item_of
from taskq.workflow.symbols import Outcome, Tally

if TYPE_CHECKING:
    from taskq.client.requests import Using

__all__ = ["Gives", "Shape", "shape_of"]

Gives: TypeAlias = Literal["results", "outcomes", "tally"]
_GIVES: Final = ("results", "outcomes", "tally")
_MOST_SHAPES: Final = 1_000
MOST_TOLD: Final = 100
"""Failures that a tally has, as in the database."""
_LONGEST: Final = 118
"""Characters of a shape's name before its kind; its hidden tasks need the rest."""
_Each: TypeAlias = Task[..., Any] | Workflow[..., Any]


class Shape(NamedTuple):
    """What is to be started.

    Attributes:
        workflow: A workflow of that one shape.
        given: The arguments of the run.
        call: Does it here and now, for a plain call; None where a workflow is run for each item, which is none.
    """

    workflow: Workflow[..., Any]
    given: dict[str, Any]
    call: Callable[[], Coroutine[Any, Any, Any]] | None


def shape_of(
    how: str,
    each: Any,
    over: Any,
    also: Mapping[str, Any] | None,
    gives: Gives,
    queue: str,
    at_once: int | None = None,
    at_most: int | None = None,
    ahead: int | None = None,
) -> Shape:
    """What is run for ``ctx.map`` or ``ctx.emit``; see both.

    Args:
        how: Which of the two.
        each: The task or workflow that is run for each item.
        over: The list, or the pages.
        also: What it takes besides, by name.
        gives: What of its children is given to the body.
        queue: That of the jobs which wait for it.
        at_once: A bound, as ``Over`` has it.
        at_most: Likewise.
        ahead: Likewise.

    Raises:
        StepRefused: It cannot be one.
        PayloadError: An argument is missing or unknown.
        PlanError: What would be run is wrong; every fault is named.
    """
    bounds = Over(at_once, at_most, ahead, emits=how == "emit")
    return (_emit if bounds.emits else _map)(each, over, also, bounds, gives, queue)


def _map(each: Any, items: Any, also: Mapping[str, Any] | None, over: Over, gives: Gives, queue: str) -> Shape:
    of, options = _runs("ctx.map()", each)
    item, rest = _bound(of, also)
    if isinstance(items, (str, bytes, bytearray)) or not isinstance(items, Sequence):
        raise StepRefused(f"ctx.map({of.name}) goes over a list, and was given {_short(items)}; give it a list")
    name = f"{of.name[:_LONGEST]}:map"
    of_item = of.codec.declared(item)
    takes = {item: list[of_item], **{p: of.codec.declared(p) for p in rest}}  # type: ignore[valid-type]

    def wire(node: Any, given: dict[str, Any]) -> Any:
        return node.map(given.pop(item), **given)

    made = _shape(of, options, name, over, gives, queue, takes, wire, ())
    return Shape(made, {item: list(items), **rest}, _plain(of, _listed(items), rest, gives))


def _emit(each: Any, pages: Any, also: Mapping[str, Any] | None, over: Over, gives: Gives, queue: str) -> Shape:
    of, options = _runs("ctx.emit()", each)
    _, rest = _bound(of, also)
    if not isinstance(pages, Pages):
        raise StepRefused(
            f"ctx.emit({of.name}) goes over the pages of a source, and was given {_short(pages)}; give it "
            "source.pages(...)"
        )
    source, cursor = pages.task, cursor_of(pages.task)
    if cursor is None:
        raise StepRefused(
            f"the source {source.name} takes no cursor; its first parameter is what it gave with the page before, and "
            "None for the first one"
        )
    given = source.codec.bind((None, *pages.args), pages.kwargs)
    del given[cursor]
    name = f"{source.name[: _LONGEST // 2 - 1]}/{of.name[: _LONGEST // 2 - 1]}:emit"
    # Two tasks take them, whose parameters may be called the same.
    takes = {f"each_{p}": of.codec.declared(p) for p in rest}
    takes |= {f"source_{p}": source.codec.declared(p) for p in given}

    def wire(node: Any, values: dict[str, Any]) -> Any:
        asked: Pages[Any] = Pages(source, (), {p: values[f"source_{p}"] for p in given}, pages.name, pages.options)
        return node.emit(asked, **{p: values[f"each_{p}"] for p in rest})

    key = (source, pages.name, _key(pages.options or {}))
    made = _shape(of, options, name, over, gives, queue, takes, wire, key)
    values = {f"each_{p}": value for p, value in rest.items()} | {f"source_{p}": v for p, v in given.items()}
    return Shape(made, values, _plain(of, _paged(source, given), rest, gives))


def _runs(call: str, each: Any) -> tuple[_Each, Using]:
    if isinstance(each, BoundTask):
        return each.task, each._given
    if not isinstance(each, (Task, Workflow)):
        raise StepRefused(
            f"{call} was given {_short(each)} to run for each item; give a task, task.using(...) or a workflow"
        )
    return each, {}


def _bound(of: _Each, also: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """The parameter that takes an item, and what is given to the others."""
    item = item_of(of)
    if item is None:
        raise StepRefused(f"{of.name} cannot be run for each item: it takes none; its first parameter is the item")
    if also is not None and not isinstance(also, Mapping):
        raise StepRefused(f"also is {_short(also)}; give what {of.name} takes besides the item by name: a dict")
    if item in (also or {}):
        raise PayloadError(f"also has {item}, which takes the items; leave it out", path=item)
    bound = of.codec.bind((None,), dict(also or {}))
    del bound[item]
    return item, bound


def _shape(
    of: _Each,
    options: Using,
    name: str,
    over: Over,
    gives: Gives,
    queue: str,
    takes: Mapping[str, Any],
    wire: Callable[[Any, dict[str, Any]], Any],
    source: tuple[Any, ...],
) -> Workflow[..., Any]:
    """The workflow, made once in a process.

    Args:
        of: What is run for each item.
        options: How the jobs of that are enqueued.
        name: What the workflow is called.
        over: The bounds.
        gives: What of its children is given to the body.
        queue: That of the jobs which wait.
        takes: What a run takes, by name, with its type.
        wire: Wires the one node, of what is run for each item with its bounds, and of these.
        source: What tells it from others with the same, besides these.
    """
    if gives not in _GIVES:
        raise StepRefused(f"gives is {_short(gives)}; there are {', '.join(map(repr, _GIVES))}")
    if faults := over.faults(of.name, undone=False):
        raise PlanError(name, faults)
    app = of._app
    key = (of, _key(options), over, gives, queue, tuple(takes), source)
    if (known := app._shapes.get(key)) is not None:
        return known
    waits, collects = app._of_bodies
    bounds: dict[str, Any] = {"at_once": over.at_once, "at_most": over.at_most, "ahead": over.ahead}

    def shape(**given: Any) -> Any:
        mapped = wire(cast(Any, of).node(**bounds, **options), given)
        if gives == "results":
            return mapped
        return collects.node(queue=queue).step(collect(mapped) if gives == "outcomes" else tally(mapped))

    returns = of.codec.result_type
    kinds = {"results": list[returns], "outcomes": list[Outcome[returns]], "tally": Tally}  # type: ignore[valid-type]
    shape.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(p, inspect.Parameter.KEYWORD_ONLY) for p in takes]
    )
    shape.__annotations__ = {**takes, "return": kinds[gives]}
    shape.__name__ = name
    made: Workflow[..., Any] = Workflow(app, shape, name=name, awaits=(waits, queue))
    made.plan  # noqa: B018  # its faults are told now, and each time
    if len(app._shapes) >= _MOST_SHAPES:
        app._shapes.clear()
    app._shapes[key] = made
    return made


def _plain(
    of: _Each, items: AsyncIterator[Any], also: Mapping[str, Any], gives: Gives
) -> Callable[[], Coroutine[Any, Any, Any]] | None:
    """What it comes to where no worker and no job stand behind it: the task's function is called for each item."""
    if isinstance(of, Workflow):
        return None

    async def call() -> Any:
        ends: list[Outcome[Any]] = []
        async for item in items:
            name = f"{of.name}[{len(ends)}]"
            try:
                ends.append(Outcome(name, "succeeded", await _called(of, item, **also), None))
            except Exception as exc:
                if gives == "results":
                    raise
                ends.append(Outcome(name, "failed", None, describe(exc)))
        lost = [end for end in ends if not end.ok]
        told = {
            "results": [end.value for end in ends],
            "outcomes": ends,
            "tally": Tally(len(ends), len(ends) - len(lost), len(lost), 0, lost[:MOST_TOLD]),
        }
        return told[gives]

    return call


async def _listed(items: Sequence[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def _paged(source: Task[..., Any], given: Mapping[str, Any]) -> AsyncIterator[Any]:
    cursor, more = None, True
    while more:
        page = await _called(source, cursor, **given)
        for item in page.items:
            yield item
        cursor = page.cursor
        more = cursor is not None


async def _called(task: Any, *args: Any, **kwargs: Any) -> Any:
    value = task(*args, **kwargs)
    return await value if inspect.isawaitable(value) else value


def _key(options: Using) -> tuple[Any, ...]:
    """Equal for options that come to the same node; those that no node can have are named, and refused there."""
    return (check_options(options).spec_key(), frozenset(options))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

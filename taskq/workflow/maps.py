"""Maps: a task, or a run of a workflow, for each item of a list that is known only at run time.

A map is a node that stands for a child run; that run's plan has one node, which every item is run by.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from taskq.errors import PayloadError
from taskq.workflow.emits import MOST_AHEAD, Source
from taskq.workflow.fit import fits, shown
from taskq.workflow.parts import bare
from taskq.workflow.plan import FORMAT, Plan
from taskq.workflow.symbols import Dep, Expr, Symbol, is_symbolic

if TYPE_CHECKING:
    from taskq.tasks import Task
    from taskq.workflow.definition import Workflow
    from taskq.workflow.wiring import Wiring

__all__ = ["Over", "item_of", "items_of", "plan_of_each"]

MOST_ITEMS: Final = 100_000
MOST_UNDONE: Final = 10_000
"""Items of a map whose children are compensated: all of that is promised in one transaction."""
MOST_AT_ONCE: Final = 10_000
AT_ONCE: Final = 1_000
NODES_AT_ONCE: Final = 20_000
"""Nodes of the child runs of one map that have jobs at a time, where nothing is declared."""


@dataclass(frozen=True, slots=True)
class Over:
    """The bounds of a map, as declared; None for the default.

    Attributes:
        at_once: How many of its children have jobs at a time.
        at_most: How many items its list may have.
        ahead: Of an emit: how many items may be open when a page is asked for.
        emits: Whether the list comes page by page.
    """

    at_once: int | None = None
    at_most: int | None = None
    ahead: int | None = None
    emits: bool = False

    def faults(self, where: str, undone: bool) -> list[str]:
        """What is wrong with them."""
        said: list[str] = []
        bounds = (
            ("at_once", self.at_once, MOST_AT_ONCE),
            ("at_most", self.at_most, MOST_UNDONE if undone else MOST_ITEMS),
        )
        for name, value, most in bounds:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most):
                why = (
                    ", since each child is compensated" if undone and most == MOST_UNDONE and name == "at_most" else ""
                )
                said.append(f"{where}: {name} is {value!r}; give a number from 1 to {most}{why}")
        ahead = self.ahead
        if ahead is not None and (
            isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead <= MOST_AHEAD
        ):
            said.append(f"{where}: ahead is {ahead!r}; give a number of items from 0 to {MOST_AHEAD}")
        return said

    def spec(self, item: str, undone: bool, size: int, cursor: str | None = None) -> dict[str, Any]:
        """The bounds as a plan has them, for children of so many nodes each; ``cursor``: what takes that of an emit."""
        usual = max(1, min(AT_ONCE, NODES_AT_ONCE // size))
        most = (MOST_UNDONE if undone else MOST_ITEMS) if self.at_most is None else self.at_most
        at_once = usual if self.at_once is None else self.at_once
        made: dict[str, Any] = {"item": item, "most": most, "at_once": at_once}
        if cursor is not None:
            made["pages"] = {"item": cursor, "ahead": at_once if self.ahead is None else self.ahead}
        return made


def item_of(runs: Task[..., Any] | Workflow[..., Any]) -> str | None:
    """The parameter that takes an item: the first one; None where there is none that may be given by its place."""
    for p in list(inspect.signature(runs.fn).parameters.values())[runs.takes_context :]:
        return p.name if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY) else None
    return None


def items_of(
    wiring: Wiring, runs: Task[..., Any] | Workflow[..., Any], item: str, value: object, deps: list[Dep], where: str
) -> Expr:
    """The expression of the list that is mapped over; null, with a fault, where there is none."""
    takes = runs.codec.declared(item)
    said = f"{where}: map() goes over a list of {shown(takes)}"
    try:
        if isinstance(value, Symbol):
            declared = bare(value._declared)
            if declared in (str, bytes) or not fits(declared, Sequence[takes]):  # type: ignore[valid-type]
                wiring.faults.append(f"{said}, and {value._of} is {shown(value._declared)}")
        elif not isinstance(value, (list, tuple)):
            wiring.faults.append(f"{said}, and was given {value!r}")
            return {"value": []}
        elif is_symbolic(value):
            wiring.compare(value, list[takes], f"{where}: map() goes over")  # type: ignore[valid-type]
        else:
            return {"value": [json.loads(runs.codec.encode_argument(item, each)) for each in value]}
        return wiring.expression(value, deps, item)
    except PayloadError as exc:
        wiring.faults.append(f"{where}: {exc}")
        return {"value": []}


def plan_of_each(
    name: str,
    job: dict[str, Any],
    child: str | None,
    args: Sequence[str],
    bounds: dict[str, Any],
    source: Source | None = None,
    **more: Any,
) -> Plan:
    """The plan of the child run that a map, a loop or an emit is.

    Args:
        name: What its one node is called, which items, or rounds, are told apart by number of.
        job: How the job of each is enqueued.
        child: The plan of the child run that each is, if it is one.
        args: The parameters of the task, or workflow; the run has each as an argument.
        bounds: ``Over.spec`` under ``map``, or ``Rounds.spec`` under ``loop``.
        source: Of an emit, what gives its items; the run has its arguments beside those of the task, by name in two
            objects.
        **more: ``workflow``, ``on_failure`` and ``receipts`` of the plan; ``policies`` and ``children`` that it needs.
    """
    policies, children = more.pop("policies"), more.pop("children")
    of_each = {arg: {"input": arg, "path": []} if source is None else {"input": "each", "path": [arg]} for arg in args}
    node: dict[str, Any] = {"name": name, "job": job, "args": of_each}
    spec = {
        "format": FORMAT,
        "parameters": list(args) if source is None else ["each", "source"],
        "nodes": [node | ({"child": child} if child else {}), *([] if source is None else [source.node()])],
        "edges": [],
        "result": {"value": None},
        "effects": [],
        **bounds,
        **more,
    }
    return Plan.from_spec(spec, policies, {child: children[child]} if child else {})

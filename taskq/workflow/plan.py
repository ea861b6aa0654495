"""Plans: the frozen graph that a workflow's wiring comes to, named by the hash of its canonical text.

A plan is JSON. ``nodes`` stand in topological order; each has its name, how its job is enqueued, with ``child`` the
plan of the run that it stands for, and for each parameter of its task or workflow an expression:
``{"value": ...}``, ``{"input": name, "path": [...]}``, ``{"node": ix, "path": [...]}``,
``{"outcome": ix, "path": [...]}``, ``{"list": [...]}``, ``{"object": {...}}``,
``{"case": {"on": ..., "arms": [[value, expression], ...]}}`` or
``{"fork": {"on": ..., "arms": [[value, key, expression], ...]}}``, an object of the arms whose value is in the list;
of a node that is a map also ``{"results": ix, "path": [...]}``, and the same with ``outcomes`` and ``tally``.
A map is a node whose ``child`` is a plan with ``map``: its one node is run for each item of the list in the argument
``item``, at most ``most``, and ``at_once`` at a time. Where that has ``pages`` it is an emit: the second node gives the
list page by page, each asked for in the argument ``item`` of ``pages`` with the cursor that the one before it gave,
once no more than ``ahead`` items are open. A loop is one whose plan has ``loop``: its one node is run round after
round, at most ``most`` of them, begun ``within`` so many seconds; each takes in ``item`` what the one before gave,
until the part of that at ``path`` is one of ``ends``; ``exhausted`` says whether it fails where that does not come
(``fail``) or gives the last state (``give``).
``edges`` say what waits for what: with a policy for when the source fails, with ``when`` the value of its result for
which the target runs (``equals``), or which must be in it (``has``), with ``merge`` that the target takes the value of
a branch, or of a fork.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, cast

from taskq.errors import PlanError
from taskq.policy import ExecutionPolicy, check_name

__all__ = ["FORMAT", "Plan", "canonical", "cycle_of"]

FORMAT: Final = 1
MOST_NODES: Final = 10_000
MOST_EDGES: Final = 100_000
MOST_CIRCLES: Final = 20
"""So many are told at once."""
MOST_LEVELS: Final = 8
MOST_WITH_CHILDREN: Final = 100_000
_OF_NODES: Final = ("node", "outcome", "results", "outcomes", "tally")
"""Expressions that take what a node gives, by its number."""


def canonical(spec: Mapping[str, Any]) -> str:
    """The canonical text of a plan: JSON with sorted keys and no spaces."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class Plan:
    """A frozen graph.

    Attributes:
        spec: All of it, as JSON-able data.
        policies: What its jobs and effects point to, by id, where this process resolved it.
        children: The plans of its child runs, by hash, where this process has them.
    """

    spec: Mapping[str, Any]
    policies: Mapping[str, ExecutionPolicy]
    children: Mapping[str, Plan] = field(default_factory=dict)

    @classmethod
    def from_spec(
        cls,
        spec: Mapping[str, Any],
        policies: Mapping[str, ExecutionPolicy] | None = None,
        children: Mapping[str, Plan] | None = None,
    ) -> Plan:
        """Check a plan as a whole and put its nodes in topological order.

        Raises:
            PlanError: It cannot run; every fault is named.
        """
        plan = cls(_ordered(spec), dict(policies or {}), dict(children or {}))
        if plan.depth > MOST_LEVELS or plan.size > MOST_WITH_CHILDREN:
            fault = (
                f"with its child runs it has {plan.depth} levels and {plan.size} nodes at a time, the limits are "
                f"{MOST_LEVELS} and {MOST_WITH_CHILDREN}; declare a smaller at_once of its maps, or start() runs from "
                "a task"
            )
            raise PlanError(plan.workflow, [fault])
        return plan

    @cached_property
    def text(self) -> str:
        """Its canonical JSON."""
        return canonical(self.spec)

    @cached_property
    def hash(self) -> str:
        """``p`` and the SHA-256 of the text, in hexadecimal."""
        return f"p{hashlib.sha256(self.text.encode()).hexdigest()}"

    @property
    def workflow(self) -> str:
        """The name of its workflow."""
        return str(self.spec["workflow"])

    @cached_property
    def depth(self) -> int:
        """How many levels of child runs a run of it has below it."""
        return max((child.depth + 1 for child in self.children.values()), default=0)

    @cached_property
    def size(self) -> int:
        """How many nodes of it and of its child runs may have jobs at a time."""
        named = [node.get("child") for node in self.spec["nodes"]]
        size = len(named) + sum(self.children[each].size for each in named if each in self.children)
        if self.map is None:
            return size
        # Of pages one has a job at a time.
        pages = int("pages" in self.map)
        return int((size - pages) * min(self.map["most"], self.map["at_once"]) + pages)

    @property
    def map(self) -> Mapping[str, Any] | None:
        """Of the plan of a map: ``item``, ``most`` and ``at_once``; of an emit also ``pages``."""
        return cast("Mapping[str, Any] | None", self.spec.get("map"))

    @property
    def loop(self) -> Mapping[str, Any] | None:
        """Of the plan of a loop: ``item``, ``most``, ``path``, ``ends``, ``exhausted``, and it may have ``within``."""
        return cast("Mapping[str, Any] | None", self.spec.get("loop"))

    def whole(self) -> Iterator[Plan]:
        """The plans that must be stored before a run of it starts, and itself last."""
        for child in self.children.values():
            yield from child.whole()
        yield self

    @property
    def names(self) -> list[str]:
        """The names of its nodes, by number."""
        return [node["name"] for node in self.spec["nodes"]]

    def check(self) -> None:
        """Look at it as a whole.

        Raises:
            PlanError: It cannot run; every fault is named.
        """
        _ordered(self.spec)


def cycle_of(n: int, edges: Iterable[tuple[int, int]]) -> list[int] | None:
    """The nodes of a cycle, the first one again at the end; None where there is none.

    Args:
        n: How many nodes there are.
        edges: From which number to which.
    """
    after: list[list[int]] = [[] for _ in range(n)]
    for source, target in edges:
        after[source].append(target)
    state = [0] * n
    for root in range(n):
        if state[root]:
            continue
        path, iterators = [root], [iter(after[root])]
        state[root] = 1
        while path:
            found = next(iterators[-1], None)
            if found is None:
                state[path.pop()] = 2
                iterators.pop()
            elif state[found] == 1:
                return [*path[path.index(found) :], found]
            elif state[found] == 0:
                state[found] = 1
                path.append(found)
                iterators.append(iter(after[found]))
    return None


def _circles(n: int, edges: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
    """Cycles that have no node in common, until none is left among the other nodes."""
    for _ in range(MOST_CIRCLES):
        circle = cycle_of(n, edges)
        if circle is None:
            return
        yield circle
        gone = set(circle)
        edges = [(source, target) for source, target in edges if source not in gone and target not in gone]


def _ordered(spec: Mapping[str, Any]) -> dict[str, Any]:
    if shapeless := list(_shapeless(spec)):
        raise PlanError(str(spec.get("workflow", "?")) if isinstance(spec, Mapping) else "?", shapeless)
    faults: list[str] = []
    nodes: Sequence[Mapping[str, Any]] = spec.get("nodes", ())
    edges: Sequence[Mapping[str, Any]] = spec.get("edges", ())
    if spec.get("format") != FORMAT:
        faults.append(f"its format is {spec.get('format')!r}; this version of taskq knows format {FORMAT}")
    if not 1 <= len(nodes) <= MOST_NODES:
        faults.append(f"it has {len(nodes)} nodes; a plan has 1 to {MOST_NODES}: step() wires one")
    if len(edges) > MOST_EDGES:
        faults.append(f"it has {len(edges)} edges, the limit is {MOST_EDGES}; let a task collect in stages")
    names = [node.get("name") for node in nodes]
    for name in names:
        try:
            check_name("the name of a node", name)
        except ValueError as exc:
            faults.append(str(exc))
    for name, count in Counter(map(str, names)).items():
        if count > 1:
            faults.append(f"two nodes are named {name}; give one of them another: task.node('other name').step(...)")
    known: list[tuple[int, int]] = []
    for edge in edges:
        source, target, policy = edge.get("from"), edge.get("to"), edge.get("policy", "fail")
        unknown = [end for end in (source, target) if not _is_place(end, len(nodes))]
        if unknown:
            faults.append(f"an edge leads from {source!r} to {target!r}, and there is no node {unknown[0]!r}")
        else:
            known.append((cast(int, source), cast(int, target)))
        if policy not in ("fail", "collect", "skip"):
            faults.append(
                f"the policy of the edge from {source!r} to {target!r} is {policy!r}; there are fail, collect, skip"
            )
    for circle in _circles(len(nodes), known):
        faults.append(f"nodes wait for one another in a circle: {' -> '.join(str(names[ix]) for ix in circle)}")
    faults += _unbacked(spec, nodes, set(known))
    if faults:
        raise PlanError(str(spec.get("workflow", "?")), faults)
    if all(source < target for source, target in known):
        return {**spec, "edges": sorted(edges, key=canonical)}
    return _renumbered(spec, _topological(len(nodes), known))


def _shapeless(spec: object) -> Iterator[str]:
    """What cannot be looked at, since it has not the form of a plan."""
    if not isinstance(spec, Mapping):
        yield f"it is {type(spec).__name__}, not an object"
        return
    for kind in ("nodes", "edges"):
        listed = spec.get(kind, ())
        if not isinstance(listed, (list, tuple)):
            yield f"its {kind} are no list"
            continue
        for n, each in enumerate(listed):
            if not isinstance(each, Mapping):
                yield f"{kind} has at {n} no object"
            elif not isinstance(each.get("args", {}), Mapping):
                yield f"args of the node at {n} is no object"
    if not isinstance(spec.get("parameters", ()), (list, tuple)):
        yield "its parameters are no list"


def _is_place(value: object, n: int) -> bool:
    return type(value) is int and 0 <= value < n


def _unbacked(spec: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], known: set[tuple[int, int]]) -> list[str]:
    """What expressions take that is not there, or may not be there yet."""
    faults: list[str] = []
    parameters = spec.get("parameters", ())

    def look(said: str, expr: object, ix: int | None) -> None:
        for kind, at in _taken(expr):
            if kind == "input":
                if at not in parameters:
                    faults.append(f"{said} takes the argument {at!r}, which the workflow does not have")
            elif kind is None:
                faults.append(f"{said} is no expression of a plan: {canonical(at)[:80]}")
            elif not _is_place(at, len(nodes)):
                faults.append(f"{said} takes what node {at!r} gives, and there is no such node")
            elif ix is not None and (at, ix) not in known:
                faults.append(
                    f"{said} takes what node {nodes[at].get('name')} gives, and does not wait for it: add an edge"
                )

    for ix, node in enumerate(nodes):
        for parameter, expr in node.get("args", {}).items():
            look(f"{parameter} of node {node.get('name')}", expr, ix)
    if "result" in spec:
        look("the result", spec["result"], None)
    return faults


def _taken(expr: Any) -> Iterator[tuple[str | None, Any]]:
    """What an expression takes: inputs by name, nodes by number; with None what is no expression."""
    match expr:
        case {"value": _}:
            pass
        case {"input": at}:
            yield "input", at
        case {"node": at} | {"outcome": at} | {"results": at} | {"outcomes": at} | {"tally": at}:
            yield "node", at
        case {"list": [*parts]}:
            for each in parts:
                yield from _taken(each)
        case {"object": {**fields}}:
            for each in fields.values():
                yield from _taken(each)
        case {"case": {"on": on, "arms": [*arms]}}:
            yield from _taken(on)
            for arm in arms:
                match arm:
                    case [_, each]:
                        yield from _taken(each)
                    case _:
                        yield None, {"arm": arm}
        case {"fork": {"on": on, "arms": [*arms]}}:
            yield from _taken(on)
            for arm in arms:
                match arm:
                    case [_, str(), each]:
                        yield from _taken(each)
                    case _:
                        yield None, {"arm": arm}
        case _:
            yield None, {"expression": expr}


def _topological(n: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The nodes in an order in which every edge leads forward; among those that may come next, the lowest first."""
    import heapq

    left = [0] * n
    after: list[list[int]] = [[] for _ in range(n)]
    for source, target in edges:
        left[target] += 1
        after[source].append(target)
    ready = [ix for ix in range(n) if not left[ix]]
    order: list[int] = []
    while ready:
        ix = heapq.heappop(ready)
        order.append(ix)
        for target in after[ix]:
            left[target] -= 1
            if not left[target]:
                heapq.heappush(ready, target)
    return order


def _renumbered(spec: Mapping[str, Any], order: Sequence[int]) -> dict[str, Any]:
    place = {old: new for new, old in enumerate(order)}

    def moved(expr: Any) -> Any:
        match expr:
            case {"list": parts}:
                return {"list": [moved(each) for each in parts]}
            case {"object": parts}:
                return {"object": {key: moved(each) for key, each in parts.items()}}
            case {"case": {"on": on, "arms": arms}}:
                return {"case": {"on": moved(on), "arms": [[value, moved(each)] for value, each in arms]}}
            case {"fork": {"on": on, "arms": arms}}:
                return {"fork": {"on": moved(on), "arms": [[value, key, moved(each)] for value, key, each in arms]}}
        return {key: place[value] if key in _OF_NODES else value for key, value in expr.items()}

    def args(node: Mapping[str, Any]) -> dict[str, Any]:
        return {parameter: moved(expr) for parameter, expr in node.get("args", {}).items()}

    nodes = [{**spec["nodes"][old], "args": args(spec["nodes"][old])} for old in order]
    edges = [{**edge, "from": place[edge["from"]], "to": place[edge["to"]]} for edge in spec["edges"]]
    return {**spec, "nodes": nodes, "edges": sorted(edges, key=canonical), "result": moved(spec.get("result"))}

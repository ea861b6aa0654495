"""The wiring of a workflow: its function runs once on symbols, and what it calls is written down as a plan.

Each ``step`` adds a node; what its arguments are made of gives the edges. Faults are collected, so that all of them are
told at once.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from taskq.client.requests import Using, check_options
from taskq.codec import encode_any
from taskq.codec_types import decoder, readable
from taskq.effects import TerminalEffect
from taskq.errors import PayloadError, TaskQError, WiringError
from taskq.policy import ExecutionPolicy, check_name
from taskq.promises import lower, policies_of
from taskq.tasks import Task
from taskq.workflow.arms import STRANGE, Arm
from taskq.workflow.emits import Source, source_of
from taskq.workflow.fit import fits, misfit, shown, takes_of
from taskq.workflow.loops import Rounds
from taskq.workflow.maps import Over, item_of, items_of, plan_of_each
from taskq.workflow.nested import child_run
from taskq.workflow.symbols import Dep, Expr, Symbol, is_symbolic

if TYPE_CHECKING:
    from taskq.app import TaskQ
    from taskq.workflow.definition import Workflow
    from taskq.workflow.plan import Plan

__all__ = ["Wiring", "current", "going_on"]

LEVEL: Final = 3
"""The capability level that nodes require of a worker."""
_NOT_OF_NODES: Final = (
    "unique_key", "unique_scope", "unique_hold", "on_conflict", "idempotency_key", "idempotency_scope", "ordering_key",
    "run_at", "connection",
)  # fmt: skip
_current: ContextVar[Wiring | None] = ContextVar("taskq_wiring", default=None)


def going_on() -> Wiring | None:
    """The wiring that is going on, if one is."""
    return _current.get()


def current(what: str, otherwise: str = "") -> Wiring:
    """The wiring that is going on.

    Args:
        what: The call that needs one, for the error.
        otherwise: What to call where none was meant, for the same.

    Raises:
        WiringError: There is none.
    """
    wiring = _current.get()
    if wiring is None:
        raise WiringError(
            f"{what} stands outside of a workflow; call it in a function that @app.workflow decorates{otherwise}"
        )
    return wiring


@dataclass(slots=True)
class _Node:
    name: str
    runs: Task[..., Any] | Workflow[..., Any]
    spec: dict[str, Any]
    args: dict[str, Expr]
    compensate: dict[str, Any] | None
    child: str | None = None
    used: bool = False
    over: Over | Rounds | None = None
    bounds: dict[str, Any] | None = None
    source: Source | None = None
    each: tuple[dict[str, Any], str | None] = ({}, None)


@dataclass(slots=True)
class Wiring:
    """One run of a workflow function on symbols.

    Attributes:
        app: The application of the workflow.
        workflow: The name of the workflow.
        on_failure: What a failure does to the rest of its runs.
        receipts: How many receipts a run of it keeps.
        outer: The wiring in which this one is made, for a child run there.
        faults: What is wrong so far.
        policies: What the plan's jobs and effects point to, by id.
        children: The plans of child runs, by hash.
        within: The workflows whose functions run here, the outermost first.
        arms: The conditions of what is wired now, the outermost first.
    """

    app: TaskQ
    workflow: str
    on_failure: str = "cancel"
    receipts: int = 100
    outer: Wiring | None = None
    faults: list[str] = field(default_factory=list)
    policies: dict[str, ExecutionPolicy] = field(default_factory=dict)
    children: dict[str, Plan] = field(default_factory=dict)
    within: list[Workflow[..., Any]] = field(default_factory=list)
    arms: list[Arm] = field(default_factory=list)
    _nodes: list[_Node] = field(default_factory=list)
    _edges: dict[str, dict[str, Any]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Steps that are called in the block belong to this wiring."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    # Nodes ----------------------------------------------------------------------------------------------------------

    def add(
        self,
        runs: Task[..., Any] | Workflow[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str | None = None,
        after: Iterable[object] = (),
        compensate: TerminalEffect | None = None,
        options: Using | None = None,
        over: Over | Rounds | None = None,
    ) -> Symbol:
        """A node that runs a task, or is a run of a workflow; gives what stands for its result.

        With ``over`` it is a map, and does so for each item of a list, its first argument; or an emit, whose first
        argument is the pages of a source; or a loop, whose first argument is what it starts from.
        """
        ix = len(self._nodes)
        name = self._name(runs.name, name)
        where = f"node {name}"
        node = _Node(name, runs, {}, {}, None, over=over)
        self._nodes.append(node)
        returns = runs.codec.result_type
        symbol = Symbol(f"the result of {name}", {"node": ix, "path": []}, (Dep(ix),), returns, self)
        if isinstance(over, Over):
            symbol = Symbol(f"the results of {name}", {"results": ix, "path": []}, (Dep(ix),), list[returns], self)  # type: ignore[valid-type]
            self.faults += over.faults(where, compensate is not None)
        if runs._app is not self.app:
            kind = "task" if isinstance(runs, Task) else "workflow"
            self.faults.append(f"{where}: the {kind} {runs.name} belongs to another TaskQ; use {kind}s of the same one")
            return symbol
        if isinstance(runs, Task):
            node.spec = self.spec(runs, options, where)
        else:
            node.spec, node.child = child_run(self, runs, where)
        if over is not None:
            node.each = node.spec, node.child
            # Whoever has run the last of the items serves that queue; of a body's own, whoever runs the body.
            queue = self.within[0]._awaits_in or node.spec.get("queue", "default")
            node.spec = self.spec(self.within[0].await_task, {"queue": queue}, where)
        node.compensate = self._compensation(runs, compensate, where)
        try:
            bound = runs.codec.bind(args, kwargs)
            if not isinstance(runs, Task):
                # The plan is frozen, so what a later default would be is written down.
                parameters = inspect.signature(runs.fn).parameters
                bound = {p.name: p.default for p in parameters.values() if p.default is not p.empty} | bound
        except PayloadError as exc:
            self.faults.append(f"{where}: {exc}")
            bound = {}
        deps: list[Dep] = []
        item = None if over is None else item_of(runs)
        if isinstance(over, Rounds):
            node.bounds = over.spec(self, runs, item, where)
        emits = isinstance(over, Over) and over.emits
        for parameter, value in bound.items():
            take = None
            if emits and parameter == item:
                node.source = source_of(self, runs, item, value, deps, name)
                continue
            if isinstance(over, Over) and parameter == item:
                take = items_of(self, runs, parameter, value, deps, where)
            node.args[parameter] = take or self.argument(runs, parameter, value, deps, where)
        if node.source is not None:
            # Two tasks take them, whose parameters may be called the same.
            node.args = {"each": {"object": node.args}, "source": {"object": node.source.args}}
        for waited in after:
            if isinstance(waited, Symbol) and waited._deps:
                self.taken(waited, deps, "after", where)
            else:
                self.faults.append(f"{where}: after has {waited!r}; give results of steps")
        for dep in deps:
            self._edge(dep, ix)
        for arm in self.arms:
            when = {"path": list(arm.path), arm.test: arm.value}
            self._add_edge({"from": arm.ix, "to": ix, "policy": arm.policy, "when": when})
        return symbol

    def _name(self, of: str, given: str | None) -> str:
        if given is not None:
            try:
                return check_name("the name of a node", given)
            except ValueError as exc:
                self.faults.append(str(exc))
                return f"node-{len(self._nodes)}"
        count = self._counts[of] = self._counts.get(of, 0) + 1
        return of if count == 1 else f"{of}-{count}"

    def spec(self, task: Task[..., Any], options: Using | None, where: str) -> dict[str, Any]:
        """How the job of a node is enqueued; empty, with a fault, where it cannot be."""
        given = dict(options or {})
        for name in [name for name in _NOT_OF_NODES if name in given]:
            self.faults.append(f"{where}: {name} is for jobs that are enqueued, not for nodes; leave it out")
            del given[name]
        try:
            checked = check_options(given)  # type: ignore[arg-type]
            if checked.deadline_at is not None:
                raise WiringError("deadline is an instant; a plan serves many runs, so give a duration")
            spec = task._spec(checked)
        except (TaskQError, ValueError) as exc:
            self.faults.append(f"{where}: {exc}")
            return {}
        self.keep(spec.policy)
        values: dict[str, Any] = json.loads(spec.text)
        values.pop("has_effects", None)
        values["required_worker_schema"] = max(values.get("required_worker_schema") or 0, LEVEL)
        return values

    def _compensation(
        self, runs: Task[..., Any] | Workflow[..., Any], given: object, where: str
    ) -> dict[str, Any] | None:
        if given is None:
            return None
        if not isinstance(given, TerminalEffect):
            self.faults.append(f"{where}: compensate is {given!r}; give a TerminalEffect")
            return None
        try:
            [promised] = lower((given,), runs)
        except (TaskQError, ValueError) as exc:
            self.faults.append(f"{where}: {exc}")
            return None
        self.keep(promised.policy)
        return promised.spec() | {"undoes": True}

    def keep(self, policy: ExecutionPolicy | None) -> None:
        """Remember a policy that the plan points to, and those that it points to itself."""
        # What is promised has lost its policy only where it was read back from the database.
        for policy_id, each in policies_of(cast(ExecutionPolicy, policy)):
            self.policies[policy_id] = each

    # Workflows inside of workflows ---------------------------------------------------------------------------------

    def run(self, workflow: Workflow[..., Any], given: Mapping[str, Any]) -> Any:
        """Call the function of a workflow that is not within itself."""
        self.within.append(workflow)
        try:
            return workflow.fn(**given)
        finally:
            self.within.pop()

    # Values ---------------------------------------------------------------------------------------------------------

    def argument(
        self,
        runs: Task[..., Any] | Workflow[..., Any],
        parameter: str,
        value: object,
        deps: list[Dep],
        where: str,
    ) -> Expr:
        """The expression of what a parameter is given; null, with a fault, where it cannot be that."""
        try:
            if not is_symbolic(value):
                return {"value": json.loads(runs.codec.encode_argument(parameter, value))}
            expr = self.expression(value, deps, parameter)
        except PayloadError as exc:
            said = str(exc)
            if "Symbol cannot be written as JSON" in said:
                said = (
                    f"{exc.path} is the result of a step inside of an object; give a dict with it, or let a task "
                    "make it"
                )
            self.faults.append(f"{where}: {said}")
            return {"value": None}
        self.compare(value, runs.codec.declared(parameter), f"{where}: {parameter} takes")
        return expr

    def compare(self, value: object, takes: Any, said: str) -> None:
        """Note where a symbol, by itself or in a list, tuple or dict, does not fit the declared type of its place."""
        if isinstance(value, Symbol):
            if not fits(value._declared, takes):
                self.faults.append(f"{said} {shown(takes)}, and {value._of} is {shown(value._declared)}")
        elif is_symbolic(value):
            if (fault := misfit(takes, cast("Sequence[Any] | dict[str, Any]", value))) is not None:
                self.faults.append(f"{said} {shown(takes)}, and there is {fault}")
                return
            inner = takes_of(takes, value)
            parts = value.items() if isinstance(value, dict) else enumerate(cast("Sequence[Any]", value))
            for place, each in parts:
                self.compare(each, inner(place), f"{said} at [{place!r}]")
        elif takes is not Any:
            text = encode_any(value, "the value", text_keys=True)
            try:
                decoder(readable(self.workflow, "a constant", takes)).decode(text)
            except (ValueError, TaskQError):
                self.faults.append(f"{said} {shown(takes)}, and there is {text[:80]}")

    def expression(self, value: object, deps: list[Dep], path: str) -> Expr:
        """Where a value comes from; what it waits for is added to ``deps``.

        Raises:
            PayloadError: A constant in it cannot be stored, or it comes from another wiring.
        """
        if isinstance(value, Symbol):
            if value._wiring is not self:
                # Its number would be that of some other node here.
                raise PayloadError(f"{path}: {value._of} {STRANGE}", path=path)
            deps += value._deps
            return value._expr
        if not is_symbolic(value):
            return {"value": json.loads(encode_any(value, path, text_keys=True))}
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise PayloadError(f"{path} has a key that is no text; keys of an object are texts", path=path)
            return {"object": {key: self.expression(each, deps, f"{path}.{key}") for key, each in value.items()}}
        assert isinstance(value, (list, tuple))
        return {"list": [self.expression(each, deps, f"{path}[{n}]") for n, each in enumerate(value)]}

    def taken(self, value: object, deps: list[Dep], path: str, where: str) -> Expr:
        """The expression of a value; null with a fault where there is none."""
        try:
            return self.expression(value, deps, path)
        except PayloadError as exc:
            self.faults.append(f"{where}: {exc}")
            return {"value": None}

    def _edge(self, dep: Dep, target: int) -> None:
        self._nodes[dep.ix].used = True
        edge: dict[str, Any] = {"from": dep.ix, "to": target, "policy": dep.policy}
        self._add_edge({**edge, "merge": True} if dep.merge else edge)

    def _add_edge(self, edge: dict[str, Any]) -> None:
        self._nodes[edge["from"]].used = True
        self._edges[json.dumps(edge, sort_keys=True, ensure_ascii=False)] = edge

    # The whole ------------------------------------------------------------------------------------------------------

    def finish(self, result: object) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Expr]:
        """Nodes, edges and the expression of the result."""
        deps: list[Dep] = []
        try:
            expr = self.expression(result, deps, "the result")
        except PayloadError as exc:
            self.faults.append(f"the result of the workflow cannot be stored: {exc}")
            expr = {"value": None}
        for dep in deps:
            self._nodes[dep.ix].used = True
        for node in self._nodes:
            if not node.used and node.runs.codec.result_type not in (None, type(None)):
                kind = "task" if isinstance(node.runs, Task) else "workflow"
                self.faults.append(
                    f"node {node.name}: its result is never used; hand it on, return it, name it in after=, or "
                    f"annotate the {kind} {node.runs.name} as returning None"
                )
        nodes: list[dict[str, Any]] = []
        for ix, node in enumerate(self._nodes):
            if node.over is not None and not self.faults:
                self._child_of_each(ix, node, node.over)
            made: dict[str, Any] = {"name": node.name, "job": node.spec, "args": node.args}
            more = {"compensate": node.compensate, "child": node.child}
            nodes.append(made | {key: value for key, value in more.items() if value})
        edges: Sequence[dict[str, Any]] = [self._edges[key] for key in sorted(self._edges)]
        return nodes, list(edges), expr

    def _child_of_each(self, ix: int, node: _Node, over: Over | Rounds) -> None:
        collected = any(edge["from"] == ix and edge["policy"] == "collect" for edge in self._edges.values())
        job, child = node.each
        size = self.children[child].size if child else 1
        source, args = node.source, list(node.args)
        if isinstance(over, Over):
            item = cast(str, item_of(node.runs))
            cursor = None if source is None else source.cursor
            bounds = {"map": over.spec(item, node.compensate is not None, size, cursor)}
            if source is not None:
                args = [item, *node.args["each"]["object"]]
        else:
            bounds = {"loop": cast("dict[str, Any]", node.bounds)}
        plan = plan_of_each(
            node.name,
            job,
            child,
            args,
            bounds,
            source,
            workflow=f"{self.workflow}:{node.name}"[:128],
            on_failure="finish" if collected else self.on_failure,
            receipts=self.receipts,
            policies=self.policies,
            children=self.children,
        )
        node.child = plan.hash
        self.children[plan.hash] = plan

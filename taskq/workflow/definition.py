"""Workflows as people write them: a function that wires tasks, run once on symbols.

The wiring is typed like the code it stands for: a step gives, to a type checker, what its task returns, so that a wrong
argument is a wrong type. ``Workflow.plan`` is what the function comes to.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    get_args,
    overload,
)

from taskq.client.checks import MOST_BUDGET
from taskq.client.requests import Using
from taskq.codec import TaskCodec
from taskq.effects import TerminalEffect
from taskq.errors import InvalidPolicy, PlanError, ResultNotStorable, TaskDefinitionError, TaskQError, WiringError
from taskq.policy import check_name
from taskq.promises import lower
from taskq.workflow import arms as arms_
from taskq.workflow.emits import Page, Pages
from taskq.workflow.hidden import await_task, start_task
from taskq.workflow.loops import Rounds
from taskq.workflow.maps import Over
from taskq.workflow.nested import inline
from taskq.workflow.plan import FORMAT, Plan
from taskq.workflow.runs import Admission, BoundWorkflow, RunUsing, Starts
from taskq.workflow.symbols import Dep, HasChild, HasStep, Mapped, Outcome, Symbol, Tally, is_symbolic
from taskq.workflow.wiring import Wiring, current, going_on

if TYPE_CHECKING:
    from taskq.app import TaskQ
    from taskq.durations import Duration
    from taskq.tasks import Task

__all__ = [
    "BoundChild",
    "BoundNode",
    "Workflow",
    "WorkflowDecorator",
    "branch",
    "collect",
    "fork",
    "gather",
    "or_skip",
    "tally",
    "then",
]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
K = TypeVar("K")
S = TypeVar("S")


class BoundNode(Generic[P, R]):
    """A task with options for the node that ``step`` makes of it; made by ``task.node(...)``."""

    __slots__ = ("_after", "_compensate", "_name", "_options", "_over", "task")

    def __init__(
        self,
        task: Task[P, R],
        name: str | None,
        after: Iterable[object],
        compensate: TerminalEffect | None,
        options: Using,
        over: Over,
    ) -> None:
        self.task = task
        self._over = over
        self._name = name
        self._after = _several(after)
        self._compensate = compensate
        self._options = options

    def step(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """A node that runs the task; see ``Task.step``."""
        return cast(R, self._add("step", args, kwargs))

    def map(self: HasStep[A, Q, B], items: Sequence[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Mapped[B]:
        """A node that runs the task for each item of a list; see ``Task.map``."""
        return cast("Mapped[B]", cast("BoundNode[..., B]", self)._add("map", (items, *args), kwargs))

    def emit(self: HasStep[A, Q, B], pages: Pages[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Mapped[B]:
        """A node that runs the task for each item that a source gives page by page; see ``Task.emit``."""
        return cast("Mapped[B]", cast("BoundNode[..., B]", self)._add("emit", (pages, *args), kwargs))

    def pages(self: HasStep[C | None, Q, Page[A, C]], *args: Q.args, **kwargs: Q.kwargs) -> Pages[A]:
        """The task as a source, whose jobs have these options; see ``Task.pages``."""
        bound = cast("BoundNode[..., Any]", self)
        if bound._after or bound._compensate or bound._over != Over():
            said = (
                f"pages of {bound.task.name}: a source takes a name and the options of its jobs; give after, "
                "compensate and bounds to what is run for each item: task.node(...).emit(...)"
            )
            if (wiring := going_on()) is None:
                raise WiringError(said)
            wiring.faults.append(said)
        return Pages(bound.task, args, kwargs, bound._name, bound._options)

    def loop(
        self: HasStep[S, ..., S],
        start: S,
        *,
        until: Callable[[S], K],
        ends: Mapping[K, bool] | None = None,
        at_most: int,
        within: Duration | None = None,
        exhausted: Literal["fail", "give"] = "fail",
        also: Mapping[str, object] | None = None,
    ) -> S:
        """A node that runs the task round after round; see ``Task.loop``."""
        rounds = Rounds(until, ends, at_most, within, exhausted, {} if also is None else also)
        return cast(S, cast("BoundNode[..., S]", self)._add("loop", (start,), dict(rounds.also), rounds))

    def _add(self, how: str, args: tuple[Any, ...], kwargs: dict[str, Any], rounds: Rounds | None = None) -> Symbol:
        wiring = current(f"{self.task.name}.node().{how}()")
        _only_for_maps(wiring, how, self._over)
        return wiring.add(
            self.task,
            args,
            kwargs,
            name=self._name,
            after=self._after,
            compensate=self._compensate,
            options=self._options,
            over=_bounds(self._over, how) or rounds,
        )


class BoundChild(Generic[P, R]):
    """A workflow with options for the node that ``child`` makes of it; made by ``workflow.node(...)``."""

    __slots__ = ("_after", "_compensate", "_name", "_over", "workflow")

    def __init__(
        self,
        workflow: Workflow[P, R],
        name: str | None,
        after: Iterable[object],
        compensate: TerminalEffect | None,
        over: Over,
    ) -> None:
        self.workflow = workflow
        self._over = over
        self._name = name
        self._after = _several(after)
        self._compensate = compensate

    def child(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """A node that is a run of its own; see ``Workflow.child``."""
        return cast(R, self._add("child", args, kwargs))

    def map(self: HasChild[A, Q, B], items: Sequence[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Mapped[B]:
        """A run of its own for each item of a list; see ``Workflow.map``."""
        return cast("Mapped[B]", cast("BoundChild[..., B]", self)._add("map", (items, *args), kwargs))

    def emit(self: HasChild[A, Q, B], pages: Pages[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Mapped[B]:
        """A run of its own for each item that a source gives page by page; see ``Workflow.emit``."""
        return cast("Mapped[B]", cast("BoundChild[..., B]", self)._add("emit", (pages, *args), kwargs))

    def loop(
        self: HasChild[S, ..., S],
        start: S,
        *,
        until: Callable[[S], K],
        ends: Mapping[K, bool] | None = None,
        at_most: int,
        within: Duration | None = None,
        exhausted: Literal["fail", "give"] = "fail",
        also: Mapping[str, object] | None = None,
    ) -> S:
        """A node that runs the workflow round after round; see ``Workflow.loop``."""
        rounds = Rounds(until, ends, at_most, within, exhausted, {} if also is None else also)
        return cast(S, cast("BoundChild[..., S]", self)._add("loop", (start,), dict(rounds.also), rounds))

    def _add(self, how: str, args: tuple[Any, ...], kwargs: dict[str, Any], rounds: Rounds | None = None) -> Symbol:
        wiring = current(f"{self.workflow.name}.node().{how}()")
        _only_for_maps(wiring, how, self._over)
        return wiring.add(
            self.workflow,
            args,
            kwargs,
            name=self._name,
            after=self._after,
            compensate=self._compensate,
            over=_bounds(self._over, how) or rounds,
        )


def _bounds(over: Over, how: str) -> Over | None:
    return replace(over, emits=how == "emit") if how in ("map", "emit") else None


def _only_for_maps(wiring: Wiring, how: str, over: Over) -> None:
    if how not in ("map", "emit") and over != Over():
        cure = "give at_most to loop() itself" if how == "loop" else "leave them out"
        wiring.faults.append(
            f"at_once, at_most and ahead are the bounds of a map or an emit, and {how}() is none: {cure}"
        )
    elif how == "map" and over.ahead is not None:
        wiring.faults.append("ahead is a bound of emit(), and map() has its whole list: leave it out")


def _several(after: object) -> tuple[object, ...]:
    return tuple(after) if isinstance(after, Iterable) and not isinstance(after, (str, Symbol)) else (after,)


class Workflow(Starts[P, R]):
    """A registered workflow. Made by ``@app.workflow``.

    Attributes:
        name: Its name, as it stands on runs.
        fn: The function that wires it.
        codec: How its arguments and its result are stored.
        on_failure: What a failure does to the rest of a run, as declared: ``"cancel"`` or ``"finish"``; None, if
            nothing was said, stands for ``"cancel"``.
        effects: What a run promises when it ends.
        work_budget: How many bodies a run may begin in all, with the runs below it; None for no limit.
        start_task: The hidden task that starts a run of it, where a terminal effect does.
        await_task: The hidden task of nodes that stand for a run of it.
    """

    def __init__(
        self,
        app: TaskQ,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        on_failure: str | None = None,
        effects: Iterable[TerminalEffect] = (),
        receipts: int = 100,
        work_budget: int | None = None,
        localns: Mapping[str, Any] | None = None,
        awaits: tuple[Task[..., Any], str] | None = None,
    ) -> None:
        if not inspect.isfunction(fn) or inspect.iscoroutinefunction(fn):
            raise TaskDefinitionError(
                f"{fn!r} is not a plain function; a workflow is written with def, since it only wires tasks and waits "
                "for nothing"
            )
        if on_failure not in (None, "cancel", "finish"):
            raise InvalidPolicy(f"on_failure is {on_failure!r}; give 'cancel' or 'finish'")
        if isinstance(receipts, bool) or not isinstance(receipts, int) or not 1 <= receipts <= 10_000:
            raise InvalidPolicy(f"receipts is {receipts!r}; give a number from 1 to 10000")
        if work_budget is not None and (
            isinstance(work_budget, bool) or not isinstance(work_budget, int) or not 1 <= work_budget <= MOST_BUDGET
        ):
            raise InvalidPolicy(
                f"work_budget is {work_budget!r}; give how many bodies a run may begin in all, from 1 to "
                f"{MOST_BUDGET:,}, or None for no limit"
            )
        self._owner = app
        self.fn = fn
        self.name = check_name("the name of a workflow", fn.__name__ if name is None else name)
        self.codec = TaskCodec(fn, localns=localns)
        self.takes_context = False
        if self.codec.takes_context:
            raise TaskDefinitionError(
                f"workflow {self.name} takes a JobContext; only bodies have one: give it to the tasks that it wires"
            )
        for p in inspect.signature(fn).parameters.values():
            if p.kind is p.VAR_KEYWORD:
                raise TaskDefinitionError(
                    f"workflow {self.name} takes **{p.name}; a plan names every argument of a run: name them all, or "
                    "take a dict"
                )
        self.on_failure = on_failure
        self.effects = tuple(effects) if isinstance(effects, Iterable) else (effects,)
        if wrong := [each for each in self.effects if not isinstance(each, TerminalEffect)]:
            raise InvalidPolicy(f"effects has {wrong[0]!r}; give a list of TerminalEffect(...)")
        self._receipts = receipts
        self.work_budget = work_budget
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__
        self.__wrapped__ = fn
        self.start_task: Task[..., Any] = start_task(app, self)
        self.await_task: Task[..., Any] = await_task(app, self) if awaits is None else awaits[0]
        self._awaits_in = None if awaits is None else awaits[1]

    @property
    def _app(self) -> TaskQ:
        return self._owner

    @property
    def _codec(self) -> TaskCodec:
        return self.codec

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Inside of another workflow: wire this one's nodes there, as a part of the same run.

        Raises:
            WiringError: It is called outside of one (``start`` starts a run), or wires itself.
        """
        return cast(
            R, inline(current(f"{self.name}()", f", or start a run with {self.name}.start()"), self, args, kwargs)
        )

    def child(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Inside of another workflow: a node that is a run of this one. What it gives stands for the run's result.

        The run has a plan, receipts, effects and an end of its own; what becomes of it becomes of the node.

        Raises:
            WiringError: No workflow is being wired, or it would start itself.
        """
        return cast(R, current(f"{self.name}.child()").add(self, args, kwargs))

    def map(self: HasChild[A, Q, B], items: Sequence[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Mapped[B]:
        """Inside of another workflow: a run of this one for each item of a list that is known only at run time.

        Like ``Task.map``, with child runs as ``child`` makes them instead of jobs.

        Raises:
            WiringError: No workflow is being wired, or it would start itself.
        """
        of = cast("Workflow[..., B]", self)
        return cast("Mapped[B]", current(f"{of.name}.map()").add(of, (items, *args), kwargs, over=Over()))

    def emit(self: HasChild[A, Q, B], pages: Pages[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Mapped[B]:
        """Inside of another workflow: a run of this one for each item that a source gives page by page.

        Like ``Task.emit``, with child runs as ``child`` makes them instead of jobs.

        Raises:
            WiringError: No workflow is being wired, or it would start itself.
        """
        of = cast("Workflow[..., B]", self)
        over = Over(emits=True)
        return cast("Mapped[B]", current(f"{of.name}.emit()").add(of, (pages, *args), kwargs, over=over))

    def loop(
        self: HasChild[S, ..., S],
        start: S,
        *,
        until: Callable[[S], K],
        ends: Mapping[K, bool] | None = None,
        at_most: int,
        within: Duration | None = None,
        exhausted: Literal["fail", "give"] = "fail",
        also: Mapping[str, object] | None = None,
    ) -> S:
        """Inside of another workflow: a run of this one round after round, until one is the end.

        Like ``Task.loop``, with child runs as ``child`` makes them instead of jobs.

        Raises:
            WiringError: No workflow is being wired, or it would start itself.
        """
        of = cast("Workflow[..., S]", self)
        rounds = Rounds(until, ends, at_most, within, exhausted, {} if also is None else also)
        return cast(S, current(f"{of.name}.loop()").add(of, (start,), dict(rounds.also), over=rounds))

    def node(
        self,
        name: str | None = None,
        *,
        after: Iterable[object] = (),
        compensate: TerminalEffect | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
    ) -> BoundChild[P, R]:
        """This workflow with options for the node that ``child``, ``map``, ``emit`` or ``loop`` makes of it.

        Args:
            name: What the node is called; the workflow's name by default, with a number from the second on.
            after: Results of steps that it waits for without taking them.
            compensate: What undoes it, as for a task: runs when the outer run fails or is cancelled after this one has
                succeeded. ``Ref.arg`` is an argument of this workflow, ``Ref.result`` its result.
            at_once: Of a map, or an emit: how many of its child runs go on at a time; by default as many as have 20,000
                nodes together, at most 1,000.
            at_most: Of a map, or an emit: how many items there may be; 100,000 by default.
            ahead: Of an emit: how many items may be open, which have not ended, when the next page is asked for; as
                many as ``at_once`` by default.
        """
        return BoundChild(self, name, after, compensate, Over(at_once, at_most, ahead))

    @cached_property
    def plan(self) -> Plan:
        """What the function wires, checked as a whole.

        Raises:
            PlanError: It cannot run; every fault is named.
            WiringError: The function does what only a body can do.
        """
        wiring = Wiring(self._owner, self.name, self.on_failure or "cancel", self._receipts, outer=going_on())
        given = {
            p.name: Symbol(
                f"the argument {p.name}", {"input": p.name, "path": []}, (), self.codec.declared(p.name), wiring
            )
            for p in inspect.signature(self.fn).parameters.values()
        }
        with wiring.going_on():
            result = wiring.run(self, given)
        nodes, edges, expr = wiring.finish(result)
        if is_symbolic(result):
            wiring.compare(result, self.codec.result_type, "it returns")
        else:
            try:
                self.codec.encode_result(result)
            except ResultNotStorable as exc:
                wiring.faults.append(str(exc.__cause__ or exc))
        spec: dict[str, Any] = {
            "format": FORMAT,
            "workflow": self.name,
            "on_failure": self.on_failure or "cancel",
            "receipts": self._receipts,
            "parameters": list(given),
            "nodes": nodes,
            "edges": edges,
            "result": expr,
            "effects": self._promises(wiring),
        }
        if self.work_budget is not None:
            spec["work_budget"] = self.work_budget
        try:
            plan = Plan.from_spec(spec, wiring.policies, wiring.children)
        except PlanError as exc:
            raise PlanError(self.name, [*wiring.faults, *exc.faults]) from None
        if wiring.faults:
            raise PlanError(self.name, wiring.faults)
        return plan

    def _promises(self, wiring: Wiring) -> list[dict[str, Any]]:
        try:
            promised = lower(self.effects, self)
        except (TaskQError, ValueError) as exc:
            wiring.faults.append(str(exc))
            return []
        for each in promised:
            wiring.keep(each.policy)
        return [each.spec() for each in promised]

    @property
    def hidden(self) -> tuple[Task[..., Any], ...]:
        """The hidden tasks that are registered with it."""
        return (self.start_task, self.await_task)

    def using(self, **options: Unpack[RunUsing]) -> BoundWorkflow[P, R]:
        """The same workflow with options for the run that is started from what this gives; ``RunUsing`` lists them.

        Raises:
            InvalidRequest: An option is unknown, or its value is not valid.
        """
        return BoundWorkflow(self, options)

    def _admission(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Admission:
        text = self.codec.encode(args, kwargs)
        bound = json.loads(text)
        for p in inspect.signature(self.fn).parameters.values():
            # The plan is frozen, so what a later default would be is written down.
            if p.name not in bound:
                bound[p.name] = json.loads(self.codec.encode_argument(p.name, p.default))
        return Admission(self.plan, self.plan.policies, json.dumps(bound, ensure_ascii=False))

    def __repr__(self) -> str:
        return f"<Workflow {self.name}>"


class WorkflowDecorator(Protocol):
    """What ``@app.workflow(...)`` is applied to."""

    def __call__(self, fn: Callable[P, R], /) -> Workflow[P, R]:
        """The workflow that a function comes to."""


# What workflow functions call -----------------------------------------------------------------------------------------


@overload
def gather(values: list[T], /) -> list[T]: ...
@overload
def gather(a: A, b: B, /) -> tuple[A, B]: ...
@overload
def gather(a: A, b: B, c: C, /) -> tuple[A, B, C]: ...
@overload
def gather(a: A, b: B, c: C, d: D, /) -> tuple[A, B, C, D]: ...
@overload
def gather(a: T, b: T, c: T, d: T, e: T, /, *rest: T) -> tuple[T, ...]: ...
def gather(*values: Any) -> Any:
    """Wait for several: a list of results, or two and more of them, as one value that a step can take (fan-in)."""
    current("gather()")
    if len(values) == 1 and isinstance(values[0], Symbol):
        # A list already, by its type.
        return values[0]
    return list(values[0]) if len(values) == 1 and isinstance(values[0], (list, tuple)) else values


@overload
def collect(value: Mapped[T]) -> list[Outcome[T]]: ...  # type: ignore[overload-overlap]
@overload
def collect(value: T) -> Outcome[T]: ...
def collect(value: Any) -> Any:
    """What became of a step, whatever that is: the one that takes it runs although this one has failed.

    Of the results of a map: the outcome of each child, in the order of the items. Then no child stops the others, and
    of the failures the first hundred come with their whole error, those behind with its type and the beginning of its
    message. The list must be no larger than a payload may be; ``tally`` is what remains of any number.

    Raises:
        WiringError: The value is no result of a step.
    """
    if (of_map := _collected(value, "outcomes", lambda each: list[Outcome[each]])) is not None:  # type: ignore[valid-type]
        return of_map
    symbol = _whole_result(value, "collect()")
    expr = {"outcome": symbol._expr["node"], "path": []}
    kind = Outcome[symbol._declared]  # type: ignore[name-defined]
    deps = tuple(Dep(dep.ix, "collect") for dep in symbol._deps)
    return Symbol(f"the outcome of {symbol._of.removeprefix('the result of ')}", expr, deps, kind, symbol._wiring)


def tally(results: Mapped[Any]) -> Tally:
    """How many children of a map ended how, and the first hundred failures: like ``collect``, of any number of them.

    Raises:
        WiringError: The value is not what a map gives.
    """
    made = _collected(results, "tally", lambda _: Tally)
    if made is None:
        raise WiringError(f"tally() was given {results!r}; give it the whole results of a map")
    return cast(Tally, made)


def _collected(value: object, kind: str, declared: Callable[[Any], Any]) -> Symbol | None:
    """What a map has come to, if the value is what a map gives."""
    if not isinstance(value, Symbol) or "results" not in value._expr or value._expr["path"]:
        return None
    deps = tuple(Dep(dep.ix, "collect") for dep in value._deps)
    said = f"the {kind} of {value._of.removeprefix('the results of ')}"
    [of_each] = get_args(value._declared)
    return Symbol(said, {kind: value._expr["results"], "path": []}, deps, declared(of_each), value._wiring)


def or_skip(value: T) -> T:
    """The result of a step without which the one that takes it is skipped: its failure is no failure of the run.

    Raises:
        WiringError: The value is no result of a step.
    """
    if not isinstance(value, Symbol) or not value._deps:
        raise WiringError(f"or_skip() was given {value!r}; give it the result of a step")
    deps = tuple(Dep(dep.ix, "skip", dep.merge) for dep in value._deps)
    return cast(T, Symbol(value._of, value._expr, deps, value._declared, value._wiring))


def branch(on: K, arms: Mapping[K, Callable[[], R]]) -> R:
    """Run one of several arms, by the result of a step; gives the value of the arm that runs.

    Args:
        on: The result of a step, or a part of one, of a type whose values can be listed: bool, Literal or Enum.
        arms: For every value a function that wires what runs then; ``lambda: None`` for nothing.

    Raises:
        WiringError: ``on`` is no result of a step.
    """
    return cast(R, arms_.branch(current("branch()"), on, arms))


def fork(on: Collection[K], arms: Mapping[K, Callable[[], R]]) -> dict[K, R]:
    """Run some of several arms side by side, by a list that a step gives; gives the values of those that run, by key.

    Args:
        on: The result of a step, or a part of one: a list, or a set, of values that can be listed: Literal or Enum.
        arms: For every value that the list may have a function that wires what runs then; ``lambda: None`` for nothing.

    Raises:
        WiringError: ``on`` is no result of a step.
    """
    return cast("dict[K, R]", arms_.fork(current("fork()"), on, arms))


def then(value: A, task: Task[[A], B]) -> B:
    """The next of a chain: the step of a task that takes what came before."""
    return task.step(value)


def _whole_result(value: object, what: str) -> Symbol:
    if not isinstance(value, Symbol) or "node" not in value._expr or value._expr["path"]:
        raise WiringError(f"{what} was given {value!r}; give it the whole result of a step")
    return value

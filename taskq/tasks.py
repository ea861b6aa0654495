"""Tasks: registered functions with their options, and the ways to make jobs of them.

A task is typed like its function: ``enqueue`` takes the same arguments, without the ``JobContext``, and what
``await job.result()`` gives has the function's type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    Unpack,
    cast,
    overload,
)
from uuid import UUID

from taskq.client.checks import check_job_id
from taskq.client.requests import CallOptions, JobRequest, Spec, Using, build_spec, check_options
from taskq.codec import TaskCodec
from taskq.context import JobContext
from taskq.db.pools import refuse_in_event_loop
from taskq.errors import TaskDefinitionError, UnknownTask, WiringError
from taskq.handle import Job
from taskq.policy import ExecutionPolicy, PolicyLayer, check_name

if TYPE_CHECKING:
    from taskq.app import TaskQ
    from taskq.durations import Duration
    from taskq.effects import TerminalEffect
    from taskq.prepare import Preparation
    from taskq.workflow.definition import BoundNode
    from taskq.workflow.emits import Page, Pages
    from taskq.workflow.symbols import HasStep, Mapped

__all__ = ["AsyncTask", "BoundTask", "ReconciledDecorator", "SyncTask", "Task", "TaskDecorator"]

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
K = TypeVar("K")
S = TypeVar("S")
R_result = TypeVar("R_result")
_Async: TypeAlias = Coroutine[Any, Any, R_result]
_MAX_SPECS = 1000


class _Enqueues(Generic[P, R]):
    """What tasks and bound tasks have in common."""

    __slots__ = ()

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobRequest[R]:
        raise NotImplementedError

    @property
    def _app(self) -> TaskQ:
        raise NotImplementedError

    def job(self, *args: P.args, **kwargs: P.kwargs) -> JobRequest[R]:
        """A job that is to be enqueued together with others, by ``app.enqueue_many``.

        Raises:
            PayloadError: An argument is missing, unknown or cannot be stored.
        """
        return self._request(args, kwargs)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Enqueue one job with these arguments; give its handle.

        Raises:
            PayloadError: An argument is missing, unknown or cannot be stored; nothing was sent, and an open
                transaction stays usable.
            UniqueKeyHeld: The unique key is taken, and ``on_conflict="raise"``.
            IdempotencyConflict: The idempotency key was used for another request.
            ConfigurationError: No database is named.
            DatabaseUnavailable: The database cannot be reached.
        """
        return (await self._app.enqueue_many((self._request(args, kwargs),)))[0]

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Like ``enqueue``, for code without an event loop.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await task.enqueue(...)`` instead.
        """
        refuse_in_event_loop("enqueue_sync")
        return self._app.enqueue_many_sync((self._request(args, kwargs),))[0]


class Task(_Enqueues[P, R]):
    """A registered function. Made by ``@app.task``.

    Attributes:
        name: Its name, as it stands on jobs.
        fn: The function itself.
        is_async: Whether the function is ``async def``.
        takes_context: Whether its first parameter is its ``JobContext``.
        codec: How its arguments and results are stored.
        layer: What its declaration says about the policy.
        process: Whether workers run it in a child process.
        required_worker_schema: The capability level that its jobs require of a worker; None for none.
        reconcile_task: The hidden task that asks its reconcile hook; None without one.
        reconcile_steps: Those that ask the hooks of its side-effecting steps, by the name of the step.
        preparation: What is called before each attempt; None for nothing.
    """

    __slots__ = (
        "__dict__",
        "_owner",
        "_plain",
        "_specs",
        "codec",
        "fn",
        "is_async",
        "layer",
        "name",
        "preparation",
        "process",
        "reconcile_steps",
        "reconcile_task",
        "required_worker_schema",
        "takes_context",
    )

    def __init__(
        self,
        app: TaskQ,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        layer: PolicyLayer,
        localns: Mapping[str, Any] | None = None,
        process: bool = False,
    ) -> None:
        _check_function(fn)
        self._owner = app
        self.fn = fn
        self.name = _check_task_name(fn.__name__ if name is None else name)
        self.is_async = inspect.iscoroutinefunction(fn)
        self.codec = TaskCodec(fn, localns=localns)
        self.takes_context = self.codec.takes_context
        self.process = _check_process(self.name, process)
        self.layer = layer
        self.required_worker_schema = app.resolve_policy(layer).required_worker_schema
        self.reconcile_task: Task[..., Any] | None = None
        self.reconcile_steps: Mapping[str, Task[..., Any]] = {}
        self.preparation: Preparation | None = None
        self._plain = CallOptions()
        with suppress(UnknownTask):  # an effect may name a task that is defined further down
            self._plain_spec  # noqa: B018
        self._specs: dict[tuple[Any, ...], Spec] = {}
        self.__doc__ = fn.__doc__
        self.__module__ = fn.__module__
        self.__wrapped__ = fn

    @cached_property
    def policy(self) -> ExecutionPolicy:
        """The whole policy of a job that is enqueued without more.

        Raises:
            UnknownTask: An effect names a task that is not registered.
        """
        return self.policy_within(())

    def policy_within(self, chain: tuple[str, ...]) -> ExecutionPolicy:
        """The same for a task that is an effect: ``chain`` are the tasks whose effects led here."""
        known: ExecutionPolicy | None = self.__dict__.get("policy")
        return known or self._owner.resolve_policy(self.layer, owner=self, chain=chain)

    @cached_property
    def _plain_spec(self) -> Spec:
        return build_spec(self.name, self.policy, self._plain, self.required_worker_schema)

    def using(self, **options: Unpack[Using]) -> BoundTask[P, R]:
        """The same task with options for the jobs that are made from what this gives; ``Using`` lists them.

        Raises:
            InvalidPolicy: A value of the policy is not valid; the message names it.
            InvalidRequest: Another value is not valid.
        """
        return BoundTask(self, options)

    def _refuse_in_wiring(self) -> None:
        from taskq.workflow.wiring import going_on

        if going_on() is not None:
            raise WiringError(
                f"{self.name}() would run its function here and now, while a workflow is wired; {self.name}.step() is "
                "a node that runs it"
            )

    def step(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """In a workflow function: a node that runs this task. What it gives stands for the result.

        Arguments are values, results of other steps, their parts (``order.total``, ``rows[0]``), and lists, tuples and
        dicts of them.

        Raises:
            WiringError: No workflow is being wired.
        """
        from taskq.workflow.wiring import current

        return cast(R, current(f"{self.name}.step()").add(self, args, kwargs))

    def map(self: HasStep[A, Q, B], items: Sequence[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Mapped[B]:
        """In a workflow function: a job of this task for each item of a list that is known only at run time.

        What it gives stands for the list of their results, in the order of the items. The first failure stops the
        rest and fails the map, unless ``collect`` or ``tally`` takes what became of each.

        Args:
            items: A result that is a list, a part of one, an argument of the run, or a list. Each goes to the task's
                first parameter.
            *args: What all of the children take besides: values, and results of steps.
            **kwargs: The same by name.

        Raises:
            WiringError: No workflow is being wired.
        """
        from taskq.workflow.maps import Over
        from taskq.workflow.wiring import current

        task = cast("Task[..., B]", self)
        return cast("Mapped[B]", current(f"{task.name}.map()").add(task, (items, *args), kwargs, over=Over()))

    def emit(self: HasStep[A, Q, B], pages: Pages[A], /, *args: Q.args, **kwargs: Q.kwargs) -> Mapped[B]:
        """In a workflow function: a job of this task for each item that a source gives page by page.

        What it gives stands for the list of their results, in the order of the items, as that of ``map`` does. The
        items of a page, and the cursor of the next one, are on record in the transaction that ends the page: so none is
        lost or doubled, whoever is killed. No page is asked for while more than ``ahead`` items are open. A child that
        fails stops the source with the rest, unless ``collect`` or ``tally`` takes what became of each.

        Args:
            pages: What gives the items: ``source.pages(...)``. Each goes to the task's first parameter.
            *args: What all of the children take besides: values, and results of steps.
            **kwargs: The same by name.

        Raises:
            WiringError: No workflow is being wired.
        """
        from taskq.workflow.maps import Over
        from taskq.workflow.wiring import current

        task = cast("Task[..., B]", self)
        over = Over(emits=True)
        return cast("Mapped[B]", current(f"{task.name}.emit()").add(task, (pages, *args), kwargs, over=over))

    def pages(self: HasStep[C | None, Q, Page[A, C]], *args: Q.args, **kwargs: Q.kwargs) -> Pages[A]:
        """This task as a source, whose pages ``emit`` goes over, in a workflow function or in a durable body.

        The task's first parameter is the cursor: None at first, then what it gave with the page before. Each page is a
        job of it, with the options of the task. ``task.node("name", priority=...).pages(...)`` gives others.

        Args:
            *args: What it takes after the cursor, the same for every page: values, and in a workflow results of steps.
            **kwargs: The same by name.
        """
        from taskq.workflow.emits import Pages

        return Pages(cast("Task[..., Any]", self), args, kwargs)

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
        """In a workflow function: this task round after round, each with what the one before gave, until one ends it.

        What it gives stands for the state that the last round gave. Each round is a job, on record with its state. A
        round that fails fails the loop. ``LoopExhausted`` is what the node fails with if the bounds come first.

        Args:
            start: What the first round takes: the task's first parameter, whose type is the task's result.
            until: Gives the part of a state that is looked at after each round, of a type whose values can be listed:
                ``until=lambda draft: draft.good``. A bool is the end when it is true.
            ends: For every value of that part, where it is no bool, whether it is the end.
            at_most: How many rounds there may be, at most 10,000.
            within: No round begins later after the loop has begun. Time in which a round is held for a signal does
                not count; a round that goes on is not stopped.
            exhausted: What becomes of a loop that is not done by then: ``"fail"``, or ``"give"`` the last state, which
                a ``branch`` on that part tells from one that is done.
            also: What the task takes besides, by name, the same in every round: values, and results of steps.

        Raises:
            WiringError: No workflow is being wired, or ``until`` computes with the state.
        """
        from taskq.workflow.loops import Rounds
        from taskq.workflow.wiring import current

        task = cast("Task[..., S]", self)
        rounds = Rounds(until, ends, at_most, within, exhausted, {} if also is None else also)
        return cast(S, current(f"{task.name}.loop()").add(task, (start,), dict(rounds.also), over=rounds))

    def node(
        self,
        name: str | None = None,
        *,
        after: Iterable[object] = (),
        compensate: TerminalEffect | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
        **options: Unpack[Using],
    ) -> BoundNode[P, R]:
        """This task with options for the node that ``step``, ``map``, ``emit`` or ``loop`` makes of it.

        Args:
            name: What the node is called; the task's name by default, with a number from the second on.
            after: Results of steps that it waits for without taking them.
            compensate: What undoes it: runs, the last node's first, when the run fails or is cancelled after it has
                succeeded. Of a map, or an emit, each child that has succeeded is undone, of a loop each round.
            at_once: Of a map, or an emit: how many children have jobs at a time; 1,000 by default.
            at_most: Of a map, or an emit: how many items there may be, else the node fails; 100,000 by default, with
                ``compensate`` 10,000.
            ahead: Of an emit: how many items may be open, which have not ended, when the next page is asked for; as
                many as ``at_once`` by default.
            **options: Of its job, as ``using`` takes them, but for those of one enqueue: keys, instants, connection.
        """
        from taskq.workflow.definition import BoundNode
        from taskq.workflow.maps import Over

        return BoundNode(self, name, after, compensate, options, Over(at_once, at_most, ahead))

    def handle(self, job_id: UUID | str) -> Job[R]:
        """The handle of a job of this task that was enqueued before, elsewhere perhaps. Asks the database nothing.

        Raises:
            InvalidRequest: What was given is not the id of a job.
        """
        return Job(self._owner, check_job_id(job_id), task=self)

    @property
    def _app(self) -> TaskQ:
        return self._owner

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobRequest[R]:
        return JobRequest(self, self._plain_spec, self._plain, self.codec.encode(args, kwargs))

    def _spec(self, options: CallOptions) -> Spec:
        key = options.spec_key()
        if key == self._plain.spec_key():
            return self._plain_spec
        spec = self._specs.get(key)
        if spec is None:
            policy = self._owner.resolve_policy(options.layer, self.layer, owner=self)
            spec = build_spec(self.name, policy, options, self.required_worker_schema)
            if len(self._specs) >= _MAX_SPECS:
                self._specs.clear()
            self._specs[key] = spec
        return spec

    def __repr__(self) -> str:
        return f"<Task {self.name}>"


class AsyncTask(Task[P, R]):
    """A task whose function is ``async def``."""

    __slots__ = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Run the function here and now, without any job; a ``JobContext`` is made up for it.

        Raises:
            WiringError: A workflow is being wired; ``step`` adds a node to it.
        """
        self._refuse_in_wiring()
        if self.takes_context:
            args = (JobContext.local(self.name, queue=self.policy.queue), *args)  # type: ignore[assignment]
        return cast(Coroutine[Any, Any, R], self.fn(*args, **kwargs))


class SyncTask(Task[P, R]):
    """A task whose function is a plain ``def``; workers run it in a thread, or with ``process=True`` in a child."""

    __slots__ = ()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the function here and now, without any job; a ``JobContext`` is made up for it.

        Raises:
            WiringError: A workflow is being wired; ``step`` adds a node to it.
        """
        self._refuse_in_wiring()
        if self.takes_context:
            args = (JobContext.local(self.name, queue=self.policy.queue), *args)  # type: ignore[assignment]
        return cast(R, self.fn(*args, **kwargs))


class BoundTask(_Enqueues[P, R]):
    """A task with options for its jobs; made by ``task.using(...)``."""

    __slots__ = ("_given", "_options", "_spec", "task")

    def __init__(self, task: Task[P, R], given: Using) -> None:
        self.task = task
        self._given = given
        self._options = check_options(given)
        self._spec = task._spec(self._options)

    def using(self, **options: Unpack[Using]) -> BoundTask[P, R]:
        """More options on top of these; the new ones win."""
        return BoundTask(self.task, {**self._given, **options})

    @property
    def _app(self) -> TaskQ:
        return self.task._app

    def _request(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JobRequest[R]:
        return JobRequest(self.task, self._spec, self._options, self.task.codec.encode(args, kwargs))

    def __repr__(self) -> str:
        return f"<BoundTask {self.task.name} {dict(self._given)!r}>"


class TaskDecorator(Protocol):
    """What ``@app.task(...)`` is applied to: an async or plain function, with or without a ``JobContext`` first."""

    @overload
    def __call__(self, fn: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: Callable[Concatenate[JobContext, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> SyncTask[P, R]: ...


class ReconciledDecorator(Protocol[R_result]):
    """What ``@app.task(..., reconcile=fn)`` is applied to: a function that returns what the hook says had happened."""

    @overload
    def __call__(self, fn: Callable[Concatenate[JobContext, P], _Async[R_result]], /) -> AsyncTask[P, R_result]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: Callable[P, _Async[R_result]], /) -> AsyncTask[P, R_result]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn: Callable[Concatenate[JobContext, P], R_result], /) -> SyncTask[P, R_result]: ...
    @overload
    def __call__(self, fn: Callable[P, R_result], /) -> SyncTask[P, R_result]: ...


def _check_function(fn: object) -> None:
    if isinstance(fn, Task):
        raise TaskDefinitionError(f"{fn.name} is a task already; decorate the function once")
    if isinstance(fn, (staticmethod, classmethod)) or not inspect.isfunction(fn):
        raise TaskDefinitionError(
            f"{fn!r} is not a plain function; a task is a function written with def or async def, since workers find "
            "it by name"
        )
    if fn.__name__ == "<lambda>":
        raise TaskDefinitionError("a lambda has no name to find it by; write the task with def or async def")
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise TaskDefinitionError(f"task {fn.__name__} is a generator; return a value instead of yielding")


def _check_task_name(name: str) -> str:
    return check_name("the name of a task", name)


def _check_process(name: str, process: object) -> bool:
    if not isinstance(process, bool):
        raise TaskDefinitionError(f"task {name}: process is {process!r}; give True or False")
    return process

"""What a body is told about its own attempt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, Protocol, TypeVar, overload
from uuid import UUID, uuid4

import msgspec

from taskq.durations import Duration
from taskq.effects import EffectOrigin
from taskq.errors import CheckpointNotLoaded, JobCancelled
from taskq.idempotency import idempotency_key, step_key
from taskq.telemetry import get_logger

if TYPE_CHECKING:
    from taskq.children import Child, Start
    from taskq.durable import Steps
    from taskq.effect_steps import Attempt
    from taskq.outcomes import TimedOut
    from taskq.steps import Key, Offer, Record
    from taskq.tasks import BoundTask, Task
    from taskq.transaction import SyncTransaction, Transaction
    from taskq.workflow.emits import Pages
    from taskq.workflow.runs import Starts
    from taskq.workflow.shapes import Gives
    from taskq.workflow.symbols import HasJob, HasRun, Outcome, Tally

__all__ = ["JobContext"]

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
P = ParamSpec("P")


StepClass = Literal["pure", "idempotent", "side_effecting"]


class Saved(NamedTuple):
    """A checkpoint as this attempt knows it; version 0 stands for none."""

    version: int
    value: Any


class BodyServices(Protocol):
    """What a context asks of whoever runs its body: a worker, or a plain call (``taskq.plain_calls``)."""

    async def assert_owned(self, ctx: JobContext) -> None:
        """See ``JobContext.assert_owned``."""

    async def save(self, ctx: JobContext, value: Any, version: int | None) -> Saved:
        """See ``JobContext.checkpoint``."""

    async def load(self, ctx: JobContext, kind: Any) -> Saved:
        """See ``JobContext.load_checkpoint``; the value is of that type."""

    async def load_steps(self, ctx: JobContext) -> dict[Key, Record]:
        """What earlier attempts of this generation have recorded."""

    async def record_step(self, ctx: JobContext, key: Key, text: str) -> None:
        """Record what a step gave, as JSON text."""

    async def start_step(self, ctx: JobContext, key: Key) -> Record | datetime:
        """Commit the start of a side-effecting step, and give when that was; or what stands on record of it."""

    async def end_step(self, ctx: JobContext, key: Key, at: datetime, text: str | None, error: str | None) -> None:
        """Record what came of that start: a value or an error, as JSON text; with neither, that it did not happen."""

    async def begin_sleep(self, ctx: JobContext, key: Key, seconds: float) -> float:
        """Record when a sleep ends, once; give the seconds that are left."""

    async def begin_wait(self, ctx: JobContext, key: Key, seconds: float | None) -> Offer:
        """Record what the body waits for, once; give what there is for it."""

    async def take_signal(self, ctx: JobContext, key: Key, signal: int, refused: str | None) -> bool:
        """Give a signal to a wait, or note why it fits nothing; False where it must be asked for anew."""

    async def begin_child(self, ctx: JobContext, key: Key, start: Start, new: bool) -> Child:
        """Start a child, once, or look at it; give how it stands. ``new``: nothing is on record of it."""

    async def leave_steps(self, ctx: JobContext, left: Sequence[Key]) -> None:
        """Note which recorded steps a body that has returned did not ask for."""

    def transaction(self, ctx: JobContext) -> AbstractAsyncContextManager[Transaction]:
        """See ``JobContext.transaction``."""

    def transaction_sync(self, ctx: JobContext) -> AbstractContextManager[SyncTransaction]:
        """See ``JobContext.transaction_sync``."""

    def wait(self, call: str, asked: Coroutine[Any, Any, T]) -> T:
        """Wait in a thread for what one of the above answers; ``call`` is its name for complaints."""


class JobContext:
    """One attempt, as its body sees it: declare a first parameter ``ctx: JobContext`` to get it. Read-only.

    Attributes:
        job_id: The job.
        task: The task's name.
        queue: The queue that it was claimed from.
        attempt: The number of this try, from 1: attempts used up, plus one.
        max_attempts: How many failures of the body end the job.
        claim_epoch: How often the job has been claimed; with ``job_id`` it names the attempt.
        generation: How often the finished job has been reopened.
        worker_id: The worker that runs it; None in a plain call.
        deadline: The instant after which no attempt starts, or None.
        cancel_requested: Whether cancelling was asked for. An async body is cancelled by itself; a sync body looks
            here, or calls ``raise_if_cancelled``, between two steps.
    """

    __slots__ = (
        "_facts",
        "_key_generation",
        "_logger",
        "_meta",
        "_run",
        "_saved",
        "_services",
        "_steps",
        "_suspends",
        "attempt",
        "cancel_requested",
        "claim_epoch",
        "deadline",
        "generation",
        "job_id",
        "max_attempts",
        "queue",
        "task",
        "worker_id",
    )

    def __init__(
        self,
        *,
        job_id: UUID,
        task: str,
        queue: str = "default",
        attempt: int = 1,
        max_attempts: int = 1,
        claim_epoch: int = 1,
        generation: int = 0,
        worker_id: UUID | None = None,
        deadline: datetime | None = None,
        meta: str | Mapping[str, Any] | None = None,
        key_generation: int | None = None,
        services: BodyServices | None = None,
        suspends: bool = True,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.job_id = job_id
        self.task = task
        self.queue = queue
        self.attempt = attempt
        self.max_attempts = max_attempts
        self.claim_epoch = claim_epoch
        self.generation = generation
        self.worker_id = worker_id
        self.deadline = deadline
        self.cancel_requested = False
        self._meta = meta
        self._logger: Any = None
        self._key_generation = key_generation
        self._services = services
        self._saved: Saved | None = None
        self._steps: Steps | None = None
        self._run: Attempt | None = None
        self._suspends = suspends
        self._facts = facts

    @classmethod
    def local(cls, task: str, *, queue: str = "default") -> JobContext:
        """The context of a plain call, outside of any worker: a job id of its own, attempt 1 of 1."""
        return cls(job_id=uuid4(), task=task, queue=queue)

    @property
    def meta(self) -> Mapping[str, Any]:
        """The data that travels with the job, as it was given at enqueue; empty if none was."""
        if isinstance(self._meta, str):
            self._meta = msgspec.json.decode(self._meta)
        return self._meta if isinstance(self._meta, Mapping) else {}

    @property
    def facts(self) -> Mapping[str, Any]:
        """What preparations of its run have found out, of a plain job its own: as it stood once this one was prepared.

        Empty where the task has no preparation (``prepare=``).
        """
        return {} if self._facts is None else self._facts

    @property
    def effect(self) -> EffectOrigin | None:
        """What this job is the terminal effect of; None where it is none."""
        return EffectOrigin.of(self.meta)

    @property
    def idempotency_key(self) -> str:
        """A key for outside providers, so that they can refuse a repetition.

        The same for every attempt of this job: its id as text, and ``:gN`` behind it where the job was reopened after
        a terminal effect with ``undoes=True`` had undone it, for then the same work is a new effect. Inside of a step's
        function it is the step's: with the step's name behind it, and ``#n`` from the second call of one name on.
        """
        key = idempotency_key(self.job_id, self._key_generation)
        step = None if self._steps is None else self._steps.current
        return key if step is None else step_key(key, step.name, step.occurrence)

    @property
    def logger(self) -> Any:
        """A structlog logger that carries ``job_id``, ``task`` and ``claim_epoch``."""
        if self._logger is None:
            self._logger = get_logger("job").bind(
                job_id=str(self.job_id), task=self.task, claim_epoch=self.claim_epoch, attempt=self.attempt
            )
        return self._logger

    def raise_if_cancelled(self) -> None:
        """For sync bodies, which cannot be interrupted: stop here if cancelling was asked for.

        Raises:
            JobCancelled: It was.
        """
        if self.cancel_requested:
            raise JobCancelled(self.job_id)

    # For dangerous work ---------------------------------------------------------------------------------------------

    async def assert_owned(self) -> None:
        """Go on only if the attempt is still this worker's, by the worker's own clock and by the database.

        One short statement: cheap enough before each call to the outside. It proves this instant and no more, so give
        the outside ``idempotency_key`` as well. In a plain call it passes.

        Raises:
            FencedOut: The attempt was taken away, or the lease has run out: stop.
            OwnershipNotProven: The database could not be asked in time; nobody knows.
        """
        await self._bodies.assert_owned(self)

    def assert_owned_sync(self) -> None:
        """Like ``assert_owned``, for plain functions.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await ctx.assert_owned()`` instead.
        """
        self._bodies.wait("assert_owned_sync", self._bodies.assert_owned(self))

    async def checkpoint(self, value: Any, *, version: int | None = None) -> int:
        """Save how far the body has come; the next attempt finds it, whatever ended this one.

        It replaces the checkpoint of that version and no other, under the fence. The same value sent again for a
        version that this attempt has replaced already is answered as a replay, so it may be repeated.

        Args:
            value: JSON's own values, dataclasses, msgspec structs, dates and so on; 8 MiB of JSON at most.
            version: The version to replace, 0 for none yet; by default the one that this context has loaded or saved
                last, or the one that stands if it has done neither.

        Returns:
            The version that stands now.

        Raises:
            CheckpointConflict: Another version stands; the error has it, and what it holds.
            FencedOut: The attempt is over, or not this worker's any more.
            PayloadError: The value cannot be stored; nothing was sent.
            DatabaseUnavailable: The database cannot be reached; it may have been saved.
        """
        self._saved = await self._bodies.save(self, value, version)
        return self._saved.version

    def checkpoint_sync(self, value: Any, *, version: int | None = None) -> int:
        """Like ``checkpoint``, for plain functions.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await ctx.checkpoint(...)`` instead.
        """
        return self._bodies.wait("checkpoint_sync", self.checkpoint(value, version=version))

    @overload
    async def load_checkpoint(self) -> Any: ...
    @overload
    async def load_checkpoint(self, kind: type[T]) -> T | None: ...
    async def load_checkpoint(self, kind: Any = Any) -> Any:
        """What was saved last, by this attempt or one before; None if nothing was. Sets ``checkpoint_version``, too.

        Args:
            kind: The type to give it back as; by default in JSON's own types.

        Raises:
            FencedOut: The attempt is over, or not this worker's any more.
            PayloadError: What is stored does not fit the type.
            DatabaseUnavailable: The database cannot be reached.
        """
        self._saved = await self._bodies.load(self, kind)
        return self._saved.value

    @overload
    def load_checkpoint_sync(self) -> Any: ...
    @overload
    def load_checkpoint_sync(self, kind: type[T]) -> T | None: ...
    def load_checkpoint_sync(self, kind: Any = Any) -> Any:
        """Like ``load_checkpoint``, for plain functions.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await ctx.load_checkpoint()`` instead.
        """
        return self._bodies.wait("load_checkpoint_sync", self.load_checkpoint(kind))

    @property
    def checkpoint_value(self) -> Any:
        """What ``load_checkpoint`` or ``checkpoint`` gave or took last; None if nothing was ever saved.

        Raises:
            CheckpointNotLoaded: Neither was called in this attempt.
        """
        return self._known.value

    @property
    def checkpoint_version(self) -> int:
        """The version of that, 0 if nothing was ever saved.

        Raises:
            CheckpointNotLoaded: Neither was called in this attempt.
        """
        return self._known.version

    # Durable bodies --------------------------------------------------------------------------------------------------

    @overload
    async def step(
        self, name: str, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    async def step(self, name: str, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def step(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def step(
        self, name: str, fn: Callable[..., Any], /, *args: Any, effect_class: StepClass, **kwargs: Any
    ) -> Any: ...
    async def step(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call ``fn`` once for this job, whatever ends its attempts, and give what it returned.

        What it returned is recorded under the fence. A later attempt (after a failure, a lost worker, a sleep) is given
        the record, as the type that ``fn`` is annotated to return, and does not call it. What it raises is not
        recorded, and goes through the body. Where an attempt ends between the call and the record the next calls it
        again, so give the outside world ``ctx.idempotency_key``, which is the step's own inside of ``fn``. A plain
        function blocks the event loop while it runs: ``ctx.step("read", asyncio.to_thread, read, path)`` does not.

        A step is found again by its name and by which call of that name it is: the body must ask for its steps in the
        same order each time, and for steps that run beside each other under different names.

        Args:
            name: 1 to 128 printable ASCII characters without spaces, such as ``charge`` or ``page:7``; no ``#``.
            fn: A function, async or plain.
            args: Its arguments; they are not recorded.
            kwargs: More of them, but for ``effect_class``, a keyword of this call: ``"idempotent"``, ``"pure"``, or
                ``"side_effecting"``, which has its start committed before ``fn`` is called and is not called again
                until somebody has told what became of it; one of those at a time.

        Raises:
            StepRefused: It cannot be a step; nothing was called.
            StepMisfit: What is recorded does not fit what ``fn`` returns now; it was not called.
            StepNotStorable: What ``fn`` gave cannot be stored; it has run.
            StepConflict: Another value stands on record for it.
            StepFailed: It is side-effecting, and has failed, now or in an earlier attempt.
            EffectStartNotProven: It is side-effecting, and may not be called.
            JobCancelled: It is side-effecting, and somebody has asked to cancel the job before.
            FencedOut: The attempt is over, or not this worker's any more.
            DatabaseUnavailable: The database cannot be reached; it may have been recorded.
        """
        return await self._own_steps.step(name, fn, args, kwargs)

    @overload
    def step_sync(self, name: str, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def step_sync(
        self, name: str, fn: Callable[..., Any], /, *args: Any, effect_class: StepClass, **kwargs: Any
    ) -> Any: ...
    def step_sync(self, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Like ``step``, for plain functions; ``fn`` is one, too, and runs in the thread of the body.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await ctx.step(...)`` instead.
        """
        return self._own_steps.step_sync(name, fn, args, kwargs)

    async def sleep(self, duration: Duration, name: str = "sleep") -> None:
        """Go on after that time, whatever happens to this worker meanwhile; holds no slot.

        The instant is recorded once, by the database's clock. Where more than about a second is left the attempt ends
        (``Suspended`` goes through the body; outcome ``suspended``, no attempt is used up), and the job is pending
        until then. The next attempt runs the body from its beginning, and passes here.

        Args:
            duration: ``"2h"``, seconds, or a timedelta; with a deadline before its end the job fails.
            name: What it is recorded under, by the rules of ``step``; an operator sees it.

        Raises:
            Suspended: To end the attempt; let it pass.
            StepRefused: It cannot be: inside of a step's function, in a side-effecting task, or by that name.
            InvalidDuration: The duration cannot be read.
            FencedOut: The attempt is over, or not this worker's any more.
            DatabaseUnavailable: The database cannot be reached; it may have been recorded.
        """
        await self._own_steps.sleep(name, duration)

    def sleep_sync(self, duration: Duration, name: str = "sleep") -> None:
        """Like ``sleep``, for plain functions.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await ctx.sleep(...)`` instead.
        """
        self._own_steps.sleep_sync(name, duration)

    @overload
    async def wait_for(self, name: str, kind: type[T], *, timeout: None = None) -> T: ...
    @overload
    async def wait_for(self, name: str, kind: type[T], *, timeout: Duration) -> T | TimedOut: ...
    @overload
    async def wait_for(self, name: str, kind: Any = Any, *, timeout: Duration | None = None) -> Any: ...
    async def wait_for(self, name: str, kind: Any = Any, *, timeout: Duration | None = None) -> Any:
        """Wait for a signal of that name to this job, and give its payload; holds no slot.

        Signals are kept from when they are sent, and taken in that order, each once: taking one and recording that are
        one. Where none is there the attempt ends (``Suspended`` goes through the body), and the job is held
        until one comes or the time is up; the next attempt runs the body from its beginning, and is given it here.
        A payload that does not fit is refused, which stands on record, and the wait goes on.

        Args:
            name: The signal, as in ``job.signal(name, payload)``.
            kind: The type of the payload, or a union of types that JSON can tell apart; by default JSON's own types.
            timeout: ``"3d"``, seconds, or a timedelta, from when the wait began; None for no limit.

        Returns:
            The payload, or ``TimedOut()`` where the time was up first.

        Raises:
            Suspended: To end the attempt; let it pass.
            StepRefused: It cannot be, as with ``sleep``; or ``kind`` is none that JSON can hold.
            StepMisfit: What was taken by an earlier attempt does not fit ``kind`` now.
            InvalidDuration: The timeout cannot be read.
            FencedOut: The attempt is over, or not this worker's any more.
            DatabaseUnavailable: The database cannot be reached; it may have been taken, and is given again then.
        """
        return await self._own_steps.wait_for(name, kind, timeout)

    @overload
    def wait_for_sync(self, name: str, kind: type[T], *, timeout: None = None) -> T: ...
    @overload
    def wait_for_sync(self, name: str, kind: type[T], *, timeout: Duration) -> T | TimedOut: ...
    @overload
    def wait_for_sync(self, name: str, kind: Any = Any, *, timeout: Duration | None = None) -> Any: ...
    def wait_for_sync(self, name: str, kind: Any = Any, *, timeout: Duration | None = None) -> Any:
        """Like ``wait_for``, for plain functions.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await ctx.wait_for(...)`` instead.
        """
        return self._own_steps.wait_for_sync(name, kind, timeout)

    @overload
    async def child(self, of: Task[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def child(self, of: BoundTask[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def child(self, of: Starts[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def child(self, of: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Start a job of a task, or a run of a workflow, once, and give what it returned; holds no slot meanwhile.

        It is started under the fence, in the transaction that records it, and so by whatever attempt comes here first,
        and by no other. The attempt ends (``Suspended`` goes through the body), and the job is held until the child has
        ended; the next attempt runs the body from its beginning, and is given the result here. How it ended is
        recorded then, and stands. Cancelling this job cancels its children; a failure of it leaves them alone.

        A child is found again by its name, that of the task or workflow, and by which child of that name it is: start
        them in the same order each time. ``asyncio.gather`` of several starts them all before the body is suspended.

        Args:
            of: The task or workflow; ``task.using(...)`` and ``workflow.using(...)`` may say more, but no keys and no
                connection.
            args: Its arguments.
            kwargs: More of them.

        Raises:
            ChildFailed: It has failed, or was cancelled; the error has the child, and what it failed with.
            Suspended: To end the attempt; let it pass.
            StepRefused: It cannot be, as with ``sleep``.
            StepMisfit: What it gave does not fit what the task returns now.
            PayloadError: An argument is missing, unknown or cannot be stored; nothing was started.
            ChildrenTooDeep: This body is the child of a child, 100 times over.
            ChildBehindParent: The child has the ordering key of this job, or of one above it.
            FencedOut: The attempt is over, or not this worker's any more.
            DatabaseUnavailable: The database cannot be reached; it may have been started, and is not started again.
        """
        return await self._own_steps.child(_child(of, args, kwargs))

    @overload
    def child_sync(self, of: Task[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def child_sync(self, of: BoundTask[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def child_sync(self, of: Starts[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def child_sync(self, of: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Like ``child``, for plain functions.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await ctx.child(...)`` instead.
        """
        return self._own_steps.child_sync(_child(of, args, kwargs))

    @overload
    async def map(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        items: Sequence[A],
        /,
        *,
        gives: Literal["outcomes"],
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
    ) -> list[Outcome[B]]: ...
    @overload
    async def map(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        items: Sequence[A],
        /,
        *,
        gives: Literal["tally"],
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
    ) -> Tally: ...
    @overload
    async def map(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        items: Sequence[A],
        /,
        *,
        gives: Literal["results"] = "results",
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
    ) -> list[B]: ...
    async def map(
        self,
        each: Any,
        items: Sequence[Any],
        /,
        *,
        gives: Gives = "results",
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
    ) -> Any:
        """Run a task, or a workflow, for each item of a list, and give the results; holds no slot meanwhile.

        It is ``each.map(items)`` of a workflow, in a run that is started once, as ``child`` does it: its jobs have
        attempts and retries of their own. This body is suspended (``Suspended`` goes through it) until it has ended.

        Args:
            each: The task, ``task.using(...)`` or the workflow; its first parameter takes the item.
            items: The list; once it has been started, what was given then counts.
            gives: ``"results"``, in the order of the items, where the first failure stops the rest; ``"outcomes"``,
                what became of each, as ``collect`` gives it; or ``"tally"``, how many ended how, as ``tally`` does.
                A list must be no larger than a payload may be.
            also: What the task takes besides the item, by name, the same for all.
            name: What the child is recorded under; by default made of the names of the tasks.
            at_once: How many have jobs at a time; 1,000 by default.
            at_most: How many items there may be; 100,000 by default.

        Raises:
            ChildFailed: A job of it has failed, unless ``gives`` says otherwise; its list is too large; or its run was
                cancelled.
            Suspended: To end the attempt; let it pass.
            StepRefused: It cannot be, as with ``sleep``; or what was given is no task, no list, no source.
            PlanError: What would be run is wrong, such as a bound or an option; every fault is named, nothing started.
            PayloadError: An argument is missing, unknown or cannot be stored; nothing was started.
            StepMisfit: What it gave does not fit what the task returns now.
            FencedOut: The attempt is over, or not this worker's any more.
            DatabaseUnavailable: The database cannot be reached; it may have been started, and is not started again.
        """
        return await self._own_steps.child(self._shape("map", each, items, also, name, gives, at_once, at_most))

    @overload
    def map_sync(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        items: Sequence[A],
        /,
        *,
        gives: Literal["outcomes"],
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
    ) -> list[Outcome[B]]: ...
    @overload
    def map_sync(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        items: Sequence[A],
        /,
        *,
        gives: Literal["tally"],
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
    ) -> Tally: ...
    @overload
    def map_sync(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        items: Sequence[A],
        /,
        *,
        gives: Literal["results"] = "results",
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
    ) -> list[B]: ...
    def map_sync(
        self,
        each: Any,
        items: Sequence[Any],
        /,
        *,
        gives: Gives = "results",
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
    ) -> Any:
        """Like ``map``, for plain functions.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await ctx.map(...)`` instead.
        """
        return self._own_steps.child_sync(self._shape("map", each, items, also, name, gives, at_once, at_most))

    @overload
    async def emit(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        pages: Pages[A],
        /,
        *,
        gives: Literal["outcomes"],
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
    ) -> list[Outcome[B]]: ...
    @overload
    async def emit(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        pages: Pages[A],
        /,
        *,
        gives: Literal["tally"],
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
    ) -> Tally: ...
    @overload
    async def emit(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        pages: Pages[A],
        /,
        *,
        gives: Literal["results"] = "results",
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
    ) -> list[B]: ...
    async def emit(
        self,
        each: Any,
        pages: Pages[Any],
        /,
        *,
        gives: Gives = "results",
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
    ) -> Any:
        """Run a task, or a workflow, for each item that a source gives page by page, and give the results.

        It is ``each.emit(source.pages(...))`` of a workflow, in a run that is started once, as ``child`` does it. A
        page and its items go on record together, so that none is lost or doubled, whoever is killed. The body holds no
        slot and no items: it is suspended (``Suspended`` goes through it) until the run has ended.

        Args:
            each: The task, ``task.using(...)`` or the workflow; its first parameter takes the item.
            pages: ``source.pages(...)``; the source takes a cursor first, and returns a ``Page``.
            gives: ``"results"``, in the order of the items, where the first failure stops the rest; ``"outcomes"``,
                what became of each, as ``collect`` gives it; or ``"tally"``, how many ended how, as ``tally`` does.
                A list must be no larger than a payload may be.
            also: What the task takes besides the item, by name, the same for all.
            name: What the child is recorded under; by default made of the names of the tasks.
            at_once: How many have jobs at a time; 1,000 by default.
            at_most: How many items there may be; 100,000 by default.
            ahead: How many items may be open when the next page is asked for; as many as ``at_once`` by default.

        Raises:
            ChildFailed: A job of it has failed, unless ``gives`` says otherwise; its list is too large; or its run was
                cancelled.
            Suspended: To end the attempt; let it pass.
            StepRefused: It cannot be, as with ``sleep``; or what was given is no task, no list, no source.
            PlanError: What would be run is wrong, such as a bound or an option; every fault is named, nothing started.
            PayloadError: An argument is missing, unknown or cannot be stored; nothing was started.
            StepMisfit: What it gave does not fit what the task returns now.
            FencedOut: The attempt is over, or not this worker's any more.
            DatabaseUnavailable: The database cannot be reached; it may have been started, and is not started again.
        """
        return await self._own_steps.child(self._shape("emit", each, pages, also, name, gives, at_once, at_most, ahead))

    @overload
    def emit_sync(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        pages: Pages[A],
        /,
        *,
        gives: Literal["outcomes"],
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
    ) -> list[Outcome[B]]: ...
    @overload
    def emit_sync(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        pages: Pages[A],
        /,
        *,
        gives: Literal["tally"],
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
    ) -> Tally: ...
    @overload
    def emit_sync(
        self,
        each: HasJob[A, ..., B] | HasRun[A, ..., B],
        pages: Pages[A],
        /,
        *,
        gives: Literal["results"] = "results",
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
    ) -> list[B]: ...
    def emit_sync(
        self,
        each: Any,
        pages: Pages[Any],
        /,
        *,
        gives: Gives = "results",
        also: Mapping[str, object] | None = None,
        name: str | None = None,
        at_once: int | None = None,
        at_most: int | None = None,
        ahead: int | None = None,
    ) -> Any:
        """Like ``emit``, for plain functions.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``await ctx.emit(...)`` instead.
        """
        return self._own_steps.child_sync(self._shape("emit", each, pages, also, name, gives, at_once, at_most, ahead))

    def _shape(
        self, how: str, each: Any, over: Any, also: Any, name: str | None, gives: Gives, *bounds: int | None
    ) -> Start:
        from taskq.children import to_start
        from taskq.workflow.shapes import shape_of

        shape = shape_of(how, each, over, also, gives, self.queue, *bounds)
        return to_start(shape.workflow, (), shape.given, name=name, call=shape.call)

    @property
    def _own_steps(self) -> Steps:
        if self._steps is None:
            from taskq.durable import Steps

            self._steps = Steps(self)
        return self._steps

    # ------------------------------------------------------------------------------------------------------------------

    def transaction(self) -> AbstractAsyncContextManager[Transaction]:
        """A block whose writes, follow-up jobs and the job's own success commit together, or none of them do.

        It is the body's last act: after the block the job has succeeded with the result that ``tx.complete`` was given,
        whatever the body does or returns then. If the block raises, or is cancelled, all of it is rolled back.

        Raises:
            TransactionalStepUnsupported: It cannot hold here; raised before the block runs.
            FencedOut: The attempt is not this worker's any more; all was rolled back.
            ResultNotStorable: The result cannot be stored; all was rolled back.
            TransactionEndedInside: The block ended its own transaction by hand.
            CommitNotConfirmed: It was stopped while nobody could say whether the commit had happened.
            DatabaseUnavailable: There is no connection to be had.
        """
        return self._bodies.transaction(self)

    def transaction_sync(self) -> AbstractContextManager[SyncTransaction]:
        """Like ``transaction``, for plain functions, with a psycopg connection: ``with ctx.transaction_sync() as tx``.

        Raises:
            SyncCallInEventLoop: An event loop runs in this thread: ``async with ctx.transaction()`` instead.
        """
        return self._bodies.transaction_sync(self)

    @property
    def _bodies(self) -> BodyServices:
        if self._services is None:
            from taskq.plain_calls import PlainCalls

            self._services = PlainCalls()
        return self._services

    @property
    def _known(self) -> Saved:
        if self._saved is None:
            raise CheckpointNotLoaded(
                "the checkpoint of this attempt is not loaded: begin the body with 'await ctx.load_checkpoint()', or "
                "ctx.load_checkpoint_sync() in a plain function"
            )
        return self._saved

    def __repr__(self) -> str:
        return f"JobContext({self.task}, job_id={self.job_id}, attempt={self.attempt}, claim_epoch={self.claim_epoch})"


def _child(of: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Start:
    from taskq.children import to_start

    return to_start(of, args, kwargs)

"""The application object: where tasks are registered, and through which jobs are made, watched and steered."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeAlias, TypeVar, cast, overload
from uuid import UUID

import anyio.to_thread

from taskq.client.aio import AsyncClient
from taskq.client.checks import (
    check_database,
    check_job_id,
    check_layer,
    check_queues,
    check_requests,
    check_resolution,
    check_signal,
    check_steering,
    check_task_options,
)
from taskq.client.requests import JobRequest, OnConflict, build_batch
from taskq.client.sync import SyncClient
from taskq.cohorts import Cohort, Cohorts
from taskq.context import JobContext
from taskq.db.pools import refuse_in_event_loop
from taskq.durations import Duration
from taskq.effects import PromisedEffect, TerminalEffect
from taskq.errors import ConfigurationError, TaskDefinitionError, UnknownTask
from taskq.handle import CancelAnswer, Job, JobInfo, ResolveAnswer, RetryAnswer, SignalAnswer
from taskq.policy import (
    UNSET,
    EffectClass,
    ExecutionPolicy,
    History,
    OnExhausted,
    Ordering,
    PolicyLayer,
    Retry,
    Unset,
    resolve,
)
from taskq.prepare import Prepared
from taskq.promises import lower
from taskq.reconcile import DidNotHappen, HookAnswer, StillUnknown
from taskq.settings import check_schema
from taskq.tasks import AsyncTask, ReconciledDecorator, SyncTask, Task, TaskDecorator

if TYPE_CHECKING:
    from taskq.workflow.definition import Workflow, WorkflowDecorator

__all__ = ["TaskQ"]

P = ParamSpec("P")
R = TypeVar("R")
_Undecided: TypeAlias = DidNotHappen | StillUnknown
"""What a hook returns that never says what the body would have returned."""


class TaskQ:
    """One application: its tasks, its database, its defaults.

    Nothing is opened before the first call that needs the database; ``open`` only does it early. Use it as an async
    context manager, or call ``close`` at the end.

    Args:
        dsn: Where the database is. Without it, first use reads ``TASKQ_DSN`` or ``[tool.taskq]`` in pyproject.toml.
        schema: The schema of taskq in that database.
        embedded: Start a PostgreSQL of its own at first use, and install the schema there; for development.
        queue: The queue of tasks that name none.
        defaults: The policy of tasks that say nothing; ``queue`` goes before it.
        queues: What a queue says about the policy of its jobs, between a task's own options and ``defaults``.
        pool_size: The most connections, for each event loop and for all threads together.

    Raises:
        ConfigurationError: The name of the schema, the DSN's type or the size of the pool is not valid.
        InvalidPolicy: A default is not valid, or is no ``PolicyLayer``.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str = "taskq",
        embedded: bool = False,
        queue: str = "default",
        defaults: PolicyLayer | None = None,
        queues: Mapping[str, PolicyLayer] | None = None,
        pool_size: int = 10,
    ) -> None:
        self.schema = check_schema(schema)
        self._dsn, self._pool_size = check_database(dsn, pool_size)
        self._embedded = embedded
        layer = PolicyLayer() if defaults is None else check_layer("defaults", defaults)
        self._layers = (PolicyLayer(queue=queue), layer)
        self._queues = check_queues({} if queues is None else queues)
        self._tasks: dict[str, Task[Any, Any]] = {}
        self._workflows: dict[str, Workflow[..., Any]] = {}
        self._shapes: dict[tuple[Any, ...], Workflow[..., Any]] = {}
        self._cohorts = Cohorts()
        self._cohorts.meet(layer.cohort for layer in self._queues.values())
        self._lock = threading.Lock()
        self._server: Any = None
        self._async_client: AsyncClient | None = None
        self._sync_client: SyncClient | None = None
        self.resolve_policy()

    # Tasks ----------------------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> Mapping[str, Task[Any, Any]]:
        """The registered tasks by name."""
        return MappingProxyType(self._tasks)

    @property
    def cohorts(self) -> Mapping[str, Cohort]:
        """The cohorts that tasks, queues, defaults and calls have named so far, by name; workers publish them."""
        return MappingProxyType(self._cohorts.known())

    def get_task(self, name: str) -> Task[Any, Any]:
        """A task by name.

        Raises:
            UnknownTask: There is none of that name.
        """
        try:
            return self._tasks[name]
        except KeyError:
            known = ", ".join(sorted(self._tasks)) or "none"
            raise UnknownTask(
                f"there is no task {name!r}; known are: {known}. Import the module that registers it"
            ) from None

    @overload
    def task(self, fn: Callable[Concatenate[JobContext, P], Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, fn: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def task(self, fn: Callable[Concatenate[JobContext, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def task(self, fn: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        queue: str | Unset = UNSET,
        priority: int | Unset = UNSET,
        retry: Retry | Unset = UNSET,
        max_attempts: int | Unset | None = UNSET,
        timeout: Duration | Unset | None = UNSET,
        deadline: Duration | Unset | None = UNSET,
        effect_class: EffectClass | Unset = UNSET,
        max_recoveries: int | Unset = UNSET,
        max_retry_afters: int | Unset = UNSET,
        max_snoozes: int | Unset = UNSET,
        effects: Iterable[TerminalEffect] | Unset = UNSET,
        ordering: Ordering | Unset | None = UNSET,
        cohort: Cohort | Unset | None = UNSET,
        history: History | Unset = UNSET,
        on_exhausted: OnExhausted | Unset = UNSET,
        process: bool = False,
        reconcile: Callable[..., _Undecided | Coroutine[Any, Any, _Undecided]] | None = None,
        reconcile_steps: Mapping[str, Callable[..., HookAnswer[Any]]] | None = None,
        reconcile_retry: Retry | None = None,
        prepare: Callable[..., Prepared | Coroutine[Any, Any, Prepared]] | None = None,
        checks: Iterable[str] = (),
    ) -> TaskDecorator: ...
    @overload
    def task(
        self,
        /,
        *,
        reconcile: Callable[..., HookAnswer[R]],
        reconcile_steps: Mapping[str, Callable[..., HookAnswer[Any]]] | None = None,
        reconcile_retry: Retry | None = None,
        prepare: Callable[..., Prepared | Coroutine[Any, Any, Prepared]] | None = None,
        checks: Iterable[str] = (),
        name: str | None = None,
        queue: str | Unset = UNSET,
        priority: int | Unset = UNSET,
        retry: Retry | Unset = UNSET,
        max_attempts: int | Unset | None = UNSET,
        timeout: Duration | Unset | None = UNSET,
        deadline: Duration | Unset | None = UNSET,
        effect_class: EffectClass | Unset = UNSET,
        max_recoveries: int | Unset = UNSET,
        max_retry_afters: int | Unset = UNSET,
        max_snoozes: int | Unset = UNSET,
        effects: Iterable[TerminalEffect] | Unset = UNSET,
        ordering: Ordering | Unset | None = UNSET,
        cohort: Cohort | Unset | None = UNSET,
        history: History | Unset = UNSET,
        on_exhausted: OnExhausted | Unset = UNSET,
        process: bool = False,
    ) -> ReconciledDecorator[R]: ...
    def task(
        self,
        fn: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        process: bool = False,
        reconcile: Callable[..., Any] | None = None,
        reconcile_steps: Mapping[str, Callable[..., Any]] | None = None,
        reconcile_retry: Retry | None = None,
        prepare: Callable[..., Prepared | Coroutine[Any, Any, Prepared]] | None = None,
        checks: Iterable[str] = (),
        **layer: Any,
    ) -> Any:
        """Register a function as a task: ``@app.task`` or ``@app.task(queue="mail", timeout="30s")``.

        The function is ``async def`` or ``def``; a first parameter annotated as ``JobContext`` gets the attempt's
        context and is left out of what ``enqueue`` takes.

        Args:
            fn: The function.
            name: What the task is called on jobs; the function's own name by default. It must stay the same for as
                long as jobs of it are stored, wherever the function moves.
            process: Run bodies in a child process of the worker, which a timeout or a cancel ends for certain, and
                whose crash, leak or hold on the GIL touches nothing else. For work in C code, for long computing and
                for code that is not trusted to end. Arguments and results travel as stored; context variables and
                global state of the worker do not.
            reconcile: The hook that is asked what became of an attempt whose outcome is unknown. It takes the
                parameters of the function, after an optional first ``ctx: ReconcileContext``, and returns
                ``Happened(result)``, ``DidNotHappen()`` or ``StillUnknown(retry_in=...)``. It may run more than once,
                so it only looks; ``DidNotHappen`` has a rule, see there.
            reconcile_steps: The same for its side-effecting steps: a hook for each name of a step that is to be asked
                about. It takes the same parameters, and answers with what the step's function would have returned.
            reconcile_retry: What happens when a hook fails. Without it: 20 attempts, 5 s to an hour apart.
                ``StillUnknown`` uses up none of them; the task's ``max_retry_afters`` bounds it.
            prepare: What is called before each attempt, under the claim and before the attempt has begun. It takes the
                parameters of the function, after an optional first ``ctx: PrepareContext``, and returns
                ``Ready(facts)``, ``Pause(code)``, ``NeedsApproval(what)``, ``Unmet(prerequisite)`` or ``Cancelled()``.
                It may run more than once, so it only looks. Where it fails, it is called again as ``retry.backoff``
                says, ``max_recoveries`` times for each fault.
            checks: Names that ``Unmet`` may give beside arguments and nodes: what ``prepare`` checks by itself.
            **layer: What the task says about the policy: queue, priority (0 to 9, higher first), retry,
                max_attempts, timeout, deadline (from enqueue), effect_class (``"pure"``, ``"idempotent"`` or
                ``"side_effecting"``), max_recoveries, max_retry_afters, max_snoozes, effects (what runs once the job
                has ended: a list of ``TerminalEffect``), ordering (``"halt"`` or ``"continue"``: what becomes of the
                rest of an ordering key while a job has failed), cohort (a ``Cohort``: how many run at once, across
                all tasks with it), history (``"full"``, or ``"slim"``: a job that has succeeded keeps neither payload
                nor result), on_exhausted (``"fail"`` or ``"hold"``: what becomes of a job once its recoveries are
                used up). Durations as ``"30s"`` or seconds. Without a retry: three attempts, about 5 s and 10 s
                apart; one for ``side_effecting``.

        Raises:
            TaskDefinitionError: The function cannot be a task, the name is taken, or there is no such option.
            InvalidPolicy: An option is not valid.
        """
        from taskq.prepare import preparation_of
        from taskq.reconcile_hooks import hook_task, refuse_hook_name, step_hooks
        from taskq.workflow.hidden import refuse_name_of_bodies

        localns = sys._getframe(1).f_locals
        if reconcile is None and not reconcile_steps and reconcile_retry is not None:
            raise TaskDefinitionError(
                "reconcile_retry says nothing without a hook; give reconcile= as well, or reconcile_steps="
            )
        options = check_task_options(layer)
        self._cohorts.meet([options.cohort])

        def register(function: Callable[..., Any]) -> Task[Any, Any]:
            is_async = hasattr(function, "__code__") and bool(function.__code__.co_flags & 0x80)
            kind = AsyncTask if is_async else SyncTask
            made: Task[Any, Any] = kind(self, function, name=name, layer=options, localns=localns, process=process)
            refuse_hook_name(made.name)
            refuse_name_of_bodies(made.name)
            if made.name in self._tasks:
                raise TaskDefinitionError(
                    f"two tasks are named {made.name!r}: {_place(self._tasks[made.name].fn)} and {_place(function)}; "
                    "give one of them another name=, since jobs are stored under it"
                )
            if reconcile is not None:
                made.reconcile_task = hook_task(self, made, reconcile, retry=reconcile_retry, localns=localns)
            if reconcile_steps is not None:
                made.reconcile_steps = step_hooks(self, made, reconcile_steps, retry=reconcile_retry, localns=localns)
            if prepare is not None:
                made.preparation = preparation_of(made, prepare, checks, localns)
            elif checks:
                raise TaskDefinitionError(f"task {made.name}: checks says nothing without a preparation; give prepare=")
            hooks = [made.reconcile_task, *made.reconcile_steps.values()]
            # First, so that a worker has published them before a job of the task can need one.
            self._tasks |= {hook.name: hook for hook in hooks if hook is not None}
            self._tasks[made.name] = made
            return made

        return register if fn is None else register(fn)

    @cached_property
    def _of_bodies(self) -> tuple[Task[..., Any], ...]:
        """The hidden tasks of maps and emits in durable bodies, which every worker has that may run such a body."""
        from taskq.workflow.hidden import tasks_of_bodies

        return tasks_of_bodies(self)

    # Workflows ------------------------------------------------------------------------------------------------------

    @property
    def workflows(self) -> Mapping[str, Workflow[..., Any]]:
        """The registered workflows by name."""
        return MappingProxyType(self._workflows)

    def get_workflow(self, name: str) -> Workflow[..., Any]:
        """A workflow by name.

        Raises:
            UnknownTask: There is none of that name.
        """
        try:
            return self._workflows[name]
        except KeyError:
            known = ", ".join(sorted(self._workflows)) or "none"
            raise UnknownTask(
                f"there is no workflow {name!r}; known are: {known}. Import the module that registers it"
            ) from None

    @overload
    def workflow(self, fn: Callable[P, R], /) -> Workflow[P, R]: ...
    @overload
    def workflow(
        self,
        *,
        name: str | None = None,
        on_failure: Literal["cancel", "finish"] | None = None,
        effects: Iterable[TerminalEffect] = (),
        receipts: int = 100,
        work_budget: int | None = None,
    ) -> WorkflowDecorator: ...
    def workflow(  # type: ignore[misc]
        self,
        fn: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        on_failure: Literal["cancel", "finish"] | None = None,
        effects: Iterable[TerminalEffect] = (),
        receipts: int = 100,
        work_budget: int | None = None,
    ) -> Any:
        """Register a function as a workflow: ``@app.workflow`` or ``@app.workflow(on_failure="finish")``.

        The function wires tasks by ``step`` and runs once, on symbols, when its plan is first asked for.

        Args:
            fn: The function, a plain ``def``.
            name: What it is called on runs; the function's own name by default.
            on_failure: What a failure that nothing handles does to the rest of the run: ``"cancel"`` it, which is the
                default, or let what does not depend on it ``"finish"``.
            effects: What runs once a run has ended: ``TerminalEffect``s, whose ``Ref.arg`` is an argument of the
                workflow, ``Ref.result`` its result, ``Ref.job_id`` the run's id.
            receipts: How many transitions of a run stay on record, the newest.
            work_budget: How many bodies a run may begin in all, with all runs below it, 1 to 10,000,000: what is ready
                once so many have begun waits until an operator allows more (``taskq runs budget``). None: no limit.

        Raises:
            TaskDefinitionError: The function cannot be a workflow, or the name is taken.
            InvalidPolicy: An option is not valid.
        """
        from taskq.workflow.definition import Workflow
        from taskq.workflow.hidden import refuse_name_of_bodies

        localns = sys._getframe(1).f_locals

        def register(function: Callable[..., Any]) -> Workflow[..., Any]:
            made: Workflow[..., Any] = Workflow(
                self,
                function,
                name=name,
                on_failure=on_failure,
                effects=effects,
                receipts=receipts,
                work_budget=work_budget,
                localns=localns,
            )
            if made.name in self._workflows:
                raise TaskDefinitionError(
                    f"two workflows are named {made.name!r}: {_place(self._workflows[made.name].fn)} and "
                    f"{_place(function)}; give one of them another name=, since runs are stored under it"
                )
            for hidden in made.hidden:
                refuse_name_of_bodies(hidden.name)
                if hidden.name in self._tasks:
                    raise TaskDefinitionError(
                        f"there is a task {hidden.name!r}, which is what workflow {made.name} calls a hidden task of "
                        "its own; give one of them another name="
                    )
            self._workflows[made.name] = made
            self._tasks |= {hidden.name: hidden for hidden in made.hidden}
            return made

        return register if fn is None else register(fn)

    def resolve_policy(
        self, *layers: PolicyLayer, owner: Task[Any, Any] | None = None, chain: tuple[str, ...] = ()
    ) -> ExecutionPolicy:
        """The whole policy under these layers, the nearest first; the queue's and the application's come after them.

        Args:
            *layers: What call and task say.
            owner: The task that it is for; without it, effects are left out.
            chain: The tasks whose effects led to this one.

        Raises:
            InvalidPolicy: A value is not valid; the message names the field. Or a cohort has another limit elsewhere.
            UnknownTask: An effect names a task that is not registered.
        """

        def promise(effects: tuple[TerminalEffect, ...]) -> tuple[PromisedEffect, ...]:
            return () if owner is None else lower(effects, owner, chain)

        self._cohorts.meet(layer.cohort for layer in (*layers, *self._layers))
        queue = resolve(*layers, *self._layers).queue
        if queue in self._queues:
            layers = (*layers, PolicyLayer(queue=queue), self._queues[queue])
        return resolve(*layers, *self._layers, promise=promise)

    # Jobs -----------------------------------------------------------------------------------------------------------

    async def enqueue_many(
        self, requests: Iterable[JobRequest[R]], *, connection: Any = None, on_conflict: OnConflict | None = None
    ) -> list[Job[R]]:
        """Enqueue many jobs in one statement: all or none. Handles come in the order of the requests.

        Args:
            requests: What ``task.job(...)`` gives, of one task or of several; a generator will do.
            connection: The caller's own connection, if the requests name none.
            on_conflict: What to do about taken unique keys, if the requests do not say.

        Raises:
            InvalidRequest: The requests do not fit together, or one is no request of this application's tasks.
            UniqueKeyHeld: A unique key is taken, with ``on_conflict="raise"``; nothing was enqueued.
            IdempotencyConflict: An idempotency key was used for another request; nothing was enqueued.
            UnsupportedConnection: What was given as ``connection`` is none that this call can use.
            UnusableConnection: It is closed, busy or read-only, or its transaction has failed before.
            ConfigurationError: No database is named.
            DatabaseUnavailable: The database cannot be reached.
        """
        listed = check_requests(self, requests)
        batch = build_batch(listed, connection=connection, on_conflict=on_conflict)
        if not listed:
            return []
        client = await self._open_async()
        return self._handles(listed, await client.enqueue(batch), batch.connection is not None)

    def enqueue_many_sync(
        self, requests: Iterable[JobRequest[R]], *, connection: Any = None, on_conflict: OnConflict | None = None
    ) -> list[Job[R]]:
        """Like ``enqueue_many``, for code without an event loop."""
        refuse_in_event_loop("enqueue_many_sync")
        listed = check_requests(self, requests)
        batch = build_batch(listed, connection=connection, on_conflict=on_conflict)
        if not listed:
            return []
        return self._handles(listed, self._sync.enqueue(batch), batch.connection is not None)

    def _handles(
        self, requests: list[JobRequest[R]], answers: list[tuple[UUID, bool]], in_transaction: bool
    ) -> list[Job[R]]:
        return [
            Job(self, job_id, request.task, inserted, in_transaction)
            for request, (job_id, inserted) in zip(requests, answers, strict=True)
        ]

    async def get(self, job_id: UUID | str) -> JobInfo | None:
        """All about a job, or None if there is no such job.

        Raises:
            InvalidRequest: What was given is not the id of a job.
        """
        return await (await self._open_async()).get(check_job_id(job_id))

    def get_sync(self, job_id: UUID | str) -> JobInfo | None:
        """Like ``get``, for code without an event loop."""
        refuse_in_event_loop("get_sync")
        return self._sync.get(check_job_id(job_id))

    async def cancel(self, job_id: UUID | str, reason: str | None = None, *, actor: str | None = None) -> CancelAnswer:
        """Cancel a job.

        Args:
            job_id: The job.
            reason: Why; it goes on the record.
            actor: Who; the database's user by default.

        Returns:
            ``cancelled``: it will not run (again). ``requested``: it runs and is told; unless it succeeds it ends
            cancelled. ``finished``, ``unknown`` or ``not_found``: nothing was changed.
        """
        answer = await (await self._open_async()).call("cancel", *check_steering(job_id, reason, actor))
        return cast(CancelAnswer, answer)

    def cancel_sync(self, job_id: UUID | str, reason: str | None = None, *, actor: str | None = None) -> CancelAnswer:
        """Like ``cancel``, for code without an event loop."""
        refuse_in_event_loop("cancel_sync")
        return cast(CancelAnswer, self._sync.call("cancel", *check_steering(job_id, reason, actor)))

    async def signal(
        self, job_id: UUID | str, name: str, payload: Any = None, *, key: str | None = None
    ) -> SignalAnswer:
        """Send a signal to a job, whose body waits for it with ``ctx.wait_for``, or will.

        It is kept until it is taken. In a transaction of your own, ``select taskq.send_signal(id, name, payload, key)``
        does the same.

        Args:
            job_id: The job.
            name: What the body waits for.
            payload: JSON's own values, dataclasses and so on; 8 MiB of JSON at most.
            key: Sent again under one key, it is there once.

        Returns:
            ``sent``, or ``already``: it was sent before under this key.

        Raises:
            JobNotFound: There is no such job.
            WrongState: It has finished.
            SignalConflict: Another payload was sent under this key.
            TooManySignals: 10,000 that nobody has taken wait already (``installation.max_waiting_signals``).
            PayloadError: The payload cannot be stored.
            InvalidRequest: The name or the key is not valid.
        """
        answer = await (await self._open_async()).call("send_signal", *check_signal(job_id, name, payload, key))
        return cast(SignalAnswer, answer)

    def signal_sync(
        self, job_id: UUID | str, name: str, payload: Any = None, *, key: str | None = None
    ) -> SignalAnswer:
        """Like ``signal``, for code without an event loop."""
        refuse_in_event_loop("signal_sync")
        return cast(SignalAnswer, self._sync.call("send_signal", *check_signal(job_id, name, payload, key)))

    async def retry(self, job_id: UUID | str, reason: str | None = None, *, actor: str | None = None) -> RetryAnswer:
        """Reopen a failed or cancelled job with fresh counters (``reopened``), or make a waiting one due (``due``).

        Raises:
            JobNotFound: There is no such job.
            WrongState: It has succeeded, runs, or its outcome is unknown.
            UniqueKeyHeld: Another job holds its unique key now.
            EffectsUnsettled: Terminal effects of its last end are not settled.
        """
        answer = await (await self._open_async()).call("retry", *check_steering(job_id, reason, actor))
        return cast(RetryAnswer, answer)

    def retry_sync(self, job_id: UUID | str, reason: str | None = None, *, actor: str | None = None) -> RetryAnswer:
        """Like ``retry``, for code without an event loop."""
        refuse_in_event_loop("retry_sync")
        return cast(RetryAnswer, self._sync.call("retry", *check_steering(job_id, reason, actor)))

    async def resolve(
        self,
        job_id: UUID | str,
        *,
        happened: bool,
        reason: str,
        result: Any = None,
        actor: str | None = None,
        claim_epoch: int | None = None,
    ) -> ResolveAnswer:
        """Decide the outcome of a job that is ``unknown``, once and on the record.

        Args:
            job_id: The job.
            happened: Whether its effect happened: it has then succeeded; otherwise it is cancelled if that was asked
                for, else it runs again, with the same idempotency key. So say False only once it can no longer
                happen: the provider has closed the key, or the process that ran the body is dead and no request of it
                is still on its way.
            reason: What was checked; it goes on the record.
            result: What the body would have returned, or the step, where what is unknown is a side-effecting step;
                with ``happened=True`` only.
            actor: Who decides; the database's user by default.
            claim_epoch: The attempt that was looked at; without it, the decision is about whichever is open.

        Returns:
            What the job became: ``succeeded``, ``cancelled`` or ``pending``. Of a step it is ``pending`` either way,
            unless cancelling was asked for: the body goes on, with the record of the step or by calling it again.

        Raises:
            JobNotFound: There is no such job.
            AlreadyResolved: Somebody else, a hook, or the job's own late end was first; it says what the job became.
            StaleAttempt: The job is at another attempt than ``claim_epoch``.
            WrongState: Its outcome is not unknown.
            InvalidRequest: The reason is empty, or an argument is not valid.
        """
        query, arguments = check_resolution(job_id, happened, result, reason, actor, claim_epoch)
        return cast(ResolveAnswer, await (await self._open_async()).call(query, *arguments))

    def resolve_sync(
        self,
        job_id: UUID | str,
        *,
        happened: bool,
        reason: str,
        result: Any = None,
        actor: str | None = None,
        claim_epoch: int | None = None,
    ) -> ResolveAnswer:
        """Like ``resolve``, for code without an event loop."""
        refuse_in_event_loop("resolve_sync")
        query, arguments = check_resolution(job_id, happened, result, reason, actor, claim_epoch)
        return cast(ResolveAnswer, self._sync.call(query, *arguments))

    async def ensure_policy(self, policy: ExecutionPolicy) -> str:
        """Store a policy, in a transaction of its own, if this process has not done so; give its id."""
        return await (await self._open_async()).ensure_policy(policy)

    # The database ---------------------------------------------------------------------------------------------------

    def find_dsn(self) -> str:
        """Where the database is. Starts the embedded server, and installs the schema there, if that was asked for.

        Raises:
            ConfigurationError: No database is named.
            EmbeddedPostgresError: The embedded server could not be started.
        """
        with self._lock:
            if self._dsn is None:
                self._dsn = self._start_embedded() if self._embedded else _configured_dsn()
            return self._dsn

    def use_database(self, dsn: str | None = None, schema: str | None = None) -> None:
        """Use this database, or this schema, instead of what the application was made with. Only before first use.

        Raises:
            ConfigurationError: The application uses another database already, or the name of the schema is not valid.
        """
        wanted = check_schema(schema or self.schema)
        with self._lock:
            used = self._async_client is not None or self._sync_client is not None or self._server is not None
            if used and ((dsn or self._dsn) != self._dsn or wanted != self.schema):
                raise ConfigurationError(
                    "use_database() comes too late: the application has used its database before, and the jobs of then "
                    "are there; call it before the first job is enqueued or looked at"
                )
            self._dsn = dsn or self._dsn
            self.schema = wanted

    async def open(self) -> Self:
        """Connect now, so that a wrong setting or an absent database shows at once. Optional.

        Raises:
            ConfigurationError: No database is named.
            DatabaseUnavailable: The database cannot be reached.
        """
        client = await self._open_async()
        async with client.pool.connection():
            pass
        return self

    async def close(self) -> None:
        """Close the connections of this event loop and of all threads. An embedded server stops with its last user."""
        if self._async_client is not None:
            await self._async_client.close()
        await anyio.to_thread.run_sync(self.close_sync)

    def close_sync(self) -> None:
        """Close the connections of all threads; those of an event loop are closed by ``close`` in it."""
        if self._sync_client is not None:
            self._sync_client.pool.close()
        with self._lock:
            server, self._server = self._server, None
            if server is not None:
                self._dsn = self._async_client = self._sync_client = None
        if server is not None:
            server.stop()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _open_async(self) -> AsyncClient:
        if self._async_client is None:
            starts = self._embedded and self._dsn is None
            dsn = await anyio.to_thread.run_sync(self.find_dsn) if starts else self.find_dsn()
            if self._async_client is None:
                self._async_client = AsyncClient(dsn, self.schema, pool_size=self._pool_size)
        return self._async_client

    @property
    def _sync(self) -> SyncClient:
        if self._sync_client is None:
            dsn = self.find_dsn()
            with self._lock:
                if self._sync_client is None:
                    self._sync_client = SyncClient(dsn, self.schema, pool_size=self._pool_size)
        return self._sync_client

    def _start_embedded(self) -> str:
        from taskq import embedded, migrate

        self._server = embedded.EmbeddedPostgres.start()
        dsn = str(self._server.dsn)
        migrate.up(dsn, schema=self.schema)
        return dsn

    def __repr__(self) -> str:
        return f"<TaskQ schema={self.schema!r} tasks={len(self._tasks)}>"


def _configured_dsn() -> str:
    from taskq.settings import load

    if dsn := os.environ.get("TASKQ_DSN", "").strip() or load(require_dsn=False).dsn:
        return dsn
    raise ConfigurationError(
        "no database is named: set TASKQ_DSN or pass TaskQ(dsn=...), for example postgresql://user@localhost:5432/app; "
        "for a throwaway one run 'taskq dev', or use TaskQ(embedded=True)"
    )


def _place(fn: Callable[..., Any]) -> str:
    return f"{fn.__module__}.{getattr(fn, '__qualname__', repr(fn))}"

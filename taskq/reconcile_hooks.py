"""How a reconcile hook is called: the hidden task that asks it about one attempt, and resolves the job by its answer.

Each hook has a task of its own, ``<task>:reconcile``, or ``<task>:reconcile:<step>`` for a side-effecting step, which
workers run like any other: with its retries, its backoff and its bound. It reads the attempt from the database, calls
the hook, and sends the answer fenced on the attempt's epoch, so that an answer that comes too late changes nothing.
Nothing here runs the body.

A task for each hook, since a worker takes jobs of the tasks that it knows: while two releases run beside each other,
none is given a question about a step that its own code has no hook for.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from taskq.codec_signature import hints_of
from taskq.codec_types import readable
from taskq.context import JobContext
from taskq.durations import parse_duration
from taskq.errors import (
    InvalidPolicy,
    ReconcileAnswerInvalid,
    ResultNotStorable,
    StepNotStorable,
    StepRefused,
    TaskDefinitionError,
    WrongState,
    describe,
)
from taskq.outcomes import RetryAfter
from taskq.policy import PolicyLayer, Retry, exponential
from taskq.reconcile import Answer, DidNotHappen, Happened, ReconcileContext, StillUnknown
from taskq.steps import Key, check_name, encode
from taskq.tasks import AsyncTask, SyncTask, Task
from taskq.telemetry import get_logger

if TYPE_CHECKING:
    from taskq.app import TaskQ

__all__ = [
    "DEFAULT_RECONCILE_RETRY",
    "RECONCILE_PRIORITY",
    "SUFFIX",
    "asked_by",
    "hook_task",
    "is_hook",
    "refuse_hook_name",
    "step_hooks",
]

log = get_logger("reconcile")

SUFFIX: Final = ":reconcile"
DEFAULT_RECONCILE_RETRY: Final = Retry(max_attempts=20, backoff=exponential("5s", cap="1h"))
"""How often a hook that fails is called, and how far apart: about 9 hours in all."""
RECONCILE_PRIORITY: Final = 9
"""The highest: what a hook decides may hold up money, and must not wait behind the backlog of its queue."""
_MOST: Final = 128
"""Characters of a task's name."""
_NAMES: Final = {c.__name__: c for c in (ReconcileContext, Happened, DidNotHappen, StillUnknown)} | {"Answer": Answer}
"""What a module may import for its type checker only."""


def is_hook(task: str) -> bool:
    """Whether a task of that name asks a hook."""
    return task.endswith(SUFFIX) or f"{SUFFIX}:" in task


def asked_by(hook: str) -> tuple[str, str | None]:
    """The task that a hook's task asks about, and the step; None for the whole body."""
    # The first one: no task of an application has it in its name, and a step may.
    task, found, step = hook.partition(f"{SUFFIX}:")
    return (task, step) if found else (hook.removesuffix(SUFFIX), None)


def refuse_hook_name(name: str) -> None:
    """Refuse a name that belongs to a hook.

    Raises:
        TaskDefinitionError: It does.
    """
    if is_hook(name):
        raise TaskDefinitionError(
            f"task {name}: names that end in {SUFFIX} are those of hooks, and so are those with {SUFFIX}: in them; "
            "declare one with reconcile= or reconcile_steps= at its task, or choose another name"
        )


def hook_task(
    app: TaskQ,
    task: Task[..., Any],
    fn: object,
    *,
    retry: Retry | None,
    localns: Mapping[str, Any] | None,
    step: str | None = None,
) -> Task[..., Any]:
    """The hidden task that asks a task's hook, or that of one of its steps.

    Args:
        app: The application of both.
        task: The task that declares the hook.
        fn: The hook.
        retry: What happens when the hook fails; ``DEFAULT_RECONCILE_RETRY`` if not given.
        localns: Names of the place where both are defined, for annotations that are text.
        step: The step whose hook it is; None for that of the whole body.

    Raises:
        TaskDefinitionError: The hook does not fit the task; the message says what.
        InvalidPolicy: The retry is none.
    """
    if retry is not None and not isinstance(retry, Retry):
        raise InvalidPolicy(f"reconcile_retry is {retry!r}; give Retry(max_attempts=..., backoff=...)")
    hook = _Hook(app, task, *_checked(task, fn, localns, step))
    # Without its effects, which may name tasks that come later; none are promised for the asking.
    policy = app.resolve_policy(task.layer)
    layer = PolicyLayer(
        queue=policy.queue,
        priority=RECONCILE_PRIORITY,
        retry=retry or DEFAULT_RECONCILE_RETRY,
        timeout=policy.timeout,
        deadline=None,
        effect_class="pure",
        max_recoveries=policy.max_recoveries,
        max_retry_afters=policy.max_retry_afters,
        effects=(),
        history="full",
    )
    if len(hook.name) > _MOST and step is None:
        raise TaskDefinitionError(
            f"task {task.name}: with a hook its name has at most {_MOST - len(SUFFIX)} characters, since the hook's is "
            f"that and {SUFFIX}; choose a shorter name="
        )
    if len(hook.name) > _MOST:
        raise TaskDefinitionError(
            f"task {task.name}: its name and that of step {step} have together at most {_MOST - len(SUFFIX) - 1} "
            f"characters, since the hook's is both with {SUFFIX}: between them; choose shorter ones, or where they are "
            "on record already, decide what becomes of that step by hand"
        )
    if inspect.iscoroutinefunction(hook.fn):
        return AsyncTask(app, hook.async_body(), name=hook.name, layer=layer)
    return SyncTask(app, hook.sync_body(), name=hook.name, layer=layer)


def step_hooks(
    app: TaskQ, task: Task[..., Any], hooks: object, *, retry: Retry | None, localns: Mapping[str, Any] | None
) -> dict[str, Task[..., Any]]:
    """The hidden tasks that ask the hooks of a task's side-effecting steps, by the name of the step.

    Raises:
        TaskDefinitionError: One does not fit, or the task has no such steps; the message says what.
        InvalidPolicy: The retry is none.
    """

    def refuse(what: str) -> TaskDefinitionError:
        return TaskDefinitionError(f"task {task.name}: {what}")

    if not isinstance(hooks, Mapping):
        raise refuse(f'reconcile_steps is {hooks!r}; give the hooks by the name of their step, such as {{"pay": ask}}')
    if not hooks:
        return {}
    if task.process or not task.takes_context:
        why = "it runs in a child process (process=True)" if task.process else "it takes no ctx: JobContext"
        raise refuse(f"reconcile_steps names steps, and it has none, since {why}; leave the one or the other out")
    if app.resolve_policy(task.layer).effect_class == "side_effecting":
        raise refuse(
            "it is side_effecting, so its own effect start stands for all that its body does, and its steps have none; "
            "declare a hook for the whole body with reconcile=, or make it idempotent and its effects steps"
        )
    made = {}
    for step, fn in hooks.items():
        try:
            check_name("a step of reconcile_steps", step)
        except StepRefused as exc:
            raise refuse(str(exc)) from None
        made[step] = hook_task(app, task, fn, retry=retry, localns=localns, step=step)
    return made


@dataclass(frozen=True, slots=True)
class _Decision:
    """An answer that decides, ready to be sent."""

    happened: bool
    result: str | None

    def arguments(self, asked: ReconcileContext, asking_job: UUID) -> tuple[Any, ...]:
        """The arguments of ``answer_reconcile``."""
        said = "Happened" if self.happened else "DidNotHappen"
        reason, actor = f"the reconcile hook answered {said}", f"reconcile:{asking_job}"
        step = None if asked.step is None else str(Key("step", asked.step, asked.occurrence or 1))
        return str(asked.job_id), asked.claim_epoch, self.happened, self.result, reason, actor, step


class _Hook:
    """One hook and what is needed to call it."""

    def __init__(
        self,
        app: TaskQ,
        task: Task[..., Any],
        fn: Callable[..., Any],
        takes_context: bool,
        signature: inspect.Signature,
        step: str | None = None,
        gives: Any = Any,
    ) -> None:
        self.app = app
        self.task = task
        self.fn = fn
        self.takes_context = takes_context
        self.step = step
        self.name = f"{task.name}{SUFFIX}" if step is None else f"{task.name}{SUFFIX}:{step}"
        self._signature = signature
        self._gives = gives

    def async_body(self) -> Callable[..., Any]:
        """The body of the hidden task, for an async hook."""

        async def ask(ctx: JobContext, job_id: UUID, claim_epoch: int) -> dict[str, Any]:
            client = await self.app._open_async()
            asked = self.question(
                await client.rows("open_question", *self.names(job_id, claim_epoch)), job_id, claim_epoch
            )
            if asked is None:
                return self.overtaken(ctx, job_id, claim_epoch, "it was resolved before the hook was asked")
            about, args, kwargs = asked
            decision = self.read(await self.fn(*args, **kwargs))
            try:
                became = await client.call("answer_reconcile", *decision.arguments(about, ctx.job_id))
            except WrongState as exc:
                return self.overtaken(ctx, job_id, claim_epoch, str(exc))
            return self.resolved(ctx, about, decision, became)

        return self._named(ask)

    def sync_body(self) -> Callable[..., Any]:
        """The same for a hook that is a plain function."""

        def ask(ctx: JobContext, job_id: UUID, claim_epoch: int) -> dict[str, Any]:
            client = self.app._sync
            asked = self.question(client.rows("open_question", *self.names(job_id, claim_epoch)), job_id, claim_epoch)
            if asked is None:
                return self.overtaken(ctx, job_id, claim_epoch, "it was resolved before the hook was asked")
            about, args, kwargs = asked
            decision = self.read(self.fn(*args, **kwargs))
            try:
                became = client.call("answer_reconcile", *decision.arguments(about, ctx.job_id))
            except WrongState as exc:
                return self.overtaken(ctx, job_id, claim_epoch, str(exc))
            return self.resolved(ctx, about, decision, became)

        return self._named(ask)

    def _named(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        ask.__doc__ = self.fn.__doc__
        ask.__name__ = ask.__qualname__ = self.name
        return ask

    def names(self, job_id: UUID, claim_epoch: int) -> tuple[Any, ...]:
        """What names the attempt in the database, and what of it is asked about."""
        return str(job_id), claim_epoch, self.task.name, self.step

    def question(
        self, rows: Sequence[Sequence[Any]], job_id: UUID, claim_epoch: int
    ) -> tuple[ReconcileContext, tuple[Any, ...], dict[str, Any]] | None:
        """What the hook is called with, from a row of ``open_question``; None if the attempt is not unknown any more.

        Raises:
            PayloadMisfit: The job's arguments do not fit the task as this process has it.
        """
        if not rows:
            return None
        payload, attempt, generation, key_generation, since, reason, occurrence = rows[0]
        about = ReconcileContext(
            job_id=job_id,
            task=self.task.name,
            claim_epoch=claim_epoch,
            attempt=attempt + 1,
            generation=generation,
            key_generation=key_generation,
            since=since,
            reason=reason,
            step=self.step,
            occurrence=occurrence,
        )
        kwargs = with_defaults(self._signature, self.task.codec.decode(payload))
        return about, (about,) if self.takes_context else (), kwargs

    def read(self, answer: object) -> _Decision:
        """What an answer decides.

        Raises:
            RetryAfter: Nothing yet.
            ReconcileAnswerInvalid: It is none, or its result is none of the task's.
        """
        match answer:
            case Happened(result):
                try:
                    return _Decision(True, self._encoded(result))
                except (ResultNotStorable, StepNotStorable) as exc:
                    said = describe(exc.__cause__ or exc)["message"]
                    what, like = "is none of the task's", "the body"
                    if self.step is not None:
                        what, like = "is not what it is annotated to find", "the step"
                    raise ReconcileAnswerInvalid(
                        f"the hook of {self._of} answered Happened with a result that {what}: "
                        f"{said}. Nothing was resolved, and the hook is called again; return what {like} would have"
                    ) from exc
            case DidNotHappen():
                return _Decision(False, None)
            case StillUnknown(retry_in):
                raise RetryAfter(parse_duration(retry_in), "still unknown")
        raise ReconcileAnswerInvalid(
            f"the hook of {self._of} answered with a {type(answer).__name__}, which says nothing; return "
            "Happened(result), DidNotHappen() or StillUnknown(retry_in=...). Nothing was resolved, and the hook is "
            "called again"
        )

    @property
    def _of(self) -> str:
        return self.task.name if self.step is None else f"step {self.step} of {self.task.name}"

    def _encoded(self, result: Any) -> str:
        """As the body's result is stored, or what a step gave; of a step the body knows the type, and looks again."""
        return self.task.codec.encode_result(result) if self.step is None else encode(self.step, self._gives, result)[0]

    def resolved(self, ctx: JobContext, about: ReconcileContext, decision: _Decision, became: str) -> dict[str, Any]:
        """Tell that the answer has resolved the job; the result of the asking job."""
        answer = "happened" if decision.happened else "did_not_happen"
        log.info(
            "job.resolved",
            job_id=about.job_id,
            task=about.task,
            queue=ctx.queue,
            claim_epoch=about.claim_epoch,
            attempt=about.attempt,
            step=about.step,
            answer=answer,
            became=became,
            reconcile_job=ctx.job_id,
        )
        return {"job_id": str(about.job_id), "claim_epoch": about.claim_epoch, "answer": answer, "became": became}

    def overtaken(self, ctx: JobContext, job_id: UUID, claim_epoch: int, why: str) -> dict[str, Any]:
        """Tell that the attempt was resolved otherwise meanwhile; the result of the asking job."""
        log.info(
            "reconcile.overtaken",
            job_id=job_id,
            task=self.task.name,
            claim_epoch=claim_epoch,
            step=self.step,
            reconcile_job=ctx.job_id,
            why=why,
        )
        return {"job_id": str(job_id), "claim_epoch": claim_epoch, "answer": "overtaken", "why": why}


def _checked(
    task: Task[..., Any], fn: object, localns: Mapping[str, Any] | None, step: str | None
) -> tuple[Callable[..., Any], bool, inspect.Signature, str | None, Any]:
    """The hook, whether it takes a context, the task's signature without its own, the step, and what that gives."""
    name = task.name
    option, of_step = ("reconcile", "") if step is None else (f"reconcile_steps[{step!r}]", f" of step {step}")
    if isinstance(fn, Task) or not inspect.isfunction(fn):
        raise TaskDefinitionError(
            f"task {name}: {option} is {fn!r}, which is no plain function; write the hook with def or async def"
        )
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise TaskDefinitionError(
            f"task {name}: its hook{of_step} is a generator; return the answer instead of yielding"
        )
    hints = hints_of(fn, f"{name}, hook {fn.__name__}", {**_NAMES, **(localns or {})})
    takes_context = refuse_unlike(task, f"hook {fn.__name__}{of_step}", fn, ReconcileContext, localns, hints)
    wanted = _parameters(task)
    # Of the whole body, the task says what it gives.
    gives = (
        Any if step is None else readable(name, f"what its hook{of_step} finds", _happened(hints.get("return", Any)))
    )
    return fn, takes_context, inspect.Signature(wanted), step, gives


def _happened(answer: Any) -> Any:
    """The ``T`` of ``Happened[T]`` in what a hook is annotated to return; ``Any`` where it declares none."""
    either = typing.get_origin(answer) in (typing.Union, types.UnionType)
    found = [typing.get_args(a)[0] for a in (typing.get_args(answer) if either else (answer,)) if _is_typed(a)]
    return typing.Union[tuple(found)] if found else Any  # noqa: UP007  # made at run time


def _is_typed(answer: Any) -> bool:
    return typing.get_origin(answer) is Happened and not isinstance(typing.get_args(answer)[0], typing.TypeVar)


def with_defaults(signature: inspect.Signature, given: Mapping[str, Any]) -> dict[str, Any]:
    """A job's arguments with the task's defaults for what it left out: a hook sees what the body sees."""
    bound = signature.bind(**given)
    bound.apply_defaults()
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    kwargs = dict(bound.arguments)
    return kwargs | (kwargs.pop(rest) if rest is not None else {})


def signature_of(task: Task[..., Any]) -> inspect.Signature:
    """A task's signature without its context."""
    return inspect.Signature(_parameters(task))


def refuse_unlike(
    task: Task[..., Any],
    hook: str,
    fn: Callable[..., Any],
    context: type,
    localns: Mapping[str, Any] | None,
    hints: Mapping[str, Any] | None = None,
) -> bool:
    """Refuse a function of a task that cannot be called with every job's arguments, or reads them as something else.

    Args:
        task: The task.
        hook: What the function is called in the message.
        fn: The function.
        context: What its first parameter is annotated as, if it takes its context.
        localns: Names of the place where both are defined, for annotations that are text.
        hints: What it is annotated with, where that is known.

    Returns:
        Whether it takes its context.

    Raises:
        TaskDefinitionError: It does not fit; the message says what.
    """
    known = {context.__name__: context}
    hints = hints_of(fn, f"{task.name}, {hook}", {**known, **(localns or {})}) if hints is None else hints
    given = list(inspect.signature(fn).parameters.values())
    takes_context = bool(given) and hints.get(given[0].name) is context
    if takes_context:
        del given[0]
    _compare(task, hook, _parameters(task), given, hints, hints_of(task.fn, task.name, localns), context)
    return takes_context


def _parameters(task: Task[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(task.fn).parameters.values())[1 if task.takes_context else 0 :]


def _compare(
    task: Task[..., Any],
    hook: str,
    wanted: list[inspect.Parameter],
    given: list[inspect.Parameter],
    hints: Mapping[str, Any],
    task_hints: Mapping[str, Any],
    context: type,
) -> None:
    """Refuse a hook that cannot be called with every job's arguments, or reads them as something else."""

    def refuse(what: str) -> TaskDefinitionError:
        shown = ", ".join(map(_name, wanted))
        return TaskDefinitionError(
            f"task {task.name}: its {hook} {what}; a {hook.partition(' ')[0]} takes the same parameters as its task "
            f"({shown or 'none'}), after an optional ctx: {context.__name__}"
        )

    for p in given:
        if hints.get(p.name) is JobContext:
            raise refuse(f"takes {p.name}: JobContext, which is the body's")
        if hints.get(p.name) is context:
            raise refuse(f"takes its context {p.name} elsewhere than first")
        if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
            raise refuse(f"takes {_name(p)} by position, and it is called by name")
    by_name = {p.name: p for p in given if p.kind is not p.VAR_KEYWORD}
    takes_rest = len(by_name) < len(given)
    for p in wanted:
        if p.kind is p.VAR_KEYWORD:
            if not takes_rest:
                raise refuse(f"does not take {_name(p)}")
        elif p.name not in by_name:
            if not takes_rest:
                raise refuse(f"does not take {p.name}")
        elif p.name in hints and p.name in task_hints and hints[p.name] != task_hints[p.name]:
            ours, theirs = hints[p.name], task_hints[p.name]
            if Any not in (ours, theirs) and ours is not object:
                raise refuse(f"takes {p.name} as {_type(ours)}, and the task as {_type(theirs)}")
    known = {p.name for p in wanted if p.kind is not p.VAR_KEYWORD}
    for name, p in by_name.items():
        if name not in known and p.default is p.empty:
            raise refuse(f"takes {name}, which the task does not")


def _name(parameter: inspect.Parameter) -> str:
    stars = (
        "*" if parameter.kind is parameter.VAR_POSITIONAL else "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    )
    return stars + parameter.name


def _type(declared: Any) -> str:
    return declared.__name__ if isinstance(declared, type) and not hasattr(declared, "__args__") else str(declared)

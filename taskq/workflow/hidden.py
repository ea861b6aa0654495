"""The hidden tasks of a workflow, which workers run like any other.

``<workflow>:start`` starts a run: the job of a terminal effect that names a workflow is of it. ``<workflow>:await`` is
the task of a node that stands for a child run: its job is held until that run has ended, and then tells the parent how.

The maps and emits of durable bodies are of workflows that nobody has registered, so that two tasks serve all of them:
``taskq:await``, and ``taskq:collect``, which hands on what became of the items. A worker has them if a task of it takes
a context, for then it may run such a body; its queue is that of the body.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from taskq.codec import decode_any
from taskq.context import JobContext
from taskq.errors import ChildRunCancelled, ChildRunFailed, LoopExhausted, RunNotFound, TaskDefinitionError
from taskq.outcomes import RetryAfter
from taskq.policy import PolicyLayer, Retry, exponential
from taskq.tasks import AsyncTask, Task

if TYPE_CHECKING:
    from taskq.app import TaskQ
    from taskq.workflow.definition import Workflow

__all__ = [
    "AWAIT",
    "AWAIT_ANY",
    "COLLECT",
    "START",
    "await_task",
    "refuse_name_of_bodies",
    "start_task",
    "tasks_of_bodies",
]

START: Final = ":start"
AWAIT: Final = ":await"
AWAIT_ANY: Final = f"taskq{AWAIT}"
COLLECT: Final = "taskq:collect"
_START_RETRY: Final = Retry(max_attempts=20, backoff=exponential("5s", cap="1h"))
"""What fails here is the database, or the wiring in a deploy: tried again for about 9 hours in all."""
_AWAIT_RETRY: Final = Retry(
    max_attempts=20, backoff=exponential("5s", cap="1h"), give_up_on=(ChildRunFailed, ChildRunCancelled)
)
AWAIT_PRIORITY: Final = 9
"""The highest: it takes a moment, and what comes after it has a priority of its own."""
_OF_ENDS: Final = ("effect", "run")
"""What travels with a job and says whose it is; a run that it starts is its own."""


def start_task(app: TaskQ, workflow: Workflow[..., Any]) -> Task[..., Any]:
    """The task that starts a run of a workflow with the arguments of its job, in the transaction that ends the job.

    One job starts one run, however often it is tried: the two commit together, and the run's key is the job's.

    Raises:
        TaskDefinitionError: The workflow's name leaves no room for the task's.
    """

    async def start(ctx: JobContext, /, **arguments: Any) -> UUID:
        client = await app._open_async()
        meta = {key: value for key, value in ctx.meta.items() if key not in _OF_ENDS}
        plain = workflow._admission((), arguments)
        await client.store_plan(plain)
        async with ctx.transaction() as tx:
            admission = plain.under(f"job:{ctx.job_id}", json.dumps(meta) if meta else None, tx.conn, ctx.job_id)
            run_id, _ = await client.start_run(admission)
            tx.complete(run_id)
        return run_id

    declared = {name: workflow.codec.declared(name) for name in inspect.signature(workflow.fn).parameters}
    _takes(start, workflow, inspect.signature(workflow.fn).parameters.values(), {**declared, "return": UUID})
    return _hidden(app, workflow, START, start, PolicyLayer(retry=_START_RETRY, effect_class="idempotent", **_PLAIN))


def await_task(app: TaskQ, workflow: Workflow[..., Any]) -> Task[..., Any]:
    """The task that gives the result of a child run as that of the node that stands for it, or raises how it ended.

    Raises:
        TaskDefinitionError: The workflow's name leaves no room for the task's.
    """
    body = _end_of_child(app)
    _takes(body, workflow, [_REST], {"arguments": Any, "return": Any})
    return _hidden(app, workflow, AWAIT, body, _AWAIT_LAYER)


def refuse_name_of_bodies(name: str) -> None:
    """Refuse the name of one of the two tasks of maps and emits of durable bodies.

    Raises:
        TaskDefinitionError: It is one.
    """
    if name in (AWAIT_ANY, COLLECT):
        raise TaskDefinitionError(
            f"{name} is what a hidden task of maps and emits in durable bodies is called; give the task, or the "
            "workflow that it would be of, another name="
        )


def tasks_of_bodies(app: TaskQ) -> tuple[Task[..., Any], ...]:
    """These two tasks."""

    async def collect(ends: Any) -> Any:
        return ends

    waits = _end_of_child(app)
    waits.__signature__ = inspect.Signature([_CONTEXT, _REST])
    waits.__annotations__ = {_CONTEXT.name: JobContext, "arguments": Any, "return": Any}
    return tuple(
        AsyncTask(app, _named(body, name, __name__, None), name=name, layer=_AWAIT_LAYER)
        for name, body in ((AWAIT_ANY, waits), (COLLECT, collect))
    )


def _end_of_child(app: TaskQ) -> Any:
    async def end_of_child(ctx: JobContext, /, **arguments: Any) -> Any:
        client = await app._open_async()
        for run_id, status, result, error in await client.rows("child_end", str(ctx.job_id)):
            if status == "succeeded":
                return decode_any(result)
            if status == "failed":
                told = decode_any(error)
                raise (LoopExhausted if told["type"] == "LoopExhausted" else ChildRunFailed)(UUID(run_id), told)
            if status == "cancelled":
                raise ChildRunCancelled(UUID(run_id), decode_any(error))
            raise RetryAfter("5s", f"run {run_id} is {status}")
        raise RunNotFound(
            f"the child run of node {ctx.job_id} is not there",
            hint="taskq verify reports what is wrong with its parent.",
        )

    return end_of_child


_PLAIN: Final[Any] = {"timeout": None, "deadline": None, "effects": (), "cohort": None}
_AWAIT_LAYER: Final = PolicyLayer(
    priority=AWAIT_PRIORITY, retry=_AWAIT_RETRY, effect_class="pure", ordering=None, **_PLAIN
)
_CONTEXT: Final = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
_REST: Final = inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)


def _hidden(app: TaskQ, workflow: Workflow[..., Any], suffix: str, body: Any, layer: PolicyLayer) -> Task[..., Any]:
    name = f"{workflow.name}{suffix}"
    if len(name) > 128:
        raise TaskDefinitionError(
            f"the name of a workflow has at most {128 - len(suffix)} characters, since its hidden task is called that "
            f"and {suffix}; choose a shorter name="
        )
    return AsyncTask(app, _named(body, name, workflow.__module__, workflow.__doc__), name=name, layer=layer)


def _named(body: Any, name: str, module: str, doc: str | None) -> Any:
    body.__name__ = body.__qualname__ = name
    body.__module__ = module
    body.__doc__ = doc
    return body


def _takes(
    body: Any, workflow: Workflow[..., Any], parameters: Iterable[inspect.Parameter], annotations: Mapping[str, Any]
) -> None:
    """Have a body take these after its context, whose name is none of the workflow's parameters."""
    name = "ctx"
    while name in inspect.signature(workflow.fn).parameters:
        name = f"_{name}"
    context = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    body.__signature__ = inspect.Signature([context, *parameters])
    body.__annotations__ = {name: JobContext, **annotations}

"""What a durable body starts with ``ctx.child``: as it is sent, and back as what the child gave or failed with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from taskq.codec import decode_any
from taskq.errors import ChildFailed, PayloadError, StepMisfit, StepRefused
from taskq.promises import policies_of
from taskq.steps import Key, Record
from taskq.tasks import BoundTask, Task

if TYPE_CHECKING:
    from taskq.policy import ExecutionPolicy

__all__ = ["Child", "Start", "given", "to_start"]

_KEYS = ("unique_key", "idempotency_key", "connection")


class Start(NamedTuple):
    """A child that is to be started, its arguments checked and encoded.

    Attributes:
        name: The task or workflow.
        payload: The JSON text of its arguments.
        spec: The spec of its job; None for a run.
        ordering_key: That of its job.
        plan: The plan of its run, by hash; None for a job.
        meta: What travels with the run, as JSON.
        policies: What must be stored before, by id.
        plans: Likewise, the texts of plans by hash, those of child runs first.
        decode: Reads what it gave.
        encode: Makes text of what it gives, for a plain call.
        call: Calls the task's function here and now; None for a workflow, which is none.
    """

    name: str
    payload: str
    spec: str | None
    ordering_key: str | None
    plan: str | None
    meta: str | None
    policies: Mapping[str, ExecutionPolicy]
    plans: Mapping[str, str]
    decode: Callable[[str | None], Any]
    encode: Callable[[Any], str]
    call: Callable[[], Any | Awaitable[Any]] | None


class Child(NamedTuple):
    """A child as the database has it.

    Attributes:
        answer: ``waits``, ``succeeded`` or ``failed``; cancelled is failed.
        text: The JSON text of what it gave.
        error: The JSON text of what it failed with.
        id: The job, or the run.
    """

    answer: str
    text: str | None
    error: str | None
    id: str


def to_start(
    of: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    name: str | None = None,
    call: Callable[[], Any] | None = None,
) -> Start:
    """What is to be sent for ``ctx.child(of, *args, **kwargs)``.

    ``name`` is that of the child where it is not that of the workflow, ``call`` does here and now what a run would.

    Raises:
        StepRefused: It is no task and no workflow, or has options that a child cannot have.
        PayloadError: An argument is missing, unknown or cannot be stored.
        PlanError: The workflow's wiring is wrong.
    """
    if isinstance(of, (Task, BoundTask)):
        task: Any = of if isinstance(of, Task) else of.task
        request = of._request(args, kwargs)
        _check_options(task.name, {key: getattr(request.options, key) for key in _KEYS})
        return Start(
            name=task.name,
            payload=request.payload,
            spec=request.spec.text,
            ordering_key=request.options.ordering_key,
            plan=None,
            meta=None,
            policies=dict(policies_of(request.spec.policy)),
            plans={},
            decode=task.codec.decode_result,
            encode=task.codec.encode_result,
            call=lambda: task(*args, **kwargs),
        )
    from taskq.workflow.runs import Starts

    if not isinstance(of, Starts):
        raise StepRefused(
            f"ctx.child({of!r}) starts a task or a workflow, and that is neither; give the task itself, and its "
            "arguments behind it, or use ctx.step for a plain function"
        )
    admission = of._admission(args, kwargs)
    _check_options(admission.plan.workflow, {"run_key": admission.run_key, "connection": admission.connection})
    return Start(
        name=admission.plan.workflow if name is None else name,
        payload=admission.input,
        spec=None,
        ordering_key=None,
        plan=admission.plan.hash,
        meta=admission.meta,
        policies={known: each for policy in admission.policies.values() for known, each in policies_of(policy)},
        plans={plan.hash: plan.text for plan in admission.plan.whole()},
        decode=of._codec.decode_result,
        encode=of._codec.encode_result,
        call=call,
    )


def given(job: object, key: Key, start: Start, record: Record) -> Any:
    """What a child that has ended gives to the body.

    Raises:
        ChildFailed: It has failed, or was cancelled.
        StepMisfit: What it gave is none of the type that the task or workflow returns now.
    """
    if record.error is not None:
        raise _failed(job, key, decode_any(record.error), record.child)
    try:
        return start.decode(record.text)
    except PayloadError as exc:
        raise StepMisfit(
            f"child {key} of job {job}: {exc}. It is not started again; run this with a version that reads what it "
            "gave, or let the child be of another task",
            name=key.name,
            occurrence=key.occurrence,
        ) from exc


def _failed(job: object, key: Key, error: Mapping[str, Any], child: str | None) -> ChildFailed:
    became = {"failed": "has failed", "cancelled": "was cancelled"}.get(str(error.get("status")), "is gone")
    return ChildFailed(
        f"child {key} of job {job}, {child}, {became}: {error.get('type')}: {error.get('message')}",
        name=key.name,
        occurrence=key.occurrence,
        child_id=child,
        status=str(error.get("status")),
        error={name: value for name, value in error.items() if name != "status"},
    )


def _check_options(name: str, options: Mapping[str, Any]) -> None:
    for option, value in options.items():
        if value is not None:
            raise StepRefused(
                f"child {name}: it cannot have {option}=, for it is started once by its place in the body, in the "
                "transaction that records it; leave that out"
            )

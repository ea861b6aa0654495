"""Terminal effects: tasks that run because a job has reached a terminal status.

``TerminalEffect`` is what people write, ``PromisedEffect`` what a policy holds of it once ``promises.lower`` has
resolved it, ``EffectInfo`` how one stands, and ``EffectOrigin`` what its body is told. The database makes the jobs of
effects, in the transaction of the status that causes them; nothing here does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from uuid import UUID

from taskq.errors import InvalidPolicy, PayloadError

if TYPE_CHECKING:
    from taskq.tasks import Task
    from taskq.workflow.definition import Workflow

__all__ = ["EffectInfo", "EffectOrigin", "PromisedEffect", "Ref", "TerminalEffect", "TerminalStatus"]

TerminalStatus: TypeAlias = Literal["succeeded", "failed", "cancelled"]
TERMINAL: Final[tuple[TerminalStatus, ...]] = ("cancelled", "failed", "succeeded")
MOST: Final = 32
"""Effects that one job may promise."""


@dataclass(frozen=True, slots=True)
class Ref:
    """What an effect's argument is taken from when its owner ends; made by the methods below."""

    kind: Literal["arg", "result", "error", "status", "job_id", "generation"]
    name: str = ""

    @classmethod
    def arg(cls, name: str) -> Ref:
        """The owner's argument of that name; its default, if the owner was enqueued without it."""
        return cls("arg", name)

    @classmethod
    def result(cls) -> Ref:
        """What the owner's body returned; null unless it succeeded."""
        return cls("result")

    @classmethod
    def error(cls) -> Ref:
        """Why the owner failed or was cancelled: an object with ``type`` and ``message``; null if it succeeded."""
        return cls("error")

    @classmethod
    def status(cls) -> Ref:
        """The owner's terminal status: ``succeeded``, ``failed`` or ``cancelled``."""
        return cls("status")

    @classmethod
    def job_id(cls) -> Ref:
        """The owner's id, as text: a UUID."""
        return cls("job_id")

    @classmethod
    def generation(cls) -> Ref:
        """How often the owner has been reopened."""
        return cls("generation")


@dataclass(frozen=True, slots=True, init=False)
class TerminalEffect:
    """What runs because a job has ended: ``effects=[TerminalEffect(refund, on={"failed"}, ...)]``.

    Attributes:
        task: The task that runs, of the same application; or its name, where it is defined further down. A workflow
            starts a run of it: then the effect is settled once the run has started, whatever becomes of it.
        on: The statuses that cause it: ``succeeded``, ``failed``, ``cancelled``; all of them by default.
        payload: For each parameter of that task a value, or a ``Ref`` to something of the job that ended.
        name: What it is called; unique among the effects of one job. The task's name by default.
        undoes: Whether it takes back what the job did, as a refund does. Once it has succeeded, the job, if reopened,
            has a new idempotency key; otherwise the key stays, and the provider does nothing a second time.

    Raises:
        InvalidPolicy: A value is not valid; the message names it.
    """

    task: Task[..., Any] | Workflow[..., Any] | str
    on: tuple[TerminalStatus, ...]
    payload: Mapping[str, object] = field(compare=False)
    name: str
    undoes: bool
    template: tuple[tuple[str, Ref | str], ...] = field(repr=False)

    def __init__(
        self,
        task: Task[..., Any] | Workflow[..., Any] | str,
        on: Iterable[TerminalStatus] | TerminalStatus = TERMINAL,
        payload: Mapping[str, object] | None = None,
        name: str | None = None,
        undoes: bool = False,
    ) -> None:
        from taskq.policy import check_name
        from taskq.tasks import Task
        from taskq.workflow.definition import Workflow

        if not isinstance(task, (Task, Workflow, str)):
            raise InvalidPolicy(
                f"the task of an effect is {task!r}; give a task or a workflow of the application, or its name"
            )
        task_name = check_name("the task of an effect", task if isinstance(task, str) else task.name)
        object.__setattr__(self, "task", task)
        object.__setattr__(self, "name", check_name("the name of an effect", task_name if name is None else name))
        if self.name == "*" or self.name.startswith("#"):
            raise InvalidPolicy(
                f"the name of an effect is {self.name!r}; * stands for all of them and #1, #2, ... for those without a "
                "name, so give another"
            )
        object.__setattr__(self, "on", self._statuses(on))
        if not isinstance(undoes, bool):
            raise InvalidPolicy(f"effect {self.name} has undoes={undoes!r}; give True or False")
        object.__setattr__(self, "undoes", undoes)
        given = {} if payload is None else payload
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise InvalidPolicy(f"the payload of effect {self.name} is {given!r}; give a mapping of parameter names")
        object.__setattr__(self, "payload", dict(given))
        object.__setattr__(self, "template", tuple(sorted((key, self._stored(key, given[key])) for key in given)))

    def _statuses(self, on: object) -> tuple[TerminalStatus, ...]:
        named = {on} if isinstance(on, str) else set(on) if isinstance(on, Iterable) else {on}
        if not named or not named <= set(TERMINAL):
            raise InvalidPolicy(f"effect {self.name} has on={on!r}; give one or more of {', '.join(TERMINAL)}")
        return tuple(status for status in TERMINAL if status in named)

    def _stored(self, key: str, value: object) -> Ref | str:
        from taskq.codec import encode_any

        if isinstance(value, Ref):
            return value
        try:
            return encode_any(value, key, text_keys=True)
        except PayloadError as exc:
            raise InvalidPolicy(f"the payload of effect {self.name} cannot be stored: {exc}") from None


@dataclass(frozen=True, slots=True)
class PromisedEffect:
    """A terminal effect as the policy of its owner holds it: resolved, so that a later deploy does not change it.

    Attributes:
        name: What it is called.
        on: The statuses that cause it.
        task: The name of the task.
        queue: Where its job waits.
        priority: 0 to 9.
        max_attempts: How many failures of its body end it.
        effect_class: Of the task.
        policy_id: Of the task's policy.
        required_worker_schema: The capability level that its job requires; None for none.
        deadline: How long after the owner's end it may still start, in seconds; None for no limit.
        payload: The template of its payload, as JSON text.
        undoes: Whether it takes back what its owner did.
        policy: The policy itself, where this process resolved it; it must be stored before the owner's.
    """

    name: str
    on: tuple[str, ...]
    task: str
    queue: str
    priority: int
    max_attempts: int
    effect_class: str
    policy_id: str
    required_worker_schema: int | None
    deadline: float | None
    payload: str
    undoes: bool = False
    policy: Any = field(default=None, compare=False, repr=False)

    def spec(self) -> dict[str, Any]:
        """As JSON-able data, without what is None."""
        values = {
            "name": self.name,
            "on": list(self.on),
            "task": self.task,
            "queue": self.queue,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
            "effect_class": self.effect_class,
            "policy_id": self.policy_id,
            "required_worker_schema": self.required_worker_schema,
            "deadline": self.deadline,
            "payload": json.loads(self.payload),
            "undoes": self.undoes or None,
        }
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> PromisedEffect:
        """The promise of a spec."""
        return cls(
            name=spec["name"],
            on=tuple(spec["on"]),
            task=spec["task"],
            queue=spec["queue"],
            priority=spec["priority"],
            max_attempts=spec["max_attempts"],
            effect_class=spec["effect_class"],
            policy_id=spec["policy_id"],
            required_worker_schema=spec.get("required_worker_schema"),
            deadline=spec.get("deadline"),
            payload=json.dumps(spec["payload"], sort_keys=True),
            undoes=spec.get("undoes", False),
        )


@dataclass(frozen=True, slots=True)
class EffectInfo:
    """A terminal effect as it was when the database was asked; a row of the view ``effects``.

    Attributes:
        effect_key: What names it: the owner's id, its generation and the effect's name.
        owner_job_id: The job that ended.
        generation: The owner's generation at that end.
        name: What the owner calls it.
        on_status: The terminal status that caused it.
        task: The task that carries it out; None where that is not known.
        job_id: The job that carries it out; None where none could be made.
        status: The status of that job; ``broken`` or ``refused`` where there is none.
        error: What went wrong last, or None.
        settled: Whether nothing is left to do: its job has succeeded or was cancelled, or an operator settled it.
        settled_how: ``succeeded``, ``cancelled`` or ``operator``; None while it is not settled.
        settled_at: Since when.
        settled_by: The operator.
        settled_reason: What the operator said.
        created_at: When the owner ended.
    """

    effect_key: str
    owner_job_id: UUID
    generation: int
    name: str
    on_status: TerminalStatus
    task: str | None
    job_id: UUID | None
    status: str
    error: Mapping[str, Any] | None
    settled: bool
    settled_how: str | None
    settled_at: datetime | None
    settled_by: str | None
    settled_reason: str | None
    created_at: datetime

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> EffectInfo:
        """Of a row of the query ``effects``, whose columns are these fields, ids and JSON as text."""
        effect_key, owner, generation, name, on_status, task, job, status, error, *settled = row
        return cls(
            effect_key,
            UUID(owner),
            generation,
            name,
            on_status,
            task,
            None if job is None else UUID(job),
            status,
            None if error is None else json.loads(error),
            *settled,
        )


@dataclass(frozen=True, slots=True)
class EffectOrigin:
    """Why the job of an effect runs: what ``ctx.effect`` tells its body.

    Attributes:
        key: What names the effect; the same for every attempt of it.
        owner_job_id: The job that ended.
        owner_task: Its task.
        status: The terminal status that it reached.
        generation: Its generation at that end.
    """

    key: str
    owner_job_id: UUID
    owner_task: str
    status: TerminalStatus
    generation: int

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> EffectOrigin | None:
        """What the data that travels with a job says of it; None for a job that is no effect's."""
        told = meta.get("effect")
        if not isinstance(told, Mapping):
            return None
        try:
            return cls(told["key"], UUID(told["owner_job_id"]), told["owner_task"], told["status"], told["generation"])
        except (KeyError, ValueError, AttributeError, TypeError):  # somebody's own data under that name
            return None

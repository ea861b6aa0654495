"""What a reconcile hook is told, and what it may answer.

A job whose outcome was never told is ``unknown``, and nothing runs it again. A task that declares
``@app.task(..., reconcile=fn)`` has its hook asked about each such attempt, in a job of its own (the hidden task
``<task>:reconcile``): the hook asks the outside world, by the same idempotency key that the body had, and its answer
resolves the job. With ``reconcile_steps={"pay": fn}`` the same goes for what one side-effecting step of the body did
(``<task>:reconcile:pay``), and the body goes on. ``reconcile_hooks`` has how the hooks are called.
"""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeAlias, TypeVar
from uuid import UUID

from taskq.durations import Duration, parse_duration
from taskq.idempotency import idempotency_key, step_key

__all__ = ["Answer", "DidNotHappen", "Happened", "HookAnswer", "ReconcileContext", "StillUnknown"]

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Happened(Generic[R_co]):
    """The effect happened: the job has succeeded; of a step: its value is recorded, and the body goes on.

    Attributes:
        result: What the body would have returned, of the type that the task returns; or what the step's function would
            have.
    """

    result: R_co


@dataclass(frozen=True, slots=True)
class DidNotHappen:
    """The effect did not happen: the job runs again, **with the same idempotency key**, or is cancelled as was asked.

    Of a step: the body runs again, and the step's function is called again under its key. It waits before that as
    ``retry.backoff`` of the task says, and each such run counts as a recovery: once ``max_recoveries`` are used up, the
    job fails with ``RecoveryExhausted`` instead.

    It may be said only once it can no longer happen: the provider has closed the key (a void, a tombstone, a refused
    idempotency key), or the process that ran the body is dead and no request of it is still on its way. "Not found" at
    the provider is no proof: a process that was only frozen, or a request that is still on its way, can do it after you
    have looked. Until it is certain, answer ``StillUnknown``.
    """


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """It cannot be told yet: ask again.

    Attributes:
        retry_in: After how long: ``"30s"``, seconds or a timedelta.

    Raises:
        InvalidDuration: ``retry_in`` cannot be read.
    """

    retry_in: Duration = "30s"

    def __post_init__(self) -> None:
        parse_duration(self.retry_in)


Answer: TypeAlias = Happened[R] | DidNotHappen | StillUnknown
"""What a hook returns, for a task that returns ``R``."""
HookAnswer: TypeAlias = Answer[R] | Coroutine[Any, Any, Answer[R]]
"""What calling a hook gives: its answer, or for an async hook what to await for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileContext:
    """The attempt that a hook is asked about; declare a first parameter ``ctx: ReconcileContext`` to get it.

    Attributes:
        job_id: The job whose outcome is unknown.
        task: Its task.
        claim_epoch: With ``job_id`` it names the attempt.
        attempt: The number of the try, from 1, as its body had it.
        generation: How often the finished job had been reopened.
        key_generation: The generation that its idempotency key carries, or None.
        since: Since when the outcome is unknown.
        reason: How that came: ``worker_lost``, ``timed_out``, ``process_died``, ``told``, ...
        step: The side-effecting step that it is asked about; None for the whole body.
        occurrence: Which call of that name, from 1; None for the whole body.
    """

    job_id: UUID
    task: str
    claim_epoch: int
    attempt: int
    generation: int
    key_generation: int | None
    since: datetime
    reason: str
    step: str | None = None
    occurrence: int | None = None

    @property
    def idempotency_key(self) -> str:
        """The key that the body had, or the step's function: what to ask the provider by."""
        key = idempotency_key(self.job_id, self.key_generation)
        return key if self.step is None else step_key(key, self.step, self.occurrence or 1)

"""What a preparation is told, and what it may answer.

A task that declares ``@app.task(prepare=fn)`` has ``fn`` called before each attempt, under the claim of its job: with
the slot of its cohort and the turn of its ordering key, and before the attempt has begun. It looks whether the attempt
can go on, and says so. It cannot end the job, and uses no attempt. What keeps it from the attempt is an incident
(``taskq incidents``), or a pause of the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

from taskq.durations import Duration, parse_duration
from taskq.errors import InvalidPolicy, PreparationInvalid, TaskDefinitionError
from taskq.idempotency import idempotency_key
from taskq.policy import check_name

if TYPE_CHECKING:
    from taskq.tasks import Task

__all__ = [
    "Cancelled",
    "NeedsApproval",
    "Pause",
    "Preparation",
    "PrepareContext",
    "Prepared",
    "Ready",
    "Unmet",
    "preparation_of",
]

_LONGEST_WHAT: Final = 300
_LONGEST_REASON: Final = 2000


@dataclass(frozen=True, slots=True)
class Ready:
    """The attempt may begin; all checks are made again before it does.

    Attributes:
        facts: What was found out, by name: JSON values that the bodies and preparations of the same run see in
            ``ctx.facts``; of a plain job, those of the job. Each replaces the value that this preparation has seen; one
            that somebody else has set meanwhile stays.
        clear: Names of facts that hold no longer.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    clear: Iterable[str] = ()


@dataclass(frozen=True, slots=True)
class Pause:
    """The run is to be paused, and goes on with ``taskq runs resume``: then it is prepared again.

    A plain job is held instead, until ``taskq incidents grant``.

    Attributes:
        code: The kind of reason: a short name without spaces, such as ``"provider-down"``.
        reason: The reason in words, for whoever looks.
    """

    code: str
    reason: str = ""

    def __post_init__(self) -> None:
        _check("the code of Pause", self.code)
        if not isinstance(self.reason, str) or len(self.reason) > _LONGEST_REASON:
            raise PreparationInvalid(f"the reason of Pause is no text of up to {_LONGEST_REASON} characters")
        _storable("the reason of Pause", self.reason)


@dataclass(frozen=True, slots=True)
class NeedsApproval:
    """Somebody is to approve of it, by ``taskq incidents grant``; then it is prepared again, with ``ctx.approved``.

    Attributes:
        what: What is to be approved, in words that name it as a whole, such as ``"refund of 120.00 EUR to A. Smith"``:
            an approval is for these words, and for no others.
    """

    what: str

    def __post_init__(self) -> None:
        if not isinstance(self.what, str) or not 1 <= len(self.what.strip()) <= len(self.what) <= _LONGEST_WHAT:
            raise PreparationInvalid(f"what NeedsApproval names is no text of 1 to {_LONGEST_WHAT} characters")
        _storable("what NeedsApproval names", self.what)


@dataclass(frozen=True, slots=True)
class Unmet:
    """A prerequisite is not met. Seen again, it counts as the same.

    Attributes:
        prerequisite: What it is: the name of an argument of the task, of a node whose result it takes, or one of the
            task's ``checks``.
        retry_in: After how long to prepare it again; None where that is for somebody to say, with
            ``taskq incidents grant``. The run is paused then.
    """

    prerequisite: str
    retry_in: Duration | None = None

    def __post_init__(self) -> None:
        _check("the prerequisite of Unmet", self.prerequisite)
        if self.retry_in is not None:
            parse_duration(self.retry_in)


@dataclass(frozen=True, slots=True)
class Cancelled:
    """It stopped because ``ctx.cancel_requested`` said so. Where nobody has asked for that it is no answer."""


Prepared: TypeAlias = Ready | Pause | NeedsApproval | Unmet | Cancelled
"""What a preparation returns."""

_NAMES: Final = {c.__name__: c for c in (Ready, Pause, NeedsApproval, Unmet, Cancelled)} | {"Prepared": Prepared}
"""What a module may import for its type checker only."""


def _storable(what: str, text: str) -> None:
    """Refuse what PostgreSQL cannot hold as text."""
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise PreparationInvalid(f"{what} has a character that cannot be stored: a NUL, or half of a pair")


def _check(what: str, name: object) -> None:
    try:
        check_name(what, name)
    except InvalidPolicy as exc:
        raise PreparationInvalid(str(exc)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareContext:
    """The attempt that is prepared; declare a first parameter ``ctx: PrepareContext`` to get it.

    Attributes:
        job_id: The job.
        task: Its task.
        queue: The queue that it was claimed from.
        attempt: The number of the attempt that would begin, from 1.
        claim_epoch: With ``job_id`` it names the claim.
        generation: How often the finished job has been reopened.
        worker_id: The worker.
        deadline: The instant after which no attempt starts, or None.
        facts: What preparations of the run have found out, this task's and others'; of a plain job, its own.
        approved: What somebody has approved of for this job, in the words of ``NeedsApproval``.
    """

    job_id: UUID
    task: str
    queue: str
    attempt: int
    claim_epoch: int
    generation: int
    worker_id: UUID
    deadline: datetime | None
    facts: Mapping[str, Any] = field(default_factory=dict)
    approved: frozenset[str] = frozenset()
    key_generation: int | None = None
    _told: Callable[[], bool] = lambda: False

    @property
    def cancel_requested(self) -> bool:
        """Whether somebody has asked for a cancel; a plain function looks here between two steps."""
        return self._told()

    @property
    def idempotency_key(self) -> str:
        """The key that the body will give to outside providers."""
        return idempotency_key(self.job_id, self.key_generation)


@dataclass(frozen=True, slots=True)
class Preparation:
    """A task's preparation, as workers call it.

    Attributes:
        fn: The function.
        takes_context: Whether its first parameter is its ``PrepareContext``.
        checks: What the task calls its checks.
        signature: The task's own parameters, for the defaults of what a job left out.
    """

    fn: Callable[..., Prepared | Coroutine[Any, Any, Prepared]]
    takes_context: bool
    checks: tuple[str, ...]
    signature: inspect.Signature


def preparation_of(task: Task[..., Any], fn: object, checks: object, localns: Mapping[str, Any] | None) -> Preparation:
    """A task's preparation, looked at as far as can be done before it is called.

    Raises:
        TaskDefinitionError: It does not fit the task; the message says what.
    """
    from taskq.reconcile_hooks import refuse_unlike, signature_of

    name = task.name
    if not inspect.isfunction(fn):
        raise TaskDefinitionError(
            f"task {name}: prepare is {fn!r}, which is no plain function; write it with def or async def"
        )
    if inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        raise TaskDefinitionError(f"task {name}: its preparation is a generator; return the answer instead of yielding")
    if isinstance(checks, str) or not isinstance(checks, Iterable):
        raise TaskDefinitionError(f'task {name}: checks is {checks!r}; give their names, such as checks=("bank_open",)')
    listed = tuple(checks)
    for each in listed:
        try:
            check_name("a check", each)
        except InvalidPolicy as exc:
            raise TaskDefinitionError(f"task {name}: {exc}") from None
    takes_context = refuse_unlike(task, f"preparation {fn.__name__}", fn, PrepareContext, {**_NAMES, **(localns or {})})
    return Preparation(fn, takes_context, listed, signature_of(task))

"""Requests to enqueue: what one job asks for, and the one statement's arguments for many.

What jobs have in common is a spec, sent once; a job adds its payload and its keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypedDict, TypeVar

from taskq.codec import encode_any
from taskq.cohorts import Cohort
from taskq.durations import Duration, parse_duration
from taskq.effects import TerminalEffect
from taskq.errors import InvalidRequest, PayloadError
from taskq.policy import UNSET, ExecutionPolicy, PolicyLayer, Unset, check_name

if TYPE_CHECKING:
    from taskq.tasks import Task

__all__ = ["Batch", "CallOptions", "JobRequest", "OnConflict", "Spec", "build_batch", "merge"]

R_co = TypeVar("R_co", covariant=True)
OnConflict: TypeAlias = Literal["existing", "raise"]
MAX_KEY: Final = 512
MAX_JOBS: Final = 1_000_000
MAX_TAGS: Final = 64
MAX_TAG: Final = 256
MAX_META_BYTES: Final = 65_536
FIRST_INSTANT: Final = datetime(1970, 1, 1, tzinfo=UTC)
END_OF_INSTANTS: Final = datetime(9000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Spec:
    """What jobs of one task and one set of options have in common.

    Attributes:
        text: The JSON object that ``enqueue_many`` takes.
        policy: The policy that it names, which must be stored before.
    """

    text: str
    policy: ExecutionPolicy
    policy_id: str


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What ``using`` says about a job, checked; see ``Task.using`` for the meaning of each."""

    layer: PolicyLayer = field(default_factory=PolicyLayer)
    run_in: float | None = None
    run_at: datetime | None = None
    deadline_at: datetime | None = None
    deadline_in: float | Unset | None = UNSET
    unique_key: str | None = None
    unique_scope: str | None = None
    unique_hold: float | None = None
    on_conflict: OnConflict | None = None
    idempotency_key: str | None = None
    idempotency_scope: str | None = None
    ordering_key: str | None = None
    tags: tuple[str, ...] = ()
    meta: str | None = None
    connection: Any = None

    def spec_key(self) -> tuple[Any, ...]:
        """Equal for options whose specs are."""
        return (
            self.layer,
            self.run_in,
            self.run_at,
            self.deadline_at,
            self.deadline_in,
            self.unique_scope,
            self.unique_hold,
            self.idempotency_scope,
            self.tags,
            self.meta,
        )


class JobRequest(Generic[R_co]):
    """One job that is to be enqueued, its arguments already checked and encoded; made by ``task.job(...)``."""

    __slots__ = ("options", "payload", "spec", "task")

    def __init__(self, task: Task[..., R_co], spec: Spec, options: CallOptions, payload: str) -> None:
        self.task = task
        self.spec = spec
        self.options = options
        self.payload = payload

    def __repr__(self) -> str:
        return f"JobRequest({self.task.name}, {self.payload[:80]})"


@dataclass(frozen=True, slots=True)
class Batch:
    """The arguments of one call of ``enqueue_many``, in its order, and what comes with it."""

    specs: str
    spec: list[int]
    payload: list[str]
    unique_key: list[str | None] | None
    idempotency_key: list[str | None] | None
    on_conflict: OnConflict
    ordering_key: list[str | None] | None
    policies: dict[str, ExecutionPolicy]
    connection: Any

    @property
    def is_plain(self) -> bool:
        """Whether it is one job that asks for nothing others could collide with, on no connection of the caller's."""
        return (
            len(self.spec) == 1
            and self.connection is None
            and self.unique_key is None
            and self.idempotency_key is None
            and self.ordering_key is None
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The statement's arguments, for either driver."""
        return (
            self.specs,
            self.spec,
            self.payload,
            self.unique_key,
            self.idempotency_key,
            self.on_conflict,
            self.ordering_key,
        )


def build_batch(
    requests: Sequence[JobRequest[Any]], *, connection: Any = None, on_conflict: OnConflict | None = None
) -> Batch:
    """Put requests together for one statement; equal specs are sent once.

    Args:
        requests: In the order in which answers are wanted.
        connection: Used if the requests name none.
        on_conflict: Used if the requests say nothing else.

    Raises:
        InvalidRequest: The requests differ in ``connection`` or in ``on_conflict``, or there are too many.
    """
    _check_on_conflict(on_conflict)
    if len(requests) > MAX_JOBS:
        raise InvalidRequest(f"{len(requests)} jobs in one call are too many; send at most {MAX_JOBS} at once")
    numbers: dict[str, int] = {}
    policies: dict[str, ExecutionPolicy] = {}
    spec: list[int] = []
    unique: list[str | None] = []
    idempotency: list[str | None] = []
    ordering: list[str | None] = []
    connections: dict[int, Any] = {}
    conflicts: set[OnConflict] = set()
    last_spec: Spec | None = None
    last_options: CallOptions | None = None
    number = 0
    for request in requests:
        options = request.options
        if request.spec is not last_spec:
            last_spec = request.spec
            number = numbers.setdefault(last_spec.text, len(numbers) + 1)
            policies[last_spec.policy_id] = last_spec.policy
        if options is not last_options:
            last_options = options
            used = connection if options.connection is None else options.connection
            connections[id(used)] = used
            if options.unique_key is not None:
                conflicts.add(options.on_conflict or on_conflict or "existing")
        spec.append(number)
        unique.append(options.unique_key)
        idempotency.append(options.idempotency_key)
        ordering.append(options.ordering_key)
    if len(connections) > 1:
        raise InvalidRequest("the requests name different connections; one call uses one: split them")
    if len(conflicts) > 1:
        raise InvalidRequest("the requests differ in on_conflict; one call has one: split them")
    return Batch(
        specs="[" + ",".join(numbers) + "]",
        spec=spec,
        payload=[request.payload for request in requests],
        unique_key=unique if any(key is not None for key in unique) else None,
        idempotency_key=idempotency if any(key is not None for key in idempotency) else None,
        on_conflict=next(iter(conflicts), "existing"),
        ordering_key=ordering if any(key is not None for key in ordering) else None,
        policies=policies,
        connection=next(iter(connections.values()), connection),
    )


def merge(batches: Sequence[Batch]) -> Batch:
    """Several batches that are plain as one, their jobs in order."""
    if len(batches) == 1:
        return batches[0]
    numbers: dict[str, int] = {}
    policies: dict[str, ExecutionPolicy] = {}
    for batch in batches:
        numbers.setdefault(batch.specs, len(numbers) + 1)
        policies.update(batch.policies)
    return replace(
        batches[0],
        specs="[" + ",".join(specs[1:-1] for specs in numbers) + "]",
        spec=[numbers[batch.specs] for batch in batches],
        payload=[batch.payload[0] for batch in batches],
        policies=policies,
    )


def build_spec(task: str, policy: ExecutionPolicy, options: CallOptions, required_worker_schema: int | None) -> Spec:
    """The spec of a task's jobs under these options."""
    deadline = policy.deadline if isinstance(options.deadline_in, Unset) else options.deadline_in
    policy_id = policy.id
    values: dict[str, Any] = {
        "task": task,
        "queue": policy.queue,
        "priority": policy.priority,
        "max_attempts": policy.retry.max_attempts,
        "effect_class": policy.effect_class,
        "policy_id": policy_id,
        "required_worker_schema": required_worker_schema,
        "has_effects": True if policy.effects else None,
        "run_in": options.run_in,
        "run_at": options.run_at.isoformat() if options.run_at else None,
        "deadline": options.deadline_at.isoformat() if options.deadline_at else None,
        "deadline_in": None if options.deadline_at else deadline,
        "unique_scope": options.unique_scope,
        "unique_hold": options.unique_hold,
        "idempotency_scope": options.idempotency_scope,
        "tags": list(options.tags) or None,
        "ordering": policy.ordering,
        "cohort": policy.cohort.name if policy.cohort else None,
    }
    text = json.dumps({k: v for k, v in values.items() if v is not None}, ensure_ascii=False)
    if options.meta is not None:
        text = f'{text[:-1]}, "meta": {options.meta}}}'
    return Spec(text, policy, policy_id)


class Using(TypedDict, total=False):
    """What a caller may say about the jobs of a task: ``task.using(...)``.

    Attributes:
        queue: Where they wait.
        priority: 0 to 9, higher first.
        max_attempts: How many failures of the body end the job; None for no limit.
        timeout: How long an attempt may run; None for no limit.
        deadline: An instant, or a duration from enqueue, after which no attempt starts; None for no limit.
        run_in: A duration from enqueue before which no attempt starts.
        run_at: An instant before which no attempt starts.
        unique_key: At most one job with this key is in the queue at a time.
        unique_scope: What the unique key is unique in; the task's name by default.
        unique_hold: How long the unique key stays taken after the job has finished.
        on_conflict: When the unique key is taken: ``"existing"``, the default, answers with the job that holds it,
            ``"raise"`` enqueues nothing and raises ``UniqueKeyHeld``.
        idempotency_key: The same request with the same key is answered with the same job, for as long as the
            installation remembers keys (90 days by default).
        idempotency_scope: What the idempotency key is unique in; the task's name by default.
        effects: What runs once the job has ended, instead of what the task says; ``[]`` for nothing.
        ordering_key: Jobs with this key run one at a time, in the order in which they were enqueued; the key is one for
            the whole installation, across tasks and queues. 1 to 512 characters.
        cohort: Whose limit they count against while they run, instead of what the task says; None for none.
        tags: Words for finding jobs: at most 64, each of 1 to 256 characters.
        meta: Data that travels with the job, apart from its arguments; at most 64 KiB as JSON.
        connection: The caller's own connection: the job commits or vanishes with its transaction. For the async calls
            one of asyncpg, an async one of psycopg, or an ``AsyncSession`` or ``AsyncConnection`` of SQLAlchemy; for
            the sync calls one of psycopg, a ``Session`` or ``Connection`` of SQLAlchemy, or Django's.
    """

    queue: str
    priority: int
    max_attempts: int | None
    timeout: Duration | None
    deadline: Duration | datetime | None
    run_in: Duration | None
    run_at: datetime | None
    unique_key: str | None
    unique_scope: str | None
    unique_hold: Duration | None
    on_conflict: OnConflict
    idempotency_key: str | None
    idempotency_scope: str | None
    effects: Iterable[TerminalEffect]
    ordering_key: str | None
    cohort: Cohort | None
    tags: Iterable[str]
    meta: Mapping[str, Any] | None
    connection: Any


RUN_KEY: Final = re.compile(r"[!-~]{1,128}")
_LAYER: Final = ("queue", "priority", "max_attempts", "timeout", "effects", "cohort")


def check_options(given: Using) -> CallOptions:
    """Check what a caller said about a job.

    Raises:
        InvalidRequest: A value is not valid, an option is unknown, or two contradict each other.
        InvalidPolicy: A value of the policy, or a duration, is not valid.
    """
    if unknown := sorted(set(given) - set(Using.__annotations__)):
        raise InvalidRequest(f"using() has no option {unknown[0]!r}; it knows {', '.join(Using.__annotations__)}")
    layer: dict[str, Any] = {name: value for name, value in given.items() if name in _LAYER}
    run_in, run_at = given.get("run_in"), given.get("run_at")
    unique_key, unique_scope, unique_hold = (
        given.get("unique_key"),
        given.get("unique_scope"),
        given.get("unique_hold"),
    )
    idempotency_key, idempotency_scope = given.get("idempotency_key"), given.get("idempotency_scope")
    on_conflict, tags, meta = given.get("on_conflict"), given.get("tags", ()), given.get("meta")
    deadline: Duration | datetime | Unset | None = given.get("deadline", UNSET)
    if run_in is not None and run_at is not None:
        raise InvalidRequest("both run_in and run_at are given; give one")
    _check_on_conflict(on_conflict)
    if unique_key is None and (unique_scope is not None or unique_hold is not None):
        raise InvalidRequest("unique_scope and unique_hold say nothing without a unique_key; give one")
    if idempotency_key is None and idempotency_scope is not None:
        raise InvalidRequest("idempotency_scope says nothing without an idempotency_key; give one")
    if isinstance(tags, str):
        raise InvalidRequest(f"tags is the text {tags!r}; give a list of texts")
    _check_instant("run_at", run_at)
    at_instant = deadline if isinstance(deadline, datetime) else None
    _check_instant("deadline", at_instant)
    deadline_in: float | Unset | None = UNSET
    if not isinstance(deadline, (datetime, Unset)):
        deadline_in = None if deadline is None else parse_duration(deadline)
    return CallOptions(
        layer=PolicyLayer(**layer),
        run_in=None if run_in is None else parse_duration(run_in),
        run_at=run_at,
        deadline_at=at_instant,
        deadline_in=deadline_in,
        unique_key=_check_key("unique_key", unique_key),
        unique_scope=None if unique_scope is None else check_name("unique_scope", unique_scope),
        unique_hold=None if unique_hold is None else parse_duration(unique_hold),
        on_conflict=on_conflict,
        idempotency_key=_check_key("idempotency_key", idempotency_key),
        idempotency_scope=None if idempotency_scope is None else check_name("idempotency_scope", idempotency_scope),
        ordering_key=_check_key("ordering_key", given.get("ordering_key")),
        tags=_check_tags(tags),
        meta=None if meta is None else check_meta(meta),
        connection=given.get("connection"),
    )


def _check_on_conflict(value: object) -> None:
    if value not in (None, "existing", "raise"):
        raise InvalidRequest(f"on_conflict is {value!r}; give 'existing' or 'raise'")


def _check_instant(what: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, datetime):
        raise InvalidRequest(f"{what} is {value!r}; give a datetime with a time zone")
    if value.tzinfo is None:
        raise InvalidRequest(f"{what} is {value!r}, which has no time zone; use datetime.now(UTC) or add a tzinfo")
    if not FIRST_INSTANT <= value < END_OF_INSTANTS:
        raise InvalidRequest(f"{what} is {value!r}; give an instant from 1970 to 8999, or None")


def _check_key(what: str, key: str | None) -> str | None:
    if key is None:
        return None
    if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY:
        raise InvalidRequest(f"{what} is {str(key)[:60]!r}; give a text of 1 to {MAX_KEY} characters")
    return check_text(what, key)


def check_text(what: str, text: object) -> str:
    """A text that can be stored.

    Raises:
        InvalidRequest: It is no text, or has characters that PostgreSQL cannot hold.
    """
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{what} has {text!r}; give texts" if what == "tags" else f"{what} is {text!r}; give a text"
        )
    try:
        encode_any(text, what)
    except PayloadError as exc:
        raise InvalidRequest(str(exc)) from None
    return text


def _check_tags(tags: Iterable[str]) -> tuple[str, ...]:
    checked = tuple(check_text("tags", tag) for tag in tags)
    if len(checked) > MAX_TAGS:
        raise InvalidRequest(
            f"tags has {len(checked)} texts, the limit is {MAX_TAGS}; put data into the payload or meta"
        )
    for tag in checked:
        if not 1 <= len(tag) <= MAX_TAG:
            raise InvalidRequest(
                f"tags has a text of {len(tag)} characters, the limit is {MAX_TAG}, and the least is 1: {tag[:60]!r}"
            )
    return checked


def check_meta(meta: Mapping[str, Any]) -> str:
    """What travels with a job or run, as JSON text.

    Raises:
        InvalidRequest: It is no mapping, or too large.
        PayloadError: It cannot be stored.
    """
    if not isinstance(meta, Mapping):
        raise InvalidRequest(f"meta is of type {type(meta).__name__}; give a mapping such as {{'trace': '...'}}")
    text = encode_any(dict(meta), "meta")
    size = len(text.encode())
    if size > MAX_META_BYTES:
        raise InvalidRequest(f"meta has {size} bytes as JSON, the limit is {MAX_META_BYTES}; put it in the payload")
    return text


def check_run_key(key: str | None) -> str | None:
    """The key of a run.

    Raises:
        InvalidRequest: It is none.
    """
    if key is not None and not (isinstance(key, str) and RUN_KEY.fullmatch(key)):
        raise InvalidRequest(
            f"run_key is {str(key)[:60]!r}; give 1 to 128 printable ASCII characters without spaces, or None for none"
        )
    return key

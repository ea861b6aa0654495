"""Handles of jobs, and what one looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast
from uuid import UUID

from taskq.codec import decode_any
from taskq.db.pools import refuse_in_event_loop
from taskq.durations import Duration
from taskq.effects import EffectInfo
from taskq.errors import JobNotFound

if TYPE_CHECKING:
    from taskq.app import TaskQ
    from taskq.tasks import Task

__all__ = ["CancelAnswer", "Job", "JobInfo", "JobStatus", "ResolveAnswer", "RetryAnswer", "SignalAnswer"]

R_co = TypeVar("R_co", covariant=True)
JobStatus: TypeAlias = Literal["pending", "running", "held", "unknown", "succeeded", "failed", "cancelled"]
CancelAnswer: TypeAlias = Literal["cancelled", "requested", "finished", "unknown", "not_found"]
RetryAnswer: TypeAlias = Literal["reopened", "due"]
SignalAnswer: TypeAlias = Literal["sent", "already"]
ResolveAnswer: TypeAlias = Literal["succeeded", "cancelled", "pending"]


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as it was when the database was asked; the fields are the columns of the view ``all_jobs``."""

    id: UUID
    task: str
    queue: str
    status: JobStatus
    held_reason: str | None
    priority: int
    attempt: int
    max_attempts: int
    recoveries: int
    retry_afters: int
    snoozes: int
    releases: int
    claim_epoch: int
    generation: int
    effect_class: str
    policy_id: str
    worker_id: UUID | None
    created_at: datetime
    run_at: datetime
    deadline: datetime | None
    claimed_at: datetime | None
    cancel_requested_at: datetime | None
    finished_at: datetime | None
    unique_scope: str | None
    unique_key: str | None
    ordering_key: str | None
    cohort: str | None
    tags: tuple[str, ...]
    payload: Mapping[str, Any] | None
    """Its arguments; None where they were not kept (``history="slim"``), and its result neither."""
    result: Any
    error: Mapping[str, Any] | None
    meta: Mapping[str, Any] | None

    @property
    def finished(self) -> bool:
        """Whether it has ended for good, unless somebody reopens it."""
        return self.finished_at is not None


class Job(Generic[R_co]):
    """The handle of a job; holds its id and asks the database about the rest.

    Attributes:
        id: The job's id.
        inserted: False if the request was answered with a job that was there already.
    """

    __slots__ = ("_app", "_in_transaction", "_task", "id", "inserted")

    def __init__(
        self,
        app: TaskQ,
        job_id: UUID,
        task: Task[..., R_co] | None = None,
        inserted: bool = True,
        in_transaction: bool = False,
    ) -> None:
        self.id = job_id
        self.inserted = inserted
        self._app = app
        self._task = task
        # Enqueued on the caller's connection: until that commits, nobody else sees the job.
        self._in_transaction = in_transaction

    async def result(self, timeout: Duration | None = None) -> R_co:
        """Wait until the job has finished; give what its body returned.

        Args:
            timeout: The longest wait; None for no limit.

        Raises:
            JobFailed: It failed for good.
            JobCancelled: It was cancelled.
            ResultNotKept: It has succeeded, and its task says ``history="slim"``.
            ResultTimeout: It had not finished in time; the message says what was seen of it.
            JobNotFound: There is no such job.
            PayloadError: What is stored does not fit what the task returns.
        """
        client = await self._app._open_async()
        return self._decode(await client.wait(self.id, timeout, may_appear=self._in_transaction))

    def result_sync(self, timeout: Duration | None = None) -> R_co:
        """Like ``result``, for code without an event loop."""
        refuse_in_event_loop("result_sync")
        return self._decode(self._app._sync.wait(self.id, timeout, may_appear=self._in_transaction))

    async def info(self) -> JobInfo:
        """All about it.

        Raises:
            JobNotFound: There is no such job, or its transaction has not committed.
        """
        return self._found(await self._app.get(self.id))

    def info_sync(self) -> JobInfo:
        """Like ``info``, for code without an event loop."""
        refuse_in_event_loop("info_sync")
        return self._found(self._app.get_sync(self.id))

    async def status(self) -> JobStatus:
        """Its status.

        Raises:
            JobNotFound: There is no such job, or its transaction has not committed.
        """
        return (await self.info()).status

    def status_sync(self) -> JobStatus:
        """Like ``status``, for code without an event loop."""
        refuse_in_event_loop("status_sync")
        return self.info_sync().status

    async def cancel(self, reason: str | None = None, *, actor: str | None = None) -> CancelAnswer:
        """Cancel it; see ``TaskQ.cancel``."""
        return await self._app.cancel(self.id, reason, actor=actor)

    def cancel_sync(self, reason: str | None = None, *, actor: str | None = None) -> CancelAnswer:
        """Like ``cancel``, for code without an event loop."""
        return self._app.cancel_sync(self.id, reason, actor=actor)

    async def retry(self, reason: str | None = None, *, actor: str | None = None) -> RetryAnswer:
        """Reopen it or make it due; see ``TaskQ.retry``."""
        return await self._app.retry(self.id, reason, actor=actor)

    def retry_sync(self, reason: str | None = None, *, actor: str | None = None) -> RetryAnswer:
        """Like ``retry``, for code without an event loop."""
        return self._app.retry_sync(self.id, reason, actor=actor)

    async def signal(self, name: str, payload: Any = None, *, key: str | None = None) -> SignalAnswer:
        """Send it a signal; see ``TaskQ.signal``."""
        return await self._app.signal(self.id, name, payload, key=key)

    def signal_sync(self, name: str, payload: Any = None, *, key: str | None = None) -> SignalAnswer:
        """Like ``signal``, for code without an event loop."""
        return self._app.signal_sync(self.id, name, payload, key=key)

    async def effects(self) -> list[EffectInfo]:
        """The terminal effects that its ends have caused, the newest first, and how each stands."""
        return await (await self._app._open_async()).effects(self.id)

    def effects_sync(self) -> list[EffectInfo]:
        """Like ``effects``, for code without an event loop."""
        refuse_in_event_loop("effects_sync")
        return self._app._sync.effects(self.id)

    def _found(self, info: JobInfo | None) -> JobInfo:
        if info is None:
            raise JobNotFound(
                f"there is no job {self.id}",
                detail={"job_id": str(self.id)},
                hint="It was enqueued in a transaction that has not committed, or retention has dropped it.",
            )
        return info

    def _decode(self, text: str | None) -> R_co:
        return cast(R_co, decode_any(text) if self._task is None else self._task.codec.decode_result(text))

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

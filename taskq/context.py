"""What a body is told about its own attempt."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, overload
from uuid import UUID, uuid4

import msgspec

from taskq.effects import EffectOrigin
from taskq.errors import CheckpointNotLoaded, JobCancelled
from taskq.idempotency import idempotency_key
from taskq.telemetry import get_logger

if TYPE_CHECKING:
    from taskq.transaction import SyncTransaction, Transaction

__all__ = ["JobContext"]

T = TypeVar("T")


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
        "_key_generation",
        "_logger",
        "_meta",
        "_saved",
        "_services",
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
    def effect(self) -> EffectOrigin | None:
        """What this job is the terminal effect of; None where it is none."""
        return EffectOrigin.of(self.meta)

    @property
    def idempotency_key(self) -> str:
        """A key for outside providers, so that they can refuse a repetition.

        The same for every attempt of this job: its id as text, and ``:gN`` behind it where the job was reopened after
        a terminal effect with ``undoes=True`` had undone it, for then the same work is a new effect.
        """
        return idempotency_key(self.job_id, self._key_generation)

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

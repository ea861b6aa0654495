"""What a body is told about its own attempt."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import msgspec

from taskq.effects import EffectOrigin
from taskq.errors import JobCancelled
from taskq.telemetry import get_logger

__all__ = ["JobContext"]


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
        "_logger",
        "_meta",
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
        """A key for outside providers, the same for every attempt of this job, so that they can refuse a repetition."""
        return f"taskq-{self.job_id}"

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

    def __repr__(self) -> str:
        return f"JobContext({self.task}, job_id={self.job_id}, attempt={self.attempt}, claim_epoch={self.claim_epoch})"

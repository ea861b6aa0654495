"""What a body in a child process gets of its attempt's context."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NoReturn
from uuid import UUID

from taskq.context import JobContext
from taskq.errors import TransactionalStepUnsupported, UnsupportedInProcess
from taskq.worker.claims import Claim

AVAILABLE: Final = frozenset(
    {
        "attempt",
        "cancel_requested",
        "claim_epoch",
        "deadline",
        "effect",
        "facts",
        "generation",
        "idempotency_key",
        "job_id",
        "local",
        "logger",
        "max_attempts",
        "meta",
        "queue",
        "raise_if_cancelled",
        "task",
        "transaction",
        "transaction_sync",
        "worker_id",
    }
)
"""The public names of ``JobContext`` that work in a child: they need what the child was told, and nothing else."""


class ProcessContext(JobContext):
    """A ``JobContext`` in a child process; a name that needs the worker itself is refused where it is used.

    Raises:
        UnsupportedInProcess: On access of such a name.
    """

    __slots__ = ()

    def transaction(self) -> NoReturn:
        """Refused, by its own name.

        Raises:
            TransactionalStepUnsupported: Always.
        """
        self._refuse("transaction")

    def transaction_sync(self) -> NoReturn:
        """Refused, by its own name.

        Raises:
            TransactionalStepUnsupported: Always.
        """
        self._refuse("transaction_sync")

    def _refuse(self, call: str) -> NoReturn:
        raise TransactionalStepUnsupported(
            f"ctx.{call}() needs the worker's own process, which settles a lost COMMIT, and this body runs in a child "
            "(process=True); leave process=True out, or split what computes from what writes into two tasks"
        )

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in AVAILABLE or not hasattr(JobContext, name):
            return super().__getattribute__(name)
        raise UnsupportedInProcess(
            f"ctx.{name} needs the worker's own process, and this body runs in a child (process=True); leave "
            "process=True out, or do without it"
        )


def told(claim: Claim, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a child is told of an attempt."""
    return {
        "job_id": str(claim.job_id),
        "task": claim.task,
        "queue": claim.queue,
        "attempt": claim.attempt + 1,
        "max_attempts": claim.max_attempts,
        "claim_epoch": claim.claim_epoch,
        "generation": claim.generation,
        "worker_id": str(claim.worker_id),
        "deadline": None if claim.deadline is None else claim.deadline.isoformat(),
        "meta": claim.meta,
        "key_generation": claim.key_generation,
        "facts": facts,
    }


def context_of(told: dict[str, Any]) -> ProcessContext:
    """The context out of what the child was told."""
    deadline = told["deadline"]
    return ProcessContext(
        **{
            **told,
            "job_id": UUID(told["job_id"]),
            "worker_id": UUID(told["worker_id"]),
            "deadline": None if deadline is None else datetime.fromisoformat(deadline),
        }
    )

"""taskq: a job queue on PostgreSQL whose side effects are never silently repeated and never silently lost.

An application makes one ``TaskQ``, registers functions with ``@app.task``, and enqueues jobs, in its own transaction if
it likes; workers (``taskq worker``) claim and run them. These are the public names, each
imported when it is first used, so that the command line starts quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskq.app import TaskQ
    from taskq.client.requests import JobRequest
    from taskq.context import JobContext
    from taskq.effects import EffectInfo, Ref, TerminalEffect
    from taskq.errors import (
        AlreadyResolved,
        CheckpointConflict,
        CommitNotConfirmed,
        ConfigurationError,
        DatabaseUnavailable,
        EffectsUnsettled,
        FencedOut,
        IdempotencyConflict,
        InvalidPolicy,
        InvalidRequest,
        JobCancelled,
        JobFailed,
        JobNotFound,
        OwnershipNotProven,
        PayloadError,
        ResultTimeout,
        StaleAttempt,
        TaskDefinitionError,
        TaskQError,
        TransactionalStepUnsupported,
        UniqueKeyHeld,
        WrongState,
    )
    from taskq.handle import Job, JobInfo
    from taskq.outcomes import OutcomeUnknown, RetryAfter, Snooze
    from taskq.policy import ExecutionPolicy, PolicyLayer, Retry, constant, exponential, linear
    from taskq.reconcile import DidNotHappen, Happened, ReconcileContext, StillUnknown
    from taskq.tasks import BoundTask, Task
    from taskq.transaction import SyncTransaction, Transaction

__all__ = [
    "AlreadyResolved",
    "BoundTask",
    "CheckpointConflict",
    "CommitNotConfirmed",
    "ConfigurationError",
    "DatabaseUnavailable",
    "DidNotHappen",
    "EffectInfo",
    "EffectsUnsettled",
    "ExecutionPolicy",
    "FencedOut",
    "Happened",
    "IdempotencyConflict",
    "InvalidPolicy",
    "InvalidRequest",
    "Job",
    "JobCancelled",
    "JobContext",
    "JobFailed",
    "JobInfo",
    "JobNotFound",
    "JobRequest",
    "OutcomeUnknown",
    "OwnershipNotProven",
    "PayloadError",
    "PolicyLayer",
    "ReconcileContext",
    "Ref",
    "ResultTimeout",
    "Retry",
    "RetryAfter",
    "Snooze",
    "StaleAttempt",
    "StillUnknown",
    "SyncTransaction",
    "Task",
    "TaskDefinitionError",
    "TaskQ",
    "TaskQError",
    "TerminalEffect",
    "Transaction",
    "TransactionalStepUnsupported",
    "UniqueKeyHeld",
    "WrongState",
    "constant",
    "exponential",
    "linear",
]

_HOMES = {
    "taskq.app": ("TaskQ",),
    "taskq.client.requests": ("JobRequest",),
    "taskq.context": ("JobContext",),
    "taskq.effects": (
        "EffectInfo",
        "Ref",
        "TerminalEffect",
    ),
    "taskq.errors": (
        "AlreadyResolved",
        "CheckpointConflict",
        "CommitNotConfirmed",
        "ConfigurationError",
        "DatabaseUnavailable",
        "EffectsUnsettled",
        "FencedOut",
        "IdempotencyConflict",
        "InvalidPolicy",
        "InvalidRequest",
        "JobCancelled",
        "JobFailed",
        "JobNotFound",
        "OwnershipNotProven",
        "PayloadError",
        "ResultTimeout",
        "StaleAttempt",
        "TaskDefinitionError",
        "TaskQError",
        "TransactionalStepUnsupported",
        "UniqueKeyHeld",
        "WrongState",
    ),
    "taskq.handle": (
        "Job",
        "JobInfo",
    ),
    "taskq.outcomes": (
        "OutcomeUnknown",
        "RetryAfter",
        "Snooze",
    ),
    "taskq.policy": (
        "ExecutionPolicy",
        "PolicyLayer",
        "Retry",
        "constant",
        "exponential",
        "linear",
    ),
    "taskq.reconcile": (
        "DidNotHappen",
        "Happened",
        "ReconcileContext",
        "StillUnknown",
    ),
    "taskq.tasks": (
        "BoundTask",
        "Task",
    ),
    "taskq.transaction": (
        "SyncTransaction",
        "Transaction",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

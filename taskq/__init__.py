"""taskq: a job queue on PostgreSQL whose side effects are never silently repeated and never silently lost.

An application makes one ``TaskQ``, registers functions with ``@app.task``, and enqueues jobs, in its own transaction if
it likes; workers (``taskq worker``) claim and run them. These are the public names, and nothing else happens here.
"""

from taskq.app import TaskQ
from taskq.client.requests import JobRequest
from taskq.context import JobContext
from taskq.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    FencedOut,
    IdempotencyConflict,
    InvalidPolicy,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFound,
    PayloadError,
    ResultTimeout,
    TaskDefinitionError,
    TaskQError,
    UniqueKeyHeld,
    WrongState,
)
from taskq.handle import Job, JobInfo
from taskq.outcomes import RetryAfter, Snooze
from taskq.policy import ExecutionPolicy, PolicyLayer, Retry, constant, exponential, linear
from taskq.tasks import BoundTask, Task

__all__ = [
    "BoundTask",
    "ConfigurationError",
    "DatabaseUnavailable",
    "ExecutionPolicy",
    "FencedOut",
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
    "PayloadError",
    "PolicyLayer",
    "ResultTimeout",
    "Retry",
    "RetryAfter",
    "Snooze",
    "Task",
    "TaskDefinitionError",
    "TaskQ",
    "TaskQError",
    "UniqueKeyHeld",
    "WrongState",
    "constant",
    "exponential",
    "linear",
]

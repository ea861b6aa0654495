"""What moves between the parts of a worker: claims on their way to a body, and ends on their way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from taskq.steps import Key

Outcome = Literal[
    "succeeded",
    "failed",
    "cancelled",
    "retry",
    "retry_after",
    "retry_after_spent",
    "snooze",
    "snooze_spent",
    "suspend",
    "release",
    "unknown",
]
"""What is told of an attempt; all but ``unknown`` end it."""
Interrupt = Literal["timeout", "cancel", "shutdown", "lease"]


@dataclass(slots=True, eq=False)
class Claim:
    """One attempt that this worker has claimed, as the database answered it."""

    worker_id: UUID
    job_id: UUID
    claim_epoch: int
    task: str
    payload: str
    queue: str
    priority: int
    run_at: datetime
    policy_id: str
    attempt: int
    max_attempts: int
    recoveries: int
    retry_afters: int
    snoozes: int
    generation: int
    effect_class: str
    deadline: datetime | None
    claimed_at: datetime
    meta: str | None
    key_generation: int | None = None
    releases: int = 0
    cohort: str | None = None
    received: float = 0.0
    """When the answer arrived, on the loop's clock."""
    started: float = 0.0
    """When its body started, on the loop's clock; 0 before that."""
    effect_started_at: datetime | None = None
    """When the database let it start its effect, once that is proven; its body may have done anything since."""
    open_step: Key | None = None
    """The step whose effect may have started, as long as nobody has told what became of it."""
    is_unknown: bool = False
    """Whether the database was told that its outcome is unknown."""

    @classmethod
    def from_row(cls, worker_id: UUID, row: Mapping[str, Any], received: float) -> Claim:
        """Read a row of kind ``job`` of the exchange."""
        _, *values = row.values()
        claim = cls(worker_id, *values)
        claim.received = received
        return claim


@dataclass(slots=True, eq=False)
class End:
    """How one attempt ended, kept until the database has confirmed it."""

    worker_id: UUID
    job_id: UUID
    claim_epoch: int
    outcome: Outcome
    outcome_id: int
    result: str | None = None
    """JSON text; only with ``succeeded``."""
    error: str | None = None
    """JSON text."""
    delay: float = 0.0
    """Seconds from now until it is due again; not for terminal outcomes."""
    task: str = ""
    minimal: bool = False
    """Whether it stands for an outcome that could not be stored."""
    effect_started_at: datetime | None = None
    """The effect start that its record must keep; None where there was none, and nothing is to be proven."""
    on_proven: Callable[[End], None] | None = None
    """Called once the record proves this end, where that is asked for."""
    busy: int = 0
    """How often its run was busy when it was sent."""


@dataclass(slots=True)
class Counts:
    """What this worker has done since it started."""

    claimed: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    suspended: int = 0
    released: int = 0
    fenced_out: int = 0
    unknown: int = 0
    not_proven: int = 0

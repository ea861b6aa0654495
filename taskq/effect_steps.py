"""Side-effecting steps of one attempt: the start is committed before the function is called, and what came of it after.

What nobody has told of stays open: whatever the body does then, its job becomes unknown and waits for a word. So one
effect at a time is under way in an attempt; what is open can be said of one step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from taskq.codec import decode_any
from taskq.errors import (
    FencedOut,
    JobCancelled,
    OwnershipNotProven,
    ResultNotStorable,
    StepFailed,
    StepRefused,
    describe,
)
from taskq.outcomes import OutcomeUnknown, RetryAfter, Snooze
from taskq.steps import Key, Record

if TYPE_CHECKING:
    from taskq.context import JobContext

__all__ = ["Attempt", "EffectSteps", "failed"]


class Attempt(Protocol):
    """Whoever runs the body, as far as a step's effect concerns it."""

    def effect_begins(self, key: Key) -> None:
        """From here on the body is told of what comes and not stopped, but for its timeout; and is open."""

    def effect_over(self, *, told: bool) -> None:
        """The function has ended, or was not called. ``told``: the step is open no more."""

    def did_not_happen(self, error: Exception) -> bool:
        """Whether the policy names that error as one to try again after."""


class EffectSteps:
    """The side-effecting steps of one attempt.

    Args:
        ctx: The attempt.
    """

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._open: Key | None = None
        self._started: datetime | None = None

    def check(self, key: Key) -> None:
        """Whether the body may ask for it.

        Raises:
            StepRefused: It may not; nothing was sent.
        """
        if not self._ctx._suspends:
            raise StepRefused(
                f"step {key}: the task is side_effecting, so its own effect start stands for all that its body does; "
                "leave the class of the step out, or make the task idempotent and its effects steps"
            )
        if self._open is not None:
            raise StepRefused(
                f"step {key}: the effect of step {self._open} is under way, or nobody knows what became of it, and an "
                "attempt has one at a time; await one before the next, or start jobs beside each other with ctx.child"
            )

    async def begin(self, key: Key) -> Record | None:
        """Commit the start; None if the function is to be called, else what stands on record.

        Raises:
            StepRefused: It is refused by what the database knows.
            JobCancelled: Somebody has asked to cancel the job.
            FencedOut: The attempt is over, or its lease.
            EffectStartNotProven: The answer proves nothing; it may be started.
            OwnershipNotProven, DatabaseUnavailable: There was no answer; it may be started.
        """
        self._open = key
        if self._ctx._run is not None:
            self._ctx._run.effect_begins(key)
        try:
            record = await self._ctx._bodies.start_step(self._ctx, key)
        except (FencedOut, JobCancelled, StepRefused):
            self._over(told=True)
            raise
        except BaseException:
            self._over(told=False)
            raise
        if isinstance(record, Record):
            self._over(told=True)
            return record
        self._started = record
        return None

    async def returned(self, key: Key, text: str) -> None:
        """Record what the function gave."""
        await self._tell(key, text, None)

    async def raised(self, key: Key, exc: BaseException) -> BaseException:
        """The function has raised: record what that means, and give what the body is to be told.

        By the rules for a side-effecting body. What it raises is its own word and final, unless the policy names the
        error, or it is one that says that nothing happened.
        """
        if not isinstance(exc, Exception) or isinstance(
            exc, (OutcomeUnknown, FencedOut, OwnershipNotProven, ResultNotStorable)
        ):
            self._over(told=False)
            return exc
        run = self._ctx._run
        if isinstance(exc, (RetryAfter, Snooze)) or (run is not None and run.did_not_happen(exc)):
            await self._tell(key, None, None)
            return exc
        error = describe(exc)
        await self._tell(key, None, json.dumps(error))
        return exc if isinstance(exc, JobCancelled) else failed(self._ctx.job_id, key, error)

    async def _tell(self, key: Key, text: str | None, error: str | None) -> None:
        try:
            assert self._started is not None
            await self._ctx._bodies.end_step(self._ctx, key, self._started, text, error)
        except FencedOut:
            # Too late for this attempt, and it is on record, or was decided: there is nothing more to tell.
            self._over(told=True)
            raise
        except BaseException:
            self._over(told=False)
            raise
        self._over(told=True)

    def _over(self, *, told: bool) -> None:
        if told:
            self._open = None
        if self._ctx._run is not None:
            self._ctx._run.effect_over(told=told)


def failed(job: object, key: Key, error: str | Mapping[str, Any]) -> StepFailed:
    """The error for a side-effecting step that failed, in this attempt or an earlier one."""
    known: Mapping[str, Any] = decode_any(error) if isinstance(error, str) else error
    return StepFailed(
        f"step {key} of job {job} has failed: {known.get('type')}: {known.get('message')}. That is its last word, and "
        "it is not called again",
        name=key.name,
        occurrence=key.occurrence,
        error=known,
    )

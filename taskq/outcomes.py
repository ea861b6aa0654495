"""What a body raises to say how its attempt ends, other than by returning or failing; none uses an attempt up."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from taskq.policy import parse_duration

__all__ = ["OutcomeUnknown", "RetryAfter", "Snooze", "Suspended", "TimedOut"]


class _Later(Exception):
    """The attempt ends here; the job is due again after ``delay`` seconds."""

    def __init__(self, delay: str | float | timedelta, reason: str | None = None) -> None:
        self.delay = parse_duration(delay)
        self.reason = reason
        super().__init__(f"again in {self.delay:g} s" + (f": {reason}" if reason else ""))


class RetryAfter(_Later):
    """Raised by a body: what it needs is not there now, try again after a delay.

    Uses up no attempt. Bounded by the policy's ``max_retry_afters``, and by the job's deadline; past either the job
    ends as failed, with ``RetryAfterExhausted`` or ``DeadlineExceeded``.

    Args:
        delay: ``"30s"``, seconds, or a timedelta.
        reason: Goes on the record of the attempt.

    Raises:
        InvalidDuration: The delay cannot be read.
    """


class Snooze(_Later):
    """Raised by a body: it is not yet time for this job, look again after a delay.

    Uses up no attempt. Bounded by the policy's ``max_snoozes``, and by the job's deadline; past either the job ends as
    failed, with ``SnoozeExhausted`` or ``DeadlineExceeded``.

    Args:
        delay: ``"1h"``, seconds, or a timedelta.

    Raises:
        InvalidDuration: The delay cannot be read.
    """

    def __init__(self, delay: str | float | timedelta) -> None:
        super().__init__(delay)


class OutcomeUnknown(Exception):
    """Raised by a body that does not know whether its effect has happened, after a timeout of the provider say.

    The job becomes ``unknown``: nothing runs it again until it is known what happened.

    Args:
        message: What the body knows; goes on the record.
    """


@dataclass(frozen=True, slots=True)
class TimedOut:
    """What ``ctx.wait_for`` gives where its time was up before a signal came: a value, to be matched by the body."""


class Suspended(BaseException):
    """Raised by ``ctx.sleep``, ``ctx.wait_for`` and ``ctx.child`` to end the attempt; the body begins anew after them.

    No ``Exception``, so that ``except Exception`` does not stop it. A body that catches it must raise it again: one
    that returns in spite of it has failed (``SuspensionSwallowed``).
    """


def is_suspension(exc: BaseException) -> bool:
    """Whether an exception, or all that a group of them holds, says that the body is suspended."""
    found = list(_leaves(exc))
    return any(isinstance(one, Suspended) for one in found) and all(
        isinstance(one, (Suspended, CancelledError)) for one in found
    )


def _leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        for inner in exc.exceptions:
            yield from _leaves(inner)
    else:
        yield exc

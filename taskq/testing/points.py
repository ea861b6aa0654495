"""The points that a job passes in a worker, by name; what stands where is told beside each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args
from uuid import UUID

from taskq.errors import ConfigurationError

__all__ = ["Fault", "How", "Passage", "Point", "When", "parse_fault"]

When = Literal["before", "after"]
How = Literal["raise", "kill", "drop"]


class Point(StrEnum):
    """A point in a job's life in a worker, in the order in which a job passes them.

    A worker sends ends and claims in one exchange, which in production is one statement in autocommit. While a fault is
    armed or a trace is kept, each exchange runs in a transaction of its own, so that a fault can strike on either side
    of its commit. What the server does is the same.

    The same holds for the statement that lets side-effecting bodies start; other bodies do not pass its point.
    """

    CLAIM_SENT = "claim_sent"
    """An exchange that asks for claims; after: the statement is written to the socket, its commit is not. Also passed
    by a worker that finds no job."""
    CLAIM_COMMITTED = "claim_committed"
    """Before: the server has executed the claim of at least one job and not committed it. After: it has, the worker
    has not seen the answer; in a drop the answer is lost."""
    CLAIM_RECEIVED = "claim_received"
    """The answer with the claims; before: it is read, nothing was done about it. After: the bodies may start."""
    EFFECT_START_COMMITTED = "effect_start_committed"
    """Passed by side-effecting bodies alone. Before: the server has set the effect start of at least one job and not
    committed it. After: it has, the worker has not seen the answer; in a drop the answer is lost. The body runs only
    once an answer has come."""
    BODY_DONE = "body_done"
    """The body has ended, in whatever way; before: nobody knows yet. After: its end is kept to be sent. Not passed by
    bodies that are handed back."""
    END_SENT = "end_sent"
    """An exchange that sends ends; after: the statement is written to the socket, its commit is not."""
    END_COMMITTED = "end_committed"
    """Before: the server has executed the ends and not committed them. After: it has, the worker has not seen the
    answer; in a drop the answer is lost."""
    END_RECEIVED = "end_received"
    """The answer to the ends; before: it is read, nothing was done about it. After: the ends are settled and
    forgotten."""


@dataclass(slots=True)
class Passage:
    """One side of one point that was passed.

    Attributes:
        point: The point.
        when: Before or after it.
        jobs: The jobs that passed. Whom a claim finds is known once it was executed, so a claim that was only sent has
            none yet.
    """

    point: Point
    when: When
    jobs: tuple[UUID, ...] = ()

    def __str__(self) -> str:
        return f"{self.point}:{self.when}"


class Fault:
    """One fault that is armed, and what became of it.

    Attributes:
        point: Where it strikes.
        when: Before or after the point.
        how: By an exception, by SIGKILL of the process, or by cutting the connection of the exchange.
        times: How often it strikes.
        skip: How many passages go unhurt before that.
        passed: How many passages it has seen.
        fired: Those at which it struck.
    """

    def __init__(self, point: Point, when: When, how: How, *, times: int = 1, skip: int = 0) -> None:
        try:
            self.point = Point(point)
        except ValueError:
            raise ConfigurationError(f"{point!r} is no fault point; there are {', '.join(Point)}") from None
        if when not in get_args(When) or how not in get_args(How):
            raise ConfigurationError(
                f"a fault strikes before or after a point, by raise, kill or drop; not {when!r} by {how!r}"
            )
        if times < 1 or skip < 0:
            raise ConfigurationError(f"times must be at least 1 and skip at least 0; they are {times} and {skip}")
        self.when: When = when
        self.how: How = how
        self.times = times
        self.skip = skip
        self.passed = 0
        self.fired: list[Passage] = []

    def is_hit(self, passage: Passage) -> bool:
        """Count a passage, and say whether the fault strikes at it."""
        if passage.point is not self.point or passage.when != self.when:
            return False
        self.passed += 1
        if not self.skip < self.passed <= self.skip + self.times:
            return False
        self.fired.append(passage)
        return True

    def __repr__(self) -> str:
        return f"<Fault {self.point}:{self.when}:{self.how} fired {len(self.fired)} of {self.times}>"


def parse_fault(text: str) -> Fault:
    """Read ``point:before|after:raise|kill|drop``, with ``:skip=N,times=N`` behind it if need be.

    Raises:
        ConfigurationError: The text is not of that form.
    """
    point, _, rest = text.strip().partition(":")
    when, _, rest = rest.partition(":")
    how, _, rest = rest.partition(":")
    numbers: dict[str, int] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in ("skip", "times") or not value.isdecimal():
            raise ConfigurationError(f"{part!r} is neither skip=N nor times=N, in the fault {text!r}")
        numbers[name] = int(value)
    return Fault(point, when, how, **numbers)  # type: ignore[arg-type]  # checked there

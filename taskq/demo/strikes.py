"""What is done to the workers of a demonstration while they work, and how it is told."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich.console import Console

from taskq.demo.stage import Stage
from taskq.demo.tables import show_table

__all__ = ["Kind", "Strike", "show_strikes", "strike"]

Kind: TypeAlias = Literal["killed", "frozen"]
"""killed: by SIGKILL, and another is started in its place. frozen: by SIGSTOP, until others have taken over."""


@dataclass(frozen=True, slots=True)
class Strike:
    """What was done to a worker, and the jobs that it ran just then."""

    kind: Kind
    worker: str
    held: int


def strike(
    stage: Stage,
    total: int,
    kinds: Sequence[Kind],
    what: str,
    rand: random.Random,
    tell: Callable[[int, str], None],
    *,
    look: Callable[[], int] | None = None,
    tasks: Sequence[str | None] = (),
) -> list[Strike]:
    """Strike workers that run jobs, each time as soon as so many jobs are left as ``rand`` says.

    Args:
        stage: The workers.
        total: How many jobs there are at the start.
        kinds: What is done, in order.
        what: What their jobs are called.
        rand: Chooses when, and whom.
        tell: Is told how many jobs are left, and what goes on.
        look: Says how many jobs are left, where that is not what the queue has.
        tasks: For each kill, which task's job the worker must be running then; None for any, as where nothing is said.

    Raises:
        TaskQError: A worker ended by itself, or nothing moves any more.
    """
    strikes: list[Strike] = []
    doing = f"{len(stage.workers)} workers"
    lefts = sorted(rand.sample(range(total * 3 // 10, total * 9 // 10), len(kinds)), reverse=True)
    for kind, remaining, task in zip(kinds, lefts, [*tasks, *[None] * (len(kinds) - len(tasks))], strict=True):
        stage.run_until(remaining, lambda left, doing=doing: tell(min(left, total), doing), look)  # type: ignore[misc]
        worker = rand.choice(stage.busy(task))
        if kind == "killed":
            held = stage.kill(worker, task)
            stage.replace(worker)
        else:
            held = stage.freeze(worker)
        strikes.append(Strike(kind, worker.name, held))
        doing = f"{worker.name} was {kind}, with {held} {what} running"
    return strikes


def show_strikes(console: Console, strikes: Sequence[Strike], what: str) -> None:
    """Print what was done to workers."""
    rows = [(strike.worker, strike.kind, str(strike.held)) for strike in strikes]
    show_table(console, "What was done to workers", ("worker", "what", f"{what} it ran"), rows)

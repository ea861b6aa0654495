"""What is searched: how many workers and jobs, of which classes, and what the world may do to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .rules import Design
from .state import IDEMPOTENT, PURE, SIDE_EFFECTING, Case, Job, State, Worker


@dataclass(frozen=True)
class Config:
    """One bounded world.

    Attributes:
        name: What the command calls it.
        classes: The effect class of each job.
        workers: How many slots for worker processes.
        faults: How many crashes, stalls past the lease, lost answers, timeouts and shutdowns there may be in all.
        orders: How many cancels, reopenings and resolutions operators may give in all.
        repeats: How often a body may ask in all for another attempt without using one up (RetryAfter, Snooze).
        max_attempts: Failures of a body that end a job.
        max_recoveries: Lost workers, and effects that did not happen, after which a job runs again.
        keys: The provider honours idempotency keys and can close them; otherwise every request is an effect.
        hook: The task has a reconcile hook.
        requests_outlive: A request to the provider may arrive after its process is dead.
        design: The rules, whole or broken.
    """

    name: str
    classes: tuple[str, ...]
    workers: int = 2
    faults: int = 2
    orders: int = 1
    repeats: int = 0
    max_attempts: int = 2
    max_recoveries: int = 1
    keys: bool = False
    hook: bool = True
    requests_outlive: bool = False
    design: Design = field(default_factory=Design)

    def initial(self) -> State:
        """Nothing enqueued, every worker live."""
        return State(
            cases=tuple(Case(Job(effect)) for effect in self.classes),
            workers=(Worker(),) * self.workers,
            attempts=(),
            faults=self.faults,
            orders=self.orders,
            repeats=self.repeats,
        )


S, I, P = SIDE_EFFECTING, IDEMPOTENT, PURE  # noqa: E741

QUICK: tuple[Config, ...] = (
    Config("a side effect, no keys", (S,), orders=2, repeats=1),
    Config("a side effect, keys", (S,), repeats=1, keys=True),
    Config("a side effect, no hook", (S,), hook=False),
    Config("an idempotent job", (I,), repeats=1, keys=True),
    Config("a pure job", (P,), repeats=1),
    Config("two side effects", (S, S), faults=1, orders=0),
)
"""Ends in under a minute."""

FULL: tuple[Config, ...] = (
    *QUICK,
    Config("three faults, two orders", (S,), faults=3, orders=2, repeats=1),
    Config("three faults, two orders, keys", (S,), faults=3, orders=2, keys=True),
    Config("two side effects, an order", (S, S), faults=1, orders=1),
    Config("two side effects, keys", (S, S), faults=1, orders=1, keys=True),
    Config("side effect and idempotent", (S, I), faults=1, orders=1, keys=True),
    Config("side effect and pure", (S, P), faults=1, orders=1),
    Config("idempotent and pure", (I, P), faults=1, orders=1, keys=True),
)
"""Two workers, two jobs, all classes: some minutes."""

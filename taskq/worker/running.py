"""One body that runs, as the parts of a worker see it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from taskq.context import BodyServices, JobContext
from taskq.policy import ExecutionPolicy
from taskq.worker.claims import Claim, Interrupt

if TYPE_CHECKING:
    from taskq.steps import Key
    from taskq.worker.process_body import ProcessBody

RANK: Final[dict[Interrupt, int]] = {"cancel": 1, "timeout": 1, "shutdown": 2, "lease": 3}
"""A body that is being stopped already is told again only for a reason of higher rank: it may have gone on."""


class Running:
    """One body that runs: who runs it, since when, and why it is being stopped.

    Its phase is ``preparing`` while its preparation goes on, before the attempt has begun. It is ``starting`` while a
    side-effecting body waits for its effect start, and ``effect`` from then on: a body that may have begun an effect
    is told of what comes, and stopped by nothing but its timeout. While a side-effecting step is under way it is
    ``effect`` as well; what comes meanwhile stops the body after the step.
    """

    __slots__ = (
        "_context",
        "_services",
        "after_step",
        "asked_at",
        "claim",
        "deaf",
        "facts",
        "interrupt",
        "phase",
        "policy",
        "process",
        "rank",
        "started",
        "task",
        "thread",
        "timed_out_at",
    )

    def __init__(self, claim: Claim, policy: ExecutionPolicy, services: BodyServices | None, started: float) -> None:
        self.claim = claim
        self.policy = policy
        self._services = services
        self._context: JobContext | None = None
        self.started = started
        self.task: asyncio.Task[None] | None = None
        self.thread = False
        self.process: ProcessBody | None = None
        self.phase: Literal["preparing", "body", "starting", "effect"] = "body"
        self.facts: Mapping[str, Any] | None = None
        self.interrupt: Interrupt | None = None
        self.rank = 0
        self.timed_out_at: float | None = None
        self.asked_at = 0.0
        self.deaf = False
        self.after_step: Interrupt | None = None

    @property
    def context(self) -> JobContext:
        """What the body is told of its attempt: made when first asked for, in the loop's thread, as few bodies ask."""
        if self._context is None:
            claim = self.claim
            self._context = JobContext(
                job_id=claim.job_id,
                task=claim.task,
                queue=claim.queue,
                attempt=claim.attempt + 1,
                max_attempts=claim.max_attempts,
                claim_epoch=claim.claim_epoch,
                generation=claim.generation,
                worker_id=claim.worker_id,
                deadline=claim.deadline,
                meta=claim.meta,
                key_generation=claim.key_generation,
                services=self._services,
                suspends=claim.effect_class != "side_effecting",
                facts=self.facts,
            )
            self._context._run = self
        return self._context

    @property
    def steps_left(self) -> list[Key]:
        """The recorded steps that the body has not asked for, as far as it has asked for any."""
        steps = None if self._context is None else self._context._steps
        return [] if steps is None else steps.left

    @property
    def suspended(self) -> list[Key]:
        """The sleeps and waits that the body was suspended for; empty if it was not."""
        steps = None if self._context is None else self._context._steps
        return [] if steps is None else steps.suspended

    def effect_begins(self, key: Key) -> None:
        """The start of a side-effecting step is about to be sent."""
        self.claim.open_step = key
        self.phase = "effect"

    def effect_over(self, *, told: bool) -> None:
        """Its function has ended, or was not called; ``told``: the database knows what became of it."""
        if told:
            self.claim.open_step = None
        self.phase = "body"
        by, self.after_step = self.after_step, None
        if by is not None and self.interrupt is None:
            self.interrupt, self.rank = by, RANK[by]
            self.stop()

    def did_not_happen(self, error: Exception) -> bool:
        """Whether the policy names that error as one to try again after."""
        return self.policy.retry.on is not None and self.policy.retry.retries(error)

    def tell_in_step(self, by: Interrupt) -> None:
        """Tell a body whose step is under way; it is stopped after that, for the gravest reason."""
        if self.after_step is None or RANK[by] > RANK[self.after_step]:
            self.after_step = by
        self.tell()

    def tell(self) -> None:
        """Tell the body that it should come to an end, without stopping it."""
        self.context.cancel_requested = True
        if self.process is not None:
            self.process.tell()

    def stop(self) -> None:
        """Stop the body, for the reason that ``interrupt`` and ``rank`` say.

        A coroutine is cancelled, a function in a thread is only told through its context, and a child process is told
        and, if that does not help, killed.
        """
        if self.process is not None:
            self.process.stop(next(by for by, rank in RANK.items() if rank == self.rank))
        elif self.thread:
            self.context.cancel_requested = True
        elif self.task is not None:
            self.task.cancel()


def effects(runs: Iterable[Running]) -> int:
    """How many may have begun a side effect."""
    return sum(run.phase == "effect" for run in list(runs))


def overlapping(runs: Iterable[Running]) -> int:
    """How many must not outlive the lease, since each would run beside its own successor.

    One that waits for its effect start is none: it is not called any more. Nor are preparations, which only look, nor
    those that may run twice, reconcile hooks among them, while started effects would end with them that can still tell
    their outcome.
    """
    runs = list(runs)
    spared = effects(runs) > 0
    return sum(run.phase == "body" and not (spared and run.claim.effect_class == "pure") for run in runs)

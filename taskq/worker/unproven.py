"""Claims that prove nothing: no body is called, each is handed back and waits longer each time, and is told of once."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from typing import Any, Final
from uuid import UUID

from taskq import errors
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.worker.claims import Claim, Counts, End
from taskq.worker.complete import next_outcome_id
from taskq.worker.proofs import prove_claim

log = get_logger("worker")

DELAYS: Final = (5.0, 15.0, 45.0, 135.0, 405.0, 600.0)
"""Seconds that a job waits each time, by how often it was handed back before."""
REMEMBERED: Final = 10_000
"""Jobs that are told of once each, until all are forgotten."""


class Unproven:
    """Looks at claims before they get a body.

    Args:
        tasks: The tasks that the worker knows, by name.
        running: The jobs whose bodies run here.
        counts: What is counted.
        put: Where ends go.
    """

    def __init__(
        self,
        tasks: Mapping[str, Task[..., Any]],
        running: Container[UUID],
        counts: Counts,
        put: Callable[[End], None],
    ) -> None:
        self._tasks = tasks
        self._running = running
        self._counts = counts
        self._put = put
        self._told: set[tuple[UUID, str]] = set()

    def proven(self, claims: list[Claim]) -> list[Claim]:
        """Those that may have a body; the others are handed back."""
        good: list[Claim] = []
        for claim in claims:
            try:
                prove_claim(claim, self._tasks.get(claim.task))
                if claim.job_id in self._running:
                    # Somebody has decided what became of an attempt whose body goes on.
                    why = f"job {claim.job_id} is not run here: the body of an earlier attempt of it still runs"
                    raise errors.ClaimNotProven(why, "still_runs")
            except errors.ClaimNotProven as exc:
                self._hand_back(claim, exc)
            else:
                good.append(claim)
        return good

    def _hand_back(self, claim: Claim, exc: errors.ClaimNotProven) -> None:
        self._tell(claim, exc)
        self._counts.not_proven += 1
        error = json.dumps({**errors.describe(exc), "body_started": False, "reason": exc.reason})
        delay = DELAYS[min(max(claim.releases, 0), len(DELAYS) - 1)]
        self._counts.released += 1
        self._put(
            End(
                claim.worker_id,
                claim.job_id,
                claim.claim_epoch,
                "release",
                next_outcome_id(),
                error=error,
                delay=delay,
                task=claim.task,
            )
        )

    def _tell(self, claim: Claim, exc: errors.ClaimNotProven) -> None:
        told = (claim.job_id, exc.reason)
        if told in self._told:
            return
        if len(self._told) >= REMEMBERED:
            self._told.clear()
        self._told.add(told)
        log.error(
            "job.claim_not_proven",
            job_id=claim.job_id,
            task=claim.task,
            claim_epoch=claim.claim_epoch,
            reason=exc.reason,
            error=str(exc),
        )

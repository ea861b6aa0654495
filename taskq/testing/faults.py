"""Faults at named points of a worker: what your application does when a worker stops right there.

``with faults.at(Point.END_COMMITTED, when="after", how="drop"):`` arms a fault for all workers of this process until
the block ends. A worker process is armed by its environment, but only if its code asks for that::

    # faulty.py, beside the tests: taskq worker faulty:app
    from shop import app
    from taskq.testing import faults

    faults.arm_from_environment()  # TASKQ_FAULT="end_committed:before:kill:skip=3"

Keep that call out of the module that production starts: a process that never calls it never reads the variable.

What a fault does to the worker:

- ``raise``: the worker's own code raises ``FaultInjected``. In an exchange it is taken for an answer that cannot be
  read: ends are sent again, claims without a body are released at a renewal. Before ``BODY_DONE`` the end cannot be
  judged, and the attempt counts as failed; after it, the end is kept and stands. After ``CLAIM_RECEIVED`` and
  ``END_RECEIVED`` nothing catches it: the worker ends with that exception, and what it held is settled once its lease
  has run out.
- ``kill``: SIGKILL of the process, which runs nothing more.
- ``drop``: the connection of the exchange is cut abruptly. What the server had committed stays committed; the rest is
  rolled back. The worker connects anew and goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from uuid import UUID

from taskq.telemetry import get_logger
from taskq.testing.points import Fault, How, Passage, Point, When, parse_fault
from taskq.testing.watch import WATCH

__all__ = ["VARIABLE", "Trace", "arm_from_environment", "at", "trace"]

log = get_logger("testing")

VARIABLE = "TASKQ_FAULT"
"""The environment variable that ``arm_from_environment`` reads."""


@contextmanager
def at(point: Point, when: When = "before", how: How = "raise", *, times: int = 1, skip: int = 0) -> Iterator[Fault]:
    """Arm a fault for the workers of this process until the block ends.

    Args:
        point: Where it strikes.
        when: Before or after the point; ``Point`` tells what that means at each.
        how: ``raise``, ``kill`` (of this very process) or ``drop``.
        times: How often it strikes.
        skip: How many passages go unhurt before that.

    Yields:
        The fault; its ``fired`` tells where it has struck, so that a test can see that it did.

    Raises:
        ConfigurationError: There is no such point or way.
    """
    fault = Fault(point, when, how, times=times, skip=skip)
    WATCH.faults.append(fault)
    WATCH.look()
    try:
        yield fault
    finally:
        WATCH.faults.remove(fault)
        WATCH.look()


class Trace:
    """The points that jobs have passed in this process, in order."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []

    def of(self, job_id: UUID) -> list[str]:
        """What one job has passed, each as ``point:before`` or ``point:after``."""
        return [str(passage) for passage in self.passages if job_id in passage.jobs]


@contextmanager
def trace() -> Iterator[Trace]:
    """Follow the points that the jobs of this process's workers pass, until the block ends."""
    kept = Trace()
    WATCH.traces.append(kept.passages)
    WATCH.look()
    try:
        yield kept
    finally:
        WATCH.traces[:] = [passages for passages in WATCH.traces if passages is not kept.passages]
        WATCH.look()


def arm_from_environment(environ: Mapping[str, str] | None = None) -> Fault | None:
    """Arm the fault that ``TASKQ_FAULT`` names, for as long as this process lives; without the variable do nothing.

    Its form is ``point:before|after:raise|kill|drop``, with ``:skip=N,times=N`` behind it if need be. A warning
    ``fault.armed`` says so, and ``fault.fired`` when it strikes, also right before a kill.

    Args:
        environ: The environment to read; the process's own by default.

    Returns:
        The fault, or None if the variable is not set.

    Raises:
        ConfigurationError: The variable is not of that form.
    """
    text = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if not text:
        return None
    fault = parse_fault(text)
    WATCH.faults.append(fault)
    WATCH.look()
    log.warning("fault.armed", fault=text, pid=os.getpid())
    return fault

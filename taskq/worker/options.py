"""How a worker works."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import Literal

from taskq import errors


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a worker works.

    Attributes:
        queues: The queues to serve; empty means those of the registered tasks.
        concurrency: How many bodies run at once.
        lease: Seconds after the last renewal at which the worker's claims are taken from it.
        grace: Seconds that running bodies get to end after the first signal to stop.
        poll_interval: Seconds between looks for work while idle; at most 1 is advised.
        tolerance: Seconds for which a blocked event loop does not cost the lease.
        name: What people call it; by default host and process id.
        listen: Whether to LISTEN for notifications; polling alone works too.
        health_port: Where ``/live`` and ``/ready`` are answered; None: nowhere; 0: at a free port.
        health_host: The address for it.
        max_jobs: The worker drains and ends after about so many bodies; None for no bound.
        max_memory: The worker drains and ends once it has about so many resident bytes; None for no bound.
        ends_commit: ``"sync"``, or ``"async"``: transactions that only end jobs are committed asynchronously, at the
            risk that such jobs run again after a crash of the server. Refused where a served queue has a task that is
            ``side_effecting``, and ``ctx.transaction()`` is refused in bodies.
        child_max_jobs: A child process for ``process=True`` is replaced after so many bodies.
        child_max_memory: A child process is replaced once it has so many resident bytes after a body; None for no
            bound.
    """

    queues: tuple[str, ...] = ()
    concurrency: int = 50
    lease: float = 15.0
    grace: float = 25.0
    poll_interval: float = 1.0
    tolerance: float = 30.0
    name: str = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    listen: bool = True
    health_port: int | None = None
    health_host: str = "127.0.0.1"
    max_jobs: int | None = None
    max_memory: int | None = None
    ends_commit: Literal["sync", "async"] = "sync"
    child_max_jobs: int = 1000
    child_max_memory: int | None = None

    def __post_init__(self) -> None:
        for what, value, low in (
            ("concurrency", self.concurrency, 1),
            ("lease", self.lease, 1),
            ("grace", self.grace, 0),
            ("tolerance", self.tolerance, 1),
            ("max_jobs", self.max_jobs, 1),
            ("max_memory", self.max_memory, 1),
            ("child_max_jobs", self.child_max_jobs, 1),
            ("child_max_memory", self.child_max_memory, 1),
        ):
            if value is not None and value < low:
                raise errors.ConfigurationError(f"{what} is {value}; it must be at least {low}")
        if self.ends_commit not in ("sync", "async"):
            raise errors.ConfigurationError(f"ends_commit is {self.ends_commit!r}; give 'sync' or 'async'")
        if not 0.01 <= self.poll_interval <= 60:
            raise errors.ConfigurationError(
                f"poll_interval is {self.poll_interval}; it must be from 0.01 to 60 seconds"
            )

"""Starting the supervisor of ``taskq worker --processes N``."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from taskq.settings import Settings
from taskq.worker.supervisor import Supervisor

__all__ = ["supervise"]

_OTHER_NAMES = {"queues": "queue"}


def supervise(settings: Settings, flags: Mapping[str, str | None], name: str) -> int:
    """Run ``settings.processes`` workers until stopped; give the exit code.

    Args:
        settings: What was resolved for the supervisor itself.
        flags: The flags that were given, by the names of the settings, for the workers to resolve again.
        name: The base of the workers' names.
    """
    assert settings.app is not None
    given = [f"--{_OTHER_NAMES.get(key, key).replace('_', '-')}={value}" for key, value in flags.items() if value]
    port = settings.health_port
    per_slot = [] if port is None else [[f"--health-port={port and port + n}"] for n in range(settings.processes)]
    return Supervisor(
        [sys.executable, "-m", "taskq", "worker", settings.app, *given],
        settings.processes,
        name=name,
        grace=settings.grace,
        per_slot=per_slot,
        # Two cannot answer at one port.
        overlap=not port,
    ).run()

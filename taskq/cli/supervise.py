"""Starting the supervisor of ``taskq worker --processes N``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from taskq.errors import ConfigurationError
from taskq.settings import Settings
from taskq.worker.health import listen
from taskq.worker.supervisor import Supervisor

__all__ = ["supervise"]

_OTHER_NAMES = {"queues": "queue"}


def supervise(settings: Settings, flags: Mapping[str, str | None], name: str) -> int:
    """Run ``settings.processes`` workers until stopped; give the exit code.

    Args:
        settings: What was resolved for the supervisor itself.
        flags: The flags that were given, by the names of the settings, for the workers to resolve again.
        name: The base of the workers' names.

    Raises:
        ConfigurationError: One of the workers could not listen at its health port.
    """
    assert settings.app is not None
    given = [f"--{_OTHER_NAMES.get(key, key).replace('_', '-')}={value}" for key, value in flags.items() if value]
    port = settings.health_port
    ports = [] if port is None else [port and port + n for n in range(settings.processes)]
    _check_ports(settings.health_host, ports)
    return Supervisor(
        [sys.executable, "-m", "taskq", "worker", settings.app, *given],
        settings.processes,
        name=name,
        grace=settings.grace,
        per_slot=[[f"--health-port={number}"] for number in ports],
        # Two cannot answer at one port.
        overlap=not port,
    ).run()


def _check_ports(host: str, ports: Sequence[int]) -> None:
    """Listen at all of them for a moment: a worker that cannot would be started again and again, beside others."""
    with ExitStack() as open_:
        try:
            for port in ports:
                if port > 65535:
                    raise ConfigurationError(f"there is no port {port}; choose a lower health_port")
                open_.enter_context(listen(host, port))
        except ConfigurationError as exc:
            if not any(ports[1:]):
                raise
            raise ConfigurationError(
                f"{len(ports)} processes answer at the ports {ports[0]} to {ports[-1]}, one each: {exc}"
            ) from None

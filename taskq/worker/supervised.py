"""A worker process under a supervisor: it says when it is ready or wants a successor, and drains if it is orphaned."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from taskq.worker.parent import follow

VARIABLE: Final = "TASKQ_SUPERVISOR"
"""How a supervisor tells, in the environment, its process id, the socket's descriptor and the place's number."""
READY: Final = b"R"
WANTS_SUCCESSOR: Final = b"W"


class Supervised:
    """The link of a worker process to its supervisor.

    Args:
        sock: Where the supervisor hears it.
        number: Of its place among the supervisor's processes, from 0.
    """

    def __init__(self, sock: socket.socket, number: int) -> None:
        self._sock = sock
        self.number = number

    @classmethod
    def from_environ(cls) -> Supervised | None:
        """The link, if a supervisor has started this process. What bodies start does not inherit it."""
        told = os.environ.pop(VARIABLE, None)
        if told is None:
            return None
        parent, handle, number = map(int, told.split(":"))
        os.set_inheritable(handle, False)
        if not follow(parent, signal.SIGTERM):
            os.kill(os.getpid(), signal.SIGTERM)
        return cls(socket.socket(fileno=handle), number)

    def say(self, what: bytes) -> None:
        """Tell the supervisor; if it has gone, ``watch`` notices."""
        with suppress(OSError):
            self._sock.send(what)

    def watch(self, on_gone: Callable[[], object]) -> None:
        """Call, once and in the running loop, when the supervisor has gone."""
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(self._sock)
            on_gone()

        self._sock.setblocking(False)
        loop.add_reader(self._sock, gone)

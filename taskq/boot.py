"""Signals that come before a worker can act on them: a process that is told to stop while it starts ends with 0.

Imported before anything else of taskq, so this imports next to nothing itself.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

__all__ = ["StoppedAtBoot", "hold", "is_held", "release"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKSTOP = 5.0
"""Seconds after which the process ends, if something has swallowed the exception."""

_backstop: threading.Timer | None = None
_held = False


class StoppedAtBoot(BaseException):
    """The process was told to stop before it had begun to work; nothing was claimed."""


def hold() -> None:
    """From now on SIGTERM and SIGINT raise ``StoppedAtBoot`` in the main thread, until others handle them."""
    global _held
    _held = True
    for number in SIGNALS:
        signal.signal(number, _stop)


def is_held() -> bool:
    """Whether ``hold`` was called: this process is the command line's own."""
    return _held


def release() -> None:
    """Others handle the signals now."""
    if _backstop is not None:
        _backstop.cancel()


def _stop(number: int, frame: FrameType | None) -> None:
    global _backstop
    if _backstop is None:
        _backstop = threading.Timer(BACKSTOP, os._exit, (0,))
        _backstop.daemon = True
        _backstop.start()
        raise StoppedAtBoot

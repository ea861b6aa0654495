"""What a worker needs before it is one: a signal during its start ends it with 0, and it speaks in the log's format.

Imported before anything else of taskq, so this imports next to nothing itself.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType

__all__ = ["StoppedAtBoot", "choose_format", "hold", "is_held", "is_json", "line", "release", "use_format"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKSTOP = 5.0
"""Seconds after which the process ends, if something has swallowed the exception."""

_backstop: threading.Timer | None = None
_held = False
_json = False


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


def choose_format(args: Sequence[str]) -> None:
    """Guess, before settings are read, in which format ``taskq worker`` is to speak: by flag or environment.

    Args:
        args: The command line after ``taskq``. Other commands speak to people.
    """
    asked = os.environ.get("TASKQ_LOG_FORMAT", "")
    for n, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name == "--log-format":
            asked = value if equals else "".join(args[n + 1 : n + 2])
    use_format(asked if args[:1] == ["worker"] else "console")


def use_format(fmt: str) -> None:
    """Speak as the log does: in lines of text, or for ``json`` in one JSON object a line."""
    global _json
    _json = fmt == "json"


def is_json() -> bool:
    """Whether all that this process says about itself is one JSON object a line."""
    return _json


def line(text: str, *, event: str = "cli.note", level: str = "info", logger: str = "cli") -> str:
    """What is to be written to standard error, with its line's end.

    Args:
        text: For people.
        event: The name under which JSON has it; there the text is ``message``.
        level: Its level in JSON.
        logger: The part of taskq that speaks, in JSON.
    """
    if not _json:
        return f"{text}\n"
    import json
    from datetime import UTC, datetime

    time = datetime.now(UTC).isoformat(timespec="milliseconds")
    told = {"time": time, "level": level, "logger": f"taskq.{logger}", "event": event, "message": text}
    return json.dumps(told) + "\n"

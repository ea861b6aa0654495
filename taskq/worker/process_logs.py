"""What bodies in child processes log reaches the worker's own handlers, unless the application has set up logging."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from taskq.telemetry.log import ROOT
from taskq.worker.pipes import Message

LONGEST: Final = 64 * 1024
"""Characters of one message, and of one traceback."""
_PLAIN = (str, int, float, bool, type(None))
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class Forwarder(logging.Handler):
    """Hands records to the worker."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        super().__init__()
        self._send = send

    @classmethod
    def install(cls, send: Callable[[Message], None]) -> None:
        """Forward what is logged here, unless the application's import has given the root logger handlers.

        Then it is set up here as it is in the worker, and its lines go to the same standard error.
        """
        if not logging.getLogger().handlers:
            logging.getLogger().addHandler(cls(send))

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        try:
            extra = {k: v for k, v in vars(record).items() if k not in _STANDARD}
            message = {
                "is": "log",
                "name": record.name,
                "level": record.levelno,
                "text": record.getMessage()[:LONGEST],
                "created": record.created,
                "file": record.pathname,
                "line": record.lineno,
                "function": record.funcName,
                "thread": record.threadName,
                "process": record.process,
                "extra": _plain(extra),
                "trace": None
                if not record.exc_info
                else logging.Formatter().formatException(record.exc_info)[-LONGEST:],
            }
            self._send(message)
        except Exception:
            self.handleError(record)


def emit(message: Message) -> None:
    """In the worker: log what a child has sent, as if it had been logged here."""
    logger = logging.getLogger(message["name"])
    if not logger.isEnabledFor(message["level"]):
        return
    record = logger.makeRecord(
        message["name"], message["level"], message["file"], message["line"], message["text"], (), None,
        message["function"],
    )  # fmt: skip
    record.created, record.process, record.threadName = message["created"], message["process"], message["thread"]
    record.msecs = (record.created % 1) * 1000
    vars(record).update(message["extra"])
    record.exc_text = message["trace"]
    logger.handle(record)


def levels() -> dict[str, int]:
    """The levels that apply here, for a child to take over: those of the root logger and of taskq's."""
    return {"": logging.getLogger().level, ROOT: logging.getLogger(ROOT).getEffectiveLevel()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    return value if isinstance(value, _PLAIN) else str(value)

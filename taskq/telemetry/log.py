"""Events with fields, handed to the standard library's logger ``taskq`` and its children.

An application that has configured logging gets taskq's records through its own handlers, with the fields as
attributes; one that has not gets them on standard error from ``configure_for_terminal``, which the CLI calls.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import MutableMapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, cast

import structlog

from taskq import boot

ROOT = "taskq"
_RESERVED = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):  # JSON knows no such number
        return str(value)
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def _to_record(_: Any, __: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """Turn an event into the arguments of a standard logging call: a readable message, and the fields as ``extra``."""
    exc_info = event.pop("exc_info", None)
    name = str(event.pop("event"))
    fields = {key: _plain(value) for key, value in event.items()}
    text = " ".join([name, *(f"{k}={v}" for k, v in fields.items())])
    extra: dict[str, Any] = {(f"{k}_" if k in _RESERVED else k): v for k, v in fields.items()}
    return {"msg": text, "extra": {**extra, "event": name, "fields": fields}, "exc_info": exc_info}


class _Telling(structlog.stdlib.BoundLogger):
    """Never raises: what handlers, filters and record factories of the application do is no reason to stop working."""

    def _proxy_to_logger(self, method_name: str, event: str | None = None, *event_args: str, **event_kw: Any) -> Any:
        try:
            try:
                args, kw = self._process_event(method_name, event, event_kw)
            except structlog.DropEvent:
                return
            try:
                getattr(self._logger, method_name)(*args, **kw)
            except KeyError:
                # An attribute that the application's record factory sets has the name of a field, maybe.
                getattr(self._logger, method_name)(*args, **{k: v for k, v in kw.items() if k != "extra"})
        except Exception as exc:
            with suppress(Exception):
                assert sys.__stderr__ is not None
                text = f"taskq: {event} could not be logged: {type(exc).__name__}"
                sys.__stderr__.write(boot.line(text, event="log.failed", level="error", logger="telemetry"))


def get_logger(name: str, **fields: Any) -> structlog.stdlib.BoundLogger:
    """A logger for events of one part, such as ``worker``, with fields bound to each.

    Args:
        name: Appended to ``taskq.``.
        fields: On every event.
    """
    logger = structlog.wrap_logger(
        logging.getLogger(f"{ROOT}.{name}"),
        processors=[structlog.stdlib.filter_by_level, _to_record],
        wrapper_class=_Telling,
        cache_logger_on_first_use=True,
    )
    return cast(structlog.stdlib.BoundLogger, logger.bind(**fields) if fields else logger)


class _ConsoleLines(logging.Formatter):
    def __init__(self, process: str | None = None) -> None:
        label = "" if process is None else f"[{process.replace('%', '%%')}] "
        super().__init__(f"%(asctime)s %(levelname)-7s {label}%(message)s", "%Y-%m-%d %H:%M:%SZ")
        self.converter = time.gmtime  # lines of machines in several zones are read side by side


class _JsonLines(logging.Formatter):
    def __init__(self, process: str | None = None) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", None) or record.getMessage(),
            **({} if self._process is None else {"process": self._process}),
        }
        line |= {(f"{key}_" if key in line else key): value for key, value in fields.items()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:  # of another process
            line["exception"] = record.exc_text
        return json.dumps(line, default=str)


def configure_for_terminal(
    fmt: Literal["console", "json"] = "console", level: str = "INFO", *, process: str | None = None
) -> None:
    """Show taskq's events on standard error, with times in UTC, unless the application has configured logging itself.

    A handler on the root logger, or on ``taskq``, means that it has: then nothing is changed.

    Args:
        fmt: ``console`` for people, ``json`` for one JSON object a line.
        level: A standard level name.
        process: What tells this process from others whose lines come the same way: in brackets on the console, a field
            ``process`` in JSON.
    """
    logger = logging.getLogger(ROOT)
    if logging.getLogger().handlers or logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(process) if fmt == "json" else _ConsoleLines(process))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False

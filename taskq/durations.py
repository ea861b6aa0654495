"""Durations as people write them: ``"1h30m"``, seconds, or a timedelta."""

from __future__ import annotations

import math
import re
from datetime import timedelta
from typing import Final, TypeAlias

from taskq.errors import InvalidDuration

__all__ = ["MAX_DURATION", "Duration", "parse_duration"]

Duration: TypeAlias = "str | float | timedelta"
MAX_DURATION: Final = 100 * 365.25 * 86_400
"""A hundred years in seconds: beyond it a date could leave the calendar."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_WHOLE = re.compile(r"(?:\d+(?:\.\d+)?\s*(?:ms|s|m|h|d|w)\s*)+", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)", re.ASCII)


def parse_duration(value: Duration) -> float:
    """Seconds of a duration, from 0 to a hundred years.

    Args:
        value: ``"1h30m"``, ``"30s"``, ``"500ms"`` (units ms, s, m, h, d, w), a number of seconds, or a timedelta.

    Raises:
        InvalidDuration: It cannot be read, is negative, or is too long; the message shows it.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        # An int may be too large for a float.
        seconds = float(value) if abs(value) <= MAX_DURATION else math.inf
    elif isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
    else:
        raise InvalidDuration(
            f"{_short(value)} is not a duration; write '30s', '1h30m' or '500ms' (units ms, s, m, h, d, w), "
            "a number of seconds, or a timedelta"
        )
    if not 0 <= seconds <= MAX_DURATION:
        raise InvalidDuration(f"{_short(value)} is not a duration from 0 to 100 years")
    return seconds


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # such as an integer of over 4,300 digits
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else text[:79] + "…"

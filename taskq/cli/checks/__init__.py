"""The checks of ``taskq doctor``: one function a check, grouped by what they look at.

A check asks the named queries of ``db/sql/doctor.sql`` and gives a ``Finding``. It changes nothing, and needs no more
than the role of a reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from taskq.cli.database import Database

__all__ = ["Check", "Finding", "Patient", "Verdict", "fail", "ok", "span", "warn"]

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Patient:
    """What is looked at.

    Attributes:
        database: The connection, with the queries of ``doctor.sql``.
        dsn: Where it is, for what connects by itself.
        schema: The schema of taskq.
    """

    database: Database
    dsn: str
    schema: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, what that means, and the command that cures it; both None where all is well."""

    verdict: Verdict
    found: str
    means: str | None = None
    cure: str | None = None


Check: TypeAlias = Callable[[Patient], Finding]


def ok(found: str) -> Finding:
    """All is well."""
    return Finding("ok", found)


def warn(found: str, *, means: str, cure: str) -> Finding:
    """Something to look at, while work goes on."""
    return Finding("warn", found, means, cure)


def fail(found: str, *, means: str, cure: str) -> Finding:
    """Something stands still, or is at risk."""
    return Finding("fail", found, means, cure)


def span(seconds: float) -> str:
    """A length of time for people: ``40 s``, ``12 min``, ``3.5 h``, ``8 days``."""
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"

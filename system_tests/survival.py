"""What was broken, how often, and what survived: each test says so in figures of its own, and a table ends the session.

A test calls ``survived(fault=..., injected=..., **reckon(dsn, journal, jobs))`` as its last act. Rows of one fault are
added up; the row of a test that failed, or whose database broke a law, says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict
from uuid import UUID

import psycopg
import pytest

HEADS = ("fault", "times", "jobs", "ended", "lost", "missing", "doubled", "verify", "notes")
LEGEND = (
    "times: how often it was injected; jobs: in flight or waiting meanwhile; ended: of those, jobs with an outcome; "
    "lost: attempts whose worker was lost,\neach on record; missing: jobs without an outcome that should have one; "
    "doubled: attempts that ran twice or ran without being on record"
)


class Reckoning(TypedDict):
    """The figures of some jobs, for ``survived``."""

    jobs: int
    ended: int
    lost: int
    missing: int
    doubled_off_record: int


@dataclass(frozen=True)
class Row:
    """What one test has to say; see ``LEGEND``."""

    test: str
    fault: str
    injected: int
    jobs: int
    ended: int
    lost: int
    missing: int
    doubled: int
    notes: str


class Survived(Protocol):
    """Puts one row into the table; fails the test when something is missing or doubled."""

    def __call__(
        self,
        *,
        fault: str,
        injected: int,
        jobs: int,
        ended: int | None = None,
        lost: int = 0,
        missing: int = 0,
        doubled_off_record: int = 0,
        notes: str = "",
    ) -> None: ...


_rows = pytest.StashKey[list[Row]]()


@pytest.fixture
def survived(request: pytest.FixtureRequest) -> Survived:
    """The recorder. ``ended`` is the number of jobs unless it is told."""

    def note(
        *,
        fault: str,
        injected: int,
        jobs: int,
        ended: int | None = None,
        lost: int = 0,
        missing: int = 0,
        doubled_off_record: int = 0,
        notes: str = "",
    ) -> None:
        done = jobs if ended is None else ended
        row = Row(request.node.nodeid, fault, injected, jobs, done, lost, missing, doubled_off_record, notes)
        request.config.stash.setdefault(_rows, []).append(row)
        assert injected > 0, f"{fault} was never injected"
        assert (missing, doubled_off_record) == (0, 0), row

    return note


def reckon(dsn: str, starts: Iterable[tuple[str, int]], jobs: Iterable[UUID]) -> Reckoning:
    """Count what became of some jobs.

    Args:
        dsn: Their database.
        starts: The attempts that the world has seen start, as ``Journal.of("start")`` gives them; of these jobs or any.
        jobs: The jobs, each of which should have ended by now.
    """
    ids = sorted({str(job) for job in jobs})
    with psycopg.connect(dsn) as conn:
        ended = conn.execute("select count(*) from taskq.history where id = any(%s::uuid[])", (ids,)).fetchone()
        on_record: dict[tuple[str, int], str] = {
            (job, epoch): outcome
            for job, epoch, outcome in conn.execute(
                "select job_id::text, claim_epoch, outcome from taskq.attempts where job_id = any(%s::uuid[])", (ids,)
            )
        }
    assert ended is not None
    seen = Counter(start for start in starts if start[0] in set(ids))
    return Reckoning(
        jobs=len(ids),
        ended=ended[0],
        lost=sum(outcome == "lost" for outcome in on_record.values()),
        missing=len(ids) - ended[0],
        doubled_off_record=sum(times - 1 for times in seen.values()) + len(set(seen) - set(on_record)),
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table."""
    rows = config.stash.get(_rows, [])
    if not rows:
        return
    stats = terminalreporter.stats
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])}
    lines = [HEADS, *(_line(fault, [r for r in rows if r.fault == fault], failed) for fault in _in_order(rows))]
    widths = [max(len(line[n]) for line in lines) for n in range(len(HEADS) - 1)]
    terminalreporter.write_sep("=", "faults and what survived")
    for line in lines:
        cells = [c.rjust(w) if 0 < n < 7 else c.ljust(w) for n, (c, w) in enumerate(zip(line, widths, strict=False))]
        terminalreporter.write_line("  ".join([*cells, line[-1]]).rstrip())
    terminalreporter.write_line(LEGEND)


def _in_order(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.fault for row in rows))


def _line(fault: str, rows: list[Row], failed: set[str]) -> tuple[str, ...]:
    figures = [
        sum(values)
        for values in zip(*((r.injected, r.jobs, r.ended, r.lost, r.missing, r.doubled) for r in rows), strict=True)
    ]
    verify = "FAILED" if any(row.test in failed for row in rows) else "clean"
    notes = "; ".join(dict.fromkeys(row.notes for row in rows if row.notes))
    return (fault, *(f"{n:,}" for n in figures), verify, notes)

"""Following what starts and ends, by looking again and again at the end of the record.

History and ledger grow at their ends, so each look reads their newest blocks. It begins a few seconds back, since a
transaction may commit later than one that wrote behind it; what was shown already is remembered and left out. It also
begins some blocks back: where jobs were reopened, or ends rolled back, vacuum frees space that is written to again. In
what is longer than that, an end that is written far in front is not shown.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import Any

from taskq.cli.database import Database, open_database
from taskq.cli.output import note

__all__ = ["follow"]

LOOK_EVERY = 1.0
"""Seconds."""
LOOK_BACK = 5.0
"""Seconds for which a transaction may have written before it commits."""
MOST = 2_000
"""Rows of a look."""
BLOCKS_BACK = 256
"""Blocks (2 MiB) of a day's record that each look reads at least."""
REMEMBERED = 20_000
"""Lines that are known not to be new."""


def follow(
    queues: list[str] | None,
    tasks: list[str] | None,
    *,
    limit: int | None,
    timeout: float | None,
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> None:
    """Print a line for each start and end until the limit, the timeout or Ctrl-C."""
    with open_database(dsn, schema) as database:
        for n, row in enumerate(_events(database, queues, tasks, timeout), 1):
            print(_line(row, as_json=as_json), flush=True)
            if n == limit:
                return


def _events(
    database: Database, queues: list[str] | None, tasks: list[str] | None, timeout: float | None
) -> Iterator[dict[str, Any]]:
    """What starts and ends from now on, in the order of the moments within each look."""
    end = None if timeout is None else time.monotonic() + timeout
    since: datetime = database.value("now")
    shown: OrderedDict[tuple[str, int, str], None] = OrderedDict()
    places = _Places(database, since)
    told = False
    while True:
        now: datetime = database.value("now")
        found = database.bounded_rows("tail_running", since, queues, tasks, MOST)
        for day, history, ledger in places.to_read(now):
            found += database.bounded_rows("tail_history", day, since, history, queues, tasks, MOST)
            found += database.bounded_rows("tail_ledger", day, since, ledger, queues, tasks, MOST)
        if len(found) >= MOST and not told:
            told = True
            note(f"more happens than can be shown; where it is over {MOST:,} in a few seconds, the newest are")
        for row in sorted(found, key=lambda r: r["at"]):
            key = (row["id"], row["claim_epoch"], row["event"])
            if key not in shown:
                shown[key] = None
                yield row
        while len(shown) > REMEMBERED:
            shown.popitem(last=False)
        if end is not None and time.monotonic() >= end:
            return
        time.sleep(LOOK_EVERY if end is None else max(0.0, min(LOOK_EVERY, end - time.monotonic())))


class _Places:
    """Where the record of a day ended a few seconds ago."""

    def __init__(self, database: Database, now: datetime) -> None:
        self._database = database
        self._seen: list[tuple[datetime, date, str, str]] = []
        self._note(now)

    def to_read(self, now: datetime) -> Iterator[tuple[date, str, str]]:
        """Each day that may have something new, with the places in history and ledger to begin at."""
        self._note(now)
        horizon = now - timedelta(seconds=LOOK_BACK)
        for day in sorted({entry[1] for entry in self._seen}):
            of_day = [entry for entry in self._seen if entry[1] == day]
            # The last look that is old enough, else the first of all.
            _, _, history, ledger = ([entry for entry in of_day if entry[0] <= horizon] or of_day[:1])[-1]
            yield day, history, ledger
        old = [entry for entry in self._seen if entry[0] <= horizon]
        self._seen = old[-1:] + [entry for entry in self._seen if entry[0] > horizon]

    def _note(self, now: datetime) -> None:
        day = self._database.value("utc_day", now)
        is_first = not any(entry[1] == day for entry in self._seen)
        row = self._database.rows("tail_places", day)[0]
        # A new day begins at its beginning; of the first one, only what comes from now on is wanted.
        sizes = (0, 0) if is_first and self._seen else (row["history"], row["ledger"])
        blocks = [max(0, size - BLOCKS_BACK) for size in sizes]
        self._seen.append((now, day, f"({blocks[0]},0)", f"({blocks[1]},0)"))


def _line(row: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return json.dumps({**row, "at": row["at"].isoformat()}, ensure_ascii=False)
    took = "" if row["seconds"] is None else f"after {row['seconds']:.3g} s"
    parts = [row["task"] or "?", row["queue"] or "?", row["worker"] or "", took, row["error"] or ""]
    at = row["at"].astimezone().strftime("%H:%M:%S.%f")[:-3]
    return f"{at}  {row['event']:<11}  {row['id']}  {'  '.join(filter(None, parts))}"

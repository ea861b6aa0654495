"""Acting on many jobs: counted first, then in batches, each of them one transaction with its row of audit.

Nothing here selects and changes in one statement: a batch is read by key, and its jobs are then steered by id through
the same functions as single ones. So an interruption leaves whole batches, and the same command goes on where it ended.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from taskq.cli.database import Busy, Database, actor, open_database
from taskq.cli.filters import AT_WORK, Filter, Selection
from taskq.cli.output import ExitCode, counted, note, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Bulk", "steer"]

BATCH = 200
"""Jobs a transaction."""
LOCK_TIMEOUT = "5s"
TRIES = 5
"""How often a batch is tried that cannot get its locks."""
SHOWN = 20
"""Refused jobs that are listed; the others are counted."""
FIRST_ID = "00000000-0000-0000-0000-000000000000"


@dataclass(frozen=True, slots=True)
class Bulk:
    """What a bulk action does and to what.

    Attributes:
        action: ``cancel`` or ``retry``.
        done: Its past participle, for people.
        may: The statuses that it makes sense for.
        default: The statuses that it is for where none is named.
    """

    action: str
    done: str
    may: Sequence[str]
    default: Sequence[str]


CANCEL = Bulk("cancel", "cancelled", ("pending", "held", "running"), ("pending", "held", "running"))
RETRY = Bulk("retry", "retried", ("pending", "failed", "cancelled"), ("failed",))


@dataclass(slots=True)
class Tally:
    """What has come of it so far."""

    answers: Counter[str] = field(default_factory=Counter)
    refused: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Jobs that were answered."""
        return self.answers.total()

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take in the answers to a batch."""
        self.answers.update(row["answer"] for row in rows)
        self.refused += [row for row in rows if row["why"]][: max(0, SHOWN - len(self.refused))]


def steer(
    bulk: Bulk,
    chosen: Filter,
    *,
    reason: str | None,
    yes: bool,
    dry_run: bool,
    limit: int | None,
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> int:
    """Count what a filter names, ask, and do it; returns the exit code.

    Raises:
        typer.BadParameter: The action makes no sense for a status that was named.
    """
    for status in chosen.statuses(()):
        if status not in bulk.may:
            raise typer.BadParameter(f"jobs that are {status} cannot be {bulk.done}; only {', '.join(bulk.may)}")
    with open_database(dsn, schema) as database:
        selection = _select(bulk, chosen, database)
        counts = {row["status"]: row["n"] for row in database.bounded_rows("count_jobs", *selection.arguments)}
        matched = sum(counts.values())
        wanted = matched if limit is None else min(limit, matched)
        told = {"action": bulk.action, "matched": matched, "statuses": counts, "selection": selection.said}
        if not (yes or dry_run) and matched and not as_json and sys.stdin.isatty():
            note(_preview(bulk, counts, matched, wanted))
            yes = typer.confirm("go on?", err=True)
            if not yes:
                note("nothing was changed")
                return ExitCode.FAILED
        if dry_run or not yes or not matched:
            if as_json:
                print_json({**told, "wanted": wanted, "done": 0, "answers": {}, "refused": []})
            else:
                print(
                    _preview(bulk, counts, matched, wanted) + ("" if dry_run or not matched else "; repeat with --yes")
                )
            return ExitCode.OK if dry_run or not matched else ExitCode.FAILED
        tally = Tally()
        try:
            _work(bulk, database, selection, wanted, limit, reason, tally)
        except BaseException:
            note(f"{tally.done:,} of {wanted:,} are done and stay so; the same command goes on with the others")
            raise
    if as_json:
        print_json({**told, "wanted": wanted, "done": tally.done, "answers": tally.answers, "refused": tally.refused})
    else:
        print(f"{counted(tally.done, 'job')}: {_counted(tally.answers)}" if tally.done else "no job was left to do")
        for row in tally.refused:
            note(f"{row['id']}: {row['why']}")
    return ExitCode.FAILED if tally.answers["refused"] else ExitCode.OK


def _select(bulk: Bulk, chosen: Filter, database: Database) -> Selection:
    found = chosen.select(database, statuses=bulk.default, frozen=True)
    if bulk.action == "cancel" and chosen.cancel_requested is None:
        # Those that were asked for already are done, also when the command is repeated.
        arguments = list(found.arguments)
        arguments[9] = False
        return Selection(tuple(arguments), found.said)
    return found


def _work(
    bulk: Bulk,
    database: Database,
    selection: Selection,
    wanted: int,
    limit: int | None,
    reason: str | None,
    tally: Tally,
) -> None:
    who = actor()
    said = json.dumps(selection.said | ({} if limit is None else {"limit": limit}), default=str)
    for ids in _batches(database, selection, wanted):
        for again in reversed(range(TRIES)):
            try:
                with database.transaction():
                    database.rows("lock_timeout", LOCK_TIMEOUT)
                    rows = database.rows("steer_many", bulk.action, ids, reason, who, said)
                break
            except Busy:
                if not again:
                    raise
        tally.add(rows)
        if wanted > BATCH:
            note(f"{tally.done:,} of {wanted:,}")


def _batches(database: Database, selection: Selection, wanted: int) -> Iterator[list[str]]:
    """Ids in batches, those at work first; each page begins after the one before, so nothing is met twice."""
    statuses = selection.arguments[0]
    if set(statuses) & set(AT_WORK):
        last = FIRST_ID
        while wanted > 0:
            ids = [
                r["id"]
                for r in database.bounded_rows("next_unfinished", *selection.arguments, last, min(BATCH, wanted))
            ]
            if not ids:
                break
            last = ids[-1]
            wanted -= len(ids)
            yield ids
    if set(statuses) - set(AT_WORK):
        after: Any = "-infinity"
        last = FIRST_ID
        while wanted > 0:
            rows = database.bounded_rows("next_finished", *selection.arguments, after, last, min(BATCH, wanted))
            if not rows:
                break
            after, last = rows[-1]["finished_at"], rows[-1]["id"]
            wanted -= len(rows)
            yield [row["id"] for row in rows]


def _preview(bulk: Bulk, counts: Mapping[str, int], matched: int, wanted: int) -> str:
    if not matched:
        return f"no jobs match, so none would be {bulk.done}"
    many = counted(matched, "job")
    if wanted < matched:
        return f"would {bulk.action} {wanted:,} of {many}, the oldest first: {_counted(counts)}"
    return f"would {bulk.action} {many}: {_counted(counts)}"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n:,} {name}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))

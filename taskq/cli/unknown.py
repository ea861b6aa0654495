"""``taskq jobs unknown | resolve | reconcile``: jobs whose outcome was never told, and deciding it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import typer

from taskq.cli.database import Database, actor, job_id, open_database
from taskq.cli.output import ExitCode, note, print_json, show
from taskq.durations import parse_duration
from taskq.errors import DatabaseRefusal, InvalidDuration, WrongState

__all__ = ["list_unknown", "reconcile_one", "resolve_one"]

RULE = (
    "it runs again with the same idempotency key; say so only if it can no longer happen: the provider has closed the "
    "key, or the process that ran it is dead and no request of it is still on its way"
)
"""What follows from "did not happen", and when it may be said."""


def list_unknown(
    tasks: list[str] | None,
    older_than: str | None,
    *,
    limit: int,
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> int:
    """Print unknown outcomes; the exit code says whether there are any.

    Raises:
        typer.BadParameter: ``older_than`` is no duration.
    """
    try:
        seconds = None if older_than is None else parse_duration(older_than)
    except InvalidDuration as exc:
        raise typer.BadParameter(f"{exc}", param_hint="--older-than") from None
    with open_database(dsn, schema) as database:
        rows = database.bounded_rows("unknown_outcomes", tasks, seconds, limit)
    step = ["step"] if any(row["step"] for row in rows) else []
    columns = ["job_id", "task", *step, "queue", "since", "reason", "worker", "reconcile_status", "last_error"]
    shown = rows if as_json else [{**row, "last_error": _said(row["reconcile_error"])} for row in rows]
    optional = ["queue", "worker", "reason", "last_error"]
    show(shown, columns, as_json=as_json, empty="no outcome is unknown", optional=optional)
    if len(rows) == limit and not as_json:
        note(f"the oldest {limit}; --limit shows more")
    return ExitCode.FAILED if rows else ExitCode.OK


def resolve_one(
    id_: str,
    happened: bool,
    result: str | None,
    reason: str,
    *,
    epoch: int | None,
    yes: bool,
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> int:
    """Decide one outcome; on a terminal after a look at it and a yes."""
    job = job_id(id_)
    with open_database(dsn, schema) as database:
        found = database.rows("unknown_outcome", job)
        if found and not as_json:
            note(_shown(found[0]))
        if found and not (yes or as_json) and sys.stdin.isatty():
            note(_preview(found[0], happened))
            if not typer.confirm("go on?", err=True):
                note("nothing was changed")
                return ExitCode.FAILED
        # What was shown is what is decided: another attempt is another question, and so is one that nobody saw.
        seen = epoch if epoch is not None or not found else found[0]["claim_epoch"]
        try:
            answer = _decide(database, job, seen, happened, result, reason)
        except DatabaseRefusal as exc:
            if not as_json:
                raise
            print_json([{"id": job, "answer": "refused", "why": str(exc)}])
            return ExitCode.FAILED
    if as_json:
        print_json([{"id": job, "answer": answer}])
    else:
        step = found[0]["step"] if found else None
        print(f"{job}: {_BECAME[answer] if step is None else _went_on(answer, step, happened)}")
    return ExitCode.OK


def reconcile_one(id_: str, reason: str | None, *, as_json: bool, dsn: str | None, schema: str | None) -> int:
    """Have one outcome asked about now."""
    job = job_id(id_)
    with open_database(dsn, schema) as database:
        try:
            [row] = database.rows("reconcile", job, reason, actor())
        except DatabaseRefusal as exc:
            if not as_json:
                raise
            print_json([{"id": job, "answer": "refused", "why": str(exc)}])
            return ExitCode.FAILED
        queue = database.unserved_queue(row["reconcile_job"])
    show([{"id": job, **row}], ["id", "answer", "reconcile_job"], as_json=as_json)
    if queue is not None:
        note(f"no live worker serves the queue {queue}: nobody asks until one does")
    return ExitCode.OK


def _decide(database: Database, job: str, epoch: int | None, happened: bool, result: str | None, reason: str) -> str:
    said = (happened, result, reason, actor())
    if epoch is None:
        # Nothing unknown was found, and the database says what is the matter. What is unknown since is not decided.
        with database.transaction():
            database.value("resolve", job, *said)
            raise WrongState(
                f"job {job} has become unknown only just now, and nothing was shown of it; nothing was changed",
                detail={"job_id": job, "status": "unknown"},
                hint="Look at it, with taskq jobs unknown, and then decide.",
            )
    answer: str = database.value("resolve_attempt", job, epoch, *said)
    return answer


_BECAME = {
    "succeeded": "succeeded",
    "cancelled": "cancelled, as was requested; it did not happen",
    "pending": "pending: it runs again, with the same idempotency key",
}


def _went_on(answer: str, step: str, happened: bool) -> str:
    """What became of a job when a step of it was decided."""
    if answer == "cancelled":
        return f"cancelled, as was requested; step {step} {'happened' if happened else 'did not happen'}"
    return f"pending: step {step} is " + ("recorded, and the body goes on" if happened else "called again, by its key")


def _shown(row: Mapping[str, Any]) -> str:
    since = row["since"].astimezone().isoformat(sep=" ", timespec="seconds")
    asked = "" if row["cancel_requested_at"] is None else "; cancelling was requested"
    hook = "" if row["reconcile_status"] is None else f"; its reconcile job is {row['reconcile_status']}"
    where = f"{row['task']} in {row['queue']}, attempt {row['claim_epoch']} on {row['worker'] or 'a worker'}"
    why = row["reason"] or "its outcome was not told"
    what = "" if row["step"] is None else f"what became of step {row['step']} of "
    return f"{row['job_id']}: {what}{where}, unknown since {since} ({why}){asked}{hook}"


def _preview(row: Mapping[str, Any], happened: bool) -> str:
    if happened and row["step"] is not None:
        return "the step is recorded with the result that you gave, or null, for good, and the body goes on"
    if happened:
        return "it becomes succeeded, for good"
    if row["cancel_requested_at"] is not None:
        return "it becomes cancelled, as was requested: others may then do by other means what it was to do"
    return RULE


def _said(error: Any) -> str | None:
    return f"{error.get('type')}: {error.get('message')}"[:200] if isinstance(error, dict) else None

"""``taskq jobs wait`` and ``taskq runs wait``: until it has ended, for scripts."""

from __future__ import annotations

import json
import time
from typing import Any, Final, Literal

import typer

from taskq.cli.database import Database, job_id, open_database
from taskq.cli.output import ExitCode, note, print_json
from taskq.durations import parse_duration
from taskq.errors import InvalidDuration, TaskQError

__all__ = ["until_ended"]

FIRST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
"""Seconds between looks: the longer it takes, the less it matters when the end is seen."""


def until_ended(
    id_: str,
    timeout: str | None,
    *,
    of: Literal["job", "run"],
    as_json: bool,
    dsn: str | None,
    schema: str | None,
) -> int:
    """Look until it has ended, and print what it gave."""
    whose = job_id(id_, of)
    try:
        limit = None if timeout is None else parse_duration(timeout)
    except InvalidDuration as exc:
        raise typer.BadParameter(str(exc), param_hint="--timeout") from None
    with open_database(dsn, schema) as database:
        try:
            found = _look(database, whose, of, limit)
        except _Answer as exc:
            if not as_json:
                raise
            print_json({"id": whose, "answer": exc.answer, "why": str(exc)})
            return ExitCode.FAILED
    if as_json:
        print_json({"id": whose, "answer": found["status"], "result": found["result"], "error": found["error"]})
    elif found["status"] == "succeeded":
        print(json.dumps(found["result"], ensure_ascii=False))
    else:
        error = found["error"] or {}
        note(f"{of} {whose} is {found['status']}: {error.get('type')}: {error.get('message')}")
    return ExitCode.OK if found["status"] == "succeeded" else ExitCode.FAILED


class _Answer(TaskQError):
    """There is nothing to wait for, or no time left."""

    def __init__(self, answer: str, said: str) -> None:
        super().__init__(said)
        self.answer = answer


def _look(database: Database, whose: str, of: str, limit: float | None) -> dict[str, Any]:
    end = None if limit is None else time.monotonic() + limit
    pause = FIRST_PAUSE
    while True:
        rows = database.rows(f"{of}_end", whose)
        if not rows:
            raise _Answer("not_found", f"there is no {of} {whose}: check the id; retention may have dropped it")
        if rows[0].pop("finished_at") is not None:
            return rows[0]
        left = LONGEST_PAUSE if end is None else end - time.monotonic()
        if left <= 0:
            raise _Answer(
                "timeout",
                f"{of} {whose} has not ended within {limit:g} s, and is {rows[0]['status']}; "
                f"taskq {of}s show {whose} says more",
            )
        time.sleep(min(pause, left))
        pause = min(LONGEST_PAUSE, pause * 2)

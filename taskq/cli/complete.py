"""Completion of queues and tasks in a shell: quick or not at all, and never a word on the terminal."""

from __future__ import annotations

import os

__all__ = ["complete_queue", "complete_task"]

CONNECT_WITHIN = 2
"""Seconds; the least that libpq takes."""
ANSWER_WITHIN = "500ms"


def complete_queue(incomplete: str) -> list[str]:
    """Queues that begin so, if the database that TASKQ_DSN names says so at once."""
    return _names("queue", incomplete)


def complete_task(incomplete: str) -> list[str]:
    """Tasks that begin so, if the database that TASKQ_DSN names says so at once."""
    return _names("task", incomplete)


def _names(kind: str, incomplete: str) -> list[str]:
    if "TASKQ_DSN" not in os.environ:
        return []
    try:
        from taskq.cli.database import Database
        from taskq.db.pools import connect_sync
        from taskq.settings import load

        settings = load()
        options = f"-c statement_timeout={ANSWER_WITHIN}"
        with connect_sync(
            settings.dsn, name="taskq cli", connect_timeout=CONNECT_WITHIN, options=options
        ) as connection:
            return [row["name"] for row in Database(connection, settings.schema).rows("names", kind, incomplete)]
    except Exception:  # whatever it is: somebody is typing
        return []

"""How the commands ask the database: named queries of ``db/sql/cli.sql`` on one psycopg connection, errors in words."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
import typer
from psycopg.rows import dict_row

from taskq.client.answers import translated
from taskq.db.pools import connect_sync
from taskq.db.queries import load as load_queries
from taskq.durations import parse_duration
from taskq.errors import InvalidDuration, InvalidPolicy, TaskQError
from taskq.policy import check_name
from taskq.settings import load

__all__ = [
    "Busy",
    "Database",
    "actor",
    "in_words",
    "instant",
    "job_id",
    "moment",
    "not_allowed",
    "open_database",
    "queue_name",
]

LIST_TIMEOUT = "30s"
"""A list that takes longer is given up: it would read a large part of history for a few rows."""

_ROLES = {
    "enqueue": "producer",
    **dict.fromkeys(
        (
            "cancel",
            "send_signal",
            "send_run_signal",
            "retry",
            "resolve",
            "resolve_attempt",
            "reconcile",
            "pause_queue",
            "known_queues",
            "resume_queue",
            "resume_ordering",
            "set_limit",
            "clear_limit",
            "drain",
            "steer_many",
            "settle_effect",
            "retry_effect",
            "cancel_run",
            "pause_run",
            "resume_run",
            "set_work_budget",
            "retry_run",
        ),
        "operator",
    ),
}
"""What a query needs beyond reading, by the suffix of the role that gives it."""


class Busy(TaskQError):
    """Others were in the way, in a lock or a deadlock: the same may succeed in a moment."""


@contextmanager
def in_words(schema: str, role: str) -> Iterator[None]:
    """Say in words what the driver raises in the block and is no refusal of taskq's own.

    Args:
        schema: The schema of taskq.
        role: What the block needs, by the suffix of the role that gives it.

    Raises:
        TaskQError: The database refuses, or cannot do it.
    """
    try:
        with interrupts_first():
            yield
    except psycopg.errors.QueryCanceled:
        raise TaskQError(f"the database took longer than {LIST_TIMEOUT}; ask for less, with --since") from None
    except psycopg.errors.InsufficientPrivilege as exc:
        raise not_allowed(exc.diag.message_primary, f"{schema}_{role}") from None
    except (
        psycopg.errors.LockNotAvailable,
        psycopg.errors.DeadlockDetected,
        psycopg.errors.SerializationFailure,
    ) as exc:
        raise Busy(f"others are at work on the same rows ({exc.diag.message_primary}); try again") from None
    except psycopg.Error as exc:
        raise TaskQError(f"the database refused: {exc.diag.message_primary or exc}") from None


@contextmanager
def interrupts_first() -> Iterator[None]:
    """Let Ctrl-C count where the statement that it cancels ends by itself at that moment, of a lock timeout, say."""
    try:
        yield
    except psycopg.Error as exc:
        if isinstance(exc.__context__, KeyboardInterrupt):
            raise exc.__context__ from None
        raise


def not_allowed(said: object, role: str) -> TaskQError:
    """The error for a user of the database who lacks a privilege that a role gives."""
    return TaskQError(
        f"the database's user may not do this ({said}); let somebody who may grant the role {role} to that user"
    )


class Database:
    """One connection and the queries of a schema. Rows come as dicts."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str, queries: str = "cli") -> None:
        self._connection = connection
        self._queries = load_queries(queries, schema)
        self.schema = schema

    @property
    def backend_pid(self) -> int:
        """The process id of the session as the start-up named it."""
        return self._connection.info.backend_pid

    def rows(self, query: str, *arguments: Any) -> list[dict[str, Any]]:
        """All rows of a named query.

        Raises:
            TaskQError: The database refuses, or cannot do it; one class for each of taskq's own refusals.
        """
        role = _ROLES.get(query, "reader")
        with in_words(self.schema, role), translated(self.schema, role):
            cursor = psycopg.RawCursor(self._connection, row_factory=dict_row)
            return cursor.execute(self._queries[query].encode(), arguments).fetchall()

    def value(self, query: str, *arguments: Any) -> Any:
        """The one value of a named query."""
        return next(iter(self.rows(query, *arguments)[0].values()))

    def transaction(self) -> AbstractContextManager[object]:
        """A transaction for the length of the block."""
        return self._connection.transaction()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Like ``bounded``, and all queries of the block see the database as it was at the first of them."""
        self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        with self.bounded():
            yield
        self._connection.isolation_level = None

    def unserved_queue(self, job: str) -> str | None:
        """The queue of an unfinished job if no live worker serves it; None also where the user may not look."""
        try:
            found = self.rows("unserved", job)
        except TaskQError:
            return None
        return found[0]["queue"] if found else None

    def bounded_rows(self, query: str, *arguments: Any) -> list[dict[str, Any]]:
        """Like ``rows``, given up after ``LIST_TIMEOUT``."""
        with self.bounded():
            return self.rows(query, *arguments)

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """A transaction for the length of the block, each of whose statements is given up after ``LIST_TIMEOUT``."""
        with self._connection.transaction():
            self.rows("bounded", LIST_TIMEOUT)
            yield


@contextmanager
def open_database(dsn: str | None, schema: str | None, *, queries: str = "cli") -> Iterator[Database]:
    """The database that flags and settings name, for the length of the block; with the queries of a file of ``db/sql``.

    Raises:
        ConfigurationError: No database is named, or a setting is wrong.
        DatabaseUnavailable: It cannot be reached.
    """
    settings = load(dsn=dsn, schema=schema)
    connection = connect_sync(settings.dsn, name="taskq cli", prepare_threshold=None)
    try:
        yield Database(connection, settings.schema, queries)
    finally:
        connection.close()


def actor() -> str:
    """Who acts, for the record: ``user@host`` of the operating system."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user id without a name
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def job_id(text: str, of: str = "job") -> str:
    """The id of a job, or of what ``of`` names, as the database writes it.

    Raises:
        typer.BadParameter: It is none.
    """
    try:
        return str(UUID(text))
    except ValueError:
        article = "an" if of[0] in "aeiou" else "a"
        raise typer.BadParameter(
            f"{text!r} is not the id of {article} {of}, such as 01999999-0000-7000-8000-000000000000"
        ) from None


def queue_name(text: str) -> str:
    """The name of a queue.

    Raises:
        typer.BadParameter: It can be none.
    """
    try:
        return check_name("the queue's name", text)
    except InvalidPolicy as exc:
        raise typer.BadParameter(str(exc)) from None


def instant(text: str, *, local: bool = False) -> datetime:
    """An instant in ISO 8601, with its offset; ``local`` takes one without, as the time of this machine.

    Raises:
        typer.BadParameter: It is none.
    """
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is None and local:
            found = found.astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not an instant, such as 2031-05-01T12:00:00+02:00") from None
    if found.tzinfo is None:
        raise typer.BadParameter(
            f"{text!r} has no time zone, so it names no instant; add the offset, such as {text}+02:00, or Z for UTC"
        )
    return found


def moment(text: str | None) -> tuple[datetime | None, float | None]:
    """A moment in the past: an instant, or seconds before now by the database's clock; both None for no text.

    Raises:
        typer.BadParameter: It is neither.
    """
    if text is None:
        return None, None
    try:
        return None, parse_duration(text)
    except InvalidDuration:
        pass
    try:
        return instant(text, local=True), None
    except typer.BadParameter:
        raise typer.BadParameter(
            f"{text!r} is neither a duration before now, such as 30m or 2h, nor an instant in ISO 8601"
        ) from None

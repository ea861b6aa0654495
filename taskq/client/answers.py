"""What the database answers, made into what callers get: rows into handles' data, refusals into typed errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import asyncpg
import psycopg

from taskq.client.connections import driver_error
from taskq.codec import decode_any
from taskq.errors import (
    DatabaseUnavailable,
    JobCancelled,
    JobFailed,
    JobNotFound,
    ResultNotKept,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    RunNotFound,
    SchemaBehind,
    TaskQError,
    from_sqlstate,
    not_permitted,
)
from taskq.handle import JobInfo

__all__ = ["OUTCOMES", "Awaited", "Waiting", "job_info", "placed", "role_for", "translated"]

Awaited: TypeAlias = Literal["job", "run"]
OUTCOMES: Final[Mapping[Awaited, str]] = {"job": "outcome", "run": "run_outcome"}
"""The query that says how one stands."""
FIRST_POLL: Final = 0.005
LONGEST_POLL: Final = 0.5
_MISSING_OBJECT: Final = ("42883", "3F000", "42P01")


def role_for(query: str) -> str:
    """The suffix of the role that may do what a query of ``db/sql/client.sql`` does."""
    if query in ("open_question", "answer_reconcile"):
        return "worker"
    return "operator" if query in ("retry", "resolve", "resolve_attempt", "retry_run") else "producer"


@contextmanager
def translated(schema: str, role: str = "producer") -> Iterator[None]:
    """Turn what either driver raises in the block into the errors of taskq; what is none of ours goes through.

    SQLAlchemy and Django wrap what the driver raised; what goes through stays in their wrapping, as callers expect it.

    Args:
        schema: The schema of taskq.
        role: The suffix of the role that may do it, for whom has not the rights.

    Raises:
        DatabaseRefusal: The schema refused the statement, with a class for each SQLSTATE.
        NotPermitted: The user lacks the rights.
        SchemaBehind: The schema, or the function that was called, is not there.
        DatabaseUnavailable: The connection was lost; whether the statement took effect is not known.
    """
    try:
        yield
    except TaskQError:
        raise
    except Exception as exc:
        cause = driver_error(exc)
        if cause is None:
            raise
        if ours := from_sqlstate(cause):
            raise ours from exc
        if denied := not_permitted(cause, f"{schema}_{role}"):
            raise denied from exc
        state = getattr(cause, "sqlstate", None)
        if state in _MISSING_OBJECT and schema in str(cause):
            raise SchemaBehind(
                f"schema {schema!r} of the database lacks what this release of taskq needs ({_first_line(cause)}); "
                "run 'taskq migrate up'"
            ) from exc
        if _lost(cause, state):
            raise DatabaseUnavailable(
                f"the connection to PostgreSQL was lost ({cause}), so whether the statement took effect is not known; "
                "try again, and enqueue with an idempotency_key so that repeating is safe"
            ) from exc
        raise


def _first_line(exc: BaseException) -> str:
    """What the server said, without the place in the statement that psycopg shows below it."""
    return str(exc).partition("\n")[0]


def _lost(exc: BaseException, state: str | None) -> bool:
    if isinstance(exc, ConnectionError):
        return True
    if state is not None:
        return state.startswith("08") or state in ("57P01", "57P02", "57P03")
    return isinstance(exc, (psycopg.OperationalError, asyncpg.ConnectionDoesNotExistError))


def placed(rows: Sequence[Sequence[Any]]) -> list[tuple[UUID, bool]]:
    """Ids and whether each is new, whatever codec the connection has for uuid."""
    if rows and not isinstance(rows[0][0], UUID):
        return [(UUID(str(row[0])), row[1]) for row in rows]
    return [(row[0], row[1]) for row in rows]


def job_info(row: Mapping[str, Any]) -> JobInfo:
    """One row of the query ``get``."""
    values = dict(row)
    for name in ("id", "worker_id"):
        values[name] = None if values[name] is None else UUID(values[name])
    for name in ("payload", "result", "error", "meta"):
        values[name] = decode_any(values[name])
    values["tags"] = tuple(values["tags"] or ())
    return JobInfo(**values)


class Waiting:
    """The course of one wait for a result: what an answer means, and how long to pause before the next look.

    Pauses grow from 5 ms by half each time to half a second: a quick job is answered quickly, a slow one costs two
    looks a second.

    Args:
        job_id: The job.
        may_appear: It was enqueued in a transaction that may not have committed: not being there is no error yet.
        of: Whether it is a job or a run.
    """

    def __init__(self, job_id: UUID, *, may_appear: bool, of: Awaited = "job") -> None:
        self.job_id = job_id
        self._of = of
        self.pause = FIRST_POLL
        self._may_appear = may_appear
        self._status: str | None = None

    def look(self, row: Sequence[Any] | None) -> tuple[bool, str | None]:
        """Whether it is over, and the JSON text of the result.

        Raises:
            JobFailed, RunFailed: It failed.
            JobCancelled, RunCancelled: It was cancelled.
            ResultNotKept: It has succeeded, and its result was not kept.
            JobNotFound, RunNotFound: It is not there.
        """
        if row is None:
            if not self._may_appear:
                raise self.not_found()
        else:
            status, result, error, finished, kept = row
            self._may_appear = False
            self._status = status
            if status == "succeeded":
                if not kept:
                    raise ResultNotKept(self.job_id)
                return True, result
            if finished:
                if self._of == "run":
                    raise (RunCancelled if status == "cancelled" else RunFailed)(self.job_id, decode_any(error))
                raise (JobCancelled if status == "cancelled" else JobFailed)(self.job_id, decode_any(error))
        return False, None

    def next_pause(self, left: float | None) -> float:
        """Seconds to pause, at most what is left."""
        pause = self.pause if left is None else min(self.pause, left)
        self.pause = min(self.pause * 1.5, LONGEST_POLL)
        return pause

    def not_found(self) -> JobNotFound | RunNotFound:
        """The error for what is not there."""
        return (RunNotFound if self._of == "run" else JobNotFound)(
            f"there is no {self._of} {self.job_id}",
            detail={f"{self._of}_id": str(self.job_id)},
            hint="Its transaction has not committed, or retention has dropped it.",
        )

    def timed_out(self, timeout: float) -> Exception:
        """The error for a wait that was too short."""
        waited = f"after {timeout:g} s"
        if self._status is None:
            return ResultTimeout(
                f"{waited} there is no {self._of} {self.job_id} to be seen: the transaction that "
                f"{'started' if self._of == 'run' else 'enqueued'} it has not committed, or was rolled back; commit "
                "before you wait"
            )
        if self._status == "unknown":
            return ResultTimeout(
                f"job {self.job_id} has not finished {waited}: its outcome is unknown, and it stays so until somebody "
                f"decides it with 'taskq jobs resolve {self.job_id}'"
            )
        if self._status == "pending":
            goes_on = "pending, until it is due and a worker takes it; wait longer or again, or see 'taskq doctor'"
        elif self._status == "held":
            goes_on = f"held, and waits for something else; see 'taskq jobs show {self.job_id}', or wait again"
        else:
            goes_on = f"{self._status} and goes on; wait longer or again"
        return ResultTimeout(f"{self._of} {self.job_id} had not finished {waited}: it is {goes_on}")

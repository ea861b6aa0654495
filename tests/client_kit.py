"""An application for the tests of the clients, and a worker's hand in SQL."""

from __future__ import annotations

from uuid import UUID

import psycopg

from taskq import JobContext, TaskQ
from taskq.tasks import AsyncTask, SyncTask


class Shop:
    """One application with three tasks."""

    def __init__(self, dsn: str, **options: object) -> None:
        self.app = TaskQ(dsn, **options)  # type: ignore[arg-type]

        async def double(n: int) -> int:
            return 2 * n

        def note(ctx: JobContext, text: str, x: object = None) -> str:
            return text

        async def anything(x: object) -> None: ...

        anything.__annotations__.clear()
        self.double: AsyncTask[[int], int] = self.app.task(double)
        self.note: SyncTask[..., str] = self.app.task(queue="notes", priority=7, deadline="1h")(note)
        self.anything: AsyncTask[..., None] = self.app.task(anything)


def finish(
    conn: psycopg.Connection, job: UUID, outcome: str, *, result: str | None = None, error: str | None = None
) -> None:
    """Claim and end a job as a worker does: ``succeeded``, ``failed`` or ``cancelled``."""
    (worker,) = conn.execute(
        "select taskq.register_worker('w', 'h', 1, array['default', 'notes'], array['double'], 1, 1, '0', 30)"
    ).fetchone() or (None,)
    conn.execute(
        "update taskq.jobs set status = 'running', claim_epoch = claim_epoch + 1, claimed_by = %s, claimed_at = now() "
        "where id = %s",
        [worker, job],
    )
    (ended,) = conn.execute(
        "select taskq.end_attempts(%s, array[%s]::uuid[], array[(select claim_epoch from taskq.jobs where id = %s)], "
        "array[%s], array[1]::bigint[], array[%s]::jsonb[], array[%s]::jsonb[], array[0]::float8[])",
        [worker, job, job, outcome, result, error],
    ).fetchone() or (0,)
    assert ended == 1


def stored(conn: psycopg.Connection) -> int:
    """How many jobs there are."""
    (found,) = conn.execute("select count(*) from taskq.all_jobs").fetchone() or (0,)
    return int(found)

"""The queue by hand: its SQL functions as calls, sessions driven into real lock waits, and a clock that tests move.

Nothing here knows the worker or the clients: tests of the laws talk to the database alone. A database is in the state
that the calls left it in; ``dump`` shows all of it, so that "changes nothing" can be asserted of everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import psycopg
from helpers import eventually
from psycopg import sql
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

Conn = psycopg.Connection[Any]
Row = dict[str, Any]
T = TypeVar("T")

POLICY = "p"
NOBODY = UUID(int=0)
BOUND = 20.0
"""Seconds until a wait that a test expects counts as failed."""

SPENT = ("retry_after_spent", "snooze_spent")
"""Terminal: what was asked for once more than its bound allows."""
OUTCOMES = ("succeeded", "failed", "cancelled", "retry", "retry_after", "snooze", "release", *SPENT)
"""Those that end an attempt; ``unknown`` keeps it open."""
TERMINAL = ("succeeded", "failed", "cancelled")
BACK = ("retry", "retry_after", "snooze", "release")


class End(NamedTuple):
    """One end as a worker sends it; delay in seconds."""

    job: UUID
    epoch: int = 1
    outcome: str = "succeeded"
    outcome_id: int | None = 1
    result: object = None
    error: object = None
    delay: float = 0


# Calls ----------------------------------------------------------------------------------------------------------------


def one(conn: Conn, query: str, *args: object) -> Any:
    """The only value of the only row."""
    row = conn.execute(query, args).fetchone()
    assert row is not None, f"no row: {query}"
    return next(iter(row.values())) if isinstance(row, dict) else row[0]


def rows(conn: Conn, query: str, *args: object) -> list[Row]:
    """All rows as dicts."""
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, args).fetchall()


def policy(conn: Conn, name: str = POLICY, **spec: object) -> str:
    conn.execute("select taskq.ensure_policy(%s, 1, %s)", (name, Jsonb(spec)))
    return name


def enqueue_many(
    conn: Conn,
    n: int = 1,
    *,
    unique: Sequence[str | None] | None = None,
    idempotency: Sequence[str | None] | None = None,
    on_conflict: str = "existing",
    payloads: Sequence[object] | None = None,
    ordering_keys: Sequence[str | None] | None = None,
    **spec: object,
) -> list[Row]:
    """Enqueue n jobs of one spec; gives rows of ord, job_id, inserted."""
    policy(conn)
    whole = {
        "task": "t",
        "queue": "q",
        "priority": 5,
        "max_attempts": 3,
        "effect_class": "idempotent",
        "policy_id": POLICY,
    } | spec
    payload = [Jsonb(p) for p in (payloads or [{}] * n)]
    return rows(
        conn,
        "select * from taskq.enqueue_many(%s, %s::int[], %s::text[], %s::text[], %s::text[], %s, %s::text[])",
        Jsonb([whole]),
        [1] * n,
        payload,
        list(unique) if unique else None,
        list(idempotency) if idempotency else None,
        on_conflict,
        list(ordering_keys) if ordering_keys else None,
    )


def enqueue(
    conn: Conn,
    *,
    unique_key: str | None = None,
    idempotency_key: str | None = None,
    ordering_key: str | None = None,
    payload: object = None,
    **spec: Any,
) -> UUID:
    """Enqueue one job; gives its id."""
    [row] = enqueue_many(
        conn,
        unique=[unique_key] if unique_key else None,
        idempotency=[idempotency_key] if idempotency_key else None,
        ordering_keys=[ordering_key] if ordering_key else None,
        payloads=[payload if payload is not None else {}],
        **spec,
    )
    job: UUID = row["job_id"]
    return job


def register(
    conn: Conn,
    *,
    queues: Sequence[str] = ("q",),
    tasks: Sequence[str] = ("t",),
    level: int = 2,
    lease: float = 60,
    concurrency: int = 10,
) -> UUID:
    """Register a live worker; lease in seconds."""
    worker: UUID = one(
        conn,
        "select taskq.register_worker('w', 'host', 1, %s, %s, %s, %s, '0', %s)",
        list(queues),
        list(tasks),
        concurrency,
        level,
        lease,
    )
    return worker


def exchange(
    conn: Conn,
    worker: UUID,
    ends: Sequence[End] = (),
    limit: int = 0,
    *,
    tasks: Sequence[str] = ("t",),
    lanes: Sequence[tuple[str, int]] = (("q", 5),),
    mark: tuple[object, UUID] = ("-infinity", NOBODY),
    skip: Sequence[UUID] = (),
    ends_async: bool = False,
) -> list[Row]:
    """One exchange: ends, then at most ``limit`` claims; gives the rows that it answers."""
    return rows(
        conn,
        "select * from taskq.exchange(%s, %s::uuid[], %s::bigint[], %s::text[], %s::bigint[], %s::jsonb[], %s::jsonb[],"
        " %s::float8[], %s, %s::text[], %s::text[], %s::smallint[], %s::timestamptz[], %s::uuid[], %s::uuid[],"
        " p_ends_async => %s)",
        worker,
        *_columns(ends),
        limit,
        list(tasks),
        [lane[0] for lane in lanes],
        [lane[1] for lane in lanes],
        [mark[0]] * len(lanes),
        [mark[1]] * len(lanes),
        list(skip),
        ends_async,
    )


def claim(conn: Conn, worker: UUID, limit: int = 10, **options: Any) -> list[Row]:
    """Claim alone; see ``exchange``. Fails the test where the answer is not of claims."""
    answer = exchange(conn, worker, (), limit, **options)
    assert {row["kind"] for row in answer} <= {"job"}, answer
    return answer


def claim_one(conn: Conn, worker: UUID, **options: Any) -> Row:
    [row] = claim(conn, worker, 1, **options)
    return row


def start_effects(conn: Conn, worker: UUID, *attempts: tuple[UUID, int]) -> list[Row]:
    """Ask for effect starts of (job, epoch); gives the rows that answer, in order."""
    return rows(
        conn,
        "select * from taskq.start_effects(%s, %s::uuid[], %s::bigint[])",
        worker,
        [job for job, _ in attempts],
        [epoch for _, epoch in attempts],
    )


def end(conn: Conn, worker: UUID, *ends: End) -> int:
    """Send ends; gives how many were applied."""
    applied: int = one(
        conn,
        "select taskq.end_attempts(%s, %s::uuid[], %s::bigint[], %s::text[], %s::bigint[], %s::jsonb[], %s::jsonb[],"
        " %s::float8[])",
        worker,
        *_columns(ends),
    )
    return applied


def _columns(ends: Sequence[End]) -> list[object]:
    columns = [[getattr(e, name) for e in ends] for name in End._fields]
    for at in (4, 5):
        columns[at] = [None if value is None else Jsonb(value) for value in columns[at]]
    return list(columns)


def running(conn: Conn, worker: UUID | None = None, **spec: Any) -> tuple[UUID, UUID]:
    """A job that a live worker has claimed; gives worker and job."""
    worker = worker or register(conn)
    job = enqueue(conn, **spec)
    claimed = claim(conn, worker, tasks=[str(spec.get("task", "t"))], lanes=[(str(spec.get("queue", "q")), 5)])
    assert [row["job_id"] for row in claimed] == [job]
    return worker, job


def unknown(conn: Conn, **spec: Any) -> tuple[UUID, UUID]:
    """An idempotent job that was lost after a cancel request, so that its outcome is unknown; gives worker and job."""
    worker, job = running(conn, **spec)
    assert cancel(conn, job) == "requested"
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    return worker, job


def lose(conn: Conn, worker: UUID) -> None:
    """Let the worker's lease run out and declare it lost."""
    conn.execute("update taskq.workers set lease_expires_at = '-infinity' where id = %s", (worker,))
    assert worker in [row["mark_lost"] for row in rows(conn, "select * from taskq.mark_lost() as mark_lost")]


def settle(conn: Conn, limit: int = 200) -> dict[UUID, str]:
    return {row["job_id"]: row["settled"] for row in rows(conn, "select * from taskq.settle_lost(%s)", limit)}


def cancel(conn: Conn, job: UUID) -> str:
    answer: str = one(conn, "select taskq.cancel(%s)", job)
    return answer


def retry(conn: Conn, job: UUID) -> str:
    answer: str = one(conn, "select taskq.retry(%s)", job)
    return answer


def resolve(conn: Conn, job: UUID, happened: bool, result: object = None, reason: str | None = "looked") -> str:
    answer: str = one(
        conn, "select taskq.resolve(%s, %s, %s, %s)", job, happened, None if result is None else Jsonb(result), reason
    )
    return answer


def drop_expired(conn: Conn) -> str | None:
    """Have retention drop one partition; gives its name, None where there is none left. Waits for the autovacuum."""

    def drop() -> tuple[str | None] | None:
        try:
            with conn.transaction():
                return (one(conn, "select taskq.drop_expired_partition()"),)
        except psycopg.errors.LockNotAvailable:
            return None

    dropped = eventually(drop, BOUND)
    assert dropped is not None
    return dropped[0]


def make_due(conn: Conn, job: UUID) -> None:
    conn.execute("update taskq.jobs set run_at = taskq.now() - interval '1 s' where id = %s", (job,))


# What there is --------------------------------------------------------------------------------------------------------


def get(conn: Conn, job: UUID) -> Row:
    """The job as ``all_jobs`` shows it; exactly one row."""
    [row] = rows(conn, "select * from taskq.all_jobs where id = %s", job)
    return row


def status(conn: Conn, job: UUID) -> str:
    value: str = get(conn, job)["status"]
    return value


def attempts(conn: Conn, job: UUID) -> list[tuple[int, str]]:
    """Ended attempts of a job, as (epoch, outcome) in order."""
    found = rows(conn, "select * from taskq.attempts where job_id = %s order by claim_epoch, ended_at", job)
    return [(row["claim_epoch"], row["outcome"]) for row in found]


def dump(conn: Conn) -> dict[str, list[str]]:
    """Every row of every table of the schema, as JSON text."""
    tables = rows(
        conn,
        "select c.relname from pg_class c where c.relnamespace = 'taskq'::regnamespace and c.relkind in ('r', 'p')"
        " and not c.relispartition order by 1",
    )
    found: dict[str, list[str]] = {}
    for table in tables:
        query = sql.SQL("select to_jsonb(t)::text as row from taskq.{} t order by 1")
        with conn.cursor(row_factory=dict_row) as cursor:
            found[table["relname"]] = [
                row["row"] for row in cursor.execute(query.format(sql.Identifier(table["relname"])))
            ]
    return found


def violations(conn: Conn, scope: str = "all") -> list[tuple[str, UUID]]:
    """What ``check_invariants`` reports, as (code, job)."""
    return [(row["code"], row["job_id"]) for row in rows(conn, "select * from taskq.check_invariants(%s)", scope)]


def refused(conn: Conn, query: str, *args: object) -> str:
    """The SQLSTATE by which a statement is refused; '' where it is not. Nothing remains of it in any case."""
    try:
        with conn.transaction(force_rollback=True):
            conn.execute(query, args)
    except psycopg.Error as error:
        return error.sqlstate or "?"
    return ""


def detail(error: psycopg.Error) -> Row:
    """The JSON object in an error's detail."""
    found: Row = json.loads(error.diag.message_detail or "{}")
    return found


# Sessions -------------------------------------------------------------------------------------------------------------


class Session:
    """A connection whose statements run in a thread, so that a test can drive it into a lock wait and look at it.

    ``do`` runs a call and waits for it; ``start`` lets it run. Begins no transaction by itself: ``begin`` does.
    """

    def __init__(self, dsn: str) -> None:
        self.conn: Conn = psycopg.connect(dsn, autocommit=True)
        self._watch: Conn = psycopg.connect(dsn, autocommit=True)
        self.pid = self.conn.info.backend_pid
        self._thread = ThreadPoolExecutor(1)

    def begin(self) -> None:
        self.conn.execute("begin")

    def commit(self) -> None:
        self.do(lambda conn: conn.execute("commit"))

    def rollback(self) -> None:
        self.do(lambda conn: conn.execute("rollback"))

    def do(self, call: Callable[[Conn], T]) -> T:
        return self.start(call).result(BOUND)

    def start(self, call: Callable[[Conn], T]) -> Future[T]:
        return self._thread.submit(call, self.conn)

    def waits_for(self, other: Session) -> None:
        """Return once this session waits for a lock that the other holds; fails the test where it never does."""
        query = (
            "select %s = any(pg_blocking_pids(%s)) and exists (select from pg_stat_activity where pid = %s"
            " and wait_event_type = 'Lock' and state = 'active')"
        )
        eventually(lambda: one(self._watch, query, other.pid, self.pid, self.pid), BOUND)

    def close(self) -> None:
        # A call that still waits for a lock ends with its server process.
        self._watch.execute("select pg_terminate_backend(%s)", (self.pid,))
        self._thread.shutdown(wait=True)
        self.conn.close()
        self._watch.close()


@contextmanager
def sessions(dsn: str, n: int = 2) -> Iterator[list[Session]]:
    """Sessions of their own, ended after the block whatever they wait for."""
    opened: list[Session] = []
    try:
        for _ in range(n):
            opened.append(Session(dsn))
        yield opened
    finally:
        for session in opened:
            session.close()


# The clock ------------------------------------------------------------------------------------------------------------


def control_clock(conn: Conn) -> None:
    """Replace the database's one clock by one that ``shift_clock`` moves and ``stop_clock`` stops."""
    conn.execute("create table public.clock (shift interval not null, stopped timestamptz)")
    conn.execute("insert into public.clock values ('0', null)")
    conn.execute("grant select on public.clock to public")
    conn.execute(
        "create or replace function taskq.now() returns timestamptz language sql stable parallel safe"
        " set search_path = pg_catalog, pg_temp"
        " as $$ select coalesce(c.stopped, clock_timestamp()) + c.shift from public.clock c $$"
    )


def shift_clock(conn: Conn, by: str) -> None:
    """Move the clock by an interval, such as '2 days' or '-10 min'."""
    conn.execute("update public.clock set shift = shift + %s::interval", (by,))


def stop_clock(conn: Conn) -> None:
    conn.execute("update public.clock set stopped = clock_timestamp()")

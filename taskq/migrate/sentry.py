"""A thread beside the runner, on a connection of its own: it renews the lease and watches what the runner waits for.

A statement may run for minutes, during which the runner's thread can do nothing. The sentry keeps the lease alive
meanwhile, stops the runner's statement if the lease is lost all the same, notes who blocks it while it waits for a lock
(afterwards nobody could tell), and cancels it when it has waited for longer than it may in all: lock_timeout bounds
each single wait, and a file that takes several locks would otherwise hold the first while it waits for the last.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from taskq.db.dsn import Dsn
from taskq.errors import TaskQError
from taskq.migrate.records import RENEW, Connection, compose, connect

_WAITING = """\
select a.pid, coalesce(a.wait_event_type = 'Lock', false) as waiting,
  (select concat_ws(' ', l.mode, 'on', coalesce(c.relnamespace::regnamespace || '.' || c.relname, l.locktype))
   from pg_locks l left join pg_class c on c.oid = l.relation where l.pid = a.pid and not l.granted limit 1) as wanted
from pg_stat_activity a
where case when %(pid)s::int is null then a.application_name = %(name)s and a.state = 'active'
  and a.datname = current_database() else a.pid = %(pid)s end and a.pid <> pg_backend_pid()
limit 1"""

_BLOCKERS = """\
select p.pid, b.usename::text as role, b.application_name as application, b.state,
  extract(epoch from clock_timestamp() - b.xact_start)::float8 as seconds, left(b.query, 200) as query,
  (select string_agg(distinct l.mode, ', ') from pg_locks l where l.pid = p.pid and l.granted and l.relation in
    (select w.relation from pg_locks w where w.pid = %(pid)s and not w.granted)) as holds
from (select distinct unnest(pg_blocking_pids(%(pid)s)) as pid) p left join pg_stat_activity b using (pid)
order by p.pid limit 5"""

_END_LOST = """\
select pg_terminate_backend(pid, 5000) from pg_stat_activity
where application_name = %s and datname = current_database() and usename = current_user
  and state <> 'idle' and pid <> pg_backend_pid()"""


@dataclass(frozen=True, slots=True)
class Blocker:
    """A session that stands in the way."""

    pid: int
    role: str | None
    application: str | None
    state: str | None
    seconds: float | None
    query: str | None
    holds: str | None

    def __str__(self) -> str:
        if self.pid == 0:
            return "a prepared transaction (see pg_prepared_xacts)"
        who = f" ({self.role}, {self.application})" if self.application else f" ({self.role})"
        query = " ".join((self.query or "").split())
        query = query if len(query) <= 80 else query[:77] + "..."
        since = f" for {self.seconds:.0f} s" if self.seconds is not None else ""
        holds = f", holds {self.holds}" if self.holds else ""
        return f"pid {self.pid}{who if self.role else ''}: {self.state or 'state not visible'}{since}{holds}: {query}"


@dataclass(frozen=True, slots=True)
class _Wait:
    pid: int
    waiting: bool
    wanted: str | None


@dataclass(slots=True)
class Watch:
    """What the sentry has seen of the statement that runs now."""

    pid: int | None
    limit: float
    """Seconds that it may spend waiting for locks, in all."""
    waited: float = 0.0
    wanted: str | None = None
    blockers: list[Blocker] = field(default_factory=list)
    cancelled: bool = False


def application_name(token: UUID) -> str:
    """The name under which the sessions of one hold of the lease are found."""
    return f"taskq migrate {token}"


def end_lost_sessions(conn: Connection, token: UUID) -> int:
    """End what a runner that lost its lease left running, so that it neither holds locks nor builds on; count it."""
    with suppress(psycopg.errors.InsufficientPrivilege):
        return len(conn.execute(_END_LOST, (application_name(token),)).fetchall())
    return 0


class Sentry:
    """Use as a context manager around everything that is done under the lease."""

    def __init__(self, dsn: Dsn, schema: str, token: UUID, seconds: float) -> None:
        self.lost = threading.Event()
        self._dsn, self._schema, self._token, self._seconds = dsn, schema, token, seconds
        self._renewed = time.monotonic()
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stop = False
        self._conn: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="taskq-migrate-sentry", daemon=True)

    def __enter__(self) -> Sentry:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._wake.set()
        self._thread.join()
        if self._conn is not None:
            self._conn.close()

    def watch(self, pid: int | None, limit: float) -> Watch:
        """Begin to watch the backend ``pid``, or without it the one of this hold's name; ``limit`` is in seconds."""
        watch = Watch(pid, limit)
        with self._lock:
            self._watch = watch
        self._wake.set()
        return watch

    def unwatch(self) -> None:
        """Stop watching; once this returns, no cancel is sent any more."""
        with self._lock:
            self._watch = None

    def _run(self) -> None:
        while not self._stop:
            try:
                self._round()
            except (psycopg.Error, TaskQError):
                # A lost connection is replaced in the next round; the lease allows for several of them.
                if self._conn is not None:
                    self._conn.close()
                self._conn = None
            if not self.lost.is_set() and time.monotonic() - self._renewed > self._seconds:
                self.lost.set()
            if self.lost.is_set():
                self._cancel_lost()
            watch = self._watch
            pause = min(0.1, watch.limit / 4) if watch else self._seconds / 6
            self._wake.wait(pause)
            self._wake.clear()

    def _round(self) -> None:
        if self._conn is None:
            self._conn = connect(self._dsn, application_name="taskq migrate sentry")
        now = time.monotonic()
        if not self.lost.is_set() and now - self._renewed >= self._seconds / 3:
            with self._conn.transaction():
                values = {"token": self._token, "seconds": self._seconds}
                renewed = self._conn.execute(compose(RENEW, self._schema), values).rowcount == 1
            if renewed:
                self._renewed = now
            else:
                self.lost.set()
        watch = self._watch
        if watch is not None and not watch.cancelled:
            self._look(self._conn, watch)

    def _look(self, conn: Connection, watch: Watch) -> None:
        began = time.monotonic()
        with conn.cursor(row_factory=class_row(_Wait)) as cursor:
            seen = cursor.execute(_WAITING, {"pid": watch.pid, "name": application_name(self._token)}).fetchone()
        if seen is None or not seen.waiting:
            return
        with conn.cursor(row_factory=class_row(Blocker)) as cursor:
            blockers = cursor.execute(_BLOCKERS, {"pid": seen.pid}).fetchall()
        # A look in between two holders finds nobody: what was seen before stays.
        watch.wanted, watch.blockers = seen.wanted or watch.wanted, blockers or watch.blockers
        watch.waited += min(0.1, watch.limit / 4) + time.monotonic() - began
        if watch.waited >= watch.limit:
            with self._lock:
                if self._watch is watch:
                    watch.cancelled = True
                    conn.execute("select pg_cancel_backend(%s)", (seen.pid,))

    def _cancel_lost(self) -> None:
        """Stop the statement of a runner that may no longer write."""
        with suppress(psycopg.Error, TaskQError), self._lock:
            watch = self._watch
            if watch is None or watch.cancelled or self._conn is None:
                return
            watch.cancelled = True
            query = (
                "select pg_cancel_backend(pid) from pg_stat_activity where state <> 'idle' and "
                "application_name = %s and pid <> pg_backend_pid()"
            )
            self._conn.execute(query, (application_name(self._token),))

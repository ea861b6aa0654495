"""Applying migrations: one runner at a time, each file with its record, never in the way of a busy table for long."""

from __future__ import annotations

import os
import random
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
from psycopg import errors
from psycopg.pq import TransactionStatus

from taskq.db.dsn import parse_dsn
from taskq.errors import MigrationError, MigrationLocked
from taskq.migrate import indexes, records
from taskq.migrate.files import Migration, load_migrations, strip_comments
from taskq.migrate.sentry import Sentry, Watch, application_name, end_lost_sessions
from taskq.settings import check_schema

__all__ = ["Applied", "up"]

SEARCH_PATH = "pg_catalog, pg_temp"
_RECONNECTS = 5
_OUTSIDE = re.compile(r"\bconcurrently\b|^\s*(?:vacuum|alter\s+system|reindex\s+(?:database|system|schema))\b", re.I)


@dataclass(frozen=True, slots=True)
class Applied:
    """What a run found and did; each a tuple of file names in order."""

    applied: tuple[str, ...]
    """Applied by this run."""
    already: tuple[str, ...]
    """There before, or applied by another runner meanwhile."""
    left_out: tuple[str, ...]
    """Post files that are pending and were not asked for."""


class _LeaseLost(Exception):
    """Another runner has taken over, or the connection broke; look at the database again."""


def up(
    dsn: str,
    schema: str = "taskq",
    *,
    include_post: bool | None = None,
    lock_timeout: float = 2.0,
    wait: float = 120.0,
    lock_attempts: int = 10,
    build_timeout: float = 300.0,
    lease: float = 30.0,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Applied:
    """Apply what is pending, or wait until another runner has; safe to call from any number of processes at once.

    Args:
        dsn: where the database is; a transaction pooler may stand in between.
        schema: the schema that holds everything of taskq; created if it is not there.
        include_post: apply post files too; by default only while the first installation is not complete.
        lock_timeout: seconds that a file may wait for locks before it steps back, and others can go on.
        wait: seconds to wait for another runner before giving up.
        lock_attempts: how often a file is tried when it cannot get its locks.
        build_timeout: seconds that a statement outside a transaction, such as CREATE INDEX CONCURRENTLY, may wait for
            older transactions to end. It holds up nobody meanwhile.
        lease: seconds after which a runner that was killed is replaced.
        folder: the migrations folder; by default the one that came with taskq.
        progress: told each step in a line for people.

    Raises:
        DatabaseUnavailable: no connection.
        MigrationLocked: a lock or the lease was not to be had in time; the message names who holds it.
        MigrationFailed: PostgreSQL refused a statement.
        MigrationError: files, manifest and database disagree; see its subclasses.
    """
    migrations = load_migrations(folder)
    runner = _Runner(
        dsn, check_schema(schema), migrations, include_post, lock_timeout, lock_attempts, build_timeout, lease, progress
    )
    try:
        return runner.run(time.monotonic() + wait)
    finally:
        runner.conn.close()


def pending(migrations: Sequence[Migration], applied: Sequence[str], *, include_post: bool) -> list[Migration]:
    """The files to apply, in order."""
    done = set(applied)
    return [m for m in migrations if m.filename not in done and (include_post or m.kind == "pre")]


class _Runner:
    def __init__(
        self,
        dsn: str,
        schema: str,
        migrations: Sequence[Migration],
        include_post: bool | None,
        lock_timeout: float,
        lock_attempts: int,
        build_timeout: float,
        lease: float,
        progress: Callable[[str], None],
    ) -> None:
        self.dsn, self.schema, self.migrations, self.include_post = parse_dsn(dsn), schema, migrations, include_post
        self.lock_timeout, self.lock_attempts, self.build_timeout = lock_timeout, lock_attempts, build_timeout
        self.lease, self.progress = lease, progress
        self.holder = f"{socket.gethostname()}, process {os.getpid()}"
        self.applied: list[str] = []
        self.waiting_for: str | None = None
        self.token = uuid4()
        self.conn = self._connect()

    def run(self, deadline: float) -> Applied:
        reconnects = 0
        while True:
            try:
                if (done := self._step(deadline)) is not None:
                    return done
            except _LeaseLost:
                self.progress("the lease was lost; looking again")
                if time.monotonic() > deadline:
                    raise MigrationLocked(
                        "this runner lost its lease again and again, so others are at work or the machine is too "
                        "slow; what was applied is recorded: run 'taskq migrate up' again"
                    ) from None
            except psycopg.Error as exc:
                if not self.conn.closed:
                    raise records.failed(exc, "the migration could not go on", self.conn) from exc
            if self.conn.closed:
                if (reconnects := reconnects + 1) > _RECONNECTS:
                    raise MigrationError("the connection was lost again and again; see the server's log for the cause")
                self._reconnect()

    def _connect(self) -> records.Connection:
        conn = records.connect(self.dsn, application_name=application_name(self.token))
        conn.add_notice_handler(self._noticed)
        return conn

    def _noticed(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        """Pass on what a migration itself has to say; PostgreSQL's own notices are none of the reader's business."""
        said = diagnostic.message_primary or ""
        if said.startswith("taskq: "):
            self.progress(f"warning: {said.removeprefix('taskq: ')}")

    def _reconnect(self) -> None:
        old, self.token = self.token, uuid4()
        self.conn = self._connect()
        end_lost_sessions(self.conn, old)
        if records.tables_exist(self.conn, self.schema):
            records.release_lease(self.conn, self.schema, old, complete=False)

    def _step(self, deadline: float) -> Applied | None:
        """Look once; apply what is pending if the lease is free, else wait a moment. Returns when nothing is left."""
        records.ensure_tables(self.conn, self.schema, deadline=deadline)
        done = self._done()
        lease = records.read_lease(self.conn, self.schema)
        post = lease.installing if self.include_post is None else self.include_post
        if not pending(self.migrations, done, include_post=post) and not (lease.installing and done and not lease.live):
            left = tuple(m.filename for m in pending(self.migrations, done, include_post=True))
            already = tuple(name for name in done if name not in self.applied)
            return Applied(tuple(self.applied), already, left)
        taken, lost = records.take_lease(self.conn, self.schema, self.token, self.holder, self.lease)
        if taken:
            self._work(post, lost)
            return None
        if time.monotonic() > deadline:
            raise MigrationLocked(
                f"another runner of taskq migrate ({lease.holder}) is still at work; nothing was changed by this one. "
                "Wait for it, then run 'taskq migrate up' again; if it was killed, its lease ends by itself"
            )
        if lease.holder != self.waiting_for:
            self.waiting_for = lease.holder
            self.progress(f"waiting for another runner ({lease.holder})")
        time.sleep(random.uniform(0.1, 0.3))
        return None

    def _done(self) -> list[str]:
        rows = {row.filename: row for row in records.read_rows(self.conn, self.schema)}
        records.check_history(self.migrations, rows)
        return list(rows)

    def _work(self, post: bool, lost: UUID | None) -> None:
        complete = False
        try:
            with Sentry(self.dsn, self.schema, self.token, self.lease) as sentry:
                if lost is not None:
                    self.progress("taking over from a runner whose lease has expired")
                    end_lost_sessions(self.conn, lost)
                for migration in pending(self.migrations, self._done(), include_post=post):
                    self._apply(migration, sentry)
                complete = True
        finally:
            # If this fails, the connection is gone; the lease then ends by itself or with the reconnection.
            with suppress(psycopg.Error):
                records.release_lease(self.conn, self.schema, self.token, complete=complete)

    def _apply(self, migration: Migration, sentry: Sentry) -> None:
        self.progress(f"applying {migration.filename}")
        began = time.monotonic()
        seen: Watch | None = None
        for attempt in range(self.lock_attempts):
            if attempt:
                time.sleep(min(0.2 * 2**attempt, 5.0) * random.uniform(0.5, 1.0))
                self.progress(f"applying {migration.filename}, attempt {attempt + 1} of {self.lock_attempts}")
            tried = _Try(self, migration, sentry)
            try:
                tried.go()
            except (errors.LockNotAvailable, errors.DeadlockDetected, errors.QueryCanceled) as exc:
                if sentry.lost.is_set():
                    raise _LeaseLost from exc
                if isinstance(exc, errors.QueryCanceled) and not (tried.watch and tried.watch.cancelled):
                    raise records.failed(exc, f"{migration.filename} was cancelled", self.conn) from exc
                seen = tried.watch if seen is None or (tried.watch and tried.watch.blockers) else seen
                if tried.outside:
                    break  # It has waited its whole, long time already.
            except psycopg.Error as exc:
                if sentry.lost.is_set() or self.conn.closed:
                    raise _LeaseLost from exc
                what = "was rolled back" if migration.transactional else "stopped; a later run goes on with it"
                raise records.failed(exc, f"{migration.filename} failed and {what}", self.conn) from exc
            else:
                self.applied.append(migration.filename)
                self.progress(f"applied {migration.filename} in {time.monotonic() - began:.2f} s")
                return
        raise self._locked(migration, time.monotonic() - began, seen)

    def _locked(self, migration: Migration, seconds: float, watch: Watch | None) -> MigrationLocked:
        blockers = watch.blockers if watch else []
        wanted = f" ({watch.wanted})" if watch and watch.wanted else ""
        who = " | ".join(map(str, blockers)) or "not to be seen any more"
        pids = [b.pid for b in blockers if b.pid]
        cure = f" (or: select pg_terminate_backend({pids[0]}))" if pids else ""
        left = "" if migration.transactional else "; an index that it left unfinished is dropped and built anew then"
        return MigrationLocked(
            f"{migration.filename} could not get a lock{wanted} within {seconds:.1f} s and gave up, so that nobody "
            f"queues up behind it; it is not applied. In the way: {who}. Let that transaction end{cure}, then run "
            f"'taskq migrate up' again{left}"
        )


class _Try:
    """One try at one file."""

    def __init__(self, runner: _Runner, migration: Migration, sentry: Sentry) -> None:
        self.runner, self.migration, self.sentry, self.conn = runner, migration, sentry, runner.conn
        self.watch: Watch | None = None
        self.outside = False
        self.began = time.monotonic()

    def go(self) -> None:
        statements = self.migration.statements(self.runner.schema)
        if self.migration.transactional:
            self._inside(statements, recorded=True)
            return
        present = indexes.Indexes(self.conn, self.runner.schema, statements)
        for statement in present.repairs():
            self._outside(statement)
        for statement in statements:
            if present.is_built_by(statement):
                continue
            if _OUTSIDE.search(strip_comments(statement)):
                self._outside(statement)
            else:
                self._inside([statement], recorded=False)
        self._inside([], recorded=True)

    def _inside(self, statements: Sequence[str], *, recorded: bool) -> None:
        limit = self.runner.lock_timeout
        settings = {"lock_timeout": f"{max(1, round(limit * 1000))}ms", "statement_timeout": "0"}
        with records.transaction(self.conn, **settings, search_path=SEARCH_PATH):
            row = self.conn.execute("select pg_backend_pid()").fetchone()
            self.watch = self.sentry.watch(row[0] if row else None, limit)
            try:
                for statement in statements:
                    self.conn.execute(statement.encode())
                    if self.conn.info.transaction_status != TransactionStatus.INTRANS:
                        raise MigrationError(
                            f"{self.migration.filename} ended the runner's transaction; take COMMIT and ROLLBACK out "
                            "of it, then compare the schema with the file: a part of it may be applied"
                        )
                if recorded and not self._record():
                    raise _LeaseLost
            finally:
                self.sentry.unwatch()

    def _record(self) -> bool:
        seconds = time.monotonic() - self.began
        return records.record(self.conn, self.runner.schema, self.migration, self.runner.token, seconds)

    def _outside(self, statement: str) -> None:
        if self.sentry.lost.is_set():
            raise _LeaseLost
        self.outside = True
        self.watch = self.sentry.watch(None, self.runner.build_timeout)
        try:
            self.conn.execute(statement.encode())
        finally:
            self.sentry.unwatch()
        self.outside = False

"""The runner's own bookkeeping in the database: ``schema_migrations`` and ``migration_lease``, and their statements.

Every statement runs in a short transaction of its own, names its tables in full and keeps no session state, so that
it works through a transaction pooler.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from psycopg import errors, sql
from psycopg.rows import class_row, tuple_row

from taskq.db.dsn import Dsn, connection_error, parse_dsn
from taskq.db.pools import set_up_session
from taskq.errors import (
    ConfigurationError,
    MigrationChanged,
    MigrationError,
    MigrationFailed,
    MigrationReordered,
    MigrationUnknown,
    SchemaNewer,
)
from taskq.migrate.files import Kind, Migration, code_version

Connection = psycopg.Connection[Any]

# Everything is created with its comments in one transaction, so that a table is there with all of this or not at all.
BOOTSTRAP = """\
create table {schema}.schema_migrations (
  filename text primary key,
  version text not null,
  kind text not null check (kind in ('pre', 'post')),
  sha256 text not null check (sha256 ~ '^[0-9a-f]{{64}}$'),
  applied_at timestamptz not null default clock_timestamp(),
  duration interval not null,
  taskq_version text not null
);
comment on table {schema}.schema_migrations is
  'One row for each migration applied to this schema; written by taskq migrate in the transaction of the migration.';
comment on column {schema}.schema_migrations.filename is 'Name of the migration file; files are applied in this order.';
comment on column {schema}.schema_migrations.version is 'Release that brought the file, VV.VV.VV.';
comment on column {schema}.schema_migrations.kind is
  'pre: applied before the code of its release runs. post: applied once the code before it is gone.';
comment on column {schema}.schema_migrations.sha256 is
  'SHA-256 of the file as released, before the schema''s name is filled in.';
comment on column {schema}.schema_migrations.applied_at is 'When it was applied.';
comment on column {schema}.schema_migrations.duration is 'How long its statements took.';
comment on column {schema}.schema_migrations.taskq_version is 'Version of taskq that applied it.';
create table {schema}.migration_lease (
  only_row boolean primary key default true check (only_row),
  token uuid,
  holder text,
  taken_at timestamptz,
  expires_at timestamptz,
  installing boolean not null default true
);
comment on table {schema}.migration_lease is
  'One row: which runner of taskq migrate may change the schema now. Runners take it for a while, renew it, poll it.';
comment on column {schema}.migration_lease.only_row is 'Always true, so that there is never a second row.';
comment on column {schema}.migration_lease.token is
  'Names the present hold; a migration is recorded only under the token that its runner took. Null: free.';
comment on column {schema}.migration_lease.holder is 'Host and process of the runner that holds the lease.';
comment on column {schema}.migration_lease.taken_at is 'When the present hold began.';
comment on column {schema}.migration_lease.expires_at is 'When the hold ends unless it is renewed.';
comment on column {schema}.migration_lease.installing is
  'True until the first installation is complete; a runner that takes over an installation applies post files too.';
insert into {schema}.migration_lease default values;
"""

_APPLIED = """\
select filename, version, kind, sha256, applied_at, duration, taskq_version
from {schema}.schema_migrations order by filename"""

# The lock on the lease's row lasts until the commit, so nobody can take the lease over between check and record.
_RECORD = """\
with held as (select 1 from {schema}.migration_lease where token = %(token)s for update)
insert into {schema}.schema_migrations (filename, version, kind, sha256, duration, taskq_version)
select %(filename)s, %(version)s, %(kind)s, %(sha256)s, make_interval(secs => %(seconds)s), %(taskq)s from held"""

RECORD_BY_HAND = """\
insert into {schema}.schema_migrations (filename, version, kind, sha256, duration, taskq_version)
values ({filename}, {version}, {kind}, {sha256}, clock_timestamp() - transaction_timestamp(), {taskq});"""

# SKIP LOCKED: a runner that is just recording or renewing holds the row; others look again later and wait for nobody.
_TAKE = """\
with free as (
  select token as old_token from {schema}.migration_lease
  where expires_at is null or expires_at < clock_timestamp() for update skip locked)
update {schema}.migration_lease set token = %(token)s, holder = %(holder)s, taken_at = clock_timestamp(),
  expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
from free returning free.old_token"""

RENEW = """\
update {schema}.migration_lease set expires_at = clock_timestamp() + make_interval(secs => %(seconds)s)
where token = %(token)s"""

_RELEASE = """\
update {schema}.migration_lease set token = null, holder = null, taken_at = null, expires_at = null,
  installing = installing and not %(complete)s
where token = %(token)s"""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of ``schema_migrations``."""

    filename: str
    version: str
    kind: Kind
    sha256: str
    applied_at: datetime
    duration: timedelta
    taskq_version: str


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """The lease as it stands."""

    token: UUID | None
    holder: str | None
    live: bool
    installing: bool


def compose(text: str, schema: str, **values: Any) -> sql.Composed:
    """Fill in the schema, and values as literals."""
    literals = {name: sql.Literal(value) for name, value in values.items()}
    return sql.SQL(text).format(schema=sql.Identifier(schema), **literals)


def connect(dsn: str | Dsn, *, application_name: str = "taskq migrate") -> Connection:
    """Connect in autocommit, without prepared statements, so that a transaction pooler may stand in between.

    Raises:
        DatabaseUnavailable: no connection; one line that names host, port and database.
    """
    parsed = parse_dsn(dsn) if isinstance(dsn, str) else dsn
    params: dict[str, Any] = {
        "connect_timeout": "10",
        **parsed.params,
        "application_name": application_name,
        "client_encoding": "UTF8",
    }
    try:
        conn = psycopg.connect(autocommit=True, prepare_threshold=None, **params)
        set_up_session(conn)
    except psycopg.Error as exc:
        raise connection_error(exc, parsed) from None
    # A role may default to another level or to read-only transactions; the runner must not inherit that.
    conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    conn.read_only = False
    return conn


@contextmanager
def transaction(conn: Connection, **settings: str | float) -> Iterator[None]:
    """A transaction with settings of its own (``set_config(..., true)``), which end with it."""
    with conn.transaction():
        for name, value in settings.items():
            conn.execute("select set_config(%s, %s, true)", (name, str(value)))
        yield


def ensure_tables(conn: Connection, schema: str, *, deadline: float) -> None:
    """Create the schema and the runner's tables if they are not there.

    One runner creates them; the others see that the advisory lock of its transaction is taken, and look again. Nobody
    waits for a lock, and none runs into an object that another has just created.

    Args:
        conn: a connection in autocommit.
        schema: where to create them.
        deadline: on ``time.monotonic``; when to give up.

    Raises:
        MigrationError: it could not be done, for want of privileges or of time.
    """
    while not tables_exist(conn, schema):
        try:
            with transaction(conn, lock_timeout="2s"):
                lock = conn.execute("select pg_try_advisory_xact_lock(hashtextextended(%s, 0))", (f"taskq:{schema}",))
                if lock.fetchone() == (True,) and not tables_exist(conn, schema):
                    quoted = conn.execute("select quote_ident(%s)", (schema,)).fetchone()
                    if quoted != (schema,):
                        raise ConfigurationError(f"{schema!r} is a reserved word of SQL; choose another schema")
                    if not _scalar(conn, "select exists (select from pg_namespace where nspname = %s)", schema):
                        conn.execute(compose("create schema {schema}", schema))
                    conn.execute(compose(BOOTSTRAP, schema))
                    return
        except (errors.UniqueViolation, errors.DuplicateSchema, errors.DuplicateTable, errors.LockNotAvailable):
            pass  # Somebody who is no runner of taskq creates the same objects: look again.
        except psycopg.Error as exc:
            raise failed(exc, f"the schema {schema} could not be prepared", conn) from exc
        if time.monotonic() > deadline:
            raise MigrationError(f"the schema {schema} could not be created in time: somebody else is creating it")
        time.sleep(0.05)


def tables_exist(conn: Connection, schema: str) -> bool:
    """Whether the runner's tables are there."""
    return bool(
        _scalar(
            conn,
            "select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace "
            "where n.nspname = %s and c.relname = 'schema_migrations')",
            schema,
        )
    )


def _scalar(conn: Connection, query: LiteralString, *args: object) -> Any:
    with conn.cursor(row_factory=tuple_row) as cursor:  # A caller's connection may have another row factory.
        row = cursor.execute(query, args).fetchone()
    return row[0] if row else None


def read_rows(conn: Connection, schema: str) -> list[Row]:
    """All rows of ``schema_migrations`` in the order of names; empty if there is no such table.

    Raises:
        MigrationError: the role may not read it.
    """
    try:
        if not tables_exist(conn, schema):
            return []
        with conn.cursor(row_factory=class_row(Row)) as cursor:
            return cursor.execute(compose(_APPLIED, schema)).fetchall()
    except errors.InsufficientPrivilege as exc:
        raise failed(exc, f"{schema}.schema_migrations cannot be read", conn) from exc


def read_lease(conn: Connection, schema: str) -> LeaseRow:
    """The lease's row."""
    query = (
        "select token, holder, coalesce(expires_at >= clock_timestamp(), false) as live, installing "
        "from {schema}.migration_lease"
    )
    with conn.cursor(row_factory=class_row(LeaseRow)) as cursor:
        row = cursor.execute(compose(query, schema)).fetchone()
    if row is None:
        raise MigrationError(
            f"{schema}.migration_lease has lost its row; restore it: insert into {schema}.migration_lease "
            "(installing) values (false)"
        )
    return row


def take_lease(conn: Connection, schema: str, token: UUID, holder: str, seconds: float) -> tuple[bool, UUID | None]:
    """Take the lease if it is free or expired. Returns whether, and the token of the hold that had expired, if any."""
    values = {"token": token, "holder": holder, "seconds": seconds}
    with conn.transaction():
        row = conn.execute(compose(_TAKE, schema), values).fetchone()
    return row is not None, row[0] if row else None


def release_lease(conn: Connection, schema: str, token: UUID, *, complete: bool) -> None:
    """Free the lease if it is still held under ``token``; ``complete`` ends the first installation."""
    with conn.transaction():
        conn.execute(compose(_RELEASE, schema), {"token": token, "complete": complete})


def record(conn: Connection, schema: str, migration: Migration, token: UUID, seconds: float) -> bool:
    """Write the migration's row under the lease's token; false, and nothing written, if the lease was lost."""
    values = {
        "token": token,
        "filename": migration.filename,
        "version": migration.version,
        "kind": migration.kind,
        "sha256": migration.sha256,
        "seconds": seconds,
        "taskq": code_version(),
    }
    return conn.execute(compose(_RECORD, schema), values).rowcount == 1


def check_history(migrations: Sequence[Migration], applied: Mapping[str, Row | tuple[Kind, str]]) -> None:
    """Refuse a database whose history is not a part of the files at hand.

    Raises:
        SchemaNewer: the database has files that come after all of the code's.
        MigrationUnknown: it has one in between that the code never had.
        MigrationChanged: a file was another one when it was applied.
        MigrationReordered: a file is pending although one that must come after it is applied.
    """
    if problems := history_problems(migrations, applied):
        raise problems[0]


def history_problems(
    migrations: Sequence[Migration], applied: Mapping[str, Row | tuple[Kind, str]]
) -> list[MigrationError]:
    """All that ``check_history`` would refuse."""
    known = {m.filename: m for m in migrations}
    last = max(known, default="")
    found: list[MigrationError] = []
    newer = [name for name in sorted(applied) if name not in known and name > last]
    if newer:
        found.append(
            SchemaNewer(
                f"the database is newer than this code (taskq {code_version()}): it has {', '.join(newer)}; "
                "use the release of taskq that brought them, or a later one"
            )
        )
    for name in sorted(applied):
        if name not in known and name <= last:
            found.append(
                MigrationUnknown(
                    f"the database has {name}, which this code (taskq {code_version()}) never had; was it made by "
                    "another build? Use that build, or restore the database"
                )
            )
        elif name in known and _digest(applied[name]) != known[name].sha256:
            found.append(
                MigrationChanged(
                    f"{name} was another file when it was applied to this database (sha256 "
                    f"{_digest(applied[name])[:12]} then, {known[name].sha256[:12]} now); use the released file"
                )
            )
    for m in migrations:
        if m.filename in applied:
            continue
        later = [
            n for n in sorted(applied) if n > m.filename and n in known and (m.kind, known[n].kind) != ("post", "pre")
        ]
        if later:
            found.append(
                MigrationReordered(
                    f"{m.filename} is not applied, but {later[0]}, which comes after it, is; a new migration must "
                    "have a later name than those that were released"
                )
            )
    return found


def _digest(row: Row | tuple[Kind, str]) -> str:
    return row.sha256 if isinstance(row, Row) else row[1]


def failed(exc: psycopg.Error, what: str, conn: Connection | None = None) -> MigrationError:
    """Turn an error of PostgreSQL into one of ours, in one line with SQLSTATE, detail and place."""
    diag = exc.diag
    message = diag.message_primary or " ".join(str(exc).split()) or type(exc).__name__
    parts = [f"{what}: {message}"]
    parts += [text for text in (diag.message_detail, diag.message_hint) if text]
    if diag.context:
        parts.append("context: " + diag.context.splitlines()[0])
    if exc.sqlstate:
        parts.append(f"SQLSTATE {exc.sqlstate}")
    if isinstance(exc, errors.InsufficientPrivilege):
        parts.append("run it as the role that owns the schema, or grant what is missing")
    if conn is not None and conn.closed:
        parts.append("the connection was lost; run 'taskq migrate up' again, it goes on where it stopped")
    return MigrationFailed(re.sub(r"\s+", " ", "; ".join(parts)))

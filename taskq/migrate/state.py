"""Comparing files, manifest and database, for people and at boot; and the SQL for those who apply it by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import psycopg

from taskq.errors import MigrationError, SchemaBehind
from taskq.migrate import records
from taskq.migrate.files import (
    Kind,
    Migration,
    code_version,
    discrepancies,
    load_migrations,
    names,
    read_folder,
    read_manifest,
    strip_comments,
)
from taskq.migrate.indexes import invalid_indexes
from taskq.migrate.runner import SEARCH_PATH
from taskq.settings import check_schema

State = Literal["applied", "pending", "changed", "missing", "unknown"]


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """One migration as files, manifest and database have it."""

    filename: str
    kind: Kind
    state: State
    """``applied``, ``pending``, ``changed`` (since it was frozen or applied), ``missing`` (its file), or ``unknown``
    (not frozen, or applied by code that this code does not know)."""
    applied_at: datetime | None = None
    seconds: float | None = None
    """How long it took."""
    taskq_version: str | None = None
    """The version of taskq that applied it."""


def status(dsn: str, schema: str = "taskq", *, folder: Path | None = None) -> list[MigrationStatus]:
    """The state of each migration, in the order of the names; changes nothing.

    Raises:
        DatabaseUnavailable: no connection.
        MigrationError: the folder or the manifest cannot be read.
    """
    files = {m.filename: m for m in read_folder(folder)}
    frozen = read_manifest(folder)
    with records.connect(dsn) as conn:
        rows = {row.filename: row for row in records.read_rows(conn, check_schema(schema))}
    found: list[MigrationStatus] = []
    for name in sorted({*files, *frozen, *rows}):
        row = rows.get(name)
        digests = {d for d in (frozen.get(name), row.sha256 if row else None) if d}
        state: State
        if name not in files:
            state = "missing" if name in frozen else "unknown"
        elif name not in frozen:
            state = "unknown"
        elif digests != {files[name].sha256}:
            state = "changed"
        else:
            state = "applied" if row else "pending"
        kind: Kind = row.kind if row else files[name].kind if name in files else "post" if "_post_" in name else "pre"
        found.append(
            MigrationStatus(name, kind, state, row.applied_at, row.duration.total_seconds(), row.taskq_version)
            if row
            else MigrationStatus(name, kind, state)
        )
    return found


def verify(dsn: str, schema: str = "taskq", *, folder: Path | None = None) -> list[str]:
    """Every discrepancy between files, manifest and database, each in a line; empty when all is well.

    Pending post files are no discrepancy: they wait until the old code is gone.

    Raises:
        DatabaseUnavailable: no connection.
        MigrationError: the folder or the manifest cannot be read at all.
    """
    found = [str(problem) for problem in discrepancies(folder)]
    migrations = read_folder(folder)
    with records.connect(dsn) as conn:
        rows = {row.filename: row for row in records.read_rows(conn, check_schema(schema))}
        broken = invalid_indexes(conn, schema)
    found += [str(problem) for problem in records.history_problems(migrations, rows)]
    found += [
        f"{m.filename} is pending; run 'taskq migrate up'"
        for m in migrations
        if m.kind == "pre" and m.filename not in rows
    ]
    found += [
        f"the index {schema}.{name} is invalid: it slows writes and serves no query; run 'taskq migrate up' if a file "
        f"that builds it is pending, else: reindex index concurrently {schema}.{name}"
        for name in broken
    ]
    return found


def missing_roles(dsn: str, schema: str = "taskq") -> list[str]:
    """The roles of the schema that the server does not have: whoever migrated could not create them.

    Raises:
        DatabaseUnavailable: no connection.
    """
    wanted = [f"{check_schema(schema)}_{suffix}" for suffix in ("producer", "worker", "operator", "reader")]
    with records.connect(dsn) as conn:
        rows = conn.execute("select rolname from pg_catalog.pg_roles where rolname = any (%s)", (wanted,)).fetchall()
    found = {row[0] for row in rows}
    return [role for role in wanted if role not in found]


def check_compatible(
    target: str | psycopg.Connection[Any], schema: str = "taskq", *, folder: Path | None = None
) -> None:
    """Refuse a database that is behind or ahead of this code. Two short queries; for workers and clients at boot.

    Pre files of a later release are made to work with this code, and may be there already; post files of this release
    may still be pending.

    Args:
        target: a DSN, or a psycopg connection.
        schema: the schema that holds everything of taskq.
        folder: the migrations folder; by default the one that came with taskq.

    Raises:
        SchemaBehind: pre files are missing; the message names them in order, unless that is all, and the command.
        SchemaNewer: post files of a later release are applied, after which this code no longer works.
        MigrationError: the history differs from the files in another way.
    """
    if isinstance(target, str):
        with records.connect(target, application_name="taskq") as conn:
            rows = records.read_rows(conn, check_schema(schema))
    else:
        rows = records.read_rows(target, check_schema(schema))
    check_applied(((row.filename, row.kind, row.sha256) for row in rows), schema, folder=folder)


def check_applied(rows: Iterable[tuple[str, Kind, str]], schema: str = "taskq", *, folder: Path | None = None) -> None:
    """Like ``check_compatible``, for rows (filename, kind, sha256) of ``schema_migrations`` that were read already."""
    migrations = load_migrations(folder)
    last = max((m.filename for m in migrations), default="")
    applied = {name: (kind, digest) for name, kind, digest in rows if kind == "post" or name <= last}
    missing = [m for m in migrations if m.kind == "pre" and m.filename not in applied]
    # Behind first: it is the usual case, and the message that helps most.
    if missing and all(name <= last for name in applied):
        if not applied:
            raise SchemaBehind(f"the schema {schema} has nothing of taskq; run 'taskq migrate up'")
        raise SchemaBehind(
            f"the schema {schema} is behind this code (taskq {code_version()}); missing, in order: {names(missing)}; "
            "run 'taskq migrate up'"
        )
    records.check_history(migrations, applied)


def render_sql(
    schema: str = "taskq",
    *,
    applied: Collection[str] = (),
    include_post: bool = True,
    lock_timeout: float = 2.0,
    folder: Path | None = None,
) -> str:
    """The SQL that ``up`` would run, records included, for those who apply it by hand with psql.

    Args:
        schema: filled in.
        applied: names of the files that are applied already; without any, the runner's tables are made first.
        include_post: with the pending post files.
        lock_timeout: seconds that each transaction may wait for a lock.
        folder: the migrations folder; by default the one that came with taskq.
    """
    schema = check_schema(schema)
    todo = [m for m in load_migrations(folder) if m.filename not in applied and (include_post or m.kind == "pre")]
    if not todo:
        return f"-- Nothing is pending in the schema {schema}.\n"
    settings = f"set local lock_timeout = '{round(lock_timeout * 1000)}ms';\n"
    parts = [
        f"-- Migrations of taskq {code_version()} for the schema {schema}. Run while no 'taskq migrate up' runs, with\n"
        "-- psql -X -v ON_ERROR_STOP=1 -f FILE. A transaction that fails leaves nothing behind: go on from there.\n"
    ]
    if not applied:
        bootstrap = records.compose(records.BOOTSTRAP, schema).as_string(None)
        parts.append(f"begin;\ncreate schema if not exists {schema};\n{bootstrap}commit;\n")
    for m in todo:
        record = _record_by_hand(schema, m)
        body = [_terminated(statement) for statement in m.statements(schema)]
        if m.transactional:
            path = f"set local search_path = {SEARCH_PATH};\n"
            parts.append(f"-- {m.filename}\nbegin;\n{settings}{path}{''.join(body)}{record}\ncommit;\n")
        else:
            head = f"-- {m.filename}: not in a transaction; drop an invalid index that a failed try left, then repeat\n"
            parts.append(f"{head}{''.join(body)}{record}\n")
    parts.append(f"update {schema}.migration_lease set installing = false;\n")
    return "\n".join(parts)


def _terminated(statement: str) -> str:
    return statement + ("\n" if strip_comments(statement).rstrip().endswith(";") else "\n;\n")


def _record_by_hand(schema: str, m: Migration) -> str:
    values = {"filename": m.filename, "version": m.version, "kind": m.kind, "sha256": m.sha256}
    return records.compose(records.RECORD_BY_HAND, schema, **values, taskq=code_version()).as_string(None)


def applied_names(dsn: str, schema: str = "taskq", *, folder: Path | None = None) -> list[str]:
    """The names of the applied files, after checking that they are a part of the files at hand.

    Raises:
        MigrationError: they are not.
        DatabaseUnavailable: no connection.
    """
    with records.connect(dsn) as conn:
        rows = {row.filename: row for row in records.read_rows(conn, check_schema(schema))}
    records.check_history(load_migrations(folder), rows)
    return list(rows)


__all__ = [
    "MigrationError",
    "MigrationStatus",
    "applied_names",
    "check_applied",
    "check_compatible",
    "missing_roles",
    "render_sql",
    "status",
    "verify",
]

"""The server under all systems, and a fresh database for every measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.harness.processes import cpu_of_children
from tests.servers import Server, serve

__all__ = ["SETTINGS", "BenchServer", "Database", "Reading", "bench_server"]

SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "synchronous_commit": "on",
    "fsync": "on",
    "full_page_writes": "on",
    "max_connections": "300",
    "checkpoint_timeout": "30min",
    "autovacuum_naptime": "1min",
    "shared_preload_libraries": "pg_stat_statements",
}
WATCHER = "watcher"
"""The role of the harness, so that its own statements are not counted as a system's."""


@dataclass(frozen=True)
class Reading:
    """Counters of the server at one moment.

    Attributes:
        wal: Bytes of WAL since the cluster was made.
        statements: Statements that the database ran, but those of the harness.
        transactions: Transactions that the database ended, those of the harness included; told with a lag of seconds.
        cpu: Seconds that all processes of the server used.
    """

    wal: int
    statements: int
    transactions: int
    cpu: float

    def since(self, before: Reading) -> Reading:
        """What came in between."""
        return Reading(
            self.wal - before.wal,
            self.statements - before.statements,
            self.transactions - before.transactions,
            self.cpu - before.cpu,
        )


class Database:
    """One database with a connection of the harness.

    Args:
        server: The server.
        name: The database.
        counters: A connection to another database, which has ``pg_stat_statements``.
    """

    def __init__(self, server: Server, name: str, counters: psycopg.Connection[Any]) -> None:
        self.name = name
        self.dsn = server.dsn(name)
        self._postmaster = server.postmaster
        self._counters = counters
        self.watch = psycopg.connect(self.dsn, user=WATCHER, autocommit=True, application_name="harness")

    def value(self, query: str, args: Mapping[str, Any] | None = None) -> Any:
        """The only value of a query."""
        row = self.watch.execute(query.encode(), args).fetchone()
        assert row is not None
        return row[0]

    def read(self) -> Reading:
        """The counters now."""
        self.watch.execute("select pg_stat_clear_snapshot()")
        wal = self.value("select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
        row = self._counters.execute(
            "select coalesce(sum(s.calls), 0)::bigint from pg_stat_statements s"
            " join pg_database d on d.oid = s.dbid"
            f" where d.datname = %s and s.userid <> '{WATCHER}'::regrole",
            (self.name,),
        ).fetchone()
        assert row is not None
        transactions = self.value(
            "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
        )
        return Reading(int(wal), int(row[0]), int(transactions), cpu_of_children(self._postmaster))

    def connections(self) -> int:
        """Connections of the system under measure."""
        return int(
            self.value(
                "select count(*) from pg_stat_activity"
                f" where datname = current_database() and usename <> '{WATCHER}' and backend_type = 'client backend'"
            )
        )


class BenchServer:
    """Makes databases: one template for each system, cloned for each measurement."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._numbers = count(1)
        self._templates: set[str] = set()
        self._admin = psycopg.connect(server.dsn(), autocommit=True)
        self.version = self._admin.info.parameter_status("server_version") or ""
        self._admin.execute(f"create role {WATCHER} login superuser")
        self._admin.execute("create extension pg_stat_statements")

    @contextmanager
    def fresh(self, system: str, setup: Callable[[str], None]) -> Iterator[Database]:
        """A database with the system's schema and nothing else, dropped afterwards.

        Args:
            system: The system.
            setup: Makes the schema in the database of a DSN; called once for each system.
        """
        template = f"template_{system}"
        if template not in self._templates:
            self._create(template, "template0")
            try:
                setup(self.server.dsn(template))
            except BaseException:
                self._drop(template)
                raise
            self._templates.add(template)
        name = f"{system}_{next(self._numbers)}"
        self._create(name, template)
        try:
            database = Database(self.server, name, self._admin)
            try:
                yield database
            finally:
                database.watch.close()
        finally:
            self._drop(name)

    def close(self) -> None:
        """Close the harness's own connection."""
        self._admin.close()

    def _create(self, name: str, template: str) -> None:
        # Copying files ends with a checkpoint, so that every measurement begins right after one.
        statement = sql.SQL("create database {} template {} strategy file_copy").format(
            sql.Identifier(name), sql.Identifier(template)
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                self._admin.execute(statement)
                return
            except psycopg.errors.ObjectInUse:
                # Sessions of a setup that has just ended are still leaving.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _drop(self, name: str) -> None:
        self._admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


@contextmanager
def bench_server() -> Iterator[BenchServer]:
    """A durable PostgreSQL 18 of the benchmark's own on a unix socket, removed afterwards."""
    with serve("18", settings=SETTINGS, durable=True) as server:
        made = BenchServer(server)
        try:
            yield made
        finally:
            made.close()

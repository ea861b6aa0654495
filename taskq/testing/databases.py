"""A database for the length of a test: made, migrated, and dropped whoever is still connected."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import quote
from uuid import uuid4

import anyio.to_thread

from taskq import migrate
from taskq.db.dsn import parse_dsn
from taskq.db.pools import connect_sync
from taskq.db.queries import load
from taskq.embedded import EmbeddedPostgres
from taskq.settings import check_schema

__all__ = ["Database", "database"]


class Database:
    """A database that exists within a ``with`` or ``async with`` block; get it with ``database``.

    Attributes:
        dsn: Its URL, for taskq, psycopg and asyncpg alike; empty outside the block.
    """

    def __init__(self, server: str | None, schema: str) -> None:
        """Not for callers: use ``database``."""
        self.dsn = ""
        self._given = server
        self._schema = check_schema(schema)
        self._admin = ""
        self._name = ""
        self._embedded: EmbeddedPostgres | None = None

    def __enter__(self) -> Self:
        """Make it.

        Raises:
            ConfigurationError: The DSN cannot be read.
            DatabaseUnavailable: The server cannot be reached.
            EmbeddedPostgresError: The embedded server could not be started.
            MigrationError: The schema could not be installed.
        """
        if self._given is None:
            self._embedded = EmbeddedPostgres.start()
            self._admin = self._embedded.dsn
        else:
            self._admin = self._given
        self._name = f"taskq_test_{uuid4().hex[:16]}"
        try:
            params = {**parse_dsn(self._admin).params, "dbname": self._name}
            self._run("create_database")
            self.dsn = "postgresql://?" + "&".join(f"{key}={quote(value, safe='')}" for key, value in params.items())
            migrate.up(self.dsn, schema=self._schema)
        except BaseException:
            with suppress(Exception):
                self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    async def __aenter__(self) -> Self:
        """Make it without blocking the event loop; raises what ``__enter__`` raises."""
        return await anyio.to_thread.run_sync(self.__enter__)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._remove)

    def _remove(self) -> None:
        self.dsn = ""
        try:
            self._run("drop_database")
        finally:
            server, self._embedded = self._embedded, None
            if server is not None:
                server.stop()

    def _run(self, query: str) -> None:
        text = load("testing", self._schema)[query].replace("@database", self._name)
        with connect_sync(self._admin, name="taskq testing") as conn:
            conn.execute(text.encode())


def database(dsn: str | None = None, *, schema: str = "taskq") -> Database:
    """A fresh database with taskq's schema, for the length of a ``with`` or ``async with`` block.

    Args:
        dsn: A database on the server to use, as a role that may create databases; nothing in it is touched. Without
            one the embedded PostgreSQL is started, which needs the extra ``embedded``.
        schema: The name of taskq's schema.

    Returns:
        What gives the block its ``dsn``. As on any installation, the migration makes taskq's four roles on the server
        if they are missing and it may; roles are the server's and stay.
    """
    return Database(dsn, schema)

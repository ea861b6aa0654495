"""Databases that tests share, a hundred times faster than one for each test.

``conn`` is a transaction that is rolled back after the test; ``races_dsn`` is emptied before it. Tests that change the
schema for good, or make their own mess, use ``dsn``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from servers import Server

SEEDED = ("installation", "leader", "schema_migrations", "migration_lease")


def clone(server: Server, template: str, name: str) -> Iterator[str]:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(
            sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
        )
    yield server.dsn(name)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@pytest.fixture(scope="session")
def shared_dsn(pg_server: Server, template: str) -> str:
    """The template itself: nothing is ever committed in it."""
    return pg_server.dsn(template)


@pytest.fixture(scope="session")
def cloned_for_races(pg_server: Server, template: str) -> Iterator[str]:
    yield from clone(pg_server, template, f"{template}_races")


@pytest.fixture
def races_dsn(cloned_for_races: str) -> str:
    """A migrated database without any job, worker or key."""
    with psycopg.connect(cloned_for_races) as connection:
        connection.execute("set session_replication_role = replica")
        tables = connection.execute(
            "select c.relname from pg_class c where c.relnamespace = 'taskq'::regnamespace and c.relkind in ('r', 'p')"
            " and not c.relispartition and c.relname <> all(%s)",
            (list(SEEDED),),
        ).fetchall()
        for (name,) in tables:
            connection.execute(sql.SQL("delete from taskq.{}").format(sql.Identifier(name)))
    return cloned_for_races


@pytest.fixture
def conn(shared_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection in an open transaction, rolled back after the test."""
    with psycopg.connect(shared_dsn) as connection:
        yield connection
        connection.rollback()

"""How many programs are drawn, and the database that they share.

``make test`` draws the same few each time. ``make property`` sets ``TASKQ_PROPERTY_EXAMPLES`` and draws as many new
ones; what fails is kept in ``.hypothesis`` and tried first the next time, and the output says how to repeat it.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from database import prepare
from psycopg import sql
from servers import Server


@pytest.fixture(scope="session")
def model_dsn(pg_server: Server, template: str) -> Iterator[str]:
    """A migrated database with a stopped clock and few partitions; each program empties it first."""
    name = f"{template}_model"
    with psycopg.connect(pg_server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("create database {} template {}").format(*map(sql.Identifier, (name, template))))
    with psycopg.connect(pg_server.dsn(name), autocommit=True) as connection:
        prepare(connection)
    yield pg_server.dsn(name)
    with psycopg.connect(pg_server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

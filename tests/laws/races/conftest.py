"""Races commit, in a database that is emptied before each and checked after it."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from sql import Conn, violations


@pytest.fixture
def dsn(races_dsn: str) -> str:
    """An emptied database that the races share."""
    return races_dsn


@pytest.fixture
def conn(dsn: str) -> Iterator[Conn]:
    # What must skip a locked row would otherwise wait for the test itself, for ever.
    with psycopg.connect(dsn, autocommit=True, options="-c lock_timeout=5s") as connection:
        yield connection
        assert violations(connection) == []

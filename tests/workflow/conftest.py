"""Applications: one without a database, for wirings, and one on the test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from plan_kit import NOWHERE
from worker_kit import Gates

from taskq import TaskQ


@pytest.fixture
def nowhere() -> TaskQ:
    return TaskQ(NOWHERE)


@pytest.fixture
async def app(dsn: str, anyio_backend: str) -> AsyncIterator[TaskQ]:
    async with TaskQ(dsn) as made:
        yield made


@pytest.fixture
def gates() -> Gates:
    return Gates()

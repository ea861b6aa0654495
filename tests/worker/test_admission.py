"""A worker that starts while the database cannot take it: it waits, says so seldom, and can be told to stop."""

from __future__ import annotations

import asyncio

import pytest
from worker_kit import Events

from taskq.errors import DatabaseBusy, DatabaseUnavailable
from taskq.worker import admission
from taskq.worker.admission import StoppedAtBoot, until_admitted

pytestmark = pytest.mark.anyio
DSN = "postgresql://h/db"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(admission, "LONGEST_WAIT", 0.002)


async def test_it_waits_for_what_passes_and_says_so_seldom(events: Events) -> None:
    asked = 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        if asked < 20:
            raise DatabaseBusy("it starts up\nand has more to say")
        return asked

    assert await until_admitted(ask, asyncio.Event(), DSN) == 20
    waits = events.of("worker.waits")
    assert [w["failures"] for w in waits] == [1, 2, 3, 10]
    assert {w["error"] for w in waits} == {"it starts up"}


async def test_what_does_not_pass_is_raised() -> None:
    async def ask() -> int:
        raise DatabaseUnavailable("no such database")

    with pytest.raises(DatabaseUnavailable):
        await until_admitted(ask, asyncio.Event(), DSN)


@pytest.mark.parametrize("when", ["before", "while it asks", "while it waits"])
async def test_it_can_be_told_to_stop(when: str) -> None:
    stop = asyncio.Event()

    async def ask() -> int:
        stop.set()
        if when == "while it waits":
            raise DatabaseBusy("it starts up")
        return 1

    if when == "before":
        stop.set()
    with pytest.raises(StoppedAtBoot):
        await until_admitted(ask, stop, DSN)

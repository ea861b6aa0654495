"""How steps gather for common statements, and what becomes of those that wait when one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from helpers import aeventually

from taskq.errors import DatabaseUnavailable
from taskq.worker.safe_steps import AT_ONCE, BATCH, BATCH_CHARACTERS, Entry, Recorder

pytestmark = pytest.mark.anyio


def entry(n: int, text: str = "1") -> Entry:
    return Entry("w", f"j{n}", 1, "s", 1, text)


class Database:
    """Answers when it is told to, and keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[str], bool]] = []
        self.gate = asyncio.Event()
        self.refused: set[str] = set()
        self.busy: set[str] = set()
        self.gone = False

    async def send(self, entries: Sequence[Entry], wait: bool) -> Sequence[str]:
        jobs = [e.job for e in entries]
        self.sent.append((jobs, wait))
        await self.gate.wait()
        if self.gone:
            raise DatabaseUnavailable("gone")
        if self.refused & set(jobs):
            raise ValueError("one of them cannot be stored")
        return ["busy" if job in self.busy and not wait else "recorded" for job in jobs]


async def waiting(recorder: Recorder, *entries: Entry) -> list[asyncio.Task[str]]:
    tasks = [asyncio.create_task(recorder.record(e)) for e in entries]
    await asyncio.sleep(0)
    return tasks


async def test_what_comes_while_statements_are_on_their_way_goes_with_the_next() -> None:
    database = Database()
    recorder = Recorder(database.send)
    tasks: list[asyncio.Task[str]] = []
    for n in range(AT_ONCE):
        tasks += await waiting(recorder, entry(n))
        await aeventually(lambda n=n: len(database.sent) == n + 1)
    tasks += await waiting(recorder, *(entry(n) for n in range(AT_ONCE, AT_ONCE + BATCH + 5)))
    database.gate.set()
    assert set(await asyncio.gather(*tasks)) == {"recorded"}
    assert [len(jobs) for jobs, _ in database.sent] == [1] * AT_ONCE + [BATCH, 5]
    assert all(not wait for _, wait in database.sent)


async def test_a_batch_has_a_bound_on_its_text_but_takes_one_of_any_size() -> None:
    database = Database()
    database.gate.set()
    recorder = Recorder(database.send)
    tasks = await waiting(recorder, *(entry(n, "x" * (BATCH_CHARACTERS // 2 + 1)) for n in range(3)))
    tasks += await waiting(recorder, entry(9, "x" * (2 * BATCH_CHARACTERS)))
    assert await asyncio.gather(*tasks) == ["recorded"] * 4
    assert [len(jobs) for jobs, _ in database.sent] == [1] * 4


async def test_one_that_cannot_be_stored_fails_alone_and_one_that_is_busy_waits_alone() -> None:
    database = Database()
    database.refused, database.busy = {"j1"}, {"j3"}
    recorder = Recorder(database.send)
    first = await waiting(recorder, *(entry(n) for n in range(10, 10 + AT_ONCE)))
    tasks = await waiting(recorder, entry(0), entry(1), entry(2))
    database.gate.set()
    results = await asyncio.gather(*first, *tasks, return_exceptions=True)
    assert [str(r) for r in results[AT_ONCE:]] == ["recorded", "one of them cannot be stored", "recorded"]
    assert await asyncio.gather(*await waiting(recorder, entry(3), entry(4))) == ["recorded"] * 2
    assert (["j3"], True) in database.sent
    assert (["j4"], True) not in database.sent


async def test_without_an_answer_all_of_a_batch_are_told_so_at_once() -> None:
    database = Database()
    database.gone = True
    recorder = Recorder(database.send)
    first = await waiting(recorder, entry(0), entry(1))
    tasks = await waiting(recorder, entry(7), entry(8))
    tasks[0].cancel()
    database.gate.set()
    results = await asyncio.gather(*first, *tasks, return_exceptions=True)
    kinds = [type(r) for r in results]
    assert kinds == [DatabaseUnavailable] * 2 + [asyncio.CancelledError, DatabaseUnavailable]
    assert [jobs for jobs, _ in database.sent] == [["j0", "j1"], ["j7", "j8"]]


async def test_who_has_gone_away_is_not_told() -> None:
    database = Database()
    recorder = Recorder(database.send)
    [task] = await waiting(recorder, entry(0))
    await aeventually(lambda: len(database.sent) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    database.gate.set()
    assert await asyncio.gather(*await waiting(recorder, entry(1))) == ["recorded"]


async def test_closing_cancels_who_waits_for_an_answer() -> None:
    database = Database()
    recorder = Recorder(database.send)
    [task] = await waiting(recorder, entry(0))
    await aeventually(lambda: len(database.sent) == 1)
    recorder.close()
    with pytest.raises(asyncio.CancelledError):
        await task

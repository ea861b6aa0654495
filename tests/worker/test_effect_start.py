"""Asking for effect starts: what an answer that never comes, or comes too late, is taken for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worker_kit import claim_of

from taskq.db.queries import load
from taskq.errors import DatabaseUnavailable, EffectStartNotProven
from taskq.worker.connection import Connection
from taskq.worker.effect_start import EffectStarts

pytestmark = pytest.mark.anyio


class Asked:
    """A connection to the test's database, on which something happens before each answer."""

    def __init__(self, dsn: str, monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
        self.holds = True
        self.conn = Connection(dsn, "test")
        fetch = Connection.fetch

        async def fetching(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
            rows = await fetch(conn, query, *args, **options)
            before()
            return rows

        monkeypatch.setattr(Connection, "fetch", fetching)
        query = load("worker", "taskq")["start_effects"]
        self.starts = EffectStarts(query, self.conn, lambda: self.holds, lambda: None)

    async def close(self) -> None:
        await self.starts.close()
        await self.conn.close()


async def test_what_was_never_sent_when_the_lease_ends_has_not_started(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(dsn, monkeypatch, lambda: None)
    await asked.starts.close()
    asked.holds = False
    start, other = asked.starts.ask(claim_of("t")), asked.starts.ask(claim_of("t"))
    assert (await start.answer, await other.answer) == ("no_lease", "no_lease")
    assert not start.sent
    await asked.close()


async def test_what_was_sent_and_has_no_answer_when_the_lease_ends_is_not_known(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose() -> None:
        asked.holds = False
        raise DatabaseUnavailable("the answer is lost")

    asked = Asked(dsn, monkeypatch, lose)
    start = asked.starts.ask(claim_of("t"))
    with pytest.raises(EffectStartNotProven, match="until the lease ended"):
        await start.answer
    assert start.sent
    await asked.close()


@pytest.mark.parametrize("answer", ["fenced_out", "nothing"])
async def test_an_answer_that_nobody_waits_for_any_more_is_dropped(
    dsn: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    asked = Asked(dsn, monkeypatch, lambda: None)
    start = asked.starts.ask(claim_of("t"))
    if answer == "nothing":
        settle = asked.starts._settle
        monkeypatch.setattr(asked.starts, "_settle", lambda start, rows: settle(start, []))
    while not start.sent:
        await asked.conn.ensure_open()
    start.answer.cancel()
    assert asked.starts._asking is not None
    await asked.starts._asking
    assert start.started_at is None
    assert start.answer.cancelled()
    await asked.close()

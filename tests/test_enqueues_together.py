"""Enqueues of one event loop that come while others are under way: one statement, and to each caller its own answer.

The first ones are held up by a lock on the table, so that what comes after them has to wait.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from client_kit import Shop
from helpers import aeventually
from servers import serve

from taskq import Job, migrate
from taskq.client import aio
from taskq.client.aio import AT_ONCE
from taskq.client.requests import Batch
from taskq.errors import DatabaseRefusal, DatabaseUnavailable

pytestmark = pytest.mark.anyio
Conn = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
async def shop(dsn: str, anyio_backend: str) -> AsyncIterator[Shop]:
    made = Shop(dsn)
    # Its connections are open, and its policies stored.
    await asyncio.gather(*(made.double.enqueue(n) for n in range(AT_ONCE + 2)), made.note.enqueue("first"))
    yield made
    await made.app.close()


@contextmanager
def locked(dsn: str) -> Iterator[Conn]:
    """Nothing is enqueued while the block lasts."""
    with psycopg.connect(dsn) as conn:
        conn.execute("lock table taskq.jobs in access exclusive mode")
        yield conn


def all_held_up(conn: Conn) -> list[int]:
    """The sessions that wait for the lock."""
    conn.execute("select pg_stat_clear_snapshot()")
    found = "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    return [pid for (pid,) in conn.execute(found)]


async def held_up(conn: Conn, at_least: int) -> list[int]:
    """The sessions that wait for the lock, once there are so many."""
    return await aeventually(lambda: found if len(found := all_held_up(conn)) >= at_least else [])


async def first_ones(shop: Shop, conn: Conn) -> list[asyncio.Task[Job[int]]]:
    """So many that the next have to wait."""
    tasks = []
    for n in range(AT_ONCE):
        tasks.append(asyncio.create_task(shop.double.enqueue(n)))
        await held_up(conn, n + 1)
    return tasks


async def waiting(shop: Shop, n: int) -> None:
    """Return once so many wait to be sent."""
    client = shop.app._async_client
    assert client is not None
    [shared] = client._shared.values()
    await aeventually(lambda: len(shared.waiting) == n, interval=0)


def rows_of(dsn: str, jobs: list[Job[Any]]) -> list[tuple[str, dict[str, Any], str]]:
    """Task, arguments and the transaction of each job, in the order given."""
    with psycopg.connect(dsn) as conn:
        found = {
            row[0]: (row[1].rpartition(".")[2], row[2], row[3])
            for row in conn.execute(
                "select id, task, payload, xmin::text from taskq.jobs where id = any(%s)", [[job.id for job in jobs]]
            )
        }
    return [found[job.id] for job in jobs]


async def test_those_that_come_meanwhile_go_in_one_transaction_and_each_is_answered_with_its_own_job(
    shop: Shop, dsn: str
) -> None:
    with locked(dsn) as conn:
        first = await first_ones(shop, conn)
        doubles = [asyncio.create_task(shop.double.enqueue(n)) for n in range(20)]
        notes = [asyncio.create_task(shop.note.enqueue(f"n{n}")) for n in range(20)]
        await held_up(conn, AT_ONCE)
    jobs: list[Job[Any]] = [*await asyncio.gather(*doubles), *await asyncio.gather(*notes)]
    await asyncio.gather(*first)
    stored = rows_of(dsn, jobs)
    assert [row[1]["n"] for row in stored[:20]] == list(range(20))
    assert [row[1]["text"] for row in stored[20:]] == [f"n{n}" for n in range(20)]
    assert [row[0] for row in stored] == ["double"] * 20 + ["note"] * 20
    assert len({row[2] for row in stored}) == 1
    assert all(job.inserted for job in jobs)


async def test_what_the_server_refuses_is_told_to_its_own_caller_and_the_others_are_enqueued(
    shop: Shop, dsn: str
) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("update taskq.installation set max_payload_bytes = 200")
    with locked(dsn) as conn:
        first = await first_ones(shop, conn)
        texts = ["x" * (500 if n in (3, 11) else 5) for n in range(20)]
        tasks = [asyncio.create_task(shop.note.enqueue(text)) for text in texts]
        await held_up(conn, AT_ONCE)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*first)
    refused = {n for n, answer in enumerate(answers) if isinstance(answer, DatabaseRefusal)}
    assert refused == {3, 11}
    assert "the payload of job 1 has" in str(answers[3])
    assert len(rows_of(dsn, [answer for answer in answers if isinstance(answer, Job)])) == 18


async def test_what_would_refuse_each_alike_is_told_to_all_at_once(
    dsn: str, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "do $$ begin execute format('alter database %I set lock_timeout = 2000', current_database()); end $$"
        )
    shop = Shop(dsn)
    await shop.note.enqueue("first")
    client = shop.app._async_client
    assert client is not None
    sent: list[int] = []
    send = client._enqueue

    async def counted(batch: Batch) -> list[tuple[UUID, bool]]:
        sent.append(len(batch.payload))
        return await send(batch)

    monkeypatch.setattr(client, "_enqueue", counted)
    with locked(dsn):
        answers = await asyncio.gather(*(shop.note.enqueue(f"{n}") for n in range(10)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [asyncpg.LockNotAvailableError] * 10
    assert sent == [10]
    await shop.app.close()


async def test_one_whose_caller_has_gone_before_it_was_sent_is_not_enqueued(shop: Shop, dsn: str) -> None:
    with locked(dsn) as conn:
        first = await first_ones(shop, conn)
        gone = [asyncio.create_task(shop.note.enqueue(f"gone {n}")) for n in range(5)]
        stays = [asyncio.create_task(shop.note.enqueue(f"stays {n}")) for n in range(5)]
        await waiting(shop, 10)
        for task in gone:
            task.cancel()
        answers = await asyncio.gather(*gone, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers)
    jobs: list[Job[Any]] = [*await asyncio.gather(*stays), *await asyncio.gather(*first)]
    assert len(rows_of(dsn, jobs)) == 5 + AT_ONCE
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select 1 from taskq.all_jobs where payload ->> 'text' like 'gone%'").fetchall() == []


async def test_a_statement_that_all_its_callers_have_left_is_cancelled_and_not_before(shop: Shop, dsn: str) -> None:
    with locked(dsn) as conn:
        first = await first_ones(shop, conn)
        left = [asyncio.create_task(shop.note.enqueue(f"left {n}")) for n in range(5)]
        await held_up(conn, AT_ONCE + 1)
        others = [asyncio.create_task(shop.note.enqueue(f"others {n}")) for n in range(5)]
        await held_up(conn, AT_ONCE + 2)
        for task in [*left, *others[:-1]]:
            task.cancel()
        await aeventually(lambda: len(all_held_up(conn)) == AT_ONCE + 1)
    jobs: list[Job[Any]] = [await others[-1], *await asyncio.gather(*first)]
    assert len(rows_of(dsn, jobs)) == 1 + AT_ONCE
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select 1 from taskq.all_jobs where payload ->> 'text' like 'left%'").fetchall() == []


async def test_where_the_connection_is_lost_each_caller_is_told_that_the_outcome_is_not_known(
    shop: Shop, dsn: str
) -> None:
    with locked(dsn) as conn:
        first = await first_ones(shop, conn)
        tasks = [asyncio.create_task(shop.note.enqueue(f"lost {n}")) for n in range(10)]
        # The patience of those that wait is over: they were sent, too.
        for pid in await held_up(conn, AT_ONCE + 1):
            conn.execute("select pg_terminate_backend(%s)", [pid])
        answers = await asyncio.gather(*first, *tasks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [DatabaseUnavailable] * (AT_ONCE + 10)
    job = await shop.note.enqueue("after")
    assert len(rows_of(dsn, [job])) == 1


async def test_close_waits_for_all_that_were_asked_for_before(
    shop: Shop, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio, "MOST_JOBS", 1)
    monkeypatch.setattr(aio, "PATIENCE", 60)
    with locked(dsn) as conn:
        first = await first_ones(shop, conn)
        tasks = [asyncio.create_task(shop.note.enqueue(f"{n}")) for n in range(10)]
        await waiting(shop, 10)
        closing = asyncio.create_task(shop.app.close())
        await asyncio.sleep(0)
    await closing
    with psycopg.connect(dsn, autocommit=True) as conn:
        left = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        await aeventually(lambda: conn.execute(left).fetchall() == [(0,)])
    jobs: list[Job[Any]] = [*await asyncio.gather(*first), *await asyncio.gather(*tasks)]
    assert len(rows_of(dsn, jobs)) == AT_ONCE + 10


async def test_statements_that_hang_hold_up_others_for_a_moment_only() -> None:
    with serve() as server:
        migrate.up(server.dsn())
        shop = Shop(server.dsn())
        await asyncio.gather(*(shop.double.enqueue(n) for n in range(AT_ONCE + 2)))
        stopped: list[int] = []
        try:
            with locked(server.dsn()) as conn:
                first = await first_ones(shop, conn)
                for pid in await held_up(conn, AT_ONCE):
                    os.kill(pid, signal.SIGSTOP)
                    stopped.append(pid)
            jobs: list[Job[Any]] = [
                *await asyncio.wait_for(asyncio.gather(*(shop.double.enqueue(n) for n in range(5))), 30)
            ]
            assert not any(task.done() for task in first)
        finally:
            for pid in stopped:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        assert len(rows_of(server.dsn(), [*jobs, *await asyncio.gather(*first)])) == 5 + AT_ONCE
        await shop.app.close()


def test_each_event_loop_sends_its_own(dsn: str) -> None:
    shop = Shop(dsn)
    done: list[Job[int]] = []

    async def many() -> None:
        done.extend(await asyncio.gather(*(shop.double.enqueue(n) for n in range(50))))
        await shop.app.close()

    threads = [threading.Thread(target=asyncio.run, args=(many(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(rows_of(dsn, [*done])) == 150

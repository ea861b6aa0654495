"""Keys, raced: callers on connections of their own ask for one key in open transactions, and end them in each order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import permutations
from typing import Any

import anyio
import asyncpg
import psycopg
import pytest
from client_kit import Shop, stored
from helpers import aeventually

from taskq import IdempotencyConflict, Job, UniqueKeyHeld

pytestmark = pytest.mark.anyio


class Racer:
    """A caller with a connection and an open transaction of its own."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self.pid = connection.get_server_pid()
        self.transaction = connection.transaction()
        self.answer: asyncio.Task[Job[Any]]

    async def ask(self, task: Any, n: int, **options: Any) -> None:
        await self.transaction.start()
        self.answer = asyncio.create_task(task.using(connection=self.connection, **options).enqueue(n))

    async def end(self, how: str) -> None:
        await (self.transaction.commit() if how == "commit" else self.transaction.rollback())


@pytest.fixture
async def shop(dsn: str, anyio_backend: str) -> AsyncIterator[Shop]:
    made = Shop(dsn)
    yield made
    await made.app.close()


@pytest.fixture
async def racers(dsn: str, anyio_backend: str) -> AsyncIterator[list[Racer]]:
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(4):
            connection = await asyncpg.connect(dsn)
            stack.push_async_callback(connection.close, timeout=10)
            made.append(Racer(connection))
        yield made


def waiting(conn: psycopg.Connection) -> set[int]:
    rows = conn.execute("select pid from pg_stat_activity where wait_event_type = 'Lock'").fetchall()
    return {pid for (pid,) in rows}


async def until_waiting(conn: psycopg.Connection, racers: list[Racer]) -> None:
    await aeventually(lambda: waiting(conn) >= {racer.pid for racer in racers}, 20)


async def first_answered(racers: list[Racer]) -> Racer:
    """The one whose answer came next: it holds the key now, or was told who does."""
    async with asyncio.timeout(20):
        await asyncio.wait([racer.answer for racer in racers], return_when=asyncio.FIRST_COMPLETED)
    return next(racer for racer in racers if racer.answer.done())


@pytest.mark.parametrize("kind", ["unique_key", "idempotency_key"])
@pytest.mark.parametrize("rolled_back", [0, 1, 3])
async def test_of_many_open_transactions_one_gets_the_key_and_the_rest_its_job(
    shop: Shop, conn: psycopg.Connection, racers: list[Racer], kind: str, rolled_back: int
) -> None:
    for racer in racers:
        await racer.ask(shop.double, 1, **{kind: "k"})
    left = list(racers)
    for _ in range(rolled_back):
        holder = await first_answered(left)
        left.remove(holder)
        # All others wait until the holder has ended: nobody has a second job by then.
        await until_waiting(conn, left)
        assert holder.answer.result().inserted
        await holder.end("rollback")
        assert stored(conn) == 0
    winner = await first_answered(left)
    left.remove(winner)
    await until_waiting(conn, left)
    await winner.end("commit")
    answers = [await asyncio.wait_for(racer.answer, 20) for racer in left]
    for racer in left:
        await racer.end("commit")
    assert winner.answer.result().inserted
    assert [(job.id, job.inserted) for job in answers] == [(winner.answer.result().id, False)] * len(left)
    assert stored(conn) == 1


@pytest.mark.parametrize("order", list(permutations(("commit", "rollback"))))
async def test_who_asked_for_a_refusal_gets_it_only_if_the_first_commits(
    shop: Shop, conn: psycopg.Connection, racers: list[Racer], order: tuple[str, str]
) -> None:
    first, second = racers[:2]
    await first.ask(shop.double, 1, unique_key="k", on_conflict="raise")
    held = await asyncio.wait_for(first.answer, 20)
    await second.ask(shop.double, 2, unique_key="k", on_conflict="raise")
    await until_waiting(conn, [second])
    await first.end(order[0])
    if order[0] == "commit":
        with pytest.raises(UniqueKeyHeld, match=str(held.id)) as caught:
            await asyncio.wait_for(second.answer, 20)
        assert caught.value.job_id == held.id
    else:
        assert (await asyncio.wait_for(second.answer, 20)).inserted
    await second.end("rollback" if order[0] == "commit" else "commit")
    assert stored(conn) == 1


@pytest.mark.parametrize("first_ends", ["commit", "rollback"])
async def test_an_idempotency_key_raced_by_another_request_is_a_conflict_that_names_the_first(
    shop: Shop, conn: psycopg.Connection, racers: list[Racer], first_ends: str
) -> None:
    first, other, same = racers[:3]
    await first.ask(shop.double, 1, idempotency_key="k")
    job = await asyncio.wait_for(first.answer, 20)
    await other.ask(shop.double, 2, idempotency_key="k")
    await until_waiting(conn, [other])
    await first.end(first_ends)
    if first_ends == "commit":
        with pytest.raises(IdempotencyConflict, match="'k' of scope double") as caught:
            await asyncio.wait_for(other.answer, 20)
        assert caught.value.job_id == job.id
        assert caught.value.detail["key"] == "k"
        await other.end("rollback")
    else:
        assert (await asyncio.wait_for(other.answer, 20)).inserted
        await other.end("commit")
    # Whoever comes later is judged by the request that stands.
    await same.ask(shop.double, 1 if first_ends == "commit" else 2, idempotency_key="k")
    assert not (await asyncio.wait_for(same.answer, 20)).inserted
    await same.end("commit")
    assert stored(conn) == 1


async def test_keys_are_apart_by_scope_and_by_kind(shop: Shop, conn: psycopg.Connection, racers: list[Racer]) -> None:
    """None of these waits for another: a wait would be for ever, since all transactions stay open."""
    asked = ({"unique_key": "k"}, {"unique_key": "k", "unique_scope": "s"}, {"idempotency_key": "k"},
             {"idempotency_key": "k", "idempotency_scope": "s"})  # fmt: skip
    for racer, options in zip(racers, asked, strict=True):
        await racer.ask(shop.double, 1, **options)
    jobs = [await asyncio.wait_for(racer.answer, 20) for racer in racers]
    for racer in racers:
        await racer.end("commit")
    assert all(job.inserted for job in jobs)
    assert len(set(jobs)) == 4
    # Another task's key is another key.
    assert (await shop.anything.using(unique_key="k").enqueue(1)).inserted


async def test_a_batch_waits_for_the_keys_of_an_open_transaction_and_answers_in_its_order(
    shop: Shop, dsn: str, conn: psycopg.Connection, racers: list[Racer]
) -> None:
    keys = ["k1", "k2", "k3", "k1", None, None]
    for how, mode in (("commit", None), ("rollback", None), ("commit", "raise"), ("rollback", "raise")):
        before = stored(conn)
        tag = f"{how}{mode}"
        holder = Racer(racers[0].connection)
        await holder.ask(shop.double, 0, unique_key=f"{tag}k2")
        taken = await asyncio.wait_for(holder.answer, 20)
        requests = [shop.double.using(unique_key=key and tag + key).job(n) for n, key in enumerate(keys)]
        caller = Racer(racers[1].connection)
        await caller.transaction.start()
        batch = asyncio.create_task(
            shop.app.enqueue_many(requests, connection=caller.connection, on_conflict=mode)  # type: ignore[arg-type]
        )
        await until_waiting(conn, [caller])
        await holder.end(how)
        if how == "commit" and mode == "raise":
            with pytest.raises(UniqueKeyHeld) as caught:
                await asyncio.wait_for(batch, 20)
            assert caught.value.job_id == taken.id
            await caller.end("rollback")
            assert stored(conn) == before + 1
            continue
        jobs = await asyncio.wait_for(batch, 20)
        await caller.end("commit")
        assert [job.inserted for job in jobs] == [True, how == "rollback", True, False, True, True]
        assert jobs[3] == jobs[0]
        assert (jobs[1] == taken) is (how == "commit")
        assert stored(conn) == before + 5 + (how == "rollback") * 0
        rows = dict(conn.execute("select id, (payload->>'n')::int from taskq.jobs").fetchall())
        assert [rows[job.id] for job in jobs] == [0, 0 if how == "commit" else 1, 2, 0, 4, 5]


@pytest.mark.parametrize("kind", ["unique_key", "idempotency_key"])
async def test_bulk_calls_with_keys_in_opposite_orders_do_not_deadlock(
    shop: Shop, conn: psycopg.Connection, kind: str
) -> None:
    """Many rounds at once: in their own order, two of these would sooner or later hold each other's keys."""
    options = [{kind: f"k{n:03}"} for n in range(60)]
    for _ in range(4):
        calls = []
        for direction in (1, -1, 1, -1):
            requests = [shop.double.using(**one).job(7) for one in options[::direction]]  # type: ignore[arg-type]
            calls.append((direction, requests))
        with anyio.fail_after(60):
            answers = await asyncio.gather(*(shop.app.enqueue_many(requests) for _, requests in calls))
        ids = [[job.id for job in jobs][::direction] for (direction, _), jobs in zip(calls, answers, strict=True)]
        assert ids[0] == ids[1] == ids[2] == ids[3]
        assert sum(job.inserted for jobs in answers for job in jobs) in (0, 60)
        assert stored(conn) == 60

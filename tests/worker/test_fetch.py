"""What is claimed, when, and in which order."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import Events, Gates, RunWorker, claim_of, status_of, until_status

from taskq import TaskQ
from taskq.worker.fetch import BEGINNING, LaneBook

pytestmark = pytest.mark.anyio


# Marks alone ----------------------------------------------------------------------------------------------------------


def mark_of(book: LaneBook, queue: str = "default", priority: int = 5) -> tuple[datetime, UUID]:
    names, priorities, at, ids = book.lanes(rescan=False)
    i = next(i for i in range(len(names)) if (names[i], priorities[i]) == (queue, priority))
    return at[i], ids[i]


def test_a_mark_moves_on_with_claims_and_stays_behind_the_clock() -> None:
    now = datetime.now(UTC)
    old, older, fresh = (claim_of("t", run_at=now - timedelta(seconds=s), claimed_at=now) for s in (10, 20, 0.1))
    book = LaneBook(["default"])
    assert mark_of(book) == BEGINNING
    book.claimed([old, older], rescan=False)
    assert mark_of(book) == (old.run_at, old.job_id)
    book.claimed([fresh, older], rescan=False)
    assert mark_of(book) == (old.run_at, old.job_id)
    assert mark_of(book, priority=6) == BEGINNING


def test_a_rescan_starts_at_the_beginning_and_moves_the_mark_back() -> None:
    now = datetime.now(UTC)
    old, older = (claim_of("t", run_at=now - timedelta(seconds=s), claimed_at=now) for s in (10, 20))
    book = LaneBook(["default"])
    book.claimed([old], rescan=False)
    assert set(book.lanes(rescan=True)[2]) == {BEGINNING[0]}
    book.claimed([older], rescan=True)
    assert mark_of(book) == (older.run_at, older.job_id)


def test_a_job_that_waited_for_the_slot_of_its_cohort_moves_no_mark() -> None:
    now = datetime.now(UTC)
    old, older = (claim_of("t", run_at=now - timedelta(seconds=s), claimed_at=now) for s in (10, 20))
    older.cohort = "a"
    book = LaneBook(["default"])
    book.claimed([older], rescan=False)
    assert mark_of(book) == BEGINNING
    book.claimed([old], rescan=False)
    book.claimed([older], rescan=True)
    assert mark_of(book) == (old.run_at, old.job_id)


def test_rescans_are_a_second_apart_and_take_two_percent_at_most() -> None:
    book = LaneBook(["default"])
    assert book.rescan_is_due(0.0)
    book.scanned(10.0, 0.001, rescan=True)
    assert not book.rescan_is_due(10.9)
    assert book.rescan_is_due(11.0)
    # One that took long is forgiven; two in a row mean that the table is like that.
    book.scanned(20.0, 0.127, rescan=True)
    assert book.rescan_is_due(21.0)
    book.scanned(21.0, 0.127, rescan=True)
    assert not book.rescan_is_due(27.0)
    assert book.rescan_is_due(27.5)
    # Where every claim takes that long, the rescan is not to blame.
    for _ in range(50):
        book.scanned(30.0, 0.127, rescan=False)
    for now in (31.0, 32.0):
        book.scanned(now, 0.127, rescan=True)
        assert book.rescan_is_due(now + 1)


def test_lanes_go_by_priority_and_queues_take_turns() -> None:
    book = LaneBook(["a", "b"])
    first, second = book.lanes(rescan=False), book.lanes(rescan=False)
    assert first[1] == sorted(first[1], reverse=True)
    assert len(first[0]) == 20
    assert {first[0][0], second[0][0]} == {"a", "b"}


# With a worker --------------------------------------------------------------------------------------------------------


async def test_a_job_behind_the_mark_is_found_within_about_a_second(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str
) -> None:
    @app.task
    async def nothing() -> float:
        return time.monotonic()

    late = await asyncpg.connect(dsn)
    async with run_worker(listen=False):
        early = late.transaction()
        await early.start()
        # Enqueued now, committed once the mark has passed it.
        slow = await nothing.using(connection=late).enqueue()
        for _ in range(3):
            await (await nothing.enqueue()).result(timeout=5)
            await asyncio.sleep(0.3)
        await early.commit()
        committed = time.monotonic()
        assert await slow.result(timeout=5) - committed < 1.5
        back_dated = await nothing.using(run_at=datetime(2020, 1, 1, tzinfo=UTC)).enqueue()
        enqueued = time.monotonic()
        assert await back_dated.result(timeout=5) - enqueued < 1.5
    await late.close()


async def test_higher_priorities_are_claimed_first_within_each_queue(app: TaskQ, run_worker: RunWorker) -> None:
    ran: list[tuple[str, int]] = []

    @app.task(queue="one")
    async def note(queue: str, priority: int) -> None:
        ran.append((queue, priority))

    @app.task(queue="two", name="other")
    async def other() -> None: ...

    jobs = [
        await note.using(queue=queue, priority=priority).enqueue(queue, priority)
        for priority in (0, 9, 5, 7)
        for queue in ("one", "two")
    ]
    async with run_worker(concurrency=1):
        for job in jobs:
            await job.result(timeout=10)
    assert [p for _, p in ran] == [9, 9, 7, 7, 5, 5, 0, 0]


async def test_an_unknown_task_is_left_alone_and_reported_once(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events, dsn: str
) -> None:
    @app.task
    async def known() -> int:
        return 1

    newer = TaskQ(dsn)

    @newer.task(max_attempts=2)
    async def only_new() -> str:
        return "new"

    async with run_worker() as old:
        jobs = [await only_new.enqueue() for _ in range(20)]
        assert await (await known.enqueue()).result(timeout=5) == 1
        async with run_worker(of=newer):
            for job in jobs:
                assert await job.result(timeout=10) == "new"
                assert (await job.info()).attempt == 0
                assert (await job.info()).claim_epoch == 1
        last = await only_new.enqueue()
        await aeventually(lambda: events.of("task.unknown"))
        # Two more looks say nothing more.
        for _ in range(2):
            await old.parts.side.fetch("select 1")
        assert await (await known.enqueue()).result(timeout=5) == 1
        assert await status_of(aconn, last.id) == "pending"
        assert [e["task"] for e in events.of("task.unknown")] == ["only_new"]
        async with run_worker(of=newer):
            assert await last.result(timeout=10) == "new"
    await newer.close()


async def test_a_row_whose_claim_is_refused_is_left_out_and_reported_once(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task
    async def nothing() -> int:
        return 1

    stranded = await nothing.enqueue()
    # A row that the claim takes and the guard refuses, as an older claim statement would.
    await aconn.execute(
        """create function public.refuse_one() returns trigger language plpgsql as $$ begin
             raise exception using errcode = 'WF001', message = 'not capable',
               detail = jsonb_build_object('job_id', new.id)::text; end $$"""
    )
    await aconn.execute(
        f"""create trigger refuse_one before update of status on taskq.jobs for each row
            when (new.id = '{stranded.id}' and new.status = 'running') execute function public.refuse_one()"""
    )
    async with run_worker():
        for _ in range(3):
            assert await (await nothing.enqueue()).result(timeout=5) == 1
        assert len(events.of("job.stranded")) == 1
        assert await status_of(aconn, stranded.id) == "pending"


async def test_nothing_is_claimed_from_a_paused_queue(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(queue="mail")
    async def mail() -> int:
        return 1

    @app.task(queue="other")
    async def other() -> int:
        return 2

    async with run_worker():
        await aconn.execute("select taskq.pause_queue('mail')")
        held = await mail.enqueue()
        for _ in range(5):
            assert await (await other.enqueue()).result(timeout=5) == 2
        assert await status_of(aconn, held.id) == "pending"
        await aconn.execute("select taskq.resume_queue('mail')")
        assert await held.result(timeout=5) == 1


async def test_exhausted_rows_take_no_share_of_a_claim(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def ordinary() -> int:
        return 1

    spent = [await ordinary.using(priority=9).enqueue() for _ in range(5)]
    await aconn.execute("update taskq.jobs set attempt = max_attempts")
    jobs = [await ordinary.enqueue() for _ in range(5)]
    async with run_worker(concurrency=5):
        for job in jobs:
            assert await job.result(timeout=5) == 1
        for job in spent:
            assert "AttemptsExhausted" in (await until_status(aconn, job.id, "failed"))["error"]


async def test_jobs_that_wait_behind_long_bodies_are_handed_back(
    app: TaskQ, run_worker: RunWorker, gates: Gates
) -> None:
    @app.task
    async def quick() -> None: ...

    @app.task
    async def long() -> None:
        await gates.wait()

    async with run_worker(concurrency=2) as worker:
        for job in await app.enqueue_many(quick.job() for _ in range(300)):
            await job.result(timeout=10)
        assert worker.parts.executor.mean_seconds < 0.02
        await app.enqueue_many(long.job() for _ in range(4))
        await gates.until_reached(times=2)
        await aeventually(lambda: worker.parts.executor.waiting == 0 and worker.counts.released == 2)
        gates.open()
        await gates.until_reached(times=4)


async def test_quick_bodies_are_claimed_ahead_at_the_pace_at_which_they_end(app: TaskQ, run_worker: RunWorker) -> None:
    @app.task
    async def quick() -> None: ...

    jobs = await app.enqueue_many(quick.job() for _ in range(2000))
    async with run_worker(concurrency=2) as worker:
        for job in jobs:
            await job.result(timeout=30)
        # One round ahead of two slots would be four jobs an exchange at most.
        assert worker.parts.exchanger.started < len(jobs) / 4
        assert worker.counts.succeeded == len(jobs)
        assert worker.counts.released == 0


# What cannot be read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deadline", ["infinity", "20000-01-01"])
async def test_a_stored_instant_that_python_cannot_hold_stops_no_worker(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events, deadline: str
) -> None:
    @app.task
    async def nothing() -> int:
        return 1

    job = await nothing.enqueue()
    await aconn.execute(f"update taskq.jobs set deadline = '{deadline}'")
    async with run_worker():
        assert await job.result(timeout=5) == 1
        assert await (await nothing.enqueue()).result(timeout=5) == 1
    assert events.of("exchange.unreadable") == []


@pytest.mark.parametrize("run_at", ["-infinity", "0044-03-15 BC", "0001-01-01", "1969-12-31"])
async def test_no_stored_row_is_before_the_beginning(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, run_at: str
) -> None:
    @app.task
    async def nothing() -> int:
        return 1

    jobs = [await nothing.enqueue() for _ in range(3)]
    await aconn.execute(f"update taskq.jobs set run_at = '{run_at}'")
    async with run_worker(concurrency=1):
        for job in jobs:
            assert await job.result(timeout=5) == 1


@pytest.mark.parametrize("suspect", [False, True])
async def test_an_answer_that_cannot_be_read_stops_no_worker_and_its_claims_are_released(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events, suspect: bool
) -> None:
    @app.task
    async def nothing() -> int:
        return 1

    name, types = (
        ("claim_suspect", "uuid, text[], text[]")
        if suspect
        else (
            "claim",
            "uuid, integer, text[], text[], smallint[], timestamptz[], uuid[], uuid[], integer",
        )
    )
    arguments = ", ".join(f"${n}" for n in range(1, types.count(",") + 2))
    answer = await aconn.fetchval("select pg_get_function_result($1::regprocedure)", f"taskq.{name}({types})")
    async with run_worker(lease=1.5):
        await (await nothing.enqueue()).result(timeout=5)
        await aconn.execute(
            f"""alter function taskq.{name}({types}) rename to real_claim;
            create function taskq.{name}({types}) returns {answer} language sql security definer as $$
              select c.kind, c.job_id, c.claim_epoch, c.task, c.payload, c.queue, c.priority, c.run_at, c.policy_id,
                     c.attempt, c.max_attempts, c.recoveries, c.retry_afters, c.snoozes, c.generation, c.effect_class,
                     timestamptz '20000-01-01', c.claimed_at, c.meta, c.key_generation, c.releases, c.cohort
                    from taskq.real_claim({arguments}) c $$"""
        )
        job = await nothing.using(run_in="1s").enqueue()
        if suspect:
            await aconn.execute("update taskq.jobs set recoveries = 2")
        await aeventually(lambda: events.of("exchange.unreadable"), timeout=15)
        await aconn.execute(
            f"drop function taskq.{name}({types}); alter function taskq.real_claim({types}) rename to {name}"
        )
        await aconn.execute("update taskq.jobs set recoveries = 0")
        assert await job.result(timeout=15) == 1

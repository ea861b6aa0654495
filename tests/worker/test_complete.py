"""Ends on their way to the database: kept until confirmed, sent again, bisected; none is lost, none is told twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
from helpers import aeventually
from proxy import proxy
from worker_kit import Events, Gates, RunWorker, declare_lost, outcomes, until_status

from taskq import TaskQ
from taskq.worker import Worker
from taskq.worker.claims import End
from taskq.worker.complete import BATCH, BATCH_BYTES, Outbox

pytestmark = pytest.mark.anyio


def poison(worker: Worker, job: UUID, result: str) -> None:
    """Make the end of one job unstorable on its way into the outbox, behind all checks."""
    put = worker.parts.outbox.put

    def poisoned(end: End) -> None:
        if end.job_id == job:
            end.result = result
        put(end)

    worker.parts.outbox.put = poisoned  # type: ignore[method-assign]


@contextmanager
def locked(dsn: str, job: UUID) -> Iterator[psycopg.Connection]:
    """Hold the lock of a job's row for the length of the block."""
    with psycopg.connect(dsn) as holder:
        holder.execute("select from taskq.jobs where id = %s for update", (job,))
        yield holder


async def exchange_that_waits(aconn: asyncpg.Connection) -> int:
    """Wait until an exchange of the worker waits for a lock; give the process id of its session."""

    async def look() -> Any:
        return await aconn.fetchval(
            "select pid from pg_stat_activity where application_name = 'taskq exchange'"
            " and wait_event_type = 'Lock' and query like '%exchange%' and datname = current_database()"
        )

    pid: int = await aeventually(look)
    return pid


@pytest.mark.parametrize("result", ['"a\\u0000b"', '"\ud800"', "no json"], ids=["nul", "surrogate", "no json"])
async def test_one_outcome_that_cannot_be_stored_does_not_take_the_others_with_it(
    result: str, app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    @app.task(max_attempts=3)
    async def waits(n: int) -> int:
        await gates.wait()
        return n

    async with run_worker(concurrency=100) as worker:
        jobs = await app.enqueue_many(waits.job(n) for n in range(100))
        await gates.until_reached(times=100)
        bad = jobs[37].id
        poison(worker, bad, result)
        gates.open()
        for n, job in enumerate(jobs):
            row = await until_status(aconn, job.id, "succeeded", "failed")
            assert (row["status"] == "failed") == (job.id == bad)
            assert job.id == bad or row["result"] == str(n)
        row = await until_status(aconn, bad, "failed")
        assert json.loads(row["error"])["type"] == "OutcomeNotStored"
        assert json.loads(row["error"])["sqlstate"].startswith("22")
        assert gates.reached.count("gate") == 100
        assert len(events.of("job.outcome_not_stored")) == 1


async def test_an_end_that_finds_no_partition_makes_one(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task
    async def waits() -> int:
        await gates.wait()
        return 1

    async with run_worker():
        job = await waits.enqueue()
        await gates.until_reached()
        for name in await aconn.fetch("select name from taskq.partitions where parent = 'history'"):
            await aconn.execute(f"drop table taskq.{name['name']}")
        gates.open()
        assert await job.result(timeout=5) == 1
        assert await aconn.fetchval("select count(*) from taskq.partitions where parent = 'history'") > 1


async def test_an_end_whose_partition_cannot_be_made_is_tried_again_with_growing_pauses(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    @app.task
    async def waits() -> int:
        await gates.wait()
        return 1

    async def look() -> Any:
        return len(events.of("database.refused")) >= 3

    async with run_worker():
        job = await waits.enqueue()
        await gates.until_reached()
        await aconn.execute(
            "alter function taskq.ensure_partitions rename to made_before;"
            "create function taskq.ensure_partitions() returns integer language sql as 'select 0'"
        )
        for name in await aconn.fetch("select name from taskq.partitions where parent = 'history'"):
            await aconn.execute(f"drop table taskq.{name['name']}")
        gates.open()
        await aeventually(look)
        assert [event["failures"] for event in events.of("database.refused")][:3] == [1, 2, 3]
        await aconn.execute(
            "drop function taskq.ensure_partitions();"
            "alter function taskq.made_before rename to ensure_partitions;"
            "select taskq.ensure_partitions()"
        )
        assert await job.result(timeout=10) == 1


async def test_a_session_killed_before_its_commit_loses_no_end(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, dsn: str
) -> None:
    @app.task
    async def waits() -> int:
        await gates.wait()
        return 1

    async with run_worker() as worker:
        job = await waits.enqueue()
        await gates.until_reached()
        with locked(dsn, job.id):
            gates.open()
            pid = await exchange_that_waits(aconn)
            await aconn.execute("select pg_terminate_backend($1)", pid)
            await aeventually(lambda: not worker.parts.exchanger.in_flight)
        await until_status(aconn, job.id, "succeeded", within=5)
        assert await outcomes(aconn, job.id) == ["succeeded"]
        assert worker.counts.fenced_out == 0


async def test_an_answer_lost_after_the_commit_is_no_second_end(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, dsn: str
) -> None:
    @app.task
    async def waits() -> int:
        await gates.wait()
        return 1

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn) as worker:
            job = await waits.enqueue()
            await gates.until_reached()
            swallowed = way.swallow(request="succeeded")
            gates.open()
            await aeventually(swallowed.is_set)
            await until_status(aconn, job.id, "succeeded", within=5)
            await aeventually(lambda: not worker.parts.outbox.pending)
            assert await outcomes(aconn, job.id) == ["succeeded"]
            assert worker.counts.fenced_out == 0
            assert gates.reached == ["gate"]


async def test_an_end_is_sent_again_while_the_first_sending_is_still_in_progress(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, dsn: str
) -> None:
    @app.task
    async def waits() -> int:
        await gates.wait()
        return 1

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn, lease=6) as worker:
            job = await waits.enqueue()
            await gates.until_reached()
            with locked(dsn, job.id):
                gates.open()
                first = await exchange_that_waits(aconn)
                way.cut()
                await aeventually(lambda: not worker.parts.exchanger.in_flight)
                way.restore()

                async def both_wait() -> bool:
                    return await aconn.fetchval(
                        "select count(*) = 2 and bool_or(pid = $1) from pg_stat_activity where wait_event_type = 'Lock'"
                        " and application_name = 'taskq exchange' and datname = current_database()",
                        first,
                    )

                await aeventually(both_wait)
            await until_status(aconn, job.id, "succeeded", within=5)
            await aeventually(lambda: not worker.parts.outbox.pending)
            assert await outcomes(aconn, job.id) == ["succeeded"]
            assert worker.counts.fenced_out == 0


async def test_a_full_disk_turns_no_success_into_a_failure(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task(max_attempts=1)
    async def waits(n: int) -> int:
        await gates.wait()
        return n

    await aconn.execute(
        """create function public.disk_full() returns trigger language plpgsql as
           $$ begin raise exception using errcode = '53100', message = 'could not extend file'; end $$;
           create trigger full_disk before insert on taskq.history for each row execute function public.disk_full()"""
    )
    async with run_worker() as worker:
        jobs = [await waits.enqueue(n) for n in range(5)]
        await gates.until_reached(times=5)
        gates.open()
        await aeventually(lambda: worker.parts.conn._failures >= 3)
        assert worker.parts.outbox.pending == 5
        await aconn.execute("drop trigger full_disk on taskq.history")
        for n, job in enumerate(jobs):
            assert await job.result(timeout=6) == n
        assert gates.reached.count("gate") == 5


async def test_an_end_that_comes_too_late_is_fenced_out_and_counted(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    @app.task
    async def waits() -> str:
        await gates.wait()
        return "late"

    async with run_worker(lease=30) as worker:
        job = await waits.enqueue()
        await gates.until_reached()
        # Taken away and ended by somebody else; in one go, since this worker registers anew and could claim it again.
        async with aconn.transaction():
            await declare_lost(aconn, worker.worker_id)
            assert await aconn.fetchval("select taskq.cancel($1)", job.id) == "cancelled"
        gates.open()
        await aeventually(lambda: worker.counts.fenced_out == 1)
        [said] = events.of("job.fenced_out")
        assert said["job_id"] == str(job.id)
        assert said["on_record"] == "lost"
        assert (await until_status(aconn, job.id, "cancelled"))["result"] is None


async def test_claims_whose_answer_was_lost_are_handed_back(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str, events: Events
) -> None:
    ran: list[int] = []

    @app.task(name="its_answer_is_lost")
    async def runs(n: int) -> int:
        ran.append(n)
        return n

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn) as worker:
            swallowed = way.swallow(answer="its_answer_is_lost")
            job = await runs.enqueue(7)
            await aeventually(swallowed.is_set)
            assert await job.result(timeout=8) == 7
            assert await outcomes(aconn, job.id) == ["released", "succeeded"]
            assert ran == [7]
            assert worker.counts.released == 1
            assert len(events.of("job.claim_without_body")) == 1


# The outbox alone -----------------------------------------------------------------------------------------------------


def end_of(worker: int = 1, result: str | None = None) -> End:
    return End(UUID(int=worker), uuid4(), 1, "succeeded", 1, result)


def test_a_batch_is_of_one_worker_and_bounded_in_number_and_size() -> None:
    outbox = Outbox()
    for _ in range(BATCH + 1):
        outbox.put(end_of())
    outbox.put(end_of(worker=2))
    assert [len(outbox.take()) for _ in range(4)] == [BATCH, 1, 1, 0]
    big = "x" * (BATCH_BYTES - 1)
    for result in ("1", big, big, "1"):
        outbox.put(end_of(result=result))
    # "1" and a big one fit together, two big ones do not.
    assert [len(outbox.take()) for _ in range(4)] == [2, 2, 0, 0]


def test_what_failed_goes_first_and_unchanged() -> None:
    outbox = Outbox()
    ends = [end_of() for _ in range(5)]
    for end in ends:
        outbox.put(end)
    batch = outbox.take()
    outbox.put(end_of())
    outbox.again(batch)
    assert outbox.take()[:5] == ends
    assert outbox.pending == 6
    outbox.confirmed(ends)
    assert outbox.pending == 1
    assert not outbox.holds(ends[0].job_id, 1)


def test_a_side_effect_whose_success_cannot_be_stored_is_unknown_and_not_failed() -> None:
    outbox = Outbox()
    end = replace(end_of(result="1"), effect_started_at=datetime.now(UTC))
    outbox.put(end)
    outbox.refused(outbox.take(), asyncpg.DataError("invalid"))
    [told] = outbox.take()
    assert (told.outcome, told.outcome_id, told.result) == ("unknown", end.outcome_id, None)
    assert json.loads(told.error or "")["reason"] == "not_confirmed"


def test_a_refused_batch_is_halved_until_the_one_at_fault_stands_alone() -> None:
    outbox = Outbox()
    ends = [end_of() for _ in range(100)]
    for end in ends:
        outbox.put(end)
    bad = ends[63]
    refusal = asyncpg.DataError("invalid")
    stored: list[End] = []
    culprits = []
    while batch := outbox.take():
        if bad in batch:
            culprits.append(outbox.refused(batch, refusal))
        else:
            stored += batch
            outbox.confirmed(batch)
    assert [c for c in culprits if c] == [bad]
    assert len(culprits) <= 9
    [minimal] = [e for e in stored if e.minimal]
    assert (minimal.job_id, minimal.outcome, minimal.outcome_id) == (bad.job_id, "failed", bad.outcome_id)
    assert len(stored) == 100
    assert outbox.pending == 0

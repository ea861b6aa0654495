"""Waking up: at once where notifications arrive, at the next poll where not, and never at the cost of commits."""

from __future__ import annotations

import asyncio
import logging
import time

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import Events, Gates, RunWorker

from taskq import Retry, TaskQ
from taskq.policy import constant

pytestmark = pytest.mark.anyio


async def asleep(aconn: asyncpg.Connection) -> int:
    n: int = await aconn.fetchval("select count(*) from taskq.sleepers")
    return n


async def sleepers(aconn: asyncpg.Connection, n: int) -> list[str]:
    """So many workers that live and sleep on two queues, and are nobody; the ends of their ids."""
    return [
        str(row["id"])[-12:]
        for row in await aconn.fetch(
            "with made as materialized (select taskq.register_worker('w', 'h', 1, '{default,other}', '{never}', 10, 1,"
            " '0', 60) as id from generate_series(1, $1::int))"
            " select m.id, taskq.sleep(m.id, '{default,other}') from made m",
            n,
        )
    ]


async def test_an_idle_worker_starts_a_job_at_once(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def when() -> float:
        return time.monotonic()

    async with run_worker(poll_interval=30):
        waits = []
        for _ in range(5):
            await aeventually(lambda: asleep(aconn))
            # Past the rechecks after falling asleep, so that nothing but the notification can wake it.
            quiet = time.monotonic() + 0.5
            await aeventually(lambda quiet=quiet: time.monotonic() > quiet)
            start = time.monotonic()
            waits.append(await (await when.enqueue()).result(timeout=5) - start)
        assert sorted(waits)[2] < 0.25, waits


async def test_jobs_that_come_one_after_another_leave_a_worker_asleep(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def one() -> None: ...

    async def marks() -> list[tuple[object, ...]]:
        return [tuple(row) for row in await aconn.fetch("select ctid::text, xmin::text from taskq.sleepers")]

    async with run_worker(poll_interval=30):
        await aeventually(lambda: asleep(aconn))
        before = await marks()
        for _ in range(6):
            job = await one.enqueue()
            async with asyncio.timeout(10):
                while not await aconn.fetchval("select true from taskq.history where id = $1", job.id):
                    pass
        # It would have taken its mark away and set another one, and would have had to look for the jobs in between.
        assert await marks() == before


async def test_without_notifications_a_job_starts_within_the_poll_interval(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def when() -> float:
        return time.monotonic()

    async with run_worker(listen=False, poll_interval=0.5):
        await aeventually(lambda: asleep(aconn))
        start = time.monotonic()
        assert await (await when.enqueue()).result(timeout=5) - start < 1


async def test_a_listener_that_lost_its_connection_listens_again(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task
    async def when() -> float:
        return time.monotonic()

    async with run_worker(poll_interval=1) as worker:
        assert worker.ready.is_set()

        async def listening() -> int | None:
            return await aconn.fetchval(
                "select pid from pg_stat_activity"
                " where datname = current_database() and application_name = 'taskq listen'"
            )

        pid = await aeventually(listening)
        await aconn.execute("select pg_terminate_backend($1)", pid)

        async def again() -> bool:
            return await listening() not in (None, pid)

        await aeventually(again, 5)
        assert await (await when.enqueue()).result(timeout=5)


async def test_ten_thousand_jobs_in_one_transaction_are_one_message_a_queue(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str
) -> None:
    @app.task
    async def never() -> None: ...

    heard: list[str] = []
    listener = await asyncpg.connect(dsn)
    await listener.add_listener("taskq_wake", lambda *args: heard.append(args[-1]))
    # Asleep on both queues, and nobody claims.
    await sleepers(aconn, 20)
    async with aconn.transaction():
        for queue in ("default", "other"):
            await app.enqueue_many([never.using(queue=queue).job() for _ in range(5000)], connection=aconn)
        await app.enqueue_many([never.job() for _ in range(10)], connection=aconn)
    await aeventually(lambda: len(heard) >= 2)
    await listener.execute("select pg_notify('taskq_wake', 'last')")
    await aeventually(lambda: "last" in heard)
    assert sorted(heard) == ["default", "last", "other"]
    await listener.close()


async def test_jobs_enqueued_one_by_one_in_one_transaction_are_one_message_a_queue(
    app: TaskQ, aconn: asyncpg.Connection, dsn: str
) -> None:
    @app.task
    async def never() -> None: ...

    heard: list[str] = []
    listener = await asyncpg.connect(dsn)
    await listener.add_listener("taskq_wake", lambda *args: heard.append(args[-1]))
    ids = await sleepers(aconn, 20)
    for transactions in range(1, 31):
        async with aconn.transaction():
            for _ in range(20):
                await never.using(connection=aconn).enqueue()
                await never.using(queue="other", connection=aconn).enqueue()
        await aeventually(lambda n=transactions: len(heard) >= 2 * n)
    await listener.execute("select pg_notify('taskq_wake', 'last')")
    await aeventually(lambda: "last" in heard)
    assert len(heard) == 61, heard
    named = [message.split()[1:] for message in heard[:-1]]
    # Two each, and by and by all of them.
    assert {len(two) for two in named} == {2}
    assert len({one for two in named for one in two}) > 12
    assert {one for two in named for one in two} <= set(ids)
    await listener.close()


async def test_a_message_does_not_grow_with_what_is_enqueued(app: TaskQ, aconn: asyncpg.Connection, dsn: str) -> None:
    @app.task
    async def never(text: str) -> None: ...

    heard: list[str] = []
    listener = await asyncpg.connect(dsn)
    await listener.add_listener("taskq_wake", lambda *args: heard.append(args[-1]))
    await sleepers(aconn, 2)
    for size in (1, 5_000_000):
        await never.enqueue("x" * size)
    await aeventually(lambda: len(heard) == 2)
    small, large = heard
    assert len(small) == len(large) <= 128 + 2 * 13
    await listener.close()


async def test_a_worker_that_is_full_passes_on_what_it_was_told_of(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task
    async def waits() -> None:
        await gates.wait()

    async def all_asleep(n: int) -> bool:
        return await asleep(aconn) == n

    # No polls within the test, and each has room for one body: what starts has been told.
    options = {"concurrency": 1, "poll_interval": 60}
    async with run_worker(**options), run_worker(**options), run_worker(**options), run_worker(**options):
        await aeventually(lambda: all_asleep(4))
        quiet = time.monotonic() + 0.5
        await aeventually(lambda: time.monotonic() > quiet)
        async with aconn.transaction():
            for _ in range(4):
                await waits.using(connection=aconn).enqueue()
        await aeventually(lambda: len(gates.reached) == 4)
        # One that is full is told of nothing.
        await aeventually(lambda: all_asleep(0))
        gates.open()


async def test_a_body_that_is_tried_again_at_once_waits_for_no_poll(app: TaskQ, run_worker: RunWorker) -> None:
    runs: list[float] = []

    @app.task(retry=Retry(3, constant(0.05)))
    async def fails_twice() -> int:
        runs.append(time.monotonic())
        if len(runs) < 3:
            raise ValueError
        return len(runs)

    async with run_worker(poll_interval=30):
        assert await (await fails_twice.enqueue()).result(timeout=10) == 3
        assert runs[2] - runs[0] < 5


async def test_a_busy_worker_does_not_ask_to_be_notified(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task
    async def quick() -> None: ...

    async with run_worker():
        await aeventually(lambda: asleep(aconn))
        await app.enqueue_many(quick.job() for _ in range(3000))

        async def awake() -> bool:
            return not await asleep(aconn)

        await aeventually(awake, interval=0.001)
        # And with nothing more to do it falls asleep again.
        await aeventually(lambda: asleep(aconn))


async def test_the_log_of_the_application_is_left_as_it_is(app: TaskQ, run_worker: RunWorker) -> None:
    @app.task(max_attempts=1)
    async def logs() -> None:
        logging.getLogger("my.app").warning("from the body")
        raise ValueError("50% of it")

    root = logging.getLogger()
    lines: list[logging.LogRecord] = []

    class Mine(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record)

    mine = Mine()
    before = (list(root.handlers), root.level, logging.getLogger("taskq").level, logging.getLogger("taskq").propagate)
    root.addHandler(mine)
    try:
        async with run_worker():
            job = await logs.enqueue()
            with pytest.raises(Exception, match="50% of it"):
                await job.result(timeout=5)
    finally:
        root.removeHandler(mine)
    after = (list(root.handlers), root.level, logging.getLogger("taskq").level, logging.getLogger("taskq").propagate)
    assert after == before
    assert len([line for line in lines if line.name == "my.app"]) == 1
    [failed] = [line for line in lines if getattr(line, "event", "") == "job.failed"]
    assert failed.name == "taskq.worker"
    assert "50% of it" in failed.getMessage()
    assert {line.name.split(".")[0] for line in lines} <= {"taskq", "my", "asyncio"}


async def test_a_success_costs_no_log_line_and_no_statement_of_its_own(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task
    async def nothing() -> None: ...

    logging.getLogger("taskq").setLevel(logging.INFO)  # As it is by default; the fixture puts back what it was.
    async with run_worker(concurrency=50) as worker:
        for job in await app.enqueue_many(nothing.job() for _ in range(100)):
            await job.result(timeout=10)
        events.records.clear()
        before = worker.parts.exchanger.started
        jobs = await app.enqueue_many(nothing.job() for _ in range(2000))
        await jobs[-1].result(timeout=20)
        await aeventually(lambda: worker.counts.succeeded == 2100)
        assert worker.parts.exchanger.started - before < 400
        assert events.records == []


async def test_the_listening_connection_is_pinged_and_goes_on_listening(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskq.worker.wake.CHECK_EVERY", 0.05)

    @app.task
    async def work() -> int:
        return 1

    pinged = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and application_name = 'taskq listen' and state = 'idle' and query like '%select 1'"
    )
    async with run_worker(poll_interval=60):

        async def listens() -> bool:
            return await aconn.fetchval(pinged) == 1

        await aeventually(listens)
        job = await work.enqueue()
        assert await job.result(timeout=10) == 1

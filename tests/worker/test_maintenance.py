"""What one worker does for all: lost workers, suspects, deadlines, keys, partitions."""

from __future__ import annotations

import asyncio
import time

import asyncpg
import psycopg
import pytest
from helpers import aeventually
from runs_kit import finish, node, start, store, take, worker_for
from sql import End, exchange, one
from worker_kit import BOUND, Events, Gates, RunWorker, outcomes, until_status

from taskq import TaskQ

pytestmark = pytest.mark.anyio


async def leader_of(aconn: asyncpg.Connection) -> object:
    return await aconn.fetchval("select holder from taskq.leader where role = 'maintenance'")


async def lost_worker(aconn: asyncpg.Connection, n: int = 1, task: str = "waits", **changes: object) -> None:
    """A worker whose lease ran out long ago, with n claims."""
    worker = await aconn.fetchval(
        "select taskq.register_worker('gone', 'h', 1, '{default}', $1, 100, 1, '0', 1)", [task]
    )
    await aconn.execute("update taskq.workers set lease_expires_at = now() + interval '1 hour' where id = $1", worker)
    claimed = await aconn.fetch(
        "select * from taskq.claim($1, $2, $3, '{default}', '{5}', '{-infinity}', $4)",
        worker,
        n,
        [task],
        ["00000000-0000-0000-0000-000000000000"],
    )
    assert len(claimed) == n
    await aconn.execute("update taskq.workers set lease_expires_at = '-infinity' where id = $1", worker)


async def test_the_next_worker_leads_when_the_leader_leaves(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def nothing() -> None: ...

    async with run_worker(lease=2) as second:
        async with run_worker(lease=2) as first:
            leaders = (first.worker_id, second.worker_id)

            async def led() -> bool:
                return await leader_of(aconn) in leaders

            await aeventually(led)

        async def second_leads() -> bool:
            return await leader_of(aconn) == second.worker_id

        await aeventually(second_leads)
        await aeventually(lambda: second.parts.maintenance.is_leader)


async def test_a_worker_publishes_its_tasks_so_that_sql_can_enqueue_them(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(priority=7, max_attempts=4)
    async def doubled(n: int) -> int:
        return 2 * n

    async with run_worker() as worker:
        row = await aconn.fetchrow("select * from taskq.task_config where task = 'doubled'")
        assert (row["published_by"], row["priority"], row["max_attempts"]) == (worker.worker_id, 7, 4)
        job = await aconn.fetchval("""select taskq.enqueue('doubled', '{"n": 4}')""")
        assert (await until_status(aconn, job, "succeeded"))["result"] == "8"


async def test_claims_of_a_lost_worker_are_settled(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task(name="waits")
    async def waits(n: int) -> int:
        return n

    jobs = [await waits.enqueue(n) for n in range(300)]
    await lost_worker(aconn, 300)
    async with run_worker(lease=1):
        for n, job in enumerate(jobs):
            assert await job.result(timeout=15) == n
        assert await outcomes(aconn, jobs[0].id) == ["lost", "succeeded"]
        assert len(events.of("worker.lost")) == 1


async def test_claims_of_a_worker_without_a_row_are_settled(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(name="waits", max_recoveries=0)
    async def waits(n: int) -> int:
        return n

    jobs = [await waits.enqueue(n) for n in range(2)]
    await lost_worker(aconn, 2)
    await aconn.execute("delete from taskq.workers")
    async with run_worker(lease=1):
        for job in jobs:
            assert "RecoveryExhausted" in (await until_status(aconn, job.id, "failed"))["error"]


async def test_a_suspect_runs_alone_and_the_others_go_on(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    beside: list[int] = []

    @app.task(name="waits")
    async def waits(n: int) -> int:
        beside.append(running.parts.executor.busy)
        await gates.wait(f"gate{n}")
        return n

    suspect = await waits.enqueue(1)
    await aconn.execute("alter table taskq.jobs disable trigger user")
    for _ in range(2):
        await lost_worker(aconn)
        await aconn.execute("select * from taskq.mark_lost()")
        await aconn.execute("select * from taskq.settle_lost()")
    await aconn.execute("alter table taskq.jobs enable trigger user")
    async with run_worker() as running:
        await gates.until_reached("gate1")
        assert len(events.of("job.runs_alone")) == 1
        other = await waits.enqueue(2)
        await asyncio.sleep(0.5)
        assert gates.reached == ["gate1"], "something was claimed beside the suspect"
        gates.open("gate1")
        gates.open("gate2")
        assert await suspect.result(timeout=5) == 1
        assert await other.result(timeout=5) == 2
        assert beside == [1, 1]


async def test_deadlines_keys_and_partitions_are_looked_after(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def nothing() -> None: ...

    late = await nothing.using(run_in="1h", deadline="2h").enqueue()
    await aconn.execute("update taskq.jobs set deadline = now() - interval '1 s'")
    await aconn.execute(
        "insert into taskq.unique_keys values ('nothing', 'old', gen_random_uuid(), '1 s', now() - interval '1 day')"
    )
    await aconn.execute("select taskq.ensure_partitions(current_date - 400, current_date - 399)")
    await aconn.execute(
        "drop table taskq.history_" + (await aconn.fetchval("select to_char(current_date + 3, 'YYYYMMDD')"))
    )
    async with run_worker(lease=1):
        assert "DeadlineExceeded" in (await until_status(aconn, late.id, "failed"))["error"]

        async def tidy() -> bool:
            return await aconn.fetchval(
                "select not exists (select from taskq.unique_keys)"
                " and count(*) filter (where day < current_date - 100) = 0"
                " and count(*) filter (where day = current_date + 3) = 2 from taskq.partitions"
            )

        await aeventually(tidy)


async def test_workers_are_declared_lost_while_the_leaders_loop_is_blocked_now_and_then(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task(name="waits")
    async def waits(n: int) -> int:
        return n

    async def block_the_loop() -> None:
        while True:
            time.sleep(0.4)  # noqa: ASYNC251 (that is the point: every look comes late)
            await asyncio.sleep(0.01)

    job = await waits.enqueue(1)
    await lost_worker(aconn)
    async with run_worker(lease=1.5):
        blocking = asyncio.create_task(block_the_loop())
        try:
            await aeventually(lambda: events.of("worker.lost"), timeout=20)
        finally:
            blocking.cancel()
        assert await job.result(timeout=10) == 1


async def test_signals_to_many_runs_are_given_back_in_one_turn(run_worker: RunWorker, app: TaskQ, dsn: str) -> None:
    @app.task
    async def nothing() -> None: ...

    with psycopg.connect(dsn, autocommit=True) as conn:
        other = worker_for(conn)
        plan = store(conn, [node("a"), node("b")], on_failure="finish")
        for _ in range(6):
            run = start(conn, plan)
            [claimed] = take(conn, other, "a").values()
            job = claimed["job_id"]
            conn.execute("select * from taskq.begin_wait(%s, %s, 1, 'go', 1, null)", (other, job))
            waits = {"type": "Suspended", "for": [{"kind": "wait", "name": "go", "occurrence": 1}]}
            assert exchange(conn, other, [End(job, outcome="suspend", error=waits)]) == []
            assert one(conn, "select taskq.send_run_signal(%s, 'go')", run) == "given"
            [claimed] = take(conn, other, "a").values()
            finish(conn, other, claimed)
        kept = "select count(*) from taskq.run_signals where state = 'kept'"
        assert one(conn, kept) == 0
        # Its turns are some five seconds apart.
        async with run_worker(lease=60):
            await aeventually(lambda: one(conn, kept) == 6, BOUND)


async def test_what_one_duty_or_one_row_refuses_keeps_the_leader_from_nothing_else(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task(name="waits")
    async def waits(n: int) -> int:
        return n

    refused, lost = [await waits.enqueue(n) for n in range(2)]
    await lost_worker(aconn, 2)
    late = await waits.using(run_in="1h", deadline="2h").enqueue(2)
    await aconn.execute("update taskq.jobs set deadline = now() - interval '1 s' where id = $1", late.id)
    await aconn.execute(
        f"""create function public.refuse_it() returns trigger language plpgsql as
              $$ begin raise exception using errcode = '22003'; end $$;
            create trigger refuse_it before update or delete on taskq.jobs for each row when (old.id = '{refused.id}')
              execute function public.refuse_it();
            create trigger refuse_it before delete on taskq.unique_keys for each statement
              execute function public.refuse_it();
            drop table taskq.history_{await aconn.fetchval("select to_char(current_date + 3, 'YYYYMMDD')")}"""
    )
    async with run_worker(lease=1):
        assert await lost.result(timeout=10) == 1
        assert "DeadlineExceeded" in (await until_status(aconn, late.id, "failed"))["error"]
        # Pruning fails, and what comes after it is done.
        await aeventually(lambda: "prune" in [e["duty"] for e in events.of("duty.failed")])
        made = "select count(*) from taskq.partitions where day = current_date + 3"

        async def whole() -> bool:
            return await aconn.fetchval(made) == 2

        await aeventually(whole)
        assert {(e["duty"], e["sqlstate"]) for e in events.of("job.not_settled")} == {("settle_lost", "22003")}
        await aconn.execute("drop trigger refuse_it on taskq.jobs; drop trigger refuse_it on taskq.unique_keys")
        assert await refused.result(timeout=10) == 0


async def test_partitions_are_made_before_anything_needs_them(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task(name="waits", max_recoveries=0)
    async def waits(n: int) -> int:
        return n

    lost = await waits.enqueue(0)
    await lost_worker(aconn)
    late = await waits.using(run_in="1h", deadline="2h").enqueue(1)
    await aconn.execute("update taskq.jobs set deadline = now() - interval '1 s' where id = $1", late.id)
    for (name,) in await aconn.fetch("select name from taskq.partitions"):
        await aconn.execute(f"drop table taskq.{name}")
    async with run_worker(lease=1):
        assert "DeadlineExceeded" in (await until_status(aconn, late.id, "failed"))["error"]
        assert "RecoveryExhausted" in (await until_status(aconn, lost.id, "failed"))["error"]
    assert events.of("job.not_settled") == []
    assert events.of("duty.failed") == []


SURVEY = """create or replace function taskq.survey(p_queues text[], p_tasks text[])
    returns table (kind text, name text, n integer) language plpgsql as $$ begin {} end $$"""


async def test_a_survey_that_is_refused_keeps_nobody_from_leading(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task(name="waits")
    async def waits(n: int) -> int:
        return n

    await aconn.execute(SURVEY.format("raise exception using errcode = 'XX002';"))
    job = await waits.enqueue(1)
    await lost_worker(aconn)
    async with run_worker(lease=1):
        assert await job.result(timeout=10) == 1
        await aeventually(lambda: [e for e in events.of("duty.failed") if e["duty"] == "survey"])
    assert "XX002" in events.of("duty.failed")[0]["error"]


async def test_a_slow_survey_is_made_apart(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task
    async def nothing() -> None: ...

    await aconn.execute(
        SURVEY.format(
            "perform pg_sleep(case when p_queues = '{}' then 0 else 0.3 end);"
            " return query select 'unknown_task'::text, coalesce(p_queues[1], 'none'), 1;"
        )
    )
    async with run_worker(lease=1) as worker:
        # Told of by surveys apart as well: the look itself asks for no queue then.
        await aeventually(lambda: worker._reported_unknown == {"default"})
        asked: list[object] = []
        looks = worker.parts.maintenance._conn.fetch

        async def watched(query: str, *args: object) -> list[object]:
            asked.append((query == worker.parts.maintenance._sql["survey"], *args[-2:-1]))
            return await looks(query, *args)

        worker.parts.maintenance._conn.fetch = watched  # type: ignore[method-assign, assignment]
        await aeventually(lambda: (True, ["default"]) in asked and (False, []) in asked)
    assert events.of("duty.failed") == []

"""Workers that are killed by SIGKILL at each statement of a durable body, and others that go on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import killed_in_steps
import pytest
from helpers import aeventually

from taskq import TaskQ
from taskq.handle import Job
from taskq.worker import Worker, WorkerOptions

pytestmark = pytest.mark.anyio
COMMAND = [sys.executable, "-m", "taskq", "worker", "killed_in_steps:app", "--lease", "3", "--concurrency", "1"]


@pytest.fixture
async def called(aconn: asyncpg.Connection) -> asyncpg.Connection:
    """A connection to the test's database, which has a table of the functions that were called."""
    await aconn.execute("create table public.called (job uuid, epoch bigint, name text)")
    return aconn


async def calls(conn: asyncpg.Connection, job: UUID) -> list[str]:
    return [r["name"] for r in await conn.fetch("select name from public.called where job = $1 order by epoch", job)]


async def started(dsn: str, *options: str, **environ: str) -> asyncio.subprocess.Process:
    """A worker in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    return await asyncio.create_subprocess_exec(
        *COMMAND, *options, env=os.environ | {"TASKQ_DSN": dsn, "PYTHONPATH": path} | environ
    )


async def kill_at(dsn: str, task: str, points: Sequence[str], signals: Sequence[int] = ()) -> dict[str, Job[Any]]:
    """A job for each point, in a queue of its own, whose first worker was killed there."""
    two = asyncio.Semaphore(2)

    async def killed(at: str, queue: str) -> None:
        async with two:
            worker = await started(dsn, "--queue", queue, KILLED=at)
            assert await asyncio.wait_for(worker.wait(), 60) == -signal.SIGKILL, at

    async with TaskQ(dsn) as app:

        @app.task(name=task)
        async def stands_for_it() -> str:
            raise AssertionError

        jobs = {at: await stands_for_it.using(max_attempts=9, queue=f"q{n}").enqueue() for n, at in enumerate(points)}
        for job in jobs.values():
            for payload in signals:
                await job.signal("n", payload)
        await asyncio.gather(*(killed(at, f"q{n}") for n, at in enumerate(points)))
    return jobs


@asynccontextmanager
async def a_worker_that_lives(dsn: str, app: TaskQ, queues: int) -> AsyncIterator[None]:
    """One that goes on with what the killed ones have left."""
    options = WorkerOptions(queues=tuple(f"q{n}" for n in range(queues)), lease=3, poll_interval=0.2)
    worker = Worker(app.tasks, dsn, options=options)
    task = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        assert await asyncio.wait_for(task, 60) == 0


STEPS = {
    "record_steps:before:1": "first",
    "record_steps:after:1": None,
    "record_steps:before:2": "old",
    "record_steps:after:2": None,
    "load_steps:before:1": None,
    "load_steps:after:1": None,
    "record_steps:before:3": "second",
    "record_steps:after:3": None,
    "leave_steps:before:1": None,
    "leave_steps:after:1": None,
}
"""Where the first worker is killed, and which step is called again because of that."""


async def test_a_worker_that_is_killed_at_a_write_loses_no_record_and_repeats_none(
    called: asyncpg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKQ_DSN", dsn)
    jobs = await kill_at(dsn, "steps", list(STEPS))
    async with a_worker_that_lives(dsn, killed_in_steps.app, len(jobs)), TaskQ(dsn) as app:
        for at, twice in STEPS.items():
            job: Job[Any] = Job(app, jobs[at].id)
            result = await job.result(timeout=60)
            found = await calls(called, job.id)
            records = await called.fetch("select name, value from taskq.steps where job_id = $1 order by 1", job.id)
            known = {r["name"]: r["value"].strip('"') for r in records}
            assert {name: found.count(name) for name in ("first", "second")} == {
                "first": 2 if twice == "first" else 1,
                "second": 2 if twice == "second" else 1,
            }, at
            assert result == known["first"] + known["second"], at
            # Its second attempt asks for it no more, so that one is not called again.
            assert found.count("old") == (0 if at.startswith("record_steps") and at.endswith("1") else 1), at
    assert await called.fetch("select * from taskq.check_invariants('all')") == []


ROUNDS = 50


async def test_steps_beside_each_other_are_given_their_own_records_on_another_worker(
    called: asyncpg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty bodies at once: their worker is killed when two of three steps of each are recorded."""
    monkeypatch.setenv("TASKQ_DSN", dsn)
    count = "select count(*) from taskq.steps"
    async with TaskQ(dsn) as app:

        @app.task
        async def gathers(seed: int) -> list[str]:
            raise AssertionError

        jobs = await app.enqueue_many([gathers.using(queue="q0").job(seed) for seed in range(ROUNDS)])
        worker = await started(dsn, "--queue", "q0", "--concurrency", str(ROUNDS))
        try:
            await aeventually(partial(is_, called, count, 2 * ROUNDS), 60)
        finally:
            worker.kill()
        assert await asyncio.wait_for(worker.wait(), 60) == -signal.SIGKILL
        assert await called.fetchval(count) == 2 * ROUNDS
        async with a_worker_that_lives(dsn, killed_in_steps.app, 1):
            for seed, job in enumerate(jobs):
                epochs = {name: 2 if name == "abc"[seed % 3] else 1 for name in "abc"}
                given = [f"{name}{epoch}" for name, epoch in epochs.items()]
                assert await job.result(timeout=60) == given, seed
                records = await called.fetch(
                    "select name, occurrence, claim_epoch, value #>> '{}' as value from taskq.steps"
                    " where job_id = $1 order by 1",
                    job.id,
                )
                assert [tuple(r) for r in records] == [
                    (name, 1, epochs[name], value) for name, value in zip("abc", given, strict=True)
                ], seed
                assert sorted(await calls(called, job.id)) == ["a", "b", "c"], seed
    ended = await called.fetch("select array_agg(outcome order by claim_epoch) from taskq.attempts group by job_id")
    assert [row[0] for row in ended] == [["lost", "succeeded"]] * ROUNDS
    assert await called.fetch("select * from taskq.check_invariants('all')") == []


async def is_(conn: asyncpg.Connection, query: str, value: object) -> bool:
    return bool(await conn.fetchval(query) == value)


WAITS = (
    "begin_sleep:before:1",
    "begin_sleep:after:1",
    "end_committed:before:kill",
    "end_committed:after:kill",
    "begin_wait:before:1",
    "begin_wait:after:1",
    "take_signal:before:1",
    "take_signal:after:1",
    "take_signal:before:2",
    "take_signal:after:2",
)
"""Where the first worker is killed; its first end is the suspension of the sleep."""


async def test_a_worker_that_is_killed_while_it_waits_loses_no_signal_and_takes_none_twice(
    called: asyncpg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKQ_DSN", dsn)
    jobs = await kill_at(dsn, "waits", WAITS, signals=[1, 2])
    async with a_worker_that_lives(dsn, killed_in_steps.app, len(jobs)), TaskQ(dsn) as app:
        for at in WAITS:
            job: Job[Any] = Job(app, jobs[at].id)
            assert (await job.result(timeout=60)).startswith("[1, 2] once"), at
            assert await calls(called, job.id) == ["once"], at
            ended = "select outcome from taskq.attempts where job_id = $1 order by claim_epoch"
            found = [row["outcome"] for row in await called.fetch(ended, job.id)]
            assert found[-1] == "succeeded", at
            assert ("lost" in found) == (at != "end_committed:after:kill"), at
    taken = await called.fetchval("select count(*) from taskq.signals where taken_at is not null")
    assert taken == 2 * len(WAITS)
    assert await called.fetch("select * from taskq.check_invariants('all')") == []


STARTS = (
    "ensure_policy:before:1",
    "ensure_policy:after:1",
    "start_child:before:1",
    "start_child:after:1",
    "end_committed:before:kill",
    "end_committed:after:kill",
    "start_child:before:2",
    "start_child:after:2",
    "start_child:before:3",
    "start_child:after:3",
    "load_steps:before:2",
)
"""Where the first worker is killed; its first end is the suspension for the first child."""


async def test_a_worker_that_is_killed_around_the_start_of_a_child_starts_each_once(
    called: asyncpg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKQ_DSN", dsn)
    jobs = await kill_at(dsn, "starts", STARTS)
    async with a_worker_that_lives(dsn, killed_in_steps.app, len(jobs)), TaskQ(dsn) as app:
        for at in STARTS:
            job: Job[Any] = Job(app, jobs[at].id)
            got = await job.result(timeout=60)
            assert [each.rstrip("0123456789") for each in got] == ["first", "second"], at
            query = "select occurrence, child_job, status from taskq.children where parent_job = $1 order by 1"
            found = await called.fetch(query, job.id)
            assert [(row["occurrence"], row["status"]) for row in found] == [(1, "succeeded"), (2, "succeeded")], at
            assert [await calls(called, row["child_job"]) for row in found] == [["first"], ["second"]], at
    assert await called.fetchval("select count(*) from taskq.history where task = 'child'") == 2 * len(STARTS)
    assert await called.fetch("select * from taskq.check_invariants('all')") == []


EFFECTS = {
    "start_step:before:1": (None, []),
    "start_step:after:1": ("pay", []),
    "end_step:before:1": ("pay", ["pay"]),
    "end_step:after:1": (None, ["pay"]),
    "start_step:after:2": ("mail", ["pay"]),
    "end_step:before:2": ("mail", ["pay", "mail"]),
    "end_step:after:2": (None, ["pay", "mail"]),
}
"""Where the first worker is killed, which step is unknown because of that, and what had been called."""


async def test_a_worker_that_is_killed_around_a_side_effecting_step_never_repeats_it(
    called: asyncpg.Connection, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKQ_DSN", dsn)
    jobs = await kill_at(dsn, "pays", list(EFFECTS))
    async with a_worker_that_lives(dsn, killed_in_steps.app, len(jobs)), TaskQ(dsn) as app:
        for at, (unknown, before) in EFFECTS.items():
            job: Job[Any] = Job(app, jobs[at].id)
            if unknown is not None:
                [row] = await aeventually(partial(called.fetch, DOUBTFUL, job.id), 60)
                assert (row["step"], row["reason"]) == (unknown, "worker_lost"), at
                assert await calls(called, job.id) == before, at
                # Who asks the provider knows.
                happened = unknown in before
                said: Any = {"result": "asked"} if happened else {}
                assert await app.resolve(job.id, happened=happened, reason="looked", **said) == "pending", at
            result = await job.result(timeout=60)
            assert sorted(await calls(called, job.id)) == ["mail", "pay"], at
            assert (result == "asked") == (at == "end_step:before:1"), at
    assert await called.fetch("select * from taskq.check_invariants('all')") == []


DOUBTFUL = "select step, reason from taskq.unknown_outcomes where job_id = $1"

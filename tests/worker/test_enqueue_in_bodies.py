"""Bodies that enqueue: by the call that fits them, one row each; by the other, an error that names the right call."""

from __future__ import annotations

import asyncio
import gc
import time
import warnings

import psycopg
import pytest
from worker_kit import RunWorker

from taskq import JobContext, TaskQ
from taskq.errors import SyncCallInEventLoop

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("error")]


def rows(conn: psycopg.Connection, task: str) -> int:
    (found,) = conn.execute("select count(*) from taskq.all_jobs where task = %s", [task]).fetchone() or (0,)
    return int(found)


async def test_each_form_of_body_enqueues_by_its_own_call(
    app: TaskQ, run_worker: RunWorker, conn: psycopg.Connection
) -> None:
    @app.task
    async def child(n: int) -> int:
        return 2 * n

    @app.task
    def plain(n: int) -> int:
        job = child.enqueue_sync(n)
        # A thread of its own may wait: the child runs in the loop, beside it.
        return job.result_sync(timeout="10s")

    @app.task
    async def awaits(ctx: JobContext, n: int) -> int:
        job = await child.using(idempotency_key=str(ctx.job_id)).enqueue(n)
        return await job.result(timeout="10s")

    async with run_worker():
        assert await (await plain.enqueue(1)).result(timeout=15) == 2
        assert rows(conn, "child") == 1
        assert await (await awaits.enqueue(2)).result(timeout=15) == 4
        assert rows(conn, "child") == 2


async def test_a_sync_call_in_an_async_body_fails_at_once_and_names_the_call_to_await(
    app: TaskQ, run_worker: RunWorker, conn: psycopg.Connection
) -> None:
    said: list[str] = []
    took: list[float] = []

    @app.task
    async def child(n: int) -> None: ...

    @app.task(max_attempts=1)
    async def mistaken() -> None:
        job = await child.using(run_in="1h").enqueue(1)
        for call in (
            lambda: child.enqueue_sync(2),
            lambda: app.enqueue_many_sync([child.job(3)]),
            lambda: job.result_sync(timeout=5),
            job.info_sync,
            lambda: app.cancel_sync(job.id),
        ):
            began = time.perf_counter()
            with pytest.raises(SyncCallInEventLoop) as caught:
                call()
            took.append(time.perf_counter() - began)
            said.append(str(caught.value))

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with run_worker():
            await (await mistaken.enqueue()).result(timeout=15)
        gc.collect()
        await asyncio.sleep(0)
    assert [s.rpartition("use ")[2] for s in said] == [
        "'await enqueue(...)'",
        "'await enqueue_many(...)'",
        "'await result(...)'",
        "'await info(...)'",
        "'await cancel(...)'",
    ]
    assert max(took) < 0.05
    assert [str(w.message) for w in warned if "never awaited" in str(w.message)] == []
    assert rows(conn, "child") == 1


async def test_an_async_body_that_blocks_by_mistake_ends_with_the_name_of_the_call(
    app: TaskQ, run_worker: RunWorker, conn: psycopg.Connection
) -> None:
    @app.task
    async def child(n: int) -> None: ...

    @app.task(max_attempts=1)
    async def mistaken() -> None:
        child.enqueue_sync(1)

    async with run_worker():
        job = await mistaken.enqueue()
        with pytest.raises(Exception, match=r"SyncCallInEventLoop: .*await enqueue\(\.\.\.\)"):
            await job.result(timeout=15)
    assert rows(conn, "child") == 0

"""Tasks with ``history="slim"`` on workers: what is not kept is said so, and who needs a result has it."""

from __future__ import annotations

import asyncpg
import pytest
from cli_kit import Cli, make_cli  # noqa: F401
from worker_kit import RunWorker, until_status

from taskq import InvalidPolicy, JobContext, PolicyLayer, ResultNotKept, TaskQ

pytestmark = pytest.mark.anyio


async def test_a_result_that_was_not_kept_is_refused_and_not_none(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, cli: Cli
) -> None:
    @app.task(history="slim")
    async def double(n: int) -> int:
        return 2 * n

    async with run_worker():
        job = await double.enqueue(4)
        with pytest.raises(ResultNotKept, match=f"job {job.id} has succeeded.*history='full'"):
            await job.result(timeout="30s")
    info = await job.info()
    assert (info.status, info.payload, info.result) == ("succeeded", None, None)
    shown = cli.ok("jobs", "show", str(job.id)).out
    assert "payload\nnot kept (slim)" in shown
    assert "result\nnot kept (slim)" in shown
    assert cli.ok("jobs", "show", str(job.id), "--json").json["payload"] is None


async def test_nodes_of_runs_and_children_of_bodies_give_their_results(run_worker: RunWorker, dsn: str) -> None:
    async with TaskQ(dsn, defaults=PolicyLayer(history="slim")) as app:

        @app.task
        async def double(n: int) -> int:
            return 2 * n

        @app.task(history="full")
        async def parent(ctx: JobContext, n: int) -> int:
            return await ctx.child(double, n)

        @app.workflow
        def twice(n: int) -> int:
            return double.step(double.step(n))

        async with run_worker(of=app):
            assert await (await parent.enqueue(3)).result(timeout="30s") == 6
            assert await (await twice.start(3)).result(timeout="30s") == 12


async def test_a_failure_keeps_its_payload_and_is_retried(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    broken = [True]

    @app.task(history="slim", max_attempts=1)
    async def works(n: int) -> int:
        if broken:
            raise ValueError(n)
        return n

    async with run_worker():
        job = await works.enqueue(5)
        await until_status(aconn, job.id, "failed")
        assert (await job.info()).payload == {"n": 5}
        broken.clear()
        assert await job.retry() == "reopened"
        assert await job.result(timeout="30s") == 5


def test_history_is_an_option_of_task_queue_and_app() -> None:
    app = TaskQ(defaults=PolicyLayer(history="slim"), queues={"audit": PolicyLayer(history="full")})

    @app.task
    async def plain() -> None: ...

    @app.task(queue="audit")
    async def audited() -> None: ...

    @app.task(queue="audit", history="slim")
    async def its_own() -> None: ...

    assert [t.policy.history for t in (plain, audited, its_own)] == ["slim", "full", "slim"]
    assert "history" not in audited.policy.spec()
    with pytest.raises(InvalidPolicy, match="history is 'none'; give 'full' or 'slim'"):
        app.task(history="none")(plain.fn)  # type: ignore[call-overload]

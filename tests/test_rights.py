"""A user without the rights is told which role to grant: by the client, sync and async, and by a worker at its boot."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import psycopg
import pytest
import sql as q
from cli_kit import SHOP, Cli, make_cli  # noqa: F401
from client_kit import Shop
from psycopg.conninfo import make_conninfo

from taskq import TaskQError
from taskq.errors import NotPermitted
from taskq.worker import Worker, WorkerOptions

USER = "someone_with_few_rights"
Conn = psycopg.Connection[object]


@pytest.fixture
def granted(conn: Conn) -> Iterator[Callable[[str], None]]:
    """Gives the user one role; it has none otherwise."""
    conn.execute(f"do $$ begin create role {USER} login; exception when duplicate_object then null; end $$")
    given: list[str] = []

    def grant(role: str) -> None:
        conn.execute(f"grant {role} to {USER}")
        given.append(role)

    yield grant
    for role in given:
        conn.execute(f"revoke {role} from {USER}")


@pytest.fixture
def few(dsn: str) -> str:
    return make_conninfo(dsn, user=USER)


@pytest.mark.anyio
async def test_async_calls_name_the_role(few: str, conn: Conn, granted: Callable[[str], None]) -> None:
    job = q.enqueue(conn)
    shop = Shop(few)
    app = shop.app
    calls: list[tuple[Callable[[], Awaitable[object]], str]] = [
        (lambda: shop.double.enqueue(1), "taskq_producer"),
        (lambda: app.enqueue_many([shop.double.job(1)]), "taskq_producer"),
        (lambda: app.cancel(job), "taskq_producer"),
        (lambda: app.get(job), "taskq_producer"),
        (lambda: app.retry(job), "taskq_operator"),
        (lambda: app.resolve(job, happened=True, reason="looked"), "taskq_operator"),
    ]
    try:
        for call, role in calls:
            with pytest.raises(NotPermitted, match=f"grant the role {role} to that user"):
                await call()
        granted("taskq_producer")
        with pytest.raises(TaskQError, match="grant the role taskq_operator"):
            await app.retry(job)
    finally:
        await app.close()
    assert q.status(conn, job) == "pending"


def test_sync_calls_name_the_role(few: str, conn: Conn, granted: Callable[[str], None]) -> None:
    job = q.enqueue(conn)
    shop = Shop(few)
    app = shop.app
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: shop.double.enqueue_sync(1), "taskq_producer"),
        (lambda: app.cancel_sync(job), "taskq_producer"),
        (lambda: app.retry_sync(job), "taskq_operator"),
        (lambda: app.resolve_sync(job, happened=True, reason="looked"), "taskq_operator"),
    ]
    try:
        for call, role in calls:
            with pytest.raises(NotPermitted, match=f"grant the role {role} to that user") as caught:
                call()
            assert "\n" not in str(caught.value)
        granted("taskq_producer")
        with psycopg.connect(few) as own:
            granted("taskq_reader")
            own.execute("set role taskq_reader")
            with pytest.raises(NotPermitted, match="taskq_producer"):
                app.enqueue_many_sync([shop.double.job(1)], connection=own)
    finally:
        app.close_sync()


@pytest.mark.parametrize("role", [None, "taskq_producer", "taskq_reader"])
def test_a_worker_names_its_role_and_does_not_ask_to_be_restarted(
    cli: Cli, few: str, granted: Callable[[str], None], role: str | None
) -> None:
    if role is not None:
        granted(role)
    (cli.folder / "shop.py").write_text(SHOP)
    with cli.process("worker", "shop:app", TASKQ_DSN=few) as process:
        output, _ = process.communicate(timeout=60)
    last = output.splitlines()[-1]
    assert process.returncode == 1, output
    assert last.startswith("error: the database's user may not do this (permission denied for "), output
    assert "grant the role taskq_worker to that user" in last
    assert "worker.stopped" not in output


def test_a_worker_with_its_role_starts(cli: Cli, few: str, granted: Callable[[str], None]) -> None:
    from taskq import TaskQ

    granted("taskq_worker")
    app = TaskQ(few)

    @app.task
    async def nothing() -> None: ...

    async def start() -> int:
        worker = Worker(app.tasks, few, options=WorkerOptions(concurrency=1))
        running = asyncio.create_task(worker.run())
        ready = asyncio.create_task(worker.ready.wait())
        await asyncio.wait([running, ready], return_when=asyncio.FIRST_COMPLETED)
        worker.stop()
        ready.cancel()
        return await running

    assert asyncio.run(start()) == 0

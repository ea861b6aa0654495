"""Bodies in child processes: what they get and give back, and that whatever they do ends with them."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import process_app as bodies
import pytest
from helpers import aeventually
from worker_kit import RunWorker, outcomes

from taskq import JobContext, TaskQ
from taskq.errors import ConfigurationError, JobFailed, TaskDefinitionError, UnsupportedInProcess
from taskq.worker import Worker, process_pool
from taskq.worker.process_context import AVAILABLE, ProcessContext

pytestmark = pytest.mark.anyio
LONG = 60.0
"""Seconds; children import the application on a machine that may be busy."""
SLOW: dict[str, Any] = {"lease": 10, "grace": 8}


@pytest.fixture
async def app(dsn: str, anyio_backend: str) -> AsyncIterator[TaskQ]:
    bodies.app.use_database(dsn)
    yield bodies.app
    await bodies.app.close()
    bodies.app._async_client = bodies.app._sync_client = None


def comers(folder: Path, name: str = "here") -> list[int]:
    return [int(path.suffix[1:]) for path in folder.glob(f"{name}.*")]


def lives(pid: int) -> bool:
    """Whether a process is there and has not ended; a zombie that nobody has reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def comer(folder: Path, name: str = "here") -> int:
    await aeventually(lambda: comers(folder, name), LONG)
    return comers(folder, name)[0]


def children(worker: Worker) -> list[int]:
    return worker.parts.executor._processes.pids


async def ended(aconn: asyncpg.Connection, job: UUID) -> dict[str, Any]:
    final = ("succeeded", "failed", "cancelled")

    async def look() -> Any:
        row = await aconn.fetchrow("select * from taskq.all_jobs where id = $1", job)
        return row if row["status"] in final else None

    return dict(await aeventually(look, LONG))


async def test_functions_and_coroutines_run_in_a_child_that_is_used_again(run_worker: RunWorker) -> None:
    async with run_worker(concurrency=1, **SLOW):
        total, pid = await (await bodies.add.enqueue(1, 2)).result(timeout=LONG)
        assert (total, pid == os.getpid()) == (3, False)
        assert await (await bodies.add.enqueue(2, 2)).result(timeout=LONG) == [4, pid]
        for _ in range(2):
            # One loop for all, so that connections kept by bodies stay usable.
            assert await (await bodies.add_async.enqueue(5, 2)).result(timeout=LONG) == [7, 1, pid]
        assert await (await bodies.in_the_worker.enqueue()).result(timeout=LONG) == os.getpid()
    assert not lives(pid)


async def test_a_body_in_a_child_is_told_what_its_preparation_found_in_the_worker(run_worker: RunWorker) -> None:
    async with run_worker(**SLOW):
        told = await (await bodies.prepared.enqueue(4)).result(timeout=LONG)
    assert (told["n"], told["in"]) == (4, os.getpid())
    assert told["body"] != os.getpid()


async def test_what_a_context_is_told_in_a_child(run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    bodies.seen.set("the worker's")
    async with run_worker(**SLOW):
        job = await bodies.told.using(meta={"trace": "t"}, deadline="1h").enqueue()
        told = await job.result(timeout=LONG)
    assert told == {
        "job": str(job.id),
        "attempt": [1, 1, 1, 0],
        "key": str(job.id),
        "queue": "default",
        "meta": {"trace": "t"},
        "cancelled": False,
        "deadline": "UTC",
        "missing": told["missing"],
        "seen": "nothing",
    }
    assert told["missing"] in ("AttributeError", "UnsupportedInProcess")


def test_every_name_of_a_context_works_in_a_child_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JobContext, "needs_the_worker", property(lambda self: 1), raising=False)
    context = ProcessContext(job_id=UUID(int=1), task="t")
    for name in {name for name, _ in inspect.getmembers(JobContext) if not name.startswith("_")}:
        if name in AVAILABLE:
            getattr(context, name)
        else:
            with pytest.raises(UnsupportedInProcess, match="process=True"):
                getattr(context, name)
    assert not hasattr(context, "needs_the_worker")
    with pytest.raises(AttributeError, match="no attribute"):
        getattr(context, "no_such_thing")  # noqa: B009


@pytest.mark.parametrize("task", ["in_c_code", "loops_forever", "blocks_its_loop"])
async def test_a_timeout_ends_any_body_with_its_process(
    task: str, run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, tmp_path: Path
) -> None:
    async with run_worker(concurrency=1, **SLOW) as worker:
        job = await app.get_task(task).enqueue(str(tmp_path))
        row = await ended(aconn, job.id)
        assert not lives(await comer(tmp_path)), "the attempt is over before its process"
        assert (row["status"], row["attempt"]) == ("failed", 1)
        assert "AttemptTimeout" in row["error"]
        # Code that Python can interrupt cleans up behind itself.
        assert bool(comers(tmp_path, "cleaned")) == (task == "loops_forever")
        assert await (await bodies.add.enqueue(1, 1)).result(timeout=LONG)
        assert worker.counts.failed == 1


async def test_a_cancel_ends_a_body(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, tmp_path: Path
) -> None:
    async with run_worker(**SLOW):
        job = await bodies.waits.enqueue(str(tmp_path))
        pid = await comer(tmp_path)
        assert await app.cancel(job.id) == "requested"
        row = await ended(aconn, job.id)
        assert (row["status"], lives(pid)) == ("cancelled", False)


async def test_what_a_body_has_started_ends_with_it(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection, tmp_path: Path
) -> None:
    async with run_worker(**SLOW):
        job = await bodies.starts_a_program.enqueue(str(tmp_path))
        program = await comer(tmp_path, "program")
        assert lives(program)
        await app.cancel(job.id)
        await ended(aconn, job.id)
        await aeventually(lambda: not lives(program))


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("exit", "ProcessDied", "exit code 7"),
        ("segfault", "ProcessDied", "SIGSEGV (11)"),
        ("killed", "ProcessDied", "SIGKILL (9)"),
        ("sys.exit", "SystemExit", "enough"),
    ],
)
async def test_a_child_that_dies_charges_its_attempt_alone(
    how: str, kind: str, said: str, run_worker: RunWorker, aconn: asyncpg.Connection, tmp_path: Path
) -> None:
    (tmp_path / "beside").mkdir()
    async with run_worker(concurrency=2, **SLOW):
        beside = await bodies.waits.enqueue(str(tmp_path / "beside"))
        neighbour = await comer(tmp_path / "beside")
        job = await bodies.dies_once.enqueue(str(tmp_path), how)
        pid = await comer(tmp_path)
        if how == "killed":
            os.kill(pid, signal.SIGKILL)
        assert await job.result(timeout=LONG) == 1
        assert await outcomes(aconn, job.id) == ["failed", "succeeded"]
        error = await aconn.fetchval(
            "select error from taskq.attempts where job_id = $1 and outcome = 'failed'", job.id
        )
        assert kind in error
        assert said in error
        (tmp_path / "beside" / "gate").touch()
        assert await beside.result(timeout=LONG) == neighbour
        assert await outcomes(aconn, beside.id) == ["succeeded"]


@pytest.mark.parametrize(
    ("what", "status", "outcome"),
    [
        ("odd", "failed", "failed"),
        ("retry", "failed", "failed"),
        ("retry_after", "pending", "retry_after"),
        ("snooze", "pending", "snoozed"),
        ("cancelled", "failed", "failed"),
        ("unstorable", "failed", "failed"),
    ],
)
async def test_what_a_body_raises_means_the_same_as_in_the_worker(
    what: str, status: str, outcome: str, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    async with run_worker(concurrency=1, **SLOW):
        job = await bodies.raises.enqueue(what)

        async def over() -> Any:
            return len(await outcomes(aconn, job.id)) == tries

        tries = 3 if what == "retry" else 1  # a rule about a base class holds for the classes derived from it
        await aeventually(over, LONG)
        assert await outcomes(aconn, job.id) == [outcome] * tries
        row = await aconn.fetchrow("select * from taskq.all_jobs where id = $1", job.id)
        assert row is not None
        assert row["status"] == status
        if what == "cancelled":
            assert row["error"] is None, "as told by a body in the worker: nobody had asked for it"
        if what == "odd":
            assert "Odd" in row["error"]
            assert "process_app.py" in row["error"], "its traceback"
            with pytest.raises(JobFailed, match="Odd: seven"):
                await job.result()


async def test_what_bodies_print_and_log_comes_through(
    run_worker: RunWorker, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with run_worker(**SLOW):
        await (await bodies.tells.enqueue("this")).result(timeout=LONG)
    assert "printed this" in capfd.readouterr().out
    [said] = [record for record in caplog.records if record.getMessage() == "logged this"]
    assert (said.name, said.levelno, vars(said)["colour"]) == ("of.the.app", logging.WARNING, "red")
    assert said.process != os.getpid()
    [caught] = [record for record in caplog.records if record.getMessage() == "caught"]
    assert "ValueError: this" in (caught.exc_text or "")


async def test_a_body_enqueues_through_the_workers_database(run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    async with run_worker(**SLOW):
        made = await (await bodies.enqueues.enqueue(4)).result(timeout=LONG)
        assert (await ended(aconn, UUID(made)))["status"] == "succeeded"


async def test_a_child_is_replaced_once_it_has_run_or_grown_enough(run_worker: RunWorker) -> None:
    async with run_worker(concurrency=1, child_max_jobs=2, **SLOW):
        pids = [(await (await bodies.add.enqueue(1, 1)).result(timeout=LONG))[1] for _ in range(4)]
        assert pids[0] == pids[1] != pids[2] == pids[3]
    async with run_worker(concurrency=1, child_max_memory=300 * 1024 * 1024, **SLOW):
        small, big, after = [await (await bodies.grows.enqueue(n)).result(timeout=LONG) for n in (1, 400, 1)]
        assert small == big != after


async def test_idle_children_end(run_worker: RunWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_pool, "IDLE_FOR", 0.3)
    async with run_worker(**SLOW) as worker:
        _, pid = await (await bodies.add.enqueue(1, 2)).result(timeout=LONG)
        await aeventually(lambda: not lives(pid), LONG)
        await aeventually(lambda: not children(worker), LONG)
        assert (await (await bodies.add.enqueue(1, 2)).result(timeout=LONG))[1] != pid


async def test_an_idle_child_that_was_killed_costs_no_attempt(run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    async with run_worker(concurrency=1, **SLOW) as worker:
        _, pid = await (await bodies.add.enqueue(1, 2)).result(timeout=LONG)
        [child] = worker.parts.executor._processes._idle
        os.kill(pid, signal.SIGSTOP)
        job = await bodies.add.enqueue(1, 2)
        # Taken, and dead before it has begun.
        await aeventually(lambda: child not in worker.parts.executor._processes._idle)
        os.kill(pid, signal.SIGKILL)
        assert (await job.result(timeout=LONG))[1] != pid
        assert await outcomes(aconn, job.id) == ["succeeded"]


async def test_bodies_end_within_the_grace_and_signals_to_children_are_ignored(
    run_worker: RunWorker, aconn: asyncpg.Connection, tmp_path: Path
) -> None:
    async with run_worker(**SLOW) as worker:
        job = await bodies.waits.enqueue(str(tmp_path))
        pid = await comer(tmp_path)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)

        async def open_once_draining() -> None:
            await aeventually(lambda: worker.parts.exchanger.is_blocked("draining"))
            (tmp_path / "gate").touch()

        opening = asyncio.create_task(open_once_draining())
    await opening
    row = await ended(aconn, job.id)
    assert (row["status"], row["attempt"], row["releases"]) == ("succeeded", 0, 0)


async def test_bodies_that_outlive_the_grace_are_handed_back_and_gone(
    run_worker: RunWorker, aconn: asyncpg.Connection, tmp_path: Path
) -> None:
    async with run_worker(lease=10, grace=0.1):
        job = await bodies.waits.enqueue(str(tmp_path))
        pid = await comer(tmp_path)
    assert not lives(pid)
    row = await aconn.fetchrow("select * from taskq.all_jobs where id = $1", job.id)
    assert row is not None
    assert (row["status"], row["attempt"], row["releases"]) == ("pending", 0, 1)


async def test_two_hundred_bodies_end_in_four_children_at_most(
    run_worker: RunWorker, app: TaskQ, aconn: asyncpg.Connection
) -> None:
    async with run_worker(concurrency=4, child_max_jobs=40, **SLOW) as worker:
        jobs = await app.enqueue_many(bodies.add.job(n, n) for n in range(200))
        results = [await job.result(timeout=LONG) for job in jobs]
        assert [total for total, _ in results] == [2 * n for n in range(200)]
        assert 5 <= len({pid for _, pid in results}) <= 8
        assert len(children(worker)) <= 5
        assert await aconn.fetchval("select count(*) from taskq.attempts where outcome = 'succeeded'") == 200
        # What waits long for a new child may be handed back before its body has begun; nothing else has two attempts.
        ran = "outcome <> 'released' or (error ->> 'body_started')::boolean"
        assert await aconn.fetchval(f"select count(*) from taskq.attempts where {ran}") == 200


async def test_a_child_that_cannot_start_fails_its_body_and_says_why(
    run_worker: RunWorker, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROCESS_APP_BREAKS", "1")
    async with run_worker(**SLOW):
        job = await bodies.told.enqueue()
        row = await ended(aconn, job.id)
    assert row["status"] == "failed"
    assert "ProcessNotStarted" in row["error"]
    assert "RuntimeError: the import breaks" in row["error"]


def test_tasks_that_no_child_could_find_are_refused(dsn: str) -> None:
    local = TaskQ(dsn)

    @local.task(process=True)
    def inside() -> None: ...

    with pytest.raises(ConfigurationError, match=r"inside.*<locals>.*module:attribute"):
        Worker(local.tasks, dsn)
    Worker(local.tasks, dsn, app="somewhere:app")
    with pytest.raises(TaskDefinitionError, match="process is 'yes'; give True or False"):
        local.task(process="yes")(lives)  # type: ignore[call-overload]

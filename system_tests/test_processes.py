"""Child processes, supervisors and recycling with real processes and real kills: nothing outlives its parent."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from conftest import Journal, StartWorker, WorkerProcess, _module, now, until
from psycopg.rows import dict_row

from taskq import TaskQ
from taskq.worker.shutdown import EXIT_RECYCLED

pytestmark = pytest.mark.anyio
LONG = 60.0
StartHere = Callable[..., WorkerProcess]


@pytest.fixture
async def app(dsn: str, anyio_backend: str) -> AsyncIterator[TaskQ]:
    made: TaskQ = _module("app_of_the_processes", Path(__file__).with_name("processes_under_test.py")).app
    made.use_database(dsn)
    yield made
    await made.close()


@pytest.fixture
def start(start_worker: StartWorker) -> StartHere:
    def begin(name: str = "w", *, ready: bool = True, **options: Any) -> WorkerProcess:
        worker = start_worker(name, ready=False, app="processes_under_test:app", **options)
        if ready:
            until(lambda: "worker.started" in worker.log, LONG)
        return worker

    return begin


def row_of(dsn: str, job: UUID) -> dict[str, Any]:
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        row = conn.execute("select * from taskq.all_jobs where id = %s", (job,)).fetchone()
        assert row is not None
        return row


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(folder: Path) -> list[int]:
    return [int(path.suffix[1:]) for path in folder.glob("child.*")]


def started(supervisor: WorkerProcess) -> list[tuple[str, int]]:
    """Name and process id of every worker that the supervisor has started, in order."""
    found = re.findall(r"supervisor\.process_started name=(\S+) pid=(\d+)", supervisor.log)
    return [(name, int(pid)) for name, pid in found]


def ready(supervisor: WorkerProcess) -> int:
    return supervisor.log.count("worker.started")


# Child processes --------------------------------------------------------------------------------------------------


async def test_children_of_a_killed_worker_are_gone_and_their_jobs_recovered(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    worker = start("killed", lease=3)
    jobs = [await app.get_task(task).enqueue() for task in ("waits_in_child", "holds_the_gil")]
    until(lambda: len(children(journal.folder)) == 2, LONG)
    pids = children(journal.folder)
    assert all(map(lives, pids))
    worker.kill()
    until(lambda: not any(map(lives, pids)), 5)
    journal.open_gate()
    start("other", lease=3)
    assert await jobs[0].result(timeout=LONG) == "epoch 2"
    assert await jobs[1].result(timeout=LONG) == 2
    assert [(row_of(dsn, job.id)["attempt"], row_of(dsn, job.id)["recoveries"]) for job in jobs] == [(0, 1)] * 2


async def test_a_child_that_was_killed_is_one_failure(app: TaskQ, start: StartHere, journal: Journal, dsn: str) -> None:
    worker = start(lease=3)
    beside = await app.get_task("waits").enqueue()
    job = await app.get_task("waits_in_child").enqueue()
    until(lambda: children(journal.folder), LONG)
    os.kill(children(journal.folder)[0], signal.SIGKILL)
    until(lambda: len(journal.of("start")) == 3, LONG)
    journal.open_gate()
    assert await job.result(timeout=LONG) == "epoch 2"
    assert await beside.result(timeout=LONG) == "epoch 1"
    assert (row_of(dsn, job.id)["attempt"], row_of(dsn, beside.id)["attempt"]) == (1, 0)
    assert "ProcessDied" in worker.log
    assert "SIGKILL (9)" in worker.log
    assert worker.stop() == 0


async def test_a_stopping_worker_hands_back_what_its_children_do(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    worker = start(lease=5, grace=0.3)
    job = await app.get_task("holds_the_gil").enqueue()
    until(lambda: children(journal.folder), LONG)
    assert worker.stop() == 0
    assert not any(map(lives, children(journal.folder)))
    row = row_of(dsn, job.id)
    assert (row["status"], row["attempt"], row["releases"]) == ("pending", 0, 1)


# Supervisors ------------------------------------------------------------------------------------------------------


async def test_a_supervisor_replaces_what_was_killed_and_drains_all(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    supervisor = start("sup", ready=False, processes=2, lease=3, grace=20)
    until(lambda: ready(supervisor) == 2, LONG)
    os.kill(started(supervisor)[0][1], signal.SIGKILL)
    until(lambda: ready(supervisor) == 3, LONG)
    assert {name for name, _ in started(supervisor)} == {"sup-1", "sup-2", "sup-1.2"}
    assert "exit_code=-9" in supervisor.log
    assert "[sup-1.2] worker.started" in supervisor.log
    job = await app.get_task("waits").enqueue()
    until(lambda: journal.of("start"), LONG)
    supervisor.signal(signal.SIGTERM)
    until(lambda: supervisor.log.count("worker.draining") == 2, LONG)
    journal.open_gate()
    assert supervisor.exit_code(LONG) == 0
    assert await job.result(timeout=5) == "epoch 1"
    assert not any(lives(pid) for _, pid in started(supervisor))


async def test_a_second_signal_forces_all_workers_of_a_supervisor(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    supervisor = start("sup", ready=False, processes=2, grace=100)
    until(lambda: ready(supervisor) == 2, LONG)
    job = await app.get_task("waits").enqueue()
    until(lambda: journal.of("start"), LONG)
    supervisor.signal(signal.SIGINT)
    until(lambda: supervisor.log.count("worker.draining") == 2, LONG)
    first = now()
    until(lambda: now() - first > 1.3)
    assert supervisor.process.poll() is None
    supervisor.signal(signal.SIGINT)
    assert supervisor.exit_code(30) == 0
    row = row_of(dsn, job.id)
    assert (row["status"], row["attempt"], row["releases"]) == ("pending", 0, 1)


async def test_workers_of_a_killed_supervisor_drain(app: TaskQ, start: StartHere, journal: Journal, dsn: str) -> None:
    supervisor = start("sup", ready=False, processes=2, lease=60, grace=0.5)
    until(lambda: ready(supervisor) == 2, LONG)
    job = await app.get_task("waits").enqueue()
    until(lambda: journal.of("start"), LONG)
    supervisor.kill()
    until(lambda: not any(lives(pid) for _, pid in started(supervisor)), 30)
    # Not for the lease: the workers had the time to hand it back.
    assert row_of(dsn, job.id)["status"] == "pending"


def test_settings_that_are_wrong_for_all_end_the_supervisor(start: StartHere) -> None:
    supervisor = start("sup", ready=False, processes=2, environ={"BREAKS": "5"})
    assert supervisor.exit_code(LONG) == 2
    assert len(started(supervisor)) == 2
    assert "supervisor.hopeless" in supervisor.log


def test_starts_that_fail_are_repeated_with_growing_pauses(start: StartHere) -> None:
    nowhere = "postgresql://nobody@127.0.0.1:1/x"
    supervisor = start("sup", ready=False, to=nowhere, processes=1)
    until(lambda: "failures=3" in supervisor.log, LONG)
    found = re.findall(r"supervisor\.process_ended .*exit_code=3 .*failures=(\d) again_in=([\d.]+)", supervisor.log)
    assert [int(n) for n, _ in found] == [1, 2, 3]
    for n, pause in found:
        longest = 0.5 * 2 ** (int(n) - 1)
        assert longest / 2 <= float(pause) <= longest
    assert supervisor.stop() == 0


# Recycling --------------------------------------------------------------------------------------------------------


async def test_workers_are_replaced_after_so_many_jobs_and_nothing_is_lost(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    supervisor = start("sup", ready=False, processes=2, max_jobs=40, concurrency=4, lease=10)
    until(lambda: ready(supervisor) == 2, LONG)
    for _ in range(3):
        jobs = await app.enqueue_many(app.get_task("quick").job() for _ in range(60))
        for job in jobs:
            await job.result(timeout=LONG)
    until(lambda: "supervisor.replacing" in supervisor.log, LONG)
    until(lambda: re.search(r"supervisor\.process_ended name=sup-\d pid=\d+ exit_code=0", supervisor.log), LONG)
    first = supervisor.log.index("supervisor.process_ended")
    # The successor was there before its predecessor drained.
    assert supervisor.log[:first].count("worker.started") >= 3
    assert supervisor.stop(LONG) == 0
    with psycopg.connect(dsn) as conn:
        counts = conn.execute(
            "select count(*), max(attempt), max(recoveries) from taskq.all_jobs where status = 'succeeded'"
        ).fetchone()
    assert counts == (180, 0, 0)
    assert len(journal.of("end")) == 180


async def test_a_lone_worker_that_has_done_enough_drains_and_says_so(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    worker = start("w", max_jobs=5, concurrency=2)
    jobs = await app.enqueue_many(app.get_task("quick").job() for _ in range(200))
    assert worker.exit_code(LONG) == EXIT_RECYCLED
    assert "reason=max_jobs" in worker.log
    second = start("v")
    for job in jobs:
        await job.result(timeout=LONG)
    assert second.stop() == 0
    assert len(journal.of("end")) == 200
    assert all(row_of(dsn, job.id)["attempt"] == 0 for job in jobs[::20])


async def test_a_worker_that_has_grown_drains(app: TaskQ, start: StartHere, journal: Journal, dsn: str) -> None:
    worker = start("w", max_memory="400M")
    small = await app.get_task("leaks").enqueue(1)
    await small.result(timeout=LONG)
    assert worker.process.poll() is None
    await app.get_task("leaks").enqueue(500)
    assert worker.exit_code(LONG) == EXIT_RECYCLED
    assert "reason=max_memory" in worker.log
    assert len(journal.of("end")) == 2


# Starts that are interrupted --------------------------------------------------------------------------------------


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    found = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("at the first chance", signal.SIGTERM),
        ("while the app is imported", signal.SIGTERM),
        ("while the app is imported", signal.SIGINT),
    ],
)
def test_a_signal_during_the_start_ends_it_with_0(
    moment: str, number: int, start: StartHere, journal: Journal, dsn: str
) -> None:
    worker = start("w", ready=False, environ={"IMPORTS_FOR": "60"})
    if moment == "at the first chance":
        until(lambda: catches(worker.process.pid, number), LONG)
    else:
        until((journal.folder / "importing").exists, LONG)
    worker.signal(number)
    assert worker.exit_code(30) == 0
    assert "stopped while starting" in worker.log
    with psycopg.connect(dsn) as conn:
        assert conn.execute("select count(*) from taskq.workers").fetchone() == (0,)


def test_a_signal_while_the_database_does_not_answer_ends_the_start_with_0(start: StartHere, dsn: str) -> None:
    from proxy import proxy

    with proxy(dsn) as way:
        way.blackhole()
        worker = start("w", ready=False, to=way.dsn)
        until(lambda: "taskq imported from" in worker.log and catches(worker.process.pid, signal.SIGTERM), LONG)
        pause = now()
        until(lambda: now() - pause > 1)
        worker.signal(signal.SIGTERM)
        assert worker.exit_code(LONG) == 0


@pytest.mark.parametrize("processes", [0, 2])
def test_a_start_that_is_interrupted_is_told_in_the_logs_format(
    processes: int, start: StartHere, journal: Journal
) -> None:
    more = {"processes": processes} if processes else {}
    worker = start("w", ready=False, log_format="json", environ={"IMPORTS_FOR": "60"}, **more)
    until((journal.folder / "importing").exists, LONG)
    worker.signal(signal.SIGTERM)
    assert worker.exit_code(30) == 0
    told = [json.loads(line) for line in worker.log.splitlines()]
    stopped = [line for line in told if line["event"] == "worker.stopped_at_boot"]
    assert {line["message"] for line in stopped} == {"stopped while starting"}


# Bodies that hold up their worker ---------------------------------------------------------------------------------


async def test_a_function_that_computes_for_four_leases_runs_once(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    for name in ("one", "two"):
        start(name, lease=2)
    job = await app.get_task("loops_for").enqueue(8)
    assert await job.result(timeout=LONG) == 1
    assert len(journal.of("start")) == 1
    assert row_of(dsn, job.id)["recoveries"] == 0


async def test_a_coroutine_that_blocks_its_loop_for_four_leases_runs_once_and_is_named(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    workers = [start(name, lease=2) for name in ("one", "two")]
    job = await app.get_task("blocks_the_loop").enqueue(8)
    assert await job.result(timeout=LONG) == 1
    assert len(journal.of("start")) == 1
    assert row_of(dsn, job.id)["recoveries"] == 0
    [told] = [line for w in workers for line in w.log.splitlines() if "loop.blocked" in line]
    assert "task=blocks_the_loop" in told
    assert f"job_id={job.id}" in told

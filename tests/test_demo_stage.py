"""The stage of the demonstration when its play goes wrong: what is said, and that nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
import sql as q
from helpers import eventually

from taskq.db.pools import connect_sync
from taskq.demo import stage as module
from taskq.demo.stage import Stage, WorkerProcess, child_environ
from taskq.errors import TaskQError
from taskq.worker.lease import EXIT_LEASE_LOST

BUSY = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
TALKS = "import sys; print('first'); print('last words'); sys.exit(7)"


class Bench:
    """A stage whose workers are whatever programs the test names, on the test's database."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.folder = folder
        self.stage = Stage(dsn, "taskq", folder)
        self.stage._connection = connect_sync(dsn, name="taskq demo", prepare_threshold=None)

    def add(self, name: str, program: str) -> WorkerProcess:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen([sys.executable, "-c", program], stdout=output, stderr=subprocess.STDOUT)
        worker = WorkerProcess(name, process, log)
        self.stage.workers.append(worker)
        return worker

    def enqueue(self, conn: psycopg.Connection) -> None:
        conn.execute("select taskq.ensure_policy('p', 1, '{}')")
        conn.execute("select taskq.enqueue('index_file', '{}', policy => 'p', queue => %s)", [self.stage.queue])


@pytest.fixture
def bench(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(module, "LOOK_EVERY", 0.01)
    monkeypatch.setattr(module, "STALLED_AFTER", 0.3)
    made = Bench(dsn, tmp_path)
    yield made
    made.stage._connection.close()
    for worker in made.stage.workers:
        worker.process.kill()
        worker.process.wait()


def test_a_worker_that_ended_is_told_of_with_its_last_words(bench: Bench, conn: psycopg.Connection) -> None:
    bench.enqueue(conn)
    talks, silent = bench.add("talks", TALKS), bench.add("silent", "raise SystemExit(3)")
    for worker in (talks, silent):
        worker.process.wait(30)
    with pytest.raises(TaskQError, match=r"talks ended by itself with exit code 7; its log says: first \| last words"):
        bench.stage.run_until(0, lambda left: None)
    with pytest.raises(TaskQError, match="exit code 3; its log says: nothing"):
        bench.stage.kill(silent)


def test_a_play_in_which_nothing_moves_ends(bench: Bench, conn: psycopg.Connection) -> None:
    bench.enqueue(conn)
    bench.add("busy", BUSY)
    told: list[int] = []
    with pytest.raises(TaskQError, match=r"no job has finished for 0\.3 s, 1 are left"):
        bench.stage.run_until(0, told.append)
    assert told == []
    bench.stage.run_until(1, told.append)
    assert told == [1]


@pytest.mark.parametrize("left", [0, 1])
def test_a_worker_without_a_running_job_is_not_killed(left: int, bench: Bench, conn: psycopg.Connection) -> None:
    worker = bench.add("idle", BUSY)
    worker.worker_id = "00000000-0000-0000-0000-000000000001"
    if left:
        bench.enqueue(conn)
    with pytest.raises(TaskQError, match="the worker idle held no running job"):
        bench.stage.kill(worker)
    assert worker.process.poll() is None
    assert bench.stage.stop(worker) == -15
    assert bench.stage.workers == []


def test_a_worker_that_never_gets_ready_is_told_of(bench: Bench) -> None:
    bench.add("slow", BUSY)
    with pytest.raises(TaskQError, match=r"not ready after 0\.3 s: slow; see "):
        bench.stage.until_all_live()
    with pytest.raises(TaskQError, match=r"no worker ran a job for 0\.3 s"):
        bench.stage.busy()


def test_a_frozen_worker_whose_jobs_stay_open_is_told_of(bench: Bench, conn: psycopg.Connection) -> None:
    worker = bench.add("frozen", BUSY)
    worker.worker_id = str(q.register(conn, queues=[bench.stage.queue], tasks=["index_file"]))
    with pytest.raises(TaskQError, match="the worker frozen ran no job that its freezing could have hit"):
        bench.stage.freeze(worker)
    bench.enqueue(conn)
    q.claim(conn, UUID(worker.worker_id), tasks=["index_file"], lanes=[(bench.stage.queue, 5)])
    with pytest.raises(TaskQError, match="what the frozen worker frozen held was not settled"):
        bench.stage.freeze(worker)


def test_one_that_lost_its_lease_is_started_again_where_there_is_a_supervisor(bench: Bench) -> None:
    worker = bench.add("lost", f"raise SystemExit({EXIT_LEASE_LOST})")
    worker.process.wait(30)
    with pytest.raises(TaskQError, match="lost ended by itself"):
        bench.stage.until_all_live()
    bench.stage._supervised = True
    with pytest.raises(TaskQError, match=r"not ready after 0\.3 s: lost\+1"):
        bench.stage.until_all_live()
    assert [each.name for each in bench.stage.workers] == ["lost+1"]


def test_a_worker_that_ignores_its_stop_is_killed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_TIMEOUT", 0.1)
    worker = bench.add("stubborn", STUBBORN)
    eventually(lambda: "ready" in worker.log.read_text(), 30)
    assert bench.stage.stop(worker) == -9


def test_a_stage_that_cannot_open_leaves_no_process(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(dsn, "taskq", tmp_path)
    monkeypatch.setattr(module, "STALLED_AFTER", 0.0)
    started: list[WorkerProcess] = []
    start = stage._start

    def starts(name: str) -> WorkerProcess:
        started.append(start(name))
        return started[-1]

    monkeypatch.setattr(stage, "_start", starts)
    with pytest.raises(TaskQError, match="not ready after 0 s"), stage.open():
        pytest.fail("it opened")
    assert [worker.process.returncode is None for worker in started] == [False, False]


def test_settings_of_the_user_do_not_reach_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKQ_QUEUES", "mine")
    monkeypatch.setenv("OTHER", "x")
    assert "TASKQ_QUEUES" not in child_environ()
    assert child_environ()["OTHER"] == "x"

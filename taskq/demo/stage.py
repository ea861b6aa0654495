"""The workers of a demonstration: real processes, which are killed or frozen while they hold running jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

import taskq
from taskq.client.answers import translated
from taskq.db.pools import connect_sync
from taskq.db.queries import load
from taskq.errors import TaskQError
from taskq.worker.lease import EXIT_LEASE_LOST

__all__ = ["CONCURRENCY", "Stage", "WorkerProcess", "child_environ"]

CONCURRENCY = 4
LEASE = 3.0
"""Seconds; short, so that the killed worker's jobs are soon taken from it."""
STALLED_AFTER = 60.0
LOOK_EVERY = 0.05
STOP_TIMEOUT = 40.0


def child_environ() -> dict[str, str]:
    """The environment of a process that is to import the taskq that runs here, with no settings of the user's."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TASKQ_") or k == "TASKQ_UNDER_TEST"}
    home = str(Path(taskq.__file__ or "").resolve().parent.parent)
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))}


@dataclass
class WorkerProcess:
    """One worker: its process, its log, its registration in the database."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    worker_id: str = ""

    def check(self) -> None:
        """Raise if it has ended.

        Raises:
            TaskQError: It has; the message ends with its log.
        """
        if (code := self.process.poll()) is not None:
            told = " | ".join(self.log.read_text(errors="replace").splitlines()[-5:]) or "nothing"
            raise TaskQError(f"the worker {self.name} ended by itself with exit code {code}; its log says: {told}")


class Stage:
    """Workers on a queue of their own in a migrated database, from ``open`` until the block ends.

    Args:
        dsn: The database.
        schema: The schema.
        folder: Where the workers' logs go.
        app: The app that they run.
        workers: How many there are.
        concurrency: Jobs that each runs at once.
        queue: Their queue; by default one of this play alone.
        environ: What else their environment has.
        supervised: Whether one that ended because it lost its lease is started again, as a supervisor would.
    """

    def __init__(
        self,
        dsn: str,
        schema: str,
        folder: Path,
        *,
        app: str = "taskq.demo.tasks:app",
        workers: int = 2,
        concurrency: int = CONCURRENCY,
        queue: str | None = None,
        environ: Mapping[str, str] | None = None,
        supervised: bool = False,
    ) -> None:
        self._dsn = dsn
        self._schema = schema
        self._folder = folder
        self._app = app
        self._number = workers
        self._concurrency = concurrency
        self._environ = dict(environ or {})
        self._supervised = supervised
        self._queries = load("demo", schema)
        self.queue = queue or f"demo-{int(time.time())}-{os.getpid()}"
        self.workers: list[WorkerProcess] = []

    @contextmanager
    def open(self) -> Iterator[Stage]:
        """Start the workers, wait until both claim; stop whatever is left of them at the end."""
        self._connection = connect_sync(self._dsn, name="taskq demo", prepare_threshold=None)
        try:
            for number in range(1, self._number + 1):
                self.workers.append(self._start(f"demo-{os.getpid()}-{number}"))
            self.until_all_live()
            yield self
        finally:
            for worker in self.workers:
                with suppress(ProcessLookupError):
                    worker.process.send_signal(signal.SIGCONT)
                    worker.process.terminate()
            for worker in self.workers:
                self._end(worker)
            self._connection.close()

    def rows(self, query: str, *arguments: Any) -> list[dict[str, Any]]:
        """All rows of a query of ``db/sql/demo.sql``."""
        with translated(self._schema):
            cursor = psycopg.RawCursor(self._connection, row_factory=dict_row)
            return cursor.execute(self._queries[query].encode(), arguments).fetchall()

    def number(self, query: str, *arguments: Any) -> int:
        """The one number of a query."""
        return int(self.rows(query, *arguments)[0]["n"])

    def run_until(self, remaining: int, progress: Callable[[int], None], look: Callable[[], int] | None = None) -> None:
        """Wait until at most so many jobs are left.

        Args:
            remaining: How many.
            progress: Is told how many are left, each time that this changes.
            look: Says how many are left, where that is not what the queue has.

        Raises:
            TaskQError: A worker ended by itself, or nothing moved for a minute.
        """
        self._watch(look or (lambda: self.number("remaining", self.queue)), remaining, progress)

    def run_until_ended(self, runs: list[str]) -> None:
        """Wait until these runs have ended.

        Raises:
            TaskQError: As ``run_until`` does.
        """
        self._watch(lambda: self.number("open_runs", runs), 0, lambda _: None)

    def _watch(self, look: Callable[[], int], remaining: int, progress: Callable[[int], None]) -> None:
        left, moved_at = look(), time.monotonic()
        while left > remaining:
            time.sleep(LOOK_EVERY)
            now_left = look()
            if now_left != left:
                left, moved_at = now_left, time.monotonic()
                progress(left)
            for worker in list(self.workers):
                self._look_after(worker)
            if time.monotonic() - moved_at > STALLED_AFTER:
                raise TaskQError(f"no job has finished for {STALLED_AFTER:g} s, {left} are left; see {self._folder}")
        progress(left)

    def kill(self, worker: WorkerProcess, task: str | None = None) -> int:
        """Kill a worker with SIGKILL while it holds running jobs; give how many, by the database.

        It is stopped first, so that what the database says still holds when the kill follows.

        Args:
            worker: The worker.
            task: Only while one of the jobs is of this task.

        Raises:
            TaskQError: It never held a running job.
        """
        deadline = time.monotonic() + STALLED_AFTER
        while time.monotonic() < deadline:
            worker.check()
            worker.process.send_signal(signal.SIGSTOP)
            time.sleep(LOOK_EVERY)  # what it had sent before it stopped is still being answered
            held = self.number("held_by", worker.worker_id)
            if held and self._runs(worker, task):
                worker.process.kill()
                worker.process.wait()
                self.workers.remove(worker)
                return held
            worker.process.send_signal(signal.SIGCONT)
            time.sleep(LOOK_EVERY)
            self._is_live(worker)  # it may have a new id
            if not self.number("remaining", self.queue):
                break
        raise TaskQError(f"the worker {worker.name} held no running job that its kill could have lost; try again")

    def replace(self, worker: WorkerProcess) -> WorkerProcess:
        """Start another worker in the place of one that has ended."""
        if worker in self.workers:
            self.workers.remove(worker)
        name, _, turn = worker.name.partition("+")
        self.workers.append(self._start(f"{name}+{int(turn or 0) + 1}"))
        return self.workers[-1]

    def _look_after(self, worker: WorkerProcess) -> None:
        if self._supervised and worker.process.poll() == EXIT_LEASE_LOST:
            self.replace(worker)
        else:
            worker.check()

    def freeze(self, worker: WorkerProcess) -> int:
        """Freeze a worker (SIGSTOP) that runs jobs, until it is lost and nothing that it held is open; give how many.

        Raises:
            TaskQError: It never ran a job, or was not declared lost within a minute, or its jobs stayed open.
        """
        deadline = time.monotonic() + STALLED_AFTER
        while time.monotonic() < deadline:
            worker.check()
            worker.process.send_signal(signal.SIGSTOP)
            time.sleep(LOOK_EVERY)  # what it had sent before it stopped is still being answered
            if held := self.number("held_by", worker.worker_id):
                self._until_taken_from(worker, deadline)
                worker.process.send_signal(signal.SIGCONT)
                return held
            worker.process.send_signal(signal.SIGCONT)
            time.sleep(LOOK_EVERY)
            self._is_live(worker)  # it may have a new id
        raise TaskQError(f"the worker {worker.name} ran no job that its freezing could have hit; try again")

    def _until_taken_from(self, worker: WorkerProcess, deadline: float) -> None:
        while self.number("open_of", worker.worker_id):
            if time.monotonic() > deadline:
                raise TaskQError(f"what the frozen worker {worker.name} held was not settled; see {self._folder}")
            time.sleep(LOOK_EVERY)

    def busy(self, task: str | None = None) -> list[WorkerProcess]:
        """Those that run jobs, of this task if one is named: at least one.

        Raises:
            TaskQError: None does, for a minute.
        """
        deadline = time.monotonic() + STALLED_AFTER
        while True:
            for worker in list(self.workers):
                self._look_after(worker)
            live = [worker for worker in self.workers if self._is_live(worker)]
            if found := [worker for worker in live if self._runs(worker, task)]:
                return found
            if time.monotonic() > deadline:
                raise TaskQError(f"no worker ran a job for {STALLED_AFTER:g} s; see {self._folder}")
            time.sleep(LOOK_EVERY)

    def _runs(self, worker: WorkerProcess, task: str | None) -> int:
        if task is None:
            return self.number("held_by", worker.worker_id)
        return self.number("held_of", worker.worker_id, task)

    def until_all_live(self) -> None:
        """Wait until all workers claim, under new ids where they were lost.

        Raises:
            TaskQError: One ended by itself, or was not ready within a minute.
        """
        deadline = time.monotonic() + STALLED_AFTER
        while waiting := [worker for worker in self.workers if not self._is_live(worker)]:
            for worker in waiting:
                self._look_after(worker)
            if time.monotonic() > deadline:
                names = ", ".join(worker.name for worker in waiting)
                raise TaskQError(f"not ready after {STALLED_AFTER:g} s: {names}; see {self._folder}")
            time.sleep(LOOK_EVERY)

    def stop(self, worker: WorkerProcess) -> int:
        """Stop a worker in good order; give its exit code."""
        worker.process.terminate()
        self._end(worker)
        self.workers.remove(worker)
        return int(worker.process.returncode)

    def _start(self, name: str) -> WorkerProcess:
        log = self._folder / f"{name}.log"
        options = {
            "--queue": self.queue,
            "--concurrency": str(self._concurrency),
            "--lease": str(LEASE),
            "--poll-interval": "0.2",
            "--name": name,
            "--schema": self._schema,
        }
        arguments = [part for pair in options.items() for part in pair]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "taskq", "worker", self._app, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                # The DSN goes by the environment: the command line of a process can be read by everyone.
                env={**child_environ(), **self._environ, "TASKQ_DSN": self._dsn},
            )
        return WorkerProcess(name, process, log)

    def _is_live(self, worker: WorkerProcess) -> bool:
        found = self.rows("worker", worker.name)
        if not found or found[0]["status"] != "live":
            return False
        worker.worker_id = found[0]["id"]
        return True

    def _end(self, worker: WorkerProcess) -> None:
        try:
            worker.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()

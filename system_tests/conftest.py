"""Real worker processes on a real PostgreSQL: started as users start them, and treated as machines treat them.

The server, the databases and the small helpers are those of ``tests/``. Every test ends with the database's own check
of the laws.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))


def _module(name: str, file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_shared = _module("taskq_tests_conftest", TESTS / "conftest.py")
pytest_sessionstart = _shared.pytest_sessionstart
anyio_backend = _shared.anyio_backend
pg_server = _shared.pg_server
template = _shared.template
dsn = _shared.dsn
aconn = _shared.aconn

from cluster import Cluster, Clusters  # noqa: E402
from helpers import eventually  # noqa: E402
from sql import violations  # noqa: E402
from survival import pytest_terminal_summary, survived  # noqa: E402, F401

import taskq  # noqa: E402
from taskq import TaskQ  # noqa: E402

ROOT = Path(taskq.__file__ or "").resolve().parents[1]


class WorkerProcess:
    """One ``taskq worker`` in a process of its own, its log in a file."""

    def __init__(
        self,
        dsn: str,
        folder: Path,
        name: str,
        options: dict[str, Any],
        *,
        app: str = "app_under_test:app",
        environ: dict[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.log_file = folder / f"{name}.log"
        args = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
            "TASKQ_DSN": dsn,
            "TASKQ_UNDER_TEST": str(ROOT),
            "TASKQ_PRINT_ORIGIN": "1",
            "JOURNAL": str(folder / "journal"),
            "GATES": str(folder),
            **(environ or {}),
        }
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "taskq", "worker", app, "--name", name, *args],
                env=environment,
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def until_started(self) -> WorkerProcess:
        eventually(lambda: self.process.poll() is None and "worker.started" in self.log, 60)
        assert f"taskq imported from {ROOT / 'taskq'}" in self.log
        return self

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def exit_code(self, within: float = 15) -> int:
        """Wait for its end."""
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the worker did not end within {within} s; its log:\n{self.log[-4000:]}")

    def stop(self, within: float = 15) -> int:
        self.signal(signal.SIGTERM)
        return self.exit_code(within)


class Journal:
    """The outside world: what bodies have really done, one line each, written in a single appending write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / "journal"

    def lines(self) -> list[tuple[str, str, int]]:
        """Event, job and claim epoch, in the order in which they happened."""
        if not self._file.exists():
            return []
        found = (line.split() for line in self._file.read_text().splitlines())
        return [(event, job, int(epoch)) for event, job, epoch in found]

    def of(self, event: str) -> list[tuple[str, int]]:
        return [(job, epoch) for what, job, epoch in self.lines() if what == event]

    def open_gate(self, name: str = "gate") -> None:
        (self.folder / name).touch()


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path)


StartWorker = Callable[..., WorkerProcess]


@pytest.fixture
def start_worker(dsn: str, tmp_path: Path) -> Iterator[StartWorker]:
    """Starts worker processes; those that still live are killed after the test, which then checks the laws."""
    started: list[WorkerProcess] = []

    def start(
        name: str = "w",
        *,
        ready: bool = True,
        to: str | None = None,
        app: str = "app_under_test:app",
        environ: dict[str, str] | None = None,
        within: Sequence[str] = (),
        **options: Any,
    ) -> WorkerProcess:
        """``within`` is a command that runs it; options are the CLI's."""
        chosen = {"lease": 2, "grace": 5, "concurrency": 10, "poll_interval": 0.2} | options
        worker = WorkerProcess(to or dsn, tmp_path, name, chosen, app=app, environ=environ, within=within)
        started.append(worker)
        return worker.until_started() if ready else worker

    yield start
    for worker in started:
        if worker.process.poll() is None:
            worker.signal(signal.SIGCONT)
            worker.kill()
    for worker in started:
        # In full: a stack of a blocked loop may have the word in the code that it shows.
        assert "Traceback (most recent call last)" not in worker.log, worker.log[-6000:]
    with psycopg.connect(dsn) as check:
        assert violations(check) == []


@pytest.fixture(scope="session")
def clusters() -> Iterator[Clusters]:
    """Servers of a test's own."""
    made = Clusters()
    yield made
    made.close()


@pytest.fixture
def cluster(clusters: Clusters, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A server of this test's own, migrated; an indirect parameter has settings for it."""
    with clusters.one(getattr(request, "param", None)) as one:
        yield one


@pytest.fixture
async def app(dsn: str, anyio_backend: str) -> AsyncIterator[TaskQ]:
    """The application, for enqueueing from the test's process."""
    # A fresh application for each test, since each has a database of its own.
    made: TaskQ = _module("app_of_the_test", Path(__file__).with_name("app_under_test.py")).app
    made.use_database(dsn)
    yield made
    await made.close()


def until(condition: Callable[[], Any], within: float = 15) -> Any:
    """Wait for something that happens in another process."""
    return eventually(condition, within, interval=0.05)


LONG = os.environ.get("SYSTEM_TEST_LONG") == "1"
"""``make system-test-long``: the same faults for as long as they last in life."""


def now() -> float:
    return time.monotonic()

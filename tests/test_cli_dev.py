"""``taskq dev`` and ``taskq demo`` in this process: which database they use, what they say, and when they end."""

from __future__ import annotations

import io
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import rich.console
from cli_kit import SHOP, Cli, make_cli  # noqa: F401

from taskq.cli import demo, serve
from taskq.embedded import EmbeddedPostgres


class Served:
    """Stands for the embedded server: another database of the test's own server."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.folders: list[Path | None] = []
        self.stopped = 0

    def start(self, folder: Path | None = None) -> Served:
        self.folders.append(folder)
        return self

    def stop(self) -> None:
        self.stopped += 1

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.fixture
def served(empty_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Served:
    made = Served(empty_dsn)
    monkeypatch.setattr(EmbeddedPostgres, "start", made.start)
    return made


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The workers that were run; each ends at once."""
    seen: list[tuple[Any, ...]] = []

    def run_worker(app: Any, dsn: str, options: Any, *, reference: str, at_exit: Callable[[], None] | None) -> int:
        seen.append((app.find_dsn(), dsn, options, reference, at_exit))
        return 75

    monkeypatch.setattr(serve, "run_worker", run_worker)
    monkeypatch.setattr("taskq.telemetry.configure_for_terminal", lambda *_: None)
    return seen


def module(cli: Cli) -> str:
    name = f"shop_{uuid4().hex}"
    (cli.folder / f"{name}.py").write_text(SHOP)
    return f"{name}:app"


def test_dev_installs_taskq_in_its_own_server_and_runs_a_worker(
    cli: Cli, served: Served, ran: list[tuple[Any, ...]]
) -> None:
    app = module(cli)
    done = cli("dev", app, "--data-dir", str(cli.folder / "data"), "-q", "mail", "--concurrency", "3")
    assert done.code == 75, done
    assert done.out == f"export TASKQ_DSN='{served.dsn}'\n"
    assert "TASKQ_DSN names another database, which taskq dev does not touch" in done.err
    assert "installed taskq in the schema taskq" in done.err
    [(apps, dsn, options, reference, at_exit)] = ran
    assert (apps, dsn, reference, at_exit) == (served.dsn, served.dsn, app, served.stop)
    assert (options.queues, options.concurrency) == (("mail",), 3)
    assert (served.folders, served.stopped) == ([cli.folder / "data"], 1)
    with psycopg.connect(served.dsn) as conn:
        assert conn.execute("select count(*) from taskq.jobs").fetchone() == (0,)


def test_dev_on_a_named_database_shows_no_password(cli: Cli, served: Served, ran: list[tuple[Any, ...]]) -> None:
    done = cli("dev", module(cli), "--dsn", cli.dsn)
    assert done.code == 75, done
    assert (done.out, served.folders) == ("", [])
    assert "using " in done.err
    assert "installed" not in done.err
    assert "names another database" not in done.err
    assert ran[0][4] is None


def test_dev_without_an_app_waits_for_a_signal(
    cli: Cli, served: Served, ran: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[set[signal.Signals]] = []
    monkeypatch.setattr(signal, "sigwait", lambda signals: waited.append(set(signals)))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    done = cli("dev")
    assert done.code == 0, done
    assert waited == [{signal.SIGINT, signal.SIGTERM}]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    assert "no app is named, so no worker runs" in done.err
    assert (ran, served.folders, served.stopped) == ([], [None], 1)


class Played:
    """Stands for the report of a play."""

    lost = 2

    def __init__(self, *problems: str) -> None:
        self._problems = list(problems)

    def problems(self) -> list[str]:
        return self._problems

    def as_json(self) -> dict[str, Any]:
        return {"ok": not self._problems}

    def show(self, console: rich.console.Console) -> None:
        console.print("a table")


@pytest.mark.parametrize("keep", [False, True])
def test_a_demo_in_a_database_of_its_own_is_kept_or_cleared_away(
    keep: bool, cli: Cli, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[Path] = []

    def play(dsn: str, schema: str, files: list[str], work: Path, *, own: bool) -> Played:
        works.append(work)
        assert (dsn, schema, own) == (served.dsn, "taskq", True)
        return Played()

    monkeypatch.setattr(demo, "_play", play)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(_made(cli.folder / f"{prefix}x")))
    for number in range(10):
        (cli.folder / f"m{number}.py").write_text("x = 1\n")
    done = cli("demo", str(cli.folder), *(["--keep"] if keep else []))
    assert done.code == 0, done
    assert "a table" in done.out
    assert "2 attempts were lost to the kill, and nothing else" in done.err
    assert (f"taskq dev --data-dir {works[0] / 'postgres'}" in done.err) is keep
    assert works[0].exists() is keep
    assert (served.folders, served.stopped) == ([works[0] / "postgres"], 1)


def test_a_demo_whose_totals_differ_says_so_and_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_play", lambda *_, own: Played("lines differ") if not own else None)
    for number in range(10):
        (cli.folder / f"m{number}.py").write_text("x = 1\n")
    done = cli("demo", str(cli.folder), "--dsn", cli.dsn, "--json", "--keep")
    assert (done.code, done.json) == (1, {"ok": False})
    assert "error: lines differ" in done.err
    assert "start its database again" not in done.err
    assert "nothing else" not in done.err


def test_progress_is_a_bar_on_a_terminal_and_a_line_for_each_tenth_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with demo.progress(20, "files", "two workers") as tell:
        for left in range(20, -1, -1):
            tell(left, "two workers")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert "20 of 20 files: two workers" in lines[-1]

    shown = io.StringIO()
    terminal = rich.console.Console(file=shown, force_terminal=True, width=100)
    monkeypatch.setattr(rich.console, "Console", lambda **_: terminal)
    with demo.progress(20, "files", "two workers") as tell:
        tell(5, "one worker")
    assert "15/20" in shown.getvalue()
    assert "one worker" in shown.getvalue()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder

"""``taskq demo`` and ``taskq dev`` as processes: a worker is killed, the totals hold; a server comes and goes."""

from __future__ import annotations

import gc
import io
import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from cli_kit import SHOP, Cli, make_cli  # noqa: F401
from helpers import eventually
from rich.console import Console

from taskq.demo.counting import Totals, count_file, find_files
from taskq.demo.report import Report
from taskq.embedded_binaries import ServerUser


def test_a_report_shows_who_did_what_and_what_is_wrong() -> None:
    ours, theirs = Totals(files=3), Totals(files=4)
    shown = io.StringIO()
    report = Report(
        indexed=ours,
        plain=theirs,
        jobs=4,
        by_worker={"left": 3},
        killed="killed",
        held=2,
        lost=0,
        not_succeeded=["job 1 is failed: no"],
        violations=[{"law": 3, "code": "attempt_twice", "job_id": "1", "detail": "twice"}],
        survivor_exit=75,
        seconds=2.0,
        plain_seconds=1.0,
    )
    report.show(Console(file=shown, width=120))
    for words in ("DIFFERENT", "killed, with 2 jobs running", "stopped in good order", "taskq verify: 1 violations"):
        assert words in shown.getvalue()
    assert report.as_json()["ok"] is False
    assert len(report.problems()) == 6, report.problems()


def test_a_killed_worker_costs_attempts_and_nothing_else(cli: Cli) -> None:
    files = cli.folder / "files"
    files.mkdir()
    for number in range(29):
        (files / f"m{number}.py").write_text("class A:\n    def f(self): pass\n")
    (files / "bad.py").write_text("def (\n")
    done = cli("demo", str(files), "--dsn", cli.dsn, "--json")
    assert done.code == 0, done
    report = done.json
    assert report["indexed"] == {"files": 30, "unparsable": 1, "lines": 59, "functions": 29, "classes": 29}
    assert report["plain"] == report["indexed"]
    assert report["lost"] >= 1
    with psycopg.connect(cli.dsn) as conn:
        lost = conn.execute("select count(*) from taskq.ledger where outcome = 'lost'").fetchone()
        ends = conn.execute("select status, count(*) from taskq.workers group by 1 order by 1").fetchall()
    assert lost == (report["lost"],)
    assert ends == [("lost", 1), ("stopped", 1)]


def test_the_report_tells_what_differs() -> None:
    facts = {
        "indexed": Totals(2, 0, 10, 3, 1),
        "plain": Totals(2, 0, 10, 3, 1),
        "jobs": 2,
        "by_worker": {"a": 2},
        "killed": "b",
        "held": 1,
        "lost": 1,
        "not_succeeded": [],
        "violations": [],
        "survivor_exit": 0,
        "seconds": 1.0,
        "plain_seconds": 1.0,
    }
    assert Report(**facts).problems() == []
    violation = {"law": 3, "code": "attempt_twice", "job_id": "x", "detail": "y"}
    for changed, said in (
        ({"plain": Totals(2, 0, 11, 3, 1)}, "lines: taskq has 10, the plain loop 11"),
        ({"jobs": 3}, "3 jobs were enqueued, 2 have a result"),
        ({"lost": 0}, "no attempt was lost"),
        ({"violations": [violation]}, "law 3, attempt_twice"),
        ({"not_succeeded": ["job x is failed"]}, "job x is failed"),
        ({"survivor_exit": 1}, "exit code 1"),
    ):
        [problem] = Report(**{**facts, **changed}).problems()
        assert said in problem


def test_what_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "def a():\n  async def b(): pass\n  class C:\n    def d(self): pass\n"
        "if 1:\n  def e(): pass\nelse:\n  def f(): pass\n"
        "try:\n  def g(): pass\nexcept E:\n  def h(): pass\nelse:\n  def i(): pass\nfinally:\n  def j(): pass\n"
        "match x:\n  case 1:\n    def k(): pass\n"
    )
    assert count_file(str(file)) == Totals(1, 0, 19, 10, 1)
    file.write_bytes(b"x = '\0'\n")
    assert count_file(str(file)) == Totals(1, 1, 1, 0, 0)
    assert count_file(str(tmp_path / "gone.py")) == Totals(files=1, unparsable=1)
    assert len(find_files()) > 100


def test_files_that_are_counted_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("def f(a, b=(1, [2])):\n    return {a: (b, [a])}\n" * 300)
    before = gc.get_threshold()

    def elsewhere(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)  # lets the other thread run in the middle of what it parses

    gc.callbacks.append(elsewhere)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(2) as threads:
            counted = list(threads.map(count_file, [str(tmp_path / "long.py")] * 6))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(elsewhere)
    assert counted == [Totals(1, 0, 600, 300, 0)] * 6


def test_dev_starts_a_server_and_a_worker_and_stops_both(cli: Cli, request: pytest.FixtureRequest) -> None:
    (cli.folder / "shop.py").write_text(SHOP)
    folder = _reachable_folder(request)
    with cli.process("dev", "shop:app", "--data-dir", str(folder / "pg"), "--log-format", "json") as process:
        assert process.stdout is not None
        lines: list[str] = []
        dsn = ""
        while "worker.started" not in "".join(lines[-1:]):
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
            if line.startswith("export TASKQ_DSN="):
                dsn = line.split("'")[1]
        assert str(folder) in dsn
        assert any("TASKQ_DSN names another database" in line for line in lines)
        job = cli.ok("enqueue", "add", '{"a": 1}', "--dsn", dsn).out.strip()
        eventually(lambda: cli.ok("jobs", "show", job, "--dsn", dsn, "--json").json["status"] == "succeeded")
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert json.loads(rest.splitlines()[-1])["event"] == "worker.stopped"
    assert cli("jobs", "list", "--dsn", dsn).code == 3


def test_a_demonstration_that_is_told_to_end_leaves_no_server_behind(cli: Cli, request: pytest.FixtureRequest) -> None:
    folder = _reachable_folder(request)
    with cli.process("demo", TMPDIR=str(folder)) as process:
        pids = "*/postgres/**/postmaster.pid"
        [found] = eventually(lambda: [f for f in folder.glob(pids) if f.read_text()], timeout=60)
        server = int(found.read_text().splitlines()[0])
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert not Path(f"/proc/{server}").exists()
    assert list(folder.iterdir()) == []


def _reachable_folder(request: pytest.FixtureRequest) -> Path:
    """A folder that the server's user can pass through; pytest's own are closed to others."""
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="taskq-dev-test-"))
    folder.chmod(0o711)
    assert ServerUser.current().can_enter(folder)
    request.addfinalizer(lambda: shutil.rmtree(folder))
    return folder

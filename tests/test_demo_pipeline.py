"""``taskq demo-pipeline``: what it compares, that it tells what differs, and one play with kills over pages."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cli_kit import Cli, make_cli  # noqa: F401

from taskq.demo.pipeline import play as module
from taskq.demo.pipeline.report import Report
from taskq.demo.pipeline.tasks import Row, Summary, summary_of
from taskq.demo.strikes import Strike

TOLD = summary_of([Row("a", "1", 3, 2, 1), "file[1]", Row("c", "2", 10, 0, 0)])
REPORT = Report(
    seed=7,
    status="succeeded",
    told=TOLD,
    plain=TOLD,
    files=["a", "b", "c"],
    items=["a", "b", "c"],
    pages=2,
    lost_pages=1,
    most_open=2,
    may_be_open=3,
    strikes=[Strike("killed", "demo-1", 5), Strike("killed", "demo-2", 1)],
    violations=[],
    exits=[0, 0],
    seconds=31.4,
    plain_seconds=0.5,
)


def test_what_agrees_has_no_problems() -> None:
    assert REPORT.problems() == []
    assert REPORT.as_json()["ok"] is True
    assert Summary(2, 13, 2, 1, 1, TOLD.digest) == TOLD


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"items": ["a", "c"]}, "LOST: b was not emitted"),
        ({"items": ["a", "b", "c", "b"]}, "DOUBLED: b was emitted 2 times"),
        ({"items": ["a", "b", "c", "d"]}, "d was emitted, and is none of the files"),
        ({"items": ["a", "c", "b"]}, "not emitted in the order of their names"),
        ({"told": None, "status": "failed: boom"}, "LOST: the run is failed: boom, and has told nothing"),
        ({"told": replace(TOLD, lines=12)}, "lines: the fan-in has 12, the plain loop 13"),
        ({"told": replace(TOLD, digest="x")}, "digest: the fan-in has x"),
        ({"most_open": 4}, "4 files were open at once, and 3 may be"),
        ({"lost_pages": 0}, "this has shown nothing"),
        ({"strikes": [Strike("killed", "w", 0)]}, "this has shown nothing"),
        (
            {"violations": [{"law": 9, "code": "emit_incomplete", "job_id": "x", "detail": "y"}]},
            "taskq verify: law 9, emit_incomplete, job x: y",
        ),
        ({"exits": [0, 75]}, "exit codes 0, 75"),
    ],
)
def test_whatever_differs_is_told(change: dict[str, Any], said: str) -> None:
    [problem] = replace(REPORT, **change).problems()
    assert said in problem


def folder_of(path: Path, n: int) -> Path:
    """A folder of small files, one of which is too long."""
    path.mkdir()
    for number in range(n):
        lines = 3000 if number == 50 else number
        (path / f"m{number:03}.py").write_text("x = 1\n" * lines + f"def f{number}(): ...\nclass C{number}: ...\n")
    return path


def test_a_difference_ends_it_with_exit_code_1(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(folder_of(tmp_path / "files", 100))
    monkeypatch.setattr(module, "play", lambda *_, own: replace(REPORT, items=["a", "b"]))
    done = cli("demo-pipeline", folder, "--dsn", cli.dsn, "--seed", "7")
    assert done.code == 1
    assert "error: LOST: c was not emitted" in done.err
    assert "that of a plain loop" not in done.err
    done = cli("demo-pipeline", folder, "--dsn", cli.dsn, "--json", "--keep")
    assert (done.code, done.json["ok"]) == (1, False)
    shutil.rmtree(done.err.split("kept in ")[1].splitlines()[0])
    monkeypatch.setattr(module, "play", lambda *_, own: REPORT)
    done = cli.ok("demo-pipeline", folder, "--dsn", cli.dsn)
    words = ["refused", "equal", "2 of 3", "killed", "no violations"]
    assert [word for word in words if word not in done.out] == []
    assert "3 files came in 2 pages" in done.err


def test_too_few_files_are_refused(cli: Cli, tmp_path: Path) -> None:
    done = cli("demo-pipeline", str(folder_of(tmp_path / "few", 99)), "--dsn", cli.dsn)
    assert done.code == 2
    assert "has 99 Python files; the demo needs 100" in done.err


def test_pages_survive_kills(cli: Cli, tmp_path: Path) -> None:
    done = cli("demo-pipeline", str(folder_of(tmp_path / "files", 120)), "--dsn", cli.dsn, "--seed", "7", "--json")
    assert done.code == 0, done
    report = done.json
    assert report["problems"] == []
    assert (report["items"], report["told"]["files"], report["told"]["refused"]) == (120, 119, 1)
    assert report["pages"] == 20
    assert len(report["strikes"]) == 4
    with psycopg.connect(cli.dsn) as conn:
        runs = dict(conn.execute("select workflow, count(*) from taskq.runs group by workflow").fetchall())
        [jobs] = conn.execute("select count(*) from taskq.jobs").fetchone() or ()
    assert runs == {"taskq.demo.pipeline": 1, "taskq.demo.pipeline:file": 1, "taskq.demo.file": 120}
    assert jobs == 0

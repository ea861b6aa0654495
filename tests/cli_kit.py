"""Running the ``taskq`` command in tests: in this process where nothing speaks against it, else as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from taskq.cli import main


@dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """The command, with a database and a folder of its own, and no settings from outside."""

    def __init__(self, folder: Path, dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.dsn = dsn
        self._capsys = capsys

    def __call__(self, *args: str) -> Done:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(args)
        out, err = self._capsys.readouterr()
        assert isinstance(ended.value.code, int)
        assert "Traceback" not in err, err
        return Done(int(ended.value.code), out, err)

    def ok(self, *args: str) -> Done:
        done = self(*args)
        assert done.code == 0, done
        return done

    @contextmanager
    def process(self, *args: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
        """The command as a process of its own, ended with the block at the latest; errors go to its stdout."""
        process = subprocess.Popen(
            [sys.executable, "-m", "taskq", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env={**clean_environ(), "TASKQ_DSN": self.dsn, **environ},
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def clean_environ() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TASKQ_", "PG")) or k == "TASKQ_UNDER_TEST"}
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


SHOP = """
import time
from taskq import TaskQ
app = TaskQ()

@app.task(queue="mail", max_attempts=1)
async def add(a: int, b: int = 2) -> int:
    if a < 0:
        raise ValueError("a is negative")
    return a + b

@app.task(queue="mail", max_attempts=1, timeout="0.3s")
def stuck() -> None:
    time.sleep(60)
"""


@pytest.fixture(name="cli")
def make_cli(tmp_path: Path, dsn: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("TASKQ_") and name not in {"TASKQ_UNDER_TEST", "TASKQ_TEST_PG"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("TASKQ_DSN", dsn)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return Cli(tmp_path, dsn, capsys)

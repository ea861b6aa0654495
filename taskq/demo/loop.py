"""``python -m taskq.demo.loop``: the plain loop in a process of its own, beside the workers.

Takes the name of a JSON file with the files' names; prints a JSON object with the totals and the seconds that it took.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from taskq.demo.counting import Totals, count_all
from taskq.demo.stage import child_environ
from taskq.errors import TaskQError

__all__ = ["PlainLoop"]


class PlainLoop:
    """The loop at work."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    @contextmanager
    def start(cls, files: list[str], folder: Path) -> Iterator[PlainLoop]:
        """Start it; it is gone when the block ends."""
        names = folder / "files.json"
        names.write_text(json.dumps(files), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "taskq.demo.loop", str(names)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=child_environ(),
        )
        try:
            yield cls(process)
        finally:
            process.kill()
            process.wait()

    def result(self) -> tuple[Totals, float]:
        """Wait for the totals and the seconds that they took.

        Raises:
            TaskQError: The loop ended without.
        """
        printed, _ = self._process.communicate()
        if self._process.returncode:
            raise TaskQError(f"the plain loop ended with exit code {self._process.returncode}; see what it says above")
        told = json.loads(printed)
        return Totals(**told["totals"]), told["seconds"]


def _main() -> None:
    files = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    began = time.monotonic()
    totals = count_all(files)
    print(json.dumps({"totals": asdict(totals), "seconds": time.monotonic() - began}))


if __name__ == "__main__":
    _main()

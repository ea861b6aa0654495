"""Running adapters: one command to its end, or workers that begin together; and what processes have used."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.environments import ROOT

__all__ = ["AdapterFailed", "Workers", "command_of", "cpu_of", "cpu_of_children", "run_adapter"]

TICKS = os.sysconf("SC_CLK_TCK")
BOOT_WITHIN = 120.0
STOP_WITHIN = 30.0


class AdapterFailed(Exception):
    """An adapter did not do what it was asked; the message has its last words."""


def command_of(python: str, system: str, *args: str) -> list[str]:
    """The command line of an adapter."""
    return [python, "-m", f"benchmarks.peers.{system}", *args]


def run_adapter(python: str, system: str, *args: str, timeout: float = 900) -> list[dict[str, Any]]:
    """Run one command and give its answers.

    Raises:
        AdapterFailed: It ended with an error or not in time.
    """
    command = command_of(python, system, *args)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        raise AdapterFailed(f"{system} {args[0]} did not end within {timeout:.0f} s") from None
    if done.returncode != 0:
        raise AdapterFailed(f"{system} {args[0]} failed: {_last_words(done.stderr)}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"event"')]


@dataclass
class Workers:
    """Worker processes of one system.

    Attributes:
        python: The interpreter of its environment.
        system: The system.
        dsn: The database.
        processes: How many.
        concurrency: Bodies at once in each.
        queues: How many queues each serves.
    """

    python: str
    system: str
    dsn: str
    processes: int = 1
    concurrency: int = 100
    queues: int = 1
    _running: list[subprocess.Popen[str]] = field(default_factory=list)
    _said: queue.Queue[dict[str, Any]] = field(default_factory=queue.Queue)
    _log: Any = None
    _readers: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Workers:
        """Start them; they have imported everything and connected when this returns, and wait for ``begin``."""
        self._log = tempfile.TemporaryFile("w+")
        args = ["work", "--dsn", self.dsn, "--concurrency", str(self.concurrency), "--queues", str(self.queues)]
        try:
            for _ in range(self.processes):
                process = subprocess.Popen(
                    command_of(self.python, self.system, *args),
                    cwd=ROOT,
                    env=_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                )
                self._running.append(process)
                reader = threading.Thread(target=self._read, args=(process,), daemon=True)
                reader.start()
                self._readers.append(reader)
            deadline, ready = time.monotonic() + BOOT_WITHIN, 0
            while ready < self.processes:
                try:
                    ready += self._said.get(timeout=0.2)["event"] == "ready"
                except queue.Empty:
                    self.check()
                    if time.monotonic() > deadline:
                        raise AdapterFailed(f"{self.system} worker was not ready in {BOOT_WITHIN:.0f} s") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def begin(self) -> None:
        """Let all of them begin."""
        for process in self._running:
            assert process.stdin is not None
            process.stdin.write("begin\n")
            process.stdin.flush()

    def check(self) -> None:
        """See that all of them run.

        Raises:
            AdapterFailed: One has ended.
        """
        if any(process.poll() is not None for process in self._running):
            raise AdapterFailed(f"a {self.system} worker ended: {self._words()}")

    def stop(self) -> list[dict[str, Any]]:
        """Stop them in good order, those that do not stop by force; give what they said and was not asked for yet."""
        for process in self._running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_WITHIN
        for process in self._running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for reader in self._readers:
            reader.join(STOP_WITHIN)
        said = []
        while not self._said.empty():
            said.append(self._said.get_nowait())
        return said

    def cpu(self) -> float:
        """Seconds of CPU that they and their children have used."""
        return sum(cpu_of(pid) for pid in _with_descendants(process.pid for process in self._running))

    def resident(self) -> int:
        """Bytes of memory that are theirs now."""
        return sum(_resident(pid) for pid in _with_descendants(process.pid for process in self._running))

    def __exit__(self, *_: object) -> None:
        self.stop()
        for process in self._running:
            assert process.stdin is not None
            process.stdin.close()
        self._log.close()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if line.startswith('{"event"'):
                    self._said.put(json.loads(line))

    def _words(self) -> str:
        self._log.seek(0)
        return _last_words(self._log.read())


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used, its ended children included; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(value) for value in fields[11:15]) / TICKS


def cpu_of_children(pid: int) -> float:
    """The same for a process and all that it has started."""
    return sum(cpu_of(each) for each in _with_descendants([pid]))


def _with_descendants(pids: Iterable[int]) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "TASKQ_", "PYTHON"))}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def _last_words(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"

"""A Python environment for each system, made once from its pinned packages under ``build/bench-venvs``."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "SYSTEMS", "Environments", "NotInstalled", "find_python"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "bench-venvs"
SYSTEMS = ("taskq", "pgqueuer", "procrastinate", "oban", "chancy", "absurd", "awa", "dbos")
VERSIONS = ("3.13", "3.12")
"""What all systems run on, the newest first; Oban needs 3.12."""


class NotInstalled(Exception):
    """An environment could not be made; the message says why."""


def find_python() -> str:
    """The newest interpreter that all systems support.

    Raises:
        NotInstalled: There is none.
    """
    for version in VERSIONS:
        candidates = [shutil.which(f"python{version}")]
        candidates += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
        if sys.version.startswith(version + "."):
            candidates.append(sys.executable)
        for candidate in candidates:
            if candidate and subprocess.run([candidate, "-c", ""], check=False, capture_output=True).returncode == 0:
                return candidate
    raise NotInstalled(f"no Python {' or '.join(VERSIONS)} was found; name one with --python")


class Environments:
    """The interpreters of the systems.

    Args:
        python: What to make environments with; by default found when the first one is made.
        given: Interpreters that are there already, by system; nothing is installed into them.
    """

    def __init__(self, python: str | None = None, given: dict[str, str] | None = None) -> None:
        self._python = python
        self._given = dict(given or {})

    def python_of(self, name: str, pins: Path | None = None) -> str:
        """The interpreter of an environment, made first if it is missing or its pins have changed.

        Args:
            name: The system.
            pins: The file of ``name==version`` lines; by default the system's own.

        Raises:
            NotInstalled: It could not be made.
        """
        if name in self._given:
            return self._given[name]
        pins = pins or ROOT / "benchmarks" / "peers" / f"{name}.txt"
        if self._python is None:
            self._python = find_python()
        folder = FOLDER / name
        python = folder / "bin" / "python"
        stamp = folder / "made-from"
        wanted = hashlib.sha256(pins.read_bytes() + self._python.encode()).hexdigest()
        if not (stamp.exists() and stamp.read_text() == wanted and python.exists()):
            print(f"making the environment of {name}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            _run([self._python, "-m", "venv", str(folder)])
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
            _run([*pip, "-r", str(pins)])
            stamp.write_text(wanted)
        self._given[name] = str(python)
        return str(python)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise NotInstalled(f"{' '.join(Path(part).name for part in command[:4])} failed: {last[0]}")

"""Pages of documentation as a reader uses them: their code blocks, run in order against a database of their own.

What happens to a block goes by its language; see the top of ``test_docs.py`` for the conventions.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import typer
from helpers import eventually

from taskq.cli import build
from taskq.db.dsn import parse_dsn
from taskq.settings import load
from taskq.testing import faults
from taskq.testing.points import parse_fault

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = 40.0
"""Seconds after which a command that should end counts as hung."""
SHOWN_ONLY = {"", "text"}
NOT_RUN = {"demo", "demo-orders", "demo-payments", "demo-pipeline", "doctor"}
"""Commands that start a server of their own, or that the tests' own server, which trades safety for speed, fails."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class Block:
    """One fenced block: where it stands, its language, its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.language or 'text'}"


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of a page; an odd fence is an error."""
    text = path.read_text()
    name = str(path.relative_to(ROOT))
    found = [Block(name, text.count("\n", 0, m.start()) + 2, m[1], m[2]) for m in FENCE.finditer(text)]
    fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
    assert fences == 2 * len(found), f"{name} has {fences} fences, of which {2 * len(found)} were understood"
    return found


class Reader:
    """Does what a page says, block by block, and tells how each was checked."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.files: dict[str, Block] = {}
        self.run_files: set[str] = set()
        self.last_id = ""
        self.told: list[str] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.servers: list[subprocess.Popen[bytes]] = []
        bin_dir = str(Path(sys.executable).parent)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("TASKQ_") or k == "TASKQ_UNDER_TEST"}
        self.env |= {"TASKQ_DSN": dsn, "PATH": f"{bin_dir}:{os.environ['PATH']}", "NO_COLOR": "1", "COLUMNS": "200"}

    def read(self, block: Block) -> None:
        """Do what one block says; what it did goes to ``told``."""
        try:
            how = self._read(block)
        except BaseException as exc:
            exc.add_note(f"in the block at {block}:\n{block.text}{self._logs()}")
            raise
        self.told.append(f"{block}: {how}")

    def _read(self, block: Block) -> str:
        match block.language:
            case "python":
                return self._file(block)
            case "sql":
                return self._sql(block.text)
            case "console":
                return self._console(block.text)
            case "toml":
                return self._toml(block.text)
            case "json":
                json.loads(block.text)
                return "read as JSON"
            case language if language in SHOWN_ONLY:
                return "shown only"
            case language:
                raise AssertionError(f"nobody knows how to check a block in {language!r}")

    # Python ---------------------------------------------------------------------------------------------------------

    def _file(self, block: Block) -> str:
        named = re.match(r"# (\w+\.py)\n", block.text)
        assert named, "a Python block is a whole file, with its name in the first line: # NAME.py"
        (self.folder / named[1]).write_text(block.text)
        compile(block.text, named[1], "exec")
        self.files[named[1]] = block
        return f"written to {named[1]}"

    def _python(self, command: str, file: str) -> str:
        """Run a file as the reader does, and compare what it prints with what stands behind its prints."""
        assert file in self.files, f"{command!r}: no block above is named {file}; there are {sorted(self.files)}"
        shown = self._run(command).splitlines()
        expected = re.findall(r"^ *print\(.*\)  # (.+)$", self.files[file].text, re.MULTILINE)
        assert len(re.findall(r"\bprint\(", self.files[file].text)) == len(expected), f"{file}: a print without # TEXT"
        assert len(shown) == len(expected), f"expected {expected}, printed {shown}"
        for want, got in zip(expected, shown, strict=True):
            assert matches(want, got), f"expected {want!r}, printed {got!r}"
        self.run_files.add(file)
        self.last_id = next((line for line in reversed(shown) if UUID.fullmatch(line)), self.last_id)
        return f"run, {len(expected)} outputs compared"

    def _pytest(self, files: list[str]) -> tuple[str, str]:
        """Run files of tests as the reader does, with the ``conftest.py`` of the page if it has one."""
        assert set(files) <= set(self.files), f"no blocks above are named {set(files) - set(self.files)}"
        output = self._run(shlex.join(["pytest", "-p", "no:cacheprovider", *files]))
        self.run_files |= {*files, "conftest.py"}
        return "run", output

    def unused_files(self) -> list[str]:
        """Files that no command of the page runs, and no other file or worker imports."""
        text = "".join(block.text for block in self.files.values())
        named = r"^(?:import|from) (\w+)|\"DJANGO_SETTINGS_MODULE\", \"(\w+)\""
        imported = {f"{one or other}.py" for one, other in re.findall(named, text, re.MULTILINE)}
        return sorted(set(self.files) - self.run_files - imported)

    def check_types(self) -> None:
        """The files of the page pass the strict type checker, with the checkout's settings."""
        if not self.files:
            return
        options = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
        # Large libraries are read whole when the cache is new.
        self._run(shlex.join([sys.executable, "-m", "mypy", *options, *sorted(self.files)]), within=6 * LONG)

    # SQL ------------------------------------------------------------------------------------------------------------

    def _sql(self, text: str) -> str:
        with psycopg.connect(self.dsn) as conn:
            done = conn.execute(text.encode())
            while True:  # what it answers is read too, since a driver may not be able to
                if done.description:
                    done.fetchall()
                if not done.nextset():
                    return "run in the database, answers read"

    # Settings -------------------------------------------------------------------------------------------------------

    def _toml(self, text: str) -> str:
        tomllib.loads(text)
        place = self.folder / "settings"
        place.mkdir(exist_ok=True)
        (place / "pyproject.toml").write_text(text)
        load(require_dsn=False, environ={}, folder=place)
        return "read as settings"

    # Consoles -------------------------------------------------------------------------------------------------------

    def _console(self, text: str) -> str:
        told = []
        for command, expected in commands(text):
            how, output = self._command(command)
            told.append(f"{how}: {command}")
            lines = output.splitlines()
            for want in expected:
                while lines and not matches(want, lines[0]):
                    lines.pop(0)
                assert lines, f"{command!r} printed no line like {want!r} (in this order):\n{output}"
                lines.pop(0)
        return "; ".join(told)

    def _command(self, command: str) -> tuple[str, str]:
        words = shlex.split(command, comments=True)
        match words:
            case ["export", setting]:
                name, _, value = setting.partition("=")
                if name == faults.VARIABLE:
                    parse_fault(value)
                else:
                    assert name.removeprefix("TASKQ_").lower() in load(require_dsn=False).__slots__, name
                if name == "TASKQ_DSN":
                    parse_dsn(value)
                else:
                    self.env[name] = value
                return "checked", ""
            case ["make", *targets]:
                known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
                wanted = {t for t in targets if "=" not in t}
                assert wanted <= known, wanted - known
                return "targets are in the Makefile", ""
            case ["pip", "install", "-c", constraints, "-e", what]:
                extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
                wanted = set(re.findall(r"\w+", what))
                assert (ROOT / constraints).is_file()
                assert wanted <= set(extras), wanted - set(extras)
                return "extras and constraints exist", ""
            case ["pip", "install", "-c", constraints, *packages] if packages:
                pinned = {line.partition("==")[0].lower() for line in (ROOT / constraints).read_text().splitlines()}
                wanted = {word.partition("[")[0].lower() for word in packages}
                assert wanted <= pinned, wanted - pinned
                return "the packages are pinned", ""
            case ["docker", "compose", *_]:
                assert (ROOT / "docker-compose.yml").is_file()
                return "the file is checked by a test of its own", ""
            case ["apt-get", "install", *_]:
                return "names the system's package", ""
            case ["kill", *options, "$!"]:
                self._kill(signal.SIGKILL if options == ["-9"] else signal.SIGTERM)
                return "done", ""
            case ["python", file, *rest] if file.endswith(".py"):
                return self._python(self._with_id(command) if "ID" in rest else command, file), ""
            case ["pytest", *files]:
                return self._pytest(files)
            case ["python3", "-m", "venv", ".venv"] | [".", ".venv/bin/activate"]:
                return "as the tests' own environment was made", ""
            case ["taskq", "dev", *_]:
                self._dev(words)
                return "started, with the page's database", ""
            case ["taskq", "worker", *_]:
                self._start([word for word in words if word != "&"])
                self.run_files |= {f"{word.partition(':')[0]}.py" for word in words if ":" in word}
                return "started", ""
            case ["taskq", name, *_] if name in NOT_RUN or "KEY" in words or ("ID" in words and not self.last_id):
                self._compare_with_help(words)
                return "compared with --help", ""
            case ["taskq", *_]:
                command = self._with_id(command)
                return "run", self._run(command)
        raise AssertionError(f"nobody knows how to check {command!r}")

    def _with_id(self, command: str) -> str:
        """The command with the id that a file of the page printed last in the place of ``ID``."""
        return re.sub(r"\bID\b", self.last_id, command)

    def _run(self, command: str, *, within: float = LONG) -> str:
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=within,
            check=False,
        )
        assert done.returncode == 0, f"{command!r} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout

    def _start(self, words: list[str]) -> None:
        log = self.folder / f"worker-{len(self.processes)}.log"
        self.run_files |= {f"{word.partition(':')[0]}.py" for word in words if re.fullmatch(r"\w+:\w+", word)}
        with psycopg.connect(self.dsn, autocommit=True) as conn, log.open("wb") as out:
            process = subprocess.Popen(words, env=self.env, cwd=self.folder, stdout=out, stderr=out)
            self.processes.append(process)

            def registered() -> bool:
                assert process.poll() is None, log.read_text()
                row = conn.execute("select 1 from taskq.workers where pid = %s and status = 'live'", [process.pid])
                return row.fetchone() is not None

            eventually(registered, LONG)

    def _dev(self, words: list[str]) -> None:
        """Start it with the page's database instead of a server of its own; wait until it says that it is ready."""
        log = self.folder / f"worker-dev-{len(self.servers)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*words, "--dsn", self.dsn], env=self.env, cwd=self.folder, stdout=out, stderr=out
            )
        self.servers.append(process)

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            return "no worker runs" in log.read_text() or "worker.started" in log.read_text()

        eventually(ready, LONG)

    def _kill(self, sig: signal.Signals) -> None:
        process = self.processes[-1]
        process.send_signal(sig)
        code = process.wait(LONG)
        assert code == (0 if sig == signal.SIGTERM else -sig), f"the worker ended with {code}"

    def _compare_with_help(self, words: list[str]) -> None:
        """The command and every flag of the line are known to the CLI."""
        at: Any = typer.main.get_command(build(words[1:]))
        rest = words[1:]
        while rest and getattr(at, "commands", None):
            assert rest[0] in at.commands, f"there is no command {' '.join(words[:2])}"
            at = at.commands[rest.pop(0)]
        known = {option for param in at.params for option in (*param.opts, *param.secondary_opts)}
        used = {word.partition("=")[0] for word in rest if word.startswith("-")}
        assert used <= known, f"{' '.join(words)}: unknown {used - known}"

    def _logs(self) -> str:
        logs = [f"\n{p.name}:\n{p.read_text()}" for p in sorted(self.folder.glob("worker-*.log"))]
        return "".join(logs)

    def close(self) -> None:
        """End what the page started, workers before the servers."""
        for process in (*self.processes, *self.servers):
            if process.poll() is None:
                process.kill()
                process.wait()


def commands(text: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the output that is shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.strip():
            assert found, f"output without a command: {line!r}"
            found[-1][1].append(line)
    assert found, "a console block shows at least one command, with '$ ' before it"
    return found


def matches(want: str, got: str) -> bool:
    """Whether a line is as shown: runs of spaces are one, ``...`` stands for anything."""
    pattern = ".*".join(re.escape(" ".join(part.split())) for part in want.split("..."))
    return (
        re.fullmatch(pattern.replace(r"\ .*", r"\ ?.*").replace(r".*\ ", r".*\ ?"), " ".join(got.split())) is not None
    )

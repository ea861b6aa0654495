"""The supervisor by itself, over processes that do as a test says: it needs neither an application nor a database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from helpers import eventually

from taskq.worker.shutdown import EXIT_NOT_FLUSHED, EXIT_RECYCLED

SUPERVISOR = """\
import json, sys
from taskq.telemetry import configure_for_terminal
from taskq.worker import supervisor
command, options, patience = json.loads(sys.argv[1])
vars(supervisor).update(patience)
configure_for_terminal("json", "debug")
sys.exit(supervisor.Supervisor(command, name="w", **options).run())
"""
# Speaks to the supervisor as a worker does, and does what the plan has under its name: words in their order.
MEMBER = """\
import json, os, pathlib, signal, socket, sys, time
folder, name, *more = pathlib.Path(sys.argv[1]), sys.argv[2].removeprefix("--name="), *sys.argv[3:]
link = socket.socket(fileno=int(os.environ["TASKQ_SUPERVISOR"].split(":")[1]))
(folder / (name + ".pid")).write_text(str(os.getpid()))
(folder / name).write_text(" ".join(more))
def told(number, frame):
    with open(folder / (name + ".told"), "a") as file:
        file.write("t")
    if "stubborn" not in words:
        os._exit(0)
words = json.loads((folder / "plan").read_text()).get(name, "ready waits").split()
for word in words:
    if word == "ready":
        signal.signal(signal.SIGTERM, told)
        link.send(b"R")
        (folder / (name + ".ready")).touch()
    elif word == "successor":
        link.send(b"W")
        link.send(b"W")
    elif word == "hangs_up":
        link.close()
    elif word.isdigit():
        os._exit(int(word))
    else:
        while True:
            time.sleep(60)
"""
QUICK: dict[str, float] = {"FIRST_PAUSE": 0.05, "BEYOND_GRACE": 20.0, "FORCED_WITHIN": 20.0, "SECOND_SIGNAL_AFTER": 0}


class Supervised:
    """A supervisor in a process of its own, and the files by which its members say what they did."""

    def __init__(self, folder: Path, plan: Mapping[str, str], options: dict[str, Any], patience: dict[str, float]):
        self.folder = folder
        (folder / "plan").write_text(json.dumps(plan))
        whole: dict[str, Any] = {"processes": 1, "grace": 0.0, **options}
        command = [sys.executable, "-I", "-S", "-c", MEMBER, str(folder)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, json.dumps([command, whole, QUICK | patience])],
            stderr=subprocess.PIPE,
            text=True,
        )

    def until(self, *names: str) -> None:
        """Wait until these files are there."""
        eventually(lambda: all((self.folder / name).exists() for name in names), 60)

    def told(self, name: str) -> int:
        file = self.folder / f"{name}.told"
        return len(file.read_text()) if file.exists() else 0

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def finish(self, code: int) -> list[dict[str, Any]]:
        """Wait for its end; give the events that it logged."""
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == code, err
        return [json.loads(line) for line in err.splitlines() if line.startswith("{")]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Any]:
    made: list[Supervised] = []

    def start(plan: Mapping[str, str], *, patience: dict[str, float] | None = None, **options: Any) -> Supervised:
        made.append(Supervised(tmp_path, plan, options, patience or {}))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            # A test has failed: nothing of it stays behind.
            one.process.kill()
            for file in tmp_path.glob("*.pid"):
                with suppress(ProcessLookupError):
                    os.kill(int(file.read_text()), signal.SIGKILL)
        one.process.communicate(timeout=60)


def of(events: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == event]


def test_each_process_has_its_name_and_arguments_and_a_signal_stops_all(supervise: Any) -> None:
    running = supervise({}, processes=2, per_slot=[["--health-port=1"], ["--health-port=2"]])
    running.until("w-1.ready", "w-2.ready")
    running.signal()
    events = running.finish(0)
    assert [(running.folder / name).read_text() for name in ("w-1", "w-2")] == ["--health-port=1", "--health-port=2"]
    assert (running.told("w-1"), running.told("w-2")) == (1, 1)
    assert [e["exit_code"] for e in of(events, "supervisor.process_ended")] == [0, 0]
    assert of(events, "supervisor.stopped")[0]["exit_code"] == 0


def test_a_process_that_had_its_day_is_started_again_at_once(supervise: Any) -> None:
    running = supervise({"w-1": f"ready {EXIT_RECYCLED}"}, patience={"HEALTHY_AFTER": 0.0})
    running.until("w-1.2.ready")
    running.signal()
    [first, _] = of(running.finish(0), "supervisor.process_ended")
    assert (first["name"], first["exit_code"], first["again_in"]) == ("w-1", EXIT_RECYCLED, 0)


def test_a_process_that_fails_is_started_again_after_ever_longer_pauses(supervise: Any) -> None:
    running = supervise({"w-1": "5", "w-1.2": "hangs_up 1", "w-1.3": "ready 5"}, processes=2)
    running.until("w-2.ready", "w-1.4.ready")
    running.signal()
    ended = [e for e in of(running.finish(0), "supervisor.process_ended") if e.get("failures")]
    assert [(e["name"], e["failures"]) for e in ended] == [("w-1", 1), ("w-1.2", 2), ("w-1.3", 3)]


def test_settings_that_are_wrong_for_all_end_all(supervise: Any) -> None:
    events = supervise({"w-1": "2", "w-2": "waits"}, processes=2).finish(2)
    [said] = of(events, "supervisor.hopeless")
    assert (said["name"], said["exit_code"]) == ("w-1", 2)


def test_a_process_that_had_not_begun_may_be_stopped(supervise: Any) -> None:
    running = supervise({"w-1": "waits"})
    running.until("w-1")
    running.signal()
    assert of(running.finish(0), "supervisor.process_ended")[0]["exit_code"] == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_a_process_that_wants_a_successor_is_replaced(supervise: Any, overlap: bool) -> None:
    running = supervise({"w-1": "ready successor waits"}, overlap=overlap)
    running.until("w-1.2.ready", "w-1.told")
    running.signal()
    events = running.finish(0)
    assert running.told("w-1") == 1
    assert [e["name"] for e in of(events, "supervisor.replacing")] == ["w-1"]
    order = [(e["event"], e["name"]) for e in events if e.get("name") in ("w-1", "w-1.2")]
    started, ended = ("supervisor.process_started", "w-1.2"), ("supervisor.process_ended", "w-1")
    assert (order.index(started) < order.index(ended)) == overlap


def test_a_successor_that_is_never_ready_is_killed_and_tried_again(supervise: Any) -> None:
    running = supervise(
        {"w-1": "ready successor waits", "w-1.2": "waits", "w-1.3": "ready waits"},
        patience={"SUCCESSOR_WITHIN": 0.5},
    )
    running.until("w-1.3.ready", "w-1.told")
    running.signal()
    events = running.finish(0)
    assert [e["name"] for e in of(events, "supervisor.process_killed")][0] == "w-1.2"


def test_a_process_that_does_not_stop_is_killed_and_told_of(supervise: Any) -> None:
    running = supervise({"w-1": "ready stubborn"}, patience={"BEYOND_GRACE": 0.3})
    running.until("w-1.ready")
    running.signal()
    events = running.finish(EXIT_NOT_FLUSHED)
    assert running.told("w-1") == 1
    assert [e["name"] for e in of(events, "supervisor.process_killed")] == ["w-1"]


@pytest.mark.parametrize("apart", [0.0, 60.0])
def test_a_second_signal_hurries_unless_it_comes_with_the_first(supervise: Any, apart: float) -> None:
    patience = {"BEYOND_GRACE": 60.0 if apart == 0 else 2.0, "FORCED_WITHIN": 0.3, "SECOND_SIGNAL_AFTER": apart}
    running = supervise({"w-1": "ready stubborn"}, patience=patience)
    running.until("w-1.ready")
    running.signal()
    eventually(lambda: running.told("w-1") == 1)
    running.signal()
    events = running.finish(EXIT_NOT_FLUSHED)
    assert bool(of(events, "supervisor.forcing")) == (apart == 0)
    assert running.told("w-1") == (2 if apart == 0 else 1)

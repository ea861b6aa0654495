"""A child process by itself: the test stands where its worker would, and says and hears what a worker does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from helpers import eventually
from worker_kit import claim_of

from taskq.worker.child import EXIT_ORPHANED
from taskq.worker.pipes import Message, frame, receive
from taskq.worker.process_context import told
from taskq.worker.process_pool import _BOOT

PATH = [str(Path(__file__).parent), *sys.path]
APP = "process_app:app"


class Link:
    """One child, and the end of the pipe that its worker has."""

    def __init__(self, *, parent: int | None = None, alone: bool = False) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(60)
        self.logged: list[Message] = []
        with theirs:
            handle = theirs.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, str(handle), str(parent or os.getpid()), json.dumps(PATH)],
                pass_fds=(handle,),
                stdout=subprocess.PIPE,
                start_new_session=alone,
            )

    def say(self, **message: Any) -> None:
        self.sock.sendall(frame(message))

    def hear(self) -> Message | None:
        while (message := receive(self.sock)) is not None and message["is"] == "log":
            self.logged.append(message)
        return message

    def set_up(self, **values: Any) -> Message | None:
        whole = {"app": APP, "main": None, "dsn": None, "schema": None, "tasks": [], "levels": {"": 20}}
        self.say(do="setup", **(whole | values))
        return self.hear()

    def begin(self, task: str, **arguments: Any) -> None:
        place = {"name": task, "module": "process_app", "qualname": task}
        self.say(do="run", task=place, payload=json.dumps(arguments), context=told(claim_of(task)))

    def run(self, task: str, **arguments: Any) -> Message:
        self.begin(task, **arguments)
        assert self.hear() == {"is": "started"}
        reply = self.hear()
        assert reply is not None
        return reply

    def ended(self) -> int:
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def link() -> Iterator[Any]:
    made: list[Link] = []

    def start(**options: Any) -> Link:
        made.append(Link(**options))
        return made[-1]

    yield start
    for one in made:
        one.sock.close()
        if one.process.poll() is None:
            one.process.kill()
        one.process.communicate(timeout=60)


def test_a_child_runs_bodies_of_every_kind_until_it_may_leave(link: Any) -> None:
    child = link()
    place = {"name": "add", "module": "process_app", "qualname": "add"}
    assert child.set_up(tasks=[place]) == {"is": "ready"}
    pid = child.process.pid
    reply = child.run("add", a=1, b=2)
    assert (reply["is"], json.loads(reply["result"])) == ("returned", [3, pid])
    assert reply["resident"] > 1_000_000
    assert json.loads(child.run("add_async", a=1, b=2)["result"]) == [3, 1, pid]
    about = json.loads(child.run("told")["result"])
    assert (about["job"] != str(UUID(int=0)), about["attempt"]) == (True, [1, 3, 1, 0])
    raised = child.run("raises", what="retry_after")
    assert (raised["is"], raised["delay"], raised["reason"]) == ("raised", 3600, "busy")
    odd = child.run("raises", what="odd")
    assert (odd["error"]["type"], odd["kinds"][0]) == ("Odd", "process_app.Odd")
    assert "delay" not in odd
    assert child.run("raises", what="unstorable")["error"]["type"] == "ResultNotStorable"
    assert child.run("add", a="no number")["error"]["type"] == "PayloadMisfit"
    assert child.run("tells", text="hello")["is"] == "returned"
    [first, second] = [m for m in child.logged if m["name"] == "of.the.app"]
    assert (first["text"], first["extra"]) == ("logged hello", {"colour": "red"})
    assert "ValueError: hello" in second["trace"]
    assert child.run("no_such_task")["error"]["type"] == "ProcessNotStarted"
    child.say(do="leave")
    assert child.ended() == 0


def test_a_function_is_interrupted_and_cleans_up(link: Any, tmp_path: Path) -> None:
    child = link()
    child.set_up()
    child.begin("loops_forever", folder=str(tmp_path))
    assert child.hear() == {"is": "started"}
    eventually(lambda: list(tmp_path.glob("here.*")), 60)
    # Of a signal that nobody sent through the pipe it takes no notice.
    child.process.send_signal(signal.SIGTERM)
    child.say(do="stop")
    reply = child.hear()
    assert reply is not None
    assert reply["is"] == "stopped"
    assert list(tmp_path.glob("cleaned.*"))
    # What comes after is not begun: it was to stop.
    child.begin("add", a=1, b=2)
    assert child.hear() == {"is": "stopped"}
    child.say(do="leave")
    assert child.ended() == 0


def test_a_coroutine_is_cancelled(link: Any, tmp_path: Path) -> None:
    child = link()
    child.set_up()
    child.begin("sleeps", folder=str(tmp_path))
    assert child.hear() == {"is": "started"}
    eventually(lambda: list(tmp_path.glob("here.*")), 60)
    child.say(do="stop")
    reply = child.hear()
    assert reply is not None
    assert reply["is"] == "stopped"
    child.say(do="leave")
    assert child.ended() == 0


@pytest.mark.parametrize(
    ("setup", "error"),
    [
        ({"app": "no_such_module:app"}, "ModuleNotFoundError"),
        ({}, "ProcessNotStarted"),
        ({"app": None}, "ProcessNotStarted"),
    ],
)
def test_a_child_that_cannot_find_its_tasks_says_so(link: Any, setup: dict[str, Any], error: str) -> None:
    child = link()
    answer = child.set_up(tasks=[{"name": "x", "module": "process_app", "qualname": "x.y"}], **setup)
    assert answer["is"] == "not_ready"
    assert answer["error"]["type"] == error
    child.say(do="leave")
    assert child.ended() == 0


def test_tasks_are_found_by_the_module_of_their_function_too(link: Any) -> None:
    child = link()
    assert child.set_up(app=None) == {"is": "ready"}
    assert json.loads(child.run("add", a=2, b=2)["result"])[0] == 4
    child.say(do="leave")
    assert child.ended() == 0


def test_a_child_whose_worker_has_gone_goes_too(link: Any) -> None:
    assert link(parent=1).ended() == EXIT_ORPHANED
    child = link()
    child.set_up()
    child.sock.close()
    assert child.ended() == EXIT_ORPHANED
    alone = link(alone=True)
    alone.set_up()
    alone.sock.close()
    # With all that its bodies have started.
    assert alone.ended() == -signal.SIGKILL

"""Workers on two hosts, killed again and again: every run ends, or waits with a code, an incident and a command."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import psycopg
from conftest import LONG, ROOT, Journal, StartWorker, WorkerProcess, until
from network import network
from survival import Survived, reckon

RUNS = 60 if LONG else 20
KILLS = 40 if LONG else 8
WITHIN = 300.0 if LONG else 120.0
APP = "interrupted_app:app"
CLIENT = """
import sys
from interrupted_app import app
for n in range(int(sys.argv[1])):
    print(app.get_workflow("order").start_sync(n).id)
app.close_sync()
"""


def taskq(dsn: str, *args: str) -> Any:
    """What a command of taskq prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "taskq.cli", *args, "--json", "--dsn", dsn],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, (args, done.stdout, done.stderr)
    return json.loads(done.stdout)


def start_runs(dsn: str, n: int) -> list[UUID]:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(n)],
        env={**os.environ, "PYTHONPATH": path, "TASKQ_DSN": dsn},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    return [UUID(line) for line in done.stdout.split()]


def test_runs_whose_workers_are_killed_on_two_hosts_end_or_say_what_goes_on(
    dsn: str, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    r = Random(7)
    with ExitStack() as stack, psycopg.connect(dsn, autocommit=True) as conn:
        hosts = [stack.enter_context(network(dsn, host)) for host in range(2)]
        started = 0

        def worker(host: int) -> WorkerProcess:
            nonlocal started
            started += 1
            net = hosts[host]
            return start_worker(
                f"h{host}-{started}", ready=False, to=net.dsn, within=net.within, app=APP, lease=2, concurrency=3
            )

        runs = start_runs(dsn, RUNS)
        alive = [worker(0), worker(1)]

        def at_work(found: WorkerProcess) -> bool:
            row = conn.execute(
                "select count(*) from taskq.jobs j join taskq.workers w on w.id = j.claimed_by where w.name = %s",
                (found.log_file.stem,),
            ).fetchone()
            return bool(row and row[0]) or is_over()

        def at_work_or_followed(found: WorkerProcess) -> bool:
            if not at_work(found):
                follow(dsn)
                return False
            return True

        def is_over() -> bool:
            row = conn.execute("select count(*) from taskq.runs where finished_at is null").fetchone()
            return row == (0,)

        killed = 0
        while killed < KILLS and not is_over():
            host = r.randrange(2)
            # In the middle of its work, wherever that is.
            until(functools.partial(at_work_or_followed, alive[host]), 60)
            time.sleep(r.random() * 0.2)
            alive[host].kill()
            killed += 1
            alive[host] = worker(host)
        # From here on nobody is killed, and what the database says is done, nothing else.
        end = time.monotonic() + WITHIN
        while not is_over():
            assert time.monotonic() < end, conn.execute("select * from taskq.open_incidents").fetchall()
            follow(dsn)
            time.sleep(0.2)
        query = "select status, result from taskq.runs where id = any(%s)"
        assert sorted(conn.execute(query, (runs,)).fetchall()) == [("succeeded", 3 * (n + 1)) for n in range(RUNS)]
        jobs = [row[0] for row in conn.execute("select id from taskq.nodes where run_id = any(%s)", (runs,))]
        # A second charge under one key would have failed its run.
        assert len(list(journal.folder.glob("charge.*"))) == RUNS
        incidents = conn.execute("select count(*) from taskq.incidents").fetchone()
        for each in alive:
            each.kill()
    taskq(dsn, "verify", "--all")
    assert incidents is not None
    assert incidents[0] > 0
    assert killed >= KILLS // 2
    notes = f"{RUNS} runs, {incidents[0]} incidents, by {hosts[0].kind}"
    figures = reckon(dsn, journal.of("start"), jobs)
    survived(fault="workers killed on two hosts, past their recoveries", injected=killed, notes=notes, **figures)


def follow(dsn: str) -> int:
    """Grant what waits for it, by the command that is named; how many."""
    found = taskq(dsn, "incidents", "list")
    waiting = [row for row in found if row["status"] == "exhausted" and row["is_current"]]
    for row in waiting:
        assert row["code"] == "recovery_exhausted"
        command = row["command"].split()
        assert command[:3] == ["taskq", "incidents", "grant"]
        [answer] = taskq(dsn, *command[1:-1], "it was killed by a test")
        assert answer["answer"] in ("granted", "already", "paused"), answer
    return len(waiting)

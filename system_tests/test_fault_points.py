"""Worker processes that are killed at every fault point, on both sides: another goes on, and jobs end as promised.

All are killed in one test, each on a queue of its own, since processes take longer to start than to die. What an
exception and a cut connection do is tested in one process, in ``tests/worker/test_fault_points.py``.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from conftest import ROOT, Journal, StartWorker, until
from fault_kit import SIDES, check, promise

from taskq import TaskQ
from taskq.testing import Point

pytestmark = pytest.mark.anyio
FLAGS = ["--lease=1", "--grace=5", "--concurrency=10", "--poll-interval=0.05"]
BOUND = 150.0


def run_workers(dsn: str, folder: Path, faults: dict[str, str]) -> dict[str, int]:
    """Run a worker for each queue, with its fault, until all have ended; their exit codes."""
    here = Path(__file__).parent
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(here)]),
        "TASKQ_DSN": dsn,
        "JOURNAL": str(folder / "journal"),
        "GATES": str(folder),
    }
    words = [f"{queue}={fault}" for queue, fault in faults.items()]
    process = subprocess.Popen(
        [sys.executable, str(here / "faulty_workers.py"), *words, "--", *FLAGS],
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=BOUND)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0
    return {queue: int(code) for queue, code in (line.split() for line in out.splitlines())}


async def test_a_kill_at_any_point_costs_no_more_than_is_promised(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    work, fails_once, pays = app.get_task("work"), app.get_task("fails_once"), app.get_task("pays")
    kills = {f"{point}.{when}": (point, when) for point in Point for when in SIDES}
    wanted: dict[str, dict[UUID, list[str]]] = {}
    for queue in kills:
        of_effects = kills[queue][0] is Point.EFFECT_START_COMMITTED
        plain = [pays.using(queue=queue).job() if of_effects else work.using(queue=queue).job(0) for _ in range(3)]
        jobs = await app.enqueue_many([*plain, fails_once.using(queue=queue).job()])
        wanted[queue] = {job.id: ["succeeded"] for job in jobs[:3]} | {jobs[3].id: ["failed", "succeeded"]}
    faults = {queue: f"{point}:{when}:kill" for queue, (point, when) in kills.items()}
    codes = run_workers(dsn, journal.folder, faults)
    assert codes == dict.fromkeys(kills, -signal.SIGKILL)
    hit: dict[str, list[UUID]] = {}
    for queue, (point, when) in kills.items():
        [fired] = re.findall(r"fault\.fired.*", (journal.folder / f"{queue}.log").read_text())
        assert f"point={point} when={when} how=kill" in fired
        [ids] = re.findall(r"jobs=(\S*)", fired)
        hit[queue] = [UUID(job) for job in filter(None, ids.split(","))]
    rescuer = start_worker("rescuer", ready=False, lease=1, poll_interval=0.05, queue=",".join(kills))

    def left() -> int:
        with psycopg.connect(dsn) as conn:
            # No body was called where the effect start was struck, and only a person may say so.
            conn.execute("select taskq.resolve(id, false, null, 'no body') from taskq.jobs where status = 'unknown'")
            [(n,)] = conn.execute("select count(*) from taskq.jobs").fetchall()
            return int(n)

    until(lambda: left() == 0, BOUND)
    assert rescuer.stop(BOUND) == 0
    runs = [(UUID(job), epoch) for job, epoch in journal.of("start")]
    for queue, (point, when) in kills.items():
        assert bool(hit[queue]) == (point is not Point.CLAIM_SENT), "whom a claim finds is known once it is executed"
        ran = [run for run in runs if run[0] in wanted[queue]]
        check(dsn, promise(point, when, "kill"), hit=hit[queue], wanted=wanted[queue], runs=ran)


async def test_a_worker_process_is_armed_by_its_environment_if_its_app_asks_for_that(
    app: TaskQ, start_worker: StartWorker
) -> None:
    job = await app.get_task("work").enqueue(0)
    environ = {"TASKQ_FAULT": "body_done:after:kill"}
    armed = start_worker("armed", ready=False, lease=1, app="faulty_app:app", environ=environ)
    assert armed.exit_code(BOUND) == -signal.SIGKILL
    assert "fault.armed" in armed.log
    # The same variable, and an app that does not ask for it.
    unarmed = start_worker("unarmed", ready=False, lease=1, environ=environ)
    assert await job.result(timeout=BOUND) == 2
    assert unarmed.stop(BOUND) == 0
    assert "fault." not in unarmed.log

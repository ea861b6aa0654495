"""Worker processes that are killed at every fault point, on both sides: another goes on, and jobs end as promised.

All are killed in one test, each on a queue of its own, since processes take longer to start than to die. What an
exception and a cut connection do is tested in one process, in ``tests/worker/test_fault_points.py``.
"""

from __future__ import annotations

import re
import signal
from uuid import UUID

import psycopg
import pytest
from conftest import Journal, StartWorker, until
from fault_kit import SIDES, check, promise

from taskq import TaskQ
from taskq.testing import Point

pytestmark = pytest.mark.anyio


async def test_a_kill_at_any_point_costs_no_more_than_is_promised(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    work, fails_once = app.get_task("work"), app.get_task("fails_once")
    kills = {f"{point}.{when}": (point, when) for point in Point for when in SIDES}
    wanted: dict[str, dict[UUID, list[str]]] = {}
    for queue in kills:
        plain = [work.using(queue=queue).job(0) for _ in range(3)]
        jobs = await app.enqueue_many([*plain, fails_once.using(queue=queue).job()])
        wanted[queue] = {job.id: ["succeeded"] for job in jobs[:3]} | {jobs[3].id: ["failed", "succeeded"]}
    options = {"ready": False, "lease": 1, "poll_interval": 0.05}
    victims = {
        queue: start_worker(
            queue,
            app="faulty_app:app",
            environ={"TASKQ_FAULT": f"{point}:{when}:kill"},
            queue=queue,
            **options,
        )
        for queue, (point, when) in kills.items()
    }
    hit: dict[str, list[UUID]] = {}
    for queue, victim in victims.items():
        assert victim.exit_code(60) == -signal.SIGKILL, victim.log
        [fired] = re.findall(r"fault\.fired.*", victim.log)
        point, when = kills[queue]
        assert f"point={point} when={when} how=kill" in fired
        [ids] = re.findall(r"jobs=(\S*)", fired)
        hit[queue] = [UUID(job) for job in filter(None, ids.split(","))]
    rescuer = start_worker("rescuer", queue=",".join(kills), **options)

    def left() -> int:
        with psycopg.connect(dsn) as conn:
            [(n,)] = conn.execute("select count(*) from taskq.jobs").fetchall()
            return int(n)

    until(lambda: left() == 0, 60)
    assert rescuer.stop() == 0
    runs = [(UUID(job), epoch) for job, epoch in journal.of("start")]
    for queue, (point, when) in kills.items():
        assert bool(hit[queue]) == (point is not Point.CLAIM_SENT), "whom a claim finds is known once it is executed"
        ran = [run for run in runs if run[0] in wanted[queue]]
        check(dsn, promise(point, when, "kill"), hit=hit[queue], wanted=wanted[queue], runs=ran)

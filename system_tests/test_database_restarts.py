"""A database that restarts, crashes, loses backends or is away for long: workers stay, nothing is lost or repeated."""

from __future__ import annotations

import os
import random
import signal
from uuid import UUID

import pytest
from cluster import BOUND, Cluster
from conftest import LONG, Journal, StartWorker, WorkerProcess, now, until
from helpers import eventually
from survival import Survived, reckon

from taskq import TaskQ

pytestmark = pytest.mark.anyio
LOAD = 400
ORPHANS = 300
AWAY = 60.0 if LONG else 12.0
"""Seconds without a database."""


@pytest.fixture
def dsn(cluster: Cluster) -> str:
    return cluster.dsn


async def enqueue_load(app: TaskQ) -> list[UUID]:
    rand = random.Random(7)
    work = app.get_task("work")
    # Two workers with ten slots each need at least six seconds for it, however fast the machine is.
    jobs = await app.enqueue_many([work.job(0.1 + rand.random() * 0.4) for _ in range(LOAD)])
    await app.close()
    return [job.id for job in jobs]


def until_all_ended(cluster: Cluster, workers: list[WorkerProcess], jobs: list[UUID]) -> None:
    until(lambda: cluster.value("select count(*) from taskq.jobs") == 0, 90)
    assert [worker.process.poll() for worker in workers] == [None] * len(workers)
    assert cluster.value("select count(*) from taskq.history where status = 'succeeded'") == len(jobs)
    assert [worker.stop() for worker in workers] == [0] * len(workers)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
async def test_restarts_under_load_lose_and_repeat_nothing(
    mode: str, app: TaskQ, cluster: Cluster, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    jobs = await enqueue_load(app)
    workers = [start_worker(f"w{n}", lease=5) for n in range(2)]
    for restarts in range(2):
        until(lambda n=restarts: len(journal.of("end")) > 20 + 100 * n)
        until(lambda: cluster.value("select count(*) from taskq.jobs where status = 'running'") > 0)
        cluster.stop(mode)
        cluster.start()
    until_all_ended(cluster, workers, jobs)
    survived(
        fault=f"PostgreSQL restarted ({mode}) under load", injected=2, **reckon(cluster.dsn, journal.of("start"), jobs)
    )


async def test_backends_that_are_ended_under_load_cost_a_new_connection_each(
    app: TaskQ, cluster: Cluster, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    jobs = await enqueue_load(app)
    workers = [start_worker(f"w{n}", lease=5) for n in range(2)]
    ended = 0

    def end_some() -> bool:
        nonlocal ended
        ended += cluster.value(
            "select count(pg_terminate_backend(pid)) from (select pid from pg_stat_activity"
            " where application_name like 'taskq %%' order by random() limit 2) a"
        )
        return len(journal.of("end")) > LOAD * 2 // 3

    until(lambda: len(journal.of("end")) > 20)
    eventually(end_some, 60, interval=0.1)
    assert ended > 4
    until_all_ended(cluster, workers, jobs)
    survived(fault="backends terminated under load", injected=ended, **reckon(cluster.dsn, journal.of("start"), jobs))


async def test_a_backend_that_is_killed_takes_all_others_along_and_nothing_is_lost(
    app: TaskQ, cluster: Cluster, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    jobs = await enqueue_load(app)
    workers = [start_worker(f"w{n}", lease=5) for n in range(2)]
    for kills in range(2):
        until(lambda n=kills: len(journal.of("end")) > 20 + 100 * n)
        [victim] = until(
            lambda: cluster.query("select pid from pg_stat_activity where application_name = 'taskq exchange' limit 1")
        )
        os.kill(int(str(victim["pid"])), signal.SIGKILL)
        until(lambda n=kills: cluster.log.count("terminating any other active server processes") == n + 1, BOUND)
        until(lambda n=kills: cluster.log.count("ready to accept connections") >= n + 2, BOUND)
    until_all_ended(cluster, workers, jobs)
    survived(
        fault="a backend killed (SIGKILL) under load", injected=2, **reckon(cluster.dsn, journal.of("start"), jobs)
    )


async def test_a_crash_in_the_middle_of_a_rescue_only_delays_it(
    app: TaskQ, cluster: Cluster, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    lease = 9
    jobs = await app.enqueue_many([app.get_task("work").job(0) for _ in range(ORPHANS)])
    await app.close()
    cluster.query(
        "select count(*) from taskq.claim("
        "taskq.register_worker('gone', 'h', 1, '{default}', '{work}', 300, 1, '0', 60), 300, '{work}', '{default}',"
        " '{5}', '{-infinity}', array['00000000-0000-0000-0000-000000000000'::uuid])",
    )
    cluster.query("update taskq.workers set lease_expires_at = '-infinity'")
    assert len(cluster.query("select * from taskq.mark_lost()")) == 1
    # Settling takes long until the crash, which empties the unlogged table.
    cluster.query("create unlogged table public.slow as select 0.02 as seconds")
    cluster.query(
        "create function public.slow_down() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(s.seconds) from public.slow s; return new; end $$"
    )
    cluster.query(
        "create trigger slow before insert on taskq.ledger for each row when (new.outcome = 'lost')"
        " execute function public.slow_down()"
    )
    worker = start_worker(lease=lease)
    settling = "select count(*) from pg_stat_activity where query like '%%settle_lost%%' and wait_event = 'PgSleep'"
    until(lambda: cluster.value(settling), 3 * lease)
    cluster.stop("immediate")
    cluster.start()
    back = now()
    assert cluster.value("select count(*) from taskq.attempts where outcome = 'lost'") < ORPHANS
    until(lambda: cluster.value("select count(*) from taskq.attempts where outcome = 'lost'") == ORPHANS, 4 * lease)
    rescued = now() - back
    # Two turns of the leader, who looks three times a lease.
    assert rescued < 2 * lease / 3 * 1.1 + 0.5, rescued
    until(lambda: cluster.value("select count(*) from taskq.jobs") == 0, 30)
    assert cluster.value("select count(*) from taskq.attempts where outcome = 'succeeded'") == ORPHANS
    assert cluster.value("select count(*) from taskq.history where recoveries = 1 and claim_epoch = 2") == ORPHANS
    assert worker.stop() == 0
    figures = reckon(cluster.dsn, journal.of("start"), [job.id for job in jobs])
    assert figures["lost"] == ORPHANS
    survived(fault="crash in the middle of a rescue", injected=1, notes=f"rescued in {rescued:.1f} s", **figures)


async def test_a_worker_sits_out_a_long_outage(
    app: TaskQ, cluster: Cluster, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    worker = start_worker(lease=AWAY + 30, poll_interval=1, environ={"BOUND": str(AWAY + 30)})
    job = await app.get_task("waits").enqueue()
    until(lambda: journal.of("start"))
    await app.close()
    before = worker.log.count("\n")
    cluster.stop("fast")
    stopped = now()
    eventually(lambda: now() - stopped > AWAY / 2, AWAY)
    journal.open_gate()
    until(lambda: journal.of("end"))
    eventually(lambda: now() - stopped > AWAY, AWAY)
    said = worker.log.count("\n") - before
    assert worker.process.poll() is None
    cluster.start()
    back = now()
    more = cluster.query("select taskq.enqueue('work', '{\"seconds\": 0}') as id")[0]["id"]
    assert isinstance(more, UUID)
    until(lambda: journal.of("start")[1:], 5)
    resumed = now() - back
    until(lambda: cluster.value("select count(*) from taskq.jobs") == 0, 5)
    assert [r["outcome"] for r in cluster.query("select outcome from taskq.attempts")] == ["succeeded"] * 2
    # Five connections: three lines each, then one in ten tries.
    assert said < 25 + AWAY, worker.log
    until(lambda: "listen.resumed" in worker.log, 5)
    assert worker.stop() == 0
    survived(
        fault=f"{AWAY:.0f} s without a database",
        injected=1,
        notes=f"claims resumed in {resumed:.1f} s, {said} lines of log",
        **reckon(cluster.dsn, journal.of("start"), [job.id, more]),
    )

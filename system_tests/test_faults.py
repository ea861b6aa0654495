"""Processes that are killed, frozen or cut off, and a database that goes away: nothing is lost, nothing told twice."""

from __future__ import annotations

import random
import signal
from collections import Counter
from uuid import UUID

import psycopg
import pytest
from conftest import Journal, StartWorker, WorkerProcess, now, until
from proxy import proxy
from psycopg.rows import dict_row
from survival import Survived, reckon

from taskq import TaskQ
from taskq.worker.lease import EXIT_LEASE_LOST

pytestmark = pytest.mark.anyio
JOBS = 2000


def query(dsn: str, text: str, *args: object) -> list[dict[str, object]]:
    with psycopg.connect(dsn, row_factory=dict_row, autocommit=True) as conn:
        return conn.execute(text, args).fetchall()


def row_of(dsn: str, job: UUID) -> dict[str, object]:
    [row] = query(dsn, "select * from taskq.all_jobs where id = %s", job)
    return row


async def test_a_storm_of_kills_loses_nothing_and_repeats_only_what_is_on_record(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    rand = random.Random(20)
    work = app.get_task("work")
    # 30 slots sleep for at least 16 s in all, however fast the machine is: time enough for eight kills.
    jobs = await app.enqueue_many([work.job(rand.random() * 0.5) for _ in range(JOBS)])
    workers: list[WorkerProcess] = [start_worker(f"w{n}", ready=False, lease=1) for n in range(3)]

    def left() -> int:
        [row] = query(dsn, "select count(*) as n from taskq.jobs")
        return int(str(row["n"]))

    kills = 0
    quiet_until = now()
    done = 0

    def next_kill() -> bool:
        nonlocal kills, quiet_until, done
        ended = len(journal.of("end"))
        if kills < 8 and now() > quiet_until and ended > done:
            # Only while they work, so that every kill hits running bodies.
            victim = rand.randrange(3)
            workers[victim].kill()
            kills += 1
            workers[victim] = start_worker(f"w{victim}-{kills}", ready=False, lease=1)
            quiet_until, done = now() + 0.2 + rand.random(), ended
        return left() == 0

    until(next_kill, 180)
    assert kills == 8
    ended = query(dsn, "select id, status, claim_epoch, recoveries, releases from taskq.history")
    assert Counter(row["status"] for row in ended) == {"succeeded": JOBS}
    on_record = {
        (str(row["job_id"]), row["claim_epoch"]): row["outcome"]
        for row in query(dsn, "select job_id, claim_epoch, outcome from taskq.attempts")
    }
    starts, ends = Counter(journal.of("start")), Counter(journal.of("end"))
    # Every attempt ran at most once, and is on record; every job has ended in the world as well as in the database.
    assert set(starts.values()) == {1}
    assert set(starts) <= set(on_record)
    assert {job for job, _ in ends} == {str(row["id"]) for row in ended}
    repeated = {key for key in starts if on_record[key] != "succeeded"}
    assert {on_record[key] for key in repeated} <= {"lost", "released"}
    assert len(starts) - len(repeated) == JOBS
    assert any(outcome == "lost" for outcome in on_record.values())
    for worker in workers:
        worker.until_started().signal(signal.SIGTERM)
    for worker in workers:
        assert worker.exit_code(30) == 0
    survived(
        fault="one of three workers killed under load",
        injected=kills,
        **reckon(dsn, journal.of("start"), [job.id for job in jobs]),
    )


@pytest.mark.parametrize("then", ["succeed", "fail", "snooze", "cancel"])
@pytest.mark.parametrize("task", ["waits", "waits_in_thread"])
async def test_a_frozen_worker_that_wakes_up_past_its_lease_changes_nothing(
    task: str, then: str, app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    frozen = start_worker("frozen", lease=1)
    job = await app.get_task(task).enqueue(then=then)
    until(lambda: journal.of("start"))
    frozen.signal(signal.SIGSTOP)
    query(dsn, "update taskq.workers set lease_expires_at = '-infinity' returning 1")
    query(dsn, "select * from taskq.mark_lost()")
    assert [row["settled"] for row in query(dsn, "select * from taskq.settle_lost()")] == ["pending"]
    assert query(dsn, "select taskq.cancel(%s) as answer", job.id) == [{"answer": "cancelled"}]
    before = row_of(dsn, job.id)
    # Its body can end the moment that it wakes up.
    journal.open_gate()
    frozen.signal(signal.SIGCONT)
    woke = now()
    assert frozen.process.poll() is None
    until(lambda: frozen.process.poll() is not None or "worker.registered_anew" in frozen.log, 10)
    assert now() - woke < 5
    if frozen.process.poll() is not None:
        assert frozen.process.returncode == EXIT_LEASE_LOST
    else:
        again = await app.get_task("work").enqueue(0)
        assert await again.result(timeout=5) == 1
        assert frozen.stop() == 0
    assert row_of(dsn, job.id) == before
    assert len(query(dsn, "select 1 from taskq.attempts where job_id = %s", job.id)) == 1
    # Declared lost and cancelled meanwhile; what it does on waking is fenced out.
    figures = reckon(dsn, journal.of("start"), [job.id])
    survived(fault="worker frozen past its lease, then thawed", injected=1, **figures)


async def test_a_frozen_worker_that_wakes_up_past_its_lease_lets_its_started_effects_tell_their_outcome(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    """Whatever runs beside them: a body that is stopped, a hook that cannot be, and one that waits for its start."""
    lease = 6
    with proxy(dsn) as way:
        frozen = start_worker("frozen", lease=lease, to=way.dsn)
        paid = await app.get_task("pays_at_a_gate").enqueue()
        asked = await app.get_task("does_not_know").enqueue()
        waits = await app.get_task("waits").enqueue()
        until(lambda: journal.of("asked") and len(journal.of("start")) == 2)
        way.stall("taskq side")
        starts = await app.get_task("pays").enqueue()
        until(lambda: row_of(dsn, starts.id)["status"] == "running")
        frozen.signal(signal.SIGSTOP)
        thaw = now() + lease + 0.2
        query(dsn, "update taskq.workers set lease_expires_at = '-infinity' returning 1")
        query(dsn, "select * from taskq.mark_lost()")
        settled = {row["job_id"]: row["settled"] for row in query(dsn, "select * from taskq.settle_lost()")}
        assert (settled.pop(paid.id), settled.pop(starts.id), settled.pop(waits.id)) == (
            "unknown",
            "pending",
            "pending",
        )
        assert list(settled.values()) == ["pending"], "the one that asks"
        until(lambda: now() > thaw)
        frozen.signal(signal.SIGCONT)
        woke = now()
        until(lambda: (str(waits.id), 1) in journal.of("cancelled"))
        way.restore()
        until(lambda: "worker.lease_taken" in frozen.log and now() > woke + 1)
        # It goes on under another name once the hook has ended, and the effect of before goes on beside it.
        journal.open_gate("answered")
        journal.open_gate()
        until(lambda: "worker.registered_anew" in frozen.log or frozen.process.poll() is not None)
        assert frozen.process.poll() is None, frozen.log[-4000:]
        assert await starts.result(timeout=15) == 2
        assert await waits.result(timeout=15) == "epoch 2"
        assert await asked.result(timeout=15) == "it did"
        assert row_of(dsn, paid.id)["status"] == "unknown"
        journal.open_gate("paid")
        assert await paid.result(timeout=15) == 1
        assert frozen.stop() == 0
    assert journal.of("start").count((str(paid.id), 1)) == 1
    assert (str(starts.id), 1) not in journal.of("start"), "nothing was begun without a lease"
    figures = reckon(dsn, journal.of("start"), [paid.id, starts.id, waits.id])
    survived(fault="worker with a started effect frozen past its lease, then thawed", injected=1, **figures)


async def test_a_body_that_kills_its_worker_is_found_out_alone(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    killer = await app.get_task("kills_its_worker").enqueue()
    sleeps = app.get_task("sleeps").using(max_attempts=1)
    neighbours = await app.enqueue_many([sleeps.job(0.5) for _ in range(6)])
    end = now() + 80
    n = 0
    worker = start_worker("w0", ready=False, lease=1)
    while row_of(dsn, killer.id)["status"] != "failed" and now() < end:
        if worker.process.poll() is not None:
            assert worker.process.returncode == 9
            n += 1
            worker = start_worker(f"w{n}", ready=False, lease=1)
        until(lambda w=worker: w.process.poll() is not None or row_of(dsn, killer.id)["status"] == "failed", 40)
    assert n == 3
    row = row_of(dsn, killer.id)
    assert "RecoveryExhausted" in str(row["error"])
    assert row["recoveries"] == 3
    for job in neighbours:
        assert await job.result(timeout=30) == 1
        assert int(str(row_of(dsn, job.id)["recoveries"])) <= 2
    assert len([job for job, _ in journal.of("start") if job == str(killer.id)]) == 3
    assert worker.stop() == 0
    ids = [killer.id, *(job.id for job in neighbours)]
    survived(
        fault="body that kills its worker", injected=n, notes="found out alone", **reckon(dsn, journal.of("start"), ids)
    )


async def test_a_crash_in_the_last_recovery_ends_the_job(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    job = await app.get_task("is_lost_once").enqueue()
    worker = start_worker(lease=1)
    until(lambda: journal.of("start"))
    worker.kill()
    start_worker("next", lease=1)
    until(lambda: row_of(dsn, job.id)["status"] == "failed")
    row = row_of(dsn, job.id)
    assert (row["attempt"], row["recoveries"]) == (0, 1)
    assert "RecoveryExhausted" in str(row["error"])
    [left] = query(dsn, "select count(*) as n from taskq.jobs where status = 'running'")
    assert left["n"] == 0
    survived(fault="worker killed in a job's last recovery", injected=1, **reckon(dsn, journal.of("start"), [job.id]))

"""Signals: running bodies end or are handed back, nothing waits for a lease, no attempt is used up."""

from __future__ import annotations

import signal
from uuid import UUID

import psycopg
import pytest
from conftest import Journal, StartWorker, now, until
from helpers import eventually
from survival import Survived, reckon

from taskq import TaskQ
from taskq.worker.lease import EXIT_LEASE_LOST
from taskq.worker.service import EXIT_NOT_FLUSHED, EXIT_STUCK
from taskq.worker.shutdown import ABANDON_DELAY

pytestmark = pytest.mark.anyio


def row_of(dsn: str, job: UUID) -> dict[str, object]:
    with psycopg.connect(dsn, row_factory=psycopg.rows.dict_row) as conn:
        row = conn.execute("select * from taskq.all_jobs where id = %s", (job,)).fetchone()
        assert row is not None
        return row


async def test_deploys_use_no_attempt(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    job = await app.get_task("waits").enqueue()
    for n in range(5):
        worker = start_worker(f"w{n}", grace=0.3)
        until(lambda n=n: len(journal.of("start")) == n + 1)
        assert worker.stop() == 0
        row = row_of(dsn, job.id)
        assert (row["status"], row["attempt"], row["recoveries"], row["releases"]) == ("pending", 0, 0, n + 1)
    journal.open_gate()
    last = start_worker("last")
    assert await job.result(timeout=10) == "epoch 6"
    assert last.stop() == 0
    survived(fault="deploy in the middle of a body", injected=5, **reckon(dsn, journal.of("start"), [job.id]))


async def test_a_fresh_worker_starts_what_was_handed_back_at_once(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    job = await app.get_task("waits").enqueue()
    old = start_worker("old", grace=0.3, lease=60)
    until(lambda: journal.of("start"))
    assert old.stop() == 0
    assert row_of(dsn, job.id)["status"] == "pending"
    start = now()
    fresh = start_worker("fresh", lease=60)
    until(lambda: len(journal.of("start")) == 2)
    assert now() - start < 5
    journal.open_gate()
    await job.result(timeout=5)
    assert fresh.stop() == 0


@pytest.mark.parametrize("signals", [1, 2], ids=["one signal", "two signals 20 ms apart"])
async def test_a_body_ends_within_the_grace_and_nothing_more_is_claimed(
    signals: int, app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    running = await app.get_task("waits").enqueue()
    worker = start_worker(grace=20)
    until(lambda: journal.of("start"))
    worker.signal(signal.SIGTERM)
    if signals == 2:
        sent = now()
        eventually(lambda: now() - sent >= 0.02, interval=0.005)
        worker.signal(signal.SIGTERM)
    until(lambda: "worker.draining" in worker.log)
    after = await app.get_task("work").enqueue(0)
    journal.open_gate()
    assert worker.exit_code() == 0
    assert await running.result(timeout=5) == "epoch 1"
    assert (row_of(dsn, after.id)["status"], row_of(dsn, after.id)["claim_epoch"]) == ("pending", 0)
    assert len(journal.of("start")) == 1


@pytest.mark.parametrize("task", ["waits", "waits_in_thread"])
async def test_a_second_signal_ends_the_grace(
    task: str, app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    job = await app.get_task(task).enqueue()
    worker = start_worker(grace=60)
    until(lambda: journal.of("start"))
    worker.signal(signal.SIGTERM)
    first = now()
    eventually(lambda: now() - first > 1.3)
    worker.signal(signal.SIGTERM)
    second = now()
    assert worker.exit_code() == 0
    assert now() - second < 2.5
    row = row_of(dsn, job.id)
    assert (row["status"], row["attempt"], row["releases"]) == ("pending", 0, 1)
    assert not journal.of("end")


async def test_a_body_that_swallows_its_cancellation_is_gone_before_its_successor_starts(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    job = await app.get_task("deaf").enqueue()
    old = start_worker("old", grace=0.3)
    until(lambda: journal.of("start"))
    start_worker("other")
    assert old.stop() == 0
    assert len(journal.of("start")) == 1
    until(lambda: len(journal.of("start")) == 2)
    journal.open_gate()
    assert await job.result(timeout=10) == "epoch 2"
    assert row_of(dsn, job.id)["releases"] == 1


@pytest.mark.parametrize("task", ["deaf", "waits_in_thread"])
async def test_a_database_that_stalls_does_not_keep_a_process_whose_bodies_were_left_behind(
    task: str, app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    job = await app.get_task(task).enqueue()
    worker = start_worker(grace=0.3, lease=30)
    until(lambda: journal.of("start"))
    with psycopg.connect(dsn) as conn:
        conn.execute("select from taskq.jobs where id = %s for update", (job.id,))
        worker.signal(signal.SIGTERM)
        until(lambda: "job.abandoned" in worker.log)
        abandoned = now()
        assert worker.exit_code() == EXIT_NOT_FLUSHED
        assert now() - abandoned < ABANDON_DELAY - 0.2


async def test_a_thread_that_outlives_its_timeout_ends_the_process(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    worker = start_worker()
    beside = await app.get_task("waits").enqueue()
    until(lambda: journal.of("start"))
    stuck = await app.get_task("outlives_its_timeout").enqueue()
    until(lambda: "worker.stuck_thread" in worker.log)
    later = await app.get_task("work").enqueue(0)
    # Its neighbours end first.
    assert worker.process.poll() is None
    journal.open_gate()
    assert worker.exit_code() == EXIT_STUCK
    assert row_of(dsn, beside.id)["status"] == "succeeded"
    row = row_of(dsn, stuck.id)
    assert (row["status"], row["attempt"]) == ("failed", 1)
    assert "AttemptTimeout" in str(row["error"])
    assert "job.failed" in worker.log
    assert row_of(dsn, later.id)["status"] == "pending"


async def test_a_thread_that_runs_as_the_lease_ends_ends_the_process(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    from proxy import proxy

    with proxy(dsn) as way:
        worker = start_worker("cut-off", to=way.dsn, lease=8)
        job = await app.get_task("waits_in_thread").enqueue()
        until(lambda: journal.of("start"))
        way.blackhole()
        assert worker.exit_code() == EXIT_LEASE_LOST
        with psycopg.connect(dsn) as conn:
            [left] = conn.execute(
                "select extract(epoch from lease_expires_at - taskq.now())::float8 from taskq.workers"
            ).fetchone() or [0]
        # Before the database would have declared it lost.
        assert left > 0
        journal.open_gate()
        start_worker("other")
        assert await job.result(timeout=15) == "epoch 2"
        assert "lease.lost" in worker.log
        notes = f"exit {EXIT_LEASE_LOST} {left:.1f} s before the lease ended"
        figures = reckon(dsn, journal.of("start"), [job.id])
        survived(fault="a worker's network cut under a thread", injected=1, notes=notes, **figures)


async def test_a_thread_whose_claim_was_taken_ends_the_process(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    worker = start_worker(lease=3)
    await app.get_task("waits_in_thread").enqueue()
    until(lambda: journal.of("start"))
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("delete from taskq.workers")
    assert worker.exit_code() == EXIT_LEASE_LOST
    assert not journal.of("end")

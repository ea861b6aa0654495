"""A network that swallows everything and tells nobody: a worker stops by itself, in time, and comes back."""

from __future__ import annotations

from uuid import UUID

import psycopg
import pytest
from conftest import LONG, Journal, StartWorker, now, until
from network import network
from proxy import proxy
from survival import Survived, reckon

from taskq import TaskQ
from taskq.worker.lease import EXIT_LEASE_LOST

pytestmark = pytest.mark.anyio
CHECK_LISTENER = None if LONG else "1"
"""Seconds between looks at a silent listener, and for its answer; in life 20 and 10."""


def lease_left(dsn: str, name: str) -> float:
    """Seconds until the database would declare a worker lost."""
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            "select extract(epoch from lease_expires_at - taskq.now())::float8 from taskq.workers where name = %s"
            " and status = 'live'",
            (name,),
        ).fetchone()
    return row[0] if row else 0.0


async def test_a_worker_without_a_network_stops_its_bodies_before_its_lease_ends(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    with network(dsn) as net:
        cut_off = start_worker("cut-off", to=net.dsn, within=net.within, lease=6)
        jobs = await app.enqueue_many([app.get_task("waits").job() for _ in range(10)])
        until(lambda: len(journal.of("start")) == 10)
        net.cut()
        until(lambda: len(journal.of("cancelled")) == 10)
        left = lease_left(dsn, "cut-off")
        assert left > 0, "its bodies ran into the lease of others"
        # Started now: a start takes seconds on a busy machine, and would be counted above.
        other = start_worker("other", lease=6)
        assert "lease.expiring" in cut_off.log
        # It holds no lease, so its jobs start elsewhere.
        until(lambda: len(journal.of("start")) == 20, 30)
        assert {epoch for _, epoch in journal.of("start")[10:]} == {2}
        journal.open_gate()
        for job in jobs:
            assert await job.result(timeout=10) == "epoch 2"
        assert other.stop() == 0
        assert cut_off.process.poll() is None
        net.mend()
        until(lambda: "worker.registered_anew" in cut_off.log, 30)
        more = await app.get_task("work").enqueue(0)
        assert await more.result(timeout=10) == 1
        assert cut_off.stop() == 0
        figures = reckon(dsn, journal.of("start"), [*(job.id for job in jobs), more.id])
        assert figures["lost"] == 10
        notes = f"by {net.kind}; bodies cancelled {left:.1f} s before the lease ended"
        survived(fault="a worker's network cut in silence", injected=1, notes=notes, **figures)


async def test_a_body_that_cannot_be_stopped_ends_the_process_before_the_lease_ends(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    with network(dsn) as net:
        cut_off = start_worker("cut-off", to=net.dsn, within=net.within, lease=8)
        job = await app.get_task("deaf").enqueue()
        until(lambda: journal.of("start"))
        net.cut()
        assert cut_off.exit_code() == EXIT_LEASE_LOST
        left = lease_left(dsn, "cut-off")
        other = start_worker("other", lease=8)
        assert left > 0
        assert "lease.lost" in cut_off.log
        journal.open_gate()
        assert await job.result(timeout=30) == "epoch 2"
        assert other.stop() == 0
        # Its supervisor starts it again.
        net.mend()
        again = start_worker("again", to=net.dsn, within=net.within)
        more = await app.get_task("work").enqueue(0)
        assert await more.result(timeout=10) == 1
        assert again.stop() == 0
        notes = f"exit {EXIT_LEASE_LOST} {left:.1f} s before the lease ended"
        figures = reckon(dsn, journal.of("start"), [job.id, more.id])
        survived(fault="the same under a body that does not end", injected=1, notes=notes, **figures)


async def test_a_listener_that_hears_nothing_costs_latency_only(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str, survived: Survived
) -> None:
    jobs: list[UUID] = []
    waits: list[float] = []

    async def one() -> None:
        asked = now()
        job = await app.get_task("work").enqueue(0)
        until(lambda: job.id in {UUID(key) for key, _ in journal.of("start")})
        waits.append(now() - asked)
        jobs.append(job.id)

    with proxy(dsn) as way:
        environ = {"CHECK_LISTENER": CHECK_LISTENER} if CHECK_LISTENER else {}
        worker = start_worker(to=way.dsn, lease=6, poll_interval=0.5, environ=environ)
        await one()
        way.stall("taskq listen")
        for _ in range(5):
            await one()
        # A poll, and what a busy machine takes.
        assert max(waits) < 0.5 + 1.5, waits
        until(lambda: "listen.unavailable" in worker.log, 40)
        assert "database.unavailable" not in worker.log
        way.restore()
        until(lambda: "listen.resumed" in worker.log, 40)
        await one()
        assert worker.stop() == 0
    notes = f"longest wait {max(waits):.2f} s, polling twice a second"
    survived(
        fault="only the listener cut in silence", injected=1, notes=notes, **reckon(dsn, journal.of("start"), jobs)
    )

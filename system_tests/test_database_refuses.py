"""A database that answers and refuses: full, read-only, out of connections, hasty, or with a clock that steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import UUID

import asyncpg
import psycopg
import pytest
from cluster import Cluster, Clusters
from conftest import LONG, Journal, StartWorker, now, until
from helpers import eventually
from proxy import proxy
from sql import control_clock, shift_clock, violations
from survival import Survived, reckon

from taskq import TaskQ

pytestmark = pytest.mark.anyio
READ_ONLY_FOR = 20.0 if LONG else 8.0
"""Seconds on a standby before it is promoted."""
LONGEST_WAIT = 3.0
"""Seconds between two tries of the exchange, at most."""
PADDING = "x" * 2000


@pytest.fixture
def dsn(cluster: Cluster) -> str:
    return cluster.dsn


@pytest.fixture
def worker_dsn(cluster: Cluster) -> str:
    """The database as a role that is only a worker."""
    cluster.query("create role plain login")
    cluster.query("grant taskq_worker to plain")
    return cluster.dsn.replace("//taskq@", "//plain@")


# Connections ----------------------------------------------------------------------------------------------------------


async def test_a_worker_that_finds_no_free_connection_waits_for_one(
    app: TaskQ,
    cluster: Cluster,
    worker_dsn: str,
    start_worker: StartWorker,
    journal: Journal,
    survived: Survived,
) -> None:
    cluster.query("alter role plain connection limit 0")
    job = await app.get_task("work").enqueue(0)
    worker = start_worker(to=worker_dsn, ready=False)
    until(lambda: worker.log.count("worker.waits") >= 2)
    assert "the server has no free connection; raise max_connections" in worker.log
    assert worker.process.poll() is None
    # Told to stop, it does not insist.
    idle = start_worker("idle", to=worker_dsn, ready=False)
    until(lambda: "worker.waits" in idle.log)
    assert idle.stop() == 0
    cluster.query("alter role plain connection limit 20")
    worker.until_started()
    assert await job.result(timeout=10) == 1
    # And once more while it works: its connections are ended and refused.
    running = await app.get_task("waits").enqueue()
    until(lambda: journal.of("start")[1:])
    cluster.query("alter role plain connection limit 0")
    cluster.query("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'plain'")
    journal.open_gate()
    until(lambda: "database.unavailable" in worker.log)
    assert worker.process.poll() is None
    cluster.query("alter role plain connection limit 20")
    assert await running.result(timeout=15) in ("epoch 1", "epoch 2")
    assert worker.stop() == 0
    survived(
        fault="no free connection for the worker's role",
        injected=2,
        notes="at boot and at work",
        **reckon(cluster.dsn, journal.of("start"), [job.id, running.id]),
    )


@pytest.mark.parametrize("cluster", [{"max_connections": "15", "max_wal_senders": "0"}], indirect=True)
async def test_a_server_whose_connections_are_all_taken_is_waited_for(
    app: TaskQ, cluster: Cluster, worker_dsn: str, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    job = await app.get_task("work").enqueue(0)
    await app.close()
    others: list[psycopg.Connection[object]] = []

    def take_all() -> None:
        with suppress(psycopg.OperationalError):
            while True:
                others.append(psycopg.connect(worker_dsn))

    def give_back() -> None:
        while others:
            others.pop().close()

    take_all()
    worker = start_worker(to=worker_dsn, ready=False, lease=6)
    until(lambda: worker.log.count("worker.waits") >= 2)
    assert "the server has no free connection" in worker.log
    give_back()
    worker.until_started()
    until(lambda: cluster.value("select count(*) from taskq.jobs") == 0)

    def shut_out() -> bool:
        # Again where the worker was faster to come back than the others to take its places.
        cluster.query("select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'taskq %%'")
        take_all()
        return "database.unavailable" in worker.log

    until(shut_out)
    more = UUID(str(cluster.query("select taskq.enqueue('work', '{\"seconds\": 0}') as id")[0]["id"]))
    give_back()
    until(lambda: cluster.value("select count(*) from taskq.jobs") == 0)
    assert worker.stop() == 0
    figures = reckon(cluster.dsn, journal.of("start"), [job.id, more])
    survived(fault="all connections of the server taken", injected=2, notes="at boot and at work", **figures)


# The disk -------------------------------------------------------------------------------------------------------------


class Disk:
    """Room for tables that runs out: a small file system that a file fills up, where this user may mount one."""

    def __init__(self, cluster: Cluster, mounted: Path | None) -> None:
        self.cluster = cluster
        self._filler = mounted / "filler" if mounted else None
        self.kind = "a file system of 96 MB" if mounted else "triggers that answer as a full disk does"

    def fill(self) -> None:
        if self._filler is None:
            self.cluster.query(
                "create function public.full() returns trigger language plpgsql as"
                " $$ begin raise exception using errcode = '53100', message = 'No space left on device'; end $$"
            )
            for table in ("jobs", "history"):
                self.cluster.query(
                    f"create trigger disk_full before insert on taskq.{table} for each row"
                    " execute function public.full()"
                )
            return
        handle = os.open(self._filler, os.O_WRONLY | os.O_CREAT)
        try:
            while True:
                os.write(handle, bytes(65536))
        except OSError:
            pass
        finally:
            os.close(handle)

    def free(self) -> None:
        if self._filler is None:
            self.cluster.query("drop function public.full cascade")
        else:
            self._filler.unlink()


@contextmanager
def small_disk(clusters: Clusters, folder: Path) -> Iterator[Disk]:
    """A server whose tables, but not whose log of writes, are on a small file system."""
    mounted = folder / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=96m,mode=0711", "tmpfs", str(mounted)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        with clusters.one() as cluster:
            yield Disk(cluster, None)
        return
    try:
        for above in (folder, *folder.parents):
            if above.stat().st_uid == os.geteuid() and above != Path("/"):
                above.chmod(above.stat().st_mode | 0o011)
        with clusters.one(data=mounted / "data") as cluster:
            yield Disk(cluster, mounted)
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


class TestFullDisk:
    """On a server of its own, which its fixture puts on the small disk."""

    @pytest.fixture
    def disk(self, clusters: Clusters, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
        with small_disk(clusters, tmp_path_factory.mktemp("small")) as disk:
            yield disk

    @pytest.fixture
    def cluster(self, disk: Disk) -> Cluster:
        return disk.cluster

    async def test_a_full_disk_turns_no_success_into_a_failure(
        self, disk: Disk, app: TaskQ, cluster: Cluster, start_worker: StartWorker, journal: Journal, survived: Survived
    ) -> None:
        waits = app.get_task("waits")
        worker = start_worker(lease=30, concurrency=200)
        jobs = [job.id for job in await app.enqueue_many([waits.job(gate="g" + PADDING[:150]) for _ in range(200)])]
        until(lambda: len(journal.of("start")) == 200)
        # Opened before: a new session may have to write a file before it answers anything.
        held = psycopg.connect(cluster.dsn, autocommit=True)

        def value(text: str, *args: object) -> object:
            row = held.execute(text, args).fetchone()
            assert row is not None
            return row[0]

        disk.fill()
        refusals = 0
        accepted: list[UUID] = []
        # What room is left within the tables' pages is used up first.
        for _ in range(2000):
            try:
                found = value("select taskq.enqueue('sleeps', %s::jsonb, run_in => '1 hour')", large())
                accepted.append(UUID(str(found)))
            except psycopg.errors.DiskFull:
                refusals += 1
                if refusals == 20:
                    break
        assert refusals == 20
        journal.open_gate("g" + PADDING[:150])
        until(lambda: len(journal.of("end")) == 200)
        until(lambda: "53100" in worker.log or "DiskFull" in worker.log)
        full_since = now()
        eventually(lambda: now() - full_since > 3, 5)
        assert worker.process.poll() is None
        assert value("select count(*) from taskq.history where status <> 'succeeded'") == 0
        assert value("select count(*) > 0 from taskq.jobs where status = 'running'")
        later = app.get_task("sleeps").using(run_in="1h", tags=[PADDING[:200]] * 20)

        async def until_refused() -> None:
            # What the server has tidied up meanwhile is used up first, here too.
            for _ in range(2000):
                accepted.append((await later.enqueue(1)).id)

        with pytest.raises(asyncpg.DiskFullError):
            await until_refused()
        disk.free()
        held.close()
        until(lambda: cluster.value("select count(*) from taskq.history where status = 'succeeded'") == 200, 20)
        assert cluster.value("select count(*) from taskq.attempts where outcome <> 'succeeded'") == 0
        assert cluster.value("select count(*) from taskq.jobs") == len(accepted)
        more = await app.get_task("work").enqueue(0)
        assert await more.result(timeout=10) == 1
        assert worker.stop() == 0
        survived(
            fault="the disk full",
            injected=1,
            notes=f"{disk.kind}; {refusals} enqueues refused",
            **reckon(cluster.dsn, journal.of("start"), [*jobs, more.id]),
        )


def large() -> str:
    return f'{{"seconds": 0, "padding": "{os.urandom(1500).hex()}"}}'


# Read-only ------------------------------------------------------------------------------------------------------------


async def test_a_worker_on_a_standby_waits_for_its_promotion(
    app: TaskQ, cluster: Cluster, clusters: Clusters, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    await app.close()
    with clusters.one(copy_of=cluster) as standby, proxy(cluster.dsn) as way:
        assert standby.query("select pg_is_in_recovery() as yes") == [{"yes": True}]
        doctor = subprocess.run(
            [sys.executable, "-m", "taskq", "doctor", "--dsn", standby.dsn, "--json"],
            capture_output=True,
            check=False,
        )
        assert doctor.returncode == 1
        found = {check["check"]: check["verdict"] for check in json.loads(doctor.stdout)["checks"]}
        assert found["writable"] == "fail"
        worker = start_worker(to=way.dsn, lease=60, poll_interval=1)
        first = cluster.query("select taskq.enqueue('waits', '{}') as id")[0]["id"]
        until(lambda: journal.of("start"))
        sent = cluster.query("select pg_current_wal_flush_lsn()::text as lsn")[0]["lsn"]
        until(lambda: standby.query("select pg_last_wal_replay_lsn() >= %s::pg_lsn as yes", sent)[0]["yes"])
        # The primary is gone; its name leads to the standby, which is not promoted for a while.
        cluster.stop("immediate")
        way.lead_to(standby.dsn)
        way.cut()
        way.restore()
        failed_over = now()
        before = worker.log.count("\n")
        idle = start_worker("starts-on-a-standby", to=way.dsn, ready=False, poll_interval=1)
        journal.open_gate()
        until(lambda: journal.of("end"))
        until(lambda: "worker.waits" in idle.log)
        eventually(lambda: now() - failed_over > READ_ONLY_FOR, READ_ONLY_FOR + 5)
        said = worker.log.count("\n") - before
        # Five connections: three lines each, then one in ten tries.
        assert said <= 20, worker.log
        assert worker.process.poll() is None
        waits = [float(part.split("=")[1]) for part in worker.log.split() if part.startswith("next_try_in=")]
        assert max(waits) > 4 * min(waits), waits
        assert len(set(waits)) > len(waits) // 2, f"no jitter: {waits}"
        standby.promote()
        promoted = now()
        more = standby.query("select taskq.enqueue('work', '{\"seconds\": 0}') as id")[0]["id"]
        until(lambda: journal.of("start")[1:])
        started = now() - promoted
        assert started < LONGEST_WAIT + 1, started
        until(lambda: "listen.resumed" in worker.log, LONGEST_WAIT + 2)
        until(lambda: standby.value("select count(*) from taskq.jobs") == 0)
        idle.until_started()
        assert [r["outcome"] for r in standby.query("select outcome from taskq.attempts")] == ["succeeded"] * 2
        # It listens on the promoted server: a job starts long before a poll, once no connection is in trouble.
        assert idle.stop() == 0
        assert worker.stop() == 0
        with psycopg.connect(standby.dsn) as check:
            assert violations(check) == []
        survived(
            fault="fail-over to a standby that stays read-only",
            injected=1,
            notes=f"{READ_ONLY_FOR:.0f} s read-only, {said} lines of log, a job {started:.1f} s after the promotion",
            **reckon(standby.dsn, journal.of("start"), [UUID(str(first)), UUID(str(more))]),
        )
    cluster.start()


# The clock ------------------------------------------------------------------------------------------------------------


async def test_a_clock_that_steps_by_an_hour_loses_no_worker(
    app: TaskQ, cluster: Cluster, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    with psycopg.connect(cluster.dsn, autocommit=True) as conn:
        control_clock(conn)
        lease = 2
        workers = [start_worker(f"w{n}", lease=lease) for n in range(2)]
        waiting = [job.id for job in await app.enqueue_many([app.get_task("waits").job() for _ in range(6)])]
        until(lambda: len(journal.of("start")) == 6)
        jobs = list(waiting)
        for step in ("1 hour", "-2 hours", "1 hour"):
            shift_clock(conn, step)
            stepped = now()
            batch = await app.enqueue_many([app.get_task("work").job(0.05) for _ in range(10)])
            jobs += [job.id for job in batch]
            for job in batch:
                await job.result(timeout=10)
            # Past the quiet time of one lease, so that whoever would be declared lost has been.
            eventually(lambda since=stepped: now() - since > 1.5 * lease, 2 * lease)
        journal.open_gate()
        until(lambda: cluster.value("select count(*) from taskq.jobs") == 0)
        assert cluster.value("select count(*) from taskq.attempts where outcome <> 'succeeded'") == 0
        assert cluster.value("select count(*) from taskq.workers where status = 'live'") == 2
        for worker in workers:
            assert "worker.lost" not in worker.log
            assert "lease.expiring" not in worker.log
            assert worker.stop() == 0
    survived(
        fault="the database's clock steps by an hour",
        injected=3,
        notes="forward and back",
        **reckon(cluster.dsn, journal.of("start"), jobs),
    )


# Limits of the role ---------------------------------------------------------------------------------------------------


LIMITS = (
    "statement_timeout",
    "lock_timeout",
    "idle_in_transaction_session_timeout",
    "idle_session_timeout",
)


async def test_limits_that_a_role_sets_for_others_do_not_keep_a_worker_from_its_work(
    app: TaskQ, cluster: Cluster, worker_dsn: str, start_worker: StartWorker, journal: Journal, survived: Survived
) -> None:
    for limit in LIMITS:
        cluster.query(f"alter role plain set {limit} = '100ms'")
    # A rescue that takes longer than any of them.
    orphans = [job.id for job in await app.enqueue_many([app.get_task("work").job(0) for _ in range(50)])]
    cluster.query(
        "select count(*) from taskq.claim("
        "taskq.register_worker('gone', 'h', 1, '{default}', '{work}', 300, 1, '0', 60), 300, '{work}', '{default}',"
        " '{5}', '{-infinity}', array['00000000-0000-0000-0000-000000000000'::uuid])",
    )
    cluster.query("update taskq.workers set lease_expires_at = '-infinity'")
    cluster.query("select * from taskq.mark_lost()")
    cluster.query(
        "create function public.slow_down() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(0.01); return new; end $$"
    )
    cluster.query(
        "create trigger slow before insert on taskq.ledger for each row when (new.outcome = 'lost')"
        " execute function public.slow_down()"
    )
    worker = start_worker(to=worker_dsn, lease=3)
    until(lambda: cluster.value("select count(*) from taskq.jobs") == 0, 20)
    idle_since = now()
    eventually(lambda: now() - idle_since > 1)
    last = await app.get_task("work").enqueue(0)
    assert await last.result(timeout=5) == 1
    for trouble in (
        "database.unavailable",
        "database.refused",
        "listen.unavailable",
        "lease.not_renewed",
        "duty.failed",
    ):
        assert trouble not in worker.log, worker.log
    assert worker.stop() == 0
    survived(
        fault="the role's timeouts at 100 ms",
        injected=len(LIMITS),
        **reckon(cluster.dsn, journal.of("start"), [*orphans, last.id]),
    )

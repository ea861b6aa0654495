"""Bodies that never end, never heed, hold the GIL, kill their process or turn on it: found out, and on record."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from conftest import Journal, StartWorker, WorkerProcess, _module, now, until
from psycopg.rows import dict_row
from survival import Survived, reckon

from taskq import TaskQ
from taskq.worker.lease import EXIT_LEASE_LOST
from taskq.worker.shutdown import EXIT_STUCK

pytestmark = pytest.mark.anyio
LONG = 120.0
StartHere = Callable[..., WorkerProcess]
Rows = list[dict[str, Any]]


@pytest.fixture
async def app(dsn: str, anyio_backend: str) -> AsyncIterator[TaskQ]:
    made: TaskQ = _module("app_of_the_bodies", Path(__file__).with_name("bodies_under_test.py")).app
    made.use_database(dsn)
    yield made
    await made.close()


@pytest.fixture
def start(start_worker: StartWorker) -> StartHere:
    return partial(start_worker, app="bodies_under_test:app")


def query(dsn: str, text: str, *args: object) -> Rows:
    with psycopg.connect(dsn, row_factory=dict_row, autocommit=True) as conn:
        return conn.execute(text, args).fetchall()


def row_of(dsn: str, job: UUID) -> dict[str, Any]:
    [row] = query(dsn, "select * from taskq.all_jobs where id = %s", job)
    return row


def outcomes(dsn: str, job: UUID) -> list[str]:
    """How a job's attempts have ended, in order."""
    found = query(dsn, "select outcome from taskq.attempts where job_id = %s order by claim_epoch", job)
    return [str(row["outcome"]) for row in found]


def starts_of(journal: Journal, *jobs: UUID) -> list[int]:
    """The claim epochs whose bodies have started, in order."""
    wanted = set(map(str, jobs))
    return [epoch for job, epoch in journal.of("start") if job in wanted]


def pause(seconds: float) -> None:
    since = now()
    until(lambda: now() - since > seconds, seconds + 5)


# Bodies that do not end -------------------------------------------------------------------------------------------


async def test_a_body_without_an_end_is_timed_out_or_kept_until_it_is_handed_back(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    lease = 2
    start("beside", lease=lease, queue="other")
    worker = start("w", lease=lease, grace=0.3)
    waits = app.get_task("waits")
    timed = await waits.using(timeout=0.5, max_attempts=1).enqueue()
    endless = await waits.enqueue()
    until(lambda: row_of(dsn, timed.id)["status"] == "failed")
    assert "AttemptTimeout" in str(row_of(dsn, timed.id)["error"])
    until(lambda: starts_of(journal, endless.id))
    pause(3 * lease)
    # Nobody took it away meanwhile, though there was who would have.
    row = row_of(dsn, endless.id)
    assert (row["status"], row["claim_epoch"], row["recoveries"]) == ("running", 1, 0)
    assert worker.stop() == 0
    row = row_of(dsn, endless.id)
    assert (row["status"], row["attempt"], row["releases"]) == ("pending", 0, 1)
    journal.open_gate()
    start("next", lease=lease)
    assert await endless.result(timeout=15) == "epoch 2"
    assert outcomes(dsn, endless.id) == ["released", "succeeded"]
    assert outcomes(dsn, timed.id) == ["failed"]
    survived(fault="a body without an end", injected=2, **reckon(dsn, journal.of("start"), [timed.id, endless.id]))


async def test_a_body_that_heeds_nothing_goes_with_its_process_before_its_successor_starts(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    old = start("old", grace=0.3)
    deaf = app.get_task("deaf")
    timed = await deaf.using(timeout=0.3).enqueue()
    told, plain = [await deaf.enqueue() for _ in range(2)]
    until(lambda: len(journal.of("start")) == 3)
    assert await told.cancel() == "requested"
    until(lambda: {str(timed.id), str(told.id)} <= {job for job, _ in journal.of("deaf")})
    # Deaf to a timeout and a cancel, they keep their claims.
    rows = [row_of(dsn, job.id) for job in (timed, told, plain)]
    assert [(row["status"], row["claim_epoch"]) for row in rows] == [("running", 1)] * 3
    start("other")
    assert old.stop() == 0
    assert len(journal.of("start")) == 3
    until(lambda: len(journal.of("start")) == 5)
    journal.open_gate()
    assert await timed.result(timeout=15) == "epoch 2"
    assert await plain.result(timeout=15) == "epoch 2"
    until(lambda: row_of(dsn, told.id)["status"] == "cancelled")
    assert outcomes(dsn, timed.id) == ["failed", "succeeded"]
    assert outcomes(dsn, plain.id) == ["released", "succeeded"]
    assert outcomes(dsn, told.id) == ["cancelled"]
    assert (row_of(dsn, timed.id)["attempt"], row_of(dsn, plain.id)["attempt"]) == (1, 0)
    survived(
        fault="a body that swallows timeout, cancel and shutdown",
        injected=3,
        **reckon(dsn, journal.of("start"), [timed.id, told.id, plain.id]),
    )


async def test_a_body_that_heeds_nothing_goes_with_its_process_as_the_lease_ends(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    from proxy import proxy

    with proxy(dsn) as way:
        old = start("cut-off", to=way.dsn, lease=4)
        job = await app.get_task("deaf").enqueue()
        until(lambda: starts_of(journal, job.id))
        start("other", lease=1)
        way.blackhole()
        assert old.exit_code() == EXIT_LEASE_LOST
        assert journal.of("deaf")
        assert starts_of(journal, job.id) == [1]
        journal.open_gate()
        assert await job.result(timeout=15) == "epoch 2"
    assert outcomes(dsn, job.id) == ["lost", "succeeded"]
    survived(
        fault="a body that swallows the end of its lease", injected=1, **reckon(dsn, journal.of("start"), [job.id])
    )


async def test_a_function_that_blocks_for_ever_costs_its_process_and_is_tried_again(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    old = start("old")
    job = await app.get_task("blocks").using(timeout=0.3).enqueue()
    until(lambda: starts_of(journal, job.id))
    start("other")
    assert old.exit_code() == EXIT_STUCK
    assert starts_of(journal, job.id) == [1]
    assert await job.result(timeout=15) == "epoch 2"
    assert outcomes(dsn, job.id) == ["failed", "succeeded"]
    assert row_of(dsn, job.id)["attempt"] == 1
    survived(fault="a function that blocks for ever", injected=1, **reckon(dsn, journal.of("start"), [job.id]))


# Processes that stand still ---------------------------------------------------------------------------------------


async def test_a_body_that_holds_the_gil_for_leases_changes_nothing_when_it_ends(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    start("leader", lease=1, queue="none")
    held = [start(name, lease=1, concurrency=1, queue=name) for name in ("one", "two")]
    again = await app.get_task("holds_the_gil").using(queue="one").enqueue(4)
    once = await app.get_task("holds_the_gil_once").using(queue="two").enqueue(4)
    until(lambda: len(journal.of("start")) == 2)
    # They are declared lost while they stand still.
    until(lambda: outcomes(dsn, again.id) == ["lost"] and outcomes(dsn, once.id) == ["lost"])
    assert not journal.of("end")
    start("other", queue="one,two")
    assert await again.result(timeout=15) == 2
    until(lambda: row_of(dsn, once.id)["status"] == "failed")
    assert "RecoveryExhausted" in str(row_of(dsn, once.id)["error"])
    before = [row_of(dsn, job.id) for job in (again, once)]
    # The first bodies end as well, and their workers are gone or begin anew.
    until(lambda: all(w.process.poll() == EXIT_LEASE_LOST or "worker.registered_anew" in w.log for w in held))
    for worker in held:
        if worker.process.poll() is None:
            assert worker.stop() == 0
    assert [row_of(dsn, job.id) for job in (again, once)] == before
    assert [row["attempt"] for row in before] == [0, 0]
    assert outcomes(dsn, again.id) == ["lost", "succeeded"]
    assert outcomes(dsn, once.id) == ["lost"]
    assert (starts_of(journal, again.id), starts_of(journal, once.id)) == ([1, 2], [1])
    survived(
        fault="a body that holds the GIL for 4 leases",
        injected=2,
        **reckon(dsn, journal.of("start"), [again.id, once.id]),
    )


async def test_a_leader_that_is_frozen_loses_its_jobs_and_its_lead_and_gets_none_back(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    lease = 2

    def leader() -> UUID | None:
        [row] = query(dsn, "select holder from taskq.leader where role = 'maintenance'")
        holder: UUID | None = row["holder"]
        return holder

    def ids(name: str) -> list[UUID]:
        return [row["id"] for row in query(dsn, "select id from taskq.workers where name = %s", name)]

    frozen = start("frozen", lease=lease)
    [first] = ids("frozen")
    until(lambda: leader() == first, LONG)
    jobs = await app.enqueue_many([app.get_task("waits").job() for _ in range(5)])
    until(lambda: len(journal.of("start")) == 5)
    start("other", lease=lease)
    frozen.signal(signal.SIGSTOP)
    stopped = now()
    until(lambda: leader() in ids("other"), LONG)
    until(lambda: len(journal.of("start")) == 10, LONG)
    pause(max(0.0, 3 * lease - (now() - stopped)))
    journal.open_gate()
    for job in jobs:
        assert await job.result(timeout=15) == "epoch 2"
    before = [row_of(dsn, job.id) for job in jobs]
    frozen.signal(signal.SIGCONT)
    woke = now()
    until(lambda: frozen.process.poll() is not None or "worker.registered_anew" in frozen.log)
    # Two renewals, and time for a busy machine.
    assert now() - woke < 2 * lease / 3 + 4
    notes = "it began anew"
    if frozen.process.poll() is not None:
        assert frozen.process.returncode == EXIT_LEASE_LOST
        notes = f"it ended with {EXIT_LEASE_LOST}"
    else:
        assert frozen.stop() == 0
        ended = len([1 for job, epoch in journal.of("end") if epoch == 1])
        [fenced] = re.findall(r"fenced_out=(\d+)", frozen.log)
        assert int(fenced) >= ended
    assert [row_of(dsn, job.id) for job in jobs] == before
    for job in jobs:
        assert outcomes(dsn, job.id) == ["lost", "succeeded"]
    survived(
        fault="the leader frozen for 3 leases, then thawed",
        injected=1,
        notes=notes,
        **reckon(dsn, journal.of("start"), [job.id for job in jobs]),
    )


# Bodies that end their process ------------------------------------------------------------------------------------


async def test_bodies_that_kill_their_process_are_found_out_alone_and_cost_neighbours_two_losses_at_most(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    deaths = {"SIGKILL": -signal.SIGKILL, "segfault": -signal.SIGSEGV}
    kills, beside = app.get_task("kills"), app.get_task("neighbour")
    killers = {how: await kills.using(queue=f"q{n}").enqueue(how) for n, how in enumerate(deaths)}
    neighbours = []
    for n in range(len(deaths)):
        neighbours += await app.enqueue_many([beside.using(queue=f"q{n}").job(0.5) for _ in range(6)])
    supervisors = {
        how: start(f"s{n}", ready=False, lease=1, concurrency=5, processes=1, queue=f"q{n}")
        for n, how in enumerate(deaths)
    }
    until(lambda: all(row_of(dsn, job.id)["status"] == "failed" for job in killers.values()), LONG)
    for job in neighbours:
        assert await job.result(timeout=LONG) == 1
        row = row_of(dsn, job.id)
        assert row["attempt"] == 0
        assert row["recoveries"] <= 2
    for how, job in killers.items():
        row = row_of(dsn, job.id)
        assert (row["attempt"], row["recoveries"]) == (0, 3)
        assert "RecoveryExhausted" in str(row["error"])
        assert outcomes(dsn, job.id) == ["lost"] * 3
        assert starts_of(journal, job.id) == [1, 2, 3]
        assert supervisors[how].log.count(f"exit_code={deaths[how]:d}") == 3
        assert supervisors[how].stop() == 0
    ids = [job.id for job in (*killers.values(), *neighbours)]
    survived(
        fault="a body that kills its process beside neighbours",
        injected=3 * len(deaths),
        notes="SIGKILL, segfault",
        **reckon(dsn, journal.of("start"), ids),
    )


async def test_a_body_that_eats_all_memory_fails_and_the_worker_goes_on(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    worker = start("w", within=("sh", "-c", 'ulimit -v 2000000 && exec "$@"', "sh"), lease=2)
    beside = await app.get_task("waits").enqueue()
    until(lambda: starts_of(journal, beside.id))
    greedy = await app.get_task("eats").enqueue()
    until(lambda: row_of(dsn, greedy.id)["status"] == "failed")
    assert "MemoryError" in str(row_of(dsn, greedy.id)["error"])
    journal.open_gate()
    after = await app.get_task("neighbour").enqueue(0)
    assert await after.result(timeout=15) == 1
    assert await beside.result(timeout=15) == "epoch 1"
    assert outcomes(dsn, greedy.id) == ["failed"]
    assert journal.of("end")[0] == (str(greedy.id), 1)
    assert worker.stop() == 0
    survived(
        fault="a body that eats all memory",
        injected=1,
        notes="ulimit -v",
        **reckon(dsn, journal.of("start"), [greedy.id, beside.id, after.id]),
    )


# Bodies that turn on their process --------------------------------------------------------------------------------

HARMLESS = (
    "leaves_its_folder",
    "takes_the_loop",
    "stops_the_loop",
    "exits_in_a_callback",
    "child_returns",
    "child_exits",
    "child_raises",
    "child_awaits",
    "child_forks_in_a_task",
    "forked_process",
    "takes_the_signals",
    "takes_the_wakeup",
    "breaks_connections",
    "prints_much",
    "closes_the_log",
)
"""What a body does and returns from."""
FAILS = (
    "exits",
    "exits_in_a_task",
    "recurses",
    "KeyboardInterrupt",
    "GeneratorExit",
    "SystemExit",
    "Strange",
    "Mute",
    "Loud",
)
"""What a body fails of."""
IN_THREADS = ("child_returns", "child_exits", "child_raises", "recurses", "exits")
"""What functions do as well; those in the middle of an ``await`` are left there."""


async def test_what_bodies_do_to_their_process_ends_no_worker_and_no_other_job(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    worker = start("w", lease=10)
    beside = await app.get_task("waits").enqueue()
    until(lambda: starts_of(journal, beside.id))
    does, in_thread, plain = (app.get_task(name) for name in ("does", "does_in_thread", "neighbour"))
    order = FAILS + HARMLESS
    ids = [beside.id]
    for task, deeds in ((in_thread, IN_THREADS), (does, order)):
        for deed in deeds:
            job = await task.enqueue(deed)
            wanted = "failed" if deed in FAILS else "succeeded"
            assert until(lambda job=job: outcomes(dsn, job.id)) == [wanted], deed
            error = row_of(dsn, job.id)["error"]
            assert (error is not None) == (wanted == "failed"), deed
            after = await plain.enqueue(0)
            assert await after.result(timeout=15) == 1, deed
            assert worker.process.poll() is None, deed
            ids += [job.id, after.id]
            if "breaks_connections" not in order[: order.index(deed) + 1]:
                # No copy of the process has read from the worker's connections.
                assert "database.unavailable" not in worker.log, deed
            if deed.startswith("takes_the_") and deed != "takes_the_loop":
                seen = 1 if deed == "takes_the_signals" else 2
                until(lambda seen=seen: worker.log.count("signals.taken") == seen)
    assert row_of(dsn, beside.id)["claim_epoch"] == 1
    journal.open_gate()
    assert await beside.result(timeout=5) == "epoch 1"
    # One process has claimed and ended all of them, and it still hears a signal.
    assert len(query(dsn, "select id from taskq.workers")) == 1
    assert len(journal.of("start")) == len(ids)
    assert worker.stop() == 0
    survived(
        fault="bodies that turn on their process",
        injected=len(order) + len(IN_THREADS),
        notes="descriptors, folder, signals, event loop, forks, exits",
        **reckon(dsn, journal.of("start"), ids),
    )


async def test_a_body_that_cancels_every_task_of_the_loop_ends_its_worker_and_no_other_job(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    worker = start("w")
    beside = await app.get_task("waits").enqueue()
    until(lambda: starts_of(journal, beside.id))
    await app.get_task("does").enqueue("cancels_all")
    assert worker.exit_code(LONG) == 1
    assert "error: the worker's own tasks were cancelled" in worker.log
    journal.open_gate()
    start("other")
    assert await beside.result(timeout=LONG) == "epoch 2"


async def test_a_copy_of_a_child_process_says_nothing_about_the_attempt(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str
) -> None:
    start("w")
    jobs = {deed: await app.get_task("does_in_child").enqueue(deed) for deed in ("child_returns", "child_raises")}
    for deed, job in jobs.items():
        assert await job.result(timeout=LONG) == deed
        assert outcomes(dsn, job.id) == ["succeeded"]


async def test_bodies_that_fail_while_workers_are_killed_and_deployed_use_up_only_their_own_attempts(
    app: TaskQ, start: StartHere, journal: Journal, dsn: str, survived: Survived
) -> None:
    times = 3
    fails = app.get_task("fails")
    jobs = await app.enqueue_many([fails.job(times, f"gate{n % 2}") for n in range(20)])
    ids = [job.id for job in jobs]

    def waiting(epochs: int) -> bool:
        """Whether all that wait at a gate have started so often."""
        found = query(dsn, "select count(*) as n from taskq.jobs where status = 'running' and claim_epoch = %s", epochs)
        return bool(found[0]["n"] == 20)

    first = start("w0", lease=1, concurrency=20, grace=0.2)
    until(lambda: waiting(2))
    first.kill()
    second = start("w1", lease=1, concurrency=20, grace=0.2)
    until(lambda: waiting(3))
    assert second.stop() == 0
    third = start("w2", lease=1, concurrency=20, grace=0.2)
    until(lambda: waiting(4))
    journal.open_gate("gate0")
    journal.open_gate("gate1")
    for job in jobs:
        assert await job.result(timeout=20) == times + 1
        row = row_of(dsn, job.id)
        assert (row["attempt"], row["recoveries"], row["releases"]) == (times, 1, 1)
        assert outcomes(dsn, job.id) == ["failed", "lost", "released", "failed", "failed", "succeeded"]
    assert third.stop() == 0
    survived(fault="20 failing bodies, a kill and a deploy", injected=2, **reckon(dsn, journal.of("start"), ids))

"""Draining: so many jobs are enqueued, then workers begin, until all of them are durably done.

Done means that a count in the database says so, by a query of the adapter's. The count is asked for often, but for no
more than a twentieth of the time, since counting takes the server's time as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.harness.bench import Bench, System
from benchmarks.harness.figures import Sample, rate_around, steady_rate
from benchmarks.harness.processes import AdapterFailed, Workers
from benchmarks.harness.server import Database

__all__ = ["count_of", "drain", "finished", "later", "mark_of", "pinned", "queues", "run_down"]

SHORTEST_WAIT = 0.01
LONGEST_WAIT = 1.0
COUNTING_SHARE = 0.05
PATIENCE = 60.0
PINNED_AT = (0, 100_000, 500_000, 1_000_000)
COPIES_AT_ONCE = 250_000


def drain(
    bench: Bench, system: System, jobs: int, kind: str = "noop", processes: int = 1, concurrency: int | None = None
) -> dict[str, Any]:
    """Enqueue and drain in a fresh database.

    Args:
        bench: Where.
        system: Who.
        jobs: How many.
        kind: What they do, a name in ``peers.bodies``.
        processes: Worker processes.
        concurrency: Bodies at once in each; None for what serves the system best.
    """
    with bench.fresh(system) as database:
        return _drain(bench, system, database, jobs, kind, processes, concurrency)


def finished(bench: Bench, system: System, jobs: int, rows: int) -> dict[str, Any]:
    """Drain beside so many finished jobs: one is run, and copied by SQL in the table of finished jobs."""
    with bench.fresh(system) as database:
        if rows:
            _drain(bench, system, database, 1, "noop", 1, None)
            _copy_finished(system, database, rows)
        return _drain(bench, system, database, jobs, "noop", 1, None)


def later(bench: Bench, system: System, jobs: int, rows: int) -> dict[str, Any]:
    """Drain beside so many jobs that are due in a day."""
    with bench.fresh(system) as database:
        if rows:
            bench.enqueue(system, database, "enqueue-bulk", rows, "--later", "86400")
            database.watch.execute("vacuum analyze")
        return _drain(bench, system, database, jobs, "noop", 1, None)


def queues(bench: Bench, system: System, jobs: int, number: int) -> dict[str, Any]:
    """Drain jobs that are spread over so many queues, by one worker that serves them all."""
    with bench.fresh(system) as database:
        return _drain(bench, system, database, jobs, "noop", 1, None, number)


def pinned(bench: Bench, system: System, jobs: int, hold: bool) -> dict[str, Any]:
    """Drain while another session holds a REPEATABLE READ transaction open, or does not, for comparison.

    The rates are those over a twentieth of the jobs, at least a thousand, from several points of the run on.
    """
    with bench.fresh(system) as database, _held_back(database, hold):
        samples: list[Sample] = []
        figures = _drain(bench, system, database, jobs, "noop", 1, None, samples=samples)
        width = max(1000, jobs // 20)
        for done in PINNED_AT:
            if done + width <= jobs:
                figures[f"jobs_per_s_at_{done}"] = rate_around(samples, done, width)
        figures["jobs_per_s_at_end"] = rate_around(samples, jobs - width, width)
        return figures


def mark_of(system: System, database: Database) -> dict[str, Any]:
    """Where counting begins: arguments for ``count_of``."""
    return {"mark": database.value(system.traits.mark)} if system.traits.mark else {}


def count_of(system: System, database: Database, mark: dict[str, Any]) -> int:
    """How many jobs since the mark are durably done."""
    return int(database.value(system.traits.done, mark or None))


def run_down(count: Callable[[], int], jobs: int, workers: Workers, patience: float = PATIENCE) -> list[Sample]:
    """Wait until so many jobs are done, and give the counts on the way.

    Args:
        count: Says how many are done.
        jobs: Until so many are.
        workers: Those at work; one that ends is an error.
        patience: Seconds without a job done after which it is given up.

    Raises:
        AdapterFailed: A worker ended, nothing was done for too long, or more jobs were done than there were.
    """
    samples: list[Sample] = []
    moved = time.perf_counter()
    while True:
        asked = time.perf_counter()
        done = count()
        now = time.perf_counter()
        if samples and done != samples[-1].done:
            moved = now
        # The count is true of the moment at which its snapshot was taken.
        samples.append(Sample(asked, done))
        if done > jobs:
            raise AdapterFailed(f"{done} jobs are done of {jobs}")
        if done == jobs:
            return samples
        workers.check()
        if now - moved > patience:
            raise AdapterFailed(f"the drain stood still at {done} of {jobs} jobs for {now - moved:.0f} s")
        time.sleep(min(LONGEST_WAIT, max(SHORTEST_WAIT, (now - asked) / COUNTING_SHARE)))


def _drain(
    bench: Bench,
    system: System,
    database: Database,
    jobs: int,
    kind: str,
    processes: int,
    concurrency: int | None,
    number: int = 1,
    samples: list[Sample] | None = None,
) -> dict[str, Any]:
    mark = mark_of(system, database)
    told = bench.enqueue(system, database, "enqueue-bulk", jobs, "--kind", kind, "--queues", str(number))
    with bench.workers(system, database, processes, concurrency, number) as workers:
        before, cpu, started = database.read(), workers.cpu(), time.perf_counter()
        workers.begin()
        seen = [Sample(started, 0), *run_down(lambda: count_of(system, database, mark), jobs, workers)]
        seconds = seen[-1].at - started
        used, client, resident = database.read().since(before), workers.cpu() - cpu, workers.resident()
        connections = database.connections()
    if samples is not None:
        samples += seen
    return {
        "jobs": jobs,
        "seconds": seconds,
        "jobs_per_s": steady_rate(seen, jobs),
        "jobs_per_s_whole": jobs / seconds,
        "client_cpu_us_per_job": client * 1e6 / jobs,
        "server_cpu_us_per_job": used.cpu * 1e6 / jobs,
        "enqueue_jobs_per_s": told["jobs_per_s"],
        "enqueue_wal_bytes_per_job": told["wal_bytes_per_job"],
        "run_wal_bytes_per_job": used.wal / jobs,
        "wal_bytes_per_job": told["wal_bytes_per_job"] + used.wal / jobs,
        "statements_per_job": used.statements / jobs,
        "resident_mib_per_process": resident / processes / 2**20,
        "connections": connections,
    }


@contextmanager
def _held_back(database: Database, hold: bool) -> Iterator[None]:
    """A transaction of another session that keeps vacuum from removing anything that dies from now on."""
    if not hold:
        yield
        return
    with psycopg.connect(database.dsn, user="watcher") as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("select count(*) from pg_class")
        yield


def _copy_finished(system: System, database: Database, rows: int) -> None:
    table = system.traits.finished
    named = sql.SQL(".").join(sql.Identifier(part) for part in table.split("."))
    columns = [
        row[0]
        for row in database.watch.execute(
            "select attname from pg_attribute where attrelid = %s::regclass and attnum > 0 and not attisdropped"
            " and attgenerated = '' order by attnum",
            (table,),
        )
    ]
    fresh = system.traits.fresh
    kept = [name for name in columns if fresh.get(name) != ""]
    values = [sql.SQL(fresh[name]) if fresh.get(name) else sql.Identifier("one", name) for name in kept]
    statement = sql.SQL(
        "insert into {table} ({columns}) select {values}"
        " from (select * from {table} limit 1) one cross join generate_series(1, %s)"
    ).format(table=named, columns=sql.SQL(", ").join(map(sql.Identifier, kept)), values=sql.SQL(", ").join(values))
    left = rows
    while left > 0:
        database.watch.execute(statement, (min(left, COPIES_AT_ONCE),))
        left -= COPIES_AT_ONCE
    database.watch.execute("vacuum analyze")
    database.watch.execute("checkpoint")

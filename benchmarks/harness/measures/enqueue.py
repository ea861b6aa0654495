"""Enqueueing: one by one, in bulk, and by eight clients at once with and without notifications."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.bench import Bench, System
from benchmarks.harness.measures.drain import count_of, mark_of, run_down

__all__ = ["bulk", "notify", "single"]

CLIENTS = 8
# The function by which enqueue tells workers that sleep. Replaced by one that does nothing, only in this measure's own
# database: what is left is an enqueue that notifies nobody.
SILENCE = """
create or replace function taskq.wake(p_queues text[], p_jobs integer default 1) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$ begin end $$
"""


def single(bench: Bench, system: System, jobs: int) -> dict[str, Any]:
    """One client, no worker: each job committed before the next is sent."""
    with bench.fresh(system) as database:
        return bench.enqueue(system, database, "enqueue-one", jobs)


def bulk(bench: Bench, system: System, jobs: int) -> dict[str, Any]:
    """One client, no worker: many jobs by the system's own way for many."""
    with bench.fresh(system) as database:
        return bench.enqueue(system, database, "enqueue-bulk", jobs)


def notify(bench: Bench, system: System, jobs: int) -> dict[str, Any]:
    """taskq alone: eight clients one by one beside a worker, as it is and with its notifications taken out."""
    told = {way: _beside_a_worker(bench, system, jobs, way == "silent") for way in ("adaptive", "silent")}
    return {f"{way}_{name}": each[name] for way, each in told.items() for name in ("jobs_per_s", "wal_bytes_per_job")}


def _beside_a_worker(bench: Bench, system: System, jobs: int, silent: bool) -> dict[str, Any]:
    with bench.fresh(system) as database:
        if silent:
            database.watch.execute(SILENCE)
        mark = mark_of(system, database)
        with bench.workers(system, database) as workers:
            workers.begin()
            # The worker is at work when the clients begin, and has nothing to do yet.
            first = bench.enqueue(system, database, "enqueue-one", 1)["in_all"]
            run_down(lambda: count_of(system, database, mark), first, workers)
            told = bench.enqueue(system, database, "enqueue-one", jobs, "--clients", str(CLIENTS))
            run_down(lambda: count_of(system, database, mark), first + told["in_all"], workers)
        return told

"""``make bench``: taskq alone, all guarantees on, on a durable PostgreSQL 18 of its own.

Each figure is the median of several rounds, with the spread beside it. ``taskq verify`` runs at the end; a violation
fails the run. Writes ``benchmarks/results/latest.json``. Takes about three minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.app import app, noop
from taskq import TaskQ, migrate
from tests.servers import Server, serve

ROOT = Path(__file__).resolve().parent.parent
TEXT = "x" * 30
ROUNDS = 3
DRAIN_JOBS = 30_000
SETTINGS = {"shared_buffers": "1GB", "max_wal_size": "4GB", "max_connections": "100"}


class Bench:
    """One database, and what is measured in it."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn
        self.conn = psycopg.connect(dsn, autocommit=True)

    def value(self, query: str, *args: Any) -> Any:
        """One value of the database."""
        row = self.conn.execute(query, args).fetchone()
        assert row is not None
        return row[0]

    def done(self) -> int:
        """How many jobs are finished."""
        return int(self.value("select count(*) from taskq.history"))

    def worker(self, concurrency: int = 100) -> subprocess.Popen[bytes]:
        """Start a worker process."""
        env = {**os.environ, "TASKQ_DSN": self.dsn, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "taskq", "worker", "benchmarks.app:app", "--queue", "bench"]
        return subprocess.Popen(
            [*command, "--concurrency", str(concurrency), "--log-level", "warning"], cwd=ROOT, env=env
        )

    def single(self) -> float:
        """Enqueues a second, one by one, each committed."""

        async def go() -> float:
            async with TaskQ(self.dsn) as target:
                task = target.task(name="noop", queue="elsewhere")(noop.fn)
                await task.enqueue(0, TEXT)
                started = time.perf_counter()
                for number in range(1000):
                    await task.enqueue(number, TEXT)
                return 1000 / (time.perf_counter() - started)

        return asyncio.run(go())

    def bulk(self) -> float:
        """Jobs a second enqueued 50,000 at a time."""

        async def go() -> float:
            async with TaskQ(self.dsn) as target:
                task = target.task(name="noop", queue="elsewhere")(noop.fn)
                started = time.perf_counter()
                await target.enqueue_many(task.job(number, TEXT) for number in range(50_000))
                return 50_000 / (time.perf_counter() - started)

        return asyncio.run(go())

    def drain(self, processes: int) -> dict[str, float]:
        """Run ``DRAIN_JOBS`` no-op jobs: jobs a second between 10 and 90 percent, and bytes of WAL a job."""
        before = self.done()

        async def fill() -> None:
            async with TaskQ(self.dsn) as target:
                task = target.task(name="noop", queue="bench")(noop.fn)
                await target.enqueue_many(task.job(number, TEXT) for number in range(DRAIN_JOBS))

        asyncio.run(fill())
        self.conn.execute("checkpoint")
        wal = self.value("select pg_current_wal_lsn()")
        workers = [self.worker() for _ in range(processes)]
        try:
            low = self._reach(before + DRAIN_JOBS // 10, workers)
            high = self._reach(before + DRAIN_JOBS * 9 // 10, workers)
            self._reach(before + DRAIN_JOBS, workers)
            written = self.value("select pg_wal_lsn_diff(pg_current_wal_lsn(), %s)", wal)
        finally:
            stop(workers)
        return {"jobs_per_s": (high[1] - low[1]) / (high[0] - low[0]), "wal_bytes_per_job": float(written) / DRAIN_JOBS}

    def _reach(self, target: int, workers: list[subprocess.Popen[bytes]]) -> tuple[float, int]:
        deadline = time.monotonic() + 120
        while True:
            count, now = self.done(), time.perf_counter()
            if count >= target:
                return now, count
            if time.monotonic() > deadline or any(w.poll() is not None for w in workers):
                raise SystemExit(f"the drain stands at {count} of {target} jobs")
            time.sleep(0.02)

    def pickup(self) -> list[float]:
        """Milliseconds from the commit of an enqueue to the claim, on the database's clock, for an idle worker."""
        workers = [self.worker()]
        try:

            async def go() -> list[str]:
                async with TaskQ(self.dsn) as target:
                    task = target.task(name="noop", queue="bench")(noop.fn)
                    first = await task.enqueue(0, TEXT)
                    await first.result(timeout=30)
                    ids = []
                    for number in range(200):
                        await asyncio.sleep(0.03)
                        job = await task.enqueue(number, TEXT)
                        ids.append(str(job.id))
                    await job.result(timeout=30)
                    return ids

            ids = asyncio.run(go())
            wait = "1000 * extract(epoch from claimed_at - created_at)::float"
            rows = self.conn.execute(f"select {wait} from taskq.history where id = any(%s)", (ids,))
            return sorted(float(row[0]) for row in rows)
        finally:
            stop(workers)

    def idle_statements(self) -> float:
        """Transactions a second that one idle worker costs, lease and leader included."""
        workers = [self.worker()]
        try:
            time.sleep(5)
            query = "select xact_commit + xact_rollback from pg_stat_database where datname = current_database()"
            self.conn.execute("select pg_stat_clear_snapshot()")
            before, started = self.value(query), time.perf_counter()
            time.sleep(15)
            return float(self.value(query) - before - 1) / (time.perf_counter() - started)
        finally:
            stop(workers)


def stop(workers: list[subprocess.Popen[bytes]]) -> None:
    """End worker processes and wait for them."""
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.wait(timeout=60)


def median(measure: Callable[[], float], rounds: int = ROUNDS) -> dict[str, Any]:
    """The median of several rounds, with all of them."""
    values = [measure() for _ in range(rounds)]
    return {"median": statistics.median(values), "values": values}


def run(server: Server) -> dict[str, Any]:
    """Measure everything on a running server."""
    migrate.up(server.dsn())
    bench = Bench(server.dsn())
    results: dict[str, Any] = {
        "single_enqueue_per_s": median(bench.single),
        "bulk_enqueue_per_s": median(bench.bulk),
    }
    bench.conn.execute("delete from taskq.jobs where queue = 'elsewhere'")
    bench.conn.execute("vacuum analyze taskq.jobs")
    for processes in (1, 2):
        rounds = [bench.drain(processes) for _ in range(ROUNDS)]
        for name in rounds[0]:
            values = [r[name] for r in rounds]
            results[f"drain_noop_{processes}_process_{name}"] = {"median": statistics.median(values), "values": values}
    waits = bench.pickup()
    results["pickup_ms"] = {
        "p50": waits[len(waits) // 2],
        "p95": waits[int(len(waits) * 0.95)],
        "p99": waits[int(len(waits) * 0.99)],
    }
    results["idle_transactions_per_s"] = bench.idle_statements()
    violations = bench.conn.execute("select * from taskq.check_invariants('all')").fetchall()
    if violations:
        raise SystemExit(f"taskq verify found violations after the benchmark: {violations[:5]}")
    return results


def main() -> None:
    """Run it and write the results."""
    assert app.tasks
    with serve("18", settings=SETTINGS, durable=True) as server:
        figures = run(server)
        version = psycopg.connect(server.dsn()).info.parameter_status("server_version")
    out = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "postgresql": version,
        "cores": os.cpu_count(),
        "figures": figures,
        "ratios": {
            "drain_2_processes_to_1": figures["drain_noop_2_process_jobs_per_s"]["median"]
            / figures["drain_noop_1_process_jobs_per_s"]["median"],
            "bulk_to_single_enqueue": figures["bulk_enqueue_per_s"]["median"]
            / figures["single_enqueue_per_s"]["median"],
        },
    }
    target = ROOT / "benchmarks" / "results" / "latest.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(out, indent=2) + "\n")
    for name, value in figures.items():
        print(
            f"{name:42}",
            json.dumps(
                {k: round(v, 1) for k, v in value.items() if not isinstance(v, list)}
                if isinstance(value, dict)
                else round(value, 2)
            ),
        )
    print(f"written to {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

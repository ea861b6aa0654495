"""Pick-up: how long a worker with free slots takes to start a job that has just been enqueued.

Enqueuer and body read the same monotonic clock of the machine. The figures begin where the enqueue returned, since from
then on the job is there for everybody; those from its call, which hold one enqueue more, stand beside them.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.harness.bench import Bench, System
from benchmarks.harness.figures import quantile
from benchmarks.harness.processes import AdapterFailed, run_adapter

__all__ = ["latencies", "pickup"]

SETTLE = 2.0
TAIL = 3.0
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def pickup(bench: Bench, system: System, probes: int, load: float = 0.0) -> dict[str, Any]:
    """One worker process with 100 bodies at once, or as many as the system's best; probes with pauses of about 30 ms.

    Args:
        bench: Where.
        system: Who.
        probes: How many.
        load: Jobs a second that go in beside the probes.
    """
    with bench.fresh(system) as database:
        with bench.workers(system, database) as workers:
            workers.begin()
            time.sleep(SETTLE)
            args = ("--dsn", database.dsn, "--load", str(load))
            sent = run_adapter(system.python, system.name, "pickup", str(probes), *args, timeout=120 + probes)
            # A probe that waits for a poll is still on its way; after this it counts as missing.
            time.sleep(TAIL)
            workers.check()
            began = {each["number"]: each["at"] for each in workers.stop() if each["event"] == "probe"}
        figures = latencies([each for each in sent if each["event"] == "sent"], began)
        loads = [each for each in sent if each["event"] == "load"]
        if loads:
            figures["load_asked_per_s"] = load
            figures["load_per_s"] = loads[0]["jobs"] / loads[0]["seconds"]
        return figures


def latencies(sent: list[dict[str, Any]], began: dict[int, int]) -> dict[str, Any]:
    """Quantiles in milliseconds.

    Args:
        sent: For each probe its number, and when its enqueue was called and returned, in nanoseconds.
        began: When each probe's body began.

    Raises:
        AdapterFailed: More than one in a hundred never began.
    """
    there = [each for each in sent if each["number"] in began]
    if not there or len(sent) - len(there) > len(sent) // 100:
        raise AdapterFailed(f"only {len(there)} of {len(sent)} probes began in time")
    figures: dict[str, Any] = {"probes": len(there), "missing": len(sent) - len(there)}
    # A body may begin before the enqueuer has its answer; then nobody waited.
    waits = [max(0, began[each["number"]] - each["returned"]) / 1e6 for each in there]
    whole = [(began[each["number"]] - each["called"]) / 1e6 for each in there]
    for name, share in SHARES.items():
        figures[f"{name}_ms"] = quantile(waits, share)
        figures[f"{name}_from_call_ms"] = quantile(whole, share)
    return figures

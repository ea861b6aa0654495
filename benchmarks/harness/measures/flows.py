"""Workflows: so many are started, then one worker begins, until all of them are durably done.

A node is what has a result of its own on record: a child, a link of a chain, a step of a body.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.harness.bench import Bench, System
from benchmarks.harness.measures.drain import run_down
from benchmarks.peers.bodies import LINKS

__all__ = ["flows"]

PATIENCE = 300.0
"""Seconds without a workflow done: a fan-out is done as a whole."""


def flows(bench: Bench, system: System, kind: str, number: int) -> dict[str, Any]:
    """Start and run workflows in a fresh database.

    Args:
        bench: Where.
        system: Who.
        kind: ``fan`` (one of so many children), ``chain`` or ``steps`` (so many, of ten each).
        number: How many.
    """
    done = system.traits.flows[kind]
    wanted, nodes = (1, number + 1) if kind == "fan" else (number, number * LINKS)
    with bench.fresh(system) as database:
        told = bench.enqueue(system, database, "enqueue-flows", number, "--kind", kind)
        with bench.workers(system, database) as workers:
            before, cpu, started = database.read(), workers.cpu(), time.perf_counter()
            workers.begin()
            seen = run_down(lambda: int(database.value(done)), wanted, workers, PATIENCE)
            seconds = seen[-1].at - started
            used, client = database.read().since(before), workers.cpu() - cpu
    return {
        "nodes": nodes,
        "seconds": seconds,
        "nodes_per_s": nodes / seconds,
        "start_seconds": told["seconds"],
        "client_cpu_us_per_node": client * 1e6 / nodes,
        "server_cpu_us_per_node": used.cpu * 1e6 / nodes,
        "statements_per_node": used.statements / nodes,
        "wal_bytes_per_node": used.wal / nodes,
    }

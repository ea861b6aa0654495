"""What a worker costs that has nothing to do: all systems at once, each in its database, since it is little work."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from benchmarks.harness.bench import Bench, System
from benchmarks.harness.processes import AdapterFailed

__all__ = ["idle"]

SETTLE = 5.0


def idle(bench: Bench, systems: list[System], seconds: float) -> dict[str, dict[str, Any]]:
    """Statements and transactions a second, memory and connections of one worker process of each system, by system.

    A system whose worker does not start has its reason under ``left_out``.
    """
    figures: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        running = []
        for system in systems:
            try:
                database = stack.enter_context(bench.fresh(system))
                workers = stack.enter_context(bench.workers(system, database))
            except AdapterFailed as exc:
                figures[system.name] = {"left_out": str(exc)}
                continue
            workers.begin()
            running.append((system, database, workers))
        time.sleep(SETTLE)
        before = {
            system.name: (time.perf_counter(), database.read(), workers.cpu()) for system, database, workers in running
        }
        time.sleep(seconds)
        for system, database, workers in running:
            started, reading, cpu = before[system.name]
            used, took = database.read().since(reading), time.perf_counter() - started
            figures[system.name] = {
                "statements_per_s": used.statements / took,
                # Those of the harness: one for each statement of the earlier reading.
                "transactions_per_s": max(0.0, used.transactions - OWN) / took,
                "client_cpu_share": (workers.cpu() - cpu) / took,
                "resident_mib": workers.resident() / 2**20,
                "connections": database.connections(),
            }
    return figures


OWN = 4
"""Transactions of the harness between two readings, near enough: the statements of ``Database.read``."""

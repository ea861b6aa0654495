"""Carrying out a plan: rounds of steps, each into a record. A system that fails in a measure is left out of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from typing import Any

import psycopg

from benchmarks.harness.bench import Bench, System
from benchmarks.harness.measures import drain, enqueue, flows, pickup
from benchmarks.harness.measures.idle import idle
from benchmarks.harness.plan import Form, Step, steps_of
from benchmarks.harness.processes import AdapterFailed
from benchmarks.harness.targets import Record

__all__ = ["Runner"]

AT_ONCE = 100
"""Bodies at once where they wait a millisecond, the same for all systems."""


class Runner:
    """Runs a form of the benchmark.

    Args:
        bench: The systems and the server.
        form: How much is measured.
    """

    def __init__(self, bench: Bench, form: Form) -> None:
        self._bench = bench
        self._form = form
        self.records: list[Record] = []
        self.left_out: list[dict[str, Any]] = []
        self._failed: set[tuple[str, str]] = set()

    def run(self, only: Collection[str], budget: Callable[[], bool] = lambda: True) -> None:
        """All rounds.

        Args:
            only: The groups that are wanted.
            budget: Asked before each step; once it says no, nothing more is measured.

        Raises:
            LawBroken: taskq's record is wrong after a measure.
        """
        names = list(self._bench.systems)
        for number in range(self._form.rounds):
            for step in steps_of(self._form, number, names, only):
                if not budget():
                    return
                if (step.measure, step.system) not in self._failed:
                    self._step(step, number)

    def _step(self, step: Step, number: int) -> None:
        started = time.monotonic()
        try:
            if step.system:
                self._add(step, step.system, number, self._measure(step, self._bench.systems[step.system]))
            else:
                found = idle(self._bench, list(self._bench.systems.values()), self._form.idle)
                for name, figures in found.items():
                    self._add(step, name, number, figures)
        except (AdapterFailed, psycopg.Error) as exc:
            self._leave_out(step, step.system, number, f"{type(exc).__name__}: {exc}")
        print(
            f"round {number + 1}/{self._form.rounds}  {step.measure:14} {step.system or 'all':14}"
            f" {time.monotonic() - started:6.1f} s",
            file=sys.stderr,
            flush=True,
        )

    def _add(self, step: Step, system: str, number: int, figures: dict[str, Any]) -> None:
        if reason := figures.get("left_out"):
            self._leave_out(step, system, number, reason)
        else:
            self.records.append(Record(step.measure, system, number, figures))

    def _leave_out(self, step: Step, system: str, number: int, reason: str) -> None:
        # What has failed once is not tried again: it would cost the time of a failure in each round.
        self._failed.add((step.measure, system))
        self.left_out.append({"measure": step.measure, "system": system or "all", "round": number, "reason": reason})
        print(f"left out: {step.measure} of {system or 'all'}: {reason}", file=sys.stderr, flush=True)

    def _measure(self, step: Step, system: System) -> dict[str, Any]:
        bench = self._bench
        match step.group:
            case "single":
                return enqueue.single(bench, system, step.size)
            case "bulk":
                return enqueue.bulk(bench, system, step.size)
            case "drain":
                at_once = AT_ONCE if step.kind == "sleep" else None
                return drain.drain(bench, system, step.size, step.kind, step.processes, at_once)
            case "pickup":
                load = self._half_load(system) if step.measure == "pickup_half" else 0.0
                return pickup.pickup(bench, system, step.size, load)
            case "notify":
                return enqueue.notify(bench, system, step.size)
            case "finished":
                return drain.finished(bench, system, step.size, step.rows)
            case "later":
                return drain.later(bench, system, step.size, step.rows)
            case "queues":
                return drain.queues(bench, system, step.size, step.rows)
            case "flows":
                return flows.flows(bench, system, step.kind, step.size)
            case "pinned":
                return drain.pinned(bench, system, step.size, step.hold)
        raise AssertionError(step.group)

    def _half_load(self, system: System) -> float:
        """Half of what one process of the system drained, measured for this if it has not been yet."""
        drained = [r.figures for r in self.records if (r.measure, r.system) == ("drain_noop_1", system.name)]
        if not drained:
            jobs = next(s.size for s in steps_of(self._form, 0, [system.name], ("drain",)) if s.processes == 1)
            drained = [drain.drain(self._bench, system, jobs)]
        return float(drained[-1]["jobs_per_s"] or drained[-1]["jobs_per_s_whole"]) / 2

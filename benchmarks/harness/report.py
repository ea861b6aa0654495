"""The results as one JSON object and as Markdown. Neither says on which machine or in which folder it ran."""

from __future__ import annotations

import os
import platform
import re
import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from benchmarks.harness.figures import summarise
from benchmarks.harness.targets import Record, Results, judge

__all__ = ["build", "environment", "markdown", "scrub"]

COLUMNS: Mapping[str, Sequence[tuple[str, str]]] = {
    "flows": (
        ("nodes_per_s", "nodes/s"),
        ("seconds", "s"),
        ("statements_per_node", "statements/node"),
        ("client_cpu_us_per_node", "worker CPU us/node"),
        ("server_cpu_us_per_node", "server CPU us/node"),
        ("wal_bytes_per_node", "WAL B/node"),
    ),
    "single": (("jobs_per_s", "jobs/s"), ("wal_bytes_per_job", "WAL B/job"), ("statements_per_job", "statements/job")),
    "bulk": (("jobs_per_s", "jobs/s"), ("wal_bytes_per_job", "WAL B/job"), ("statements_per_job", "statements/job")),
    "pickup": (
        ("p50_ms", "p50 ms"),
        ("p95_ms", "p95 ms"),
        ("p99_ms", "p99 ms"),
        ("p50_from_call_ms", "p50 from call"),
        ("load_per_s", "load/s"),
    ),
    "notify": (
        ("adaptive_jobs_per_s", "jobs/s"),
        ("silent_jobs_per_s", "jobs/s, silent"),
    ),
    "idle": (
        ("statements_per_s", "statements/s"),
        ("transactions_per_s", "transactions/s"),
        ("client_cpu_share", "CPU share"),
        ("resident_mib", "MiB"),
        ("connections", "connections"),
    ),
    "pinned": (
        ("jobs_per_s", "jobs/s"),
        ("jobs_per_s_at_0", "at 0"),
        ("jobs_per_s_at_100000", "at 100k"),
        ("jobs_per_s_at_500000", "at 500k"),
        ("jobs_per_s_at_1000000", "at 1M"),
        ("jobs_per_s_at_end", "at the end"),
    ),
    "": (
        ("jobs_per_s", "jobs/s"),
        ("jobs_per_s_whole", "whole run"),
        ("client_cpu_us_per_job", "client µs/job"),
        ("server_cpu_us_per_job", "server µs/job"),
        ("wal_bytes_per_job", "WAL B/job"),
        ("statements_per_job", "statements/job"),
        ("resident_mib_per_process", "MiB"),
    ),
}
"""What the tables show, by the first word of a measure; the empty one is for drains of every kind."""


def environment(postgresql: str, settings: Mapping[str, str], python: str) -> dict[str, Any]:
    """What the figures depend on, without names of machines or folders."""
    with open("/proc/meminfo") as lines:
        memory = int(next(lines).split()[1]) / 2**20
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "machine": platform.machine(),
        "load_before": round(os.getloadavg()[0], 1),
        "postgresql": postgresql,
        "postgresql_settings": dict(settings),
        "connection": "unix socket",
        "python": python,
    }


def build(
    records: Sequence[Record],
    traits: Mapping[str, Mapping[str, Any]],
    surroundings: Mapping[str, Any],
    form: Mapping[str, Any],
    left_out: Sequence[Mapping[str, Any]],
    checks: int,
) -> dict[str, Any]:
    """The whole of the results.

    Args:
        records: What was measured.
        traits: The systems.
        surroundings: From ``environment``.
        form: What was planned.
        left_out: Who was left out of what, and why.
        checks: How often taskq's record was checked; each found nothing, or there would be no results.
    """
    results = Results(records, traits)
    summary: dict[str, dict[str, Any]] = {}
    for record in records:
        summary.setdefault(record.measure, {}).setdefault(record.system, {})
    for measure, systems in summary.items():
        for system, figures in systems.items():
            mine = [r.figures for r in records if (r.measure, r.system) == (measure, system)]
            for name in mine[0]:
                values = [each[name] for each in mine if each.get(name) is not None]
                if values:
                    figures[name] = vars(summarise(values))
    shown = ("version", "settings", "loop", "core", "keeps", "concurrency")
    return {
        "at": datetime.now(UTC).isoformat(timespec="minutes"),
        "form": dict(form),
        "environment": dict(surroundings),
        "systems": {name: {key: each[key] for key in shown} for name, each in traits.items()},
        "ratios": judge(results),
        "invariants": {"checks": checks, "violations": 0},
        "left_out": [{**each, "reason": scrub(str(each["reason"]))} for each in left_out],
        "summary": summary,
        "rounds": [
            {"measure": r.measure, "system": r.system, "round": r.number + 1, **rounded(r.figures)} for r in records
        ],
    }


def scrub(text: str) -> str:
    """Text without folders, and without the name of the machine."""
    text = re.sub(r"(?<![\w.])/[\w.@%+-]+(?:/[\w.@%+-]*)+", "<path>", text)
    host = socket.gethostname()
    return text.replace(host, "<host>") if len(host) > 3 else text


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with what six digits can say."""
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in figures.items()}


def markdown(results: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    about, form = results["environment"], results["form"]
    lines = [
        "# Benchmark results",
        "",
        f"{results['at']}, {about['cores']} cores, {about['memory_gib']} GiB, PostgreSQL {about['postgresql']}"
        f" ({', '.join(f'{k}={v}' for k, v in about['postgresql_settings'].items())}), {about['connection']},"
        f" Python {about['python']}, load before the start {about['load_before']}.",
        f"The {form['name']} form, {form['rounds']} rounds; each figure is a median with the smallest and largest round"
        " in brackets. Rates of drains are those between 10 and 90 percent of the jobs where that can be told.",
        f"`taskq verify` found nothing in {results['invariants']['checks']} checks.",
        "",
        "| ratio | value | target | met |",
        "|---|---|---|---|",
    ]
    for name, each in results["ratios"].items():
        against = f" ({each['against']})" if "against" in each else ""
        met = {True: "yes", False: "**no**", None: "not measured"}[each["met"]]
        value = "" if each["value"] is None else _spread(each["value"], each["low"], each["high"])
        lines.append(f"| {name}{against} | {value} | {each['target']} | {met} |")
    for measure, systems in results["summary"].items():
        columns = COLUMNS.get(measure.split("_")[0], COLUMNS[""])
        columns = [each for each in columns if any(each[0] in figures for figures in systems.values())]
        lines += ["", f"## {measure}", "", f"| system | {' | '.join(title for _, title in columns)} |"]
        lines.append("|---|" + "---|" * len(columns))
        for system, figures in systems.items():
            cells = [
                _spread(each["median"], each["low"], each["high"]) if (each := figures.get(name)) else ""
                for name, _ in columns
            ]
            lines.append(f"| {system} | {' | '.join(cells)} |")
    lines += ["", "## Systems", "", "| system | version | settings | loop |", "|---|---|---|---|"]
    lines += [f"| {n} | {s['version']} | {s['settings']} | {s['loop']} |" for n, s in results["systems"].items()]
    if results["left_out"]:
        lines += ["", "## Left out", ""]
        lines += [f"- {each['system']}, {each['measure']}: {each['reason']}" for each in results["left_out"]]
    return "\n".join(lines) + "\n"


def _spread(median: float, low: float, high: float) -> str:
    if low == high:
        return _number(median)
    return f"{_number(median)} ({_number(low)} to {_number(high)})"


def _number(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"

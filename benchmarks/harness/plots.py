"""Plots of the results; runs in an environment of its own, which has matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

OURS = "#c2410c"
THEIRS = "#64748b"


def main() -> None:
    """Plot ``latest.json`` of the folder that is named."""
    folder = Path(sys.argv[1])
    summary = json.loads((folder / "latest.json").read_text())["summary"]
    for measure in summary:
        if measure.startswith("drain_"):
            bars(summary[measure], ("jobs_per_s", "jobs_per_s_whole"), f"{measure}: jobs/s", folder / f"{measure}.png")
    bars(summary.get("single", {}), ("jobs_per_s",), "enqueued one by one: jobs/s", folder / "single.png")
    bars(summary.get("bulk", {}), ("jobs_per_s",), "enqueued in bulk: jobs/s", folder / "bulk.png")
    for measure in ("pickup_idle", "pickup_half"):
        quantiles(summary.get(measure, {}), measure, folder / f"{measure}.png")
    wal(summary.get("drain_noop_1", {}), folder / "wal.png")
    horizon(summary, folder / "pinned.png")


def bars(systems: dict[str, Any], names: tuple[str, ...], title: str, path: Path) -> None:
    """Horizontal bars with the spread of the rounds; of each system the first of the figures that it has."""
    found = {s: next((f[n] for n in names if n in f), None) for s, f in systems.items()}
    rows = sorted(((s, f) for s, f in found.items() if f), key=lambda row: row[1]["median"])
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.42 * len(rows)))
    medians = [f["median"] for _, f in rows]
    spread = [[f["median"] - f["low"] for _, f in rows], [f["high"] - f["median"] for _, f in rows]]
    axes.barh([s for s, _ in rows], medians, xerr=spread, color=[OURS if s == "taskq" else THEIRS for s, _ in rows])
    for at, value in enumerate(medians):
        axes.text(value, at, f" {value:,.0f}", va="center")
    finish(figure, axes, title, path)


def quantiles(systems: dict[str, Any], measure: str, path: Path) -> None:
    """p50 to p99 of each system, on a logarithmic scale."""
    rows = [(s, f) for s, f in systems.items() if "p50_ms" in f]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(7, 0.8 + 0.42 * len(rows)))
    for at, (system, found) in enumerate(rows):
        points = [max(0.01, found[f"{p}_ms"]["median"]) for p in ("p50", "p95", "p99")]
        axes.plot(points, [at] * 3, "o-", color=OURS if system == "taskq" else THEIRS)
    axes.set_yticks(range(len(rows)), [s for s, _ in rows])
    axes.set_xscale("log")
    finish(figure, axes, f"{measure}: p50, p95, p99 in ms", path)


def wal(systems: dict[str, Any], path: Path) -> None:
    """Bytes of WAL a job, enqueueing and running."""
    rows = [(s, f) for s, f in systems.items() if "wal_bytes_per_job" in f]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(7, 0.5 + 0.42 * len(rows)))
    names = [s for s, _ in rows]
    first = [f["enqueue_wal_bytes_per_job"]["median"] for _, f in rows]
    axes.barh(names, first, color="#94a3b8", label="enqueue")
    axes.barh(names, [f["run_wal_bytes_per_job"]["median"] for _, f in rows], left=first, color="#475569", label="run")
    axes.legend()
    finish(figure, axes, "WAL bytes a job", path)


def horizon(summary: dict[str, Any], path: Path) -> None:
    """Rates along a long drain, with and without a transaction that holds back vacuum."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    drawn = False
    for measure, style in (("pinned_free", "o-"), ("pinned_held", "x--")):
        for system, found in summary.get(measure, {}).items():
            prefix = "jobs_per_s_at_"
            points = sorted(
                (int(name.removeprefix(prefix)), each["median"])
                for name, each in found.items()
                if name.startswith(prefix) and name != prefix + "end"
            )
            if points:
                axes.plot(*zip(*points, strict=True), style, label=f"{system}, {measure.removeprefix('pinned_')}")
                drawn = True
    if drawn:
        axes.set_xlabel("jobs done")
        axes.set_ylim(bottom=0)
        axes.legend()
        finish(figure, axes, "jobs/s while a transaction is held open", path)
    plt.close(figure)


def finish(figure: Any, axes: Any, title: str, path: Path) -> None:
    """Write the plot."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()

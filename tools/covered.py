"""Whether the last run of the unit tests ran enough of taskq: each branch of what decides, and most of the rest.

Run by ``make coverage``. Lists what each module leaves unrun, and says in its last line which of them fall short.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

import coverage
from coverage.exceptions import CoverageException

ROOT = Path(__file__).resolve().parent.parent
DECIDING: Final = (
    "taskq/policy.py",
    "taskq/effects.py",
    "taskq/reconcile.py",
    "taskq/reconcile_hooks.py",
    "taskq/prepare.py",
    "taskq/promises.py",
    "taskq/transitions.py",
    "taskq/worker/disposition.py",
    "taskq/worker/effect_start.py",
    "taskq/worker/lease.py",
    "taskq/idempotency.py",
    "taskq/checkpoints.py",
    "taskq/children.py",
    "taskq/durable.py",
    "taskq/effect_steps.py",
    "taskq/steps.py",
    "taskq/worker/preparing.py",
    "taskq/worker/proofs.py",
    "taskq/worker/safe.py",
    "taskq/worker/safe_block.py",
    "taskq/worker/safe_settle.py",
    "taskq/worker/safe_steps.py",
    "taskq/worker/unflushed.py",
    "taskq/worker/unproven.py",
    "taskq/workflow/arms.py",
    "taskq/workflow/fit.py",
    "taskq/workflow/hidden.py",
    "taskq/workflow/emits.py",
    "taskq/workflow/loops.py",
    "taskq/workflow/maps.py",
    "taskq/workflow/nested.py",
    "taskq/workflow/parts.py",
    "taskq/workflow/plan.py",
    "taskq/workflow/shapes.py",
    "taskq/workflow/symbols.py",
    "taskq/workflow/wiring.py",
    "taskq/migrate/*",
)
"""Modules that decide what happens to a job or a schema: every line and branch of them is run."""
LEAST: Final = 95.0
"""Percent of the lines and branches of all modules together."""


def shortfalls(report: Mapping[str, Any]) -> list[str]:
    """What falls short, of a report as ``coverage json`` writes it; empty when nothing does."""
    percent = {name: file["summary"]["percent_covered"] for name, file in report["files"].items()}
    found = [f"nothing was measured of {p}" for p in DECIDING if not any(fnmatch(name, p) for name in percent)]
    found += [
        f"{name} at {percent[name]:.1f}% of 100%"
        for name in sorted(percent)
        if any(fnmatch(name, p) for p in DECIDING) and percent[name] < 100
    ]
    total = report["totals"]["percent_covered"]
    if total < LEAST:
        files = report["files"]
        unrun = {n: len(f["missing_lines"]) + len(f.get("missing_branches", ())) for n, f in files.items()}
        most = sorted(unrun, key=lambda name: -unrun[name])[:5]
        found.append(
            f"taskq in all at {total:.1f}% of {LEAST:g}%, most of it in "
            + ", ".join(f"{name} ({percent[name]:.0f}%)" for name in most)
        )
    return found


def main() -> int:
    """Report; returns 1 if something falls short."""
    measured = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    written = ROOT / "build" / "coverage" / "report.json"
    try:
        measured.load()
        measured.report(file=sys.stdout)
        measured.json_report(outfile=str(written))
    except CoverageException as exc:
        print(f"coverage: {exc} Run 'make unit' first, which measures.", file=sys.stderr)
        return 1
    report = json.loads(written.read_text())
    if found := shortfalls(report):
        print(f"coverage falls short: {'; '.join(found)}", file=sys.stderr)
        return 1
    print(f"coverage: {report['totals']['percent_covered']:.1f}%, and every branch of what decides")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``make coverage`` says what falls short, and notices when a module that decides is not measured at all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "covered.py"


@pytest.fixture(scope="module")
def covered() -> Any:
    spec = importlib.util.spec_from_file_location("covered", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(total: float, **percent: float) -> dict[str, Any]:
    names = (
        "policy",
        "effects",
        "prepare",
        "promises",
        "reconcile",
        "reconcile_hooks",
        "transitions",
        "worker/disposition",
        "worker/effect_start",
        "worker/preparing",
        "worker/proofs",
        "worker/lease",
        "worker/safe",
        "worker/safe_block",
        "worker/safe_settle",
        "worker/unflushed",
        "worker/unproven",
        "workflow/arms",
        "workflow/fit",
        "workflow/hidden",
        "workflow/emits",
        "workflow/loops",
        "workflow/maps",
        "workflow/nested",
        "workflow/parts",
        "workflow/plan",
        "workflow/shapes",
        "workflow/symbols",
        "workflow/wiring",
        "migrate/files",
        "app",
        "idempotency",
        "checkpoints",
        "children",
        "durable",
        "effect_steps",
        "steps",
        "worker/safe_steps",
    )
    at = {f"taskq/{name}.py": percent.get(name.split("/")[-1], 100.0) for name in names}
    files = {
        name: {"summary": {"percent_covered": value}, "missing_lines": [1] * int(100 - value), "missing_branches": []}
        for name, value in at.items()
    }
    return {"files": files, "totals": {"percent_covered": total}}


def test_what_falls_short_is_named(covered: Any) -> None:
    assert covered.shortfalls(report(96, app=50)) == []
    assert covered.shortfalls(report(99, files=99.9)) == ["taskq/migrate/files.py at 99.9% of 100%"]
    [said] = covered.shortfalls(report(94.9, app=50))
    assert said.startswith("taskq in all at 94.9% of 95%, most of it in taskq/app.py (50%)")


def test_a_module_that_decides_is_missed(covered: Any) -> None:
    without = report(99)
    del without["files"]["taskq/worker/lease.py"]
    assert covered.shortfalls(without) == ["nothing was measured of taskq/worker/lease.py"]


def test_every_module_that_decides_is_there(covered: Any) -> None:
    root = TOOL.parents[1]
    assert [pattern for pattern in covered.DECIDING if not list(root.glob(pattern))] == []

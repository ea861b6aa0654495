"""Plans by hand, and workflows that are compiled without a database."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from runs_kit import edge, node

from taskq import TaskQ
from taskq.errors import PlanError
from taskq.workflow import Plan, Workflow

NOWHERE = "postgresql://nobody@127.0.0.1:1/x"


def spec(nodes: Sequence[Mapping[str, Any]], edges: Sequence[Mapping[str, Any]] = (), **more: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "workflow": "flow",
        "on_failure": "cancel",
        "receipts": 100,
        "parameters": ["order"],
        "nodes": list(nodes),
        "edges": list(edges),
        "result": {"value": None},
        "effects": [],
        **more,
    }


def chain(n: int, *more: Mapping[str, Any]) -> dict[str, Any]:
    """``n`` nodes one after the other, and more edges."""
    return spec([node(f"n{i}") for i in range(n)], [*(edge(i, i + 1) for i in range(n - 1)), *more])


def faults_of(given: Mapping[str, Any] | Workflow[..., Any]) -> list[str]:
    """All that is said of a plan, which must be wrong."""
    with pytest.raises(PlanError) as caught:
        given.plan if isinstance(given, Workflow) else Plan.from_spec(given)  # noqa: B018
    error = caught.value
    assert str(error).startswith(f"workflow {error.workflow} cannot run: ")
    assert all(fault in str(error) for fault in error.faults)
    return list(error.faults)


def compiled(app: TaskQ, fn: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """The plan that a function comes to."""
    return dict(app.workflow(**options)(fn).plan.spec)


def args_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What each node is given."""
    return {each["name"]: each["args"] for each in plan["nodes"]}


def wires(plan: Mapping[str, Any]) -> set[tuple[str, str, str]]:
    """Edges without conditions, by name: from, to, policy."""
    names = [each["name"] for each in plan["nodes"]]
    return {(names[e["from"]], names[e["to"]], e["policy"]) for e in plan["edges"] if "when" not in e}


def guards(plan: Mapping[str, Any]) -> set[tuple[str, str, Any]]:
    """Edges with conditions, by name: from, to, and what it must equal."""
    names = [each["name"] for each in plan["nodes"]]
    return {(names[e["from"]], names[e["to"]], e["when"]["equals"]) for e in plan["edges"] if "when" in e}

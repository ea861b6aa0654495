"""Workflows within workflows: wired in as a part of the same run, or as a node that is a run of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from taskq.errors import PayloadError, PlanError, WiringError
from taskq.workflow.symbols import is_symbolic

if TYPE_CHECKING:
    from taskq.workflow.definition import Workflow
    from taskq.workflow.wiring import Wiring

__all__ = ["child_run", "inline"]


def child_run(wiring: Wiring, workflow: Workflow[..., Any], where: str) -> tuple[dict[str, Any], str | None]:
    """How the job is enqueued that waits for a run of a workflow, and that workflow's plan."""
    path, outer = [workflow.name], cast("Wiring | None", wiring)
    while outer is not None:
        for each in reversed(outer.within):
            path.insert(0, each.name)
            if each is workflow:
                raise WiringError(
                    f"workflow {workflow.name} is a child run of itself: {' -> '.join(path)}; a plan is finite: "
                    "start() a run from a task"
                )
        outer = outer.outer
    try:
        plan = workflow.plan
    except PlanError as exc:
        wiring.faults.append(f"{where}: {exc}")
        return {}, None
    wiring.children[plan.hash] = plan
    wiring.policies |= plan.policies
    # Whoever has run the last of the child's nodes serves that queue.
    queue = plan.spec["nodes"][-1]["job"]["queue"]
    return wiring.spec(workflow.await_task, {"queue": queue}, where), plan.hash


def inline(wiring: Wiring, workflow: Workflow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Wire the nodes of another workflow here; gives what it returns.

    Raises:
        WiringError: It is being wired already, so that this would have no end.
    """
    name = workflow.name
    if workflow in wiring.within:
        names = [each.name for each in wiring.within]
        circle = " -> ".join([*names[wiring.within.index(workflow) :], name])
        raise WiringError(f"workflow {name} wires itself: {circle}; a plan is finite: start() a run from a task")
    if workflow.effects:
        wiring.faults.append(
            f"workflow {name} promises effects for its runs, and is wired here as a part of another run: wire a "
            f"run of its own, {name}.child(...), or promise them on this workflow"
        )
    if workflow.on_failure not in (None, wiring.on_failure):
        wiring.faults.append(
            f"workflow {name} says on_failure={workflow.on_failure!r}, and is wired here as a part of a run with "
            f"{wiring.on_failure!r}: wire a run of its own, {name}.child(...), or say the same on both"
        )
    if workflow.work_budget is not None:
        wiring.faults.append(
            f"workflow {name} has a work budget for its runs, and is wired here as a part of another run: wire a run "
            f"of its own, {name}.child(...), or declare it on this workflow"
        )
    try:
        bound = workflow.codec.bind(args, kwargs)
    except PayloadError as exc:
        wiring.faults.append(f"workflow {name}, wired here: {exc}")
        raise PlanError(wiring.workflow, wiring.faults) from None
    for parameter, value in bound.items():
        said = f"workflow {name}, wired here: {parameter} takes"
        if is_symbolic(value):
            wiring.compare(value, workflow.codec.declared(parameter), said)
        else:
            try:
                workflow.codec.encode_argument(parameter, value)
            except PayloadError as exc:
                wiring.faults.append(f"workflow {name}, wired here: {exc}")
    return wiring.run(workflow, bound)

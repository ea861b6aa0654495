"""Workflows: graphs of tasks, wired in Python, frozen as plans, and run node by node on the queue's own guarantees."""

from taskq.workflow.definition import (
    BoundChild,
    BoundNode,
    Workflow,
    branch,
    collect,
    fork,
    gather,
    or_skip,
    tally,
    then,
)
from taskq.workflow.emits import Page, Pages
from taskq.workflow.plan import Plan
from taskq.workflow.runs import BoundWorkflow, NodeInfo, Run, RunInfo
from taskq.workflow.symbols import Mapped, Outcome, Tally

__all__ = [
    "BoundChild",
    "BoundNode",
    "BoundWorkflow",
    "Mapped",
    "NodeInfo",
    "Outcome",
    "Page",
    "Pages",
    "Plan",
    "Run",
    "RunInfo",
    "Tally",
    "Workflow",
    "branch",
    "collect",
    "fork",
    "gather",
    "or_skip",
    "tally",
    "then",
]

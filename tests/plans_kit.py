"""The plans of statements inside functions, as the server tells of them while they run (auto_explain)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg.errors import Diagnostic
from sql import Conn

Node = dict[str, Any]


def explain_all(conn: Conn) -> None:
    """Have each statement of this connection explained, those inside functions too."""
    conn.execute("load 'auto_explain'")
    for name, value in (
        ("log_min_duration", "0"),
        ("log_nested_statements", "on"),
        ("log_analyze", "on"),
        ("log_buffers", "on"),
        ("log_timing", "off"),
        ("log_format", "json"),
    ):
        conn.execute(f"set auto_explain.{name} = '{value}'")


class Explained:
    """The plans of one call, by what their statement does to jobs."""

    def __init__(self, notices: list[dict[str, Any]]) -> None:
        self.plans: list[tuple[str, Node]] = [(str(n["Query Text"]), n["Plan"]) for n in notices]

    def of(self, text: str) -> Node:
        """The plan of the one statement that has this text in it."""
        found = [plan for query, plan in self.plans if text in query and "taskq.exchange(" not in query]
        assert len(found) == 1, (text, [query for query, _ in self.plans])
        return found[0]


@contextmanager
def explained(conn: Conn) -> Iterator[list[dict[str, Any]]]:
    """Collect the plans of what runs inside the block."""
    seen: list[dict[str, Any]] = []

    def keep(notice: Diagnostic) -> None:
        text = notice.message_primary or ""
        if "plan:" in text:
            seen.append(json.loads(text[text.index("plan:") + 5 :]))

    conn.add_notice_handler(keep)
    conn.execute("set client_min_messages = log")
    try:
        yield seen
    finally:
        conn.execute("reset client_min_messages")
        conn.remove_notice_handler(keep)


def nodes(plan: Node) -> Iterator[Node]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def buffers(plan: Node) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def discarded(plan: Node) -> int:
    """Rows thrown away by filters and rechecks, over all loops."""
    names = ("Rows Removed by Filter", "Rows Removed by Index Recheck", "Rows Removed by Join Filter")
    return sum(int(node.get(name, 0) * node["Actual Loops"]) for node in nodes(plan) for name in names)


def scans(plan: Node) -> set[tuple[str, str]]:
    """How jobs is read: (node type, index)."""
    return {
        (node["Node Type"], node.get("Index Name", ""))
        for node in nodes(plan)
        if node.get("Relation Name") == "jobs" and node["Node Type"] != "ModifyTable"
    }

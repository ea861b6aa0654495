"""Forks: of several arms those run whose value is in a list, side by side, and give their values by key."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import psycopg
import pytest
from runs_kit import do, edge, info, node, result_of, start, store, take, tree, worker_for
from sql import one, violations

Conn = psycopg.Connection[Any]
ARMS = [
    edge(0, 1, when={"path": ["ways"], "has": "mail"}),
    edge(0, 2, when={"path": ["ways"], "has": "sms"}),
    edge(0, 3, when={"path": ["ways"], "has": "sms"}),
    edge(2, 3, "skip"),
    edge(0, 4),
    edge(1, 4, merge=True),
    edge(3, 4, merge=True),
]
NODES = ["choose", "mail", "number", "sms"]
FORK = {
    "fork": {
        "on": result_of(0, "ways"),
        "arms": [["mail", "mail", result_of(1)], ["sms", "sms", result_of(3)], ["post", "post", {"value": None}]],
    }
}


def forked(conn: Conn, ways: Any) -> tuple[UUID, UUID]:
    worker = worker_for(conn)
    nodes = [*map(node, NODES), node("tell", {"sent": FORK})]
    run = start(conn, store(conn, nodes, ARMS, result=FORK))
    do(conn, worker, "choose", result={"ways": ways})
    return run, worker


def told(conn: Conn, run: UUID, worker: UUID) -> Any:
    """What follows the fork is given."""
    [tell] = take(conn, worker, "tell").values()
    return json.loads(tell["payload"])["sent"]


@pytest.mark.parametrize(
    ("ways", "runs", "skipped"),
    [
        (["sms", "mail", "sms"], {"mail", "number"}, set()),
        (["mail"], {"mail"}, {"number", "sms"}),
        (["post"], set(), {"mail", "number", "sms"}),
        ([], set(), {"mail", "number", "sms"}),
    ],
)
def test_those_arms_run_whose_value_is_in_the_list(conn: Conn, ways: Any, runs: set[str], skipped: set[str]) -> None:
    run, worker = forked(conn, ways)
    found = tree(conn, run)
    assert {name for name, status in found.items() if status == "skipped"} == skipped
    assert {name for name, status in found.items() if status == "pending"} - {"tell"} == runs
    for task in ("mail", "number", "sms"):
        if task not in skipped:
            do(conn, worker, task, result=f"by {task}")
    given = told(conn, run, worker)
    assert given == {way: None if way == "post" else f"by {way}" for way in ways}
    assert violations(conn) == []


@pytest.mark.parametrize("ways", ["mail", {"mail": 1}, None, 3, ["mails", ["mail"]]])
def test_what_is_no_list_with_the_value_takes_no_arm(conn: Conn, ways: Any) -> None:
    run, worker = forked(conn, ways)
    assert {tree(conn, run)[name] for name in ("mail", "number", "sms")} == {"skipped"}
    assert told(conn, run, worker) == {}


def test_an_arm_that_was_skipped_further_in_is_left_out(conn: Conn) -> None:
    run, worker = forked(conn, ["mail", "sms"])
    do(conn, worker, "number", "failed")
    do(conn, worker, "mail", result=1)
    assert tree(conn, run)["sms"] == "skipped"
    assert told(conn, run, worker) == {"mail": 1}


def test_an_arm_that_fails_blocks_what_takes_the_fork(conn: Conn) -> None:
    run, worker = forked(conn, ["mail"])
    do(conn, worker, "mail", "failed")
    assert tree(conn, run)["tell"] == "blocked"
    assert info(conn, run)["status"] == "failed"
    assert violations(conn) == []


def test_what_follows_a_choice_that_failed_has_no_value(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("choose"), node("mail"), node("tell", {"sent": {"fork": {"on": result_of(0), "arms": []}}})]
    run = start(conn, store(conn, nodes, [edge(0, 1, "collect"), edge(0, 2, "collect")]))
    do(conn, worker, "choose", "failed")
    assert tree(conn, run) == {"choose": "failed", "mail": "pending", "tell": "skipped"}


def test_conditions_compare_whole_values(conn: Conn) -> None:
    for result, arm, taken in (
        ([1], {"has": 1}, True),
        ([True], {"has": 1}, False),
        ([[1, 2]], {"has": [1]}, False),
        ({"a": {"b": 2}}, {"path": ["a", "b"], "equals": 2}, True),
        (None, {"path": [], "equals": None}, True),
    ):
        query = "select taskq.arm_taken(%s::jsonb, %s::jsonb)"
        assert one(conn, query, json.dumps(result), json.dumps(arm)) is taken

"""Plans: checked as a whole with every fault told at once, put in order, and named by a hash that stays the same."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from plan_kit import chain, faults_of, spec
from runs_kit import edge, node, result_of

from taskq.workflow.plan import MOST_CIRCLES, MOST_EDGES, MOST_NODES, Plan, canonical, cycle_of

# What is wrong -----------------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Mapping[str, Any], str]] = {
    "format": (spec([node("a")], format=2), "its format is 2; this version of taskq knows format 1"),
    "no format": ({"nodes": [node("a")]}, "its format is None; this version of taskq knows format 1"),
    "no nodes": (spec([]), "it has 0 nodes; a plan has 1 to 10000: step() wires one"),
    "name with a space": (spec([node("a b")]), "the name of a node is 'a b'"),
    "name too long": (spec([node("a" * 129)]), "the name of a node is 'aaa"),
    "empty name": (spec([node("")]), "the name of a node is ''"),
    "no text": (spec([{**node("a"), "name": 5}]), "the name of a node is 5"),
    "no name": (spec([{"job": {}, "args": {}}]), "the name of a node is None"),
    "name twice": (spec([node("a"), node("b"), node("a")]), "two nodes are named a; give one of them another"),
    "edge from nowhere": (spec([node("a")], [edge(7, 0)]), "an edge leads from 7 to 0, and there is no node 7"),
    "edge to nowhere": (spec([node("a")], [edge(0, 1)]), "an edge leads from 0 to 1, and there is no node 1"),
    "edge below": (spec([node("a")], [edge(-1, 0)]), "an edge leads from -1 to 0, and there is no node -1"),
    "edge by name": (
        spec([node("a"), node("b")], [{"from": "a", "to": 1}]),
        "an edge leads from 'a' to 1, and there is no node 'a'",
    ),
    "edge by truth": (
        spec([node("a"), node("b")], [{"from": False, "to": True}]),
        "an edge leads from False to True, and there is no node False",
    ),
    "edge of half": (spec([node("a")], [{"from": 0}]), "an edge leads from 0 to None, and there is no node None"),
    "edge policy": (
        spec([node("a"), node("b")], [edge(0, 1, "ignore")]),
        "the policy of the edge from 0 to 1 is 'ignore'; there are fail, collect, skip",
    ),
    "self": (spec([node("a")], [edge(0, 0)]), "nodes wait for one another in a circle: a -> a"),
    "two": (spec([node("a"), node("b")], [edge(0, 1), edge(1, 0)]), "in a circle: a -> b -> a"),
    "argument of no parameter": (
        spec([node("a", {"n": {"input": "ordr", "path": []}})]),
        "n of node a takes the argument 'ordr', which the workflow does not have",
    ),
    "result of no node": (
        spec([node("a", {"n": result_of(3)})]),
        "n of node a takes what node 3 gives, and there is no such node",
    ),
    "outcome of no node": (
        spec([node("a", {"n": {"outcome": 3, "path": []}})]),
        "n of node a takes what node 3 gives, and there is no such node",
    ),
    "unwaited": (
        spec([node("a"), node("b", {"n": {"list": [{"object": {"x": result_of(0)}}]}})]),
        "n of node b takes what node a gives, and does not wait for it: add an edge",
    ),
    "unwaited arm": (
        spec(
            [node("a"), node("b"), node("c", {"n": {"case": {"on": result_of(0), "arms": [[True, result_of(1)]]}}})],
            [edge(0, 2)],
        ),
        "n of node c takes what node b gives, and does not wait for it: add an edge",
    ),
    "result of the run": (spec([node("a")], result=result_of(1)), "the result takes what node 1 gives"),
    "no expression": (
        spec([node("a", {"n": {"sum": [1, 2]}})]),
        'n of node a is no expression of a plan: {"expression":{"sum":[1,2]}}',
    ),
    "no object": (spec([node("a", {"n": 5})]), 'n of node a is no expression of a plan: {"expression":5}'),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_is_told(kind: str) -> None:
    given, said = FAULTS[kind]
    [fault] = faults_of(given)
    assert said in fault


def test_all_faults_are_told_at_once() -> None:
    nodes = [node("a"), node("a"), node("b c"), node("d", {"n": result_of(9), "m": {"input": "x"}})]
    given = spec(nodes, [edge(0, 1), edge(1, 0), edge(0, 9), edge(0, 2, "maybe")], format=0)
    found = faults_of(given)
    assert [fault.split(";")[0][:34] for fault in found] == [
        "its format is 0",
        "the name of a node is 'b c'",
        "two nodes are named a",
        "an edge leads from 0 to 9, and the",
        "the policy of the edge from 0 to 2",
        "nodes wait for one another in a ci",
        "n of node d takes what node 9 give",
        "m of node d takes the argument 'x'",
    ]


def test_what_is_too_large_is_refused() -> None:
    many = [node(f"n{i}") for i in range(MOST_NODES + 1)]
    assert faults_of(spec(many)) == ["it has 10001 nodes; a plan has 1 to 10000: step() wires one"]
    two = [node("a"), node("b")]
    edges = [edge(0, 1) for _ in range(MOST_EDGES + 1)]
    assert faults_of(spec(two, edges)) == ["it has 100001 edges, the limit is 100000; let a task collect in stages"]
    assert len(Plan.from_spec(spec(many[:-1])).names) == MOST_NODES
    assert len(Plan.from_spec(spec(two, edges[:-1])).spec["edges"]) == MOST_EDGES


def test_a_circle_is_told_with_its_path_within_many_nodes() -> None:
    # Three of a thousand: the path is those three, not the way that led there.
    given = chain(1000, edge(502, 500))
    [fault] = faults_of(given)
    assert fault == "nodes wait for one another in a circle: n500 -> n501 -> n502 -> n500"
    shuffled = [*given["edges"]]
    random.Random(7).shuffle(shuffled)
    [fault] = faults_of({**given, "edges": shuffled})
    assert fault == "nodes wait for one another in a circle: n500 -> n501 -> n502 -> n500"


def test_circles_that_have_nothing_in_common_are_all_told() -> None:
    given = chain(1000, edge(502, 500), edge(7, 6), edge(900, 900))
    assert sorted(faults_of(given)) == [
        "nodes wait for one another in a circle: n500 -> n501 -> n502 -> n500",
        "nodes wait for one another in a circle: n6 -> n7 -> n6",
        "nodes wait for one another in a circle: n900 -> n900",
    ]


def test_of_very_many_circles_the_first_are_told() -> None:
    assert len(faults_of(chain(100, *(edge(ix, ix) for ix in range(0, 60, 2))))) == MOST_CIRCLES == 20


def test_a_circle_is_found_wherever_it_is_and_only_where_it_is() -> None:
    assert cycle_of(3, [(0, 1), (0, 2), (1, 2)]) is None
    assert cycle_of(0, []) is None
    assert cycle_of(4, [(0, 1), (2, 3), (3, 2)]) == [2, 3, 2]
    assert cycle_of(2, [(1, 1)]) == [1, 1]
    rng = random.Random(11)
    for _ in range(300):
        n = rng.randint(1, 8)
        edges = [(rng.randrange(n), rng.randrange(n)) for _ in range(rng.randint(0, 12))]
        found = cycle_of(n, edges)
        left, gone = set(range(n)), True
        while gone:  # what nothing leads to cannot be part of a circle
            gone = {ix for ix in left if not any(target == ix and source in left for source, target in edges)}
            left -= gone
        assert (found is None) == (not left)
        if found is not None:
            assert found[0] == found[-1]
            assert len(set(found)) == len(found) - 1
            assert all(pair in edges for pair in zip(found, found[1:], strict=False))


# Order ------------------------------------------------------------------------------------------------------------


def test_nodes_are_put_in_order_and_what_names_them_follows() -> None:
    arms = [["x", result_of(1)], [{"node": 2}, {"value": {"node": 2}}]]
    last = {
        "a": result_of(2, "p"),
        "b": {"list": [{"outcome": 1, "path": ["value"]}, {"value": {"node": 2}}]},
        "c": {"object": {"value": result_of(2), "node": result_of(1), "list": {"input": "order", "path": []}}},
        "d": {"case": {"on": result_of(2), "arms": arms}},
    }
    nodes = [node("last", last), node("middle", {"n": result_of(2)}), node("first"), node("free")]
    edges = [edge(2, 0), edge(1, 0, "collect"), edge(2, 1, when={"path": [], "equals": {"node": 2}}), edge(1, 0)]
    plan = Plan.from_spec(spec(nodes, edges, result={"list": [result_of(0), result_of(2)]}))
    assert plan.names == ["first", "middle", "last", "free"]
    assert plan.spec["edges"] == [
        edge(0, 1, when={"path": [], "equals": {"node": 2}}),
        edge(0, 2),
        edge(1, 2, "collect"),
        edge(1, 2),
    ]
    assert plan.spec["result"] == {"list": [result_of(2), result_of(0)]}
    assert plan.spec["nodes"][1]["args"] == {"n": result_of(0)}
    assert plan.spec["nodes"][2]["args"] == {
        "a": result_of(0, "p"),
        "b": {"list": [{"outcome": 1, "path": ["value"]}, {"value": {"node": 2}}]},
        "c": {"object": {"value": result_of(0), "node": result_of(1), "list": {"input": "order", "path": []}}},
        "d": {"case": {"on": result_of(0), "arms": [["x", result_of(1)], [{"node": 2}, {"value": {"node": 2}}]]}},
    }
    plan.check()
    assert Plan.from_spec(plan.spec).hash == plan.hash


def test_a_graph_in_any_order_comes_to_one_in_which_every_edge_leads_forward() -> None:
    rng = random.Random(3)
    for _ in range(100):
        n = rng.randint(1, 12)
        pairs = {(a, b) for a in range(n) for b in range(a + 1, n) if rng.random() < 0.3}
        place = list(range(n))
        rng.shuffle(place)
        nodes: list[Any] = [None] * n
        for ix in range(n):
            nodes[place[ix]] = node(
                f"n{ix}", {"of": {"list": [result_of(place[a]) for a, b in sorted(pairs) if b == ix]}}
            )
        edges = [edge(place[a], place[b]) for a, b in pairs]
        rng.shuffle(edges)
        plan = Plan.from_spec(spec(nodes, edges))
        assert all(e["from"] < e["to"] for e in plan.spec["edges"])
        names = plan.names
        assert {(names[e["from"]], names[e["to"]]) for e in plan.spec["edges"]} == {
            (f"n{a}", f"n{b}") for a, b in pairs
        }
        for ix, each in enumerate(plan.spec["nodes"]):
            taken = [names[e["node"]] for e in each["args"]["of"]["list"]]
            assert taken == [f"n{a}" for a, b in sorted(pairs) if f"n{b}" == names[ix]]


# The hash ------------------------------------------------------------------------------------------------------------


def turned(value: Any) -> Any:
    """The same value with the keys of every object the other way round."""
    if isinstance(value, dict):
        return {key: turned(value[key]) for key in reversed(list(value))}
    return [turned(each) for each in value] if isinstance(value, list) else value


def test_the_order_of_keys_and_edges_makes_no_other_plan() -> None:
    nodes = [node("a", priority=7, tags=["é"]), node("b"), node("c", {"x": {"value": {"k": 1, "j": "ü"}}})]
    given = spec(nodes, [edge(1, 2), edge(0, 2), edge(0, 1)])
    plan, other = Plan.from_spec(given), Plan.from_spec(turned({**given, "edges": given["edges"][::-1]}))
    assert plan.hash == other.hash
    assert plan.text == other.text == canonical(json.loads(plan.text))
    assert "é" in plan.text
    assert " " not in plan.text
    assert plan.workflow == "flow"
    assert len(plan.hash) == 65
    assert plan.hash.startswith("p")


@pytest.mark.parametrize(
    "change",
    [
        {"workflow": "flaw"},
        {"on_failure": "finish"},
        {"receipts": 99},
        {"parameters": ["order", "other"]},
        {"result": {"value": 1}},
        {"effects": [{"name": "tell"}]},
        {"edges": [edge(0, 1, "skip")]},
        {"edges": [edge(0, 1, merge=True)]},
        {"edges": [edge(0, 1, when={"path": [], "equals": 1})]},
        {"edges": []},
        {"nodes": [node("a"), node("c")]},
        {"nodes": [node("a"), node("b", priority=6)]},
        {"nodes": [node("a"), node("b", policy_id="other")]},
        {"nodes": [node("a"), node("b", {"n": {"value": None}})]},
        {"nodes": [node("a"), node("b", compensate={"name": "undo"})]},
    ],
    ids=str,
)
def test_any_change_makes_another_plan(change: dict[str, Any]) -> None:
    given = spec([node("a"), node("b")], [edge(0, 1)])
    assert Plan.from_spec({**given, **change}).hash != Plan.from_spec(given).hash


WIRED = """
from taskq import *
import enum
from dataclasses import dataclass
app = TaskQ("postgresql://nobody@127.0.0.1:1/x")
class Way(enum.Enum):
    AIR = "air"
    SEA = "sea"
    LAND = "land"
@dataclass(frozen=True)
class Item:
    name: str
    n: int
@app.task(priority={priority}, retry=Retry(max_attempts={attempts}))
def pick(names: set[str], ways: frozenset[Way], items: set[Item], table: dict[str, int]) -> int: return 1
@app.task
def undo(order: int) -> None: ...
@app.workflow(effects=[TerminalEffect(undo, on="failed", payload={{"order": Ref.arg("order")}})])
def flow(order: int) -> int:
    table = dict([("a", 1), ("b", 2)][::{step}])
    names = {{f"name {{n}}" for n in range(20)}}
    one = pick.step(names, frozenset(Way), {{Item("b", 1), Item("a", 2), Item("a", 1)}}, table)
    return pick.node(after=[one], compensate=TerminalEffect(undo, payload={{"order": Ref.result()}})).step(
        names, frozenset(), set(), {{}})
print(flow.plan.hash)
"""


def hash_elsewhere(seed: int, *, priority: int = 5, attempts: int = 3, step: int = 1) -> str:
    import taskq

    ran = subprocess.run(
        [sys.executable, "-c", WIRED.format(priority=priority, attempts=attempts, step=step)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(taskq.__file__).parents[1])},
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_a_workflow_has_one_hash_in_every_process_and_another_under_another_policy() -> None:
    found = {hash_elsewhere(1), hash_elsewhere(2), hash_elsewhere(3, step=-1)}
    assert len(found) == 1
    others = {hash_elsewhere(1, priority=6), hash_elsewhere(1, attempts=4)}
    assert len(others | found) == 3

"""Random plans with random failures, losses and orders of ends, against a plain interpreter of the same plan."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import psycopg
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from interpreter import interpret
from psycopg.types.json import Jsonb
from runs_kit import edge, info, node, plan_text, tree, worker_for
from sql import End, claim, exchange, lose, one, policy, resolve, rows, settle, violations

Conn = psycopg.Connection[Any]
EXAMPLES = int(os.environ.get("TASKQ_PROPERTY_EXAMPLES", "40"))
MOST = 9
ONE_AT_ONCE = (
    "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
    " as 'select 1'"
)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)


def inner(ix: int) -> str:
    """The plan of the child run that the node of that number may stand for: its body does what the node's would."""
    return plan_text(
        [node(f"n{ix}", {"seed": {"input": "seed"}})], workflow=f"inner{ix}", result={"node": 0, "path": []}
    )


def mapped(ix: int, on_failure: str, at_once: int) -> str:
    """The plan of the map that the node of that number may stand for."""
    args = {"x": {"input": "x"}, "seed": {"input": "seed"}}
    bounds = {"item": "x", "most": 9, "at_once": at_once}
    return plan_text([node(f"n{ix}", args)], workflow=f"map{ix}", map=bounds, on_failure=on_failure)


CHILDREN: dict[str, str] = {}
"""The plans of child runs that were drawn, by hash."""


def hash_of(text: str) -> str:
    made = f"p{hashlib.sha256(text.encode()).hexdigest()}"
    CHILDREN[made] = text
    return made


@st.composite
def plans(draw: st.DrawFn, on_failure: str = "finish") -> dict[str, Any]:
    """A plan of up to nine nodes: data edges of every policy, branches and their merges, child runs, maps."""
    n = draw(st.integers(1, MOST))
    nodes, edges = [], []
    for ix in range(n):
        args: dict[str, Any] = {"seed": {"input": "seed"}}
        sources = draw(st.lists(st.integers(0, ix - 1), unique=True, max_size=3)) if ix else []
        for source in sources:
            kind = draw(st.sampled_from(["fail", "fail", "fail", "collect", "skip", "when", "has", "merge"]))
            if kind == "when":
                edges.append(edge(source, ix, when={"path": ["n"], "equals": draw(st.integers(0, 1))}))
            elif kind == "has":
                edges.append(edge(source, ix, when={"path": ["l"], "has": draw(st.integers(0, 1))}))
            elif kind == "merge":
                edges.append(edge(source, ix, merge=True))
            else:
                edges.append(edge(source, ix, kind))
                args[f"a{source}"] = {"outcome": source} if kind == "collect" else {"node": source, "path": []}
                if "x" in nodes[source]["args"]:
                    args[f"m{source}"] = {"tally" if kind == "collect" else "results": source}
        arms = [e["from"] for e in edges if e["to"] == ix and e.get("merge")]
        if arms and (on := draw(st.sampled_from([*arms, None]))) is not None:
            picks = [[k, {"node": arm, "path": ["n"]}] for k, arm in enumerate(arms)]
            forks = [[k, str(k), {"node": arm, "path": ["n"]}] for k, arm in enumerate(arms)]
            args["fork"] = {"fork": {"on": {"node": on, "path": ["l"]}, "arms": forks}}
            args["pick"] = {"case": {"on": {"node": on, "path": ["n"]}, "arms": picks}}
        which = draw(st.integers(0, 5))
        if which == 0:
            nodes.append(node(f"n{ix}", args, task=f"inner{ix}:await", child=hash_of(inner(ix))))
        elif which == 1:
            items = {"x": {"value": list(range(draw(st.integers(0, 4))))}}
            over = hash_of(mapped(ix, on_failure, draw(st.integers(1, 3))))
            nodes.append(node(f"n{ix}", args | items, task=f"map{ix}:await", child=over))
        else:
            nodes.append(node(f"n{ix}", args))
    last = {"list": [{"outcome": ix} for ix in range(n)]} if draw(st.booleans()) else {"node": n - 1, "path": []}
    result = {"value": 3} if "list" in last else last
    return json.loads(plan_text(nodes, edges, on_failure=on_failure, result=result))  # type: ignore[no-any-return]


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, tuple[str, Any]]:
    """What each node's body does."""
    return {
        f"n{ix}": ("failed", None)
        if draw(st.integers(0, 3)) == 0
        else ("succeeded", {"n": draw(st.integers(0, 1)), "l": draw(st.lists(st.integers(0, 2), max_size=2))})
        for ix in range(MOST)
    }


def comes_to(plan: Mapping[str, Any], does: Mapping[str, tuple[str, Any]]) -> Callable[[str, Any], tuple[str, Any]]:
    """What becomes of each node, once it is ready."""
    items = {each["name"]: each["args"]["x"]["value"] for each in plan["nodes"] if "x" in each["args"]}

    def body(name: str, args: Any) -> tuple[str, Any]:
        if name not in items:
            return does[name]
        # The first child fails if the node's body is to.
        return does[name] if does[name][0] == "failed" and items[name] else ("succeeded", len(items[name]))

    return body


def end_of(conn: Conn, does: Mapping[str, tuple[str, Any]], claimed: Mapping[str, Any]) -> tuple[str, Any]:
    """How the job ends that was claimed."""
    if claimed["task"] not in does:
        return end_of_child(conn, claimed["job_id"])
    if json.loads(claimed["payload"]).get("x"):
        return "succeeded", None
    return does[claimed["task"]]


def end_of_child(conn: Conn, job: UUID) -> tuple[str, Any]:
    """What the body says that waits for a child run."""
    [row] = rows(conn, "select status, result from taskq.runs where parent_node = %s", job)
    return ("succeeded", row["result"]) if row["status"] == "succeeded" else ("failed", None)


def drive(
    conn: Conn, plan: Mapping[str, Any], does: Mapping[str, tuple[str, Any]], choices: st.DataObject, *, cancel: bool
) -> UUID:
    """Run a plan by hand: claim some, end some, lose a worker now and then, in an order that is drawn."""
    policy(conn)
    if few := choices.draw(st.booleans()):
        # As large plans go: one node gets its job in each transaction, and somebody carries the run on.
        conn.execute(ONE_AT_ONCE)
    for each in plan["nodes"]:
        if "child" in each:
            assert one(conn, "select taskq.store_plan(%s)", CHILDREN[each["child"]]) == each["child"]
    stored = one(conn, "select taskq.store_plan(%s)", json.dumps(plan, sort_keys=True, separators=(",", ":")))
    run = UUID(str(one(conn, "select run_id from taskq.start_run(%s, %s)", stored, Jsonb({"seed": 1}))))
    tasks = [
        *(n["name"] for n in plan["nodes"]),
        *(f"{kind}{ix}:await" for ix in range(MOST) for kind in ("inner", "map")),
    ]
    worker = worker_for(conn)
    held: list[dict[str, Any]] = []
    losses = 1  # a second one of the same job would make it a suspect, which runs alone
    for _ in range(600):
        if info(conn, run)["finished_at"] is not None:
            break
        if not few:
            # Maps that began together are carried on, as large runs are.
            while one(conn, "select count(*) from taskq.carry_on_run()"):
                pass
        # By name, and not so many: child runs that end in one statement do so in an order that nobody has chosen.
        for wanted in (tasks[choices.draw(st.integers(0, len(tasks) - 1)) :], tasks):
            held += sorted(claim(conn, worker, 100, tasks=wanted), key=lambda claimed: str(claimed["task"]))
            if held:
                break
        if few and (not held or choices.draw(st.booleans())):
            one(conn, "select count(*) from taskq.carry_on_run()")
        step = choices.draw(st.sampled_from(["end", "end", "end", "lose", "cancel"]))
        if step == "lose" and losses and held:
            losses -= 1
            lose(conn, worker)
            for job, became in settle(conn).items():
                if became == "unknown":  # it was asked to stop before, and its run is open until somebody decides
                    assert resolve(conn, job, happened=False) == "cancelled"
            worker, held = worker_for(conn), []
        elif step == "cancel" and cancel:
            cancel = False  # once is enough: again it changes nothing
            one(conn, "select taskq.cancel_run(%s)", run)
        elif held:
            several = choices.draw(st.integers(1, len(held)))
            batch = [held.pop(choices.draw(st.integers(0, len(held) - 1))) for _ in range(several)]
            ends = []
            for each in batch:
                outcome, result = end_of(conn, does, each)
                error = None if outcome == "succeeded" else {"type": "Boom", "message": "boom"}
                ends.append(End(each["job_id"], each["claim_epoch"], outcome, result=result, error=error))
            assert exchange(conn, worker, ends) == []
        assert violations(conn) == []
    return run


@settings(max_examples=EXAMPLES, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(plan=plans(), does=bodies(), choices=st.data())
def test_a_run_comes_to_what_its_plan_says_in_whatever_order(
    conn: Conn, plan: dict[str, Any], does: dict[str, tuple[str, Any]], choices: st.DataObject
) -> None:
    status, nodes, result = interpret(plan, {"seed": 1}, comes_to(plan, does))
    with conn.transaction(force_rollback=True):
        run = drive(conn, plan, does, choices, cancel=False)
        ended = info(conn, run)
        assert (ended["status"], tree(conn, run)) == (status, nodes)
        assert ended["result"] == (result if status == "succeeded" else None)


@settings(max_examples=EXAMPLES, deadline=None, phases=PHASES, suppress_health_check=list(HealthCheck))
@given(plan=plans(on_failure="cancel"), does=bodies(), choices=st.data(), cancel=st.booleans())
def test_a_run_that_is_stopped_ends_whole(
    conn: Conn, plan: dict[str, Any], does: dict[str, tuple[str, Any]], choices: st.DataObject, cancel: bool
) -> None:
    status, nodes, _ = interpret(plan, {"seed": 1}, comes_to(plan, does))
    with conn.transaction(force_rollback=True):
        run = drive(conn, plan, does, choices, cancel=cancel)
        ended = info(conn, run)
        found = tree(conn, run)
        assert set(found.values()) <= {"succeeded", "failed", "cancelled", "blocked", "skipped"}
        # What stopping did not cut short is as the plan says.
        assert all(found[name] in (nodes[name], "cancelled") for name in found if nodes[name] != "blocked")
        asked = ended["cancel_requested_at"] is not None
        assert ended["status"] == ("cancelled" if asked and "cancelled" in found.values() else status)

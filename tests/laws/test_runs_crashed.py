"""Every transition of a run with its backend killed at each write: nothing is left, and done again it is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from children_kit import plans
from crash_kit import killed_at_each_write
from emits_kit import plan_of as plan_of_emit
from loops_kit import LOOP
from loops_kit import plan_of as plan_of_loop
from maps_kit import MAP, mapped, plan_of
from psycopg.types.json import Jsonb
from runs_kit import edge, finish, info, node, result_of, start, store, take, tree, worker_for
from signals_kit import held, send_run
from sql import claim, one, rows

Conn = psycopg.Connection[Any]
TABLES = (
    *("runs", "nodes", "receipts", "jobs", "history", "ledger", "effect_intents", "ordering_keys", "audit"),
    "loop_holds",
    "run_pauses",
    "work_budgets",
)
EFFECT = {
    "name": "undo",
    "on": ["failed", "cancelled", "succeeded"],
    "task": "undo",
    "queue": "q",
    "priority": 5,
    "max_attempts": 1,
    "effect_class": "idempotent",
    "policy_id": "p",
    "payload": {"n": {"of": "result"}},
}


def plan(conn: Conn) -> str:
    """Two that meet in a branch, with effects and compensations all the way."""
    nodes = [
        node("a", compensate=EFFECT),
        node("b", compensate=EFFECT),
        node("join", {"a": result_of(0), "b": result_of(1)}),
        node("yes", {"x": result_of(2)}),
        node("no"),
        node("last", {"y": {"outcome": 3}}),
    ]
    edges = [
        edge(0, 2),
        edge(1, 2),
        edge(2, 3),
        edge(2, 3, when={"path": ["ok"], "equals": True}),
        edge(2, 4, when={"path": ["ok"], "equals": False}),
        edge(3, 5, "collect"),
    ]
    return store(conn, nodes, edges, effects=[{**EFFECT, "name": "tell"}])


def admitted(conn: Conn) -> dict[str, Any]:
    return {"plan": plan(conn), "worker": worker_for(conn)}


def begun(conn: Conn) -> dict[str, Any]:
    made = admitted(conn)
    made["run"] = start(conn, made["plan"], {"n": 1})
    made["claims"] = take(conn, made["worker"], "a", "b")
    return made


def one_ended(conn: Conn) -> dict[str, Any]:
    made = begun(conn)
    finish(conn, made["worker"], made["claims"]["a"], result=1)
    return made


def joined(conn: Conn) -> dict[str, Any]:
    made = one_ended(conn)
    finish(conn, made["worker"], made["claims"]["b"], result=2)
    made["claims"] |= take(conn, made["worker"], "join")
    return made


def stopped(conn: Conn) -> dict[str, Any]:
    """Failed, with what its end promised cancelled, so that it may be reopened."""
    made = joined(conn)
    finish(conn, made["worker"], made["claims"]["join"], "failed")
    for effect in rows(conn, "select job_id from taskq.effects order by id desc"):
        one(conn, "select taskq.cancel(%s)", effect["job_id"])
    return made


def some_due(conn: Conn) -> dict[str, Any]:
    """More became ready than one transaction gives jobs: one, here."""
    conn.execute(
        "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
        " as 'select 1'"
    )
    made = admitted(conn)
    made["run"] = start(conn, made["plan"], {"n": 1})
    return made


def left_behind(conn: Conn) -> dict[str, Any]:
    made = one_ended(conn)
    conn.execute("alter table taskq.history disable trigger run_goes_on")
    finish(conn, made["worker"], made["claims"]["b"], result=2)
    conn.execute("alter table taskq.history enable trigger run_goes_on")
    return made


def with_child(conn: Conn) -> dict[str, Any]:
    """A node before a child run of two, one beside it, and one behind it, with effects and compensations."""
    nodes = [node("x", compensate=EFFECT), node("y", {"got": result_of(0)})]
    told = [{**EFFECT, "name": "told"}]
    inner = store(conn, nodes, [edge(0, 1)], workflow="inner", effects=told, result=result_of(1))
    kid = node("kid", {"n": result_of(0)}, task="inner:await", child=inner, compensate=EFFECT)
    nodes = [node("a"), kid, node("b", {"got": result_of(1)}), node("beside")]
    made = {
        "plan": store(conn, nodes, [edge(0, 1), edge(1, 2)], workflow="outer", effects=told),
        "worker": worker_for(conn),
    }
    made["run"] = start(conn, made["plan"], {"n": 1})
    made["claims"] = take(conn, made["worker"], "a", "beside")
    return made


def child_started(conn: Conn) -> dict[str, Any]:
    made = with_child(conn)
    finish(conn, made["worker"], made["claims"]["a"], result=1)
    made["claims"] |= take(conn, made["worker"], "x")
    return made


def child_at_its_last(conn: Conn) -> dict[str, Any]:
    made = child_started(conn)
    finish(conn, made["worker"], made["claims"]["x"], result=2)
    made["claims"] |= take(conn, made["worker"], "y")
    return made


def child_ended(conn: Conn) -> dict[str, Any]:
    made = child_at_its_last(conn)
    finish(conn, made["worker"], made["claims"]["y"], result=3)
    made["claims"] |= take(conn, made["worker"], "inner:await")
    return made


def child_waits(conn: Conn) -> dict[str, Any]:
    """Nothing of the child has been claimed."""
    made = with_child(conn)
    finish(conn, made["worker"], made["claims"]["a"], result=1)
    return made


def child_failed(conn: Conn) -> dict[str, Any]:
    """And its parent by that; what their ends promised is cancelled, so that they may be reopened."""
    made = child_started(conn)
    finish(conn, made["worker"], made["claims"]["x"], "failed")
    finish(conn, made["worker"], take(conn, made["worker"], "inner:await")["inner:await"], "failed")
    finish(conn, made["worker"], made["claims"]["beside"], result=0)
    for effect in rows(conn, "select job_id from taskq.effects order by id desc"):
        one(conn, "select taskq.cancel(%s)", effect["job_id"])
    return made


def child_left_behind(conn: Conn) -> dict[str, Any]:
    made = child_ended(conn)
    conn.execute("set session_replication_role = replica")
    conn.execute(
        "update taskq.jobs set status = 'held', held_reason = 'run', claimed_by = null, claimed_at = null,"
        " claim_epoch = 0 where task = 'inner:await'"
    )
    conn.execute("set session_replication_role = origin")
    return made


def with_map(conn: Conn, **more: Any) -> dict[str, Any]:
    """A node whose result is to be mapped over, two at a time, each of which is undone."""
    made: dict[str, Any] = {"plan": plan_of(conn, at_once=2, compensate=EFFECT, **more), "worker": worker_for(conn)}
    made["run"] = start(conn, made["plan"])
    made["claims"] = take(conn, made["worker"], "first")
    return made


def map_begun(conn: Conn, items: int = 3) -> dict[str, Any]:
    made = with_map(conn)
    finish(conn, made["worker"], made["claims"]["first"], result=list(range(items)))
    claims = claim(conn, made["worker"], 2, tasks=["each"])
    made["claims"] |= {f"each[{ix}]": each for ix, each in enumerate(claims)}
    return made


def map_at_its_last(conn: Conn) -> dict[str, Any]:
    made = map_begun(conn, 2)
    finish(conn, made["worker"], made["claims"]["each[0]"], result=1)
    return made


def map_ended(conn: Conn) -> dict[str, Any]:
    made = map_at_its_last(conn)
    finish(conn, made["worker"], made["claims"]["each[1]"], result=2)
    made["claims"] |= take(conn, made["worker"], MAP)
    return made


def map_failed(conn: Conn) -> dict[str, Any]:
    """And its run by that; what undoes the child that succeeded is cancelled, so that they may be reopened."""
    made = map_begun(conn)
    finish(conn, made["worker"], made["claims"]["each[0]"], result=1)
    finish(conn, made["worker"], made["claims"]["each[1]"], "failed")
    finish(conn, made["worker"], take(conn, made["worker"], MAP)[MAP], "failed")
    for effect in rows(conn, "select job_id from taskq.effects order by id desc"):
        one(conn, "select taskq.cancel(%s)", effect["job_id"])
    return made


def map_due(conn: Conn) -> dict[str, Any]:
    """One transaction makes fewer jobs than may be there at a time."""
    made = with_map(conn)
    conn.execute(
        "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
        " as 'select 1'"
    )
    finish(conn, made["worker"], made["claims"]["first"], result=[1, 2, 3])
    return made


def map_lost(conn: Conn) -> dict[str, Any]:
    made = map_begun(conn)
    conn.execute("delete from taskq.jobs where id = %s", (made["claims"]["each[1]"]["job_id"],))
    return made


def with_loop(conn: Conn, **more: Any) -> dict[str, Any]:
    """A node whose result a loop starts from, each round of which is undone."""
    plan = plan_of_loop(conn, compensate=EFFECT, within=3600, **more)
    made: dict[str, Any] = {"plan": plan, "worker": worker_for(conn)}
    made["run"] = start(conn, made["plan"])
    made["claims"] = take(conn, made["worker"], "first")
    return made


def loop_begun(conn: Conn, **more: Any) -> dict[str, Any]:
    """In its second round."""
    made = with_loop(conn, **more)
    finish(conn, made["worker"], made["claims"]["first"], result={"n": 0})
    finish(conn, made["worker"], take(conn, made["worker"], "more")["more"], result={"word": "again"})
    made["claims"] |= take(conn, made["worker"], "more")
    return made


def loop_at_its_last(conn: Conn) -> dict[str, Any]:
    return loop_begun(conn, most=2)


def loop_ended(conn: Conn) -> dict[str, Any]:
    made = loop_begun(conn)
    finish(conn, made["worker"], made["claims"]["more"], result={"word": "done"})
    made["claims"] |= take(conn, made["worker"], LOOP)
    return made


def loop_held(conn: Conn) -> dict[str, Any]:
    made = loop_begun(conn)
    held(conn, made["worker"], made["claims"]["more"]["job_id"])
    return made


def loop_exhausted(conn: Conn) -> dict[str, Any]:
    """And its run by that; what undoes its rounds is cancelled, so that it may be reopened."""
    made = loop_at_its_last(conn)
    finish(conn, made["worker"], made["claims"]["more"], result={"word": "again"})
    finish(conn, made["worker"], take(conn, made["worker"], LOOP)[LOOP], "failed")
    for effect in rows(conn, "select job_id from taskq.effects order by id desc"):
        one(conn, "select taskq.cancel(%s)", effect["job_id"])
    return made


def loop_left_behind(conn: Conn) -> dict[str, Any]:
    made = loop_begun(conn)
    conn.execute("alter table taskq.history disable trigger run_goes_on")
    finish(conn, made["worker"], made["claims"]["more"], result={"word": "again"})
    conn.execute("alter table taskq.history enable trigger run_goes_on")
    return made


def with_emit(conn: Conn, ahead: int = 2) -> dict[str, Any]:
    """A node whose result the source of an emit takes, each item of which is undone."""
    made: dict[str, Any] = {"plan": plan_of_emit(conn, compensate=EFFECT, ahead=ahead), "worker": worker_for(conn)}
    made["run"] = start(conn, made["plan"])
    made["claims"] = take(conn, made["worker"], "first")
    return made


def emit_begun(conn: Conn, ahead: int = 2) -> dict[str, Any]:
    made = with_emit(conn, ahead)
    finish(conn, made["worker"], made["claims"]["first"], result="here")
    made["claims"] |= take(conn, made["worker"], "list")
    return made


def emit_in_its_second_page(conn: Conn, ahead: int = 2, cursor: str | None = "a") -> dict[str, Any]:
    """With two items that run; the second page does where it is asked for."""
    made = emit_begun(conn, ahead)
    finish(conn, made["worker"], made["claims"]["list"], result={"items": [0, 1], "cursor": cursor})
    claims = claim(conn, made["worker"], 2, tasks=["each"])
    made["claims"] |= {f"each[{ix}]": each for ix, each in enumerate(claims)} | take(conn, made["worker"], "list")
    return made


def emit_that_waits(conn: Conn) -> dict[str, Any]:
    """For one of two items, to ask for the next page."""
    return emit_in_its_second_page(conn, ahead=1)


def emit_at_its_last(conn: Conn) -> dict[str, Any]:
    made = emit_in_its_second_page(conn, cursor=None)
    finish(conn, made["worker"], made["claims"]["each[0]"], result=1)
    return made


def emit_ended(conn: Conn) -> dict[str, Any]:
    made = emit_at_its_last(conn)
    finish(conn, made["worker"], made["claims"]["each[1]"], result=1)
    made["claims"] |= take(conn, made["worker"], MAP)
    return made


def emit_cancelling(conn: Conn) -> dict[str, Any]:
    made = emit_in_its_second_page(conn)
    cancels(conn, made)
    return made


def emit_failed(conn: Conn) -> dict[str, Any]:
    """By its second page, and its run by that; what undoes the item that succeeded is cancelled."""
    made = emit_in_its_second_page(conn)
    finish(conn, made["worker"], made["claims"]["each[0]"], result=1)
    finish(conn, made["worker"], made["claims"]["list"], result="no page")
    finish(conn, made["worker"], made["claims"]["each[1]"], "failed")
    finish(conn, made["worker"], take(conn, made["worker"], MAP)[MAP], "failed")
    for effect in rows(conn, "select job_id from taskq.effects order by id desc"):
        one(conn, "select taskq.cancel(%s)", effect["job_id"])
    return made


def emit_left_behind(conn: Conn) -> dict[str, Any]:
    made = emit_in_its_second_page(conn)
    conn.execute("alter table taskq.history disable trigger run_goes_on")
    finish(conn, made["worker"], made["claims"]["list"], result={"items": [2, 3], "cursor": "b"})
    conn.execute("alter table taskq.history enable trigger run_goes_on")
    return made


def fork_chosen(conn: Conn) -> dict[str, Any]:
    """What chooses among three arms, one of which has two nodes, has been claimed."""
    fork = {"on": result_of(0), "arms": [[arm, arm, result_of(ix)] for ix, arm in ((1, "x"), (3, "y"), (4, "z"))]}
    names = ("choose", "x", "first", "y", "z")
    nodes = [*(node(name, compensate=EFFECT) for name in names), node("last", {"got": {"fork": fork}})]
    arms = [edge(0, ix, when={"path": [], "has": arm}) for ix, arm in ((1, "x"), (2, "y"), (3, "y"), (4, "z"))]
    merged = [edge(ix, 5, merge=True) for ix in (1, 3, 4)]
    made: dict[str, Any] = {
        "plan": store(conn, nodes, [*arms, edge(2, 3), *merged, edge(0, 5)]),
        "worker": worker_for(conn),
    }
    made["run"] = start(conn, made["plan"])
    made["claims"] = take(conn, made["worker"], "choose")
    return made


def fork_at_its_last(conn: Conn) -> dict[str, Any]:
    made = fork_chosen(conn)
    finish(conn, made["worker"], made["claims"]["choose"], result=["z", "x"])
    made["claims"] |= take(conn, made["worker"], "x", "z")
    finish(conn, made["worker"], made["claims"]["x"], result=1)
    return made


def suspends(conn: Conn, made: dict[str, Any]) -> None:
    held(conn, made["worker"], made["claims"]["more"]["job_id"])


def signals(conn: Conn, made: dict[str, Any]) -> None:
    assert send_run(conn, made["run"]) == "given"


def admit(conn: Conn, made: dict[str, Any]) -> None:
    made["run"] = one(conn, "select run_id from taskq.start_run(%s, %s, 'key')", made["plan"], Jsonb({"n": 1}))


def ends(task: str, outcome: str = "succeeded", result: object = None) -> Callable[[Conn, dict[str, Any]], None]:
    def do(conn: Conn, made: dict[str, Any]) -> None:
        finish(conn, made["worker"], made["claims"][task], outcome, result)

    return do


def cancels(conn: Conn, made: dict[str, Any]) -> None:
    one(conn, "select taskq.cancel_run(%s)", made["run"])


def heals(conn: Conn, made: dict[str, Any]) -> None:
    rows(conn, "select * from taskq.heal_runs()")


def pauses(conn: Conn, made: dict[str, Any]) -> None:
    assert one(conn, "select taskq.pause_run(%s, 'why', 'me')", made["run"]) == "paused"


def resumes(conn: Conn, made: dict[str, Any]) -> None:
    assert one(conn, "select taskq.resume_run(%s, 'well again', 'me')", made["run"]) == "resumed"


def while_paused(before: Callable[[Conn], dict[str, Any]], *ends: str) -> Callable[[Conn], dict[str, Any]]:
    """It was paused, and these claims have ended since."""

    def do(conn: Conn) -> dict[str, Any]:
        made = before(conn)
        pauses(conn, made)
        for task in ends:
            result = {"items": [5], "cursor": "b"} if task == "list" else {"word": "again"}
            finish(conn, made["worker"], made["claims"][task], result=result)
        return made

    return do


def allows(conn: Conn, made: dict[str, Any]) -> None:
    assert one(conn, "select taskq.set_work_budget(%s, 50, 'why', 'me')", made["run"]) == "set"


def budgeted(conn: Conn, budget: int = 50) -> dict[str, Any]:
    """A map of four, two at a time, in a run with a work budget."""
    made = mapped(conn, [1, 2, 3, 4], at_once=2, work_budget=budget)
    claims = claim(conn, made.worker, 2, tasks=["each"])
    return {"run": made.run, "worker": made.worker, "claims": {f"each[{ix}]": each for ix, each in enumerate(claims)}}


def budget_spent(conn: Conn) -> dict[str, Any]:
    return budgeted(conn, 4)


def waits_for_budget(conn: Conn) -> dict[str, Any]:
    made = budget_spent(conn)
    finish(conn, made["worker"], made["claims"]["each[0]"], result=2)
    return made


def allowed(conn: Conn) -> dict[str, Any]:
    made = waits_for_budget(conn)
    allows(conn, made)
    return made


def before_a_child_with_a_budget(conn: Conn) -> dict[str, Any]:
    worker = worker_for(conn)
    run = start(conn, plans(conn, work_budget=2, inner={"work_budget": 9}))
    return {"run": run, "worker": worker, "claims": take(conn, worker, "a")}


def carries_on(conn: Conn, made: dict[str, Any]) -> None:
    rows(conn, "select * from taskq.carry_on_run()")


def reopens(conn: Conn, made: dict[str, Any]) -> None:
    one(conn, "select taskq.retry_run(%s)", made["run"])


TRANSITIONS: dict[str, tuple[Callable[[Conn], dict[str, Any]], Callable[[Conn, dict[str, Any]], None], int]] = {
    # Each with what comes before it, and the least number of writes that it must have been killed at.
    "admit": (admitted, admit, 8),
    "advance": (begun, ends("a", result=1), 5),
    "join": (one_ended, ends("b", result=2), 7),
    "branch": (joined, ends("join", result={"ok": True}), 8),
    "the other arm": (joined, ends("join", result={"ok": False}), 8),
    "fail, with effects": (joined, ends("join", "failed"), 12),
    "cancel": (joined, cancels, 8),
    "reopen": (stopped, reopens, 8),
    "carry on": (some_due, carries_on, 4),
    "heal": (left_behind, heals, 6),
    "start a child": (with_child, ends("a", result=1), 9),
    "end a child": (child_at_its_last, ends("y", result=3), 6),
    "fail a child": (child_at_its_last, ends("y", "failed"), 8),
    "go on behind a child": (child_ended, ends("inner:await", result=3), 5),
    "cancel with a child that waits": (child_waits, cancels, 10),
    "cancel with a child that runs": (child_started, cancels, 6),
    "stop with a child": (child_waits, ends("beside", "failed"), 12),
    "reopen with a child": (child_failed, reopens, 12),
    "heal what waits for a child": (child_left_behind, heals, 2),
    "start a map": (with_map, ends("first", result=[1, 2, 3]), 12),
    "start an empty map": (with_map, ends("first", result=[]), 8),
    "fail to start a map": (with_map, ends("first", result="no list"), 6),
    "end an item": (map_begun, ends("each[0]", result=1), 6),
    "end the last item": (map_at_its_last, ends("each[1]", result=2), 6),
    "fail an item": (map_begun, ends("each[0]", "failed"), 8),
    "go on behind a map": (map_ended, ends(MAP, result=2), 5),
    "fail behind a map": (map_ended, ends(MAP, "failed"), 8),
    "cancel with a map": (map_begun, cancels, 8),
    "reopen with a map": (map_failed, reopens, 8),
    "carry a map on": (map_due, carries_on, 4),
    "heal a map": (map_lost, heals, 3),
    "choose some of a fork": (fork_chosen, ends("choose", result=["y", "x"]), 8),
    "choose none of a fork": (fork_chosen, ends("choose", result=[]), 7),
    "end the last of a fork": (fork_at_its_last, ends("z", result=2), 5),
    "fail in a fork": (fork_at_its_last, ends("z", "failed"), 8),
    "start a loop": (with_loop, ends("first", result={"n": 0}), 9),
    "end a round": (loop_begun, ends("more", result={"word": "again"}), 8),
    "end the round that is the end": (loop_begun, ends("more", result={"word": "done"}), 6),
    "exhaust a loop": (loop_at_its_last, ends("more", result={"word": "again"}), 6),
    "fail a round": (loop_begun, ends("more", "failed"), 6),
    "hold a round": (loop_begun, suspends, 3),
    "go on with a round that was held": (loop_held, signals, 2),
    "go on behind a loop": (loop_ended, ends(LOOP, result={"word": "done"}), 5),
    "cancel with a loop": (loop_begun, cancels, 3),
    "cancel with a round that is held": (loop_held, cancels, 8),
    "reopen with a loop": (loop_exhausted, reopens, 8),
    "heal a loop": (loop_left_behind, heals, 6),
    "start an emit": (with_emit, ends("first", result="here"), 9),
    "end a page": (emit_begun, ends("list", result={"items": [1, 2], "cursor": "a"}), 15),
    "end a page behind which none is asked for": (
        emit_in_its_second_page,
        ends("list", result={"items": [2, 3], "cursor": "b"}),
        12,
    ),
    "end the last page": (emit_in_its_second_page, ends("list", result={"items": [2], "cursor": None}), 10),
    "end a page that cannot be taken": (emit_in_its_second_page, ends("list", result=[2]), 8),
    "fail a page": (emit_in_its_second_page, ends("list", "failed"), 8),
    "end the item that lets a page be asked for": (emit_that_waits, ends("each[0]", result=1), 9),
    "end the last item of an emit": (emit_at_its_last, ends("each[1]", result=1), 6),
    "go on behind an emit": (emit_ended, ends(MAP, result=2), 5),
    "cancel with an emit": (emit_in_its_second_page, cancels, 3),
    "end a page of an emit that is being cancelled": (
        emit_cancelling,
        ends("list", result={"items": [2, 3], "cursor": "b"}),
        7,
    ),
    "reopen with an emit": (emit_failed, reopens, 8),
    "heal an emit": (emit_left_behind, heals, 9),
    "pause": (one_ended, pauses, 4),
    "pause with a child": (child_waits, pauses, 8),
    "pause with a map": (map_begun, pauses, 7),
    "pause with a loop": (loop_begun, pauses, 8),
    "pause with an emit": (emit_that_waits, pauses, 7),
    "advance while paused": (while_paused(one_ended), ends("b", result=2), 7),
    "start a child while paused": (while_paused(with_child), ends("a", result=1), 10),
    "end a round while paused": (while_paused(loop_begun), ends("more", result={"word": "again"}), 9),
    "end the round that is the end while paused": (while_paused(loop_begun), ends("more", result={"word": "done"}), 8),
    "fail while paused": (while_paused(child_waits), ends("beside", "failed"), 14),
    "resume": (while_paused(one_ended, "b"), resumes, 4),
    "resume with a child": (while_paused(child_started, "x"), resumes, 8),
    "resume with a map": (while_paused(map_begun, "each[0]"), resumes, 8),
    "resume with a loop": (while_paused(loop_begun, "more"), resumes, 9),
    "resume with an emit": (while_paused(emit_in_its_second_page, "list"), resumes, 8),
    "cancel while paused": (while_paused(child_started, "x"), cancels, 8),
    "begin within a budget": (budgeted, ends("each[0]", result=4), 7),
    "begin a child within a budget": (before_a_child_with_a_budget, ends("a", result={"deep": 1}), 12),
    "find a budget spent": (budget_spent, ends("each[0]", result=4), 4),
    "allow more": (waits_for_budget, allows, 2),
    "go on with more": (allowed, carries_on, 5),
}


def shape(conn: Conn, made: dict[str, Any]) -> Any:
    """What a transition has led to, without ids and instants."""
    effects = rows(conn, "select name, status, settled from taskq.effects order by name, status")
    receipts = rows(
        conn,
        "select r.workflow, c.kind, c.node, c.n, c.status from taskq.receipts c join taskq.runs r on r.id = c.run_id"
        " order by r.workflow, c.run_id, c.sequence",
    )
    children = rows(
        conn,
        "select workflow, status, generation, input, items, wanted, written, active from taskq.runs"
        " order by depth, workflow",
    )
    jobs = rows(conn, "select task, status, held_reason, payload from taskq.jobs order by task, payload")
    nodes = rows(
        conn,
        "select r.workflow, n.ix, n.status, n.due, n.item from taskq.nodes n join taskq.runs r on r.id = n.run_id"
        " where r.items is not null order by r.workflow, n.ix",
    )
    return tree(conn, made["run"]), info(conn, made["run"])["status"], effects, receipts, jobs, children, nodes


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_transition_that_is_killed_at_any_write_leaves_nothing_and_can_be_done_again(dsn: str, name: str) -> None:
    before, transition, least = TRANSITIONS[name]
    with psycopg.connect(dsn) as conn:
        made = killed_at_each_write(conn, dsn, before, transition, tables=TABLES, shape=shape, least=least)
        assert isinstance(made["run"], UUID)
        assert tree(conn, made["run"])

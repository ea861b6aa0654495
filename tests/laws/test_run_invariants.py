"""``check_invariants`` about runs: each violation is forged past the triggers, and reported for that very run alone."""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import pytest
from children_kit import child_of, family
from effects_kit import effect
from emits_kit import asked, emitted, page
from loops_kit import again, claimed, loop_of, looped, plan_of
from maps_kit import doubled, end_last, ends, given, mapped
from runs_kit import do, edge, info, node, store, worker_for
from runs_kit import start as start_run
from sql import one, violations

Conn = psycopg.Connection[Any]
NOWHERE = UUID(int=77)


class Runs(NamedTuple):
    """A run half way along a chain, one of two nodes beside each other, one that is done, and one that has failed.

    And a run with its child run, and another pair of them that have succeeded; a map that goes on, and one that was
    undone; a loop that goes on, and one that is done; an emit whose third page is asked for, and one that is done; and
    a run with a work budget, and its child run.
    """

    live: UUID
    pair: UUID
    done: UUID
    failed: UUID
    parent: UUID
    child: UUID
    done_parent: UUID
    done_child: UUID
    map: UUID
    mapped: UUID
    undone: UUID
    loop: UUID
    looped: UUID
    emit: UUID
    emitted: UUID
    budgeted: UUID
    budgeted_child: UUID
    nowhere: UUID = NOWHERE


@pytest.fixture
def runs(conn: Conn) -> Runs:
    worker = worker_for(conn)
    three = [node("a"), node("b"), node("c")]
    live = start_run(conn, store(conn, three, [edge(0, 1), edge(1, 2)], workflow="live"))
    do(conn, worker, "a")
    pair = start_run(conn, store(conn, [node("x"), node("y")], workflow="pair"))
    done = start_run(conn, store(conn, [node("d")], workflow="done", effects=[effect("told", ["failed"])]))
    do(conn, worker, "d")
    nodes = [node("e", compensate=effect("undo")), node("f")]
    failed = start_run(conn, store(conn, nodes, [edge(0, 1)], workflow="failed", effects=[effect("told", ["failed"])]))
    do(conn, worker, "e")
    do(conn, worker, "f", "failed")
    assert [info(conn, run)["status"] for run in (live, pair, done, failed)] == [
        "running",
        "running",
        "succeeded",
        "failed",
    ]
    inner = store(conn, [node("g")], workflow="inner")
    outer = store(conn, [node("kid", task="inner:await", child=inner)], workflow="outer")
    done_parent = start_run(conn, outer)
    do(conn, worker, "g")
    do(conn, worker, "inner:await")
    parent = start_run(conn, outer)
    undone = mapped(conn, [4], compensate=effect("undo"))
    ends(conn, undone, 1, doubled)
    assert given(conn, undone) == [8]
    end_last(conn, undone, "failed")
    maps = mapped(conn, [1, 2, 3], at_once=1)
    loop = looped(conn)
    again(conn, loop, 1)
    claimed(conn, loop)
    done_loop = looped_through(conn)
    emit = emitted(conn, ahead=1)
    page(conn, emit, [1], "a")
    page(conn, emit, [], "b")
    assert asked(conn, emit) is not None
    done_emit = emitted(conn, takes="tally", policy="collect")
    page(conn, done_emit, [], "a")
    page(conn, done_emit, [])
    budgeted = family(conn, work_budget=10).parent
    families = (parent, child_of(conn, parent), done_parent, child_of(conn, done_parent))
    for scope in ("live", "all"):
        assert violations(conn, scope) == []
    return Runs(
        live,
        pair,
        done,
        failed,
        *families,
        child_of(conn, maps.run),
        maps.run,
        undone.run,
        loop.loop,
        done_loop,
        child_of(conn, emit.run),
        child_of(conn, done_emit.run),
        budgeted,
        child_of(conn, budgeted),
    )


def looped_through(conn: Conn) -> UUID:
    """A loop that is done, as its run is."""
    worker = worker_for(conn)
    run = start_run(conn, plan_of(conn))
    do(conn, worker, "first", result={"n": 0})
    # The loop that goes on has its round claimed, so that this one's is the one that is due.
    do(conn, worker, "more", result={"word": "done"})
    do(conn, worker, "flow:await", result={"word": "done"})
    do(conn, worker, "last")
    return loop_of(conn, run)


PLAN = "(select plan_hash from taskq.runs where id = %s)"
CLOSED = " returning run_id) update taskq.runs r set open_nodes = open_nodes - 1 from n where r.id = n.run_id"
FORGED_PAUSE = "insert into taskq.run_pauses values (%s, now(), 'c', 'r', 'me') returning run_id"
FORGERIES = [
    # code, of which run, how it is forged, the smallest scope that reports it
    ("run_plan_missing", "live", f"delete from taskq.plans where hash = {PLAN}", "live"),
    ("run_plan_missing", "done", f"delete from taskq.plans where hash = {PLAN}", "all"),
    ("run_plan_differs", "live", f"update taskq.plans set text = text || ' ' where hash = {PLAN}", "live"),
    *(
        ("run_plan_rows_differ", whose, f"{forge} plan_hash = {PLAN}", scope)
        for whose, scope, forge in (
            ("live", "live", 'update taskq.plan_nodes set args = \'{"x": {"value": 1}}\' where ix = 2 and'),
            ("live", "live", "update taskq.plan_nodes set waits_for = 2 where ix = 2 and"),
            ("live", "live", "update taskq.plan_edges set policy = 'collect' where target = 2 and"),
            ("done", "all", "update taskq.plan_nodes set name = 'other' where"),
            ("failed", "all", "delete from taskq.plan_edges where"),
            ("failed", "all", "delete from taskq.plan_nodes where ix = 1 and"),
        )
    ),
    ("run_nodes_differ", "live", f"with n as (delete from taskq.nodes where run_id = %s and ix = 2{CLOSED}", "live"),
    (
        "run_nodes_differ",
        "failed",
        "insert into taskq.nodes (id, run_id, ix, unmet, status, finished_at)"
        " values (gen_random_uuid(), %s, 2, 0, 'skipped', now())",
        "all",
    ),
    ("run_open_nodes_differ", "live", "update taskq.runs set open_nodes = open_nodes + 1 where id = %s", "live"),
    ("run_open_nodes_differ", "done", "update taskq.runs set open_nodes = open_nodes + 1 where id = %s", "all"),
    (
        "run_ended_with_open_nodes",
        "live",
        "update taskq.runs set status = 'cancelled', finished_at = now() where id = %s",
        "all",
    ),
    ("run_stands_still", "done", "update taskq.runs set status = 'running', finished_at = null where id = %s", "live"),
    ("receipts_missing", "live", "delete from taskq.receipts where sequence = 1 and run_id = %s", "live"),
    ("receipts_missing", "live", "delete from taskq.receipts where sequence = 2 and run_id = %s", "live"),
    ("receipts_missing", "live", "delete from taskq.receipts where sequence = 4 and run_id = %s", "live"),
    ("receipts_missing", "live", "update taskq.receipts set sequence = 9 where sequence = 4 and run_id = %s", "live"),
    ("receipts_missing", "live", "update taskq.runs set sequence = sequence + 1 where id = %s", "live"),
    ("receipts_missing", "live", "update taskq.runs set receipts = 3 where id = %s", "live"),
    (
        "receipts_missing",
        "live",
        "insert into taskq.receipts (run_id, sequence, at, kind) values (%s, 5, now(), 'ready')",
        "live",
    ),
    ("receipts_missing", "done", "delete from taskq.receipts where kind = 'finished' and run_id = %s", "all"),
    (
        "receipts_first_differs",
        "live",
        "update taskq.receipts set kind = 'ready' where sequence = 1 and run_id = %s",
        "live",
    ),
    (
        "receipts_reordered",
        "live",
        "update taskq.receipts set at = at - interval '2 min' where sequence = 2 and run_id = %s",
        "live",
    ),
    (
        "receipts_reordered",
        "done",
        "update taskq.receipts set at = at - interval '2 min' where sequence = 2 and run_id = %s",
        "all",
    ),
    (
        "receipts_reordered",
        "live",
        "update taskq.receipts set status = 'failed' where sequence = 3 and run_id = %s",
        "live",
    ),
    ("receipts_reordered", "done", "update taskq.receipts set seal = null where sequence = 2 and run_id = %s", "all"),
    (
        "receipt_of_no_run",
        "nowhere",
        "insert into taskq.receipts (run_id, sequence, at, kind) values (%s, 1, now(), 'admitted')",
        "all",
    ),
    ("node_job_missing", "live", "delete from taskq.jobs where run_id = %s", "live"),
    (
        "node_job_missing",
        "pair",
        "update taskq.jobs set id = gen_random_uuid(), run_id = null where task = 'x' and run_id = %s",
        "live",
    ),
    (
        "node_job_not_ready",
        "pair",
        "with n as (update taskq.nodes set status = 'cancelled', finished_at = now() where ix = 1 and run_id = %s"
        + CLOSED,
        "live",
    ),
    (
        "child_run_missing",
        "parent",
        # It has ended, and told nobody.
        "with c as (update taskq.runs set status = 'succeeded', finished_at = now(), open_nodes = 0"
        " where parent_run = %s returning id), j as (delete from taskq.jobs j using c where j.run_id = c.id)"
        " update taskq.nodes n set status = 'succeeded', finished_at = now() from c where n.run_id = c.id",
        "live",
    ),
    (
        "child_not_waited_for",
        "child",
        "update taskq.jobs j set status = 'pending', held_reason = null from taskq.runs c"
        " where c.parent_node = j.id and c.id = %s",
        "live",
    ),
    (
        "child_outlives_node",
        "child",
        "with r as (select parent_node, parent_run from taskq.runs where id = %s),"
        " j as (delete from taskq.jobs j using r where j.id = r.parent_node),"
        " o as (update taskq.runs o set open_nodes = 0, status = 'cancelled', finished_at = now() from r"
        "  where o.id = r.parent_run)"
        " update taskq.nodes n set status = 'cancelled', finished_at = now() from r where n.id = r.parent_node",
        "live",
    ),
    (
        "child_of_no_node",
        "child",
        # All of the parent is gone.
        "with r as (select parent_run as id from taskq.runs where id = %s),"
        " j as (delete from taskq.jobs j using r where j.run_id = r.id),"
        " n as (delete from taskq.nodes n using r where n.run_id = r.id),"
        " c as (delete from taskq.receipts c using r where c.run_id = r.id)"
        " delete from taskq.runs p using r where p.id = r.id",
        "live",
    ),
    (
        "child_of_no_node",
        "done_child",
        "update taskq.runs set parent_node = gen_random_uuid() where id = %s",
        "all",
    ),
    (
        "child_differs",
        "child",
        "update taskq.runs set plan_hash = (select plan_hash from taskq.runs where workflow = 'done') where id = %s",
        "live",
    ),
    (
        "child_differs",
        "done_child",
        "with n as (update taskq.nodes set status = 'failed' where run_id = %s returning run_id)"
        " update taskq.runs r set status = 'failed' from n where r.id = n.run_id",
        "all",
    ),
    (
        "node_before_its_sources",
        "live",
        "with n as (update taskq.nodes set status = 'succeeded', finished_at = now() where ix = 2 and run_id = %s"
        + CLOSED,
        "live",
    ),
    (
        "node_before_its_sources",
        "failed",
        "update taskq.nodes set status = case ix when 0 then 'failed' else 'succeeded' end where run_id = %s",
        "all",
    ),
    ("node_waits_for_nothing", "live", "update taskq.nodes set unmet = 3 where ix = 2 and run_id = %s", "live"),
    ("node_waits_for_nothing", "live", "update taskq.nodes set due = true where ix = 2 and run_id = %s", "live"),
    (
        "node_waits_for_nothing",
        "pair",
        "with j as (delete from taskq.jobs where task = 'y' and run_id = %s returning id)"
        " update taskq.nodes n set status = 'waiting' from j where n.id = j.id",
        "live",
    ),
    ("run_effect_not_promised", "failed", "delete from taskq.effect_intents where owner_job_id = %s", "all"),
    (
        "run_effect_not_promised",
        "failed",
        "update taskq.effect_intents set generation = 1 where owner_job_id = %s",
        "all",
    ),
    (
        "compensation_not_promised",
        "failed",
        "delete from taskq.effect_intents where owner_job_id in (select id from taskq.nodes where run_id = %s)",
        "all",
    ),
    (
        "compensation_not_promised",
        "failed",
        "update taskq.effect_intents set name = 'compensate:1:undo' where owner_job_id in"
        " (select id from taskq.nodes where run_id = %s)",
        "all",
    ),
    (
        "compensation_not_promised",
        "undone",
        "delete from taskq.effect_intents where owner_job_id in"
        " (select n.id from taskq.nodes n join taskq.runs c on c.id = n.run_id where c.parent_run = %s)",
        "all",
    ),
    (
        "map_differs",
        "map",
        "with n as (delete from taskq.nodes where ix > 0 and run_id = %s returning run_id) update taskq.runs r"
        " set items = null, wanted = null, written = null, active = null, at_once = null, open_nodes = 1"
        " where r.id in (select run_id from n)",
        "live",
    ),
    (
        "map_differs",
        "pair",
        "with n as (update taskq.nodes set item = '1' where run_id = %s returning run_id) update taskq.runs r"
        " set items = 2, wanted = 2, written = 2, active = 2, at_once = 9 where r.id in (select run_id from n)",
        "live",
    ),
    ("map_nodes_differ", "map", "update taskq.nodes set item = null where ix = 1 and run_id = %s", "live"),
    ("map_nodes_differ", "map", "update taskq.nodes set ix = 3 where ix = 2 and run_id = %s", "live"),
    (
        "map_nodes_differ",
        "map",
        "with n as (delete from taskq.nodes where ix = 2 and run_id = %s returning run_id)"
        " update taskq.runs r set open_nodes = 2 from n where r.id = n.run_id",
        "live",
    ),
    ("map_active_differs", "map", "update taskq.runs set active = 2 where id = %s", "live"),
    (
        "map_stands_still",
        "map",
        "with n as (delete from taskq.nodes where due and run_id = %s returning run_id)"
        " update taskq.runs r set written = 1 where r.id in (select run_id from n)",
        "live",
    ),
    (
        "pending_in_paused_run",
        "pair",
        f"with r as ({FORGED_PAUSE}) update taskq.runs set status = 'paused' where id in (select run_id from r)",
        "live",
    ),
    (
        "held_as_paused_in_no_pause",
        "pair",
        "update taskq.jobs set status = 'held', held_reason = 'paused' where task = 'x' and run_id = %s",
        "live",
    ),
    ("pause_record_differs", "pair", FORGED_PAUSE, "live"),
    (
        "pause_record_differs",
        "parent",
        # Its child is paused with it: it is the parent that has no record.
        "with r as (update taskq.runs set status = 'paused' where %s in (id, parent_run) returning id, parent_run),"
        " j as (update taskq.jobs j set status = 'held', held_reason = 'paused' from r"
        "  where j.run_id = r.id and j.status = 'pending')"
        " insert into taskq.run_pauses select id, now(), 'c', 'r', 'me' from r where parent_run is not null",
        "live",
    ),
    (
        "child_not_paused",
        "child",
        "with r as (update taskq.runs p set status = 'paused' from taskq.runs c where c.id = %s and p.id = c.parent_run"
        " returning p.id) insert into taskq.run_pauses select id, now(), 'c', 'r', 'me' from r",
        "live",
    ),
    ("loop_differs", "loop", "update taskq.runs set counted_from = null, held = null where id = %s", "live"),
    (
        "loop_differs",
        "done",
        "with n as (update taskq.nodes set item = '1' where run_id = %s returning run_id) update taskq.runs r set items"
        " = 1, wanted = 1, written = 1, active = 0, at_once = 1, counted_from = now(), held = '0'"
        " where r.id in (select run_id from n)",
        "all",
    ),
    ("loop_round_differs", "loop", "update taskq.nodes set item = '1' where ix = 1 and run_id = %s", "live"),
    ("loop_round_differs", "loop", "update taskq.nodes set result = '1' where ix = 0 and run_id = %s", "live"),
    (
        "loop_round_out_of_turn",
        "loop",
        "update taskq.nodes set status = 'failed' where ix = 0 and run_id = %s",
        "live",
    ),
    (
        "loop_round_out_of_turn",
        "loop",
        'update taskq.nodes set item = case ix when 1 then jsonb \'{"word": "done"}\' else item end,'
        ' result = case ix when 0 then jsonb \'{"word": "done"}\' end where run_id = %s',
        "live",
    ),
    (
        "emit_differs",
        "emit",
        "with n as (delete from taskq.nodes where ix >= 1000000 and run_id = %s returning *),"
        " j as (delete from taskq.jobs j using n where j.id = n.id) update taskq.runs r set pages = null, active = 1,"
        " open_nodes = 1 where r.id in (select run_id from n)",
        "live",
    ),
    (
        "emit_page_out_of_turn",
        "emit",
        'update taskq.nodes set item = item || \'{"cursor": "z"}\' where ix = 1000001 and run_id = %s',
        "live",
    ),
    (
        "emit_page_out_of_turn",
        "emit",
        "update taskq.nodes set item = item || '{\"last\": true}' where ix = 1000001 and run_id = %s",
        "live",
    ),
    (
        "emit_page_out_of_turn",
        "emit",
        "update taskq.nodes set status = 'failed' where ix = 1000001 and run_id = %s",
        "live",
    ),
    (
        "emit_page_out_of_turn",
        "emit",
        "update taskq.nodes set item = item - 'first' where ix = 1000001 and run_id = %s",
        "live",
    ),
    (
        "emit_page_out_of_turn",
        "emit",
        "update taskq.nodes set item = item || '{\"first\": 0}' where ix = 1000001 and run_id = %s",
        "live",
    ),
    (
        "emit_page_out_of_turn",
        "emitted",
        "update taskq.nodes set item = item || '{\"n\": 1}' where ix = 1000001 and run_id = %s",
        "all",
    ),
    (
        "emit_incomplete",
        "emitted",
        'update taskq.nodes set item = item || \'{"last": false, "next": 3}\' where ix = 1000001 and run_id = %s',
        "all",
    ),
    (
        "emit_stands_still",
        "emit",
        "with n as (delete from taskq.nodes where ix = 1000002 and run_id = %s returning *),"
        " j as (delete from taskq.jobs j using n where j.id = n.id) update taskq.runs r set pages = 2, active = 1,"
        " open_nodes = 1 where r.id in (select run_id from n)",
        "live",
    ),
    ("work_budget_missing", "budgeted", "delete from taskq.work_budgets where run_id = %s", "live"),
    ("work_budget_differs", "budgeted_child", "update taskq.runs set budget_of = null where id = %s", "live"),
    ("work_budget_miscounted", "budgeted", "update taskq.work_budgets set begun = 0 where run_id = %s", "live"),
    ("loop_result_differs", "looped", "update taskq.runs set result = '1' where id = %s", "all"),
    (
        "loop_result_differs",
        "looped",
        "with n as (update taskq.nodes set result = '1' where run_id = %s returning run_id)"
        " update taskq.runs r set result = '1' from n where r.id = n.run_id",
        "all",
    ),
]


@pytest.mark.parametrize(("code", "whose", "forge", "scope"), FORGERIES)
def test_a_forged_run_is_reported(conn: Conn, runs: Runs, code: str, whose: str, forge: str, scope: str) -> None:
    run = getattr(runs, whose)
    conn.execute("set local session_replication_role = replica")
    assert conn.execute(forge, (run,)).rowcount >= 1
    assert set(violations(conn, scope)) == {(code, run)}
    if scope == "all":
        assert violations(conn, "live") == []


def test_each_check_of_runs_has_its_forgery(conn: Conn) -> None:
    checks = ("check_runs(text, timestamptz)", "check_pauses()", "check_work_budgets()")
    names = ", ".join(f"'taskq.{check}'::regprocedure" for check in checks)
    text = one(conn, f"select string_agg(prosrc, '' order by oid) from pg_proc where oid in ({names})")
    codes = re.findall(r"(?:\bselect |\()9, '(\w+)',", text)
    assert len(codes) == len(set(codes)) > 10
    assert {code for code, *_ in FORGERIES} == set(codes)


def test_what_ended_since_an_instant_is_looked_at(conn: Conn, runs: Runs) -> None:
    conn.execute("set local session_replication_role = replica")
    conn.execute("delete from taskq.receipts where run_id = %s", (runs.done,))
    found = "select count(*) from taskq.check_invariants('since', taskq.now() - %s::interval)"
    assert (one(conn, found, "1 hour"), one(conn, found, "0")) == (1, 0)

"""Roles: each may do what its work needs, through functions, and nothing else."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sql import End, claim, end, enqueue, enqueue_many, exchange, policy, refused, register, rows, running, violations

Conn = psycopg.Connection[Any]
DENIED = "42501"
ROLES = ("producer", "worker", "operator", "reader")


def become(conn: Conn, role: str) -> None:
    conn.execute(f"set local role taskq_{role}")


def tables(conn: Conn) -> list[str]:
    found = rows(
        conn,
        "select c.relname from pg_class c where c.relnamespace = 'taskq'::regnamespace and c.relkind in ('r', 'p')"
        " and not c.relispartition order by 1",
    )
    return [row["relname"] for row in found]


@pytest.mark.parametrize("role", ROLES)
def test_no_role_writes_to_any_table(conn: Conn, role: str) -> None:
    names = tables(conn)
    assert len(names) > 10
    become(conn, role)
    for name in names:
        for statement in (
            f"delete from taskq.{name}",
            f"truncate taskq.{name}",
            f"insert into taskq.{name} default values",
        ):
            assert refused(conn, statement) == DENIED, statement
    for name, column in (
        ("jobs", "status = 'pending'"),
        ("history", "result = null"),
        ("workers", "status = 'live'"),
        ("leader", "holder = null"),
    ):
        assert refused(conn, f"update taskq.{name} set {column}") == DENIED


@pytest.mark.parametrize("role", ROLES)
def test_no_role_makes_objects_or_replaces_the_clock(conn: Conn, role: str) -> None:
    become(conn, role)
    assert refused(conn, "create table taskq.mine (a int)") == DENIED
    replace = "create or replace function taskq.now() returns timestamptz language sql as 'select now()'"
    assert refused(conn, replace) == DENIED
    assert refused(conn, "drop trigger epoch_advances on taskq.jobs") == DENIED


CALLS = {
    "enqueue_many": "select * from taskq.enqueue_many('[]', '{}', '{}')",
    "enqueue_plain": "select taskq.enqueue_plain('{}', '{}')",
    "enqueue": "select taskq.enqueue('t', policy => 'p')",
    "ensure_policy": "select taskq.ensure_policy('x', 1, '{}')",
    "ensure_limit": "select taskq.ensure_limit('x', 1)",
    "publish_limits": "select * from taskq.publish_limits('{}', '{}')",
    "set_limit": "select taskq.set_limit('x', 1, 'r')",
    "clear_limit": "select taskq.clear_limit('x', 'r')",
    "open_cohorts": "select taskq.open_cohorts('{}')",
    "choose_in_cohorts": "select taskq.choose_in_cohorts(1, 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
    "publish_task": "select taskq.publish_task(null, 't', 'q', 5, 1, 'pure', 'p')",
    "exchange": "select * from taskq.exchange(taskq.id_zero(), '{}', '{}', '{}', '{}', '{}', '{}', '{}', 0,"
    " '{}', '{}', '{}', '{}', '{}')",
    "end_attempts": "select taskq.end_attempts(taskq.id_zero(), '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
    "claim": "select * from taskq.claim(taskq.id_zero(), 0, '{}', '{}', '{}', '{}', '{}')",
    "claim_suspect": "select * from taskq.claim_suspect(taskq.id_zero(), '{}', '{}')",
    "register_worker": "select taskq.register_worker('w', 'h', 1, '{q}', '{t}', 1, 1, '0', 30)",
    "renew": "select * from taskq.renew(taskq.id_zero())",
    "lead": "select * from taskq.lead(taskq.id_zero(), 'maintenance', 30)",
    "look": "select * from taskq.look(taskq.id_zero(), 30, null, '{}', '{}')",
    "mark_lost": "select * from taskq.mark_lost()",
    "settle_lost": "select * from taskq.settle_lost()",
    "sweep": "select count(*) from taskq.sweep()",
    "sweep_orderings": "select taskq.sweep_orderings()",
    "prune": "select taskq.prune()",
    "ensure_partitions": "select taskq.ensure_partitions()",
    "ensure_today": "select taskq.ensure_today()",
    "drop_expired_partition": "select taskq.drop_expired_partition()",
    "cancel": "select taskq.cancel(taskq.id_zero())",
    "retry": "select taskq.retry(taskq.id_zero())",
    "resolve": "select taskq.resolve(taskq.id_zero(), true)",
    "resolve_attempt": "select taskq.resolve_attempt(taskq.id_zero(), 1, true)",
    "answer_reconcile": "select taskq.answer_reconcile(taskq.id_zero(), 1, true)",
    "decide_unknown": "select taskq.decide_unknown(taskq.id_zero(), 1, true, null, null, null, false)",
    "start_step": "select * from taskq.start_step(taskq.id_zero(), taskq.id_zero(), 1, 's', 1)",
    "end_step": "select taskq.end_step(taskq.id_zero(), taskq.id_zero(), 1, 's', 1, null, '1', null)",
    "settle_step": "select taskq.settle_step(null, true, '1')",
    "keep_effects": "select taskq.keep_effects(taskq.id_zero(), 0)",
    "reconcile": "select * from taskq.reconcile(taskq.id_zero())",
    "reconcile_missing": "select * from taskq.reconcile_missing()",
    "enqueue_reconcile": "select taskq.enqueue_reconcile(j) from taskq.jobs j",
    "pause_queue": "select taskq.pause_queue('q')",
    "resume_queue": "select taskq.resume_queue('q')",
    "drain": "select taskq.drain(taskq.id_zero())",
    "resume_ordering": "select taskq.resume_ordering('k', 'why')",
    "steer_many": "select * from taskq.steer_many('cancel', array[taskq.id_zero()]::uuid[])",
    "check_invariants": "select * from taskq.check_invariants()",
    "settle_effect": "select taskq.settle_effect('k', 'r')",
    "retry_effect": "select taskq.retry_effect('k')",
    "prune_effects": "select taskq.prune_effects()",
    "promise": "select taskq.promise(null::taskq.history)",
    "effect_job": "select * from taskq.effect_job(null::taskq.history, '{}', 'k')",
    "reopening": "select taskq.reopening(null::taskq.history)",
    "give_turn": "select taskq.give_turn('k')",
    "come_due": "select taskq.come_due('{k}', 1)",
    "take_ordering_keys": "select taskq.take_ordering_keys('{k}')",
    "prune_orderings": "select taskq.prune_orderings()",
    "note": "select taskq.note('a', 's', 'me', null, null)",
    "checkpoint": "select * from taskq.checkpoint(taskq.id_zero(), taskq.id_zero(), 1, 0, 'null')",
    "end_inside": "select taskq.end_inside(taskq.id_zero(), taskq.id_zero(), 1, 1, 'null', '')",
    "ended_inside": "select taskq.ended_inside(taskq.id_zero(), taskq.id_zero(), 1, 1)",
    "request_reconcile": "select taskq.request_reconcile(j) from taskq.jobs j",
    "enter_unknown": "select taskq.enter_unknown(j, 'told', null) from taskq.jobs j",
    "start_effects": "select * from taskq.start_effects(taskq.id_zero(), '{}', '{}')",
    "finish": "select taskq.finish(j, 'failed', null, null, null) from taskq.jobs j",
    "finish_many": "select taskq.finish_many('{}', 'failed', null)",
    "store_plan": "select taskq.store_plan('{}')",
    "start_run": "select * from taskq.start_run('p', '{}')",
    "cancel_run": "select taskq.cancel_run(taskq.id_zero())",
    "pause_run": "select taskq.pause_run(taskq.id_zero(), 'why')",
    "resume_run": "select taskq.resume_run(taskq.id_zero(), 'why')",
    "set_work_budget": "select taskq.set_work_budget(taskq.id_zero(), 1, 'why')",
    "grant_recovery": "select taskq.grant_recovery(taskq.id_zero(), 'why')",
    "begin_preparation": "select * from taskq.begin_preparation(taskq.id_zero(), taskq.id_zero(), 1)",
    "end_preparation": "select * from taskq.end_preparation(taskq.id_zero(), taskq.id_zero(), 1, 'failed', '{}')",
    "hold_exhausted": "select taskq.hold_exhausted(taskq.id_zero())",
    "hold_for": "select taskq.hold_for(taskq.id_zero(), taskq.id_zero(), false)",
    "pause_for": "select taskq.pause_for(null, 'c', 'r', 'a')",
    "note_event": "select taskq.note_event(taskq.id_zero(), 'failed', 1, null, null)",
    "note_fault": "select taskq.note_fault(null::taskq.jobs, 'body', 'c', 'f', '{}', 1)",
    "launch": "select taskq.launch(null::taskq.incidents, 1)",
    "write_facts": "select taskq.write_facts(null::taskq.jobs, '{}')",
    "prune_incidents": "select taskq.prune_incidents()",
    "tree_is_free": "select taskq.tree_is_free(taskq.id_zero())",
    "show_recovery": "select taskq.show_recovery(taskq.id_zero())",
    "check_incidents": "select * from taskq.check_incidents()",
    "open_budget": "select taskq.open_budget(null::taskq.runs, 1)",
    "take_budget": "select taskq.take_budget(null::taskq.runs, 0)",
    "give_back_budget": "select taskq.give_back_budget(null::taskq.runs, 0)",
    "is_budget_spent": "select taskq.is_budget_spent(null::taskq.runs)",
    "lift_pauses": "select taskq.lift_pauses('{}')",
    "lock_waiting": "select taskq.lock_waiting('{}')",
    "retry_run": "select taskq.retry_run(taskq.id_zero())",
    "heal_run": "select taskq.heal_run(taskq.id_zero())",
    "heal_runs": "select * from taskq.heal_runs()",
    "carry_on_run": "select taskq.carry_on_run()",
    "prune_runs": "select taskq.prune_runs()",
    "compensate": "select taskq.compensate(null::taskq.runs)",
    "finish_run": "select taskq.finish_run(taskq.id_zero())",
    "stop_rest": "select taskq.stop_rest(taskq.id_zero(), '{}')",
    "settle_run": "select taskq.settle_run(taskq.id_zero(), false)",
    "advance": "select taskq.advance(null::taskq.runs, '{}', null, null, 0, false)",
    "make_ready": "select * from taskq.make_ready(null::taskq.runs, '{}')",
    "receipts": "select taskq.receipts(taskq.id_zero(), 0, '{}', '{}', '{}', '{}', '{}')",
    "receipt": "select taskq.receipt(taskq.id_zero(), 'ready')",
    "promise_these": "select taskq.promise_these(null::taskq.history, '[]')",
    "lock_run_of": "select taskq.lock_run_of(taskq.id_zero())",
    "lock_runs_of": "select taskq.lock_runs_of('{}')",
    "lock_trees": "select taskq.lock_trees('{}')",
    "begin_child": "select taskq.begin_child(null::taskq.runs, taskq.id_zero(), 'p', '{}', false, false)",
    "admit_map": "select taskq.admit_map(null::taskq.runs, taskq.id_zero(), 'p', '{}', '{}', false)",
    "write_items": "select taskq.write_items(taskq.id_zero(), 1)",
    "advance_map": "select taskq.advance_map(taskq.id_zero(), '{}', null, null, 0, false)",
    "reopen_map": "select taskq.reopen_map(null::taskq.runs, '{}')",
    "admit_loop": "select taskq.admit_loop(null::taskq.runs, taskq.id_zero(), 'p', '{}', '{}')",
    "advance_loop": "select taskq.advance_loop(taskq.id_zero(), '{}', null, null, 0, false)",
    "reopen_loop": "select taskq.reopen_loop(null::taskq.runs, '{}')",
    "admit_emit": "select taskq.admit_emit(null::taskq.runs, taskq.id_zero(), 'p', '{}', '{}')",
    "take_page": "select taskq.take_page(taskq.id_zero())",
    "ask_page": "select taskq.ask_page(taskq.id_zero(), 0)",
    "advance_emit": "select taskq.advance_emit(taskq.id_zero(), '{}', null, null, 0, false)",
    "reopen_emit": "select taskq.reopen_emit(null::taskq.runs)",
    "release_parent": "select taskq.release_parent(null::taskq.runs)",
    "stop_run": "select taskq.stop_run(taskq.id_zero(), '{}')",
    "admit_run": "select * from taskq.admit_run('p', '{}', null, null, null, null::taskq.runs, taskq.id_zero())",
    "reopen_run": "select taskq.reopen_run(taskq.id_zero(), null, null, null)",
    "may_reopen": "select taskq.may_reopen(null::taskq.runs)",
    "stop_children": "select * from taskq.stop_children()",
    "run_is_free": "select taskq.run_is_free(taskq.id_zero())",
    "check_runs": "select * from taskq.check_runs()",
    "record_steps": "select * from taskq.record_steps('{}', '{}', '{}', '{}', '{}', '{}', true)",
    "leave_steps": "select taskq.leave_steps(taskq.id_zero(), taskq.id_zero(), 1, '{}', '{}', '{}')",
    "prune_steps": "select taskq.prune_steps()",
    "begin_sleep": "select * from taskq.begin_sleep(taskq.id_zero(), taskq.id_zero(), 1, 's', 1, 1)",
    "begin_wait": "select * from taskq.begin_wait(taskq.id_zero(), taskq.id_zero(), 1, 's', 1, 1)",
    "take_signal": "select taskq.take_signal(taskq.id_zero(), taskq.id_zero(), 1, 's', 1, 1)",
    "send_signal": "select taskq.send_signal(taskq.id_zero(), 's')",
    "wake_waiting": "select taskq.wake_waiting()",
    "suspend": "select taskq.suspend(null::taskq.jobs, 1, '{}')",
    "end_sleeps": "select taskq.end_sleeps(null::taskq.jobs)",
    "bound_signals": "select taskq.bound_signals(taskq.id_zero(), 0, null)",
    "start_child": "select taskq.start_child(taskq.id_zero(), taskq.id_zero(), 1, 's', 1, '{}', '{}', '', '', '{}')",
    "tell_parent": "select taskq.tell_parent(taskq.id_zero(), taskq.id_zero(), null)",
    "cancel_children": "select taskq.cancel_children(taskq.id_zero(), 0)",
    "child_reopened": "select taskq.child_reopened(taskq.id_zero(), null, 'failed', null)",
    "waiting_parent": "select taskq.waiting_parent(null::taskq.jobs)",
    "sweep_children": "select taskq.sweep_children()",
    "waits_for_ended": "select taskq.waits_for_ended(taskq.id_zero(), 0, 1)",
    "check_pauses": "select * from taskq.check_pauses()",
    "check_work_budgets": "select * from taskq.check_work_budgets()",
    "check_children": "select * from taskq.check_children()",
    "check_signal": "select taskq.check_signal('s', 'null', null)",
    "signal_for_node": "select taskq.signal_for_node(taskq.id_zero(), 0, taskq.id_zero(), '{}')",
    "run_and_above": "select taskq.run_and_above(taskq.id_zero())",
    "give_signal": "select taskq.give_signal(1)",
    "return_signals": "select taskq.return_signals()",
    "send_run_signal": "select taskq.send_run_signal(taskq.id_zero(), 's')",
    "check_steps": "select * from taskq.check_steps()",
}
MAY = {
    "producer": {
        "enqueue_many",
        "enqueue",
        "ensure_policy",
        "ensure_limit",
        "cancel",
        "send_signal",
        "send_run_signal",
        "store_plan",
        "start_run",
        "cancel_run",
        "pause_run",
        "resume_run",
        "set_work_budget",
        "grant_recovery",
    },
    "worker": set(CALLS)
    - {
        "resolve",
        "resolve_attempt",
        "decide_unknown",
        "settle_step",
        "keep_effects",
        "retry",
        "reconcile",
        "enqueue_reconcile",
        "request_reconcile",
        "pause_queue",
        "resume_queue",
        "drain",
        "steer_many",
        "resume_ordering",
        "set_limit",
        "clear_limit",
        "give_turn",
        "come_due",
        "take_ordering_keys",
        "prune_orderings",
        "prune_steps",
        "suspend",
        "end_sleeps",
        "bound_signals",
        "give_signal",
        "tell_parent",
        "cancel_children",
        "child_reopened",
        "sweep_children",
        "return_signals",
        "note",
        "finish",
        "finish_many",
        "enter_unknown",
    }
    - {"settle_effect", "retry_effect", "prune_effects", "promise", "promise_these", "effect_job", "reopening"}
    - {
        "retry_run",
        "prune_runs",
        "compensate",
        "finish_run",
        "stop_rest",
        "settle_run",
        "advance",
        "make_ready",
        "receipt",
        "receipts",
    }
    - {"lock_run_of", "lock_runs_of", "run_is_free", "lock_trees"}
    - {"admit_map", "write_items", "advance_map", "reopen_map"}
    - {"lift_pauses", "lock_waiting"}
    - {"open_budget", "take_budget", "give_back_budget"}
    - {"note_event", "note_fault", "launch", "pause_for", "hold_for", "write_facts", "prune_incidents", "show_recovery"}
    - {"tree_is_free"}
    - {"admit_loop", "advance_loop", "reopen_loop"}
    - {"admit_emit", "take_page", "ask_page", "advance_emit", "reopen_emit"}
    - {"begin_child", "release_parent", "stop_run", "admit_run", "reopen_run", "may_reopen"},
    "operator": {
        "cancel",
        "send_signal",
        "send_run_signal",
        "retry",
        "resolve",
        "resolve_attempt",
        "reconcile",
        "pause_queue",
        "resume_queue",
        "drain",
        "steer_many",
        "settle_effect",
        "retry_effect",
        "resume_ordering",
        "set_limit",
        "clear_limit",
        "check_invariants",
        "cancel_run",
        "pause_run",
        "resume_run",
        "set_work_budget",
        "grant_recovery",
        "retry_run",
        "heal_run",
        "heal_runs",
        "carry_on_run",
        "stop_children",
    },
    "reader": {"check_invariants"},
}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_calls_its_functions_and_no_other(conn: Conn, role: str) -> None:
    policy(conn)
    enqueue(conn)
    become(conn, role)
    nobody = "'00000000-0000-0000-0000-000000000000'"
    allowed = {name for name, call in CALLS.items() if refused(conn, call.replace("taskq.id_zero()", nobody)) != DENIED}
    assert allowed == MAY[role]


def test_the_calls_above_are_all_that_write(conn: Conn) -> None:
    """A function that is new must be listed, and so decided on."""
    small = {
        "now",
        "new_id",
        "id_time",
        "ids_from",
        "are_ends_alone",
        "receipt_seal",
        "valid_name",
        "drain_worker",
        "stop_worker",
        "sleep",
        "unsleep",
        "resign",
        "survey",
        "wake",
        "moving",
        "effect_fingerprint",
        "effect_payload",
        "effect_specs",
        "effect_job_spec",
        "undone",
        "is_broken",
        "hook_of",
        "halts_ordering",
        "effect_depth",
        "id_after",
        "last_in_line",
        "number_or",
        "recovery_bound",
        "holds_exhausted",
        "fault_fingerprint",
        "facts_of",
        "prerequisite_kind",
        "live_status",
        "backoff",
        "may_follow",
        "next_in_line",
        "cohort_free",
        "waiting_cohorts",
        "wake_cohort",
        "check_limit",
        "as_owner",
        "node_as_owner",
        "promised_by_run",
        "decide_node",
        "ready_at_once",
        "evaluate",
        "expression_fault",
        "has_unhandled",
        "was_taken",
        "plan_hash",
        "nodes_of_plan",
        "edges_of_plan",
        "node_name",
        "place_in_plan",
        "emit_word",
        "page_fault",
        "room_for_items",
        "map_fault",
        "map_value",
        "map_outcomes",
        "check_items",
        "check_pause",
        "arm_taken",
        "held_in_round",
        "loop_done",
        "loop_exhausted",
        "loop_word",
    }
    triggers = {
        row["proname"]
        for row in rows(
            conn,
            "select proname from pg_proc where pronamespace = 'taskq'::regnamespace"
            " and prorettype = 'trigger'::regtype",
        )
    }
    found = {
        row["proname"] for row in rows(conn, "select proname from pg_proc where pronamespace = 'taskq'::regnamespace")
    }
    assert found - triggers - small == set(CALLS)


def test_a_role_of_its_own_for_everyone_else_sees_nothing(conn: Conn) -> None:
    conn.execute("create role somebody")
    conn.execute("set local role somebody")
    assert refused(conn, "select * from taskq.jobs") == DENIED
    assert refused(conn, "select taskq.cancel('00000000-0000-0000-0000-000000000000')") == DENIED


@pytest.mark.parametrize("role", ["worker", "operator", "reader"])
def test_who_reads_reads_everything(conn: Conn, role: str) -> None:
    names = tables(conn)
    views = [row["viewname"] for row in rows(conn, "select viewname from pg_views where schemaname = 'taskq'")]
    become(conn, role)
    for name in [*names, *views]:
        assert refused(conn, f"select * from taskq.{name}") == "", name


def test_a_producer_enqueues_with_keys_and_cancels_but_sees_no_worker(conn: Conn) -> None:
    policy(conn)
    become(conn, "producer")
    [row] = enqueue_many(conn, unique=["k"], idempotency=["i"])
    assert refused(conn, "select * from taskq.workers") == DENIED
    assert refused(conn, "select * from taskq.audit") == DENIED
    assert rows(conn, "select taskq.cancel(%s) as answer", row["job_id"]) == [{"answer": "cancelled"}]
    conn.execute("reset role")
    assert violations(conn) == []


def test_a_worker_lives_its_whole_life_by_functions(conn: Conn) -> None:
    policy(conn)
    become(conn, "worker")
    worker = register(conn, level=2)
    jobs = [enqueue(conn, unique_key=str(n), required_worker_schema=n % 3) for n in range(3)]
    assert {row["job_id"] for row in claim(conn, worker)} == set(jobs)
    for job, outcome in zip(jobs, ("succeeded", "failed", "release"), strict=True):
        assert end(conn, worker, End(job, 1, outcome)) == 1
    assert exchange(conn, worker, (), 1)[0]["job_id"] == jobs[2]
    conn.execute("select * from taskq.lead(%s, 'maintenance', 30)", (worker,))
    conn.execute("select taskq.stop_worker(%s)", (worker,))
    conn.execute("reset role")
    assert violations(conn) == []


def test_an_operator_steers_by_functions(conn: Conn) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "failed"))
    become(conn, "operator")
    conn.execute("select taskq.retry(%s)", (job,))
    conn.execute("select taskq.cancel(%s)", (job,))
    [noted] = rows(conn, "select distinct actor, db_user from taskq.audit")
    assert noted["db_user"] == "taskq"
    assert rows(conn, "select * from taskq.check_invariants('all')") == []


def test_every_security_definer_function_pins_its_search_path(conn: Conn) -> None:
    found = rows(
        conn,
        "select proname, proconfig, prosecdef from pg_proc where pronamespace = 'taskq'::regnamespace",
    )
    definers = [row for row in found if row["prosecdef"]]
    assert len(definers) > 20
    for row in definers:
        assert "search_path=pg_catalog, pg_temp" in (row["proconfig"] or []), row["proname"]


def test_a_hostile_search_path_changes_nothing(conn: Conn) -> None:
    """Functions, operators and tables of the caller's own are not used by what runs with the owner's rights."""
    policy(conn)
    conn.execute("create schema hostile")
    conn.execute(
        "create function hostile.clock_timestamp() returns timestamptz language sql"
        " as $$ select 'infinity'::timestamptz $$"
    )
    conn.execute(
        "create function hostile.make_interval(secs float8) returns interval language sql"
        " as $$ select null::interval $$"
    )
    conn.execute("create table hostile.jobs (like taskq.jobs)")
    conn.execute("set local search_path = hostile, pg_catalog")
    worker, job = running(conn, payload={"n": 1})
    assert end(conn, worker, End(job, 1, "retry", error={"n": 1})) == 1
    conn.execute("select taskq.cancel(%s)", (job,))
    conn.execute("set local search_path = pg_catalog")
    assert violations(conn) == []
    [row] = rows(conn, "select status, error from taskq.history where id = %s", job)
    assert (row["status"], row["error"]["type"]) == ("cancelled", "Cancelled")

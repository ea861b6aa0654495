"""Runs: what the edges decide and in which order, what makes a run fail, what is undone, and what is refused."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import effect, effects, promising
from runs_kit import do, edge, finish, info, job_of, kinds, node, result_of, start, store, take, tree, worker_for
from sql import End, cancel, claim_one, end, get, lose, one, resolve, retry, rows, settle, violations

Conn = psycopg.Connection[Any]


def retry_run(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.retry_run(%s, 'fixed', 'me')", run))


# What the edges decide ------------------------------------------------------------------------------------------------


def ended_in(conn: Conn, order: str, outcomes: dict[str, tuple[str, object]], edges: list[Any]) -> dict[str, str]:
    """Sources a and b end in this order; what becomes of c, and how the whole stands."""
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b"), node("c")], edges, on_failure="finish"))
    claimed = take(conn, worker, "a", "b")
    for task in order:
        outcome, result = outcomes[task]
        finish(conn, worker, claimed[task], outcome, result)
    assert violations(conn) == []
    return tree(conn, run)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_an_arm_that_is_not_taken_comes_before_a_failure_whichever_ends_first(conn: Conn, order: str) -> None:
    edges = [edge(0, 2, when={"path": [], "equals": 1}), edge(1, 2)]
    assert ended_in(conn, order, {"a": ("succeeded", 2), "b": ("failed", None)}, edges)["c"] == "skipped"


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_an_arm_that_is_taken_leaves_a_failure_to_block(conn: Conn, order: str) -> None:
    edges = [edge(0, 2, when={"path": [], "equals": 1}), edge(1, 2)]
    assert ended_in(conn, order, {"a": ("succeeded", 1), "b": ("failed", None)}, edges)["c"] == "blocked"


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_failure_that_blocks_comes_before_one_that_skips_whichever_ends_first(conn: Conn, order: str) -> None:
    edges = [edge(0, 2, "skip"), edge(1, 2)]
    assert ended_in(conn, order, {"a": ("failed", None), "b": ("failed", None)}, edges)["c"] == "blocked"


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_failure_that_skips_waits_for_what_may_block(conn: Conn, order: str) -> None:
    edges = [edge(0, 2, "skip"), edge(1, 2)]
    assert ended_in(conn, order, {"a": ("failed", None), "b": ("succeeded", 1)}, edges)["c"] == "skipped"


def test_a_failure_blocks_at_once_while_others_run(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("c"), node("d")]
    run = start(conn, store(conn, nodes, [edge(0, 2), edge(1, 2), edge(2, 3)], on_failure="finish"))
    do(conn, worker, "b", "failed")
    assert tree(conn, run) == {"a": "pending", "b": "failed", "c": "blocked", "d": "blocked"}
    found = rows(conn, "select distinct blocked_by from taskq.blocked_nodes where run_id = %s", run)
    assert found == [{"blocked_by": "b"}]
    do(conn, worker, "a")
    assert tree(conn, run)["c"] == "blocked"
    assert violations(conn) == []


def test_the_first_of_several_that_failed_is_named(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("c"), node("d")]
    edges = [edge(0, 3, when={"path": [], "equals": 1}), edge(1, 3), edge(2, 3)]
    run = start(conn, store(conn, nodes, edges, on_failure="finish"))
    for task in "cb":
        do(conn, worker, task, "failed")
    do(conn, worker, "a", result=1)
    assert one(conn, "select blocked_by from taskq.run_tree where run_id = %s and name = 'd'", run) == "b"


def test_a_collector_runs_although_a_source_was_skipped(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("sum", {"all": {"outcome": 1}})]
    run = start(conn, store(conn, nodes, [edge(0, 1, "skip"), edge(1, 2, "collect")]))
    do(conn, worker, "a", "failed")
    assert tree(conn, run) == {"a": "failed", "b": "skipped", "sum": "pending"}
    payload = get(conn, job_of(conn, run, "sum"))["payload"]["all"]
    assert (payload["node"], payload["status"], payload["error"]["type"]) == ("b", "skipped", "Skipped")
    do(conn, worker, "sum")
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_collector_is_told_which_node_blocked_its_source(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("sum", {"all": {"outcome": 1}})]
    run = start(conn, store(conn, nodes, [edge(0, 1), edge(1, 2, "collect")], on_failure="finish"))
    do(conn, worker, "a", "failed")
    error = get(conn, job_of(conn, run, "sum"))["payload"]["all"]["error"]
    assert (error["type"], error["node"]) == ("Blocked", "a")


# What makes a run fail ------------------------------------------------------------------------------------------------


def test_a_failure_that_only_blocks_is_not_dealt_with_by_who_collects_the_blocked_one(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("c")]
    run = start(conn, store(conn, nodes, [edge(0, 1), edge(1, 2, "collect")], on_failure="finish"))
    do(conn, worker, "a", "failed")
    do(conn, worker, "c")
    assert tree(conn, run) == {"a": "failed", "b": "blocked", "c": "succeeded"}
    assert info(conn, run)["status"] == "failed"


def test_a_blocked_node_that_nobody_deals_with_fails_its_run(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("c")]
    run = start(conn, store(conn, nodes, [edge(0, 1), edge(0, 2, "collect")], on_failure="finish"))
    do(conn, worker, "a", "failed")
    do(conn, worker, "c")
    assert info(conn, run)["status"] == "failed"


def test_a_cancelled_node_that_nobody_deals_with_fails_its_run(conn: Conn) -> None:
    run = start(conn, store(conn, [node("a")]))
    assert cancel(conn, job_of(conn, run, "a")) == "cancelled"
    ended = info(conn, run)
    assert (ended["status"], ended["error"]["node"]) == ("failed", "a")


# The guard, and whose end counts --------------------------------------------------------------------------------------


def test_the_job_of_a_node_that_is_not_ready_is_not_made_while_its_run_goes_on(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")], on_failure="finish"))
    do(conn, worker, "a", "failed")
    assert info(conn, run)["status"] == "running"
    with pytest.raises(psycopg.Error, match="not ready for it") as caught, conn.transaction():
        retry(conn, job_of(conn, run, "a"))
    assert caught.value.sqlstate == "WF023"
    assert tree(conn, run) == {"a": "failed", "b": "pending"}


@pytest.mark.parametrize(
    "behind",
    [
        "update taskq.runs set run_epoch = 2",
        "update taskq.runs set status = 'failed', finished_at = now()",
        "update taskq.nodes set status = 'cancelled', finished_at = now() where ix = 0",
    ],
)
def test_an_end_that_is_none_of_the_runs_changes_nothing_in_it(conn: Conn, behind: str) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)]))
    a = take(conn, worker, "a")["a"]
    conn.execute(behind)
    before = rows(conn, "select * from taskq.nodes order by ix"), info(conn, run), kinds(conn, run)
    assert end(conn, worker, End(a["job_id"], 1, "succeeded")) == 1
    assert (rows(conn, "select * from taskq.nodes order by ix"), info(conn, run), kinds(conn, run)) == before


def test_cancelling_a_job_that_has_no_run_epoch_ends_its_node(conn: Conn) -> None:
    run = start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)]))
    conn.execute("update taskq.jobs set run_epoch = null")
    assert cancel(conn, job_of(conn, run, "a")) == "cancelled"
    assert tree(conn, run) == {"a": "cancelled", "b": "blocked"}
    assert info(conn, run)["status"] == "failed"
    assert violations(conn) == []


def test_what_became_of_an_attempt_is_on_the_record_of_its_run(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a", max_attempts=3), node("pay", effect_class="side_effecting")]
    run = start(conn, store(conn, nodes))
    take(conn, worker, "a")
    lose(conn, worker)
    assert settle(conn) == {job_of(conn, run, "a"): "pending"}
    assert kinds(conn, run)[-1] == "lost"
    other = worker_for(conn)
    pay = take(conn, other, "pay")["pay"]
    rows(conn, "select * from taskq.start_effects(%s, %s::uuid[], '{1}')", other, [pay["job_id"]])
    lose(conn, other)
    settle(conn)
    assert kinds(conn, run)[-1] == "unknown"
    assert resolve(conn, pay["job_id"], happened=False) == "pending"
    assert kinds(conn, run)[-1] == "resolved"
    found = rows(conn, "select node, claim_epoch from taskq.receipts where run_id = %s order by sequence desc", run)
    assert found[0] == {"node": 1, "claim_epoch": 1}
    assert violations(conn) == []


# Effects of runs, and what is undone ----------------------------------------------------------------------------------


def undone(conn: Conn, run: UUID) -> list[str]:
    """The compensations of a run, in the order in which they were promised."""
    found = rows(
        conn,
        "select i.owner_task, i.name from taskq.effect_intents i join taskq.nodes n on n.id = i.owner_job_id"
        " where n.run_id = %s order by i.id",
        run,
    )
    return [f"{row['owner_task']} {row['name']}" for row in found]


def paying(conn: Conn, **more: Any) -> str:
    """a and b, which can be undone, one after the other, then c."""
    nodes = [node(name, compensate=effect("undo", task=f"undo-{name}", queue="undo")) for name in "ab"]
    edges = [edge(0, 1), edge(1, 2)]
    return store(conn, [*nodes, node("c")], edges, effects=[effect("told", ["failed"], queue="told")], **more)


def failed_after(conn: Conn, plan: str) -> UUID:
    worker = worker_for(conn)
    run = start(conn, plan)
    do(conn, worker, "a", result=1)
    do(conn, worker, "b", result=2)
    do(conn, worker, "c", "failed")
    assert info(conn, run)["status"] == "failed"
    return run


def test_only_what_succeeded_is_undone(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, paying(conn))
    do(conn, worker, "a")
    do(conn, worker, "b", "failed")
    assert undone(conn, run) == ["a compensate:0:undo"]
    assert [row["name"] for row in effects(conn, run)] == ["told"]
    never = start(conn, paying(conn))
    do(conn, worker, "a", "failed")
    assert tree(conn, never) == {"a": "failed", "b": "blocked", "c": "blocked"}
    assert undone(conn, never) == []
    assert violations(conn) == []


def test_a_cancelled_run_is_undone(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, paying(conn))
    do(conn, worker, "a")
    assert one(conn, "select taskq.cancel_run(%s)", run) == "cancelled"
    assert undone(conn, run) == ["a compensate:0:undo"]
    assert violations(conn) == []


def cancel_effects(conn: Conn, run: UUID) -> None:
    """Cancel what a run's end has promised; from the end of the line, so that none has its turn meanwhile."""
    promised = rows(
        conn,
        "select i.job_id from taskq.effect_intents i left join taskq.nodes n on n.id = i.owner_job_id"
        " where coalesce(n.run_id, i.owner_job_id) = %s order by i.id desc",
        run,
    )
    for row in promised:
        cancel(conn, row["job_id"])


def test_each_end_of_a_run_promises_anew_once_the_last_promises_are_settled(conn: Conn) -> None:
    run = failed_after(conn, paying(conn))
    cancel_effects(conn, run)
    assert retry_run(conn, run) == "reopened"
    do(conn, worker_for(conn), "c", "failed")
    assert undone(conn, run)[2:] == ["b compensate:1:undo", "a compensate:1:undo"]
    assert [row["generation"] for row in effects(conn, run)] == [0, 1]
    assert violations(conn) == []


def test_a_run_is_not_reopened_before_its_effects_and_compensations_are_settled(conn: Conn) -> None:
    run = failed_after(conn, paying(conn))
    promised = rows(conn, "select job_id, name from taskq.effects order by id")
    assert [row["name"] for row in promised] == ["told", "compensate:0:undo", "compensate:0:undo"]
    for row in reversed(promised):
        with pytest.raises(psycopg.Error, match=row["name"]) as caught, conn.transaction():
            retry_run(conn, run)
        assert caught.value.sqlstate == "WF026"
        assert info(conn, run)["generation"] == 0
        cancel(conn, row["job_id"])
    assert retry_run(conn, run) == "reopened"


def test_a_run_whose_work_was_undone_is_not_reopened(conn: Conn) -> None:
    run = failed_after(conn, paying(conn))
    undoer = worker_for(conn, queues=["undo"])
    claimed = claim_one(conn, undoer, tasks=["undo-b"], lanes=[("undo", 5)])
    end(conn, undoer, End(claimed["job_id"], 1, "succeeded"))
    cancel_effects(conn, run)
    with pytest.raises(psycopg.Error, match="undone its work") as caught, conn.transaction():
        retry_run(conn, run)
    assert caught.value.sqlstate == "WF026"


def test_a_run_is_not_reopened_before_the_effects_of_its_failed_nodes_are_settled(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a", **promising(conn, effect("alarm", ["failed"], queue="alarm")))]))
    do(conn, worker, "a", "failed")
    [alarm] = effects(conn, job_of(conn, run, "a"))
    with pytest.raises(psycopg.Error, match="alarm") as caught, conn.transaction():
        retry_run(conn, run)
    assert caught.value.sqlstate == "WF026"
    cancel(conn, alarm["job_id"])
    assert retry_run(conn, run) == "reopened"
    assert tree(conn, run) == {"a": "pending"}
    assert violations(conn) == []


def test_what_a_run_that_goes_on_had_promised_is_not_reopened(conn: Conn) -> None:
    run = failed_after(conn, paying(conn))
    cancel_effects(conn, run)
    retry_run(conn, run)
    for promised in rows(conn, "select job_id, name from taskq.effects"):
        with pytest.raises(psycopg.Error, match="reopened since") as caught, conn.transaction():
            retry(conn, promised["job_id"])
        assert caught.value.sqlstate == "WF012", promised


def test_a_failure_that_was_dealt_with_is_not_run_again(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("sum", {"all": {"outcome": 0}}), node("b")]
    run = start(conn, store(conn, nodes, [edge(0, 1, "collect"), edge(1, 2)]))
    do(conn, worker, "a", "failed")
    do(conn, worker, "sum")
    do(conn, worker, "b", "failed")
    assert retry_run(conn, run) == "reopened"
    assert tree(conn, run) == {"a": "failed", "sum": "succeeded", "b": "pending"}
    do(conn, worker, "b")
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


# Forgetting and healing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", ["the compensations", "its effect"])
def test_a_run_is_forgotten_once_it_is_old_and_all_that_it_promised_is_settled(conn: Conn, last: str) -> None:
    run = failed_after(conn, paying(conn))
    keeps = failed_after(conn, paying(conn))
    cancel_effects(conn, keeps)
    live = start(conn, paying(conn))
    conn.execute("update taskq.runs set finished_at = finished_at - interval '500 days' where id <> %s", (keeps,))
    promised = rows(
        conn,
        "select i.job_id from taskq.effect_intents i left join taskq.nodes n on n.id = i.owner_job_id"
        " where coalesce(n.run_id, i.owner_job_id) = %s order by i.id desc",
        run,
    )
    for row in promised if last == "its effect" else reversed(promised):
        assert one(conn, "select taskq.prune_runs()") == 0
        cancel(conn, row["job_id"])
    assert one(conn, "select taskq.prune_runs()") == 1
    for table in ("nodes", "receipts"):
        assert one(conn, f"select count(*) from taskq.{table} where run_id = %s", run) == 0
    assert {row["id"] for row in rows(conn, "select id from taskq.runs")} == {keeps, live}


def test_what_a_run_promised_is_remembered_as_long_as_the_run(conn: Conn) -> None:
    run = failed_after(conn, paying(conn))
    cancel_effects(conn, run)
    settled = (
        "created_at = created_at - interval '500 days', settled_at = now(), settled_by = 'me', settled_reason = 'x'"
    )
    conn.execute(f"update taskq.effect_intents set {settled}")
    conn.execute("set local session_replication_role = replica")
    conn.execute("delete from taskq.history")
    assert one(conn, "select taskq.prune_effects()") == 0
    conn.execute("delete from taskq.runs")
    assert one(conn, "select taskq.prune_effects()") == 1, "that of the run"
    conn.execute("delete from taskq.nodes")
    assert one(conn, "select taskq.prune_effects()") == 2, "those of its nodes"


def test_a_run_that_counts_wrong_is_counted_anew(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")]))
    conn.execute("update taskq.runs set open_nodes = 7")
    assert one(conn, "select taskq.heal_run(%s)", run) == "healed"
    assert info(conn, run)["open_nodes"] == 2
    for task in "ab":
        do(conn, worker, task)
    conn.execute("update taskq.runs set status = 'running', finished_at = null, open_nodes = 1")
    assert one(conn, "select taskq.heal_run(%s)", run) == "healed"
    assert info(conn, run)["status"] == "succeeded"
    assert one(conn, "select taskq.heal_run(%s)", run) == "left alone"
    assert violations(conn) == []


def test_a_path_that_leads_nowhere_gives_null(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")], result=result_of(0, "missing")))
    do(conn, worker, "a", result={"n": 1})
    assert (info(conn, run)["status"], info(conn, run)["result"]) == ("succeeded", None)

"""Child runs in the database: started, ended, cancelled, retried and forgotten with the node that they stand for."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from children_kit import cancel_run, child_of, fail_child, family, plans, retry_run
from effects_kit import effect
from runs_kit import do, edge, finish, info, job_of, kinds, node, plan_text, start, store, take, tree, worker_for
from sql import Conn, cancel, get, lose, one, policy, refused, resolve, retry, rows, settle, violations


@pytest.fixture(autouse=True)
def lawful(conn: Conn) -> Any:
    yield
    assert violations(conn) == []


# From its start to its end --------------------------------------------------------------------------------------------


def test_a_child_starts_with_its_node_and_its_end_goes_through_the_job_that_waits(conn: Conn) -> None:
    worker = worker_for(conn)
    parent = start(conn, plans(conn), {}, "key")
    conn.execute("update taskq.runs set meta = '{\"who\": 1}', effect_depth = 3")
    assert tree(conn, parent) == {"a": "pending", "kid": "waiting", "b": "waiting"}
    assert one(conn, "select count(*) from taskq.runs") == 1
    do(conn, worker, "a", result={"deep": 1})
    child = child_of(conn, parent)
    row = info(conn, child)
    assert (row["workflow"], row["input"], row["meta"], row["run_key"]) == (
        "inner",
        {"n": {"deep": 1}},
        {"who": 1},
        None,
    )
    assert (row["parent_node"], row["depth"], row["effect_depth"]) == (job_of(conn, parent, "kid"), 1, 3)
    [seen] = rows(conn, "select * from taskq.run_tree where run_id = %s and name = 'kid'", parent)
    assert (seen["status"], seen["held_reason"], seen["child_run"], seen["child_status"]) == (
        "held",
        "run",
        child,
        "running",
    )
    assert get(conn, seen["job_id"])["payload"] == {"n": {"deep": 1}}
    assert take(conn, worker, "inner:await") == {}
    do(conn, worker, "x", result=2)
    do(conn, worker, "y", result=3)
    assert (info(conn, child)["status"], info(conn, child)["result"]) == ("succeeded", 3)
    assert tree(conn, parent) == {"a": "succeeded", "kid": "pending", "b": "waiting"}
    do(conn, worker, "inner:await", result=3)
    do(conn, worker, "b")
    assert info(conn, parent)["status"] == "succeeded"
    assert one(conn, "select payload from taskq.all_jobs where task = 'b'") == {"got": 3}
    assert kinds(conn, child) == ["admitted", "ready", "ended", "ready", "ended", "finished"]


@pytest.mark.parametrize("policy_of_edge", ["fail", "collect", "skip"])
def test_a_child_that_fails_is_a_node_that_has_failed(conn: Conn, policy_of_edge: str) -> None:
    made = family(conn, edge=policy_of_edge)
    child = fail_child(conn, made)
    assert info(conn, child)["status"] == "failed"
    assert tree(conn, made.parent)["kid"] == "failed"
    assert tree(conn, made.parent)["b"] == {"fail": "blocked", "collect": "pending", "skip": "skipped"}[policy_of_edge]


def test_a_child_that_ends_as_it_starts_leaves_a_job_that_may_be_claimed(conn: Conn) -> None:
    big = {"case": {"on": {"value": 1}, "arms": []}}
    worker = worker_for(conn)
    inner = store(conn, [node("x", {"n": big})], workflow="inner", result={"value": 5})
    parent = start(conn, store(conn, [node("kid", task="inner:await", child=inner)], workflow="outer"))
    assert info(conn, child_of(conn, parent))["status"] == "succeeded"  # its only node has no value, and is skipped
    assert tree(conn, parent) == {"kid": "pending"}
    do(conn, worker, "inner:await", result=5)
    assert info(conn, parent)["status"] == "succeeded"


def test_children_have_children_to_the_limit(conn: Conn) -> None:
    worker = worker_for(conn)
    plan = store(conn, [node("leaf")], workflow="w0")
    for level in range(1, 9):
        plan = store(conn, [node("kid", task=f"w{level}:await", child=plan)], workflow=f"w{level}")
    with pytest.raises(psycopg.Error, match="it has 9 levels") as caught, conn.transaction():
        store(conn, [node("kid", task="w9:await", child=plan)], workflow="w9")
    assert caught.value.sqlstate == "WF024"
    top = start(conn, plan)
    assert one(conn, "select array_agg(depth order by depth) from taskq.runs") == list(range(9))
    do(conn, worker, "leaf")
    for level in range(1, 9):
        do(conn, worker, f"w{level}:await")
    assert info(conn, top)["status"] == "succeeded"
    assert one(conn, "select count(*) from taskq.runs where status = 'succeeded'") == 9


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"child": "p" + "0" * 64}, "which is not stored"),
        ({"child": 7}, "which is not stored"),
        ({"effect_class": "idempotent"}, "its job is not one that waits for it"),
        ({"deadline_in": 5}, "its job is not one that waits for it"),
    ],
)
def test_a_plan_with_a_child_that_cannot_be_is_refused(conn: Conn, change: dict[str, Any], said: str) -> None:
    inner = store(conn, [node("x")], workflow="inner")
    policy(conn)
    text = plan_text([node("kid", task="inner:await", **{"child": inner, **change})], workflow="outer")
    with pytest.raises(psycopg.Error, match=said) as caught, conn.transaction():
        one(conn, "select taskq.store_plan(%s)", text)
    assert caught.value.sqlstate == "WF024"


def test_a_plan_and_its_children_have_a_most_of_nodes_together(conn: Conn) -> None:
    inner = store(conn, [node(f"n{n}") for n in range(1000)], workflow="inner")
    kids = [node(f"k{n}", task="inner:await", child=inner) for n in range(100)]
    with (
        pytest.raises(psycopg.Error, match="and 100100 nodes at a time, the limits are 8 and 100000"),
        conn.transaction(),
    ):
        store(conn, kids, workflow="outer")
    assert store(conn, kids[1:], workflow="outer")


def test_a_child_that_cannot_be_admitted_fails_its_node(conn: Conn) -> None:
    made = worker_for(conn)
    parent = start(conn, plans(conn))
    conn.execute("alter table taskq.runs add constraint no_child check (parent_run is null)")
    do(conn, made, "a")
    assert tree(conn, parent) == {"a": "succeeded", "kid": "failed", "b": "blocked"}
    assert one(conn, "select error ->> 'type' from taskq.nodes where status = 'failed'") == "NodeNotReady"
    conn.execute("alter table taskq.runs drop constraint no_child")


def test_a_child_is_compensated_like_any_node(conn: Conn) -> None:
    undo = effect("undo", task="undo", payload={"n": {"arg": "n"}, "came": {"of": "result"}})
    made = family(conn, compensate=undo)
    for task in ("x", "y", "inner:await"):
        do(conn, made.worker, task, result=3)
    do(conn, made.worker, "b", "failed")
    [undoing] = rows(conn, "select payload from taskq.jobs where task = 'undo'")
    assert undoing["payload"] == {"n": {"deep": 1}, "came": 3}


# Cancelling -----------------------------------------------------------------------------------------------------------


def test_a_cancelled_parent_takes_its_waiting_child_with_it(conn: Conn) -> None:
    made = family(conn)
    child = child_of(conn, made.parent)
    assert cancel_run(conn, made.parent) == "cancelled"
    assert [info(conn, run)["status"] for run in (made.parent, child)] == ["cancelled", "cancelled"]
    assert tree(conn, made.parent) == {"a": "succeeded", "kid": "cancelled", "b": "cancelled"}
    assert tree(conn, child) == {"x": "cancelled", "y": "cancelled"}
    assert one(conn, "select count(*) from taskq.jobs") == 0


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_a_cancelled_parent_waits_for_what_its_child_runs(conn: Conn, outcome: str) -> None:
    made = family(conn, inner={"on_failure": "finish"})
    child = child_of(conn, made.parent)
    do(conn, made.worker, "x")
    y = take(conn, made.worker, "y")["y"]
    assert cancel_run(conn, made.parent) == "requested"
    assert info(conn, child)["cancel_requested_at"] is not None
    assert tree(conn, made.parent) == {"a": "succeeded", "kid": "held", "b": "cancelled"}
    finish(conn, made.worker, y, outcome)
    waits = get(conn, made.job)
    if outcome == "succeeded":  # and so is the child, and the node with it, though it was to be cancelled
        assert (info(conn, child)["status"], waits["cancel_requested_at"]) == ("succeeded", None)
        do(conn, made.worker, "inner:await")
        assert tree(conn, made.parent)["kid"] == "succeeded"
    else:
        assert info(conn, child)["status"] == "cancelled"
        assert waits["cancel_requested_at"] is not None
        do(conn, made.worker, "inner:await", "failed")
        assert tree(conn, made.parent)["kid"] == "cancelled"
    assert info(conn, made.parent)["status"] == "cancelled"


def test_a_child_that_has_succeeded_is_not_cancelled_over(conn: Conn) -> None:
    made = family(conn, compensate=effect("undo", task="undo"))
    do(conn, made.worker, "x")
    do(conn, made.worker, "y")
    assert cancel(conn, made.job) == "requested"
    assert cancel_run(conn, made.parent) == "requested"
    assert cancel(conn, made.job) == "requested"
    assert get(conn, made.job)["cancel_requested_at"] is None
    do(conn, made.worker, "inner:await")
    assert (info(conn, made.parent)["status"], tree(conn, made.parent)["kid"]) == ("cancelled", "succeeded")
    assert one(conn, "select count(*) from taskq.jobs where task = 'undo'") == 1


def test_a_failure_that_stops_the_parent_stops_its_children(conn: Conn) -> None:
    made = family(conn, nodes=[node("beside")])
    child = child_of(conn, made.parent)
    do(conn, made.worker, "beside", "failed")
    assert [info(conn, run)["status"] for run in (made.parent, child)] == ["failed", "cancelled"]
    assert tree(conn, made.parent) == {"a": "succeeded", "kid": "cancelled", "b": "cancelled", "beside": "failed"}


def test_a_child_cancelled_by_itself_is_a_node_that_has_failed(conn: Conn) -> None:
    made = family(conn, edge="collect")
    child = child_of(conn, made.parent)
    assert cancel_run(conn, child) == "cancelled"
    assert tree(conn, made.parent)["kid"] == "pending"
    do(conn, made.worker, "inner:await", "failed")
    assert tree(conn, made.parent) == {"a": "succeeded", "kid": "failed", "b": "pending"}


@pytest.mark.parametrize("batch", [False, True])
def test_cancelling_the_job_that_waits_cancels_the_child(conn: Conn, batch: bool) -> None:
    made = family(conn, edge="collect")
    child = child_of(conn, made.parent)
    if batch:
        [row] = rows(conn, "select answer from taskq.steer_many('cancel', %s::uuid[])", [made.job])
        assert row["answer"] == "cancelled"
    else:
        assert cancel(conn, made.job) == "cancelled"
    assert info(conn, child)["status"] == "cancelled"
    assert tree(conn, made.parent) == {"a": "succeeded", "kid": "cancelled", "b": "pending"}
    assert info(conn, made.parent)["status"] == "running"


def test_a_child_that_succeeds_after_the_job_that_waits_was_cancelled_has_succeeded(conn: Conn) -> None:
    made = family(conn, edge="collect")
    do(conn, made.worker, "x")
    y = take(conn, made.worker, "y")["y"]
    assert cancel(conn, made.job) == "requested"
    assert get(conn, made.job)["cancel_requested_at"] is not None
    finish(conn, made.worker, y)
    assert get(conn, made.job)["cancel_requested_at"] is None
    do(conn, made.worker, "inner:await")
    assert tree(conn, made.parent)["kid"] == "succeeded"


def test_cancelling_the_job_that_waits_lets_what_runs_decide(conn: Conn) -> None:
    made = family(conn, edge="collect")
    child = child_of(conn, made.parent)
    x = take(conn, made.worker, "x")["x"]
    assert cancel(conn, made.job) == "requested"
    assert info(conn, child)["cancel_requested_at"] is not None
    finish(conn, made.worker, x, "failed")
    assert get(conn, made.job)["cancel_requested_at"] is not None
    do(conn, made.worker, "inner:await", "failed")
    assert tree(conn, made.parent) == {"a": "succeeded", "kid": "cancelled", "b": "pending"}


def test_an_unknown_outcome_in_a_child_keeps_all_above_it_open(conn: Conn) -> None:
    made = family(conn)
    child = child_of(conn, made.parent)
    take(conn, made.worker, "x")
    x = job_of(conn, child, "x")
    assert cancel_run(conn, made.parent) == "requested"
    lose(conn, made.worker)
    assert settle(conn) == {x: "unknown"}
    assert [info(conn, run)["status"] for run in (made.parent, child)] == ["running", "recovering"]
    assert resolve(conn, x, happened=False) == "cancelled"
    do(conn, worker_for(conn), "inner:await", "failed")
    assert [info(conn, run)["status"] for run in (made.parent, child)] == ["cancelled", "cancelled"]


# Retrying -------------------------------------------------------------------------------------------------------------


def test_a_retried_parent_reopens_its_child(conn: Conn) -> None:
    made = family(conn)
    child = fail_child(conn, made)
    assert info(conn, made.parent)["status"] == "failed"
    assert retry_run(conn, made.parent) == "reopened"
    assert child_of(conn, made.parent) == child
    assert [info(conn, run)["generation"] for run in (made.parent, child)] == [1, 1]
    assert tree(conn, made.parent) == {"a": "succeeded", "kid": "held", "b": "waiting"}
    assert tree(conn, child) == {"x": "pending", "y": "waiting"}
    for task in ("x", "y", "inner:await", "b"):
        do(conn, made.worker, task)
    assert [info(conn, run)["status"] for run in (made.parent, child)] == ["succeeded", "succeeded"]
    assert get(conn, made.job)["claim_epoch"] == 2


def test_what_a_child_has_done_is_not_done_again(conn: Conn) -> None:
    made = family(conn)
    child = child_of(conn, made.parent)
    do(conn, made.worker, "x", result=1)
    do(conn, made.worker, "y", "failed")
    do(conn, made.worker, "inner:await", "failed")
    retry_run(conn, made.parent)
    assert tree(conn, child) == {"x": "succeeded", "y": "pending"}


def test_a_reopened_child_takes_what_its_sources_give_now(conn: Conn) -> None:
    inner = store(conn, [node("x", {"n": {"input": "n", "path": []}})], workflow="inner", parameters=["n"])
    kid = node("kid", {"n": {"outcome": 0, "path": ["status"]}}, task="inner:await", child=inner)
    worker = worker_for(conn)
    parent = start(conn, store(conn, [node("a"), kid], [edge(0, 1, "collect")], workflow="outer"))
    do(conn, worker, "a", "failed")
    child = child_of(conn, parent)
    do(conn, worker, "x", "failed")
    do(conn, worker, "inner:await", "failed")
    assert retry_run(conn, parent) == "reopened"
    assert tree(conn, parent) == {"a": "pending", "kid": "waiting"}
    do(conn, worker, "a")
    assert (info(conn, child)["input"], info(conn, child)["status"]) == ({"n": "succeeded"}, "running")
    assert one(conn, "select payload from taskq.jobs where task = 'x'") == {"n": "succeeded"}


def test_a_child_that_has_succeeded_is_kept_by_a_retry(conn: Conn) -> None:
    made = family(conn)
    child = child_of(conn, made.parent)
    do(conn, made.worker, "x")
    do(conn, made.worker, "y")
    do(conn, made.worker, "inner:await", "failed")  # whatever was wrong
    assert retry_run(conn, made.parent) == "reopened"
    assert (tree(conn, made.parent)["kid"], info(conn, child)["generation"]) == ("pending", 0)


def test_a_child_is_not_retried_without_its_parent(conn: Conn) -> None:
    made = family(conn, edge="collect")
    child = fail_child(conn, made)
    with (
        pytest.raises(psycopg.Error, match=f"run {child} is a part of run {made.parent}") as caught,
        conn.transaction(),
    ):
        retry_run(conn, child)
    assert caught.value.sqlstate == "WF026"
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        retry(conn, made.job)
    assert caught.value.sqlstate == "WF023"


def test_a_parent_whose_child_has_undone_its_work_is_not_retried(conn: Conn) -> None:
    inner = store(conn, [node("x", compensate=effect("undo", task="undo")), node("y")], [edge(0, 1)], workflow="inner")
    worker = worker_for(conn)
    nodes = [node("kid", task="inner:await", child=inner), node("other")]
    parent = start(conn, store(conn, nodes, workflow="outer", on_failure="finish"))
    do(conn, worker, "x")
    do(conn, worker, "y", "failed")
    do(conn, worker, "inner:await", "failed")
    do(conn, worker, "other", "failed")
    before = info(conn, parent)
    for undone in (False, True):
        with (
            pytest.raises(psycopg.Error, match="effects that are not settled, or compensations") as caught,
            conn.transaction(),
        ):
            retry_run(conn, parent)
        assert caught.value.sqlstate == "WF026"
        assert info(conn, parent) == before
        if not undone:
            do(conn, worker, "undo")


# Healing and forgetting -----------------------------------------------------------------------------------------------


def behind(conn: Conn, query: str, *args: object) -> None:
    """Write past the triggers."""
    conn.execute("set local session_replication_role = replica")
    conn.execute(query, args)
    conn.execute("set local session_replication_role = origin")


def healed(conn: Conn) -> list[tuple[UUID, str]]:
    return [(row["run_id"], row["answer"]) for row in rows(conn, "select * from taskq.heal_runs()")]


def test_a_parent_that_has_missed_the_end_of_its_child_is_healed(conn: Conn) -> None:
    made = family(conn)
    do(conn, made.worker, "x")
    do(conn, made.worker, "y")
    behind(conn, "update taskq.jobs set status = 'held', held_reason = 'run' where id = %s", made.job)
    assert [code for code, _ in violations(conn)] == ["child_run_missing"]
    assert healed(conn) == [(made.parent, "healed")]
    assert tree(conn, made.parent)["kid"] == "pending"
    assert healed(conn) == []


def test_a_node_without_its_child_is_healed(conn: Conn) -> None:
    made = family(conn)
    child = child_of(conn, made.parent)
    for table in ("jobs", "nodes", "receipts"):
        behind(conn, f"delete from taskq.{table} where run_id = %s", child)
    behind(conn, "delete from taskq.runs where id = %s", child)
    assert healed(conn) == [(made.parent, "healed")]
    assert tree(conn, child_of(conn, made.parent)) == {"x": "pending", "y": "waiting"}
    assert info(conn, child_of(conn, made.parent))["input"] == {"n": {"deep": 1}}


@pytest.mark.parametrize("ended", [False, True])
def test_a_node_whose_job_is_gone_gets_another_for_the_child_that_is_there(conn: Conn, ended: bool) -> None:
    made = family(conn)
    if ended:
        do(conn, made.worker, "x", "failed")
    behind(conn, "delete from taskq.jobs where id = %s", made.job)
    assert healed(conn) == [(made.parent, "healed")]
    assert tree(conn, made.parent)["kid"] == ("pending" if ended else "held")
    assert info(conn, child_of(conn, made.parent))["generation"] == 0


def test_parents_are_forgotten_before_their_children(conn: Conn) -> None:
    made = family(conn)
    child = fail_child(conn, made)
    conn.execute("update taskq.runs set finished_at = finished_at - interval '1 year' where id = %s", (child,))
    assert one(conn, "select taskq.prune_runs()") == 0
    conn.execute("update taskq.runs set finished_at = finished_at - interval '1 year' where id = %s", (made.parent,))
    assert one(conn, "select taskq.prune_runs()") == 1
    assert info(conn, child)["status"] == "failed"
    assert violations(conn) == []
    assert one(conn, "select taskq.prune_runs()") == 1
    assert one(conn, "select count(*) from taskq.runs") == 0


def test_a_claim_by_nobody_who_may_is_refused(conn: Conn) -> None:
    made = family(conn)
    assert refused(conn, "update taskq.jobs set status = 'running' where id = %s", made.job) in ("WF003", "23514")

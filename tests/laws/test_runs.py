"""Runs: each end of a node carries its run on in the same transaction, whatever ended it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import EVERY, effect, promising
from psycopg.types.json import Jsonb
from runs_kit import (
    do,
    edge,
    finish,
    info,
    job_of,
    kinds,
    node,
    plan_text,
    result_of,
    start,
    store,
    take,
    tree,
    worker_for,
)
from sql import (
    End,
    cancel,
    control_clock,
    detail,
    end,
    exchange,
    get,
    lose,
    one,
    policy,
    refused,
    register,
    retry,
    rows,
    settle,
    shift_clock,
    status,
    violations,
)

Conn = psycopg.Connection[Any]


def chain(conn: Conn, **more: Any) -> str:
    """a, then b with a's result, then c."""
    nodes = [node("a", {"x": {"input": "x"}}), node("b", {"y": result_of(0)}), node("c", {"z": result_of(1, "n")})]
    return store(conn, nodes, [edge(0, 1), edge(1, 2)], result=result_of(2), **more)


# Going on -------------------------------------------------------------------------------------------------------------


def test_a_chain_runs_in_order_and_hands_its_results_on(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn), {"x": 7})
    assert tree(conn, run) == {"a": "pending", "b": "waiting", "c": "waiting"}
    [a] = take(conn, worker, "a", "b", "c").values()
    assert (a["task"], a["payload"]) == ("a", '{"x": 7}')
    finish(conn, worker, a, result={"n": [1]})
    [b] = take(conn, worker, "a", "b", "c").values()
    assert (b["task"], b["payload"]) == ("b", '{"y": {"n": [1]}}')
    finish(conn, worker, b, result={"n": 5})
    [c] = take(conn, worker, "a", "b", "c").values()
    assert (c["task"], c["payload"]) == ("c", '{"z": 5}')
    assert info(conn, run)["status"] == "running"
    finish(conn, worker, c, result="done")
    assert (info(conn, run)["status"], info(conn, run)["result"]) == ("succeeded", "done")
    assert kinds(conn, run) == ["admitted", "ready", "ended", "ready", "ended", "ready", "ended", "finished"]
    assert violations(conn) == []


def test_the_jobs_of_nodes_tell_which_run_and_node_they_are(conn: Conn) -> None:
    run = start(conn, chain(conn), {"x": 1})
    job = get(conn, job_of(conn, run, "a"))
    assert job["run_id"] == run
    assert job["meta"]["run"] == {"id": str(run), "workflow": "flow", "node": "a"}
    assert job["required_worker_schema"] == 3


def test_an_older_worker_is_given_no_node(conn: Conn) -> None:
    start(conn, chain(conn), {"x": 1})
    assert take(conn, register(conn, level=2), "a") == {}
    assert list(take(conn, worker_for(conn), "a")) == ["a"]


def test_a_fan_in_starts_once_with_all_results(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("c"), node("d", {"all": {"list": [result_of(0), result_of(1), result_of(2)]}})]
    run = start(conn, store(conn, nodes, [edge(0, 3), edge(1, 3), edge(2, 3)]))
    claimed = take(conn, worker, "a", "b", "c")
    both = [End(claimed[t]["job_id"], 1, "succeeded", i, result=t) for i, t in enumerate("ab")]
    assert exchange(conn, worker, both) == []
    assert one(conn, "select unmet from taskq.nodes where run_id = %s and ix = 3", run) == 1
    assert take(conn, worker, "d") == {}
    finish(conn, worker, claimed["c"], result="c")
    [d] = take(conn, worker, "d").values()
    assert d["payload"] == '{"all": ["a", "b", "c"]}'
    finish(conn, worker, d)
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_rolled_back_admission_leaves_nothing(conn: Conn) -> None:
    plan = chain(conn)
    with conn.transaction(force_rollback=True):
        start(conn, plan, {"x": 1}, key="k")
    for table in ("runs", "nodes", "receipts", "jobs"):
        assert one(conn, f"select count(*) from taskq.{table}") == 0


# Keys and plans -------------------------------------------------------------------------------------------------------


def test_the_same_key_plan_and_input_are_the_same_run(conn: Conn) -> None:
    plan = chain(conn)
    run = start(conn, plan, {"x": 1}, key="k")
    found = rows(conn, "select * from taskq.start_run(%s, %s, 'k')", plan, Jsonb({"x": 1}))
    assert found == [{"run_id": run, "created": False}]
    assert one(conn, "select count(*) from taskq.jobs") == 1


def test_the_same_key_with_another_input_or_plan_is_refused(conn: Conn) -> None:
    plan = chain(conn)
    run = start(conn, plan, {"x": 1}, key="k")
    other = chain(conn, receipts=50)
    for given in ((plan, {"x": 2}), (other, {"x": 1})):
        with pytest.raises(psycopg.Error) as caught, conn.transaction():
            start(conn, *given, key="k")
        assert caught.value.sqlstate == "WF022"
        assert detail(caught.value)["run_id"] == str(run)


def test_a_plan_is_stored_once_and_never_changed(conn: Conn) -> None:
    plan = chain(conn)
    assert chain(conn) == plan
    for statement in (
        "update taskq.plans set receipts = 3",
        "delete from taskq.plan_nodes",
        "update taskq.plan_edges set policy = 'skip'",
    ):
        assert refused(conn, statement) == "WF004"
    start(conn, plan, {"x": 1})
    other = chain(conn, receipts=50)
    assert refused(conn, "update taskq.runs set plan_hash = %s", other) == "WF024"


@pytest.mark.parametrize(
    ("nodes", "edges", "says"),
    [
        ([node("a"), node("b")], [edge(1, 0)], "edge"),
        ([node("a")], [edge(0, 0)], "edge"),
        ([node("a")], [edge(0, 5)], "edge"),
        ([node("a"), node("a")], [], "unique"),
        ([{**node("a"), "name": "a b"}], [], "node 0"),
        ([node("a", effect_class="odd")], [], "node 0"),
        ([], [], "check"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(conn: Conn, nodes: list[Any], edges: list[Any], says: str) -> None:
    policy(conn)
    with pytest.raises(psycopg.Error, match=says) as caught, conn.transaction():
        conn.execute("select taskq.store_plan(%s)", (plan_text(nodes, edges),))
    assert caught.value.sqlstate == "WF024"
    assert one(conn, "select count(*) from taskq.plans") == 0


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_failure_blocks_what_waits_for_it_and_names_the_cause(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn, on_failure="finish"), {"x": 1})
    do(conn, worker, "a", "failed")
    assert tree(conn, run) == {"a": "failed", "b": "blocked", "c": "blocked"}
    found = rows(conn, "select name, blocked_by from taskq.blocked_nodes where run_id = %s order by name", run)
    assert found == [{"name": "b", "blocked_by": "a"}, {"name": "c", "blocked_by": "a"}]
    end_of_run = info(conn, run)
    assert end_of_run["status"] == "failed"
    assert end_of_run["error"]["node"] == "a"
    assert end_of_run["error"]["cause"]["type"] == "Boom"
    assert violations(conn) == []


def test_an_unhandled_failure_cancels_the_rest(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("c"), node("d")]
    run = start(conn, store(conn, nodes, [edge(2, 3)]))
    claimed = take(conn, worker, "a", "b")
    finish(conn, worker, claimed["a"], "failed")
    assert tree(conn, run) == {"a": "failed", "b": "running", "c": "cancelled", "d": "cancelled"}
    assert get(conn, claimed["b"]["job_id"])["cancel_requested_at"] is not None
    assert info(conn, run)["status"] == "running"
    finish(conn, worker, claimed["b"], "failed")
    assert (tree(conn, run)["b"], info(conn, run)["status"]) == ("cancelled", "failed")
    assert violations(conn) == []


def test_the_lost_member_of_a_run_that_stops_is_not_run_again(conn: Conn) -> None:
    worker, other = worker_for(conn), worker_for(conn)
    nodes = [node("a"), node("b", effect_class="pure"), node("c")]
    run = start(conn, store(conn, nodes))
    a = take(conn, worker, "a")["a"]
    take(conn, other, "b")
    finish(conn, worker, a, "failed")
    lose(conn, other)
    assert settle(conn) == {job_of(conn, run, "b"): "cancelled"}
    assert tree(conn, run) == {"a": "failed", "b": "cancelled", "c": "cancelled"}
    assert info(conn, run)["status"] == "failed"


def test_the_rest_of_a_run_that_is_to_finish_goes_on(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("c")]
    run = start(conn, store(conn, nodes, [edge(1, 2)], on_failure="finish"))
    do(conn, worker, "a", "failed")
    do(conn, worker, "b")
    assert info(conn, run)["status"] == "running"
    do(conn, worker, "c")
    assert info(conn, run)["status"] == "failed"
    assert violations(conn) == []


def test_a_collecting_successor_gets_typed_outcomes(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("sum", {"all": {"list": [{"outcome": 0}, {"outcome": 1}]}})]
    run = start(conn, store(conn, nodes, [edge(0, 2, "collect"), edge(1, 2, "collect")]))
    do(conn, worker, "a", "failed")
    assert tree(conn, run) == {"a": "failed", "b": "pending", "sum": "waiting"}
    do(conn, worker, "b", result=4)
    [claimed] = take(conn, worker, "sum").values()
    assert get(conn, claimed["job_id"])["payload"]["all"] == [
        {"node": "a", "status": "failed", "value": None, "error": {"type": "Boom", "message": "boom"}},
        {"node": "b", "status": "succeeded", "value": 4, "error": None},
    ]
    finish(conn, worker, claimed)
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_failure_skips_what_may_be_skipped(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("c")]
    run = start(conn, store(conn, nodes, [edge(0, 1, "skip"), edge(1, 2)]))
    do(conn, worker, "a", "failed")
    assert tree(conn, run) == {"a": "failed", "b": "skipped", "c": "skipped"}
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


@pytest.mark.parametrize("on_failure", ["cancel", "finish"])
def test_a_failed_run_names_the_node_whose_failure_nobody_handled(conn: Conn, on_failure: str) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("sum", {"a": {"outcome": 0}}), node("c"), node("all", {"c": {"outcome": 3}})]
    edges = [edge(0, 2, "collect"), edge(1, 2), edge(3, 4, "collect"), edge(2, 4)]
    run = start(conn, store(conn, nodes, edges, on_failure=on_failure))
    do(conn, worker, "a", "failed")
    do(conn, worker, "c", "failed")
    do(conn, worker, "b", "failed")
    assert tree(conn, run) == {"a": "failed", "b": "failed", "sum": "blocked", "c": "failed", "all": "blocked"}
    assert (info(conn, run)["status"], info(conn, run)["error"]["node"]) == ("failed", "b")


def test_a_failure_that_one_successor_handles_and_another_does_not_is_named(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b"), node("c")], [edge(0, 1, "collect"), edge(0, 2)]))
    do(conn, worker, "a", "failed")
    assert (info(conn, run)["status"], info(conn, run)["error"]["node"]) == ("failed", "a")


# Branches -------------------------------------------------------------------------------------------------------------

ARMS = [
    edge(0, 1, when={"path": ["paid"], "equals": True}),
    edge(0, 2, when={"path": ["paid"], "equals": False}),
    edge(0, 3),
    edge(1, 3, merge=True),
    edge(2, 3, merge=True),
]
CASE = {"case": {"on": result_of(0, "paid"), "arms": [[True, result_of(1)], [False, result_of(2)]]}}


@pytest.mark.parametrize(("paid", "taken", "other"), [(True, "ship", "ask"), (False, "ask", "ship")])
def test_only_the_arm_that_was_chosen_runs(conn: Conn, paid: bool, taken: str, other: str) -> None:
    worker = worker_for(conn)
    nodes = [node("charge"), node("ship"), node("ask"), node("tell", {"what": CASE})]
    run = start(conn, store(conn, nodes, ARMS, result=result_of(3)))
    do(conn, worker, "charge", result={"paid": paid})
    assert tree(conn, run) == {"charge": "succeeded", taken: "pending", other: "skipped", "tell": "waiting"}
    do(conn, worker, taken, result=taken)
    [tell] = take(conn, worker, "tell").values()
    assert get(conn, tell["job_id"])["payload"] == {"what": taken}
    finish(conn, worker, tell, result=taken)
    assert info(conn, run)["result"] == taken
    assert violations(conn) == []


def test_what_follows_a_branch_that_chose_nothing_is_skipped(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("charge"), node("ship"), node("ask"), node("tell", {"what": CASE})]
    run = start(conn, store(conn, nodes, ARMS))
    do(conn, worker, "charge", result={"paid": "perhaps"})
    assert tree(conn, run) == {"charge": "succeeded", "ship": "skipped", "ask": "skipped", "tell": "skipped"}
    assert info(conn, run)["status"] == "succeeded"


# Cancelling -----------------------------------------------------------------------------------------------------------


def cancel_run(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.cancel_run(%s, 'because', 'me')", run))


def test_cancelling_a_run_cancels_all_that_waits_in_one_transaction(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("c")]
    run = start(conn, store(conn, nodes, [edge(0, 2)]))
    a = take(conn, worker, "a")["a"]
    assert cancel_run(conn, run) == "requested"
    assert tree(conn, run) == {"a": "running", "b": "cancelled", "c": "cancelled"}
    assert cancel_run(conn, run) == "requested"
    finish(conn, worker, a, "failed")
    assert tree(conn, run)["a"] == "cancelled"
    assert info(conn, run)["status"] == "cancelled"
    assert cancel_run(conn, run) == "finished"
    assert kinds(conn, run).count("cancel_requested") == 1
    assert violations(conn) == []


def test_a_run_that_was_cancelled_too_late_has_succeeded(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    a = take(conn, worker, "a")["a"]
    assert cancel_run(conn, run) == "requested"
    finish(conn, worker, a)
    assert info(conn, run)["status"] == "succeeded"


def test_a_run_none_of_whose_jobs_started_is_cancelled_at_once(conn: Conn) -> None:
    run = start(conn, chain(conn), {"x": 1})
    assert cancel_run(conn, run) == "cancelled"
    assert one(conn, "select count(*) from taskq.jobs") == 0
    assert cancel_run(conn, UUID(int=5)) == "not_found"


def test_cancelling_one_job_of_a_run_blocks_what_waits_for_it(conn: Conn) -> None:
    run = start(conn, chain(conn), {"x": 1})
    assert cancel(conn, job_of(conn, run, "a")) == "cancelled"
    assert tree(conn, run) == {"a": "cancelled", "b": "blocked", "c": "blocked"}
    assert info(conn, run)["status"] == "failed"


def test_an_unknown_node_keeps_its_run_open_until_it_is_decided(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn), {"x": 1})
    take(conn, worker, "a")
    job = job_of(conn, run, "a")
    assert cancel_run(conn, run) == "requested"
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    assert (tree(conn, run)["a"], info(conn, run)["status"]) == ("unknown", "recovering")
    assert kinds(conn, run)[-1] == "unknown"
    assert one(conn, "select taskq.resolve(%s, false, null, 'looked', 'me')", job) == "cancelled"
    assert info(conn, run)["status"] == "cancelled"
    assert violations(conn) == []


# The guard ------------------------------------------------------------------------------------------------------------


def test_no_job_of_a_run_is_claimed_that_is_not_live(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn), {"x": 1})
    job = job_of(conn, run, "a")
    for change, back in (
        ("status = 'paused'", "status = 'running'"),
        ("run_epoch = 5", "run_epoch = 1"),
        ("stopping_at = now()", "stopping_at = null"),
        ("cancel_requested_at = now()", "cancel_requested_at = null"),
    ):
        conn.execute(f"update taskq.runs set {change}")
        with pytest.raises(psycopg.Error) as caught, conn.transaction():
            take(conn, worker, "a")
        assert caught.value.sqlstate == "WF023"
        assert detail(caught.value)["job_id"] == str(job)
        assert exchange(conn, worker, (), 5, tasks=["a"], skip=[job]) == []
        conn.execute(f"update taskq.runs set {back}")
    conn.execute("update taskq.jobs set run_epoch = null")
    with pytest.raises(psycopg.Error, match="no run epoch"), conn.transaction():
        take(conn, worker, "a")


def test_a_node_is_not_reopened_behind_its_run(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    do(conn, worker, "a", "failed")
    job = job_of(conn, run, "a")
    assert refused(conn, "select taskq.retry(%s)", job) == "WF023"
    assert status(conn, job) == "failed"


# Reopening ------------------------------------------------------------------------------------------------------------


def retry_run(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.retry_run(%s, 'fixed', 'me')", run))


def test_retrying_a_run_goes_on_where_it_failed(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn), {"x": 1})
    do(conn, worker, "a", result={"n": 1})
    do(conn, worker, "b", "failed")
    job = job_of(conn, run, "b")
    assert info(conn, run)["status"] == "failed"
    assert retry_run(conn, run) == "reopened"
    assert tree(conn, run) == {"a": "succeeded", "b": "pending", "c": "waiting"}
    assert job_of(conn, run, "b") == job
    assert (get(conn, job)["claim_epoch"], get(conn, job)["generation"]) == (1, 1)
    do(conn, worker, "b", result={"n": 2})
    do(conn, worker, "c")
    ended = info(conn, run)
    assert (ended["status"], ended["generation"], ended["run_epoch"]) == ("succeeded", 1, 2)
    audit = rows(conn, "select actor, reason from taskq.audit where action = 'retry_run' and subject = %s", str(run))
    assert audit == [{"actor": "me", "reason": "fixed"}]
    assert violations(conn) == []


def test_retrying_a_cancelled_run_runs_what_had_not(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn), {"x": 1})
    assert cancel_run(conn, run) == "cancelled"
    assert retry_run(conn, run) == "reopened"
    for task in "abc":
        do(conn, worker, task, result={"n": 1})
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_only_a_failed_or_cancelled_run_is_retried(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    assert refused(conn, "select taskq.retry_run(%s)", run) == "WF026"
    do(conn, worker, "a")
    assert refused(conn, "select taskq.retry_run(%s)", run) == "WF026"
    assert refused(conn, "select taskq.retry_run(%s)", UUID(int=5)) == "WF025"


def test_a_reopened_collector_sees_what_its_sources_give_now(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("sum", {"all": {"outcome": 0}}), node("c")]
    run = start(conn, store(conn, nodes, [edge(0, 1, "collect"), edge(1, 2)]))
    do(conn, worker, "a", "failed")
    do(conn, worker, "sum", "failed")
    assert info(conn, run)["status"] == "failed"
    retry_run(conn, run)
    assert tree(conn, run) == {"a": "pending", "sum": "waiting", "c": "waiting"}
    do(conn, worker, "a", result=3)
    [again] = take(conn, worker, "sum").values()
    assert get(conn, again["job_id"])["payload"]["all"]["value"] == 3
    finish(conn, worker, again)
    do(conn, worker, "c")
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


# What cannot be made --------------------------------------------------------------------------------------------------


def test_a_node_whose_job_cannot_be_made_fails_and_its_predecessor_stands(conn: Conn) -> None:
    worker = worker_for(conn)
    conn.execute("update taskq.installation set max_payload_bytes = 200")
    run = start(conn, store(conn, [node("a"), node("b", {"y": result_of(0)})], [edge(0, 1)]))
    do(conn, worker, "a", result="x" * 300)
    assert tree(conn, run) == {"a": "succeeded", "b": "failed"}
    assert info(conn, run)["error"]["cause"]["type"] == "NodeNotReady"
    assert violations(conn) == []


# Receipts -------------------------------------------------------------------------------------------------------------


def test_a_run_keeps_its_newest_receipts(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn, receipts=3), {"x": 1})
    for task in "abc":
        do(conn, worker, task, result={"n": 1})
    found = rows(conn, "select sequence, kind from taskq.receipts where run_id = %s order by sequence", run)
    assert found == [
        {"sequence": 6, "kind": "ready"},
        {"sequence": 7, "kind": "ended"},
        {"sequence": 8, "kind": "finished"},
    ]
    assert violations(conn) == []
    assert refused(conn, "update taskq.receipts set kind = 'ready'") == "WF004"


# Healing --------------------------------------------------------------------------------------------------------------


def test_a_run_that_was_left_behind_is_carried_on(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn), {"x": 1})
    conn.execute("alter table taskq.history disable trigger run_goes_on")
    do(conn, worker, "a", result={"n": 1})
    conn.execute("alter table taskq.history enable trigger run_goes_on")
    assert {found[0] for found in violations(conn)} == {"node_job_missing"}
    assert rows(conn, "select * from taskq.heal_runs()") == [{"run_id": run, "answer": "healed"}]
    assert rows(conn, "select * from taskq.heal_runs()") == []
    assert violations(conn) == []
    for task in "bc":
        do(conn, worker, task, result={"n": 1})
    assert info(conn, run)["status"] == "succeeded"


def test_a_node_whose_job_is_nowhere_gets_it_again(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn), {"x": 1})
    conn.execute("delete from taskq.jobs")
    assert rows(conn, "select * from taskq.heal_runs()") == [{"run_id": run, "answer": "healed"}]
    do(conn, worker, "a")
    assert tree(conn, run)["b"] == "pending"
    assert one(conn, "select taskq.heal_run(%s)", run) == "sound"


# Effects --------------------------------------------------------------------------------------------------------------


def promised(name: str, task: str, on: tuple[str, ...], **payload: Any) -> dict[str, Any]:
    return effect(name, on, task=task, payload=payload)


def test_what_a_failure_promises_commits_with_it_and_settles_after_the_run(conn: Conn) -> None:
    worker = worker_for(conn)
    tell = promised("tell", "tell", ("failed",), x={"arg": "x"}, why={"of": "error"}, run={"of": "job_id"})
    run = start(conn, chain(conn, effects=[tell, promised("cheer", "cheer", ("succeeded",))]), {"x": 3})
    do(conn, worker, "a", result={"n": 1})
    assert one(conn, "select count(*) from taskq.effect_intents") == 0
    do(conn, worker, "b", "failed")
    assert (tree(conn, run)["b"], info(conn, run)["status"]) == ("failed", "failed")
    [intent] = rows(conn, "select * from taskq.unsettled_effects where run_id = %s", run)
    assert (intent["name"], intent["status"], intent["effect_key"]) == ("tell", "pending", f"{run}:0:tell")
    payload = get(conn, intent["job_id"])["payload"]
    assert (payload["x"], payload["run"], payload["why"]["node"]) == (3, str(run), "b")
    do(conn, worker, "tell")
    assert rows(conn, "select * from taskq.unsettled_effects") == []
    assert violations(conn) == []


def test_compensations_run_one_by_one_the_last_first(conn: Conn) -> None:
    worker = worker_for(conn)
    undo = [promised(f"undo {n}".replace(" ", "-"), "undo", EVERY, n={"of": "result"}) for n in range(3)]
    nodes = [node(name, compensate=undo[n]) for n, name in enumerate("abc")] + [node("d")]
    run = start(conn, store(conn, nodes, [edge(0, 1), edge(1, 2), edge(2, 3)]))
    for n, task in enumerate("abc"):
        do(conn, worker, task, result=n)
    do(conn, worker, "d", "failed")
    order = []
    for _ in range(3):
        [claimed] = take(conn, worker, "undo").values()
        order.append(get(conn, claimed["job_id"])["payload"]["n"])
        # One that fails does not keep the others from it.
        finish(conn, worker, claimed, "failed" if order == [2] else "succeeded")
    assert order == [2, 1, 0]
    assert take(conn, worker, "undo") == {}
    assert refused(conn, "select taskq.retry_run(%s)", run) == "WF026"
    assert violations(conn) == []


def test_a_run_that_succeeds_is_not_compensated(conn: Conn) -> None:
    worker = worker_for(conn)
    start(conn, store(conn, [node("a", compensate=promised("undo", "undo", EVERY))]))
    do(conn, worker, "a")
    assert one(conn, "select count(*) from taskq.effect_intents") == 0


def test_broken_promises_of_a_run_are_kept_once_what_they_lacked_is_there(conn: Conn) -> None:
    worker = worker_for(conn)
    late = promised("undo", "undo", EVERY) | {"policy_id": "late"}
    nodes = [node("a", compensate=late), node("b")]
    run = start(conn, store(conn, nodes, [edge(0, 1)], effects=[late | {"name": "tell", "task": "tell"}]))
    do(conn, worker, "a")
    do(conn, worker, "b", "failed")
    found = rows(conn, "select effect_key, status from taskq.effects order by name")
    assert [row["status"] for row in found] == ["broken", "broken"]
    for row in found:
        assert refused(conn, "select taskq.retry_effect(%s)", row["effect_key"]) == "WF014"
    policy(conn, "late")
    for row in found:
        assert one(conn, "select taskq.retry_effect(%s)", row["effect_key"]) == "enqueued"
    do(conn, worker, "undo")
    do(conn, worker, "tell")
    assert rows(conn, "select * from taskq.unsettled_effects") == []
    assert info(conn, run)["status"] == "failed"
    assert violations(conn) == []


def test_a_run_whose_effects_are_not_settled_is_not_reopened(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")], effects=[promised("tell", "tell", ("failed",))]))
    do(conn, worker, "a", "failed")
    assert refused(conn, "select taskq.retry_run(%s)", run) == "WF026"
    do(conn, worker, "tell")
    assert retry_run(conn, run) == "reopened"
    do(conn, worker, "a", "failed")
    keys = [row["effect_key"] for row in rows(conn, "select effect_key from taskq.effects order by id")]
    assert keys == [f"{run}:0:tell", f"{run}:1:tell"]
    assert violations(conn) == []


def test_a_run_whose_node_has_an_effect_that_is_not_settled_is_not_reopened(conn: Conn) -> None:
    worker = worker_for(conn)
    spec = promising(conn, promised("sorry", "sorry", ("failed",)))
    run = start(conn, store(conn, [node("a", **spec), node("b")], on_failure="finish"))
    do(conn, worker, "a", "failed")
    do(conn, worker, "b", "failed")
    # As a whole, rather than that what may run again does so beside what may not.
    assert refused(conn, "select taskq.retry_run(%s)", run) == "WF026"
    assert tree(conn, run) == {"a": "failed", "b": "failed"}
    do(conn, worker, "sorry")
    assert retry_run(conn, run) == "reopened"
    assert tree(conn, run) == {"a": "pending", "b": "pending"}


def test_a_run_is_forgotten_with_its_nodes_once_nothing_is_owed(conn: Conn) -> None:
    control_clock(conn)
    worker = worker_for(conn)
    undo = promised("undo", "undo", EVERY)
    owing = start(conn, store(conn, [node("a", compensate=undo), node("b")], [edge(0, 1)]))
    plain = start(conn, chain(conn), {"x": 1})
    cancel_run(conn, plain)
    do(conn, worker, "a")
    do(conn, worker, "b", "failed")
    shift_clock(conn, "400 days")
    assert one(conn, "select taskq.prune_runs()") == 1
    assert rows(conn, "select id from taskq.runs") == [{"id": owing}]
    assert one(conn, "select count(*) from taskq.nodes where run_id = %s", plain) == 0
    assert one(conn, "select count(*) from taskq.receipts where run_id = %s", plain) == 0


# The old way round ----------------------------------------------------------------------------------------------------


def test_an_end_without_the_root_lock_carries_the_run_on_all_the_same(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn), {"x": 1})
    a = take(conn, worker, "a")["a"]
    assert end(conn, worker, End(a["job_id"], 1, "succeeded", result={"n": 1})) == 1
    assert tree(conn, run)["b"] == "pending"
    assert retry(conn, job_of(conn, run, "b")) == "due"

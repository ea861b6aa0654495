"""Runs under attack: what others got wrong, or nearly, held here for good."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import EVERY, effect
from runs_kit import (
    do,
    edge,
    info,
    job_of,
    node,
    nodes_of_others,
    plan_text,
    result_of,
    start,
    store,
    take,
    tree,
    worker_for,
)
from sql import detail, get, lose, one, refused, rows, sessions, violations

Conn = psycopg.Connection[Any]


def promised(name: str, task: str, on: tuple[str, ...] = EVERY, **payload: Any) -> dict[str, Any]:
    return effect(name, on, task=task, payload=payload)


def retry_run(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.retry_run(%s, 'fixed', 'me')", run))


# Large plans ----------------------------------------------------------------------------------------------------------


def looked_at(conn: Conn) -> int:
    """How many rows of nodes and edges this transaction has read."""
    return int(
        one(
            conn,
            "select sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid))"
            " from pg_class c where c.oid in ('taskq.nodes'::regclass, 'taskq.plan_edges'::regclass)"
            " or c.oid in (select indexrelid from pg_index"
            " where indrelid in ('taskq.nodes'::regclass, 'taskq.plan_edges'::regclass))",
        )
    )


def line(n: int) -> list[dict[str, Any]]:
    return [edge(ix, ix + 1) for ix in range(n - 1)]


def fan(n: int) -> list[dict[str, Any]]:
    return [edge(0, ix) for ix in range(1, n)]


@pytest.mark.parametrize("on_failure", ["cancel", "finish"])
@pytest.mark.parametrize(("edges", "n"), [(line, 300), (fan, 600)])
def test_a_transition_reads_what_it_changes_and_not_the_whole_run_each_time(
    dsn: str, edges: Any, n: int, on_failure: str
) -> None:
    with psycopg.connect(dsn) as conn:
        # As an analyze leaves it that came while the first rows were being written: pages, and nothing in them.
        conn.execute("update pg_class set reltuples = 0, relpages = 8 where relnamespace = 'taskq'::regnamespace")
        others = nodes_of_others(conn, 50_000)
        reads_what_it_changes(conn, edges(n), n, on_failure)
        conn.execute("delete from taskq.nodes where run_id = %s", (others,))
        assert violations(conn) == []


def reads_what_it_changes(conn: Conn, edges: list[dict[str, Any]], n: int, on_failure: str) -> None:
    worker = worker_for(conn)
    nodes = [node(f"n{ix}", task="first" if ix == 0 else "t") for ix in range(n)]
    run = start(conn, store(conn, nodes, edges, on_failure=on_failure))
    for act in (
        lambda: do(conn, worker, "first", "failed"),
        lambda: retry_run(conn, run),
        lambda: do(conn, worker, "first"),
        lambda: one(conn, "select taskq.cancel_run(%s)", run),
    ):
        # What is not committed yet is not there for an autovacuum that would count rows meanwhile.
        conn.commit()
        before = looked_at(conn)
        act()
        assert looked_at(conn) - before < 100 * n
    assert info(conn, run)["status"] == "cancelled"


# Plans by hand --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken",
    [
        {"result": {"case": {"on": result_of(0), "arms": 5}}},
        {"result": {"case": {"on": result_of(0), "arms": [7]}}},
        {"result": {"fork": {"on": result_of(0), "arms": [["a", "a"]]}}},
        {"result": {"fork": {"on": result_of(0), "arms": [["a", 1, result_of(0)]]}}},
        {"result": {"fork": {"on": result_of(9), "arms": []}}},
        {"result": {"later": 1}},
        {"result": {"node": 7, "path": []}},
        {"result": {"list": [{"object": {"x": 5}}]}},
        {"result": {"node": 0, "path": "n"}},
        {"result": {"node": 0, "path": [[]]}},
        {"result": {"outcome": 1.5}},
        {"nodes": [node("a"), node("b", {"x": result_of(1)})]},
        {"nodes": [node("a"), node("b", {"x": 5})]},
        {"nodes": [node("a", compensate=5), node("b")]},
        {"nodes": [node("a", compensate={"task": "t"}), node("b")]},
        {"edges": [edge(0, 1, when=5)]},
        {"edges": [edge(0, 1, when={"path": "n", "equals": 1})]},
        {"edges": [edge(0, 1, when={"path": ["n"]})]},
        {"edges": [edge(0, 1, when={"path": ["n"], "equals": 1, "has": 1})]},
        {"edges": [{"from": 10**12, "to": 10**13}]},
        {"effects": 5},
        {"receipts": 10**12},
    ],
)
def test_a_plan_that_a_run_would_stumble_over_is_not_stored(conn: Conn, broken: dict[str, Any]) -> None:
    body = json.loads(plan_text([node("a"), node("b")], [edge(0, 1)])) | broken
    assert refused(conn, "select taskq.store_plan(%s)", json.dumps(body)) == "WF024"


def test_a_plan_that_cannot_be_read_is_not_stored(conn: Conn) -> None:
    deep = "[" * 50_000 + "]" * 50_000
    for text in ("", "5", "[]", '"\\u0000"', '{"x": "\\u0000"}', deep):
        assert refused(conn, "select taskq.store_plan(%s)", text) == "WF024", text[:20]


def test_the_end_of_the_last_node_stands_though_the_result_of_its_run_cannot_be_made(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a", compensate=promised("undo", "undo"))], result=result_of(0)))
    # As if an older version, or a hand, had stored it.
    conn.execute("alter table taskq.plans disable trigger plans_immutable")
    conn.execute("update taskq.plans set result = '{\"later\": 1}'")
    conn.execute("alter table taskq.plans enable trigger plans_immutable")
    job = job_of(conn, run, "a")
    do(conn, worker, "a", result=1)
    assert get(conn, job)["status"] == "succeeded"
    ended = info(conn, run)
    assert (ended["status"], ended["error"]["type"]) == ("failed", "ResultNotMade")
    assert one(conn, "select count(*) from taskq.effect_intents where owner_job_id = %s", job) == 1


# Steering -------------------------------------------------------------------------------------------------------------


def test_many_are_retried_and_those_of_a_run_that_has_ended_are_refused_by_themselves(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    do(conn, worker, "a", "failed")
    other = start(conn, store(conn, [node("b")]))
    member, waiting = job_of(conn, run, "a"), job_of(conn, other, "b")
    found = rows(conn, "select * from taskq.steer_many('retry', %s::uuid[])", [member, waiting])
    assert {row["job_id"]: row["answer"] for row in found} == {member: "refused", waiting: "due"}
    assert violations(conn) == []


def test_a_run_of_which_nothing_can_run_again_is_not_reopened(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("after"), node("report", {"all": {"outcome": 0}})]
    tell = promised("tell", "tell", ("failed",))
    run = start(conn, store(conn, nodes, [edge(0, 1), edge(0, 2, "collect")], on_failure="finish", effects=[tell]))
    do(conn, worker, "a", "failed")
    do(conn, worker, "report")
    assert (tree(conn, run)["after"], info(conn, run)["status"]) == ("blocked", "failed")
    do(conn, worker, "tell")
    with pytest.raises(psycopg.Error, match="after is blocked by a") as caught, conn.transaction():
        retry_run(conn, run)
    assert (caught.value.sqlstate, detail(caught.value)["run_id"]) == ("WF026", str(run))
    # Nothing is told a second time.
    assert one(conn, "select count(*) from taskq.effect_intents") == 1
    assert violations(conn) == []


def test_a_run_that_ends_while_it_is_admitted_finds_its_day(conn: Conn) -> None:
    conn.execute("update taskq.installation set max_payload_bytes = 200")
    plan = store(conn, [node("a"), node("b", {"x": {"value": "x" * 300}})])
    for name in [
        row["n"]
        for row in rows(
            conn, "select inhrelid::regclass::text as n from pg_inherits where inhparent = 'taskq.history'::regclass"
        )
    ]:
        conn.execute(f"drop table {name}")
    run = start(conn, plan)
    assert (tree(conn, run), info(conn, run)["status"]) == ({"a": "cancelled", "b": "failed"}, "failed")
    assert violations(conn) == []


def test_a_lost_job_of_a_run_that_is_being_cancelled_is_healed_as_cancelled(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")]))
    take(conn, worker, "a")
    assert one(conn, "select taskq.cancel_run(%s)", run) == "requested"
    conn.execute("delete from taskq.jobs")
    assert one(conn, "select taskq.heal_run(%s)", run) == "healed"
    assert (tree(conn, run)["a"], info(conn, run)["status"]) == ("cancelled", "cancelled")
    assert violations(conn) == []


# Locks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["lost", "overdue", "spent"])
def test_maintenance_keeps_no_job_of_a_run_that_somebody_else_is_at(races_dsn: str, how: str) -> None:
    with psycopg.connect(races_dsn, autocommit=True) as conn:
        worker = worker_for(conn)
        busy = start(conn, store(conn, [node("a")]))
        free = start(conn, store(conn, [node("b")]))
        if how == "lost":
            take(conn, worker, "a", "b")
            lose(conn, worker)
        elif how == "overdue":
            conn.execute("update taskq.jobs set deadline = now() - interval '1 s'")
        else:
            conn.execute("update taskq.jobs set attempt = max_attempts")
        sweep = "select job_id from taskq.settle_lost()" if how == "lost" else "select job_id from taskq.sweep()"
        with sessions(races_dsn) as [holder, leader]:
            holder.begin()
            holder.do(lambda c: c.execute("select from taskq.runs where id = %s for update", (busy,)))
            leader.begin()
            settled = leader.do(lambda c: rows(c, sweep))
            assert [row["job_id"] for row in settled] == [job_of(conn, free, "b")]
            # Who is at the run may go on to any job of it, while the leader is still at others.
            holder.do(lambda c: c.execute("select from taskq.jobs where run_id = %s for update nowait", (busy,)))
            holder.rollback()
            leader.commit()
        assert len(rows(conn, sweep)) == 1
        assert violations(conn) == []

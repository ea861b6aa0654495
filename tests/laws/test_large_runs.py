"""Large runs: one transaction gives jobs to so many nodes at most, and what it does for many it does at once."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import EVERY, effect
from maps_kit import all_end, mapped
from runs_kit import do, edge, finish, info, job_of, kinds, node, result_of, start, store, take, tree, worker_for
from sql import End, claim, exchange, lose, one, rows, sessions, violations

Conn = psycopg.Connection[Any]
AT_ONCE = 1000
"""Nodes that one transaction gives jobs."""


@pytest.fixture
def few(conn: Conn) -> int:
    """Few are many here: so many nodes get their job in one transaction, of a run that was reopened one less."""
    conn.execute(
        "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
        " as 'select case when p_run.generation = 0 then 3 else 2 end'"
    )
    return 3


def fan(conn: Conn, n: int, **more: Any) -> str:
    """A first node, and so many that wait for it and take what it gives."""
    nodes = [node("first"), *(node(f"n{ix}", {"x": result_of(0)}, task="t") for ix in range(1, n + 1))]
    return str(store(conn, nodes, [edge(0, ix) for ix in range(1, n + 1)], **more))


def due(conn: Conn, run: UUID) -> list[int]:
    return [row["ix"] for row in rows(conn, "select ix from taskq.nodes where run_id = %s and due order by ix", run)]


def with_job(conn: Conn, run: UUID) -> list[int]:
    found = rows(
        conn, "select n.ix from taskq.nodes n join taskq.jobs j on j.id = n.id where n.run_id = %s order by n.ix", run
    )
    return [row["ix"] for row in found]


def carry_on(conn: Conn, after: UUID | None = None) -> UUID | None:
    found = rows(conn, "select run_id, answer from taskq.carry_on_run(%s)", after)
    assert [row["answer"] for row in found] in ([], ["carried on"])
    return found[0]["run_id"] if found else None


def written(conn: Conn, *tables: str) -> dict[str, int]:
    """How many rows of these tables this connection has written; counts may outlast a transaction."""
    found = rows(
        conn,
        "select relname, n_tup_ins + n_tup_upd + n_tup_del as n from pg_stat_xact_all_tables"
        " where schemaname = 'taskq' and relname = any(%s)",
        list(tables),
    )
    return {row["relname"]: row["n"] for row in found}


# At the bound ---------------------------------------------------------------------------------------------------------


def test_an_end_gives_jobs_to_so_many_by_number_and_leaves_the_rest_due(dsn: str) -> None:
    with psycopg.connect(dsn) as conn:
        worker = worker_for(conn)
        run = start(conn, fan(conn, 2 * AT_ONCE + 500))
        first = take(conn, worker, "first")["first"]
        conn.execute("listen taskq_due")
        conn.commit()
        before = written(conn, "jobs")["jobs"]
        finish(conn, worker, first, result=1)
        assert written(conn, "jobs")["jobs"] - before == AT_ONCE + 1
        conn.commit()
        assert [note.payload for note in conn.notifies(timeout=10, stop_after=1)] == [str(run)]
        assert with_job(conn, run) == list(range(1, AT_ONCE + 1))
        assert due(conn, run) == list(range(AT_ONCE + 1, 2 * AT_ONCE + 501))
        assert set(tree(conn, run).values()) == {"succeeded", "pending", "waiting"}
        assert rows(conn, "select name from taskq.blocked_nodes") == []
        assert violations(conn) == []
        for left in (500, 0):
            conn.commit()
            before = written(conn, "jobs").get("jobs", 0)
            assert carry_on(conn) == run
            assert written(conn, "jobs")["jobs"] - before <= AT_ONCE
            assert len(due(conn, run)) == left
        assert carry_on(conn) is None
        assert with_job(conn, run) == list(range(1, 2 * AT_ONCE + 501))
        receipts = rows(conn, "select kind, node, n from taskq.receipts where kind = 'ready' order by sequence")
        assert [(row["node"], row["n"]) for row in receipts] == [
            (0, 1),
            (1, AT_ONCE),
            (AT_ONCE + 1, AT_ONCE),
            (2 * AT_ONCE + 1, 500),
        ]
        assert violations(conn) == []


@pytest.mark.parametrize("what", ["end", "block", "cancel", "compensate", "reopen"])
def test_what_is_done_for_many_is_done_at_once(dsn: str, what: str) -> None:
    """Rows that all of them share are written a few times, not once for each; no row is written more than thrice."""
    n = 400
    with psycopg.connect(dsn) as conn:
        worker = worker_for(conn)
        undo = effect("undo", EVERY, task="undo", payload={})
        nodes = [node("first"), *(node(f"n{ix}", task="t", compensate=undo) for ix in range(1, n + 1)), node("last")]
        edges = [edge(0, ix) for ix in range(1, n + 1)] + [edge(ix, n + 1) for ix in range(1, n + 1)]
        run = start(conn, store(conn, nodes, edges))
        first = take(conn, worker, "first")["first"]
        if what != "block":
            finish(conn, worker, first, result=1)
        if what == "compensate":
            claims = claim(conn, worker, n, tasks=["t"])
            assert exchange(conn, worker, [End(c["job_id"], c["claim_epoch"], "succeeded") for c in claims]) == []
            last = take(conn, worker, "last")["last"]
        elif what == "reopen":
            assert one(conn, "select taskq.cancel_run(%s)", run) == "cancelled"
        elif what == "end":
            run = start(conn, one(conn, "select plan_hash from taskq.runs"))
            first = take(conn, worker, "first")["first"]
        conn.commit()
        tables = ("runs", "receipts", "ordering_keys", "nodes")
        before = written(conn, *tables)
        if what in ("end", "block"):
            finish(conn, worker, first, "succeeded" if what == "end" else "failed")
        elif what == "cancel":
            assert one(conn, "select taskq.cancel_run(%s)", run) == "cancelled"
        elif what == "compensate":
            finish(conn, worker, last, "failed")
            assert one(conn, "select count(*) from taskq.effect_intents where job_id is not null") == n
        else:
            assert one(conn, "select taskq.retry_run(%s)", run) == "reopened"
        wrote = {name: count - before.get(name, 0) for name, count in written(conn, *tables).items()}
        assert wrote["runs"] <= 8
        assert wrote["receipts"] <= 8
        assert wrote["ordering_keys"] <= 1
        assert wrote["nodes"] <= 4 * (n + 2)
        assert violations(conn) == []


@pytest.mark.parametrize("shape", ["map", "graph"])
def test_verify_reads_each_node_a_few_times_where_nobody_has_counted_them(dsn: str, shape: str) -> None:
    n = 1000
    with psycopg.connect(dsn) as conn:
        # As an analyze leaves it that came while the first rows were being written: pages, and nothing in them. What is
        # not committed yet is not there for an autovacuum that would count it.
        conn.execute("update pg_class set reltuples = 0, relpages = 8 where relnamespace = 'taskq'::regnamespace")
        if shape == "map":
            assert all_end(conn, mapped(conn, list(range(n)))) == n
        else:
            worker = worker_for(conn)
            nodes = [node("first"), *(node(f"n{ix}", task="t") for ix in range(1, n + 1)), node("last")]
            edges = [edge(0, ix) for ix in range(1, n + 1)] + [edge(ix, n + 1) for ix in range(1, n + 1)]
            start(conn, store(conn, nodes, edges))
            do(conn, worker, "first")
            claims = claim(conn, worker, n // 2, tasks=["t"])
            assert exchange(conn, worker, [End(c["job_id"], c["claim_epoch"], "succeeded") for c in claims]) == []
        before = looked_at(conn)
        assert violations(conn) == []
        assert looked_at(conn) - before < 100 * n


def looked_at(conn: Conn) -> int:
    """How many rows of nodes and edges this transaction has read."""
    them = "('taskq.nodes'::regclass, 'taskq.plan_edges'::regclass)"
    return int(
        one(
            conn,
            "select sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid))"
            f" from pg_class c where c.oid in {them}"
            f" or c.oid in (select indexrelid from pg_index where indrelid in {them})",
        )
    )


# What is left ---------------------------------------------------------------------------------------------------------


def test_the_next_end_of_the_run_goes_on_with_what_is_due(conn: Conn, few: int) -> None:
    worker = worker_for(conn)
    run = start(conn, fan(conn, 7))
    do(conn, worker, "first", result=1)
    assert (with_job(conn, run), due(conn, run)) == ([1, 2, 3], [4, 5, 6, 7])
    seen = []
    while claims := claim(conn, worker, 1, tasks=["t"]):
        seen += [row["job_id"] for row in claims]
        exchange(conn, worker, [End(claims[0]["job_id"], claims[0]["claim_epoch"], "succeeded")])
    assert seen == [job_of(conn, run, f"n{ix}") for ix in range(1, 8)]
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_run_whose_first_nodes_are_many_is_admitted_with_the_rest_due(conn: Conn, few: int) -> None:
    run = start(conn, store(conn, [node(f"n{ix}", task="t") for ix in range(5)]))
    assert (with_job(conn, run), due(conn, run)) == ([0, 1, 2], [3, 4])
    assert carry_on(conn) == run
    assert (with_job(conn, run), due(conn, run)) == ([0, 1, 2, 3, 4], [])
    assert kinds(conn, run) == ["admitted", "ready", "ready"]
    assert violations(conn) == []


def test_what_is_due_is_cancelled_with_its_run(conn: Conn, few: int) -> None:
    worker = worker_for(conn)
    run = start(conn, fan(conn, 7))
    do(conn, worker, "first", result=1)
    assert one(conn, "select taskq.cancel_run(%s)", run) == "cancelled"
    assert due(conn, run) == []
    assert set(tree(conn, run).values()) == {"succeeded", "cancelled"}
    assert carry_on(conn) is None
    assert violations(conn) == []


@pytest.mark.parametrize("on_failure", ["cancel", "finish"])
def test_a_failure_while_some_are_due_does_what_the_plan_says(conn: Conn, few: int, on_failure: str) -> None:
    worker = worker_for(conn)
    run = start(conn, fan(conn, 7, on_failure=on_failure))
    do(conn, worker, "first", result=1)
    [claimed] = claim(conn, worker, 1, tasks=["t"])
    finish(conn, worker, claimed, "failed")
    if on_failure == "cancel":
        assert (due(conn, run), info(conn, run)["status"]) == ([], "failed")
        assert list(tree(conn, run).values()).count("cancelled") == 6
    else:
        while claims := claim(conn, worker, 10, tasks=["t"]):
            exchange(conn, worker, [End(c["job_id"], c["claim_epoch"], "succeeded") for c in claims])
        assert list(tree(conn, run).values()).count("succeeded") == 7
        assert info(conn, run)["status"] == "failed"
    assert violations(conn) == []


def test_a_reopened_run_gets_its_jobs_back_in_portions(conn: Conn, few: int) -> None:
    worker = worker_for(conn)
    run = start(conn, fan(conn, 5))
    do(conn, worker, "first", result=1)
    assert carry_on(conn) == run
    epochs = {row["id"]: row["claim_epoch"] for row in rows(conn, "select id, claim_epoch from taskq.jobs")}
    assert one(conn, "select taskq.cancel_run(%s)", run) == "cancelled"
    assert one(conn, "select taskq.retry_run(%s)", run) == "reopened"
    assert (with_job(conn, run), due(conn, run)) == ([1, 2], [3, 4, 5])
    assert violations(conn) == []
    while carry_on(conn):
        pass
    assert {row["id"]: row["claim_epoch"] for row in rows(conn, "select id, claim_epoch from taskq.jobs")} == epochs
    assert {row["generation"] for row in rows(conn, "select generation from taskq.jobs")} == {1}
    assert violations(conn) == []


def test_one_that_cannot_be_made_fails_alone_and_the_others_of_its_portion_are_made(conn: Conn, few: int) -> None:
    conn.execute("update taskq.installation set max_payload_bytes = 200")
    nodes = [node("a", task="t"), node("b", {"x": {"value": "x" * 300}}, task="t"), node("c", task="t")]
    run = start(conn, store(conn, [*nodes, node("d", task="t"), node("e", task="t")], on_failure="finish"))
    assert tree(conn, run) == {"a": "pending", "b": "failed", "c": "pending", "d": "waiting", "e": "waiting"}
    assert due(conn, run) == [3, 4]
    assert carry_on(conn) == run
    assert with_job(conn, run) == [0, 2, 3, 4]
    assert violations(conn) == []


def test_a_compensation_that_is_broken_is_on_record_and_the_others_are_made(conn: Conn) -> None:
    worker = worker_for(conn)
    good, bad = effect("undo", EVERY, task="undo", payload={}), effect("undo", EVERY, task="undo", payload={})
    bad["payload"] = {"x": {"of": "nothing"}}
    nodes = [node("a", compensate=good), node("b", compensate=bad), node("c", compensate=good), node("last")]
    run = start(conn, store(conn, nodes, [edge(ix, 3) for ix in range(3)]))
    for name in "abc":
        do(conn, worker, name)
    do(conn, worker, "last", "failed")
    found = rows(
        conn,
        "select n.ix, i.fault, i.job_id from taskq.effect_intents i join taskq.nodes n on n.id = i.owner_job_id"
        " order by n.ix",
    )
    assert [(row["ix"], row["fault"], row["job_id"] is None) for row in found] == [
        (0, None, False),
        (1, "broken", True),
        (2, None, False),
    ]
    assert info(conn, run)["status"] == "failed"
    assert violations(conn) == []


# Who carries on -------------------------------------------------------------------------------------------------------


def test_a_run_that_others_are_at_is_passed_over_and_hides_none(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
            " as 'select 1'"
        )
        plan = store(conn, [node("a"), node("b")])
        busy, free = start(conn, plan), start(conn, plan)
        with sessions(dsn) as [holder, leader]:
            holder.begin()
            holder.do(lambda c: c.execute("select from taskq.runs where id = %s for update", (busy,)))
            assert leader.do(carry_on) == free
            assert leader.do(carry_on) is None
            holder.rollback()
            assert leader.do(carry_on) == busy
        assert violations(conn) == []


BROKEN = """
create function public.refuse_one() returns trigger language plpgsql as $$
begin
  if new.run_id = current_setting('test.broken')::uuid then
    raise exception 'this run cannot go on' using errcode = '58030';
  end if;
  return new;
end $$
"""


def breaks(conn: Conn, run: UUID) -> None:
    """From now on nothing of this run can be written on record, whoever does it."""
    conn.execute(BROKEN)
    conn.execute("select set_config('test.broken', %s, false)", (str(run),))
    conn.execute(
        "create trigger refuse_one before insert on taskq.receipts for each row execute function public.refuse_one()"
    )


def test_a_run_that_cannot_be_carried_on_keeps_none_behind_it_from_it(conn: Conn, few: int) -> None:
    plan = store(conn, [node(f"n{ix}") for ix in range(4)])
    broken, whole = start(conn, plan), start(conn, plan)
    breaks(conn, broken)
    assert rows(conn, "select * from taskq.carry_on_run()") == [{"run_id": broken, "answer": "error: 58030"}]
    assert carry_on(conn, broken) == whole
    assert (due(conn, broken), due(conn, whole)) == ([3], [])


def test_a_run_that_cannot_be_healed_keeps_none_behind_it_from_it(conn: Conn) -> None:
    worker = worker_for(conn)
    plan = store(conn, [node("a"), node("b")], [edge(0, 1)])
    broken, whole = start(conn, plan), start(conn, plan)
    claims = claim(conn, worker, 2, tasks=["a"])
    conn.execute("alter table taskq.history disable trigger run_goes_on")
    exchange(conn, worker, [End(c["job_id"], c["claim_epoch"], "succeeded") for c in claims])
    conn.execute("alter table taskq.history enable trigger run_goes_on")
    breaks(conn, broken)
    assert rows(conn, "select * from taskq.heal_runs()") == [
        {"run_id": broken, "answer": "error: 58030"},
        {"run_id": whole, "answer": "healed"},
    ]
    assert (tree(conn, broken)["b"], tree(conn, whole)["b"]) == ("waiting", "pending")


@pytest.mark.parametrize("how", ["lost", "overdue", "spent"])
def test_jobs_of_busy_runs_do_not_hide_those_behind_them(races_dsn: str, how: str) -> None:
    with psycopg.connect(races_dsn, autocommit=True) as conn:
        worker = worker_for(conn)
        busy = start(conn, store(conn, [node(f"n{ix}", task="t") for ix in range(4)], on_failure="finish"))
        free = start(conn, store(conn, [node("b", task="t")]))
        if how == "lost":
            assert len(claim(conn, worker, 5, tasks=["t"])) == 5
            lose(conn, worker)
        elif how == "overdue":
            conn.execute("update taskq.jobs set deadline = now() - interval '1 s'")
        else:
            conn.execute("update taskq.jobs set attempt = max_attempts")
        sweep = "settle_lost" if how == "lost" else "sweep"
        with sessions(races_dsn) as [holder, leader]:
            holder.begin()
            holder.do(lambda c: c.execute("select from taskq.runs where id = %s for update", (busy,)))
            # Fewer at once than the busy run has: they must not take up the places.
            settled = leader.do(lambda c: rows(c, f"select job_id from taskq.{sweep}(p_limit => 2)"))
            assert [row["job_id"] for row in settled] == [job_of(conn, free, "b")]
            holder.rollback()
        left = []
        while found := rows(conn, f"select job_id from taskq.{sweep}(p_limit => 2)"):
            left += [row["job_id"] for row in found]
        assert len(left) == len(set(left)) == 4
        assert violations(conn) == []

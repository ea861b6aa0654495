"""Maps: a node for each item of a list that is known only at run time, in portions, and what becomes of them."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import EVERY, effect
from maps_kit import MAP, Mapped, all_end, child_of, doubled, due, end_last, ends, given, mapped, plan_of, progress
from runs_kit import do, edge, finish, info, job_of, kinds, node, nodes_of_others, start, store, take, tree, worker_for
from sql import End, attempts, claim, exchange, lose, one, resolve, rows, settle, violations

Conn = psycopg.Connection[Any]


@pytest.fixture
def few(conn: Conn) -> None:
    """Few are many here: so many items get their job in one transaction, of a run that was reopened one less."""
    conn.execute(
        "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
        " as 'select case when p_run.generation = 0 then 3 else 2 end'"
    )


def carry_on(conn: Conn) -> list[UUID]:
    found = rows(conn, "select run_id, answer from taskq.carry_on_run()")
    assert {row["answer"] for row in found} <= {"carried on"}
    return [row["run_id"] for row in found]


def fails_at(*items: Any) -> Any:
    return lambda item: ("failed", f"no {item}") if item in items else doubled(item)


def error_of(conn: Conn, made: Mapped, ix: int = 1) -> dict[str, Any]:
    return dict(one(conn, "select error from taskq.nodes where run_id = %s and ix = %s", made.run, ix))


def retry_run(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.retry_run(%s, 'fixed', 'me')", run))


# Items ----------------------------------------------------------------------------------------------------------------


def test_each_item_gets_a_job_and_the_results_come_in_their_order(conn: Conn) -> None:
    made = mapped(conn, [10, 11, 12])
    claims = {json.loads(row["payload"])["x"]: row for row in claim(conn, made.worker, 3, tasks=["each"])}
    assert [json.loads(row["payload"]) for row in claims.values()] == [{"x": x, "k": 7} for x in (10, 11, 12)]
    assert violations(conn) == []
    for item in (12, 10, 11):
        finish(conn, made.worker, claims[item], result=2 * item)
    assert given(conn, made) == [20, 22, 24]
    assert violations(conn) == []


def test_an_item_is_a_node_under_the_name_of_its_map(conn: Conn) -> None:
    made = mapped(conn, ["a", "b"])
    child = child_of(conn, made.run)
    assert tree(conn, child) == {"each[0]": "pending", "each[1]": "pending"}
    meta = one(conn, "select meta from taskq.jobs where id = %s", job_of(conn, child, "each[1]"))
    assert meta["run"] == {"id": str(child), "workflow": "flow:each", "node": "each[1]"}
    assert rows(conn, "select ix, item from taskq.nodes where run_id = %s order by ix", child) == [
        {"ix": 0, "item": "a"},
        {"ix": 1, "item": "b"},
    ]
    assert (info(conn, child)["input"], info(conn, child)["items"]) == ({"k": 7}, 2)


def test_of_an_empty_list_the_fan_in_runs_at_once(conn: Conn) -> None:
    made = mapped(conn, [])
    assert ends(conn, made, 1, doubled) == []
    assert given(conn, made) == []
    assert violations(conn) == []


def test_a_part_of_a_result_is_mapped(conn: Conn) -> None:
    made = mapped(conn, {"rows": [1]}, path=("rows",))
    all_end(conn, made)
    assert given(conn, made) == [2]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": 1}, "an object"),
        ("ab", "a text"),
        (3, "a number"),
        (True, "a boolean"),
        (None, "null"),
    ],
)
def test_what_is_no_list_fails_the_node_and_says_so(conn: Conn, value: Any, says: str) -> None:
    made = mapped(conn, value)
    assert error_of(conn, made)["type"] == "NotAList"
    assert error_of(conn, made)["message"].startswith(f"a map was given {says}; It takes a list")
    assert tree(conn, made.run) == {"first": "succeeded", "each": "failed", "last": "blocked"}
    assert info(conn, made.run)["status"] == "failed"
    assert violations(conn) == []


def test_more_items_than_declared_fail_the_node_and_say_so(conn: Conn) -> None:
    made = mapped(conn, [1, 2, 3], most=2)
    assert error_of(conn, made)["type"] == "TooManyItems"
    assert "a map was given 3 items, its limit is 2" in error_of(conn, made)["message"]
    assert info(conn, made.run)["status"] == "failed"
    assert violations(conn) == []


def test_as_many_items_as_declared_are_taken(conn: Conn) -> None:
    made = mapped(conn, [1, 2], most=2)
    all_end(conn, made)
    assert given(conn, made) == [2, 4]


def test_results_are_there_only_once_all_have_succeeded(conn: Conn) -> None:
    """What takes them of a map that failed is skipped where it may be."""
    made = mapped(conn, [1, 2], policy="skip", on_failure="finish")
    all_end(conn, made, fails_at(2))
    assert given(conn, made) is None
    assert tree(conn, made.run) == {"first": "succeeded", "each": "failed", "last": "skipped"}
    child = one(conn, "select taskq.evaluate(%s, '{\"results\": 1}')", made.run)
    assert child is None


@pytest.mark.parametrize("takes", ["results", "outcomes"])
def test_results_that_are_too_large_together_fail_who_takes_them(conn: Conn, takes: str) -> None:
    made = mapped(conn, ["x" * 10] * 5, takes=takes)
    all_end(conn, made, lambda item: ("succeeded", item))
    conn.execute("update taskq.installation set max_payload_bytes = 50")
    do(conn, made.worker, MAP, result=5)
    error = error_of(conn, made, 2)
    assert error["type"] == "ResultsTooLarge"
    assert "tally()" in error["message"]
    assert tree(conn, made.run) == {"first": "succeeded", "each": "succeeded", "last": "failed"}
    assert violations(conn) == []


def test_the_result_of_a_run_that_is_too_large_fails_it_and_says_so(conn: Conn) -> None:
    made = mapped(conn, ["x" * 10] * 5, takes="tally", result={"results": 1, "path": []})
    all_end(conn, made, lambda item: ("succeeded", item))
    given(conn, made)
    conn.execute("update taskq.installation set max_payload_bytes = 50")
    end_last(conn, made)
    assert info(conn, made.run)["error"]["type"] == "ResultsTooLarge"


def test_the_result_of_one_child_is_taken_by_its_number(conn: Conn) -> None:
    made = mapped(conn, ["x" * 10] * 5, result={"list": [{"results": 1, "path": [p]} for p in (2, 9)]})
    all_end(conn, made, lambda item: ("succeeded", item))
    given(conn, made)
    end_last(conn, made)
    assert info(conn, made.run)["result"] == ["x" * 10, None]


# In portions ----------------------------------------------------------------------------------------------------------


def test_no_more_children_have_jobs_than_are_let(conn: Conn) -> None:
    made = mapped(conn, list(range(10)), at_once=3)
    child = child_of(conn, made.run)
    seen = []
    while claims := claim(conn, made.worker, 10, tasks=["each"]):
        assert len(claims) <= 3
        assert one(conn, "select count(*) from taskq.jobs where run_id = %s", child) == len(claims)
        assert violations(conn) == []
        seen += [json.loads(each["payload"])["x"] for each in claims]
        finish(conn, made.worker, claims[0], result=1)
        exchange(conn, made.worker, [End(each["job_id"], each["claim_epoch"], "succeeded") for each in claims[1:]])
    assert seen == list(range(10))
    assert info(conn, child)["status"] == "succeeded"


def test_the_end_of_one_lets_the_next_begin(conn: Conn) -> None:
    made = mapped(conn, list(range(5)), at_once=2)
    assert ends(conn, made, 1, doubled) == [0]
    assert ends(conn, made, 9, doubled) == [1, 2]
    got = progress(conn, made)
    assert (got["name"], got["status"], got["items"], got["at_once"]) == ("each", "running", 5, 2)
    assert (got["unwritten"], got["waiting"], got["active"], got["succeeded"]) == (0, 0, 2, 3)


def test_nodes_are_written_a_little_ahead_of_their_jobs(conn: Conn) -> None:
    made = mapped(conn, list(range(2500)))
    child = child_of(conn, made.run)
    assert (info(conn, child)["active"], info(conn, child)["written"], due(conn, child)) == (1000, 2000, 1000)
    assert info(conn, child)["open_nodes"] == 2500
    assert violations(conn) == []
    assert carry_on(conn) == []
    assert all_end(conn, made, portion=900) == 2500
    assert given(conn, made) == [2 * x for x in range(2500)]
    assert violations(conn) == []


def test_no_transaction_of_ten_thousand_children_does_more_than_a_portion(dsn: str) -> None:
    """Of what is written: jobs that go and those that come in their place, and the nodes of both and some ahead."""
    with psycopg.connect(dsn) as conn:
        made = mapped(conn, list(range(10_000)))
        n = 0
        while True:
            conn.commit()
            before = written(conn, "jobs", "nodes", "runs")
            got = ends(conn, made, 500, doubled)
            if not got:
                break
            n += len(got)
            wrote = {
                name: count - before.get(name, 0) for name, count in written(conn, "jobs", "nodes", "runs").items()
            }
            assert wrote["jobs"] <= 4 * 500
            assert wrote["nodes"] <= 1000 + 4 * 500
            assert wrote["runs"] <= 8
        assert n == 10_000
        assert given(conn, made) == [2 * x for x in range(10_000)]
        assert violations(conn) == []


def test_ends_write_as_much_of_a_large_map_as_of_a_small_one(dsn: str) -> None:
    """The rows that an end writes do not grow with the number of items."""
    tables = ("runs", "nodes", "jobs", "receipts")
    wrote: dict[int, list[dict[str, int]]] = {}
    with psycopg.connect(dsn) as conn:
        for n in (200, 10_000):
            made = mapped(conn, list(range(n)), at_once=20)
            wrote[n] = []
            for _ in range(4):
                conn.commit()
                before = written(conn, *tables)
                assert len(ends(conn, made, 20, doubled)) == 20
                wrote[n].append({name: count - before.get(name, 0) for name, count in written(conn, *tables).items()})
            assert one(conn, "select taskq.cancel_run(%s)", made.run) == "cancelled"
            conn.commit()
        assert wrote[10_000] == wrote[200]
        assert violations(conn) == []


def written(conn: Conn, *tables: str) -> dict[str, int]:
    """How many rows of these tables this connection has written; counts may outlast a transaction."""
    found = rows(
        conn,
        "select relname, n_tup_ins + n_tup_upd + n_tup_del as n from pg_stat_xact_all_tables"
        " where schemaname = 'taskq' and relname = any(%s)",
        list(tables),
    )
    return {row["relname"]: row["n"] for row in found}


def test_a_map_is_carried_on_where_a_transaction_makes_fewer_jobs_than_are_let(conn: Conn, few: None) -> None:
    made = mapped(conn, list(range(8)), at_once=7)
    child = child_of(conn, made.run)
    assert info(conn, child)["active"] == 3
    assert carry_on(conn) == [child]
    assert info(conn, child)["active"] == 6
    assert violations(conn) == []
    assert carry_on(conn) == [child]
    assert info(conn, child)["active"] == 7
    assert carry_on(conn) == []
    assert all_end(conn, made) == 8
    assert kinds(conn, child)[:4] == ["admitted", "ready", "ready", "ready"]


def test_maps_that_begin_together_are_left_to_who_carries_them_on(conn: Conn) -> None:
    worker = worker_for(conn)
    bounds = {"item": "x", "most": 10, "at_once": 10}
    inner = store(conn, [node("each", {"x": {"input": "x"}})], workflow="flow:each", map=bounds, parameters=["x"])
    over = {"x": {"value": [1, 2]}}
    run = start(conn, store(conn, [node(name, over, task=MAP, child=inner) for name in ("m", "n")]))
    assert claim(conn, worker, 10, tasks=["each"]) == []
    assert violations(conn) == []
    assert len(carry_on(conn) + carry_on(conn)) == 2
    assert carry_on(conn) == []
    claims = claim(conn, worker, 10, tasks=["each"])
    exchange(conn, worker, [End(each["job_id"], each["claim_epoch"], "succeeded") for each in claims])
    assert len(claims) == 4
    claims = claim(conn, worker, 10, tasks=[MAP])
    exchange(conn, worker, [End(each["job_id"], each["claim_epoch"], "succeeded") for each in claims])
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_items_whose_jobs_cannot_be_made_do_not_keep_the_others_from_theirs(conn: Conn, few: None) -> None:
    made = mapped(conn, [1, 2, "long" * 30, "long" * 30, 5, 6], on_failure="finish", at_once=2)
    conn.execute("update taskq.installation set max_payload_bytes = 60")
    child = child_of(conn, made.run)
    for _ in range(5):
        ends(conn, made, 10, doubled)
        carry_on(conn)
    assert list(tree(conn, child).values()) == ["succeeded"] * 2 + ["failed"] * 2 + ["succeeded"] * 2
    assert info(conn, child)["status"] == "failed"
    assert violations(conn) == []


@pytest.mark.parametrize("on_failure", ["cancel", "finish"])
def test_a_transition_reads_what_it_changes_and_not_the_whole_map(dsn: str, on_failure: str) -> None:
    """Also where the statistics say that the tables are empty."""
    with psycopg.connect(dsn) as conn:
        # As an analyze leaves it that came while the first rows were being written: pages, and nothing in them.
        conn.execute("update pg_class set reltuples = 0, relpages = 8 where relnamespace = 'taskq'::regnamespace")
        others = nodes_of_others(conn, 150_000)
        made = mapped(conn, list(range(6000)), at_once=100, on_failure=on_failure)
        # As after a retry of many, whose nodes all wait for their turn.
        one(conn, "select taskq.write_items(%s, 5000)", child_of(conn, made.run))
        for act, most in (
            (lambda: ends(conn, made, 50, doubled), 50 * 50),
            (lambda: ends(conn, made, 50, fails_at(70)), 20 * 6000 if on_failure == "cancel" else 50 * 50),
            (lambda: one(conn, "select taskq.cancel_run(%s)", made.run), 20 * 6000),
        ):
            # What is not committed yet is not there for an autovacuum that would count rows meanwhile.
            conn.commit()
            before = looked_at(conn)
            act()
            assert looked_at(conn) - before < most
        conn.execute("delete from taskq.nodes where run_id = %s", (others,))
        assert violations(conn) == []


def looked_at(conn: Conn) -> int:
    """How many rows of nodes this transaction has read."""
    return int(
        one(
            conn,
            "select sum(pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid))"
            " from pg_class c where c.oid = 'taskq.nodes'::regclass"
            " or c.oid in (select indexrelid from pg_index where indrelid = 'taskq.nodes'::regclass)",
        )
    )


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_failure_stops_the_rest_and_blocks_what_follows(conn: Conn) -> None:
    made = mapped(conn, list(range(3000)))
    child = child_of(conn, made.run)
    ends(conn, made, 5, fails_at(3))
    assert [
        row["n"] for row in rows(conn, "select n from taskq.receipts where kind = 'ready' and run_id = %s", child)
    ] == [1000]
    assert info(conn, child)["status"] == "failed"
    assert info(conn, child)["error"]["node"] == "each[3]"
    got = progress(conn, made)
    assert (got["succeeded"], got["failed"], got["cancelled"], got["unwritten"]) == (4, 1, 1995, 1000)
    assert (got["waiting"], got["active"]) == (0, 0)
    assert violations(conn) == []
    assert given(conn, made) is None
    assert tree(conn, made.run) == {"first": "succeeded", "each": "failed", "last": "blocked"}
    assert violations(conn) == []


@pytest.mark.parametrize(("effect_class", "lost"), [("pure", "cancelled"), ("idempotent", "unknown")])
def test_the_lost_item_of_a_map_that_stops_is_not_run_again(conn: Conn, effect_class: str, lost: str) -> None:
    """One fails for good, one runs on a worker that is lost, one waits: none of them is queued again, or starts."""
    made = mapped(conn, [0, 1, 2], item={"effect_class": effect_class, "max_attempts": 3})
    child, other = child_of(conn, made.run), worker_for(conn)
    waits = job_of(conn, child, "each[2]")
    [failing] = claim(conn, made.worker, 1, tasks=["each"])
    [claimed] = claim(conn, other, 1, tasks=["each"])
    finish(conn, made.worker, failing, "failed")
    assert tree(conn, child) == {"each[0]": "failed", "each[1]": "running", "each[2]": "cancelled"}
    assert info(conn, child)["status"] == "running"
    lose(conn, other)
    assert settle(conn) == {claimed["job_id"]: lost}
    if lost == "unknown":
        # What it did is not made up: somebody who has looked says so.
        assert (tree(conn, child)["each[1]"], info(conn, child)["status"]) == ("unknown", "recovering")
        assert resolve(conn, claimed["job_id"], happened=False) == "cancelled"
    assert (tree(conn, child)["each[1]"], info(conn, child)["status"]) == ("cancelled", "failed")
    assert given(conn, made) is None
    assert info(conn, made.run)["status"] == "failed"
    for look in ("sweep()", "settle_lost()", "heal_runs()", "carry_on_run()"):
        assert rows(conn, f"select * from taskq.{look}") == []
    assert one(conn, "select count(*) from taskq.jobs") == 0
    assert attempts(conn, waits) == []
    assert one(conn, "select count(*) from taskq.nodes where finished_at is null") == 0
    assert violations(conn) == []


def test_what_collects_gets_the_outcome_of_each_and_runs(conn: Conn) -> None:
    made = mapped(conn, [1, 2, 3], on_failure="finish", takes="outcomes", policy="collect")
    all_end(conn, made, fails_at(2))
    got = given(conn, made)
    assert [(each["node"], each["status"], each["value"]) for each in got] == [
        ("each[0]", "succeeded", 2),
        ("each[1]", "failed", None),
        ("each[2]", "succeeded", 6),
    ]
    assert [each["error"] and each["error"]["message"] for each in got] == [None, "no 2", None]
    end_last(conn, made)
    assert info(conn, made.run)["status"] == "succeeded"
    assert violations(conn) == []


def test_of_many_failures_the_first_are_told_whole_and_all_are_counted(conn: Conn) -> None:
    made = mapped(conn, list(range(150)), on_failure="finish", takes="outcomes", policy="collect")
    all_end(conn, made, lambda item: ("failed", f"{item} " + "x" * 300))
    got = given(conn, made)
    assert {each["status"] for each in got} == {"failed"}
    assert [len(each["error"]["message"]) > 300 for each in got] == [True] * 100 + [False] * 50
    assert {each["error"]["type"] for each in got} == {"Boom"}


def test_a_tally_counts_all_and_tells_a_hundred_failures(conn: Conn) -> None:
    made = mapped(conn, list(range(150)), on_failure="finish", takes="tally", policy="collect")
    all_end(conn, made, lambda item: ("failed", "x") if item % 5 else doubled(item))
    got = given(conn, made)
    failures = got.pop("failures")
    assert got == {"total": 150, "succeeded": 30, "failed": 120, "cancelled": 0}
    assert [each["node"] for each in failures] == [f"each[{n}]" for n in range(125) if n % 5][:100]


@pytest.mark.parametrize("takes", ["outcomes", "tally"])
def test_what_collects_is_told_of_a_map_that_did_not_begin(conn: Conn, takes: str) -> None:
    made = mapped(conn, "no list", on_failure="finish", takes=takes, policy="collect")
    [last] = claim(conn, made.worker, 1, tasks=["last"])
    got = json.loads(last["payload"])["got"]
    if takes == "tally":
        assert (got["total"], got["failed"]) == (0, 0)
        got = got["failures"]
    assert [(each["node"], each["status"], each["error"]["type"]) for each in got] == [("each", "failed", "NotAList")]


def test_what_collects_is_told_of_items_that_did_not_begin(conn: Conn) -> None:
    made = mapped(conn, list(range(3)), at_once=1, on_failure="finish", takes="tally", policy="collect")
    child = child_of(conn, made.run)
    ends(conn, made, 1, doubled)
    unwrite(conn, child, 2)
    assert one(conn, "select taskq.cancel_run(%s)", child) == "cancelled"
    do(conn, made.worker, MAP, "failed")
    got = json.loads(claim(conn, made.worker, 1, tasks=["last"])[0]["payload"])["got"]
    assert (got["succeeded"], got["cancelled"]) == (1, 2)
    assert got["failures"][-1]["error"] == {"type": "Cancelled", "message": "it had not begun"}


# Cancelling and retrying ----------------------------------------------------------------------------------------------


def test_cancelling_the_run_cancels_all_items_in_one_transaction(conn: Conn) -> None:
    made = mapped(conn, list(range(3000)))
    ends(conn, made, 5, doubled)
    assert one(conn, "select taskq.cancel_run(%s, 'enough')", made.run) == "cancelled"
    child = child_of(conn, made.run)
    assert (info(conn, child)["status"], info(conn, made.run)["status"]) == ("cancelled", "cancelled")
    assert one(conn, "select count(*) from taskq.jobs where task = 'each'") == 0
    got = progress(conn, made)
    assert (got["succeeded"], got["cancelled"], got["unwritten"], got["active"]) == (5, 1995, 1000, 0)
    assert carry_on(conn) == []
    assert violations(conn) == []


def test_a_body_that_runs_keeps_a_cancelled_map_open_and_nothing_new_begins(conn: Conn) -> None:
    made = mapped(conn, list(range(10)), at_once=2)
    [claimed] = claim(conn, made.worker, 1, tasks=["each"])
    assert one(conn, "select taskq.cancel_run(%s)", made.run) == "requested"
    child = child_of(conn, made.run)
    assert (info(conn, child)["open_nodes"], info(conn, child)["active"]) == (1, 1)
    assert violations(conn) == []
    finish(conn, made.worker, claimed, result=1)
    assert info(conn, child)["status"] == "cancelled"
    assert claim(conn, made.worker, 10, tasks=["each"]) == []
    assert violations(conn) == []


def test_a_map_whose_items_had_no_nodes_when_it_was_cancelled_is_cancelled(conn: Conn) -> None:
    """Not succeeded, although each node that it has is."""
    made = mapped(conn, list(range(1500)), at_once=1000)
    child = child_of(conn, made.run)
    unwrite(conn, child, 1000)
    claims = claim(conn, made.worker, 1000, tasks=["each"])
    assert one(conn, "select taskq.cancel_run(%s)", made.run) == "requested"
    exchange(conn, made.worker, [End(each["job_id"], each["claim_epoch"], "succeeded") for each in claims])
    assert info(conn, child)["status"] == "cancelled"
    assert violations(conn) == []


def test_retrying_runs_again_what_failed_and_what_had_not_begun(conn: Conn) -> None:
    made = mapped(conn, list(range(3000)))
    child = child_of(conn, made.run)
    ends(conn, made, 5, fails_at(3))
    given(conn, made)
    assert retry_run(conn, made.run) == "reopened"
    assert violations(conn) == []
    again: list[int] = []
    while got := ends(conn, made, 200, doubled) or carry_on(conn):
        again += [each for each in got if isinstance(each, int)]
    assert sorted(again) == [3, *range(5, 3000)]
    assert given(conn, made) == [2 * x for x in range(3000)]
    end_last(conn, made)
    assert info(conn, made.run)["status"] == "succeeded"
    assert rows(conn, "select id from taskq.runs where parent_run = %s", made.run) == [{"id": child}]
    assert violations(conn) == []


def test_retrying_one_of_which_only_items_without_nodes_are_left_writes_them(conn: Conn) -> None:
    made = mapped(conn, list(range(3)), at_once=2)
    child = child_of(conn, made.run)
    unwrite(conn, child, 2)
    claims = claim(conn, made.worker, 2, tasks=["each"])
    one(conn, "select taskq.cancel_run(%s)", made.run)
    exchange(conn, made.worker, [End(each["job_id"], each["claim_epoch"], "succeeded", result=5) for each in claims])
    do(conn, made.worker, MAP, "cancelled")
    assert info(conn, made.run)["status"] == "cancelled"
    assert retry_run(conn, made.run) == "reopened"
    assert violations(conn) == []
    assert carry_on(conn) == [child]
    assert ends(conn, made, 5, doubled) == [2]
    assert given(conn, made) == [5, 5, 4]


def unwrite(conn: Conn, child: UUID, n: int) -> None:
    """As if only the first ``n`` items had nodes yet."""
    conn.execute("delete from taskq.nodes where run_id = %s and ix >= %s", (child, n))
    conn.execute("update taskq.runs set written = %s where id = %s", (n, child))


def reopened_with(conn: Conn, items: list[Any]) -> tuple[Mapped, UUID]:
    """A map of which the second item failed, and whose source gives something else by the time that it is retried."""
    made = mapped(conn, [1, 2, 3])
    child = child_of(conn, made.run)
    claims = claim(conn, made.worker, 3, tasks=["each"])
    finish(conn, made.worker, claims[0], result=2)
    finish(conn, made.worker, claims[1], "failed")
    finish(conn, made.worker, claims[2], result=6)
    given(conn, made)
    conn.execute("update taskq.nodes set result = %s where run_id = %s and ix = 0", (json.dumps(items), made.run))
    assert retry_run(conn, made.run) == "reopened"
    return made, child


def test_children_that_run_again_get_the_items_of_now(conn: Conn) -> None:
    made, child = reopened_with(conn, [1, 20, 3, 4])
    assert info(conn, child)["items"] == 4
    assert carry_on(conn) == [child]
    assert ends(conn, made, 5, doubled) == [20, 4]
    assert given(conn, made) == [2, 40, 6, 8]
    assert violations(conn) == []


@pytest.mark.parametrize("items", [[1, 2], [10, 2, 3]])
def test_children_that_have_succeeded_keep_their_items(conn: Conn, items: list[Any]) -> None:
    with pytest.raises(psycopg.Error, match="node each is failed: map .* with other items") as caught:
        reopened_with(conn, items)
    assert caught.value.sqlstate == "WF026"


# Undoing --------------------------------------------------------------------------------------------------------------


def test_each_child_that_succeeded_is_undone_by_the_run_of_the_map(conn: Conn) -> None:
    undo = effect("undo", EVERY, task="undo", payload={"what": {"of": "result"}})
    made = mapped(conn, [1, 2, 3], on_failure="finish", compensate=undo)
    all_end(conn, made, fails_at(2))
    assert rows(conn, "select * from taskq.effects") == []
    given(conn, made)
    assert info(conn, made.run)["status"] == "failed"
    found = rows(conn, "select owner_task, name from taskq.effects order by id")
    assert found == [{"owner_task": "each", "name": "compensate:0:undo"}] * 2
    jobs = rows(conn, "select payload, ordering_key from taskq.jobs where task = 'undo' order by id")
    assert [row["payload"] for row in jobs] == [{"what": 6}, {"what": 2}]
    assert {row["ordering_key"] for row in jobs} == {f"run:{made.run}"}
    assert violations(conn) == []
    [first] = claim(conn, made.worker, 5, tasks=["undo"])
    finish(conn, made.worker, first)
    with pytest.raises(psycopg.Error, match="compensations that have undone its work"), conn.transaction():
        retry_run(conn, made.run)


def test_children_of_a_map_that_succeeded_are_undone_with_the_rest(conn: Conn) -> None:
    undo = effect("undo", EVERY, task="undo", payload={})
    made = mapped(conn, [1, 2], compensate=undo)
    all_end(conn, made)
    given(conn, made)
    end_last(conn, made, "failed")
    assert one(conn, "select count(*) from taskq.jobs where task = 'undo'") == 2
    assert violations(conn) == []
    [key] = rows(conn, "select effect_key, job_id from taskq.effects order by id limit 1")
    [first] = claim(conn, made.worker, 5, tasks=["undo"])
    finish(conn, made.worker, first, "failed")
    one(conn, "select taskq.retry_effect(%s, 'again')", key["effect_key"])
    assert violations(conn) == []
    [next_] = claim(conn, made.worker, 1, tasks=["undo"])
    finish(conn, made.worker, next_)
    with pytest.raises(psycopg.Error, match="compensations that have undone its work"), conn.transaction():
        retry_run(conn, made.run)


def test_a_run_is_kept_until_what_undoes_its_children_is_settled(conn: Conn) -> None:
    undo = effect("undo", EVERY, task="undo", payload={})
    made = mapped(conn, [1, 2], on_failure="finish", compensate=undo)
    all_end(conn, made, fails_at(2))
    given(conn, made)
    conn.execute("update taskq.runs set finished_at = taskq.now() - interval '1 year'")
    assert one(conn, "select taskq.prune_runs()") == 0
    do(conn, made.worker, "undo")
    assert one(conn, "select taskq.prune_runs()") == 1
    assert one(conn, "select taskq.prune_runs()") == 1
    assert one(conn, "select count(*) from taskq.nodes") == 0


# Nested ---------------------------------------------------------------------------------------------------------------


def test_each_item_may_be_a_run_with_a_map_of_its_own(conn: Conn) -> None:
    """For each of the lists a child run that maps over it."""
    worker = worker_for(conn)
    deep = plan_of(conn, workflow="deep", result={"results": 1, "path": []})
    bounds = {"item": "n", "most": 10, "at_once": 10}
    child = node("deep", {"n": {"input": "n"}}, task="deep:await", child=deep)
    over = store(conn, [child], workflow="flow:deep", map=bounds, parameters=["n"])
    all_of = node("all", {"n": {"value": ["a", "b"]}}, task=MAP, child=over)
    run = start(conn, store(conn, [all_of, node("end", {"got": {"results": 0}})], [edge(0, 1)]))
    firsts = claim(conn, worker, 10, tasks=["first"])
    assert len(firsts) == 2
    told = [[1, 2], []]
    for each, items in zip(firsts, told, strict=True):
        finish(conn, worker, each, result=items)
    assert violations(conn) == []
    while carry_on(conn):
        pass
    made = Mapped(run, worker)
    assert sorted(ends(conn, made, 10, doubled)) == [1, 2]
    for task in (MAP, "last", "deep:await"):
        for each in claim(conn, worker, 10, tasks=[task]):
            result = (
                one(conn, "select result from taskq.runs where parent_node = %s", each["job_id"])
                if task != "last"
                else 0
            )
            finish(conn, worker, each, result=result)
    do(conn, worker, MAP, result=2)
    assert json.loads(take(conn, worker, "end")["end"]["payload"]) == {"got": [[2, 4], []]}
    assert violations(conn) == []


# Healing --------------------------------------------------------------------------------------------------------------


def test_a_child_whose_job_is_nowhere_gets_it_again(conn: Conn) -> None:
    made = mapped(conn, [1, 2])
    child = child_of(conn, made.run)
    conn.execute("delete from taskq.jobs where id = %s", (job_of(conn, child, "each[1]"),))
    assert [code for code, _ in violations(conn)] == ["node_job_missing"]
    assert rows(conn, "select answer from taskq.heal_runs()") == [{"answer": "healed"}]
    assert violations(conn) == []
    all_end(conn, made)
    assert given(conn, made) == [2, 4]


def test_a_map_that_counts_wrong_is_counted_anew(conn: Conn) -> None:
    made = mapped(conn, [1, 2, 3], at_once=2)
    child = child_of(conn, made.run)
    conn.execute("update taskq.runs set active = 0, open_nodes = 9 where id = %s", (child,))
    assert one(conn, "select taskq.heal_run(%s)", child) == "healed"
    assert violations(conn) == []
    assert one(conn, "select taskq.heal_run(%s)", child) == "sound"
    all_end(conn, made)
    assert given(conn, made) == [2, 4, 6]


@pytest.mark.parametrize(
    "map_",
    [
        {"item": "y", "most": 1, "at_once": 1},
        {"most": 1, "at_once": 1},
        {"item": "x", "at_once": 1},
        {"item": "x", "most": 0, "at_once": 1},
        {"item": "x", "most": 100_001, "at_once": 1},
        {"item": "x", "most": 1, "at_once": 10_001},
        {"item": "x", "most": 1},
        [1],
    ],
)
def test_a_plan_of_a_map_that_cannot_run_is_refused(conn: Conn, map_: Any) -> None:
    with pytest.raises(psycopg.Error, match="its map is not valid") as caught, conn.transaction():
        store(conn, [node("each", {"x": {"input": "x"}})], map=map_, parameters=["x"])
    assert caught.value.sqlstate == "WF024"


def test_a_plan_counts_what_may_have_jobs_at_a_time(conn: Conn) -> None:
    bounds = {"item": "x", "most": 100_000, "at_once": 10_000}
    wide = store(conn, [node("each", {"x": {"input": "x"}})], workflow="w", map=bounds, parameters=["x"])
    over: dict[str, Any] = {"x": {"value": []}}
    store(conn, [node(f"m{n}", over, task="t", child=wide) for n in range(9)])
    with pytest.raises(psycopg.Error, match="has 1 levels and 100010 nodes at a time"), conn.transaction():
        store(conn, [node(f"m{n}", over, task="t", child=wide) for n in range(10)])

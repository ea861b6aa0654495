"""Emits: items that a source gives page by page; the items of each commit with its cursor and with what follows."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from effects_kit import effect
from emits_kit import asked, emitted, page, pages
from maps_kit import all_end, child_of, doubled, end_last, ends, given, progress
from runs_kit import do, finish, info, kinds, take, tree
from sql import End, claim, exchange, one, rows, violations

Conn = psycopg.Connection[Any]


def test_pages_give_items_until_the_last_one(conn: Conn) -> None:
    made = emitted(conn)
    assert page(conn, made, [1, 2], "a") == {"cursor": None, "root": "here"}
    assert page(conn, made, [3], {"at": 3}) == {"cursor": "a", "root": "here"}
    assert asked(conn, made) is None, "more than two items are open"
    [claimed] = claim(conn, made.worker, 1, tasks=["each"])
    assert json.loads(claimed["payload"]) == {"x": 1, "k": 7}
    finish(conn, made.worker, claimed, result=2)
    assert violations(conn) == []
    assert page(conn, made, []) == {"cursor": {"at": 3}, "root": "here"}
    assert asked(conn, made) is None
    all_end(conn, made)
    assert given(conn, made) == [2, 4, 6]
    end_last(conn, made)
    assert info(conn, made.run)["status"] == "succeeded"
    assert violations(conn) == []
    assert tree(conn, child_of(conn, made.run)) == {f"each[{n}]": "succeeded" for n in range(3)} | {
        f"each.page[{n}]": "succeeded" for n in range(3)
    }


def test_the_end_of_a_page_writes_its_items_its_cursor_and_the_next_page_at_once(conn: Conn) -> None:
    made = emitted(conn)
    child = child_of(conn, made.run)
    page(conn, made, ["a", "b"], 2)
    found = rows(conn, "select ix, item from taskq.nodes where run_id = %s order by ix", child)
    assert [(row["ix"], row["item"]) for row in found] == [
        (0, "a"),
        (1, "b"),
        (1_000_000, {"cursor": None, "first": 0, "n": 2, "next": 2, "last": False}),
        (1_000_001, {"cursor": 2}),
    ]
    assert one(conn, "select count(*) from taskq.jobs where run_id = %s", child) == 3
    assert kinds(conn, child) == ["admitted", "ready", "ended", "ready", "ready"]
    assert progress(conn, made) | {"map_run": None, "created_at": None} == {
        "run_id": made.run, "ix": 1, "name": "each", "map_run": None, "status": "running", "created_at": None,
        "finished_at": None, "items": 2, "at_once": 1000, "unwritten": 0, "waiting": 0, "active": 2, "succeeded": 0,
        "failed": 0, "cancelled": 0, "pages": 2, "source": "asked",
    }  # fmt: skip


def test_the_end_that_brings_the_open_items_down_asks_for_the_next_page(conn: Conn) -> None:
    made = emitted(conn, ahead=1, at_once=2)
    page(conn, made, [1, 2, 3, 4], "more")
    assert (progress(conn, made)["source"], asked(conn, made)) == ("again", None)
    for left in (3, 2):
        assert len(ends(conn, made, 1, doubled)) == 1
        assert asked(conn, made) is None, f"{left} items are open"
    assert violations(conn) == []
    ends(conn, made, 1, doubled)
    assert progress(conn, made)["active"] == 1
    page(conn, made, [5])
    all_end(conn, made)
    assert given(conn, made) == [2, 4, 6, 8, 10]
    assert violations(conn) == []


def test_a_page_has_its_job_beside_the_items_that_may_have_one(conn: Conn) -> None:
    made = emitted(conn, at_once=1, ahead=10)
    page(conn, made, [1, 2], "a")
    claimed = asked(conn, made)
    assert claimed is not None
    [item] = claim(conn, made.worker, 5, tasks=["each"])
    finish(conn, made.worker, item, result=2)
    assert len(claim(conn, made.worker, 5, tasks=["each"])) == 1, "beside the page that still runs"
    finish(conn, made.worker, claimed, result={"items": [3], "cursor": None})
    assert claim(conn, made.worker, 5, tasks=["each"]) == [], "one at a time"
    assert progress(conn, made)["waiting"] == 1
    assert violations(conn) == []


def test_of_more_items_than_one_transaction_makes_jobs_the_leader_makes_the_rest(conn: Conn) -> None:
    conn.execute(
        "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
        " as 'select 2'"
    )
    made = emitted(conn, ahead=0)
    page(conn, made, list(range(5)))
    assert progress(conn, made)["active"] == 2
    for active in (4, 5):
        assert one(conn, "select answer from taskq.carry_on_run()") == "carried on"
        assert progress(conn, made)["active"] == active
    assert rows(conn, "select * from taskq.carry_on_run()") == []
    assert violations(conn) == []


def test_a_source_that_has_nothing_gives_an_empty_list(conn: Conn) -> None:
    made = emitted(conn)
    page(conn, made, [], 1)
    page(conn, made, [])
    assert given(conn, made) == []
    assert violations(conn) == []


@pytest.mark.parametrize(
    ("result", "type_", "says"),
    [
        ([1], "NotAPage", "a source gave a list;"),
        ({"cursor": 1}, "NotAPage", "an object without a list of items"),
        (None, "NotAPage", "a source gave nothing;"),
        ({"items": [1, 2, 3], "cursor": None}, "TooManyItems", "has 4 items, its limit is 3"),
        ({"items": list(range(10_001)), "cursor": None}, "PageTooLarge", "a page has 10001 items, the limit is 10000"),
        ({"items": [], "cursor": "c"}, "CursorStands", 'no items and the cursor that it was asked for with, "c"'),
    ],
)
def test_a_page_that_cannot_be_taken_fails_the_emit_and_says_why(
    conn: Conn, result: Any, type_: str, says: str
) -> None:
    """What was emitted is stopped; a retry asks again with the cursor of that page."""
    made = emitted(conn, most=3)
    child = child_of(conn, made.run)
    page(conn, made, [1], "c")
    [claimed] = take(conn, made.worker, "list").values()
    finish(conn, made.worker, claimed, result=result)
    failed = info(conn, child)
    assert (failed["status"], failed["error"]["type"], failed["error"]["node"]) == ("failed", type_, "each.page[1]")
    assert says in failed["error"]["message"]
    assert tree(conn, child) == {"each[0]": "cancelled", "each.page[0]": "succeeded", "each.page[1]": "succeeded"}
    do(conn, made.worker, "flow:await", "failed")
    assert violations(conn) == []
    assert one(conn, "select taskq.retry_run(%s, 'fixed', 'me')", made.run) == "reopened"
    assert one(conn, "select answer from taskq.carry_on_run()") == "carried on"
    assert page(conn, made, [2]) == {"cursor": "c", "root": "here"}
    all_end(conn, made)
    assert given(conn, made) == [2, 4]
    assert violations(conn) == []


def test_pages_are_bounded_in_number(conn: Conn) -> None:
    made = emitted(conn)
    child = child_of(conn, made.run)
    fault = one(
        conn,
        "select taskq.page_fault(jsonb_populate_record(r, '{\"pages\": 100000}'), p.map, '1', %s)"
        " from taskq.runs r join taskq.plans p on p.hash = r.plan_hash where r.id = %s",
        json.dumps({"items": [], "cursor": 2}),
        child,
    )
    assert (fault["type"], "100000 pages" in fault["message"]) == ("TooManyPages", True)


# Failures -------------------------------------------------------------------------------------------------------------


def test_a_child_that_fails_stops_the_source(conn: Conn) -> None:
    made = emitted(conn)
    child = child_of(conn, made.run)
    page(conn, made, [1, 2], "a")
    assert ends(conn, made, 1, lambda _: ("failed", "boom")) == [1]
    assert tree(conn, child) == {
        "each[0]": "failed",
        "each[1]": "cancelled",
        "each.page[0]": "succeeded",
        "each.page[1]": "cancelled",
    }
    assert info(conn, child)["status"] == "failed"
    do(conn, made.worker, "flow:await", "failed")
    assert violations(conn) == []
    one(conn, "select taskq.retry_run(%s, 'fixed', 'me')", made.run)
    assert one(conn, "select answer from taskq.carry_on_run()") == "carried on"
    assert page(conn, made, [3]) == {"cursor": "a", "root": "here"}
    assert all_end(conn, made) == 3
    assert given(conn, made) == [2, 4, 6]
    assert violations(conn) == []


def test_a_child_that_fails_before_the_next_page_is_asked_for_stops_the_source(conn: Conn) -> None:
    made = emitted(conn, ahead=0)
    page(conn, made, [1], "a")
    ends(conn, made, 1, lambda _: ("failed", "boom"))
    assert tree(conn, child_of(conn, made.run)) == {"each[0]": "failed", "each.page[0]": "succeeded"}
    do(conn, made.worker, "flow:await", "failed")
    assert violations(conn) == []
    one(conn, "select taskq.retry_run(%s, 'fixed', 'me')", made.run)
    one(conn, "select answer from taskq.carry_on_run()")
    assert all_end(conn, made) == 1
    assert page(conn, made, []) == {"cursor": "a", "root": "here"}
    assert given(conn, made) == [2]
    assert violations(conn) == []


def test_where_failures_are_collected_the_source_goes_on(conn: Conn) -> None:
    made = emitted(conn, takes="tally", policy="collect", on_failure="finish")
    page(conn, made, [1, 2], "a")
    ends(conn, made, 1, lambda _: ("failed", "boom"))
    page(conn, made, [3])
    all_end(conn, made)
    told = given(conn, made)
    assert (told["total"], told["succeeded"], told["failed"]) == (3, 2, 1)
    assert [each["node"] for each in told["failures"]] == ["each[0]"]
    assert violations(conn) == []


@pytest.mark.parametrize("takes", ["tally", "outcomes"])
def test_who_collects_is_told_of_the_page_that_did_not_come(conn: Conn, takes: str) -> None:
    """The items that were emitted run to their end."""
    made = emitted(conn, takes=takes, policy="collect", on_failure="finish")
    page(conn, made, [1], "a")
    do(conn, made.worker, "list", "failed")
    assert asked(conn, made) is None
    assert all_end(conn, made) == 1
    told = given(conn, made)
    failures = told["failures"] if takes == "tally" else told[1:]
    assert [(each["node"], each["status"], each["error"]["type"]) for each in failures] == [
        ("each.page[1]", "failed", "Boom")
    ]
    assert takes == "outcomes" or (told["total"], told["succeeded"]) == (1, 1)
    assert violations(conn) == []


def test_a_page_that_failed_is_asked_for_again_with_its_cursor(conn: Conn) -> None:
    made = emitted(conn)
    page(conn, made, [1], "a")
    all_end(conn, made)
    do(conn, made.worker, "list", "failed")
    do(conn, made.worker, "flow:await", "failed")
    assert violations(conn) == []
    one(conn, "select taskq.retry_run(%s, 'fixed', 'me')", made.run)
    one(conn, "select answer from taskq.carry_on_run()")
    assert page(conn, made, [2]) == {"cursor": "a", "root": "here"}
    assert all_end(conn, made) == 1, "what has succeeded stands"
    assert given(conn, made) == [2, 4]
    assert violations(conn) == []


# Cancelling, healing --------------------------------------------------------------------------------------------------


def test_a_page_that_comes_while_its_run_is_being_cancelled_is_on_record_for_a_retry(conn: Conn) -> None:
    made = emitted(conn, takes="tally", policy="collect", on_failure="finish")
    child = child_of(conn, made.run)
    page(conn, made, [1], "a")
    claimed = asked(conn, made)
    assert claimed is not None
    assert one(conn, "select taskq.cancel_run(%s, 'enough', 'me')", made.run) == "requested"
    finish(conn, made.worker, claimed, result={"items": [2, 3], "cursor": "b"})
    assert tree(conn, child) == {f"each[{n}]": "cancelled" for n in range(3)} | {
        f"each.page[{n}]": "succeeded" for n in range(2)
    }
    assert info(conn, child)["status"] == "cancelled"
    do(conn, made.worker, "flow:await", "cancelled")
    assert violations(conn) == []
    one(conn, "select taskq.retry_run(%s, 'after all', 'me')", made.run)
    one(conn, "select answer from taskq.carry_on_run()")
    assert all_end(conn, made) == 3
    assert page(conn, made, [])["cursor"] == "b"
    assert given(conn, made)["succeeded"] == 3
    assert violations(conn) == []


def test_who_collects_of_an_emit_that_was_cancelled_between_pages_is_told_that_there_was_more(conn: Conn) -> None:
    made = emitted(conn, takes="tally", policy="collect", on_failure="finish", ahead=0)
    child = child_of(conn, made.run)
    page(conn, made, [1], "a")
    [claimed] = claim(conn, made.worker, 1, tasks=["each"])
    assert one(conn, "select taskq.cancel_run(%s, 'enough', 'me')", child) == "requested"
    finish(conn, made.worker, claimed, result=2)
    assert info(conn, child)["status"] == "cancelled", "its last page was not the end"
    do(conn, made.worker, "flow:await", "failed")
    [last] = claim(conn, made.worker, 1, tasks=["last"])
    told = json.loads(last["payload"])["got"]
    assert (told["total"], [(each["node"], each["status"]) for each in told["failures"]]) == (
        1,
        [("each.page[1]", "cancelled")],
    )
    assert violations(conn) == []


def test_an_emit_whose_last_page_came_is_not_cancelled_over_it(conn: Conn) -> None:
    made = emitted(conn)
    claimed = asked(conn, made)
    assert claimed is not None
    one(conn, "select taskq.cancel_run(%s, 'enough', 'me')", made.run)
    finish(conn, made.worker, claimed, result={"items": [], "cursor": None})
    assert info(conn, child_of(conn, made.run))["status"] == "succeeded"
    assert violations(conn) == []


def test_an_emit_that_was_left_behind_by_a_page_is_healed(conn: Conn) -> None:
    made = emitted(conn)
    child = child_of(conn, made.run)
    claimed = asked(conn, made)
    assert claimed is not None
    conn.execute("alter table taskq.history disable trigger run_goes_on")
    finish(conn, made.worker, claimed, result={"items": [1, 2], "cursor": "a"})
    conn.execute("alter table taskq.history enable trigger run_goes_on")
    assert {row[0] for row in violations(conn)} == {"node_job_missing"}
    assert one(conn, "select taskq.heal_run(%s)", child) == "healed"
    assert violations(conn) == []
    page(conn, made, [3])
    all_end(conn, made)
    assert given(conn, made) == [2, 4, 6]
    assert violations(conn) == []


def test_a_page_that_is_told_twice_is_taken_once(conn: Conn) -> None:
    made = emitted(conn)
    claimed = asked(conn, made)
    assert claimed is not None
    finish(conn, made.worker, claimed, result={"items": [1], "cursor": "a"})
    given_again = {"items": [9], "cursor": "z"}
    again = End(claimed["job_id"], claimed["claim_epoch"], "succeeded", outcome_id=2, result=given_again)
    assert len(exchange(conn, made.worker, [again])) == 1
    assert [each["cursor"] for each in pages(conn, made)] == [None, "a"]
    assert info(conn, child_of(conn, made.run))["items"] == 1
    assert violations(conn) == []


def test_what_items_did_is_undone_and_pages_are_not(conn: Conn) -> None:
    made = emitted(conn, compensate=effect(name="undo", task="undo", on=["succeeded"]))
    page(conn, made, [1, 2])
    all_end(conn, made)
    assert given(conn, made) == [2, 4]
    end_last(conn, made, "failed")
    assert violations(conn) == []
    assert one(conn, "select count(*) from taskq.effect_intents") == 2

"""Work budgets: so many nodes of a run and of all below it are given jobs, and what is ready after that waits."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import psycopg
import pytest
from children_kit import child_of, family, retry_run
from emits_kit import emitted, page
from loops_kit import again, looped
from maps_kit import MAP, all_end, doubled, ends, mapped
from maps_kit import given as given_to_last
from runs_kit import do, edge, info, node, start, store, take, tree, worker_for
from sql import Conn, detail, enqueue, one, rows, violations

ALLOW = "select taskq.set_work_budget(%s, %s, %s, 'me')"


def budget(conn: Conn, run: UUID) -> tuple[int, int, int, int]:
    """How much it is, how many have begun, how many more may, and how many nodes wait since it is spent."""
    [row] = rows(conn, "select * from taskq.run_budgets where run_id = %s", run)
    return row["budget"], row["begun"], row["remaining"], row["waiting"]


def allow(conn: Conn, run: UUID, n: int, reason: str | None = "they are worth it") -> str:
    return str(one(conn, ALLOW, run, n, reason))


def refusal(conn: Conn, state: str, run: UUID, n: int, reason: str = "why") -> psycopg.Error:
    """What the database says to that."""
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        allow(conn, run, n, reason)
    assert caught.value.sqlstate == state
    return caught.value


def carried_on(conn: Conn) -> list[UUID]:
    """What the leader does when it is told that something is due; the runs that it came to."""
    done: list[UUID] = []
    while found := rows(conn, "select * from taskq.carry_on_run(%s)", done[-1] if done else None):
        assert found[0]["answer"] == "carried on"
        done.append(found[0]["run_id"])
    return done


def wait_for_budget(conn: Conn, run: UUID) -> list[str]:
    """The numbers of the nodes that wait for the budget of this run, each with its run's end of the id."""
    found = rows(conn, "select ix from taskq.ready_nodes where waits_for = 'budget' and of = %s::text order by ix", run)
    return [row["ix"] for row in found]


def four(conn: Conn, **more: Any) -> UUID:
    return start(conn, store(conn, [node(name) for name in "abcd"], **more))


def test_what_is_ready_once_the_budget_is_spent_waits_until_more_is_allowed(conn: Conn) -> None:
    worker = worker_for(conn)
    run = four(conn, work_budget=2)
    assert tree(conn, run) == {"a": "pending", "b": "pending", "c": "waiting", "d": "waiting"}
    assert budget(conn, run) == (2, 2, 0, 2)
    assert wait_for_budget(conn, run) == [2, 3]
    # The leader is told of what is due; here it finds nothing to do, however often.
    assert carried_on(conn) == []
    do(conn, worker, "a")
    do(conn, worker, "b")
    assert (tree(conn, run)["c"], info(conn, run)["status"], budget(conn, run)) == ("waiting", "running", (2, 2, 0, 2))
    assert allow(conn, run, 3) == "set"
    assert carried_on(conn) == [run]
    assert (tree(conn, run)["c"], tree(conn, run)["d"], budget(conn, run)) == ("pending", "waiting", (3, 3, 0, 1))
    assert allow(conn, run, 3) == "already"
    assert allow(conn, run, 100) == "set"
    assert carried_on(conn) == [run]
    do(conn, worker, "c")
    do(conn, worker, "d")
    assert info(conn, run)["status"] == "succeeded"
    assert allow(conn, run, 5) == "finished"
    noted = rows(conn, "select actor, reason, details from taskq.audit where action = 'set_work_budget' order by at")
    assert [row["details"] for row in noted] == [
        {"was": 2, "budget": 3, "begun": 2},
        {"was": 3, "budget": 100, "begun": 3},
    ]
    assert violations(conn, "all") == []


def test_a_run_without_a_budget_counts_nothing(conn: Conn) -> None:
    run = four(conn)
    assert set(tree(conn, run).values()) == {"pending"}
    assert rows(conn, "select * from taskq.work_budgets") == []


def test_the_items_of_a_map_count_and_wait(conn: Conn) -> None:
    made = mapped(conn, list(range(10)), work_budget=5)
    # first, the job that waits for the map, and three items.
    assert budget(conn, made.run) == (5, 5, 0, 7)
    assert ends(conn, made, 2, doubled) == [0, 1]
    assert (carried_on(conn), budget(conn, made.run)) == ([], (5, 5, 0, 7))
    allow(conn, made.run, 6)
    assert carried_on(conn) == [child_of(conn, made.run)]
    assert budget(conn, made.run) == (6, 6, 0, 6)
    assert all_end(conn, made) == 2
    allow(conn, made.run, 100)
    carried_on(conn)
    assert all_end(conn, made) == 6
    assert given_to_last(conn, made) == [2 * n for n in range(10)]
    assert budget(conn, made.run)[:2] == (100, 13)
    assert violations(conn, "all") == []


def test_items_that_have_no_node_yet_wait_as_well(conn: Conn) -> None:
    made = mapped(conn, list(range(3000)), work_budget=4)
    assert budget(conn, made.run)[:3] == (4, 4, 0)
    assert all_end(conn, made) == 2
    assert carried_on(conn) == []
    assert violations(conn, "all") == []
    allow(conn, made.run, 5000)
    while carried_on(conn) or all_end(conn, made, portion=1000):
        pass
    assert info(conn, child_of(conn, made.run))["status"] == "succeeded"
    assert budget(conn, made.run)[:2] == (5000, 3002)


def test_the_rounds_of_a_loop_count_and_wait(conn: Conn) -> None:
    made = looped(conn, work_budget=3)
    assert budget(conn, made.run) == (3, 3, 0, 0)
    again(conn, made, 1)
    assert (budget(conn, made.run), wait_for_budget(conn, made.run)) == ((3, 3, 0, 1), [1])
    assert (carried_on(conn), take(conn, made.worker, "more")) == ([], {})
    allow(conn, made.run, 10)
    assert carried_on(conn) == [made.loop]
    do(conn, made.worker, "more", result={"word": "done"})
    do(conn, made.worker, "flow:await", result={"word": "done"})
    do(conn, made.worker, "last")
    assert (info(conn, made.run)["status"], violations(conn, "all")) == ("succeeded", [])


def test_the_pages_and_items_of_an_emit_count_and_wait(conn: Conn) -> None:
    made = emitted(conn, work_budget=5, ahead=10)
    page(conn, made, [1, 2, 3], "more")
    # The next page is asked for first.
    assert budget(conn, made.run) == (5, 5, 0, 2)
    assert carried_on(conn) == []
    page(conn, made, [4])
    assert budget(conn, made.run) == (5, 5, 0, 3)
    allow(conn, made.run, 7)
    assert carried_on(conn) == [child_of(conn, made.run)]
    assert budget(conn, made.run) == (7, 7, 0, 1)
    allow(conn, made.run, 8)
    carried_on(conn)
    assert all_end(conn, made) == 4
    allow(conn, made.run, 9)
    do(conn, made.worker, MAP, result=4)
    do(conn, made.worker, "last")
    assert (info(conn, made.run)["status"], violations(conn, "all")) == ("succeeded", [])


def test_a_page_that_waited_for_its_budget_is_asked_for_while_items_fill_at_once(conn: Conn) -> None:
    made = emitted(conn, work_budget=5, ahead=10, at_once=1)
    page(conn, made, [1], "more")
    # The one item that may run runs on, and the page that comes next is beside it.
    assert set(take(conn, made.worker, "each")) == {"each"}
    page(conn, made, [2], "still more")
    assert budget(conn, made.run) == (5, 5, 0, 2)
    assert carried_on(conn) == []
    allow(conn, made.run, 100)
    assert carried_on(conn) == [child_of(conn, made.run)]
    assert budget(conn, made.run)[1] == 6
    page(conn, made, [])
    # What waits for its turn is nothing to carry on.
    assert carried_on(conn) == []
    assert violations(conn, "all") == []


def test_a_child_run_that_declares_a_budget_brings_it_with_it(conn: Conn) -> None:
    made = family(conn, work_budget=2, inner={"work_budget": 2})
    # a and the job that waits for the child; then the child's own two.
    assert budget(conn, made.parent) == (4, 3, 1, 0)
    assert rows(conn, "select run_id from taskq.work_budgets") == [{"run_id": made.parent}]
    do(conn, made.worker, "x")
    do(conn, made.worker, "y")
    do(conn, made.worker, "inner:await")
    assert budget(conn, made.parent) == (4, 4, 0, 1)
    allow(conn, made.parent, 5)
    assert carried_on(conn) == [made.parent]
    do(conn, made.worker, "b")
    assert (info(conn, made.parent)["status"], violations(conn, "all")) == ("succeeded", [])


def test_a_child_run_below_one_without_a_budget_has_its_own(conn: Conn) -> None:
    made = family(conn, inner={"work_budget": 1})
    child = child_of(conn, made.parent)
    assert (info(conn, made.parent)["budget_of"], budget(conn, child)) == (None, (1, 1, 0, 0))
    do(conn, made.worker, "x")
    assert budget(conn, child) == (1, 1, 0, 1)
    assert "has no work budget" in str(refusal(conn, "WF026", made.parent, 5))


def test_what_cannot_be_given_a_job_does_not_count(conn: Conn) -> None:
    run = start(conn, store(conn, [node("a", priority=99), node("b")], on_failure="finish", work_budget=5))
    assert tree(conn, run) == {"a": "failed", "b": "pending"}
    assert budget(conn, run) == (5, 1, 4, 0)
    made = mapped(conn, [1, 2, 3], work_budget=9, item={"priority": 99}, on_failure="finish")
    assert budget(conn, made.run)[1] == 2
    assert violations(conn, "all") == []


def test_what_runs_again_counts_again(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")], work_budget=1))
    do(conn, worker, "a", "failed")
    assert retry_run(conn, run) == "reopened"
    assert (budget(conn, run), tree(conn, run)) == ((1, 1, 0, 1), {"a": "waiting"})
    allow(conn, run, 2)
    carried_on(conn)
    do(conn, worker, "a")
    assert (info(conn, run)["status"], violations(conn, "all")) == ("succeeded", [])


def test_a_run_that_waits_for_its_budget_is_cancelled_like_any_other(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)], work_budget=1))
    do(conn, worker, "a")
    assert budget(conn, run) == (1, 1, 0, 1)
    assert one(conn, "select taskq.cancel_run(%s)", run) == "cancelled"
    assert (tree(conn, run)["b"], violations(conn, "all")) == ("cancelled", [])


def test_a_budget_below_what_has_begun_stops_the_run_there(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)], work_budget=9))
    do(conn, worker, "a")
    # b was given its job: two have begun.
    assert (allow(conn, run, 1), budget(conn, run)) == ("set", (1, 2, 0, 0))
    do(conn, worker, "b")
    assert info(conn, run)["status"] == "succeeded"


def test_the_budget_goes_with_its_run(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a")], work_budget=1))
    do(conn, worker, "a")
    conn.execute("update taskq.runs set finished_at = finished_at - interval '1000 days' where id = %s", (run,))
    assert one(conn, "select taskq.prune_runs()") == 1
    assert rows(conn, "select * from taskq.work_budgets") == []


@pytest.mark.parametrize(
    ("n", "reason", "words"), [(0, "why", "is 0"), (10_000_001, "why", "is 10000001"), (5, " ", "needs a reason")]
)
def test_what_cannot_be_a_budget_is_refused(conn: Conn, n: int, reason: str, words: str) -> None:
    run = four(conn, work_budget=2)
    assert words in str(refusal(conn, "WF009", run, n, reason))
    assert budget(conn, run)[0] == 2


def test_a_run_whose_budget_is_elsewhere_names_it(conn: Conn) -> None:
    made = family(conn, work_budget=10)
    assert detail(refusal(conn, "WF026", child_of(conn, made.parent), 5))["budget_of"] == str(made.parent)
    refusal(conn, "WF025", enqueue(conn), 5)


@pytest.mark.parametrize("n", ["0", "10000001", '"many"', "1.5"])
def test_a_plan_with_a_budget_that_cannot_be_is_not_stored(conn: Conn, n: str) -> None:

    with pytest.raises(psycopg.Error) as caught:
        store(conn, [node("a")], work_budget=json.loads(n))
    assert caught.value.sqlstate == "WF024"

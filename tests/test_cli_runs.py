"""``taskq runs``: lists, one run, its tree, cancelling and another go; and what jobs show and doctor say of runs."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sql as q
from cli_kit import Cli, make_cli  # noqa: F401
from effects_kit import effect
from emits_kit import emitted, page
from loops_kit import again, looped
from maps_kit import child_of, ends, given, mapped
from psycopg.conninfo import make_conninfo
from runs_kit import do, edge, info, job_of, node, result_of, start, store, take, tree, worker_for

from taskq.cli.trees import MOST_LEVELS, Place, forest, indented

NOBODY = "01999999-0000-7000-8000-000000000000"
Conn = psycopg.Connection[Any]


def chain(conn: Conn, *names: str, **more: Any) -> str:
    """Nodes of these names, one after another."""
    edges = [edge(ix, ix + 1) for ix in range(len(names) - 1)]
    return store(conn, [node(name) for name in names], edges, **more)


def ids(cli: Cli, *args: str) -> list[UUID]:
    return [UUID(row["id"]) for row in cli.ok("runs", "list", "--json", *args).json]


# Lists ----------------------------------------------------------------------------------------------------------------


def test_list_shows_the_newest_first_and_each_filter_narrows(cli: Cli, conn: Conn) -> None:
    assert cli.ok("runs", "list").out == "no runs\n"
    worker = worker_for(conn)
    flow, other = chain(conn, "a", "b"), chain(conn, "c", workflow="other")
    first = start(conn, flow, key="order-7")
    do(conn, worker, "a")
    second, third = start(conn, flow), start(conn, other, key="order-7")
    do(conn, worker, "c", "failed")
    assert ids(cli) == [third, second, first]
    assert ids(cli, "--limit", "2") == [third, second]
    assert ids(cli, "--workflow", "flow") == [second, first]
    assert ids(cli, "--workflow", "flow", "--workflow", "other") == [third, second, first]
    assert ids(cli, "--key", "order-7") == [third, first]
    assert ids(cli, "--status", "running") == [second, first]
    assert ids(cli, "--status", "failed,cancelled") == [third]
    assert ids(cli, "--status", "failed", "--status", "running", "--key", "order-7", "--workflow", "flow") == [first]
    assert ids(cli, "--workflow", "nothing") == []
    done = cli.ok("runs", "list", "--limit", "3")
    lines = {line.split()[0]: line for line in done.out.splitlines()}
    assert ("1/2" in lines[str(first)], "0/2" in lines[str(second)], "1/1" in lines[str(third)]) == (True, True, True)
    assert "RunFailed: node c has failed: boom" in lines[str(third)]
    assert "--limit shows more" in done.err


def test_list_tells_which_runs_are_being_cancelled(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn, "a", "b"))
    q.claim_one(conn, worker, tasks=["a"])
    cli.ok("runs", "cancel", str(run))
    assert "running, cancelling" in cli.ok("runs", "list").out
    assert "running, cancelling" in cli.ok("runs", "tree", str(run)).out


def test_values_that_name_nothing_are_usage_errors(cli: Cli) -> None:
    done = cli("runs", "list", "--status", "waiting")
    assert (done.code, "a run is never 'waiting'; there are running, paused" in done.err) == (2, True)
    for command in ("show", "tree", "cancel", "retry"):
        done = cli("runs", command, "nonsense")
        assert (done.code, "'nonsense' is not the id of a run" in done.err) == (2, True)


# One run --------------------------------------------------------------------------------------------------------------


def diamond(conn: Conn) -> UUID:
    """a, then b and c, then d; with what undoes a, and an effect of the run's failure."""
    undo = effect("undo", on=("succeeded",), task="undo")
    nodes = [
        node("a", compensate=undo),
        node("b"),
        node("c"),
        node("d", {"all": {"list": [result_of(1), result_of(2)]}}),
    ]
    edges = [edge(0, 1), edge(0, 2), edge(1, 3), edge(2, 3)]
    return start(conn, store(conn, nodes, edges, on_failure="finish", effects=[effect("tell", task="tell")]), {"x": 1})


def test_show_tells_all_about_one(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = diamond(conn)
    found = cli.ok("runs", "show", str(run), "--json").json
    assert (found["status"], found["workflow"], found["input"], found["node_count"]) == ("running", "flow", {"x": 1}, 4)
    assert [(n["name"], n["status"], n["waits_for"]) for n in found["nodes"]] == [
        ("a", "pending", None),
        ("b", "waiting", ["a"]),
        ("c", "waiting", ["a"]),
        ("d", "waiting", ["b", "c"]),
    ]
    assert (found["effects"], found["audit"], "receipts" in found) == ([], [], False)
    text = cli.ok("runs", "show", str(run)).out
    assert "waits for b, c" in text
    assert not any(f"\n{part}\n" in text for part in ("effects", "audit", "receipts", "error", "result"))
    do(conn, worker, "a")
    do(conn, worker, "b", "failed")
    text = cli.ok("runs", "show", str(run)).out
    assert all(said in text for said in ("blocked by b", "Boom: boom"))
    do(conn, worker, "c")
    found = cli.ok("runs", "show", str(run), "--json").json
    assert (found["status"], found["error"]["node"]) == ("failed", "b")
    assert {(e["name"], e["node"], e["settled"]) for e in found["effects"]} == {
        ("tell", None, False),
        ("compensate:0:undo", "a", False),
    }
    do(conn, worker, "tell")
    text = cli.ok("runs", "show", str(run)).out
    rows = {line.split()[0]: line.split() for line in text.splitlines() if ":0:" in line}
    assert rows[f"{run}:0:tell"][-2:] == ["succeeded", "succeeded"]
    [undone] = [row for key, row in rows.items() if key.endswith("undo")]
    assert undone[-1] == "no"
    assert '"type": "RunFailed"' in text


def test_show_tells_the_result_and_what_operators_did(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn, "a", result=result_of(0)))
    do(conn, worker, "a", "failed")
    assert cli.ok("runs", "retry", str(run), "--reason", "the shop is open", "--json").json == [
        {"id": str(run), "answer": "reopened"}
    ]
    do(conn, worker, "a", result={"n": 5})
    text = cli.ok("runs", "show", str(run)).out
    assert all(said in text for said in ("the shop is open", "retry_run", '"n": 5', "succeeded"))
    assert [a["reason"] for a in cli.ok("runs", "show", str(run), "--json").json["audit"]] == ["the shop is open"]


@pytest.mark.parametrize("command", ["show", "tree"])
def test_a_run_that_is_not_there(cli: Cli, conn: Conn, command: str) -> None:
    done = cli("runs", command, NOBODY)
    assert (done.code, done.out, f"there is no run {NOBODY}" in done.err) == (1, "", True)
    done = cli("runs", command, NOBODY, "--json")
    assert (done.code, done.json["answer"], done.err) == (1, "not_found", "")


# Receipts -------------------------------------------------------------------------------------------------------------


def test_receipts_that_are_whole_are_shown(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn, "a", "b"))
    do(conn, worker, "a")
    done = cli.ok("runs", "show", str(run), "--receipts")
    ring = done.out.split("\nreceipts\n")[1].splitlines()
    assert [line.split()[0] for line in ring[1:]] == ["1", "2", "3", "4"]
    assert ring[1].endswith("admitted  2 nodes")
    assert ring[3].split()[-4:] == ["ended", "a", "1", "succeeded"]
    assert done.err == ""
    found = cli.ok("runs", "show", str(run), "--receipts", "--json").json
    assert [r["kind"] for r in found["receipts"]] == ["admitted", "ready", "ended", "ready"]
    assert found["receipt_faults"] == []


def test_a_ring_that_is_full_is_whole_without_its_first(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn, "a", "b", receipts=3))
    do(conn, worker, "a")
    do(conn, worker, "b")
    found = cli.ok("runs", "show", str(run), "--receipts", "--json").json
    assert [r["sequence"] for r in found["receipts"]] == [4, 5, 6]


SWAP = (
    "update taskq.receipts c set at = o.at, claim_epoch = o.claim_epoch, node = o.node, n = o.n, kind = o.kind,"
    " status = o.status, seal = o.seal from taskq.receipts o"
)
FORGED = {
    "missing": ("delete from taskq.receipts where run_id = %(run)s and sequence = 2", "receipts_missing"),
    "short": ("delete from taskq.receipts where run_id = %(run)s and sequence = 1", "receipts_missing"),
    "without its last": ("delete from taskq.receipts where run_id = %(run)s and sequence = 4", "receipts_missing"),
    "empty": ("delete from taskq.receipts where run_id = %(run)s", "receipts_missing"),
    "never numbered": ("update taskq.runs set sequence = 0 where id = %(run)s", "receipts_missing"),
    "as if it had never begun": (
        "with c as (delete from taskq.receipts where run_id = %(run)s) update taskq.runs set sequence = 0"
        " where id = %(run)s",
        "receipts_missing",
    ),
    "beyond its last": (
        "update taskq.receipts set sequence = 9 where run_id = %(run)s and sequence = 4",
        "receipts_missing",
    ),
    "full, with a gap": (
        "with r as (update taskq.runs set receipts = 3 where id = %(run)s) delete from taskq.receipts"
        " where run_id = %(run)s and sequence = 2",
        "receipts_missing",
    ),
    "too long": ("update taskq.runs set receipts = 3 where id = %(run)s", "receipts_missing"),
    "doubled": (
        "insert into taskq.receipts select run_id, 5, at, claim_epoch, node, n, kind, status, seal from taskq.receipts"
        " where run_id = %(run)s and sequence = 4",
        "receipts_missing",
    ),
    "reordered": (
        "update taskq.receipts set at = at + interval '2 minutes' where run_id = %(run)s and sequence = 2",
        "receipts_reordered",
    ),
    "changed places": (
        SWAP
        + " where c.run_id = %(run)s and o.run_id = c.run_id and c.sequence in (2, 3) and o.sequence = 5 - c.sequence",
        "receipts_reordered",
    ),
    "doubled, and counted": (
        "with r as (update taskq.runs set sequence = 5 where id = %(run)s)"
        " insert into taskq.receipts (run_id, sequence, at, claim_epoch, node, n, kind, status, seal)"
        " select run_id, 5, at, claim_epoch, node, n, kind, status, seal from taskq.receipts"
        " where run_id = %(run)s and sequence = 4",
        "receipts_reordered",
    ),
    "exchanged": (
        SWAP + " where c.run_id in (%(run)s, %(other)s) and o.run_id <> c.run_id and c.sequence = 2 and o.sequence = 2",
        "receipts_reordered",
    ),
    "altered": (
        "update taskq.receipts set status = 'failed' where run_id = %(run)s and sequence = 3",
        "receipts_reordered",
    ),
    "without its seal": (
        "update taskq.receipts set seal = null where run_id = %(run)s and sequence = 3",
        "receipts_reordered",
    ),
    "begun anew": (
        "update taskq.receipts set kind = 'ready' where run_id = %(run)s and sequence = 1",
        "receipts_first_differs",
    ),
    "foreign": (
        "update taskq.receipts set run_id = %(run)s, sequence = 5 where run_id = %(other)s and sequence = 2",
        "receipts_missing",
    ),
    "given away": (
        "update taskq.receipts set run_id = %(other)s, sequence = 5 where run_id = %(run)s and sequence = 4",
        "receipts_missing",
    ),
    "of no run": ("delete from taskq.runs where id = %(run)s", "receipt_of_no_run"),
}


@pytest.mark.parametrize("how", FORGED)
def test_receipts_that_cannot_be_trusted_are_refused_under_the_codes_of_verify(cli: Cli, conn: Conn, how: str) -> None:
    worker = worker_for(conn)
    plan = chain(conn, "a", "b")
    run = start(conn, plan)
    do(conn, worker, "a")
    other = start(conn, plan)
    assert cli.ok("runs", "show", str(run), "--receipts", "--json").json["receipt_faults"] == []
    forge, code = FORGED[how]
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        assert conn.execute(forge, {"run": run, "other": other}).rowcount >= 1
    found = rows_of_verify(conn, run)
    assert found
    assert {c for c, _ in found} == {code}
    done = cli("runs", "show", str(run), "--receipts", "--json")
    assert done.code == 1
    told = [(fault["code"], fault["detail"]) for fault in done.json["receipt_faults"]]
    assert sorted(told) == sorted(found) or how == "of no run"
    assert {c for c, _ in told} == {code}
    done = cli("runs", "show", str(run), "--receipts")
    assert (done.code, code in done.err, done.err.startswith("error: ")) == (1, True, True)
    if how != "of no run":
        assert "\nreceipts\n" in done.out
        assert cli("runs", "show", str(run)).code == 0


def rows_of_verify(conn: Conn, run: UUID) -> list[tuple[str, str]]:
    """What check_runs says of a run's receipts."""
    found = q.rows(
        conn, "select code, detail from taskq.check_runs('all') where run_id = %s and code like 'receipt%%'", run
    )
    return [(row["code"], row["detail"]) for row in found]


def test_a_run_that_moves_on_while_it_is_looked_at_is_not_reported(
    cli: Cli, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskq.cli.database import Database

    worker = worker_for(conn)
    run = start(conn, chain(conn, "a", "b", "c"))
    left = ["a", "b", "c"]
    ask = Database.rows

    def meanwhile(self: Database, query: str, *arguments: Any) -> list[dict[str, Any]]:
        found = ask(self, query, *arguments)
        if left and query != "bounded":
            do(conn, worker, left.pop(0))
        return found

    monkeypatch.setattr(Database, "rows", meanwhile)
    seen = cli.ok("runs", "show", str(run), "--receipts", "--json").json
    assert left == []
    assert seen["status"] == "running"
    assert len(seen["receipts"]) == seen["sequence"] == 2
    assert {n["status"] for n in seen["nodes"]} == {"pending", "waiting"}
    assert info(conn, run)["status"] == "succeeded"


# The tree -------------------------------------------------------------------------------------------------------------


def test_tree_shows_each_node_below_what_it_comes_after(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = diamond(conn)
    do(conn, worker, "a")
    do(conn, worker, "b", "failed")
    lines = cli.ok("runs", "tree", str(run)).out.splitlines()
    assert lines[0] == f"flow {run} is running"
    shown = [" ".join(line.split("  ")).rstrip() for line in lines[3:]]
    assert [line[: len(line) - len(line.lstrip())] for line in lines[3:]] == ["", "  ", "  ", "    "]
    assert [line.split()[:3] for line in shown] == [
        ["a", "succeeded", "a"],
        ["b", "failed", "b"],
        ["c", "pending", "c"],
        ["d", "blocked", "d"],
    ]
    assert "Boom: boom" in lines[4]
    assert lines[6].split()[3:] == ["b", "blocked", "by", "b"]
    found = cli.ok("runs", "tree", str(run), "--json").json
    assert (found["id"], found["status"]) == (str(run), "running")
    assert [(n["name"], n["depth"], [e["node"] for e in n["after"]]) for n in found["nodes"]] == [
        ("a", 0, []),
        ("b", 1, ["a"]),
        ("c", 1, ["a"]),
        ("d", 2, ["b", "c"]),
    ]
    assert found["nodes"][3]["blocked_by"] == "b"


def test_tree_tells_what_is_held_unknown_or_waits(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("a", effect_class="side_effecting"), node("b"), node("c")]
    run = start(conn, store(conn, nodes, [edge(0, 2), edge(1, 2)]))
    claimed = q.claim_one(conn, worker, tasks=["a"])
    q.start_effects(conn, worker, (claimed["job_id"], claimed["claim_epoch"]))
    q.lose(conn, worker)
    q.settle(conn)
    text = cli.ok("runs", "tree", str(run)).out
    assert tree(conn, run)["a"] == "unknown"
    assert "its outcome is to be decided: taskq jobs unknown" in text
    assert "waits for a, b" in text


def test_tree_tells_what_a_ready_node_waits_for_and_its_place(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [
        node("worker", priority=4),
        node("slot", cohort="gpu"),
        node("later", run_in=3600.0),
        node("stopped", queue="off"),
    ]
    spec = store(conn, nodes, on_failure="finish")
    conn.execute("select taskq.set_limit('gpu', 1, 'small')")
    conn.execute("select taskq.pause_queue('off')")
    q.enqueue_many(conn, 3, task="other", priority=4)
    q.enqueue(conn, task="other", priority=5)
    q.enqueue(conn, task="other", priority=3)
    [held, _] = q.enqueue_many(conn, 2, task="gpus", cohort="gpu")
    run = start(conn, spec)
    about = {row["name"]: row for row in cli.ok("runs", "tree", str(run), "--json").json["nodes"]}
    assert [
        (about[n]["ready_for"], about[n]["ready_of"], about[n]["place"]) for n in ("worker", "slot", "stopped")
    ] == [
        ("capacity", "q", 5),
        ("capacity", "q", 4),
        ("paused", "off", None),
    ]
    claimed = q.claim_one(conn, worker, tasks=["gpus"])
    assert claimed["job_id"] == held["job_id"]
    text = cli.ok("runs", "tree", str(run)).out
    for line in (
        "for a worker of q, place 5",
        "for a slot of cohort gpu, place 2",
        "queue off is paused",
        "not before ",
    ):
        assert line in text
    q.enqueue_many(conn, 120, task="other", priority=4)
    q.enqueue_many(conn, 120, task="other", priority=6)
    assert "for a worker of q, place 100 or later" in cli.ok("runs", "tree", str(run)).out


def test_a_map_is_one_line_with_its_counts_and_its_children_come_in_pages(cli: Cli, conn: Conn) -> None:
    made = mapped(conn, [1, "two", 3, 4, 5, 6], at_once=2, on_failure="finish")
    ends(conn, made, 2, lambda item: ("failed", "no") if item == "two" else ("succeeded", item))
    child = child_of(conn, made.run)
    line = f"map of 6: 1 succeeded, 1 failed, 2 active, 2 waiting; run {child}"
    for command in ("show", "tree"):
        shown = cli.ok("runs", command, str(made.run)).out
        assert line in shown
        assert "each[" not in shown
    [first, over, last] = cli.ok("runs", "show", str(made.run), "--json").json["nodes"]
    counts = {"items": 6, "at_once": 2, "waiting": 2, "active": 2, "succeeded": 1, "failed": 1, "cancelled": 0}
    counts |= {"pages": None, "source": None}  # of an emit
    assert (first["map"], over["map"], last["map"]) == (None, counts, None)
    page = cli.ok("runs", "show", str(made.run), "--children", "each", "--start", "1", "--limit", "2")
    assert [text in page.out for text in (line, "each[0]", "each[1]", "each[2]", "each[3]")] == [
        True, False, True, True, False,
    ]  # fmt: skip
    assert ('"two"' in page.out, "Boom: no" in page.out, "--start" in page.err) == (True, True, True)
    told = cli.ok("runs", "show", str(made.run), "--children", "each", "--json").json
    assert [row["item"] for row in told["children"]] == [1, "two", 3, 4, 5, 6]
    assert "--start" not in cli.ok("runs", "show", str(made.run), "--children", "each", "--limit", "7").err
    of_itself = cli.ok("runs", "show", str(child), "--limit", "2")
    assert ("each[1]" in of_itself.out, "each[2]" in of_itself.out, "--start" in of_itself.err) == (True, False, True)
    assert "succeeded, 1/6" not in of_itself.out
    lines = {row.split()[0]: row for row in cli.ok("runs", "list").out.splitlines()}
    assert ("2/6" in lines[str(child)], "1/3" in lines[str(made.run)]) == (True, True)


def test_a_map_that_failed_says_why_and_how_far_it_was(cli: Cli, conn: Conn) -> None:
    made = mapped(conn, [1, 2])
    ends(conn, made, 2, lambda item: ("failed", "no") if item == 2 else ("succeeded", item))
    given(conn, made)
    assert "Boom: boom; map of 2: 1 succeeded, 1 failed; run" in cli.ok("runs", "show", str(made.run)).out
    empty = mapped(conn, [])
    assert "map of 0: nothing to do; run" in cli.ok("runs", "show", str(empty.run)).out


def test_a_loop_is_one_line_with_how_far_it_is_and_its_rounds_are_shown(cli: Cli, conn: Conn) -> None:
    made = looped(conn, within=3600)
    again(conn, made, 1)
    for command in ("show", "tree"):
        shown = cli.ok("runs", command, str(made.run)).out
        assert re.search(r"loop in round 2 of at most 5, \d+ of 3,600 s; run", shown)
        assert "more[" not in shown
    page = cli.ok("runs", "show", str(made.run), "--children", "more", "--start", "1").out
    assert [text in page for text in ("more[0]", "more[1]", '{"n": 1, "word": "again"}')] == [False, True, True]
    told = cli.ok("runs", "show", str(made.run), "--children", "more", "--json").json
    assert (told["loop"]["rounds"], told["map"], len(told["children"])) == (2, None, 2)
    unbound = looped(conn)
    assert "loop in round 1 of at most 5; run" in cli.ok("runs", "show", str(unbound.run)).out
    lines = {row.split()[0]: row for row in cli.ok("runs", "list").out.splitlines()}
    assert ("1/2" in lines[str(made.loop)], "0/1" in lines[str(unbound.loop)]) == (True, True)
    cli.ok("runs", "cancel", str(unbound.run), "--reason", "enough")
    assert "loop of 1 round; run" in cli.ok("runs", "show", str(unbound.run)).out


def test_an_emit_is_one_line_with_how_far_it_is_and_its_pages_are_shown_behind_its_items(cli: Cli, conn: Conn) -> None:
    made = emitted(conn, ahead=1)
    assert (
        "emit of 0 in 1 pages, the last is asked for: nothing to do; run" in cli.ok("runs", "show", str(made.run)).out
    )
    page(conn, made, ["a", "b"], 4)
    for command in ("show", "tree"):
        shown = cli.ok("runs", command, str(made.run)).out
        assert "emit of 2 in 1 pages, and there are more: 2 active; run" in shown
        assert "each[" not in shown
    shown = cli.ok("runs", "show", str(made.run), "--children", "each", "--start", "1").out
    assert [text in shown for text in ("each[0]", "each[1]", "each.page[0]")] == [False, True, True]
    told = cli.ok("runs", "show", str(made.run), "--children", "each", "--json").json
    assert (told["map"]["pages"], told["map"]["source"], len(told["children"])) == (1, "again", 3)


def test_children_of_what_is_no_map_are_refused(cli: Cli, conn: Conn) -> None:
    run = start(conn, chain(conn, "a", "b"))
    done = cli("runs", "show", str(run), "--children", "a")
    assert (done.code, "node 'a' has not begun as a map or a loop, or is none" in done.err) == (2, True)
    done = cli("runs", "show", str(run), "--children", "c")
    assert (done.code, "node 'c' is none of the run" in done.err) == (2, True)
    assert "there is no run" in cli("runs", "show", NOBODY, "--children", "c").err


def test_a_graph_as_a_list() -> None:
    assert forest({}) == []
    assert forest({0: [], 1: [], 2: [0, 1], 3: [0], 4: [2]}) == [
        Place(0, 0, ()),
        Place(3, 1, ()),
        Place(1, 0, ()),
        Place(2, 1, (0,)),
        Place(4, 2, ()),
    ]
    damaged = forest({0: [7], 1: [1, 2], 2: [1]})
    assert damaged == [Place(0, 0, ()), Place(1, 0, ()), Place(2, 1, ())]
    long = forest({ix: [ix - 1] if ix else [] for ix in range(10_000)})
    assert [place.depth for place in long] == list(range(10_000))
    assert indented("x", 2) == "    x"
    assert indented("x", 9_999) == indented("x", MOST_LEVELS)


# Cancelling and another go --------------------------------------------------------------------------------------------


def test_cancel_answers_and_leaves_its_mark(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    plan = chain(conn, "a", "b")
    waits, runs = start(conn, plan), start(conn, plan)
    assert cli.ok("runs", "cancel", str(waits), "--reason", "not wanted", "--json").json == [
        {"id": str(waits), "answer": "cancelled"}
    ]
    q.claim_one(conn, worker, tasks=["a"])
    assert "requested" in cli.ok("runs", "cancel", str(runs)).out
    again = cli("runs", "cancel", str(waits))
    assert (again.code, "finished" in again.out) == (1, True)
    missing = cli("runs", "cancel", NOBODY, "--json")
    assert (missing.code, missing.json) == (1, [{"id": NOBODY, "answer": "not_found"}])
    [mark] = [a for a in cli.ok("audit", "list", "--json").json if a["subject"] == str(waits)]
    assert (mark["action"], mark["reason"], "@" in mark["actor"]) == ("cancel_run", "not wanted", True)


def test_pause_and_resume_answer_for_each_run_and_leave_their_mark(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    plan = chain(conn, "a", "b")
    one, other, done = start(conn, plan), start(conn, plan), start(conn, chain(conn, "c", workflow="short"))
    do(conn, worker, "c")
    why = ("--reason", "the provider is down")
    assert cli.ok("runs", "pause", str(one), *why, "--code", "incident-42", "--json").json == [
        {"id": str(one), "answer": "paused"}
    ]
    said = cli("runs", "pause", str(one), str(other), str(done), NOBODY, *why, "--json")
    answers = [row["answer"] for row in said.json]
    assert (said.code, answers) == (1, ["already", "paused", "finished", "refused"])
    assert f"there is no run {NOBODY}" in said.json[3]["why"]
    assert ids(cli, "--status", "paused") == [other, one]
    listed = cli.ok("runs", "list", "--status", "paused").out
    assert ("paused (incident-42)" in listed, "paused (operator)" in listed) == (True, True)
    for command in ("show", "tree"):
        shown = cli.ok("runs", command, str(one)).out
        told = ("incident-42", "the provider is down", "@", f"taskq runs resume {one} --reason", "held: paused")
        assert [text for text in told if text not in shown] == []
    shown = cli.ok("runs", "show", str(one), "--json").json
    assert (shown["paused_code"], shown["resume"], shown["paused_held"]) == ("incident-42", str(one), 1)
    again = cli.ok("runs", "resume", str(one), str(other), "--reason", "it is back")
    assert again.out.count("resumed") == 2
    assert cli.ok("runs", "resume", str(one), "--reason", "it is back", "--json").json[0]["answer"] == "not_paused"
    assert cli("runs", "resume", str(done), "--reason", "it is back").code == 1
    assert "paused" not in cli.ok("runs", "show", str(one)).out.split("audit")[0]
    marks = [a for a in cli.ok("audit", "list", "--json").json if a["subject"] == str(one)]
    assert {(mark["action"], mark["reason"]) for mark in marks} == {
        ("pause_run", "the provider is down"),
        ("resume_run", "it is back"),
    }


def test_a_pause_needs_a_reason_and_a_code_that_is_a_name(cli: Cli, conn: Conn) -> None:
    run = str(start(conn, chain(conn, "a")))
    for command in ("pause", "resume"):
        missing = cli("runs", command, run)
        assert (missing.code, "--reason" in missing.err) == (2, True)
        assert (
            "needs a reason"
            in cli("runs", command, run, "--reason", " ").err + cli("runs", command, run, "--reason", " ").out
        )
    refused = cli("runs", "pause", run, "--reason", "why", "--code", "two words", "--json")
    assert (refused.code, "two words" in refused.json[0]["why"]) == (1, True)


def test_a_part_of_a_paused_run_names_the_run_to_resume(cli: Cli, conn: Conn) -> None:
    made = mapped(conn, [1, 2])
    child = str(child_of(conn, made.run))
    cli.ok("runs", "pause", str(made.run), "--reason", "why")
    refused = cli("runs", "resume", child, "--reason", "why")
    assert (refused.code, str(made.run) in refused.out) == (1, True)
    assert f"taskq runs resume {made.run} --reason" in cli.ok("runs", "show", child).out


def test_doctor_tells_of_a_run_that_is_paused_for_long(cli: Cli, conn: Conn) -> None:
    run = str(start(conn, chain(conn, "a")))
    cli.ok("runs", "pause", run, "--reason", "a look first", "--code", "look")
    found = checks(cli)["paused_runs"]
    assert (found["verdict"], "1 run paused" in found["found"]) == ("ok", True)
    conn.execute("update taskq.run_pauses set since = taskq.now() - interval '2 days'")
    found = checks(cli)["paused_runs"]
    assert found["verdict"] == "warn"
    assert all(text in found["found"] for text in (run, "look", "a look first", "2"))
    assert f"taskq runs resume {run}" in found["cure"]
    assert checks(cli)["runs"]["verdict"] == "ok"


def test_a_work_budget_is_shown_and_raised(cli: Cli, conn: Conn) -> None:
    run = str(start(conn, store(conn, [node("a"), node("b")], work_budget=1)))
    free = str(start(conn, chain(conn, "a")))
    shown = cli.ok("runs", "show", run).out
    assert "1 of 1 bodies have begun" in shown
    assert f"taskq runs budget {run} NUMBER --reason WHY" in shown
    for command in ("show", "tree"):
        assert f"waits for the work budget of run {run}, which is spent" in cli.ok("runs", command, run).out
    told = cli.ok("runs", "show", run, "--json").json
    assert (told["work_budget"], told["work_begun"], told["work_budget_of"]) == (1, 1, run)
    found = checks(cli)["work_budgets"]
    assert (found["verdict"], run in found["found"], f"taskq runs budget {run}" in found["cure"]) == (
        "warn",
        True,
        True,
    )
    # It has what it waits for, and stands still by nobody's fault.
    do(conn, worker_for(conn), "a")
    assert checks(cli)["runs"]["verdict"] == "ok"
    assert cli.ok("runs", "budget", run, "5", "--reason", "worth it", "--json").json == [{"id": run, "answer": "set"}]
    assert cli.ok("runs", "budget", run, "5", "--reason", "worth it", "--json").json[0]["answer"] == "already"
    assert "1 of 5 bodies have begun" in cli.ok("runs", "show", run).out
    assert checks(cli)["work_budgets"]["verdict"] == "ok"
    refused = cli("runs", "budget", free, "5", "--reason", "why")
    assert (refused.code, "has no work budget" in refused.out) == (1, True)
    assert cli("runs", "budget", run, "0", "--reason", "why").code == 2
    assert "bodies have begun" not in cli.ok("runs", "show", free).out


def test_retry_is_refused_with_the_reason(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn, "a"))
    refused = cli("runs", "retry", str(run))
    assert (refused.code, refused.out, f"run {run} is running" in refused.err) == (1, "", True)
    do(conn, worker, "a")
    refused = cli("runs", "retry", str(run), "--json")
    assert (refused.code, refused.json[0]["answer"], refused.err) == (1, "refused", "")
    assert "succeeded" in refused.json[0]["why"]
    assert f"there is no run {NOBODY}" in cli("runs", "retry", NOBODY).err


@pytest.mark.parametrize(("role", "cancels", "retries"), [("operator", 0, 0), ("producer", 0, 1), ("reader", 1, 1)])
def test_steering_needs_the_role_for_it(cli: Cli, dsn: str, conn: Conn, role: str, cancels: int, retries: int) -> None:
    run = start(conn, chain(conn, "a"))
    as_role = make_conninfo(dsn, options=f"-c role=taskq_{role}")
    assert cli("runs", "cancel", str(run), "--dsn", as_role).code == cancels
    q.one(conn, "select taskq.cancel_run(%s)", run)
    done = cli("runs", "retry", str(run), "--dsn", as_role)
    assert (done.code, "taskq_operator" in done.err) == (retries, bool(retries))


def test_a_reader_may_look_at_everything(cli: Cli, dsn: str, conn: Conn) -> None:
    run = str(start(conn, chain(conn, "a")))
    reader = make_conninfo(dsn, options="-c role=taskq_reader")
    for args in (["list"], ["show", run, "--receipts"], ["tree", run]):
        cli.ok("runs", *args, "--dsn", reader)


# What others say ------------------------------------------------------------------------------------------------------


def test_jobs_show_tells_of_which_run_and_node_a_job_is(cli: Cli, conn: Conn) -> None:
    run = start(conn, chain(conn, "a", "b"))
    job = str(job_of(conn, run, "a"))
    found = cli.ok("jobs", "show", job, "--json").json
    assert [found[name] for name in ("run_id", "run_epoch", "workflow", "node")] == [str(run), 1, "flow", "a"]
    facts = [line.split() for line in cli.ok("jobs", "show", job).out.splitlines()]
    assert all(fact in facts for fact in (["run", "id", str(run)], ["node", "a"], ["workflow", "flow"]))
    plain = cli.ok("jobs", "show", str(q.enqueue(conn)), "--json").json
    assert [plain[name] for name in ("run_id", "run_epoch", "workflow", "node")] == [None] * 4


def checks(cli: Cli) -> dict[str, Any]:
    return {row["check"]: row for row in cli("doctor", "--json").json["checks"]}


def test_doctor_lists_jobs_of_an_older_release_and_its_cure_works(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn, "a"))
    assert checks(cli)["run_epochs"]["verdict"] == "ok"
    job = job_of(conn, run, "a")
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        conn.execute("update taskq.jobs set run_epoch = null where id = %s", (job,))
    ill = checks(cli)["run_epochs"]
    assert (ill["verdict"], ill["found"]) == ("fail", f"1 job of runs without a run epoch: {job}")
    assert f"taskq runs cancel {run}, then taskq runs retry {run}" in ill["cure"]
    assert cli.ok("runs", "cancel", str(run), "--json").json[0]["answer"] == "cancelled"
    cli.ok("runs", "retry", str(run))
    assert checks(cli)["run_epochs"]["verdict"] == "ok"
    do(conn, worker, "a")
    assert info(conn, run)["status"] == "succeeded"


def test_doctor_lists_runs_that_stand_still_and_its_cures_work(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run, other, sound = (start(conn, chain(conn, *names)) for names in (("a", "b"), ("c", "d"), ("e",)))
    assert checks(cli)["runs"]["found"] == "3 runs at work, and each has a job that carries it on"
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        conn.execute("delete from taskq.jobs where id = %s", (job_of(conn, run, "a"),))
        conn.execute("delete from taskq.jobs where id = %s", (job_of(conn, other, "c"),))
        conn.execute("update taskq.nodes set status = 'waiting' where id = %s", (job_of(conn, other, "c"),))
    ill = checks(cli)["runs"]
    assert (ill["verdict"], ill["found"]) == ("fail", f"2 of 3 runs: {run}, {other}")
    assert f"select taskq.heal_run('{run}')" in ill["cure"]
    assert q.one(conn, "select taskq.heal_run(%s)", run) == "healed"
    assert q.one(conn, "select taskq.heal_run(%s)", other) == "sound"
    ill = checks(cli)["runs"]
    assert (ill["verdict"], ill["found"]) == ("fail", f"1 of 3 runs: {other}")
    assert f"taskq runs cancel {other} and taskq runs retry {other}" in ill["cure"]
    cli.ok("runs", "cancel", str(other))
    cli.ok("runs", "retry", str(other))
    assert checks(cli)["runs"]["verdict"] == "ok"
    for task in "abcd":
        do(conn, worker, task)
    job = job_of(conn, sound, "e")
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        conn.execute("delete from taskq.jobs where id = %s", (job,))
        conn.execute("update taskq.nodes set status = 'succeeded', finished_at = now() where id = %s", (job,))
        conn.execute("update taskq.runs set open_nodes = 0 where id = %s", (sound,))
    assert f"select taskq.heal_run('{sound}')" in checks(cli)["runs"]["cure"]
    assert q.one(conn, "select taskq.heal_run(%s)", sound) == "healed"
    assert {info(conn, each)["status"] for each in (run, other, sound)} == {"succeeded"}
    assert checks(cli)["runs"]["found"].startswith("0 runs at work")


# Signals --------------------------------------------------------------------------------------------------------------


def test_a_signal_to_a_run_is_sent_and_show_has_what_waits_and_what_became_of_it(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")], on_failure="finish"))
    claimed = take(conn, worker, "a", "b")
    a, b = (claimed[name]["job_id"] for name in ("a", "b"))
    wait = "select * from taskq.begin_wait(%s, %s, 1, %s, 1, 60)"
    for name in ("go", "bad"):
        conn.execute(wait, (worker, b, name))
    conn.execute(wait, (worker, a, "go"))
    q.end(conn, worker, q.End(a, 1, "suspend", error={"for": [{"kind": "wait", "name": "go", "occurrence": 1}]}))
    text = cli.ok("runs", "show", str(run)).out
    assert "waits for signals" in text
    assert "\nsignals" not in text
    told = cli.ok("runs", "signal", str(run), "go", '{"n": 1}', "--key", "k")
    assert told.out == f"{run}: signal go sent, and given to a node that waits for it\n"
    again = cli.ok("runs", "signal", str(run), "go", '{"n": 1}', "--key", "k", "--json").json
    assert again == [{"id": str(run), "answer": "already"}]
    for name in ("go", "bad", "other"):
        assert "kept until" in cli.ok("runs", "signal", str(run), name).out
    for name, refusal in (("go", None), ("bad", "fits nothing")):
        [signal] = q.rows(conn, "select id from taskq.signals where job_id is null and name = %s", name)
        call = "select taskq.take_signal(%s, %s, 1, %s, 1, %s, %s)"
        conn.execute(call, (worker, b, name, signal["id"], refusal))
    shown = cli.ok("runs", "show", str(run), "--json").json
    assert [(g["name"], g["state"], g["node"], g["key"]) for g in shown["signals"]] == [
        ("go", "given", "a", "k"),
        ("go", "taken", "b", None),
        ("bad", "refused", "b", None),
        ("other", "kept", None, None),
    ]
    assert shown["waits"] == []
    text = cli.ok("runs", "show", str(run)).out
    for part in ("given to a", "taken by b", "refused by b: fits nothing", "kept"):
        assert part in text


def test_a_signal_that_a_run_cannot_be_sent_is_refused(cli: Cli, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, chain(conn, "a"))
    assert cli("runs", "signal", str(run), "go", "{").code == 2
    cli.ok("runs", "signal", str(run), "go", "1", "--key", "k")
    refused = cli("runs", "signal", str(run), "go", "2", "--key", "k", "--json")
    assert (refused.code, refused.json[0]["answer"]) == (1, "refused")
    do(conn, worker, "a")
    refused = cli("runs", "signal", str(run), "go")
    assert refused.code == 1
    assert "is succeeded" in refused.err
    assert cli("runs", "signal", NOBODY, "go").code == 1

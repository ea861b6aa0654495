"""Signals to runs in the database: given to one node that waits, or kept for the first that asks."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID

import psycopg
import pytest
from children_kit import child_of, family
from runs_kit import finish, job_of, node, start, store, worker_for
from runs_kit import take as claim_tasks
from signals_kit import held, send, send_run, suspend, take, wait
from sql import (
    NOBODY,
    Conn,
    End,
    cancel,
    control_clock,
    detail,
    dump,
    end,
    get,
    one,
    refused,
    register,
    rows,
    shift_clock,
    status,
    violations,
)

CALL = "select taskq.send_run_signal(%s, %s, %s, %s)"


def waiting(conn: Conn, *names: str, waits: int | None = None) -> tuple[UUID, UUID, list[UUID]]:
    """A run of nodes beside each other, of which the first suspend for the signal ``go``; its worker and jobs."""
    run = start(conn, store(conn, [node(name) for name in names], on_failure="finish"))
    worker = worker_for(conn)
    claimed = claim_tasks(conn, worker, *names)
    jobs = [UUID(str(claimed[name]["job_id"])) for name in names]
    for job in jobs[: len(jobs) if waits is None else waits]:
        held(conn, worker, job)
    return run, worker, jobs


def became(conn: Conn, run: UUID) -> list[tuple[Any, ...]]:
    query = "select payload, state, node from taskq.run_signals where run_id = %s order by id"
    return [tuple(row.values()) for row in rows(conn, query, run)]


def states(conn: Conn, jobs: list[UUID]) -> list[str]:
    return [status(conn, job) for job in jobs]


def test_a_signal_goes_to_the_node_that_has_waited_longest_and_to_no_other(conn: Conn) -> None:
    run, worker, jobs = waiting(conn, "a", "b", "c", waits=0)
    for job in (jobs[1], jobs[0]):
        held(conn, worker, job)
    waits = rows(conn, "select job_id, run_id from taskq.waiting_for_signals order by since")
    assert [(row["job_id"], row["run_id"]) for row in waits] == [(jobs[1], run), (jobs[0], run)]
    assert send_run(conn, run, 1) == "given"
    assert states(conn, jobs) == ["held", "pending", "running"]
    assert violations(conn) == []
    assert send_run(conn, run, 2) == "given"
    assert send_run(conn, run, 3, "other") == "kept"
    assert send_run(conn, run, 4) == "kept"
    assert became(conn, run) == [(1, "given", "b"), (2, "given", "a"), (3, "kept", None), (4, "kept", None)]
    claim_tasks(conn, worker, "a", "b")
    answer, first, payload, _ = wait(conn, worker, jobs[1], epoch=2)
    assert (answer, payload) == ("signal", "1")
    assert take(conn, worker, jobs[1], first, epoch=2) == "taken"
    assert wait(conn, worker, jobs[1], epoch=2) == ("taken", first, "1", None)
    assert wait(conn, worker, jobs[0], epoch=2)[2] == "2"
    assert became(conn, run)[0] == (1, "taken", "b")
    assert violations(conn) == []


def test_what_is_kept_is_given_in_order_to_the_first_that_asks_and_once(conn: Conn) -> None:
    run, worker, [first, second] = waiting(conn, "a", "b", waits=0)
    for n in range(3):
        assert send_run(conn, run, n) == "kept"
    _, signal, payload, _ = wait(conn, worker, first)
    assert payload == "0"
    assert wait(conn, worker, second)[1] == signal, "not taken yet"
    assert take(conn, worker, second, signal) == "taken"
    assert take(conn, worker, first, signal) == "gone"
    _, own, payload, _ = wait(conn, worker, first)
    assert payload == "1"
    assert send(conn, first, "own") == "sent"
    assert take(conn, worker, first, own) == "taken"
    assert wait(conn, worker, first, occurrence=2)[2] == "2", "sent before"
    assert wait(conn, worker, second, "other")[0] == "waits"
    assert take(conn, worker, second, own + 1, "other") == "gone", "of another name"
    assert became(conn, run) == [(0, "taken", "b"), (1, "taken", "a"), (2, "kept", None)]
    assert violations(conn) == []


def test_one_that_suspends_though_its_signal_is_kept_is_due_at_once(conn: Conn) -> None:
    run, worker, [job] = waiting(conn, "a", waits=0)
    assert wait(conn, worker, job)[0] == "waits"
    assert send_run(conn, run) == "kept"
    assert suspend(conn, worker, job, ("wait", "go", 1)) == 1
    assert status(conn, job) == "pending"
    assert violations(conn) == []


def test_under_one_key_a_signal_to_a_run_is_there_once(conn: Conn) -> None:
    run, worker, [job] = waiting(conn, "a", waits=0)
    assert send_run(conn, run, 1, key="k") == "kept"
    before = dump(conn)
    assert send_run(conn, run, 1, key="k") == "already"
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        send_run(conn, run, 2, key="k")
    assert (caught.value.sqlstate, detail(caught.value)["run_id"]) == ("WF030", str(run))
    assert dump(conn) == before
    assert send(conn, job, 2, key="k") == "sent", "a key of the job's"
    _, signal, _, _ = wait(conn, worker, job)
    assert take(conn, worker, job, signal) == "taken"
    assert send_run(conn, run, 1, key="k") == "already", "also when it was taken"
    assert send_run(conn, run, 2, "other", key="k") == "kept"
    other = waiting(conn, "z", waits=0)[0]
    assert send_run(conn, other, 2, key="k") == "kept"


def test_what_is_sent_to_no_run_is_refused(conn: Conn) -> None:
    run, worker, [job] = waiting(conn, "a", waits=0)
    for name, key in (("a b", None), (None, None), ("go", "")):
        assert refused(conn, CALL, run, name, "1", key) == "WF009"
    assert refused(conn, CALL, NOBODY, "go", "1", None) == "WF025"
    assert refused(conn, CALL, run, "go", None, None) == ""
    end(conn, worker, End(job))
    before = dump(conn)
    assert refused(conn, CALL, run, "go", "1", None) == "WF026"
    assert dump(conn) == before


def test_only_so_many_are_kept_for_a_run(conn: Conn) -> None:
    conn.execute("update taskq.installation set max_waiting_signals = 2")
    run, worker, [job, other] = waiting(conn, "a", "b", waits=0)
    assert send_run(conn, run, 1, "other") == send_run(conn, run, 2, "other") == "kept"
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        send_run(conn, run, 3)
    assert (caught.value.sqlstate, detail(caught.value)["run_id"]) == ("WF040", str(run))
    held(conn, worker, job)
    assert send_run(conn, run, 3) == "given"
    _, signal, _, _ = wait(conn, worker, other, "other")
    assert take(conn, worker, other, signal, "other") == "taken"
    assert send_run(conn, run, 4) == "kept"
    assert send(conn, other) == "sent"


def test_a_payload_that_fits_nothing_is_refused_by_the_node_that_asked(conn: Conn) -> None:
    run, worker, [job, other] = waiting(conn, "a", "b", waits=0)
    send_run(conn, run, "bad")
    _, signal, _, _ = wait(conn, worker, job)
    before = dump(conn)
    assert take(conn, register(conn, level=3), job, signal) == take(conn, worker, job, signal, epoch=2) == "fenced"
    assert {k: v for k, v in dump(conn).items() if k != "workers"} == {
        k: v for k, v in before.items() if k != "workers"
    }
    assert take(conn, worker, job, signal, refused="fits nothing") == "refused"
    assert became(conn, run) == [("bad", "refused", "a")]
    assert wait(conn, worker, other)[0] == "waits"
    assert violations(conn) == []


def test_nodes_of_a_child_run_take_what_is_sent_to_the_runs_above_and_not_the_other_way(conn: Conn) -> None:
    made = family(conn)
    child = child_of(conn, made.parent)
    x = job_of(conn, child, "x")
    [claimed] = claim_tasks(conn, made.worker, "x").values()
    held(conn, made.worker, x)
    assert send_run(conn, made.parent, 1) == "given"
    assert send_run(conn, made.parent, 2) == "kept"
    assert (status(conn, x), became(conn, made.parent)) == ("pending", [(1, "given", "x"), (2, "kept", None)])
    [claimed] = claim_tasks(conn, made.worker, "x").values()
    for n, payload in ((1, "1"), (2, "2")):
        _, signal, found, _ = wait(conn, made.worker, x, epoch=2, occurrence=n)
        assert found == payload
        assert take(conn, made.worker, x, signal, epoch=2, occurrence=n) == "taken"
    assert send_run(conn, child, 3) == "kept"
    assert violations(conn) == []
    finish(conn, made.worker, claimed, result=1)
    [claimed] = claim_tasks(conn, made.worker, "y").values()
    finish(conn, made.worker, claimed, result=1)
    assert refused(conn, CALL, child, "go", "4", None) == "WF026"
    [claimed] = claim_tasks(conn, made.worker, "inner:await").values()
    finish(conn, made.worker, claimed, result=1)
    claim_tasks(conn, made.worker, "b")
    assert wait(conn, made.worker, job_of(conn, made.parent, "b"))[0] == "waits"
    assert violations(conn) == []


def duties(conn: Conn, worker: UUID) -> list[str]:
    found = rows(conn, "select * from taskq.look(%s, 30, null, '{q}', '{t}')", worker)
    return [row["name"] for row in found if row["kind"] == "duty"]


def test_one_that_ends_without_taking_what_it_was_given_leaves_it_to_the_next(conn: Conn) -> None:
    run, worker, [first, second, third] = waiting(conn, "a", "b", "c", waits=2)
    assert send_run(conn, run, 1) == "given"
    assert became(conn, run) == [(1, "given", "a")]
    assert "sweep" not in duties(conn, worker)
    assert cancel(conn, first) == "cancelled"
    assert "sweep" in duties(conn, worker)
    conn.execute("select * from taskq.sweep()")
    assert "sweep" not in duties(conn, worker)
    assert (states(conn, [second, third]), became(conn, run)) == (["pending", "running"], [(1, "given", "b")])
    assert violations(conn) == []
    # None waits: it is kept.
    assert cancel(conn, second) == "cancelled"
    assert one(conn, "select taskq.return_signals()") == 1
    assert one(conn, "select taskq.return_signals()") == 0
    assert wait(conn, worker, third)[2] == "1"
    assert violations(conn) == []


def test_the_sweep_says_that_there_may_be_more(conn: Conn) -> None:
    runs = [waiting(conn, "a", "b", waits=1) for _ in range(2)]
    for run, worker, _ in runs:
        assert send_run(conn, run) == "given"
        finish(conn, worker, claim_tasks(conn, worker, "a")["a"])
    said = [[(row["job_id"], row["settled"]) for row in rows(conn, "select * from taskq.sweep()")] for _ in range(3)]
    assert said == [[(None, "more")], [(None, "more")], []]
    assert [row["state"] for row in rows(conn, "select state from taskq.run_signals")] == ["kept", "kept"]


def test_a_run_that_is_reopened_has_what_nobody_has_taken(conn: Conn) -> None:
    run, worker, [job] = waiting(conn, "a")
    assert send_run(conn, run, 1) == "given"
    assert send_run(conn, run, 2) == "kept"
    assert cancel(conn, job) == "cancelled"
    conn.execute("select * from taskq.sweep()")
    assert became(conn, run) == [(1, "kept", None), (2, "kept", None)], "it has ended"
    assert one(conn, "select taskq.retry_run(%s)", run) == "reopened"
    claim_tasks(conn, worker, "a")
    assert wait(conn, worker, job, epoch=2)[2] == "1"
    assert get(conn, job)["generation"] == 1
    assert violations(conn) == []


def test_one_that_is_tried_again_keeps_what_it_was_given(conn: Conn) -> None:
    run, worker, [job] = waiting(conn, "a")
    send_run(conn, run, 1)
    claim_tasks(conn, worker, "a")
    end(conn, worker, End(job, 2, "release"))
    assert one(conn, "select taskq.return_signals()") == 0
    assert became(conn, run) == [(1, "given", "a")]
    assert violations(conn) == []


def test_signals_to_a_run_are_forgotten_with_it(conn: Conn) -> None:
    control_clock(conn)
    run, worker, [job] = waiting(conn, "a", waits=0)
    send_run(conn, run, 1)
    send_run(conn, run, 2)
    _, signal, _, _ = wait(conn, worker, job)
    take(conn, worker, job, signal)
    end(conn, worker, End(job))
    shift_clock(conn, "40 days")
    conn.execute("delete from taskq.history where id = %s", (job,))
    conn.execute("select taskq.prune_steps()")
    assert (one(conn, "select count(*) from taskq.steps"), len(became(conn, run))) == (0, 2)
    assert [code for code, _ in violations(conn, "live")] == []
    assert one(conn, "select taskq.prune_runs()") == 1
    assert one(conn, "select taskq.prune_steps(1)") == one(conn, "select taskq.prune_steps(1)") == 1
    assert became(conn, run) == []


@pytest.mark.parametrize(
    "row",
    ["null, null, 0, null, null", "null, {run}, 0, null, null", "{job}, null, null, null, null"]
    + ["null, {run}, null, now(), null", "null, {run}, null, null, now()"],
)
def test_the_table_refuses_signals_that_are_none(conn: Conn, row: str) -> None:
    run, _, [job] = waiting(conn, "a")
    insert = "insert into taskq.signals (name, sent_at, payload, job_id, run_id, generation, taken_at, refused_at)"
    given = row.format(run=f"'{run}'", job=f"'{job}'")
    assert refused(conn, f"{insert} values ('go', now(), '1', {given})") == "23514"


# The check -----------------------------------------------------------------------------------------------------------

FORGERIES: list[tuple[str, str]] = [
    (
        "run_signal_not_given",
        "insert into taskq.signals (run_id, name, sent_at, payload)"
        " select run_id, 'go', now(), '1' from taskq.nodes where id = %s",
    ),
    (
        "run_signal_astray",
        "insert into taskq.signals (job_id, run_id, generation, name, sent_at, payload)"
        " select n.id, r.id, 0, 'x', now(), '1' from taskq.nodes n, taskq.runs r where n.id = %s and r.id <> n.run_id",
    ),
]


@pytest.mark.parametrize(("code", "forge"), FORGERIES)
def test_a_forged_signal_to_a_run_is_reported_for_its_job(conn: Conn, code: str, forge: str) -> None:
    waiting(conn, "a")
    _, _, [job] = waiting(conn, "b")
    assert violations(conn) == []
    assert conn.execute(forge, (job,)).rowcount == 1
    assert violations(conn, "live") == [(code, job)]


def test_each_check_of_signals_to_runs_has_its_forgery(conn: Conn) -> None:
    text = one(conn, "select prosrc from pg_proc where oid = 'taskq.check_steps(text)'::regprocedure")
    assert {code for code in re.findall(r"select \d+, '(\w+)'", text) if code.startswith("run")} == {
        code for code, _ in FORGERIES
    }

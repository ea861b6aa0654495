"""``taskq jobs wait`` and ``taskq runs wait``: what has ended already, what ends meanwhile, and what does not."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
import sql as q
from cli_kit import Cli, make_cli  # noqa: F401
from helpers import eventually
from runs_kit import do, node, result_of, start, store, worker_for

Conn = psycopg.Connection[Any]
NOBODY = "01999999-0000-7000-8000-000000000000"
LOOKING = (
    "select count(*) from pg_stat_activity where application_name like 'taskq%%' and query like '%%' || %s || '%%'"
)


@pytest.mark.parametrize("of", ["jobs", "runs"])
def test_what_has_ended_is_told_at_once(cli: Cli, conn: Conn, of: str) -> None:
    worker = worker_for(conn, tasks=["a"])
    ids = []
    for outcome in ("succeeded", "failed"):
        run = start(conn, store(conn, [node("a")], result=result_of(0)))
        job = q.one(conn, "select id from taskq.nodes where run_id = %s", run)
        do(conn, worker, "a", outcome, result={"n": 7})
        ids.append(str(run if of == "runs" else job))
    assert cli.ok(of, "wait", ids[0]).out == '{"n": 7}\n'
    assert cli.ok(of, "wait", ids[0], "--json").json == {
        "id": ids[0], "answer": "succeeded", "result": {"n": 7}, "error": None
    }  # fmt: skip
    failed = cli(of, "wait", ids[1])
    assert (failed.code, failed.out) == (1, "")
    assert f"{of[:-1]} {ids[1]} is failed: " in failed.err
    assert "boom" in failed.err
    assert cli(of, "wait", ids[1], "--json").json["error"]["message"] in ("boom", "node a has failed: boom")


@pytest.mark.parametrize("of", ["jobs", "runs"])
def test_what_ends_meanwhile_is_waited_for(cli: Cli, conn: Conn, of: str) -> None:
    worker = worker_for(conn, tasks=["a"])
    run = start(conn, store(conn, [node("a")], result=result_of(0)))
    job = q.one(conn, "select id from taskq.nodes where run_id = %s", run)
    with cli.process(of, "wait", str(run if of == "runs" else job), "--json", "--timeout", "60s") as waiting:
        eventually(lambda: q.one(conn, LOOKING, f"finished_at, {of[0] if of == 'runs' else 'a'}.status"), 30)
        assert waiting.poll() is None
        do(conn, worker, "a", result=[1])
        out, _ = waiting.communicate(timeout=30)
    assert (waiting.returncode, json.loads(out)["result"]) == (0, [1])


@pytest.mark.parametrize("of", ["jobs", "runs"])
def test_what_does_not_end_in_time_or_is_not_there(cli: Cli, conn: Conn, of: str) -> None:
    run = start(conn, store(conn, [node("a")]))
    id_ = str(run if of == "runs" else q.one(conn, "select id from taskq.nodes where run_id = %s", run))
    done = cli(of, "wait", id_, "--timeout", "0.1s")
    assert (done.code, done.out) == (1, "")
    stands = "running" if of == "runs" else "pending"
    assert f"{of[:-1]} {id_} has not ended within 0.1 s, and is {stands}; taskq {of} show {id_}" in done.err
    assert cli(of, "wait", id_, "--timeout", "0.1s", "--json").json["answer"] == "timeout"
    done = cli(of, "wait", NOBODY)
    assert (done.code, done.out) == (1, "")
    assert f"there is no {of[:-1]} {NOBODY}" in done.err
    assert cli(of, "wait", NOBODY, "--json").json["answer"] == "not_found"
    done = cli(of, "wait", id_, "--timeout", "soon")
    assert (done.code, "--timeout" in done.err) == (2, True)

"""The commands that look at jobs and steer them, on a real database: answers, exit codes, JSON, and the record."""

from __future__ import annotations

import getpass
import json
import re
import socket

import psycopg
import pytest
import sql as q
from cli_kit import Cli, make_cli  # noqa: F401

from taskq.cli.output import print_table

ANSI = re.compile(r"\x1b\[[0-9;]*m")
NOBODY = "01999999-0000-7000-8000-000000000000"


def test_list_has_filters_a_limit_and_the_newest_first(cli: Cli, conn: psycopg.Connection) -> None:
    first = str(q.enqueue(conn, queue="a", task="one"))
    second = str(q.enqueue(conn, queue="b", task="two"))
    worker, third = q.running(conn, queue="c", task="one")
    q.end(conn, worker, q.End(third, outcome="failed", error={"type": "Oops", "message": "no"}))
    failed = str(third)

    def ids(*args: str) -> list[str]:
        return [row["id"] for row in cli.ok("jobs", "list", "--json", *args).json]

    assert q.status(conn, third) in {"pending", "failed"}
    assert ids() == [failed, second, first]
    assert ids("--limit", "1") == [failed]
    assert ids("--queue", "a", "--queue", "b") == [second, first]
    assert ids("--task", "one") == [failed, first]
    assert ids("--status", q.status(conn, third), "--queue", "c") == [failed]
    assert ids("--status", "cancelled") == []
    assert ids("--status", "pending,held", "--status", "failed") == [failed, second, first]
    assert ids("--since", "1h") == [failed, second, first]
    assert ids("--since", "2999-01-01") == []
    table = cli.ok("jobs", "list", "--queue", "c").out
    assert failed in table
    assert "Oops: no" in table
    assert cli.ok("jobs", "list", "--status", "held").out == "no jobs\n"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_an_id_stands_whole_on_one_line_of_a_terminal(
    cli: Cli, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    worker, job = q.running(conn, queue="a-queue-of-a-very-long-name", task="a-task-of-a-very-long-name")
    error = {"type": "Oops", "message": "no " * 50}
    q.end(conn, worker, q.End(job, outcome="failed", error=error))
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for args, found in ((["jobs", "list"], job), (["workers", "list"], worker), (["jobs", "cancel", str(job)], job)):
        done = cli(*args)
        assert [line for line in done.out.splitlines() if str(found) in line], done.out
        if width >= 80:
            assert max(len(ANSI.sub("", line)) for line in done.out.splitlines()) <= width
    narrow = cli.ok("jobs", "list")
    if width == 40:
        assert "left out on this narrow terminal: run_at, finished_at" in narrow.err
    else:
        assert "a-task-of-a-very" in narrow.out
    assert "left out" not in cli.ok("queues", "list").err


def test_a_pipe_gets_every_cell_unfolded_and_in_its_column(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 12_000
    rows = [{"name": "表", "says": long, "n": 1}, {"name": "b", "says": "one\ntwo", "n": 22}]
    print_table(rows, ["name", "says", "n"])
    assert capsys.readouterr().out.splitlines() == [
        "name  says" + " " * (len(long) - 4) + "  n",
        f"表    {long}  1",
        "b     one" + " " * (len(long) - 3) + "  22",
        "      two",
    ]


def test_since_means_the_end_of_finished_jobs(cli: Cli, conn: psycopg.Connection) -> None:
    q.control_clock(conn)
    q.stop_clock(conn)
    old, finished = q.enqueue(conn), q.enqueue(conn)
    q.shift_clock(conn, "2 days")
    conn.execute("select taskq.ensure_partitions()")
    q.cancel(conn, finished)
    found = cli.ok("jobs", "list", "--since", "1d", "--json").json
    assert [row["id"] for row in found] == [str(finished)]
    assert {row["id"] for row in cli.ok("jobs", "list", "--json").json} == {str(old), str(finished)}


def test_show_has_the_job_its_attempts_and_what_operators_did(cli: Cli, conn: psycopg.Connection) -> None:
    worker, job = q.running(conn, payload={"n": 7})
    error = {"type": "Oops", "message": "no", "traceback": "line one\nline two"}
    q.end(conn, worker, q.End(job, outcome="failed", error=error))
    assert cli.ok("jobs", "retry", str(job), "--reason", "fixed it").out.split()[-2:] == [str(job), "reopened"]
    told = cli.ok("jobs", "show", str(job), "--json").json
    assert (told["id"], told["status"], told["payload"]) == (str(job), "pending", {"n": 7})
    assert [(a["claim_epoch"], a["outcome"], a["error"]) for a in told["attempts"]] == [(1, "failed", error)]
    [done] = told["audit"]
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    assert (done["action"], done["reason"], done["actor"]) == ("retry", "fixed it", who)
    q.cancel(conn, job)
    text = cli.ok("jobs", "show", str(job)).out
    for part in ("fixed it", "Oops: no", "while it waited, after it had been claimed 1 times", '"n": 7', who):
        assert part in text
    q.cancel(conn, fresh := q.enqueue(conn))
    assert "cancelled before it started" in cli.ok("jobs", "show", str(fresh)).out
    missing = cli("jobs", "show", NOBODY)
    assert (missing.code, missing.out) == (1, "")
    assert missing.err.startswith(f"error: there is no job {NOBODY}")
    missing = cli("jobs", "show", NOBODY, "--json")
    assert (missing.code, missing.json["id"], missing.json["answer"]) == (1, NOBODY, "not_found")


def test_show_has_the_steps_of_a_durable_body(cli: Cli, conn: psycopg.Connection) -> None:
    worker, job = q.running(conn)
    record = (
        "select * from taskq.record_steps(array[%s], array[%s], array[%s]::bigint[], array[%s], array[%s],"
        " array[%s::jsonb], true)"
    )
    for name, occurrence, value in (("charge", 1, '{"cents": 7}'), ("page", 2, f'"{"x" * 200}"')):
        conn.execute(record, (worker, job, 1, name, occurrence, value))
    q.end(conn, worker, q.End(job, outcome="failed"))
    q.retry(conn, job)
    q.make_due(conn, job)
    q.claim_one(conn, worker)
    conn.execute(record, (worker, job, 2, "renamed", 1, "1"))
    conn.execute("select taskq.leave_steps(%s, %s, 2, array['step'], array['renamed'], array[1])", (worker, job))
    told = cli.ok("jobs", "show", str(job), "--json").json
    assert [(s["name"], s["occurrence"], s["claim_epoch"], s["current"], s["left_out"]) for s in told["steps"]] == [
        ("charge", 1, 1, False, False),
        ("page", 2, 1, False, False),
        ("renamed", 1, 2, True, False),
    ]
    assert told["steps"][0]["value"] == {"cents": 7}
    q.end(conn, worker, q.End(job, 2))
    text = cli.ok("jobs", "show", str(job)).out
    for part in ("steps", "charge (of generation 0)", "page #2", "renamed (not asked for by the attempt", "xxx..."):
        assert part in text


def test_a_signal_is_sent_and_show_has_what_became_of_it(cli: Cli, conn: psycopg.Connection) -> None:
    worker, job = q.running(conn)
    wait = "select * from taskq.begin_wait(%s, %s, 1, %s, %s, %s)"
    conn.execute("select * from taskq.begin_sleep(%s, %s, 1, 'rest', 1, 60)", (worker, job))
    for name, occurrence, seconds in (("go", 1, None), ("late", 1, 0), ("stop", 2, 60)):
        conn.execute(wait, (worker, job, name, occurrence, seconds))
    told = cli.ok("jobs", "signal", str(job), "go", '{"n": 1}', "--key", "k")
    assert told.out.split() == [f"{job}:", "signal", "go", "sent"]
    again = cli.ok("jobs", "signal", str(job), "go", '{"n": 1}', "--key", "k", "--json").json
    assert again == [{"id": str(job), "answer": "already"}]
    assert "under this key" in cli.ok("jobs", "signal", str(job), "go", '{"n": 1}', "--key", "k").out
    for payload in ('"bad"', "null"):
        cli.ok("jobs", "signal", str(job), "go", payload)
    first, second, _ = [r["id"] for r in q.rows(conn, "select id from taskq.signals order by id")]
    conn.execute("select taskq.take_signal(%s, %s, 1, 'go', 1, %s)", (worker, job, first))
    conn.execute("select taskq.take_signal(%s, %s, 1, 'go', 1, %s, 'fits nothing')", (worker, job, second))
    shown = cli.ok("jobs", "show", str(job), "--json").json
    assert [(s["kind"], s["name"], s["done"]) for s in shown["steps"]] == [
        ("sleep", "rest", True),
        ("wait", "late", True),
        ("wait", "stop", False),
        ("wait", "go", True),
    ]
    assert [(g["payload"], g["key"], g["refused_why"]) for g in shown["signals"]] == [
        ({"n": 1}, "k", None),
        ("bad", None, "fits nothing"),
        (None, None, None),
    ]
    text = cli.ok("jobs", "show", str(job)).out
    for part in ("sleeps until 2", "timed out", "waits for its signal, until 2", "taken", "refused: fits nothing"):
        assert part in text


def test_show_has_the_children_of_a_job_and_the_parent_of_a_child(cli: Cli, conn: psycopg.Connection) -> None:
    worker, job = q.running(conn)
    call = "select * from taskq.start_child(%s, %s, 1, %s, 1, %s, '{}', null, null, null)"
    spec = {"task": "c", "queue": "c", "policy_id": q.POLICY, "effect_class": "idempotent", "max_attempts": 1}
    ids = [
        q.rows(conn, call, worker, job, name, json.dumps({**spec, "task": name}))[0]["child"]
        for name in ("good", "bad", "late")
    ]
    lanes = {"tasks": ["good", "bad"], "lanes": [("c", 5)]}
    for claimed in q.claim(conn, worker, 2, **lanes):
        failed = claimed["task"] == "bad"
        error = {"type": "Boom", "message": "no paper"}
        q.end(conn, worker, q.End(claimed["job_id"], 1, "failed", error=error) if failed else q.End(claimed["job_id"]))
    for name in ("good", "bad"):
        conn.execute(call, (worker, job, name, None))
    text = cli.ok("jobs", "show", str(job)).out
    good, bad, late = ids
    for part in (f"job {good}: null", f"job {bad}: Boom: no paper", f"waits for job {late}"):
        assert part in text
    shown = cli.ok("jobs", "show", str(job), "--json").json
    assert [(s["kind"], s["child_job"]) for s in shown["steps"]] == [("child", str(each)) for each in (late, good, bad)]
    assert cli.ok("jobs", "show", str(late), "--json").json["parent_job"] == str(job)


def test_a_signal_that_cannot_be_sent_is_refused(cli: Cli, conn: psycopg.Connection) -> None:
    worker, job = q.running(conn)
    assert cli("jobs", "signal", str(job), "go", "{").code == 2
    cli.ok("jobs", "signal", str(job), "go", "1", "--key", "k")
    refused = cli("jobs", "signal", str(job), "go", "2", "--key", "k", "--json")
    assert (refused.code, refused.json[0]["answer"]) == (1, "refused")
    q.end(conn, worker, q.End(job))
    refused = cli("jobs", "signal", str(job), "go")
    assert refused.code == 1
    assert "is succeeded" in refused.err


def test_cancel_answers_for_each_job_and_fails_if_one_was_refused(cli: Cli, conn: psycopg.Connection) -> None:
    pending = str(q.enqueue(conn))
    _, running = q.running(conn, queue="other")
    done = cli.ok("jobs", "cancel", pending, str(running), "--reason", "not wanted", "--json")
    assert done.json == [{"id": pending, "answer": "cancelled"}, {"id": str(running), "answer": "requested"}]
    again = cli("jobs", "cancel", NOBODY, pending, "--json")
    assert (again.code, [row["answer"] for row in again.json]) == (1, ["not_found", "finished"])
    assert q.rows(conn, "select reason from taskq.audit") == [{"reason": "not wanted"}] * 2


def test_retry_goes_on_after_a_refusal_and_says_why(cli: Cli, conn: psycopg.Connection) -> None:
    waiting = str(q.enqueue(conn))
    _, running = q.running(conn, queue="other")
    done = cli("jobs", "retry", str(running), NOBODY, waiting, "--json")
    assert done.code == 1
    assert [row["answer"] for row in done.json] == ["refused", "refused", "due"]
    assert "is running, not finished" in done.json[0]["why"]


@pytest.mark.parametrize("happened", [True, False])
def test_resolve(cli: Cli, conn: psycopg.Connection, happened: bool) -> None:
    _, job = q.unknown(conn)
    more = ["--happened", "--result", '{"receipt": 7}'] if happened else ["--did-not-happen"]
    assert cli("jobs", "resolve", str(job), *more).code == 2  # no reason
    assert cli("jobs", "resolve", str(job), "--reason", "asked").code == 2  # no decision
    assert cli("jobs", "resolve", str(job), "--did-not-happen", "--result", "1", "--reason", "asked").code == 2
    assert cli("jobs", "resolve", str(job), "--happened", "--result", "{", "--reason", "asked").code == 2
    assert q.status(conn, job) == "unknown"
    done = cli.ok("jobs", "resolve", str(job), *more, "--reason", "asked them", "--json")
    assert done.json == [{"id": str(job), "answer": "succeeded" if happened else "cancelled"}]
    assert q.get(conn, job)["result"] == ({"receipt": 7} if happened else None)
    again = cli("jobs", "resolve", str(job), *more, "--reason", "asked them")
    assert (again.code, "was resolved before" in again.err) == (1, True)
    [told] = cli("jobs", "resolve", str(job), *more, "--reason", "asked them", "--json").json
    assert (told["id"], told["answer"]) == (str(job), "refused")
    assert "was resolved before" in told["why"]


def test_the_help_of_resolve_says_what_is_required_and_what_follows(cli: Cli) -> None:
    text = " ".join(cli.ok("jobs", "resolve", "--help").out.replace("│", " ").split())
    assert (text.count("[required]"), text.count("Required.")) == (1, 2)
    assert "cancelled where cancelling was requested, else it is pending again" in text


def test_queues(cli: Cli, conn: psycopg.Connection) -> None:
    assert cli.ok("queues", "list").out == "no queues\n"
    q.enqueue(conn, queue="mail")
    assert "paused" in cli.ok("queues", "pause", "mail", "--reason", "provider is down").out
    assert "was paused already" in cli.ok("queues", "pause", "mail").out
    [row] = cli.ok("queues", "list", "--json").json
    assert (row["queue"], row["due"], row["running"], row["paused_at"] is None) == ("mail", 1, 0, False)
    told = {"queue": "mail", "due": 1, "running": 0}
    assert cli.ok("queues", "resume", "mail", "--json").json == [{**told, "answer": "resumed"}]
    assert cli.ok("queues", "resume", "mail", "--json").json == [{**told, "answer": "was not paused"}]
    assert cli("queues", "pause", "a b").code == 2
    assert q.one(conn, "select count(*) from taskq.audit where subject = 'mail' and actor like '%%@%%'") == 2


def test_a_queue_that_nothing_knows_is_not_made_by_a_slip(cli: Cli, conn: psycopg.Connection) -> None:
    q.enqueue(conn, queue="mail")
    for command in ("pause", "resume"):
        done = cli("queues", command, "mail", "mial")
        assert (done.code, done.out) == (1, "")
        assert "knows the queue 'mial', and nothing was changed; known are: mail" in done.err
    [row] = cli.ok("queues", "list", "--json").json
    assert (row["queue"], row["paused_at"], row["workers"]) == ("mail", None, 0)
    [made] = cli.ok("queues", "pause", "mial", "--create", "--json").json
    assert made == {"queue": "mial", "answer": "paused", "due": 0, "running": 0}
    worker, _ = q.running(conn, q.register(conn, queues=["served"]), queue="served")
    assert [r["workers"] for r in cli.ok("queues", "list", "--json").json if r["queue"] == "served"] == [1]
    q.lose(conn, worker)
    cli.ok("queues", "pause", "served")


def test_what_a_user_may_not_do_names_the_role(cli: Cli, conn: psycopg.Connection) -> None:
    conn.execute("do $$ begin create role nobody_special login; exception when duplicate_object then null; end $$")
    dsn = psycopg.conninfo.make_conninfo(cli.dsn, user="nobody_special")
    for args, role in ((["jobs", "list"], "taskq_reader"), (["jobs", "cancel", NOBODY], "taskq_operator")):
        done = cli(*args, "--dsn", dsn)
        assert (done.code, done.err.count("\n"), "LINE" in done.err) == (1, 1, False)
        assert f"grant the role {role} to that user" in done.err


def test_workers(cli: Cli, conn: psycopg.Connection) -> None:
    worker, _ = q.running(conn)
    [row] = cli.ok("workers", "list", "--json").json
    assert (row["id"], row["status"], row["holds"]) == (str(worker), "live", 1)
    q.lose(conn, worker)
    conn.execute("update taskq.workers set lease_expires_at = renewed_at")  # not the -infinity of the helper
    assert cli.ok("workers", "list").out == "no workers\n"
    assert "lost" in cli.ok("workers", "list", "--all").out


def test_verify(cli: Cli, conn: psycopg.Connection) -> None:
    job = q.enqueue(conn)
    for scope in ([], ["--all"], ["--since", "1h"], ["--since", "2020-01-01T00:00:00+01:00"]):
        assert cli.ok("verify", *scope, "--json").json["violations"] == []
    assert cli.ok("verify").out == "no violations (scope: live)\n"
    assert cli("verify", "--all", "--since", "1h").code == 2
    conn.execute("delete from taskq.policies")
    broken = cli("verify", "--json")
    assert (broken.code, broken.json["ok"]) == (1, False)
    assert [(v["code"], v["job_id"]) for v in broken.json["violations"]] == [("policy_missing", str(job))]
    assert "policy_missing" in cli("verify").out


@pytest.mark.parametrize(
    "args",
    [
        ["jobs", "list", "--status", "done"],
        ["jobs", "list", "--since", "yesterday"],
        ["jobs", "list", "--limit", "0"],
        ["jobs", "show", "seven"],
        ["jobs", "cancel", NOBODY, "seven"],
        ["jobs", "cancel"],
        ["jobs"],
        ["nothing"],
        ["enqueue"],
        ["enqueue", "t", "{"],
        ["enqueue", "t", "[1]"],
        ["enqueue", "t", '{"x": NaN}'],
        ["enqueue", "t", "--run-in", "soon"],
        ["enqueue", "t", "--run-at", "soon"],
        ["enqueue", "t", "--run-at", "2031-01-01T00:00:00"],
        ["enqueue", "t", "--run-in", "1s", "--run-at", "2031-01-01"],
        ["enqueue", "t", "--priority", "10"],
        ["demo", "--folder"],
    ],
)
def test_usage_errors(cli: Cli, args: list[str]) -> None:
    done = cli(*args)
    assert (done.code, done.out) == (2, "") if args != ["jobs"] else done.code == 2


def test_a_command_without_a_database_says_what_to_set(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASKQ_DSN")
    for args in (["jobs", "list"], ["queues", "list"], ["workers", "list"], ["verify"], ["enqueue", "t"]):
        done = cli(*args)
        assert done.code == 2, args
        assert "set TASKQ_DSN, pass --dsn" in done.err


def test_a_database_that_does_not_answer_or_has_no_taskq(cli: Cli, empty_dsn: str) -> None:
    nowhere = cli("jobs", "list", "--dsn", "postgresql://u:sekret@127.0.0.1:1/x")
    assert (nowhere.code, nowhere.out) == (3, "")
    assert nowhere.err.count("\n") == 1
    assert "sekret" not in nowhere.err
    for args in (["jobs", "list"], ["jobs", "show", NOBODY], ["queues", "list"], ["verify"], ["enqueue", "t"]):
        empty = cli(*args, "--dsn", empty_dsn)
        assert empty.code == 1, args
        assert "run 'taskq migrate up'" in empty.err
        assert empty.err.count("\n") == 1
        assert "LINE" not in empty.err


def test_help_loads_no_command(cli: Cli) -> None:
    from taskq.cli import COMMANDS

    text = cli.ok("--help").out
    for name, (_, said) in COMMANDS.items():
        assert name in text
        assert said.split()[0] in text
        assert cli.ok(name, "--help").out

"""``taskq worker`` and ``taskq enqueue``: finding the app, agreeing on the database, and a whole life as a process."""

from __future__ import annotations

import json
import signal
import socket
import sys
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
import sql as q
from cli_kit import SHOP, Cli, make_cli  # noqa: F401
from helpers import eventually

import taskq
from taskq import __main__, migrate
from taskq.db.dsn import describe_dsn
from taskq.version import __version__
from taskq.worker.supervised import Supervised


def module(cli: Cli, source: str) -> str:
    """A module of a name that was never imported."""
    name = f"shop_{uuid4().hex}"
    (cli.folder / f"{name}.py").write_text(source)
    return name


def status_of(conn: psycopg.Connection, job: str) -> str:
    return str(q.one(conn, "select status from taskq.all_jobs where id = %s", job))


def test_a_worker_lives_and_stops(cli: Cli, conn: psycopg.Connection) -> None:
    (cli.folder / "shop.py").write_text(SHOP)
    unpublished = cli("enqueue", "add", '{"a": 1}')
    assert (unpublished.code, unpublished.err.count("\n")) == (1, 1)
    assert "start a worker whose app has it, or pass --app" in unpublished.err
    assert "policy =>" not in unpublished.err
    options = ["--queue", "mail,other", "-q", "third", "--concurrency", "7", "--lease", "5", "--name", "w1"]
    with cli.process("worker", "shop:app", *options, "--log-format", "json", TASKQ_PRINT_ORIGIN="1") as process:
        eventually(lambda: q.one(conn, "select count(*) from taskq.workers where status = 'live'") == 1, timeout=30)
        [worker] = cli.ok("workers", "list", "--json").json
        assert (worker["name"], worker["queues"], worker["concurrency"]) == ("w1", ["mail", "other", "third"], 7)
        job = cli.ok("enqueue", "add", '{"a": 40}', "--idempotency-key", "k").out.strip()
        again = cli.ok("enqueue", "add", '{"a": 40}', "--idempotency-key", "k", "--json")
        assert again.json == {"id": job, "new": False}
        assert "was there already" in cli.ok("enqueue", "add", '{"a": 40}', "--idempotency-key", "k").err
        fresh = cli.ok("enqueue", "add", '{"a": 41}', "--idempotency-key", "k2", "--json")
        assert (fresh.json["new"], fresh.err) == (True, "")
        assert (
            "no live worker serves the queue elsewhere" in cli.ok("enqueue", "add", '{"a": 1}', "-q", "elsewhere").err
        )
        eventually(lambda: status_of(conn, job) == "succeeded")
        told = cli.ok("jobs", "show", job, "--json").json
        assert (told["result"], told["worker"], told["queue"]) == (42, "w1", "mail")
        failing = cli.ok("enqueue", "add", '{"a": -1}').out.strip()
        eventually(lambda: status_of(conn, failing) == "failed")
        assert "a is negative" in cli.ok("jobs", "show", failing).out
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert f"taskq imported from {Path(taskq.__file__).parent}" in output
    [started] = [json.loads(line) for line in output.splitlines() if '"event": "worker.started"' in line]
    assert started["database"] == describe_dsn(cli.dsn)
    assert '"event": "worker.stopped"' in output
    assert cli.ok("verify", "--all").code == 0
    [worker] = cli.ok("workers", "list", "--all", "--json").json
    assert worker["status"] == "stopped"


def test_a_thread_that_cannot_be_stopped_does_not_hold_the_process(cli: Cli, conn: psycopg.Connection) -> None:
    (cli.folder / "shop.py").write_text(SHOP)
    with cli.process("worker", "shop:app") as process:
        eventually(lambda: q.one(conn, "select count(*) from taskq.task_config") == 2, timeout=30)
        job = cli.ok("enqueue", "stuck").out.strip()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 76, output
    assert status_of(conn, job) == "failed"
    assert cli.ok("verify", "--all").code == 0


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("nosuch:app", "there is no module 'nosuch'"),
        ("{shop}.tasks:app", "there is no module '{shop}.tasks'"),
        ("{shop}.py:app", "without '.py'"),
        ("{shop}:other", "it has a TaskQ named app: write {shop}:app"),
        ("{shop}:add", "is of type AsyncTask, not a TaskQ"),
        ("{shop}", "is not of the form module:attribute"),
        ("{empty}:app", "put app = TaskQ() into {empty}"),
        ("{leaves}:app", "ended the process while it was imported (exit 3)"),
    ],
)
def test_an_app_that_cannot_be_found(cli: Cli, reference: str, said: str) -> None:
    names = {
        "shop": module(cli, SHOP),
        "empty": module(cli, "x = 1"),
        "leaves": module(cli, "import sys\nsys.exit(3)"),
    }
    for command in (["worker"], ["enqueue", "add", '{"a": 1}', "--app"]):
        done = cli(*command, reference.format(**names))
        assert (done.code, done.out) == (2, "")
        assert said.format(**names) in done.err
        assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def broken():\n    return 1 / 0\nbroken()\n", "ZeroDivisionError"),
        ("import no_such_thing\n", "it needs 'no_such_thing'"),
        ("def (\n", "SyntaxError"),
    ],
)
def test_a_module_that_raises_shows_its_own_traceback(
    cli: Cli, capsys: pytest.CaptureFixture[str], source: str, said: str
) -> None:
    from taskq.cli import main

    name = module(cli, source)
    with pytest.raises(SystemExit) as ended:
        main(["worker", f"{name}:app"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert said in shown.splitlines()[-1]
    assert f"{name}.py" in shown
    assert "taskq/cli" not in shown
    assert "importlib" not in shown


def test_worker_settings(cli: Cli, monkeypatch: pytest.MonkeyPatch, empty_dsn: str) -> None:
    shop = module(cli, SHOP)
    done = cli("worker")
    assert (done.code, "no app is named" in done.err) == (2, True)
    assert cli("worker", f"{shop}:app", "--concurrency", "0").code == 2
    assert cli("worker", f"{shop}:app", "--lease", "soon").code == 2
    assert cli("worker", f"{shop}:app", "--name", "a b").code == 1
    assert "has nothing of taskq" in cli("worker", f"{shop}:app", "--dsn", empty_dsn).err
    assert "app, from the command line, is wrong" in cli("worker", "shop").err
    assert "queues, from the flag --queue, is wrong" in cli("worker", f"{shop}:app", "--queue", "a b").err
    assert "75" in cli.ok("worker", "--help").out
    monkeypatch.setenv("TASKQ_CONCURENCY", "3")
    done = cli("worker", f"{shop}:app")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "TASKQ_CONCURENCY is no setting, so it would do nothing: it looks like TASKQ_CONCURRENCY" in done.err
    monkeypatch.delenv("TASKQ_CONCURENCY")
    monkeypatch.setenv("TASKQ_SCHEMA", "elsewhere")
    fresh = module(cli, SHOP)
    done = cli("worker", f"{fresh}:app")
    assert (done.code, "TASKQ_SCHEMA says elsewhere" in done.err) == (2, True)
    monkeypatch.setenv("TASKQ_UNDER_TEST", str(cli.folder))
    done = cli("worker", f"{fresh}:app")
    assert (done.code, "the wrong code would run" in done.err) == (2, True)


def test_several_workers_are_replaced_after_their_jobs(cli: Cli, conn: psycopg.Connection) -> None:
    shop = f"{module(cli, SHOP)}:app"
    jobs = [cli.ok("enqueue", "add", f'{{"a": {n}}}', "--app", shop).out.strip() for n in range(2)]
    options = ["--processes", "1", "--max-jobs", "1", "--name", "w", "--concurrency", "1", "--log-format", "json"]
    with cli.process("worker", shop, *options) as process:
        # Each process ends after its one job, once another is ready.
        eventually(lambda: {status_of(conn, job) for job in jobs} == {"succeeded"}, timeout=60)
        names = "select array_agg(distinct name order by name) from taskq.workers"
        eventually(lambda: q.one(conn, names)[:2] == ["w-1", "w-1.2"], timeout=60)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [e["reason"] for e in events if e["event"] == "worker.recycling"][0] == "max_jobs"
    # It was told to stop once its successor was ready.
    ended = [(e["name"], e["exit_code"]) for e in events if e["event"] == "supervisor.process_ended"]
    assert ("w-1", 0) in ended


def test_a_worker_without_a_database(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TASKQ_DSN")
    done = cli("worker", f"{module(cli, SHOP)}:app")
    assert (done.code, "set TASKQ_DSN" in done.err, "--dsn" in done.err) == (2, True, True)
    for dsn in ("postgresql://u:sekret@127.0.0.1:1/x", "postgresql://u:se#kret@127.0.0.1:1/x"):
        for args in (["worker", f"{module(cli, SHOP)}:app"], ["enqueue", "t"], ["dev"]):
            done = cli(*args, "--dsn", dsn)
            assert done.code == (2 if "#" in dsn else 3)
            assert "kret" not in done.err + done.out
            assert done.err.splitlines()[-1].startswith("error: ")


def test_the_flag_wins_over_the_apps_own_database(cli: Cli, conn: psycopg.Connection) -> None:
    source = SHOP.replace("TaskQ()", "TaskQ('postgresql://nobody@127.0.0.1:1/x')")
    assert cli("enqueue", "add", '{"a": 1}', "--app", f"{module(cli, source)}:app").code == 3
    job = cli.ok("enqueue", "add", '{"a": 1}', "--app", f"{module(cli, source)}:app", "--dsn", cli.dsn).out.strip()
    assert status_of(conn, job) == "pending"


def test_enqueue_through_the_app_checks_the_arguments(cli: Cli, conn: psycopg.Connection) -> None:
    shop = f"{module(cli, SHOP)}:app"
    for payload, said in (
        ('{"a": "x"}', "parameters of add: a: Expected `int`"),
        ("{}", "parameters of add: Object missing required field `a`"),
        ('{"a": 1, "c": 2}', "parameters of add: Object contains unknown field `c`"),
    ):
        done = cli("enqueue", "add", payload, "--app", shop)
        assert (done.code, said in done.err, "stored" in done.err) == (2, True, False), done
    for args in (["enqueue", "add", "--queue", "x y"], ["enqueue", "add", "--queue", "x y", "--app", shop]):
        done = cli(*args)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "the queue's name is 'x y'" in done.err
    assert "there is no task 'nope'" in cli("enqueue", "nope", "--app", shop).err
    more = ["--queue", "slow", "--priority", "9", "--run-at", "2999-01-01T00:00:00+00:00", "--unique-key", "u"]
    job = cli.ok("enqueue", "add", '{"a": 1}', "--app", shop, *more).out.strip()
    told = cli.ok("jobs", "show", job, "--json").json
    assert (told["queue"], told["priority"], told["unique_key"]) == ("slow", 9, "u")
    assert told["run_at"] == "2999-01-01T00:00:00+00:00"
    taken = cli.ok("enqueue", "add", '{"a": 2}', "--app", shop, "--unique-key", "u", "--json")
    assert taken.json == {"id": job, "new": False}
    assert "no live worker serves the queue slow" in taken.err
    # What was published by an app's worker is enough for SQL; the same options go that way.
    conn.execute("select taskq.publish_task(null, 'add', 'mail', 4, 2, 'idempotent', policy_id, null) from taskq.jobs")
    plain = cli.ok("enqueue", "add", '{"a": 1}', "--run-in", "1h", "--priority", "0").out.strip()
    told = cli.ok("jobs", "show", plain, "--json").json
    assert (told["queue"], told["priority"], told["max_attempts"]) == ("mail", 0, 2)
    refused = cli("enqueue", "add", '{"a": "\\u0000"}')
    assert (refused.code, refused.err.count("\n")) == (1, 1)


def test_the_version(cli: Cli) -> None:
    assert cli.ok("--version").out == f"taskq {__version__}\n"
    text = " ".join(cli.ok("--help").out.split())
    assert "bodies run at least once, and every repetition is on record" in text
    assert "never silently" not in text


def test_python_m_taskq_is_the_command(cli: Cli) -> None:
    with cli.process("jobs", "list", "--json") as process:
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "[]\n")
    assert sys.modules["taskq"] is taskq


def objects(lines: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = [json.loads(line) for line in lines.splitlines()]
    assert all({"time", "level", "logger", "event"} <= set(one) for one in found)
    return found


@pytest.mark.parametrize("said_by", ["the flag", "the flag with =", "the environment", "pyproject.toml"])
def test_a_worker_that_logs_json_complains_in_json(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, empty_dsn: str, said_by: str
) -> None:
    app = f"{module(cli, SHOP)}:app"
    more = {"the flag": ["--log-format", "json"], "the flag with =": ["--log-format=json"]}.get(said_by, [])
    if said_by == "the environment":
        monkeypatch.setenv("TASKQ_LOG_FORMAT", "json")
    if said_by == "pyproject.toml":
        (cli.folder / "pyproject.toml").write_text("[tool.taskq]\nlog_format = 'json'\n")
    cases = [
        ([app, "--dsn", empty_dsn], 1, "has nothing of taskq"),
        ([app, "--dsn", "postgresql://u@127.0.0.1:1/x"], 3, "cannot connect"),
        (["nosuch:app"], 2, "there is no module"),
    ]
    if said_by != "pyproject.toml":  # it is read after these
        cases += [([app, "--lease", "soon"], 2, "is wrong"), ([app, "--nope"], 2, "No such option")]
    for args, code, complaint in cases:
        done = cli("worker", *args, *more)
        assert (done.code, done.out) == (code, "")
        [told] = objects(done.err)
        assert (told["event"], told["level"], complaint in told["message"]) == ("cli.error", "error", True), told
        assert not told["message"].startswith("error")
    # Only a worker, and not for longer than it is asked to.
    assert cli("jobs", "show", "x").err.startswith("error: ")
    monkeypatch.setenv("TASKQ_LOG_FORMAT", "console")
    assert cli("worker", "nosuch:app").err.startswith("error: ")


def test_the_traceback_of_an_app_that_raises_is_one_object(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    from taskq.cli import main

    with pytest.raises(SystemExit):
        main(["worker", f"{module(cli, '1 / 0')}:app", "--log-format", "json"])
    traceback, complaint = objects(capsys.readouterr().err)
    assert traceback["message"].splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "raised ZeroDivisionError" in complaint["message"]


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_a_defect_is_told_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fmt: str
) -> None:
    def breaks() -> None:
        raise AssertionError("a defect")

    monkeypatch.setattr("taskq.cli.main", breaks)
    monkeypatch.setattr("sys.argv", ["taskq", "worker", "--log-format", fmt])
    monkeypatch.setattr("taskq.boot.hold", lambda: None)
    with pytest.raises(SystemExit if fmt == "json" else AssertionError) as ended:
        __main__.main()
    shown = capsys.readouterr().err
    if fmt == "console":
        assert shown == ""  # the interpreter prints it
        return
    assert isinstance(ended.value, SystemExit)
    assert ended.value.code == 1
    [told] = objects(shown)
    assert told["event"] == "cli.crashed"
    assert told["message"].splitlines()[-1] == "AssertionError: a defect"


def test_a_health_port_that_one_of_several_processes_could_not_have_ends_all_before_the_start(cli: Cli) -> None:
    (cli.folder / "shop.py").write_text(SHOP)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for first, said in (
            (port - 1, f"cannot listen at 127.0.0.1 port {port}"),
            (65535, "there is no port 65536"),
        ):
            options = ["--processes", "2", "--health-port", str(first), "--log-format", "json"]
            with cli.process("worker", "shop:app", *options) as process:
                output, _ = process.communicate(timeout=60)
            assert process.returncode == 2, output
            [told] = objects(output)
            assert f"2 processes answer at the ports {first} to {first + 1}" in told["message"]
            assert said in told["message"]


def test_processes_on_a_database_without_taskq_say_so_in_few_words(cli: Cli, empty_dsn: str) -> None:
    (cli.folder / "shop.py").write_text(SHOP)
    options = ["--processes", "2", "--dsn", empty_dsn, "--log-format", "json"]
    with cli.process("worker", "shop:app", *options) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    told = objects(output)
    assert "supervisor.hopeless" in [one["event"] for one in told]
    assert "run 'taskq migrate up'" in output
    assert ".sql" not in output


def test_the_first_of_several_processes_lists_missing_migrations(
    cli: Cli, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = module(cli, SHOP)
    last = [m.filename for m in migrate.status(cli.dsn) if m.kind == "pre"][-1]
    conn.execute("delete from taskq.schema_migrations where filename = %s", (last,))
    conn.commit()
    for number in (0, 1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            monkeypatch.setattr(Supervised, "from_environ", lambda n=number, s=theirs: Supervised(s, n))
            done = cli("worker", f"{shop}:app")
        assert (done.code, last in done.err, "run 'taskq migrate up'" in done.err) == (1, number == 0, True), done


def test_help_of_the_worker_says_what_may_be_left_out(cli: Cli) -> None:
    text = " ".join(cli.ok("worker", "--help").out.replace("│", " ").split())
    assert "--processes N|auto" in text
    assert "Port that answers /live and /ready; by default none." in text

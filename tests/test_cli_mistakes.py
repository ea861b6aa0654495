"""What a user does wrong, for every command: one line that says so, the exit code that it means, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
import sql as q
import typer
from cli_kit import SHOP, Cli, clean_environ, make_cli  # noqa: F401

from taskq.cli import COMMANDS, build

NOBODY = "01999999-0000-7000-8000-000000000000"
ARGUMENTS = {
    "worker": ["shop:app"],
    "enqueue": ["t"],
    "jobs show": [NOBODY],
    "jobs cancel": [NOBODY],
    "jobs retry": [NOBODY],
    "jobs resolve": [NOBODY, "--happened", "--reason", "asked"],
    "jobs reconcile": [NOBODY],
    "jobs wait": [NOBODY],
    "jobs signal": [NOBODY, "approval", "{}"],
    "effects show": ["k"],
    "effects settle": ["k", "--reason", "done by hand"],
    "effects retry": ["k"],
    "runs show": [NOBODY],
    "runs tree": [NOBODY],
    "runs wait": [NOBODY],
    "runs signal": [NOBODY, "approval", "{}"],
    "runs pause": [NOBODY, "--reason", "why"],
    "runs resume": [NOBODY, "--reason", "why"],
    "runs budget": [NOBODY, "100", "--reason", "why"],
    "runs grant": [NOBODY, "--reason", "why"],
    "runs cancel": [NOBODY],
    "runs retry": [NOBODY],
    "incidents show": [NOBODY],
    "incidents grant": [NOBODY, "--reason", "why"],
    "workflows list": ["--app", "shop:app"],
    "workflows show": ["w", "--app", "shop:app"],
    "limits set": ["c", "1", "--reason", "slow"],
    "limits clear": ["c", "--reason", "well again"],
    "orderings resume": ["k", "--reason", "looked at it"],
    "jobs tail": ["--limit", "1", "--timeout", "1"],
    "queues pause": ["mail"],
    "queues resume": ["mail"],
    "workers show": ["w"],
    "workers drain": ["w"],
    "migrate new": ["name", "--kind", "pre"],
}
"""What a command needs to be complete."""
ELSEWHERE = {
    "demo",
    "demo-orders",
    "demo-payments",
    "demo-pipeline",
    "migrate new",
    "migrate sql",
    "workflows list",
    "workflows show",
}
"""Commands that need no database, or make one."""
LONG_LIVED = {"worker", "dev"}


def leaves() -> Iterator[str]:
    """The name of every command."""
    for name in COMMANDS:
        group = typer.main.get_command(build([name])).commands[name]  # type: ignore[attr-defined]
        if inner := getattr(group, "commands", None):
            yield from (f"{name} {each}" for each in inner)
        else:
            yield name


EVERY = sorted(leaves())
WITH_DATABASE = [name for name in EVERY if name not in ELSEWHERE]


def line(name: str, *more: str) -> list[str]:
    return [*name.split(), *ARGUMENTS.get(name, []), *more]


@pytest.fixture(autouse=True)
def shop(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    (cli.folder / "shop.py").write_text(SHOP)
    monkeypatch.delitem(sys.modules, "shop", raising=False)


@pytest.mark.parametrize("name", WITH_DATABASE)
def test_databases_that_are_not_there(cli: Cli, name: str) -> None:
    for dsn, code in (
        ("postgresql://u:sekr%23et@127.0.0.1:1/x", 3),
        ("postgresql://u@127.0.0.1:1/x?password=sekr%23et", 3),
        ("postgresql://u:sekr#et@127.0.0.1:1/x", 2),
        ("mysql://u:sekr%23et@h/x", 2),
    ):
        done = cli(*line(name, "--dsn", dsn))
        assert (done.code, done.out) == (code, ""), done
        assert done.err.splitlines()[-1].startswith("error: ")
        assert not any(secret in done.err for secret in ("sekr", "et@"))


@pytest.mark.parametrize("name", [name for name in WITH_DATABASE if name not in {"migrate up", "dev"}])
def test_a_database_that_was_not_migrated(cli: Cli, empty_dsn: str, name: str) -> None:
    done = cli(*line(name, "--dsn", empty_dsn))
    assert done.code == (0 if name == "migrate status" else 1), done
    assert "taskq migrate up" in done.err + done.out or name == "migrate status"


@pytest.fixture
def stranger(conn: psycopg.Connection) -> Iterator[str]:
    """The name of a role that may log in and do nothing else."""
    role = f"stranger_{os.getpid()}"
    conn.execute(f"create role {role} login")
    yield role
    conn.execute(f"drop owned by {role}")
    conn.execute(f"drop role {role}")


@pytest.mark.parametrize("name", [name for name in WITH_DATABASE if name != "doctor"])
def test_users_who_may_not_do_it(cli: Cli, stranger: str, name: str) -> None:
    done = cli(*line(name, "--dsn", cli.dsn.replace("//taskq@", f"//{stranger}@")))
    assert (done.code, done.out) == (1, ""), done
    assert "permission denied" in done.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("role", "args"),
    [
        ("producer", ["worker", "shop:app"]),
        ("reader", ["enqueue", "add", '{"a": 1}', "--app", "shop:app"]),
        ("operator", ["enqueue", "add", '{"a": 1}', "--app", "shop:app"]),
    ],
)
def test_users_who_may_do_other_things(
    cli: Cli, conn: psycopg.Connection, stranger: str, role: str, args: list[str]
) -> None:
    conn.execute(f"grant taskq_{role} to {stranger}")
    done = cli(*args, "--dsn", cli.dsn.replace("//taskq@", f"//{stranger}@"))
    assert (done.code, done.out) == (1, ""), done
    said = done.err.splitlines()[-1]
    assert said.startswith("error: the database's user may not do this (permission denied for function ")
    assert f"the role taskq_{'worker' if args[0] == 'worker' else 'producer'} to that user" in said


def opposites() -> Iterator[tuple[str, str, str]]:
    """Every command with a flag and its opposite."""
    for name in EVERY:
        command = typer.main.get_command(build(name.split()))
        for word in name.split():
            command = command.commands[word]  # type: ignore[attr-defined]
        yield from ((name, p.opts[0], p.secondary_opts[0]) for p in command.params if p.secondary_opts)


def test_a_flag_and_its_opposite_are_refused_in_either_order(cli: Cli) -> None:
    found = list(opposites())
    assert {("jobs resolve", "--happened", "--did-not-happen"), ("migrate up", "--post", "--no-post")} <= set(found)
    for name, flag, opposite in found:
        for pair in ((flag, opposite), (opposite, flag)):
            done = cli(*name.split(), *ARGUMENTS.get(name, []), *pair)
            assert (done.code, done.out) == (2, ""), done
            assert f"{flag} and {opposite} say the opposite of one another" in done.err
            assert f"see 'taskq {name} --help'" in done.err


@pytest.mark.parametrize("name", EVERY)
def test_flags_that_do_not_exist_and_arguments_that_are_no_text(cli: Cli, name: str) -> None:
    done = cli(*line(name, "--no-such-flag"))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert f"see 'taskq {name} --help'" in done.err
    done = cli(*line(name, "caf\udce9"))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "is not UTF-8 text" in done.err
    assert r"caf\\xe9" in done.err
    assert "Exit codes: " in " ".join(cli.ok(name.split()[0], "--help").out.split())
    text = cli.ok(*name.split(), "--help").out
    assert "--json" in text or name in {"worker", "dev", "migrate sql", "migrate new"}


@pytest.mark.parametrize("name", [name for name in WITH_DATABASE if name not in LONG_LIVED])
def test_ctrl_c(cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(psycopg, "connect", interrupted)
    done = cli(*line(name))
    assert (done.code, done.out, done.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("name", [name for name in WITH_DATABASE if name not in LONG_LIVED])
def test_a_reader_that_has_gone(cli: Cli, conn: psycopg.Connection, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q.enqueue(conn, queue="mail")
    q.register(conn)
    reader, writer = os.pipe()
    os.close(reader)
    gone = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stdout", gone)
    done = cli(*line(name))
    monkeypatch.undo()
    with suppress(BrokenPipeError):
        gone.close()
    assert done.code in {0, 1}  # 0 where nothing was to be written
    assert done.out == ""


@pytest.mark.parametrize(
    ("shell", "code", "said"),
    [
        ("taskq jobs list --json | true", 0, ""),
        ("taskq jobs list >&-", 0, ""),
        ("taskq jobs list > /dev/full", 1, "the output could not be written: [Errno 28]"),
        ("taskq doctor | head -c 10", 0, ""),
        ("taskq jobs show $'caf\\xe9'", 2, "is not UTF-8 text"),
    ],
)
def test_in_a_real_shell(cli: Cli, shell: str, code: int, said: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'taskq() {{ "{sys.executable}" -m taskq "$@"; }}; {shell}'],
        env={**clean_environ(), "TASKQ_DSN": cli.dsn},
        cwd=cli.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_connection_that_is_cut_is_one_line(
    cli: Cli, conn: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskq.cli import database
    from taskq.db.pools import connect_sync as connect

    def cut(*args: object, **options: object) -> object:
        made = connect(*args, **options)  # type: ignore[arg-type]
        conn.execute("select pg_terminate_backend(%s)", (made.info.backend_pid,))
        return made

    monkeypatch.setattr(database, "connect_sync", cut)
    for args in (["jobs", "list"], ["doctor"], ["jobs", "cancel", NOBODY], ["jobs", "cancel", "-q", "q", "--yes"]):
        done = cli(*args)
        assert (done.code, done.out, done.err.count("\n")) == (3, "", 1), done
        assert "the connection to PostgreSQL was lost" in done.err


# Completion -----------------------------------------------------------------------------------------------------------


def complete(cli: Cli, words: str, shell: str = "bash", **environ: str) -> list[str]:
    """What a shell would offer for the last of some words."""
    asked = {"_TASKQ_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words, "TASKQ_DSN": cli.dsn}
    if shell == "bash":
        asked |= {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    if shell == "fish":
        asked["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
    done = subprocess.run(
        [sys.executable, "-m", "taskq"],
        env={**clean_environ(), **asked, **environ},
        cwd=cli.folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_commands_flags_queues_and_tasks(cli: Cli, conn: psycopg.Connection) -> None:
    conn.execute("select taskq.register_worker('w', 'h', 1, '{mail,maps,other}', '{t}', 1, 1, '0', 30)")
    policy = q.policy(conn)
    conn.execute("select taskq.publish_task(null, 'send_receipt', 'mail', 5, 1, 'idempotent', %s)", (policy,))
    assert complete(cli, "taskq work") == ["worker", "workflows", "workers"]
    assert complete(cli, "taskq workers d") == ["drain"]
    assert "--older-than" in complete(cli, "taskq jobs list --old")
    assert complete(cli, "taskq jobs list --queue ma") == ["mail", "maps"]
    assert complete(cli, "taskq queues pause ot") == ["other"]
    assert complete(cli, "taskq jobs cancel --task se") == ["send_receipt"]
    for shell in ("zsh", "fish"):
        assert "mail" in " ".join(complete(cli, "taskq jobs list --queue ma", shell))
    assert complete(cli, "taskq jobs list --queue ma", TASKQ_DSN="postgresql://u@127.0.0.1:1/x") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell_is_shown_and_installed(cli: Cli, shell: str, tmp_path: Path) -> None:
    environ = {**clean_environ(), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(tmp_path)}
    for flag in ("--show-completion", "--install-completion"):
        done = subprocess.run(
            [sys.executable, "-m", "taskq", flag, shell],
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "taskq" in done.stdout or flag == "--install-completion"
    assert any("_TASKQ_COMPLETE" in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


# The worker -----------------------------------------------------------------------------------------------------------

LOGGING = """
import atexit, logging, sys
logging.basicConfig(level=logging.WARNING, format="mine %(levelname)s %(name)s %(message)s", stream=sys.stdout)
logging.getLogger("taskq").setLevel(logging.INFO)
ROOT = logging.getLogger()
BEFORE = (list(ROOT.handlers), ROOT.level)
@atexit.register
def compare():
    print("unchanged" if (list(ROOT.handlers), ROOT.level) == BEFORE else "changed", flush=True)
"""


@pytest.mark.parametrize("configured", [True, False])
def test_a_worker_leaves_the_applications_logging_alone(cli: Cli, conn: psycopg.Connection, configured: bool) -> None:
    import signal

    from helpers import eventually

    (cli.folder / "logs.py").write_text((LOGGING if configured else "") + SHOP)
    with cli.process("worker", "logs:app") as process:
        eventually(lambda: q.one(conn, "select count(*) from taskq.task_config") == 2, timeout=60)
        job = cli.ok("enqueue", "add", '{"a": -1}').out.strip()
        eventually(lambda: q.one(conn, "select status from taskq.all_jobs where id = %s", job) == "failed", timeout=30)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    for event in ("worker.started", "worker.stopped", "job.failed"):
        found = [told for told in output.splitlines() if f" {event} " in told]
        assert len(found) == 1, output
        assert found[0].startswith("mine ") == configured
        assert not configured or " taskq.worker " in found[0]
    assert ("unchanged" in output.splitlines()) == configured


def test_a_worker_never_shows_its_password(cli: Cli, pg_server: object) -> None:
    secret = "p@s:s/w?%^]#"
    encoded = quote(secret, safe="")
    base = psycopg.conninfo.conninfo_to_dict(cli.dsn)
    where = f"/{base['dbname']}?host={base['host']}&port=5432"
    for dsn, code in (
        (f"postgresql://taskq:{encoded}@/nope?host={base['host']}&port=5432", 3),
        (f"postgresql://taskq:{encoded}@/{base['dbname']}?host={base['host']}&port=5433", 3),
        (f"postgresql://nobody_there:{encoded}@{where}", 3),
        (f"postgresql://nobody_there@{where}&password={encoded}", 3),
        (f"postgresql://taskq:{secret}@{where}", 2),
        (f"postgresql://taskq@{where}&password={secret}", 2),
    ):
        for args in (["worker", "shop:app"], ["doctor"], ["migrate", "up"]):
            done = cli(*args, "--dsn", dsn)
            assert done.code == code, done
            for piece in (secret, encoded, "p@s", "s/w", "p%40s", "%^]"):
                assert piece not in done.out + done.err
    fine = cli("doctor", "--dsn", f"postgresql://taskq:{encoded}@{where}", "--json")
    assert fine.code in {0, 1}
    assert "p@s" not in fine.out + fine.err


@pytest.mark.parametrize("size", ["9" * 400, "9" * 300 + "T", "2000T", "0"])
def test_sizes_that_no_memory_has(cli: Cli, size: str) -> None:
    done = cli("worker", "shop:app", "--max-memory", size)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "is no size from 1M to 1024T" in done.err


def test_ctrl_c_while_the_command_is_loaded(cli: Cli) -> None:
    code = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "taskq.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
sys.argv = ["taskq", "jobs", "list"]
from taskq.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean_environ(), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")

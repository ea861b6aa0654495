"""``taskq migrate`` as a user meets it: output, exit codes, and never a password or a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from servers import Server

from taskq import migrate
from taskq.db.dsn import describe_dsn

SECRET = "p@s:s/w?%^]#"
ENCODED = quote(SECRET, safe="")


def run(*args: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TASKQ_", "PG"))}
    return subprocess.run(
        [sys.executable, "-m", "taskq.cli", *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=90,
        cwd=cwd,
        env={**clean, "PYTHONPATH": os.pathsep.join(sys.path), **environ},
    )


def test_up_status_verify(empty_dsn: str, tmp_path: Path) -> None:
    files = [m.filename for m in migrate.load_migrations()]
    behind = run("migrate", "verify", "--dsn", empty_dsn, cwd=tmp_path)
    assert behind.returncode == 1
    assert behind.stdout.splitlines() == [
        f"{name} is pending; run 'taskq migrate up'" for name in files if "_pre_" in name
    ]
    first = run("migrate", "up", cwd=tmp_path, TASKQ_DSN=empty_dsn)
    assert (first.returncode, first.stdout) == (0, f"{len(files)} applied; the schema taskq is up to date\n")
    assert f"applied {files[-1]} in" in first.stderr
    assert f"the database is {describe_dsn(empty_dsn)}\n" in first.stderr
    again = run("migrate", "up", "--json", cwd=tmp_path, TASKQ_DSN=empty_dsn)
    assert json.loads(again.stdout) == {"applied": [], "already": files, "left_out": []}
    status = run("migrate", "status", cwd=tmp_path, TASKQ_DSN=empty_dsn)
    assert status.returncode == 0
    assert [line.split()[:3] for line in status.stdout.splitlines()[1:]] == [
        [name, name.split("_")[2], "applied"] for name in files
    ]
    as_json = json.loads(run("migrate", "status", "--json", cwd=tmp_path, TASKQ_DSN=empty_dsn).stdout)
    assert {row["state"] for row in as_json} == {"applied"}
    verified = run("migrate", "verify", "--json", cwd=tmp_path, TASKQ_DSN=empty_dsn)
    assert (verified.returncode, json.loads(verified.stdout)) == (0, {"ok": True, "discrepancies": []})
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("update taskq.schema_migrations set sha256 = repeat('a', 64) where filename = %s", (files[0],))
    for command in ("status", "verify", "up", "sql"):
        assert run("migrate", command, cwd=tmp_path, TASKQ_DSN=empty_dsn).returncode == 1, command


def test_roles_that_could_not_be_created_are_told(empty_dsn: str, tmp_path: Path) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("do $$ begin create role plain_owner login; exception when duplicate_object then null; end $$")
        conn.execute("create schema other authorization plain_owner")
        conn.execute(f"grant create on database {conn.info.dbname} to plain_owner".encode())
    mine = psycopg.conninfo.make_conninfo(empty_dsn, user="plain_owner")
    done = run("migrate", "up", "--schema", "other", "--dsn", mine, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for suffix in ("producer", "worker", "operator", "reader"):
        assert f"warning: role other_{suffix} was not created: this user may not create roles\n" in done.stderr
    verified = run("migrate", "verify", "--schema", "other", "--dsn", mine, cwd=tmp_path)
    assert verified.returncode == 0
    assert "the roles other_producer, other_worker, other_operator, other_reader do not exist" in verified.stderr


def test_the_schema_comes_from_pyproject(empty_dsn: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(f'[tool.taskq]\ndsn = "{empty_dsn}"\nschema = "other"\n')
    done = run("migrate", "up", cwd=tmp_path)
    assert (done.returncode, "the schema other is up to date" in done.stdout) == (0, True), done.stderr


def test_sql_for_hands(pg_server: Server, empty_dsn: str, tmp_path: Path) -> None:
    everything = run("migrate", "sql", "--all", cwd=tmp_path)
    assert everything.returncode == 0
    psql = subprocess.run(
        [pg_server.bin_dir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", empty_dsn],
        input=everything.stdout,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert psql.returncode == 0, psql.stderr
    assert run("migrate", "sql", cwd=tmp_path, TASKQ_DSN=empty_dsn).stdout.startswith("-- Nothing is pending")
    assert run("migrate", "verify", cwd=tmp_path, TASKQ_DSN=empty_dsn).returncode == 0


def test_new(tmp_path: Path) -> None:
    (tmp_path / "migrations").mkdir()
    done = run("migrate", "new", "Add tags", "--kind", "post", "--folder", "migrations", cwd=tmp_path)
    assert done.returncode == 0
    assert re.fullmatch(r"migrations/\d\d\.\d\d\.\d\d_01_post_add_tags\.sql\n", done.stdout)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["migrate", "up"], "TASKQ_DSN"),
        (["migrate", "up", "--bogus"], "--bogus"),
        (["migrate", "sideways"], "No such command 'sideways'"),
        (["sideways"], "No such command 'sideways'"),
        (["migrate", "up", "--dsn", "mysql://h/db"], "--dsn"),
        (["migrate", "up", "--dsn", "postgresql://h/db", "--schema", "Jobs"], "--schema"),
        (["migrate", "up", "--lock-timeout", "0"], "--lock-timeout"),
        (["migrate", "new", "x", "--kind", "sideways"], "say pre or post"),
    ],
)
def test_mistakes_of_usage(tmp_path: Path, args: list[str], words: str) -> None:
    done = run(*args, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_needs_no_database(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert (done.returncode, "migrate" in done.stdout) == (0, True)
    assert run("migrate", "--help", cwd=tmp_path).returncode == 0


@pytest.fixture(scope="module")
def guarded(pg_server: Server) -> Iterator[Server]:
    """The server, where the role ``guarded`` needs a password."""
    hba = pg_server.data_dir / "pg_hba.conf"
    before = hba.read_text()
    with psycopg.connect(pg_server.dsn(), autocommit=True) as conn:
        conn.execute(psycopg.sql.SQL("create role guarded superuser login password {}").format(SECRET))
        hba.write_text("local all guarded scram-sha-256\n" + before)
        conn.execute("select pg_reload_conf()")
        yield pg_server
        hba.write_text(before)
        conn.execute("select pg_reload_conf()")
        conn.execute("drop role guarded")


@pytest.mark.parametrize(
    ("shape", "code", "words"),
    [
        ("postgresql://guarded:{encoded}@/{db}?host={host}&port=5432", 0, None),
        ("postgresql://guarded@/{db}?host={host}&port=5432&password={encoded}", 0, None),
        ("postgresql://guarded:{raw}@/{db}?host={host}&port=5432", 2, "percent-encode"),
        ("postgresql://guarded@/{db}?host={host}&port=5432&password={raw}", 2, "percent-encode"),
        ("postgresql://guarded:{encoded}x@/{db}?host={host}&port=5432", 3, "the login was refused"),
        ("postgresql://guarded@/{db}?host={host}&port=5432", 3, "the login was refused"),
        (
            "postgresql://guarded:{encoded}@/{db}?host={host}&port=5433",
            3,
            'port 5433, database "{db}": nothing answers',
        ),
        (
            "postgresql://guarded:{encoded}@/nope?host={host}&port=5432",
            3,
            'database "nope": the database does not exist',
        ),
        ("postgresql://guarded:{encoded}@127.0.0.1:1/{db}", 3, 'host "127.0.0.1", port 1, database "{db}"'),
    ],
)
def test_the_password_never_shows(
    guarded: Server, empty_dsn: str, tmp_path: Path, shape: str, code: int, words: str | None
) -> None:
    db = psycopg.conninfo.conninfo_to_dict(empty_dsn)["dbname"]
    dsn = shape.format(encoded=ENCODED, raw=SECRET, db=db, host=guarded.socket_dir)
    as_flag = run("migrate", "up", "--dsn", dsn, cwd=tmp_path)
    as_variable = run("migrate", "status", "--json", cwd=tmp_path, TASKQ_DSN=dsn)
    for done in (as_flag, as_variable):
        output = done.stdout + done.stderr
        assert done.returncode == code, output
        for piece in (SECRET, ENCODED, "p@s", "s/w", "p%40s", "%^]", "s%3As"):
            assert piece not in output
        assert "Traceback" not in output
        if words is not None:
            assert words.format(db=db) in done.stderr
            assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("args", [["{dsn}"], ["--dsnx={dsn}"], ["--dsn={dsn}", "extra://{dsn}"]])
def test_a_dsn_in_the_wrong_place_is_not_repeated(tmp_path: Path, args: list[str]) -> None:
    dsn = f"postgresql://guarded:{ENCODED}@h/db"
    done = run("migrate", "up", *(arg.format(dsn=dsn) for arg in args), cwd=tmp_path)
    assert done.returncode == 2
    assert ENCODED not in done.stdout + done.stderr

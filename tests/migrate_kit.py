"""What the tests of migrations share: scratch folders, runners in processes of their own, schema dumps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from servers import Server

from taskq import migrate

RUNNER = """\
import json, sys
from pathlib import Path
from taskq import migrate
from taskq.cli.output import note, print_json, run_cli
from dataclasses import asdict
options = json.loads(sys.argv[1])
dsn, folder = options.pop("dsn"), options.pop("folder")
folder = Path(folder) if folder else None
sys.exit(run_cli(lambda: print_json(asdict(migrate.up(dsn, folder=folder, progress=note, **options)))))
"""

SIMPLE = {
    "01.00.00_01_pre_tables.sql": "create table {{schema}}.a (id int primary key);\n"
    "create table {{schema}}.b (id int);\n",
    "01.00.00_02_pre_rows.sql": "insert into {{schema}}.a select generate_series(1, 10);\n",
    "01.00.00_03_post_strict.sql": "alter table {{schema}}.b add constraint b_positive check (id > 0);\n",
}
GATED = {
    "01.00.00_01_pre_first.sql": "create table {{schema}}.a (id int primary key);\n",
    "01.00.00_02_pre_gated.sql": "create table {{schema}}.b (id int);\nlock table public.gate in share mode;\n",
    "01.00.00_03_post_last.sql": "create table {{schema}}.c (id int);\n",
}
"""Needs a table public.gate; the second file waits for whoever has locked it."""


def make_folder(path: Path, files: Mapping[str, str], *, frozen: bool = True) -> Path:
    """Write (more) migration files into a scratch folder and freeze them."""
    folder = path / "migrations"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    if frozen:
        migrate.freeze(folder)
    return folder


def spawn(dsn: str, folder: Path | None, **options: Any) -> subprocess.Popen[str]:
    """A runner in a process of its own."""
    arguments = json.dumps({"dsn": dsn, "folder": str(folder) if folder else None, **options})
    return subprocess.Popen(
        [sys.executable, "-c", RUNNER, arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], *, timeout: float = 90) -> tuple[int, str]:
    """Wait for it; give exit code and all output."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out + err


@contextmanager
def closed_gate(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """Make the gate if it is not there, and hold it shut until the block ends."""
    with psycopg.connect(dsn) as conn:
        conn.execute("create table if not exists public.gate (id int)")
        conn.commit()
        conn.execute("lock table public.gate in access exclusive mode")
        yield conn


def backends_at(conn: psycopg.Connection[Any], words: str) -> list[tuple[int, str]]:
    """Backends (pid, application name) that wait for a lock in a statement with these words."""
    return conn.execute(
        "select pid, application_name from pg_stat_activity where query like %s and wait_event_type = 'Lock' "
        "and datname = current_database() and pid <> pg_backend_pid()",
        (f"%{words}%",),
    ).fetchall()


def names(dsn: str, schema: str = "taskq") -> list[str]:
    """The recorded migrations."""
    with psycopg.connect(dsn) as conn:
        rows = conn.execute(f"select filename from {schema}.schema_migrations order by 1").fetchall()
    return [row[0] for row in rows]


def dump(server: Server, dsn: str, schema: str = "taskq") -> str:
    """The schema as pg_dump writes it, without what is random in it."""
    done = subprocess.run(
        [server.bin_dir / "pg_dump", "--schema-only", f"--schema={schema}", f"--dbname={dsn}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return re.sub(r"^\\(un)?restrict .*$", "", done.stdout, flags=re.MULTILINE)

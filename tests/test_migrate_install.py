"""The real set of migrations: one schema however it is installed, on each server, alone or together, with data."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from migrate_kit import dump, finish, make_folder, names, spawn
from psycopg import sql
from servers import Server, serve

from taskq import migrate
from taskq.migrate.files import default_folder, manifest_path

ADD_PRIORITY_NOTE = {
    "90.00.00_01_pre_note.sql": "alter table {{schema}}.jobs add column note text;\n"
    "alter table {{schema}}.jobs add constraint jobs_note check (length(note) < 10) not valid;\n"
    "comment on column {{schema}}.jobs.note is 'A note.';\n",
    "90.00.00_02_pre_note_index.sql": "-- taskq: no-transaction\n"
    "create index concurrently if not exists jobs_note_x on {{schema}}.jobs (note) where note is not null;\n",
    "90.00.00_03_post_note.sql": "alter table {{schema}}.jobs validate constraint jobs_note;\n",
}


@pytest.fixture(scope="module", params=["15", "18"])
def server(request: pytest.FixtureRequest, pg_server: Server) -> Iterator[Server]:
    """The session's server, and the other version beside it."""
    if request.param == pg_server.version:
        yield pg_server
        return
    with serve(request.param) as other:
        yield other


@pytest.fixture
def dsns(server: Server) -> Iterator[list[str]]:
    """Three empty databases."""
    databases = [f"install_{n}" for n in range(3)]
    with psycopg.connect(server.dsn(), autocommit=True) as conn:
        for name in databases:
            conn.execute(sql.SQL("create database {} template template0").format(sql.Identifier(name)))
        yield [server.dsn(name) for name in databases]
        for name in databases:
            conn.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def test_every_way_to_install_gives_the_same_schema(server: Server, dsns: list[str]) -> None:
    alone, together, by_hand = dsns
    files = [m.filename for m in migrate.load_migrations()]
    assert migrate.up(alone).applied == tuple(files)
    for code, output in [finish(p) for p in [spawn(together, None) for _ in range(6)]]:
        assert code == 0, output
        assert "error" not in output.lower()
    done = subprocess.run(
        [server.bin_dir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", by_hand],
        input=migrate.render_sql(),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    expected = dump(server, alone)
    assert "CREATE TABLE taskq.jobs" in expected
    for dsn in (together, by_hand):
        assert names(dsn) == files
        assert dump(server, dsn) == expected
        assert migrate.verify(dsn) == []
        migrate.check_compatible(dsn)


def test_every_table_and_column_explains_itself(dsns: list[str]) -> None:
    migrate.up(dsns[0])
    with psycopg.connect(dsns[0]) as conn:
        silent = conn.execute(
            "select c.oid::regclass::text, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid "
            "where c.relnamespace = 'taskq'::regnamespace and c.relkind in ('r', 'p') and not c.relispartition "
            "and a.attnum > 0 and not a.attisdropped "
            "and (col_description(c.oid, a.attnum) is null or obj_description(c.oid, 'pg_class') is null)"
        ).fetchall()
    assert silent == []


def test_a_populated_database_takes_the_next_migrations(dsns: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "migrations"
    shutil.copytree(default_folder(), folder)
    shutil.copy(manifest_path(default_folder()), tmp_path)
    migrate.up(dsns[0], folder=folder)
    with psycopg.connect(dsns[0]) as conn:
        conn.execute(
            "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload) "
            "select now(), now(), 3, 'default', 'noop', 'p', '{}' from generate_series(1, 20000)"
        )
    make_folder(tmp_path, ADD_PRIORITY_NOTE)
    done = migrate.up(dsns[0], folder=folder)
    assert (done.applied, done.left_out) == (tuple(ADD_PRIORITY_NOTE)[:2], tuple(ADD_PRIORITY_NOTE)[2:])
    migrate.check_compatible(dsns[0])  # this code, on the next release's pre schema
    assert migrate.up(dsns[0], folder=folder, include_post=True).applied == tuple(ADD_PRIORITY_NOTE)[2:]
    assert migrate.verify(dsns[0], folder=folder) == []
    with psycopg.connect(dsns[0]) as conn:
        assert conn.execute("select count(*), count(note) from taskq.jobs").fetchone() == (20000, 0)


def test_the_manifest_covers_the_real_folder() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "taskq.migrate", "check"], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

"""Busy tables, and statements that cannot run in a transaction: bounded waits, named blockers, repaired indexes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from helpers import eventually
from migrate_kit import backends_at, finish, make_folder, names, spawn

from taskq import migrate
from taskq.errors import MigrationLocked

BASE = {
    "01.00.00_01_pre_tables.sql": "create table {{schema}}.busy (id int);\ncreate table {{schema}}.other (id int);\n"
}
ALTER = {"01.01.00_01_pre_alter.sql": "alter table {{schema}}.busy add column note text;\n"}
ALTER_BOTH = {
    "01.01.00_01_pre_alter.sql": "alter table {{schema}}.other add column note text;\n"
    "alter table {{schema}}.busy add column note text;\n"
}
INDEX = {
    "01.01.00_01_pre_index.sql": "-- taskq: no-transaction\n"
    "create index concurrently if not exists busy_x on {{schema}}.busy (id);\n-- taskq: next\n"
    "comment on index {{schema}}.busy_x is 'Made by a migration.';\n"
}


@pytest.fixture
def folder(empty_dsn: str, tmp_path: Path) -> Path:
    path = make_folder(tmp_path, BASE)
    migrate.up(empty_dsn, folder=path)
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("insert into taskq.busy select generate_series(1, 1000)")
        conn.execute("insert into taskq.other select generate_series(1, 1000)")
    return path


class Traffic:
    """Reads and writes both tables all the time, and remembers the longest delay, in seconds."""

    def __init__(self, dsn: str) -> None:
        self.longest = 0.0
        self.rounds = 0
        self._dsn = dsn
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._done: Future[None] | None = None

    def __enter__(self) -> Traffic:
        self._done = self._pool.submit(self._run)
        eventually(lambda: self.rounds > 3)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        assert self._done is not None
        self._done.result(30)
        self._pool.shutdown()

    def _run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            while not self._stop.wait(0.02):
                for table in ("busy", "other"):
                    began = time.monotonic()
                    conn.execute(f"insert into taskq.{table} values (1)")
                    conn.execute(f"select id from taskq.{table} limit 1")
                    self.longest = max(self.longest, time.monotonic() - began)
                self.rounds += 1


@pytest.mark.parametrize("files", [ALTER, ALTER_BOTH])
def test_a_busy_table_is_never_queued_behind(
    empty_dsn: str, tmp_path: Path, folder: Path, files: dict[str, str]
) -> None:
    make_folder(tmp_path, files)
    with psycopg.connect(empty_dsn) as idle:
        idle.execute("select count(*) from taskq.busy")
        pid = idle.info.backend_pid
        with Traffic(empty_dsn) as traffic, pytest.raises(MigrationLocked) as refused:
            migrate.up(empty_dsn, folder=folder, lock_timeout=0.5, lock_attempts=3)
        message = str(refused.value)
        assert f"pid {pid}" in message
        assert "idle in transaction" in message
        assert "select count(*) from taskq.busy" in message
        assert "AccessExclusiveLock on taskq.busy" in message
        assert "\n" not in message
        # Half a second for the lock, as much again for a machine that has other things to do.
        assert traffic.longest < 1.0
        assert names(empty_dsn) == list(BASE)
        idle.rollback()
    assert migrate.up(empty_dsn, folder=folder).applied == tuple(files)


def test_a_busy_moment_is_outlasted_by_trying_again(empty_dsn: str, tmp_path: Path, folder: Path) -> None:
    make_folder(tmp_path, ALTER)
    said: list[str] = []
    with psycopg.connect(empty_dsn) as idle, ThreadPoolExecutor(1) as pool:
        idle.execute("select count(*) from taskq.busy")
        running = pool.submit(migrate.up, empty_dsn, folder=folder, lock_timeout=0.3, progress=said.append)
        eventually(lambda: any("attempt 2" in line for line in said), 30)
        idle.rollback()
        assert running.result(60).applied == tuple(ALTER)


def test_the_waits_of_one_file_are_bounded_together(empty_dsn: str, tmp_path: Path, folder: Path) -> None:
    make_folder(tmp_path, ALTER_BOTH)
    with (
        psycopg.connect(empty_dsn) as first,
        psycopg.connect(empty_dsn) as second,
        psycopg.connect(empty_dsn, autocommit=True) as conn,
        ThreadPoolExecutor(1) as pool,
    ):
        first.execute("select count(*) from taskq.other")
        second.execute("select count(*) from taskq.busy")
        began = time.monotonic()
        running = pool.submit(migrate.up, empty_dsn, folder=folder, lock_timeout=3, lock_attempts=1)
        waited = "select exists (select from pg_locks where not granted and clock_timestamp() - waitstart > '2 s')"
        eventually(lambda: conn.execute(waited).fetchone() == (True,), 30)
        first.rollback()
        with pytest.raises(MigrationLocked):
            running.result(30)
        # With a limit on each wait alone it would have taken two seconds and three.
        assert time.monotonic() - began < 4.5


def _invalid(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as conn:
        rows = conn.execute(
            "select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid "
            "where not i.indisvalid and c.relnamespace = 'taskq'::regnamespace order by 1"
        ).fetchall()
    return [row[0] for row in rows]


def _valid(dsn: str, name: str) -> bool:
    with psycopg.connect(dsn) as conn:
        row = conn.execute(
            "select indisvalid from pg_index where indexrelid = %s::regclass", (f"taskq.{name}",)
        ).fetchone()
    return row == (True,)


def test_an_index_build_that_timed_out_is_repaired(empty_dsn: str, tmp_path: Path, folder: Path) -> None:
    make_folder(tmp_path, INDEX)
    with psycopg.connect(empty_dsn) as old:
        old.execute("insert into taskq.busy values (0)")
        pid = old.info.backend_pid
        for _ in range(2):
            with Traffic(empty_dsn) as traffic, pytest.raises(MigrationLocked) as refused:
                migrate.up(empty_dsn, folder=folder, build_timeout=0.5)
            assert f"pid {pid}" in str(refused.value)
            assert "dropped and built anew" in str(refused.value)
            assert traffic.longest < 0.5
            assert _invalid(empty_dsn) == ["busy_x"]
            assert names(empty_dsn) == list(BASE)
        assert any("taskq.busy_x is invalid" in line for line in migrate.verify(empty_dsn, folder=folder))
        old.rollback()
    assert migrate.up(empty_dsn, folder=folder).applied == tuple(INDEX)
    assert migrate.up(empty_dsn, folder=folder).applied == ()
    assert _invalid(empty_dsn) == []
    assert _valid(empty_dsn, "busy_x")


def test_an_index_build_that_was_killed_is_repaired(empty_dsn: str, tmp_path: Path, folder: Path) -> None:
    make_folder(tmp_path, INDEX)
    with psycopg.connect(empty_dsn) as old, psycopg.connect(empty_dsn, autocommit=True) as conn:
        old.execute("insert into taskq.busy values (0)")
        first = spawn(empty_dsn, folder, lease=1.5)
        eventually(lambda: backends_at(conn, "busy_x"), 30)
        eventually(lambda: _invalid(empty_dsn) == ["busy_x"])
        first.kill()
        finish(first)
        second = spawn(empty_dsn, folder, lease=1.5)
        eventually(lambda: backends_at(conn, "drop index concurrently"), 30)
        old.rollback()
        code, output = finish(second)
    assert code == 0, output
    assert _invalid(empty_dsn) == []
    assert _valid(empty_dsn, "busy_x")
    assert names(empty_dsn) == [*BASE, *INDEX]


def test_what_a_cut_off_reindex_left_is_removed(empty_dsn: str, tmp_path: Path, folder: Path) -> None:
    make_folder(tmp_path, INDEX)
    migrate.up(empty_dsn, folder=folder)
    rebuild = "-- taskq: no-transaction\nreindex index concurrently {{schema}}.busy_x;\n"
    make_folder(tmp_path, {"01.02.00_01_post_rebuild.sql": rebuild})
    with psycopg.connect(empty_dsn) as old:
        old.execute("insert into taskq.busy values (0)")
        for _ in range(2):
            with pytest.raises(MigrationLocked):
                migrate.up(empty_dsn, folder=folder, include_post=True, build_timeout=0.5)
            assert _invalid(empty_dsn) == ["busy_x_ccnew"]
        old.rollback()
    migrate.up(empty_dsn, folder=folder, include_post=True)
    assert _invalid(empty_dsn) == []
    assert _valid(empty_dsn, "busy_x")


def test_a_partitioned_index_is_finished_after_it_was_cut_off(empty_dsn: str, tmp_path: Path, folder: Path) -> None:
    parts = "".join(
        f"create table {{{{schema}}}}.part_{n} partition of {{{{schema}}}}.parent for values in ({n});\n"
        for n in (1, 2)
    )
    make_folder(
        tmp_path,
        {"01.01.00_01_pre_parent.sql": f"create table {{{{schema}}}}.parent (id int) partition by list (id);\n{parts}"},
    )
    migrate.up(empty_dsn, folder=folder)
    steps = ["create index if not exists parent_x on only {{schema}}.parent (id);"]
    for n in (1, 2):
        steps.append(f"create index concurrently if not exists part_{n}_x on {{{{schema}}}}.part_{n} (id);")
        steps.append(f"alter index {{{{schema}}}}.parent_x attach partition {{{{schema}}}}.part_{n}_x;")
    text = "-- taskq: no-transaction\n" + "\n-- taskq: next\n".join(steps) + "\n"
    files = {"01.02.00_01_pre_parent_index.sql": text}
    make_folder(tmp_path, files)
    with psycopg.connect(empty_dsn) as old:
        old.execute("insert into taskq.part_2 values (2)")
        with pytest.raises(MigrationLocked):
            migrate.up(empty_dsn, folder=folder, build_timeout=0.5)
        assert _invalid(empty_dsn) == ["parent_x", "part_2_x"]
        old.rollback()
    assert migrate.up(empty_dsn, folder=folder).applied == tuple(files)
    assert _invalid(empty_dsn) == []


def test_statements_that_can_run_in_a_transaction_do_so_with_the_short_limit(
    empty_dsn: str, tmp_path: Path, folder: Path
) -> None:
    mixed = {"01.01.00_01_pre_mixed.sql": f"-- taskq: no-transaction\n{next(iter(ALTER.values()))}"}
    make_folder(tmp_path, mixed)
    with psycopg.connect(empty_dsn) as idle:
        idle.execute("select count(*) from taskq.busy")
        with Traffic(empty_dsn) as traffic, pytest.raises(MigrationLocked):
            migrate.up(empty_dsn, folder=folder, lock_timeout=0.5, lock_attempts=1, build_timeout=60)
        assert traffic.longest < 1.0


def test_a_statement_timeout_of_the_role_does_not_end_a_migration(empty_dsn: str, tmp_path: Path, folder: Path) -> None:
    slow = {"01.01.00_01_pre_slow.sql": "select pg_sleep(0.3);\n"}
    make_folder(tmp_path, slow)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        database: Any = conn.info.dbname
        conn.execute(f"alter database {database} set statement_timeout = '100ms'")
        conn.execute(f"alter database {database} set default_transaction_isolation = 'serializable'")
        conn.execute(f"alter database {database} set default_transaction_read_only = on")
    assert migrate.up(empty_dsn, folder=folder).applied == tuple(slow)

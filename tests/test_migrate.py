"""Migrations: order, kinds, refusals, what is recorded, and the SQL for those who apply it by hand."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from migrate_kit import SIMPLE, dump, make_folder, names
from psycopg.rows import dict_row
from servers import Server

from taskq import migrate
from taskq.errors import (
    ConfigurationError,
    MigrationChanged,
    MigrationError,
    MigrationFailed,
    MigrationMissing,
    MigrationReordered,
    MigrationUnknown,
    SchemaBehind,
    SchemaNewer,
)
from taskq.migrate.__main__ import main as manifest_command

NEXT_PRE = {"01.01.00_01_pre_more.sql": "alter table {{schema}}.a add column note text;\n"}
NEXT_POST = {"01.01.00_02_post_less.sql": "drop table {{schema}}.b;\n"}


def test_a_first_installation_applies_everything_once(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    first = migrate.up(empty_dsn, folder=folder)
    assert first.applied == tuple(SIMPLE)
    assert (first.already, first.left_out) == ((), ())
    second = migrate.up(empty_dsn, folder=folder)
    assert (second.applied, second.already) == ((), tuple(SIMPLE))
    with psycopg.connect(empty_dsn, row_factory=dict_row) as conn:
        rows = conn.execute("select * from taskq.schema_migrations order by filename").fetchall()
        assert [(r["filename"], r["version"], r["kind"]) for r in rows] == [(n, n[:8], n.split("_")[2]) for n in SIMPLE]
        assert [r["sha256"] for r in rows] == [m.sha256 for m in migrate.load_migrations(folder)]
        assert {r["taskq_version"] for r in rows} == {migrate.code_version()}
        assert all(r["duration"].total_seconds() > 0 for r in rows)
        lease = conn.execute("select token, installing from taskq.migration_lease").fetchall()
        assert lease == [{"token": None, "installing": False}]


def test_every_table_and_column_of_the_runner_explains_itself(empty_dsn: str, tmp_path: Path) -> None:
    migrate.up(empty_dsn, folder=make_folder(tmp_path, {}))
    with psycopg.connect(empty_dsn) as conn:
        silent = conn.execute(
            "select c.relname, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid "
            "where c.relnamespace = 'taskq'::regnamespace and c.relkind = 'r' and a.attnum > 0 and not a.attisdropped "
            "and (col_description(c.oid, a.attnum) is null or obj_description(c.oid, 'pg_class') is null)"
        ).fetchall()
    assert silent == []


def test_post_files_wait_until_they_are_asked_for(empty_dsn: str, tmp_path: Path) -> None:
    migrate.up(empty_dsn, folder=make_folder(tmp_path, SIMPLE))
    folder = make_folder(tmp_path, {**NEXT_PRE, **NEXT_POST})
    done = migrate.up(empty_dsn, folder=folder)
    assert done.applied == tuple(NEXT_PRE)
    assert done.left_out == tuple(NEXT_POST)
    later = {"01.02.00_01_pre_yet_more.sql": "create table {{schema}}.d (id int);\n"}
    assert migrate.up(empty_dsn, folder=make_folder(tmp_path, later)).applied == tuple(later)
    assert migrate.verify(empty_dsn, folder=folder) == []
    assert migrate.up(empty_dsn, folder=folder, include_post=True).applied == tuple(NEXT_POST)


def test_an_installation_that_failed_half_way_still_takes_post_files_along(empty_dsn: str, tmp_path: Path) -> None:
    broken = {**SIMPLE, "01.00.00_02_pre_rows.sql": "insert into {{schema}}.a values (1), (1);\n"}
    folder = make_folder(tmp_path, broken)
    with pytest.raises(MigrationFailed, match=r"01\.00\.00_02_pre_rows\.sql failed and was rolled back.*23505"):
        migrate.up(empty_dsn, folder=folder)
    assert names(empty_dsn) == ["01.00.00_01_pre_tables.sql"]
    (folder / "01.00.00_02_pre_rows.sql").write_text("select 1;\n")
    (tmp_path / "released_migrations.sha256").unlink()
    migrate.freeze(folder)
    assert migrate.up(empty_dsn, folder=folder).applied == tuple(SIMPLE)[1:]


def test_a_first_installation_may_leave_post_files_out(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    assert migrate.up(empty_dsn, folder=folder, include_post=False).left_out == ("01.00.00_03_post_strict.sql",)
    assert migrate.up(empty_dsn, folder=folder).applied == ()


def test_the_schema_can_have_another_name(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    migrate.up(empty_dsn, "jobs_2", folder=folder)
    migrate.up(empty_dsn, "other", folder=folder)
    assert names(empty_dsn, "jobs_2") == names(empty_dsn, "other") == list(SIMPLE)
    for bad in ("Jobs", "a-b", 'a"b', "pg_jobs", "x" * 41, "", "1a"):
        with pytest.raises(ConfigurationError):
            migrate.up(empty_dsn, bad, folder=folder)
    with pytest.raises(ConfigurationError, match="reserved word"):
        migrate.up(empty_dsn, "order", folder=folder)


def test_a_file_is_all_or_nothing(empty_dsn: str, tmp_path: Path) -> None:
    text = "create table {{schema}}.kept (id int);\ncreate table {{schema}}.kept (id int);\n"
    with pytest.raises(MigrationFailed, match='relation "kept" already exists.*42P07'):
        migrate.up(empty_dsn, folder=make_folder(tmp_path, {"01.00.00_01_pre_twice.sql": text}))
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select to_regclass('taskq.kept')").fetchone() == (None,)
    assert names(empty_dsn) == []


def _change(folder: Path) -> None:
    (folder / "01.00.00_02_pre_rows.sql").write_text("select 2;\n")


def _remove(folder: Path) -> None:
    (folder / "01.00.00_02_pre_rows.sql").unlink()


def _add_unfrozen(folder: Path) -> None:
    (folder / "01.00.00_04_pre_new.sql").write_text("select 2;\n")


def _swap_manifest(folder: Path) -> None:
    path = folder.parent / "released_migrations.sha256"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))


def _lose_manifest(folder: Path) -> None:
    (folder.parent / "released_migrations.sha256").unlink()


def _misname(folder: Path) -> None:
    (folder / "fix.sql").write_text("select 1;\n")


def _same_number(folder: Path) -> None:
    (folder / "01.00.00_03_pre_twin.sql").write_text("select 1;\n")


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (_change, MigrationChanged),
        (_remove, MigrationMissing),
        (_add_unfrozen, MigrationUnknown),
        (_swap_manifest, MigrationReordered),
        (_lose_manifest, MigrationMissing),
        (_misname, MigrationUnknown),
        (_same_number, MigrationReordered),
    ],
)
def test_files_that_differ_from_the_manifest_are_refused(
    empty_dsn: str, tmp_path: Path, harm: Callable[[Path], None], error: type[MigrationError]
) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    harm(folder)
    with pytest.raises(error):
        migrate.up(empty_dsn, folder=folder)
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select to_regnamespace('taskq')").fetchone() == (None,)
    assert manifest_command(["check", str(folder)]) == 1


@pytest.mark.parametrize(
    ("statement", "error", "words"),
    [
        ("update taskq.schema_migrations set sha256 = repeat('0', 64) where filename ~ '_02_'",
         MigrationChanged, "_02_"),
        ("update taskq.schema_migrations set filename = '01.00.00_02_pre_other.sql' where filename ~ '_02_'",
         MigrationUnknown, "01.00.00_02_pre_other.sql"),
        ("delete from taskq.schema_migrations where filename ~ '_01_'", MigrationReordered, "_01_pre_tables"),
        ("insert into taskq.schema_migrations select '02.00.00_01_post_x.sql', '02.00.00', 'post', sha256, now(), "
         "duration, '2' from taskq.schema_migrations limit 1", SchemaNewer, "02.00.00_01_post_x.sql"),
    ],
)  # fmt: skip
def test_a_database_with_another_history_is_refused(
    empty_dsn: str, tmp_path: Path, statement: str, error: type[MigrationError], words: str
) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    migrate.up(empty_dsn, folder=folder)
    with psycopg.connect(empty_dsn) as conn:
        conn.execute(statement)
    before = names(empty_dsn)
    for refused in (migrate.up, migrate.applied_names):
        with pytest.raises(error, match=words):
            refused(empty_dsn, folder=folder)
    assert names(empty_dsn) == before
    assert any(words in line for line in migrate.verify(empty_dsn, folder=folder))
    with pytest.raises(MigrationError):
        migrate.check_compatible(empty_dsn, folder=folder)


def test_a_new_file_must_come_after_the_frozen_ones(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    (folder / "00.09.00_01_pre_late.sql").write_text("select 1;\n")
    with pytest.raises(MigrationReordered, match=r"00\.09\.00_01_pre_late\.sql sorts before"):
        migrate.freeze(folder)


def test_freeze_never_covers_up_a_change(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    _change(folder)
    _add_unfrozen(folder)
    before = (tmp_path / "released_migrations.sha256").read_text()
    assert manifest_command(["freeze", str(folder)]) == 1
    assert (tmp_path / "released_migrations.sha256").read_text() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("select '{{scheme}}';\n", r"line 1: \{\{scheme\}\} is not a placeholder"),
        ("-- taskq: no-transactions\nselect 1;\n", "is not known here"),
        ("select 1;\n-- taskq: next\nselect 2;\n", "is not known here"),
        ("begin;\nselect 1;\ncommit;\n", "controls the transaction itself"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(MigrationError, match=words):
        make_folder(tmp_path, {"01.00.00_01_pre_x.sql": text})


def test_a_file_that_ends_the_runners_transaction_is_not_recorded(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"01.00.00_01_pre_x.sql": "select 1;  commit;\n"})
    with pytest.raises(MigrationError, match="ended the runner's transaction"):
        migrate.up(empty_dsn, folder=folder)
    assert names(empty_dsn) == []


def test_names_must_be_written_in_full(empty_dsn: str, tmp_path: Path) -> None:
    with pytest.raises(MigrationFailed):
        migrate.up(empty_dsn, folder=make_folder(tmp_path, {"01.00.00_01_pre_x.sql": "create table stray (id int);\n"}))


def test_new_writes_the_next_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    path = migrate.new("Add the Tags, at last!", "pre", folder=folder)
    assert path.name == "01.00.00_04_pre_add_the_tags_at_last.sql"
    assert "Runs before the new code" in path.read_text()
    assert migrate.freeze(folder) == [path.name]
    assert migrate.new("clean up", "post", folder=folder).name == "01.00.00_05_post_clean_up.sql"
    with pytest.raises(MigrationError):
        migrate.new("!!!", "pre", folder=folder)


def test_status_tells_the_states_apart(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    assert {s.state for s in migrate.status(empty_dsn, folder=folder)} == {"pending"}
    migrate.up(empty_dsn, folder=folder)
    make_folder(tmp_path, NEXT_PRE)
    _change(folder)
    (folder / "01.00.00_03_post_strict.sql").unlink()
    make_folder(tmp_path, {"01.01.00_09_pre_new.sql": "select 1;\n"}, frozen=False)
    states = {s.filename: s.state for s in migrate.status(empty_dsn, folder=folder)}
    assert states == {
        "01.00.00_01_pre_tables.sql": "applied",
        "01.00.00_02_pre_rows.sql": "changed",
        "01.00.00_03_post_strict.sql": "missing",
        "01.01.00_01_pre_more.sql": "pending",
        "01.01.00_09_pre_new.sql": "unknown",
    }


def test_the_check_at_boot(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    with pytest.raises(SchemaBehind, match=r"nothing of taskq; run 'taskq migrate up'$"):
        migrate.check_compatible(empty_dsn, folder=folder)
    migrate.up(empty_dsn, folder=folder)
    (tmp_path / "old").mkdir()
    old = make_folder(tmp_path / "old", SIMPLE)
    make_folder(tmp_path, {**NEXT_PRE, **NEXT_POST})
    with psycopg.connect(empty_dsn, row_factory=dict_row) as conn:
        with pytest.raises(SchemaBehind, match=r"behind this code.*in order: 01\.01\.00_01_pre_more\.sql; run"):
            migrate.check_compatible(conn, folder=folder)
        migrate.check_compatible(conn, folder=old)
    migrate.up(empty_dsn, folder=folder)
    # The pre files of the next release suit the old code too; its post files do not.
    migrate.check_compatible(empty_dsn, folder=folder)
    migrate.check_compatible(empty_dsn, folder=old)
    migrate.up(empty_dsn, folder=folder, include_post=True)
    migrate.check_compatible(empty_dsn, folder=folder)
    with pytest.raises(SchemaNewer, match="01.01.00_02_post_less.sql"):
        migrate.check_compatible(empty_dsn, folder=old)


def _psql(server: Server, dsn: str, text: str) -> None:
    done = subprocess.run(
        [server.bin_dir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn],
        check=False,
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_the_sql_for_hands_gives_what_up_gives(pg_server: Server, empty_dsn: str, tmp_path: Path) -> None:
    files = SIMPLE | {
        "01.00.00_04_pre_index.sql": "-- taskq: no-transaction\ncreate index concurrently a_x on {{schema}}.a (id)\n"
        "-- taskq: next\ncreate index concurrently b_x on {{schema}}.b (id);\n"
    }
    folder = make_folder(tmp_path, files)
    _psql(pg_server, empty_dsn, migrate.render_sql("byhand", folder=folder))
    migrate.up(empty_dsn, "byrunner", folder=folder)
    by_hand = dump(pg_server, empty_dsn, "byhand")
    assert "b_positive" in by_hand
    assert by_hand.replace("byhand", "byrunner") == dump(pg_server, empty_dsn, "byrunner")
    assert migrate.verify(empty_dsn, "byhand", folder=folder) == []
    assert migrate.up(empty_dsn, "byhand", folder=folder).applied == ()
    make_folder(tmp_path, {**NEXT_PRE, **NEXT_POST})
    applied = migrate.applied_names(empty_dsn, "byhand", folder=folder)
    _psql(pg_server, empty_dsn, migrate.render_sql("byhand", applied=applied, include_post=False, folder=folder))
    assert migrate.up(empty_dsn, "byhand", folder=folder).left_out == tuple(NEXT_POST)

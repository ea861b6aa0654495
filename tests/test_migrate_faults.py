"""What can befall a runner: lost sessions, forged rows, rights that are missing, others who create the same schema."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from helpers import eventually
from migrate_kit import GATED, SIMPLE, backends_at, closed_gate, make_folder, names
from proxy import proxy

from taskq import migrate
from taskq.db.dsn import parse_dsn
from taskq.errors import MigrationError, MigrationFailed, MigrationLocked
from taskq.migrate import records
from taskq.migrate.__main__ import main as manifest_command
from taskq.migrate.sentry import Sentry

INDEX = {
    "01.00.00_04_pre_index.sql": "-- taskq: no-transaction\n"
    "create index concurrently if not exists a_x on {{schema}}.a (id);\n"
}
INDEXING = "applying 01.00.00_04_pre_index.sql"
ENDS_ITSELF = {"01.00.00_01_pre_x.sql": "select pg_terminate_backend(pg_backend_pid());\n"}
STEAL = "update taskq.migration_lease set token = gen_random_uuid(), holder = 'thief', expires_at = 'infinity'"
GIVE_BACK = "update taskq.migration_lease set token = null, holder = null, expires_at = null"
SENTRIES = (
    "select pid from pg_stat_activity where application_name = 'taskq migrate sentry' and datname = current_database()"
)


def as_role(dsn: str, role: str, *, options: str = "", may_create: bool = True) -> str:
    """The same database as an ordinary role, which is made if it is not there."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            f"do $$ begin create role {role} login; exception when duplicate_object then null; end $$".encode()
        )
        conn.execute(f"alter role {role} {options or 'login'}".encode())
        if may_create:
            conn.execute(f"grant create on database {conn.info.dbname} to {role}".encode())
    return psycopg.conninfo.make_conninfo(dsn, user=role)


# Sessions that end -----------------------------------------------------------------------------------------------


def test_a_connection_that_is_lost_each_time_is_given_up(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, ENDS_ITSELF)
    said: list[str] = []
    with pytest.raises(MigrationError, match="lost again and again; see the server's log"):
        migrate.up(empty_dsn, folder=folder, progress=said.append)
    assert said.count("the lease was lost; looking again") == 6
    assert names(empty_dsn) == []


def test_a_runner_that_loses_its_lease_until_its_time_is_up_says_so(empty_dsn: str, tmp_path: Path) -> None:
    with pytest.raises(MigrationLocked, match="lost its lease again and again"):
        migrate.up(empty_dsn, folder=make_folder(tmp_path, ENDS_ITSELF), wait=0)


def test_a_connection_that_is_lost_before_anything_is_there_is_replaced(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    with proxy(empty_dsn) as way:
        lost = way.swallow(request="relname = 'schema_migrations'")
        assert migrate.up(way.dsn, folder=folder).applied == tuple(SIMPLE)
    assert lost.is_set()


def test_a_connection_that_is_lost_while_the_schema_is_made_is_told(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    with proxy(empty_dsn) as way:
        lost = way.swallow(request="pg_try_advisory_xact_lock")
        with pytest.raises(MigrationFailed, match="taskq could not be prepared.*connection was lost; run 'taskq"):
            migrate.up(way.dsn, folder=folder)
    assert lost.is_set()
    assert migrate.up(empty_dsn, folder=folder).applied == tuple(SIMPLE)


def test_a_statement_that_a_person_cancels_is_not_tried_again(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, GATED)
    with (
        closed_gate(empty_dsn),
        psycopg.connect(empty_dsn, autocommit=True) as conn,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(migrate.up, empty_dsn, folder=folder, lock_timeout=600)
        [(pid, _)] = eventually(lambda: backends_at(conn, "public.gate"), 30)
        conn.execute("select pg_cancel_backend(%s)", (pid,))
        with pytest.raises(MigrationFailed, match="_02_pre_gated.sql was cancelled"):
            running.result(30)
        assert conn.execute("select token from taskq.migration_lease").fetchone() == (None,)
    assert names(empty_dsn) == list(GATED)[:1]


def test_a_lost_connection_of_the_sentry_is_replaced(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, GATED)
    with (
        closed_gate(empty_dsn) as gate,
        psycopg.connect(empty_dsn, autocommit=True) as conn,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(migrate.up, empty_dsn, folder=folder, lock_timeout=600)
        eventually(lambda: backends_at(conn, "public.gate"), 30)
        before = eventually(lambda: conn.execute(SENTRIES).fetchall())
        conn.execute("select pg_terminate_backend(%s)", before[0])
        eventually(lambda: set(conn.execute(SENTRIES).fetchall()) - set(before))
        gate.rollback()
        assert running.result(30).applied == tuple(GATED)


def test_a_role_with_a_single_connection_can_migrate(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, GATED)
    lonely = as_role(empty_dsn, "lonely", options="connection limit 1")
    with (
        closed_gate(empty_dsn) as gate,
        psycopg.connect(empty_dsn, autocommit=True) as conn,
        ThreadPoolExecutor(1) as pool,
    ):
        gate.execute("grant all on public.gate to lonely")
        gate.commit()
        gate.execute("lock table public.gate in access exclusive mode")
        running = pool.submit(migrate.up, lonely, folder=folder, lock_timeout=600, lease=1.5)
        eventually(lambda: backends_at(conn, "public.gate"), 30)
        # Nobody renews the lease; as long as nobody takes it over, what is done under it counts.
        ended = "select expires_at + interval '0.5 s' < clock_timestamp() from taskq.migration_lease"
        eventually(lambda: conn.execute(ended).fetchone() == (True,))
        assert conn.execute(SENTRIES).fetchall() == []
        gate.rollback()
        assert running.result(30).applied == tuple(GATED)


def test_a_lease_that_is_lost_between_two_statements_ends_the_try(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE | INDEX)
    heard = (
        "select exists (select from pg_stat_activity where application_name = 'taskq migrate sentry' and "
        "datname = current_database() and state = 'idle' and query ilike 'commit%%' and state_change > %s)"
    )
    said: list[str] = []
    with psycopg.connect(empty_dsn, autocommit=True) as conn:

        def steal(line: str) -> None:
            said.append(line)
            if line == INDEXING and said.count(INDEXING) == 1:
                conn.execute(STEAL)
                at = conn.execute("select clock_timestamp()").fetchone()
                eventually(lambda: conn.execute(heard, at).fetchone() == (True,), 30)
            elif line == "waiting for another runner (thief)":
                assert conn.execute("select to_regclass('taskq.a_x')").fetchone() == (None,)
                conn.execute(GIVE_BACK)

        assert migrate.up(empty_dsn, folder=folder, lease=1.5, progress=steal).applied == tuple(SIMPLE | INDEX)
    assert "the lease was lost; looking again" in said
    assert said.count(INDEXING) == 2


def test_a_statement_that_is_no_longer_watched_is_not_cancelled(empty_dsn: str) -> None:
    with (
        closed_gate(empty_dsn),
        psycopg.connect(empty_dsn, autocommit=True) as conn,
        psycopg.connect(empty_dsn, autocommit=True) as waiter,
        ThreadPoolExecutor(1) as pool,
    ):
        sentry = Sentry(parse_dsn(empty_dsn), "taskq", uuid4(), 30)
        running = pool.submit(waiter.execute, "table public.gate")
        eventually(lambda: backends_at(conn, "public.gate"))
        ended = sentry.watch(waiter.info.backend_pid, 0.001)
        sentry.unwatch()
        sentry._look(conn, ended)
        assert ended.waited > ended.limit
        assert not ended.cancelled
        assert backends_at(conn, "public.gate")
        watched = sentry.watch(waiter.info.backend_pid, 0.001)
        sentry._look(conn, watched)
        assert watched.cancelled
        with pytest.raises(psycopg.errors.QueryCanceled):
            running.result(30)


def test_a_prepared_transaction_in_the_way_is_told(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    migrate.up(empty_dsn, folder=folder)
    make_folder(tmp_path, {"01.01.00_01_pre_more.sql": "alter table {{schema}}.a add column note text;\n"})
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("begin; lock table taskq.a in access share mode; prepare transaction 'left behind'")
        try:
            with pytest.raises(MigrationLocked, match="In the way: a prepared transaction .see pg_prepared_xacts"):
                migrate.up(empty_dsn, folder=folder, lock_timeout=0.3, lock_attempts=1)
        finally:
            conn.execute("rollback prepared 'left behind'")


# Rows and tables of the runner that were changed by hand ---------------------------------------------------------


def test_a_lease_without_its_row_is_told_with_the_cure(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    migrate.up(empty_dsn, folder=folder)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("delete from taskq.migration_lease")
        with pytest.raises(MigrationError, match="has lost its row; restore it: insert into") as refused:
            migrate.up(empty_dsn, folder=folder)
        conn.execute(str(refused.value).split("restore it: ")[1].encode())
    assert migrate.up(empty_dsn, folder=folder).already == tuple(SIMPLE)


def test_a_changed_table_of_the_runner_is_told(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    migrate.up(empty_dsn, folder=folder)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("alter table taskq.schema_migrations drop column duration")
    with pytest.raises(MigrationFailed, match=r"could not go on.*duration.*SQLSTATE 42703"):
        migrate.up(empty_dsn, folder=folder)


def test_an_error_inside_a_function_is_told_with_its_place(empty_dsn: str, tmp_path: Path) -> None:
    text = "do $$ begin raise exception 'no' using hint = 'Ask again.', detail = 'Today.'; end $$;\n"
    with pytest.raises(MigrationFailed, match=r"no; Today\.; Ask again\.; context: PL/pgSQL.*; SQLSTATE P0001"):
        migrate.up(empty_dsn, folder=make_folder(tmp_path, {"01.00.00_01_pre_x.sql": text}))


# Rights, and others ----------------------------------------------------------------------------------------------


def test_a_role_that_may_not_create_or_read_is_told(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    humble = as_role(empty_dsn, "humble", may_create=False)
    with pytest.raises(MigrationFailed, match="schema taskq could not be prepared.*run it as the role that owns"):
        migrate.up(humble, folder=folder)
    migrate.up(empty_dsn, folder=folder)
    with pytest.raises(MigrationFailed, match=r"taskq\.schema_migrations cannot be read.*grant what is missing"):
        migrate.status(humble, folder=folder)


def test_a_runner_that_may_end_no_session_takes_over_all_the_same(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    humble = as_role(empty_dsn, "humble")
    migrate.up(humble, folder=folder)
    make_folder(tmp_path, INDEX)
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("revoke execute on function pg_terminate_backend(int, bigint) from public")
        conn.execute(STEAL)
        conn.execute("update taskq.migration_lease set expires_at = clock_timestamp() - interval '1 s'")
    said: list[str] = []
    assert migrate.up(humble, folder=folder, progress=said.append).applied == tuple(INDEX)
    assert "taking over from a runner whose lease has expired" in said


def test_somebody_elses_schema_of_the_same_name_is_taken(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    with (
        psycopg.connect(empty_dsn) as other,
        psycopg.connect(empty_dsn, autocommit=True) as conn,
        ThreadPoolExecutor(1) as pool,
    ):
        other.execute("create schema taskq")
        running = pool.submit(migrate.up, empty_dsn, folder=folder)
        eventually(lambda: backends_at(conn, "create schema"), 30)
        other.commit()
        assert running.result(30).applied == tuple(SIMPLE)


def test_a_schema_that_somebody_else_creates_for_ever_is_not_waited_for(empty_dsn: str, tmp_path: Path) -> None:
    with psycopg.connect(empty_dsn) as other:
        other.execute("create schema taskq")
        with pytest.raises(MigrationError, match="could not be created in time: somebody else is creating it"):
            migrate.up(empty_dsn, folder=make_folder(tmp_path, SIMPLE), wait=0)


# Files -----------------------------------------------------------------------------------------------------------


def test_a_manifest_with_a_mistake_is_refused_with_its_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    manifest = tmp_path / "released_migrations.sha256"
    lines = manifest.read_text().splitlines(keepends=True)
    for wrong in ("no digest\n", lines[0]):
        manifest.write_text("".join([lines[0], wrong]))
        with pytest.raises(MigrationError, match="line 2, is not '<sha256>  <filename>' of a new file"):
            migrate.load_migrations(folder)


def test_a_release_has_at_most_99_migrations(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"01.00.00_99_pre_last.sql": "select 1;\n"})
    with pytest.raises(MigrationError, match=r"release 01\.00\.00 has 99 migrations already"):
        migrate.new("one more", "pre", folder=folder)
    (other := tmp_path / "other").mkdir()
    assert migrate.new("first", "pre", folder=make_folder(other, {})).name.endswith("_01_pre_first.sql")


def test_a_manifest_is_written_anew_only_before_the_first_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    (folder / "01.00.00_02_pre_rows.sql").write_text("select 2;\n")
    before = (tmp_path / "released_migrations.sha256").read_text()
    for version, allowed in (("1.0.0", False), ("0.1.0", False), ("0.1.0.dev0", True)):
        monkeypatch.setattr("taskq.migrate.files.version", lambda name, said=version: said)
        if allowed:
            assert migrate.freeze(folder, rewrite=True) == list(SIMPLE)
            assert (tmp_path / "released_migrations.sha256").read_text() != before
        else:
            with pytest.raises(MigrationError, match="frozen for good"):
                migrate.freeze(folder, rewrite=True)


def test_code_that_is_not_installed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import version

    monkeypatch.setattr("taskq.migrate.files.version", lambda name: version(f"no-such-package-as-{name}"))
    assert migrate.code_version() == "unknown"
    # A source tree of any age: the numbers go on from what is there.
    assert migrate.new("x", "pre", folder=make_folder(tmp_path, {})).name == "00.00.00_01_pre_x.sql"


def test_an_installation_without_its_files_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from taskq.migrate import files

    monkeypatch.setattr(files, "__file__", str(tmp_path / "taskq" / "migrate" / "files.py"))
    with pytest.raises(MigrationError, match="not in this installation; it is damaged"):
        migrate.load_migrations()


def test_a_database_that_nobody_can_reach_is_told_in_a_line() -> None:
    from taskq.errors import DatabaseUnavailable

    with pytest.raises(DatabaseUnavailable, match='host "127.0.0.1", port 1, database "x": nothing answers'):
        records.connect("postgresql://taskq@127.0.0.1:1/x")


def test_the_manifest_command_freezes_and_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path, SIMPLE)
    make_folder(tmp_path, INDEX, frozen=False)
    assert manifest_command(["freeze", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"frozen: {name}" for name in INDEX]
    assert manifest_command(["check", str(folder)]) == 0

"""``taskq doctor``: each check on the fault that it is for, produced for real, and on a server where all is well."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sql as q
from cli_kit import Cli, make_cli  # noqa: F401
from helpers import eventually
from psycopg.conninfo import make_conninfo
from runs_kit import LEVEL, edge, node, start, store
from servers import Server, serve
from test_pooler import pooler

from taskq import migrate
from taskq.cli import checks
from taskq.cli.checks import queue as of_queues
from taskq.cli.checks import schema as of_schema
from taskq.cli.checks import server as of_server
from taskq.cli.doctor import check_names
from taskq.version import __version__

Conn = psycopg.Connection[Any]
UNSAFE = {"durability"}
"""What the tests' own server fails, since it trades safety for speed."""


@pytest.fixture(scope="module")
def durable() -> Iterator[Server]:
    """A server like one in production, where prepared transactions and logical slots are possible too."""
    settings = {"max_prepared_transactions": "5", "wal_level": "logical", "max_connections": "30"}
    with serve(settings=settings, durable=True) as server:
        yield server


@pytest.fixture
def other(durable: Server) -> Iterator[str]:
    """A migrated database of its own on that server."""
    name = f"doctor_{time.monotonic_ns()}"
    with psycopg.connect(durable.dsn(), autocommit=True) as conn:
        conn.execute(f"create database {name}".encode())
    migrate.up(durable.dsn(name))
    yield durable.dsn(name)
    with psycopg.connect(durable.dsn(), autocommit=True) as conn:
        conn.execute(f"drop database {name} with (force)".encode())


def diagnose(cli: Cli, *args: str) -> dict[str, dict[str, Any]]:
    """What each check found."""
    done = cli("doctor", "--json", *args)
    assert done.code in {0, 1}, done
    return {row["check"]: row for row in done.json["checks"]}


def ill(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The checks that are not ok, but for what the tests' server is always ill of."""
    return {name: row["verdict"] for name, row in found.items() if row["verdict"] != "ok" and name not in UNSAFE}


def work(conn: Conn, **worker: Any) -> Any:
    """A live worker of this release that leads."""
    found = q.register(conn, **worker)
    conn.execute("update taskq.workers set version = %s where id = %s", (__version__, found))
    conn.execute("select taskq.lead(%s, 'maintenance', 30)", (found,))
    return found


def test_a_server_where_all_is_well(cli: Cli, other: str) -> None:
    with psycopg.connect(other, autocommit=True) as conn:
        work(conn)
        q.enqueue(conn)
        reader = make_conninfo(other, options="-c role=taskq_reader")
        for args in ([], ["--strict"], ["--strict", "--dsn", reader]):
            done = cli("doctor", "--json", "--dsn", other, *args)
            assert (done.code, done.json["verdict"]) == (0, "ok"), done.out
            assert [row["check"] for row in done.json["checks"]] == check_names()
            assert all(row["means"] is None and row["cure"] is None for row in done.json["checks"])
        text = cli.ok("doctor", "--dsn", other).out
    assert f"{len(check_names())} ok, 0 warn, 0 fail" in text
    assert "cure" not in text


def test_every_verdict_has_a_section_in_the_manual() -> None:
    page = (Path(__file__).parents[1] / "docs/operations.md").read_text()
    assert set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE)) == set(check_names())


def test_exit_codes(cli: Cli, other: str) -> None:
    with psycopg.connect(other, autocommit=True) as conn:
        work(conn, tasks=["t"])
        q.unknown(conn, queue="elsewhere")  # a warning of 'workers' and no failure
        assert cli("doctor", "--dsn", other).code == 0
        assert cli("doctor", "--dsn", other, "--strict").code == 1
        conn.execute("alter table taskq.jobs set (autovacuum_enabled = false)")
    done = cli("doctor", "--dsn", other)
    assert done.code == 1
    assert "cure:  alter table taskq.jobs reset (autovacuum_enabled)" in done.out
    nowhere = cli("doctor", "--dsn", "postgresql://u:sekret@127.0.0.1:1/x")
    assert (nowhere.code, nowhere.out, "sekret" in nowhere.err) == (3, "", False)
    assert cli("doctor", "--dsn", "nonsense://").code == 2


# The server -----------------------------------------------------------------------------------------------------------


def test_the_server(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ill(diagnose(cli)) == {}
    monkeypatch.setattr(of_server, "MINIMUM_VERSION", 990_000)
    assert ill(diagnose(cli)) == {"connection": "fail"}


def test_a_pooler(cli: Cli, dsn: str, tmp_path: Path) -> None:
    with pooler(dsn, tmp_path) as between:
        found = diagnose(cli, "--dsn", between)
    assert ill(found) == {"pooler": "warn"}


def test_a_server_whose_transactions_are_read_only_by_default(cli: Cli, dsn: str) -> None:
    found = diagnose(cli, "--dsn", make_conninfo(dsn, options="-c default_transaction_read_only=on"))
    assert ill(found) == {"writable": "warn"}


def test_settings_that_lose_what_was_committed(cli: Cli, dsn: str, other: str) -> None:
    assert diagnose(cli)["durability"]["found"] == "fsync and full_page_writes are off"
    with psycopg.connect(other, autocommit=True) as conn:
        conn.execute("alter role taskq set synchronous_commit = off")
        try:
            found = diagnose(cli, "--dsn", other)
        finally:
            conn.execute("alter role taskq reset synchronous_commit")
    assert (found["durability"]["verdict"], found["durability"]["found"]) == ("warn", "synchronous_commit is off")


@pytest.mark.parametrize(("seconds", "said"), [(-90, "behind the database's"), (400, "ahead of the database's")])
def test_a_clock_that_is_off(cli: Cli, monkeypatch: pytest.MonkeyPatch, seconds: float, said: str) -> None:
    class Clock:
        time = staticmethod(lambda: time.time() + seconds)

    monkeypatch.setattr(of_server, "time", Clock)
    found = diagnose(cli)
    assert ill(found) == {"clock": "warn"}
    assert said in found["clock"]["found"]


def test_connections_that_run_out(cli: Cli, other: str) -> None:
    with psycopg.connect(other, autocommit=True) as conn:
        most = 30 - q.one(conn, "select current_setting('superuser_reserved_connections')::int")
        opened = [conn]
        try:
            for want, verdict in ((0.85, "warn"), (1.0, "fail")):
                while len(opened) < most * want - 1:
                    opened.append(psycopg.connect(other))
                found = diagnose(cli, "--dsn", other)
                assert found["connections"]["verdict"] == verdict, found["connections"]
        finally:
            for each in opened[1:]:
                each.close()


def test_an_old_transaction(cli: Cli, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with psycopg.connect(dsn, application_name="nightly report") as old:
        old.execute("select pg_current_xact_id()")
        pid = old.info.backend_pid
        assert ill(diagnose(cli)) == {}
        monkeypatch.setattr(of_server, "LONG", 0.01)
        found = diagnose(cli)
        assert ill(found) == {"transactions": "warn"}
        assert f"pid {pid} (nightly report, user taskq) has been idle in transaction" in found["transactions"]["found"]
        assert f"select pg_terminate_backend({pid})" in found["transactions"]["cure"]
        monkeypatch.setattr(of_server, "VERY_LONG", 0.01)
        assert ill(diagnose(cli)) == {"transactions": "fail"}
        # A reader does not see since when; how many transactions it holds back is not hidden.
        reader = make_conninfo(dsn, options="-c role=taskq_reader")
        assert ill(diagnose(cli, "--dsn", reader)) == {}
        monkeypatch.setattr(of_server, "MANY_XIDS", 0)
        found = diagnose(cli, "--dsn", reader)
        assert ill(found) == {"transactions": "warn"}
        assert re.search(rf"pid {pid} .* for \d+ transactions", found["transactions"]["found"])


def test_a_prepared_transaction_and_a_slot_that_nobody_reads(
    cli: Cli, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with psycopg.connect(other, autocommit=True) as conn:
        conn.execute("begin")
        conn.execute("create table public.half_done ()")
        conn.execute("prepare transaction 'half'")
        try:
            assert ill(diagnose(cli, "--dsn", other)) == {}
            monkeypatch.setattr(of_server, "LONG", 0.0)
            found = diagnose(cli, "--dsn", other)
            assert found["prepared"]["verdict"] == "warn"
            assert "rollback prepared 'half'" in found["prepared"]["cure"]
        finally:
            conn.execute("rollback prepared 'half'")
        monkeypatch.undo()
        conn.execute("select pg_create_logical_replication_slot('forgotten', 'pgoutput')")
        try:
            found = diagnose(cli, "--dsn", other)
        finally:
            conn.execute("select pg_drop_replication_slot('forgotten')")
    assert ill(found) == {"replication": "warn"}
    assert "the replication slot forgotten is not in use, and keeps" in found["replication"]["found"]


def test_ids_of_transactions_that_run_out(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_server, "HALF_USED", 1)
    assert ill(diagnose(cli)) == {"wraparound": "warn"}
    monkeypatch.setattr(of_server, "NEARLY_USED", 1)
    assert ill(diagnose(cli)) == {"wraparound": "fail"}


def test_notifications_that_nobody_reads(cli: Cli, dsn: str, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    with psycopg.connect(dsn, autocommit=True) as asleep:
        asleep.execute("listen taskq_work")
        asleep.execute("begin")
        asleep.execute("select 1")
        conn.execute("select pg_notify('taskq_work', repeat('x', 7000) || i) from generate_series(1, 400) i")
        monkeypatch.setattr(of_server, "NOTIFICATIONS_FILL", 1e-7)
        assert ill(diagnose(cli)) == {"notifications": "warn"}
        monkeypatch.setattr(of_server, "NOTIFICATIONS_FULL", 1e-7)
        assert ill(diagnose(cli)) == {"notifications": "fail"}


# The schema -----------------------------------------------------------------------------------------------------------


def test_a_database_without_the_schema(cli: Cli, empty_dsn: str) -> None:
    found = diagnose(cli, "--dsn", empty_dsn)
    assert ill(found)["migrations"] == "fail"
    assert found["migrations"]["cure"] == "taskq migrate up"
    assert "partitions" not in found


def test_migrations(cli: Cli, conn: Conn) -> None:
    name = q.one(conn, "select max(filename) from taskq.schema_migrations")
    row = q.rows(conn, "select * from taskq.schema_migrations where filename = %s", name)[0]
    conn.execute("update taskq.schema_migrations set sha256 = %s where filename = %s", ("0" * 64, name))
    found = diagnose(cli)
    assert (found["migrations"]["verdict"], found["migrations"]["cure"]) == ("fail", "taskq migrate verify")
    conn.execute("delete from taskq.schema_migrations where filename = %s", (name,))
    assert name in diagnose(cli)["migrations"]["found"]
    for kind, verdict in (("post", "fail"), ("pre", "ok")):
        conn.execute("delete from taskq.schema_migrations where filename like '99%%'")
        conn.execute(
            "insert into taskq.schema_migrations select m.* from jsonb_populate_record(null::taskq.schema_migrations,"
            " %s) m on conflict do nothing",
            (json.dumps(row, default=str),),
        )
        later = {**row, "filename": f"99.00.00_01_{kind}_later.sql", "version": "99.00.00", "kind": kind}
        conn.execute(
            "insert into taskq.schema_migrations"
            " select * from jsonb_populate_record(null::taskq.schema_migrations, %s)",
            (json.dumps(later, default=str),),
        )
        found = diagnose(cli)
        assert found["migrations"]["verdict"] == verdict, found["migrations"]


def test_who_may_do_what(cli: Cli, conn: Conn, dsn: str) -> None:
    found = diagnose(cli, "--dsn", make_conninfo(dsn, options="-c role=taskq_operator"))
    assert found["roles"]["found"] == "taskq_operator has the roles operator"
    conn.execute("do $$ begin create role nobody_special login; exception when duplicate_object then null; end $$")
    found = diagnose(cli, "--dsn", make_conninfo(dsn, user="nobody_special"))
    assert ill(found) == {"migrations": "fail", "roles": "fail"}
    assert "grant taskq_reader to nobody_special" in found["roles"]["cure"]


def test_roles_that_were_never_made(cli: Cli, empty_dsn: str) -> None:
    with psycopg.connect(empty_dsn, autocommit=True) as conn:
        conn.execute("do $$ begin create role cannot login; exception when duplicate_object then null; end $$")
        conn.execute("create schema bare authorization cannot")
    mine = make_conninfo(empty_dsn, user="cannot")
    migrate.up(mine, "bare")
    found = diagnose(cli, "--dsn", mine, "--schema", "bare")
    assert ill(found) == {"roles": "warn"}
    assert "create role bare_reader nologin" in found["roles"]["cure"]


def test_an_index_that_was_cut_off(cli: Cli, conn: Conn, dsn: str) -> None:
    with psycopg.connect(dsn) as writer, psycopg.connect(dsn, autocommit=True) as builder:
        writer.execute("lock table taskq.jobs in row exclusive mode")
        builder.execute("set statement_timeout = '300ms'")
        with pytest.raises(psycopg.errors.QueryCanceled):
            builder.execute("create index concurrently jobs_half on taskq.jobs (task)")
    found = diagnose(cli)
    assert ill(found) == {"indexes": "fail"}
    assert "jobs_half" in found["indexes"]["found"]
    conn.execute("reindex index concurrently taskq.jobs_half")
    assert ill(diagnose(cli)) == {}


def test_partitions(cli: Cli, conn: Conn) -> None:
    q.control_clock(conn)
    assert diagnose(cli)["partitions"]["found"] == "history for 15 days, ledger for 15 days, today included"
    q.shift_clock(conn, "13 days")
    found = diagnose(cli)
    assert ill(found) == {"partitions": "warn"}
    assert found["partitions"]["found"] == "history for 2 days, ledger for 2 days, today included"
    q.shift_clock(conn, "10 days")
    assert ill(diagnose(cli)) == {"partitions": "fail"}
    conn.execute("select taskq.ensure_partitions()")
    assert ill(diagnose(cli)) == {}
    q.shift_clock(conn, "20 days")
    conn.execute("select taskq.ensure_partitions()")
    found = diagnose(cli)
    assert ill(found) == {"partitions": "warn"}
    assert "partitions past the retention" in found["partitions"]["found"]
    day = q.one(conn, "select max(name) from taskq.partitions where parent = 'ledger' and day = taskq.now()::date + 1")
    conn.execute(f"drop table taskq.{day}".encode())
    assert "ledger for 1 days" in diagnose(cli)["partitions"]["found"]


def test_dead_rows_and_autovacuum(cli: Cli, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_schema, "DEAD_ROWS", 100)
    for row in q.enqueue_many(conn, 150):
        q.cancel(conn, row["job_id"])
    conn.execute("select pg_stat_force_next_flush()")
    conn.execute("select 1")
    eventually(lambda: "vacuum" in ill(diagnose(cli)))
    found = diagnose(cli)
    assert ill(found) == {"vacuum": "warn"}
    assert re.match(r"jobs has \d{3} dead rows for \d+ living \(last vacuum: never\)", found["vacuum"]["found"])
    conn.execute("vacuum taskq.jobs")
    eventually(lambda: "vacuum" not in ill(diagnose(cli)))
    conn.execute("alter table taskq.workers set (autovacuum_enabled = off)")
    assert ill(diagnose(cli)) == {"vacuum": "fail"}


def test_a_sequence_near_its_end(cli: Cli, conn: Conn) -> None:
    conn.execute("create sequence taskq.short maxvalue 10")
    conn.execute("select setval('taskq.short', 9)")
    found = diagnose(cli)
    assert ill(found) == {"sequences": "fail"}
    assert "short has used 90%" in found["sequences"]["found"]


def test_the_size_is_told(cli: Cli) -> None:
    found = diagnose(cli)["size"]["found"]
    size = r"[\d.]+ (kB|MB)"
    each = rf"\w+ {size}( in \d+ partitions)?"
    assert re.fullmatch(rf"{size} in all: {each}(, {each})*", found), found
    assert re.search(rf"\bhistory {size} in 16 partitions", found), found


# Workers and queues ---------------------------------------------------------------------------------------------------


def test_a_lease_that_nobody_noticed(cli: Cli, conn: Conn) -> None:
    worker, _ = q.running(conn, work(conn))
    assert ill(diagnose(cli)) == {}
    conn.execute("update taskq.workers set lease_expires_at = taskq.now() - interval '50 s'")
    found = diagnose(cli)
    assert ill(found) == {"workers": "fail"}
    assert re.search(r"ran out (5\d|[6-9]\d) s ago", found["workers"]["found"])
    q.lose(conn, worker)
    conn.execute("update taskq.workers set lease_expires_at = renewed_at")
    found = diagnose(cli)
    assert ill(found) == {"workers": "warn", "claims": "warn"}
    assert "1 job claimed by workers that are lost or gone" in found["claims"]["found"]
    conn.execute("delete from taskq.workers")
    assert "claims" in ill(diagnose(cli))
    q.settle(conn)
    assert "claims" not in ill(diagnose(cli))


def test_nobody_leads(cli: Cli, conn: Conn) -> None:
    worker = work(conn)
    assert diagnose(cli)["leader"]["found"].startswith("w")
    conn.execute("update taskq.leader set expires_at = taskq.now() - interval '10 s'")
    assert ill(diagnose(cli)) == {"leader": "warn"}
    conn.execute("update taskq.leader set expires_at = taskq.now() - interval '100 s'")
    assert ill(diagnose(cli)) == {"leader": "fail"}
    conn.execute("select taskq.stop_worker(%s)", (worker,))
    assert ill(diagnose(cli)) == {}


def test_workers_of_another_release(cli: Cli, conn: Conn) -> None:
    work(conn)
    other = q.register(conn)
    found = diagnose(cli)
    assert ill(found) == {"versions": "warn"}
    assert "1 of 2 workers run 0;" in found["versions"]["found"]
    conn.execute("select taskq.stop_worker(%s)", (other,))
    assert ill(diagnose(cli)) == {}


def test_queues_that_stand_still(cli: Cli, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    job = q.enqueue(conn, queue="mail")
    assert ill(diagnose(cli)) == {"queues": "warn"}
    conn.execute("update taskq.jobs set run_at = taskq.now() - interval '10 min' where id = %s", (job,))
    found = diagnose(cli)
    assert ill(found) == {"queues": "fail"}
    assert "mail has 1 due job and no worker, the oldest for 10 min" in found["queues"]["found"]
    conn.execute("select taskq.pause_queue('mail')")
    assert ill(diagnose(cli)) == {}
    assert "paused: mail" in diagnose(cli)["queues"]["found"]
    monkeypatch.setattr(of_queues, "PAUSED", 0.0)
    assert "is paused for" in diagnose(cli)["queues"]["found"]
    conn.execute("select taskq.resume_queue('mail')")
    work(conn, queues=["mail"])
    found = diagnose(cli)
    assert ill(found) == {"queues": "warn"}
    assert "the oldest for 10 min, and 1 worker, with" in found["queues"]["found"]


def test_jobs_that_no_worker_knows(cli: Cli, conn: Conn) -> None:
    work(conn, queues=["q"], tasks=["t"])
    q.enqueue(conn)
    later = q.enqueue(conn, task="gone", run_in=3600)
    assert ill(diagnose(cli)) == {}
    q.make_due(conn, later)
    found = diagnose(cli)
    assert ill(found) == {"stranded": "fail"}
    assert "1 due jobs of the task gone in q" in found["stranded"]["found"]
    q.cancel(conn, later)
    q.enqueue(conn, required_worker_schema=9)
    assert "of the task t of level 9 in q" in diagnose(cli)["stranded"]["found"]


def test_nodes_ahead_that_no_worker_knows_any_more(cli: Cli, conn: Conn) -> None:
    old = work(conn, queues=["q"], tasks=["a", "b", "c"], level=LEVEL)
    nodes = [node("a"), node("b"), node("last", task="c")]
    run = start(conn, store(conn, nodes, [edge(0, 1), edge(1, 2)]))
    start(conn, store(conn, [node("a", queue="elsewhere"), node("b", queue="elsewhere")], workflow="other"))
    ahead = "select workflow, node, task, queue, runs, first_run from taskq.unserved_nodes order by workflow, node"
    assert [row["queue"] for row in q.rows(conn, ahead)] == ["elsewhere", "elsewhere"]
    assert ill(diagnose(cli)) == {"queues": "warn"}  # elsewhere

    # A deploy: the worker that comes knows c by another name.
    q.one(conn, "select taskq.stop_worker(%s)", old)
    work(conn, queues=["q"], tasks=["a", "b", "d"], level=LEVEL)
    found = diagnose(cli)
    assert ill(found) == {"queues": "warn", "ahead": "warn"}
    assert "1 run of flow will get to last, and no worker of q knows its task c" in found["ahead"]["found"]
    assert str(run) in found["ahead"]["cure"]
    assert q.rows(conn, ahead)[0] == {
        "workflow": "flow", "node": "last", "task": "c", "queue": "q", "runs": 1, "first_run": run
    }  # fmt: skip
    q.one(conn, "select taskq.cancel_run(%s)", run)
    assert diagnose(cli)["ahead"]["verdict"] == "ok"


def test_jobs_whose_effect_class_a_deploy_has_changed(cli: Cli, conn: Conn) -> None:
    worker = work(conn, queues=["q"], tasks=["t"])
    q.enqueue(conn, run_in=3600)
    publish = "select taskq.publish_task(%s, 't', 'q', 5::smallint, 1, %s, 'p')"
    conn.execute(publish, (worker, "idempotent"))
    assert ill(diagnose(cli)) == {}
    conn.execute(publish, (worker, "side_effecting"))
    found = diagnose(cli)
    assert ill(found) == {"classes": "warn"}
    assert (
        "1 waiting jobs of the task t are idempotent, and its code declares side_effecting" in found["classes"]["found"]
    )


def test_outcomes_that_wait_and_jobs_that_kill(cli: Cli, conn: Conn) -> None:
    worker, job = q.unknown(conn)
    conn.execute("delete from taskq.workers where id = %s", (worker,))
    found = diagnose(cli)
    assert (ill(found), "1 unknown are new" in found["unknown"]["found"]) == ({}, True)
    conn.execute("update taskq.unknowns set since = taskq.now() - interval '11 min'")
    found = diagnose(cli)
    assert ill(found) == {"unknown": "warn"}
    assert f"taskq jobs resolve {job} --happened" in found["unknown"]["cure"]
    q.resolve(conn, job, True)
    killer = q.enqueue(conn, task="killer", run_in=3600)
    conn.execute("update taskq.jobs set recoveries = 2 where id = %s", (killer,))
    found = diagnose(cli)
    assert ill(found) == {"suspects": "warn"}
    assert "of killer" in found["suspects"]["found"]


def test_a_check_that_cannot_be_made_is_said_to_be_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(patient: checks.Patient) -> checks.Finding:
        return checks.ok(str(patient.database.rows("sequences", "no number")))

    monkeypatch.setitem(of_schema.CHECKS, "sequences", broken)
    found = diagnose(cli)
    assert ill(found) == {"sequences": "warn"}
    assert "could not be checked" in found["sequences"]["found"]

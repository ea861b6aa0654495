"""Many runners at once: one applies, the others agree; a killed or frozen one is replaced and can write no more."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from helpers import eventually
from migrate_kit import GATED, SIMPLE, backends_at, closed_gate, dump, finish, make_folder, names, spawn
from servers import Server

from taskq import migrate
from taskq.errors import MigrationLocked

INDEXED = SIMPLE | {
    "01.00.00_04_pre_index.sql": "-- taskq: no-transaction\n"
    "create index concurrently if not exists a_x on {{schema}}.a (id);\n-- taskq: next\n"
    "create index concurrently if not exists b_x on {{schema}}.b (id);\n",
}
COLLISIONS = re.compile(r"already exists|duplicate key|deadlock|Traceback|error", re.IGNORECASE)


@pytest.mark.parametrize(("count", "schemas"), [(10, 2), (20, 1)])
def test_many_runners_on_an_empty_database(
    pg_server: Server, empty_dsn: str, tmp_path: Path, count: int, schemas: int
) -> None:
    folder = make_folder(tmp_path, INDEXED)
    migrate.up(empty_dsn, "alone", folder=folder)
    expected = dump(pg_server, empty_dsn, "alone")
    log_before = pg_server.log.stat().st_size
    for number in range(schemas):
        schema = f"round_{number}"
        ended = [finish(p) for p in [spawn(empty_dsn, folder, schema=schema) for _ in range(count)]]
        for code, output in ended:
            assert code == 0, output
            assert not COLLISIONS.search(output), output
        results = [json.loads(output[output.index("{") : output.rindex("}") + 1]) for _, output in ended]
        assert sum(r["applied"] == list(INDEXED) for r in results) == 1, results
        assert all(sorted(r["applied"] + r["already"]) == list(INDEXED) for r in results)
        assert names(empty_dsn, schema) == list(INDEXED)
        assert dump(pg_server, empty_dsn, schema).replace(schema, "alone") == expected
    log = pg_server.log.read_bytes()[log_before:].decode(errors="replace")
    assert not re.search(r"already exists|duplicate key|deadlock|invalid index", log), log


def test_a_killed_runner_is_replaced_and_its_session_ended(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, GATED)
    with closed_gate(empty_dsn) as gate, psycopg.connect(empty_dsn, autocommit=True) as conn:
        first = spawn(empty_dsn, folder, lock_timeout=600, lease=2)
        [(orphan, _)] = eventually(lambda: backends_at(conn, "public.gate"), 30)
        first.kill()
        finish(first)
        # PostgreSQL does not notice that a waiting session's client has died.
        assert [pid for pid, _ in backends_at(conn, "public.gate")] == [orphan]
        assert names(empty_dsn) == list(GATED)[:1]
        second = spawn(empty_dsn, folder, lock_timeout=600, lease=2)
        eventually(lambda: {pid for pid, _ in backends_at(conn, "public.gate")} - {orphan}, 30)
        assert conn.execute("select count(*) from pg_stat_activity where pid = %s", (orphan,)).fetchone() == (0,)
        gate.rollback()
        code, output = finish(second)
    assert code == 0, output
    assert "taking over" in output
    assert names(empty_dsn) == list(GATED)
    with psycopg.connect(empty_dsn) as conn:
        assert conn.execute("select installing from taskq.migration_lease").fetchone() == (False,)


def test_a_frozen_runner_wakes_up_and_agrees(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, GATED)
    with closed_gate(empty_dsn) as gate, psycopg.connect(empty_dsn, autocommit=True) as conn:
        frozen = spawn(empty_dsn, folder, lock_timeout=600, lease=2)
        [(orphan, _)] = eventually(lambda: backends_at(conn, "public.gate"), 30)
        os.kill(frozen.pid, signal.SIGSTOP)
        second = spawn(empty_dsn, folder, lock_timeout=600, lease=2)
        eventually(lambda: {pid for pid, _ in backends_at(conn, "public.gate")} - {orphan}, 30)
        gate.rollback()
        assert finish(second)[0] == 0
        os.kill(frozen.pid, signal.SIGCONT)
        code, output = finish(frozen)
    assert code == 0, output
    assert names(empty_dsn) == list(GATED)


def _in_thread(function: Callable[[], Any]) -> Any:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    return future


STEAL = (
    "update taskq.migration_lease set token = gen_random_uuid(), holder = 'thief', "
    "expires_at = clock_timestamp() + interval '1 hour'"
)
GIVE_BACK = "update taskq.migration_lease set token = null, holder = null, expires_at = null"


def test_a_runner_that_lost_its_lease_writes_nothing(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, GATED)
    said: list[str] = []
    with closed_gate(empty_dsn) as gate, psycopg.connect(empty_dsn, autocommit=True) as conn:
        # The lease is so long that the renewal does not find out: only the fence is left.
        running = _in_thread(
            lambda: migrate.up(empty_dsn, folder=folder, lock_timeout=600, lease=600, progress=said.append)
        )
        eventually(lambda: backends_at(conn, "public.gate"), 30)
        conn.execute(STEAL)
        gate.rollback()
        eventually(lambda: "waiting for another runner (thief)" in said, 30)
        assert names(empty_dsn) == list(GATED)[:1]
        assert conn.execute("select to_regclass('taskq.b')").fetchone() == (None,)
        conn.execute(GIVE_BACK)
        assert running.result(30).applied == tuple(GATED)


def test_a_renewal_that_fails_stops_the_statement(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, GATED)
    said: list[str] = []
    with closed_gate(empty_dsn), psycopg.connect(empty_dsn, autocommit=True) as conn:
        running = _in_thread(
            lambda: migrate.up(empty_dsn, folder=folder, lock_timeout=600, lease=3, wait=1, progress=said.append)
        )
        eventually(lambda: backends_at(conn, "public.gate"), 30)
        conn.execute(STEAL)
        # The gate stays shut: only the sentry can end the wait.
        eventually(lambda: backends_at(conn, "public.gate") == [], 30)
        with pytest.raises(MigrationLocked, match=r"thief|lost its lease"):
            running.result(30)
    assert names(empty_dsn) == list(GATED)[:1]


def test_a_long_statement_keeps_its_lease(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, GATED)
    with closed_gate(empty_dsn) as gate, psycopg.connect(empty_dsn, autocommit=True) as conn:
        running = _in_thread(lambda: migrate.up(empty_dsn, folder=folder, lock_timeout=600, lease=1.5))
        eventually(lambda: backends_at(conn, "public.gate"), 30)
        query = "select token, taken_at, expires_at from taskq.migration_lease"
        token, taken_at, expires = conn.execute(query).fetchone() or (None, None, None)
        eventually(
            lambda: conn.execute("select clock_timestamp() > %s + interval '3 s'", (expires,)).fetchone() == (True,), 30
        )
        with pytest.raises(MigrationLocked, match=f"process {os.getpid()}.*still at work"):
            migrate.up(empty_dsn, folder=folder, wait=0.5)
        assert (conn.execute(query).fetchone() or ())[:2] == (token, taken_at)
        gate.rollback()
        assert running.result(30).applied == tuple(GATED)


def test_a_lost_connection_is_replaced(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, GATED)
    with closed_gate(empty_dsn) as gate, psycopg.connect(empty_dsn, autocommit=True) as conn:
        running = _in_thread(lambda: migrate.up(empty_dsn, folder=folder, lock_timeout=600))
        [(pid, name)] = eventually(lambda: backends_at(conn, "public.gate"), 30)
        conn.execute("select pg_terminate_backend(%s)", (pid,))
        again = eventually(lambda: [w for w in backends_at(conn, "public.gate") if w[0] != pid], 30)
        assert again[0][1] != name
        gate.rollback()
        assert running.result(30).applied == tuple(GATED)


def test_threads_of_one_process_agree_as_well(empty_dsn: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, INDEXED)
    start = threading.Barrier(8)

    def run(_: int) -> migrate.Applied:
        start.wait(30)
        return migrate.up(empty_dsn, folder=folder)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(8)))
    assert sorted(len(r.applied) for r in results) == [0] * 7 + [len(INDEXED)]

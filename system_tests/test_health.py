"""The health endpoint of real worker processes that were stopped, or lost their row."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from typing import Any
from uuid import UUID

import psycopg
from conftest import StartWorker, WorkerProcess
from helpers import eventually

LEASE = 2
HEARTBEAT = LEASE / 3
SLACK = 1.0
"""Seconds for a busy machine."""


def port_of(worker: WorkerProcess) -> int:
    found = re.search(r"health\.listening host=\S+ port=(\d+)", worker.log)
    assert found is not None, worker.log
    return int(found[1])


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as conn:
        conn.sendall(f"GET {path} HTTP/1.1\r\n\r\n".encode())
        got = b""
        while part := conn.recv(65536):
            got += part
    head, _, body = got.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def registration(conn: psycopg.Connection[Any], name: str) -> tuple[UUID, str]:
    """The latest registration under a name, with its status."""
    row = conn.execute(
        "select id, status from taskq.workers where name = %s order by started_at desc limit 1", (name,)
    ).fetchone()
    assert row is not None
    return row[0], row[1]


def until_ready_anew(port: int, lost: UUID, within: float) -> None:
    """Ask without a pause until it is ready under another registration; it never is under the one that was lost."""
    deadline = time.monotonic() + within
    while True:
        status, told = ask(port, "/ready")
        assert status == 503 or UUID(told["worker_id"]) != lost, "ready without its registration"
        if status == 200:
            return
        assert time.monotonic() < deadline, f"not ready after {within} s: {told}"


def test_a_process_that_was_stopped_is_never_ready_without_its_registration(
    start_worker: StartWorker, dsn: str
) -> None:
    stopped = start_worker("stopped", lease=LEASE, health_port=0)
    start_worker("other", lease=LEASE)
    port = port_of(stopped)
    with psycopg.connect(dsn, autocommit=True) as conn:
        eventually(lambda: ask(port, "/ready")[0] == 200)
        first, _ = registration(conn, "stopped")
        stopped.signal(signal.SIGSTOP)
        since = time.monotonic()
        eventually(lambda: registration(conn, "stopped")[1] == "lost", 20)
        eventually(lambda: time.monotonic() - since > 3 * LEASE, 20)
        stopped.signal(signal.SIGCONT)
        until_ready_anew(port, first, 2 * HEARTBEAT + SLACK)
        second, status = registration(conn, "stopped")
        assert (second != first, status) == (True, "live")
        assert ask(port, "/live")[0] == 200
    assert stopped.stop() == 0


def test_a_process_whose_row_is_deleted_is_never_ready_without_it(start_worker: StartWorker, dsn: str) -> None:
    worker = start_worker("robbed", lease=LEASE, health_port=0)
    port = port_of(worker)
    with psycopg.connect(dsn, autocommit=True) as conn:
        eventually(lambda: ask(port, "/ready")[0] == 200)
        first, _ = registration(conn, "robbed")
        # What the endpoint found out just before stands for half a second.
        time.sleep(0.6)
        conn.execute("delete from taskq.workers where id = %s", (first,))
        until_ready_anew(port, first, 2 * HEARTBEAT + SLACK)
        second, status = registration(conn, "robbed")
        assert (second != first, status) == (True, "live")
    assert worker.stop() == 0


def test_a_port_that_is_taken_ends_the_start_with_code_2(start_worker: StartWorker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        worker = start_worker("late", ready=False, health_port=port)
        assert worker.exit_code() == 2
    assert f"cannot listen at 127.0.0.1 port {port}" in worker.log

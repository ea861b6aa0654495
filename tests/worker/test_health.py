"""The health endpoint: what it says of a worker that is well, starting, blocked, stopping or without its row."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually, eventually
from proxy import proxy
from worker_kit import Events, Gates, RunWorker

from taskq import TaskQ
from taskq.errors import ConfigurationError
from taskq.worker import Worker, WorkerOptions
from taskq.worker import health as endpoint
from taskq.worker.health import HealthServer, Vitals

pytestmark = pytest.mark.anyio

Answer = tuple[int, dict[str, Any]]


def exchange(port: int, sent: bytes, within: float = 5.0) -> bytes:
    """Send bytes, and read until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=within) as conn:
        conn.sendall(sent)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while part := conn.recv(65536):
                got += part
        return got


def ask(port: int, path: str, method: str = "GET") -> Answer:
    head, _, body = exchange(port, f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()).partition(b"\r\n\r\n")
    assert b"Connection: close" in head
    return int(head.split()[1]), json.loads(body) if body else {}


def wrong(answer: Answer) -> set[str]:
    """The checks that say that something is wrong."""
    status, told = answer
    found = {name for name, what in told["checks"].items() if what != "ok"}
    assert (status == 503) == bool(found) == (told["status"] == "failing"), answer
    return found


async def ask_soon(port: int, path: str) -> Answer:
    return await asyncio.to_thread(ask, port, path)


@pytest.fixture
def port_of(events: Events) -> Callable[[], int]:
    return lambda: int(events.of("health.listening")[-1]["port"])


@pytest.fixture
def server() -> Iterator[HealthServer]:
    """An endpoint without a worker."""
    made = HealthServer("127.0.0.1", 0)
    made.start()
    yield made
    made.close()
    made.join(5)
    assert not made.is_alive()


# Requests -------------------------------------------------------------------------------------------------------------


def test_a_worker_that_starts_lives_and_is_not_ready(server: HealthServer) -> None:
    assert wrong(ask(server.port, "/live")) == set()
    assert wrong(ask(server.port, "/ready?verbose")) == {"start"}


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"HEAD /live HTTP/1.1\r\n\r\n", 200),
        (b"HEAD /ready HTTP/1.0\r\n\r\n", 503),
        (b"HEAD /other HTTP/1.1\r\n\r\n", 404),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /live/x HTTP/1.1\r\n\r\n", 404),
        (b"POST /live HTTP/1.1\r\n\r\n", 405),
        (b"GET /live HTTP/2\r\n\r\n", 400),
        (b"GET /live\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
        ("GET /liv\u00e9 HTTP/1.1\r\n\r\n".encode(), 400),
        (b"GET /live HTTP/1.1\r\nX: " + b"x" * 100_000, 400),
    ],
)
def test_every_request_gets_one_answer(server: HealthServer, sent: bytes, status: int) -> None:
    got = exchange(server.port, sent)
    # Where bytes are left unread the system may throw away the answer with the connection.
    if got or len(sent) < 10_000:
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        assert bool(body) == (not sent.startswith(b"HEAD"))
        assert (b"Allow: GET, HEAD" in head) == (status == 405)
    assert ask(server.port, "/live")[0] == 200


def test_slow_clients_are_cut_and_hold_up_nobody(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PATIENCE", 0.3)
    slow = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(20)]
    for conn in slow:
        conn.sendall(b"GET /live HTT")
    assert ask(server.port, "/live")[0] == 200
    for conn in slow:
        assert conn.recv(100) == b""
        conn.close()
    eventually(lambda: server._clients == 0)


def test_more_clients_than_it_serves_are_closed(server: HealthServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_CLIENTS", 3)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=5)) for _ in range(3)]
        eventually(lambda: server._clients == 3)
        assert exchange(server.port, b"") == b""
        held[0].close()
        eventually(lambda: server._clients == 2)
        assert ask(server.port, "/live")[0] == 200


def test_a_port_that_is_taken_is_refused_with_its_name(server: HealthServer) -> None:
    with pytest.raises(ConfigurationError, match=f"127.0.0.1 port {server.port}: .*health_port"):
        HealthServer("127.0.0.1", server.port)


# Workers --------------------------------------------------------------------------------------------------------------


async def test_a_worker_is_ready_while_it_claims_and_not_while_it_stops(
    app: TaskQ, run_worker: RunWorker, gates: Gates, port_of: Callable[[], int]
) -> None:
    @app.task
    async def waits() -> None:
        await gates.wait()

    async with run_worker(health_port=0) as worker:
        port = port_of()
        status, told = await ask_soon(port, "/ready")
        assert (status, told["status"], UUID(told["worker_id"])) == (200, "ok", worker.worker_id)
        assert set(told["checks"]) == {"loop", "lease_thread", "registration", "lease", "database", "claiming"}
        await waits.enqueue()
        await gates.until_reached()
        worker.stop()
        await aeventually(lambda: worker.parts.exchanger.is_blocked("draining"))
        assert wrong(await ask_soon(port, "/ready")) == {"claiming"}
        assert wrong(await ask_soon(port, "/live")) == set()
        asyncio.get_running_loop().call_soon(gates.open)
    await aeventually(lambda: not any(t.name == "taskq-health" for t in threading.enumerate()))


async def test_a_blocked_loop_is_told_while_it_is_blocked(
    app: TaskQ, run_worker: RunWorker, port_of: Callable[[], int]
) -> None:
    blocked, told = threading.Event(), threading.Event()

    @app.task
    async def blocks() -> bool:
        blocked.set()
        return told.wait(15)

    seen: list[set[str]] = []

    def look() -> None:
        assert blocked.wait(15)
        try:
            eventually(lambda: wrong(ask(port, "/live")) == {"loop"})
            seen.append(wrong(ask(port, "/ready")))
        finally:
            told.set()

    # The lease outlasts the tolerance: the worker goes on when the loop does.
    async with run_worker(health_port=0, tolerance=1, lease=15):
        port = port_of()
        looking = asyncio.create_task(asyncio.to_thread(look))
        job = await blocks.enqueue()
        await looking
        assert await job.result(timeout=15) is True
        assert "loop" in seen[0]
        await aeventually(lambda: _is_well(port))


async def _is_well(port: int) -> bool:
    return not wrong(await ask_soon(port, "/ready")) and not wrong(await ask_soon(port, "/live"))


async def test_a_worker_whose_row_is_gone_is_never_ready_until_it_has_another(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, port_of: Callable[[], int]
) -> None:
    @app.task
    async def nothing() -> None: ...

    # Neither a poll nor a renewal is due for long: only the question itself can find out.
    async with run_worker(health_port=0, lease=30, poll_interval=20, listen=False) as worker:
        port = port_of()
        await aeventually(lambda: worker.parts.exchanger._asleep and worker.parts.exchanger._naps > 2)
        assert wrong(await ask_soon(port, "/ready")) == set()
        for change in ("delete from taskq.workers", "update taskq.workers set status = 'lost', ended_at = now()"):
            first = worker.worker_id
            await asyncio.sleep(endpoint.FRESH * 1.5)
            await aconn.execute(change)

            async with asyncio.timeout(15):
                while True:
                    status, told = await ask_soon(port, "/ready")
                    assert status == 503 or UUID(told["worker_id"]) != first, "ready without its registration"
                    if status == 200:
                        break
            assert worker.worker_id != first


async def test_a_worker_without_a_database_is_not_ready_and_lives(
    app: TaskQ, run_worker: RunWorker, dsn: str, port_of: Callable[[], int]
) -> None:
    @app.task
    async def nothing() -> None: ...

    with proxy(dsn) as way:
        async with run_worker(to=way.dsn, health_port=0, lease=3):
            port = port_of()
            assert await _is_well(port)
            way.cut()

            async def unready() -> bool:
                return {"lease", "database"} <= wrong(await ask_soon(port, "/ready"))

            await aeventually(unready, 20)
            answer = await asyncio.to_thread(exchange, port, b"GET /ready HTTP/1.1\r\n\r\n")
            assert b"postgres" not in answer
            assert way.dsn.encode() not in answer
            assert wrong(await ask_soon(port, "/live")) == set()
            way.restore()
            await aeventually(lambda: _is_well(port), 20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_or_a_stuck_lease_thread_is_told(
    app: TaskQ, run_worker: RunWorker, port_of: Callable[[], int]
) -> None:
    @app.task
    async def nothing() -> None: ...

    def ends(_: float) -> bool:
        raise SystemExit

    async with run_worker(health_port=0, lease=60) as worker:
        port, keeper = port_of(), worker.parts.keeper
        vitals = Vitals(
            progress=worker.parts.progress, keeper=keeper, exchanger=worker.parts.exchanger, lease=0.5, tolerance=1.5
        )
        # Stuck in what it does with an answer, until the test lets it go.
        stuck, renewed = threading.Event(), keeper._on_renewed
        keeper._on_renewed = lambda _: stuck.wait(15) and None
        keeper.renew_soon()
        await aeventually(lambda: "has done nothing" in vitals.live()["lease_thread"])
        keeper._on_renewed = renewed
        stuck.set()
        await aeventually(lambda: vitals.live()["lease_thread"] == "ok")
        # Dead of what nobody foresaw.
        keeper._may_renew = ends  # type: ignore[method-assign]
        keeper.renew_soon()
        await aeventually(lambda: not keeper.is_alive())
        assert wrong(await ask_soon(port, "/live")) == {"lease_thread"}
        assert keeper._conn is not None
        keeper._conn.close()


async def test_a_worker_does_not_start_where_the_port_is_taken(app: TaskQ, dsn: str, server: HealthServer) -> None:
    @app.task
    async def nothing() -> None: ...

    worker = Worker(app.tasks, dsn, options=WorkerOptions(health_port=server.port))
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match="cannot listen"):
        await worker.run()
    assert time.monotonic() - started < 5

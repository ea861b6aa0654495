"""Whether a worker is well, told over HTTP: ``/live`` and ``/ready``, for supervisors and load balancers.

It answers from a thread of its own with an event loop of its own, so that a worker whose loop is blocked says so. What
it reads there are times and flags; it touches nothing. Only ``/ready`` has the lease thread renew when the last renewal
is older than a moment, so that a worker whose registration is gone never passes for ready.

The answers name no database, no job and no error text, and a client gets few bytes and few seconds.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from contextlib import suppress
from typing import Final
from uuid import UUID

from taskq import errors
from taskq.telemetry import get_logger
from taskq.version import __version__
from taskq.worker.exchange import Exchanger
from taskq.worker.lease import LeaseKeeper, Progress, boot_clock

log = get_logger("worker")

MOST_CLIENTS = 100
"""Connections at once; further ones are closed without an answer."""
MOST_BYTES = 8192
"""A request line and its headers are at most so long."""
PATIENCE = 3.0
"""Seconds that a client gets for its request, and for taking the answer."""
FRESH = 0.5
"""Seconds for which the answer to a renewal stands for the registration."""
ASKING = 1.0
"""Seconds that ``/ready`` waits for a renewal."""

Checks = dict[str, str]
"""By what was looked at: ``ok``, or what is wrong with it."""

_REASONS: Final = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed"}


class Vitals:
    """What is looked at; read from the server's thread.

    Args:
        progress: What the loop and the exchange's connection have done lately.
        keeper: The lease thread.
        exchanger: The main loop.
        lease: Seconds that a renewal lasts.
        tolerance: Seconds for which a blocked loop is tolerated.
    """

    def __init__(
        self, *, progress: Progress, keeper: LeaseKeeper, exchanger: Exchanger, lease: float, tolerance: float
    ) -> None:
        self._progress = progress
        self._keeper = keeper
        self._exchanger = exchanger
        self._lease = lease
        self._tolerance = tolerance
        self._asked_at = -math.inf

    @property
    def worker_id(self) -> UUID | None:
        """The current registration."""
        return self._exchanger.worker_id

    def live(self) -> Checks:
        """Whether the process works: a new start would help where it does not."""
        now = boot_clock()
        checks = {"loop": "ok", "lease_thread": "ok"}
        blocked = now - self._progress.loop_at
        if blocked > self._tolerance:
            checks["loop"] = f"the event loop has been blocked for {blocked:.0f} s; {self._tolerance:g} s are tolerated"
        patience = max(self._lease, self._tolerance)
        if self._keeper.ident is not None and not self._keeper.is_alive() and not self._keeper.halted:
            checks["lease_thread"] = "the thread that renews the lease has ended"
        elif self._keeper.is_alive() and now - self._keeper.turned_at > patience:
            checks["lease_thread"] = f"the thread that renews the lease has done nothing for {patience:g} s"
        return checks

    async def ready(self) -> Checks:
        """Whether it claims jobs and may: everything of ``live`` besides."""
        await self._renewed_lately()
        now = boot_clock()
        blocked = self._exchanger.is_blocked
        checks = {**self.live(), "registration": "ok", "lease": "ok", "database": "ok", "claiming": "ok"}
        if not self._keeper.holds or blocked("registering"):
            checks["registration"] = "the worker is not registered"
        if self._keeper.remaining <= 0 or blocked("lease"):
            checks["lease"] = "the lease could not be renewed in time"
        lately = max(5.0, self._lease)
        if now - self._keeper.answered_at > lately or now - self._progress.pool_at > lately:
            checks["database"] = f"the database has not answered for {lately:g} s"
        if blocked("draining"):
            checks["claiming"] = "the worker is stopping"
        elif blocked("stuck"):
            checks["claiming"] = "a function in a thread outlived its timeout; the worker is stopping"
        elif not self._exchanger.claiming:
            checks["claiming"] = "nothing is claimed for the time being"
        return checks

    async def _renewed_lately(self) -> None:
        """See to it that the last answer about the registration is no older than a moment, if it can be had."""
        keeper, since = self._keeper, boot_clock()
        while keeper.holds and keeper.answered_at < since - FRESH and boot_clock() - since < ASKING:
            # However many ask, the database is asked at most twice a second.
            if boot_clock() - self._asked_at > FRESH:
                self._asked_at = boot_clock()
                keeper.renew_soon()
            await asyncio.sleep(0.01)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes a free one.

    Raises:
        ConfigurationError: It cannot listen there.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=MOST_CLIENTS)
    except (OSError, OverflowError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise errors.ConfigurationError(
            f"the health endpoint cannot listen at {host} port {port}: {why}; choose another health_port or "
            "health_host, or stop what listens there"
        ) from None


class HealthServer(threading.Thread):
    """Answers ``GET`` and ``HEAD`` of ``/live`` and ``/ready`` with 200 or 503 and a JSON object, until closed.

    Args:
        host: The address to listen at.
        port: The port; 0 takes a free one.

    Raises:
        ConfigurationError: It cannot listen there.
    """

    def __init__(self, host: str, port: int) -> None:
        super().__init__(name="taskq-health", daemon=True)
        self._socket = listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.vitals: Vitals | None = None
        """What to tell; None while the worker starts."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = threading.Event()
        self._clients = 0

    def run(self) -> None:
        """Serve until closed."""
        try:
            asyncio.run(self._serve())
        except Exception as exc:
            # Whoever asks gets no answer any more, and draws the conclusion.
            log.error("health.failed", error=type(exc).__name__)
        finally:
            self._socket.close()

    def close(self) -> None:
        """Stop answering."""
        self._closed.set()
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ending.set)
        if self.ident is None:
            self._socket.close()

    async def _serve(self) -> None:
        self._ending = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._client, sock=self._socket, limit=MOST_BYTES)
        try:
            if not self._closed.is_set():
                await self._ending.wait()
        finally:
            server.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        try:
            if self._clients <= MOST_CLIENTS:
                async with asyncio.timeout(PATIENCE):
                    writer.write(await self._answer(reader))
                    await writer.drain()
        except (OSError, TimeoutError):
            pass
        finally:
            self._clients -= 1
            # What a slow client has not taken by now is thrown away.
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()
            else:
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            method, target, version = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            return _response(400, {"error": "not an HTTP request, or too long a one"})
        path = target.partition("?")[0]
        if not version.startswith("HTTP/1."):
            return _response(400, {"error": "not an HTTP/1 request"})
        if path not in ("/live", "/ready"):
            return _response(404, {"error": "there is /live and /ready"}, body=method != "HEAD")
        if method not in ("GET", "HEAD"):
            return _response(405, {"error": "GET or HEAD"})
        return await self._tell(path, body=method == "GET")

    async def _tell(self, path: str, *, body: bool) -> bytes:
        vitals = self.vitals
        if vitals is None:
            checks = {"start": "ok" if path == "/live" else "the worker is starting"}
        else:
            checks = await vitals.ready() if path == "/ready" else vitals.live()
        # Last: what was found is about the registration of now.
        worker_id = None if vitals is None else vitals.worker_id
        well = all(found == "ok" for found in checks.values())
        told = {"status": "ok" if well else "failing", "checks": checks, "version": __version__}
        return _response(200 if well else 503, told | ({"worker_id": str(worker_id)} if worker_id else {}), body=body)


def _response(status: int, told: object, *, body: bool = True) -> bytes:
    text = json.dumps(told).encode() + b"\n"
    head = [
        f"HTTP/1.1 {status} {_REASONS.get(status, 'Service Unavailable')}",
        "Content-Type: application/json",
        f"Content-Length: {len(text)}",
        "Cache-Control: no-store",
        "Connection: close",
        *(["Allow: GET, HEAD"] if status == 405 else []),
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + (text if body else b"")

"""A way to the database that can be cut, stopped and swallowed: a small TCP proxy in threads.

The server listens on a unix socket; the proxy listens on an address of this machine and hands bytes on, in both
directions.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import parse_qs, urlsplit


class Proxy:
    """One proxy; ``dsn`` goes through it.

    Args:
        dsn: Where it leads.
        host: Where it listens.

    Attributes:
        dsn: Like the DSN that it was made with, but through the proxy.
        connections: How many connections were ever made.
    """

    def __init__(self, dsn: str, host: str = "127.0.0.1") -> None:
        self.lead_to(dsn)
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self.dsn = f"postgresql://taskq@{host}:{self.port}{urlsplit(dsn).path}?sslmode=disable"
        self.connections = 0
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._flow = threading.Event()
        self._flow.set()
        self._refuse = False
        self._swallow: tuple[bytes, bytes] | None = None
        self._swallowed = threading.Event()
        self._then_stall = ""
        self._hold = b""
        self._held = threading.Event()
        self._resume = threading.Event()
        self._stalled: bytes | None = None
        self._closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def lead_to(self, dsn: str) -> None:
        """Where connections lead that are made from now on, as after a fail-over."""
        query = parse_qs(urlsplit(dsn).query)
        self._target = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"

    def stall(self, name: str) -> None:
        """Let nothing more through of connections with this application_name, those that come included."""
        self._resume.clear()
        self._stalled = b"application_name\0" + name.encode() + b"\0"

    def blackhole(self) -> None:
        """Let nothing through in either direction, and close nothing: the worst way to lose a network."""
        self._flow.clear()

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        self._refuse = True
        self._drop_all()

    def restore(self) -> None:
        """Let everything through again."""
        self._refuse = False
        self._hold = b""
        self._stalled = None
        self._resume.set()
        self._flow.set()

    def swallow(self, *, request: str = "", answer: str = "", then_stall: str = "") -> threading.Event:
        """Drop one answer and cut its connection: the server has done, and committed, what was asked.

        Args:
            request: The answer to the next message that has this text.
            answer: Or the next answer that has this text.
            then_stall: The application_name of connections that are stalled from that moment on, before it is seen.

        Returns:
            An event that is set once it has happened.
        """
        self._swallowed = threading.Event()
        self._then_stall = then_stall
        self._swallow = (request.encode(), answer.encode())
        return self._swallowed

    def hold(self, *, answer: str) -> threading.Event:
        """Hold back the next answer that has this text, and what follows on its connection, until ``restore``.

        Returns:
            An event that is set once one is held.
        """
        self._held = threading.Event()
        self._hold = answer.encode()
        return self._held

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.restore()
        self._drop_all()

    def _drop_all(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, set()
        for pair in pairs:
            for one in pair:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self._refuse:
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX)
        try:
            self._flow.wait()
            server.connect(self._target)
        except OSError:
            client.close()
            return
        pair = (client, server)
        with self._lock:
            self._pairs.add(pair)
        known = start = b""
        try:
            while True:
                ready, _, _ = select.select(pair, [], [])
                self._flow.wait()
                for one in ready:
                    data = one.recv(65536)
                    if not data:
                        return
                    start = start or data
                    if self._stalled and self._stalled in start:
                        self._resume.wait()
                    if one is client:
                        known += data
                        server.sendall(data)
                        continue
                    request, answer = self._swallow or (b"", b"")
                    if (request and request in known) or (answer and answer in data):
                        self._swallow = None
                        if self._then_stall:
                            self.stall(self._then_stall)
                        self._swallowed.set()
                        return
                    known = b""
                    if self._hold and self._hold in data:
                        self._hold = b""
                        self._held.set()
                        self._resume.wait()
                    client.sendall(data)
        except OSError:
            pass
        finally:
            with self._lock:
                self._pairs.discard(pair)
            for one in pair:
                one.close()


@contextmanager
def proxy(dsn: str, host: str = "127.0.0.1") -> Iterator[Proxy]:
    """A proxy until the block ends."""
    made = Proxy(dsn, host)
    try:
        yield made
    finally:
        made.close()

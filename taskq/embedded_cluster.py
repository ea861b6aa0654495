"""The cluster in the embedded PostgreSQL's data folder: made, started, looked at and stopped.

Called by ``taskq.embedded`` alone, which holds the folder's lock around every call. Programs are run as the server's
user; nothing here asks who uses the server.
"""

from __future__ import annotations

import os
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from urllib.parse import quote

import psycopg
from psycopg.pq import Ping

from taskq.embedded_binaries import ServerUser
from taskq.errors import EmbeddedPostgresError

DEFAULTS = {"max_connections": "200", "timezone": "UTC", "log_timezone": "UTC", "log_checkpoints": "off"}
START_TIMEOUT = 120
"""Seconds for a server to accept connections: recovery after a crash replays up to ``max_wal_size`` of WAL."""
STOP_TIMEOUT = 60
ORPHANS_TIMEOUT = 20
"""Seconds for the children of a killed server to notice and end; a new one may not start before."""
LOG_LIMIT = 10_000_000
"""Bytes of log after which a start begins a new file."""

SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107
"""Bytes in the path of a unix socket: the size of ``sun_path`` less its NUL."""
INITDB_OPTIONS = (
    *("--auth-local=trust", "--auth-host=reject", "--encoding=UTF8"),
    *("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
)
NAME = "taskq"
"""The name of the database and of its superuser."""


@dataclass(frozen=True)
class Cluster:
    """One cluster of the embedded PostgreSQL.

    Attributes:
        folder: The data folder, which exists.
        bin_dir: The folder of PostgreSQL's programs.
        user: Whom they run as.
    """

    folder: Path
    bin_dir: Path
    user: ServerUser

    @property
    def pgdata(self) -> Path:
        """The cluster itself."""
        return self.folder / "pgdata"

    @property
    def log(self) -> Path:
        """What the server has to say."""
        return self.folder / "server.log"

    @property
    def socket_dir(self) -> Path:
        """The folder of the server's socket."""
        with suppress(OSError, ValueError):
            recorded = Path((self.folder / "socket_dir").read_text())
            found = recorded.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == self.user.uid and not found.st_mode & 0o077:
                return recorded
        return self.folder / "run"

    @property
    def dsn(self) -> str:
        """The URL of the database, whether or not the server runs."""
        return f"postgresql://{NAME}@/{NAME}?host={quote(str(self.socket_dir))}&port=5432"

    def is_running(self) -> bool:
        """Whether the server accepts connections; waits for one that is starting or stopping.

        Raises:
            EmbeddedPostgresError: A server runs there but never answers.
        """
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            state = psycopg.pq.PGconn.ping(f"{self.dsn}&connect_timeout=5".encode())
            if state == Ping.OK:
                return True
            process = self.postmaster()
            if state != Ping.REJECT and process is None:
                return False
            if time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"A PostgreSQL (process {process}) runs in {self.pgdata}, but it does not answer on its socket in "
                    f"{self.socket_dir}. End it with 'kill -INT {process}' and try again; its log is {self.log}."
                )
            time.sleep(0.02)

    def postmaster(self) -> int | None:
        """The process id of the server that runs in the cluster, if one does; never that of an unrelated process."""
        try:
            process = int((self.pgdata / "postmaster.pid").read_text().split()[0])
        except (FileNotFoundError, ValueError, IndexError):
            return None
        if not Path("/proc/self/cwd").is_symlink():
            return process if self._pg_ctl("status").returncode == 0 else None
        # As the server's user, who may look at its own processes even where root lacks that capability.
        cwd = self.user.run(["readlink", f"/proc/{process}/cwd"])
        return process if cwd.returncode == 0 and cwd.stdout.rstrip("\n") == str(self.pgdata) else None

    def start(self, settings: Mapping[str, str]) -> None:
        """Make the cluster if it is missing, and start its server; return once it accepts connections.

        Args:
            settings: Server settings on top of the defaults.

        Raises:
            EmbeddedPostgresError: It did not start; the message ends with the server's words.
            OSError: A file or program could not be used.
        """
        if not self.pgdata.exists():
            self._make()
        self._refuse_other_version()
        if self.postmaster() is None:
            # Left by a crash or a reboot. The process id in them may by now be that of an innocent process of the same
            # user, for which PostgreSQL would refuse to start; whether the killed server's children still use the
            # cluster it also checks by its shared memory.
            for leftover in (self.pgdata / "postmaster.pid", *self.socket_dir.glob(".s.PGSQL.*")):
                leftover.unlink(missing_ok=True)
        options = DEFAULTS | dict(settings) | self._private_socket()
        arguments = " ".join(shlex.quote(f"-c{name}={value}") for name, value in options.items())
        if self.log.exists() and self.log.stat().st_size > LOG_LIMIT:
            self.log.replace(self.log.with_suffix(".log.1"))
        deadline = time.monotonic() + ORPHANS_TIMEOUT
        while said := self._launch(arguments):
            if "pre-existing shared memory block" not in said or time.monotonic() > deadline:
                raise EmbeddedPostgresError(
                    f"The embedded PostgreSQL did not start in {self.pgdata}. It said:\n{said[-2000:].strip()}\n"
                    f"Its log is {self.log}."
                )
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop the server if it runs: sessions are ended, a checkpoint is written.

        Raises:
            EmbeddedPostgresError: It did not stop in time.
        """
        if (process := self.postmaster()) is not None:
            ended = self._pg_ctl("stop", "-m", "fast", "-w", "-t", str(STOP_TIMEOUT))
            if ended.returncode != 0 and self.postmaster() is not None:
                raise EmbeddedPostgresError(
                    f"The embedded PostgreSQL (process {process}) in {self.pgdata} did not stop: "
                    f"{ended.stdout.strip()} It goes on running; its log is {self.log}."
                )
        if (short := self.socket_dir) != self.folder / "run":
            (self.folder / "socket_dir").unlink(missing_ok=True)
            with suppress(OSError):
                short.rmdir()

    def ready_dsn(self) -> str:
        """Make sure that the running server lets us into the database, which the first start makes; give its URL.

        Raises:
            EmbeddedPostgresError: It does not.
        """
        try:
            psycopg.connect(self.dsn, connect_timeout=30).close()
        except psycopg.OperationalError as error:
            if f'database "{NAME}" does not exist' not in str(error):
                raise EmbeddedPostgresError(f"The embedded PostgreSQL refuses connections: {error}") from error
            createdb = self.bin_dir / "createdb"
            made = self.user.run([createdb, "-h", self.socket_dir, "-p", "5432", "-U", NAME, NAME])
            if made.returncode != 0:
                raise EmbeddedPostgresError(f"The database '{NAME}' could not be made: {made.stdout}") from error
        return self.dsn

    def _make(self) -> None:
        """Make the cluster beside its place and move it there when it is whole."""
        fresh = self.folder / "pgdata.new"
        if fresh.exists():
            shutil.rmtree(fresh)
        self._own_folder(fresh)
        made = self.user.run([self.bin_dir / "initdb", "-D", fresh, "-U", NAME, *INITDB_OPTIONS])
        if made.returncode != 0:
            shutil.rmtree(fresh)
            raise EmbeddedPostgresError(
                f"No PostgreSQL cluster could be made in {self.folder}. initdb said:\n{made.stdout}"
            )
        fresh.rename(self.pgdata)

    def _refuse_other_version(self) -> None:
        try:
            found = (self.pgdata / "PG_VERSION").read_text().strip()
        except FileNotFoundError as error:
            raise EmbeddedPostgresError(
                f"{self.pgdata} is no PostgreSQL data folder. Choose another one (pass data_dir, or set TASKQ_HOME), "
                "or remove it if nothing in it is needed."
            ) from error
        ours = self.user.run([self.bin_dir / "postgres", "-V"]).stdout.split()[-1]
        if found != ours.split(".")[0]:
            raise EmbeddedPostgresError(
                f"{self.pgdata} was made by PostgreSQL {found}, and the installed one is {ours}, which cannot read it. "
                "Choose another folder (pass data_dir, or set TASKQ_HOME), install the wheel of that version, or dump "
                f"the data with PostgreSQL {found} and restore it."
            )

    def _private_socket(self) -> dict[str, str]:
        folder = self.socket_dir
        if not _fits(folder):
            folder = self._short_socket_dir()
        elif not folder.exists():
            self._own_folder(folder)
        return {
            "listen_addresses": "",
            "port": "5432",
            "unix_socket_permissions": "0700",
            "unix_socket_directories": '"' + str(folder).replace('"', '""') + '"',
        }

    def _short_socket_dir(self) -> Path:
        for parent in dict.fromkeys((tempfile.gettempdir(), "/tmp")):  # noqa: S108 - mkdtemp makes it private
            with suppress(OSError):
                folder = Path(tempfile.mkdtemp(prefix="taskq-", dir=parent))
                if _fits(folder) and (not self.user.switch or self.user.can_enter(folder.parent)):
                    if self.user.switch:
                        os.chown(folder, self.user.uid, self.user.gid)
                    (self.folder / "socket_dir").write_text(str(folder))
                    return folder
                folder.rmdir()
        raise EmbeddedPostgresError(
            f"The path of a unix socket may have {SOCKET_PATH_LIMIT} bytes and no comma, which {self.folder} cannot "
            "give, and no temporary folder could be used in its place. Choose another data folder, or set TMPDIR."
        )

    def _own_folder(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        if self.user.switch:
            os.chown(folder, self.user.uid, self.user.gid)

    def _launch(self, arguments: str) -> str:
        """Start the server in a session of its own; give what it said if it failed, else nothing."""
        handle = os.open(self.log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "rb") as log:
            before = os.fstat(handle).st_size
            done = self._pg_ctl("start", "-w", "-t", str(START_TIMEOUT), "-o", arguments, output=handle)
            if done.returncode == 0:
                return ""
            log.seek(before)
            return log.read().decode(errors="replace") or f"(nothing; pg_ctl ended with {done.returncode})"

    def _pg_ctl(self, *arguments: str, output: int | None = None) -> CompletedProcess[str]:
        # The cluster goes by environment: pg_ctl would put a -D into a shell's command without escaping it.
        pg_ctl = self.bin_dir / "pg_ctl"
        return self.user.run([pg_ctl, *arguments], environment={"PGDATA": str(self.pgdata)}, output=output)


def _fits(socket_dir: Path) -> bool:
    """Whether clients can name a socket there: libpq takes a comma as the end of a host."""
    return "," not in str(socket_dir) and len(os.fsencode(socket_dir / ".s.PGSQL.5432")) <= SOCKET_PATH_LIMIT

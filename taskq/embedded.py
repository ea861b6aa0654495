"""A PostgreSQL for development, from a pip wheel, started on demand and shared by the processes that use it.

``EmbeddedPostgres.start()`` makes a cluster in a data folder of its own on first use, starts its server on a private
unix socket (never on the network), or joins the server that another process has started there. Each user of the
server holds a locked file in the folder; the system frees that lock however the process ends, so that a user killed
with SIGKILL is noticed by the next one that starts or leaves. The last user that leaves stops the server. Data stays.

What lies in a data folder::

    lock          held while a server is started or stopped, and while users come and go
    users/        one locked file for each user of the server
    pgdata/       the cluster (``pgdata.new/`` while it is being made)
    run/          the socket, unless that path cannot be one: then ``socket_dir`` names a private temporary folder
    settings.json the settings that the running server was started with
    server.log    what the server has to say

For root the server runs as an unprivileged user, because PostgreSQL refuses root. Only folders made here get a mode;
existing ones are never changed. Durability is on, as on any server: what was committed survives a crash.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import SubprocessError
from types import TracebackType
from typing import Self

from taskq.embedded_binaries import ServerUser, find_binaries, make_folder, refuse_foreign_folder
from taskq.embedded_cluster import Cluster
from taskq.errors import EmbeddedPostgresError
from taskq.telemetry import get_logger

__all__ = ["EmbeddedPostgres", "default_data_dir", "find_binaries"]

LOCK_TIMEOUT = 300.0
"""Seconds to wait for another process that starts or stops the server; more than either may take."""

_OURS = {"listen_addresses", "unix_socket_directories", "unix_socket_permissions", "port", "data_directory"}
_log = get_logger("embedded")


def default_data_dir() -> Path:
    """Where the embedded PostgreSQL keeps its data when no folder is named.

    ``$TASKQ_HOME/postgres`` if that variable is set; else ``/var/lib/taskq/postgres`` for root, and for others
    ``$XDG_DATA_HOME/taskq/postgres``, by default ``~/.local/share/taskq/postgres``.

    Raises:
        EmbeddedPostgresError: The caller has no home folder.
    """
    if home := os.environ.get("TASKQ_HOME"):
        return Path(home).expanduser() / "postgres"
    if os.geteuid() == 0:
        return Path("/var/lib/taskq/postgres")
    shared = Path(os.environ.get("XDG_DATA_HOME") or "")
    try:
        return (shared if shared.is_absolute() else Path.home() / ".local" / "share") / "taskq" / "postgres"
    except RuntimeError as error:
        raise EmbeddedPostgresError(
            "This user has no home folder to keep the embedded PostgreSQL's data in. Set TASKQ_HOME to a folder."
        ) from error


class EmbeddedPostgres:
    """One use of the embedded PostgreSQL; get it with ``start`` and leave with ``stop`` or as a context manager.

    A process that ends normally leaves by itself. Processes forked from a user count as users for as long as they live.

    Attributes:
        dsn: The URL of its database ``taskq``, for psycopg and asyncpg alike, as a superuser.
        data_dir: The absolute path of the data folder.
        settings: The settings given by whoever started the server, on top of taskq's own.
        started: Whether this call started the server, rather than joining a running one.
    """

    dsn: str
    data_dir: Path
    settings: Mapping[str, str]
    started: bool

    def __init__(self, data_dir: Path, cluster: Cluster) -> None:
        """Not for callers: use ``start``."""
        self.data_dir = data_dir
        self.settings = {}
        self.started = False
        self._cluster = cluster
        self._process = os.getpid()
        self._membership: tuple[int, Path] | None = None

    @classmethod
    def start(cls, data_dir: Path | None = None, *, settings: Mapping[str, str] | None = None) -> Self:
        """Start the server, or join the one that runs already; return once it accepts connections.

        The first start in a folder takes about a second, later ones about a tenth, joining some milliseconds.
        Blocks; call it in a thread from async code.

        Args:
            data_dir: The data folder, made when missing; by default ``default_data_dir()``.
            settings: Server settings such as ``{"shared_buffers": "512MB"}``, used if this call starts the server. A
                server that runs already keeps its own; then a warning says so and ``settings`` has those in force.

        Raises:
            EmbeddedPostgresError: The wheel is missing, or the server cannot be started there; the message says why
                and what to do.
        """
        asked = _checked(settings or {})
        bin_dir = find_binaries()
        folder = (data_dir or default_data_dir()).expanduser().resolve()
        user = ServerUser.current()
        try:
            _prepare(folder, user)
            self = cls(folder, Cluster(folder, bin_dir, user))
            with _locked(folder):
                self._join(asked)
        except (OSError, SubprocessError) as error:
            raise EmbeddedPostgresError(
                f"The embedded PostgreSQL could not be started in {folder}: {error}. If taskq cannot write there, "
                "choose another folder: pass data_dir, or set TASKQ_HOME."
            ) from error
        atexit.register(self._stop_at_exit)
        return self

    def stop(self) -> None:
        """Leave the server, and stop it if no other living process uses it; calling it again does nothing.

        Blocks until the server is down, which ends its remaining sessions and writes a checkpoint.

        Raises:
            EmbeddedPostgresError: The server did not stop in time; the message names its process.
        """
        if self._membership is None or self._process != os.getpid():
            return
        atexit.unregister(self._stop_at_exit)
        try:
            with _locked(self.data_dir):
                self._leave()
                if not _living_users(self.data_dir):
                    self._cluster.stop()
                    _log.debug("embedded.stopped", data_dir=str(self.data_dir))
        except (OSError, SubprocessError) as error:
            raise EmbeddedPostgresError(
                f"The embedded PostgreSQL in {self.data_dir} could not be stopped: {error}. It may go on running."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _join(self, asked: dict[str, str]) -> None:
        """Become a user and see to it that the server runs; the caller holds the lock."""
        handle, name = tempfile.mkstemp(prefix=f"{self._process}-", dir=self.data_dir / "users")
        self._membership = handle, Path(name)
        fcntl.flock(handle, fcntl.LOCK_EX)
        used = self.data_dir / "settings.json"
        try:
            _living_users(self.data_dir)
            self.started = not self._cluster.is_running()
            if self.started:
                used.write_text(json.dumps(asked))
                self._cluster.start(asked)
            with suppress(OSError, ValueError):
                self.settings = json.loads(used.read_text())
            self.dsn = self._cluster.ready_dsn()
        except BaseException:
            self._leave()
            if self.started and not _living_users(self.data_dir):
                with suppress(EmbeddedPostgresError, OSError, SubprocessError):  # the first error is the one to tell
                    self._cluster.stop()
            raise
        if not self.started and asked and asked != self.settings:
            _log.warning("embedded.settings_kept", asked=asked, in_force=self.settings, data_dir=str(self.data_dir))
        _log.debug("embedded.started" if self.started else "embedded.joined", data_dir=str(self.data_dir))

    def _leave(self) -> None:
        if self._membership is None:
            return
        (handle, path), self._membership = self._membership, None
        with suppress(FileNotFoundError):
            path.unlink()
        fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would leave it with a forked child
        os.close(handle)

    def _stop_at_exit(self) -> None:
        try:
            self.stop()
        except EmbeddedPostgresError as error:
            _log.warning("embedded.not_stopped", reason=str(error))


def _checked(settings: Mapping[str, str]) -> dict[str, str]:
    for name in settings:
        if name in _OURS or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", name):
            raise EmbeddedPostgresError(
                f"'{name}' cannot be set for the embedded PostgreSQL: it is no setting's name, or one that taskq "
                "decides: the server is private to its user, on a socket in its folder. For that use your own server."
            )
    return {name: str(value) for name, value in settings.items()}


def _prepare(folder: Path, user: ServerUser) -> None:
    """Make the data folder, or refuse it, before anything is written there."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if user.switch and existing.is_dir() and not user.can_enter(existing):
        raise EmbeddedPostgresError(
            f"The embedded PostgreSQL runs as user '{user.name}', because root may not run it, and that user cannot "
            f"reach {existing}: this folder or one above is closed to it. taskq does not open existing folders. Choose "
            "another one (pass data_dir, or set TASKQ_HOME; without them root's data is in /var/lib/taskq), or run as "
            "another user."
        )
    if (folder / "PG_VERSION").exists():
        raise EmbeddedPostgresError(
            f"{folder} is itself the data folder of a PostgreSQL, which taskq did not make. Name another."
        )
    make_folder(folder, 0o711 if user.switch else 0o700)
    refuse_foreign_folder(folder)
    make_folder(folder / "users", 0o700)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system frees it should the process be killed."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise EmbeddedPostgresError(
                        f"Another process has been starting or stopping the embedded PostgreSQL in {folder} for over "
                        f"{LOCK_TIMEOUT:g} s. Find it with 'fuser {folder / 'lock'}', end it, and try again."
                    ) from error
            time.sleep(0.01)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _living_users(folder: Path) -> int:
    """Count the users that live, and remove the files of those that do not; the caller holds the folder's lock."""
    living = 0
    for path in (folder / "users").iterdir():
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        except BlockingIOError:
            living += 1
        finally:
            os.close(handle)
    return living

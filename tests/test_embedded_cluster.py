"""What the embedded PostgreSQL's cluster says when one of its programs fails: programs of the test stand for them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from taskq import embedded_cluster as module
from taskq.embedded_binaries import ServerUser
from taskq.embedded_cluster import Cluster
from taskq.errors import EmbeddedPostgresError


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    """Make a cluster whose programs do what these shell scripts say."""
    # Not pytest's own folder: the server's user could not pass through.
    with tempfile.TemporaryDirectory(prefix="taskq-test-") as root:
        Path(root).chmod(0o711)

        def make(**programs: str) -> Cluster:
            folder, bin_dir = Path(root) / "data", Path(root) / "bin"
            for made in (folder, bin_dir):
                made.mkdir()
                made.chmod(0o755)
            for name, script in ({"postgres": "echo postgres 18.1"} | programs).items():
                (bin_dir / name).write_text(f"#!/bin/sh\n{script}\n")
                (bin_dir / name).chmod(0o755)
            return Cluster(folder, bin_dir, ServerUser.current())

        yield make


def test_an_initdb_that_fails_leaves_nothing_and_is_quoted(cluster: Callable[..., Cluster]) -> None:
    broken = cluster(initdb="echo no space left; exit 1")
    (broken.folder / "pgdata.new").mkdir()  # of a start that was killed
    with pytest.raises(EmbeddedPostgresError, match=r"initdb said:\nno space left"):
        broken.start({})
    assert list(broken.folder.iterdir()) == []


def test_a_server_that_ends_without_a_word_is_told_of(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = cluster(pg_ctl="exit 4")
    mute.pgdata.mkdir()
    (mute.pgdata / "PG_VERSION").write_text("18\n")
    mute.log.write_text("x" * 100)
    monkeypatch.setattr(module, "LOG_LIMIT", 10)
    with pytest.raises(EmbeddedPostgresError, match=r"\(nothing; pg_ctl ended with 4\)"):
        mute.start({})
    assert mute.log.with_suffix(".log.1").read_text() == "x" * 100
    assert mute.log.read_text() == ""


def test_what_a_start_says_is_quoted_without_what_the_log_had_before(cluster: Callable[..., Cluster]) -> None:
    refuses = cluster(pg_ctl="echo new words; exit 1")
    refuses.pgdata.mkdir()
    (refuses.pgdata / "PG_VERSION").write_text("18\n")
    refuses.log.write_text("old words\n")
    with pytest.raises(EmbeddedPostgresError, match="It said:\nnew words\n"):
        refuses.start({})


def test_a_server_that_cannot_be_reached_is_no_database(cluster: Callable[..., Cluster]) -> None:
    with pytest.raises(EmbeddedPostgresError, match="refuses connections"):
        cluster().ready_dsn()


def test_where_no_socket_fits_every_way_on_is_named(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cluster()
    monkeypatch.setattr(module, "SOCKET_PATH_LIMIT", 5)
    with pytest.raises(EmbeddedPostgresError, match=r"may have 5 bytes and no comma.*or set TMPDIR"):
        made._private_socket()
    assert not (made.folder / "socket_dir").exists()

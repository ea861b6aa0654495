"""The sync client: the same requests on psycopg, from plain code and from threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import psycopg
import pytest
from client_kit import Shop, finish, stored
from helpers import eventually
from psycopg.rows import dict_row

from taskq import TaskQ
from taskq.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    JobFailed,
    JobNotFound,
    PayloadError,
    ResultTimeout,
    SchemaBehind,
    UniqueKeyHeld,
    UnsupportedConnection,
)


@pytest.fixture
def shop(dsn: str) -> Iterator[Shop]:
    made = Shop(dsn)
    yield made
    made.app.close_sync()


def test_a_job_is_stored_as_it_was_asked_for(shop: Shop) -> None:
    info = shop.note.using(tags=["a"], meta={"m": 1}).enqueue_sync("hi").info_sync()
    assert (info.task, info.queue, info.priority, info.payload) == ("note", "notes", 7, {"text": "hi"})
    assert (info.tags, info.meta) == (("a",), {"m": 1})


def test_the_job_commits_or_vanishes_with_the_callers_transaction(
    shop: Shop, dsn: str, conn: psycopg.Connection
) -> None:
    with psycopg.connect(dsn, row_factory=dict_row) as mine:
        bound = shop.double.using(connection=mine)
        kept = bound.enqueue_sync(1)
        with mine.transaction():
            bound.enqueue_sync(2)
            raise psycopg.Rollback
        with pytest.raises(PayloadError):
            bound.enqueue_sync("x")  # type: ignore[arg-type]
        assert stored(conn) == 0
        mine.commit()
        assert stored(conn) == 1
        bound.enqueue_sync(3)
        mine.rollback()
    assert stored(conn) == 1
    assert kept.info_sync().payload == {"n": 1}


def test_other_connections_are_refused(shop: Shop) -> None:
    with pytest.raises(UnsupportedConnection, match="psycopg Connection"):
        shop.double.using(connection=object()).enqueue_sync(1)


def test_many_come_back_in_input_order(shop: Shop, conn: psycopg.Connection) -> None:
    jobs = shop.app.enqueue_many_sync(shop.double.job(n) for n in range(1000))
    rows = dict(conn.execute("select id, (payload->>'n')::int from taskq.jobs").fetchall())
    assert [rows[job.id] for job in jobs] == list(range(1000))
    # Their ids are in that order too, so that jobs of one batch are claimed in it.
    assert sorted(jobs, key=lambda job: job.id) == jobs


def test_keys(shop: Shop, conn: psycopg.Connection) -> None:
    taken = shop.double.using(unique_key="k2").enqueue_sync(0)
    keys = ["k1", "k2", "k3", "k1", None, None]
    requests = [shop.double.using(unique_key=key).job(n) for n, key in enumerate(keys)]
    with pytest.raises(UniqueKeyHeld) as caught:
        shop.app.enqueue_many_sync(requests, on_conflict="raise")
    assert caught.value.job_id == taken.id
    jobs = shop.app.enqueue_many_sync(requests)
    assert [job.inserted for job in jobs] == [True, False, True, False, True, True]
    assert (jobs[1], jobs[3]) == (taken, jobs[0])
    first = shop.double.using(idempotency_key="i").enqueue_sync(1)
    assert shop.double.using(idempotency_key="i").enqueue_sync(1) == first
    with pytest.raises(IdempotencyConflict) as conflict:
        shop.double.using(idempotency_key="i").enqueue_sync(2)
    assert conflict.value.job_id == first.id
    assert stored(conn) == 6


def test_batches_with_the_same_keys_do_not_deadlock(shop: Shop, conn: psycopg.Connection) -> None:
    def send(offset: int) -> set[str]:
        order = [(offset * 7 + n * (1 if offset % 2 else -1)) % 40 for n in range(40)]
        jobs = shop.app.enqueue_many_sync(shop.double.using(unique_key=f"k{n}").job(n) for n in order)
        return {str(job.id) for job in jobs}

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(24)))
    assert all(answer == answers[0] for answer in answers)
    assert stored(conn) == 40


def test_waiting_for_a_result(shop: Shop, conn: psycopg.Connection) -> None:
    job = shop.double.enqueue_sync(1)
    timer = threading.Timer(0.05, finish, (conn, job.id, "succeeded"), {"result": "2"})
    timer.start()
    assert job.result_sync(timeout=10) == 2
    timer.join()
    bad = shop.double.enqueue_sync(1)
    finish(conn, bad.id, "failed", error='{"type": "E", "message": "m"}')
    with pytest.raises(JobFailed, match="E: m"):
        bad.result_sync()
    slow = shop.double.enqueue_sync(1)
    start = time.monotonic()
    with pytest.raises(ResultTimeout):
        slow.result_sync(timeout="200ms")
    assert 0.2 <= time.monotonic() - start < 3
    assert (slow.status_sync(), slow.cancel_sync(), slow.retry_sync()) == ("pending", "cancelled", "reopened")


def test_what_is_not_there(shop: Shop, empty_dsn: str) -> None:
    job = shop.double.enqueue_sync(1)
    missing = shop.double.handle("00000000-0000-7000-8000-000000000000")
    assert shop.app.get_sync(missing.id) is None
    for call in (missing.info_sync, missing.result_sync, missing.retry_sync):
        with pytest.raises(JobNotFound) as caught:
            call()
        assert caught.value.job_id == missing.id
    assert missing.cancel_sync() == "not_found"
    assert job.status_sync() == "pending"
    with pytest.raises(SchemaBehind):
        Shop(empty_dsn).double.enqueue_sync(1)
    with pytest.raises(DatabaseUnavailable):
        Shop("postgresql://nobody@127.0.0.1:1/nothing").double.enqueue_sync(1)


def test_threads_share_few_connections(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    shop = Shop(dsn, pool_size=3)
    with ThreadPoolExecutor(16) as pool:
        jobs = list(pool.map(shop.double.enqueue_sync, range(200)))
    assert len({job.id for job in jobs}) == 200
    count = "select count(*) from pg_stat_activity where application_name = 'taskq' and datname = current_database()"
    assert 1 <= (conn.execute(count).fetchone() or (0,))[0] <= 3
    shop.app.close_sync()
    eventually(lambda: (conn.execute(count).fetchone() or (1,))[0] == 0)
    assert shop.double.enqueue_sync(1).inserted
    shop.app.close_sync()


def test_a_forked_child_opens_connections_of_its_own(shop: Shop, conn: psycopg.Connection) -> None:
    shop.double.enqueue_sync(1)
    count = "select count(*) from pg_stat_activity where application_name = 'taskq' and datname = current_database()"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            shop.double.enqueue_sync(2)
            shop.app.get_sync(shop.double.enqueue_sync(2).id)
            # The parent's connection and one of the child's own.
            with shop.app._sync.pool.connection() as mine:
                code = 0 if mine.execute(count).fetchone() == (2,) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    shop.double.enqueue_sync(3)
    assert stored(conn) == 4


def test_another_schema(empty_dsn: str) -> None:
    from pathlib import Path

    from taskq import migrate

    folder = os.environ.get("TASKQ_TEST_MIGRATIONS")
    migrate.up(empty_dsn, schema="jobs_of_mine", folder=Path(folder) if folder else None)
    shop = Shop(empty_dsn, schema="jobs_of_mine")
    job = shop.double.enqueue_sync(1)
    assert job.info_sync().payload == {"n": 1}
    assert job.cancel_sync() == "cancelled"
    shop.app.close_sync()


def test_another_database_after_the_first_use_is_refused(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    other = TaskQ("postgresql://nobody@localhost:1/nowhere", schema="elsewhere")
    other.use_database(dsn, "taskq")
    other.task(shop.double.fn)
    other.get_task("double").enqueue_sync(1)
    other.use_database(dsn)
    for change in ({"dsn": "postgresql://nobody@localhost:1/nowhere"}, {"schema": "elsewhere"}):
        with pytest.raises(ConfigurationError, match="comes too late"):
            other.use_database(**change)
    other.get_task("double").enqueue_sync(2)
    other.close_sync()
    assert stored(conn) == 2


@pytest.mark.parametrize("words", ["a\0b", "\ud800", 5])
def test_what_an_operator_says_must_be_text_that_can_be_stored(shop: Shop, words: Any) -> None:
    job = shop.note.enqueue_sync("x")
    for call in (
        partial(shop.app.cancel_sync, job.id),
        partial(shop.app.retry_sync, job.id),
        partial(shop.app.resolve_sync, job.id, happened=True),
    ):
        with pytest.raises(InvalidRequest, match="^reason"):
            call(reason=words)
        with pytest.raises(InvalidRequest, match="^actor"):
            call(reason="asked for", actor=words)
    with pytest.raises(InvalidRequest, match="happened is 'no'"):
        shop.app.resolve_sync(job.id, happened="no", reason="asked for")  # type: ignore[arg-type]
    info = shop.app.get_sync(job.id)
    assert info is not None
    assert info.status == "pending"


def test_options_that_are_of_no_use_are_refused_before_anything_is_sent(shop: Shop, conn: psycopg.Connection) -> None:
    with pytest.raises(InvalidRequest, match="meta is of type str"):
        shop.note.using(meta="trace")  # type: ignore[typeddict-item]
    with pytest.raises(InvalidRequest, match="on_conflict is 'replace'"):
        shop.app.enqueue_many_sync([shop.note.job("x")], on_conflict="replace")  # type: ignore[arg-type]
    assert conn.execute("select from taskq.jobs").rowcount == 0


@pytest.mark.parametrize(
    "given",
    [{"pool_size": 0}, {"pool_size": -1}, {"pool_size": "5"}, {"pool_size": True}, {"dsn": 5}, {"schema": None}],
)
def test_an_application_that_could_never_connect_is_refused(given: dict[str, Any]) -> None:
    # With a pool of none, the first call would wait for ever.
    with pytest.raises(ConfigurationError, match=next(iter(given))):
        TaskQ(**given)

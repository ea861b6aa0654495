"""The async client: enqueue in and out of the caller's transaction, keys, bulk, waiting, steering."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import asyncpg
import psycopg
import pytest
import sql as q
from client_kit import Shop, finish, stored
from helpers import aeventually

from taskq import TaskQ
from taskq.errors import (
    DatabaseUnavailable,
    IdempotencyConflict,
    InvalidRequest,
    JobCancelled,
    JobFailed,
    JobNotFound,
    PayloadError,
    ResultTimeout,
    SchemaBehind,
    SyncCallInEventLoop,
    UniqueKeyHeld,
    UnsupportedConnection,
    WrongState,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
async def shop(dsn: str, anyio_backend: str) -> AsyncIterator[Shop]:
    made = Shop(dsn)
    yield made
    await made.app.close()


async def test_a_job_is_stored_as_it_was_asked_for(shop: Shop) -> None:
    job = await shop.note.enqueue("hi")
    info = await job.info()
    assert job.inserted
    assert (info.task, info.queue, info.priority, info.status) == ("note", "notes", 7, "pending")
    assert (info.payload, info.max_attempts, info.attempt, info.tags) == ({"text": "hi"}, 3, 0, ())
    assert info.deadline is not None
    assert info.deadline - info.created_at == timedelta(hours=1)
    assert info.policy_id == shop.note.policy.id
    assert not info.finished


async def test_options_reach_the_row(shop: Shop) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    bound = shop.note.using(
        queue="other", priority=0, max_attempts=9, timeout="5s", run_at=at, deadline=at + timedelta(days=1),
        unique_key="k", unique_scope="s", tags=["a", "b"], meta={"trace": "x"},
    )  # fmt: skip
    info = await (await bound.enqueue("hi")).info()
    assert (info.queue, info.priority, info.max_attempts, info.run_at) == ("other", 0, 9, at)
    assert (info.deadline, info.unique_scope, info.unique_key) == (at + timedelta(days=1), "s", "k")
    assert (info.tags, info.meta) == (("a", "b"), {"trace": "x"})
    soon = await (await shop.note.using(run_in="10m", deadline=None).enqueue("hi")).info()
    assert soon.run_at - soon.created_at == timedelta(minutes=10)
    assert soon.deadline is None


async def test_policies_are_stored_once_and_whole(shop: Shop, conn: psycopg.Connection) -> None:
    await shop.double.enqueue(1)
    await shop.double.using(timeout="5s").enqueue(1)
    await shop.double.using(timeout=5).enqueue(2)
    specs = dict(conn.execute("select id, spec from taskq.policies").fetchall())
    slow = shop.double.using(timeout=5).job(1).spec
    assert specs == {p.id: json.loads(json.dumps(p.spec())) for p in (shop.double.policy, slow.policy)}
    used = conn.execute("select count(*) from taskq.jobs where policy_id = %s", [slow.policy_id]).fetchone()
    assert used == (2,)


async def test_the_job_commits_or_vanishes_with_the_callers_transaction(
    shop: Shop, aconn: asyncpg.Connection, conn: psycopg.Connection
) -> None:
    bound = shop.double.using(connection=aconn)
    outer = aconn.transaction()
    await outer.start()
    kept = await bound.enqueue(1)
    savepoint = aconn.transaction()
    await savepoint.start()
    dropped = await bound.enqueue(2)
    await savepoint.rollback()
    assert stored(conn) == 0
    with pytest.raises(JobNotFound, match="not committed"):
        await kept.info()
    await outer.commit()
    assert (await kept.info()).payload == {"n": 1}
    assert await shop.app.get(dropped.id) is None
    rolled_back = aconn.transaction()
    await rolled_back.start()
    await bound.enqueue(3)
    await rolled_back.rollback()
    assert stored(conn) == 1


async def test_an_async_psycopg_connection_will_do(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    async with await psycopg.AsyncConnection.connect(dsn) as mine:
        job = await shop.double.using(connection=mine).enqueue(1)
        assert stored(conn) == 0
        await mine.rollback()
        assert stored(conn) == 0
        job = await shop.double.using(connection=mine).enqueue(1)
        await mine.commit()
    assert (await job.info()).task == "double"


async def test_a_connection_with_codecs_of_its_owner(shop: Shop, aconn: asyncpg.Connection) -> None:
    for kind in ("json", "jsonb"):
        await aconn.set_type_codec(kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    await aconn.set_type_codec("uuid", encoder=str, decoder=str, schema="pg_catalog")
    job = await shop.double.using(connection=aconn).enqueue(1)
    assert isinstance(job.id, uuid.UUID)
    assert (await job.info()).payload == {"n": 1}


async def test_a_pooled_connection_of_the_caller(shop: Shop, dsn: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, pool.acquire() as mine:
        job = await shop.double.using(connection=mine).enqueue(1)
    assert (await job.info()).payload == {"n": 1}


@pytest.mark.parametrize("wrong", ["postgresql:///x", 3])
async def test_anything_else_is_no_connection(shop: Shop, conn: psycopg.Connection, wrong: Any) -> None:
    for connection in (wrong, conn):
        with pytest.raises(UnsupportedConnection, match="asyncpg"):
            await shop.double.using(connection=connection).enqueue(1)
    assert stored(conn) == 0


async def test_a_refused_payload_leaves_the_transaction_usable(shop: Shop, aconn: asyncpg.Connection) -> None:
    bound = shop.anything.using(connection=aconn)
    async with aconn.transaction():
        first = await bound.enqueue({"ok": 1})
        for value, path in ((math.nan, "x"), ([1, math.inf], "x[1]"), ({1: 2}, "x[1]"), ("\0", "x")):
            with pytest.raises(PayloadError) as caught:
                await bound.enqueue(value)
            assert caught.value.path == path
        second = await bound.enqueue({"ok": 2})
    assert [(await job.info()).payload for job in (first, second)] == [{"x": {"ok": 1}}, {"x": {"ok": 2}}]


async def test_a_refused_item_of_many_is_named_and_nothing_is_enqueued(shop: Shop, conn: psycopg.Connection) -> None:
    with pytest.raises(PayloadError, match=r"^item 2 of enqueue_many: x\[0\]: nan") as caught:
        await shop.app.enqueue_many(shop.anything.job(value) for value in (1, 2, [math.nan], 4))
    assert caught.value.path == "x[0]"
    assert stored(conn) == 0


@pytest.mark.parametrize(
    ("option", "fits", "too_much", "said"),
    [
        ("tags", ["t" * 256] * 64, ["t"] * 65, "tags has 65 texts, the limit is 64"),
        ("tags", ["é" * 256], ["é" * 257], "tags has a text of 257 characters, the limit is 256"),
        ("meta", {"m": "é" * 32_764}, {"m": "é" * 32_765}, "meta has 65538 bytes as JSON, the limit is 65536"),
    ],
)
async def test_tags_and_meta_have_limits_that_the_error_names(
    shop: Shop, conn: psycopg.Connection, option: str, fits: Any, too_much: Any, said: str
) -> None:
    job = await shop.anything.using(**{option: fits}).enqueue(1)
    kept = getattr(await job.info(), option)
    assert kept == (tuple(fits) if option == "tags" else fits)
    with pytest.raises(InvalidRequest, match=said):
        shop.anything.using(**{option: too_much})
    assert stored(conn) == 1


@pytest.mark.parametrize("value", ["x" * 7_900, "x" * 8_000, "x" * 65_536, "x" * 5_000_000, "😀" * 3_000])
async def test_large_payloads_are_stored_equal(shop: Shop, value: str) -> None:
    assert (await (await shop.anything.enqueue(value)).info()).payload == {"x": value}


async def test_the_payload_limit_of_the_installation(shop: Shop, conn: psycopg.Connection) -> None:
    conn.execute("update taskq.installation set max_payload_bytes = 100")
    with pytest.raises(InvalidRequest, match="108 bytes, the limit is 100"):
        await shop.anything.enqueue("x" * 100)


async def test_many_come_back_in_input_order(shop: Shop) -> None:
    jobs = await shop.app.enqueue_many(shop.double.using(priority=n % 10).job(n) for n in range(500))
    infos = [await job.info() for job in jobs[:: len(jobs) // 20]]
    assert [info.payload["n"] for info in infos] == list(range(0, 500, 25))
    assert [info.priority for info in infos] == [n % 10 for n in range(0, 500, 25)]
    assert await shop.app.enqueue_many([]) == []
    mixed = await shop.app.enqueue_many([shop.double.job(1), shop.note.job("a"), shop.double.job(2)])
    assert [(await job.info()).task for job in mixed] == ["double", "note", "double"]


async def test_a_batch_with_taken_keys_can_skip_or_refuse(shop: Shop, conn: psycopg.Connection) -> None:
    taken = await shop.double.using(unique_key="k2").enqueue(0)
    keys = ["k1", "k2", "k3", "k1", None, None]
    requests = [shop.double.using(unique_key=key).job(n) for n, key in enumerate(keys)]
    with pytest.raises(UniqueKeyHeld, match="'k2'") as caught:
        await shop.app.enqueue_many(requests, on_conflict="raise")
    assert caught.value.job_id == taken.id
    assert stored(conn) == 1
    jobs = await shop.app.enqueue_many(requests)
    assert [job.inserted for job in jobs] == [True, False, True, False, True, True]
    assert jobs[1] == taken
    assert jobs[3] == jobs[0]
    assert len({job.id for job in jobs}) == 5
    assert stored(conn) == 5


async def test_two_callers_race_for_a_unique_key(shop: Shop, dsn: str, aconn: asyncpg.Connection) -> None:
    other = await asyncpg.connect(dsn)
    try:
        for commits in (True, False):
            key = f"k{commits}"
            transaction = aconn.transaction()
            await transaction.start()
            first = await shop.double.using(connection=aconn, unique_key=key).enqueue(1)
            second = asyncio.create_task(shop.double.using(connection=other, unique_key=key).enqueue(2))
            await aeventually(lambda: aconn.fetchval("select count(*) > 0 from pg_locks where not granted"))
            assert not second.done()
            await (transaction.commit() if commits else transaction.rollback())
            answer = await asyncio.wait_for(second, 10)
            assert answer.inserted is not commits
            assert (answer == first) is commits
    finally:
        await other.close()


async def test_many_race_for_one_key_and_one_wins(shop: Shop, conn: psycopg.Connection) -> None:
    unique = await asyncio.gather(*(shop.double.using(unique_key="k").enqueue(n) for n in range(20)))
    again = await asyncio.gather(*(shop.double.using(idempotency_key="k").enqueue(1) for n in range(20)))
    for jobs in (unique, again):
        assert len(set(jobs)) == 1
        assert sum(job.inserted for job in jobs) == 1
    assert stored(conn) == 2


async def test_a_unique_key_is_free_once_its_job_has_finished(shop: Shop, conn: psycopg.Connection) -> None:
    bound = shop.double.using(unique_key="k")
    first = await bound.enqueue(1)
    assert (await bound.enqueue(2)) == first
    with pytest.raises(UniqueKeyHeld):
        await bound.using(on_conflict="raise").enqueue(2)
    assert (await shop.double.using(unique_key="k", unique_scope="other").enqueue(2)).inserted
    finish(conn, first.id, "succeeded")
    assert (await bound.enqueue(2)).inserted
    held = await shop.double.using(unique_key="held", unique_hold="1h").enqueue(1)
    finish(conn, held.id, "succeeded")
    assert (await shop.double.using(unique_key="held").enqueue(1)) == held


async def test_an_idempotency_key_answers_for_the_same_request_only(shop: Shop, conn: psycopg.Connection) -> None:
    bound = shop.double.using(idempotency_key="k")
    first = await bound.enqueue(1)
    again = await bound.enqueue(n=1)
    assert (again, again.inserted) == (first, False)
    with pytest.raises(IdempotencyConflict) as caught:
        await bound.enqueue(2)
    assert caught.value.job_id == first.id
    assert (await bound.using(idempotency_scope="other").enqueue(2)).inserted
    finish(conn, first.id, "succeeded", result="2")
    assert await (await bound.enqueue(1)).result(timeout=5) == 2
    with pytest.raises(IdempotencyConflict):
        await shop.app.enqueue_many([shop.double.job(0), bound.job(3)])
    assert stored(conn) == 2


async def test_keys_of_both_kinds_answer_with_jobs_that_exist(shop: Shop) -> None:
    holder = await shop.double.using(unique_key="k").enqueue(1)
    both = shop.double.using(unique_key="k", idempotency_key="i")
    jobs = await shop.app.enqueue_many([both.job(1), both.job(1)])
    assert [job.id for job in jobs] == [holder.id, holder.id]
    assert (await both.enqueue(1)).id == holder.id


async def test_a_caller_above_read_committed(shop: Shop, aconn: asyncpg.Connection) -> None:
    async with aconn.transaction(isolation="repeatable_read"):
        await aconn.fetchval("select 1")
        # Committed after the snapshot was taken: the plain job does not mind, the taken key cannot be judged.
        taken = await shop.double.using(unique_key="k").enqueue(1)
        job = await shop.double.using(connection=aconn, unique_key="free", idempotency_key="i").enqueue(2)
        with pytest.raises(asyncpg.SerializationError):
            async with aconn.transaction():
                await shop.double.using(connection=aconn, unique_key="k").enqueue(2)
    assert (await job.info()).payload == {"n": 2}
    async with aconn.transaction(isolation="repeatable_read"):
        assert await shop.double.using(connection=aconn, unique_key="k").enqueue(2) == taken


async def test_waiting_for_a_result(shop: Shop, conn: psycopg.Connection) -> None:
    good, bad, gone = await shop.app.enqueue_many(shop.double.job(n) for n in range(3))
    waiting = asyncio.create_task(good.result(timeout=10))
    await anyio.sleep(0)
    finish(conn, good.id, "succeeded", result="14")
    assert await waiting == 14
    assert await shop.double.handle(str(good.id)).result() == 14
    finish(conn, bad.id, "failed", error='{"type": "ValueError", "message": "no"}')
    with pytest.raises(JobFailed, match="ValueError: no") as failed:
        await bad.result(timeout=5)
    assert (failed.value.job_id, failed.value.error["type"]) == (bad.id, "ValueError")
    assert await gone.cancel("not wanted", actor="me") == "cancelled"
    with pytest.raises(JobCancelled) as cancelled:
        await gone.result(timeout=5)
    assert cancelled.value.error["reason"] == "not wanted"
    assert await gone.status() == "cancelled"
    with pytest.raises(JobNotFound):
        await shop.double.handle(uuid.uuid4()).result(timeout=5)


async def test_a_wait_ends_in_time_and_the_job_goes_on(shop: Shop) -> None:
    job = await shop.double.enqueue(1)
    start = time.monotonic()
    with pytest.raises(ResultTimeout, match=r"0\.3 s: it is pending, until .* a worker takes it; .*taskq doctor"):
        await job.result(timeout=0.3)
    assert 0.3 <= time.monotonic() - start < 3
    assert await job.status() == "pending"
    with pytest.raises(TimeoutError):
        await job.result(timeout=0)


async def test_a_result_of_an_uncommitted_job_is_waited_for(shop: Shop, aconn: asyncpg.Connection) -> None:
    transaction = aconn.transaction()
    await transaction.start()
    job = await shop.double.using(connection=aconn).enqueue(1)
    with pytest.raises(ResultTimeout, match="not committed, or was rolled back"):
        await job.result(timeout=0.05)
    await transaction.rollback()
    with pytest.raises(ResultTimeout, match="not committed, or was rolled back"):
        await job.result(timeout=0.05)


async def test_a_wait_for_an_unknown_job_names_the_decision(shop: Shop, conn: psycopg.Connection) -> None:
    _, job = q.unknown(conn)
    with pytest.raises(ResultTimeout, match=f"taskq jobs resolve {job}"):
        await shop.double.handle(job).result(timeout=0.05)


@pytest.mark.parametrize("wrong", ["abc", 5, None])
async def test_what_is_no_id_of_a_job_is_named(shop: Shop, wrong: Any) -> None:
    for call in (shop.app.get, shop.app.cancel, shop.app.retry):
        with pytest.raises(InvalidRequest, match=f"{wrong!r} is not the id of a job"):
            await call(wrong)
    with pytest.raises(InvalidRequest, match=f"{wrong!r} is not the id of a job"):
        shop.double.handle(wrong)


async def test_what_is_no_request_of_the_application_is_named(shop: Shop, dsn: str, conn: psycopg.Connection) -> None:
    wrong: list[tuple[Any, str]] = [
        ([shop.double.job(1), shop.double], r"item 1 .*write double\.job\(\.\.\.\)"),
        (shop.double.job(1), r"write \[task\.job"),
        (7, r"write \[task\.job"),
        ([Shop(dsn).double.job(1)], "'double', which belongs to another TaskQ"),
    ]
    for requests, said in wrong:
        with pytest.raises(InvalidRequest, match=said):
            await shop.app.enqueue_many(requests)
    assert stored(conn) == 0


async def test_steering(shop: Shop, conn: psycopg.Connection) -> None:
    job = await shop.double.using(run_in="1h").enqueue(1)
    assert await job.retry() == "due"
    assert await job.cancel() == "cancelled"
    assert await job.cancel() == "finished"
    assert await shop.app.cancel(uuid.uuid4()) == "not_found"
    assert await job.retry("again") == "reopened"
    assert (await job.info()).generation == 1
    finish(conn, job.id, "succeeded", result="1")
    with pytest.raises(WrongState) as caught:
        await job.retry()
    assert caught.value.job_id == job.id
    with pytest.raises(JobNotFound):
        await shop.app.retry(uuid.uuid4())
    with pytest.raises(WrongState):
        await shop.app.resolve(job.id, happened=True, reason="seen")
    unknown = await shop.double.enqueue(1)
    conn.execute(
        "update taskq.jobs set status = 'running', claim_epoch = 1, claimed_by = taskq.new_id(), claimed_at = now() "
        "where id = %s",
        [unknown.id],
    )
    conn.execute("update taskq.jobs set status = 'unknown' where id = %s", [unknown.id])
    with pytest.raises(InvalidRequest, match="reason"):
        await shop.app.resolve(unknown.id, happened=True, reason=" ")
    assert await shop.app.resolve(unknown.id, happened=True, reason="seen", result=5) == "succeeded"
    assert await unknown.result() == 5


async def test_sync_calls_in_an_event_loop_name_the_call_to_await(shop: Shop, conn: psycopg.Connection) -> None:
    job = await shop.double.enqueue(1)
    calls = [
        (lambda: shop.double.enqueue_sync(1), "await enqueue"),
        (lambda: shop.app.enqueue_many_sync([shop.double.job(1)]), "await enqueue_many"),
        (lambda: job.result_sync(timeout=1), "await result"),
        (job.cancel_sync, "await cancel"),
        (lambda: shop.app.get_sync(job.id), "await get"),
    ]
    for call, said in calls:
        with pytest.raises(SyncCallInEventLoop, match=said):
            call()
    assert stored(conn) == 1
    # In a thread, as a def task runs, they work.
    assert (await asyncio.to_thread(shop.double.enqueue_sync, 2)).inserted


async def test_enqueue_by_sql_and_by_client_make_the_same_job(shop: Shop, aconn: asyncpg.Connection) -> None:
    by_client = await shop.note.enqueue("hi")
    task = shop.note
    policy = task.policy
    await aconn.execute(
        "select taskq.publish_task(taskq.new_id(), $1, $2, $3, $4, $5, $6)",
        task.name, policy.queue, policy.priority, policy.retry.max_attempts, policy.effect_class,
        await shop.app.ensure_policy(policy),
    )  # fmt: skip
    by_sql = await aconn.fetchval("select taskq.enqueue('note', '{\"text\": \"hi\"}')")
    one, other = await by_client.info(), await task.handle(by_sql).info()
    same = (
        "task",
        "queue",
        "priority",
        "max_attempts",
        "effect_class",
        "policy_id",
        "payload",
        "status",
        "tags",
        "meta",
    )
    assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
    assert one.deadline is not None
    assert other.deadline is not None
    assert other.deadline - other.created_at == one.deadline - one.created_at


async def test_a_schema_that_is_not_there(empty_dsn: str) -> None:
    shop = Shop(empty_dsn)
    with pytest.raises(SchemaBehind, match="taskq migrate up"):
        await shop.double.enqueue(1)
    await shop.app.close()


async def test_a_database_that_is_not_there() -> None:
    shop = Shop("postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(DatabaseUnavailable, match="127.0.0.1"):
        await shop.double.enqueue(1)
    with pytest.raises(DatabaseUnavailable):
        await shop.app.open()


async def test_a_server_that_ended_the_connections(shop: Shop, conn: psycopg.Connection) -> None:
    await shop.double.enqueue(1)
    await asyncio.to_thread(shop.double.enqueue_sync, 1)
    conn.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
        "where application_name = 'taskq' and datname = current_database()"
    )
    await asyncio.sleep(0)
    assert (await asyncio.to_thread(shop.double.enqueue_sync, 2)).inserted
    assert (await shop.double.enqueue(2)).inserted


def test_one_application_in_several_event_loops(dsn: str) -> None:
    shop = Shop(dsn)

    async def use() -> None:
        async with shop.app as app:
            assert isinstance(app, TaskQ)
            assert (await shop.double.enqueue(1)).inserted

    async def leave_open() -> None:
        await shop.double.enqueue(1)

    asyncio.run(use())
    asyncio.run(leave_open())
    asyncio.run(use())

"""What becomes of ends and claims that the database refused, decided step by step on a connection of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import UUID, uuid4

import asyncpg
import pytest
from proxy import Proxy, proxy
from worker_kit import Events, claim_of

from taskq.db.queries import load
from taskq.policy import ExecutionPolicy
from taskq.worker.claims import Counts, End
from taskq.worker.complete import Outbox, next_outcome_id
from taskq.worker.connection import Connection
from taskq.worker.resend import Resender
from taskq.worker.unflushed import Unflushed

pytestmark = pytest.mark.anyio


@dataclass
class Bench:
    """One resender, what it decides with, and the way to its database."""

    way: Proxy
    conn: Connection
    outbox: Outbox
    counts: Counts
    resender: Resender

    def sent(self, *ends: End) -> list[End]:
        """These ends as a batch that is on its way."""
        for end in ends:
            self.outbox.put(end)
        return self.outbox.take()


@pytest.fixture
async def bench(dsn: str, anyio_backend: str) -> AsyncIterator[Bench]:
    with proxy(dsn) as way:
        conn, outbox, counts = Connection(way.dsn, "taskq exchange"), Outbox(), Counts()
        yield Bench(
            way,
            conn,
            outbox,
            counts,
            Resender(load("worker", "taskq"), conn, outbox, counts, Unflushed(outbox, conn, allowed=False)),
        )
        await conn.close()


def end_of(job_id: UUID | None = None, **values: object) -> End:
    claim = claim_of("nothing", job_id=job_id or uuid4(), **values)
    return End(claim.worker_id, claim.job_id, claim.claim_epoch, "succeeded", next_outcome_id(), "1", task=claim.task)


def refusal(sqlstate: str, job_id: UUID | None = None) -> asyncpg.PostgresError:
    """What asyncpg raises for it."""
    fields = {"C": sqlstate, "M": "refused"} | ({"D": f'{{"job_id": "{job_id}"}}'} if job_id else {})
    error: asyncpg.PostgresError = asyncpg.PostgresError.new(fields)
    return error


async def a_claim(aconn: asyncpg.Connection) -> End:
    """A job that runs, and the end of its attempt."""
    worker = await aconn.fetchval(
        "select taskq.register_worker('w', 'h', 1, array['default'], array['nothing'], 1, 1, '0', 30)"
    )
    policy = ExecutionPolicy()
    await aconn.execute("select taskq.ensure_policy($1, 1, $2)", policy.id, json.dumps(policy.spec()))
    await aconn.execute("select taskq.enqueue('nothing', '{}', policy => $1)", policy.id)
    row = await aconn.fetchrow(
        "update taskq.jobs set status = 'running', claim_epoch = claim_epoch + 1, claimed_by = $1, claimed_at = now() "
        "returning id, claim_epoch",
        worker,
    )
    return end_of(row["id"], worker_id=worker, claim_epoch=row["claim_epoch"])


async def test_an_end_on_record_is_confirmed(bench: Bench, aconn: asyncpg.Connection, events: Events) -> None:
    end = await a_claim(aconn)
    stored = "select taskq.end_attempts($1, array[$2::uuid], array[$3::int], array['succeeded'], array[$4::int8], "
    stored += "array['1']::jsonb[], array[null]::jsonb[], array[0]::float8[])"
    assert await aconn.fetchval(stored, end.worker_id, end.job_id, end.claim_epoch, end.outcome_id) == 1
    bench.sent(end)
    await bench.resender.settle_missed(end)
    assert (bench.outbox.pending, bench.counts.fenced_out, events.of("job.fenced_out")) == (0, 0, [])
    # The same attempt, ended as somebody else said.
    end.outcome_id += 1
    bench.sent(end)
    await bench.resender.settle_missed(end)
    assert (bench.outbox.pending, bench.counts.fenced_out) == (0, 1)
    assert events.of("job.fenced_out")[0]["on_record"] == "succeeded"


async def test_an_end_whose_claim_still_stands_is_sent_again(bench: Bench, aconn: asyncpg.Connection) -> None:
    end = await a_claim(aconn)
    bench.sent(end)
    await bench.resender.settle_missed(end)
    assert bench.outbox.take() == [end]
    assert bench.counts.fenced_out == 0


async def test_an_end_of_which_nothing_is_known_is_fenced_out(bench: Bench, events: Events) -> None:
    end = end_of()
    bench.sent(end)
    await bench.resender.settle_missed(end)
    assert (bench.outbox.pending, bench.counts.fenced_out) == (0, 1)
    assert events.of("job.fenced_out")[0]["on_record"] is None


async def test_an_end_is_kept_when_the_record_cannot_be_read(bench: Bench, events: Events) -> None:
    end = end_of()
    bench.sent(end)
    bench.way.cut()
    await bench.resender.settle_missed(end)
    assert bench.outbox.take() == [end]
    assert bench.counts.fenced_out == 0
    assert len(events.of("database.unavailable")) == 1


async def test_a_missing_partition_is_asked_for_until_the_database_answers(
    bench: Bench, aconn: asyncpg.Connection, events: Events
) -> None:
    missing = asyncpg.CheckViolationError("no partition of relation found for row")
    for name in await aconn.fetch("select name from taskq.partitions where parent = 'history'"):
        await aconn.execute(f"drop table taskq.{name['name']}")
    end = end_of()
    batch = bench.sent(end)
    bench.way.cut()
    await bench.resender.failed(batch, 0, missing)
    assert bench.outbox.take() == [end]
    assert len(events.of("database.unavailable")) == 1
    bench.way.restore()
    await bench.resender.failed(batch, 0, missing)
    assert await aconn.fetchval("select count(*) from taskq.partitions where parent = 'history'") > 1
    assert events.of("database.refused") == []
    # There is nothing to make now, so that is not why: the next try waits.
    assert bench.outbox.take() == [end]
    await bench.resender.failed(batch, 0, missing)
    assert len(events.of("database.refused")) == 1


async def test_a_row_is_claimed_around_and_the_ends_are_sent_again(bench: Bench, events: Events) -> None:
    end, stranded = end_of(), uuid4()
    batch = bench.sent(end)
    await bench.resender.failed(batch, 5, refusal("WF001", stranded))
    assert bench.resender.skip == [stranded]
    assert bench.outbox.take() == [end]
    assert [told["job_id"] for told in events.of("job.stranded")] == [str(stranded)]
    assert events.of("database.refused") == []
    # Around it already, so it is not the reason: wait.
    await bench.resender.failed([], 5, refusal("WF001", stranded))
    assert bench.resender.skip == [stranded]
    assert len(events.of("database.refused")) == 1


@pytest.mark.parametrize("limit", [0, 5])
async def test_another_refusal_names_its_row_only_when_claims_alone_were_sent(bench: Bench, limit: int) -> None:
    stranded = uuid4()
    await bench.resender.failed([], limit, refusal("WF002", stranded))
    assert bench.resender.skip == ([stranded] if limit else [])


async def test_a_job_that_found_no_slot_is_not_given_up(bench: Bench, events: Events) -> None:
    await bench.resender.failed([], 5, refusal("WF027", uuid4()))
    assert bench.resender.skip == []
    assert events.of("job.stranded") == []
    assert len(events.of("database.refused")) == 1


async def test_ends_are_sent_alone_to_find_out_whether_they_are_refused(bench: Bench, events: Events) -> None:
    end = end_of()
    batch = bench.sent(end)
    await bench.resender.failed(batch, 5, refusal("22P05"))
    assert bench.resender.ends_only
    assert bench.outbox.take() == batch
    assert events.of("job.outcome_not_stored") == []

    await bench.resender.failed(batch, 0, refusal("22P05"))
    [told] = events.of("job.outcome_not_stored")
    assert (told["job_id"], told["sqlstate"]) == (str(end.job_id), "22P05")
    assert events.of("database.refused") == []
    [minimal] = bench.outbox.take()
    assert (minimal.minimal, minimal.outcome, minimal.outcome_id) == (True, "failed", end.outcome_id)
    # Even that is refused: it is kept, and the next try waits.
    await bench.resender.failed([minimal], 0, refusal("22P05"))
    assert len(events.of("database.refused")) == 1
    assert bench.outbox.take() == [minimal]


async def test_a_refused_batch_of_many_is_halved_without_a_word(bench: Bench, events: Events) -> None:
    ends = [end_of() for _ in range(4)]
    await bench.resender.failed(bench.sent(*ends), 0, refusal("23505"))
    assert (bench.outbox.take(), bench.outbox.take()) == (ends[:2], ends[2:])
    assert events.of("job.outcome_not_stored") == []


async def test_an_answer_that_cannot_be_read_loses_no_end(bench: Bench, events: Events) -> None:
    end = end_of()
    batch = bench.sent(end)
    await asyncio.wait_for(bench.resender.unreadable(batch, ValueError("no such\nfield")), 5)
    assert bench.outbox.take() == [end]
    [told] = events.of("exchange.unreadable")
    assert (told["error"], told["ends"]) == ("ValueError: no such", 1)
    # It was told of as what it is, not as a refusal.
    assert events.of("database.refused") == []

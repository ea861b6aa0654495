"""A store whose answers differ in one field: no body is called for it, or no success is reported, whichever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Events, Gates, RunWorker, outcomes, status_of, until_status

from taskq import JobContext, Ref, Retry, TaskQ, TerminalEffect
from taskq.worker import Worker
from taskq.worker.connection import Connection

pytestmark = pytest.mark.anyio
WORDS = {"claims": ".exchange(", "starts": ".start_effects(", "records": "as ended, a.job_id"}
NOT_PROVEN = ("job.claim_not_proven", "job.effect_start_not_proven", "job.outcome_not_proven")
REFUSED = ("job.claim_not_proven", "job.effect_start_not_proven", "job.fenced_out", "job.cancelled")


class Store:
    """The worker's own connection, whose next answer of a kind is altered on the way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._of: str | None = None
        self._alter: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] = list
        self.altered = 0
        fetch = Connection.fetch

        async def altering(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
            rows = await fetch(conn, query, *args, **options)
            if self._of is None or WORDS[self._of] not in query:
                return rows
            found = [dict(row) for row in rows]
            if not any(row.get("kind", "job") == "job" for row in found):
                return rows
            self._of = None
            self.altered += 1
            return self._alter(found)

        monkeypatch.setattr(Connection, "fetch", altering)

    def next(self, of: str, alter: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
        """Alter the next answer of this kind that has anything to say."""
        self._of, self._alter = of, alter


def other(value: Any, field: str) -> Any:
    """A value of the same type that is another, and as plausible as can be."""
    match value:
        case None:
            absent: dict[str, Any] = {
                "deadline": datetime.fromisoformat("2100-01-01T00:00:00+00:00"),
                "cancel_requested_at": datetime.fromisoformat("2100-01-01T00:00:00+00:00"),
                "meta": '{"a": 1}',
                "meta_sha256": "0" * 64,
                "key_generation": 3,
                "outcome_id": 1,
                "cohort": "another",
            }
            return absent[field]
        case bool():
            return not value
        case int():
            return value + 1
        case UUID():
            return uuid4()
        case datetime():
            return value + timedelta(seconds=1)
    words = {
        "pay": "pay_too",
        "running": "unknown",
        "side_effecting": "idempotent",
        "succeeded": "failed",
        "job": "none",
        '{"n": 1}': '{"n": 2}',
    }
    return words.get(value, f"{value}x")


def altered(field: str, value: Any = ...) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    def alter(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row | {field: other(row[field], field) if value is ... else value} for row in rows]

    return alter


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    return Store(monkeypatch)


class Payments:
    """Two side-effecting tasks that take the same arguments, and what their bodies were called with."""

    def __init__(self, app: TaskQ) -> None:
        self.called: list[tuple[UUID, int]] = []

        @app.task(effect_class="side_effecting")
        async def pay(ctx: JobContext, n: int) -> str:
            self.called.append((ctx.job_id, n))
            return "paid"

        @app.task(effect_class="side_effecting")
        async def pay_too(ctx: JobContext, n: int) -> str:
            self.called.append((ctx.job_id, n))
            return "paid"

        self.pay = pay


async def until_refused(worker: Worker, events: Events, before: int) -> None:
    """Wait until the worker has said that it refused something more, and has nothing left to do."""

    def refused() -> bool:
        said = sum(len(events.of(event)) for event in REFUSED)
        return said > before and worker.parts.exchanger.is_empty

    await aeventually(refused, BOUND)


CLAIM = [
    "job_id",
    "claim_epoch",
    "task",
    "payload",
    "queue",
    "priority",
    "run_at",
    "policy_id",
    "attempt",
    "max_attempts",
    "recoveries",
    "retry_afters",
    "snoozes",
    "generation",
    "effect_class",
    "deadline",
    "claimed_at",
    "meta",
    "key_generation",
    "releases",
    "cohort",
]
START = [
    "job_id",
    "claim_epoch",
    "claimed_by",
    "status",
    "effect_started_at",
    "cancel_requested_at",
    "effect_class",
    "lease_holds",
    "task",
    "queue",
    "priority",
    "run_at",
    "policy_id",
    "attempt",
    "max_attempts",
    "recoveries",
    "retry_afters",
    "snoozes",
    "releases",
    "generation",
    "key_generation",
    "cohort",
    "deadline",
    "claimed_at",
    "payload_sha256",
    "meta_sha256",
]
RECORD = ["ended", "job_id", "claim_epoch", "worker_id", "outcome_id", "outcome", "effect_started_at"]


async def columns(aconn: asyncpg.Connection, query: str) -> list[str]:
    statement = await aconn.prepare(query)
    return [column.name for column in statement.get_attributes()]


async def test_no_field_is_left_out(aconn: asyncpg.Connection, run_worker: RunWorker, app: TaskQ) -> None:
    Payments(app)
    async with run_worker() as worker:
        queries = worker.parts.queries
        assert await columns(aconn, queries["exchange"]) == ["kind", *CLAIM]
        assert await columns(aconn, queries["start_effects"]) == START
        assert await columns(aconn, queries["attempt_records"]) == RECORD


async def test_a_claim_that_differs_in_any_field_calls_no_body(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, store: Store, events: Events
) -> None:
    payments = Payments(app)
    cases = [altered(field) for field in CLAIM]
    cases += [altered("claim_epoch", 0), altered("attempt", 9), altered("max_attempts", 0), altered("task", "nowhere")]
    async with run_worker(lease=60, concurrency=1) as worker:
        for number, alter in enumerate(cases):
            said = sum(len(events.of(event)) for event in REFUSED)
            store.next("claims", alter)
            job = await payments.pay.enqueue(1)
            await until_refused(worker, events, said)
            assert store.altered == number + 1
            assert payments.called == [], CLAIM[number : number + 1]
            assert worker.counts.succeeded == 0
            assert await status_of(aconn, job.id) in ("running", "unknown", "pending")
            await aconn.execute("update taskq.jobs set run_at = now() + interval '1 h' where status = 'pending'")
        store.next("claims", lambda rows: [row | {"kind": "none"} for row in rows])
        await payments.pay.enqueue(1)
        await aeventually(lambda: store.altered == len(cases) + 1, BOUND)
        # The worker goes on: an answer that is right is acted on.
        job = await payments.pay.enqueue(1)
        assert await job.result(timeout=BOUND) == "paid"
    assert payments.called == [(job.id, 1)]


async def test_a_claim_of_any_class_is_proven(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, store: Store, events: Events
) -> None:
    called: list[int] = []

    @app.task
    async def work(n: int) -> None:
        called.append(n)

    cases: list[tuple[str, Any, str]] = [
        ("claim_epoch", 0, "epoch"),
        ("attempt", 3, "attempt"),
        ("attempt", -1, "attempt"),
        ("effect_class", "pure", "effect_class"),
        ("task", "nowhere", "unknown_task"),
    ]
    async with run_worker(lease=60, concurrency=1) as worker:
        for field, value, reason in cases:
            store.next("claims", altered(field, value))
            job = await work.enqueue(1)
            await aeventually(lambda: events.of("job.claim_not_proven"), BOUND)
            await aeventually(lambda: worker.parts.exchanger.is_empty, BOUND)
            [event] = events.of("job.claim_not_proven")
            assert (event["job_id"], event["reason"]) == (str(job.id), reason)
            events.records.clear()
            if field != "claim_epoch":
                [record] = await aconn.fetch("select * from taskq.ledger where job_id = $1", job.id)
                error = json.loads(record["error"])
                assert (record["outcome"], error["type"], error["reason"]) == ("released", "ClaimNotProven", reason)
                delay = await aconn.fetchval("select run_at - now() from taskq.jobs where id = $1", job.id)
                assert timedelta(seconds=1) < delay <= timedelta(seconds=5)
        assert called == []
        assert worker.counts.not_proven == len(cases)


async def test_an_effect_start_that_differs_in_any_field_calls_no_body_or_proves_no_success(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, store: Store, events: Events
) -> None:
    payments = Payments(app)
    cases = [(field, altered(field)) for field in START if field != "effect_started_at"]
    cases += [
        ("effect_started_at", altered("effect_started_at", None)),
        ("job_id", altered("job_id", None)),
        ("claimed_by", altered("claimed_by", None)),
        ("status", altered("status", "pending")),
        ("row", lambda rows: []),
    ]
    async with run_worker(lease=60, concurrency=1) as worker:
        for number, (field, alter) in enumerate(cases):
            said = sum(len(events.of(event)) for event in REFUSED)
            store.next("starts", alter)
            job = await payments.pay.enqueue(1)
            await until_refused(worker, events, said)
            assert store.altered == number + 1
            assert payments.called == [], field
            # Started and not told: nothing but a decision runs it, or it is still held under its fence.
            assert await status_of(aconn, job.id) in ("unknown", "running", "failed"), field
        assert worker.counts.succeeded == 0
        # Another instant is seen where it is compared: in the record of the end.
        store.next("starts", altered("effect_started_at"))
        job = await payments.pay.enqueue(1)
        await aeventually(lambda: events.of("job.outcome_not_proven"), BOUND)
        await aeventually(lambda: worker.parts.exchanger.is_empty, BOUND)
        assert payments.called == [(job.id, 1)]
        assert worker.counts.succeeded == 0
        assert events.of("job.succeeded") == []


async def test_a_record_that_differs_in_any_field_proves_no_success(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, store: Store, events: Events
) -> None:
    payments = Payments(app)
    cases = [(field, altered(field)) for field in RECORD]
    cases += [
        ("outcome", altered("outcome", "resolved")),
        ("outcome", altered("outcome", "running")),
        ("row", lambda rows: []),
        ("row", lambda rows: rows * 2),
        ("effect_started_at", altered("effect_started_at", None)),
    ]
    async with run_worker(lease=60, concurrency=1) as worker:
        for number, (field, alter) in enumerate(cases):
            store.next("records", alter)
            job = await payments.pay.enqueue(1)
            await aeventually(lambda: len(events.of("job.outcome_not_proven")) > number, BOUND)  # noqa: B023
            await aeventually(lambda: worker.parts.exchanger.is_empty, BOUND)
            assert payments.called[number:] == [(job.id, 1)], field
            assert worker.counts.succeeded == 0, field
            assert worker.counts.not_proven == number + 1
            # What stands on record stands; nothing is run again or taken back for it.
            assert await outcomes(aconn, job.id) == ["succeeded"]
        assert events.of("job.succeeded") == []
        job = await payments.pay.enqueue(1)
        await aeventually(lambda: worker.counts.succeeded == 1, BOUND)


@pytest.mark.parametrize(
    ("of", "alter", "became"),
    [
        ("claims", altered("effect_class"), "pending"),
        ("starts", altered("effect_started_at", None), "unknown"),
        ("records", altered("outcome"), "succeeded"),
    ],
)
async def test_what_is_not_proven_leads_to_no_retry_and_no_compensation(
    app: TaskQ,
    run_worker: RunWorker,
    aconn: asyncpg.Connection,
    store: Store,
    events: Events,
    of: str,
    alter: Any,
    became: str,
) -> None:
    called: list[int] = []
    undone: list[int] = []

    @app.task
    async def undo(n: int) -> None:
        undone.append(n)

    undoing = TerminalEffect(undo, on=("failed", "cancelled"), undoes=True, payload={"n": Ref.arg("n")})

    @app.task(effect_class="side_effecting", retry=Retry(max_attempts=5, on=(Exception,)), effects=[undoing])
    async def pay(n: int) -> str:
        called.append(n)
        return "paid"

    async with run_worker(lease=60, concurrency=1) as worker:
        store.next(of, alter)
        job = await pay.enqueue(1)
        await aeventually(lambda: sum(len(events.of(event)) for event in NOT_PROVEN) == 1, BOUND)
        await aeventually(lambda: worker.parts.exchanger.is_empty, BOUND)
        await until_status(aconn, job.id, became)
        assert called == ([1] if of == "records" else [])
        assert await aconn.fetchval("select attempt from taskq.all_jobs where id = $1", job.id) == 0
        assert await aconn.fetchval("select count(*) from taskq.effect_intents") == 0
        assert undone == []


async def test_an_end_that_is_said_to_be_applied_and_was_not_is_no_success(
    app: TaskQ,
    run_worker: RunWorker,
    aconn: asyncpg.Connection,
    gates: Gates,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @app.task(effect_class="side_effecting")
    async def pay() -> None:
        await gates.wait()

    fetch = Connection.fetch

    async def without_missed(conn: Connection, query: str, *args: Any, **options: Any) -> list[Any]:
        rows = await fetch(conn, query, *args, **options)
        return [row for row in rows if row.get("kind") != "missed"] if WORDS["claims"] in query else rows

    monkeypatch.setattr(Connection, "fetch", without_missed)
    async with run_worker(lease=60) as worker:
        job = await pay.enqueue()
        await gates.until_reached()
        await aconn.execute("select taskq.enter_unknown(j, 'worker_lost', null) from taskq.jobs j")
        await aconn.execute("select taskq.resolve($1, true, null, 'looked')", job.id)
        gates.open()
        await aeventually(lambda: events.of("job.outcome_not_proven"), BOUND)
        assert worker.counts.succeeded == 0
    assert await outcomes(aconn, job.id) == ["resolved"]


async def test_a_class_that_a_deploy_has_changed_waits_for_code_that_fits(
    app: TaskQ, dsn: str, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    called: list[str] = []

    @app.task(name="work")
    async def before() -> None:
        called.append("before")

    after = TaskQ(dsn)

    @after.task(name="work", effect_class="side_effecting")
    async def now() -> None:
        called.append("after")

    job = await before.enqueue()
    async with run_worker(of=after, lease=60) as worker:
        await aeventually(lambda: events.of("job.claim_not_proven"), BOUND)
        await aeventually(lambda: worker.parts.exchanger.is_empty, BOUND)
        for releases in (1, 2):
            row = await until_status(aconn, job.id, "pending")
            assert row["releases"] == releases
            await aconn.execute("update taskq.jobs set run_at = now() where id = $1", job.id)
            worker.parts.exchanger.notified()
            await aeventually(lambda: worker.counts.not_proven > releases, BOUND)  # noqa: B023
            await aeventually(lambda: worker.parts.exchanger.is_empty, BOUND)
        assert len(events.of("job.claim_not_proven")) == 1, "told of once"
        delay = await aconn.fetchval("select run_at - now() from taskq.jobs where id = $1", job.id)
        assert delay > timedelta(seconds=20), "and it waits longer each time"
        assert called == []
    # Once that worker has gone: it would claim it again, and have it wait for minutes.
    await aconn.execute("update taskq.jobs set run_at = now() where id = $1", job.id)
    async with run_worker():
        await until_status(aconn, job.id, "succeeded")
    assert called == ["before"]
    await after.close()

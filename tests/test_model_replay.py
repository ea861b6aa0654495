"""Records of real runs are paths of the model of docs/model; forged ones are refused, each at its step."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row
from sql import (
    End,
    cancel,
    claim,
    claim_one,
    end,
    enqueue,
    get,
    lose,
    one,
    policy,
    register,
    resolve,
    retry,
    rows,
    running,
    settle,
    start_effects,
    unknown,
)
from worker_kit import Gates, declare_lost, outcomes, until_status

from taskq import JobContext, OutcomeUnknown, Retry, RetryAfter, Snooze, TaskQ, constant
from taskq.worker import Worker, WorkerOptions

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs.model import __main__ as command  # noqa: E402
from docs.model.replay import Record, read, replay, replay_job  # noqa: E402

anyio = pytest.mark.anyio


def records(dsn: str) -> list[Record]:
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return read(lambda query: conn.execute(query.encode()).fetchall())


# Real runs ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def working(app: TaskQ, dsn: str) -> AsyncIterator[Worker]:
    worker = Worker(app.tasks, dsn, options=WorkerOptions(concurrency=20, lease=3, grace=5, poll_interval=0.1))
    service = asyncio.create_task(worker.run())
    try:
        await asyncio.wait_for(worker.ready.wait(), 15)
        yield worker
    finally:
        worker.stop()
        assert await asyncio.wait_for(service, 20) == 0
        await app.close()


@anyio
async def test_what_a_real_worker_did_is_a_path_of_the_model(aconn: asyncpg.Connection, dsn: str) -> None:
    app, gates = TaskQ(dsn), Gates()
    seen: dict[str, int] = {}

    def nth(name: str) -> int:
        seen[name] = seen.get(name, 0) + 1
        return seen[name]

    @app.task
    async def succeeds() -> int:
        return 1

    @app.task(retry=Retry(max_attempts=1))
    async def fails() -> None:
        raise ValueError("no")

    @app.task(retry=Retry(max_attempts=3, backoff=constant("10ms")))
    async def fails_at_first() -> int:
        if nth("fails_at_first") < 3:
            raise ValueError("not yet")
        return 1

    @app.task
    async def waits_twice() -> int:
        if (n := nth("waits_twice")) == 1:
            raise Snooze(0.01)
        if n == 2:
            raise RetryAfter(0.01)
        return 1

    @app.task
    async def sleeps_and_waits(ctx: JobContext) -> int:
        await ctx.sleep("1100ms")
        return await ctx.wait_for("n", int)

    @app.task
    async def stands(gate: str) -> int:
        await gates.wait(gate)
        return 1

    @app.task
    async def shielded(gate: str) -> int:
        try:
            await gates.wait(gate)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        return 1

    async with working(app, dsn):
        jobs = [await task.enqueue() for task in (succeeds, fails, fails_at_first, waits_twice) for _ in range(3)]
        waiting, signalled = await sleeps_and_waits.enqueue(), await sleeps_and_waits.enqueue()
        later = await succeeds.using(run_in="1h").enqueue()
        assert await later.cancel() == "cancelled"
        stopped, returned = await stands.enqueue("stopped"), await shielded.enqueue("returned")
        for gate, job in (("stopped", stopped), ("returned", returned)):
            await gates.until_reached(gate)
            assert await job.cancel() == "requested"
        gates.open("returned")
        for job in (*jobs, stopped, returned):
            await until_status(aconn, job.id, "succeeded", "failed", "cancelled")
        for job in (jobs[3], later):
            await job.retry()
        # Its worker is declared lost while the bodies run, and goes on under a new name.
        lost, unsure = await stands.enqueue("lost"), await stands.enqueue("unsure")
        await gates.until_reached("lost")
        await gates.until_reached("unsure")
        async with aconn.transaction():
            await aconn.execute("select taskq.cancel($1)", unsure.id)
            await declare_lost(aconn)
        gates.open("lost")
        await until_status(aconn, lost.id, "succeeded")
        for job in (waiting, signalled):
            await until_status(aconn, job.id, "held")
        await signalled.signal("n", 1)
        await until_status(aconn, signalled.id, "succeeded")
    found = {record.id: record for record in records(dsn)}
    assert set(found) == {str(job.id) for job in (*jobs, later, stopped, returned, lost, unsure, waiting, signalled)}
    assert [str(refusal) for refusal in replay(found.values())] == []
    told = {outcome for job in found for outcome in await outcomes(aconn, UUID(job))}
    assert told >= {"succeeded", "failed", "snoozed", "retry_after", "cancelled", "lost", "suspended"}


class Declined(Exception):  # noqa: N818 (what the provider says)
    pass


@anyio
async def test_side_effects_that_a_real_worker_had_are_a_path_of_the_model(aconn: asyncpg.Connection, dsn: str) -> None:
    app, gates = TaskQ(dsn), Gates()
    seen: set[str] = set()

    @app.task(effect_class="side_effecting", retry=Retry(max_attempts=3, backoff=constant("10ms"), on=(Declined,)))
    async def charge(how: str) -> str:
        await gates.wait(how)
        first = how not in seen
        seen.add(how)
        match how:
            case "declined" if first:
                raise Declined
            case "breaks" | "asked, breaks":
                raise ValueError(how)
            case "unsure" | "unsure, never" if first:
                raise OutcomeUnknown(how)
        return how

    says = ("returns", "declined", "breaks", "unsure", "unsure, never", "asked, returns", "asked, breaks", "lost")
    async with working(app, dsn):
        jobs = {how: (await charge.enqueue(how)).id for how in says}
        await asyncio.gather(*(gates.until_reached(how) for how in says))
        for how in ("asked, returns", "asked, breaks"):
            assert await aconn.fetchval("select taskq.cancel($1)", jobs[how]) == "requested"
        for how in says:
            if how != "lost":
                gates.open(how)
        expected = {
            "returns": "succeeded",
            "declined": "succeeded",
            "breaks": "failed",
            "asked, returns": "succeeded",
            "asked, breaks": "cancelled",
            "unsure": "unknown",
            "unsure, never": "unknown",
        }
        for how, status in expected.items():
            await until_status(aconn, jobs[how], status)
        for how, happened in (("unsure", True), ("unsure, never", False)):
            await aconn.fetchval("select taskq.resolve($1, $2, null, 'looked')", jobs[how], happened)
            await until_status(aconn, jobs[how], "succeeded")
        await declare_lost(aconn)
        assert (await until_status(aconn, jobs["lost"], "unknown"))["claim_epoch"] == 1
        gates.open("lost")
        await until_status(aconn, jobs["lost"], "succeeded")
    found = {record.id: record for record in records(dsn)}
    assert [str(refusal) for refusal in replay(found.values())] == []
    assert await outcomes(aconn, jobs["unsure, never"]) == ["resolved", "succeeded"]
    assert await outcomes(aconn, jobs["lost"]) == ["succeeded"]
    # The same record without the steps in between is none.
    lost = found[str(jobs["lost"])]
    assert [u["reason"] for u in lost.unknowns or ()] == ["worker_lost"]
    never = found[str(jobs["unsure, never"])]
    assert "ended as resolved" in str(replay_job(replace(never, unknowns=[])))
    again = [{**a, "outcome": "lost"} if a["outcome"] == "resolved" else a for a in never.attempts]
    assert "ended as lost" in str(replay_job(replace(never, attempts=again, unknowns=[])))


def test_what_the_database_settles_by_itself_is_a_path_of_the_model(conn: psycopg.Connection[Any], dsn: str) -> None:
    conn.autocommit = True
    policy(conn, "once", max_recoveries=1, retry={"backoff": {"kind": "constant", "base": 3600, "cap": 3600}})
    _, exhausted = running(conn, policy_id="once")
    for _ in range(2):
        lose(conn, get(conn, exhausted)["worker_id"])
        settle(conn)
        if get(conn, exhausted)["status"] == "pending":
            assert claim_one(conn, register(conn))["job_id"] == exhausted
    worker, pure = running(conn, effect_class="pure")
    cancel(conn, pure)
    lose(conn, worker)
    assert settle(conn) == {pure: "cancelled"}
    worker, not_begun = running(conn, effect_class="side_effecting")
    cancel(conn, not_begun)
    lose(conn, worker)
    assert settle(conn) == {not_begun: "cancelled"}
    happened, did_not, told, open_ = (unknown(conn) for _ in range(4))
    assert resolve(conn, happened[1], True) == "succeeded"
    assert resolve(conn, did_not[1], False) == "cancelled"
    assert end(conn, told[0], End(told[1])) == 1
    # The hook of the one says again and again that it did not happen, that of the other once too late.
    limits: tuple[dict[str, Any], ...] = {}, {"deadline_in": 600}
    asked, late_asked = (enqueue(conn, effect_class="side_effecting", policy_id="once", **limit) for limit in limits)
    for worker in (register(conn), register(conn)):
        for claimed in claim(conn, worker, 2):
            started = claimed["job_id"], claimed["claim_epoch"]
            start_effects(conn, worker, started)
            end(conn, worker, End(*started, "unknown", error={"reason": "told"}))
            answered = "select taskq.answer_reconcile(%s, %s, false, null, 'asked', 'reconcile:x')"
            assert one(conn, answered, *started) == ("pending" if started == (asked, 1) else "failed")
        conn.execute("update taskq.jobs set run_at = taskq.now() where id = %s", (asked,))
    assert retry(conn, did_not[1]) == "reopened"
    again = claim_one(conn, register(conn))
    assert (again["job_id"], again["claim_epoch"]) == (did_not[1], 2)
    worker, released = running(conn)
    assert end(conn, worker, End(released, outcome="release")) == 1
    late = enqueue(conn)
    conn.execute("update taskq.jobs set deadline = taskq.now() - interval '1 s' where id = %s", (late,))
    assert [r["job_id"] for r in rows(conn, "select * from taskq.sweep()")] == [late]
    assert retry(conn, late) == "reopened"
    found = records(dsn)
    decided = {happened[1], did_not[1], told[1], open_[1], asked, late_asked}
    assert {UUID(r.id) for r in found} == {exhausted, pure, not_begun, *decided, released, late}
    assert [str(refusal) for refusal in replay(found)] == []


def test_what_became_of_side_effecting_steps_is_a_path_of_the_model(conn: psycopg.Connection[Any], dsn: str) -> None:
    conn.autocommit = True
    jobs = set()
    for effect_class in ("pure", "idempotent"):
        for happened in (True, False):
            worker, job = running(conn, effect_class=effect_class)
            conn.execute("select taskq.start_step(%s, %s, 1, 'pay', 1)", (worker, job))
            lose(conn, worker)
            assert settle(conn) == {job: "unknown"}
            assert resolve(conn, job, happened) == "pending"
            claim_one(conn, worker := register(conn))
            conn.execute("select taskq.start_step(%s, %s, 2, 'mail', 1)", (worker, job))
            end(conn, worker, End(job, 2, "failed"))
            assert cancel(conn, job) == "unknown"
            jobs.add(job)
    worker, job = running(conn)
    conn.execute("select taskq.start_step(%s, %s, 1, 'pay', 1)", (worker, job))
    jobs.add(job)
    found = records(dsn)
    assert {UUID(r.id) for r in found} == jobs
    assert [str(refusal) for refusal in replay(found)] == []


def test_the_command_replays_a_database(
    conn: psycopg.Connection[Any], dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conn.autocommit = True
    worker, done = running(conn)
    assert end(conn, worker, End(done)) == 1
    monkeypatch.setattr(sys, "argv", ["docs.model", "--replay", dsn])
    assert command.main() == 0
    assert capsys.readouterr().out == "1 of 1 jobs have a record that is a path of the model\n"
    conn.execute("alter table taskq.history disable trigger user")
    conn.execute("update taskq.history set attempt = 1")
    assert command.main() == 1
    assert f"job {done}, step 4: the row is compared with its record" in capsys.readouterr().out


# Forged records -------------------------------------------------------------------------------------------------------

BORN = datetime(2026, 1, 1, tzinfo=UTC)
WORKERS = [UUID(int=n) for n in range(1, 4)]


def at(seconds: float) -> datetime:
    return BORN + timedelta(seconds=seconds)


def attempt(epoch: int, outcome: str, **values: Any) -> dict[str, Any]:
    whole = {
        "claim_epoch": epoch,
        "generation": 0,
        "worker_id": WORKERS[0],
        "outcome": outcome,
        "claimed_at": at(10 * epoch),
        "effect_started_at": None,
        "ended_at": at(10 * epoch + 5),
        "error": None,
    }
    return whole | values


def job(status: str, epoch: int, **values: Any) -> dict[str, Any]:
    whole = {
        "id": "j",
        "status": status,
        "effect_class": "idempotent",
        "created_at": at(0),
        "finished_at": at(10 * epoch + 5),
        "claim_epoch": epoch,
        "worker_id": WORKERS[0],
        "claimed_at": at(10 * epoch),
        "effect_started_at": None,
        "cancel_requested_at": None,
        "attempt": 0,
        "max_attempts": 3,
        "recoveries": 0,
        "retry_afters": 0,
        "snoozes": 0,
        "releases": 0,
        "generation": 0,
    }
    return whole | values


def audit(action: str, when: float, answer: str, **details: Any) -> dict[str, Any]:
    return {"action": action, "at": at(when), "details": {"answer": answer, **details}}


PLAIN = Record(
    "j",
    finished=[job("succeeded", 3, attempt=1, recoveries=1)],
    attempts=[attempt(1, "failed"), attempt(2, "lost"), attempt(3, "succeeded")],
)
ASKED = Record(
    "j",
    finished=[job("cancelled", 1, cancel_requested_at=at(12))],
    attempts=[attempt(1, "cancelled")],
    audit=[audit("cancel", 12, "requested")],
)
STARTED = Record(
    "j",
    finished=[job("succeeded", 1, effect_class="side_effecting", effect_started_at=at(11))],
    attempts=[attempt(1, "resolved", effect_started_at=at(11))],
    audit=[audit("resolve", 15, "succeeded", happened=True)],
    unknowns=[{"claim_epoch": 1, "since": at(13), "reason": "worker_lost"}],
)
REOPENED = Record(
    "j",
    finished=[job("succeeded", 2, generation=1)],
    attempts=[attempt(1, "failed"), attempt(2, "succeeded", generation=1)],
    audit=[audit("retry", 16, "reopened", was="failed")],
)
WAITING = Record(
    "j", waiting=[job("pending", 1, worker_id=None, claimed_at=None, attempt=1)], attempts=[attempt(1, "failed")]
)


@pytest.mark.parametrize("record", [PLAIN, ASKED, STARTED, REOPENED, WAITING], ids=lambda r: r.attempts[-1]["outcome"])
def test_a_sound_record_is_allowed(record: Record) -> None:
    assert replay_job(record) is None


def with_(record: Record, n: int, **values: Any) -> Record:
    changed = list(record.attempts)
    changed[n] = {**changed[n], **values}
    return replace(record, attempts=changed)


def row(record: Record, **values: Any) -> Record:
    if record.finished:
        return replace(record, finished=[{**record.finished[0], **values}])
    return replace(record, waiting=[{**record.waiting[0], **values}])


def without(record: Record, n: int) -> Record:
    return replace(record, attempts=[a for i, a in enumerate(record.attempts) if i != n])


FORGED: Mapping[str, tuple[Record, int, str]] = {
    "in both places": (replace(PLAIN, waiting=WAITING.waiting), 0, "the job is looked up"),
    "nowhere": (replace(PLAIN, finished=[]), 0, "the job is looked up"),
    "an attempt is missing": (without(PLAIN, 1), 4, "claimed at epoch 3"),
    "an epoch is used twice": (with_(PLAIN, 1, claim_epoch=1), 4, "claimed at epoch 1"),
    "claimed before the last had ended": (with_(PLAIN, 1, claimed_at=at(12)), 3, "claimed at epoch 2"),
    "ended before it was claimed": (with_(PLAIN, 0, ended_at=at(5)), 2, "epoch 1 ended as failed"),
    "claimed after it had succeeded": (with_(PLAIN, 1, outcome="succeeded"), 6, "claimed at epoch 3"),
    "an outcome that is none": (with_(PLAIN, 2, outcome="expired"), 7, "epoch 3 ended as expired"),
    "resolved without having been unknown": (
        replace(with_(PLAIN, 2, outcome="resolved"), unknowns=[]),
        7,
        "epoch 3 ended as resolved",
    ),
    "a failure uncounted": (row(PLAIN, attempt=0), 8, "the row is compared with its record"),
    "a lost worker uncounted": (row(PLAIN, recoveries=0), 8, "the row is compared with its record"),
    "a snooze on no record": (row(PLAIN, snoozes=1), 8, "the row is compared with its record"),
    "another status than the last attempt's": (row(PLAIN, status="failed"), 8, "the row is compared with its record"),
    "more failures than allowed": (row(PLAIN, max_attempts=1), 4, "claimed at epoch 2"),
    "more lost workers than allowed": (replace(PLAIN, max_recoveries=0), 6, "claimed at epoch 3"),
    "cancelled without a request": (replace(ASKED, audit=[]), 3, "epoch 1 ended as cancelled"),
    "failed after a request": (with_(ASKED, 0, outcome="failed"), 4, "epoch 1 ended as failed"),
    "told to wait after a request": (with_(ASKED, 0, outcome="snoozed"), 4, "epoch 1 ended as snoozed"),
    "a cancel of nothing that ran": (
        replace(ASKED, audit=[audit("cancel", 7, "requested")]),
        2,
        "asked to cancel: requested",
    ),
    "a request that the row does not know": (
        row(ASKED, cancel_requested_at=None),
        5,
        "the row is compared with its record",
    ),
    "lost after a request, not unknown": (with_(ASKED, 0, outcome="lost"), 4, "epoch 1 ended as lost"),
    "a started effect is called lost": (
        replace(with_(STARTED, 0, outcome="lost"), unknowns=[]),
        4,
        "epoch 1 ended as lost",
    ),
    "a started effect is handed back": (
        replace(with_(STARTED, 0, outcome="released"), unknowns=[]),
        4,
        "epoch 1 ended as released",
    ),
    "resolved by nobody": (replace(STARTED, audit=[]), 5, "epoch 1 ended as resolved"),
    "resolved the other way": (
        replace(STARTED, audit=[audit("resolve", 15, "pending", happened=False)]),
        5,
        "epoch 1 ended as resolved",
    ),
    "the decision is about another attempt": (
        replace(STARTED, audit=[audit("resolve", 15, "succeeded", happened=True, claim_epoch=2)]),
        5,
        "epoch 1 ended as resolved",
    ),
    "resolved, and never unknown": (replace(STARTED, unknowns=[]), 4, "epoch 1 ended as resolved"),
    "unknown for a loss before its start": (
        with_(STARTED, 0, effect_started_at=None),
        3,
        "epoch 1 became unknown: worker_lost",
    ),
    "unknown before it was claimed": (
        replace(STARTED, unknowns=[{"claim_epoch": 1, "since": at(3), "reason": "told"}]),
        2,
        "epoch 1 became unknown: told",
    ),
    "an effect start after a cancel request": (
        replace(STARTED, audit=[audit("cancel", 10.5, "requested"), *STARTED.audit]),
        4,
        "effect start of epoch 1",
    ),
    "an effect start before the claim": (with_(STARTED, 0, effect_started_at=at(2)), 2, "effect start of epoch 1"),
    "an effect start of an idempotent job": (row(STARTED, effect_class="idempotent"), 3, "effect start of epoch 1"),
    "claimed while unknown": (
        replace(
            STARTED,
            attempts=[attempt(1, "resolved", effect_started_at=at(11), ended_at=at(25)), attempt(2, "succeeded")],
        ),
        5,
        "claimed at epoch 2",
    ),
    "reopened while it waits": (
        replace(with_(REOPENED, 0, outcome="released"), audit=[audit("retry", 16, "reopened", was="cancelled")]),
        4,
        "reopened",
    ),
    "reopened after it succeeded": (with_(REOPENED, 0, outcome="succeeded"), 4, "reopened"),
    "reopened unrecorded": (replace(REOPENED, audit=[]), 6, "the row is compared with its record"),
    "waiting, and counted as run": (row(WAITING, claim_epoch=2), 4, "the row is compared with its record"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_record_is_refused_at_its_step(forged: str) -> None:
    record, step, what = FORGED[forged]
    refusal = replay_job(record)
    assert refusal is not None
    assert (refusal.step, refusal.what) == (step, what), str(refusal)
    assert "job j, step" in str(refusal)

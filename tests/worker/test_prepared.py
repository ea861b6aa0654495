"""Preparations on real workers: what they answer, what interrupts them, and what their bodies are told."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import threading
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Events, Gates, RunWorker, claim_of, declare_lost, outcomes, until_status

from taskq import (
    Cancelled,
    ExecutionPolicy,
    GrantStale,
    IncidentNotFound,
    InvalidPolicy,
    InvalidRequest,
    JobContext,
    NeedsApproval,
    Pause,
    PrepareContext,
    Ready,
    Retry,
    TaskDefinitionError,
    TaskQ,
    Unmet,
    constant,
)
from taskq.telemetry.events import OF_JOB
from taskq.testing import drain
from taskq.worker.connection import Connection
from taskq.worker.preparing import Preparer
from taskq.worker.running import Running

pytestmark = pytest.mark.anyio

AT_ONCE = Retry(backoff=constant("1ms"))


async def incident_of(aconn: asyncpg.Connection, job: UUID) -> dict[str, Any]:
    async def look() -> Any:
        row = await aconn.fetchrow("select * from taskq.incidents where job_id = $1 and is_current", job)
        assert row is not None
        return row

    found = dict(await aeventually(look, BOUND))
    return {**found, "fault": json.loads(found["fault"])}


async def until_held(aconn: asyncpg.Connection, job: UUID) -> dict[str, Any]:
    row = await until_status(aconn, job, "held")
    assert row["held_reason"] == "incident"
    return await incident_of(aconn, job)


async def grant(aconn: asyncpg.Connection, incident: UUID) -> None:
    assert await aconn.fetchval("select taskq.grant_recovery($1, 'mended', 'me')", incident) == "granted"


async def test_the_body_sees_what_its_preparation_has_found_out(app: TaskQ, run_worker: RunWorker) -> None:
    seen: list[Any] = []

    async def look(ctx: PrepareContext, n: int) -> Ready:
        seen.append((n, ctx.attempt, dict(ctx.facts), ctx.idempotency_key == str(ctx.job_id)))
        return Ready({"rate": {"eur": 1.5}, "n": n}, clear=["nothing"])

    @app.task(prepare=look)
    async def asks(ctx: JobContext, n: int = 7) -> dict[str, Any]:
        return dict(ctx.facts)

    @app.task
    async def plain(ctx: JobContext) -> dict[str, Any]:
        return dict(ctx.facts)

    async with run_worker():
        assert await (await asks.enqueue()).result(timeout=BOUND) == {"rate": {"eur": 1.5}, "n": 7}
        assert await (await plain.enqueue()).result(timeout=BOUND) == {}
    assert seen == [(7, 1, {}, True)]


async def test_facts_go_from_node_to_node_of_a_run(app: TaskQ, run_worker: RunWorker) -> None:
    def first(n: int) -> Ready:
        return Ready({"rate": 1, "old": True})

    def second(ctx: PrepareContext, n: int) -> Ready:
        return Ready({"rate": ctx.facts["rate"] + 1}, clear=["old"])

    @app.task(prepare=first)
    def one(n: int) -> int:
        return n

    @app.task(prepare=second)
    def two(ctx: JobContext, n: int) -> dict[str, Any]:
        return dict(ctx.facts)

    @app.workflow
    def flow(n: int) -> dict[str, Any]:
        return two.step(one.step(n))

    run = await flow.start(3)
    async with run_worker():
        assert await run.result(timeout=BOUND) == {"rate": 2}


async def test_a_side_effecting_body_starts_its_effect_after_its_preparation(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    answers: list[Any] = [NeedsApproval("a charge of 5"), Ready({"ok": 1})]

    def look(ctx: PrepareContext) -> Ready | NeedsApproval:
        return answers.pop(0) if "a charge of 5" not in ctx.approved else answers.pop()

    @app.task(effect_class="side_effecting", prepare=look)
    async def charge(ctx: JobContext) -> dict[str, Any]:
        return dict(ctx.facts)

    @app.workflow
    def charges() -> dict[str, Any]:
        return charge.step()

    run = await charges.start()
    job = UUID(str(await aconn.fetchval("select job_id from taskq.run_tree where run_id = $1", run.id)))
    async with run_worker():
        incident = await until_held(aconn, job)
        assert await aconn.fetchval("select count(*) from taskq.ledger where effect_started_at is not null") == 0
        assert (await run.info()).status == "paused"
        assert await run.grant(incident["id"], "they may") == "granted"
        assert await run.result(timeout=BOUND) == {"ok": 1}
        with pytest.raises(GrantStale) as stale:
            await run.grant(incident["id"], "again")
        assert stale.value.current is None
        with pytest.raises(IncidentNotFound):
            await run.grant(job, "again")
        with pytest.raises(InvalidRequest, match="for a reason"):
            await run.grant(incident["id"], " ")
    assert await outcomes(aconn, job) == ["released", "succeeded"]


async def test_what_fails_is_tried_again_and_is_one_incident(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    tries: list[int] = []

    def look() -> Ready:
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionError(f"try {len(tries)} failed")
        return Ready()

    @app.task(prepare=look, retry=AT_ONCE, max_recoveries=2)
    def body() -> str:
        return "done"

    job = await body.enqueue()
    async with run_worker() as worker:
        incident = await until_held(aconn, job.id)
        fault = incident["fault"]
        assert (incident["failures"], fault["type"], fault["message"]) == (3, "ConnectionError", "try 3 failed")
        # Where it failed, as for a body.
        assert "test_prepared.py" in fault["traceback"]
        await grant(aconn, incident["id"])
        assert await job.result(timeout=BOUND) == "done"
        assert worker.counts.released == 3
    told = events.of("job.not_prepared")
    assert [(e["answer"], e["became"], e["why"]) for e in told] == [
        ("failed", "released", "ConnectionError: try 1 failed"),
        ("failed", "released", "ConnectionError: try 2 failed"),
        ("failed", "held", "ConnectionError: try 3 failed"),
    ]
    assert set(OF_JOB) <= set(told[0])
    assert {str(e["incident"]) for e in told} == {str(incident["id"])}
    assert await outcomes(aconn, job.id) == ["released"] * 3 + ["succeeded"]


NONE = object()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "NoneType, which says nothing"),
        (True, "bool, which says nothing"),
        (Cancelled(), "nobody has asked for a cancel"),
        (Ready({"a b": 1}), "a fact is 'a b'"),
        (Ready({"a": NONE}), "fact a"),
        (Ready({"a": "x" * 70_000}), "fact a"),
        (Ready({"a": 1}, clear=["a"]), "sets the fact a and clears it"),
        (Ready(7), "give them by name"),  # type: ignore[arg-type]
        (Ready(clear="a"), "give the names in a list"),
        (Ready(clear=7), "give the names in a list"),  # type: ignore[arg-type]
        (Ready({f"n{n}": 1 for n in range(101)}), "101 facts"),
        (Unmet("nothing"), "no check of the task"),
    ],
)
async def test_any_other_answer_is_a_fault_of_a_type(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, given: Any, words: str
) -> None:
    @app.task(prepare=lambda: given, max_recoveries=0)
    def body() -> None:
        raise AssertionError("it is not prepared")

    job = await body.enqueue()
    async with run_worker():
        incident = await until_held(aconn, job.id)
    assert words in incident["fault"]["message"], incident["fault"]
    kind = "PrerequisiteInvalid" if isinstance(given, Unmet) else "PreparationInvalid"
    assert incident["fault"]["type"] in (kind, "PayloadError", "InvalidPolicy")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Pause("two words"),
        lambda: Pause("code", "x" * 3000),
        lambda: Pause("code", 7),  # type: ignore[arg-type]
        lambda: NeedsApproval(" "),
        lambda: NeedsApproval("x" * 301),
        lambda: NeedsApproval("a NUL: \0"),
        lambda: Pause("code", "half of a pair: \ud800"),
        lambda: Unmet("two words"),
        lambda: Unmet("a", retry_in="soon"),
    ],
)
async def test_an_answer_that_cannot_be_is_refused_where_it_is_made(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, make: Any
) -> None:
    @app.task(prepare=make, max_recoveries=0)
    def body() -> None: ...

    job = await body.enqueue()
    async with run_worker():
        incident = await until_held(aconn, job.id)
    assert incident["fault"]["type"] in ("PreparationInvalid", "InvalidDuration")


async def test_a_pause_of_a_run_and_an_unmet_prerequisite(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    answers: list[Any] = [Pause("provider-down", "since noon"), Unmet("bank_open", retry_in="1ms"), Unmet("n"), Ready()]

    @app.task(prepare=lambda n: answers.pop(0), checks=("bank_open",))
    def body(n: int) -> int:
        return n

    @app.workflow
    def flow(n: int) -> int:
        return body.step(n)

    run = await flow.start(4)
    async with run_worker():
        await aeventually(lambda: len(answers) == 3, BOUND)

        async def is_paused(code: str) -> bool:
            assert await aconn.fetchval("select code from taskq.paused_runs where run_id = $1", run.id) == code
            return True

        await aeventually(functools.partial(is_paused, "provider-down"), BOUND)
        await run.resume("it is up")
        await aeventually(functools.partial(is_paused, "unmet_prerequisite"), BOUND)
        [row] = await aconn.fetch("select * from taskq.open_incidents where run_id = $1 and is_current", run.id)
        assert json.loads(row["fault"])["prerequisite"] == "n"
        await grant(aconn, row["incident_id"])
        assert await run.result(timeout=BOUND) == 4
    # Both are resolved by the preparation.
    assert await aconn.fetchval("select count(*) from taskq.incidents where status = 'resolved'") == 2


# What interrupts it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_cancel_stops_a_preparation_and_ends_the_job(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, kind: str
) -> None:
    told = threading.Event()

    async def waits(ctx: PrepareContext) -> Ready:
        await gates.wait()
        return Ready()

    def looks(ctx: PrepareContext) -> Cancelled:
        gates.reached.append("gate")
        for _ in range(1500):
            if ctx.cancel_requested:
                told.set()
                return Cancelled()
            threading.Event().wait(0.01)
        raise AssertionError("it was not told")

    @app.task(prepare=waits if kind == "async" else looks)
    async def body() -> None:
        raise AssertionError("it was cancelled before it began")

    job = await body.enqueue()
    async with run_worker():
        await gates.until_reached()
        assert await job.cancel() == "requested"
        await until_status(aconn, job.id, "cancelled")
    assert told.is_set() == (kind == "plain")
    assert await outcomes(aconn, job.id) == ["cancelled"]


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_a_timeout_of_a_preparation_is_a_fault_of_it(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, kind: str
) -> None:
    over = threading.Event()

    async def waits() -> Ready:
        await gates.wait()
        return Ready()

    def sleeps() -> Ready:
        over.wait(0.5)
        return Ready()

    @app.task(prepare=waits if kind == "async" else sleeps, timeout="100ms", max_recoveries=0)
    async def body() -> int:
        return 1

    job = await body.enqueue()
    async with run_worker():
        incident = await until_held(aconn, job.id)
        assert incident["fault"]["type"] == "AttemptTimeout"
        row = await aconn.fetchrow("select attempt, releases from taskq.jobs where id = $1", job.id)
        assert tuple(row) == (0, 1)
        gates.open()


async def test_a_stopping_worker_hands_back_what_it_prepares(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    async def waits() -> Ready:
        await gates.wait()
        return Ready()

    @app.task(prepare=waits)
    async def body() -> int:
        return 1

    job = await body.enqueue()
    async with run_worker(grace=0.05):
        await gates.until_reached()
    assert await outcomes(aconn, job.id) == ["released"]
    gates.open()
    async with run_worker():
        assert await job.result(timeout=BOUND) == 1


async def test_one_that_cancels_itself_has_failed(app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    async def gives_up() -> Ready:
        raise asyncio.CancelledError

    @app.task(prepare=gives_up, max_recoveries=0)
    async def body() -> int:
        return 1

    job = await body.enqueue()
    async with run_worker():
        incident = await until_held(aconn, job.id)
        assert "cancelled by itself" in incident["fault"]["message"]


def hold_beginning(monkeypatch: pytest.MonkeyPatch, gates: Gates) -> None:
    """Have the first preparation of a job wait at the gate ``begin`` before the database is told of it."""
    begins = Preparer._begin

    async def later(self: Preparer, run: Running) -> Any:
        if run.claim.claim_epoch == 1:
            await gates.wait("begin")
        return await begins(self, run)

    monkeypatch.setattr(Preparer, "_begin", later)


async def test_one_that_fails_while_it_is_stopped_was_stopped(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    async def waits() -> Ready:
        try:
            await gates.wait()
        except asyncio.CancelledError:
            raise ValueError("on the way out") from None
        return Ready()

    @app.task(prepare=waits)
    async def body() -> int:
        return 1

    job = await body.enqueue()
    async with run_worker():
        await gates.until_reached()
        await job.cancel()
        await until_status(aconn, job.id, "cancelled")
    assert await aconn.fetchval("select count(*) from taskq.incidents") == 0


@pytest.mark.parametrize("what", ["lost", "without a lease", "cancelled", "by its own clock"])
async def test_a_claim_that_does_not_hold_any_more_is_not_prepared(
    app: TaskQ,
    run_worker: RunWorker,
    aconn: asyncpg.Connection,
    gates: Gates,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    epochs: list[int] = []

    def look(ctx: PrepareContext) -> Ready:
        epochs.append(ctx.claim_epoch)
        return Ready()

    @app.task(prepare=look)
    async def body() -> int:
        return 1

    hold_beginning(monkeypatch, gates)
    job = await body.enqueue()
    async with run_worker() as worker:
        await gates.until_reached("begin")
        if what == "lost":
            await declare_lost(aconn)
        elif what == "without a lease":
            await aconn.execute("update taskq.workers set status = 'lost', ended_at = now()")
        elif what == "cancelled":
            # Nobody tells the worker: the database does.
            await aconn.execute("update taskq.jobs set cancel_requested_at = now() where id = $1", job.id)
        else:
            monkeypatch.setattr(worker.parts.executor._preparer, "_may_go_on", lambda: False)
        gates.open("begin")
        if what == "cancelled":
            await until_status(aconn, job.id, "cancelled")
        else:
            if what == "by its own clock":
                await aeventually(lambda: worker.counts.released >= 1, BOUND)
                monkeypatch.setattr(worker.parts.executor._preparer, "_may_go_on", lambda: True)
            assert await job.result(timeout=BOUND) == 1
    assert 1 not in epochs


async def test_a_worker_that_stops_before_it_was_told_to_begin_calls_nothing(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> Ready:
        raise AssertionError("it is not called")

    @app.task(prepare=look)
    async def body() -> int:
        return 1

    hold_beginning(monkeypatch, gates)
    job = await body.enqueue()
    async with run_worker(grace=0.01) as worker:
        await gates.until_reached("begin")
        worker.stop()
        await aeventually(lambda: any(run.interrupt for run in worker.parts.executor.running.values()), BOUND)
        gates.open("begin")
    assert await outcomes(aconn, job.id) == ["released"]
    assert await aconn.fetchval("select count(*) from taskq.incidents") == 0


async def test_a_worker_that_stops_while_it_is_told_to_begin_calls_nothing(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look() -> Ready:
        raise AssertionError("it is not called")

    @app.task(prepare=look)
    async def body() -> int:
        return 1

    hold_beginning(monkeypatch, gates)
    job = await body.enqueue()
    waits = (
        "select count(*) = 1 from pg_stat_activity where application_name like '%taskq prepare'"
        " and datname = current_database() and wait_event_type = 'Lock'"
    )

    async def asks() -> bool:
        # A transaction looks at the sessions as they were at its first look.
        await aconn.execute("select pg_stat_clear_snapshot()")
        return bool(await aconn.fetchval(waits))

    async with run_worker(grace=0.01) as worker:
        await gates.until_reached("begin")
        async with aconn.transaction():
            await aconn.execute("select from taskq.jobs where id = $1 for update", job.id)
            gates.open("begin")
            await aeventually(asks, BOUND)
            worker.stop()
            await aeventually(lambda: any(run.interrupt for run in worker.parts.executor.running.values()), BOUND)
    assert await outcomes(aconn, job.id) == ["released"]
    assert await aconn.fetchval("select answer from taskq.preparations where job_id = $1", job.id) is None


async def test_what_has_nothing_left_is_held_again_and_not_called(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    calls: list[int] = []

    def look() -> Ready:
        calls.append(1)
        raise ValueError("no")

    @app.task(prepare=look, max_recoveries=0)
    async def body() -> int:
        return 1

    job = await body.enqueue()
    async with run_worker():
        await until_held(aconn, job.id)
        # Woken by hand, past its incident.
        await aconn.execute("update taskq.jobs set status = 'pending', held_reason = null where id = $1", job.id)
        await aeventually(lambda: len(events.of("job.not_prepared")) == 2, BOUND)
        await until_held(aconn, job.id)
    assert calls == [1]
    assert [e["answer"] for e in events.of("job.not_prepared")] == ["failed", "exhausted"]
    assert await outcomes(aconn, job.id) == ["released", "released"]


async def test_an_answer_whose_connection_is_lost_is_sent_again(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    async def waits() -> Ready:
        await gates.wait()
        return Ready({"x": 1})

    @app.task(prepare=waits)
    async def body(ctx: JobContext) -> int:
        return int(ctx.facts["x"])

    job = await body.enqueue()
    kill = (
        "select pg_terminate_backend(pid) from pg_stat_activity where application_name like '%taskq prepare'"
        " and datname = current_database() and wait_event_type = 'Lock'"
    )
    async with run_worker():
        await gates.until_reached()
        async with aconn.transaction():
            await aconn.execute("select from taskq.jobs where id = $1 for update", job.id)
            gates.open()

            async def killed() -> bool:
                # A transaction looks at the sessions as they were at its first look.
                await aconn.execute("select pg_stat_clear_snapshot()")
                return bool(await aconn.fetch(kill))

            await aeventually(killed, BOUND)
        assert await job.result(timeout=BOUND) == 1
    assert await outcomes(aconn, job.id) == ["succeeded"]


@pytest.mark.parametrize("always", [False, True])
async def test_an_answer_that_the_database_refuses_is_a_fault_and_is_not_sent_for_ever(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, always: bool
) -> None:
    """A check that only this test knows stands for whatever cannot be stored."""
    await aconn.execute(
        "alter table taskq.preparations add constraint refused check (answer is null or answer = 'failed' and"
        f" {'claim_epoch > 1' if always else 'true'})"
    )
    calls: list[int] = []

    def look(ctx: PrepareContext) -> Ready:
        calls.append(ctx.claim_epoch)
        return Ready({"x": 1})

    @app.task(prepare=look, max_recoveries=0)
    async def body() -> int:
        return 1

    job = await body.enqueue()
    async with run_worker():
        incident = await until_held(aconn, job.id)
        assert incident["fault"]["type"] == "PreparationInvalid"
        assert "23514" in incident["fault"]["message"]
    # Refused even as a fault it is handed back, and told at the next claim.
    assert calls == ([1, 2] if always else [1])


async def test_a_run_that_somebody_is_at_holds_up_its_own_answer_alone(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    async def waits(n: int) -> Pause | Ready:
        await gates.wait(f"gate{n}")
        return Pause("here") if n == 1 else Ready()

    @app.task(prepare=waits)
    async def body(n: int) -> int:
        return n

    @app.workflow
    def flow(n: int) -> int:
        return body.step(n)

    run = await flow.start(1)
    async with run_worker():
        await gates.until_reached("gate1")
        async with aconn.transaction():
            await aconn.execute("select from taskq.runs where id = $1 for update", run.id)
            gates.open("gate1")
            other = await body.enqueue(2)
            gates.open("gate2")
            assert await other.result(timeout=BOUND) == 2
        assert await aeventually(lambda: paused(aconn, run.id), BOUND)


async def paused(aconn: asyncpg.Connection, run: UUID) -> bool:
    return bool(await aconn.fetchval("select status = 'paused' from taskq.runs where id = $1", run))


async def test_a_preparation_that_is_left_behind_by_a_closing_worker_is_left(app: TaskQ) -> None:
    class Closing:
        closing = True

        async def call(self, *_: Any) -> Any:
            raise asyncio.CancelledError

        async def until_done(self, future: asyncio.Future[Any]) -> Any:
            return await future

    def look() -> Ready:
        return Ready()

    @app.task(prepare=look)
    async def body() -> int:
        return 1

    assert body.preparation is not None
    preparer = Preparer({}, Connection("postgresql://nobody@127.0.0.1:1/x", "x"), lambda: True)
    run = Running(claim_of("body"), body.policy, None, 0.0)
    with pytest.raises(asyncio.CancelledError):
        await preparer._answer(run, body.preparation, {}, [], {}, Closing())


@pytest.mark.parametrize("at", ["while it is prepared", "before its answer is sent"])
async def test_a_claim_that_was_taken_away_begins_no_attempt(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, at: str
) -> None:
    bodies: list[int] = []

    async def waits(ctx: PrepareContext) -> Ready:
        if ctx.claim_epoch == 1:
            # Swallowed, so that its answer comes all the same.
            with contextlib.suppress(asyncio.CancelledError):
                await gates.wait()
        return Ready()

    @app.task(prepare=waits)
    async def body(ctx: JobContext) -> int:
        bodies.append(ctx.claim_epoch)
        return ctx.claim_epoch

    job = await body.enqueue()
    async with run_worker() as worker:
        await gates.until_reached()
        await declare_lost(aconn, worker.worker_id)
        if at == "before its answer is sent":
            gates.open()
        assert await job.result(timeout=BOUND) == 2
        gates.open()
    assert bodies == [2]
    assert (await outcomes(aconn, job.id))[:1] == ["lost"]


async def test_a_pause_that_comes_while_it_is_prepared_keeps_it_from_its_attempt(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    async def waits(ctx: PrepareContext) -> Ready:
        await gates.wait()
        return Ready()

    @app.task(prepare=waits)
    async def body() -> int:
        return 1

    @app.workflow
    def flow() -> int:
        return body.step()

    run = await flow.start()
    async with run_worker():
        await gates.until_reached()
        [node] = await run.nodes()
        assert node.status == "preparing"
        assert await run.pause("looking") == "paused"
        gates.open()

        async def is_held() -> bool:
            return [n.status for n in await run.nodes()] == ["held"]

        await aeventually(is_held, BOUND)
        assert await run.resume("seen") == "resumed"
        assert await run.result(timeout=BOUND) == 1


async def test_a_durable_body_is_prepared_before_each_of_its_attempts(app: TaskQ, run_worker: RunWorker) -> None:
    epochs: list[int] = []

    def look(ctx: PrepareContext) -> Ready:
        epochs.append(ctx.claim_epoch)
        return Ready({"looks": len(epochs)})

    @app.task(prepare=look)
    async def body(ctx: JobContext) -> int:
        # So long that it ends the attempt.
        await ctx.sleep("1500ms")
        return int(ctx.facts["looks"])

    async with run_worker():
        assert await (await body.enqueue()).result(timeout=BOUND) == 2
    assert epochs == [1, 2]


async def test_the_testing_kit_prepares_as_a_worker_does(app: TaskQ) -> None:
    answers: list[Any] = [Unmet("later", retry_in="1h"), Ready({"x": 1})]

    @app.task(prepare=lambda: answers.pop(0), checks=["later"])
    async def body(ctx: JobContext) -> int:
        return int(ctx.facts["x"])

    job = await body.enqueue()
    assert (await drain(app)).waiting == 1
    done = await drain(app, later=True)
    assert (done.succeeded, await job.result(timeout=BOUND)) == (1, 1)


# Recoveries that are exhausted ---------------------------------------------------------------------------------------


async def test_the_leader_holds_what_was_lost_once_too_often(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    @app.task(on_exhausted="hold", max_recoveries=0)
    async def body() -> int:
        return 1

    @app.workflow
    def flow() -> int:
        return body.step()

    run = await flow.start()
    worker = await aconn.fetchval("select taskq.register_worker('gone', 'h', 1, '{default}', '{body}', 9, 3, '0', 1)")
    await aconn.execute("update taskq.workers set lease_expires_at = now() + interval '1 h' where id = $1", worker)
    claim = "select job_id from taskq.claim($1, 1, '{body}', '{default}', '{5}', '{-infinity}', $2)"
    job = await aconn.fetchval(claim, worker, [UUID(int=0)])
    await aconn.execute("update taskq.workers set lease_expires_at = '-infinity' where id = $1", worker)
    async with run_worker():
        incident = await until_held(aconn, job)
        assert (incident["code"], (await run.info()).status) == ("recovery_exhausted", "paused")
        await aeventually(lambda: len(events.of("job.settled")) == 1, BOUND)
        assert events.of("job.settled")[0]["became"] == "held"
        assert await asyncio.to_thread(run.grant_sync, incident["id"], "the machine was replaced") == "granted"
        assert await run.result(timeout=BOUND) == 1
    assert events.of("incident.granted")[0]["incident"] == str(incident["id"])


# Declarations --------------------------------------------------------------------------------------------------------


def test_a_preparation_that_does_not_fit_is_refused_where_it_is_declared(app: TaskQ) -> None:
    def none() -> Ready:
        return Ready()

    def other(m: int) -> Ready:
        return Ready()

    def late(n: int, ctx: PrepareContext) -> Ready:
        return Ready()

    def body(n: int) -> int:
        return n

    async def gives():  # type: ignore[no-untyped-def]
        yield Ready()

    cases: list[tuple[dict[str, Any], str]] = [
        ({"prepare": none}, "does not take n"),
        ({"prepare": other}, "does not take n"),
        ({"prepare": late}, "takes its context ctx elsewhere than first"),
        ({"prepare": "look"}, "is no plain function"),
        ({"prepare": gives}, "is a generator"),
        ({"prepare": lambda n: Ready(), "checks": "bank"}, "give their names"),
        ({"prepare": lambda n: Ready(), "checks": 7}, "give their names"),
        ({"prepare": lambda n: Ready(), "checks": ["a b"]}, "a check is 'a b'"),
        ({"checks": ["a"]}, "says nothing without a preparation"),
    ]
    for options, words in cases:
        with pytest.raises(TaskDefinitionError, match=words):
            app.task(name="t", **options)(body)
    assert app.tasks == {} or "t" not in app.tasks


def test_what_becomes_of_exhausted_recoveries_is_one_of_two_and_part_of_the_policy(app: TaskQ) -> None:
    def body() -> None: ...

    with pytest.raises(InvalidPolicy, match="on_exhausted is 'pause'; give 'fail' or 'hold'"):
        app.task(on_exhausted="pause")(body)  # type: ignore[call-overload]
    holds, fails = ExecutionPolicy(on_exhausted="hold"), ExecutionPolicy()
    assert ExecutionPolicy.from_spec(holds.spec()) == holds
    # One that says nothing of it keeps the id that it had.
    assert ("on_exhausted" in fails.spec(), holds.id != fails.id) == (False, True)

"""Hooks, asked by a real worker about attempts whose outcome is unknown: each answer, and each way to fail at one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Events, Gates, RunWorker, outcomes, status_of, until_status

from taskq import (
    AlreadyResolved,
    DidNotHappen,
    Happened,
    JobContext,
    OutcomeUnknown,
    ReconcileContext,
    Retry,
    StaleAttempt,
    StillUnknown,
    TaskQ,
    constant,
)
from taskq.telemetry.events import OF_JOB
from taskq.testing import drain

pytestmark = pytest.mark.anyio

NEVER = "00000000-0000-0000-0000-000000000000"
SOON = Retry(max_attempts=3, backoff=constant("20ms"))


class Provider:
    """What the hook is asked, and what it answers: each in turn, the last again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[ReconcileContext, int, str]] = []

    def look(self, ctx: ReconcileContext, n: int, text: str) -> Any:
        self.asked.append((ctx, n, text))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def declare(app: TaskQ, hook: Callable[..., Any] | None, **options: Any) -> list[str]:
    """A task ``pay`` whose body is never to run but by a hook's word; gives the keys with which it ran."""
    ran: list[str] = []

    async def pay(ctx: JobContext, n: int, text: str = "dear") -> int:
        ran.append(ctx.idempotency_key)
        return n

    chosen: dict[str, Any] = {"retry": Retry(1, constant("20ms"))}
    chosen |= {"reconcile_retry": SOON} if hook is not None else {}
    app.task(reconcile=hook, effect_class="side_effecting", **chosen, **options)(pay)  # type: ignore[call-overload]
    return ran


def hook_of(provider: Provider, *, sync: bool) -> Callable[..., Any]:
    def look(ctx: ReconcileContext, n: int, text: str) -> Any:
        return provider.look(ctx, n, text)

    async def look_async(ctx: ReconcileContext, n: int, text: str) -> Any:
        await asyncio.sleep(0)
        return provider.look(ctx, n, text)

    return look if sync else look_async


async def worker_of_the_past(aconn: asyncpg.Connection, task: str) -> UUID:
    """A worker that is taken for alive, and whose lease does not make others wait."""
    worker: UUID = await aconn.fetchval(
        "select taskq.register_worker('gone', 'h', 1, '{default}', $1, 9, 9, '0', 1)", [task]
    )
    await aconn.execute("update taskq.workers set lease_expires_at = now() + interval '1 hour' where id = $1", worker)
    return worker


async def make_unknown(
    app: TaskQ, aconn: asyncpg.Connection, n: int = 7, *, cancelled: bool = False, lane: int = 5
) -> UUID:
    """A job that another worker has claimed, of the priority ``lane``, and of which nothing more was heard."""
    job = (await app.tasks["pay"].enqueue(n)).id
    worker = await worker_of_the_past(aconn, "pay")
    claimed = await aconn.fetch(
        "select job_id from taskq.claim($1, 9, '{pay}', '{default}', array[$3::smallint], '{-infinity}', $2)",
        worker,
        [NEVER],
        lane,
    )
    assert [row["job_id"] for row in claimed] == [job]
    await aconn.fetch("select * from taskq.start_effects($1, $2, '{1}')", worker, [job])
    if cancelled:
        await aconn.execute("select taskq.cancel($1)", job)
    await aconn.execute("select taskq.enter_unknown(j, 'worker_lost', null) from taskq.jobs j where j.id = $1", job)
    return job


async def publish(app: TaskQ, aconn: asyncpg.Connection) -> None:
    """What a worker publishes at boot."""
    for task in app.tasks.values():
        of, hook = task.policy, task.reconcile_task
        await aconn.execute("select taskq.ensure_policy($1, 1, $2::text::jsonb)", of.id, json.dumps(of.spec()))
        await aconn.execute(
            "select taskq.publish_task(null, $1, $2, $3, $4, $5, $6, $7, $8)",
            task.name,
            of.queue,
            of.priority,
            of.retry.max_attempts,
            of.effect_class,
            of.id,
            task.required_worker_schema,
            None if hook is None else hook.name,
        )


async def asking(aconn: asyncpg.Connection, job: UUID) -> dict[str, Any]:
    """The job that asks about an attempt, wherever it is."""
    row = await aconn.fetchrow(
        "select a.* from taskq.unknowns u join taskq.all_jobs a on a.id = u.reconcile_job where u.job_id = $1", job
    )
    assert row is not None
    return dict(row)


@pytest.mark.parametrize("sync", [True, False])
async def test_happened_makes_it_succeeded_with_the_result(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events, sync: bool
) -> None:
    provider = Provider(Happened(12))
    ran = declare(app, hook_of(provider, sync=sync))
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    async with run_worker():
        row = await until_status(aconn, job, "succeeded")
        ask = await asking(aconn, job)
        await until_status(aconn, ask["id"], "succeeded")
    assert (row["result"], await outcomes(aconn, job), ran) == ("12", ["resolved"], [])
    [(ctx, n, text)] = provider.asked
    assert (n, text) == (7, "dear")
    assert (ctx.job_id, ctx.task, ctx.claim_epoch, ctx.attempt, ctx.generation) == (job, "pay", 1, 1, 0)
    assert ctx.reason == "worker_lost"
    [noted] = await aconn.fetch("select actor, reason from taskq.audit where subject = $1", str(job))
    assert (noted["actor"], noted["reason"]) == (f"reconcile:{ask['id']}", "the reconcile hook answered Happened")
    [told] = events.of("job.resolved")
    assert set(OF_JOB) <= set(told)
    assert (told["job_id"], told["became"], told["reconcile_job"]) == (str(job), "succeeded", str(ask["id"]))


async def test_did_not_happen_runs_it_again_with_the_key_that_the_hook_was_told(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    provider = Provider(DidNotHappen())
    ran = declare(app, hook_of(provider, sync=False))
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    async with run_worker():
        assert (await until_status(aconn, job, "succeeded"))["result"] == "7"
    assert await outcomes(aconn, job) == ["resolved", "succeeded"]
    [(ctx, _, _)] = provider.asked
    assert ran == [ctx.idempotency_key]


@pytest.mark.parametrize("sync", [True, False])
async def test_a_body_that_never_knows_and_a_hook_that_always_says_it_did_not_happen_come_to_an_end(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events, sync: bool
) -> None:
    ran: list[int] = []
    provider = Provider(DidNotHappen())

    async def pay(ctx: JobContext, n: int, text: str = "dear") -> int:
        ran.append(ctx.claim_epoch)
        raise OutcomeUnknown("no answer")

    bounds: dict[str, Any] = {"max_recoveries": 2, "retry": Retry(1, constant("20ms")), "reconcile_retry": SOON}
    app.task(effect_class="side_effecting", reconcile=hook_of(provider, sync=sync), **bounds)(pay)
    job = (await app.tasks["pay"].enqueue(7)).id
    async with run_worker():
        row = await until_status(aconn, job, "failed")
        for ask in await aconn.fetch("select reconcile_job from taskq.unknowns where job_id = $1", job):
            await until_status(aconn, ask["reconcile_job"], "succeeded")
    assert json.loads(row["error"])["type"] == "RecoveryExhausted"
    assert ran == [1, 2, 3]
    assert await outcomes(aconn, job) == ["resolved"] * 3
    assert [told["became"] for told in events.of("job.resolved")] == ["pending", "pending", "failed"]


async def test_did_not_happen_cancels_what_was_to_be_cancelled(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    ran = declare(app, hook_of(Provider(DidNotHappen()), sync=True))
    await publish(app, aconn)
    job = await make_unknown(app, aconn, cancelled=True)
    async with run_worker():
        await until_status(aconn, job, "cancelled")
    assert (await outcomes(aconn, job), ran) == (["resolved"], [])


async def test_still_unknown_asks_again_and_uses_no_attempt_up(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    provider = Provider(StillUnknown("10ms"), StillUnknown(0), StillUnknown("20ms"), Happened(1))
    declare(app, hook_of(provider, sync=False))
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    async with run_worker():
        await until_status(aconn, job, "succeeded")
        row = await until_status(aconn, (await asking(aconn, job))["id"], "succeeded")
    assert (len(provider.asked), row["retry_afters"], row["attempt"]) == (4, 3, 0)


async def test_still_unknown_is_bounded_and_the_end_of_it_is_seen(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    provider = Provider(StillUnknown(0))
    declare(app, hook_of(provider, sync=False), max_retry_afters=2)
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    async with run_worker():
        await until_status(aconn, (await asking(aconn, job))["id"], "failed")
    assert (len(provider.asked), await status_of(aconn, job)) == (3, "unknown")
    [row] = await aconn.fetch("select * from taskq.unknown_outcomes")
    assert (row["job_id"], row["reconcile_status"]) == (job, "failed")
    assert "RetryAfterExhausted" in row["reconcile_error"]
    [told] = events.of("reconcile.exhausted")
    assert (told["job_id"], told["task"], told["claim_epoch"]) == (str(job), "pay", 1)
    assert told["reconcile_job"] == str(row["reconcile_job"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Happened("12"), "with a result that is none of the task's: result: Expected `int`, got `str`"),
        (Happened(object()), "with a result that is none of the task's"),
        (True, "answered with a bool, which says nothing"),
        (None, "answered with a NoneType"),
        (DidNotHappen, "answered with a type"),
        (ConnectionError("the provider is down"), "the provider is down"),
    ],
)
@pytest.mark.parametrize("sync", [True, False])
async def test_a_hook_that_fails_is_asked_again_and_resolves_nothing(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, wrong: object, said: str, sync: bool
) -> None:
    provider = Provider(wrong, Happened(3))
    declare(app, hook_of(provider, sync=sync))
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    async with run_worker():
        assert (await until_status(aconn, job, "succeeded"))["result"] == "3"
        ask = await until_status(aconn, (await asking(aconn, job))["id"], "succeeded")
    assert await outcomes(aconn, ask["id"]) == ["failed", "succeeded"]
    error = await aconn.fetchval("select error->>'message' from taskq.ledger where job_id = $1", ask["id"])
    assert said in error


async def test_a_hook_that_fails_every_time_leaves_it_unknown_and_seen(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    provider = Provider(ConnectionError("down"))
    ran = declare(app, hook_of(provider, sync=True))
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    async with run_worker():
        await until_status(aconn, (await asking(aconn, job))["id"], "failed")
    assert (len(provider.asked), await status_of(aconn, job), ran) == (3, "unknown", [])
    [told] = events.of("reconcile.exhausted")
    assert told["error"] == "ConnectionError: down"


async def test_a_deploy_that_adds_the_hook_has_it_asked_about_older_attempts(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str, events: Events
) -> None:
    declare(app, None)
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    assert await aconn.fetchval("select reconcile_job from taskq.unknowns") is None
    async with TaskQ(dsn) as new:
        declare(new, hook_of(Provider(Happened(1)), sync=False))
        async with run_worker(of=new):
            await until_status(aconn, job, "succeeded")
            await aeventually(lambda: events.of("reconcile.enqueued"))
    [told] = events.of("reconcile.enqueued")
    assert told["job_id"] == str(job)


@pytest.mark.parametrize("sync", [True, False])
async def test_a_decision_while_the_hook_is_asked_stands(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events, sync: bool
) -> None:
    opened = threading.Event()

    async def look(n: int, text: str) -> Happened[int]:
        await gates.wait()
        return Happened(99)

    def look_sync(n: int, text: str) -> Happened[int]:
        gates.reached.append("gate")
        assert opened.wait(BOUND)
        return Happened(99)

    declare(app, look_sync if sync else look)
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    async with run_worker():
        await gates.until_reached()
        assert await app.resolve(job, happened=True, result=1, reason="seen at the provider") == "succeeded"
        gates.open()
        opened.set()
        ask = await until_status(aconn, (await asking(aconn, job))["id"], "succeeded")
    assert (await app.get(job)).result == 1  # type: ignore[union-attr]
    assert '"answer": "overtaken"' in ask["result"]
    assert await outcomes(aconn, ask["id"]) == ["succeeded"]
    [told] = events.of("reconcile.overtaken")
    assert f"the outcome of job {job} was resolved before: succeeded, by" in told["why"]
    assert await aconn.fetchval("select count(*) from taskq.audit where action = 'resolve'") == 1


async def test_an_answer_for_an_old_attempt_does_not_touch_the_new_one(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    async def look(ctx: ReconcileContext, n: int, text: str) -> Happened[int]:
        await gates.wait(f"attempt {ctx.claim_epoch}")
        return Happened(ctx.claim_epoch)

    declare(app, look)
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    # The second attempt stays with a worker that tells nothing.
    await aconn.execute("update taskq.jobs set run_at = 'infinity' where id = $1", job)
    async with run_worker():
        await gates.until_reached("attempt 1")
        assert await app.resolve(job, happened=False, reason="closed the key") == "pending"
        await aconn.execute(
            "update taskq.jobs set status = 'running', claim_epoch = 2, claimed_by = $2, claimed_at = taskq.now(),"
            " effect_started_at = taskq.now() where id = $1",
            job,
            await worker_of_the_past(aconn, "pay"),
        )
        await aconn.execute("select taskq.enter_unknown(j, 'told', null) from taskq.jobs j where j.id = $1", job)
        gates.open("attempt 1")
        first = await aconn.fetchval("select reconcile_job from taskq.unknowns where claim_epoch = 1")
        row = await until_status(aconn, first, "succeeded")
        assert '"answer": "overtaken"' in row["result"]
        assert await outcomes(aconn, first) == ["succeeded"]
        assert await status_of(aconn, job) == "unknown"
        await gates.until_reached("attempt 2")
        gates.open("attempt 2")
        assert (await until_status(aconn, job, "succeeded"))["result"] == "2"
    [told] = events.of("reconcile.overtaken")
    assert "the decision is about attempt 1" in told["why"]


@pytest.mark.parametrize("sync", [True, False])
async def test_a_hook_is_not_asked_about_what_was_resolved_before(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, sync: bool
) -> None:
    provider = Provider(Happened(1))
    declare(app, hook_of(provider, sync=sync))
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    await app.resolve(job, happened=True, result=4, reason="seen", claim_epoch=1)
    with pytest.raises(AlreadyResolved) as caught:
        await app.resolve(job, happened=False, reason="not seen", claim_epoch=1)
    assert (caught.value.resolved_to, caught.value.claim_epoch, caught.value.job_id) == ("succeeded", 1, job)
    with pytest.raises(StaleAttempt) as stale:
        await app.resolve(job, happened=False, reason="not seen", claim_epoch=3)
    assert (stale.value.claim_epoch, stale.value.current_epoch) == (3, 1)
    async with run_worker():
        await until_status(aconn, (await asking(aconn, job))["id"], "succeeded")
    assert (provider.asked, (await app.get(job)).result) == ([], 4)  # type: ignore[union-attr]


async def test_a_hook_is_not_asked_about_an_attempt_that_did_not_happen_and_waits_to_be_run_again(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    provider = Provider(Happened(1))
    declare(app, hook_of(provider, sync=False))
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    await app.resolve(job, happened=False, reason="the key is closed")
    await aconn.execute("update taskq.jobs set run_at = now() + interval '1 hour' where id = $1", job)
    async with run_worker():
        await until_status(aconn, (await asking(aconn, job))["id"], "succeeded")
    assert (provider.asked, await status_of(aconn, job)) == ([], "pending")


async def test_a_worker_that_dies_while_it_asks_is_followed_by_one_that_asks_again(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    provider = Provider(Happened(1))
    declare(app, hook_of(provider, sync=False))
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    ask = (await asking(aconn, job))["id"]
    dead = await worker_of_the_past(aconn, "pay:reconcile")
    claimed = await aconn.fetch(
        "select job_id from taskq.claim($1, 9, '{pay:reconcile}', '{default}', '{9}', '{-infinity}', $2)",
        dead,
        [NEVER],
    )
    assert [row["job_id"] for row in claimed] == [ask]
    await aconn.execute("update taskq.workers set lease_expires_at = '-infinity' where id = $1", dead)
    async with run_worker(lease=1):
        await until_status(aconn, job, "succeeded")
        await until_status(aconn, ask, "succeeded")
    assert await outcomes(aconn, ask) == ["lost", "succeeded"]
    assert len(provider.asked) == 1


async def test_an_older_worker_that_starts_later_leaves_the_hook_to_be_asked(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str
) -> None:
    async def pay(n: int) -> int:
        raise OutcomeUnknown("no answer")

    def look(ctx: ReconcileContext, n: int) -> Happened[int]:
        return Happened(n)

    app.task(effect_class="side_effecting", reconcile=look)(pay)
    async with TaskQ(dsn) as older:
        older.task(effect_class="side_effecting")(pay)
        async with run_worker(), run_worker(of=older):
            job = await app.tasks["pay"].enqueue(7)
            assert await job.result(timeout=BOUND) == 7
    assert await aconn.fetchval("select reason from taskq.unknowns where job_id = $1", job.id) == "told"


async def test_a_hook_is_asked_ahead_of_the_backlog_of_its_queue(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    ran: list[str] = []

    async def look(ctx: ReconcileContext, n: int, text: str) -> Happened[int]:
        ran.append("hook")
        return Happened(1)

    @app.task
    async def ordinary(n: int) -> None:
        ran.append(f"{n}")
        await gates.wait(f"{n}")

    declare(app, look, priority=0)
    await app.enqueue_many([ordinary.job(n) for n in range(50)])
    async with run_worker(concurrency=1):
        await gates.until_reached("0")
        job = await make_unknown(app, aconn, lane=0)
        for n in range(50):
            gates.open(f"{n}")
        await until_status(aconn, job, "succeeded")
    assert ran[:2] == ["0", "hook"]


async def test_drain_asks_hooks_like_any_other_job(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    declare(app, hook_of(Provider(Happened(5)), sync=True))
    await publish(app, aconn)
    job = await make_unknown(app, aconn)
    await drain(app)
    assert (await app.get(job)).result == 5  # type: ignore[union-attr]

"""Cohorts with real workers: what runs at once, what starts when a slot comes free, and what is said at boot."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Events, Gates, RunWorker, outcomes, status_of, until_status

from taskq import Cohort, JobContext, PolicyLayer, Retry, TaskQ, constant
from taskq.errors import InvalidPolicy
from taskq.policy import ExecutionPolicy
from taskq.testing import drain
from taskq.worker import Worker
from taskq.worker.publish import cohorts_of

pytestmark = pytest.mark.anyio


async def test_on_two_workers_no_more_bodies_run_than_the_limit_lets(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    stripe = Cohort("stripe", limit=3)
    running: dict[str, int] = {"stripe": 0, "plain": 0}
    most = dict(running)

    async def body(of: str) -> None:
        running[of] += 1
        most[of] = max(most[of], running[of])
        await asyncio.sleep(0.002)
        running[of] -= 1

    @app.task(cohort=stripe, retry=Retry(2, constant(0)))
    async def charge(ctx: JobContext) -> None:
        await body("stripe")
        if ctx.attempt == 1 and ctx.job_id.int % 3 == 0:
            raise ValueError("the first time")

    @app.task(cohort=stripe, queue="other")
    def refund(n: int) -> int:
        return n

    @app.task
    async def plain() -> None:
        await body("plain")

    queues = ("default", "other")
    async with run_worker(concurrency=10, queues=queues), run_worker(concurrency=10, queues=queues):
        jobs = [*await app.enqueue_many([each.job() for _ in range(60) for each in (charge, plain)])]
        jobs += await app.enqueue_many([refund.job(n) for n in range(20)])
        for job in jobs:
            await job.result(timeout=BOUND)
    assert most["stripe"] == 3
    assert most["plain"] > 3
    # By record, where claims count and not bodies.
    over = await aconn.fetchval(
        "select max((select count(*) from taskq.attempts b join taskq.history i on i.id = b.job_id"
        " where i.cohort = 'stripe' and b.claimed_at <= a.claimed_at and b.ended_at > a.claimed_at))"
        " from taskq.attempts a join taskq.history h on h.id = a.job_id where h.cohort = 'stripe'"
    )
    assert over == 3


async def test_no_job_of_a_cohort_is_claimed_ahead_of_a_body_that_can_start(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    """Quick bodies are claimed ahead; one with a slot of its cohort must not wait behind them."""
    many = Cohort("many", limit=1000)

    @app.task(cohort=many)
    async def holds() -> None:
        await gates.wait()

    @app.task
    async def quick(n: int) -> int:
        return n

    async with run_worker(concurrency=2) as worker:
        await asyncio.gather(*(job.result(timeout=BOUND) for job in await app.enqueue_many(map(quick.job, range(500)))))
        jobs = await app.enqueue_many([holds.job() for _ in range(20)])
        await gates.until_reached(times=2)
        for _ in range(20):
            as_if_quick(worker)
            await asyncio.sleep(0.01)
        assert await aconn.fetchval(RUNNING) == 2
        assert worker.parts.executor.waiting == 0
        gates.open()
        for job in jobs:
            await job.result(timeout=BOUND)
    assert worker.counts.released == 0


async def test_one_that_takes_the_place_of_the_next_body_is_handed_back_where_none_ends(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task(cohort=Cohort("many", limit=1000))
    async def limited() -> None: ...

    @app.task
    async def slow() -> None:
        await gates.wait()

    async with run_worker(concurrency=2) as worker:
        jobs = await app.enqueue_many([slow.job(), slow.job()])
        await gates.until_reached(times=2)
        # Before there is a third: in the loop one may be there at the first look.
        seen = {await aconn.fetchval(RUNNING)}
        jobs += await app.enqueue_many([limited.job() for _ in range(5)])
        async with asyncio.timeout(BOUND):
            while worker.counts.released == 0:
                if worker.parts.executor.waiting == 0:
                    as_if_quick(worker)
                seen.add(await aconn.fetchval(RUNNING))
                await asyncio.sleep(0.01)
        assert seen == {2, 3}
        await aeventually(lambda: _is(aconn, RUNNING, 2), BOUND)
        gates.open()
        for job in jobs:
            await job.result(timeout=BOUND)
    assert worker.counts.released == 1


RUNNING = "select count(*) from taskq.jobs where status = 'running'"


def as_if_quick(worker: Worker) -> None:
    """As after many quick bodies: several hundred jobs are claimed ahead."""
    worker.parts.executor.mean_seconds = 0.0001
    worker.parts.exchanger._pace = 5000.0
    worker.parts.exchanger.notified()


async def _is(aconn: asyncpg.Connection, query: str, value: object) -> bool:
    return bool(await aconn.fetchval(query) == value)


async def test_quick_jobs_that_are_claimed_ahead_do_not_keep_a_cohort_from_its_turn(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    n = 6000

    @app.task(cohort=Cohort("some", limit=50), priority=7)
    async def first(n: int) -> int:
        return n

    @app.task
    async def quick(n: int) -> int:
        return n

    async with run_worker(concurrency=10) as worker:
        await app.enqueue_many([quick.job(i) for i in range(n)])
        await aeventually(lambda: worker.counts.succeeded > n // 6, BOUND)
        jobs = await app.enqueue_many([first.job(i) for i in range(100)])
        for job in jobs:
            await job.result(timeout=BOUND)
        await aeventually(lambda: worker.counts.succeeded == n + 100, 60)
    # By record: what had the priority was through before most of the rest.
    passed = await aconn.fetchval(
        "select count(*) from taskq.history h where h.task = 'quick' and h.claimed_at >"
        " (select max(f.finished_at) from taskq.history f where f.task = 'first')"
    )
    assert passed > n // 4, passed


async def test_a_slot_that_comes_free_wakes_a_worker_of_another_queue(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    one = Cohort("one", limit=1)

    @app.task(cohort=one)
    async def first() -> None:
        await gates.wait()

    @app.task(cohort=one, queue="other")
    async def second() -> None: ...

    # Polling would come too late for the bound of this test.
    async with (
        run_worker(queues=("default",), poll_interval=60, lease=120),
        run_worker(queues=("other",), poll_interval=60, lease=120) as other,
    ):
        holding = await first.enqueue()
        await gates.until_reached()
        waiting = await second.enqueue()
        await aeventually(lambda: other.parts.exchanger._asleep and other.parts.exchanger._naps > 2, BOUND)
        assert await status_of(aconn, waiting.id) == "pending"
        gates.open()
        await waiting.result(timeout=10)
        await holding.result(timeout=BOUND)


async def test_a_higher_limit_wakes_workers_too(app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    @app.task(cohort=Cohort("closed", limit=0))
    async def waits() -> None: ...

    async with run_worker(poll_interval=60, lease=120) as worker:
        job = await waits.enqueue()
        await aeventually(lambda: worker.parts.exchanger._asleep and worker.parts.exchanger._naps > 2, BOUND)
        assert await status_of(aconn, job.id) == "pending"
        await aconn.execute("select taskq.set_limit('closed', 1, 'open')")
        await job.result(timeout=10)


# What is said at boot -------------------------------------------------------------------------------------------------


def application(dsn: str, limit: int, cohort: str = "stripe") -> TaskQ:
    made = TaskQ(dsn)

    @made.task(cohort=Cohort(cohort, limit=limit))
    async def charge() -> None: ...

    return made


def said(events: Events) -> list[dict[str, Any]]:
    return [r for r in events.records if r["event"].startswith("limit.")]


async def test_boot_tells_of_a_changed_limit_and_of_an_operators_and_of_nothing_else(
    dsn: str, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    async with run_worker(of=application(dsn, 4)), run_worker(of=application(dsn, 4, "b")):
        pass
    assert said(events) == []
    async with run_worker(of=application(dsn, 6)):
        assert said(events) == [{"event": "limit.code_changed", "cohort": "stripe", "was": 4, "limit": 6}]
    events.records.clear()
    await aconn.execute("select taskq.set_limit('stripe', 2, 'slow'), taskq.set_limit('b', 4, 'as it is')")
    for _ in range(2):
        async with run_worker(of=application(dsn, 6)), run_worker(of=application(dsn, 4, "b")):
            assert said(events) == [
                {"event": "limit.operator_override", "cohort": "stripe", "operator_limit": 2, "code_limit": 6}
            ]
        events.records.clear()
    found = await aconn.fetch("select name, code_limit, operator_limit from taskq.limits order by 1")
    assert [tuple(row) for row in found] == [("b", 4, 4), ("stripe", 6, 2)]


async def test_who_only_enqueues_brings_the_limit_along(app: TaskQ, aconn: asyncpg.Connection) -> None:
    dynamic = Cohort("customer-7", limit=2)

    @app.task
    async def sends(n: int) -> int:
        return n

    await sends.using(cohort=dynamic).enqueue(1)
    await asyncio.to_thread(sends.using(cohort=Cohort("in-thread", limit=3)).enqueue_sync, 2)
    found = await aconn.fetch("select name, code_limit from taskq.limits order by 1")
    assert [tuple(row) for row in found] == [("customer-7", 2), ("in-thread", 3)]
    assert cohorts_of(app.tasks) == {"customer-7": 2, "in-thread": 3}


async def test_an_effect_runs_in_the_cohort_of_its_task(app: TaskQ, aconn: asyncpg.Connection) -> None:
    from taskq import TerminalEffect

    @app.task(cohort=Cohort("mail", limit=1))
    async def tell() -> None: ...

    @app.task(effects=[TerminalEffect(tell, on="succeeded")])
    async def works() -> None: ...

    await works.enqueue()
    done = await drain(app)
    assert done.succeeded == 2
    found = await aconn.fetch("select task, cohort from taskq.history order by 1")
    assert [tuple(row) for row in found] == [("tell", "mail"), ("works", None)]


async def test_a_node_of_a_run_obeys_its_cohort(app: TaskQ, aconn: asyncpg.Connection) -> None:
    @app.task
    async def part(n: int) -> int:
        return n

    only = Cohort("only", limit=1)

    @app.workflow
    def parts() -> list[int]:
        return [part.node(cohort=only).step(n) for n in range(4)]

    run = await parts.start()
    assert (await drain(app)).succeeded == 4
    assert await run.result(timeout=BOUND) == [0, 1, 2, 3]
    record = await aconn.fetch("select cohort, claimed_at, finished_at from taskq.history order by claimed_at")
    assert [row["cohort"] for row in record] == ["only"] * 4
    for before, after in zip(record, record[1:], strict=False):
        assert before["finished_at"] <= after["claimed_at"]


async def test_drain_leaves_what_a_limit_of_nobody_holds(app: TaskQ, aconn: asyncpg.Connection) -> None:
    @app.task(cohort=Cohort("closed", limit=0))
    async def never() -> None: ...

    job = await never.enqueue()
    assert (await drain(app, timeout=10)).waiting == 1
    assert await outcomes(aconn, job.id) == []
    await aconn.execute("select taskq.set_limit('closed', 1, 'open')")
    assert (await drain(app)).succeeded == 1
    await until_status(aconn, job.id, "succeeded")


# Declaring ------------------------------------------------------------------------------------------------------------


def test_layers_decide_the_cohort_and_the_nearest_wins() -> None:
    of_app, of_queue, of_task, of_call = (Cohort(name, limit=1) for name in ("app", "queue", "task", "call"))
    app = TaskQ("x", defaults=PolicyLayer(cohort=of_app), queues={"q": PolicyLayer(cohort=of_queue)})

    @app.task
    def a() -> None: ...
    @app.task(queue="q")
    def b() -> None: ...
    @app.task(queue="q", cohort=of_task)
    def c() -> None: ...
    @app.task(cohort=None)
    def d() -> None: ...

    assert [t.policy.cohort for t in (a, b, c, d)] == [of_app, of_queue, of_task, None]
    assert c.using(cohort=of_call).job().spec.policy.cohort == of_call
    assert c.using(cohort=None).job().spec.policy.cohort is None
    assert set(app.cohorts) == {"app", "queue", "task", "call"}


def test_two_limits_under_one_name_are_refused_with_both_places() -> None:
    app = TaskQ("x")
    one, other = Cohort("stripe", limit=4), Cohort("stripe", limit=5)

    @app.task(cohort=one)
    def a() -> None: ...

    expected = rf"limit 4 at {__name__}:\d+ and limit 5 at {__name__}:\d+"
    with pytest.raises(InvalidPolicy, match=expected):
        app.task(name="b", cohort=other)
    with pytest.raises(InvalidPolicy, match=expected):
        a.using(cohort=other)
    with pytest.raises(InvalidPolicy, match=expected):
        TaskQ("x", queues={"q": PolicyLayer(cohort=one), "r": PolicyLayer(cohort=other)})
    app.task(name="c", cohort=Cohort("stripe", limit=4))(lambda_of())


def lambda_of() -> Any:
    def c() -> None: ...

    return c


@pytest.mark.parametrize("limit", [-1, 1.5, True, "4", None, 2**31])
def test_a_limit_is_a_whole_number_from_0(limit: Any) -> None:
    with pytest.raises(InvalidPolicy, match="limit of cohort 'a' is"):
        Cohort("a", limit=limit)


def test_a_cohort_has_a_name_and_is_given_as_one() -> None:
    with pytest.raises(InvalidPolicy, match="the name of a cohort is 'a b'"):
        Cohort("a b", limit=1)
    wrong: Any = "stripe"
    with pytest.raises(InvalidPolicy, match="cohort is 'stripe'; give Cohort"):
        ExecutionPolicy(cohort=wrong)


def test_the_policy_keeps_the_name_and_not_the_limit() -> None:
    policies = [ExecutionPolicy(cohort=Cohort("a", limit=n)) for n in (1, 2)]
    assert policies[0].id == policies[1].id != ExecutionPolicy().id
    read = ExecutionPolicy.from_spec(policies[0].spec())
    assert read.cohort is not None
    assert (read.cohort.name, read.cohort.limit) == ("a", None)
    assert read.id == policies[0].id
    assert "cohort" not in ExecutionPolicy().spec()

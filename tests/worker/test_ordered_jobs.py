"""Ordering keys with real workers: bodies of one key never overlap, and each gets its turn in order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import Gates, RunWorker, until_status

from taskq import JobContext, JobFailed, OutcomeUnknown, Retry, Snooze, TaskQ, constant
from taskq.errors import InvalidPolicy, InvalidRequest

pytestmark = pytest.mark.anyio

KEYS, JOBS = 10, 200


async def attempts_by_key(aconn: asyncpg.Connection) -> dict[str, list[Any]]:
    """Every attempt on record, by key, in the order of the claims."""
    found = await aconn.fetch(
        "select h.ordering_key, a.job_id, a.claim_epoch, a.outcome, a.claimed_at, a.ended_at from taskq.attempts a"
        " join taskq.history h on h.id = a.job_id order by a.claimed_at, a.ended_at"
    )
    lines: dict[str, list[Any]] = defaultdict(list)
    for row in found:
        lines[row["ordering_key"]].append(row)
    return lines


@pytest.mark.parametrize("ordering", ["halt", "continue"])
async def test_200_jobs_of_10_keys_on_two_workers_run_in_order(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, ordering: Any
) -> None:
    running: set[int] = set()
    seen: set[UUID] = set()

    @app.task(ordering=ordering, retry=Retry(max_attempts=2, backoff=constant("20ms")))
    async def step(ctx: JobContext, key: int, n: int) -> int:
        assert key not in running
        running.add(key)
        try:
            first = ctx.job_id not in seen
            seen.add(ctx.job_id)
            if n % 7 == 3 and first:
                raise ValueError("the first time")
            if n % 7 == 5 and first:
                raise Snooze("5ms")
            # Under halt the rest of the key would wait for an operator.
            if n % 7 == 6 and ordering == "continue":
                raise ValueError("every time")
            return n
        finally:
            running.discard(key)

    async with run_worker(concurrency=10), run_worker(concurrency=10):
        requests = [step.using(ordering_key=f"k{i % KEYS}").job(i % KEYS, i // KEYS) for i in range(JOBS)]
        jobs = [*await app.enqueue_many(requests[: JOBS // 2])]
        for request in requests[JOBS // 2 :]:
            jobs += await app.enqueue_many([request])
        left = "select count(*) from taskq.jobs"
        await aeventually(lambda: _none_left(aconn, left), 60)

    lines = await attempts_by_key(aconn)
    assert sorted(lines) == sorted(f"k{n}" for n in range(KEYS))
    for key, record in lines.items():
        for before, after in zip(record, record[1:], strict=False):
            assert before["ended_at"] <= after["claimed_at"], (key, before, after)
        first_turns = [row["job_id"] for row in record if row["claim_epoch"] == 1]
        in_order = [job.id for i, job in enumerate(jobs) if f"k{i % KEYS}" == key]
        assert first_turns == in_order
        if ordering == "halt":
            # Nobody passes one that is tried again.
            assert [row["job_id"] for row in record] == [
                job for n, job in enumerate(in_order) for _ in range(2 if n % 7 in (3, 5) else 1)
            ]
    statuses = dict(await aconn.fetch("select status, count(*) from taskq.history group by 1"))
    failed = 0 if ordering == "halt" else sum(1 for i in range(JOBS) if (i // KEYS) % 7 == 6)
    assert statuses == {"succeeded": JOBS - failed} | ({"failed": failed} if failed else {})


async def _none_left(aconn: asyncpg.Connection, query: str) -> bool:
    return await aconn.fetchval(query) == 0


async def test_a_turn_that_an_open_enqueue_delays_is_given_when_it_has_ended(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    @app.task
    async def step(n: int) -> int:
        if n == 1:
            await gates.wait()
        return n

    ordered = step.using(ordering_key="k")
    # The leader looks every five seconds, but at ordering keys every second.
    async with run_worker(lease=30):
        first = await ordered.enqueue(1)
        await gates.until_reached()
        async with aconn.transaction():
            second = await ordered.using(connection=aconn).enqueue(2)
            gates.open()
            # The end does not wait for this transaction.
            assert await first.result(timeout=15) == 1
        assert await second.result(timeout=15) == 2


async def test_the_leader_gives_all_turns_that_are_due_not_one_batch_a_second(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def step() -> None: ...

    await step.using(ordering_key="known").enqueue()
    async with run_worker(queues=("served",), lease=60) as worker:
        async with aconn.transaction():
            await aconn.execute("set local session_replication_role = replica")
            await aconn.execute(
                "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload, status,"
                " held_reason, ordering_key, ordering_halt)"
                " select now(), now(), 1, 'elsewhere', 'step', policy_id, '{}', 'held', 'ordering', 'k' || n, false"
                " from taskq.jobs, generate_series(1, 1200) n where ordering_key = 'known'"
            )
            await aconn.execute(
                "insert into taskq.ordering_keys select ordering_key, now() from taskq.jobs on conflict do nothing"
            )
            await aconn.execute("insert into taskq.ordering_rechecks select ordering_key, now() from taskq.jobs")
        await worker.parts.maintenance._sweep_orderings()
        held = "select count(*) from taskq.jobs where status = 'held'"
        assert await aconn.fetchval(held) == 0
        assert await aconn.fetchval("select count(*) from taskq.ordering_rechecks") == 0


async def test_a_halted_key_goes_on_when_its_job_is_reopened_and_succeeds(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    broken = True

    @app.task(ordering="halt", max_attempts=1)
    async def step(n: int) -> int:
        if n == 1 and broken:
            raise ValueError("on purpose")
        return n

    ordered = step.using(ordering_key="k")
    async with run_worker():
        first, second = await ordered.enqueue(1), await ordered.enqueue(2)
        with pytest.raises(JobFailed):
            await first.result(timeout=15)
        found = await app.get(second.id)
        assert found is not None
        assert (found.status, found.held_reason, found.ordering_key) == ("held", "ordering", "k")
        broken = False
        assert await app.retry(first.id) == "reopened"
        assert await second.result(timeout=15) == 2
        assert await first.result(timeout=15) == 1


async def test_a_job_that_snoozes_lets_the_next_go_on_and_comes_back(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    snoozed = False

    @app.task
    async def step(n: int) -> int:
        nonlocal snoozed
        if n == 1 and not snoozed:
            snoozed = True
            await gates.wait("both are enqueued")
            raise Snooze("300ms")
        if n == 2:
            await gates.wait()
        return n

    ordered = step.using(ordering_key="k")
    async with run_worker():
        first, second = await ordered.enqueue(1), await ordered.enqueue(2)
        gates.open("both are enqueued")
        await gates.until_reached()
        assert (await until_status(aconn, first.id, "held"))["held_reason"] == "ordering"
        gates.open()
        assert await second.result(timeout=15) == 2
        assert await first.result(timeout=15) == 1


async def test_a_key_that_is_none_is_refused_before_anything_is_sent(app: TaskQ) -> None:
    @app.task
    async def step() -> None: ...

    for key in ("", "x" * 513, "\0", 7):
        with pytest.raises(InvalidRequest, match="ordering_key"):
            step.using(ordering_key=key)  # type: ignore[arg-type]
    assert step.using(ordering_key=None).job().options.ordering_key is None
    with pytest.raises(InvalidPolicy, match="ordering is 'stop'"):
        app.task(name="other", ordering="stop")(step.fn)  # type: ignore[call-overload]


async def test_a_side_effecting_job_halts_its_key_and_one_that_is_told_of_lets_it_go_on(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task(effect_class="side_effecting")
    async def pay(n: int) -> int:
        if n == 1:
            raise OutcomeUnknown("the line went dead")
        if n == 2:
            raise ValueError("refused")
        return n

    ordered = pay.using(ordering_key="k")
    async with run_worker():
        jobs = [await ordered.enqueue(n) for n in (1, 2, 3)]
        await until_status(aconn, jobs[0].id, "unknown")
        assert [await job.status() for job in jobs] == ["unknown", "held", "held"]
        await app.resolve(jobs[0].id, happened=True, result=1, reason="asked the bank")
        with pytest.raises(JobFailed):
            await jobs[1].result(timeout=15)
        assert await jobs[2].status() == "held"
        assert await aconn.fetchval("select taskq.resume_ordering('k', 'not needed')") == "resumed"
        assert await jobs[2].result(timeout=15) == 3

"""Runs of which more becomes ready at once than one transaction gives jobs, on real workers."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest
from helpers import aeventually
from runs_kit import edge, node, plan_text
from worker_kit import BOUND, Events, RunWorker, until_status

from taskq import TaskQ
from taskq.worker import maintenance
from taskq.workflow.plan import MOST_NODES

pytestmark = pytest.mark.anyio

FEW = (
    "create or replace function taskq.ready_at_once(p_run taskq.runs) returns integer language sql immutable"
    " as 'select 2'"
)


async def fan(app: TaskQ, aconn: asyncpg.Connection, n: int) -> str:
    """A first node, and others in a queue that nobody serves: all of them become ready in one end, and stay so."""
    await (await app._open_async()).ensure_policy(app.resolve_policy())
    nodes: list[dict[str, Any]] = [node("first", queue="default")]
    nodes += [node(f"n{ix}", task="member", queue="parked") for ix in range(1, n)]
    for each in nodes:
        each["job"]["policy_id"] = app.resolve_policy().id
    text = plan_text(nodes, [edge(0, ix) for ix in range(1, n)])
    return str(await aconn.fetchval("select taskq.store_plan($1)", text))


async def all_made(aconn: asyncpg.Connection, n: int, within: float = BOUND) -> None:
    async def made() -> bool:
        found = await aconn.fetchval("select count(*) from taskq.jobs where queue = 'parked' and status = 'pending'")
        return bool(found == n - 1)

    await aeventually(made, within)


def with_tasks(app: TaskQ) -> None:
    @app.task
    async def first() -> None: ...

    @app.task
    async def member() -> None: ...


async def test_a_fan_out_at_the_bound_of_a_plan_is_made_by_the_leader_once_it_is_told(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    # It looks by itself once in ten minutes: what is made is made because somebody told it.
    monkeypatch.setattr(maintenance, "LONGEST_PAUSE", 600.0)
    with_tasks(app)
    plan = await fan(app, aconn, MOST_NODES)
    async with run_worker(lease=1800, queues=("default",)):
        run = await aconn.fetchval("select run_id from taskq.start_run($1, '{}')", plan)
        await all_made(aconn, MOST_NODES, within=120)
        made = await aconn.fetch(
            "select node, n from taskq.receipts where run_id = $1 and kind = 'ready' order by sequence", run
        )
        assert all(row["n"] <= 1000 for row in made)
        assert sum(row["n"] for row in made) == MOST_NODES
        assert [row["node"] for row in made] == sorted(row["node"] for row in made)
        assert await aconn.fetchval("select count(*) from taskq.nodes where due") == 0
        assert await aconn.fetchval("select taskq.cancel_run($1)", run) == "cancelled"
    # No statement of the worker was given up, or sent again.
    assert events.of("database.unavailable") == events.of("duty.failed") == []


async def test_what_nobody_was_told_of_is_found_at_the_leaders_next_look(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance.Maintenance, "told", lambda _: None)
    monkeypatch.setattr(maintenance, "LONGEST_PAUSE", 0.2)
    with_tasks(app)
    await aconn.execute(FEW)
    plan = await fan(app, aconn, 8)
    async with run_worker(queues=("default",)):
        await aconn.fetchval("select run_id from taskq.start_run($1, '{}')", plan)
        await all_made(aconn, 8)


async def test_a_run_that_is_refused_is_told_of_and_the_others_are_made(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, events: Events
) -> None:
    monkeypatch.setattr(maintenance, "LONGEST_PAUSE", 0.2)
    with_tasks(app)
    await aconn.execute(FEW)
    await (await app._open_async()).ensure_policy(app.resolve_policy())
    nodes = [node(f"n{ix}", task="member", queue="parked", policy_id=app.resolve_policy().id) for ix in range(5)]
    plan = await aconn.fetchval("select taskq.store_plan($1)", plan_text(nodes))
    broken = await aconn.fetchval("select run_id from taskq.start_run($1, '{}')", plan)
    await aconn.execute(
        "create function public.refuse_one() returns trigger language plpgsql as $$ begin"
        " raise exception 'no' using errcode = '58030'; end $$"
    )
    await aconn.execute(
        "create trigger refuse_one before insert on taskq.receipts for each row"
        f" when (new.run_id = '{broken}') execute function public.refuse_one()"
    )
    whole = await aconn.fetchval("select run_id from taskq.start_run($1, '{}')", plan)

    async def told() -> bool:
        left = await aconn.fetchval("select count(*) from taskq.nodes where run_id = $1 and due", whole)
        return left == 0 and bool(events.of("run.not_carried_on"))

    async with run_worker(queues=("default",)):
        await aeventually(told, BOUND)
        assert {(e["run_id"], e["sqlstate"]) for e in events.of("run.not_carried_on")} == {(str(broken), "58030")}
        await aconn.execute("drop trigger refuse_one on taskq.receipts")
        await all_made(aconn, 11)


async def test_a_run_that_another_process_left_behind_is_healed_by_the_leader(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    done: list[int] = []

    @app.task
    async def member(n: int) -> int:
        done.append(n)
        return n + 1

    @app.workflow
    def flow(n: int) -> int:
        return member.step(member.step(n))

    # As if rows had been restored apart: the job has ended, and its run knows nothing of it.
    run = await flow.start(1)
    first, _ = await run.nodes()
    await aconn.execute("alter table taskq.history disable trigger run_goes_on")
    # Another leads meanwhile, or it would be healed before anybody sees it.
    assert await aconn.fetchval("select is_leader from taskq.lead(gen_random_uuid(), 'maintenance', 600)")
    with pytest.raises(AssertionError, match="node_job_missing"):
        async with run_worker():
            await until_status(aconn, first.job_id, "succeeded")
    await aconn.execute("alter table taskq.history enable trigger run_goes_on")
    await aconn.execute("delete from taskq.leader")
    assert (await run.info()).status == "running"
    async with run_worker():
        assert await run.result(timeout=BOUND) == 3
        # It is told once the leader has its answer, which may be after the run's end.
        await aeventually(lambda: events.of("run.healed"), BOUND)
    assert done == [1, 2]
    assert [event["run_id"] for event in events.of("run.healed")] == [str(run.id)]

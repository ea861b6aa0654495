"""A deploy with changed wiring: runs in flight finish on the plan that they began with, on workers that have it."""

from __future__ import annotations

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Gates, RunWorker

from taskq import PlanConflict, TaskQ

pytestmark = pytest.mark.anyio
AHEAD = "select node, task, runs, first_run from taskq.unserved_nodes where queue = 'default'"


def release(dsn: str, gates: Gates, *, number: int) -> TaskQ:
    """The same workflow in two releases: the second has another step, and no longer the task ``pack``."""
    app = TaskQ(dsn)

    @app.task(name="take")
    async def take(order: int) -> str:
        await gates.wait()
        return f"order {order}"

    if number == 1:

        @app.task(name="pack")
        async def pack(what: str) -> str:
            return f"{what}, packed in release 1"

        @app.workflow(name="ship")
        def first(order: int) -> str:
            return pack.step(take.step(order))

    else:

        @app.task(name="wrap")
        async def wrap(what: str) -> str:
            return f"{what}, wrapped"

        @app.task(name="label")
        async def label(what: str) -> str:
            return f"{what}, labelled in release 2"

        @app.workflow(name="ship")
        def second(order: int) -> str:
            return label.step(wrap.step(take.step(order)))

    return app


async def test_a_run_that_a_deploy_meets_half_way_finishes_on_its_own_plan(
    run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str, gates: Gates
) -> None:
    old, new = (release(dsn, gates, number=n) for n in (1, 2))
    before = old.workflows["ship"].using(run_key="order-7")
    after = new.workflows["ship"].using(run_key="order-7")
    async with old, new:
        async with run_worker(of=old):
            run = await before.start(7)
            await gates.until_reached()
            assert await aconn.fetch(AHEAD) == []
            async with run_worker(of=new):
                gates.open()
                # It may be claimed by either; pack runs on the worker that has it.
                assert await run.result(timeout=BOUND) == "order 7, packed in release 1"
                assert await (await new.workflows["ship"].start(8)).result(timeout=BOUND) == (
                    "order 8, wrapped, labelled in release 2"
                )
        assert {node.name for node in await run.nodes()} == {"take", "pack"}
        with pytest.raises(PlanConflict, match=str(run.id)):
            await after.start(7)


async def test_what_no_worker_of_the_new_release_can_run_is_listed_and_waits(
    run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str, gates: Gates
) -> None:
    old, new = (release(dsn, gates, number=n) for n in (1, 2))
    async with old, new:
        run = await old.workflows["ship"].start(7)
        async with run_worker(of=new):
            await gates.until_reached()
            [listed] = await aconn.fetch(AHEAD)
            assert tuple(listed) == ("pack", "pack", 1, run.id)
            gates.open()

            async def waits() -> bool:
                return {node.name: node.status for node in await run.nodes()} == {
                    "take": "succeeded",
                    "pack": "pending",
                }

            await aeventually(waits, BOUND)
            [listed] = await aconn.fetch(AHEAD)
            assert (listed["node"], (await run.info()).status) == ("pack", "running")
        # A worker of the release that has it, whenever it comes, finds it as it was.
        async with run_worker(of=old):
            assert await run.result(timeout=BOUND) == "order 7, packed in release 1"
            assert await aconn.fetch(AHEAD) == []
        epochs = await aconn.fetchval("select max(claim_epoch) from taskq.history where run_id = $1", run.id)
        assert epochs == 1

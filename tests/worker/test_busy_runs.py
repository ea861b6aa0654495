"""Workers whose ends cannot be told for long, because somebody else holds their run."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Gates, RunWorker

from taskq import TaskQ
from taskq.worker import resend
from taskq.workflow import Workflow

pytestmark = pytest.mark.anyio


@pytest.fixture
def put_off(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When ends were put off, by the loop's clock."""
    seen: list[float] = []
    later = resend.Resender.later

    def noted(self: resend.Resender, *args: Any) -> Any:
        seen.append(asyncio.get_running_loop().time())
        return later(self, *args)

    monkeypatch.setattr(resend.Resender, "later", noted)
    return seen


@pytest.fixture
def flow(app: TaskQ, gates: Gates) -> Workflow[[], int]:
    @app.task
    async def member() -> int:
        await gates.wait("member")
        return 1

    @app.workflow
    def flow() -> int:
        return member.step()

    return flow


async def until_put_off(put_off: list[float], times: int) -> None:
    async def so_often() -> bool:
        return len(put_off) >= times

    await aeventually(so_often, BOUND)


async def test_the_ends_of_a_run_that_is_held_for_long_are_sent_less_and_less_often(
    flow: Workflow[[], int], run_worker: RunWorker, dsn: str, gates: Gates, put_off: list[float]
) -> None:
    async with run_worker(concurrency=2):
        run = await flow.start()
        await gates.until_reached("member")
        holder = await asyncpg.connect(dsn)
        try:
            async with holder.transaction():
                await holder.execute("select from taskq.runs where id = $1 for update", run.id)
                gates.open("member")
                await until_put_off(put_off, 14)
        finally:
            await holder.close()
        assert await run.result(timeout=BOUND) == 1
    waits = [after - before for before, after in zip(put_off, put_off[1:], strict=False)]
    # By then 32 times as long as at first, which is 32 ms at the least.
    assert min(waits[9:13]) > 0.03


async def test_a_worker_that_stops_keeps_its_lease_and_the_end_whose_run_is_held_until_it_can_tell_it(
    flow: Workflow[[], int],
    run_worker: RunWorker,
    aconn: asyncpg.Connection,
    dsn: str,
    gates: Gates,
    put_off: list[float],
) -> None:
    holder = await asyncpg.connect(dsn)
    held = holder.transaction()

    async def let_go_once_renewed(before: object) -> None:
        async def renewed() -> bool:
            return bool(await aconn.fetchval("select max(lease_expires_at) > $1 from taskq.workers", before))

        await aeventually(renewed, BOUND)
        await held.rollback()

    try:
        async with run_worker(concurrency=2) as worker:
            run = await flow.start()
            await gates.until_reached("member")
            await held.start()
            await holder.execute("select from taskq.runs where id = $1 for update", run.id)
            gates.open("member")
            await until_put_off(put_off, 3)
            worker.stop()
            before = await aconn.fetchval("select max(lease_expires_at) from taskq.workers")
            letting_go = asyncio.create_task(let_go_once_renewed(before))
        await letting_go
    finally:
        await holder.close()
    found = await aconn.fetch("select status, result::text, claim_epoch from taskq.history where run_id = $1", run.id)
    assert [tuple(row) for row in found] == [("succeeded", "1", 1)]

"""Workers of two releases on one database: the older never runs what it cannot, says so, and goes on with the rest."""

from __future__ import annotations

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import BOUND, Events, Gates, RunWorker

from taskq import TaskQ
from taskq.worker import parts

pytestmark = pytest.mark.anyio

FILTER = "and (k.required_worker_schema is null or k.required_worker_schema <= v_level)"
REFUSED = 100


async def take_the_filter_out(aconn: asyncpg.Connection) -> None:
    """As a claim of an older release would be, which knows no levels."""
    text = await aconn.fetchval(
        "select pg_get_functiondef(p.oid) from pg_proc p where p.pronamespace = 'taskq'::regnamespace"
        " and p.proname = 'claim'"
    )
    assert FILTER in text
    await aconn.execute(text.replace(FILTER, ""))


@pytest.mark.parametrize("filtered", [True, False])
async def test_an_older_worker_leaves_nodes_to_a_newer_one_and_keeps_working(
    app: TaskQ,
    run_worker: RunWorker,
    aconn: asyncpg.Connection,
    gates: Gates,
    events: Events,
    monkeypatch: pytest.MonkeyPatch,
    filtered: bool,
) -> None:
    ran_by: dict[int, int] = {}
    newer = False

    @app.task
    async def member(n: int) -> int:
        ran_by[n] = 3 if newer else 2
        return n

    @app.task
    async def plain(n: int) -> int:
        return n

    @app.workflow
    def flow(n: int) -> int:
        return member.step(n)

    if not filtered:
        await take_the_filter_out(aconn)
    runs = [await flow.start(n) for n in range(REFUSED)]
    behind = [await plain.enqueue(n) for n in range(5)]
    monkeypatch.setattr(parts, "CAPABILITY_LEVEL", 2)
    async with run_worker():
        # A hundred rows that it may not have stand in front of what it may.
        assert [await job.result(timeout=60) for job in behind] == list(range(5))
        assert ran_by == {}
        stranded = [record["job_id"] for record in events.records if record["event"] == "job.stranded"]
        assert len(stranded) == len(set(stranded)) == (0 if filtered else REFUSED)
    newer = True
    monkeypatch.setattr(parts, "CAPABILITY_LEVEL", 3)
    async with run_worker():
        assert [await run.result(timeout=BOUND) for run in runs] == list(range(REFUSED))
    assert ran_by == dict.fromkeys(range(REFUSED), 3)
    epochs = await aconn.fetch("select distinct claim_epoch from taskq.history where run_id is not null")
    assert [row["claim_epoch"] for row in epochs] == [1]


async def test_a_node_without_a_run_epoch_is_refused_before_its_body_and_others_go_on(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    @app.task
    async def member(n: int) -> int:
        assert n != 1, "its body must not run"
        return n

    @app.workflow
    def flow(n: int) -> int:
        return member.step(n)

    old, new = await flow.start(1), await flow.start(2)
    await aconn.execute("update taskq.jobs set run_epoch = null where run_id = $1", old.id)
    async with run_worker():
        assert await new.result(timeout=BOUND) == 2

        def told() -> bool:
            return any(r["event"] == "job.stranded" and r["sqlstate"] == "WF023" for r in events.records)

        await aeventually(told, BOUND)
        [node_of_old] = await old.nodes()
        assert node_of_old.status == "pending"
        await aconn.execute("update taskq.jobs set run_epoch = 1 where run_id = $1", old.id)
    assert (await old.info()).status == "running"


@pytest.mark.parametrize(("child_priority", "first"), [(9, "child"), (2, "filler")])
async def test_the_priority_of_a_child_is_that_of_its_node_among_a_backlog(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, child_priority: int, first: str
) -> None:
    order: list[str] = []

    @app.task(queue="parents")
    async def parent() -> str:
        await gates.wait("parent")
        return "p"

    @app.task
    async def child(what: str) -> str:
        order.append("child")
        return what

    @app.task
    async def filler(n: int) -> None:
        order.append("filler")

    @app.workflow
    def flow() -> str:
        return child.node(priority=child_priority).step(parent.step())

    await app.enqueue_many([filler.job(n) for n in range(50)])
    run = await flow.start()
    async with run_worker(concurrency=1, queues=["parents"]):
        await gates.until_reached("parent")
        gates.open("parent")
        # The other worker joins once the child's row is to be seen, behind the backlog.
        await aeventually(lambda: _status_of(aconn, "child", "pending"), BOUND)
        async with run_worker(concurrency=1, queues=["default"]):
            assert await run.result(timeout=BOUND) == "p"
            await aeventually(lambda: len(order) == 51, BOUND)
    assert order[0] == first
    if first == "filler":
        assert order[-1] == "child"


async def _status_of(aconn: asyncpg.Connection, task: str, status: str) -> bool:
    return bool(await aconn.fetchval("select count(*) from taskq.jobs where task = $1 and status = $2", task, status))

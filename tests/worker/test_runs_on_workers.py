"""Runs on real workers: members that end at once, a busy run, a cancel that races the last member."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from effects_kit import effect
from helpers import aeventually
from runs_kit import edge, node, plan_text, result_of
from worker_kit import BOUND, Gates, RunWorker, declare_lost

from taskq import JobContext, TaskQ

pytestmark = pytest.mark.anyio

MEMBERS, ROUNDS = 20, 100


async def store(app: TaskQ, aconn: asyncpg.Connection, nodes: list[Any], edges: list[Any], **more: Any) -> str:
    await (await app._open_async()).ensure_policy(app.resolve_policy())
    for each in nodes:
        each["job"]["policy_id"] = app.resolve_policy().id
        each["job"]["queue"] = "default" if each["job"]["queue"] == "q" else each["job"]["queue"]
    return str(await aconn.fetchval("select taskq.store_plan($1)", plan_text(nodes, edges, **more)))


async def start(aconn: asyncpg.Connection, plan: str, **given: Any) -> UUID:
    run: UUID = await aconn.fetchval("select run_id from taskq.start_run($1, $2::text::jsonb)", plan, json.dumps(given))
    return run


async def until_ended(aconn: asyncpg.Connection, *runs: UUID, within: float = BOUND) -> dict[str, int]:
    """How many ended how, once all have."""

    async def ended() -> bool:
        left = await aconn.fetchval(
            "select count(*) from taskq.runs where id = any($1) and finished_at is null", list(runs)
        )
        return bool(left == 0)

    await aeventually(ended, within)
    found = await aconn.fetch("select status, count(*) from taskq.runs where id = any($1) group by 1", list(runs))
    return {row["status"]: row["count"] for row in found}


async def test_members_that_end_at_once_on_two_workers_start_their_fan_in_once(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    together: dict[str, asyncio.Barrier] = {}
    on: dict[str, set[UUID | None]] = {}

    @app.task
    async def member(ctx: JobContext, n: int) -> int:
        run = ctx.meta["run"]["id"]
        on.setdefault(run, set()).add(ctx.worker_id)
        # None of them ends before all of them run, half of them on each worker.
        await together.setdefault(run, asyncio.Barrier(MEMBERS)).wait()
        return n

    @app.task
    async def total(ns: list[int]) -> int:
        return sum(ns)

    nodes = [node(f"m{n}", {"n": {"value": n}}, task="member", queue="ab"[n % 2]) for n in range(MEMBERS)]
    nodes.append(node("total", {"ns": {"list": [result_of(n) for n in range(MEMBERS)]}}, queue="a"))
    edges = [edge(n, MEMBERS) for n in range(MEMBERS)]
    plan = await store(app, aconn, nodes, edges, result=result_of(MEMBERS))
    runs = []
    async with run_worker(concurrency=MEMBERS, queues=("a",)), run_worker(concurrency=MEMBERS, queues=("b",)):
        for _ in range(ROUNDS):
            runs.append(await start(aconn, plan))
            assert await until_ended(aconn, runs[-1]) == {"succeeded": 1}
    assert [len(on[str(run)]) for run in runs] == [2] * ROUNDS
    found = await aconn.fetch(
        "select h.run_id, count(*) as jobs, count(distinct h.id) as ids, max(h.claim_epoch) as claims,"
        " sum((h.result #>> '{}')::int) filter (where h.task = 'total') as total"
        " from taskq.history h where h.run_id = any($1) group by 1",
        runs,
    )
    assert len(found) == ROUNDS
    expected = {(MEMBERS + 1, MEMBERS + 1, 1, 190)}
    assert {(row["jobs"], row["ids"], row["claims"], row["total"]) for row in found} == expected


async def test_a_run_that_somebody_holds_up_holds_up_nobody_else(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str, gates: Gates
) -> None:
    @app.task
    async def member(n: int) -> int:
        await gates.wait(f"member {n}")
        return n

    @app.task
    async def plain() -> None:
        return None

    plan = await store(app, aconn, [node("m", {"n": {"input": "n"}}, task="member")], [])
    async with run_worker(concurrency=5):
        held, other = await start(aconn, plan, n=1), await start(aconn, plan, n=2)
        await gates.until_reached("member 1")
        await gates.until_reached("member 2")
        holder = await asyncpg.connect(dsn)
        try:
            async with holder.transaction():
                await holder.execute("select from taskq.runs where id = $1 for update", held)
                gates.open("member 1")
                gates.open("member 2")
                # Behind the end that cannot be applied, others go on, and so does what is claimed with them.
                assert await until_ended(aconn, other) == {"succeeded": 1}
                await (await plain.enqueue()).result(timeout=BOUND)
                assert await aconn.fetchval("select status from taskq.runs where id = $1", held) == "running"
        finally:
            await holder.close()
        assert await until_ended(aconn, held) == {"succeeded": 1}
    attempts = await aconn.fetch(
        "select a.outcome from taskq.attempts a join taskq.nodes n on n.id = a.job_id where n.run_id = $1", held
    )
    assert [row["outcome"] for row in attempts] == ["succeeded"]


async def test_a_cancel_that_races_the_last_member_says_who_won(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    @app.task
    async def member(pause: float) -> str:
        await asyncio.sleep(pause)
        return "done"

    @app.task
    async def tell() -> None: ...

    told = [
        effect(f"tell-{how}", [how], task="tell", queue="default", policy_id=app.resolve_policy().id)
        for how in ("succeeded", "cancelled")
    ]
    members = [node("m", {"pause": {"input": "pause"}}, task="member")]
    plan = await store(app, aconn, members, [], effects=told)
    answers: dict[UUID, str] = {}
    async with run_worker(concurrency=20):
        for n in range(ROUNDS):
            run = await start(aconn, plan, pause=(n % 20) / 1000)
            await asyncio.sleep((n % 7) / 1000)
            answers[run] = await aconn.fetchval("select taskq.cancel_run($1)", run)
        await until_ended(aconn, *answers, within=60)
    found = await aconn.fetch("select id, status from taskq.runs where id = any($1)", list(answers))
    statuses = {row["id"]: row["status"] for row in found}
    for run, answer in answers.items():
        if answer == "cancelled":
            assert statuses[run] == "cancelled"
        elif answer == "finished":
            assert statuses[run] == "succeeded"
        else:
            assert answer == "requested"
            assert statuses[run] in ("cancelled", "succeeded")
    # Each has told of the one end that it had, and of no other.
    promised = await aconn.fetch("select owner_job_id, name from taskq.effect_intents")
    assert sorted((row["owner_job_id"], row["name"]) for row in promised) == sorted(
        (run, f"tell-{status}") for run, status in statuses.items()
    )
    ended = await aconn.fetch("select run_id from taskq.receipts where kind = 'finished'")
    assert sorted(row["run_id"] for row in ended) == sorted(answers)


async def test_a_member_whose_worker_was_lost_runs_again_and_its_run_goes_on(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    first = True

    @app.task
    async def member() -> str:
        nonlocal first
        if first:
            first = False
            await gates.wait("first")
        return "done"

    @app.task
    async def after(what: str) -> str:
        return what + "!"

    nodes = [node("m", task="member"), node("after", {"what": result_of(0)})]
    plan = await store(app, aconn, nodes, [edge(0, 1)], result=result_of(1))
    async with run_worker(concurrency=2):
        run = await start(aconn, plan)
        await gates.until_reached("first")
        # As if it had been declared lost while its body runs: the claim is settled, and its late end fenced out.
        await declare_lost(aconn)
        gates.open("first")
        assert await until_ended(aconn, run, within=30) == {"succeeded": 1}
    kinds = await aconn.fetch("select kind from taskq.receipts where run_id = $1 order by sequence", run)
    assert [row["kind"] for row in kinds] == ["admitted", "ready", "lost", "ended", "ready", "ended", "finished"]
    assert await aconn.fetchval("select result #>> '{}' from taskq.runs where id = $1", run) == "done!"


async def test_a_run_that_is_paused_while_its_first_body_runs_starts_no_other_until_it_is_resumed(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates
) -> None:
    ran: list[str] = []

    @app.task
    async def member(name: str) -> str:
        ran.append(name)
        if name == "a":
            await gates.wait("a")
        return name

    @app.task
    async def plain() -> None:
        return None

    nodes = [node(name, {"name": {"value": name}}, task="member") for name in "abc"]
    plan = await store(app, aconn, nodes, [edge(0, 1), edge(1, 2)], result=result_of(2))
    async with run_worker(concurrency=5):
        run = await start(aconn, plan)
        await gates.until_reached("a")
        assert await aconn.fetchval("select taskq.pause_run($1, 'why')", run) == "paused"
        gates.open("a")

        async def held() -> bool:
            query = "select status from taskq.run_tree where run_id = $1 and name = 'b'"
            return bool(await aconn.fetchval(query, run) == "held")

        await aeventually(held, BOUND)
        # The worker looks for work meanwhile, and finds other.
        await (await plain.enqueue()).result(timeout=BOUND)
        assert ran == ["a"]
        assert await aconn.fetchval("select taskq.resume_run($1, 'why')", run) == "resumed"
        assert await until_ended(aconn, run) == {"succeeded": 1}
    assert ran == ["a", "b", "c"]
    assert await aconn.fetch("select * from taskq.check_invariants('all')") == []

"""Maps as workers run them: from the list to the fan-in, with failures, retries, kills and many workers."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from runs_kit import worker_for
from sql import End, claim, exchange, lose
from started_kit import working
from worker_kit import BOUND, Gates

from taskq import Outcome, Retry, RunCancelled, RunFailed, Tally, TaskQ, collect, tally
from taskq.testing import drain
from taskq.workflow import Workflow

pytestmark = pytest.mark.anyio


def violations(dsn: str) -> list[Any]:
    with psycopg.connect(dsn) as conn:
        return conn.execute("select code, detail from taskq.check_invariants('all')").fetchall()


def summing(app: TaskQ) -> Workflow[[int], int]:
    """The sum of twice each number below n, by a map over what a step returned."""

    @app.task
    async def numbers(n: int) -> list[int]:
        return list(range(n))

    @app.task
    async def double(n: int, times: int) -> int:
        return n * times

    @app.task
    async def total(ns: list[int]) -> int:
        return sum(ns)

    @app.workflow
    def flow(n: int) -> int:
        return total.step(double.node("twice", at_once=50).map(numbers.step(n), 2))

    return flow


@pytest.mark.parametrize("n", [0, 1, 230])
async def test_a_map_gives_its_results_to_the_fan_in(app: TaskQ, dsn: str, n: int) -> None:
    flow = summing(app)
    async with working(app, dsn):
        run = await flow.start(n)
        assert await run.result(timeout=BOUND) == n * (n - 1)
    [_, over, _] = await run.nodes()
    assert (over.name, over.status, over.child_status) == ("twice", "succeeded", "succeeded")
    assert over.child_run is not None
    nodes = await flow.handle(over.child_run).nodes()
    assert [node.name for node in nodes] == [f"twice[{ix}]" for ix in range(n)]
    info = await flow.handle(over.child_run).info()
    assert (info.workflow, info.parent_node, info.result) == ("flow:twice", "twice", n)
    assert violations(dsn) == []


async def test_several_workers_share_the_children_and_each_runs_once(app: TaskQ, dsn: str) -> None:
    seen: list[int] = []

    @app.task
    async def each(n: int) -> int:
        seen.append(n)
        return n

    @app.workflow
    def flow(ns: list[int]) -> list[int]:
        return each.node(at_once=40).map(ns)

    async with working(app, dsn), working(app, dsn):
        run = await flow.start(list(range(300)))
        assert await run.result(timeout=BOUND) == list(range(300))
    assert sorted(seen) == list(range(300))
    assert violations(dsn) == []


async def test_a_failure_is_retried_as_its_task_says_and_then_fails_the_run(app: TaskQ, dsn: str) -> None:
    tried: list[int] = []

    @app.task(retry=Retry(max_attempts=2))
    async def each(n: int) -> int:
        tried.append(n)
        if n == 3 and tried.count(3) < 3:
            raise ValueError("not three")
        return n

    @app.workflow
    def flow(ns: list[int]) -> list[int]:
        return each.map(ns)

    run = await flow.start([1, 2, 3])
    await drain(app, later=True)
    with pytest.raises(RunFailed, match=r"node each has failed: .*node each\[2\] has failed: .*not three"):
        await run.result(timeout=BOUND)
    await run.retry("fixed")
    await drain(app, later=True)
    assert await run.result(timeout=BOUND) == [1, 2, 3]
    assert [tried.count(n) for n in (1, 2, 3)] == [1, 1, 3]
    assert violations(dsn) == []


async def test_outcomes_and_tally_come_typed(app: TaskQ, dsn: str) -> None:
    told: list[Any] = []

    @app.task(retry=Retry(max_attempts=1))
    async def each(n: int) -> int:
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n

    @app.task
    async def report(ends: list[Outcome[int]], counts: Tally) -> None:
        told.extend((ends, counts))

    @app.workflow
    def flow(ns: list[int]) -> None:
        ends = each.map(ns)
        report.step(collect(ends), tally(ends))

    run = await flow.start([1, 2, 3, 4])
    await drain(app)
    await run.result(timeout=BOUND)
    ends, counts = told
    assert [(end.node, end.ok, end.value) for end in ends] == [
        ("each[0]", False, None),
        ("each[1]", True, 2),
        ("each[2]", False, None),
        ("each[3]", True, 4),
    ]
    assert (counts.total, counts.succeeded, counts.failed, counts.ok) == (4, 2, 2, False)
    assert [end.error["message"] for end in counts.failures] == ["1 is odd", "3 is odd"]
    assert violations(dsn) == []


async def test_each_item_may_be_a_run_of_its_own_with_a_map(app: TaskQ, dsn: str) -> None:
    @app.task
    async def below(n: int) -> list[int]:
        return list(range(n))

    @app.task
    async def square(n: int) -> int:
        return n * n

    @app.workflow
    def inner(n: int) -> list[int]:
        return square.map(below.step(n))

    @app.workflow
    def outer(n: int) -> list[list[int]]:
        return inner.map(below.step(n))

    run = await outer.start(4)
    await drain(app)
    assert await run.result(timeout=BOUND) == [[], [0], [0, 1], [0, 1, 4]]
    assert violations(dsn) == []


@pytest.mark.parametrize("lists", [[[], ["x"]], [[], []], []], ids=str)
async def test_maps_over_nothing_inside_of_a_map_end_and_what_follows_them_runs(
    app: TaskQ, dsn: str, lists: list[list[str]]
) -> None:
    @app.task
    async def mark(x: str) -> str:
        return f"r{x}"

    @app.task
    async def tail(all_: list[list[str]]) -> list[list[str]]:
        return [*all_, ["end"]]

    @app.workflow
    def inner(xs: list[str]) -> list[str]:
        return mark.map(xs)

    @app.workflow
    def outer(lists: list[list[str]]) -> list[list[str]]:
        return tail.step(inner.map(lists))

    async with working(app, dsn):
        run = await outer.start(lists)
        assert await run.result(timeout=BOUND) == [*([f"r{x}" for x in xs] for xs in lists), ["end"]]
    with psycopg.connect(dsn) as conn:
        # Nothing that looks whether there is more is left behind.
        assert conn.execute("select count(*) from taskq.jobs").fetchone() == (0,)
    assert violations(dsn) == []


async def test_results_of_a_map_are_mapped_and_parts_taken(app: TaskQ, dsn: str) -> None:
    @app.task
    async def add(n: int, more: int = 1) -> int:
        return n + more

    @app.workflow
    def flow(ns: list[int]) -> list[int]:
        once = add.map(ns)
        again = add.map(once, once[0])
        return [again[1], add.step(again[0])]

    run = await flow.start([1, 10])
    await drain(app)
    assert await run.result(timeout=BOUND) == [13, 5]


async def test_a_cancelled_run_stops_what_runs_and_what_waits(app: TaskQ, dsn: str, gates: Gates) -> None:
    @app.task
    async def each(n: int) -> int:
        await gates.wait(str(n))
        return n

    @app.workflow
    def flow(ns: list[int]) -> list[int]:
        return each.node(at_once=3).map(ns)

    async with working(app, dsn):
        run = await flow.start(list(range(20)))
        for n in range(3):
            await gates.until_reached(str(n))
        assert await run.cancel("enough") == "requested"
        with pytest.raises(RunCancelled):
            await run.result(timeout=BOUND)
    assert sorted(gates.reached) == ["0", "1", "2"]
    assert violations(dsn) == []


async def test_a_map_goes_on_after_a_worker_was_lost_in_the_midst(app: TaskQ, dsn: str) -> None:
    """It had ended one child and held claims of three more."""

    @app.task
    async def each(n: int) -> int:
        return n

    @app.workflow
    def flow(ns: list[int]) -> list[int]:
        return each.node(at_once=4).map(ns)

    run = await flow.start(list(range(12)))
    with psycopg.connect(dsn, autocommit=True) as conn:
        lost = worker_for(conn, queues=["default"], tasks=["each"])
        claims = claim(conn, lost, 4, tasks=["each"], lanes=[("default", 5)])
        assert len(claims) == 4
        exchange(conn, lost, [End(claims[0]["job_id"], claims[0]["claim_epoch"], result=0)])
        lose(conn, lost)
    async with working(app, dsn):
        assert await run.result(timeout=BOUND) == list(range(12))
    assert violations(dsn) == []


async def test_a_value_that_is_no_list_fails_its_node_and_not_the_worker(app: TaskQ, dsn: str) -> None:
    @app.task
    async def anything() -> Any:
        return {"no": "list"}

    @app.task
    async def each(n: int) -> int:
        return n

    @app.workflow
    def flow() -> list[int]:
        return each.map(anything.step())

    run = await flow.start()
    await drain(app)
    with pytest.raises(RunFailed, match="node each has failed: a map was given an object"):
        await run.result(timeout=BOUND)
    [_, over] = await run.nodes()
    assert over.error is not None
    assert over.error["type"] == "NotAList"
    assert violations(dsn) == []

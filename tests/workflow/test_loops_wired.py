"""What the wiring of a loop comes to, which are refused before any row is written, and loops as workers run them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

import psycopg
import pytest
from plan_kit import wires
from started_kit import working
from wiring_kit import faults, refused, source, task
from worker_kit import BOUND

from taskq import LoopExhausted, Retry, RunFailed, TaskQ, TerminalEffect, branch, collect
from taskq.errors import PlanError, WiringError, describe
from taskq.testing import drain
from taskq.workflow import Outcome, Plan, Workflow
from taskq.workflow.show import mermaid, text


class Verdict(enum.Enum):
    GOOD = "good"
    POOR = "poor"


@dataclass
class Draft:
    n: int
    good: bool = False
    verdict: Verdict = Verdict.POOR
    word: Literal["done", "lost", "again"] = "again"
    title: str = ""


@pytest.fixture
def app(nowhere: TaskQ) -> TaskQ:
    return nowhere


def better(app: TaskQ, takes: Any = Draft, returns: Any = Draft, **more: Any) -> Any:
    return task(app, "better", returns, draft=takes, **more)


def child_of(plan: Plan, name: str) -> Plan:
    [found] = [node["child"] for node in plan.spec["nodes"] if node["name"] == name]
    return plan.children[found]


def flow_of(app: TaskQ, of: Any, **bounds: Any) -> Workflow[..., Any]:
    def flow(draft: Draft) -> Draft:
        made: Draft = of.loop(draft, **{"until": lambda d: d.good, "at_most": 3, **bounds})
        return made

    return app.workflow(flow)


# What it comes to -----------------------------------------------------------------------------------------------------


def test_a_loop_is_a_node_with_a_plan_for_its_rounds(app: TaskQ) -> None:
    of, get, end = better(app, style=str), source(app, Draft, "get"), task(app, "end", None, draft=Draft, title=str)

    def flow(style: str) -> None:
        made = of.node("polish", queue="slow", priority=2).loop(
            get.step(), until=lambda d: d.good, at_most=5, within="1h", also={"style": style}
        )
        end.step(made, made.title)

    plan = app.workflow(flow).plan
    assert wires(dict(plan.spec)) == {("get", "polish", "fail"), ("polish", "end", "fail")}
    [_, over, last] = plan.spec["nodes"]
    assert over["args"] == {"draft": {"node": 0, "path": []}, "style": {"input": "style", "path": []}}
    assert (over["job"]["task"], over["job"]["queue"], over["job"]["effect_class"]) == ("flow:await", "slow", "pure")
    assert last["args"] == {"draft": {"node": 1, "path": []}, "title": {"node": 1, "path": ["title"]}}
    child = child_of(plan, "polish")
    assert child.spec["loop"] == {
        "item": "draft",
        "most": 5,
        "path": ["good"],
        "ends": [True],
        "within": 3600.0,
        "exhausted": "fail",
    }
    assert (child.workflow, child.spec["parameters"]) == ("flow:polish", ["draft", "style"])
    [each] = child.spec["nodes"]
    assert (each["name"], each["job"]["task"], each["job"]["priority"]) == ("polish", "better", 2)
    assert (child.size, plan.size, plan.depth, child.map, plan.loop) == (1, 4, 1, None, None)


@pytest.mark.parametrize(
    ("until", "ends", "path", "values"),
    [
        (lambda d: d.verdict, {Verdict.GOOD: True, Verdict.POOR: False}, ["verdict"], ["good"]),
        (lambda d: d.word, {"done": True, "lost": True, "again": False}, ["word"], ["done", "lost"]),
        (lambda d: d.good, {False: True, True: False}, ["good"], [False]),
    ],
)
def test_the_end_is_named_by_the_values_of_a_part(app: TaskQ, until: Any, ends: Any, path: Any, values: Any) -> None:
    plan = flow_of(app, better(app), until=until, ends=ends, exhausted="give").plan
    loop = child_of(plan, "better").spec["loop"]
    assert (loop["path"], loop["ends"], loop["exhausted"], "within" in loop) == (path, values, "give", False)


def test_a_state_may_be_the_part_itself(app: TaskQ) -> None:
    of = better(app, bool, bool)

    def flow(draft: bool) -> bool:
        made: bool = of.loop(draft, until=lambda d: d, at_most=3)
        return made

    assert child_of(app.workflow(flow).plan, "better").spec["loop"]["path"] == []


def test_a_round_may_be_a_run_and_is_undone_with_the_rest(app: TaskQ) -> None:
    of, undo = better(app), task(app, "undo", None, n=int)

    @app.workflow
    def inner(draft: Draft, n: int = 3) -> Draft:
        made: Draft = of.step(draft)
        return made

    def flow(draft: Draft) -> Draft:
        effect = TerminalEffect(undo, payload={"n": 1})
        first = inner.loop(draft, until=lambda d: d.good, at_most=3)
        return inner.node("again", compensate=effect).loop(first, until=lambda d: d.good, at_most=3, also={"n": 4})

    plan = app.workflow(flow).plan
    assert [node["args"]["n"] for node in plan.spec["nodes"]] == [{"value": 3}, {"value": 4}]
    assert child_of(plan, "inner").spec["nodes"][0]["child"] == inner.plan.hash
    assert plan.spec["nodes"][1]["compensate"]["task"] == "undo"
    assert plan.depth == 2


def test_a_loop_is_shown_with_its_bounds(app: TaskQ) -> None:
    plan = flow_of(app, better(app).node("polish"), within="1m").plan
    assert "rounds of better" in text(plan)
    assert "until good = true, at most 3 rounds, begun within 60 s, else it fails: idempotent, queue" in text(plan)
    assert 'n0(["polish<br/>rounds of better"])' in mermaid(plan)
    app = TaskQ("postgresql://nobody@127.0.0.1:1/x")
    assert "at most 3 rounds, else the last state: " in text(flow_of(app, better(app), exhausted="give").plan)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"at_most": 0}, "at_most is 0; give a number of rounds from 1 to 10000"),
        ({"at_most": 10_001}, "at_most is 10001; give a number"),
        ({"at_most": True}, "at_most is True; give a number"),
        ({"at_most": None}, "at_most is None; give a number"),
        ({"within": "soon"}, "within: 'soon' is not a duration"),
        ({"exhausted": "stop"}, "exhausted is 'stop'; give 'fail', or 'give' for the last state"),
        ({"until": lambda d: True}, "until gives True; give a part of the state, as in until=lambda state: state.done"),
        ({"until": None}, "until gives None; give a part of the state"),
        ({"until": lambda d: d.title}, "the state of a loop.title: its type is str, whose values cannot be listed"),
        ({"until": lambda d: d.word}, ".word, which is no bool: say in ends= of each of its values"),
        (
            {"until": lambda d: d.word, "ends": {"done": True, "again": False}},
            "ends does not say whether 'lost' is the end; add it",
        ),
        (
            {"until": lambda d: d.verdict, "ends": {Verdict.GOOD: True, Verdict.POOR: False, "bad": True}},
            "ends has 'bad', which is none of its values; take it out",
        ),
        ({"ends": {True: True, False: "no"}}, "ends says 'no' of False; say True or False"),
        ({"ends": {True: True, False: True}}, "ends says of all of its values that it is the end"),
        ({"ends": {True: False, False: False}}, "ends says of none of its values that it is the end"),
        ({"ends": [True]}, "ends is [True]; give a dict of its values"),
    ],
)
def test_bounds_that_are_none_are_refused(app: TaskQ, bounds: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        flow_of(app, better(app), **bounds).plan  # noqa: B018
    [fault] = caught.value.faults
    assert fault.startswith("node better: ")
    assert says in fault


def test_an_end_that_is_computed_is_refused_with_what_to_do(app: TaskQ) -> None:
    with pytest.raises(WiringError, match="until only names a part of it.*let the task compute that"):
        flow_of(app, better(app), until=lambda d: d.title == "x").plan  # noqa: B018


def test_a_value_of_ends_that_cannot_be_stored_is_refused(app: TaskQ) -> None:
    with pytest.raises(PlanError) as caught:
        flow_of(app, better(app), ends={True: True, False: False, object(): True}).plan  # noqa: B018
    assert "which is none of its values" in caught.value.faults[0]
    assert "cannot be" in caught.value.faults[1]


def test_a_state_that_the_next_round_cannot_take_is_refused(app: TaskQ) -> None:
    of = better(app, int, Draft)

    def flow(draft: int) -> Any:
        return of.loop(draft, until=lambda d: d.good, at_most=3)

    [fault] = faults(app, flow)
    assert fault == (
        "node better: each round of a loop takes what the one before gave: draft takes int, and better returns Draft"
    )


def test_a_start_that_does_not_fit_is_refused(app: TaskQ) -> None:
    of, get = better(app), source(app, int, "get")
    [fault] = faults(app, lambda: of.loop(get.step(), until=lambda d: d.good, at_most=3))
    assert fault == "node better: draft takes Draft, and the result of get is int"


def test_a_part_of_another_value_is_no_end(app: TaskQ) -> None:
    of, get = better(app), source(app, bool, "get")

    def flow(draft: Draft) -> Any:
        other = get.step()
        return [other, of.loop(draft, until=lambda d: other, at_most=3)]

    [fault] = faults(app, flow)
    assert "until gives <the result of get>; give a part of the state" in fault


def test_an_end_that_computes_is_refused(app: TaskQ) -> None:
    of = better(app)
    said = refused(app, lambda: of.loop(Draft(1), until=lambda d: not d.good, at_most=3))
    assert "the state of a loop.good is not known while the workflow is wired" in said
    assert "also is 3; give a dict" in refused(
        app, lambda: of.loop(Draft(1), until=lambda d: d.good, at_most=3, also=3)
    )


def test_what_is_given_besides_is_checked(app: TaskQ) -> None:
    of = better(app, n=int)
    said = faults(app, lambda: of.loop(Draft(1), until=lambda d: d.good, at_most=3, also={"n": "x"}))
    assert "Expected `int`, got `str`" in said[0]
    assert "n" in faults(app, lambda: of.loop(Draft(1), until=lambda d: d.good, at_most=3), name="w2")[0]


def test_bounds_of_a_map_are_refused(app: TaskQ) -> None:
    of = better(app)
    [fault] = faults(app, lambda: of.node(at_most=3).loop(Draft(1), until=lambda d: d.good, at_most=3))
    said = "at_once, at_most and ahead are the bounds of a map or an emit, and loop() is none: "
    assert fault == f"{said}give at_most to loop() itself"


def test_a_task_that_takes_nothing_by_its_place_is_not_looped(app: TaskQ) -> None:
    @app.task
    def bare() -> bool:
        return True

    [fault] = faults(app, lambda: bare.loop(True, until=lambda d: d, at_most=3))
    assert "node bare: bare() takes 0 positional arguments but 1 was given" in fault


def test_a_loop_outside_of_a_workflow_is_refused(app: TaskQ) -> None:
    of = better(app)
    for made in (of, of.node()):
        with pytest.raises(Exception, match=r"loop\(\) stands outside of a workflow"):
            made.loop(Draft(1), until=lambda d: d.good, at_most=3)


# As workers run them --------------------------------------------------------------------------------------------------


class TestRuns:
    """Loops from their start to what takes their state."""

    pytestmark = pytest.mark.anyio

    @pytest.fixture
    def app(self, dsn: str) -> TaskQ:
        return TaskQ(dsn)

    async def test_rounds_go_on_until_one_is_the_end(self, app: TaskQ, dsn: str) -> None:
        flow = counting(app)
        async with app, working(app, dsn):
            run = await flow.start(3)
            assert await run.result(timeout=BOUND) == "3 done"
            [over, _] = await run.nodes()
            assert over.child_run is not None
            rounds = await flow.handle(over.child_run).nodes()
        assert [(node.name, node.status) for node in rounds] == [(f"count[{n}]", "succeeded") for n in range(3)]
        assert violations(dsn) == []

    async def test_one_that_is_exhausted_fails_its_run_typed(self, app: TaskQ, dsn: str) -> None:
        flow = counting(app)
        async with app:
            run = await flow.start(9)
            await drain(app)
            with pytest.raises(RunFailed, match="node count has failed: .*not done after 5 rounds") as caught:
                await run.result()
            cause = caught.value.error["cause"]
            assert (cause["type"], cause["kind"]) == ("LoopExhausted", "rounds")
            assert await run.retry() == "reopened"
            await drain(app)
            assert await run.result() == "9 done"
        assert violations(dsn) == []

    async def test_one_that_gives_its_state_goes_another_way(self, app: TaskQ, dsn: str) -> None:
        @app.task
        async def count(draft: Draft) -> Draft:
            return Draft(draft.n + 1, good=draft.n + 1 == 2)

        @app.task
        async def tell(draft: Draft, how: str) -> str:
            return f"{draft.n} {how}"

        @app.workflow
        def flow(n: int, most: Draft) -> str:
            made = count.loop(most, until=lambda d: d.good, at_most=2, exhausted="give")
            return branch(made.good, {True: lambda: tell.step(made, "good"), False: lambda: tell.step(made, "poor")})

        async with app:
            good, poor = await flow.start(1, Draft(0)), await flow.start(1, Draft(5))
            await drain(app)
            assert [await good.result(), await poor.result()] == ["2 good", "7 poor"]

    async def test_a_round_that_fails_fails_the_loop_with_its_number(self, app: TaskQ, dsn: str) -> None:
        @app.task(retry=Retry(max_attempts=1))
        async def step(n: Literal[1, 2, 3]) -> Literal[1, 2, 3]:
            if n == 2:
                raise ValueError("no 2")
            return 2

        @app.task
        async def tell(end: Outcome[Literal[1, 2, 3]]) -> str:
            return str((end.error or {})["message"])

        @app.workflow
        def flow() -> str:
            last = step.loop(1, until=lambda n: n, ends={1: False, 2: False, 3: True}, at_most=3)
            return tell.step(collect(last))

        async with app:
            run = await flow.start()
            await drain(app)
            assert "node step[1] has failed: no 2" in await run.result()
        assert violations(dsn) == []


def counting(app: TaskQ) -> Workflow[[int], str]:
    @app.task
    async def count(draft: Draft, to: int) -> Draft:
        return Draft(draft.n + 1, good=draft.n + 1 >= to)

    @app.task
    async def tell(draft: Draft) -> str:
        return f"{draft.n} {'done' if draft.good else 'open'}"

    @app.workflow
    def flow(to: int) -> str:
        return tell.step(count.loop(Draft(0), until=lambda d: d.good, at_most=5, also={"to": to}))

    return flow


def violations(dsn: str) -> list[Any]:
    with psycopg.connect(dsn) as conn:
        return conn.execute("select code, detail from taskq.check_invariants('all')").fetchall()


def test_the_error_of_an_exhausted_loop_says_its_kind() -> None:
    exc = LoopExhausted(UUID(int=1), {"type": "LoopExhausted", "kind": "time", "rounds": 4, "message": "too long"})
    assert (exc.kind, exc.rounds, describe(exc)["kind"]) == ("time", 4, "time")

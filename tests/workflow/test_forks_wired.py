"""Forks as they are wired, those that are refused, and as workers run them."""
# ruff: noqa: PT012 (what must be refused is a whole function)

from __future__ import annotations

from typing import Any, Literal

import psycopg
import pytest
from plan_kit import args_of, wires
from wiring_kit import Way, faults, refused, sink, source, task, wired

from taskq import Outcome, TaskQ, collect, fork
from taskq.testing import drain
from taskq.workflow import Plan
from taskq.workflow.show import mermaid, text

Kind = Literal["mail", "sms"]


def arms(*keys: Any) -> dict[Any, Any]:
    return {key: lambda: None for key in keys}


def test_a_fork_guards_each_arm_and_gives_their_values_by_key(nowhere: TaskQ) -> None:
    choose, fly, ship = source(nowhere, list[Way], "choose"), task(nowhere, "fly", str), task(nowhere, "ship", str)
    take = sink(nowhere, dict[Way, str])

    def flow() -> dict[Way, str]:
        made = fork(choose.step(), {Way.AIR: fly.step, Way.SEA: ship.step})
        take.step(made)
        return made

    plan = wired(nowhere, flow)
    assert [e for e in plan["edges"] if "when" in e] == [
        {"from": 0, "to": 1, "policy": "fail", "when": {"path": [], "has": "air"}},
        {"from": 0, "to": 2, "policy": "fail", "when": {"path": [], "has": "sea"}},
    ]
    made = {
        "fork": {
            "on": {"node": 0, "path": []},
            "arms": [["air", "air", {"node": 1, "path": []}], ["sea", "sea", {"node": 2, "path": []}]],
        }
    }
    assert (args_of(plan)["sink"], plan["result"]) == ({"x": made}, made)
    assert wires(plan) == {("choose", "sink", "fail"), ("fly", "sink", "fail"), ("ship", "sink", "fail")}
    shown = text(Plan.from_spec(plan))
    assert "those in choose of {air: fly, sea: ship}" in shown
    assert 'if it has "air"' in shown
    assert "it has #34;air#34;" in mermaid(Plan.from_spec(plan))


@pytest.mark.parametrize("returns", [list[Kind], set[Kind], frozenset[Kind], tuple[Kind, ...]])
def test_the_choice_is_a_list_or_a_set(nowhere: TaskQ, returns: Any) -> None:
    choose, a = source(nowhere, returns, "choose"), task(nowhere, "a")

    def flow() -> None:
        fork(choose.step(), {"mail": a.step, "sms": lambda: None})

    assert len(wired(nowhere, flow)["nodes"]) == 2


def test_arms_are_of_the_numbers_of_a_plan_that_is_put_in_order() -> None:
    made = {"fork": {"on": {"node": 1, "path": []}, "arms": [["a", "a", {"node": 1, "path": ["x"]}]]}}
    nodes = [{"name": "last", "job": {}, "args": {"a": made}}, {"name": "first", "job": {}, "args": {}}]
    plan = Plan.from_spec(
        {"format": 1, "workflow": "w", "nodes": nodes, "edges": [{"from": 1, "to": 0}]} | {"result": made}
    )
    assert plan.spec["nodes"][1]["args"]["a"] == {
        "fork": {"on": {"node": 0, "path": []}, "arms": [["a", "a", {"node": 0, "path": ["x"]}]]}
    }
    assert plan.spec["result"] == plan.spec["nodes"][1]["args"]["a"]
    broken = {"fork": {"on": {"node": 1, "path": []}, "arms": [["a", {"node": 1, "path": []}]]}}
    with pytest.raises(Exception, match="is no expression of a plan"):
        Plan.from_spec(
            {"format": 1, "workflow": "w", "nodes": [{**nodes[0], "args": {"a": broken}}, nodes[1]], "edges": []}
        )


@pytest.mark.parametrize(
    ("returns", "keys", "said"),
    [
        (list[Kind], ["mail"], ["there is no arm for 'sms'; add one, lambda: None for nothing"]),
        (list[Kind], ["mail", "sms", "fax"], ["the arm 'fax' is none of its values; take it out"]),
        (list[str], ["mail"], ["the type of its items is str, whose values cannot be listed; annotate it as a"]),
        (Kind, ["mail", "sms"], ["its type is Literal['mail', 'sms']; annotate it as a list, or a set"]),
        (list, ["mail"], ["its type is list; annotate it as a list"]),
        (tuple[Kind, Kind], ["mail", "sms"], ["annotate it as a list"]),
        (Any, ["mail"], ["its type is Any; annotate it as a list"]),
        (list[bool], [True, False], ["True cannot be the key of an object", "False cannot be the key of an object"]),
        (list[Literal["a", None]], ["a", None], ["None cannot be the key of an object; decide on texts"]),
    ],
    ids=str,
)
def test_arms_are_total(nowhere: TaskQ, returns: Any, keys: list[Any], said: list[str]) -> None:
    choose, take = source(nowhere, returns, "choose"), sink(nowhere)
    found = faults(nowhere, lambda: take.step(fork(choose.step(), arms(*keys))))
    assert len(found) == len(said)
    for fault, part in zip(found, said, strict=True):
        assert fault.startswith("fork on the result of choose: ")
        assert part in fault


def test_a_fork_decides_on_the_result_of_a_step(nowhere: TaskQ) -> None:
    assert "fork() decides on ['mail']; give it the result" in refused(nowhere, lambda: fork(["mail"], arms("mail")))
    with pytest.raises(Exception, match=r"fork\(\) stands outside of a workflow"):
        fork(["mail"], arms("mail"))


def test_values_that_do_not_fit_are_refused_and_so_are_parts(nowhere: TaskQ) -> None:
    choose, a, take = source(nowhere, list[Kind], "choose"), task(nowhere, "a", str), sink(nowhere, dict[Kind, int])

    def flow() -> None:
        take.step(fork(choose.step(), {"mail": a.step, "sms": a.step}))

    [fault] = faults(nowhere, flow)
    assert "the values of the fork on the result of choose is dict[Literal['mail', 'sms'], str]" in fault

    def part() -> None:
        take.step(fork(choose.step(), {"mail": a.step, "sms": a.step})["mail"])

    assert "which a fork chooses" in refused(nowhere, part)


class TestRuns:
    """Forks from the choice to what takes their values."""

    pytestmark = pytest.mark.anyio

    async def test_those_that_were_chosen_run_beside_each_other_and_are_given_by_key(self, dsn: str) -> None:
        app = TaskQ(dsn)

        @app.task
        async def choose(ways: list[Way]) -> set[Way]:
            return set(ways)

        @app.task(max_attempts=1)
        async def fly(n: int) -> str:
            if n < 0:
                raise ValueError("no wind")
            return f"flew {n}"

        @app.task
        async def ship(n: int) -> str:
            return f"shipped {n}"

        @app.task
        async def tell(done: dict[Way, Outcome[str]]) -> list[str]:
            return [f"{way.name}: {end.value or end.status}" for way, end in sorted(done.items(), key=str)]

        @app.task
        async def count(done: dict[Way, str]) -> int:
            return len(done)

        @app.workflow
        def flow(n: int, ways: list[Way]) -> list[str]:
            chosen, flown, shipped = choose.step(ways), fly.node("f"), ship.node("s")
            return tell.step(
                fork(chosen, {Way.AIR: lambda: collect(flown.step(n)), Way.SEA: lambda: collect(shipped.step(n))})
            )

        @app.workflow
        def counted(n: int, ways: list[Way]) -> int:
            return count.step(fork(choose.step(ways), {Way.AIR: lambda: fly.step(n), Way.SEA: lambda: ship.step(n)}))

        async with app:
            runs = [await flow.start(n, ways) for n, ways in ((1, [*Way]), (2, [Way.SEA]), (3, []), (-1, [*Way]))]
            number = await counted.start(1, [Way.AIR, Way.SEA])
            await drain(app, later=True)
            assert [await run.result() for run in runs] == [
                ["AIR: flew 1", "SEA: shipped 1"],
                ["SEA: shipped 2"],
                [],
                ["AIR: failed", "SEA: shipped -1"],
            ]
            assert await number.result() == 2
        with psycopg.connect(dsn) as conn:
            assert conn.execute("select * from taskq.check_invariants('all')").fetchall() == []

"""What the wiring of a map comes to, and which maps are refused before any row is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from plan_kit import faults_of, wires
from wiring_kit import faults, refused, source, task

from taskq import Outcome, Tally, TaskQ, TerminalEffect, branch, collect, gather, or_skip, tally
from taskq.workflow import Plan, Workflow
from taskq.workflow.show import mermaid, text


def planned(app: TaskQ, fn: Callable[..., Any], **options: Any) -> Plan:
    return app.workflow(**options)(fn).plan


def child_of(plan: Plan, name: str) -> Plan:
    [found] = [node["child"] for node in plan.spec["nodes"] if node["name"] == name]
    return plan.children[found]


@pytest.fixture
def app(nowhere: TaskQ) -> TaskQ:
    return nowhere


def pages(app: TaskQ) -> Any:
    return source(app, list[int], "pages")


def fetch(app: TaskQ, returns: Any = str, **more: Any) -> Any:
    return task(app, "fetch", returns, page=int, **more)


def total(app: TaskQ, takes: Any = list[str]) -> Any:
    return task(app, "total", None, values=takes)


# What it comes to -----------------------------------------------------------------------------------------------------


def test_a_map_is_a_node_with_a_plan_for_its_items(app: TaskQ) -> None:
    get, of, end = pages(app), fetch(app, lang=str), total(app)

    def flow(lang: str) -> None:
        end.step(of.map(get.step(), lang))

    plan = planned(app, flow)
    assert wires(dict(plan.spec)) == {("pages", "fetch", "fail"), ("fetch", "total", "fail")}
    [_, over, last] = plan.spec["nodes"]
    assert over["args"] == {"page": {"node": 0, "path": []}, "lang": {"input": "lang", "path": []}}
    assert (over["job"]["task"], last["args"]) == ("flow:await", {"values": {"results": 1, "path": []}})
    child = child_of(plan, "fetch")
    assert child.spec["map"] == {"item": "page", "most": 100_000, "at_once": 1000}
    assert (child.workflow, child.spec["parameters"], child.spec["on_failure"]) == (
        "flow:fetch",
        ["page", "lang"],
        "cancel",
    )
    [each] = child.spec["nodes"]
    assert (each["name"], each["job"]["task"]) == ("fetch", "fetch")
    assert [one.hash for one in plan.whole()] == [child.hash, plan.hash]
    assert (child.size, plan.size, plan.depth) == (1000, 1003, 1)


def test_options_of_the_node_are_those_of_each_child(app: TaskQ) -> None:
    of = fetch(app)

    def flow(pages: list[int]) -> list[str]:
        made: list[str] = of.node("pull", priority=2, queue="web", timeout="5s", at_once=7, at_most=50).map(pages)
        return made

    plan = planned(app, flow)
    child = child_of(plan, "pull")
    job = child.spec["nodes"][0]["job"]
    assert (job["priority"], job["queue"]) == (2, "web")
    assert child.policies[job["policy_id"]].timeout == 5
    assert child.spec["map"] == {"item": "page", "most": 50, "at_once": 7}
    waits = plan.spec["nodes"][0]["job"]
    assert (waits["queue"], waits["task"], waits["effect_class"]) == ("web", "flow:await", "pure")
    assert plan.spec["result"] == {"results": 0, "path": []}


def test_a_map_goes_on_after_failures_if_its_outcomes_are_collected(app: TaskQ) -> None:
    of, end = fetch(app), total(app, list[Outcome[str]])
    told, listed = task(app, "told", None, what=Tally), task(app, "listed", None, values=list[str])

    def flow(pages: list[int], more: list[int]) -> None:
        end.step(collect(of.map(pages)))
        told.step(tally(of.map(more)))
        listed.step(or_skip(of.map(more)))

    plan = planned(app, flow)
    assert [child_of(plan, name).spec["on_failure"] for name in ("fetch", "fetch-2", "fetch-3")] == [
        "finish",
        "finish",
        "cancel",
    ]
    args = {node["name"]: node["args"] for node in plan.spec["nodes"]}
    assert args["total"] == {"values": {"outcomes": 0, "path": []}}
    assert args["told"] == {"what": {"tally": 2, "path": []}}
    assert {policy for _, _, policy in wires(dict(plan.spec))} == {"collect", "skip"}


def test_a_map_of_a_workflow_that_finishes_goes_on_after_failures(app: TaskQ) -> None:
    of = fetch(app)
    plan = planned(app, named(of.map, list[int], list[str]), on_failure="finish")
    assert child_of(plan, "fetch").spec["on_failure"] == "finish"


def named(fn: Any, takes: Any, returns: Any) -> Any:
    def flow(pages: Any) -> Any:
        return fn(pages)

    flow.__annotations__ = {"pages": takes, "return": returns}
    return flow


def test_maps_of_runs_have_the_plan_of_the_run_in_theirs(app: TaskQ) -> None:
    of = fetch(app)

    @app.workflow
    def inner(page: int, times: int = 3) -> list[str]:
        made: list[str] = of.map([page, times])
        return made

    plan = planned(app, named(lambda pages: inner.node("deep", at_most=9).map(pages), list[int], list[list[str]]))
    child = child_of(plan, "deep")
    assert child.spec["map"] == {"item": "page", "most": 9, "at_once": 19}
    assert child.spec["nodes"][0]["child"] == inner.plan.hash
    assert plan.spec["nodes"][0]["args"]["times"] == {"value": 3}
    assert [one.hash for one in plan.whole()][-3:] == [inner.plan.hash, child.hash, plan.hash]
    assert plan.depth == 3


def test_constants_and_lists_of_results_are_mapped(app: TaskQ) -> None:
    of, one = fetch(app), source(app, int, "one")

    def flow() -> list[list[str]]:
        return [of.map([1, 2]), of.map([one.step(), 3]), of.map(()), of.map(gather([one.step()]))]

    plan = planned(app, flow)
    args = [node["args"]["page"] for node in plan.spec["nodes"] if node["name"].startswith("fetch")]
    assert args[:3] == [{"value": [1, 2]}, {"list": [{"node": 1, "path": []}, {"value": 3}]}, {"value": []}]


def test_results_of_a_map_are_mapped_again_and_parts_of_them_taken(app: TaskQ) -> None:
    of, again = fetch(app, int), task(app, "again", str, n=int)

    def flow(pages: list[int]) -> str:
        first: list[str] = again.map(of.map(pages))
        return first[0]

    plan = planned(app, flow)
    assert plan.spec["nodes"][1]["args"] == {"n": {"results": 0, "path": []}}
    assert plan.spec["result"] == {"results": 1, "path": [0]}


def test_a_map_may_stand_in_an_arm(app: TaskQ) -> None:
    of, yes = fetch(app), source(app, bool, "yes")

    def flow(pages: list[int]) -> list[str] | None:
        chosen: list[str] | None = branch(yes.step(), {True: lambda: of.map(pages), False: lambda: None})
        return chosen

    plan = planned(app, flow)
    assert plan.spec["result"]["case"]["arms"][0][1] == {"results": 1, "path": []}


def test_a_plan_that_is_put_in_order_keeps_what_takes_a_map(app: TaskQ) -> None:
    child = child_of(planned(app, named(lambda pages: fetch(app).map(pages), list[int], list[str])), "fetch")
    nodes = [
        {"name": "last", "job": {}, "args": {"a": {"outcomes": 1, "path": []}, "b": {"tally": 1, "path": []}}},
        {"name": "over", "job": {}, "args": {}, "child": child.hash},
    ]
    given = {"format": 1, "workflow": "w", "nodes": nodes, "edges": [{"from": 1, "to": 0, "policy": "collect"}]}
    plan = Plan.from_spec(given | {"result": {"results": 1, "path": []}})
    assert plan.names == ["over", "last"]
    assert plan.spec["nodes"][1]["args"] == {"a": {"outcomes": 0, "path": []}, "b": {"tally": 0, "path": []}}
    assert plan.spec["result"] == {"results": 0, "path": []}


def test_a_map_is_shown_with_its_bounds(app: TaskQ) -> None:
    of, end = fetch(app), total(app, list[Outcome[str]])

    def flow(pages: list[int]) -> None:
        end.step(collect(of.node("pull", at_once=7).map(pages)))

    plan = planned(app, flow)
    shown = text(plan)
    assert "each fetch" in shown
    assert "for each page, 7 at a time, at most 100,000: idempotent, queue default, priority 5" in shown
    assert "values=outcomes of pull" in shown
    assert 'n0[/"pull<br/>each fetch"/]' in mermaid(plan)


def test_a_map_of_runs_is_shown_as_such(app: TaskQ) -> None:
    @app.workflow
    def inner(page: int) -> list[str]:
        made: list[str] = fetch(app).map([page])
        return made

    plan = planned(app, named(inner.map, list[int], list[list[str]]))
    assert "each run of inner" in text(plan)
    assert f"for each page, 19 at a time, at most 100,000: a run of plan {inner.plan.hash[:9]}..." in text(plan)


# What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (str, "fetch: map() goes over a list of int, and the argument pages is str"),
        (list[str], "fetch: map() goes over a list of int, and the argument pages is list[str]"),
        (int, "fetch: map() goes over a list of int, and the argument pages is int"),
        (dict[int, int], "fetch: map() goes over a list of int, and the argument pages is dict[int, int]"),
    ],
)
def test_a_symbol_that_is_no_list_of_items_is_refused(app: TaskQ, items: Any, says: str) -> None:
    of = fetch(app)
    assert faults(app, named(of.map, items, list[str])) == [f"node {says}"]


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ("ab", "map() goes over a list of int, and was given 'ab'"),
        (None, "map() goes over a list of int, and was given None"),
        (["a"], "page: Expected `int`, got `str`"),
    ],
)
def test_what_is_no_list_of_items_is_refused(app: TaskQ, items: Any, says: str) -> None:
    of = fetch(app)

    def flow() -> list[str]:
        made: list[str] = of.map(items)
        return made

    [fault] = faults(app, flow)
    assert says in fault


def test_a_list_with_a_result_that_does_not_fit_is_refused(app: TaskQ) -> None:
    of, name = fetch(app), source(app, str, "name")

    def flow() -> list[str]:
        made: list[str] = of.map([name.step()])
        return made

    assert faults(app, flow) == ["node fetch: map() goes over at [0] int, and the result of name is str"]


def test_what_is_computed_elsewhere_is_refused(app: TaskQ) -> None:
    kept: list[Any] = []
    get, of = pages(app), fetch(app)

    def keeping() -> list[int]:
        kept.append(get.step())
        given: list[int] = kept[0]
        return given

    planned(app, keeping)

    def flow() -> list[str]:
        made: list[str] = of.map(kept[0])
        return made

    [fault] = faults(app, flow)
    assert "comes from another wiring" in fault


def test_results_that_do_not_fit_are_refused(app: TaskQ) -> None:
    of, end = fetch(app, float), total(app)

    def flow(pages: list[int]) -> None:
        end.step(of.map(pages))
        end.step(collect(of.map(pages)))

    said = faults(app, flow)
    assert said[0] == "node total: values takes list[str], and the results of fetch is list[float]"
    assert "list[taskq.workflow.symbols.Outcome[float]]" in said[1]


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({"at_once": 0}, "at_once is 0; give a number from 1 to 10000"),
        ({"at_once": 10_001}, "at_once is 10001; give a number from 1 to 10000"),
        ({"at_once": True}, "at_once is True; give a number from 1 to 10000"),
        ({"at_most": 100_001}, "at_most is 100001; give a number from 1 to 100000"),
        ({"at_most": "9"}, "at_most is '9'; give a number from 1 to 100000"),
    ],
)
def test_bounds_that_are_none_are_refused(app: TaskQ, bounds: dict[str, Any], says: str) -> None:
    of = fetch(app)
    assert faults(app, named(lambda pages: of.node(**bounds).map(pages), list[int], list[str])) == [
        f"node fetch: {says}"
    ]


def test_a_map_that_is_undone_has_fewer_items(app: TaskQ) -> None:
    undo = task(app, "undo", None, what=Any)
    of = fetch(app)
    effect = TerminalEffect(undo, payload={"what": 1})

    def flow(pages: list[int]) -> list[str]:
        made: list[str] = of.node(compensate=effect).map(pages)
        return made

    plan = planned(app, flow)
    assert child_of(plan, "fetch").spec["map"]["most"] == 10_000
    assert plan.spec["nodes"][0]["compensate"]["task"] == "undo"
    assert "compensate" not in child_of(plan, "fetch").spec["nodes"][0]
    more = named(lambda pages: of.node(compensate=effect, at_most=10_001).map(pages), list[int], list[str])
    [fault] = faults(app, more, name="more")
    assert fault == "node fetch: at_most is 10001; give a number from 1 to 10000, since each child is compensated"


@pytest.mark.parametrize("of", ["task", "workflow"])
def test_bounds_of_a_map_are_refused_where_there_is_none(app: TaskQ, of: str) -> None:
    each = fetch(app)
    inner: Workflow[..., Any] = app.workflow(name="inner")(named(each.step, int, str))

    def flow(page: int) -> Any:
        return each.node(at_once=3).step(page) if of == "task" else inner.node(at_most=3).child(page)

    how = "step" if of == "task" else "child"
    assert faults(app, flow) == [
        f"at_once, at_most and ahead are the bounds of a map or an emit, and {how}() is none: leave them out"
    ]


def test_a_task_that_takes_nothing_by_its_place_is_not_mapped(app: TaskQ) -> None:
    @app.task
    def bare() -> None: ...

    @app.task
    def by_name(*, page: int) -> None: ...

    for each in (bare, by_name):
        [fault] = faults(app, named(lambda pages, of=each: of.map(pages), list[int], Any), name=f"of-{each.name}")
        assert f"node {each.name}: {each.name}() takes 0 positional arguments but 1 was given" in fault


def test_a_map_outside_of_a_workflow_is_refused(app: TaskQ) -> None:
    of = fetch(app)
    with pytest.raises(Exception, match=r"fetch.map\(\) stands outside of a workflow"):
        of.map([1])
    with pytest.raises(Exception, match=r"fetch.node\(\).map\(\) stands outside of a workflow"):
        of.node().map([1])


def test_only_a_whole_map_is_collected_and_none_is_branched_on(app: TaskQ) -> None:
    of = fetch(app, bool)

    def flow(pages: list[int]) -> None:
        collect(of.map(pages)[0])

    assert "collect() was given" in refused(app, flow)

    def flow2(pages: list[int]) -> None:
        tally(of.map(pages)[0])

    assert "tally() was given" in refused(app, flow2)

    def flow3(pages: list[int]) -> None:
        branch(of.map(pages)[0], {True: lambda: None, False: lambda: None})

    assert "branch() decides on" in refused(app, flow3)


def test_a_run_that_maps_over_itself_is_refused(app: TaskQ) -> None:
    def flow(pages: list[int]) -> None:
        made.map([[1]])

    made: Workflow[..., Any] = app.workflow(flow)
    with pytest.raises(Exception, match="is a child run of itself"):
        made.plan  # noqa: B018


def test_a_map_of_another_app_is_refused(app: TaskQ) -> None:
    of = fetch(TaskQ("postgresql://nobody@127.0.0.1:1/y"))
    [fault] = faults(app, named(of.map, list[int], list[str]))
    assert "belongs to another TaskQ" in fault


def test_a_map_that_nobody_takes_is_a_fault_and_one_without_results_is_not(app: TaskQ) -> None:
    of, nothing = fetch(app), task(app, "nothing", None, page=int)

    def flow(pages: list[int]) -> None:
        of.map(pages)
        nothing.map(pages)

    assert len(faults(app, flow)) == 1
    assert "its result is never used" in faults_of(app.workflows["flow"])[0]


def test_more_at_a_time_than_a_tree_may_have_is_refused(app: TaskQ) -> None:
    of = fetch(app)

    def flow(pages: list[int]) -> list[list[str]]:
        return [of.node(f"m{n}", at_once=10_000).map(pages) for n in range(10)]

    [fault] = faults(app, flow)
    assert "has 1 levels and 100010 nodes at a time" in fault
    assert "declare a smaller at_once" in fault

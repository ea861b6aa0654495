"""The workflows that maps and emits of bodies are runs of: the same for the same, wherever they are made."""

from __future__ import annotations

from typing import Any

import pytest
from wiring_kit import task

from taskq import Page, TaskQ
from taskq.workflow import shapes
from taskq.workflow.shapes import shape_of


@pytest.fixture
def app(nowhere: TaskQ) -> TaskQ:
    return nowhere


def count(app: TaskQ, name: str = "count") -> Any:
    return task(app, name, int, path=str, by=int)


def files(app: TaskQ) -> Any:
    return task(app, "files", Page[str, int], after=int | None, root=str)


def test_a_map_has_the_plan_of_its_one_node_and_what_it_is_given_is_the_input(app: TaskQ) -> None:
    made = shape_of("map", count(app), ["a", "b"], {"by": 2}, "results", "bodies", 5, 9)
    plan = made.workflow.plan
    assert (plan.workflow, plan.spec["parameters"], plan.spec["edges"]) == ("count:map", ["path", "by"], [])
    assert made.given == {"path": ["a", "b"], "by": 2}
    [node] = plan.spec["nodes"]
    assert (node["name"], node["job"]["task"], node["job"]["queue"]) == ("count", "taskq:await", "bodies")
    assert plan.spec["result"] == {"results": 0, "path": []}
    assert plan.children[node["child"]].spec["map"] == {"item": "path", "most": 9, "at_once": 5}


def test_outcomes_of_an_emit_are_collected_by_a_node(app: TaskQ) -> None:
    pages = files(app).node("list", queue="slow").pages("here")
    made = shape_of("emit", count(app), pages, {"by": 2}, "outcomes", "bodies")
    plan = made.workflow.plan
    assert made.given == {"each_by": 2, "source_root": "here"}
    [over, last] = plan.spec["nodes"]
    assert [edge["policy"] for edge in plan.spec["edges"]] == ["collect"]
    assert (last["job"]["task"], last["job"]["queue"]) == ("taskq:collect", "bodies")
    child = plan.children[over["child"]]
    assert (child.spec["on_failure"], [each["name"] for each in child.spec["nodes"]]) == ("finish", ["count", "list"])
    assert child.spec["nodes"][1]["job"]["queue"] == "slow"


def test_it_is_made_once_and_is_the_same_in_another_process(app: TaskQ, monkeypatch: pytest.MonkeyPatch) -> None:
    of, other = count(app), count(TaskQ("postgresql://elsewhere"))

    def made(task: Any, by: int = 1, **more: Any) -> Any:
        return shape_of("map", task, ["a"], {"by": by}, "results", "bodies", **more).workflow

    first = made(of)
    assert made(of, by=2) is first
    assert made(of.using(priority=5)) is not first
    assert made(other).plan.hash == first.plan.hash
    assert made(of, at_once=2).plan.hash != first.plan.hash
    monkeypatch.setattr(shapes, "_MOST_SHAPES", len(app._shapes))
    made(of, at_once=3)
    assert len(app._shapes) == 1


def test_tasks_with_long_names_are_mapped(app: TaskQ) -> None:
    of = count(app, "c" * 128)
    assert shape_of("map", of, [], {"by": 1}, "tally", "q").workflow.plan.workflow == "c" * 118 + ":map"
    emit = shape_of("emit", of, files(app).pages("r"), {"by": 1}, "tally", "q")
    assert emit.workflow.plan.workflow == f"files/{'c' * 58}:emit"

"""``taskq workflows``: the workflows of an app, their plans as text, Mermaid and JSON, and wirings that cannot run."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from cli_kit import Cli, make_cli  # noqa: F401

from taskq import TaskQ
from taskq.workflow import Plan
from taskq.workflow.show import LONGEST, expression, mermaid, text

ORDERS = """
from dataclasses import dataclass
from taskq import Outcome, Ref, TaskQ, TerminalEffect, branch, collect, or_skip

app = TaskQ()
nothing = TaskQ()

@dataclass
class Paid:
    receipt: str
    ok: bool

@app.task
async def reserve(order: int) -> str: return ""

@app.task
async def release(order: int) -> None: ...

@app.task(effect_class="side_effecting", queue="money")
async def charge(order: int, hold: str) -> Paid: return Paid("", True)

@app.task
async def ship(receipt: str) -> str: return ""

@app.task
async def sorry(order: int) -> str: return ""

@app.task
async def notify(what: str, all_: list[Outcome[str]], extra: str = "x") -> str: return ""

@app.workflow(effects=[TerminalEffect(sorry, on="failed", payload={"order": Ref.arg("order")}, name="tell")])
def flow(order: int) -> str:
    undo = TerminalEffect(release, payload={"order": Ref.arg("order")})
    hold = reserve.node(compensate=undo).step(order)
    paid = charge.node("deposit", priority=7, deadline="1h").step(order, hold)
    what = branch(paid.ok, {True: lambda: ship.step(paid.receipt), False: lambda: sorry.step(order)})
    return notify.step(what, [collect(hold)], or_skip(hold))

@app.workflow(on_failure="finish")
def single() -> None:
    release.step(1)
"""

BROKEN = """
from taskq import TaskQ

app = TaskQ()

@app.task
async def give() -> int: return 1

@app.workflow
def unused() -> None:
    give.step()
    give.step(5)

@app.workflow
def computes() -> int:
    return give.step() + 1

@app.workflow
def raises() -> None:
    raise KeyError("no such thing")

@app.workflow
def fine() -> int:
    return give.step()
"""


@pytest.fixture(autouse=True)
def modules(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in (("orders", ORDERS), ("broken", BROKEN)):
        (cli.folder / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delenv("TASKQ_DSN")


def test_list_shows_every_workflow_of_an_app(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cli.ok("workflows", "list", "--app", "orders:app", "--json").json
    assert [(row["workflow"], row["nodes"], row["edges"], row["fault"]) for row in found] == [
        ("flow", 5, 9, None),
        ("single", 1, 0, None),
    ]
    assert all(re.fullmatch("p[0-9a-f]{64}", row["plan"]) for row in found)
    assert cli.ok("workflows", "list", "--app", "orders:nothing").out == "the app has no workflows\n"
    monkeypatch.setenv("TASKQ_APP", "orders:app")
    assert "single" in cli.ok("workflows", "list").out
    assert cli.ok("workflows", "show", "single").out.startswith("workflow ")


def test_show_prints_a_plan_as_text(cli: Cli) -> None:
    out = cli.ok("workflows", "show", "flow", "--app", "orders:app").out
    head, nodes, edges, effects = out.split("\n\n")
    facts = dict(re.split(r" {2,}", line, maxsplit=1) for line in head.splitlines())
    assert (facts["workflow"], facts["parameters"], facts["result"]) == ("flow", "$order", "notify")
    assert facts["on failure"].startswith("cancel: ")
    rows = {line.split()[0]: re.split(r" {2,}", line) for line in nodes.splitlines()[2:]}
    assert list(rows) == ["reserve", "deposit", "ship", "sorry", "notify"]
    assert rows["reserve"][1:3] == ["reserve", "order=$order"]
    assert rows["reserve"][3].endswith("attempts, undone by release")
    assert rows["deposit"][1:3] == ["charge", "order=$order, hold=reserve"]
    assert rows["deposit"][3].startswith("side_effecting, queue money, priority 7, ")
    assert rows["deposit"][3].endswith("within 3600 s")
    assert rows["ship"][2] == "receipt=deposit.receipt"
    assert rows["notify"][2].startswith("what=by deposit.ok {true: ship, false: sorry}, all_=[outcome of reserve]")
    lines = [re.split(r" {2,}", line) for line in edges.splitlines()]
    assert lines[:2] == [["edges"], ["from", "to", "if it fails", "condition"]]
    assert ["reserve", "deposit", "fail"] in lines
    assert ["deposit", "ship", "fail", "if ok = true"] in lines
    assert ["deposit", "sorry", "fail", "if ok = false"] in lines
    assert ["reserve", "notify", "collect"] in lines
    assert ["reserve", "notify", "skip"] in lines
    assert ["ship", "notify", "fail", "takes the branch's value"] in lines
    assert effects.splitlines()[2].split() == ["tell", "failed", "sorry"]
    single = cli.ok("workflows", "show", "single", "--app", "orders:app").out
    assert ("edges" in single, "effects" in single, "finish: " in single) == (False, False, True)


def test_show_prints_a_plan_as_mermaid(cli: Cli) -> None:
    out = cli.ok("workflows", "show", "flow", "--app", "orders:app", "--mermaid").out
    assert out.splitlines()[:6] == [
        "flowchart TD",
        '  n0["reserve<br/>undone by release"]',
        '  n1[["deposit<br/>charge"]]',
        '  n2["ship"]',
        '  n3["sorry"]',
        '  n4["notify"]',
    ]
    arrows = out.splitlines()[6:]
    assert "  n0 --> n1" in arrows
    assert '  n1 -->|"if ok = true"| n2' in arrows
    assert '  n0 -->|"collect, skip"| n4' in arrows
    assert arrows[-3:] == ['  ended(["the run ends"])', '  e0["tell<br/>sorry"]', '  ended -.->|"failed"| e0']
    assert cli.ok("workflows", "show", "single", "--app", "orders:app", "--mermaid").out == (
        'flowchart TD\n  n0["release"]\n'
    )


def test_show_prints_a_plan_as_it_is_stored(cli: Cli) -> None:
    found = cli.ok("workflows", "show", "flow", "--app", "orders:app", "--json").json
    plan = Plan.from_spec(found["plan"])
    assert plan.hash == found["hash"]
    assert {node["job"]["policy_id"] for node in found["plan"]["nodes"]} <= set(found["policies"])
    assert "nodes" in found["plan"]
    both = cli("workflows", "show", "flow", "--app", "orders:app", "--json", "--mermaid")
    assert (both.code, "not both" in both.err) == (2, True)


def test_wirings_that_cannot_run_are_told_and_the_others_shown(cli: Cli) -> None:
    done = cli("workflows", "list", "--app", "broken:app")
    assert done.code == 1
    shown = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()[1:]}
    assert shown["fine"][:2] == ["1", "0"]
    assert shown["unused"] == []
    told = done.err.splitlines()
    assert len(told) == 3
    assert all(line.startswith("error: ") for line in told)
    assert "workflow raises raised KeyError while it was wired, at " in told[1]
    assert told[1].endswith("broken.py:20: 'no such thing'")
    assert "1. " in told[2]
    assert "2. " in told[2]
    as_json = cli("workflows", "list", "--app", "broken:app", "--json")
    assert (as_json.code, as_json.err) == (1, "")
    assert [row["workflow"] for row in as_json.json if row["fault"]] == ["computes", "raises", "unused"]
    for name, said in (("unused", "cannot run"), ("computes", "only wires"), ("raises", "KeyError")):
        for flags in ([], ["--json"], ["--mermaid"]):
            done = cli("workflows", "show", name, "--app", "broken:app", *flags)
            assert (done.code, done.out, said in done.err) == (1, "", True), done


def test_apps_and_workflows_that_are_not_there(cli: Cli) -> None:
    done = cli("workflows", "show", "nope", "--app", "orders:app")
    assert (done.code, done.out) == (1, "")
    assert "there is no workflow 'nope'; known are: flow, single" in done.err
    for args in (["list"], ["show", "flow"]):
        done = cli("workflows", *args)
        assert (done.code, "no app is named; give --app module:attribute" in done.err) == (2, True)
        done = cli("workflows", *args, "--app", "orders:shop")
        assert (done.code, "it has a TaskQ named app and nothing" in done.err) == (2, True)
        done = cli("workflows", *args, "--app", "absent:app")
        assert (done.code, "there is no module 'absent'" in done.err) == (2, True)


# Rendering ------------------------------------------------------------------------------------------------------------


def plan(*nodes: dict[str, Any], edges: tuple[dict[str, Any], ...] = (), **more: Any) -> Plan:
    spec = {
        "format": 1,
        "workflow": "w",
        "on_failure": "cancel",
        "receipts": 100,
        "parameters": [],
        "nodes": list(nodes),
        "edges": list(edges),
        "result": {"value": None},
        "effects": [],
        **more,
    }
    return Plan.from_spec(spec)


def node(name: str, args: dict[str, Any] | None = None, **job: Any) -> dict[str, Any]:
    job = {"task": name, "queue": "q", "effect_class": "pure", **job}
    return {"name": name, "job": job, "args": args or {}}


@pytest.mark.parametrize(
    ("expr", "said"),
    [
        ({"value": {"a": [1, "ü"]}}, '{"a": [1, "ü"]}'),
        ({"input": "x", "path": []}, "$x"),
        ({"input": "x"}, "$x"),
        ({"input": "x", "path": ["a", 0, "b"]}, "$x.a[0].b"),
        ({"node": 1, "path": [2]}, "b[2]"),
        ({"outcome": 0, "path": ["value"]}, "outcome of a.value"),
        ({"list": [{"node": 0}, {"value": 5}]}, "[a, 5]"),
        ({"object": {"k": {"node": 0}, "l": {"input": "x"}}}, "{k: a, l: $x}"),
        ({"case": {"on": {"node": 0}, "arms": [["y", {"node": 1}], [None, {"value": 1}]]}}, 'by a {"y": b, null: 1}'),
        ({"of": "a later version"}, '{"of": "a later version"}'),
    ],
)
def test_expressions_in_short(expr: dict[str, Any], said: str) -> None:
    assert expression(expr, ["a", "b"]) == said


def test_long_expressions_are_cut() -> None:
    assert expression({"value": "x" * 100}, []) == f'"{"x" * (LONGEST - 4)}...'
    assert len(expression({"value": "x" * (LONGEST - 2)}, [])) == LONGEST


def test_names_that_mermaid_would_read_as_its_own() -> None:
    name = 'a"<b>;`%{x}'
    lines = mermaid(plan(node(name))).splitlines()
    assert lines == ["flowchart TD", '  n0["a#34;#60;b#62;#59;#96;#37;#123;x#125;"]']


def test_conditions_and_bounds_in_text() -> None:
    made = plan(
        node("a", max_attempts=2**31 - 1, run_in=60),
        node("b", {"x": {"value": 1}}, max_attempts=1),
        edges=({"from": 0, "to": 1, "policy": "fail", "when": {"path": [], "equals": "yes"}},),
    )
    assert "any number of attempts, after 60 s" in text(made)
    assert "1 attempt\n" in text(made)
    assert 'if it = "yes"' in text(made)
    assert '  n0 -->|"if it = #34;yes#34;"| n1' in mermaid(made).splitlines()


def test_printing_a_plan_changes_nothing_of_it() -> None:
    app = TaskQ()

    @app.task
    async def one(x: int) -> int:
        return x

    @app.workflow
    def w(x: int) -> int:
        return one.step(x)

    before = json.dumps(w.plan.spec, sort_keys=True)
    text(w.plan)
    mermaid(w.plan)
    assert json.dumps(w.plan.spec, sort_keys=True) == before

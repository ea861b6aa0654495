"""Plans for people: as text, and as a Mermaid flowchart. ``taskq workflows show`` prints them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from taskq.policy import UNLIMITED
from taskq.workflow.hidden import AWAIT
from taskq.workflow.plan import Plan

__all__ = ["expression", "mermaid", "text"]

LONGEST: Final = 60
"""Characters of an expression; what is cut off ends with dots."""
_ON_FAILURE: Final = {
    "cancel": "cancel: a failure that no edge handles cancels the rest of the run",
    "finish": "finish: after a failure that no edge handles the rest runs to its end",
}
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.,:/=$()[]'")


def text(plan: Plan) -> str:
    """A plan as text: its nodes and how each is run, its edges with their policies, its result and effects.

    Arguments of the run are written ``$name``, results of nodes by the node's name, both with the path to a part.
    """
    spec = plan.spec
    names = plan.names
    head = [
        ("workflow", plan.workflow),
        ("plan", plan.hash),
        ("parameters", ", ".join(f"${name}" for name in spec["parameters"]) or "none"),
        ("on failure", _ON_FAILURE[spec["on_failure"]]),
        ("receipts", f"the newest {spec['receipts']:,} of a run are kept"),
        ("result", expression(spec["result"], names)),
    ]
    if "work_budget" in spec:
        head.insert(5, ("work budget", f"{spec['work_budget']:,} bodies in all"))
    nodes = [("node", "task", "takes", "runs as")]
    for node in spec["nodes"]:
        takes = ", ".join(f"{name}={expression(expr, names)}" for name, expr in node["args"].items())
        nodes.append((node["name"], _runs(plan, node), takes, _runs_as(plan, node)))
    edges = [("from", "to", "if it fails", "condition")]
    edges += [(names[e["from"]], names[e["to"]], e["policy"], _condition(e) or "") for e in _in_order(spec["edges"])]
    effects = [("effect", "on", "task")]
    effects += [(each["name"], _statuses(each), each["task"]) for each in spec["effects"]]
    parts = [_columns(head), f"nodes\n{_columns(nodes)}"]
    parts += [f"{title}\n{_columns(rows)}" for title, rows in (("edges", edges), ("effects", effects)) if rows[1:]]
    return "\n\n".join(parts)


def mermaid(plan: Plan) -> str:
    """A plan as a Mermaid flowchart.

    Side-effecting nodes have a double border, child runs are hexagons, maps and emits are slanted, loops are round. An
    edge says its condition, and its policy where that is not ``fail``; dashed ones lead to effects of the run's end.
    """
    spec = plan.spec
    lines = ["flowchart TD"]
    for ix, node in enumerate(spec["nodes"]):
        said = [_escaped(node["name"])]
        if (runs := _runs(plan, node)) != node["name"]:
            said.append(_escaped(runs))
        if undone := node.get("compensate"):
            said.append(f"undone by {_escaped(undone['task'])}")
        opening, closing = ("[[", "]]") if node["job"].get("effect_class") == "side_effecting" else ("[", "]")
        if "child" in node:
            opening, closing = ("{{", "}}") if _map_of(plan, node) is None else ("[/", "/]")
            if _loop_of(plan, node) is not None:
                opening, closing = "([", "])"
        lines.append(f'  n{ix}{opening}"{"<br/>".join(said)}"{closing}')
    arrows: dict[tuple[int, int], list[str]] = {}
    for edge in _in_order(spec["edges"]):
        said = arrows.setdefault((edge["from"], edge["to"]), [])
        said += [_condition(edge) or ""] + ([edge["policy"]] if edge["policy"] != "fail" else [])
    for (source, target), found in arrows.items():
        label = ", ".join(dict.fromkeys(filter(None, found)))
        lines.append(f'  n{source} -->|"{_escaped(label)}"| n{target}' if label else f"  n{source} --> n{target}")
    if spec["effects"]:
        lines.append('  ended(["the run ends"])')
        for n, each in enumerate(spec["effects"]):
            said = [_escaped(each["name"])] + ([_escaped(each["task"])] if each["task"] != each["name"] else [])
            lines.append(f'  e{n}["{"<br/>".join(said)}"]')
            lines.append(f'  ended -.->|"{_escaped(_statuses(each))}"| e{n}')
    return "\n".join(lines)


def expression(expr: Mapping[str, Any], names: Sequence[str]) -> str:
    """An expression of a plan in short.

    Args:
        expr: The expression.
        names: The names of the plan's nodes, by number.
    """
    said = _said(expr, names)
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 3]}..."


def _said(expr: Mapping[str, Any], names: Sequence[str]) -> str:
    match expr:
        case {"value": value}:
            return json.dumps(value, ensure_ascii=False)
        case {"input": name}:
            return f"${name}{_path(expr)}"
        case {"node": ix}:
            return f"{names[ix]}{_path(expr)}"
        case {"outcome": ix}:
            return f"outcome of {names[ix]}{_path(expr)}"
        case {"results": ix} | {"outcomes": ix} | {"tally": ix}:
            return f"{next(iter(expr.keys() - {'path'}))} of {names[ix]}{_path(expr)}"
        case {"list": items}:
            return f"[{', '.join(_said(each, names) for each in items)}]"
        case {"object": parts}:
            return f"{{{', '.join(f'{key}: {_said(each, names)}' for key, each in parts.items())}}}"
        case {"case": {"on": on, "arms": arms}}:
            told = ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {_said(each, names)}" for key, each in arms)
            return f"by {_said(on, names)} {{{told}}}"
        case {"fork": {"on": on, "arms": arms}}:
            told = ", ".join(f"{key}: {_said(each, names)}" for _, key, each in arms)
            return f"those in {_said(on, names)} of {{{told}}}"
    return json.dumps(expr, ensure_ascii=False)


def _path(expr: Mapping[str, Any]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in expr.get("path") or ())


def _condition(edge: Mapping[str, Any]) -> str | None:
    if arm := edge.get("when"):
        if "has" in arm:
            return f"if {_path(arm).removeprefix('.') or 'it'} has {json.dumps(arm['has'], ensure_ascii=False)}"
        return f"if {_path(arm).removeprefix('.') or 'it'} = {json.dumps(arm['equals'], ensure_ascii=False)}"
    return "takes the branch's value" if edge.get("merge") else None


def _map_of(plan: Plan, node: Mapping[str, Any]) -> Plan | None:
    """The plan of the map that a node is, if it is one."""
    child = plan.children.get(node.get("child", ""))
    return None if child is None or child.map is None else child


def _loop_of(plan: Plan, node: Mapping[str, Any]) -> Plan | None:
    """The plan of the loop that a node is, if it is one."""
    child = plan.children.get(node.get("child", ""))
    return None if child is None or child.loop is None else child


def _runs(plan: Plan, node: Mapping[str, Any]) -> str:
    if (over := _map_of(plan, node)) is not None:
        pages = f" of pages of {over.spec['nodes'][1]['job']['task']}" if "pages" in (over.map or {}) else ""
        return f"each {_runs(over, over.spec['nodes'][0])}{pages}"
    if (rounds := _loop_of(plan, node)) is not None:
        return f"rounds of {_runs(rounds, rounds.spec['nodes'][0])}"
    task = str(node["job"]["task"])
    return f"run of {task.removesuffix(AWAIT)}" if "child" in node else task


def _runs_as(plan: Plan, node: Mapping[str, Any]) -> str:
    job = node["job"]
    if (over := _map_of(plan, node)) is not None and (bounds := over.map) is not None:
        each = f"for each {bounds['item']}, {bounds['at_once']:,} at a time, at most {bounds['most']:,}"
        if pages := bounds.get("pages"):
            each += f", a page while at most {pages['ahead']:,} are open"
        return ", ".join([f"{each}: {_runs_as(over, over.spec['nodes'][0])}", *_undone(node)])
    if (rounds := _loop_of(plan, node)) is not None and (loop := rounds.loop) is not None:
        return ", ".join([f"{_rounds(loop)}: {_runs_as(rounds, rounds.spec['nodes'][0])}", *_undone(node)])
    if "child" in node:
        return ", ".join([f"a run of plan {node['child'][:9]}...", *_undone(node)])
    most = job.get("max_attempts", 1)
    said = [
        job["effect_class"],
        f"queue {job['queue']}",
        f"priority {job.get('priority', 5)}",
        "any number of attempts" if most >= UNLIMITED else f"{most:,} attempt{'' if most == 1 else 's'}",
    ]
    if job.get("run_in") is not None:
        said.append(f"after {job['run_in']:g} s")
    if job.get("deadline_in") is not None:
        said.append(f"within {job['deadline_in']:g} s")
    return ", ".join([*said, *_undone(node)])


def _rounds(loop: Mapping[str, Any]) -> str:
    ends = " or ".join(json.dumps(value, ensure_ascii=False) for value in loop["ends"])
    said = f"until {_path(loop).removeprefix('.') or loop['item']} = {ends}, at most {loop['most']:,} rounds"
    within = f", begun within {loop['within']:g} s" if "within" in loop else ""
    return f"{said}{within}, else {'the last state' if loop['exhausted'] == 'give' else 'it fails'}"


def _undone(node: Mapping[str, Any]) -> list[str]:
    return [f"undone by {undone['task']}"] if (undone := node.get("compensate")) else []


def _statuses(effect: Mapping[str, Any]) -> str:
    on = effect["on"]
    return on if isinstance(on, str) else ", ".join(sorted(on))


def _in_order(edges: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """By target, so that what one node waits for stands together."""
    return sorted(edges, key=lambda edge: (edge["to"], edge["from"]))


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _escaped(said: str) -> str:
    """Text within the quotes of Mermaid, which has codes for what it would read as its own."""
    return "".join(char if char in _PLAIN else f"#{ord(char)};" for char in said)

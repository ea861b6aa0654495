"""What a plan comes to, without a database: the same rules in the plainest form, over all nodes at once.

The statuses of a run that is to finish do not depend on the order in which its nodes end, so one pass in the order of
the plan gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

FAILED = ("failed", "cancelled", "blocked")
MISSING = object()


def at(value: Any, path: list[Any]) -> Any:
    for step in path:
        try:
            value = value[step if isinstance(value, dict) else int(step)]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return value


def evaluate(expr: Mapping[str, Any], given: Mapping[str, Any], statuses: list[str], results: list[Any]) -> Any:
    """The value of an expression; ``MISSING`` where it takes the result of a node that has none.

    Of what a map gives only whether there is something.
    """
    if "value" in expr:
        return expr["value"]
    if "input" in expr:
        return at(given.get(expr["input"]), expr.get("path", []))
    if "node" in expr:
        return at(results[expr["node"]], expr.get("path", [])) if statuses[expr["node"]] == "succeeded" else MISSING
    if "outcome" in expr:
        return {"status": statuses[expr["outcome"]], "value": results[expr["outcome"]]}
    if "tally" in expr:
        return {"total": results[expr["tally"]]}
    if "results" in expr:
        return [] if statuses[expr["results"]] == "succeeded" else MISSING
    if "list" in expr:
        values = [evaluate(each, given, statuses, results) for each in expr["list"]]
        return MISSING if any(value is MISSING for value in values) else values
    if "fork" in expr:
        on = evaluate(expr["fork"]["on"], given, statuses, results)
        found = {k: evaluate(arm, given, statuses, results) for v, k, arm in expr["fork"]["arms"] if has(on, v)}
        return MISSING if on is MISSING else {k: value for k, value in found.items() if value is not MISSING}
    on = evaluate(expr["case"]["on"], given, statuses, results)
    for value, arm in expr["case"]["arms"]:
        if value == on and type(value) is type(on):
            return evaluate(arm, given, statuses, results)
    return MISSING


def has(value: Any, item: Any) -> bool:
    return isinstance(value, list) and any(each == item and type(each) is type(item) for each in value)


def decide(incoming: list[Mapping[str, Any]], statuses: list[str], results: list[Any]) -> str:
    """ready, blocked or skipped."""
    for edge in incoming:
        if "when" in edge:
            status = statuses[edge["from"]]
            looked_at = at(results[edge["from"]], edge["when"]["path"])
            when = edge["when"]
            taken = has(looked_at, when["has"]) if "has" in when else looked_at == when["equals"]
            if status == "skipped" or (status == "succeeded" and not taken):
                return "skipped"
    if any(statuses[e["from"]] in FAILED and e["policy"] == "fail" for e in incoming):
        return "blocked"
    for edge in incoming:
        status = statuses[edge["from"]]
        if status in FAILED and edge["policy"] == "skip":
            return "skipped"
        if status == "skipped" and not edge.get("merge") and edge["policy"] != "collect":
            return "skipped"
    return "ready"


def interpret(
    plan: Mapping[str, Any], given: Mapping[str, Any], body: Callable[[str, Mapping[str, Any]], tuple[str, Any]]
) -> tuple[str, dict[str, str], Any]:
    """The run's status, its nodes', and its result.

    Args:
        plan: The plan.
        given: The run's input.
        body: What a node's body does with its arguments: its status and result.
    """
    statuses: list[str] = []
    results: list[Any] = []
    for ix, node in enumerate(plan["nodes"]):
        incoming = [edge for edge in plan["edges"] if edge["to"] == ix]
        word = decide(incoming, statuses, results)
        result = None
        if word == "ready":
            args = {name: evaluate(expr, given, statuses, results) for name, expr in node["args"].items()}
            if any(value is MISSING for value in args.values()):
                word = "skipped"
            else:
                word, result = body(node["name"], args)
        statuses.append(word)
        results.append(result)
    handled = {edge["from"] for edge in plan["edges"] if edge["policy"] != "fail"}
    failed = any(status in FAILED and ix not in handled for ix, status in enumerate(statuses))
    result = None
    if not failed:
        result = evaluate(plan["result"], given, statuses, results)
        result = None if result is MISSING else result
    names = [node["name"] for node in plan["nodes"]]
    return "failed" if failed else "succeeded", dict(zip(names, statuses, strict=True)), result

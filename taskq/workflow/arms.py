"""Branches and forks: what runs only by the result of a step.

An arm is wired like anything else, under a condition that stands on an edge from that step to each of its nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from taskq.codec import encode_any
from taskq.errors import WiringError
from taskq.workflow.fit import arms_of, item_of_list, shown, stands_in
from taskq.workflow.symbols import Dep, EdgePolicy, Expr, Symbol

if TYPE_CHECKING:
    from taskq.workflow.wiring import Wiring

__all__ = ["STRANGE", "Arm", "branch", "fork"]

STRANGE: Final = (
    "comes from another wiring, in which it was kept; take it from a step or an argument of the workflow that is being "
    "wired"
)
_Arms: TypeAlias = Mapping[Any, Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Arm:
    """That what is wired now runs only if the result of a node equals a value, or has it among its items.

    Attributes:
        ix: The node.
        policy: What becomes of what is wired if that fails.
        path: The part of the result that is looked at.
        test: ``equals``, or ``has``.
        value: The value.
    """

    ix: int
    policy: EdgePolicy
    path: tuple[str | int, ...]
    test: Literal["equals", "has"]
    value: Any


@dataclass(frozen=True, slots=True)
class _Wired:
    """What the arms came to: of each its key, that as JSON and its value; what these wait for, and their one type."""

    arms: list[tuple[Any, Any, Expr]]
    merged: tuple[Dep, ...]
    kind: Any


def branch(wiring: Wiring, on: object, arms: _Arms) -> Symbol:
    """Wire each arm under the condition that ``on`` has its key's value; gives the value of the one taken."""
    decides = _decides(wiring, on, "branch")
    said = f"branch on {decides._of}"
    _total(wiring, arms, decides._declared, said, "its type is")
    wired = _wire(wiring, decides, arms, "equals", said)
    expr = {"case": {"on": decides._expr, "arms": [[value, given] for _, value, given in wired.arms]}}
    return Symbol(f"the value of the {said}", expr, (*decides._deps, *wired.merged), wired.kind, wiring)


def fork(wiring: Wiring, on: object, arms: _Arms) -> Symbol:
    """Wire each arm under the condition that ``on`` has its key among its items; gives the values of those taken."""
    decides = _decides(wiring, on, "fork")
    said = f"fork on {decides._of}"
    each = item_of_list(decides._declared)
    if each is None:
        wiring.faults.append(
            f"{said}: its type is {shown(decides._declared)}; annotate it as a list, or a set, of a Literal or an Enum"
        )
    else:
        _total(wiring, arms, each, said, "the type of its items is")
    wired = _wire(wiring, decides, arms, "has", said)
    for key, value, _ in wired.arms:
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            wiring.faults.append(f"{said}: {key!r} cannot be the key of an object; decide on texts or whole numbers")
    expr = {"fork": {"on": decides._expr, "arms": [[value, str(value), given] for _, value, given in wired.arms]}}
    keys, values = Any if each is None else each, wired.kind
    kind = dict[keys, values]  # type: ignore[valid-type]
    return Symbol(f"the values of the {said}", expr, (*decides._deps, *wired.merged), kind, wiring)


def _decides(wiring: Wiring, on: object, what: str) -> Symbol:
    if not isinstance(on, Symbol) or "node" not in on._expr:
        raise WiringError(
            f"{what}() decides on {on!r}; give it the result of a step, or a part of one: an argument of the run "
            "is known to the caller, or a task can return it"
        )
    if on._wiring is not wiring:
        raise WiringError(f"{what}() decides on {on._of}, which {STRANGE}")
    return on


def _total(wiring: Wiring, arms: _Arms, declared: Any, said: str, what: str) -> None:
    """Note what keeps the arms from being those of all values of a type."""
    wanted = arms_of(declared)
    if wanted is None:
        wiring.faults.append(
            f"{said}: {what} {shown(declared)}, whose values cannot be listed; annotate it as a bool, a Literal or an "
            "Enum"
        )
        return
    for missing in [value for value in wanted if not stands_in(value, arms)]:
        wiring.faults.append(f"{said}: there is no arm for {missing!r}; add one, lambda: None for nothing")
    for unknown in [key for key in arms if not stands_in(key, wanted)]:
        wiring.faults.append(f"{said}: the arm {unknown!r} is none of its values; take it out")


def _wire(wiring: Wiring, on: Symbol, arms: _Arms, test: Literal["equals", "has"], said: str) -> _Wired:
    deps: list[Dep] = []
    found: list[tuple[Any, Any, Expr]] = []
    kinds: list[Any] = []
    nothing = 0
    for key, arm in arms.items():
        value = json.loads(encode_any(key, "the key of an arm", text_keys=True))
        wiring.arms.append(Arm(on._expr["node"], on._deps[0].policy, tuple(on._expr["path"]), test, value))
        try:
            given = arm()
        finally:
            wiring.arms.pop()
        found.append((key, value, wiring.taken(given, deps, f"the value of the arm {key!r}", said)))
        if isinstance(given, Symbol):
            kinds.append(given._declared)
        nothing += given is None
    kind = kinds[0] if kinds and len(kinds) + nothing == len(arms) and all(k == kinds[0] for k in kinds) else Any
    if nothing and kind is not Any:
        kind = kind | None
    return _Wired(found, tuple(Dep(dep.ix, dep.policy, merge=True) for dep in deps), kind)

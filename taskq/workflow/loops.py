"""Loops: a task, or a run of a workflow, round after round, until a part of what it gives says that it is the end.

A loop is a node that stands for a child run; that run's plan has one node, which every round is run by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from taskq.codec import encode_any
from taskq.durations import Duration, parse_duration
from taskq.errors import PayloadError, WiringError
from taskq.workflow.fit import arms_of, fits, shown, stands_in
from taskq.workflow.symbols import Symbol

if TYPE_CHECKING:
    from taskq.tasks import Task
    from taskq.workflow.definition import Workflow
    from taskq.workflow.wiring import Wiring

__all__ = ["Rounds"]

MOST_ROUNDS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Rounds:
    """When a loop ends, as declared.

    Attributes:
        until: Gives, of what a round gives, the part that is looked at.
        ends: A mapping: for every value of that part whether it is the end; None where it is a bool, whose True is.
        at_most: How many rounds it may have.
        within: How long it may take, from its start on.
        exhausted: What becomes of it where that is not enough: ``"fail"``, or ``"give"`` what the last round gave.
        also: What the task takes besides the state, by name.
    """

    until: Callable[[Any], Any]
    ends: object
    at_most: int
    within: Duration | None
    exhausted: str
    also: Mapping[str, object]

    def __post_init__(self) -> None:
        given: object = self.also
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise WiringError(f"also is {given!r}; give a dict of what the task takes besides the state, by name")

    def spec(
        self, wiring: Wiring, runs: Task[..., Any] | Workflow[..., Any], item: str | None, where: str
    ) -> dict[str, Any]:
        """The bounds as a plan has them; what is wrong with them is added to the faults of the wiring."""
        faults = wiring.faults
        returns = runs.codec.result_type
        if item is not None and not fits(returns, takes := runs.codec.declared(item)):
            faults.append(
                f"{where}: each round of a loop takes what the one before gave: {item} takes {shown(takes)}, and "
                f"{runs.name} returns {shown(returns)}"
            )
        path, ends = self._ends(returns, faults, where)
        most = self.at_most
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_ROUNDS:
            faults.append(f"{where}: at_most is {most!r}; give a number of rounds from 1 to {MOST_ROUNDS}")
        if self.exhausted not in ("fail", "give"):
            faults.append(f"{where}: exhausted is {self.exhausted!r}; give 'fail', or 'give' for the last state")
        made: dict[str, Any] = {"item": item, "most": most, "path": path, "ends": ends, "exhausted": self.exhausted}
        if self.within is not None:
            try:
                made["within"] = parse_duration(self.within)
            except ValueError as exc:
                faults.append(f"{where}: within: {exc}")
        return made

    def _ends(self, returns: Any, faults: list[str], where: str) -> tuple[list[str | int], list[Any]]:
        state = Symbol("the state of a loop", {"state": 0, "path": []}, (), returns, marker := object())
        found = self.until(state) if callable(self.until) else self.until
        if not isinstance(found, Symbol) or found._wiring is not marker:
            faults.append(
                f"{where}: until gives {found!r}; give a part of the state, as in until=lambda state: state.done"
            )
            return [], []
        said = f"{where}: until looks at {found._of}"
        values = arms_of(found._declared)
        if values is None:
            faults.append(
                f"{said}: its type is {shown(found._declared)}, whose values cannot be listed; annotate it as a bool, "
                "a Literal or an Enum"
            )
            return [], []
        ends = self.ends
        if ends is not None and not isinstance(ends, Mapping):
            faults.append(f"{said}: ends is {ends!r}; give a dict of its values, each with whether it is the end")
            return [], []
        if ends is None:
            if not all(isinstance(value, bool) for value in values):
                faults.append(f"{said}, which is no bool: say in ends= of each of its values whether it is the end")
                return [], []
            ends = {True: True, False: False}
        faults += [
            f"{said}: ends does not say whether {value!r} is the end; add it"
            for value in values
            if not stands_in(value, ends)
        ]
        faults += [
            f"{said}: ends has {value!r}, which is none of its values; take it out"
            for value in ends
            if not stands_in(value, values)
        ]
        faults += [
            f"{said}: ends says {word!r} of {value!r}; say True or False"
            for value, word in ends.items()
            if not isinstance(word, bool)
        ]
        if len({word is True for word in ends.values()}) == 1:
            faults.append(
                f"{said}: ends says of {'all' if True in ends.values() else 'none'} of its values that it is the end, "
                "so that there is nothing to look at"
            )
        try:
            told = [
                json.loads(encode_any(value, "ends", text_keys=True)) for value, word in ends.items() if word is True
            ]
        except PayloadError as exc:
            faults.append(f"{said}: {exc}")
            told = []
        return list(found._expr["path"]), told

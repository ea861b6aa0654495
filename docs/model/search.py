"""Breadth first through every state, so that the first violation found has a shortest trace.

States that differ only in the names of workers, or of jobs of one class, are one: each is kept in the form that sorts
lowest. Parts of states are numbered and a state is the string of its parts' numbers, which keeps millions in memory.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from .actions import Step, steps
from .configs import Config
from .properties import LIVENESS, NAMES, OF_A_STEP, Checker, has_ended
from .reduction import is_reducible, reduced
from .state import NOBODY, Case, Owner, State, Worker

OF_STEPS = {p.__name__ for p in OF_A_STEP}


@dataclass(frozen=True)
class Violation:
    """A property that does not hold, and the shortest way to where it does not."""

    name: str
    trace: tuple[str, ...]


@dataclass
class Result:
    """What a search has seen."""

    config: Config
    states: int = 0
    transitions: int = 0
    depth: int = 0
    seconds: float = 0.0
    """Of CPU."""
    violations: dict[str, Violation] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether every property holds."""
        return not self.violations


def search(config: Config, *, first_only: bool = False, liveness: bool = True) -> Result:
    """Look at every state that can be reached.

    Args:
        config: The bounded world.
        first_only: Stop at the first violation.
        liveness: Also ask whether every job can still end; costs memory for the edges.
    """
    return _Search(config).run(first_only, liveness)


class _Search:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.forms = Forms(config)
        self.checker = Checker(config)
        self.packed: list[bytes] = []
        self.number: dict[bytes, int] = {}
        self.recent: dict[State, int] = {}
        """States as steps gave them; what many ways lead to is put into its form once."""
        self.parent = array("l")
        self.edges = array("l")
        """The fair steps of each state in turn, by number."""
        self.offsets = array("l", [0])
        self.result = Result(config)

    def run(self, first_only: bool, liveness: bool) -> Result:
        began = time.process_time()
        self._see(self.forms.lowest(self.config.initial()), -1)
        level_ends, here = 1, 0
        while here < len(self.packed):
            if here == level_ends:
                self.recent.clear()
                level_ends = len(self.packed)
                self.result.depth += 1
            if not self._expand(here) and first_only:
                break
            here += 1
        else:
            if liveness:
                self._liveness()
        self.result.states = len(self.packed)
        for name in NAMES:
            self.result.checked[name] = self.result.transitions if name in OF_STEPS else self.result.states
        self.result.seconds = time.process_time() - began
        return self.result

    def _see(self, packed: bytes, parent: int) -> int:
        known = self.number.get(packed)
        if known is None:
            known = self.number[packed] = len(self.packed)
            self.packed.append(packed)
            self.parent.append(parent)
        return known

    def _expand(self, here: int) -> bool:
        state = self.forms.unpack(self.packed[here])
        sound = True
        fair = set()
        for step in steps(state, self.config):
            self.result.transitions += 1
            there = self.recent.get(step.state)
            if there is None:
                there = self.recent[step.state] = self._see(self.forms.lowest(step.state), here)
                for name in self.checker.state(step.state):
                    sound = False
                    self._violated(name, here, step)
            for name in self.checker.step(state, step.state):
                sound = False
                self._violated(name, here, step)
            if step.fair and there != here:
                fair.add(there)
        self.edges.extend(fair)
        self.offsets.append(len(self.edges))
        return sound

    def _liveness(self) -> None:
        """Backwards from the states where all has ended: what is left over can never end."""
        good = bytearray(has_ended(self.forms.unpack(p), self.config) for p in self.packed)
        changed = True
        while changed:
            changed = False
            for n in range(len(good) - 1, -1, -1):
                if not good[n] and any(good[t] for t in self.edges[self.offsets[n] : self.offsets[n + 1]]):
                    good[n] = changed = True
        if (stuck := good.find(0)) >= 0:
            self._violated(LIVENESS, stuck)

    def _violated(self, name: str, at: int, last: Step | None = None) -> None:
        if name not in self.result.violations:
            trace = (*self._trace(at), *([last.what] if last else ()))
            self.result.violations[name] = Violation(name, trace)

    def _trace(self, at: int) -> Iterator[str]:
        """The way there in one naming of workers and jobs: walked again from the start."""
        way = []
        while at > 0:
            way.append(self.packed[at])
            at = self.parent[at]
        state = self.config.initial()
        for wanted in reversed(way):
            step = next(s for s in steps(state, self.config) if self.forms.lowest(s.state) == wanted)
            state = step.state
            yield step.what


class Forms:
    """The lowest form of a state among those that differ in names alone, as bytes: the numbers of its parts."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.reducible = is_reducible(config.design)
        slots = list(permutations(range(config.workers)))
        classes = config.classes
        jobs = [p for p in permutations(range(len(classes))) if tuple(classes[n] for n in p) == classes]
        self.names = [(s, j) for s in slots for j in jobs]
        self.numbers: dict[Any, bytes] = {}
        self.parts: list[Any] = []
        self.renamed: dict[tuple[int, Any], bytes] = {}

    def lowest(self, state: State) -> bytes:
        """The form that sorts lowest."""
        if self.reducible:
            state = reduced(state, self.config)
        left = self._number((state.faults, state.orders, state.repeats))
        return min([self._named(n, state) + left for n in range(len(self.names))])

    def _named(self, name: int, state: State) -> bytes:
        renamed, parts = self.renamed, []
        for part in (*state.cases, state.workers, state.attempts):
            number = renamed.get((name, part))
            if number is None:
                number = renamed[name, part] = self._number(_renamed(part, *self.names[name]))
            parts.append(number)
        jobs = self.names[name][1]
        cases = parts[: len(jobs)]
        for old, new in enumerate(jobs):
            cases[new] = parts[old]
        return b"".join([*cases, *parts[len(jobs) :]])

    def _number(self, part: Any) -> bytes:
        known = self.numbers.get(part)
        if known is None:
            known = self.numbers[part] = len(self.parts).to_bytes(4, "big")
            self.parts.append(part)
        return known

    def unpack(self, packed: bytes) -> State:
        """The state of a form."""
        *cases, workers, attempts, left = (
            self.parts[int.from_bytes(packed[n : n + 4], "big")] for n in range(0, len(packed), 4)
        )
        return State(tuple(cases), workers, attempts, *left)


def _renamed(part: Any, slots: tuple[int, ...], jobs: tuple[int, ...]) -> Any:
    """The same part with slot n called ``slots[n]`` and job n called ``jobs[n]``."""
    if isinstance(part, Case):
        return part._replace(job=part.job._replace(owner=_owner(part.job.owner, slots)))
    if part and isinstance(part[0], Worker):
        return tuple(worker for _, worker in sorted(zip(slots, part, strict=True)))
    return tuple(sorted(a._replace(job=jobs[a.job], owner=_owner(a.owner, slots)) for a in part))


def _owner(owner: Owner, slots: tuple[int, ...]) -> Owner:
    return owner if owner == NOBODY else (slots[owner[0]], owner[1])

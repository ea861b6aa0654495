"""What stands for a value while a workflow is wired: the result of a step, an argument of the run, or a part of one.

To a type checker a symbol is the value itself, so that a wrong wire is a wrong type. At run time it knows where the
value will come from, and refuses what only a value can answer.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, ParamSpec, Protocol, TypeAlias, TypeVar

from taskq.errors import WiringError
from taskq.workflow.fit import shown
from taskq.workflow.parts import part_of

if TYPE_CHECKING:
    from taskq.handle import Job
    from taskq.workflow.runs import Run

__all__ = [
    "Dep",
    "EdgePolicy",
    "Expr",
    "HasChild",
    "HasJob",
    "HasRun",
    "HasStep",
    "Mapped",
    "Outcome",
    "Symbol",
    "Tally",
    "is_symbolic",
]

T = TypeVar("T")
A_contra = TypeVar("A_contra", contravariant=True)
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)
EdgePolicy: TypeAlias = Literal["fail", "collect", "skip"]
Expr: TypeAlias = dict[str, Any]
"""An expression of a plan; ``Plan`` lists the kinds."""
_CURE: Final = "a workflow function only wires: use branch() to decide on a result, or a task to compute with it"
_CURE_OF_STATES: Final = (
    "until only names a part of it, as in until=lambda state: state.done; let the task compute that"
)


@dataclass(frozen=True)
class Outcome(typing.Generic[T]):
    """What became of a step that was wired with ``collect``.

    Attributes:
        node: The node.
        status: How it ended.
        value: What it returned, if it succeeded.
        error: Why it did not succeed: an object with ``type`` and ``message``.
    """

    node: str
    status: Literal["succeeded", "failed", "cancelled", "blocked", "skipped"]
    value: T | None
    error: dict[str, Any] | None

    @property
    def ok(self) -> bool:
        """Whether it succeeded."""
        return self.status == "succeeded"


class HasStep(Protocol[A_contra, Q, R_co]):
    """What may be mapped, to a type checker: a task, or one with options, that takes an item first."""

    def step(self, item: A_contra, /, *args: Q.args, **kwargs: Q.kwargs) -> R_co:
        """A node of it."""


class HasChild(Protocol[A_contra, Q, R_co]):
    """The same of workflows, whose children are runs."""

    def child(self, item: A_contra, /, *args: Q.args, **kwargs: Q.kwargs) -> R_co:
        """A node of it."""


class HasJob(Protocol[A_contra, Q, R_co]):
    """What a body may run for each item, to a type checker: a task, or one with options, that takes an item first."""

    async def enqueue(self, item: A_contra, /, *args: Q.args, **kwargs: Q.kwargs) -> Job[R_co]:
        """A job of it."""


class HasRun(Protocol[A_contra, Q, R_co]):
    """The same of workflows."""

    async def start(self, item: A_contra, /, *args: Q.args, **kwargs: Q.kwargs) -> Run[R_co]:
        """A run of it."""


class Mapped(list[T]):
    """The results of a map, to a type checker: a list, which ``collect`` and ``tally`` know from other lists."""


@dataclass(frozen=True)
class Tally:
    """How many children of a map ended how, of any number of them; what ``tally`` gives.

    Attributes:
        total: How many items there were.
        succeeded: How many children succeeded.
        failed: How many failed.
        cancelled: How many were cancelled, or had not begun when the map was.
        failures: The first hundred that did not succeed, in the order of their items; that of the map itself, where it
            did not begin.
    """

    total: int
    succeeded: int
    failed: int
    cancelled: int
    failures: list[Outcome[Any]]

    @property
    def ok(self) -> bool:
        """Whether all of them succeeded."""
        return self.succeeded == self.total and not self.failures


@dataclass(frozen=True, slots=True)
class Dep:
    """That a value waits for a node.

    Attributes:
        ix: The node's number.
        policy: What becomes of the one that takes the value when the node fails.
        merge: Whether the value is that of a branch, and is there although this node was skipped.
    """

    ix: int
    policy: EdgePolicy = "fail"
    merge: bool = False


class Symbol:
    """A value that a run will have. Attributes and items give its parts."""

    __slots__ = ("_declared", "_deps", "_expr", "_of", "_wiring")

    def __init__(self, of: str, expr: Expr, deps: tuple[Dep, ...], declared: Any, wiring: object = None) -> None:
        self._of = of
        self._expr = expr
        self._deps = deps
        self._declared = declared
        self._wiring = wiring

    def _part(self, step: str | int, *, attribute: bool) -> Symbol:
        if "path" not in self._expr:
            what = "fork" if "fork" in self._expr else "branch"
            raise WiringError(
                f"a part of {self._of} is asked for ({step!r}), which a {what} chooses; hand the whole value to a task"
            )
        name = f".{step}" if attribute else f"[{step!r}]"
        found = part_of(self._declared, step, attribute=attribute)
        if found is None:
            raise WiringError(
                f"{self._of}{name} is no part of what is stored of {shown(self._declared)}; hand the whole value to a "
                "task, which can take anything from it"
            )
        expr = {**self._expr, "path": [*self._expr["path"], found[0]]}
        return Symbol(f"{self._of}{name}", expr, self._deps, found[1], self._wiring)

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._part(name, attribute=True)

    def __getitem__(self, item: object) -> Symbol:
        if isinstance(item, bool) or not isinstance(item, (str, int)) or (isinstance(item, int) and item < 0):
            raise WiringError(f"an item of {self._of} is asked for by {item!r}; give a text, or a number from 0")
        return self._part(item, attribute=False)

    def _refuse(self, what: str) -> NoReturn:
        cure = _CURE_OF_STATES if "state" in self._expr else _CURE
        raise WiringError(f"{self._of} is not known while the workflow is wired, and was {what}; {cure}")

    def __bool__(self) -> bool:  # noqa: PLE0304
        self._refuse("asked whether it is true")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("to be gone through")

    def __len__(self) -> int:  # noqa: PLE0303
        self._refuse("asked for its length")

    def __contains__(self, item: object) -> bool:
        self._refuse("searched")

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:  # noqa: D102
        self._refuse("called")

    def __str__(self) -> str:  # noqa: PLE0307
        self._refuse("made into a text")

    def __format__(self, spec: str) -> str:
        self._refuse("made into a text")

    def __int__(self) -> int:
        self._refuse("made into a number")

    def __float__(self) -> float:
        self._refuse("made into a number")

    def __index__(self) -> int:  # noqa: PLE0305
        self._refuse("used as a number")

    def __hash__(self) -> int:  # noqa: PLE0309
        self._refuse("used as a key")

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_of')}>"


def _refusal(name: str) -> Any:
    def method(self: Symbol, *others: object) -> NoReturn:
        self._refuse(f"computed with or compared ({name})")

    method.__name__ = name
    return method


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul",
              "divmod", "and", "or", "xor", "lshift", "rshift", "radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod",
              "rpow", "rmatmul", "rdivmod", "rand", "ror", "rxor", "rlshift", "rrshift", "neg", "pos", "abs", "invert",
              "round", "trunc", "floor", "ceil", "complex"):  # fmt: skip
    setattr(Symbol, f"__{_name}__", _refusal(f"__{_name}__"))


def is_symbolic(value: object) -> bool:
    """Whether a value is a symbol, or a list, tuple or dict with one in it."""
    if isinstance(value, Symbol):
        return True
    if isinstance(value, dict):
        return any(is_symbolic(each) for each in value.values())
    return isinstance(value, (list, tuple)) and any(is_symbolic(each) for each in value)

"""Whether a declared type fits another, as results are handed to parameters, lists, dicts and the run."""
# ruff: noqa: PT012 (what must be refused is a whole function)

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, ParamSpec, Union

import pytest
from wiring_kit import (
    Kind,
    Shape,
    T,
    UserId,
    Way,
    Word,
    faults,
    sink,
    source,
    wired,
)

from taskq import (
    Outcome,
    TaskQ,
)
from taskq.workflow.fit import arms_of, fits, shown, takes_of
from taskq.workflow.parts import part_of

# Whether types fit ----------------------------------------------------------------------------------------------------


class Animal: ...


class Dog(Animal): ...


class Odd:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


class Meta(type):
    def __subclasscheck__(cls, other: type) -> bool:
        raise TypeError


class Picky(metaclass=Meta): ...


@pytest.mark.parametrize(
    ("given", "takes", "fit"),
    [
        (int, int, True),
        (int, str, False),
        (bool, int, False),
        (int, bool, False),
        (int, float, True),
        (bool, float, False),
        (float, int, False),
        (None, None, True),
        (None, int, False),
        (int, object, True),
        (Any, int, True),
        (int, Any, True),
        (T, int, True),
        (int, T, True),
        (int, Optional[int], True),  # noqa: UP045
        (int | None, int, False),
        (int | None, int | str | None, True),
        (int | str, Union[str, int], True),  # noqa: UP007
        (list[int], list[int], True),
        (list[int], list[str], False),
        (list[int], list[float], True),
        (list, list[str], True),
        (list[int], set[int], False),
        (list[Any], list[str], True),
        (dict[str, int], Mapping[str, int], True),
        (dict[str, int], dict[str, str], False),
        (tuple[int, str], tuple[int, str], True),
        (tuple[int, str], tuple[str, str], False),
        (Dog, Animal, True),
        (Animal, Dog, False),
        (Literal["a"], Literal["a", "b"], True),
        (Literal["a", "c"], Literal["a", "b"], False),
        (Literal["a"], str, True),
        (Literal["a"], int, False),
        (Literal[1], Literal[True], False),
        (str, Literal["a"], False),
        (bool, Literal[True, False], True),
        (bool, Literal[True], False),
        (Way, Literal[Way.AIR, Way.SEA], True),
        (Way, Literal[Way.AIR], False),
        (Way, str, False),
        (Word, str, True),
        (Annotated[int, "x"], int, True),
        (int, Annotated[str, "x"], False),
        (UserId, int, True),
        (UserId, str, False),
        (Kind, str, True),
        (str, Kind, False),
        (Outcome[int], Outcome[int], True),
        (Outcome[int], Outcome[str], False),
        (Outcome[int], int, False),
        (ParamSpec("P"), int, True),
        (int, ParamSpec("P"), True),
        (Odd(), int, True),
        (int, Picky, True),
        (Shape, dict[str, Any], True),
    ],
)
def test_whether_a_type_fits_another(given: Any, takes: Any, fit: bool) -> None:
    assert fits(given, takes) is fit


def test_types_are_shown_as_people_write_them() -> None:
    assert [shown(each) for each in (None, type(None), int, Way, list[int], int | None, Literal["a"])] == [  # noqa: UP045
        "None", "None", "int", "Way", "list[int]", "int | None", "Literal['a']",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("declared", "values"),
    [
        (bool, [True, False]),
        (Literal["a", 2], ["a", 2]),
        (Way, [Way.AIR, Way.SEA]),
        (None, [None]),
        (bool | None, [True, False, None]),
        (Optional[Way], [Way.AIR, Way.SEA, None]),  # noqa: UP045
        (Annotated[bool, "x"], [True, False]),
        (Kind, ["big", "small"]),
        (int, None),
        (int | bool, None),
        (list[bool], None),
        (Any, None),
    ],
)
def test_values_of_types_that_have_few(declared: Any, values: list[Any] | None) -> None:
    assert arms_of(declared) == values


@pytest.mark.parametrize(
    ("takes", "fault"),
    [
        (list[int], None),
        (list[str], "node sink: x takes at [0] str, and the result of a is int"),
        (set[str], "node sink: x takes at [0] str, and the result of a is int"),
        (list[str] | None, "node sink: x takes at [0] str, and the result of a is int"),
        (list[str] | int | None, None),
        (tuple[str, int], "node sink: x takes at [0] str, and the result of a is int"),
        (tuple[int, ...], None),
        (tuple[int], None),
        (list[bool], "node sink: x takes at [0] bool, and the result of a is int"),
        (list, None),
        (tuple, None),
        (Any, None),
        (UserId, "node sink: x takes wiring_kit.UserId, and there is a list"),
    ],
    ids=str,
)
def test_results_in_lists_are_held_to_what_the_list_takes(nowhere: TaskQ, takes: Any, fault: str | None) -> None:
    a, take = source(nowhere, int, "a"), sink(nowhere, takes)

    def flow() -> None:
        take.step([a.step(), 5])

    if fault is None:
        assert wired(nowhere, flow)
    else:
        assert fault in faults(nowhere, flow)


@pytest.mark.parametrize(
    ("takes", "wrong"),
    [
        (dict[str, int], []),
        (dict[str, str], ["['a'] str, and the result of a is int", "['b'] str, and there is 5"]),
        (Mapping[str, bool], ["['a'] bool, and the result of a is int", "['b'] bool, and there is 5"]),
        (dict, []),
        (Any, []),
    ],
    ids=str,
)  # fmt: skip
def test_results_in_dicts_are_held_to_what_the_dict_takes(nowhere: TaskQ, takes: Any, wrong: list[str]) -> None:
    a, take = source(nowhere, int, "a"), sink(nowhere, takes)

    def flow() -> None:
        take.step({"a": a.step(), "b": 5})

    said = [f"node sink: x takes at {each}" for each in wrong]
    assert (faults(nowhere, flow) if wrong else wired(nowhere, flow) and []) == said


def test_results_in_typed_dicts_are_held_to_its_keys(nowhere: TaskQ) -> None:
    a, take = source(nowhere, int, "a"), sink(nowhere, Shape)

    def flow() -> None:
        take.step({"name": a.step(), "corners": []})

    assert faults(nowhere, flow) == ["node sink: x takes at ['name'] str, and the result of a is int"]
    assert takes_of(Shape, {})("none") is Any


@pytest.mark.parametrize(
    ("returns", "result", "fault"),
    [
        (str, lambda s: s, "it returns str, and the result of source is int"),
        (list[str], lambda s: [s], "it returns at [0] str, and the result of source is int"),
        (int, lambda s: s, None),
        (Any, lambda s: [s], None),
        (str, lambda s: 5, "result: Expected `str`, got `int`; it is annotated str"),
        (str, lambda s: None, "result: Expected `str`, got `null`; it is annotated str"),
        (None, lambda s: None, None),
    ],
)
def test_what_a_workflow_returns_is_held_to_its_annotation(
    nowhere: TaskQ, returns: Any, result: Callable[[Any], Any], fault: str | None
) -> None:
    give, take = source(nowhere, int), sink(nowhere)

    def flow() -> Any:
        one = give.step()
        take.step(one)
        return result(one)

    flow.__annotations__ = {"return": returns}
    assert (faults(nowhere, flow) if fault else wired(nowhere, flow) and []) == ([fault] if fault else [])


def test_parts_are_known_although_their_types_are_not() -> None:
    @dataclass
    class Loose:
        near: int
        far: "Nowhere"  # type: ignore[name-defined]  # noqa: F821, UP037

    assert part_of(Loose, "far", attribute=True) == ("far", Any)
    assert part_of(Loose, "near", attribute=True) == ("near", Any)
    assert part_of(Loose, "nearby", attribute=True) is None

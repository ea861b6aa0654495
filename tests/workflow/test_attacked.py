"""Wirings under attack."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from plan_kit import args_of, compiled

from taskq import TaskQ, branch, collect, gather, or_skip
from taskq.errors import PayloadError, PlanError, WiringError


@pytest.fixture
def nowhere() -> TaskQ:
    return TaskQ("postgresql://nobody@127.0.0.1:1/x")


def tasks(app: TaskQ) -> tuple[Any, Any]:
    @app.task
    def many() -> list[int]:
        return [1]

    @app.task
    def total(ns: list[int]) -> int:
        return sum(ns)

    return many, total


# Symbols in odd places ------------------------------------------------------------------------------------------------


def test_gathering_what_is_a_list_already_gives_that_list(nowhere: TaskQ) -> None:
    many, total = tasks(nowhere)

    def flow() -> int:
        return cast(int, total.step(gather(many.step())))

    assert args_of(compiled(nowhere, flow))["total"] == {"ns": {"node": 0, "path": []}}


KEPT: dict[str, Callable[[Any, Any], Any]] = {
    "an argument": lambda total, kept: total.step(kept),
    "a part of one": lambda total, kept: total.step([kept[0]]),
    "in a list": lambda total, kept: total.step([1, kept[0]]),
    "after": lambda total, kept: total.node(after=[kept]).step([1]),
    "its outcome": lambda total, kept: (collect(kept), total.node(after=[collect(kept)]).step([1]))[1],
    "or skip": lambda total, kept: total.step(or_skip(kept)),
    "the result": lambda total, kept: (total.step([1]), kept)[1],
}


@pytest.mark.parametrize("how", KEPT)
def test_a_result_that_was_kept_from_another_workflow_is_no_result_of_this_one(nowhere: TaskQ, how: str) -> None:
    many, total = tasks(nowhere)

    @functools.cache
    def kept() -> list[int]:
        return cast("list[int]", many.step())

    def first() -> int:
        return cast(int, total.step(kept()))

    def second() -> Any:
        many.node("other").step()
        return KEPT[how](total, kept())

    assert compiled(nowhere, first)
    with pytest.raises((WiringError, PlanError), match="comes from another wiring"):
        compiled(nowhere, second)


def test_a_branch_on_what_was_kept_is_refused(nowhere: TaskQ) -> None:
    @nowhere.task
    def ask() -> bool:
        return True

    kept: list[bool] = []

    def first() -> bool:
        kept.append(ask.step())
        return kept[0]

    def second() -> None:
        branch(kept[0], {True: lambda: None, False: lambda: None})

    assert compiled(nowhere, first)
    with pytest.raises((WiringError, PlanError), match="comes from another wiring"):
        compiled(nowhere, second)


def test_an_argument_of_another_workflow_is_refused(nowhere: TaskQ) -> None:
    _, total = tasks(nowhere)
    kept: list[Any] = []

    def first(ns: list[int]) -> int:
        kept.append(ns)
        return cast(int, total.step(ns))

    def second(ns: list[int]) -> int:
        return cast(int, total.step(kept[0]))

    assert compiled(nowhere, first)
    with pytest.raises(PlanError, match="the argument ns comes from another wiring"):
        compiled(nowhere, second)


def test_an_exception_in_the_function_leaves_no_wiring_behind(nowhere: TaskQ) -> None:
    many, _ = tasks(nowhere)

    def flow() -> list[int]:
        many.step()
        raise KeyError("x")

    with pytest.raises(KeyError):
        compiled(nowhere, flow)
    with pytest.raises(WiringError, match="stands outside"):
        many.step()


def test_a_thread_wires_nothing(nowhere: TaskQ) -> None:
    many, _ = tasks(nowhere)
    said: list[BaseException] = []

    def step() -> None:
        try:
            many.step()
        except WiringError as exc:
            said.append(exc)

    def flow() -> list[int]:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        return cast("list[int]", many.step())

    assert len(compiled(nowhere, flow)["nodes"]) == 1
    assert len(said) == 1


@pytest.mark.parametrize("value", [float("nan"), "\x00", "\ud800", object(), [float("inf")]])
def test_arguments_that_do_not_encode_start_nothing(nowhere: TaskQ, value: Any) -> None:
    @nowhere.task
    def body(x: Any) -> None: ...

    @nowhere.workflow
    def flow(x: Any) -> None:
        body.step(x)

    with pytest.raises(PayloadError):
        flow.start_sync(value)

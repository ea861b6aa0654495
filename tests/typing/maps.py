"""Right and wrong maps for a type checker; a line that must be an error is marked with its code. Never run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_type

from taskq import JobContext, Mapped, Outcome, Tally, TaskQ, collect, gather, tally

app = TaskQ()


@dataclass
class Page:
    rows: list[int]
    names: list[str]


@app.task
async def pages(n: int) -> Page:
    return Page([n], [])


@app.task
async def double(row: int, times: int = 2, *, loud: bool = False) -> float:
    return float(row * times)


@app.task
def upper(ctx: JobContext, name: str) -> str:
    return name.upper()


@app.task
def total(values: list[float]) -> float:
    return sum(values)


@app.task
def report(outcomes: list[Outcome[float]], told: Tally) -> None: ...


@app.task
def nothing() -> None: ...


@app.workflow
def of_one(row: int, times: int = 1) -> list[float]:
    return double.map([row], times)


@app.workflow
def right(n: int, more: list[int]) -> float:
    page = pages.step(n)
    doubled = double.map(page.rows, n, loud=True)
    assert_type(doubled, Mapped[float])
    assert_type(collect(doubled), list[Outcome[float]])
    assert_type(collect(page), Outcome[Page])
    assert_type(tally(doubled), Tally)
    assert_type(gather(doubled), list[float])
    assert_type(upper.map(page.names), Mapped[str])
    assert_type(upper.map(["a", "b"]), Mapped[str])
    assert_type(double.map(more), Mapped[float])
    assert_type(double.node("narrow", at_once=5, at_most=10, priority=3).map(more, times=n), Mapped[float])
    assert_type(of_one.map(more, n), Mapped[list[float]])
    assert_type(of_one.node("runs", at_once=2).map(more), Mapped[list[float]])
    report.step(collect(doubled), tally(doubled))
    report.step(collect(double.map([1])), tally(doubled))
    return total.step(doubled)


@app.workflow
def wrong(n: int, more: list[int]) -> None:
    page = pages.step(n)
    double.map(page.names)  # E: arg-type
    double.map(n)  # E: arg-type
    double.map(more, "x")  # E: arg-type
    double.map(more, 2, 3)  # E: call-arg
    double.map()  # E: call-arg
    upper.map(page.rows)  # E: arg-type
    nothing.map(more)  # E: misc
    total.step(upper.map(page.names))  # E: arg-type
    of_one.map(page.names)  # E: arg-type
    of_one.node("runs", at_once="2")  # E: arg-type
    double.node("narrow", at_once=5).map(page.names)  # E: arg-type
    tally(more)  # E: arg-type
    report.step(collect(upper.map(page.names)), n)  # E: arg-type

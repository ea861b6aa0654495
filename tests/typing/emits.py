"""Right and wrong emits for a type checker; a line that must be an error is marked with its code. Never run."""

from __future__ import annotations

from typing import Any, assert_type

from taskq import JobContext, Mapped, Outcome, Page, Tally, TaskQ, collect, tally

app = TaskQ()


@app.task
async def files(ctx: JobContext, after: str | None, root: str) -> Page[str, str]:
    return Page([root], after)


@app.task
def numbers(after: int | None) -> Page[int, int]:
    return Page([1, 2])


@app.task
def names(after: str | None) -> list[str]:
    return []


@app.task
async def count(path: str, by: int = 1) -> int:
    return len(path) * by


@app.task
def total(counts: list[int]) -> int:
    return sum(counts)


@app.task
def report(told: Tally, outcomes: list[Outcome[int]]) -> None: ...


@app.workflow
def counted(path: str) -> int:
    return count.step(path)


@app.workflow
def right(root: str) -> int:
    found = count.emit(files.pages(root), by=2)
    assert_type(found, Mapped[int])
    more = count.node("more", ahead=10, at_once=5).emit(files.node("list", priority=2).pages(root=root))
    assert_type(more, Mapped[int])
    assert_type(counted.emit(files.pages(root)), Mapped[int])
    assert_type(counted.node("c", ahead=1).emit(files.pages(root)), Mapped[int])
    report.step(tally(found), collect(found))
    return total.step(more)


@app.workflow
def wrong(root: str) -> None:
    count.emit(numbers.pages())  # E: arg-type
    count.emit(files.pages())  # E: call-arg
    count.emit(files.pages(3))  # E: arg-type
    count.emit([root])  # E: arg-type
    count.emit(files.pages(root), by="2")  # E: arg-type
    counted.emit(numbers.pages())  # E: arg-type
    count.node("n", ahead="3").emit(files.pages(root))  # E: arg-type


@app.workflow
def wrong_sources(root: Any) -> None:
    count.emit(names.pages())  # E: misc

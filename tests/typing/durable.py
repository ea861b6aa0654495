"""Right and wrong maps and emits of bodies for a type checker; a wrong line is marked with its code. Never run."""

from __future__ import annotations

from typing import assert_type

from taskq import JobContext, Outcome, Page, Tally, TaskQ

app = TaskQ()


@app.task
async def files(after: str | None, root: str) -> Page[str, str]:
    return Page([root], after)


@app.task
def numbers(after: int | None) -> Page[int, int]:
    return Page([1, 2])


@app.task
async def count(ctx: JobContext, path: str, by: int = 1) -> int:
    return len(path) * by


@app.task
def measure(path: str) -> float:
    return len(path) / 2


@app.task
def nothing() -> None: ...


@app.workflow
def counted(path: str, *, by: int = 1) -> int:
    return count.step(path)


@app.task
async def right(ctx: JobContext, paths: list[str]) -> None:
    assert_type(await ctx.map(count, paths), list[int])
    assert_type(await ctx.map(measure, ("a", "b"), at_once=3, at_most=5), list[float])
    assert_type(await ctx.map(count.using(priority=3), paths, also={"by": 2}, name="c"), list[int])
    assert_type(await ctx.map(counted, paths, gives="results"), list[int])
    assert_type(await ctx.map(counted, paths, gives="outcomes"), list[Outcome[int]])
    assert_type(await ctx.map(count, paths, gives="tally"), Tally)
    assert_type(await ctx.emit(count, files.pages("root"), ahead=3), list[int])
    assert_type(await ctx.emit(counted, files.node("list", queue="slow").pages(root="r"), name="c"), list[int])
    assert_type(await ctx.emit(measure, files.pages("root"), gives="outcomes"), list[Outcome[float]])
    assert_type(await ctx.emit(counted, files.pages("root"), gives="tally", at_once=2), Tally)


@app.task
def right_sync(ctx: JobContext, paths: list[str]) -> None:
    assert_type(ctx.map_sync(count, paths), list[int])
    assert_type(ctx.map_sync(counted, paths, gives="outcomes"), list[Outcome[int]])
    assert_type(ctx.emit_sync(count, files.pages("root")), list[int])
    assert_type(ctx.emit_sync(counted, files.pages("root"), gives="tally"), Tally)


@app.task
async def wrong(ctx: JobContext, paths: list[str], sizes: list[int]) -> None:
    await ctx.map(count, sizes)  # E: misc
    await ctx.map(counted, sizes)  # E: misc
    await ctx.map(nothing, paths)  # E: arg-type
    await ctx.map(len, paths)  # E: call-overload
    await ctx.map(count, paths, gives="all")  # E: call-overload
    await ctx.map(count, paths, ahead=1)  # E: call-overload
    await ctx.map(count, paths, by=2)  # E: call-overload
    await ctx.emit(count, numbers.pages())  # E: misc
    await ctx.emit(counted, numbers.pages())  # E: misc
    await ctx.emit(count, files)  # E: call-overload
    await ctx.emit(count, files.pages())  # E: call-arg
    ctx.map_sync(count, sizes)  # E: misc
    ctx.emit_sync(count, numbers.pages())  # E: misc

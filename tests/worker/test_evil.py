"""Bodies of ill will: exceptions that raise when they are looked at, and leftovers that reach for the next body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

import anyio
import asyncpg
import pytest
from worker_kit import RunWorker, outcomes, until_status

from taskq import TaskQ
from taskq.errors import describe

pytestmark = pytest.mark.anyio

ATTRIBUTES = (
    "__cause__",
    "__context__",
    "__suppress_context__",
    "__traceback__",
    "__notes__",
    "__class__",
    "__dict__",
    "__module__",
    "args",
    "exceptions",
)
METHODS = ("__str__", "__repr__", "__hash__", "__eq__", "__getattribute__", "__format__", "__bool__")
OF_CLASS = ("__name__", "__module__", "__mro__", "__doc__")


def raises(*_: Any) -> Any:
    raise SystemExit(4)


class Text(str):
    """A string whose methods raise."""

    __len__ = __getitem__ = encode = replace = __str__ = __format__ = raises


def evil(what: str) -> type[BaseException]:
    """A class of exceptions of which one thing raises SystemExit; ``class.`` before the name: of the class."""
    if what == "text":
        return type("Evil", (Exception,), {"__str__": lambda _: Text("x")})
    if what in METHODS:
        return type("Evil", (Exception,), {what: raises})
    if what.startswith("class."):
        meta = type("EvilMeta", (type,), {what.removeprefix("class."): property(raises)})
        return meta("Evil", (Exception,), {})
    return type("Evil", (Exception,), {what: property(raises)})


EVILS = [*ATTRIBUTES, *METHODS, *(f"class.{name}" for name in OF_CLASS), "text"]


@pytest.mark.parametrize("what", EVILS)
def test_describing_never_raises(what: str) -> None:
    kind = evil(what)
    try:
        raise kind("x")
    except BaseException as exc:
        told = describe(exc)
    assert told["type"] == "Evil"
    assert {type(value) for value in told.values()} == {str}
    json.dumps(told)


async def test_a_job_can_fail_of_any_exception(app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection) -> None:
    ran: list[str] = []

    @app.task(max_attempts=1)
    async def fails(what: str) -> None:
        ran.append(what)
        raise evil(what)("x")

    @app.task(max_attempts=1)
    def fails_in_thread(what: str) -> None:
        ran.append(what)
        raise evil(what)("x")

    async with run_worker(concurrency=2):
        jobs = [await task.enqueue(what) for what in EVILS for task in (fails, fails_in_thread)]
        for job in jobs:
            await until_status(aconn, job.id, "failed")
            assert await outcomes(aconn, job.id) == ["failed"]
    assert sorted(ran) == sorted([*EVILS, *EVILS])


# What a body leaves behind -------------------------------------------------------------------------------------------

SOON = 0.02
"""Seconds after which a leftover strikes; the next body is at work for ten times as long."""
kept: list[object] = []
by_task: dict[object, int] = {}
weakly_by_task: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


async def timed() -> AsyncIterator[int]:
    async with asyncio.timeout(SOON):
        yield 1
        yield 2


async def scoped() -> AsyncIterator[int]:
    with anyio.move_on_after(SOON):
        yield 1
        yield 2


async def unfinished_generator() -> None:
    async for _ in timed():
        break


async def generator_kept_open() -> None:
    kept.append(generator := timed())
    await anext(generator)


async def scope_kept_open() -> None:
    kept.append(generator := scoped())
    await anext(generator)


async def task_group_left_open() -> None:
    async def fails() -> None:
        await asyncio.sleep(SOON)
        raise ValueError("on purpose")

    kept.append(group := asyncio.TaskGroup())
    await group.__aenter__()
    group.create_task(fails())


async def cancels_later() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(SOON, task.cancel)


async def timeout_left_armed_by_a_failure() -> None:
    kept.append(timeout := asyncio.timeout(SOON))
    await timeout.__aenter__()
    raise ValueError("on purpose")


async def kept_by_task() -> None:
    by_task[asyncio.current_task()] = 1


async def kept_weakly_by_task() -> None:
    weakly_by_task[asyncio.current_task()] = 1


LEFTOVERS: tuple[Callable[[], Awaitable[None]], ...] = (
    unfinished_generator,
    generator_kept_open,
    scope_kept_open,
    task_group_left_open,
    cancels_later,
    timeout_left_armed_by_a_failure,
    kept_by_task,
    kept_weakly_by_task,
)


@pytest.mark.parametrize("leave", LEFTOVERS, ids=lambda leave: leave.__name__)
async def test_what_a_body_leaves_behind_reaches_no_later_body(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, leave: Callable[[], Awaitable[None]]
) -> None:
    tasks: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # a task group without a parent tells of it

    @app.task(max_attempts=1)
    async def leaves() -> None:
        tasks.append(asyncio.current_task())
        await leave()

    @app.task(max_attempts=1)
    async def innocent() -> bool:
        me = asyncio.current_task()
        tasks.append(me)
        await asyncio.sleep(SOON * 10)
        return me in by_task or me in weakly_by_task

    async with run_worker(concurrency=1):
        first, second = [await task.enqueue() for task in (leaves, innocent)]
        assert await second.result(timeout=10) is False
        assert await outcomes(aconn, second.id) == ["succeeded"]
        await until_status(aconn, first.id, "succeeded", "failed")
    assert len({id(task) for task in tasks}) == 2
    kept.clear()
    by_task.clear()


async def test_bodies_that_leave_nothing_behind_share_a_task(app: TaskQ, run_worker: RunWorker) -> None:
    """A task for each body would cost more than the rest of the consumer."""

    @app.task
    async def tidy() -> int:
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(0))
        await asyncio.wait_for(asyncio.sleep(0.001), 10)
        await asyncio.gather(asyncio.sleep(0), asyncio.to_thread(int))
        return id(asyncio.current_task())

    async with run_worker(concurrency=1):
        jobs = [await tidy.enqueue() for _ in range(5)]
        assert len({await job.result(timeout=10) for job in jobs}) == 1

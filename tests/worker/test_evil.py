"""Exceptions that raise when they are looked at: the job fails, once, and the worker goes on."""

from __future__ import annotations

import json
from typing import Any

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

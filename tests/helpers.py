"""Small helpers that tests share."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


def eventually(predicate: Callable[[], T], timeout: float = 10, *, interval: float = 0.02) -> T:
    """Call a predicate until what it gives is true; give that.

    Args:
        predicate: Called again and again; an AssertionError counts as false.
        timeout: Seconds until the test fails.
        interval: Seconds between two calls.

    Raises:
        AssertionError: It never came true; the message says what was last seen.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        try:
            seen: object = predicate()
            if inspect.isawaitable(seen):
                raise TypeError("the predicate is async: use aeventually")
            if seen:
                return seen  # type: ignore[return-value]
        except AssertionError as error:
            seen = error
        if late:
            raise AssertionError(_never(predicate, timeout, seen))
        time.sleep(interval)


async def aeventually(predicate: Callable[[], T | Awaitable[T]], timeout: float = 10, *, interval: float = 0.02) -> T:
    """Like ``eventually`` in an event loop; the predicate may be sync or async.

    Raises:
        AssertionError: It never came true; the message says what was last seen.
    """
    deadline = time.monotonic() + timeout
    seen: object = "(nothing: the first call did not return)"
    while True:
        late = time.monotonic() >= deadline
        with anyio.move_on_after(timeout):
            try:
                answer = predicate()
                seen = await answer if inspect.isawaitable(answer) else answer
                if seen:
                    return seen
            except AssertionError as error:
                seen = error
        if late:
            raise AssertionError(_never(predicate, timeout, seen))
        await anyio.sleep(interval)


def _never(predicate: object, timeout: float, seen: object) -> str:
    name = getattr(predicate, "__qualname__", repr(predicate))
    return f"{name} did not come true within {timeout:g} s; last seen: {seen!r}"

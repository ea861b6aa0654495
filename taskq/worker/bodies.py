"""How one body runs in the worker's own process: a coroutine in a context of its own, or a function in a thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from taskq import errors
from taskq.tasks import Task
from taskq.worker.disposition import BodyEnd, Raised, Returned
from taskq.worker.forked import Home, end_awaiting_copy, end_copy
from taskq.worker.running import Running


class Threads:
    """The threads that plain functions run in, started when the first one comes.

    Args:
        size: The most threads.
        loop: The worker's loop.
        home: The worker's process.
    """

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop, home: Home) -> None:
        self._size = size
        self._loop = loop
        self._home = home
        self._pool: ThreadPoolExecutor | None = None

    def run(
        self, run: Running, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> asyncio.Future[tuple[Any, BaseException | None]]:
        """Run a function in a thread; the future gives what it returned, or what it raised."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._size, thread_name_prefix="taskq-body")
        context = contextvars.copy_context()

        def body() -> tuple[Any, BaseException | None]:
            threading.current_thread().name = f"taskq-body {run.claim.task} {run.claim.job_id}"
            value, error = None, None
            try:
                value = context.run(fn, *args, **kwargs)
            except BaseException as exc:
                # Handed over as a value: a future refuses to hold StopIteration, and then never ends.
                error = exc
            if self._home.left:
                end_copy(error)
            return value, error

        return asyncio.wrap_future(self._pool.submit(body), loop=self._loop)

    def close(self) -> None:
        """Start no more; threads that run are left behind."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def returned(task: Task[..., Any], value: Any) -> BodyEnd:
    """The body has done its work; whatever is wrong with its result, it is not run again for that."""
    try:
        return Returned(task.codec.encode_result(value))
    except errors.ResultNotStorable as exc:
        return Raised(exc)
    except Exception as exc:
        error = errors.ResultNotStorable(
            f"the result of {task.name} cannot be stored: {errors.describe(exc)['message']}"
        )
        error.__cause__ = exc
        return Raised(error)


def self_cancelled(exc: BaseException) -> errors.TaskQError:
    """What a body raised that let a cancellation out which was not taskq's."""
    error = errors.TaskQError("the body was cancelled by itself or by something that it awaited, not by taskq")
    error.__cause__ = exc
    return error


@types.coroutine
def drive(coro: Coroutine[Any, Any, Any], context: contextvars.Context, home: Home) -> Generator[Any, Any, Any]:
    """Run a body in a context of its own inside the current task; what it awaits is handed on to the loop unchanged.

    In a copy of the worker's process that the body has made, what it does next ends that copy.
    """
    error: BaseException | None = None
    value: Any = None
    while True:
        try:
            awaited = context.run(coro.send, value) if error is None else context.run(coro.throw, error)
        except StopIteration as stop:
            if home.left:
                end_copy(None)
            return stop.value
        except BaseException as exc:
            if home.left:
                end_copy(exc)
            raise
        if home.left:
            end_awaiting_copy()
        error = None
        try:
            value = yield awaited
        except GeneratorExit:
            context.run(coro.close)
            raise
        except BaseException as exc:
            error = exc
            value = None

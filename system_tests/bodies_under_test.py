"""Bodies that harm the process that they run in; gates and journal are those of ``app_under_test``."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import multiprocessing
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from app_under_test import BOUND, note

from taskq import JobContext, Retry, TaskQ
from taskq.policy import constant

app = TaskQ()


def is_open(gate: str) -> bool:
    return Path(os.environ["GATES"], gate).exists()


@app.task(retry=Retry(2, constant(0)))
async def waits(ctx: JobContext, gate: str = "gate") -> str:
    """Wait at a gate, and heed a cancellation."""
    note("start", ctx)
    end = time.monotonic() + BOUND
    while not is_open(gate):
        if time.monotonic() > end:
            raise AssertionError(f"nobody opened {gate}")
        await asyncio.sleep(0.02)
    note("end", ctx)
    return f"epoch {ctx.claim_epoch}"


@app.task(retry=Retry(2, constant(0)))
async def deaf(ctx: JobContext, gate: str = "gate") -> str:
    """Wait at a gate, whatever is thrown at it."""
    note("start", ctx)
    end = time.monotonic() + BOUND
    while not is_open(gate) and time.monotonic() < end:
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            note("deaf", ctx)
    note("end", ctx)
    return f"epoch {ctx.claim_epoch}"


@app.task(retry=Retry(2, constant(0)))
def blocks(ctx: JobContext) -> str:
    """A function that blocks for ever; its second attempt returns."""
    note("start", ctx)
    if ctx.attempt == 1:
        time.sleep(BOUND)
    note("end", ctx)
    return f"epoch {ctx.claim_epoch}"


def hold_the_gil(seconds: float) -> None:
    """One call of the ``re`` module that would take for ever; an alarm ends it.

    The module looks for signals as it matches, and never lets go of the GIL.
    """

    def ring(*_: object) -> NoReturn:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    with suppress(TimeoutError):
        re.match(r"(a|aa)+$", "a" * 60 + "b")


@app.task(max_recoveries=20)
async def holds_the_gil(ctx: JobContext, seconds: float) -> int:
    """In its first attempt only."""
    note("start", ctx)
    if ctx.claim_epoch == 1:
        hold_the_gil(seconds)
    note("end", ctx)
    return ctx.claim_epoch


@app.task(max_recoveries=0)
async def holds_the_gil_once(ctx: JobContext, seconds: float) -> None:
    note("start", ctx)
    hold_the_gil(seconds)
    note("end", ctx)


@app.task(max_recoveries=2)
async def kills(ctx: JobContext, how: str) -> None:
    """End the process, after a while in which neighbours work."""
    note("start", ctx)
    await asyncio.sleep(0.2)
    match how:
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
    raise AssertionError("it lives")


@app.task(max_attempts=1)
async def neighbour(ctx: JobContext, seconds: float) -> int:
    note("start", ctx)
    await asyncio.sleep(seconds)
    note("end", ctx)
    return ctx.attempt


@app.task(max_attempts=1)
async def eats(ctx: JobContext) -> None:
    """Take all memory that there is, in smaller and smaller pieces, and let others feel it."""
    note("start", ctx)
    taken: list[mmap.mmap] = []
    size = 1 << 30
    while size > 1 << 16:
        try:
            taken.append(mmap.mmap(-1, size))  # claimed, but never written to: the machine need not have it
        except OSError:
            size //= 2
    note("end", ctx)
    await asyncio.sleep(0.5)
    bytearray(1 << 30)


@app.task(retry=Retry(8, constant(0)), max_recoveries=20)
async def fails(ctx: JobContext, times: int, gate: str) -> int:
    """Fail so often; the attempt after half of that waits at a gate first."""
    note("start", ctx)
    if ctx.attempt == times // 2 + 1:
        end = time.monotonic() + BOUND
        while not is_open(gate):
            if time.monotonic() > end:
                raise AssertionError(f"nobody opened {gate}")
            await asyncio.sleep(0.02)
    if ctx.attempt <= times:
        raise ValueError(f"failure {ctx.attempt}")
    return ctx.attempt


# What bodies do to their process -----------------------------------------------------------------------------------


def sockets() -> list[int]:
    """Descriptors of this process's sockets that lead to a database."""
    import socket

    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if ".s.PGSQL" in str(one.getpeername()):
                        found.append(int(name))
    return found


async def breaks_connections() -> None:
    import socket

    for fd in sockets():
        with socket.socket(fileno=os.dup(fd)) as one:
            one.shutdown(socket.SHUT_RDWR)


async def closes_connections() -> None:
    for fd in sockets():
        os.close(fd)


async def closes_the_log() -> None:
    os.close(1)
    os.close(2)


async def closes_the_streams() -> None:
    sys.stdout.close()
    sys.stderr.close()


async def leaves_its_folder() -> None:
    gone = Path(os.environ["GATES"], "gone")
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()


async def takes_the_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


async def takes_the_wakeup() -> None:
    signal.set_wakeup_fd(-1)


async def takes_the_loop() -> None:
    class Policy(asyncio.DefaultEventLoopPolicy):
        def get_event_loop(self) -> NoReturn:
            raise RuntimeError("no loop for you")

        def new_event_loop(self) -> NoReturn:
            raise RuntimeError("no loop for you")

    def handler(*_: object) -> None:
        """Tells nobody."""

    asyncio.set_event_loop_policy(Policy())
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(handler)
    loop.create_task(fail_unseen())
    await asyncio.sleep(0.01)
    gc.collect()


async def fail_unseen() -> None:
    raise ValueError("nobody looks")


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


async def exits_in_a_task() -> None:
    await asyncio.create_task(exits())


async def exits() -> None:
    sys.exit(4)


async def exits_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 4)
    await asyncio.sleep(0.01)


async def cancels_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def fork() -> bool:
    """Whether this is the child, which gets five seconds."""
    if pid := os.fork():
        os.waitpid(pid, 0)
        return False
    signal.alarm(5)
    return True


async def child_returns() -> None:
    fork()


async def child_exits() -> None:
    if fork():
        sys.exit(0)


async def child_raises() -> None:
    if fork():
        raise ValueError("in the child")


async def child_awaits() -> None:
    if fork():
        await asyncio.sleep(0.01)
        await asyncio.sleep(BOUND)


async def child_forks_in_a_task() -> None:
    await asyncio.create_task(child_awaits())


async def forked_process() -> None:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.01,))
    child.start()
    child.join()


async def prints_much() -> None:
    for _ in range(200):
        print("x" * 100_000)


async def recurses() -> None:
    def down(n: int) -> int:
        return down(n + 1) + 1

    down(0)


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Loud(Exception):
    def __str__(self) -> str:
        return "x" * 10_000_000


class Strange(BaseException): ...


def raising(error: BaseException) -> Callable[[], Coroutine[Any, Any, None]]:
    async def raises() -> None:
        await asyncio.sleep(0)
        raise error

    return raises


DEEDS: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
    deed.__name__: deed
    for deed in (
        breaks_connections,
        closes_connections,
        leaves_its_folder,
        takes_the_loop,
        takes_the_wakeup,
        takes_the_signals,
        stops_the_loop,
        exits,
        exits_in_a_task,
        exits_in_a_callback,
        cancels_all,
        child_returns,
        child_exits,
        child_raises,
        child_awaits,
        child_forks_in_a_task,
        forked_process,
        prints_much,
        recurses,
        closes_the_log,
        closes_the_streams,
    )
} | {
    type(error).__name__: raising(error)
    for error in (KeyboardInterrupt(), GeneratorExit(), SystemExit(3), Strange(), Mute(), Loud())
}


@app.task(max_attempts=1, max_recoveries=0)
async def does(ctx: JobContext, deed: str) -> str:
    """Do one of them, in the event loop."""
    note("start", ctx)
    await DEEDS[deed]()
    return deed


@app.task(max_attempts=1, max_recoveries=0)
def does_in_thread(ctx: JobContext, deed: str) -> str:
    """The same in a thread, as far as its first step."""
    note("start", ctx)
    with suppress(StopIteration):
        DEEDS[deed]().send(None)
    return deed


@app.task(process=True, max_attempts=1)
def does_in_child(ctx: JobContext, deed: str) -> str:
    """The same in a child process."""
    note("start", ctx)
    with suppress(StopIteration):
        DEEDS[deed]().send(None)
    return deed

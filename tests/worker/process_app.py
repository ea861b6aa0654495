"""The application whose bodies run in child processes; children import this module by its name.

A body says that it has come by a file ``<name>.<pid>`` in its folder, and waits for a file that a test makes.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from taskq import JobContext, Ready, Retry, RetryAfter, Snooze, TaskQ, constant
from taskq.errors import JobCancelled

if os.environ.get("PROCESS_APP_BREAKS"):
    raise RuntimeError("the import breaks")

app = TaskQ()
BOUND = 60.0
AGAIN = Retry(2, constant(0))
seen = contextvars.ContextVar("seen", default="nothing")
loops: set[int] = set()


def come(folder: str, name: str = "here") -> None:
    Path(folder, f"{name}.{os.getpid()}").touch()


def until_open(folder: str, gate: str = "gate") -> None:
    end = time.monotonic() + BOUND
    while not Path(folder, gate).exists():
        if time.monotonic() > end:
            raise AssertionError(f"nobody opened {gate}")
        time.sleep(0.01)


@app.task(process=True)
def add(a: int, b: int) -> list[int]:
    return [a + b, os.getpid()]


@app.task(process=True)
async def add_async(a: int, b: int) -> list[int]:
    await asyncio.sleep(0)
    loops.add(id(asyncio.get_running_loop()))
    return [a + b, len(loops), os.getpid()]


@app.task(process=True, max_attempts=1)
def told(ctx: JobContext) -> dict[str, Any]:
    missing = ""
    try:
        ctx.assert_owned_sync()
    except AttributeError as exc:
        missing = type(exc).__name__
    return {
        "job": str(ctx.job_id),
        "attempt": [ctx.attempt, ctx.max_attempts, ctx.claim_epoch, ctx.generation],
        "key": ctx.idempotency_key,
        "queue": ctx.queue,
        "meta": dict(ctx.meta),
        "cancelled": ctx.cancel_requested,
        "deadline": None if ctx.deadline is None else ctx.deadline.tzname(),
        "missing": missing,
        "seen": seen.get(),
    }


@app.task(process=True, timeout=0.3, max_attempts=1)
def in_c_code(folder: str) -> None:
    """Deaf to all but a kill: one call into C that neither returns nor looks at signals."""
    come(folder)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)


@app.task(process=True, timeout=0.3, max_attempts=1)
def loops_forever(folder: str) -> None:
    try:
        come(folder)
        while True:
            pass
    finally:
        come(folder, "cleaned")


@app.task(process=True, timeout=0.3, max_attempts=1)
async def blocks_its_loop(folder: str) -> None:
    come(folder)
    while True:
        time.sleep(0.1)


@app.task(process=True, max_attempts=1)
async def sleeps(folder: str) -> None:
    come(folder)
    await asyncio.sleep(BOUND)


@app.task(process=True, max_attempts=1)
def waits(folder: str, name: str = "here") -> int:
    come(folder, name)
    until_open(folder)
    return os.getpid()


@app.task(process=True, retry=AGAIN)
def dies_once(folder: str, how: str) -> int:
    if not any(Path(folder).glob("here.*")):
        come(folder)
        if how == "exit":
            os._exit(7)
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "sys.exit":
            sys.exit("enough")
        until_open(folder)
    return 1


@app.task(process=True, max_attempts=1)
def starts_a_program(folder: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(folder, f"program.{child.pid}").touch()
    child.wait()


class Odd(ValueError):
    pass


@app.task(process=True, retry=Retry(3, constant(0), give_up_on=[ValueError]))
def raises(what: str) -> Any:
    match what:
        case "odd":
            raise Odd("seven")
        case "retry":
            raise KeyError("again")
        case "retry_after":
            raise RetryAfter(3600, "busy")
        case "snooze":
            raise Snooze(3600)
        case "cancelled":
            raise JobCancelled(None)  # type: ignore[arg-type]
        case "unstorable":
            return object()


@app.task(process=True)
def tells(text: str) -> None:
    print(f"printed {text}")
    logging.getLogger("of.the.app").warning("logged %s", text, extra={"colour": "red"})
    try:
        raise ValueError(text)
    except ValueError:
        logging.getLogger("of.the.app").exception("caught")


@app.task(process=True)
def grows(megabytes: int) -> int:
    kept.append(bytes(megabytes * 1024 * 1024).replace(b"\0", b"x"))
    return os.getpid()


kept: list[bytes] = []


@app.task(process=True, max_attempts=1)
def enqueues(n: int) -> str:
    return str(add.enqueue_sync(n, n).id)


@app.task
async def in_the_worker() -> int:
    return os.getpid()


@app.task(process=True, effect_class="side_effecting", timeout=5)
def pays(ctx: JobContext, how: str) -> str:
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + BOUND
    while not (how == "told" and ctx.cancel_requested):
        if time.monotonic() > end:
            raise AssertionError("nobody told it, nobody stopped it")
        time.sleep(0.01)
    return "told"


def looks(n: int) -> Ready:
    return Ready({"n": n, "in": os.getpid()})


@app.task(process=True, prepare=looks)
def prepared(ctx: JobContext, n: int) -> dict[str, Any]:
    return {**ctx.facts, "body": os.getpid()}

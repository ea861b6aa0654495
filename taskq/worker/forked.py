"""A body that calls ``os.fork`` makes a copy of the whole worker; the copy does what the body says, and no more.

It has the worker's event loop, claims and connections, which are the worker's alone: it would end jobs in the worker's
name, and read answers that are meant for the worker. So it ends as soon as the body's own code gives way: when that
returns, raises, or awaits something.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from typing import NoReturn
from weakref import WeakSet

import asyncpg

from taskq.errors import describe

__all__ = ["EXIT_AWAITED", "Home", "end_awaiting_copy", "end_copy", "keep_from_copies"]

EXIT_AWAITED = 70
"""The exit code of a copy that awaited something, which it cannot have."""


class Home:
    """The process in which the bodies of one worker run.

    Args:
        loop: The worker's loop.

    Attributes:
        left: Whether this is a copy of that process.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.left = False
        self._loop = loop
        _homes.add(self)

    def leave(self) -> None:
        """This is a copy now. One that a task beside the body has made ends when the loop gets its next turn."""
        self.left = True
        with suppress(RuntimeError):  # copied in another thread than the loop's, which this process does not have
            self._loop.call_soon(os._exit, EXIT_AWAITED)


def end_copy(error: BaseException | None) -> NoReturn:
    """End a copy whose body has returned, or raised: with 0, with what SystemExit says, or else with 1."""
    code = 0
    said = ""
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        code = error.code or 0
    elif error is not None:
        code = 1
        told = describe(error)
        said = f"a process that a body made with os.fork ended: {told['type']}: {told['message']}\n"
    _exit(code, said)


def end_awaiting_copy() -> NoReturn:
    """End a copy whose body awaits something."""
    _exit(
        EXIT_AWAITED,
        "a process that a body made with os.fork awaited something and was ended: the event loop is the worker's; "
        "use subprocess, or process=True\n",
    )


def _exit(code: int, said: str) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    with suppress(BaseException):
        os.write(2, said.encode(errors="replace"))
    os._exit(code)


_homes: WeakSet[Home] = WeakSet()
_connections: WeakSet[asyncpg.Connection] = WeakSet()


def keep_from_copies(conn: asyncpg.Connection) -> None:
    """In copies of this process, the connection leads nowhere: the loop there must not read the worker's answers."""
    _connections.add(conn)


def _copied() -> None:
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for conn in list(_connections):
        with suppress(Exception):
            if not conn.is_closed():
                os.dup2(nowhere, conn._transport.get_extra_info("socket").fileno(), inheritable=False)
    os.close(nowhere)
    for home in list(_homes):
        home.leave()


os.register_at_fork(after_in_child=_copied)

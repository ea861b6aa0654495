"""What the jobs of every queue do: async functions of a number and a text, ``noop``, ``sleep`` and ``probe``."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable

__all__ = ["BODIES", "LINKS", "TEXT", "add", "noop", "payload", "probe", "sleep"]

TEXT = "x" * 30
"""With a number of four digits the payload is 57 bytes of JSON."""


LINKS = 10
"""Jobs of a chain, and steps of a body."""


def payload(number: int) -> dict[str, int | str]:
    """The arguments of one job."""
    return {"number": number, "text": TEXT}


async def noop(number: int, text: str) -> None:
    """Do nothing."""


async def sleep(number: int, text: str) -> None:
    """Wait a millisecond on the event loop, as for an answer from the network: no CPU is used meanwhile."""
    await asyncio.sleep(0.001)


async def probe(number: int, text: str) -> None:
    """Say when the body began, on the clock that all processes of the machine share."""
    at = time.monotonic_ns()
    # One write call, so that lines of several writers do not mix.
    os.write(1, b'{"event": "probe", "number": %d, "at": %d}\n' % (number, at))


async def add(number: int) -> int:
    """What a child, a link of a chain and a step do."""
    return number + 1


BODIES: dict[str, Callable[[int, str], Awaitable[None]]] = {"noop": noop, "sleep": sleep, "probe": probe}

"""Recording the steps of many bodies: while statements are on their way, what comes waits, and goes with the next.

So the more bodies record at once, the fewer commits each costs; one body alone waits for nobody. A job whose row
somebody else has locked holds up only itself: its steps are asked for again, alone and waiting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from taskq.db.shared import SharedStatements
from taskq.errors import DatabaseUnavailable

__all__ = ["Entry", "Recorder"]

AT_ONCE: Final = 2
"""Statements under way at once."""
BATCH: Final = 100
"""The most steps in a statement."""
BATCH_CHARACTERS: Final = 1024 * 1024
"""A batch ends before the step whose text would take it past this many characters."""


class Entry(NamedTuple):
    """One step to record; ``text`` is JSON."""

    worker: str
    job: str
    epoch: int
    name: str
    occurrence: int
    text: str


class Recorder:
    """Sends steps in batches.

    Args:
        send: Records these and answers for each, in order; with True it waits for locked rows, else answers ``busy``.
    """

    def __init__(self, send: Callable[[Sequence[Entry], bool], Awaitable[Sequence[str]]]) -> None:
        self._send = send
        self._shared: SharedStatements[Entry, str] = SharedStatements(
            lambda entries: send(entries, False),
            # One that cannot be stored must not fail the others.
            undone=lambda exc: not isinstance(exc, DatabaseUnavailable),
            size=lambda entry: len(entry.text),
            at_once=AT_ONCE,
            most=BATCH,
            most_size=BATCH_CHARACTERS,
            outlives=True,
        )

    async def record(self, entry: Entry) -> str:
        """Record one step; the answer of the database: recorded, replay, conflict or fenced.

        Raises:
            DatabaseUnavailable: There was no answer in time; it may have been recorded.
        """
        answer = await self._shared.ask(entry)
        return (await self._send([entry], True))[0] if answer == "busy" else answer

    def close(self) -> None:
        """Send no more; who waits is told by its own cancellation."""
        self._shared.close()

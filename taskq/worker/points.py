"""Where a test may look at a worker at work: who watches, if anybody.

``taskq.testing`` sets ``watch`` while a test has armed faults or follows the points that jobs pass; the exchange, the
effect starts and the outbox ask for it, once for each of what they do. In production it is None. Nothing here imports
``taskq.testing``, and nothing but a call of a test's own sets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol
from uuid import UUID

if TYPE_CHECKING:
    from taskq.worker.claims import End
    from taskq.worker.complete import Outbox
    from taskq.worker.connection import Connection

__all__ = ["Watch", "WatchedExchange", "watch"]


class WatchedExchange(Protocol):
    """One exchange, or one claim of a suspect, that is watched."""

    async def __call__(self, conn: Any, query: str, args: Sequence[Any], timeout: float) -> list[Any]:
        """Run the statement on an asyncpg connection in the place of ``conn.fetch``; ``timeout`` in seconds."""

    def acted(self, upon: Literal["claims", "ends"]) -> None:
        """The worker has done what the answer asks for: handed over claims, or settled ends."""


class Watch(Protocol):
    """Whoever watches."""

    def exchange(self, conn: Connection, outbox: Outbox, ends: Sequence[End], limit: int) -> WatchedExchange:
        """An exchange that sends ``ends`` and asks for up to ``limit`` claims is about to be sent."""

    def effect_start(self, jobs: Sequence[UUID]) -> WatchedExchange:
        """A statement that lets these jobs start their effects is about to be sent."""

    def keep(self, outbox: Outbox, end: End) -> None:
        """A body has ended: put its end into the outbox, with ``Outbox.keep``."""


watch: Watch | None = None
"""Whoever watches; None in production."""

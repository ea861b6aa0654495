"""Ends that were committed asynchronously: kept until a commit that waits has followed, sent again if the server went.

With ``ends_commit="async"`` PostgreSQL answers before it has flushed. What it loses when it crashes, it loses from the
end backwards: a later commit of the same server that has waited has flushed all before it. So ends are forgotten then,
and sent again where the connection was opened anew in between, which a crash cannot do without. One that stands on
record after all changes no row and is known by its outcome id.
"""

from __future__ import annotations

from taskq.worker.claims import End
from taskq.worker.complete import BATCH, Outbox
from taskq.worker.connection import Connection

LONGEST = 0.5
"""Seconds after which an end that was committed asynchronously is made to last by a commit that waits."""


class Unflushed:
    """Keeps them for one exchanger; they count as not confirmed.

    Args:
        outbox: Where ends are kept and sent from.
        conn: The exchange's connection.
        allowed: Whether ends may be committed asynchronously at all.
    """

    def __init__(self, outbox: Outbox, conn: Connection, *, allowed: bool) -> None:
        self._outbox = outbox
        self._conn = conn
        self._allowed = allowed
        self._ends: list[End] = []
        self._opened = 0
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def oldest(self) -> End | None:
        """The one that has waited longest."""
        return self._ends[0] if self._ends else None

    def may_wait(self, now: float) -> bool:
        """Whether the next ends may be committed asynchronously: for a while, and not too many."""
        return self._allowed and len(self._ends) < BATCH and not self.is_due(now)

    def is_due(self, now: float) -> bool:
        """Whether they have waited long enough."""
        return bool(self._ends) and now - self._since >= LONGEST

    def answered(self, ends: list[End], now: float, *, flushed: bool) -> None:
        """The exchange was answered: these have been applied, and all until now is flushed or not."""
        opened = self._conn.opened
        if self._ends and opened != self._opened:
            self._outbox.again(self._ends)
            self._ends = []
        if flushed or not self._allowed:
            self._outbox.confirmed([*self._ends, *ends])
            self._ends = []
        elif ends:
            if not self._ends:
                self._opened, self._since = opened, now
            self._ends += ends

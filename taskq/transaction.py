"""What the block of ``ctx.transaction()`` is given: a connection in a transaction, and a place for the result.

How the block begins and ends is the worker's (``taskq.worker.safe_block``).
"""

from __future__ import annotations

from typing import Any

import psycopg

__all__ = ["SyncTransaction", "Transaction"]


class _Outcome:
    """The result that the attempt will succeed with."""

    __slots__ = ("_result",)

    def __init__(self) -> None:
        self._result: Any = None

    def complete(self, result: Any) -> None:
        """Say what the job's result is; None where nobody says. Said again, the last one counts.

        Args:
            result: What the task's return annotation says. It is checked at the end of the block, before the commit.
        """
        self._result = result


class Transaction(_Outcome):
    """The block of ``async with ctx.transaction() as tx``.

    Attributes:
        conn: An asyncpg connection of the worker's, in a READ COMMITTED transaction that commits with the job's end.
            It goes back to its pool with the block.
    """

    __slots__ = ("conn",)

    def __init__(self, conn: Any) -> None:
        super().__init__()
        self.conn = conn


class SyncTransaction(_Outcome):
    """The block of ``with ctx.transaction_sync() as tx``.

    Attributes:
        conn: A psycopg connection of the worker's, in a READ COMMITTED transaction that commits with the job's end. It
            is closed with the block.
    """

    __slots__ = ("conn",)

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        super().__init__()
        self.conn = conn

"""What a context gives in a plain call, where no worker and no job stand behind it: enough to test a body with."""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from taskq.checkpoints import conflict, decode, encode
from taskq.context import JobContext, Saved
from taskq.errors import TransactionalStepUnsupported

if TYPE_CHECKING:
    from taskq.transaction import SyncTransaction, Transaction

__all__ = ["PlainCalls"]

T = TypeVar("T")


class PlainCalls:
    """The services of one plain call: its checkpoint is kept in memory, by the rules of the database."""

    def __init__(self) -> None:
        self._version = 0
        self._text: str | None = None

    async def assert_owned(self, ctx: JobContext) -> None:
        """Nobody can take a plain call away."""

    async def save(self, ctx: JobContext, value: Any, version: int | None) -> Saved:
        """Compare and swap, in memory."""
        text = encode(value)
        if version is None or version == self._version:
            self._version, self._text = self._version + 1, text
        elif (version + 1, text) != (self._version, self._text):
            raise conflict(ctx.job_id, version, self._version, self._text)
        return await self.load(ctx, Any)

    async def load(self, ctx: JobContext, kind: Any) -> Saved:
        """What was saved in this call."""
        return Saved(self._version, decode(self._text, kind))

    def transaction(self, ctx: JobContext) -> AbstractAsyncContextManager[Transaction]:
        """Refused: there is no job that could be completed."""
        self._refuse("transaction")

    def transaction_sync(self, ctx: JobContext) -> AbstractContextManager[SyncTransaction]:
        """Refused: there is no job that could be completed."""
        self._refuse("transaction_sync")

    def wait(self, call: str, asked: Coroutine[Any, Any, T]) -> T:
        """Nothing here waits for anything."""
        try:
            asked.send(None)
        except StopIteration as stop:
            value: T = stop.value
            return value
        raise AssertionError("a plain call waits for nothing")

    def _refuse(self, call: str) -> NoReturn:
        raise TransactionalStepUnsupported(
            f"ctx.{call}() completes the job in the body's transaction, and a plain call has no job; enqueue the task, "
            "and let a worker or taskq.testing.drain run it"
        )

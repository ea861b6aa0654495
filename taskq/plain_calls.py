"""What a context gives in a plain call, where no worker and no job stand behind it: enough to test a body with."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from taskq.checkpoints import conflict, decode, encode
from taskq.children import Child
from taskq.context import JobContext, Saved
from taskq.errors import StepRefused, TransactionalStepUnsupported, describe
from taskq.steps import Offer

if TYPE_CHECKING:
    from taskq.children import Start
    from taskq.steps import Key, Record
    from taskq.transaction import SyncTransaction, Transaction

__all__ = ["PlainCalls"]

T = TypeVar("T")


class PlainCalls:
    """The services of one plain call: its checkpoint is kept in memory, by the rules of the database."""

    def __init__(self) -> None:
        self._version = 0
        self._text: str | None = None
        self._blocking = False

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

    async def load_steps(self, ctx: JobContext) -> dict[Key, Record]:
        """Nothing was before a plain call: each step calls its function."""
        return {}

    async def record_step(self, ctx: JobContext, key: Key, text: str) -> None:
        """Nothing comes after a plain call."""

    async def start_step(self, ctx: JobContext, key: Key) -> Record | datetime:
        """Likewise."""
        return datetime.now(UTC)

    async def end_step(self, ctx: JobContext, key: Key, at: datetime, text: str | None, error: str | None) -> None:
        """Likewise."""

    async def begin_sleep(self, ctx: JobContext, key: Key, seconds: float) -> float:
        """A plain call does not sleep."""
        return 0.0

    async def begin_wait(self, ctx: JobContext, key: Key, seconds: float | None) -> Offer:
        """Nobody can send a signal to a plain call: a time is up at once."""
        if seconds is None:
            raise StepRefused(
                f"ctx.wait_for({key.name!r}) waits for a signal to the job, and a plain call has no job; enqueue the "
                "task, let taskq.testing.drain run it, and send job.signal(...)"
            )
        return Offer("timed_out")

    async def take_signal(self, ctx: JobContext, key: Key, signal: int, refused: str | None) -> bool:
        """There is none."""
        return False

    async def begin_child(self, ctx: JobContext, key: Key, start: Start, new: bool) -> Child:
        """The function of its task is called, here and now."""
        if start.call is None:
            raise StepRefused(
                f"ctx.child({key.name}) starts a run, and a plain call has none; enqueue the task, and let a worker or "
                "taskq.testing.drain run it"
            )
        try:
            value = start.call()
            if inspect.iscoroutine(value):
                value = _in_a_thread(value) if self._blocking else await value
        except Exception as exc:
            return Child("failed", None, json.dumps({"status": "failed", **describe(exc)}), "a plain call")
        return Child("succeeded", start.encode(value), None, "a plain call")

    async def leave_steps(self, ctx: JobContext, left: Sequence[Key]) -> None:
        """Nothing is left where nothing is recorded."""

    def transaction(self, ctx: JobContext) -> AbstractAsyncContextManager[Transaction]:
        """Refused: there is no job that could be completed."""
        self._refuse("transaction")

    def transaction_sync(self, ctx: JobContext) -> AbstractContextManager[SyncTransaction]:
        """Refused: there is no job that could be completed."""
        self._refuse("transaction_sync")

    def wait(self, call: str, asked: Coroutine[Any, Any, T]) -> T:
        """Nothing here waits for anything; the async function of a child has a loop of its own meanwhile."""
        self._blocking = True
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


def _in_a_thread(work: Coroutine[Any, Any, Any]) -> Any:
    """Whether or not a loop runs here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()

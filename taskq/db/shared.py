"""Statements that callers of one event loop share: what comes while some are under way waits, and goes in the next.

So the more callers there are at a time, the fewer commits each costs; nobody waits for company, and one caller alone is
sent at once. Each is given its own answer, or its own error: a statement that was refused for the sake of one of them
has done nothing, and is sent again in halves, until the refusal stands with the one that it is about.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["SharedStatements"]

T = TypeVar("T")
A = TypeVar("A")


class _Waiting(NamedTuple, Generic[T, A]):
    item: T
    answer: asyncio.Future[A]


class SharedStatements(Generic[T, A]):
    """The statements of one event loop.

    Args:
        send: Sends items in one statement; their answers in order.
        undone: Whether an error of ``send`` says that nothing was done, and may be about one of the items alone.
        size: How much an item counts for ``most_size``.
        at_once: Statements under way before others wait.
        most: Items in a statement at most.
        most_size: The size at which a statement ends before its next item.
        patience: Seconds for which anyone waits for statements of others, so that one that hangs holds nobody up; None
            for as long as they take.
        outlives: Whether what was asked for is done although its caller has gone. Else it is not sent any more, and a
            statement that all its callers have left is cancelled.
    """

    def __init__(
        self,
        send: Callable[[Sequence[T]], Awaitable[Sequence[A]]],
        *,
        undone: Callable[[Exception], bool],
        size: Callable[[T], int],
        at_once: int,
        most: int,
        most_size: int,
        patience: float | None = None,
        outlives: bool = False,
    ) -> None:
        self._send = send
        self._undone = undone
        self._size = size
        self._at_once = at_once
        self._most = most
        self._most_size = most_size
        self._patience = patience
        self._outlives = outlives
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self.waiting: deque[_Waiting[T, A]] = deque()
        """Who is not sent yet."""

    async def ask(self, item: T) -> A:
        """Send one item, with others that are there; its answer."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[A] = loop.create_future()
        self.waiting.append(_Waiting(item, answer))
        if len(self._tasks) < self._at_once:
            self._start()
        elif self._patience is not None and self._timer is None:
            self._timer = loop.call_later(self._patience, self._waited, self._patience)
        return await answer

    async def settle(self) -> None:
        """Wait until nobody waits and nothing is under way."""
        while self._tasks:
            await self._idle.wait()

    def close(self) -> None:
        """Cancel what is under way, and with it who waits for its answer."""
        for task in self._tasks:
            task.cancel()

    def _waited(self, patience: float) -> None:
        self._timer = None
        if self.waiting:
            self._start()
            self._timer = asyncio.get_running_loop().call_later(patience, self._waited, patience)

    def _start(self) -> None:
        self._idle.clear()
        task = asyncio.get_running_loop().create_task(self._statement())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self.waiting and len(self._tasks) < self._at_once:
            self._start()
        elif not self._tasks:
            self._idle.set()

    async def _statement(self) -> None:
        # Taken here, so that all who came before the loop has turned go in it.
        taken = self._taken()
        if not self._outlives:
            this = asyncio.current_task()
            assert this is not None

            def gone(_: asyncio.Future[A]) -> None:
                if all(one.answer.cancelled() for one in taken):
                    this.cancel()

            for one in taken:
                one.answer.add_done_callback(gone)
        await self._give(taken)

    def _taken(self) -> list[_Waiting[T, A]]:
        """As many as go into one statement."""
        taken: list[_Waiting[T, A]] = []
        size = 0
        while self.waiting and len(taken) < self._most:
            one = self.waiting[0]
            if self._outlives or not one.answer.done():
                size += self._size(one.item)
                if taken and size > self._most_size:
                    break
                taken.append(one)
            self.waiting.popleft()
        return taken

    async def _give(self, taken: Sequence[_Waiting[T, A]]) -> None:
        if not taken:
            return
        try:
            answers = await self._send([one.item for one in taken])
        except asyncio.CancelledError:
            for one in taken:
                one.answer.cancel()
            raise
        except Exception as exc:
            if len(taken) > 1 and self._undone(exc):
                half = len(taken) // 2
                await self._give(taken[:half])
                await self._give(taken[half:])
                return
            for one in taken:
                if not one.answer.done():
                    one.answer.set_exception(exc)
            return
        for one, answer in zip(taken, answers, strict=True):
            if not one.answer.done():
                one.answer.set_result(answer)

"""Running bodies: a fixed set of long-lived consumers, each body in a context of its own.

A task, a cancel scope and a timer a job cost three times what a body of nothing costs; consumers cost none of them.
Each runs jobs inline, one after the other; when control returns to the loop while jobs still wait, the next idle one
is woken. A body is interrupted by cancelling its consumer's task, and the consumer takes the cancellation back
(``uncancel``) once the body has ended; one whose task is still held by something then goes on in a fresh task
(``leftovers``). Plain functions run in threads, which cannot be stopped: their claim is kept
until they end.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from taskq import errors
from taskq.context import JobContext
from taskq.policy import ExecutionPolicy
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.worker.claims import Claim, Interrupt
from taskq.worker.disposition import BodyEnd, Interrupted, Raised, Returned
from taskq.worker.leftovers import holders

log = get_logger("worker")

SLICE = 0.005
"""Seconds that consumers run bodies inline before the loop gets a turn."""
CLOSE_WITHIN = 1.0
"""Seconds that bodies get to end when the consumers are ended under them."""
ASK_AGAIN = 5.0
"""Seconds after which a body that goes on in spite of its timeout is cancelled again, each time."""
SWEEP = 0.05
"""Seconds between looks for bodies past their timeout."""
_RANK: Final[dict[Interrupt, int]] = {"cancel": 1, "timeout": 1, "shutdown": 2, "lease": 3}
"""A body that is being stopped already is told again only for a reason of higher rank: it may have gone on."""


class Running:
    """One body that runs: who runs it, since when, and why it is being stopped."""

    __slots__ = (
        "asked_at",
        "claim",
        "context",
        "deaf",
        "interrupt",
        "policy",
        "rank",
        "started",
        "task",
        "thread",
        "timed_out_at",
    )

    def __init__(self, claim: Claim, policy: ExecutionPolicy, context: JobContext, started: float) -> None:
        self.claim = claim
        self.policy = policy
        self.context = context
        self.started = started
        self.task: asyncio.Task[None] | None = None
        self.thread = False
        self.interrupt: Interrupt | None = None
        self.rank = 0
        self.timed_out_at: float | None = None
        self.asked_at = 0.0
        self.deaf = False


class Executor:
    """Runs the bodies of claims and hands each end to ``on_end``.

    Args:
        tasks: The tasks that this worker knows, by name.
        concurrency: How many bodies run at once.
        on_end: Called in the loop with the claim, its policy and how the body ended.
        may_start: Asked before each body whether the lease still holds: after a suspended machine or a stopped process
            the loop goes on where it was, and claims may long be another worker's.
    """

    def __init__(
        self,
        tasks: dict[str, Task[..., Any]],
        concurrency: int,
        on_end: Callable[[Claim, ExecutionPolicy, BodyEnd], None],
        may_start: Callable[[], bool] = lambda: True,
    ) -> None:
        self._tasks = tasks
        self._concurrency = concurrency
        self._on_end = on_end
        self._may_start = may_start
        self._ready: deque[tuple[Claim, ExecutionPolicy]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._baton = False
        self._slice_ends = 0.0
        self._sweeping = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._consumers: list[asyncio.Task[None]] = []
        self._closing = False
        self._threads: ThreadPoolExecutor | None = None
        self._threads_left = 0
        self.running: dict[UUID, Running] = {}
        self.mean_seconds = 1.0
        """A moving mean of how long bodies take."""

    def start(self) -> None:
        """Start the consumers in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._consumers = [
            self._loop.create_task(self._consume(n), name=f"taskq-consumer-{n}") for n in range(self._concurrency)
        ]

    @property
    def waiting(self) -> int:
        """Claims that no consumer has taken yet."""
        return len(self._ready)

    @property
    def busy(self) -> int:
        """Bodies that run."""
        return len(self.running)

    @property
    def oldest_waiting(self) -> float | None:
        """When the claim that waits longest was received, on the loop's clock."""
        return self._ready[0][0].received if self._ready else None

    def waiting_keys(self) -> set[tuple[UUID, int]]:
        """Job and epoch of every claim that no consumer has taken yet."""
        return {(claim.job_id, claim.claim_epoch) for claim, _ in self._ready}

    def put(self, claims: list[tuple[Claim, ExecutionPolicy]]) -> None:
        """Hand claims to the consumers, in order."""
        self._ready.extend(claims)
        self._wake_one()

    def take_back(self) -> list[tuple[Claim, ExecutionPolicy]]:
        """Take back every claim that no consumer has taken yet."""
        waiting = list(self._ready)
        self._ready.clear()
        return waiting

    async def until_empty(self) -> None:
        """Return once no body runs."""
        await self._empty.wait()

    def interrupt(self, job_id: UUID, by: Interrupt, epoch: int | None = None) -> bool:
        """Stop a body; answers whether the attempt is here.

        A coroutine is cancelled; a function in a thread is only told, through its context. A claim that waits for a
        consumer ends as cancelled without a body. A body that is being stopped already is left to it, unless what
        comes is graver: the first reason says how the attempt ends, but it may have gone on in spite of it.
        """
        run = self.running.get(job_id)
        if run is None:
            return by == "cancel" and self._cancel_waiting(job_id, epoch)
        if epoch is not None and run.claim.claim_epoch != epoch:
            return False
        if by == "cancel":
            run.context.cancel_requested = True
        if _RANK[by] <= run.rank:
            if run.deaf and run.task is not None:
                run.task.cancel()
            return True
        run.rank = _RANK[by]
        if run.interrupt is None or (run.interrupt == "timeout" and by == "lease"):
            run.interrupt = by
        if run.thread:
            run.context.cancel_requested = True
        elif run.task is not None:
            run.task.cancel()
        return True

    def _cancel_waiting(self, job_id: UUID, epoch: int | None) -> bool:
        for entry in self._ready:
            claim, policy = entry
            if claim.job_id == job_id and epoch in (None, claim.claim_epoch):
                self._ready.remove(entry)
                self._on_end(claim, policy, Interrupted("cancel"))
                return True
        return False

    def interrupt_all(self, by: Interrupt) -> None:
        """Stop every body."""
        for job_id in list(self.running):
            self.interrupt(job_id, by)

    def stuck(self) -> list[Running]:
        """Functions in threads that have outlived their timeout, and cannot be stopped."""
        return [r for r in self.running.values() if r.thread and r.interrupt == "timeout"]

    async def close(self, within: float = CLOSE_WITHIN) -> None:
        """End the consumers. Bodies that still run are cancelled, and left behind if they do not end in time."""
        self._closing = True
        for consumer in self._consumers:
            consumer.cancel()
        if self._consumers:
            await asyncio.wait(self._consumers, timeout=within)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def left_behind(self) -> int:
        """Bodies that still run after ``close``."""
        return self._threads_left + sum(not consumer.done() for consumer in self._consumers) if self._closing else 0

    # The consumers ----------------------------------------------------------------------------------------------

    def _wake_one(self) -> None:
        self._baton = False
        while self._ready and self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(None)
                return

    async def _consume(self, n: int) -> None:
        me = asyncio.current_task()
        assert me is not None
        held = holders(me)
        while not self._closing:
            try:
                if not self._ready:
                    waiter = self._loop.create_future()
                    self._idle.append(waiter)
                    await waiter
                    self._slice_ends = self._loop.time() + SLICE
                    continue
                now = self._loop.time()
                if now > self._slice_ends:
                    await asyncio.sleep(0)
                    self._slice_ends = self._loop.time() + SLICE
                    continue
                claim, policy = self._ready.popleft()
                if self._ready and self._idle and not self._baton:
                    self._baton = True
                    self._loop.call_soon(self._wake_one)
            except asyncio.CancelledError:
                if self._closing:
                    raise
                # A late cancellation of a body that has ended, or one that cancelled itself: not ours.
                while me.cancelling():
                    me.uncancel()
                continue
            await self._run(me, claim, policy, now)
            if holders(me) != held and not self._closing:
                # The body has left something behind that could cancel the next one: leave it this task.
                self._consumers[n] = self._loop.create_task(self._consume(n), name=me.get_name())
                return

    async def _run(self, me: asyncio.Task[None], claim: Claim, policy: ExecutionPolicy, now: float) -> None:
        if not self._may_start():
            self._on_end(claim, policy, Interrupted("lease", started=False))
            return
        task = self._tasks[claim.task]
        context = JobContext(
            job_id=claim.job_id,
            task=claim.task,
            queue=claim.queue,
            attempt=claim.attempt + 1,
            max_attempts=claim.max_attempts,
            claim_epoch=claim.claim_epoch,
            generation=claim.generation,
            worker_id=claim.worker_id,
            deadline=claim.deadline,
            meta=claim.meta,
        )
        run = Running(claim, policy, context, now)
        run.task = me
        self.running[claim.job_id] = run
        self._empty.clear()
        end: BodyEnd
        try:
            kwargs = task.codec.decode(claim.payload)
            if policy.timeout is not None:
                self._sweep_soon()
            if task.is_async:
                coro = task.fn(context, **kwargs) if task.takes_context else task.fn(**kwargs)
                value = await _drive(coro, contextvars.copy_context())
            else:
                run.thread = True
                value = await self._in_thread(run, task, kwargs)
            end = _returned(task, value)
        except BaseException as exc:
            if run.interrupt is not None:
                # Whatever a body raises while it is being stopped, it was stopped.
                end = Interrupted(run.interrupt)
            elif not issubclass(type(exc), asyncio.CancelledError):  # isinstance asks the exception itself
                end = Raised(exc)
            elif self._closing:
                raise
            else:
                end = Raised(_self_cancelled(exc))
        finally:
            del self.running[claim.job_id]
            if not self.running:
                self._empty.set()
        self.mean_seconds += (self._loop.time() - now - self.mean_seconds) * 0.05
        try:
            self._on_end(claim, policy, end)
        except BaseException as exc:
            # A defect of ours, or of an exception that cannot even be looked at; without an end the claim would be
            # released and the body run again.
            why = errors.describe(exc)
            log.error(
                "job.end_not_decided", job_id=claim.job_id, task=claim.task, error=why["message"], kind=why["type"]
            )
            self._on_end(claim, policy, Raised(errors.TaskQError(f"its end could not be decided: {why['type']}")))
        if me.cancelling():
            while me.cancelling():
                me.uncancel()
            # Before Python 3.13 uncancel leaves a cancellation pending that was asked for and not delivered yet; it
            # would hit the next body. Let it out here.
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)

    async def _in_thread(self, run: Running, task: Task[..., Any], kwargs: dict[str, Any]) -> Any:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix="taskq-body")
        context = contextvars.copy_context()

        def body() -> tuple[Any, BaseException | None]:
            threading.current_thread().name = f"taskq-body {task.name} {run.claim.job_id}"
            args = (run.context,) if task.takes_context else ()
            try:
                return context.run(task.fn, *args, **kwargs), None
            except BaseException as exc:
                # Handed over as a value: a future refuses to hold StopIteration, and then never ends.
                return None, exc

        future = asyncio.wrap_future(self._threads.submit(body), loop=self._loop)
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
            if self._closing and not future.done():
                self._threads_left += 1
                raise asyncio.CancelledError
        value, error = future.result()
        if error is not None:
            raise error
        return value

    # Timeouts ---------------------------------------------------------------------------------------------------

    def _sweep_soon(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._loop.call_later(SWEEP, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = False
        now = self._loop.time()
        again = False
        for run in list(self.running.values()):
            timeout = run.policy.timeout
            if timeout is None or run.interrupt not in (None, "timeout"):
                continue
            again = True
            if run.interrupt is None and now - run.started >= timeout:
                run.timed_out_at = run.asked_at = now
                self.interrupt(run.claim.job_id, "timeout")
            elif run.interrupt is not None and not run.thread and now - run.asked_at >= ASK_AGAIN:
                self._ask_again(run, now)
        if again and not self._closing:
            self._sweep_soon()

    def _ask_again(self, run: Running, now: float) -> None:
        """A coroutine that swallowed its timeout holds its slot: tell once, and cancel it again."""
        run.asked_at = now
        if run.task is not None:
            run.task.cancel()
        if not run.deaf:
            run.deaf = True
            log.warning(
                "job.timeout_ignored",
                job_id=run.claim.job_id,
                task=run.claim.task,
                timeout=run.policy.timeout,
                seconds=round(now - run.started, 1),
            )


def job_in(frame: types.FrameType | None) -> Claim | None:
    """The claim whose body is on a stack, innermost frame first; for telling who blocks the event loop."""
    while frame is not None:
        if frame.f_code is Executor._run.__code__:
            claim = frame.f_locals.get("claim")
            return claim if isinstance(claim, Claim) else None
        frame = frame.f_back
    return None


def _returned(task: Task[..., Any], value: Any) -> BodyEnd:
    """The body has done its work; whatever is wrong with its result, it is not run again for that."""
    try:
        return Returned(task.codec.encode_result(value))
    except errors.ResultNotStorable as exc:
        return Raised(exc)
    except Exception as exc:
        error = errors.ResultNotStorable(
            f"the result of {task.name} cannot be stored: {errors.describe(exc)['message']}"
        )
        error.__cause__ = exc
        return Raised(error)


def _self_cancelled(exc: BaseException) -> errors.TaskQError:
    error = errors.TaskQError("the body was cancelled by itself or by something that it awaited, not by taskq")
    error.__cause__ = exc
    return error


@types.coroutine
def _drive(coro: Coroutine[Any, Any, Any], context: contextvars.Context) -> Generator[Any, Any, Any]:
    """Run a body in a context of its own inside the current task; what it awaits is handed on to the loop unchanged."""
    error: BaseException | None = None
    value: Any = None
    while True:
        try:
            awaited = context.run(coro.send, value) if error is None else context.run(coro.throw, error)
        except StopIteration as stop:
            return stop.value
        error = None
        try:
            value = yield awaited
        except GeneratorExit:
            context.run(coro.close)
            raise
        except BaseException as exc:
            error = exc
            value = None

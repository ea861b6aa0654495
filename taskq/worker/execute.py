"""Running bodies: a fixed set of long-lived consumers, each body in a context of its own.

A task, a cancel scope and a timer a job cost three times what a body of nothing costs; consumers cost none of them.
Each runs jobs inline, one after the other; when control returns to the loop while jobs still wait, the next idle one
is woken. A body is interrupted by cancelling its consumer's task, and the consumer takes the cancellation back
(``uncancel``) once the body has ended; one whose task is still held by something then goes on in a fresh task
(``leftovers``). Plain functions run in threads, which cannot be stopped: their claim is kept until they end. Tasks
with ``process=True`` run in child processes (``process_pool``), which can.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import types
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from uuid import UUID

from taskq import errors
from taskq.context import BodyServices
from taskq.policy import ExecutionPolicy
from taskq.prepare import Preparation
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.worker.bodies import Threads, drive, returned, self_cancelled
from taskq.worker.claims import Claim, Interrupt
from taskq.worker.disposition import BodyEnd, FencedOut, Interrupted, Raised, Returned, Unproven, of_suspended
from taskq.worker.effect_start import EffectStart
from taskq.worker.forked import Home
from taskq.worker.leftovers import holders
from taskq.worker.preparing import Preparer
from taskq.worker.process_body import ProcessBody
from taskq.worker.process_pool import Launch, ProcessPool
from taskq.worker.report import steps_left
from taskq.worker.running import RANK, Running
from taskq.worker.timeouts import Sweeper

log = get_logger("worker")

SLICE = 0.005
"""Seconds that consumers run bodies inline before the loop gets a turn."""
LOOK_EVERY = 0.05
"""Seconds between looks for the last body that can be stopped."""
CLOSE_WITHIN = 1.0
"""Seconds that bodies get to end when the consumers are ended under them."""

T = TypeVar("T")


class Executor:
    """Runs the bodies of claims and hands each end to ``on_end``.

    Args:
        tasks: The tasks that this worker knows, by name.
        concurrency: How many bodies run at once.
        on_end: Called in the loop with the claim, its policy and how the body ended.
        may_start: Asked before each body whether the lease still holds: after a suspended machine or a stopped process
            the loop goes on where it was, and claims may long be another worker's.
        launch: How child processes are started, for tasks with ``process=True``.
        ask: Asks for the effect start of a side-effecting claim.
        preparer: Prepares the attempts of tasks that have a preparation.
    """

    def __init__(
        self,
        tasks: dict[str, Task[..., Any]],
        concurrency: int,
        on_end: Callable[[Claim, ExecutionPolicy, BodyEnd], None],
        may_start: Callable[[], bool] = lambda: True,
        launch: Launch | None = None,
        ask: Callable[[Claim], EffectStart] | None = None,
        preparer: Preparer | None = None,
    ) -> None:
        self._tasks = tasks
        self._concurrency = concurrency
        self._on_end = on_end
        self._may_start = may_start
        self._ask = ask
        self._preparer = preparer
        self._ready: deque[tuple[Claim, ExecutionPolicy]] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._baton = False
        self._slice_ends = 0.0
        self._empty = asyncio.Event()
        self._empty.set()
        self._consumers: list[asyncio.Task[None]] = []
        self._closing = False
        self._launch = launch or Launch()
        self._threads_left = 0
        self.services: BodyServices | None = None
        """What contexts ask for ownership, checkpoints and transactions."""
        self.running: dict[UUID, Running] = {}
        self.mean_seconds = 1.0
        """A moving mean of how long bodies take."""

    def start(self) -> None:
        """Start the consumers in the running loop."""
        self._loop = asyncio.get_running_loop()
        self._sweeper = Sweeper(self._loop, self.running, self.interrupt)
        self._home = Home(self._loop)
        self._threads = Threads(self._concurrency, self._loop, self._home)
        self._processes = ProcessPool(self._launch, self._concurrency)
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
    def interruptible(self) -> int:
        """Bodies that run and can be stopped: those that may have begun a side effect are let finish."""
        return sum(run.phase != "effect" for run in list(self.running.values()))

    @property
    def oldest_waiting(self) -> float | None:
        """When the claim that waits longest was received, on the loop's clock."""
        if self.holds_slot:
            return min(claim.received for claim, _ in self._ready)
        return self._ready[0][0].received if self._ready else None

    @property
    def holds_slot(self) -> bool:
        """Whether a job of a cohort waits for a consumer; such are in front."""
        return bool(self._ready) and self._ready[0][0].cohort is not None

    def waiting_keys(self) -> set[tuple[UUID, int]]:
        """Job and epoch of every claim that no consumer has taken yet."""
        return {(claim.job_id, claim.claim_epoch) for claim, _ in self._ready}

    def put(self, claims: list[tuple[Claim, ExecutionPolicy]]) -> None:
        """Hand claims to the consumers, in order; those of cohorts come before all that wait, since they hold slots."""
        if any(claim.cohort is not None for claim, _ in claims):
            self._ready.extendleft(reversed([entry for entry in claims if entry[0].cohort is not None]))
            claims = [entry for entry in claims if entry[0].cohort is None]
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

    async def until_interrupted(self) -> None:
        """Return once no body runs but those that are let finish."""
        while self.interruptible:  # noqa: ASYNC110  # rare, and each end would have to tell of it
            await asyncio.sleep(LOOK_EVERY)

    def interrupt(self, job_id: UUID, by: Interrupt, epoch: int | None = None) -> bool:
        """Stop a body; answers whether the attempt is here.

        A coroutine is cancelled; a function in a thread is only told, through its context; a child process is killed
        if telling does not help. A claim that waits for a
        consumer ends as cancelled without a body. A body that is being stopped already is left to it, unless what
        comes is graver: the first reason says how the attempt ends, but it may have gone on in spite of it.

        A body that may have begun a side effect is told, and stopped by its timeout alone; before that, the answer to
        its effect start says whether a cancel request came first.
        """
        run = self.running.get(job_id)
        if run is None:
            return by == "cancel" and self._cancel_waiting(job_id, epoch)
        if epoch is not None and run.claim.claim_epoch != epoch:
            return False
        if by == "cancel":
            run.context.cancel_requested = True
            if run.phase == "starting":
                return True
        if run.phase == "effect" and by != "timeout":
            if run.claim.open_step is not None:
                run.tell_in_step(by)
            else:
                run.tell()
            return True
        if RANK[by] <= run.rank:
            if run.deaf and run.task is not None:
                run.task.cancel()
            return True
        run.rank = RANK[by]
        if run.interrupt is None or (run.interrupt == "timeout" and by == "lease"):
            run.interrupt = by
        run.stop()
        if run.phase == "effect" and run.thread and run.claim.open_step is None:
            # It cannot be stopped: unknown from now on, until it returns all the same.
            self._on_end(run.claim, run.policy, Interrupted("timeout"))
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
        if not self._consumers:
            return
        self._sweeper.close()
        for consumer in self._consumers:
            consumer.cancel()
        await asyncio.wait(self._consumers, timeout=within)
        self._threads.close()
        await self._processes.close(within)

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
        claim.started = now
        run = Running(claim, policy, self.services, now)
        run.task = me
        self.running[claim.job_id] = run
        self._empty.clear()
        end: BodyEnd | None
        try:
            if policy.timeout is not None:
                self._sweeper.watch()
            end = None if task.preparation is None else await self._prepare(run, task, task.preparation)
            if end is None:
                begins = self._run_effect if claim.effect_class == "side_effecting" else self._run_body
                end = await begins(run, task)
        except BaseException as exc:
            if run.interrupt is not None:
                # Whatever a body raises while it is being stopped, it was stopped.
                end = Interrupted(run.interrupt)
            elif not issubclass(type(exc), asyncio.CancelledError):  # isinstance asks the exception itself
                end = Raised(exc)
            elif self._closing:
                raise
            else:
                end = Raised(self_cancelled(exc))
        finally:
            del self.running[claim.job_id]
            if not self.running:
                self._empty.set()
        if run.suspended:
            end = of_suspended(end, run.suspended)
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
            with suppress(Exception):  # if not even that is kept, the claim is released; the consumer must go on
                failed = errors.TaskQError(f"its end could not be decided: {why['type']}")
                self._on_end(claim, policy, Raised(failed) if claim.effect_started_at is None else Unproven(failed))
        if me.cancelling():
            while me.cancelling():
                me.uncancel()
            # Before Python 3.13 uncancel leaves a cancellation pending that was asked for and not delivered yet; it
            # would hit the next body. Let it out here.
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)

    async def _prepare(self, run: Running, task: Task[..., Any], preparation: Preparation) -> BodyEnd | None:
        if self._preparer is None:
            return Interrupted("shutdown", started=False)
        return await self._preparer.prepare(run, task, preparation, self)

    @property
    def closing(self) -> bool:
        """Whether the consumers are being ended."""
        return self._closing

    async def call(self, run: Running, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of a task as its bodies are called: a coroutine here, a plain function in a thread."""
        if inspect.iscoroutinefunction(fn):
            return await drive(fn(*args, **kwargs), contextvars.copy_context(), self._home)
        run.thread = True
        return await self._in_thread(run, fn, args, kwargs)

    async def _run_body(self, run: Running, task: Task[..., Any]) -> BodyEnd:
        if task.process:
            return await self._in_process(run, task)
        kwargs = task.codec.decode(run.claim.payload)
        if task.is_async:
            coro = task.fn(run.context, **kwargs) if task.takes_context else task.fn(**kwargs)
            end = returned(task, await drive(coro, contextvars.copy_context(), self._home))
        else:
            run.thread = True
            args = (run.context,) if task.takes_context else ()
            end = returned(task, await self._in_thread(run, task.fn, args, kwargs))
        if run.steps_left:
            await self.until_done(self._loop.create_task(self._leave_steps(run)))
        return end

    async def _leave_steps(self, run: Running) -> None:
        """Tell of recorded steps that a body which has returned did not ask for; that must not change its end."""
        left = run.steps_left
        steps_left(run.claim, left)
        if self.services is not None:
            with suppress(Exception):  # a note for whoever looks, and the event above has said it
                await self.services.leave_steps(run.context, left)

    async def _run_effect(self, run: Running, task: Task[..., Any]) -> BodyEnd:
        """Run a side-effecting body once it is proven that it may start its effect, and not otherwise."""
        task.codec.decode(run.claim.payload)  # arguments that do not fit end it before there is an effect start
        refused = await self._start_effect(run)
        if refused is not None:
            return refused
        run.phase = "effect"
        run.started = self._loop.time()
        return await self._run_body(run, task)

    async def _start_effect(self, run: Running) -> BodyEnd | None:
        """Why its body must not be called; None if it may be."""
        run.phase = "starting"
        run.started = math.inf  # its timeout is for the body
        if self._ask is None:
            return Unproven(errors.EffectStartNotProven("nobody here can ask for an effect start", "no_answer"))
        start = self._ask(run.claim)
        try:
            while not start.answer.done() and run.interrupt is None:
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([start.answer])
                if self._closing:
                    raise asyncio.CancelledError
            if run.interrupt is not None or not self._may_start():
                by = run.interrupt or "lease"
                if not start.sent:
                    return Interrupted(by, started=False)
                why = f"it was interrupted ({by}) while its effect start was on its way; its body was not called"
                return Unproven(errors.EffectStartNotProven(why, by))
            verdict = start.answer.result()
        except errors.EffectStartNotProven as exc:
            return Unproven(exc)
        finally:
            if not start.answer.cancel():
                start.answer.exception()  # nobody else will look at it
        if verdict == "started":
            run.claim.effect_started_at = start.started_at
            return None
        if verdict == "fenced_out":
            return FencedOut()
        return Interrupted("cancel" if verdict == "cancelled" else "lease", started=False)

    async def _in_thread(
        self, run: Running, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        future = self._threads.run(run, fn, args, kwargs)
        try:
            value, error = await self.until_done(future)
        except asyncio.CancelledError:
            self._threads_left += 1
            raise
        if error is not None:
            raise error
        return value

    async def _in_process(self, run: Running, task: Task[..., Any]) -> BodyEnd:
        # The timeout is for the body: the start of a process has a bound of its own.
        run.started = math.inf

        def on_start() -> None:
            run.started = self._loop.time()

        run.process = ProcessBody(self._processes, task, run.claim, on_start, run.facts)
        end = await self.until_done(self._loop.create_task(run.process.run()))
        if run.interrupt is not None and not isinstance(end, Returned):
            return Interrupted(run.interrupt, started=run.started < math.inf)
        return end

    async def until_done(self, future: asyncio.Future[T]) -> T:
        """Wait for what ends by itself, or by other means than a cancellation; only closing ends the wait."""
        while not future.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([future])
            if self._closing and not future.done():
                raise asyncio.CancelledError
        return future.result()


def job_in(frame: types.FrameType | None) -> Claim | None:
    """The claim whose body is on a stack, innermost frame first; for telling who blocks the event loop."""
    while frame is not None:
        if frame.f_code is Executor._run.__code__:
            claim = frame.f_locals.get("claim")
            return claim if isinstance(claim, Claim) else None
        frame = frame.f_back
    return None

"""One body in a child process: handed over, waited for, and stopped for certain if need be."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from taskq import errors
from taskq.outcomes import RetryAfter, Snooze
from taskq.policy import kind_name
from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.worker.claims import Claim, Interrupt
from taskq.worker.disposition import BodyEnd, Interrupted, Raised, RaisedElsewhere, Returned
from taskq.worker.pipes import Message
from taskq.worker.process_context import told
from taskq.worker.process_pool import Child, ProcessPool
from taskq.worker.process_tasks import place_of

log = get_logger("worker")

GRACE: Final[dict[Interrupt, float]] = {"cancel": 2.0, "timeout": 2.0, "shutdown": 0.5, "lease": 0.1}
"""Seconds from the request to stop, which raises in the body, to the kill."""
TRIES: Final = 3
"""Children that may be found dead before the body has started in one."""


class ProcessBody:
    """Runs one attempt in a child.

    Args:
        pool: Where children come from.
        task: The task.
        claim: The attempt.
        on_start: Called once the child has begun with the body.
        facts: What its preparation has seen; None where it has none.
    """

    def __init__(
        self,
        pool: ProcessPool,
        task: Task[..., Any],
        claim: Claim,
        on_start: Callable[[], None],
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self._pool = pool
        self._task = task
        self._claim = claim
        self._on_start = on_start
        self._facts = facts
        self._loop = asyncio.get_running_loop()
        self._stopped: asyncio.Future[Interrupt] = self._loop.create_future()
        self._child: Child | None = None
        self._kill_at: asyncio.TimerHandle | None = None
        self._told = False

    def stop(self, by: Interrupt) -> None:
        """Stop the body; called again for a graver reason, sooner."""
        if not self._stopped.done():
            self._stopped.set_result(by)
            if self._child is not None:
                self._child.send({"do": "stop"})
        if self._child is not None:
            self._kill_after(GRACE[by])

    def tell(self) -> None:
        """Tell the body, through its context, that it should come to an end."""
        self._told = True
        if self._child is not None:
            self._child.send({"do": "tell"})

    def _kill_after(self, seconds: float) -> None:
        assert self._child is not None
        due = self._loop.time() + seconds
        if self._kill_at is None or due < self._kill_at.when():
            if self._kill_at is not None:
                self._kill_at.cancel()
            self._kill_at = self._loop.call_at(due, self._kill)

    def _kill(self) -> None:
        assert self._child is not None, "the timer is cancelled once the child is given back"
        log.warning("job.process_killed", job_id=self._claim.job_id, task=self._claim.task, pid=self._child.pid)
        self._child.kill()

    async def run(self) -> BodyEnd:
        """Run it; how it ended. Where it was stopped, its process is gone by then."""
        for _ in range(TRIES):
            try:
                child = await self._take()
            except errors.ProcessNotStarted as exc:
                return Raised(exc)
            if child is None:
                return Interrupted(self._stopped.result(), started=False)
            self._child = child
            try:
                end = await self._run_in(child)
            finally:
                self._child = None
                if self._kill_at is not None:
                    self._kill_at.cancel()
                if self._stopped.done() or child.gone.done():
                    child.kill()
                self._pool.give_back(child)
            if end is not None:
                return end
        return Raised(errors.ProcessNotStarted(f"{TRIES} child processes, one after the other, died before the body"))

    async def _take(self) -> Child | None:
        """A child; None if the body was stopped before there was one."""
        take = self._loop.create_task(self._pool.take())
        try:
            waits: list[asyncio.Future[Any]] = [take, self._stopped]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not take.done():
                take.cancel()
        if not take.done():
            return None
        if self._stopped.done():
            if take.exception() is None:
                self._pool.give_back(take.result())
            return None
        return take.result()

    async def _run_in(self, child: Child) -> BodyEnd | None:
        """Run it in this child; None if the child was dead before it began."""
        child.send(
            {
                "do": "run",
                "task": asdict(place_of(self._task)),
                "payload": self._claim.payload,
                "context": told(self._claim, self._facts),
            }
        )
        if self._told:
            child.send({"do": "tell"})
        answer = await child.reply()
        if answer is not None and answer["is"] == "started":
            child.bodies += 1
            self._on_start()
            answer = await child.reply()
            if answer is None:
                await child.gone
                return Raised(_died(child.gone.result()))
        end = None if answer is None else self._end(answer)
        if self._stopped.done():
            # What was interrupted half-way is not used again, and the attempt lasts until it is gone.
            child.kill()
            await child.gone
        return end

    def _end(self, answer: Message) -> BodyEnd:
        if answer["is"] == "returned":
            return Returned(answer["result"])
        if answer["is"] == "stopped":
            return Interrupted(self._stopped.result() if self._stopped.done() else "shutdown")
        kinds = tuple(answer["kinds"])
        if kind_name(errors.JobCancelled) in kinds:
            return Raised(errors.JobCancelled(self._claim.job_id, answer["error"]))
        if kind_name(RetryAfter) in kinds and "delay" in answer:
            return Raised(RetryAfter(answer["delay"], answer["reason"]))
        if kind_name(Snooze) in kinds and "delay" in answer:
            return Raised(Snooze(answer["delay"]))
        return RaisedElsewhere(answer["error"], kinds)


def _died(code: int) -> errors.ProcessDied:
    if code >= 0:
        return errors.ProcessDied(
            f"the child process of the body ended by itself with exit code {code} before the body had ended, as "
            "os._exit does; other bodies were not touched",
            exit_code=code,
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    why = {
        int(signal.SIGKILL): "most often the kernel does that when memory runs out, else an operator",
        int(signal.SIGSEGV): "a crash in C code; the worker's standard error has the stack",
        int(signal.SIGABRT): "C code gave up; the worker's standard error may say why",
    }.get(-code, "a crash in C code, or a kill from outside")
    return errors.ProcessDied(
        f"the child process of the body was ended by {name} ({-code}): {why}; other bodies were not touched",
        signal=-code,
    )

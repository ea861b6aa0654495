"""One body in a child process, with the child's side played by the test: what it says, and how it dies."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any, cast

import pytest
from worker_kit import BOUND, Events, claim_of

from taskq import TaskQ, errors
from taskq.outcomes import RetryAfter, Snooze
from taskq.policy import kinds_of
from taskq.worker.disposition import Interrupted, Raised, RaisedElsewhere, Returned
from taskq.worker.pipes import Message
from taskq.worker.process_body import GRACE, ProcessBody, _died
from taskq.worker.process_pool import ProcessPool

pytestmark = pytest.mark.anyio


class Scripted:
    """A child that says what the test has it say, and keeps what it is told."""

    def __init__(self, *says: Message | Callable[[], None], dead: int | None = None) -> None:
        self.pid = 4711
        self.bodies = 0
        self.gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.told: list[str] = []
        self.killed = asyncio.Event()
        self._says = list(says)
        self._dead = dead
        if dead is not None and not says:
            self.gone.set_result(dead)

    def send(self, message: Message) -> None:
        self.told.append(message["do"])

    async def reply(self) -> Message | None:
        while self._says:
            said = self._says.pop(0)
            if isinstance(said, dict):
                return said
            said()
        if self._dead is None:
            await self.gone
        elif not self.gone.done():
            self.gone.set_result(self._dead)
        return None

    def kill(self) -> None:
        self.killed.set()
        if not self.gone.done():
            self.gone.set_result(-int(signal.SIGKILL))


class Pool:
    """Gives these children out, one after the other; then it waits, or refuses."""

    def __init__(self, *children: Scripted, refusal: errors.ProcessNotStarted | None = None) -> None:
        self._children = list(children)
        self._refusal = refusal
        self.asked = asyncio.Event()
        self.back: list[Scripted] = []

    async def take(self) -> Scripted:
        self.asked.set()
        if self._children:
            return self._children.pop(0)
        if self._refusal is not None:
            raise self._refusal
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    def give_back(self, child: Scripted) -> None:
        self.back.append(child)


STARTED: Message = {"is": "started"}


def body_of(pool: Pool, starts: list[int] | None = None) -> ProcessBody:
    app = TaskQ("postgresql://nowhere/")

    @app.task
    def nothing() -> None: ...

    begun = [] if starts is None else starts
    return ProcessBody(cast(ProcessPool, pool), nothing, claim_of(nothing.name), lambda: begun.append(1))


def raised(error: BaseException, **more: Any) -> Message:
    said = {"type": type(error).__name__, "message": str(error)}
    return {"is": "raised", "kinds": kinds_of(error), "error": said} | more


async def test_what_a_body_returns_comes_back_and_its_child_is_kept() -> None:
    child = Scripted(STARTED, {"is": "returned", "result": "[1]"})
    pool, starts = Pool(child), list[int]()
    assert await body_of(pool, starts).run() == Returned("[1]")
    assert (child.told, child.bodies, starts, pool.back) == (["run"], 1, [1], [child])
    assert not child.killed.is_set()


async def test_what_a_body_raises_is_what_its_worker_acts_on() -> None:
    async def end_of(said: Message) -> Any:
        return await body_of(Pool(Scripted(STARTED, said))).run()

    end = await end_of(raised(RetryAfter(3, "busy"), delay=3.0, reason="busy"))
    assert (type(end.error), end.error.delay, end.error.reason) == (RetryAfter, 3.0, "busy")
    end = await end_of(raised(Snooze(4), delay=4.0))
    assert (type(end.error), end.error.delay) == (Snooze, 4.0)
    end = await end_of(raised(errors.JobCancelled(claim_of("x").job_id, {"type": "by hand"})))
    assert isinstance(end, Raised)
    assert isinstance(end.error, errors.JobCancelled)
    # Without a delay it is an error like any other.
    for error in (RetryAfter(3), Snooze(4), ValueError("no")):
        end = await end_of(raised(error))
        assert isinstance(end, RaisedElsewhere)
        assert end.kinds == tuple(kinds_of(error))
    assert await end_of({"is": "stopped"}) == Interrupted("shutdown")


async def test_a_child_that_dies_with_its_body_fails_it_and_says_how() -> None:
    pool = Pool(Scripted(STARTED, dead=-int(signal.SIGSEGV)))
    end = await body_of(pool).run()
    assert isinstance(end, Raised)
    assert "SIGSEGV" in str(end.error)
    assert pool.back[0].killed.is_set()


async def test_children_that_are_dead_before_the_body_cost_it_nothing_but_there_is_an_end() -> None:
    dead = [Scripted(dead=1) for _ in range(3)]
    good = Scripted(STARTED, {"is": "returned", "result": "1"})
    assert await body_of(Pool(*dead[:2], good)).run() == Returned("1")
    starts: list[int] = []
    end = await body_of(Pool(*(Scripted(dead=1) for _ in range(3)), good), starts).run()
    assert isinstance(end, Raised)
    assert isinstance(end.error, errors.ProcessNotStarted)
    assert "3 child processes" in str(end.error)
    assert starts == []


async def test_a_pool_that_has_no_child_fails_the_body() -> None:
    refusal = errors.ProcessNotStarted("no app")
    end = await body_of(Pool(refusal=refusal)).run()
    assert isinstance(end, Raised)
    assert end.error is refusal


async def test_a_body_that_is_stopped_while_it_waits_for_a_child_never_starts() -> None:
    pool = Pool()
    body = body_of(pool)
    run = asyncio.create_task(body.run())
    await pool.asked.wait()
    body.stop("shutdown")
    body.stop("lease")
    assert await asyncio.wait_for(run, 5) == Interrupted("shutdown", started=False)


async def test_a_child_that_comes_too_late_is_given_back() -> None:
    child = Scripted()
    pool = Pool(child)
    body = body_of(pool)
    body.stop("cancel")
    assert await body.run() == Interrupted("cancel", started=False)
    refused = body_of(Pool(refusal=errors.ProcessNotStarted("no app")))
    refused.stop("cancel")
    assert await refused.run() == Interrupted("cancel", started=False)
    assert child.told == []


async def test_a_stopped_body_has_its_child_killed_even_if_it_gives_way() -> None:
    bodies: list[ProcessBody] = []
    child = Scripted(STARTED, lambda: bodies[0].stop("cancel"), {"is": "stopped"})
    pool = Pool(child)
    bodies.append(body_of(pool))
    assert await bodies[0].run() == Interrupted("cancel")
    assert child.told == ["run", "stop"]
    assert child.killed.is_set()


async def test_a_body_that_does_not_give_way_is_killed_and_sooner_for_a_graver_reason(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GRACE, "timeout", 600.0)
    monkeypatch.setitem(GRACE, "cancel", 600.0)
    bodies: list[ProcessBody] = []

    def stop() -> None:
        bodies[0].stop("timeout")
        bodies[0].stop("lease")
        bodies[0].stop("cancel")

    child = Scripted(STARTED, stop)
    bodies.append(body_of(Pool(child)))
    end = await asyncio.wait_for(bodies[0].run(), BOUND)
    assert isinstance(end, Raised)
    assert child.told == ["run", "stop"]
    assert [told["pid"] for told in events.of("job.process_killed")] == [child.pid]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "exit code 3"),
        (-int(signal.SIGKILL), "SIGKILL (9): most often the kernel"),
        (-int(signal.SIGSEGV), "SIGSEGV (11): a crash in C code; the worker's standard error"),
        (-int(signal.SIGABRT), "SIGABRT (6): C code gave up"),
        (-int(signal.SIGTERM), "SIGTERM (15): a crash in C code, or a kill from outside"),
        (-200, "ended by signal 200 (200)"),
    ],
)
def test_how_a_child_died_is_told_in_words(code: int, said: str) -> None:
    error = _died(code)
    assert said in str(error)
    assert (error.exit_code, error.signal) == ((code, None) if code >= 0 else (None, -code))

"""What one attempt knows of its steps, sleeps and waits: which it has asked for, and which are recorded.

A step is named by its name and by which call of that name it is within the attempt. The number is taken when the call
begins, so that steps that run beside each other replay in the order in which they were begun. A call that raised gives
its number back if no later call of that name has begun: a loop that tries again is one step, whichever try succeeds.
A child that has failed keeps its number, since its failure is on record: asked for again, it is another child.

Sleeps, waits and children are named likewise. One that is not over suspends the body: steps that run beside it, and
starts of children, are let finish, then ``Suspended`` goes through the body, and nothing that the attempt asks for
after that is done.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from uuid import UUID

from taskq.children import Start, given
from taskq.durations import Duration, parse_duration
from taskq.effect_steps import EffectSteps, failed
from taskq.errors import StepRefused
from taskq.outcomes import Suspended, TimedOut
from taskq.steps import (
    Key,
    Offer,
    Record,
    awaited_type,
    check_effect_class,
    check_name,
    decode,
    encode,
    misfit,
    returned_type,
)

if TYPE_CHECKING:
    from taskq.context import JobContext

__all__ = ["Steps"]


IN_PLACE: Final = 1.0
"""Seconds up to which a sleep or a wait is waited out in its slot: a suspension costs an attempt and two commits."""


class _Current(NamedTuple):
    job: UUID
    key: Key


_CURRENT: Final[ContextVar[_Current | None]] = ContextVar("taskq_step", default=None)


class Steps:
    """The steps of one attempt.

    Args:
        ctx: The attempt.
    """

    def __init__(self, ctx: JobContext) -> None:
        self._ctx = ctx
        self._begun: dict[tuple[str, str], int] = {}
        self._asked: set[Key] = set()
        self._recorded: dict[Key, Record] | None = None
        self._given: dict[Key, str] = {}
        self._loading = asyncio.Lock()
        self._running = 0
        self._quiet = asyncio.Event()
        self._effects = EffectSteps(ctx)
        self.suspended: list[Key] = []
        """What the body is suspended for; empty while it is not."""

    async def step(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``JobContext.step``."""
        declared, effect, kwargs = _declared(name, fn, kwargs)
        with self._call("step", name) as key, self._beside():
            record = await self._find(key)
            if record is not None and record.done:
                return self._replayed(key, declared, record, effect)
            if effect or record is not None:
                return await self._effect(key, declared, fn, args, kwargs)
            if (given := self._given.get(key)) is not None:
                text, value = given, decode(self._ctx.job_id, key, declared, Record(given))
            else:
                with self._inside(key):
                    value = fn(*args, **kwargs)
                    if inspect.isawaitable(value):
                        value = await value
                text, value = self._encoded(key, declared, value)
            await self._ctx._bodies.record_step(self._ctx, key, text)
            self._given.pop(key, None)
            return value

    def step_sync(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``JobContext.step_sync``."""
        declared, effect, kwargs = _declared(name, fn, kwargs)
        bodies = self._ctx._bodies
        with self._call("step", name) as key:
            record = bodies.wait("step_sync", self._find(key))
            if record is not None and record.done:
                return self._replayed(key, declared, record, effect)
            if effect or record is not None:
                return self._effect_sync(key, declared, fn, args, kwargs)
            if (given := self._given.get(key)) is not None:
                text, value = given, decode(self._ctx.job_id, key, declared, Record(given))
            else:
                with self._inside(key):
                    value = _plain(name, fn(*args, **kwargs))
                text, value = self._encoded(key, declared, value)
            bodies.wait("step_sync", bodies.record_step(self._ctx, key, text))
            self._given.pop(key, None)
            return value

    async def sleep(self, name: str, duration: Duration) -> None:
        """See ``JobContext.sleep``."""
        seconds = parse_duration(duration)
        with self._waits("sleep", name) as key:
            remaining = await self._left_of(key, seconds)
            if remaining > IN_PLACE:
                await self._suspend(key)
            await asyncio.sleep(max(0.0, remaining))

    def sleep_sync(self, name: str, duration: Duration) -> None:
        """See ``JobContext.sleep_sync``."""
        seconds = parse_duration(duration)
        with self._waits("sleep", name) as key:
            remaining = self._ctx._bodies.wait("sleep_sync", self._left_of(key, seconds))
            if remaining > IN_PLACE:
                self._suspend_now(key)
            time.sleep(max(0.0, remaining))

    async def wait_for(self, name: str, kind: Any, timeout: Duration | None) -> Any:
        """See ``JobContext.wait_for``."""
        declared, seconds = _awaited(name, kind, timeout)
        with self._waits("wait", name) as key:
            while isinstance(offer := await self._offered(key, declared, seconds), Offer):
                if offer.remaining is None or offer.remaining > IN_PLACE:
                    await self._suspend(key)
                else:
                    await asyncio.sleep(offer.remaining)
            return _given(self._ctx, key, declared, offer)

    def wait_for_sync(self, name: str, kind: Any, timeout: Duration | None) -> Any:
        """See ``JobContext.wait_for_sync``."""
        declared, seconds = _awaited(name, kind, timeout)
        bodies = self._ctx._bodies
        with self._waits("wait", name) as key:
            while isinstance(offer := bodies.wait("wait_for_sync", self._offered(key, declared, seconds)), Offer):
                if offer.remaining is None or offer.remaining > IN_PLACE:
                    self._suspend_now(key)
                time.sleep(offer.remaining)
            return _given(self._ctx, key, declared, offer)

    async def child(self, start: Start) -> Any:
        """See ``JobContext.child``."""
        with self._waits("child", start.name) as key:
            with self._beside():
                record = await self._child(key, start)
            if record is None:
                await self._suspend(key)
        return given(self._ctx.job_id, key, start, record)

    def child_sync(self, start: Start) -> Any:
        """See ``JobContext.child_sync``."""
        with self._waits("child", start.name) as key:
            record = self._ctx._bodies.wait("child_sync", self._child(key, start))
            if record is None:
                self._suspend_now(key)
        return given(self._ctx.job_id, key, start, record)

    async def _effect(
        self, key: Key, declared: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Start it, call the function, and tell what came of it."""
        effects = self._effects
        effects.check(key)
        record = await effects.begin(key)
        if record is not None:
            return self._replayed(key, declared, record)
        try:
            with self._inside(key):
                value = fn(*args, **kwargs)
                if inspect.isawaitable(value):
                    value = await value
            text, value = encode(key.name, declared, value)
        except BaseException as exc:
            said = await effects.raised(key, exc)
            if said is not exc:
                raise said from exc
            raise
        await effects.returned(key, text)
        return value

    def _effect_sync(
        self, key: Key, declared: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Likewise, in a thread."""
        effects, wait = self._effects, self._ctx._bodies.wait
        effects.check(key)
        record = wait("step_sync", effects.begin(key))
        if record is not None:
            return self._replayed(key, declared, record)
        try:
            with self._inside(key):
                value = _plain(key.name, fn(*args, **kwargs))
            text, value = encode(key.name, declared, value)
        except BaseException as exc:
            said = wait("step_sync", effects.raised(key, exc))
            if said is not exc:
                raise said from exc
            raise
        wait("step_sync", effects.returned(key, text))
        return value

    def _replayed(self, key: Key, declared: Any, record: Record, effect: bool = False) -> Any:
        """What a recorded step gives to the body."""
        if record.error is not None:
            raise failed(self._ctx.job_id, key, record.error)
        return decode(self._ctx.job_id, key, declared, record, effect=effect)

    @property
    def current(self) -> Key | None:
        """The step whose function runs here; None outside of any."""
        current = _CURRENT.get()
        return None if current is None or current.job != self._ctx.job_id else current.key

    @property
    def left(self) -> list[Key]:
        """What earlier attempts have recorded and this one has not asked for, in order."""
        return sorted((self._recorded or {}).keys() - self._asked)

    def _encoded(self, key: Key, declared: Any, value: Any) -> tuple[str, Any]:
        """As ``encode``; kept until its record is confirmed, so that a body that tries again does not do it again."""
        text, value = encode(key.name, declared, value)
        self._given[key] = text
        return text, value

    async def _left_of(self, key: Key, seconds: float) -> float:
        record = await self._find(key)
        if record is None:
            return await self._ctx._bodies.begin_sleep(self._ctx, key, seconds)
        assert record.ends is not None
        return record.ends - time.monotonic()

    async def _offered(self, key: Key, declared: Any, seconds: float | None) -> Record | Offer:
        """What a wait has come to; an offer where it goes on."""
        record = await self._find(key)
        if record is not None and record.done:
            return record
        bodies = self._ctx._bodies
        while (offer := await bodies.begin_wait(self._ctx, key, seconds)).answer == "signal":
            assert offer.signal is not None
            assert offer.text is not None
            if await bodies.take_signal(self._ctx, key, offer.signal, misfit(declared, offer.text)):
                break
        return offer if offer.answer == "waits" else Record(offer.text)

    async def _child(self, key: Key, start: Start) -> Record | None:
        """How a child has ended; None while it has not. Started if it is not there."""
        record = await self._find(key)
        if record is not None and record.done:
            return record
        found = await self._ctx._bodies.begin_child(self._ctx, key, start, record is None)
        return None if found.answer == "waits" else Record(found.text, error=found.error, child=found.id)

    async def _suspend(self, key: Key) -> NoReturn:
        self.suspended.append(key)
        while self._running:
            self._quiet.clear()
            await self._quiet.wait()
        raise Suspended(f"the body waits for {key.kind} {key}")

    def _suspend_now(self, key: Key) -> NoReturn:
        self.suspended.append(key)
        raise Suspended(f"the body waits for {key.kind} {key}")

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """A suspension beside it waits until it is done."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._quiet.set()

    @contextmanager
    def _waits(self, kind: str, name: str) -> Iterator[Key]:
        check_name(f"the name of a {kind}", name)
        if not self._ctx._suspends:
            raise StepRefused(
                f"{kind} {name}: a side_effecting task cannot sleep or wait, for its body would begin anew and repeat "
                "its effect; do it before, in a task that enqueues this one when it is over"
            )
        if self.current is not None:
            raise StepRefused(
                f"{kind} {name}: it is inside of the function of step {self.current}, which would be called again; "
                "sleep and wait between steps"
            )
        with self._call(kind, name) as key:
            yield key

    async def _find(self, key: Key) -> Record | None:
        async with self._loading:
            if self._recorded is None:
                self._recorded = await self._ctx._bodies.load_steps(self._ctx)
            return self._recorded.get(key)

    @contextmanager
    def _call(self, kind: str, name: str) -> Iterator[Key]:
        if self.suspended and self.current is None:
            raise Suspended("the body is suspended, and must end")
        number = self._begun[kind, name] = self._begun.get((kind, name), 0) + 1
        key = Key(kind, name, number)
        self._asked.add(key)
        try:
            yield key
        except BaseException:
            if self._begun[kind, name] == number:
                self._begun[kind, name] = number - 1
            raise

    @contextmanager
    def _inside(self, key: Key) -> Iterator[None]:
        token = _CURRENT.set(_Current(self._ctx.job_id, key))
        try:
            yield
        finally:
            _CURRENT.reset(token)


def _declared(name: str, fn: Callable[..., Any], kwargs: dict[str, Any]) -> tuple[Any, bool, dict[str, Any]]:
    """The type that a step gives, whether it is side-effecting, and the arguments of its function.

    Raises before anything is counted or called.
    """
    check_name("the name of a step", name)
    effect = False
    if "effect_class" in kwargs:
        kwargs = dict(kwargs)
        effect = check_effect_class(name, kwargs.pop("effect_class"))
    return returned_type(name, fn), effect, kwargs


def _plain(name: str, value: Any) -> Any:
    """What a function gave that has nobody to await it."""
    if inspect.isawaitable(value):
        if inspect.iscoroutine(value):
            value.close()
        raise StepRefused(
            f"step {name}: its function is async, and step_sync runs in a thread, which has nothing to "
            "await it; give it a plain function, or make the body async and use 'await ctx.step(...)'"
        )
    return value


def _awaited(name: str, kind: Any, timeout: Duration | None) -> tuple[Any, float | None]:
    return awaited_type(name, kind), None if timeout is None else parse_duration(timeout)


def _given(ctx: JobContext, key: Key, declared: Any, record: Record) -> Any:
    """What a wait gives to the body."""
    return TimedOut() if record.text is None else decode(ctx.job_id, key, declared, record)

"""Preparations: what a task has called before each attempt, under its claim, and what becomes of the claim by that.

Two statements: one that a preparation begins, which uses up what was granted, and one with its answer, which gives the
claim back unless the attempt may begin. Both are sent again until they are answered or the lease has ended; told twice,
the database answers the same. They go over a connection of their own, so that effect starts do not wait behind an
answer that pauses a large run. Where somebody is at the run nothing was done, and the answer is told again.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol, TypeVar
from uuid import UUID

from taskq import errors
from taskq.codec import encode_any
from taskq.durations import parse_duration
from taskq.policy import check_name
from taskq.prepare import Cancelled, NeedsApproval, Pause, Preparation, PrepareContext, Ready, Unmet
from taskq.reconcile_hooks import with_defaults
from taskq.tasks import Task
from taskq.worker.connection import DATABASE_ERRORS, Connection
from taskq.worker.disposition import BodyEnd, FencedOut, Interrupted, NotPrepared
from taskq.worker.running import Running

MOST_FACTS: Final = 100
BUSY_PAUSE: Final = 0.1
"""Seconds, at random up to twice as many, until an answer is told again that found somebody at its run."""
MOST_BYTES: Final = 64 * 1024
"""Bytes of JSON that the facts of one answer may have."""

REFUSED: Final = ("22", "23")
"""Classes of SQLSTATE that say that what was told cannot be stored, now or later."""

T = TypeVar("T")


class Answered(NamedTuple):
    """An answer, as it is sent."""

    answer: str
    details: str


class Host(Protocol):
    """How a preparation is called."""

    async def call(self, run: Running, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function as bodies are called: a coroutine in this task, a plain function in a thread."""

    async def until_done(self, future: asyncio.Future[T]) -> T:
        """Wait, whatever is cancelled meanwhile; only the worker's closing ends it."""

    @property
    def closing(self) -> bool:
        """Whether the worker is closing."""


class Preparer:
    """Prepares attempts.

    Args:
        queries: The named statements of ``db/sql/worker.sql``.
        conn: The connection that they go over.
        may_go_on: Whether the lease still holds, by this worker's clock.
    """

    def __init__(self, queries: Mapping[str, str], conn: Connection, may_go_on: Callable[[], bool]) -> None:
        self._sql = queries
        self._conn = conn
        self._may_go_on = may_go_on

    async def prepare(self, run: Running, task: Task[..., Any], preparation: Preparation, host: Host) -> BodyEnd | None:
        """Prepare an attempt; None if it may begin.

        Raises:
            PayloadMisfit, PayloadError: The arguments of the job do not fit the task: no body, and no preparation.
        """
        kwargs = with_defaults(preparation.signature, task.codec.decode(run.claim.payload))
        run.phase = "preparing"
        begun = await self._told(run, host, self._begin(run))
        if isinstance(begun, BodyEnd):
            return begun
        said = Answered("exhausted", "{}")
        if begun["answer"] == "go":
            found = await self._answer(
                run, preparation, json.loads(begun["facts"]), json.loads(begun["approved"]), kwargs, host
            )
            if not isinstance(found, Answered):
                return found
            said = found
        ended = await self._told(run, host, self._end(run, said), answered=True)
        if isinstance(ended, BodyEnd):
            return ended
        if ended["became"] != "ready":
            run.interrupt = None
            details = json.loads(said.details)
            why = details.get("message") or details.get("reason") or details.get("what") or details.get("prerequisite")
            why = f"{details['type']}: {why}" if "type" in details else why
            incident = ended["incident"]
            return NotPrepared(said.answer, ended["became"], None if incident is None else UUID(incident), why)
        run.facts = {name: f["value"] for name, f in json.loads(ended["facts"]).items() if "cleared" not in f}
        run.phase = "body"
        run.started = asyncio.get_running_loop().time()
        return None

    async def _told(
        self, run: Running, host: Host, asking: Awaitable[Any], *, answered: bool = False
    ) -> Mapping[str, Any] | BodyEnd:
        """Ask the database; what it says, or how the claim ends where nothing is to be called any more.

        What interrupts meanwhile ends it, unless the answer has given the claim back.
        """
        run.started = math.inf  # its timeout is for the function
        row = await host.until_done(asyncio.ensure_future(asking))
        if row is None:
            return Interrupted(run.interrupt or "lease", started=False)
        verdict = row["became" if answered else "answer"]
        match verdict:
            case "fenced":
                return FencedOut()
            case "lease":
                return Interrupted("lease", started=False)
            case "cancelled":
                return Interrupted("cancel", started=False)
            case "go" | "exhausted" | "ready" if run.interrupt is not None:
                return Interrupted(run.interrupt, started=False)
        return row  # type: ignore[no-any-return]

    async def _answer(
        self,
        run: Running,
        preparation: Preparation,
        facts: dict[str, dict[str, Any]],
        approved: list[str],
        kwargs: dict[str, Any],
        host: Host,
    ) -> Answered | BodyEnd:
        claim = run.claim
        context = PrepareContext(
            job_id=claim.job_id,
            task=claim.task,
            queue=claim.queue,
            attempt=claim.attempt + 1,
            claim_epoch=claim.claim_epoch,
            generation=claim.generation,
            worker_id=claim.worker_id,
            deadline=claim.deadline,
            key_generation=claim.key_generation,
            facts={name: fact["value"] for name, fact in facts.items() if "cleared" not in fact},
            approved=frozenset(approved),
            _told=lambda: run.context.cancel_requested,
        )
        args = (context,) if preparation.takes_context else ()
        run.started = asyncio.get_running_loop().time()
        try:
            given = await host.call(run, preparation.fn, args, kwargs)
            if run.interrupt is None:
                return _read(given, {name: fact["version"] for name, fact in facts.items()}, preparation)
        except asyncio.CancelledError as exc:
            if run.interrupt is None:
                if host.closing:
                    raise
                return _failed(
                    errors.TaskQError(
                        f"it was cancelled by itself or by something that it awaited, not by taskq: {exc!r}"
                    )
                )
        except BaseException as exc:
            if run.interrupt is None:
                return _failed(exc)
        finally:
            run.thread = False
        by, run.interrupt, run.rank, run.timed_out_at = run.interrupt, None, 0, None
        if by == "timeout":
            return _failed(
                errors.AttemptTimeout(f"the preparation still ran at the timeout of {run.policy.timeout or 0.0:g} s")
            )
        assert by is not None
        return Interrupted(by, started=False)

    def _begin(self, run: Running) -> Awaitable[Any]:
        return self._ask("begin_preparation", run)

    async def _end(self, run: Running, said: Answered) -> Any:
        try:
            return await self._ask("end_preparation", run, *said)
        except errors.PreparationInvalid as exc:
            # Told as that, once: what is refused again is given back.
            with suppress(errors.PreparationInvalid):
                return await self._ask("end_preparation", run, *_failed(exc))
        return None

    async def _ask(self, query: str, run: Running, *args: str) -> Any:
        """Ask until there is an answer; None once the lease has ended, or the claim is to be given back.

        Raises:
            PreparationInvalid: The database refuses what is told, however often.
        """
        claim = run.claim
        while self._may_go_on() and run.interrupt is None:
            try:
                rows = await self._conn.fetch(
                    self._sql[query], str(claim.worker_id), str(claim.job_id), claim.claim_epoch, *args
                )
            except DATABASE_ERRORS as exc:
                state = getattr(exc, "sqlstate", None) or ""
                if args and state[:2] in REFUSED:
                    why = f"its answer cannot be stored: {exc}".splitlines()[0]
                    raise errors.PreparationInvalid(f"{why} (SQLSTATE {state})") from exc
                await self._conn.pause_after_failure(exc)
            else:
                if not args or rows[0]["became"] != "busy":
                    return rows[0]
                await asyncio.sleep(BUSY_PAUSE * (1 + random.random()))
        return None


def _failed(exc: BaseException) -> Answered:
    return Answered("failed", json.dumps(errors.describe(exc)))


def _read(given: object, versions: Mapping[str, int], preparation: Preparation) -> Answered:
    """What an answer says, ready to be sent; one that is none is a fault of the preparation."""
    try:
        match given:
            case Ready(facts, clear):
                return Answered("ready", _facts(facts, clear, versions))
            case Pause(code, reason):
                return Answered("pause", json.dumps({"code": code, "reason": reason or None}))
            case NeedsApproval(what):
                return Answered("needs_approval", json.dumps({"what": what}))
            case Unmet(prerequisite, retry_in):
                wait = None if retry_in is None else parse_duration(retry_in)
                told = {"prerequisite": prerequisite, "retry_in": wait, "checks": preparation.checks}
                return Answered("unmet", json.dumps(told))
            case Cancelled():
                raise errors.PreparationInvalid(
                    "the preparation answered Cancelled(), and nobody has asked for a cancel; answer Pause(code) to "
                    "stop here"
                )
        raise errors.PreparationInvalid(
            f"the preparation answered with a {type(given).__name__}, which says nothing; return Ready(facts), "
            "Pause(code), NeedsApproval(what), Unmet(prerequisite) or Cancelled()"
        )
    except (errors.PreparationInvalid, errors.PayloadError, errors.InvalidPolicy) as exc:
        return _failed(exc)


def _facts(facts: object, clear: object, versions: Mapping[str, int]) -> str:
    if not isinstance(facts, Mapping):
        raise errors.PreparationInvalid(
            f"the facts of Ready are a {type(facts).__name__}; give them by name, in a dict"
        )
    if isinstance(clear, str):
        raise errors.PreparationInvalid("what Ready is to clear is a text; give the names in a list")
    cleared = [*clear] if isinstance(clear, (list, tuple, set, frozenset)) else None
    if cleared is None:
        raise errors.PreparationInvalid(f"what Ready is to clear is a {type(clear).__name__}; give the names in a list")
    parts = []
    for name, value in facts.items():
        check_name("a fact", name)
        if name in cleared:
            raise errors.PreparationInvalid(f"Ready sets the fact {name} and clears it; do the one or the other")
        text = encode_any(value, f"fact {name}", MOST_BYTES)
        parts.append(f'{json.dumps(name)}: {{"seen": {versions.get(name, 0)}, "value": {text}}}')
    # What was never set is clear already.
    for name in cleared:
        check_name("a fact", name)
        if name in versions:
            parts.append(f'{json.dumps(name)}: {{"seen": {versions[name]}}}')
    told = f'{{"facts": {{{", ".join(parts)}}}}}'
    if len(parts) > MOST_FACTS or len(told.encode()) > MOST_BYTES:
        raise errors.PreparationInvalid(
            f"Ready gives {len(parts)} facts of {len(told.encode()):,} bytes; the limits are {MOST_FACTS} and "
            f"{MOST_BYTES:,}: keep the rest elsewhere, and give where"
        )
    return told

"""The worker's main loop: send what has ended, claim for what is free, in one round trip a batch.

Bodies run while a batch is on its way, and what ends meanwhile makes up the next batch: there is no waiting for a
batch to fill. With nothing to do the loop looks again after a millisecond, then less and less often; after a while of
silence it says that it is asleep, looks once more, and waits for a notification or the next poll.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any, Literal
from uuid import UUID

from taskq.tasks import Task
from taskq.telemetry import get_logger
from taskq.worker import points
from taskq.worker.claims import Claim, Counts, End
from taskq.worker.complete import BATCH, Outbox, arrays, next_outcome_id
from taskq.worker.connection import DATABASE_ERRORS, Connection
from taskq.worker.execute import Executor
from taskq.worker.fetch import LaneBook
from taskq.worker.policies import PolicyCache
from taskq.worker.report import claimed, handed_back
from taskq.worker.resend import Resender
from taskq.worker.unflushed import LONGEST, Unflushed
from taskq.worker.unproven import Unproven

log = get_logger("worker")

SILENCE = 0.02
"""Seconds without a find after which the worker says that it is asleep."""
SHORTEST = 0.001
"""Seconds between looks while jobs keep coming; four times as long after some that found nothing."""
RECHECKS = (0.05, 0.25)
"""Polls after falling asleep, before the long poll: an enqueue whose transaction spans that moment notified nobody."""
OFTEN = 10
OFTEN_WITHIN = 0.1
"""So many finds within so many seconds end the sleep: being notified of each then costs more than looking. With 3, jobs
that came every 30 ms found a worker that was half awake, and the slowest of them waited for its next look."""
QUICK = 0.02
"""Bodies quicker than this, on average, are claimed ahead."""
AHEAD = 0.1
"""Seconds of work, at the pace of the last exchanges, that are claimed ahead of the slots."""
STALE = 0.5
"""A claim that waits this long for a slot is handed back: another worker may have one."""
SUSPECT_PATIENCE = 5.0
"""Seconds that a suspect waits for a worker to be empty by itself, before workers stop claiming for it."""
SUSPECT_DRAIN = 30.0
SUSPECT_CYCLE = 120.0
"""Workers stop claiming for a suspect this long, once in so many seconds: long bodies must not hold up all others."""

_IN_LANE = attrgetter("run_at", "job_id")
_PRIORITY = attrgetter("priority")
_COHORT = attrgetter("cohort")

Block = Literal["registering", "lease", "stuck", "draining"]
"""Why nothing is claimed for the time being."""


class Exchanger:
    """Drives one worker's claims and ends.

    Args:
        queries: The named statements of ``db/sql/worker.sql``.
        conn: A connection for the exchange alone.
        executor: Where claims go.
        outbox: Where ends come from.
        tasks: The tasks that the worker knows, by name.
        queues: The queues that it serves.
        concurrency: How many bodies run at once.
        poll_interval: Seconds between looks while asleep.
        ping_every: Seconds without any statement after which the connection is asked whether it answers.
        policies: The cache of policies.
        counts: What is counted.
        ends_async: Whether ends may be committed asynchronously.
        on_lease_refused: Called when the database says that the lease does not hold.
    """

    def __init__(
        self,
        *,
        queries: Mapping[str, str],
        conn: Connection,
        executor: Executor,
        outbox: Outbox,
        tasks: Mapping[str, Task[..., Any]],
        queues: list[str],
        concurrency: int,
        poll_interval: float,
        ping_every: float,
        policies: PolicyCache,
        counts: Counts,
        ends_async: bool,
        on_lease_refused: Callable[[], None],
    ) -> None:
        self._sql = queries
        self._conn = conn
        self._executor = executor
        self._outbox = outbox
        self._tasks = sorted(tasks)
        self._queues = queues
        self._concurrency = concurrency
        self._poll = poll_interval
        self._ping_every = ping_every
        self._last_sent = 0.0
        self._paced_at = 0.0
        self._pace = 0.0
        self._policies = policies
        self._counts = counts
        self._on_lease_refused = on_lease_refused
        self._lanes = LaneBook(queues)
        self._unproven = Unproven(tasks, executor.running, counts, outbox.put)
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._unflushed = Unflushed(outbox, conn, allowed=ends_async)
        self._resender = Resender(queries, conn, outbox, counts, self._unflushed)
        self._asleep = False
        self._last_find = 0.0
        self._next_claim = 0.0
        self._notified = False
        self._naps = 0
        self._misses = 0
        self._finds: deque[float] = deque(maxlen=OFTEN)
        self._suspects_since: float | None = None
        self._alone: tuple[UUID, int] | None = None
        self._others_first = False
        self._cohorts_first = False
        self._closed = False
        self._watched: points.WatchedExchange | None = None
        self.worker_id: UUID | None = None
        """The registration under which to claim; None: do not claim."""
        self._blocks: set[Block] = {"registering"}
        self.started = 0
        """How many exchanges have been sent."""
        self.in_flight = 0
        """The number of the exchange that is on its way, or 0."""

    # What others say ----------------------------------------------------------------------------------------------

    def nudge(self) -> None:
        """Something has ended or changed: look at once."""
        self._event.set()

    def notified(self) -> None:
        """Jobs were enqueued, or a slot somewhere was freed: claim at once."""
        self._notified = True
        self._next_claim = 0.0
        self._event.set()

    def ended_elsewhere(self, claim: Claim) -> None:
        """An attempt has ended, and was told to the database by other means than the exchange."""
        if self._alone == (claim.job_id, claim.claim_epoch):
            self._alone = None
        self.nudge()

    @property
    def claiming(self) -> bool:
        """Whether anything may be claimed."""
        return not self._blocks and not self._closed

    def is_blocked(self, why: Block) -> bool:
        """Whether claiming stopped for this reason."""
        return why in self._blocks

    def block(self, why: Block) -> None:
        """Claim nothing until this reason is gone; hand back what has not started."""
        self._blocks.add(why)
        self.hand_back_waiting()
        self._event.set()

    def unblock(self, why: Block) -> None:
        """This reason is gone."""
        self._blocks.discard(why)
        self._event.set()

    def suspects_wait(self, waiting: bool) -> None:
        """Whether jobs wait that must run alone."""
        if not waiting:
            self._suspects_since = None
        elif self._suspects_since is None:
            self._suspects_since = self._loop.time()
        self._event.set()

    def close(self) -> None:
        """Return from ``run`` once everything has ended and is confirmed."""
        self._closed = True
        self._event.set()

    @property
    def is_empty(self) -> bool:
        """Whether no body runs or waits and every end is confirmed."""
        return not self._executor.busy and not self._executor.waiting and not self._outbox.pending

    # The loop -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Exchange until closed and empty."""
        while not (self._closed and self.is_empty):
            self._event.clear()
            now = self._loop.time()
            self._hand_back_stale(now)
            limit = self._capacity(now) if now >= self._next_claim else 0
            if self._suspects_since is not None and not self._others_first and self.claiming and self.is_empty:
                await self._claim_suspect()
            elif len(self._outbox) or limit:
                await self._exchange(limit)
            elif self._unflushed and (self._must_last or self._unflushed.is_due(now)):
                await self._exchange(0)
            elif self._asleep and not self._capacity(now):
                await self._set_asleep(False, pass_on=self._notified)
            elif now - self._last_sent > self._ping_every:
                await self._ping()
            else:
                await self._wait(now)

    def _capacity(self, now: float) -> int:
        if not self.claiming or self.worker_id is None or self._alone is not None or len(self._outbox) > 4 * BATCH:
            return 0
        if self._suspects_since is not None:
            waited = (now - self._suspects_since) % SUSPECT_CYCLE
            if SUSPECT_PATIENCE < waited < SUSPECT_PATIENCE + SUSPECT_DRAIN:
                return 0
        executor = self._executor
        slots = self._free
        if not self._cohorts_first and executor.mean_seconds < QUICK:
            slots += min(BATCH, int(self._pace * AHEAD))
        return max(0, min(slots, BATCH))

    @property
    def _free(self) -> int:
        """How many bodies could start at once; negative while more is claimed than runs."""
        return self._concurrency - self._executor.busy - self._executor.waiting

    def _for_cohorts(self, limit: int) -> int:
        """For how many jobs of cohorts to ask: each holds a slot from then on, so for those that can start at once.

        While quick jobs are claimed ahead nothing could, for as long as there are any. So one is asked for that takes
        the next body's place.
        """
        return min(limit, max(self._free, 0 if self._executor.holds_slot else 1))

    async def _wait(self, now: float) -> None:
        timeout = min(self._poll, self._ping_every, LONGEST) if self._unflushed else min(self._poll, self._ping_every)
        if self._capacity(now):
            timeout = min(timeout, max(0.0, self._next_claim - now))
        elif self._executor.waiting or self._outbox.pending or self._suspects_since is not None:
            timeout = min(timeout, STALE)
        # Not wait_for: before Python 3.12 it swallows a cancellation that comes together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._event.wait()

    @property
    def _must_last(self) -> bool:
        """Whether ends are to be committed for good at once: somebody waits until all of them are confirmed."""
        return self._closed or bool(self._blocks) or self._suspects_since is not None or self._alone is not None

    async def _ping(self) -> None:
        """Bodies may run for hours with every slot taken; the lease is renewed only while this connection answers."""
        self._last_sent = self._loop.time()
        try:
            await self._conn.fetch(self._sql["ping"])
        except DATABASE_ERRORS as exc:
            await self._conn.pause_after_failure(exc)

    async def _exchange(self, limit: int) -> None:
        batch = self._outbox.take()
        last = batch[0] if batch else None if limit else self._unflushed.oldest
        worker_id = last.worker_id if last else self.worker_id
        alone = self._resender.ends_only or self._outbox.bisecting
        if worker_id != self.worker_id or alone:
            limit = 0
        if worker_id is None or (not last and not limit):
            self._resender.ends_only = False
            return
        started = self._loop.time()
        lags = bool(batch) and not (alone or self._must_last) and self._unflushed.may_wait(started)
        self._pace += (len(batch) / max(started - self._paced_at, SHORTEST) - self._pace) * 0.2
        self._paced_at = self._last_sent = started
        rescan = limit > 0 and self._lanes.rescan_is_due(started)
        asked = self._for_cohorts(limit)
        ahead = self._free <= 0
        self.started += 1
        self.in_flight = self.started
        self._notified = False
        self._watch(batch, limit)
        try:
            rows = await self._conn.fetch(
                self._sql["exchange"],
                worker_id,
                *arrays(batch),
                limit,
                self._tasks,
                *self._lanes.lanes(rescan=rescan),
                self._resender.skip,
                asked,
                lags,
                through=self._watched,
            )
            kinds = {row["kind"] for row in rows}
            missed = [row for row in rows if row["kind"] == "missed"] if "missed" in kinds else []
            busy = {(r["job_id"], r["claim_epoch"]) for r in rows if r["kind"] == "busy"} if "busy" in kinds else None
            claims = [Claim.from_row(worker_id, row, started) for row in rows if row["kind"] == "job"] if limit else []
        except DATABASE_ERRORS as exc:
            self.in_flight = 0
            await self._resender.failed(batch, limit, exc)
            return
        except Exception as exc:
            self.in_flight = 0
            await self._resender.unreadable(batch, exc)
            return
        self._resender.ends_only = False
        if busy:
            batch = self._resender.later([e for e in batch if (e.job_id, e.claim_epoch) in busy], batch, self.nudge)
        # A claim has made it wait for the disk.
        flushed = not lags or bool(claims)
        if not batch:
            self._unflushed.answered([], started, flushed=flushed)
        else:
            await self._ended(batch, missed, started, flushed=flushed)
            if self._watched is not None:
                self._watched.acted("ends")
        if limit:
            if "lease" in kinds:
                self._next_claim = self._loop.time() + 0.2
                self._on_lease_refused()
            else:
                self._see_cohorts(claims, ahead)
                await self._claimed(claims, limit, rescan, started)
        if batch:
            self._expect_back(batch)
        self.in_flight = 0

    def _watch(self, batch: list[End], limit: int) -> None:
        watch = points.watch
        self._watched = None if watch is None else watch.exchange(self._conn, self._outbox, batch, limit)

    # Ends -----------------------------------------------------------------------------------------------------------

    def _expect_back(self, batch: list[End]) -> None:
        """What comes back after a moment is announced to nobody."""
        back = [end.delay for end in batch if end.outcome in ("retry", "retry_after", "snooze")]
        if back and min(back) < self._poll:
            self._next_claim = min(self._next_claim, self._loop.time() + max(0.0, min(back)))

    async def _ended(self, batch: list[End], missed: list[Any], now: float, *, flushed: bool) -> None:
        keys = {(row["job_id"], row["claim_epoch"]) for row in missed}
        applied = [e for e in batch if (e.job_id, e.claim_epoch) not in keys] if keys else batch
        effects = [e for e in applied if e.effect_started_at is not None]
        plain = [e for e in applied if e.effect_started_at is None] if effects else applied
        self._unflushed.answered(plain, now, flushed=flushed)
        if effects:
            await self._resender.prove(effects)
        if keys:
            for end in batch:
                if (end.job_id, end.claim_epoch) in keys:
                    await self._resender.settle_missed(end)
        if (
            self._alone is not None
            and not self._outbox.holds(*self._alone)
            and self._alone[0] not in self._executor.running
        ):
            self._alone = None

    # Claims ---------------------------------------------------------------------------------------------------------

    def _see_cohorts(self, claims: list[Claim], ahead: bool) -> None:
        """Note whether jobs of cohorts are next.

        One that came while others are claimed ahead was first in order. Nothing is claimed ahead from then on, until a
        claim for free slots has had room for other jobs.
        """
        if ahead:
            self._cohorts_first = self._cohorts_first or any(map(_COHORT, claims))
        else:
            self._cohorts_first = bool(claims) and all(map(_COHORT, claims))

    async def _claimed(self, claims: list[Claim], limit: int, rescan: bool, started: float) -> None:
        now = self._loop.time()
        self._others_first = False
        self._lanes.claimed(claims, rescan=rescan)
        self._lanes.scanned(now, now - started, rescan=rescan)
        if claims:
            self._counts.claimed += len(claims)
            claims.sort(key=_IN_LANE)
            claims.sort(key=_PRIORITY, reverse=True)
            self._last_find = now
            self._misses = 0
            self._finds.append(now)
            full = len(claims) == limit
            if full or self._notified:
                self._next_claim = now
            else:
                # Asleep, it leaves what comes from now on to those who are told of it.
                self._next_claim = now + (self._poll if self._asleep else SHORTEST)
            await self._hand_over(claims)
            if self._asleep and (
                full or (len(self._finds) == self._finds.maxlen and now - self._finds[0] < OFTEN_WITHIN)
            ):
                await self._set_asleep(False, pass_on=full)
            return
        if self._notified:
            # While this claim was on its way: it may have been too early.
            self._next_claim = 0.0
        elif self._asleep:
            self._next_claim = now + (RECHECKS[self._naps] if self._naps < len(RECHECKS) else self._poll)
            self._naps += 1
        elif now - self._last_find > SILENCE:
            # Asleep first, then one more look: what is enqueued from now on will notify.
            await self._set_asleep(True)
            self._next_claim = 0.0
        else:
            self._next_claim = now + min(SHORTEST * 2**self._misses, 4 * SHORTEST)
            self._misses += 1

    async def _set_asleep(self, asleep: bool, *, pass_on: bool = False) -> None:
        """Ask to be notified, or no longer; ``pass_on`` what this worker cannot take to two others."""
        try:
            if asleep:
                await self._conn.fetch(self._sql["sleep"], self.worker_id, self._queues)
            elif pass_on:
                self._notified = False
                await self._conn.fetch(self._sql["pass_on"], self.worker_id, self._queues)
            else:
                await self._conn.fetch(self._sql["unsleep"], self.worker_id)
        except DATABASE_ERRORS as exc:
            await self._conn.pause_after_failure(exc)
        else:
            self._asleep = asleep
            self._naps = self._misses = 0
            if not asleep:
                self._next_claim = min(self._next_claim, self._loop.time() + SHORTEST)

    def registered_anew(self, worker_id: UUID) -> None:
        """Claim under another registration from now on."""
        self.worker_id = worker_id
        self._asleep = False
        self._next_claim = 0.0
        self._event.set()

    async def _hand_over(self, claims: list[Claim]) -> None:
        claimed(claims)
        claims = self._unproven.proven(claims)
        unknown = {c.policy_id for c in claims} - self._policies.known
        if unknown:
            await self._policies.load(self._conn, unknown)
        if not self.claiming:
            # Stopped while the answer was on its way.
            for claim in claims:
                self._hand_back(claim)
        else:
            policy_of = self._policies.get
            self._executor.put([(c, policy_of(c.policy_id, c.task)) for c in claims])
        if self._watched is not None:
            self._watched.acted("claims")

    async def _claim_suspect(self) -> None:
        # Suspects and other jobs take turns; whatever goes wrong here is tried again when the survey has found one.
        self._suspects_since = None
        worker_id = self.worker_id
        self.started += 1
        self.in_flight = self.started
        self._last_sent = self._loop.time()
        self._watch([], 1)
        try:
            rows = await self._conn.fetch(
                self._sql["claim_suspect"], worker_id, self._tasks, self._queues, through=self._watched
            )
        except DATABASE_ERRORS as exc:
            self.in_flight = 0
            await self._conn.pause_after_failure(exc)
            return
        except Exception as exc:
            self.in_flight = 0
            await self._resender.unreadable([], exc)
            return
        if rows and worker_id is not None:
            claim = Claim.from_row(worker_id, rows[0], self._loop.time())
            log.info("job.runs_alone", job_id=claim.job_id, task=claim.task, recoveries=claim.recoveries)
            self._alone = (claim.job_id, claim.claim_epoch)
            self._suspects_since = self._loop.time()
            self._others_first = True
            self._next_claim = 0.0
            self._counts.claimed += 1
            await self._hand_over([claim])
        self.in_flight = 0

    # Handing back ---------------------------------------------------------------------------------------------------

    def _hand_back_stale(self, now: float) -> None:
        oldest = self._executor.oldest_waiting
        if oldest is not None and now - oldest > STALE and self._executor.busy >= self._concurrency:
            self._executor.mean_seconds = max(self._executor.mean_seconds, STALE)
            self.hand_back_waiting()

    def hand_back_waiting(self) -> None:
        """Release every claim whose body has not started; uses no attempt."""
        for claim, _ in self._executor.take_back():
            self._hand_back(claim)

    def _hand_back(self, claim: Claim) -> None:
        handed_back(claim, self._outbox.why_released())
        self.release(claim.worker_id, claim.job_id, claim.claim_epoch, claim.task)

    def release(self, worker_id: UUID, job_id: UUID, claim_epoch: int, task: str = "", delay: float = 0.0) -> None:
        """Release one claim that has no body."""
        self._counts.released += 1
        self._outbox.put(End(worker_id, job_id, claim_epoch, "release", next_outcome_id(), delay=delay, task=task))
        self._event.set()

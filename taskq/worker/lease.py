"""The lease thread: renews on a connection of its own, and stops the worker before the database would take its claims.

It runs beside the event loop, so that a blocked loop does not lose the lease of jobs that live; but it renews only
while the loop and the loop's connections have made progress lately, so that a dead pool beside a healthy thread does
not hold claims for ever. The deadline that it counts with is the time of *sending* the last renewal that was answered,
plus the lease, less a margin, on a clock that also counts suspended time.

A statement that gets no answer would keep the thread from looking at the clock. So a second thread watches the
deadlines, and cuts the connection of a renewal that takes too long.

Two deadlines follow from a lease that cannot be renewed. At the first, bodies are cancelled; at the second, if one has
not ended, the process exits hard: a thread cannot be stopped, and a body that runs on without a lease would run beside
its own successor. A process that was frozen finds both passed when it wakes up. Where started side effects would end
with it, which can still tell their outcome, the other bodies first get a moment to end.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import psycopg

from taskq.db.pools import connect_sync
from taskq.errors import DatabaseUnavailable
from taskq.telemetry import get_logger
from taskq.worker.execute import job_in

log = get_logger("worker")

EXIT_LEASE_LOST = 75
"""The process exits with this code when a body still ran as the lease ran out."""
LONGEST_WAIT = 5.0
MOMENT = 1.0
"""Seconds, at most, that bodies get to end after they were told, where started effects would end with the process."""
# Where there is no such clock, as on macOS, suspended time goes uncounted.
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_clock() -> float:
    """Seconds on a clock that never steps and counts the time that the machine was suspended."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class Held:
    """One claim that the database says this worker holds."""

    job_id: UUID
    claim_epoch: int
    cancel_requested: bool
    status: str


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to one renewal."""

    worker_id: UUID
    status: str
    held: tuple[Held, ...]


class Progress:
    """When the event loop and the exchange's connection last did something; written by the loop, read by the thread."""

    def __init__(self) -> None:
        self.loop_at = boot_clock()
        self.pool_at = boot_clock()

    def loop(self) -> None:
        """The loop has turned."""
        self.loop_at = boot_clock()

    def pool(self) -> None:
        """A statement of the exchange was answered."""
        self.pool_at = boot_clock()


class LeaseKeeper(threading.Thread):
    """Renews the lease of one worker process.

    Args:
        dsn: Where to connect.
        query: The statement that renews, with ``$1`` for the worker's id.
        lease: Seconds that a renewal lasts.
        progress: What the loop has done lately.
        tolerance: Seconds for which a blocked loop, or a silent pool, is tolerated.
        bodies: How many bodies run that must not outlive the lease; read from this thread.
        effects: How many run that may have begun a side effect, and may; likewise.
        on_renewed: Called in this thread with each answer.
        on_expiring: Called in this thread when the first deadline passes without a renewal.
    """

    def __init__(
        self,
        *,
        dsn: str,
        query: str,
        lease: float,
        progress: Progress,
        tolerance: float,
        bodies: Callable[[], int],
        effects: Callable[[], int],
        on_renewed: Callable[[Renewal], None],
        on_expiring: Callable[[], None],
    ) -> None:
        super().__init__(name="taskq-lease", daemon=True)
        self._dsn = dsn
        self._query = query
        self._lease = lease
        self._progress = progress
        self._tolerance = tolerance
        self._bodies = bodies
        self._effects = effects
        self._on_renewed = on_renewed
        self._on_expiring = on_expiring
        self._conn: psycopg.Connection[Any] | None = None
        self._halt = threading.Event()
        self._now = threading.Event()
        self._worker_id: UUID | None = None
        self._deadline = math.inf
        self._expiring = False
        self._told_at = -math.inf
        self._blocked_reported = False
        self._failures = 0
        self._sent_at: float | None = None
        self._loop_thread = threading.get_ident()
        self.turned_at = boot_clock()
        """When this thread last looked at the clock; read by other threads."""
        self.answered_at = -math.inf
        """When the last renewal that was answered had been sent; read by other threads."""

    def hold(self, worker_id: UUID, sent_at: float) -> None:
        """Renew for this registration, whose lease began when its registration was sent (on ``boot_clock``)."""
        self._worker_id = worker_id
        self._deadline = sent_at + self._lease
        self._expiring = False
        self._now.set()

    @property
    def holds(self) -> bool:
        """Whether there is a registration to renew, as far as the last answer says."""
        return self._worker_id is not None

    @property
    def halted(self) -> bool:
        """Whether the thread was asked to end."""
        return self._halt.is_set()

    @property
    def soft_margin(self) -> float:
        """Seconds before the end of the lease at which bodies are cancelled."""
        return min(self._lease / 4, 5.0)

    @property
    def remaining(self) -> float:
        """Seconds until this worker must have stopped, as far as it knows."""
        return self._deadline - boot_clock()

    def holds_for(self, worker_id: UUID | None) -> bool:
        """Whether that registration is the one that is renewed, and its lease has not run out by this clock."""
        return worker_id is not None and self._worker_id == worker_id and self.remaining > 0

    def renew_soon(self) -> None:
        """Renew now instead of at the next turn."""
        self._now.set()

    def halt(self) -> None:
        """End the thread. The lease is left to run out, or to ``stop_worker``."""
        self._halt.set()
        self._now.set()

    def run(self) -> None:
        """Renew three times a lease; after a failure sooner, then less and less often."""
        threading.Thread(target=self._watch_until_halted, name="taskq-lease-watch", daemon=True).start()
        interval = self._lease / 3
        next_renewal = 0.0
        while not self._halt.is_set():
            now = self.turned_at = boot_clock()
            asked = self._now.is_set()
            self._now.clear()
            worker_id = self._worker_id
            if worker_id is not None and (asked or now >= next_renewal) and self._may_renew(now):
                if self._renew(worker_id):
                    self._failures = 0
                    next_renewal = now + interval
                else:
                    self._failures += 1
                    wait = min(interval, 1.0) / 4 * 2 ** min(self._failures - 1, 6)
                    next_renewal = boot_clock() + min(wait, interval, LONGEST_WAIT)
            self._now.wait(min(interval, 1.0) / 4)
        if self._conn is not None:
            with suppress(Exception):
                self._conn.close()

    def _may_renew(self, now: float) -> bool:
        blocked = now - self._progress.loop_at
        if blocked > min(self._lease / 2, 2.0) and not self._blocked_reported:
            self._blocked_reported = True
            frame = sys._current_frames().get(self._loop_thread)
            stack = "".join(traceback.format_stack(frame)[-6:]) if frame else ""
            claim = job_in(frame)
            log.warning(
                "loop.blocked",
                seconds=round(blocked, 1),
                tolerated=self._tolerance,
                task=claim.task if claim else None,
                job_id=claim.job_id if claim else None,
                stack=stack,
            )
        elif blocked < 1.0:
            self._blocked_reported = False
        return blocked <= self._tolerance and now - self._progress.pool_at <= self._tolerance

    def _renew(self, worker_id: UUID) -> bool:
        sent_at = boot_clock()
        try:
            if self._conn is None or self._conn.closed:
                self._conn = connect_sync(
                    self._dsn,
                    name="taskq lease",
                    connect_timeout=max(2, int(self._lease / 3)),
                    prepare_threshold=None,
                    cursor_factory=psycopg.RawCursor,
                    # Without an answer for this long, the kernel gives the connection up.
                    tcp_user_timeout=int(self._lease * 500),
                    keepalives_idle=max(1, int(self._lease / 3)),
                    options=f"-c statement_timeout={max(1000, int(self._lease * 400))} -c lock_timeout=0"
                    " -c idle_session_timeout=0",
                )
            sent_at = self._sent_at = boot_clock()
            rows = self._conn.execute(self._query, (worker_id,)).fetchall()
        except (psycopg.Error, DatabaseUnavailable, OSError) as exc:
            if self._failures < 3 or self._failures % 10 == 0:
                log.warning(
                    "lease.not_renewed",
                    error=str(exc).splitlines()[0] if str(exc) else type(exc).__name__,
                    failures=self._failures + 1,
                    remaining=round(self._deadline - boot_clock(), 1),
                )
            if self._conn is not None:
                with suppress(Exception):
                    self._conn.close()
                self._conn = None
            return False
        finally:
            self._sent_at = None
        if worker_id != self._worker_id:
            return True
        self.answered_at = sent_at
        status = str(rows[0][0])
        held = tuple(Held(r[1], r[2], bool(r[3]), str(r[0])) for r in rows[1:])
        if status in ("live", "draining"):
            self._deadline = sent_at + self._lease
            self._expiring = False
        else:
            # Lost or absent: there is nothing to renew until the loop registers anew. The claims are somebody else's
            # by now, so bodies get no longer than they would at the end of the lease.
            self._worker_id = None
            self._expiring = True
            self._told_at = boot_clock()
            self._deadline = min(self._deadline, boot_clock() + self.soft_margin)
        self._on_renewed(Renewal(worker_id, status, held))
        return True

    def _watch_until_halted(self) -> None:
        tick = min(self._lease / 12, 0.25)
        wait = tick
        while not self._halt.wait(wait):
            now = boot_clock()
            sent_at, conn = self._sent_at, self._conn
            if sent_at is not None and conn is not None and now - sent_at > max(self._lease / 3, 1.0):
                # The renewal has had no answer for too long: cut its connection, so that the next try gets a new one.
                self._sent_at = None
                with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(conn.fileno())) as cut:
                    cut.shutdown(socket.SHUT_RDWR)
            self._watch(now)
            # Not a tick late for either of the two: the second is a sixteenth of the lease before its end.
            ahead = [at - now for at in (self._deadline - self.soft_margin, self._hard_deadline) if at > now]
            wait = min([tick, *(max(left, 0.001) for left in ahead)])

    @property
    def _hard_deadline(self) -> float:
        hard = self._deadline - self.soft_margin / 4
        # For threads and for what ends late, this is time beside a successor: no longer than effects are worth it.
        return max(hard, self._told_at + min(self.soft_margin / 2, MOMENT)) if self._effects() else hard

    def _watch(self, now: float) -> None:
        if now < self._deadline - self.soft_margin:
            return
        if not self._expiring:
            self._expiring = True
            self._told_at = now
            log.error("lease.expiring", bodies=self._bodies(), seconds_left=round(self._deadline - now, 1))
            self._on_expiring()
        if now >= self._hard_deadline and self._bodies() > 0:
            log.critical(
                "lease.lost",
                bodies=self._bodies(),
                exit_code=EXIT_LEASE_LOST,
                reason="a body still ran as the lease ran out",
            )
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(EXIT_LEASE_LOST)

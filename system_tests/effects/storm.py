"""A storm over worker processes: a seed says what strikes, and after how many jobs that the database has seen start.

Nothing waits for luck: a strike comes when so many jobs have started, on a worker that holds running jobs, and lasts
until the database shows what it was for, such as a worker declared lost.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from cluster import Cluster
from conftest import WorkerProcess
from proxy import Proxy, proxy

WORKERS = 3
KINDS = ["kill"] * 3 + ["freeze"] * 3 + ["cut"] * 2 + ["backends"] * 2 + ["restart", "crash"]
CANCELS = 40
LOOK_EVERY = 0.1
TRIES = 20
"""How often a strike is put off until it hits an effect start on its way; then it takes what comes."""
STALLED_AFTER = 60.0
"""Seconds without any job started or ended until the storm has failed."""
PROGRESS = """
    select (select count(*) from taskq.jobs j where j.task = any(%s) and j.effect_started_at is not null)
             + (select count(*) from taskq.history h where h.task = any(%s)) as started,
           (select count(*) from taskq.jobs j where j.status <> 'unknown') as busy,
           (select count(*) from taskq.jobs j where j.status = 'unknown') as unknown,
           (select coalesce(sum(claim_epoch), 0) from taskq.all_jobs) as moved
"""
HOLDERS = """
    select w.id, w.name, count(*) filter (where j.status = 'running' and j.effect_started_at is not null) as holds,
           count(*) filter (where j.status = 'running' and j.effect_started_at is null) as unstarted
      from taskq.workers w left join taskq.jobs j on j.claimed_by = w.id
     where w.status = 'live' and w.lease_expires_at > taskq.now() group by w.id, w.name
"""


@dataclass
class Seat:
    """The place of one worker: its process now, and its own way to the database."""

    number: int
    way: Proxy
    process: WorkerProcess
    starts: int = 1

    @property
    def name(self) -> str:
        return f"w{self.number}-{self.starts}"


@dataclass(frozen=True)
class Wound:
    """A worker that is frozen or cut off, until the database has what it was for."""

    kind: str
    seat: Seat
    worker: UUID
    heal: Callable[[], None]


@dataclass
class Storm:
    """The storm of one seed.

    Args:
        cluster: The server.
        start: Starts a worker by name, through a way to the database.
        tasks: The tasks whose jobs count.
        jobs: The jobs to be cancelled now and then.
        seed: Decides what strikes when, and whom.
        until_reconciled: Whether a wounded worker wakes up only once nothing that it held is open any more.
    """

    cluster: Cluster
    start: Callable[[str, Proxy], WorkerProcess]
    tasks: list[str]
    jobs: list[UUID]
    seed: int
    until_reconciled: bool
    struck: Counter[str] = field(default_factory=Counter)
    exits: Counter[int] = field(default_factory=Counter)
    held: int = 0
    unstarted: int = 0
    cancels: dict[UUID, list[str]] = field(default_factory=lambda: defaultdict(list))
    woken_after_reconciling: int = 0

    def __post_init__(self) -> None:
        self._rand = random.Random(self.seed)
        kinds = self._rand.sample(KINDS, len(KINDS))
        whole = range(len(self.jobs) // 20, len(self.jobs) * 3 // 4)
        self._strikes = list(zip(sorted(self._rand.sample(whole, len(kinds))), kinds, strict=True))
        self._cancels_at = sorted(self._rand.sample(whole, CANCELS))
        self._tries = 0
        self._wounds: list[Wound] = []
        self._seats: list[Seat] = []

    @contextmanager
    def over_workers(self) -> Iterator[Storm]:
        """Start the workers."""
        with ExitStack() as stack:
            for number in range(WORKERS):
                way = stack.enter_context(proxy(self.cluster.dsn))
                self._seats.append(Seat(number, way, self.start(f"w{number}-1", way)))
            yield self

    def rage(self) -> None:
        """Strike until everything has struck and nothing is left to do.

        Raises:
            AssertionError: Nothing moved any more; the message has what was last seen.
        """
        moved: object = None
        moved_at = time.monotonic()
        while True:
            seen = self._progress()
            self._heal_what_can()
            self._start_what_ended()
            while self._strikes and seen["started"] >= self._strikes[0][0]:
                # Before the jobs run out, as they do where a busy machine leaves few looks: whatever it hits.
                late = seen["started"] >= self._strikes[0][0] + len(self.jobs) // 20
                if not self._strike(self._strikes[0][1], late=late):
                    break
                del self._strikes[0]
            while self._cancels_at and seen["started"] >= self._cancels_at[0]:
                del self._cancels_at[0]
                self._cancel_one()
            left = seen["busy"] + (seen["unknown"] if self.until_reconciled else 0)
            if not left and not self._strikes and not self._wounds:
                return
            state = (seen, len(self._wounds), len(self._strikes))
            if state != moved:
                moved, moved_at = state, time.monotonic()
            if time.monotonic() - moved_at > STALLED_AFTER:
                raise AssertionError(f"nothing moved for {STALLED_AFTER:g} s: {self._situation(seen)}")
            time.sleep(LOOK_EVERY)

    def calm(self) -> None:
        """Stop all workers in good order, so that nobody can tell anything any more."""
        codes = [seat.process.stop(30) for seat in self._seats]
        assert codes == [0] * WORKERS, f"exit codes {codes}"

    def answers(self) -> dict[str, int]:
        """What those who asked to cancel were answered, and how often."""
        return dict(Counter(answer for answers in self.cancels.values() for answer in answers))

    def _situation(self, seen: dict[str, Any]) -> str:
        left = self.cluster.query(
            "select status, task, claimed_by, count(*) from taskq.jobs group by 1, 2, 3 order by 4 desc limit 10"
        )
        wounds = [(w.kind, w.seat.name, w.worker) for w in self._wounds]
        logs = {s.name: (s.process.process.poll(), s.process.log[-600:]) for s in self._seats}
        return f"{seen}; left {left}; strikes to come {self._strikes}; wounds {wounds}; workers {logs}"

    def _progress(self) -> dict[str, Any]:
        return {k: int(str(v)) for k, v in self.cluster.query(PROGRESS, self.tasks, self.tasks)[0].items()}

    # What strikes ---------------------------------------------------------------------------------------------------

    def _strike(self, kind: str, *, late: bool) -> bool:
        """Whether it could be done now."""
        match kind:
            case "restart" | "crash":
                self.cluster.stop("fast" if kind == "restart" else "immediate")
                self.cluster.start()
            case "backends":
                ended = self.cluster.value(
                    "select count(pg_terminate_backend(pid)) from (select pid from pg_stat_activity"
                    " where application_name like 'taskq %%' order by random() limit 4) a"
                )
                if not ended:
                    return False
                self.struck["backends ended"] += ended
            case _:
                seat = self._target()
                if seat is None or not self._strike_worker(kind, seat, late=late):
                    return False
        self.struck[kind] += 1
        return True

    def _target(self) -> Seat | None:
        """A healthy worker that runs started effects, while another healthy one goes on."""
        wounded = {wound.seat.number for wound in self._wounds}
        healthy = [s for s in self._seats if s.number not in wounded and s.process.process.poll() is None]
        holds = {str(row["name"]): int(str(row["holds"])) for row in self.cluster.query(HOLDERS)}
        able = [seat for seat in healthy if holds.get(seat.name)]
        return self._rand.choice(able) if len(healthy) > 1 and able else None

    def _strike_worker(self, kind: str, seat: Seat, *, late: bool) -> bool:
        """Whether it hit what it should: started effects, and one whose start was on its way."""
        strike, heal = {
            "kill": (seat.process.kill, None),
            "freeze": (lambda: seat.process.signal(signal.SIGSTOP), lambda: seat.process.signal(signal.SIGCONT)),
            "cut": (seat.way.blackhole, seat.way.restore),
        }[kind]
        if heal is not None:
            strike()
        row = next((row for row in self.cluster.query(HOLDERS) if row["name"] == seat.name), {})
        holds, unstarted = int(str(row.get("holds", 0))), int(str(row.get("unstarted", 0)))
        if not holds or (not unstarted and self._tries < TRIES and not late):
            self._tries += 1
            if heal is not None:
                heal()
            return False
        self._tries = 0
        self.held += holds
        self.unstarted += unstarted
        if heal is None:
            strike()
        else:
            assert isinstance(row["id"], UUID)
            self._wounds.append(Wound(kind, seat, row["id"], heal))
        return True

    def _heal_what_can(self) -> None:
        for wound in list(self._wounds):
            open_ones = ["running", "unknown"] if self.until_reconciled else ["running"]
            [row] = self.cluster.query(
                "select w.status, (select count(*) from taskq.jobs j where j.claimed_by = w.id and j.status = any(%s))"
                " as open from taskq.workers w where w.id = %s",
                open_ones,
                wound.worker,
            )
            if row == {"status": "lost", "open": 0}:
                self._wounds.remove(wound)
                wound.heal()
                self.woken_after_reconciling += self.until_reconciled

    def _start_what_ended(self) -> None:
        for seat in self._seats:
            code = seat.process.process.poll()
            if code is not None:
                self.exits[code] += 1
                seat.starts += 1
                seat.process = self.start(seat.name, seat.way)

    def _cancel_one(self) -> None:
        running = self.cluster.query(
            "select id from taskq.jobs where task = any(%s) and status = 'running' order by id", self.tasks
        )
        pool = [row["id"] for row in running] if running and self._rand.random() < 0.5 else self.jobs
        job = self._rand.choice(pool)
        assert isinstance(job, UUID)
        [row] = self.cluster.query("select taskq.cancel(%s, 'the storm', 'storm') as answer", job)
        self.cancels[job].append(str(row["answer"]))

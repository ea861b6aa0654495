"""What one worker at a time does for all: lost workers, deadlines, keys, partitions, retention.

Every worker looks a few times a lease at the leader's row, and one holds it. The same statement tells every worker what
its claims cannot see, and the leader which duties are due, so that an idle worker costs one statement a turn. Each duty
is bounded and idempotent, and depends on nothing held in memory, so a leader that dies in the middle is simply followed
by the next.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

import asyncpg

from taskq import errors
from taskq.telemetry import get_logger
from taskq.worker.connection import DATABASE_ERRORS, Connection, is_connection_failure
from taskq.worker.lease import boot_clock

log = get_logger("maintenance")

LONGEST_PAUSE = 5.0
ORDERINGS_EVERY = 1.0
"""Seconds; while ordering keys are in use."""
SWEEP_FOR = 1.0
"""Seconds at a stretch for waits that are over."""
CARRY_ON_FOR = 1.0
"""Seconds at a stretch for runs of which more is ready than one transaction gives jobs."""
BETWEEN = 0.005
"""Seconds between two of these, in which ends of the same run find it free."""
PRUNE_EVERY = 60.0
PARTITIONS_EVERY = 1800.0
SLOW = 0.25
"""Seconds; a survey that takes longer is made apart, so that it does not hold up the look at the leader's row."""


class Maintenance:
    """One worker's share in the upkeep.

    Args:
        queries: The named statements of ``db/sql/worker.sql``.
        conn: A connection for the upkeep alone.
        lease: Seconds; the leader's lease lasts as long.
        queues: The queues that this worker serves.
        tasks: Names of the tasks that it knows.
        on_survey: Called with each survey: rows of ``kind``, ``name`` and ``n``.
    """

    def __init__(
        self,
        queries: Mapping[str, str],
        conn: Connection,
        lease: float,
        *,
        queues: Sequence[str],
        tasks: Sequence[str],
        on_survey: Callable[[list[Any]], None],
    ) -> None:
        self._sql = queries
        self._conn = conn
        self._lease = lease
        self._surveyed = (list(queues), list(tasks))
        self._on_survey = on_survey
        self._survey_took = 0.0
        self._looked_at: float | None = None
        self._failures: dict[str, int] = {}
        self._prune_at = 0.0
        self._reconcile_at = 0.0
        self._heal_at = 0.0
        self._partitions_at = 0.0
        self._retention_at = 0.0
        self._orderings_in_use = False
        self._told = asyncio.Event()
        self.worker_id: UUID | None = None
        self.is_leader = False

    async def run(self) -> None:
        """Look, and lead if it falls to this worker, until cancelled."""
        while True:
            pause = min(self._lease / 3, LONGEST_PAUSE) * (0.9 + random.random() / 5)
            try:
                if self.worker_id is not None:
                    await self._turn(self.worker_id)
                    while self.is_leader and self._orderings_in_use and pause > ORDERINGS_EVERY:
                        pause -= ORDERINGS_EVERY
                        await self._rest(ORDERINGS_EVERY)
                        await self._duty("sweep_orderings", self._sweep_orderings)
                    await self._rest(pause)
                    continue
            except DATABASE_ERRORS as exc:
                self.is_leader = False
                await self._conn.pause_after_failure(exc)
            await asyncio.sleep(pause)

    def told(self) -> None:
        """More of a run became ready than one transaction gives jobs: whoever leads carries it on."""
        self._told.set()

    async def _rest(self, seconds: float) -> None:
        until = boot_clock() + seconds
        while (left := until - boot_clock()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._told.wait()
            if self._told.is_set():
                self._told.clear()
                if self.is_leader:
                    await self._duty("carry_on", self._carry_on)

    async def resign(self) -> None:
        """Give the role back, if this worker has it."""
        if self.is_leader and self.worker_id is not None:
            self.is_leader = False
            await self._conn.fetch(self._sql["resign"], self.worker_id)

    async def _turn(self, worker_id: UUID) -> None:
        apart = self._survey_took > SLOW
        found = await self._look(worker_id, apart)
        leads = any(row["kind"] == "leader" for row in found)
        if leads != self.is_leader:
            self.is_leader = leads
            log.info("leader.taken" if leads else "leader.lost", worker_id=worker_id)
        if apart:
            await self._duty("survey", self._survey_apart)
        elif refused := [row["name"] for row in found if row["kind"] == "refused"]:
            self._failed("survey", f"SQLSTATE {refused[0]}")
        else:
            self._failures.pop("survey", None)
            self._on_survey(found)
        if self.is_leader:
            await self._lead({row["name"] for row in found if row["kind"] == "duty"})

    async def _lead(self, due: set[str]) -> None:
        now = boot_clock()
        # First: without the partition of today nothing below can end a job.
        if now >= self._partitions_at and await self._duty("partitions", self._partitions):
            self._partitions_at = now + PARTITIONS_EVERY
        if "mark_lost" in due:
            await self._duty("mark_lost", self._mark_lost)
        # Also when nobody was just declared lost: a leader before may have died between the two.
        if "mark_lost" in due or "settle_lost" in due:
            await self._duty("settle_lost", self._settle_lost)
        if "sweep" in due:
            await self._duty("sweep", self._sweep)
        if "stop_children" in due:
            await self._duty("stop_children", self._stop_children)
        if now >= self._reconcile_at and await self._duty("reconcile", self._reconcile):
            self._reconcile_at = now + PRUNE_EVERY
        if now >= self._heal_at and await self._duty("heal", self._heal):
            self._heal_at = now + PRUNE_EVERY
        if "carry_on" in due:
            await self._duty("carry_on", self._carry_on)
        self._orderings_in_use = "sweep_orderings" in due
        if self._orderings_in_use:
            await self._duty("sweep_orderings", self._sweep_orderings)
        if now >= self._prune_at and await self._duty("prune", self._prune):
            self._prune_at = now + PRUNE_EVERY
        if now >= self._retention_at and await self._duty("retention", self._retention):
            self._retention_at = now + PARTITIONS_EVERY

    async def _duty(self, name: str, do: Callable[[], Awaitable[None]]) -> bool:
        """Do one duty; what the database refuses in one keeps none of the others from being done."""
        try:
            await do()
        except (errors.DatabaseUnavailable, asyncpg.InterfaceError):
            raise
        except DATABASE_ERRORS as exc:
            self._failed(name, f"{type(exc).__name__}: {exc}".splitlines()[0])
            return False
        self._failures.pop(name, None)
        return True

    def _failed(self, name: str, error: str) -> None:
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        if failures <= 3 or failures % 10 == 0:
            log.warning("duty.failed", duty=name, error=error, failures=failures)

    async def _mark_lost(self) -> None:
        for lost in await self._conn.fetch(self._sql["mark_lost"]):
            log.warning("worker.lost", worker_id=lost["worker_id"])

    async def _settle_lost(self) -> None:
        async for row in self._each("settle_lost"):
            of_job = _of_job(row)
            worker_id = row["worker_id"]
            became = row["settled"]
            if became == "exhausted":
                became = await self._hold_exhausted(row["job_id"])
                if became != "held":
                    # Somebody was first, or is at its run: then it is found again.
                    continue
            log.warning("job.settled", **of_job, became=became, worker_id=worker_id, error_type=row["why"])

    async def _hold_exhausted(self, job_id: UUID) -> str:
        """Hold a job that was lost once too often; what is refused of one keeps none of the others from it."""
        try:
            became: str = (await self._conn.fetch(self._sql["hold_exhausted"], job_id))[0]["became"]
        except asyncpg.PostgresError as exc:
            if is_connection_failure(exc):
                raise
            log.error("job.not_settled", job_id=job_id, duty="hold_exhausted", sqlstate=exc.sqlstate)
            return "refused"
        return became

    async def _sweep(self) -> None:
        until = boot_clock() + SWEEP_FOR
        async for row in self._each("sweep"):
            if row["settled"] == "more":
                if boot_clock() > until:
                    return
                continue
            of_job = _of_job(row)
            log.warning("job.expired", **of_job, became=row["settled"], error_type=row["why"])

    async def _each(self, query: str) -> AsyncIterator[Any]:
        """What a bounded statement has settled, until it has nothing more; what it cannot settle is left out."""
        failed: list[UUID] = []
        while rows := await self._conn.fetch(self._sql[query], failed):
            for row in rows:
                if row["settled"].startswith("error: "):
                    failed.append(row["job_id"])
                    # It may have been for want of a partition.
                    self._partitions_at = 0.0
                    log.error("job.not_settled", job_id=row["job_id"], duty=query, sqlstate=row["settled"][7:])
                else:
                    if row["settled"] == "exhausted":
                        # Settled by what follows, or found again at the next look.
                        failed.append(row["job_id"])
                    yield row

    async def _reconcile(self) -> None:
        """Have attempts asked about that became unknown before their task had a hook."""
        after: UUID | None = None
        while rows := await self._conn.fetch(self._sql["reconcile_missing"], after):
            after = rows[-1]["job_id"]
            for row in rows:
                of_job = _of_job(row)
                if row["reconcile_job"] is None:
                    log.warning("reconcile.not_enqueued", **of_job)
                else:
                    log.info("reconcile.enqueued", **of_job, reconcile_job=row["reconcile_job"])

    async def _stop_children(self) -> None:
        """Cancel child runs that somebody was at when their parent was cancelled."""
        after: UUID | None = None
        while rows := await self._conn.fetch(self._sql["stop_children"], after):
            after = rows[-1]["run_id"]

    async def _heal(self) -> None:
        """Carry on runs that stand still, which only rows that were written behind the triggers' back can do."""
        after: UUID | None = None
        while rows := await self._conn.fetch(self._sql["heal_runs"], after):
            after = rows[-1]["run_id"]
            for row in rows:
                if row["answer"] == "healed":
                    log.warning("run.healed", run_id=row["run_id"])
                elif row["answer"].startswith("error: "):
                    log.error("run.not_carried_on", run_id=row["run_id"], sqlstate=row["answer"][7:])

    async def _carry_on(self) -> None:
        """Give jobs to what is ready, a run after the other, and a bounded number at a time."""
        until = boot_clock() + CARRY_ON_FOR
        after: UUID | None = None
        carried = False
        while boot_clock() < until:
            if rows := await self._conn.fetch(self._sql["carry_on_run"], after):
                after = rows[0]["run_id"]
                if rows[0]["answer"].startswith("error: "):
                    log.error("run.not_carried_on", run_id=after, sqlstate=rows[0]["answer"][7:])
                else:
                    carried = True
                    await asyncio.sleep(BETWEEN)
            elif carried:
                after, carried = None, False
            else:
                return
        self._told.set()

    async def _sweep_orderings(self) -> None:
        until = boot_clock() + ORDERINGS_EVERY
        while (await self._conn.fetch(self._sql["sweep_orderings"]))[0]["n"] and boot_clock() < until:
            pass

    async def _prune(self) -> None:
        while (await self._conn.fetch(self._sql["prune"]))[0]["n"]:
            pass

    async def _look(self, worker_id: UUID, apart: bool) -> list[Any]:
        """Look at the leader's row; a look that comes late must not pass for a step of the database's clock."""
        before, self._looked_at = self._looked_at if self._conn.is_open else None, None
        now = boot_clock()
        elapsed = None if before is None else now - before
        queues, tasks = ([], []) if apart else self._surveyed
        found = await self._conn.fetch(self._sql["look"], worker_id, self._lease, elapsed, queues, tasks)
        self._looked_at = now
        self._survey_took = self._survey_took if apart else boot_clock() - now
        return found

    async def _survey_apart(self) -> None:
        started = boot_clock()
        found = await self._conn.fetch(self._sql["survey"], *self._surveyed)
        self._survey_took = boot_clock() - started
        self._on_survey(found)

    async def _partitions(self) -> None:
        made = (await self._conn.fetch(self._sql["ensure_partitions"]))[0]["n"]
        if made:
            log.info("partitions.made", n=made)

    async def _retention(self) -> None:
        try:
            while (name := (await self._conn.fetch(self._sql["drop_expired_partition"]))[0]["name"]) is not None:
                log.info("partition.dropped", name=name)
        except asyncpg.LockNotAvailableError:
            # A long reader is at it; the next turn tries again, and nobody queues up behind us meanwhile.
            log.info("partition.busy")


def _of_job(row: Any) -> dict[str, Any]:
    return {
        "job_id": row["job_id"],
        "task": row["task"],
        "queue": row["queue"],
        "claim_epoch": row["claim_epoch"],
        "attempt": row["attempt"] + 1,
    }

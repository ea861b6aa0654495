"""Ends on their way to the database: kept until confirmed, sent again until then, bisected when one cannot be stored.

Nothing that a body has done is forgotten because an answer was lost or a disk is full. Only errors that say that a
value itself cannot be stored (SQLSTATE classes 22, 23 and WF) lead to another outcome than the body's own: the batch
is halved until the one at fault stands alone, and that one ends with a minimal failure.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from uuid import UUID

import asyncpg

from taskq.worker import points
from taskq.worker.claims import Claim, End
from taskq.worker.disposition import Disposition, ReleaseReason, released

BATCH = 500
BATCH_BYTES = 8 * 1024 * 1024
"""A batch ends before the end whose text would take it past this many characters: a message has a limit, too."""

EndArrays = tuple[list[UUID], list[int], list[str], list[int], list[str | None], list[str | None], list[float]]

_outcome_ids = itertools.count(random.getrandbits(62))


def next_outcome_id() -> int:
    """A nonce for one outcome: unique within the process, and not to be expected from another."""
    return next(_outcome_ids) & 0x7FFF_FFFF_FFFF_FFFF


def make_end(claim: Claim, decided: Disposition) -> End:
    """The end of an attempt, ready to be kept and sent."""
    return End(
        claim.worker_id,
        claim.job_id,
        claim.claim_epoch,
        decided.outcome,
        next_outcome_id(),
        decided.result,
        decided.error_text,
        decided.delay,
        claim.task,
        effect_started_at=claim.effect_started_at,
    )


def arrays(ends: Iterable[End]) -> EndArrays:
    """The ends as the parallel arrays that ``exchange`` and ``end_attempts`` take.

    A success has neither error nor delay: where all are successes these two are empty, since each element costs.
    """
    ends = list(ends)
    others = any(end.outcome != "succeeded" for end in ends)
    return (
        [end.job_id for end in ends],
        [end.claim_epoch for end in ends],
        [end.outcome for end in ends],
        [end.outcome_id for end in ends],
        [end.result for end in ends],
        [end.error for end in ends] if others else [],
        [end.delay for end in ends] if others else [],
    )


def cannot_be_stored(exc: BaseException) -> bool:
    """Whether an error says that a value of the batch is at fault, so that sending it again unchanged cannot help."""
    if not isinstance(exc, asyncpg.PostgresError) or exc.sqlstate is None:
        return False
    if partition_is_missing(exc):
        return False
    # 54000 and 54001: a value too large, or nested too deeply, for jsonb.
    return exc.sqlstate[:2] in ("22", "23", "WF") or exc.sqlstate in ("54000", "54001")


def partition_is_missing(exc: BaseException) -> bool:
    """Whether an end found no partition for its day: the one check violation without the name of a constraint."""
    return isinstance(exc, asyncpg.CheckViolationError) and not exc.constraint_name


def minimal_failure(end: End, exc: asyncpg.PostgresError) -> End:
    """What an end becomes that cannot be stored: failed, with the SQLSTATE that refused it. The outcome id stays.

    What is unknown stays unknown, and a side effect that succeeded becomes it: failed would have it undone.
    """
    lost = end.outcome == "succeeded" and end.effect_started_at is not None
    error = {
        "type": "OutcomeNotStored",
        "message": f"it ended as {end.outcome}, but PostgreSQL refused to store that (SQLSTATE {exc.sqlstate})",
        "sqlstate": exc.sqlstate,
        "outcome": end.outcome,
    }
    if end.outcome == "unknown":
        known = json.loads(end.error or "{}")
        error |= {
            name: known.get(name) for name in ("reason", "step", "occurrence") if name == "reason" or name in known
        }
    elif lost:
        error["reason"] = "not_confirmed"
    return replace(
        end,
        outcome="unknown" if lost or end.outcome == "unknown" else "failed",
        result=None,
        error=json.dumps(error),
        delay=0.0,
        minimal=True,
    )


class Outbox:
    """Ends that wait to be sent, oldest first, in batches of one worker id.

    After ``refused``, the halves of a batch are offered one by one until all of it has been sent.

    Args:
        why_released: Gives the reason to put on record for a claim that is handed back without having had a body.
    """

    def __init__(self, why_released: Callable[[], ReleaseReason] = lambda: "stale") -> None:
        self.why_released = why_released
        self._ends: deque[End] = deque()
        self._halves: list[list[End]] = []
        self._unconfirmed: dict[tuple[UUID, int], End] = {}
        self._late: dict[tuple[UUID, int], End] = {}

    def __len__(self) -> int:
        return len(self._ends) + sum(map(len, self._halves))

    @property
    def pending(self) -> int:
        """Ends that are not confirmed yet, those on their way included."""
        return len(self._unconfirmed)

    @property
    def bisecting(self) -> bool:
        """Whether a refused batch is being taken apart: send ends alone, without claims."""
        return bool(self._halves)

    def holds(self, job_id: UUID, claim_epoch: int) -> bool:
        """Whether this attempt's end is here, not confirmed yet."""
        return (job_id, claim_epoch) in self._unconfirmed

    def put(self, end: End) -> None:
        """Keep one end until it is confirmed."""
        if points.watch is None:
            self.keep(end)
        else:
            points.watch.keep(self, end)

    def keep(self, end: End) -> None:
        """What ``put`` does, whoever watches. Told twice, an attempt ends as told first; but unknown is no end."""
        key = (end.job_id, end.claim_epoch)
        before = self._unconfirmed.get(key)
        if before is not None:
            if before.outcome == "unknown" and end.outcome != "unknown":
                # After it, not with it: the database must have the one before it gets the other.
                self._late.setdefault(key, end)
            return
        if end.outcome == "release" and end.error is None:
            end.error = json.dumps(released(self.why_released(), False))
        self._ends.append(end)
        self._unconfirmed[key] = end

    def park(self, end: End) -> None:
        """Keep an attempt unconfirmed that is not to be sent, until ``confirmed`` is called with it."""
        self._unconfirmed[(end.job_id, end.claim_epoch)] = end

    def take(self) -> list[End]:
        """The next batch, all of one worker id."""
        if self._halves:
            return self._halves.pop()
        ends = self._ends
        if not ends:
            return []
        worker = ends[0].worker_id
        batch: list[End] = []
        size = 0
        while ends and len(batch) < BATCH and ends[0].worker_id == worker:
            size += len(ends[0].result or "") + len(ends[0].error or "")
            if batch and size > BATCH_BYTES:
                break
            batch.append(ends.popleft())
        return batch

    def confirmed(self, batch: Iterable[End]) -> None:
        """The database has these, or they are fenced out: forget them."""
        for end in batch:
            key = (end.job_id, end.claim_epoch)
            self._unconfirmed.pop(key, None)
            if self._late and (late := self._late.pop(key, None)) is not None:
                self._ends.append(late)
                self._unconfirmed[key] = late

    def again(self, batch: list[End]) -> None:
        """Send these again, first."""
        if self._halves:
            self._halves.append(batch)
        else:
            self._ends.extendleft(reversed(batch))

    def refused(self, batch: list[End], exc: asyncpg.PostgresError) -> End | None:
        """A value in the batch cannot be stored: halve it. Returns the end at fault once it stands alone."""
        if len(batch) > 1:
            middle = len(batch) // 2
            self._halves += [batch[middle:], batch[:middle]]
            return None
        [end] = batch
        if end.minimal:
            # Even that was refused: the fault is elsewhere. Keep it, behind the others.
            self._ends.append(end)
            return end
        failure = minimal_failure(end, exc)
        self._unconfirmed[(end.job_id, end.claim_epoch)] = failure
        self._halves.append([failure])
        return end

"""Where to claim: lanes and their low-water marks.

A lane is one queue at one priority. For each the worker remembers how far it has claimed, the pair of ``run_at`` and
``id``, and starts there, so that a claim does not walk over the dead index entries of jobs that are done: with one
open transaction holding back vacuum, claiming fell from 16 to 6 thousand jobs/s without marks and stayed at 16 with
them. Jobs that appear behind a mark (back-dated, released, committed late) are found by a rescan from the beginning,
whose share of the worker's time is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from taskq.worker.claims import Claim

BEGINNING = (datetime(1, 1, 1, tzinfo=UTC), UUID(int=0))
"""Before whatever may be stored: the driver sends the first instant of Python's calendar as -infinity."""
LAG = timedelta(seconds=0.25)
"""A mark stays this far behind the clock, so that enqueues that commit a little out of order are not passed over."""
RESCAN_EVERY = 1.0
RESCAN_SHARE = 50.0
"""A rescan takes at most one part in so many of the worker's time, that is 2%."""

Mark = tuple[datetime, UUID]
Lanes = tuple[list[str], list[int], list[datetime], list[UUID]]


class LaneBook:
    """The lanes of one worker, in the order in which they are claimed: by priority, queues in turn.

    Args:
        queues: The queues that the worker serves.
    """

    def __init__(self, queues: Sequence[str]) -> None:
        self._queues = list(queues)
        self._marks: dict[tuple[str, int], Mark] = {}
        self._turn = 0
        self._next_rescan = 0.0
        self._usual = 0.0
        self._last_cost = 0.0

    def rescan_is_due(self, now: float) -> bool:
        """Whether the next claim should start from the beginning; ``now`` on a monotonic clock in seconds."""
        return now >= self._next_rescan

    def lanes(self, *, rescan: bool) -> Lanes:
        """The lanes for the next claim, as four parallel lists."""
        self._turn = (self._turn + 1) % len(self._queues)
        queues = self._queues[self._turn :] + self._queues[: self._turn]
        names: list[str] = []
        priorities: list[int] = []
        at: list[datetime] = []
        ids: list[UUID] = []
        for priority in range(9, -1, -1):
            for queue in queues:
                mark = BEGINNING if rescan else self._marks.get((queue, priority), BEGINNING)
                names.append(queue)
                priorities.append(priority)
                at.append(mark[0])
                ids.append(mark[1])
        return names, priorities, at, ids

    def claimed(self, claims: Iterable[Claim], *, rescan: bool) -> None:
        """Move the marks to what was claimed; a rescan moves them back as well."""
        latest: dict[tuple[str, int], Mark] = {}
        for claim in claims:
            # A job of a cohort waits for its slot, however old it is: it says nothing of others.
            if claim.cohort is not None or claim.run_at > claim.claimed_at - LAG:
                continue
            lane = (claim.queue, claim.priority)
            mark = (claim.run_at, claim.job_id)
            if lane not in latest or mark > latest[lane]:
                latest[lane] = mark
        for lane, mark in latest.items():
            if rescan or mark > self._marks.get(lane, BEGINNING):
                self._marks[lane] = mark

    def scanned(self, now: float, seconds: float, *, rescan: bool) -> None:
        """Note how long a claim took.

        What a rescan costs is what it took longer than other claims do; the smaller of two in a row counts, so that one
        that was held up by a busy machine does not put off the next.
        """
        if not rescan:
            self._usual += (seconds - self._usual) / 5
            return
        cost = max(0.0, seconds - self._usual)
        self._next_rescan = now + max(RESCAN_EVERY, RESCAN_SHARE * min(cost, self._last_cost))
        self._last_cost = cost

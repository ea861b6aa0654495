"""What each fault may do to jobs, and the check that it did no more: shared by the tests in one process and in many.

The promise is read off the definitions of the points. An attempt that was never committed is not on record. One whose
claim was committed and whose end was not ends as ``lost`` with its worker, or as ``released`` by a worker that goes on.
An end that was committed stands, whoever learned of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from uuid import UUID

import psycopg
from psycopg.rows import dict_row
from sql import violations

from taskq.testing import How, Point, When

SIDES: tuple[When, ...] = ("before", "after")
NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Promise:
    """What a fault does to attempts beyond those that the bodies ask for.

    Attributes:
        hit: How the attempt ends, besides, of a job that passed the point when the fault struck; None for not at all.
        others: How attempts of other jobs in the same worker may end besides.
        kills: Whether the worker ends.
        stands: Whether the end that passed the point is on record in the end, as the body asked for it.
    """

    hit: str | None
    others: frozenset[str]
    kills: bool
    stands: bool = False


def promise(point: Point, when: When, how: How) -> Promise:
    """What is promised of one fault."""
    made = _promise(point, when, how)
    return replace(made, stands=point.name.startswith("END") and made.hit is None)


def _promise(point: Point, when: When, how: How) -> Promise:
    if point is Point.EFFECT_START_COMMITTED:
        # Asked again, the server answers the same. What had started and has lost its worker is for somebody to decide.
        if how != "kill":
            return Promise(None, NOTHING, False)
        return Promise("lost" if when == "before" else "resolved", frozenset({"lost"}), True)
    committed = (point.name.endswith("COMMITTED") and when == "after") or point.name.endswith("RECEIVED")
    if how == "kill":
        if point.name.startswith("END"):
            return Promise(None if committed else "lost", frozenset({"lost"}), True)
        if point is Point.BODY_DONE:
            return Promise("lost", frozenset({"lost"}), True)
        return Promise("lost" if committed else None, NOTHING, True)
    answered = point.name.endswith("RECEIVED")
    if how == "raise" and answered and when == "after":
        # What is in hand is lost with the worker.
        return Promise("lost" if point is Point.CLAIM_RECEIVED else None, frozenset({"lost"}), True)
    if how == "raise" and point is Point.BODY_DONE and when == "before":
        return Promise("failed", NOTHING, False)
    if committed and not (answered and how == "drop"):
        # The answer is gone, and with it the claims in it, of whatever exchange it was.
        return Promise("released" if point.name.startswith("CLAIM") else None, frozenset({"released"}), False)
    return Promise(None, NOTHING, False)


def check(
    dsn: str,
    promised: Promise,
    *,
    hit: Iterable[UUID],
    wanted: dict[UUID, list[str]],
    runs: Iterable[tuple[UUID, int]],
) -> None:
    """Check that every job has ended as its body asked for, and that beyond that only what is promised is on record.

    Args:
        dsn: The database.
        promised: What the fault may do.
        hit: The jobs that it struck.
        wanted: How each job's attempts end by what its body does, in order.
        runs: Every run of a body, by job and claim epoch.
    """
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        mine = (list(wanted),)
        found = conn.execute("select * from taskq.history where id = any(%s)", mine).fetchall()
        ended = {row["id"]: row for row in found}
        attempts: dict[UUID, dict[int, str]] = {job: {} for job in wanted}
        of_mine = "select job_id, claim_epoch, outcome from taskq.attempts where job_id = any(%s)"
        for row in conn.execute(of_mine, mine).fetchall():
            assert row["claim_epoch"] not in attempts[row["job_id"]], "an attempt is on record once"
            attempts[row["job_id"]][row["claim_epoch"]] = row["outcome"]
    with psycopg.connect(dsn) as plain:
        assert violations(plain) == []
    assert set(ended) == set(wanted)
    counted = Counter(runs)
    assert set(counted.values()) == {1}, "no attempt runs twice"
    assert {job for job, _ in counted} == set(wanted), "every body has run"
    hit = set(hit)
    for job, asked in wanted.items():
        record = attempts[job]
        row = ended[job]
        assert row["status"] == "succeeded"
        assert sorted(record) == list(range(1, row["claim_epoch"] + 1)), "every claim is on record"
        assert all(epoch in record for of, epoch in counted if of == job), "every run is on record"
        outcomes = [record[epoch] for epoch in sorted(record)]
        besides = Counter(outcomes) - Counter(asked)
        assert not Counter(asked) - Counter(outcomes), (asked, outcomes)
        assert outcomes[-1] == "succeeded"
        allowed = set(promised.others)
        if job in hit and promised.hit is not None:
            assert besides[promised.hit] == 1, (promised, outcomes)
            besides.subtract([promised.hit])
        if job in hit and promised.stands and len(asked) == 1:
            allowed = set()
        assert set(+besides) <= allowed, (promised, job in hit, outcomes)
        assert all(times == 1 for times in (+besides).values()), "one fault costs a job one attempt at most"
        assert row["attempt"] == outcomes.count("failed")
        # An outcome that was resolved and is not the last did not happen, which counts as a recovery as well.
        assert row["recoveries"] == outcomes.count("lost") + outcomes.count("resolved")
        assert row["releases"] == outcomes.count("released")

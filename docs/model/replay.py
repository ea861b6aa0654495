"""Whether the record of a real database is a path of the model.

The record of a job (its row, its ended attempts, what operators did to it, when its attempts became unknown) is turned
into the steps of the model that must have been taken, in order; each is taken by the functions of ``rules``. Where the
record leaves open which step it was (a failure that ends the job or is tried again), all are followed. The first step
after which nothing is left is what the model does not allow.

Order is that of the record's instants, with one exception: a cancel that was answered "requested" found its attempt
open, also where the end that waited for it has the earlier instant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from . import rules
from .rules import Design
from .state import SIDE_EFFECTING, Entry, Job, Owner

Row = Mapping[str, Any]
DESIGN = Design()
CLOCKS_APART = timedelta(seconds=1)
"""A claim reads the clock before it waits for the end of the attempt before, so it may be dated a moment earlier."""
NO_BOUND = 10
"""Lost workers that a job survives where its policy does not say."""
NOT_HAPPENED = ("DidNotHappen", "Cancelled", "RecoveryExhausted", "DeadlineExceeded")
"""Types of error under which a resolved attempt did not happen."""
OF_STEP = "StepHappened"
"""The type of error of an attempt whose step was resolved as having happened: in the model, too, the job runs again."""
ON_RECORD = {
    "waited": ("retry_after", "snoozed", "suspended"),
    "happened": ("resolved",),
    "did_not_happen": ("resolved",),
}
"""What the record calls an outcome of the model, where that is another word."""


@dataclass(frozen=True)
class Record:
    """All that a database says about one job: rows as mappings of column names.

    Attributes:
        id: The job.
        waiting: Its rows in ``jobs``.
        finished: Its rows in ``history``.
        attempts: Its rows in the view ``attempts``.
        audit: Its rows in ``audit``.
        unknowns: Its rows in ``unknowns``; None where the database has no such table.
        max_recoveries: The bound of its policy.
    """

    id: str
    waiting: Sequence[Row] = ()
    finished: Sequence[Row] = ()
    attempts: Sequence[Row] = ()
    audit: Sequence[Row] = ()
    unknowns: Sequence[Row] | None = None
    max_recoveries: int = NO_BOUND


@dataclass(frozen=True)
class Refusal:
    """The first step of a job's record that the model does not allow."""

    job: str
    step: int
    what: str
    why: str

    def __str__(self) -> str:
        return f"job {self.job}, step {self.step}: {self.what}: {self.why}"


@dataclass(frozen=True)
class _Event:
    """One step: when, in words, what becomes of a job by it, and why it may be refused."""

    at: datetime
    rank: int
    what: str
    take: Callable[[Job], Iterable[Job | None]] = field(compare=False)
    why: str


def replay(records: Iterable[Record]) -> list[Refusal]:
    """Replay each job's record.

    Returns:
        For every job whose record is no path of the model, the first step that is not.
    """
    return [refusal for record in records if (refusal := replay_job(record))]


def replay_job(record: Record) -> Refusal | None:
    """The first step of this job's record that the model does not allow; None if it allows all."""
    places = len(record.waiting) + len(record.finished)
    if places != 1:
        where = f"{len(record.waiting)} rows in jobs and {len(record.finished)} in history"
        return Refusal(record.id, 0, "the job is looked up", f"it has {where}, and must have one in all")
    row = (*record.waiting, *record.finished)[0]
    events = sorted(_events(record, row), key=lambda e: (e.at, e.rank))
    jobs = [Job(row["effect_class"])]
    for n, event in enumerate(events, 1):
        after = [job for before in jobs for job in event.take(before) if job is not None]
        if not after:
            return Refusal(record.id, n, event.what, f"{event.why}; the job was {_told(jobs)}")
        jobs = list(dict.fromkeys(after))
    wanted = _observed(record, row)
    found = [_abstract(job) for job in jobs]
    if wanted not in found:
        why = f"it is {_words(wanted)}, and by its record must be {' or '.join(_words(f) for f in found)}"
        return Refusal(record.id, len(events) + 1, "the row is compared with its record", why)
    return None


# The steps of a record ------------------------------------------------------------------------------------------------


def _events(record: Record, row: Row) -> Iterator[_Event]:
    workers: dict[Any, Owner] = defaultdict(lambda: (len(workers), 1))
    attempts = sorted(record.attempts, key=lambda a: (a["claim_epoch"], a["ended_at"]))
    born = row["created_at"]
    yield _Event(born, 0, "enqueued", lambda job: [None if job.status else job._replace(status="pending")], "twice")
    before = born
    opened: list[tuple[datetime, datetime | None]] = []
    # Of another class it is the effect of a step, which the model knows as an attempt that nobody can tell of.
    steps = set() if row["effect_class"] == SIDE_EFFECTING else _with_open_step(record, row)
    for a in attempts:
        claimed = _late(a["claimed_at"], before)
        started = None if a["claim_epoch"] in steps else a["effect_started_at"]
        yield from _begun(a["claim_epoch"], workers[a["worker_id"]], claimed, started)
        yield _ended(a, workers[a["worker_id"]], record, row["max_attempts"])
        before = max(a["ended_at"], claimed)
        opened.append((claimed, a["ended_at"]))
    if record.waiting and row["status"] in ("running", "unknown"):
        claimed = _late(row["claimed_at"], before)
        opened.append((claimed, None))
        started = None if row["claim_epoch"] in steps else row["effect_started_at"]
        yield from _begun(row["claim_epoch"], workers[row["worker_id"]], claimed, started)
    unknowns = record.unknowns
    if unknowns is None and row["status"] == "unknown":
        last = max([row["claimed_at"], *(done["at"] for done in record.audit)])
        unknowns = [{"claim_epoch": row["claim_epoch"], "since": last, "reason": "its row says so"}]
    for u in unknowns or ():
        yield _unknown(u, of_step=u["claim_epoch"] in steps)
    for done in record.audit:
        yield from _ordered(done, opened)
    if record.finished and row["worker_id"] is None and row["status"] == "failed":
        yield _Event(row["finished_at"], 3, "swept", lambda job: [_swept(job)], "only a waiting job is swept")


def _late(claimed: datetime, before: datetime) -> datetime:
    """An instant that is a moment too early, as the later of the two."""
    return before if before - CLOCKS_APART <= claimed < before else claimed


def _begun(epoch: int, owner: Owner, claimed: datetime, started: datetime | None) -> Iterator[_Event]:
    def claim(job: Job) -> Iterator[Job | None]:
        after = rules.claim(job, owner, DESIGN)
        yield after if after and after.epoch == epoch else None

    def start(job: Job) -> Iterator[Job | None]:
        proven = job.effect == SIDE_EFFECTING
        yield rules.start(job, owner, epoch, True, DESIGN) if proven else None

    why = "only a pending job is claimed, and each claim raises the epoch by one"
    yield _Event(claimed, 4, f"claimed at epoch {epoch}", claim, why)
    if started is not None:
        why = "only the open attempt of a side-effecting job starts an effect, and none after a cancel request"
        yield _Event(_late(started, claimed), 5, f"effect start of epoch {epoch}", start, why)


def _ended(a: Row, owner: Owner, record: Record, max_attempts: int) -> _Event:
    epoch, outcome, error = a["claim_epoch"], a["outcome"], a["error"] or {}

    def take(job: Job) -> Iterator[Job]:
        for after in _ends(job):
            if after.record == job.record:
                continue
            told = after.record[-1]
            if outcome in ON_RECORD.get(told.outcome, (told.outcome,)) and told.epoch == epoch:
                yield after

    def _ends(job: Job) -> Iterator[Job]:
        if not rules.owned(job, owner, epoch, DESIGN):
            return
        if outcome == "resolved":
            if not _decided(record, a):
                return
            unknown = rules.enter_unknown(job) if record.unknowns is None else job
            happened, bound = error.get("type") not in (*NOT_HAPPENED, OF_STEP), record.max_recoveries
            if error.get("type") == "DeadlineExceeded":
                # No rule of the model: its next start would have been too late.
                bound = -1
            for possible in (job, unknown):
                for operator in (True, False):
                    resolved = possible and rules.resolve(possible, epoch, happened, DESIGN, bound, operator=operator)
                    if resolved:
                        yield resolved
        elif outcome == "lost":
            settled = rules.settle(job, record.max_recoveries, DESIGN)
            if settled:
                yield settled
        else:
            yield from _told_ends(job)

    def _told_ends(job: Job) -> Iterator[Job]:
        for says in ("succeeded", "retry", "failed", "wait", "release", "cancelled"):
            after = rules.end(job, owner, epoch, says, max_attempts, DESIGN)
            if after:
                yield after
        if not job.cancel:
            # A wait past its bound or past the deadline ends the job, and uses no attempt.
            yield rules.finish(job, "failed", "waited", epoch, DESIGN)

    why = "no end of an open attempt has this outcome here"
    return _Event(a["ended_at"], 6, f"epoch {epoch} ended as {outcome}", take, why)


def _decided(record: Record, a: Row) -> bool:
    """Whether somebody is on record who decided this attempt, that way."""
    happened = (a["error"] or {}).get("type") not in NOT_HAPPENED
    decisions = [done["details"] or {} for done in record.audit if done["action"] == "resolve"]
    return any(
        # Of a step, the job runs again or is cancelled whatever became of it.
        (d.get("happened") == happened or d.get("step") is not None)
        and d.get("claim_epoch", a["claim_epoch"]) == a["claim_epoch"]
        for d in decisions
    )


def _with_open_step(record: Record, row: Row) -> set[int]:
    """The attempts of a job of another class that are unknown, or were, for the effect of a step, or are at one."""
    told = {u["claim_epoch"] for u in record.unknowns or () if "step" in (u.get("error") or {})}
    return told | ({row["claim_epoch"]} if row.get("in_step") else set())


def _unknown(u: Row, *, of_step: bool) -> _Event:
    epoch, reason = u["claim_epoch"], u["reason"]

    def take(job: Job) -> Iterator[Job | None]:
        allowed = {
            "worker_lost": rules.becomes_unknown(job),
            "shutdown": rules.is_kept(job),
            "timed_out": rules.is_kept(job),
        }
        may = of_step or allowed.get(reason, True)
        yield rules.enter_unknown(job) if job.epoch == epoch and may else None

    why = "only a running attempt becomes unknown, and because of its worker only if it may have had an effect"
    return _Event(u["since"], 6, f"epoch {epoch} became unknown: {reason}", take, why)


def _ordered(done: Row, opened: Sequence[tuple[datetime, datetime | None]]) -> Iterator[_Event]:
    """What an operator did; a resolution is seen in the attempt that it ended."""
    at, details = done["at"], done["details"] or {}
    answer = details.get("answer")
    if done["action"] == "cancel":
        # The end that waited for the cancel has read the clock before it waited.
        ends = [end for begin, end in opened if begin <= at]
        if answer == "requested" and ends and ends[-1]:
            at = min(at, ends[-1])

        def cancel(job: Job) -> Iterator[Job | None]:
            said, after = rules.cancel(job, DESIGN)
            yield after if said == answer else None

        yield _Event(at, 5, f"asked to cancel: {answer}", cancel, "a cancel finds something else here")
    if done["action"] == "retry" and answer == "reopened":

        def reopen(job: Job) -> Iterator[Job | None]:
            ended = _swept(job) if details.get("was") == "failed" and job.status == "pending" else job
            yield rules.reopen(ended) if ended and ended.final == details.get("was") else None

        yield _Event(at, 7, "reopened", reopen, "only a failed or cancelled job is reopened")


def _swept(job: Job) -> Job | None:
    """A waiting job whose deadline has passed, or whose attempts are used up."""
    return job._replace(status="", final="failed", unattempted=True) if job.status == "pending" else None


# The row at the end ---------------------------------------------------------------------------------------------------


def _observed(record: Record, row: Row) -> Row:
    waiting = bool(record.waiting)
    counted = {"retry_after": row["retry_afters"], "snoozed": row["snoozes"], "released": row["releases"]}
    of_now = [a["outcome"] for a in record.attempts if a["generation"] == row["generation"]]
    waits = {outcome: (of_now.count(outcome), n) for outcome, n in counted.items()}
    return {
        # In the model, what waits for a signal waits like anything else.
        "status": "pending" if row.get("held_reason") == "signal" else row["status"],
        "epoch": row["claim_epoch"],
        "open": waiting and row["worker_id"] is not None,
        "cancel requested": row["cancel_requested_at"] is not None,
        "attempt": row["attempt"],
        "recoveries": row["recoveries"],
        "generation": row["generation"],
        "ended attempts": len(record.attempts),
        "without an attempt": not waiting and row["worker_id"] is None,
        **{f"{outcome} counted as on record": seen == n for outcome, (seen, n) in waits.items()},
    }


def _abstract(job: Job) -> Row:
    return {
        "status": job.status or job.final,
        "epoch": job.epoch,
        "open": job.status in ("running", "unknown"),
        "cancel requested": job.cancel,
        "attempt": job.attempt,
        "recoveries": job.recoveries,
        "generation": job.generation,
        "ended attempts": len(job.record),
        "without an attempt": job.unattempted,
        **{f"{outcome} counted as on record": True for outcome in ("retry_after", "snoozed", "released")},
    }


def _words(row: Row) -> str:
    return ", ".join(f"{name} {value}" for name, value in row.items())


def _told(jobs: Sequence[Job]) -> str:
    return " or ".join(
        f"{job.status or job.final or 'not there'} at epoch {job.epoch}"
        f"{' after a cancel request' if job.cancel else ''}{' with its effect started' if job.started else ''}"
        for job in jobs
    )


# Reading a database ---------------------------------------------------------------------------------------------------

QUERIES: Mapping[str, str] = {
    "waiting": "select j.*, j.claimed_by as worker_id, j.status = 'running' and exists (select from {schema}.steps s"
    " where s.job_id = j.id and s.generation = j.generation and s.kind = 'step' and not s.done) as in_step"
    " from {schema}.jobs j",
    "finished": "select * from {schema}.history",
    "attempts": "select * from {schema}.attempts",
    "audit": "select * from {schema}.audit where action in ('cancel', 'retry', 'resolve')",
}
UNKNOWNS = "select * from {schema}.unknowns"
HAS_UNKNOWNS = "select to_regclass('{schema}.unknowns') is not null as there"
BOUNDS = "select id, spec->>'max_recoveries' as max_recoveries from {schema}.policies"


def read(fetch: Callable[[str], Sequence[Row]], schema: str = "taskq") -> list[Record]:
    """The records of all jobs of a database.

    Args:
        fetch: Runs a SELECT and gives its rows as mappings; all in one transaction that sees one snapshot.
        schema: Where taskq is installed.
    """

    def rows(query: str) -> Sequence[Row]:
        return fetch(query.format(schema=schema))

    there = rows(HAS_UNKNOWNS)[0]["there"]
    bounds = {r["id"]: r["max_recoveries"] for r in rows(BOUNDS)}
    of: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for kind, query in (*QUERIES.items(), *([("unknowns", UNKNOWNS)] if there else [])):
        for row in rows(query):
            key = {"waiting": "id", "finished": "id", "audit": "subject"}.get(kind, "job_id")
            of[str(row[key])][kind].append(row)
    records = []
    for job, found in of.items():
        policy = next((r["policy_id"] for r in (*found["waiting"], *found["finished"])), None)
        bound = bounds.get(policy)
        records.append(
            Record(
                job,
                found["waiting"],
                found["finished"],
                found["attempts"],
                found["audit"],
                found["unknowns"] if there else None,
                NO_BOUND if bound is None else int(bound),
            )
        )
    return records


__all__ = ["Entry", "Record", "Refusal", "read", "replay", "replay_job"]

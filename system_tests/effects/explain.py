"""Why a job ended as it did: what the record says, held against the provider's journal and the answers to cancels.

``read`` collects what is on record; ``explain`` gives the reason in a few words, or fails with all that is known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from taskq.demo.payments.journal import Ledger

Row = dict[str, Any]
BACK_UNSTARTED = frozenset({"lost", "released"})
"""Outcomes after which the body runs again though nobody has said that it may: never once an effect was started."""
BACK_BY_WORD = frozenset({"retry_after", "resolved"})
"""Outcomes after which it runs again because somebody has: its own body, or what resolved it."""


@dataclass
class Record:
    """All that is known of one job.

    Attributes:
        job: Its row in ``all_jobs``; None where there is none.
        attempts: Ended attempts by epoch, in order.
        unknowns: How attempts came to be unknown, by epoch.
        audit: What was done to it on the record.
        workers: The status of every worker, by id.
        cancels: What those who asked to cancel it were answered.
        provider: What the provider's journal has under its key, in order.
        fails: Whether its body fails after the charge.
    """

    job: Row | None = None
    attempts: dict[int, Row] = field(default_factory=dict)
    unknowns: dict[int, Row] = field(default_factory=dict)
    audit: list[Row] = field(default_factory=list)
    workers: Mapping[UUID, str] = field(default_factory=dict, repr=False)
    cancels: list[str] = field(default_factory=list)
    provider: list[str] = field(default_factory=list)
    fails: bool = False

    @property
    def charges(self) -> int:
        return self.provider.count("charged")

    def __str__(self) -> str:
        job = self.job or {}
        lines = [
            f"worker {job.get('worker_id')}: {self.workers.get(job.get('worker_id', UUID(int=0)))}, "
            f"started {job.get('effect_started_at')}, cancel {job.get('cancel_requested_at')}, "
            f"error {_brief(job.get('error'))}",
            *(
                f"attempt {epoch}: {a['outcome']}, started {a['effect_started_at']}, ended {a['ended_at']}, "
                f"{_brief(a['error'])}"
                for epoch, a in self.attempts.items()
            ),
            *(f"attempt {n} unknown: {u['reason']}, {_brief(u['error'])}" for n, u in self.unknowns.items()),
            *(f"audit: {row['action']} by {row['actor']}: {row['details']}" for row in self.audit),
            f"cancels were answered {self.cancels}; the provider: {self.provider}",
        ]
        return "\n".join(f"    {line}" for line in lines)


def _brief(error: object) -> object:
    return {k: v for k, v in error.items() if k != "traceback"} if isinstance(error, dict) else error


def read(
    dsn: str, ledger: Ledger, payments: Mapping[UUID, int], cancels: Mapping[UUID, list[str]]
) -> dict[UUID, Record]:
    """The records of all payments.

    Args:
        dsn: The database.
        ledger: The provider's journal.
        payments: The jobs and their numbers, as ``fails`` takes them.
        cancels: Answers to cancels.
    """
    found = {job: Record(cancels=cancels.get(job, []), fails=fails(number)) for job, number in payments.items()}
    ids = (list(payments),)
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        workers = {row["id"]: row["status"] for row in conn.execute("select id, status from taskq.workers")}
        for row in conn.execute("select * from taskq.all_jobs where id = any(%s)", ids):
            assert found[row["id"]].job is None, f"twice in the database: {row}"
            found[row["id"]].job = row
        for row in conn.execute("select * from taskq.attempts where job_id = any(%s) order by claim_epoch", ids):
            assert row["claim_epoch"] not in found[row["job_id"]].attempts, f"an attempt is twice on record: {row}"
            found[row["job_id"]].attempts[row["claim_epoch"]] = row
        for row in conn.execute("select * from taskq.unknowns where job_id = any(%s)", ids):
            found[row["job_id"]].unknowns[row["claim_epoch"]] = row
        for row in conn.execute(
            "select * from taskq.audit where subject = any(%s::text[]) order by at", ([*map(str, payments)],)
        ):
            found[UUID(row["subject"])].audit.append(row)
    under, keys = defaultdict[str, list[str]](list), defaultdict[str, set[str]](set)
    for entry in ledger.entries:
        if entry.event == "asked":
            keys[entry.payment].add(entry.key)
    of_key = {key: payment for payment, known in keys.items() for key in known}
    for entry in ledger.entries:
        under[of_key.get(entry.key, entry.key)].append(entry.event)
    for job, record in found.items():
        name = f"p{payments[job]}"
        assert len(keys[name]) <= 1, f"{name} was asked for under several keys: {keys[name]}"
        record.workers = workers
        # A key that was closed before anything was asked under it is known by itself alone.
        record.provider = under[name] + under[str(job)]
    return found


def fails(number: int) -> bool:
    """Whether the body of this payment fails after its charge."""
    return number % 41 == 0


def explain(record: Record, *, reconciled: bool) -> str:
    """The reason why a job ended as it did.

    Args:
        record: What is known of it.
        reconciled: Whether its task has a hook, so that nothing may stay unknown.

    Raises:
        AssertionError: The record does not explain it.
    """
    job = record.job
    assert job is not None, f"the job is lost: {record}"
    try:
        _check_attempts(record, job)
        match job["status"]:
            case "succeeded":
                return _succeeded(record, job)
            case "failed":
                return _failed(record, job)
            case "cancelled":
                return _cancelled(record, job)
            case "unknown":
                assert not reconciled, "nothing has reconciled it"
                return _unknown(record, job)
            case other:
                raise AssertionError(f"it is {other} in the end")
    except AssertionError as exc:
        raise AssertionError(
            f"job {job['id']} is {job['status']}, and that is not explained: {exc}\n{record}"
        ) from None


def _check_attempts(record: Record, job: Row) -> None:
    open_epoch = {job["claim_epoch"]} if job["status"] == "unknown" else set()
    on_record = set(record.attempts) | open_epoch
    assert on_record == set(range(1, job["claim_epoch"] + 1)), "attempts are missing on record"
    assert len(record.attempts) + len(open_epoch) == job["claim_epoch"], "an attempt is both open and ended"
    last = job["claim_epoch"]
    for epoch, attempt in record.attempts.items():
        if epoch == last and job["status"] != "unknown":
            continue
        started, outcome = attempt["effect_started_at"] is not None, attempt["outcome"]
        assert outcome in BACK_UNSTARTED | BACK_BY_WORD, f"after {outcome} it ran again"
        assert not (started and outcome in BACK_UNSTARTED), f"its effect was started, and after {outcome} it ran again"
    # Each request but the first needs somebody's word that the one before it did nothing.
    words = sum(a["outcome"] in BACK_BY_WORD for a in record.attempts.values())
    calls = record.provider.count("asked")
    assert calls <= 1 + words, f"the provider was asked {calls} times, on the word of {words}"
    assert record.charges <= 1, f"charged {record.charges} times"
    for epoch in record.unknowns:
        assert epoch in on_record, f"attempt {epoch} became unknown, and is not on record"


def _last(record: Record, job: Row) -> Row:
    attempt = record.attempts.get(job["claim_epoch"])
    assert attempt is not None, "its last attempt is not on record"
    return attempt


def _late(record: Record, job: Row) -> str:
    became = record.unknowns.get(job["claim_epoch"])
    return f" late, after {became['reason']}" if became else ""


def _succeeded(record: Record, job: Row) -> str:
    last = _last(record, job)
    assert record.charges == 1, f"it succeeded, and the provider charged {record.charges} times"
    assert last["effect_started_at"] is not None, "it succeeded without an effect start"
    if last["outcome"] == "resolved":
        word = _resolution(record, job)
        assert word["details"]["happened"] is True, f"resolved as {word['details']}"
        return f"reconciled as happened, after {record.unknowns[job['claim_epoch']]['reason']}"
    assert last["outcome"] == "succeeded", last["outcome"]
    return f"told{_late(record, job)}"


def _resolution(record: Record, job: Row) -> Row:
    assert job["claim_epoch"] in record.unknowns, "resolved, and never unknown"
    words = [row for row in record.audit if row["action"] == "resolve"]
    assert words, "resolved by nobody"
    assert str(words[-1]["actor"]).startswith("reconcile:"), f"resolved by {words[-1]['actor']}"
    return words[-1]


def _kind(job: Row) -> str:
    error = job["error"]
    assert isinstance(error, dict), f"no error is on record: {error}"
    return str(error.get("type"))


def _failed(record: Record, job: Row) -> str:
    assert _last(record, job)["outcome"] in {"failed", "lost"}, _last(record, job)["outcome"]
    return f"{_why_it_failed(record, _kind(job))}{_late(record, job)}"


def _why_it_failed(record: Record, kind: str) -> str:
    match kind.rpartition(".")[2]:
        case "Declined":
            assert record.charges == 0, "the provider did not decline it"
            assert "declined" in record.provider, "the provider did not decline it"
            return "declined"
        case "OutOfStock":
            assert record.fails, "it was not to fail, or was not charged"
            assert record.charges == 1, "it was not to fail, or was not charged"
            return "failed after the charge"
        case "Refused":
            assert record.charges == 0, "its key was not closed"
            assert "closed" in record.provider, "its key was not closed"
            return "its key was closed when it was reconciled"
        case "RecoveryExhausted":
            assert not record.provider, "lost for good, and the provider was asked"
            return "lost too often before its effect"
        case other:
            raise AssertionError(f"its error is a {other}")


def _cancelled(record: Record, job: Row) -> str:
    words = [row for row in record.audit if row["action"] == "cancel"]
    assert words, "nobody cancelled it on the record"
    assert {"cancelled", "requested"} & set(record.cancels), f"who cancelled it was answered {record.cancels}"
    last = record.attempts.get(job["claim_epoch"])
    if record.charges:
        assert record.fails, "it is cancelled over a charge that nobody told of"
        return "cancelled, when it failed after the charge"
    if last is None or last["effect_started_at"] is None:
        return "cancelled before its effect"
    if last["outcome"] == "resolved":
        assert _resolution(record, job)["details"]["happened"] is False, "resolved as happened"
        return "cancelled, reconciled as not happened"
    assert {"declined", "closed"} & set(record.provider), "started, not charged, and nobody says why not"
    return "cancelled, when the provider refused it"


def _unknown(record: Record, job: Row) -> str:
    became = record.unknowns.get(job["claim_epoch"])
    assert became is not None, "nothing says since when or why"
    if job["effect_started_at"] is None:
        assert not record.provider, "its effect was not started, and the provider was asked"
        # Its worker could not learn whether the start was committed, and so did not call the body.
        assert became["reason"] == "not_confirmed", f"{became['reason']}, and its effect was never started"
        return "unknown: the start was not confirmed, and the body not called"
    match became["reason"]:
        case "worker_lost":
            assert record.workers.get(job["worker_id"], "gone") in {"lost", "gone"}, "its worker was not lost"
        case "told":
            assert "OutcomeUnknown" in str(became["error"]), became["error"]
            assert record.provider.count("asked") == 1, "it knew nothing of what it never asked"
        case "shutdown" | "not_confirmed":
            pass
        case other:
            raise AssertionError(f"its reason is {other}")
    return f"unknown: {became['reason']}"


def explain_all(records: Mapping[UUID, Record], *, reconciled: bool) -> dict[str, int]:
    """How many jobs ended for each reason; fails with the first few that are not explained."""
    reasons: dict[str, int] = defaultdict(int)
    wrong = []
    for record in records.values():
        try:
            reasons[explain(record, reconciled=reconciled)] += 1
        except AssertionError as exc:
            wrong.append(str(exc))
    assert not wrong, _shortened(wrong)
    return dict(sorted(reasons.items()))


def _shortened(wrong: Iterable[str]) -> str:
    listed = list(wrong)
    return f"{len(listed)} jobs are not explained:\n" + "\n\n".join(listed[:5])

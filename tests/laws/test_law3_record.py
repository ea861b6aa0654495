"""Law 3: every ended attempt is on record exactly once, and what is on record stays as it is."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from sql import (
    End,
    attempts,
    claim_one,
    dump,
    end,
    enqueue,
    exchange,
    get,
    lose,
    make_due,
    refused,
    register,
    resolve,
    retry,
    rows,
    running,
    settle,
    unknown,
    violations,
)

Conn = psycopg.Connection[Any]


def test_attempts_on_record_equal_the_epoch_along_a_whole_life(conn: Conn) -> None:
    job = enqueue(conn, max_attempts=9)
    expected: list[tuple[int, str]] = []
    worker = register(conn)
    for outcome, recorded in [
        ("retry", "failed"),
        ("retry_after", "retry_after"),
        ("snooze", "snoozed"),
        ("release", "released"),
        ("lost", "lost"),
        ("failed", "failed"),
        ("reopened", ""),
        ("succeeded", "succeeded"),
    ]:
        if outcome == "reopened":
            assert retry(conn, job) == "reopened"
        else:
            make_due(conn, job)
            epoch = claim_one(conn, worker)["claim_epoch"]
            if outcome == "lost":
                lose(conn, worker)
                assert settle(conn) == {job: "pending"}
                worker = register(conn)
            else:
                assert end(conn, worker, End(job, epoch, outcome, error=None)) == 1
            expected.append((epoch, recorded))
        assert attempts(conn, job) == expected
        assert violations(conn) == []


@pytest.mark.parametrize(
    ("outcome", "recorded"),
    [("retry", "failed"), ("retry_after", "retry_after"), ("snooze", "snoozed"), ("release", "released")],
)
def test_an_end_that_goes_back_leaves_its_whole_record(conn: Conn, outcome: str, recorded: str) -> None:
    worker, job = running(conn)
    before = get(conn, job)
    assert end(conn, worker, End(job, 1, outcome, 77, error={"type": "E", "message": "m"}, delay=5)) == 1
    [record] = rows(conn, "select * from taskq.ledger where job_id = %s", job)
    assert record.pop("ended_at") >= before["claimed_at"]
    assert record == {
        "job_id": job,
        "claimed_at": before["claimed_at"],
        "claim_epoch": 1,
        "worker_id": worker,
        "outcome_id": 77,
        "effect_started_at": None,
        "attempt": int(outcome == "retry"),
        "generation": 0,
        "outcome": recorded,
        "error": {"type": "E", "message": "m"},
    }


@pytest.mark.parametrize("order", [("succeeded", "failed"), ("failed", "succeeded")])
@pytest.mark.parametrize("ids", [(1, 2), (2, 1)])
def test_two_terminal_outcomes_for_one_attempt_in_one_exchange_end_it_once(
    conn: Conn, order: tuple[str, str], ids: tuple[int, int]
) -> None:
    worker, job = running(conn)
    answer = exchange(conn, worker, [End(job, 1, told, n) for told, n in zip(order, ids, strict=True)])
    # As told first; the other outcome is not on record.
    assert attempts(conn, job) == [(1, order[0])]
    assert [(row["kind"], row["job_id"], row["claim_epoch"]) for row in answer] == [("missed", job, 1)]
    assert violations(conn) == []


@pytest.mark.parametrize(
    "order", [("retry", "succeeded"), ("succeeded", "retry"), ("retry", "snooze"), ("snooze", "retry")]
)
def test_two_outcomes_of_different_kinds_in_one_exchange_end_the_attempt_as_told_first(
    conn: Conn, order: tuple[str, str]
) -> None:
    worker, job = running(conn)
    answer = exchange(conn, worker, [End(job, 1, order[0], 1), End(job, 1, order[1], 2)])
    [record] = rows(conn, "select outcome_id from taskq.attempts where job_id = %s", job)
    assert record["outcome_id"] == 1
    assert [row["kind"] for row in answer] == ["missed"]
    assert violations(conn) == []


def test_an_old_end_sent_again_beside_the_current_one_changes_nothing(conn: Conn) -> None:
    """The answer to the first was lost, and the worker has claimed the job again meanwhile."""
    worker, job = running(conn)
    old = End(job, 1, "release", 1)
    assert end(conn, worker, old) == 1
    assert claim_one(conn, worker)["claim_epoch"] == 2
    answer = exchange(conn, worker, [old, End(job, 2, "succeeded", 2)])
    assert attempts(conn, job) == [(1, "released"), (2, "succeeded")]
    assert answer == []
    # The other way round: a terminal one that is old.
    worker, job = running(conn)
    assert end(conn, worker, End(job, 1, "retry", 1)) == 1
    make_due(conn, job)
    claim_one(conn, worker)
    answer = exchange(conn, worker, [End(job, 1, "failed", 3), End(job, 2, "succeeded", 2)])
    assert attempts(conn, job) == [(1, "failed"), (2, "succeeded")]
    assert [(row["kind"], row["claim_epoch"]) for row in answer] == [("missed", 1)]
    assert violations(conn) == []


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(("old", "now"), [("release", "retry"), ("retry", "snooze"), ("snooze", "release")])
def test_the_outcome_on_record_is_that_of_its_own_epoch(conn: Conn, old: str, now: str, order: int) -> None:
    worker, job = running(conn)
    assert end(conn, worker, End(job, 1, old, 1)) == 1
    assert claim_one(conn, worker)["claim_epoch"] == 2
    # One of an epoch before and one of an epoch after: in whichever order they are joined, one of them comes first.
    sent = [End(job, 1, old, 1), End(job, 2, now, 2, delay=60), End(job, 3, old, 3, delay=60)]
    assert [row["claim_epoch"] for row in exchange(conn, worker, sent[::order])] == [3]
    found = rows(conn, "select claim_epoch, outcome_id from taskq.attempts where job_id = %s order by 1", job)
    assert [(row["claim_epoch"], row["outcome_id"]) for row in found] == [(1, 1), (2, 2)]
    assert violations(conn) == []


@pytest.mark.parametrize("first", ["succeeded", "failed", "retry", "release"])
def test_a_second_outcome_in_a_later_exchange_is_missed_and_changes_nothing(conn: Conn, first: str) -> None:
    worker, job = running(conn)
    assert exchange(conn, worker, [End(job, 1, first, 1)]) == []
    before = dump(conn)
    for second in ("succeeded", "failed", "retry", "snooze"):
        [missed] = exchange(conn, worker, [End(job, 1, second, 2)])
        assert (missed["kind"], missed["job_id"], missed["claim_epoch"]) == ("missed", job, 1)
        assert dump(conn) == before


def test_the_same_end_sent_again_is_confirmed_by_its_outcome_id(conn: Conn) -> None:
    worker, job = running(conn)
    for _ in range(2):
        assert exchange(conn, worker, [End(job, 1, "succeeded", 9)]) == []
    worker, job = running(conn)
    for _ in range(2):
        assert exchange(conn, worker, [End(job, 1, "retry", 9, delay=60)]) == []
    assert violations(conn) == []


def test_a_record_of_another_epoch_confirms_nothing(conn: Conn) -> None:
    worker, job = running(conn)
    assert exchange(conn, worker, [End(job, 1, "retry", 9)]) == []
    [missed] = exchange(conn, worker, [End(job, 2, "retry", 9)])
    assert (missed["kind"], missed["claim_epoch"]) == ("missed", 2)


def test_resolving_and_late_ends_are_on_record_once(conn: Conn) -> None:
    worker, job = unknown(conn)
    assert end(conn, worker, End(job, 1, "succeeded", result={"n": 1})) == 1
    assert attempts(conn, job) == [(1, "succeeded")]
    _, job = unknown(conn)
    assert resolve(conn, job, happened=True, result={"n": 2}) == "succeeded"
    assert attempts(conn, job) == [(1, "resolved")]
    assert (get(conn, job)["status"], get(conn, job)["result"]) == ("succeeded", {"n": 2})
    assert violations(conn) == []


CHANGES = [
    "update taskq.history set status = 'succeeded', outcome = 'succeeded'",
    "update taskq.history set result = '1'",
    "update taskq.history set error = '{}'",
    "update taskq.history set finished_at = finished_at + interval '1 ms'",
    "update taskq.history set attempt = attempt + 1",
    "update taskq.history set claim_epoch = claim_epoch + 1",
    "update taskq.history set pruned_attempts = pruned_attempts - 1",
    "update taskq.ledger set outcome = 'succeeded'",
    "update taskq.ledger set error = null",
    "update taskq.ledger set job_id = taskq.new_id()",
    "delete from taskq.ledger",
    "truncate taskq.history",
    "truncate taskq.ledger",
    "truncate taskq.audit",
    "update taskq.audit set actor = 'nobody'",
    "delete from taskq.audit",
    "update taskq.policies set spec = '{}'",
    "update taskq.policies set id = 'other'",
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_record_is_append_only_for_the_superuser_too(conn: Conn, change: str) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "retry", error={"type": "E"}))
    make_due(conn, job)
    claim_one(conn, worker)
    end(conn, worker, End(job, 2, "failed", error={"type": "E"}))
    conn.execute("update taskq.history set pruned_attempts = 1 where id = %s", (job,))
    conn.execute("select taskq.pause_queue('q')")
    before = dump(conn)
    assert refused(conn, change) == "WF004"
    assert dump(conn) == before


def test_a_held_job_without_reason_and_an_end_without_outcome_are_refused(conn: Conn) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "release"))
    assert refused(conn, "update taskq.jobs set status = 'held' where id = %s", job) == "23514"
    assert refused(conn, "update taskq.jobs set status = 'held', held_reason = 'signal' where id = %s", job) == ""
    claim_one(conn, worker)
    end(conn, worker, End(job, 2, "failed"))
    again = (
        "insert into taskq.history select (jsonb_populate_record(h, %s::jsonb)).* from taskq.history h where h.id = %s"
    )
    assert refused(conn, again, '{"finished_at": "2100-01-01"}', job) == "23514"  # no partition
    later = "select (finished_at + interval '1 ms')::text as at from taskq.history where id = %s"
    at = rows(conn, later, job)[0]["at"]
    assert refused(conn, again, f'{{"finished_at": "{at}"}}', job) == ""
    assert refused(conn, again, f'{{"finished_at": "{at}", "outcome": null}}', job) == "23514"
    assert refused(conn, again, f'{{"finished_at": "{at}", "worker_id": null}}', job) == "23514"
    assert refused(conn, again, f'{{"finished_at": "{at}", "status": "pending"}}', job) == "23514"
    assert refused(conn, again, f'{{"finished_at": "{at}", "outcome": "exploded"}}', job) == "23514"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        ("failed", "succeeded"),
        ("failed", "cancelled"),
        ("failed", "released"),
        ("cancelled", "succeeded"),
        ("cancelled", "failed"),
        ("succeeded", "failed"),
        ("succeeded", "lost"),
    ],
)
def test_a_status_in_history_fits_its_outcome(conn: Conn, status: str, outcome: str) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "failed"))
    forged = (
        "insert into taskq.history select (jsonb_populate_record(h, jsonb_build_object('status', %s::text, 'outcome',"
        " %s::text, 'finished_at', finished_at + interval '1 ms'))).* from taskq.history h where h.id = %s"
    )
    assert refused(conn, forged, status, outcome, job) == "23514"

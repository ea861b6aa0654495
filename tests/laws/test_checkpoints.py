"""Checkpoints move by compare-and-swap under the fence, and an attempt may end inside of its body's own transaction."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb
from sql import (
    NOBODY,
    End,
    attempts,
    cancel,
    claim_one,
    dump,
    end,
    get,
    lose,
    make_due,
    one,
    register,
    retry,
    rows,
    running,
    settle,
    status,
    unknown,
    violations,
)

Conn = psycopg.Connection[Any]


def save(conn: Conn, worker: UUID, job: UUID, epoch: int, version: int | None, value: object) -> tuple[Any, ...]:
    """The answer, the version that stands, and with a conflict what stands, as JSON text."""
    [row] = rows(conn, "select * from taskq.checkpoint(%s, %s, %s, %s, %s)", worker, job, epoch, version, Jsonb(value))
    return row["answer"], row["version"], row["value"]


def end_inside(conn: Conn, worker: UUID, job: UUID, epoch: int = 1, outcome_id: int = 7, xid: str | None = None) -> str:
    xid = xid or one(conn, "select pg_current_xact_id()::text")
    answer: str = one(conn, "select taskq.end_inside(%s, %s, %s, %s, '1', %s)", worker, job, epoch, outcome_id, xid)
    return answer


def ended_inside(conn: Conn, worker: UUID, job: UUID, epoch: int = 1, outcome_id: int = 7) -> str:
    answer: str = one(conn, "select taskq.ended_inside(%s, %s, %s, %s)", worker, job, epoch, outcome_id)
    return answer


def test_a_checkpoint_moves_from_the_version_that_it_names(conn: Conn) -> None:
    worker, job = running(conn)
    assert save(conn, worker, job, 1, 0, {"page": 1}) == ("moved", 1, None)
    assert save(conn, worker, job, 1, 1, None) == ("moved", 2, None)
    row = get(conn, job)
    assert (row["checkpoint"], row["checkpoint_version"]) == (None, 2)
    assert one(conn, "select checkpoint::text from taskq.jobs where id = %s", job) == "null"
    assert violations(conn) == []


def test_the_same_again_is_a_replay_and_changes_nothing(conn: Conn) -> None:
    worker, job = running(conn)
    save(conn, worker, job, 1, 0, {"page": 1})
    save(conn, worker, job, 1, 1, {"page": 2})
    before = dump(conn)
    assert save(conn, worker, job, 1, 1, {"page": 2}) == ("replay", 2, None)
    assert dump(conn) == before


@pytest.mark.parametrize(("version", "value"), [(0, "b"), (0, "a"), (1, "c"), (3, "b"), (-1, "b"), (None, "b")])
def test_a_wrong_version_is_refused_with_what_stands(conn: Conn, version: int | None, value: str) -> None:
    worker, job = running(conn)
    save(conn, worker, job, 1, 0, "a")
    save(conn, worker, job, 1, 1, "b")
    before = dump(conn)
    assert save(conn, worker, job, 1, version, value) == ("conflict", 2, '"b"')
    assert dump(conn) == before


def test_what_an_earlier_attempt_did_is_no_replay_of_this_one(conn: Conn) -> None:
    worker, job = running(conn)
    save(conn, worker, job, 1, 0, "a")
    end(conn, worker, End(job, 1, "release"))
    claim_one(conn, worker)
    assert save(conn, worker, job, 2, 0, "a") == ("conflict", 1, '"a"')
    assert save(conn, worker, job, 2, 1, "a") == ("moved", 2, None)


def test_only_the_attempt_that_runs_moves_its_checkpoint(conn: Conn) -> None:
    worker, job = running(conn)
    save(conn, worker, job, 1, 0, "a")
    end(conn, worker, End(job, 1, "release"))
    other = register(conn)
    before = dump(conn)
    assert save(conn, worker, job, 1, 1, "b")[0] == "fenced", "it waits"
    assert dump(conn) == before
    assert claim_one(conn, other)["claim_epoch"] == 2
    before = dump(conn)
    for who, epoch in ((worker, 1), (worker, 2), (other, 1), (other, 3), (NOBODY, 2), (uuid4(), 2)):
        assert save(conn, who, job, epoch, 1, "b") == ("fenced", None, None)
    assert dump(conn) == before
    end(conn, other, End(job, 2))
    assert save(conn, other, job, 2, 1, "b")[0] == "fenced", "it has finished"
    assert get(conn, job)["checkpoint"] == "a"


def test_an_attempt_whose_outcome_is_unknown_moves_nothing(conn: Conn) -> None:
    worker, job = unknown(conn)
    before = dump(conn)
    assert save(conn, worker, job, 1, 0, "a")[0] == "fenced"
    assert dump(conn) == before


@pytest.mark.parametrize("ended", ["retry", "retry_after", "snooze", "release", "lost", "reopened"])
def test_a_checkpoint_outlives_its_attempt(conn: Conn, ended: str) -> None:
    worker, job = running(conn)
    save(conn, worker, job, 1, 0, {"page": 1})
    if ended == "lost":
        lose(conn, worker)
        assert settle(conn) == {job: "pending"}
        worker = register(conn)
    elif ended == "reopened":
        end(conn, worker, End(job, 1, "failed", error={"type": "E"}))
        assert get(conn, job)["checkpoint"] == {"page": 1}
        retry(conn, job)
    else:
        end(conn, worker, End(job, 1, ended))
    make_due(conn, job)
    claim_one(conn, worker)
    row = get(conn, job)
    assert (row["checkpoint"], row["checkpoint_version"]) == ({"page": 1}, 1)
    assert save(conn, worker, job, 2, 1, {"page": 2}) == ("moved", 2, None)
    assert violations(conn) == []


def test_an_attempt_ends_inside_of_a_transaction_as_by_any_other_end(conn: Conn) -> None:
    worker, job = running(conn)
    assert end_inside(conn, worker, job) == "ended"
    assert (status(conn, job), get(conn, job)["result"], attempts(conn, job)) == ("succeeded", 1, [(1, "succeeded")])
    assert ended_inside(conn, worker, job) == "committed"
    assert violations(conn) == []


def test_an_end_inside_of_another_transaction_than_the_one_that_was_begun_changes_nothing(conn: Conn) -> None:
    worker, job = running(conn)
    before = dump(conn)
    assert end_inside(conn, worker, job, xid="1") == "another transaction"
    assert dump(conn) == before
    assert ended_inside(conn, worker, job) == "open"


def test_an_end_inside_is_fenced(conn: Conn) -> None:
    worker, job = running(conn)
    other = register(conn)
    before = dump(conn)
    for who, epoch in ((other, 1), (worker, 2), (NOBODY, 1)):
        assert end_inside(conn, who, job, epoch) == "fenced"
        assert ended_inside(conn, who, job, epoch) == "taken"
    assert dump(conn) == before
    end(conn, worker, End(job, 1, "failed", 3))
    assert end_inside(conn, worker, job) == "fenced"
    assert ended_inside(conn, worker, job) == "taken", "another outcome is on record"


def test_a_success_inside_of_a_transaction_wins_over_a_cancel_request(conn: Conn) -> None:
    worker, job = running(conn)
    assert cancel(conn, job) == "requested"
    assert end_inside(conn, worker, job) == "ended"
    assert status(conn, job) == "succeeded"


def test_an_end_inside_settles_an_unknown_job_of_its_own(conn: Conn) -> None:
    worker, job = unknown(conn)
    assert ended_inside(conn, worker, job) == "open"
    assert end_inside(conn, worker, job) == "ended"
    assert status(conn, job) == "succeeded"

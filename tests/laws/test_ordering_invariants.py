"""``check_invariants`` reports what breaks the law of ordering keys: each state starts valid and breaks one rule."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import pytest
from ordering_kit import claimed, ordered
from sql import End, cancel, end, enqueue, get, lose, register, settle, violations

Conn = psycopg.Connection[Any]


class Lines(NamedTuple):
    """A running job with two behind it, a key that a failure halts, and an unknown job that does."""

    running: UUID
    second: UUID
    third: UUID
    failed: UUID
    halted: UUID
    unknown: UUID
    behind_unknown: UUID


@pytest.fixture
def lines(conn: Conn) -> Lines:
    worker, loser = register(conn), register(conn)
    [failed, halted] = ordered(conn, 2, key="halted", halt=True)
    assert claimed(conn, worker) == [failed]
    end(conn, worker, End(failed, outcome="failed"))
    [unknown, behind] = ordered(conn, 2, key="unknown", halt=True)
    assert claimed(conn, loser) == [unknown]
    cancel(conn, unknown)
    lose(conn, loser)
    assert settle(conn) == {unknown: "unknown"}
    [running, second, third] = ordered(conn, 3)
    assert claimed(conn, worker) == [running]
    ordered(conn, 1, key="later", run_in=3600)
    assert violations(conn) == []
    return Lines(running, second, third, failed, halted, unknown, behind)


GIVE = "update taskq.jobs set status = 'pending', held_reason = null where id = %s"


FORGED_LINES = [
    ("ordering_two_at_once", "second", GIVE),
    ("ordering_two_at_once", "behind_unknown", GIVE),
    # Whose line it would be, had the one before it not been taken away.
    ("ordering_waits_for_nothing", "second", "update taskq.jobs set ordering_key = 'k2' where id = %s"),
    (
        "ordering_waits_for_nothing",
        "halted",
        "delete from taskq.ordering_halts where job_id <> %s and key = 'halted'",
    ),
    ("ordering_past_halt", "halted", GIVE),
    (
        "ordering_halted_by_unfinished",
        "running",
        "insert into taskq.ordering_halts (key, job_id, halted_at) values ('k', %s, now())",
    ),
]
"""Codes, the job of ``lines`` that each is told of, and how its line is forged; one more is below."""


@pytest.mark.parametrize(("code", "whose", "forge"), FORGED_LINES)
def test_a_forged_line_is_reported(conn: Conn, lines: Lines, code: str, whose: str, forge: str) -> None:
    job = getattr(lines, whose)
    conn.execute("drop index taskq.jobs_ordering_turn")
    conn.execute("set local session_replication_role = replica")
    assert conn.execute(forge, (job,)).rowcount == 1
    assert violations(conn) == [(code, job)]


def test_a_forged_line_is_reported_where_one_is_overtaken(conn: Conn, lines: Lines) -> None:
    conn.execute("set local session_replication_role = replica")
    conn.execute("update taskq.jobs set status = 'held', held_reason = 'ordering' where id = %s", (lines.second,))
    conn.execute("update taskq.jobs set ordering_key = 'elsewhere' where id = %s", (lines.running,))
    conn.execute(GIVE, (lines.third,))
    assert violations(conn) == [("ordering_out_of_turn", lines.third)]


def test_a_line_at_which_the_sweep_will_look_is_no_violation(conn: Conn, lines: Lines) -> None:
    conn.execute("set local session_replication_role = replica")
    conn.execute("update taskq.jobs set ordering_key = 'k2' where id = %s", (lines.second,))
    assert violations(conn) == [("ordering_waits_for_nothing", lines.second)]
    conn.execute("insert into taskq.ordering_rechecks (key, due_at) values ('k2', now())")
    assert violations(conn) == []


def test_one_that_came_back_or_was_reopened_has_been_overtaken_by_right(conn: Conn, lines: Lines) -> None:
    worker = register(conn)
    [back, other] = ordered(conn, 2, key="back")
    assert claimed(conn, worker) == [back]
    end(conn, worker, End(back, outcome="snooze", delay=60))
    assert get(conn, other)["status"] == "pending"
    later = enqueue(conn, ordering_key="later", run_in=-5)
    assert get(conn, later)["status"] == "pending"
    assert violations(conn) == []

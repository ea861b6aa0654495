"""What giving a turn costs: a few look-ups, however long a line is and whatever its jobs wait for.

Counted in blocks that the server looks at, never in time. Lines are put into the tables as they would stand there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from ordering_kit import HALT, ordered, rechecks, states
from plans_kit import Explained, buffers, explain_all, explained, scans
from sql import Conn, enqueue_many, one, policy, rows

SIZES = (100, 1_000, 10_000)
MOST = 100
"""Blocks; a look-up is about three, and a turn that is given writes into four indexes."""


@pytest.fixture
def conn(dsn: str) -> Iterator[Conn]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        policy(connection)
        ordered(connection, 1, key="before")
        connection.execute("delete from taskq.jobs")
        explain_all(connection)
        connection.execute("alter table taskq.jobs set (autovacuum_enabled = off)")
        connection.execute("analyze taskq.jobs")
        for _ in range(8):
            one(connection, "select taskq.give_turn('before')")
        yield connection


def line(
    conn: Conn,
    key: str,
    n: int,
    *,
    run_at: str = "now() - interval '1 hour'",
    later: bool = False,
    status: str = "held",
    reason: str | None = "ordering",
    halt: bool = False,
    recoveries: int = 0,
) -> None:
    """Put n jobs at the end of a line, as they would stand there."""
    with conn.transaction():
        conn.execute("set local session_replication_role = replica")
        conn.execute(
            "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload, status,"
            " held_reason, ordering_key, ordering_halt, ordering_later, recoveries)"
            f" select {run_at} + i * interval '1 ms', now() - interval '1 hour', 3, 'q', 't', 'p', '{{}}', %s, %s, %s,"
            " %s, %s, %s from generate_series(1, %s) i",
            (status, reason, key, halt, True if later else None, recoveries, n),
        )
        conn.execute("insert into taskq.ordering_keys values (%s, now()) on conflict do nothing", (key,))


def give(conn: Conn, key: str) -> tuple[str, int]:
    """Give the turn of a line; the answer, and how many blocks were looked at for it."""
    with explained(conn) as notices:
        answer = one(conn, f"select taskq.give_turn('{key}') -- {key}")
    return answer, buffers(Explained(notices).of(f"-- {key}"))


LATER: dict[str, Any] = {"run_at": "now() + interval '1 day'", "later": True}
LINES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "waiting": ("given", [{}]),
    "all due later": ("none", [LATER]),
    "due behind those due later": ("given", [LATER, {"n": 1}]),
    "due before those due later": ("given", [{"n": 1}, LATER]),
    "waiting for something else": ("none", [{"reason": "signal"}]),
    "behind one that waits for something else": ("none", [{"n": 1, "reason": "signal"}, {}]),
    "behind a running one": ("none", [{"n": 1, "status": "pending", "reason": None}, {}]),
    "behind a suspect": ("none", [{"n": 1, "status": "pending", "reason": None, "recoveries": 2}, {}]),
    "halted": ("none", [{"halt": True}]),
    "half due later and half due": ("given", [LATER, {}]),
}


@pytest.mark.parametrize("statistics", ["stale", "fresh", "of this line alone"])
@pytest.mark.parametrize("which", LINES)
def test_a_turn_costs_the_same_however_long_its_line_is(conn: Conn, which: str, statistics: str) -> None:
    answer, parts = LINES[which]
    costs = []
    for size in SIZES:
        key = f"{size} {which}"
        for part in parts:
            line(conn, key, **{"n": size} | part)
        if which == "halted":
            conn.execute(
                "insert into taskq.ordering_halts select %s, '00000000-0000-7000-8000-000000000000', now()", (key,)
            )
        if statistics == "of this line alone":
            # To the planner each row seems to be of the line that is looked for.
            conn.execute("delete from taskq.jobs where ordering_key <> %s", (key,))
            conn.execute("vacuum taskq.jobs")
        if statistics != "stale":
            conn.execute("analyze taskq.jobs")
            # Plans are made anew, which is not what is counted.
            conn.execute("discard plans")
            line(conn, f"warm {size}", 1)
            assert give(conn, f"warm {size}")[0] == "given"
        given, cost = give(conn, key)
        assert given == answer
        costs.append(cost)
    assert max(costs) <= MOST, costs


def test_those_that_were_cancelled_are_walked_over_once(conn: Conn) -> None:
    for size in SIZES:
        key = f"{size}"
        line(conn, key, size + 2)
        front = "select id from taskq.jobs where ordering_key = %s order by id limit %s"
        conn.execute(f"delete from taskq.jobs where id = any(array({front}))", (key, size))
        assert give(conn, key)[0] == "given"
        conn.execute("delete from taskq.jobs where ordering_key = %s and status = 'pending'", (key,))
        answer, cost = give(conn, key)
        # What remains until vacuum comes is a block of the index for some hundred of them.
        assert (answer, cost <= MOST + size // 20) == ("given", True), (size, cost)


def test_an_enqueue_costs_the_same_however_long_its_line_is(conn: Conn) -> None:
    named = policy(conn, "goes-on", ordering="continue")
    costs: dict[str, list[int]] = {"later": [], "due": []}
    for size in SIZES:
        for kind in costs:
            key = f"{kind} {size}"
            line(conn, key, size, **(LATER if kind == "later" else {}))
            with explained(conn) as notices:
                enqueue_many(conn, 1, ordering_keys=[key], policy_id=named, run_in=3600 if kind == "later" else 0)
            costs[kind].append(buffers(Explained(notices).of("select * from taskq.enqueue_many(")))
    for kind, of_kind in costs.items():
        assert max(of_kind) <= of_kind[0] + MOST, (kind, of_kind)


def test_where_many_come_due_at_once_the_sweep_puts_them_into_line_in_order(conn: Conn) -> None:
    """An end must not take long for it; and nobody is passed by one that came due before it."""
    for size in SIZES:
        key = f"{size}"
        # The first of the line is the last to come due.
        line(conn, key, size, run_at="now() - interval '1 min' - i * interval '2 ms'", later=True)
        [first] = rows(conn, "select id from taskq.jobs where ordering_key = %s order by id limit 1", key)
        if size > SIZES[0]:
            answer, cost = give(conn, key)
            assert (answer, rechecks(conn)) == ("busy", [key])
            assert cost <= 100 * MOST, (size, cost)
        else:
            assert give(conn, key)[0] == "given"
        while rechecks(conn):
            one(conn, "select taskq.sweep_orderings()")
        assert states(conn, [first["id"]]) == ["pending"]
        left = "select count(*) from taskq.jobs where ordering_key = %s and ordering_later"
        assert one(conn, left, key) == 0


def test_a_sweep_gives_all_its_turns_in_one_statement_by_indexes(conn: Conn) -> None:
    for n in range(50):
        line(conn, f"k{n}", 20)
        line(conn, f"k{n}", 20, **LATER)
    line(conn, "long", 10_000)
    line(conn, "elsewhere", 10_000, **LATER)
    conn.execute("insert into taskq.ordering_rechecks select 'k' || n, now() from generate_series(0, 49) n")
    with explained(conn) as notices:
        assert one(conn, "select taskq.sweep_orderings() -- all") == 50
    found = Explained(notices)
    given = found.of("set status = 'pending'")
    assert scans(given) == {("Index Scan", "jobs_pkey")}
    assert {name for _, name in scans(found.of("set ordering_later = null"))} <= {"jobs_ordering_later", "jobs_pkey"}
    assert buffers(found.of("-- all")) <= 50 * 2 * MOST


def test_the_last_of_a_line_is_found_by_an_index_also_where_it_has_failed(conn: Conn) -> None:
    policy(conn, HALT, ordering="halt")
    line(conn, "k", 10_000)
    # To the planner every second job is of the line; all of them are older than the others.
    line(conn, "other", 10_000)
    conn.execute("insert into taskq.ordering_halts select 'k', gen_random_uuid(), now() from generate_series(1, 1000)")
    for statistics in ("stale", "fresh"):
        if statistics == "fresh":
            conn.execute("analyze taskq.jobs")
            conn.execute("discard plans")
        one(conn, "select taskq.last_in_line('x')")
        with explained(conn) as notices:
            one(conn, f"select taskq.last_in_line('k') -- {statistics}")
        assert buffers(Explained(notices).of(f"-- {statistics}")) <= MOST, statistics

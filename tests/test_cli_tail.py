"""``taskq jobs tail``: a line for each start and end, once, and cheap however long the record is."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sql as q
from cli_kit import Cli, make_cli  # noqa: F401
from helpers import eventually

from taskq.cli import tail
from taskq.cli.database import Database

Conn = psycopg.Connection[Any]


def events(conn: Conn, looks: int, between: Any, **filters: Any) -> list[tuple[str, str]]:
    """What is told in some looks, while ``between`` does something before each but the first."""
    done = iter(range(1, looks))
    ended = False

    def pause(_: float) -> None:
        nonlocal ended
        if (n := next(done, None)) is None:
            ended = True
        else:
            between(n)

    class Clock:
        sleep = staticmethod(pause)
        monotonic = staticmethod(lambda: 1e9 if ended else 0.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "time", Clock)
        found = tail._events(Database(conn, "taskq"), filters.get("queues"), filters.get("tasks"), 1.0)
        return [(row["id"], row["event"]) for row in found]


def test_each_start_and_end_is_told_once(conn: Conn) -> None:
    before = q.enqueue(conn)
    q.cancel(conn, before)
    told: list[tuple[str, str]] = []

    def between(n: int) -> None:
        if n == 1:
            worker, job = q.running(conn)
            told.append((str(job), "started"))
        elif n == 2:
            [(id_, _)] = told
            job = UUID(id_)
            [claimed] = q.rows(conn, "select claimed_by from taskq.jobs where id = %s", job)
            error = {"type": "Oops", "message": "no"}
            q.end(conn, claimed["claimed_by"], q.End(job, outcome="retry", error=error, delay=9))
            told.append((id_, "failed"))
        elif n == 3:
            q.cancel(conn, UUID(told[0][0]))
            told.append((told[0][0], "cancelled"))

    found = events(conn, 7, between)
    record = "select job_id, outcome, claimed_at, ended_at from taskq.attempts"
    assert found == told, (q.rows(conn, record), q.rows(conn, "select job_id, ended_at, ctid from taskq.ledger"))
    assert len(told) == 3
    assert events(conn, 3, lambda n: q.cancel(conn, q.enqueue(conn, queue="b")), queues=["a"]) == []


def test_what_commits_late_and_a_new_day_are_not_missed(conn: Conn, dsn: str) -> None:
    q.control_clock(conn)
    conn.execute("select taskq.ensure_partitions()")
    late, early = q.enqueue(conn), q.enqueue(conn)
    with psycopg.connect(dsn) as slow:

        def between(n: int) -> None:
            if n == 1:
                q.cancel(slow, late)
            elif n == 2:
                q.cancel(conn, early)
            elif n == 3:
                slow.commit()
            elif n == 4:
                q.shift_clock(conn, "1 day")
                q.cancel(conn, q.enqueue(conn, task="tomorrow"))

        found = events(conn, 6, between)
    assert [event[0] for event in found[:2]] == [str(early), str(late)]
    assert len(found) == 3


def test_an_end_that_is_written_where_space_was_freed_is_told(conn: Conn) -> None:
    jobs = [row["job_id"] for row in q.enqueue_many(conn, 300, payloads=[{"x": "y" * 500}] * 300)]
    for job in jobs:
        q.cancel(conn, job)
    for job in jobs[:250]:
        q.retry(conn, job)
    conn.execute("vacuum taskq.history")
    found = events(conn, 3, lambda n: q.cancel(conn, jobs[n]))
    place = "select (ctid::text::point)[0]::int from taskq.history where id = %s"
    assert [q.one(conn, place, job) < 5 for job in jobs[1:3]] == [True, True], "no space was freed in front"
    assert found == [(str(job), "cancelled") for job in jobs[1:3]]


def test_a_look_reads_the_end_of_the_record_only(conn: Conn) -> None:
    from taskq.db.queries import load

    for row in q.enqueue_many(conn, 300, payloads=[{"x": "y" * 500}] * 300):
        q.cancel(conn, row["job_id"])
    day = q.one(conn, "select (taskq.now() at time zone 'UTC')::date")
    blocks = q.one(conn, f"select pg_relation_size('taskq.history_{day:%Y%m%d}') / 8192")
    assert blocks > 5
    queries = load("cli", "taskq")
    since = q.one(conn, "select taskq.now()") - timedelta(hours=1)
    conn.execute("analyze taskq.history")
    cursor = psycopg.RawCursor(conn)
    arguments = [day, since, f"({blocks - 1},0)", None, None, 100]
    plan = str(cursor.execute(f"explain {queries['tail_history']}".encode(), arguments).fetchall())
    assert "Tid Range Scan" in plan, plan
    assert plan.count("history_") == 1, plan
    assert len(cursor.execute(queries["tail_history"].encode(), arguments).fetchall()) < 100


def test_the_command_ends_at_its_limit_or_its_time(cli: Cli, conn: Conn) -> None:
    assert cli.ok("jobs", "tail", "--timeout", "0").out == ""
    with cli.process("jobs", "tail", "--limit", "2", "--timeout", "60", "--json") as process:

        def ended() -> bool:
            q.cancel(conn, q.enqueue(conn, task="t"))
            return process.poll() is not None

        eventually(ended, 60, interval=0.2)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    told = [json.loads(line) for line in output.splitlines()]
    assert [row["event"] for row in told] == ["cancelled", "cancelled"]

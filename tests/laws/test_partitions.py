"""Daily partitions of history and ledger: missing ones refuse ends and are cured; expired ones go and leave a note."""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any

import psycopg
import pytest
from sql import (
    End,
    cancel,
    claim_one,
    control_clock,
    drop_expired,
    dump,
    end,
    enqueue,
    get,
    make_due,
    one,
    register,
    resolve,
    retry,
    rows,
    running,
    sessions,
    shift_clock,
    unknown,
    violations,
)

Conn = psycopg.Connection[Any]


def days(conn: Conn, parent: str) -> list[dt.date]:
    return [row["day"] for row in rows(conn, "select day from taskq.partitions where parent = %s order by day", parent)]


def test_partitions_reach_from_yesterday_to_two_weeks_ahead(conn: Conn) -> None:
    today = one(conn, "select (now() at time zone 'UTC')::date")
    expected = [today + dt.timedelta(days=n) for n in range(-1, 15)]
    assert days(conn, "history") == days(conn, "ledger") == expected
    assert one(conn, "select taskq.ensure_partitions()") == 0


def test_made_partitions_are_like_the_first(conn: Conn) -> None:
    made = one(conn, "select taskq.ensure_partitions('2099-01-01', '2099-01-02')")
    assert made == 4
    shape = (
        "select regexp_replace(pg_get_indexdef(i.indexrelid), '_\\d{8}', '', 'g') as made from pg_index i"
        " where i.indrelid = %s::regclass union all"
        " select conname || pg_get_constraintdef(oid) from pg_constraint where conrelid = %s::regclass"
        " and contype = 'c' union all"
        " select tgname from pg_trigger where tgrelid = %s::regclass order by 1"
    )
    first = days(conn, "history")[0].strftime("%Y%m%d")
    for parent in ("history", "ledger"):
        a, b = (f"taskq.{parent}_{day}" for day in (first, "20990102"))
        expected, found = rows(conn, shape, a, a, a), rows(conn, shape, b, b, b)
        assert len(found) == len(expected) > 0


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "retry", "snooze", "release"])
def test_an_end_without_its_partition_is_refused_changes_nothing_and_is_cured(conn: Conn, outcome: str) -> None:
    control_clock(conn)
    worker, job = running(conn)
    shift_clock(conn, "20 days")
    before = dump(conn)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        end(conn, worker, End(job, 1, outcome))
    assert caught.value.sqlstate == "23514"
    assert dump(conn) == before
    assert one(conn, "select taskq.ensure_partitions()") > 0
    assert end(conn, worker, End(job, 1, outcome)) == 1
    assert violations(conn) == []


@pytest.mark.parametrize("parent", ["history", "ledger"])
def test_a_partition_that_was_detached_by_hand_is_put_back_with_what_it_holds(conn: Conn, parent: str) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "retry"))
    make_due(conn, job)
    claim_one(conn, worker)
    end(conn, worker, End(job, 2))
    for n in (-1, 0, 3):
        day = one(conn, "select to_char((now() at time zone 'UTC')::date + %s, 'YYYYMMDD')", n)
        conn.execute(f"alter table taskq.{parent} detach partition taskq.{parent}_{day}")
    before = days(conn, parent)
    assert one(conn, "select taskq.ensure_partitions()") == 2
    # That of yesterday needs no end any more: whoever took it away may have meant it.
    assert len(days(conn, parent)) == len(before) + 2
    assert one(conn, "select count(*) from taskq.attempts where job_id = %s", job) == 2
    assert violations(conn) == []


@pytest.mark.parametrize("parent", ["history", "ledger"])
def test_what_operators_call_puts_back_the_partition_of_today(conn: Conn, parent: str) -> None:
    job = enqueue(conn)
    day = one(conn, "select to_char((now() at time zone 'UTC')::date, 'YYYYMMDD')")
    conn.execute(f"alter table taskq.{parent} detach partition taskq.{parent}_{day}")
    assert cancel(conn, job) == "cancelled"
    assert f"{parent}_{day}" in [row["name"] for row in rows(conn, "select name from taskq.partitions")]


def expire(conn: Conn) -> list[str]:
    """Drop all that retention drops; give the names."""
    dropped: list[str] = []
    while name := drop_expired(conn):
        dropped.append(name)
        assert violations(conn) == []
    return dropped


def test_retention_drops_expired_partitions_and_notes_pruned_attempts(conn: Conn) -> None:
    control_clock(conn)
    conn.execute("update taskq.installation set history_retention = '30 days'")
    worker = register(conn, lease=1e9)
    gone, waiting, late = (enqueue(conn, max_attempts=9) for _ in range(3))
    for _ in range(3):
        claim_one(conn, worker)
    for job in (gone, waiting, late):
        end(conn, worker, End(job, 1, "retry"))
        make_due(conn, job)
    for _ in range(3):
        claim_one(conn, worker)
    end(conn, worker, End(gone, 2))
    end(conn, worker, End(waiting, 2, "snooze", delay=1))
    end(conn, worker, End(late, 2, "retry", delay=3600))
    # A job cancelled while it waited has no final attempt; its one attempt is in the ledger alone.
    cancelled = enqueue(conn)
    assert claim_one(conn, worker)["job_id"] == cancelled
    end(conn, worker, End(cancelled, 1, "retry", delay=3600))
    assert expire(conn) == []
    shift_clock(conn, "20 days")
    conn.execute("select taskq.ensure_partitions()")
    assert claim_one(conn, worker, skip=[waiting, cancelled])["job_id"] == late
    end(conn, worker, End(late, 3, "failed"))
    cancel(conn, cancelled)
    assert violations(conn) == []
    shift_clock(conn, "9 days")
    assert expire(conn) == []
    shift_clock(conn, "2 days")
    conn.execute("select taskq.ensure_partitions()")
    dropped = expire(conn)
    # Those of yesterday and today, of each parent; never a ledger's before that day's history.
    assert [name.rsplit("_", 1)[0] for name in dropped] == ["history", "ledger"] * 2
    assert rows(conn, "select * from taskq.all_jobs where id = %s", gone) == []
    assert get(conn, waiting)["pruned_attempts"] == 2
    assert get(conn, late)["pruned_attempts"] == 2
    assert get(conn, cancelled)["pruned_attempts"] == 1
    # What was pruned is remembered by a reopened job too, and the record goes on.
    for job in (late, cancelled):
        assert retry(conn, job) == "reopened"
        assert violations(conn) == []
    shift_clock(conn, "1 s")
    for _ in range(3):
        row = claim_one(conn, worker)
        end(conn, worker, End(row["job_id"], row["claim_epoch"]))
    assert violations(conn) == []


def test_retention_gives_up_soon_when_the_table_is_busy(dsn: str) -> None:
    settings = "select proconfig as set from pg_proc where proname = 'drop_expired_partition'"
    with sessions(dsn, 2) as [reader, leader]:
        assert "lock_timeout=200ms" in one(leader.conn, settings)
        control_clock(leader.conn)
        shift_clock(leader.conn, "40 days")
        for parent in ("history", "ledger"):
            reader.begin()
            reader.do(partial(rows, query=f"select count(*) from taskq.{parent}"))
            before = days(leader.conn, "history"), days(leader.conn, "ledger")
            if parent == "ledger":
                # History's partition goes first, so that of the ledger is the oldest.
                before = before[0][1:], before[1]
                leader.do(lambda conn: conn.execute("alter table taskq.history detach partition taskq." + oldest(conn)))
            with pytest.raises(psycopg.errors.LockNotAvailable):
                leader.do(lambda conn: conn.execute("select taskq.drop_expired_partition()"))
            assert (days(leader.conn, "history"), days(leader.conn, "ledger")) == before
            reader.rollback()
        assert one(leader.conn, "select taskq.drop_expired_partition()").startswith("ledger")


def oldest(conn: Conn) -> str:
    name: str = one(conn, "select name from taskq.partitions where parent = 'history' order by day limit 1")
    return name


def test_retention_waits_for_no_locked_job(dsn: str) -> None:
    with sessions(dsn, 2) as [holder, leader]:
        conn = leader.conn
        control_clock(conn)
        worker, job = running(conn)
        end(conn, worker, End(job, 1, "retry"))
        shift_clock(conn, "40 days")
        conn.execute("select taskq.ensure_partitions()")
        while one(
            conn,
            "select day < (now() at time zone 'UTC')::date or parent = 'history' from taskq.partitions"
            " order by day, parent limit 1",
        ):
            assert one(conn, "select taskq.drop_expired_partition()")
        holder.begin()
        holder.do(lambda c: c.execute("select from taskq.jobs where id = %s for update", (job,)))
        with pytest.raises(psycopg.errors.LockNotAvailable):
            leader.do(lambda c: c.execute("select taskq.drop_expired_partition()"))
        assert get(conn, job)["pruned_attempts"] == 0
        assert violations(conn) == []
        holder.rollback()
        assert one(conn, "select taskq.drop_expired_partition()").startswith("ledger")
        assert get(conn, job)["pruned_attempts"] == 1
        assert violations(conn) == []


@pytest.mark.parametrize("call", ["cancel", "resolve", "resolve_pending", "retry"])
def test_what_operators_call_makes_the_partition_of_today_where_no_worker_has_run_for_weeks(
    conn: Conn, call: str
) -> None:
    control_clock(conn)
    if call.startswith("resolve"):
        _, job = unknown(conn)
        conn.execute("update taskq.jobs set cancel_requested_at = null where %s", (call == "resolve_pending",))
    else:
        job = enqueue(conn)
    if call == "retry":
        assert cancel(conn, job) == "cancelled"
    shift_clock(conn, "20 days")
    if call == "retry":
        assert retry(conn, job) == "reopened"
        expected = "pending"
    elif call == "cancel":
        assert cancel(conn, job) == "cancelled"
        expected = "cancelled"
    else:
        expected = "pending" if call == "resolve_pending" else "succeeded"
        assert resolve(conn, job, call == "resolve") == expected
    assert get(conn, job)["status"] == expected
    today = one(conn, "select (taskq.now() at time zone 'UTC')::date")
    assert today in days(conn, "history")
    assert today in days(conn, "ledger")
    assert violations(conn) == []


@pytest.mark.parametrize("plans", ["nestloop", "hashjoin", "mergejoin"])
def test_a_day_is_asked_for_whatever_the_plan_looks_at_first(conn: Conn, plans: str) -> None:
    # Put to pg_class before the join, the condition meets the names of all its tables.
    for kind in {"nestloop", "hashjoin", "mergejoin"} - {plans}:
        conn.execute(f"set local enable_{kind} = off")
    for scans in ("indexscan", "bitmapscan", "indexonlyscan"):
        conn.execute(f"set local enable_{scans} = off")
    assert days(conn, "history")
    assert one(conn, "select count(*) from taskq.partitions where day < '1970-01-01'") == 0
    assert one(conn, "select taskq.drop_expired_partition()") is None

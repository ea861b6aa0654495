"""The schema explains itself, and its ids are what they say."""

from __future__ import annotations

from typing import Any

import psycopg
from sql import enqueue_many, one, rows

Conn = psycopg.Connection[Any]


def test_every_table_view_column_and_function_has_a_comment(conn: Conn) -> None:
    uncommented = rows(
        conn,
        """
        select c.relname::text as name from pg_class c
         where c.relnamespace = 'taskq'::regnamespace and c.relkind in ('r', 'p', 'v')
           and obj_description(c.oid, 'pg_class') is null
        union all
        select c.relname || '.' || a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid
         where c.relnamespace = 'taskq'::regnamespace and c.relkind in ('r', 'p') and a.attnum > 0
           and not a.attisdropped
           and col_description(c.oid, a.attnum) is null
        union all
        select p.oid::regprocedure::text from pg_proc p
         where p.pronamespace = 'taskq'::regnamespace and obj_description(p.oid, 'pg_proc') is null
        order by 1
        """,
    )
    assert [row["name"] for row in uncommented] == []


def test_new_ids_are_uuid_7_in_order_and_tell_their_time(conn: Conn) -> None:
    before = one(conn, "select clock_timestamp()")
    # Made one after the other, in plpgsql as enqueue does and in plain SQL.
    ids = [row["id"] for row in rows(conn, "select taskq.new_id() as id from generate_series(1, 5000)")]
    after = one(conn, "select clock_timestamp()")
    assert len(set(ids)) == 5000
    assert {(i.version, i.variant) for i in ids} == {(7, "specified in RFC 4122")}
    assert ids == sorted(ids)
    for i in (ids[0], ids[-1]):
        told = one(conn, "select taskq.id_time(%s)", i)
        assert (before - told).total_seconds() < 0.001
        assert told <= after
    a = one(conn, "select taskq.id_time('018f3c2a-0000-7000-8000-000000000000')")
    assert int(a.timestamp() * 1000) == 0x018F3C2A0000


def test_a_batch_gets_ids_of_its_own_in_its_order(conn: Conn) -> None:
    first, second = ([row["job_id"] for row in enqueue_many(conn, 500)] for _ in range(2))
    assert len({*first, *second}) == 1000
    assert first + second == sorted(first + second)
    assert {(i.version, i.variant) for i in first + second} == {(7, "specified in RFC 4122")}
    assert abs((one(conn, "select taskq.id_time(%s)", second[-1]) - one(conn, "select now()")).total_seconds()) < 60


def test_names_are_printable_ascii_without_spaces(conn: Conn) -> None:
    good, bad = ["a", "A-b_c.d/e:f", "~" * 128], ["", "a b", "ä", "a\n", "a" * 129, "\x7f"]
    for name in good + bad:
        assert one(conn, "select taskq.valid_name(%s)", name) is (name in good), repr(name)

"""What the two trades of docs/performance.md gain: ``python -m benchmarks.knobs --jobs 2000 --rounds 3``.

History full and slim are compared by bytes, which do not depend on the machine; ends that wait for the disk and those
that do not by time, in turns, on a durable server. A queue that is never empty is not measured: there ends share their
transactions with claims, which always wait.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from secrets import token_hex
from typing import Any

import psycopg
from psycopg import sql

from benchmarks.harness.server import SETTINGS
from taskq import migrate
from tests.servers import Server, serve

BATCH = 100
EXCHANGE = """select * from taskq.exchange(%(worker)s, %(ids)s::uuid[], %(epochs)s::bigint[], %(outcomes)s::text[],
    %(nonces)s::bigint[], %(results)s::jsonb[], '{}', '{}', %(limit)s, '{t}', '{q}', '{5}', '{-infinity}',
    '{00000000-0000-0000-0000-000000000000}', p_ends_async => %(lags)s)"""
SIZE = """select sum(pg_total_relation_size(inhrelid)) from pg_inherits
    where inhparent = 'taskq.history'::regclass"""
_nonces = count(1)


@contextmanager
def database(server: Server, name: str) -> Iterator[psycopg.Connection[Any]]:
    """A fresh, migrated database until the block ends."""
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute(sql.SQL("create database {} template migrated").format(sql.Identifier(name)))
        admin.execute("checkpoint")
        try:
            with psycopg.connect(server.dsn(name), autocommit=True) as conn:
                yield conn
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


def value(conn: psycopg.Connection[Any], query: str, *args: object) -> Any:
    row = conn.execute(query.encode(), args).fetchone()
    assert row is not None
    return row[0]


def enqueue(conn: psycopg.Connection[Any], n: int, payload: str, history: str) -> None:
    policy = {"history": history} if history == "slim" else {}
    conn.execute("select taskq.ensure_policy(%s, 1, %s)", (history, json.dumps(policy)))
    spec = {"task": "t", "queue": "q", "max_attempts": 3, "effect_class": "idempotent", "policy_id": history}
    query = "select count(*) from taskq.enqueue_many(%s, array_fill(1, array[%s]), array_fill(%s::text, array[%s]))"
    conn.execute(query.encode(), (json.dumps([spec]), n, payload, n))


def register(conn: psycopg.Connection[Any]) -> Any:
    return value(conn, "select taskq.register_worker('w', 'h', 1, '{q}', '{t}', 100, 2, '0', 3600)")


def exchange(
    conn: psycopg.Connection[Any],
    worker: Any,
    claims: Sequence[Any] = (),
    *,
    limit: int = 0,
    result: str = "1",
    lags: bool = False,
) -> list[Any]:
    """End these claims and claim so many; gives rows of job and epoch."""
    given = {
        "worker": worker,
        "ids": [row[1] for row in claims],
        "epochs": [row[2] for row in claims],
        "outcomes": ["succeeded"] * len(claims),
        "nonces": [next(_nonces) for _ in claims],
        "results": [result] * len(claims),
        "limit": limit,
        "lags": lags,
    }
    return conn.execute(EXCHANGE.encode(), given).fetchall()


def life(conn: psycopg.Connection[Any], n: int, size: int, history: str) -> tuple[float, float]:
    """Bytes of WAL and of history that a job costs from its enqueue to its end; payload and result have ``size``."""
    payload, result = json.dumps({"data": token_hex(size // 2)}), json.dumps(token_hex(size // 2))
    worker = register(conn)
    lsn, empty = value(conn, "select pg_current_wal_insert_lsn()"), value(conn, SIZE)
    enqueue(conn, n, payload, history)
    claims = exchange(conn, worker, limit=BATCH)
    while claims:
        claims = exchange(conn, worker, claims, limit=BATCH, result=result)
    assert value(conn, "select count(*) from taskq.history where status = 'succeeded'") == n
    wal = value(conn, "select pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", lsn)
    return float(wal) / n, float(value(conn, SIZE) - empty) / n


def lone_jobs(conn: psycopg.Connection[Any], n: int) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of the end of a job that is alone, and of its whole life, by mode: medians, the modes in turns."""
    worker = register(conn)
    ends: dict[str, list[float]] = {"sync": [], "async": []}
    lives: dict[str, list[float]] = {"sync": [], "async": []}
    for turn in range(2 * n):
        mode = "async" if turn % 2 else "sync"
        born = time.perf_counter()
        enqueue(conn, 1, "{}", "full")
        claims = exchange(conn, worker, limit=BATCH)
        ended = time.perf_counter()
        assert exchange(conn, worker, claims, limit=BATCH, lags=mode == "async") == []
        ends[mode].append(time.perf_counter() - ended)
        lives[mode].append(time.perf_counter() - born)
        if mode == "async":
            # What is left to write is this one's, and must not be waited for by the next.
            conn.execute("select txid_current()")
    return tuple({mode: statistics.median(times) * 1000 for mode, times in each.items()} for each in (ends, lives))  # type: ignore[return-value]


def shown(what: str, pairs: Sequence[tuple[float, float]]) -> None:
    """The medians of both sides, and of their ratios, with the smallest and the largest round."""
    ratios = sorted(second / first for first, second in pairs)
    first, second = (statistics.median(side) for side in zip(*pairs, strict=True))
    spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
    print(f"{what:44} {first:10.2f} {second:10.2f}   {statistics.median(ratios):.2f} {spread}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    n, rounds = chosen.jobs, chosen.rounds
    settings = {key: text for key, text in SETTINGS.items() if key != "shared_preload_libraries"}
    with serve(settings=settings, durable=True) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as admin:
            admin.execute("create database migrated")
        migrate.up(server.dsn("migrated"))
        print(f"{f'{n} jobs, payload + result in bytes':44} {'full':>10} {'slim':>10}   ratio")
        for size in (50, 500, 5000):
            found = []
            for history in ("full", "slim"):
                with database(server, f"{history}_{size}") as conn:
                    found.append(life(conn, n, size, history))
            full, slim = found
            shown(f"WAL of a life, bytes a job ({size} + {size})", [(full[0], slim[0])])
            shown(f"history, bytes a job ({size} + {size})", [(full[1], slim[1])])
        print(f"\n{f'{n // 10} jobs of each, {rounds} rounds':44} {'sync':>10} {'async':>10}   ratio")
        with database(server, "lone") as conn:
            timed = [lone_jobs(conn, n // 10) for _ in range(rounds)]
        for what, at in (("the end of a job that is alone, ms", 0), ("its enqueue, claim and end, ms", 1)):
            shown(what, [(each[at]["sync"], each[at]["async"]) for each in timed])


if __name__ == "__main__":
    main()

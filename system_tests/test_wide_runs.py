"""A run of very many nodes, started by one client while worker processes are already at it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from conftest import LONG, ROOT, StartWorker, until

pytestmark = pytest.mark.anyio
ITEMS = 100_000 if LONG else 2_500
WITHIN = 900.0 if LONG else 120.0
MOST_MEMORY = 500
"""MB that the client may have had at its most, whatever the number of items."""
CLIENT = """
import resource, sys
from flows_under_test import app
run = app.get_workflow("spreads").start_sync(list(range(int(sys.argv[1]))))
app.close_sync()
print(run.id, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def start(dsn: str, n: int) -> tuple[UUID, int]:
    """Start the run in a process of its own; the run, and the MB that its client had at its most."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, str(n)],
        env={**os.environ, "PYTHONPATH": path, "TASKQ_DSN": dsn},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    run, memory = done.stdout.split()
    return UUID(run), int(memory)


def test_what_joins_very_many_nodes_starts_once_all_of_them_have_ended(dsn: str, start_worker: StartWorker) -> None:
    workers = [start_worker(f"w{n}", queue="floor", lease=30, app="flows_under_test:app") for n in range(2)]
    run, memory = start(dsn, ITEMS)
    assert memory < MOST_MEMORY
    with psycopg.connect(dsn, autocommit=True) as conn:
        ended = "select result from taskq.runs where id = %s and finished_at is not null"
        found = until(lambda: conn.execute(ended, (run,)).fetchone(), WITHIN)
        assert found == ([ITEMS, ITEMS * (ITEMS - 1), 0],)
        # Each item ran, on both of them, once.
        claims = "select count(*), max(claim_epoch) from taskq.history where task = 'item' and status = 'succeeded'"
        assert conn.execute(claims).fetchone() == (ITEMS, 1)
        on = "select count(distinct worker_id) from taskq.history where task = 'item'"
        assert conn.execute(on).fetchone() == (2,)
    for worker in workers:
        assert worker.stop() == 0
        assert "database.unavailable" not in worker.log

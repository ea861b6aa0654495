"""Two cohorts on two worker processes: a full one leaves no trace, the other goes on, and the operator decides."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
from conftest import Journal, StartWorker, _module, until
from psycopg.rows import dict_row

from taskq import TaskQ

pytestmark = pytest.mark.anyio
LONG = 60.0


@pytest.fixture
async def app(dsn: str, anyio_backend: str) -> AsyncIterator[TaskQ]:
    made: TaskQ = _module("app_of_the_cohorts", Path(__file__).with_name("cohorts_under_test.py")).app
    made.use_database(dsn)
    yield made
    await made.close()


def query(dsn: str, text: str, *args: object) -> list[dict[str, Any]]:
    with psycopg.connect(dsn, row_factory=dict_row, autocommit=True) as conn:
        return conn.execute(text, args).fetchall()


def row_of(dsn: str, job: UUID) -> dict[str, Any]:
    [row] = query(dsn, "select * from taskq.all_jobs where id = %s", job)
    return row


def said(log: str, event: str) -> list[str]:
    """The cohorts that an event in a worker's log is about."""
    return re.findall(rf"{re.escape(event)} .*?cohort=(\w+)", log)


async def test_a_full_cohort_waits_without_a_trace_and_the_other_goes_on(
    app: TaskQ, start_worker: StartWorker, journal: Journal, dsn: str
) -> None:
    holds, works = app.get_task("holds"), app.get_task("works")
    query(dsn, "select taskq.set_limit('a', 1, 'the provider is slow')")
    begin = partial(start_worker, app="cohorts_under_test:app", environ={"LIMIT_OF_A": "3"})
    workers = [begin(f"w{n}") for n in (1, 2)]

    first = await holds.enqueue("first")
    until(lambda: journal.of("start") == [(str(first.id), 1)], LONG)
    second = await holds.enqueue("second")
    journal.open_gate("second")
    others = [await works.enqueue() for _ in range(6)]
    for job in others:
        await job.result(timeout=LONG)

    waiting = row_of(dsn, second.id)
    assert (waiting["status"], waiting["claim_epoch"], waiting["snoozes"], waiting["attempt"]) == ("pending", 0, 0, 0)
    assert query(dsn, "select from taskq.attempts where job_id = %s", second.id) == []
    journal.open_gate("first")
    for job in (first, second):
        await job.result(timeout=LONG)

    # By record, on one clock.
    held, after = row_of(dsn, first.id), row_of(dsn, second.id)
    for row in (row_of(dsn, job.id) for job in others):
        assert held["claimed_at"] <= row["claimed_at"] <= row["finished_at"] <= held["finished_at"]
    assert held["finished_at"] <= after["claimed_at"]
    assert (after["claim_epoch"], after["snoozes"]) == (1, 0)

    # The operator's limit has survived both boots, and each has said so; of the other cohort nothing is said.
    found = query(dsn, "select name, code_limit, operator_limit from taskq.limits order by name")
    assert [tuple(row.values()) for row in found] == [("a", 3, 1), ("b", 2, None)]
    for worker in workers:
        assert worker.stop() == 0
        assert said(worker.log, "limit.operator_override") == ["a"]
        assert said(worker.log, "limit.code_changed") == []

    # A deploy that changes what code says is told of once, and changes nothing of the operator's.
    changed = start_worker("w3", app="cohorts_under_test:app", environ={"LIMIT_OF_A": "5"})
    assert changed.stop() == 0
    assert said(changed.log, "limit.code_changed") == said(changed.log, "limit.operator_override") == ["a"]
    assert query(dsn, "select effective_limit from taskq.cohorts where name = 'a'") == [{"effective_limit": 1}]

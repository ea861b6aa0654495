"""The lines of the log, and logging that fails: never the reason why a body runs twice or a worker stops."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from worker_kit import Events, RunWorker, outcomes, until_status

from taskq import TaskQ
from taskq.telemetry import get_logger

pytestmark = pytest.mark.anyio

log = get_logger("worker")


def raises(*_: Any) -> Any:
    raise RuntimeError("the application's own")


class RaisingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError("the application's own")


def clashing_factory(*args: Any, **kwargs: Any) -> logging.LogRecord:
    record = logging.LogRecord(*args, **kwargs)
    record.job_id = record.task = "the application's own"
    return record


@pytest.fixture(params=["filter", "handler", "record factory", "clash"])
def broken_logging(request: pytest.FixtureRequest) -> Iterator[str]:
    logger = logging.getLogger("taskq.worker")
    handler = RaisingHandler()
    match request.param:
        case "filter":
            logger.addFilter(raises)
        case "handler":
            logger.addHandler(handler)
        case "record factory":
            logging.setLogRecordFactory(raises)
        case "clash":
            logging.setLogRecordFactory(clashing_factory)
    yield request.param
    logging.setLogRecordFactory(logging.LogRecord)
    logger.removeFilter(raises)
    logger.removeHandler(handler)


async def test_a_body_runs_once_whatever_logging_does(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, broken_logging: str
) -> None:
    ran: list[int] = []

    @app.task(max_attempts=1)
    async def fails() -> None:
        ran.append(1)
        raise ValueError

    @app.task
    async def works() -> int:
        return 1

    async with run_worker(concurrency=1):
        for _ in range(2):
            job = await fails.enqueue()
            await until_status(aconn, job.id, "failed")
            assert await outcomes(aconn, job.id) == ["failed"]
        assert await (await works.enqueue()).result(timeout=5) == 1
    assert len(ran) == 2


def test_a_clash_of_fields_loses_the_fields_alone(events: Events) -> None:
    logging.setLogRecordFactory(clashing_factory)
    try:
        log.warning("job.failed", job_id=7)
    finally:
        logging.setLogRecordFactory(logging.LogRecord)
    assert [r["event"] for r in events.records] == ["job.failed job_id=7"]


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("call", [log.info, log.warning, log.error, log.exception, log.critical])
def test_what_cannot_be_logged_is_told_on_standard_error(
    call: Callable[..., Any], events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("sys.__stderr__", type("Stream", (), {"write": staticmethod(told.append)}))
    call("job.failed", error=Unprintable())
    assert told == ["taskq: job.failed could not be logged: RuntimeError\n"]


def logged(fmt: str, zone: str) -> str:
    """One line of a process of its own in a zone."""
    source = "from taskq.telemetry import *; import sys; configure_for_terminal(sys.argv[1]); get_logger('w').info('e')"
    command = [sys.executable, "-c", source, fmt]
    environ = {**os.environ, "TZ": zone, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, env=environ, stderr=subprocess.PIPE, text=True, check=True, timeout=60).stderr


def test_times_say_that_they_are_utc_wherever_the_machine_stands() -> None:
    in_json = datetime.fromisoformat(json.loads(logged("json", "America/New_York"))["time"])
    assert in_json.utcoffset() == timedelta(0)
    on_console = datetime.strptime(logged("console", "Asia/Tokyo")[:20], "%Y-%m-%d %H:%M:%SZ").replace(tzinfo=UTC)
    for time in (in_json, on_console):
        assert abs(datetime.now(UTC) - time) < timedelta(minutes=10)

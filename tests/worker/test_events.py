"""Every transition of a worker or leader is told, with what it was about, and nothing that should stay secret."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from helpers import aeventually
from worker_kit import Events, Gates, RunWorker, until_status

from taskq import JobContext, Retry, RetryAfter, Snooze, TaskQ, constant
from taskq.telemetry import get_logger
from taskq.telemetry.events import OF_ATTEMPT, OF_JOB, events_of
from taskq.telemetry.log import _JsonLines
from taskq.transitions import TRANSITIONS, Transition
from taskq.worker import report

pytestmark = pytest.mark.anyio

TOLD = [t for t in TRANSITIONS if t.function is not None and t.by in ("worker", "leader")]
SECRET = "hunter2-of-the-payload"

OPTIONS: dict[str, dict[str, Any]] = {
    "succeeds": {},
    "fails": {"max_attempts": 1},
    "retries": {"max_attempts": 3, "retry": Retry(backoff=constant("1ms"))},
    "waits": {},
    "waits_out": {"max_retry_afters": 0},
    "snoozes": {},
    "snoozes_out": {"max_snoozes": 0},
    "suspends": {},
    "suspends_out": {"deadline": "1h"},
    "cancelled": {},
    "released": {},
}
"""What a body does at its first attempt, with the options of its task."""
LOST: dict[str, tuple[dict[str, Any], bool]] = {
    "lost": ({}, False),
    "lost_too_often": ({"max_recoveries": 0}, False),
    "lost_and_unknown": ({}, True),
    "lost_and_cancelled": ({"effect_class": "pure"}, True),
}
"""Claims of a lost worker: options, and whether a cancel was requested."""


def case_of(t: Transition) -> str:
    """The job of the test below that makes this transition.

    One that goes back to held, because of its ordering key, is told as one that goes back to pending.
    """
    match t.function, t.target, t.outcome:
        case "claim", _, _:
            return "succeeds"
        case "claim_suspect", _, _:
            return "suspect"
        case "sweep", _, _:
            return f"late_for_{t.source}"
        case "settle_lost", target, _:
            at = {"pending": "lost", "failed": "lost_too_often", "unknown": "lost_and_unknown"}
            return at.get(target, "lost_and_cancelled")
        case _, "succeeded" | "cancelled", _:
            what = {"succeeded": "succeeds", "cancelled": "cancelled"}[t.target]
        case _, target, outcome:
            again = {"failed": "retries", "retry_after": "waits", "snoozed": "snoozes", "released": "released"} | {
                "suspended": "suspends"
            }
            ended = {
                "failed": "fails",
                "retry_after": "waits_out",
                "snoozed": "snoozes_out",
                "suspended": "suspends_out",
            }
            what = (again if target in ("pending", "held") else ended)[outcome or ""]
    return what if t.source == "running" else f"late_{what}"


def test_each_transition_of_a_worker_or_leader_has_its_event() -> None:
    assert [t for t in TOLD if not events_of(t)] == []
    assert [t for t in TRANSITIONS if t not in TOLD and events_of(t)] == []


async def lose(aconn: asyncpg.Connection, task: str) -> None:
    """Have the job of a task claimed by a worker that is lost."""
    worker = await aconn.fetchval("select taskq.register_worker('gone', 'h', 1, '{default}', $1, 9, 1, '0', 1)", [task])
    await aconn.execute("update taskq.workers set lease_expires_at = now() + interval '1 h' where id = $1", worker)
    claim = "select * from taskq.claim($1, 1, $2, '{default}', '{5}', '{-infinity}', $3)"
    assert len(await aconn.fetch(claim, worker, [task], [UUID(int=0)])) == 1
    await aconn.execute("update taskq.workers set lease_expires_at = '-infinity' where id = $1", worker)


async def test_every_transition_is_told_and_no_payload(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(_JsonLines())
    logging.getLogger("taskq").addHandler(handler)
    try:
        ids = await live_them_all(app, run_worker, aconn, gates)
    finally:
        logging.getLogger("taskq").removeHandler(handler)
    for t in TOLD:
        if t.function in ("answer_reconcile", "end_step", "end_preparation", "hold_exhausted") or (
            t.function,
            t.target,
        ) == ("end_attempts", "unknown"):
            continue  # test_hooks_asked, test_effect_steps_run, test_prepared and test_effects have these
        job = ids[case_of(t)]
        found = [e for e in events.records if e.get("job_id") == str(job) and e["event"] in events_of(t)]
        assert found, (t, [e for e in events.records if e.get("job_id") == str(job)])
        assert set(OF_JOB if t.function != "end_attempts" else OF_ATTEMPT) <= set(found[0]), found[0]
        assert (found[0]["task"], found[0]["queue"]) == (case_of(t), "default")
        assert found[0]["claim_epoch"] == (0 if t.function == "sweep" else 3 if t.function == "claim_suspect" else 1)
        if t.outcome is not None:
            first = "select outcome from taskq.attempts where job_id = $1 and claim_epoch = 1"
            assert await aconn.fetchval(first, job) == t.outcome, t
    assert SECRET not in str(events.records)
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["event"] for line in told] == [e["event"] for e in events.records][-len(told) :]
    assert SECRET not in lines.getvalue()


async def live_them_all(app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates) -> dict[str, UUID]:
    """Run a job through each transition; the ids by ``case_of``."""
    seen: set[str] = set()

    async def body(ctx: JobContext, secret: str) -> str:
        what, first = ctx.task.removeprefix("late_"), ctx.task not in seen
        seen.add(ctx.task)
        if first and (ctx.task != what or what in ("cancelled", "released")):
            await gates.wait(ctx.task)
        if first and what in ("fails", "retries"):
            raise ValueError("on purpose")
        if first and what in ("waits", "waits_out"):
            raise RetryAfter("1ms")
        if first and what in ("snoozes", "snoozes_out"):
            raise Snooze("1ms")
        if first and what in ("suspends", "suspends_out"):
            await ctx.sleep("1.1s" if what == "suspends" else "2h")
        return secret

    late = [f"late_{what}" for what in OPTIONS]
    options = OPTIONS | {f"late_{what}": chosen for what, chosen in OPTIONS.items()}
    options |= {name: chosen for name, (chosen, _) in LOST.items()}
    options |= {name: {} for name in ("suspect", "late_for_pending", "late_for_held")}
    tasks = {name: app.task(name=name, **chosen)(body) for name, chosen in options.items()}

    before = [*LOST, "suspect", "late_for_pending", "late_for_held"]
    ids = {name: (await tasks[name].using(deadline="1h").enqueue(SECRET)).id for name in before}
    for name in LOST:
        await lose(aconn, name)
        if LOST[name][1]:
            await aconn.execute("update taskq.jobs set cancel_requested_at = now() where id = $1", ids[name])
    for _ in range(2):
        await lose(aconn, "suspect")
        await aconn.execute("delete from taskq.workers where lease_expires_at = '-infinity' and tasks = '{suspect}'")
        await aconn.execute("select * from taskq.settle_lost(p_skip => $1)", [ids[name] for name in LOST])
    past = "update taskq.jobs set deadline = now() - interval '1 s', status = $2, held_reason = $3 where id = $1"
    await aconn.execute(past, ids["late_for_pending"], "pending", None)
    await aconn.execute(past, ids["late_for_held"], "held", "signal")

    last = ["released", "late_released"]
    make_unknown = "update taskq.jobs set status = 'unknown' where task = any($1)"
    async with run_worker(concurrency=30, grace=0, lease=3):
        for name in (*OPTIONS, *late):
            if name not in last:
                ids[name] = (await tasks[name].enqueue(SECRET)).id
        held = [name for name in late if name not in last]
        for name in (*held, "cancelled"):
            await gates.until_reached(name)
        await app.cancel(ids["cancelled"])
        await aconn.execute(make_unknown, held)
        # What the next renewal tells the worker.
        await aconn.execute("update taskq.jobs set cancel_requested_at = now() where task = 'late_cancelled'")
        for name in held:
            if name != "late_cancelled":
                gates.open(name)
        for name, job in ids.items():
            ended = ["unknown"] if name == "lost_and_unknown" else ["succeeded", "failed", "cancelled"]
            await until_status(aconn, job, *ended)
        for name in last:
            ids[name] = (await tasks[name].enqueue(SECRET)).id
            await gates.until_reached(name)
        await aconn.execute(make_unknown, ["late_released"])
    return ids


async def test_a_job_that_succeeds_costs_no_line_and_no_formatting_at_the_usual_level(
    app: TaskQ, run_worker: RunWorker, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def works(secret: str) -> str:
        return secret

    formatted: list[object] = []
    of_job = report._of_job
    monkeypatch.setattr(report, "_of_job", lambda claim: formatted.append(claim) or of_job(claim))
    async with run_worker():
        for level, lines in ((logging.INFO, set()), (logging.DEBUG, {"job.claimed", "job.succeeded"})):
            logging.getLogger("taskq").setLevel(level)
            formatted.clear()
            job = await works.enqueue(SECRET)
            assert await job.result(timeout=10) == SECRET
            await aeventually(lambda j=job, n=lines: told_of(events, j.id) == n)
            assert bool(formatted) == (level == logging.DEBUG)
    assert SECRET not in str(events.records)


def told_of(events: Events, job: UUID) -> set[str]:
    return {e["event"] for e in events.records if e.get("job_id") == str(job)}


def test_lines_are_json_whatever_the_fields_are() -> None:
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(_JsonLines("w-1"))
    logger = logging.getLogger("taskq.fields")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # A report that holds a lone surrogate cannot be sent from one process to another.
    fields: dict[str, Any] = {"level": 7, "time": "x", "process": 1, "n": float("nan"), "inf": -float("inf")}
    get_logger("fields").warning(
        "odd.one", **fields, text="a\nb\u2028\ud800\x00", name="n", msg="m", job_id=UUID(int=1)
    )
    logger.removeHandler(handler)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    [line] = lines.getvalue().splitlines()
    told = json.loads(line, parse_constant=refuse)
    assert (told["level"], told["event"], told["process"]) == ("warning", "odd.one", "w-1")
    assert (told["level_"], told["time_"], told["process_"]) == (7, "x", 1)
    assert (told["n"], told["inf"], told["job_id"]) == ("nan", "-inf", str(UUID(int=1)))


async def test_the_worker_says_nothing_secret_of_its_database(
    app: TaskQ, run_worker: RunWorker, dsn: str, events: Events
) -> None:
    @app.task
    async def nothing() -> None: ...

    async with run_worker(to=dsn.replace("taskq@", f"taskq:{SECRET}@")):
        await asyncio.sleep(0)
    assert events.of("worker.started")
    assert SECRET not in str(events.records)

"""Sleeps, waits and signals by hand: the calls that workers and senders make."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb
from sql import POLICY, Conn, End, end, one, rows


def sleep(
    conn: Conn, worker: UUID, job: UUID, seconds: float, name: str = "s", epoch: int = 1, occurrence: int = 1
) -> tuple[str, float | None]:
    """The answer, and the seconds that are left."""
    [row] = rows(
        conn, "select * from taskq.begin_sleep(%s, %s, %s, %s, %s, %s)", worker, job, epoch, name, occurrence, seconds
    )
    return row["answer"], row["remaining"]


def wait(
    conn: Conn,
    worker: UUID,
    job: UUID,
    name: str = "go",
    seconds: float | None = None,
    epoch: int = 1,
    occurrence: int = 1,
) -> tuple[str, int | None, str | None, float | None]:
    """The answer, the signal with its payload, and the seconds that are left."""
    [row] = rows(
        conn, "select * from taskq.begin_wait(%s, %s, %s, %s, %s, %s)", worker, job, epoch, name, occurrence, seconds
    )
    return row["answer"], row["signal_id"], row["payload"], row["remaining"]


def take(
    conn: Conn,
    worker: UUID,
    job: UUID,
    signal: int | None,
    name: str = "go",
    epoch: int = 1,
    occurrence: int = 1,
    refused: str | None = None,
) -> str:
    query = "select taskq.take_signal(%s, %s, %s, %s, %s, %s, %s)"
    answer: str = one(conn, query, worker, job, epoch, name, occurrence, signal, refused)
    return answer


def send(conn: Conn, job: UUID, payload: object = None, name: str = "go", key: str | None = None) -> str:
    answer: str = one(conn, "select taskq.send_signal(%s, %s, %s, %s)", job, name, Jsonb(payload), key)
    return answer


def send_run(conn: Conn, run: UUID, payload: object = None, name: str = "go", key: str | None = None) -> str:
    answer: str = one(conn, "select taskq.send_run_signal(%s, %s, %s, %s)", run, name, Jsonb(payload), key)
    return answer


def suspension(job: UUID, *keys: tuple[str, str, int], epoch: int = 1) -> End:
    """The end of an attempt whose body waits for these steps."""
    waits = [{"kind": kind, "name": name, "occurrence": occurrence} for kind, name, occurrence in keys]
    return End(job, epoch, "suspend", error={"type": "Suspended", "message": "m", "for": waits})


def suspend(conn: Conn, worker: UUID, job: UUID, *keys: tuple[str, str, int], epoch: int = 1) -> int:
    """End an attempt whose body waits; gives how many ends were applied."""
    return end(conn, worker, suspension(job, *keys, epoch=epoch))


def held(conn: Conn, worker: UUID, job: UUID, seconds: float | None = None) -> None:
    """Suspend an attempt that waits for the signal ``go``."""
    assert wait(conn, worker, job, seconds=seconds)[0] == "waits"
    assert suspend(conn, worker, job, ("wait", "go", 1)) == 1
    state: Any = rows(conn, "select status, held_reason from taskq.jobs where id = %s", job)
    assert state == [{"status": "held", "held_reason": "signal"}]


SPEC = {"task": "c", "queue": "c", "policy_id": POLICY, "effect_class": "idempotent", "max_attempts": 1}


def child(
    conn: Conn,
    worker: UUID,
    job: UUID,
    name: str = "c",
    *,
    epoch: int = 1,
    occurrence: int = 1,
    plan: str | None = None,
    payload: str = "{}",
    ordering_key: str | None = None,
) -> tuple[str, Any, Any, UUID]:
    """Start a child, or look at it: the answer, its value, its error and its id."""
    query = "select * from taskq.start_child(%s, %s, %s, %s, %s, %s, %s, %s, %s, null)"
    spec = Jsonb(SPEC) if plan is None else None
    [row] = rows(conn, query, worker, job, epoch, name, occurrence, spec, payload, ordering_key, plan)
    return row["answer"], row["value"], row["error"] and json.loads(row["error"]), row["child"]


def held_for_child(
    conn: Conn, worker: UUID, job: UUID, name: str = "c", *, plan: str | None = None, epoch: int = 1
) -> UUID:
    """Start a child and suspend; its id."""
    answer, _, _, started = child(conn, worker, job, name, plan=plan, epoch=epoch)
    assert answer == "waits"
    assert suspend(conn, worker, job, ("child", name, 1), epoch=epoch) == 1
    state: Any = rows(conn, "select status, held_reason from taskq.jobs where id = %s", job)
    assert state == [{"status": "held", "held_reason": "child"}]
    return started

"""Lines of jobs with one ordering key, as tests of the laws make and see them."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sql import Conn, claim, enqueue, one, policy, rows

HALT, CONTINUE = "halts", "goes-on"
"""Policies that say what becomes of the rest of the key."""


def ordered(conn: Conn, n: int = 3, *, key: str = "k", halt: bool = False, **spec: Any) -> list[UUID]:
    """Enqueue jobs one after the other under one key."""
    named = policy(conn, HALT, ordering="halt") if halt else policy(conn, CONTINUE, ordering="continue")
    return [enqueue(conn, ordering_key=key, policy_id=named, **spec) for _ in range(n)]


def states(conn: Conn, jobs: list[UUID]) -> list[str]:
    """Their statuses, in this order; of held ones why."""
    found = {
        row["id"]: row["held_reason"] or row["status"]
        for row in rows(conn, "select id, status, held_reason from taskq.all_jobs where id = any(%s)", jobs)
    }
    return [found[job] for job in jobs]


def claimed(conn: Conn, worker: UUID, **options: Any) -> list[UUID]:
    """Claim all that can be claimed."""
    return [row["job_id"] for row in claim(conn, worker, **options)]


def sweep(conn: Conn) -> int:
    given: int = one(conn, "select taskq.sweep_orderings()")
    return given


def resume(conn: Conn, key: str = "k", reason: str = "looked into it") -> str:
    answer: str = one(conn, "select taskq.resume_ordering(%s, %s)", key, reason)
    return answer


def halts(conn: Conn) -> list[tuple[str, UUID]]:
    return [(row["key"], row["job_id"]) for row in rows(conn, "select * from taskq.ordering_halts order by job_id")]


def rechecks(conn: Conn) -> list[str]:
    return [row["key"] for row in rows(conn, "select key from taskq.ordering_rechecks order by 1")]

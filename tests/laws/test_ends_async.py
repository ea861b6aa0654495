"""Which transactions an exchange may commit asynchronously: those that end plain jobs, and do nothing else."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from effects_kit import effect, promising
from sql import End, cancel, enqueue, exchange, lose, one, register, running, settle

Conn = psycopg.Connection[Any]
Made = tuple[UUID, UUID]


def commits(conn: Conn, worker: UUID, *ends: End, limit: int = 0, ends_async: bool = True) -> tuple[str, set[str]]:
    """How the transaction of this exchange is committed, and what kinds of rows it answers."""
    with conn.transaction():
        conn.execute("set local synchronous_commit = on")
        answer = exchange(conn, worker, ends, limit, ends_async=ends_async)
        how = one(conn, "show synchronous_commit")
    still = one(
        conn, "select count(*) from taskq.jobs where status = 'unknown' and id = any(%s)", [e.job for e in ends]
    )
    ended = len([e for e in ends if e.outcome == "succeeded"])
    assert one(conn, "select count(*) from taskq.history") == ended - still
    return how, {row["kind"] for row in answer}


@pytest.mark.parametrize("effect_class", ["pure", "idempotent"])
@pytest.mark.parametrize("outcome", ["succeeded", "retry"])
def test_ends_alone_do_not_wait(conn: Conn, effect_class: str, outcome: str) -> None:
    worker, job = running(conn, effect_class=effect_class)
    assert commits(conn, worker, End(job, 1, outcome, delay=60), limit=5) == ("off", set())


def test_a_worker_that_does_not_ask_for_it_waits(conn: Conn) -> None:
    worker, job = running(conn)
    assert commits(conn, worker, End(job), ends_async=False) == ("on", set())


def test_a_claim_waits_and_the_ends_with_it(conn: Conn) -> None:
    worker, job = running(conn)
    enqueue(conn)
    assert commits(conn, worker, End(job), limit=1) == ("on", {"job"})


def test_an_exchange_without_ends_waits(conn: Conn) -> None:
    assert commits(conn, register(conn), limit=1) == ("on", set())


def side_effecting(conn: Conn) -> Made:
    return running(conn, effect_class="side_effecting")


def with_effects(conn: Conn) -> Made:
    return running(conn, **promising(conn, effect()))


def of_a_body(conn: Conn) -> Made:
    worker, job = running(conn)
    conn.execute("update taskq.jobs set parent_job = %s where id = %s", (uuid4(), job))
    return worker, job


def of_a_run(conn: Conn) -> Made:
    worker, job = running(conn)
    conn.execute("update taskq.jobs set run_id = %s where id = %s", (uuid4(), job))
    conn.execute("alter table taskq.history disable trigger user")
    return worker, job


def after_a_cancel_request(conn: Conn) -> Made:
    worker, job = running(conn)
    assert cancel(conn, job) == "requested"
    return worker, job


def already_unknown(conn: Conn) -> Made:
    worker, job = running(conn)
    assert cancel(conn, job) == "requested"
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    conn.execute("update taskq.jobs set cancel_requested_at = null where id = %s", (job,))
    return worker, job


def with_a_step_that_is_not_told(conn: Conn) -> Made:
    worker, job = running(conn)
    assert one(conn, "select answer from taskq.start_step(%s, %s, 1, 'pay', 1)", worker, job) == "started"
    return worker, job


OTHERS = [
    side_effecting,
    with_effects,
    of_a_body,
    of_a_run,
    after_a_cancel_request,
    already_unknown,
    with_a_step_that_is_not_told,
]


@pytest.mark.parametrize("made", OTHERS, ids=lambda made: made.__name__)
def test_one_end_that_is_more_makes_all_of_them_wait(conn: Conn, made: Any) -> None:
    worker, other = made(conn)
    if made is not already_unknown:
        running(conn, worker)
        [plain] = [
            r[0] for r in conn.execute("select id from taskq.jobs where id <> %s and status = 'running'", (other,))
        ]
        assert commits(conn, worker, End(plain), End(other, outcome_id=2)) == ("on", set())
    else:
        assert commits(conn, worker, End(other)) == ("on", set())

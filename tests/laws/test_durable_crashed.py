"""What durable bodies ask for with its backend killed at each write: nothing is left, and done again it is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from crash_kit import Made, killed_at_each_write
from psycopg.types.json import Jsonb
from runs_kit import node, store, worker_for
from signals_kit import child, held, held_for_child, send, sleep, suspend, take, wait
from sql import Conn, End, cancel, claim_one, end, lose, make_due, one, policy, resolve, retry, rows, running, settle

TABLES = (
    *("jobs", "history", "ledger", "steps", "signals", "unknowns", "effect_intents", "ordering_keys", "audit"),
    *("runs", "nodes", "receipts", "child_rechecks"),
)
STARTED = "select effect_started_at from taskq.steps where name = 'pay'"


def body(conn: Conn) -> Made:
    """A job that runs; its worker takes what is in the queue of children as well."""
    policy(conn)
    worker, job = running(conn, worker_for(conn))
    return {"worker": worker, "job": job}


def two_bodies(conn: Conn) -> Made:
    made = body(conn)
    made["other worker"], made["other"] = running(conn)
    return made


def sleeping(conn: Conn) -> Made:
    made = body(conn)
    sleep(conn, made["worker"], made["job"], 3600)
    return made


def asleep(conn: Conn) -> Made:
    made = sleeping(conn)
    suspend(conn, made["worker"], made["job"], ("sleep", "s", 1))
    return made


def waiting(conn: Conn) -> Made:
    made = body(conn)
    wait(conn, made["worker"], made["job"])
    return made


def offered(conn: Conn) -> Made:
    """A signal has come, and is not taken yet."""
    made = waiting(conn)
    send(conn, made["job"], 7)
    made["signal"] = wait(conn, made["worker"], made["job"])[1]
    return made


def held_for_a_signal(conn: Conn) -> Made:
    made = body(conn)
    held(conn, made["worker"], made["job"], seconds=3600)
    return made


def time_is_up(conn: Conn) -> Made:
    made = held_for_a_signal(conn)
    make_due(conn, made["job"])
    return made


def with_plan(conn: Conn) -> Made:
    made = body(conn)
    made["plan"] = store(conn, [node("x")])
    return made


def with_a_child(conn: Conn) -> Made:
    """The parent is held for a child that runs."""
    made = body(conn)
    made["child"] = held_for_child(conn, made["worker"], made["job"])
    claim_one(conn, made["worker"], tasks=["c"], lanes=[("c", 5)])
    return made


def with_two_children(conn: Conn) -> Made:
    """One that runs, and one that waits."""
    made = body(conn)
    child(conn, made["worker"], made["job"], "d")
    claim_one(conn, made["worker"], tasks=["c"], lanes=[("c", 5)])
    held_for_child(conn, made["worker"], made["job"])
    return made


def paying(conn: Conn) -> Made:
    made = body(conn)
    start_step(conn, made)
    return made


def doubtful(conn: Conn) -> Made:
    made = paying(conn)
    lose(conn, made["worker"])
    return made


def unknown(conn: Conn) -> Made:
    made = doubtful(conn)
    settle(conn)
    return made


def failed(conn: Conn) -> Made:
    """With a step, a step whose effect has happened, and a wait that has taken its signal."""
    made = paying(conn)
    end_step(conn, made)
    record(conn, made)
    wait(conn, made["worker"], made["job"])
    send(conn, made["job"], 7)
    take(conn, made["worker"], made["job"], wait(conn, made["worker"], made["job"])[1])
    end(conn, made["worker"], End(made["job"], 1, "failed"))
    return made


def record(conn: Conn, made: Made) -> None:
    who = [(made["worker"], made["job"])]
    if "other" in made:
        who.append((made["other worker"], made["other"]))
    entries = [(worker, job, name) for worker, job in who for name in ("a", "b")]
    workers, jobs, names = (list(column) for column in zip(*entries, strict=True))
    n = len(entries)
    query = (
        "select * from taskq.record_steps(%s::uuid[], %s::uuid[], %s::bigint[], %s::text[], %s::int[], %s::jsonb[],"
        " true)"
    )
    found = rows(conn, query, workers, jobs, [1] * n, names, [1] * n, [Jsonb(k) for k in range(n)])
    assert [row["answer"] for row in found] == ["recorded"] * n


def start_step(conn: Conn, made: Made) -> None:
    query = "select answer from taskq.start_step(%s, %s, 1, 'pay', 1)"
    assert one(conn, query, made["worker"], made["job"]) == "started"


def end_step(conn: Conn, made: Made) -> None:
    query = "select taskq.end_step(%s, %s, 1, 'pay', 1, %s, %s, null)"
    assert one(conn, query, made["worker"], made["job"], one(conn, STARTED), Jsonb("paid")) == "recorded"


def suspends(*keys: tuple[str, str, int]) -> Callable[[Conn, Made], None]:
    def do(conn: Conn, made: Made) -> None:
        assert suspend(conn, made["worker"], made["job"], *keys) == 1

    return do


def takes(conn: Conn, made: Made) -> None:
    assert take(conn, made["worker"], made["job"], made["signal"]) == "taken"


def refuses(conn: Conn, made: Made) -> None:
    assert take(conn, made["worker"], made["job"], made["signal"], refused="no number") == "refused"


def starts_a_child(conn: Conn, made: Made) -> None:
    assert child(conn, made["worker"], made["job"], plan=made.get("plan"))[0] == "waits"


def ends_the_child(outcome: str) -> Callable[[Conn, Made], None]:
    def do(conn: Conn, made: Made) -> None:
        assert end(conn, made["worker"], End(made["child"], 1, outcome)) == 1

    return do


TRANSITIONS: dict[str, tuple[Callable[[Conn], Made], Callable[[Conn, Made], object], int]] = {
    # Each with what comes before it, and the least number of writes that it must have been killed at.
    "record steps": (two_bodies, record, 4),
    "start the effect of a step": (body, start_step, 2),
    "tell of a step": (paying, end_step, 2),
    "lose the worker of a step": (doubtful, lambda conn, _: settle(conn), 2),
    "decide about a step": (unknown, lambda conn, made: resolve(conn, made["job"], True, "paid"), 4),
    "begin a sleep": (body, lambda conn, made: sleep(conn, made["worker"], made["job"], 3600), 1),
    "suspend over a sleep": (sleeping, suspends(("sleep", "s", 1)), 2),
    "end a sleep by hand": (asleep, lambda conn, made: retry(conn, made["job"]), 3),
    "begin to wait": (body, lambda conn, made: wait(conn, made["worker"], made["job"]), 1),
    "take a signal": (offered, takes, 2),
    "refuse a signal": (offered, refuses, 1),
    "suspend over a wait": (waiting, suspends(("wait", "go", 1)), 2),
    "suspend over a wait whose signal has come": (offered, suspends(("wait", "go", 1)), 2),
    "send to a body that runs": (waiting, lambda conn, made: send(conn, made["job"], 7), 1),
    "send to a body that is held": (held_for_a_signal, lambda conn, made: send(conn, made["job"], 7), 2),
    "wake a wait whose time is up": (time_is_up, lambda conn, _: one(conn, "select taskq.wake_waiting()"), 1),
    "cancel a body that is held": (held_for_a_signal, lambda conn, made: cancel(conn, made["job"]), 3),
    "start a child": (body, starts_a_child, 2),
    "start a run as a child": (with_plan, starts_a_child, 5),
    "end a child": (with_a_child, ends_the_child("succeeded"), 3),
    "fail a child": (with_a_child, ends_the_child("failed"), 3),
    "cancel with children": (with_two_children, lambda conn, made: cancel(conn, made["job"]), 5),
    "reopen with steps": (failed, lambda conn, made: retry(conn, made["job"]), 3),
}


def shape(conn: Conn, _: Made) -> Any:
    """What a transition has led to, without ids and instants."""
    return (
        rows(
            conn,
            "select task, status, held_reason, attempt, generation, claim_epoch, claimed_at is null as free,"
            " cancel_requested_at is null as wanted, effect_started_at is null as calm, error, result"
            " from taskq.all_jobs order by 1, 2, 3",
        ),
        rows(conn, "select claim_epoch, attempt, generation, outcome, error from taskq.ledger order by 1, 2, 3, 4"),
        rows(
            conn,
            "select generation, kind, name, occurrence, claim_epoch, left_by, done, value, error,"
            " effect_started_at is null as calm from taskq.steps order by 1, 2, 3, 4, value::text",
        ),
        rows(
            conn,
            "select generation, name, payload, taken_at is null as offered, refused_why from taskq.signals order by id",
        ),
        rows(conn, "select workflow, status from taskq.runs"),
        rows(conn, "select action from taskq.audit order by id"),
    )


@pytest.mark.parametrize("name", TRANSITIONS)
def test_a_call_that_is_killed_at_any_write_leaves_nothing_and_can_be_done_again(dsn: str, name: str) -> None:
    before, call, least = TRANSITIONS[name]

    def transition(conn: Conn, made: Made) -> None:
        call(conn, made)

    with psycopg.connect(dsn) as conn:
        killed_at_each_write(conn, dsn, before, transition, tables=TABLES, shape=shape, least=least)

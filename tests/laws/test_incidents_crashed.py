"""Preparations, incidents and grants, killed at each write: nothing is left, and done again it is whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from crash_kit import killed_at_each_write
from incidents_kit import FAILED, answer, begin, current, grant, holding, pair
from runs_kit import edge, finish, info, node, start, store, take, tree, worker_for
from sql import lose, make_due, one, rows, start_effects

Conn = psycopg.Connection[Any]
Made = dict[str, Any]
TABLES = (
    *("runs", "nodes", "receipts", "jobs", "history", "ledger", "audit", "run_pauses", "unknowns"),
    *("incidents", "incident_events", "preparations", "facts"),
)
SIDE: dict[str, Any] = {"effect_class": "side_effecting", "required_worker_schema": 2}


def claimed(conn: Conn) -> Made:
    run, worker = pair(conn), worker_for(conn)
    [claim] = take(conn, worker, "a").values()
    return {"run": run, "worker": worker, "claim": claim, "job": claim["job_id"]}


def begun(conn: Conn) -> Made:
    made = claimed(conn)
    begin(conn, made["worker"], made["claim"])
    return made


def again(conn: Conn, *, begins: bool = True, faults: int = 1) -> Made:
    """Claimed again after so many faults."""
    made = claimed(conn)
    for n in range(faults):
        if n:
            make_due(conn, made["job"])
            [made["claim"]] = take(conn, made["worker"], "a").values()
        begin(conn, made["worker"], made["claim"])
        answer(conn, made["worker"], made["claim"], "failed", FAILED)
    make_due(conn, made["job"])
    [made["claim"]] = take(conn, made["worker"], "a").values()
    if begins:
        begin(conn, made["worker"], made["claim"])
    return made


def with_child(conn: Conn) -> Made:
    """Being prepared, beside a node that stands for a child run."""
    inner = store(conn, [node("x"), node("y")], workflow="inner")
    of = {"policy_id": holding(conn, 0)}
    run = start(conn, store(conn, [node("a", **of), node("kid", task="inner:await", child=inner)]))
    worker = worker_for(conn)
    [claim] = take(conn, worker, "a").values()
    begin(conn, worker, claim)
    return {"run": run, "worker": worker, "claim": claim, "job": claim["job_id"]}


def paused_meanwhile(conn: Conn) -> Made:
    made = begun(conn)
    one(conn, "select taskq.pause_run(%s, 'looking', 'me')", made["run"])
    return made


def cancelled_meanwhile(conn: Conn) -> Made:
    made = begun(conn)
    one(conn, "select taskq.cancel_run(%s)", made["run"])
    return made


def exhausted(conn: Conn) -> Made:
    made = again(conn, faults=2)
    assert answer(conn, made["worker"], made["claim"], "failed", FAILED)["became"] == "held"
    return made | {"incident": current(conn, made["job"])["id"]}


def granted(conn: Conn) -> Made:
    made = exhausted(conn)
    grant(conn, made["incident"])
    [made["claim"]] = take(conn, made["worker"], "a").values()
    return made


def used_up(conn: Conn) -> Made:
    """Granted, begun, and handed back before it has answered: nothing is left to begin with."""
    made = granted(conn)
    begin(conn, made["worker"], made["claim"])
    finish(conn, made["worker"], made["claim"], "release")
    [made["claim"]] = take(conn, made["worker"], "a").values()
    assert begin(conn, made["worker"], made["claim"])["answer"] == "exhausted"
    return made


def lost_once_too_often(conn: Conn) -> Made:
    run, worker = pair(conn, recoveries=0), worker_for(conn)
    [claim] = take(conn, worker, "a").values()
    lose(conn, worker)
    return {"run": run, "job": claim["job_id"]}


def held_after_losses(conn: Conn) -> Made:
    made = lost_once_too_often(conn)
    holds(conn, made)
    return made | {"incident": current(conn, made["job"])["id"]}


def granted_after_losses(conn: Conn) -> Made:
    made = held_after_losses(conn)
    grant(conn, made["incident"])
    return made | {"worker": worker_for(conn)}


def effect_started(conn: Conn) -> Made:
    of = {"policy_id": holding(conn, 0), **SIDE}
    run = start(conn, store(conn, [node("a", **of), node("b")], [edge(0, 1)]))
    worker = worker_for(conn)
    [claim] = take(conn, worker, "a").values()
    start_effects(conn, worker, (claim["job_id"], 1))
    return {"run": run, "worker": worker, "claim": claim, "job": claim["job_id"]}


def unknown(conn: Conn) -> Made:
    made = effect_started(conn)
    finish(conn, made["worker"], made["claim"], "unknown")
    return made


def begins(conn: Conn, made: Made) -> None:
    assert begin(conn, made["worker"], made["claim"])["answer"] == "go"


def answers(said: str, details: dict[str, Any], became: str) -> Callable[[Conn, Made], None]:
    def transition(conn: Conn, made: Made) -> None:
        assert answer(conn, made["worker"], made["claim"], said, details)["became"] == became

    return transition


def holds(conn: Conn, made: Made) -> None:
    assert one(conn, "select taskq.hold_exhausted(%s)", made["job"]) == "held"


def grants(conn: Conn, made: Made) -> None:
    assert grant(conn, made["incident"]) == "granted"


def claims(conn: Conn, made: Made) -> None:
    # One that was lost often enough would be claimed alone; once is not.
    assert set(take(conn, made["worker"], "a")) == {"a"}


def becomes_unknown(conn: Conn, made: Made) -> None:
    finish(conn, made["worker"], made["claim"], "unknown")


def did_not_happen(conn: Conn, made: Made) -> None:
    said = "select taskq.answer_reconcile(%s, 1, false, null, 'asked', 'hook', null)"
    assert one(conn, said, made["job"]) == "held"


def happened(conn: Conn, made: Made) -> None:
    one(conn, "select taskq.resolve(%s, true, '1', 'looked', 'me')", made["job"])


FACTS = {"facts": {"x": {"seen": 0, "value": 1}, "y": {"seen": 0, "value": 2}}}
TRANSITIONS: dict[str, tuple[Callable[[Conn], Made], Callable[[Conn, Made], None], int]] = {
    "begin": (claimed, begins, 1),
    "begin after a fault": (lambda conn: again(conn, begins=False), begins, 4),
    "begin what was granted": (granted, begins, 4),
    "ready": (begun, answers("ready", FACTS, "ready"), 3),
    "ready after a fault": (again, answers("ready", FACTS, "ready"), 6),
    "ready in a pause": (paused_meanwhile, answers("ready", FACTS, "paused"), 5),
    "fail": (begun, answers("failed", FAILED, "released"), 6),
    "fail again": (again, answers("failed", FAILED, "released"), 6),
    "fail for the last time": (lambda conn: again(conn, faults=2), answers("failed", FAILED, "held"), 12),
    "fail beside a child": (with_child, answers("failed", FAILED, "held"), 16),
    "fail in a pause": (paused_meanwhile, answers("failed", FAILED, "released"), 6),
    "fail after a cancel": (cancelled_meanwhile, answers("failed", FAILED, "ended"), 8),
    "need approval": (begun, answers("needs_approval", {"what": "w"}, "held"), 12),
    "be unmet": (begun, answers("unmet", {"prerequisite": "c", "retry_in": 9, "checks": ["c"]}, "released"), 6),
    "pause": (begun, answers("pause", {"code": "c", "reason": "r"}, "paused"), 7),
    "find nothing left": (used_up, answers("exhausted", {}, "held"), 9),
    "hold what is exhausted": (lost_once_too_often, holds, 12),
    "grant": (exhausted, grants, 9),
    "grant after losses": (held_after_losses, grants, 9),
    "claim what was granted after losses": (granted_after_losses, claims, 4),
    "become unknown": (effect_started, becomes_unknown, 4),
    "happen after all": (unknown, happened, 8),
    "not happen once too often": (unknown, did_not_happen, 12),
}


def shape(conn: Conn, made: Made) -> Any:
    """What a transition has led to, without ids and instants."""
    queries = (
        "select workflow, status from taskq.runs order by depth, workflow",
        "select r.workflow, c.kind, c.node, c.n, c.status from taskq.receipts c join taskq.runs r on r.id = c.run_id"
        " order by r.workflow, c.run_id, c.sequence",
        "select task, status, held_reason, recoveries, releases from taskq.jobs order by task",
        "select outcome, claim_epoch from taskq.attempts order by claim_epoch",
        "select phase, fingerprint, code, status, is_current, bound, failures, grants, launches, events,"
        " fault ->> 'type' as fault from taskq.incidents order by fingerprint",
        "select n, kind, claim_epoch, actor from taskq.incident_events order by n",
        "select claim_epoch, answer, became from taskq.preparations order by claim_epoch",
        "select name, version, value from taskq.facts order by name",
        "select p.code, p.actor, p.incident is null as alone from taskq.run_pauses p"
        " join taskq.runs r on r.id = p.run_id order by r.depth, p.code",
    )
    return [rows(conn, query) for query in queries], tree(conn, made["run"]), info(conn, made["run"])["status"]


@pytest.mark.parametrize("name", TRANSITIONS)
def test_what_is_killed_at_any_write_leaves_nothing_and_can_be_done_again(dsn: str, name: str) -> None:
    before, transition, least = TRANSITIONS[name]
    with psycopg.connect(dsn) as conn:
        killed_at_each_write(conn, dsn, before, transition, tables=TABLES, shape=shape, least=least)

"""What steers runs and jobs reads what it is about, and not all the rows there are, whatever the statistics say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest
import test_durable_crashed
import test_incidents_crashed
import test_runs_crashed
from crash_kit import Made
from runs_kit import nodes_of_others
from sql import Conn, rows

OTHERS = 6_000
"""Rows of others in each table."""

RUNS = (
    *(
        "reopen",
        "carry on",
        "heal",
        "cancel with a child that runs",
        "reopen with a child",
        "heal what waits for a child",
    ),
    *("reopen with a map", "heal a map", "fail behind a map", "hold a round", "reopen with a loop", "heal a loop"),
    *("go on with a round that was held", "reopen with an emit", "heal an emit", "pause", "resume"),
    *("begin within a budget", "find a budget spent", "allow more", "go on with more"),
)
BODIES = ("send to a body that is held", "wake a wait whose time is up", "cancel with children", "reopen with steps")
CALLS = {
    **{name: test_runs_crashed.TRANSITIONS[name][:2] for name in RUNS},
    **{name: test_durable_crashed.TRANSITIONS[name][:2] for name in BODIES},
    **{f"incidents: {name}": each[:2] for name, each in test_incidents_crashed.TRANSITIONS.items()},
    "forget runs": (test_runs_crashed.stopped, lambda conn, _: conn.execute("select taskq.prune_runs()")),
}


def others(conn: Conn) -> None:
    """Of each kind so many that the calls here have nothing to do with."""
    nodes_of_others(conn, OTHERS)
    for insert in (
        "taskq.runs (created_at, finished_at, open_nodes, receipts, status, workflow, plan_hash, input)"
        " select now(), now(), 0, 10, 'succeeded', 'o', 'p', '{}'",
        "taskq.runs (created_at, open_nodes, receipts, workflow, plan_hash, input) select now(), 1, 10, 'o', 'p', '{}'",
        "taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload)"
        " select now() + interval '1 h', now(), 3, 'o', 't', 'p', '{}'",
        "taskq.steps (job_id, generation, name, occurrence, claim_epoch, recorded_at, value)"
        " select taskq.new_id(), 0, 's', 1, 1, now(), '1'",
        "taskq.signals (job_id, generation, name, sent_at, payload) select taskq.new_id(), 0, 's', now(), '1'",
        "taskq.effect_intents (id, effect_key, owner_job_id, owner_task, generation, name, status, task, job_id,"
        " fingerprint, depth, undoes, created_at) select taskq.new_id(), taskq.new_id()::text, taskq.new_id(), 't', 0,"
        " 'n', 'succeeded', 't', taskq.new_id(), 'f', 1, false, now()",
        "taskq.incidents (job_id, generation, phase, fingerprint, code, fault, status, opened_at, seen_at)"
        " select taskq.new_id(), 0, 'prepare', 'f', 'c', '{}', 'open', now(), now()",
        "taskq.incident_events (incident_id, n, at, kind) select taskq.new_id(), 1, now(), 'failed'",
        "taskq.preparations (job_id, claim_epoch, worker_id, began_at, verdict)"
        " select taskq.new_id(), 1, taskq.new_id(), now(), 'go'",
        "taskq.facts (owner, name, version, job_id, claim_epoch, set_at) select taskq.new_id(), 'n', 1, taskq.new_id(),"
        " 1, now()",
    ):
        conn.execute(f"insert into {insert} from generate_series(1, %s)".encode(), (OTHERS,))


def looked_at(conn: Conn) -> dict[str, int]:
    """How many rows, or entries, this transaction has read of each table and index."""
    found = rows(
        conn,
        "select c.relname, pg_stat_get_xact_tuples_returned(c.oid) + pg_stat_get_xact_tuples_fetched(c.oid) as n"
        " from pg_class c where c.relnamespace = 'taskq'::regnamespace and c.relkind in ('r', 'i')",
    )
    return {row["relname"]: row["n"] for row in found}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_does_not_read_the_rows_of_others(dsn: str, name: str) -> None:
    before: Callable[[Conn], Made]
    call: Callable[[Conn, Made], Any]
    before, call = CALLS[name]
    with psycopg.connect(dsn) as conn:
        # As an analyze leaves it that came while the first rows were being written: pages, and nothing in them.
        conn.execute("update pg_class set reltuples = 0, relpages = 8 where relnamespace = 'taskq'::regnamespace")
        made = before(conn)
        others(conn)
        conn.commit()
        then = looked_at(conn)
        call(conn, made)
        now = looked_at(conn)
        # Healing and carrying on look at each run that is open, once.
        most = {"runs_open": 3 * OTHERS, "plans": 3 * OTHERS}
        read = {each: n - then.get(each, 0) for each, n in now.items()}
        assert {each: n for each, n in read.items() if n > most.get(each, 1_000)} == {}

"""``check_invariants`` reports every violation of a law that rows can show, and nothing else.

Each violation is forged past the triggers, as a bug or a hand with too many rights would leave it, and must be reported
for that very job under that very code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
import pytest
from effects_kit import effect, intents, promising
from sql import (
    End,
    cancel,
    claim,
    claim_one,
    end,
    enqueue,
    lose,
    make_due,
    one,
    refused,
    register,
    resolve,
    retry,
    rows,
    running,
    settle,
    start_effects,
    unknown,
    violations,
)
from test_ordering_invariants import FORGED_LINES

Conn = psycopg.Connection[Any]


class World(NamedTuple):
    """A job in every state that there is, with two attempts on record or more where it ran, and one that ran once."""

    pending: UUID
    running: UUID
    unknown: UUID
    keyed: UUID
    succeeded: UUID
    failed: UUID
    cancelled: UUID
    reopened: UUID
    once: UUID
    owner: UUID
    effect: UUID
    effect_done: UUID
    paying: UUID
    paid: UUID
    decided: UUID
    settled: UUID


@pytest.fixture
def world(conn: Conn) -> World:
    worker = register(conn)

    def lived(*outcomes: str, **spec: Any) -> UUID:
        job = enqueue(conn, max_attempts=9, task="t", **spec)
        for outcome in outcomes:
            make_due(conn, job)
            row = claim_one(conn, worker)
            assert row["job_id"] == job
            if outcome:
                end(conn, worker, End(job, row["claim_epoch"], outcome, delay=3600 if outcome != "release" else 0))
        return job

    succeeded = lived("retry", "snooze", "succeeded")
    failed = lived("retry", "retry_after", "failed")
    reopened = lived("retry", "snooze", "failed")
    retry(conn, reopened)
    claim_one(conn, worker)
    end(conn, worker, End(reopened, 4, "retry", delay=3600))
    once = lived("succeeded")
    pending = lived("retry", "snooze")
    current = lived("retry", "snooze", "")
    cancelled = lived("retry", "snooze")
    cancel(conn, cancelled)
    _, lost = unknown(conn)
    # Recovered once, and waiting with a key.
    keyed = enqueue(conn, unique_key="k")
    loser = register(conn)
    claim_one(conn, loser)
    lose(conn, loser)
    settle(conn)
    # Ended, with two effects: one waits, one has been carried out.
    owner = enqueue(conn, **promising(conn, effect("a", payload={"n": {"value": 1}}), effect("b", queue="b")))
    cancel(conn, owner)
    first, second = (intent["job_id"] for intent in intents(conn, owner))
    claim(conn, worker, 1, lanes=[("b", 5)])
    end(conn, worker, End(second, 1, "succeeded"))
    # Side effects: told to be tried again, once waiting and once done; decided that it did not happen, and that it did.
    payer = register(conn, queues=["pay"])

    def pays(*outcomes: str) -> UUID:
        job = enqueue(conn, queue="pay", effect_class="side_effecting")
        for epoch, outcome in enumerate(outcomes, 1):
            make_due(conn, job)
            assert claim_one(conn, payer, lanes=[("pay", 5)])["job_id"] == job
            start_effects(conn, payer, (job, epoch))
            end(conn, payer, End(job, epoch, outcome, error={"reason": "told"}, delay=3600))
        return job

    paying, paid, decided, settled = pays("retry"), pays("retry_after", "succeeded"), pays("unknown"), pays("unknown")
    resolve(conn, decided, happened=False)
    resolve(conn, settled, happened=True)
    made = World(
        *(pending, current, lost, keyed, succeeded, failed, cancelled, reopened, once, owner, first, second),
        *(paying, paid, decided, settled),
    )
    for scope in ("live", "all"):
        assert violations(conn, scope) == []
    return made


FORGERIES: list[tuple[str, Callable[[World], UUID], str, str]] = [
    # code, of which job, how it is forged, the smallest scope that reports it
    (
        "in_jobs_and_history",
        lambda w: w.succeeded,
        "insert into taskq.jobs select {jobs_of_history} from taskq.history h where h.id = %s",
        "live",
    ),
    (
        "attempts_do_not_add_up",
        lambda w: w.pending,
        "update taskq.jobs set claim_epoch = claim_epoch + 1 where id = %s",
        "live",
    ),
    ("attempts_do_not_add_up", lambda w: w.pending, "update taskq.jobs set pruned_attempts = 1 where id = %s", "live"),
    (
        "attempts_do_not_add_up",
        lambda w: w.running,
        "update taskq.jobs set claim_epoch = claim_epoch + 1 where id = %s",
        "live",
    ),
    (
        "attempts_do_not_add_up",
        lambda w: w.unknown,
        "with u as (update taskq.unknowns set claim_epoch = claim_epoch + 1 where job_id = %s returning job_id)"
        " update taskq.jobs j set claim_epoch = claim_epoch + 1 from u where j.id = u.job_id",
        "live",
    ),
    (
        "attempts_do_not_add_up",
        lambda w: w.succeeded,
        "update taskq.history set claim_epoch = claim_epoch + 1 where id = %s",
        "all",
    ),
    (
        "attempts_do_not_add_up",
        lambda w: w.cancelled,
        "update taskq.history set claim_epoch = claim_epoch + 1 where id = %s",
        "all",
    ),
    ("attempts_do_not_add_up", lambda w: w.failed, "update taskq.history set pruned_attempts = 1 where id = %s", "all"),
    (
        "attempt_beyond_epoch",
        lambda w: w.pending,
        "update taskq.ledger set claim_epoch = 9 where claim_epoch = 2 and job_id = %s",
        "live",
    ),
    (
        "attempt_beyond_epoch",
        lambda w: w.running,
        "update taskq.ledger set claim_epoch = 3 where claim_epoch = 2 and job_id = %s",
        "live",
    ),
    (
        "attempt_beyond_epoch",
        lambda w: w.failed,
        "update taskq.ledger set claim_epoch = 3 where claim_epoch = 2 and job_id = %s",
        "all",
    ),
    (
        "attempt_beyond_epoch",
        lambda w: w.cancelled,
        "update taskq.ledger set claim_epoch = 3 where claim_epoch = 2 and job_id = %s",
        "all",
    ),
    (
        "attempt_twice",
        lambda w: w.pending,
        "update taskq.ledger set claim_epoch = 1 where claim_epoch = 2 and job_id = %s",
        "live",
    ),
    (
        "attempt_twice",
        lambda w: w.failed,
        "update taskq.ledger set claim_epoch = 1 where claim_epoch = 2 and job_id = %s",
        "all",
    ),
    (
        "counters_differ_from_record",
        lambda w: w.pending,
        "update taskq.jobs set attempt = attempt + 1 where id = %s",
        "live",
    ),
    (
        "counters_differ_from_record",
        lambda w: w.running,
        "update taskq.jobs set snoozes = snoozes + 1 where id = %s",
        "live",
    ),
    ("counters_differ_from_record", lambda w: w.keyed, "update taskq.jobs set recoveries = 0 where id = %s", "live"),
    (
        "counters_differ_from_record",
        lambda w: w.pending,
        "update taskq.jobs set retry_afters = 1 where id = %s",
        "live",
    ),
    ("counters_differ_from_record", lambda w: w.pending, "update taskq.jobs set releases = 1 where id = %s", "live"),
    ("counters_differ_from_record", lambda w: w.reopened, "update taskq.jobs set attempt = 2 where id = %s", "live"),
    (
        "counters_differ_from_record",
        lambda w: w.failed,
        "update taskq.history set attempt = attempt - 1 where id = %s",
        "all",
    ),
    (
        "counters_differ_from_record",
        lambda w: w.failed,
        "update taskq.history set retry_afters = 0 where id = %s",
        "all",
    ),
    ("counters_differ_from_record", lambda w: w.succeeded, "update taskq.history set snoozes = 2 where id = %s", "all"),
    (
        "counters_differ_from_record",
        lambda w: w.succeeded,
        "update taskq.history set recoveries = 1 where id = %s",
        "all",
    ),
    (
        "counters_differ_from_record",
        lambda w: w.cancelled,
        "update taskq.history set releases = 1 where id = %s",
        "all",
    ),
    (
        "effect_started_of_other_class",
        lambda w: w.running,
        "update taskq.jobs set effect_started_at = now() where id = %s",
        "live",
    ),
    (
        "effect_started_of_other_class",
        lambda w: w.succeeded,
        "update taskq.history set effect_started_at = now() where id = %s",
        "all",
    ),
    ("unknown_without_record", lambda w: w.unknown, "delete from taskq.unknowns where job_id = %s", "live"),
    (
        "unknown_without_cause",
        lambda w: w.unknown,
        "update taskq.jobs set cancel_requested_at = null where id = %s",
        "live",
    ),
    ("unknown_without_cause", lambda w: w.unknown, "update taskq.jobs set effect_class = 'pure' where id = %s", "live"),
    (
        "unknown_without_cause",
        lambda w: w.unknown,
        "update taskq.jobs set effect_class = 'side_effecting', required_worker_schema = 2 where id = %s",
        "live",
    ),
    ("side_effect_repeated", lambda w: w.paying, "update taskq.ledger set outcome_id = null where job_id = %s", "live"),
    ("side_effect_repeated", lambda w: w.decided, "update taskq.ledger set outcome = 'lost' where job_id = %s", "live"),
    ("side_effect_repeated", lambda w: w.decided, "delete from taskq.unknowns where job_id = %s", "live"),
    (
        "side_effect_repeated",
        lambda w: w.decided,
        "update taskq.unknowns set claim_epoch = claim_epoch + 1 where job_id = %s",
        "live",
    ),
    (
        "side_effect_repeated",
        lambda w: w.decided,
        """update taskq.audit set details = details || '{"happened": true}' where subject = %s::text""",
        "live",
    ),
    (
        "side_effect_repeated",
        lambda w: w.decided,
        """update taskq.audit set details = details || '{"claim_epoch": 2}' where subject = %s::text""",
        "live",
    ),
    ("side_effect_repeated", lambda w: w.paid, "update taskq.ledger set outcome_id = null where job_id = %s", "all"),
    ("side_effect_untold", lambda w: w.paid, "update taskq.history set outcome_id = null where id = %s", "all"),
    ("side_effect_untold", lambda w: w.settled, "delete from taskq.audit where subject = %s::text", "all"),
    (
        "succeeded_without_effect_start",
        lambda w: w.paid,
        "update taskq.history set effect_started_at = null where id = %s",
        "all",
    ),
    ("policy_missing", lambda w: w.pending, "update taskq.jobs set policy_id = 'gone' where id = %s", "live"),
    (
        "unique_key_not_held",
        lambda w: w.keyed,
        "update taskq.unique_keys set key = 'other', expires_at = now() where job_id = %s",
        "live",
    ),
    (
        "unique_key_of_no_job",
        lambda w: w.succeeded,
        "insert into taskq.unique_keys (scope, key, job_id) values ('t', 'x', %s)",
        "live",
    ),
    (
        "twice_in_history",
        lambda w: w.once,
        "insert into taskq.history select {later} from taskq.history h where h.id = %s",
        "all",
    ),
    (
        "effect_without_job",
        lambda w: w.owner,
        "update taskq.effect_intents set job_id = null where name = 'a' and owner_job_id = %s",
        "live",
    ),
    ("effect_job_differs", lambda w: w.effect, """update taskq.jobs set payload = '{"n": 2}' where id = %s""", "live"),
    ("effect_job_differs", lambda w: w.effect, "update taskq.jobs set task = 'other' where id = %s", "live"),
    ("effect_job_differs", lambda w: w.effect_done, "update taskq.history set task = 'other' where id = %s", "all"),
    (
        "effect_not_promised",
        lambda w: w.owner,
        "delete from taskq.effect_intents where name = 'b' and owner_job_id = %s",
        "all",
    ),
    (
        "effect_not_promised",
        lambda w: w.succeeded,
        "update taskq.history set has_effects = true, policy_id = 'gone' where id = %s",
        "all",
    ),
    (
        "effect_job_missing",
        lambda w: w.owner,
        "delete from taskq.jobs where id = (select job_id from taskq.effect_intents where name = 'a' and"
        " owner_job_id = %s)",
        "all",
    ),
    ("attempt_of_no_job", lambda w: w.pending, "delete from taskq.jobs where id = %s", "all"),
]


def expand(conn: Conn, statement: str) -> str:
    if "{jobs_of_history}" in statement:
        columns = [
            row["attname"]
            for row in rows(
                conn,
                "select attname from pg_attribute where attrelid = 'taskq.jobs'::regclass and attnum > 0"
                " order by attnum",
            )
        ]
        of_history = {
            row["attname"]
            for row in rows(
                conn, "select attname from pg_attribute where attrelid = 'taskq.history'::regclass and attnum > 0"
            )
        }
        instead = {"status": "'pending'", "claimed_at": "null", "attempt": "1", "claim_epoch": "2"}
        values = [instead.get(c) or (f"h.{c}" if c in of_history else "null") for c in columns]
        return statement.replace("{jobs_of_history}", ", ".join(values))
    if "{later}" in statement:
        later = "(jsonb_populate_record(h, jsonb_build_object('finished_at', h.finished_at + interval '1 ms'))).*"
        return statement.replace("{later}", later)
    return statement


@pytest.mark.parametrize(("code", "whose", "forge", "scope"), FORGERIES)
def test_a_forged_violation_is_reported_for_its_job(
    conn: Conn, world: World, code: str, whose: Callable[[World], UUID], forge: str, scope: str
) -> None:
    job = whose(world)
    conn.execute("set local session_replication_role = replica")
    assert conn.execute(expand(conn, forge), (job,)).rowcount == 1
    found = violations(conn, scope)
    assert (code, job) in found
    assert {j for _, j in found} == {job}
    assert {c for c, _ in found} == {code}
    if scope == "all":
        assert violations(conn, "live") == []


def test_each_check_has_its_forgery(conn: Conn) -> None:
    text = one(conn, "select prosrc from pg_proc where oid = 'taskq.check_invariants(text, timestamptz)'::regprocedure")
    live, every = text.split("if scope = 'live' then", 1)
    checks = {
        (scope, code)
        for scope, part in (("live", live), ("all", every))
        for code in re.findall(r"(?:\bselect |\()\d+, '(\w+)',", part)
    }
    assert len(checks) > 10
    forged = {(scope, code) for code, _, _, scope in FORGERIES} | {("live", code) for code, _, _ in FORGED_LINES}
    assert forged | {("live", "ordering_out_of_turn")} == checks


def test_a_reopening_that_lost_its_record_is_reported(conn: Conn, world: World) -> None:
    conn.execute("set local session_replication_role = replica")
    assert (
        conn.execute("delete from taskq.ledger where claim_epoch = 3 and job_id = %s", (world.reopened,)).rowcount == 1
    )
    assert violations(conn, "live") == [("attempts_do_not_add_up", world.reopened)]


def test_scopes_say_what_they_look_at(conn: Conn, world: World) -> None:
    conn.execute("set local session_replication_role = replica")
    conn.execute("update taskq.history set claim_epoch = 7 where id = %s", (world.failed,))
    wrong = [("attempts_do_not_add_up", world.failed)]
    assert violations(conn, "live") == []
    since = "select code, job_id from taskq.check_invariants('since', %s::timestamptz)"
    at = one(conn, "select finished_at from taskq.history where id = %s", world.failed)
    for moment, expected in ((at, wrong), ("-infinity", wrong)):
        assert [(r["code"], r["job_id"]) for r in rows(conn, since, moment)] == expected
    later = one(conn, "select %s + interval '1 us'", at)
    assert rows(conn, since, later) == []
    for call in ("check_invariants('everything')", "check_invariants('since')", "check_invariants('live', now())"):
        assert refused(conn, f"select * from taskq.{call}") == "WF009"


def test_one_call_sees_one_snapshot(conn: Conn) -> None:
    assert one(conn, "select provolatile from pg_proc where proname = 'check_invariants'") == "s"


def test_running_jobs_are_clean(conn: Conn) -> None:
    running(conn)
    assert violations(conn) == []

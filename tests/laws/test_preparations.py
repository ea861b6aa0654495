"""Preparations: before the attempt, under its claim, and unable to end it; what they find, and what holds them up."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from incidents_kit import FAILED, answer, begin, current, events, grant, holding, pair, prepare
from runs_kit import do, edge, finish, info, job_of, kinds, node, result_of, start, store, take, tree, worker_for
from sql import (
    Conn,
    attempts,
    cancel,
    claim_one,
    enqueue,
    get,
    lose,
    make_due,
    one,
    refused,
    rows,
    running,
    settle,
    start_effects,
    violations,
)


def state(conn: Conn, job: UUID) -> tuple[str, str | None]:
    row = get(conn, job)
    return row["status"], row["held_reason"]


def pause_of(conn: Conn, run: UUID) -> tuple[str, str, UUID | None]:
    [row] = rows(conn, "select code, actor, incident from taskq.paused_runs where run_id = %s", run)
    return row["code"], row["actor"], row["incident"]


# Ready ----------------------------------------------------------------------------------------------------------------


def test_what_is_ready_begins_its_attempt_under_the_same_claim(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    claimed, became = prepare(conn, worker, "a", "ready")
    assert (became, tree(conn, run)["a"]) == ("ready", "running")
    finish(conn, worker, claimed)
    assert attempts(conn, claimed["job_id"]) == [(1, "succeeded")]
    [row] = rows(conn, "select answer, became from taskq.preparations where job_id = %s", claimed["job_id"])
    assert (row["answer"], row["became"], violations(conn)) == ("ready", "ready", [])


def test_a_node_whose_preparation_goes_on_is_shown_as_preparing(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    [claimed] = take(conn, worker, "a").values()
    begin(conn, worker, claimed)
    assert tree(conn, run)["a"] == "preparing"
    answer(conn, worker, claimed, "ready")
    assert tree(conn, run)["a"] == "running"


def test_told_again_it_answers_the_same_and_counts_once(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn)
    [claimed] = take(conn, worker, "a").values()
    assert begin(conn, worker, claimed) == begin(conn, worker, claimed)
    for _ in range(2):
        assert answer(conn, worker, claimed, "failed", FAILED)["became"] == "released"
    other = prepare(conn, worker, "a", "unmet", {"prerequisite": "nothing", "checks": []})[0]
    # Noted as another fault than it was told as.
    assert answer(conn, worker, other, "unmet", {"prerequisite": "nothing", "checks": []})["became"] == "released"
    [incident] = rows(conn, "select * from taskq.incidents where not is_current")
    assert (incident["failures"], events(conn, incident["id"])) == (1, ["failed", "launched"])
    # Another answer to a claim that is over is none.
    assert answer(conn, worker, claimed, "ready")["became"] == "fenced"
    assert violations(conn) == []


def test_no_preparation_uses_up_an_attempt_or_ends_the_job(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn, recoveries=50)
    for n in range(20):
        claimed, became = prepare(conn, worker, "a", "failed", {"type": "Boom", "message": f"try {n}"})
        assert became == "released"
    row = get(conn, claimed["job_id"])
    assert (row["attempt"], row["recoveries"], row["releases"]) == (0, 0, 20)
    assert {outcome for _, outcome in attempts(conn, claimed["job_id"])} == {"released"}
    assert (info(conn, run)["status"], violations(conn)) == ("running", [])


def test_facts_are_seen_by_what_comes_after_and_cleared_by_preparations_alone(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    details = {"facts": {"rate": {"seen": 0, "value": 1.5}, "none": {"seen": 0, "value": None}}}
    claimed, _ = prepare(conn, worker, "a", "ready", details)
    finish(conn, worker, claimed)
    [claimed] = take(conn, worker, "b").values()
    told = begin(conn, worker, claimed)["facts"]
    assert told == {"rate": {"version": 1, "value": 1.5}, "none": {"version": 1, "value": None}}
    answer(conn, worker, claimed, "ready", {"facts": {"rate": {"seen": 1}}})
    [row] = rows(conn, "select * from taskq.facts where owner = %s and name = 'rate'", run)
    assert (row["version"], row["value"], row["job_id"]) == (2, None, claimed["job_id"])
    assert violations(conn) == []


def test_a_fact_that_a_sibling_has_set_since_stays(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b")]))
    claims = take(conn, worker, "a", "b")
    for name in ("a", "b"):
        assert begin(conn, worker, claims[name])["facts"] == {}
    answer(conn, worker, claims["b"], "ready", {"facts": {"rate": {"seen": 0, "value": "b"}}})
    [after] = rows(
        conn,
        "select facts from taskq.end_preparation(%s, %s, %s, 'ready', %s)",
        worker,
        claims["a"]["job_id"],
        claims["a"]["claim_epoch"],
        '{"facts": {"rate": {"seen": 0, "value": "a"}, "other": {"seen": 0, "value": 1}}}',
    )
    assert '"b"' in after["facts"]
    assert '"a"' not in after["facts"]
    assert one(conn, "select version from taskq.facts where owner = %s and name = 'rate'", run) == 1


# What keeps it from the attempt ---------------------------------------------------------------------------------------


def test_a_fault_is_tried_again_within_its_bound_and_then_waits_for_a_grant(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    for n in range(2):
        claimed, became = prepare(conn, worker, "a", "failed", {"type": "Boom", "message": f"connection {n} is gone"})
        assert became == "released"
        assert current(conn, claimed["job_id"])["status"] == "open"
    claimed, became = prepare(conn, worker, "a", "failed", {"type": "Boom", "message": "connection 77 is gone"})
    job = claimed["job_id"]
    incident = current(conn, job)
    assert (became, state(conn, job), incident["status"]) == ("held", ("held", "incident"), "exhausted")
    assert (incident["failures"], incident["launches"], incident["bound"]) == (3, 2, 2)
    assert incident["fingerprint"] == "Boom: connection # is gone"
    assert info(conn, run)["status"] == "paused"
    assert pause_of(conn, run) == ("preparation_failed", "taskq:prepare", incident["id"])
    [row] = rows(conn, "select * from taskq.open_incidents where job_id = %s", job)
    assert row["command"] == f"taskq incidents grant {incident['id']} --reason WHY"
    # One more, and only one.
    assert grant(conn, incident["id"]) == "granted"
    assert (grant(conn, incident["id"]), info(conn, run)["status"]) == ("already", "running")
    claimed, became = prepare(conn, worker, "a", "failed", FAILED | {"message": "connection 1 is gone"})
    assert (became, current(conn, job)["id"]) == ("held", incident["id"])
    assert grant(conn, incident["id"]) == "granted"
    claimed, became = prepare(conn, worker, "a", "ready")
    assert became == "ready"
    assert events(conn, incident["id"]) == [
        *["failed", "launched"] * 2,
        *["failed", "granted", "launched"] * 2,
        "resolved",
    ]
    finish(conn, worker, claimed)
    do(conn, worker, "b")
    assert (info(conn, run)["status"], violations(conn)) == ("succeeded", [])
    assert [k for k in kinds(conn, run) if k in ("interrupted", "granted", "recovered")] == [
        *["interrupted", "granted", "recovered"] * 2
    ]


def test_another_fault_is_another_incident_with_a_bound_of_its_own(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn, recoveries=1)
    claimed, became = prepare(conn, worker, "a", "failed", FAILED)
    first = current(conn, claimed["job_id"])
    assert prepare(conn, worker, "a", "failed", {"type": "Bang", "message": "other"})[1] == "released"
    second = current(conn, claimed["job_id"])
    assert (second["id"] != first["id"], second["failures"]) == (True, 1)
    # The first one again: its recovery was used up.
    assert prepare(conn, worker, "a", "failed", FAILED)[1] == "held"
    assert current(conn, claimed["job_id"])["id"] == first["id"]
    assert violations(conn) == []


@pytest.mark.parametrize(
    ("one_message", "other"),
    [
        ("no route to 10.0.0.1:5432 after 3.5 s", "no route to 10.0.0.2:6432 after 12 s"),
        ("order 0198c0de-1111-7222-8333-444455556666", "order 0198c0de-1111-7222-8333-444455556667"),
        ("commit deadbeef01234567 is gone", "commit 0123456789abcdef0123 is gone"),
        ("at 2026-01-01T10:00:00", "at 2027-12-31T23:59:59"),
    ],
)
def test_what_changes_each_time_does_not_make_another_fault(conn: Conn, one_message: str, other: str) -> None:
    ask = "select taskq.fault_fingerprint('E', %s)"
    assert one(conn, ask, one_message) == one(conn, ask, other)
    assert one(conn, ask, one_message) != one(conn, ask, "something else")


def test_a_pause_pauses_the_run_and_it_is_prepared_again_when_that_goes_on(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    claimed, became = prepare(conn, worker, "a", "pause", {"code": "provider-down", "reason": "since noon"})
    assert (became, state(conn, claimed["job_id"])) == ("paused", ("held", "paused"))
    assert pause_of(conn, run) == ("provider-down", "taskq:prepare", None)
    assert one(conn, "select taskq.resume_run(%s, 'well again', 'me')", run) == "resumed"
    claimed, became = prepare(conn, worker, "a", "ready")
    assert (became, claimed["claim_epoch"], violations(conn)) == ("ready", 2, [])


def test_a_pause_that_is_there_keeps_its_code(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    [claimed] = take(conn, worker, "a").values()
    begin(conn, worker, claimed)
    one(conn, "select taskq.pause_run(%s, 'looking', 'me', 'audit')", run)
    assert answer(conn, worker, claimed, "pause", {"code": "other"})["became"] == "paused"
    assert pause_of(conn, run) == ("audit", "me", None)
    assert violations(conn) == []


def test_what_was_paused_meanwhile_begins_no_attempt(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    [claimed] = take(conn, worker, "a").values()
    begin(conn, worker, claimed)
    one(conn, "select taskq.pause_run(%s, 'looking', 'me', 'audit')", run)
    assert answer(conn, worker, claimed, "ready")["became"] == "paused"
    assert answer(conn, worker, claimed, "ready")["became"] == "paused"
    assert (state(conn, claimed["job_id"]), violations(conn)) == (("held", "paused"), [])


def test_what_was_cancelled_meanwhile_begins_no_attempt(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn)
    [claimed] = take(conn, worker, "a").values()
    begin(conn, worker, claimed)
    assert cancel(conn, claimed["job_id"]) == "requested"
    assert answer(conn, worker, claimed, "ready")["became"] == "cancelled"
    assert get(conn, claimed["job_id"])["status"] == "running"
    finish(conn, worker, claimed, "cancelled")
    assert violations(conn) == []


@pytest.mark.parametrize(
    ("said", "details"),
    [
        ("failed", FAILED),
        ("pause", {"code": "p"}),
        ("needs_approval", {"what": "w"}),
        ("unmet", {"prerequisite": "c", "checks": ["c"]}),
    ],
)
def test_whatever_it_answers_a_cancel_that_was_asked_for_ends_it(conn: Conn, said: str, details: Any) -> None:
    worker = worker_for(conn)
    of = {"policy_id": holding(conn, 0)}
    run = start(conn, store(conn, [node("a", **of), node("other")], on_failure="finish"))
    [claimed] = take(conn, worker, "a").values()
    begin(conn, worker, claimed)
    cancel(conn, claimed["job_id"])
    assert answer(conn, worker, claimed, said, details)["became"] == "ended"
    assert answer(conn, worker, claimed, said, details)["became"] == "ended"
    # Nothing is left to hold, so nothing is paused for it.
    assert (get(conn, claimed["job_id"])["status"], info(conn, run)["status"]) == ("cancelled", "running")
    assert (rows(conn, "select * from taskq.incidents"), violations(conn)) == ([], [])


def test_a_preparation_of_a_cancelled_or_lost_claim_does_not_begin(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn)
    [claimed] = take(conn, worker, "a").values()
    cancel(conn, claimed["job_id"])
    assert begin(conn, worker, claimed)["answer"] == "cancelled"
    other = {**claimed, "claim_epoch": claimed["claim_epoch"] + 1}
    assert begin(conn, worker, other)["answer"] == "fenced"
    assert answer(conn, worker, claimed, "ready")["became"] == "fenced"
    conn.execute("update taskq.workers set lease_expires_at = now() - interval '1 s'")
    job = claimed["job_id"]
    conn.execute("update taskq.jobs set cancel_requested_at = null where id = %s", (job,))
    assert begin(conn, worker, claimed)["answer"] == "lease"
    assert rows(conn, "select * from taskq.preparations") == []


def test_ready_without_a_lease_is_not_ready(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn)
    [claimed] = take(conn, worker, "a").values()
    begin(conn, worker, claimed)
    conn.execute("update taskq.workers set lease_expires_at = now() - interval '1 s'")
    assert answer(conn, worker, claimed, "ready", {"facts": {"x": {"seen": 0, "value": 1}}})["became"] == "lease"
    assert rows(conn, "select * from taskq.facts") == []


def test_an_approval_is_for_its_words_and_stays(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    claimed, became = prepare(conn, worker, "a", "needs_approval", {"what": "refund of 120 EUR"})
    job = claimed["job_id"]
    incident = current(conn, job)
    assert (became, incident["status"], pause_of(conn, run)[0]) == ("held", "exhausted", "needs_approval")
    assert grant(conn, incident["id"]) == "granted"
    [claimed] = take(conn, worker, "a").values()
    assert begin(conn, worker, claimed) == {"answer": "go", "facts": {}, "approved": ["refund of 120 EUR"]}
    # Lost before it has answered: what was approved is not asked for again.
    lose(conn, worker)
    settle(conn)
    worker = worker_for(conn)
    [claimed] = take(conn, worker, "a").values()
    assert begin(conn, worker, claimed)["answer"] == "go"
    # Other words are another approval.
    assert answer(conn, worker, claimed, "needs_approval", {"what": "refund of 121 EUR"})["became"] == "held"
    assert current(conn, job)["id"] != incident["id"]
    grant(conn, current(conn, job)["id"])
    [claimed] = take(conn, worker, "a").values()
    assert begin(conn, worker, claimed)["approved"] == ["refund of 120 EUR", "refund of 121 EUR"]
    assert answer(conn, worker, claimed, "ready")["became"] == "ready"
    assert violations(conn) == []


def test_what_was_granted_and_lost_on_the_way_is_granted_again(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn, recoveries=0)
    claimed, became = prepare(conn, worker, "a", "failed", FAILED)
    job = claimed["job_id"]
    # No recoveries at all: it is held at once.
    assert became == "held"
    grant(conn, current(conn, job)["id"])
    [claimed] = take(conn, worker, "a").values()
    begin(conn, worker, claimed)
    # Handed back by a worker that stops: the one recovery was used.
    finish(conn, worker, claimed, "release")
    [claimed] = take(conn, worker, "a").values()
    for _ in range(2):
        assert begin(conn, worker, claimed)["answer"] == "exhausted"
    assert answer(conn, worker, claimed, "exhausted")["became"] == "held"
    assert (state(conn, job), current(conn, job)["status"]) == (("held", "incident"), "exhausted")
    assert (events(conn, current(conn, job)["id"]), violations(conn)) == (["failed", "granted", "launched"], [])


def test_the_same_unmet_prerequisite_counts_once_and_is_tried_again_without_end(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    details = {"prerequisite": "bank_open", "retry_in": 0, "checks": ["bank_open"]}
    for _ in range(5):
        claimed, became = prepare(conn, worker, "a", "unmet", details)
        assert became == "released"
    incident = current(conn, claimed["job_id"])
    assert (incident["failures"], incident["launches"], events(conn, incident["id"])) == (1, 0, ["failed"])
    assert (incident["fault"]["kind"], incident["status"], info(conn, run)["status"]) == ("check", "open", "running")
    assert prepare(conn, worker, "a", "ready")[1] == "ready"
    assert (events(conn, incident["id"]), violations(conn)) == (["failed", "resolved"], [])


def test_an_unmet_prerequisite_waits_for_its_time(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn)
    details = {"prerequisite": "bank_open", "retry_in": 600, "checks": ["bank_open"]}
    claimed, _ = prepare(conn, worker, "a", "unmet", details)
    assert take(conn, worker, "a") == {}
    assert one(conn, "select run_at > now() + interval '500 s' from taskq.jobs where id = %s", claimed["job_id"])
    make_due(conn, claimed["job_id"])
    assert prepare(conn, worker, "a", "ready")[1] == "ready"


def test_an_unmet_prerequisite_without_a_time_waits_for_somebody(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    do(conn, worker, "a")
    # An argument, and a node whose result it takes.
    for name, kind in (("rate", "input"), ("a", "producer")):
        claimed, became = prepare(conn, worker, "b", "unmet", {"prerequisite": name, "retry_in": None, "checks": []})
        incident = current(conn, claimed["job_id"])
        assert (became, incident["fault"]["kind"], incident["code"]) == ("held", kind, "unmet_prerequisite")
        assert pause_of(conn, run)[0] == "unmet_prerequisite"
        assert grant(conn, incident["id"]) == "granted"
    assert violations(conn) == []


def test_a_prerequisite_that_names_nothing_is_a_fault(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn)
    claimed, became = prepare(conn, worker, "a", "unmet", {"prerequisite": "b", "retry_in": None, "checks": ["c"]})
    incident = current(conn, claimed["job_id"])
    assert (became, incident["code"], incident["fault"]["type"]) == (
        "released",
        "preparation_failed",
        "PrerequisiteInvalid",
    )


# Plain jobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "details", "code"),
    [
        ("pause", {"code": "provider-down", "reason": None}, "provider-down"),
        ("needs_approval", {"what": "w"}, "needs_approval"),
        ("unmet", {"prerequisite": "n", "checks": ["n"]}, "unmet_prerequisite"),
    ],
)
def test_a_plain_job_is_held_until_it_is_granted(conn: Conn, said: str, details: Any, code: str) -> None:
    worker = worker_for(conn)
    job = enqueue(conn)
    claimed = claim_one(conn, worker)
    begin(conn, worker, claimed)
    assert answer(conn, worker, claimed, said, details)["became"] == "held"
    incident = current(conn, job)
    assert (state(conn, job), incident["code"], incident["status"]) == (("held", "incident"), code, "exhausted")
    assert grant(conn, incident["id"]) == "granted"
    claimed = claim_one(conn, worker)
    assert begin(conn, worker, claimed)["answer"] == "go"
    assert answer(conn, worker, claimed, "ready", {"facts": {"x": {"seen": 0, "value": 1}}})["became"] == "ready"
    assert rows(conn, "select owner from taskq.facts") == [{"owner": job}]
    assert violations(conn) == []


def test_a_held_job_is_cancelled_like_any_other_and_says_what_it_waits_for(conn: Conn) -> None:
    worker = worker_for(conn)
    job = enqueue(conn)
    claimed = claim_one(conn, worker)
    begin(conn, worker, claimed)
    answer(conn, worker, claimed, "needs_approval", {"what": "w"})
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        one(conn, "select taskq.retry(%s)", job)
    assert "taskq incidents list" in str(caught.value.diag.message_hint)
    assert cancel(conn, job) == "cancelled"
    one(conn, "select taskq.prune()")
    [row] = rows(conn, "select status, is_current from taskq.incidents where job_id = %s", job)
    assert (row["status"], row["is_current"], violations(conn)) == ("resolved", False, [])


def test_an_ordered_job_keeps_its_place_while_it_is_held(conn: Conn) -> None:
    worker = worker_for(conn)
    first = enqueue(conn, ordering_key="k")
    second = enqueue(conn, ordering_key="k")
    claimed = claim_one(conn, worker)
    begin(conn, worker, claimed)
    answer(conn, worker, claimed, "needs_approval", {"what": "w"})
    assert (state(conn, first), state(conn, second)) == (("held", "incident"), ("held", "ordering"))
    grant(conn, current(conn, first)["id"])
    assert (state(conn, first), state(conn, second)) == (("pending", None), ("held", "ordering"))
    assert violations(conn) == []


def test_the_slot_of_a_cohort_is_held_while_it_is_prepared(conn: Conn) -> None:
    worker = worker_for(conn)
    one(conn, "select taskq.ensure_limit('c', 1)")
    jobs = [enqueue(conn, cohort="c") for _ in range(2)]
    claimed = claim_one(conn, worker)
    begin(conn, worker, claimed)
    assert take(conn, worker, "t") == {}
    answer(conn, worker, claimed, "needs_approval", {"what": "w"})
    assert take(conn, worker, "t")["t"]["job_id"] == jobs[1]
    assert violations(conn) == []


def test_an_effect_starts_after_the_preparation_and_not_without(conn: Conn) -> None:
    worker = worker_for(conn)
    _, job = running(conn, worker, effect_class="side_effecting")
    claimed = {"job_id": job, "claim_epoch": 1}
    begin(conn, worker, claimed)
    [started] = start_effects(conn, worker, (job, 1))
    assert started["effect_started_at"] is not None
    assert violations(conn) == [("begun_unprepared", job)]


# The record -----------------------------------------------------------------------------------------------------------


def test_the_events_of_an_incident_are_append_only(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn)
    prepare(conn, worker, "a", "failed", FAILED)
    assert refused(conn, "update taskq.incident_events set kind = 'resolved'") == "WF004"
    assert refused(conn, "delete from taskq.incident_events") == "WF004"
    assert refused(conn, "truncate taskq.incident_events") == "WF004"


def test_what_is_old_and_of_nothing_goes(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn)
    claimed, _ = prepare(conn, worker, "a", "failed", FAILED)
    claimed, _ = prepare(conn, worker, "a", "ready", {"facts": {"x": {"seen": 0, "value": 1}}})
    finish(conn, worker, claimed)
    do(conn, worker, "b")
    assert info(conn, run)["status"] == "succeeded"
    long_ago = "interval '1000 days'"
    conn.execute(f"update taskq.incidents set seen_at = seen_at - {long_ago}")
    conn.execute(f"update taskq.preparations set began_at = began_at - {long_ago}")
    conn.execute(f"update taskq.facts set set_at = set_at - {long_ago}")
    tables = ("incidents", "incident_events", "preparations", "facts")
    one(conn, "select taskq.prune()")
    assert [one(conn, f"select count(*) from taskq.{table}") for table in tables] == [1, 3, 2, 1]
    conn.execute("set session_replication_role = replica")
    for table in ("history", "runs", "nodes", "receipts"):
        conn.execute(f"delete from taskq.{table}")
    conn.execute("set session_replication_role = origin")
    one(conn, "select taskq.prune()")
    assert [one(conn, f"select count(*) from taskq.{table}") for table in tables] == [0, 0, 0, 0]


def test_an_answer_that_is_none_is_refused(conn: Conn) -> None:
    worker = worker_for(conn)
    enqueue(conn)
    claimed = claim_one(conn, worker)
    begin(conn, worker, claimed)
    query = "select * from taskq.end_preparation(%s, %s, 1, %s, '{}')"
    assert refused(conn, query, worker, claimed["job_id"], "maybe") == "WF009"
    assert refused(conn, query, worker, claimed["job_id"], None) == "WF009"
    assert rows(conn, query, worker, uuid4(), "failed")[0]["became"] == "fenced"


def test_a_child_run_is_paused_for_its_own_node_alone(conn: Conn) -> None:
    worker = worker_for(conn)
    of = {"policy_id": holding(conn, 0)}
    inner = store(conn, [node("x", **of)], workflow="inner")
    run = start(
        conn, store(conn, [node("kid", task="inner:await", child=inner), node("b", {"x": result_of(0)})], [edge(0, 1)])
    )
    claimed, became = prepare(conn, worker, "x", "failed", FAILED)
    child = one(conn, "select id from taskq.runs where parent_run = %s", run)
    assert (became, info(conn, child)["status"], info(conn, run)["status"]) == ("held", "paused", "running")
    assert state(conn, job_of(conn, run, "kid")) == ("held", "run")
    grant(conn, current(conn, claimed["job_id"])["id"])
    claimed, _ = prepare(conn, worker, "x", "ready")
    finish(conn, worker, claimed)
    do(conn, worker, "inner:await")
    do(conn, worker, "b")
    assert (info(conn, run)["status"], violations(conn)) == ("succeeded", [])


def test_faults_of_other_kinds_are_others_whatever_their_names(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn, recoveries=5)
    claimed, _ = prepare(conn, worker, "a", "needs_approval", {"what": "delete all"})
    asked = current(conn, claimed["job_id"])
    grant(conn, asked["id"])
    prepare(conn, worker, "a", "failed", {"type": "NeedsApproval", "message": "delete all"})
    failed = current(conn, claimed["job_id"])
    assert (failed["id"] != asked["id"], failed["code"], failed["bound"]) == (True, "preparation_failed", 5)
    make_due(conn, claimed["job_id"])
    [claimed] = take(conn, worker, "a").values()
    assert begin(conn, worker, claimed)["approved"] == ["delete all"]


def test_a_fact_that_has_moved_since_it_was_seen_stays(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b"), node("c")]))
    claims = take(conn, worker, "a", "b", "c")
    begin(conn, worker, claims["a"])
    answer(conn, worker, claims["a"], "ready", {"facts": {"rate": {"seen": 0, "value": 1}}})
    for name in ("b", "c"):
        assert begin(conn, worker, claims[name])["facts"]["rate"]["version"] == 1
    for name in ("b", "c"):
        answer(conn, worker, claims[name], "ready", {"facts": {"rate": {"seen": 1, "value": name}}})
    [row] = rows(conn, "select value, version from taskq.facts where owner = %s", run)
    assert (row["value"], row["version"]) == ("b", 2)

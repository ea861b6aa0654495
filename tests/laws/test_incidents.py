"""Exhausted recoveries: the job is held and its run paused in one transaction, and goes on as often as is granted."""

from __future__ import annotations

import re
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from incidents_kit import FAILED, HOLDS, current, events, grant, holding, pair, prepare, refusal
from runs_kit import do, edge, finish, info, job_of, kinds, node, start, store, take, tree, worker_for
from sql import (
    Conn,
    attempts,
    cancel,
    claim,
    enqueue,
    get,
    lose,
    make_due,
    one,
    policy,
    refused,
    resolve,
    retry,
    rows,
    start_effects,
    violations,
)


def lost(conn: Conn, worker: UUID, left_to: str = "held") -> list[tuple[str, str]]:
    """Lose a worker and do what the leader does; what was settled, and what became of it."""
    lose(conn, worker)
    found = rows(conn, "select * from taskq.settle_lost()")
    done = []
    for row in found:
        became = row["settled"]
        if became == "exhausted":
            became = one(conn, "select taskq.hold_exhausted(%s)", row["job_id"])
        done.append((row["task"], became))
    return done


def suspect(conn: Conn, worker: UUID, task: str) -> dict[str, Any]:
    """Claim a job that was on lost workers before."""
    [row] = rows(conn, "select * from taskq.claim_suspect(%s, %s, %s)", worker, [task], ["q"])
    return row


def losses(conn: Conn, task: str, n: int) -> list[tuple[str, str]]:
    """Lose the worker of a task so often; what became of the last one."""
    became: list[tuple[str, str]] = []
    for _ in range(n):
        worker = worker_for(conn)
        if not take(conn, worker, task):
            suspect(conn, worker, task)
        became = lost(conn, worker)
    return became


def state(conn: Conn, job: UUID) -> tuple[str, str | None]:
    row = get(conn, job)
    return row["status"], row["held_reason"]


def test_a_node_is_held_and_its_run_paused_once_its_recoveries_are_exhausted(conn: Conn) -> None:
    run = pair(conn)
    job = job_of(conn, run, "a")
    assert losses(conn, "a", 2) == [("a", "pending")]
    assert losses(conn, "a", 1) == [("a", "held")]
    incident = current(conn, job)
    assert (incident["code"], incident["phase"], incident["status"]) == ("recovery_exhausted", "body", "exhausted")
    assert (state(conn, job), info(conn, run)["status"]) == (("held", "incident"), "paused")
    [pause] = rows(conn, "select code, incident from taskq.paused_runs where run_id = %s", run)
    assert (pause["code"], pause["incident"]) == ("recovery_exhausted", incident["id"])
    assert [outcome for _, outcome in attempts(conn, job)] == ["lost"] * 3
    assert (get(conn, job)["recoveries"], violations(conn)) == (3, [])
    # Told again: nothing is changed.
    assert one(conn, "select taskq.hold_exhausted(%s)", job) == "settled"
    # Exactly one more.
    assert grant(conn, incident["id"]) == "granted"
    assert (state(conn, job), info(conn, run)["status"]) == (("pending", None), "running")
    assert (losses(conn, "a", 1), current(conn, job)["id"]) == ([("a", "held")], incident["id"])
    assert (info(conn, run)["status"], violations(conn)) == ("paused", [])
    grant(conn, incident["id"])
    worker = worker_for(conn)
    finish(conn, worker, suspect(conn, worker, "a"))
    do(conn, worker, "b")
    assert info(conn, run)["status"] == "succeeded"
    one(conn, "select taskq.prune()")
    assert events(conn, incident["id"]) == [
        "failed",
        *["granted", "launched"],
        "failed",
        "granted",
        "launched",
        "resolved",
    ]
    assert violations(conn) == []


def test_without_that_policy_it_fails_as_before(conn: Conn) -> None:
    run = pair(conn, recoveries=0)
    conn.execute("alter table taskq.policies disable trigger policies_immutable")
    conn.execute("update taskq.policies set spec = spec - 'on_exhausted' where id = %s", (HOLDS,))
    conn.execute("alter table taskq.policies enable trigger policies_immutable")
    assert losses(conn, "a", 1) == [("a", "failed")]
    assert (info(conn, run)["status"], rows(conn, "select * from taskq.incidents")) == ("failed", [])


def test_a_plain_job_is_held_as_well(conn: Conn) -> None:
    job = enqueue(conn, policy_id=holding(conn, 0))
    assert losses(conn, "t", 1) == [("t", "held")]
    assert state(conn, job) == ("held", "incident")
    assert grant(conn, current(conn, job)["id"]) == "granted"
    assert (losses(conn, "t", 1), violations(conn)) == ([("t", "held")], [])


def test_a_side_effecting_one_is_unknown_and_not_exhausted(conn: Conn) -> None:
    run = start(
        conn,
        store(conn, [node("a", effect_class="side_effecting", policy_id=holding(conn, 0), required_worker_schema=2)]),
    )
    worker = worker_for(conn)
    [claimed] = take(conn, worker, "a").values()
    start_effects(conn, worker, (claimed["job_id"], 1))
    assert lost(conn, worker) == [("a", "unknown")]
    assert (info(conn, run)["status"], rows(conn, "select * from taskq.incidents")) == ("recovering", [])
    assert one(conn, "select taskq.hold_exhausted(%s)", claimed["job_id"]) == "settled"


def test_what_its_hook_says_did_not_happen_once_too_often_is_held(conn: Conn) -> None:
    run = start(
        conn,
        store(conn, [node("a", effect_class="side_effecting", policy_id=holding(conn, 0), required_worker_schema=2)]),
    )
    worker = worker_for(conn)
    [claimed] = take(conn, worker, "a").values()
    job = claimed["job_id"]
    start_effects(conn, worker, (job, 1))
    lost(conn, worker)
    said = "select taskq.answer_reconcile(%s, 1, false, null, 'asked', 'hook', null)"
    assert one(conn, said, job) == "held"
    incident = current(conn, job)
    assert (incident["fingerprint"], incident["status"], info(conn, run)["status"]) == (
        "DidNotHappen",
        "exhausted",
        "paused",
    )
    assert violations(conn) == []
    # An operator decides without a bound, as before; here there is nothing to decide.
    assert refused(conn, "select taskq.resolve(%s, false, null, 'looked', 'me')", job) == "WF016"
    grant(conn, incident["id"])
    worker = worker_for(conn)
    [claimed] = take(conn, worker, "a").values()
    start_effects(conn, worker, (job, 2))
    finish(conn, worker, claimed)
    assert (info(conn, run)["status"], violations(conn)) == ("succeeded", [])


def test_an_exhausted_incident_allows_reconciling(conn: Conn) -> None:
    """One node of the run is held, and the outcome of another is unknown: that is decided as ever."""
    of = {"policy_id": holding(conn, 0)}
    run = start(
        conn, store(conn, [node("a", **of), node("s", effect_class="side_effecting", required_worker_schema=2, **of)])
    )
    worker = worker_for(conn)
    claims = take(conn, worker, "a", "s")
    start_effects(conn, worker, (claims["s"]["job_id"], 1))
    assert dict(lost(conn, worker)) == {"a": "held", "s": "unknown"}
    assert info(conn, run)["status"] == "paused"
    assert resolve(conn, claims["s"]["job_id"], True) == "succeeded"
    assert (tree(conn, run), violations(conn)) == ({"a": "held", "s": "succeeded"}, [])
    grant(conn, current(conn, claims["a"]["job_id"])["id"])
    worker = worker_for(conn)
    do(conn, worker, "a")
    assert info(conn, run)["status"] == "succeeded"


def test_a_cancel_that_was_asked_for_comes_first(conn: Conn) -> None:
    run = pair(conn, recoveries=0)
    worker = worker_for(conn)
    [claimed] = take(conn, worker, "a").values()
    conn.execute("update taskq.jobs set effect_class = 'pure' where id = %s", (claimed["job_id"],))
    assert one(conn, "select taskq.cancel_run(%s)", run) == "requested"
    assert lost(conn, worker) == [("a", "cancelled")]
    assert (info(conn, run)["status"], violations(conn)) == ("cancelled", [])


def test_a_live_owner_is_left_alone(conn: Conn) -> None:
    pair(conn, recoveries=0)
    worker = worker_for(conn)
    [claimed] = take(conn, worker, "a").values()
    assert one(conn, "select taskq.hold_exhausted(%s)", claimed["job_id"]) == "settled"
    assert one(conn, "select taskq.hold_exhausted(%s)", uuid4()) == "settled"
    finish(conn, worker, claimed)
    assert (rows(conn, "select * from taskq.incidents"), violations(conn)) == ([], [])


# Grants ---------------------------------------------------------------------------------------------------------------


def test_a_grant_is_for_what_is_current(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn, recoveries=0)
    claimed, _ = prepare(conn, worker, "a", "failed", FAILED)
    job = claimed["job_id"]
    first = current(conn, job)["id"]
    grant(conn, first)
    prepare(conn, worker, "a", "failed", {"type": "Bang", "message": "other"})
    second = current(conn, job)["id"]
    assert refusal(conn, "WF044", first)["current"] == str(second)
    assert grant(conn, second) == "granted"
    claimed, _ = prepare(conn, worker, "a", "ready")
    assert refusal(conn, "WF044", second)["current"] is None
    finish(conn, worker, claimed)
    assert refusal(conn, "WF044", first)["current"] is None
    refusal(conn, "WF043", uuid4())
    refusal(conn, "WF009", first, " ")
    assert violations(conn) == []


def test_one_that_goes_on_by_itself_is_not_granted_more(conn: Conn) -> None:
    worker = worker_for(conn)
    pair(conn)
    claimed, _ = prepare(conn, worker, "a", "failed", FAILED)
    incident = current(conn, claimed["job_id"])["id"]
    assert refusal(conn, "WF044", incident)["status"] == "open"
    make_due(conn, claimed["job_id"])
    [claimed] = take(conn, worker, "a").values()
    assert refusal(conn, "WF044", incident)["status"] == "open"
    unmet = {"prerequisite": "c", "retry_in": 9, "checks": ["c"]}
    finish(conn, worker, claimed, "release")
    prepare(conn, worker, "a", "unmet", unmet)
    refusal(conn, "WF044", current(conn, claimed["job_id"])["id"])
    assert events(conn, incident) == ["failed", "launched"]


def test_one_of_an_earlier_generation_is_stale(conn: Conn) -> None:
    worker = worker_for(conn)
    job = enqueue(conn, policy_id=holding(conn, 0))
    prepare(conn, worker, "t", "failed", FAILED)
    incident = current(conn, job)["id"]
    cancel(conn, job)
    assert retry(conn, job) == "reopened"
    refusal(conn, "WF044", incident)
    # The new generation has its own.
    prepare(conn, worker, "t", "failed", FAILED)
    assert current(conn, job)["id"] != incident
    one(conn, "select taskq.prune()")
    assert events(conn, incident) == ["failed", "resolved"]
    assert (grant(conn, current(conn, job)["id"]), violations(conn)) == ("granted", [])


def test_a_pause_of_somebody_else_stays(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn, recoveries=0)
    [claimed] = take(conn, worker, "a").values()
    one(conn, "select taskq.pause_run(%s, 'looking', 'me', 'audit')", run)
    lost(conn, worker)
    incident = current(conn, claimed["job_id"])["id"]
    assert state(conn, claimed["job_id"]) == ("held", "incident")
    [pause] = rows(conn, "select code, incident from taskq.paused_runs where run_id = %s", run)
    assert (pause["code"], pause["incident"]) == ("audit", None)
    assert grant(conn, incident) == "paused"
    [row] = rows(conn, "select command from taskq.open_incidents where job_id = %s", claimed["job_id"])
    assert (row["command"], state(conn, claimed["job_id"])) == (
        f"taskq runs resume {run} --reason WHY",
        ("held", "paused"),
    )
    assert one(conn, "select taskq.resume_run(%s, 'well', 'me')", run) == "resumed"
    worker = worker_for(conn)
    do(conn, worker, "a")
    do(conn, worker, "b")
    assert (info(conn, run)["status"], violations(conn)) == ("succeeded", [])


def test_a_run_that_is_resumed_without_a_grant_goes_on_with_the_rest(conn: Conn) -> None:
    of = {"policy_id": holding(conn, 0)}
    run = start(conn, store(conn, [node("a", **of), node("other")], on_failure="finish"))
    worker = worker_for(conn)
    prepare(conn, worker, "a", "failed", FAILED)
    assert tree(conn, run) == {"a": "held", "other": "held"}
    assert one(conn, "select taskq.resume_run(%s, 'the rest', 'me')", run) == "resumed"
    do(conn, worker, "other")
    assert (tree(conn, run)["a"], info(conn, run)["status"], violations(conn)) == ("held", "running", [])
    assert grant(conn, current(conn, job_of(conn, run, "a"))["id"]) == "granted"
    claimed, _ = prepare(conn, worker, "a", "ready")
    finish(conn, worker, claimed)
    assert (info(conn, run)["status"], violations(conn)) == ("succeeded", [])


def test_below_a_paused_run_a_grant_waits_for_that(conn: Conn) -> None:
    worker = worker_for(conn)
    inner = store(conn, [node("x", policy_id=holding(conn, 0))], workflow="inner")
    run = start(conn, store(conn, [node("kid", task="inner:await", child=inner)]))
    claimed, _ = prepare(conn, worker, "x", "failed", FAILED)
    one(conn, "select taskq.pause_run(%s, 'looking', 'me', 'audit')", run)
    assert grant(conn, current(conn, claimed["job_id"])["id"]) == "paused"
    assert take(conn, worker, "x") == {}
    # What goes on is the run above: its part is not resumed by itself.
    [row] = rows(conn, "select command from taskq.open_incidents where job_id = %s", claimed["job_id"])
    assert row["command"] == f"taskq runs resume {run} --reason WHY"
    one(conn, "select taskq.resume_run(%s, 'well', 'me')", run)
    claimed, _ = prepare(conn, worker, "x", "ready")
    finish(conn, worker, claimed)
    do(conn, worker, "inner:await")
    assert (info(conn, run)["status"], violations(conn)) == ("succeeded", [])


@pytest.mark.parametrize("how", ["cancel the run", "another fails"])
def test_a_stop_ends_what_is_held(conn: Conn, how: str) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a", policy_id=holding(conn, 0)), node("other")]))
    others = take(conn, worker, "other")
    prepare(conn, worker, "a", "failed", FAILED)
    if how == "cancel the run":
        one(conn, "select taskq.cancel_run(%s)", run)
    finish(conn, worker, others["other"], "failed")
    assert (tree(conn, run)["a"], info(conn, run)["finished_at"] is not None) == ("cancelled", True)
    one(conn, "select taskq.prune()")
    assert rows(conn, "select * from taskq.open_incidents") == []
    assert violations(conn) == []


# What is unknown, on the run ------------------------------------------------------------------------------------------


def test_a_run_is_recovering_while_the_outcome_of_a_node_is_unknown(conn: Conn) -> None:
    of: dict[str, Any] = {"effect_class": "side_effecting", "required_worker_schema": 2}
    run = start(conn, store(conn, [node("s", **of), node("t", **of), node("after")], [edge(0, 2), edge(1, 2)]))
    worker = worker_for(conn)
    claims = take(conn, worker, "s", "t")
    start_effects(conn, worker, *((row["job_id"], 1) for row in claims.values()))
    lost(conn, worker)
    assert (info(conn, run)["status"], violations(conn)) == ("recovering", [])
    assert resolve(conn, claims["s"]["job_id"], True) == "succeeded"
    assert info(conn, run)["status"] == "recovering"
    # It is paused and resumed like any other.
    one(conn, "select taskq.pause_run(%s, 'looking', 'me', 'audit')", run)
    assert info(conn, run)["status"] == "paused"
    one(conn, "select taskq.resume_run(%s, 'well', 'me')", run)
    assert info(conn, run)["status"] == "recovering"
    assert resolve(conn, claims["t"]["job_id"], False) == "pending"
    assert (info(conn, run)["status"], violations(conn)) == ("running", [])
    worker = worker_for(conn)
    [claimed] = take(conn, worker, "t").values()
    start_effects(conn, worker, (claimed["job_id"], 2))
    finish(conn, worker, claimed)
    do(conn, worker, "after")
    assert (info(conn, run)["status"], violations(conn)) == ("succeeded", [])


def test_the_rest_of_a_recovering_run_goes_on_and_its_late_end_is_on_record(conn: Conn) -> None:
    of: dict[str, Any] = {"effect_class": "side_effecting", "required_worker_schema": 2}
    run = start(conn, store(conn, [node("s", **of), node("other")]))
    worker = worker_for(conn)
    [claimed] = take(conn, worker, "s").values()
    start_effects(conn, worker, (claimed["job_id"], 1))
    finish(conn, worker, claimed, "unknown")
    assert info(conn, run)["status"] == "recovering"
    do(conn, worker, "other")
    # Its own late word: it asks to be tried again.
    finish(conn, worker, claimed, "retry_after")
    assert (info(conn, run)["status"], kinds(conn, run)[-1:]) == ("running", ["resolved"])
    assert violations(conn) == []


def test_a_job_that_is_claimed_while_others_have_the_queue_is_not_held_up(conn: Conn) -> None:
    """Many exhausted ones, which settle_lost leaves, hide nothing behind them."""
    of = holding(conn, 0)
    jobs = [enqueue(conn, policy_id=of, run_in=-100) for _ in range(5)]
    plain = enqueue(conn)
    worker = worker_for(conn)
    assert len(claim(conn, worker, 10)) == 6
    lose(conn, worker)
    skip: list[UUID] = []
    settled = {}
    while found := rows(conn, "select * from taskq.settle_lost(2, %s)", skip):
        for row in found:
            settled[row["job_id"]] = row["settled"]
            if row["settled"] == "exhausted":
                skip.append(row["job_id"])
    assert settled == {**dict.fromkeys(jobs, "exhausted"), plain: "pending"}


@pytest.mark.parametrize("how", ["release", "retry", "snooze"])
def test_one_grant_is_one_recovery_however_often_its_attempts_come_back(conn: Conn, how: str) -> None:
    run = start(conn, store(conn, [node("a", policy_id=holding(conn, 0), max_attempts=5)]))
    job = job_of(conn, run, "a")
    losses(conn, "a", 1)
    incident = current(conn, job)["id"]
    grant(conn, incident)
    worker = worker_for(conn)
    for _ in range(3):
        [claimed] = take(conn, worker, "a").values()
        finish(conn, worker, claimed, how)
        make_due(conn, job)
    assert events(conn, incident) == ["failed", "granted", "launched"]
    # Lost again, it waits for another.
    take(conn, worker, "a")
    assert lost(conn, worker) == [("a", "held")]
    assert (events(conn, incident)[-1], violations(conn)) == ("failed", [])


def test_an_ordered_job_is_held_in_its_line_until_it_is_granted(conn: Conn) -> None:
    curve = {"kind": "constant", "base": 0, "factor": 2, "cap": 1, "jitter": 0}
    of = policy(conn, "goes-on", on_exhausted="hold", max_recoveries=0, ordering="continue", retry={"backoff": curve})
    side = {"effect_class": "side_effecting", "required_worker_schema": 2}
    first = enqueue(conn, ordering_key="k", policy_id=of, **side)
    second = enqueue(conn, ordering_key="k", policy_id=of)
    worker = worker_for(conn)
    [claimed] = claim(conn, worker)
    start_effects(conn, worker, (first, 1))
    assert lost(conn, worker) == [("t", "unknown")]
    # Under continue the next one goes on while it is unknown.
    said = "select taskq.answer_reconcile(%s, 1, false, null, 'asked', 'hook', null)"
    assert one(conn, said, first) == "held"
    assert state(conn, first) == ("held", "incident")
    worker = worker_for(conn)
    [claimed] = claim(conn, worker)
    assert claimed["job_id"] == second
    finish(conn, worker, claimed)
    third = enqueue(conn, ordering_key="k", policy_id=of)
    assert (claim(conn, worker), state(conn, third)) == ([], ("held", "ordering"))
    grant(conn, current(conn, first)["id"])
    assert [row["job_id"] for row in claim(conn, worker)] == [first]
    assert violations(conn) == []


def test_what_was_cancelled_leaves_a_pause_that_says_how_it_goes_on(conn: Conn) -> None:
    worker = worker_for(conn)
    of = {"policy_id": holding(conn, 0)}
    run = start(conn, store(conn, [node("a", **of), node("b")], on_failure="finish"))
    prepare(conn, worker, "a", "failed", FAILED)
    job = job_of(conn, run, "a")
    incident = current(conn, job)["id"]
    assert cancel(conn, job) == "cancelled"
    # The pause stays, and names no incident any more: it is resumed.
    [pause] = rows(conn, "select incident, resume from taskq.paused_runs where run_id = %s", run)
    assert (pause["incident"], pause["resume"]) == (None, run)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        grant(conn, incident)
    assert f"taskq runs resume {run}" in str(caught.value.diag.message_hint)
    assert one(conn, "select taskq.resume_run(%s, 'the rest', 'me')", run) == "resumed"
    do(conn, worker, "b")
    assert (info(conn, run)["status"], violations(conn)) == ("failed", [])


# What verify reports --------------------------------------------------------------------------------------------------

FORGERIES = (
    ("held_without_incident", "update taskq.incidents set status = 'open' where job_id = %s", "job"),
    ("held_without_incident", "delete from taskq.incidents where job_id = %s", "job"),
    ("incident_events_differ", "delete from taskq.incident_events where %s is not null", "job"),
    ("incident_events_differ", "update taskq.incidents set grants = 7 where job_id = %s", "job"),
    ("recovery_not_shown", "update taskq.runs set status = 'recovering' where id = %s", "other"),
    ("recovery_not_shown", "update taskq.runs set status = 'running' where id = %s", "unknown"),
)


@pytest.mark.parametrize(("code", "forge", "whose"), FORGERIES)
def test_a_forgery_is_reported(conn: Conn, code: str, forge: str, whose: str) -> None:
    of: dict[str, Any] = {"effect_class": "side_effecting", "required_worker_schema": 2}
    worker = worker_for(conn)
    other, unknown = pair(conn, 0), start(conn, store(conn, [node("s", **of)]))
    [claimed] = take(conn, worker, "s").values()
    start_effects(conn, worker, (claimed["job_id"], 1))
    finish(conn, worker, claimed, "unknown")
    job = enqueue(conn, policy_id=holding(conn, 0))
    prepare(conn, worker, "t", "failed", FAILED)
    assert violations(conn) == []
    conn.execute("set local session_replication_role = replica")
    conn.execute(forge, ({"job": job, "other": other, "unknown": unknown}[whose],))
    found = {each for each, _ in violations(conn)}
    assert code in found
    assert found <= {code, "pause_for_no_incident"}


def test_a_recovery_that_nobody_granted_is_reported(conn: Conn) -> None:
    worker = worker_for(conn)
    run = pair(conn, recoveries=0)
    claimed, _ = prepare(conn, worker, "a", "failed", FAILED)
    job = claimed["job_id"]
    one(conn, "select taskq.note_event(%s, 'launched', 1, null, null)", current(conn, job)["id"])
    assert violations(conn) == [("recovery_not_granted", job)]
    conn.execute("update taskq.incidents set bound = 1 where job_id = %s", (job,))
    assert violations(conn) == []
    conn.execute("set local session_replication_role = replica")
    conn.execute("update taskq.run_pauses set incident = %s", (uuid4(),))
    assert violations(conn) == [("pause_for_no_incident", run)]


def test_each_check_of_incidents_has_its_forgery(conn: Conn) -> None:
    text = one(conn, "select prosrc from pg_proc where oid = 'taskq.check_incidents()'::regprocedure")
    codes = set(re.findall(r"select [49], '(\w+)',", text))
    here = {"recovery_not_granted", "pause_for_no_incident"}
    # test_preparations has that of an effect that was started unprepared.
    assert {code for code, *_ in FORGERIES} | here | {"begun_unprepared"} == codes

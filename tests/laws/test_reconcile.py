"""Unknown attempts and the jobs that ask about them: one for each, never in the way; answers fenced on the attempt."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from effects_kit import effect, effects
from sql import (
    End,
    attempts,
    claim,
    claim_one,
    dump,
    end,
    enqueue,
    get,
    one,
    policy,
    refused,
    register,
    resolve,
    retry,
    rows,
    running,
    start_effects,
    status,
    unknown,
    violations,
)

from taskq.policy import Backoff, Retry, constant, exponential, linear

Conn = psycopg.Connection[Any]
HOOK = "t:reconcile"


def publish(conn: Conn, *, hook: str | None = HOOK, hook_policy: str = "h") -> None:
    """What a worker publishes at boot whose task t has a hook."""
    policy(conn, "h")
    conn.execute("select taskq.publish_task(null, %s, 'hooks', 7, 20, 'pure', %s)", (HOOK, hook_policy))
    conn.execute("select taskq.publish_task(null, 't', 'q', 5, 3, 'idempotent', 'p', null, %s)", (hook,))


def outcome(conn: Conn, job: UUID) -> dict[str, Any]:
    [row] = rows(conn, "select * from taskq.unknown_outcomes where job_id = %s", job)
    return row


def started(conn: Conn, **spec: Any) -> tuple[UUID, UUID]:
    """An unknown job that was not to be cancelled: if its effect did not happen, it runs again."""
    worker, job = running(conn, **spec)
    conn.execute("select taskq.enter_unknown(j, 'told', null) from taskq.jobs j where j.id = %s", (job,))
    assert status(conn, job) == "unknown"
    return worker, job


def answer(conn: Conn, job: UUID, epoch: int, happened: bool) -> str:
    value: str = one(
        conn, "select taskq.answer_reconcile(%s, %s, %s, '5', 'asked', 'reconcile:x')", job, epoch, happened
    )
    return value


def reconcile(conn: Conn, job: UUID) -> tuple[str, UUID]:
    [row] = rows(conn, "select * from taskq.reconcile(%s, 'now', 'me')", job)
    return row["answer"], row["reconcile_job"]


# Asking ---------------------------------------------------------------------------------------------------------------


def test_an_unknown_attempt_is_asked_about_by_one_job_that_names_it(conn: Conn) -> None:
    publish(conn)
    _, job = unknown(conn, payload={"big": "x" * 10_000})
    found = outcome(conn, job)
    asking = get(conn, found["reconcile_job"])
    assert asking["payload"] == {"job_id": str(job), "claim_epoch": 1}
    assert (asking["task"], asking["queue"], asking["priority"], asking["max_attempts"]) == (HOOK, "q", 7, 20)
    assert (asking["effect_class"], asking["policy_id"], asking["status"]) == ("pure", "h", "pending")
    assert (found["reconcile_status"], found["reconcile_error"]) == ("pending", None)
    conn.execute("select taskq.request_reconcile(j) from taskq.jobs j where j.id = %s", (job,))
    assert reconcile(conn, job) == ("due", asking["id"])
    assert one(conn, "select count(*) from taskq.jobs where task = %s", HOOK) == 1
    assert violations(conn) == []


@pytest.mark.parametrize("published", ["nothing", "no hook", "no policy", "a hook that is not published"])
def test_what_cannot_be_asked_becomes_unknown_all_the_same(conn: Conn, published: str) -> None:
    if published == "no hook":
        publish(conn, hook=None)
    elif published == "no policy":
        publish(conn, hook_policy="gone")
    elif published == "a hook that is not published":
        publish(conn, hook="t2:reconcile")
    _, job = unknown(conn)
    found = outcome(conn, job)
    assert (found["reconcile_job"], found["reconcile_status"], found["reason"]) == (None, None, "worker_lost")
    code = refused(conn, "select * from taskq.reconcile(%s)", job)
    assert code == ("WF014" if published == "no policy" else "WF012")
    assert status(conn, job) == "unknown"


def test_attempts_of_before_a_deploy_are_asked_about_once_there_is_a_hook(conn: Conn) -> None:
    worker = register(conn)
    before = sorted(started(conn)[1] for _ in range(3))
    publish(conn)
    after = started(conn)[1]
    first = rows(conn, "select * from taskq.reconcile_missing(null, 2)")
    assert [row["job_id"] for row in first] == before[:2]
    assert all(outcome(conn, row["job_id"])["reconcile_job"] == row["reconcile_job"] for row in first)
    rest = rows(conn, "select * from taskq.reconcile_missing(%s)", before[1])
    assert [row["job_id"] for row in rest] == before[2:]
    assert rows(conn, "select * from taskq.reconcile_missing()") == []
    asked = {row["payload"]["job_id"] for row in rows(conn, "select payload from taskq.jobs where task = %s", HOOK)}
    assert asked == {str(job) for job in (*before, after)}
    # One whose asking job has failed for good is not asked about again by itself.
    for row in claim(conn, worker, tasks=[HOOK], lanes=[("q", 7)]):
        end(conn, worker, End(row["job_id"], 1, "failed"))
    assert {row["reconcile_status"] for row in rows(conn, "select * from taskq.unknown_outcomes")} == {"failed"}
    assert rows(conn, "select * from taskq.reconcile_missing()") == []


@pytest.mark.parametrize(
    ("newer", "kept"), [("live", True), ("draining", False), ("lost", False), ("stopped", False), ("has none", False)]
)
def test_a_worker_without_the_hook_takes_it_away_from_none_that_has_it(conn: Conn, newer: str, kept: bool) -> None:
    publish(conn)
    worker = register(conn, tasks=("t",) if newer == "has none" else (HOOK, "t"))
    if newer != "has none":
        conn.execute("update taskq.workers set status = %s where id = %s", (newer, worker))
    conn.execute("select taskq.publish_task(%s, 't', 'q', 5, 3, 'idempotent', 'p')", (register(conn),))
    assert one(conn, "select reconcile_task from taskq.task_config where task = 't'") == (HOOK if kept else None)
    assert (outcome(conn, started(conn)[1])["reconcile_job"] is not None) is kept


def test_one_that_cannot_be_enqueued_holds_up_none_behind_it(conn: Conn) -> None:
    first, second = sorted(started(conn)[1] for _ in range(2))
    publish(conn)
    conn.execute("update taskq.jobs set queue = 'a b' where id = %s", (first,))
    found = rows(conn, "select * from taskq.reconcile_missing(null, 1)")
    assert [(row["job_id"], row["reconcile_job"]) for row in found] == [(first, None)]
    [row] = rows(conn, "select * from taskq.reconcile_missing(%s, 1)", first)
    assert (row["job_id"], row["reconcile_job"] is None) == (second, False)


def test_an_asking_job_that_failed_is_seen_with_its_error_and_made_anew_on_demand(conn: Conn) -> None:
    publish(conn)
    _, job = started(conn)
    first = outcome(conn, job)["reconcile_job"]
    asker = register(conn)
    error = {"type": "TimeoutError", "message": "no answer"}
    for outcome_of, shown in (("retry", "pending"), ("failed", "failed")):
        conn.execute("update taskq.jobs set run_at = taskq.now() where id = %s", (first,))
        [row] = claim(conn, asker, tasks=[HOOK], lanes=[("q", 7)])
        assert outcome(conn, job)["reconcile_status"] == "running"
        assert reconcile(conn, job) == ("running", first)
        end(conn, asker, End(first, row["claim_epoch"], outcome_of, error=error))
        found = outcome(conn, job)
        assert (found["reconcile_status"], found["reconcile_error"]) == (shown, error)
    said, second = reconcile(conn, job)
    assert (said, second != first) == ("enqueued", True)
    assert outcome(conn, job)["reconcile_job"] == second
    noted = rows(conn, "select * from taskq.audit where action = 'reconcile' order by id")[-1]
    assert (noted["subject"], noted["actor"], noted["reason"]) == (str(job), "me", "now")
    assert noted["details"] == {"answer": "enqueued", "reconcile_job": str(second), "claim_epoch": 1}
    assert violations(conn) == []


def test_only_what_is_unknown_is_asked_about(conn: Conn) -> None:
    publish(conn)
    worker, job = running(conn)
    before = dump(conn)
    assert refused(conn, "select * from taskq.reconcile(%s)", job) == "WF012"
    assert refused(conn, "select * from taskq.reconcile(%s)", uuid4()) == "WF011"
    assert dump(conn) == before
    end(conn, worker, End(job, 1))
    assert refused(conn, "select * from taskq.reconcile(%s)", job) == "WF012"


# Answering ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("happened", "became"), [(True, "succeeded"), (False, "pending")])
def test_an_answer_resolves_the_attempt_on_the_record(conn: Conn, happened: bool, became: str) -> None:
    _, job = started(conn)
    assert answer(conn, job, 1, happened) == became
    assert attempts(conn, job) == [(1, "resolved")]
    assert get(conn, job)["result"] == (5 if happened else None)
    [noted] = rows(conn, "select * from taskq.audit where subject = %s", str(job))
    assert (noted["action"], noted["actor"], noted["reason"]) == ("resolve", "reconcile:x", "asked")
    assert noted["details"] == {"happened": happened, "answer": became, "claim_epoch": 1}
    assert rows(conn, "select * from taskq.unknowns where job_id = %s", job) != []
    assert violations(conn) == []


@pytest.mark.parametrize("happened", [True, False])
def test_an_answer_about_an_older_attempt_changes_nothing_and_is_told_so(conn: Conn, happened: bool) -> None:
    _, job = started(conn)
    resolve(conn, job, happened=False)
    worker = register(conn)
    for state in ("running", "unknown", "succeeded"):
        if state == "running":
            [again] = claim(conn, worker)
            assert again["claim_epoch"] == 2
        elif state == "unknown":
            conn.execute("select taskq.enter_unknown(j, 'told', null) from taskq.jobs j where j.id = %s", (job,))
        else:
            end(conn, worker, End(job, 2))
        assert status(conn, job) == state
        before = dump(conn)
        with pytest.raises(psycopg.Error) as caught, conn.transaction():
            answer(conn, job, 1, happened)
        assert (caught.value.sqlstate, dump(conn) == before) == ("WF017", True)
    assert attempts(conn, job) == [(1, "resolved"), (2, "succeeded")]


def test_an_answer_needs_an_attempt_that_is_unknown(conn: Conn) -> None:
    _, job = running(conn)
    assert refused(conn, "select taskq.resolve_attempt(%s, 1, true, null, 'r')", job) == "WF012"
    assert refused(conn, "select taskq.resolve_attempt(%s, 2, true, null, 'r')", job) == "WF017"
    for call in ("resolve_attempt", "answer_reconcile"):
        assert refused(conn, f"select taskq.{call}(%s, null, true, null, 'r')", job) == "WF009"
    assert refused(conn, "select taskq.resolve_attempt(%s, 1, true, null, 'r')", uuid4()) == "WF011"
    _, lost = started(conn)
    assert refused(conn, "select taskq.resolve_attempt(%s, 1, null, null, 'r')", lost) == "WF009"
    assert refused(conn, "select taskq.resolve_attempt(%s, 1, true, null, ' ')", lost) == "WF009"
    assert status(conn, lost) == "unknown"


@pytest.mark.parametrize(
    ("late", "became"), [("succeeded", "succeeded"), ("failed", "failed"), ("retry", "pending"), ("release", "pending")]
)
def test_after_the_late_end_every_decision_is_refused_as_one_too_many(conn: Conn, late: str, became: str) -> None:
    worker, job = started(conn)
    assert end(conn, worker, End(job, 1, late)) == 1
    before = dump(conn)
    for call in ("taskq.resolve(%s, false, null, 'r')", "taskq.resolve_attempt(%s, 1, false, null, 'r')"):
        with pytest.raises(psycopg.Error) as caught, conn.transaction():
            conn.execute(f"select {call}", (job,))
        assert caught.value.sqlstate == "WF016"
        assert f"was resolved before: {became}, by its own late end" in str(caught.value)
    assert dump(conn) == before


def test_a_job_that_was_never_unknown_needs_no_decision(conn: Conn) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1))
    assert refused(conn, "select taskq.resolve(%s, true, null, 'r')", job) == "WF012"
    assert refused(conn, "select taskq.resolve_attempt(%s, 1, true, null, 'r')", job) == "WF012"


# How often it may not have happened -----------------------------------------------------------------------------------

HOURLY = {"kind": "constant", "base": 3600, "cap": 3600, "jitter": 0}


def run_into_the_unknown(conn: Conn, job: UUID) -> int:
    """Have an attempt start its effect, and tell nothing more; gives its epoch."""
    conn.execute("update taskq.jobs set run_at = taskq.now() where id = %s", (job,))
    worker = register(conn)
    found = rows(conn, "select * from taskq.claim_suspect(%s, '{t}', '{q}')", worker) or claim(conn, worker)
    assert [row["job_id"] for row in found] == [job]
    epoch: int = found[0]["claim_epoch"]
    [started] = start_effects(conn, worker, (job, epoch))
    assert started["effect_started_at"] is not None
    assert end(conn, worker, End(job, epoch, "unknown", error={"reason": "told"})) == 1
    assert status(conn, job) == "unknown"
    return epoch


def delay_of(conn: Conn, job: UUID) -> float:
    """Seconds from the last decision about a job to its next start."""
    return float(
        one(
            conn,
            "select extract(epoch from j.run_at - max(l.ended_at)) from taskq.jobs j join taskq.ledger l on"
            " l.job_id = j.id where j.id = %s group by j.run_at",
            job,
        )
    )


def test_a_hook_runs_a_job_again_after_a_delay_and_only_as_often_as_it_may_be_recovered(conn: Conn) -> None:
    curve = {"kind": "exponential", "base": 100, "factor": 3, "cap": 3600, "jitter": 0}
    policy(conn)
    policy(conn, "two", max_recoveries=2, retry={"backoff": curve}, effects=[effect(on=["failed"])])
    job = enqueue(conn, policy_id="two", effect_class="side_effecting")
    for times, delay in ((1, 100), (2, 300)):
        assert answer(conn, job, run_into_the_unknown(conn, job), False) == "pending"
        assert (get(conn, job)["recoveries"], get(conn, job)["attempt"]) == (times, 0)
        assert delay_of(conn, job) == pytest.approx(delay)
        assert violations(conn) == []
    assert answer(conn, job, run_into_the_unknown(conn, job), False) == "failed"
    found = get(conn, job)
    assert (found["status"], found["recoveries"], found["attempt"]) == ("failed", 3, 0)
    assert found["error"] == {
        "type": "RecoveryExhausted",
        "message": "its effect did not happen, and it has been recovered 2 times already, the limit is 2",
        "reason": "asked",
    }
    assert attempts(conn, job) == [(n, "resolved") for n in (1, 2, 3)]
    assert [e["on_status"] for e in effects(conn, job)] == ["failed"]
    noted = rows(conn, "select details->>'answer' as answer from taskq.audit where subject = %s order by id", str(job))
    assert [row["answer"] for row in noted] == ["pending", "pending", "failed"]
    assert violations(conn) == []
    conn.execute("select taskq.cancel(%s)", (effects(conn, job)[0]["job_id"],))
    assert (retry(conn, job), get(conn, job)["recoveries"]) == ("reopened", 0)
    assert answer(conn, job, run_into_the_unknown(conn, job), False) == "pending"
    assert violations(conn) == []


def test_an_operator_may_run_it_again_past_the_bound_at_once_and_a_hook_then_not_any_more(conn: Conn) -> None:
    policy(conn, "none", max_recoveries=0, retry={"backoff": HOURLY})
    job = enqueue(conn, policy_id="none", effect_class="side_effecting")
    for times in (1, 2, 3):
        run_into_the_unknown(conn, job)
        assert resolve(conn, job, happened=False) == "pending"
        assert (get(conn, job)["recoveries"], delay_of(conn, job) <= 0) == (times, True)
    assert answer(conn, job, run_into_the_unknown(conn, job), False) == "failed"
    assert (get(conn, job)["error"]["type"], get(conn, job)["recoveries"]) == ("RecoveryExhausted", 4)
    assert violations(conn) == []


def test_a_hook_past_the_bound_may_still_say_that_it_happened(conn: Conn) -> None:
    policy(conn, "none", max_recoveries=0)
    job = enqueue(conn, policy_id="none", effect_class="side_effecting")
    assert answer(conn, job, run_into_the_unknown(conn, job), True) == "succeeded"
    assert violations(conn) == []


def test_what_would_start_again_after_its_deadline_fails_at_once(conn: Conn) -> None:
    policy(conn)
    policy(conn, "hourly", retry={"backoff": HOURLY}, effects=[effect(on=["failed"])])
    late, in_time = (
        enqueue(conn, policy_id="hourly", effect_class="side_effecting", deadline_in=seconds, task=task)
        for seconds, task in ((1800, "t"), (7200, "t2"))
    )
    worker = register(conn)
    for job, task, became in ((late, "t", "failed"), (in_time, "t2", "pending")):
        assert claim_one(conn, worker, tasks=[task])["job_id"] == job
        start_effects(conn, worker, (job, 1))
        end(conn, worker, End(job, 1, "unknown", error={"reason": "told"}))
        assert answer(conn, job, 1, False) == became
    found = get(conn, late)
    assert (found["error"]["type"], found["recoveries"]) == ("DeadlineExceeded", 1)
    assert len(effects(conn, late)) == 1
    assert violations(conn) == []


@pytest.mark.parametrize(
    "curve",
    [exponential(2, factor=3, cap=100), exponential(0), exponential("1h", factor=1000, cap="1d"), linear(7, cap=30)]
    + [constant(9), constant(0), exponential(3, jitter=0.9)],
)
def test_the_delay_follows_the_curve_of_the_policy(conn: Conn, curve: Backoff) -> None:
    retrying = Retry(1, curve)
    spec = {f: getattr(curve, f) for f in ("kind", "base", "factor", "cap", "jitter")}
    policy(conn, "curved", retry={"max_attempts": retrying.max_attempts, "backoff": spec})
    for n in (-1, 0, 1, 2, 3, 5, 40, 2**31 - 1):
        found = one(conn, "select taskq.backoff('curved', %s)", n)
        least, most = curve.delay(n, 1.0), curve.delay(n, 0.0)
        assert least * 0.999 <= found <= most * 1.001, n


@pytest.mark.parametrize(
    "given", [None, "soon", [], {}, {"kind": 5, "base": "x", "factor": None, "cap": [], "jitter": "much"}]
)
def test_a_policy_without_a_curve_has_that_of_the_default(conn: Conn, given: object) -> None:
    policy(conn, "odd", retry={"backoff": given}, max_recoveries="many")
    for name in ("odd", "gone"):
        assert 4.5 <= one(conn, "select taskq.backoff(%s, 1)", name) <= 5
        assert one(conn, "select taskq.recovery_bound(%s)", name) == 10
    policy(conn, "wild", retry={"backoff": {"base": 1e300, "cap": 1e300, "factor": 0, "jitter": 7}}, max_recoveries=-1)
    assert one(conn, "select taskq.backoff('wild', 9)") <= 3155760000
    assert one(conn, "select taskq.recovery_bound('wild')") == 0

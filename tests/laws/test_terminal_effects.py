"""Terminal effects: whatever ends a job, what it promised is on record in that transaction, once, with its job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import EVERY, WHOLE, effect, effects, intents, jobs_of, owner, promising
from psycopg.types.json import Jsonb
from sql import (
    End,
    cancel,
    claim,
    claim_one,
    drop_expired,
    end,
    enqueue,
    enqueue_many,
    get,
    lose,
    make_due,
    one,
    policy,
    refused,
    register,
    resolve,
    retry,
    rows,
    running,
    settle,
    shift_clock,
    status,
    unknown,
    violations,
)
from sql import control_clock as move_clock

Conn = psycopg.Connection[Any]


# Ways to an end -------------------------------------------------------------------------------------------------------


def by_end(outcome: str) -> Callable[[Conn, dict[str, Any]], UUID]:
    def go(conn: Conn, spec: dict[str, Any]) -> UUID:
        worker, job = running(conn, **spec)
        assert end(conn, worker, End(job, 1, outcome, error={"type": "E", "message": "m"})) == 1
        return job

    return go


def by_end_after_a_request(conn: Conn, spec: dict[str, Any]) -> UUID:
    worker, job = running(conn, **spec)
    assert cancel(conn, job) == "requested"
    assert end(conn, worker, End(job, 1, "failed")) == 1
    return job


def by_wait_past_the_deadline(conn: Conn, spec: dict[str, Any]) -> UUID:
    worker, job = running(conn, **spec, deadline_in=60)
    assert end(conn, worker, End(job, 1, "retry_after", delay=3600)) == 1
    return job


def by_cancel(conn: Conn, spec: dict[str, Any]) -> UUID:
    job = enqueue(conn, **spec)
    assert cancel(conn, job) == "cancelled"
    return job


def by_deadline(conn: Conn, spec: dict[str, Any]) -> UUID:
    job = enqueue(conn, **spec, deadline="2020-01-01T00:00:00Z")
    assert (job, "failed") in [(r["job_id"], r["settled"]) for r in rows(conn, "select * from taskq.sweep()")]
    return job


def by_losing_its_worker(conn: Conn, spec: dict[str, Any]) -> UUID:
    worker, job = running(conn, **spec)
    conn.execute("update taskq.jobs set recoveries = 10 where id = %s", (job,))
    conn.execute("update taskq.jobs set claim_epoch = claim_epoch where id = %s", (job,))
    lose(conn, worker)
    assert settle(conn) == {job: "failed"}
    return job


def by_losing_its_worker_after_a_request(conn: Conn, spec: dict[str, Any]) -> UUID:
    worker, job = running(conn, **spec, effect_class="pure")
    assert cancel(conn, job) == "requested"
    lose(conn, worker)
    assert settle(conn) == {job: "cancelled"}
    return job


def by_resolving(happened: bool) -> Callable[[Conn, dict[str, Any]], UUID]:
    def go(conn: Conn, spec: dict[str, Any]) -> UUID:
        _, job = unknown(conn, **spec)
        assert resolve(conn, job, happened, result={"n": 1}) == ("succeeded" if happened else "cancelled")
        return job

    return go


def by_its_late_end(conn: Conn, spec: dict[str, Any]) -> UUID:
    worker, job = unknown(conn, **spec)
    assert end(conn, worker, End(job, 1, "succeeded", result=5)) == 1
    return job


WAYS = [
    ("succeeded", by_end("succeeded")),
    ("failed", by_end("failed")),
    ("failed", by_end("retry_after_spent")),
    ("failed", by_wait_past_the_deadline),
    ("cancelled", by_end_after_a_request),
    ("cancelled", by_cancel),
    ("failed", by_deadline),
    ("failed", by_losing_its_worker),
    ("cancelled", by_losing_its_worker_after_a_request),
    ("succeeded", by_resolving(True)),
    ("cancelled", by_resolving(False)),
    ("succeeded", by_its_late_end),
]


@pytest.mark.parametrize(("final", "go"), WAYS)
def test_every_way_to_an_end_keeps_what_was_promised_for_it(
    conn: Conn, final: str, go: Callable[[Conn, dict[str, Any]], UUID]
) -> None:
    others = [s for s in EVERY if s != final]
    job = go(conn, promising(conn, effect("mine", [final], payload=WHOLE), effect("never", others), effect("always")))
    assert status(conn, job) == final
    made = intents(conn, job)
    assert [(i["name"], i["status"], i["depth"], i["fault"]) for i in made] == [
        ("mine", final, 1, None),
        ("always", final, 1, None),
    ]
    assert [i["effect_key"] for i in made] == [f"{job}:0:mine", f"{job}:0:always"]
    assert [i["created_at"] for i in made] == [get(conn, job)["finished_at"]] * 2
    found = jobs_of(conn, job)
    assert [(j["id"], j["status"], j["task"], j["max_attempts"]) for j in found] == [
        (i["job_id"], "pending", "t", 2) for i in made
    ]
    ended = get(conn, job)
    assert found[0]["payload"] == {
        "why": ended["error"],
        "came": ended["result"],
        "how": final,
        "whose": str(job),
        "again": 0,
        "order": 0,
        "fixed": 7,
    }
    assert found[0]["meta"]["effect"] == {
        "key": f"{job}:0:mine",
        "owner_job_id": str(job),
        "owner_task": "t",
        "status": final,
        "generation": 0,
    }
    counted = {"counters_differ_from_record"} if go is by_losing_its_worker else set()
    assert {code for code, _ in violations(conn)} == counted


def test_an_end_that_is_rolled_back_leaves_nothing(conn: Conn) -> None:
    job = owner(conn, effect())
    with conn.transaction(force_rollback=True):
        assert cancel(conn, job) == "cancelled"
        assert len(intents(conn, job)) == len(jobs_of(conn, job)) == 1
    assert status(conn, job) == "pending"
    assert intents(conn, job) == jobs_of(conn, job) == []


def test_a_job_that_goes_back_to_pending_causes_nothing(conn: Conn) -> None:
    worker, job = running(conn, **promising(conn, effect()))
    assert end(conn, worker, End(job, 1, "retry")) == 1
    assert intents(conn, job) == []


def test_an_end_told_twice_has_one_effect(conn: Conn) -> None:
    worker, job = running(conn, **promising(conn, effect()))
    assert end(conn, worker, End(job, 1, "failed"), End(job, 1, "succeeded")) == 1
    assert end(conn, worker, End(job, 1, "failed")) == 0
    assert len(intents(conn, job)) == len(jobs_of(conn, job)) == 1


def test_a_second_promise_of_one_end_cannot_be_stored(conn: Conn) -> None:
    """Were a job to end twice in one generation, the second end would be refused as a whole."""
    job = owner(conn, effect())
    cancel(conn, job)
    again = "insert into taskq.history select (jsonb_populate_record(h, jsonb_build_object('finished_at',"
    again += " h.finished_at + interval '1 ms'))).* from taskq.history h where h.id = %s"
    assert refused(conn, again, job) == "23505"


def test_five_hundred_ends_at_once_have_five_hundred_effects(conn: Conn) -> None:
    spec = promising(conn, effect("refund", ["failed"], payload={"n": {"arg": "n"}}))
    worker = register(conn)
    jobs = [r["job_id"] for r in enqueue_many(conn, 500, payloads=[{"n": n} for n in range(500)], **spec)]
    assert len(claim(conn, worker, 500)) == 500
    assert end(conn, worker, *(End(j, 1, "failed" if n % 5 else "succeeded") for n, j in enumerate(jobs))) == 500
    found = rows(
        conn,
        "select i.owner_job_id, j.payload from taskq.effect_intents i join taskq.jobs j on j.id = i.job_id"
        " where i.owner_job_id = any(%s)",
        jobs,
    )
    assert {r["owner_job_id"]: r["payload"] for r in found} == {j: {"n": n} for n, j in enumerate(jobs) if n % 5}
    assert violations(conn) == []


def test_workers_that_sleep_are_told_of_an_effect(conn: Conn) -> None:
    """Its queue is woken as by any enqueue."""
    policy(conn)
    job = owner(conn, effect(queue="effects"))
    sleeper = register(conn, queues=["effects"])
    conn.execute("select taskq.sleep(%s, '{effects}')", (sleeper,))
    conn.execute("set local track_functions = 'all'")
    assert one(conn, "select coalesce(pg_stat_get_xact_function_calls('taskq.wake'::regproc), 0)") == 0
    cancel(conn, job)
    assert one(conn, "select pg_stat_get_xact_function_calls('taskq.wake'::regproc)") == 1


def test_ends_by_each_role_keep_what_was_promised(conn: Conn) -> None:
    """The roles that end jobs write no intents by themselves, and need not."""
    worker, by_worker = running(conn, **promising(conn, effect()))
    by_producer, by_operator = (owner(conn, effect()) for _ in range(2))
    for role, call, job in (
        ("worker", lambda: end(conn, worker, End(by_worker, 1, "failed")), by_worker),
        ("producer", lambda: cancel(conn, by_producer), by_producer),
        ("operator", lambda: cancel(conn, by_operator), by_operator),
    ):
        conn.execute(f"set local role taskq_{role}")
        call()
        conn.execute("reset role")
        assert [e["status"] for e in effects(conn, job)] == ["pending"]
    conn.execute("set local role taskq_producer")
    assert len(effects(conn, by_producer)) == 1
    assert refused(conn, "select * from taskq.effect_intents") == "42501"


# What a job without effects pays --------------------------------------------------------------------------------------


def test_a_job_without_effects_runs_no_code_for_them(conn: Conn) -> None:
    worker, plain = running(conn)
    conn.execute("set local track_functions = 'all'")
    calls = "select coalesce(pg_stat_get_xact_function_calls('taskq.promise_effects'::regproc), 0)"
    end(conn, worker, End(plain, 1, "succeeded"))
    assert one(conn, calls) == 0
    _, promises = running(conn, worker, **promising(conn, effect()))
    end(conn, worker, End(promises, 1, "succeeded"))
    assert one(conn, calls) == 1
    conditions = rows(
        conn,
        "select tgrelid::regclass::text as at, tgqual is not null as conditional from pg_trigger where tgname ="
        " 'effects_promised'",
    )
    assert len(conditions) > 10  # history and each of its partitions
    assert all(row["conditional"] for row in conditions)


@pytest.mark.parametrize("said", [None, False, True])
def test_what_the_policy_promises_holds_whoever_enqueues(conn: Conn, said: bool | None) -> None:
    spec = promising(conn, effect())
    given = spec | ({} if said is None else {"has_effects": said})
    plain = enqueue(conn)
    for job in (enqueue(conn, **given), *(row["job_id"] for row in enqueue_many(conn, 2, **given))):
        assert get(conn, job)["has_effects"] is True
    assert get(conn, plain)["has_effects"] is None
    by_hand = one(conn, "select taskq.enqueue('t', policy => %s)", spec["policy_id"])
    assert get(conn, by_hand)["has_effects"] is True
    cancel(conn, by_hand)
    assert [i["name"] for i in intents(conn, by_hand)] == ["refund"]


# Promises that cannot be kept -----------------------------------------------------------------------------------------

BROKEN = [
    ("policy_missing", effect(policy_id="gone"), "WF014", "policy 'gone'"),
    ("no_argument", effect(payload={"x": {"arg": "absent"}}), "WF009", "absent"),
    ("no_reference", effect(payload={"x": {"of": "weather"}}), "WF009", "weather"),
    ("no_object", effect(payload={"x": 3}), "WF009", "refers to"),
    ("no_template", effect() | {"payload": [1]}, "WF009", "no object"),
    ("no_task", effect(task="not a name"), "WF009", "not valid"),
    ("no_number", effect(priority="high"), "22P02", "integer"),
    ("no_class", effect(effect_class="cosmic"), "WF009", "not valid"),
    ("too_large", effect(payload={"x": {"arg": "big"}, "y": {"arg": "big"}}), "WF009", "bytes"),
]


@pytest.mark.parametrize(("promised", "state", "said"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_promise_that_cannot_be_kept_is_on_record_and_the_end_stands(
    conn: Conn, promised: dict[str, Any], state: str, said: str
) -> None:
    conn.execute("update taskq.installation set max_payload_bytes = 1000")
    job = owner(conn, promised, effect("good"), payload={"big": "x" * 985})
    cancel(conn, job)
    assert status(conn, job) == "cancelled"
    broken, good = effects(conn, job)
    assert (broken["status"], broken["job_id"], broken["settled"]) == ("broken", None, False)
    assert broken["error"]["sqlstate"] == state
    assert said in broken["error"]["message"]
    assert (good["status"], good["name"]) == ("pending", "good")
    assert violations(conn) == []


def test_names_that_cannot_be_are_refused_and_do_not_keep_an_end_from_being_stored(conn: Conn) -> None:
    nameless = {k: v for k, v in effect().items() if k != "name"}
    promised = [effect("a"), effect("a"), effect("b c"), nameless, "nonsense", effect("z", []), {"on": 5}]
    # Reserved: the one stands for all, the other is how the next would be called.
    promised += [effect("#9", task="of_hash"), effect("*", task="of_star", policy_id="late")]
    for bad in (promised[:2], promised[2:3], promised[3:4], promised[4:5], promised[7:8], promised[8:]):
        spec = Jsonb({"effects": bad})
        assert refused(conn, "select taskq.ensure_policy('bad', 1, %s)", spec) == "WF009"
    policy(conn)
    conn.execute("insert into taskq.policies values ('odd', 1, %s, now())", (Jsonb({"effects": promised}),))
    job = enqueue(conn, policy_id="odd")
    cancel(conn, job)
    made = intents(conn, job)
    assert [i["name"] for i in made] == ["a", "#2", "#3", "#4", "#8", "#9"]
    assert [(i["task"], i["fault"]) for i in made[4:]] == [("of_hash", None), ("of_star", "broken")]
    assert violations(conn) == []
    policy(conn, "late")
    assert one(conn, "select taskq.retry_effect(%s)", made[5]["effect_key"]) == "enqueued"
    assert get(conn, intents(conn, job)[5]["job_id"])["task"] == "of_star"
    assert violations(conn) == []
    conn.execute("set local session_replication_role = replica")
    conn.execute("delete from taskq.effect_intents where name = '#8' and owner_job_id = %s", (job,))
    assert violations(conn) == [("effect_not_promised", job)]


def test_a_payload_that_grows_past_the_limit_as_the_database_writes_it_breaks_the_promise_and_not_the_end(
    conn: Conn,
) -> None:
    conn.execute("update taskq.installation set max_payload_bytes = 1000")
    spec = promising(conn, effect(payload={"xs": {"arg": "xs"}}), effect("good"))
    text = '{"xs":[' + ",".join(["1"] * 400) + "]}"
    whole = {"task": "t", "queue": "q", "max_attempts": 1, "effect_class": "idempotent"} | spec
    [row] = rows(conn, "select * from taskq.enqueue_many(%s, array[1], array[%s])", Jsonb([whole]), text)
    job = row["job_id"]
    worker = register(conn)
    claim_one(conn, worker)
    assert end(conn, worker, End(job, 1, "failed")) == 1
    grown, good = effects(conn, job)
    assert (status(conn, job), grown["status"], good["status"]) == ("failed", "broken", "pending")
    assert "1208 bytes, the limit is 1000" in grown["error"]["message"]
    assert refused(conn, "select taskq.retry_effect(%s)", grown["effect_key"]) == "WF009"
    conn.execute("update taskq.installation set max_payload_bytes = 2000")
    assert one(conn, "select taskq.retry_effect(%s)", grown["effect_key"]) == "enqueued"
    assert violations(conn) == []


def test_a_promise_is_kept_whatever_travels_with_its_owner(conn: Conn) -> None:
    full = {"trace": "x" * 131_050}
    for meta in ({"trace": "x"}, full):
        job = owner(conn, effect(), meta=meta)
        cancel(conn, job)
        [found] = jobs_of(conn, job)
        assert found["meta"]["effect"]["owner_job_id"] == str(job)
        assert ("trace" in found["meta"]) == (meta is not full)
    assert violations(conn) == []


@pytest.mark.parametrize("spec", [None, {"name": "no list"}, "text"])
def test_a_policy_that_is_missing_or_no_policy_breaks_all_that_it_promised(conn: Conn, spec: Any) -> None:
    policy(conn)
    if spec is not None:
        policy(conn, "odd", effects=spec)
    job = enqueue(conn, policy_id="odd", has_effects=True)
    cancel(conn, job)
    [intent] = intents(conn, job)
    assert (intent["name"], intent["fault"], intent["effect_key"]) == ("*", "broken", f"{job}:0:*")
    key = intent["effect_key"]
    assert refused(conn, "select taskq.retry_effect(%s)", key) == "WF014"
    assert refused(conn, "select taskq.retry(%s)", job) == "WF020"
    if spec is None:
        assert violations(conn) == []
        promising(conn, effect("refund"), name="odd")
        assert one(conn, "select taskq.retry_effect(%s)", key) == "enqueued"
        assert [(e["name"], e["status"], e["settled"]) for e in effects(conn, job)] == [
            ("*", "broken", True),
            ("refund", "pending", False),
        ]
        assert refused(conn, "select taskq.retry_effect(%s)", key) == "WF012"
        assert violations(conn) == []


def test_a_broken_promise_is_kept_once_what_it_lacked_is_there(conn: Conn) -> None:
    job = owner(conn, effect(policy_id="late", payload={"how": {"of": "status"}}))
    cancel(conn, job)
    key = f"{job}:0:refund"
    assert refused(conn, "select taskq.retry_effect(%s)", key) == "WF014"
    policy(conn, "late")
    assert one(conn, "select taskq.retry_effect(%s, 'stored it', 'ann')", key) == "enqueued"
    [intent] = intents(conn, job)
    assert (intent["fault"], intent["error"]) == (None, None)
    made = get(conn, intent["job_id"])
    assert (made["status"], made["payload"], made["policy_id"]) == ("pending", {"how": "cancelled"}, "late")
    [noted] = rows(conn, "select actor, reason, details from taskq.audit where subject = %s", key)
    assert noted == {"actor": "ann", "reason": "stored it", "details": {"answer": "enqueued"}}
    assert violations(conn) == []


def test_what_is_the_matter_of_the_moment_undoes_the_end(conn: Conn) -> None:
    """A full disk, a lock, a lost connection: the end is sent again, and the promise is not broken for good."""
    assert [one(conn, "select taskq.is_broken(%s)", s) for s in ("53100", "40P01", "55P03", "57P01", "08006")] == [
        False
    ] * 5
    job = owner(conn, effect())
    conn.execute(
        "create or replace function taskq.effect_payload(p_template jsonb, p_owner taskq.history) returns jsonb"
        " language plpgsql as $$ begin raise disk_full; end $$"
    )
    assert refused(conn, "select taskq.cancel(%s)", job) == "53100"
    assert status(conn, job) == "pending"


def test_a_chain_of_effects_ends_at_the_limit(conn: Conn) -> None:
    """A policy that promises itself, which only a hand can write."""
    job = enqueue(conn, **promising(conn, effect(policy_id="loop"), name="loop"))
    for depth in range(1, 9):
        cancel(conn, job)
        [intent] = intents(conn, job)
        assert (intent["depth"], intent["fault"]) == (depth, None)
        job = intent["job_id"]
        assert get(conn, job)["has_effects"] is True
    cancel(conn, job)
    [last] = effects(conn, job)
    assert (last["depth"], last["status"], last["job_id"], last["settled"]) == (9, "refused", None, False)
    assert last["error"]["type"] == "EffectRefused"
    assert refused(conn, "select taskq.retry_effect(%s)", last["effect_key"]) == "WF012"
    assert one(conn, "select taskq.settle_effect(%s, 'far enough')", last["effect_key"]) == "settled"
    assert violations(conn) == []


# Settling -------------------------------------------------------------------------------------------------------------


def failed_owner(conn: Conn, *promised: Any) -> tuple[UUID, list[dict[str, Any]]]:
    worker, job = running(conn, **promising(conn, *(promised or (effect(),))))
    end(conn, worker, End(job, 1, "failed", error={"type": "E", "message": "m"}))
    return job, intents(conn, job)


def run(conn: Conn, job: UUID, outcome: str) -> None:
    worker = register(conn)
    assert claim_one(conn, worker)["job_id"] == job
    assert end(conn, worker, End(job, get(conn, job)["claim_epoch"], outcome, error={"type": "X", "message": "y"})) == 1


def test_an_effect_is_settled_once_its_job_has_succeeded(conn: Conn) -> None:
    job, [intent] = failed_owner(conn)
    assert effects(conn, job)[0]["settled"] is False
    assert refused(conn, "select taskq.retry(%s)", job) == "WF020"
    run(conn, intent["job_id"], "succeeded")
    [found] = effects(conn, job)
    assert (found["status"], found["settled"], found["settled_how"]) == ("succeeded", True, "succeeded")
    assert found["settled_at"] == get(conn, intent["job_id"])["finished_at"]
    assert refused(conn, "select taskq.settle_effect(%s, 'r')", intent["effect_key"]) == "WF012"
    assert retry(conn, job) == "reopened"


def test_an_effect_that_fails_is_bounded_and_stays_visible(conn: Conn) -> None:
    job, [intent] = failed_owner(conn)
    made = intent["job_id"]
    worker = register(conn)
    claim_one(conn, worker)
    end(conn, worker, End(made, 1, "retry", error={"type": "X", "message": "first"}))
    [found] = effects(conn, job)
    assert (found["status"], found["error"]["message"], found["settled"]) == ("pending", "first", False)
    claim_one(conn, worker)
    end(conn, worker, End(made, 2, "retry", error={"type": "X", "message": "second"}))  # the last of its attempts
    [found] = effects(conn, job)
    assert (found["status"], found["error"]["message"], found["settled"]) == ("failed", "second", False)
    assert refused(conn, "select taskq.retry(%s)", job) == "WF020"
    assert one(conn, "select taskq.retry_effect(%s)", intent["effect_key"]) == "reopened"
    assert effects(conn, job)[0]["status"] == "pending"
    assert one(conn, "select taskq.retry_effect(%s)", intent["effect_key"]) == "due"
    run(conn, made, "failed")
    assert one(conn, "select taskq.settle_effect(%s, 'paid by hand', 'ann')", intent["effect_key"]) == "settled"
    [found] = effects(conn, job)
    assert (found["status"], found["settled_how"], found["settled_by"], found["settled_reason"]) == (
        "failed",
        "operator",
        "ann",
        "paid by hand",
    )
    assert refused(conn, "select taskq.retry(%s)", made) == "WF012"
    assert refused(conn, "select taskq.retry_effect(%s)", intent["effect_key"]) == "WF012"
    noted = rows(conn, "select action from taskq.audit where subject = %s order by id", intent["effect_key"])
    assert [r["action"] for r in noted] == ["retry_effect", "retry_effect", "settle_effect"]
    assert retry(conn, job) == "reopened"
    assert violations(conn) == []


def test_settling_cancels_a_job_that_waits_and_is_refused_while_it_runs(conn: Conn) -> None:
    job, [one_, two] = failed_owner(conn, effect("a"), effect("b"))
    assert one(conn, "select taskq.settle_effect(%s, 'no need')", one_["effect_key"]) == "settled"
    assert (status(conn, one_["job_id"]), get(conn, one_["job_id"])["error"]["reason"]) == ("cancelled", "no need")
    worker = register(conn)
    assert claim_one(conn, worker)["job_id"] == two["job_id"]
    assert refused(conn, "select taskq.settle_effect(%s, 'r')", two["effect_key"]) == "WF012"
    cancel(conn, two["job_id"])
    lose(conn, worker)
    settle(conn)
    assert status(conn, two["job_id"]) == "unknown"
    assert refused(conn, "select taskq.settle_effect(%s, 'r')", two["effect_key"]) == "WF012"
    assert refused(conn, "select taskq.retry_effect(%s)", two["effect_key"]) == "WF012"
    assert refused(conn, "select taskq.retry(%s)", job) == "WF020"
    resolve(conn, two["job_id"], False)
    assert [e["settled_how"] for e in effects(conn, job)] == ["operator", "cancelled"]
    assert retry(conn, job) == "reopened"


@pytest.mark.parametrize("reason", [None, "", "  "])
def test_settling_needs_a_reason(conn: Conn, reason: str | None) -> None:
    _, [intent] = failed_owner(conn)
    assert refused(conn, "select taskq.settle_effect(%s, %s)", intent["effect_key"], reason) == "WF009"


@pytest.mark.parametrize("call", ["settle_effect(%s, 'r')", "retry_effect(%s)"])
def test_an_effect_that_is_not_there_is_told(conn: Conn, call: str) -> None:
    assert refused(conn, f"select taskq.{call}", "nothing:0:x") == "WF021"


# Reopening ------------------------------------------------------------------------------------------------------------


def test_reopening_raises_the_key_once_an_effect_has_undone_what_the_job_did(conn: Conn) -> None:
    job, [first] = failed_owner(conn, effect("refund", ["failed"], undoes=True))
    run(conn, first["job_id"], "succeeded")
    retry(conn, job)
    assert (get(conn, job)["generation"], get(conn, job)["key_generation"]) == (1, 1)
    # An end without a promise leaves the key as it is.
    cancel(conn, job)
    assert len(intents(conn, job)) == 1
    retry(conn, job)
    assert (get(conn, job)["generation"], get(conn, job)["key_generation"]) == (2, 1)
    run(conn, job, "failed")
    second = intents(conn, job)[1]
    assert second["effect_key"] == f"{job}:2:refund"
    run(conn, second["job_id"], "succeeded")
    retry(conn, job)
    assert (get(conn, job)["generation"], get(conn, job)["key_generation"]) == (3, 3)
    assert violations(conn) == []


@pytest.mark.parametrize("undone", ["only told", "refund cancelled", "refund settled by hand"])
def test_the_key_stays_where_nothing_was_undone(conn: Conn, undone: str) -> None:
    """Under a new key the provider would do again what it has done."""
    job, [made] = failed_owner(conn, effect("after", ["failed"], undoes=undone != "only told"))
    if undone == "only told":
        run(conn, made["job_id"], "succeeded")
    elif undone == "refund cancelled":
        assert cancel(conn, made["job_id"]) == "cancelled"
    else:
        conn.execute("select taskq.settle_effect(%s, 'r')", (made["effect_key"],))
    retry(conn, job)
    assert (get(conn, job)["generation"], get(conn, job)["key_generation"]) == (1, None)
    assert violations(conn) == []


def test_without_effects_the_key_stays_as_it_was(conn: Conn) -> None:
    worker, job = running(conn)
    end(conn, worker, End(job, 1, "failed"))
    retry(conn, job)
    assert (get(conn, job)["generation"], get(conn, job)["key_generation"]) == (1, None)


def test_a_refused_reopening_names_the_effects_and_the_cures(conn: Conn) -> None:
    job, made = failed_owner(conn, effect("mail"), effect("refund"), effect("done"))
    conn.execute("select taskq.settle_effect(%s, 'r')", (made[2]["effect_key"],))
    register_and_claim = register(conn)
    claim_one(conn, register_and_claim)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        retry(conn, job)
    assert caught.value.sqlstate == "WF020"
    assert "mail (running), refund (pending)" in (caught.value.diag.message_primary or "")
    assert f"{job}:0:mail" in (caught.value.diag.message_detail or "")
    for word in ("Wait", "cancel", "settle"):
        assert word in (caught.value.diag.message_hint or "")
    [answer] = rows(conn, "select * from taskq.steer_many('retry', array[%s]::uuid[])", job)
    assert answer["answer"] == "refused"


def test_a_cancelled_effect_lets_its_owner_go_on_and_is_then_not_reopened(conn: Conn) -> None:
    job, [intent] = failed_owner(conn)
    cancel(conn, intent["job_id"])
    assert effects(conn, job)[0]["settled_how"] == "cancelled"
    # As long as the owner has not moved on, it may have another go.
    assert one(conn, "select taskq.retry_effect(%s)", intent["effect_key"]) == "reopened"
    assert refused(conn, "select taskq.retry(%s)", job) == "WF020"
    cancel(conn, intent["job_id"])
    assert retry(conn, job) == "reopened"
    assert refused(conn, "select taskq.retry(%s)", intent["job_id"]) == "WF012"
    run(conn, job, "failed")
    assert refused(conn, "select taskq.retry(%s)", intent["job_id"]) == "WF012"
    assert violations(conn) == []


def test_a_broken_effect_whose_owner_is_gone_is_only_settled(conn: Conn) -> None:
    job, [intent] = failed_owner(conn, effect(policy_id="gone"))
    conn.execute("delete from taskq.history where id = %s", (job,))
    assert refused(conn, "select taskq.retry_effect(%s)", intent["effect_key"]) == "WF011"
    assert one(conn, "select taskq.settle_effect(%s, 'by hand')", intent["effect_key"]) == "settled"


# Retention ------------------------------------------------------------------------------------------------------------


def pass_days(conn: Conn, days: int) -> None:
    shift_clock(conn, f"{days} days")
    conn.execute("select taskq.ensure_partitions()")


def expire(conn: Conn) -> None:
    """Have retention drop what it may."""
    while drop_expired(conn):
        assert violations(conn) == []


def test_intents_are_forgotten_with_both_of_their_jobs_once_they_are_settled(conn: Conn) -> None:
    move_clock(conn)
    again, [undone] = failed_owner(conn, effect("undone"))
    cancel(conn, undone["job_id"])
    broken, by_hand = (effect(name, policy_id="x") for name in ("broken", "by_hand"))
    promised = [effect(name) for name in ("waits", "late", "fails", "succeeds", "cancelled")]
    job, made = failed_owner(conn, *promised, broken, by_hand)
    waits, late, fails, succeeds, cancelled, _, settled = made
    assert retry(conn, again) == "reopened"
    held = [waits["job_id"], late["job_id"], again]
    conn.execute("update taskq.jobs set run_at = 'infinity' where id = any(%s)", (held,))
    conn.execute("select taskq.settle_effect(%s, 'r')", (settled["effect_key"],))
    run(conn, fails["job_id"], "failed")
    run(conn, succeeds["job_id"], "succeeded")
    cancel(conn, cancelled["job_id"])
    pass_days(conn, 10)
    make_due(conn, late["job_id"])
    run(conn, late["job_id"], "failed")
    conn.execute("select taskq.settle_effect(%s, 'r')", (late["effect_key"],))
    pass_days(conn, 21)
    assert one(conn, "select taskq.prune_effects()") == 0
    pass_days(conn, 1)
    expire(conn)
    stand = {e["name"]: (e["status"], e["settled"], e["settled_how"]) for e in effects(conn, job)}
    assert stand == {
        "waits": ("pending", False, None),
        "late": ("failed", True, "operator"),
        "fails": ("failed", False, None),
        "succeeds": ("succeeded", True, "succeeded"),
        "cancelled": ("cancelled", True, "cancelled"),
        "broken": ("broken", False, None),
        "by_hand": ("broken", True, "operator"),
    }
    assert {e["name"]: e["error"] for e in effects(conn, job)}["fails"] == {"type": "X", "message": "y"}
    assert one(conn, "select taskq.prune_effects(0)") == 0
    assert one(conn, "select taskq.prune_effects(1)") == 1
    assert one(conn, "select taskq.prune()") == 2
    assert [e["name"] for e in effects(conn, job)] == ["waits", "late", "fails", "broken"]
    assert [e["settled_how"] for e in effects(conn, again)] == ["cancelled"]
    # What is left of the one that failed can be settled, and goes then.
    assert refused(conn, "select taskq.retry_effect(%s)", fails["effect_key"]) == "WF011"
    assert one(conn, "select taskq.settle_effect(%s, 'paid by hand')", fails["effect_key"]) == "settled"
    assert one(conn, "select taskq.prune()") == 1
    assert violations(conn) == []


def test_an_effect_whose_job_is_dropped_before_its_owner_lets_that_go_on_as_it_stood(conn: Conn) -> None:
    move_clock(conn)
    job, [done] = failed_owner(conn, effect(undoes=True))
    run(conn, done["job_id"], "succeeded")
    other, [failed_] = failed_owner(conn, effect())
    run(conn, failed_["job_id"], "failed")
    pass_days(conn, 10)
    # As if they had ended later than their effects.
    conn.execute("set local session_replication_role = replica")
    conn.execute("update taskq.history set finished_at = taskq.now() where id in (%s, %s)", (job, other))
    conn.execute("set local session_replication_role = origin")
    pass_days(conn, 22)
    expire(conn)
    assert refused(conn, "select taskq.retry(%s)", other) == "WF020"
    assert retry(conn, job) == "reopened"
    assert get(conn, job)["key_generation"] == 1

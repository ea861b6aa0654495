"""Unique and idempotency keys: taken with the job, given back by whatever path it leaves, expired by the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.types.json import Jsonb
from sql import (
    End,
    attempts,
    cancel,
    claim,
    control_clock,
    detail,
    dump,
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
    unknown,
    violations,
)

Conn = psycopg.Connection[Any]


def holder(conn: Conn, key: str = "k", scope: str = "t") -> UUID | None:
    found = rows(conn, "select job_id from taskq.unique_keys where scope = %s and key = %s", scope, key)
    return found[0]["job_id"] if found else None


def succeed(conn: Conn, job: UUID) -> None:
    worker = register(conn)
    [row] = claim(conn, worker)
    end(conn, worker, End(job, row["claim_epoch"], "succeeded"))


def fail(conn: Conn, job: UUID) -> None:
    worker = register(conn)
    [row] = claim(conn, worker)
    end(conn, worker, End(job, row["claim_epoch"], "failed"))


def cancel_waiting(conn: Conn, job: UUID) -> None:
    assert cancel(conn, job) == "cancelled"


def cancel_held(conn: Conn, job: UUID) -> None:
    conn.execute("update taskq.jobs set status = 'held', held_reason = 'signal' where id = %s", (job,))
    assert cancel(conn, job) == "cancelled"


def cancel_running(conn: Conn, job: UUID) -> None:
    worker = register(conn)
    claim(conn, worker)
    cancel(conn, job)
    end(conn, worker, End(job, 1, "cancelled"))


def miss_deadline(conn: Conn, job: UUID) -> None:
    conn.execute("update taskq.jobs set deadline = taskq.now() where id = %s", (job,))
    assert one(conn, "select count(*) from taskq.sweep()") == 1


def use_up(conn: Conn, job: UUID) -> None:
    conn.execute("update taskq.jobs set max_attempts = 1, attempt = 1 where id = %s", (job,))
    assert one(conn, "select count(*) from taskq.sweep()") == 1


def run_out_of_recoveries(conn: Conn, job: UUID) -> None:
    policy(conn, "none", max_recoveries=0)
    conn.execute("update taskq.jobs set policy_id = 'none' where id = %s", (job,))
    worker = register(conn)
    claim(conn, worker)
    lose(conn, worker)
    assert settle(conn) == {job: "failed"}


def resolve_unknown(conn: Conn, job: UUID) -> None:
    worker = register(conn)
    claim(conn, worker)
    cancel(conn, job)
    lose(conn, worker)
    settle(conn)
    resolve(conn, job, happened=True)


def delete_by_hand(conn: Conn, job: UUID) -> None:
    conn.execute("delete from taskq.jobs where id = %s", (job,))


PATHS: list[Callable[[Conn, UUID], None]] = [
    succeed,
    fail,
    cancel_waiting,
    cancel_held,
    cancel_running,
    miss_deadline,
    use_up,
    run_out_of_recoveries,
    resolve_unknown,
    delete_by_hand,
]


@pytest.mark.parametrize("path", PATHS)
def test_a_unique_key_is_free_again_once_its_job_has_left_by_whatever_path(
    conn: Conn, path: Callable[[Conn, UUID], None]
) -> None:
    job = enqueue(conn, unique_key="k")
    assert enqueue(conn, unique_key="k") == job
    path(conn, job)
    assert holder(conn) is None
    assert enqueue(conn, unique_key="k") != job


@pytest.mark.parametrize("path", PATHS)
def test_a_unique_key_is_held_for_a_while_if_asked(conn: Conn, path: Callable[[Conn, UUID], None]) -> None:
    control_clock(conn)
    job = enqueue(conn, unique_key="k", unique_hold=60)
    path(conn, job)
    assert enqueue(conn, unique_key="k") == job
    assert one(conn, "select taskq.prune()") == 0
    shift_clock(conn, "61 s")
    other = enqueue(conn, unique_key="k")
    assert other != job
    assert holder(conn) == other
    cancel(conn, other)
    assert violations(conn) == []


def test_an_expired_unique_key_is_pruned(conn: Conn) -> None:
    control_clock(conn)
    job = enqueue(conn, unique_key="k", unique_hold=60)
    cancel(conn, job)
    shift_clock(conn, "61 s")
    assert one(conn, "select taskq.prune()") == 1
    assert holder(conn) is None


def test_a_job_that_waits_again_keeps_its_key_so_no_twin_can_be_there(conn: Conn) -> None:
    worker, job = running(conn, unique_key="k")
    for epoch, outcome in enumerate(("retry", "retry_after", "snooze", "release"), 1):
        assert enqueue(conn, unique_key="k") == job
        assert end(conn, worker, End(job, epoch, outcome)) == 1
        assert enqueue(conn, unique_key="k") == job
        make_due(conn, job)
        claim(conn, worker)
    # Recovery of its worker: no unique violation leaves the settling, and the others are settled with it.
    others = [row["job_id"] for row in enqueue_many(conn, 20)]
    claim(conn, worker, 20)
    lose(conn, worker)
    assert settle(conn) == dict.fromkeys([job, *others], "pending")
    assert enqueue(conn, unique_key="k") == job
    assert violations(conn) == []


def test_keys_are_unique_within_a_scope_which_is_the_task_unless_said(conn: Conn) -> None:
    first = enqueue(conn, unique_key="k")
    assert enqueue(conn, unique_key="k", task="u") != first
    scoped = enqueue(conn, unique_key="k", unique_scope="s")
    assert scoped != first
    assert enqueue(conn, unique_key="k", unique_scope="s", task="u") == scoped
    assert violations(conn) == []


def test_a_batch_answers_in_its_order_and_repeats_hit_the_first(conn: Conn) -> None:
    k2 = enqueue(conn, unique_key="k2")
    answer = enqueue_many(conn, 6, unique=["k1", "k2", "k3", "k1", None, None])
    ids = [row["job_id"] for row in answer]
    assert [row["ord"] for row in answer] == [1, 2, 3, 4, 5, 6]
    assert [row["inserted"] for row in answer] == [True, False, True, False, True, True]
    assert ids[1] == k2
    assert ids[3] == ids[0]
    assert len(set(ids)) == 5
    before = dump(conn)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        enqueue_many(conn, 3, unique=["k9", "k2", None], on_conflict="raise")
    assert caught.value.sqlstate == "WF007"
    assert detail(caught.value) == {"job_id": str(k2), "scope": "t", "key": "k2"}
    assert dump(conn) == before


# Reopening ------------------------------------------------------------------------------------------------------------


def test_reopening_takes_the_unique_key_again(conn: Conn) -> None:
    job = enqueue(conn, unique_key="k")
    fail(conn, job)
    assert holder(conn) is None
    retry(conn, job)
    assert holder(conn) == job
    assert enqueue(conn, unique_key="k") == job
    assert violations(conn) == []


def test_reopening_takes_the_key_again_while_it_is_held_and_once_it_has_expired(conn: Conn) -> None:
    control_clock(conn)
    for wait in ("0 s", "61 s"):
        job = enqueue(conn, unique_key=wait, unique_hold=60)
        fail(conn, job)
        shift_clock(conn, wait)
        retry(conn, job)
        assert rows(conn, "select job_id, expires_at from taskq.unique_keys where key = %s", wait) == [
            {"job_id": job, "expires_at": None}
        ]
        cancel(conn, job)
    assert violations(conn) == []


def test_reopening_is_refused_while_another_job_has_the_key(conn: Conn) -> None:
    job = enqueue(conn, unique_key="k")
    fail(conn, job)
    other = enqueue(conn, unique_key="k")
    before = dump(conn)
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        retry(conn, job)
    assert caught.value.sqlstate == "WF007"
    assert detail(caught.value)["job_id"] == str(other)
    assert dump(conn) == before
    cancel(conn, other)
    assert retry(conn, job) == "reopened"
    assert violations(conn) == []


# Idempotency ----------------------------------------------------------------------------------------------------------


def test_the_same_request_is_answered_with_the_same_job_also_when_it_has_finished(conn: Conn) -> None:
    job = enqueue(conn, idempotency_key="i", payload={"n": 1})
    assert enqueue(conn, idempotency_key="i", payload={"n": 1}) == job
    succeed(conn, job)
    [again] = enqueue_many(conn, idempotency=["i"], payloads=[{"n": 1}])
    assert (again["job_id"], again["inserted"]) == (job, False)
    assert get(conn, job)["status"] == "succeeded"


def test_the_same_key_with_another_request_is_refused(conn: Conn) -> None:
    job = enqueue(conn, idempotency_key="i", payload={"n": 1})
    before = dump(conn)
    for spec in ({"payload": {"n": 2}}, {"payload": {"n": 1}, "task": "u", "idempotency_scope": "t"}):
        with pytest.raises(psycopg.Error) as caught, conn.transaction():
            enqueue(conn, idempotency_key="i", **spec)
        assert caught.value.sqlstate == "WF008"
        assert detail(caught.value)["job_id"] == str(job)
    assert dump(conn) == before
    assert enqueue(conn, idempotency_key="i", payload={"n": 1}, task="u") != job


def test_an_idempotency_key_is_forgotten_after_its_time_and_no_sooner(conn: Conn) -> None:
    control_clock(conn)
    conn.execute("update taskq.installation set key_retention = '90 days'")
    job = enqueue(conn, idempotency_key="i")
    cancel(conn, job)
    shift_clock(conn, "89 days")
    assert one(conn, "select taskq.prune()") == 0
    assert enqueue(conn, idempotency_key="i") == job
    shift_clock(conn, "2 days")
    other = enqueue(conn, idempotency_key="i", payload={"another": "request"})
    assert other != job
    shift_clock(conn, "91 days")
    assert one(conn, "select taskq.prune()") == 1


def test_with_both_keys_the_idempotency_key_names_the_job_that_answers(conn: Conn) -> None:
    job = enqueue(conn, unique_key="k")
    [both] = enqueue_many(conn, unique=["k"], idempotency=["i"])
    assert (both["job_id"], both["inserted"]) == (job, False)
    assert one(conn, "select job_id from taskq.idempotency_keys where key = 'i'") == job
    cancel(conn, job)
    assert enqueue(conn, idempotency_key="i") == job


def test_an_unknown_job_keeps_its_key(conn: Conn) -> None:
    worker, job = unknown(conn, unique_key="k")
    assert enqueue(conn, unique_key="k") == job
    end(conn, worker, End(job, 1))
    assert holder(conn) is None
    assert attempts(conn, job) == [(1, "succeeded")]


@pytest.mark.parametrize("numbers", [[0], [2], [-1], [None], [1, 2], [1, None]])
@pytest.mark.parametrize("keys", [None, "k"])
def test_a_job_that_names_no_spec_is_refused(conn: Conn, numbers: list[int | None], keys: str | None) -> None:
    enqueue(conn)
    before = dump(conn)
    spec = [{"task": "t", "queue": "q", "max_attempts": 1, "effect_class": "pure", "policy_id": "p"}]
    query = "select * from taskq.enqueue_many(%s, %s::int[], %s::text[], %s::text[])"
    n = len(numbers)
    unique = [f"{keys}{i}" for i in range(n)] if keys else None
    assert refused(conn, query, Jsonb(spec), numbers, ["{}"] * n, unique) == "WF009"
    assert refused(conn, query, Jsonb([]), numbers, ["{}"] * n, unique) == "WF009"
    assert refused(conn, query, Jsonb({}), numbers, ["{}"] * n, unique) == "WF009"
    assert refused(conn, query, None, numbers, ["{}"] * n, unique) == "WF009"
    assert dump(conn) == before


@pytest.mark.parametrize("how", ["replace", "RAISE", "", None])
@pytest.mark.parametrize("key", ["k", None])
def test_an_unknown_answer_to_a_conflict_is_refused(conn: Conn, how: str | None, key: str | None) -> None:
    with pytest.raises(psycopg.Error) as caught:
        enqueue_many(conn, unique=[key], on_conflict=how)  # type: ignore[arg-type]
    assert caught.value.sqlstate == "WF009"


def test_a_key_held_by_a_job_that_is_only_repeated_in_the_batch_is_a_conflict(conn: Conn) -> None:
    old = enqueue(conn, idempotency_key="i", unique_key="k")
    with pytest.raises(psycopg.Error) as refusal, conn.transaction():
        enqueue_many(conn, 2, unique=[None, "k"], idempotency=["i", None], on_conflict="raise")
    assert refusal.value.sqlstate == "WF007"
    assert detail(refusal.value)["job_id"] == str(old)


@pytest.mark.parametrize("which", range(4), ids=["spec", "payload", "unique key", "idempotency key"])
@pytest.mark.parametrize("form", ["[0:1]={{{}}}", "[2:3]={{{}}}", "{{{{{}}}}}"], ids=["from 0", "from 2", "nested"])
def test_an_array_that_does_not_count_from_one_gives_no_job_the_key_of_another(
    conn: Conn, form: str, which: int
) -> None:
    one_of_each: tuple[Any, ...] = ([1, 1], ["{}", "{}"], ["a", "b"], ["a", "b"])
    texts = ("1,1", '"{}","{}"', "a,b", "a,b")
    given = list(one_of_each)
    given[which] = form.format(texts[which])
    if form.startswith("{"):
        # As many as are told by the length of the first dimension.
        given = [value if n == which else value[:1] for n, value in enumerate(given)]
    spec = {"task": "t", "queue": "q", "max_attempts": 1, "effect_class": "pure", "policy_id": policy(conn)}
    query = "select * from taskq.enqueue_many(%s, %s::integer[], %s::text[], %s::text[], %s::text[])"
    assert refused(conn, query, Jsonb([spec]), *given) == "WF009"
    assert one(conn, "select count(*) from taskq.jobs") == 0

"""Cohorts: no more of their jobs run at once than the limit lets, and full ones stand in nobody's way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sql import (
    NOBODY,
    POLICY,
    Conn,
    End,
    attempts,
    cancel,
    claim,
    detail,
    end,
    enqueue,
    enqueue_many,
    get,
    lose,
    one,
    policy,
    refused,
    register,
    retry,
    rows,
    settle,
    status,
    unknown,
    violations,
)

LANES = [("q", priority) for priority in range(9, -1, -1)]


@pytest.fixture(autouse=True)
def sound(conn: Conn) -> Iterator[None]:
    yield
    if conn.info.transaction_status != psycopg.pq.TransactionStatus.INERROR:
        assert violations(conn) == []


def limit(conn: Conn, n: int, cohort: str = "a") -> None:
    conn.execute("select taskq.ensure_limit(%s, %s)", (cohort, n))


def many(conn: Conn, n: int, cohort: str | None = "a", **spec: Any) -> list[UUID]:
    return [enqueue(conn, cohort=cohort, **spec) for _ in range(n)]


def claimed(conn: Conn, worker: UUID, limit: int = 10, *, free: int | None = None, **options: Any) -> list[UUID]:
    """Claim, with so many bodies that could start at once; the ids, as they would start."""
    lanes = options.get("lanes", LANES)
    found = rows(
        conn,
        "select * from taskq.claim(%s, %s, %s::text[], %s::text[], %s::smallint[], %s::timestamptz[], %s::uuid[],"
        " p_skip => %s::uuid[], p_free => %s)",
        worker,
        limit,
        list(options.get("tasks", ["t"])),
        [queue for queue, _ in lanes],
        [priority for _, priority in lanes],
        ["-infinity"] * len(lanes),
        [NOBODY] * len(lanes),
        list(options.get("skip", ())),
        free,
    )
    assert {row["kind"] for row in found} <= {"job"}
    return [row["job_id"] for row in sorted(found, key=lambda r: (-r["priority"], r["run_at"], r["job_id"]))]


def test_no_more_run_than_the_limit_lets_and_the_rest_wait_unspent(conn: Conn) -> None:
    limit(conn, 2)
    jobs = many(conn, 5)
    worker, other = register(conn), register(conn)
    assert claimed(conn, worker) == jobs[:2]
    assert claimed(conn, other) == []
    for job in jobs[2:]:
        row = get(conn, job)
        assert (row["status"], row["claim_epoch"], row["attempt"], row["snoozes"]) == ("pending", 0, 0, 0)
        assert attempts(conn, job) == []
    assert end(conn, worker, End(jobs[0])) == 1
    assert claimed(conn, other) == [jobs[2]]


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "cancelled", "retry", "retry_after", "snooze", "release"])
def test_whatever_ends_an_attempt_frees_its_slot(conn: Conn, outcome: str) -> None:
    limit(conn, 1)
    first, second = many(conn, 2)
    worker = register(conn)
    assert claimed(conn, worker) == [first]
    assert end(conn, worker, End(first, outcome=outcome, delay=60)) == 1
    assert claimed(conn, worker) == [second]


def test_a_lost_workers_jobs_count_until_they_are_settled(conn: Conn) -> None:
    limit(conn, 1)
    first, second = many(conn, 2)
    worker, other = register(conn), register(conn)
    assert claimed(conn, worker) == [first]
    lose(conn, worker)
    assert claimed(conn, other) == []
    assert settle(conn) == {first: "pending"}
    assert claimed(conn, other) == [first]
    assert status(conn, second) == "pending"


def test_an_unknown_outcome_holds_no_slot(conn: Conn) -> None:
    limit(conn, 1)
    _, job = unknown(conn, cohort="a")
    [second] = many(conn, 1)
    assert claimed(conn, register(conn)) == [second]
    assert end(conn, get(conn, job)["worker_id"], End(job)) == 1


def test_cohorts_are_apart_and_a_full_one_holds_up_nobody(conn: Conn) -> None:
    limit(conn, 1)
    limit(conn, 2, "b")
    full, others, plain = many(conn, 3), many(conn, 3, "b"), many(conn, 2, None)
    assert claimed(conn, register(conn)) == [full[0], *others[:2], *plain]


def test_one_limit_holds_across_queues_and_tasks(conn: Conn) -> None:
    limit(conn, 2)
    jobs = [enqueue(conn, cohort="a", queue=q, task=t) for q, t in (("q", "t"), ("r", "t"), ("q", "u"))]
    lanes = [("q", 5), ("r", 5)]
    assert len(claimed(conn, register(conn, queues=["q", "r"]), lanes=lanes, tasks=["t", "u"])) == 2
    assert claimed(conn, register(conn), lanes=lanes, tasks=["t", "u"]) == []
    assert {status(conn, job) for job in jobs} == {"running", "pending"}


def test_priority_counts_within_a_cohort_and_against_other_jobs(conn: Conn) -> None:
    limit(conn, 2)
    low, high, plain, plain_high = (
        enqueue(conn, cohort=cohort, priority=priority)
        for cohort, priority in (("a", 2), ("a", 7), (None, 5), (None, 9))
    )
    worker = register(conn)
    assert [claimed(conn, worker, 1) for _ in range(4)] == [[plain_high], [high], [plain], [low]]


def test_among_equals_the_older_job_is_claimed_first(conn: Conn) -> None:
    limit(conn, 9)
    jobs = [enqueue(conn, cohort=cohort) for cohort in ("a", None, "a", None, "b")]
    worker = register(conn)
    assert [claimed(conn, worker, 1) for _ in jobs] == [[job] for job in jobs]


def test_jobs_of_cohorts_are_claimed_only_for_bodies_that_can_start(conn: Conn) -> None:
    limit(conn, 9)
    plain, inside, behind = many(conn, 3, None), many(conn, 3), many(conn, 3, None)
    worker = register(conn)
    assert claimed(conn, worker, 8, free=0) == [*plain, *behind]
    more = many(conn, 3, None)
    assert claimed(conn, worker, 8, free=2) == [*inside[:2], *more]
    last = many(conn, 3, None)
    assert claimed(conn, worker, 2, free=5) == [inside[2], last[0]]


def test_what_a_claim_leaves_out_it_leaves_out_of_cohorts_too(conn: Conn) -> None:
    limit(conn, 9)
    worker = register(conn)
    enqueue(conn, cohort="a", run_in=60)
    enqueue(conn, cohort="a", task="u")
    enqueue(conn, cohort="a", required_worker_schema=99)
    enqueue(conn, cohort="a", deadline_in=-1)
    skipped = enqueue(conn, cohort="a")
    conn.execute("update taskq.jobs set attempt = 3 where id = %s", (enqueue(conn, cohort="a"),))
    conn.execute("select taskq.pause_queue('paused')")
    enqueue(conn, cohort="a", queue="paused")
    lanes = [*LANES, ("paused", 5)]
    assert claimed(conn, worker, skip=[skipped], lanes=lanes) == []
    assert claimed(conn, worker, lanes=lanes) == [skipped]
    conn.execute("delete from taskq.jobs where attempt = 3")


def test_a_limit_of_nobody_lets_nobody_run_and_none_lets_all(conn: Conn) -> None:
    limit(conn, 0)
    many(conn, 1)
    free = many(conn, 3, "unlimited")
    assert claimed(conn, register(conn)) == free
    assert one(conn, "select effective_limit from taskq.cohorts where name = 'unlimited'") is None


def test_more_cohorts_than_a_claim_looks_at_take_turns(conn: Conn) -> None:
    for n in range(230):
        limit(conn, int(n == 225), f"c{n:03}")
        enqueue(conn, cohort=f"c{n:03}")
    worker = register(conn)
    found = [claimed(conn, worker) for _ in range(4)]
    assert [len(each) for each in found] == [0, 0, 1, 0]
    assert get(conn, found[2][0])["cohort"] == "c225"


def test_whoever_enqueues_the_cohort_of_the_policy_counts(conn: Conn) -> None:
    policy(conn, "in-a", cohort="a")
    conn.execute("select taskq.publish_task(null, 't', 'q', 5, 3, 'pure', 'in-a')")
    limit(conn, 1)
    by_hand: UUID = one(conn, "select taskq.enqueue('t')")
    assert get(conn, by_hand)["cohort"] == get(conn, enqueue(conn, policy_id="in-a"))["cohort"] == "a"
    assert {get(conn, row["job_id"])["cohort"] for row in enqueue_many(conn, 2, policy_id="in-a")} == {"a"}
    assert len(claimed(conn, register(conn))) == 1


def test_a_reopened_job_is_of_its_cohort_still(conn: Conn) -> None:
    limit(conn, 1)
    first, second = many(conn, 2)
    worker = register(conn)
    assert claimed(conn, worker) == [first]
    assert end(conn, worker, End(first, outcome="failed")) == 1
    assert get(conn, first)["cohort"] == "a"
    assert claimed(conn, worker) == [second]
    assert retry(conn, first) == "reopened"
    assert claimed(conn, worker) == []
    assert cancel(conn, first) == "cancelled"
    assert get(conn, first)["cohort"] == "a"


def test_many_that_are_ended_at_once_are_of_their_cohort_still(conn: Conn) -> None:
    jobs = many(conn, 2)
    conn.execute("select taskq.finish_many(%s, 'cancelled', '{}')", (jobs,))
    assert {get(conn, job)["cohort"] for job in jobs} == {"a"}


def test_an_ordering_key_gives_the_turn_and_the_cohort_the_slot(conn: Conn) -> None:
    limit(conn, 1)
    line = [enqueue(conn, cohort="a", ordering_key="k") for _ in range(2)]
    [beside] = many(conn, 1)
    worker = register(conn)
    assert claimed(conn, worker) == [line[0]]
    assert end(conn, worker, End(line[0])) == 1
    assert (status(conn, line[1]), status(conn, beside)) == ("pending", "pending")
    assert claimed(conn, worker) == [beside]
    assert end(conn, worker, End(beside)) == 1
    assert claimed(conn, worker) == [line[1]]


def test_suspects_obey_the_limit_and_others_are_claimed_around_them(conn: Conn) -> None:
    limit(conn, 1)
    first, second = many(conn, 2)
    plain = enqueue(conn)
    conn.execute("update taskq.jobs set recoveries = 2 where id <> %s", (first,))
    busy, idle, third = register(conn), register(conn), register(conn)
    assert claimed(conn, busy) == [first]
    ask = "select job_id from taskq.claim_suspect(%s, '{t}', '{q}')"
    seen = "select coalesce(sum(n), 0) from taskq.survey('{q}', '{t}') where kind = 'suspect'"
    assert one(conn, seen) == 1
    assert [row["job_id"] for row in rows(conn, ask, idle)] == [plain]
    assert rows(conn, ask, third) == []
    assert one(conn, seen) == 0
    assert end(conn, busy, End(first)) == 1
    assert one(conn, seen) == 1
    assert [row["job_id"] for row in rows(conn, ask, third)] == [second]
    conn.execute("delete from taskq.jobs")


def test_a_worker_hears_of_unknown_tasks_in_cohorts(conn: Conn) -> None:
    limit(conn, 0)
    many(conn, 2, task="strange")
    assert rows(conn, "select * from taskq.survey('{q}', '{t}')") == [
        {"kind": "unknown_task", "name": "strange", "n": 2}
    ]


def test_the_database_refuses_a_claim_over_the_limit_whatever_it_says(conn: Conn) -> None:
    limit(conn, 2)
    jobs = many(conn, 4)
    worker = register(conn)
    by_hand = (
        "update taskq.jobs set status = 'running', claim_epoch = claim_epoch + 1, claimed_by = %s, claimed_at = now()"
        " where id = any(%s)"
    )
    assert refused(conn, by_hand, worker, jobs[:3]) == "WF027"
    assert refused(conn, by_hand, worker, jobs[:2]) == ""
    assert len(claimed(conn, worker)) == 2
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        conn.execute(by_hand, (worker, [jobs[2]]))
    assert caught.value.sqlstate == "WF027"
    assert detail(caught.value) == {"job_id": str(jobs[2]), "cohort": "a", "limit": 2}


# Who says what the limit is -------------------------------------------------------------------------------------------


def limits(conn: Conn, cohort: str = "a") -> tuple[Any, ...]:
    [row] = rows(conn, "select * from taskq.cohorts where name = %s", cohort)
    return row["effective_limit"], row["code_limit"], row["operator_limit"]


def publish(conn: Conn, **of: int) -> list[tuple[Any, ...]]:
    found = rows(conn, "select * from taskq.publish_limits(%s, %s)", list(of), list(of.values()))
    return [tuple(row.values()) for row in found]


def test_the_first_word_of_an_enqueue_counts_and_a_worker_changes_it(conn: Conn) -> None:
    limit(conn, 4)
    limit(conn, 5)
    assert limits(conn) == (4, 4, None)
    assert publish(conn, b=1, a=7) == [("a", 4, 7, None), ("b", 1, 1, None)]
    assert limits(conn) == (7, 7, None)
    assert publish(conn, a=7) == [("a", 7, 7, None)]


def test_an_operators_limit_wins_and_code_does_not_overwrite_it(conn: Conn) -> None:
    limit(conn, 4)
    assert one(conn, "select taskq.set_limit('a', 1, 'provider is slow', 'me')") == "set"
    assert publish(conn, a=9) == [("a", 4, 9, 1)]
    assert limits(conn) == (1, 9, 1)
    many(conn, 3)
    worker = register(conn)
    assert len(claimed(conn, worker)) == 1
    assert one(conn, "select taskq.clear_limit('a', 'it is well again', 'me')") == "cleared"
    assert one(conn, "select taskq.clear_limit('a', 'again')") == "not_set"
    assert limits(conn) == (9, 9, None)
    assert len(claimed(conn, worker)) == 2
    found = rows(conn, "select actor, action, subject, reason, details from taskq.audit order by at")
    assert [tuple(row.values()) for row in found] == [
        ("me", "set_limit", "a", "provider is slow", {"limit": 1, "was": None, "code_limit": 4}),
        ("me", "clear_limit", "a", "it is well again", {"was": 1, "code_limit": 9}),
    ]
    [row] = rows(conn, "select set_by, reason from taskq.cohorts")
    assert row == {"set_by": "me", "reason": "it is well again"}


def test_an_operator_may_be_first_and_code_still_has_its_word(conn: Conn) -> None:
    assert one(conn, "select taskq.set_limit('a', 2, 'before the deploy')") == "new"
    limit(conn, 5)
    assert limits(conn) == (2, 5, 2)
    assert one(conn, "select taskq.clear_limit('a', 'deployed')") == "cleared"
    assert limits(conn) == (5, 5, None)


def test_a_lowered_limit_lets_what_runs_go_on_and_nobody_more(conn: Conn) -> None:
    limit(conn, 3)
    jobs = many(conn, 5)
    worker = register(conn)
    assert claimed(conn, worker) == jobs[:3]
    conn.execute("select taskq.set_limit('a', 1, 'slow down')")
    for job in jobs[:2]:
        assert claimed(conn, worker) == []
        assert end(conn, worker, End(job)) == 1
    assert claimed(conn, worker) == []
    assert end(conn, worker, End(jobs[2])) == 1
    assert claimed(conn, worker) == [jobs[3]]


def test_names_limits_and_reasons_are_checked(conn: Conn) -> None:
    for call in (
        "taskq.ensure_limit('a b', 1)",
        "taskq.ensure_limit(null, 1)",
        "taskq.ensure_limit('a', -1)",
        "taskq.ensure_limit('a', null)",
        "taskq.publish_limits('{a}', '{-1}')",
        "taskq.set_limit('a', 1)",
        "taskq.set_limit('a', 1, ' ')",
        "taskq.set_limit('a', null, 'r')",
        "taskq.set_limit('', 1, 'r')",
        "taskq.clear_limit('nobody', 'r')",
        "taskq.clear_limit('a', '')",
    ):
        assert refused(conn, f"select {call}") == "WF009", call
    spec = f"""[{{"task": "t", "queue": "q", "effect_class": "pure", "policy_id": "{POLICY}", "cohort": "a b"}}]"""
    assert refused(conn, "select taskq.enqueue_many(%s, '{1}', array['{}'])", spec) == "WF009"


def test_the_view_says_what_runs_and_what_waits(conn: Conn) -> None:
    limit(conn, 2)
    many(conn, 5)
    enqueue(conn, cohort="a", run_in=60)
    claimed(conn, register(conn))
    [row] = rows(conn, "select name, running, waiting, effective_limit from taskq.cohorts")
    assert row == {"name": "a", "running": 2, "waiting": 3, "effective_limit": 2}


def test_a_claim_without_any_cohort_looks_for_none(conn: Conn) -> None:
    plain = many(conn, 2, None)
    assert rows(conn, "select * from taskq.limits") == []
    assert [row["job_id"] for row in claim(conn, register(conn))] == plain

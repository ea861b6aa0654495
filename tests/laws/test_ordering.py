"""Ordering keys: one job of a key at a time, in order; what halts a key, and what lets it go on."""

from __future__ import annotations

from hashlib import sha256
from typing import Any
from uuid import UUID

import psycopg
import pytest
from ordering_kit import claimed, halts, ordered, rechecks, resume, states, sweep
from sql import (
    End,
    cancel,
    claim_one,
    control_clock,
    detail,
    end,
    enqueue,
    enqueue_many,
    lose,
    one,
    policy,
    refused,
    register,
    resolve,
    retry,
    rows,
    settle,
    shift_clock,
    stop_clock,
    violations,
)

Conn = psycopg.Connection[Any]
EITHER = pytest.mark.parametrize("halt", [True, False], ids=["halt", "continue"])


@pytest.fixture(autouse=True)
def lawful(conn: Conn) -> Any:
    yield
    if conn.info.transaction_status != psycopg.pq.TransactionStatus.INERROR:
        assert violations(conn) == []


# The line -------------------------------------------------------------------------------------------------------------


@EITHER
def test_jobs_of_one_key_run_one_at_a_time_in_order(conn: Conn, halt: bool) -> None:
    worker = register(conn)
    jobs = ordered(conn, 4, halt=halt)
    other = enqueue(conn, ordering_key="other")
    plain = enqueue(conn)
    assert states(conn, jobs) == ["pending", "ordering", "ordering", "ordering"]
    assert set(claimed(conn, worker)) == {jobs[0], other, plain}
    for job, after in zip(jobs, [*jobs[1:], None], strict=True):
        assert claimed(conn, worker) == []
        assert end(conn, worker, End(job)) == 1
        if after:
            assert claimed(conn, worker) == [after]


def test_one_key_orders_jobs_across_tasks_and_queues(conn: Conn) -> None:
    worker = register(conn, queues=["q", "r"], tasks=["t", "u"])
    first = enqueue(conn, ordering_key="k")
    second = enqueue(conn, ordering_key="k", task="u", queue="r", priority=9)
    lanes = {"tasks": ["t", "u"], "lanes": [("r", 9), ("q", 5)]}
    assert claimed(conn, worker, **lanes) == [first]
    end(conn, worker, End(first))
    assert claimed(conn, worker, **lanes) == [second]


def test_a_batch_is_in_line_in_its_own_order(conn: Conn) -> None:
    worker = register(conn)
    keys = ["a", None, "b", "a", "b", "a"]
    ids = [row["job_id"] for row in enqueue_many(conn, 6, ordering_keys=keys)]
    assert states(conn, ids) == ["pending", "pending", "pending", "ordering", "ordering", "ordering"]
    seen: list[UUID] = []
    while took := claimed(conn, worker):
        seen += took
        end(conn, worker, *[End(job) for job in took])
    assert [job for job in seen if job in (ids[0], ids[3], ids[5])] == [ids[0], ids[3], ids[5]]
    assert [job for job in seen if job in (ids[2], ids[4])] == [ids[2], ids[4]]


def test_the_place_does_not_depend_on_the_clock(conn: Conn) -> None:
    conn.execute(
        "create or replace function taskq.new_id() returns uuid language sql as"
        " $$ select case when random() < 0.5 then '01900000-0000-7000-bfff-ffffffffff00'::uuid"
        " else overlay(gen_random_uuid()::text placing '01800000-0000-7' from 1 for 15)::uuid end $$"
    )
    batch = [row["job_id"] for row in enqueue_many(conn, 5, ordering_keys=["k"] * 5)]
    jobs = batch + [enqueue(conn, ordering_key="k") for _ in range(5)]
    assert jobs == sorted(jobs)
    assert len(set(jobs)) == 10


def test_a_whole_line_is_promoted_behind_what_a_worker_has_claimed_before(conn: Conn) -> None:
    """A turn that is given makes the job due now: below its low-water mark a worker would not look."""
    worker = register(conn)
    [first, second] = ordered(conn, 2)
    row = claim_one(conn, worker)
    end(conn, worker, End(first))
    assert claimed(conn, worker, mark=(row["claimed_at"], row["job_id"])) == [second]


LONG = "".join(sha256(bytes([n])).hexdigest() for n in range(250))
"""Longer than what an index can hold: refused before the key is taken."""


@pytest.mark.parametrize("key", ["", "x" * 513, LONG], ids=["empty", "513", "16000"])
def test_a_key_has_1_to_512_characters(conn: Conn, key: str) -> None:
    policy(conn)
    spec = '[{"task": "t", "queue": "q", "max_attempts": 1, "effect_class": "pure", "policy_id": "p"}]'
    call = "select * from taskq.enqueue_many(%s, '{1}', '{\"{}\"}', p_ordering_key => %s)"
    assert refused(conn, call, spec, [key]) == "WF009"
    insert = "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload, ordering_key)"
    assert refused(conn, f"{insert} values (now(), now(), 1, 'q', 't', 'p', '{{}}', %s)", key) == "WF009"
    assert refused(conn, call, spec, ["x" * 512]) == ""


def test_a_key_for_each_job_or_none(conn: Conn) -> None:
    policy(conn)
    spec = '[{"task": "t", "queue": "q", "max_attempts": 1, "effect_class": "pure", "policy_id": "p"}]'
    call = "select * from taskq.enqueue_many(%s, '{1}', '{\"{}\"}', p_ordering_key => %s)"
    for keys in (["a", "b"], [["a"]]):
        assert refused(conn, call, spec, keys) == "WF009"


def test_a_key_that_was_answered_with_a_job_leaves_no_job_in_line(conn: Conn) -> None:
    [first] = enqueue_many(conn, unique=["u"], ordering_keys=["k"])
    [again] = enqueue_many(conn, unique=["u"], ordering_keys=["k"])
    [repeated] = enqueue_many(conn, idempotency=["i"], ordering_keys=["l"])
    [same] = enqueue_many(conn, idempotency=["i"], ordering_keys=["l"])
    assert (first["job_id"], repeated["job_id"]) == (again["job_id"], same["job_id"])
    assert [row["waiting"] for row in rows(conn, "select waiting from taskq.ordering_lines")] == [0, 0]


def test_enqueue_in_sql_takes_a_key_and_the_policys_word(conn: Conn) -> None:
    policy(conn, "h", ordering="halt", queue="q")
    jobs = [one(conn, "select taskq.enqueue('t', policy => 'h', ordering_key => 'k')") for _ in range(2)]
    assert states(conn, jobs) == ["pending", "ordering"]
    assert rows(conn, "select distinct ordering_halt from taskq.jobs") == [{"ordering_halt": True}]


@pytest.mark.parametrize(
    ("spec", "effect_class", "expected"),
    [
        ({}, "idempotent", False),
        ({}, "side_effecting", True),
        ({"ordering": "halt"}, "pure", True),
        ({"ordering": "continue"}, "side_effecting", False),
    ],
)
def test_side_effecting_tasks_halt_where_the_policy_says_nothing(
    conn: Conn, spec: dict[str, str], effect_class: str, expected: bool
) -> None:
    policy(conn, "x", **spec)
    assert one(conn, "select taskq.halts_ordering('x', %s)", effect_class) is expected
    insert = (
        "insert into taskq.jobs (run_at, created_at, max_attempts, queue, task, policy_id, payload, ordering_key,"
        " effect_class, required_worker_schema)"
        " values (now(), now(), 1, 'q', 't', 'x', '{}', 'k', %s, 2) returning ordering_halt"
    )
    assert one(conn, insert, effect_class) is expected


def test_the_policys_word_comes_with_the_request_where_its_row_cannot_be_seen(conn: Conn) -> None:
    """A caller above READ COMMITTED does not see a policy that was stored after it began."""
    job = enqueue(conn, ordering_key="k", policy_id="not-to-be-seen", ordering="halt")
    assert one(conn, "update taskq.jobs set policy_id = 'p' where id = %s returning ordering_halt", job) is True


def test_the_database_is_the_arbiter(conn: Conn) -> None:
    """Whatever a client does by hand, two jobs of one key have no turn at once."""
    [_, second] = ordered(conn, 2)
    give = "update taskq.jobs set status = 'pending', held_reason = null where id = %s"
    assert refused(conn, give, second) == "23505"


def test_a_job_without_a_key_runs_no_code_of_lines(conn: Conn) -> None:
    worker = register(conn)
    for body in ("join_line", "come_back_in_line", "look_at_line", "leave_line", "give_turn"):
        kind = "text" if body == "give_turn" else "trigger"
        args = "p_key text" if body == "give_turn" else ""
        conn.execute(
            f"create or replace function taskq.{body}({args}) returns {kind} language plpgsql as"
            " $$ begin raise exception 'called'; end $$"
        )
    jobs = [enqueue(conn) for _ in range(4)]
    for row in rows(conn, "select taskq.cancel(%s)", jobs[3]):
        assert row["cancel"] == "cancelled"
    assert len(claimed(conn, worker)) == 3
    assert end(conn, worker, End(jobs[0]), End(jobs[1], outcome="retry"), End(jobs[2], outcome="failed")) == 3
    assert retry(conn, jobs[2]) == "reopened"
    with pytest.raises(psycopg.errors.RaiseException, match="called"):
        enqueue(conn, ordering_key="k")


# Failing --------------------------------------------------------------------------------------------------------------


def test_under_continue_a_failure_lets_the_next_go_on(conn: Conn) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome="failed"))
    assert states(conn, [first, second]) == ["failed", "pending"]
    assert halts(conn) == []


def test_under_halt_a_failure_holds_the_rest_until_the_key_is_resumed(conn: Conn) -> None:
    worker = register(conn)
    [first, second, third] = ordered(conn, 3, halt=True)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome="failed"))
    [late] = ordered(conn, 1, halt=True)
    assert states(conn, [first, second, third, late]) == ["failed", "ordering", "ordering", "ordering"]
    assert halts(conn) == [("k", first)]
    [line] = rows(conn, "select * from taskq.ordering_lines")
    assert (line["job_id"], line["waiting"], line["first_waiting"], line["halted_by"]) == (None, 3, second, first)
    assert resume(conn) == "resumed"
    assert states(conn, [first, second, third, late]) == ["failed", "pending", "ordering", "ordering"]
    assert resume(conn) == "not_halted"
    [noted] = rows(conn, "select * from taskq.audit where action = 'resume_ordering'")
    assert (noted["subject"], noted["reason"]) == ("k", "looked into it")
    assert noted["details"]["halted_by"][0]["job_id"] == str(first)


@pytest.mark.parametrize("reason", [None, "  "])
def test_resuming_needs_a_reason(conn: Conn, reason: str | None) -> None:
    assert refused(conn, "select taskq.resume_ordering('k', %s)", reason) == "WF009"


@pytest.mark.parametrize("outcome", ["succeeded", "cancelled", "failed"])
def test_a_failed_job_that_is_reopened_goes_first_and_decides_anew(conn: Conn, outcome: str) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2, halt=True)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome="failed"))
    assert retry(conn, first) == "reopened"
    assert halts(conn) == []
    assert states(conn, [first, second]) == ["pending", "ordering"]
    assert claimed(conn, worker) == [first]
    if outcome == "cancelled":
        cancel(conn, first)
    end(conn, worker, End(first, 2, outcome))
    assert states(conn, [first, second]) == [outcome, "ordering" if outcome == "failed" else "pending"]


def test_a_failure_halts_only_what_is_behind_it(conn: Conn) -> None:
    worker = register(conn)
    [first, second, third] = ordered(conn, 3, halt=True)
    cancel(conn, first)
    assert claimed(conn, worker) == [second]
    end(conn, worker, End(second, outcome="failed"))
    assert retry(conn, first) == "reopened"
    assert claimed(conn, worker) == [first]
    end(conn, worker, End(first, 1, outcome="succeeded"))
    assert states(conn, [first, second, third]) == ["succeeded", "failed", "ordering"]


def test_a_job_that_is_reopened_beside_a_running_one_waits_for_it(conn: Conn) -> None:
    worker = register(conn)
    [first, second, third] = ordered(conn, 3)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome="failed"))
    assert claimed(conn, worker) == [second]
    retry(conn, first)
    assert states(conn, [first, second, third]) == ["ordering", "running", "ordering"]
    end(conn, worker, End(second))
    assert claimed(conn, worker) == [first]


@EITHER
def test_what_expires_in_line_lets_the_next_go_on(conn: Conn, halt: bool) -> None:
    """It has left nothing half done: it never started."""
    worker = register(conn)
    [first, second, third] = ordered(conn, 3, halt=halt)
    conn.execute("update taskq.jobs set deadline = now() - interval '1 s' where id = any(%s)", ([first, second],))
    assert {row["job_id"] for row in rows(conn, "select * from taskq.sweep()")} == {first, second}
    assert states(conn, [first, second, third]) == ["failed", "failed", "pending"]
    assert claimed(conn, worker) == [third]


def test_what_expires_after_it_has_started_once_halts_the_key(conn: Conn) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2, halt=True)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome="retry", delay=60))
    conn.execute("update taskq.jobs set deadline = now() - interval '1 s' where id = %s", (first,))
    assert len(rows(conn, "select * from taskq.sweep()")) == 1
    assert states(conn, [first, second]) == ["failed", "ordering"]
    assert halts(conn) == [("k", first)]


def test_what_expires_after_it_was_reopened_halts_the_key_again(conn: Conn) -> None:
    """It has been started, in an earlier generation: its counters say nothing of that."""
    worker = register(conn)
    [first, second] = ordered(conn, 2, halt=True)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome="failed"))
    retry(conn, first)
    conn.execute("update taskq.jobs set deadline = now() - interval '1 s' where id = %s", (first,))
    assert len(rows(conn, "select * from taskq.sweep()")) == 1
    assert states(conn, [first, second]) == ["failed", "ordering"]
    assert halts(conn) == [("k", first)]


def test_the_leader_is_told_to_sweep_for_a_reopened_job_whose_key_was_pruned(conn: Conn) -> None:
    worker = register(conn)
    [job] = ordered(conn, 1, halt=True)
    claimed(conn, worker)
    end(conn, worker, End(job, outcome="failed"))
    conn.execute("delete from taskq.ordering_keys")
    retry(conn, job)
    look = "select name from taskq.look(%s, 30, null, '{q}', '{t}') where kind = 'duty'"
    assert [row["name"] for row in rows(conn, look, worker)] == ["sweep_orderings"]
    rows(conn, "select taskq.sweep_orderings()")
    assert states(conn, [job]) == ["pending"]


# Waiting for a time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["retry", "retry_after", "snooze"])
def test_under_halt_a_job_that_waits_for_its_time_keeps_the_turn(conn: Conn, outcome: str) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2, halt=True)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome=outcome, delay=60))
    assert states(conn, [first, second]) == ["pending", "ordering"]
    assert claimed(conn, worker) == []


def test_under_halt_it_keeps_the_turn_also_before_one_that_was_reopened(conn: Conn) -> None:
    worker = register(conn)
    [reopened, first] = ordered(conn, 2, halt=True)
    cancel(conn, reopened)
    assert claimed(conn, worker) == [first]
    assert retry(conn, reopened) == "reopened"
    end(conn, worker, End(first, outcome="retry", delay=60))
    assert states(conn, [reopened, first]) == ["ordering", "pending"]


@pytest.mark.parametrize("outcome", ["retry", "retry_after", "snooze"])
def test_under_continue_it_lets_others_go_on_and_comes_back_first(conn: Conn, outcome: str) -> None:
    control_clock(conn)
    worker = register(conn, lease=10000)
    [first, second, third] = ordered(conn, 3)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome=outcome, delay=60))
    assert states(conn, [first, second, third]) == ["ordering", "pending", "ordering"]
    assert claimed(conn, worker) == [second]
    assert sweep(conn) == 0
    shift_clock(conn, "61 s")
    # Due again, it waits until the other has ended; then it is first.
    assert sweep(conn) == 0
    assert rechecks(conn) == []
    assert states(conn, [first, second, third]) == ["ordering", "running", "ordering"]
    end(conn, worker, End(second))
    assert states(conn, [first, second, third]) == ["pending", "succeeded", "ordering"]


def test_under_continue_the_sweep_finds_the_last_one_when_it_is_due(conn: Conn) -> None:
    control_clock(conn)
    worker = register(conn, lease=10000)
    [only] = ordered(conn, 1)
    claimed(conn, worker)
    end(conn, worker, End(only, outcome="snooze", delay=60))
    shift_clock(conn, "59 s")
    assert sweep(conn) == 0
    shift_clock(conn, "2 s")
    assert sweep(conn) == 1
    assert claimed(conn, worker) == [only]


@EITHER
def test_a_repetition_at_once_keeps_the_turn(conn: Conn, halt: bool) -> None:
    control_clock(conn)
    worker = register(conn)
    stop_clock(conn)
    jobs = ordered(conn, 2, halt=halt)
    claimed(conn, worker)
    end(conn, worker, End(jobs[0], outcome="release"))
    assert states(conn, jobs) == ["pending", "ordering"]
    claimed(conn, worker)
    end(conn, worker, End(jobs[0], 2, outcome="retry", delay=0))
    assert states(conn, jobs) == ["pending", "ordering"]


@EITHER
def test_a_job_that_is_enqueued_for_later(conn: Conn, halt: bool) -> None:
    control_clock(conn)
    [later] = ordered(conn, 1, halt=halt, run_in=60)
    [now] = ordered(conn, 1, halt=halt)
    assert states(conn, [later, now]) == (["pending", "ordering"] if halt else ["ordering", "pending"])
    if not halt:
        cancel(conn, now)
        shift_clock(conn, "61 s")
        assert sweep(conn) == 1
        assert states(conn, [later]) == ["pending"]


def test_an_operator_makes_one_due_that_waits_for_its_time_in_line(conn: Conn) -> None:
    [later] = ordered(conn, 1, run_in=3600)
    assert retry(conn, later) == "due"
    assert states(conn, [later]) == ["pending"]


# Lost and unknown -----------------------------------------------------------------------------------------------------


@EITHER
def test_a_job_of_a_lost_worker_keeps_the_turn(conn: Conn, halt: bool) -> None:
    jobs = ordered(conn, 2, halt=halt)
    for _ in range(2):
        worker = register(conn)
        assert claimed(conn, worker) == [jobs[0]]
        lose(conn, worker)
        assert settle(conn) == {jobs[0]: "pending"}
    # Twice lost, it is claimed alone; the key waits for that.
    worker = register(conn)
    assert claimed(conn, worker) == []
    assert rows(conn, "select job_id from taskq.claim_suspect(%s, '{t}', '{q}')", worker) == [{"job_id": jobs[0]}]
    assert states(conn, jobs) == ["running", "ordering"]


@EITHER
def test_a_job_that_is_lost_too_often_ends_and_its_key_goes_on_or_is_halted(conn: Conn, halt: bool) -> None:
    named = policy(conn, "never lost", max_recoveries=0, ordering="halt" if halt else "continue")
    jobs = [enqueue(conn, ordering_key="k", policy_id=named) for _ in range(2)]
    worker = register(conn)
    assert claimed(conn, worker) == [jobs[0]]
    lose(conn, worker)
    assert settle(conn) == {jobs[0]: "failed"}
    assert states(conn, jobs) == ["failed", "ordering" if halt else "pending"]
    assert halts(conn) == ([("k", jobs[0])] if halt else [])


def become_unknown(conn: Conn, *, halt: bool) -> tuple[UUID, list[UUID]]:
    worker = register(conn)
    jobs = ordered(conn, 3, halt=halt)
    assert claimed(conn, worker) == [jobs[0]]
    cancel(conn, jobs[0])
    lose(conn, worker)
    assert settle(conn) == {jobs[0]: "unknown"}
    return worker, jobs


def test_under_halt_an_unknown_outcome_holds_the_rest(conn: Conn) -> None:
    _, jobs = become_unknown(conn, halt=True)
    assert states(conn, jobs) == ["unknown", "ordering", "ordering"]
    with pytest.raises(psycopg.Error) as caught, conn.transaction():
        resume(conn)
    assert (caught.value.sqlstate, detail(caught.value)["job_id"]) == ("WF012", str(jobs[0]))
    give = "update taskq.jobs set status = 'pending', held_reason = null where id = %s"
    assert refused(conn, give, jobs[1]) == "23505"


def test_under_continue_an_unknown_outcome_lets_the_next_go_on(conn: Conn) -> None:
    _, jobs = become_unknown(conn, halt=False)
    assert states(conn, jobs) == ["unknown", "pending", "ordering"]


@pytest.mark.parametrize("happened", [True, False])
def test_deciding_an_unknown_outcome_lets_the_key_go_on(conn: Conn, happened: bool) -> None:
    _, jobs = become_unknown(conn, halt=True)
    conn.execute("update taskq.jobs set cancel_requested_at = null")
    assert resolve(conn, jobs[0], happened) == ("succeeded" if happened else "pending")
    expected = ["succeeded", "pending", "ordering"] if happened else ["pending", "ordering", "ordering"]
    assert states(conn, jobs) == expected


@pytest.mark.parametrize(
    ("outcome", "state"), [("succeeded", "succeeded"), ("failed", "failed"), ("retry", "ordering")]
)
def test_a_late_end_under_continue_runs_beside_nobody(conn: Conn, outcome: str, state: str) -> None:
    lost, jobs = become_unknown(conn, halt=False)
    worker = register(conn)
    assert claimed(conn, worker) == [jobs[1]]
    conn.execute("update taskq.jobs set cancel_requested_at = null")
    assert end(conn, lost, End(jobs[0], outcome=outcome)) == 1
    assert states(conn, jobs) == [state, "running", "ordering"]
    end(conn, worker, End(jobs[1]))
    assert claimed(conn, worker) == [jobs[0] if outcome == "retry" else jobs[2]]


@pytest.mark.parametrize(("outcome", "state"), [("succeeded", "pending"), ("failed", "ordering")])
def test_a_late_end_under_halt_decides_for_the_key(conn: Conn, outcome: str, state: str) -> None:
    lost, jobs = become_unknown(conn, halt=True)
    conn.execute("update taskq.jobs set cancel_requested_at = null")
    end(conn, lost, End(jobs[0], outcome=outcome))
    assert states(conn, jobs) == [outcome, state, "ordering"]


def test_a_late_end_under_continue_takes_the_free_turn_at_once(conn: Conn) -> None:
    lost, jobs = become_unknown(conn, halt=False)
    for job in jobs[1:]:
        cancel(conn, job)
    conn.execute("update taskq.jobs set cancel_requested_at = null")
    end(conn, lost, End(jobs[0], outcome="release"))
    assert states(conn, jobs) == ["pending", "cancelled", "cancelled"]


# Cancelling, and other reasons to wait --------------------------------------------------------------------------------


@EITHER
def test_a_cancelled_job_lets_the_next_go_on(conn: Conn, halt: bool) -> None:
    worker = register(conn)
    jobs = ordered(conn, 4, halt=halt)
    assert cancel(conn, jobs[1]) == "cancelled"
    assert cancel(conn, jobs[0]) == "cancelled"
    assert states(conn, jobs) == ["cancelled", "cancelled", "pending", "ordering"]
    assert claimed(conn, worker) == [jobs[2]]
    assert cancel(conn, jobs[2]) == "requested"
    end(conn, worker, End(jobs[2], outcome="failed"))
    assert states(conn, jobs) == ["cancelled", "cancelled", "cancelled", "pending"]


def test_a_whole_line_is_cancelled_in_one_batch(conn: Conn) -> None:
    jobs = ordered(conn, 3) + ordered(conn, 1, key="other")
    answers = rows(conn, "select * from taskq.steer_many('cancel', %s)", jobs)
    assert {row["answer"] for row in answers} == {"cancelled"}
    assert states(conn, jobs) == ["cancelled"] * 4


def test_one_that_waits_for_something_else_keeps_its_place(conn: Conn) -> None:
    [first, second, third] = ordered(conn, 3)
    conn.execute("update taskq.jobs set status = 'held', held_reason = 'signal' where id = %s", (first,))
    assert states(conn, [first, second, third]) == ["signal", "ordering", "ordering"]
    conn.execute("update taskq.jobs set status = 'pending', held_reason = null where id = %s", (first,))
    assert states(conn, [first, second, third]) == ["pending", "ordering", "ordering"]


def test_one_that_waited_for_something_else_comes_back_to_its_line(conn: Conn) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2)
    assert claimed(conn, worker) == [first]
    conn.execute("update taskq.jobs set held_reason = 'signal' where id = %s", (second,))
    conn.execute("update taskq.jobs set status = 'pending', held_reason = null where id = %s", (second,))
    assert states(conn, [first, second]) == ["running", "ordering"]


def test_a_paused_queue_holds_up_the_keys_whose_turn_is_there(conn: Conn) -> None:
    worker = register(conn, queues=["q", "r"])
    first = enqueue(conn, ordering_key="k")
    second = enqueue(conn, ordering_key="k", queue="r")
    conn.execute("select taskq.pause_queue('q')")
    assert claimed(conn, worker, lanes=[("q", 5), ("r", 5)]) == []
    conn.execute("select taskq.resume_queue('q')")
    assert claimed(conn, worker, lanes=[("q", 5), ("r", 5)]) == [first]
    assert states(conn, [second]) == ["ordering"]


# The clock ------------------------------------------------------------------------------------------------------------


def step_back(conn: Conn) -> None:
    """Ids are made by a clock of years ago."""
    conn.execute(
        "create or replace function taskq.new_id() returns uuid language sql as"
        " $$ select overlay(gen_random_uuid()::text placing '01800000-0000-7' from 1 for 15)::uuid $$"
    )


def test_a_halted_key_stays_halted_where_the_clock_has_stepped_back(conn: Conn) -> None:
    worker = register(conn)
    first, second = ordered(conn, 2, halt=True)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome="failed"))
    cancel(conn, second)
    step_back(conn)
    late = ordered(conn, 2, halt=True)
    assert [first, *late] == sorted([first, *late])
    assert states(conn, late) == ["ordering", "ordering"]
    assert claimed(conn, worker) == []
    assert resume(conn) == "resumed"
    assert states(conn, late) == ["pending", "ordering"]


def test_what_was_due_when_it_was_enqueued_keeps_its_place_where_the_clock_steps_back(conn: Conn) -> None:
    control_clock(conn)
    worker = register(conn, lease=100_000)
    [first, second] = ordered(conn, 2)
    claimed(conn, worker)
    shift_clock(conn, "-1 hour")
    end(conn, worker, End(first))
    assert states(conn, [second]) == ["pending"]


def test_what_is_due_when_it_is_enqueued_has_its_place_while_the_clock_steps_back(conn: Conn) -> None:
    conn.execute("create sequence public.steps")
    conn.execute(
        "create or replace function taskq.now() returns timestamptz language sql volatile"
        " as $$ select clock_timestamp() - nextval('public.steps') * interval '1 s' $$"
    )
    assert states(conn, ordered(conn, 2)) == ["pending", "ordering"]


# Sweeping -------------------------------------------------------------------------------------------------------------


def test_jobs_that_come_due_together_have_their_turns_in_the_order_of_their_places(conn: Conn) -> None:
    control_clock(conn)
    worker = register(conn, lease=100_000)
    jobs = [ordered(conn, 1, run_in=delay)[0] for delay in (90, 60, 30)]
    [behind] = ordered(conn, 1)
    assert claimed(conn, worker) == [behind]
    shift_clock(conn, "2 min")
    assert sweep(conn) == 0
    end(conn, worker, End(behind))
    for job in jobs:
        assert claimed(conn, worker) == [job]
        end(conn, worker, End(job))


def test_an_end_leaves_it_to_the_sweep_to_put_many_into_line(conn: Conn) -> None:
    control_clock(conn)
    worker = register(conn, lease=100_000)
    jobs = [row["job_id"] for row in enqueue_many(conn, 150, ordering_keys=["k"] * 150, run_in=60)]
    [running] = ordered(conn, 1)
    assert claimed(conn, worker) == [running]
    shift_clock(conn, "2 min")
    conn.execute("delete from taskq.ordering_rechecks")
    end(conn, worker, End(running))
    assert states(conn, jobs) == ["ordering"] * 150
    assert rechecks(conn) == ["k"]
    assert sweep(conn) == 1
    assert states(conn, jobs) == ["pending"] + ["ordering"] * 149


def test_a_sweep_gives_the_turns_of_many_keys_in_one_go(conn: Conn) -> None:
    worker = register(conn, concurrency=100)
    keys = [f"k{n}" for n in range(20)]
    lines = {key: ordered(conn, 2, key=key) for key in keys}
    halted = ordered(conn, 2, key="halted", halt=True)
    taken = ordered(conn, 2, key="taken")
    conn.execute("select set_config('session_replication_role', 'replica', false)")
    for key in keys:
        conn.execute("delete from taskq.jobs where id = %s", (lines[key][0],))
    conn.execute("delete from taskq.jobs where id = %s", (halted[0],))
    conn.execute("insert into taskq.ordering_halts values ('halted', %s, now())", (halted[0],))
    conn.execute(
        "insert into taskq.ordering_rechecks select key, now() from taskq.ordering_keys, generate_series(1, 3)"
    )
    conn.execute("select set_config('session_replication_role', 'origin', false)")
    assert sweep(conn) == 20
    assert rechecks(conn) == []
    assert states(conn, [lines[key][1] for key in keys]) == ["pending"] * 20
    assert states(conn, [halted[1], *taken]) == ["ordering", "pending", "ordering"]
    assert len(claimed(conn, worker, limit=100)) == 21
    assert sweep(conn) == 0


def test_a_sweep_takes_no_more_than_it_was_told_to(conn: Conn) -> None:
    for n in range(5):
        ordered(conn, 1, key=f"k{n}")
    conn.execute("insert into taskq.ordering_rechecks select key, now() from taskq.ordering_keys")
    assert rows(conn, "select taskq.sweep_orderings(2)") == [{"sweep_orderings": 0}]
    assert len(rechecks(conn)) == 3


# Keeping house --------------------------------------------------------------------------------------------------------


def test_keys_without_jobs_are_forgotten_after_a_while_but_halts_are_not(conn: Conn) -> None:
    control_clock(conn)
    worker = register(conn, lease=100000)
    ordered(conn, 1, key="waits", run_in=36000)
    [done] = ordered(conn, 1, key="done")
    [failed] = ordered(conn, 1, key="failed", halt=True)
    assert len(claimed(conn, worker)) == 2
    end(conn, worker, End(done), End(failed, outcome="failed"))
    prune = "select taskq.prune_orderings(1)"
    assert one(conn, prune) == 0
    shift_clock(conn, "11 min")
    assert [one(conn, prune) for _ in range(3)] == [1, 1, 0]
    assert rows(conn, "select key from taskq.ordering_keys") == [{"key": "waits"}]
    assert halts(conn) == [("failed", failed)]
    # Reopened, it takes the key up again: its row is made by the sweep.
    assert retry(conn, failed) == "reopened"
    assert states(conn, [failed]) == ["ordering"]
    assert sweep(conn) == 1
    assert states(conn, [failed]) == ["pending"]


def test_the_leader_is_told_to_sweep_while_keys_are_in_use(conn: Conn) -> None:
    worker = register(conn)
    look = "select name from taskq.look(%s, 30, null, '{q}', '{t}') where kind = 'duty'"
    assert rows(conn, look, worker) == []
    ordered(conn, 1)
    assert rows(conn, look, worker) == [{"name": "sweep_orderings"}]

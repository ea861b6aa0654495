"""Ordering keys under every order of commits: no two jobs of a key at once, no key that stands still, and no end that
waits for an enqueue. What cannot be done at once is left to the sweep, which these tests call by hand."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest
from ordering_kit import claimed, halts, ordered, rechecks, resume, states, sweep
from sql import (
    Conn,
    End,
    cancel,
    claim,
    claim_one,
    end,
    enqueue_many,
    exchange,
    lose,
    one,
    policy,
    register,
    retry,
    rows,
    sessions,
    settle,
)

EITHER = pytest.mark.parametrize("halt", [True, False], ids=["halt", "continue"])
FINISH = pytest.mark.parametrize("finish", ["commit", "rollback"])


@pytest.fixture(autouse=True)
def policies(conn: Conn) -> None:
    """Stored before, as clients do: an open transaction must not hold one."""
    for halt in (True, False):
        cancel(conn, ordered(conn, 1, key="before", halt=halt)[0])
    conn.execute("delete from taskq.ordering_keys")


def sweep_until_quiet(conn: Conn) -> None:
    conn.execute("update taskq.ordering_rechecks set due_at = due_at - interval '1 s'")
    sweep(conn)


# Enqueue and enqueue --------------------------------------------------------------------------------------------------


@FINISH
def test_enqueues_under_one_key_wait_for_one_another_and_stand_in_that_order(dsn: str, conn: Conn, finish: str) -> None:
    with sessions(dsn) as [a, b]:
        a.begin()
        [first] = a.do(lambda c: ordered(c, 1))
        answer = b.start(lambda c: ordered(c, 1))
        b.waits_for(a)
        getattr(a, finish)()
        [second] = answer.result(20)
    assert second > first
    if finish == "commit":
        assert states(conn, [first, second]) == ["pending", "ordering"]
    else:
        assert states(conn, [second]) == ["pending"]


@FINISH
def test_the_order_is_that_in_which_the_key_was_taken_not_that_of_other_keys(dsn: str, conn: Conn, finish: str) -> None:
    """The later one already holds a unique key, and an id could have been made for it."""
    with sessions(dsn) as [a, b]:
        a.begin()
        [first] = a.do(lambda c: ordered(c, 1))
        answer = b.start(lambda c: ordered(c, 1, unique_key="u", idempotency_key="i"))
        b.waits_for(a)
        [third] = a.do(lambda c: ordered(c, 1))
        getattr(a, finish)()
        [second] = answer.result(20)
    assert first < third < second


def test_two_batches_with_the_same_keys_in_another_order_do_not_deadlock(dsn: str, conn: Conn) -> None:
    policy(conn)
    for known in (False, True):
        with sessions(dsn, 3) as [holder, a, b]:
            holder.begin()
            holder.do(lambda c: enqueue_many(c, 1, ordering_keys=["b"]))
            one_way = a.start(lambda c: enqueue_many(c, 4, ordering_keys=["c", "a", "b", "d"]))
            a.waits_for(holder)
            other_way = b.start(lambda c: enqueue_many(c, 4, ordering_keys=["d", "b", "a", "c"]))
            b.waits_for(a)
            holder.commit()
            assert len(one_way.result(20)) == len(other_way.result(20)) == 4, known


def test_different_keys_do_not_wait_for_one_another(dsn: str, conn: Conn) -> None:
    with sessions(dsn) as [a, b]:
        a.begin()
        a.do(lambda c: ordered(c, 2, key="a"))
        b.begin()
        b.do(lambda c: ordered(c, 2, key="b"))
        a.commit()
        b.commit()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_caller_above_read_committed_is_served_or_refused_as_a_whole(dsn: str, conn: Conn, level: str) -> None:
    [first] = ordered(conn, 1)
    worker = register(conn)
    with sessions(dsn) as [a, b]:
        a.do(lambda c: c.execute(f"begin isolation level {level}"))
        a.do(lambda c: rows(c, "select count(*) from taskq.queues"))
        # It does not see that the turn is free: the sweep does.
        assert claimed(conn, worker) == [first]
        end(conn, worker, End(first))
        [second] = a.do(lambda c: ordered(c, 1))
        a.commit()
        assert rechecks(conn) == ["k"]
        # Nor may a sweep look from such a height.
        b.do(lambda c: c.execute(f"begin isolation level {level}"))
        assert b.do(sweep) == 0
        b.commit()
        assert rechecks(conn) == ["k"]
        assert sweep(conn) == 1
        assert states(conn, [second]) == ["pending"]
        # One that came before it in the meantime is not overtaken: the caller is told to begin anew.
        b.do(lambda c: c.execute(f"begin isolation level {level}"))
        b.do(lambda c: rows(c, "select count(*) from taskq.queues"))
        [third] = ordered(conn, 1)
        with pytest.raises(psycopg.errors.SerializationFailure):
            b.do(lambda c: ordered(c, 1))
        b.rollback()
    assert states(conn, [second, third]) == ["pending", "ordering"]


# Enqueue and end ------------------------------------------------------------------------------------------------------


ENDS = pytest.mark.parametrize(
    ("outcome", "halt"),
    [
        ("succeeded", True),
        ("succeeded", False),
        ("failed", True),
        ("failed", False),
        ("retry", True),
        ("retry", False),
        ("cancelled", True),
    ],
)


@FINISH
@ENDS
def test_an_open_enqueue_holds_up_neither_the_end_nor_its_exchange(
    dsn: str, conn: Conn, outcome: str, halt: bool, finish: str
) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2, halt=halt)
    assert claimed(conn, worker) == [first]
    [plain] = enqueue_many(conn)
    if outcome == "cancelled":
        assert cancel(conn, first) == "requested"
    with sessions(dsn) as [client, ending]:
        client.begin()
        [third] = client.do(lambda c: ordered(c, 1, halt=halt))
        answer = ending.do(lambda c: exchange(c, worker, [End(first, outcome=outcome, delay=60)], 5))
        # Neither the end nor the claim waits; only the turn is not given yet.
        assert [row["job_id"] for row in answer] == [plain["job_id"]]
        assert states(conn, [second]) == ["ordering"]
        # Nor does the sweep: it leaves the key until it is free.
        sweep_until_quiet(conn)
        assert states(conn, [second]) == ["ordering"]
        assert rechecks(conn) != [] or outcome == "retry"
        getattr(client, finish)()
    sweep_until_quiet(conn)
    goes_on = not halt or outcome in ("succeeded", "cancelled")
    assert states(conn, [second]) == ["pending" if goes_on else "ordering"]
    if finish == "commit":
        assert states(conn, [third]) == ["ordering"]
    assert halts(conn) == ([("k", first)] if halt and outcome == "failed" else [])


@FINISH
@ENDS
def test_an_enqueue_waits_for_an_end_that_gives_the_turn_and_sees_what_it_did(
    dsn: str, conn: Conn, outcome: str, halt: bool, finish: str
) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2, halt=halt)
    assert claimed(conn, worker) == [first]
    if outcome == "cancelled":
        cancel(conn, first)
    with sessions(dsn) as [ending, client]:
        ending.begin()
        ending.do(lambda c: end(c, worker, End(first, outcome=outcome, delay=60)))
        answer = client.start(lambda c: ordered(c, 1, halt=halt))
        if (outcome, halt) != ("retry", True):  # That one keeps the turn: nobody looks at the line.
            client.waits_for(ending)
        getattr(ending, finish)()
        [third] = answer.result(20)
    goes_on = finish == "commit" and (not halt or outcome in ("succeeded", "cancelled"))
    assert states(conn, [second, third]) == ["pending" if goes_on else "ordering", "ordering"]


def test_the_last_job_of_a_line_ends_while_the_next_is_enqueued(dsn: str, conn: Conn) -> None:
    """The one that must not be missed: the end does not see the new job, nor the new job the end."""
    worker = register(conn)
    [first] = ordered(conn, 1)
    claimed(conn, worker)
    with sessions(dsn) as [client, ending]:
        client.begin()
        [second] = client.do(lambda c: ordered(c, 1))
        ending.do(lambda c: end(c, worker, End(first)))
        client.commit()
    assert states(conn, [second]) == ["ordering"]
    assert sweep(conn) == 1
    assert states(conn, [second]) == ["pending"]


def test_a_turn_that_was_given_and_taken_back_is_given_again(dsn: str, conn: Conn) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2)
    claimed(conn, worker)
    with sessions(dsn, 1) as [ending]:
        ending.begin()
        ending.do(lambda c: end(c, worker, End(first)))
        ending.rollback()
    assert states(conn, [first, second]) == ["running", "ordering"]
    assert end(conn, worker, End(first)) == 1
    assert claimed(conn, worker) == [second]


def test_a_sweep_gives_the_turns_of_free_keys_beside_one_that_is_taken(dsn: str, conn: Conn) -> None:
    """Nor does one job that somebody has locked hold up the turns of others."""
    worker = register(conn)
    lines = {key: ordered(conn, 2, key=key) for key in ("free", "locked", "taken")}
    running = claimed(conn, worker)
    with sessions(dsn, 3) as [client, holder, sweeping]:
        client.begin()
        for key in lines:
            client.do(lambda c, key=key: ordered(c, 1, key=key))  # type: ignore[misc]
        end(conn, worker, *(End(job) for job in running))
        assert rechecks(conn) == ["free", "locked", "taken"]
        client.rollback()
        client.begin()
        client.do(lambda c: ordered(c, 1, key="taken"))
        holder.begin()
        holder.do(lambda c: rows(c, "select id from taskq.jobs where id = %s for update", lines["locked"][1]))
        assert sweeping.do(sweep) == 1
        assert states(conn, [job for _, job in lines.values()]) == ["pending", "ordering", "ordering"]
        assert rechecks(conn) == ["locked", "taken"]
        client.rollback()
        holder.rollback()
    sweep_until_quiet(conn)
    assert states(conn, [job for _, job in lines.values()]) == ["pending"] * 3


def test_two_sweeps_at_once_give_each_turn_once(dsn: str, conn: Conn) -> None:
    worker = register(conn)
    [first, second, third] = ordered(conn, 3)
    row = claim_one(conn, worker)
    with sessions(dsn, 3) as [client, a, b]:
        client.begin()
        client.do(lambda c: ordered(c, 1))
        end(conn, worker, End(first))
        client.commit()
        a.begin()
        assert a.do(sweep) == 1
        assert b.do(sweep) == 0
        a.commit()
        assert b.do(sweep) == 0
    assert states(conn, [second, third]) == ["pending", "ordering"]
    # Due at that moment: below its low-water mark a worker would not look.
    assert claimed(conn, worker, mark=(row["claimed_at"], row["job_id"])) == [second]


def test_one_that_comes_due_is_locked_by_somebody_and_is_not_passed(dsn: str, conn: Conn) -> None:
    worker = register(conn)
    [first] = ordered(conn, 1, run_in=3600)
    [running, last] = ordered(conn, 2)
    assert claimed(conn, worker) == [running]
    conn.execute("update taskq.jobs set run_at = now() - interval '1 s' where id = %s", (first,))
    with sessions(dsn) as [holder, ending]:
        holder.begin()
        holder.do(lambda c: rows(c, "select id from taskq.jobs where id = %s for update", first))
        assert ending.do(lambda c: end(c, worker, End(running))) == 1
        assert ending.do(sweep) == 0
        assert states(conn, [first, last]) == ["ordering", "ordering"]
        holder.rollback()
    sweep_until_quiet(conn)
    assert states(conn, [first, last]) == ["pending", "ordering"]


# Ends, cancels and operators ------------------------------------------------------------------------------------------


@FINISH
def test_the_next_job_is_being_cancelled_when_the_turn_comes_free(dsn: str, conn: Conn, finish: str) -> None:
    worker = register(conn)
    [first, second, third] = ordered(conn, 3)
    claimed(conn, worker)
    with sessions(dsn) as [operator, ending]:
        operator.begin()
        assert operator.do(lambda c: cancel(c, second)) == "cancelled"
        # The cancel has looked at the line and found the turn taken: it holds the key as long as it is open.
        assert ending.do(lambda c: end(c, worker, End(first))) == 1
        assert states(conn, [second, third]) == ["ordering", "ordering"]
        getattr(operator, finish)()
    assert sweep(conn) == 1
    expected = ["cancelled", "pending"] if finish == "commit" else ["pending", "ordering"]
    assert states(conn, [second, third]) == expected


@FINISH
def test_the_next_job_is_locked_by_somebody_who_does_nothing_with_it(dsn: str, conn: Conn, finish: str) -> None:
    """It is not passed over: the one behind it stays where it is."""
    worker = register(conn)
    [first, second, third] = ordered(conn, 3)
    claimed(conn, worker)
    with sessions(dsn) as [holder, ending]:
        holder.begin()
        holder.do(lambda c: rows(c, "select id from taskq.jobs where id = %s for update", second))
        assert ending.do(lambda c: end(c, worker, End(first))) == 1
        assert states(conn, [second, third]) == ["ordering", "ordering"]
        sweep_until_quiet(conn)
        getattr(holder, finish)()
    sweep_until_quiet(conn)
    assert states(conn, [second, third]) == ["pending", "ordering"]


@pytest.mark.parametrize("first_commits", ["end", "cancel"])
def test_a_running_job_is_cancelled_while_it_ends(dsn: str, conn: Conn, first_commits: str) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2, halt=True)
    claimed(conn, worker)
    calls: dict[str, Callable[[Conn], object]] = {
        "end": lambda c: end(c, worker, End(first, outcome="failed")),
        "cancel": lambda c: cancel(c, first),
    }
    [last_commits] = set(calls) - {first_commits}
    with sessions(dsn) as [a, b]:
        a.begin()
        a.do(calls[first_commits])
        answer = b.start(calls[last_commits])
        b.waits_for(a)
        a.commit()
        assert answer.result(20) == ("finished" if last_commits == "cancel" else 1)
    # Cancelled while it ran, it lets the next go on; failed before that, it halts.
    expected = ["failed", "ordering"] if first_commits == "end" else ["cancelled", "pending"]
    assert states(conn, [first, second]) == expected


@pytest.mark.parametrize("other", ["reopen", "resume"])
@FINISH
def test_a_halted_key_is_resumed_and_its_job_reopened_at_once(dsn: str, conn: Conn, other: str, finish: str) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2, halt=True)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome="failed"))
    calls: dict[str, Callable[[Conn], object]] = {"reopen": lambda c: retry(c, first), "resume": resume}
    [then] = set(calls) - {other}
    with sessions(dsn) as [a, b]:
        a.begin()
        a.do(calls[other])
        answer = b.start(calls[then])
        b.waits_for(a)
        getattr(a, finish)()
        answer.result(20)
    sweep_until_quiet(conn)
    assert sum(state in ("pending", "running") for state in states(conn, [first, second])) == 1
    assert halts(conn) == []
    while took := claimed(conn, worker):
        [job] = took
        end(conn, worker, End(job, one(conn, "select claim_epoch from taskq.jobs where id = %s", job)))
    assert "ordering" not in states(conn, [first, second])


@FINISH
def test_a_job_is_reopened_while_the_key_is_taken_by_an_enqueue(dsn: str, conn: Conn, finish: str) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2)
    for job in (first, second):
        assert claimed(conn, worker) == [job]
        end(conn, worker, End(job, outcome="failed"))
    with sessions(dsn) as [client, operator]:
        client.begin()
        [third] = client.do(lambda c: ordered(c, 1))
        # Its turn, which it has taken, is not to be seen yet; the operator waits for nothing.
        assert operator.do(lambda c: retry(c, second)) == "reopened"
        assert operator.do(lambda c: retry(c, first)) == "reopened"
        getattr(client, finish)()
    sweep_until_quiet(conn)
    if finish == "commit":
        assert states(conn, [first, second, third]) == ["ordering", "ordering", "pending"]
    else:
        assert states(conn, [first, second]) == ["pending", "ordering"]


@FINISH
def test_a_reopened_job_of_a_forgotten_key_meets_an_enqueue_that_makes_it_anew(
    dsn: str, conn: Conn, finish: str
) -> None:
    worker = register(conn)
    [first] = ordered(conn, 1)
    claimed(conn, worker)
    end(conn, worker, End(first, outcome="failed"))
    conn.execute("delete from taskq.ordering_keys")
    with sessions(dsn) as [client, operator]:
        client.begin()
        [second] = client.do(lambda c: ordered(c, 1))
        assert operator.do(lambda c: retry(c, first)) == "reopened"
        sweep_until_quiet(conn)
        assert states(conn, [first]) == ["ordering"]
        getattr(client, finish)()
    sweep_until_quiet(conn)
    if finish == "commit":
        assert states(conn, [first, second]) == ["ordering", "pending"]
    else:
        assert states(conn, [first]) == ["pending"]


def test_a_key_is_not_forgotten_under_an_enqueue(dsn: str, conn: Conn) -> None:
    ordered(conn, 1)
    [job] = rows(conn, "select id from taskq.jobs")
    cancel(conn, job["id"])
    conn.execute("update taskq.ordering_keys set taken_at = now() - interval '1 h'")
    with sessions(dsn, 3) as [client, pruning, late]:
        client.begin()
        [first] = client.do(lambda c: ordered(c, 1))
        assert pruning.do(lambda c: one(c, "select taskq.prune_orderings()")) == 0
        client.commit()
        cancel(conn, first)
        conn.execute("update taskq.ordering_keys set taken_at = now() - interval '1 h'")
        pruning.begin()
        assert pruning.do(lambda c: one(c, "select taskq.prune_orderings()")) == 1
        answer = late.start(lambda c: ordered(c, 1))
        late.waits_for(pruning)
        pruning.commit()
        [second] = answer.result(20)
    assert states(conn, [second]) == ["pending"]
    assert rows(conn, "select key from taskq.ordering_keys") == [{"key": "k"}]


# Lost, unknown, deadline ----------------------------------------------------------------------------------------------


@EITHER
@FINISH
def test_a_worker_is_lost_while_its_key_is_taken_by_an_enqueue(dsn: str, conn: Conn, halt: bool, finish: str) -> None:
    worker = register(conn)
    [first, second] = ordered(conn, 2, halt=halt)
    claimed(conn, worker)
    cancel(conn, first)
    with sessions(dsn) as [client, leader]:
        client.begin()
        client.do(lambda c: ordered(c, 1, halt=halt))
        leader.do(lambda c: lose(c, worker))
        assert leader.do(settle) == {first: "unknown"}
        getattr(client, finish)()
    sweep_until_quiet(conn)
    assert states(conn, [first, second]) == ["unknown", "ordering" if halt else "pending"]


@EITHER
@pytest.mark.parametrize("first_commits", ["late end", "claim"])
def test_a_late_end_meets_the_claim_of_the_next(dsn: str, conn: Conn, halt: bool, first_commits: str) -> None:
    lost, worker = register(conn), register(conn)
    [first, second] = ordered(conn, 2, halt=halt)
    claimed(conn, lost)
    cancel(conn, first)
    lose(conn, lost)
    settle(conn)
    conn.execute("update taskq.jobs set cancel_requested_at = null")
    calls: dict[str, Callable[[Conn], object]] = {
        "late end": lambda c: end(c, lost, End(first, outcome="release")),
        "claim": lambda c: [row["job_id"] for row in claim(c, worker)],
    }
    [last_commits] = set(calls) - {first_commits}
    with sessions(dsn) as [a, b]:
        a.begin()
        one_answer = a.do(calls[first_commits])
        other_answer = b.do(calls[last_commits])
        a.commit()
    answers = {first_commits: one_answer, last_commits: other_answer}
    assert answers["late end"] == 1
    assert answers["claim"] == ([] if halt else [second])
    sweep_until_quiet(conn)
    assert states(conn, [first, second]) == (["pending", "ordering"] if halt else ["ordering", "running"])


@EITHER
@FINISH
def test_the_next_one_expires_while_the_turn_comes_free(dsn: str, conn: Conn, halt: bool, finish: str) -> None:
    worker = register(conn)
    [first, second, third] = ordered(conn, 3, halt=halt)
    claimed(conn, worker)
    conn.execute("update taskq.jobs set deadline = now() - interval '1 s' where id = %s", (second,))
    with sessions(dsn) as [leader, ending]:
        leader.begin()
        assert leader.do(lambda c: len(rows(c, "select * from taskq.sweep()"))) == 1
        assert ending.do(lambda c: end(c, worker, End(first))) == 1
        getattr(leader, finish)()
    sweep_until_quiet(conn)
    assert states(conn, [second, third]) == (["failed", "pending"] if finish == "commit" else ["pending", "ordering"])


@FINISH
def test_two_sweeps_at_once_give_one_turn(dsn: str, conn: Conn, finish: str) -> None:
    worker = register(conn)
    [first] = ordered(conn, 1)
    claimed(conn, worker)
    with sessions(dsn) as [a, b]:
        a.begin()
        [second] = a.do(lambda c: ordered(c, 1))
        end(conn, worker, End(first))
        a.commit()
        a.begin()
        assert a.do(sweep) == 1
        assert b.do(sweep) == 0
        getattr(a, finish)()
    sweep_until_quiet(conn)
    assert states(conn, [second]) == ["pending"]


def test_a_batch_of_cancels_does_not_deadlock_with_ends_of_the_same_jobs(dsn: str, conn: Conn) -> None:
    """Cancels go from the end of a line to its front, and ends from the front: the locks come first, in one order."""
    worker = register(conn)
    jobs = sorted(row["job_id"] for row in enqueue_many(conn, 2))
    assert len(claimed(conn, worker)) == 2
    with sessions(dsn, 3) as [holder, ending, operator]:
        holder.begin()
        holder.do(lambda c: rows(c, "select id from taskq.jobs where id = %s for update", jobs[0]))
        ended = ending.start(lambda c: end(c, worker, *(End(job, outcome="retry") for job in jobs)))
        ending.waits_for(holder)
        answers = operator.start(lambda c: rows(c, "select answer from taskq.steer_many('cancel', %s)", jobs))
        operator.waits_for(ending)
        holder.rollback()
        assert ended.result(20) == 2
        assert [row["answer"] for row in answers.result(20)] == ["cancelled", "cancelled"]


def test_two_batches_of_cancels_do_not_deadlock_over_the_turns_that_they_give(dsn: str, conn: Conn) -> None:
    """Each end gives the turn to a job that the other batch has yet to cancel."""
    a1, b1 = ordered(conn, 1, key="a") + ordered(conn, 1, key="b")
    b2, a2 = ordered(conn, 1, key="b") + ordered(conn, 1, key="a")
    steer = "select * from taskq.steer_many('cancel', %s)"
    with sessions(dsn, 3) as [holder, one_batch, other_batch]:
        holder.begin()
        holder.do(lambda c: rows(c, "select id from taskq.jobs where id = %s for update", b2))
        first = one_batch.start(lambda c: rows(c, steer, [a1, b2]))
        one_batch.waits_for(holder)
        second = other_batch.start(lambda c: rows(c, steer, [b1, a2]))
        second.result(20)
        holder.commit()
        first.result(20)
    assert states(conn, [a1, b1, b2, a2]) == ["cancelled"] * 4


def test_an_end_and_a_client_that_cancels_and_enqueues_do_not_deadlock(dsn: str, conn: Conn) -> None:
    """The worker's batch locks all its jobs before it gives any turn."""
    worker = register(conn)
    [first] = ordered(conn, 1)
    [other] = [row["job_id"] for row in enqueue_many(conn)]
    assert set(claimed(conn, worker)) == {first, other}
    with sessions(dsn) as [client, ending]:
        client.begin()
        assert client.do(lambda c: cancel(c, other)) == "requested"
        ends = [End(first, outcome="snooze", delay=60), End(other)]
        answer = ending.start(lambda c: end(c, worker, *ends))
        ending.waits_for(client)
        client.do(lambda c: ordered(c, 1))
        client.commit()
        assert answer.result(20) == 2
    sweep_until_quiet(conn)

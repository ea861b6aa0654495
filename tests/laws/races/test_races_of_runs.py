"""The root lock: whoever ends a job of a run takes the run's row before the job's, or leaves the job to who has it.

In each test one session holds the root lock, as an end or a cancel of the run does, and goes on to a job of it. Another
one, which took the job first and then waited for the run, would be caught in a deadlock with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import effect
from psycopg.types.json import Jsonb
from runs_kit import do, edge, finish, info, job_of, node, start, store, take, tree, worker_for
from sql import (
    BOUND,
    Conn,
    End,
    Session,
    attempts,
    cancel,
    end,
    exchange,
    get,
    lose,
    one,
    resolve,
    retry,
    rows,
    sessions,
    settle,
    violations,
)


def hold(session: Session, run: UUID) -> None:
    session.begin()
    session.do(lambda conn: conn.execute("select from taskq.runs where id = %s for update", (run,)))


def lock_job(conn: Conn, job: UUID) -> None:
    """Fails where anybody has it."""
    conn.execute("select from taskq.jobs where id = %s for update nowait", (job,))


def pair(conn: Conn, **more: Any) -> tuple[UUID, UUID]:
    """A run of a, and b after it; gives the run and a's job."""
    run = start(conn, store(conn, [node("a", **more), node("b")], [edge(0, 1)]))
    return run, job_of(conn, run, "a")


# Who takes the run first ----------------------------------------------------------------------------------------------


def waits_without_the_job(dsn: str, run: UUID, job: UUID, call: Callable[[Conn], Any]) -> Any:
    """The call waits for the run and has not locked the job meanwhile; gives what it answers then."""
    with sessions(dsn) as [holder, other]:
        hold(holder, run)
        waiting = other.start(call)
        other.waits_for(holder)
        holder.do(lambda c: lock_job(c, job))
        holder.commit()
        return waiting.result(BOUND)


def test_a_cancel_takes_the_run_before_the_job(dsn: str, conn: Conn) -> None:
    run, job = pair(conn)
    assert waits_without_the_job(dsn, run, job, lambda c: cancel(c, job)) == "cancelled"
    assert tree(conn, run) == {"a": "cancelled", "b": "blocked"}


def test_a_retry_takes_the_run_before_the_job(dsn: str, conn: Conn) -> None:
    run, job = pair(conn)
    assert waits_without_the_job(dsn, run, job, lambda c: retry(c, job)) == "due"


def test_a_batch_takes_its_runs_before_its_jobs(dsn: str, conn: Conn) -> None:
    run, job = pair(conn)
    answer = waits_without_the_job(
        dsn, run, job, lambda c: rows(c, "select * from taskq.steer_many('cancel', %s::uuid[])", [job])
    )
    assert [row["job_id"] for row in answer] == [job]
    assert tree(conn, run) == {"a": "cancelled", "b": "blocked"}


def test_a_decision_takes_the_run_before_the_job(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run, job = pair(conn)
    take(conn, worker, "a")
    cancel(conn, job)
    lose(conn, worker)
    assert settle(conn) == {job: "unknown"}
    assert waits_without_the_job(dsn, run, job, lambda c: resolve(c, job, happened=True)) == "succeeded"
    assert tree(conn, run) == {"a": "succeeded", "b": "pending"}


def test_an_end_inside_of_a_transaction_takes_the_run_before_the_job(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run, job = pair(conn)
    take(conn, worker, "a")
    inside = "select taskq.end_inside(%s, %s, 1, 7, '1', pg_current_xact_id()::text)"
    assert waits_without_the_job(dsn, run, job, lambda c: one(c, inside, worker, job)) == "ended"
    assert tree(conn, run) == {"a": "succeeded", "b": "pending"}


# Who leaves it --------------------------------------------------------------------------------------------------------


def left_while_the_run_is_busy(dsn: str, run: UUID, job: UUID, call: Callable[[Conn], Any]) -> Any:
    """The call comes back at once, and leaves the job; gives what it answers."""
    with sessions(dsn) as [holder, other]:
        hold(holder, run)
        answer = other.do(call)
        holder.do(lambda c: lock_job(c, job))
        holder.commit()
        return answer


def test_ends_of_a_busy_run_are_sent_again_and_hold_up_no_other(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run, job = pair(conn)
    other_run = start(conn, store(conn, [node("c")], workflow="other"))
    claimed = take(conn, worker, "a", "c")
    ends = [End(claimed[task]["job_id"], 1, "succeeded", n, result=task) for n, task in enumerate("ac")]
    answer = left_while_the_run_is_busy(dsn, run, job, lambda c: exchange(c, worker, ends))
    assert [(row["kind"], row["job_id"], row["claim_epoch"]) for row in answer] == [("busy", job, 1)]
    assert (info(conn, other_run)["status"], tree(conn, run)["a"]) == ("succeeded", "running")
    assert get(conn, claimed["c"]["job_id"])["result"] == "c"
    assert exchange(conn, worker, ends[:1]) == []
    assert tree(conn, run) == {"a": "succeeded", "b": "pending"}


def test_what_was_lost_of_a_busy_run_is_left_to_the_next_round(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run, job = pair(conn, effect_class="pure")
    take(conn, worker, "a")
    lose(conn, worker)
    assert left_while_the_run_is_busy(dsn, run, job, settle) == {}
    assert settle(conn) == {job: "pending"}


def swept(conn: Conn) -> list[UUID]:
    return [row["job_id"] for row in rows(conn, "select * from taskq.sweep()")]


@pytest.mark.parametrize("due", ["deadline = now() - interval '1 s'", "attempt = max_attempts"])
def test_what_the_sweep_would_end_of_a_busy_run_is_left_to_the_next_round(dsn: str, conn: Conn, due: str) -> None:
    run, job = pair(conn)
    conn.execute(f"update taskq.jobs set {due} where id = %s", (job,))
    assert left_while_the_run_is_busy(dsn, run, job, swept) == []
    assert swept(conn) == [job]
    assert tree(conn, run) == {"a": "failed", "b": "blocked"}


def test_a_busy_run_is_healed_by_nobody_else(dsn: str, conn: Conn) -> None:
    run, job = pair(conn)
    assert left_while_the_run_is_busy(dsn, run, job, lambda c: one(c, "select taskq.heal_run(%s)", run)) == "left alone"


# Both at once ---------------------------------------------------------------------------------------------------------


def test_two_that_end_the_members_of_a_fan_in_start_what_follows_once(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b"), node("c")], [edge(0, 2), edge(1, 2)]))
    claimed = take(conn, worker, "a", "b")
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: end(c, worker, End(claimed["a"]["job_id"], 1, "succeeded"))) == 1
        waiting = second.start(lambda c: end(c, worker, End(claimed["b"]["job_id"], 1, "succeeded")))
        second.waits_for(first)
        first.commit()
        assert waiting.result(BOUND) == 1
    assert tree(conn, run) == {"a": "succeeded", "b": "succeeded", "c": "pending"}
    do(conn, worker, "c")
    assert info(conn, run)["status"] == "succeeded"


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_three_that_end_the_parents_of_a_node_at_once_count_as_three(dsn: str, conn: Conn, outcome: str) -> None:
    worker = worker_for(conn)
    nodes = [node("a"), node("b"), node("d"), node("c", {"all": {"list": [{"outcome": ix} for ix in range(3)]}})]
    plan = store(conn, nodes, [edge(ix, 3, "collect") for ix in range(3)], on_failure="finish")
    run = start(conn, plan)
    claimed = take(conn, worker, "a", "b", "d")

    def ends(c: Conn, task: str) -> int:
        return end(c, worker, End(claimed[task]["job_id"], 1, outcome if task == "b" else "succeeded", error={}))

    with sessions(dsn, 3) as [first, second, third]:
        first.begin()
        assert first.do(lambda c: ends(c, "a")) == 1
        waiting = [second.start(lambda c: ends(c, "b"))]
        second.waits_for(first)
        waiting.append(third.start(lambda c: ends(c, "d")))
        third.waits_for(second)
        first.commit()
        assert [each.result(BOUND) for each in waiting] == [1, 1]
    assert one(conn, "select unmet from taskq.nodes where run_id = %s and ix = 3", run) == 0
    assert tree(conn, run) == {"a": "succeeded", "b": outcome, "d": "succeeded", "c": "pending"}
    do(conn, worker, "c")
    assert attempts(conn, job_of(conn, run, "c")) == [(1, "succeeded")]
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_cancel_of_a_run_and_its_last_end_agree_whoever_comes_first(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    for cancelled_first in (True, False):
        run = start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)]))
        a = take(conn, worker, "a")["a"]
        with sessions(dsn) as [first, second]:
            first.begin()

            def end_it(c: Conn, job: UUID = a["job_id"]) -> str:
                return str(end(c, worker, End(job, 1, "succeeded")))

            def cancel_it(c: Conn, run: UUID = run) -> str:
                return str(one(c, "select taskq.cancel_run(%s)", run))

            one_, other = (cancel_it, end_it) if cancelled_first else (end_it, cancel_it)
            answers = [first.do(one_)]
            waiting = second.start(other)
            second.waits_for(first)
            first.commit()
            answers.append(waiting.result(BOUND))
        assert answers == (["requested", "1"] if cancelled_first else ["1", "cancelled"])
        assert tree(conn, run) == {"a": "succeeded", "b": "cancelled"}
        assert info(conn, run)["status"] == "cancelled"


def test_a_claim_and_a_cancel_of_its_run_agree(dsn: str, conn: Conn) -> None:
    worker = worker_for(conn)
    run, job = pair(conn)
    with sessions(dsn) as [claiming, cancelling]:
        claiming.begin()
        assert list(claiming.do(lambda c: take(c, worker, "a"))) == ["a"]
        waiting = cancelling.start(lambda c: one(c, "select taskq.cancel_run(%s)", run))
        cancelling.waits_for(claiming)
        claiming.commit()
        assert waiting.result(BOUND) == "requested"
    assert tree(conn, run) == {"a": "running", "b": "cancelled"}
    assert get(conn, job)["cancel_requested_at"] is not None


@pytest.mark.parametrize("through", ["exchange", "end"])
def test_a_cancel_of_a_run_between_an_error_and_its_retry_ends_the_node(dsn: str, conn: Conn, through: str) -> None:
    """Its body has raised, and the request commits before the retry does: no attempt follows, and nothing is left."""
    worker = worker_for(conn)
    run, job = pair(conn, max_attempts=5)
    take(conn, worker, "a")
    retries = End(job, 1, "retry", error={"type": "Boom"})
    with sessions(dsn) as [cancelling, ending]:
        cancelling.begin()
        assert cancelling.do(lambda c: one(c, "select taskq.cancel_run(%s)", run)) == "requested"
        if through == "end":
            waiting = ending.start(lambda c: end(c, worker, retries))
            ending.waits_for(cancelling)
        else:
            [answer] = ending.do(lambda c: exchange(c, worker, [retries]))
            assert (answer["kind"], answer["job_id"]) == ("busy", job)
        cancelling.commit()
        if through == "end":
            assert waiting.result(BOUND) == 1
        else:
            assert exchange(conn, worker, [retries]) == []
    assert tree(conn, run) == {"a": "cancelled", "b": "cancelled"}
    assert info(conn, run)["status"] == "cancelled"
    assert attempts(conn, job) == [(1, "cancelled")]
    assert one(conn, "select count(*) from taskq.jobs") == 0
    assert violations(conn) == []


def test_two_admissions_under_one_key_are_one_run(dsn: str, conn: Conn) -> None:
    plan = store(conn, [node("a")])
    admit = "select run_id || ' ' || created from taskq.start_run(%s, %s, 'k')"
    for ending in ("commit", "rollback"):
        conn.execute("delete from taskq.runs")
        conn.execute("delete from taskq.nodes")
        conn.execute("delete from taskq.receipts")
        conn.execute("delete from taskq.jobs")
        with sessions(dsn) as [first, second]:
            first.begin()
            run, created = str(first.do(lambda c: one(c, admit, plan, Jsonb({})))).split()
            waiting = second.start(lambda c: one(c, admit, plan, Jsonb({})))
            second.waits_for(first)
            getattr(first, ending)()
            other, again = str(waiting.result(BOUND)).split()
        assert created == "true"
        assert ((other == run), again) == ((True, "false") if ending == "commit" else (False, "true"))
        assert one(conn, "select count(*) from taskq.runs") == 1


def failed_with_compensation(conn: Conn) -> tuple[UUID, UUID]:
    """A run that has failed, whose compensation was cancelled; gives the run and the compensation's job."""
    worker = worker_for(conn)
    run = start(conn, store(conn, [node("a", compensate=effect("undo", task="undo")), node("b")], [edge(0, 1)]))
    do(conn, worker, "a")
    finish(conn, worker, take(conn, worker, "b")["b"], "failed")
    job: UUID = one(conn, "select job_id from taskq.effect_intents where owner_job_id = %s", job_of(conn, run, "a"))
    assert cancel(conn, job) == "cancelled"
    return run, job


def answer_of(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except psycopg.Error as error:
        return error.sqlstate or "?"


@pytest.mark.parametrize("run_first", [True, False])
def test_a_run_and_its_cancelled_compensation_are_not_both_reopened(dsn: str, conn: Conn, run_first: bool) -> None:
    run, job = failed_with_compensation(conn)
    calls: list[Callable[[Conn], str]] = [
        lambda c: str(one(c, "select taskq.retry_run(%s)", run)),
        lambda c: retry(c, job),
    ]
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(calls[0 if run_first else 1]) == "reopened"
        waiting = second.start(calls[1 if run_first else 0])
        second.waits_for(first)
        first.commit()
        assert answer_of(lambda: waiting.result(BOUND)) == ("WF012" if run_first else "WF026")
    assert (info(conn, run)["status"], get(conn, job)["status"]) == (
        ("running", "cancelled") if run_first else ("failed", "pending")
    )

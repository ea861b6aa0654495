"""Loops: round after round until a result says so or a bound is reached, each round on record."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import effect
from loops_kit import LOOP, Looped, again, claimed, given, looped, plan_of, progress, told
from runs_kit import do, finish, info, job_of, kinds, node, start, store, take, tree, worker_for
from signals_kit import held, send_run, suspend, wait
from signals_kit import take as take_signal
from sql import cancel, control_clock, one, rows, shift_clock, stop_clock, violations

Conn = psycopg.Connection[Any]


def error_of(conn: Conn, run: UUID) -> dict[str, Any]:
    return dict(info(conn, run)["error"])


def retry_run(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.retry_run(%s, 'fixed', 'me')", run))


def cancel_run(conn: Conn, run: UUID) -> str:
    return str(one(conn, "select taskq.cancel_run(%s, 'enough')", run))


def held_in(conn: Conn, made: Looped) -> float:
    return float(progress(conn, made)["held"])


# Rounds ---------------------------------------------------------------------------------------------------------------


def test_each_round_takes_what_the_one_before_gave_until_one_is_the_end(conn: Conn) -> None:
    made = looped(conn, {"n": 0})
    assert given(conn, made) == {"x": {"n": 0}, "k": 7}
    finish(conn, made.worker, running(conn), result={"n": 1, "word": "again"})
    assert given(conn, made) == {"x": {"n": 1, "word": "again"}, "k": 7}
    assert violations(conn) == []
    finish(conn, made.worker, running(conn), result={"n": 2, "word": "done"})
    assert info(conn, made.loop)["status"] == "succeeded"
    assert told(conn, made) == {"n": 2, "word": "done"}
    assert tree(conn, made.loop) == {"more[0]": "succeeded", "more[1]": "succeeded"}
    assert kinds(conn, made.loop) == ["admitted", "ready", "ended", "ready", "ended", "finished"]
    assert violations(conn) == []


def running(conn: Conn) -> dict[str, Any]:
    [row] = rows(conn, "select id as job_id, claim_epoch from taskq.jobs where status = 'running'")
    return row


def test_a_round_is_a_node_under_the_name_and_the_number(conn: Conn) -> None:
    made = looped(conn)
    again(conn, made, 1)
    assert tree(conn, made.loop) == {"more[0]": "succeeded", "more[1]": "pending"}
    meta = one(conn, "select meta from taskq.jobs where id = %s", job_of(conn, made.loop, "more[1]"))
    assert meta["run"] == {"id": str(made.loop), "workflow": "flow:more", "node": "more[1]"}
    got = progress(conn, made)
    assert (got["name"], got["rounds"], got["most_rounds"], got["last_status"]) == ("more", 2, 5, "ready")
    assert (got["state"], got["within"], info(conn, made.loop)["active"]) == ({"n": 1, "word": "again"}, None, 1)


@pytest.mark.parametrize(
    ("result", "status"),
    [
        ({"word": "lost"}, "succeeded"),
        ({"word": "more"}, "running"),
        ({"other": "done"}, "running"),
        (None, "running"),
        ("done", "running"),
    ],
)
def test_only_a_value_that_is_named_is_the_end(conn: Conn, result: Any, status: str) -> None:
    made = looped(conn)
    do(conn, made.worker, "more", result=result)
    assert info(conn, made.loop)["status"] == status
    assert violations(conn) == []


def test_a_loop_whose_rounds_are_used_up_fails_and_says_so(conn: Conn) -> None:
    made = looped(conn, most=2)
    again(conn, made, 1)
    again(conn, made, 2)
    assert take(conn, made.worker, "more") == {}
    error = error_of(conn, made.loop)
    assert (error["type"], error["kind"], error["rounds"]) == ("LoopExhausted", "rounds", 2)
    assert error["message"] == "the loop was not done after 2 rounds, and may have no more"
    assert (info(conn, made.loop)["status"], info(conn, made.loop)["result"]) == ("failed", None)
    assert told(conn, made) is None
    assert tree(conn, made.run) == {"first": "succeeded", "more": "failed", "last": "blocked"}
    assert violations(conn) == []


def test_a_loop_that_is_to_gives_the_last_state_once_its_rounds_are_used_up(conn: Conn) -> None:
    made = looped(conn, most=1, exhausted="give")
    again(conn, made, 1)
    assert told(conn, made) == {"n": 1, "word": "again"}
    assert violations(conn) == []


def test_a_last_round_that_is_the_end_is_no_exhaustion(conn: Conn) -> None:
    made = looped(conn, most=2, within=60)
    control_clock(conn)
    again(conn, made, 1)
    shift_clock(conn, "1 hour")
    again(conn, made, 2, "done")
    assert told(conn, made) == {"n": 2, "word": "done"}


def test_a_round_that_fails_fails_the_loop_under_its_number(conn: Conn) -> None:
    made = looped(conn)
    again(conn, made, 1)
    do(conn, made.worker, "more", "failed")
    assert error_of(conn, made.loop)["node"] == "more[1]"
    assert error_of(conn, made.loop)["message"] == "node more[1] has failed: boom"
    assert told(conn, made) is None
    assert violations(conn) == []


def test_what_became_of_a_loop_may_be_collected(conn: Conn) -> None:
    made = looped(conn, policy="collect")
    do(conn, made.worker, "more", "failed")
    assert told(conn, made)["status"] == "failed"


def test_a_state_that_is_too_large_fails_its_round_and_the_end_before_stands(conn: Conn) -> None:
    made = looped(conn)
    conn.execute("update taskq.installation set max_payload_bytes = 60")
    do(conn, made.worker, "more", result={"word": "again", "long": "x" * 60})
    assert tree(conn, made.loop) == {"more[0]": "succeeded", "more[1]": "failed"}
    assert "its payload has" in error_of(conn, made.loop)["message"]
    assert violations(conn) == []


def test_a_start_that_is_too_large_fails_the_loop(conn: Conn) -> None:
    worker = worker_for(conn)
    run = start(conn, plan_of(conn))
    # With what the loop takes besides it is larger than what the node itself takes.
    conn.execute("update taskq.installation set max_payload_bytes = 40")
    do(conn, worker, "first", result={"long": "x" * 60})
    assert tree(conn, run) == {"first": "succeeded", "more": "failed", "last": "blocked"}
    assert violations(conn) == []


def test_a_round_may_be_a_run_of_its_own(conn: Conn) -> None:
    inner = store(conn, [node("step")], workflow="inner", parameters=["x", "k"], result={"node": 0, "path": []})
    made = looped(conn, child=inner)
    for word in ("again", "done"):
        do(conn, made.worker, "step", result={"word": word})
        do(conn, made.worker, "inner:await", result={"word": word})
        assert violations(conn) == []
    assert told(conn, made) == {"word": "done"}
    found = rows(conn, "select depth, input from taskq.runs where workflow = 'inner' order by id")
    assert [(row["depth"], row["input"]["x"]) for row in found] == [(2, {"n": 0}), (2, {"word": "again"})]


# Time -----------------------------------------------------------------------------------------------------------------


def test_no_round_begins_once_the_time_is_up(conn: Conn) -> None:
    control_clock(conn)
    made = looped(conn, within=60)
    shift_clock(conn, "50 s")
    again(conn, made, 1)
    shift_clock(conn, "11 s")
    again(conn, made, 2)
    error = error_of(conn, made.loop)
    assert (error["type"], error["kind"], error["rounds"]) == ("LoopExhausted", "time", 2)
    assert error["message"] == "the loop was not done within 60 s, after 2 rounds"
    assert violations(conn) == []


def test_a_clock_that_steps_back_between_the_decision_and_the_end_leaves_it_exhausted_by_time(conn: Conn) -> None:
    """The end finds a loop that has no round open, and would be let go on by now."""
    made = looped(conn, within=60)
    again(conn, made, 1, "done")
    conn.execute("set local session_replication_role = replica")
    conn.execute("update taskq.nodes set result = '{}' where run_id = %s", (made.loop,))
    conn.execute("update taskq.runs set status = 'running', finished_at = null where id = %s", (made.loop,))
    conn.execute("set local session_replication_role = origin")
    one(conn, "select taskq.finish_run(%s)", made.loop)
    assert error_of(conn, made.loop)["kind"] == "time"


def test_time_in_which_a_round_was_held_for_a_signal_does_not_count(conn: Conn) -> None:
    control_clock(conn)
    stop_clock(conn)
    made = looped(conn, within=60)
    shift_clock(conn, "20 s")
    asked(conn, made, "2 days")
    assert held_in(conn, made) == 2 * 86400
    shift_clock(conn, "39 s")
    again(conn, made, 1)
    assert tree(conn, made.loop)["more[1]"] == "pending"
    assert progress(conn, made)["counted"] == 59
    asked(conn, made, "1 hour")
    assert held_in(conn, made) == 2 * 86400 + 3600
    shift_clock(conn, "1 s")
    again(conn, made, 2)
    assert error_of(conn, made.loop)["kind"] == "time"
    assert violations(conn) == []


def asked(conn: Conn, made: Looped, lasts: str) -> None:
    """The round that is due waits so long for a signal, which comes."""
    job = UUID(str(claimed(conn, made)["job_id"]))
    held(conn, made.worker, job)
    shift_clock(conn, lasts)
    assert send_run(conn, made.run) == "given"


def test_a_wait_whose_time_is_up_does_not_count_either(conn: Conn) -> None:
    control_clock(conn)
    stop_clock(conn)
    made = looped(conn, within=60)
    held(conn, made.worker, UUID(str(claimed(conn, made)["job_id"])), seconds=600)
    shift_clock(conn, "600 s")
    assert one(conn, "select taskq.wake_waiting()") == 1
    assert held_in(conn, made) == 600


def test_time_that_is_held_twice_at_once_counts_once(conn: Conn) -> None:
    """Of a round that is a run with nodes beside each other; one of them is cancelled while it waits."""
    control_clock(conn)
    stop_clock(conn)
    inner = store(
        conn, [node(name) for name in ("a", "b", "c")], workflow="inner", parameters=["x", "k"], on_failure="finish"
    )
    made = looped(conn, child=inner, within=60)
    jobs = {name: UUID(str(row["job_id"])) for name, row in take(conn, made.worker, "a", "b", "c").items()}
    held(conn, made.worker, jobs["a"])
    shift_clock(conn, "100 s")
    held(conn, made.worker, jobs["b"])
    shift_clock(conn, "100 s")
    assert held_in(conn, made) == 200
    one(conn, "select taskq.send_signal(%s, 'go')", jobs["a"])
    shift_clock(conn, "100 s")
    assert cancel(conn, jobs["b"]) == "cancelled"
    shift_clock(conn, "10 s")
    assert (held_in(conn, made), progress(conn, made)["counted"]) == (300, 10)
    held(conn, made.worker, jobs["c"])
    shift_clock(conn, "7 s")
    assert held_in(conn, made) == 307


def test_other_waits_count(conn: Conn) -> None:
    control_clock(conn)
    stop_clock(conn)
    made = looped(conn, within=60)
    job = UUID(str(claimed(conn, made)["job_id"]))
    one(conn, "select count(*) from taskq.begin_sleep(%s, %s, 1, 's', 1, 600)", made.worker, job)
    assert suspend(conn, made.worker, job, ("sleep", "s", 1)) == 1
    shift_clock(conn, "600 s")
    assert (held_in(conn, made), progress(conn, made)["counted"]) == (0, 600)


def test_a_loop_without_a_bound_on_time_keeps_no_record_of_it(conn: Conn) -> None:
    made = looped(conn)
    held(conn, made.worker, UUID(str(claimed(conn, made)["job_id"])))
    assert one(conn, "select count(*) from taskq.loop_holds") == 0


def test_a_round_that_waits_twice_is_held_twice(conn: Conn) -> None:
    control_clock(conn)
    stop_clock(conn)
    made = looped(conn, within=60)
    asked(conn, made, "10 s")
    again_claimed = claimed(conn, made)
    job, epoch = UUID(str(again_claimed["job_id"])), again_claimed["claim_epoch"]
    signal = wait(conn, made.worker, job, epoch=epoch)[1]
    assert take_signal(conn, made.worker, job, signal, epoch=epoch) == "taken"
    assert wait(conn, made.worker, job, "more", epoch=epoch)[0] == "waits"
    assert suspend(conn, made.worker, job, ("wait", "more", 1), epoch=epoch) == 1
    shift_clock(conn, "5 s")
    assert send_run(conn, made.run, name="more") == "given"
    assert held_in(conn, made) == 15


# Cancelling, retrying, healing ----------------------------------------------------------------------------------------


def test_cancelling_the_run_cancels_a_round_that_waits(conn: Conn) -> None:
    made = looped(conn)
    again(conn, made, 1)
    assert cancel_run(conn, made.run) == "cancelled"
    assert tree(conn, made.loop) == {"more[0]": "succeeded", "more[1]": "cancelled"}
    assert info(conn, made.loop)["status"] == "cancelled"
    assert violations(conn) == []


def test_a_round_that_returns_while_its_run_is_cancelled_is_followed_by_none(conn: Conn) -> None:
    made = looped(conn)
    round_ = claimed(conn, made)
    assert cancel_run(conn, made.run) == "requested"
    finish(conn, made.worker, round_, result={"word": "again"})
    assert tree(conn, made.loop) == {"more[0]": "succeeded"}
    assert info(conn, made.loop)["status"] == "cancelled"
    assert violations(conn) == []


def test_a_round_that_is_the_end_while_its_run_is_cancelled_has_ended_the_loop(conn: Conn) -> None:
    made = looped(conn)
    round_ = claimed(conn, made)
    assert cancel_run(conn, made.run) == "requested"
    finish(conn, made.worker, round_, result={"word": "done"})
    assert info(conn, made.loop)["status"] == "succeeded"
    told(conn, made)
    assert tree(conn, made.run) == {"first": "succeeded", "more": "succeeded", "last": "cancelled"}
    assert violations(conn) == []


def test_retrying_goes_on_with_the_round_that_failed(conn: Conn) -> None:
    made = looped(conn, most=3)
    again(conn, made, 1)
    again(conn, made, 2)
    failed = claimed(conn, made)
    finish(conn, made.worker, failed, "failed")
    told(conn, made)
    assert retry_run(conn, made.run) == "reopened"
    assert violations(conn) == []
    retried = claimed(conn, made)
    assert (retried["job_id"], retried["claim_epoch"]) == (failed["job_id"], 2)
    assert progress(conn, made)["most_rounds"] == 5
    finish(conn, made.worker, retried, result={"n": 3, "word": "again"})
    again(conn, made, 4, "done")
    assert told(conn, made) == {"n": 4, "word": "done"}
    assert violations(conn) == []


def test_retrying_a_loop_that_was_exhausted_counts_its_bounds_anew(conn: Conn) -> None:
    control_clock(conn)
    stop_clock(conn)
    made = looped(conn, most=2, within=60)
    asked(conn, made, "1 hour")
    again(conn, made, 1)
    again(conn, made, 2)
    told(conn, made)
    shift_clock(conn, "2 hours")
    assert retry_run(conn, made.run) == "reopened"
    assert given(conn, made)["x"] == {"n": 2, "word": "again"}
    assert (progress(conn, made)["most_rounds"], held_in(conn, made), progress(conn, made)["counted"]) == (4, 0, 0)
    assert violations(conn) == []
    shift_clock(conn, "60 s")
    finish(conn, made.worker, running(conn), result={"n": 3})
    assert error_of(conn, made.loop)["kind"] == "time"
    told(conn, made)
    assert retry_run(conn, made.run) == "reopened"
    again(conn, made, 4, "done")
    assert told(conn, made) == {"n": 4, "word": "done"}
    assert violations(conn) == []


def test_what_the_round_that_is_retried_had_waited_before_does_not_count_again(conn: Conn) -> None:
    control_clock(conn)
    stop_clock(conn)
    made = looped(conn, within=60)
    asked(conn, made, "1 hour")
    do(conn, made.worker, "more", "failed")
    told(conn, made)
    retry_run(conn, made.run)
    assert (held_in(conn, made), progress(conn, made)["counted"]) == (0, 0)


def test_a_loop_that_was_cancelled_between_two_rounds_goes_on_with_the_next(conn: Conn) -> None:
    made = looped(conn)
    round_ = claimed(conn, made)
    cancel_run(conn, made.run)
    finish(conn, made.worker, round_, result={"n": 1, "word": "again"})
    told(conn, made)
    assert info(conn, made.run)["status"] == "cancelled"
    retry_run(conn, made.run)
    assert given(conn, made)["x"] == {"n": 1, "word": "again"}
    assert violations(conn) == []


def test_another_start_is_taken_as_long_as_no_round_has_gone_on_from_the_first(conn: Conn) -> None:
    made = looped(conn, {"n": 0})
    do(conn, made.worker, "more", "failed")
    told(conn, made)
    conn.execute("update taskq.nodes set result = '{\"n\": 9}' where run_id = %s and ix = 0", (made.run,))
    retry_run(conn, made.run)
    assert given(conn, made)["x"] == {"n": 9}
    assert violations(conn) == []


def test_another_start_is_refused_once_a_round_has_gone_on_from_the_first(conn: Conn) -> None:
    made = looped(conn, {"n": 0})
    again(conn, made, 1)
    do(conn, made.worker, "more", "failed")
    told(conn, made)
    conn.execute("update taskq.nodes set result = '{\"n\": 9}' where run_id = %s and ix = 0", (made.run,))
    with pytest.raises(psycopg.Error, match="from another start") as caught:
        retry_run(conn, made.run)
    assert caught.value.sqlstate in ("WF026", "WF034")


def test_each_round_that_succeeded_is_undone_the_last_first(conn: Conn) -> None:
    made = looped(conn, compensate=effect("undo"))
    again(conn, made, 1)
    again(conn, made, 2, "done")
    told(conn, made)
    [last] = rows(conn, "select id as job_id, claim_epoch from taskq.jobs where task = 'last'")
    finish(conn, made.worker, last, "failed")
    found = rows(
        conn, "select n.ix from taskq.effect_intents i join taskq.nodes n on n.id = i.owner_job_id order by i.id"
    )
    assert [row["ix"] for row in found] == [1, 0]
    assert violations(conn) == []
    with pytest.raises(psycopg.Error, match="not settled, or compensations") as caught:
        retry_run(conn, made.run)
    assert caught.value.sqlstate == "WF026"


def test_a_loop_that_stands_still_is_healed(conn: Conn) -> None:
    made = looped(conn)
    conn.execute("alter table taskq.history disable trigger run_goes_on")
    again(conn, made, 1)
    conn.execute("alter table taskq.history enable trigger run_goes_on")
    assert [row["answer"] for row in rows(conn, "select * from taskq.heal_runs()")] == ["healed"]
    assert given(conn, made)["x"] == {"n": 1, "word": "again"}
    assert violations(conn) == []


def test_a_round_whose_job_was_lost_gets_it_again(conn: Conn) -> None:
    made = looped(conn)
    conn.execute("delete from taskq.jobs where task = 'more'")
    assert [row["answer"] for row in rows(conn, "select * from taskq.heal_runs()")] == ["healed"]
    assert info(conn, made.loop)["active"] == 1
    again(conn, made, 1, "done")
    assert told(conn, made) == {"n": 1, "word": "done"}
    assert violations(conn) == []


def test_a_loop_is_forgotten_whole(conn: Conn) -> None:
    control_clock(conn)
    made = looped(conn, within=60)
    asked(conn, made, "1 s")
    again(conn, made, 1, "done")
    told(conn, made)
    [last] = rows(conn, "select id as job_id, claim_epoch from taskq.jobs where task = 'last'")
    finish(conn, made.worker, last)
    assert one(conn, "select count(*) from taskq.loop_holds") == 1
    conn.execute("update taskq.runs set finished_at = finished_at - interval '1 year'")
    assert one(conn, "select taskq.prune_runs() + taskq.prune_runs()") == 2
    assert one(conn, "select count(*) from taskq.loop_holds") == 0
    assert one(conn, "select count(*) from taskq.nodes") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"most": 0},
        {"most": 10_001},
        {"item": "y"},
        {"path": "word"},
        {"ends": []},
        {"within": -1},
        {"within": None},
        {"exhausted": "stop"},
        {"exhausted": None},
    ],
)
def test_a_loop_that_is_none_is_not_stored(conn: Conn, wrong: dict[str, Any]) -> None:
    bounds = {"item": "x", "most": 5, "path": ["word"], "ends": ["done"], "exhausted": "fail", "within": 5, **wrong}
    with pytest.raises(psycopg.Error, match="its loop is not valid") as caught:
        store(conn, [node("more", {"x": {"input": "x"}})], loop=bounds, parameters=["x"])
    assert caught.value.sqlstate == "WF024"


def test_loops_stand_in_loops(conn: Conn) -> None:
    """A round of the outer one is a run with a loop."""
    worker = worker_for(conn)
    bounds = {"item": "x", "most": 3, "path": ["word"], "ends": ["done"], "exhausted": "fail"}
    args = {"x": {"input": "x", "path": []}}
    more = store(conn, [node("more", args)], workflow="in:more", loop=bounds, parameters=["x"])
    inner = store(
        conn,
        [node("in", args, task=LOOP, child=more)],
        workflow="in",
        parameters=["x"],
        result={"node": 0, "path": ["out"]},
    )
    rounds = store(conn, [node("out", args, task="in:await", child=inner)], workflow="o", loop=bounds, parameters=["x"])
    run = start(conn, store(conn, [node("all", {"x": {"value": 1}}, task="o:await", child=rounds)], workflow="outer"))
    for last in ("again", "done"):
        do(conn, worker, "more", result={"word": "again"})
        do(conn, worker, "more", result={"word": "done", "out": {"word": last}})
        do(conn, worker, LOOP, result={"word": "done", "out": {"word": last}})
        do(conn, worker, "in:await", result={"word": last})
        assert violations(conn) == []
    do(conn, worker, "o:await", result={"word": "done"})
    assert info(conn, run)["status"] == "succeeded"


def test_several_loops_begin_at_once(conn: Conn) -> None:
    bounds = {"item": "x", "most": 3, "path": [], "ends": [True], "exhausted": "fail"}
    inner = store(conn, [node("more", {"x": {"input": "x"}})], workflow="flow:more", loop=bounds, parameters=["x"])
    start(conn, store(conn, [node(name, {"x": {"value": False}}, task=LOOP, child=inner) for name in ("a", "b")]))
    assert one(conn, "select count(*) from taskq.jobs where task = 'more' and status = 'pending'") == 2
    assert violations(conn) == []

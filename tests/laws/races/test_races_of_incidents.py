"""Recoverers, owners, operators and preparations at once: one of them is first, and the others see what it did."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
from incidents_kit import FAILED, answer, begin, current, events, grant, holding, pair, prepare
from psycopg.types.json import Jsonb
from runs_kit import edge, finish, info, job_of, node, start, store, take, tree, worker_for
from sql import BOUND, Conn, End, attempts, end, exchange, get, lose, one, rows, sessions, violations

PAUSE = "select taskq.pause_run(%s, 'why', 'me')"
RESUME = "select taskq.resume_run(%s, 'well', 'me')"
HOLD = "select taskq.hold_exhausted(%s)"
Call = Callable[[Conn], Any]


def race(dsn: str, first: Call, second: Call) -> tuple[Any, Any]:
    """The second begins before the first has committed, and waits for it."""
    with sessions(dsn) as [winner, loser]:
        winner.begin()
        won = winner.do(first)
        waiting = loser.start(second)
        loser.waits_for(winner)
        winner.commit()
        return won, waiting.result(BOUND)


def answered(call: Call) -> Call:
    """What a call answers, or the SQLSTATE with which it is refused."""

    def asked(conn: Conn) -> Any:
        try:
            return call(conn)
        except psycopg.Error as exc:
            return exc.sqlstate

    return asked


def claimed(conn: Conn, *, recoveries: int = 0) -> tuple[UUID, UUID, dict[str, Any]]:
    run, worker = pair(conn, recoveries), worker_for(conn)
    [claim] = take(conn, worker, "a").values()
    return run, worker, claim


def test_two_who_recover_the_same_job_hold_it_once(dsn: str, conn: Conn) -> None:
    run, worker, claim = claimed(conn)
    job = claim["job_id"]
    lose(conn, worker)
    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(lambda c: one(c, HOLD, job)) == "held"
        # Nobody is waited for: it is found again.
        assert second.do(lambda c: one(c, HOLD, job)) == "busy"
        first.commit()
        assert second.do(lambda c: one(c, HOLD, job)) == "settled"
    assert (events(conn, current(conn, job)["id"]), info(conn, run)["status"]) == (["failed"], "paused")
    assert violations(conn) == []


@pytest.mark.parametrize("first", ["owner", "recoverer"])
def test_the_late_end_of_a_lost_owner_and_a_recoverer_agree(dsn: str, conn: Conn, first: str) -> None:
    run, worker, claim = claimed(conn)
    job = claim["job_id"]
    lose(conn, worker)

    def ends(c: Conn) -> Any:
        return [row["kind"] for row in exchange(c, worker, [End(job, 1)])]

    def holds(c: Conn) -> Any:
        return one(c, HOLD, job)

    if first == "owner":
        with sessions(dsn) as [ending, recovering]:
            ending.begin()
            assert ending.do(ends) == []
            assert recovering.do(holds) == "busy"
            ending.commit()
            assert recovering.do(holds) == "settled"
        assert (attempts(conn, job), tree(conn, run)["b"]) == ([(1, "succeeded")], "pending")
    else:
        # Its run is busy: the end is sent again, and is fenced out then.
        with sessions(dsn) as [recovering, ending]:
            recovering.begin()
            assert recovering.do(holds) == "held"
            assert ending.do(ends) == ["busy"]
            recovering.commit()
        assert ends(conn) == ["missed"]
        assert (attempts(conn, job), info(conn, run)["status"]) == ([(1, "lost")], "paused")
    assert violations(conn) == []


def test_two_recoverers_and_an_owner_a_hundred_times(dsn: str, conn: Conn) -> None:
    """Whoever is first: the attempt ends once, and the run has either gone on or is paused with an incident."""
    worker = worker_for(conn)
    seen: set[str] = set()
    for _ in range(100):
        run = pair(conn, 0)
        [claim] = take(conn, worker, "a").values()
        job = claim["job_id"]
        conn.execute("update taskq.workers set status = 'lost', ended_at = now() where id = %s", (worker,))
        barrier = threading.Barrier(3)
        wrong: list[BaseException] = []

        def at_once(call: Call) -> None:
            try:
                with psycopg.connect(dsn, autocommit=True) as mine:  # noqa: B023
                    barrier.wait(BOUND)  # noqa: B023
                    call(mine)
            except BaseException as exc:
                wrong.append(exc)  # noqa: B023

        def recovers(c: Conn) -> None:
            for row in rows(c, "select job_id, settled from taskq.settle_lost()"):
                if row["settled"] == "exhausted":
                    one(c, HOLD, row["job_id"])

        def ends(c: Conn) -> None:
            while [row["kind"] for row in exchange(c, worker, [End(job, 1)])] == ["busy"]:  # noqa: B023
                pass

        threads = [threading.Thread(target=at_once, args=(call,)) for call in (recovers, recovers, ends)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)
        assert wrong == []
        # A recoverer that found the run busy is not asked again here: the next one does it.
        recovers(conn)
        [(_, outcome)] = attempts(conn, job)
        seen.add(outcome)
        if outcome == "lost":
            assert (get(conn, job)["held_reason"], info(conn, run)["status"]) == ("incident", "paused")
            assert events(conn, current(conn, job)["id"]) == ["failed"]
        else:
            assert (outcome, tree(conn, run)["b"], info(conn, run)["status"]) == ("succeeded", "pending", "running")
        conn.execute("update taskq.workers set status = 'live', ended_at = null where id = %s", (worker,))
        one(conn, "select taskq.cancel_run(%s)", run)
    assert seen <= {"lost", "succeeded"}
    assert violations(conn) == []


def test_two_grants_of_one_incident_allow_one(dsn: str, conn: Conn) -> None:
    _, worker, _ = claimed(conn)
    run = pair(conn, 0)
    claim, _ = prepare(conn, worker, "a", "failed", FAILED)
    incident = current(conn, claim["job_id"])["id"]
    assert race(dsn, lambda c: grant(c, incident), lambda c: grant(c, incident)) == ("granted", "already")
    assert (events(conn, incident), info(conn, run)["status"], violations(conn)) == (
        ["failed", "granted"],
        "running",
        [],
    )


@pytest.mark.parametrize("first", ["grant", "other"])
@pytest.mark.parametrize("other", ["cancel", "pause", "resume", "cancel the job"])
def test_a_grant_beside_what_another_operator_does(dsn: str, conn: Conn, first: str, other: str) -> None:
    worker = worker_for(conn)
    run = pair(conn, 0)
    claim, _ = prepare(conn, worker, "a", "failed", FAILED)
    job = claim["job_id"]
    incident = current(conn, job)["id"]
    queries = {"cancel": "select taskq.cancel_run(%s)", "pause": PAUSE, "resume": RESUME}
    calls = [
        answered(lambda c: grant(c, incident)),
        (lambda c: one(c, "select taskq.cancel(%s)", job))
        if other == "cancel the job"
        else answered(lambda c: one(c, queries[other], run)),
    ]
    if first == "other":
        calls.reverse()
    answers = race(dsn, *calls)
    expected = {
        ("cancel", "grant"): ("granted", "cancelled"),
        ("cancel", "other"): ("cancelled", "WF044"),
        ("pause", "grant"): ("granted", "paused"),
        ("pause", "other"): ("already", "granted"),
        ("resume", "grant"): ("granted", "not_paused"),
        ("resume", "other"): ("resumed", "granted"),
        ("cancel the job", "grant"): ("granted", "cancelled"),
        ("cancel the job", "other"): ("cancelled", "WF044"),
    }
    assert answers == expected[other, first]
    if other == "pause" and first == "grant":
        assert tree(conn, run)["a"] == "held"
        one(conn, RESUME, run)
    if other in ("pause", "resume"):
        assert prepare(conn, worker, "a", "ready")[1] == "ready"
    assert violations(conn) == []


@pytest.mark.parametrize("first", ["ready", "other"])
@pytest.mark.parametrize("other", ["cancel", "pause"])
def test_an_answer_of_ready_beside_a_cancel_or_a_pause(dsn: str, conn: Conn, first: str, other: str) -> None:
    run, worker, claim = claimed(conn)
    begin(conn, worker, claim)
    query = {"cancel": "select taskq.cancel_run(%s)", "pause": PAUSE}[other]
    calls: list[Call] = [lambda c: answer(c, worker, claim, "ready")["became"], lambda c: one(c, query, run)]
    if first == "other":
        calls.reverse()
    # A pause touches no job that runs, and a claim that it has not seen is as if it had begun before.
    waits = other == "cancel" or first == "other"
    with sessions(dsn) as [winner, loser]:
        winner.begin()
        won = winner.do(calls[0])
        waiting = loser.start(calls[1])
        if waits and other == "cancel":
            loser.waits_for(winner)
        winner.commit()
        answers = (won, waiting.result(BOUND))
    if other == "cancel":
        assert answers == (("ready", "requested") if first == "ready" else ("requested", "cancelled"))
    else:
        assert answers in (("ready", "paused"), ("paused", "paused"), ("paused", "ready"))
    ready = answers[0 if first == "ready" else 1] == "ready"
    assert (get(conn, claim["job_id"])["status"] == "running") == (ready or other == "cancel")
    assert violations(conn) == []


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_facts_that_two_preparations_set_at_once_are_set_by_one(dsn: str, conn: Conn, level: str) -> None:
    run = start(conn, store(conn, [node("a"), node("b")]))
    worker = worker_for(conn)
    claims = take(conn, worker, "a", "b")
    for each in claims.values():
        begin(conn, worker, each)
    facts = {name: {"facts": {"x": {"seen": 0, "value": name}, "y": {"seen": 0, "value": name}}} for name in "ab"}
    with sessions(dsn) as [one_of_them, other]:
        one_of_them.begin()
        one_of_them.do(lambda c: answer(c, worker, claims["a"], "ready", facts["a"]))
        if level != "read committed":
            other.do(lambda c: c.execute(f"begin isolation level {level}"))
            other.do(lambda c: rows(c, "select 1 from taskq.facts"))
        waiting = other.start(answered(lambda c: answer(c, worker, claims["b"], "ready", facts["b"])["became"]))
        other.waits_for(one_of_them)
        one_of_them.commit()
        if level == "read committed":
            assert waiting.result(BOUND) == "ready"
        else:
            assert waiting.result(BOUND) in ("40001", "ready")
            other.rollback()
    found = rows(conn, "select name, value, version from taskq.facts where owner = %s order by name", run)
    assert [(row["name"], row["value"], row["version"]) for row in found] == [("x", "a", 1), ("y", "a", 1)]


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_two_preparations_of_one_tree_that_fail_at_once_both_hold_their_node(dsn: str, conn: Conn, level: str) -> None:
    of = {"policy_id": holding(conn, 0)}
    run = start(conn, store(conn, [node("a", **of), node("b", **of)], on_failure="finish"))
    worker = worker_for(conn)
    claims = take(conn, worker, "a", "b")
    for each in claims.values():
        begin(conn, worker, each)

    def fails(name: str) -> Call:
        return lambda c: answer(c, worker, claims[name], "failed", FAILED)["became"]

    with sessions(dsn) as [first, second]:
        first.begin()
        assert first.do(fails("a")) == "held"
        second.do(lambda c: c.execute(f"begin isolation level {level}"))
        second.do(lambda c: rows(c, "select 1 from taskq.runs"))
        # It waits for nobody, and is told again.
        waiting = second.start(answered(fails("b")))
        first.commit()
        got = waiting.result(BOUND)
        if level == "read committed":
            second.commit()
        else:
            second.rollback()
            assert got == "40001"
            got = second.do(fails("b"))
    assert (got, tree(conn, run)) == ("held", {"a": "held", "b": "held"})
    [pause] = rows(conn, "select incident from taskq.run_pauses")
    assert pause["incident"] == current(conn, job_of(conn, run, "a"))["id"]
    # The first one's pause is over with its grant; the other is held by its own incident.
    grant(conn, pause["incident"])
    assert (info(conn, run)["status"], tree(conn, run)["b"]) == ("running", "held")
    assert grant(conn, current(conn, job_of(conn, run, "b"))["id"]) == "granted"
    assert (tree(conn, run), violations(conn)) == ({"a": "pending", "b": "pending"}, [])


def test_a_parent_that_is_paused_while_a_node_of_its_child_is_held(dsn: str, conn: Conn) -> None:
    inner = store(conn, [node("x", policy_id=holding(conn, 0)), node("y")], [edge(0, 1)], workflow="inner")
    run = start(conn, store(conn, [node("kid", task="inner:await", child=inner), node("z")]))
    worker = worker_for(conn)
    [claim] = take(conn, worker, "x").values()
    begin(conn, worker, claim)
    child = one(conn, "select id from taskq.runs where parent_run = %s", run)
    with sessions(dsn) as [pausing, preparing]:
        pausing.begin()
        assert pausing.do(lambda c: one(c, PAUSE, run)) == "paused"
        waiting = preparing.start(lambda c: answer(c, worker, claim, "failed", FAILED)["became"])
        pausing.commit()
        assert waiting.result(BOUND) == "held"
    assert (info(conn, run)["status"], info(conn, child)["status"]) == ("paused", "paused")
    assert rows(conn, "select incident from taskq.run_pauses where incident is not null") == []
    incident = current(conn, claim["job_id"])["id"]
    # The other way round: what is resumed above, and what is granted below.
    answers = race(dsn, lambda c: grant(c, incident), lambda c: one(c, RESUME, run))
    assert answers == ("paused", "resumed")
    claim, became = prepare(conn, worker, "x", "ready")
    assert became == "ready"
    finish(conn, worker, claim)
    assert violations(conn) == []


def test_an_end_of_the_owner_while_it_is_granted_nothing_is_lost(dsn: str, conn: Conn) -> None:
    """A claim of what was granted, and another grant at the same moment: the first is used, the second refused."""
    run, worker, claim = claimed(conn)
    lose(conn, worker)
    one(conn, HOLD, claim["job_id"])
    incident = current(conn, claim["job_id"])["id"]
    grant(conn, incident)
    other = worker_for(conn)
    answers = race(dsn, lambda c: list(take(c, other, "a")), answered(lambda c: grant(c, incident)))
    assert answers == (["a"], "WF044")
    assert end(conn, other, End(claim["job_id"], 2)) == 1
    assert (tree(conn, run)["a"], violations(conn)) == ("succeeded", [])


def test_what_is_ready_in_a_pause_that_ends_just_now_is_not_left_held(dsn: str, conn: Conn) -> None:
    """The end of the pause holds the root lock, and has seen the job running: so ready is told again after it."""
    run, worker, claim = claimed(conn)
    begin(conn, worker, claim)
    one(conn, PAUSE, run)
    query = "select became from taskq.end_preparation(%s, %s, 1, 'ready', '{}')"
    with sessions(dsn) as [resuming, preparing]:
        resuming.begin()
        assert resuming.do(lambda c: one(c, RESUME, run)) == "resumed"
        assert preparing.do(lambda c: one(c, query, worker, claim["job_id"])) == "busy"
        resuming.commit()
        assert preparing.do(lambda c: one(c, query, worker, claim["job_id"])) == "ready"
    assert (get(conn, claim["job_id"])["status"], violations(conn)) == ("running", [])


def test_one_whose_run_somebody_is_at_keeps_no_other_from_its_answer(dsn: str, conn: Conn) -> None:
    run, worker, claim = claimed(conn)
    begin(conn, worker, claim)
    query = "select became from taskq.end_preparation(%s, %s, 1, 'failed', %s)"
    told = (worker, claim["job_id"], Jsonb(FAILED))
    with sessions(dsn) as [other, preparing]:
        other.begin()
        other.do(lambda c: rows(c, "select 1 from taskq.runs where id = %s for update", run))
        assert preparing.do(lambda c: one(c, query, *told)) == "busy"
        other.rollback()
        assert preparing.do(lambda c: one(c, query, *told)) == "held"
    assert violations(conn) == []

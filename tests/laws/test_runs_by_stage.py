"""What a run and its effects are at each stage, whoever finds the end of a node, and however often it is told."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from effects_kit import EVERY, effect
from emits_kit import plan_of as plan_of_emit
from maps_kit import mapped
from runs_kit import do, edge, finish, info, job_of, kinds, node, result_of, start, store, take, tree, worker_for
from sql import (
    End,
    attempts,
    claim,
    enqueue,
    exchange,
    get,
    lose,
    one,
    policy,
    refused,
    resolve,
    rows,
    settle,
    start_effects,
    violations,
)

Conn = psycopg.Connection[Any]


def stage(conn: Conn, run: UUID) -> tuple[str, str, list[tuple[str, str]], bool]:
    """The node, its run, the effects with the state of each, and whether all is settled."""
    found = rows(conn, "select name, status, settled from taskq.effects order by name")
    effects = [(row["name"], row["status"]) for row in found]
    left = one(conn, "select count(*) from taskq.unsettled_effects where run_id = %s", run)
    assert left == sum(not row["settled"] for row in found)
    return tree(conn, run)["a"], info(conn, run)["status"], effects, left == 0


def test_status_and_effects_stage_by_stage(dsn: str) -> None:
    tell = effect("tell", ("failed",), task="tell", payload={})
    with psycopg.connect(dsn) as conn, psycopg.connect(dsn, autocommit=True) as other:
        worker = worker_for(conn)
        run = start(conn, store(conn, [node("a"), node("b")], [edge(0, 1)], effects=[tell]))
        a = take(conn, worker, "a")["a"]
        conn.commit()
        assert stage(other, run) == ("running", "running", [], True)
        finish(conn, worker, a, "failed")
        assert stage(conn, run) == ("failed", "failed", [("tell", "pending")], False)
        # None of it is there for others before all of it is.
        assert stage(other, run) == ("running", "running", [], True)
        conn.commit()
        assert stage(other, run) == ("failed", "failed", [("tell", "pending")], False)
        [made] = rows(other, "select job_id from taskq.effect_intents where owner_job_id = %s", run)
        assert one(other, "select count(*) from taskq.effect_intents") == 1
        told = take(conn, worker, "tell")["tell"]
        assert told["job_id"] == made["job_id"]
        conn.commit()
        # It runs after its run has ended, and its run stays as it ended.
        assert stage(other, run) == ("failed", "failed", [("tell", "running")], False)
        finish(conn, worker, told)
        conn.commit()
        assert stage(other, run) == ("failed", "failed", [("tell", "succeeded")], True)
        assert violations(other) == []


@pytest.mark.parametrize(("how", "became"), [("fail", "blocked"), ("collect", "pending"), ("skip", "skipped")])
@pytest.mark.parametrize("found", ["overdue", "spent", "lost"])
def test_a_failure_that_a_sweep_finds_releases_what_waits_for_it(conn: Conn, found: str, how: str, became: str) -> None:
    worker = worker_for(conn)
    takes = {"x": {"outcome": 0, "path": []}} if how == "collect" else {"x": result_of(0)}
    named = policy(conn, "once", max_recoveries=0)
    nodes = [node("a", policy_id=named), node("b", takes), node("c")]
    run = start(conn, store(conn, nodes, [edge(0, 1, how)], on_failure="finish"))
    job = job_of(conn, run, "a")
    if found == "lost":
        take(conn, worker, "a")
        lose(conn, worker)
        assert settle(conn) == {job: "failed"}
    else:
        change = "deadline = now() - interval '1 s'" if found == "overdue" else "attempt = max_attempts"
        conn.execute(f"update taskq.jobs set {change} where id = %s", (job,))
        assert rows(conn, "select job_id, settled from taskq.sweep()") == [{"job_id": job, "settled": "failed"}]
    assert tree(conn, run) == {"a": "failed", "b": became, "c": "pending"}
    if how == "collect":
        kind = {"overdue": "DeadlineExceeded", "spent": "AttemptsExhausted", "lost": "RecoveryExhausted"}[found]
        payload = get(conn, job_of(conn, run, "b"))["payload"]
        assert (payload["x"]["status"], payload["x"]["error"]["type"]) == ("failed", kind)
    assert violations(conn) == []


@pytest.mark.parametrize("outcomes", [("succeeded", "succeeded"), ("failed", "failed"), ("succeeded", "failed")])
def test_two_parents_that_end_in_one_statement_count_as_two(conn: Conn, outcomes: tuple[str, str]) -> None:
    worker = worker_for(conn)
    outcome_of = [{"outcome": ix, "path": ["status"]} for ix in range(3)]
    nodes = [node("a"), node("b"), node("d"), node("c", {"all": {"list": outcome_of}})]
    run = start(conn, store(conn, nodes, [edge(ix, 3, "collect") for ix in range(3)], on_failure="finish"))
    claims = take(conn, worker, "a", "b", "d")
    both = [
        End(claims[task]["job_id"], 1, outcome, n, error=None if outcome == "succeeded" else {"type": "Boom"})
        for n, (task, outcome) in enumerate(zip("ab", outcomes, strict=True))
    ]
    assert exchange(conn, worker, both) == []
    assert one(conn, "select unmet from taskq.nodes where run_id = %s and ix = 3", run) == 1
    assert take(conn, worker, "c") == {}
    finish(conn, worker, claims["d"])
    assert one(conn, "select unmet from taskq.nodes where run_id = %s and ix = 3", run) == 0
    [c] = take(conn, worker, "c").values()
    assert c["payload"] == f'{{"all": ["{outcomes[0]}", "{outcomes[1]}", "succeeded"]}}'
    finish(conn, worker, c)
    assert attempts(conn, c["job_id"]) == [(1, "succeeded")]
    assert violations(conn) == []


def test_two_parents_that_are_skipped_in_one_statement_count_as_two(conn: Conn) -> None:
    worker = worker_for(conn)
    nodes = [node("way"), node("a"), node("b"), node("d"), node("c")]
    arms = [edge(0, ix, when={"path": [], "equals": True}) for ix in (1, 2)]
    run = start(conn, store(conn, nodes, [*arms, *(edge(ix, 4, "collect") for ix in (1, 2, 3))]))
    do(conn, worker, "way", result=False)
    assert tree(conn, run) == {"way": "succeeded", "a": "skipped", "b": "skipped", "d": "pending", "c": "waiting"}
    assert one(conn, "select unmet from taskq.nodes where run_id = %s and ix = 4", run) == 1
    do(conn, worker, "d")
    assert one(conn, "select unmet from taskq.nodes where run_id = %s and ix = 4", run) == 0
    do(conn, worker, "c")
    assert attempts(conn, job_of(conn, run, "c")) == [(1, "succeeded")]
    assert info(conn, run)["status"] == "succeeded"
    assert violations(conn) == []


def test_a_member_that_ran_twice_ends_once(conn: Conn) -> None:
    first = worker_for(conn)
    run = start(conn, store(conn, [node("a"), node("b", {"x": result_of(0)})], [edge(0, 1)]))
    claimed = take(conn, first, "a")["a"]
    lose(conn, first)
    assert settle(conn) == {claimed["job_id"]: "pending"}
    second = worker_for(conn)
    again = take(conn, second, "a")["a"]
    assert again["claim_epoch"] == 2
    finish(conn, second, again, result="of the second")
    # The first tells its end all the same, once before and once after what follows has run.
    late = End(claimed["job_id"], 1, "succeeded", 77, result="of the first")
    assert [row["kind"] for row in exchange(conn, first, [late])] == ["missed"]
    [b] = take(conn, second, "b").values()
    assert b["payload"] == '{"x": "of the second"}'
    finish(conn, second, b)
    assert [row["kind"] for row in exchange(conn, first, [late])] == ["missed"]
    assert attempts(conn, claimed["job_id"]) == [(1, "lost"), (2, "succeeded")]
    assert attempts(conn, b["job_id"]) == [(1, "succeeded")]
    assert kinds(conn, run) == ["admitted", "ready", "lost", "ended", "ready", "ended", "finished"]
    assert violations(conn) == []


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_what_a_node_promises_for_its_own_end_commits_with_it_whatever_becomes_of_the_run(conn: Conn, how: str) -> None:
    """A terminal effect of the node's own policy, beside those of its run."""
    worker = worker_for(conn)
    named = policy(conn, "promising", effects=[effect("own", EVERY, task="own", payload={})])
    run = start(conn, store(conn, [node("a", policy_id=named), node("b")], on_failure="finish"))
    if how == "failed":
        do(conn, worker, "a", "failed")
    else:
        assert one(conn, "select taskq.cancel(%s)", job_of(conn, run, "a")) == "cancelled"
    [intent] = rows(conn, "select owner_job_id, name, on_status, status from taskq.effects")
    assert intent == {"owner_job_id": job_of(conn, run, "a"), "name": "own", "on_status": how, "status": "pending"}
    assert info(conn, run)["status"] == "running"
    assert violations(conn) == []


def test_nodes_that_are_ready_together_are_claimed_by_number_within_their_priority(conn: Conn) -> None:
    """Under the policy that the run names: the same in every run of a plan, whatever the order of the ends before."""
    worker = worker_for(conn)
    urgent = {3: 7, 6: 7, 1: 2}
    nodes = [node("first"), *(node(f"n{ix}", task="t", priority=urgent.get(ix, 5)) for ix in range(1, 8))]
    plan = store(conn, nodes, [edge(0, ix) for ix in range(1, 8)])
    for _ in range(3):
        run = start(conn, plan)
        do(conn, worker, "first")
        claimed = rows(conn, "select ix from taskq.nodes where run_id = %s order by ix", run)
        by_job = {job_of(conn, run, f"n{ix}"): ix for ix in range(1, len(claimed))}
        order = []
        while claims := claim(conn, worker, 1, tasks=["t"], lanes=[("q", priority) for priority in (7, 5, 2)]):
            order += [by_job[row["job_id"]] for row in claims]
        assert order == [3, 6, 2, 4, 5, 7, 1]
        assert info(conn, run)["scheduling"] == "number/1"
    assert refused(conn, "update taskq.runs set scheduling = 'number/2'") == "23514"


@pytest.mark.parametrize("happened", [True, False])
def test_what_waits_on_a_node_whose_outcome_is_unknown_waits_visibly(conn: Conn, happened: bool) -> None:
    worker = worker_for(conn)
    nodes = [node("pay", effect_class="side_effecting"), node("ship", {"x": result_of(0)})]
    run = start(conn, store(conn, nodes, [edge(0, 1)]))
    pay = take(conn, worker, "pay")["pay"]
    start_effects(conn, worker, (pay["job_id"], 1))
    lose(conn, worker)
    assert settle(conn) == {pay["job_id"]: "unknown"}
    seen = rows(conn, "select name, status, waits_for from taskq.blocked_nodes where run_id = %s order by name", run)
    assert seen == [
        {"name": "pay", "status": "unknown", "waits_for": None},
        {"name": "ship", "status": "waiting", "waits_for": ["pay"]},
    ]
    assert info(conn, run)["status"] == "recovering"
    assert resolve(conn, pay["job_id"], happened, result="paid" if happened else None)
    if happened:
        assert tree(conn, run) == {"pay": "succeeded", "ship": "pending"}
        assert get(conn, job_of(conn, run, "ship"))["payload"] == {"x": "paid"}
    else:
        assert tree(conn, run) == {"pay": "pending", "ship": "waiting"}
    assert violations(conn) == []


ENDS = [
    "succeeded", "failed", "cancelled", "retry", "retry_after", "snooze", "release", "retry_after_spent",
    "snooze_spent", "unknown", "lost", "fenced out", "past its deadline",
]  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_an_attempt_of_a_node_ends_like_that_of_any_job(conn: Conn, how: str) -> None:
    worker = worker_for(conn)
    deadline = {"deadline_in": 30} if how == "past its deadline" else {}
    plain = enqueue(conn, task="plain", max_attempts=3, **deadline)
    plan = store(conn, [node("a", max_attempts=3, **deadline), node("b")], [edge(0, 1)], on_failure="finish")
    run = start(conn, plan)
    member = job_of(conn, run, "a")
    claims = take(conn, worker, "plain", "a")
    if how == "lost":
        lose(conn, worker)
        settle(conn)
    else:
        outcome, delay = ("retry", 60.0) if how == "past its deadline" else (how, 0.0)
        epoch = 7 if how == "fenced out" else 1
        error = None if how == "succeeded" else {"type": "Boom", "message": "boom"}
        told = "succeeded" if how == "fenced out" else outcome
        ends = [End(claims[t]["job_id"], epoch, told, n, error=error, delay=delay) for n, t in enumerate(claims)]
        answer = exchange(conn, worker, ends)
        assert [row["kind"] for row in answer] == (["missed"] * 2 if how == "fenced out" else [])
    same = ("status", "claim_epoch", "attempt", "recoveries", "retry_afters", "snoozes", "releases")
    job, other = get(conn, member), get(conn, plain)
    assert {name: job[name] for name in same} == {name: other[name] for name in same}
    assert (job["error"] or {}).get("type") == (other["error"] or {}).get("type")
    assert attempts(conn, member) == attempts(conn, plain)
    # The node is what its job is, and what waits for it goes on only with an end.
    assert tree(conn, run)["a"] == job["status"]
    after = {"succeeded": "pending", "failed": "blocked", "cancelled": "blocked"}
    assert tree(conn, run)["b"] == after.get(job["status"], "waiting")
    assert violations(conn) == []


def test_the_ids_of_nodes_are_in_the_order_of_their_numbers_though_all_are_made_in_one_instant(conn: Conn) -> None:
    """By these ids they are claimed: without a clock that tells them apart, in the order of the plan all the same."""
    conn.execute(
        "create or replace function taskq.new_id() returns uuid language sql volatile as"
        " $$ select ('01a22e61-1313-7000-8' || substr(gen_random_uuid()::text, 21))::uuid $$"
    )
    worker = worker_for(conn)
    graph = start(conn, store(conn, [node(f"n{ix}", task="t") for ix in range(20)]))
    made = mapped(conn, list(range(20)))
    emit = start(conn, plan_of_emit(conn, ahead=20))
    do(conn, worker, "first", result="here")
    do(conn, worker, "list", result={"items": list(range(20)), "cursor": None})
    query = (
        "select array_agg(n.ix order by n.id) as found from taskq.nodes n join taskq.runs r on r.id = n.run_id"
        " where n.ix < 1000000 and (r.id = any(%s) or r.parent_run = any(%s)) group by n.run_id having count(*) = 20"
    )
    runs = [graph, made.run, emit]
    assert [row["found"] for row in rows(conn, query, runs, runs)] == [list(range(20))] * 3

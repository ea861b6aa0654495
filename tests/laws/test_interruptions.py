"""Random interruptions of a run: it ends as one that nobody interrupted, or says what it waits for, with the command.

Each seed is a life: nodes are prepared with whatever answer, workers are lost at any moment, outcomes become unknown,
somebody pauses and resumes; after each of these the laws hold. Then the interruptions end, and what the database names
as the commands that go on is done, and nothing else: that alone must bring the run to its end.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any
from uuid import UUID

import pytest
from incidents_kit import answer, begin, grant, holding
from maps_kit import MAP
from psycopg.types.json import Jsonb
from runs_kit import edge, finish, info, node, result_of, start, store, worker_for
from sql import Conn, claim, lose, one, rows, start_effects, violations

SEEDS = int(os.environ.get("TASKQ_PROPERTY_EXAMPLES") or 25)
OPERATIONS = 60
SIDE: dict[str, Any] = {"effect_class": "side_effecting", "required_worker_schema": 2}
TASKS = ("a", "b", "c", "d", "e", "x", "y", "inner:await", "each", MAP)
REASON = "the test says so"


def plan(conn: Conn) -> str:
    """Two in a row beside one with an effect, which meet; behind them a child run, and a map over what that gave."""
    of = {"policy_id": holding(conn, 1)}
    inner = store(
        conn,
        [node("x", **of), node("y", {"x": result_of(0)}, **of, **SIDE)],
        [edge(0, 1)],
        workflow="inner",
        result=result_of(1),
    )
    each = store(
        conn,
        [node("each", {"n": {"input": "n", "path": []}}, **of)],
        workflow="flow:each",
        map={"item": "n", "most": 9, "at_once": 2},
        parameters=["n"],
    )
    nodes = [
        node("a", **of),
        node("b", {"a": result_of(0)}, **of),
        node("c", **of, **SIDE),
        node("d", {"b": result_of(1), "c": result_of(2)}, **of),
        node("kid", {"d": result_of(3)}, task="inner:await", child=inner),
        node("over", {"n": {"value": [1, 2, 3]}, "k": result_of(4)}, task=MAP, child=each),
        node("e", {"all": result_of(5)}, **of),
    ]
    edges = [edge(0, 1), edge(1, 3), edge(2, 3), edge(3, 4), edge(4, 5), edge(5, 6)]
    return store(conn, nodes, edges, result=result_of(6))


def gives(task: str, payload: Any) -> Any:
    """What a body returns: the same for the same arguments."""
    return f"{task}({payload})" if task != MAP else 3


class Life:
    """One run, what happens to it, and the operator who follows the commands."""

    def __init__(self, conn: Conn, run: UUID, r: Random) -> None:
        self.conn = conn
        self.run = run
        self.r = r
        self.worker = worker_for(conn)
        self.claims: list[dict[str, Any]] = []
        self.said: list[str] = []

    def interrupt(self) -> None:
        """Something happens."""
        r = self.r
        what = r.choices(["go on", "lose", "pause", "resume", "decide", "leader", "grant"], [14, 2, 1, 1, 1, 2, 1])[0]
        self.said.append(what)
        if what == "go on":
            self.go_on(well=0.5)
        elif what == "lose":
            lose(self.conn, self.worker)
            self.claims = []
            self.worker = worker_for(self.conn)
        elif what == "pause":
            one(self.conn, "select taskq.pause_run(%s, %s, 'me', 'audit')", r.choice(self.live()), REASON)
        elif what == "resume":
            for row in rows(self.conn, "select resume from taskq.paused_runs limit 1"):
                one(self.conn, "select taskq.resume_run(%s, %s, 'me')", row["resume"], REASON)
        elif what == "decide":
            self.decide()
        elif what == "grant":
            waits = "select incident_id from taskq.open_incidents where is_current and status = 'exhausted' limit 1"
            for row in rows(self.conn, waits):
                grant(self.conn, row["incident_id"])
        else:
            self.lead()

    def live(self) -> list[UUID]:
        return [row["id"] for row in rows(self.conn, "select id from taskq.runs where finished_at is null order by id")]

    def lead(self) -> None:
        """What the leader does, by what it finds and not by what it was told."""
        skip: list[UUID] = []
        while found := rows(self.conn, "select job_id, settled from taskq.settle_lost(1, %s)", skip):
            for row in found:
                if row["settled"] == "exhausted":
                    skip.append(row["job_id"])
                    assert one(self.conn, "select taskq.hold_exhausted(%s)", row["job_id"]) == "held"
        while rows(self.conn, "select * from taskq.carry_on_run()"):
            pass
        assert rows(self.conn, "select * from taskq.heal_runs() where answer = 'healed'") == []

    def decide(self) -> None:
        """What a hook, or somebody, finds out about an outcome: as it was, which the record of this test says."""
        for row in rows(self.conn, "select id, task, payload, claim_epoch from taskq.jobs where status = 'unknown'"):
            if self.r.random() < 0.5:
                result = Jsonb(gives(row["task"], row["payload"]))
                one(self.conn, "select taskq.resolve(%s, true, %s, %s, 'me')", row["id"], result, REASON)
            else:
                query = "select taskq.answer_reconcile(%s, %s, false, null, 'asked', 'hook', null)"
                one(self.conn, query, row["id"], row["claim_epoch"])

    def claim(self) -> bool:
        # What comes back after a moment is due now.
        self.conn.execute("update taskq.jobs set run_at = now() where status = 'pending' and run_at > now()")
        found = claim(self.conn, self.worker, self.r.randint(1, 3), tasks=TASKS)
        if not found and not self.claims:
            query = "select * from taskq.claim_suspect(%s, %s, %s)"
            found = rows(self.conn, query, self.worker, list(TASKS), ["q"])
        for row in found:
            self.claims.append({**row, "is": "claimed"})
        return bool(found)

    def go_on(self, well: float) -> bool:
        """One step of one claim; False where there is nothing to do."""
        if (not self.claims or self.r.random() < 0.3) and not self.claim() and not self.claims:
            return False
        mine = self.claims[self.r.randrange(len(self.claims))]
        at = mine["is"]
        prepared = mine["task"] in ("a", "b", "c", "d", "e", "x", "y", "each")
        if at == "claimed" and prepared:
            mine["is"] = "preparing"
            told = begin(self.conn, self.worker, mine)["answer"]
            if told == "exhausted":
                self.answered(mine, "exhausted", {})
            else:
                assert told == "go", told
        elif at == "preparing":
            if self.r.random() < well:
                self.answered(mine, "ready", {"facts": {"n": {"seen": self.r.randint(0, 3), "value": 1}}})
            else:
                said = [
                    ("failed", {"type": "Boom", "message": f"{self.r.choice('uv')} {self.r.random()}"}),
                    ("pause", {"code": "provider-down"}),
                    ("needs_approval", {"what": self.r.choice("vw")}),
                    ("unmet", {"prerequisite": "c", "retry_in": self.r.choice([None, 0]), "checks": ["c"]}),
                    ("unmet", {"prerequisite": "nothing", "retry_in": None, "checks": []}),
                ]
                self.answered(mine, *self.r.choice(said))
        elif at in ("claimed", "ready") and mine["effect_class"] == "side_effecting":
            mine["is"] = "effect"
            [row] = start_effects(self.conn, self.worker, (mine["job_id"], mine["claim_epoch"]))
            assert row["effect_started_at"] is not None
        else:
            self.claims.remove(mine)
            if self.r.random() < well or at == "effect" and self.r.random() < 0.7:
                payload = one(self.conn, "select payload from taskq.jobs where id = %s", mine["job_id"])
                finish(self.conn, self.worker, mine, result=gives(mine["task"], payload))
            else:
                finish(self.conn, self.worker, mine, "unknown" if at == "effect" else "release")
        return True

    def answered(self, mine: dict[str, Any], said: str, details: dict[str, Any]) -> None:
        became = answer(self.conn, self.worker, mine, said, details)["became"]
        self.said.append(f"{mine['task']} {said} {became}")
        if became == "ready":
            mine["is"] = "ready"
        else:
            self.claims.remove(mine)
        assert became in ("ready", "released", "held", "paused"), became

    def follow(self) -> None:
        """The operator does what the database says, and nothing else."""
        for row in rows(self.conn, "select command from taskq.open_incidents where command is not null"):
            verb, subject = row["command"].removeprefix("taskq ").removesuffix(" --reason WHY").rsplit(" ", 1)
            if verb == "incidents grant":
                assert grant(self.conn, UUID(subject)) in ("granted", "paused")
            else:
                assert verb == "runs resume"
                one(self.conn, "select taskq.resume_run(%s, %s, 'me')", subject, REASON)
        for row in rows(self.conn, "select * from taskq.paused_runs"):
            assert row["code"]
            assert row["reason"]
            still = one(self.conn, "select status from taskq.runs where id = %s", row["run_id"])
            # What was paused for an incident has its command there.
            if still == "paused" and row["incident"] is None and row["resume"] == row["run_id"]:
                one(self.conn, "select taskq.resume_run(%s, %s, 'me')", row["run_id"], REASON)
        self.decide()

    def end(self) -> None:
        """No more interruptions: it goes on until it has ended."""
        lose(self.conn, self.worker)
        self.claims = []
        self.worker = worker_for(self.conn)
        for _ in range(200):
            self.lead()
            while self.go_on(well=1):
                pass
            if info(self.conn, self.run)["finished_at"] is not None:
                return
            assert violations(self.conn) == []
            self.follow()
        raise AssertionError(f"it stands still: {self.said}")


def outcome(conn: Conn, run: UUID) -> Any:
    """What a run has come to, with every node below it."""
    below = rows(
        conn,
        "with recursive below as (select %s::uuid as id union all select r.id from below b join taskq.runs r on"
        " r.parent_run = b.id) select t.workflow, t.name, t.status, t.result from below b join taskq.run_tree t on"
        " t.run_id = b.id order by t.workflow, t.name",
        run,
    )
    row = info(conn, run)
    return row["status"], row["result"], below


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_run_ends_as_one_that_nobody_interrupted(conn: Conn, seed: int) -> None:
    stored = plan(conn)
    undisturbed = start(conn, stored)
    Life(conn, undisturbed, Random(seed)).end()
    expected = outcome(conn, undisturbed)
    assert expected[0] == "succeeded"
    run = start(conn, stored)
    life = Life(conn, run, Random(seed))
    for _ in range(OPERATIONS):
        life.interrupt()
        found = violations(conn)
        assert found == [], life.said
        if info(conn, run)["finished_at"] is not None:
            break
    life.end()
    assert outcome(conn, run) == expected, life.said
    # No effect was begun twice without somebody saying that it had not happened.
    repeated = rows(
        conn,
        "select a.job_id from taskq.attempts a where a.effect_started_at is not null and a.outcome not in ('resolved')"
        " group by 1 having count(*) > 1",
    )
    assert (repeated, violations(conn)) == ([], [])

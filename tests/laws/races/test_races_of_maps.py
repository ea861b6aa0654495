"""Maps under several hands at once: ends of many children, a cancel beside the last of them, a parent that is busy."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
from maps_kit import MAP, Mapped, child_of, end_last, given, mapped
from runs_kit import finish, info, take, tree
from sql import BOUND, Conn, End, claim, end, exchange, one, sessions, violations

WRITES = "select from taskq.runs where id = %s for update"


def claims_of(conn: Conn, made: Mapped, n: int) -> list[dict[str, Any]]:
    found = claim(conn, made.worker, n, tasks=["each"])
    assert len(found) == n
    return found


def sends(dsn: str, worker: UUID, claims: list[dict[str, Any]]) -> int:
    """End each by itself on a connection of its own, and again while its run is busy; how often it was."""
    busy = 0
    with psycopg.connect(dsn, autocommit=True) as conn:
        for each in claims:
            while answer := exchange(conn, worker, [End(each["job_id"], each["claim_epoch"], result=1)]):
                assert [row["kind"] for row in answer] == ["busy"]
                busy += 1
    return busy


def test_two_workers_end_twenty_children_at_once(dsn: str, conn: Conn) -> None:
    made = mapped(conn, list(range(50)), at_once=20)
    claims = claims_of(conn, made, 20)
    random.Random(7).shuffle(claims)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: sends(dsn, made.worker, part), (claims[::2], claims[1::2])))
    child = child_of(conn, made.run)
    assert (info(conn, child)["active"], info(conn, child)["open_nodes"]) == (20, 30)
    assert violations(conn) == []
    claims = claims_of(conn, made, 20)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda part: sends(dsn, made.worker, part), [claims[n::4] for n in range(4)]))
    sends(dsn, made.worker, claims_of(conn, made, 10))
    assert info(conn, child)["status"] == "succeeded"
    assert given(conn, made) == [1] * 50
    end_last(conn, made)
    assert info(conn, made.run)["status"] == "succeeded"
    assert violations(conn) == []


@pytest.mark.parametrize("first", ["cancel", "end"])
def test_a_cancel_beside_the_end_of_the_last_child(dsn: str, conn: Conn, first: str) -> None:
    """Whichever commits first wins; the other waits for it, and both leave the map and its run in agreement."""
    made = mapped(conn, [1, 2])
    one_, last = claims_of(conn, made, 2)
    finish(conn, made.worker, one_, result=1)
    child = child_of(conn, made.run)
    told = End(last["job_id"], last["claim_epoch"], result=2)
    calls = {
        "cancel": lambda c: one(c, "select taskq.cancel_run(%s)", made.run),
        "end": lambda c: end(c, made.worker, told),
    }
    other = "end" if first == "cancel" else "cancel"
    with sessions(dsn) as [winner, loser]:
        winner.begin()
        answer = winner.do(calls[first])
        waiting = loser.start(calls[other])
        loser.waits_for(winner)
        winner.commit()
        answers = {first: answer, other: waiting.result(BOUND)}
    if first == "cancel":
        assert answers["cancel"] == "requested"
    assert info(conn, child)["status"] == "succeeded"
    finish(conn, made.worker, take(conn, made.worker, MAP)[MAP], result=2)
    assert info(conn, made.run)["status"] == "cancelled"
    assert tree(conn, made.run)["last"] == "cancelled"
    assert violations(conn) == []


def test_the_end_of_a_child_waits_for_nobody_who_is_at_the_run_of_the_map(dsn: str, conn: Conn) -> None:
    made = mapped(conn, [1])
    [last] = claims_of(conn, made, 1)
    with sessions(dsn) as [holder, other]:
        holder.begin()
        holder.do(lambda c: c.execute(WRITES, (made.run,)))
        told = End(last["job_id"], last["claim_epoch"], result=2)
        other.start(lambda c: end(c, made.worker, told)).result(BOUND)
        holder.commit()
    assert given(conn, made) == [2]
    assert violations(conn) == []

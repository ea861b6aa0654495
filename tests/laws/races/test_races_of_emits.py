"""Emits under several hands at once: a cancel, or the end of the last child, beside the end of a page."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
from emits_kit import asked, emitted, page, pages
from maps_kit import MAP, Mapped, all_end, child_of, end_last, given
from runs_kit import finish, info, take, tree
from sql import BOUND, Conn, End, claim, end, exchange, one, sessions, violations


def page_of(conn: Conn, made: Mapped, items: list[Any], cursor: Any = None) -> End:
    """The page that is asked for is claimed; its end."""
    claimed = asked(conn, made)
    assert claimed is not None
    return End(claimed["job_id"], claimed["claim_epoch"], result={"items": items, "cursor": cursor})


@pytest.mark.parametrize("first", ["cancel", "page"])
@pytest.mark.parametrize("cursor", ["b", None])
def test_a_cancel_beside_the_end_of_a_page(dsn: str, conn: Conn, first: str, cursor: str | None) -> None:
    """Whichever commits first wins; the other waits for it. All that the page gave is there, and cancelled."""
    made = emitted(conn, ahead=9)
    page(conn, made, [1], "a")
    ended = page_of(conn, made, [2, 3], cursor)
    calls = {
        "cancel": lambda c: one(c, "select taskq.cancel_run(%s)", made.run),
        "page": lambda c: end(c, made.worker, ended),
    }
    other = "page" if first == "cancel" else "cancel"
    with sessions(dsn) as [winner, loser]:
        winner.begin()
        winner.do(calls[first])
        waiting = loser.start(calls[other])
        loser.waits_for(winner)
        winner.commit()
        waiting.result(BOUND)
    child = child_of(conn, made.run)
    asked_for = 3 if (first, cursor) == ("page", "b") else 2
    assert [each["status"] for each in pages(conn, made)] == ["succeeded", "succeeded", "cancelled"][:asked_for]
    assert {name: status for name, status in tree(conn, child).items() if "page" not in name} == {
        f"each[{ix}]": "cancelled" for ix in range(3)
    }
    assert (info(conn, child)["status"], info(conn, child)["items"]) == ("cancelled", 3)
    for told in take(conn, made.worker, MAP).values():
        finish(conn, made.worker, told, "cancelled")
    assert info(conn, made.run)["status"] == "cancelled"
    assert violations(conn) == []


@pytest.mark.parametrize("first", ["child", "page"])
@pytest.mark.parametrize("items", [[2], []])
def test_the_end_of_the_last_child_beside_that_of_the_last_page(
    dsn: str, conn: Conn, first: str, items: list[int]
) -> None:
    """The emit ends with the later of both, and only where nothing is left."""
    made = emitted(conn)
    page(conn, made, [1], "a")
    [child] = claim(conn, made.worker, 1, tasks=["each"])
    ends = {
        "page": page_of(conn, made, items),
        "child": End(child["job_id"], child["claim_epoch"], result=10),
    }
    other = "page" if first == "child" else "child"
    with sessions(dsn) as [winner, loser]:
        winner.begin()
        winner.do(lambda c: end(c, made.worker, ends[first]))
        waiting = loser.start(lambda c: end(c, made.worker, ends[other]))
        loser.waits_for(winner)
        winner.commit()
        waiting.result(BOUND)
    assert info(conn, child_of(conn, made.run))["status"] == ("running" if items else "succeeded")
    all_end(conn, made, lambda item: ("succeeded", item * 10))
    assert given(conn, made) == [10, *(10 * item for item in items)]
    end_last(conn, made)
    assert violations(conn) == []


def test_two_ends_that_let_the_next_page_be_asked_for_ask_for_one(dsn: str, conn: Conn) -> None:
    made = emitted(conn, ahead=2)
    page(conn, made, [1, 2, 3, 4], "a")
    claims = claim(conn, made.worker, 4, tasks=["each"])

    def sends(each: dict[str, Any]) -> None:
        with psycopg.connect(dsn, autocommit=True) as own:
            while answer := exchange(own, made.worker, [End(each["job_id"], each["claim_epoch"], result=1)]):
                assert [row["kind"] for row in answer] == ["busy"]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(sends, claims))
    assert [each["status"] for each in pages(conn, made)] == ["succeeded", "ready"]
    page(conn, made, [])
    assert isinstance(made.run, UUID)
    assert given(conn, made) == [1] * 4
    assert violations(conn) == []

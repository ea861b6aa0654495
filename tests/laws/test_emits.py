"""Emits: items that a source gives page by page; of each page the items, the cursor and what follows commit together."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from effects_kit import effect
from emits_kit import asked, emitted, page, pages, plan_of
from maps_kit import Mapped, all_end, child_of, doubled, end_last, ends, given, progress
from runs_kit import do, finish, info, job_of, kinds, take, tree
from sql import claim, exchange, one, rows, violations

Conn = psycopg.Connection[Any]


def test_pages_give_items_until_the_last_one(conn: Conn) -> None:
    made = emitted(conn)
    assert page(conn, made, [1, 2], "a") == {"cursor": None, "root": "here"}
    assert page(conn, made, [3], {"at": 3}) == {"cursor": "a", "root": "here"}
    assert asked(conn, made) is None, "more than two items are open"
    [claimed] = claim(conn, made.worker, 1, tasks=["each"])
    assert json.loads(claimed["payload"]) == {"x": 1, "k": 7}
    finish(conn, made.worker, claimed, result=2)
    assert violations(conn) == []
    assert page(conn, made, []) == {"cursor": {"at": 3}, "root": "here"}
    assert asked(conn, made) is None
    all_end(conn, made)
    assert given(conn, made) == [2, 4, 6]
    end_last(conn, made)
    assert info(conn, made.run)["status"] == "succeeded"
    assert violations(conn) == []
    assert tree(conn, child_of(conn, made.run)) == {f"each[{n}]": "succeeded" for n in range(3)} | {
        f"each.page[{n}]": "succeeded" for n in range(3)
    }

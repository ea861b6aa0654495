"""One job enqueued alone takes a shorter way than a batch; what it leaves, and what is refused, is the same."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb
from sql import dump, enqueue_many, one, policy, rows, violations

Conn = psycopg.Connection[Any]
PLAIN = {"task": "t", "queue": "q", "max_attempts": 3, "effect_class": "idempotent", "policy_id": "p"}
INSTANT = "2031-05-06 07:08:09+00"
FITS: list[dict[str, object]] = [
    {},
    {"priority": 0},
    {"priority": None, "run_in": None, "meta": None, "has_effects": False, "deadline_in": None},
    {"effect_class": "pure", "required_worker_schema": 1},
    {"effect_class": "side_effecting"},
    {"effect_class": "side_effecting", "required_worker_schema": 1},
    {"effect_class": "side_effecting", "required_worker_schema": 7},
    {"run_in": 3600.5},
    {"run_in": -5},
    {"deadline_in": 86400},
    {"deadline_in": -1},
    {"meta": {"trace": ["ä", 1.5, None]}},
    {"meta": {"m": "x" * 131_000}},
    {"has_effects": True},
    {"policy_id": "promises"},
    {"policy_id": "promises", "has_effects": False},
    {"policy_id": "promises_nothing"},
    {"policy_id": "unknown"},
    {"policy_id": "slim"},
    {"policy_id": "slim", "slim": False},
    {"policy_id": "slim", "has_effects": True},
    {"ordering": "halt"},
    {"run_at": INSTANT},
    {"deadline": INSTANT},
    {"tags": ["a", "b"]},
    {"unique_scope": "s", "unique_hold": 3.0, "idempotency_scope": "i"},
]
BAD: list[dict[str, object]] = [
    {"task": None},
    {"task": ""},
    {"task": "with space"},
    {"task": "t" * 129},
    {"queue": None},
    {"queue": "ä"},
    {"priority": 10},
    {"priority": -1},
    {"priority": "high"},
    {"priority": 2.5},
    {"max_attempts": 0},
    {"max_attempts": None},
    {"effect_class": "other"},
    {"effect_class": None},
    {"policy_id": None},
    {"run_in": 1e12},
    {"run_in": -1e12},
    {"deadline_in": 1e12},
    {"deadline_in": "soon"},
    {"unique_hold": -1},
    {"run_at": "1960-01-01 00:00:00+00"},
    {"deadline": "9001-01-01 00:00:00+00"},
    {"tags": ["x" * 257]},
    {"meta": [1]},
    {"meta": "text"},
    {"meta": {"m": "x" * 140_000}},
    {"required_worker_schema": "x"},
    {"has_effects": "perhaps"},
]


@pytest.fixture
def ready(conn: Conn) -> Conn:
    """With policies that promise something and nothing; the clock stands, so that instants can be compared."""
    policy(conn, "p")
    policy(conn, "promises_nothing", effects=[])
    policy(conn, "slim", history="slim")
    effect = {
        "name": "e",
        "task": "e",
        "on": ["failed"],
        "queue": "q",
        "policy_id": "p",
        "payload": {},
        "max_attempts": 1,
    }
    policy(conn, "promises", effects=[effect])
    return conn


def enqueue_specs(conn: Conn, spec: dict[str, object], payloads: list[str | None]) -> list[dict[str, Any]]:
    query = "select * from taskq.enqueue_many(%s, %s::int[], %s::text[])"
    return rows(conn, query, Jsonb([PLAIN | spec]), [1] * len(payloads), payloads)


def stored(conn: Conn, job: object) -> dict[str, Any]:
    """The row, without what two jobs of one moment may differ in, and instants as distances from its birth."""
    [row] = rows(conn, "select * from taskq.jobs where id = %s", job)
    born = row.pop("created_at")
    del row["id"]
    # Instants given as such stay as they are.
    row["run_at"] = row["run_at"] if str(row["run_at"].year) == INSTANT[:4] else row["run_at"] - born
    if row["deadline"] is not None and str(row["deadline"].year) != INSTANT[:4]:
        row["deadline"] -= born
    return row


@pytest.mark.parametrize("spec", FITS, ids=str)
def test_a_job_enqueued_alone_is_what_it_would_be_in_a_batch(ready: Conn, spec: dict[str, object]) -> None:
    [alone] = enqueue_specs(ready, spec, ['{"n": 1, "s": "ä\\u0007"}'])
    first, second = enqueue_specs(ready, spec, ['{"n": 1, "s": "ä\\u0007"}'] * 2)
    assert (alone["ord"], alone["inserted"]) == (first["ord"], first["inserted"]) == (1, True)
    assert stored(ready, alone["job_id"]) == stored(ready, first["job_id"]) == stored(ready, second["job_id"])
    assert [v for v in violations(ready) if v[0] != "policy_missing"] == []


def refusal(conn: Conn, spec: dict[str, object], payloads: list[str | None]) -> tuple[str | None, str, str | None]:
    with pytest.raises(psycopg.Error) as raised, conn.transaction():
        enqueue_specs(conn, spec, payloads)
    diag = raised.value.diag
    return diag.sqlstate, str(diag.message_primary), diag.message_hint


@pytest.mark.parametrize("spec", BAD, ids=lambda spec: str(spec)[:40])
def test_what_a_batch_refuses_is_refused_alone(ready: Conn, spec: dict[str, object]) -> None:
    before = dump(ready)
    assert refusal(ready, spec, ["{}"]) == refusal(ready, spec, ["{}", "{}"])
    assert dump(ready) == before


@pytest.mark.parametrize("payload", [None, "[]", "1", "no json", '{"a": "\\u0000"}'])
def test_a_payload_that_is_none_is_refused_alone_as_in_a_batch(ready: Conn, payload: str | None) -> None:
    # The row that a check refuses is named in the detail alone.
    assert refusal(ready, {}, [payload]) == refusal(ready, {}, [payload, payload])


def test_a_payload_over_the_limit_is_refused_by_its_place_and_size(ready: Conn) -> None:
    ready.execute("update taskq.installation set max_payload_bytes = 100")
    fits = '{"t": "' + "x" * 91 + '"}'
    [_] = enqueue_specs(ready, {}, [fits])
    state, message, _ = refusal(ready, {}, [fits + " "])
    assert (state, message) == ("WF009", "the payload of job 1 has 101 bytes, the limit is 100")


def test_arrays_and_specs_that_are_odd_take_the_long_way(ready: Conn) -> None:
    call = "select * from taskq.enqueue_many(%s::jsonb, %s::int[], %s::text[])"
    spec = Jsonb([PLAIN])
    for specs, numbers, payloads in (
        (spec, "[0:0]={1}", '{"{}"}'),
        (spec, "{1}", '[2:2]={"{}"}'),
        (spec, "{{1}}", '{"{}"}'),
        (spec, "{2}", '{"{}"}'),
        (spec, "{NULL}", '{"{}"}'),
        (Jsonb(PLAIN), "{1}", '{"{}"}'),
    ):
        with pytest.raises(psycopg.Error) as raised, ready.transaction():
            ready.execute(call, (specs, numbers, payloads))
        assert raised.value.diag.sqlstate == "WF009", raised.value
    with pytest.raises(psycopg.Error, match="jsonb_to_recordset"), ready.transaction():
        ready.execute(call, (Jsonb([None]), "{1}", '{"{}"}'))
    assert one(ready, "select count(*) from taskq.jobs") == 0
    with pytest.raises(psycopg.Error, match="p_on_conflict"), ready.transaction():
        enqueue_many(ready, on_conflict="perhaps")


def test_each_job_of_a_batch_gets_its_own_spec_whatever_way_policies_are_joined(ready: Conn) -> None:
    for n in range(400):
        policy(ready, f"p{n}")
    ready.execute("analyze taskq.policies")
    specs = [PLAIN | {"task": f"t{n}", "policy_id": f"p{n}"} for n in reversed(range(50))]
    payloads = [f'{{"n": "{spec["task"]}"}}' for spec in specs]
    query = "select * from taskq.enqueue_many(%s, %s::int[], %s::text[])"
    for way in ("nestloop", "mergejoin", "hashjoin"):
        for each in ("nestloop", "mergejoin", "hashjoin"):
            ready.execute(f"set local enable_{each} = {'on' if each == way else 'off'}")
        ready.execute("discard plans")
        ready.execute(query, (Jsonb(specs), list(range(1, 51)), payloads))
        own = "task = payload ->> 'n' and policy_id = 'p' || substr(task, 2)"
        wrong = rows(ready, f"select task, payload, policy_id from taskq.jobs where not ({own})")
        assert wrong == [], way
    assert one(ready, "select count(*) from taskq.jobs") == 150

"""Every UPDATE and DELETE that taskq can execute touches boundedly many rows, or is listed here with what bounds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bounds import Write, of_migration, of_queries, of_sql, shown

import taskq

ROOT = Path(__file__).parents[1]
MIGRATIONS = sorted((ROOT / "migrations").glob("*.sql"))
QUERIES = sorted((Path(taskq.__file__ or "").parent / "db" / "sql").glob("*.sql"))

EXEMPT: dict[tuple[str, str, str], tuple[str, str]] = {
    ("prune_incidents", "delete", "incident_events"): (
        "e.incident_id = ANY(v_ids)",
        "v_ids are at most p_limit incidents, which go with it; each has as many events as faults, grants and "
        "recoveries, of which the last two are bounded, and a fault is followed by one of them",
    ),
    ("drop_expired_partition", "update", "jobs"): (
        "j.id = g.job_id",
        "g groups one day of the ledger, which goes in the same transaction: the count must go with it, or law 3 "
        "breaks. Only jobs that are still there after the whole retention are touched",
    ),
    ("drop_expired_partition", "update", "history"): (
        "h.id = g.job_id",
        "as above. That day of history went before: only jobs that ended on a later day are touched",
    ),
    ("drop_expired_partition", "update", "effect_intents"): (
        "i.job_id = h.id",
        "h is one day of history, which goes in the same transaction: how effects ended in it must be kept with that, "
        "or one that failed could not be told from one that is settled. Only intents whose jobs ended then are touched",
    ),
    ("end_sleeps", "update", "steps"): (
        "s.job_id = p_job.id AND s.generation = p_job.generation AND s.kind = 'sleep'",
        "the sleeps of one job that are not over: those that its body has begun beside each other",
    ),
    ("receipts", "delete", "receipts"): (
        "c.run_id = p_run AND c.sequence <= v_last - v_keep",
        "as many as were just written for one run, at most 10001 at once, since all below have gone before",
    ),
    ("stop_rest", "update", "nodes"): (
        "n.run_id = p_run AND n.status = 'waiting'",
        "the nodes of one run, at most 10000, of a map at most 100000: all that waits is cancelled in the transaction "
        "that stops the run, or some of it would still become ready",
    ),
    ("reopen_run", "update", "nodes"): (
        "n.run_id = run_id AND n.status IN ('failed', 'cancelled', 'blocked', 'skipped')",
        "the nodes of one run, at most 10000: a run is reopened as a whole, under one epoch",
    ),
    ("reopen_map", "update", "nodes"): (
        "n.run_id = p_run.id",
        "the nodes of one map, at most 100000: a run is reopened as a whole, under one epoch; in one statement, which "
        "makes no jobs",
    ),
    ("reopen_emit", "update", "nodes"): (
        "n.run_id = p_run.id AND n.status IN ('failed', 'cancelled')",
        "the nodes of one emit, at most 100000 items and a page: as for a map",
    ),
    ("prune_runs", "delete", "receipts"): (
        "c.run_id = ANY(v_runs)",
        "v_runs is picked with a LIMIT, and a run has at most 10000 receipts: they go with their run, or verify "
        "reports receipts of no run",
    ),
    ("note_hold", "update", "loop_holds"): (
        "h.job_id = old.id AND h.until IS NULL",
        "what one job is held in: a round of each of the loops above it, of which there are at most 8",
    ),
    ("finish_run", "update", "loop_holds"): (
        "h.job_id = p_run AND h.until IS NULL",
        "the times that the pause of one run keeps open: of itself and of the loops above it, at most 9",
    ),
    ("advance_loop", "update", "loop_holds"): (
        "h.run_id = p_run AND h.ix = v_run.written - 1 AND h.job_id = p_run AND h.until IS NULL",
        "the one that the pause of the loop keeps open",
    ),
    ("lift_pauses", "update", "loop_holds"): (
        "h.job_id = ANY(v_paused) AND h.until IS NULL",
        "the runs of one tree, which are resumed as a whole: at most 9 for each",
    ),
    ("prune_runs", "delete", "loop_holds"): (
        "h.run_id = ANY(v_runs)",
        "v_runs is picked with a LIMIT, and a loop has at most 10000 rounds for each time that it was reopened: their "
        "waits go with them",
    ),
    ("prune_runs", "delete", "nodes"): (
        "n.run_id = ANY(v_runs)",
        "v_runs is picked with a LIMIT, and a run has at most 10000 nodes; maps among them have 100000 together, or "
        "there is one: they go with their run",
    ),
}
"""Writes that neither a key nor a LIMIT bounds: place, verb and table, with the predicate that does, and why it may."""


def every_write() -> list[Write]:
    return [w for f in MIGRATIONS for w in of_migration(f.read_text())] + [w for f in QUERIES for w in of_queries(f)]


def faults(writes: list[Write], exempt: dict[tuple[str, str, str], tuple[str, str]]) -> list[str]:
    """What is wrong: unbounded writes that are not listed, and lines of the list that hold for nothing."""
    found = []
    used = set()
    for w in writes:
        line = exempt.get((w.place, w.verb, w.table))
        if w.bounded:
            continue
        if line is None:
            found.append(
                f"{w.place}: {w.verb} of {w.table} is bounded by no key and no LIMIT: {w.predicate or 'no WHERE'}"
            )
        else:
            used.add((w.place, w.verb, w.table))
            if line[0] not in w.predicate:
                found.append(f"{w.place}: {w.verb} of {w.table} lost the predicate that bounded it: {line[0]}")
    found += [f"{place}: {verb} of {table} is exempted and is nowhere" for place, verb, table in set(exempt) - used]
    return found


def test_every_update_and_delete_is_bounded_or_exempted_with_its_predicate() -> None:
    writes = every_write()
    assert faults(writes, EXEMPT) == [], shown(writes)


def test_no_update_or_delete_is_overlooked() -> None:
    """The parser's count equals that of the words in the text, comments left out."""
    for file in [*MIGRATIONS, *QUERIES]:
        text = re.sub(r"--.*", "", file.read_text())
        tables = r"(?:\{\{schema\}\}|%\d?\$?I|taskq_demo_orders)\."
        words = re.findall(rf"\b(?:update|delete\s+from)\s+(?:only\s+)?{tables}", text, re.I)
        writes = of_migration(file.read_text()) if file in MIGRATIONS else of_queries(file)
        assert len(writes) == len(words), f"{file.name}: {shown(writes)}"
    assert len(every_write()) >= 29


@pytest.mark.parametrize(
    "text",
    [
        "update jobs j set status = 'x' where j.id = $1",
        "update jobs j set status = 'x' where j.id = any($1) and (j.claimed_by = $2) is true",
        "update jobs j set status = 'x' from unnest($1) as e(id) where e.id = j.id",
        "update jobs j set status = 'x' from (select id from jobs limit 5) e where e.id = j.id",
        "with e as (select id from jobs limit $1), f as (select id from e) "
        "update jobs j set status = 'x' from f where f.id = j.id",
        "delete from jobs where id in (select id from jobs order by id limit 5 for update skip locked)",
        "delete from unique_keys k where k.ctid = any(array(select u.ctid from unique_keys u limit 5))",
        "delete from unique_keys where scope = $1 and key = $2",
        "with e as (select * from unnest($1) as e(id, epoch)) "
        "delete from jobs j where ((j.id, j.claim_epoch) in (select e.id, e.epoch from e)) is true",
    ],
)
def test_a_write_by_key_or_with_a_limit_counts_as_bounded(text: str) -> None:
    assert [w.bounded for w in of_sql("here", text)] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "delete from jobs",
        "delete from jobs where status = 'failed'",
        "delete from jobs where id = $1 or status = 'failed'",
        "delete from jobs where id <> $1",
        "delete from jobs j where j.id = j.run_id",
        "delete from jobs j using workers w where w.id = j.claimed_by",
        "update jobs j set status = 'x' from history h where h.id = j.id",
        "update jobs j set status = 'x' from (select id from jobs) e where e.id = j.id",
        "with e as (select id from jobs) update jobs j set status = 'x' from e where e.id = j.id",
        "with e as (select id from jobs limit 5) update jobs j set status = 'x' from e where e.id = j.claimed_by",
        "with e as (select h.id from history h, unnest($1) u) update jobs j set status = 'x' from e where e.id = j.id",
        "delete from jobs where id in (select id from jobs where status = 'failed')",
        "delete from unique_keys where scope = $1",
        "update jobs j set status = 'x' from generate_series(1, 5) as e(id) where e.id = j.id",
    ],
)
def test_any_other_write_counts_as_unbounded(text: str) -> None:
    assert [w.bounded for w in of_sql("here", text)] == [False]


def test_writes_inside_other_statements_and_inside_executed_text_are_found() -> None:
    nested = "with gone as (delete from jobs returning *) insert into history select * from gone"
    assert [(w.verb, w.bounded) for w in of_sql("here", nested)] == [("delete", False)]
    function = """create function {{schema}}.f(p_id uuid) returns void language plpgsql as $$
      begin
        if p_id is null then
          execute format('delete from %I.jobs', 'x');
        else
          update {{schema}}.jobs set status = 'x' where id = p_id;
        end if;
      end $$;"""
    assert [(w.place, w.verb, w.bounded) for w in of_migration(function)] == [
        ("f", "delete", False),
        ("f", "update", True),
    ]


def test_an_exemption_that_matches_nothing_or_whose_predicate_is_gone_fails() -> None:
    writes = of_sql("here", "delete from jobs where status = 'failed'")
    key = ("here", "delete", "jobs")
    assert faults(writes, {key: ("status = 'failed'", "why")}) == []
    assert "lost the predicate" in faults(writes, {key: ("status = 'lost'", "why")})[0]
    assert "is nowhere" in faults([], {key: ("status = 'failed'", "why")})[0]
    bounded = of_sql("here", "delete from jobs where id = $1")
    assert "is nowhere" in faults(bounded, {key: ("id", "why")})[0]
    assert "no LIMIT" in faults(writes, {})[0]

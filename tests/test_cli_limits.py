"""The commands that show cohorts and set their limits: answers, exit codes, JSON, and the record."""

from __future__ import annotations

from uuid import UUID

import psycopg
from cli_kit import Cli, make_cli  # noqa: F401
from sql import claim, enqueue, register, rows


def busy(conn: psycopg.Connection, limit: int = 1, jobs: int = 3) -> list[UUID]:
    """A cohort that is full, and jobs that wait for it."""
    conn.execute("select taskq.ensure_limit('stripe', %s)", (limit,))
    made = [enqueue(conn, cohort="stripe") for _ in range(jobs)]
    assert len(claim(conn, register(conn))) == limit
    return made


def test_cohorts_are_listed_with_what_runs_and_what_waits(cli: Cli, conn: psycopg.Connection) -> None:
    assert cli.ok("limits", "list").out.strip() == "no cohorts"
    busy(conn)
    conn.execute("select taskq.ensure_limit('idle', 9)")
    first, second = cli.ok("limits", "list", "--json").json
    assert (first["cohort"], first["limit"], first["running"], first["waiting"]) == ("stripe", 1, 1, 2)
    assert (second["cohort"], second["code_limit"], second["operator_limit"]) == ("idle", 9, None)
    table = cli.ok("limits", "list", "--limit", "1")
    assert "stripe" in table.out
    assert "idle" not in table.out
    assert "the first 1; --limit shows more" in table.err


def test_a_limit_is_set_and_cleared_with_a_reason_on_record(cli: Cli, conn: psycopg.Connection) -> None:
    busy(conn)
    assert cli("limits", "set", "stripe", "2").code == 2
    assert cli("limits", "set", "stripe", "-1", "--reason", "x").code == 2
    refused = cli("limits", "set", "stripe", "2", "--reason", " ")
    assert refused.code == 1
    assert "setting the limit of cohort stripe needs a reason. Say why" in refused.err
    [answer] = cli.ok("limits", "set", "stripe", "2", "--reason", "more room", "--json").json
    assert (answer["answer"], answer["limit"], answer["code_limit"]) == ("set", 2, 1)
    assert answer["reason"] == "more room"
    assert len(claim(conn, register(conn))) == 1
    assert "cleared" in cli.ok("limits", "clear", "stripe", "--reason", "enough").out
    assert "was not set" in cli.ok("limits", "clear", "stripe", "--reason", "again").out
    noted = rows(conn, "select action, subject, reason from taskq.audit order by at")
    assert [tuple(row.values()) for row in noted] == [
        ("set_limit", "stripe", "more room"),
        ("clear_limit", "stripe", "enough"),
    ]


def test_a_name_that_nobody_knows_is_said_so(cli: Cli, conn: psycopg.Connection) -> None:
    done = cli.ok("limits", "set", "strpe", "2", "--reason", "a typo")
    assert "no job and no code has named a cohort 'strpe' yet" in done.err
    refused = cli("limits", "clear", "nobody", "--reason", "x")
    assert refused.code == 1
    assert "there is no cohort 'nobody'. See the view cohorts, or taskq limits list" in refused.err
    assert cli("limits", "set", "a b", "1", "--reason", "x").code == 1


def test_a_job_says_that_it_waits_for_a_slot(cli: Cli, conn: psycopg.Connection) -> None:
    running, waiting, _ = busy(conn)
    assert "1 of 1 of its cohort are taken; waits for one" in cli.ok("jobs", "show", str(waiting)).out
    assert "waits for one" not in cli.ok("jobs", "show", str(running)).out
    conn.execute("select taskq.set_limit('stripe', 0, 'closed')")
    shown = cli.ok("jobs", "show", str(waiting), "--json").json
    assert shown["cohort"] == "stripe"
    assert shown["slots"] == {"status": "pending", "limit": 0, "by_operator": True, "running": 1}
    assert "as an operator has set it; waits for one" in cli.ok("jobs", "show", str(waiting)).out
    unlimited = enqueue(conn, cohort="free")
    assert "0 of its cohort run, which has no limit" in cli.ok("jobs", "show", str(unlimited)).out
    listed = cli.ok("jobs", "list")
    assert "cohort" in listed.out.splitlines()[0]
    assert cli.ok("jobs", "show", str(enqueue(conn)), "--json").json["slots"] is None

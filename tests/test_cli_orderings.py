"""The commands that show and steer ordering keys: answers, exit codes, JSON, and the record."""

from __future__ import annotations

from uuid import UUID

import psycopg
from cli_kit import Cli, make_cli  # noqa: F401
from ordering_kit import claimed, ordered, states
from sql import End, cancel, end, lose, register, rows, settle


def halt(conn: psycopg.Connection, key: str = "account:7") -> list[UUID]:
    """A key whose first job has failed, with two behind it."""
    worker = register(conn)
    jobs = ordered(conn, 3, key=key, halt=True)
    assert claimed(conn, worker) == [jobs[0]]
    end(conn, worker, End(jobs[0], outcome="failed"))
    return jobs


def test_lines_are_listed_with_the_longest_first(cli: Cli, conn: psycopg.Connection) -> None:
    assert cli.ok("orderings", "list").out.strip() == "no ordering keys in use"
    jobs = halt(conn)
    [turn, *_] = ordered(conn, 4, key="b")
    longest, halted = cli.ok("orderings", "list", "--json").json
    assert (longest["ordering_key"], longest["job_id"], longest["status"]) == ("b", str(turn), "pending")
    assert (longest["waiting"], longest["halted_by"]) == (3, None)
    assert (halted["job_id"], halted["waiting"], halted["halted_by"]) == (None, 2, str(jobs[0]))
    assert cli.ok("orderings", "list", "--halted", "--json").json == [halted]
    table = cli.ok("orderings", "list", "--limit", "1")
    assert "b" in table.out
    assert "account:7" not in table.out
    assert "the first 1; --limit shows more" in table.err


def test_a_halted_key_is_resumed_with_a_reason_on_record(cli: Cli, conn: psycopg.Connection) -> None:
    jobs = halt(conn)
    assert cli("orderings", "resume", "account:7").code == 2
    assert cli("orderings", "resume", "account:7", "--reason", " ").code == 1
    assert states(conn, jobs) == ["failed", "ordering", "ordering"]
    done = cli.ok("orderings", "resume", "account:7", "--reason", "booked by hand", "--json")
    [answer] = done.json
    assert (answer["answer"], answer["job_id"], answer["waiting"]) == ("resumed", str(jobs[1]), 1)
    assert states(conn, jobs) == ["failed", "pending", "ordering"]
    [noted] = rows(conn, "select * from taskq.audit where action = 'resume_ordering'")
    assert (noted["subject"], noted["reason"]) == ("account:7", "booked by hand")
    assert "was not halted" in cli.ok("orderings", "resume", "account:7", "--reason", "again").out
    assert cli.ok("orderings", "resume", "nobody's", "--reason", "x", "--json").json[0]["answer"] == "not_halted"


def test_a_key_that_an_unknown_outcome_halts_is_not_resumed(cli: Cli, conn: psycopg.Connection) -> None:
    worker = register(conn)
    [first, _] = ordered(conn, 2, halt=True)
    claimed(conn, worker)
    cancel(conn, first)
    lose(conn, worker)
    assert settle(conn) == {first: "unknown"}
    [line] = cli.ok("orderings", "list", "--halted", "--json").json
    assert (line["job_id"], line["status"]) == (str(first), "unknown")
    refused = cli("orderings", "resume", "k", "--reason", "x")
    assert refused.code == 1
    assert "taskq jobs resolve" in refused.err


def test_a_job_shows_its_key_its_place_and_what_it_waits_for(cli: Cli, conn: psycopg.Connection) -> None:
    failed, second, third = halt(conn)
    [turn, behind] = ordered(conn, 2, key="b")
    shown = cli.ok("jobs", "show", str(third), "--json").json
    assert (shown["ordering_key"], shown["held_reason"]) == ("account:7", "ordering")
    expected = {"place": 2, "waiting": 2, "turn": None, "turn_status": None, "halted_by": str(failed)}
    assert shown["line"] == expected
    assert "the key is halted by" in cli.ok("jobs", "show", str(second)).out
    assert "place 1 of 1 that wait" in cli.ok("jobs", "show", str(behind)).out
    assert cli.ok("jobs", "show", str(behind), "--json").json["line"]["turn"] == str(turn)
    assert "has its turn" in cli.ok("jobs", "show", str(turn)).out
    assert cli.ok("jobs", "show", str(failed), "--json").json["line"] is None
    listed = cli.ok("jobs", "list", "--held", "ordering", "--json").json
    assert {row["id"] for row in listed} == {str(second), str(third), str(behind)}
    assert {row["ordering_key"] for row in listed} == {"account:7", "b"}
    assert "held: ordering" in cli.ok("jobs", "list").out


def test_a_job_is_enqueued_with_a_key(cli: Cli, conn: psycopg.Connection) -> None:
    conn.execute("select taskq.ensure_policy('p', 1, '{}')")
    conn.execute("select taskq.publish_task(null, 't', 'q', 5, 3, 'idempotent', 'p')")
    ids = [UUID(cli.ok("enqueue", "t", "--ordering-key", "k").out.strip()) for _ in range(2)]
    assert states(conn, ids) == ["pending", "ordering"]
    assert cli("enqueue", "t", "--ordering-key", "x" * 513).code == 1


def test_doctor_tells_of_keys_that_have_been_halted_for_long(cli: Cli, conn: psycopg.Connection) -> None:
    def found() -> dict[str, str]:
        checks = cli("doctor", "--json").json["checks"]
        [check] = [check for check in checks if check["check"] == "orderings"]
        return dict(check)

    halt(conn, key="it's")
    assert found()["verdict"] == "ok"
    conn.execute("update taskq.ordering_halts set halted_at = now() - interval '11 min'")
    check = found()
    assert (check["verdict"], "1 ordering keys" in check["found"]) == ("warn", True)
    assert """taskq orderings resume 'it'"'"'s' --reason""" in check["cure"]

"""``taskq incidents`` and ``taskq runs grant``: what holds up jobs, as operators see it, and letting it go on."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from cli_kit import Cli, make_cli  # noqa: F401
from incidents_kit import FAILED, current, holding, pair, prepare
from runs_kit import edge, info, job_of, node, start, store, worker_for
from sql import Conn, enqueue, one, violations

NOBODY = "01999999-0000-7000-8000-000000000000"


def checks(cli: Cli) -> dict[str, Any]:
    return {row["check"]: row for row in cli("doctor", "--json").json["checks"]}


def held(conn: Conn) -> tuple[UUID, UUID, str]:
    """A run whose first node is held: run, job and incident."""
    run = pair(conn, 0)
    claimed, became = prepare(conn, worker_for(conn), "a", "failed", FAILED)
    assert became == "held"
    return run, claimed["job_id"], str(current(conn, claimed["job_id"])["id"])


def test_nothing_is_said_where_there_is_nothing(cli: Cli) -> None:
    assert "no incidents" in cli.ok("incidents", "list").out
    assert cli.ok("incidents", "list", "--json").json == []
    assert checks(cli)["incidents"]["verdict"] == "ok"


def test_an_incident_is_listed_and_shown_with_what_goes_on(cli: Cli, conn: Conn) -> None:
    run, job, incident = held(conn)
    listed = cli.ok("incidents", "list")
    assert all(text in listed.out for text in (incident, "exhausted", "preparation_failed", str(job), "once", "Boom"))
    assert "taskq incidents grant ID" in listed.err
    [row] = cli.ok("incidents", "list", "--json", "--run", str(run)).json
    assert (row["id"], row["command"]) == (incident, f"taskq incidents grant {incident} --reason WHY")
    assert cli.ok("incidents", "list", "--json", "--job", NOBODY).json == []
    shown = cli.ok("incidents", "show", incident).out
    assert all(text in shown for text in ("connection 17", "failed", f"taskq incidents grant {incident} --reason WHY"))
    told = cli.ok("incidents", "show", incident, "--json").json
    assert [event["kind"] for event in told["events"]] == ["failed"]
    # The run says so as well.
    for command in ("show", "tree"):
        said = cli.ok("runs", command, str(run)).out
        assert f"taskq runs grant {run} --reason WHY" in said
        assert "preparation_failed: connection 17" in said
    found = checks(cli)["incidents"]
    assert (found["verdict"], str(run) in found["found"]) == ("warn", True)
    assert f"taskq incidents grant {incident}" in found["cure"]
    assert checks(cli)["runs"]["verdict"] == "ok"


def test_a_grant_of_a_run_or_of_an_incident_lets_it_go_on(cli: Cli, conn: Conn) -> None:
    run, job, incident = held(conn)
    done = cli.ok("runs", "grant", str(run), "--reason", "the cable is back", "--json").json
    assert done == [{"id": incident, "answer": "granted"}]
    assert info(conn, run)["status"] == "running"
    assert cli.ok("incidents", "grant", incident, "--reason", "again", "--json").json[0]["answer"] == "already"
    assert cli.ok("runs", "grant", str(run), "--reason", "again", "--json").json[0]["answer"] == "already"
    prepare(conn, worker_for(conn), "a", "ready")
    refused = cli("incidents", "grant", incident, "--reason", "again")
    assert (refused.code, "is not current: it is resolved" in refused.out) == (1, True)
    # Nothing of it waits any more.
    none = cli("runs", "grant", str(run), "--reason", "again")
    assert (none.code, "nothing of it waits for a grant" in none.out, "taskq runs tree" in none.err) == (1, True, True)
    one(conn, "select taskq.pause_run(%s, 'looking', 'me', 'audit')", run)
    assert f"taskq runs resume {run}" in cli("runs", "grant", str(run), "--reason", "again").err
    assert f"taskq incidents list --run {run}" in cli("runs", "retry", str(run)).err
    assert cli.ok("incidents", "list", "--json").json == []
    [row] = cli.ok("incidents", "list", "--all", "--json").json
    assert (row["status"], row["task"], row["command"]) == ("resolved", None, None)
    shown = cli.ok("incidents", "show", incident).out
    assert all(text in shown for text in ("the cable is back", "prepared", "launched"))
    assert "goes on with" not in shown
    audit = cli.ok("audit", "list", "--json").json
    assert [each["reason"] for each in audit if each["action"] == "grant_recovery"] == ["the cable is back"]
    assert (one(conn, "select task from taskq.jobs where id = %s", job), violations(conn)) == ("a", [])


def test_only_the_incident_that_is_named_is_granted(cli: Cli, conn: Conn) -> None:
    of = {"policy_id": holding(conn, 0)}
    run = start(conn, store(conn, [node("a", **of), node("b", **of), node("c")], [edge(0, 2), edge(1, 2)]))
    worker = worker_for(conn)
    prepare(conn, worker, "a", "failed", FAILED)
    one(conn, "select taskq.resume_run(%s, 'the rest', 'me')", run)
    prepare(conn, worker, "b", "failed", FAILED)
    incident = str(current(conn, job_of(conn, run, "a"))["id"])
    done = cli.ok("runs", "grant", str(run), "--incident", incident, "--reason", "mended", "--json").json
    assert "the last 1; --limit" in cli.ok("incidents", "list", "--limit", "1").err
    # The pause was for the other.
    assert done == [{"id": incident, "answer": "paused"}]
    other = str(pair(conn, 0))
    refused = cli("runs", "grant", other, "--incident", incident, "--reason", "mended")
    assert (refused.code, f"there is no incident {incident} of run {other}" in refused.out) == (1, True)
    [row] = [each for each in cli.ok("incidents", "list", "--json").json if each["id"] == incident]
    assert row["command"] == f"taskq runs resume {run} --reason WHY"
    answers = cli.ok("runs", "grant", str(run), "--reason", "mended", "--json").json
    assert [each["answer"] for each in answers] == ["already", "granted"]
    assert (info(conn, run)["status"], violations(conn)) == ("running", [])


def test_a_plain_job_says_what_holds_it(cli: Cli, conn: Conn) -> None:
    job = enqueue(conn)
    prepare(conn, worker_for(conn), "t", "needs_approval", {"what": "a refund of 5"})
    refused = cli("jobs", "retry", str(job))
    assert (refused.code, "taskq incidents list" in refused.err + refused.out) == (1, True), refused
    shown = cli.ok("jobs", "show", str(job)).out
    assert all(text in shown for text in ("needs_approval", "a refund of 5", "taskq incidents grant"))
    assert cli.ok("jobs", "show", str(job), "--json").json["incident"]["code"] == "needs_approval"
    assert "a refund of 5" in cli.ok("incidents", "list", "--job", str(job)).out


def test_what_is_not_there_is_said_so(cli: Cli, conn: Conn) -> None:
    assert f"there is no incident {NOBODY}" in cli("incidents", "show", NOBODY).err
    missing = cli("incidents", "show", NOBODY, "--json")
    assert (missing.code, missing.json["answer"]) == (1, "not_found")
    refused = cli("incidents", "grant", NOBODY, "--reason", "why", "--json")
    assert (refused.code, refused.json[0]["answer"]) == (1, "refused")
    assert cli("runs", "grant", NOBODY, "--reason", "why").code == 1
    _, _, incident = held(conn)
    assert cli("incidents", "grant", incident, "--reason", " ").code == 1
    assert cli("incidents", "list", "--run", "x").code == 2

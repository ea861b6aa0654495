"""``taskq effects``: lists, one effect, settling and another go; and what jobs show and doctor say of effects."""

from __future__ import annotations

import psycopg
import pytest
import sql as q
from cli_kit import Cli, make_cli  # noqa: F401
from effects_kit import effect, intents, owner, promising
from psycopg.conninfo import make_conninfo

NOBODY = "01999999-0000-7000-8000-000000000000"
Conn = psycopg.Connection[object]


def keys(cli: Cli, *args: str) -> list[str]:
    return [row["effect_key"] for row in cli.ok("effects", "list", "--json", *args).json]


def three(conn: psycopg.Connection) -> tuple[str, list[str]]:
    """An owner with one effect that has succeeded, one that failed and one that is broken; gives it and the keys."""
    worker, job = q.running(
        conn,
        **promising(conn, effect("ok", task="one"), effect("bad", task="two"), effect("torn", policy_id="gone")),
    )
    q.end(conn, worker, q.End(job, 1, "failed", error={"type": "E", "message": "m"}))
    made = intents(conn, job)
    for name, outcome, error in (("one", "succeeded", None), ("two", "failed", {"type": "X", "message": "no money"})):
        row = q.claim_one(conn, worker, tasks=[name])
        q.end(conn, worker, q.End(row["job_id"], 1, outcome, error=error))
    return str(job), [i["effect_key"] for i in made]


def test_list_shows_all_or_what_is_not_settled(cli: Cli, conn: psycopg.Connection) -> None:
    assert cli.ok("effects", "list").out == "no effects\n"
    job, [ok, bad, torn] = three(conn)
    other = owner(conn, effect("waits"))
    q.cancel(conn, other)
    waits = f"{other}:0:waits"
    assert keys(cli) == [waits, torn, bad, ok]
    assert keys(cli, "--limit", "1") == [waits]
    assert keys(cli, "--owner", job) == [torn, bad, ok]
    assert keys(cli, "--task", "one", "--task", "two") == [bad, ok]
    assert keys(cli, "--unsettled") == [waits, torn, bad]
    assert keys(cli, "--unsettled", "--owner", job) == [torn, bad]
    assert keys(cli, "--unsettled", "--task", "two") == [bad]
    done = cli.ok("effects", "list", "--limit", "4")
    for word in (ok, "X: no money", "broken", "succeeded"):
        assert word in done.out
    assert "--limit shows more" in done.err
    assert cli("effects", "list", "--owner", "nonsense").code == 2


def test_show_tells_all_about_one(cli: Cli, conn: psycopg.Connection) -> None:
    job, [ok, bad, torn] = three(conn)
    found = cli.ok("effects", "show", bad, "--json").json
    assert (found["owner_job_id"], found["status"], found["settled"], found["error"]["message"]) == (
        job,
        "failed",
        False,
        "no money",
    )
    assert found["audit"] == []
    cli.ok("effects", "settle", torn, "--reason", "paid by hand")
    text = cli.ok("effects", "show", torn).out
    for word in ("paid by hand", "settle_effect", "EffectBroken"):
        assert word in text
    assert "error" not in cli.ok("effects", "show", ok).out
    missing = cli("effects", "show", "no:0:x")
    assert (missing.code, "there is no effect no:0:x" in missing.err) == (1, True)
    missing = cli("effects", "show", "no:0:x", "--json")
    assert (missing.code, missing.json["answer"]) == (1, "not_found")


def test_settle_and_retry_answer_and_leave_their_mark(cli: Cli, conn: psycopg.Connection) -> None:
    job, [ok, bad, torn] = three(conn)
    refused = cli("jobs", "retry", job)
    assert (refused.code, "WF" not in refused.out, "torn (broken)" in refused.out) == (1, True, True)
    assert cli.ok("effects", "retry", bad, "--reason", "again", "--json").json == [
        {"effect_key": bad, "answer": "reopened"}
    ]
    assert "due" in cli.ok("effects", "retry", bad).out
    assert cli.ok("effects", "settle", bad, "--reason", "by hand", "--json").json == [
        {"effect_key": bad, "answer": "settled"}
    ]
    again = cli("effects", "settle", bad, "--reason", "by hand", "--json")
    assert (again.code, again.json[0]["answer"]) == (1, "refused")
    assert "settled already" in again.json[0]["why"]
    assert cli("effects", "retry", torn).code == 1
    assert cli("effects", "retry", ok).code == 1
    assert cli("effects", "settle", torn).code == 2
    assert cli("effects", "settle", torn, "--reason", " ").code == 2
    assert cli("effects", "settle", "no:0:x", "--reason", "r").code == 1
    q.policy(conn, "gone")
    assert "enqueued" in cli.ok("effects", "retry", torn).out
    cli.ok("effects", "settle", torn, "--reason", "enough")
    assert "reopened" in cli.ok("jobs", "retry", job).out
    subjects = [row["subject"] for row in cli.ok("audit", "list", "--action", "settle_effect", "--json").json]
    assert subjects == [torn, bad]


def test_jobs_show_lists_the_effects_of_a_job(cli: Cli, conn: psycopg.Connection) -> None:
    job, made = three(conn)
    assert [e["effect_key"] for e in cli.ok("jobs", "show", job, "--json").json["effects"]] == made
    text = cli.ok("jobs", "show", job).out
    assert all(key in text for key in made)
    plain = str(q.enqueue(conn))
    assert cli.ok("jobs", "show", plain, "--json").json["effects"] == []
    assert "\neffects\n" not in cli.ok("jobs", "show", plain).out


def test_doctor_fails_for_effects_that_stand_still(cli: Cli, conn: psycopg.Connection) -> None:
    def found() -> dict[str, str]:
        checks = cli("doctor", "--json").json["checks"]
        return next(row for row in checks if row["check"] == "effects")

    assert found()["verdict"] == "ok"
    _, [_, bad, torn] = three(conn)
    sick = found()
    assert (sick["verdict"], sick["found"]) == ("fail", f"1 broken, 1 failed, such as {torn}")
    for key in (bad, torn):
        cli.ok("effects", "settle", key, "--reason", "r")
    assert found()["verdict"] == "ok"


def test_an_effect_that_failed_stays_in_sight_when_retention_has_dropped_its_job(
    cli: Cli, conn: psycopg.Connection
) -> None:
    _, [_, bad, torn] = three(conn)
    q.control_clock(conn)
    q.shift_clock(conn, "32 days")
    conn.execute("select taskq.ensure_partitions()")
    while q.drop_expired(conn):
        pass
    assert q.one(conn, "select taskq.prune()") == 1
    assert keys(cli, "--unsettled") == keys(cli) == [torn, bad]
    assert "X: no money" in cli.ok("effects", "list").out
    checks = {row["check"]: row["found"] for row in cli("doctor", "--json").json["checks"]}
    assert checks["effects"] == f"1 broken, 1 failed, such as {torn}"
    again = cli("effects", "retry", bad)
    assert (again.code, "is failed, and not in history any more" in again.err) == (1, True)
    cli.ok("effects", "settle", bad, "--reason", "paid by hand")
    assert keys(cli, "--unsettled") == [torn]


@pytest.mark.parametrize(("role", "code"), [("operator", 0), ("reader", 1), ("producer", 1)])
def test_settling_needs_an_operator(cli: Cli, dsn: str, conn: psycopg.Connection, role: str, code: int) -> None:
    _, [_, bad, _] = three(conn)
    as_role = make_conninfo(dsn, options=f"-c role=taskq_{role}")
    for args in (["retry", bad], ["settle", bad, "--reason", "r"]):
        done = cli("effects", *args, "--dsn", as_role)
        assert done.code == code
        assert ("taskq_operator" in done.err) is bool(code)
    assert keys(cli, "--dsn", as_role) if role != "producer" else True

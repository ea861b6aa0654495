"""``taskq jobs unknown | resolve | reconcile``: seeing what nobody told, deciding it, and having it asked about."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sql as q
from cli_kit import Cli, make_cli  # noqa: F401

from taskq.cli.database import Database

Conn = psycopg.Connection[Any]
NOBODY = "00000000-0000-0000-0000-000000000000"


def told(conn: Conn) -> UUID:
    """An unknown job that was not to be cancelled."""
    _, job = q.running(conn)
    conn.execute("select taskq.enter_unknown(j, 'told', null) from taskq.jobs j where j.id = %s", (job,))
    return job


def publish_hook(conn: Conn) -> None:
    q.policy(conn, "h")
    conn.execute("select taskq.publish_task(null, 't:reconcile', 'q', 5, 20, 'pure', 'h')")
    conn.execute("select taskq.publish_task(null, 't', 'q', 5, 3, 'idempotent', 'p', null, 't:reconcile')")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Types an answer at a terminal."""
    return lambda text: monkeypatch.setattr(sys, "stdin", Terminal(f"{text}\n"))


# Seeing ---------------------------------------------------------------------------------------------------------------


def test_unknown_lists_what_waits_and_says_so_by_its_exit_code(cli: Cli, conn: Conn) -> None:
    assert cli.ok("jobs", "unknown").out == "no outcome is unknown\n"
    assert cli.ok("jobs", "unknown", "--json").json == []
    publish_hook(conn)
    job = told(conn)
    found = cli("jobs", "unknown", "--json")
    [row] = found.json
    assert (found.code, row["job_id"], row["task"], row["queue"], row["claim_epoch"]) == (1, str(job), "t", "q", 1)
    assert (row["reason"], row["reconcile_status"], row["reconcile_error"]) == ("told", "pending", None)
    shown = cli("jobs", "unknown")
    assert shown.code == 1
    assert all(word in shown.out for word in (str(job), "told", "pending"))
    asker = q.register(conn)
    [asking] = q.claim(conn, asker, tasks=["t:reconcile"])
    q.end(conn, asker, q.End(asking["job_id"], 1, "failed", error={"type": "E", "message": "no [red] answer"}))
    shown = cli("jobs", "unknown")
    assert all(word in shown.out for word in ("failed", "E: no [red] answer"))


def test_unknown_is_narrowed_by_task_and_age(cli: Cli, conn: Conn) -> None:
    job = told(conn)
    assert cli("jobs", "unknown", "--task", "t").code == 1
    assert cli("jobs", "unknown", "--task", "other").code == 0
    assert cli("jobs", "unknown", "--older-than", "10m").code == 0
    conn.execute("update taskq.unknowns set since = taskq.now() - interval '11 min' where job_id = %s", (job,))
    assert cli("jobs", "unknown", "--older-than", "10m").code == 1
    assert cli("jobs", "unknown", "--older-than", "12m").code == 0
    wrong = cli("jobs", "unknown", "--older-than", "soon")
    assert (wrong.code, "--older-than" in wrong.err) == (2, True)
    told(conn)
    limited = cli("jobs", "unknown", "--limit", "1")
    assert (limited.out.count("told"), "the oldest 1; --limit shows more" in limited.err) == (1, True)
    assert str(job) in limited.out


# Deciding -------------------------------------------------------------------------------------------------------------


def test_resolve_names_what_is_missing_and_the_cure(cli: Cli, conn: Conn) -> None:
    job = str(told(conn))
    undecided = cli("jobs", "resolve", job, "--reason", "asked")
    assert (undecided.code, "with --happened or --did-not-happen" in undecided.err) == (2, True)
    assert f"taskq jobs show {job}" in undecided.err
    for reason in ([], ["--reason", "  "]):
        unsaid = cli("jobs", "resolve", job, "--happened", *reason)
        assert (unsaid.code, "say what you checked, with --reason TEXT" in unsaid.err) == (2, True)
    odd = cli("jobs", "resolve", job, "--did-not-happen", "--result", "1", "--reason", "asked")
    assert (odd.code, "--result goes with --happened only" in odd.err) == (2, True)
    assert q.status(conn, UUID(job)) == "unknown"


@pytest.mark.parametrize(
    ("decision", "became", "said"),
    [
        ("--happened", "succeeded", "succeeded"),
        ("--did-not-happen", "pending", "pending: it runs again, with the same"),
    ],
)
def test_resolve_shows_what_it_was_and_what_became_of_it(
    cli: Cli, conn: Conn, decision: str, became: str, said: str
) -> None:
    job = told(conn)
    done = cli.ok("jobs", "resolve", str(job), decision, "--reason", "asked them")
    assert f"{job}: t in q, attempt 1 on w, unknown since" in done.err
    assert done.out.startswith(f"{job}: {said}")
    assert q.status(conn, job) == became
    [noted] = q.rows(conn, "select * from taskq.audit where action = 'resolve'")
    assert (noted["reason"], "@" in noted["actor"]) == ("asked them", True)
    again = cli("jobs", "resolve", str(job), "--happened", "--reason", "asked them")
    assert (again.code, f"was resolved before: {became}, by " in again.err) == (1, True)


@pytest.mark.parametrize(
    ("cancelled", "decision", "asked"),
    [
        (False, "--did-not-happen", "say so only if it can no longer happen: the provider has closed the key"),
        (True, "--did-not-happen", "it becomes cancelled, as was requested"),
        (False, "--happened", "it becomes succeeded, for good"),
    ],
)
def test_resolve_asks_on_a_terminal_and_names_the_rule(
    cli: Cli, conn: Conn, answer: Any, cancelled: bool, decision: str, asked: str
) -> None:
    job = q.unknown(conn)[1] if cancelled else told(conn)
    call = ("jobs", "resolve", str(job), decision, "--reason", "asked")
    answer("n")
    refused = cli(*call)
    assert (refused.code, asked in refused.err, "nothing was changed" in refused.err) == (1, True, True)
    assert q.status(conn, job) == "unknown"
    answer("y")
    assert cli(*call).code == 0
    assert q.status(conn, job) != "unknown"


def test_resolve_does_not_ask_when_told_so(cli: Cli, conn: Conn, answer: Any) -> None:
    for flag in ("--yes", "--json"):
        answer("n")
        cli.ok("jobs", "resolve", str(told(conn)), "--happened", "--reason", "asked", flag)


def test_resolve_decides_the_attempt_that_was_looked_at(cli: Cli, conn: Conn) -> None:
    job = told(conn)
    late = cli("jobs", "resolve", str(job), "--happened", "--reason", "asked", "--epoch", "2")
    assert (late.code, "is about attempt 2 of job" in late.err) == (1, True)
    assert q.status(conn, job) == "unknown"
    cli.ok("jobs", "resolve", str(job), "--happened", "--reason", "asked", "--epoch", "1")


def test_resolve_does_not_decide_what_became_unknown_after_the_look(
    cli: Cli, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, job = q.running(conn)
    call = ("jobs", "resolve", str(job), "--did-not-happen", "--reason", "asked")
    assert "is running, not unknown" in cli(*call).err
    look = Database.rows

    def look_and_lose(self: Database, query: str, *arguments: Any) -> list[dict[str, Any]]:
        found = look(self, query, *arguments)
        if query == "unknown_outcome":
            conn.execute("select taskq.enter_unknown(j, 'told', null) from taskq.jobs j where j.id = %s", (job,))
        return found

    monkeypatch.setattr(Database, "rows", look_and_lose)
    done = cli(*call)
    assert (done.code, done.out, "has become unknown only just now" in done.err) == (1, "", True)
    assert (q.status(conn, job), q.attempts(conn, job)) == ("unknown", [])
    assert q.rows(conn, "select * from taskq.audit") == []
    cli.ok(*call)


def test_the_help_of_resolve_has_the_rule(cli: Cli) -> None:
    text = " ".join(cli.ok("jobs", "resolve", "--help").out.replace("│", " ").split())
    assert "only once it can no longer happen: the provider has closed the key" in text
    assert "with the same idempotency key" in text


# Asking ---------------------------------------------------------------------------------------------------------------


def test_reconcile_asks_now(cli: Cli, conn: Conn) -> None:
    job = told(conn)
    unhooked = cli("jobs", "reconcile", str(job))
    assert (unhooked.code, "task t has no hook that could be asked" in unhooked.err) == (1, True)
    assert cli("jobs", "reconcile", str(job), "--json").json[0]["answer"] == "refused"
    assert cli("jobs", "reconcile", NOBODY).code == 1
    publish_hook(conn)
    done = cli.ok("jobs", "reconcile", str(job), "--reason", "the provider is back", "--json")
    [row] = done.json
    assert (row["id"], row["answer"]) == (str(job), "enqueued")
    assert q.get(conn, UUID(row["reconcile_job"]))["task"] == "t:reconcile"
    shown = cli.ok("jobs", "reconcile", str(job))
    assert "due" in shown.out
    conn.execute("update taskq.workers set status = 'lost', ended_at = taskq.now()")
    assert "no live worker serves the queue q" in cli.ok("jobs", "reconcile", str(job)).err


def test_who_may(cli: Cli, conn: Conn) -> None:
    job = str(told(conn))
    reader = psycopg.conninfo.make_conninfo(cli.dsn, options="-c role=taskq_reader")
    assert cli("jobs", "unknown", "--dsn", reader).code == 1
    for call in (["resolve", job, "--happened", "--reason", "r"], ["reconcile", job]):
        denied = cli("jobs", *call, "--dsn", reader)
        assert (denied.code, "grant the role taskq_operator" in denied.err) == (1, True)


# A step --------------------------------------------------------------------------------------------------------------


def doubtful_step(conn: Conn, occurrence: int = 1) -> UUID:
    """A job that is unknown for one of its side-effecting steps; another has failed before."""
    worker, job = q.running(conn)
    for name, n in (("mail", 1), ("pay", occurrence)):
        conn.execute("select taskq.start_step(%s, %s, 1, %s, %s)", (worker, job, name, n))
        if name == "mail":
            said = '{"type": "Refused", "message": "no [red]"}'
            conn.execute(
                "select taskq.end_step(j.claimed_by, j.id, 1, 'mail', 1, j.effect_started_at, null, %s)"
                " from taskq.jobs j where j.id = %s",
                (said, job),
            )
    q.end(conn, worker, q.End(job, 1, "unknown", error={"step": "pay", "reason": "shutdown"}))
    return job


def test_a_step_that_is_unknown_is_named_and_decided_and_the_job_goes_on(
    cli: Cli, conn: Conn, answer: Callable[[str], None]
) -> None:
    job = doubtful_step(conn)
    assert cli("jobs", "unknown", "--json").json[0]["step"] == "pay"
    assert all(word in cli("jobs", "unknown").out for word in ("step", "pay", str(job)))
    shown = cli.ok("jobs", "show", str(job)).out
    assert "has started its effect, and nobody has told what became of it" in shown
    assert "Refused: no [red]" in shown
    answer("y")
    said = ("--happened", "--result", "7", "--reason", "looked")
    found = cli.ok("jobs", "resolve", str(job), *said)
    assert f"{job}: what became of step pay of t in q" in found.err
    assert "the step is recorded with the result that you gave, or null, for good" in found.err
    assert found.out.endswith(f"{job}: pending: step pay is recorded, and the body goes on\n")
    assert "has started its effect" not in cli.ok("jobs", "show", str(job)).out


def test_a_step_that_did_not_happen_is_called_again_or_cancelled_with_its_job(cli: Cli, conn: Conn) -> None:
    job = doubtful_step(conn, 2)
    said = ("--did-not-happen", "--reason", "looked")
    assert (
        cli.ok("jobs", "resolve", str(job), *said).out == f"{job}: pending: step pay #2 is called again, by its key\n"
    )
    q.cancel(conn, job)
    job = doubtful_step(conn)
    conn.execute("update taskq.jobs set cancel_requested_at = taskq.now() where id = %s", (job,))
    expected = f"{job}: cancelled, as was requested; step pay did not happen\n"
    assert cli.ok("jobs", "resolve", str(job), *said).out == expected


def test_a_step_is_asked_about_by_its_own_hook_or_it_is_said_that_it_has_none(cli: Cli, conn: Conn) -> None:
    publish_hook(conn)
    job = doubtful_step(conn)
    assert cli("jobs", "unknown", "--json").json[0]["reconcile_status"] is None
    unhooked = cli("jobs", "reconcile", str(job))
    assert (unhooked.code, "step pay of task t has no hook that could be asked" in unhooked.err) == (1, True)
    assert "for a step with reconcile_steps=" in unhooked.err
    conn.execute("select taskq.publish_task(null, 't:reconcile:pay', 'q', 5, 20, 'pure', 'h')")
    steps = '{"pay": "t:reconcile:pay"}'
    conn.execute("select taskq.publish_task(null, 't', 'q', 5, 3, 'idempotent', 'p', null, null, %s)", (steps,))
    [row] = cli.ok("jobs", "reconcile", str(job), "--json").json
    assert (row["answer"], q.get(conn, UUID(row["reconcile_job"]))["task"]) == ("enqueued", "t:reconcile:pay")
    [row] = cli("jobs", "unknown", "--json").json
    assert (row["step"], row["reconcile_status"]) == ("pay", "pending")

"""Filters of ``taskq jobs``, and acting on all that they name: counted first, in batches, on the record, repeatable."""

from __future__ import annotations

import getpass
import os
import signal
import socket
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sql as q
from cli_kit import Cli, make_cli  # noqa: F401
from helpers import eventually
from psycopg.types.json import Jsonb

from taskq.cli import bulk
from taskq.cli.database import in_words

Conn = psycopg.Connection[Any]


def ids(cli: Cli, *args: str) -> list[str]:
    return [row["id"] for row in cli.ok("jobs", "list", "--json", *args).json]


def failed(conn: Conn, n: int, kind: str = "Oops", **spec: Any) -> list[UUID]:
    """Jobs that failed with an error of a type."""
    jobs = [row["job_id"] for row in q.enqueue_many(conn, n, max_attempts=1, **spec)]
    worker = q.register(conn, queues=[spec.get("queue", "q")])
    q.claim(conn, worker, n, lanes=[(spec.get("queue", "q"), 5)])
    ends = [q.End(job, outcome="failed", error={"type": kind, "message": "no"}) for job in jobs]
    assert q.end(conn, worker, *ends) == n
    return jobs


def waits_again(conn: Conn) -> UUID:
    """A job that has failed twice and snoozed since."""
    worker, job = q.running(conn, q.register(conn, queues=["again"]), queue="again")
    first, last = ({"type": "Oops", "message": "first"}, {"type": "Late", "message": "once more"})
    for epoch, outcome, error in ((1, "retry", first), (2, "retry", last), (3, "snooze", None)):
        assert q.end(conn, worker, q.End(job, epoch, outcome, epoch, error=error)) == 1
        if outcome == "retry":
            q.claim_one(conn, worker, lanes=[("again", 5)])
    return job


def statuses(conn: Conn) -> dict[str, int]:
    found = q.rows(conn, "select status, count(*)::int as n from taskq.all_jobs group by status")
    return {row["status"]: row["n"] for row in found}


# Looking --------------------------------------------------------------------------------------------------------------


def test_each_filter(cli: Cli, conn: Conn) -> None:
    worker, running = q.running(conn, q.register(conn, queues=["a"]), queue="a")
    [oops, _] = failed(conn, 2)
    [other] = failed(conn, 1, "Other", queue="b")
    tagged = q.enqueue(conn, tags=["red", "round"])
    past = "2020-01-01T00:00:00+00:00"
    overdue = q.enqueue(conn, deadline=past)
    held = q.enqueue(conn)
    conn.execute("update taskq.jobs set status = 'held', held_reason = 'signal' where id = %s", (held,))
    conn.execute("update taskq.workers set name = 'w7' where id = %s", (worker,))
    assert ids(cli, "--tag", "red") == ids(cli, "--tag", "red", "--tag", "round") == [str(tagged)]
    assert ids(cli, "--tag", "red", "--tag", "blue") == []
    assert ids(cli, "--worker", "w7") == ids(cli, "--worker", str(worker)) == [str(running)]
    assert ids(cli, "--error", "Other") == [str(other)]
    assert len(ids(cli, "--error", "Other", "--error", "Oops")) == 3
    again = waits_again(conn)
    assert ids(cli, "--error", "Late") == [str(again)]
    [row] = cli.ok("jobs", "list", "--error", "Late", "--json").json
    assert (row["status"], row["error"]) == ("pending", "Late: once more")
    assert "Late: once more" in cli.ok("jobs", "list", "-q", "again").out
    assert ids(cli, "--held", "signal") == [str(held)]
    assert ids(cli, "--overdue") == [str(overdue)]
    assert ids(cli, "--cancel-requested") == []
    q.cancel(conn, running)
    assert ids(cli, "--cancel-requested") == [str(running)]
    assert str(running) not in ids(cli, "--no-cancel-requested")
    assert str(oops) in ids(cli, "--id", str(oops)[:9])
    assert ids(cli, "--id", str(oops)) == [str(oops)]
    assert ids(cli, "--order", "oldest", "--limit", "1") == [str(running)]
    assert ids(cli, "--until", "1h") == ids(cli, "--older-than", "1h") == []
    assert len(ids(cli, "--until", "2999-01-01", "--older-than", "0s")) == 8
    for args in (
        ["--held", "boredom"],
        ["--order", "random"],
        ["--id", "0199"],
        ["--older-than", "2031-01-01"],
        ["--until", "soon"],
    ):
        assert cli("jobs", "list", *args).code == 2, args
    nobody = cli("jobs", "list", "--worker", "nobody")
    assert (nobody.code, "there is no worker 'nobody'" in nobody.err) == (1, True)


def test_show_takes_the_beginning_of_an_id(cli: Cli, conn: Conn) -> None:
    one = UUID("0aaaaaaa-0000-7000-8000-000000000001")
    two = UUID("0aaaaaaa-0000-7000-8000-0000000000f2")
    record = "insert into taskq.jobs select (jsonb_populate_record(j, %s)).* from taskq.jobs j where id = %s"
    for job in (one, two):
        conn.execute(record, (Jsonb({"id": str(job)}), q.enqueue(conn)))
    assert cli.ok("jobs", "show", str(two)[:35], "--json").json["id"] == str(two)
    several = cli("jobs", "show", "0aaaaaaa")
    assert (several.code, str(one) in several.out, str(two) in several.out) == (1, True, True)
    assert "several ids begin with 0aaaaaaa; give more digits" in several.err
    told = cli("jobs", "show", "0AAAAAAA", "--json").json
    assert (told["answer"], [row["id"] for row in told["candidates"]]) == ("ambiguous", [str(one), str(two)])
    none = cli("jobs", "show", "0bbbbbbb")
    assert (none.code, "no job whose id begins with 0bbbbbbb" in none.err) == (1, True)
    assert cli("jobs", "show", "0aaaaaa").code == 2


# Acting ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_done_before_a_yes(cli: Cli, conn: Conn) -> None:
    q.enqueue_many(conn, 3, queue="mail")
    q.running(conn, q.register(conn, queues=["other"]), queue="other")
    before = q.dump(conn)
    for args in (["--queue", "mail"], ["--queue", "mail", "--dry-run"], ["--queue", "mail", "--dry-run", "--yes"]):
        done = cli("jobs", "cancel", *args)
        assert done.code == (0 if "--dry-run" in args else 1)
        assert done.out.startswith("would cancel 3 jobs: 3 pending")
        assert ("repeat with --yes" in done.out) == ("--dry-run" not in args)
    everything = cli("jobs", "cancel", "--older-than", "0s")
    assert everything.out == "would cancel 4 jobs: 3 pending, 1 running; repeat with --yes\n"
    assert "would cancel 2 of 3 jobs" in cli("jobs", "cancel", "-q", "mail", "--limit", "2").out
    told = cli("jobs", "cancel", "-q", "mail", "--dry-run", "--json").json
    assert (told["matched"], told["statuses"], told["done"]) == (3, {"pending": 3}, 0)
    assert cli.ok("jobs", "cancel", "-q", "nothing", "--yes").out == "no jobs match, so none would be cancelled\n"
    for wrong in ([], ["--yes"], ["--limit", "3"], [str(UUID(int=1)), "-q", "mail"], ["--status", "succeeded"]):
        assert cli("jobs", "cancel", *wrong).code == 2, wrong
    assert q.dump(conn) == before


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1), ("", 130)])
def test_on_a_terminal_it_asks(cli: Cli, conn: Conn, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    import io

    q.enqueue_many(conn, 2)
    typed = io.StringIO(answer)
    typed.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", typed)
    done = cli("jobs", "cancel", "--task", "t")
    assert done.code == code
    assert "would cancel 2 jobs: 2 pending" in done.err
    assert statuses(conn) == ({"cancelled": 2} if code == 0 else {"pending": 2})


def test_cancelling_in_batches_leaves_a_record_of_each(cli: Cli, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BATCH", 4)
    q.enqueue_many(conn, 9)
    q.enqueue_many(conn, 2, queue="spared")
    worker = q.register(conn)
    [running] = q.claim(conn, worker, 1)
    done = cli.ok("jobs", "cancel", "-q", "q", "--since", "1h", "--yes", "--reason", "wrong price")
    assert done.out == "9 jobs: 8 cancelled, 1 requested\n"
    assert done.err.splitlines() == ["4 of 9", "8 of 9", "9 of 9"]
    assert statuses(conn) == {"cancelled": 8, "running": 1, "pending": 2}
    rows = cli.ok("audit", "list", "--action", "cancel_many", "--json").json
    assert [sum(row["details"]["answers"].values()) for row in rows] == [1, 4, 4]
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    for row in rows:
        assert (row["actor"], row["reason"], row["subject"]) == (who, "wrong price", "jobs")
        selection = row["details"]["selection"]
        assert (selection["queue"], selection["status"]) == (["q"], ["pending", "held", "running"])
        assert selection["since"].startswith("20")  # an instant, whatever "1h" will mean later
    assert len(cli.ok("audit", "list", "--action", "cancel", "--json").json) == 9
    [one] = cli.ok("audit", "list", "--subject", str(running["job_id"]), "--json").json
    assert one["details"] == {"answer": "requested", "effect_started": False}
    # Again: the one that was asked for already is not asked for again.
    assert cli.ok("jobs", "cancel", "-q", "q", "--yes").out.startswith("no jobs match")


def test_retrying_what_failed(cli: Cli, conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BATCH", 2)
    oops = failed(conn, 5)
    failed(conn, 1, "Other")
    q.cancel(conn, q.enqueue(conn))
    done = cli.ok("jobs", "retry", "--error", "Oops", "--limit", "3", "--yes", "--json").json
    assert (done["matched"], done["wanted"], done["done"], done["answers"]) == (5, 3, 3, {"reopened": 3})
    assert sorted(q.status(conn, job) for job in oops) == ["failed", "failed", "pending", "pending", "pending"]
    noted = cli.ok("audit", "list", "--action", "retry_many", "--json").json
    assert {row["details"]["selection"]["limit"] for row in noted} == {3}
    assert cli.ok("jobs", "retry", "--task", "t", "--yes").out == "3 jobs: 3 reopened\n"
    assert statuses(conn) == {"pending": 6, "cancelled": 1}  # what somebody cancelled stays so, unless it is named
    assert cli.ok("jobs", "retry", "--status", "cancelled", "--yes").out == "1 job: 1 reopened\n"
    later = q.enqueue(conn, run_in=3600, queue="later")
    assert cli.ok("jobs", "retry", "--status", "pending", "-q", "later", "--yes").out == "1 job: 1 due\n"
    assert q.one(conn, "select run_at <= taskq.now() from taskq.jobs where id = %s", later)


def test_what_is_refused_is_told_and_holds_up_nothing(cli: Cli, conn: Conn) -> None:
    [taken] = failed(conn, 1)
    failed(conn, 1)
    keyed = q.enqueue(conn, unique_key="k")
    q.cancel(conn, keyed)
    q.enqueue(conn, unique_key="k")
    done = cli("jobs", "retry", "--status", "failed,cancelled", "--yes")
    assert (done.code, done.out) == (1, "3 jobs: 2 reopened, 1 refused\n")
    assert f"{keyed}: unique key 'k' of scope t is held by job" in done.err
    assert q.status(conn, taken) == "pending"


def test_a_batch_that_cannot_get_its_locks_is_tried_again(
    cli: Cli, conn: Conn, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "LOCK_TIMEOUT", "50ms")
    monkeypatch.setattr(bulk, "BATCH", 1)
    first, second = q.enqueue(conn), q.enqueue(conn)
    with psycopg.connect(dsn) as holder:
        holder.execute("select from taskq.jobs where id = %s for update", (second,))
        done = cli("jobs", "cancel", "--task", "t", "--yes")
    assert (done.code, done.out) == (1, "")
    assert "1 of 2 are done and stay so; the same command goes on with the others" in done.err
    assert "others are at work on the same rows" in done.err
    assert (q.status(conn, first), q.status(conn, second)) == ("cancelled", "pending")
    assert cli.ok("jobs", "cancel", "--task", "t", "--yes").out == "1 job: 1 cancelled\n"


def test_ctrl_c_leaves_whole_batches_and_the_same_command_goes_on(cli: Cli, conn: Conn, dsn: str) -> None:
    n = 2 * bulk.BATCH + 10
    q.enqueue_many(conn, n)
    last = q.one(conn, "select max(id::text) from taskq.jobs")
    with psycopg.connect(dsn) as holder:
        # The last batch waits for this lock; the signal then comes in the middle of it.
        holder.execute("select from taskq.jobs where id = %s for update", (last,))
        with cli.process("jobs", "cancel", "--task", "t", "--yes") as process:
            waiting = "select count(*) from pg_stat_activity where datname = current_database()"
            waiting += " and wait_event_type = 'Lock' and application_name = 'taskq cli'"
            eventually(lambda: q.one(conn, waiting) == 1, 60)
            os.kill(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert f"{2 * bulk.BATCH} of {n} are done and stay so" in output
    assert "Traceback" not in output
    assert statuses(conn) == {"cancelled": 2 * bulk.BATCH, "pending": 10}
    assert cli.ok("jobs", "cancel", "--task", "t", "--yes").out == "10 jobs: 10 cancelled\n"
    assert q.violations(conn) == []


def test_a_statement_that_ends_by_itself_while_ctrl_c_cancels_it_was_interrupted() -> None:
    @in_words("taskq", "operator")
    def cancelled_too_late() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise psycopg.errors.LockNotAvailable from None

    with pytest.raises(KeyboardInterrupt):
        cancelled_too_late()


def test_the_batches_of_a_bulk_action_read_an_index(conn: Conn) -> None:
    from taskq.db.queries import load

    failed(conn, 3)
    conn.execute("set enable_seqscan = off")
    queries = load("cli", "taskq")
    empty: list[object] = [None] * 15
    empty[0] = ["failed"]
    for query, more, index in (
        ("next_unfinished", ["00000000-0000-0000-0000-000000000000", 10], "jobs_pkey"),
        ("next_finished", ["-infinity", "00000000-0000-0000-0000-000000000000", 10], "finished_at_task_idx"),
    ):
        cursor = psycopg.RawCursor(conn)
        plan = cursor.execute(f"explain (costs off) {queries[query]}".encode(), [*empty, *more]).fetchall()
        assert index in str(plan), plan


# Workers --------------------------------------------------------------------------------------------------------------


def test_workers_by_name_and_by_id(cli: Cli, conn: Conn) -> None:
    worker, job = q.running(conn)
    for name in ("w", str(worker)):
        told = cli.ok("workers", "show", name, "--json").json
        assert (told["id"], told["holds"], [c["id"] for c in told["claims"]]) == (str(worker), 1, [str(job)])
    assert str(job) in cli.ok("workers", "show", "w").out
    missing = cli("workers", "show", "x")
    assert (missing.code, "there is no worker 'x'" in missing.err) == (1, True)
    twin = q.register(conn)
    for command in ("show", "drain"):
        several = cli("workers", command, "w")
        assert (several.code, str(worker) in several.err, str(twin) in several.err) == (1, True, True)
    conn.execute("select taskq.stop_worker(%s)", (twin,))
    assert cli.ok("workers", "show", "w", "--json").json["id"] == str(worker)


def test_drain_asks_and_answers_for_what_it_finds(cli: Cli, conn: Conn) -> None:
    worker = q.register(conn)
    done = cli.ok("workers", "drain", "w", "--reason", "new kernel", "--json")
    assert done.json == [{"id": str(worker), "name": "w", "answer": "requested"}]
    assert [row["kind"] for row in q.exchange(conn, worker, (), 1)] == ["lease"]  # it may claim nothing more
    assert cli.ok("workers", "drain", "w", "--json").json[0]["answer"] == "draining"
    late = cli("workers", "drain", "w", "--wait", "--timeout", "0.1")
    assert (late.code, "it goes on draining" in late.err) == (1, True)
    assert "new kernel" in cli.ok("workers", "show", "w").out
    conn.execute("select taskq.stop_worker(%s)", (worker,))
    assert cli.ok("workers", "drain", "w", "--wait", "--json").json[0]["answer"] == "stopped"
    gone = q.register(conn)
    conn.execute("update taskq.workers set name = 'gone' where id = %s", (gone,))
    q.lose(conn, gone)
    conn.execute("update taskq.workers set lease_expires_at = renewed_at")
    assert cli("workers", "drain", "gone", "--json").json[0]["answer"] == "lost"
    [row] = cli.ok("audit", "list", "--action", "drain", "--json").json
    assert (row["subject"], row["reason"]) == (str(worker), "new kernel")


def test_a_worker_process_drains_and_exits_with_0(cli: Cli, conn: Conn) -> None:
    from cli_kit import SHOP

    (cli.folder / "shop.py").write_text(SHOP)
    with cli.process("worker", "shop:app", "--name", "w1", "--lease", "3") as process:
        eventually(lambda: q.one(conn, "select count(*) from taskq.workers where status = 'live'") == 1, 60)
        done = cli.ok("workers", "drain", "w1", "--wait", "--timeout", "60", "--json")
        assert done.json[0]["answer"] == "stopped"
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert "worker.drain_requested" in output

"""``taskq demo-payments``: what it compares, that it tells what differs, and one play with kills and faults."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from cli_kit import Cli, make_cli  # noqa: F401

from taskq.demo.payments import play as module
from taskq.demo.payments.report import Payment, Report, Strike

GOOD = (
    Payment("payment-1", "succeeded", charged=1),
    Payment("payment-2", "failed", "OutOfStock", charged=1, refunded=1, refund="refunded"),
    Payment("payment-3", "failed", "taskq.demo.payments.client.Declined", refund="not_charged"),
    Payment("payment-4", "cancelled", "Cancelled", refund="not_charged"),
)
REPORT = Report(
    seed=7,
    payments=GOOD,
    strangers=[],
    strikes=[Strike("killed", "demo-1", 5), Strike("frozen", "demo-2", 4)],
    unknowns=[
        {"reason": "worker_lost", "outcome": "resolved", "n": 6},
        {"reason": "told", "outcome": "succeeded", "n": 1},
    ],
    resolved={"happened": 4, "did_not_happen": 2},
    left_unknown=0,
    requests={"asked": 5, "charged": 2, "refund_asked": 3},
    violations=[],
    exits=[0, 0, 0],
    seconds=31.4,
)


def test_what_agrees_has_no_problems() -> None:
    assert REPORT.problems() == []
    assert REPORT.as_json()["ok"] is True


@pytest.mark.parametrize(
    ("payment", "said"),
    [
        (Payment("p", "succeeded", charged=2), "DOUBLED: p was charged 2 times"),
        (Payment("p", "succeeded"), "LOST: the job of p has succeeded, and the provider charged nothing"),
        (Payment("p", "succeeded", charged=1, refunded=1), "succeeded, and its charge was refunded"),
        (Payment("p", "failed", charged=1, refunded=2, refund="refunded"), "DOUBLED: p was refunded 2 times"),
        (Payment("p", "failed", charged=1, refund="refunded"), "its charge was never refunded"),
        (Payment("p", "cancelled", charged=1, refund="not_charged"), "its charge was never refunded"),
        (Payment("p", "failed"), "its refund is not settled"),
        (Payment("p", "failed", refunded=1, refund="not_charged"), "its refund says not_charged, the provider made 1"),
        (Payment("p", "unknown", charged=1), "LOST: the job of p is unknown"),
        (Payment("p", "missing"), "LOST: the job of p is missing"),
    ],
)
def test_a_payment_in_which_both_sides_differ_is_told_of(payment: Payment, said: str) -> None:
    found = replace(REPORT, payments=[*GOOD, payment]).problems()
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"strangers": ["payment-9"]}, "a payment that nobody asked for: payment-9"),
        ({"left_unknown": 2}, "2 outcomes are still unknown"),
        (
            {"violations": [{"law": 3, "code": "attempt_twice", "job_id": "x", "detail": "y"}]},
            "taskq verify: law 3, attempt_twice, job x: y",
        ),
        ({"exits": [0, 75, 0]}, "exit codes 0, 75, 0"),
        ({"strikes": [Strike("killed", "w", 3)]}, "this has shown nothing"),
        ({"strikes": [Strike("killed", "w", 0), Strike("frozen", "w", 2)]}, "this has shown nothing"),
        ({"unknowns": []}, "this has shown nothing"),
    ],
)
def test_whatever_else_is_wrong_is_told(change: dict[str, Any], said: str) -> None:
    [problem] = replace(REPORT, **change).problems()
    assert said in problem


def forged(change: Callable[[Payment], Payment]) -> Report:
    return replace(REPORT, payments=[change(GOOD[0]), *GOOD[1:]])


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (forged(lambda p: replace(p, charged=2)), "error: DOUBLED: payment-1 was charged 2 times"),
        (forged(lambda p: replace(p, charged=0)), "error: LOST: the job of payment-1 has succeeded"),
    ],
    ids=["doubled", "lost"],
)
def test_a_doubled_or_lost_charge_ends_it_with_exit_code_1(
    report: Report, said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "play", lambda *_, own: report if not own else None)
    done = cli("demo-payments", "--dsn", cli.dsn, "--seed", "7")
    assert done.code == 1
    assert said in done.err
    assert "nothing was doubled" not in done.err
    done = cli("demo-payments", "--dsn", cli.dsn, "--json", "--keep")
    assert (done.code, done.json["ok"]) == (1, False)
    shutil.rmtree(done.err.split("kept in ")[1].splitlines()[0])


def test_the_report_shows_both_sides(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "play", lambda *_, own: REPORT)
    done = cli.ok("demo-payments", "--dsn", cli.dsn)
    words = [
        "failed (Declined): not_charged",
        "failed (OutOfStock): refunded",
        "reconciled with the provider",
        "told late by its own body",
        "reconciled: 4 had happened, 2 had not",
        "2 charged",
        "taskq verify: no violations",
    ]
    assert [word for word in words if word not in done.out] == []
    assert "seed " in done.err
    assert "7 outcomes were unknown, each was settled; nothing was doubled or lost in 31 s" in done.err


def test_charges_survive_kills_freezes_and_a_provider_that_fails(cli: Cli) -> None:
    done = cli("demo-payments", "--dsn", cli.dsn, "--payments", "60", "--seed", "7", "--json")
    assert done.code == 0, done
    report = done.json
    assert report["problems"] == []
    assert {strike["kind"] for strike in report["strikes"]} == {"killed", "frozen"}
    assert report["requests"]["refund_asked"] >= 1
    with psycopg.connect(cli.dsn) as conn:
        [unknowns] = conn.execute("select count(*) from taskq.unknowns").fetchone() or ()
        [jobs] = conn.execute("select count(*) from taskq.jobs").fetchone() or ()
    assert unknowns == sum(row["n"] for row in report["unknowns"]) > 0
    assert jobs == 0

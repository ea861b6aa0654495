"""``taskq demo-orders``: what it compares, that it tells what differs, and one play with kills, faults and cancels."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from cli_kit import Cli, make_cli  # noqa: F401

from taskq.demo.orders import play as module
from taskq.demo.orders.report import Order, Report, Stock
from taskq.demo.strikes import Strike

DONE = Order(1, "succeeded", charged=1, reserved=1, shipped=1)
NO_SHELF = Order(
    number=2,
    status="failed",
    node="ship",
    error="taskq.demo.orders.tasks.OutOfStock",
    charged=1,
    refunded=1,
    reserved=1,
    released=1,
    promised={"refund": "refunded", "release": "lamp"},
)
DECLINED = Order(3, "failed", "charge", "x.Declined", reserved=1, released=1, promised={"release": "chair"})
CANCELLED = Order(
    number=4,
    status="cancelled",
    charged=1,
    refunded=1,
    reserved=1,
    released=1,
    shipped=1,
    recalled=1,
    promised={"refund": "refunded", "release": "chair", "recall": "chair"},
)
GOOD = (DONE, NO_SHELF, DECLINED, CANCELLED, Order(5, "cancelled"))
REPORT = Report(
    seed=7,
    orders=GOOD,
    stock=[Stock("chair", 10, 10, 9, 9), Stock("lamp", 10, 0, 10, 0)],
    strangers=[],
    cancels={"requested": 1, "cancelled": 1},
    strikes=[Strike("killed", "demo-1", 5), Strike("killed", "demo-2", 0)],
    unknowns=[{"reason": "worker_lost", "outcome": "resolved", "n": 6}],
    left_unknown=0,
    requests={"asked": 5, "charged": 3, "refund_asked": 2},
    violations=[],
    exits=[0, 0, 0],
    seconds=31.4,
)


def test_what_agrees_has_no_problems() -> None:
    assert REPORT.problems() == []
    assert REPORT.as_json()["ok"] is True
    assert REPORT.undone == 2


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (replace(DONE, charged=2), "DOUBLED: order 1 was charged 2 times"),
        (replace(DONE, shipped=2), "DOUBLED: order 1 was shipped 2 times"),
        (replace(DONE, reserved=2), "DOUBLED: order 1 was reserved 2 times"),
        (replace(DONE, charged=0), "LOST: order 1 succeeded, was charged 0 times"),
        (replace(DONE, reserved=0), "LOST: order 1 succeeded, was reserved 0 times"),
        (replace(DONE, shipped=0), "LOST: order 1 succeeded, was shipped 0 times"),
        (
            replace(DONE, refunded=1, promised={"refund": "refunded"}),
            "LOST: order 1 succeeded, was charged 1 times and refunded 1 times",
        ),
        (replace(DONE, promised={"release": "chair"}), "the release of order 1 was promised; it was released 0 times"),
        (replace(NO_SHELF, charged=2, refunded=2), "DOUBLED: order 2 was refunded 2 times"),
        (replace(NO_SHELF, refunded=0), "LOST: order 2 failed, was charged 1 times and refunded 0 times"),
        (replace(DECLINED, charged=1), "LOST: order 3 failed, was charged 1 times and refunded 0 times"),
        (
            replace(DECLINED, refunded=1, promised={"release": "chair", "refund": "refunded"}),
            "LOST: order 3 failed, was charged 0 times and refunded 1 times",
        ),
        (replace(NO_SHELF, released=0), "LOST: order 2 failed, was reserved 1 times and released 0 times"),
        (replace(NO_SHELF, released=2), "DOUBLED: order 2 was released 2 times"),
        (replace(NO_SHELF, shipped=1), "LOST: order 2 failed, was shipped 1 times and recalled 0 times"),
        (replace(CANCELLED, refunded=0), "LOST: order 4 cancelled, was charged 1 times and refunded 0 times"),
        (replace(CANCELLED, recalled=2), "DOUBLED: order 4 was recalled 2 times"),
        (
            replace(NO_SHELF, promised={"release": "lamp"}),
            "the refund of order 2 was not promised; it was refunded 1 times",
        ),
        (
            replace(NO_SHELF, promised={"refund": "not settled", "release": "lamp"}),
            "LOST: order 2 is failed, and its refund is not settled",
        ),
        (replace(DONE, status="running"), "LOST: the run of order 1 is running"),
        (Order(9, "missing"), "LOST: the run of order 9 is missing"),
    ],
)
def test_an_order_in_which_the_sides_differ_is_told_of(order: Order, said: str) -> None:
    found = replace(
        REPORT, orders=[order if each.number == order.number else each for each in (*GOOD, order)]
    ).problems()
    assert any(said in problem for problem in found), found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stock": [Stock("chair", 10, 10, 8, 9)]}, "LOST: the books have given away 2, and 1 orders have succeeded"),
        ({"stock": [Stock("chair", 10, 10, 9, 10)]}, "LOST: the shelf have given away 0, and 1 orders have succeeded"),
        ({"strangers": ["order-9"]}, "a payment that nobody asked for: order-9"),
        ({"left_unknown": 2}, "2 outcomes are still unknown"),
        (
            {"violations": [{"law": 9, "code": "receipts_missing", "job_id": "x", "detail": "y"}]},
            "taskq verify: law 9, receipts_missing, job x: y",
        ),
        ({"exits": [0, 75, 0]}, "exit codes 0, 75, 0"),
        ({"strikes": [Strike("killed", "w", 0)]}, "this has shown nothing"),
        ({"orders": [DONE, NO_SHELF]}, "this has shown nothing"),
        ({"orders": [DONE, DECLINED]}, "this has shown nothing"),
    ],
)
def test_whatever_else_is_wrong_is_told(change: dict[str, Any], said: str) -> None:
    [problem] = replace(REPORT, **change).problems()
    assert said in problem


def forged(change: Callable[[Order], Order]) -> Report:
    return replace(REPORT, orders=[change(DONE), *GOOD[1:]])


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (forged(lambda o: replace(o, charged=2)), "error: DOUBLED: order 1 was charged 2 times"),
        (forged(lambda o: replace(o, shipped=0)), "error: LOST: order 1 succeeded, was shipped 0 times"),
    ],
    ids=["doubled", "lost"],
)
def test_a_difference_ends_it_with_exit_code_1(
    report: Report, said: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "play", lambda *_, own: report if not own else None)
    done = cli("demo-orders", "--dsn", cli.dsn, "--seed", "7")
    assert done.code == 1
    assert said in done.err
    assert "accounted for" not in done.err
    done = cli("demo-orders", "--dsn", cli.dsn, "--json", "--keep")
    assert (done.code, done.json["ok"]) == (1, False)
    shutil.rmtree(done.err.split("kept in ")[1].splitlines()[0])


def test_the_report_shows_all_sides(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "play", lambda *_, own: REPORT)
    done = cli.ok("demo-orders", "--dsn", cli.dsn)
    words = [
        "failed: ship",
        "(OutOfStock)",
        "killed",
        "lamp",
        "worker_lost",
        "3 charged",
        "1 requested",
        "no violations",
    ]
    assert [word for word in words if word not in done.out] == []
    assert "seed " in done.err
    assert "5 orders ended, 2 of them were charged in vain and refunded" in done.err


def test_orders_survive_kills_cancels_and_a_provider_that_fails(cli: Cli) -> None:
    done = cli("demo-orders", "--dsn", cli.dsn, "--orders", "60", "--seed", "7", "--json")
    assert done.code == 0, done
    report = done.json
    assert report["problems"] == []
    assert [strike["kind"] for strike in report["strikes"]] == ["killed"] * 3
    assert sum(report["cancels"].values()) == 6
    with psycopg.connect(cli.dsn) as conn:
        runs = dict(conn.execute("select status, count(*) from taskq.runs group by status").fetchall())
        [jobs] = conn.execute("select count(*) from taskq.jobs").fetchone() or ()
        [lost] = conn.execute("select count(*) from taskq.workers where status = 'lost'").fetchone() or ()
        undone = dict(
            conn.execute(
                "select task, count(*) from taskq.effects where name like 'compensate:%' and settled group by task"
            ).fetchall()
        )
        left = conn.execute("select 1 from pg_namespace where nspname = 'taskq_demo_orders'").fetchone()
    orders = report["orders"]
    assert (jobs, lost, left) == (0, 3, None)
    assert {status: sum(o["status"] == status for o in orders) for status in runs} == runs
    assert undone["taskq.demo.orders.refund"] == sum(o["refunded"] for o in orders) > 0
    assert undone["taskq.demo.orders.release"] == sum(o["released"] for o in orders) > 0

"""The play: orders are started, some cancelled, their workers killed by a seed, and what three sides hold is read."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import dict_row

from taskq.client.answers import translated
from taskq.db.pools import connect_sync
from taskq.db.queries import load
from taskq.demo.orders.report import Order, Report, Stock
from taskq.demo.payments.faults import FaultPlan
from taskq.demo.payments.journal import Ledger
from taskq.demo.payments.provider import running_provider
from taskq.demo.stage import Stage, child_environ
from taskq.demo.strikes import Strike, strike

if TYPE_CHECKING:
    from taskq.workflow.runs import Run

__all__ = ["CANCELLED", "NODES", "WORKERS", "Warehouse", "play"]

WORKERS = 3
CONCURRENCY = 5
NODES = 4
SHORTEST = 8.0
"""Seconds that few orders are made to last, so that there is time to strike."""
KILLS = 3
CANCELLED = 6
"""Orders that are cancelled: half of them under way."""
RATES = {"hang": 0.01, "drop": 0.02, "do_and_hang": 0.01, "fail": 0.02, "decline": 0.02}
TOLD = {
    "order-5": ["drop"],
    "order-7": ["fail"],
    "order-9": ["decline"],
    "order-15": ["do_and_hang"],
    "order-17": ["decline"],
    "order-25": ["decline"],
}
"""So that each is seen, whatever the seed."""
NOT_ON_THE_SHELF = "lamp"
"""An item that the books have, and the shelf has not."""


def item_of(number: int) -> str:
    """What is ordered; each eighth order is for what is not on the shelf."""
    return NOT_ON_THE_SHELF if number % 8 == 0 else "chair"


class Warehouse:
    """The tables that the bodies write, filled for one play and gone after it.

    Args:
        dsn: The database.
        orders: How many there are; the books have more than that of everything.
    """

    def __init__(self, dsn: str, orders: int) -> None:
        self._queries = load("demo_warehouse", "taskq")
        self._connection = connect_sync(dsn, name="taskq demo")
        self._filled = {"chair": (2 * orders, 2 * orders), NOT_ON_THE_SHELF: (2 * orders, 0)}

    @classmethod
    @contextmanager
    def open(cls, dsn: str, orders: int, *, keep: bool) -> Iterator[Warehouse]:
        """Fill it; it is cleared when the block ends, unless ``keep`` says otherwise."""
        made = cls(dsn, orders)
        try:
            made._rows("clear")
            made._rows("build")
            for item, (books, shelf) in made._filled.items():
                made._rows("fill", item, books, shelf)
            yield made
            if not keep:
                made._rows("clear")
        finally:
            made._connection.close()

    def moves(self) -> dict[tuple[int, str], int]:
        """How often each was done for each order: ``reserved``, ``released``, ``shipped``, ``recalled``."""
        return {(row["number"], row["what"]): row["n"] for row in self._rows("moves")}

    def stock(self) -> list[Stock]:
        """What was there of each item, and what is left."""
        return [
            Stock(row["item"], *self._filled[row["item"]], row["books"], row["shelf"]) for row in self._rows("stock")
        ]

    def _rows(self, query: str, *arguments: Any) -> list[dict[str, Any]]:
        with translated("taskq"):
            cursor = psycopg.RawCursor(self._connection, row_factory=dict_row)
            cursor.execute(self._queries[query].encode(), arguments or None)
            return cursor.fetchall() if cursor.description else []


def play(
    dsn: str, schema: str, orders: int, seed: int, folder: Path, tell: Callable[[int, str], None], *, own: bool
) -> Report:
    """Play it once.

    Args:
        dsn: A migrated database.
        schema: Its schema.
        orders: How many there are.
        seed: Decides what goes wrong, when, and with whom.
        folder: For the journal and the logs.
        tell: Is told how many steps are left, and what goes on.
        own: Whether the database is this play's alone, so that all of it is verified, and left as it is.

    Raises:
        TaskQError: It could not be played to its end.
    """
    from taskq.demo.orders.tasks import QUEUE, app, order
    from taskq.demo.payments.tasks import PROVIDER

    rand = random.Random(seed)
    journal = folder / "provider.journal"
    app.use_database(dsn, schema)
    began = time.monotonic()
    with (
        Warehouse.open(dsn, orders, keep=own) as warehouse,
        running_provider(journal, FaultPlan(seed, RATES, TOLD, hang=4.0), environ=child_environ()) as provider,
    ):
        stage = Stage(
            dsn,
            schema,
            folder,
            app="taskq.demo.orders.tasks:app",
            workers=WORKERS,
            concurrency=CONCURRENCY,
            queue=QUEUE,
            environ={PROVIDER: provider},
            supervised=True,
        )
        with stage.open():
            pause = max(0.4, SHORTEST * WORKERS * CONCURRENCY / orders)
            runs = [
                order.start_sync(n, item_of(n), 500 + n, pause * (0.5 + rand.random())) for n in range(1, orders + 1)
            ]
            asked = _cancel(stage, runs, rand, lambda left: tell(min(left, NODES * orders), "some are cancelled"))
            app.close_sync()
            strikes = strike(stage, NODES * orders, ["killed"] * KILLS, "jobs", rand, tell)
            stage.run_until(0, lambda left: tell(min(left, NODES * orders), "nobody strikes any more"))
            exits = [stage.stop(worker) for worker in list(stage.workers)]
            ids = [str(run.id) for run in runs]
            ledger, scope = Ledger.read(journal), "all" if own else "since"
            return _report(stage, warehouse, ids, ledger, seed, asked, strikes, exits, scope, time.monotonic() - began)


def _cancel(
    stage: Stage, runs: Sequence[Run[str]], rand: random.Random, progress: Callable[[int], None]
) -> dict[str, int]:
    """Cancel some that are under way and some others, and wait until they have ended; give the answers, counted.

    Nobody is killed before that: what a cancelled run had running and lost, and no hook can tell of, would be unknown.
    """
    stage.run_until(NODES * len(runs) * 19 // 20, progress)
    by_id = {str(run.id): run for run in runs}
    chosen = [by_id[row["id"]] for row in stage.rows("under_way", stage.queue, CANCELLED // 2) if row["id"] in by_id]
    chosen += rand.sample([run for run in runs if run not in chosen], CANCELLED - len(chosen))
    answers = Counter(str(run.cancel_sync("the customer has changed their mind")) for run in chosen)
    stage.run_until_ended([str(run.id) for run in chosen])
    return dict(answers)


def _report(
    stage: Stage,
    warehouse: Warehouse,
    ids: list[str],
    ledger: Ledger,
    seed: int,
    asked: dict[str, int],
    strikes: list[Strike],
    exits: list[int],
    scope: str,
    seconds: float,
) -> Report:
    from taskq.demo.orders.tasks import recall, refund, release

    runs = {row["id"]: row for row in stage.rows("runs", ids)}
    undone = {(row["run"], row["task"]): row for row in stage.rows("compensations", ids)}
    jobs = [row["id"] for row in stage.rows("node_jobs", ids)]
    moves = warehouse.moves()
    orders = []
    for number, run in enumerate(ids, 1):
        row = runs.get(run, {"status": "missing", "node": None, "error": None})
        promised = {
            task.name.rpartition(".")[2]: found["result"] if found["settled"] else "not settled"
            for task in (refund, release, recall)
            if (found := undone.get((run, task.name)))
        }
        orders.append(
            Order(
                number=number,
                status=row["status"],
                node=row["node"] or "",
                error=row["error"] or "",
                charged=ledger.charges[f"order-{number}"],
                refunded=ledger.refunds[f"order-{number}"],
                **{what: moves.get((number, what), 0) for what in ("reserved", "released", "shipped", "recalled")},
                promised=promised,
            )
        )
    known = {f"order-{order.number}" for order in orders}
    unknowns = stage.rows("unknowns", jobs)
    return Report(
        seed=seed,
        orders=orders,
        stock=warehouse.stock(),
        strangers=sorted({e.payment for e in ledger.entries if e.payment} - known),
        cancels=asked,
        strikes=strikes,
        unknowns=unknowns,
        left_unknown=sum(row["n"] for row in unknowns if row["outcome"] is None),
        requests=ledger.events(),
        violations=stage.rows("verify", scope, ids[0]),
        exits=exits,
        seconds=seconds,
    )

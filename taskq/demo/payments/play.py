"""The play: charges are enqueued, workers are killed and frozen under them by a seed, and the two records are read."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from taskq.demo.payments.faults import FaultPlan
from taskq.demo.payments.journal import Ledger
from taskq.demo.payments.provider import running_provider
from taskq.demo.payments.report import Payment, Report
from taskq.demo.stage import Stage, child_environ
from taskq.demo.strikes import Kind, Strike, strike

__all__ = ["WORKERS", "play"]

WORKERS = 3
CONCURRENCY = 5
SHORTEST = 15.0
"""Seconds that few payments are made to last, so that there is time to strike."""
RATES = {"hang": 0.01, "drop": 0.03, "do_and_hang": 0.01, "fail": 0.02, "decline": 0.04}
TOLD = {"payment-3": ["hang"], "payment-5": ["drop"], "payment-7": ["fail"], "payment-9": ["decline"]}
"""So that each is seen, whatever the seed."""


def play(
    dsn: str, schema: str, payments: int, seed: int, folder: Path, tell: Callable[[int, str], None], *, own: bool
) -> Report:
    """Play it once.

    Args:
        dsn: A migrated database.
        schema: Its schema.
        payments: How many there are.
        seed: Decides what goes wrong, when, and with whom.
        folder: For the journal and the logs.
        tell: Is told how many jobs are left, and what goes on.
        own: Whether the database is this play's alone, so that all of it is verified.

    Raises:
        TaskQError: It could not be played to its end.
    """
    from taskq.demo.payments.tasks import PROVIDER, QUEUE, app, charge

    rand = random.Random(seed)
    journal = folder / "provider.journal"
    app.use_database(dsn, schema)
    began = time.monotonic()
    with running_provider(journal, FaultPlan(seed, RATES, TOLD, hang=4.0), environ=child_environ()) as provider:
        stage = Stage(
            dsn,
            schema,
            folder,
            app="taskq.demo.payments.tasks:app",
            workers=WORKERS,
            concurrency=CONCURRENCY,
            queue=QUEUE,
            environ={PROVIDER: provider},
            supervised=True,
        )
        with stage.open():
            pause = max(0.8, SHORTEST * WORKERS * CONCURRENCY / payments)
            # Behind refunds, which have the priority of their task; hooks go ahead of all.
            later = charge.using(priority=4)
            jobs = app.enqueue_many_sync(
                [
                    later.job(f"payment-{n}", 500 + n, pause * (0.5 + rand.random()), n % 12 != 0)
                    for n in range(1, payments + 1)
                ]
            )
            ids = [str(job.id) for job in jobs]
            app.close_sync()
            kinds: list[Kind] = rand.sample(["killed", "frozen", "killed", "frozen"], 4)
            strikes = strike(stage, payments, kinds, "charges", rand, tell)
            stage.run_until(0, lambda left: tell(min(left, payments), "nobody strikes any more"))
            exits = [stage.stop(worker) for worker in list(stage.workers)]
            ledger, scope = Ledger.read(journal), "all" if own else "since"
            return _report(stage, ids, ledger, seed, strikes, exits, scope, time.monotonic() - began)


def _report(
    stage: Stage,
    ids: list[str],
    ledger: Ledger,
    seed: int,
    strikes: list[Strike],
    exits: list[int],
    scope: str,
    seconds: float,
) -> Report:
    finished = {row["id"]: row for row in stage.rows("finished", ids, ids[0])}
    refunds = {row["owner"]: row["result"] for row in stage.rows("effects", ids) if row["settled"]}
    payments = []
    for n, job in enumerate(ids, 1):
        name, row = f"payment-{n}", finished.get(job)
        payments.append(
            Payment(
                name=name,
                status=row["status"] if row else "missing",
                error=str(row["error"].get("type", "")) if row and row["error"] else "",
                charged=ledger.charges[name],
                refunded=ledger.refunds[name],
                refund=refunds.get(job),
            )
        )
    known = {payment.name for payment in payments}
    decided = {bool(row["happened"]): row["n"] for row in stage.rows("resolutions", ids)}
    unknowns = stage.rows("unknowns", ids)
    return Report(
        seed=seed,
        payments=payments,
        strangers=sorted({e.payment for e in ledger.entries if e.payment} - known),
        strikes=strikes,
        unknowns=unknowns,
        resolved={"happened": decided.get(True, 0), "did_not_happen": decided.get(False, 0)},
        left_unknown=sum(row["n"] for row in unknowns if row["outcome"] is None),
        requests=ledger.events(),
        violations=stage.rows("verify", scope, ids[0]),
        exits=exits,
        seconds=seconds,
    )

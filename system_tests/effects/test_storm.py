"""A thousand side-effecting jobs under everything at once: no effect is repeated, and none is lost without a word."""

from __future__ import annotations

import importlib
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from cluster import Cluster
from conftest import LONG, StartWorker, WorkerProcess, now
from effects.explain import explain_all, fails, read
from effects.storm import Storm
from proxy import Proxy
from sql import violations
from survival import Survived

from taskq import TaskQ
from taskq.demo.payments.faults import FaultPlan
from taskq.demo.payments.journal import Ledger
from taskq.demo.payments.provider import running_provider
from taskq.worker.lease import EXIT_LEASE_LOST

pytestmark = pytest.mark.anyio
JOBS = 1000
LEASE = 2.5
SEEDS = range(5) if LONG else range(1)
RATES = {"hang": 0.01, "drop": 0.02, "do_and_hang": 0.01, "fail": 0.01, "decline": 0.03}


@pytest.fixture
def dsn(cluster: Cluster) -> str:
    return cluster.dsn


async def enqueue(dsn: str, module: str, task: str, seed: int) -> dict[UUID, int]:
    """The jobs, and the number of the payment of each."""
    rand = random.Random(seed)
    # A fresh application for each storm, since each has a database of its own.
    for known in [name for name in sys.modules if name.startswith("effects.app_")]:
        del sys.modules[known]
    app: TaskQ = importlib.import_module(module).app
    app.use_database(dsn)
    charge = app.get_task(task)
    # Three workers with twenty slots each need at least ten seconds for it, however fast the machine is.
    jobs = await app.enqueue_many(
        [charge.job(f"p{n}", 100 + n, 0.2 + rand.random() * 0.8, fails(n)) for n in range(JOBS)]
    )
    await app.close()
    return {job.id: n for n, job in enumerate(jobs)}


def starter(start_worker: StartWorker, module: str, provider: str) -> Callable[[str, Proxy], WorkerProcess]:
    def start(name: str, way: Proxy) -> WorkerProcess:
        return start_worker(
            name,
            ready=False,
            to=way.dsn,
            app=f"{module}:app",
            environ={"PROVIDER": provider},
            lease=LEASE,
            concurrency=20,
            grace=10,
        )

    return start


async def storm_over(
    seed: int, reconciled: bool, cluster: Cluster, start_worker: StartWorker, folder: Path, survived: Survived
) -> Storm:
    """One storm, and all that holds after any."""
    module, task = (
        ("effects.app_reconciled", "reconciled_charge") if reconciled else ("effects.app_under_storm", "charge")
    )
    journal = folder / "provider.journal"
    began = now()
    with running_provider(journal, FaultPlan(seed, RATES, hang=3.0), honours_keys=reconciled) as provider:
        payments = await enqueue(cluster.dsn, module, task, seed)
        start = starter(start_worker, module, provider)
        storm = Storm(cluster, start, [task], list(payments), seed, until_reconciled=reconciled)
        with storm.over_workers():
            storm.rage()
            storm.calm()
    ledger = Ledger.read(journal)
    records = read(cluster.dsn, ledger, payments, storm.cancels)
    reasons = explain_all(records, reconciled=reconciled)
    with psycopg.connect(cluster.dsn) as conn:
        assert violations(conn) == []
    assert storm.held > 0, "no strike hit a started effect"
    # Killed, its lease lost under a body that could not be stopped, or started while there was no database.
    assert set(storm.exits) <= {-signal.SIGKILL, EXIT_LEASE_LOST, 3}, storm.exits
    became = sum(len(record.unknowns) for record in records.values())
    lost = sum(a["outcome"] == "lost" for record in records.values() for a in record.attempts.values())
    assert became > 0, "nothing became unknown"
    told = {f"p{number}" for number in payments.values()}
    assert set(ledger.charges) <= told
    print(f"seed {seed}: {now() - began:.0f} s, {dict(storm.struck)}, exits {dict(storm.exits)}")
    print(f"  started {storm.held}, on their way {storm.unstarted}, became unknown {became}")
    print(f"  cancels {storm.answers()}, reasons {reasons}")
    survived(
        fault=f"storm over side effects, {'reconciled' if reconciled else 'nothing reconciles'}",
        injected=storm.struck.total() - storm.struck["backends ended"],
        jobs=JOBS,
        ended=JOBS - sum(n for reason, n in reasons.items() if reason.startswith("unknown")),
        lost=lost,
        missing=0,
        doubled_off_record=sum(n - 1 for n in ledger.charges.values()),
        notes=f"{became} became unknown; when struck, {storm.held} were started and {storm.unstarted} on their way",
    )
    return storm


@pytest.mark.parametrize("seed", SEEDS)
async def test_without_reconciling_every_effect_happens_at_most_once_and_every_job_is_explained(
    seed: int, cluster: Cluster, start_worker: StartWorker, tmp_path: Path, survived: Survived
) -> None:
    await storm_over(seed, False, cluster, start_worker, tmp_path, survived)


@pytest.mark.parametrize("seed", SEEDS)
async def test_with_reconciling_every_job_ends_and_no_charge_is_doubled_or_lost(
    seed: int, cluster: Cluster, start_worker: StartWorker, tmp_path: Path, survived: Survived
) -> None:
    storm = await storm_over(seed, True, cluster, start_worker, tmp_path, survived)
    assert storm.woken_after_reconciling > 0, "no worker woke up after its jobs were reconciled"

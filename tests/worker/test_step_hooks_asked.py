"""Hooks of side-effecting steps, asked by a real worker: each answer, and what the body is given of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from worker_kit import BOUND, Events, Gates, RunWorker, outcomes, status_of, until_status

from taskq import (
    DidNotHappen,
    Happened,
    JobContext,
    OutcomeUnknown,
    ReconcileContext,
    Retry,
    StillUnknown,
    TaskQ,
    constant,
)
from taskq.reconcile import Answer
from taskq.telemetry.events import OF_JOB

pytestmark = pytest.mark.anyio
SOON = Retry(max_attempts=3, backoff=constant("20ms"))


@dataclass
class Paid:
    cents: int


class Bank:
    """Takes the payment, and does not answer so many times; and what its hook is asked, and answers in turn."""

    def __init__(self, *answers: Any, silent: int = 1) -> None:
        self.answers = list(answers)
        self.silent = silent
        self.calls: list[str] = []
        self.asked: list[ReconcileContext] = []

    async def pay(self, ctx: JobContext, cents: int) -> Paid:
        self.calls.append(ctx.idempotency_key)
        if len(self.calls) <= self.silent:
            raise OutcomeUnknown("no answer")
        return Paid(cents)

    def look(self, ctx: ReconcileContext, cents: int) -> Any:
        assert cents == 5
        self.asked.append(ctx)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def hook_of(bank: Bank, *, sync: bool) -> Callable[..., Any]:
    def look(ctx: ReconcileContext, cents: int) -> Answer[Paid]:
        answer: Answer[Paid] = bank.look(ctx, cents)
        return answer

    async def look_async(ctx: ReconcileContext, cents: int) -> Happened[Paid] | DidNotHappen | StillUnknown:
        await asyncio.sleep(0)
        return look(ctx, cents)

    return look if sync else look_async


def declare(app: TaskQ, bank: Bank, hook: Callable[..., Any], times: int = 1, **options: Any) -> None:
    """A task ``works`` that pays so many times in steps of one name, and gives what it was given for them."""

    async def works(ctx: JobContext, cents: int = 5) -> list[int]:
        paid: list[Paid] = [
            await ctx.step("pay", bank.pay, ctx, cents, effect_class="side_effecting") for _ in range(times)
        ]
        assert all(isinstance(each, Paid) for each in paid)
        return [each.cents for each in paid]

    chosen: dict[str, Any] = {"retry": Retry(1, constant("20ms")), "reconcile_retry": SOON, **options}
    app.task(reconcile_steps={"pay": hook}, **chosen)(works)


async def asking(aconn: asyncpg.Connection, job: UUID) -> UUID:
    found: UUID = await aconn.fetchval("select reconcile_job from taskq.unknowns where job_id = $1", job)
    return found


@pytest.mark.parametrize("sync", [True, False])
async def test_what_has_happened_is_recorded_as_what_the_step_gave_and_the_body_goes_on(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events, sync: bool
) -> None:
    bank = Bank(StillUnknown("10ms"), StillUnknown(0), Happened(Paid(9)))
    declare(app, bank, hook_of(bank, sync=sync), times=2)
    async with run_worker():
        job = await app.tasks["works"].enqueue()
        assert await job.result(BOUND) == [9, 5]
        ask = await until_status(aconn, await asking(aconn, job.id), "succeeded")
    assert bank.calls == [f"{job.id}:pay", f"{job.id}:pay#2"], "the second call is the second step"
    assert (ask["task"], ask["retry_afters"], ask["attempt"]) == ("works:reconcile:pay", 2, 0)
    assert await outcomes(aconn, job.id) == ["resolved", "succeeded"]
    about = bank.asked[0]
    assert (about.job_id, about.task, about.claim_epoch, about.reason) == (job.id, "works", 1, "told")
    assert (about.step, about.occurrence, about.idempotency_key) == ("pay", 1, bank.calls[0])
    [told] = events.of("job.resolved")
    assert set(OF_JOB) <= set(told)
    assert (told["step"], told["answer"], told["became"]) == ("pay", "happened", "pending")


@pytest.mark.parametrize("sync", [True, False])
async def test_only_what_did_not_happen_is_called_again_under_the_key_that_the_hook_was_told(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, sync: bool
) -> None:
    bank = Bank(Happened(Paid(9)), DidNotHappen(), silent=2)
    declare(app, bank, hook_of(bank, sync=sync), times=2)
    async with run_worker():
        job = await app.tasks["works"].enqueue()
        assert await job.result(BOUND) == [9, 5]
    assert [(about.occurrence, about.idempotency_key) for about in bank.asked] == [
        (1, f"{job.id}:pay"),
        (2, f"{job.id}:pay#2"),
    ]
    assert bank.calls == [f"{job.id}:pay", f"{job.id}:pay#2", f"{job.id}:pay#2"]
    assert await outcomes(aconn, job.id) == ["resolved", "resolved", "succeeded"]


async def test_a_step_that_never_happens_comes_to_an_end(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    bank = Bank(DidNotHappen(), silent=99)
    declare(app, bank, hook_of(bank, sync=True), max_recoveries=1)
    async with run_worker():
        job = await app.tasks["works"].enqueue()
        row = await until_status(aconn, job.id, "failed")
    assert json.loads(row["error"])["type"] == "RecoveryExhausted"
    assert (len(bank.calls), await outcomes(aconn, job.id)) == (2, ["resolved"] * 2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            Happened(9),
            "the hook of step pay of works answered Happened with a result that is not what it is annotated to find",
        ),
        (Happened(object()), "is not what it is annotated to find: step pay"),
        (True, "the hook of step pay of works answered with a bool, which says nothing"),
    ],
)
async def test_an_answer_that_does_not_fit_what_the_hook_declares_is_refused_at_once(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, wrong: object, said: str
) -> None:
    bank = Bank(wrong, Happened(Paid(9)))
    declare(app, bank, hook_of(bank, sync=True))
    async with run_worker():
        job = await app.tasks["works"].enqueue()
        assert await job.result(BOUND) == [9]
        ask = await asking(aconn, job.id)
        await until_status(aconn, ask, "succeeded")
    assert await outcomes(aconn, ask) == ["failed", "succeeded"]
    assert said in await aconn.fetchval("select error->>'message' from taskq.ledger where job_id = $1", ask)


async def test_what_a_hook_without_a_type_says_is_checked_when_the_body_asks_for_it(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection
) -> None:
    bank = Bank()
    declare(app, bank, lambda cents: Happened("nine"))
    async with run_worker():
        job = await app.tasks["works"].enqueue()
        row = await until_status(aconn, job.id, "failed")
    assert json.loads(row["error"])["type"] == "StepMisfit"
    assert len(bank.calls) == 1


async def test_a_hook_that_gives_up_leaves_it_unknown_and_says_of_which_step(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, events: Events
) -> None:
    bank = Bank(None)
    declare(app, bank, hook_of(bank, sync=False))
    async with run_worker():
        job = await app.tasks["works"].enqueue()
        await until_status(aconn, job.id, "unknown")
        await until_status(aconn, await asking(aconn, job.id), "failed")
    assert (len(bank.asked), await status_of(aconn, job.id), len(bank.calls)) == (3, "unknown", 1)
    [told] = events.of("reconcile.exhausted")
    assert (told["job_id"], told["task"], told["claim_epoch"], told["step"]) == (str(job.id), "works", 1, "pay")


async def test_a_late_word_while_the_hook_is_asked_stands_and_its_job_ends_as_overtaken(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, gates: Gates, events: Events
) -> None:
    async def look(cents: int) -> Happened[Paid]:
        await gates.wait()
        return Happened(Paid(1))

    bank = Bank()
    declare(app, bank, look)
    async with run_worker():
        job = await app.tasks["works"].enqueue()
        await gates.until_reached()
        late = (
            "select taskq.end_step(j.claimed_by, j.id, 1, 'pay', 1, j.effect_started_at, '{\"cents\": 7}', null)"
            " from taskq.jobs j where j.id = $1"
        )
        assert await aconn.fetchval(late, job.id) == "late"
        gates.open()
        assert await job.result(BOUND) == [7]
        ask = await until_status(aconn, await asking(aconn, job.id), "succeeded")
    assert '"answer": "overtaken"' in ask["result"]
    [told] = events.of("reconcile.overtaken")
    assert (told["job_id"], told["claim_epoch"], told["step"]) == (str(job.id), 1, "pay")


async def test_a_worker_without_the_hook_is_given_no_question_about_the_step(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, dsn: str
) -> None:
    """In a deploy, one of the release before runs beside it, and may have started last."""
    bank = Bank(Happened(Paid(9)))
    declare(app, bank, hook_of(bank, sync=True))
    async with TaskQ(dsn) as older:
        declare(older, bank, hook_of(bank, sync=True))
        del older._tasks["works:reconcile:pay"]
        older.tasks["works"].reconcile_steps = {}
        async with run_worker(), run_worker(of=older):
            assert await (await app.tasks["works"].enqueue()).result(BOUND) == [9]
    assert len(bank.asked) == 1


@pytest.mark.parametrize("which", ["works:reconcile", "works:reconcile:mail"])
async def test_a_hook_is_not_asked_about_what_is_not_its_own(
    app: TaskQ, run_worker: RunWorker, aconn: asyncpg.Connection, which: str
) -> None:
    """Nothing enqueues such a question; and a wrong answer would record an effect that did not happen."""
    asked: list[int] = []

    async def look(cents: int) -> DidNotHappen:
        asked.append(cents)
        return DidNotHappen()

    async def works(ctx: JobContext, cents: int = 5) -> None:
        await ctx.step("pay", Bank().pay, ctx, cents, effect_class="side_effecting")

    app.task(reconcile=look, reconcile_steps={"mail": look})(works)
    async with run_worker():
        job = await app.tasks["works"].enqueue()
        await until_status(aconn, job.id, "unknown")
        assert await asking(aconn, job.id) is None
        told = await (await app.tasks[which].enqueue(job.id, 1)).result(BOUND)
    assert (told["answer"], asked, await status_of(aconn, job.id)) == ("overtaken", [], "unknown")

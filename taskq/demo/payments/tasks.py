"""The app of the demonstration: charges, what asks the provider about them, and the refunds of those that failed."""

from __future__ import annotations

import asyncio
import os

from taskq import (
    DidNotHappen,
    Happened,
    JobContext,
    OutcomeUnknown,
    ReconcileContext,
    Ref,
    Retry,
    RetryAfter,
    TaskQ,
    TerminalEffect,
    constant,
)
from taskq.demo.payments.client import NoAnswer, NotSent, ProviderClient, Told
from taskq.idempotency import idempotency_key

__all__ = [
    "PROVIDER",
    "QUEUE",
    "OutOfStock",
    "app",
    "ask_to_charge",
    "ask_to_close",
    "ask_to_refund",
    "charge",
    "refund",
    "what_became_of_it",
]

QUEUE = "taskq-demo-payments"
PROVIDER = "DEMO_PAYMENTS_PROVIDER"
"""The environment variable with the provider's address."""

app = TaskQ()


class OutOfStock(Exception):
    """Told after the charge: what was paid for is not there, so the money goes back."""


def _provider() -> ProviderClient:
    return ProviderClient(os.environ[PROVIDER])


async def ask_to_charge(ctx: JobContext, payment: str, cents: int) -> None:
    """Charge under the job's key, once.

    Raises:
        RetryAfter: Nothing was asked.
        OutcomeUnknown: No answer tells whether it was done.
        Declined, Refused: It was not done.
    """
    try:
        await _provider().charge(ctx.idempotency_key, payment, cents)
    except NotSent as exc:
        raise RetryAfter("300ms", str(exc)) from None
    except NoAnswer as exc:
        raise OutcomeUnknown(str(exc)) from None


async def ask_to_close(ctx: ReconcileContext) -> Told:
    """Close the key of a charge at the provider, so that what came of it by now is final; give what that is."""
    return await _provider().void(ctx.idempotency_key)


async def ask_to_refund(ctx: JobContext, payment: str, cents: int) -> str:
    """Give back what the job took that this one is the effect of; give what was done.

    Safe to repeat: the provider refunds once for each key.
    """
    assert ctx.effect is not None
    told = await _provider().refund(ctx.idempotency_key, idempotency_key(ctx.effect.owner_job_id), payment, cents)
    return told.state


async def what_became_of_it(
    ctx: ReconcileContext, payment: str, cents: int, pause: float, in_stock: bool
) -> Happened[str] | DidNotHappen:
    """Ask the provider what came of a charge, once that is final."""
    told = await ask_to_close(ctx)
    return Happened(f"charged {told.cents}") if told.state == "charged" else DidNotHappen()


@app.task(
    name="taskq.demo.charge",
    queue=QUEUE,
    effect_class="side_effecting",
    timeout="20s",
    retry=Retry(1, constant("300ms")),
    max_recoveries=20,
    reconcile=what_became_of_it,
    reconcile_retry=Retry(20, constant("300ms")),
    effects=[
        TerminalEffect(
            "taskq.demo.refund",
            on={"failed", "cancelled"},
            payload={"payment": Ref.arg("payment"), "cents": Ref.arg("cents")},
            undoes=True,
        )
    ],
)
async def charge(ctx: JobContext, payment: str, cents: int, pause: float, in_stock: bool) -> str:
    """Charge a card, once.

    Args:
        ctx: Has the key that the provider knows the charge by.
        payment: What is paid, as the provider's journal names it.
        cents: How much.
        pause: Seconds until the body returns, in which it can be killed after its effect.
        in_stock: Whether what is paid for is there; otherwise it fails after the charge.
    """
    await ask_to_charge(ctx, payment, cents)
    await asyncio.sleep(pause)
    if not in_stock:
        raise OutOfStock(payment)
    return f"charged {cents}"


@app.task(
    name="taskq.demo.refund",
    queue=QUEUE,
    retry=Retry(20, constant("300ms")),
    max_recoveries=20,
    timeout="20s",
)
async def refund(ctx: JobContext, payment: str, cents: int) -> str:
    """Give back what a charge that failed has taken; runs because the job of that charge has ended."""
    return await ask_to_refund(ctx, payment, cents)

"""The application of the storm: charges at a provider, of which no second one is tolerable."""

from __future__ import annotations

import asyncio
import os

from taskq import JobContext, OutcomeUnknown, RetryAfter, TaskQ
from taskq.demo.payments.client import NoAnswer, NotSent, ProviderClient

app = TaskQ()
provider = ProviderClient(os.environ.get("PROVIDER", "http://127.0.0.1:1"), timeout=1.5)


class OutOfStock(Exception):
    """Told after the charge: the body knows what it did, and fails."""


async def charge_once(ctx: JobContext, payment: str, cents: int, pause: float, fails: bool) -> str:
    """The body: it never asks twice, and says so where it does not know what became of its request."""
    try:
        await provider.charge(ctx.idempotency_key, payment, cents)
    except NotSent as exc:
        raise RetryAfter(0.2, str(exc)) from None
    except NoAnswer as exc:
        raise OutcomeUnknown(str(exc)) from None
    await asyncio.sleep(pause)
    if fails:
        raise OutOfStock(payment)
    return f"charged {cents}"


@app.task(effect_class="side_effecting", max_recoveries=50, timeout="30s")
async def charge(ctx: JobContext, payment: str, cents: int, pause: float, fails: bool = False) -> str:
    """Nobody can say what became of it."""
    return await charge_once(ctx, payment, cents, pause, fails)

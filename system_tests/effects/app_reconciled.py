"""The same application with charges whose outcome the provider can be asked about."""

from __future__ import annotations

from effects.app_under_storm import app, charge_once, provider

from taskq import DidNotHappen, Happened, JobContext, ReconcileContext, Retry, constant

__all__ = ["app"]


async def what_became(
    ctx: ReconcileContext, payment: str, cents: int, pause: float, fails: bool = False
) -> Happened[str] | DidNotHappen:
    """Close the key; what came of it before then is final."""
    told = await provider.void(ctx.idempotency_key)
    return Happened(f"charged {told.cents}") if told.state == "charged" else DidNotHappen()


@app.task(
    effect_class="side_effecting",
    max_recoveries=50,
    retry=Retry(1, constant(0.1)),
    timeout="30s",
    reconcile=what_became,
    reconcile_retry=Retry(50, constant(0.3)),
)
async def reconciled_charge(ctx: JobContext, payment: str, cents: int, pause: float, fails: bool = False) -> str:
    """The provider can be asked what became of it."""
    return await charge_once(ctx, payment, cents, pause, fails)

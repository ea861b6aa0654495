"""The app of the demonstration: an order is reserved, charged, shipped and announced; what fails on the way is undone.

Stock is kept in taskq's own database, and moves in the transaction that ends the job: exactly once. Money is kept by a
provider, which knows the job's key: never twice, and asked about where nobody knows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from taskq import DidNotHappen, Happened, JobContext, ReconcileContext, Ref, Retry, TaskQ, TerminalEffect, constant
from taskq.db.queries import load
from taskq.demo.payments.tasks import ask_to_charge, ask_to_close, ask_to_refund

__all__ = [
    "QUEUE",
    "OutOfStock",
    "Paid",
    "app",
    "charge",
    "notify",
    "order",
    "recall",
    "refund",
    "release",
    "reserve",
    "ship",
    "what_became_of_it",
]

QUEUE = "taskq-demo-orders"
SQL = load("demo_warehouse", "taskq")

app = TaskQ()


class OutOfStock(Exception):
    """There is none of what was ordered: no further attempt finds one."""


@dataclass(frozen=True, slots=True)
class Paid:
    """A charge that was made.

    Attributes:
        payment: What the provider's journal calls it.
        cents: How much.
    """

    payment: str
    cents: int


AGAIN = Retry(20, constant("300ms"), give_up_on=[OutOfStock])
"""How what is safe to repeat is repeated."""


@app.task(name="taskq.demo.orders.reserve", queue=QUEUE, retry=AGAIN, max_recoveries=20)
async def reserve(ctx: JobContext, number: int, item: str) -> str:
    """Reserve one in the books; the job has succeeded if and only if that is written."""
    return await _move(ctx, "reserve", number, item)


@app.task(name="taskq.demo.orders.release", queue=QUEUE, retry=AGAIN, max_recoveries=20)
async def release(ctx: JobContext, number: int, item: str) -> str:
    """Undo ``reserve``."""
    return await _move(ctx, "release", number, item)


async def what_became_of_it(
    ctx: ReconcileContext, number: int, cents: int, hold: str, pause: float
) -> Happened[Paid] | DidNotHappen:
    """Ask the provider what came of a charge, once that is final."""
    told = await ask_to_close(ctx)
    return Happened(Paid(told.payment, told.cents)) if told.state == "charged" else DidNotHappen()


@app.task(
    name="taskq.demo.orders.charge",
    queue=QUEUE,
    effect_class="side_effecting",
    timeout="20s",
    retry=Retry(1, constant("300ms")),
    max_recoveries=20,
    reconcile=what_became_of_it,
    reconcile_retry=Retry(20, constant("300ms")),
)
async def charge(ctx: JobContext, number: int, cents: int, hold: str, pause: float) -> Paid:
    """Charge a card, once. It fails only where nothing was charged, so that what failed needs no refund.

    Args:
        ctx: Has the key that the provider knows the charge by.
        number: The order.
        cents: How much.
        hold: What is reserved for it.
        pause: Seconds until the body returns, in which it can be killed after its effect.
    """
    await ask_to_charge(ctx, f"order-{number}", cents)
    await asyncio.sleep(pause)
    return Paid(f"order-{number}", cents)


@app.task(
    name="taskq.demo.orders.refund",
    queue=QUEUE,
    retry=Retry(20, constant("300ms")),
    max_recoveries=20,
    timeout="20s",
)
async def refund(ctx: JobContext, paid: Paid) -> str:
    """Undo ``charge``."""
    return await ask_to_refund(ctx, paid.payment, paid.cents)


@app.task(name="taskq.demo.orders.ship", queue=QUEUE, retry=AGAIN, max_recoveries=20)
async def ship(ctx: JobContext, number: int, item: str, payment: str) -> str:
    """Take one from the shelf, which may be empty although the books said otherwise."""
    return await _move(ctx, "ship", number, item)


@app.task(name="taskq.demo.orders.recall", queue=QUEUE, retry=AGAIN, max_recoveries=20)
async def recall(ctx: JobContext, number: int, item: str) -> str:
    """Undo ``ship``."""
    return await _move(ctx, "recall", number, item)


@app.task(name="taskq.demo.orders.notify", queue=QUEUE, effect_class="pure", max_recoveries=20)
async def notify(number: int, parcel: str, paid: Paid) -> str:
    """Say that it is on its way."""
    return f"order {number}: {parcel}, {paid.cents} cents"


@app.workflow(name="taskq.demo.order")
def order(number: int, item: str, cents: int, pause: float) -> str:
    """Reserve, charge, ship and tell. Where one of it fails, what succeeded is undone, the last first."""
    hold = reserve.node(
        "reserve",
        priority=3,  # orders that have begun go ahead of new ones
        compensate=TerminalEffect(release, payload={"number": Ref.arg("number"), "item": Ref.arg("item")}),
    ).step(number, item)
    paid = charge.node(
        "charge",
        priority=4,
        compensate=TerminalEffect(refund, payload={"paid": Ref.result()}),
    ).step(number, cents, hold, pause)
    parcel = ship.node(
        "ship",
        compensate=TerminalEffect(recall, payload={"number": Ref.arg("number"), "item": Ref.arg("item")}),
    ).step(number, item, paid.payment)
    return notify.node("notify").step(number, parcel, paid)


async def _move(ctx: JobContext, what: str, number: int, item: str) -> str:
    async with ctx.transaction() as tx:
        if await tx.conn.fetchval(SQL[what], number, item) is None:
            raise OutOfStock(f"there is no {item} left to {what}")
        tx.complete(item)
    return item

"""A shop that sends receipts: the tasks that the documentation runs.

    taskq worker --app examples.shop:app

Nothing outside of PostgreSQL is touched; what the shop sends goes to standard output.
"""

from __future__ import annotations

import asyncpg

from taskq import JobContext, Retry, RetryAfter, TaskQ, exponential

app = TaskQ()


@app.task(queue="mail", retry=Retry(max_attempts=5, backoff=exponential("1s", cap="1h")), timeout="30s")
async def send_receipt(order_id: int, email: str) -> str:
    """Send one receipt; tell what was sent."""
    print(f"receipt for order {order_id} to {email}", flush=True)
    return f"order {order_id} to {email}"


@app.task(queue="stock")
async def reserve(ctx: JobContext, order_id: int, free: int) -> int:
    """Reserve stock for an order. With none free, look again in a minute, without using an attempt."""
    if free <= 0:
        raise RetryAfter("1m", reason="out of stock")
    ctx.logger.info("reserved", order_id=order_id)
    return free - 1


@app.task(queue="stock", effect_class="pure")
def total(prices: list[int]) -> int:
    """Add up; plain functions run in a thread."""
    return sum(prices)


async def place_order(conn: asyncpg.Connection, email: str) -> int:
    """Store an order and its receipt together: both commit, or neither does."""
    async with conn.transaction():
        order_id: int = await conn.fetchval("insert into orders (email) values ($1) returning id", email)
        await send_receipt.using(connection=conn, idempotency_key=f"receipt-{order_id}").enqueue(order_id, email)
    return order_id

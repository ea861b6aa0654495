"""An application whose worker is killed right before, or right after, the COMMIT of its first block."""

from __future__ import annotations

import os
import signal
from typing import Any

import asyncpg

from taskq import JobContext, TaskQ

app = TaskQ()
_commit = asyncpg.transaction.Transaction.commit


async def _killed(self: Any) -> None:
    if self._connection._params.server_settings.get("application_name") == "taskq transaction":
        if os.environ["KILLED"] == "after":
            await _commit(self)
        os.kill(os.getpid(), signal.SIGKILL)
    await _commit(self)


if os.environ.get("KILLED"):
    asyncpg.transaction.Transaction.commit = _killed


@app.task
async def works(ctx: JobContext) -> int:
    async with ctx.transaction() as tx:
        await tx.conn.execute("insert into public.made values ($1, $2)", ctx.job_id, ctx.claim_epoch)
        tx.complete(ctx.claim_epoch)
    return ctx.claim_epoch

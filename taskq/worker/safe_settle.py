"""How an attempt ends for its worker when its body has ended it in its own transaction: told once, and in one way.

Nothing is sent for it again. Where it is not known yet whether the COMMIT has happened, the attempt stays unconfirmed,
so that its claim is not released and the worker does not stop as if all were told; then it ends as the record says.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any

from taskq import errors
from taskq.policy import ExecutionPolicy
from taskq.worker.claims import Claim, Counts, End
from taskq.worker.complete import Outbox
from taskq.worker.disposition import BodyEnd, Disposition, Interrupted, Raised, Returned
from taskq.worker.exchange import Exchanger
from taskq.worker.execute import Executor
from taskq.worker.proofs import prove_end
from taskq.worker.report import after_commit, fenced_out, not_proven, report
from taskq.worker.safe_block import BlockEnd, Blocks

__all__ = ["BlockSettler"]


class BlockSettler:
    """Tells the ends of attempts whose bodies had blocks of ``ctx.transaction()``.

    Args:
        blocks: The blocks of this worker.
        executor: The bodies that run.
        outbox: Where attempts wait that are not confirmed.
        exchanger: Claims for what is free again.
        counts: What is counted.
        on_end: Called with an attempt whose block was not committed after all, to end it like any other.
    """

    def __init__(
        self,
        blocks: Blocks,
        executor: Executor,
        outbox: Outbox,
        exchanger: Exchanger,
        counts: Counts,
        on_end: Callable[[Claim, ExecutionPolicy, BodyEnd], None],
    ) -> None:
        self._blocks = blocks
        self._executor = executor
        self._outbox = outbox
        self._exchanger = exchanger
        self._counts = counts
        self._on_end = on_end
        self._waiting: set[asyncio.Task[None]] = set()

    def takes(self, claim: Claim, policy: ExecutionPolicy, end: BodyEnd) -> bool:
        """A body has ended; answers whether its attempt had ended, or may have, in a block, and is seen to here."""
        run = self._executor.running.get(claim.job_id)
        if run is not None and run.claim is claim:
            # Timed out in a thread, where it goes on: how a block of its has ended is told once it has, too.
            return self._blocks.has(claim)
        block = self._blocks.take(claim)
        if block is None:
            return False
        assert block.over is not None
        if block.over.done():
            self._tell(claim, policy, end, block)
            return True
        parked = End(claim.worker_id, claim.job_id, claim.claim_epoch, "succeeded", block.outcome_id, task=claim.task)
        self._outbox.park(parked)
        self._later(self._tell_later(claim, policy, end, block, parked))
        return True

    def close(self) -> None:
        """Wait no more; what stands on record stands."""
        for task in self._waiting:
            task.cancel()

    def _later(self, waits: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(waits)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _prove(self, claim: Claim, block: BlockEnd) -> None:
        """A started effect has succeeded once the record says so, with its effect start, as with any other end."""
        sent = End(claim.worker_id, claim.job_id, claim.claim_epoch, "succeeded", block.outcome_id, task=claim.task)
        sent.effect_started_at = claim.effect_started_at
        self._outbox.park(sent)
        try:
            prove_end(sent, await self._blocks.records(block))
        except errors.OutcomeNotProven as exc:
            not_proven(self._counts, sent, exc)
        else:
            report(self._counts, claim, Disposition("succeeded", result=block.result))
        self._outbox.confirmed([sent])

    async def _tell_later(
        self, claim: Claim, policy: ExecutionPolicy, end: BodyEnd, block: BlockEnd, parked: End
    ) -> None:
        over = block.over
        assert over is not None
        await asyncio.wait([asyncio.wrap_future(over) if isinstance(over, concurrent.futures.Future) else over])
        self._outbox.confirmed([parked])
        self._tell(claim, policy, end, block)

    def _tell(self, claim: Claim, policy: ExecutionPolicy, end: BodyEnd, block: BlockEnd) -> None:
        assert block.over is not None
        if block.over.cancelled():
            # The worker is closing, and will not learn it.
            return
        error = block.over.exception()
        if error is None:
            self._look_at(claim, end, block)
            self._exchanger.ended_elsewhere(claim)
            if claim.effect_started_at is None:
                report(self._counts, claim, Disposition("succeeded", result=block.result))
            else:
                self._later(self._prove(claim, block))
        elif isinstance(error, errors.FencedOut):
            fenced_out(self._counts, claim)
            self._exchanger.ended_elsewhere(claim)
        else:
            # Nothing of the block was committed, so a result that the body gave in spite of that is none.
            self._on_end(claim, policy, Raised(error) if isinstance(end, Returned) else end)

    def _look_at(self, claim: Claim, end: BodyEnd, block: BlockEnd) -> None:
        """Tell of what the body did after the commit that had no effect."""
        match end:
            case Returned(result):
                did = "" if result in (block.result, "null") else "returned another result"
            case Raised(exc) if not isinstance(exc, errors.ResultNotStorable):
                did = "raised {type}: {message}".format(**errors.describe(exc))
            case Interrupted(by):
                did = f"was stopped: {by}"
            case _:
                # Whatever else it returned, the result was given to the block.
                did = ""
        if did:
            after_commit(claim, did)

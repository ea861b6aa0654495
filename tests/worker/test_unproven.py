"""Claims that prove nothing: handed back without a body, with growing waits, and told of once."""

from __future__ import annotations

import json
from collections.abc import Container
from uuid import UUID

import pytest
from worker_kit import Events, claim_of

from taskq import TaskQ
from taskq.worker import unproven
from taskq.worker.claims import Counts, End
from taskq.worker.unproven import Unproven


class Gatekeeper(Unproven):
    """One that knows a single task ``t``, and keeps what it hands back."""

    def __init__(self, running: Container[UUID] = ()) -> None:
        app = TaskQ()

        @app.task(name="t")
        async def body() -> None: ...

        self.ends: list[End] = []
        self.counted = Counts()
        super().__init__(app.tasks, running, self.counted, self.ends.append)


def test_only_claims_that_prove_themselves_get_a_body() -> None:
    keeper = Gatekeeper()
    good, bad = claim_of("t"), claim_of("t", claim_epoch=0)
    assert keeper.proven([bad, good]) == [good]
    [end] = keeper.ends
    assert (end.job_id, end.claim_epoch, end.worker_id, end.outcome) == (bad.job_id, 0, bad.worker_id, "release")
    error = json.loads(end.error or "")
    assert (error["type"], error["reason"], error["body_started"]) == ("ClaimNotProven", "epoch", False)
    assert (keeper.counted.not_proven, keeper.counted.released) == (1, 1)


def test_a_job_whose_earlier_body_still_runs_here_does_not_run_beside_it() -> None:
    claim = claim_of("t", claim_epoch=2)
    keeper = Gatekeeper([claim.job_id])
    assert keeper.proven([claim]) == []
    assert json.loads(keeper.ends[0].error or "")["reason"] == "still_runs"


@pytest.mark.parametrize(("releases", "delay"), [(-1, 5), (0, 5), (1, 15), (4, 405), (5, 600), (99, 600)])
def test_it_waits_longer_each_time(releases: int, delay: float) -> None:
    keeper = Gatekeeper()
    assert keeper.proven([claim_of("unheard of", releases=releases)]) == []
    assert keeper.ends[0].delay == delay


def test_each_is_told_of_once_until_too_many_are_remembered(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unproven, "REMEMBERED", 2)
    keeper = Gatekeeper()
    a, b, c = (claim_of("unheard of") for _ in range(3))
    for claim in (a, a, b, a, c, c, a):
        assert keeper.proven([claim]) == []
    told = [event["job_id"] for event in events.of("job.claim_not_proven")]
    assert told == [str(claim.job_id) for claim in (a, b, c, a)]
    assert keeper.counted.not_proven == 7
    # For another reason it is told of again.
    assert keeper.proven([claim_of("t", job_id=a.job_id, claim_epoch=0)]) == []
    assert [event["reason"] for event in events.of("job.claim_not_proven")][-1] == "epoch"

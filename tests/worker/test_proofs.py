"""What proves a claim, an effect start and an end: every branch, without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

import pytest
from worker_kit import claim_of

from taskq import TaskQ
from taskq.errors import ClaimNotProven, EffectStartNotProven, OutcomeNotProven
from taskq.worker.claims import Claim, End
from taskq.worker.proofs import SAME, prove_claim, prove_end, prove_start

NOW = datetime.now(UTC)
app = TaskQ("postgresql:///nowhere")


@app.task(effect_class="side_effecting")
def pay() -> None: ...


def claim(**values: Any) -> Claim:
    return claim_of("pay", effect_class="side_effecting", max_attempts=1, **values)


def started(of: Claim, **values: Any) -> dict[str, Any]:
    return {
        "job_id": of.job_id,
        "claim_epoch": of.claim_epoch,
        "claimed_by": of.worker_id,
        "status": "running",
        "effect_started_at": NOW,
        "cancel_requested_at": None,
        "effect_class": "side_effecting",
        "lease_holds": True,
        "payload_sha256": sha256(of.payload.encode()).hexdigest(),
        "meta_sha256": None,
        **{name: getattr(of, name) for name in SAME},
        **values,
    }


def test_a_claim_that_fits_is_proven() -> None:
    prove_claim(claim(), pay)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"claim_epoch": 0}, "epoch"),
        ({"attempt": 1}, "attempt"),
        ({"attempt": -1}, "attempt"),
    ],
)
def test_a_claim_out_of_its_bounds_is_not(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(ClaimNotProven, match="not run here") as caught:
        prove_claim(claim(**values), pay)
    assert caught.value.reason == reason


def test_a_claim_of_another_class_or_of_no_task_is_not() -> None:
    with pytest.raises(ClaimNotProven, match="declares pay side_effecting"):
        prove_claim(claim_of("pay"), pay)
    with pytest.raises(ClaimNotProven, match="no task"):
        prove_claim(claim(), None)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({}, "started"),
        ({"job_id": None}, "fenced_out"),
        ({"claim_epoch": 2}, "fenced_out"),
        ({"claimed_by": UUID(int=9)}, "fenced_out"),
        ({"cancel_requested_at": NOW, "effect_started_at": None}, "cancelled"),
        ({"cancel_requested_at": NOW}, "cancelled"),
        ({"effect_started_at": None, "lease_holds": False}, "no_lease"),
    ],
)
def test_a_start_is_proven_or_plainly_refused(values: dict[str, Any], verdict: str) -> None:
    of = claim(meta=None)
    assert prove_start(of, started(of, **values)) == verdict


@pytest.mark.parametrize(
    "values",
    [
        {"job_id": UUID(int=9)},
        {"status": "unknown"},
        {"effect_class": "idempotent"},
        {"payload_sha256": ""},
        {"meta_sha256": ""},
        {"effect_started_at": None},
        {"effect_started_at": "now"},
        {"lease_holds": False},
        *({name: "other"} for name in SAME),
    ],
    ids=lambda values: next(iter(values)),
)
def test_any_other_answer_proves_nothing(values: dict[str, Any]) -> None:
    of = claim()
    with pytest.raises(EffectStartNotProven, match="was not called") as caught:
        prove_start(of, started(of, **values))
    assert caught.value.reason == next(iter(values))


def test_no_answer_proves_nothing() -> None:
    with pytest.raises(EffectStartNotProven, match="nothing was answered"):
        prove_start(claim(), None)


END = End(UUID(int=1), UUID(int=2), 3, "succeeded", 4, effect_started_at=NOW)
RECORD = {
    "ended": True,
    "job_id": END.job_id,
    "claim_epoch": 3,
    "worker_id": END.worker_id,
    "outcome_id": 4,
    "outcome": "succeeded",
    "effect_started_at": NOW,
}
OPEN = RECORD | {"ended": False, "outcome": "unknown", "outcome_id": None}


@pytest.mark.parametrize(
    ("sent", "on_record"),
    [
        ("succeeded", "succeeded"),
        ("failed", "failed"),
        ("failed", "cancelled"),
        ("cancelled", "cancelled"),
        ("retry", "failed"),
        ("retry_after", "retry_after"),
        ("retry_after_spent", "retry_after"),
        ("snooze", "snoozed"),
        ("snooze_spent", "cancelled"),
    ],
)
def test_an_end_is_proven_by_its_own_record(sent: Any, on_record: str) -> None:
    earlier = RECORD | {"claim_epoch": 2, "outcome": "released"}
    prove_end(replace(END, outcome=sent), [earlier, RECORD | {"outcome": on_record}])


def test_what_is_unknown_is_proven_by_the_open_claim_or_by_a_decision_since() -> None:
    unknown = replace(END, outcome="unknown")
    prove_end(unknown, [OPEN])
    prove_end(unknown, [RECORD | {"outcome": "resolved", "outcome_id": None}])
    prove_end(replace(END, outcome="release"), [OPEN])


@pytest.mark.parametrize(
    ("sent", "records", "reason"),
    [
        ("succeeded", [], "records"),
        ("succeeded", [RECORD, RECORD], "records"),
        ("succeeded", [RECORD | {"job_id": UUID(int=9)}], "records"),
        ("succeeded", [RECORD | {"worker_id": UUID(int=9)}], "worker_id"),
        ("succeeded", [RECORD | {"effect_started_at": None}], "effect_started_at"),
        ("succeeded", [OPEN], "ended"),
        ("succeeded", [RECORD | {"outcome_id": None}], "outcome_id"),
        ("succeeded", [RECORD | {"outcome": "failed"}], "outcome"),
        ("failed", [RECORD], "outcome"),
        ("unknown", [OPEN | {"outcome": "running"}], "outcome"),
    ],
)
def test_any_other_record_proves_nothing(sent: Any, records: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(OutcomeNotProven, match="answered as applied") as caught:
        prove_end(replace(END, outcome=sent), records)
    assert caught.value.reason == reason

"""The guards of side effects: who may start one, and what is never run again by itself."""

from __future__ import annotations

from typing import Final

from guards import Guard, guard

STARTS: Final = "test_effect_starts.py::"
FENCED: Final = STARTS + "test_nothing_starts_but_under_the_fence_the_lease_and_before_a_cancel"
RELEASED: Final = STARTS + "test_what_has_started_is_never_handed_back"

OF_STARTS: Final[tuple[Guard, ...]] = (
    guard(
        "effect",
        "start_effects: of its epoch",
        "unknown",
        "and ((j.id, j.claim_epoch) in (select e.id, e.epoch from unnest(p_ids, p_epochs) as e(id, epoch))) is true",
        "",
        FENCED,
    ),
    guard(
        "effect",
        "start_effects: by its worker",
        "unknown",
        "where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status = 'running'\n",
        "where j.id = any(p_ids) and j.status = 'running'\n",
        FENCED,
    ),
    guard(
        "effect",
        "start_effects: not after a cancel request",
        "unknown",
        " and j.cancel_requested_at is null and j.effect_started_at is null",
        " and j.effect_started_at is null",
        FENCED,
        STARTS + "test_a_start_that_waits_for_a_cancel_is_refused",
    ),
    guard(
        "effect",
        "start_effects: once",
        "unknown",
        " and j.cancel_requested_at is null and j.effect_started_at is null",
        " and j.cancel_requested_at is null",
        STARTS + "test_a_start_is_set_once_and_answered_again",
    ),
    guard(
        "effect",
        "start_effects: of side-effecting jobs",
        "unknown",
        "and j.effect_class = 'side_effecting' and j.cancel_requested_at",
        "and j.cancel_requested_at",
        FENCED,
    ),
    guard(
        "effect",
        "start_effects: while the lease holds",
        "unknown",
        "  v_holds := found;",
        "  v_holds := true;",
        FENCED,
    ),
    guard(
        "effect",
        "start_effects: its worker is not declared lost meanwhile",
        "unknown",
        "w.lease_expires_at > {{schema}}.now() for key share;",
        "w.lease_expires_at > {{schema}}.now();",
        STARTS + "test_a_start_in_progress_keeps_its_worker_from_being_declared_lost",
    ),
    guard(
        "effect",
        "enter_unknown: on record",
        "unknown",
        "    on conflict do nothing;",
        "    on conflict do nothing; delete from {{schema}}.unknowns u where u.job_id = p_job.id;",
        STARTS + "test_what_nobody_knows_keeps_its_claim_and_is_on_record_once",
    ),
    guard(
        "effect",
        "end_attempts: what has started is not handed back",
        "exchange",
        "(o.outcome = 'unknown' or o.outcome = 'release' and j.effect_started_at is not null)",
        "o.outcome = 'unknown'",
        RELEASED,
    ),
    guard(
        "effect",
        "end_attempts: unknown is no end",
        "exchange",
        "       and j.id <> all(v_unknown)\n       and ((j.id",
        "       and ((j.id",
        STARTS + "test_what_nobody_knows_keeps_its_claim_and_is_on_record_once",
    ),
    guard(
        "effect",
        "end_attempts: only its own worker says that it does not know",
        "exchange",
        "where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status in ('running', 'unknown')\n"
        "         and (o.outcome",
        "where j.id = any(p_ids) and j.status in ('running', 'unknown')\n         and (o.outcome",
        STARTS + "test_only_its_own_worker_says_that_it_does_not_know",
    ),
    guard(
        "effect",
        "end_attempts: without an effect start it goes back",
        "exchange",
        "j.effect_started_at is null) then 'release' else o.outcome end",
        "j.effect_started_at is null) then o.outcome else o.outcome end",
        STARTS + "test_a_start_that_was_not_confirmed_and_never_was_goes_back",
    ),
    guard(
        "effect",
        "end_attempts: not confirmed and started stays unknown",
        "exchange",
        "and (j.effect_class = 'side_effecting' or o.error->>'step' is not null) and j.effect_started_at is null)",
        "and (j.effect_class = 'side_effecting' or o.error->>'step' is not null))",
        STARTS + "test_the_reason_is_one_of_those_that_are_listed",
    ),
    guard(
        "effect",
        "enqueue_many: older workers get no side-effecting job",
        "enqueue",
        "case when x.effect_class = 'side_effecting' then greatest(x.required_worker_schema, 2)"
        " else x.required_worker_schema end as required_worker_schema",
        "x.required_worker_schema",
        STARTS + "test_only_workers_that_start_effects_get_side_effecting_jobs_whoever_enqueues",
    ),
    guard(
        "effect",
        "enqueue_many of one: older workers get no side-effecting job",
        "enqueue",
        "case when s.effect_class = 'side_effecting' then greatest(s.level, 2) else s.level end",
        "s.level",
        STARTS + "test_only_workers_that_start_effects_get_side_effecting_jobs_whoever_enqueues",
    ),
)

"""Guards of law 4 and of races: the predicates of the fences, locks, and deciding on what was locked."""

from __future__ import annotations

from guards import Guard, guard, guards

FENCE, LEASES = "test_law4_fence.py::", "test_leases.py::"
RACES = "races/test_races_of_workers.py::"
OPERATORS = "races/test_races_of_operators.py::"
OPERATE, SIX = "test_cancel_resolve_reopen.py::", "test_law6_attempts.py::"
OTHER_WORKER = FENCE + "test_an_end_by_another_worker_changes_nothing"
OTHER_EPOCH = FENCE + "test_an_end_of_an_older_or_later_epoch_changes_nothing"
NO_LEASE = FENCE + "test_a_claim_without_a_valid_lease_takes_nothing"
BY_RULES = SIX + "test_a_suspect_is_claimed_under_the_rules_of_every_claim"

OWN = "where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status in ('running', 'unknown')"
BACK_OWNER = OWN + "\n         and ((j.id"
UPDATE_OWNER = (
    "where j.id = any(p_ids) and j.id = e.id and (j.claimed_by = p_worker) is true and j.claim_epoch = e.epoch"
)
GONE = OWN + '\n       -- "is'
PAIR = "((j.id, j.claim_epoch) in (select e.id, e.epoch from ends e)) is true"
EITHER = "j.id in (select e.id from ends e)"
LOCK_FIRST = (
    "perform from {{schema}}.jobs j where j.id = any(p_ids) and (j.claimed_by = p_worker) is true"
    " and j.status in ('running', 'unknown') order by j.id for update;"
)
LEASE = "where w.id = p_worker and w.status = 'live' and w.lease_expires_at > {{schema}}.now() for key share;\n  "
CLAIM_LEASE = LEASE + "if not found then"
SUSPECT_LEASE = LEASE + "-- Alone"
LOCK_JOB = "select * into v_job from {{schema}}.jobs j where j.id = job_id for update;"
UNLOCKED_JOB = "select * into v_job from {{schema}}.jobs j where j.id = job_id;"

LIVE = "'live', 'draining'"
WORKERS = "{{schema}}.workers"
SETTLED = ("))\n         and (j.run_id = any(v_busy)) is not true\n       order", "))\n         for")
"""After both places in settle_lost that ask for the worker."""

FENCES: tuple[Guard, ...] = (
    guard(
        "4",
        "terminal end: by its worker",
        "exchange",
        GONE,
        GONE.replace("(j.claimed_by = p_worker) is true", "true"),
        OTHER_WORKER,
    ),
    guard(
        "4",
        "terminal end: of its epoch",
        "exchange",
        PAIR + "\n    returning j.*)",
        EITHER + "\n    returning j.*)",
        OTHER_EPOCH,
    ),
    guard(
        "4",
        "terminal end: of an unknown job too",
        "exchange",
        GONE,
        GONE.replace("j.status in ('running', 'unknown')", "j.status = 'running'"),
        FENCE + "test_a_late_end_of_an_unknown_job_resolves_it_under_its_fence_only",
    ),
    guards(
        "4",
        "end that goes back: by its worker",
        "exchange",
        (
            (BACK_OWNER, BACK_OWNER.replace("(j.claimed_by = p_worker) is true", "true")),
            (UPDATE_OWNER, UPDATE_OWNER.replace("(j.claimed_by = p_worker) is true", "true")),
        ),
        OTHER_WORKER,
    ),
    guards(
        "4",
        "end that goes back: of its epoch",
        "exchange",
        (
            (PAIR + "\n         and j.cancel", EITHER + "\n         and j.cancel"),
            ("true and j.claim_epoch = e.epoch and", "true and"),
        ),
        OTHER_EPOCH,
    ),
    guard(
        "4",
        "end that goes back: the outcome of its epoch",
        "exchange",
        "true and j.claim_epoch = e.epoch and",
        "true and",
        "test_law3_record.py::test_the_outcome_on_record_is_that_of_its_own_epoch",
    ),
    guards(
        "4",
        "end that goes back: of an unknown job too",
        "exchange",
        ((BACK_OWNER, BACK_OWNER.replace("j.status in ('running', 'unknown')", "j.status = 'running'")),),
        FENCE + "test_a_late_end_that_goes_back_takes_an_unknown_effect_back_to_pending",
    ),
    guard(
        "4",
        "end that goes back: not after a cancel request",
        "exchange",
        "\n         and j.cancel_requested_at is null),",
        "),",
        SIX + "test_an_end_after_a_cancel_request_moves_no_counter",
    ),
    guard(
        "race",
        "end that goes back: lock, then decide",
        "exchange",
        LOCK_FIRST,
        "",
        OPERATORS + "test_an_end_behind_a_cancel_request_sees_it",
    ),
    guard(
        "race",
        "ends lock jobs by id",
        "exchange",
        LOCK_FIRST,
        LOCK_FIRST.replace("order by j.id for update", "order by array_position(p_ids, j.id) for update"),
        RACES + "test_batches_of_ends_in_opposite_orders_do_not_deadlock",
    ),
    guard(
        "cancel",
        "a success after a request is a success",
        "exchange",
        "case when e.outcome = 'succeeded' then 'succeeded' when g.cancel",
        "case when e.outcome = 'succeeded' and g.cancel_requested_at is null then 'succeeded' when g.cancel",
        OPERATE + "test_after_a_cancel_request_a_body_that_returns_has_succeeded_and_anything_else_is_cancelled",
    ),
    guard(
        "cancel",
        "anything else after a request is cancelled",
        "exchange",
        "when g.cancel_requested_at is not null then 'cancelled' else 'failed' end as final",
        "else 'failed' end as final",
        OPERATE + "test_after_a_cancel_request_a_body_that_returns_has_succeeded_and_anything_else_is_cancelled",
    ),
    # Claims and leases
    guard(
        "lease",
        "claim: by a live worker",
        "exchange",
        CLAIM_LEASE,
        CLAIM_LEASE.replace("w.status = 'live'", "true"),
        NO_LEASE,
    ),
    guard(
        "lease",
        "claim: by a lease that holds",
        "exchange",
        CLAIM_LEASE,
        CLAIM_LEASE.replace("and w.lease_expires_at > {{schema}}.now() ", ""),
        NO_LEASE,
    ),
    guards(
        "race",
        "claim: the worker's row is locked",
        "exchange",
        (
            (CLAIM_LEASE, CLAIM_LEASE.replace(" for key share", "")),
            ("perform from {{schema}}.workers w where w.id = p_worker for key share;", ""),
        ),
        RACES + "test_a_claim_in_progress_keeps_its_worker_from_being_declared_lost",
    ),
    guards(
        "race",
        "claim: it waits for a mark in progress",
        "exchange",
        (
            (CLAIM_LEASE, CLAIM_LEASE.replace(" for key share", "")),
            ("perform from {{schema}}.workers w where w.id = p_worker for key share;", ""),
        ),
        RACES + "test_a_claim_behind_a_mark_that_is_undone_goes_on",
    ),
    guard(
        "race",
        "exchange: workers are locked before jobs",
        "exchange",
        "perform from {{schema}}.workers w where w.id = p_worker for key share;",
        "",
        RACES + "test_an_exchange_locks_its_worker_before_its_jobs",
    ),
    guard(
        "race",
        "claim: no row twice",
        "exchange",
        "limit v_plain for update skip locked) c",
        "limit v_plain) c",
        RACES + "test_two_claims_at_once_share_nothing",
    ),
    guard(
        "lease",
        "claim_suspect: by a live worker",
        "exchange",
        SUSPECT_LEASE,
        SUSPECT_LEASE.replace("w.status = 'live'", "true"),
        BY_RULES,
    ),
    guard(
        "lease",
        "claim_suspect: by a lease that holds",
        "exchange",
        SUSPECT_LEASE,
        SUSPECT_LEASE.replace("and w.lease_expires_at > {{schema}}.now() ", ""),
        BY_RULES,
    ),
    guard(
        "race",
        "claim_suspect: the worker's row is locked",
        "exchange",
        SUSPECT_LEASE,
        SUSPECT_LEASE.replace(" for key share", ""),
        RACES + "test_a_claim_of_a_suspect_keeps_its_worker_from_being_declared_lost",
    ),
    guard(
        "race",
        "mark_lost locks against claims",
        "leases",
        "order by w.id limit p_limit for update skip locked)\n  update",
        "order by w.id limit p_limit for no key update skip locked)\n  update",
        RACES + "test_a_claim_in_progress_keeps_its_worker_from_being_declared_lost",
    ),
    guards(
        "lease",
        "mark_lost: only where the lease has run out",
        "leases",
        (
            (
                "w.status in ('live', 'draining') and w.lease_expires_at <= {{schema}}.now()\n",
                "w.status in ('live', 'draining')\n",
            ),
            ("where w.id = e.id and w.lease_expires_at <= {{schema}}.now() returning", "where w.id = e.id returning"),
        ),
        LEASES + "test_only_a_worker_whose_lease_has_run_out_is_declared_lost",
    ),
    guard(
        "lease",
        "renew: not once lost",
        "leases",
        "where w.id = p_worker and w.status in ('live', 'draining') returning w.status into v_status;",
        "where w.id = p_worker returning w.status into v_status;",
        LEASES + "test_a_worker_that_was_declared_lost_cannot_renew",
    ),
    guard(
        "lease",
        "stop_worker: not with claims",
        "leases",
        "and not exists (select from {{schema}}.jobs j where j.claimed_by = p_worker and j.status = 'running');",
        ";",
        LEASES + "test_a_worker_stops_only_without_claims_and_drains_until_then",
    ),
    guard(
        "race",
        "stop_worker: lock, then decide",
        "leases",
        "select from {{schema}}.workers w where w.id = p_worker for update;",
        "",
        "races/test_races_of_workers.py::test_a_worker_is_not_stopped_over_a_claim_in_progress",
    ),
    guard(
        "lease",
        "prune: not while a job names the worker",
        "leases",
        "and not exists (select from {{schema}}.jobs j where j.claimed_by = o.id) limit",
        "limit",
        LEASES + "test_workers_that_ended_long_ago_are_forgotten_unless_a_job_names_them",
    ),
    # Settling
    guards(
        "lease",
        "settle_lost: absent workers too",
        "leases",
        tuple(
            (
                f"not exists (select from {WORKERS} w where w.id = j.claimed_by and w.status in ({LIVE}{end}",
                f"exists (select from {WORKERS} w where w.id = j.claimed_by and w.status not in ({LIVE}{end}",
            )
            for end in SETTLED
        ),
        LEASES + "test_claims_of_a_lost_or_absent_worker_are_settled_by_effect_class",
    ),
    guards(
        "lease",
        "settle_lost: live workers not",
        "leases",
        tuple(
            (
                f"w.id = j.claimed_by and w.status in ({LIVE}{end}",
                f"w.id = j.claimed_by and w.status = 'draining'{end[1:]}",
            )
            for end in SETTLED
        ),
        LEASES + "test_claims_of_live_and_draining_workers_are_left_alone",
    ),
    guards(
        "lease",
        "settle_lost: draining workers not",
        "leases",
        tuple(
            (f"w.id = j.claimed_by and w.status in ({LIVE}{end}", f"w.id = j.claimed_by and w.status = 'live'{end[1:]}")
            for end in SETTLED
        ),
        LEASES + "test_claims_of_live_and_draining_workers_are_left_alone",
    ),
    guard(
        "race",
        "settle_lost: not what is being ended",
        "leases",
        "       for update of j skip locked;",
        "       ;",
        RACES + "test_settling_skips_a_job_whose_end_is_in_progress",
    ),
    guard(
        "effect",
        "settle_lost: a started effect becomes unknown",
        "leases",
        "if v_job.effect_started_at is not null\n",
        "if false\n",
        LEASES + "test_claims_of_a_lost_or_absent_worker_are_settled_by_effect_class",
    ),
    guard(
        "effect",
        "settle_lost: a cancelled idempotent job becomes unknown",
        "leases",
        "or v_job.effect_class = 'idempotent' and v_job.cancel_requested_at is not null then",
        "then",
        LEASES + "test_claims_of_a_lost_or_absent_worker_are_settled_by_effect_class",
    ),
    guard(
        "effect",
        "settle_lost: a cancelled pure job does not",
        "leases",
        "or v_job.effect_class = 'idempotent' and v_job.cancel_requested_at is not null then",
        "or v_job.cancel_requested_at is not null then",
        LEASES + "test_claims_of_a_lost_or_absent_worker_are_settled_by_effect_class",
    ),
    guard(
        "effect",
        "settle_lost: a cancelled side effect that had not begun does not",
        "leases",
        "or v_job.effect_class = 'idempotent' and v_job.cancel_requested_at is not null then",
        "or v_job.effect_class <> 'pure' and v_job.cancel_requested_at is not null then",
        LEASES + "test_claims_of_a_lost_or_absent_worker_are_settled_by_effect_class",
    ),
    guard(
        "effect",
        "settle_lost: a cancelled pure job is not run again",
        "leases",
        "elsif v_job.cancel_requested_at is not null then\n"
        "          perform {{schema}}.finish(v_job, 'cancelled', 'lost'",
        "elsif false then\n          perform {{schema}}.finish(v_job, 'cancelled', 'lost'",
        LEASES + "test_claims_of_a_lost_or_absent_worker_are_settled_by_effect_class",
    ),
    # Lock, then decide
    guard(
        "race",
        "cancel: lock, then decide",
        "operate",
        LOCK_JOB + "\n    if found then",
        UNLOCKED_JOB + "\n    if found then",
        OPERATORS + "test_a_cancel_behind_a_claim_is_a_request",
    ),
    guard(
        "race",
        "retry: it looks again behind a reopening",
        "operate",
        "then look again.\n  for i in 1 .. 20 loop",
        "then look again.\n  for i in 1 .. 1 loop",
        OPERATORS + "test_two_reopenings_at_once_reopen_once",
    ),
    guard(
        "race",
        "retry: the finished job is locked",
        "operate",
        "h.finished_at >= {{schema}}.id_time(job_id) - interval '1 day' for update;",
        "h.finished_at >= {{schema}}.id_time(job_id) - interval '1 day';",
        OPERATORS + "test_two_reopenings_at_once_reopen_once",
    ),
    guard(
        "race",
        "retry: the unfinished job is locked",
        "operate",
        "then look again.\n  for i in 1 .. 20 loop\n    " + LOCK_JOB,
        "then look again.\n  for i in 1 .. 20 loop\n    " + UNLOCKED_JOB,
        OPERATORS + "test_a_reopening_behind_an_end_sees_it",
    ),
    guard(
        "race",
        "resolve: lock, then decide",
        "operate",
        "where j.id = p_job for update;\n    exit when found;\n    select * into v_old",
        "where j.id = p_job;\n    exit when found;\n    select * into v_old",
        OPERATORS + "test_two_resolutions_at_once_decide_once",
        OPERATORS + "test_an_operator_and_a_hook_at_once_decide_once",
        OPERATORS + "test_a_resolution_and_the_late_end_decide_once_in_both_orders",
    ),
    guard(
        "race",
        "sweep: not what is being claimed",
        "leases",
        "j.deadline <= {{schema}}.now() for update skip locked;",
        "j.deadline <= {{schema}}.now();",
        RACES + "test_the_sweep_skips_what_is_being_claimed_or_cancelled",
    ),
    guard(
        "race",
        "keys are taken in one order",
        "enqueue",
        "order by k.kind, 3, k.key, k.n\n",
        "order by k.n\n",
        OPERATORS + "test_batches_with_the_same_keys_in_opposite_orders_do_not_deadlock",
    ),
    guard(
        "race",
        "reopening: a key taken meanwhile refuses it",
        "operate",
        "where u.expires_at <= v_now or u.job_id = excluded.job_id;",
        ";",
        OPERATORS + "test_a_reopening_behind_an_enqueue_of_its_key_is_refused",
    ),
)

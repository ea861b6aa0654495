"""Guards of the rules around the laws: claims, deadlines, operators, keys."""

from __future__ import annotations

from guards import Guard, guard, guards

CLAIMS, FIVE, SIX = "test_claims.py::", "test_law5_transitions.py::", "test_law6_attempts.py::"
OPERATE, KEYS, LEASES = "test_cancel_resolve_reopen.py::", "test_keys.py::", "test_leases.py::"
ROLES, INVARIANTS, PARTITIONS = "test_roles.py::", "test_invariants.py::", "test_partitions.py::"
RECONCILE = "test_reconcile.py::"
BY_RULES = SIX + "test_a_suspect_is_claimed_under_the_rules_of_every_claim"
BOUNDED = "test_a_hook_runs_a_job_again_after_a_delay_and_only_as_often_as_it_may_be_recovered"
FORGED = INVARIANTS + "test_a_forged_violation_is_reported_for_its_job"
SUSPECT = (
    "where k.queue = any(p_queues) and k.status = 'pending' and k.recoveries >= 2 and k.run_at <= v_now"
    " and k.task = any(p_tasks)\n"
)
FIT = "and k.attempt < k.max_attempts and (k.deadline is null or k.deadline > v_now)\n       and (k.required"


def suspect(what: str, without: str) -> Guard:
    """A predicate of claim_suspect, removed."""
    return guard("claim", f"claim_suspect: {what}", "exchange", SUSPECT, SUSPECT.replace(without, ""), BY_RULES)


def claim(what: str, old: str, new: str, test: str) -> Guard:
    """A predicate of claim, replaced."""
    return guard("claim", f"claim: {what}", "exchange", old, new, test)


RULES: tuple[Guard, ...] = (
    claim(
        "due",
        "and k.run_at <= v_now and (k.run_at, k.id)",
        "and (k.run_at, k.id)",
        CLAIMS + "test_a_claim_takes_due_jobs_by_run_at_and_id_lane_by_lane",
    ),
    claim(
        "behind the mark",
        "and (k.run_at, k.id) > (l.mark_at, l.mark_id)\n",
        "\n",
        CLAIMS + "test_a_claim_starts_behind_the_mark_and_a_rescan_finds_what_came_late",
    ),
    claim(
        "the mark is a pair",
        "(k.run_at, k.id) > (l.mark_at, l.mark_id)\n",
        "k.run_at > l.mark_at\n",
        CLAIMS + "test_a_claim_starts_behind_the_mark_and_a_rescan_finds_what_came_late",
    ),
    claim(
        "known tasks",
        "and k.task = any(p_tasks) and k.attempt",
        "and k.attempt",
        CLAIMS + "test_a_claim_keeps_to_its_queues_tasks_and_skips",
    ),
    claim(
        "its queues",
        "where k.queue = l.queue and k.priority",
        "where k.priority",
        CLAIMS + "test_a_claim_keeps_to_its_queues_tasks_and_skips",
    ),
    claim(
        "what it must skip",
        "and k.id <> all(p_skip) and",
        "and",
        CLAIMS + "test_a_claim_keeps_to_its_queues_tasks_and_skips",
    ),
    claim(
        "paused queues", "and l.queue <> all(v_paused)\n", "\n", CLAIMS + "test_nothing_is_claimed_from_a_paused_queue"
    ),
    claim(
        "the limit over all lanes",
        ") c\n        limit v_plain))",
        ") c))",
        CLAIMS + "test_a_claim_takes_no_more_than_its_limit_over_all_lanes",
    ),
    claim(
        "in order",
        "order by k.run_at, k.id limit v_plain",
        "order by k.run_at desc, k.id limit v_plain",
        CLAIMS + "test_a_claim_takes_due_jobs_by_run_at_and_id_lane_by_lane",
    ),
    claim(
        "used-up jobs",
        "k.task = any(p_tasks) and k.attempt < k.max_attempts and",
        "k.task = any(p_tasks) and",
        SIX + "test_used_up_jobs_do_not_eat_the_quota_of_a_claim_and_are_swept",
    ),
    claim(
        "deadlines",
        "k.task = any(p_tasks) and k.attempt < k.max_attempts and (k.deadline is null or k.deadline > v_now)",
        "k.task = any(p_tasks) and k.attempt < k.max_attempts",
        FIVE + "test_a_job_past_its_deadline_is_not_claimed_and_swept",
    ),
    claim(
        "levels",
        "and (k.required_worker_schema is null or k.required_worker_schema <= v_level)\n              and k.id",
        "and k.id",
        CLAIMS + "test_claims_leave_jobs_above_the_level_of_the_worker",
    ),
    guard(
        "capability",
        "trigger capable_worker",
        "laws",
        "when (new.required_worker_schema is not null and new.status = 'running' and old.status = 'pending')",
        "when (false)",
        CLAIMS + "test_the_database_refuses_an_incapable_worker_whatever_the_claim_says",
    ),
    guard(
        "capability",
        "guard_capability: absent workers too",
        "laws",
        "if v_level is null or v_level < new.required_worker_schema then",
        "if v_level < new.required_worker_schema then",
        CLAIMS + "test_the_database_refuses_an_incapable_worker_whatever_the_claim_says",
    ),
    suspect("its queues", "k.queue = any(p_queues) and "),
    suspect("due", " and k.run_at <= v_now"),
    suspect("suspects only", " and k.recoveries >= 2"),
    suspect("known tasks", " and k.task = any(p_tasks)"),
    guard(
        "claim",
        "claim_suspect: used-up jobs",
        "exchange",
        FIT,
        FIT.replace("and k.attempt < k.max_attempts ", ""),
        BY_RULES,
    ),
    guard(
        "claim",
        "claim_suspect: deadlines",
        "exchange",
        FIT,
        FIT.replace(" and (k.deadline is null or k.deadline > v_now)", ""),
        BY_RULES,
    ),
    guard(
        "claim",
        "claim_suspect: paused queues",
        "exchange",
        "and not exists (select from {{schema}}.queues q where q.name = k.queue and q.paused_at is not null)\n",
        "\n",
        BY_RULES,
    ),
    # Deadlines
    guard(
        "deadline",
        "a wait does not pass the deadline",
        "exchange",
        "and (e.outcome = 'release' or j.deadline is null or v_now + make_interval(secs => e.delay) <= j.deadline)",
        "",
        FIVE + "test_a_wait_that_would_pass_the_deadline_ends_the_job",
    ),
    guard(
        "deadline",
        "a release goes back whatever the deadline",
        "exchange",
        "and (e.outcome = 'release' or j.deadline is null or",
        "and (j.deadline is null or",
        FIVE + "test_a_release_goes_back_whatever_the_deadline_and_keeps_its_place",
    ),
    guard(
        "deadline",
        "sweep ends what is past its deadline",
        "leases",
        "and j.deadline <= {{schema}}.now()\n",
        "and false\n",
        FIVE + "test_a_job_past_its_deadline_is_not_claimed_and_swept",
    ),
    guards(
        "deadline",
        "sweep leaves running jobs",
        "leases",
        (
            ("j.deadline is not null and j.status in ('pending', 'held') and", "j.deadline is not null and"),
            ("where j.id = v_found.id and j.status in ('pending', 'held') and", "where j.id = v_found.id and"),
        ),
        FIVE + "test_a_job_past_its_deadline_is_not_claimed_and_swept",
    ),
    guard(
        "deadline",
        "reopening drops a deadline that has passed",
        "operate",
        "case when v_old.deadline > v_now then v_old.deadline end, v_old",
        "v_old.deadline, v_old",
        OPERATE + "test_a_deadline_that_has_passed_is_dropped_by_reopening",
    ),
    # Operators
    guard(
        "operate",
        "a request keeps the time of the first",
        "operate",
        "coalesce(j.cancel_requested_at, {{schema}}.now())",
        "{{schema}}.now()",
        OPERATE + "test_a_cancel_request_keeps_the_time_of_the_first",
    ),
    guard(
        "operate",
        "resolve: only what is unknown",
        "operate",
        "if v_status <> 'unknown' then",
        "if false then",
        OPERATE + "test_an_outcome_is_resolved_once_and_only_where_it_is_unknown",
    ),
    guard(
        "operate",
        "resolve: with a reason",
        "operate",
        "if p_reason is null or btrim(p_reason) = '' then",
        "if false then",
        OPERATE + "test_resolving_needs_a_reason",
    ),
    guard(
        "operate",
        "retry: not what is running or unknown",
        "operate",
        "if v_job.status <> 'pending' and v_job.held_reason is distinct from 'ordering' then",
        "if false then",
        OPERATE + "test_only_failed_and_cancelled_jobs_are_reopened",
    ),
    guard(
        "operate",
        "retry: not what has succeeded",
        "operate",
        "if v_old.status = 'succeeded' then",
        "if false then",
        OPERATE + "test_only_failed_and_cancelled_jobs_are_reopened",
    ),
    guard(
        "operate",
        "every action is audited",
        "operate",
        "perform {{schema}}.note('resolve', p_job::text",
        "perform concat('resolve', p_job::text",
        OPERATE + "test_an_outcome_is_resolved_once_and_only_where_it_is_unknown",
    ),
    # Unknown outcomes
    guard(
        "unknown",
        "an answer is about one attempt",
        "operate",
        "if p_epoch <> v_epoch then",
        "if false then",
        RECONCILE + "test_an_answer_about_an_older_attempt_changes_nothing_and_is_told_so",
    ),
    guard(
        "unknown",
        "a late end is told from a job that was never unknown",
        "operate",
        "if v_outcome = 'resolved' or v_outcome is not null and exists (",
        "if v_outcome = 'resolved' or false and exists (",
        RECONCILE + "test_after_the_late_end_every_decision_is_refused_as_one_too_many",
    ),
    guard(
        "unknown",
        "a hook runs a job again within a bound",
        "operate",
        "if v_job.recoveries > v_bound and not v_hold then",
        "if false then",
        RECONCILE + BOUNDED,
    ),
    guard(
        "unknown",
        "a hook runs a job again after a delay",
        "operate",
        "v_delay := {{schema}}.backoff(v_job.policy_id, v_job.recoveries);",
        "v_delay := 0;",
        RECONCILE + BOUNDED,
    ),
    guard(
        "unknown",
        "a hook runs no job again after its deadline",
        "operate",
        "elsif p_bounded and v_now + make_interval(secs => v_delay) > v_job.deadline then",
        "elsif false then",
        RECONCILE + "test_what_would_start_again_after_its_deadline_fails_at_once",
    ),
    guard(
        "unknown",
        "what did not happen is counted",
        "operate",
        "effect_started_at = null, recoveries = j.recoveries + 1,",
        "effect_started_at = null,",
        RECONCILE + BOUNDED,
    ),
    guard(
        "unknown",
        "the last that did not happen is counted too",
        "operate",
        "perform {{schema}}.finish(v_job, 'failed', 'resolved', null, jsonb_build_object('type', 'RecoveryExhausted',",
        "v_job.recoveries := v_job.recoveries - 1;\n      perform {{schema}}.finish(v_job, 'failed', 'resolved', null,"
        " jsonb_build_object('type', 'RecoveryExhausted',",
        RECONCILE + BOUNDED,
    ),
    guard(
        "unknown",
        "no bound holds back an operator",
        "operate",
        "select {{schema}}.decide_unknown(job_id, null, happened, result, reason, actor, false)",
        "select {{schema}}.decide_unknown(job_id, null, happened, result, reason, actor, true)",
        RECONCILE + "test_an_operator_may_run_it_again_past_the_bound_at_once_and_a_hook_then_not_any_more",
    ),
    guard(
        "unknown",
        "one open job asks about an attempt",
        "reconcile",
        ", array[p_job.id || '/' || p_job.claim_epoch]) e;",
        ") e;",
        RECONCILE + "test_an_unknown_attempt_is_asked_about_by_one_job_that_names_it",
    ),
    guard(
        "unknown",
        "what cannot be asked about becomes unknown all the same",
        "reconcile",
        "exception when others then\n  return null;\n",
        "",
        RECONCILE + "test_what_cannot_be_asked_becomes_unknown_all_the_same",
    ),
    guard(
        "unknown",
        "what has been asked about is not asked about again by itself",
        "reconcile",
        " and u.reconcile_job is null)",
        ")",
        RECONCILE + "test_attempts_of_before_a_deploy_are_asked_about_once_there_is_a_hook",
    ),
    guard(
        "unknown",
        "an older worker that starts later does not switch off a hook",
        "enqueue",
        "w.status = 'live' and c.reconcile_task = any(w.tasks)",
        "false",
        RECONCILE + "test_a_worker_without_the_hook_takes_it_away_from_none_that_has_it",
        "/worker/test_hooks_asked.py::test_an_older_worker_that_starts_later_leaves_the_hook_to_be_asked",
    ),
    guard(
        "unknown",
        "a hook goes with the workers that have it",
        "enqueue",
        "where w.status = 'live' and c.reconcile_task = any(w.tasks)",
        "where true",
        RECONCILE + "test_a_worker_without_the_hook_takes_it_away_from_none_that_has_it",
    ),
    guard(
        "race",
        "publish_task: lock, then decide",
        "enqueue",
        "  select from {{schema}}.task_config c where c.task = p_task for update;\n",
        "",
        "races/test_races_of_workers.py::test_a_hook_that_is_being_published_is_not_switched_off_meanwhile",
    ),
    guard(
        "unknown",
        "only what is unknown is asked about",
        "reconcile",
        "if v_job.status is distinct from 'unknown' then",
        "if false then",
        RECONCILE + "test_only_what_is_unknown_is_asked_about",
    ),
    # Keys
    guard(
        "keys",
        "trigger unique_key_given_back",
        "laws",
        "when (old.unique_key is not null) execute",
        "when (false) execute",
        KEYS + "test_a_unique_key_is_free_again_once_its_job_has_left_by_whatever_path",
    ),
    guard(
        "keys",
        "a hold begins when the job leaves",
        "laws",
        "and u.job_id = old.id and u.hold_for is null;",
        "and u.job_id = old.id;",
        KEYS + "test_a_unique_key_is_held_for_a_while_if_asked",
    ),
    guard(
        "keys",
        "a unique key expires by the clock",
        "enqueue",
        "if v_key.expires_at <= v_now then",
        "if false then",
        KEYS + "test_a_unique_key_is_held_for_a_while_if_asked",
    ),
    guards(
        "keys",
        "a unique key that is held refuses another job",
        "enqueue",
        (
            ("if v_key.expires_at <= v_now then", "if true then"),
            (
                "expires_at = null\n              where k.scope = v_job.scope and k.key = v_job.key"
                " and k.expires_at <= v_now;",
                "expires_at = null where k.scope = v_job.scope and k.key = v_job.key;",
            ),
        ),
        KEYS + "test_a_unique_key_is_free_again_once_its_job_has_left_by_whatever_path",
    ),
    guard(
        "race",
        "a unique key that is held is not locked",
        "enqueue",
        "v_job.hold)\n            on conflict (scope, key) do nothing;",
        "v_job.hold)\n            on conflict (scope, key) do update set key = excluded.key where false;",
        "races/test_races_of_keys.py::test_an_open_transaction_that_was_answered_with_a_job_does_not_hold_up_its_end",
    ),
    guard(
        "keys",
        "raise: a job that is only repeated is a job of before",
        "enqueue",
        "b.id = v_key.job_id and b.is_new",
        "b.id = v_key.job_id",
        KEYS + "test_a_key_held_by_a_job_that_is_only_repeated_in_the_batch_is_a_conflict",
    ),
    guard(
        "keys",
        "an idempotency key expires by the clock",
        "enqueue",
        "if v_known.expires_at <= v_now then",
        "if false then",
        KEYS + "test_an_idempotency_key_is_forgotten_after_its_time_and_no_sooner",
    ),
    guards(
        "keys",
        "an idempotency key answers until then",
        "enqueue",
        (
            ("if v_known.expires_at <= v_now then", "if true then"),
            (
                "installation i where k.scope = v_job.scope and k.key = v_job.key and k.expires_at <= v_now;",
                "installation i where k.scope = v_job.scope and k.key = v_job.key;",
            ),
        ),
        KEYS + "test_the_same_request_is_answered_with_the_same_job_also_when_it_has_finished",
    ),
    guard(
        "keys",
        "an idempotency key is of one request",
        "enqueue",
        "if v_known.fingerprint <> v_job.fingerprint then",
        "if false then",
        KEYS + "test_the_same_key_with_another_request_is_refused",
    ),
    guard(
        "keys",
        "reopening takes the key again",
        "operate",
        "if v_old.unique_key is not null then",
        "if false then",
        KEYS + "test_reopening_takes_the_unique_key_again",
    ),
    guard(
        "keys",
        "reopening is refused while another has the key",
        "operate",
        "where u.expires_at <= v_now or u.job_id = excluded.job_id;",
        ";",
        KEYS + "test_reopening_is_refused_while_another_job_has_the_key",
    ),
)

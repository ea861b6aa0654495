"""Guards of what stands around the laws: the leader, roles, verify, plans."""

from __future__ import annotations

from guards import Guard, guard

LEASES, ROLES = "test_leases.py::", "test_roles.py::"
FORGED = "test_invariants.py::test_a_forged_violation_is_reported_for_its_job"
PLAIN = " set search_path = pg_catalog, pg_temp"
PLANNER = (
    " set enable_seqscan = off set enable_nestloop = off set enable_mergejoin = off\n  set enable_hashjoin = on"
    " set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off"
)
CLAIM_BODY, ENDS_BODY = (
    f" as $$\ndeclare\n  {start}" for start in ("v_now timestamptz;\n  v_level", "v_now timestamptz :=")
)
PLANS = "/test_plans.py::test_claims_and_ends_go_by_their_indexes_at_every_size[stale]"


def lead(what: str, old: str, new: str, *tests: str) -> Guard:
    """A rule of the leader, replaced."""
    return guard("leader", what, "leases", old, new, *(LEASES + test for test in tests))


def verify(what: str, old: str, new: str) -> Guard:
    """A check of check_invariants, replaced."""
    return guard("verify", what, "invariants", old, new, FORGED)


AROUND: tuple[Guard, ...] = (
    # The leader
    lead(
        "quiet after a restart",
        "v_row.server_started_at <> v_started or",
        "",
        "test_after_a_restart_or_a_promotion_it_is_quiet_for_one_lease",
    ),
    lead(
        "quiet after a promotion",
        "or v_row.timeline <> v_timeline",
        "",
        "test_after_a_restart_or_a_promotion_it_is_quiet_for_one_lease",
    ),
    lead(
        "quiet after a step back",
        "or v_now < v_row.observed_at",
        "",
        "test_after_a_step_of_the_clock_it_is_quiet_for_one_lease",
    ),
    lead(
        "quiet after a step forward",
        "or v_now > v_row.observed_at + v_lease / 2 and not v_late",
        "",
        "test_after_a_step_of_the_clock_it_is_quiet_for_one_lease",
    ),
    lead(
        "a late look is no step",
        "v_lease / 2 and not v_late then",
        "v_lease / 2 then",
        "test_a_look_that_came_late_is_no_step_of_the_clock",
    ),
    lead(
        "a step is no late look",
        "<= greatest(p_lease / 10, least(1, p_lease / 2)), false);",
        "is not null, false);",
        "test_a_step_of_the_clock_is_no_look_that_came_late",
    ),
    lead(
        "another's look is not one's own",
        "v_late := coalesce(v_row.observed_by = p_worker\n    and",
        "v_late := coalesce(",
        "test_after_another_workers_look_its_own_clock_says_nothing",
    ),
    lead(
        "quiet for one lease",
        "v_quiet := v_now + v_longest;",
        "v_quiet := v_now + v_longest / 2;",
        "test_after_a_restart_or_a_promotion_it_is_quiet_for_one_lease",
    ),
    lead(
        "no longer than one lease",
        "quiet_until = least(v_quiet, v_now + v_longest)",
        "quiet_until = v_quiet + interval '1 h'",
        "test_after_a_step_of_the_clock_it_is_quiet_for_one_lease",
    ),
    lead(
        "one leads at a time",
        "holder = case when l.holder = p_worker or l.holder is null",
        "holder = case when true or l.holder is null",
        "test_one_worker_leads_at_a_time_until_it_resigns_or_its_lease_runs_out",
    ),
    lead(
        "no lease outlasts a step back",
        "or l.expires_at > v_now + l.lease then p_worker else",
        "then p_worker else",
        "test_after_a_step_back_the_old_lease_does_not_last_for_ever",
    ),
    lead(
        "only the leader resigns",
        "where role = p_role and holder = p_worker",
        "where role = p_role",
        "test_one_worker_leads_at_a_time_until_it_resigns_or_its_lease_runs_out",
    ),
    lead(
        "a role whose row is gone starts anew",
        "0, '-infinity', '0') on conflict do nothing;",
        "0, '-infinity', '0') on conflict do nothing; delete from {{schema}}.leader l where l.timeline = 0;",
        "test_a_role_whose_row_was_deleted_starts_anew_and_quiet",
    ),
    # Roles
    guard(
        "roles",
        "nobody calls functions by default",
        "roles",
        "execute 'revoke all on all functions in schema {{schema}} from public';",
        "",
        ROLES + "test_each_role_calls_its_functions_and_no_other",
    ),
    guard(
        "roles",
        "workers do not call what operators call",
        "roles",
        "\n      {{schema}}.resolve(uuid, boolean, jsonb, text, text),",
        "",
        ROLES + "test_each_role_calls_its_functions_and_no_other",
    ),
    guard(
        "roles",
        "no role writes to tables",
        "roles",
        "('{{schema}}_reader', 'select on all tables in schema {{schema}}')",
        "('{{schema}}_reader', 'select, update on all tables in schema {{schema}}')",
        ROLES + "test_no_role_writes_to_any_table",
    ),
    guard(
        "roles",
        "definer functions pin their search_path",
        "leases",
        "prune(p_limit integer default 1000) returns integer\n  language plpgsql security definer" + PLAIN,
        "prune(p_limit integer default 1000) returns integer\n  language plpgsql security definer",
        ROLES + "test_every_security_definer_function_pins_its_search_path",
    ),
    # Verify
    verify(
        "in_jobs_and_history",
        "join {{schema}}.history h on h.id = j.id;",
        "join {{schema}}.history h on h.id = j.id and false;",
    ),
    verify(
        "attempts_do_not_add_up, unfinished",
        "+ (j.status in ('running', 'unknown'))::int <> j.claim_epoch;",
        "+ (j.status in ('running', 'unknown'))::int <> j.claim_epoch and false;",
    ),
    verify(
        "an unknown job has an open attempt",
        "(j.status in ('running', 'unknown'))::int <> j.claim_epoch",
        "(j.status = 'running')::int <> j.claim_epoch",
    ),
    verify(
        "attempt_beyond_epoch, unfinished",
        "where l.claim_epoch > j.claim_epoch - (j.status",
        "where false and l.claim_epoch > j.claim_epoch - (j.status",
    ),
    verify(
        "attempt_twice, unfinished",
        "group by l.job_id, l.claim_epoch having count(*) > 1;",
        "group by l.job_id, l.claim_epoch having false;",
    ),
    verify(
        "counters_differ_from_record, unfinished",
        "where j.claim_epoch > 0 and j.pruned_attempts = 0\n",
        "where false\n",
    ),
    verify(
        "counters are those of the generation",
        "where l.job_id = j.id and l.generation = j.generation) l",
        "where l.job_id = j.id) l",
    ),
    verify("policy_missing", "(select from {{schema}}.policies p where p.id = j.policy_id);", "(select);"),
    verify(
        "unique_key_not_held",
        "from {{schema}}.jobs j where j.unique_key is not null\n",
        "from {{schema}}.jobs j where false\n",
    ),
    verify("unique_key_of_no_job", "where u.expires_at is null and not exists", "where false and not exists"),
    verify("twice_in_history", "o.id = h.id and o.finished_at <> h.finished_at)", "false)"),
    verify(
        "attempts_do_not_add_up, finished",
        "+ (h.worker_id is not null)::int <> h.claim_epoch,",
        "+ (h.worker_id is not null)::int <> h.claim_epoch and false,",
    ),
    verify("attempt_twice, finished", "coalesce(r.n <> r.epochs, false)", "false"),
    verify(
        "attempt_beyond_epoch, finished",
        "coalesce(r.top > h.claim_epoch - (h.worker_id is not null)::int, false)",
        "false",
    ),
    verify("counters_differ_from_record, finished", "h.pruned_attempts = 0 and h.claim_epoch > 0 and\n", "false and\n"),
    verify(
        "side_effect_repeated, unfinished",
        "where j.effect_class = 'side_effecting' and l.effect_started_at is not null and not",
        "where false and not",
    ),
    verify(
        "side_effect_repeated, finished",
        "and h.effect_class = 'side_effecting' and h.claim_epoch > 0 and l.effect_started_at is not null and not",
        "and false and not",
    ),
    verify("side_effect_repeated, by a nonce", "then p_attempt.outcome_id is not null", "then true"),
    verify("side_effect_repeated, decided so", "and a.details -> 'happened' = 'false' and", "and"),
    verify(
        "side_effect_untold, told",
        "else h.outcome_id is null or h.outcome in ('lost', 'released') end;",
        "else false end;",
    ),
    verify(
        "side_effect_untold, decided",
        "and a.action = 'resolve' and a.details -> 'claim_epoch' = to_jsonb(h.claim_epoch))",
        "or true)",
    ),
    verify(
        "succeeded_without_effect_start",
        "and h.effect_class = 'side_effecting' and h.outcome = 'succeeded' and h.effect_started_at is null;",
        "and false;",
    ),
    verify("attempt_of_no_job", "if scope = 'all' then", "if false then"),
    # Plans
    guard(
        "plans",
        "planner settings of claim",
        "exchange",
        PLAIN + PLANNER + CLAIM_BODY,
        PLAIN + CLAIM_BODY,
        PLANS,
    ),
    guard(
        "plans",
        "planner settings of end_attempts",
        "exchange",
        PLAIN + PLANNER + ENDS_BODY,
        PLAIN + ENDS_BODY,
        PLANS,
    ),
    guard(
        "plans",
        "index jobs_claim has the queue first",
        "tables",
        "create index jobs_claim on {{schema}}.jobs (queue, priority, run_at, id)",
        "create index jobs_claim on {{schema}}.jobs (priority, run_at, id)",
        "/test_plans.py::test_a_claim_is_not_slowed_by_the_backlog_of_another_queue_or_by_what_is_due_later[stale]",
    ),
    guard(
        "plans",
        "index jobs_claimed_by",
        "tables",
        "create index jobs_claimed_by on {{schema}}.jobs (claimed_by) where claimed_by is not null;",
        "",
        "/test_plans.py::test_what_the_leader_and_a_renewal_look_for_goes_by_indexes",
    ),
)

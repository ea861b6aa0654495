"""Guards of terminal effects: what makes a promise durable, once, and settled before its owner goes on."""

from __future__ import annotations

from guards import Guard, guard, guards

EFFECTS, RACES = "test_terminal_effects.py::", "races/test_races_of_effects.py::"
FORGED = "test_invariants.py::test_a_forged_violation_is_reported_for_its_job"
BROKEN = EFFECTS + "test_a_promise_that_cannot_be_kept_is_on_record_and_the_end_stands"
WAYS = EFFECTS + "test_every_way_to_an_end_keeps_what_was_promised_for_it"
PRUNED = EFFECTS + "test_intents_are_forgotten_with_both_of_their_jobs_once_they_are_settled"
NAMES = EFFECTS + "test_names_that_cannot_be_are_refused_and_do_not_keep_an_end_from_being_stored"
SETTLING = EFFECTS + "test_settling_cancels_a_job_that_waits_and_is_refused_while_it_runs"
WRITTEN = "update {{schema}}.effect_intents i set created_at = i.created_at where i.id = any(v_intents);"
CANCELLED = EFFECTS + "test_a_cancelled_effect_lets_its_owner_go_on_and_is_then_not_reopened"
FAILING = EFFECTS + "test_an_effect_that_fails_is_bounded_and_stays_visible"


def effect(what: str, old: str, new: str, *tests: str) -> Guard:
    """A guard in the migration of the effects."""
    return guard("effects", what, "effects", old, new, *tests)


OF_EFFECTS: tuple[Guard, ...] = (
    effect("the trigger", "when (new.has_effects) execute", "when (false) execute", WAYS),
    effect(
        "the condition of the trigger",
        "when (new.has_effects) execute",
        "when (new.id is not null) execute",
        EFFECTS + "test_a_job_without_effects_runs_no_code_for_them",
    ),
    effect(
        "one promise for each end",
        "effect_key text not null unique,",
        "effect_key text not null,",
        EFFECTS + "test_a_second_promise_of_one_end_cannot_be_stored",
    ),
    effect("only for the statuses named", " where e.spec -> 'on' ? p_owner.status", "", WAYS),
    effect(
        "the limit of a chain",
        "if v_depth > 8 then",
        "if v_depth > 800 then",
        EFFECTS + "test_a_chain_of_effects_ends_at_the_limit",
    ),
    effect(
        "the depth is counted",
        "return coalesce((select i.depth from {{schema}}.effect_intents i where i.job_id = p_owner.id),",
        "return coalesce(null::integer,",
        EFFECTS + "test_a_chain_of_effects_ends_at_the_limit",
    ),
    effect(
        "what is broken is recorded",
        "if not {{schema}}.is_broken(sqlstate) then",
        "if sqlstate <> '' then",
        BROKEN,
    ),
    effect(
        "what is of the moment undoes the end",
        "if not {{schema}}.is_broken(sqlstate) then",
        "if sqlstate = '' then",
        EFFECTS + "test_what_is_the_matter_of_the_moment_undoes_the_end",
    ),
    effect("the effect's policy is there", "where p.id = p_effect ->> 'policy_id') then", "where true) then", BROKEN),
    effect("a reference leads somewhere", "if v_wrong is not null then", "if false then", BROKEN),
    effect("the default of an argument", ", t.value -> 'default')", ", null)", WAYS),
    effect(
        "a name is one",
        "case when coalesce({{schema}}.valid_name(e.name), false) and",
        "case when",
        NAMES,
    ),
    effect(
        "a name stands once",
        "left(e.name, 1) <> '#' and e.place = 1 then",
        "left(e.name, 1) <> '#' then",
        NAMES,
    ),
    effect("a name is not reserved", "and e.name <> '*' and left(e.name, 1) <> '#' and", "and", NAMES),
    guard(
        "effects",
        "a policy names its effects",
        "enqueue",
        "where e.name is distinct from e.spec ->> 'name' limit 1;",
        "where false limit 1;",
        NAMES,
    ),
    effect(
        "what travels along breaks no promise",
        " and octet_length((p_owner.meta || v_mark)::text) <= 131072 then",
        " then",
        EFFECTS + "test_a_promise_is_kept_whatever_travels_with_its_owner",
    ),
    effect(
        "a missing policy breaks all",
        "if not found or jsonb_typeof(v_effects) <> 'array' then\n    v_depth",
        "if false then\n    v_depth",
        EFFECTS + "test_a_policy_that_is_missing_or_no_policy_breaks_all_that_it_promised",
    ),
    guard(
        "effects",
        "enqueue goes by the policy",
        "enqueue",
        "coalesce(nullif(x.has_effects, false), nullif(p.has_effects, false))",
        "x.has_effects",
        EFFECTS + "test_what_the_policy_promises_holds_whoever_enqueues",
    ),
    guard(
        "effects",
        "enqueue goes by the policy, of one job",
        "enqueue",
        "case when s.has_effects or p.promises then true end",
        "case when s.has_effects then true end",
        EFFECTS + "test_what_the_policy_promises_holds_whoever_enqueues",
    ),
    effect(
        "reopening waits for effects",
        "if v_open is not null then",
        "if false then",
        EFFECTS + "test_an_effect_is_settled_once_its_job_has_succeeded",
    ),
    guards(
        "effects",
        "reopening locks the intents",
        "effects",
        (
            (
                "  perform from unnest(v_intents) u(id) cross join lateral"
                " (select from {{schema}}.effect_intents i where i.id = u.id limit 1 for update) l;\n",
                "",
            ),
            (WRITTEN, ""),
        ),
        RACES + "test_an_owner_and_its_cancelled_effect_are_not_both_reopened",
    ),
    effect(
        "reopening is seen from an older snapshot",
        WRITTEN,
        "",
        RACES + "test_an_owner_and_its_cancelled_effect_are_not_both_reopened_from_an_older_snapshot",
    ),
    effect(
        "what is settled is not reopened", "if found and v_own.settled_at is not null then", "if false then", FAILING
    ),
    effect(
        "no effect of an owner that has gone on",
        "if found and (exists (select from {{schema}}.jobs o",
        "if false and (exists (select from {{schema}}.jobs o",
        CANCELLED,
    ),
    effect(
        "no effect of an owner that has ended again",
        "where o.id = v_own.owner_job_id and o.generation <> v_own.generation",
        "where false",
        CANCELLED,
    ),
    effect(
        "the key of what is reopened",
        "then p_old.generation + 1 else",
        "then p_old.key_generation else",
        EFFECTS + "test_reopening_raises_the_key_once_an_effect_has_undone_what_the_job_did",
    ),
    effect(
        "settling keeps off what runs",
        "if v_job.id is not null and v_job.status not in ('pending', 'held') then",
        "if false then",
        SETTLING,
    ),
    effect(
        "settling needs a reason",
        "if reason is null or btrim(reason) = '' then",
        "if false then",
        EFFECTS + "test_settling_needs_a_reason",
    ),
    effect(
        "settling is done once",
        "where e.effect_key = effect_key and e.settled;",
        "where false;",
        EFFECTS + "test_an_effect_is_settled_once_its_job_has_succeeded",
    ),
    effect(
        "settling cancels what waits",
        "if v_job.id is not null then\n    perform",
        "if false then\n    perform",
        SETTLING,
    ),
    effect(
        "settling locks the intent",
        "where i.effect_key = effect_key for update;",
        "where i.effect_key = effect_key;",
        RACES + "test_a_settling_and_a_reopening_of_its_job_are_one_after_the_other",
    ),
    effect(
        "settling locks the job",
        "where j.id = v_intent.job_id for update;",
        "where j.id = v_intent.job_id;",
        RACES + "test_a_claim_and_a_settling_of_an_effect_decide_once",
    ),
    guards(
        "effects",
        "a broken effect is retried once",
        "effects",
        (
            ("h.finished_at >= v_intent.created_at - interval '1 day' for update;", "true;"),
            ("where i.id = v_intent.id for update;", "where i.id = v_intent.id;"),
        ),
        RACES + "test_two_retries_of_a_broken_effect_make_one_job",
    ),
    effect(
        "one that was refused stays so",
        "or v_intent.fault is distinct from 'broken' then",
        "then",
        EFFECTS + "test_a_chain_of_effects_ends_at_the_limit",
    ),
    effect(
        "an intent outlives its owner's row",
        "       and not exists (select from {{schema}}.history h where h.id = i.owner_job_id)\n",
        "",
        PRUNED,
    ),
    effect(
        "an intent outlives its job's row",
        "       and not exists (select from {{schema}}.history h where h.id = i.job_id)\n",
        "",
        PRUNED,
    ),
    effect(
        "an intent outlives an unfinished job",
        "       and not exists (select from {{schema}}.jobs j where j.id in (i.owner_job_id, i.job_id))\n",
        "",
        PRUNED,
    ),
    effect(
        "what was never kept is not forgotten",
        "       and (i.settled_at is not null or i.job_ended in ('succeeded', 'cancelled'))\n",
        "",
        PRUNED,
    ),
    guard(
        "effects",
        "how an effect ended outlives its job's row",
        "partitions",
        "if v_parent = 'history' then\n    -- How",
        "if false then\n    -- How",
        PRUNED,
    ),
    *(
        guard("effects", f"verify: {code}", "invariants", old, new, FORGED)
        for code, old, new in (
            (
                "effect_without_job",
                "where i.job_id is null and i.fault is null and i.settled_at is null;",
                "where false;",
            ),
            (
                "effect_job_differs, unfinished",
                "where j.task is distinct from i.task or {{schema}}.effect_fingerprint(j.task, j.payload)"
                " is distinct from i.fingerprint;",
                "where false;",
            ),
            (
                "effect_job_differs, finished",
                "and (h.task is distinct from i.task or {{schema}}.effect_fingerprint(h.task, h.payload)"
                " is distinct from i.fingerprint);",
                "and false;",
            ),
            ("effect_not_promised", "and (p.name is not null or p.id is null)", "and false"),
            (
                "effect_job_missing",
                "where i.job_id is not null and not exists (select from {{schema}}.jobs j where j.id = i.job_id)",
                "where false",
            ),
        )
    ),
)

"""Guards of side-effecting steps."""

from __future__ import annotations

from guards import Guard, guard

STEPS, RACES = "test_effect_steps.py::", "races/test_races_of_effect_steps.py::"
ONCE = STEPS + "test_a_start_is_committed_once_under_the_fence_and_repeats_what_it_is_about"
MAY_NOT = STEPS + "test_what_may_not_start_says_why_and_leaves_nothing"
WAYS_OUT = STEPS + "test_however_its_attempt_ends_the_job_is_unknown"
STANDS = STEPS + "test_what_is_told_stands_and_is_given_instead_of_a_start"
LATE = STEPS + "test_a_worker_that_tells_late_is_heard_as_long_as_nobody_has_decided"
DECIDED = STEPS + "test_what_somebody_decides_is_about_the_step_and_the_job_goes_on"
HOOKS = "test_step_hooks.py::"
TAKEN = HOOKS + "test_a_worker_takes_away_no_hook_of_a_step_that_another_has"
REFUSED = STEPS + "test_the_database_itself_refuses_to_pass_over_it"
STARTING = (
    "j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for no key update;"
)
START = f"""   where {STARTING}
  if not found then
    return query select 'fenced'"""
TELLING = f"""   where {STARTING}
  if not found then
    -- Too late"""
TOLD_LATE = "j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'unknown' for update;"
TAKEN_AWAY = """  else
    delete from {{schema}}.steps s
     where s.job_id = p_job.id and s.generation = p_job.generation and s.kind = 'step' and s.name = v_step.name"""
TAKEN_AWAY += " and s.occurrence = v_step.occurrence;\n"
OPEN = "and (j.effect_started_at is null or j.effect_class = 'side_effecting')\n"


def start(what: str, part: str, test: str) -> Guard:
    """The fence of a start without one of its parts."""
    return guard("4", f"step start: {what}", "effect_steps", START, START.replace(part, ""), test)


def told(what: str, part: str, test: str) -> Guard:
    """The fence of a word about a step without one of its parts."""
    return guard("4", f"step told: {what}", "effect_steps", TELLING, TELLING.replace(part, ""), test)


OF_EFFECT_STEPS: tuple[Guard, ...] = (
    start("by its worker", " and j.claimed_by = p_worker", ONCE),
    start("by its epoch", " and j.claim_epoch = p_epoch", ONCE),
    start(
        "decided on the locked row",
        " for no key update",
        RACES + "test_of_a_start_and_a_cancel_request_whichever_commits_first_wins",
    ),
    guard(
        "effect",
        "step start: not after a cancel request",
        "effect_steps",
        "elsif v_job.cancel_requested_at is not null then",
        "elsif false then",
        MAY_NOT,
    ),
    guard(
        "effect", "step start: the lease holds", "effect_steps", "elsif not v_holds then", "elsif false then", MAY_NOT
    ),
    guard(
        "effect",
        "step start: one at a time",
        "effect_steps",
        "elsif v_job.effect_started_at is not null then",
        "elsif false then",
        MAY_NOT,
    ),
    guard(
        "effect",
        "step start: not in a side-effecting job",
        "effect_steps",
        "elsif v_job.effect_class = 'side_effecting' then",
        "elsif false then",
        MAY_NOT,
    ),
    guard(
        "effect",
        "step start: what is told is not started",
        "effect_steps",
        "if v_step.done then\n    v_answer := 'done';",
        "if false then\n    v_answer := 'done';",
        STANDS,
    ),
    guard(
        "effect",
        "step start: what an earlier attempt left untold is not called",
        "effect_steps",
        "elsif v_step.claim_epoch = p_epoch then",
        "elsif v_step.job_id is not null then",
        STEPS + "test_one_that_an_earlier_attempt_left_untold_is_never_started",
    ),
    told("by its worker", " and j.claimed_by = p_worker", STANDS),
    told("by its epoch", " and j.claim_epoch = p_epoch", STANDS),
    told(
        "decided on the locked row",
        " for no key update",
        RACES + "test_what_waited_for_the_loss_is_told_late",
    ),
    guard(
        "4",
        "step told late: by its worker",
        "effect_steps",
        TOLD_LATE,
        TOLD_LATE.replace("j.claimed_by = p_worker and ", ""),
        LATE,
    ),
    guard(
        "4",
        "step told: what stands is not changed",
        "effect_steps",
        "is not distinct from (p_value, p_error) then 'replay' else 'conflict' end",
        "is not distinct from (p_value, p_error) then 'replay' else 'recorded' end",
        STANDS,
    ),
    guard(
        "effect",
        "end_attempts: no success, failure or cancel over a step",
        "exchange",
        f"       {OPEN}       and j.id <> all(v_unknown)",
        "       and j.id <> all(v_unknown)",
        WAYS_OUT,
    ),
    guard(
        "effect",
        "end_attempts: nothing goes back over a step",
        "exchange",
        f"or j.attempt + 1 < j.max_attempts)\n         {OPEN}",
        "or j.attempt + 1 < j.max_attempts)\n",
        WAYS_OUT,
    ),
    guard(
        "effect",
        "end_attempts: no suspension over a step",
        "exchange",
        f"j.cancel_requested_at is null\n         {OPEN}",
        "j.cancel_requested_at is null\n",
        WAYS_OUT,
    ),
    guard(
        "effect",
        "end_attempts: with a step it becomes unknown",
        "exchange",
        "cardinality(v_unknown) < coalesce(array_length(p_ids, 1), 0) then",
        "cardinality(v_unknown) < 0 then",
        WAYS_OUT,
    ),
    guard(
        "effect",
        "exchange: an end over a step is not sent again",
        "exchange",
        "or j.effect_class <> 'side_effecting' and j.effect_started_at is not null));",
        "));",
        WAYS_OUT,
    ),
    guard(
        "effect",
        "end_attempts: a step that the row knows better goes back",
        "exchange",
        "or o.error->>'step' is not null) and exists (",
        "or false) and exists (",
        STEPS + "test_told_as_unknown_for_a_step_that_the_row_knows_better_it_goes_back",
    ),
    guard(
        "effect",
        "end inside: not over a step",
        "checkpoints",
        "    return 'step';\n",
        "    null;\n",
        STEPS + "test_a_bodys_own_transaction_does_not_end_the_job_over_it",
    ),
    guard(
        "5",
        "jobs: nothing waits over a step",
        "laws",
        "old.effect_class <> 'side_effecting' and new.status in ('pending', 'held'))",
        "false)",
        REFUSED,
    ),
    guard(
        "5",
        "jobs: nothing ends over a step",
        "laws",
        "when (old.effect_started_at is not null and old.effect_class <> 'side_effecting')",
        "when (false)",
        REFUSED,
    ),
    guard(
        "effect",
        "resolve: a step that happened is recorded, and the job goes on",
        "operate",
        "if p_happened and v_step is null then",
        "if p_happened then",
        DECIDED,
    ),
    guard(
        "effect",
        "resolve: a step that did not happen may start again",
        "effect_steps",
        TAKEN_AWAY,
        "  else\n    null;\n",
        DECIDED,
    ),
    guard(
        "effect",
        "reopening: what had happened is kept",
        "operate",
        "    perform {{schema}}.keep_effects(job_id, v_old.generation);\n",
        "    null;\n",
        STEPS + "test_a_reopened_job_keeps_what_had_happened_and_calls_anew_what_had_failed",
    ),
    guard(
        "effect",
        "reopening: what was undone is done anew",
        "operate",
        "if v_old.key_generation is not distinct from v_key then",
        "if true then",
        STEPS + "test_one_that_an_effect_has_undone_is_done_anew",
    ),
    guard(
        "effect",
        "hooks: a step is asked about by none but its own",
        "reconcile",
        "effect_started_at is not null then\n    return (select c.reconcile_steps",
        "effect_started_at is not null and false then\n    return (select c.reconcile_steps",
        HOOKS + "test_no_other_hook_is_asked_about_a_step_that_has_none",
    ),
    guard(
        "effect",
        "hooks: what has none is left alone",
        "reconcile",
        "       and {{schema}}.hook_of(j) is not null\n",
        "",
        HOOKS + "test_no_other_hook_is_asked_about_a_step_that_has_none",
    ),
    guard(
        "effect",
        "hooks: an answer decides nothing but what it names",
        "operate",
        "if p_bounded and p_step is distinct from v_step then",
        "if false then",
        HOOKS + "test_an_answer_decides_nothing_but_what_it_names",
    ),
    guard(
        "effect",
        "hooks: a step that happened has neither bound nor delay",
        "operate",
        "  p_bounded := p_bounded and not p_happened;\n",
        "",
        HOOKS + "test_what_did_not_happen_waits_and_is_bounded_and_what_happened_is_neither",
    ),
    guard(
        "effect",
        "hooks: that of a step is not switched off by an older worker",
        "enqueue",
        "w.status = 'live' and s.value = any(w.tasks)",
        "false",
        TAKEN,
    ),
    guard(
        "effect",
        "hooks: that of a step goes with the workers that have it",
        "enqueue",
        "where w.status = 'live' and s.value = any(w.tasks)",
        "where true",
        TAKEN,
    ),
)

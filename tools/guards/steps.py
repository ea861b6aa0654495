"""Guards of recorded steps."""

from __future__ import annotations

from guards import Guard, guard

STEPS, RACES = "test_steps.py::", "races/test_races_of_steps.py::"
FENCED = (
    "j.id = v_asked.job and j.claimed_by = v_asked.worker and j.claim_epoch = v_asked.epoch"
    " and j.status = 'running' for share;"
)
OF_ATTEMPT = "where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running'"
LEAVING = f"""{OF_ATTEMPT} for share;
  if not found then
    return 0;"""
SLEEPING = f"""{OF_ATTEMPT} for share;
  if not found then
    answer := 'fenced';"""
WAITING = f"""{OF_ATTEMPT} for no key update;
  if not found then
    return query select 'fenced'::text"""
TAKING = f"""{OF_ATTEMPT} for no key update;
  if not found then
    return 'fenced';"""
SIGNALS, SIGNALS_RACED = "test_signals.py::", "races/test_races_of_signals.py::"
RUNS_RACED = "races/test_races_of_run_signals.py::"
CHILDREN, CHILDREN_RACED = "test_children.py::", "races/test_races_of_children.py::"
STARTING = f"{OF_ATTEMPT} for no key update;"
INSTANT = SIGNALS + "test_the_instant_of_a_sleep_is_recorded_once_by_the_databases_clock"
REFUSED = SIGNALS + "test_a_refused_signal_is_given_to_nobody_and_says_why"
LOST = SIGNALS + "test_a_worker_that_is_lost_leaves_a_wait_to_the_next"
ORDERED = SIGNALS + "test_signals_are_given_in_order_each_once_and_to_one_wait"
MANY = STEPS + "test_steps_of_many_jobs_are_recorded_in_one_call_each_under_its_own_fence"
OVER = STEPS + "test_an_attempt_that_is_over_or_unknown_records_nothing"
LEFT = STEPS + "test_what_was_left_is_noted_under_the_fence_and_shown_once_the_attempt_has_succeeded"


def fenced(what: str, part: str, *tests: str) -> Guard:
    """The fence of a step without one of its parts."""
    return guard("4", f"step: {what}", "durable", FENCED, FENCED.replace(part, ""), *tests)


RECORDED: tuple[Guard, ...] = (
    fenced("by its worker", " and j.claimed_by = v_asked.worker", MANY),
    fenced("by its epoch", " and j.claim_epoch = v_asked.epoch", MANY),
    fenced("while it runs", " and j.status = 'running'", OVER),
    fenced(
        "decided on the locked row",
        " for share",
        RACES + "test_a_successor_finds_the_step_that_came_just_before_the_loss",
    ),
    guard(
        "step",
        "step: the record stands",
        "durable",
        "case when v_stands.value = v_asked.value then 'replay' else 'conflict' end",
        "'replay'",
        STEPS + "test_the_same_again_is_a_replay_another_value_a_conflict_and_neither_changes_anything",
    ),
    guard(
        "4", "steps left: by its worker", "durable", LEAVING, LEAVING.replace(" and j.claimed_by = p_worker", ""), LEFT
    ),
    guard(
        "4", "steps left: by its epoch", "durable", LEAVING, LEAVING.replace(" and j.claim_epoch = p_epoch", ""), LEFT
    ),
    guard(
        "4", "sleep: by its worker", "durable", SLEEPING, SLEEPING.replace(" and j.claimed_by = p_worker", ""), INSTANT
    ),
    guard(
        "4", "sleep: by its epoch", "durable", SLEEPING, SLEEPING.replace(" and j.claim_epoch = p_epoch", ""), INSTANT
    ),
    guard(
        "4",
        "wait: by its worker and epoch",
        "durable",
        WAITING,
        WAITING.replace(" and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running'", ""),
        LOST,
    ),
    guard("4", "taking: by its worker", "durable", TAKING, TAKING.replace(" and j.claimed_by = p_worker", ""), REFUSED),
    guard("4", "taking: by its epoch", "durable", TAKING, TAKING.replace(" and j.claim_epoch = p_epoch", ""), REFUSED),
    guard(
        "signal",
        "signal: taken once",
        "durable",
        "g.name = p_name and g.taken_at is null and g.refused_at is null\n     and exists",
        "g.name = p_name and g.refused_at is null\n     and exists",
        ORDERED,
    ),
    guard(
        "signal",
        "signal: to the wait of its name",
        "durable",
        " and g.name = p_name and g.taken_at is null and g.refused_at is null\n     and exists",
        " and g.taken_at is null and g.refused_at is null\n     and exists",
        ORDERED,
    ),
    guard(
        "signal",
        "signal: looked for by the suspension",
        "durable",
        "elsif exists (select from {{schema}}.signals g where g.job_id = p_job.id",
        "elsif false and exists (select from {{schema}}.signals g where g.job_id = p_job.id",
        SIGNALS_RACED + "test_a_suspension_that_waited_for_a_signal_leaves_the_job_due",
    ),
    guard(
        "signal",
        "signal: locks the job that it is for",
        "durable",
        "where j.id = job_id for no key update;",
        "where j.id = job_id;",
        SIGNALS_RACED + "test_a_signal_that_waited_for_a_suspension_wakes_the_job",
    ),
    guard(
        "signal",
        "signal: wakes what waits for it",
        "durable",
        "if v_job.status = 'held' and v_job.held_reason = 'signal' and exists (",
        "if false and exists (",
        SIGNALS + "test_a_signal_wakes_the_job_that_waits_for_it",
    ),
    guard(
        "signal",
        "signal: bounded for each job",
        "durable",
        "  perform {{schema}}.bound_signals(job_id, v_job.generation, null);\n",
        "",
        SIGNALS + "test_of_a_job_only_so_many_signals_wait",
        SIGNALS_RACED + "test_two_senders_at_the_bound_send_one",
    ),
    guard(
        "5",
        "suspension: not after a cancel request",
        "exchange",
        "o.outcome = 'suspend' and j.cancel_requested_at is null",
        "o.outcome = 'suspend'",
        SIGNALS + "test_after_a_cancel_request_a_suspension_ends_the_job",
    ),
    guard(
        "5",
        "suspension: not past the deadline",
        "durable",
        "if v_wake > p_job.deadline then",
        "if false then",
        SIGNALS + "test_a_sleep_past_the_deadline_ends_the_job_and_uses_no_attempt",
    ),
    guard(
        "signal",
        "sleep: ended by the retry of an operator",
        "operate",
        "perform {{schema}}.end_sleeps(v_job);",
        "",
        SIGNALS + "test_retry_ends_the_sleeps_of_a_job_and_of_no_other",
    ),
    guard(
        "signal",
        "signal to a run: under the root locks",
        "run_signals",
        "  perform {{schema}}.lock_trees('{}', array[run_id]);\n",
        "",
        RUNS_RACED + "test_a_signal_that_waited_for_a_suspension_is_given",
    ),
    guard(
        "signal",
        "signal to a run: kept ones are looked for by the suspension",
        "durable",
        "or p_job.run_id is not null and {{schema}}.signal_for_node",
        "or false and {{schema}}.signal_for_node",
        RUNS_RACED + "test_a_suspension_is_sent_again_while_somebody_sends_to_the_run_and_then_finds_the_signal",
    ),
    guard(
        "signal",
        "signal to a run: taken by one",
        "durable",
        "g.run_id = any(v_runs) and g.job_id is null and g.name = p_name",
        "g.run_id = any(v_runs) and g.name = p_name",
        RUNS_RACED + "test_two_nodes_that_take_what_is_kept_at_once_take_it_once",
    ),
    guard(
        "signal",
        "signal to a run: waits for the only one that waits",
        "run_signals",
        "order by j.id limit 1 for no key update;",
        "order by j.id limit 1 for no key update skip locked;",
        RUNS_RACED + "test_where_the_only_one_that_waits_is_woken_just_now_the_sender_waits_to_see",
    ),
    guard(
        "signal",
        "signal to a run: bounded",
        "run_signals",
        "  perform {{schema}}.bound_signals(null, null, run_id);\n",
        "",
        "test_run_signals.py::test_only_so_many_are_kept_for_a_run",
    ),
    guard(
        "signal",
        "signal to a run: given back",
        "leases",
        "  v_more := {{schema}}.return_signals(p_limit) > 0;\n",
        "",
        "test_run_signals.py::test_one_that_ends_without_taking_what_it_was_given_leaves_it_to_the_next",
    ),
    guard(
        "signal",
        "signal to a run: given back to run after run",
        "leases",
        "  if v_more then\n",
        "  if false then\n",
        "test_run_signals.py::test_the_sweep_says_that_there_may_be_more",
    ),
    guard(
        "child",
        "child: by its worker and epoch",
        "children",
        STARTING,
        STARTING.replace(" and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running'", ""),
        CHILDREN + "test_a_child_is_started_once_under_the_fence_in_one_transaction_with_its_record",
    ),
    guard(
        "child",
        "child: decided on the locked row",
        "children",
        STARTING,
        STARTING.replace(" for no key update", ""),
        CHILDREN_RACED + "test_a_start_that_waited_for_the_loss_of_its_claim_starts_nothing",
    ),
    guard(
        "child",
        "child: looked for by the suspension",
        "durable",
        "or v_child and {{schema}}.waits_for_ended",
        "or false and {{schema}}.waits_for_ended",
        CHILDREN_RACED + "test_a_suspension_that_waited_for_the_end_of_a_child_leaves_the_job_due",
    ),
    guard(
        "child",
        "child: its end wakes its parent",
        "children",
        "when (old.parent_job is not null) execute",
        "when (false) execute",
        CHILDREN + "test_a_parent_is_held_and_goes_on_with_the_end_of_its_child",
    ),
    guard(
        "child",
        "child: the end of a run wakes its parent",
        "run_ends",
        "    perform {{schema}}.tell_parent(v_run.started_by, null, p_run);\n",
        "    null;\n",
        CHILDREN + "test_a_run_is_waited_for_likewise",
    ),
    guard(
        "child",
        "child: its end waits for nobody",
        "children",
        "where j.id = p_parent for no key update skip locked;",
        "where j.id = p_parent for no key update nowait;",
        CHILDREN_RACED + "test_the_end_of_a_child_waits_for_no_suspension_and_the_sweep_looks",
    ),
    guard(
        "child",
        "child: a line for the sweep where its parent is taken",
        "children",
        "    insert into {{schema}}.child_rechecks (job_id, due_at) values (p_parent, {{schema}}.now());\n",
        "    null;\n",
        CHILDREN_RACED + "test_the_end_of_a_child_waits_for_no_sender_that_has_its_parent",
    ),
    guard(
        "child",
        "child: cancelled with its parent",
        "children",
        "when (new.status = 'cancelled' and new.claim_epoch > 0) execute",
        "when (false) execute",
        CHILDREN + "test_cancelling_a_parent_cancels_its_children_and_theirs",
    ),
    guard(
        "child",
        "child: one that somebody has is left to the sweep",
        "children",
        "    insert into {{schema}}.child_rechecks (job_id, due_at) values (p_job, {{schema}}.now());\n",
        "    null;\n",
        CHILDREN_RACED + "test_a_cancel_waits_for_none_that_has_a_child_and_the_sweep_cancels_it",
    ),
    guard(
        "child",
        "child: reopened, it has its parent again",
        "operate",
        "{{schema}}.child_reopened(job_id, null, v_old.status, v_old.error));",
        "null);",
        CHILDREN + "test_a_child_that_is_reopened_before_its_parent_has_looked_is_waited_for_again",
    ),
    guard(
        "child",
        "child: not in line behind its parent",
        "children",
        "if p_ordering_key is not null and exists (",
        "if false and exists (",
        CHILDREN + "test_a_child_cannot_stand_in_line_behind_who_waits_for_it",
    ),
    guard(
        "child",
        "child: not in line behind who waits for its run",
        "children",
        "    when p_job.run_id is not null then (select",
        "    when false then (select",
        CHILDREN + "test_a_child_of_a_run_below_cannot_stand_in_line_behind_who_waits_for_that_run",
    ),
    guard(
        "child",
        "child: cancelled with its parent though its outcome is unknown",
        "children",
        "      elsif v_job.cancel_requested_at is null then",
        "      elsif v_job.status = 'running' and v_job.cancel_requested_at is null then",
        CHILDREN + "test_a_child_whose_outcome_is_unknown_does_not_run_again_once_its_parent_was_cancelled",
    ),
    guard(
        "child",
        "child: reopened for its own sake once its parent is over",
        "children",
        "|| coalesce(p_error, '{}')\n    where s.job_id",
        "|| coalesce(p_error, '{}')\n    where false and s.job_id",
        CHILDREN + "test_a_child_that_is_reopened_after_its_parent_was_cancelled_is_on_its_own",
    ),
    guard(
        "child",
        "child: reopened while its parent is cancelled",
        "children",
        "    insert into {{schema}}.child_rechecks (job_id, due_at) values (v_step.job_id, {{schema}}.now());\n",
        "",
        CHILDREN_RACED + "test_a_child_that_is_reopened_while_its_parent_is_cancelled_is_cancelled_by_the_sweep",
    ),
    guard(
        "child",
        "child: a run of it is reopened for its own sake, too",
        "run_ends",
        "  if v_run.started_by is not null then\n    perform {{schema}}.child_reopened",
        "  if false then\n    perform {{schema}}.child_reopened",
        CHILDREN + "test_a_child_that_is_reopened_after_its_parent_was_cancelled_is_on_its_own",
    ),
)

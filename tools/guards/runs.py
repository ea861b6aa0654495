"""Guards of runs: who may run, what the edges decide, how runs end, and what is undone, refused and forgotten."""

from __future__ import annotations

from guards import Guard, guard, guards

RUNS, MORE, RACES = "test_runs.py::", "test_runs_guarded.py::", "races/test_races_of_runs.py::"
LARGE = "test_large_runs.py::"
NOT_LIVE = RUNS + "test_no_job_of_a_run_is_claimed_that_is_not_live"
NOT_ITS_OWN = MORE + "test_an_end_that_is_none_of_the_runs_changes_nothing_in_it"
NAMED = RUNS + "test_a_failure_blocks_what_waits_for_it_and_names_the_cause"
STOPPED = RUNS + "test_an_unhandled_failure_cancels_the_rest"
NOT_TAKEN = MORE + "test_an_arm_that_is_not_taken_comes_before_a_failure_whichever_ends_first"
ANOTHER = RUNS + "test_the_same_key_with_another_input_or_plan_is_refused"
KEPT = RUNS + "test_a_run_keeps_its_newest_receipts"
LAST_FIRST = RUNS + "test_compensations_run_one_by_one_the_last_first"
ON_RECORD = MORE + "test_what_became_of_an_attempt_is_on_the_record_of_its_run"
CANCELLED = RUNS + "test_cancelling_a_run_cancels_all_that_waits_in_one_transaction"
REMEMBERED = MORE + "test_what_a_run_promised_is_remembered_as_long_as_the_run"
GOES_ON = MORE + "test_what_a_run_that_goes_on_had_promised_is_not_reopened"
FORGOTTEN = MORE + "test_a_run_is_forgotten_once_it_is_old_and_all_that_it_promised_is_settled"
COUNTED = MORE + "test_a_run_that_counts_wrong_is_counted_anew"
DECIDED = (
    "case when v_seen.not_taken then 'skipped' when v_seen.arms_open then 'wait' when v_seen.blocks then 'blocked'\n"
    "    when v_seen.open > 0 then 'wait' when v_seen.skips then 'skipped' else 'ready' end;"
)


def run(what: str, old: str, new: str, *tests: str) -> Guard:
    """A guard in the migration of runs."""
    return guard("runs", what, "runs", old, new, *tests)


def ends(what: str, old: str, new: str, *tests: str) -> Guard:
    """A guard in the migration of how runs end."""
    return guard("runs", what, "run_ends", old, new, *tests)


def decides(what: str, part: str, instead: str, *tests: str) -> Guard:
    """What the edges decide, otherwise than it is."""
    return run(f"decide: {what}", DECIDED, DECIDED.replace(part, instead), *tests)


OF_RUNS: tuple[Guard, ...] = (
    run(
        "guard: the run is running",
        "if (v_run.status in ('running', 'recovering')) is not true and not (tg_op = 'INSERT' and v_run.status is not "
        "distinct from 'paused')\n     or ",
        "if ",
        NOT_LIVE,
    ),
    run(
        "guard: no cancel is asked for",
        "or (v_run.cancel_requested_at is not null or v_run.stop",
        "or (v_run.stop",
        NOT_LIVE,
    ),
    run("guard: it does not stop", " or v_run.stopping_at is not null)\n", ")\n", NOT_LIVE),
    run("guard: of its epoch", "     or new.run_epoch is distinct from v_run.run_epoch\n", "", NOT_LIVE),
    run(
        "guard: a job of a node that is ready",
        " and (n.run_id = new.run_id) is true and n.status = 'ready') then",
        ") then",
        MORE + "test_the_job_of_a_node_that_is_not_ready_is_not_made_while_its_run_goes_on",
    ),
    run(
        "guard: on every claim",
        "and old.status = 'pending' and new.status = 'running') execute function {{schema}}.guard_member()",
        "and false) execute function {{schema}}.guard_member()",
        NOT_LIVE,
    ),
    run(
        "guard: on every job",
        "  when (new.run_id is not null) execute function {{schema}}.guard_member();",
        "  when (false) execute function {{schema}}.guard_member();",
        RUNS + "test_a_node_is_not_reopened_behind_its_run",
    ),
    run(
        "a run keeps its plan",
        "  when (new.plan_hash <> old.plan_hash)\n",
        "  when (false)\n",
        RUNS + "test_a_plan_is_stored_once_and_never_changed",
    ),
    run(
        "receipts are append-only",
        "before update on {{schema}}.receipts for each row\n",
        "before update on {{schema}}.receipts for each row when (false)\n",
        KEPT,
    ),
    run("receipts are trimmed", "c.run_id = p_run and c.sequence <= v_last - v_keep;", "false;", KEPT),
    *(
        guard(
            "runs",
            f"{table} are immutable",
            "plans",
            f"before update or delete on {{{{schema}}}}.{table} for each row\n",
            f"before update or delete on {{{{schema}}}}.{table} for each row when (false)\n",
            RUNS + "test_a_plan_is_stored_once_and_never_changed",
        )
        for table in ("plans", "plan_nodes", "plan_edges")
    ),
    guard(
        "runs",
        "older workers are given no node",
        "plans",
        "greatest((n.node #>> '{job,required_worker_schema}')::int, 3)",
        "0",
        RUNS + "test_an_older_worker_is_given_no_node",
    ),
    guards(
        "runs",
        "edges lead forward",
        "plans",
        (
            ("and (e.edge ->> 'from')::int < (e.edge ->> 'to')::int\n", "\n"),
            ("n),\n  check (source < target)\n", "n)\n"),
        ),
        RUNS + "test_a_plan_that_cannot_run_is_refused",
    ),
    # Whose end counts.
    ends(
        "an end: of a run that goes on",
        "if v_run.finished_at is not null or v_run.run_epoch is distinct",
        "if v_run.run_epoch is distinct",
        NOT_ITS_OWN,
    ),
    ends("an end: of the run's epoch", " or v_run.run_epoch is distinct from new.run_epoch then", " then", NOT_ITS_OWN),
    guards(
        "runs",
        "an end: of a node that is ready",
        "run_ends",
        (
            (
                "where n.id = new.id and (n.run_id = new.run_id) is true and n.status = 'ready') then",
                "where true) then",
            ),
            (
                "and n.id = u.id and n.status = 'ready'",
                "and n.id = u.id",
            ),
        ),
        NOT_ITS_OWN,
    ),
    ends(
        "an end: of a job without an epoch",
        "and coalesce(h.run_epoch, v_run.run_epoch) = new.run_epoch",
        "and h.run_epoch = new.run_epoch",
        MORE + "test_cancelling_a_job_that_has_no_run_epoch_ends_its_node",
    ),
    ends("what is lost is on record", " or new.recoveries > old.recoveries)) execute", ")) execute", ON_RECORD),
    ends(
        "what is unknown is on record",
        "((new.status = 'unknown') <> (old.status = 'unknown') or ",
        "(",
        ON_RECORD,
    ),
    # What the edges decide.
    decides(
        "an arm that is not taken comes first",
        "when v_seen.not_taken then 'skipped' when v_seen.arms_open then 'wait' when v_seen.blocks then 'blocked'",
        "when v_seen.arms_open then 'wait' when v_seen.blocks then 'blocked' when v_seen.not_taken then 'skipped'",
        NOT_TAKEN,
    ),
    decides("an open arm comes before a failure", "when v_seen.arms_open then 'wait' ", "", NOT_TAKEN),
    decides(
        "a failure blocks at once",
        "when v_seen.blocks then 'blocked'\n    when v_seen.open > 0 then 'wait' ",
        "when v_seen.open > 0 then 'wait' when v_seen.blocks then 'blocked' ",
        MORE + "test_a_failure_blocks_at_once_while_others_run",
    ),
    decides(
        "what skips waits for what may block",
        "when v_seen.open > 0 then 'wait' when v_seen.skips then 'skipped'",
        "when v_seen.skips then 'skipped' when v_seen.open > 0 then 'wait'",
        MORE + "test_a_failure_that_blocks_comes_before_one_that_skips_whichever_ends_first",
    ),
    decides(
        "what blocks comes before what skips",
        "when v_seen.blocks then 'blocked'\n    when v_seen.open > 0 then 'wait' when v_seen.skips then 'skipped'",
        "when v_seen.open > 0 then 'wait' when v_seen.skips then 'skipped' when v_seen.blocks then 'blocked'",
        MORE + "test_a_failure_that_blocks_comes_before_one_that_skips_whichever_ends_first",
    ),
    run(
        "decide: a merge outlives an arm",
        "s.status = 'skipped' and not e.merge and",
        "s.status = 'skipped' and",
        RUNS + "test_only_the_arm_that_was_chosen_runs",
    ),
    run(
        "decide: a collector outlives what is skipped",
        "and not e.merge and e.policy <> 'collect'), false)",
        "and not e.merge), false)",
        MORE + "test_a_collector_runs_although_a_source_was_skipped",
    ),
    run(
        "decide: the node that caused it",
        "when 'blocked' then s.blocked_by when 'failed' then s.ix",
        "when 'blocked' then s.ix when 'failed' then s.ix",
        NAMED,
    ),
    run(
        "decide: the first of the causes",
        "min(case when e.policy = 'fail'",
        "max(case when e.policy = 'fail'",
        MORE + "test_the_first_of_several_that_failed_is_named",
    ),
    run(
        "advance: looks at what a failure may decide early",
        "and (t.unmet = 0 or v_look ? t.ix::text)",
        "and t.unmet = 0",
        MORE + "test_a_failure_blocks_at_once_while_others_run",
    ),
    run(
        "advance: goes on from what it closed",
        "      v_front := v_next;\n",
        "      v_front := '{}';\n",
        NAMED,
    ),
    run(
        "advance: each edge that was met counts",
        "set unmet = t.unmet - (v_met ->> t.ix::text)::int",
        "set unmet = t.unmet - 1",
        "test_runs_by_stage.py::test_two_parents_that_end_in_one_statement_count_as_two",
        "test_runs_by_stage.py::test_two_parents_that_are_skipped_in_one_statement_count_as_two",
    ),
    run(
        "advance: so many jobs in one transaction",
        "select greatest(case when p_run.generation = 0 then 1000 else 200 end\n",
        "select greatest(1000000\n",
        LARGE + "test_an_end_gives_jobs_to_so_many_by_number_and_leaves_the_rest_due",
    ),
    run(
        "advance: the leader is told of what is left",
        "perform pg_notify('{{schema}}_due', p_run.id::text);",
        "null;",
        LARGE + "test_an_end_gives_jobs_to_so_many_by_number_and_leaves_the_rest_due",
    ),
    run(
        "advance: takes up what is due",
        "where n.run_id = p_run.id and n.due order by n.ix limit",
        "where n.run_id = p_run.id and false order by n.ix limit",
        LARGE + "test_the_next_end_of_the_run_goes_on_with_what_is_due",
    ),
    run(
        "made alone after one of them was refused",
        "    if cardinality(p_nodes) = 1 then\n",
        "    if true then\n",
        LARGE + "test_one_that_cannot_be_made_fails_alone_and_the_others_of_its_portion_are_made",
    ),
    guard(
        "runs",
        "carried on: busy runs hide none",
        "run_views",
        "    continue when not found or {{schema}}.room_for_items(v_run)",
        "    exit when not found or {{schema}}.room_for_items(v_run)",
        LARGE + "test_a_run_that_others_are_at_is_passed_over_and_hides_none",
    ),
    guard(
        "runs",
        "healed: one that is refused hides none",
        "run_views",
        "      answer := {{schema}}.heal_run(run_id);\n    exception when others then\n",
        "      answer := {{schema}}.heal_run(run_id);\n    exception when null_value_not_allowed then\n",
        LARGE + "test_a_run_that_cannot_be_healed_keeps_none_behind_it_from_it",
    ),
    *(
        guard(
            "runs",
            f"{what}: looked at again without the runs that others are at",
            "leases",
            f"    exit when v_n >= p_limit or cardinality(v_busy) = v_known;\n  end loop;\n{then}",
            f"    exit;\n  end loop;\n{then}",
            LARGE + "test_jobs_of_busy_runs_do_not_hide_those_behind_them",
        )
        for what, then in (
            ("lost", "end $$;\ncomment on function {{schema}}.settle_lost"),
            ("spent", "  if v_more then\n"),
            ("overdue", "  v_n := 0;"),
        )
    ),
    ends(
        "undone: a broken one hides none",
        "    for v_node in select * from {{schema}}.undone(p_run, v_undone) loop\n      perform",
        "    for v_node in select * from {{schema}}.undone(p_run, '{}') loop\n      perform",
        LARGE + "test_a_compensation_that_is_broken_is_on_record_and_the_others_are_made",
    ),
    run(
        "what cannot be made fails its node alone",
        "if not {{schema}}.is_broken(sqlstate) then",
        "if true then",
        RUNS + "test_a_node_whose_job_cannot_be_made_fails_and_its_predecessor_stands",
    ),
    # What makes a run fail, and what is done then.
    ends(
        "unhandled: an edge that only blocks deals with nothing",
        "and e.source = n.ix and e.policy <> 'fail' limit 1) is null)",
        "and e.source = n.ix limit 1) is null)",
        MORE + "test_a_failure_that_only_blocks_is_not_dealt_with_by_who_collects_the_blocked_one",
    ),
    ends(
        "unhandled: what is blocked",
        "where n.run_id = p_run.id and n.status in ('failed', 'cancelled', 'blocked')",
        "where n.run_id = p_run.id and n.status in ('failed', 'cancelled')",
        MORE + "test_a_blocked_node_that_nobody_deals_with_fails_its_run",
    ),
    ends(
        "unhandled: what was cancelled",
        "where n.run_id = p_run.id and n.status in ('failed', 'cancelled', 'blocked')",
        "where n.run_id = p_run.id and n.status in ('failed', 'blocked')",
        MORE + "test_a_cancelled_node_that_nobody_deals_with_fails_its_run",
    ),
    ends(
        "stop: a failure stops the rest",
        "if p_failed and v_run.finished_at",
        "if false and v_run.finished_at",
        STOPPED,
    ),
    ends(
        "stop: only one that nothing handles",
        " = 'cancel' and {{schema}}.has_unhandled(v_run) then",
        " = 'cancel' then",
        RUNS + "test_a_collecting_successor_gets_typed_outcomes",
    ),
    ends(
        "stop: only where the plan says so",
        "where p.hash = v_run.plan_hash) = 'cancel' and",
        "where p.hash = v_run.plan_hash) <> '' and",
        RUNS + "test_the_rest_of_a_run_that_is_to_finish_goes_on",
    ),
    ends(
        "stop: what runs is asked to",
        "set cancel_requested_at = coalesce(j.cancel_requested_at, {{schema}}.now()) where j.id = any(v_ids)\n",
        "set cancel_requested_at = j.cancel_requested_at where j.id = any(v_ids)\n",
        STOPPED,
    ),
    ends(
        "a run ends once nothing is open",
        "if v_run.open_nodes = 0 and v_run.finished_at is null",
        "if v_run.finished_at is null",
        RUNS + "test_a_chain_runs_in_order_and_hands_its_results_on",
    ),
    ends(
        "a run that was cancelled",
        "when v_run.cancel_requested_at is not null and ((v_run.wanted",
        "when false and ((v_run.wanted",
        CANCELLED,
    ),
    ends(
        "a run that was cancelled too late",
        "exists (select from {{schema}}.nodes n where n.run_id = p_run and n.status = 'cancelled')) then 'cancelled'",
        "true) then 'cancelled'",
        RUNS + "test_a_run_that_was_cancelled_too_late_has_succeeded",
    ),
    # Admission.
    ends(
        "a key: of one plan",
        "if v_run.plan_hash <> p_plan or v_run.input <> p_input then",
        "if v_run.input <> p_input then",
        ANOTHER,
    ),
    ends(
        "a key: of one input",
        "if v_run.plan_hash <> p_plan or v_run.input <> p_input then",
        "if v_run.plan_hash <> p_plan then",
        ANOTHER,
    ),
    ends(
        "a key: of one run",
        "on conflict (workflow, run_key) where run_key is not null do nothing returning",
        "returning",
        RACES + "test_two_admissions_under_one_key_are_one_run",
        RUNS + "test_the_same_key_plan_and_input_are_the_same_run",
    ),
    # Reopening.
    ends(
        "reopening: only what has failed or was cancelled",
        "if p_run.status not in ('failed', 'cancelled') then",
        "if false then",
        RUNS + "test_only_a_failed_or_cancelled_run_is_retried",
    ),
    ends(
        "reopening: once all is settled",
        "if v_open is not null then",
        "if false then",
        MORE + "test_a_run_is_not_reopened_before_its_effects_and_compensations_are_settled",
    ),
    ends(
        "reopening: effects of its nodes",
        "or not e.settled and e.owner_job_id in (",
        "or false and e.owner_job_id in (",
        RUNS + "test_a_run_whose_node_has_an_effect_that_is_not_settled_is_not_reopened",
    ),
    ends(
        "reopening: nothing that was undone",
        "e.id = any(v_intents) and (not e.settled or e.settled_how = 'succeeded')",
        "e.id = any(v_intents) and not e.settled",
        MORE + "test_a_run_whose_work_was_undone_is_not_reopened",
    ),
    ends(
        "reopening: under the next epoch",
        "run_epoch = r.run_epoch + 1, generation",
        "generation",
        RUNS + "test_retrying_a_run_goes_on_where_it_failed",
    ),
    ends(
        "reopening: not what was dealt with",
        "where e.plan_hash = p_run.plan_hash and e.source = p_ix and t.status = 'succeeded')",
        "where false)",
        MORE + "test_a_failure_that_was_dealt_with_is_not_run_again",
    ),
    guard(
        "runs",
        "no effect of a run that goes on",
        "effects",
        "where r.id = v_own.owner_job_id and r.generation <> v_own.generation)",
        "where false)",
        GOES_ON,
    ),
    guard(
        "runs",
        "no compensation of a run that goes on",
        "effects",
        "and split_part(v_own.name, ':', 2) <> r.generation::text)) then",
        "and false)) then",
        GOES_ON,
    ),
    # Compensation.
    ends(
        "undone: last first",
        "order by u.finished_at desc, u.ix desc, u.item desc);",
        "order by u.finished_at, u.ix, u.item);",
        LAST_FIRST,
    ),
    ends(
        "undone: one after another",
        "v_line text := 'run:' || p_run.id;",
        "v_line text;",
        LAST_FIRST,
    ),
    ends(
        "undone: once for each end",
        "v_prefix text := format('compensate:%s:', p_run.generation);",
        "v_prefix text := 'compensate:0:';",
        MORE + "test_each_end_of_a_run_promises_anew_once_the_last_promises_are_settled",
    ),
    ends(
        "undone: not what has succeeded as a whole",
        "if v_status <> 'succeeded' then\n    perform {{schema}}.compensate",
        "if true then\n    perform {{schema}}.compensate",
        RUNS + "test_a_run_that_succeeds_is_not_compensated",
    ),
    ends(
        "undone: only what has succeeded",
        "p_run.items is null and n.status = 'succeeded' and k.compensate is not null\n",
        "p_run.items is null and k.compensate is not null\n",
        MORE + "test_only_what_succeeded_is_undone",
    ),
    # Forgetting and healing.
    guard(
        "runs",
        "forgotten once it is old",
        "run_views",
        "and r.finished_at < v_before\n",
        "\n",
        FORGOTTEN,
    ),
    guard(
        "runs",
        "forgotten once its effects are settled",
        "run_views",
        "       and (select e.id from {{schema}}.effects e where e.owner_job_id = r.id"
        " and not e.settled limit 1) is null\n",
        "",
        FORGOTTEN,
    ),
    guard(
        "runs",
        "forgotten once its compensations are settled",
        "run_views",
        "where n.run_id = r.id and (select e.id",
        "where false and (select e.id",
        FORGOTTEN,
    ),
    *(
        guard(
            "runs",
            f"an intent outlives its {what}",
            "effects",
            f"       and not exists (select from {{{{schema}}}}.{table} {row} where {row}.id = i.owner_job_id)\n",
            "",
            REMEMBERED,
        )
        for what, table, row in (("run", "runs", "r"), ("node", "nodes", "n"))
    ),
    guard(
        "runs",
        "healing looks at the count",
        "run_views",
        " and v_run.open_nodes = v_open and",
        " and",
        COUNTED,
    ),
    guard(
        "runs",
        "healing leaves what has ended",
        "run_views",
        "where r.id = p_run and r.finished_at is null for update skip locked;",
        "where r.id = p_run for update skip locked;",
        COUNTED,
    ),
)

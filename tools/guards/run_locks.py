"""Guards of runs: who locks a run before its jobs, and what verify finds where rows were forged."""

from __future__ import annotations

from guards import Guard, guard, guards

RACES = "races/test_races_of_runs.py::"
FORGED = "test_run_invariants.py::test_a_forged_run_is_reported"
CHILDREN = "races/test_races_of_child_runs.py::"
SWEPT = RACES + "test_what_the_sweep_would_end_of_a_busy_run_is_left_to_the_next_round"
BUSY = RACES + "test_ends_of_a_busy_run_are_sent_again_and_hold_up_no_other"
FREE = (
    "      if not {{schema}}.run_is_free(v_found.run_id) then\n"
    "        v_busy := v_busy || v_found.run_id;\n        continue;\n      end if;\n"
)
AGAIN = "      p_skip := p_skip || v_found.id;\n      select j.* into v_job from {{schema}}.jobs j"
TAKEN = FREE + AGAIN + " where j.id = v_found.id and %s"
LOCK = "  perform {{schema}}.lock_run_of(%s);\n"


def locks(what: str, file: str, old: str, new: str, *tests: str) -> Guard:
    """A guard of the order in which rows are locked."""
    return guard("race", f"root lock: {what}", file, old, new, *tests)


def free(why: str, where: str) -> Guard:
    """What the sweep ends, without leaving it to whoever is at its run."""
    old = TAKEN % where
    return locks(f"swept, {why}", "leases", old, old.removeprefix(FREE), SWEPT)


AROUND_RUNS: tuple[Guard, ...] = (
    # Who has the run before a job of it.
    locks("ends of a busy run are sent again", "exchange", "if v_busy <> '{}' then", "if false then", BUSY),
    locks("ends wait for no run", "runs", "order by r.id for update skip locked);", "order by r.id for update);", BUSY),
    locks(
        "lost",
        "leases",
        FREE + AGAIN + "\n",
        AGAIN + "\n",
        RACES + "test_what_was_lost_of_a_busy_run_is_left_to_the_next_round",
    ),
    free("DeadlineExceeded", "j.status in ('pending', 'held') and j.deadline"),
    free("AttemptsExhausted", "j.status = 'pending' and j.attempt"),
    locks(
        "who has a job waits for no run",
        "runs",
        "where r.id = p_run for update skip locked;",
        "where r.id = p_run for update;",
        SWEPT,
    ),
    *(
        locks(what, file, before + LOCK % job, before, RACES + test)
        for what, file, before, job, test in (
            (
                "cancel",
                "operate",
                "  v_answer text;\nbegin\n  perform {{schema}}.ensure_today();\n",
                "job_id",
                "test_a_cancel_takes_the_run_before_the_job",
            ),
            (
                "retry",
                "operate",
                "  v_holder uuid;\nbegin\n  perform {{schema}}.ensure_today();\n",
                "job_id",
                "test_a_retry_takes_the_run_before_the_job",
            ),
            ("decide", "operate", "", "p_job", "test_a_decision_takes_the_run_before_the_job"),
            (
                "end inside",
                "checkpoints",
                "",
                "p_job",
                "test_an_end_inside_of_a_transaction_takes_the_run_before_the_job",
            ),
        )
    ),
    locks(
        "a batch",
        "operate",
        "    perform {{schema}}.lock_trees(job_ids);\n",
        "    null;\n",
        RACES + "test_a_batch_takes_its_runs_before_its_jobs",
    ),
    # Children.
    locks(
        "by depth",
        "runs",
        "where r.id = any(v_single || v_tree) and r.depth = v_depth order by r.id for update);",
        "where r.id = any(v_single || v_tree) order by r.id for update);",
        CHILDREN + "test_runs_are_taken_by_depth_before_they_are_by_id",
    ),
    locks(
        "a cancelled run's children",
        "run_ends",
        "  perform {{schema}}.lock_trees('{}', array[run_id]);\n",
        "",
        CHILDREN + "test_a_cancel_takes_parent_and_child_before_any_job",
    ),
    locks(
        "a reopened run's children",
        "run_ends",
        "  perform {{schema}}.lock_trees('{}', array[run_id], true);\n",
        "",
        CHILDREN + "test_a_retry_waits_for_who_is_at_a_child",
    ),
    locks(
        "a failure waits for no child",
        "run_ends",
        "and c.finished_at is null order by c.id for update skip locked) loop",
        "and c.finished_at is null order by c.id for update) loop",
        CHILDREN + "test_a_child_that_somebody_was_at_is_stopped_a_moment_later",
    ),
    *(
        guard("runs", f"children: {what}", file, old, new, "test_child_runs.py::" + test)
        for what, file, old, new, test in (
            (
                "an end releases the job that waits",
                "run_ends",
                "  if v_run.parent_node is not null then\n    perform",
                "  if false then\n    perform",
                "test_a_child_starts_with_its_node_and_its_end_goes_through_the_job_that_waits",
            ),
            (
                "a success is not cancelled over",
                "run_ends",
                "and (c.finished_at is null or c.status = 'succeeded') limit 1) is null);",
                "and c.finished_at is null limit 1) is null);",
                "test_a_child_that_has_succeeded_is_not_cancelled_over",
            ),
            (
                "a success was not cancelled",
                "runs",
                "cancel_requested_at = case when p_child.status = 'succeeded' then null when",
                "cancel_requested_at = case when",
                "test_a_cancelled_parent_waits_for_what_its_child_runs",
            ),
            (
                "a cancelled parent hears of its child",
                "runs",
                "exists (select from {{schema}}.runs c where c.parent_node = new.id))\n",
                "false)\n",
                "test_a_cancelled_parent_waits_for_what_its_child_runs",
            ),
            (
                "not retried alone",
                "run_ends",
                "  elsif v_run.parent_run is not null then\n",
                "  elsif false then\n",
                "test_a_child_is_not_retried_without_its_parent",
            ),
            (
                "a refusal to reopen is told",
                "run_ends",
                "    perform {{schema}}.may_reopen(v_child);\n",
                "    null;\n",
                "test_a_parent_whose_child_has_undone_its_work_is_not_retried",
            ),
            (
                "parents are forgotten first",
                "run_views",
                "and (r.parent_run is null or not exists (select from {{schema}}.runs p where p.id = r.parent_run))",
                "and true",
                "test_parents_are_forgotten_before_their_children",
            ),
        )
    ),
    guards(
        "race",
        "root lock: reopening locks the compensations",
        "run_ends",
        (
            (
                "  perform from unnest(v_intents) u(id) cross join lateral"
                " (select from {{schema}}.effect_intents i where i.id = u.id limit 1 for update) l;\n"
                "  update {{schema}}.effect_intents i set created_at = i.created_at where i.id = any(v_intents);\n",
                "",
            ),
        ),
        RACES + "test_a_run_and_its_cancelled_compensation_are_not_both_reopened",
    ),
    # What verify finds.
    *(
        guard("runs", f"verify: {code}", "run_views", old, new, FORGED)
        for code, old, new in (
            *(
                (code, f"(9, '{code}', {condition}", f"(9, '{code}', false")
                for code, condition in (
                    ("run_plan_missing", "p.hash is null"),
                    ("run_plan_differs", "p.hash <> {{schema}}.plan_hash(p.text)"),
                    ("run_nodes_differ", "n.items is null and n.nodes <> p.nodes"),
                    (
                        "map_differs",
                        "n.counted_from is null and p.loop is null and (n.items is null) <> (p.map is null)",
                    ),
                    (
                        "map_nodes_differ",
                        "n.items is not null and (n.nodes <> n.written + coalesce(n.pages, 0) or n.strange > 0)",
                    ),
                    ("map_active_differs", "n.items is not null and n.active <> n.ready"),
                    (
                        "map_stands_still",
                        "n.items is not null and n.run_finished_at is null and n.wanted > n.written and n.due = 0",
                    ),
                    ("run_open_nodes_differ", "n.open_nodes <> n.open"),
                    ("run_ended_with_open_nodes", "n.run_finished_at is not null and n.open > 0"),
                    ("run_stands_still", "n.run_finished_at is null and n.open = 0"),
                    ("receipts_first_differs", "coalesce(c.wrong_first, false)"),
                )
            ),
            ("receipts_missing, how many", " or c.have <> least(n.sequence, n.receipts) or", " or"),
            ("receipts_missing, the last", " or c.high <> n.sequence or c.low <> n.sequence - c.have + 1,", ","),
            ("receipts_reordered", "and (b.at < a.at - interval '1 minute'\n", "and (false\n"),
            (
                "receipts_reordered, by their seals",
                "and a.seal is distinct from {{schema}}.receipt_seal(",
                "and false and a.seal is distinct from {{schema}}.receipt_seal(",
            ),
            (
                "receipt_of_no_run",
                "where scope = 'all' and not exists (select from {{schema}}.runs r where r.id = c.run_id);",
                "where false;",
            ),
            (
                "child_run_missing",
                "from {{schema}}.jobs j where j.status = 'held' and j.held_reason = 'run'\n",
                "from {{schema}}.jobs j where false\n",
            ),
            ("child_not_waited_for", "and j.held_reason is distinct from 'run';", "and false;"),
            ("child_outlives_node", "and c.finished_at is null and n.status <> 'ready';", "and false;"),
            (
                "child_of_no_node",
                "not exists (select from {{schema}}.nodes n where n.id = c.parent_node and n.run_id = c.parent_run);",
                "false;",
            ),
            ("child_differs, its plan", "and (k.child is distinct from c.plan_hash or n.status", "and (n.status"),
            (
                "child_differs, its end",
                " or n.status = 'succeeded' and c.status <> 'succeeded' and c.finished_at is not null);",
                ");",
            ),
            (
                "node_job_missing",
                "where r.finished_at is null and n.status = 'ready' and (select j.id",
                "where false and (select j.id",
            ),
            ("node_job_not_ready", "where j.run_id is not null and n.status is distinct from 'ready';", "where false;"),
            (
                "node_before_its_sources, open",
                "(s.status in ('waiting', 'ready') or e.policy = 'fail' and",
                "(e.policy = 'fail' and",
            ),
            (
                "node_before_its_sources, failed",
                " or e.policy = 'fail' and s.status in ('failed', 'cancelled', 'blocked'));",
                ");",
            ),
            ("node_waits_for_nothing, its count", "and (n.unmet <> (select count(*)", "and (0 > (select count(*)"),
            (
                "node_waits_for_nothing, none",
                "s.status in ('waiting', 'ready')) or (n.unmet = 0) <> n.due);",
                "s.status in ('waiting', 'ready')));",
            ),
            ("run_plan_rows_differ, nodes", "where d.nodes > 0 or d.edges > 0;", "where d.edges > 0;"),
            ("run_plan_rows_differ, edges", "where d.nodes > 0 or d.edges > 0;", "where d.nodes > 0;"),
            (
                "run_effect_not_promised",
                "and f.spec -> 'on' ? r.status\n",
                "and false\n",
            ),
            (
                "run_effect_not_promised, of this end",
                "where i.owner_job_id = r.id and i.generation = r.generation and i.name = f.name);",
                "where i.owner_job_id = r.id and i.name = f.name);",
            ),
            (
                "compensation_not_promised",
                "where r.status in ('failed', 'cancelled') and r.items is null and n.status = 'succeeded'",
                "where false",
            ),
            (
                "compensation_not_promised, of this end",
                "and i.name like 'compensate:' || r.generation || ':%');",
                "and i.name like 'compensate:%');",
            ),
        )
    ),
)

"""Guards of work budgets: what counts, what waits, and who is told."""

from __future__ import annotations

from guards import Guard, guard

BUDGETS = "test_work_budgets.py::"
RACES = "races/test_races_of_work_budgets.py::"


def budgets(what: str, old: str, new: str, test: str, file: str = "work_budgets") -> Guard:
    """A guard with one test of work budgets, or of their races."""
    return guard("work_budgets", what, file, old, new, test if "/" in test else BUDGETS + test)


OF_WORK_BUDGETS: tuple[Guard, ...] = (
    budgets(
        "no more begin than are left",
        "v_left := greatest(least(v_left, p_n), 0);",
        "v_left := p_n;",
        "test_what_is_ready_once_the_budget_is_spent_waits_until_more_is_allowed",
    ),
    budgets(
        "who holds jobs does not wait for the budget",
        "where b.run_id = p_run.budget_of for update skip locked;\n  if not found then\n    -- Somebody",
        "where b.run_id = p_run.budget_of for update;\n  if not found then\n    -- Somebody",
        RACES + "test_two_runs_of_a_tree_that_go_on_at_once_begin_no_more_than_they_may",
    ),
    budgets(
        "who finds the budget taken tells the leader",
        "    perform pg_notify('{{schema}}_due', p_run.id::text);\n    return 0;",
        "    return 0;",
        RACES + "test_a_map_that_finds_the_budget_taken_is_tried_again_by_the_leader",
    ),
    budgets(
        "the leader does not turn round for a budget that is spent, or taken",
        "      continue when not found;\n    end if;\n    continue when not exists",
        "    end if;\n    continue when not exists",
        RACES + "test_what_finds_the_budget_taken_is_tried_again_by_the_leader",
        "run_views",
    ),
    budgets(
        "a raise waits for who has found it spent",
        "select * into v_old from {{schema}}.work_budgets b where b.run_id = run_id for update;",
        "select * into v_old from {{schema}}.work_budgets b where b.run_id = run_id for update skip locked;",
        RACES + "test_more_that_is_allowed_while_an_end_finds_nothing_left_reaches_what_waits",
    ),
    budgets(
        "a raise tells the leader",
        "  perform pg_notify('{{schema}}_due', run_id::text);\n",
        "",
        RACES + "test_more_that_is_allowed_while_an_end_finds_nothing_left_reaches_what_waits",
    ),
    budgets(
        "one that is set to what it is tells the leader, too",
        "  end if;\n  -- Whatever can be seen from here",
        "  elsif v_old.budget = budget then\n    return 'already';\n  end if;\n  -- Whatever can be seen from here",
        RACES + "test_a_budget_that_is_set_to_what_it_is_tells_whom_it_kept_from_it",
    ),
    budgets(
        "a page that waited for its budget does not wait for the turn of an item",
        "(v_run.pages is null or not exists (",
        "(true or not exists (",
        "test_a_page_that_waited_for_its_budget_is_asked_for_while_items_fill_at_once",
        "run_views",
    ),
    budgets(
        "what could not be made is given back",
        "set begun = b.begun - p_n where",
        "set begun = b.begun where",
        "test_what_cannot_be_given_a_job_does_not_count",
    ),
    budgets(
        "a child run brings its budget with it",
        "set budget = b.budget + p_budget where",
        "set budget = b.budget where",
        "test_a_child_run_that_declares_a_budget_brings_it_with_it",
    ),
)

"""Guards of loops and forks: when another round begins, what time counts, what is run again, and what verify finds."""

from __future__ import annotations

from guards import Guard, guard, guards

LOOPS = "test_loops.py::"
FORGED = "test_run_invariants.py::test_a_forged_run_is_reported"
AT_ONCE = "test_time_that_is_held_twice_at_once_counts_once"
HELD = "test_time_in_which_a_round_was_held_for_a_signal_does_not_count"
RETRIED = "test_retrying_a_loop_that_was_exhausted_counts_its_bounds_anew"


def loops(what: str, old: str, new: str, test: str, file: str = "loops") -> Guard:
    """A guard with one test."""
    return guard("loops", what, file, old, new, LOOPS + test)


OF_LOOPS: tuple[Guard, ...] = (
    guard(
        "forks",
        "an arm is taken whose value is in the list",
        "runs",
        "e(value) where e.value = p_arm -> 'has')\n",
        "e(value))\n",
        "test_forks.py::test_those_arms_run_whose_value_is_in_the_list",
    ),
    guard(
        "forks",
        "those that were not taken are left out",
        "runs",
        "               where {{schema}}.arm_taken(v_value, jsonb_build_object('has', a.arm -> 0))) t) end;\n",
        "               ) t) end;\n",
        "test_forks.py::test_those_arms_run_whose_value_is_in_the_list",
    ),
    guard(
        "forks",
        "those that have no value are left out",
        "runs",
        "coalesce(jsonb_object_agg(t.key, t.value) filter (where t.value is not null), '{}')",
        "coalesce(jsonb_object_agg(t.key, t.value), '{}')",
        "test_forks.py::test_an_arm_that_was_skipped_further_in_is_left_out",
    ),
    loops(
        "one that is done ends",
        "    when {{schema}}.loop_done(v_loop, v_last.result) then 'done'\n",
        "",
        "test_each_round_takes_what_the_one_before_gave_until_one_is_the_end",
    ),
    loops(
        "no more rounds than declared",
        "    when p_run.written >= p_run.items then 'rounds'\n",
        "",
        "test_a_loop_whose_rounds_are_used_up_fails_and_says_so",
    ),
    loops(
        "no round once the time is up",
        "::double precision) then 'time'\n",
        "::double precision) then 'again'\n",
        "test_no_round_begins_once_the_time_is_up",
    ),
    loops(
        "what the last round was held does not count",
        " - {{schema}}.held_in_round(p_run.id, v_last.ix, p_run.counted_from)\n",
        "\n",
        HELD,
    ),
    loops(
        "what rounds before were held does not count",
        "held = r.held + {{schema}}.held_in_round(p_run, v_run.written - 1, r.counted_from) where",
        "held = r.held where",
        HELD,
    ),
    loops(
        "held at once counts once",
        "unnest(range_agg(tstzrange(greatest(h.since, p_from), h.until))) as held",
        "tstzrange(greatest(h.since, p_from), h.until) as held",
        AT_ONCE,
    ),
    loops(
        "a job that is gone is not held",
        "old.held_reason = 'signal') execute function",
        "false) execute function",
        AT_ONCE,
    ),
    guards(
        "loops",
        "held before a retry counts no more",
        "loops",
        (
            ("tstzrange(greatest(h.since, p_from), h.until)", "tstzrange(h.since, h.until)"),
            ("where h.until > greatest(h.since, p_from)) u", "where h.until > h.since) u"),
        ),
        LOOPS + "test_what_the_round_that_is_retried_had_waited_before_does_not_count_again",
    ),
    loops(
        "no record without a bound on time",
        "and (select p.loop ? 'within' from {{schema}}.plans p where p.hash = a.plan_hash)\n",
        "\n",
        "test_a_loop_without_a_bound_on_time_keeps_no_record_of_it",
    ),
    loops(
        "cancelled: no round follows",
        "if v_run.cancel_requested_at is null and v_run.stopping_at is null and",
        "if",
        "test_a_round_that_returns_while_its_run_is_cancelled_is_followed_by_none",
    ),
    loops(
        "cancelled: one that is done has succeeded",
        "and v_word is distinct from 'done' or exists",
        "or exists",
        "test_a_round_that_is_the_end_while_its_run_is_cancelled_has_ended_the_loop",
        "run_ends",
    ),
    loops(
        "exhausted: it fails",
        "    if v_word <> 'done' and v_plan.\"loop\" ->> 'exhausted' = 'fail' then\n",
        "    if false then\n",
        "test_a_loop_whose_rounds_are_used_up_fails_and_says_so",
        "run_ends",
    ),
    loops(
        "exhausted: it gives its state where that was declared",
        "    if v_word <> 'done' and v_plan.\"loop\" ->> 'exhausted' = 'fail' then\n",
        "    if v_word <> 'done' then\n",
        "test_a_loop_that_is_to_gives_the_last_state_once_its_rounds_are_used_up",
        "run_ends",
    ),
    loops(
        "retried: rounds are counted anew", "items = v_stand + (v_loop ->> 'most')::int,", "items = r.items,", RETRIED
    ),
    loops(
        "retried: time is counted anew",
        "counted_from = {{schema}}.now(), held = '0', active = 0,",
        "active = 0,",
        RETRIED,
    ),
    loops(
        "retried: from the same start",
        "  if v_stand > 0 and (select",
        "  if false and (select",
        "test_another_start_is_refused_once_a_round_has_gone_on_from_the_first",
    ),
    loops(
        "retried: from the new start where no round stands",
        "item = case when n.ix = 0 then v_start else n.item end\n",
        "item = n.item\n",
        "test_another_start_is_taken_as_long_as_no_round_has_gone_on_from_the_first",
    ),
    loops(
        "what is forgotten is so whole",
        "  delete from {{schema}}.loop_holds h where h.run_id = any(v_runs);\n",
        "",
        "test_a_loop_is_forgotten_whole",
        "run_views",
    ),
    *(
        guard("loops", f"verify: {code}", "run_views", old, new, FORGED)
        for code, old, new in (
            (
                "loop_differs",
                "(9, 'loop_differs', (n.counted_from is null) <> (p.loop is null)",
                "(9, 'loop_differs', false",
            ),
            ("loop_round_differs", "and n.item is distinct from b.result;", "and false;"),
            (
                "loop_round_out_of_turn, failed",
                "and (b.status <> 'succeeded' or {{schema}}.loop_done(",
                "and ({{schema}}.loop_done(",
            ),
            ("loop_round_out_of_turn, the end", "or {{schema}}.loop_done(p.loop, b.result));", ");"),
            ("loop_result_differs, its state", "and (n.result is distinct from r.result or p.loop", "and (p.loop"),
            (
                "loop_result_differs, its end",
                " or p.loop ->> 'exhausted' = 'fail' and not {{schema}}.loop_done(p.loop, n.result));",
                ");",
            ),
        )
    ),
)

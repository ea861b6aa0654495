"""Guards of pauses: what holds the jobs of a paused run, what lets them go, what time counts, and what verify finds."""

from __future__ import annotations

from guards import Guard, guard

PAUSES = "test_pauses.py::"
RACES = "races/test_races_of_pauses.py::"
FORGED = "test_run_invariants.py::test_a_forged_run_is_reported"


def pauses(what: str, old: str, new: str, test: str, file: str = "pauses") -> Guard:
    """A guard with one test of pauses, or of its races."""
    return guard("pauses", what, file, old, new, test if "/" in test else PAUSES + test)


OF_PAUSES: tuple[Guard, ...] = (
    pauses(
        "what becomes pending is held",
        "from {{schema}}.runs r where r.id = new.run_id and r.status = 'paused') then\n    new.status := 'held';",
        "from {{schema}}.runs r where r.id = new.run_id and false) then\n    new.status := 'held';",
        "test_an_attempt_that_is_to_be_repeated_is_held",
    ),
    pauses(
        "what becomes ready is born held",
        "  if v_run.status = 'paused' and new.status = 'pending' then\n",
        "  if false then\n",
        "test_what_runs_when_the_pause_comes_ends_as_always_and_what_it_makes_ready_is_held",
        "runs",
    ),
    pauses(
        "what stands already is held",
        "where j.id = any(v_jobs) and j.status = 'pending';\n  get diagnostics",
        "where false;\n  get diagnostics",
        "test_nothing_of_a_paused_run_starts_and_all_of_it_comes_back_when_it_was_due",
    ),
    pauses(
        "who does not see the latest pause fails",
        "if current_setting('transaction_isolation') <> 'read committed' and not",
        "if false and not",
        "test_above_read_committed_a_signal_sees_a_pause_that_it_has_not_seen",
    ),
    pauses(
        "a pause, and its end, wait for who has just woken a job",
        "or current_setting('transaction_isolation') <> 'read committed') order by j.id for update);",
        "or current_setting('transaction_isolation') <> 'read committed') order by j.id);",
        RACES + "test_a_job_that_a_signal_has_just_woken_is_held_by_a_pause_and_let_go_by_its_end",
    ),
    pauses(
        "above READ COMMITTED a pause, and its end, do not overlook what has come back",
        "or current_setting('transaction_isolation') <> 'read committed') order by",
        "or false) order by",
        "test_above_read_committed_an_attempt_that_came_back_is_not_overlooked",
    ),
    pauses(
        "child runs are born paused",
        "before insert on {{schema}}.runs for each row\n  when (new.parent_run is not null)",
        "before insert on {{schema}}.runs for each row\n  when (false)",
        "test_a_child_run_that_is_admitted_during_a_pause_is_born_paused",
    ),
    pauses(
        "only while the run above is paused",
        "p.id = new.parent_run and p.status = 'paused') then",
        "p.id = new.parent_run) then",
        "test_a_child_run_that_is_paused_alone_leaves_the_run_above_at_work",
    ),
    pauses(
        "child runs that are reopened are paused",
        "  when (new.parent_run is not null and old.finished_at is not null and new.finished_at is null)",
        "  when (false)",
        "test_a_child_run_that_is_reopened_during_a_pause_is_paused",
    ),
    pauses(
        "a part of what is paused is not resumed alone",
        "  if v_top <> run_id then",
        "  if false then",
        "test_child_runs_are_paused_and_resumed_with_the_run_above_also_one_that_was_paused_by_itself",
    ),
    pauses(
        "what is being cancelled is not paused",
        "  elsif v_run.cancel_requested_at is not null or v_run.stopping_at is not null then\n",
        "  elsif false then\n",
        "test_a_run_that_is_being_cancelled_is_not_paused",
    ),
    pauses(
        "a stop ends the pause",
        "  if exists (select from {{schema}}.runs r where r.id = p_run and r.status = 'paused') then\n",
        "  if false then\n",
        "test_a_failure_that_stops_the_rest_ends_the_pause",
        "run_ends",
    ),
    pauses(
        "a stop of a paused run waits for its child runs",
        "and c.finished_at is null order by c.id for update nowait;",
        "and c.finished_at is null order by c.id for update skip locked;",
        RACES + "test_a_failure_in_a_paused_run_is_sent_again_while_a_child_run_is_busy",
        "run_ends",
    ),
    pauses(
        "the end of a run is that of its pause",
        "  if v_run.status = 'paused' then\n    delete from",
        "  if false then\n    delete from",
        "test_the_last_running_body_ends_a_paused_run_as_it_would_have",
        "run_ends",
    ),
    pauses(
        "the pause of a loop goes on in its next round",
        "    if v_run.status = 'paused' then\n      -- The pause",
        "    if false then\n      -- The pause",
        "test_the_time_of_a_paused_loop_does_not_count",
        "loops",
    ),
    pauses(
        "the time of the loops above does not count",
        "            select r.id, r.plan_hash, r.counted_from, n.ix, run_id from above",
        "            select r.id, r.plan_hash, null, n.ix, run_id from above",
        "test_the_time_of_a_loop_a_round_of_which_is_paused_does_not_count",
    ),
    *(
        guard("pauses", f"verify: {code}", "pauses", old, new, FORGED)
        for code, old, new in (
            (
                "pending_in_paused_run",
                "and j.status = 'pending'\n     where r.finished_at",
                "and false\n     where r.finished_at",
            ),
            ("held_as_paused_in_no_pause", "and r.status is distinct from 'paused';", "and false;"),
            ("pause_record_differs, none", "     where p.run_id is null or r.id is null;", "     where r.id is null;"),
            ("pause_record_differs, too many", "p.run_id is null or r.id is null;", "p.run_id is null;"),
            ("child_not_paused", "and c.status <> 'paused' and c.cancel", "and false and c.cancel"),
        )
    ),
)

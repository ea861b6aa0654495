"""Guards of preparations, incidents and grants: what is bounded, what is held, and who is waited for."""

from __future__ import annotations

from guards import Guard, guard

PREPARED = "test_preparations.py::"
HELD = "test_incidents.py::"
RACES = "races/test_races_of_incidents.py::"


def incidents(what: str, old: str, new: str, test: str, file: str = "incidents") -> Guard:
    """A guard with one test of incidents."""
    return guard("incidents", what, file, old, new, test)


OF_INCIDENTS: tuple[Guard, ...] = (
    incidents(
        "a fault waits for a grant once its bound is reached",
        "case when i.launches >= i.bound + i.grants then 'exhausted' else 'open' end",
        "'open'",
        PREPARED + "test_a_fault_is_tried_again_within_its_bound_and_then_waits_for_a_grant",
    ),
    incidents(
        "what was granted is used up where the recovery begins",
        "    if v_incident.launches >= v_incident.bound + v_incident.grants and",
        "    if false and",
        PREPARED + "test_what_was_granted_and_lost_on_the_way_is_granted_again",
    ),
    incidents(
        "a preparation that is told again keeps its verdict",
        "  if found then\n    answer := v_verdict;\n",
        "  if found then\n    answer := 'go';\n",
        PREPARED + "test_what_was_granted_and_lost_on_the_way_is_granted_again",
    ),
    incidents(
        "the same unmet prerequisite counts once",
        "if p_code <> 'unmet_prerequisite' or v_incident.failures = 0 then",
        "if true then",
        PREPARED + "test_the_same_unmet_prerequisite_counts_once_and_is_tried_again_without_end",
    ),
    incidents(
        "a fact that has moved since it was seen stays",
        " and f.version = v_fact.seen;",
        ";",
        PREPARED + "test_a_fact_that_has_moved_since_it_was_seen_stays",
    ),
    incidents(
        "ready without a lease is not ready",
        "became := case when not v_holds then 'lease' when v_job",
        "became := case when v_job",
        PREPARED + "test_ready_without_a_lease_is_not_ready",
    ),
    incidents(
        "ready after a cancel is not ready",
        " when v_job.cancel_requested_at is not null then 'cancelled' end;\n    -- Asked last",
        " end;\n    -- Asked last",
        PREPARED + "test_what_was_cancelled_meanwhile_begins_no_attempt",
    ),
    incidents(
        "what is paused meanwhile begins no attempt",
        "    v_stops := exists (select from {{schema}}.runs r where r.id = v_job.run_id and r.status = 'paused');",
        "    v_stops := false;",
        PREPARED + "test_what_was_paused_meanwhile_begins_no_attempt",
    ),
    incidents(
        "what is given back into a pause is given back under the root lock",
        "      v_locked := {{schema}}.run_is_free(v_found);",
        "      v_locked := true;",
        RACES + "test_what_is_ready_in_a_pause_that_ends_just_now_is_not_left_held",
    ),
    incidents(
        "an answer waits for nobody",
        "    elsif not {{schema}}.tree_is_free(v_found) then",
        "    elsif {{schema}}.lock_trees('{}', array[v_found])::text is null then",
        RACES + "test_one_whose_run_somebody_is_at_keeps_no_other_from_its_answer",
    ),
    incidents(
        "nothing is held or paused for what a cancel ends",
        "    v_stops := v_job.cancel_requested_at is not null;\n",
        "    v_stops := false;\n",
        PREPARED + "test_whatever_it_answers_a_cancel_that_was_asked_for_ends_it",
    ),
    incidents(
        "a prerequisite names something",
        "      if v_kind is null then",
        "      if false then",
        PREPARED + "test_a_prerequisite_that_names_nothing_is_a_fault",
    ),
    incidents(
        "one grant is one recovery",
        " and i.generation = new.generation and i.status = 'granted';",
        " and i.generation = new.generation;",
        HELD + "test_one_grant_is_one_recovery_however_often_its_attempts_come_back",
    ),
    incidents(
        "a grant ends no pause of somebody else",
        " and p.incident = v_incident.id) then\n      perform {{schema}}.resume_run",
        ") then\n      perform {{schema}}.resume_run",
        HELD + "test_a_pause_of_somebody_else_stays",
    ),
    incidents(
        "a live owner is left alone",
        "j.claimed_by and w.status in ('live', 'draining'));\n    if not found then",
        "j.claimed_by and false);\n    if not found then",
        HELD + "test_a_live_owner_is_left_alone",
    ),
    incidents(
        "an ordered job is held in its line",
        "j.held_reason in ('paused', 'ordering'));",
        "j.held_reason in ('paused'));",
        HELD + "test_an_ordered_job_is_held_in_its_line_until_it_is_granted",
    ),
    incidents(
        "what is lost once too often is left to hold_exhausted",
        "v_job.recoveries + 1 > v_max and {{schema}}.holds_exhausted(v_job.policy_id) then",
        "false then",
        HELD + "test_a_node_is_held_and_its_run_paused_once_its_recoveries_are_exhausted",
        "leases",
    ),
    incidents(
        "a run is recovering while something of it is unknown",
        "  if 'unknown' in (old.status, new.status) then",
        "  if false then",
        HELD + "test_a_run_is_recovering_while_the_outcome_of_a_node_is_unknown",
        "run_ends",
    ),
)

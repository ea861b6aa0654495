"""Guards of checkpoints, and of ends inside of a body's own transaction."""

from __future__ import annotations

from guards import Guard, guard

CHECKPOINTS, RACES = "test_checkpoints.py::", "races/test_races_of_checkpoints.py::"
ONLY_IT = CHECKPOINTS + "test_only_the_attempt_that_runs_moves_its_checkpoint"
FENCED = (
    "where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running'"
    " for no key update"
)
ASKED = "perform from {{schema}}.jobs j where j.id = p_job for key share;"
REPLAY = "elsif p_version + 1 = version and v_job.checkpoint_epoch = p_epoch and v_job.checkpoint = p_value then"


def fenced(what: str, part: str, *tests: str) -> Guard:
    """The fence of a checkpoint without one of its parts."""
    return guard("4", f"checkpoint: {what}", "checkpoints", FENCED, FENCED.replace(part, ""), *tests)


SAFE: tuple[Guard, ...] = (
    fenced("by its worker", " and j.claimed_by = p_worker", ONLY_IT),
    fenced("by its epoch", " and j.claim_epoch = p_epoch", ONLY_IT),
    fenced(
        "while it runs",
        " and j.status = 'running'",
        CHECKPOINTS + "test_an_attempt_whose_outcome_is_unknown_moves_nothing",
    ),
    fenced(
        "decided on the locked row", " for no key update", RACES + "test_two_that_save_from_one_version_move_it_once"
    ),
    guard(
        "checkpoint",
        "checkpoint: compare before the swap",
        "checkpoints",
        "if p_version = version then",
        "if true then",
        CHECKPOINTS + "test_a_wrong_version_is_refused_with_what_stands",
    ),
    guard(
        "checkpoint",
        "checkpoint: a replay makes no transition",
        "checkpoints",
        REPLAY,
        "elsif false then",
        CHECKPOINTS + "test_the_same_again_is_a_replay_and_changes_nothing",
    ),
    guard(
        "checkpoint",
        "checkpoint: a replay is of this attempt",
        "checkpoints",
        REPLAY,
        REPLAY.replace(" and v_job.checkpoint_epoch = p_epoch", ""),
        CHECKPOINTS + "test_what_an_earlier_attempt_did_is_no_replay_of_this_one",
    ),
    guard(
        "checkpoint",
        "checkpoint: a replay has the same value",
        "checkpoints",
        REPLAY,
        REPLAY.replace(" and v_job.checkpoint = p_value", ""),
        CHECKPOINTS + "test_a_wrong_version_is_refused_with_what_stands",
    ),
    guard(
        "4",
        "end inside: in the transaction that was begun",
        "checkpoints",
        "if pg_current_xact_id()::text <> p_xid then",
        "if false then",
        CHECKPOINTS + "test_an_end_inside_of_another_transaction_than_the_one_that_was_begun_changes_nothing",
    ),
    guard(
        "4",
        "end inside: an end that was not applied is none",
        "checkpoints",
        "when 1 then 'ended' else 'fenced' end;",
        "when 1 then 'ended' else 'ended' end;",
        CHECKPOINTS + "test_an_end_inside_is_fenced",
    ),
    guard(
        "race",
        "a lost commit: told once its transaction is over",
        "checkpoints",
        ASKED,
        "",
        RACES + "test_what_became_of_a_commit_is_told_once_its_transaction_is_over",
    ),
    guard(
        "4",
        "a lost commit: its own outcome",
        "checkpoints",
        " and a.outcome_id = p_outcome_id)",
        ")",
        CHECKPOINTS + "test_an_end_inside_is_fenced",
    ),
    guard(
        "4",
        "a lost commit: open for the worker that has the claim",
        "checkpoints",
        "where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch\n",
        "where j.id = p_job\n",
        CHECKPOINTS + "test_an_end_inside_is_fenced",
    ),
)

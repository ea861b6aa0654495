"""Guards of what people trade: history without payload and result, and ends that are committed asynchronously."""

from __future__ import annotations

from guards import Guard, guard

SLIM, ASYNC = "test_slim.py::", "test_ends_async.py::"
MORE = ASYNC + "test_one_end_that_is_more_makes_all_of_them_wait"

KNOBS: tuple[Guard, ...] = (
    guard(
        "slim",
        "constraint history_payload: only a plain success goes without",
        "tables",
        "check (payload is not null or status = 'succeeded'",
        "check (true or status = 'succeeded'",
        SLIM + "test_the_table_refuses_an_end_without_a_payload_that_is_needed",
    ),
    guard(
        "slim",
        "what did not succeed keeps its payload",
        "exchange",
        "case when d.slim and d.final = 'succeeded' then null else d.payload end",
        "case when d.slim then null else d.payload end",
        SLIM + "test_what_did_not_succeed_keeps_its_payload_and_can_be_reopened",
    ),
    guard(
        "slim",
        "who promises effects keeps both, enqueued alone",
        "enqueue",
        "coalesce(s.slim, p.slim) and (s.has_effects or p.promises) is not true",
        "coalesce(s.slim, p.slim)",
        SLIM + "test_one_that_promises_effects_keeps_both_and_so_do_their_jobs",
    ),
    guard(
        "slim",
        "who promises effects keeps both, enqueued with others",
        "enqueue",
        "coalesce(x.slim, p.slim) and (x.has_effects or p.has_effects) is not true",
        "coalesce(x.slim, p.slim)",
        "test_enqueue_of_one.py::test_a_job_enqueued_alone_is_what_it_would_be_in_a_batch",
    ),
    guard(
        "slim",
        "the job of an effect keeps both",
        "effects",
        "'slim', false, ",
        "",
        SLIM + "test_one_that_promises_effects_keeps_both_and_so_do_their_jobs",
    ),
    guard(
        "slim",
        "a child keeps both",
        "children",
        "set parent_job = p_job, slim = null where",
        "set parent_job = p_job where",
        "/worker/test_slim_jobs.py::test_nodes_of_runs_and_children_of_bodies_give_their_results",
    ),
    guard(
        "async",
        "no claim is committed asynchronously",
        "exchange",
        "v_async := v_async and not found;",
        "",
        ASYNC + "test_a_claim_waits_and_the_ends_with_it",
    ),
    guard(
        "async",
        "only who asks for it",
        "exchange",
        "p_ends_async and {{schema}}.are",
        "{{schema}}.are",
        ASYNC + "test_a_worker_that_does_not_ask_for_it_waits",
    ),
    guard(
        "async",
        "no end of a side effect",
        "exchange",
        "(j.effect_class = 'side_effecting' or j.status <> 'running'",
        "(j.status <> 'running'",
        MORE,
    ),
    guard("async", "no end of an unknown job", "exchange", "or j.status <> 'running' or j.cancel", "or j.cancel", MORE),
    guard(
        "async",
        "no end after a cancel request",
        "exchange",
        " or j.cancel_requested_at is not null\n         or j.has_effects",
        "\n         or j.has_effects",
        MORE,
    ),
    guard("async", "no end that promises effects", "exchange", "or j.has_effects or j.run_id", "or j.run_id", MORE),
    guard("async", "no end of a node", "exchange", "or j.run_id is not null or j.parent_job", "or j.parent_job", MORE),
    guard("async", "no end of a child", "exchange", " or j.parent_job is not null or j.eff", " or j.eff", MORE),
    guard(
        "async", "no end beside the effect of a step", "exchange", " or j.effect_started_at is not null))", "))", MORE
    ),
)

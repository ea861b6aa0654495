"""Guards of maps: which lists are taken, how many children have jobs, what is counted, undone and run again."""

from __future__ import annotations

from guards import Guard, guard

MAPS = "test_maps.py::"
RACES = "races/test_races_of_maps.py::"


def maps(what: str, old: str, new: str, *tests: str) -> Guard:
    """A guard in the migration of maps."""
    return guard("maps", what, "maps", old, new, *(MAPS + test for test in tests))


def ends(what: str, old: str, new: str, *tests: str) -> Guard:
    """A guard in the migration of how runs end."""
    return guard("maps", what, "run_ends", old, new, *(MAPS + test for test in tests))


OF_MAPS: tuple[Guard, ...] = (
    maps(
        "only a list is taken",
        "if jsonb_typeof(p_items) is distinct from 'array' then",
        "if false then",
        "test_what_is_no_list_fails_the_node_and_says_so",
    ),
    maps(
        "no more items than declared",
        "elsif jsonb_array_length(p_items) > (p_map ->> 'most')::int then",
        "elsif false then",
        "test_more_items_than_declared_fail_the_node_and_say_so",
    ),
    guard(
        "maps",
        "both are looked at before it begins",
        "runs",
        "    perform {{schema}}.check_items(p_input -> (v_map ->> 'item'), v_map);\n",
        "    perform 1;\n",
        MAPS + "test_more_items_than_declared_fail_the_node_and_say_so",
    ),
    guard(
        "maps",
        "each gets the item of its number",
        "runs",
        "when v_cursor is null then p_run.input || jsonb_build_object(v_item, n.item)",
        "when v_cursor is null then p_run.input || jsonb_build_object(v_item, n.ix)",
        MAPS + "test_each_item_gets_a_job_and_the_results_come_in_their_order",
    ),
    guard(
        "maps",
        "one that begins alone begins at once",
        "runs",
        "p_run.depth = 0 and cardinality(p_nodes) = 1);",
        "false);",
        MAPS + "test_each_item_gets_a_job_and_the_results_come_in_their_order",
    ),
    guard(
        "maps",
        "several that begin together are carried on",
        "runs",
        "p_run.depth = 0 and cardinality(p_nodes) = 1);",
        "true);",
        MAPS + "test_maps_that_begin_together_are_left_to_who_carries_them_on",
    ),
    maps(
        "no more have jobs than are let",
        "v_room := least(v_run.at_once - v_active, v_most - v_made);",
        "v_room := v_most - v_made;",
        "test_no_more_children_have_jobs_than_are_let",
    ),
    maps(
        "no more get jobs in a transaction",
        "v_room := least(v_run.at_once - v_active, v_most - v_made);",
        "v_room := v_run.at_once - v_active;",
        "test_a_map_is_carried_on_where_a_transaction_makes_fewer_jobs_than_are_let",
    ),
    maps(
        "an end makes room",
        "v_active := v_run.active - p_closed;",
        "v_active := v_run.active;",
        "test_the_end_of_one_lets_the_next_begin",
    ),
    maps(
        "nodes are written ahead",
        "        perform {{schema}}.write_items(p_run, 1000);\n",
        "        perform 1;\n",
        "test_nodes_are_written_a_little_ahead_of_their_jobs",
    ),
    maps(
        "a failure begins no more",
        "exit when v_failed and (select p.on_failure from {{schema}}.plans p where p.hash = v_run.plan_hash)"
        " = 'cancel';",
        "",
        "test_a_failure_stops_the_rest_and_blocks_what_follows",
    ),
    guard(
        "maps",
        "what waits for its turn is not carried on",
        "run_views",
        "continue when not found or {{schema}}.room_for_items(v_run) <= 0\n",
        "continue when not found\n",
        MAPS + "test_nodes_are_written_a_little_ahead_of_their_jobs",
    ),
    ends(
        "items without nodes are cancelled",
        " - coalesce(r.wanted - r.written, 0), wanted = r.written where r.id = p_run;",
        " where r.id = p_run;",
        "test_cancelling_the_run_cancels_all_items_in_one_transaction",
    ),
    ends(
        "a stop counts what had jobs",
        "open_nodes = r.open_nodes - v_n, active = r.active - v_n where",
        "open_nodes = r.open_nodes - v_n where",
        "test_cancelling_the_run_cancels_all_items_in_one_transaction",
    ),
    ends(
        "cancelled: items without nodes count",
        "((v_run.wanted < v_run.items or v_run.pages is not null) and v_word is distinct from 'done' or exists",
        "(exists",
        "test_a_map_whose_items_had_no_nodes_when_it_was_cancelled_is_cancelled",
    ),
    maps(
        "retried: what succeeded keeps its item",
        "where n.status = 'succeeded' and n.item <> i.item) then",
        "where false) then",
        "test_children_that_have_succeeded_keep_their_items",
    ),
    maps(
        "retried: no item goes that had a node",
        "if v_items < p_run.written or exists (",
        "if exists (",
        "test_children_that_have_succeeded_keep_their_items",
    ),
    maps(
        "retried: only what did not succeed",
        "n.ix = i.ord - 1 and n.status in ('failed', 'cancelled');",
        "n.ix = i.ord - 1;",
        "test_retrying_runs_again_what_failed_and_what_had_not_begun",
    ),
    maps(
        "retried: items without nodes begin",
        "  if v_waiting = 0 then\n    perform {{schema}}.write_items(p_run.id, 1);\n  end if;\n",
        "",
        "test_retrying_one_of_which_only_items_without_nodes_are_left_writes_them",
    ),
    maps(
        "results: none before it has succeeded",
        "if v_node.status <> 'succeeded' or v_map.id is null then",
        "if v_map.id is null then",
        "test_results_are_there_only_once_all_have_succeeded",
    ),
    maps(
        "results: in the order of the items",
        "jsonb_agg(n.result order by n.ix)",
        "jsonb_agg(n.result order by n.finished_at desc, n.ix desc)",
        "test_each_item_gets_a_job_and_the_results_come_in_their_order",
    ),
    maps(
        "results: no larger than a payload",
        "if v_size > v_most then",
        "if false then",
        "test_the_result_of_a_run_that_is_too_large_fails_it_and_says_so",
    ),
    maps(
        "outcomes: of what had not begun, too",
        "from generate_series(p_map.written, p_map.items - 1) g(ix)",
        "from generate_series(1, 0) g(ix)",
        "test_what_collects_is_told_of_items_that_did_not_begin",
    ),
    maps(
        "outcomes: a hundred errors whole",
        "when o.nth <= 100 then o.error",
        "when true then o.error",
        "test_of_many_failures_the_first_are_told_whole_and_all_are_counted",
    ),
    ends(
        "undone: each child",
        "where c.parent_run = p_run.id and c.items is not null and p_run.items is null and k.compensate",
        "where false and k.compensate",
        "test_each_child_that_succeeded_is_undone_by_the_run_of_the_map",
    ),
    ends(
        "undone: not the map itself",
        "and (select c.id from {{schema}}.runs c where c.parent_node = n.id and c.items is not null limit 1) is null\n",
        "\n",
        "test_children_of_a_map_that_succeeded_are_undone_with_the_rest",
    ),
    ends(
        "reopened: not once a child was undone",
        "\n    union all select i.id from {{schema}}.runs c cross join lateral"
        " (select o.id from {{schema}}.nodes o where o.run_id = c.id offset 0) i"
        " where c.parent_run = p_run.id and c.items is not null)",
        ")",
        "test_children_of_a_map_that_succeeded_are_undone_with_the_rest",
    ),
    guard(
        "maps",
        "kept until its children are undone",
        "run_views",
        "where c.parent_run = r.id and c.items is not null and (",
        "where false and (",
        MAPS + "test_a_run_is_kept_until_what_undoes_its_children_is_settled",
    ),
    guard(
        "maps",
        "healed: counts what has jobs",
        "run_views",
        "active = case when r.items is not null then v_active end where r.id = p_run;",
        "active = r.active where r.id = p_run;",
        MAPS + "test_a_map_that_counts_wrong_is_counted_anew",
    ),
)

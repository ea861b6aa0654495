"""Guards of emits: what is taken of a page, when the next is asked for, what is run again, and what verify finds."""

from __future__ import annotations

from guards import Guard, guard

EMITS = "test_emits.py::"
FORGED = "test_run_invariants.py::test_a_forged_run_is_reported"
REFUSED = "test_a_page_that_cannot_be_taken_fails_the_emit_and_says_why"
AHEAD = "test_the_end_that_brings_the_open_items_down_asks_for_the_next_page"
PAGES = "test_pages_give_items_until_the_last_one"
CANCELLING = "test_a_page_that_comes_while_its_run_is_being_cancelled_is_on_record_for_a_retry"
BETWEEN = "test_who_collects_of_an_emit_that_was_cancelled_between_pages_is_told_that_there_was_more"
NOT_COME = "test_who_collects_is_told_of_the_page_that_did_not_come"


def emits(what: str, old: str, new: str, test: str, file: str = "emits") -> Guard:
    """A guard with one test."""
    return guard("emits", what, file, old, new, EMITS + test)


OF_EMITS: tuple[Guard, ...] = (
    emits(
        "only a page is taken",
        "if jsonb_typeof(p_page) is distinct from 'object' or jsonb_typeof(p_page -> 'items') is distinct",
        "if false and jsonb_typeof(p_page -> 'items') is distinct",
        REFUSED,
    ),
    emits("no more items in a page than may be", "    when v_n > 10000 then", "    when false then", REFUSED),
    emits(
        "no more items than declared",
        "    when p_run.items + v_n > (p_map ->> 'most')::int then",
        "    when false then",
        REFUSED,
    ),
    emits(
        "no page that stands still",
        "    when v_n = 0 and p_page -> 'cursor' = p_cursor then",
        "    when false then",
        REFUSED,
    ),
    emits(
        "no more pages than may be",
        "    when p_run.pages >= 100000 then",
        "    when false then",
        "test_pages_are_bounded_in_number",
    ),
    emits(
        "a page is asked for with the cursor of the one before",
        "      (select n.item -> 'next' from {{schema}}.nodes n where",
        "      (select n.item -> 'cursor' from {{schema}}.nodes n where",
        PAGES,
    ),
    emits(
        "none while too many are open",
        "     or v_run.open_nodes - p_closed > (select (p.map #>> '{pages,ahead}')::int",
        "     or 100000 < (select (p.map #>> '{pages,ahead}')::int",
        AHEAD,
    ),
    emits(
        "what has just ended is not open",
        "     or v_run.open_nodes - p_closed > (select (p.map #>> '{pages,ahead}')::int",
        "     or v_run.open_nodes > (select (p.map #>> '{pages,ahead}')::int",
        AHEAD,
    ),
    emits(
        "a page has its job beside the items",
        "n.ix = 999999 + p_run.pages and n.status = 'ready')::int\n",
        "n.ix = 999999 + p_run.pages and false)::int\n",
        "test_a_page_has_its_job_beside_the_items_that_may_have_one",
    ),
    emits(
        "a failure stops the source",
        "  if not (v_failed and v_cancels) then",
        "  if true then",
        "test_a_child_that_fails_before_the_next_page_is_asked_for_stops_the_source",
    ),
    emits(
        "items that come too late are cancelled",
        "  v_stopped := v_run.cancel_requested_at is not null or v_run.stopping_at is not null;",
        "  v_stopped := false;",
        CANCELLING,
    ),
    emits(
        "retried: a page that could not be taken is asked for again",
        "    where n.run_id = p_run.id and n.ix = 999999 + p_run.pages and n.item ? 'refused';",
        "    where false;",
        REFUSED,
    ),
    emits(
        "a page that was refused is a failure",
        "    or p_run.pages is not null and {{schema}}.emit_word(p_run) is not distinct from 'refused'\n",
        "",
        REFUSED,
        "run_ends",
    ),
    emits(
        "one whose last page was not the end was cancelled",
        "(v_run.wanted < v_run.items or v_run.pages is not null) and v_word",
        "(v_run.wanted < v_run.items) and v_word",
        BETWEEN,
        "run_ends",
    ),
    emits(
        "who collects sees the page that failed",
        "n.ix = 999999 + p_map.pages and (n.status <> 'succeeded' or n.item ? 'refused')",
        "n.ix = 999999 + p_map.pages and false",
        NOT_COME,
        "maps",
    ),
    emits(
        "who collects sees the page that was not asked for",
        "where p_map.pages is not null and {{schema}}.emit_word(p_map) = 'again'",
        "where false",
        BETWEEN,
        "maps",
    ),
    emits(
        "only items are undone",
        "o.status = 'succeeded' and o.ix < 1000000 offset 0) i",
        "o.status = 'succeeded' offset 0) i",
        "test_what_items_did_is_undone_and_pages_are_not",
        "run_ends",
    ),
    *(
        guard("emits", f"verify: {what}", "run_views", old, new, FORGED)
        for what, old, new in (
            (
                "emit_differs",
                "(9, 'emit_differs', (n.pages is null) = coalesce(",
                "(9, 'emit_differs', null = coalesce(",
            ),
            (
                "emit_page_out_of_turn, its cursor",
                "       and (n.item -> 'cursor' is distinct from coalesce(b.item -> 'next', 'null') or b.ix",
                "       and (b.ix",
            ),
            (
                "emit_page_out_of_turn, behind the last",
                "       and (n.item -> 'cursor' is distinct from coalesce(b.item -> 'next', 'null') or b.ix is not null"
                " and (b.status <> 'succeeded' or b.item -> 'last' is distinct from 'false')\n",
                "       and (n.item -> 'cursor' is distinct from coalesce(b.item -> 'next', 'null')\n",
            ),
            (
                "emit_page_out_of_turn, not taken",
                "         or n.item ? 'first' <> (n.status = 'succeeded')\n",
                "",
            ),
            (
                "emit_page_out_of_turn, its items",
                "         or coalesce((n.item ->> 'first')::int <> coalesce(b.upto, 0) or n.ix",
                "         or coalesce(n.ix",
            ),
            (
                "emit_page_out_of_turn, all items",
                " or n.ix = 999999 + r.pages and (n.item ->> 'first')::int + (n.item ->> 'n')::int <> r.items, "
                "false));",
                ", false));",
            ),
            (
                "emit_incomplete",
                "       and {{schema}}.emit_word(r) is distinct from 'done';",
                "       and false;",
            ),
            (
                "emit_stands_still",
                "       and r.open_nodes <= (p.map #>> '{pages,ahead}')::int\n",
                "       and false\n",
            ),
        )
    ),
)

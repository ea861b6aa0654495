-- Emits: a task, or a child run, for each item of a list that a source gives page by page. An emit is a map whose list is not
-- known when it begins: its plan has a second node, the source, which every page is a node of, numbered from 1,000,000 on. The
-- end of a page's job writes, in its transaction, the nodes of its items, the cursor that it gave, and the page that is asked
-- for next with that: so whoever dies in the middle has given nothing, and is asked again with the cursor that is on record.
-- The next page waits while more than `ahead` items are open; the end that brings them down to that asks for it.

create function {{schema}}.admit_emit(p_run {{schema}}.runs, p_node uuid, p_plan text, p_map jsonb, p_input jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_emit uuid;
  v_paused text;
begin
  insert into {{schema}}.runs (created_at, open_nodes, receipts, workflow, plan_hash, input, meta, parent_run, parent_node, budget_of, depth, effect_depth, items, wanted, written, active, at_once, pages)
    select {{schema}}.now(), 0, p.receipts, p.workflow, p_plan, p_input, p_run.meta, p_run.id, p_node, p_run.budget_of, p_run.depth + 1, p_run.effect_depth,
           0, 0, 0, 0, least((p_map ->> 'at_once')::int, (p_map ->> 'most')::int), 0
      from {{schema}}.plans p where p.hash = p_plan
    returning id, nullif(status, 'running') into v_emit, v_paused;
  perform {{schema}}.receipt(v_emit, 'admitted', null, null, 1, v_paused);
  if {{schema}}.advance_emit(v_emit, '{}', null, null, 0, false) then
    perform {{schema}}.ensure_today();
    perform {{schema}}.settle_run(v_emit, true);
  end if;
end $$;
comment on function {{schema}}.admit_emit({{schema}}.runs, uuid, text, jsonb, jsonb) is
  'Starts the emit that a node stands for, with the job of its first page. The caller holds the root lock of the node''s run.';

create function {{schema}}.room_for_items(p_run {{schema}}.runs) returns integer
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select p_run.at_once - p_run.active
    + (select count(*) from {{schema}}.nodes n where p_run.pages is not null and n.run_id = p_run.id and n.ix = 999999 + p_run.pages and n.status = 'ready')::int
$$;
comment on function {{schema}}.room_for_items({{schema}}.runs) is 'How many more items of a map may have jobs; that of a page does not count.';

create function {{schema}}.page_fault(p_run {{schema}}.runs, p_map jsonb, p_cursor jsonb, p_page jsonb) returns jsonb
  language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_n integer;
begin
  if jsonb_typeof(p_page) is distinct from 'object' or jsonb_typeof(p_page -> 'items') is distinct from 'array' then
    return jsonb_build_object('type', 'NotAPage', 'message', format('a source gave %s; it gives a page, with a list of items and a cursor: annotate it as returning Page[...], so that the wiring is checked',
      case jsonb_typeof(p_page) when 'array' then 'a list' when 'object' then 'an object without a list of items' when 'string' then 'a text' when 'number' then 'a number' when 'boolean' then 'a boolean' else 'nothing' end));
  end if;
  v_n := jsonb_array_length(p_page -> 'items');
  return case
    when v_n > 10000 then jsonb_build_object('type', 'PageTooLarge', 'message', format('a page has %s items, the limit is 10000; give them in more pages', v_n))
    when p_run.items + v_n > (p_map ->> 'most')::int then jsonb_build_object('type', 'TooManyItems', 'message',
      format('with the next page an emit has %s items, its limit is %s; declare a higher at_most (up to 100000), or give batches of items', p_run.items + v_n, p_map ->> 'most'))
    when coalesce(p_page -> 'cursor', 'null') = 'null' then null
    when v_n = 0 and p_page -> 'cursor' = p_cursor then jsonb_build_object('type', 'CursorStands', 'message',
      format('a page has no items and the cursor that it was asked for with, %s; give the next cursor, or None where that was the last page', left(p_cursor::text, 200)))
    when p_run.pages >= 100000 then jsonb_build_object('type', 'TooManyPages', 'message', format('%s pages were given, and none was the last; give more items in each', p_run.pages))
    end;
end $$;
comment on function {{schema}}.page_fault({{schema}}.runs, jsonb, jsonb, jsonb) is 'Why a page that a source gave cannot be taken (type and message), asked for with p_cursor; null where it can be.';

-- Of an emit that is being cancelled the items are cancelled with it: on record, so that a retry runs them.
create function {{schema}}.take_page(p_run uuid) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run {{schema}}.runs;
  v_page {{schema}}.nodes;
  v_fault jsonb;
  v_next jsonb;
  v_ids uuid := {{schema}}.new_id();
  v_n integer;
  v_stopped boolean;
begin
  select * into v_run from {{schema}}.runs r where r.id = p_run;
  select * into v_page from {{schema}}.nodes n where n.run_id = p_run and n.ix = 999999 + v_run.pages;
  if v_page.status is distinct from 'succeeded' or v_page.item ? 'first' then
    return;
  end if;
  v_fault := {{schema}}.page_fault(v_run, (select p.map from {{schema}}.plans p where p.hash = v_run.plan_hash), v_page.item -> 'cursor', v_page.result);
  if v_fault is not null then
    update {{schema}}.nodes n set result = 'null', item = n.item || jsonb_build_object('first', v_run.items, 'n', 0, 'next', n.item -> 'cursor', 'last', false,
        'refused', v_fault || jsonb_build_object('node', {{schema}}.node_name(v_run.items, k.name, n.ix)))
      from {{schema}}.plan_nodes k where k.plan_hash = v_run.plan_hash and k.ix = 1 and n.id = v_page.id;
    return;
  end if;
  v_stopped := v_run.cancel_requested_at is not null or v_run.stopping_at is not null;
  insert into {{schema}}.nodes (id, run_id, ix, unmet, due, status, item, finished_at, error)
    select {{schema}}.ids_from(v_ids, e.ord::int), p_run, v_run.items + e.ord::int - 1, 0, not v_stopped, case when v_stopped then 'cancelled' else 'waiting' end, e.item,
           case when v_stopped then {{schema}}.now() end, case when v_stopped then jsonb_build_object('type', 'Cancelled', 'message', 'its run was being cancelled when its page came') end
      from jsonb_array_elements(v_page.result -> 'items') with ordinality e(item, ord) order by e.ord;
  get diagnostics v_n = row_count;
  v_next := coalesce(v_page.result -> 'cursor', 'null');
  update {{schema}}.nodes n set result = jsonb_build_object('items', v_n, 'cursor', v_next),
      item = n.item || jsonb_build_object('first', v_run.items, 'n', v_n, 'next', v_next, 'last', v_next = 'null') where n.id = v_page.id;
  update {{schema}}.runs r set items = r.items + v_n, wanted = r.items + v_n, written = r.items + v_n, open_nodes = r.open_nodes + case when v_stopped then 0 else v_n end where r.id = p_run;
end $$;
comment on function {{schema}}.take_page(uuid) is
  'Writes the nodes of the items of the page that has succeeded last, with the cursor, if that is not done; or why it cannot be taken. The caller holds the root lock.';

create function {{schema}}.ask_page(p_run uuid, p_closed integer) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run {{schema}}.runs;
begin
  select * into v_run from {{schema}}.runs r where r.id = p_run;
  -- What is being cancelled asks no more.
  if v_run.cancel_requested_at is not null or v_run.stopping_at is not null or {{schema}}.emit_word(v_run) is distinct from 'again'
     or v_run.open_nodes - p_closed > (select (p.map #>> '{pages,ahead}')::int from {{schema}}.plans p where p.hash = v_run.plan_hash) then
    return;
  end if;
  insert into {{schema}}.nodes (id, run_id, ix, unmet, due, status, item)
    select {{schema}}.new_id(), p_run, 1000000 + v_run.pages, 0, true, 'waiting', jsonb_build_object('cursor', coalesce(
      (select n.item -> 'next' from {{schema}}.nodes n where n.run_id = p_run and n.ix = 999999 + v_run.pages), 'null'));
  update {{schema}}.runs r set pages = r.pages + 1, open_nodes = r.open_nodes + 1 where r.id = p_run;
end $$;
comment on function {{schema}}.ask_page(uuid, integer) is
  'Writes the node of the next page of an emit, if there is one and no more items are open than its plan allows; p_closed: how many of those that are counted are not any more. The caller holds the root lock.';

-- What it does depends on the rows, and not on what has just ended: so healing an emit is the same.
create function {{schema}}.advance_emit(p_run uuid, p_front integer[], p_epochs bigint[], p_statuses text[], p_closed integer, p_failed boolean) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run {{schema}}.runs;
  v_cancels boolean;
  v_most integer;
  v_room integer;
  v_take integer[];
  v_jobs record;
  v_failed boolean;
  v_closed integer := p_closed;
  v_ready integer[] := '{}';
  v_kinds text[] := '{}';
  v_nodes integer[] := '{}';
  v_epochs bigint[] := '{}';
  v_ns integer[] := '{}';
  v_statuses text[] := '{}';
begin
  perform {{schema}}.take_page(p_run);
  select * into v_run from {{schema}}.runs r where r.id = p_run;
  v_cancels := (select p.on_failure from {{schema}}.plans p where p.hash = v_run.plan_hash) = 'cancel';
  v_failed := p_failed or {{schema}}.emit_word(v_run) is not distinct from 'refused';
  if not (v_failed and v_cancels) then
    perform {{schema}}.ask_page(p_run, p_closed);
    update {{schema}}.runs r set active = r.active - p_closed where r.id = p_run returning * into v_run;
    v_most := {{schema}}.ready_at_once(v_run);
    v_room := least({{schema}}.room_for_items(v_run), v_most);
    -- The page first, beside the items that may have jobs at a time.
    v_take := array(select n.ix from {{schema}}.nodes n where n.run_id = p_run and n.due and n.ix >= 1000000)
      || array(select n.ix from {{schema}}.nodes n where n.run_id = p_run and n.due and n.ix < 1000000 order by n.ix limit greatest(v_room, 0));
    loop
      v_take := v_take[: {{schema}}.take_budget(v_run, cardinality(v_take))];
      exit when v_take = '{}';
      select * into v_jobs from {{schema}}.make_ready(v_run, v_take);
      v_ready := v_ready || v_jobs.ready;
      v_closed := v_closed + cardinality(v_jobs.failed);
      perform {{schema}}.give_back_budget(v_run, cardinality(v_jobs.failed));
      v_failed := v_failed or v_jobs.failed <> '{}';
      v_most := v_most - cardinality(v_take);
      -- In place of what could not be made the next.
      exit when v_jobs.failed = '{}' or v_failed and v_cancels or v_most <= 0;
      v_room := least(v_room - (select count(*) from unnest(v_jobs.ready) r(ix) where r.ix < 1000000)::int, v_most);
      v_take := array(select n.ix from {{schema}}.nodes n where n.run_id = p_run and n.due and n.ix < 1000000 order by n.ix limit greatest(v_room, 0));
    end loop;
    update {{schema}}.runs r set active = r.active + cardinality(v_ready) where r.id = p_run returning * into v_run;
    if {{schema}}.room_for_items(v_run) > 0 and not {{schema}}.is_budget_spent(v_run) and (select n.ix from {{schema}}.nodes n where n.run_id = p_run and n.due order by n.ix limit 1) is not null then
      perform pg_notify('{{schema}}_due', p_run::text);
    end if;
  else
    update {{schema}}.runs r set active = r.active - p_closed where r.id = p_run;
  end if;
  if p_epochs is not null then
    v_kinds := array_fill('ended'::text, array[cardinality(p_front)]);
    v_nodes := p_front;
    v_epochs := p_epochs;
    v_ns := array_fill(1, array[cardinality(p_front)]);
    v_statuses := p_statuses;
  end if;
  -- A page has a receipt of its own: its number is none of an item's.
  for v_jobs in select min(r.ix) as first, count(*)::int as n from unnest(v_ready) r(ix) group by r.ix >= 1000000 order by 1 loop
    v_kinds := v_kinds || 'ready'::text;
    v_nodes := v_nodes || v_jobs.first;
    v_epochs := v_epochs || null::bigint;
    v_ns := v_ns || v_jobs.n;
    v_statuses := v_statuses || null::text;
  end loop;
  if v_kinds <> '{}' or v_closed > 0 then
    perform {{schema}}.receipts(p_run, v_closed, v_kinds, v_nodes, v_epochs, v_ns, v_statuses);
  end if;
  return v_failed;
end $$;
comment on function {{schema}}.advance_emit(uuid, integer[], bigint[], text[], integer, boolean) is
  'What advance does, for an emit: the page that has succeeded is taken and the next one asked for, and in place of the items that have ended the next get their jobs, as far as at_once and one transaction allow. The caller holds the root lock.';

create function {{schema}}.reopen_emit(p_run {{schema}}.runs) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_open integer;
begin
  update {{schema}}.nodes n set status = 'waiting', finished_at = null, error = null, due = true where n.run_id = p_run.id and n.status in ('failed', 'cancelled');
  get diagnostics v_open = row_count;
  -- Its job has succeeded, and is none to run again: the next one is asked with the cursor that it was asked with.
  update {{schema}}.nodes n set item = (n.item - 'refused') || jsonb_build_object('refused_before', n.item -> 'refused')
    where n.run_id = p_run.id and n.ix = 999999 + p_run.pages and n.item ? 'refused';
  update {{schema}}.runs r set active = 0, open_nodes = v_open where r.id = p_run.id;
  perform {{schema}}.ask_page(p_run.id, 0);
  select r.open_nodes into v_open from {{schema}}.runs r where r.id = p_run.id;
  if v_open = 0 then
    perform {{schema}}.settle_run(p_run.id, false);
  else
    perform pg_notify('{{schema}}_due', p_run.id::text);
  end if;
  return v_open;
end $$;
comment on function {{schema}}.reopen_emit({{schema}}.runs) is
  'What reopen_run does with the nodes of an emit: items that have failed or were cancelled wait for their turn again, and its source goes on from the cursor that is on record; the leader makes the jobs. Answers how many nodes are open.';

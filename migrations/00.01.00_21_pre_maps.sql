-- Maps: a task, or a child run, for each item of a list that is known only at run time. A map is a child run of the node that
-- stands for it: its plan has one node, which every item is a node of. The nodes are written in portions, a little ahead of
-- their jobs, and so many have jobs at a time at most: so no transaction, an end, a cancel or a failure, has more to do than
-- that. The list stands in the arguments of the job that waits for the map; each item in its node.

create function {{schema}}.map_fault(p_sqlstate text) returns text
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
  select case p_sqlstate when 'WF031' then 'NotAList' when 'WF032' then 'TooManyItems' when 'WF033' then 'ResultsTooLarge' when 'WF034' then 'ItemsChanged' end
$$;
comment on function {{schema}}.map_fault(text) is 'What a map''s failure with this SQLSTATE is called on the record; null for any other.';

create function {{schema}}.check_items(p_items jsonb, p_map jsonb) returns void
  language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if jsonb_typeof(p_items) is distinct from 'array' then
    raise exception using errcode = 'WF031', message = format('a map was given %s', case jsonb_typeof(p_items) when 'null' then 'null' when 'object' then 'an object'
        when 'string' then 'a text' when 'number' then 'a number' when 'boolean' then 'a boolean' else 'nothing' end),
      hint = 'It takes a list: annotate the task that gives it, so that the wiring is checked, and return an empty list for nothing.';
  elsif jsonb_array_length(p_items) > (p_map ->> 'most')::int then
    raise exception using errcode = 'WF032', message = format('a map was given %s items, its limit is %s', jsonb_array_length(p_items), p_map ->> 'most'),
      hint = 'Declare a higher at_most (up to 100000), or map over batches of items.';
  end if;
end $$;
comment on function {{schema}}.check_items(jsonb, jsonb) is 'Refuses what is no list (WF031), or has more items than its map may have (WF032).';

create function {{schema}}.admit_map(p_run {{schema}}.runs, p_node uuid, p_plan text, p_map jsonb, p_input jsonb, p_go_on boolean) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_n integer := jsonb_array_length(p_input -> (p_map ->> 'item'));
  v_map uuid;
  v_paused text;
  v_failed boolean;
begin
  insert into {{schema}}.runs (created_at, open_nodes, receipts, workflow, plan_hash, input, meta, parent_run, parent_node, budget_of, depth, effect_depth, items, wanted, written, active, at_once)
    select {{schema}}.now(), v_n, p.receipts, p.workflow, p_plan, p_input - (p_map ->> 'item'), p_run.meta, p_run.id, p_node, p_run.budget_of, p_run.depth + 1, p_run.effect_depth,
           v_n, v_n, 0, 0, least((p_map ->> 'at_once')::int, (p_map ->> 'most')::int)
      from {{schema}}.plans p where p.hash = p_plan
    returning id, nullif(status, 'running') into v_map, v_paused;
  perform {{schema}}.receipt(v_map, 'admitted', null, null, v_n, v_paused);
  if p_go_on or v_n = 0 then
    v_failed := {{schema}}.advance_map(v_map, '{}', null, null, 0, false);
    if v_failed or exists (select from {{schema}}.runs r where r.id = v_map and r.open_nodes = 0) then
      perform {{schema}}.ensure_today();
      perform {{schema}}.settle_run(v_map, v_failed);
    end if;
  else
    perform {{schema}}.write_items(v_map, 1);
    perform pg_notify('{{schema}}_due', v_map::text);
  end if;
end $$;
comment on function {{schema}}.admit_map({{schema}}.runs, uuid, text, jsonb, jsonb, boolean) is
  'Starts the map that a node stands for; p_go_on: with the jobs of its first items, else the leader makes them. The caller holds the root lock of the node''s run.';

-- The list is taken apart once for so many.
create function {{schema}}.write_items(p_run uuid, p_n integer) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_run {{schema}}.runs;
  v_ids uuid := {{schema}}.new_id();
  v_n integer;
begin
  select * into v_run from {{schema}}.runs r where r.id = p_run;
  if v_run.written >= v_run.wanted then
    return 0;
  end if;
  insert into {{schema}}.nodes (id, run_id, ix, unmet, due, status, item)
    select {{schema}}.ids_from(v_ids, i.ix), p_run, i.ix, 0, true, 'waiting', i.item
      from (select e.ord::int - 1 as ix, e.item
              from {{schema}}.jobs j
              cross join lateral jsonb_array_elements(j.payload -> (select p.map ->> 'item' from {{schema}}.plans p where p.hash = v_run.plan_hash)) with ordinality e(item, ord)
             where j.id = v_run.parent_node and e.ord > v_run.written and e.ord <= least(v_run.written + p_n, v_run.wanted)) i
     order by i.ix;
  get diagnostics v_n = row_count;
  update {{schema}}.runs r set written = r.written + v_n where r.id = p_run;
  return v_n;
end $$;
comment on function {{schema}}.write_items(uuid, integer) is 'Writes the nodes of the next p_n items of a map, which wait for their turn; answers of how many. The caller holds the root lock.';

-- While items have no nodes one that has is due: so whoever looks for what is due finds the map.
create function {{schema}}.advance_map(p_run uuid, p_front integer[], p_epochs bigint[], p_statuses text[], p_closed integer, p_failed boolean) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run {{schema}}.runs;
  v_most integer;
  v_active integer;
  v_room integer;
  v_made integer := 0;
  v_take integer[];
  v_jobs record;
  v_failed boolean := p_failed;
  v_closed integer := p_closed;
  v_ready integer[] := '{}';
  v_kinds text[] := '{}';
  v_nodes integer[] := '{}';
  v_epochs bigint[] := '{}';
  v_ns integer[] := '{}';
  v_statuses text[] := '{}';
begin
  select * into v_run from {{schema}}.runs r where r.id = p_run;
  v_most := {{schema}}.ready_at_once(v_run);
  v_active := v_run.active - p_closed;
  loop
    -- What a failure stops is not begun any more.
    exit when v_failed and (select p.on_failure from {{schema}}.plans p where p.hash = v_run.plan_hash) = 'cancel';
    v_room := least(v_run.at_once - v_active, v_most - v_made);
    if v_room <= 0 then
      -- As asked above, by number: answered from the index of what is due, whatever the statistics say.
      if (select n.ix from {{schema}}.nodes n where n.run_id = p_run and n.due order by n.ix limit 1) is null then
        perform {{schema}}.write_items(p_run, 1000);
      end if;
      if v_active < v_run.at_once and not {{schema}}.is_budget_spent(v_run) and (select n.ix from {{schema}}.nodes n where n.run_id = p_run and n.due order by n.ix limit 1) is not null then
        perform pg_notify('{{schema}}_due', p_run::text);
      end if;
      exit;
    end if;
    v_take := array(select n.ix from {{schema}}.nodes n where n.run_id = p_run and n.due order by n.ix limit v_room);
    if v_take = '{}' then
      exit when {{schema}}.write_items(p_run, 1000) = 0;
      continue;
    end if;
    v_take := v_take[: {{schema}}.take_budget(v_run, cardinality(v_take))];
    exit when v_take = '{}';
    v_made := v_made + cardinality(v_take);
    select * into v_jobs from {{schema}}.make_ready(v_run, v_take);
    v_active := v_active + cardinality(v_jobs.ready);
    v_ready := v_ready || v_jobs.ready;
    v_closed := v_closed + cardinality(v_jobs.failed);
    perform {{schema}}.give_back_budget(v_run, cardinality(v_jobs.failed));
    v_failed := v_failed or v_jobs.failed <> '{}';
  end loop;
  if v_active <> v_run.active then
    update {{schema}}.runs r set active = v_active where r.id = p_run;
  end if;
  if p_epochs is not null then
    v_kinds := array_fill('ended'::text, array[cardinality(p_front)]);
    v_nodes := p_front;
    v_epochs := p_epochs;
    v_ns := array_fill(1, array[cardinality(p_front)]);
    v_statuses := p_statuses;
  end if;
  if v_ready <> '{}' then
    v_kinds := v_kinds || 'ready'::text;
    v_nodes := v_nodes || (select min(r.ix) from unnest(v_ready) r(ix));
    v_epochs := v_epochs || null::bigint;
    v_ns := v_ns || cardinality(v_ready);
    v_statuses := v_statuses || null::text;
  end if;
  if v_kinds <> '{}' or v_closed > 0 then
    perform {{schema}}.receipts(p_run, v_closed, v_kinds, v_nodes, v_epochs, v_ns, v_statuses);
  end if;
  return v_failed;
end $$;
comment on function {{schema}}.advance_map(uuid, integer[], bigint[], text[], integer, boolean) is
  'What advance does, for a map: in place of the items that have ended the next get their jobs, as far as at_once and one transaction allow. p_closed: how many of its jobs have ended with it. The caller holds the root lock.';

-- Children keep their items: what has succeeded stands, so that its item must be the one that it was given.
create function {{schema}}.reopen_map(p_run {{schema}}.runs, p_input jsonb) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_item text := (select p.map ->> 'item' from {{schema}}.plans p where p.hash = p_run.plan_hash);
  v_items integer := jsonb_array_length(p_input -> v_item);
  v_waiting integer;
  v_open integer;
begin
  if v_items < p_run.written or exists (
      select from jsonb_array_elements(p_input -> v_item) with ordinality i(item, ord)
        cross join lateral (select o.item, o.status from {{schema}}.nodes o where o.run_id = p_run.id and o.ix = i.ord - 1 limit 1) n
       where n.status = 'succeeded' and n.item <> i.item) then
    raise exception using errcode = 'WF034', message = format('map %s is to run again with other items than those that it has dealt with', p_run.id),
      hint = 'What it did for them stands; start a new run for the new list.';
  end if;
  update {{schema}}.nodes n set status = 'waiting', finished_at = null, error = null, due = true, item = i.item
    from jsonb_array_elements(p_input -> v_item) with ordinality i(item, ord)
    where n.run_id = p_run.id and n.ix = i.ord - 1 and n.status in ('failed', 'cancelled');
  get diagnostics v_waiting = row_count;
  update {{schema}}.runs r set items = v_items, wanted = v_items, active = 0, open_nodes = v_waiting + v_items - r.written where r.id = p_run.id
    returning r.open_nodes into v_open;
  if v_waiting = 0 then
    perform {{schema}}.write_items(p_run.id, 1);
  end if;
  if v_open = 0 then
    perform {{schema}}.settle_run(p_run.id, false);
  else
    perform pg_notify('{{schema}}_due', p_run.id::text);
  end if;
  return v_open;
end $$;
comment on function {{schema}}.reopen_map({{schema}}.runs, jsonb) is
  'What reopen_run does with the nodes of a map: those that have failed or were cancelled wait for their turn again, with the items that are given now, and those that had no node yet; the leader goes on. Answers how many. Refused (WF034) where an item that was dealt with has changed.';

-- Each failure with its error, up to a hundred of them; those behind in short.
create function {{schema}}.map_outcomes(p_map {{schema}}.runs) returns table (ix integer, status text, outcome jsonb)
  language sql stable security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
  select o.ix, o.status, jsonb_build_object('node', {{schema}}.node_name(0, o.name, o.ix), 'status', o.status, 'value', coalesce(o.result, 'null'), 'error', case
      when o.status = 'succeeded' then 'null' when o.nth <= 100 then o.error
      else jsonb_build_object('type', o.error -> 'type', 'message', left(o.error ->> 'message', 100)) end)
    from (select i.ix, i.status, i.result, i.error, k.name, count(*) filter (where i.status <> 'succeeded') over (order by i.ix) as nth
            from (select n.ix, n.status, n.result, coalesce(n.error, 'null') as error from {{schema}}.nodes n where n.run_id = p_map.id and n.ix < 1000000
                  union all
                  select n.ix, case n.status when 'succeeded' then 'failed' else n.status end, null, coalesce(n.error, n.item -> 'refused') from {{schema}}.nodes n
                   where p_map.pages > 0 and n.run_id = p_map.id and n.ix = 999999 + p_map.pages and (n.status <> 'succeeded' or n.item ? 'refused')
                  union all
                  select 1000000 + p_map.pages, 'cancelled', null, jsonb_build_object('type', 'Cancelled', 'message', 'it was not asked for') where p_map.pages is not null and {{schema}}.emit_word(p_map) = 'again'
                  union all
                  select g.ix, 'cancelled', null, jsonb_build_object('type', 'Cancelled', 'message', 'it had not begun') from generate_series(p_map.written, p_map.items - 1) g(ix)) i
            join {{schema}}.plan_nodes k on k.plan_hash = p_map.plan_hash and k.ix = i.ix / 1000000) o
$$;
comment on function {{schema}}.map_outcomes({{schema}}.runs) is 'What became of each item of a map, as the successors see it that collect; of an emit that had no last page also of the page that kept it from going on.';

create function {{schema}}.map_value(p_run uuid, p_expr jsonb, p_path text[]) returns jsonb
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_most integer := (select i.max_payload_bytes from {{schema}}.installation i);
  v_kind text := (select k from jsonb_object_keys(p_expr) k where k in ('results', 'outcomes', 'tally'));
  v_ix integer := (p_expr ->> v_kind)::int;
  v_node {{schema}}.nodes;
  v_map {{schema}}.runs;
  v_size bigint;
  v_value jsonb;
begin
  select * into v_node from {{schema}}.nodes n where n.run_id = p_run and n.ix = v_ix;
  select * into v_map from {{schema}}.runs c where c.parent_node = v_node.id and c.items is not null and c.counted_from is null;
  if v_kind = 'results' then
    if v_node.status <> 'succeeded' or v_map.id is null then
      return null;
    elsif p_path[1] ~ '^[0-9]{1,6}$' then
      return coalesce((select n.result #> p_path[2:] from {{schema}}.nodes n where n.run_id = v_map.id and n.ix = p_path[1]::int), 'null');
    end if;
    select sum(octet_length(n.result::text)) into v_size from {{schema}}.nodes n where n.run_id = v_map.id and n.ix < 1000000;
  elsif v_map.id is null then
    -- It has not begun: what became of it is all that there is to tell.
    v_value := jsonb_build_array({{schema}}.evaluate(p_run, jsonb_build_object('outcome', v_ix)));
    return coalesce(case v_kind when 'outcomes' then v_value else jsonb_build_object('total', 0, 'succeeded', 0, 'failed', 0, 'cancelled', 0, 'failures', v_value) end #> p_path, 'null');
  elsif v_kind = 'outcomes' then
    select sum(octet_length(o.outcome::text)) into v_size from {{schema}}.map_outcomes(v_map) o;
  else
    select jsonb_build_object('total', count(*) filter (where o.ix < 1000000), 'succeeded', count(*) filter (where o.status = 'succeeded' and o.ix < 1000000),
        'failed', count(*) filter (where o.status = 'failed' and o.ix < 1000000), 'cancelled', count(*) filter (where o.status = 'cancelled' and o.ix < 1000000), 'failures', coalesce((jsonb_agg(o.outcome order by o.ix) filter (where o.nth <= 100 and o.status <> 'succeeded')), '[]'))
      into v_value
      from (select m.ix, m.status, m.outcome, count(*) filter (where m.status <> 'succeeded') over (order by m.ix) as nth from {{schema}}.map_outcomes(v_map) m) o;
    return coalesce(v_value #> p_path, 'null');
  end if;
  if v_size > v_most then
    raise exception using errcode = 'WF033', message = format('the %s of the %s items of a map have %s bytes together, the limit is %s', v_kind, v_map.items, v_size, v_most),
      hint = 'Let each child store what it makes and return a reference to it, take tally() of them, or name the map in after= only.';
  elsif v_kind = 'results' then
    select coalesce(jsonb_agg(n.result order by n.ix), '[]') into v_value from {{schema}}.nodes n where n.run_id = v_map.id and n.ix < 1000000;
  else
    select coalesce(jsonb_agg(o.outcome order by o.ix), '[]') into v_value from {{schema}}.map_outcomes(v_map) o;
  end if;
  return coalesce(v_value #> p_path, 'null');
end $$;
comment on function {{schema}}.map_value(uuid, jsonb, text[]) is
  'What a map has come to, in the order of its items: results, outcomes or a tally, or a part of them; null (not the JSON null) for results where it has not succeeded. Larger than a payload may be: WF033.';

create view {{schema}}.map_progress as
  select n.run_id, n.ix, k.name, c.id as map_run, c.status, c.created_at, c.finished_at, c.items, c.at_once, c.items - c.written as unwritten,
         count(i.id) filter (where i.status = 'waiting')::int as waiting, count(i.id) filter (where i.status = 'ready')::int as active,
         count(i.id) filter (where i.status = 'succeeded')::int as succeeded, count(i.id) filter (where i.status = 'failed')::int as failed,
         count(i.id) filter (where i.status = 'cancelled')::int as cancelled, c.pages, case when c.pages is not null then coalesce({{schema}}.emit_word(c), 'asked') end as source
    from {{schema}}.runs c
    join {{schema}}.nodes n on n.id = c.parent_node
    join {{schema}}.runs r on r.id = n.run_id
    join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = {{schema}}.place_in_plan(r.items, n.ix)
    left join {{schema}}.nodes i on i.run_id = c.id and i.ix < 1000000
   where c.items is not null and c.counted_from is null
   group by n.run_id, n.ix, k.name, c.id;
comment on view {{schema}}.map_progress is
  'How far each map is: how many items it has, how many wait for their turn (unwritten: without a node yet), have jobs (active), and have ended how. Of an emit also how many pages were asked for, and how its source stands: one is asked for (asked), the next one is to be once few enough items are open (again), that was the last (done), or it cannot be taken (refused).';

-- Loops: a task, or a child run, round after round, until a part of what it gives says that it is done, or a bound on rounds or
-- on time is reached. A loop is a child run of the node that stands for it, as a map is: its plan has one node, which every
-- round is a node of. Each is written, with the state that it is given and its job, in the transaction that ends the round
-- before it. Time in which a round was held for a signal is on record in loop_holds, and does not count.

create table {{schema}}.loop_holds (
  run_id uuid not null,
  ix integer not null,
  job_id uuid not null,
  since timestamptz not null,
  until timestamptz,
  primary key (run_id, ix, job_id, since),
  check (until >= since)
);
create index loop_holds_open on {{schema}}.loop_holds (job_id) where until is null;
comment on table {{schema}}.loop_holds is 'When rounds of loops with a bound on time were held for a signal, or paused; kept as long as their run is.';
comment on column {{schema}}.loop_holds.run_id is 'The run of the loop.';
comment on column {{schema}}.loop_holds.ix is 'The round.';
comment on column {{schema}}.loop_holds.job_id is 'The job that was held: that of the round, or of a node of a run below it; or the run that was paused: the loop, or one below it.';
comment on column {{schema}}.loop_holds.since is 'From when on.';
comment on column {{schema}}.loop_holds.until is 'Until when; null while it is.';

-- The caller has locked the job, and nobody else writes the rows of it: so no lock of a run is needed.
create function {{schema}}.note_hold() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz := {{schema}}.now();
begin
  if tg_op = 'UPDATE' and new.status = 'held' and new.held_reason = 'signal' then
    insert into {{schema}}.loop_holds (run_id, ix, job_id, since)
      with recursive above as (
        select r.id, r.parent_run, r.parent_node, r.plan_hash, r.counted_from, new.id as node from {{schema}}.runs r where r.id = new.run_id
        union all
        select r.id, r.parent_run, r.parent_node, r.plan_hash, r.counted_from, a.parent_node from above a cross join lateral (select * from {{schema}}.runs o where o.id = a.parent_run limit 1) r)
      select a.id, (select n.ix from {{schema}}.nodes n where n.id = a.node), new.id, v_now
        from above a
       where a.counted_from is not null and (select p.loop ? 'within' from {{schema}}.plans p where p.hash = a.plan_hash)
      on conflict (run_id, ix, job_id, since) do update set until = null;
  else
    update {{schema}}.loop_holds h set until = greatest(v_now, h.since) where h.job_id = old.id and h.until is null;
  end if;
  return null;
end $$;
comment on function {{schema}}.note_hold() is 'Trigger: the job of a node is held for a signal, or is no more: the time does not count in the loops that it is in a round of.';
create trigger hold_noted after update of status on {{schema}}.jobs for each row
  when (new.run_id is not null and (new.status = 'held' and new.held_reason = 'signal') <> (old.status = 'held' and old.held_reason = 'signal'))
  execute function {{schema}}.note_hold();
create trigger hold_ended after delete on {{schema}}.jobs for each row
  when (old.run_id is not null and old.status = 'held' and old.held_reason = 'signal') execute function {{schema}}.note_hold();

-- Several may have been held at once: that is one time.
create function {{schema}}.held_in_round(p_run uuid, p_ix integer, p_from timestamptz) returns interval
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select coalesce(sum(upper(u.held) - lower(u.held)), '0')
    from (select unnest(range_agg(tstzrange(greatest(h.since, p_from), h.until))) as held
            from (select o.since, coalesce(o.until, {{schema}}.now()) as until from {{schema}}.loop_holds o where o.run_id = p_run and o.ix = p_ix) h
           where h.until > greatest(h.since, p_from)) u
$$;
comment on function {{schema}}.held_in_round(uuid, integer, timestamptz) is 'How long a round of a loop was held for signals, from an instant on.';

create function {{schema}}.loop_word(p_run {{schema}}.runs) returns text
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_loop jsonb := (select p.loop from {{schema}}.plans p where p.hash = p_run.plan_hash);
  v_last {{schema}}.nodes;
begin
  select * into v_last from {{schema}}.nodes n where n.run_id = p_run.id and n.ix = p_run.written - 1;
  return case
    when v_last.status is distinct from 'succeeded' then null
    when {{schema}}.loop_done(v_loop, v_last.result) then 'done'
    when p_run.written >= p_run.items then 'rounds'
    when {{schema}}.now() - p_run.counted_from - p_run.held - {{schema}}.held_in_round(p_run.id, v_last.ix, p_run.counted_from)
      >= make_interval(secs => (v_loop ->> 'within')::double precision) then 'time'
    else 'again' end;
end $$;
comment on function {{schema}}.loop_word({{schema}}.runs) is
  'What follows on the last round of a loop: nothing, since it is done, or its rounds or its time are used up (done, rounds, time), or another one (again). Null while that round has not succeeded.';

create function {{schema}}.loop_done(p_loop jsonb, p_result jsonb) returns boolean
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
  select exists (select from jsonb_array_elements(p_loop -> 'ends') e(value)
    where e.value = coalesce(p_result #> array(select jsonb_array_elements_text(p_loop -> 'path')), 'null'))
$$;
comment on function {{schema}}.loop_done(jsonb, jsonb) is 'Whether the result of a round ends its loop (plans.loop).';

create function {{schema}}.loop_exhausted(p_run {{schema}}.runs, p_word text, p_loop jsonb) returns jsonb
  language sql immutable set search_path = pg_catalog, pg_temp as $$
  -- Where its time was up when the last round ended, it is now, though the clock may have stepped back since.
  select jsonb_build_object('type', 'LoopExhausted', 'kind', case p_word when 'rounds' then 'rounds' else 'time' end, 'rounds', p_run.written,
    'message', case p_word when 'rounds' then format('the loop was not done after %s rounds, and may have no more', p_run.written)
      else format('the loop was not done within %s s, after %s rounds', p_loop ->> 'within', p_run.written) end)
$$;
comment on function {{schema}}.loop_exhausted({{schema}}.runs, text, jsonb) is 'What a loop fails with whose rounds, or whose time, are used up.';

create function {{schema}}.admit_loop(p_run {{schema}}.runs, p_node uuid, p_plan text, p_loop jsonb, p_input jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_loop {{schema}}.runs;
  v_failed boolean;
begin
  insert into {{schema}}.runs (created_at, open_nodes, receipts, workflow, plan_hash, input, meta, parent_run, parent_node, budget_of, depth, effect_depth, items, wanted, written, active, at_once, counted_from, held)
    select {{schema}}.now(), 1, p.receipts, p.workflow, p_plan, p_input - (p_loop ->> 'item'), p_run.meta, p_run.id, p_node, p_run.budget_of, p_run.depth + 1, p_run.effect_depth,
           (p_loop ->> 'most')::int, 1, 1, 0, 1, {{schema}}.now(), '0'
      from {{schema}}.plans p where p.hash = p_plan
    returning * into v_loop;
  insert into {{schema}}.nodes (id, run_id, ix, unmet, due, status, item) values ({{schema}}.new_id(), v_loop.id, 0, 0, true, 'waiting', p_input -> (p_loop ->> 'item'));
  perform {{schema}}.receipt(v_loop.id, 'admitted', null, null, 1, nullif(v_loop.status, 'running'));
  v_failed := {{schema}}.advance_loop(v_loop.id, '{}', null, null, 0, false);
  if v_failed then
    perform {{schema}}.ensure_today();
    perform {{schema}}.settle_run(v_loop.id, v_failed);
  end if;
end $$;
comment on function {{schema}}.admit_loop({{schema}}.runs, uuid, text, jsonb, jsonb) is
  'Starts the loop that a node stands for, with the job of its first round. The caller holds the root lock of the node''s run.';

-- What it does depends on the rows, and not on what has just ended: so healing a loop is the same.
create function {{schema}}.advance_loop(p_run uuid, p_front integer[], p_epochs bigint[], p_statuses text[], p_closed integer, p_failed boolean) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run {{schema}}.runs;
  v_due integer[];
  v_ready integer[] := '{}';
  v_unmade integer[] := '{}';
  v_kinds text[] := '{}';
  v_nodes integer[] := '{}';
  v_epochs bigint[] := '{}';
  v_statuses text[] := '{}';
begin
  select * into v_run from {{schema}}.runs r where r.id = p_run;
  -- What is being cancelled begins no more.
  if v_run.cancel_requested_at is null and v_run.stopping_at is null and {{schema}}.loop_word(v_run) = 'again' then
    insert into {{schema}}.nodes (id, run_id, ix, unmet, due, status, item)
      select {{schema}}.new_id(), p_run, n.ix + 1, 0, true, 'waiting', n.result from {{schema}}.nodes n where n.run_id = p_run and n.ix = v_run.written - 1;
    update {{schema}}.runs r set wanted = r.wanted + 1, written = r.written + 1, open_nodes = r.open_nodes + 1,
        held = r.held + {{schema}}.held_in_round(p_run, v_run.written - 1, r.counted_from) where r.id = p_run;
    if v_run.status = 'paused' then
      -- The pause goes on in the next round.
      with over as (
        update {{schema}}.loop_holds h set until = greatest({{schema}}.now(), h.since) where h.run_id = p_run and h.ix = v_run.written - 1 and h.job_id = p_run and h.until is null returning h.until)
      insert into {{schema}}.loop_holds (run_id, ix, job_id, since) select p_run, v_run.written, p_run, o.until from over o;
    end if;
  end if;
  v_due := array(select n.ix from {{schema}}.nodes n where n.run_id = p_run and n.due);
  if p_epochs is not null then
    v_kinds := array_fill('ended'::text, array[cardinality(p_front)]);
    v_nodes := p_front;
    v_epochs := p_epochs;
    v_statuses := p_statuses;
  end if;
  v_due := v_due[: {{schema}}.take_budget(v_run, cardinality(v_due))];
  if v_due <> '{}' then
    select m.ready, m.failed into v_ready, v_unmade from {{schema}}.make_ready(v_run, v_due) m;
    perform {{schema}}.give_back_budget(v_run, cardinality(v_unmade));
  end if;
  update {{schema}}.runs r set active = r.active - p_closed + cardinality(v_ready) where r.id = p_run;
  if v_ready <> '{}' then
    v_kinds := v_kinds || 'ready'::text;
    v_nodes := v_nodes || v_ready;
    v_epochs := v_epochs || null::bigint;
    v_statuses := v_statuses || null::text;
  end if;
  if v_kinds <> '{}' or v_unmade <> '{}' or p_closed > 0 then
    perform {{schema}}.receipts(p_run, p_closed + cardinality(v_unmade), v_kinds, v_nodes, v_epochs, array_fill(1, array[cardinality(v_kinds)]), v_statuses);
  end if;
  return p_failed or v_unmade <> '{}';
end $$;
comment on function {{schema}}.advance_loop(uuid, integer[], bigint[], text[], integer, boolean) is
  'What advance does, for a loop: the round that has ended is followed by the next, with the state that it gave, unless it was the last. The caller holds the root lock.';

-- Rounds that have succeeded stand; the bounds are counted anew, as the attempts of jobs are.
create function {{schema}}.reopen_loop(p_run {{schema}}.runs, p_input jsonb) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_loop jsonb := (select p.loop from {{schema}}.plans p where p.hash = p_run.plan_hash);
  v_start jsonb := coalesce(p_input -> (v_loop ->> 'item'), 'null');
  v_last {{schema}}.nodes;
  v_stand integer;
begin
  select * into v_last from {{schema}}.nodes n where n.run_id = p_run.id and n.ix = p_run.written - 1;
  v_stand := p_run.written - (v_last.status <> 'succeeded')::int;
  if v_stand > 0 and (select n.item from {{schema}}.nodes n where n.run_id = p_run.id and n.ix = 0) <> v_start then
    raise exception using errcode = 'WF034', message = format('loop %s is to run again from another start than the one that its rounds have gone on from', p_run.id),
      hint = 'What they did stands; start a new run for the new start.';
  end if;
  update {{schema}}.nodes n set status = 'waiting', finished_at = null, error = null, due = true, item = case when n.ix = 0 then v_start else n.item end
    where n.id = v_last.id and n.status <> 'succeeded';
  -- One that has succeeded is followed by the next; it was the last only by a bound, or a cancel.
  update {{schema}}.runs r set items = v_stand + (v_loop ->> 'most')::int, counted_from = {{schema}}.now(), held = '0', active = 0,
      open_nodes = (v_last.status <> 'succeeded')::int where r.id = p_run.id;
  perform {{schema}}.settle_run(p_run.id, {{schema}}.advance_loop(p_run.id, '{}', null, null, 0, false));
  return 1;
end $$;
comment on function {{schema}}.reopen_loop({{schema}}.runs, jsonb) is
  'What reopen_run does with a loop: the round that has failed runs again, or the next one where rounds or time were used up, which are counted anew. Refused (WF034) where the state to start from has changed, and rounds have gone on from it.';

create view {{schema}}.loop_progress as
  select n.run_id, n.ix, k.name, c.id as loop_run, c.status, c.created_at, c.finished_at, c.written as rounds, c.items as most_rounds, l.status as last_status,
         (p.loop ->> 'within')::double precision as within, extract(epoch from h.held)::double precision as held,
         extract(epoch from coalesce(c.finished_at, {{schema}}.now()) - c.counted_from - h.held)::double precision as counted, l.item as state
    from {{schema}}.runs c
    join {{schema}}.plans p on p.hash = c.plan_hash
    join {{schema}}.nodes n on n.id = c.parent_node
    join {{schema}}.runs r on r.id = n.run_id
    join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = {{schema}}.place_in_plan(r.items, n.ix)
    left join {{schema}}.nodes l on l.run_id = c.id and l.ix = c.written - 1
    cross join lateral (select c.held + {{schema}}.held_in_round(c.id, c.written - 1, c.counted_from) as held) h
   where c.counted_from is not null;
comment on view {{schema}}.loop_progress is
  'How far each loop is: how many rounds have begun and how many it may have, how the last one stands and the state that it was given; of its time (within, null for no limit) what counts, and what does not, since it was held for signals; in seconds.';

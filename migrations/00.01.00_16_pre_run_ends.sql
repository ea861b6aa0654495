-- How runs start, go on and end: admission, the ends of nodes, unhandled failures, cancelling, reopening, healing. Each is one
-- transaction under the root lock, so that whoever dies in the middle leaves nothing half done.

create function {{schema}}.emit_word(p_run {{schema}}.runs) returns text
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select case when p_run.pages = 0 then 'again' else (
    select case when n.status <> 'succeeded' or not n.item ? 'first' then null when n.item ? 'refused' then 'refused' when n.item -> 'last' = 'true' then 'done' else 'again' end
      from {{schema}}.nodes n where n.run_id = p_run.id and n.ix = 999999 + p_run.pages) end
$$;
comment on function {{schema}}.emit_word({{schema}}.runs) is
  'What follows on the last page of an emit: nothing, since it is the last (done), another one (again), or nothing before the run is reopened, since it cannot be taken (refused). Null while it has not succeeded.';

create function {{schema}}.has_unhandled(p_run {{schema}}.runs) returns boolean
  language sql stable security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
  select exists (select from {{schema}}.nodes n where n.run_id = p_run.id and n.status in ('failed', 'cancelled', 'blocked')
    and (select e.policy from {{schema}}.plan_edges e where e.plan_hash = p_run.plan_hash and e.source = n.ix and e.policy <> 'fail' limit 1) is null)
    or p_run.pages is not null and {{schema}}.emit_word(p_run) is not distinct from 'refused'
$$;
comment on function {{schema}}.has_unhandled({{schema}}.runs) is 'Whether a node has failed, was cancelled or is blocked, and no edge of it says what to do then; or a page could not be taken.';

create function {{schema}}.was_taken(p_run {{schema}}.runs, p_ix integer) returns boolean
  language sql stable security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
  select exists (select from {{schema}}.plan_edges e
      cross join lateral (select t.status from {{schema}}.nodes t where t.run_id = p_run.id and t.ix = e.target limit 1) t
    where e.plan_hash = p_run.plan_hash and e.source = p_ix and t.status = 'succeeded')
$$;
comment on function {{schema}}.was_taken({{schema}}.runs, integer) is 'Whether a node that waited for this one has succeeded, and so has dealt with whatever became of it.';

-- An end as effects see one: a run's row in the shape of a job's.
create function {{schema}}.as_owner(p_run {{schema}}.runs) returns {{schema}}.history
  language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_owner {{schema}}.history;
begin
  v_owner.id := p_run.id;
  v_owner.run_id := p_run.id;
  v_owner.task := p_run.workflow;
  v_owner.status := p_run.status;
  v_owner.generation := p_run.generation;
  v_owner.payload := p_run.input;
  v_owner.result := p_run.result;
  v_owner.error := p_run.error;
  v_owner.meta := p_run.meta;
  v_owner.finished_at := p_run.finished_at;
  return v_owner;
end $$;
comment on function {{schema}}.as_owner({{schema}}.runs) is 'A run as the owner of terminal effects.';

create function {{schema}}.promised_by_run(p_intent {{schema}}.effect_intents, out owner {{schema}}.history, out effects jsonb, out prefix text, out line text)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_run {{schema}}.runs;
  v_node record;
begin
  select * into v_run from {{schema}}.runs r where r.id = p_intent.owner_job_id;
  if found then
    owner := {{schema}}.as_owner(v_run);
    select p.effects into effects from {{schema}}.plans p where p.hash = v_run.plan_hash;
  elsif p_intent.name ~ '^compensate:[0-9]+:' then
    -- What an item of a map did is undone by the run that the map is a node of.
    select n.id, o.id as run_id, n.result, n.finished_at, coalesce(i.job, k.job) ->> 'task' as task, k.compensate into v_node
      from {{schema}}.nodes n join {{schema}}.runs r on r.id = n.run_id
      left join {{schema}}.nodes m on m.id = r.parent_node and r.items is not null
      left join {{schema}}.plan_nodes i on m.id is not null and i.plan_hash = r.plan_hash and i.ix = 0
      join {{schema}}.runs o on o.id = coalesce(m.run_id, r.id)
      join {{schema}}.plan_nodes k on k.plan_hash = o.plan_hash and k.ix = coalesce(m.ix, n.ix)
     where n.id = p_intent.owner_job_id;
    if found then
      owner := {{schema}}.node_as_owner(v_node.id, v_node.task, v_node.result, v_node.finished_at);
      effects := jsonb_build_array(v_node.compensate || jsonb_build_object('on', jsonb_build_array('succeeded')));
      prefix := substring(p_intent.name from '^compensate:[0-9]+:');
      line := 'run:' || v_node.run_id;
    end if;
  end if;
end $$;
comment on function {{schema}}.promised_by_run({{schema}}.effect_intents) is 'Of an intent that a run made: its owner, what was promised, and how its job is made. Nulls for one of a plain job.';

create function {{schema}}.node_as_owner(p_node uuid, p_task text, p_result jsonb, p_finished_at timestamptz) returns {{schema}}.history
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_owner {{schema}}.history;
begin
  select h.* into v_owner from {{schema}}.history h where h.id = p_node and h.finished_at = p_finished_at;
  if v_owner.id is null then
    -- Retention has its arguments: what is known of it must do, or the promise is on record as broken.
    v_owner.id := p_node;
    v_owner.run_id := (select n.run_id from {{schema}}.nodes n where n.id = p_node);
    v_owner.task := p_task;
    v_owner.status := 'succeeded';
    v_owner.generation := 0;
    v_owner.payload := '{}';
    v_owner.result := p_result;
    v_owner.finished_at := p_finished_at;
  end if;
  return v_owner;
end $$;
comment on function {{schema}}.node_as_owner(uuid, text, jsonb, timestamptz) is 'A node that has succeeded as the owner of its compensation: its row of history, or what is left of it.';

create function {{schema}}.undone(p_run {{schema}}.runs, p_nodes uuid[]) returns table (id uuid, task text, compensate jsonb, result jsonb, finished_at timestamptz)
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select n.id, coalesce(m.task, k.job ->> 'task'), k.compensate, n.result, n.finished_at
    from unnest(p_nodes) with ordinality u(id, place)
    cross join lateral (select * from {{schema}}.nodes o where o.id = u.id limit 1) n
    left join lateral (
      select o.ix, (select i.job ->> 'task' from {{schema}}.plan_nodes i where i.plan_hash = c.plan_hash and i.ix = 0) as task
        from {{schema}}.runs c cross join lateral (select a.ix from {{schema}}.nodes a where a.id = c.parent_node limit 1) o
       where c.id = n.run_id and n.run_id <> p_run.id limit 1) m on true
    cross join lateral (select * from {{schema}}.plan_nodes l where l.plan_hash = p_run.plan_hash and l.ix = coalesce(m.ix, n.ix) limit 1) k
   order by u.place
$$;
comment on function {{schema}}.undone({{schema}}.runs, uuid[]) is 'Of nodes that are to be compensated: what by, and what their bodies returned; in the order given.';

-- The last first: one after another, under an ordering key of the run's. All at once, since each by itself would write that
-- key anew, and walk over what those before it wrote: 2,000 took 31 s. One by one if one of them is broken, to find out which.
-- With hash joins, which enqueue_many needs for as many specs as jobs.
create function {{schema}}.compensate(p_run {{schema}}.runs) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = on set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_prefix text := format('compensate:%s:', p_run.generation);
  v_line text := 'run:' || p_run.id;
  -- Of a map the items, whatever became of the rest of it. No anti-join: it would be served by the ids of all nodes there are.
  v_undone uuid[] := array(
    select u.id from (
        select n.id, n.finished_at, n.ix, 0 as item from {{schema}}.nodes n
          cross join lateral (select l.compensate from {{schema}}.plan_nodes l where l.plan_hash = p_run.plan_hash and l.ix = n.ix limit 1) k
         where n.run_id = p_run.id and p_run.items is null and n.status = 'succeeded' and k.compensate is not null
           and (select c.id from {{schema}}.runs c where c.parent_node = n.id and c.items is not null limit 1) is null
        union all
        select i.id, i.finished_at, n.ix, i.ix from {{schema}}.runs c
          cross join lateral (select o.ix from {{schema}}.nodes o where o.id = c.parent_node limit 1) n
          cross join lateral (select l.compensate from {{schema}}.plan_nodes l where l.plan_hash = p_run.plan_hash and l.ix = n.ix limit 1) k
          cross join lateral (select o.id, o.finished_at, o.ix from {{schema}}.nodes o where o.run_id = c.id and o.status = 'succeeded' and o.ix < 1000000 offset 0) i
         where c.parent_run = p_run.id and c.items is not null and p_run.items is null and k.compensate is not null) u
     order by u.finished_at desc, u.ix desc, u.item desc);
  v_node record;
  v_owner {{schema}}.history;
  v_generations integer[] := '{}';
  v_tasks text[] := '{}';
  v_name text;
  v_names text[] := '{}';
  v_effects jsonb[] := '{}';
  v_specs jsonb[] := '{}';
  v_payloads jsonb[] := '{}';
  v_jobs uuid[];
begin
  if v_undone = '{}' then
    return;
  end if;
  begin
    if p_run.effect_depth >= 8 then
      raise exception using errcode = 'WF009', message = 'the chain of effects is too long', hint = 'Each is refused below, on record.';
    end if;
    for v_node in select * from {{schema}}.undone(p_run, v_undone) loop
      v_owner := {{schema}}.node_as_owner(v_node.id, v_node.task, v_node.result, v_node.finished_at);
      v_generations := array_append(v_generations, v_owner.generation);
      v_tasks := array_append(v_tasks, v_node.task);
      -- Apart: an array that grows in a statement with a query in it is copied each time.
      select left(v_prefix || e.name, 128) into v_name from {{schema}}.effect_specs(jsonb_build_array(v_node.compensate)) e;
      v_names := array_append(v_names, v_name);
      v_effects := array_append(v_effects, v_node.compensate);
      v_specs := array_append(v_specs, {{schema}}.effect_job_spec(v_owner, v_node.compensate,
        format('%s:%s:%s', v_owner.id, v_owner.generation, v_name), v_line));
      v_payloads := array_append(v_payloads, {{schema}}.effect_payload(v_node.compensate -> 'payload', v_owner));
    end loop;
    v_jobs := array(
      select e.job_id from {{schema}}.enqueue_many(to_jsonb(v_specs), array(select generate_series(1, cardinality(v_specs))), v_payloads::text[],
        p_ordering_key => array_fill(v_line, array[cardinality(v_specs)])) e order by e.ord);
    insert into {{schema}}.effect_intents (id, effect_key, owner_job_id, owner_task, generation, name, status, task, job_id, fingerprint, depth, undoes, created_at)
      select {{schema}}.new_id(), format('%s:%s:%s', u.id, u.generation, u.name), u.id, u.task, u.generation, u.name, 'succeeded', u.effect ->> 'task',
             u.job, {{schema}}.effect_fingerprint(u.effect ->> 'task', u.payload), p_run.effect_depth + 1, coalesce(u.effect -> 'undoes' = 'true', false), {{schema}}.now()
        from unnest(v_undone, v_tasks, v_generations, v_names, v_effects, v_payloads, v_jobs) with ordinality u(id, task, generation, name, effect, payload, job, place)
       order by u.place;
  exception when others then
    if not {{schema}}.is_broken(sqlstate) then
      raise;
    end if;
    for v_node in select * from {{schema}}.undone(p_run, v_undone) loop
      perform {{schema}}.promise_these({{schema}}.node_as_owner(v_node.id, v_node.task, v_node.result, v_node.finished_at),
        jsonb_build_array(v_node.compensate || jsonb_build_object('on', jsonb_build_array('succeeded'))), v_prefix, v_line);
    end loop;
  end;
end $$;
comment on function {{schema}}.compensate({{schema}}.runs) is 'Promises the compensations of a run that has failed or was cancelled, the last node''s first. The caller holds the root lock.';

create function {{schema}}.finish_run(p_run uuid) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run {{schema}}.runs;
  v_plan {{schema}}.plans;
  v_status text;
  v_word text;
  v_result jsonb;
  v_error jsonb;
  v_node record;
begin
  select * into v_run from {{schema}}.runs r where r.id = p_run;
  select * into v_plan from {{schema}}.plans p where p.hash = v_run.plan_hash;
  v_word := case when v_run.counted_from is not null then {{schema}}.loop_word(v_run) when v_run.pages is not null then {{schema}}.emit_word(v_run) end;
  v_status := case
    when v_run.cancel_requested_at is not null and ((v_run.wanted < v_run.items or v_run.pages is not null) and v_word is distinct from 'done' or exists (select from {{schema}}.nodes n where n.run_id = p_run and n.status = 'cancelled')) then 'cancelled'
    when {{schema}}.has_unhandled(v_run) then 'failed' else 'succeeded' end;
  if v_status = 'succeeded' and v_run.counted_from is not null then
    v_result := (select n.result from {{schema}}.nodes n where n.run_id = p_run and n.ix = v_run.written - 1);
    if v_word <> 'done' and v_plan."loop" ->> 'exhausted' = 'fail' then
      v_status := 'failed';
      v_error := {{schema}}.loop_exhausted(v_run, v_word, v_plan."loop");
      v_result := null;
    end if;
  elsif v_status = 'succeeded' then
    begin
      -- Of a map how many there are: who takes their results takes them from their nodes.
      v_result := coalesce(to_jsonb(v_run.items), {{schema}}.evaluate(p_run, v_plan.result), 'null');
    exception when others then
      -- The end of the last node stands, whatever is wrong with what the run makes of it.
      if not {{schema}}.is_broken(sqlstate) then
        raise;
      end if;
      v_status := 'failed';
      v_error := jsonb_build_object('type', coalesce({{schema}}.map_fault(sqlstate), 'ResultNotMade'), 'message', left(format('all of it is done, and its result could not be made: %s', sqlerrm), 2000), 'sqlstate', sqlstate);
    end;
  end if;
  if v_status = 'cancelled' and v_error is null then
    v_error := jsonb_build_object('type', 'Cancelled', 'message', left('cancelled on request' || coalesce(': ' || v_run.cancel_reason, ''), 2000), 'reason', v_run.cancel_reason);
  elsif v_status = 'failed' and v_error is null and v_run.pages is not null and v_word = 'refused' then
    v_error := (select n.item -> 'refused' from {{schema}}.nodes n where n.run_id = p_run and n.ix = 999999 + v_run.pages);
  elsif v_status = 'failed' and v_error is null then
    -- The first failure that nothing handles, be it that of a node or of what blocks one.
    with unhandled as materialized (
      select distinct coalesce(u.blocked_by, u.ix) as ix from {{schema}}.nodes u where u.run_id = p_run and u.status in ('failed', 'cancelled', 'blocked')
         and (select e.policy from {{schema}}.plan_edges e where e.plan_hash = v_run.plan_hash and e.source = u.ix and e.policy <> 'fail' limit 1) is null)
    select (select {{schema}}.node_name(v_run.items, k.name, n.ix) from {{schema}}.plan_nodes k where k.plan_hash = v_run.plan_hash and k.ix = {{schema}}.place_in_plan(v_run.items, n.ix)) as name,
           n.status, n.error into v_node
      from unhandled x cross join lateral (select * from {{schema}}.nodes o where o.run_id = p_run and o.ix = x.ix limit 1) n
     order by n.status = 'cancelled', n.finished_at, n.ix limit 1;
    v_error := jsonb_build_object('type', 'RunFailed', 'message', left(format('node %s %s: %s', v_node.name,
        case v_node.status when 'failed' then 'has failed' else 'was cancelled' end, coalesce(v_node.error ->> 'message', v_node.error ->> 'type')), 2000),
      'node', v_node.name, 'cause', v_node.error);
  end if;
  if v_run.status = 'paused' then
    delete from {{schema}}.run_pauses p where p.run_id = p_run;
    update {{schema}}.loop_holds h set until = greatest({{schema}}.now(), h.since) where h.job_id = p_run and h.until is null;
  end if;
  update {{schema}}.runs r set status = v_status, finished_at = {{schema}}.now(), result = v_result, error = v_error where r.id = p_run returning * into v_run;
  perform {{schema}}.receipt(p_run, 'finished', null, null, 1, v_status);
  perform {{schema}}.promise_these({{schema}}.as_owner(v_run), v_plan.effects, '', null);
  if v_status <> 'succeeded' then
    perform {{schema}}.compensate(v_run);
  end if;
  if v_run.parent_node is not null then
    perform {{schema}}.release_parent(v_run);
  end if;
  if v_run.started_by is not null then
    perform {{schema}}.tell_parent(v_run.started_by, null, p_run);
  end if;
end $$;
comment on function {{schema}}.finish_run(uuid) is 'Ends a run none of whose nodes is open, with its effects and compensations. The caller holds the root lock.';

-- Cancels what waits, and asks what runs. An unknown outcome stays to be decided, and is then cancelled if it did not happen.
-- Child runs are stopped with it, but for those that somebody else is at: the caller may hold jobs, and waits for no run. They
-- are stopped a moment later, by stop_children. Of a paused run none may be busy: this is sent again then. A child run that is
-- just ending leaves the job that waited for it held, and nobody would find that. A node whose child run is not over, or has succeeded, is not cancelled over it.
create function {{schema}}.stop_rest(p_run uuid, p_error jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_job record;
  v_n integer;
  v_first integer;
  v_ids uuid[];
  v_waiting uuid[];
  v_child uuid;
begin
  if exists (select from {{schema}}.runs r where r.id = p_run and r.status = 'paused') then
    perform from {{schema}}.runs c where c.parent_run = p_run and c.finished_at is null order by c.id for update nowait;
    perform {{schema}}.lift_pauses(array[p_run]);
  end if;
  update {{schema}}.nodes n set status = 'cancelled', finished_at = {{schema}}.now(), error = p_error, due = false where n.run_id = p_run and n.status = 'waiting';
  get diagnostics v_n = row_count;
  -- The items of a map that have no node get none.
  update {{schema}}.runs r set open_nodes = r.open_nodes - v_n - coalesce(r.wanted - r.written, 0), wanted = r.written where r.id = p_run;
  foreach v_child in array array(
      select c.id from {{schema}}.runs c where c.parent_run = p_run and c.finished_at is null order by c.id for update skip locked) loop
    perform {{schema}}.stop_run(v_child, p_error);
  end loop;
  v_ids := array(select n.id from {{schema}}.nodes n where n.run_id = p_run and n.status = 'ready'
    and (select c.id from {{schema}}.runs c where c.parent_node = n.id and (c.finished_at is null or c.status = 'succeeded') limit 1) is null);
  perform from {{schema}}.jobs j where j.id = any(v_ids) order by j.id for update;
  v_waiting := array(select j.id from {{schema}}.jobs j where j.id = any(v_ids) and j.status in ('pending', 'held') order by j.id);
  -- Their nodes first and at once: each end by itself would write the run anew, and thousands of them take minutes.
  with gone as (
    update {{schema}}.nodes n set status = 'cancelled', finished_at = {{schema}}.now(), error = p_error,
        claim_epoch = (select j.claim_epoch from {{schema}}.jobs j where j.id = n.id)
      where n.id = any(v_waiting) returning n.ix)
  select count(*), min(g.ix) into v_n, v_first from gone g;
  if v_n > 0 then
    update {{schema}}.runs r set open_nodes = r.open_nodes - v_n, active = r.active - v_n where r.id = p_run;
    perform {{schema}}.receipt(p_run, 'ended', v_first, null, v_n, 'cancelled');
    perform {{schema}}.finish_many(v_waiting, 'cancelled', p_error);
  end if;
  for v_job in
    update {{schema}}.jobs j set cancel_requested_at = coalesce(j.cancel_requested_at, {{schema}}.now()) where j.id = any(v_ids)
      returning j.id, j.status, j.claimed_by, j.claim_epoch
  loop
    if v_job.status = 'running' then
      perform pg_notify('{{schema}}_cancel', v_job.claimed_by || ' ' || v_job.id || ' ' || v_job.claim_epoch);
    end if;
  end loop;
end $$;
comment on function {{schema}}.stop_rest(uuid, jsonb) is 'Cancels the waiting nodes of a run and what of its jobs has not started; what runs is asked to. A pause of it is over. The caller holds the root lock.';

create function {{schema}}.settle_run(p_run uuid, p_failed boolean) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run {{schema}}.runs;
begin
  select * into v_run from {{schema}}.runs r where r.id = p_run;
  if p_failed and v_run.finished_at is null and v_run.stopping_at is null and v_run.cancel_requested_at is null and v_run.open_nodes > 0
     and (select p.on_failure from {{schema}}.plans p where p.hash = v_run.plan_hash) = 'cancel' and {{schema}}.has_unhandled(v_run) then
    update {{schema}}.runs r set stopping_at = {{schema}}.now() where r.id = p_run;
    perform {{schema}}.stop_rest(p_run, jsonb_build_object('type', 'Cancelled', 'message', 'another node of its run has failed'));
    select * into v_run from {{schema}}.runs r where r.id = p_run;
  end if;
  if v_run.open_nodes = 0 and v_run.finished_at is null then
    perform {{schema}}.finish_run(p_run);
  end if;
end $$;
comment on function {{schema}}.settle_run(uuid, boolean) is 'After a transition: stops the rest of a run that is bound to fail, and ends one that has nothing open. The caller holds the root lock.';

create function {{schema}}.stop_run(p_run uuid, p_error jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  update {{schema}}.runs r set cancel_requested_at = {{schema}}.now(), cancel_reason = coalesce(p_error ->> 'reason', p_error ->> 'message')
    where r.id = p_run and r.cancel_requested_at is null;
  if found then
    perform {{schema}}.receipt(p_run, 'cancel_requested');
  end if;
  perform {{schema}}.stop_rest(p_run, p_error);
  -- The end of its last job has ended the run already.
  if exists (select from {{schema}}.runs r where r.id = p_run and r.finished_at is null) then
    perform {{schema}}.settle_run(p_run, false);
  end if;
end $$;
comment on function {{schema}}.stop_run(uuid, jsonb) is 'Cancels a run that is live, with its child runs. The caller holds the root lock.';

-- Called once for each row, and does all of them at the first: what one statement has ended of a run goes on as one, so that
-- a run with many members is not carried on for each of them. Called from within end_attempts, whose settings would have it
-- read whole tables.
create function {{schema}}.node_ended() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run {{schema}}.runs;
  v_ids uuid[];
  v_ended integer[];
  v_epochs bigint[];
  v_statuses text[];
  v_failed boolean;
begin
  if not exists (select from {{schema}}.nodes n where n.id = new.id and (n.run_id = new.run_id) is true and n.status = 'ready') then
    return null;
  end if;
  select * into v_run from {{schema}}.runs r where r.id = new.run_id for update;
  -- A job of a release that knew no run epochs never runs, and is its node's all the same: cancelling it ends the node.
  new.run_epoch := coalesce(new.run_epoch, v_run.run_epoch);
  if v_run.finished_at is not null or v_run.run_epoch is distinct from new.run_epoch then
    return null;
  end if;
  -- Their ids first: joined by itself, history had all nodes of all runs walked over while the tables were believed to be empty.
  v_ids := array(
    select h.id from {{schema}}.history h
     where h.run_id = new.run_id and h.finished_at = new.finished_at and coalesce(h.run_epoch, v_run.run_epoch) = new.run_epoch);
  with ended as (
    update {{schema}}.nodes n set status = h.status, finished_at = h.finished_at, claim_epoch = h.claim_epoch, error = h.error,
        result = case h.status when 'succeeded' then coalesce(h.result, 'null') end
      from unnest(v_ids) u(id)
      cross join lateral (select * from {{schema}}.history o where o.id = u.id and o.finished_at = new.finished_at limit 1) h
     where n.id = any(v_ids) and n.id = u.id and n.status = 'ready'
    returning n.ix, n.claim_epoch, n.status)
  select array_agg(e.ix order by e.ix), array_agg(e.claim_epoch order by e.ix), array_agg(e.status order by e.ix), bool_or(e.status <> 'succeeded')
    into v_ended, v_epochs, v_statuses, v_failed from ended e;
  if v_ended is null then
    return null;
  end if;
  if v_run.status = 'recovering' then
    perform {{schema}}.show_recovery(v_run.id);
  end if;
  v_failed := {{schema}}.advance(v_run, v_ended, v_epochs, v_statuses, cardinality(v_ended), v_failed);
  perform {{schema}}.settle_run(v_run.id, v_failed);
  return null;
end $$;
comment on function {{schema}}.node_ended() is 'Trigger: the job of a node has ended, in whatever way, and its run goes on with it.';
create trigger run_goes_on after insert on {{schema}}.history for each row
  when (new.run_id is not null) execute function {{schema}}.node_ended();

create function {{schema}}.live_status(p_run uuid) returns text
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
begin
  -- From what is unknown, which is little: a run may have many nodes.
  return case when exists (select from {{schema}}.jobs j where j.status = 'unknown' and j.run_id = p_run) then 'recovering' else 'running' end;
end $$;
comment on function {{schema}}.live_status(uuid) is 'The status of a run that goes on: recovering while the outcome of a node is unknown, else running.';

create function {{schema}}.show_recovery(p_run uuid) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  update {{schema}}.runs r set status = {{schema}}.live_status(p_run) where r.id = p_run and r.status in ('running', 'recovering') and r.status <> {{schema}}.live_status(p_run);
end $$;
comment on function {{schema}}.show_recovery(uuid) is 'Sets the status of a run that goes on, and is not paused, by what of it is unknown. The caller holds the root lock.';

-- What else happens to the attempt of a node, on the run's record.
create function {{schema}}.node_noted() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform from {{schema}}.runs r where r.id = new.run_id for update;
  perform {{schema}}.receipt(new.run_id, case when new.status = 'unknown' then 'unknown' when old.status = 'unknown' then 'resolved' else 'lost' end,
    (select n.ix from {{schema}}.nodes n where n.id = new.id), new.claim_epoch);
  if 'unknown' in (old.status, new.status) then
    perform {{schema}}.show_recovery(new.run_id);
  end if;
  return null;
end $$;
comment on function {{schema}}.node_noted() is 'Trigger: an attempt of a node was lost, became unknown, was decided not to have happened, or has told late that it goes on.';
create trigger run_notes after update of status on {{schema}}.jobs for each row
  when (new.run_id is not null and ((new.status = 'unknown') <> (old.status = 'unknown') or new.recoveries > old.recoveries)) execute function {{schema}}.node_noted();

create function {{schema}}.admit_run(p_plan text, p_input jsonb, p_key text, p_meta jsonb, p_started_by uuid, p_parent {{schema}}.runs, p_node uuid) returns table (run_id uuid, created boolean)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  v_plan {{schema}}.plans;
  v_run {{schema}}.runs;
  v_ids uuid := {{schema}}.new_id();
  v_failed boolean;
begin
  select * into v_plan from {{schema}}.plans p where p.hash = p_plan;
  if not found then
    raise exception using errcode = 'WF024', message = format('there is no plan %L', p_plan), hint = 'Store it first, in a transaction of its own: store_plan.';
  end if;
  if jsonb_typeof(p_input) is distinct from 'object' or octet_length(p_input::text) > (select i.max_payload_bytes from {{schema}}.installation i)
     or p_key is not null and not {{schema}}.valid_name(p_key) or p_meta is not null and (jsonb_typeof(p_meta) <> 'object' or octet_length(p_meta::text) > 65536) then
    raise exception using errcode = 'WF009', message = 'the run cannot be admitted: input, key or meta is not valid',
      hint = 'The input is a JSON object within the size of a payload, the key is 1 to 128 printable ASCII characters without spaces, meta an object of at most 65536 bytes.';
  end if;
  loop
    insert into {{schema}}.runs (created_at, open_nodes, receipts, workflow, plan_hash, run_key, input, meta, started_by, parent_run, parent_node, budget_of, depth, effect_depth)
      values ({{schema}}.now(), v_plan.nodes, v_plan.receipts, v_plan.workflow, p_plan, p_key, p_input, p_meta, p_started_by,
        p_parent.id, p_node, p_parent.budget_of, coalesce(p_parent.depth + 1, 0),
        coalesce(p_parent.effect_depth, (select i.depth from {{schema}}.effect_intents i where i.job_id = p_started_by), 0))
      on conflict (workflow, run_key) where run_key is not null do nothing returning * into v_run;
    exit when v_run.id is not null;
    select * into v_run from {{schema}}.runs r where r.workflow = v_plan.workflow and r.run_key = p_key;
    continue when not found;
    if v_run.plan_hash <> p_plan or v_run.input <> p_input then
      raise exception using errcode = 'WF022', message = format('run key %L of workflow %s was used for run %s, with another %s', p_key, v_plan.workflow, v_run.id,
          case when v_run.input <> p_input then 'input' else 'plan' end),
        detail = jsonb_build_object('run_id', v_run.id, 'run_key', p_key, 'status', v_run.status)::text,
        hint = 'The same key must come with the same plan and input; use a new key for a new run.';
    end if;
    return query select v_run.id, false;
    return;
  end loop;
  if v_plan.work_budget is not null then
    update {{schema}}.runs r set budget_of = r.id where r.id = v_run.id and r.budget_of is null;
    select * into v_run from {{schema}}.runs r where r.id = v_run.id;
    perform {{schema}}.open_budget(v_run, v_plan.work_budget);
  end if;
  insert into {{schema}}.nodes (id, run_id, ix, unmet, due, status)
    select {{schema}}.ids_from(v_ids, k.ix), v_run.id, k.ix, k.waits_for, k.waits_for = 0, 'waiting' from {{schema}}.plan_nodes k where k.plan_hash = p_plan order by k.ix;
  perform {{schema}}.receipt(v_run.id, 'admitted', null, null, v_plan.nodes, nullif(v_run.status, 'running'));
  v_failed := {{schema}}.advance(v_run, '{}', null, null, 0, false);
  if v_failed or exists (select from {{schema}}.runs r where r.id = v_run.id and r.open_nodes = 0) then
    -- What has a job already may be cancelled, and so needs its day in history.
    perform {{schema}}.ensure_today();
    perform {{schema}}.settle_run(v_run.id, v_failed);
  end if;
  return query select v_run.id, true;
end $$;
comment on function {{schema}}.admit_run(text, jsonb, text, jsonb, uuid, {{schema}}.runs, uuid) is 'Admits a run: of its own (start_run), or as the child of a node, whose run''s root lock the caller holds.';

create function {{schema}}.start_run(p_plan text, p_input jsonb, p_key text default null, p_meta jsonb default null, p_started_by uuid default null) returns table (run_id uuid, created boolean)
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  select a.run_id, a.created from {{schema}}.admit_run(p_plan, p_input, p_key, p_meta, p_started_by, null, null) a
$$;
comment on function {{schema}}.start_run(text, jsonb, text, jsonb, uuid) is
  'Admits a run of a stored plan, in the caller''s transaction. Under a run key the same plan and input answer with the run that is there (created is false); anything else under that key is refused (WF022). p_started_by: the job that starts it, if one does.';

create function {{schema}}.cancel_run(run_id uuid, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_variable
declare
  v_run {{schema}}.runs;
  v_answer text;
begin
  perform {{schema}}.ensure_today();
  perform {{schema}}.lock_trees('{}', array[run_id]);
  select * into v_run from {{schema}}.runs r where r.id = run_id for update;
  if not found then
    return 'not_found';
  elsif v_run.finished_at is not null then
    return 'finished';
  end if;
  if v_run.cancel_requested_at is null then
    update {{schema}}.runs r set cancel_requested_at = {{schema}}.now(), cancel_reason = reason where r.id = run_id;
    perform {{schema}}.receipt(run_id, 'cancel_requested');
  end if;
  perform {{schema}}.stop_run(run_id, jsonb_build_object('type', 'Cancelled', 'message', 'its run was cancelled', 'reason', reason));
  select case when r.finished_at is null then 'requested' else r.status end into v_answer from {{schema}}.runs r where r.id = run_id;
  perform {{schema}}.note('cancel_run', run_id::text, actor, reason, jsonb_build_object('answer', v_answer));
  return v_answer;
end $$;
comment on function {{schema}}.cancel_run(uuid, text, text) is
  'Cancels a run with all that waits of it and of its child runs, in one transaction; what runs is asked to. Answers cancelled, requested (jobs of it still run, or are unknown), finished or not_found.';

-- The whole tree is looked at before anything moves: what is found later only fails a node.
create function {{schema}}.may_reopen(p_run {{schema}}.runs) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_owners uuid[];
  v_intents uuid[];
  v_open text;
  v_child {{schema}}.runs;
begin
  if p_run.status not in ('failed', 'cancelled') then
    raise exception using errcode = 'WF026', message = format('run %s is %s; only one that has failed or was cancelled is retried', p_run.id, p_run.status),
      detail = jsonb_build_object('run_id', p_run.id, 'status', p_run.status)::text,
      hint = case p_run.status when 'succeeded' then 'Start a new run to do the work again.'
        when 'paused' then format('It is paused: taskq runs resume %s, or grant what holds it up: taskq incidents list --run %s.', p_run.id, p_run.id) else 'Wait for its end, or cancel it first.' end;
  end if;
  -- Locked and written, as reopening does with those of the run itself: nobody reopens a compensation meanwhile.
  v_owners := array(select n.id from {{schema}}.nodes n where n.run_id = p_run.id
    union all select i.id from {{schema}}.runs c cross join lateral (select o.id from {{schema}}.nodes o where o.run_id = c.id offset 0) i where c.parent_run = p_run.id and c.items is not null) || p_run.id;
  v_intents := array(
    select i.id from (select o.id from {{schema}}.effect_intents o
       where o.owner_job_id = any(v_owners) and o.name like 'compensate:' || p_run.generation || ':%' offset 0) i order by i.id);
  perform from unnest(v_intents) u(id) cross join lateral (select from {{schema}}.effect_intents i where i.id = u.id limit 1 for update) l;
  update {{schema}}.effect_intents i set created_at = i.created_at where i.id = any(v_intents);
  select string_agg(format('%s (%s)', e.name, e.status), ', ' order by e.name) into v_open
    from {{schema}}.effects e
   where e.owner_job_id = any(v_owners) and (
         e.owner_job_id = p_run.id and e.generation = p_run.generation and not e.settled
      or e.id = any(v_intents) and (not e.settled or e.settled_how = 'succeeded')
      -- What a node that is to run again promised for its own end.
      or not e.settled and e.owner_job_id in (
        select n.id from {{schema}}.nodes n where n.run_id = p_run.id and n.status in ('failed', 'cancelled') and not {{schema}}.was_taken(p_run, n.ix)));
  if v_open is not null then
    raise exception using errcode = 'WF026', message = format('run %s has effects that are not settled, or compensations that have undone its work: %s', p_run.id, v_open),
      detail = jsonb_build_object('run_id', p_run.id, 'status', p_run.status)::text,
      hint = 'Cancel their jobs or settle them first (taskq effects list); what was compensated needs a new run.';
  end if;
  for v_child in
    select c.* from (select * from {{schema}}.runs o where o.parent_run = p_run.id and o.status in ('failed', 'cancelled') offset 0) c
      cross join lateral (select o.ix, o.status from {{schema}}.nodes o where o.id = c.parent_node limit 1) n
     where n.status in ('failed', 'cancelled') and not {{schema}}.was_taken(p_run, n.ix)
     order by c.id
  loop
    perform {{schema}}.may_reopen(v_child);
  end loop;
end $$;
comment on function {{schema}}.may_reopen({{schema}}.runs) is
  'Refuses (WF026) to reopen a run that has not failed, or whose effects, or those of a child run that is to run again, are not settled or have undone its work.';

create function {{schema}}.reopen_run(run_id uuid, p_input jsonb, reason text, actor text) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_variable
declare
  v_run {{schema}}.runs;
  v_node record;
  v_reopened integer := 0;
  v_failed boolean := false;
  v_word text;
  v_cause integer;
  v_unmet integer;
  v_closed integer := 0;
begin
  select * into v_run from {{schema}}.runs r where r.id = run_id;
  perform {{schema}}.may_reopen(v_run);
  perform {{schema}}.reopening({{schema}}.as_owner(v_run));
  if v_run.started_by is not null then
    perform {{schema}}.child_reopened(null, run_id, v_run.status, v_run.error);
  end if;
  update {{schema}}.runs r set status = 'running', finished_at = null, input = case when r.items is null then coalesce(p_input, r.input) else r.input end, result = null, error = null, cancel_requested_at = null, cancel_reason = null, stopping_at = null,
      run_epoch = r.run_epoch + 1, generation = r.generation + 1 where r.id = run_id returning * into v_run;
  perform {{schema}}.receipt(run_id, 'reopened', null, null, 1, nullif(v_run.status, 'running'));
  if v_run.items is not null then
    v_reopened := case when v_run.counted_from is not null then {{schema}}.reopen_loop(v_run, p_input) when v_run.pages is not null then {{schema}}.reopen_emit(v_run)
      else {{schema}}.reopen_map(v_run, p_input) end;
    perform {{schema}}.note('retry_run', run_id::text, actor, reason, jsonb_build_object('reopened', v_reopened, 'generation', v_run.generation));
    return 'reopened';
  end if;
  -- All that did not succeed waits anew, but for failures that a successor has dealt with. It is decided again from the edges,
  -- in the order of the plan, so that each finds its sources decided; what had a job gets it back.
  update {{schema}}.nodes n set status = 'waiting', finished_at = null, blocked_by = null, error = null
    where n.run_id = run_id and n.status in ('failed', 'cancelled', 'blocked', 'skipped')
      and not {{schema}}.was_taken(v_run, n.ix);
  update {{schema}}.runs r set open_nodes = (select count(*) from {{schema}}.nodes n where n.run_id = run_id and n.status = 'waiting') where r.id = run_id;
  for v_node in select n.id, n.ix from {{schema}}.nodes n where n.run_id = run_id and n.status = 'waiting' order by n.ix loop
    select d.word, d.cause, d.unmet into v_word, v_cause, v_unmet from {{schema}}.decide_node(v_run, v_node.ix) d;
    v_reopened := v_reopened + (v_word = 'ready')::int;
    v_closed := v_closed + (v_word not in ('ready', 'wait'))::int;
    v_failed := v_failed or v_word not in ('ready', 'wait', 'skipped');
    update {{schema}}.nodes n set unmet = v_unmet, due = v_word = 'ready', status = case when v_word in ('ready', 'wait') then 'waiting' else v_word end,
        finished_at = case when v_word not in ('ready', 'wait') then {{schema}}.now() end, blocked_by = case v_word when 'blocked' then v_cause end
      where n.id = v_node.id;
  end loop;
  update {{schema}}.runs r set open_nodes = r.open_nodes - v_closed where r.id = run_id;
  v_failed := {{schema}}.advance(v_run, '{}', null, null, 0, v_failed);
  select * into v_run from {{schema}}.runs r where r.id = run_id;
  if v_run.open_nodes = 0 and {{schema}}.has_unhandled(v_run) then
    -- It would end again at once, as it ended, with all that its end promises.
    select k.name, n.status, n.error ->> 'message' as message, b.name as blocked_by into v_node
      from {{schema}}.nodes n join {{schema}}.plan_nodes k on k.plan_hash = v_run.plan_hash and k.ix = n.ix
      left join {{schema}}.plan_nodes b on b.plan_hash = v_run.plan_hash and b.ix = n.blocked_by
     where n.run_id = run_id and n.status in ('failed', 'cancelled', 'blocked') order by coalesce(n.error ->> 'sqlstate' = 'WF034', false) desc, n.blocked_by is null, n.ix limit 1;
    raise exception using errcode = 'WF026', message = format('nothing of run %s can run again: node %s %s', run_id, v_node.name, case
        when v_node.blocked_by is not null then format('is blocked by %s, whose failure others have dealt with already', v_node.blocked_by)
        else format('is %s: %s', v_node.status, v_node.message) end),
      detail = jsonb_build_object('run_id', run_id, 'status', 'failed')::text,
      hint = 'Start a new run.';
  end if;
  perform {{schema}}.note('retry_run', run_id::text, actor, reason, jsonb_build_object('reopened', v_reopened, 'generation', v_run.generation));
  perform {{schema}}.settle_run(run_id, v_failed);
  return 'reopened';
end $$;
comment on function {{schema}}.reopen_run(uuid, jsonb, text, text) is 'What retry_run does, for a run and for the child runs below it; p_input: what its parent gives it now. The caller holds the root lock.';

create function {{schema}}.retry_run(run_id uuid, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_run {{schema}}.runs;
begin
  perform {{schema}}.ensure_today();
  perform {{schema}}.lock_trees('{}', array[run_id], true);
  select * into v_run from {{schema}}.runs r where r.id = run_id for update;
  if not found then
    raise exception using errcode = 'WF025', message = format('there is no run %s', run_id), detail = jsonb_build_object('run_id', run_id)::text,
      hint = 'Check the id; retention may have dropped it.';
  elsif v_run.parent_run is not null then
    raise exception using errcode = 'WF026', message = format('run %s is a part of run %s, and is retried with it', run_id, v_run.parent_run),
      detail = jsonb_build_object('run_id', run_id, 'status', v_run.status, 'parent_run', v_run.parent_run)::text,
      hint = 'Retry the parent once it has ended.';
  end if;
  return {{schema}}.reopen_run(run_id, null, reason, actor);
end $$;
comment on function {{schema}}.retry_run(uuid, text, text) is
  'Reopens a run that has failed or was cancelled: its failed and cancelled nodes run again under their epochs, with a higher generation, and what they blocked waits anew. Refused while effects of its end are not settled, and once compensations have undone its work.';

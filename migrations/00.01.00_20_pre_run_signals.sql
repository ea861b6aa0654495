-- Signals to runs: a sender knows the run, and not which node waits, or will. One is given to the node that has waited longest,
-- or kept for the run, and taken by the first body of it that asks. A job that ends without having taken what it was given
-- leaves it to the run: the sweep gives it to the next.
-- Lock order: the root locks of the run and of the child runs below it, by depth and id, then one job. Under these no node
-- suspends, since an end takes the root lock of its run first; so a signal finds whoever waits, or is found.

create index jobs_signal_run on {{schema}}.jobs (run_id) where run_id is not null and status = 'held' and held_reason = 'signal';

create function {{schema}}.run_and_above(p_run uuid) returns uuid[]
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  with recursive above as (
    select r.id, r.parent_run from {{schema}}.runs r where r.id = p_run
    union all
    select r.id, r.parent_run from above a cross join lateral (select o.id, o.parent_run from {{schema}}.runs o where o.id = a.parent_run limit 1) r)
  select coalesce(array_agg(a.id), '{}') from above a
$$;
comment on function {{schema}}.run_and_above(uuid) is 'A run and those that it is a part of: their signals are for its nodes, too.';

create function {{schema}}.signal_for_node(p_job uuid, p_generation integer, p_run uuid, p_names text[]) returns bigint
  language plpgsql stable security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_runs uuid[] := {{schema}}.run_and_above(p_run);
begin
  return (
    select min(f.id) from unnest(p_names) w(name) cross join lateral (
      (select g.id from {{schema}}.signals g
        where g.job_id = p_job and g.generation = p_generation and g.name = w.name and g.taken_at is null and g.refused_at is null order by g.id limit 1)
      union all
      (select k.id from unnest(v_runs) r(id) cross join lateral (
         select g.id from {{schema}}.signals g where g.run_id = r.id and g.job_id is null and g.name = w.name order by g.id limit 1) k)) f);
end $$;
comment on function {{schema}}.signal_for_node(uuid, integer, uuid, text[]) is
  'The first signal of these names that was sent to the job of a node, or given to it, or is kept for its run or one above; null for none.';

create function {{schema}}.give_signal(p_signal bigint) returns uuid
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_signal {{schema}}.signals;
  v_runs uuid[];
  v_waiting uuid[];
  v_job {{schema}}.jobs;
begin
  select * into v_signal from {{schema}}.signals g where g.id = p_signal;
  v_runs := array(
    with recursive below as (
      select r.id from {{schema}}.runs r where r.id = v_signal.run_id
      union all
      select c.id from below b cross join lateral (select o.id from {{schema}}.runs o where o.parent_run = b.id and o.finished_at is null offset 0) c)
    select b.id from below b);
  v_waiting := array(
    select j.id from {{schema}}.jobs j join {{schema}}.steps s on s.job_id = j.id and s.generation = j.generation
     where j.run_id = any(v_runs) and j.status = 'held' and j.held_reason = 'signal'
       and s.kind = 'wait' and s.name = v_signal.name and not s.done and s.claim_epoch = j.claim_epoch
     group by j.id order by min(s.recorded_at), j.id);
  -- Who is being woken by somebody else just now waits no more, or goes on waiting if that is undone: first those that are free.
  for i in 1 .. cardinality(v_waiting) loop
    select * into v_job from {{schema}}.jobs j where j.id = v_waiting[i] and j.status = 'held' and j.held_reason = 'signal' for no key update skip locked;
    exit when found;
  end loop;
  if v_job.id is null then
    select * into v_job from {{schema}}.jobs j where j.id = any(v_waiting) and j.status = 'held' and j.held_reason = 'signal' order by j.id limit 1 for no key update;
  end if;
  if v_job.id is null then
    return null;
  end if;
  update {{schema}}.signals g set job_id = v_job.id, generation = v_job.generation where g.id = p_signal and g.job_id is null;
  update {{schema}}.jobs j set status = 'pending', held_reason = null, run_at = {{schema}}.now() where j.id = v_job.id;
  perform {{schema}}.wake(array[v_job.queue]);
  return v_job.id;
end $$;
comment on function {{schema}}.give_signal(bigint) is
  'Gives a signal that is kept for a run to the node of it, or of a child run, that has waited for it longest, which goes on; null where none waits. The caller holds the root locks of the run and of all below it.';

create function {{schema}}.send_run_signal(run_id uuid, name text, payload jsonb default 'null', key text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_run {{schema}}.runs;
  v_sent {{schema}}.signals;
begin
  payload := {{schema}}.check_signal(name, payload, key);
  perform {{schema}}.lock_trees('{}', array[run_id]);
  select * into v_run from {{schema}}.runs r where r.id = run_id;
  if not found then
    raise exception using errcode = 'WF025', message = format('there is no run %s', run_id), detail = jsonb_build_object('run_id', run_id)::text,
      hint = 'Check the id; retention may have dropped it.';
  elsif v_run.finished_at is not null then
    raise exception using errcode = 'WF026', message = format('run %s is %s, and waits for nothing', run_id, v_run.status),
      detail = jsonb_build_object('run_id', run_id, 'status', v_run.status)::text,
      hint = 'The signal was not kept. A run that is reopened is sent it then.';
  end if;
  insert into {{schema}}.signals (run_id, name, key, sent_at, payload) values (run_id, name, key, {{schema}}.now(), payload)
    on conflict do nothing returning * into v_sent;
  if not found then
    select g.* into v_sent from {{schema}}.signals g where g.run_id = v_run.id and g.name = send_run_signal.name and g.key = send_run_signal.key;
    if v_sent.payload = payload then
      return 'already';
    end if;
    raise exception using errcode = 'WF030', message = format('signal %s was sent to run %s under this key with another payload', name, run_id),
      detail = jsonb_build_object('run_id', run_id, 'name', name, 'key', key)::text, hint = 'Nothing was sent. Give each signal a key of its own, or none.';
  end if;
  if {{schema}}.give_signal(v_sent.id) is not null then
    return 'given';
  end if;
  perform {{schema}}.bound_signals(null, null, run_id);
  return 'kept';
end $$;
comment on function {{schema}}.send_run_signal(uuid, text, jsonb, text) is
  'Sends a signal to a run: to the node of it, or of a child run, that has waited for it longest, which goes on with this transaction (given); or it is kept for the first body that asks (kept), in order, also when the run is reopened. Answers already where it was sent under this key before. Refused for a run that has ended (WF026) or is not there (WF025), another payload under the same key (WF030), and more than max_waiting_signals that are kept (WF040). Holds the run until the transaction ends, so that its jobs do not end meanwhile: keep that short.';

-- One run a call: whoever goes on to the next run holds jobs by then.
create function {{schema}}.return_signals(p_limit integer default 500) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_run record;
  v_id bigint;
  v_n integer := 0;
begin
  for v_run in
    select g.run_id as id, min(g.id) as first from {{schema}}.signals g
     where g.run_id is not null and g.job_id is not null and g.taken_at is null and g.refused_at is null
       and not exists (select from {{schema}}.jobs j where j.id = g.job_id and j.generation = g.generation)
     group by g.run_id order by 2 limit p_limit
  loop
    continue when not {{schema}}.run_is_free(v_run.id);
    perform {{schema}}.lock_trees('{}', array[v_run.id]);
    foreach v_id in array array(
        select g.id from {{schema}}.signals g
         where g.run_id = v_run.id and g.job_id is not null and g.taken_at is null and g.refused_at is null
           and not exists (select from {{schema}}.jobs j where j.id = g.job_id and j.generation = g.generation)
         order by g.id limit p_limit) loop
      update {{schema}}.signals g set job_id = null, generation = null where g.id = v_id and g.taken_at is null and g.refused_at is null;
      v_n := v_n + 1;
      if exists (select from {{schema}}.runs r where r.id = v_run.id and r.finished_at is null) then
        perform {{schema}}.give_signal(v_id);
      end if;
    end loop;
    exit;
  end loop;
  return v_n;
end $$;
comment on function {{schema}}.return_signals(integer) is
  'Takes signals to a run back from jobs that have ended without taking them, and gives them to others that wait, or keeps them: up to p_limit of the first run that is free. Returns how many. Called by the sweep.';

create view {{schema}}.run_signals as
  select g.id, g.run_id, r.workflow, r.run_key, g.name, g.key, g.sent_at,
         case when g.refused_at is not null then 'refused' when g.taken_at is not null then 'taken' when g.job_id is not null then 'given' else 'kept' end as state,
         g.job_id, n.run_id as node_run, {{schema}}.node_name(t.items, k.name, n.ix) as node, g.taken_at, g.refused_at, g.refused_why, g.payload
    from {{schema}}.signals g
    left join {{schema}}.runs r on r.id = g.run_id
    left join {{schema}}.nodes n on n.id = g.job_id
    left join {{schema}}.runs t on t.id = n.run_id
    left join {{schema}}.plan_nodes k on k.plan_hash = t.plan_hash and k.ix = {{schema}}.place_in_plan(t.items, n.ix)
   where g.run_id is not null;
comment on view {{schema}}.run_signals is 'Signals that were sent to runs, and what became of each: kept for the run, given to a node that is to take it, taken by it, or refused.';

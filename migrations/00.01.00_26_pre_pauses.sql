-- Pauses of runs. Nothing of a paused run starts: its jobs that could be claimed are held ('paused'), and whatever makes one
-- pending is turned into that by the triggers (member_born, paused_stays_held). What runs goes on to its end, which is applied
-- as always, and may end the run. Pausing takes the root locks of the run and of all below it, and then locks all jobs of them
-- that wait: so whoever has woken one just now is waited for and seen, and whoever comes later sees the pause.
-- Lock order: the root locks by depth and id, then jobs by id.

create table {{schema}}.run_pauses (
  run_id uuid primary key,
  since timestamptz not null,
  code text not null check ({{schema}}.valid_name(code)),
  reason text not null,
  actor text not null,
  incident uuid
);
comment on table {{schema}}.run_pauses is 'Why runs are paused: one row for each that is, and none for any other.';
comment on column {{schema}}.run_pauses.run_id is 'The run.';
comment on column {{schema}}.run_pauses.since is 'Since when.';
comment on column {{schema}}.run_pauses.code is 'The kind of reason, a short name: operator where none was given.';
comment on column {{schema}}.run_pauses.reason is 'The reason, in words.';
comment on column {{schema}}.run_pauses.actor is 'Who paused it, or a run above it.';
comment on column {{schema}}.run_pauses.incident is 'The incident that it was paused for, whose grant lets it go on; null for none.';

create function {{schema}}.hold_paused() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  -- Above READ COMMITTED a look may be older than the lock of the job: it fails where the run has changed since.
  if current_setting('transaction_isolation') <> 'read committed' and not {{schema}}.run_is_free(new.run_id) then
    raise exception using errcode = '40001', message = format('run %s is being changed by somebody else', new.run_id), hint = 'Nothing was done. Try again.';
  end if;
  if exists (select from {{schema}}.runs r where r.id = new.run_id and r.status = 'paused') then
    new.status := 'held';
    new.held_reason := 'paused';
  end if;
  return new;
end $$;
comment on function {{schema}}.hold_paused() is 'Trigger: what would make the job of a node pending while its run is paused leaves it held.';
-- After ordering_came_back and before transition_listed, by its name: a job that goes back into its line waits there.
create trigger paused_stays_held before update of status on {{schema}}.jobs for each row
  when (new.run_id is not null and new.status = 'pending' and old.status <> 'pending') execute function {{schema}}.hold_paused();

-- The caller holds the root lock of the parent: so its pause does not end meanwhile.
create function {{schema}}.pause_with_parent() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_pause {{schema}}.run_pauses;
begin
  if not exists (select from {{schema}}.runs p where p.id = new.parent_run and p.status = 'paused') then
    return new;
  end if;
  new.status := 'paused';
  select * into v_pause from {{schema}}.run_pauses p where p.run_id = new.parent_run;
  insert into {{schema}}.run_pauses (run_id, since, code, reason, actor)
    values (new.id, {{schema}}.now(), coalesce(v_pause.code, 'operator'), coalesce(v_pause.reason, 'the run above it is paused'), coalesce(v_pause.actor, session_user));
  if new.counted_from is not null and (select p.loop ? 'within' from {{schema}}.plans p where p.hash = new.plan_hash) then
    insert into {{schema}}.loop_holds (run_id, ix, job_id, since) values (new.id, new.written - 1, new.id, {{schema}}.now())
      on conflict (run_id, ix, job_id, since) do update set until = null;
  end if;
  return new;
end $$;
comment on function {{schema}}.pause_with_parent() is 'Trigger: a child run that is admitted, or reopened, while its parent is paused is paused with it.';
create trigger child_born_paused before insert on {{schema}}.runs for each row
  when (new.parent_run is not null) execute function {{schema}}.pause_with_parent();
create trigger child_reopened_paused before update of finished_at on {{schema}}.runs for each row
  when (new.parent_run is not null and old.finished_at is not null and new.finished_at is null) execute function {{schema}}.pause_with_parent();

create function {{schema}}.lock_waiting(p_runs uuid[]) returns uuid[]
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_ids uuid[] := array(select n.id from unnest(p_runs) r(id) cross join lateral (select o.id from {{schema}}.nodes o where o.run_id = r.id and o.status = 'ready' offset 0) n);
begin
  -- Waiting is all that they need to do in the snapshot: one that somebody has just woken is looked at anew once it is locked.
  -- Above READ COMMITTED one that runs in the snapshot may have come back since: its lock fails then (40001).
  return array(select j.id from {{schema}}.jobs j
    where j.id = any(v_ids) and (j.status in ('pending', 'held') or current_setting('transaction_isolation') <> 'read committed') order by j.id for update);
end $$;
comment on function {{schema}}.lock_waiting(uuid[]) is 'Locks the jobs of these runs that are pending or held, whatever for, in the order of their ids; above READ COMMITTED those that run too. The caller holds the root locks of the runs, and of their child runs.';

create function {{schema}}.lift_pauses(p_runs uuid[]) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz := {{schema}}.now();
  v_paused uuid[] := array(select r.id from {{schema}}.runs r where r.id = any(p_runs) and r.status = 'paused' order by r.depth, r.id);
  v_run uuid;
  v_jobs uuid[];
begin
  v_jobs := {{schema}}.lock_waiting(v_paused);
  update {{schema}}.runs r set status = {{schema}}.live_status(r.id) where r.id = any(v_paused);
  delete from {{schema}}.run_pauses p where p.run_id = any(v_paused);
  update {{schema}}.loop_holds h set until = greatest(v_now, h.since) where h.job_id = any(v_paused) and h.until is null;
  foreach v_run in array v_paused loop
    perform {{schema}}.receipt(v_run, 'recovered', null, null, 1, (select r.status from {{schema}}.runs r where r.id = v_run));
  end loop;
  v_jobs := array(select j.id from {{schema}}.jobs j where j.id = any(v_jobs) and j.status = 'held' and j.held_reason = 'paused');
  update {{schema}}.jobs j set status = 'pending', held_reason = null where j.id = any(v_jobs);
  perform {{schema}}.wake(array[q.queue], q.n) from (
    select j.queue, count(*)::integer as n from {{schema}}.jobs j where j.id = any(v_jobs) and j.status = 'pending' group by j.queue) q;
  return cardinality(v_jobs);
end $$;
comment on function {{schema}}.lift_pauses(uuid[]) is
  'Takes back the pauses of these runs: what the pause alone holds is pending, due when it was. Answers how many jobs. The caller holds their root locks, and those of their child runs.';

create function {{schema}}.check_pause(p_word text, p_reason text, p_code text) returns void
  language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if p_reason is null or btrim(p_reason) = '' then
    raise exception using errcode = 'WF009', message = format('%s a run needs a reason', p_word), hint = 'Say why; it goes on the record, and tells the next one what to wait for.';
  elsif {{schema}}.valid_name(p_code) is not true then
    raise exception using errcode = 'WF009', message = format('the code of a pause is %L', left(p_code, 200)), hint = 'Give a short name of 1 to 128 printable ASCII characters without spaces, such as incident-42.';
  end if;
end $$;
comment on function {{schema}}.check_pause(text, text, text) is 'Refuses (WF009) what cannot be the reason, or the code, of a pause.';

create function {{schema}}.pause_run(run_id uuid, reason text default null, actor text default null, code text default 'operator') returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_variable
declare
  v_now timestamptz;
  v_run {{schema}}.runs;
  v_tree uuid[];
  v_each uuid;
  v_jobs uuid[];
  v_held integer;
begin
  perform {{schema}}.check_pause('pausing', reason, code);
  perform {{schema}}.lock_trees('{}', array[run_id]);
  select * into v_run from {{schema}}.runs r where r.id = run_id for update;
  if not found then
    raise exception using errcode = 'WF025', message = format('there is no run %s', run_id), detail = jsonb_build_object('run_id', run_id)::text,
      hint = 'Check the id; retention may have dropped it.';
  elsif v_run.finished_at is not null then
    return 'finished';
  elsif v_run.cancel_requested_at is not null or v_run.stopping_at is not null then
    return 'cancelling';
  elsif v_run.status = 'paused' then
    return 'already';
  end if;
  v_now := {{schema}}.now();
  v_tree := array(
    with recursive below as (
      select r.id, r.depth from {{schema}}.runs r where r.id = run_id
      union all
      select c.id, c.depth from below b cross join lateral (
        select o.id, o.depth from {{schema}}.runs o
         where o.parent_run = b.id and o.finished_at is null and o.cancel_requested_at is null and o.stopping_at is null offset 0) c)
    select b.id from below b where (select r.status from {{schema}}.runs r where r.id = b.id) in ('running', 'recovering') order by b.depth, b.id);
  v_jobs := {{schema}}.lock_waiting(v_tree);
  update {{schema}}.runs r set status = 'paused' where r.id = any(v_tree);
  insert into {{schema}}.run_pauses (run_id, since, code, reason, actor)
    select t.id, v_now, code, reason, coalesce(actor, session_user) from unnest(v_tree) t(id);
  foreach v_each in array v_tree loop
    perform {{schema}}.receipt(v_each, 'interrupted', null, null, 1, 'paused');
  end loop;
  -- The time does not count in the loops that are paused, nor in those that it is in a round of.
  insert into {{schema}}.loop_holds (run_id, ix, job_id, since)
    with recursive above as (
      select v_run.parent_run as id, v_run.parent_node as node
      union all
      select r.parent_run, r.parent_node from above a cross join lateral (select o.parent_run, o.parent_node from {{schema}}.runs o where o.id = a.id limit 1) r)
    select l.id, l.ix, l.held, v_now
      from (select r.id, r.plan_hash, r.counted_from, r.written - 1 as ix, r.id as held from {{schema}}.runs r where r.id = any(v_tree)
            union all
            select r.id, r.plan_hash, r.counted_from, n.ix, run_id from above a
              cross join lateral (select * from {{schema}}.runs o where o.id = a.id limit 1) r cross join lateral (select o.ix from {{schema}}.nodes o where o.id = a.node limit 1) n) l
     where l.counted_from is not null and (select p.loop ? 'within' from {{schema}}.plans p where p.hash = l.plan_hash)
    on conflict on constraint loop_holds_pkey do update set until = null;
  update {{schema}}.jobs j set status = 'held', held_reason = 'paused' where j.id = any(v_jobs) and j.status = 'pending';
  get diagnostics v_held = row_count;
  perform {{schema}}.note('pause_run', run_id::text, actor, reason, jsonb_build_object('code', code, 'runs', cardinality(v_tree), 'jobs', v_held));
  return 'paused';
end $$;
comment on function {{schema}}.pause_run(uuid, text, text, text) is
  'Pauses a run with its child runs, in one transaction: nothing of it starts until resume_run; what runs goes on to its end. Answers paused; already (it is, and keeps the code that it has), finished or cancelling, where nothing was changed. Refused for a run that is not there (WF025), and without a reason (WF009). The code is a short name for the kind of reason.';

create function {{schema}}.resume_run(run_id uuid, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_variable
declare
  v_run {{schema}}.runs;
  v_pause {{schema}}.run_pauses;
  v_top uuid;
  v_tree uuid[];
  v_jobs integer;
begin
  perform {{schema}}.check_pause('resuming', reason, 'operator');
  perform {{schema}}.lock_trees('{}', array[run_id]);
  select * into v_run from {{schema}}.runs r where r.id = run_id for update;
  if not found then
    raise exception using errcode = 'WF025', message = format('there is no run %s', run_id), detail = jsonb_build_object('run_id', run_id)::text,
      hint = 'Check the id; retention may have dropped it.';
  elsif v_run.finished_at is not null then
    return 'finished';
  elsif v_run.status <> 'paused' then
    return 'not_paused';
  end if;
  select r.id into v_top from {{schema}}.runs r where r.id = any({{schema}}.run_and_above(run_id)) and r.status = 'paused' order by r.depth limit 1;
  if v_top <> run_id then
    raise exception using errcode = 'WF026', message = format('run %s is a part of run %s, which is paused', run_id, v_top),
      detail = jsonb_build_object('run_id', run_id, 'status', 'paused', 'paused_run', v_top)::text,
      hint = format('Resume that, and all below goes on: taskq runs resume %s.', v_top);
  end if;
  select * into v_pause from {{schema}}.run_pauses p where p.run_id = v_run.id;
  v_tree := array(
    with recursive below as (
      select r.id from {{schema}}.runs r where r.id = run_id
      union all
      select c.id from below b cross join lateral (select o.id from {{schema}}.runs o where o.parent_run = b.id and o.finished_at is null offset 0) c)
    select b.id from below b);
  v_jobs := {{schema}}.lift_pauses(v_tree);
  perform {{schema}}.note('resume_run', run_id::text, actor, reason, jsonb_build_object('code', v_pause.code, 'since', v_pause.since, 'jobs', v_jobs));
  return 'resumed';
end $$;
comment on function {{schema}}.resume_run(uuid, text, text) is
  'Lets a paused run go on, with all that is paused below it: what the pause held is pending, due when it was. Answers resumed; not_paused or finished, where nothing was changed. Refused (WF026) while a run above it is paused, which the refusal names, for a run that is not there (WF025), and without a reason (WF009).';

create function {{schema}}.check_pauses() returns table (law integer, code text, run_id uuid, detail text)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  return query
    select 9, 'pending_in_paused_run', r.id, format('job %s is pending', j.id)
      from {{schema}}.runs r join {{schema}}.nodes n on n.run_id = r.id and n.status = 'ready' join {{schema}}.jobs j on j.id = n.id and j.status = 'pending'
     where r.finished_at is null and r.status = 'paused';
  return query
    select 9, 'held_as_paused_in_no_pause', j.run_id, format('job %s is held as paused, and %s', j.id, coalesce('its run is ' || r.status, 'it is no node of a run'))
      from {{schema}}.jobs j left join {{schema}}.runs r on r.id = j.run_id
     where j.status = 'held' and j.held_reason = 'paused' and r.status is distinct from 'paused';
  return query
    select 9, 'pause_record_differs', coalesce(r.id, p.run_id), case when p.run_id is null then 'it is paused, and nothing says why' else 'it is not paused, and has the record of a pause' end
      from (select * from {{schema}}.runs r where r.finished_at is null and r.status = 'paused') r full join {{schema}}.run_pauses p on p.run_id = r.id
     where p.run_id is null or r.id is null;
  return query
    select 9, 'child_not_paused', c.id, format('it is %s, and run %s, which it is a part of, is paused', c.status, p.id)
      from {{schema}}.runs p join {{schema}}.runs c on c.parent_run = p.id
     where p.finished_at is null and p.status = 'paused' and c.finished_at is null and c.status <> 'paused' and c.cancel_requested_at is null and c.stopping_at is null;
end $$;
comment on function {{schema}}.check_pauses() is 'The part of check_invariants that is about paused runs.';

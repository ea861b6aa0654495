-- Children of durable bodies: jobs and runs that a body starts with ctx.child and waits for without a slot. Started once, under
-- the fence of its attempt, in the transaction that records it in steps; the body is suspended (held, 'child') until one ends.
--
-- A child's end wakes its parent in its own transaction, and waits for nobody: where the parent's row is taken it leaves a
-- line in child_rechecks, and the sweep looks. A parent that suspends locks its row first and looks at its children after: so it
-- sees the end, or the end finds it held, or the row taken. The end of a cancelled parent cancels its children likewise.
-- Lock order: jobs by id, then steps; of a parent's children only what is free.

create unique index steps_child_job on {{schema}}.steps (child_job) where child_job is not null;
create unique index steps_child_run on {{schema}}.steps (child_run) where child_run is not null;

-- No unique index: an insert must wait for nobody.
create table {{schema}}.child_rechecks (
  job_id uuid not null,
  due_at timestamptz not null
);
create index child_rechecks_due on {{schema}}.child_rechecks (due_at);
create index child_rechecks_job on {{schema}}.child_rechecks (job_id, due_at);
comment on table {{schema}}.child_rechecks is 'Parents at which the sweep must look: something of them was taken when a child ended, or when they were cancelled.';
comment on column {{schema}}.child_rechecks.job_id is 'The parent.';
comment on column {{schema}}.child_rechecks.due_at is 'When to look.';

create function {{schema}}.waits_for_ended(p_job uuid, p_generation integer, p_epoch bigint) returns boolean
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select exists (select from {{schema}}.steps s
    where s.job_id = p_job and s.generation = p_generation and s.kind = 'child' and not s.done and s.claim_epoch = p_epoch
      and case when s.child_job is not null then not exists (select from {{schema}}.jobs c where c.id = s.child_job)
            else not exists (select from {{schema}}.runs r where r.id = s.child_run and r.finished_at is null) end)
$$;
comment on function {{schema}}.waits_for_ended(uuid, integer, bigint) is 'Whether one of the children that an attempt has asked for, and has not been given, has ended.';

create function {{schema}}.waiting_parent(p_job {{schema}}.jobs) returns uuid
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select case when p_job.parent_job is not null then p_job.parent_job
    when p_job.run_id is not null then (select s.job_id from {{schema}}.steps s where s.child_run = any({{schema}}.run_and_above(p_job.run_id)) and not s.done limit 1) end
$$;
comment on function {{schema}}.waiting_parent({{schema}}.jobs) is 'The job whose body waits for this one, or for the run that it is a node of, or one above; null for none.';

create function {{schema}}.start_child(p_worker uuid, p_job uuid, p_epoch bigint, p_name text, p_occurrence integer,
    p_spec jsonb, p_payload text, p_ordering_key text, p_plan text, p_meta jsonb)
  returns table (answer text, value text, error text, child uuid)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_job {{schema}}.jobs;
  v_step {{schema}}.steps;
  v_end record;
  v_depth integer;
  v_child_job uuid;
  v_child_run uuid;
begin
  select * into v_job from {{schema}}.jobs j
   where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for no key update;
  if not found then
    return query select 'fenced'::text, null::text, null::text, null::uuid;
    return;
  end if;
  select * into v_step from {{schema}}.steps s
   where s.job_id = p_job and s.generation = v_job.generation and s.kind = 'child' and s.name = p_name and s.occurrence = p_occurrence;
  if not found then
    v_depth := 1 + coalesce((select s.depth from {{schema}}.steps s where s.child_job = p_job),
      (select max(s.depth) from {{schema}}.steps s where v_job.run_id is not null and s.child_run = any({{schema}}.run_and_above(v_job.run_id))), 0);
    if v_depth > 100 then
      raise exception using errcode = 'WF041', message = format('job %s is the child of a child, 100 times over, and may have none of its own', p_job),
        detail = jsonb_build_object('job_id', p_job, 'depth', v_depth - 1)::text, hint = 'Does a body start itself without end? Where it is meant, go on with a loop, or with a new job of its own.';
    end if;
    -- It would stand in line behind who waits for it.
    if p_ordering_key is not null and exists (
        with recursive above as (
          select v_job.ordering_key, {{schema}}.waiting_parent(v_job) as parent
          union all
          select j.ordering_key, {{schema}}.waiting_parent(j) from above a join {{schema}}.jobs j on j.id = a.parent)
        select from above a where a.ordering_key = p_ordering_key) then
      raise exception using errcode = 'WF042', message = format('a child of job %s cannot have the ordering key %L, which that job has, or one above it that waits for it', p_job, left(p_ordering_key, 100)),
        detail = jsonb_build_object('job_id', p_job, 'ordering_key', p_ordering_key)::text, hint = 'The two would wait for each other. Give the child another key, or none: it runs alone as long as its parent waits for it.';
    end if;
    if p_plan is null then
      select e.job_id into v_child_job from {{schema}}.enqueue_many(jsonb_build_array(p_spec), array[1], array[p_payload],
        p_ordering_key => case when p_ordering_key is not null then array[p_ordering_key] end) e;
      -- Its parent takes its result from history.
      update {{schema}}.jobs j set parent_job = p_job, slim = null where j.id = v_child_job;
    else
      select r.run_id into v_child_run from {{schema}}.start_run(p_plan, p_payload::jsonb, null, p_meta, p_job) r;
    end if;
    insert into {{schema}}.steps (job_id, generation, kind, name, occurrence, claim_epoch, recorded_at, done, depth, child_job, child_run)
      values (p_job, v_job.generation, 'child', p_name, p_occurrence, p_epoch, {{schema}}.now(), false, v_depth, v_child_job, v_child_run)
      returning * into v_step;
  end if;
  if not v_step.done then
    -- In one statement: a job moves between jobs and history.
    if v_step.child_job is not null then
      select case when j.id is not null then 'waits' else coalesce(h.status, 'gone') end as status, h.result, h.error into v_end
        from (select v_step.child_job as id) c left join {{schema}}.jobs j on j.id = c.id
        left join lateral (select o.status, o.result, o.error from {{schema}}.history o where o.id = c.id and o.finished_at >= {{schema}}.id_time(c.id) - interval '1 day') h on true;
    else
      select case when r.id is null then 'gone' when r.finished_at is null then 'waits' else r.status end as status, r.result, r.error into v_end
        from (select v_step.child_run as id) c left join {{schema}}.runs r on r.id = c.id;
    end if;
    update {{schema}}.steps s set claim_epoch = p_epoch, left_by = null, done = v_end.status <> 'waits',
        recorded_at = case when v_end.status = 'waits' then s.recorded_at else {{schema}}.now() end,
        value = case when v_end.status = 'succeeded' then coalesce(v_end.result, 'null') end,
        error = case when v_end.status not in ('waits', 'succeeded') then jsonb_build_object('status', v_end.status) || coalesce(v_end.error, case v_end.status
          when 'gone' then jsonb_build_object('type', 'JobNotFound', 'message', 'retention has dropped it before its parent looked') else '{}' end) end
      where s.job_id = p_job and s.generation = v_job.generation and s.kind = 'child' and s.name = p_name and s.occurrence = p_occurrence
      returning * into v_step;
  end if;
  return query select case when not v_step.done then 'waits' when v_step.error is null then 'succeeded' else 'failed' end,
    v_step.value::text, v_step.error::text, coalesce(v_step.child_job, v_step.child_run);
end $$;
comment on function {{schema}}.start_child(uuid, uuid, bigint, text, integer, jsonb, text, text, text, jsonb) is
  'Starts the child of a running attempt under its fence: a job of p_spec, or a run of p_plan; once for each name and occurrence, recorded in the same transaction. Answers waits, or how it has ended, which is recorded then and stands (succeeded with its value, failed with its error), or fenced. Refused where it would be more than 100 bodies deep (WF041), or would wait for its own parent''s turn (WF042).';

create function {{schema}}.tell_parent(p_parent uuid, p_child_job uuid, p_child_run uuid) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_job {{schema}}.jobs;
begin
  -- Above READ COMMITTED a look would be older than the lock: the sweep looks instead.
  if current_setting('transaction_isolation') = 'read committed' then
    select * into v_job from {{schema}}.jobs j where j.id = p_parent for no key update skip locked;
    if found then
      if v_job.status = 'held' and v_job.held_reason in ('signal', 'child') and exists (
          select from {{schema}}.steps s where s.job_id = p_parent and s.generation = v_job.generation and s.kind = 'child' and not s.done
             and s.claim_epoch = v_job.claim_epoch and (s.child_job = p_child_job or s.child_run = p_child_run)) then
        update {{schema}}.jobs j set status = 'pending', held_reason = null, run_at = {{schema}}.now() where j.id = p_parent;
        perform {{schema}}.wake(array[v_job.queue]);
      end if;
      return;
    end if;
  end if;
  if exists (select from {{schema}}.jobs j where j.id = p_parent) then
    insert into {{schema}}.child_rechecks (job_id, due_at) values (p_parent, {{schema}}.now());
  end if;
end $$;
comment on function {{schema}}.tell_parent(uuid, uuid, uuid) is
  'Lets a parent go on that waits for this child, which has ended. Waits for nothing: where somebody has the parent''s row it leaves a line for the sweep.';

create function {{schema}}.child_ended() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform {{schema}}.tell_parent(old.parent_job, old.id, null);
  return null;
end $$;
comment on function {{schema}}.child_ended() is 'Trigger: a job that was started as a child has ended, in whatever way.';
create trigger parent_told after delete on {{schema}}.jobs for each row
  when (old.parent_job is not null) execute function {{schema}}.child_ended();

create function {{schema}}.cancel_children(p_job uuid, p_generation integer) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_error jsonb := jsonb_build_object('type', 'Cancelled', 'message', format('its parent, job %s, was cancelled', p_job));
  v_child record;
  v_job {{schema}}.jobs;
  v_left boolean := false;
begin
  for v_child in
    select s.child_job, s.child_run from {{schema}}.steps s
     where s.job_id = p_job and s.generation = p_generation and s.kind = 'child' and not s.done order by coalesce(s.child_job, s.child_run)
  loop
    -- Children of children, and so on: the sweep goes on from there.
    if pg_trigger_depth() > 8 then
      v_left := true;
      exit;
    end if;
    if v_child.child_job is not null then
      select * into v_job from {{schema}}.jobs j where j.id = v_child.child_job for update skip locked;
      if not found then
        v_left := v_left or exists (select from {{schema}}.jobs j where j.id = v_child.child_job);
      elsif v_job.status in ('pending', 'held') then
        perform {{schema}}.finish(v_job, 'cancelled', null, null, v_error);
      elsif v_job.cancel_requested_at is null then
        -- An unknown outcome stays to be decided, and is then cancelled if it did not happen.
        update {{schema}}.jobs j set cancel_requested_at = {{schema}}.now() where j.id = v_job.id;
        if v_job.status = 'running' then
          perform pg_notify('{{schema}}_cancel', v_job.claimed_by || ' ' || v_job.id || ' ' || v_job.claim_epoch);
        end if;
      end if;
    else
      perform from {{schema}}.runs r where r.id = v_child.child_run and r.finished_at is null for update skip locked;
      if found then
        perform {{schema}}.stop_run(v_child.child_run, v_error);
      else
        v_left := v_left or exists (select from {{schema}}.runs r where r.id = v_child.child_run and r.finished_at is null);
      end if;
    end if;
  end loop;
  if v_left then
    insert into {{schema}}.child_rechecks (job_id, due_at) values (p_job, {{schema}}.now());
  end if;
end $$;
comment on function {{schema}}.cancel_children(uuid, integer) is
  'Cancels the children of a job that has ended as cancelled, as far as it has not been told how they ended: what waits ends, what runs is asked to. Waits for none: one that somebody has is left to the sweep.';

create function {{schema}}.parent_cancelled() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform {{schema}}.cancel_children(new.id, new.generation);
  return null;
end $$;
comment on function {{schema}}.parent_cancelled() is 'Trigger: a job that has run is cancelled, and may have children.';
create trigger children_cancelled after insert on {{schema}}.history for each row
  when (new.status = 'cancelled' and new.claim_epoch > 0) execute function {{schema}}.parent_cancelled();

create function {{schema}}.sweep_children(p_limit integer default 500) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_now timestamptz := {{schema}}.now();
  v_id uuid;
  v_job {{schema}}.jobs;
  v_generation integer;
  v_n integer := 0;
begin
  -- Above READ COMMITTED a look would be older than the locks.
  if current_setting('transaction_isolation') <> 'read committed' then
    return 0;
  end if;
  foreach v_id in array array(
      select distinct r.job_id from (select d.job_id from {{schema}}.child_rechecks d where d.due_at <= v_now order by d.due_at limit p_limit) r order by r.job_id) loop
    select * into v_job from {{schema}}.jobs j where j.id = v_id for no key update skip locked;
    if not found and exists (select from {{schema}}.jobs j where j.id = v_id) then
      update {{schema}}.child_rechecks r set due_at = v_now + interval '500 ms' where r.ctid = any(array(
        select d.ctid from {{schema}}.child_rechecks d where d.job_id = v_id and d.due_at <= v_now limit 1000 for update skip locked));
      continue;
    end if;
    delete from {{schema}}.child_rechecks r where r.ctid = any(array(
      select d.ctid from {{schema}}.child_rechecks d where d.job_id = v_id and d.due_at <= v_now limit 1000 for update skip locked));
    if v_job.id is null then
      select h.generation into v_generation from {{schema}}.history h
       where h.id = v_id and h.finished_at >= {{schema}}.id_time(v_id) - interval '1 day' and h.status = 'cancelled';
      if found then
        perform {{schema}}.cancel_children(v_id, v_generation);
        v_n := v_n + 1;
      end if;
    elsif v_job.status = 'held' and v_job.held_reason in ('signal', 'child') and {{schema}}.waits_for_ended(v_id, v_job.generation, v_job.claim_epoch) then
      update {{schema}}.jobs j set status = 'pending', held_reason = null, run_at = {{schema}}.now() where j.id = v_id;
      perform {{schema}}.wake(array[v_job.queue]);
      v_n := v_n + 1;
    end if;
  end loop;
  return v_n;
end $$;
comment on function {{schema}}.sweep_children(integer) is
  'Looks at up to p_limit parents that could not be told at once that a child has ended, or whose children could not be cancelled with them. Returns at how many there was something to do. Called by the sweep.';

-- Who reopens a child of a parent that is over wants it for its own sake. What the sweep has left to do of a cancelled parent
-- is not about it.
create function {{schema}}.child_reopened(p_job uuid, p_run uuid, p_status text, p_error jsonb) returns uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_step {{schema}}.steps;
begin
  if p_job is not null then
    select * into v_step from {{schema}}.steps s where s.child_job = p_job and not s.done;
  else
    select * into v_step from {{schema}}.steps s where s.child_run = p_run and not s.done;
  end if;
  if not found then
    return null;
  elsif exists (select from {{schema}}.jobs j where j.id = v_step.job_id and j.generation = v_step.generation) then
    -- Somebody may be cancelling it just now, and does not see a child that was not there.
    insert into {{schema}}.child_rechecks (job_id, due_at) values (v_step.job_id, {{schema}}.now());
    return v_step.job_id;
  end if;
  update {{schema}}.steps s set done = true, error = jsonb_build_object('status', p_status) || coalesce(p_error, '{}')
    where s.job_id = v_step.job_id and s.generation = v_step.generation and s.kind = 'child' and s.name = v_step.name and s.occurrence = v_step.occurrence;
  return null;
end $$;
comment on function {{schema}}.child_reopened(uuid, uuid, text, jsonb) is
  'A child, a job or a run, is reopened that had ended so: answers the parent that still waits for it. One that is over waits no more: the child goes on without, and its first end is noted.';

create view {{schema}}.children as
  select s.job_id as parent_job, p.task as parent_task, p.status as parent_status, s.generation, s.name, s.occurrence, s.child_job, s.child_run,
         coalesce(j.status, r.status) as status, s.recorded_at, s.done as told, s.value, s.error
    from {{schema}}.steps s join {{schema}}.all_jobs p on p.id = s.job_id
    left join {{schema}}.all_jobs j on j.id = s.child_job left join {{schema}}.runs r on r.id = s.child_run
   where s.kind = 'child';
comment on view {{schema}}.children is 'Jobs and runs that bodies have started as their children, with how they stand, and what the parent was told of their end.';

create function {{schema}}.check_children() returns table (law integer, code text, job_id uuid, detail text)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  return query
    select 4, 'held_for_no_child', j.id, 'it is held for a child, and waits for none'::text from {{schema}}.jobs j
     where j.status = 'held' and j.held_reason = 'child' and not exists (
       select from {{schema}}.steps s where s.job_id = j.id and s.generation = j.generation and s.kind = 'child' and not s.done and s.claim_epoch = j.claim_epoch);
  -- A line in child_rechecks says that the sweep will look: that is no fault yet.
  return query
    select 4, 'child_not_told', j.id, 'it is held, and a child that it waits for has ended'::text from {{schema}}.jobs j
     where j.status = 'held' and j.held_reason in ('signal', 'child') and {{schema}}.waits_for_ended(j.id, j.generation, j.claim_epoch)
       and not exists (select from {{schema}}.child_rechecks r where r.job_id = j.id);
  return query
    select 4, 'child_of_another', s.job_id, format('child %s #%s is %s, which belongs to %s', s.name, s.occurrence, coalesce(s.child_job, s.child_run), coalesce(c.parent_job, r.started_by, '00000000-0000-0000-0000-000000000000'))
      from {{schema}}.steps s left join {{schema}}.jobs c on c.id = s.child_job left join {{schema}}.runs r on r.id = s.child_run
     where s.kind = 'child' and not s.done and (c.id is not null and c.parent_job is distinct from s.job_id or r.id is not null and r.started_by is distinct from s.job_id);
  return query
    select 4, 'child_outlives_cancelled', s.job_id, format('child %s #%s lives, nobody has asked it to stop, and its parent was cancelled', s.name, s.occurrence)
      from {{schema}}.steps s left join {{schema}}.jobs c on c.id = s.child_job left join {{schema}}.runs r on r.id = s.child_run
      join lateral (select h.generation from {{schema}}.history h where h.id = s.job_id and h.finished_at >= {{schema}}.id_time(s.job_id) - interval '1 day' and h.status = 'cancelled') p on p.generation = s.generation
     where s.kind = 'child' and not s.done and not exists (select from {{schema}}.child_rechecks k where k.job_id = s.job_id)
       and (c.status in ('pending', 'held') or c.status in ('running', 'unknown') and c.cancel_requested_at is null or r.finished_at is null and r.cancel_requested_at is null and r.id is not null);
end $$;
comment on function {{schema}}.check_children() is 'The part of check_invariants that is about the children of durable bodies.';

-- Cohorts: limits on how many jobs run at once, shared by name across tasks and queues. A job of a cohort holds one of its
-- slots while its status is running: from the claim to the end, whatever ends it; a lost worker's until its lease has run
-- out and it is settled. An unknown one holds none. Slots are counted from these rows, never in a counter of their own.
--
-- Exact, because a claim first locks the row of the cohort in limits, and counts in a statement after that: who has claimed
-- before has committed, and what has ended since only makes room. Nobody waits: a cohort that another claim is at is left
-- out of this one. The trigger limit_kept counts once more, whatever the claim statement says.
--
-- Waiting jobs of a cohort stay pending and stand in an index of their own (jobs_cohort), so that those of a full one slow
-- down nobody and need not be parked and taken out again. Lock order: workers, runs, jobs by id, limits by name; a claim,
-- which locks limits first, waits for neither.

create function {{schema}}.cohort_free(p_cohort text) returns integer
  language plpgsql stable security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_limit integer;
begin
  select coalesce(l.operator_limit, l.code_limit) into v_limit from {{schema}}.limits l where l.name = p_cohort;
  if v_limit is null then
    return null;
  end if;
  return v_limit - (select count(*) from (select from {{schema}}.jobs j where j.cohort = p_cohort and j.status = 'running' limit v_limit) r)::integer;
end $$;
comment on function {{schema}}.cohort_free(text) is 'How many slots of a cohort are free, as the calling statement sees it; null where it has no limit.';

create function {{schema}}.open_cohorts(p_names text[]) returns text[]
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_names text[];
begin
  -- Above READ COMMITTED a count would be older than the lock.
  if current_setting('transaction_isolation') <> 'read committed' then
    return '{}';
  end if;
  v_names := array(select l.name from {{schema}}.limits l where l.name = any(p_names) order by l.name for update skip locked);
  return array(select n.name from unnest(v_names) as n(name) where {{schema}}.cohort_free(n.name) is distinct from 0);
end $$;
comment on function {{schema}}.open_cohorts(text[]) is
  'Locks these cohorts until the end of the transaction, in the order of their names, and answers those that have a free slot. One that is locked is left out: nobody waits.';

create function {{schema}}.waiting_cohorts(p_queues text[], p_after text, p_limit integer) returns setof text
  language sql stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
  with recursive w(queue, cohort, n) as (
    select q.name, (select k.cohort from {{schema}}.jobs k
        where k.queue = q.name and k.cohort is not null and k.cohort > p_after and k.status = 'pending' and k.recoveries < 2 order by k.cohort limit 1), 1
      from unnest(p_queues) as q(name)
    union all
    select w.queue, (select k.cohort from {{schema}}.jobs k
        where k.queue = w.queue and k.cohort is not null and k.cohort > w.cohort and k.status = 'pending' and k.recoveries < 2 order by k.cohort limit 1), w.n + 1
      from w where w.cohort is not null and w.n < p_limit)
  select distinct w.cohort from w where w.cohort is not null order by 1 limit p_limit
$$;
comment on function {{schema}}.waiting_cohorts(text[], text, integer) is
  'The first p_limit cohorts, by name and after p_after, of which jobs wait in these queues: one look-up for each, however many jobs.';

-- The order is that of the lanes, over jobs with a cohort and without: of the first p_free that could be claimed, those with
-- one. Jobs without one that come before are locked here, so that another claim's do not count; this claim takes them next.
create function {{schema}}.choose_in_cohorts(p_free integer, p_level integer, p_paused text[], p_tasks text[], p_lane_queues text[],
    p_lane_priorities smallint[], p_lane_mark_at timestamptz[], p_lane_mark_id uuid[], p_skip uuid[]) returns tid[]
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_hashjoin = off set enable_mergejoin = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_most constant integer := 100;
  v_after text := coalesce(current_setting('{{schema}}.cohorts_after', true), '');
  v_now timestamptz := {{schema}}.now();
  v_names text[];
  v_ids uuid[];
  v_lanes bigint[];
  v_run_at timestamptz[];
  v_cohorts text[];
  v_wanted text[];
  v_locked text[] := '{}';
begin
  -- Where more cohorts wait than a claim looks at, the next one in this session goes on behind them.
  v_names := array(select {{schema}}.waiting_cohorts(array(select distinct q.name from unnest(p_lane_queues) as q(name) where q.name <> all(p_paused)), v_after, v_most));
  if cardinality(v_names) = v_most or v_after <> '' then
    perform set_config('{{schema}}.cohorts_after', case when cardinality(v_names) = v_most then v_names[v_most] else '' end, false);
  end if;
  if v_names = '{}' then
    return '{}';
  end if;
  -- Those that another claim is at are left out, and it is chosen again: the others need not wait for that.
  for v_round in 1 .. 5 loop
    select array_agg(i.id order by i.lane, i.run_at, i.id), array_agg(i.lane order by i.lane, i.run_at, i.id),
           array_agg(i.run_at order by i.lane, i.run_at, i.id), array_agg(i.cohort order by i.lane, i.run_at, i.id)
      into v_ids, v_lanes, v_run_at, v_cohorts
      from (
        select c.id, c.run_at, l.lane, o.name as cohort, row_number() over (partition by o.name order by l.lane, c.run_at, c.id) as nth, o.free
          from (select n.name, coalesce({{schema}}.cohort_free(n.name), p_free) as free from unnest(v_names) as n(name) offset 0) o
          cross join unnest(p_lane_queues, p_lane_priorities) with ordinality as l(queue, priority, lane)
          cross join lateral (
            select k.id, k.run_at from {{schema}}.jobs k
             where k.queue = l.queue and k.cohort = o.name and k.priority = l.priority and k.status = 'pending' and k.recoveries < 2
               and k.run_at <= v_now and k.task = any(p_tasks) and k.attempt < k.max_attempts and (k.deadline is null or k.deadline > v_now)
               and (k.required_worker_schema is null or k.required_worker_schema <= p_level) and k.id <> all(p_skip)
             order by k.run_at, k.id limit least(o.free, p_free)) c
         where o.free > 0 and l.queue <> all(p_paused)
         order by l.lane, c.run_at, c.id) i
     where i.nth <= i.free;
    if v_ids is null then
      return '{}';
    end if;
    v_lanes := v_lanes[:p_free];
    with outside as materialized (
      select l.lane, c.run_at, c.id
        from (select u.*, u.lane = v_lanes[cardinality(v_lanes)] as is_last
                from unnest(p_lane_queues, p_lane_priorities, p_lane_mark_at, p_lane_mark_id) with ordinality as u(queue, priority, mark_at, mark_id, lane)
               where u.lane <= v_lanes[cardinality(v_lanes)] and u.queue <> all(p_paused)) l
        cross join lateral (
          select k.run_at, k.id from {{schema}}.jobs k
           where k.queue = l.queue and k.priority = l.priority and k.status = 'pending' and k.recoveries < 2 and k.cohort is null
             and k.run_at <= v_now and (k.run_at, k.id) > (l.mark_at, l.mark_id)
             and (k.run_at, k.id) < (case when l.is_last then v_run_at[cardinality(v_lanes)] else 'infinity' end,
               case when l.is_last then v_ids[cardinality(v_lanes)] else 'ffffffff-ffff-ffff-ffff-ffffffffffff' end)
             and k.task = any(p_tasks) and k.attempt < k.max_attempts and (k.deadline is null or k.deadline > v_now)
             and (k.required_worker_schema is null or k.required_worker_schema <= p_level) and k.id <> all(p_skip)
           order by k.run_at, k.id limit p_free for update skip locked) c
       limit p_free)
    select array_agg(r.id order by r.rank), array_agg(r.cohort order by r.rank) into v_ids, v_cohorts from (
      select a.id, a.cohort, row_number() over (order by a.lane, a.run_at, a.id) as rank from (
        select u.id, u.lane, u.run_at, u.cohort from unnest(v_ids, v_lanes, v_run_at, v_cohorts) as u(id, lane, run_at, cohort) where u.lane is not null
        union all
        select o.id, o.lane, o.run_at, null from outside o) a) r
     where r.cohort is not null and r.rank <= p_free;
    if v_ids is null then
      return '{}';
    end if;
    v_wanted := array(select distinct u.cohort from unnest(v_cohorts) as u(cohort) where u.cohort <> all(v_locked));
    exit when v_wanted = '{}';
    v_locked := v_locked || {{schema}}.open_cohorts(v_wanted);
    exit when v_wanted <@ v_locked;
    v_names := array(select n.name from unnest(v_names) as n(name) where n.name = any(v_locked) or n.name <> all(v_wanted));
  end loop;
  -- Counted anew under the locks. Cancelled or put off meanwhile? The locked row knows.
  v_now := {{schema}}.now();
  return array(select k.ctid from {{schema}}.jobs k
    where k.id = any(array(
        select u.id from (
          select c.id, c.cohort, row_number() over (partition by c.cohort order by c.n) as nth from unnest(v_ids, v_cohorts) with ordinality as c(id, cohort, n)) u
         where u.cohort = any(v_locked) and u.nth <= coalesce({{schema}}.cohort_free(u.cohort), p_free)))
      and k.status = 'pending' and k.recoveries < 2 and k.run_at <= v_now and k.attempt < k.max_attempts and (k.deadline is null or k.deadline > v_now)
    order by k.id for update skip locked);
end $$;
comment on function {{schema}}.choose_in_cohorts(integer, integer, text[], text[], text[], smallint[], timestamptz[], uuid[], uuid[]) is
  'Locks what a claim takes of cohorts: of the first p_free jobs in the order of the lanes those with a cohort, of each cohort at most as many as it has free slots. Looks at 100 cohorts at most, at the next 100 in the next call. Called by claim alone.';

-- After the row is written: it counts itself, and what the same statement has claimed beside it.
create function {{schema}}.keep_limit() returns trigger
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_limit bigint;
  v_running bigint;
begin
  select coalesce(l.operator_limit, l.code_limit) into v_limit from {{schema}}.limits l where l.name = new.cohort for update;
  if v_limit is null then
    return null;
  end if;
  select count(*) into v_running from (select from {{schema}}.jobs j where j.cohort = new.cohort and j.status = 'running' limit v_limit + 1) r;
  -- Above READ COMMITTED the count may be older than the lock.
  if v_running > v_limit or current_setting('transaction_isolation') <> 'read committed' then
    raise exception using errcode = 'WF027',
      message = format('cohort %s has no free slot for job %s: its limit is %s', new.cohort, new.id, v_limit),
      detail = jsonb_build_object('job_id', new.id, 'cohort', new.cohort, 'limit', v_limit)::text,
      hint = 'Claim through taskq.exchange; taskq limits set changes the limit.';
  end if;
  return null;
end $$;
comment on function {{schema}}.keep_limit() is 'Trigger: refuses a claim of more jobs of a cohort than its limit lets run at once.';
create trigger limit_kept after update of status on {{schema}}.jobs for each row
  when (new.cohort is not null and new.status = 'running' and old.status = 'pending') execute function {{schema}}.keep_limit();

-- Whoever makes the job: its cohort has a row, which claims can lock.
create function {{schema}}.know_cohort() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if not exists (select from {{schema}}.limits l where l.name = new.cohort) then
    begin
      insert into {{schema}}.limits (name, created_at) values (new.cohort, {{schema}}.now()) on conflict do nothing;
    exception when serialization_failure then
      -- There, but made after this transaction's snapshot.
      null;
    end;
  end if;
  return new;
end $$;
comment on function {{schema}}.know_cohort() is 'Trigger: the cohort of a new job has its row in limits, without a limit where nobody has said one.';
create trigger cohort_known before insert on {{schema}}.jobs for each row
  when (new.cohort is not null) execute function {{schema}}.know_cohort();

create function {{schema}}.wake_cohort(p_cohort text) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set jit = off as $$
declare
  v_now timestamptz := {{schema}}.now();
begin
  if not exists (select from {{schema}}.sleepers) or {{schema}}.cohort_free(p_cohort) is not distinct from 0 then
    return;
  end if;
  perform {{schema}}.wake(array(
    select a.queue from (select distinct s.queue from {{schema}}.sleepers s) a
     where exists (select from generate_series(0, 9) as p(n) cross join lateral (
       select from {{schema}}.jobs k
        where k.queue = a.queue and k.cohort = p_cohort and k.priority = p.n and k.status = 'pending' and k.recoveries < 2 and k.run_at <= v_now limit 1) d)));
end $$;
comment on function {{schema}}.wake_cohort(text) is 'Notifies workers that are asleep on queues where jobs of this cohort are due, if it has a free slot.';

-- At the end of the transaction: most often the worker that ended the job has taken the slot for the next one by then.
create function {{schema}}.pass_slot() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform {{schema}}.wake_cohort(old.cohort);
  return null;
end $$;
comment on function {{schema}}.pass_slot() is 'Trigger: a job of a cohort has given up its slot, for which others may wait.';
create constraint trigger slot_passed_on_ending after delete on {{schema}}.jobs deferrable initially deferred for each row
  when (old.cohort is not null and old.status = 'running') execute function {{schema}}.pass_slot();
create constraint trigger slot_passed_on after update of status on {{schema}}.jobs deferrable initially deferred for each row
  when (old.cohort is not null and old.status = 'running' and new.status <> 'running') execute function {{schema}}.pass_slot();

-- What code says ---------------------------------------------------------------------------------------------------------

create function {{schema}}.check_limit(p_name text, p_limit integer) returns void
  language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if not coalesce({{schema}}.valid_name(p_name), false) then
    raise exception using errcode = 'WF009', message = format('%L is not the name of a cohort', p_name), hint = 'Give 1 to 128 printable ASCII characters without spaces.';
  end if;
  if p_limit is null or p_limit < 0 then
    raise exception using errcode = 'WF009', message = format('the limit of cohort %s is %s', p_name, coalesce(p_limit::text, 'null')), hint = 'Give a whole number from 0, which lets nobody run.';
  end if;
end $$;
comment on function {{schema}}.check_limit(text, integer) is 'Refuses what cannot be the name and the limit of a cohort.';

create function {{schema}}.ensure_limit(p_name text, p_limit integer) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform {{schema}}.check_limit(p_name, p_limit);
  insert into {{schema}}.limits (name, code_limit, code_changed_at, created_at) values (p_name, p_limit, {{schema}}.now(), {{schema}}.now()) on conflict do nothing;
  if not found then
    update {{schema}}.limits l set code_limit = p_limit, code_changed_at = {{schema}}.now() where l.name = p_name and l.code_limit is null;
  end if;
end $$;
comment on function {{schema}}.ensure_limit(text, integer) is
  'What the code of a process that enqueues says about a cohort: counts where no code has said anything before. Called in a transaction of its own before the first enqueue, so that a job of a cohort never runs without a limit.';

create function {{schema}}.publish_limits(p_names text[], p_limits integer[])
  returns table (name text, was integer, code_limit integer, operator_limit integer)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_row {{schema}}.limits;
begin
  for name, code_limit in select u.name, u.n from unnest(p_names, p_limits) as u(name, n) order by u.name loop
    perform {{schema}}.ensure_limit(name, code_limit);
    select * into v_row from {{schema}}.limits l where l.name = publish_limits.name;
    was := v_row.code_limit;
    operator_limit := v_row.operator_limit;
    if was <> code_limit then
      -- Claims in progress end first: they have counted with the old one.
      update {{schema}}.limits l set code_limit = publish_limits.code_limit, code_changed_at = {{schema}}.now() where l.name = v_row.name
        returning l.operator_limit into operator_limit;
      perform {{schema}}.wake_cohort(name);
    end if;
    return next;
  end loop;
end $$;
comment on function {{schema}}.publish_limits(text[], integer[]) is
  'A worker publishes at boot the limits that its code has. Answers for each what code said before (the same where nothing changed) and what an operator has set, which stays.';

-- What an operator says --------------------------------------------------------------------------------------------------

create function {{schema}}.set_limit(cohort text, slots integer, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_old {{schema}}.limits;
  v_new boolean;
begin
  perform {{schema}}.check_limit(cohort, slots);
  if reason is null or btrim(reason) = '' then
    raise exception using errcode = 'WF009', message = format('setting the limit of cohort %s needs a reason', cohort), hint = 'Say why; it goes on the record, and tells the next one when to take it back.';
  end if;
  insert into {{schema}}.limits (name, created_at) values (cohort, {{schema}}.now()) on conflict do nothing;
  v_new := found;
  -- Waits for claims in progress, so that what is claimed from now on counts with the new one.
  select * into v_old from {{schema}}.limits l where l.name = cohort for update;
  update {{schema}}.limits l set operator_limit = slots, set_at = {{schema}}.now(), set_by = coalesce(actor, session_user), reason = set_limit.reason where l.name = cohort;
  perform {{schema}}.note('set_limit', cohort, actor, reason, jsonb_build_object('limit', slots, 'was', v_old.operator_limit, 'code_limit', v_old.code_limit));
  perform {{schema}}.wake_cohort(cohort);
  return case when v_new then 'new' else 'set' end;
end $$;
comment on function {{schema}}.set_limit(text, integer, text, text) is
  'Sets how many jobs of a cohort may run at once, whatever code says, until clear_limit; 0 for none. What runs goes on. Answers set, or new where no job and no code has used that name yet.';

create function {{schema}}.clear_limit(cohort text, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_old {{schema}}.limits;
begin
  if reason is null or btrim(reason) = '' then
    raise exception using errcode = 'WF009', message = format('clearing the limit of cohort %s needs a reason', cohort), hint = 'Say why the limit of the code may count again; it goes on the record.';
  end if;
  select * into v_old from {{schema}}.limits l where l.name = cohort for update;
  if not found then
    raise exception using errcode = 'WF009', message = format('there is no cohort %L', cohort), hint = 'See the view cohorts, or taskq limits list, for their names.';
  end if;
  if v_old.operator_limit is null then
    return 'not_set';
  end if;
  update {{schema}}.limits l set operator_limit = null, set_at = {{schema}}.now(), set_by = coalesce(actor, session_user), reason = clear_limit.reason where l.name = cohort;
  perform {{schema}}.note('clear_limit', cohort, actor, reason, jsonb_build_object('was', v_old.operator_limit, 'code_limit', v_old.code_limit));
  perform {{schema}}.wake_cohort(cohort);
  return 'cleared';
end $$;
comment on function {{schema}}.clear_limit(text, text, text) is
  'Takes back what an operator has set: the limit of the code counts again; without one, there is none. Answers cleared or not_set.';

create view {{schema}}.cohorts as
  select coalesce(l.name, c.cohort) as name, coalesce(l.operator_limit, l.code_limit) as effective_limit, l.code_limit, l.operator_limit,
         coalesce(c.running, 0) as running, coalesce(c.waiting, 0) as waiting, l.code_changed_at, l.set_at, l.set_by, l.reason
    from {{schema}}.limits l full join (
      select j.cohort, count(*) filter (where j.status = 'running') as running,
             count(*) filter (where j.status = 'pending' and j.run_at <= {{schema}}.now()) as waiting
        from {{schema}}.jobs j where j.cohort is not null group by j.cohort) c on c.cohort = l.name;
comment on view {{schema}}.cohorts is
  'Each cohort: how many of its jobs may run at once (null for no limit), what code and operator say, how many run, and how many are due and wait for a slot or a worker.';

create view {{schema}}.ready_nodes as
  select n.run_id, n.ix, n.id as job_id, w.what as waits_for,
         case w.what when 'cohort' then j.cohort when 'time' then j.run_at::text else j.queue end as of,
         case w.what
           when 'cohort' then 1 + (select count(*)::int from (select from {{schema}}.jobs o
              where o.queue = j.queue and o.cohort = j.cohort and o.status = 'pending' and o.recoveries < 2 and o.run_at <= {{schema}}.now() and o.priority >= j.priority
                and (o.priority > j.priority or (o.run_at, o.id) < (j.run_at, j.id)) limit 99) a)
           when 'capacity' then least(100, 1 + (select count(*)::int from (select from {{schema}}.jobs o
              where o.queue = j.queue and o.cohort is null and o.status = 'pending' and o.recoveries < 2 and o.run_at <= {{schema}}.now() and o.priority >= j.priority
                and (o.priority > j.priority or (o.run_at, o.id) < (j.run_at, j.id)) limit 99) a)
            + case when j.cohort is null then 0 else (select count(*)::int from (select from {{schema}}.jobs o
              where o.queue = j.queue and o.cohort = j.cohort and o.status = 'pending' and o.recoveries < 2 and o.run_at <= {{schema}}.now() and o.priority >= j.priority
                and (o.priority > j.priority or (o.run_at, o.id) < (j.run_at, j.id)) limit 99) a) end)
         end as place
    from {{schema}}.nodes n
    join {{schema}}.jobs j on j.id = n.id
    left join {{schema}}.queues q on q.name = j.queue
    left join {{schema}}.limits l on l.name = j.cohort
   cross join lateral (
     select case when q.paused_at is not null then 'paused'
                 when j.run_at > {{schema}}.now() then 'time'
                 when coalesce(l.operator_limit, l.code_limit)
                      <= (select count(*) from {{schema}}.jobs r where r.cohort = j.cohort and r.status = 'running') then 'cohort'
                 else 'capacity' end as what) w
   where n.status = 'ready' and j.status = 'pending'
  union all
  select n.run_id, n.ix, n.id, 'budget', b.run_id::text, null
    from {{schema}}.work_budgets b join {{schema}}.runs r on r.budget_of = b.run_id and r.finished_at is null join {{schema}}.nodes n on n.run_id = r.id and n.due
   where b.begun >= b.budget;
comment on view {{schema}}.ready_nodes is
  'Nodes whose job is pending, or which are given none while a work budget is spent: what each waits for (capacity: a worker; cohort: a slot of it; paused: its queue; time; budget: that of a run), which one that is, and its place there, counted to 100.';

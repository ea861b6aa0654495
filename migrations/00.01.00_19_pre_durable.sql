-- Durable bodies: what the steps of a body gave is recorded under the fence of its attempt, and a later attempt of the same
-- generation is given the record instead of doing it again. Called by workers, for attempts whose bodies ask for it; jobs
-- without steps have no row here.
--
-- A body that sleeps, or waits for a signal, ends its attempt (suspend): the job is pending until the sleep is over, or held
-- ('signal') until a signal comes or its time is up. Whoever sends a signal, takes one or suspends locks the job's row first,
-- and looks at the signals after: so none falls between.
-- Lock order: jobs by id, then steps and signals.

create table {{schema}}.steps (
  job_id uuid not null,
  generation integer not null,
  kind text not null default 'step',
  name text not null check ({{schema}}.valid_name(name)),
  occurrence integer not null check (occurrence >= 1),
  claim_epoch bigint not null check (claim_epoch > 0),
  left_by bigint,
  signal_id bigint,
  child_job uuid,
  child_run uuid,
  recorded_at timestamptz not null,
  until timestamptz,
  effect_started_at timestamptz,
  depth integer check (depth between 1 and 100),
  done boolean not null default true,
  value jsonb,
  error jsonb,
  primary key (job_id, generation, kind, name, occurrence),
  constraint steps_kind check (case kind when 'step' then until is null and signal_id is null and num_nonnulls(value, error) = done::integer
      and (effect_started_at is not null or done and error is null)
    when 'sleep' then done and value is null and until is not null and signal_id is null
    when 'wait' then (value is null) = (signal_id is null) and (done or signal_id is null)
    when 'child' then until is null and signal_id is null and num_nonnulls(child_job, child_run) = 1 and num_nonnulls(value, error) = done::integer else false end),
  constraint steps_child_whole check ((kind = 'child') = (depth is not null) and (kind = 'child' or num_nonnulls(child_job, child_run) = 0 and (error is null or kind = 'step'))),
  constraint steps_effect check (effect_started_at is null or kind = 'step')
);
create unique index steps_signal on {{schema}}.steps (signal_id) where signal_id is not null;
create index steps_recorded_at on {{schema}}.steps (recorded_at);
comment on table {{schema}}.steps is 'What the steps of durable bodies gave, by job, generation, name and occurrence; kept as long as their job is.';
comment on column {{schema}}.steps.job_id is 'The job.';
comment on column {{schema}}.steps.generation is 'The job''s generation: one that is reopened starts without steps.';
comment on column {{schema}}.steps.kind is 'step (a call of a function), sleep, wait (for a signal), or child (a job or run that it has started).';
comment on column {{schema}}.steps.name is 'The name that the body gave it.';
comment on column {{schema}}.steps.occurrence is 'Which call of that name it was within an attempt, from 1.';
comment on column {{schema}}.steps.claim_epoch is 'The attempt that recorded it; of a wait, or a child, that is still waited for, the last that asked for it.';
comment on column {{schema}}.steps.left_by is 'The attempt whose body returned without having asked for it, as after a renaming; null where none has.';
comment on column {{schema}}.steps.recorded_at is 'When it was recorded.';
comment on column {{schema}}.steps.signal_id is 'The signal that a wait has taken; null while it waits, and where its time was up first.';
comment on column {{schema}}.steps.until is 'When a sleep ends, or the time of a wait is up; null for neither.';
comment on column {{schema}}.steps.child_job is 'The job that was started as its child.';
comment on column {{schema}}.steps.child_run is 'The run that was started as its child.';
comment on column {{schema}}.steps.depth is 'Of a child: how many bodies it is below.';
comment on column {{schema}}.steps.effect_started_at is 'When the effect of a side-effecting step was allowed to start; null for any other.';
comment on column {{schema}}.steps.done is 'False for a wait, or a child, that is still waited for, and for a step whose effect has started and nobody has told of.';
comment on column {{schema}}.steps.value is 'What it gave.';
comment on column {{schema}}.steps.error is 'What the body was told of a child that has not succeeded, or of a side-effecting step that failed.';

create table {{schema}}.signals (
  id bigint generated always as identity primary key,
  job_id uuid,
  run_id uuid,
  generation integer,
  name text not null check ({{schema}}.valid_name(name)),
  key text check (length(key) between 1 and 512),
  sent_at timestamptz not null,
  taken_at timestamptz,
  refused_at timestamptz,
  refused_why text,
  payload jsonb not null,
  constraint signals_whole check ((job_id is null) = (generation is null)
    and (job_id is not null or run_id is not null and taken_at is null and refused_at is null))
);
create unique index signals_key on {{schema}}.signals (job_id, generation, name, key) where key is not null and run_id is null;
create unique index signals_run_key on {{schema}}.signals (run_id, name, key) where key is not null and run_id is not null;
create index signals_waiting on {{schema}}.signals (job_id, generation, name, id) where taken_at is null and refused_at is null;
create index signals_kept on {{schema}}.signals (run_id, name, id) where run_id is not null and job_id is null;
create index signals_given on {{schema}}.signals (run_id, id) where run_id is not null and job_id is not null and taken_at is null and refused_at is null;
create index signals_sent_at on {{schema}}.signals (sent_at);
comment on table {{schema}}.signals is 'What was sent to jobs whose bodies wait for it, or will, or to runs for one of their jobs; kept as long as that job, or the run, is.';
comment on column {{schema}}.signals.id is 'In the order in which they were sent to their job.';
comment on column {{schema}}.signals.job_id is 'The job; of a signal to a run the one that it was given to, null while it is kept for the run.';
comment on column {{schema}}.signals.run_id is 'The run that it was sent to; null for one to a job.';
comment on column {{schema}}.signals.generation is 'The job''s generation: one that is reopened is not given signals of the last.';
comment on column {{schema}}.signals.name is 'What a body waits for it by.';
comment on column {{schema}}.signals.key is 'The sender''s own: sent twice under one key, it is there once.';
comment on column {{schema}}.signals.sent_at is 'When it was sent.';
comment on column {{schema}}.signals.taken_at is 'When a body took it.';
comment on column {{schema}}.signals.refused_at is 'When a body refused it, for it fits no type that it waits for.';
comment on column {{schema}}.signals.refused_why is 'Why.';
comment on column {{schema}}.signals.payload is 'What was sent.';

create view {{schema}}.job_steps as
  select s.job_id, j.task, j.queue, j.status, s.generation, s.kind, s.name, s.occurrence, s.claim_epoch, s.recorded_at, s.until, s.effect_started_at, s.done, s.value, s.error, s.child_job, s.child_run,
         s.generation = j.generation as current, j.status = 'succeeded' and s.left_by is not distinct from j.claim_epoch as left_out
    from {{schema}}.steps s join {{schema}}.all_jobs j on j.id = s.job_id;
comment on view {{schema}}.job_steps is 'The recorded steps with their jobs: current are those of the job''s generation, left_out those that the attempt which succeeded has not asked for.';

create view {{schema}}.waiting_for_signals as
  select j.id as job_id, j.task, j.queue, s.name, s.occurrence, s.recorded_at as since, s.until, j.status, j.held_reason, j.run_id
    from {{schema}}.jobs j join {{schema}}.steps s on s.job_id = j.id and s.generation = j.generation
   where s.kind = 'wait' and not s.done and s.claim_epoch = j.claim_epoch;
comment on view {{schema}}.waiting_for_signals is 'Which unfinished jobs wait for which signals, since when, and until when where the wait has a limit.';

-- The steps of many bodies in one statement: one commit for all that wait. With p_wait it waits for rows that others have
-- locked; without, those are answered busy, so that one job that somebody looks at does not hold up the rest.
create function {{schema}}.record_steps(p_workers uuid[], p_jobs uuid[], p_epochs bigint[], p_names text[], p_occurrences integer[], p_values jsonb[], p_wait boolean)
  returns table (n integer, answer text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_asked record;
  v_generation integer;
  v_stands {{schema}}.steps;
begin
  -- In the order of their ids, as with every lock on several jobs.
  for v_asked in
    select a.* from unnest(p_workers, p_jobs, p_epochs, p_names, p_occurrences, p_values) with ordinality as a(worker, job, epoch, name, occurrence, value, n)
     order by a.job, a.n
  loop
    n := v_asked.n;
    -- Shared, so that the steps of one body do not wait for each other; whoever takes the claim away must wait, or is waited for.
    if p_wait then
      select j.generation into v_generation from {{schema}}.jobs j
       where j.id = v_asked.job and j.claimed_by = v_asked.worker and j.claim_epoch = v_asked.epoch and j.status = 'running' for share;
    else
      select j.generation into v_generation from {{schema}}.jobs j
       where j.id = v_asked.job and j.claimed_by = v_asked.worker and j.claim_epoch = v_asked.epoch and j.status = 'running' for share skip locked;
    end if;
    if not found then
      answer := case when p_wait then 'fenced' else 'busy' end;
      return next;
      continue;
    end if;
    insert into {{schema}}.steps (job_id, generation, name, occurrence, claim_epoch, recorded_at, value)
      values (v_asked.job, v_generation, v_asked.name, v_asked.occurrence, v_asked.epoch, {{schema}}.now(), v_asked.value)
      on conflict do nothing;
    if found then
      answer := 'recorded';
    else
      select s.* into v_stands from {{schema}}.steps s
       where s.job_id = v_asked.job and s.generation = v_generation and s.kind = 'step' and s.name = v_asked.name and s.occurrence = v_asked.occurrence;
      answer := case when v_stands.value = v_asked.value then 'replay' else 'conflict' end;
    end if;
    return next;
  end loop;
end $$;
comment on function {{schema}}.record_steps(uuid[], uuid[], bigint[], text[], integer[], jsonb[], boolean) is
  'Records what steps of running attempts gave, each under its own fence. Answers for each, by its place: recorded, replay (that value stands already), conflict (another does), fenced (the attempt is over or another''s), or without p_wait busy (ask again with it). Only recorded changes anything.';

create function {{schema}}.leave_steps(p_worker uuid, p_job uuid, p_epoch bigint, p_kinds text[], p_names text[], p_occurrences integer[]) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_generation integer;
  v_left record;
  v_n integer := 0;
begin
  select j.generation into v_generation from {{schema}}.jobs j
   where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for share;
  if not found then
    return 0;
  end if;
  for v_left in select l.* from unnest(p_kinds, p_names, p_occurrences) as l(kind, name, occurrence) loop
    update {{schema}}.steps s set left_by = p_epoch
     where s.job_id = p_job and s.generation = v_generation and s.kind = v_left.kind and s.name = v_left.name and s.occurrence = v_left.occurrence;
    v_n := v_n + found::int;
  end loop;
  return v_n;
end $$;
comment on function {{schema}}.leave_steps(uuid, uuid, bigint, text[], text[], integer[]) is
  'Notes, under the fence, which recorded steps an attempt that is about to succeed has not asked for. Returns how many.';

create function {{schema}}.begin_sleep(p_worker uuid, p_job uuid, p_epoch bigint, p_name text, p_occurrence integer, p_seconds double precision)
  returns table (answer text, remaining double precision)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_generation integer;
  v_now timestamptz;
begin
  select j.generation into v_generation from {{schema}}.jobs j
   where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for share;
  if not found then
    answer := 'fenced';
    return next;
    return;
  end if;
  v_now := {{schema}}.now();
  -- A sleep of over 100 years could leave the calendar.
  insert into {{schema}}.steps (job_id, generation, kind, name, occurrence, claim_epoch, recorded_at, until)
    values (p_job, v_generation, 'sleep', p_name, p_occurrence, p_epoch, v_now, v_now + make_interval(secs => least(p_seconds, 3155760000)))
    on conflict do nothing;
  answer := 'sleeps';
  select extract(epoch from s.until - v_now) into remaining from {{schema}}.steps s
   where s.job_id = p_job and s.generation = v_generation and s.kind = 'sleep' and s.name = p_name and s.occurrence = p_occurrence;
  return next;
end $$;
comment on function {{schema}}.begin_sleep(uuid, uuid, bigint, text, integer, double precision) is
  'Records under the fence when a sleep ends, once; answers how many seconds are left (sleeps), or fenced.';

create function {{schema}}.begin_wait(p_worker uuid, p_job uuid, p_epoch bigint, p_name text, p_occurrence integer, p_seconds double precision)
  returns table (answer text, signal_id bigint, payload text, remaining double precision)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_generation integer;
  v_run uuid;
  v_now timestamptz;
  v_wait {{schema}}.steps;
begin
  select j.generation, j.run_id into v_generation, v_run from {{schema}}.jobs j
   where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for no key update;
  if not found then
    return query select 'fenced'::text, null::bigint, null::text, null::double precision;
    return;
  end if;
  v_now := {{schema}}.now();
  insert into {{schema}}.steps as w (job_id, generation, kind, name, occurrence, claim_epoch, recorded_at, until, done)
    values (p_job, v_generation, 'wait', p_name, p_occurrence, p_epoch, v_now, v_now + make_interval(secs => case when p_seconds > 3155760000 then 3155760000 else p_seconds end), false)
    -- Of another epoch, it is one that the body asks for no more, and no signal wakes it.
    on conflict (job_id, generation, kind, name, occurrence) do update set claim_epoch = p_epoch, left_by = null where not w.done;
  select s.* into v_wait from {{schema}}.steps s
   where s.job_id = p_job and s.generation = v_generation and s.kind = 'wait' and s.name = p_name and s.occurrence = p_occurrence;
  if v_wait.done then
    -- By this attempt, and the answer was lost.
    return query select case when v_wait.signal_id is null then 'timed_out' else 'taken' end, v_wait.signal_id, v_wait.value::text, null::double precision;
    return;
  end if;
  if v_run is null then
    return query select 'signal'::text, g.id, g.payload::text, null::double precision from {{schema}}.signals g
      where g.job_id = p_job and g.generation = v_generation and g.name = p_name and g.taken_at is null and g.refused_at is null order by g.id limit 1;
  else
    return query select 'signal'::text, g.id, g.payload::text, null::double precision from {{schema}}.signals g
      where g.id = {{schema}}.signal_for_node(p_job, v_generation, v_run, array[p_name]);
  end if;
  if found then
    return;
  end if;
  if v_wait.until <= v_now then
    update {{schema}}.steps s set done = true, claim_epoch = p_epoch, recorded_at = v_now
     where s.job_id = p_job and s.generation = v_generation and s.kind = 'wait' and s.name = p_name and s.occurrence = p_occurrence;
    return query select 'timed_out'::text, null::bigint, null::text, null::double precision;
    return;
  end if;
  return query select 'waits'::text, null::bigint, null::text, extract(epoch from v_wait.until - v_now)::double precision;
end $$;
comment on function {{schema}}.begin_wait(uuid, uuid, bigint, text, integer, double precision) is
  'Records under the fence what a body waits for, and until when, once. Answers signal (the oldest that it may take, not taken yet), waits (with the seconds that are left, null for no limit), timed_out (its time is up, and that is recorded), taken (what it has taken before), or fenced.';

create function {{schema}}.take_signal(p_worker uuid, p_job uuid, p_epoch bigint, p_name text, p_occurrence integer, p_signal bigint, p_refused text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_generation integer;
  v_run uuid;
  v_runs uuid[];
  v_now timestamptz;
  v_payload jsonb;
begin
  select j.generation, j.run_id into v_generation, v_run from {{schema}}.jobs j
   where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for no key update;
  if not found then
    return 'fenced';
  end if;
  v_now := {{schema}}.now();
  if v_run is not null then
    -- Kept for its run, it is whoever's comes first: that writes its row.
    v_runs := {{schema}}.run_and_above(v_run);
    update {{schema}}.signals g set job_id = p_job, generation = v_generation
     where g.id = p_signal and g.run_id = any(v_runs) and g.job_id is null and g.name = p_name and exists (
       select from {{schema}}.steps s where s.job_id = p_job and s.generation = v_generation and s.kind = 'wait' and s.name = p_name
          and s.occurrence = p_occurrence and not s.done);
  end if;
  if p_refused is not null then
    update {{schema}}.signals g set refused_at = v_now, refused_why = left(p_refused, 2000)
     where g.id = p_signal and g.job_id = p_job and g.taken_at is null and g.refused_at is null;
    return 'refused';
  end if;
  if exists (select from {{schema}}.steps s where s.job_id = p_job and s.generation = v_generation and s.kind = 'wait' and s.name = p_name
               and s.occurrence = p_occurrence and s.signal_id = p_signal) then
    return 'taken';
  end if;
  update {{schema}}.signals g set taken_at = v_now
   where g.id = p_signal and g.job_id = p_job and g.generation = v_generation and g.name = p_name and g.taken_at is null and g.refused_at is null
     and exists (select from {{schema}}.steps s where s.job_id = p_job and s.generation = v_generation and s.kind = 'wait' and s.name = p_name
               and s.occurrence = p_occurrence and not s.done)
   returning g.payload into v_payload;
  if not found then
    return 'gone';
  end if;
  update {{schema}}.steps s set done = true, signal_id = p_signal, value = v_payload, claim_epoch = p_epoch, recorded_at = v_now
   where s.job_id = p_job and s.generation = v_generation and s.kind = 'wait' and s.name = p_name and s.occurrence = p_occurrence;
  return 'taken';
end $$;
comment on function {{schema}}.take_signal(uuid, uuid, bigint, text, integer, bigint, text) is
  'Gives a signal to the wait of a running attempt, under its fence: the signal is taken and the wait recorded, or neither. With p_refused it is noted instead that it fits nothing, and the wait goes on. Answers taken, refused, gone (another wait has taken it: ask again) or fenced.';

-- The caller has locked the row, and found it running in this attempt without a cancel request.
create function {{schema}}.suspend(p_job {{schema}}.jobs, p_outcome_id bigint, p_error jsonb) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_now timestamptz := {{schema}}.now();
  v_wake timestamptz;
  v_waits text[];
  v_child boolean;
  v_held text;
begin
  -- This statement sees what was committed before the row was locked, and whoever sends a signal waits for that lock.
  select min(s.until), array_agg(s.name) filter (where s.kind = 'wait'), count(*) filter (where s.kind = 'child') > 0 into v_wake, v_waits, v_child
    from jsonb_to_recordset(case jsonb_typeof(p_error -> 'for') when 'array' then p_error -> 'for' else '[]' end) as f(kind text, name text, occurrence integer)
    join {{schema}}.steps s on s.job_id = p_job.id and s.generation = p_job.generation and s.kind = f.kind and s.name = f.name and s.occurrence = f.occurrence
   where s.kind = 'sleep' or s.kind in ('wait', 'child') and not s.done;
  v_held := case when v_waits is not null then 'signal' when v_child then 'child' end;
  if v_held is null then
    v_wake := coalesce(v_wake, v_now);
    if v_wake > p_job.deadline then
      return false;
    end if;
  elsif exists (select from {{schema}}.signals g where g.job_id = p_job.id and g.generation = p_job.generation and g.name = any(v_waits)
                  and g.taken_at is null and g.refused_at is null)
        or p_job.run_id is not null and {{schema}}.signal_for_node(p_job.id, p_job.generation, p_job.run_id, v_waits) is not null
        or v_child and {{schema}}.waits_for_ended(p_job.id, p_job.generation, p_job.claim_epoch) then
    v_wake := v_now;
    v_held := null;
  else
    v_wake := coalesce(v_wake, v_now + interval '100 years');
  end if;
  insert into {{schema}}.ledger (job_id, ended_at, claimed_at, claim_epoch, worker_id, outcome_id, effect_started_at, attempt, generation, outcome, error)
    values (p_job.id, v_now, p_job.claimed_at, p_job.claim_epoch, p_job.claimed_by, p_outcome_id, p_job.effect_started_at, p_job.attempt, p_job.generation, 'suspended', p_error);
  update {{schema}}.jobs j set status = case when v_held is null then 'pending' else 'held' end, held_reason = v_held,
      claimed_by = null, claimed_at = null, effect_started_at = null, run_at = greatest(v_wake, v_now)
    where j.id = p_job.id;
  if v_wake <= v_now then
    perform {{schema}}.wake(array[p_job.queue]);
  end if;
  return true;
end $$;
comment on function {{schema}}.suspend({{schema}}.jobs, bigint, jsonb) is
  'Ends an attempt whose body waits: the steps that it waits for are named in the error, under for. Pending until the first of its sleeps ends; held where it waits for a signal that has not come, or a child that has not ended, with the instant in run_at at which it is to look again. Uses up no attempt and no counter. Answers false, and does nothing, where the sleep would end after the deadline. Called by end_attempts alone.';

create function {{schema}}.wake_waiting(p_limit integer default 500) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_ids uuid[];
begin
  v_ids := array(select j.id from {{schema}}.jobs j where j.status = 'held' and j.held_reason in ('signal', 'child') and j.run_at <= {{schema}}.now()
    order by j.run_at, j.id limit p_limit for update skip locked);
  update {{schema}}.jobs j set status = 'pending', held_reason = null where j.id = any(v_ids);
  perform {{schema}}.wake(array[q.queue], q.n) from (select j.queue, count(*)::integer as n from {{schema}}.jobs j where j.id = any(v_ids) group by j.queue) q;
  return cardinality(v_ids);
end $$;
comment on function {{schema}}.wake_waiting(integer) is 'Lets up to p_limit jobs go on whose wait has lasted its time, or beside whose wait a sleep has ended; their bodies are told so. Returns how many.';

create index jobs_signal on {{schema}}.jobs (run_at) where status = 'held' and held_reason in ('signal', 'child');

create function {{schema}}.end_sleeps(p_job {{schema}}.jobs) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  update {{schema}}.steps s set until = {{schema}}.now()
   where s.job_id = p_job.id and s.generation = p_job.generation and s.kind = 'sleep' and s.until > {{schema}}.now()
$$;
comment on function {{schema}}.end_sleeps({{schema}}.jobs) is 'Ends the sleeps of a job that is made due by hand, or its body would sleep on.';

create function {{schema}}.check_signal(p_name text, p_payload jsonb, p_key text) returns jsonb
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
  if {{schema}}.valid_name(p_name) is not true then
    raise exception using errcode = 'WF009', message = format('a signal is named %L', left(p_name, 200)), hint = 'Give 1 to 128 printable ASCII characters without spaces.';
  end if;
  if length(p_key) not between 1 and 512 then
    raise exception using errcode = 'WF009', message = format('the key of a signal has %s characters', length(p_key)), hint = 'Give 1 to 512 characters, or none.';
  end if;
  p_payload := coalesce(p_payload, 'null');
  if octet_length(p_payload::text) > (select i.max_payload_bytes from {{schema}}.installation i) then
    raise exception using errcode = 'WF009', message = format('the payload of signal %s has %s bytes as JSON', p_name, octet_length(p_payload::text)),
      hint = 'Store it elsewhere and send a reference.';
  end if;
  return p_payload;
end $$;
comment on function {{schema}}.check_signal(text, jsonb, text) is 'Refuses (WF009) what cannot be a signal; answers its payload.';

-- The one too many is looked for, by the index: so no more rows are read than the bound, however the rest was dealt with.
create function {{schema}}.bound_signals(p_job uuid, p_generation integer, p_run uuid) returns void
  language plpgsql stable security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_most integer := (select i.max_waiting_signals from {{schema}}.installation i);
begin
  if p_run is null then
    perform from {{schema}}.signals g where g.job_id = p_job and g.generation = p_generation and g.taken_at is null and g.refused_at is null offset v_most limit 1;
  else
    perform from {{schema}}.signals g where g.run_id = p_run and g.job_id is null offset v_most limit 1;
  end if;
  if found then
    raise exception using errcode = 'WF040', message = format('%s signals to %s wait to be taken, and no more may', v_most, coalesce('run ' || p_run, 'job ' || p_job)),
      detail = (jsonb_build_object('waiting', v_most, 'limit', v_most) || case when p_run is null then jsonb_build_object('job_id', p_job) else jsonb_build_object('run_id', p_run) end)::text,
      hint = format('The signal was not kept. Send it again once some are taken (taskq %s show has them), send fewer, or raise max_waiting_signals in installation.', case when p_run is null then 'jobs' else 'runs' end);
  end if;
end $$;
comment on function {{schema}}.bound_signals(uuid, integer, uuid) is
  'Refuses (WF040) one more signal to a job, or to a run, for which too many wait. The caller holds the lock that each sender takes first, so that nobody else sends one meanwhile, and has inserted it.';

create function {{schema}}.send_signal(job_id uuid, name text, payload jsonb default 'null', key text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_job {{schema}}.jobs;
  v_old record;
  v_sent {{schema}}.signals;
begin
  payload := {{schema}}.check_signal(name, payload, key);
  -- It may be reopened, or end, while we wait for its row: then look again.
  for i in 1 .. 20 loop
    select * into v_job from {{schema}}.jobs j where j.id = job_id for no key update;
    exit when found;
    select h.status into v_old from {{schema}}.history h where h.id = job_id and h.finished_at >= {{schema}}.id_time(job_id) - interval '1 day';
    if found then
      raise exception using errcode = 'WF012', message = format('job %s is %s, and waits for nothing', job_id, v_old.status),
        detail = jsonb_build_object('job_id', job_id, 'status', v_old.status)::text, hint = 'The signal was not kept. A job that is reopened begins without signals: send it then.';
    end if;
    if not exists (select from {{schema}}.jobs j where j.id = job_id)
      and not exists (select from {{schema}}.history h where h.id = job_id and h.finished_at >= {{schema}}.id_time(job_id) - interval '1 day') then
      raise exception using errcode = 'WF011', message = format('there is no job %s', job_id),
        detail = jsonb_build_object('job_id', job_id)::text, hint = 'Check the id; retention may have dropped it.';
    end if;
    if i = 20 then perform {{schema}}.moving(job_id); end if;
  end loop;
  insert into {{schema}}.signals (job_id, generation, name, key, sent_at, payload)
    values (job_id, v_job.generation, name, key, {{schema}}.now(), payload) on conflict do nothing;
  if not found then
    select g.* into v_sent from {{schema}}.signals g where g.job_id = v_job.id and g.generation = v_job.generation and g.name = send_signal.name and g.key = send_signal.key;
    if v_sent.payload = payload then
      return 'already';
    end if;
    raise exception using errcode = 'WF030', message = format('signal %s was sent to job %s under this key with another payload', name, job_id),
      detail = jsonb_build_object('job_id', job_id, 'name', name, 'key', key)::text, hint = 'Nothing was sent. Give each signal a key of its own, or none.';
  end if;
  perform {{schema}}.bound_signals(job_id, v_job.generation, null);
  if v_job.status = 'held' and v_job.held_reason = 'signal' and exists (
      select from {{schema}}.steps s where s.job_id = v_job.id and s.generation = v_job.generation and s.kind = 'wait' and s.name = send_signal.name and not s.done and s.claim_epoch = v_job.claim_epoch) then
    update {{schema}}.jobs j set status = 'pending', held_reason = null, run_at = {{schema}}.now() where j.id = v_job.id;
    perform {{schema}}.wake(array[v_job.queue]);
  end if;
  return 'sent';
end $$;
comment on function {{schema}}.send_signal(uuid, text, jsonb, text) is
  'Sends a signal to a job whose body waits for it, or will: kept until it is taken, in order. One that waits for it goes on, with this transaction. Answers sent, or already (it was sent under this key before). Refused for a finished job (WF012), one that is not there (WF011), another payload under the same key (WF030), and more than max_waiting_signals that nobody has taken (WF040). Holds the job''s row until the transaction ends: keep that short.';

create function {{schema}}.prune_steps(p_limit integer default 1000) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_n integer;
  v_total integer;
begin
  delete from {{schema}}.steps s where s.ctid = any(array(
    select o.ctid from {{schema}}.steps o, {{schema}}.installation i where o.recorded_at < {{schema}}.now() - i.history_retention
       and not exists (select from {{schema}}.jobs j where j.id = o.job_id) and not exists (select from {{schema}}.history h where h.id = o.job_id)
     order by o.recorded_at limit p_limit for update of o skip locked));
  get diagnostics v_n = row_count;
  v_total := v_n;
  delete from {{schema}}.signals g where g.ctid = any(array(
    select o.ctid from {{schema}}.signals o, {{schema}}.installation i where o.sent_at < {{schema}}.now() - i.history_retention
       and not exists (select from {{schema}}.jobs j where j.id = o.job_id) and not exists (select from {{schema}}.history h where h.id = o.job_id)
       and not exists (select from {{schema}}.runs r where r.id = o.run_id)
     order by o.sent_at limit p_limit for update of o skip locked));
  get diagnostics v_n = row_count;
  return v_total + v_n;
end $$;
comment on function {{schema}}.prune_steps(integer) is 'Forgets the steps and signals of jobs and runs that retention has dropped, at most p_limit of each. Returns how many; repeat until 0.';

create function {{schema}}.check_steps(scope text default 'live') returns table (law integer, code text, job_id uuid, detail text)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  -- Unfinished jobs always; with scope all also finished ones.
  return query
    select 4, 'step_of_no_attempt', s.job_id, format('step %s #%s was recorded by attempt %s, and there was none', s.name, s.occurrence, s.claim_epoch)
      from {{schema}}.steps s join {{schema}}.jobs j on j.id = s.job_id
     where s.claim_epoch > j.claim_epoch or s.claim_epoch > j.pruned_attempts
       and not (s.claim_epoch = j.claim_epoch and j.status in ('running', 'unknown'))
       and not exists (select from {{schema}}.ledger l where l.job_id = s.job_id and l.claim_epoch = s.claim_epoch);
  return query
    select 4, 'step_of_other_generation', s.job_id, format('step %s #%s is of generation %s, and attempt %s, which recorded it, is not', s.name, s.occurrence, s.generation, s.claim_epoch)
      from {{schema}}.steps s join {{schema}}.jobs j on j.id = s.job_id
      left join {{schema}}.ledger l on l.job_id = s.job_id and l.claim_epoch = s.claim_epoch
     where s.generation <> coalesce(l.generation, j.generation) and (l.job_id is not null or s.claim_epoch = j.claim_epoch)
       -- What had happened is kept by a reopening.
       and not (s.effect_started_at is not null and s.value is not null and s.generation > l.generation);
  return query
    select 4, 'step_left_by_no_attempt', s.job_id, format('step %s #%s of attempt %s was left by attempt %s, the job is at %s', s.name, s.occurrence, s.claim_epoch, s.left_by, j.claim_epoch)
      from {{schema}}.steps s join {{schema}}.jobs j on j.id = s.job_id
     where s.left_by > j.claim_epoch or s.left_by < s.claim_epoch;
  -- A step whose effect has started and is not told is that of the attempt that is open, and its job says so.
  return query
    select 4, 'step_untold', s.job_id, format('step %s #%s of attempt %s has started its effect and nobody has told of it; the job is %s, at attempt %s', s.name, s.occurrence, s.claim_epoch, j.status, j.claim_epoch)
      from {{schema}}.steps s join {{schema}}.jobs j on j.id = s.job_id
     where s.kind = 'step' and not s.done
       and not (s.generation = j.generation and s.claim_epoch = j.claim_epoch and j.status in ('running', 'unknown') and j.effect_started_at is not null and j.effect_class <> 'side_effecting');
  return query
    select 4, 'held_for_no_signal', j.id, 'it is held for a signal, and waits for none'::text from {{schema}}.jobs j
     where j.status = 'held' and j.held_reason = 'signal' and not exists (
       select from {{schema}}.steps s where s.job_id = j.id and s.generation = j.generation and s.kind = 'wait' and not s.done and s.claim_epoch = j.claim_epoch);
  return query
    select 4, 'signal_not_given', j.id, format('it is held for signal %s, which has come', g.name) from {{schema}}.jobs j
      join {{schema}}.signals g on g.job_id = j.id and g.generation = j.generation and g.taken_at is null and g.refused_at is null
     where j.status = 'held' and j.held_reason = 'signal' and exists (
       select from {{schema}}.steps s where s.job_id = j.id and s.generation = j.generation and s.kind = 'wait' and not s.done and s.claim_epoch = j.claim_epoch and s.name = g.name);
  return query
    select 4, 'signal_taken_by_nobody', g.job_id, format('signal %s was taken, and no wait has it', g.name) from {{schema}}.signals g
     where g.taken_at is not null and not exists (select from {{schema}}.steps s where s.signal_id = g.id and s.job_id = g.job_id)
       -- What retention has dropped the job of is forgotten bit by bit.
       and (exists (select from {{schema}}.jobs j where j.id = g.job_id) or exists (select from {{schema}}.history h where h.id = g.job_id));
  return query
    select 4, 'run_signal_not_given', j.id, format('it is held for signal %s, which is kept for its run', s.name) from {{schema}}.jobs j
      join {{schema}}.steps s on s.job_id = j.id and s.generation = j.generation and s.kind = 'wait' and not s.done and s.claim_epoch = j.claim_epoch
     where j.status = 'held' and j.held_reason = 'signal' and j.run_id is not null
       and exists (select from {{schema}}.signals g where g.run_id = any({{schema}}.run_and_above(j.run_id)) and g.job_id is null and g.name = s.name);
  return query
    select 4, 'run_signal_astray', g.job_id, format('signal %s was sent to run %s, and given to a job that is no node of it', g.name, g.run_id)
      from {{schema}}.signals g join {{schema}}.nodes n on n.id = g.job_id
     where g.run_id is not null and g.run_id <> all({{schema}}.run_and_above(n.run_id));
  return query
    select 4, 'wait_without_its_signal', s.job_id, format('wait %s #%s has taken signal %s, which is not taken, or differs', s.name, s.occurrence, s.signal_id) from {{schema}}.steps s
     where s.signal_id is not null and not exists (
       select from {{schema}}.signals g where g.id = s.signal_id and g.job_id = s.job_id and g.generation = s.generation and g.name = s.name
          and g.taken_at is not null and g.payload = s.value)
       and (exists (select from {{schema}}.jobs j where j.id = s.job_id) or exists (select from {{schema}}.history h where h.id = s.job_id));
  if scope = 'all' then
    return query
      select 4, 'step_of_no_attempt', s.job_id, format('step %s #%s was recorded by attempt %s, and there was none', s.name, s.occurrence, s.claim_epoch)
        from {{schema}}.steps s join {{schema}}.history h on h.id = s.job_id
       where s.claim_epoch > h.claim_epoch or s.claim_epoch > h.pruned_attempts and not (s.claim_epoch = h.claim_epoch and h.worker_id is not null)
         and not exists (select from {{schema}}.ledger l where l.job_id = s.job_id and l.claim_epoch = s.claim_epoch);
    return query
      select 4, 'step_untold', s.job_id, format('step %s #%s of attempt %s has started its effect and nobody has told of it; the job is %s', s.name, s.occurrence, s.claim_epoch, h.status)
        from {{schema}}.steps s join {{schema}}.history h on h.id = s.job_id where s.kind = 'step' and not s.done;
    return query
      select 4, 'step_of_no_job', s.job_id, format('step %s #%s', s.name, s.occurrence) from {{schema}}.steps s
       where not exists (select from {{schema}}.jobs j where j.id = s.job_id) and not exists (select from {{schema}}.history h where h.id = s.job_id)
         and s.recorded_at > (select min(p.day) from {{schema}}.partitions p where p.parent = 'history') + interval '1 day';
  end if;
end $$;
comment on function {{schema}}.check_steps(text) is 'The part of check_invariants that is about the steps, sleeps and signals of durable bodies.';

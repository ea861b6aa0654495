-- Side-effecting steps of durable bodies: the effect of one is started under the fence before its function is called, and
-- what became of it is told after. Called by workers (start_step, end_step), and by decide_unknown (settle_step).
--
-- While it has started and is not told, the row of the step is not done and effect_started_at stands on the job, whose class
-- is another. Every way out of an attempt looks at that column: the job becomes unknown, and waits until the step is told.
-- So jobs without such steps pay for it no more than a column that they have. One at a time for each attempt.
-- Lock order: workers, runs, then jobs by id, then steps.

create function {{schema}}.start_step(p_worker uuid, p_job uuid, p_epoch bigint, p_name text, p_occurrence integer)
  returns table (answer text, job_id uuid, claim_epoch bigint, claimed_by uuid, name text, occurrence integer, effect_started_at timestamptz, value text, error text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_holds boolean;
  v_job {{schema}}.jobs;
  v_step {{schema}}.steps;
  v_answer text;
begin
  perform from {{schema}}.workers w
    where w.id = p_worker and w.status in ('live', 'draining') and w.lease_expires_at > {{schema}}.now() for key share;
  v_holds := found;
  -- Whoever asks to cancel writes this row: what commits first decides.
  select j.* into v_job from {{schema}}.jobs j
   where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for no key update;
  if not found then
    return query select 'fenced'::text, null::uuid, null::bigint, null::uuid, null::text, null::integer, null::timestamptz, null::text, null::text;
    return;
  end if;
  select s.* into v_step from {{schema}}.steps s
   where s.job_id = p_job and s.generation = v_job.generation and s.kind = 'step' and s.name = p_name and s.occurrence = p_occurrence;
  if v_step.done then
    v_answer := 'done';
  elsif v_step.claim_epoch = p_epoch then
    v_answer := 'started';
  elsif v_step.job_id is not null then
    -- Nobody was told of it, and yet this attempt was claimed: it is not called, and with this attempt the job is unknown.
    update {{schema}}.steps s set claim_epoch = p_epoch
     where s.job_id = p_job and s.generation = v_job.generation and s.kind = 'step' and s.name = p_name and s.occurrence = p_occurrence;
    update {{schema}}.jobs j set effect_started_at = v_step.effect_started_at where j.id = p_job;
    v_answer := 'untold';
  elsif v_job.effect_class = 'side_effecting' then
    v_answer := 'class';
  elsif v_job.effect_started_at is not null then
    v_answer := 'another';
  elsif v_job.cancel_requested_at is not null then
    v_answer := 'cancelled';
  elsif not v_holds then
    v_answer := 'lease';
  else
    insert into {{schema}}.steps (job_id, generation, name, occurrence, claim_epoch, recorded_at, effect_started_at, done)
      values (p_job, v_job.generation, p_name, p_occurrence, p_epoch, {{schema}}.now(), {{schema}}.now(), false) returning * into v_step;
    update {{schema}}.jobs j set effect_started_at = v_step.effect_started_at where j.id = p_job;
    v_answer := 'started';
  end if;
  return query select v_answer, v_job.id, v_job.claim_epoch, v_job.claimed_by, v_step.name, v_step.occurrence, v_step.effect_started_at, v_step.value::text, v_step.error::text;
end $$;
comment on function {{schema}}.start_step(uuid, uuid, bigint, text, integer) is
  'Allows a side-effecting step of a running attempt to start its effect, once: under the fence, where nobody has asked to cancel the job and the worker''s lease holds. Answers started (also if asked again by that attempt), done (with what it gave, or its error), cancelled, lease, another (one is under way already), class (the job itself is side-effecting), untold (an earlier attempt has started it and nobody has told of it; that makes the job unknown) or fenced. Only started allows anything.';

-- The caller has locked the row of the job, and found an effect of a step started and not told.
create function {{schema}}.settle_step(p_job {{schema}}.jobs, p_happened boolean, p_value jsonb, p_error jsonb default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_step {{schema}}.steps;
begin
  select s.* into v_step from {{schema}}.steps s where s.job_id = p_job.id and s.generation = p_job.generation and s.kind = 'step' and not s.done limit 1;
  if p_happened then
    update {{schema}}.steps s set done = true, value = case when p_error is null then p_value end, error = p_error, recorded_at = {{schema}}.now()
     where s.job_id = p_job.id and s.generation = p_job.generation and s.kind = 'step' and s.name = v_step.name and s.occurrence = v_step.occurrence;
  else
    delete from {{schema}}.steps s
     where s.job_id = p_job.id and s.generation = p_job.generation and s.kind = 'step' and s.name = v_step.name and s.occurrence = v_step.occurrence;
  end if;
  update {{schema}}.jobs j set effect_started_at = null where j.id = p_job.id;
  return coalesce(v_step.name || case when v_step.occurrence > 1 then ' #' || v_step.occurrence else '' end, '?');
end $$;
comment on function {{schema}}.settle_step({{schema}}.jobs, boolean, jsonb, jsonb) is
  'Tells what became of the effect of the step that is under way: its row is done with this value or error, or taken away so that it may start again. Answers the step. Called by end_step and decide_unknown alone.';

-- p_started: which start it is about. One that was taken back may be followed by another of the same attempt, and a statement
-- whose sender has given it up may come after that.
create function {{schema}}.end_step(p_worker uuid, p_job uuid, p_epoch bigint, p_name text, p_occurrence integer, p_started timestamptz, p_value jsonb, p_error jsonb)
  returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_job {{schema}}.jobs;
  v_step {{schema}}.steps;
  v_happened boolean := num_nonnulls(p_value, p_error) > 0;
begin
  select j.* into v_job from {{schema}}.jobs j
   where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for no key update;
  if not found then
    -- Too late for its attempt, and perhaps in time for the job: where it is unknown, nobody has decided.
    perform {{schema}}.ensure_today();
    perform {{schema}}.lock_run_of(p_job);
    select j.* into v_job from {{schema}}.jobs j
     where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'unknown' for update;
    if not found then
      return 'fenced';
    end if;
  end if;
  select s.* into v_step from {{schema}}.steps s
   where s.job_id = p_job and s.generation = v_job.generation and s.kind = 'step' and s.name = p_name and s.occurrence = p_occurrence;
  if v_step.job_id is null then
    -- Taken away, and the answer was lost.
    return case when v_happened then 'conflict' else 'replay' end;
  elsif v_step.done then
    return case when (v_step.value, v_step.error) is not distinct from (p_value, p_error) then 'replay' else 'conflict' end;
  elsif v_step.effect_started_at is distinct from p_started then
    return 'conflict';
  elsif v_job.status = 'running' then
    perform {{schema}}.settle_step(v_job, v_happened, p_value, p_error);
    return 'recorded';
  end if;
  perform {{schema}}.decide_unknown(p_job, p_epoch, v_happened, p_value, 'told late by its own worker', 'worker ' || p_worker, false, p_error);
  return 'late';
end $$;
comment on function {{schema}}.end_step(uuid, uuid, bigint, text, integer, timestamptz, jsonb, jsonb) is
  'Records under the fence what a started side-effecting step gave, or the error that it failed with; with neither, that it did not happen, and may start again. Answers recorded, replay (that stands already), conflict (another stands, or it is another start), late (the job was unknown, and goes on without this attempt) or fenced (the attempt is over).';

-- Where an effect has undone what was done, the outside key is another, and the steps are to be done anew.
create function {{schema}}.keep_effects(p_job uuid, p_generation integer) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  insert into {{schema}}.steps (job_id, generation, kind, name, occurrence, claim_epoch, recorded_at, effect_started_at, value)
    select s.job_id, s.generation + 1, s.kind, s.name, s.occurrence, s.claim_epoch, s.recorded_at, s.effect_started_at, s.value
      from {{schema}}.steps s where s.job_id = p_job and s.generation = p_generation and s.kind = 'step' and s.effect_started_at is not null and s.value is not null
$$;
comment on function {{schema}}.keep_effects(uuid, integer) is
  'Gives a job that is reopened the side-effecting steps of its last generation that gave something: what happened is not done again because something behind it failed. Those that failed are, as a side-effecting job would be. Called by retry alone.';

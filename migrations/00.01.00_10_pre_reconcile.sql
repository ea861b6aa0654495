-- Reconciling: asking the outside world what became of an attempt whose outcome was never told. The asking is a job of its
-- own, of the task that the code of the unknown job's task names as its hook: task_config.reconcile_task for the whole body,
-- task_config.reconcile_steps for a step. It answers through answer_reconcile. Its payload names the attempt and nothing more:
-- the worker reads the rest from the row.

create function {{schema}}.hook_of(p_job {{schema}}.jobs) returns text
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
  if p_job.effect_class <> 'side_effecting' and p_job.effect_started_at is not null then
    return (select c.reconcile_steps ->> s.name from {{schema}}.task_config c, {{schema}}.steps s
      where c.task = p_job.task and s.job_id = p_job.id and s.generation = p_job.generation and s.kind = 'step' and not s.done limit 1);
  end if;
  return (select c.reconcile_task from {{schema}}.task_config c where c.task = p_job.task);
end $$;
comment on function {{schema}}.hook_of({{schema}}.jobs) is
  'The task that can ask what became of this unknown attempt: that of the step whose effect is under way, else that of the whole body; null for none.';

-- One open job for each attempt: a unique key, held while that job is in jobs, sees to it.
create function {{schema}}.enqueue_reconcile(p_job {{schema}}.jobs) returns uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_hook {{schema}}.task_config;
  v_deadline double precision;
  v_id uuid;
begin
  select r.* into v_hook from {{schema}}.task_config r where r.task = {{schema}}.hook_of(p_job);
  if not found then
    return null;
  end if;
  if not exists (select from {{schema}}.policies p where p.id = v_hook.policy_id) then
    raise exception using errcode = 'WF014', message = format('the policy of task %L is missing', v_hook.task), hint = 'Restart a worker that knows the task.';
  end if;
  -- In the queue of the job: whoever serves that knows its task, and so its hook.
  select e.job_id into v_id from {{schema}}.enqueue_many(
    jsonb_build_array(jsonb_strip_nulls(jsonb_build_object('task', v_hook.task, 'queue', p_job.queue, 'priority', v_hook.priority, 'max_attempts', v_hook.max_attempts,
      'effect_class', v_hook.effect_class, 'policy_id', v_hook.policy_id, 'required_worker_schema', v_hook.required_worker_schema))),
    array[1], array[jsonb_build_object('job_id', p_job.id, 'claim_epoch', p_job.claim_epoch)::text], array[p_job.id || '/' || p_job.claim_epoch]) e;
  return v_id;
end $$;
comment on function {{schema}}.enqueue_reconcile({{schema}}.jobs) is
  'Enqueues the job that reconciles this unknown attempt, or finds the one that is open; null where its task has no hook for what is unknown of it: the whole body, or one of its steps.';

create function {{schema}}.request_reconcile(p_job {{schema}}.jobs) returns uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  return {{schema}}.enqueue_reconcile(p_job);
exception when others then
  return null;
end $$;
comment on function {{schema}}.request_reconcile({{schema}}.jobs) is
  'Enqueues the job that reconciles this unknown attempt, where its task has a hook for it; returns its id, or null. Never fails: an attempt must be able to become unknown; what is missing here is enqueued by reconcile_missing.';

create function {{schema}}.reconcile_missing(p_after uuid default null, p_limit integer default 100)
    returns table (job_id uuid, task text, queue text, claim_epoch bigint, attempt integer, reconcile_job uuid)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_job {{schema}}.jobs;
begin
  for v_job in
    select j.* from {{schema}}.jobs j
     where j.status = 'unknown' and (p_after is null or j.id > p_after)
       and exists (select from {{schema}}.unknowns u where u.job_id = j.id and u.claim_epoch = j.claim_epoch and u.reconcile_job is null)
       and {{schema}}.hook_of(j) is not null
     order by j.id limit p_limit for update of j skip locked
  loop
    job_id := v_job.id;
    task := v_job.task;
    queue := v_job.queue;
    claim_epoch := v_job.claim_epoch;
    attempt := v_job.attempt;
    reconcile_job := {{schema}}.request_reconcile(v_job);
    update {{schema}}.unknowns u set reconcile_job = reconcile_missing.reconcile_job
      where u.job_id = v_job.id and u.claim_epoch = v_job.claim_epoch and reconcile_missing.reconcile_job is not null;
    return next;
  end loop;
end $$;
comment on function {{schema}}.reconcile_missing(uuid, integer) is
  'Enqueues the reconciling jobs of up to p_limit unknown attempts that have had none, though their task has a hook for them now, in the order of their ids from p_after on. Answers each with its job, null where that could not be made. Repeat with the last id until it returns nothing.';

create function {{schema}}.reconcile(job_id uuid, reason text default null, actor text default null)
    returns table (answer text, reconcile_job uuid)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_job {{schema}}.jobs;
  v_open {{schema}}.jobs;
begin
  select * into v_job from {{schema}}.jobs j where j.id = job_id for update;
  if not found and not exists (select from {{schema}}.history h where h.id = job_id and h.finished_at >= {{schema}}.id_time(job_id) - interval '1 day') then
    raise exception using errcode = 'WF011', message = format('there is no job %s', job_id),
      detail = jsonb_build_object('job_id', job_id)::text, hint = 'Check the id; retention may have dropped it.';
  end if;
  if v_job.status is distinct from 'unknown' then
    raise exception using errcode = 'WF012', message = format('job %s is %s, not unknown', job_id, coalesce(v_job.status, 'finished')),
      detail = jsonb_build_object('job_id', job_id, 'status', v_job.status)::text, hint = 'Only an unknown outcome is asked about.';
  end if;
  select o.* into v_open from {{schema}}.unique_keys k join {{schema}}.jobs o on o.id = k.job_id
   where k.scope = {{schema}}.hook_of(v_job) and k.key = v_job.id || '/' || v_job.claim_epoch;
  if v_open.id is not null then
    update {{schema}}.jobs o set run_at = least(o.run_at, {{schema}}.now()) where o.id = v_open.id and o.status = 'pending';
    answer := case when found then 'due' else v_open.status end;
    reconcile_job := v_open.id;
    perform {{schema}}.wake(array[v_open.queue]);
  else
    reconcile_job := {{schema}}.enqueue_reconcile(v_job);
    if reconcile_job is null then
      raise exception using errcode = 'WF012', message = format('%stask %s has no hook that could be asked', (select format('step %s of ', s.name)
          from {{schema}}.steps s where s.job_id = v_job.id and s.generation = v_job.generation and s.kind = 'step' and not s.done limit 1), v_job.task),
        detail = jsonb_build_object('job_id', job_id, 'status', 'unknown')::text,
        hint = 'Declare one with reconcile=, for a step with reconcile_steps=, and start a worker that has it, or decide yourself: taskq jobs resolve.';
    end if;
    answer := 'enqueued';
  end if;
  update {{schema}}.unknowns u set reconcile_job = reconcile_job where u.job_id = v_job.id and u.claim_epoch = v_job.claim_epoch;
  perform {{schema}}.note('reconcile', job_id::text, actor, reason, jsonb_build_object('answer', answer, 'reconcile_job', reconcile_job, 'claim_epoch', v_job.claim_epoch));
  return next;
end $$;
comment on function {{schema}}.reconcile(uuid, text, text) is
  'Has an unknown outcome asked about now: enqueues its reconciling job (enqueued), also where one has failed before, or makes the one that waits due (due); running where it is being asked already.';

-- Apart from resolve_attempt: what code says again and again needs a bound, what people decide does not.
create function {{schema}}.answer_reconcile(job_id uuid, claim_epoch bigint, happened boolean, result jsonb default null, reason text default null, actor text default null,
    step text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
begin
  if claim_epoch is null then
    raise exception using errcode = 'WF009', message = 'answer_reconcile needs the epoch of the attempt', hint = 'Give the one that the hook was asked about.';
  end if;
  return {{schema}}.decide_unknown(job_id, claim_epoch, happened, result, reason, actor, true, null, step);
end $$;
comment on function {{schema}}.answer_reconcile(uuid, bigint, boolean, jsonb, text, text, text) is
  'What a reconcile hook has answered about an attempt, or about the step of it that it names (NAME, or NAME #N from the second of one name on): like resolve_attempt, but refused where something else is unknown, and each did-not-happen waits as the retry policy says, and is one of max_recoveries; past that, or where the next start would be after the deadline, the job ends as failed (RecoveryExhausted, DeadlineExceeded).';

create view {{schema}}.unknown_outcomes as
  select j.id as job_id, j.queue, j.task, j.claim_epoch, j.claimed_by as worker_id, w.name as worker, j.claimed_at, j.effect_started_at, j.cancel_requested_at,
         coalesce(u.since, j.claimed_at) as since, u.reason, u.reconcile_job, r.status as reconcile_status, r.error as reconcile_error,
         case when j.effect_class <> 'side_effecting' and j.effect_started_at is not null then u.error ->> 'step' || case when u.error ->> 'occurrence' <> '1' then ' #' || (u.error ->> 'occurrence') else '' end end as step
    from {{schema}}.jobs j
    left join {{schema}}.unknowns u on u.job_id = j.id and u.claim_epoch = j.claim_epoch
    left join {{schema}}.workers w on w.id = j.claimed_by
    left join lateral (
      select k.status, (select l.error from {{schema}}.ledger l
                         where l.job_id = k.id and l.ended_at >= {{schema}}.id_time(k.id) - interval '1 day' order by l.claim_epoch desc limit 1) as error
        from {{schema}}.jobs k where k.id = u.reconcile_job
      union all
      select h.status, h.error from {{schema}}.history h
       where h.id = u.reconcile_job and h.finished_at >= {{schema}}.id_time(u.reconcile_job) - interval '1 day') r on true
   where j.status = 'unknown';
comment on view {{schema}}.unknown_outcomes is
  'Jobs whose effect may have happened and whose outcome was never told, with the job that asks about each: pending, running, failed, ...; null where none does; step is the one whose effect it is, null for the whole body''s. Each waits for its own late end, for an answer, or for taskq jobs resolve.';

-- What operators and applications do to one job or queue. Each function locks the row first and decides after, on a fresh
-- snapshot; each leaves a row in audit.

create function {{schema}}.note(p_action text, p_subject text, p_actor text, p_reason text, p_details jsonb) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  insert into {{schema}}.audit (at, actor, action, subject, reason, details)
    values ({{schema}}.now(), coalesce(p_actor, session_user), p_action, p_subject, p_reason, p_details)
$$;
comment on function {{schema}}.note(text, text, text, text, jsonb) is 'Writes one row of audit.';

-- A job moves between jobs and history while these look at one after the other. Only a statement that looks at both, in one
-- snapshot, can say that it is nowhere; otherwise they look again. After 20 rounds it has moved every time: see moving.
create function {{schema}}.moving(p_job uuid) returns void
  language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  raise exception using errcode = '40001', message = format('job %s ended and was reopened again and again meanwhile', p_job),
    hint = 'Nothing was done. Try again.';
end $$;
comment on function {{schema}}.moving(uuid) is 'Raises serialization_failure: others kept moving the job while it was looked for.';

create function {{schema}}.cancel(job_id uuid, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_job {{schema}}.jobs;
  v_child record;
  v_answer text;
begin
  perform {{schema}}.ensure_today();
  perform {{schema}}.lock_run_of(job_id);
  for i in 1 .. 20 loop
    select * into v_job from {{schema}}.jobs j where j.id = job_id for update;
    if found then
      if v_job.held_reason = 'run' then
        -- It is the child run that is cancelled.
        update {{schema}}.jobs j set cancel_requested_at = {{schema}}.now() where j.id = job_id and j.cancel_requested_at is null;
        select c.id, c.finished_at into v_child from {{schema}}.runs c where c.parent_node = job_id;
        if v_child.id is not null and v_child.finished_at is null then
          perform {{schema}}.stop_run(v_child.id, jsonb_build_object('type', 'Cancelled', 'message', 'the node that it stands for was cancelled', 'reason', reason));
        end if;
        select * into v_job from {{schema}}.jobs j where j.id = job_id;
      end if;
      if v_job.run_id is not null and exists (select from {{schema}}.runs c where c.parent_node = job_id and (c.finished_at is null or c.status = 'succeeded')) then
        -- Its bodies still run, or it has succeeded: nothing is made up over that.
        v_answer := 'requested';
      elsif v_job.status in ('pending', 'held') then
        perform {{schema}}.finish(v_job, 'cancelled', null, null,
          jsonb_build_object('type', 'Cancelled', 'message', case when v_job.claim_epoch = 0 then 'cancelled before it started'
            else 'cancelled while it waited, after it had been claimed ' || v_job.claim_epoch || ' times: see its attempts' end, 'reason', reason));
        v_answer := 'cancelled';
      elsif v_job.status = 'running' then
        update {{schema}}.jobs j set cancel_requested_at = coalesce(j.cancel_requested_at, {{schema}}.now()) where j.id = job_id;
        perform pg_notify('{{schema}}_cancel', v_job.claimed_by || ' ' || job_id || ' ' || v_job.claim_epoch);
        v_answer := 'requested';
      else
        v_answer := 'unknown';
      end if;
      exit;
    end if;
    if exists (select from {{schema}}.history h where h.id = job_id and h.finished_at >= {{schema}}.id_time(job_id) - interval '1 day') then
      v_answer := 'finished';
      exit;
    end if;
    if not exists (select from {{schema}}.jobs j where j.id = job_id)
      and not exists (select from {{schema}}.history h where h.id = job_id and h.finished_at >= {{schema}}.id_time(job_id) - interval '1 day') then
      v_answer := 'not_found';
      exit;
    end if;
  end loop;
  if v_answer is null then perform {{schema}}.moving(job_id); end if;
  if v_answer in ('cancelled', 'requested') then
    perform {{schema}}.note('cancel', job_id::text, actor, reason, jsonb_build_object('answer', v_answer)
      || case when v_answer = 'requested' then jsonb_build_object('effect_started', v_job.effect_started_at is not null) else '{}' end);
  end if;
  return v_answer;
end $$;
comment on function {{schema}}.cancel(uuid, text, text) is
  'Cancels a job. Answers cancelled (it never ran again), requested (it runs and is told; if it does not succeed it ends cancelled), finished, unknown or not_found.';

create function {{schema}}.retry(job_id uuid, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_job {{schema}}.jobs;
  v_old {{schema}}.history;
  v_now timestamptz;
  v_key integer;
  v_holder uuid;
begin
  perform {{schema}}.ensure_today();
  perform {{schema}}.lock_run_of(job_id);
  -- It may be reopened by somebody else while we wait for its row in history: then look again.
  for i in 1 .. 20 loop
    select * into v_job from {{schema}}.jobs j where j.id = job_id for update;
    exit when found;
    select * into v_old from {{schema}}.history h where h.id = job_id and h.finished_at >= {{schema}}.id_time(job_id) - interval '1 day' for update;
    exit when found;
    exit when not exists (select from {{schema}}.jobs j where j.id = job_id)
      and not exists (select from {{schema}}.history h where h.id = job_id and h.finished_at >= {{schema}}.id_time(job_id) - interval '1 day');
    if i = 20 then perform {{schema}}.moving(job_id); end if;
  end loop;
  if v_job.id is not null then
    if v_job.status <> 'pending' and v_job.held_reason is distinct from 'ordering' then
      raise exception using errcode = 'WF012', message = format('job %s is %s, not finished', job_id, v_job.status),
        detail = jsonb_build_object('job_id', job_id, 'status', v_job.status)::text,
        hint = case when v_job.status = 'unknown' then 'Decide its outcome first: taskq jobs resolve.'
          when v_job.held_reason = 'paused' then format('Its run is paused: taskq runs resume %s.', v_job.run_id)
          when v_job.held_reason = 'incident' then 'Grant it one more recovery: taskq incidents list. Or cancel it first.'
          when v_job.held_reason = 'signal' then 'Send what it waits for: taskq jobs signal. Or cancel it first.' else 'Wait for it, or cancel it first.' end;
    end if;
    update {{schema}}.jobs j set run_at = least(j.run_at, {{schema}}.now()) where j.id = job_id;
    perform {{schema}}.end_sleeps(v_job);
    if v_job.status = 'held' then perform {{schema}}.give_turn(v_job.ordering_key); end if;
    perform {{schema}}.wake(array[v_job.queue]);
    perform {{schema}}.note('retry', job_id::text, actor, reason, jsonb_build_object('answer', 'due', 'run_at', v_job.run_at));
    return 'due';
  end if;
  if v_old.id is null then
    raise exception using errcode = 'WF011', message = format('there is no job %s', job_id),
      detail = jsonb_build_object('job_id', job_id)::text, hint = 'Check the id; retention may have dropped it.';
  end if;
  if v_old.status = 'succeeded' then
    raise exception using errcode = 'WF012', message = format('job %s has succeeded', job_id),
      detail = jsonb_build_object('job_id', job_id, 'status', 'succeeded')::text, hint = 'Enqueue a new job to do the work again.';
  end if;
  v_key := v_old.key_generation;
  v_old.key_generation := {{schema}}.reopening(v_old);
  v_now := {{schema}}.now();
  if v_old.unique_key is not null then
    insert into {{schema}}.unique_keys as u (scope, key, job_id) values (v_old.unique_scope, v_old.unique_key, job_id)
      on conflict (scope, key) do update set job_id = excluded.job_id, expires_at = null where u.expires_at <= v_now or u.job_id = excluded.job_id;
    if not found then
      select u.job_id into v_holder from {{schema}}.unique_keys u where u.scope = v_old.unique_scope and u.key = v_old.unique_key;
      raise exception using errcode = 'WF007',
        message = format('unique key %L of scope %s is held by job %s', v_old.unique_key, v_old.unique_scope, v_holder),
        detail = jsonb_build_object('job_id', v_holder, 'scope', v_old.unique_scope, 'key', v_old.unique_key)::text,
        hint = 'Wait for that job or cancel it, then retry this one.';
    end if;
  end if;
  -- The final attempt leaves history for the ledger, so that every attempt stays on record exactly once.
  delete from {{schema}}.history h where h.id = job_id and h.finished_at = v_old.finished_at;
  if v_old.worker_id is not null then
    insert into {{schema}}.ledger (job_id, ended_at, claimed_at, claim_epoch, worker_id, outcome_id, effect_started_at, attempt, generation, outcome, error)
      values (v_old.id, v_old.finished_at, v_old.claimed_at, v_old.claim_epoch, v_old.worker_id, v_old.outcome_id, v_old.effect_started_at,
              v_old.attempt, v_old.generation, v_old.outcome, v_old.error);
  end if;
  insert into {{schema}}.jobs (id, run_at, created_at, deadline, claim_epoch, max_attempts, generation, pruned_attempts, required_worker_schema, priority,
      effect_class, queue, task, policy_id, unique_scope, unique_key, payload, tags, meta,
      key_generation, has_effects, ordering_key, cohort, checkpoint, checkpoint_version, run_id, run_epoch, parent_job)
    values (v_old.id, v_now, v_old.created_at, case when v_old.deadline > v_now then v_old.deadline end, v_old.claim_epoch, v_old.max_attempts,
      v_old.generation + 1, v_old.pruned_attempts, v_old.required_worker_schema, v_old.priority, v_old.effect_class, v_old.queue, v_old.task,
      v_old.policy_id, v_old.unique_scope, v_old.unique_key, v_old.payload, v_old.tags, v_old.meta,
      v_old.key_generation, v_old.has_effects, v_old.ordering_key, v_old.cohort, v_old.checkpoint, v_old.checkpoint_version,
      v_old.run_id, (select r.run_epoch from {{schema}}.runs r where r.id = v_old.run_id),
      -- Its parent still waits, unless it has been told of the end before.
      {{schema}}.child_reopened(job_id, null, v_old.status, v_old.error));
  if v_old.key_generation is not distinct from v_key then
    perform {{schema}}.keep_effects(job_id, v_old.generation);
  end if;
  perform {{schema}}.wake(array[v_old.queue]);
  perform {{schema}}.note('retry', job_id::text, actor, reason,
    jsonb_build_object('answer', 'reopened', 'was', v_old.status, 'finished_at', v_old.finished_at, 'error', v_old.error, 'deadline_dropped', v_old.deadline <= v_now));
  return 'reopened';
end $$;
comment on function {{schema}}.retry(uuid, text, text) is
  'Reopens a failed or cancelled job with fresh counters, a higher generation and its epoch kept (answer reopened), or makes a waiting one due now (due).';

-- What a stored policy says in numbers. Whatever a row has in their place, there is an answer: none of it may keep a job from
-- being settled.
create function {{schema}}.number_or(p_value jsonb, p_default double precision, p_least double precision, p_most double precision) returns double precision
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
  select case jsonb_typeof(p_value) when 'number' then least(greatest((p_value #>> '{}')::numeric, p_least::numeric), p_most::numeric)::double precision else p_default end
$$;
comment on function {{schema}}.number_or(jsonb, double precision, double precision, double precision) is 'A JSON number within bounds; the default for anything else.';

create function {{schema}}.recovery_bound(p_policy_id text) returns integer
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select coalesce((select {{schema}}.number_or(p.spec -> 'max_recoveries', 10, 0, 2147483647) from {{schema}}.policies p where p.id = p_policy_id), 10)::integer
$$;
comment on function {{schema}}.recovery_bound(text) is 'How often a job of this policy may be recovered: its max_recoveries, else 10.';

-- The same curve as that of taskq.policy.Backoff. In logarithms, since factor ^ n has no bound.
create function {{schema}}.backoff(p_policy_id text, p_n integer) returns double precision
  language plpgsql volatile security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_curve jsonb;
  v_base double precision;
  v_factor double precision;
  v_cap double precision;
  v_n double precision := greatest(p_n, 1) - 1;
begin
  select p.spec #> '{retry,backoff}' into v_curve from {{schema}}.policies p where p.id = p_policy_id;
  v_base := {{schema}}.number_or(v_curve -> 'base', 5, 0, 3155760000);
  v_factor := {{schema}}.number_or(v_curve -> 'factor', 2, 1, 1000);
  v_cap := {{schema}}.number_or(v_curve -> 'cap', 3600, 0.001, 3155760000);
  return (1 - {{schema}}.number_or(v_curve -> 'jitter', 0.1, 0, 0.9) * random()) * least(v_cap, case v_curve ->> 'kind'
    when 'linear' then v_base * (v_n + 1)
    when 'constant' then v_base
    else case when v_base < 0.001 then v_base when ln(v_base) + v_n * ln(v_factor) > ln(v_cap) + 1 then v_cap else v_base * power(v_factor, v_n) end end);
end $$;
comment on function {{schema}}.backoff(text, integer) is 'Seconds to wait before a job of this policy runs again for the n-th time, shortened at random by its jitter.';

-- The one body of resolve, resolve_attempt and answer_reconcile: whoever decides, an outcome is decided once, under the lock
-- of the job's row. p_epoch: the attempt that the decision is about; null for the one that is open.
-- "Did not happen" runs the job again, and counts as a recovery. An operator may say so as often as they like: each time
-- somebody has looked, and it is on record who. A hook may not: p_bounded keeps it to max_recoveries, and to the curve.
-- And it answers for what it was asked about alone: p_step, the step; null for the whole body.
create function {{schema}}.decide_unknown(p_job uuid, p_epoch bigint, p_happened boolean, p_result jsonb, p_reason text, p_actor text, p_bounded boolean,
    p_error jsonb default null, p_step text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_job {{schema}}.jobs;
  v_old {{schema}}.history;
  v_now timestamptz;
  v_epoch bigint;
  v_status text;
  v_outcome text;
  v_decided record;
  v_answer text;
  v_bound integer;
  v_delay double precision := 0;
  v_step text;
  v_hold boolean := false;
  v_run uuid := (select j.run_id from {{schema}}.jobs j where j.id = p_job and p_bounded and {{schema}}.holds_exhausted(j.policy_id));
  v_incident uuid;
begin
  perform {{schema}}.ensure_today();
  if v_run is not null then
    -- It may have to be paused.
    perform {{schema}}.lock_trees('{}', array[v_run]);
  else
    perform {{schema}}.lock_run_of(p_job);
  end if;
  for i in 1 .. 20 loop
    select * into v_job from {{schema}}.jobs j where j.id = p_job for update;
    exit when found;
    select * into v_old from {{schema}}.history h where h.id = p_job and h.finished_at >= {{schema}}.id_time(p_job) - interval '1 day';
    exit when found;
    exit when not exists (select from {{schema}}.jobs j where j.id = p_job)
      and not exists (select from {{schema}}.history h where h.id = p_job and h.finished_at >= {{schema}}.id_time(p_job) - interval '1 day');
    if i = 20 then perform {{schema}}.moving(p_job); end if;
  end loop;
  v_epoch := coalesce(v_job.claim_epoch, v_old.claim_epoch);
  v_status := coalesce(v_job.status, v_old.status);
  if v_status is null then
    raise exception using errcode = 'WF011', message = format('there is no job %s', p_job),
      detail = jsonb_build_object('job_id', p_job)::text, hint = 'Check the id; retention may have dropped it.';
  end if;
  if p_epoch <> v_epoch then
    raise exception using errcode = 'WF017',
      message = format('the decision is about attempt %s of job %s, which is %s and at attempt %s', p_epoch, p_job, v_status, v_epoch),
      detail = jsonb_build_object('job_id', p_job, 'status', v_status, 'claim_epoch', p_epoch, 'current_epoch', v_epoch)::text,
      hint = 'Nothing was changed: what became of one attempt says nothing about another.';
  end if;
  if v_status <> 'unknown' then
    -- One that was unknown and is no more was decided, by somebody or by its own late end.
    select a.outcome into v_outcome from {{schema}}.attempts a
     where a.job_id = p_job and a.claim_epoch = v_epoch and a.ended_at >= {{schema}}.id_time(p_job) - interval '1 day';
    if v_outcome = 'resolved' or v_outcome is not null and exists (
         select from {{schema}}.unknowns u where u.job_id = p_job and u.claim_epoch = v_epoch) then
      if v_outcome = 'resolved' then
        select u.actor as who, u.details->>'answer' as answer into v_decided from {{schema}}.audit u
         where u.subject = p_job::text and u.action = 'resolve' order by u.at desc, u.id desc limit 1;
      else
        select 'its own late end' as who, v_status as answer into v_decided;
      end if;
      raise exception using errcode = 'WF016',
        message = format('the outcome of job %s was resolved before: %s, by %s', p_job, coalesce(v_decided.answer, v_status), coalesce(v_decided.who, 'somebody')),
        detail = jsonb_build_object('job_id', p_job, 'claim_epoch', v_epoch, 'status', v_status, 'outcome', v_outcome,
          'resolved_to', coalesce(v_decided.answer, v_status), 'resolved_by', v_decided.who)::text,
        hint = 'Nothing was changed; taskq jobs show has the record.';
    end if;
    raise exception using errcode = 'WF012', message = format('job %s is %s, not unknown', p_job, v_status),
      detail = jsonb_build_object('job_id', p_job, 'status', v_status)::text, hint = 'Only an unknown outcome needs a decision.';
  end if;
  if p_happened is null then
    raise exception using errcode = 'WF009', message = 'resolving an unknown outcome needs to know whether it happened', hint = 'Give true or false: a job that did not happen may run again.';
  end if;
  if p_reason is null or btrim(p_reason) = '' then
    raise exception using errcode = 'WF009', message = 'resolving an unknown outcome needs a reason', hint = 'Say what you checked; it goes on the record.';
  end if;
  v_now := {{schema}}.now();
  if v_job.effect_class <> 'side_effecting' and v_job.effect_started_at is not null then
    -- What nobody knows is one step. Told, the rest of the body goes on.
    v_step := {{schema}}.settle_step(v_job, p_happened, coalesce(p_result, 'null'), p_error);
  end if;
  if p_bounded and p_step is distinct from v_step then
    raise exception using errcode = 'WF012',
      message = format('the answer is about %s of job %s, and what is unknown is %s', coalesce('step ' || p_step, 'the whole body'), p_job, coalesce('step ' || v_step, 'the whole body')),
      detail = jsonb_build_object('job_id', p_job, 'status', 'unknown')::text, hint = 'Nothing was changed: a hook answers for what it was asked about.';
  end if;
  -- A step that happened is not called again: neither bound nor delay.
  p_bounded := p_bounded and not p_happened;
  if p_happened and v_step is null then
    perform {{schema}}.finish(v_job, 'succeeded', 'resolved', p_result, null);
    v_answer := 'succeeded';
  elsif v_job.cancel_requested_at is not null then
    perform {{schema}}.finish(v_job, 'cancelled', 'resolved', null, jsonb_build_object('type', 'Cancelled',
      'message', format('cancelled; the effect%s %s', ' of step ' || v_step, case when p_happened then 'happened' else 'did not happen' end), 'reason', p_reason));
    v_answer := 'cancelled';
  else
    v_job.recoveries := v_job.recoveries + 1;
    if p_bounded then
      v_bound := {{schema}}.recovery_bound(v_job.policy_id);
      v_delay := {{schema}}.backoff(v_job.policy_id, v_job.recoveries);
      v_hold := v_job.recoveries > v_bound and {{schema}}.holds_exhausted(v_job.policy_id);
    end if;
    if v_hold then
      v_delay := 0;
    end if;
    if v_job.recoveries > v_bound and not v_hold then
      perform {{schema}}.finish(v_job, 'failed', 'resolved', null, jsonb_build_object('type', 'RecoveryExhausted',
        'message', format('its effect%s did not happen, and it has been recovered %s times already, the limit is %s', ' of step ' || v_step, v_job.recoveries - 1, v_bound), 'reason', p_reason));
      v_answer := 'failed';
    elsif p_bounded and v_now + make_interval(secs => v_delay) > v_job.deadline then
      perform {{schema}}.finish(v_job, 'failed', 'resolved', null, jsonb_build_object('type', 'DeadlineExceeded',
        'message', format('its effect%s did not happen, and the next start would be after the deadline', ' of step ' || v_step), 'deadline', v_job.deadline, 'reason', p_reason));
      v_answer := 'failed';
    else
      insert into {{schema}}.ledger (job_id, ended_at, claimed_at, claim_epoch, worker_id, effect_started_at, attempt, generation, outcome, error)
        values (v_job.id, v_now, v_job.claimed_at, v_job.claim_epoch, v_job.claimed_by, v_job.effect_started_at, v_job.attempt, v_job.generation, 'resolved',
                jsonb_build_object('type', case when p_happened then 'StepHappened' else 'DidNotHappen' end,
                  'message', format('resolved: the effect%s %s', ' of step ' || v_step, case when p_happened then 'happened' else 'did not happen' end), 'reason', p_reason));
      update {{schema}}.jobs j set status = 'pending', claimed_by = null, claimed_at = null, effect_started_at = null, recoveries = j.recoveries + 1,
          run_at = case when v_delay > 0 then v_now + make_interval(secs => v_delay) else j.run_at end
        where j.id = p_job;
      perform {{schema}}.wake(array[v_job.queue]);
      v_answer := 'pending';
      if v_hold then
        v_incident := ({{schema}}.note_fault(v_job, 'body', 'recovery_exhausted', 'DidNotHappen', jsonb_build_object('type', 'RecoveryExhausted',
          'message', format('its effect%s did not happen, and it has been recovered %s times already, the limit is %s', ' of step ' || v_step, v_job.recoveries - 1, v_bound)), 0)).id;
        perform {{schema}}.hold_for(p_job, v_incident, {{schema}}.pause_for(v_run, 'recovery_exhausted',
          format('the effect of job %s (%s) did not happen once too often; see taskq incidents list', p_job, v_job.task), 'taskq:recovery'));
        v_answer := 'held';
      end if;
    end if;
  end if;
  perform {{schema}}.note('resolve', p_job::text, p_actor, p_reason, jsonb_build_object('happened', p_happened, 'answer', v_answer, 'claim_epoch', v_epoch)
    || case when v_step is not null then jsonb_build_object('step', v_step) else '{}' end);
  return v_answer;
end $$;
comment on function {{schema}}.decide_unknown(uuid, bigint, boolean, jsonb, text, text, boolean, jsonb, text) is
  'Decides an unknown outcome, of the given attempt where one is given; with p_error, a step has failed with it. A hook (p_bounded) decides nothing but what it names: p_step, or the whole body. Called by resolve, resolve_attempt, answer_reconcile and end_step alone.';

create function {{schema}}.resolve(job_id uuid, happened boolean, result jsonb default null, reason text default null, actor text default null) returns text
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  select {{schema}}.decide_unknown(job_id, null, happened, result, reason, actor, false)
$$;
comment on function {{schema}}.resolve(uuid, boolean, jsonb, text, text) is
  'Decides an unknown outcome of whichever attempt is open, once and on the record: happened makes it succeeded, otherwise it is cancelled if that was asked for, else pending again at once, and runs again with the same idempotency key. So say that it did not happen only once it can no longer happen; and where another attempt may be open by now, name the one that was looked at: resolve_attempt. Where what is unknown is a step, happened records the result as what it gave, and the job goes on (pending). Each run again counts as a recovery, and no bound holds an operator back.';

create function {{schema}}.resolve_attempt(job_id uuid, claim_epoch bigint, happened boolean, result jsonb default null, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
begin
  if claim_epoch is null then
    raise exception using errcode = 'WF009', message = 'resolve_attempt needs the epoch of the attempt', hint = 'Give the one that was looked at; resolve decides whichever is open.';
  end if;
  return {{schema}}.decide_unknown(job_id, claim_epoch, happened, result, reason, actor, false);
end $$;
comment on function {{schema}}.resolve_attempt(uuid, bigint, boolean, jsonb, text, text) is
  'Like resolve, for one attempt: if another is open by now, nothing is changed, and the refusal says so (WF017).';

create function {{schema}}.pause_queue(queue text, reason text default null, actor text default null) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_done boolean;
begin
  insert into {{schema}}.queues as q (name, paused_at, created_at) values (queue, {{schema}}.now(), {{schema}}.now())
    on conflict (name) do update set paused_at = excluded.paused_at where q.paused_at is null;
  v_done := found;
  if v_done then perform {{schema}}.note('pause', queue, actor, reason, null); end if;
  return v_done;
end $$;
comment on function {{schema}}.pause_queue(text, text, text) is 'Nothing more is claimed from the queue. Returns whether that changed anything.';

create function {{schema}}.resume_queue(queue text, reason text default null, actor text default null) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_done boolean;
begin
  update {{schema}}.queues q set paused_at = null where q.name = queue and q.paused_at is not null;
  v_done := found;
  if v_done then
    perform {{schema}}.wake(array[queue], 1000);
    perform {{schema}}.note('resume', queue, actor, reason, null);
  end if;
  return v_done;
end $$;
comment on function {{schema}}.resume_queue(text, text, text) is 'Claims from the queue go on. Returns whether that changed anything.';

create function {{schema}}.drain(worker_id uuid, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_status text;
begin
  select w.status into v_status from {{schema}}.workers w where w.id = worker_id for update;
  if v_status is null then
    return 'not_found';
  elsif v_status <> 'live' then
    return v_status;
  end if;
  update {{schema}}.workers w set status = 'draining' where w.id = worker_id;
  perform {{schema}}.note('drain', worker_id::text, actor, reason, null);
  return 'requested';
end $$;
comment on function {{schema}}.drain(uuid, text, text) is
  'Asks a worker to stop: it claims nothing more from now on, learns it at its next renewal, lets its bodies end and exits with 0. Answers requested, what else it is (draining, stopped, lost), or not_found.';

-- A batch is one transaction, its jobs locked in the order of their ids. What this queue refuses is answered; anything else,
-- such as a lock timeout, undoes the batch.
create function {{schema}}.steer_many(action text, job_ids uuid[], reason text default null, actor text default null, selection jsonb default null)
  returns table (job_id uuid, answer text, why text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_id uuid;
  v_answers jsonb := '{}';
begin
  if action not in ('cancel', 'retry') or cardinality(job_ids) > 1000 then
    raise exception using errcode = 'WF009', message = 'steer_many takes cancel or retry, and at most 1000 jobs', hint = 'Take several batches.';
  end if;
  if exists (select from {{schema}}.nodes n where n.id = any(job_ids)) then
    perform {{schema}}.lock_trees(job_ids);
  end if;
  -- All of them first: the end of one may give the turn to a job of its ordering key that comes before the rest.
  perform from {{schema}}.jobs j where j.id = any(job_ids) order by j.id for update;
  -- A line is cancelled from its end: from its front each would have its turn first, for nothing.
  for v_id in select u.id from (select distinct i as id from unnest(job_ids) i) u
      order by case action when 'cancel' then u.id end desc, u.id loop
    job_id := v_id;
    why := null;
    begin
      answer := case action when 'cancel' then {{schema}}.cancel(v_id, reason, actor) else {{schema}}.retry(v_id, reason, actor) end;
    exception when sqlstate 'WF003' or sqlstate 'WF007' or sqlstate 'WF011' or sqlstate 'WF012' or sqlstate 'WF020' or sqlstate 'WF023' then
      answer := 'refused';
      why := sqlerrm;
    end;
    v_answers := jsonb_set(v_answers, array[answer], to_jsonb(coalesce((v_answers->>answer)::integer, 0) + 1));
    return next;
  end loop;
  if v_answers <> '{}' then
    perform {{schema}}.note(action || '_many', 'jobs', actor, reason, jsonb_build_object('selection', selection, 'answers', v_answers));
  end if;
end $$;
comment on function {{schema}}.steer_many(text, uuid[], text, text, jsonb) is
  'Cancels or retries up to 1000 jobs in one transaction, each as cancel and retry do, with a row of audit for each and one for the batch that keeps the selection and how many were answered how. What is refused is answered so, with the reason in why.';

create view {{schema}}.queue_counts as
  select coalesce(c.queue, q.name) as queue, q.paused_at, coalesce(c.due, 0) as due, coalesce(c.waiting, 0) as waiting, coalesce(c.running, 0) as running,
         coalesce(c.held, 0) as held, coalesce(c.unknown, 0) as unknown, c.oldest_due
    from {{schema}}.queues q full join (
      select j.queue, count(*) filter (where j.status = 'pending' and j.run_at <= {{schema}}.now()) as due,
             count(*) filter (where j.status = 'pending' and j.run_at > {{schema}}.now()) as waiting,
             count(*) filter (where j.status = 'running') as running, count(*) filter (where j.status = 'held') as held,
             count(*) filter (where j.status = 'unknown') as unknown,
             min(j.run_at) filter (where j.status = 'pending' and j.run_at <= {{schema}}.now()) as oldest_due
        from {{schema}}.jobs j group by j.queue) c on c.queue = q.name;
comment on view {{schema}}.queue_counts is 'What waits and runs in each queue.';

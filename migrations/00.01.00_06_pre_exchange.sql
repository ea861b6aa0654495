-- The hot path. One call a batch: first end what is done, then claim for the free slots; two decisions, one round trip.
-- Called by workers only. Every write here is fenced by claimed_by and claim_epoch.
--
-- Why functions with planner settings: with a generic plan cached while jobs was empty, a burst ran at 0.8k to 3.6k jobs/s;
-- with the SET clause below at 40k to 48k. tests/test_plans.py holds the plans. Claiming by = any(array(...)) on ctid ran
-- 38k/s, by a join 24k/s. Ending before claiming in two statements beat one combined statement with two workers (60k
-- against 47k): in one statement the claim waits for rows that others have just claimed.

-- Ends. p_outcomes: unknown (no end: the job becomes unknown and keeps its claim, until its own late end or a
-- decision; so does one that is handed back after it was allowed to start an effect, and whatever is told of one with a step
-- whose effect has started and is not told); succeeded, failed, cancelled, retry_after_spent, snooze_spent (terminal; the last two ended by their
-- bound, which uses no attempt); retry, retry_after, snooze, release (back to pending);
-- suspend (pending, or held until a signal comes; p_errors says which steps its body waits for).
-- A cancel request on the locked row turns everything but a success into cancelled; a wait that would pass the deadline
-- ends the job as failed. A release with a delay is one whose body may still run a moment. Returns how many were applied.
create function {{schema}}.end_attempts(p_worker uuid, p_ids uuid[], p_epochs bigint[], p_outcomes text[], p_outcome_ids bigint[],
    p_results jsonb[], p_errors jsonb[], p_delays double precision[]) returns integer
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_nestloop = off set enable_mergejoin = off
  set enable_hashjoin = on set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz := {{schema}}.now();
  v_back integer := 0;
  v_gone integer := 0;
  v_suspended integer := 0;
  v_unknown uuid[] := '{}';
  v_end record;
  v_job {{schema}}.jobs;
begin
  if not p_outcomes <@ array['unknown', 'succeeded', 'failed', 'cancelled', 'retry', 'retry_after', 'retry_after_spent', 'snooze', 'snooze_spent', 'suspend', 'release'] then
    raise exception using errcode = 'WF009', message = format('an outcome is none that end_attempts knows: %s', array_to_string(p_outcomes, ', ', 'null')),
      hint = 'See the comment above end_attempts for the outcomes.';
  end if;
  if p_outcomes && array['unknown', 'retry', 'retry_after', 'snooze', 'suspend', 'release'] then
    -- Lock first: what follows decides on the locked rows, so a cancel that commits meanwhile is seen.
    perform from {{schema}}.jobs j where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status in ('running', 'unknown') order by j.id for update;
    v_now := {{schema}}.now();
  end if;
  if 'unknown' = any(p_outcomes) then
    -- What its worker could not see confirmed, the locked row knows: without an effect start no body was called.
    -- And of a step, whether it was started and is not told.
    p_outcomes := array(select case when o.outcome = 'unknown' and (o.error->>'reason' = 'not_confirmed' or o.error->>'step' is not null) and exists (
          select from {{schema}}.jobs j where j.id = o.id and j.claim_epoch = o.epoch and (j.claimed_by = p_worker) is true and j.status = 'running'
             and (j.effect_class = 'side_effecting' or o.error->>'step' is not null) and j.effect_started_at is null) then 'release' else o.outcome end
        from unnest(p_ids, p_epochs, p_outcomes, p_errors) with ordinality as o(id, epoch, outcome, error, n) order by o.n);
  end if;
  if p_outcomes && array['unknown', 'release'] then
    -- Not told, or handed back after an effect was allowed to start: nothing may run it again. Told again, it counts again.
    for v_end in
      select o.outcome, o.error, j as job
        from (select distinct on (t.id, t.epoch) t.* from unnest(p_ids, p_epochs, p_outcomes, p_errors) with ordinality as t(id, epoch, outcome, error, n)
               order by t.id, t.epoch, t.n) o
        join {{schema}}.jobs j on j.id = o.id and j.claim_epoch = o.epoch
       where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status in ('running', 'unknown')
         and (o.outcome = 'unknown' or o.outcome = 'release' and j.effect_started_at is not null)
       order by j.id
    loop
      v_job := v_end.job;
      perform {{schema}}.enter_unknown(v_job, case when v_end.outcome = 'release' then 'shutdown'
        when v_end.error->>'reason' in ('timed_out', 'process_died', 'shutdown', 'not_confirmed') then v_end.error->>'reason' else 'told' end, v_end.error);
      v_unknown := v_unknown || v_job.id;
    end loop;
  end if;
  if 'suspend' = any(p_outcomes) then
    for v_end in
      select o.outcome_id, o.error, j as job
        from (select distinct on (t.id, t.epoch) t.* from unnest(p_ids, p_epochs, p_outcomes, p_outcome_ids, p_errors) with ordinality as t(id, epoch, outcome, outcome_id, error, n)
               order by t.id, t.epoch, t.n) o
        join {{schema}}.jobs j on j.id = o.id and j.claim_epoch = o.epoch
       where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status = 'running' and o.outcome = 'suspend' and j.cancel_requested_at is null
         and (j.effect_started_at is null or j.effect_class = 'side_effecting')
       order by j.id
    loop
      v_job := v_end.job;
      v_suspended := v_suspended + {{schema}}.suspend(v_job, v_end.outcome_id, v_end.error)::integer;
    end loop;
  end if;
  if p_outcomes && array['retry', 'retry_after', 'snooze', 'release'] then
    with ends as materialized (
      -- As told first, below too. A wait of over 100 years could leave the calendar.
      select e.id, e.epoch, e.outcome, e.outcome_id, e.error, case when e.delay > 3155760000 then 3155760000 when e.delay < 0 then 0 else e.delay end as delay
        from (select distinct on (o.id, o.epoch) o.*
                from unnest(p_ids, p_epochs, p_outcomes, p_outcome_ids, p_errors, p_delays) with ordinality as o(id, epoch, outcome, outcome_id, error, delay, n)
               order by o.id, o.epoch, o.n) e
       where e.outcome in ('retry', 'retry_after', 'snooze', 'release')),
    attempt as materialized (
      select j.id, j.claimed_at, j.effect_started_at from {{schema}}.jobs j
       where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status in ('running', 'unknown')
         and ((j.id, j.claim_epoch) in (select e.id, e.epoch from ends e)) is true
         and j.cancel_requested_at is null),
    back as (
      update {{schema}}.jobs j set status = 'pending', claimed_by = null, claimed_at = null, effect_started_at = null,
          attempt = j.attempt + (e.outcome = 'retry')::int,
          retry_afters = j.retry_afters + (e.outcome = 'retry_after')::int,
          snoozes = j.snoozes + (e.outcome = 'snooze')::int,
          releases = j.releases + (e.outcome = 'release')::int,
          run_at = case when e.outcome = 'release' and coalesce(e.delay, 0) <= 0 then j.run_at else v_now + make_interval(secs => e.delay) end
        from ends e join attempt a on a.id = e.id
       where j.id = any(p_ids) and j.id = e.id and (j.claimed_by = p_worker) is true and j.claim_epoch = e.epoch and j.status in ('running', 'unknown')
         and j.id <> all(v_unknown)
         and (e.outcome = 'release' or j.deadline is null or v_now + make_interval(secs => e.delay) <= j.deadline)
         and (e.outcome <> 'retry' or j.attempt + 1 < j.max_attempts)
         and (j.effect_started_at is null or j.effect_class = 'side_effecting')
      returning j.id, j.claim_epoch, j.attempt, j.generation, j.queue, a.claimed_at, a.effect_started_at, e.outcome, e.outcome_id, e.error),
    noted as (
      insert into {{schema}}.ledger (job_id, ended_at, claimed_at, claim_epoch, worker_id, outcome_id, effect_started_at, attempt, generation, outcome, error)
        select b.id, v_now, b.claimed_at, b.claim_epoch, p_worker, b.outcome_id, b.effect_started_at, b.attempt, b.generation,
               case b.outcome when 'retry' then 'failed' when 'snooze' then 'snoozed' when 'release' then 'released' else b.outcome end, b.error
          from back b
      returning job_id)
    select count(*) into v_back from noted;
    if v_back > 0 and 'release' = any(p_outcomes) then
      perform {{schema}}.wake(array(select distinct j.queue from {{schema}}.jobs j where j.id = any(p_ids) and j.status = 'pending'), v_back);
    end if;
  end if;

  -- Told twice in one call, an attempt ends once, as told first.
  with ends as materialized (
    select distinct on (e.id, e.epoch) e.*
      from unnest(p_ids, p_epochs, p_outcomes, p_outcome_ids, p_results, p_errors) with ordinality as e(id, epoch, outcome, outcome_id, result, error, n)
     order by e.id, e.epoch, e.n),
  gone as (
    delete from {{schema}}.jobs j
     where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status in ('running', 'unknown')
       -- "is true" keeps the fence out of the choice of index and the IN a hashed subplan: the delete always goes by primary key.
       and (j.effect_started_at is null or j.effect_class = 'side_effecting')
       and j.id <> all(v_unknown)
       and ((j.id, j.claim_epoch) in (select e.id, e.epoch from ends e)) is true
    returning j.*),
  decided as (
    select g.*, e.outcome_id, e.result, e.error as given, e.outcome as told,
           case when e.outcome = 'succeeded' then 'succeeded' when g.cancel_requested_at is not null then 'cancelled' else 'failed' end as final
      from gone g join ends e on e.id = g.id and e.epoch = g.claim_epoch)
  insert into {{schema}}.history (id, finished_at, run_at, created_at, claimed_at, claim_epoch, worker_id, outcome_id, deadline, cancel_requested_at,
      effect_started_at, attempt, max_attempts, recoveries, retry_afters, snoozes, releases, generation, pruned_attempts, required_worker_schema,
      priority, status, outcome, effect_class, queue, task, policy_id, unique_scope, unique_key, payload, result, error, tags, meta,
      key_generation, has_effects, ordering_key, cohort, checkpoint, checkpoint_version, run_id, run_epoch)
    select d.id, v_now, d.run_at, d.created_at, d.claimed_at, d.claim_epoch, d.claimed_by, d.outcome_id, d.deadline, d.cancel_requested_at,
           d.effect_started_at, d.attempt + (d.final = 'failed' and d.told not in ('retry_after', 'snooze', 'retry_after_spent', 'snooze_spent', 'suspend'))::int, d.max_attempts, d.recoveries,
           d.retry_afters + (d.told in ('retry_after', 'retry_after_spent') and d.final = 'failed')::int,
           d.snoozes + (d.told in ('snooze', 'snooze_spent') and d.final = 'failed')::int,
           d.releases, d.generation, d.pruned_attempts, d.required_worker_schema, d.priority, d.final,
           case when d.final <> 'failed' then d.final
                else case d.told when 'retry_after' then 'retry_after' when 'retry_after_spent' then 'retry_after'
                  when 'snooze' then 'snoozed' when 'snooze_spent' then 'snoozed' when 'suspend' then 'suspended' else 'failed' end end,
           d.effect_class, d.queue, d.task, d.policy_id, d.unique_scope, d.unique_key, case when d.slim and d.final = 'succeeded' then null else d.payload end,
           case when d.final = 'succeeded' and d.slim is null then d.result end,
           case when d.final = 'succeeded' then null
                when d.final = 'failed' and d.told in ('retry', 'retry_after', 'snooze', 'suspend')
                     and not (d.told = 'retry' and d.attempt + 1 >= d.max_attempts) then
                  jsonb_build_object('type', 'DeadlineExceeded', 'message', 'the next start would be after the deadline', 'deadline', d.deadline, 'cause', d.given)
                when d.final = 'cancelled' and (d.given is null or d.told = 'release') then
                  jsonb_build_object('type', 'Cancelled', 'message', 'cancelled on request while it ran')
                else d.given end,
           d.tags, d.meta, d.key_generation, d.has_effects, d.ordering_key, d.cohort, d.checkpoint, d.checkpoint_version, d.run_id, d.run_epoch
      from decided d;
  get diagnostics v_gone = row_count;
  if v_back + v_gone + v_suspended + cardinality(v_unknown) < coalesce(array_length(p_ids, 1), 0) then
    -- Whatever was told of these: what became of the effect of a step was not.
    for v_end in
      select o.outcome, o.error, j as job
        from (select distinct on (t.id, t.epoch) t.* from unnest(p_ids, p_epochs, p_outcomes, p_errors) with ordinality as t(id, epoch, outcome, error, n)
               order by t.id, t.epoch, t.n) o
        join {{schema}}.jobs j on j.id = o.id and j.claim_epoch = o.epoch
       where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status = 'running' and j.id <> all(v_unknown)
         and j.effect_class <> 'side_effecting' and j.effect_started_at is not null
       order by j.id for update of j
    loop
      v_job := v_end.job;
      perform {{schema}}.enter_unknown(v_job, 'told', jsonb_build_object('type', 'OutcomeUnknown',
        'message', format('its attempt ended (%s) while the effect of a step had started', v_end.outcome), 'cause', v_end.error));
      v_unknown := v_unknown || v_job.id;
    end loop;
  end if;
  return v_back + v_gone + v_suspended + cardinality(v_unknown);
end $$;
comment on function {{schema}}.end_attempts(uuid, uuid[], bigint[], text[], bigint[], jsonb[], jsonb[], double precision[]) is
  'Ends attempts under their fence: terminal ones move to history, the others go back to pending and leave a ledger row. An end whose fence does not match changes nothing. Returns how many were applied.';

-- Claims. A lane is one queue at one priority, from its low-water mark on; lanes are given in the order in which to claim.
-- run_at and deadline are answered within what every client can read: a row that cannot be read stops the worker.
-- p_free: how many bodies could start at once. Jobs of cohorts are claimed for those alone: none holds a slot of its cohort
-- while it waits in a worker. Where no cohort was ever used, nothing here looks for any.
create function {{schema}}.claim(p_worker uuid, p_limit integer, p_tasks text[], p_lane_queues text[], p_lane_priorities smallint[],
    p_lane_mark_at timestamptz[], p_lane_mark_id uuid[], p_skip uuid[] default '{}', p_free integer default null)
  returns table (kind text, job_id uuid, claim_epoch bigint, task text, payload text, queue text, priority smallint, run_at timestamptz, policy_id text,
    attempt integer, max_attempts integer, recoveries integer, retry_afters integer, snoozes integer, generation integer,
    effect_class text, deadline timestamptz, claimed_at timestamptz, meta text, key_generation integer, releases integer, cohort text)
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_nestloop = off set enable_mergejoin = off
  set enable_hashjoin = on set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz;
  v_level integer;
  v_paused text[];
  v_chosen tid[] := '{}';
  v_plain integer := p_limit;
begin
  -- The worker must be live with a lease that has not run out; the lock keeps it from being declared lost meanwhile.
  select w.capability_level into v_level from {{schema}}.workers w
    where w.id = p_worker and w.status = 'live' and w.lease_expires_at > {{schema}}.now() for key share;
  if not found then
    return query select 'lease'::text, null::uuid, null::bigint, null::text, null::text, null::text, null::smallint, null::timestamptz, null::text,
      null::integer, null::integer, null::integer, null::integer, null::integer, null::integer, null::text, null::timestamptz, null::timestamptz, null::text, null::integer, null::integer, null::text;
    return;
  end if;
  v_now := {{schema}}.now();
  v_paused := array(select q.name from {{schema}}.queues q where q.paused_at is not null);
  if coalesce(p_free, p_limit) > 0 and exists (select from {{schema}}.limits) then
    v_chosen := {{schema}}.choose_in_cohorts(least(p_free, p_limit), v_level, v_paused, p_tasks, p_lane_queues, p_lane_priorities, p_lane_mark_at, p_lane_mark_id, p_skip);
    v_plain := p_limit - cardinality(v_chosen);
    -- Not before the ends that made room for them.
    v_now := {{schema}}.now();
  end if;
  return query
    update {{schema}}.jobs j set status = 'running', claim_epoch = j.claim_epoch + 1, claimed_by = p_worker, claimed_at = v_now
     where j.ctid = any(v_chosen || array(
       select c.tid
         from unnest(p_lane_queues, p_lane_priorities, p_lane_mark_at, p_lane_mark_id) as l(queue, priority, mark_at, mark_id)
         cross join lateral (
           select k.ctid as tid from {{schema}}.jobs k
            where k.queue = l.queue and k.priority = l.priority and k.status = 'pending' and k.recoveries < 2 and k.cohort is null
              and k.run_at <= v_now and (k.run_at, k.id) > (l.mark_at, l.mark_id)
              and k.task = any(p_tasks) and k.attempt < k.max_attempts and (k.deadline is null or k.deadline > v_now)
              and (k.required_worker_schema is null or k.required_worker_schema <= v_level)
              and k.id <> all(p_skip) and l.queue <> all(v_paused)
            order by k.run_at, k.id limit v_plain for update skip locked) c
        limit v_plain))
    returning 'job'::text, j.id, j.claim_epoch, j.task, j.payload::text, j.queue, j.priority, greatest(j.run_at, '0001-01-02 00:00:00+00'), j.policy_id, j.attempt, j.max_attempts,
      j.recoveries, j.retry_afters, j.snoozes, j.generation, j.effect_class, case when j.deadline < '9000-01-01 00:00:00+00' then j.deadline end, j.claimed_at, j.meta::text, j.key_generation, j.releases, j.cohort;
end $$;
comment on function {{schema}}.claim(uuid, integer, text[], text[], smallint[], timestamptz[], uuid[], uuid[], integer) is
  'Claims up to p_limit due jobs of known tasks for a live worker, lane by lane, and among the first p_free of them those of cohorts that have slots. Answers one row of kind lease instead when the worker''s lease does not hold.';

-- Whether ends may be lost with the server and the jobs simply run again: nothing else is in their transaction, nobody has asked
-- for a cancel (which would leave an idempotent job unknown), and no side effect is told by them.
create function {{schema}}.are_ends_alone(p_ids uuid[]) returns boolean
  language sql stable security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
  select not exists (
    select from {{schema}}.jobs j where j.id = any(p_ids)
       and (j.effect_class = 'side_effecting' or j.status <> 'running' or j.cancel_requested_at is not null
         or j.has_effects or j.run_id is not null or j.parent_job is not null or j.effect_started_at is not null))
$$;
comment on function {{schema}}.are_ends_alone(uuid[]) is
  'Whether the ends of these attempts may be committed asynchronously: none is of a side-effecting job, of one with a step whose effect is not told, of one whose cancelling was asked for, or makes other jobs, be it a node of a run, a child or one that promises effects.';

-- p_ends_async: whether the worker trades. A transaction with a claim in it never does: a claim that the server has lost could
-- be made again under the same epoch.
create function {{schema}}.exchange(p_worker uuid, p_ids uuid[], p_epochs bigint[], p_outcomes text[], p_outcome_ids bigint[],
    p_results jsonb[], p_errors jsonb[], p_delays double precision[], p_limit integer, p_tasks text[], p_lane_queues text[],
    p_lane_priorities smallint[], p_lane_mark_at timestamptz[], p_lane_mark_id uuid[], p_skip uuid[] default '{}', p_free integer default null, p_ends_async boolean default false)
  returns table (kind text, job_id uuid, claim_epoch bigint, task text, payload text, queue text, priority smallint, run_at timestamptz, policy_id text,
    attempt integer, max_attempts integer, recoveries integer, retry_afters integer, snoozes integer, generation integer,
    effect_class text, deadline timestamptz, claimed_at timestamptz, meta text, key_generation integer, releases integer, cohort text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_async boolean := false;
  v_ended integer;
  v_n integer := coalesce(array_length(p_ids, 1), 0);
  v_busy uuid[];
begin
  -- Lock order: workers before jobs. Ends do not need the worker to be live, claims do.
  perform from {{schema}}.workers w where w.id = p_worker for key share;
  if v_n > 0 and exists (select from {{schema}}.runs r where r.finished_at is null) then
    -- Runs come before jobs. One that somebody else is at holds up nobody: its ends are sent again.
    v_busy := {{schema}}.lock_runs_of(p_ids);
    if v_busy <> '{}' then
      return query select 'busy'::text, e.id, e.epoch, null::text, null::text, null::text, null::smallint, null::timestamptz, null::text,
          null::integer, null::integer, null::integer, null::integer, null::integer, null::integer, null::text, null::timestamptz, null::timestamptz, null::text, null::integer, null::integer, null::text
        from unnest(p_ids, p_epochs) as e(id, epoch) where e.id = any(v_busy);
      select coalesce(array_agg(e.id order by e.n), '{}'), array_agg(e.epoch order by e.n), array_agg(e.outcome order by e.n), array_agg(e.outcome_id order by e.n),
             array_agg(e.result order by e.n), array_agg(e.error order by e.n), array_agg(e.delay order by e.n), count(*)::integer
        into p_ids, p_epochs, p_outcomes, p_outcome_ids, p_results, p_errors, p_delays, v_n
        from unnest(p_ids, p_epochs, p_outcomes, p_outcome_ids, p_results, p_errors, p_delays) with ordinality as e(id, epoch, outcome, outcome_id, result, error, delay, n)
       where e.id <> all(v_busy);
    end if;
  end if;
  if v_n > 0 then
    v_async := p_ends_async and {{schema}}.are_ends_alone(p_ids);
    v_ended := {{schema}}.end_attempts(p_worker, p_ids, p_epochs, p_outcomes, p_outcome_ids, p_results, p_errors, p_delays);
    if v_ended <> v_n then
      -- Which were not applied: the worker asks for their record in a new statement.
      return query select 'missed'::text, e.id, e.epoch, null::text, null::text, null::text, null::smallint, null::timestamptz, null::text,
          null::integer, null::integer, null::integer, null::integer, null::integer, null::integer, null::text, null::timestamptz, null::timestamptz, null::text, null::integer, null::integer, null::text
        from unnest(p_ids, p_epochs, p_outcomes, p_outcome_ids) as e(id, epoch, outcome, outcome_id)
       where not exists (select from {{schema}}.attempts a where a.job_id = e.id and a.claim_epoch = e.epoch and a.outcome_id = e.outcome_id)
         and not exists (select from {{schema}}.jobs j where j.id = e.id and j.claim_epoch = e.epoch and (j.claimed_by = p_worker) is true and j.status = 'unknown'
           and (e.outcome in ('unknown', 'release') or j.effect_class <> 'side_effecting' and j.effect_started_at is not null));
    end if;
  end if;
  if p_limit > 0 then
    return query select * from {{schema}}.claim(p_worker, p_limit, p_tasks, p_lane_queues, p_lane_priorities, p_lane_mark_at, p_lane_mark_id, p_skip, p_free);
    v_async := v_async and not found;
  end if;
  if v_async then
    perform set_config('synchronous_commit', 'off', true);
  end if;
end $$;
comment on function {{schema}}.exchange(uuid, uuid[], bigint[], text[], bigint[], jsonb[], jsonb[], double precision[], integer, text[], text[], smallint[], timestamptz[], uuid[], uuid[], integer, boolean) is
  'One round trip of a worker: ends, then claims. Rows of kind job are claims, missed are ends whose fence did not match, busy are ends to be sent again because their run is locked, lease says that the worker may not claim. With p_ends_async a transaction of ends alone, which claims nothing, is committed asynchronously.';

create function {{schema}}.claim_suspect(p_worker uuid, p_tasks text[], p_queues text[])
  returns table (kind text, job_id uuid, claim_epoch bigint, task text, payload text, queue text, priority smallint, run_at timestamptz, policy_id text,
    attempt integer, max_attempts integer, recoveries integer, retry_afters integer, snoozes integer, generation integer,
    effect_class text, deadline timestamptz, claimed_at timestamptz, meta text, key_generation integer, releases integer, cohort text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_level integer;
  v_now timestamptz;
  v_id uuid;
  v_cohort text;
  v_full text[] := '{}';
begin
  select w.capability_level into v_level from {{schema}}.workers w
    where w.id = p_worker and w.status = 'live' and w.lease_expires_at > {{schema}}.now() for key share;
  -- Alone means alone: nothing else may be claimed by this worker.
  if not found or exists (select from {{schema}}.jobs j where j.claimed_by = p_worker and j.status = 'running') then
    return;
  end if;
  v_now := {{schema}}.now();
  loop
    select k.id, k.cohort into v_id, v_cohort from {{schema}}.jobs k
     where k.queue = any(p_queues) and k.status = 'pending' and k.recoveries >= 2 and k.run_at <= v_now and k.task = any(p_tasks)
       and k.attempt < k.max_attempts and (k.deadline is null or k.deadline > v_now)
       and (k.required_worker_schema is null or k.required_worker_schema <= v_level)
       and not exists (select from {{schema}}.queues q where q.name = k.queue and q.paused_at is not null)
       and (k.cohort is null or k.cohort <> all(v_full))
     order by k.run_at, k.id limit 1 for update skip locked;
    exit when v_cohort is null or cardinality({{schema}}.open_cohorts(array[v_cohort])) > 0;
    v_full := v_full || v_cohort;
  end loop;
  v_now := {{schema}}.now();
  return query
    update {{schema}}.jobs j set status = 'running', claim_epoch = j.claim_epoch + 1, claimed_by = p_worker, claimed_at = v_now
     where j.id = v_id
    returning 'job'::text, j.id, j.claim_epoch, j.task, j.payload::text, j.queue, j.priority, greatest(j.run_at, '0001-01-02 00:00:00+00'), j.policy_id, j.attempt, j.max_attempts,
      j.recoveries, j.retry_afters, j.snoozes, j.generation, j.effect_class, case when j.deadline < '9000-01-01 00:00:00+00' then j.deadline end, j.claimed_at, j.meta::text, j.key_generation, j.releases, j.cohort;
end $$;
comment on function {{schema}}.claim_suspect(uuid, text[], text[]) is
  'Claims one job that was on a lost worker twice, for a worker that holds nothing else, so that a body which kills its worker is found out and its neighbours are not charged.';

create function {{schema}}.survey(p_queues text[], p_tasks text[])
  returns table (kind text, name text, n integer)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
  return query
    select 'suspect'::text, k.queue, count(*)::int from (
        select j.queue from {{schema}}.jobs j
         where j.queue = any(p_queues) and j.status = 'pending' and j.recoveries >= 2 and j.run_at <= {{schema}}.now() and j.task = any(p_tasks)
           and (j.cohort is null or {{schema}}.cohort_free(j.cohort) is distinct from 0)
           and not exists (select from {{schema}}.queues q where q.name = j.queue and q.paused_at is not null)
         order by j.queue, j.run_at limit 100) k group by k.queue;
  return query
    select 'unknown_task'::text, k.task, count(*)::int from (
        select j.task from unnest(p_queues) q(name) cross join generate_series(0, 9) p(n) cross join lateral (
          select i.task from {{schema}}.jobs i
           where i.queue = q.name and i.priority = p.n and i.status = 'pending' and i.recoveries < 2 and i.cohort is null and i.run_at <= {{schema}}.now()
           order by i.run_at, i.id limit 100) j
         where j.task <> all(p_tasks) limit 1000) k group by k.task;
  if exists (select from {{schema}}.limits) then
    return query
      select 'unknown_task'::text, k.task, count(*)::int from (
          select j.task from unnest(p_queues) q(name) cross join {{schema}}.waiting_cohorts(array[q.name], '', 100) c(name) cross join generate_series(0, 9) p(n) cross join lateral (
            select i.task from {{schema}}.jobs i
             where i.queue = q.name and i.cohort = c.name and i.priority = p.n and i.status = 'pending' and i.recoveries < 2 and i.run_at <= {{schema}}.now()
             order by i.run_at, i.id limit 10) j
           where j.task <> all(p_tasks) limit 1000) k group by k.task;
  end if;
end $$;
comment on function {{schema}}.survey(text[], text[]) is
  'What a worker cannot see from its claims: suspects that wait for an empty worker, and due jobs of tasks that it does not know. Looks at the front of each lane only.';

-- Leases: workers register, renew and stop; the leader declares workers lost and settles what they held. Declaring and
-- settling are two statements of two transactions: in one, a claim in flight stayed running for good.
-- Lock order: workers, runs, then jobs by id; where a job is locked already, its run's lock is taken only if it is free.

create function {{schema}}.register_worker(p_name text, p_hostname text, p_pid integer, p_queues text[], p_tasks text[], p_concurrency integer,
    p_capability_level integer, p_version text, p_lease double precision) returns uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_id uuid;
  v_now timestamptz := {{schema}}.now();
begin
  insert into {{schema}}.queues (name, created_at) select q, v_now from unnest(p_queues) q order by q on conflict (name) do nothing;
  insert into {{schema}}.workers (name, hostname, pid, queues, tasks, concurrency, capability_level, version, started_at, renewed_at, lease, lease_expires_at)
    values (p_name, p_hostname, p_pid, p_queues, p_tasks, p_concurrency, p_capability_level, p_version, v_now, v_now,
            make_interval(secs => p_lease), v_now + make_interval(secs => p_lease))
    returning id into v_id;
  return v_id;
end $$;
comment on function {{schema}}.register_worker(text, text, integer, text[], text[], integer, integer, text, double precision) is
  'Registers a worker process, live, with a lease of so many seconds from now. Returns its id.';

create function {{schema}}.renew(p_worker uuid) returns table (status text, job_id uuid, claim_epoch bigint, cancel_requested boolean)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_status text;
begin
  -- A lease that has run out but was not declared lost may be renewed: nothing has been taken away yet.
  update {{schema}}.workers w set renewed_at = {{schema}}.now(), lease_expires_at = {{schema}}.now() + w.lease
    where w.id = p_worker and w.status in ('live', 'draining') returning w.status into v_status;
  if v_status is null then
    select w.status into v_status from {{schema}}.workers w where w.id = p_worker;
    v_status := coalesce(v_status, 'absent');
  end if;
  return query select v_status, null::uuid, null::bigint, null::boolean;
  return query select j.status, j.id, j.claim_epoch, j.cancel_requested_at is not null from {{schema}}.jobs j where j.claimed_by = p_worker;
end $$;
comment on function {{schema}}.renew(uuid) is
  'Renews the lease. The first row has the worker''s status (absent when it is not there); the others are the claims that the database says it holds, with whether cancelling was asked for.';

create function {{schema}}.drain_worker(p_worker uuid) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  update {{schema}}.workers set status = 'draining' where id = p_worker and status = 'live'
$$;
comment on function {{schema}}.drain_worker(uuid) is 'The worker claims nothing more, and goes on renewing until its bodies have ended.';

create function {{schema}}.stop_worker(p_worker uuid) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  delete from {{schema}}.sleepers where worker_id = p_worker;
  -- A claim in flight holds this row: waited for, it is seen by the next statement.
  select from {{schema}}.workers w where w.id = p_worker for update;
  update {{schema}}.workers set status = 'stopped', ended_at = {{schema}}.now() where id = p_worker and status in ('live', 'draining')
    and not exists (select from {{schema}}.jobs j where j.claimed_by = p_worker and j.status = 'running');
$$;
comment on function {{schema}}.stop_worker(uuid) is 'The worker is done. With claims left it stays draining, so that its lease runs out and they are settled; unknown jobs need no settling.';

create function {{schema}}.sleep(p_worker uuid, p_queues text[]) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  insert into {{schema}}.sleepers (queue, worker_id) select q, p_worker from unnest(p_queues) q on conflict do nothing
$$;
comment on function {{schema}}.sleep(uuid, text[]) is 'The worker says that it will wait for a notification. It looks once more before it does.';

create function {{schema}}.unsleep(p_worker uuid) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  delete from {{schema}}.sleepers where worker_id = p_worker
$$;
comment on function {{schema}}.unsleep(uuid) is 'The worker is awake: enqueue need not notify it.';

-- The leader ------------------------------------------------------------------------------------------------------------

-- p_elapsed: seconds since this worker's look before, by its own clock that never steps; null where it cannot tell.
create function {{schema}}.lead(p_worker uuid, p_role text, p_lease double precision, p_elapsed double precision default null)
  returns table (is_leader boolean, quiet boolean)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_row {{schema}}.leader;
  v_now timestamptz;
  v_lease interval := make_interval(secs => p_lease);
  v_started timestamptz := pg_postmaster_start_time();
  v_timeline integer := (select c.timeline_id from pg_control_checkpoint() c);
  v_quiet timestamptz;
  v_late boolean;
  -- Whoever leads, the worker with the longest lease must get the time to renew it.
  v_longest interval := greatest(v_lease, (select max(w.lease) from {{schema}}.workers w where w.status in ('live', 'draining')));
begin
  -- A role whose row is gone starts anew, quiet for one lease.
  insert into {{schema}}.leader values (p_role, null, '-infinity', {{schema}}.now(), '-infinity', 0, '-infinity', '0') on conflict do nothing;
  select * into v_row from {{schema}}.leader l where l.role = p_role for update;
  v_now := {{schema}}.now();
  v_quiet := v_row.quiet_until;
  -- After a restart, a promotion or a step of the clock one lease must pass before anyone is declared lost. All workers
  -- look here a few times a lease, so a gap of over half a lease means a step forward, or that nobody was there. Unless the
  -- same worker looked before and its own clock says the same: then the look came late, and the time has really passed.
  v_late := coalesce(v_row.observed_by = p_worker
    and abs(extract(epoch from v_now - v_row.observed_at) - p_elapsed) <= greatest(p_lease / 10, least(1, p_lease / 2)), false);
  if v_row.server_started_at <> v_started or v_row.timeline <> v_timeline or v_now < v_row.observed_at
     or v_now > v_row.observed_at + v_lease / 2 and not v_late then
    v_quiet := v_now + v_longest;
  end if;
  update {{schema}}.leader l set observed_at = v_now, observed_by = p_worker, server_started_at = v_started, timeline = v_timeline,
      -- After a step back of the clock neither the old lease nor the old quiet time may last for ever.
      quiet_until = least(v_quiet, v_now + v_longest),
      -- Free, run out, or further off than it was taken for, which only a step back of the clock makes.
      holder = case when l.holder = p_worker or l.holder is null or l.expires_at <= v_now or l.expires_at > v_now + l.lease then p_worker else l.holder end,
      expires_at = case when l.holder = p_worker or l.holder is null or l.expires_at <= v_now or l.expires_at > v_now + l.lease then v_now + v_lease else l.expires_at end,
      lease = case when l.holder = p_worker or l.holder is null or l.expires_at <= v_now or l.expires_at > v_now + l.lease then v_lease else l.lease end
    where l.role = p_role;
  return query select l.holder = p_worker, l.quiet_until > v_now from {{schema}}.leader l where l.role = p_role;
end $$;
comment on function {{schema}}.lead(uuid, text, double precision, double precision) is
  'Takes or keeps the role if it is free, for so many seconds. Answers whether this worker has it, and whether declaring workers lost must wait.';

create function {{schema}}.resign(p_worker uuid, p_role text) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  update {{schema}}.leader set holder = null, expires_at = '-infinity' where role = p_role and holder = p_worker
$$;
comment on function {{schema}}.resign(uuid, text) is 'Gives the role back at once, for a quick hand-over at shutdown.';

create function {{schema}}.mark_lost(p_limit integer default 100) returns setof uuid
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  with expired as (
    select w.id from {{schema}}.workers w
     where w.status in ('live', 'draining') and w.lease_expires_at <= {{schema}}.now()
     order by w.id limit p_limit for update skip locked)
  update {{schema}}.workers w set status = 'lost', ended_at = {{schema}}.now() from expired e
   where w.id = e.id and w.lease_expires_at <= {{schema}}.now() returning w.id
$$;
comment on function {{schema}}.mark_lost(integer) is
  'Declares workers lost whose lease has run out; returns them. FOR UPDATE waits for no claim: a worker that is just claiming is skipped and found at the next round.';

-- One row that cannot be settled must not keep the others: it is answered with its SQLSTATE, and left out by p_skip.
create function {{schema}}.settle_lost(p_limit integer default 200, p_skip uuid[] default '{}')
    returns table (job_id uuid, settled text, why text, task text, queue text, claim_epoch bigint, attempt integer, worker_id uuid)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_found record;
  v_now timestamptz;
  v_job {{schema}}.jobs;
  v_max integer;
  v_busy uuid[] := '{}';
  v_n integer := 0;
  v_known integer;
begin
  -- Jobs of runs that others are at must not hide those behind them: it looks again without those runs.
  loop
    v_known := cardinality(v_busy);
    for v_found in
      select j.id, j.run_id from {{schema}}.jobs j
       where j.claimed_by is not null and j.status = 'running' and j.id <> all(p_skip)
         and not exists (select from {{schema}}.workers w where w.id = j.claimed_by and w.status in ('live', 'draining'))
         and (j.run_id = any(v_busy)) is not true
       order by j.id limit p_limit - v_n
    loop
      -- Its run first: who kept a job while others are at its run, and went on to another, could wait for them in a circle.
      continue when v_found.run_id = any(v_busy);
      if not {{schema}}.run_is_free(v_found.run_id) then
        v_busy := v_busy || v_found.run_id;
        continue;
      end if;
      p_skip := p_skip || v_found.id;
      select j.* into v_job from {{schema}}.jobs j
       where j.id = v_found.id and j.claimed_by is not null and j.status = 'running'
         and not exists (select from {{schema}}.workers w where w.id = j.claimed_by and w.status in ('live', 'draining'))
         for update of j skip locked;
      continue when not found;
      job_id := v_job.id;
      task := v_job.task;
      queue := v_job.queue;
      claim_epoch := v_job.claim_epoch;
      attempt := v_job.attempt;
      worker_id := v_job.claimed_by;
      why := 'WorkerLost';
      begin
        v_now := {{schema}}.now();
        v_max := {{schema}}.recovery_bound(v_job.policy_id);
        if v_job.effect_started_at is not null
           or v_job.effect_class = 'idempotent' and v_job.cancel_requested_at is not null then
          perform {{schema}}.enter_unknown(v_job, 'worker_lost',
            jsonb_build_object('type', 'WorkerLost', 'message', 'its worker was lost, and what it did may have had its effect', 'worker_id', v_job.claimed_by));
          settled := 'unknown';
        elsif v_job.cancel_requested_at is not null then
          perform {{schema}}.finish(v_job, 'cancelled', 'lost', null,
            jsonb_build_object('type', 'Cancelled', 'message', 'cancelling was requested and its worker was lost', 'worker_id', v_job.claimed_by));
          settled := 'cancelled';
          why := 'Cancelled';
        elsif v_job.recoveries + 1 > v_max and {{schema}}.holds_exhausted(v_job.policy_id) then
          -- Left to hold_exhausted: its run is paused with it, whose locks come before those that are held here.
          settled := 'exhausted';
          why := 'RecoveryExhausted';
        elsif v_job.recoveries + 1 > v_max then
          v_job.recoveries := v_job.recoveries + 1;
          perform {{schema}}.finish(v_job, 'failed', 'lost', null, jsonb_build_object('type', 'RecoveryExhausted',
            'message', format('its worker was lost %s times, the limit is %s', v_job.recoveries, v_max), 'worker_id', v_job.claimed_by));
          settled := 'failed';
          why := 'RecoveryExhausted';
        else
          insert into {{schema}}.ledger (job_id, ended_at, claimed_at, claim_epoch, worker_id, effect_started_at, attempt, generation, outcome, error)
            values (v_job.id, v_now, v_job.claimed_at, v_job.claim_epoch, v_job.claimed_by, v_job.effect_started_at, v_job.attempt, v_job.generation,
                    'lost', jsonb_build_object('type', 'WorkerLost', 'message', 'the lease of its worker ran out', 'worker_id', v_job.claimed_by));
          update {{schema}}.jobs j set status = 'pending', claimed_by = null, claimed_at = null, effect_started_at = null, recoveries = j.recoveries + 1
            where j.id = v_job.id;
          perform {{schema}}.wake(array[v_job.queue]);
          settled := 'pending';
        end if;
      exception when others then
        settled := 'error: ' || sqlstate;
      end;
      v_n := v_n + 1;
      return next;
    end loop;
    exit when v_n >= p_limit or cardinality(v_busy) = v_known;
  end loop;
end $$;
comment on function {{schema}}.settle_lost(integer, uuid[]) is
  'Settles up to p_limit claims whose worker is lost or absent, by effect class: back to pending, cancelled, unknown, or failed once its recoveries are used up; exhausted, and as it was, where hold_exhausted is to hold it. Answers what became of each, with the type of the error on record; or error and the SQLSTATE for one that it could not settle, which stays as it was. Repeat, with those in p_skip, until it returns nothing.';

-- The one way out of jobs for what is not ended by its own worker. The caller has locked the row.
create function {{schema}}.finish(p_job {{schema}}.jobs, p_status text, p_outcome text, p_result jsonb, p_error jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  delete from {{schema}}.jobs j where j.id = p_job.id;
  insert into {{schema}}.history (id, finished_at, run_at, created_at, claimed_at, claim_epoch, worker_id, outcome_id, deadline, cancel_requested_at,
      effect_started_at, attempt, max_attempts, recoveries, retry_afters, snoozes, releases, generation, pruned_attempts, required_worker_schema,
      priority, status, outcome, effect_class, queue, task, policy_id, unique_scope, unique_key, payload, result, error, tags, meta,
      key_generation, has_effects, ordering_key, cohort, checkpoint, checkpoint_version, run_id, run_epoch)
    values (p_job.id, {{schema}}.now(), p_job.run_at, p_job.created_at, p_job.claimed_at, p_job.claim_epoch, p_job.claimed_by, null, p_job.deadline,
      p_job.cancel_requested_at, p_job.effect_started_at, p_job.attempt, p_job.max_attempts, p_job.recoveries, p_job.retry_afters, p_job.snoozes,
      p_job.releases, p_job.generation, p_job.pruned_attempts, p_job.required_worker_schema, p_job.priority, p_status,
      case when p_job.claimed_by is not null then p_outcome end, p_job.effect_class, p_job.queue, p_job.task, p_job.policy_id,
      p_job.unique_scope, p_job.unique_key, p_job.payload, p_result, p_error, p_job.tags, p_job.meta,
      p_job.key_generation, p_job.has_effects, p_job.ordering_key, p_job.cohort, p_job.checkpoint, p_job.checkpoint_version, p_job.run_id, p_job.run_epoch);
end $$;
comment on function {{schema}}.finish({{schema}}.jobs, text, text, jsonb, jsonb) is
  'Moves a locked job to history with this status; its open attempt, if any, gets this outcome. Used by cancel, resolve, the sweeps and settle_lost.';

create function {{schema}}.finish_many(p_jobs uuid[], p_status text, p_error jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  with gone as (delete from {{schema}}.jobs j where j.id = any(p_jobs) and j.claimed_by is null returning j.*)
  insert into {{schema}}.history (id, finished_at, run_at, created_at, claim_epoch, deadline, cancel_requested_at, attempt, max_attempts, recoveries,
      retry_afters, snoozes, releases, generation, pruned_attempts, required_worker_schema, priority, status, effect_class, queue, task, policy_id,
      unique_scope, unique_key, payload, error, tags, meta, key_generation, has_effects, ordering_key, cohort, checkpoint, checkpoint_version, run_id, run_epoch)
    select g.id, {{schema}}.now(), g.run_at, g.created_at, g.claim_epoch, g.deadline, g.cancel_requested_at, g.attempt, g.max_attempts, g.recoveries,
           g.retry_afters, g.snoozes, g.releases, g.generation, g.pruned_attempts, g.required_worker_schema, g.priority, p_status, g.effect_class, g.queue, g.task,
           g.policy_id, g.unique_scope, g.unique_key, g.payload, p_error, g.tags, g.meta, g.key_generation, g.has_effects, g.ordering_key, g.cohort, g.checkpoint,
           g.checkpoint_version, g.run_id, g.run_epoch
      from gone g order by g.id;
end $$;
comment on function {{schema}}.finish_many(uuid[], text, jsonb) is
  'Like finish, for locked jobs that nobody has claimed: all in one statement, since one by one 5,000 took 2 s.';

-- A bitmap of all that is to be swept would be made again for each portion.
create function {{schema}}.sweep(p_limit integer default 500, p_skip uuid[] default '{}')
    returns table (job_id uuid, settled text, why text, task text, queue text, claim_epoch bigint, attempt integer, worker_id uuid)
  language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_bitmapscan = off as $$
declare
  v_found record;
  v_job {{schema}}.jobs;
  v_busy uuid[] := '{}';
  v_n integer := 0;
  v_known integer;
  v_more boolean;
begin
  -- Runs before jobs. Of signals to runs one run a call, so that there may be another.
  v_more := {{schema}}.return_signals(p_limit) > 0;
  v_more := {{schema}}.wake_waiting(p_limit) >= p_limit or v_more;
  v_more := {{schema}}.sweep_children(p_limit) >= p_limit or v_more;
  -- Their runs first, and again without those that others are at, as in settle_lost.
  loop
    v_known := cardinality(v_busy);
    for v_found in
      select j.id, j.run_id from {{schema}}.jobs j where j.deadline is not null and j.status in ('pending', 'held') and j.deadline <= {{schema}}.now()
         and j.id <> all(p_skip)
         and (j.run_id = any(v_busy)) is not true
       order by j.deadline, j.id limit p_limit - v_n
    loop
      continue when v_found.run_id = any(v_busy);
      if not {{schema}}.run_is_free(v_found.run_id) then
        v_busy := v_busy || v_found.run_id;
        continue;
      end if;
      p_skip := p_skip || v_found.id;
      select j.* into v_job from {{schema}}.jobs j where j.id = v_found.id and j.status in ('pending', 'held') and j.deadline <= {{schema}}.now() for update skip locked;
      continue when not found;
      job_id := v_job.id;
      task := v_job.task;
      queue := v_job.queue;
      claim_epoch := v_job.claim_epoch;
      attempt := v_job.attempt;
      worker_id := v_job.claimed_by;
      why := 'DeadlineExceeded';
      begin
        perform {{schema}}.finish(v_job, 'failed', null, null, jsonb_build_object('type', 'DeadlineExceeded', 'message', 'it had not started by its deadline', 'deadline', v_job.deadline));
        settled := 'failed';
      exception when others then
        settled := 'error: ' || sqlstate;
      end;
      v_n := v_n + 1;
      return next;
    end loop;
    exit when v_n >= p_limit or cardinality(v_busy) = v_known;
  end loop;
  v_n := 0;
  loop
    v_known := cardinality(v_busy);
    for v_found in
      select j.id, j.run_id from {{schema}}.jobs j where j.status = 'pending' and j.attempt >= j.max_attempts and j.id <> all(p_skip)
         and (j.run_id = any(v_busy)) is not true
       order by j.id limit p_limit - v_n
    loop
      continue when v_found.run_id = any(v_busy);
      if not {{schema}}.run_is_free(v_found.run_id) then
        v_busy := v_busy || v_found.run_id;
        continue;
      end if;
      p_skip := p_skip || v_found.id;
      select j.* into v_job from {{schema}}.jobs j where j.id = v_found.id and j.status = 'pending' and j.attempt >= j.max_attempts for update skip locked;
      continue when not found;
      job_id := v_job.id;
      task := v_job.task;
      queue := v_job.queue;
      claim_epoch := v_job.claim_epoch;
      attempt := v_job.attempt;
      worker_id := v_job.claimed_by;
      why := 'AttemptsExhausted';
      begin
        perform {{schema}}.finish(v_job, 'failed', null, null, jsonb_build_object('type', 'AttemptsExhausted', 'message', format('it has used %s of %s attempts', v_job.attempt, v_job.max_attempts)));
        settled := 'failed';
      exception when others then
        settled := 'error: ' || sqlstate;
      end;
      v_n := v_n + 1;
      return next;
    end loop;
    exit when v_n >= p_limit or cardinality(v_busy) = v_known;
  end loop;
  if v_more then
    job_id := null;
    settled := 'more';
    why := null;
    task := null;
    queue := null;
    claim_epoch := null;
    attempt := null;
    worker_id := null;
    return next;
  end if;
end $$;
comment on function {{schema}}.sweep(integer, uuid[]) is
  'Wakes jobs whose wait for a signal has lasted its time, or for a child is over, and gives signals of runs to others whose jobs have ended without taking them; a row more, without a job, says that there may be more of these. Ends waiting jobs whose deadline has passed or whose attempts are used up, and returns them. Answers error and the SQLSTATE for one that it could not end. Repeat, with those in p_skip, until it returns nothing.';

create function {{schema}}.prune(p_limit integer default 1000) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_n integer;
  v_total integer := 0;
begin
  delete from {{schema}}.idempotency_keys k where k.ctid = any(array(
    select i.ctid from {{schema}}.idempotency_keys i where i.expires_at <= {{schema}}.now() order by i.expires_at limit p_limit for update skip locked));
  get diagnostics v_n = row_count;
  v_total := v_total + v_n;
  delete from {{schema}}.unique_keys k where k.ctid = any(array(
    select u.ctid from {{schema}}.unique_keys u where u.expires_at <= {{schema}}.now() order by u.expires_at limit p_limit for update skip locked));
  get diagnostics v_n = row_count;
  v_total := v_total + v_n;
  delete from {{schema}}.sleepers s where s.worker_id = any(array(
    select o.worker_id from {{schema}}.sleepers o
     where not exists (select from {{schema}}.workers w where w.id = o.worker_id and w.status = 'live') limit p_limit));
  delete from {{schema}}.workers w where w.id = any(array(
    select o.id from {{schema}}.workers o where o.status in ('stopped', 'lost') and o.ended_at < {{schema}}.now() - interval '7 days'
       and not exists (select from {{schema}}.jobs j where j.claimed_by = o.id) limit p_limit));
  get diagnostics v_n = row_count;
  v_total := v_total + v_n;
  delete from {{schema}}.unknowns u where u.ctid = any(array(
    select o.ctid from {{schema}}.unknowns o, {{schema}}.installation i where o.since < {{schema}}.now() - i.history_retention
       and not exists (select from {{schema}}.jobs j where j.id = o.job_id) and not exists (select from {{schema}}.history h where h.id = o.job_id)
     order by o.since limit p_limit for update of o skip locked));
  get diagnostics v_n = row_count;
  return v_total + v_n + {{schema}}.prune_effects(p_limit) + {{schema}}.prune_orderings(p_limit) + {{schema}}.prune_runs(p_limit) + {{schema}}.prune_steps(p_limit) + {{schema}}.prune_incidents(p_limit);
end $$;
comment on function {{schema}}.prune(integer) is 'Forgets expired keys, ordering keys without jobs, workers that ended over a week ago, how attempts came to be unknown of jobs that retention has dropped, settled effects, steps and incidents whose jobs are gone from history, and runs that ended longer ago than history is kept; at most p_limit of each. Returns how many; repeat until 0.';

-- What every worker asks every few seconds, in one statement: an idle worker should cost next to nothing. The survey comes
-- first, so that nobody waits for it at the leader's row; what it refuses must not keep this worker from leading.
create function {{schema}}.look(p_worker uuid, p_lease double precision, p_elapsed double precision, p_queues text[], p_tasks text[])
  returns table (kind text, name text, n integer)
  language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
declare
  v_lead record;
begin
  begin
    return query select s.kind, s.name, s.n from {{schema}}.survey(p_queues, p_tasks) s;
  exception when others then
    return query select 'refused'::text, sqlstate::text, null::integer;
  end;
  select l.is_leader, l.quiet into v_lead from {{schema}}.lead(p_worker, 'maintenance', p_lease, p_elapsed) l;
  if not v_lead.is_leader then
    return;
  end if;
  return query select 'leader'::text, null::text, null::integer;
  if not v_lead.quiet and exists (select from {{schema}}.workers w where w.status in ('live', 'draining') and w.lease_expires_at <= {{schema}}.now()) then
    return query select 'duty'::text, 'mark_lost'::text, null::integer;
  end if;
  if exists (select from {{schema}}.jobs r where r.claimed_by is not null and r.status = 'running'
               and not exists (select from {{schema}}.workers o where o.id = r.claimed_by and o.status in ('live', 'draining'))) then
    return query select 'duty'::text, 'settle_lost'::text, null::integer;
  end if;
  if exists (select from {{schema}}.jobs d where d.deadline is not null and d.status in ('pending', 'held') and d.deadline <= {{schema}}.now())
     or exists (select from {{schema}}.jobs e where e.status = 'pending' and e.attempt >= e.max_attempts)
     or exists (select from {{schema}}.jobs s where s.status = 'held' and s.held_reason in ('signal', 'child') and s.run_at <= {{schema}}.now()) then
    return query select 'duty'::text, 'sweep'::text, null::integer;
  end if;
  if exists (select from {{schema}}.signals g where g.run_id is not null and g.job_id is not null and g.taken_at is null and g.refused_at is null
               and not exists (select from {{schema}}.jobs w where w.id = g.job_id and w.generation = g.generation)) then
    return query select 'duty'::text, 'sweep'::text, null::integer;
  end if;
  if exists (select from {{schema}}.child_rechecks k where k.due_at <= {{schema}}.now()) then
    return query select 'duty'::text, 'sweep'::text, null::integer;
  end if;
  if exists (select from {{schema}}.nodes n where n.due) then
    return query select 'duty'::text, 'carry_on'::text, null::integer;
  end if;
  if exists (select from {{schema}}.runs c join {{schema}}.runs p on p.id = c.parent_run
               where c.parent_run is not null and c.finished_at is null and c.cancel_requested_at is null
                 and (p.finished_at is not null or p.cancel_requested_at is not null or p.stopping_at is not null)) then
    return query select 'duty'::text, 'stop_children'::text, null::integer;
  end if;
  if exists (select from {{schema}}.ordering_keys) or exists (select from {{schema}}.ordering_rechecks) then
    return query select 'duty'::text, 'sweep_orderings'::text, null::integer;
  end if;
end $$;
comment on function {{schema}}.look(uuid, double precision, double precision, text[], text[]) is
  'The survey and lead in one call, and for the leader what is due: rows of kind duty name the functions that have something to do (mark_lost, settle_lost, sweep, carry_on, stop_children, sweep_orderings). Kind leader: this worker leads; refused: the survey failed, with this SQLSTATE.';

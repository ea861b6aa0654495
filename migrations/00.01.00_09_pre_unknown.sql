-- Side effects: their start, committed under the fence before the body runs, and attempts whose outcome nobody has told.
-- Called by workers (start_effects), and by the functions that settle and end attempts (enter_unknown).
-- Lock order: workers, then jobs by id.

create table {{schema}}.unknowns (
  job_id uuid not null,
  claim_epoch bigint not null check (claim_epoch > 0),
  since timestamptz not null,
  reason text not null,
  error jsonb,
  reconcile_job uuid,
  primary key (job_id, claim_epoch),
  constraint unknowns_reason check (reason in ('worker_lost', 'timed_out', 'process_died', 'shutdown', 'told', 'not_confirmed'))
);
create index unknowns_since on {{schema}}.unknowns (since);
comment on table {{schema}}.unknowns is 'How attempts came to be unknown: one row for each, which stays when the outcome has become known.';
comment on column {{schema}}.unknowns.job_id is 'The job.';
comment on column {{schema}}.unknowns.claim_epoch is 'The attempt''s epoch; with job_id it names the attempt.';
comment on column {{schema}}.unknowns.since is 'When its outcome became unknown.';
comment on column {{schema}}.unknowns.reason is
  'worker_lost (its lease ran out), timed_out, process_died (its child process), shutdown (its worker ended under it), told (the body said so) or not_confirmed (what the database answered proved nothing).';
comment on column {{schema}}.unknowns.error is 'What was known: a JSON object with type and message.';
comment on column {{schema}}.unknowns.reconcile_job is 'The job that asks the outside world what happened; null for none.';

create function {{schema}}.enter_unknown(p_job {{schema}}.jobs, p_reason text, p_error jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  update {{schema}}.jobs j set status = 'unknown' where j.id = p_job.id and j.claim_epoch = p_job.claim_epoch and j.status = 'running';
  if not found then
    return;
  end if;
  p_job.status := 'unknown';
  if p_job.effect_class <> 'side_effecting' and p_job.effect_started_at is not null then
    p_error := coalesce(p_error, '{}') || coalesce((select jsonb_build_object('step', s.name, 'occurrence', s.occurrence) from {{schema}}.steps s
      where s.job_id = p_job.id and s.generation = p_job.generation and s.kind = 'step' and not s.done limit 1), '{}');
  end if;
  insert into {{schema}}.unknowns (job_id, claim_epoch, since, reason, error, reconcile_job)
    values (p_job.id, p_job.claim_epoch, {{schema}}.now(), p_reason, p_error, {{schema}}.request_reconcile(p_job))
    on conflict do nothing;
end $$;
comment on function {{schema}}.enter_unknown({{schema}}.jobs, text, jsonb) is
  'Makes a running job unknown, with the reason on record, and asks for its reconciling. The caller has locked the row. The only way there; a job that is not running, or not in that attempt, stays as it is.';

-- One statement for all attempts that wait. The worker compares each field of the answer with its claim before it calls the body.
create function {{schema}}.start_effects(p_worker uuid, p_ids uuid[], p_epochs bigint[])
  returns table (job_id uuid, claim_epoch bigint, claimed_by uuid, status text, effect_started_at timestamptz, cancel_requested_at timestamptz,
    effect_class text, lease_holds boolean, task text, queue text, priority smallint, run_at timestamptz, policy_id text, attempt integer,
    max_attempts integer, recoveries integer, retry_afters integer, snoozes integer, releases integer, generation integer,
    key_generation integer, cohort text, deadline timestamptz, claimed_at timestamptz, payload_sha256 text, meta_sha256 text)
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  v_holds boolean;
begin
  perform from {{schema}}.workers w
    where w.id = p_worker and w.status in ('live', 'draining') and w.lease_expires_at > {{schema}}.now() for key share;
  v_holds := found;
  -- Lock first: the update below decides on the locked rows, so a cancel request that commits meanwhile is seen.
  perform from {{schema}}.jobs j where j.id = any(p_ids) and j.claimed_by = p_worker and j.status = 'running' order by j.id for update;
  if v_holds then
    update {{schema}}.jobs j set effect_started_at = {{schema}}.now()
     where j.id = any(p_ids) and (j.claimed_by = p_worker) is true and j.status = 'running'
       and ((j.id, j.claim_epoch) in (select e.id, e.epoch from unnest(p_ids, p_epochs) as e(id, epoch))) is true
       and j.effect_class = 'side_effecting' and j.cancel_requested_at is null and j.effect_started_at is null;
  end if;
  return query
    select j.id, j.claim_epoch, j.claimed_by, j.status, j.effect_started_at, j.cancel_requested_at, j.effect_class, v_holds, j.task, j.queue,
           j.priority, greatest(j.run_at, '0001-01-02 00:00:00+00'), j.policy_id, j.attempt, j.max_attempts, j.recoveries, j.retry_afters, j.snoozes,
           j.releases, j.generation, j.key_generation, j.cohort, case when j.deadline < '9000-01-01 00:00:00+00' then j.deadline end, j.claimed_at,
           encode(sha256(convert_to(j.payload::text, 'UTF8')), 'hex'), encode(sha256(convert_to(j.meta::text, 'UTF8')), 'hex')
      from unnest(p_ids) with ordinality as e(id, n) left join {{schema}}.jobs j on j.id = e.id order by e.n;
end $$;
comment on function {{schema}}.start_effects(uuid, uuid[], bigint[]) is
  'Allows attempts of side-effecting jobs to start their effects: sets effect_started_at where the fence holds, the job runs, nobody asked to cancel it and the worker''s lease holds. Answers a row for each attempt that was asked for, in order, with the job as it then stands (null where it is not there); lease_holds says whether anything could be started. Asked again, it answers the same and moves nothing.';

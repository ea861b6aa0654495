-- Preparations, and the incidents that hold up a job. A task may be prepared before each attempt: under the claim, with the
-- slot of its cohort and the turn of its ordering key, but before the attempt has begun. What keeps it from that, and what has
-- exhausted its recoveries, is an incident: it has a bound, and past that only what somebody grants, one at a time, on the record.
-- Lock order: workers, root locks by depth and id, jobs by id, incidents.

create table {{schema}}.incidents (
  id uuid primary key default {{schema}}.new_id(),
  job_id uuid not null,
  run_id uuid,
  generation integer not null check (generation >= 0),
  phase text not null check (phase in ('prepare', 'body')),
  fingerprint text not null check (length(fingerprint) between 1 and 400),
  code text not null check ({{schema}}.valid_name(code)),
  fault jsonb not null check (jsonb_typeof(fault) = 'object'),
  status text not null check (status in ('open', 'exhausted', 'granted', 'resolved')),
  is_current boolean not null default true,
  bound integer check (bound >= 0),
  failures integer not null default 0 check (failures >= 0),
  grants integer not null default 0 check (grants >= 0),
  launches integer not null default 0 check (launches >= 0),
  events integer not null default 0 check (events >= 0),
  opened_at timestamptz not null,
  seen_at timestamptz not null,
  resolved_at timestamptz,
  constraint incidents_resolved check ((resolved_at is not null) = (status = 'resolved')),
  constraint incidents_current check (status <> 'resolved' or not is_current)
);
create unique index incidents_fault on {{schema}}.incidents (job_id, generation, phase, fingerprint) where status <> 'resolved';
create unique index incidents_current on {{schema}}.incidents (job_id) where is_current;
create index incidents_job on {{schema}}.incidents (job_id);
create index incidents_run on {{schema}}.incidents (run_id) where run_id is not null;
create index incidents_seen on {{schema}}.incidents (seen_at);
comment on table {{schema}}.incidents is 'What holds up, or has held up, the attempts of a job: one row for each fault, by job, phase and fingerprint, until it is resolved.';
comment on column {{schema}}.incidents.id is 'What a grant names.';
comment on column {{schema}}.incidents.job_id is 'The job, which may be a node of a run.';
comment on column {{schema}}.incidents.run_id is 'The run that it is a node of; null for a plain job.';
comment on column {{schema}}.incidents.generation is 'The generation of the job that it is about.';
comment on column {{schema}}.incidents.phase is 'prepare (before the attempt) or body (the attempt itself).';
comment on column {{schema}}.incidents.fingerprint is 'The fault without what changes each time, such as numbers and ids: the same one is the same incident.';
comment on column {{schema}}.incidents.code is 'The kind: preparation_failed, unmet_prerequisite, needs_approval, recovery_exhausted, or what a preparation has called its pause.';
comment on column {{schema}}.incidents.fault is 'The fault as it was last seen: type, message, and what else is known of it.';
comment on column {{schema}}.incidents.status is 'open (it goes on by itself), exhausted (it waits for a grant), granted (one more may begin) or resolved.';
comment on column {{schema}}.incidents.is_current is 'Whether it is the fault that was seen last of its job, and not resolved; a grant is for that one.';
comment on column {{schema}}.incidents.bound is 'How many recoveries it has by itself; null for any number.';
comment on column {{schema}}.incidents.failures is 'How often the fault was seen; of an unmet prerequisite, which is one fault until it is met, once.';
comment on column {{schema}}.incidents.grants is 'How many more recoveries somebody has granted.';
comment on column {{schema}}.incidents.launches is 'How many recoveries have begun.';
comment on column {{schema}}.incidents.events is 'How many rows of incident_events it has.';
comment on column {{schema}}.incidents.opened_at is 'When the fault was first seen.';
comment on column {{schema}}.incidents.seen_at is 'When it was last seen.';
comment on column {{schema}}.incidents.resolved_at is 'When it was resolved: its job was prepared, or has ended.';

create table {{schema}}.incident_events (
  incident_id uuid not null,
  n integer not null check (n > 0),
  at timestamptz not null,
  kind text not null check (kind in ('failed', 'granted', 'launched', 'resolved')),
  claim_epoch bigint,
  actor text,
  details jsonb,
  primary key (incident_id, n)
);
comment on table {{schema}}.incident_events is 'What has become of incidents, append-only.';
comment on column {{schema}}.incident_events.incident_id is 'The incident.';
comment on column {{schema}}.incident_events.n is 'Which event of it, from 1.';
comment on column {{schema}}.incident_events.at is 'When.';
comment on column {{schema}}.incident_events.kind is 'failed (the fault was seen), granted (one more recovery), launched (a recovery has begun) or resolved.';
comment on column {{schema}}.incident_events.claim_epoch is 'The attempt; null for what is none.';
comment on column {{schema}}.incident_events.actor is 'Who granted; null for the rest.';
comment on column {{schema}}.incident_events.details is 'The fault, the reason of a grant, or why it was resolved.';
create trigger incident_events_append_only before update on {{schema}}.incident_events for each row
  execute function {{schema}}.refuse('WF004', 'the events of an incident are append-only', 'Write another row.');
create trigger incident_events_not_emptied before truncate on {{schema}}.incident_events for each statement
  execute function {{schema}}.refuse('WF004', 'the events of an incident are append-only', 'Retention drops them with their incident.');
create function {{schema}}.keep_events() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from {{schema}}.incidents i where i.id = old.incident_id) then
    raise exception using errcode = 'WF004', message = format('the events of an incident are append-only: %s', old.incident_id), detail = jsonb_build_object('incident_id', old.incident_id)::text,
      hint = 'Retention drops them with their incident.';
  end if;
  return old;
end $$;
comment on function {{schema}}.keep_events() is 'Trigger: events go only after their incident.';
create trigger incident_events_kept before delete on {{schema}}.incident_events for each row execute function {{schema}}.keep_events();

create table {{schema}}.facts (
  owner uuid not null,
  name text not null check ({{schema}}.valid_name(name)),
  version integer not null check (version > 0),
  value jsonb,
  job_id uuid not null,
  claim_epoch bigint not null,
  set_at timestamptz not null,
  primary key (owner, name)
);
create index facts_set on {{schema}}.facts (set_at);
comment on table {{schema}}.facts is 'What preparations have found out, for the attempts of their run.';
comment on column {{schema}}.facts.owner is 'The run; of a plain job the job.';
comment on column {{schema}}.facts.name is 'What it is called.';
comment on column {{schema}}.facts.version is 'How often it was set or cleared.';
comment on column {{schema}}.facts.value is 'The value; null where it was cleared.';
comment on column {{schema}}.facts.job_id is 'The job whose preparation has set it last.';
comment on column {{schema}}.facts.claim_epoch is 'Under which claim.';
comment on column {{schema}}.facts.set_at is 'When.';

create function {{schema}}.fault_fingerprint(p_type text, p_message text) returns text
  language sql immutable set search_path = pg_catalog, pg_temp as $$
  select left(coalesce(p_type, 'Error'), 120) || ': ' || left(
    regexp_replace(regexp_replace(regexp_replace(coalesce(p_message, ''),
      '[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}', '#', 'g'),
      '\m(0x)?[0-9a-fA-F]*[0-9][0-9a-fA-F]{7,}\M', '#', 'g'),
      '[0-9]+([.,:][0-9]+)*', '#', 'g'), 250)
$$;
comment on function {{schema}}.fault_fingerprint(text, text) is 'A fault without what changes from one time to the next: ids, long hexadecimal numbers, and other numbers, instants among them.';

create function {{schema}}.note_event(p_incident uuid, p_kind text, p_epoch bigint, p_actor text, p_details jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_n integer;
begin
  update {{schema}}.incidents i set events = i.events + 1, failures = i.failures + (p_kind = 'failed')::int, grants = i.grants + (p_kind = 'granted')::int,
      launches = i.launches + (p_kind = 'launched')::int where i.id = p_incident returning i.events into v_n;
  insert into {{schema}}.incident_events (incident_id, n, at, kind, claim_epoch, actor, details) values (p_incident, v_n, {{schema}}.now(), p_kind, p_epoch, p_actor, p_details);
end $$;
comment on function {{schema}}.note_event(uuid, text, bigint, text, jsonb) is 'Appends an event to an incident, and counts it. The caller has the job locked, or its run.';

-- p_bound: how many recoveries a fault has that is new; null for any number. An unmet prerequisite is one fault until it is met.
create function {{schema}}.note_fault(p_job {{schema}}.jobs, p_phase text, p_code text, p_fingerprint text, p_fault jsonb, p_bound integer) returns {{schema}}.incidents
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz := {{schema}}.now();
  v_incident {{schema}}.incidents;
begin
  update {{schema}}.incidents i set is_current = false where i.job_id = p_job.id and i.is_current = true;
  insert into {{schema}}.incidents (job_id, run_id, generation, phase, fingerprint, code, fault, status, bound, opened_at, seen_at)
    values (p_job.id, p_job.run_id, p_job.generation, p_phase, p_fingerprint, p_code, p_fault, 'open', p_bound, v_now, v_now)
    on conflict (job_id, generation, phase, fingerprint) where status <> 'resolved'
      do update set code = excluded.code, fault = excluded.fault, bound = excluded.bound, seen_at = excluded.seen_at, is_current = true
    returning * into v_incident;
  if p_code <> 'unmet_prerequisite' or v_incident.failures = 0 then
    perform {{schema}}.note_event(v_incident.id, 'failed', p_job.claim_epoch, null, p_fault);
  end if;
  update {{schema}}.incidents i set status = case when i.launches >= i.bound + i.grants then 'exhausted' else 'open' end
    where i.id = v_incident.id returning * into v_incident;
  return v_incident;
end $$;
comment on function {{schema}}.note_fault({{schema}}.jobs, text, text, text, jsonb, integer) is
  'Notes a fault of a job: a new incident, or once more the one that it is. Answers it, exhausted where no recovery is left. The caller has the job locked.';

create function {{schema}}.launch(p_incident {{schema}}.incidents, p_epoch bigint) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
begin
  -- Where any number is allowed, each would only be one row more.
  if p_incident.bound is not null then
    perform {{schema}}.note_event(p_incident.id, 'launched', p_epoch, null, null);
  end if;
  update {{schema}}.incidents i set status = 'open' where i.id = p_incident.id;
end $$;
comment on function {{schema}}.launch({{schema}}.incidents, bigint) is 'A recovery of an incident begins, which uses one up, in the transaction that it begins in.';

-- A claim after a loss is rare: an ordinary one costs no more than the look at its counter.
create function {{schema}}.body_launched() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_incident {{schema}}.incidents;
begin
  -- Once: what is handed back, or tried again, goes on with the recovery that it has.
  select i.* into v_incident from {{schema}}.incidents i
   where i.job_id = new.id and i.is_current and i.phase = 'body' and i.generation = new.generation and i.status = 'granted';
  if found then
    perform {{schema}}.launch(v_incident, new.claim_epoch);
  end if;
  return null;
end $$;
comment on function {{schema}}.body_launched() is 'Trigger: a job whose recoveries were exhausted is claimed; that uses up what was granted.';
create trigger recovery_launched after update of status on {{schema}}.jobs for each row
  when (old.status = 'pending' and new.status = 'running' and new.recoveries > 0) execute function {{schema}}.body_launched();

create function {{schema}}.holds_exhausted(p_policy_id text) returns boolean
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select coalesce((select p.spec ->> 'on_exhausted' = 'hold' from {{schema}}.policies p where p.id = p_policy_id), false)
$$;
comment on function {{schema}}.holds_exhausted(text) is 'Whether a job of this policy is held once its recoveries are exhausted, in place of ending as failed.';

-- Before the job is locked, since a pause locks the jobs of the whole tree that wait, in the order of their ids.
create function {{schema}}.pause_for(p_run uuid, p_code text, p_reason text, p_actor text) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  return p_run is not null and {{schema}}.pause_run(p_run, p_reason, p_actor, p_code) = 'paused';
end $$;
comment on function {{schema}}.pause_for(uuid, text, text, text) is 'Pauses the run of a job that is about to be held, if it has one that is not paused; answers whether it did. The caller holds the root locks of the run and of all below it.';

create function {{schema}}.hold_for(p_job uuid, p_incident uuid, p_paused boolean) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run uuid := (select j.run_id from {{schema}}.jobs j where j.id = p_job);
begin
  -- In its line it keeps its place; others may have been given the turn by its coming back.
  update {{schema}}.jobs j set status = 'held', held_reason = 'incident', ordering_later = null
    where j.id = p_job and (j.status = 'pending' or j.status = 'held' and j.held_reason in ('paused', 'ordering'));
  if p_paused then
    update {{schema}}.run_pauses p set incident = p_incident where p.run_id = v_run;
  end if;
end $$;
comment on function {{schema}}.hold_for(uuid, uuid, boolean) is 'Holds a job that has just come back, until its incident is granted one more; p_paused: its run was paused for that.';

create function {{schema}}.tree_is_free(p_run uuid) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_level uuid[] := array[p_run];
  v_locked uuid[];
begin
  -- Children begin and are forgotten under the lock of their parent: this sees all of them.
  while v_level <> '{}' loop
    v_locked := array(select r.id from {{schema}}.runs r where r.id = any(v_level) order by r.id for update skip locked);
    if exists (select from {{schema}}.runs r where r.id = any(v_level) and r.id <> all(v_locked)) then
      return false;
    end if;
    v_level := array(select c.id from unnest(v_locked) p(id) cross join lateral (
      select o.id from {{schema}}.runs o where o.parent_run = p.id and o.finished_at is null offset 0) c);
  end loop;
  return true;
end $$;
comment on function {{schema}}.tree_is_free(uuid) is 'Takes the root locks of a run and of all that is live below it, and waits for nobody; answers false where somebody has one of them. Then the caller gives up, and comes again.';

-- Settles what settle_lost leaves to it. In a transaction of its own: a pause takes the root locks of the tree before it locks jobs.
create function {{schema}}.hold_exhausted(p_job uuid) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_job {{schema}}.jobs;
  v_found uuid := (select j.run_id from {{schema}}.jobs j where j.id = p_job);
  v_incident {{schema}}.incidents;
  v_error jsonb;
  v_reason text;
  v_paused boolean := false;
  v_now timestamptz;
begin
  perform {{schema}}.ensure_today();
  if v_found is not null and not {{schema}}.tree_is_free(v_found) then
    return 'busy';
  end if;
  for v_look in 1 .. 2 loop
    if v_look = 2 or v_found is null then
      perform from {{schema}}.jobs j where j.id = p_job for update;
    end if;
    select j.* into v_job from {{schema}}.jobs j
     where j.id = p_job and j.claimed_by is not null and j.status = 'running' and j.effect_started_at is null and j.cancel_requested_at is null
       and j.recoveries + 1 > {{schema}}.recovery_bound(j.policy_id) and {{schema}}.holds_exhausted(j.policy_id)
       and not exists (select from {{schema}}.workers w where w.id = j.claimed_by and w.status in ('live', 'draining'));
    if not found then
      return 'settled';
    end if;
    if v_look = 1 then
      v_error := jsonb_build_object('type', 'RecoveryExhausted', 'message', format('its worker was lost, and it has been recovered %s times already, the limit is %s', v_job.recoveries, {{schema}}.recovery_bound(v_job.policy_id)), 'worker_id', v_job.claimed_by);
      v_reason := format('the worker of job %s (%s) was lost once too often; see taskq incidents list', v_job.id, v_job.task);
      v_incident := {{schema}}.note_fault(v_job, 'body', 'recovery_exhausted', 'WorkerLost', v_error, 0);
      v_paused := {{schema}}.pause_for(v_job.run_id, 'recovery_exhausted', v_reason, 'taskq:recovery');
    end if;
  end loop;
  v_now := {{schema}}.now();
  insert into {{schema}}.ledger (job_id, ended_at, claimed_at, claim_epoch, worker_id, effect_started_at, attempt, generation, outcome, error)
    values (v_job.id, v_now, v_job.claimed_at, v_job.claim_epoch, v_job.claimed_by, v_job.effect_started_at, v_job.attempt, v_job.generation, 'lost', v_error);
  update {{schema}}.jobs j set status = 'pending', claimed_by = null, claimed_at = null, effect_started_at = null, recoveries = j.recoveries + 1 where j.id = v_job.id;
  perform {{schema}}.hold_for(v_job.id, v_incident.id, v_paused);
  return 'held';
end $$;
comment on function {{schema}}.hold_exhausted(uuid) is
  'Settles a job whose worker is lost once too often and whose policy says on_exhausted = hold: it is held, with an incident, and its run is paused, in one transaction. Answers held; busy where somebody is at its run, who is not waited for; or settled where there is nothing to do (any more): its worker lives, or somebody was first.';

-- What a preparation needs --------------------------------------------------------------------------------------------

create function {{schema}}.facts_of(p_job {{schema}}.jobs) returns jsonb
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select coalesce(jsonb_object_agg(f.name, jsonb_build_object('version', f.version, 'value', f.value) || case when f.value is null then '{"cleared": true}' else '{}' end::jsonb), '{}')
    from {{schema}}.facts f where f.owner = coalesce(p_job.run_id, p_job.id)
$$;
comment on function {{schema}}.facts_of({{schema}}.jobs) is 'What preparations have found out for the run of a job, or for a plain job: by name version and value, and cleared where there is none any more.';

create function {{schema}}.begin_preparation(p_worker uuid, p_job uuid, p_epoch bigint)
  returns table (answer text, facts text, approved text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_job {{schema}}.jobs;
  v_incident {{schema}}.incidents;
  v_holds boolean;
  v_verdict text;
begin
  perform from {{schema}}.workers w where w.id = p_worker and w.status in ('live', 'draining') and w.lease_expires_at > {{schema}}.now() for key share;
  v_holds := found;
  select j.* into v_job from {{schema}}.jobs j
   where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for no key update;
  answer := case when not found then 'fenced' when not v_holds then 'lease' when v_job.cancel_requested_at is not null then 'cancelled' else 'go' end;
  if answer <> 'go' then
    return next;
    return;
  end if;
  select p.verdict into v_verdict from {{schema}}.preparations p where p.job_id = p_job and p.claim_epoch = p_epoch;
  if found then
    answer := v_verdict;
  else
    select i.* into v_incident from {{schema}}.incidents i where i.job_id = p_job and i.is_current and i.phase = 'prepare' and i.generation = v_job.generation;
    -- What was approved stays so; anything else is granted once for each time.
    if v_incident.launches >= v_incident.bound + v_incident.grants and not (v_incident.code = 'needs_approval' and v_incident.status <> 'exhausted') then
      answer := 'exhausted';
    elsif v_incident.id is not null then
      perform {{schema}}.launch(v_incident, p_epoch);
    end if;
    insert into {{schema}}.preparations (job_id, claim_epoch, worker_id, began_at, verdict) values (p_job, p_epoch, p_worker, {{schema}}.now(), answer);
  end if;
  facts := {{schema}}.facts_of(v_job)::text;
  approved := (select coalesce(jsonb_agg(distinct i.fault ->> 'what'), '[]')::text from {{schema}}.incidents i
    where i.job_id = p_job and i.generation = v_job.generation and i.code = 'needs_approval' and i.grants > 0);
  return next;
end $$;
comment on function {{schema}}.begin_preparation(uuid, uuid, bigint) is
  'A preparation of a claimed job begins, under its fence. Answers go, with the facts and with what was approved; exhausted (nothing more is granted: it must not be called), cancelled, lease or fenced. Told again, it answers the same and counts once.';

create function {{schema}}.prerequisite_kind(p_job {{schema}}.jobs, p_name text, p_checks jsonb) returns text
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select case
    when p_checks ? p_name then 'check'
    when p_job.payload ? p_name then 'input'
    when exists (select from {{schema}}.nodes n join {{schema}}.runs r on r.id = n.run_id
        join {{schema}}.plan_edges e on e.plan_hash = r.plan_hash and e.target = {{schema}}.place_in_plan(r.items, n.ix)
        join {{schema}}.plan_nodes s on s.plan_hash = r.plan_hash and s.ix = e.source
       where n.id = p_job.id and s.name = p_name) then 'producer' end
$$;
comment on function {{schema}}.prerequisite_kind({{schema}}.jobs, text, jsonb) is 'What a prerequisite names: a check that the task declares, an argument of the job, or a node whose result it waits for; null for nothing.';

create function {{schema}}.write_facts(p_job {{schema}}.jobs, p_set jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_fact record;
begin
  -- In one order, whoever writes: what somebody else has set since it was seen stays as it is.
  for v_fact in select f.key as name, f.value -> 'value' as value, coalesce((f.value ->> 'seen')::int, 0) as seen from jsonb_each(p_set) f order by f.key loop
    if v_fact.seen = 0 then
      insert into {{schema}}.facts (owner, name, version, value, job_id, claim_epoch, set_at)
        values (coalesce(p_job.run_id, p_job.id), v_fact.name, 1, v_fact.value, p_job.id, p_job.claim_epoch, {{schema}}.now()) on conflict do nothing;
    else
      update {{schema}}.facts f set version = f.version + 1, value = v_fact.value, job_id = p_job.id, claim_epoch = p_job.claim_epoch, set_at = {{schema}}.now()
        where f.owner = coalesce(p_job.run_id, p_job.id) and f.name = v_fact.name and f.version = v_fact.seen;
    end if;
  end loop;
end $$;
comment on function {{schema}}.write_facts({{schema}}.jobs, jsonb) is 'Sets and clears facts by compare-and-swap on the version that was seen (0: none); one that has moved since stays.';

create function {{schema}}.end_preparation(p_worker uuid, p_job uuid, p_epoch bigint, p_answer text, p_details jsonb) returns table (became text, facts text, incident uuid)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  v_job {{schema}}.jobs;
  v_found uuid := (select j.run_id from {{schema}}.jobs j where j.id = p_job);
  v_done {{schema}}.preparations;
  v_incident {{schema}}.incidents;
  v_holds boolean;
  v_paused boolean := false;
  v_delay double precision := 0;
  v_kind text;
  v_error jsonb;
  v_reason text;
  v_told text := p_answer;
  v_stops boolean;
  v_locked boolean := false;
begin
  if (p_answer in ('ready', 'pause', 'needs_approval', 'unmet', 'failed', 'exhausted')) is not true then
    raise exception using errcode = 'WF009', message = format('a preparation answers %L', left(p_answer, 100)), hint = 'It is ready, pause, needs_approval, unmet, failed or exhausted.';
  end if;
  perform from {{schema}}.workers w where w.id = p_worker and w.status in ('live', 'draining') and w.lease_expires_at > {{schema}}.now() for key share;
  v_holds := found;
  if p_answer = 'ready' then
    -- What is given back into a pause is given back under the root lock, or the end of the pause would not see it.
    if exists (select from {{schema}}.runs r where r.id = v_found and r.status = 'paused') then
      v_locked := {{schema}}.run_is_free(v_found);
      if not v_locked then
        became := 'busy';
        return next;
        return;
      end if;
    end if;
    perform from {{schema}}.jobs j where j.id = p_job for no key update;
  else
    perform {{schema}}.ensure_today();
    if v_found is null then
      perform from {{schema}}.jobs j where j.id = p_job for update;
    elsif not {{schema}}.tree_is_free(v_found) then
      -- Under these nobody but its worker ends it; what waits of the tree is locked before it is. Nobody is waited for: this
      -- is the way of all preparations of a worker.
      became := 'busy';
      return next;
      return;
    end if;
  end if;
  select p.* into v_done from {{schema}}.preparations p where p.job_id = p_job and p.claim_epoch = p_epoch;
  if v_done.answer = p_answer then
    became := v_done.became;
    facts := (select {{schema}}.facts_of(j)::text from {{schema}}.jobs j where j.id = p_job);
    incident := (select i.id from {{schema}}.incidents i where i.job_id = p_job and i.is_current);
    return next;
    return;
  end if;
  select j.* into v_job from {{schema}}.jobs j where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running';
  if not found or v_done.job_id is null or v_done.answer is not null then
    became := 'fenced';
    return next;
    return;
  elsif p_answer = 'ready' then
    became := case when not v_holds then 'lease' when v_job.cancel_requested_at is not null then 'cancelled' end;
    -- Asked last: what is paused meanwhile begins no attempt.
    v_stops := exists (select from {{schema}}.runs r where r.id = v_job.run_id and r.status = 'paused');
    if became is null and v_stops and not v_locked then
      became := 'busy';
    end if;
    if became is not null then
      return next;
      return;
    end if;
    perform {{schema}}.write_facts(v_job, coalesce(p_details -> 'facts', '{}'));
    for v_incident in select i.* from {{schema}}.incidents i where i.job_id = p_job and i.phase = 'prepare' and i.status <> 'resolved' loop
      perform {{schema}}.note_event(v_incident.id, 'resolved', p_epoch, null, jsonb_build_object('because', 'prepared'));
      update {{schema}}.incidents i set status = 'resolved', resolved_at = {{schema}}.now(), is_current = false where i.id = v_incident.id;
    end loop;
    if v_stops then
      perform {{schema}}.end_attempts(p_worker, array[p_job], array[p_epoch], array['release'], array[null::bigint], array[null::jsonb],
        array[jsonb_build_object('type', 'NotPrepared', 'message', 'prepared, and its run was paused meanwhile', 'reason', 'prepare', 'body_started', false)], array[0::double precision]);
      became := 'paused';
    else
      became := 'ready';
    end if;
  else
    if p_answer = 'unmet' then
      v_kind := {{schema}}.prerequisite_kind(v_job, p_details ->> 'prerequisite', coalesce(p_details -> 'checks', '[]'));
      if v_kind is null then
        p_answer := 'failed';
        p_details := jsonb_build_object('type', 'PrerequisiteInvalid', 'message', format('the preparation answered Unmet(%s), which is no argument of the job, no node that it waits for and no check of the task', to_jsonb(left(p_details ->> 'prerequisite', 128))));
      end if;
    end if;
    v_stops := v_job.cancel_requested_at is not null;
    case
      when v_stops then
        -- It is ended by this, whatever it has said: nothing is left to hold, or to pause for.
        v_error := jsonb_build_object('type', 'Cancelled', 'message', 'cancelling was requested while it was prepared');
      when p_answer = 'exhausted' then
        update {{schema}}.incidents i set status = 'exhausted' where i.job_id = p_job and i.is_current = true returning i.* into v_incident;
        v_error := v_incident.fault;
      when p_answer = 'failed' then
        v_error := jsonb_build_object('type', left(p_details ->> 'type', 120), 'message', left(p_details ->> 'message', 2000))
          || case when p_details ? 'traceback' then jsonb_build_object('traceback', left(p_details ->> 'traceback', 16000)) else '{}' end;
        v_incident := {{schema}}.note_fault(v_job, 'prepare', 'preparation_failed', {{schema}}.fault_fingerprint(p_details ->> 'type', p_details ->> 'message'), v_error, {{schema}}.recovery_bound(v_job.policy_id));
        v_delay := {{schema}}.backoff(v_job.policy_id, v_incident.failures);
      when p_answer = 'unmet' then
        v_error := jsonb_build_object('type', 'Unmet', 'message', format('%s %s is not met', v_kind, p_details ->> 'prerequisite'), 'prerequisite', p_details ->> 'prerequisite', 'kind', v_kind);
        v_delay := (p_details ->> 'retry_in')::double precision;
        v_incident := {{schema}}.note_fault(v_job, 'prepare', 'unmet_prerequisite', format('not met: %s %s', v_kind, left(p_details ->> 'prerequisite', 250)), v_error, case when v_delay is null then 0 end);
      when p_answer = 'needs_approval' then
        v_error := jsonb_build_object('type', 'NeedsApproval', 'message', format('it needs approval: %s', p_details ->> 'what'), 'what', p_details ->> 'what');
        v_incident := {{schema}}.note_fault(v_job, 'prepare', 'needs_approval', format('needs approval: %s', left(p_details ->> 'what', 300)), v_error, 0);
      else
        v_error := jsonb_build_object('type', 'Paused', 'message', format('%s: %s', p_details ->> 'code', coalesce(p_details ->> 'reason', 'its preparation says so')));
        if v_found is null then
          v_incident := {{schema}}.note_fault(v_job, 'prepare', p_details ->> 'code', format('asks to pause: %s', p_details ->> 'code'), v_error, 0);
        end if;
    end case;
    if v_found is not null and not v_stops and (p_answer = 'pause' or v_incident.status = 'exhausted') then
      v_reason := left(case when p_answer = 'pause' then coalesce(p_details ->> 'reason', format('the preparation of job %s (%s) says so', p_job, v_job.task))
        else format('job %s (%s): %s', p_job, v_job.task, v_error ->> 'message') end, 2000);
      v_paused := {{schema}}.pause_for(v_found, case when p_answer = 'pause' then p_details ->> 'code' else v_incident.code end, v_reason, 'taskq:prepare');
    end if;
    -- Never at once: its worker is to have the answer before it can claim it again.
    perform {{schema}}.end_attempts(p_worker, array[p_job], array[p_epoch], array['release'], array[null::bigint], array[null::jsonb],
      array[jsonb_build_object('type', 'NotPrepared', 'message', format('not prepared: %s', v_error ->> 'message'), 'reason', 'prepare', 'body_started', false, 'cause', v_error)],
      array[case when v_incident.status = 'exhausted' then 0 else greatest(v_delay, 0.25) end]);
    if not exists (select from {{schema}}.jobs j where j.id = p_job) then
      became := 'ended';
    elsif v_incident.status = 'exhausted' then
      perform {{schema}}.hold_for(p_job, v_incident.id, v_paused);
      became := 'held';
    else
      became := case when p_answer = 'pause' then 'paused' else 'released' end;
    end if;
    incident := v_incident.id;
  end if;
  update {{schema}}.preparations p set answered_at = {{schema}}.now(), answer = v_told, became = end_preparation.became,
      details = case when p_answer = 'ready' then p_details else v_error end where p.job_id = p_job and p.claim_epoch = p_epoch;
  if became = 'ready' then
    facts := {{schema}}.facts_of(v_job)::text;
  end if;
  return next;
end $$;
comment on function {{schema}}.end_preparation(uuid, uuid, bigint, text, jsonb) is
  'What a preparation has answered, under its fence. ready sets the facts and resolves what held it up, and answers ready (the attempt may begin), or paused, cancelled or lease (it may not). Everything else gives the claim back, which uses no attempt: released (again later), held (by an incident, with its run paused), paused (the run alone) or ended (a cancel had been asked for). fenced: the claim is another''s, or over; busy: somebody is at its run, nothing was done, tell it again. Told again, it answers the same.';

-- Grants --------------------------------------------------------------------------------------------------------------

create function {{schema}}.grant_recovery(incident uuid, reason text default null, actor text default null, run_id uuid default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_variable
declare
  v_incident {{schema}}.incidents;
  v_current uuid;
  v_job {{schema}}.jobs;
  v_above boolean;
begin
  if reason is null or btrim(reason) = '' then
    raise exception using errcode = 'WF009', message = 'granting one more recovery needs a reason', hint = 'Say what was done about the fault; it goes on the record.';
  end if;
  select i.* into v_incident from {{schema}}.incidents i where i.id = incident;
  if not found or run_id is not null and v_incident.run_id is distinct from run_id then
    raise exception using errcode = 'WF043', message = format('there is no incident %s%s', incident, ' of run ' || run_id), detail = jsonb_build_object('incident_id', incident)::text, hint = 'See taskq incidents list; retention may have dropped it.';
  end if;
  if v_incident.run_id is not null then
    perform {{schema}}.lock_trees('{}', array[v_incident.run_id]);
  end if;
  select j.* into v_job from {{schema}}.jobs j where j.id = v_incident.job_id for update;
  select i.* into v_incident from {{schema}}.incidents i where i.id = incident;
  v_current := (select i.id from {{schema}}.incidents i where i.job_id = v_incident.job_id and i.is_current);
  if v_job.id is null or v_job.generation <> v_incident.generation or v_incident.status = 'resolved' or not v_incident.is_current then
    raise exception using errcode = 'WF044',
      message = format('incident %s is not current: %s', incident, case when v_job.id is null then format('job %s has ended', v_incident.job_id)
        when v_incident.status = 'resolved' then 'it is resolved' when v_job.generation <> v_incident.generation then format('job %s was reopened since', v_job.id)
        else format('what holds up job %s is incident %s', v_job.id, v_current) end),
      detail = jsonb_build_object('incident_id', incident, 'job_id', v_incident.job_id, 'current', v_current, 'status', v_incident.status)::text,
      hint = case when v_job.id is not null and v_current is not null then format('Nothing was granted. Look at that one: taskq incidents show %s.', v_current) when exists (select from {{schema}}.run_pauses p where p.incident = v_incident.id and p.run_id = v_incident.run_id)
          then format('Nothing was granted; its run is still paused for it: taskq runs resume %s.', v_incident.run_id) else 'Nothing was granted, and nothing needs to be.' end;
  elsif v_incident.status = 'granted' then
    return 'already';
  elsif v_incident.status = 'open' then
    raise exception using errcode = 'WF044', message = format('incident %s goes on by itself: %s', incident, case
        when v_incident.bound is null then 'it is tried again until it is met' when v_job.status = 'running' then 'a recovery is under way'
        else format('%s of %s recoveries are left', v_incident.bound + v_incident.grants - v_incident.launches, v_incident.bound + v_incident.grants) end),
      detail = jsonb_build_object('incident_id', incident, 'job_id', v_incident.job_id, 'current', v_current, 'status', 'open')::text,
      hint = 'Nothing was granted. Wait for it; one more is granted once none is left.';
  end if;
  perform {{schema}}.note_event(incident, 'granted', null, coalesce(actor, session_user), jsonb_build_object('reason', reason));
  update {{schema}}.incidents i set status = 'granted' where i.id = v_incident.id;
  perform {{schema}}.note('grant_recovery', v_incident.job_id::text, actor, reason, jsonb_build_object('incident', v_incident.id, 'code', v_incident.code, 'run_id', v_incident.run_id));
  if v_incident.run_id is not null then
    perform {{schema}}.receipt(v_incident.run_id, 'granted', (select n.ix from {{schema}}.nodes n where n.id = v_incident.job_id), v_job.claim_epoch);
    -- The pause that was for this is over with it; one that somebody else asked for is not, nor that of a run above.
    v_above := exists (select from {{schema}}.runs r where r.id = any({{schema}}.run_and_above(v_incident.run_id)) and r.id <> v_incident.run_id and r.status = 'paused');
    if not v_above and exists (select from {{schema}}.run_pauses p where p.run_id = v_incident.run_id and p.incident = v_incident.id) then
      perform {{schema}}.resume_run(v_incident.run_id, reason, actor);
    end if;
  end if;
  update {{schema}}.jobs j set status = 'pending', held_reason = null, run_at = {{schema}}.now() where j.id = v_incident.job_id and j.status = 'held' and j.held_reason = 'incident';
  if found then
    perform {{schema}}.wake(array[v_job.queue]);
  end if;
  return case when exists (select from {{schema}}.runs r where r.id = v_incident.run_id and r.status = 'paused') then 'paused' else 'granted' end;
end $$;
comment on function {{schema}}.grant_recovery(uuid, text, text, uuid) is
  'Grants the job of an incident exactly one more recovery; the pause that was for this incident is over. Answers granted; paused (granted, and its run is paused for another reason, so resume that), or already (one is granted and not used yet). Refused (WF044) for one that is not current, which the refusal tells from the one that is, or that goes on by itself; for one that is not there, or is of another run where one is named (WF043), and without a reason (WF009).';

create view {{schema}}.paused_runs as
  select r.id as run_id, r.workflow, r.run_key, p.code, p.reason, p.actor, p.since, r.parent_run, t.id as resume,
         n.running, n.held,
         (select i.id from {{schema}}.incidents i where i.id = p.incident and i.is_current and i.status = 'exhausted'
            and exists (select from {{schema}}.jobs j where j.id = i.job_id and j.generation = i.generation)) as incident
    from {{schema}}.runs r
    left join {{schema}}.run_pauses p on p.run_id = r.id
   cross join lateral (
     with recursive above as (
       select r.id, r.parent_run, r.depth, r.status
       union all
       select u.id, u.parent_run, u.depth, u.status from above a cross join lateral (select * from {{schema}}.runs o where o.id = a.parent_run limit 1) u)
     select a.id from above a where a.status = 'paused' order by a.depth limit 1) t
   cross join lateral (
     select count(*) filter (where j.status = 'running')::integer as running, count(*) filter (where j.held_reason = 'paused')::integer as held
       from {{schema}}.nodes o join {{schema}}.jobs j on j.id = o.id where o.run_id = r.id and o.status = 'ready') n
   where r.finished_at is null and r.status = 'paused';
comment on view {{schema}}.paused_runs is
  'Runs that are paused: why (code, reason), by whom and since when, how many of their bodies still run, how many jobs the pause holds, the run to resume (itself, or the highest paused one above it), and the incident that it was paused for, while that waits for a grant.';

create view {{schema}}.open_incidents as
  select i.id as incident_id, i.job_id, j.task, j.queue, i.run_id, r.workflow, r.status as run_status, i.phase, i.code, i.status, i.fingerprint, i.fault, i.failures, i.launches, i.grants, i.bound,
         i.opened_at, i.seen_at, i.is_current, j.status as job_status, j.held_reason, j.run_at,
         case when not i.is_current then null when i.status = 'exhausted' then format('taskq incidents grant %s --reason WHY', i.id)
              when i.status = 'granted' then (select format('taskq runs resume %s --reason WHY', p.resume) from {{schema}}.paused_runs p where p.run_id = r.id) end as command
    from {{schema}}.incidents i
    join {{schema}}.jobs j on j.id = i.job_id and j.generation = i.generation
    left join {{schema}}.runs r on r.id = i.run_id
   where i.status <> 'resolved';
comment on view {{schema}}.open_incidents is 'What holds up jobs: the fault, how often it was seen, what recoveries it has had, and the command that goes on where it waits for somebody.';

create function {{schema}}.prune_incidents(p_limit integer default 1000) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_ids uuid[];
  v_each uuid;
  v_n integer;
  v_total integer;
begin
  -- What was about a job that has ended, or was reopened, is about nothing any more.
  v_ids := array(select i.id from {{schema}}.incidents i where i.status <> 'resolved'
     and not exists (select from {{schema}}.jobs j where j.id = i.job_id and j.generation = i.generation) limit p_limit for update skip locked);
  foreach v_each in array v_ids loop
    perform {{schema}}.note_event(v_each, 'resolved', null, null, jsonb_build_object('because', 'its job has ended'));
    update {{schema}}.incidents i set status = 'resolved', resolved_at = {{schema}}.now(), is_current = false where i.id = v_each;
  end loop;
  v_total := cardinality(v_ids);
  with old as (
    delete from {{schema}}.incidents i where i.ctid = any(array(
      select o.ctid from {{schema}}.incidents o, {{schema}}.installation s where o.status = 'resolved' and o.seen_at < {{schema}}.now() - s.history_retention
         and not exists (select from {{schema}}.jobs j where j.id = o.job_id) and not exists (select from {{schema}}.history h where h.id = o.job_id)
         and not exists (select from {{schema}}.runs r where r.id = o.run_id)
       order by o.seen_at limit p_limit for update of o skip locked)) returning i.id)
  select array_agg(o.id) into v_ids from old o;
  delete from {{schema}}.incident_events e where e.incident_id = any(v_ids);
  v_total := v_total + coalesce(cardinality(v_ids), 0);
  delete from {{schema}}.preparations p where p.ctid = any(array(
    select o.ctid from {{schema}}.preparations o, {{schema}}.installation s where o.began_at < {{schema}}.now() - s.history_retention
       and not exists (select from {{schema}}.jobs j where j.id = o.job_id) and not exists (select from {{schema}}.history h where h.id = o.job_id)
     order by o.began_at limit p_limit for update of o skip locked));
  get diagnostics v_n = row_count;
  v_total := v_total + v_n;
  delete from {{schema}}.facts f where f.ctid = any(array(
    select o.ctid from {{schema}}.facts o, {{schema}}.installation s where o.set_at < {{schema}}.now() - s.history_retention
       and not exists (select from {{schema}}.jobs j where j.id = o.owner) and not exists (select from {{schema}}.history h where h.id = o.owner)
       and not exists (select from {{schema}}.runs r where r.id = o.owner)
     order by o.set_at limit p_limit for update of o skip locked));
  get diagnostics v_n = row_count;
  return v_total + v_n;
end $$;
comment on function {{schema}}.prune_incidents(integer) is 'Resolves incidents whose jobs have ended, and forgets those, with preparations and facts, whose jobs and runs are gone. Called by prune.';

create function {{schema}}.check_incidents() returns table (law integer, code text, job_id uuid, detail text)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  return query
    select 9, 'held_without_incident', j.id, 'it is held for an incident, and none of it is exhausted'
      from {{schema}}.jobs j where j.status = 'held' and j.held_reason = 'incident'
       and not exists (select from {{schema}}.incidents i where i.job_id = j.id and i.generation = j.generation and i.is_current and i.status = 'exhausted');
  return query
    select 9, 'incident_events_differ', i.job_id, format('incident %s counts %s events, %s failed, %s granted and %s launched, and has %s, %s, %s and %s', i.id, i.events, i.failures, i.grants, i.launches, e.n, e.failed, e.granted, e.launched)
      from {{schema}}.incidents i cross join lateral (
        select count(*)::int as n, count(*) filter (where v.kind = 'failed')::int as failed, count(*) filter (where v.kind = 'granted')::int as granted,
               count(*) filter (where v.kind = 'launched')::int as launched from {{schema}}.incident_events v where v.incident_id = i.id) e
     where (e.n, e.failed, e.granted, e.launched) is distinct from (i.events, i.failures, i.grants, i.launches);
  return query
    select 9, 'recovery_not_granted', i.job_id, format('incident %s has had %s recoveries, and %s were allowed', i.id, i.launches, i.bound + i.grants)
      from {{schema}}.incidents i where i.launches > i.bound + i.grants and i.code <> 'needs_approval';
  return query
    select 9, 'pause_for_no_incident', p.run_id, format('it is paused for incident %s, which is %s', p.incident, coalesce(i.status, 'not there'))
      from {{schema}}.run_pauses p left join {{schema}}.incidents i on i.id = p.incident
     where p.incident is not null and i.id is null;
  return query
    select 9, 'recovery_not_shown', r.id, 'it is recovering, and nothing of it is unknown'
      from {{schema}}.runs r where r.finished_at is null and r.status = 'recovering' and {{schema}}.live_status(r.id) <> 'recovering'
    union all
    select 9, 'recovery_not_shown', r.id, format('it is running, and the outcome of job %s is unknown', j.id)
      from {{schema}}.jobs j join {{schema}}.runs r on r.id = j.run_id where j.status = 'unknown' and r.finished_at is null and r.status = 'running';
  return query
    select 4, 'begun_unprepared', p.job_id, format('attempt %s has started its effect, and its preparation answered %s', p.claim_epoch, coalesce(p.answer, 'nothing'))
      from {{schema}}.preparations p join {{schema}}.jobs j on j.id = p.job_id and j.claim_epoch = p.claim_epoch
     where p.became is distinct from 'ready' and j.effect_started_at is not null;
end $$;
comment on function {{schema}}.check_incidents() is 'The part of check_invariants that is about preparations and incidents.';

-- The laws that the database itself refuses to break, whatever the client or its role: epochs advance by one with each
-- claim (WF002), only the listed transitions exist (WF003), the record is append-only (WF004), and a worker cannot
-- claim what it does not understand (WF001). Each trigger carries the violation as its WHEN predicate, so that an
-- ordinary row runs no code. docs/laws.md and taskq/transitions.py hold the same list; a test compares them.

create function {{schema}}.refuse() returns trigger
  language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_old jsonb := case when tg_op in ('UPDATE', 'DELETE') then to_jsonb(old) end;
  v_new jsonb := case when tg_op in ('UPDATE', 'INSERT') then to_jsonb(new) end;
  v_row jsonb := coalesce(v_new, v_old);
begin
  raise exception using
    errcode = tg_argv[0],
    message = format('%s: %s', tg_argv[1], coalesce(v_row->>'id', v_row->>'job_id', tg_table_name)),
    detail = jsonb_build_object('job_id', coalesce(v_row->>'id', v_row->>'job_id'),
      'from', v_old->>'status', 'to', v_new->>'status', 'old_epoch', v_old->'claim_epoch', 'new_epoch', v_new->'claim_epoch')::text,
    hint = tg_argv[2];
end $$;
comment on function {{schema}}.refuse() is 'Trigger: raises the SQLSTATE, message and hint given as arguments, with the row''s id in the detail.';

-- Law 2.
create trigger epoch_advances before update of claim_epoch, status on {{schema}}.jobs for each row
  when ((old.status = 'pending' and new.status = 'running' and new.claim_epoch <> old.claim_epoch + 1)
     or (not (old.status = 'pending' and new.status = 'running') and new.claim_epoch <> old.claim_epoch))
  execute function {{schema}}.refuse('WF002', 'the claim epoch must advance by exactly one with a claim and not otherwise',
    'Claim through taskq.exchange; never set claim_epoch by hand.');

-- Law 5: what an update may do to the status, and to the owner of a claim.
create trigger transition_listed before update of status, claimed_by on {{schema}}.jobs for each row
  when ((old.status <> new.status and not (
            (old.status = 'pending' and new.status in ('running', 'held'))
         or (old.status = 'held' and new.status = 'pending')
         or (old.status = 'running' and new.status in ('pending', 'unknown'))
         or (old.status = 'unknown' and new.status = 'pending')
         or (old.status = 'running' and new.status = 'held' and new.held_reason in ('signal', 'child'))
         -- Only back into its line.
         or (old.status in ('running', 'unknown') and new.status = 'held' and new.held_reason = 'ordering' and new.ordering_key is not null)
         or (old.status in ('running', 'unknown') and new.status = 'held' and new.held_reason = 'paused' and new.run_id is not null)))
     or (old.claimed_by is not null and new.claimed_by is not null and old.claimed_by <> new.claimed_by))
  execute function {{schema}}.refuse('WF003', 'this transition of a job does not exist',
    'Use the functions and commands of taskq (cancel, retry, resolve); docs/laws.md lists the transitions.');

-- While the effect of a step has started and nobody has told of it, its job runs or is unknown, whatever asks for more.
create trigger effect_of_step_told before update of status on {{schema}}.jobs for each row
  when (old.effect_started_at is not null and old.effect_class <> 'side_effecting' and new.status in ('pending', 'held'))
  execute function {{schema}}.refuse('WF003', 'a step of the job has started its effect, and nobody has told what became of it',
    'Decide that first: taskq jobs resolve.');
-- After, since a trigger before a delete has each row locked once more: 1 us and 54 bytes of WAL a job.
create trigger effect_of_step_told_by_end after delete on {{schema}}.jobs for each row
  when (old.effect_started_at is not null and old.effect_class <> 'side_effecting')
  execute function {{schema}}.refuse('WF003', 'a step of the job has started its effect, and nobody has told what became of it',
    'Decide that first: taskq jobs resolve.');

-- A job is born pending or held, without a claim; one that is reopened keeps its epoch and has a higher generation.
create trigger birth_listed before insert on {{schema}}.jobs for each row
  when (new.status not in ('pending', 'held') or new.claimed_by is not null
     or greatest(new.attempt, new.recoveries, new.retry_afters, new.snoozes, new.releases) <> 0
     or (new.generation = 0 and (new.claim_epoch <> 0 or new.pruned_attempts <> 0)))
  execute function {{schema}}.refuse('WF003', 'a job starts pending or held, unclaimed and with its counters at zero',
    'Enqueue through taskq.enqueue, reopen through taskq.retry.');

create function {{schema}}.check_birth() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from {{schema}}.history h where h.id = new.id) then
    raise exception using errcode = 'WF003', message = format('the job is in history already: %s', new.id),
      detail = jsonb_build_object('job_id', new.id)::text,
      hint = 'A job is in exactly one of jobs and history; reopen it through taskq.retry.';
  end if;
  if not exists (select from {{schema}}.ledger l where l.job_id = new.id) and new.claim_epoch > new.pruned_attempts then
    raise exception using errcode = 'WF003', message = format('a reopened job must bring its record with it: %s', new.id),
      detail = jsonb_build_object('job_id', new.id)::text, hint = 'Reopen it through taskq.retry.';
  end if;
  if exists (select from {{schema}}.ledger l where l.job_id = new.id and (l.outcome = 'succeeded' or l.outcome = 'resolved' and l.error is null)) then
    raise exception using errcode = 'WF003', message = format('a job that has succeeded is not reopened: %s', new.id),
      detail = jsonb_build_object('job_id', new.id)::text, hint = 'Enqueue a new job to do the work again.';
  end if;
  return new;
end $$;
comment on function {{schema}}.check_birth() is 'Trigger: refuses to reopen a job that still stands in history, that has succeeded, or whose attempts are not on record.';
create trigger reopening_moves before insert on {{schema}}.jobs for each row
  when (new.generation > 0) execute function {{schema}}.check_birth();

-- A finished job: its end is a listed one. Without an attempt it can only be cancelled or failed.
create trigger end_listed before insert on {{schema}}.history for each row
  when (new.outcome is null and new.status = 'succeeded')
  execute function {{schema}}.refuse('WF003', 'a job cannot succeed without an attempt', 'Let a worker run it.');

-- The record is append-only; retention may note pruned attempts.
create trigger history_append_only before update on {{schema}}.history for each row
  when ((to_jsonb(old) - 'pruned_attempts') is distinct from (to_jsonb(new) - 'pruned_attempts')
     or new.pruned_attempts < old.pruned_attempts)
  execute function {{schema}}.refuse('WF004', 'history is append-only', 'Reopen a finished job with taskq.retry.');
create trigger ledger_append_only before update or delete on {{schema}}.ledger for each row
  execute function {{schema}}.refuse('WF004', 'the ledger is append-only', 'An ended attempt stays as it was recorded.');
create trigger audit_append_only before update or delete on {{schema}}.audit for each row
  execute function {{schema}}.refuse('WF004', 'the audit is append-only', 'Write another row.');
create trigger history_not_emptied before truncate on {{schema}}.history for each statement
  execute function {{schema}}.refuse('WF004', 'history is append-only', 'Retention drops its oldest partitions.');
create trigger ledger_not_emptied before truncate on {{schema}}.ledger for each statement
  execute function {{schema}}.refuse('WF004', 'the ledger is append-only', 'Retention drops its oldest partitions.');
create trigger audit_not_emptied before truncate on {{schema}}.audit for each statement
  execute function {{schema}}.refuse('WF004', 'the audit is append-only', 'Write another row.');
create trigger policies_immutable before update on {{schema}}.policies for each row
  execute function {{schema}}.refuse('WF004', 'a policy is immutable', 'A changed policy gets an id of its own.');

-- The capability guard.
create function {{schema}}.guard_capability() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_level integer;
begin
  select w.capability_level into v_level from {{schema}}.workers w where w.id = new.claimed_by;
  if v_level is null or v_level < new.required_worker_schema then
    raise exception using errcode = 'WF001',
      message = format('worker %s has capability level %s, job %s requires %s', new.claimed_by, coalesce(v_level::text, 'none'), new.id, new.required_worker_schema),
      detail = jsonb_build_object('job_id', new.id, 'required', new.required_worker_schema, 'level', v_level)::text,
      hint = 'Leave the job to newer workers, or upgrade this one.';
  end if;
  return new;
end $$;
comment on function {{schema}}.guard_capability() is 'Trigger: refuses a claim by a worker whose capability level is below what the job requires.';
create trigger capable_worker before update of status on {{schema}}.jobs for each row
  when (new.required_worker_schema is not null and new.status = 'running' and old.status = 'pending')
  execute function {{schema}}.guard_capability();

-- A unique key is given back when its job leaves jobs, on whatever path.
create function {{schema}}.give_back_unique_key() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  update {{schema}}.unique_keys u set expires_at = {{schema}}.now() + u.hold_for
    where u.scope = old.unique_scope and u.key = old.unique_key and u.job_id = old.id and u.hold_for is not null;
  delete from {{schema}}.unique_keys u
    where u.scope = old.unique_scope and u.key = old.unique_key and u.job_id = old.id and u.hold_for is null;
  return null;
end $$;
comment on function {{schema}}.give_back_unique_key() is 'Trigger: frees the unique key of a job that leaves jobs, or starts its hold.';
create trigger unique_key_given_back after delete on {{schema}}.jobs for each row
  when (old.unique_key is not null) execute function {{schema}}.give_back_unique_key();

-- What a body gets for dangerous work: checkpoints that move by compare-and-swap, and the end of an attempt inside of the
-- body's own transaction. Called by workers only, for one attempt at a time; every write is fenced like any other end.

alter table {{schema}}.jobs add column checkpoint_epoch bigint;
comment on column {{schema}}.jobs.checkpoint_epoch is 'The attempt that moved the checkpoint last, by its epoch: only that one is answered a repetition as a replay.';

create function {{schema}}.checkpoint(p_worker uuid, p_job uuid, p_epoch bigint, p_version integer, p_value jsonb)
  returns table (answer text, version integer, value text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_job {{schema}}.jobs;
begin
  -- Lock, then decide on the locked row.
  select j.* into v_job from {{schema}}.jobs j
   where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch and j.status = 'running' for no key update;
  if not found then
    answer := 'fenced';
    return next;
    return;
  end if;
  version := coalesce(v_job.checkpoint_version, 0);
  if p_version = version then
    update {{schema}}.jobs j set checkpoint = p_value, checkpoint_version = coalesce(j.checkpoint_version, 0) + 1, checkpoint_epoch = p_epoch
     where j.id = p_job;
    answer := 'moved';
    version := version + 1;
  elsif p_version + 1 = version and v_job.checkpoint_epoch = p_epoch and v_job.checkpoint = p_value then
    answer := 'replay';
  else
    answer := 'conflict';
    value := v_job.checkpoint::text;
  end if;
  return next;
end $$;
comment on function {{schema}}.checkpoint(uuid, uuid, bigint, integer, jsonb) is
  'Moves the checkpoint of a running attempt from p_version (0: none yet) to the next, under its fence. Answers moved, replay (this attempt had done exactly that), conflict (with the version and value that stand) or fenced; only moved changes anything.';

-- The fenced end as the last statement of the body's own transaction, p_xid, which is READ COMMITTED like every end.
create function {{schema}}.end_inside(p_worker uuid, p_job uuid, p_epoch bigint, p_outcome_id bigint, p_result jsonb, p_xid text)
  returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_ended integer;
begin
  if pg_current_xact_id()::text <> p_xid then
    return 'another transaction';
  end if;
  -- Lock order: workers, runs, jobs. As with every end, the worker need not be live.
  perform from {{schema}}.workers w where w.id = p_worker for key share;
  perform {{schema}}.lock_run_of(p_job);
  v_ended := {{schema}}.end_attempts(p_worker, array[p_job], array[p_epoch], array['succeeded'], array[p_outcome_id], array[p_result],
    array[null::jsonb], array[0::double precision]);
  -- An effect of a step that is not told: nothing of this transaction may stay.
  if v_ended = 1 and exists (select from {{schema}}.jobs j where j.id = p_job) then
    return 'step';
  end if;
  return case v_ended when 1 then 'ended' else 'fenced' end;
end $$;
comment on function {{schema}}.end_inside(uuid, uuid, bigint, bigint, jsonb, text) is
  'Ends an attempt as succeeded inside of the transaction p_xid that its body has begun. Answers ended, fenced (the attempt is another''s or over) or another transaction (p_xid has ended); only ended changes anything.';

-- What became of a COMMIT whose answer was lost. That transaction holds the job's row until it is over, so this waits for
-- it, and what is read then is final.
create function {{schema}}.ended_inside(p_worker uuid, p_job uuid, p_epoch bigint, p_outcome_id bigint) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  perform from {{schema}}.jobs j where j.id = p_job for key share;
  return case
    when exists (select from {{schema}}.attempts a where a.job_id = p_job and a.claim_epoch = p_epoch and a.outcome_id = p_outcome_id) then 'committed'
    when exists (select from {{schema}}.jobs j where j.id = p_job and j.claimed_by = p_worker and j.claim_epoch = p_epoch
      and j.status in ('running', 'unknown')) then 'open'
    else 'taken' end;
end $$;
comment on function {{schema}}.ended_inside(uuid, uuid, bigint, bigint) is
  'Whether end_inside was committed, once its transaction is over: committed, open (it was not, and the attempt is still the worker''s) or taken (it was not, and the attempt is over or another''s).';

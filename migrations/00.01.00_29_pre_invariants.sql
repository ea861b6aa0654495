-- check_invariants: every law that can be seen from the rows, as violations. STABLE, so that one call sees one snapshot.
-- Called by taskq verify and at the end of every system test.

-- Of an attempt in the ledger: whether another one may follow although its effect had started. A retry by an error that the
-- policy names and a RetryAfter of the body are told, with a nonce; so are failures and cancellations that an operator
-- reopened. A resolved one has its row in unknowns, and in audit who said that it did not happen.
create function {{schema}}.may_follow(p_attempt {{schema}}.ledger) returns boolean
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select case
    when p_attempt.outcome in ('failed', 'cancelled', 'retry_after', 'snoozed', 'suspended') then p_attempt.outcome_id is not null
    when p_attempt.outcome = 'resolved' then
      exists (select from {{schema}}.unknowns u where u.job_id = p_attempt.job_id and u.claim_epoch = p_attempt.claim_epoch)
      and exists (select from {{schema}}.audit a where a.subject = p_attempt.job_id::text and a.action = 'resolve'
        and a.details -> 'happened' = 'false' and a.details -> 'claim_epoch' = to_jsonb(p_attempt.claim_epoch))
    else false end
$$;
comment on function {{schema}}.may_follow({{schema}}.ledger) is 'Whether another attempt may follow this one, whose effect had started: its body told how it ended, or it was decided that it did not happen.';

create function {{schema}}.check_invariants(scope text default 'live', since timestamptz default null)
  returns table (law integer, code text, job_id uuid, detail text)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
  v_from timestamptz;
  v_part record;
begin
  if scope not in ('live', 'since', 'all') or (scope = 'since') <> (since is not null) then
    raise exception using errcode = 'WF009', message = format('check_invariants: scope %L with since %L is not valid', scope, since),
      hint = 'Scopes are live (unfinished jobs), since (finished jobs from an instant on, which must be given) and all.';
  end if;

  -- Law 1: in exactly one of jobs and history.
  return query select 1, 'in_jobs_and_history', j.id, format('status %s in jobs, %s in history', j.status, h.status)
    from {{schema}}.jobs j join {{schema}}.history h on h.id = j.id;

  -- Law 3, unfinished jobs: attempts on record + pruned + (1 if running or unknown) = claim_epoch.
  return query
    select 3, 'attempts_do_not_add_up', j.id,
           format('epoch %s, on record %s, pruned %s, status %s', j.claim_epoch, coalesce(l.n, 0), j.pruned_attempts, j.status)
      from {{schema}}.jobs j
      left join (select l.job_id, count(*) as n from {{schema}}.ledger l where l.job_id in (select k.id from {{schema}}.jobs k where k.claim_epoch > 0) group by l.job_id) l on l.job_id = j.id
     where coalesce(l.n, 0) + j.pruned_attempts + (j.status in ('running', 'unknown'))::int <> j.claim_epoch;
  return query
    select 3, 'attempt_beyond_epoch', j.id, format('attempt %s is on record, the job''s epoch is %s (%s)', l.claim_epoch, j.claim_epoch, j.status)
      from {{schema}}.ledger l join {{schema}}.jobs j on j.id = l.job_id
     where l.claim_epoch > j.claim_epoch - (j.status in ('running', 'unknown'))::int;
  return query
    select 3, 'attempt_twice', l.job_id, format('attempt %s is on record %s times', l.claim_epoch, count(*))
      from {{schema}}.ledger l where l.job_id in (select k.id from {{schema}}.jobs k where k.claim_epoch > 0)
     group by l.job_id, l.claim_epoch having count(*) > 1;

  -- Law 6, unfinished jobs: counters equal the record of this generation, where nothing was pruned.
  return query
    select 6, 'counters_differ_from_record', j.id,
           format('attempt %s/%s, recoveries %s/%s, retry_afters %s/%s, snoozes %s/%s, releases %s/%s (row/record)', j.attempt, l.failed,
             j.recoveries, l.recovered, j.retry_afters, l.retry_after, j.snoozes, l.snoozed, j.releases, l.released)
      from {{schema}}.jobs j cross join lateral (
        select count(*) filter (where l.outcome = 'failed') as failed, count(*) filter (where l.outcome in ('lost', 'resolved')) as recovered,
               count(*) filter (where l.outcome = 'retry_after') as retry_after, count(*) filter (where l.outcome = 'snoozed') as snoozed,
               count(*) filter (where l.outcome = 'released') as released
          from {{schema}}.ledger l where l.job_id = j.id and l.generation = j.generation) l
     where j.claim_epoch > 0 and j.pruned_attempts = 0
       and (j.attempt, j.recoveries, j.retry_afters, j.snoozes, j.releases) is distinct from (l.failed::int, l.recovered::int, l.retry_after::int, l.snoozed::int, l.released::int);

  -- What rows point to must be there.
  return query select 5, 'policy_missing', j.id, format('policy %s', j.policy_id)
    from {{schema}}.jobs j where not exists (select from {{schema}}.policies p where p.id = j.policy_id);
  return query select 5, 'unique_key_not_held', j.id, format('scope %s, key %s', j.unique_scope, j.unique_key)
    from {{schema}}.jobs j where j.unique_key is not null
     and not exists (select from {{schema}}.unique_keys u where u.scope = j.unique_scope and u.key = j.unique_key and u.job_id = j.id);
  return query select 5, 'unique_key_of_no_job', u.job_id, format('scope %s, key %s', u.scope, u.key)
    from {{schema}}.unique_keys u where u.expires_at is null and not exists (select from {{schema}}.jobs j where j.id = u.job_id);

  -- Effects: a promise has its job, or says why not, and the job is the one that was promised.
  return query select 5, 'effect_without_job', i.owner_job_id, format('effect %s has neither a job nor a fault', i.effect_key)
    from {{schema}}.effect_intents i where i.job_id is null and i.fault is null and i.settled_at is null;
  return query select 5, 'effect_job_differs', j.id, format('effect %s promised task %s, with another payload or task than its job''s', i.effect_key, i.task)
    from {{schema}}.jobs j join {{schema}}.effect_intents i on i.job_id = j.id
   where j.task is distinct from i.task or {{schema}}.effect_fingerprint(j.task, j.payload) is distinct from i.fingerprint;
  -- Side effects: who may have started one, and who may be unknown.
  return query select 5, 'effect_started_of_other_class', j.id, format('effect class %s, effect started at %s', j.effect_class, j.effect_started_at)
    from {{schema}}.jobs j where j.effect_started_at is not null and j.effect_class <> 'side_effecting'
     and not exists (select from {{schema}}.steps s where s.job_id = j.id and s.generation = j.generation and s.kind = 'step' and not s.done);
  return query select 5, 'unknown_without_record', j.id, format('attempt %s is unknown, and nothing says since when or why', j.claim_epoch)
    from {{schema}}.jobs j where j.status = 'unknown'
     and not exists (select from {{schema}}.unknowns u where u.job_id = j.id and u.claim_epoch = j.claim_epoch);
  return query select 5, 'unknown_without_cause', j.id, format('effect class %s, no effect start, no cancel request, nobody told it', j.effect_class)
    from {{schema}}.jobs j join {{schema}}.unknowns u on u.job_id = j.id and u.claim_epoch = j.claim_epoch
   where j.status = 'unknown' and u.reason = 'worker_lost' and j.effect_started_at is null
     and not (j.effect_class = 'idempotent' and j.cancel_requested_at is not null);
  -- What runs again after an effect start had a word for it: its body's own (with the nonce of the worker that sent it), or a
  -- decision that it did not happen. Losing a worker and handing back are no words.
  return query select 5, 'side_effect_repeated', l.job_id, format('attempt %s had started its effect and ended as %s, untold, and another followed', l.claim_epoch, l.outcome)
    from {{schema}}.ledger l join {{schema}}.jobs j on j.id = l.job_id
   where j.effect_class = 'side_effecting' and l.effect_started_at is not null and not {{schema}}.may_follow(l);
  -- Law 8: of one ordering key one job at a time, in order, and none waits for nothing.
  return query select 8, 'ordering_two_at_once', j.id, format('key %s: %s, beside job %s, which is %s', left(j.ordering_key, 100), j.status, o.id, o.status)
    from {{schema}}.jobs j join {{schema}}.jobs o on o.ordering_key = j.ordering_key and o.id < j.id
   where j.ordering_key is not null
     and (j.status in ('pending', 'running') or j.status = 'unknown' and j.ordering_halt)
     and (o.status in ('pending', 'running') or o.status = 'unknown' and o.ordering_halt);
  -- A line in ordering_rechecks says that the sweep will look: that is no fault yet.
  return query select 8, 'ordering_waits_for_nothing', j.id, format('key %s', left(j.ordering_key, 100))
    from {{schema}}.jobs j
   where j.ordering_key is not null and j.status = 'held' and j.held_reason = 'ordering' and (j.ordering_later is null or j.run_at <= {{schema}}.now())
     and not exists (select from {{schema}}.ordering_rechecks r where r.key = j.ordering_key)
     and not exists (select from {{schema}}.ordering_halts h where h.key = j.ordering_key and h.job_id < j.id)
     and not exists (select from {{schema}}.jobs o where o.ordering_key = j.ordering_key
       and (o.status in ('pending', 'running') or o.status = 'unknown' and o.ordering_halt))
     and not exists (select from {{schema}}.jobs o where o.ordering_key = j.ordering_key and o.id < j.id
       and o.status = 'held' and (o.held_reason <> 'ordering' or o.ordering_later is null))
     and not exists (select from {{schema}}.jobs o where o.ordering_key = j.ordering_key and o.id < j.id
       and o.status = 'held' and o.ordering_later and o.run_at <= {{schema}}.now());
  -- One that never had its turn, and never was to wait for its time, is not overtaken.
  return query select 8, 'ordering_out_of_turn', j.id, format('key %s: %s, before job %s', left(j.ordering_key, 100), j.status, o.id)
    from {{schema}}.jobs j cross join lateral (
      select w.id from {{schema}}.jobs w
       where w.ordering_key = j.ordering_key and w.id < j.id and w.status = 'held' and w.held_reason = 'ordering'
         and w.generation = 0 and w.claim_epoch = 0 and (w.ordering_halt or w.run_at <= w.created_at)
       order by w.id limit 1) o
   where j.ordering_key is not null and j.status in ('pending', 'running');
  return query select 8, 'ordering_past_halt', j.id, format('key %s: %s, behind job %s, which halts it', left(j.ordering_key, 100), j.status, h.job_id)
    from {{schema}}.jobs j join {{schema}}.ordering_halts h on h.key = j.ordering_key and h.job_id < j.id
   where j.ordering_key is not null and j.status in ('pending', 'running');
  return query select 8, 'ordering_halted_by_unfinished', h.job_id, format('key %s', left(h.key, 100))
    from {{schema}}.ordering_halts h join {{schema}}.jobs j on j.id = h.job_id;

  return query select c.law, c.code, c.run_id, c.detail from {{schema}}.check_runs(scope, since) c;
  return query select c.law, c.code, c.run_id, c.detail from {{schema}}.check_pauses() c;
  return query select c.law, c.code, c.run_id, c.detail from {{schema}}.check_work_budgets() c;
  return query select c.law, c.code, c.job_id, c.detail from {{schema}}.check_incidents() c;
  return query select c.law, c.code, c.job_id, c.detail from {{schema}}.check_steps(scope) c;
  return query select c.law, c.code, c.job_id, c.detail from {{schema}}.check_children() c;

  if scope = 'live' then
    return;
  end if;

  -- Finished jobs, partition by partition, so that the memory this takes does not grow with the whole history.
  for v_part in select p.day from {{schema}}.partitions p where p.parent = 'history' and (since is null or p.day >= (since at time zone 'UTC')::date) order by p.day loop
    v_from := v_part.day::timestamp at time zone 'UTC';
    return query
      select 1, 'twice_in_history', h.id, 'finished twice'::text from {{schema}}.history h
       where h.finished_at >= v_from and h.finished_at < v_from + interval '1 day' and (since is null or h.finished_at >= since)
         and exists (select from {{schema}}.history o where o.id = h.id and o.finished_at <> h.finished_at);
    return query select 5, 'effect_started_of_other_class', h.id, format('effect class %s, effect started at %s', h.effect_class, h.effect_started_at)
      from {{schema}}.history h where h.finished_at >= v_from and h.finished_at < v_from + interval '1 day' and (since is null or h.finished_at >= since)
       and h.effect_started_at is not null and h.effect_class <> 'side_effecting' and h.outcome is distinct from 'resolved';
    return query select 5, 'side_effect_untold', h.id, format('attempt %s had started its effect; it is %s by outcome %s, which nobody told', h.claim_epoch, h.status, h.outcome)
      from {{schema}}.history h where h.finished_at >= v_from and h.finished_at < v_from + interval '1 day' and (since is null or h.finished_at >= since)
       and h.effect_class = 'side_effecting' and h.effect_started_at is not null
       and case when h.outcome = 'resolved' then not exists (
             select from {{schema}}.audit a where a.subject = h.id::text and a.action = 'resolve' and a.details -> 'claim_epoch' = to_jsonb(h.claim_epoch))
           else h.outcome_id is null or h.outcome in ('lost', 'released') end;
    return query select 5, 'succeeded_without_effect_start', h.id, format('attempt %s of a side-effecting job was told as a success by a worker, and was never allowed to start', h.claim_epoch)
      from {{schema}}.history h where h.finished_at >= v_from and h.finished_at < v_from + interval '1 day' and (since is null or h.finished_at >= since)
       and h.effect_class = 'side_effecting' and h.outcome = 'succeeded' and h.effect_started_at is null;
    return query select 5, 'side_effect_repeated', l.job_id, format('attempt %s had started its effect and ended as %s, untold, and another followed', l.claim_epoch, l.outcome)
      from {{schema}}.history h join {{schema}}.ledger l on l.job_id = h.id
     where h.finished_at >= v_from and h.finished_at < v_from + interval '1 day' and (since is null or h.finished_at >= since)
       and h.effect_class = 'side_effecting' and h.claim_epoch > 0 and l.effect_started_at is not null and not {{schema}}.may_follow(l);
    return query
      with h as materialized (
        select h.id, h.claim_epoch, h.pruned_attempts, h.worker_id, h.status, h.outcome, h.attempt, h.recoveries, h.retry_afters, h.snoozes, h.releases, h.generation
          from {{schema}}.history h where h.finished_at >= v_from and h.finished_at < v_from + interval '1 day' and (since is null or h.finished_at >= since)),
      r as materialized (
        select l.job_id, count(*) as n, count(distinct l.claim_epoch) as epochs, max(l.claim_epoch) as top,
               count(*) filter (where l.generation = h.generation and l.outcome = 'failed') as failed,
               count(*) filter (where l.generation = h.generation and l.outcome in ('lost', 'resolved')) as recovered,
               count(*) filter (where l.generation = h.generation and l.outcome = 'retry_after') as retry_after,
               count(*) filter (where l.generation = h.generation and l.outcome = 'snoozed') as snoozed,
               count(*) filter (where l.generation = h.generation and l.outcome = 'released') as released
          from h join {{schema}}.ledger l on l.job_id = h.id where h.claim_epoch > 1 or (h.claim_epoch = 1 and h.worker_id is null) group by l.job_id)
      select v.law, v.code, h.id, v.detail
        from h left join r on r.job_id = h.id cross join lateral (values
          (3, 'attempts_do_not_add_up', coalesce(r.n, 0) + h.pruned_attempts + (h.worker_id is not null)::int <> h.claim_epoch,
             format('epoch %s, on record %s, pruned %s', h.claim_epoch, coalesce(r.n, 0) + (h.worker_id is not null)::int, h.pruned_attempts)),
          (3, 'attempt_twice', coalesce(r.n <> r.epochs, false), 'an attempt is on record more than once'),
          (3, 'attempt_beyond_epoch', coalesce(r.top > h.claim_epoch - (h.worker_id is not null)::int, false),
             format('attempt %s is on record, the job''s epoch is %s', r.top, h.claim_epoch)),
          (6, 'counters_differ_from_record', h.pruned_attempts = 0 and h.claim_epoch > 0 and
             (h.attempt, h.recoveries, h.retry_afters, h.snoozes, h.releases) is distinct from
             ((coalesce(r.failed, 0) + (h.outcome is not distinct from 'failed')::int)::int, (coalesce(r.recovered, 0) + (coalesce(h.outcome in ('lost', 'resolved'), false) and h.status = 'failed')::int)::int,
              (coalesce(r.retry_after, 0) + (h.outcome is not distinct from 'retry_after')::int)::int, (coalesce(r.snoozed, 0) + (h.outcome is not distinct from 'snoozed')::int)::int,
              (coalesce(r.released, 0) + (h.outcome is not distinct from 'released')::int)::int),
             format('attempt %s, recoveries %s, retry_afters %s, snoozes %s, releases %s; final outcome %s', h.attempt, h.recoveries, h.retry_afters, h.snoozes, h.releases, h.outcome))
        ) as v(law, code, violated, detail)
       where v.violated;
    return query
      select 5, 'effect_job_differs', h.id, format('effect %s promised task %s, with another payload or task than its job''s', i.effect_key, i.task)
        from {{schema}}.history h join {{schema}}.effect_intents i on i.job_id = h.id
       where h.finished_at >= v_from and h.finished_at < v_from + interval '1 day' and (since is null or h.finished_at >= since)
         and (h.task is distinct from i.task or {{schema}}.effect_fingerprint(h.task, h.payload) is distinct from i.fingerprint);
    return query
      select 5, 'effect_not_promised', h.id, format('it is %s, and there is no intent for %s', h.status, coalesce(p.name, 'what its missing policy promised'))
        from {{schema}}.history h
        left join lateral (
          select q.id, e.name from {{schema}}.policies q
            left join lateral {{schema}}.effect_specs(q.spec -> 'effects') e on e.spec -> 'on' ? h.status
           where q.id = h.policy_id) p on true
       where h.has_effects and h.finished_at >= v_from and h.finished_at < v_from + interval '1 day' and (since is null or h.finished_at >= since)
         and (p.name is not null or p.id is null)
         and not exists (select from {{schema}}.effect_intents i where i.owner_job_id = h.id and i.generation = h.generation and i.name in (coalesce(p.name, '*'), '*'));
  end loop;

  if scope = 'all' then
    return query
      select 3, 'attempt_of_no_job', l.job_id, format('attempt %s', l.claim_epoch) from {{schema}}.ledger l
       where not exists (select from {{schema}}.jobs j where j.id = l.job_id) and not exists (select from {{schema}}.history h where h.id = l.job_id)
         and l.ended_at > (select min(p.day) from {{schema}}.partitions p where p.parent = 'history') + interval '1 day';
    return query
      select 5, 'effect_job_missing', i.owner_job_id, format('the job %s of effect %s is nowhere', i.job_id, i.effect_key) from {{schema}}.effect_intents i
       where i.job_id is not null and not exists (select from {{schema}}.jobs j where j.id = i.job_id) and not exists (select from {{schema}}.history h where h.id = i.job_id)
         and i.created_at > (select min(p.day) from {{schema}}.partitions p where p.parent = 'history') + interval '1 day';
  end if;
end $$;
comment on function {{schema}}.check_invariants(text, timestamptz) is
  'Reports every violation of the laws in docs/laws.md that rows can show; no rows means none. Scope live looks at unfinished jobs, since also at what finished from an instant on, all at everything.';

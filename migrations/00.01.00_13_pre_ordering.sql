-- Ordering keys: jobs with one key run one at a time, in the order in which their enqueueing transactions took the key. The
-- unfinished jobs of a key are its line. At most one of them has the turn: it is pending, running, or unknown where its
-- policy says halt; the unique index jobs_ordering_turn is the arbiter, whatever a client does. The others are held
-- ('ordering'). Nothing is counted: whose turn it is follows from the rows of jobs and ordering_halts.
--
-- A keyed job enters jobs as held, on every way in, and only give_turn and the sweep make it pending. Triggers call give_turn
-- wherever a turn may be free; their WHEN has the key, so that jobs without one run no code.
--
-- Lock order: workers, jobs by id, ordering keys. Enqueue waits for the rows of its keys, in the order of the keys, before
-- it writes anything, and holds them to the end of the caller's transaction, however long that is. So nobody else ever
-- waits for one: give_turn tries the row, and where it is taken leaves a line in ordering_rechecks, which commits with what
-- freed the turn. The leader's sweep takes it up, about once a second. An end waits for no enqueue. What an end must
-- remember goes to tables that enqueue does not lock: ordering_halts and ordering_rechecks.

create table {{schema}}.ordering_keys (
  key text primary key,
  taken_at timestamptz not null
);
create index ordering_keys_taken_at on {{schema}}.ordering_keys (taken_at);
comment on table {{schema}}.ordering_keys is 'Ordering keys in use: the row that enqueue locks. Pruned some minutes after the last job of the key has ended.';
comment on column {{schema}}.ordering_keys.key is 'The ordering key.';
comment on column {{schema}}.ordering_keys.taken_at is 'When a job was last enqueued with it.';

create table {{schema}}.ordering_halts (
  key text not null,
  job_id uuid not null,
  halted_at timestamptz not null,
  primary key (key, job_id)
);
comment on table {{schema}}.ordering_halts is 'Failed jobs that halt their ordering key: what stands behind them in line is held until the job is reopened or the key resumed.';
comment on column {{schema}}.ordering_halts.key is 'The ordering key.';
comment on column {{schema}}.ordering_halts.job_id is 'The failed job, in history.';
comment on column {{schema}}.ordering_halts.halted_at is 'When it failed.';

-- No unique index: an insert must wait for nobody.
create table {{schema}}.ordering_rechecks (
  key text not null,
  due_at timestamptz not null
);
create index ordering_rechecks_due on {{schema}}.ordering_rechecks (due_at);
create index ordering_rechecks_key on {{schema}}.ordering_rechecks (key, due_at);
comment on table {{schema}}.ordering_rechecks is 'Ordering keys at which the sweep must look: the key was taken when a turn came free, or a job in line becomes due.';
comment on column {{schema}}.ordering_rechecks.key is 'The ordering key.';
comment on column {{schema}}.ordering_rechecks.due_at is 'When to look.';

create unique index jobs_ordering_turn on {{schema}}.jobs (ordering_key)
  where ordering_key is not null and (status in ('pending', 'running') or status = 'unknown' and ordering_halt);
-- The first and the last of a line are looked up in the order of the key and the id, the key written as a range: where it is
-- compared with =, the order of the id is enough, and statistics of few keys have all jobs walked over by their primary key.
-- The one is descending, so that neither serves in place of the other.
create index jobs_ordering_line on {{schema}}.jobs (ordering_key, id desc) where ordering_key is not null;
-- Who is next, and whose time has come, are look-ups however long a line is: those that hold up nobody until they are due
-- (ordering_later) stand in an index of their own.
create index jobs_ordering_next on {{schema}}.jobs (ordering_key, id)
  where ordering_key is not null and status = 'held' and (held_reason <> 'ordering' or ordering_later is null);
create index jobs_ordering_later on {{schema}}.jobs (ordering_key, run_at) where ordering_later and status = 'held';

create function {{schema}}.halts_ordering(p_policy_id text, p_effect_class text) returns boolean
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select coalesce((select p.spec->>'ordering' from {{schema}}.policies p where p.id = p_policy_id),
                  case p_effect_class when 'side_effecting' then 'halt' else 'continue' end) = 'halt'
$$;
comment on function {{schema}}.halts_ordering(text, text) is
  'Whether a failure or an unknown outcome of a job with this policy halts its ordering key: as the policy says, else for side-effecting tasks.';

-- The id is the place in line: made after the key is locked, and above those of the line even where the clock steps back.
create function {{schema}}.id_after(p_id uuid) returns uuid
  language sql immutable strict parallel safe set search_path = pg_catalog, pg_temp as $$
  select (left(p_id::text, 19) || lpad(to_hex(('x' || right(replace(p_id::text, '-', ''), 16))::bit(64)::bigint + 1), 16, '0'))::uuid
$$;
comment on function {{schema}}.id_after(uuid) is 'The id that follows directly; used where a new one would not sort behind the others of its line.';

create function {{schema}}.take_ordering_keys(p_keys text[]) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  insert into {{schema}}.ordering_keys as k (key, taken_at)
    select u.key, {{schema}}.now() from (select distinct o.key from unnest(p_keys) as o(key) where o.key is not null) u order by u.key
    on conflict (key) do update set taken_at = excluded.taken_at
$$;
comment on function {{schema}}.take_ordering_keys(text[]) is
  'Locks ordering keys until the end of the transaction, in their order, so that two batches with the same keys cannot deadlock; waits for other enqueues under them.';

-- A failed job that halts the key is still in front of what comes, also where the clock has stepped back since.
create function {{schema}}.last_in_line(p_key text) returns uuid
  language sql stable security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
  select greatest((select j.id from {{schema}}.jobs j where j.ordering_key between p_key and p_key order by j.ordering_key, j.id desc limit 1),
                  (select h.job_id from {{schema}}.ordering_halts h where h.key = p_key order by h.job_id desc limit 1))
$$;
comment on function {{schema}}.last_in_line(text) is 'The last job of a line, with those that halt it; null where there is none.';

create function {{schema}}.next_in_line(p_key text) returns uuid
  language plpgsql stable security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_next record;
begin
  if exists (select from {{schema}}.jobs a
       where a.ordering_key = p_key and (a.status in ('pending', 'running') or a.status = 'unknown' and a.ordering_halt)) then
    return null;
  end if;
  -- One that waits for something else keeps its place.
  select j.id, j.held_reason into v_next from {{schema}}.jobs j
    where j.ordering_key between p_key and p_key and j.status = 'held' and (j.held_reason <> 'ordering' or j.ordering_later is null)
    order by j.ordering_key, j.id limit 1;
  if v_next.held_reason is distinct from 'ordering'
     or exists (select from {{schema}}.ordering_halts h where h.key = p_key and h.job_id < v_next.id) then
    return null;
  end if;
  return v_next.id;
end $$;
comment on function {{schema}}.next_in_line(text) is
  'The job of a line that is to have the turn; null where somebody has it, the key is halted or nobody waits. Asked by those that have locked the key, after come_due.';

create function {{schema}}.come_due(p_keys text[], p_limit integer) returns text[]
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_mergejoin = off set enable_hashjoin = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz := {{schema}}.now();
begin
  update {{schema}}.jobs j set ordering_later = null where j.id = any(array(
    select l.id from unnest(p_keys) as k(key) join {{schema}}.jobs l on l.ordering_key = k.key
     where l.ordering_later and l.status = 'held' and l.run_at <= v_now limit p_limit for update of l skip locked));
  return array(select k.key from unnest(p_keys) as k(key) where exists (
    select from {{schema}}.jobs l where l.ordering_key = k.key and l.ordering_later and l.status = 'held' and l.run_at <= v_now));
end $$;
comment on function {{schema}}.come_due(text[], integer) is
  'Puts up to p_limit jobs of these locked keys whose time has come into their lines, at their places. Returns the keys of which some are left, over the limit or locked by somebody: their turns must wait, lest one be passed.';

create function {{schema}}.give_turn(p_key text) returns text
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz;
  v_next uuid;
  v_queue text;
begin
  -- Above READ COMMITTED a look would be older than the lock: the sweep looks instead.
  if current_setting('transaction_isolation') = 'read committed' then
    perform from {{schema}}.ordering_keys k where k.key = p_key for update skip locked;
    if found then
      v_now := {{schema}}.now();
      -- Where many have come due at once, the sweep puts them into line: an end must not take long.
      if not exists (select from {{schema}}.jobs l where l.ordering_key = p_key and l.ordering_later and l.status = 'held' and l.run_at <= v_now)
         or {{schema}}.come_due(array[p_key], 100) = '{}' then
        v_next := {{schema}}.next_in_line(p_key);
        if v_next is null then
          return 'none';
        end if;
        perform from {{schema}}.jobs j where j.id = v_next and j.status = 'held' and j.held_reason = 'ordering' for update skip locked;
        if found then
          -- From now on it waits in its queue: with its old instant only a rescan would find it.
          update {{schema}}.jobs j set status = 'pending', held_reason = null, run_at = greatest(j.run_at, v_now) where j.id = v_next returning j.queue into v_queue;
          perform {{schema}}.wake(array[v_queue]);
          return 'given';
        end if;
      end if;
    end if;
  end if;
  insert into {{schema}}.ordering_rechecks (key, due_at) values (p_key, {{schema}}.now());
  return 'busy';
end $$;
comment on function {{schema}}.give_turn(text) is
  'Makes the next job of a line pending, if nobody has the turn and nothing halts the key. Waits for nothing: where the key or the job is locked it answers busy, and the sweep looks again; else given or none.';

create function {{schema}}.join_line() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if length(new.ordering_key) not between 1 and 512 then
    raise exception using errcode = 'WF009', message = format('an ordering key has %s characters', length(new.ordering_key)), hint = 'Give 1 to 512 characters.';
  end if;
  new.ordering_halt := coalesce(new.ordering_halt, {{schema}}.halts_ordering(new.policy_id, new.effect_class));
  if new.status = 'pending' then
    new.status := 'held';
    new.held_reason := 'ordering';
  end if;
  -- Under continue one that is not due yet holds up nobody. One that was due when it was enqueued is, wherever the clock has gone.
  new.ordering_later := case when new.held_reason = 'ordering' and not new.ordering_halt and new.run_at > greatest({{schema}}.now(), new.created_at) then true end;
  -- Reopened, it stands in line again and holds up the others by that.
  if new.generation > 0 then
    delete from {{schema}}.ordering_halts h where h.key = new.ordering_key and h.job_id = new.id;
  end if;
  return new;
end $$;
comment on function {{schema}}.join_line() is 'Trigger: a job with an ordering key enters jobs as held.';
create trigger ordering_joined before insert on {{schema}}.jobs for each row
  when (new.ordering_key is not null) execute function {{schema}}.join_line();

create function {{schema}}.come_back_in_line() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if old.status = 'held' or not new.ordering_halt and (old.status = 'unknown' or new.run_at > {{schema}}.now()) then
    new.status := 'held';
    new.held_reason := 'ordering';
    new.ordering_later := case when not new.ordering_halt and new.run_at > {{schema}}.now() then true end;
  end if;
  return new;
end $$;
comment on function {{schema}}.come_back_in_line() is
  'Trigger: an attempt that ends and is to be repeated keeps the turn, but under continue not while it waits for its time, nor after it was unknown.';
create trigger ordering_came_back before update of status on {{schema}}.jobs for each row
  when (new.ordering_key is not null and new.status = 'pending'
    and (old.status in ('running', 'unknown') or old.status = 'held' and old.held_reason <> 'ordering'))
  execute function {{schema}}.come_back_in_line();

create function {{schema}}.look_at_line() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if new.status = 'held' and new.ordering_later then
    insert into {{schema}}.ordering_rechecks (key, due_at) values (new.ordering_key, new.run_at);
  end if;
  perform {{schema}}.give_turn(new.ordering_key);
  return null;
end $$;
comment on function {{schema}}.look_at_line() is 'Trigger: a job has joined its line, or has given up the turn.';
create trigger ordering_looked_at_joining after insert on {{schema}}.jobs for each row
  when (new.ordering_key is not null) execute function {{schema}}.look_at_line();
create trigger ordering_looked_at_leaving after update of status on {{schema}}.jobs for each row
  when (new.ordering_key is not null
    and (new.status = 'held' and (old.status <> 'held' or old.held_reason <> new.held_reason)
      or new.status = 'unknown' and old.status = 'running' and not new.ordering_halt))
  execute function {{schema}}.look_at_line();

-- On history and not on jobs: only here is it known how the job has ended.
create function {{schema}}.leave_line() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  -- One that never started, because its deadline passed in line, has left nothing half done.
  if new.status = 'failed' and new.claim_epoch > 0
     and {{schema}}.halts_ordering(new.policy_id, new.effect_class) then
    insert into {{schema}}.ordering_halts (key, job_id, halted_at) values (new.ordering_key, new.id, new.finished_at) on conflict do nothing;
  end if;
  perform {{schema}}.give_turn(new.ordering_key);
  return null;
end $$;
comment on function {{schema}}.leave_line() is 'Trigger: a job with an ordering key has finished; it halts the key, or the next has its turn.';
create trigger ordering_left after insert on {{schema}}.history for each row
  when (new.ordering_key is not null) execute function {{schema}}.leave_line();

create function {{schema}}.sweep_orderings(p_limit integer default 500) returns integer
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set lock_timeout = '100ms' set enable_seqscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz := {{schema}}.now();
  v_keys text[];
  v_key text;
  v_free text[];
  v_left text[];
  v_next uuid[];
  v_given uuid[];
  v_waits integer := 0;
begin
  -- Above READ COMMITTED a look would be older than the locks.
  if current_setting('transaction_isolation') <> 'read committed' then
    return 0;
  end if;
  v_keys := array(select distinct r.key from (
    select d.key from {{schema}}.ordering_rechecks d where d.due_at <= v_now order by d.due_at limit p_limit) r);
  if v_keys = '{}' then
    return 0;
  end if;
  -- The row of a key was pruned before a job of it was reopened. An enqueue that makes it just now does the rest. In no order:
  -- the first ones may be just those for which it waits in vain.
  for v_key in select k.key from unnest(v_keys) as k(key)
      where not exists (select from {{schema}}.ordering_keys o where o.key = k.key) order by random()
  loop
    begin
      insert into {{schema}}.ordering_keys (key, taken_at) values (v_key, v_now) on conflict do nothing;
    exception when lock_not_available then
      v_waits := v_waits + 1;
      exit when v_waits = 5;
    end;
  end loop;
  -- A caller's transaction may have the others, for long perhaps.
  v_free := array(select o.key from {{schema}}.ordering_keys o where o.key = any(v_keys) order by o.key for update skip locked);
  update {{schema}}.ordering_rechecks r set due_at = v_now + interval '500 ms' where r.ctid = any(array(
    select d.ctid from {{schema}}.ordering_rechecks d
     where d.key = any(array(select k.key from unnest(v_keys) as k(key) except select f.key from unnest(v_free) as f(key))) and d.due_at <= v_now
     limit 10000 for update skip locked));
  delete from {{schema}}.ordering_rechecks r where r.ctid = any(array(
    select d.ctid from {{schema}}.ordering_rechecks d where d.key = any(v_free) and d.due_at <= v_now limit 10000));
  v_left := {{schema}}.come_due(v_free, 5000);
  -- Each statement looks again: what was done before the keys were locked is seen.
  v_next := array(select {{schema}}.next_in_line(f.key) from unnest(v_free) as f(key) where f.key <> all(v_left));
  v_given := array(select j.id from {{schema}}.jobs j where j.id = any(v_next) and j.status = 'held' and j.held_reason = 'ordering' order by j.id for update skip locked);
  v_now := {{schema}}.now();
  insert into {{schema}}.ordering_rechecks (key, due_at)
    select l.key, v_now from unnest(v_left) as l(key)
    union all
    select j.ordering_key, v_now from {{schema}}.jobs j where j.id = any(v_next) and j.id <> all(v_given);
  update {{schema}}.jobs j set status = 'pending', held_reason = null, run_at = greatest(j.run_at, v_now) where j.id = any(v_given);
  perform {{schema}}.wake(array[q.queue], q.n) from (
    select j.queue, count(*)::int as n from {{schema}}.jobs j where j.id = any(v_given) group by j.queue) q;
  return cardinality(v_given);
end $$;
comment on function {{schema}}.sweep_orderings(integer) is
  'Looks at up to p_limit ordering keys whose turn could not be given at once or whose next job has become due, all in one batch. Returns how many turns it gave; repeat until 0. The leader calls it about once a second while ordering keys are in use.';

create function {{schema}}.prune_orderings(p_limit integer default 1000) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_keys text[];
  v_n integer;
begin
  v_keys := array(
    select k.key from {{schema}}.ordering_keys k
     where k.taken_at < {{schema}}.now() - interval '10 minutes' and not exists (select from {{schema}}.jobs j where j.ordering_key = k.key)
     order by k.taken_at limit p_limit for update skip locked);
  -- Locked, and looked at once more: an enqueue may have come in between.
  delete from {{schema}}.ordering_keys k where k.key = any(v_keys) and not exists (select from {{schema}}.jobs j where j.ordering_key = k.key);
  get diagnostics v_n = row_count;
  return v_n;
end $$;
comment on function {{schema}}.prune_orderings(integer) is 'Forgets ordering keys that no unfinished job has had for some minutes, at most p_limit. Returns how many; repeat until 0.';

create function {{schema}}.resume_ordering(ordering_key text, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_unknown uuid;
  v_halts jsonb;
begin
  if reason is null or btrim(reason) = '' then
    raise exception using errcode = 'WF009', message = 'resuming an ordering key needs a reason', hint = 'Say why the rest may go on without what failed; it goes on the record.';
  end if;
  select j.id into v_unknown from {{schema}}.jobs j where j.ordering_key = ordering_key and j.status = 'unknown' and j.ordering_halt;
  if found then
    raise exception using errcode = 'WF012', message = format('ordering key %L is held up by job %s, whose outcome is unknown', ordering_key, v_unknown),
      detail = jsonb_build_object('job_id', v_unknown, 'status', 'unknown')::text, hint = 'Decide its outcome: taskq jobs resolve. Then the key goes on by itself.';
  end if;
  with gone as (
    delete from {{schema}}.ordering_halts h where h.ctid = any(array(select o.ctid from {{schema}}.ordering_halts o where o.key = ordering_key limit 10000))
    returning h.job_id, h.halted_at)
    select jsonb_agg(jsonb_build_object('job_id', g.job_id, 'halted_at', g.halted_at) order by g.job_id) into v_halts from gone g;
  -- Also where nothing halts it: a look does no harm.
  perform {{schema}}.give_turn(ordering_key);
  if v_halts is null then
    return 'not_halted';
  end if;
  perform {{schema}}.note('resume_ordering', ordering_key, actor, reason, jsonb_build_object('halted_by', v_halts));
  return 'resumed';
end $$;
comment on function {{schema}}.resume_ordering(text, text, text) is
  'Lets an ordering key go on that failed jobs have halted; they stay failed. Answers resumed or not_halted. Refused while a job of the key is unknown: its outcome is to be decided first.';

create view {{schema}}.ordering_lines as
  select coalesce(l.ordering_key, h.key) as ordering_key, l.turn as job_id, l.turn_status as status, l.turn_task as task, l.turn_queue as queue,
         coalesce(l.waiting, 0) as waiting, l.first_waiting, l.waiting_since, h.halted_by, h.halted_at
    from (
      select j.ordering_key,
             (array_agg(j.id) filter (where j.status in ('pending', 'running') or j.status = 'unknown' and j.ordering_halt))[1] as turn,
             (array_agg(j.status) filter (where j.status in ('pending', 'running') or j.status = 'unknown' and j.ordering_halt))[1] as turn_status,
             (array_agg(j.task) filter (where j.status in ('pending', 'running') or j.status = 'unknown' and j.ordering_halt))[1] as turn_task,
             (array_agg(j.queue) filter (where j.status in ('pending', 'running') or j.status = 'unknown' and j.ordering_halt))[1] as turn_queue,
             count(*) filter (where j.status = 'held') as waiting,
             (array_agg(j.id order by j.id) filter (where j.status = 'held'))[1] as first_waiting,
             min(j.created_at) filter (where j.status = 'held') as waiting_since
        from {{schema}}.jobs j where j.ordering_key is not null group by j.ordering_key) l
    full join (
      select o.key, (array_agg(o.job_id order by o.job_id))[1] as halted_by, min(o.halted_at) as halted_at
        from {{schema}}.ordering_halts o group by o.key) h on h.key = l.ordering_key;
comment on view {{schema}}.ordering_lines is
  'Each ordering key with unfinished jobs or halted: the job that has the turn, how many wait behind it, and the failed job that halts it.';

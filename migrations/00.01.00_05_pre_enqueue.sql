-- Enqueue: the only way in. Runs in the caller's transaction, so that jobs commit or vanish with it; takes no lock but those
-- of the keys that were asked for, in the order of the keys. Called by the clients (enqueue_many) and by hand (enqueue).

create function {{schema}}.ensure_policy(p_id text, p_format integer, p_spec jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_bad record;
begin
  if p_spec ? 'effects' then
    select e.spec ->> 'name' as given, e.name into v_bad from {{schema}}.effect_specs(p_spec -> 'effects') e
      where e.name is distinct from e.spec ->> 'name' limit 1;
    if found then
      raise exception using errcode = 'WF009', message = format('effect %s of policy %s cannot be named %L', v_bad.name, p_id, v_bad.given),
        hint = 'Give each effect of a policy a name of its own: 1 to 128 printable ASCII characters without spaces, not * and not beginning with #.';
    end if;
  end if;
  insert into {{schema}}.policies (id, format, spec, created_at) values (p_id, p_format, p_spec, {{schema}}.now())
    on conflict (id) do nothing;
end $$;
comment on function {{schema}}.ensure_policy(text, integer, jsonb) is
  'Stores a resolved policy once; refuses names of effects that cannot tell them apart. Called in a transaction of its own before the first enqueue that needs it, so that a long transaction blocks nobody.';

create function {{schema}}.publish_task(p_worker uuid, p_task text, p_queue text, p_priority integer, p_max_attempts integer,
    p_effect_class text, p_policy_id text, p_required_worker_schema integer default null, p_reconcile_task text default null,
    p_reconcile_steps jsonb default null) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  -- Lock first: a worker that has published its hook meanwhile is seen by the next statement.
  select from {{schema}}.task_config c where c.task = p_task for update;
  insert into {{schema}}.task_config as c (task, queue, priority, max_attempts, effect_class, policy_id, required_worker_schema, reconcile_task, reconcile_steps,
      published_at, published_by)
    values (p_task, p_queue, p_priority, p_max_attempts, p_effect_class, p_policy_id, p_required_worker_schema, p_reconcile_task,
      nullif(p_reconcile_steps, '{}'), {{schema}}.now(), p_worker)
    on conflict (task) do update set queue = excluded.queue, priority = excluded.priority, max_attempts = excluded.max_attempts,
      effect_class = excluded.effect_class, policy_id = excluded.policy_id, required_worker_schema = excluded.required_worker_schema,
      -- An older worker that starts later knows of no hook: it stays while a live worker has it.
      reconcile_task = coalesce(excluded.reconcile_task,
        (select c.reconcile_task where exists (select from {{schema}}.workers w where w.status = 'live' and c.reconcile_task = any(w.tasks)))),
      -- Likewise each step's, which has a task of its own to be known by.
      reconcile_steps = nullif(coalesce((select jsonb_object_agg(s.key, s.value) from jsonb_each_text(c.reconcile_steps) s
        where exists (select from {{schema}}.workers w where w.status = 'live' and s.value = any(w.tasks))), '{}') || coalesce(excluded.reconcile_steps, '{}'), '{}'),
      published_at = excluded.published_at, published_by = excluded.published_by
$$;
comment on function {{schema}}.publish_task(uuid, text, text, integer, integer, text, text, integer, text, jsonb) is
  'A worker publishes at boot what its code says about a task. The last one counts, but where it gives no hook, that of a live worker stays; so does that of each step.';

-- A few jobs are announced to two of the workers that are asleep, named at the end of the message by the ends of their ids;
-- one that has more than it can take announces it to two more. With everybody told, 20 idle workers made 20 claims a job.
-- Only read here: a caller above READ COMMITTED could not take a mark that another has just taken.
create function {{schema}}.wake(p_queues text[], p_jobs integer default 1) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan as $$
declare
  v_choice bigint;
begin
  -- Most often nobody sleeps, and that is found out in a tenth of the time.
  if not exists (select from {{schema}}.sleepers a where a.queue = any(p_queues)) then
    return;
  end if;
  -- One choice a transaction, so that PostgreSQL folds its messages into one for each queue.
  v_choice := txid_current();
  perform pg_notify('{{schema}}_wake', q.name || case when p_jobs < 8 then c.workers else '' end)
    from (select distinct unnest(p_queues) as name) q
    cross join lateral (
      select string_agg(' ' || right(two.worker_id::text, 12), '') as workers from (
        select s.worker_id from (select a.worker_id from {{schema}}.sleepers a where a.queue = q.name limit 64) s
          join {{schema}}.workers w on w.id = s.worker_id and w.status = 'live' and w.lease_expires_at > {{schema}}.now()
         order by uuid_hash_extended(s.worker_id, v_choice) limit 2) two) c
   where c.workers is not null;
end $$;
comment on function {{schema}}.wake(text[], integer) is
  'Notifies workers that are asleep on these queues: two for up to 7 jobs, all of them for more. Losing a notification costs latency only.';

-- Most enqueues are of one job that asks for nothing special. The statements of enqueue_many, made for any number of jobs,
-- cost that one more than its insert; here it is looked at and inserted by one. By one statement and not by variables and
-- conditions: each such expression is made ready anew in every transaction, 30 of them took longer than the insert.
create function {{schema}}.enqueue_plain(p_spec jsonb, p_payload text) returns uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan as $$
declare
  v_id uuid;
  v_sleeps boolean;
begin
  insert into {{schema}}.jobs (id, run_at, created_at, deadline, max_attempts, required_worker_schema, priority, effect_class, queue, task, policy_id, payload, meta, has_effects, slim, cohort)
    select {{schema}}.new_id(), n.at + make_interval(secs => coalesce(s.run_in, 0)), n.at, n.at + make_interval(secs => s.deadline_in), s.max_attempts,
           case when s.effect_class = 'side_effecting' then greatest(s.level, 2) else s.level end, coalesce(s.priority, 5), s.effect_class, s.queue, s.task, s.policy_id,
           p_payload::jsonb, s.meta, case when s.has_effects or p.promises then true end,
           -- A promise that was broken is made again from what stands in history, so whoever makes one keeps it.
           case when coalesce(s.slim, p.slim) and (s.has_effects or p.promises) is not true then true end, coalesce(s.cohort, p.cohort)
      from (select p_spec ->> 'task' as task, p_spec ->> 'queue' as queue, p_spec ->> 'policy_id' as policy_id, p_spec ->> 'effect_class' as effect_class,
                   (p_spec ->> 'priority')::integer as priority, (p_spec ->> 'max_attempts')::integer as max_attempts, (p_spec ->> 'required_worker_schema')::integer as level,
                   (p_spec ->> 'run_in')::double precision as run_in, (p_spec ->> 'deadline_in')::double precision as deadline_in,
                   (p_spec ->> 'has_effects')::boolean as has_effects, (p_spec ->> 'slim')::boolean as slim, p_spec ->> 'cohort' as cohort, p_spec -> 'meta' as meta
             where jsonb_typeof(p_spec) = 'object') s
      -- Once, since the clock goes on.
     cross join (select {{schema}}.now() as at offset 0) n
     cross join {{schema}}.installation i
      left join lateral (select q.spec -> 'effects' <> '[]' as promises, q.spec ->> 'cohort' as cohort, q.spec ->> 'history' = 'slim' as slim
                           from {{schema}}.policies q where q.id = s.policy_id limit 1) p on true
     where p_payload is not null and octet_length(p_payload) <= i.max_payload_bytes
       and p_spec - '{task,queue,policy_id,effect_class,priority,max_attempts,required_worker_schema,run_in,deadline_in,has_effects,slim,meta,ordering,cohort}'::text[] = '{}'
       and {{schema}}.valid_name(s.task) and {{schema}}.valid_name(s.queue) and s.policy_id is not null and s.effect_class in ('pure', 'idempotent', 'side_effecting')
       and coalesce({{schema}}.valid_name(s.cohort), true) and coalesce(s.priority between 0 and 9, true) and coalesce(s.max_attempts >= 1, true)
       and coalesce(s.run_in between -315576000 and 3155760000, true) and coalesce(s.deadline_in between -315576000 and 3155760000, true)
       and (s.meta is null or jsonb_typeof(s.meta) = 'object' and octet_length(s.meta::text) <= 131072)
    returning id, exists (select from {{schema}}.sleepers a where a.queue = p_spec ->> 'queue') into v_id, v_sleeps;
  if v_sleeps then
    perform {{schema}}.wake(array[p_spec ->> 'queue'], 1);
  end if;
  return v_id;
end $$;
comment on function {{schema}}.enqueue_plain(jsonb, text) is
  'Enqueues one job whose spec asks for nothing that others could collide with. Null, and nothing done, where it asks for more or something is wrong: enqueue_many knows the rest, and names mistakes.';

-- p_specs: what many jobs have in common, once: task, queue, priority, max_attempts, effect_class, policy_id,
-- required_worker_schema, deadline_in (seconds), deadline, run_in (seconds), run_at, unique_scope, unique_hold (seconds), idempotency_scope, tags, meta,
-- ordering (halt or continue, where the policy says it), cohort, slim (false: keep payload and result, whatever the policy says).
-- p_spec: for each job the number (from 1) of its spec. p_payload: for each job its arguments, a JSON object as text: a
-- jsonb[] of 50,000 costs four times as much to read as a text[] whose elements are cast one by one (240 against 60 ms).
-- p_unique_key, p_idempotency_key, p_ordering_key: null, or for each job its key or null.
-- p_on_conflict: what to do when a unique key is taken by a job of before: 'existing' answers with it, 'raise' inserts nothing.
create function {{schema}}.enqueue_many(p_specs jsonb, p_spec integer[], p_payload text[], p_unique_key text[] default null,
    p_idempotency_key text[] default null, p_on_conflict text default 'existing', p_ordering_key text[] default null)
  returns table (ord integer, job_id uuid, inserted boolean)
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz := {{schema}}.now();
  v_max integer;
  v_bad record;
  v_job record;
  v_key {{schema}}.unique_keys;
  v_known {{schema}}.idempotency_keys;
  v_ids uuid[];
  v_new boolean[];
  v_common text;
  v_n integer := coalesce(array_length(p_spec, 1), 0);
  v_keyed boolean := p_unique_key is not null or p_idempotency_key is not null or p_ordering_key is not null;
  v_line text;
  v_last uuid;
begin
  if coalesce(array_length(p_payload, 1), 0) <> v_n
     or (p_unique_key is not null and coalesce(array_length(p_unique_key, 1), 0) <> v_n)
     or (p_idempotency_key is not null and coalesce(array_length(p_idempotency_key, 1), 0) <> v_n)
     or (p_ordering_key is not null and coalesce(array_length(p_ordering_key, 1), 0) <> v_n) then
    raise exception using errcode = 'WF009', message = 'the arrays of enqueue_many differ in length', hint = 'Give each job a spec, a payload and, where keys are used, a key or null.';
  end if;
  if v_n = 1 and not v_keyed and p_on_conflict in ('existing', 'raise') and jsonb_typeof(p_specs) = 'array' and jsonb_array_length(p_specs) = 1
     and array_lower(p_spec, 1) = 1 and array_lower(p_payload, 1) = 1 and p_spec[1] = 1 then
    job_id := {{schema}}.enqueue_plain(p_specs -> 0, p_payload[1]);
    if job_id is not null then
      ord := 1;
      inserted := true;
      return next;
      return;
    end if;
  end if;
  -- Elements are named by their place: an array that counts otherwise would give jobs the keys of others.
  if v_n > 0 and ((array_lower(p_spec, 1), array_lower(p_payload, 1), coalesce(array_lower(p_unique_key, 1), 1), coalesce(array_lower(p_idempotency_key, 1), 1), coalesce(array_lower(p_ordering_key, 1), 1)) <> (1, 1, 1, 1, 1)
     or greatest(array_ndims(p_spec), array_ndims(p_payload), array_ndims(p_unique_key), array_ndims(p_idempotency_key), array_ndims(p_ordering_key)) > 1) then
    raise exception using errcode = 'WF009', message = 'the arrays of enqueue_many do not count from 1 in one dimension', hint = 'Build them with array[...] or array_agg.';
  end if;
  if jsonb_typeof(p_specs) is distinct from 'array' or exists (
       select from unnest(p_spec) as o(spec) where o.spec is null or o.spec not between 1 and jsonb_array_length(p_specs)) then
    raise exception using errcode = 'WF009', message = 'a job of enqueue_many names a spec that is not there',
      hint = 'p_specs is a JSON array; p_spec has for each job the number of its spec in it, counted from 1.';
  end if;
  if p_on_conflict is null or p_on_conflict not in ('existing', 'raise') then
    raise exception using errcode = 'WF009', message = format('p_on_conflict of enqueue_many is %L', p_on_conflict), hint = 'Give existing or raise.';
  end if;
  -- One look, since each costs a statement; what it finds is then looked for one by one, to be named.
  if (select max(octet_length(o.payload)) from unnest(p_payload) as o(payload)) > (select i.max_payload_bytes from {{schema}}.installation i)
     or exists (select from jsonb_to_recordset(p_specs) as s(task text, queue text, priority integer, max_attempts integer, effect_class text, policy_id text,
            run_at timestamptz, deadline timestamptz, run_in double precision, deadline_in double precision, unique_hold double precision, tags text[], meta jsonb, cohort text)
          where ({{schema}}.valid_name(s.task) and {{schema}}.valid_name(s.queue) and coalesce({{schema}}.valid_name(s.cohort), true) and s.effect_class in ('pure', 'idempotent', 'side_effecting') and s.policy_id is not null
            and coalesce(s.priority between 0 and 9, true) and coalesce(s.max_attempts >= 1, true)
            and coalesce(s.run_at >= '1970-01-01 00:00:00+00' and s.run_at < '9000-01-01 00:00:00+00', true)
            and coalesce(s.deadline >= '1970-01-01 00:00:00+00' and s.deadline < '9000-01-01 00:00:00+00', true)
            and coalesce(s.run_in between -315576000 and 3155760000, true) and coalesce(s.deadline_in between -315576000 and 3155760000, true)
            and coalesce(s.unique_hold between 0 and 3155760000, true)
            and (s.tags is null or cardinality(s.tags) <= 64 and not exists (select from unnest(s.tags) as t(tag) where length(t.tag) > 256))
            and (s.meta is null or jsonb_typeof(s.meta) = 'object' and octet_length(s.meta::text) <= 131072)) is not true) then
    select s.*, s.n as spec into v_bad from (
      select row_number() over () as n, x.* from jsonb_to_recordset(p_specs)
        as x(task text, queue text, priority integer, max_attempts integer, effect_class text, policy_id text, cohort text)) s
      where not coalesce({{schema}}.valid_name(s.task), false) or not {{schema}}.valid_name(s.cohort) or not coalesce({{schema}}.valid_name(s.queue), false) or s.priority not between 0 and 9 or s.max_attempts < 1
         or s.effect_class not in ('pure', 'idempotent', 'side_effecting') or s.policy_id is null
      limit 1;
    if found then
      raise exception using errcode = 'WF009', message = format('spec %s of enqueue_many is not valid: %s', v_bad.spec, p_specs -> (v_bad.spec::int - 1)),
        hint = 'Task and queue are 1 to 128 printable ASCII characters without spaces, priority is 0 to 9, max_attempts at least 1.';
    end if;
    -- Instants that every client can read, and no sum that leaves the calendar: a row that cannot be read stops its readers.
    select s.n as spec, v.name, v.given into v_bad from (
      select row_number() over () as n, x.* from jsonb_to_recordset(p_specs) as x(run_at timestamptz, deadline timestamptz,
        run_in double precision, deadline_in double precision, unique_hold double precision)) s
      cross join lateral (values
        ('run_at', s.run_at::text, s.run_at >= '1970-01-01 00:00:00+00' and s.run_at < '9000-01-01 00:00:00+00'),
        ('deadline', s.deadline::text, s.deadline >= '1970-01-01 00:00:00+00' and s.deadline < '9000-01-01 00:00:00+00'),
        ('run_in', s.run_in::text, s.run_in between -315576000 and 3155760000),
        ('deadline_in', s.deadline_in::text, s.deadline_in between -315576000 and 3155760000),
        ('unique_hold', s.unique_hold::text, s.unique_hold between 0 and 3155760000)) as v(name, given, fits)
      where not v.fits
      limit 1;
    if found then
      raise exception using errcode = 'WF009', message = format('spec %s of enqueue_many is not valid: %s is %s', v_bad.spec, v_bad.name, v_bad.given),
        hint = 'Instants are from 1970 to 8999, durations from 10 years back to 100 years ahead; leave a deadline out for none.';
    end if;
    select s.n as spec, v.name, v.size, v.most into v_bad from (
      select row_number() over () as n, x.* from jsonb_to_recordset(p_specs) as x(tags text[], meta jsonb)) s
      cross join lateral (values
        ('tags, how many', cardinality(s.tags), 64),
        ('tags, characters of the longest', (select max(length(t.tag)) from unnest(s.tags) as t(tag)), 256),
        ('meta, bytes', octet_length(s.meta::text), 131072)) as v(name, size, most)
      where v.size > v.most
      limit 1;
    if found then
      raise exception using errcode = 'WF009', message = format('spec %s of enqueue_many is not valid: %s: %s, the limit is %s', v_bad.spec, v_bad.name, v_bad.size, v_bad.most),
        hint = 'Put data into the payload, or store it elsewhere and enqueue a reference to it.';
    end if;
    select s.n as spec, jsonb_typeof(s.meta) as kind into v_bad from (
      select row_number() over () as n, x.meta from jsonb_to_recordset(p_specs) as x(meta jsonb)) s
      where jsonb_typeof(s.meta) <> 'object' limit 1;
    if found then
      raise exception using errcode = 'WF009', message = format('spec %s of enqueue_many is not valid: meta is a JSON %s, not an object', v_bad.spec, v_bad.kind),
        hint = 'Give an object, such as {"source": "import"}, or leave meta out.';
    end if;
    select i.max_payload_bytes into v_max from {{schema}}.installation i;
    select o.n, octet_length(o.payload) as size into v_bad from unnest(p_payload) with ordinality as o(payload, n)
      where octet_length(o.payload) > v_max limit 1;
    if found then
      raise exception using errcode = 'WF009', message = format('the payload of job %s has %s bytes, the limit is %s', v_bad.n, v_bad.size, v_max),
        hint = 'Store large data elsewhere and enqueue a reference to it.';
    end if;
  end if;

  if v_keyed then
    v_ids := array_fill(null::uuid, array[v_n]);
    v_new := array_fill(true, array[v_n]);
    -- Ordering keys come first, and ids after them: in a line the id is the place. Enqueues under one key wait for one another.
    if p_ordering_key is not null then
      if exists (select from unnest(p_ordering_key) as o(key) where length(o.key) not between 1 and 512) then
        raise exception using errcode = 'WF009', message = 'an ordering key of enqueue_many is not valid', hint = 'Give 1 to 512 characters, or null for none.';
      end if;
      perform {{schema}}.take_ordering_keys(p_ordering_key);
      for v_job in select o.n::int as n, o.key from unnest(p_ordering_key) with ordinality as o(key, n) where o.key is not null order by o.key, o.n loop
        if v_job.key is distinct from v_line then
          v_line := v_job.key;
          v_last := {{schema}}.last_in_line(v_line);
        end if;
        v_ids[v_job.n] := {{schema}}.new_id();
        if v_ids[v_job.n] <= v_last then
          v_ids[v_job.n] := {{schema}}.id_after(v_last);
        end if;
        v_last := v_ids[v_job.n];
      end loop;
    end if;
    -- Keys are taken in their order, so that two batches with the same keys cannot deadlock. One that is taken already is
    -- not locked: the end of the job that holds it must not wait for this transaction, which may stay open for long.
    for v_job in
      select k.n::int as n, k.kind, coalesce(case k.kind when 1 then s.idempotency_scope else s.unique_scope end, s.task) as scope, k.key,
             coalesce(s.idempotency_scope, s.task) as idempotency_scope,
             make_interval(secs => s.unique_hold) as hold,
             sha256(convert_to(jsonb_build_array(s.task, p_payload[k.n]::jsonb)::text, 'UTF8')) as fingerprint
        from (select 1 as kind, u.key, u.n from unnest(p_idempotency_key) with ordinality u(key, n) where u.key is not null
              union all
              select 2, u.key, u.n from unnest(p_unique_key) with ordinality u(key, n) where u.key is not null) k
        join (select row_number() over () as i, x.* from jsonb_to_recordset(p_specs)
               as x(task text, unique_scope text, unique_hold double precision, idempotency_scope text)) s on s.i = p_spec[k.n]
       order by k.kind, 3, k.key, k.n
    loop
      continue when not v_new[v_job.n];
      v_ids[v_job.n] := coalesce(v_ids[v_job.n], {{schema}}.new_id());
      if v_job.kind = 1 then
        loop
          insert into {{schema}}.idempotency_keys as k (scope, key, fingerprint, job_id, created_at, expires_at)
            select v_job.scope, v_job.key, v_job.fingerprint, v_ids[v_job.n], v_now, v_now + i.key_retention from {{schema}}.installation i
            on conflict (scope, key) do nothing;
          exit when found;
          select * into v_known from {{schema}}.idempotency_keys k where k.scope = v_job.scope and k.key = v_job.key;
          continue when not found;
          if v_known.expires_at <= v_now then
            update {{schema}}.idempotency_keys k set fingerprint = v_job.fingerprint, job_id = v_ids[v_job.n], created_at = v_now, expires_at = v_now + i.key_retention
              from {{schema}}.installation i where k.scope = v_job.scope and k.key = v_job.key and k.expires_at <= v_now;
            exit when found;
            continue;
          end if;
          if v_known.fingerprint <> v_job.fingerprint then
            raise exception using errcode = 'WF008',
              message = format('idempotency key %L of scope %s was used for another request', v_job.key, v_job.scope),
              detail = jsonb_build_object('job_id', v_known.job_id, 'scope', v_job.scope, 'key', v_job.key)::text,
              hint = 'The same key must come with the same task and payload; use a new key for a new request.';
          end if;
          v_ids[v_job.n] := v_known.job_id;
          v_new[v_job.n] := false;
          exit;
        end loop;
      else
        loop
          insert into {{schema}}.unique_keys as k (scope, key, job_id, hold_for) values (v_job.scope, v_job.key, v_ids[v_job.n], v_job.hold)
            on conflict (scope, key) do nothing;
          exit when found;
          select * into v_key from {{schema}}.unique_keys k where k.scope = v_job.scope and k.key = v_job.key;
          continue when not found;
          if v_key.expires_at <= v_now then
            update {{schema}}.unique_keys k set job_id = v_ids[v_job.n], hold_for = v_job.hold, expires_at = null
              where k.scope = v_job.scope and k.key = v_job.key and k.expires_at <= v_now;
            exit when found;
            continue;
          end if;
          -- A key that stands twice in this batch is no conflict: the second is answered with the first.
          if p_on_conflict = 'raise' and not exists (select from unnest(v_ids, v_new) as b(id, is_new) where b.id = v_key.job_id and b.is_new) then
            raise exception using errcode = 'WF007',
              message = format('unique key %L of scope %s is held by job %s', v_job.key, v_job.scope, v_key.job_id),
              detail = jsonb_build_object('job_id', v_key.job_id, 'scope', v_job.scope, 'key', v_job.key)::text,
              hint = 'Nothing was enqueued. Wait for that job, cancel it, or ask for the existing job instead.';
          end if;
          -- An idempotency key taken just above must name the job that answers, and so must jobs of this batch that share it.
          if p_idempotency_key is not null and p_idempotency_key[v_job.n] is not null then
            update {{schema}}.idempotency_keys k set job_id = v_key.job_id
              where k.scope = v_job.idempotency_scope and k.key = p_idempotency_key[v_job.n] and k.job_id = v_ids[v_job.n];
            v_ids := array_replace(v_ids, v_ids[v_job.n], v_key.job_id);
          end if;
          v_ids[v_job.n] := v_key.job_id;
          v_new[v_job.n] := false;
          exit;
        end loop;
      end if;
    end loop;
  end if;

  -- A server built without OpenSSL opens the system's source of random bits for each id: 4 to 7 us, a quarter of a bulk
  -- enqueue. A batch asks once: its ids share the time and 30 random bits, and count in the last 32 (1 us).
  if v_n > 1 then
    v_common := left(replace({{schema}}.new_id()::text, '-', ''), 24);
  end if;

  return query
    with specs as materialized (
      select x.i, x.task, x.queue, coalesce(x.priority, 5)::smallint as priority, x.max_attempts, x.effect_class, x.policy_id,
             -- Workers below level 2 know no effect starts.
             case when x.effect_class = 'side_effecting' then greatest(x.required_worker_schema, 2) else x.required_worker_schema end as required_worker_schema,
             coalesce(x.run_at, v_now + make_interval(secs => coalesce(x.run_in, 0))) as run_at,
             coalesce(x.deadline, v_now + make_interval(secs => x.deadline_in)) as deadline, coalesce(x.unique_scope, x.task) as unique_scope, x.tags, x.meta,
             -- Whoever enqueues, what the policy promises holds.
             coalesce(nullif(x.has_effects, false), nullif(p.has_effects, false)) as has_effects,
             case when coalesce(x.slim, p.slim) and (x.has_effects or p.has_effects) is not true then true end as slim, coalesce(x.cohort, p.cohort) as cohort,
             case x.ordering when 'halt' then true when 'continue' then false end as ordering_halt
        -- Counted before anything is joined: a join may bring them into another order.
        from (select row_number() over () as i, r.* from jsonb_to_recordset(p_specs) as r(task text, queue text, priority integer, max_attempts integer,
             effect_class text, policy_id text, required_worker_schema integer, run_at timestamptz, run_in double precision, deadline timestamptz,
             deadline_in double precision, unique_scope text, tags text[], meta jsonb, has_effects boolean, slim boolean, ordering text, cohort text)) x
        left join lateral (select q.spec -> 'effects' <> '[]' as has_effects, q.spec ->> 'cohort' as cohort, q.spec ->> 'history' = 'slim' as slim from {{schema}}.policies q where q.id = x.policy_id) p on true),
    input as materialized (
      select o.n, coalesce(v_ids[o.n], case when v_common is null then {{schema}}.new_id() else (v_common || lpad(to_hex(o.n), 8, '0'))::uuid end) as id, coalesce(v_new[o.n], true) as is_new, o.spec, o.payload::jsonb as payload,
             case when v_keyed then p_unique_key[o.n] end as unique_key, case when v_keyed then p_ordering_key[o.n] end as ordering_key
        from unnest(p_spec, p_payload) with ordinality as o(spec, payload, n)),
    placed as (
      insert into {{schema}}.jobs (id, run_at, created_at, deadline, max_attempts, required_worker_schema, priority, effect_class, queue, task,
          policy_id, unique_scope, unique_key, payload, tags, meta, has_effects, slim, ordering_key, ordering_halt, cohort)
        select i.id, s.run_at, v_now, s.deadline, s.max_attempts, s.required_worker_schema, s.priority, s.effect_class, s.queue, s.task,
               s.policy_id, case when i.unique_key is not null then s.unique_scope end, i.unique_key, i.payload, s.tags, s.meta, s.has_effects, s.slim,
               i.ordering_key, case when i.ordering_key is not null then s.ordering_halt end, s.cohort
          from input i join specs s on s.i = i.spec where i.is_new)
    select i.n::int, i.id, i.is_new from input i order by i.n;

  perform {{schema}}.wake(case when jsonb_array_length(p_specs) = 1 then array[p_specs -> 0 ->> 'queue']
    else array(select distinct x.queue from jsonb_to_recordset(p_specs) as x(queue text)) end, v_n);
end $$;
comment on function {{schema}}.enqueue_many(jsonb, integer[], text[], text[], text[], text, text[]) is
  'Enqueues many jobs in one statement, in the caller''s transaction; answers in input order with each job''s id and whether it is new.';

create function {{schema}}.enqueue(task text, payload jsonb default '{}', queue text default null, priority integer default null,
    run_at timestamptz default null, run_in interval default null, deadline timestamptz default null, max_attempts integer default null,
    unique_key text default null, unique_scope text default null, idempotency_key text default null, policy text default null,
    tags text[] default null, meta jsonb default null, ordering_key text default null)
  returns uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_config {{schema}}.task_config;
  v_spec jsonb;
  v_id uuid;
begin
  select * into v_config from {{schema}}.task_config c where c.task = enqueue.task;
  if v_config.task is null and policy is null then
    raise exception using errcode = 'WF006', message = format('task %L was never published by a worker', task),
      hint = 'Start a worker that knows the task once, or name a policy: enqueue(..., policy => id).';
  end if;
  if jsonb_path_exists(payload, 'strict $.**{201} ? (@.type() == "array" || @.type() == "object")') then
    raise exception using errcode = 'WF009', message = 'the payload has more than 200 arrays and objects nested in one another, the limit is 200',
      hint = 'Enqueue a flatter form of it.';
  end if;
  if policy is not null and not exists (select from {{schema}}.policies p where p.id = policy) then
    raise exception using errcode = 'WF014', message = format('there is no policy %L', policy), hint = 'See the table policies for their ids.';
  end if;
  select jsonb_strip_nulls(jsonb_build_object(
      'task', enqueue.task,
      'queue', coalesce(enqueue.queue, case when enqueue.policy is null then v_config.queue end, p.spec->>'queue', 'default'),
      'priority', coalesce(enqueue.priority, case when enqueue.policy is null then v_config.priority end, (p.spec->>'priority')::int, 5),
      'max_attempts', coalesce(enqueue.max_attempts, case when enqueue.policy is null then v_config.max_attempts end, (p.spec#>>'{retry,max_attempts}')::int, 1),
      'effect_class', coalesce(case when enqueue.policy is null then v_config.effect_class end, p.spec->>'effect_class', 'idempotent'),
      'policy_id', p.id, 'required_worker_schema', v_config.required_worker_schema,
      'run_at', enqueue.run_at, 'run_in', extract(epoch from enqueue.run_in), 'deadline', enqueue.deadline,
      'deadline_in', case when enqueue.deadline is null then (p.spec->>'deadline')::double precision end,
      'unique_scope', enqueue.unique_scope, 'tags', to_jsonb(enqueue.tags), 'ordering', p.spec->>'ordering'))
      || case when enqueue.meta is not null then jsonb_build_object('meta', enqueue.meta) else '{}' end
    into v_spec from {{schema}}.policies p where p.id = coalesce(enqueue.policy, v_config.policy_id);
  if v_spec is null then
    raise exception using errcode = 'WF014', message = format('the policy of task %L is missing', task), hint = 'Restart a worker that knows the task.';
  end if;
  select e.job_id into v_id from {{schema}}.enqueue_many(jsonb_build_array(v_spec), array[1], array[coalesce(enqueue.payload, '{}')::text],
    case when enqueue.unique_key is not null then array[enqueue.unique_key] end,
    case when enqueue.idempotency_key is not null then array[enqueue.idempotency_key] end,
    p_ordering_key => case when enqueue.ordering_key is not null then array[enqueue.ordering_key] end) e;
  return v_id;
end $$;
comment on function {{schema}}.enqueue(text, jsonb, text, integer, timestamptz, interval, timestamptz, integer, text, text, text, text, text[], jsonb, text) is
  'Enqueues one job from any language, in the caller''s transaction: select {{schema}}.enqueue(''send_receipt'', ''{"order_id": 7}''). Returns its id, or that of the job that holds the unique or idempotency key.';

-- Terminal effects: tasks that run because a job has reached a terminal status. What a job promises stands in its policy,
-- under "effects"; the trigger below makes the intents and their jobs in the transaction that writes the job's row of
-- history, on whatever way it got there. An end is never refused for an effect's sake: a promise that cannot be turned into
-- a job is recorded as broken, and one in too long a chain as refused, both for people to see and to settle.
-- Lock order: the owner's row (jobs or history), its intents by id, then the job of an effect.

create table {{schema}}.effect_intents (
  id uuid primary key,
  effect_key text not null unique,
  owner_job_id uuid not null,
  owner_task text not null,
  generation integer not null,
  name text not null check ({{schema}}.valid_name(name)),
  status text not null check (status in ('succeeded', 'failed', 'cancelled')),
  task text,
  job_id uuid unique,
  fingerprint bytea,
  depth integer not null check (depth >= 1),
  undoes boolean not null default false,
  fault text check (fault in ('broken', 'refused')),
  error jsonb,
  job_ended text check (job_ended in ('succeeded', 'failed', 'cancelled')),
  created_at timestamptz not null,
  settled_at timestamptz,
  settled_by text,
  settled_reason text,
  constraint effect_intents_settled_whole check ((settled_at is null) = (settled_by is null))
);
create index effect_intents_owner on {{schema}}.effect_intents (owner_job_id, generation);
create index effect_intents_faults on {{schema}}.effect_intents (id) where (fault is not null or job_ended = 'failed') and settled_at is null;
create index effect_intents_age on {{schema}}.effect_intents (created_at);

comment on table {{schema}}.effect_intents is 'The durable promise of each terminal effect, committed with the status that caused it. The view effects shows how each stands.';
comment on column {{schema}}.effect_intents.id is 'UUIDv7.';
comment on column {{schema}}.effect_intents.effect_key is 'The owner''s id, its generation and the effect''s name, with colons between: one promise, one row, one job.';
comment on column {{schema}}.effect_intents.owner_job_id is 'The job that has ended.';
comment on column {{schema}}.effect_intents.owner_task is 'Its task.';
comment on column {{schema}}.effect_intents.generation is 'Its generation at that end.';
comment on column {{schema}}.effect_intents.name is 'What the owner''s policy calls the effect; * for all of a policy that was missing.';
comment on column {{schema}}.effect_intents.status is 'The terminal status that caused it.';
comment on column {{schema}}.effect_intents.task is 'The task of the effect.';
comment on column {{schema}}.effect_intents.job_id is 'The job that carries the effect out; null while there is none.';
comment on column {{schema}}.effect_intents.fingerprint is 'SHA-256 of the task and payload of that job, as promised.';
comment on column {{schema}}.effect_intents.depth is 'Place in a chain of effects of effects, from 1.';
comment on column {{schema}}.effect_intents.undoes is 'Whether it takes back what its owner did, as declared: once it has succeeded, a reopened owner has a new idempotency key.';
comment on column {{schema}}.effect_intents.fault is 'Why there is no job: broken (it could not be made) or refused (the chain is too long); null where there is one.';
comment on column {{schema}}.effect_intents.error is 'What was wrong, where there is a fault, or its job had failed and is not in history any more: a JSON object with type and message.';
comment on column {{schema}}.effect_intents.job_ended is 'How its job had ended, once retention has dropped that job from history; null before.';
comment on column {{schema}}.effect_intents.created_at is 'When the owner ended.';
comment on column {{schema}}.effect_intents.settled_at is 'When an operator settled it; null otherwise. An effect whose job has succeeded needs no such mark.';
comment on column {{schema}}.effect_intents.settled_by is 'Who settled it.';
comment on column {{schema}}.effect_intents.settled_reason is 'Why, as given.';

create function {{schema}}.effect_fingerprint(p_task text, p_payload jsonb) returns bytea
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$ select sha256(convert_to(jsonb_build_array(p_task, p_payload)::text, 'UTF8')) $$;
comment on function {{schema}}.effect_fingerprint(text, jsonb) is 'What tells whether a job is the one that an effect promised.';

-- A template has for each parameter of the effect's task one of {"value": JSON}, {"arg": name, "default": JSON} and
-- {"of": "result" | "error" | "status" | "job_id" | "generation"}; what refers to nothing is refused, not left out.
create function {{schema}}.effect_payload(p_template jsonb, p_owner {{schema}}.history) returns jsonb
  language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_payload jsonb;
  v_wrong text;
begin
  if jsonb_typeof(p_template) is distinct from 'object' then
    raise exception using errcode = 'WF009', message = 'the payload of the effect is no object', hint = 'Declare it in Python, with TerminalEffect.';
  end if;
  with found as (
    select t.key, case
        when t.value ? 'value' then t.value -> 'value'
        when t.value ? 'arg' then coalesce(p_owner.payload -> (t.value ->> 'arg'), t.value -> 'default')
        else case t.value ->> 'of'
          when 'result' then coalesce(p_owner.result, 'null')
          when 'error' then coalesce(p_owner.error, 'null')
          when 'status' then to_jsonb(p_owner.status)
          when 'job_id' then to_jsonb(p_owner.id)
          when 'generation' then to_jsonb(p_owner.generation) end end as value, t.value as given
      from jsonb_each(p_template) t)
  select coalesce(jsonb_object_agg(f.key, f.value), '{}'), min(format('%s: %s', f.key, f.given)) filter (where f.value is null)
    into v_payload, v_wrong from found f;
  if v_wrong is not null then
    raise exception using errcode = 'WF009', message = format('the payload of the effect refers to what its owner does not have: %s', left(v_wrong, 200)),
      hint = 'The owner was enqueued without this argument, or the template was written by hand.';
  end if;
  return v_payload;
end $$;
comment on function {{schema}}.effect_payload(jsonb, {{schema}}.history) is 'The payload of an effect''s job: its template, filled in from the owner''s end.';

create function {{schema}}.effect_job_spec(p_owner {{schema}}.history, p_effect jsonb, p_key text, p_line text) returns jsonb
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_mark jsonb := jsonb_build_object('effect', jsonb_build_object(
    'key', p_key, 'owner_job_id', p_owner.id, 'owner_task', p_owner.task, 'status', p_owner.status, 'generation', p_owner.generation));
begin
  -- What travels with the owner travels on where there is room for it; for its sake no promise is broken.
  if not exists (select from {{schema}}.policies p where p.id = p_effect ->> 'policy_id') then
    raise exception using errcode = 'WF014', message = format('the policy %L of the effect is missing', p_effect ->> 'policy_id'),
      hint = 'Store it again, by a worker that knows the task, and then: taskq effects retry.';
  end if;
  return jsonb_build_object(
          'task', p_effect -> 'task', 'queue', p_effect -> 'queue', 'priority', p_effect -> 'priority', 'max_attempts', p_effect -> 'max_attempts',
          'effect_class', p_effect -> 'effect_class', 'policy_id', p_effect -> 'policy_id',
          'required_worker_schema', p_effect -> 'required_worker_schema', 'deadline_in', p_effect -> 'deadline',
          -- That it is the job that was promised can be checked as long as it stands in history.
          'slim', false, 'ordering', case when p_line is not null then 'continue' end,
          'meta', case when jsonb_typeof(p_owner.meta) = 'object' and octet_length((p_owner.meta || v_mark)::text) <= 131072 then p_owner.meta || v_mark else v_mark end);
end $$;
comment on function {{schema}}.effect_job_spec({{schema}}.history, jsonb, text, text) is 'How the job of an effect is enqueued, as a spec of enqueue_many. Raises where its policy is missing.';

create function {{schema}}.effect_job(p_owner {{schema}}.history, p_effect jsonb, p_key text, p_line text default null) returns table (job_id uuid, fingerprint bytea)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_payload jsonb := {{schema}}.effect_payload(p_effect -> 'payload', p_owner);
begin
  return query
    select e.job_id, {{schema}}.effect_fingerprint(p_effect ->> 'task', v_payload)
      from {{schema}}.enqueue_many(jsonb_build_array({{schema}}.effect_job_spec(p_owner, p_effect, p_key, p_line)),
        array[1], array[v_payload::text], p_ordering_key => case when p_line is not null then array[p_line] end) e;
end $$;
comment on function {{schema}}.effect_job({{schema}}.history, jsonb, text, text) is
  'Enqueues the job of an effect, as the owner''s policy promised it; under an ordering key, where one is given. Raises where that cannot be.';

-- What of a promise is the matter with the promise itself, by SQLSTATE. Anything else (a lock, a full disk, a lost
-- connection) is the moment's, and undoes the end, which is then sent again.
create function {{schema}}.is_broken(p_sqlstate text) returns boolean
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$ select left(p_sqlstate, 2) in ('22', '23', '42', '54', 'P0', 'WF') $$;
comment on function {{schema}}.is_broken(text) is 'Whether an error that kept an effect''s job from being made will be there the next time too.';

-- Whatever a stored policy says, each of its effects has a name of its own: what cannot be a name, is reserved (* for all,
-- # for those without one) or stands twice goes by its place, and must not keep an end from being stored.
create function {{schema}}.effect_specs(p_effects jsonb) returns table (spec jsonb, name text)
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
  select e.spec, case when coalesce({{schema}}.valid_name(e.name), false) and e.name <> '*' and left(e.name, 1) <> '#' and e.place = 1 then e.name else '#' || e.n end
    from (select a.spec, a.n, a.spec ->> 'name' as name, row_number() over (partition by a.spec ->> 'name' order by a.n) as place
            from jsonb_array_elements(case jsonb_typeof(p_effects) when 'array' then p_effects else '[]' end) with ordinality a(spec, n)) e
   order by e.n
$$;
comment on function {{schema}}.effect_specs(jsonb) is 'What a policy promises, in order, each effect under the name that its intents have.';

-- A run that an effect has started, and all that belongs to it, goes on with that effect's chain.
create function {{schema}}.effect_depth(p_owner {{schema}}.history) returns integer
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
begin
  return coalesce((select i.depth from {{schema}}.effect_intents i where i.job_id = p_owner.id),
    (select r.effect_depth from {{schema}}.runs r where r.id = p_owner.run_id), 0) + 1;
end $$;
comment on function {{schema}}.effect_depth({{schema}}.history) is 'The place that the effects of this end have in a chain of effects, from 1.';

-- p_prefix: before the names of these effects. p_line: the ordering key under which their jobs run one after another.
create function {{schema}}.promise_these(p_owner {{schema}}.history, p_effects jsonb, p_prefix text default '', p_line text default null) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_depth integer := {{schema}}.effect_depth(p_owner);
  v_effect record;
  v_job uuid;
  v_print bytea;
  v_key text;
  v_fault text;
  v_error jsonb;
begin
  for v_effect in
    select e.spec, left(p_prefix || e.name, 128) as name from {{schema}}.effect_specs(p_effects) e where e.spec -> 'on' ? p_owner.status
  loop
    v_key := format('%s:%s:%s', p_owner.id, p_owner.generation, v_effect.name);
    v_job := null;
    v_print := null;
    v_fault := null;
    v_error := null;
    if v_depth > 8 then
      v_fault := 'refused';
      v_error := jsonb_build_object('type', 'EffectRefused', 'message', 'it would be the ninth of a chain in which each is the effect of the one before; the limit is 8');
    else
      begin
        select j.job_id, j.fingerprint into v_job, v_print from {{schema}}.effect_job(p_owner, v_effect.spec, v_key, p_line) j;
      exception when others then
        if not {{schema}}.is_broken(sqlstate) then
          raise;
        end if;
        v_fault := 'broken';
        v_error := jsonb_build_object('type', 'EffectBroken', 'message', left(sqlerrm, 2000), 'sqlstate', sqlstate);
      end;
    end if;
    -- The key is unique: a second end of one generation cannot be stored at all.
    insert into {{schema}}.effect_intents (id, effect_key, owner_job_id, owner_task, generation, name, status, task, job_id, fingerprint, depth, undoes, fault, error, created_at)
      values ({{schema}}.new_id(), v_key, p_owner.id, p_owner.task, p_owner.generation, v_effect.name, p_owner.status, v_effect.spec ->> 'task',
        v_job, v_print, v_depth, coalesce(v_effect.spec -> 'undoes' = 'true', false), v_fault, v_error,
        case when p_line is null then p_owner.finished_at else {{schema}}.now() end);
  end loop;
end $$;
comment on function {{schema}}.promise_these({{schema}}.history, jsonb, text, text) is
  'Makes the intents, and their jobs, of those of these effects that the end of their owner causes.';

create function {{schema}}.promise(p_owner {{schema}}.history) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_effects jsonb;
  v_depth integer;
begin
  select p.spec -> 'effects' into v_effects from {{schema}}.policies p where p.id = p_owner.policy_id;
  if not found or jsonb_typeof(v_effects) <> 'array' then
    v_depth := {{schema}}.effect_depth(p_owner);
    insert into {{schema}}.effect_intents (id, effect_key, owner_job_id, owner_task, generation, name, status, depth, fault, error, created_at)
      values ({{schema}}.new_id(), format('%s:%s:*', p_owner.id, p_owner.generation), p_owner.id, p_owner.task, p_owner.generation, '*', p_owner.status, v_depth, 'broken',
        jsonb_build_object('type', 'EffectBroken', 'message', format('the policy %s of the owner is missing or cannot be read, so what it promised is not known', p_owner.policy_id)), p_owner.finished_at);
    return;
  end if;
  perform {{schema}}.promise_these(p_owner, v_effects);
end $$;
comment on function {{schema}}.promise({{schema}}.history) is
  'Makes the intents, and their jobs, of the effects that this end of a job causes.';

create function {{schema}}.promise_effects() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_owner {{schema}}.history;
begin
  v_owner := new;
  perform {{schema}}.promise(v_owner);
  return null;
end $$;
comment on function {{schema}}.promise_effects() is 'Trigger: a job that promises effects has ended.';
create trigger effects_promised after insert on {{schema}}.history for each row
  when (new.has_effects) execute function {{schema}}.promise_effects();

create view {{schema}}.effects as
  select i.id, i.effect_key, i.owner_job_id, i.owner_task, i.generation, i.name, i.status as on_status, i.task, i.depth, i.job_id,
         coalesce(j.status, h.status, i.job_ended, i.fault, 'gone') as status,
         coalesce(h.error, i.error, case when j.id is not null then
           (select l.error from {{schema}}.ledger l where l.job_id = i.job_id order by l.claim_epoch desc limit 1) end) as error,
         i.settled_at is not null or coalesce(coalesce(h.status, i.job_ended) in ('succeeded', 'cancelled'), false) as settled,
         case when i.settled_at is not null then 'operator' when coalesce(h.status, i.job_ended) in ('succeeded', 'cancelled') then coalesce(h.status, i.job_ended) end as settled_how,
         coalesce(i.settled_at, case when h.status in ('succeeded', 'cancelled') then h.finished_at end) as settled_at,
         i.settled_by, i.settled_reason, i.created_at
    from {{schema}}.effect_intents i
    left join lateral (select o.id, o.status from {{schema}}.jobs o where o.id = i.job_id limit 1) j on true
    left join lateral (select o.status, o.error, o.finished_at from {{schema}}.history o where o.id = i.job_id and o.finished_at >= i.created_at - interval '1 day' limit 1) h on true;
comment on view {{schema}}.effects is
  'Every terminal effect that was promised and how it stands: settled once its job has succeeded or was cancelled, or an operator settled it with a reason.';

-- What reopening a job means for effects: its own, and the one that it may be the job of. Called by retry, which has locked
-- the job's row. That an effect is settled cannot change any more but by reopening its job, which takes the same lock.
create function {{schema}}.reopening(p_old {{schema}}.history) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_own {{schema}}.effect_intents;
  v_open text;
  v_keys jsonb;
  v_intents uuid[];
begin
  v_intents := array(
    select u.id from unnest(array(select i.id from {{schema}}.effect_intents i where i.owner_job_id = p_old.id and i.generation = p_old.generation)
      || array(select i.id from {{schema}}.effect_intents i where i.job_id = p_old.id)) u(id) order by u.id);
  perform from unnest(v_intents) u(id) cross join lateral (select from {{schema}}.effect_intents i where i.id = u.id limit 1 for update) l;
  -- Written, and not only locked: above READ COMMITTED a later reopening, of the owner or of an effect, would otherwise
  -- look at how things stood before this one. So it fails as one that cannot be serialized.
  update {{schema}}.effect_intents i set created_at = i.created_at where i.id = any(v_intents);
  select * into v_own from {{schema}}.effect_intents i where i.job_id = p_old.id;
  if found and v_own.settled_at is not null then
    raise exception using errcode = 'WF012', message = format('job %s carries out the effect %s, which was settled by %s', p_old.id, v_own.effect_key, v_own.settled_by),
      detail = jsonb_build_object('job_id', p_old.id, 'status', p_old.status, 'effect_key', v_own.effect_key)::text, hint = 'What was settled is not carried out any more; enqueue a new job if it must be.';
  end if;
  if found and (exists (select from {{schema}}.jobs o where o.id = v_own.owner_job_id)
      or exists (select from {{schema}}.history o where o.id = v_own.owner_job_id and o.generation <> v_own.generation)
      or exists (select from {{schema}}.runs r where r.id = v_own.owner_job_id and r.generation <> v_own.generation)
      or v_own.name like 'compensate:%' and exists (select from {{schema}}.nodes n join {{schema}}.runs m on m.id = n.run_id
          join {{schema}}.runs r on r.id = case when m.items is null then m.id else m.parent_run end
        where n.id = v_own.owner_job_id and split_part(v_own.name, ':', 2) <> r.generation::text)) then
    raise exception using errcode = 'WF012', message = format('job %s carries out the effect %s, whose owner was reopened since', p_old.id, v_own.effect_key),
      detail = jsonb_build_object('job_id', p_old.id, 'status', p_old.status, 'effect_key', v_own.effect_key)::text, hint = 'The owner''s next end has effects of its own.';
  end if;
  select string_agg(format('%s (%s)', e.name, e.status), ', ' order by e.name), jsonb_agg(e.effect_key order by e.name) into v_open, v_keys
    from {{schema}}.effects e where e.owner_job_id = p_old.id and e.generation = p_old.generation and not e.settled;
  if v_open is not null then
    raise exception using errcode = 'WF020', message = format('job %s has effects that are not settled: %s', p_old.id, v_open),
      detail = jsonb_build_object('job_id', p_old.id, 'effects', v_keys)::text,
      hint = 'Wait until they have succeeded, cancel their jobs, or settle them with a reason: taskq effects list --owner ' || p_old.id || '.';
  end if;
  -- The key stays while nothing was undone: under another one the provider would do again what it has done.
  return case when exists (
      select from {{schema}}.effects e where e.owner_job_id = p_old.id and e.generation = p_old.generation and e.settled_how = 'succeeded'
         and (select i.undoes from {{schema}}.effect_intents i where i.id = e.id limit 1))
    then p_old.generation + 1 else p_old.key_generation end;
end $$;
comment on function {{schema}}.reopening({{schema}}.history) is
  'Refuses to reopen a job whose effects are not settled, and a job that carries out an effect which was settled or whose owner was reopened. Returns the key_generation for the reopened job.';

create function {{schema}}.settle_effect(effect_key text, reason text, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_intent {{schema}}.effect_intents;
  v_job {{schema}}.jobs;
  v_status text;
  v_how text;
begin
  if reason is null or btrim(reason) = '' then
    raise exception using errcode = 'WF009', message = 'settling an effect needs a reason', hint = 'Say what you checked or did instead; it goes on the record.';
  end if;
  perform {{schema}}.ensure_today();
  select * into v_intent from {{schema}}.effect_intents i where i.effect_key = effect_key for update;
  if not found then
    raise exception using errcode = 'WF021', message = format('there is no effect %s', effect_key), detail = jsonb_build_object('effect_key', effect_key)::text,
      hint = 'taskq effects list shows their keys; retention may have dropped it.';
  end if;
  select * into v_job from {{schema}}.jobs j where j.id = v_intent.job_id for update;
  if v_job.id is not null and v_job.status not in ('pending', 'held') then
    raise exception using errcode = 'WF012', message = format('the job %s of effect %s is %s', v_job.id, effect_key, v_job.status),
      detail = jsonb_build_object('job_id', v_job.id, 'status', v_job.status)::text,
      hint = case v_job.status when 'unknown' then 'Decide its outcome first: taskq jobs resolve.' else 'Wait for it, or cancel it first.' end;
  end if;
  select e.status, e.settled_how into v_status, v_how from {{schema}}.effects e where e.effect_key = effect_key and e.settled;
  if found then
    raise exception using errcode = 'WF012', message = format('effect %s is settled already (%s)', effect_key, v_how),
      detail = jsonb_build_object('job_id', v_intent.job_id, 'status', v_status)::text, hint = 'There is nothing left to do.';
  end if;
  v_status := coalesce(v_job.status, (select e.status from {{schema}}.effects e where e.effect_key = effect_key));
  if v_job.id is not null then
    perform {{schema}}.finish(v_job, 'cancelled', null, null, jsonb_build_object('type', 'Cancelled', 'message', 'its effect was settled before it started', 'reason', reason));
  end if;
  update {{schema}}.effect_intents i set settled_at = {{schema}}.now(), settled_by = coalesce(actor, session_user), settled_reason = reason where i.id = v_intent.id;
  perform {{schema}}.note('settle_effect', effect_key, actor, reason, jsonb_build_object('job_id', v_intent.job_id, 'was', v_status));
  return 'settled';
end $$;
comment on function {{schema}}.settle_effect(text, text, text) is
  'Declares an effect settled, once and on the record: its job, if it waits, is cancelled, and is not reopened. Refused while the job runs or its outcome is unknown.';

create function {{schema}}.retry_effect(effect_key text, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_variable
declare
  v_intent {{schema}}.effect_intents;
  v_owner {{schema}}.history;
  v_effects jsonb;
  v_job record;
  v_answer text;
  v_of record;
begin
  -- Not locked where there is a job: retry locks that first.
  select * into v_intent from {{schema}}.effect_intents i where i.effect_key = effect_key;
  if not found then
    raise exception using errcode = 'WF021', message = format('there is no effect %s', effect_key), detail = jsonb_build_object('effect_key', effect_key)::text,
      hint = 'taskq effects list shows their keys; retention may have dropped it.';
  end if;
  if v_intent.job_ended is not null then
    raise exception using errcode = 'WF011', message = format('the job %s of effect %s is %s, and not in history any more', v_intent.job_id, effect_key, v_intent.job_ended),
      detail = jsonb_build_object('job_id', v_intent.job_id)::text, hint = 'Do by hand what the effect would have done, then: taskq effects settle.';
  end if;
  if v_intent.job_id is not null then
    v_answer := {{schema}}.retry(v_intent.job_id, reason, actor);
    perform {{schema}}.note('retry_effect', effect_key, actor, reason, jsonb_build_object('answer', v_answer, 'job_id', v_intent.job_id));
    return v_answer;
  end if;
  select * into v_owner from {{schema}}.history h
    where h.id = v_intent.owner_job_id and h.generation = v_intent.generation and h.finished_at >= v_intent.created_at - interval '1 day' for update;
  select * into v_of from {{schema}}.promised_by_run(v_intent);
  if v_of.effects is not null then
    v_owner := v_of.owner;
  end if;
  if v_owner.id is null then
    raise exception using errcode = 'WF011', message = format('the owner %s of effect %s is not in history any more', v_intent.owner_job_id, effect_key),
      detail = jsonb_build_object('job_id', v_intent.owner_job_id)::text, hint = 'Do by hand what the effect would have done, then: taskq effects settle.';
  end if;
  select * into v_intent from {{schema}}.effect_intents i where i.id = v_intent.id for update;
  if v_intent.settled_at is not null or v_intent.job_id is not null or v_intent.fault is distinct from 'broken' then
    raise exception using errcode = 'WF012', message = format('effect %s is %s', effect_key,
        case when v_intent.settled_at is not null then 'settled already' when v_intent.job_id is not null then 'retried already' else coalesce(v_intent.fault, 'without a job') end),
      detail = jsonb_build_object('job_id', v_intent.job_id)::text, hint = 'One that was refused for the length of its chain is only settled: taskq effects settle.';
  end if;
  v_effects := coalesce(v_of.effects, (select p.spec -> 'effects' from {{schema}}.policies p where p.id = v_owner.policy_id));
  if jsonb_typeof(v_effects) is distinct from 'array' then
    raise exception using errcode = 'WF014', message = format('the policy %L of the owner is still missing, or cannot be read', v_owner.policy_id),
      hint = 'Start a worker or client that knows it, or settle the effect: taskq effects settle.';
  end if;
  if v_intent.name = '*' then
    perform {{schema}}.promise(v_owner);
    update {{schema}}.effect_intents i set settled_at = {{schema}}.now(), settled_by = coalesce(actor, session_user),
        settled_reason = 'its policy was there again, and promised anew' where i.id = v_intent.id;
  else
    select j.job_id, j.fingerprint into v_job
      from (select s.spec from {{schema}}.effect_specs(v_effects) s where left(coalesce(v_of.prefix, '') || s.name, 128) = v_intent.name) e
      cross join lateral {{schema}}.effect_job(v_owner, e.spec, effect_key, v_of.line) j;
    update {{schema}}.effect_intents i set job_id = v_job.job_id, fingerprint = v_job.fingerprint, fault = null, error = null where i.id = v_intent.id;
  end if;
  perform {{schema}}.note('retry_effect', effect_key, actor, reason, jsonb_build_object('answer', 'enqueued'));
  return 'enqueued';
end $$;
comment on function {{schema}}.retry_effect(text, text, text) is
  'Gives an effect another go: reopens its failed or cancelled job (reopened), makes a waiting one due (due), or makes the job that a broken one lacks (enqueued).';

create function {{schema}}.prune_effects(p_limit integer default 1000) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_n integer;
begin
  -- A promise that was never kept, nor settled, is not forgotten: not one without a job, nor one whose job has failed.
  delete from {{schema}}.effect_intents e where e.id = any(array(
    select i.id from {{schema}}.effect_intents i
     where i.created_at < {{schema}}.now() - (select s.history_retention from {{schema}}.installation s)
       and (i.settled_at is not null or i.job_ended in ('succeeded', 'cancelled'))
       and not exists (select from {{schema}}.jobs j where j.id in (i.owner_job_id, i.job_id))
       and not exists (select from {{schema}}.history h where h.id = i.owner_job_id)
       and not exists (select from {{schema}}.history h where h.id = i.job_id)
       and not exists (select from {{schema}}.runs r where r.id = i.owner_job_id)
       and not exists (select from {{schema}}.nodes n where n.id = i.owner_job_id)
     order by i.created_at limit p_limit for update skip locked));
  get diagnostics v_n = row_count;
  return v_n;
end $$;
comment on function {{schema}}.prune_effects(integer) is 'Forgets up to p_limit intents that are settled and whose owner and job are both gone, from history and from the runs; what is not settled stays. Called by prune.';

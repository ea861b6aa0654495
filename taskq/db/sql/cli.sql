-- What the command line asks for people and programs: lists with bounds, one job with its record, the worker's own rows.
-- Called by taskq.cli on a connection of its own. Changes only through the functions of the schema, which leave audit rows.

-- name: bounded
-- Ends the statement that takes longer than this, within the transaction.
select set_config('statement_timeout', $1, true);

-- name: enqueue
-- One job by the task's published settings; its id.
select {{schema}}.enqueue(task => $1::text, payload => $2::text::jsonb, queue => $3::text, priority => $4::int,
         run_in => make_interval(secs => $5::double precision), run_at => $6::timestamptz, unique_key => $7::text,
         idempotency_key => $8::text)::text as id;

-- name: has_job
-- Whether a job is there for this session, at work or finished.
select 1 as found from {{schema}}.all_jobs a where a.id = $1::text::uuid;

-- name: unserved
-- The queue of a job that has not finished, unless a live worker serves it.
select j.queue from {{schema}}.jobs j
 where j.id = $1::text::uuid and not exists (
   select from {{schema}}.workers w where w.status = 'live' and j.queue = any (w.queues));

-- name: jobs
-- The newest jobs first: ids are in the order of enqueueing, so both halves walk a primary key backwards and stop at the
-- limit. "since" is an instant, or seconds before now; it means the end of finished jobs, so that it prunes partitions
-- of history, and the making of the others.
with bound as (
  select coalesce($5::timestamptz, {{schema}}.now() - make_interval(secs => $6::double precision)) as since),
unfinished as (
  select j.id, j.status, j.queue, j.task, j.attempt, j.max_attempts, j.claim_epoch, j.run_at, j.created_at,
         null::timestamptz as finished_at, j.held_reason, null::text as error
    from {{schema}}.jobs j
   where ($1::text[] is null or j.status = any ($1::text[])) and ($2::text[] is null or j.queue = any ($2::text[]))
     and ($3::text[] is null or j.task = any ($3::text[]))
     and ((select since from bound) is null or j.created_at >= (select since from bound))
   order by j.id desc limit $4::int),
finished as (
  select h.id, h.status, h.queue, h.task, h.attempt, h.max_attempts, h.claim_epoch, h.run_at, h.created_at,
         h.finished_at, null::text as held_reason, concat_ws(': ', h.error ->> 'type', left(h.error ->> 'message', 200)) as error
    from {{schema}}.history h
   where ($1::text[] is null or h.status = any ($1::text[])) and ($2::text[] is null or h.queue = any ($2::text[]))
     and ($3::text[] is null or h.task = any ($3::text[]))
     and h.finished_at >= coalesce((select since from bound), '-infinity')
   order by h.id desc limit $4::int)
select a.id::text as id, a.status, a.queue, a.task, a.attempt, a.max_attempts, a.claim_epoch, a.run_at, a.created_at,
       a.finished_at, a.held_reason, nullif(a.error, '') as error
  from (select * from unfinished union all select * from finished) a
 order by a.id desc limit $4::int;

-- name: job
-- One job whole. A job cannot end before its id was made, so older partitions of history are left out.
select a.id::text as id, a.status, a.held_reason, a.task, a.queue, a.priority, a.attempt, a.max_attempts, a.recoveries,
       a.retry_afters, a.snoozes, a.releases, a.claim_epoch, a.generation, a.pruned_attempts, a.effect_class, a.policy_id,
       a.worker_id::text as worker_id, w.name as worker, a.created_at, a.run_at, a.deadline, a.claimed_at,
       a.cancel_requested_at, a.finished_at, a.unique_scope, a.unique_key, a.tags, a.meta, a.payload, a.result, a.error
  from {{schema}}.all_jobs a left join {{schema}}.workers w on w.id = a.worker_id
 where a.id = $1::text::uuid
   and (a.finished_at is null or a.finished_at >= {{schema}}.id_time($1::text::uuid) - interval '1 day');

-- name: attempts
-- Every ended attempt of one job, in order.
select a.claim_epoch, a.generation, a.attempt, a.outcome, a.worker_id::text as worker_id, w.name as worker, a.claimed_at,
       a.ended_at, a.error
  from {{schema}}.attempts a left join {{schema}}.workers w on w.id = a.worker_id
 where a.job_id = $1::text::uuid and a.ended_at >= {{schema}}.id_time($1::text::uuid) - interval '1 day'
 order by a.claim_epoch;

-- name: audit
-- What operators did about one job or queue.
select a.at, a.actor, a.action, a.reason, a.details from {{schema}}.audit a where a.subject = $1::text order by a.at;

-- name: cancel
select {{schema}}.cancel($1::text::uuid, $2::text, $3::text) as answer;

-- name: retry
select {{schema}}.retry($1::text::uuid, $2::text, $3::text) as answer;

-- name: resolve
select {{schema}}.resolve($1::text::uuid, $2::boolean, $3::text::jsonb, $4::text, $5::text) as answer;

-- name: queues
-- What waits and runs in each queue, and how many live workers serve it.
select q.queue, q.paused_at, q.due, q.waiting, q.running, q.held, q.unknown, q.oldest_due,
       (select count(*)::int from {{schema}}.workers w where w.status = 'live' and q.queue = any (w.queues)) as workers
  from {{schema}}.queue_counts q order by q.queue;

-- name: known_queues
-- Every queue that something names: a pause, an unfinished job, a task's settings, a worker at work.
select q.name as queue from {{schema}}.queues q union select j.queue from {{schema}}.jobs j
 union select c.queue from {{schema}}.task_config c
 union select unnest(w.queues) from {{schema}}.workers w where w.status in ('live', 'draining') order by 1;

-- name: pause_queue
select {{schema}}.pause_queue($1::text, $2::text, $3::text) as changed;

-- name: resume_queue
select {{schema}}.resume_queue($1::text, $2::text, $3::text) as changed;

-- name: workers
-- Workers with how many jobs each has claimed: those at work, or with $1 the newest of all.
select w.id::text as id, w.name, w.status, w.hostname, w.pid, w.queues, w.tasks, w.concurrency, c.claimed, w.version,
       w.capability_level, w.started_at, w.renewed_at, w.lease_expires_at, w.ended_at
  from {{schema}}.workers w
 cross join lateral (select count(*)::int as claimed from {{schema}}.jobs j where j.claimed_by = w.id) c
 where $1::boolean or w.status in ('live', 'draining')
 order by w.id desc limit $2::int;

-- name: verify
-- Every violation of the laws; "since" is an instant, or seconds before now.
select c.law, c.code, c.job_id::text as job_id, c.detail
  from {{schema}}.check_invariants($1::text,
         coalesce($2::timestamptz, {{schema}}.now() - make_interval(secs => $3::double precision))) c;

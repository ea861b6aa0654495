-- What the command line asks for people and programs: lists with bounds, one job with its record, the worker's own rows.
-- Called by taskq.cli on a connection of its own. Changes only through the functions of the schema, which leave audit rows.

-- name: bounded
-- Ends the statement that takes longer than this, within the transaction.
select set_config('statement_timeout', $1, true);

-- name: enqueue
-- One job by the task's published settings; its id.
select {{schema}}.enqueue(task => $1::text, payload => $2::text::jsonb, queue => $3::text, priority => $4::int,
         run_in => make_interval(secs => $5::double precision), run_at => $6::timestamptz, unique_key => $7::text,
         idempotency_key => $8::text, ordering_key => $9::text)::text as id;

-- name: has_job
-- Whether a job is there for this session, at work or finished.
select 1 as found from {{schema}}.all_jobs a where a.id = $1::text::uuid;

-- name: unserved
-- The queue of a job that has not finished, unless a live worker serves it.
select j.queue from {{schema}}.jobs j
 where j.id = $1::text::uuid and not exists (
   select from {{schema}}.workers w where w.status = 'live' and j.queue = any (w.queues));

-- name: unfinished
-- A part of the queries below: jobs at work that a filter names. $1 statuses, $2 queues, $3 tasks, $4 tags (all of them),
-- $5 workers, $6 since and $7 until (here the making), $8 types of errors (the last failure of those that wait again),
-- $9 reasons why they are held, $10 whether cancelling was requested, $11 whether the deadline has passed, $12 made before,
-- $13 and $14 the first and last id, $15 as of when. A null is no condition; conditions on parameters alone are decided
-- once, when the statement is planned.
select j.id, j.status, j.queue, j.task, j.attempt, j.max_attempts, j.claim_epoch, j.run_at, j.created_at,
       null::timestamptz as finished_at, j.held_reason, j.ordering_key, j.cohort, j.deadline, j.cancel_requested_at, j.claimed_by as worker_id, j.tags,
       (select nullif(concat_ws(': ', l.error ->> 'type', left(l.error ->> 'message', 200)), '')
          from {{schema}}.ledger l
         where l.job_id = j.id and l.ended_at >= {{schema}}.id_time(j.id) - interval '1 day' and l.error is not null
           and j.claim_epoch > 0 and j.status in ('pending', 'held') order by l.claim_epoch desc limit 1) as error
  from {{schema}}.jobs j
 where ($1::text[] is null or j.status = any ($1::text[])) and ($2::text[] is null or j.queue = any ($2::text[]))
   and ($3::text[] is null or j.task = any ($3::text[])) and ($4::text[] is null or j.tags @> $4::text[])
   and ($5::text[] is null or j.claimed_by = any ($5::text[]::uuid[]))
   and ($6::timestamptz is null or j.created_at >= $6::timestamptz)
   and ($7::timestamptz is null or j.created_at < $7::timestamptz)
   and ($8::text[] is null or (
        select l.error ->> 'type' from {{schema}}.ledger l
         where l.job_id = j.id and l.ended_at >= {{schema}}.id_time(j.id) - interval '1 day' and l.error is not null
           and j.claim_epoch > 0 and j.status in ('pending', 'held') order by l.claim_epoch desc limit 1) = any ($8::text[]))
   and ($9::text[] is null or j.held_reason = any ($9::text[]))
   and ($10::boolean is null or (j.cancel_requested_at is not null) = $10::boolean)
   and ($11::boolean is null or coalesce(j.deadline <= {{schema}}.now(), false) = $11::boolean)
   and ($12::timestamptz is null or j.created_at <= $12::timestamptz)
   and ($13::text is null or j.id between $13::text::uuid and $14::text::uuid)
   and ($15::timestamptz is null or j.created_at <= $15::timestamptz)

-- name: finished
-- A part of the queries below: finished jobs that a filter names, with the same parameters; "since" and "until" mean the
-- end, so that partitions of history are left out.
select h.id, h.status, h.queue, h.task, h.attempt, h.max_attempts, h.claim_epoch, h.run_at, h.created_at,
       h.finished_at, null::text as held_reason, h.ordering_key, h.cohort, h.deadline, h.cancel_requested_at, h.worker_id, h.tags,
       nullif(concat_ws(': ', h.error ->> 'type', left(h.error ->> 'message', 200)), '') as error
  from {{schema}}.history h
 where ($1::text[] is null or $1::text[] && array['succeeded', 'failed', 'cancelled'] and h.status = any ($1::text[]))
   and ($1::text[] is null or 'succeeded' = any ($1::text[]) or h.status <> 'succeeded')
   and ($2::text[] is null or h.queue = any ($2::text[])) and ($3::text[] is null or h.task = any ($3::text[]))
   and ($4::text[] is null or h.tags @> $4::text[]) and ($5::text[] is null or h.worker_id = any ($5::text[]::uuid[]))
   and ($6::timestamptz is null or h.finished_at >= $6::timestamptz)
   and ($7::timestamptz is null or h.finished_at < $7::timestamptz)
   and ($8::text[] is null or h.status <> 'succeeded' and h.error ->> 'type' = any ($8::text[]))
   and $9::text[] is null and ($10::boolean is null or (h.cancel_requested_at is not null) = $10::boolean)
   and ($11::boolean is null or coalesce(h.deadline <= h.finished_at, false) = $11::boolean)
   and ($12::timestamptz is null or h.created_at <= $12::timestamptz)
   and ($13::text is null or h.id between $13::text::uuid and $14::text::uuid)
   and ($15::timestamptz is null or h.finished_at <= $15::timestamptz)

-- name: newest_jobs
-- Ids are in the order of enqueueing, so both halves walk a primary key and stop at the limit.
select a.id::text as id, a.status, a.queue, a.task, a.attempt, a.max_attempts, a.claim_epoch, a.run_at, a.created_at,
       a.finished_at, a.held_reason, a.ordering_key, a.cohort, a.deadline, a.cancel_requested_at, a.worker_id::text as worker_id, a.tags, a.error
  from (({{unfinished}} order by j.id desc limit $16::int) union all ({{finished}} order by h.id desc limit $16::int)) a
 order by a.id desc limit $16::int;

-- name: oldest_jobs
-- The same from the other end.
select a.id::text as id, a.status, a.queue, a.task, a.attempt, a.max_attempts, a.claim_epoch, a.run_at, a.created_at,
       a.finished_at, a.held_reason, a.ordering_key, a.cohort, a.deadline, a.cancel_requested_at, a.worker_id::text as worker_id, a.tags, a.error
  from (({{unfinished}} order by j.id limit $16::int) union all ({{finished}} order by h.id limit $16::int)) a
 order by a.id limit $16::int;

-- name: count_jobs
-- How many jobs a filter names, by status.
select a.status, count(*)::int as n from (({{unfinished}}) union all ({{finished}})) a group by a.status order by a.status;

-- name: next_unfinished
-- A batch of jobs at work, by id: those after $16, at most $17.
select m.id::text as id, null::timestamptz as finished_at
  from ({{unfinished}} and j.id > $16::text::uuid order by j.id limit $17::int) m;

-- name: next_finished
-- A batch of jobs that failed or were cancelled, in the order of an index: those after the end $16 and the id $17, at most $18.
select m.id::text as id, m.finished_at
  from ({{finished}} and h.status <> 'succeeded' and h.finished_at >= $16::timestamptz
          and (h.finished_at, h.id) > ($16::timestamptz, $17::text::uuid)
         order by h.finished_at, h.id limit $18::int) m;

-- name: utc_day
select ($1::timestamptz at time zone 'UTC')::date as day;

-- name: tail_places
-- How many blocks the partitions of a day have: what ends from now on stands behind them, but for space that was freed.
select coalesce(pg_relation_size(to_regclass(format('{{schema}}.history_%s', to_char($1::date, 'YYYYMMDD'))))
                / current_setting('block_size')::int, 0)::int as history,
       coalesce(pg_relation_size(to_regclass(format('{{schema}}.ledger_%s', to_char($1::date, 'YYYYMMDD'))))
                / current_setting('block_size')::int, 0)::int as ledger;

-- name: tail_history
-- Jobs that finished on the day $1 since $2, from the block $3 on, the newest $6. The partition is append-only, so its end
-- is read by place: there is no index on the time of the end, and none is worth its price for this.
select h.id::text as id, h.claim_epoch, coalesce(h.outcome, h.status) as event, h.status, h.queue, h.task, w.name as worker,
       h.finished_at as at, extract(epoch from h.finished_at - h.claimed_at)::float8 as seconds, h.error ->> 'type' as error
  from {{schema}}.history h left join {{schema}}.workers w on w.id = h.worker_id
 where h.finished_at >= $1::date::timestamp at time zone 'UTC'
   and h.finished_at < ($1::date + 1)::timestamp at time zone 'UTC' and h.finished_at >= $2::timestamptz
   and h.ctid >= $3::text::tid and ($4::text[] is null or h.queue = any ($4::text[]))
   and ($5::text[] is null or h.task = any ($5::text[]))
 order by h.finished_at desc, h.id desc limit $6::int;

-- name: tail_ledger
-- Attempts that ended on the day $1 since $2 and were not the last of their job, with the same parameters.
select l.job_id::text as id, l.claim_epoch, l.outcome as event, j.status, j.queue, j.task, w.name as worker,
       l.ended_at as at, extract(epoch from l.ended_at - l.claimed_at)::float8 as seconds, l.error ->> 'type' as error
  from {{schema}}.ledger l
  left join {{schema}}.all_jobs j on j.id = l.job_id and (j.finished_at is null or j.finished_at >= $2::timestamptz)
  left join {{schema}}.workers w on w.id = l.worker_id
 where l.ended_at >= $1::date::timestamp at time zone 'UTC' and l.ended_at < ($1::date + 1)::timestamp at time zone 'UTC'
   and l.ended_at >= $2::timestamptz and l.ctid >= $3::text::tid
   and ($4::text[] is null or j.queue = any ($4::text[])) and ($5::text[] is null or j.task = any ($5::text[]))
 order by l.ended_at desc, l.job_id desc limit $6::int;

-- name: tail_running
-- Attempts that run and were claimed since $1, the newest $4.
select j.id::text as id, j.claim_epoch, 'started' as event, j.status, j.queue, j.task, w.name as worker, j.claimed_at as at,
       null::float8 as seconds, null::text as error
  from {{schema}}.jobs j left join {{schema}}.workers w on w.id = j.claimed_by
 where j.claimed_by is not null and j.claimed_at >= $1::timestamptz and ($2::text[] is null or j.queue = any ($2::text[]))
   and ($3::text[] is null or j.task = any ($3::text[]))
 order by j.claimed_at desc, j.id desc limit $4::int;

-- name: steer_many
-- One batch of a bulk action, with its rows of audit.
select s.job_id::text as id, s.answer, s.why from {{schema}}.steer_many($1::text, $2::text[]::uuid[], $3::text, $4::text, $5::text::jsonb) s;

-- name: lock_timeout
-- Gives up a wait for a lock after so long, within the transaction.
select set_config('lock_timeout', $1, true);

-- name: now
-- The database's clock.
select {{schema}}.now() as now;

-- name: like_id
-- The jobs whose ids lie between two, at most $3.
select a.id::text as id, a.status, a.task, a.created_at from {{schema}}.all_jobs a
 where a.id between $1::text::uuid and $2::text::uuid
   and (a.finished_at is null or a.finished_at >= {{schema}}.id_time($1::text::uuid) - interval '1 day')
 order by a.id limit $3::int;

-- name: job_end
-- Whether a job has ended, and how. It cannot end before its id was made, so older partitions of history are left out.
select a.finished_at, a.status, a.result, a.error from {{schema}}.all_jobs a
 where a.id = $1::text::uuid
   and (a.finished_at is null or a.finished_at >= {{schema}}.id_time($1::text::uuid) - interval '1 day');

-- name: job
-- One job whole. A job cannot end before its id was made, so older partitions of history are left out.
select a.id::text as id, a.status, a.held_reason, a.task, a.queue, a.priority, a.attempt, a.max_attempts, a.recoveries,
       a.retry_afters, a.snoozes, a.releases, a.claim_epoch, a.generation, a.pruned_attempts, a.effect_class, a.policy_id,
       a.worker_id::text as worker_id, w.name as worker, a.created_at, a.run_at, a.deadline, a.claimed_at,
       a.cancel_requested_at, a.finished_at, a.unique_scope, a.unique_key, a.ordering_key, a.cohort, a.checkpoint_version, a.tags,
       (select s.job_id::text from {{schema}}.steps s where s.child_job = a.id) as parent_job,
       a.run_id::text as run_id, a.run_epoch, case when a.run_id is not null then coalesce(r.workflow, a.meta #>> '{run,workflow}') end as workflow,
       case when a.run_id is not null then coalesce({{schema}}.node_name(r.items, k.name, n.ix), a.meta #>> '{run,node}') end as node, a.meta, a.payload, a.checkpoint, a.result, a.error
  from {{schema}}.all_jobs a left join {{schema}}.workers w on w.id = a.worker_id
  left join {{schema}}.nodes n on n.id = a.id and n.run_id = a.run_id
  left join {{schema}}.runs r on r.id = n.run_id
  left join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = {{schema}}.place_in_plan(r.items, n.ix)
 where a.id = $1::text::uuid
   and (a.finished_at is null or a.finished_at >= {{schema}}.id_time($1::text::uuid) - interval '1 day');

-- name: line
-- For an unfinished job with an ordering key: its place among those that wait, how many those are, who has the turn, and
-- what halts the key for it.
select case when j.status = 'held' then (select count(*)::int from {{schema}}.jobs o
         where o.ordering_key = j.ordering_key and o.status = 'held' and o.id <= j.id) end as place,
       (select count(*)::int from {{schema}}.jobs o where o.ordering_key = j.ordering_key and o.status = 'held') as waiting,
       t.id::text as turn, t.status as turn_status,
       (select min(h.job_id::text) from {{schema}}.ordering_halts h where h.key = j.ordering_key and h.job_id < j.id) as halted_by
  from {{schema}}.jobs j left join {{schema}}.jobs t on t.ordering_key = j.ordering_key
   and (t.status in ('pending', 'running') or t.status = 'unknown' and t.ordering_halt)
 where j.id = $1::text::uuid and j.ordering_key is not null;

-- name: slots
-- For an unfinished job of a cohort: how many of its jobs run, and how many may.
select j.status, coalesce(l.operator_limit, l.code_limit) as "limit", l.operator_limit is not null as by_operator,
       (select count(*)::int from {{schema}}.jobs r where r.cohort = j.cohort and r.status = 'running') as running
  from {{schema}}.jobs j left join {{schema}}.limits l on l.name = j.cohort
 where j.id = $1::text::uuid and j.cohort is not null;

-- name: limits
-- Cohorts, or the one named $1, the most wanted first.
select c.name as cohort, c.effective_limit as "limit", c.running::int as running, c.waiting::int as waiting, c.code_limit,
       c.operator_limit, c.set_by, c.reason, c.set_at, c.code_changed_at
  from {{schema}}.cohorts c where $1::text is null or c.name = $1::text
 order by c.waiting desc, c.name limit $2::int;

-- name: set_limit
select {{schema}}.set_limit($1::text, $2::int, $3::text, $4::text) as answer;

-- name: clear_limit
select {{schema}}.clear_limit($1::text, $2::text, $3::text) as answer;

-- name: orderings
-- Ordering keys in use, with $1 only those that are halted, the longest lines first.
select l.ordering_key, l.job_id::text as job_id, l.status, l.task, l.queue, l.waiting::int as waiting,
       l.first_waiting::text as first_waiting, l.waiting_since, l.halted_by::text as halted_by, l.halted_at
  from {{schema}}.ordering_lines l where not $1::boolean or l.halted_by is not null or l.status = 'unknown'
 order by l.waiting desc, l.ordering_key limit $2::int;

-- name: line_of_key
-- One key's line.
select l.job_id::text as job_id, l.status, l.waiting::int as waiting from {{schema}}.ordering_lines l where l.ordering_key = $1::text;

-- name: resume_ordering
select {{schema}}.resume_ordering($1::text, $2::text, $3::text) as answer;

-- name: attempts
-- Every ended attempt of one job, in order.
select a.claim_epoch, a.generation, a.attempt, a.outcome, a.worker_id::text as worker_id, w.name as worker, a.claimed_at,
       a.ended_at, a.error
  from {{schema}}.attempts a left join {{schema}}.workers w on w.id = a.worker_id
 where a.job_id = $1::text::uuid and a.ended_at >= {{schema}}.id_time($1::text::uuid) - interval '1 day'
 order by a.claim_epoch;

-- name: steps
-- The recorded steps of one job, those of earlier generations included, in the order in which they were recorded.
select s.generation, s.kind, s.name, s.occurrence, s.claim_epoch, s.recorded_at, s.until, s.effect_started_at, s.done, s.value, s.error, s.child_job::text as child_job,
       s.child_run::text as child_run, s.current, s.left_out
  from {{schema}}.job_steps s where s.job_id = $1::text::uuid order by s.generation, s.recorded_at, s.name, s.occurrence;

-- name: signals
-- The signals of one job, in the order in which they were sent.
select g.generation, g.name, g.key, g.sent_at, g.taken_at, g.refused_at, g.refused_why, g.payload
  from {{schema}}.signals g where g.job_id = $1::text::uuid order by g.id;

-- name: audit
-- What operators did about one job or queue.
select a.at, a.actor, a.action, a.reason, a.details from {{schema}}.audit a where a.subject = $1::text order by a.at;

-- name: audits
-- What operators did, the newest first: $1 actions, $2 subjects, $3 actors, $4 since, $5 at most.
select a.at, a.actor, a.db_user, a.action, a.subject, a.reason, a.details from {{schema}}.audit a
 where ($1::text[] is null or a.action = any ($1::text[])) and ($2::text[] is null or a.subject = any ($2::text[]))
   and ($3::text[] is null or a.actor = any ($3::text[])) and ($4::timestamptz is null or a.at >= $4::timestamptz)
 order by a.id desc limit $5::int;

-- name: some_effects
-- A part of the queries below.
select e.effect_key, e.owner_job_id::text as owner_job_id, e.owner_task, e.generation, e.name, e.on_status, e.task,
       e.job_id::text as job_id, e.status, e.error, e.depth, e.settled, e.settled_how, e.settled_at, e.settled_by,
       e.settled_reason, e.created_at
  from {{schema}}.effects e

-- name: effects
-- Effects, the newest first: $1 of this owner, $2 carried out by one of these tasks, $3 at most.
{{some_effects}} where ($1::text is null or e.owner_job_id = $1::text::uuid) and ($2::text[] is null or e.task = any ($2::text[]))
 order by e.id desc limit $3::int;

-- name: unsettled_effects
-- The same of those that are not settled, found by what is unfinished, has failed or could not be made: most are settled.
with open_ones as (
  select i.id from {{schema}}.jobs j join {{schema}}.effect_intents i on i.job_id = j.id
   where i.settled_at is null
  union all
  select i.id from {{schema}}.history h join {{schema}}.effect_intents i on i.job_id = h.id
   where h.status = 'failed' and i.settled_at is null
  union all
  select i.id from {{schema}}.effect_intents i where (i.fault is not null or i.job_ended = 'failed') and i.settled_at is null)
{{some_effects}} where e.id in (select o.id from open_ones o) and not e.settled
   and ($1::text is null or e.owner_job_id = $1::text::uuid) and ($2::text[] is null or e.task = any ($2::text[]))
 order by e.id desc limit $3::int;

-- name: effect
-- One effect, by its key, with the run that its job has started, if it starts one.
select s.*, r.id::text as run_id, r.workflow as run_workflow, r.status as run_status
  from ({{some_effects}} where e.effect_key = $1::text) s left join {{schema}}.runs r on r.started_by = s.job_id::uuid;

-- name: job_effects
-- What the ends of one job have caused.
{{some_effects}} where e.owner_job_id = $1::text::uuid order by e.id;

-- name: settle_effect
select {{schema}}.settle_effect($1::text, $2::text, $3::text) as answer;

-- name: retry_effect
select {{schema}}.retry_effect($1::text, $2::text, $3::text) as answer;

-- name: runs
-- Runs, the newest first: $1 of these workflows, $2 in one of these statuses, $3 with this key, $4 at most.
select r.id::text as id, r.workflow, r.run_key, r.status, case when r.counted_from is null then coalesce(r.items, p.nodes) else r.written end as node_count, r.open_nodes, r.run_epoch, r.generation, r.created_at,
       r.cancel_requested_at, r.finished_at, r.parent_run::text as parent, u.code as paused_code, u.actor as paused_by, u.since as paused_since, r.error
  from {{schema}}.runs r join {{schema}}.plans p on p.hash = r.plan_hash left join {{schema}}.run_pauses u on u.run_id = r.id
 where ($1::text[] is null or r.workflow = any ($1::text[])) and ($2::text[] is null or r.status = any ($2::text[]))
   and ($3::text is null or r.run_key = $3::text)
 order by r.id desc limit $4::int;

-- name: run
-- One run whole.
select r.id::text as id, r.workflow, r.run_key, r.status, r.plan_hash, case when r.counted_from is null then coalesce(r.items, p.nodes) else r.written end as node_count, r.open_nodes, p.on_failure, r.scheduling, r.run_epoch,
       r.parent_run::text as parent, o.workflow as parent_workflow, {{schema}}.node_name(o.items, k.name, n.ix) as parent_node, r.started_by::text as started_by, r.generation, r.created_at, r.cancel_requested_at, r.stopping_at, r.finished_at, r.sequence, r.receipts as receipts_kept, r.items, r.at_once,
       u.code as paused_code, u.reason as paused_reason, u.actor as paused_by, u.since as paused_since, u.running as paused_running, u.held as paused_held, u.resume::text as resume, u.incident::text as paused_incident,
       b.run_id::text as work_budget_of, b.budget as work_budget, b.begun as work_begun,
       r.meta, r.input, r.result, r.error
  from {{schema}}.runs r left join {{schema}}.plans p on p.hash = r.plan_hash left join {{schema}}.paused_runs u on u.run_id = r.id
  left join {{schema}}.work_budgets b on b.run_id = r.budget_of
  left join {{schema}}.runs o on o.id = r.parent_run left join {{schema}}.nodes n on n.id = r.parent_node
  left join {{schema}}.plan_nodes k on k.plan_hash = o.plan_hash and k.ix = {{schema}}.place_in_plan(o.items, n.ix)
 where r.id = $1::text::uuid;

-- name: run_end
-- Whether a run has ended, and how.
select r.finished_at, r.status, r.result, r.error from {{schema}}.runs r where r.id = $1::text::uuid;

-- name: run_nodes
-- The nodes of a run as they stand, in the order of its plan, from number $2 on, $3 at most; with how far each map, and each loop, is.
select t.ix, t.name, t.task, t.status, t.held_reason, t.attempt, t.claim_epoch, t.job_id::text as job_id,
       t.worker_id::text as worker_id, t.ready_at, t.finished_at, t.blocked_by, t.waits_for, t.result, t.error,
       t.child_run::text as child_run, t.child_status, case when t.child_run is not null then (
         select pg_catalog.jsonb_build_object('items', m.items, 'at_once', m.at_once, 'waiting', m.waiting + m.unwritten, 'active', m.active,
             'succeeded', m.succeeded, 'failed', m.failed, 'cancelled', m.cancelled, 'pages', m.pages, 'source', m.source)
           from {{schema}}.map_progress m where m.run_id = t.run_id and m.ix = t.ix) end as map,
       case when t.child_run is not null then (
         select pg_catalog.jsonb_build_object('rounds', l.rounds, 'most_rounds', l.most_rounds, 'within', l.within, 'counted', l.counted, 'held', l.held)
           from {{schema}}.loop_progress l where l.run_id = t.run_id and l.ix = t.ix) end as loop,
       (select n.item from {{schema}}.nodes n where n.id = t.job_id) as item, w.waits_for as ready_for, w.of as ready_of, w.place,
       (select pg_catalog.jsonb_build_object('id', i.id, 'code', i.code, 'status', i.status, 'message', i.fault ->> 'message') from {{schema}}.incidents i
         where i.job_id = t.job_id and i.is_current and t.status in ('pending', 'held', 'preparing') limit 1) as incident
  from {{schema}}.run_tree t left join {{schema}}.ready_nodes w on w.job_id = t.job_id and t.status in ('pending', 'waiting') where t.run_id = $1::text::uuid and t.ix >= $2::int order by t.ix limit $3::int;

-- name: run_signals
-- The signals that were sent to a run, in that order, and what became of each.
select s.name, s.key, s.sent_at, s.state, s.node, s.job_id::text as job_id, s.node_run::text as node_run, s.taken_at, s.refused_at, s.refused_why, s.payload
  from {{schema}}.run_signals s where s.run_id = $1::text::uuid order by s.id;

-- name: run_waits
-- What the nodes of a run wait for, the longest first.
select {{schema}}.node_name(r.items, k.name, n.ix) as node, w.name as signal, w.job_id::text as job_id, w.since, w.until
  from {{schema}}.waiting_for_signals w
  join {{schema}}.nodes n on n.id = w.job_id join {{schema}}.runs r on r.id = n.run_id join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = {{schema}}.place_in_plan(r.items, n.ix)
 where w.run_id = $1::text::uuid and w.status = 'held' order by w.since, w.job_id;

-- name: run_edges
-- The edges of a run's plan.
select e.source, e.target, e.policy, e.arm, e.merge
  from {{schema}}.runs r join {{schema}}.plan_edges e on e.plan_hash = r.plan_hash
 where r.id = $1::text::uuid order by e.target, e.source, e.n;

-- name: receipts
-- The receipts that are there under a run's id, with the name of the node that each is about.
select c.sequence, c.at, c.kind, c.node, {{schema}}.node_name(r.items, k.name, c.node) as name, c.n, c.claim_epoch, c.status
  from {{schema}}.receipts c
  left join {{schema}}.runs r on r.id = c.run_id left join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = {{schema}}.place_in_plan(r.items, c.node)
 where c.run_id = $1::text::uuid order by c.sequence;

-- name: receipt_faults
-- What is wrong with a run's receipts, by the rule of check_runs and under its codes.
with ring as (
  select count(*) as have, coalesce(min(c.sequence), 0) as low, coalesce(max(c.sequence), 0) as high,
         coalesce(bool_or(c.sequence = 1 and c.kind <> 'admitted'), false) as wrong_first
    from {{schema}}.receipts c where c.run_id = $1::text::uuid)
select f.code, f.detail
  from ring left join {{schema}}.runs r on r.id = $1::text::uuid
 cross join lateral (values
   ('receipts_missing', r.id is not null and (r.sequence = 0 or ring.have <> least(r.sequence, r.receipts) or ring.high <> r.sequence
       or ring.low <> r.sequence - ring.have + 1),
     format('sequence %s, %s receipts from %s to %s, %s are kept', r.sequence, ring.have, ring.low, ring.high, r.receipts)),
   ('receipts_first_differs', ring.wrong_first, 'its first receipt is not its admission'),
   ('receipt_of_no_run', r.id is null and ring.have > 0, format('%s receipts, and no such run', ring.have))) f(code, wrong, detail)
 where f.wrong
union all
select 'receipts_reordered', case when b.at < a.at - interval '1 minute'
         then format('receipt %s was written before receipt %s', b.sequence, a.sequence) else format('receipt %s is not as its run wrote it there', a.sequence) end
  from {{schema}}.runs r join {{schema}}.receipts a on a.run_id = r.id
  left join {{schema}}.receipts b on b.run_id = a.run_id and b.sequence = a.sequence + 1
 where r.id = $1::text::uuid and (b.at < a.at - interval '1 minute'
   or a.sequence <= r.sequence and (a.sequence > 1 or a.kind = 'admitted')
     and a.seal is distinct from {{schema}}.receipt_seal(a.run_id, a.sequence, a.kind, a.node, a.n, a.claim_epoch, a.status));

-- name: run_effects
-- What the ends of a run and of its nodes have caused, compensations among them; a map's are those of its items.
select {{schema}}.node_name(r.items, k.name, n.ix) as node, s.* from ({{some_effects}} where e.owner_job_id = any (array(
     select n.id from {{schema}}.nodes n where n.run_id = $1::text::uuid union all select $1::text::uuid
     union all select n.id from {{schema}}.runs c join {{schema}}.nodes n on n.run_id = c.id where c.parent_run = $1::text::uuid and c.items is not null))) s
  left join {{schema}}.nodes n on n.id::text = s.owner_job_id
  left join {{schema}}.runs r on r.id = n.run_id
  left join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = {{schema}}.place_in_plan(r.items, n.ix)
 order by s.created_at, s.effect_key;

-- name: cancel_run
select {{schema}}.cancel_run($1::text::uuid, $2::text, $3::text) as answer;

-- name: pause_run
select {{schema}}.pause_run($1::text::uuid, $2::text, $3::text, $4::text) as answer;

-- name: resume_run
select {{schema}}.resume_run($1::text::uuid, $2::text, $3::text) as answer;

-- name: set_work_budget
select {{schema}}.set_work_budget($1::text::uuid, $2::bigint, $3::text, $4::text) as answer;

-- name: grant_recovery
select {{schema}}.grant_recovery($1::text::uuid, $2::text, $3::text, $4::text::uuid) as answer;

-- name: incidents
-- What holds up jobs, the last seen first: $1 of nodes of this run, $2 of this job, $3 those that are resolved too, $4 at most.
select i.id::text as id, case when o.incident_id is null then 'resolved' else i.status end as status, i.code, coalesce(o.task, h.task) as task, i.job_id::text as job_id, i.run_id::text as run_id, i.phase,
       i.fingerprint, i.fault, i.failures, i.launches, i.grants, i.bound, i.is_current, i.opened_at, i.seen_at, i.resolved_at, o.command
  from {{schema}}.incidents i
  left join {{schema}}.open_incidents o on o.incident_id = i.id
  left join lateral (select h.task from {{schema}}.history h where h.id = i.job_id order by h.finished_at desc limit 1) h on o.incident_id is null
 where ($1::text is null or i.run_id = $1::text::uuid) and ($2::text is null or i.job_id = $2::text::uuid)
   and ($3::boolean or o.incident_id is not null)
 order by i.seen_at desc, i.id desc limit $4::int;

-- name: current_incidents
-- The incidents of a run that wait for a grant, or have one that is not used yet.
select o.incident_id::text as id from {{schema}}.open_incidents o where o.run_id = $1::text::uuid and o.is_current and o.status in ('exhausted', 'granted') order by o.seen_at, o.incident_id;

-- name: incident
-- One incident.
select i.id::text as id, case when o.incident_id is null then 'resolved' else i.status end as status, i.code, i.phase, o.task, i.job_id::text as job_id, o.job_status, o.held_reason, i.run_id::text as run_id, o.workflow, o.run_status,
       i.generation, i.is_current and o.incident_id is not null as is_current, i.fingerprint, i.failures, i.launches, i.grants, i.bound, i.opened_at, i.seen_at, i.resolved_at, i.fault, o.command
  from {{schema}}.incidents i left join {{schema}}.open_incidents o on o.incident_id = i.id where i.id = $1::text::uuid;

-- name: incident_events
-- What became of an incident.
select e.n, e.at, e.kind, e.claim_epoch, e.actor, e.details from {{schema}}.incident_events e where e.incident_id = $1::text::uuid order by e.n;

-- name: retry_run
select {{schema}}.retry_run($1::text::uuid, $2::text, $3::text) as answer;

-- name: send_run_signal
-- Sends a signal to a run: given, kept, or already.
select {{schema}}.send_run_signal($1::text::uuid, $2::text, $3::text::jsonb, $4::text) as answer;

-- name: send_signal
-- Sends a signal to a job: sent, or already.
select {{schema}}.send_signal($1::text::uuid, $2::text, $3::text::jsonb, $4::text) as answer;

-- name: cancel
select {{schema}}.cancel($1::text::uuid, $2::text, $3::text) as answer;

-- name: retry
select {{schema}}.retry($1::text::uuid, $2::text, $3::text) as answer;

-- name: resolve
select {{schema}}.resolve($1::text::uuid, $2::boolean, $3::text::jsonb, $4::text, $5::text) as answer;

-- name: resolve_attempt
select {{schema}}.resolve_attempt($1::text::uuid, $2::bigint, $3::boolean, $4::text::jsonb, $5::text, $6::text) as answer;

-- name: reconcile
select r.answer, r.reconcile_job::text as reconcile_job from {{schema}}.reconcile($1::text::uuid, $2::text, $3::text) r;

-- name: unknown_outcomes
-- Unknown outcomes of the tasks $1, unknown for over $2 seconds, the oldest first, at most $3.
select u.job_id::text as job_id, u.task, u.queue, u.claim_epoch, u.worker_id::text as worker_id, u.worker, u.claimed_at,
       u.effect_started_at, u.cancel_requested_at, u.since, u.reason, u.reconcile_job::text as reconcile_job,
       u.reconcile_status, u.reconcile_error, u.step
  from {{schema}}.unknown_outcomes u
 where ($1::text[] is null or u.task = any ($1::text[]))
   and ($2::double precision is null or u.since < {{schema}}.now() - make_interval(secs => $2::double precision))
 order by u.since, u.job_id limit $3::int;

-- name: unknown_outcome
-- One of them.
select u.job_id::text as job_id, u.task, u.queue, u.claim_epoch, u.worker, u.since, u.reason, u.cancel_requested_at,
       u.reconcile_status, u.step
  from {{schema}}.unknown_outcomes u where u.job_id = $1::text::uuid;

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
-- Workers with how many jobs each holds now: those at work, or with $1 the newest of all.
select w.id::text as id, w.name, w.status, w.hostname, w.pid, w.queues, w.tasks, w.concurrency, c.holds, w.version,
       w.capability_level, w.started_at, w.renewed_at, w.lease_expires_at, w.ended_at
  from {{schema}}.workers w
 cross join lateral (select count(*)::int as holds from {{schema}}.jobs j where j.claimed_by = w.id) c
 where $1::boolean or w.status in ('live', 'draining')
 order by w.id desc limit $2::int;

-- name: find_workers
-- Workers of a name or an id, those at work first.
select w.id::text as id, w.name, w.status, w.hostname, w.pid, w.queues, w.tasks, w.concurrency, c.holds, w.version,
       w.capability_level, w.started_at, w.renewed_at, w.lease, w.lease_expires_at, w.ended_at
  from {{schema}}.workers w
 cross join lateral (select count(*)::int as holds from {{schema}}.jobs j where j.claimed_by = w.id) c
 where w.name = $1::text or w.id::text = lower($1::text)
 order by (w.status in ('live', 'draining')) desc, w.id desc limit 100;

-- name: worker_ids
-- Every worker of a name or an id.
select w.id::text as id from {{schema}}.workers w where w.name = $1::text or w.id::text = lower($1::text);

-- name: claimed_jobs
-- What a worker has claimed, the longest first.
select j.id::text as id, j.status, j.task, j.queue, j.claim_epoch, j.claimed_at, j.cancel_requested_at
  from {{schema}}.jobs j where j.claimed_by = $1::text::uuid order by j.claimed_at, j.id limit $2::int;

-- name: drain
select {{schema}}.drain($1::text::uuid, $2::text, $3::text) as answer;

-- name: names
-- For the completion of a shell: queues and tasks that begin so.
select n.name from (select q.name, 'queue' as kind from {{schema}}.queues q
  union select c.queue, 'queue' from {{schema}}.task_config c union select c.task, 'task' from {{schema}}.task_config c) n
 where n.kind = $1::text and starts_with(n.name, $2::text) order by n.name limit 100;

-- name: verify
-- Every violation of the laws; "since" is an instant, or seconds before now.
select c.law, c.code, c.job_id::text as job_id, c.detail
  from {{schema}}.check_invariants($1::text,
         coalesce($2::timestamptz, {{schema}}.now() - make_interval(secs => $3::double precision))) c;

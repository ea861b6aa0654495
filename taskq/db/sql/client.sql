-- What applications send: enqueue, wait, look, cancel. Called by taskq.client on the caller's connection or on the
-- application's own. JSON and ids travel as text where a connection is not ours: its owner may have set codecs of
-- their own for json and uuid.

-- name: enqueue_many
-- Enqueues a batch in one statement; one row for each job, in input order.
select e.job_id, e.inserted
  from {{schema}}.enqueue_many($1::text::jsonb, $2::int[], $3::text[], $4::text[], $5::text[], $6::text, $7::text[]) e;

-- name: ensure_policy
-- Stores a policy once; in a transaction of its own, so that the caller's open one blocks nobody.
select {{schema}}.ensure_policy($1::text, $2::int, $3::text::jsonb);

-- name: ensure_limit
-- The limit of a cohort, where nobody has said one; in a transaction of its own, too.
select {{schema}}.ensure_limit($1::text, $2::int);

-- name: outcome
-- How a job stands, in one snapshot: it is in exactly one of the two tables. A job cannot end before its id was made,
-- give or take a step of the clock; the bound keeps older partitions of history out.
select h.status, h.result::text as result, h.error::text as error, true as finished, h.payload is not null as kept
  from {{schema}}.history h
 where h.id = $1::text::uuid and h.finished_at >= {{schema}}.id_time($1::text::uuid) - interval '1 day'
union all
select j.status, null, null, false, true from {{schema}}.jobs j where j.id = $1::text::uuid;

-- name: get
-- All about one job, in one snapshot; the same bound on history.
select a.id::text as id, a.task, a.queue, a.status, a.held_reason, a.priority, a.attempt, a.max_attempts, a.recoveries, a.retry_afters,
       a.snoozes, a.releases, a.claim_epoch, a.generation, a.effect_class, a.policy_id, a.worker_id::text as worker_id, a.created_at,
       a.run_at, a.deadline, a.claimed_at, a.cancel_requested_at, a.finished_at, a.unique_scope, a.unique_key, a.ordering_key, a.cohort, a.tags,
       a.payload::text as payload, a.result::text as result, a.error::text as error, a.meta::text as meta
  from {{schema}}.all_jobs a
 where a.id = $1::text::uuid
   and (a.finished_at is null or a.finished_at >= {{schema}}.id_time($1::text::uuid) - interval '1 day');

-- name: effects
-- The effects of a job, the newest first, as EffectInfo.from_row reads them.
select e.effect_key, e.owner_job_id::text, e.generation, e.name, e.on_status, e.task, e.job_id::text, e.status, e.error::text,
       e.settled, e.settled_how, e.settled_at, e.settled_by, e.settled_reason, e.created_at
  from {{schema}}.effects e where e.owner_job_id = $1::text::uuid order by e.id desc;

-- name: send_run_signal
-- Sends a signal to a run: given, kept, or already.
select {{schema}}.send_run_signal($1::text::uuid, $2::text, $3::text::jsonb, $4::text);

-- name: send_signal
-- Sends a signal to a job: sent, or already.
select {{schema}}.send_signal($1::text::uuid, $2::text, $3::text::jsonb, $4::text);

-- name: cancel
-- Cancels a job: cancelled, requested, finished, unknown or not_found.
select {{schema}}.cancel($1::text::uuid, $2::text, $3::text);

-- name: retry
-- Reopens a finished job (reopened) or makes a waiting one due (due).
select {{schema}}.retry($1::text::uuid, $2::text, $3::text);

-- name: resolve
-- Decides an unknown outcome: succeeded, cancelled or pending.
select {{schema}}.resolve($1::text::uuid, $2::boolean, $3::text::jsonb, $4::text, $5::text);

-- name: resolve_attempt
-- The same for one attempt; another than the open one is refused.
select {{schema}}.resolve_attempt($1::text::uuid, $2::bigint, $3::boolean, $4::text::jsonb, $5::text, $6::text);

-- name: answer_reconcile
-- What a hook has answered about an attempt: succeeded, cancelled, pending, or failed where that was once too often.
select {{schema}}.answer_reconcile($1::text::uuid, $2::bigint, $3::boolean, $4::text::jsonb, $5::text, $6::text, $7::text);

-- name: open_question
-- What a hook is told of an attempt whose outcome is unknown, $4 being the step that it answers for, null for the whole
-- body; no row if that is not unknown, or is of another task.
select j.payload::text as payload, j.attempt, j.generation, j.key_generation, coalesce(u.since, j.claimed_at) as since,
       coalesce(u.reason, 'not_told') as reason, s.occurrence
  from {{schema}}.jobs j left join {{schema}}.unknowns u on u.job_id = j.id and u.claim_epoch = j.claim_epoch
  left join {{schema}}.steps s on s.job_id = j.id and s.generation = j.generation and s.kind = 'step' and not s.done
 where j.id = $1::text::uuid and j.claim_epoch = $2::bigint and j.task = $3::text and j.status = 'unknown'
   and s.name is not distinct from $4::text;

-- name: backend_pid
-- The server process behind this connection; another than the start-up named means a pooler in between.
select pg_catalog.pg_backend_pid();

-- name: own_session
-- For sessions of taskq's own: sets what the role or the database has set otherwise.
select pg_catalog.set_config(s.name, s.needed, false)
  from (values ('datestyle', 'ISO, MDY', 'ISO%'), ('intervalstyle', 'postgres', 'postgres'), ('standard_conforming_strings', 'on', 'on'),
          ('default_transaction_isolation', 'read committed', 'read committed'), ('default_transaction_read_only', 'off', 'off'))
       as s(name, needed, fits)
 where pg_catalog.current_setting(s.name) not like s.fits;

-- name: store_plan
-- Stores a plan once, in a transaction of its own; gives its hash.
select {{schema}}.store_plan($1::text);

-- name: start_run
-- Admits a run: its id, and whether it is new.
select r.run_id, r.created from {{schema}}.start_run($1::text, $2::text::jsonb, $3::text, $4::text::jsonb, $5::text::uuid) r;

-- name: run_outcome
-- How a run stands, as outcome says it of a job.
select r.status, r.result::text as result, r.error::text as error, r.finished_at is not null as finished, true as kept
  from {{schema}}.runs r where r.id = $1::text::uuid;

-- name: run
-- All about one run, as RunInfo has it.
select r.id::text as id, r.workflow, r.plan_hash, r.run_key, r.status, r.created_at, r.finished_at, r.cancel_requested_at, r.open_nodes,
       r.run_epoch, r.generation, r.sequence, r.parent_run::text as parent_run,
       (select {{schema}}.node_name(p.items, k.name, n.ix) from {{schema}}.nodes n join {{schema}}.runs p on p.id = n.run_id
           join {{schema}}.plan_nodes k on k.plan_hash = p.plan_hash and k.ix = {{schema}}.place_in_plan(p.items, n.ix)
         where n.id = r.parent_node) as parent_node, r.started_by::text as started_by, r.input::text as input, r.result::text as result, r.error::text as error, r.meta::text as meta
  from {{schema}}.runs r where r.id = $1::text::uuid;

-- name: run_nodes
-- The nodes of a run in the order of its plan, as NodeInfo has them.
select t.ix, t.name, t.task, t.status, t.held_reason, t.job_id::text as job_id, t.claim_epoch, t.attempt, t.ready_at, t.finished_at,
       t.blocked_by, t.waits_for, t.error::text as error, t.child_run::text as child_run, t.child_status
  from {{schema}}.run_tree t where t.run_id = $1::text::uuid order by t.ix;

-- name: child_end
-- How the child run stands that the job of a node waits for.
select r.id::text as id, r.status, r.result::text as result, r.error::text as error from {{schema}}.runs r where r.parent_node = $1::text::uuid;

-- name: cancel_run
-- Cancels a run: cancelled, requested, succeeded, failed, finished or not_found.
select {{schema}}.cancel_run($1::text::uuid, $2::text, $3::text);

-- name: pause_run
-- Pauses a run: paused, already, finished or cancelling.
select {{schema}}.pause_run($1::text::uuid, $2::text, $3::text, $4::text);

-- name: resume_run
-- Lets a paused run go on: resumed, not_paused or finished.
select {{schema}}.resume_run($1::text::uuid, $2::text, $3::text);

-- name: set_work_budget
-- Sets the work budget of a run: set, already or finished.
select {{schema}}.set_work_budget($1::text::uuid, $2::bigint, $3::text, $4::text);

-- name: grant_recovery
-- Grants the job of an incident one more recovery: granted, paused or already.
select {{schema}}.grant_recovery($1::text::uuid, $2::text, $3::text, $4::text::uuid);

-- name: retry_run
-- Reopens a run that has failed or was cancelled.
select {{schema}}.retry_run($1::text::uuid, $2::text, $3::text);

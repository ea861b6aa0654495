-- The queue's tables. jobs holds what remains to be done, history what is finished, ledger the ended attempts that were not
-- a job's last; the rest says who works, how, and which keys are taken. Written only by the functions of the later files.

create table {{schema}}.jobs (
  id uuid primary key default {{schema}}.new_id(),
  run_at timestamptz not null,
  created_at timestamptz not null,
  claimed_at timestamptz,
  claim_epoch bigint not null default 0,
  claimed_by uuid,
  run_id uuid,
  parent_job uuid,
  deadline timestamptz,
  cancel_requested_at timestamptz,
  effect_started_at timestamptz,
  attempt integer not null default 0,
  max_attempts integer not null,
  recoveries integer not null default 0,
  retry_afters integer not null default 0,
  snoozes integer not null default 0,
  releases integer not null default 0,
  generation integer not null default 0,
  pruned_attempts integer not null default 0,
  required_worker_schema integer,
  key_generation integer,
  checkpoint_version integer,
  run_epoch integer,
  priority smallint not null default 5,
  has_effects boolean,
  slim boolean,
  ordering_halt boolean,
  ordering_later boolean,
  status text not null default 'pending',
  effect_class text not null default 'idempotent',
  queue text not null,
  task text not null,
  policy_id text not null,
  held_reason text,
  unique_scope text,
  unique_key text,
  ordering_key text,
  cohort text,
  payload jsonb not null,
  checkpoint jsonb,
  tags text[],
  meta jsonb,
  -- Few and cheap: every insert and every claim checks them all. Names are checked by enqueue.
  constraint jobs_status check (case status
    when 'pending' then claimed_by is null and claimed_at is null and held_reason is null
    when 'running' then claimed_by is not null and claimed_at is not null and claim_epoch > 0 and held_reason is null
    when 'unknown' then claimed_by is not null and claimed_at is not null and claim_epoch > 0 and held_reason is null
    when 'held' then claimed_by is null and claimed_at is null and held_reason is not null and held_reason in ('signal', 'limit', 'ordering', 'paused', 'run', 'child', 'incident')
    else false end),
  constraint jobs_effect_class check (case effect_class when 'idempotent' then true when 'pure' then true when 'side_effecting' then coalesce(required_worker_schema, 0) >= 2 else false end),
  constraint jobs_counters check (priority between 0 and 9 and max_attempts >= 1 and claim_epoch >= 0 and attempt >= 0
    and least(recoveries, retry_afters, snoozes, releases, generation, pruned_attempts) >= 0),
  constraint jobs_payload check (jsonb_typeof(payload) = 'object'),
  constraint jobs_unique_whole check ((unique_scope is null) = (unique_key is null))
) with (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.1);

-- Claims walk this index in order, per queue and priority. Suspects and jobs of cohorts (below) are not in it.
create index jobs_claim on {{schema}}.jobs (queue, priority, run_at, id)
  where status = 'pending' and recoveries < 2 and cohort is null;
-- Jobs of a cohort wait apart, so that those of a full one stand in nobody's way; what runs of it is counted in the other.
create index jobs_cohort on {{schema}}.jobs (queue, cohort, priority, run_at, id)
  where cohort is not null and status = 'pending' and recoveries < 2;
create index jobs_cohort_running on {{schema}}.jobs (cohort) where cohort is not null and status = 'running';
-- Suspects were on a lost worker twice; they are claimed alone, by a worker that is otherwise empty.
create index jobs_suspect on {{schema}}.jobs (queue, run_at, id) where status = 'pending' and recoveries >= 2;
create index jobs_claimed_by on {{schema}}.jobs (claimed_by) where claimed_by is not null;
create index jobs_deadline on {{schema}}.jobs (deadline) where deadline is not null and status in ('pending', 'held');
create index jobs_exhausted on {{schema}}.jobs (id) where status = 'pending' and attempt >= max_attempts;
create index jobs_unknown on {{schema}}.jobs (id) where status = 'unknown';

comment on table {{schema}}.jobs is 'What remains to be done: pending, running, held and unknown jobs. Finished ones are in history.';
comment on column {{schema}}.jobs.id is 'UUIDv7 made by the database.';
comment on column {{schema}}.jobs.run_at is 'Not claimed before this instant; also the order of claims within queue and priority.';
comment on column {{schema}}.jobs.created_at is 'When the job was enqueued.';
comment on column {{schema}}.jobs.claimed_at is 'When the current attempt was claimed.';
comment on column {{schema}}.jobs.claim_epoch is 'Raised by exactly one with every claim and never reused; half of the fence.';
comment on column {{schema}}.jobs.claimed_by is 'The worker of the current attempt; the other half of the fence. An unknown job keeps it.';
comment on column {{schema}}.jobs.run_id is 'The run that it is a node of; null for a plain job.';
comment on column {{schema}}.jobs.parent_job is 'The job whose body has started it as its child, and waits for it; null for none.';
comment on column {{schema}}.jobs.deadline is 'Nothing is claimed, and no retry starts, after this instant.';
comment on column {{schema}}.jobs.cancel_requested_at is 'When cancelling the running attempt was asked for.';
comment on column {{schema}}.jobs.effect_started_at is 'When the current attempt of a side-effecting task was allowed to start its effect; of another, its step whose effect has started and is not told.';
comment on column {{schema}}.jobs.attempt is 'Attempts used up: failures of the body in this generation.';
comment on column {{schema}}.jobs.max_attempts is 'How many failures of the body end the job.';
comment on column {{schema}}.jobs.recoveries is 'How often it was to run again because its worker was lost, or its unknown outcome turned out not to have happened, in this generation.';
comment on column {{schema}}.jobs.retry_afters is 'How often the body asked to be retried after a delay, in this generation.';
comment on column {{schema}}.jobs.snoozes is 'How often the body snoozed, in this generation.';
comment on column {{schema}}.jobs.releases is 'How often the job was handed back, by a worker that stopped or by its preparation, in this generation.';
comment on column {{schema}}.jobs.generation is 'How often the finished job has been reopened.';
comment on column {{schema}}.jobs.pruned_attempts is 'Ended attempts whose ledger partition has been dropped.';
comment on column {{schema}}.jobs.required_worker_schema is 'The capability level that a worker must have to run it; null for none.';
comment on column {{schema}}.jobs.key_generation is 'The generation that its outside idempotency key carries; null while no effect has undone an earlier generation.';
comment on column {{schema}}.jobs.checkpoint_version is 'How often its checkpoint has moved; null for never.';
comment on column {{schema}}.jobs.run_epoch is 'The epoch of its run when the node became ready; null for a plain job.';
comment on column {{schema}}.jobs.priority is '0 to 9, higher first.';
comment on column {{schema}}.jobs.has_effects is 'True where its policy promises terminal effects; null for none.';
comment on column {{schema}}.jobs.slim is 'True where its row of history goes without payload and result once its worker has told its success; null where it keeps them.';
comment on column {{schema}}.jobs.ordering_halt is 'Whether its failure or unknown outcome halts its ordering key; null without a key.';
comment on column {{schema}}.jobs.ordering_later is 'True where it waits for its time and holds up nobody in its line meanwhile; else null.';
comment on column {{schema}}.jobs.status is 'pending, running, held or unknown.';
comment on column {{schema}}.jobs.effect_class is 'pure, idempotent or side_effecting: what may happen to a body whose outcome is unknown.';
comment on column {{schema}}.jobs.queue is 'The queue; workers subscribe to queues.';
comment on column {{schema}}.jobs.task is 'The registered name of the task.';
comment on column {{schema}}.jobs.policy_id is 'The resolved policy that was in force at enqueue; a row of policies.';
comment on column {{schema}}.jobs.held_reason is 'Why a held job waits: signal, limit, ordering, paused, run (the child run that it stands for), child (one that its body has started) or incident (a grant).';
comment on column {{schema}}.jobs.unique_scope is 'Scope of the unique key that the job holds.';
comment on column {{schema}}.jobs.unique_key is 'The unique key that the job holds while it is in this table, and for a while after if asked.';
comment on column {{schema}}.jobs.ordering_key is 'Jobs with one key run one at a time, in the order of their ids.';
comment on column {{schema}}.jobs.cohort is 'The cohort whose limit it counts against while it runs; null for none.';
comment on column {{schema}}.jobs.payload is 'A JSON object: the task''s arguments by parameter name.';
comment on column {{schema}}.jobs.checkpoint is 'What its body has saved of its progress.';
comment on column {{schema}}.jobs.tags is 'Words for finding jobs; taskq gives them no meaning.';
comment on column {{schema}}.jobs.meta is 'Trace context and other data that travels with the job.';

create table {{schema}}.history (
  id uuid not null,
  finished_at timestamptz not null,
  run_at timestamptz not null,
  created_at timestamptz not null,
  claimed_at timestamptz,
  claim_epoch bigint not null,
  worker_id uuid,
  run_id uuid,
  outcome_id bigint,
  deadline timestamptz,
  cancel_requested_at timestamptz,
  effect_started_at timestamptz,
  attempt integer not null,
  max_attempts integer not null,
  recoveries integer not null,
  retry_afters integer not null,
  snoozes integer not null,
  releases integer not null,
  generation integer not null,
  pruned_attempts integer not null default 0,
  required_worker_schema integer,
  key_generation integer,
  checkpoint_version integer,
  run_epoch integer,
  priority smallint not null,
  has_effects boolean,
  status text not null,
  outcome text,
  effect_class text not null,
  queue text not null,
  task text not null,
  policy_id text not null,
  unique_scope text,
  unique_key text,
  ordering_key text,
  cohort text,
  payload jsonb,
  checkpoint jsonb,
  result jsonb,
  error jsonb,
  tags text[],
  meta jsonb,
  primary key (id, finished_at),
  -- A job succeeds, fails or is cancelled; with a final attempt worker, outcome and claim are there, without one none is.
  constraint history_status check (claim_epoch >= 0 and case status
    when 'succeeded' then case outcome when 'succeeded' then true when 'resolved' then true else false end
    when 'failed' then outcome is null or outcome in ('failed', 'retry_after', 'snoozed', 'suspended', 'lost', 'resolved')
    when 'cancelled' then outcome is null or outcome in ('cancelled', 'lost', 'resolved') else false end),
  -- Only a success that nothing needs any more goes without them: the rest may be reopened, or owes something.
  constraint history_payload check (payload is not null or status = 'succeeded' and outcome is not distinct from 'succeeded' and result is null and has_effects is null and run_id is null),
  constraint history_attempt_whole check (case when worker_id is null then outcome is null and claimed_at is null
    else claim_epoch > 0 and claimed_at is not null and outcome is not null and outcome in ('succeeded', 'failed', 'cancelled', 'retry_after', 'snoozed', 'suspended', 'released', 'lost', 'resolved') end)
) partition by range (finished_at);
create index history_not_succeeded on {{schema}}.history (finished_at, task) where status <> 'succeeded';

comment on table {{schema}}.history is 'Finished jobs with their final attempt, partitioned by the day of the end. Append-only, but for reopening and retention.';
comment on column {{schema}}.history.id is 'The job.';
comment on column {{schema}}.history.finished_at is 'When it finished; the partition key, and the end of the final attempt.';
comment on column {{schema}}.history.run_at is 'When it was last due.';
comment on column {{schema}}.history.created_at is 'When it was enqueued.';
comment on column {{schema}}.history.claimed_at is 'When the final attempt was claimed; null if the job finished without one, like a cancelled pending job.';
comment on column {{schema}}.history.claim_epoch is 'How often it was claimed in all; the final attempt''s epoch if worker_id is set.';
comment on column {{schema}}.history.worker_id is 'The worker of the final attempt; null if the job finished without one.';
comment on column {{schema}}.history.run_id is 'The run that it was a node of; null for a plain job.';
comment on column {{schema}}.history.outcome_id is 'The nonce of the worker that sent the final outcome; null if taskq settled it itself.';
comment on column {{schema}}.history.deadline is 'The instant after which it was not to start.';
comment on column {{schema}}.history.cancel_requested_at is 'When cancelling was asked for while it ran.';
comment on column {{schema}}.history.effect_started_at is 'When the final attempt was allowed to start its effect, or that of the step that was resolved.';
comment on column {{schema}}.history.attempt is 'Attempts used up in the last generation.';
comment on column {{schema}}.history.max_attempts is 'How many failures would have ended it.';
comment on column {{schema}}.history.recoveries is 'How often it was to run again because its worker was lost, or its unknown outcome turned out not to have happened, in the last generation.';
comment on column {{schema}}.history.retry_afters is 'How often the body asked to be retried after a delay, in the last generation.';
comment on column {{schema}}.history.snoozes is 'How often the body snoozed, in the last generation.';
comment on column {{schema}}.history.releases is 'How often a stopping worker handed it back, in the last generation.';
comment on column {{schema}}.history.generation is 'How often it had been reopened.';
comment on column {{schema}}.history.pruned_attempts is 'Ended attempts whose ledger partition has been dropped.';
comment on column {{schema}}.history.required_worker_schema is 'The capability level that it required.';
comment on column {{schema}}.history.key_generation is 'The generation that its outside idempotency key carried; null while no effect had undone an earlier generation.';
comment on column {{schema}}.history.checkpoint_version is 'How often its checkpoint has moved; null for never.';
comment on column {{schema}}.history.run_epoch is 'The epoch of its run; null for a plain job.';
comment on column {{schema}}.history.priority is '0 to 9, higher first.';
comment on column {{schema}}.history.has_effects is 'True where its policy promises terminal effects; null for none.';
comment on column {{schema}}.history.status is 'succeeded, failed or cancelled.';
comment on column {{schema}}.history.outcome is 'How the final attempt ended; null if the job finished without one.';
comment on column {{schema}}.history.effect_class is 'pure, idempotent or side_effecting.';
comment on column {{schema}}.history.queue is 'The queue.';
comment on column {{schema}}.history.task is 'The task.';
comment on column {{schema}}.history.policy_id is 'The policy that was in force.';
comment on column {{schema}}.history.unique_scope is 'Scope of the unique key that it held.';
comment on column {{schema}}.history.unique_key is 'The unique key that it held.';
comment on column {{schema}}.history.ordering_key is 'Jobs with one key run one at a time, in order.';
comment on column {{schema}}.history.cohort is 'The cohort whose limit it counted against while it ran.';
comment on column {{schema}}.history.payload is 'The arguments.';
comment on column {{schema}}.history.checkpoint is 'What its body has saved of its progress.';
comment on column {{schema}}.history.result is 'What the body returned.';
comment on column {{schema}}.history.error is 'Why it failed or was cancelled: a JSON object with type and message.';
comment on column {{schema}}.history.tags is 'Words for finding jobs.';
comment on column {{schema}}.history.meta is 'Data that travelled with the job.';

create table {{schema}}.ledger (
  job_id uuid not null,
  ended_at timestamptz not null,
  claimed_at timestamptz not null,
  claim_epoch bigint not null check (claim_epoch > 0),
  worker_id uuid not null,
  outcome_id bigint,
  effect_started_at timestamptz,
  attempt integer not null,
  generation integer not null,
  outcome text not null,
  error jsonb,
  primary key (job_id, claim_epoch, ended_at),
  constraint ledger_outcome check (outcome in
    ('succeeded', 'failed', 'cancelled', 'retry_after', 'snoozed', 'suspended', 'released', 'lost', 'resolved'))
) partition by range (ended_at);
comment on table {{schema}}.ledger is 'Ended attempts that were not a job''s last (the last one stands in history), partitioned by the day of the end. Append-only. The view attempts shows both.';
comment on column {{schema}}.ledger.job_id is 'The job.';
comment on column {{schema}}.ledger.ended_at is 'When the attempt ended; the partition key.';
comment on column {{schema}}.ledger.claimed_at is 'When it was claimed.';
comment on column {{schema}}.ledger.claim_epoch is 'Its epoch; with job_id it names the attempt.';
comment on column {{schema}}.ledger.worker_id is 'The worker that had claimed it.';
comment on column {{schema}}.ledger.outcome_id is 'The nonce of the worker that sent the outcome; null if taskq settled it itself.';
comment on column {{schema}}.ledger.effect_started_at is 'When it was allowed to start its effect.';
comment on column {{schema}}.ledger.attempt is 'Attempts used up by the job, this one included if it failed.';
comment on column {{schema}}.ledger.generation is 'The job''s generation at the time.';
comment on column {{schema}}.ledger.outcome is 'How it ended.';
comment on column {{schema}}.ledger.error is 'Why: a JSON object with type and message.';

create view {{schema}}.attempts as
  select job_id, claim_epoch, generation, attempt, worker_id, outcome, outcome_id, claimed_at, effect_started_at, ended_at, error
    from {{schema}}.ledger
  union all
  select id, claim_epoch, generation, attempt, worker_id, outcome, outcome_id, claimed_at, effect_started_at, finished_at, error
    from {{schema}}.history where worker_id is not null;
comment on view {{schema}}.attempts is 'Every ended attempt exactly once, those in ledger and the final ones in history.';

create view {{schema}}.all_jobs as
  select id, queue, task, priority, status, held_reason, payload, null::jsonb as result, null::jsonb as error, attempt, max_attempts,
         recoveries, retry_afters, snoozes, releases, claim_epoch, claimed_by as worker_id, claimed_at, run_at, deadline,
         cancel_requested_at, effect_class, effect_started_at, required_worker_schema, policy_id, generation, pruned_attempts,
         key_generation, has_effects, ordering_key, cohort, checkpoint, checkpoint_version, unique_scope, unique_key, tags, meta, run_id, run_epoch, created_at, null::timestamptz as finished_at
    from {{schema}}.jobs
  union all
  select id, queue, task, priority, status, null, payload, result, error, attempt, max_attempts,
         recoveries, retry_afters, snoozes, releases, claim_epoch, worker_id, claimed_at, run_at, deadline,
         cancel_requested_at, effect_class, effect_started_at, required_worker_schema, policy_id, generation, pruned_attempts,
         key_generation, has_effects, ordering_key, cohort, checkpoint, checkpoint_version, unique_scope, unique_key, tags, meta, run_id, run_epoch, created_at, finished_at
    from {{schema}}.history;
comment on view {{schema}}.all_jobs is 'Every job, finished or not.';

create table {{schema}}.policies (
  id text primary key,
  format integer not null,
  spec jsonb not null,
  created_at timestamptz not null
);
comment on table {{schema}}.policies is 'Each distinct resolved policy once, immutable. Jobs point here, without a foreign key.';
comment on column {{schema}}.policies.id is 'Hash of the policy without its defaults.';
comment on column {{schema}}.policies.format is 'Version of the format that was hashed.';
comment on column {{schema}}.policies.spec is 'The whole policy, defaults filled in.';
comment on column {{schema}}.policies.created_at is 'When it was first used.';

create table {{schema}}.unique_keys (
  scope text not null check ({{schema}}.valid_name(scope)),
  key text not null check (length(key) between 1 and 512),
  job_id uuid not null,
  hold_for interval,
  expires_at timestamptz,
  primary key (scope, key)
);
create index unique_keys_expiry on {{schema}}.unique_keys (expires_at) where expires_at is not null;
comment on table {{schema}}.unique_keys is 'Unique keys in use: held while the job is in jobs, then for hold_for.';
comment on column {{schema}}.unique_keys.scope is 'Keys are unique within a scope; the task''s name unless said otherwise.';
comment on column {{schema}}.unique_keys.key is 'The key.';
comment on column {{schema}}.unique_keys.job_id is 'The job that holds it.';
comment on column {{schema}}.unique_keys.hold_for is 'How long it stays taken after the job has finished; null for not at all.';
comment on column {{schema}}.unique_keys.expires_at is 'Set when the job finishes: from then on the key is free.';

create table {{schema}}.idempotency_keys (
  scope text not null check ({{schema}}.valid_name(scope)),
  key text not null check (length(key) between 1 and 512),
  fingerprint bytea not null,
  job_id uuid not null,
  created_at timestamptz not null,
  expires_at timestamptz not null,
  primary key (scope, key)
);
create index idempotency_keys_expiry on {{schema}}.idempotency_keys (expires_at);
comment on table {{schema}}.idempotency_keys is 'Requests to enqueue that carried an idempotency key: the same request again is answered with the same job.';
comment on column {{schema}}.idempotency_keys.scope is 'Keys are unique within a scope; the task''s name unless said otherwise.';
comment on column {{schema}}.idempotency_keys.key is 'The key.';
comment on column {{schema}}.idempotency_keys.fingerprint is 'SHA-256 of task and payload, computed by the database.';
comment on column {{schema}}.idempotency_keys.job_id is 'The job that the first request made.';
comment on column {{schema}}.idempotency_keys.created_at is 'When the key was first used.';
comment on column {{schema}}.idempotency_keys.expires_at is 'When it is forgotten.';

create table {{schema}}.workers (
  id uuid primary key default {{schema}}.new_id(),
  name text not null check ({{schema}}.valid_name(name)),
  hostname text not null,
  pid integer not null,
  queues text[] not null,
  tasks text[] not null,
  concurrency integer not null check (concurrency >= 1),
  capability_level integer not null,
  version text not null,
  status text not null default 'live' check (status in ('live', 'draining', 'stopped', 'lost')),
  started_at timestamptz not null,
  renewed_at timestamptz not null,
  lease interval not null check (lease > interval '0'),
  lease_expires_at timestamptz not null,
  ended_at timestamptz
) with (fillfactor = 50);
create index workers_open on {{schema}}.workers (lease_expires_at) where status in ('live', 'draining');
comment on table {{schema}}.workers is 'Registered worker processes and their leases.';
comment on column {{schema}}.workers.id is 'Made anew at every registration; the first half of a fence.';
comment on column {{schema}}.workers.name is 'What people call it.';
comment on column {{schema}}.workers.hostname is 'Where it runs.';
comment on column {{schema}}.workers.pid is 'Its process id there.';
comment on column {{schema}}.workers.queues is 'The queues that it claims from.';
comment on column {{schema}}.workers.tasks is 'The tasks that it knows.';
comment on column {{schema}}.workers.concurrency is 'How many bodies it runs at once.';
comment on column {{schema}}.workers.capability_level is 'The schema level that its code understands.';
comment on column {{schema}}.workers.version is 'The version of taskq that it runs.';
comment on column {{schema}}.workers.status is 'live, draining (stopping), stopped (by itself) or lost (its lease ran out).';
comment on column {{schema}}.workers.started_at is 'When it registered.';
comment on column {{schema}}.workers.renewed_at is 'When it last renewed its lease.';
comment on column {{schema}}.workers.lease is 'How long a renewal lasts.';
comment on column {{schema}}.workers.lease_expires_at is 'Its claims live until then.';
comment on column {{schema}}.workers.ended_at is 'When it stopped or was declared lost.';

create unlogged table {{schema}}.sleepers (
  queue text not null,
  worker_id uuid not null,
  primary key (queue, worker_id)
);
comment on table {{schema}}.sleepers is 'Workers that wait for a notification, by queue. Enqueue only reads it. Unlogged: losing it costs latency only.';
comment on column {{schema}}.sleepers.queue is 'The queue that the worker waits for.';
comment on column {{schema}}.sleepers.worker_id is 'The worker.';

create table {{schema}}.queues (
  name text primary key check ({{schema}}.valid_name(name)),
  paused_at timestamptz,
  created_at timestamptz not null
);
comment on table {{schema}}.queues is 'Queues that a worker has served or an operator has steered.';
comment on column {{schema}}.queues.name is 'The queue.';
comment on column {{schema}}.queues.paused_at is 'Since when nothing is claimed from it; null when it runs.';
comment on column {{schema}}.queues.created_at is 'When it was first seen.';

create table {{schema}}.limits (
  name text primary key check ({{schema}}.valid_name(name)),
  code_limit integer check (code_limit >= 0),
  operator_limit integer check (operator_limit >= 0),
  code_changed_at timestamptz,
  set_at timestamptz,
  set_by text,
  reason text,
  created_at timestamptz not null
) with (fillfactor = 50);
comment on table {{schema}}.limits is
  'How many jobs of a cohort may run at once, one row for each cohort that was ever used. The operator''s limit wins, and code never overwrites it; with neither there is no limit. Claims of a cohort lock its row.';
comment on column {{schema}}.limits.name is 'The cohort.';
comment on column {{schema}}.limits.code_limit is 'What code says: the last worker that started with it, or the first enqueue.';
comment on column {{schema}}.limits.operator_limit is 'What an operator has set; null for nothing.';
comment on column {{schema}}.limits.code_changed_at is 'When code_limit was last changed.';
comment on column {{schema}}.limits.set_at is 'When operator_limit was last set or cleared.';
comment on column {{schema}}.limits.set_by is 'Who did that.';
comment on column {{schema}}.limits.reason is 'Why.';
comment on column {{schema}}.limits.created_at is 'When the cohort was first seen.';

create table {{schema}}.task_config (
  task text primary key check ({{schema}}.valid_name(task)),
  queue text not null,
  priority smallint not null check (priority between 0 and 9),
  max_attempts integer not null check (max_attempts >= 1),
  effect_class text not null check (effect_class in ('pure', 'idempotent', 'side_effecting')),
  policy_id text not null,
  required_worker_schema integer,
  reconcile_task text check ({{schema}}.valid_name(reconcile_task)),
  reconcile_steps jsonb check (jsonb_typeof(reconcile_steps) = 'object'),
  published_at timestamptz not null,
  published_by uuid
);
comment on table {{schema}}.task_config is 'What workers publish about each task at boot. taskq.enqueue in SQL reads it.';
comment on column {{schema}}.task_config.task is 'The task.';
comment on column {{schema}}.task_config.queue is 'Its queue, from code.';
comment on column {{schema}}.task_config.priority is 'Its priority, from code.';
comment on column {{schema}}.task_config.max_attempts is 'Its attempts, from code.';
comment on column {{schema}}.task_config.effect_class is 'Its effect class, from code.';
comment on column {{schema}}.task_config.policy_id is 'Its resolved policy, from code.';
comment on column {{schema}}.task_config.required_worker_schema is 'The capability level that its jobs require.';
comment on column {{schema}}.task_config.reconcile_task is 'The task that asks what became of an attempt whose outcome is unknown; null where code gives no hook.';
comment on column {{schema}}.task_config.reconcile_steps is
  'The tasks that ask what became of side-effecting steps, by the name of the step; null where code gives none.';
comment on column {{schema}}.task_config.published_at is 'When a worker last published it.';
comment on column {{schema}}.task_config.published_by is 'That worker.';

create table {{schema}}.audit (
  id uuid primary key default {{schema}}.new_id(),
  at timestamptz not null,
  actor text not null,
  db_user text not null default session_user,
  action text not null,
  subject text not null,
  reason text,
  details jsonb
);
create index audit_subject on {{schema}}.audit (subject, at);
comment on table {{schema}}.audit is 'Who did which operator action, when and why. Append-only.';
comment on column {{schema}}.audit.id is 'UUIDv7.';
comment on column {{schema}}.audit.at is 'When.';
comment on column {{schema}}.audit.actor is 'Who, as given by the caller.';
comment on column {{schema}}.audit.db_user is 'The database role of the session.';
comment on column {{schema}}.audit.action is 'What: cancel, retry, resolve, pause, resume, ...';
comment on column {{schema}}.audit.subject is 'To what: a job''s id, a queue''s name, ...';
comment on column {{schema}}.audit.reason is 'Why, as given by the caller.';
comment on column {{schema}}.audit.details is 'What it found and did.';

create table {{schema}}.leader (
  role text primary key,
  holder uuid,
  expires_at timestamptz not null,
  observed_at timestamptz not null,
  server_started_at timestamptz not null,
  timeline integer not null,
  quiet_until timestamptz not null,
  lease interval not null,
  observed_by uuid
);
insert into {{schema}}.leader values ('maintenance', null, '-infinity', {{schema}}.now(), '-infinity', 0, '-infinity', '0');
comment on table {{schema}}.leader is 'Leases of roles that one worker at a time plays.';
comment on column {{schema}}.leader.role is 'The role; maintenance looks after lost workers, partitions and retention.';
comment on column {{schema}}.leader.holder is 'The worker that plays it.';
comment on column {{schema}}.leader.expires_at is 'Until when.';
comment on column {{schema}}.leader.observed_at is 'When any worker last looked at this row: a gap or a step back shows a jump of the clock.';
comment on column {{schema}}.leader.observed_by is 'Which worker that was: by its own clock it can tell a jump from a look that came late.';
comment on column {{schema}}.leader.server_started_at is 'Start of the server at the last look.';
comment on column {{schema}}.leader.timeline is 'Timeline of the server at the last look: a new one shows a promotion.';
comment on column {{schema}}.leader.quiet_until is 'Nobody is declared lost before this instant.';
comment on column {{schema}}.leader.lease is 'How long the holder takes the role for at a time; an expires_at further off than that shows a clock that stepped back.';

create table {{schema}}.preparations (
  job_id uuid not null,
  claim_epoch bigint not null check (claim_epoch > 0),
  worker_id uuid not null,
  began_at timestamptz not null,
  verdict text not null check (verdict in ('go', 'exhausted')),
  answered_at timestamptz,
  answer text check (answer in ('ready', 'pause', 'needs_approval', 'unmet', 'failed', 'exhausted')),
  became text check (became in ('ready', 'released', 'held', 'paused', 'ended')),
  details jsonb,
  primary key (job_id, claim_epoch),
  constraint preparations_whole check ((answered_at is null) = (answer is null) and (answer is null) = (became is null))
);
create index preparations_began on {{schema}}.preparations (began_at);
comment on table {{schema}}.preparations is 'Each preparation that has begun, and what it has answered.';
comment on column {{schema}}.preparations.job_id is 'The job.';
comment on column {{schema}}.preparations.claim_epoch is 'The claim that it went on under.';
comment on column {{schema}}.preparations.worker_id is 'The worker.';
comment on column {{schema}}.preparations.began_at is 'When it began.';
comment on column {{schema}}.preparations.verdict is 'What it was told when it began: go, or exhausted, where nothing more is granted.';
comment on column {{schema}}.preparations.answered_at is 'When it answered; null while it goes on, and where its claim ended before.';
comment on column {{schema}}.preparations.answer is 'ready, pause, needs_approval, unmet, failed, or exhausted (it was not called, since nothing was granted).';
comment on column {{schema}}.preparations.became is 'What became of the claim: ready (the attempt may begin), released (to be claimed again), held (an incident), paused (the run) or ended (a cancel had been asked for).';
comment on column {{schema}}.preparations.details is 'What it has said.';

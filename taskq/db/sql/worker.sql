-- Statements of the worker, most of them calls of the functions in migrations/. Every write of an attempt goes through
-- exchange or end_attempts, which fence it.

-- name: exchange
-- One round trip: ends, then claims. See migrations for the shape and its figures.
select * from {{schema}}.exchange($1, $2, $3, $4, $5, $6::jsonb[], $7::jsonb[], $8, $9, $10, $11, $12, $13, $14, $15, $16, $17);

-- name: ping
-- Whether the connection answers, when there is nothing else to ask.
select 1;

-- name: claim_suspect
-- One job that was on a lost worker twice, for a worker that holds nothing.
select * from {{schema}}.claim_suspect($1, $2, $3);

-- name: survey
-- Suspects that wait, and due jobs of tasks that this worker does not know. Part of a look; by itself where it is slow.
select kind, name, n from {{schema}}.survey($1, $2);

-- name: attempt_record
-- What stands on record of one attempt, read in a statement of its own after an end changed no row.
select true as ended, a.outcome_id, a.outcome, a.worker_id from {{schema}}.attempts a where a.job_id = $1 and a.claim_epoch = $2
union all
select false, null, j.status, j.claimed_by from {{schema}}.jobs j where j.id = $1 and j.claim_epoch = $2 and j.claimed_by = $3;

-- name: attempt_records
-- What stands on record of these jobs' attempts, ended or not: the proof of ends that had started an effect.
select true as ended, a.job_id, a.claim_epoch, a.worker_id, a.outcome_id, a.outcome, a.effect_started_at
  from {{schema}}.attempts a where a.job_id = any($1)
union all
select false, j.id, j.claim_epoch, j.claimed_by, null, j.status, j.effect_started_at
  from {{schema}}.jobs j where j.id = any($1) and j.claimed_by is not null;

-- name: start_effects
-- Let attempts start their effects, and see what the database then holds of each.
select * from {{schema}}.start_effects($1, $2, $3);

-- name: policies
-- The specs of these policies.
select id, spec::text as spec from {{schema}}.policies where id = any($1);

-- name: ensure_policy
-- Store a policy once.
select {{schema}}.ensure_policy($1, $2, $3::jsonb);

-- name: publish_task
-- What the code says about a task, at boot.
select {{schema}}.publish_task($1, $2, $3, $4, $5, $6, $7, $8, $9, $10::jsonb);

-- name: publish_limits
-- The limits of cohorts that the code has, at boot; answers what stood there before.
select name, was, code_limit, operator_limit from {{schema}}.publish_limits($1, $2);

-- name: register_worker
-- A new registration, with a lease from now on.
select {{schema}}.register_worker($1, $2, $3, $4, $5, $6, $7, $8, $9) as id;

-- name: drain_worker
select {{schema}}.drain_worker($1);

-- name: stop_worker
select {{schema}}.stop_worker($1);

-- name: sleep
-- The worker waits for a notification from now on.
select {{schema}}.sleep($1, $2);

-- name: pass_on
-- The worker is awake, and has been told of more than it can take: two others are told.
select {{schema}}.unsleep($1), {{schema}}.wake($2);

-- name: unsleep
select {{schema}}.unsleep($1);

-- name: renew
-- The lease thread: renew, and see what the database says this worker holds.
select status, job_id, claim_epoch, cancel_requested from {{schema}}.renew($1);

-- name: look
-- The survey; and take or keep the role of the leader, with the seconds since the look before, where this worker can
-- tell. For the leader, also what is due.
select kind, name, n from {{schema}}.look($1, $2, $3, $4, $5);

-- name: resign
select {{schema}}.resign($1, 'maintenance');

-- name: mark_lost
-- Workers whose lease has run out.
select mark_lost as worker_id from {{schema}}.mark_lost();

-- name: settle_lost
-- Claims of lost or absent workers, a bounded number, without those that were just seen to fail.
select job_id, settled, why, task, queue, claim_epoch, attempt, worker_id from {{schema}}.settle_lost(p_skip => $1);

-- name: hold_exhausted
-- Hold a job whose recoveries are exhausted, and pause its run.
select {{schema}}.hold_exhausted($1) as became;

-- name: sweep
-- Waiting jobs past their deadline or out of attempts, without those that were just seen to fail.
select job_id, settled, why, task, queue, claim_epoch, attempt, worker_id from {{schema}}.sweep(p_skip => $1);

-- name: reconcile_missing
-- Unknown attempts whose task has a hook now and which have never been asked about, after a job's id, a bounded number.
select job_id, task, queue, claim_epoch, attempt, reconcile_job from {{schema}}.reconcile_missing($1);

-- name: stop_children
-- Child runs that were busy when their parent was cancelled.
select run_id, answer from {{schema}}.stop_children($1);

-- name: heal_runs
-- Runs that stand still, after a run's id, a bounded number.
select run_id, answer from {{schema}}.heal_runs($1);

-- name: carry_on_run
-- A run of which more is ready than one transaction gives jobs: give the next ones theirs.
select run_id, answer from {{schema}}.carry_on_run($1);

-- name: sweep_orderings
-- Ordering keys whose turn could not be given at once, or whose next job has become due.
select {{schema}}.sweep_orderings() as n;

-- name: prune
-- Expired keys, ordering keys without jobs, and old worker rows.
select {{schema}}.prune() as n;

-- name: ensure_partitions
select {{schema}}.ensure_partitions() as n;

-- name: drop_expired_partition
select {{schema}}.drop_expired_partition() as name;

-- What bodies ask for dangerous work, beside the exchange. Arguments and answers are text where a body may have taught its
-- connection other ways with uuid or jsonb.

-- name: owned
-- Whether an attempt is still its worker's: the claim stands and the lease holds.
select exists (
  select from {{schema}}.jobs j join {{schema}}.workers w on w.id = j.claimed_by
   where j.id = $2::text::uuid and j.claimed_by = $1::text::uuid and j.claim_epoch = $3::bigint and j.status = 'running'
     and w.status in ('live', 'draining') and w.lease_expires_at > {{schema}}.now()) as owned;

-- name: begin_preparation
-- A preparation begins: what it is to know, or why it must not.
select answer, facts, approved from {{schema}}.begin_preparation($1::text::uuid, $2::text::uuid, $3::bigint);

-- name: end_preparation
-- What a preparation has answered, and what became of the claim by that.
select became, facts, incident::text as incident from {{schema}}.end_preparation($1::text::uuid, $2::text::uuid, $3::bigint, $4::text, $5::text::jsonb);

-- name: checkpoint
-- Move a checkpoint by compare-and-swap.
select answer, version, value from {{schema}}.checkpoint($1::text::uuid, $2::text::uuid, $3::bigint, $4::int, $5::text::jsonb);

-- name: load_checkpoint
-- What earlier attempts, or this one, have saved; no row where the attempt is not the worker's.
select coalesce(j.checkpoint_version, 0) as version, j.checkpoint::text as value from {{schema}}.jobs j
 where j.id = $2::text::uuid and j.claimed_by = $1::text::uuid and j.claim_epoch = $3::bigint and j.status = 'running';

-- name: load_steps
-- What earlier attempts of this generation have recorded: one row without a name where nothing is, none where the attempt
-- is not the worker's.
select s.kind, s.name, s.occurrence, s.value::text as value, s.error::text as error, coalesce(s.child_job, s.child_run)::text as child, s.done, extract(epoch from s.until - {{schema}}.now())::float8 as remaining
  from {{schema}}.jobs j left join {{schema}}.steps s on s.job_id = j.id and s.generation = j.generation
 where j.id = $2::text::uuid and j.claimed_by = $1::text::uuid and j.claim_epoch = $3::bigint and j.status = 'running';

-- name: record_steps
-- What steps of many bodies gave, each under its own fence.
select n, answer from {{schema}}.record_steps($1::text[]::uuid[], $2::text[]::uuid[], $3::bigint[], $4::text[], $5::int[], $6::text[]::jsonb[], $7::boolean);

-- name: start_step
-- Let a side-effecting step start its effect, and see what the database then holds of it.
select answer, job_id, claim_epoch, claimed_by, name, occurrence, effect_started_at, value, error
  from {{schema}}.start_step($1::text::uuid, $2::text::uuid, $3::bigint, $4::text, $5::int);

-- name: end_step
-- What a side-effecting step gave, or failed with; or that it did not happen.
select {{schema}}.end_step($1::text::uuid, $2::text::uuid, $3::bigint, $4::text, $5::int, $6::timestamptz, $7::text::jsonb, $8::text::jsonb) as answer;

-- name: begin_sleep
-- When a sleep ends, recorded once.
select answer, remaining from {{schema}}.begin_sleep($1::text::uuid, $2::text::uuid, $3::bigint, $4::text, $5::int, $6::float8);

-- name: begin_wait
-- What a body waits for, recorded once, and the signal that it may take.
select answer, signal_id, payload, remaining from {{schema}}.begin_wait($1::text::uuid, $2::text::uuid, $3::bigint, $4::text, $5::int, $6::float8);

-- name: start_child
-- A child of a body, started once, and how it has ended if it has.
select answer, value, error, child::text as child
  from {{schema}}.start_child($1::text::uuid, $2::text::uuid, $3::bigint, $4::text, $5::int, $6::text::jsonb, $7::text, $8::text, $9::text, $10::text::jsonb);

-- name: ensure_limit
-- The limit of a cohort, where nobody has said one.
select {{schema}}.ensure_limit($1::text, $2::int);

-- name: store_plan
-- Store a plan once.
select {{schema}}.store_plan($1::text);

-- name: take_signal
-- Give a signal to a wait, or note that it fits nothing.
select {{schema}}.take_signal($1::text::uuid, $2::text::uuid, $3::bigint, $4::text, $5::int, $6::bigint, $7::text) as answer;

-- name: leave_steps
-- Which recorded steps an attempt that is about to succeed has not asked for.
select {{schema}}.leave_steps($1::text::uuid, $2::text::uuid, $3::bigint, $4::text[], $5::text[], $6::int[]) as n;

-- name: begin_inside
-- The first statement of a body's own transaction: which one it is, and whether the attempt may still end in it. The server
-- notices within 30 seconds that its client's machine has gone.
select pg_current_xact_id()::text as xid, exists (
    select from {{schema}}.jobs j where j.id = $2::text::uuid and j.claimed_by = $1::text::uuid and j.claim_epoch = $3::bigint
       and j.status in ('running', 'unknown')) as owned,
  set_config('tcp_keepalives_idle', '15', true), set_config('tcp_keepalives_interval', '5', true),
  set_config('tcp_keepalives_count', '3', true);

-- name: end_inside
-- The last statement of a body's own transaction. From here on it is rolled back if nothing more comes.
select {{schema}}.end_inside($1::text::uuid, $2::text::uuid, $3::bigint, $4::bigint, $5::text::jsonb, $6::text) as answer,
  set_config('idle_in_transaction_session_timeout', '30s', true);

-- name: ended_inside
-- What became of a transaction whose commit was not answered; waits until it is over.
select {{schema}}.ended_inside($1::text::uuid, $2::text::uuid, $3::bigint, $4::bigint) as answer;

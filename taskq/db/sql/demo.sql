-- What taskq demo reads while its workers run, and what it puts into its report. Nothing here writes.

-- name: worker
-- The registration of a demo worker, by its name.
select w.id::text as id, w.status from {{schema}}.workers w where w.name = $1::text order by w.id desc limit 1;

-- name: remaining
-- How many jobs of the demo's queue are not finished.
select count(*)::int as n from {{schema}}.jobs j where j.queue = $1::text;

-- name: held_by
-- How many running jobs a worker has claimed.
select count(*)::int as n from {{schema}}.jobs j where j.claimed_by = $1::text::uuid and j.status = 'running';

-- name: finished
-- How each job ended, on which worker. The bound keeps out partitions of history from before the demo.
select h.id::text as id, h.status, w.name as worker, h.result, h.error, h.recoveries
  from {{schema}}.history h left join {{schema}}.workers w on w.id = h.worker_id
 where h.id = any ($1::text[]::uuid[]) and h.finished_at >= {{schema}}.id_time($2::text::uuid) - interval '1 minute';

-- name: lost
-- Attempts of these jobs that a worker lost, by the ledger.
select count(*)::int as n from {{schema}}.ledger l
 where l.worker_id = $2::text::uuid and l.outcome = 'lost' and l.job_id = any ($1::text[]::uuid[]);

-- name: verify
-- Every violation of the laws: everything, or with $2 what finished since that job was made.
select c.law, c.code, c.job_id::text as job_id, c.detail
  from {{schema}}.check_invariants($1::text, case when $1::text = 'since' then {{schema}}.id_time($2::text::uuid) end) c;

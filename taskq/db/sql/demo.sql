-- What taskq demo reads while its workers run, and what it puts into its report. Nothing here writes.

-- name: worker
-- The registration of a demo worker, by its name.
select w.id::text as id, w.status from {{schema}}.workers w where w.name = $1::text order by w.id desc limit 1;

-- name: remaining
-- How many jobs of the demo's queue are not finished, and nodes of runs that may have one there later.
select ((select count(*) from {{schema}}.jobs j where j.queue = $1::text)
  + (select count(*) from {{schema}}.runs r join {{schema}}.nodes n on n.run_id = r.id and n.status = 'waiting'
       join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = {{schema}}.place_in_plan(r.items, n.ix)
      where r.finished_at is null and k.job ->> 'queue' = $1::text))::int as n;

-- name: held_by
-- How many running jobs a worker has claimed.
select count(*)::int as n from {{schema}}.jobs j where j.claimed_by = $1::text::uuid and j.status = 'running';

-- name: held_of
-- How many running jobs of a task a worker has claimed.
select count(*)::int as n from {{schema}}.jobs j where j.claimed_by = $1::text::uuid and j.status = 'running' and j.task = $2::text;

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

-- name: open_of
-- What keeps a frozen worker from being past: that it is not lost yet, and what it claimed and is not settled.
select (select count(*)::int from {{schema}}.jobs j where j.claimed_by = w.id)
       + (w.status <> 'lost')::int as n from {{schema}}.workers w where w.id = $1::text::uuid;

-- name: unknowns
-- How attempts of these jobs came to be unknown, and how each of them ended in the end; null for one that is open.
select u.reason, a.outcome, count(*)::int as n
  from {{schema}}.unknowns u
  left join {{schema}}.attempts a on a.job_id = u.job_id and a.claim_epoch = u.claim_epoch
 where u.job_id = any ($1::text[]::uuid[])
 group by u.reason, a.outcome order by u.reason, a.outcome;

-- name: resolutions
-- What was decided of unknown outcomes of these jobs.
select u.details ->> 'happened' = 'true' as happened, count(*)::int as n from {{schema}}.audit u
 where u.action = 'resolve' and u.subject = any ($1::text[]) group by 1;

-- name: effects
-- The terminal effects of these jobs, and what the body of each returned.
select e.owner_job_id::text as owner, e.settled, h.result #>> '{}' as result
  from {{schema}}.effects e left join {{schema}}.history h on h.id = e.job_id
 where e.owner_job_id = any ($1::text[]::uuid[]);

-- name: under_way
-- Some runs that have a running job in the demo's queue, the oldest first.
select distinct j.run_id::text as id from {{schema}}.jobs j
 where j.queue = $1::text and j.run_id is not null and j.status = 'running' order by 1 limit $2::int;

-- name: open_runs
-- How many of these runs have not ended.
select count(*)::int as n from {{schema}}.runs r where r.id = any ($1::text[]::uuid[]) and r.finished_at is null;

-- name: runs
-- How each run stands, and which node failed.
select r.id::text as id, r.status, r.error ->> 'node' as node, r.error #>> '{cause,type}' as error
  from {{schema}}.runs r where r.id = any ($1::text[]::uuid[]);

-- name: node_jobs
-- The jobs of these runs' nodes, which have the ids of their nodes.
select n.id::text as id from {{schema}}.nodes n where n.run_id = any ($1::text[]::uuid[]);

-- name: compensations
-- What was promised to undo of each run: by the task that undoes, how its job stands, and what its body returned.
select n.run_id::text as run, e.task, e.settled, h.result #>> '{}' as result
  from {{schema}}.nodes n
  join {{schema}}.effects e on e.owner_job_id = n.id and e.name like 'compensate:%'
  left join {{schema}}.history h on h.id = e.job_id
 where n.run_id = any ($1::text[]::uuid[]);

-- name: emitted
-- How far the emit of a run is: how many items have ended, how many are open, and how many pages were asked for.
select m.succeeded + m.failed + m.cancelled as ended, m.waiting + m.active as open, m.pages, m.source
  from {{schema}}.map_progress m where m.run_id = $1::text::uuid and m.pages is not null;

-- name: emitted_items
-- The items of the emit of a run, in their order.
select n.item #>> '{}' as item, n.status
  from {{schema}}.runs c join {{schema}}.nodes n on n.run_id = c.id and n.ix < 1000000
 where c.parent_run = $1::text::uuid and c.pages is not null order by n.ix;

-- name: lost_of
-- How many attempts at jobs of a task workers have lost, of jobs made since the run was.
select count(*)::int as n from {{schema}}.ledger l
  join {{schema}}.history h on h.id = l.job_id and h.finished_at >= {{schema}}.id_time($2::text::uuid) - interval '1 minute'
 where h.task = $1::text and l.outcome = 'lost' and h.id > $2::text::uuid;

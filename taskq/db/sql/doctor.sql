-- What taskq doctor looks at: the server, the schema, the workers and the queues. Called by taskq.cli.checks on the
-- connection of the command. All of it reads, and needs no more than the role of a reader; what PostgreSQL hides from
-- such a role of other sessions is null here.

-- name: bounded
-- Ends the statement that takes longer than this, within the transaction.
select set_config('statement_timeout', $1, true);

-- name: server
-- Which server this is, and whether it takes writes.
select current_setting('server_version_num')::int as version_num, current_setting('server_version') as version,
       pg_backend_pid() as pid, pg_is_in_recovery() as standby,
       -- What sessions begin with; taskq's own have been set otherwise by now.
       (select s.reset_val = 'on' from pg_settings s where s.name = 'default_transaction_read_only') as read_only,
       extract(epoch from clock_timestamp() - pg_postmaster_start_time())::float8 as up_for;

-- name: settings
-- Settings that decide whether what was committed survives a crash, and whether tables are cleaned.
select s.name, s.setting from pg_settings s
 where s.name in ('fsync', 'full_page_writes', 'synchronous_commit', 'autovacuum', 'track_counts') order by s.name;

-- name: clock
select clock_timestamp() as at;

-- name: connections
-- Sessions of clients on the whole server, and how many there may be for users who are not superusers.
select current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int as most,
       count(*)::int as used, count(*) filter (where a.application_name like 'taskq%')::int as ours
  from pg_stat_activity a where a.datid is not null and coalesce(a.backend_type, 'client backend') = 'client backend';

-- name: transactions
-- Sessions of this database that hold back vacuum, or locks, the oldest first. A null in seconds is hidden from this user.
select a.pid, a.application_name, a.usename, a.state, extract(epoch from clock_timestamp() - a.xact_start)::float8 as seconds,
       greatest(age(a.backend_xmin), age(a.backend_xid)) as xids
  from pg_stat_activity a
 where a.datname = current_database() and a.pid <> pg_backend_pid()
   and coalesce(a.backend_type, 'client backend') = 'client backend'
   and (a.backend_xmin is not null or a.backend_xid is not null or a.state like 'idle in transaction%')
 order by seconds desc nulls last, xids desc nulls last limit 5;

-- name: prepared
-- Transactions of this database that were prepared and never ended, the oldest first.
select p.gid, p.owner, extract(epoch from clock_timestamp() - p.prepared)::float8 as seconds from pg_prepared_xacts p
 where p.database = current_database() order by p.prepared limit 5;

-- name: other_class
-- Due jobs whose effect class is not the one that workers have last published for their task.
select c.task, j.effect_class as enqueued, c.effect_class as declared, count(*)::int as n
  from {{schema}}.task_config c join {{schema}}.jobs j on j.task = c.task and j.effect_class <> c.effect_class
 where j.status = 'pending' group by 1, 2, 3 order by n desc, 1 limit 5;

-- name: slots
-- Replication slots, with what each holds back.
select s.slot_name, s.active, s.wal_status, age(s.xmin) as xids,
       case when pg_is_in_recovery() then null else pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint end as bytes
  from pg_replication_slots s order by s.slot_name;

-- name: standbys
-- Standbys whose queries hold back vacuum here (hot_standby_feedback).
select r.application_name, age(r.backend_xmin) as xids from pg_stat_replication r where r.backend_xmin is not null;

-- name: wraparound
-- The oldest transaction and multixact ids of the server's databases.
select d.datname, age(d.datfrozenxid) as xids, mxid_age(d.datminmxid) as mxids from pg_database d
 where d.datallowconn order by greatest(age(d.datfrozenxid), mxid_age(d.datminmxid)) desc limit 1;

-- name: notifications
-- How full the server's one queue of notifications is, from 0 to 1.
select pg_notification_queue_usage() as used;

-- name: roles
-- What this user may do: each role of the schema, whether it exists, whether the user has it, and whether it owns the schema.
select r.role, exists (select from pg_roles p where p.rolname = r.role) as found,
       exists (select from pg_roles p where p.rolname = r.role and pg_has_role(current_user, p.oid, 'usage')) as mine,
       coalesce((select pg_has_role(current_user, n.nspowner, 'usage') from pg_namespace n where n.nspname = '{{schema}}'),
                false) as owner, current_user as "user"
  from unnest(array['{{schema}}_producer', '{{schema}}_worker', '{{schema}}_operator', '{{schema}}_reader']) r(role);

-- name: indexes
-- Indexes that were cut off while they were built. The index of a partitioned table is invalid until its parts are there.
select c.relname as index, t.relname as "table" from pg_index i
  join pg_class c on c.oid = i.indexrelid join pg_class t on t.oid = i.indrelid join pg_namespace n on n.oid = c.relnamespace
 where n.nspname = '{{schema}}' and c.relkind = 'i' and not (i.indisvalid and i.indisready) order by c.relname;

-- name: partitions
-- For each partitioned table: for how many days from today there is a partition, without a gap, and how many are past
-- their retention.
select t.parent, d.today,
       coalesce((select min(g.day)::date - d.today from generate_series(d.today::timestamp, d.today + 61, interval '1 day') g(day)
         where not exists (select from {{schema}}.partitions p where p.parent = t.parent and p.day = g.day)), 61) as days,
       (select count(*)::int from {{schema}}.partitions p where p.parent = t.parent and p.day < d.kept_from - 1) as expired
  from (values ('history'), ('ledger')) t(parent)
 cross join (select ({{schema}}.now() at time zone 'UTC')::date as today,
                    (({{schema}}.now() - i.history_retention) at time zone 'UTC')::date as kept_from
               from {{schema}}.installation i) d;

-- name: vacuum
-- Dead rows of the tables that change all the time, and whether autovacuum may clean them.
select s.relname as "table", s.n_live_tup as live, s.n_dead_tup as dead, greatest(s.last_autovacuum, s.last_vacuum) as last,
       coalesce('autovacuum_enabled=false' = any (c.reloptions) or 'autovacuum_enabled=off' = any (c.reloptions), false) as off
  from pg_stat_user_tables s join pg_class c on c.oid = s.relid
 where s.schemaname = '{{schema}}' and c.relkind = 'r' and not c.relispartition order by s.n_dead_tup desc;

-- name: sizes
-- Bytes of each table with its indexes, partitions together.
select coalesce(p.relname, c.relname) as "table", sum(pg_total_relation_size(c.oid))::bigint as bytes, count(*)::int as parts
  from pg_class c left join pg_inherits i on i.inhrelid = c.oid left join pg_class p on p.oid = i.inhparent
  join pg_namespace n on n.oid = c.relnamespace
 where n.nspname = '{{schema}}' and c.relkind = 'r' group by 1 order by 2 desc;

-- name: sequences
-- Sequences of the schema that have used up most of their numbers.
select s.sequencename as name, s.last_value::float8 / s.max_value as used from pg_sequences s
 where s.schemaname = '{{schema}}' and s.last_value::float8 / s.max_value > $1::float8 order by 2 desc;

-- name: workers
-- Workers that have not ended; expired_for is how long ago their lease ran out, in seconds, negative while it holds.
select w.id::text as id, w.name, w.status, w.version,
       extract(epoch from {{schema}}.now() - w.lease_expires_at)::float8 as expired_for
  from {{schema}}.workers w where w.status in ('live', 'draining') order by w.id;

-- name: lost_workers
-- How many were declared lost within the last hour.
select count(*)::int as n, max(w.ended_at) as last from {{schema}}.workers w
 where w.status = 'lost' and w.ended_at > {{schema}}.now() - interval '1 hour';

-- name: orphans
-- Claims whose worker is lost or absent, which the leader has not settled yet.
select count(*)::int as n, extract(epoch from {{schema}}.now() - min(j.claimed_at))::float8 as oldest from {{schema}}.jobs j
 where j.status = 'running' and j.claimed_by is not null and not exists (
   select from {{schema}}.workers w where w.id = j.claimed_by and w.status in ('live', 'draining'));

-- name: leader
-- Who looks after lost workers, partitions and retention; seconds_left is negative where the role has run out.
select w.name, w.status, l.holder::text as holder, l.quiet_until > {{schema}}.now() as quiet,
       case when l.expires_at > '-infinity' then extract(epoch from l.expires_at - {{schema}}.now())::float8 end as seconds_left
  from {{schema}}.leader l left join {{schema}}.workers w on w.id = l.holder where l.role = 'maintenance';

-- name: queues
-- What waits in each queue, for how long, and who serves it; seconds.
select q.queue, q.due, q.running, extract(epoch from {{schema}}.now() - q.oldest_due)::float8 as waiting_for,
       extract(epoch from {{schema}}.now() - q.paused_at)::float8 as paused_for,
       (select count(*)::int from {{schema}}.workers w
         where w.status = 'live' and w.lease_expires_at > {{schema}}.now() and q.queue = any (w.queues)) as workers
  from {{schema}}.queue_counts q order by q.oldest_due nulls last, q.queue;

-- name: stranded
-- Due jobs in a queue that is served, but not by a worker that knows the task and has the level.
with due as materialized (
  select j.queue, j.task, j.required_worker_schema as level, count(*)::int as n, min(j.run_at) as oldest
    from {{schema}}.jobs j where j.status = 'pending' and j.run_at <= {{schema}}.now() group by 1, 2, 3),
live as materialized (
  select w.queues, w.tasks, w.capability_level from {{schema}}.workers w
   where w.status = 'live' and w.lease_expires_at > {{schema}}.now())
select d.queue, d.task, d.level, d.n, extract(epoch from {{schema}}.now() - d.oldest)::float8 as waiting_for from due d
 where exists (select from live l where d.queue = any (l.queues))
   and not exists (select from live l where d.queue = any (l.queues) and d.task = any (l.tasks)
                      and l.capability_level >= coalesce(d.level, 0))
 order by d.n desc limit 20;

-- name: ahead
-- What runs at work have yet to get through and no worker of its queue knows, where the queue has workers.
select u.workflow, u.node, u.task, u.queue, u.runs, u.first_run::text as first_run from {{schema}}.unserved_nodes u
 where exists (select from {{schema}}.workers w
                where w.status = 'live' and w.lease_expires_at > {{schema}}.now() and u.queue = any (w.queues))
 order by u.runs desc, u.workflow, u.node limit 20;

-- name: effects
-- Promised effects that stand still: whose job has failed, or for which none could be made.
with still as materialized (
  select i.effect_key, 'failed' as what from {{schema}}.history h join {{schema}}.effect_intents i on i.job_id = h.id
   where h.status = 'failed' and i.settled_at is null
  union all
  select i.effect_key, coalesce(i.fault, i.job_ended) from {{schema}}.effect_intents i
   where (i.fault is not null or i.job_ended = 'failed') and i.settled_at is null)
select s.what, count(*)::int as n, min(s.effect_key) as first from still s group by s.what order by s.what;

-- name: unknown
-- Jobs whose outcome was never told: how many, how many of them have been so for over $1 seconds and are asked about by
-- no reconcile job, and the first of those.
select count(*)::int as n, count(*) filter (where s.stands)::int as standing,
       extract(epoch from {{schema}}.now() - min(u.since) filter (where s.stands))::float8 as oldest,
       (array_agg(u.job_id::text order by u.since, u.job_id) filter (where s.stands))[1:3] as ids,
       count(*) filter (where s.stands and u.reconcile_status = 'failed')::int as exhausted
  from {{schema}}.unknown_outcomes u
 cross join lateral (select u.since <= {{schema}}.now() - make_interval(secs => $1::double precision)
                            and coalesce(u.reconcile_status, '') not in ('pending', 'running', 'held') as stands) s;

-- name: suspects
-- Jobs that were on a lost worker twice or more, and wait to be run alone.
select count(*)::int as n, (array_agg(distinct j.task))[1:5] as tasks from {{schema}}.jobs j
 where j.status = 'pending' and j.recoveries >= 2;

-- name: orderings
-- Ordering keys that have been halted for more than $1 seconds, by a failed job or an unknown outcome.
select count(*)::int as n, extract(epoch from {{schema}}.now() - min(k.since))::float8 as oldest, (array_agg(k.key order by k.since))[1:3] as keys
  from (select a.key, min(a.since) as since from (
          select h.key, h.halted_at as since from {{schema}}.ordering_halts h
          union all
          select j.ordering_key, j.claimed_at from {{schema}}.jobs j where j.ordering_key is not null and j.status = 'unknown' and j.ordering_halt) a
         group by a.key) k
 where k.since < {{schema}}.now() - make_interval(secs => $1::double precision);

-- name: run_epochs
-- Jobs of nodes that have no run epoch, as a release that knew none made them.
select count(*)::int as n, (array_agg(j.id::text order by j.id))[1:3] as ids, (array_agg(j.run_id::text order by j.id))[1] as run
  from {{schema}}.jobs j where j.run_id is not null and j.run_epoch is null;

-- name: paused_runs
-- Runs that were paused by themselves, not with one above them, the longest first.
select p.run_id::text as id, p.workflow, p.code, p.reason, p.actor, extract(epoch from {{schema}}.now() - p.since)::float8 as paused_for
  from {{schema}}.paused_runs p where p.resume = p.run_id order by p.since limit 1000;

-- name: incidents
-- What waits for a grant, the longest first, and how many incidents go on by themselves.
select o.incident_id::text as id, o.code, o.task, o.job_id::text as job, o.run_id::text as run, o.fault ->> 'message' as message,
       extract(epoch from {{schema}}.now() - o.seen_at)::float8 as since
  from {{schema}}.open_incidents o where o.is_current and o.status = 'exhausted' order by o.seen_at limit 1000;

-- name: work_budgets
-- Runs with nodes that wait since a work budget is spent, those with the most first.
select b.run_id::text as id, b.workflow, b.budget, b.waiting from {{schema}}.run_budgets b where b.remaining = 0 and b.waiting > 0 order by b.waiting desc, b.run_id limit 1000;

-- name: runs
-- Runs that have not ended, and those of them that nothing carries on: none of their nodes has a job that could, or one
-- that is ready has none. Every transition is one transaction, so no look falls between.
with found as materialized (
  select r.id, r.open_nodes = 0 or n.without > 0
         or n.ready = 0 and not exists (select from {{schema}}.work_budgets b where b.run_id = r.budget_of and b.begun >= b.budget) as still, n.without > 0 or r.open_nodes = 0 as healable
    from {{schema}}.runs r
   cross join lateral (
     select count(*) as ready, count(*) filter (where j.id is null) as without
       from {{schema}}.nodes n left join {{schema}}.jobs j on j.id = n.id where n.run_id = r.id and n.status = 'ready') n
   where r.finished_at is null and r.status <> 'paused')
select count(*)::int as n, count(*) filter (where f.still)::int as still, count(*) filter (where f.still and f.healable)::int as healable,
       (array_agg(f.id::text order by not f.healable, f.id) filter (where f.still))[1:3] as ids
  from found f;

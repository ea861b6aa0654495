-- Statements of taskq.testing: a database for the length of a test, and what is left to be done in it. Nothing here
-- writes to a job but through the functions of the schema.

-- name: create_database
-- "@database" is replaced by a name that taskq.testing has made up.
create database "@database" template template0;

-- name: drop_database
drop database if exists "@database" with (force);

-- name: left
-- What is left to be done, by queue and task: due (or running), to wait, or held up, by a line, a pause or for a signal, with
-- the ids of up to three. Held ones are due as long as the sweep has their keys, or their children, to look at.
select j.queue, j.task, j.status,
       case j.status when 'running' then true
         when 'pending' then j.run_at <= {{schema}}.now() and q.paused_at is null and coalesce(l.operator_limit, l.code_limit, 1) > 0
         else (j.ordering_later is null or j.run_at <= {{schema}}.now()) and exists (
           select from {{schema}}.ordering_rechecks r where r.key = j.ordering_key and r.due_at <= {{schema}}.now() + interval '1 s')
           or exists (select from {{schema}}.child_rechecks c where c.job_id = j.id) end as due,
       j.status = 'held' and (j.held_reason in ('signal', 'paused') or j.held_reason = 'ordering' and j.ordering_later is null) as held_up,
       count(*)::int as n, (array_agg(j.id order by j.run_at, j.id))[1:3] as ids
  from {{schema}}.jobs j left join {{schema}}.queues q on q.name = j.queue left join {{schema}}.limits l on l.name = j.cohort
 where j.status in ('pending', 'running', 'held')
 group by 1, 2, 3, 4, 5 order by 1, 2, 3, 4, 5;

-- name: carry_on_run
-- Jobs of runs of which more is ready than one transaction takes on; the worker that leads is told of them.
select run_id from {{schema}}.carry_on_run();

-- name: sweep_orderings
-- Turns of ordering keys that could not be given at once are given now; the worker does it about once a second.
select {{schema}}.sweep_orderings() as n;

-- name: sweep_children
-- Parents that could not be told at once that a child has ended are told now; the worker that leads does it.
select {{schema}}.sweep_children() as n;

-- name: make_next_due
-- Of the jobs that wait for a later time, those of the earliest are made due, as an operator does it.
select {{schema}}.retry(j.id, 'made due by taskq.testing.drain') as answer
  from {{schema}}.jobs j
 where (j.status = 'pending' or j.status = 'held' and j.ordering_later) and j.run_at = (
   select min(k.run_at) from {{schema}}.jobs k left join {{schema}}.queues q on q.name = k.queue
    where (k.status = 'pending' or k.status = 'held' and k.ordering_later) and k.run_at > {{schema}}.now() and q.paused_at is null);

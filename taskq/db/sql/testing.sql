-- Statements of taskq.testing: a database for the length of a test, and what is left to be done in it. Nothing here
-- writes to a job but through the functions of the schema.

-- name: create_database
-- "@database" is replaced by a name that taskq.testing has made up.
create database "@database" template template0;

-- name: drop_database
drop database if exists "@database" with (force);

-- name: left
-- What is left to be done, by queue and task: due (or running) or to wait, with the ids of up to three.
select j.queue, j.task, j.status, j.status = 'running' or (j.run_at <= {{schema}}.now() and q.paused_at is null) as due,
       count(*)::int as n, (array_agg(j.id order by j.run_at, j.id))[1:3] as ids
  from {{schema}}.jobs j left join {{schema}}.queues q on q.name = j.queue
 where j.status in ('pending', 'running')
 group by 1, 2, 3, 4 order by 1, 2, 3, 4;

-- name: make_next_due
-- Of the jobs that wait for a later time, those of the earliest are made due, as an operator does it.
select {{schema}}.retry(j.id, 'made due by taskq.testing.drain') as answer
  from {{schema}}.jobs j
 where j.status = 'pending' and j.run_at = (
   select min(k.run_at) from {{schema}}.jobs k left join {{schema}}.queues q on q.name = k.queue
    where k.status = 'pending' and k.run_at > {{schema}}.now() and q.paused_at is null);

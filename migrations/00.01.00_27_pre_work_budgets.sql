-- Work budgets: how many nodes a run, with all runs below it, may give jobs in all. What is ready once that is spent waits,
-- due, until an operator raises it; nothing fails over it. One row for a tree counts, and is taken before the jobs are made,
-- by whoever holds root locks, and may hold jobs: so nobody waits for it, but comes again.

create function {{schema}}.open_budget(p_run {{schema}}.runs, p_budget bigint) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if p_run.budget_of = p_run.id then
    insert into {{schema}}.work_budgets (run_id, budget) values (p_run.id, p_budget);
  else
    update {{schema}}.work_budgets b set budget = b.budget + p_budget where b.run_id = p_run.budget_of;
  end if;
end $$;
comment on function {{schema}}.open_budget({{schema}}.runs, bigint) is 'What the workflow of a run that is being admitted declares: its own budget, or so much more of that which is above it.';

create function {{schema}}.take_budget(p_run {{schema}}.runs, p_n integer) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_left bigint;
begin
  if p_run.budget_of is null or p_n <= 0 then
    return greatest(p_n, 0);
  end if;
  select b.budget - b.begun into v_left from {{schema}}.work_budgets b where b.run_id = p_run.budget_of for update skip locked;
  if not found then
    -- Somebody of the tree is at it: the leader comes again.
    perform pg_notify('{{schema}}_due', p_run.id::text);
    return 0;
  end if;
  v_left := greatest(least(v_left, p_n), 0);
  if v_left > 0 then
    update {{schema}}.work_budgets b set begun = b.begun + v_left where b.run_id = p_run.budget_of;
  end if;
  return v_left;
end $$;
comment on function {{schema}}.take_budget({{schema}}.runs, integer) is
  'How many of p_n nodes of a run may be given jobs now, which counts them: all where there is no budget; none where it is spent, or somebody is at it, of which the leader is told. The caller holds the root lock.';

create function {{schema}}.give_back_budget(p_run {{schema}}.runs, p_n integer) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
begin
  if p_run.budget_of is not null and p_n > 0 then
    update {{schema}}.work_budgets b set begun = b.begun - p_n where b.run_id = p_run.budget_of;
  end if;
end $$;
comment on function {{schema}}.give_back_budget({{schema}}.runs, integer) is 'Takes nodes back that were counted and got no job. The same transaction has counted them.';

create function {{schema}}.is_budget_spent(p_run {{schema}}.runs) returns boolean
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set enable_seqscan = off set enable_bitmapscan = off set plan_cache_mode = force_generic_plan set jit = off as $$
begin
  return p_run.budget_of is not null and exists (select from {{schema}}.work_budgets b where b.run_id = p_run.budget_of and b.begun >= b.budget);
end $$;
comment on function {{schema}}.is_budget_spent({{schema}}.runs) is 'Whether a run has a work budget, and no node more of it is given a job.';

create function {{schema}}.set_work_budget(run_id uuid, budget bigint, reason text default null, actor text default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_variable
declare
  v_run {{schema}}.runs;
  v_old {{schema}}.work_budgets;
begin
  if reason is null or btrim(reason) = '' then
    raise exception using errcode = 'WF009', message = 'setting the work budget of a run needs a reason', hint = 'Say why; it goes on the record.';
  elsif budget is null or budget not between 1 and 10000000 then
    raise exception using errcode = 'WF009', message = format('the work budget of a run is %s', coalesce(budget::text, 'null')), hint = 'Give how many bodies it may begin in all, those that it has begun included: 1 to 10000000.';
  end if;
  select * into v_run from {{schema}}.runs r where r.id = run_id;
  if not found then
    raise exception using errcode = 'WF025', message = format('there is no run %s', run_id), detail = jsonb_build_object('run_id', run_id)::text,
      hint = 'Check the id; retention may have dropped it.';
  elsif v_run.budget_of is null then
    raise exception using errcode = 'WF026', message = format('run %s has no work budget', run_id), detail = jsonb_build_object('run_id', run_id, 'status', v_run.status)::text,
      hint = 'It is declared with the workflow, @app.workflow(work_budget=...), and stamped at admission; pause or cancel this one.';
  elsif v_run.budget_of <> run_id then
    raise exception using errcode = 'WF026', message = format('the work budget of run %s is that of run %s', run_id, v_run.budget_of),
      detail = jsonb_build_object('run_id', run_id, 'status', v_run.status, 'budget_of', v_run.budget_of)::text, hint = format('Set that: taskq runs budget %s.', v_run.budget_of);
  elsif v_run.finished_at is not null then
    return 'finished';
  end if;
  -- Whoever has found it spent is waited for, so that the leader, told below, sees what that left due.
  select * into v_old from {{schema}}.work_budgets b where b.run_id = run_id for update;
  if not found then
    raise exception using errcode = 'WF025', message = format('the work budget of run %s is gone', run_id), detail = jsonb_build_object('run_id', run_id)::text, hint = 'See taskq verify.';
  end if;
  -- Whatever can be seen from here, and whatever it is set to: what was left due meanwhile, by who found the row taken, is told of as well.
  perform pg_notify('{{schema}}_due', run_id::text);
  if v_old.budget = budget then
    return 'already';
  end if;
  update {{schema}}.work_budgets b set budget = set_work_budget.budget where b.run_id = v_old.run_id;
  perform {{schema}}.note('set_work_budget', run_id::text, actor, reason, jsonb_build_object('budget', budget, 'was', v_old.budget, 'begun', v_old.begun));
  return 'set';
end $$;
comment on function {{schema}}.set_work_budget(uuid, bigint, text, text) is
  'Sets how many bodies a run may begin in all with the runs below it, those that it has begun included; what waits for it goes on. Answers set; already or finished, where nothing was changed. Refused (WF026) for a run that was admitted without one, or whose budget is that of a run above it, which the refusal names; for one that is not there (WF025), and without a reason or with a number that cannot be (WF009).';

create view {{schema}}.run_budgets as
  select b.run_id, r.workflow, r.run_key, b.budget, b.begun, greatest(b.budget - b.begun, 0) as remaining, w.waiting
    from {{schema}}.work_budgets b
    join {{schema}}.runs r on r.id = b.run_id
   cross join lateral (
     select count(*)::integer as waiting from {{schema}}.runs o join {{schema}}.nodes n on n.run_id = o.id and n.due
      where b.begun >= b.budget and o.budget_of = b.run_id and o.finished_at is null) w
   where r.finished_at is null;
comment on view {{schema}}.run_budgets is 'Runs that have a work budget: how much it is, how many bodies have begun, how many more may, and how many nodes are ready and wait since it is spent.';

create function {{schema}}.check_work_budgets() returns table (law integer, code text, run_id uuid, detail text)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  return query
    select 9, 'work_budget_missing', r.budget_of, format('%s runs count what they begin by its work budget, and it has none', count(*))
      from {{schema}}.runs r
     where r.finished_at is null and r.budget_of is not null and not exists (select from {{schema}}.work_budgets b where b.run_id = r.budget_of)
     group by r.budget_of;
  return query
    select 9, 'work_budget_differs', c.id, format('its budget is %s, that of run %s, which it is a part of, is that of run %s', coalesce('that of run ' || c.budget_of, 'none'), p.id, p.budget_of)
      from {{schema}}.runs p join {{schema}}.runs c on c.parent_run = p.id
     where p.finished_at is null and p.budget_of is not null and c.budget_of is distinct from p.budget_of;
  return query
    select 9, 'work_budget_miscounted', b.run_id, format('%s nodes of it and of the runs below it were given jobs, and it counts %s', n.n, b.begun)
      from {{schema}}.work_budgets b
      join {{schema}}.runs t on t.id = b.run_id and t.finished_at is null
      -- Counted for all at once: for each by itself all runs were walked over, ended ones included.
      join (
        select r.budget_of, count(*) as n from {{schema}}.runs r join {{schema}}.nodes o on o.run_id = r.id and o.ready_at is not null
         where r.budget_of is not null group by r.budget_of) n on n.budget_of = b.run_id
     where n.n > b.begun;
end $$;
comment on function {{schema}}.check_work_budgets() is 'The part of check_invariants that is about work budgets.';

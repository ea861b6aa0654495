-- Runs as people see them; what heals them, what forgets them, and what verify holds them to.

create view {{schema}}.run_tree as
  select n.run_id, r.workflow, r.run_key, r.status as run_status, n.ix, {{schema}}.node_name(r.items, k.name, n.ix) as name, k.job ->> 'task' as task,
         case when n.status <> 'ready' then n.status
              when j.status = 'running' and exists (select from {{schema}}.preparations p where p.job_id = j.id and p.claim_epoch = j.claim_epoch and p.answer is null) then 'preparing'
              else coalesce(j.status, 'ready') end as status,
         j.held_reason, n.id as job_id, j.claimed_by as worker_id, coalesce(j.claim_epoch, n.claim_epoch) as claim_epoch, j.attempt, n.ready_at, n.finished_at,
         b.name as blocked_by,
         case when n.status = 'waiting' then array(
           select s.name from {{schema}}.plan_edges e join {{schema}}.nodes w on w.run_id = n.run_id and w.ix = e.source
             join {{schema}}.plan_nodes s on s.plan_hash = r.plan_hash and s.ix = e.source
            where e.plan_hash || ':' || e.target::text = r.plan_hash || ':' || n.ix::text and w.status in ('waiting', 'ready') group by s.ix, s.name order by s.ix limit 100) end as waits_for,
         n.result, n.error, c.id as child_run, c.status as child_status
    from {{schema}}.nodes n
    join {{schema}}.runs r on r.id = n.run_id
    join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = {{schema}}.place_in_plan(r.items, n.ix)
    left join {{schema}}.plan_nodes b on b.plan_hash = r.plan_hash and b.ix = n.blocked_by
    left join {{schema}}.jobs j on j.id = n.id and n.status = 'ready'
    left join {{schema}}.runs c on c.parent_node = n.id;
comment on view {{schema}}.run_tree is 'Every node of every run as it stands, with what it waits for, what blocks it, and the child run that it stands for.';

create view {{schema}}.blocked_nodes as
  select t.run_id, t.workflow, t.run_key, t.run_status, t.name, t.task, t.status, t.blocked_by, t.waits_for, t.job_id, t.held_reason, t.child_run
    from {{schema}}.run_tree t where t.status in ('blocked', 'held', 'unknown', 'waiting')
     and not exists (select from {{schema}}.nodes d where d.id = t.job_id and d.due);
comment on view {{schema}}.blocked_nodes is 'Nodes that do not go on by themselves, and what each waits for: blocked by a failure, held (such as for a child run), unknown, or waiting for others.';

create view {{schema}}.unserved_nodes as
  with live as materialized (
    select distinct q.queue, t.task from {{schema}}.workers w cross join unnest(w.queues) q(queue) cross join unnest(w.tasks) t(task)
     where w.status in ('live', 'draining') and w.lease_expires_at > {{schema}}.now()),
  plans as materialized (
    select r.plan_hash, r.workflow from {{schema}}.runs r where r.finished_at is null and r.cancel_requested_at is null group by 1, 2)
  select p.workflow, p.plan_hash, k.name as node, k.job ->> 'task' as task, k.job ->> 'queue' as queue, o.runs, o.first_run
    from plans p
    join {{schema}}.plan_nodes k on k.plan_hash = p.plan_hash and k.child is null
   cross join lateral (
     select count(*)::int as runs, min(r.id::text)::uuid as first_run from {{schema}}.runs r
      where r.finished_at is null and r.cancel_requested_at is null and r.plan_hash = k.plan_hash
        and exists (select from {{schema}}.nodes n where n.run_id = r.id and n.status in ('waiting', 'ready') and (n.ix = k.ix or r.items is not null))) o
   where o.runs > 0 and not exists (select from live l where l.task = k.job ->> 'task' and l.queue = k.job ->> 'queue');
comment on view {{schema}}.unserved_nodes is 'Nodes that runs at work have yet to get through, and that no worker which lives serves: of a plan whose task a deploy has renamed or taken out, or of a queue without a worker. They wait; nothing of them fails.';

create view {{schema}}.unsettled_effects as
  select e.*, r.id as run_id, r.workflow
    from {{schema}}.effects e
    left join {{schema}}.nodes n on n.id = e.owner_job_id
    left join {{schema}}.runs r on r.id = coalesce(n.run_id, e.owner_job_id)
   where not e.settled;
comment on view {{schema}}.unsettled_effects is 'Terminal effects, of jobs, nodes and runs, that are promised and not settled yet.';

-- Every transition is one transaction, so there is nothing to heal, unless rows were restored or written behind the triggers' back.
create function {{schema}}.heal_run(p_run uuid) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_run {{schema}}.runs;
  v_node record;
  v_front integer[] := '{}';
  v_failed boolean := false;
  v_word text;
  v_made integer := 0;
  v_open integer;
  v_active integer;
begin
  perform {{schema}}.ensure_today();
  select * into v_run from {{schema}}.runs r where r.id = p_run and r.finished_at is null for update skip locked;
  if not found then
    return 'left alone';
  end if;
  for v_node in
    select n.ix, n.id, h.status, h.finished_at, h.claim_epoch, h.error, h.result
      from {{schema}}.nodes n
      left join lateral (select * from {{schema}}.history o where o.id = n.id and o.finished_at >= {{schema}}.id_time(n.id) - interval '1 day' limit 1) h on true
     where n.run_id = p_run and n.status = 'ready' and (select j.id from {{schema}}.jobs j where j.id = n.id limit 1) is null
     order by n.ix
  loop
    if v_node.status is null then
      v_made := v_made + 1;
      if v_run.cancel_requested_at is not null or v_run.stopping_at is not null then
        v_word := 'cancelled';
        update {{schema}}.nodes n set status = 'cancelled', finished_at = {{schema}}.now(),
            error = jsonb_build_object('type', 'Cancelled', 'message', 'its job was lost, and its run is being cancelled') where n.id = v_node.id;
      else
        select case when m.ready <> '{}' then 'ready' when m.skipped <> '{}' then 'skipped' else 'failed' end into v_word
          from {{schema}}.make_ready(v_run, array[v_node.ix]) m;
      end if;
      continue when v_word = 'ready';
      if v_word = 'skipped' then
        update {{schema}}.nodes n set status = 'skipped', finished_at = {{schema}}.now() where n.id = v_node.id;
      end if;
    else
      v_word := v_node.status;
      update {{schema}}.nodes n set status = v_node.status, finished_at = v_node.finished_at, claim_epoch = v_node.claim_epoch, error = v_node.error,
          result = case v_node.status when 'succeeded' then coalesce(v_node.result, 'null') end where n.id = v_node.id;
      perform {{schema}}.receipt(p_run, 'ended', v_node.ix, v_node.claim_epoch, 1, v_node.status);
    end if;
    v_front := v_front || v_node.ix;
    v_failed := v_failed or v_word not in ('succeeded', 'skipped');
  end loop;
  for v_node in
    select n.id, k.child, j.payload
      from {{schema}}.nodes n join {{schema}}.plan_nodes k on k.plan_hash = v_run.plan_hash and k.ix = {{schema}}.place_in_plan(v_run.items, n.ix) and k.child is not null
      join {{schema}}.jobs j on j.id = n.id and j.status = 'held' and j.held_reason = 'run'
     where n.run_id = p_run and n.status = 'ready' and not exists (select from {{schema}}.runs c where c.parent_node = n.id and c.finished_at is null)
     order by n.ix
  loop
    perform {{schema}}.begin_child(v_run, v_node.id, v_node.child, v_node.payload, false, false);
    v_made := v_made + 1;
  end loop;
  select count(*) filter (where n.status in ('waiting', 'ready')) + coalesce(v_run.wanted - v_run.written, 0), count(*) filter (where n.status = 'ready') into v_open, v_active
    from {{schema}}.nodes n where n.run_id = p_run;
  if v_front = '{}' and v_made = 0 and v_run.open_nodes > 0 and v_run.open_nodes = v_open and v_run.active is not distinct from (case when v_run.items is not null then v_active end) then
    return 'sound';
  end if;
  update {{schema}}.runs r set open_nodes = v_open, active = case when r.items is not null then v_active end where r.id = p_run;
  perform {{schema}}.receipt(p_run, 'recovered', null, null, cardinality(v_front) + v_made);
  v_failed := {{schema}}.advance(v_run, v_front, null, null, 0, v_failed);
  perform {{schema}}.settle_run(p_run, v_failed);
  return 'healed';
end $$;
comment on function {{schema}}.heal_run(uuid) is 'Carries on a run that stands still: a node whose job has ended without it, or is nowhere, or waits for a child run that has ended, or is nowhere. Answers healed, sound or left alone (it has ended, or is busy).';

-- By key for each: a join, or an EXISTS that can be hashed, reads all nodes and jobs there are where the statistics call them empty.
create function {{schema}}.heal_runs(p_after uuid default null, p_limit integer default 100) returns table (run_id uuid, answer text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  for run_id in
    select r.id from {{schema}}.runs r
     where r.finished_at is null and (p_after is null or r.id > p_after)
       and (r.open_nodes = 0
         or (select n.id from {{schema}}.nodes n where n.run_id = r.id and n.status = 'ready' and (select j.id from {{schema}}.jobs j where j.id = n.id limit 1) is null limit 1) is not null
         or (select p.depth from {{schema}}.plans p where p.hash = r.plan_hash) > 0 and (
           select n.id from {{schema}}.nodes n where n.run_id = r.id and n.status = 'ready'
              and (select j.id from {{schema}}.jobs j where j.id = n.id and j.status = 'held' and j.held_reason = 'run' limit 1) is not null
              and (select c.id from {{schema}}.runs c where c.parent_node = n.id and c.finished_at is null limit 1) is null limit 1) is not null)
     order by r.id limit p_limit
  loop
    begin
      answer := {{schema}}.heal_run(run_id);
    exception when others then
      answer := 'error: ' || sqlstate;
    end;
    return next;
  end loop;
end $$;
comment on function {{schema}}.heal_runs(uuid, integer) is 'Heals up to p_limit runs that stand still, after a run''s id. Answers as heal_run does, or error and the SQLSTATE for one that cannot be healed, which keeps no other from it.';

-- By the index, a run at a time. One that others are at goes on with what they do; one that cannot be carried on is answered
-- with its SQLSTATE, and keeps none behind it from it.
create function {{schema}}.carry_on_run(p_after uuid default null) returns table (run_id uuid, answer text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
#variable_conflict use_column
declare
  v_run {{schema}}.runs;
  v_next uuid := p_after;
begin
  perform {{schema}}.ensure_today();
  loop
    select n.run_id into v_next from {{schema}}.nodes n
     where n.due and n.run_id > coalesce(v_next, '00000000-0000-0000-0000-000000000000') order by n.run_id, n.ix limit 1;
    exit when not found;
    select * into v_run from {{schema}}.runs r where r.id = v_next for update skip locked;
    -- What is due of a map waits for its turn; the page of an emit is beside those that have turns.
    continue when not found or {{schema}}.room_for_items(v_run) <= 0
      and (v_run.pages is null or not exists (select from {{schema}}.nodes n where n.run_id = v_next and n.due and n.ix >= 1000000));
    -- And so does what a work budget is spent for, or somebody is at.
    if v_run.budget_of is not null then
      perform from {{schema}}.work_budgets b where b.run_id = v_run.budget_of and b.begun < b.budget for update skip locked;
      continue when not found;
    end if;
    continue when not exists (select from {{schema}}.nodes n where n.run_id = v_next and n.due);
    begin
      perform {{schema}}.settle_run(v_next, {{schema}}.advance(v_run, '{}', null, null, 0, false));
      answer := 'carried on';
    exception when others then
      answer := 'error: ' || sqlstate;
    end;
    run_id := v_next;
    return next;
    return;
  end loop;
end $$;
comment on function {{schema}}.carry_on_run(uuid) is
  'Gives jobs to the next nodes of one run of which more is ready than one transaction takes on: the first after an id that nobody else is at. Answers carried on, or error and the SQLSTATE; no row where there is none.';

create function {{schema}}.stop_children(p_after uuid default null, p_limit integer default 100) returns table (run_id uuid, answer text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  perform {{schema}}.ensure_today();
  for run_id in
    select c.id from {{schema}}.runs c join {{schema}}.runs p on p.id = c.parent_run
     where c.parent_run is not null and c.finished_at is null and c.cancel_requested_at is null and (p_after is null or c.id > p_after)
       and (p.finished_at is not null or p.cancel_requested_at is not null or p.stopping_at is not null)
     order by c.id limit p_limit
  loop
    perform from {{schema}}.runs c where c.id = run_id and c.finished_at is null and c.cancel_requested_at is null for update skip locked;
    answer := case when found then 'stopped' else 'left alone' end;
    if found then
      perform {{schema}}.stop_run(run_id, jsonb_build_object('type', 'Cancelled', 'message', 'its parent is being cancelled'));
    end if;
    return next;
  end loop;
end $$;
comment on function {{schema}}.stop_children(uuid, integer) is
  'Cancels up to p_limit child runs whose parent is being cancelled, after a run''s id: those that somebody was at when the parent was. Answers stopped, or left alone (somebody still is).';

create function {{schema}}.prune_runs(p_limit integer default 1000) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_runs uuid[];
  v_n integer;
  v_before timestamptz := (select {{schema}}.now() - i.history_retention from {{schema}}.installation i);
begin
  v_runs := array(
    select r.id from {{schema}}.runs r
     where r.finished_at is not null and r.finished_at < v_before
       -- Parents first: a run is never without the child runs that it is made of.
       and (r.parent_run is null or not exists (select from {{schema}}.runs p where p.id = r.parent_run))
       and (select e.id from {{schema}}.effects e where e.owner_job_id = r.id and not e.settled limit 1) is null
       and (select n.id from {{schema}}.nodes n where n.run_id = r.id and (select e.id from {{schema}}.effects e where e.owner_job_id = n.id and not e.settled limit 1) is not null limit 1) is null
       and (select c.id from {{schema}}.runs c where c.parent_run = r.id and c.items is not null and (
           select n.id from {{schema}}.nodes n where n.run_id = c.id and (select e.id from {{schema}}.effects e where e.owner_job_id = n.id and not e.settled limit 1) is not null limit 1) is not null limit 1) is null
     order by r.finished_at limit p_limit for update of r skip locked);
  -- Of large maps fewer at once.
  v_runs := array(
    select u.id from (
      select x.id, x.place, sum(coalesce(r.written, 0) + coalesce(r.pages, 0)) over (order by x.place) as nodes
        from unnest(v_runs) with ordinality x(id, place) join {{schema}}.runs r on r.id = x.id) u
     where u.place = 1 or u.nodes <= 100000);
  delete from {{schema}}.receipts c where c.run_id = any(v_runs);
  delete from {{schema}}.loop_holds h where h.run_id = any(v_runs);
  delete from {{schema}}.work_budgets b where b.run_id = any(v_runs);
  delete from {{schema}}.nodes n where n.run_id = any(v_runs);
  delete from {{schema}}.runs r where r.id = any(v_runs);
  get diagnostics v_n = row_count;
  return v_n;
end $$;
comment on function {{schema}}.prune_runs(integer) is 'Forgets up to p_limit runs that ended longer ago than the history is kept, and whose effects and compensations are settled; child runs after their parents. Called by prune.';

create function {{schema}}.check_runs(scope text default 'live', since timestamptz default null) returns table (law integer, code text, run_id uuid, detail text)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
begin
  return query
    with r as materialized (
      select * from {{schema}}.runs r where r.finished_at is null or scope = 'all' or scope = 'since' and r.finished_at >= since),
    n as materialized (
      select r.id as run_id, r.status as run_status, r.finished_at as run_finished_at, r.open_nodes, r.sequence, r.receipts, r.plan_hash, r.generation,
             r.items, r.wanted, r.written, r.active, r.counted_from, r.pages, count(n.id) filter (where n.status = 'ready') as ready,
             count(n.id) filter (where n.ix >= r.written and (r.pages is null or n.ix < 1000000 or n.ix >= 1000000 + r.pages) or n.item is null) as strange,
             count(n.id) filter (where n.due) as due,
             count(n.id) as nodes, count(n.id) filter (where n.status in ('waiting', 'ready')) + coalesce(r.wanted - r.written, 0) as open
        from r left join {{schema}}.nodes n on n.run_id = r.id
       group by r.id, r.status, r.finished_at, r.open_nodes, r.sequence, r.receipts, r.plan_hash, r.generation, r.items, r.wanted, r.written, r.active, r.counted_from, r.pages),
    c as materialized (
      select n.run_id, count(c.sequence) as have, min(c.sequence) as low, max(c.sequence) as high, min(c.at) filter (where c.sequence = 1) as first_at,
             bool_or(c.sequence = 1 and c.kind <> 'admitted') as wrong_first
        from n left join {{schema}}.receipts c on c.run_id = n.run_id group by n.run_id)
    select v.law, v.code, n.run_id, v.detail
      from n join c on c.run_id = n.run_id left join {{schema}}.plans p on p.hash = n.plan_hash
      cross join lateral (values
        (9, 'run_plan_missing', p.hash is null, n.plan_hash),
        (9, 'run_plan_differs', p.hash <> {{schema}}.plan_hash(p.text), n.plan_hash),
        (9, 'run_nodes_differ', n.items is null and n.nodes <> p.nodes, format('%s nodes, the plan has %s', n.nodes, p.nodes)),
        (9, 'map_differs', n.counted_from is null and p.loop is null and (n.items is null) <> (p.map is null), format('%s, and its plan is %s', case when n.items is null then 'it has no items' else 'it has items' end,
          case when p.map is null then 'that of no map' else 'that of a map' end)),
        (9, 'loop_differs', (n.counted_from is null) <> (p.loop is null), format('%s, and its plan is %s', case when n.counted_from is null then 'it counts no time' else 'it counts its time' end,
          case when p.loop is null then 'that of no loop' else 'that of a loop' end)),
        (9, 'map_nodes_differ', n.items is not null and (n.nodes <> n.written + coalesce(n.pages, 0) or n.strange > 0),
          format('%s nodes, %s of them without an item of their own, and it counts %s', n.nodes, n.strange, n.written + coalesce(n.pages, 0))),
        (9, 'emit_differs', (n.pages is null) = coalesce(p.map ? 'pages', false), format('%s, and its plan is %s', case when n.pages is null then 'it counts no pages' else 'it counts its pages' end,
          case when p.map ? 'pages' then 'that of an emit' else 'that of no emit' end)),
        (9, 'map_active_differs', n.items is not null and n.active <> n.ready, format('%s active nodes by the run, %s by its nodes', n.active, n.ready)),
        (9, 'map_stands_still', n.items is not null and n.run_finished_at is null and n.wanted > n.written and n.due = 0, 'items have no node, and none is due that leads to them'),
        (9, 'run_open_nodes_differ', n.open_nodes <> n.open, format('%s open nodes by the run, %s by its nodes', n.open_nodes, n.open)),
        (9, 'run_ended_with_open_nodes', n.run_finished_at is not null and n.open > 0, format('it is %s, and %s nodes are open', n.run_status, n.open)),
        (9, 'run_stands_still', n.run_finished_at is null and n.open = 0, 'nothing is open, and it has not ended'),
        (9, 'receipts_missing', n.sequence = 0 or c.have <> least(n.sequence, n.receipts) or c.high <> n.sequence or c.low <> n.sequence - c.have + 1,
          format('sequence %s, %s receipts from %s to %s, %s are kept', n.sequence, c.have, coalesce(c.low, 0), coalesce(c.high, 0), n.receipts)),
        (9, 'receipts_first_differs', coalesce(c.wrong_first, false), 'its first receipt is not its admission')) v(law, code, violated, detail)
     where v.violated;
  -- Runs go by the rows, once for each plan: both ways round, so that one more is found as well as one less.
  return query
    select 9, 'run_plan_rows_differ', r.run_id, format('%s: %s rows of nodes, %s of edges', p.hash, d.nodes, d.edges)
      from (select r.plan_hash, (array_agg(r.id order by r.id))[1] as run_id from {{schema}}.runs r
             where r.finished_at is null or scope = 'all' or scope = 'since' and r.finished_at >= since group by r.plan_hash) r
      join {{schema}}.plans p on p.hash = r.plan_hash and p.hash = {{schema}}.plan_hash(p.text)
      cross join lateral (
        select (select count(*) from (
                 (select k.* from {{schema}}.plan_nodes k where k.plan_hash = p.hash except all select * from {{schema}}.nodes_of_plan(p.hash, p.text::jsonb))
                 union all (select * from {{schema}}.nodes_of_plan(p.hash, p.text::jsonb) except all select k.* from {{schema}}.plan_nodes k where k.plan_hash = p.hash)) x) as nodes,
               (select count(*) from (
                 (select e.* from {{schema}}.plan_edges e where e.plan_hash = p.hash except all select * from {{schema}}.edges_of_plan(p.hash, p.text::jsonb))
                 union all (select * from {{schema}}.edges_of_plan(p.hash, p.text::jsonb) except all select e.* from {{schema}}.plan_edges e where e.plan_hash = p.hash)) x) as edges) d
     where d.nodes > 0 or d.edges > 0;
  return query
    select 9, 'receipts_reordered', a.run_id, case when b.at < a.at - interval '1 minute'
        then format('receipt %s was written before receipt %s', b.sequence, a.sequence) else format('receipt %s is not as its run wrote it there', a.sequence) end
      from {{schema}}.runs r join {{schema}}.receipts a on a.run_id = r.id left join {{schema}}.receipts b on b.run_id = a.run_id and b.sequence = a.sequence + 1
     where (r.finished_at is null or scope = 'all' or scope = 'since' and r.finished_at >= since) and (b.at < a.at - interval '1 minute'
       or a.sequence <= r.sequence and (a.sequence > 1 or a.kind = 'admitted')
         and a.seal is distinct from {{schema}}.receipt_seal(a.run_id, a.sequence, a.kind, a.node, a.n, a.claim_epoch, a.status));
  return query select 9, 'receipt_of_no_run', c.run_id, format('receipt %s', c.sequence) from {{schema}}.receipts c
    where scope = 'all' and not exists (select from {{schema}}.runs r where r.id = c.run_id);
  return query
    select 9, 'node_job_missing', n.run_id, format('node %s is ready, and its job %s is %s', n.ix, n.id,
        case when exists (select from {{schema}}.history h where h.id = n.id) then 'finished' else 'nowhere' end)
      from {{schema}}.runs r join {{schema}}.nodes n on n.run_id = r.id
     where r.finished_at is null and n.status = 'ready' and (select j.id from {{schema}}.jobs j where j.id = n.id limit 1) is null;
  return query
    select 9, 'node_job_not_ready', j.run_id, format('job %s is %s, and its node is %s', j.id, j.status, coalesce(n.status, 'nowhere'))
      from {{schema}}.jobs j left join lateral (select case when o.run_id = j.run_id then o.status end as status from {{schema}}.nodes o where o.id = j.id limit 1) n on true
     where j.run_id is not null and n.status is distinct from 'ready';
  -- A job waits for a child run exactly while that lives, and what has become of the two agrees.
  return query
    select 9, 'child_run_missing', j.run_id, format('job %s waits for a child run, and there is none that lives', j.id)
      from {{schema}}.jobs j where j.status = 'held' and j.held_reason = 'run'
       and not exists (select from {{schema}}.runs c where c.parent_node = j.id and c.finished_at is null);
  return query
    select 9, 'child_not_waited_for', c.id, format('it runs, and job %s, which is to wait for it, is %s', j.id, j.status)
      from {{schema}}.runs c join {{schema}}.jobs j on j.id = c.parent_node where c.parent_run is not null and c.finished_at is null and j.held_reason is distinct from 'run';
  return query
    select 9, 'child_outlives_node', c.id, format('it runs, and node %s of run %s is %s', n.ix, n.run_id, n.status)
      from {{schema}}.runs c join {{schema}}.nodes n on n.id = c.parent_node where c.parent_run is not null and c.finished_at is null and n.status <> 'ready';
  -- Each round was given what the one before it gave, once that had succeeded and was not the end.
  return query
    select 9, 'loop_round_differs', r.id, format('round %s was given another state than round %s gave', n.ix, b.ix)
      from {{schema}}.runs r join {{schema}}.nodes n on n.run_id = r.id join {{schema}}.nodes b on b.run_id = r.id and b.ix = n.ix - 1
     where r.counted_from is not null and (r.finished_at is null or scope = 'all' or scope = 'since' and r.finished_at >= since) and n.item is distinct from b.result;
  return query
    select 9, 'loop_round_out_of_turn', r.id, format('round %s is %s, and another followed', b.ix, case b.status when 'succeeded' then 'the end' else b.status end)
      from {{schema}}.runs r join {{schema}}.plans p on p.hash = r.plan_hash join {{schema}}.nodes b on b.run_id = r.id and b.ix < r.written - 1
     where r.counted_from is not null and (r.finished_at is null or scope = 'all' or scope = 'since' and r.finished_at >= since)
       and (b.status <> 'succeeded' or {{schema}}.loop_done(p.loop, b.result));
  return query
    select 9, 'loop_result_differs', r.id, format('it has succeeded, and its last round %s', case when n.result is distinct from r.result then 'gave another state' else 'was not the end' end)
      from {{schema}}.runs r join {{schema}}.plans p on p.hash = r.plan_hash join {{schema}}.nodes n on n.run_id = r.id and n.ix = r.written - 1
     where r.counted_from is not null and r.status = 'succeeded' and (scope = 'all' or scope = 'since' and r.finished_at >= since)
       and (n.result is distinct from r.result or p.loop ->> 'exhausted' = 'fail' and not {{schema}}.loop_done(p.loop, n.result));
  -- Each page was asked for with the cursor that the one before it gave, and what they gave are the items, in that order.
  return query
    select 9, 'emit_page_out_of_turn', r.id, format('page %s %s', n.ix - 1000000, case
        when n.item -> 'cursor' is distinct from coalesce(b.item -> 'next', 'null') then 'was asked for with another cursor than the page before it gave'
        when b.ix is not null and (b.status <> 'succeeded' or b.item -> 'last' is distinct from 'false') then 'was asked for though the page before it was not followed by one'
        when n.item ? 'first' <> (n.status = 'succeeded') then format('is %s, and its items are %s', n.status, case when n.item ? 'first' then 'taken' else 'not taken' end)
        else format('gave %s items from %s on, and there are %s before it, %s in all', n.item ->> 'n', n.item ->> 'first', coalesce(b.upto, 0), r.items) end)
      from {{schema}}.runs r join {{schema}}.nodes n on n.run_id = r.id and n.ix >= 1000000
      left join lateral (select o.ix, o.status, o.item, (o.item ->> 'first')::int + (o.item ->> 'n')::int as upto from {{schema}}.nodes o
         where o.run_id = r.id and o.ix = n.ix - 1 and o.ix >= 1000000 limit 1) b on true
     where r.pages is not null and (r.finished_at is null or scope = 'all' or scope = 'since' and r.finished_at >= since)
       and (n.item -> 'cursor' is distinct from coalesce(b.item -> 'next', 'null') or b.ix is not null and (b.status <> 'succeeded' or b.item -> 'last' is distinct from 'false')
         or n.item ? 'first' <> (n.status = 'succeeded')
         or coalesce((n.item ->> 'first')::int <> coalesce(b.upto, 0) or n.ix = 999999 + r.pages and (n.item ->> 'first')::int + (n.item ->> 'n')::int <> r.items, false));
  return query
    select 9, 'emit_incomplete', r.id, 'it has succeeded, and its last page was not the end'
      from {{schema}}.runs r where r.pages is not null and r.status = 'succeeded' and (scope = 'all' or scope = 'since' and r.finished_at >= since)
       and {{schema}}.emit_word(r) is distinct from 'done';
  return query
    select 9, 'emit_stands_still', r.id, format('%s items are open, and no page is asked for', r.open_nodes)
      from {{schema}}.runs r join {{schema}}.plans p on p.hash = r.plan_hash
     where r.pages is not null and r.finished_at is null and r.cancel_requested_at is null and r.stopping_at is null and {{schema}}.emit_word(r) = 'again'
       and r.open_nodes <= (p.map #>> '{pages,ahead}')::int
       and not (p.on_failure = 'cancel' and {{schema}}.has_unhandled(r));
  -- A parent is forgotten first, and only once the history of both is.
  return query
    select 9, 'child_of_no_node', c.id, format('node %s of run %s is nowhere', c.parent_node, c.parent_run)
      from {{schema}}.runs c, {{schema}}.installation i
     where c.parent_run is not null and (c.finished_at is null or (scope = 'all' or scope = 'since' and c.finished_at >= since) and c.finished_at >= {{schema}}.now() - i.history_retention)
       and not exists (select from {{schema}}.nodes n where n.id = c.parent_node and n.run_id = c.parent_run);
  return query
    select 9, 'child_differs', c.id, case when k.child is distinct from c.plan_hash then format('its plan is %s, that of node %s is %s', c.plan_hash, k.name, coalesce(k.child, 'none'))
        else format('it is %s, and node %s has succeeded', c.status, k.name) end
      from {{schema}}.runs c join {{schema}}.nodes n on n.id = c.parent_node join {{schema}}.runs r on r.id = n.run_id
      join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = {{schema}}.place_in_plan(r.items, n.ix)
     where c.parent_run is not null and (c.finished_at is null or scope = 'all' or scope = 'since' and c.finished_at >= since)
       and (k.child is distinct from c.plan_hash or n.status = 'succeeded' and c.status <> 'succeeded' and c.finished_at is not null);
  -- What started had everything that it waits for.
  return query
    select 9, 'node_before_its_sources', n.run_id, format('node %s is %s, and node %s is %s', n.ix, n.status, s.ix, s.status)
      from {{schema}}.runs r join {{schema}}.nodes n on n.run_id = r.id and n.status in ('ready', 'succeeded')
      -- By key for each: a join compares all nodes of a run with one another where the statistics call them empty.
      cross join lateral (select g.source, g.policy from {{schema}}.plan_edges g where g.plan_hash || ':' || g.target::text = r.plan_hash || ':' || n.ix::text offset 0) e
      cross join lateral (select o.ix, o.status from {{schema}}.nodes o where o.run_id = r.id and o.ix = e.source limit 1) s
     where (r.finished_at is null or scope = 'all' or scope = 'since' and r.finished_at >= since)
       and (s.status in ('waiting', 'ready') or e.policy = 'fail' and s.status in ('failed', 'cancelled', 'blocked'));
  return query
    select 9, 'node_waits_for_nothing', n.run_id, format('node %s', n.ix)
      from {{schema}}.runs r join {{schema}}.nodes n on n.run_id = r.id and n.status = 'waiting'
     where r.finished_at is null
       and (n.unmet <> (select count(*) from {{schema}}.plan_edges e
              cross join lateral (select o.status from {{schema}}.nodes o where o.run_id = r.id and o.ix = e.source limit 1) s
              where e.plan_hash || ':' || e.target::text = r.plan_hash || ':' || n.ix::text and s.status in ('waiting', 'ready')) or (n.unmet = 0) <> n.due);
  return query
    select 9, 'run_effect_not_promised', r.id, format('it is %s, and there is no intent for %s', r.status, f.name)
      from {{schema}}.runs r join {{schema}}.plans p on p.hash = r.plan_hash cross join lateral {{schema}}.effect_specs(p.effects) f
     where r.finished_at is not null and (scope = 'all' or scope = 'since' and r.finished_at >= since) and f.spec -> 'on' ? r.status
       and not exists (select from {{schema}}.effect_intents i where i.owner_job_id = r.id and i.generation = r.generation and i.name = f.name);
  return query
    select 9, 'compensation_not_promised', r.id, format('it is %s, and node %s is not compensated', r.status, {{schema}}.node_name(c.items, k.name, n.ix))
      from {{schema}}.runs r join {{schema}}.nodes m on m.run_id = r.id
      join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = m.ix and k.compensate is not null
      left join {{schema}}.runs c on c.parent_node = m.id and c.items is not null
      cross join lateral (select m.id, m.ix, m.status where c.id is null union all select i.id, i.ix, i.status from {{schema}}.nodes i where i.run_id = c.id and i.ix < 1000000) n
     where r.status in ('failed', 'cancelled') and r.items is null and n.status = 'succeeded' and (scope = 'all' or scope = 'since' and r.finished_at >= since)
       and not exists (select from {{schema}}.effect_intents i where i.owner_job_id = n.id and i.name like 'compensate:' || r.generation || ':%');
end $$;
comment on function {{schema}}.check_runs(text, timestamptz) is 'What check_invariants reports about runs; scopes as there. Fails closed: a receipt that is missing, doubled, foreign or out of order is a violation.';

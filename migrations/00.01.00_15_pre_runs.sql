-- Runs of workflows. A node gets a job when it becomes ready, under the node's own id, so that claims never see what waits.
-- Whatever ends that job, the trigger below carries the run on in the same transaction, under the root lock: the run's row.
-- Lock order: runs by depth and id, so that parents come before children, then jobs by id. Who holds a job already takes a
-- run's lock only where it is free. The job of a node that stands for a child run is locked by nobody who does not hold that
-- run while it is live: so its end, which makes the job pending, never waits for it.

create table {{schema}}.runs (
  id uuid primary key default {{schema}}.new_id(),
  created_at timestamptz not null,
  finished_at timestamptz,
  cancel_requested_at timestamptz,
  stopping_at timestamptz,
  sequence bigint not null default 0,
  open_nodes integer not null check (open_nodes >= 0),
  run_epoch integer not null default 1 check (run_epoch >= 1),
  generation integer not null default 0 check (generation >= 0),
  receipts integer not null check (receipts between 1 and 10000),
  status text not null default 'running',
  scheduling text not null default 'number/1' check (scheduling = 'number/1'),
  workflow text not null check ({{schema}}.valid_name(workflow)),
  plan_hash text not null,
  run_key text check ({{schema}}.valid_name(run_key)),
  cancel_reason text,
  input jsonb not null check (jsonb_typeof(input) = 'object'),
  result jsonb,
  error jsonb,
  meta jsonb,
  started_by uuid,
  parent_run uuid,
  parent_node uuid,
  budget_of uuid,
  depth integer not null default 0 check (depth between 0 and 8),
  effect_depth integer not null default 0 check (effect_depth >= 0),
  items integer check (items >= 0),
  wanted integer check (wanted between 0 and items),
  written integer check (written between 0 and wanted),
  active integer check (active >= 0),
  at_once integer check (at_once >= 1),
  counted_from timestamptz,
  held interval,
  pages integer check (pages >= 0),
  constraint runs_map_whole check (num_nulls(items, wanted, written, active, at_once) in (0, 5) and num_nulls(counted_from, held) in (0, 2) and (counted_from is null or wanted = written and at_once = 1)
    and (pages is null or counted_from is null and items is not null and written = items)),
  constraint runs_status check (status in ('running', 'paused', 'recovering', 'succeeded', 'failed', 'cancelled')),
  constraint runs_child_whole check ((parent_run is null) = (parent_node is null) and (parent_run is null) = (depth = 0)),
  constraint runs_finished_whole check ((finished_at is null) = (status in ('running', 'paused', 'recovering')))
) with (fillfactor = 70);
create unique index runs_key on {{schema}}.runs (workflow, run_key) where run_key is not null;
create index runs_open on {{schema}}.runs (id) where finished_at is null;
create unique index runs_of_node on {{schema}}.runs (parent_node) where parent_node is not null;
create index runs_children on {{schema}}.runs (parent_run) where parent_run is not null;
create index runs_children_open on {{schema}}.runs (parent_run) where parent_run is not null and finished_at is null;
create index runs_budget on {{schema}}.runs (budget_of) where budget_of is not null and finished_at is null;
create index runs_started_by on {{schema}}.runs (started_by) where started_by is not null;
create index runs_finished on {{schema}}.runs (finished_at) where finished_at is not null;

comment on table {{schema}}.runs is 'Executions of workflows. The row''s lock is the root lock: it serialises a run''s transitions.';
comment on column {{schema}}.runs.id is 'UUIDv7 made by the database.';
comment on column {{schema}}.runs.created_at is 'When it was admitted.';
comment on column {{schema}}.runs.finished_at is 'When it ended; null while it runs.';
comment on column {{schema}}.runs.cancel_requested_at is 'When cancelling it was asked for.';
comment on column {{schema}}.runs.stopping_at is 'When a failure that nothing handles began to cancel the rest; null otherwise.';
comment on column {{schema}}.runs.sequence is 'The number of its last receipt.';
comment on column {{schema}}.runs.open_nodes is 'How many of its nodes are waiting or ready; of a map, with the items that are wanted and have no node yet.';
comment on column {{schema}}.runs.run_epoch is 'Raised when the ended run is reopened; its jobs carry it.';
comment on column {{schema}}.runs.generation is 'How often it has been reopened.';
comment on column {{schema}}.runs.receipts is 'How many receipts it keeps.';
comment on column {{schema}}.runs.status is 'running, paused, recovering (the outcome of a node is unknown, and is found out), succeeded, failed or cancelled.';
comment on column {{schema}}.runs.scheduling is 'How nodes that are ready together are put in order: number/1, by their number in the plan, within their priority.';
comment on column {{schema}}.runs.workflow is 'The workflow.';
comment on column {{schema}}.runs.plan_hash is 'Its plan; never changes.';
comment on column {{schema}}.runs.run_key is 'The key that it was admitted under; null for none.';
comment on column {{schema}}.runs.cancel_reason is 'The reason that was given when cancelling it was asked for.';
comment on column {{schema}}.runs.input is 'A JSON object: the workflow''s arguments by name.';
comment on column {{schema}}.runs.result is 'What it gave, once it has succeeded.';
comment on column {{schema}}.runs.error is 'Why it failed or was cancelled: a JSON object with type and message, and the node.';
comment on column {{schema}}.runs.meta is 'What travels with it, and with each of its jobs.';
comment on column {{schema}}.runs.started_by is 'The job that started it, such as that of a terminal effect; null where a caller did.';
comment on column {{schema}}.runs.parent_run is 'The run that it is a part of; null for one that was started by itself.';
comment on column {{schema}}.runs.parent_node is 'The node of that run which it stands for, and so the job that waits for it.';
comment on column {{schema}}.runs.budget_of is 'The run whose work budget counts what it begins: itself, or one above it; null where none has one. Never changes.';
comment on column {{schema}}.runs.depth is 'How many runs it is below: 0 for one that was started by itself.';
comment on column {{schema}}.runs.effect_depth is 'How long the chain of effects was that led to it; 0 where none did.';
comment on column {{schema}}.runs.items is 'Of a map: how many items it was given, of an emit so far; of a loop: how many rounds it may have; null for other runs.';
comment on column {{schema}}.runs.wanted is 'Of a map: how many of the items are to be run: all, but where it was stopped those that have nodes; of a loop: how many rounds have begun.';
comment on column {{schema}}.runs.written is 'Of a map: how many of its items have nodes, the first ones; of a loop: how many rounds have.';
comment on column {{schema}}.runs.active is 'Of a map, or a loop: how many of its nodes are ready, so have jobs.';
comment on column {{schema}}.runs.at_once is 'Of a map: how many of its nodes have jobs at a time, at most; of a loop 1.';
comment on column {{schema}}.runs.counted_from is 'Of a loop: from when on its time counts: its start, or when it was reopened; null for other runs.';
comment on column {{schema}}.runs.held is 'Of a loop: how much of its time does not count, since rounds before the last were held for a signal; null for other runs.';
comment on column {{schema}}.runs.pages is 'Of an emit: how many pages have been asked for; null for other runs.';

create table {{schema}}.nodes (
  id uuid primary key,
  run_id uuid not null,
  ready_at timestamptz,
  finished_at timestamptz,
  claim_epoch bigint,
  ix integer not null check (ix >= 0),
  unmet integer not null check (unmet >= 0),
  blocked_by integer,
  due boolean not null default false,
  status text not null,
  result jsonb,
  error jsonb,
  item jsonb,
  unique (run_id, ix),
  constraint nodes_status check (status in ('waiting', 'ready', 'blocked', 'skipped', 'succeeded', 'failed', 'cancelled')),
  constraint nodes_finished_whole check ((finished_at is null) = (status in ('waiting', 'ready'))),
  constraint nodes_blocked_whole check ((blocked_by is not null) = (status = 'blocked')),
  constraint nodes_due_whole check (not due or status = 'waiting')
) with (fillfactor = 80);
create index nodes_due on {{schema}}.nodes (run_id, ix) where due;

comment on table {{schema}}.nodes is 'The nodes of runs. One that is ready has a job under the same id, which says whether it is pending, running, held or unknown: the view run_tree.';
comment on column {{schema}}.nodes.id is 'UUIDv7, also the id of its job.';
comment on column {{schema}}.nodes.run_id is 'The run.';
comment on column {{schema}}.nodes.ready_at is 'When it got its job.';
comment on column {{schema}}.nodes.finished_at is 'When it ended, or was blocked, skipped or cancelled.';
comment on column {{schema}}.nodes.claim_epoch is 'The epoch of its job at the end.';
comment on column {{schema}}.nodes.ix is 'Its number in the plan; of a map, or a loop, whose plan has one node, the number of its item, or round; of a page of an emit 1,000,000 and its number.';
comment on column {{schema}}.nodes.unmet is 'How many of its edges wait for their source: a cache of what the edges say.';
comment on column {{schema}}.nodes.blocked_by is 'The node whose failure blocks it, by number.';
comment on column {{schema}}.nodes.due is 'Whether it waits for nothing but its job, which a transaction to come makes: see ready_at_once; of a map, for its turn, too.';
comment on column {{schema}}.nodes.status is 'waiting, ready, blocked, skipped, succeeded, failed or cancelled.';
comment on column {{schema}}.nodes.result is 'What its body returned.';
comment on column {{schema}}.nodes.error is 'Why it failed or was cancelled.';
comment on column {{schema}}.nodes.item is 'Of a map: the item that it is run for; its number is that of the item in the list. Of a loop: the state that the round was given. Of a page of an emit: the cursor that it was asked for with; once taken also which items it gave (first, n), and whether it is the last or what comes next.';

create table {{schema}}.receipts (
  run_id uuid not null,
  sequence bigint not null check (sequence >= 1),
  at timestamptz not null,
  claim_epoch bigint,
  node integer,
  n integer not null default 1,
  kind text not null,
  status text,
  seal bytea,
  primary key (run_id, sequence),
  constraint receipts_kind check (kind in ('admitted', 'ready', 'checkpointed', 'ended', 'blocked', 'cancel_requested', 'lost', 'unknown', 'resolved', 'interrupted', 'recovered', 'granted', 'reopened', 'finished'))
);
comment on table {{schema}}.receipts is 'The newest transitions of each run, without payload: exactly as many as the run keeps, or all of them.';
comment on column {{schema}}.receipts.run_id is 'The run.';
comment on column {{schema}}.receipts.sequence is 'Its number, from 1 without a gap.';
comment on column {{schema}}.receipts.at is 'When.';
comment on column {{schema}}.receipts.claim_epoch is 'The attempt, where one ended.';
comment on column {{schema}}.receipts.node is 'The node, or the first of several, by number.';
comment on column {{schema}}.receipts.n is 'How many nodes.';
comment on column {{schema}}.receipts.kind is 'What happened.';
comment on column {{schema}}.receipts.status is 'To what status, where there is one.';
comment on column {{schema}}.receipts.seal is 'The receipt_seal of the others but the time: tells a receipt that was moved, copied or altered.';

create table {{schema}}.work_budgets (
  run_id uuid primary key,
  budget bigint not null check (budget >= 1),
  begun bigint not null default 0 check (begun >= 0)
) with (fillfactor = 50);
comment on table {{schema}}.work_budgets is 'The work budgets of runs, one row for each run that has one of its own: a workflow that declares it, with no run above that has one.';
comment on column {{schema}}.work_budgets.run_id is 'The run; those below it count here as well (runs.budget_of).';
comment on column {{schema}}.work_budgets.budget is 'How many nodes may be given jobs in all: what the workflow declares, and for each child run what its own declares, or what an operator has set.';
comment on column {{schema}}.work_budgets.begun is 'How many were given jobs; each counts again when it is reopened.';

create function {{schema}}.receipt_seal(p_run uuid, p_sequence bigint, p_kind text, p_node integer, p_n integer, p_epoch bigint, p_status text) returns bytea
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
  select substr(sha256(convert_to(p_run::text || ' ' || p_sequence::text || ' ' || p_kind || ' ' || coalesce(p_node::text, '-') || ' ' || p_n::text || ' '
    || coalesce(p_epoch::text, '-') || ' ' || coalesce(p_status, '-'), 'UTF8')), 1, 8)
$$;
comment on function {{schema}}.receipt_seal(uuid, bigint, text, integer, integer, bigint, text) is
  'What a receipt says, in eight bytes. A clock may step back, so that times alone do not tell receipts that have changed places.';

create function {{schema}}.node_name(p_items integer, p_name text, p_ix integer) returns text
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
  select case when p_items is null then p_name else p_name || '[' || p_ix % 1000000 || ']' end
$$;
comment on function {{schema}}.node_name(integer, text, integer) is 'What a node is called: of a map, or a loop (p_items is not null), its name with the number of the item, the page, or the round.';

create function {{schema}}.place_in_plan(p_items integer, p_ix integer) returns integer
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
  select case when p_items is null then p_ix else p_ix / 1000000 end
$$;
comment on function {{schema}}.place_in_plan(integer, integer) is
  'Which node of its plan a node of a run is: of a map, or a loop (p_items is not null), the first; of the pages of an emit, whose numbers begin at 1,000,000, the second.';

-- What one statement has ended of a run.
create index history_run on {{schema}}.history (run_id, finished_at) where run_id is not null;

-- What the database refuses, whatever the client.
create trigger runs_plan_fixed before update of plan_hash on {{schema}}.runs for each row
  when (new.plan_hash <> old.plan_hash)
  execute function {{schema}}.refuse('WF024', 'the plan of a run never changes', 'Start a new run.');
create trigger receipts_append_only before update on {{schema}}.receipts for each row
  execute function {{schema}}.refuse('WF004', 'receipts are append-only', 'A run writes them itself.');

create function {{schema}}.guard_member() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_run {{schema}}.runs;
begin
  select * into v_run from {{schema}}.runs r where r.id = new.run_id;
  -- What waits for a child run tells how that has ended, also while the rest is being cancelled.
  if (v_run.status in ('running', 'recovering')) is not true and not (tg_op = 'INSERT' and v_run.status is not distinct from 'paused')
     or (v_run.cancel_requested_at is not null or v_run.stopping_at is not null)
       and not (tg_op = 'UPDATE' and exists (select from {{schema}}.runs c where c.parent_node = new.id))
     or new.run_epoch is distinct from v_run.run_epoch
     or tg_op = 'INSERT' and not exists (select from {{schema}}.nodes n where n.id = new.id and (n.run_id = new.run_id) is true and n.status = 'ready') then
    raise exception using errcode = 'WF023',
      message = format('job %s is a node of run %s, which is %s', new.id, new.run_id, case
        when v_run.id is null then 'not there' when new.run_epoch is null then 'newer than the job, which has no run epoch'
        when v_run.status not in ('running', 'recovering') then v_run.status when new.run_epoch <> v_run.run_epoch then format('at epoch %s, not %s', v_run.run_epoch, new.run_epoch)
        when tg_op = 'INSERT' and v_run.cancel_requested_at is null and v_run.stopping_at is null then 'not ready for it' else 'being cancelled' end),
      detail = jsonb_build_object('job_id', new.id, 'run_id', new.run_id)::text,
      hint = case v_run.status when 'paused' then 'A node runs while its run does: taskq runs resume.'
        else 'A node gets its job when it becomes ready, and runs while its run does; reopen one with taskq runs retry.' end;
  end if;
  -- Born into a pause: here, since the run was looked up already.
  if v_run.status = 'paused' and new.status = 'pending' then
    new.status := 'held';
    new.held_reason := 'paused';
  end if;
  return new;
end $$;
comment on function {{schema}}.guard_member() is 'Trigger: refuses the job, and each claim, of a node whose run is not live, is being cancelled or is at another epoch. While its run is paused the job of a node is held from its birth on.';
create trigger member_born before insert on {{schema}}.jobs for each row
  when (new.run_id is not null) execute function {{schema}}.guard_member();
create trigger member_claimed before update of status on {{schema}}.jobs for each row
  when (new.run_id is not null and old.status = 'pending' and new.status = 'running') execute function {{schema}}.guard_member();

-- The root lock, for who has locked no job yet.
create function {{schema}}.lock_run_of(p_job uuid) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if exists (select from {{schema}}.nodes n where n.id = p_job) then
    perform {{schema}}.lock_trees(array[p_job]);
  end if;
end $$;
comment on function {{schema}}.lock_run_of(uuid) is 'Takes the root lock of the run that a job is a node of, if it is one, and those of the child runs that it waits for. Before the job''s own.';

-- p_jobs: their runs, and the child runs that they wait for. p_tops: these runs. Of child runs all that is below them, too:
-- what is live, or with p_ended all. Level by level: who holds a run's lock sees all of its children.
create function {{schema}}.lock_trees(p_jobs uuid[], p_tops uuid[] default '{}', p_ended boolean default false) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_single uuid[] := array(select n.run_id from {{schema}}.nodes n where n.id = any(p_jobs));
  v_tree uuid[] := p_tops;
  v_level uuid[];
begin
  for v_depth in 0 .. 8 loop
    v_level := array(select r.id from {{schema}}.runs r where r.id = any(v_single || v_tree) and r.depth = v_depth order by r.id for update);
    if v_level <> '{}' then
      v_tree := v_tree || array(
        select c.id from {{schema}}.runs c
         where c.parent_run = any(v_level) and (p_ended or c.finished_at is null) and (c.parent_run = any(v_tree) or c.parent_node = any(p_jobs)));
    end if;
    exit when not exists (select from {{schema}}.runs r where r.id = any(v_single || v_tree) and r.depth > v_depth);
  end loop;
end $$;
comment on function {{schema}}.lock_trees(uuid[], uuid[], boolean) is
  'Takes the root locks of the runs of these jobs with the child runs that they wait for, and of whole trees of runs, waiting for each, in the order of all locks of runs: by depth, then by id.';

create function {{schema}}.run_is_free(p_run uuid) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  if p_run is null then
    return true;
  end if;
  perform from {{schema}}.runs r where r.id = p_run for update skip locked;
  return found or not exists (select from {{schema}}.runs r where r.id = p_run);
end $$;
comment on function {{schema}}.run_is_free(uuid) is 'Takes a run''s root lock if nobody has it, for who holds a job of it already; answers whether it is taken now. True where there is no run.';

-- The root locks for ends of several jobs at once, without waiting: a busy run holds up nobody else.
create function {{schema}}.lock_runs_of(p_jobs uuid[]) returns uuid[]
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_runs uuid[];
  v_free uuid[];
begin
  -- By key for each: while the table was believed to be empty all of it was walked over.
  v_runs := array(
    select distinct n.run_id from unnest(p_jobs) u(id)
      cross join lateral (select o.run_id, o.status from {{schema}}.nodes o where o.id = u.id limit 1) n where n.status = 'ready');
  if v_runs = '{}' then
    return '{}';
  end if;
  v_free := array(select r.id from {{schema}}.runs r where r.id = any(v_runs) order by r.id for update skip locked);
  return array(
    select u.id from unnest(p_jobs) u(id)
      cross join lateral (select o.run_id, o.status from {{schema}}.nodes o where o.id = u.id limit 1) n
     where n.status = 'ready' and n.run_id <> all(v_free) and exists (select from {{schema}}.runs r where r.id = n.run_id));
end $$;
comment on function {{schema}}.lock_runs_of(uuid[]) is 'Takes the root locks of the runs of these jobs that are free; returns the jobs whose run is busy.';

-- Several at once have one write of the run's row, with what they change of its count of open nodes.
create function {{schema}}.receipts(p_run uuid, p_closed integer, p_kinds text[], p_nodes integer[], p_epochs bigint[], p_ns integer[], p_statuses text[]) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_n integer := cardinality(p_kinds);
  v_last bigint;
  v_keep integer;
begin
  update {{schema}}.runs r set sequence = r.sequence + v_n, open_nodes = r.open_nodes - p_closed where r.id = p_run
    returning r.sequence, r.receipts into v_last, v_keep;
  -- More at once than are kept: the first of them would go again.
  insert into {{schema}}.receipts (run_id, sequence, at, claim_epoch, node, n, kind, status, seal)
    select p_run, v_last - v_n + e.place, {{schema}}.now(), e.epoch, e.node, e.n, e.kind, e.status,
           {{schema}}.receipt_seal(p_run, v_last - v_n + e.place, e.kind, e.node, e.n, e.epoch, e.status)
      from unnest(p_kinds, p_nodes, p_epochs, p_ns, p_statuses) with ordinality e(kind, node, epoch, n, status, place) where e.place > v_n - v_keep;
  if v_last > v_keep then
    delete from {{schema}}.receipts c where c.run_id = p_run and c.sequence <= v_last - v_keep;
  end if;
end $$;
comment on function {{schema}}.receipts(uuid, integer, text[], integer[], bigint[], integer[], text[]) is
  'Gives transitions of a run the next numbers and a receipt each, and notes how many of its nodes are open no more. The caller holds the root lock.';

create function {{schema}}.receipt(p_run uuid, p_kind text, p_node integer default null, p_epoch bigint default null, p_n integer default 1, p_status text default null) returns void
  language sql security definer set search_path = pg_catalog, pg_temp as $$
  select {{schema}}.receipts(p_run, 0, array[p_kind], array[p_node], array[p_epoch], array[p_n], array[p_status])
$$;
comment on function {{schema}}.receipt(uuid, text, integer, bigint, integer, text) is 'Gives a run''s transition the next number and a receipt. The caller holds the root lock.';

create function {{schema}}.arm_taken(p_result jsonb, p_arm jsonb) returns boolean
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp as $$
  select case when p_arm ? 'has' then jsonb_typeof(v.value) = 'array' and exists (
      select from jsonb_array_elements(case jsonb_typeof(v.value) when 'array' then v.value else '[]' end) e(value) where e.value = p_arm -> 'has')
    else v.value = p_arm -> 'equals' end
    from (select coalesce(p_result #> array(select jsonb_array_elements_text(coalesce(p_arm -> 'path', '[]'))), 'null') as value) v
$$;
comment on function {{schema}}.arm_taken(jsonb, jsonb) is 'Whether the result of a node meets the condition of an edge from it (plan_edges.arm).';

-- The value of an expression of a plan; null (not the JSON null) where it takes the result of a node that has none.
create function {{schema}}.evaluate(p_run uuid, p_expr jsonb) returns jsonb
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_path text[] := array(select jsonb_array_elements_text(coalesce(nullif(p_expr -> 'path', 'null'), '[]')));
  v_value jsonb;
  v_found boolean;
begin
  if p_expr ? 'value' then
    return p_expr -> 'value';
  elsif p_expr ? 'input' then
    select r.input #> (array[p_expr ->> 'input'] || v_path) into v_value from {{schema}}.runs r where r.id = p_run;
    return coalesce(v_value, 'null');
  elsif p_expr ? 'node' then
    select coalesce(n.result #> v_path, 'null') into v_value from {{schema}}.nodes n
      where n.run_id = p_run and n.ix = (p_expr ->> 'node')::int and n.status = 'succeeded';
    return v_value;
  elsif p_expr ? 'outcome' then
    select coalesce(jsonb_build_object('node', k.name, 'status', n.status, 'value', coalesce(n.result, 'null'),
        'error', coalesce(n.error, case n.status
          when 'blocked' then jsonb_build_object('type', 'Blocked', 'message', 'a node that it waited for has failed', 'node', b.name)
          when 'skipped' then jsonb_build_object('type', 'Skipped', 'message', 'it was skipped') end, 'null')) #> v_path, 'null')
      into v_value
      from {{schema}}.nodes n join {{schema}}.runs r on r.id = n.run_id
      join {{schema}}.plan_nodes k on k.plan_hash = r.plan_hash and k.ix = n.ix
      left join {{schema}}.plan_nodes b on b.plan_hash = r.plan_hash and b.ix = n.blocked_by
     where n.run_id = p_run and n.ix = (p_expr ->> 'outcome')::int;
    return v_value;
  elsif p_expr ?| array['results', 'outcomes', 'tally'] then
    return {{schema}}.map_value(p_run, p_expr, v_path);
  elsif p_expr ? 'list' then
    select coalesce(jsonb_agg(e.value order by e.n), '[]'), coalesce(bool_and(e.value is not null), true) into v_value, v_found
      from (select {{schema}}.evaluate(p_run, l.expr) as value, l.n from jsonb_array_elements(p_expr -> 'list') with ordinality l(expr, n)) e;
    return case when v_found then v_value end;
  elsif p_expr ? 'object' then
    select coalesce(jsonb_object_agg(e.key, e.value), '{}'), coalesce(bool_and(e.value is not null), true) into v_value, v_found
      from (select o.key, {{schema}}.evaluate(p_run, o.value) as value from jsonb_each(p_expr -> 'object') o) e;
    return case when v_found then v_value end;
  elsif p_expr ? 'case' then
    v_value := {{schema}}.evaluate(p_run, p_expr #> '{case,on}');
    return (select {{schema}}.evaluate(p_run, a.arm -> 1) from jsonb_array_elements(p_expr #> '{case,arms}') a(arm) where a.arm -> 0 = v_value limit 1);
  end if;
  if p_expr ? 'fork' then
    v_value := {{schema}}.evaluate(p_run, p_expr #> '{fork,on}');
    -- An arm that was taken and has no value, since it was skipped further in, is left out as well.
    return case when v_value is not null then (
      select coalesce(jsonb_object_agg(t.key, t.value) filter (where t.value is not null), '{}')
        from (select a.arm ->> 1 as key, {{schema}}.evaluate(p_run, a.arm -> 2) as value from jsonb_array_elements(p_expr #> '{fork,arms}') a(arm)
               where {{schema}}.arm_taken(v_value, jsonb_build_object('has', a.arm -> 0))) t) end;
  end if;
  raise exception using errcode = 'WF024', message = format('an expression of the plan is none that this version knows: %s', left(p_expr::text, 200)),
    hint = 'The plan was made by a newer version of taskq.';
end $$;
comment on function {{schema}}.evaluate(uuid, jsonb) is 'The value of an expression of a plan, in a run.';

-- The settings from here on: ends come from end_attempts, whose hash joins would read the whole run for each node of it. By
-- key, the failure of one node that 10,000 wait for takes 2 s; it took 165. tests/laws/test_runs_attacked.py holds it.

-- What the edges say of a waiting node. Its arms come first: while one is open nothing else counts, so that the answer does
-- not depend on the order in which its sources end.
create function {{schema}}.decide_node(p_run {{schema}}.runs, p_ix integer, out word text, out cause integer, out unmet integer)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_seen record;
begin
  select coalesce(bool_or(e.arm is not null and s.status in ('waiting', 'ready')), false) as arms_open,
         coalesce(bool_or(e.arm is not null and (s.status = 'skipped' or s.status = 'succeeded' and not {{schema}}.arm_taken(s.result, e.arm))), false) as not_taken,
         coalesce(bool_or(s.status in ('failed', 'cancelled', 'blocked') and e.policy = 'fail'), false) as blocks,
         coalesce(bool_or(s.status in ('failed', 'cancelled', 'blocked') and e.policy = 'skip'
           or s.status = 'skipped' and not e.merge and e.policy <> 'collect'), false) as skips,
         count(*) filter (where s.status in ('waiting', 'ready'))::int as open,
         min(case when e.policy = 'fail' then case s.status when 'blocked' then s.blocked_by when 'failed' then s.ix when 'cancelled' then s.ix end end) as cause
    into v_seen
    from {{schema}}.plan_edges e
    cross join lateral (select * from {{schema}}.nodes o where o.run_id = p_run.id and o.ix = e.source limit 1) s
   where e.plan_hash || ':' || e.target::text = p_run.plan_hash || ':' || p_ix::text;
  word := case when v_seen.not_taken then 'skipped' when v_seen.arms_open then 'wait' when v_seen.blocks then 'blocked'
    when v_seen.open > 0 then 'wait' when v_seen.skips then 'skipped' else 'ready' end;
  cause := v_seen.cause;
  unmet := v_seen.open;
end $$;
comment on function {{schema}}.decide_node({{schema}}.runs, integer) is 'Whether a waiting node is ready, blocked (and by which node) or skipped, or goes on waiting, and for how many of its edges.';

-- All at once, since one by one 1,000 took 1.4 s; one by one if one of them is refused, to find out which.
create function {{schema}}.make_ready(p_run {{schema}}.runs, p_nodes integer[], out ready integer[], out skipped integer[], out failed integer[])
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_now timestamptz := {{schema}}.now();
  v_most integer := (select i.max_payload_bytes from {{schema}}.installation i);
  v_ids uuid[];
  v_payloads jsonb[];
  v_before uuid[];
  v_again uuid[];
  v_queues text[];
  v_size integer;
  v_each record;
  v_item text := (select coalesce(p.map, p.loop) ->> 'item' from {{schema}}.plans p where p.hash = p_run.plan_hash);
  v_cursor text := (select p.map #>> '{pages,item}' from {{schema}}.plans p where p.hash = p_run.plan_hash);
  v_hint text;
begin
  begin
    select coalesce(array_agg(m.ix order by m.ix) filter (where m.payload is not null), '{}'), coalesce(array_agg(m.ix order by m.ix) filter (where m.payload is null), '{}'),
           array_agg(m.id order by m.ix) filter (where m.payload is not null), array_agg(m.payload order by m.ix) filter (where m.payload is not null),
           array_agg(m.id order by m.ix) filter (where m.payload is not null and m.ready_at is not null), max(octet_length(m.payload::text))
      into ready, skipped, v_ids, v_payloads, v_before, v_size
      from (select n.ix, n.id, n.ready_at, case when v_item is null then {{schema}}.evaluate(p_run.id, jsonb_build_object('object', k.args))
                     when v_cursor is null then p_run.input || jsonb_build_object(v_item, n.item)
                     when n.ix < 1000000 then p_run.input -> 'each' || jsonb_build_object(v_item, n.item)
                     else p_run.input -> 'source' || jsonb_build_object(v_cursor, n.item -> 'cursor') end as payload
              from unnest(p_nodes) x(ix)
              cross join lateral (select * from {{schema}}.nodes o where o.run_id = p_run.id and o.ix = x.ix limit 1) n
              cross join lateral (select l.args from {{schema}}.plan_nodes l where l.plan_hash = p_run.plan_hash and l.ix = {{schema}}.place_in_plan(p_run.items, x.ix) limit 1) k offset 0) m;
    failed := '{}';
    if v_size > v_most then
      raise exception using errcode = 'WF009', message = format('its payload has %s bytes, the limit is %s', v_size, v_most),
        hint = 'Store large data elsewhere and hand on a reference to it.';
    end if;
    update {{schema}}.nodes n set status = 'ready', ready_at = v_now, due = false where n.id = any(v_ids);
    -- Of a run that was reopened: the job goes on under its epoch, with what its sources give now.
    v_again := array(select b.id from unnest(v_before) b(id)
      where exists (select from {{schema}}.history h where h.id = b.id and h.finished_at >= {{schema}}.id_time(b.id) - interval '1 day') order by b.id);
    if v_again <> '{}' then
      for v_each in select p.id, p.payload from unnest(v_ids, v_payloads) p(id, payload) where p.id = any(v_again) loop
        perform {{schema}}.retry(v_each.id, 'its run was reopened', null);
        update {{schema}}.jobs j set payload = v_each.payload where j.id = v_each.id;
      end loop;
    end if;
    insert into {{schema}}.jobs (id, status, held_reason, run_at, created_at, deadline, max_attempts, required_worker_schema, priority, effect_class, queue, task, policy_id,
        payload, tags, meta, has_effects, cohort, run_id, run_epoch)
      select m.id, case when k.child is null then 'pending' else 'held' end, case when k.child is not null then 'run' end, v_now + make_interval(secs => coalesce((k.job ->> 'run_in')::double precision, 0)), v_now,
             v_now + make_interval(secs => (k.job ->> 'deadline_in')::double precision), coalesce((k.job ->> 'max_attempts')::int, 1),
             (k.job ->> 'required_worker_schema')::int, coalesce((k.job ->> 'priority')::int, 5), k.job ->> 'effect_class',
             k.job ->> 'queue', k.job ->> 'task', k.job ->> 'policy_id', m.payload,
             case when jsonb_typeof(k.job -> 'tags') = 'array' then array(select jsonb_array_elements_text(k.job -> 'tags')) end,
             coalesce(p_run.meta, '{}') || coalesce(nullif(k.job -> 'meta', 'null'), '{}')
               || jsonb_build_object('run', jsonb_build_object('id', p_run.id, 'workflow', p_run.workflow, 'node', {{schema}}.node_name(p_run.items, k.name, m.ix))),
             (select true from {{schema}}.policies p where p.id = k.job ->> 'policy_id' and p.spec -> 'effects' <> '[]'),
             k.job ->> 'cohort', p_run.id, p_run.run_epoch
        from unnest(ready, v_ids, v_payloads) m(ix, id, payload)
        cross join lateral (select l.job, l.name, l.child from {{schema}}.plan_nodes l where l.plan_hash = p_run.plan_hash and l.ix = {{schema}}.place_in_plan(p_run.items, m.ix) limit 1) k
       where m.id <> all(v_again);
    if exists (select from {{schema}}.plans p where p.hash = p_run.plan_hash and p.depth > 0) then
      for v_each in
        select m.id, m.payload, k.child, m.id = any(v_again) as again
          from unnest(ready, v_ids, v_payloads) m(ix, id, payload)
          cross join lateral (select l.child from {{schema}}.plan_nodes l where l.plan_hash = p_run.plan_hash and l.ix = {{schema}}.place_in_plan(p_run.items, m.ix) limit 1) k
         where k.child is not null order by m.ix
      loop
        update {{schema}}.jobs j set status = 'held', held_reason = 'run' where j.id = v_each.id and v_each.again;
        perform {{schema}}.begin_child(p_run, v_each.id, v_each.child, v_each.payload, v_each.again, p_run.depth = 0 and cardinality(p_nodes) = 1);
      end loop;
    end if;
  exception when others then
    -- What is wrong with the node fails the node; its predecessor's end stands. A lock or a full disk undoes all of it.
    if not {{schema}}.is_broken(sqlstate) then
      raise;
    end if;
    ready := '{}';
    skipped := '{}';
    failed := '{}';
    if cardinality(p_nodes) = 1 then
      failed := p_nodes;
      get stacked diagnostics v_hint = pg_exception_hint;
      update {{schema}}.nodes n set status = 'failed', finished_at = v_now, due = false,
          error = case when {{schema}}.map_fault(sqlstate) is null
            then jsonb_build_object('type', 'NodeNotReady', 'message', left(format('its job could not be made: %s', sqlerrm), 2000), 'sqlstate', sqlstate)
            else jsonb_build_object('type', {{schema}}.map_fault(sqlstate), 'message', left(format('%s; %s', sqlerrm, v_hint), 2000), 'sqlstate', sqlstate) end
        where n.run_id = p_run.id and n.ix = p_nodes[1];
    else
      for v_each in select m.* from unnest(p_nodes) x(ix) cross join lateral {{schema}}.make_ready(p_run, array[x.ix]) m loop
        ready := ready || v_each.ready;
        skipped := skipped || v_each.skipped;
        failed := failed || v_each.failed;
      end loop;
    end if;
    return;
  end;
  v_queues := array(select distinct k.job ->> 'queue' from unnest(ready) x(ix)
    cross join lateral (select l.job, l.child from {{schema}}.plan_nodes l where l.plan_hash = p_run.plan_hash and l.ix = {{schema}}.place_in_plan(p_run.items, x.ix) limit 1) k where k.child is null);
  if v_queues <> '{}' then
    perform {{schema}}.wake(v_queues, cardinality(ready));
  end if;
end $$;
comment on function {{schema}}.make_ready({{schema}}.runs, integer[]) is
  'Gives nodes their jobs, or starts their child runs, for which their jobs wait. Answers which are ready, which are to be skipped (what they take has no value) and which have failed (the job could not be made).';

-- A node has one child run, ever: a reopened parent reopens it, with what its sources give now.
create function {{schema}}.begin_child(p_run {{schema}}.runs, p_node uuid, p_plan text, p_input jsonb, p_again boolean, p_go_on boolean) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_child {{schema}}.runs;
  v_map jsonb := (select p.map from {{schema}}.plans p where p.hash = p_plan);
  v_loop jsonb := (select p.loop from {{schema}}.plans p where p.hash = p_plan);
begin
  if v_map is not null and not v_map ? 'pages' then
    perform {{schema}}.check_items(p_input -> (v_map ->> 'item'), v_map);
  end if;
  select * into v_child from {{schema}}.runs c where c.parent_node = p_node;
  if not found and v_map ? 'pages' then
    perform {{schema}}.admit_emit(p_run, p_node, p_plan, v_map, p_input);
  elsif not found and v_map is not null then
    perform {{schema}}.admit_map(p_run, p_node, p_plan, v_map, p_input, p_go_on);
  elsif not found and v_loop is not null then
    perform {{schema}}.admit_loop(p_run, p_node, p_plan, v_loop, p_input);
  elsif not found then
    perform {{schema}}.admit_run(p_plan, p_input, null, p_run.meta, null, p_run, p_node);
  elsif v_child.finished_at is not null and v_child.status <> 'succeeded' and p_again then
    -- Jobs are locked already. Whoever looks at a run that has ended is gone in a moment, and then this is sent again.
    perform from {{schema}}.runs c where c.id = v_child.id for update nowait;
    perform {{schema}}.reopen_run(v_child.id, p_input, 'its parent was reopened', null);
  elsif v_child.finished_at is not null then
    perform {{schema}}.release_parent(v_child);
  end if;
end $$;
comment on function {{schema}}.begin_child({{schema}}.runs, uuid, text, jsonb, boolean, boolean) is
  'Starts the child run of a node whose job is held for it, or reopens the one that is there (p_again); where that has ended and stays so, the job goes on at once. p_go_on: whether the first items of a map get their jobs now. The caller holds the parent''s root lock.';

create function {{schema}}.release_parent(p_child {{schema}}.runs) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_queue text;
begin
  -- A cancel was handed on to the child run: one that has succeeded all the same was not cancelled.
  update {{schema}}.jobs j set status = 'pending', held_reason = null, run_at = {{schema}}.now(),
      cancel_requested_at = case when p_child.status = 'succeeded' then null when j.cancel_requested_at is not null then j.cancel_requested_at
        when exists (select from {{schema}}.runs r where r.id = p_child.parent_run and (r.cancel_requested_at is not null or r.stopping_at is not null)) then {{schema}}.now() end
    where j.id = p_child.parent_node and j.status = 'held' and j.held_reason = 'run'
    returning j.queue into v_queue;
  if found then
    perform {{schema}}.wake(array[v_queue]);
  end if;
end $$;
comment on function {{schema}}.release_parent({{schema}}.runs) is 'The job that has waited for this child run may be claimed: it tells the parent how the run has ended. The caller holds the child''s root lock, or it had ended before.';

create function {{schema}}.ready_at_once(p_run {{schema}}.runs) returns integer
  language sql stable security definer set search_path = pg_catalog, pg_temp as $$
  select greatest(case when p_run.generation = 0 then 1000 else 200 end
    / greatest(coalesce((select p.child_size from {{schema}}.plans p where p.hash = p_run.plan_hash), 1), 1), 1)::integer
$$;
comment on function {{schema}}.ready_at_once({{schema}}.runs) is
  'How many nodes of a run get their job in one transaction at most, so that it is done within the time that its sender waits: 0.4 s, for those of a reopened run, which come back one by one, 1 s. A node that stands for a child run counts as the nodes that the largest begins with.';

-- p_front: nodes that have just come to an end. p_epochs, p_statuses: of each, for its receipt; null where they are on record
-- already. p_closed: how many of them the run still counts as open. Answers whether one has failed, or was blocked.
-- What can run no more is decided here and now. What is ready gets its job, by number, as far as one transaction makes them;
-- the rest is due, and the next end of the run makes it, or the leader, who is told.
create function {{schema}}.advance(p_run {{schema}}.runs, p_front integer[], p_epochs bigint[], p_statuses text[], p_closed integer, p_failed boolean) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set enable_nestloop = on set enable_hashjoin = off set enable_mergejoin = off set enable_seqscan = off set enable_bitmapscan = off
  set plan_cache_mode = force_generic_plan set jit = off as $$
declare
  v_front integer[] := p_front;
  v_next integer[];
  v_targets uuid[];
  v_met jsonb;
  v_look jsonb;
  v_node record;
  v_word text;
  v_cause integer;
  v_failed boolean := p_failed;
  v_closed integer := p_closed;
  v_most integer := {{schema}}.ready_at_once(p_run);
  v_made integer := 0;
  v_taken integer;
  v_due integer[] := case when p_run.items is null
    then array(select n.ix from {{schema}}.nodes n where n.run_id = p_run.id and n.due order by n.ix limit {{schema}}.ready_at_once(p_run)) end;
  v_take integer[];
  v_ids uuid[];
  v_causes integer[];
  v_jobs record;
  v_ready integer[] := '{}';
  v_blocked integer[] := '{}';
  v_kinds text[] := '{}';
  v_nodes integer[] := '{}';
  v_epochs bigint[] := '{}';
  v_ns integer[] := '{}';
  v_statuses text[] := '{}';
begin
  if p_run.counted_from is not null then
    return {{schema}}.advance_loop(p_run.id, p_front, p_epochs, p_statuses, p_closed, p_failed);
  elsif p_run.pages is not null then
    return {{schema}}.advance_emit(p_run.id, p_front, p_epochs, p_statuses, p_closed, p_failed);
  elsif p_run.items is not null then
    return {{schema}}.advance_map(p_run.id, p_front, p_epochs, p_statuses, p_closed, p_failed);
  end if;
  loop
    while cardinality(v_front) > 0 loop
      v_next := '{}';
      v_ids := '{}';
      v_causes := '{}';
      -- Lateral with a limit: looked up by key for each, whatever the statistics say of a run's average size.
      select array_agg(t.id), jsonb_object_agg(d.target, d.n), jsonb_object_agg(d.target, true) filter (where d.look)
        into v_targets, v_met, v_look
        from (select e.target, count(*) as n, bool_or(s.status <> 'succeeded' or e.arm is not null) as look
                from unnest(v_front) f(ix)
                cross join lateral (select o.status from {{schema}}.nodes o where o.run_id = p_run.id and o.ix = f.ix limit 1) s
                cross join lateral (select g.target, g.arm from {{schema}}.plan_edges g where g.plan_hash = p_run.plan_hash and g.source = f.ix offset 0) e
               group by e.target) d
        cross join lateral (select o.id from {{schema}}.nodes o where o.run_id = p_run.id and o.ix = d.target limit 1) t;
      exit when v_targets is null;
      update {{schema}}.nodes t set unmet = t.unmet - (v_met ->> t.ix::text)::int
        where t.id = any(v_targets) and t.status = 'waiting';
      for v_node in
        select t.ix, t.id from {{schema}}.nodes t
         where t.id = any(v_targets) and t.status = 'waiting' and (t.unmet = 0 or v_look ? t.ix::text)
         order by t.ix
      loop
        select d.word, d.cause into v_word, v_cause from {{schema}}.decide_node(p_run, v_node.ix) d;
        if v_word = 'ready' then
          v_due := v_due || v_node.ix;
        elsif v_word <> 'wait' then
          v_closed := v_closed + 1;
          v_failed := v_failed or v_word <> 'skipped';
          v_next := v_next || v_node.ix;
          v_ids := v_ids || v_node.id;
          v_causes := v_causes || case v_word when 'blocked' then v_cause end;
          if v_word = 'blocked' then
            v_blocked := v_blocked || v_node.ix;
          end if;
        end if;
      end loop;
      v_met := jsonb_object(v_next::text[], v_causes::text[]);
      update {{schema}}.nodes n set finished_at = {{schema}}.now(), blocked_by = (v_met ->> n.ix::text)::int,
          status = case when v_met ->> n.ix::text is null then 'skipped' else 'blocked' end
        where n.id = any(v_ids);
      v_front := v_next;
    end loop;
    exit when v_due = '{}' or v_made >= v_most;
    v_due := array(select d.ix from unnest(v_due) d(ix) order by d.ix);
    v_taken := {{schema}}.take_budget(p_run, least(cardinality(v_due), v_most - v_made));
    exit when v_taken = 0;
    v_take := v_due[: v_taken];
    v_due := v_due[v_taken + 1 :];
    v_made := v_made + cardinality(v_take);
    select * into v_jobs from {{schema}}.make_ready(p_run, v_take);
    update {{schema}}.nodes n set status = 'skipped', finished_at = {{schema}}.now(), due = false
      where n.run_id = p_run.id and n.ix = any(v_jobs.skipped);
    v_ready := v_ready || v_jobs.ready;
    v_closed := v_closed + cardinality(v_jobs.skipped || v_jobs.failed);
    perform {{schema}}.give_back_budget(p_run, cardinality(v_jobs.skipped || v_jobs.failed));
    v_failed := v_failed or v_jobs.failed <> '{}';
    v_front := v_jobs.skipped || v_jobs.failed;
  end loop;
  if v_made >= v_most or v_due <> '{}' then
    update {{schema}}.nodes n set due = true where n.run_id = p_run.id and n.ix = any(v_due) and not n.due;
    if {{schema}}.is_budget_spent(p_run) then
      -- What raises it tells the leader.
      null;
    elsif v_due <> '{}' or exists (select from {{schema}}.nodes n where n.run_id = p_run.id and n.due) then
      perform pg_notify('{{schema}}_due', p_run.id::text);
    end if;
  end if;
  if p_epochs is not null then
    v_kinds := array_fill('ended'::text, array[cardinality(p_front)]);
    v_nodes := p_front;
    v_epochs := p_epochs;
    v_ns := array_fill(1, array[cardinality(p_front)]);
    v_statuses := p_statuses;
  end if;
  if v_blocked <> '{}' then
    v_kinds := v_kinds || 'blocked'::text;
    v_nodes := v_nodes || v_blocked[1];
    v_epochs := v_epochs || null::bigint;
    v_ns := v_ns || cardinality(v_blocked);
    v_statuses := v_statuses || null::text;
  end if;
  if v_ready <> '{}' then
    v_kinds := v_kinds || 'ready'::text;
    v_nodes := v_nodes || (select min(r.ix) from unnest(v_ready) r(ix));
    v_epochs := v_epochs || null::bigint;
    v_ns := v_ns || cardinality(v_ready);
    v_statuses := v_statuses || null::text;
  end if;
  if v_kinds <> '{}' or v_closed > 0 then
    perform {{schema}}.receipts(p_run.id, v_closed, v_kinds, v_nodes, v_epochs, v_ns, v_statuses);
  end if;
  return v_failed;
end $$;
comment on function {{schema}}.advance({{schema}}.runs, integer[], bigint[], text[], integer, boolean) is
  'Carries a run on after nodes have ended: what became ready gets its job, what can run no more is blocked or skipped. The caller holds the root lock. Answers whether something has failed.';

-- Plans of workflows: frozen graphs, named by the hash of their canonical text. What the text says stands in rows as well,
-- one for each node and edge, so that a run looks them up by number. Written once by store_plan, never changed.

create table {{schema}}.plans (
  hash text primary key check (hash ~ '^p[0-9a-f]{64}$'),
  workflow text not null check ({{schema}}.valid_name(workflow)),
  text text not null,
  on_failure text not null check (on_failure in ('cancel', 'finish')),
  receipts integer not null check (receipts between 1 and 10000),
  result jsonb not null,
  effects jsonb not null,
  nodes integer not null check (nodes between 1 and 10000),
  depth integer not null check (depth between 0 and 8),
  size bigint not null check (size between 1 and 100000),
  child_size bigint not null check (child_size >= 0),
  begins bigint not null check (begins >= 1),
  work_budget bigint check (work_budget between 1 and 10000000),
  map jsonb,
  loop jsonb,
  created_at timestamptz not null,
  check (map is null or loop is null)
);
create index plans_workflow on {{schema}}.plans (workflow, created_at);
comment on table {{schema}}.plans is 'The frozen graphs of workflows. Immutable.';
comment on column {{schema}}.plans.hash is 'p and the SHA-256 of text, in hexadecimal.';
comment on column {{schema}}.plans.workflow is 'The registered name of the workflow.';
comment on column {{schema}}.plans.text is 'The plan as canonical JSON: keys sorted, no spaces.';
comment on column {{schema}}.plans.on_failure is 'What an unhandled failure does to the rest of the run: cancel or finish.';
comment on column {{schema}}.plans.receipts is 'How many receipts a run keeps.';
comment on column {{schema}}.plans.result is 'The expression that gives a run''s result.';
comment on column {{schema}}.plans.effects is 'What a run promises when it ends, as in a policy.';
comment on column {{schema}}.plans.nodes is 'How many nodes it has.';
comment on column {{schema}}.plans.depth is 'How many levels of child runs a run of it has below it.';
comment on column {{schema}}.plans.size is 'How many nodes of it and of its child runs may have jobs at a time.';
comment on column {{schema}}.plans.child_size is 'How many nodes the largest of its child runs begins with; 0 where it has none.';
comment on column {{schema}}.plans.begins is 'How many nodes are made when a run of it is admitted, with those of its child runs; a map begins with one.';
comment on column {{schema}}.plans.work_budget is 'How many nodes a run of it may give jobs in all, with those of the runs below it; null for no limit.';
comment on column {{schema}}.plans.map is 'Of a map, whose one node is run for each item of a list: item (the parameter that takes it), most (items) and at_once (items that have jobs at a time); of an emit, whose second node gives the items page by page, also pages: item (the parameter that takes the cursor) and ahead (open items beyond which no page is asked for); null for others.';
comment on column {{schema}}.plans.loop is 'Of a loop, whose one node is run round after round: item (the parameter that takes the state), most (rounds), path and ends (the part of a result that is looked at, and its values that end the loop), within (seconds; absent for no limit) and exhausted (fail, or give the last state); null for others.';
comment on column {{schema}}.plans.created_at is 'When it was first stored.';

create table {{schema}}.plan_nodes (
  plan_hash text not null,
  ix integer not null check (ix >= 0),
  name text not null check ({{schema}}.valid_name(name)),
  job jsonb not null,
  args jsonb not null,
  compensate jsonb,
  waits_for integer not null,
  child text,
  primary key (plan_hash, ix)
);
-- An expression, so that no lookup by number is answered from it.
create unique index plan_nodes_name on {{schema}}.plan_nodes ((plan_hash || ':' || name));
comment on table {{schema}}.plan_nodes is 'The nodes of plans, in topological order. Immutable.';
comment on column {{schema}}.plan_nodes.plan_hash is 'The plan.';
comment on column {{schema}}.plan_nodes.ix is 'The node''s number, from 0; every edge goes to a higher one.';
comment on column {{schema}}.plan_nodes.name is 'Its name, unique in the plan.';
comment on column {{schema}}.plan_nodes.job is 'How its job is enqueued: a spec of enqueue_many.';
comment on column {{schema}}.plan_nodes.args is 'For each parameter of its task the expression that gives its value.';
comment on column {{schema}}.plan_nodes.compensate is 'The effect that undoes it when the run fails or is cancelled; null for none.';
comment on column {{schema}}.plan_nodes.waits_for is 'How many edges lead to it.';
comment on column {{schema}}.plan_nodes.child is 'The plan of the child run that it stands for; null where it runs a task.';

create table {{schema}}.plan_edges (
  plan_hash text not null,
  source integer not null,
  target integer not null,
  n integer not null,
  policy text not null check (policy in ('fail', 'collect', 'skip')),
  arm jsonb,
  merge boolean not null,
  primary key (source, plan_hash, target, n),
  check (source < target)
);
-- An expression, which serves only those who look for the edges to a node: of two indexes that both have the plan, the planner
-- took either for the other's queries while it believed the table to be empty, and read a whole plan for each node.
create index plan_edges_target on {{schema}}.plan_edges ((plan_hash || ':' || target::text));
comment on table {{schema}}.plan_edges is 'The edges of plans. Immutable.';
comment on column {{schema}}.plan_edges.plan_hash is 'The plan.';
comment on column {{schema}}.plan_edges.source is 'The node that is waited for.';
comment on column {{schema}}.plan_edges.target is 'The node that waits.';
comment on column {{schema}}.plan_edges.n is 'Tells edges between the same two nodes apart.';
comment on column {{schema}}.plan_edges.policy is 'What becomes of the target when the source has failed: fail (it is blocked), collect (it runs) or skip (it is skipped).';
comment on column {{schema}}.plan_edges.arm is 'The target runs only if the source''s result at path equals this, or is a list with this in it: {"path": [...], "equals": ...} or {"path": [...], "has": ...}; null for no condition.';
comment on column {{schema}}.plan_edges.merge is 'Whether the target takes the value of a branch, and runs although this source was skipped.';

create trigger plans_immutable before update or delete on {{schema}}.plans for each row
  execute function {{schema}}.refuse('WF004', 'a plan is immutable', 'A changed workflow gets a plan of its own.');
create trigger plan_nodes_immutable before update or delete on {{schema}}.plan_nodes for each row
  execute function {{schema}}.refuse('WF004', 'a plan is immutable', 'A changed workflow gets a plan of its own.');
create trigger plan_edges_immutable before update or delete on {{schema}}.plan_edges for each row
  execute function {{schema}}.refuse('WF004', 'a plan is immutable', 'A changed workflow gets a plan of its own.');

create function {{schema}}.plan_hash(p_text text) returns text
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$ select 'p' || encode(sha256(convert_to(p_text, 'UTF8')), 'hex') $$;
comment on function {{schema}}.plan_hash(text) is 'The name of a plan with this canonical text.';

create function {{schema}}.edges_of_plan(p_hash text, p_plan jsonb) returns setof {{schema}}.plan_edges
  language sql stable set search_path = pg_catalog, pg_temp as $$
  select p_hash, (e.edge ->> 'from')::int, (e.edge ->> 'to')::int, e.n::int, coalesce(e.edge ->> 'policy', 'fail'), nullif(e.edge -> 'when', 'null'),
         coalesce((e.edge ->> 'merge')::boolean, false)
    from jsonb_array_elements(p_plan -> 'edges') with ordinality e(edge, n)
$$;
comment on function {{schema}}.edges_of_plan(text, jsonb) is 'The edges that a plan''s text says, as rows.';

create function {{schema}}.nodes_of_plan(p_hash text, p_plan jsonb) returns setof {{schema}}.plan_nodes
  language sql stable set search_path = pg_catalog, pg_temp as $$
  select p_hash, n.ix::int - 1, n.node ->> 'name',
         -- Workers below level 3 know no runs.
         n.node -> 'job' || jsonb_build_object('required_worker_schema', greatest((n.node #>> '{job,required_worker_schema}')::int, 3)),
         n.node -> 'args', nullif(n.node -> 'compensate', 'null'), coalesce(w.n, 0)::int, n.node ->> 'child'
    from jsonb_array_elements(p_plan -> 'nodes') with ordinality n(node, ix)
    left join (select (e.edge ->> 'to')::int as target, count(*) as n from jsonb_array_elements(p_plan -> 'edges') e(edge) group by 1) w on w.target = n.ix - 1
$$;
comment on function {{schema}}.nodes_of_plan(text, jsonb) is 'The nodes that a plan''s text says, as rows.';

-- What is wrong with an expression; null for nothing. What a run would stumble over when a node ends must not be stored: that
-- end is no business of the plan's.
create function {{schema}}.expression_fault(p_expr jsonb, p_nodes integer) returns text
  language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_kind text;
  v_given jsonb;
begin
  if jsonb_typeof(p_expr) is distinct from 'object' then
    return format('%s is no expression', coalesce(left(p_expr::text, 100), 'nothing'));
  end if;
  select k into v_kind from unnest(array['value', 'input', 'node', 'outcome', 'results', 'outcomes', 'tally', 'list', 'object', 'case', 'fork']) k where p_expr ? k limit 1;
  v_given := p_expr -> v_kind;
  if v_kind = 'value' then
    return null;
  elsif v_kind in ('input', 'node', 'outcome', 'results', 'outcomes', 'tally') then
    if v_kind = 'input' and jsonb_typeof(v_given) <> 'string'
       or v_kind <> 'input' and not (jsonb_typeof(v_given) = 'number' and v_given::text ~ '^[0-9]{1,6}$' and v_given::text::integer < p_nodes)
       or jsonb_typeof(coalesce(p_expr -> 'path', '[]')) <> 'array'
       or exists (select from jsonb_array_elements(coalesce(p_expr -> 'path', '[]')) s where jsonb_typeof(s.value) not in ('string', 'number')) then
      return format('%s refers to nothing that is there before it', left(p_expr::text, 100));
    end if;
    return null;
  elsif v_kind = 'list' and jsonb_typeof(v_given) = 'array' then
    return (select {{schema}}.expression_fault(l.value, p_nodes) from jsonb_array_elements(v_given) l where {{schema}}.expression_fault(l.value, p_nodes) is not null limit 1);
  elsif v_kind = 'object' and jsonb_typeof(v_given) = 'object' then
    return (select {{schema}}.expression_fault(o.value, p_nodes) from jsonb_each(v_given) o where {{schema}}.expression_fault(o.value, p_nodes) is not null limit 1);
  elsif v_kind = 'case' and jsonb_typeof(v_given -> 'arms') = 'array' then
    return coalesce({{schema}}.expression_fault(v_given -> 'on', p_nodes), (
      select f.fault from jsonb_array_elements(v_given -> 'arms') a cross join lateral (
        select case when jsonb_typeof(a.value) = 'array' then {{schema}}.expression_fault(a.value -> 1, p_nodes) else 'an arm is no pair' end as fault) f
       where f.fault is not null limit 1));
  elsif v_kind = 'fork' and jsonb_typeof(v_given -> 'arms') = 'array' then
    return coalesce({{schema}}.expression_fault(v_given -> 'on', p_nodes), (
      select f.fault from jsonb_array_elements(v_given -> 'arms') a cross join lateral (
        select case when jsonb_typeof(a.value) = 'array' and jsonb_typeof(a.value -> 1) = 'string' then {{schema}}.expression_fault(a.value -> 2, p_nodes) else 'an arm is no triple' end as fault) f
       where f.fault is not null limit 1));
  end if;
  return format('%s is no expression that this version knows', left(p_expr::text, 100));
end $$;
comment on function {{schema}}.expression_fault(jsonb, integer) is 'What is wrong with an expression of a plan that may refer to the first p_nodes nodes; null for nothing.';

create function {{schema}}.store_plan(p_text text) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_hash text := {{schema}}.plan_hash(p_text);
  v_plan jsonb;
  v_wrong text;
  v_depth integer;
  v_size bigint;
  v_child_size bigint;
  v_begins bigint;
  v_map jsonb;
  v_loop jsonb;
begin
  if exists (select from {{schema}}.plans p where p.hash = v_hash) then
    return v_hash;
  end if;
  v_plan := p_text::jsonb;
  select w into v_wrong from (values
      (case when v_plan -> 'format' is distinct from '1' then format('its format is %s', coalesce(v_plan ->> 'format', 'missing')) end),
      (case when jsonb_typeof(v_plan -> 'nodes') is distinct from 'array' or jsonb_typeof(v_plan -> 'edges') is distinct from 'array' then 'it has no nodes or edges' end)) v(w)
    where w is not null limit 1;
  if v_wrong is null then
    select w into v_wrong from (
      select format('node %s is not valid: %s', n.ix - 1, left(n.node::text, 200)) as w
        from jsonb_array_elements(v_plan -> 'nodes') with ordinality n(node, ix)
       where not coalesce({{schema}}.valid_name(n.node ->> 'name'), false) or jsonb_typeof(n.node -> 'args') is distinct from 'object'
          or not coalesce({{schema}}.valid_name(n.node #>> '{job,task}') and {{schema}}.valid_name(n.node #>> '{job,queue}'), false)
          or n.node #>> '{job,effect_class}' is null or n.node #>> '{job,effect_class}' not in ('pure', 'idempotent', 'side_effecting')
          or n.node #>> '{job,policy_id}' is null
      union all
      select format('node %s is a run of plan %s, which is not stored', n.ix - 1, left(n.node ->> 'child', 100))
        from jsonb_array_elements(v_plan -> 'nodes') with ordinality n(node, ix)
       where jsonb_typeof(coalesce(n.node -> 'child', 'null')) <> 'null' and not exists (select from {{schema}}.plans c where c.hash = n.node ->> 'child')
      union all
      select format('node %s is a run, and its job is not one that waits for it: %s', n.ix - 1, left(n.node ->> 'job', 200))
        from jsonb_array_elements(v_plan -> 'nodes') with ordinality n(node, ix)
       where jsonb_typeof(coalesce(n.node -> 'child', 'null')) <> 'null'
         and (n.node #>> '{job,effect_class}' is distinct from 'pure' or n.node -> 'job' ?| array['deadline', 'deadline_in', 'run_at', 'run_in', 'ordering'])
      union all
      select format('its map is not valid: %s', left(v_plan ->> 'map', 200))
       where jsonb_typeof(coalesce(v_plan -> 'map', 'null')) <> 'null'
         and not coalesce(jsonb_array_length(v_plan -> 'nodes') = 1 + (v_plan -> 'map' ? 'pages')::int and v_plan #> '{nodes,0,args}' ? (v_plan #>> '{map,item}')
               and (v_plan #>> '{map,most}')::int between 1 and 100000 and (v_plan #>> '{map,at_once}')::int between 1 and 10000
               and (not v_plan -> 'map' ? 'pages' or v_plan #> '{nodes,1,args}' ? (v_plan #>> '{map,pages,item}') and jsonb_typeof(coalesce(v_plan #> '{nodes,1,child}', 'null')) = 'null'
                 and (v_plan #>> '{map,pages,ahead}')::int between 0 and 100000 and jsonb_array_length(v_plan -> 'edges') = 0), false)
      union all
      select format('its loop is not valid: %s', left(v_plan ->> 'loop', 200))
       where jsonb_typeof(coalesce(v_plan -> 'loop', 'null')) <> 'null'
         and not coalesce(jsonb_typeof(coalesce(v_plan -> 'map', 'null')) = 'null' and jsonb_array_length(v_plan -> 'nodes') = 1
               and v_plan #> '{nodes,0,args}' ? (v_plan #>> '{loop,item}') and (v_plan #>> '{loop,most}')::int between 1 and 10000
               and jsonb_typeof(v_plan #> '{loop,path}') = 'array' and jsonb_array_length(v_plan #> '{loop,ends}') > 0
               and coalesce((v_plan #>> '{loop,within}')::double precision between 0 and 3155760000, not v_plan -> 'loop' ? 'within')
               and v_plan #>> '{loop,exhausted}' in ('fail', 'give'), false)
      union all
      select format('edge %s leads from %s to %s, and there are %s nodes', e.edge, e.edge ->> 'from', e.edge ->> 'to', jsonb_array_length(v_plan -> 'nodes'))
        from jsonb_array_elements(v_plan -> 'edges') e(edge)
       where not coalesce((e.edge ->> 'from')::int >= 0 and (e.edge ->> 'from')::int < (e.edge ->> 'to')::int
               and (e.edge ->> 'to')::int < jsonb_array_length(v_plan -> 'nodes'), false)
      union all
      select format('the condition of edge %s is not valid', e.edge)
        from jsonb_array_elements(v_plan -> 'edges') e(edge)
       where jsonb_typeof(coalesce(e.edge -> 'when', 'null')) <> 'null' and not coalesce(jsonb_typeof(e.edge -> 'when' -> 'path') = 'array' and num_nonnulls(e.edge #> '{when,equals}', e.edge #> '{when,has}') = 1, false)
      union all
      select format('it has %s edges, the limit is 100000', jsonb_array_length(v_plan -> 'edges')) where jsonb_array_length(v_plan -> 'edges') > 100000
      union all
      select format('what compensates node %s is no effect: %s', n.ix - 1, left(n.node ->> 'compensate', 100))
        from jsonb_array_elements(v_plan -> 'nodes') with ordinality n(node, ix)
       where jsonb_typeof(coalesce(n.node -> 'compensate', 'null')) <> 'null'
         and not coalesce({{schema}}.valid_name(n.node #>> '{compensate,task}') and jsonb_typeof(n.node #> '{compensate,policy_id}') = 'string', false)
      union all
      select format('it promises what is no effect: %s', left(v_plan ->> 'effects', 100)) where jsonb_typeof(coalesce(v_plan -> 'effects', '[]')) <> 'array'
      union all
      select format('its result is not valid: %s', f.fault) from {{schema}}.expression_fault(coalesce(v_plan -> 'result', '{"value": null}'), jsonb_array_length(v_plan -> 'nodes')) f(fault)
       where f.fault is not null
      union all
      select format('argument %s of node %s is not valid: %s', a.key, n.ix - 1, f.fault)
        from jsonb_array_elements(v_plan -> 'nodes') with ordinality n(node, ix)
        cross join lateral jsonb_each(case jsonb_typeof(n.node -> 'args') when 'object' then n.node -> 'args' else '{}' end) a
        cross join lateral {{schema}}.expression_fault(a.value, n.ix::int - 1) f(fault)
       where f.fault is not null) f
     limit 1;
  end if;
  if v_wrong is not null then
    raise exception using errcode = 'WF024', message = format('the plan cannot be stored: %s', v_wrong),
      hint = 'Plans are made by taskq from a workflow function, nodes before those that wait for them.';
  end if;
  v_map := nullif(v_plan -> 'map', 'null');
  v_loop := nullif(v_plan -> 'loop', 'null');
  select coalesce(max(c.depth) + 1, 0), jsonb_array_length(v_plan -> 'nodes') + coalesce(sum(c.size), 0), coalesce(max(c.begins), 0),
         jsonb_array_length(v_plan -> 'nodes') + coalesce(sum(c.begins), 0) into v_depth, v_size, v_child_size, v_begins
    from jsonb_array_elements(v_plan -> 'nodes') n(node) join {{schema}}.plans c on c.hash = n.node ->> 'child';
  if v_map is not null then
    v_begins := 1;
    -- Of pages one has a job at a time.
    v_size := (v_size - (v_map ? 'pages')::int) * least((v_map ->> 'most')::int, (v_map ->> 'at_once')::int) + (v_map ? 'pages')::int;
  end if;
  if v_depth > 8 or v_size > 100000 then
    raise exception using errcode = 'WF024', message = format('the plan cannot be stored: with its child runs it has %s levels and %s nodes at a time, the limits are 8 and 100000', v_depth, v_size),
      hint = 'Wire fewer into one another, or declare a smaller at_once of its maps; a task can start() runs of their own.';
  end if;
  -- The same plan, stored by two at once: the second waits here and then finds it.
  insert into {{schema}}.plans (hash, workflow, text, on_failure, receipts, result, effects, nodes, depth, size, child_size, begins, work_budget, map, loop, created_at)
    values (v_hash, v_plan ->> 'workflow', p_text, coalesce(v_plan ->> 'on_failure', 'cancel'), coalesce((v_plan ->> 'receipts')::int, 100),
      coalesce(v_plan -> 'result', '{"value": null}'), coalesce(v_plan -> 'effects', '[]'), jsonb_array_length(v_plan -> 'nodes'), v_depth, v_size, v_child_size, v_begins, (v_plan ->> 'work_budget')::bigint, v_map, v_loop, {{schema}}.now())
    on conflict do nothing;
  if not found then
    return v_hash;
  end if;
  insert into {{schema}}.plan_edges select * from {{schema}}.edges_of_plan(v_hash, v_plan);
  insert into {{schema}}.plan_nodes select * from {{schema}}.nodes_of_plan(v_hash, v_plan);
  return v_hash;
exception
  when invalid_text_representation or invalid_parameter_value or not_null_violation or check_violation or unique_violation
    or numeric_value_out_of_range or untranslatable_character or program_limit_exceeded or statement_too_complex then
    raise exception using errcode = 'WF024', message = format('the plan cannot be stored: %s', sqlerrm),
      hint = 'Plans are made by taskq from a workflow function.';
end $$;
comment on function {{schema}}.store_plan(text) is
  'Stores a plan, given as its canonical JSON, once; returns its hash. Called in a transaction of its own before the first run.';

-- Roles with the least that each needs: producers enqueue, workers claim and end, operators read and steer, readers read.
-- All writes go through SECURITY DEFINER functions, so no role can set a status, an epoch or a claim by itself.
-- Roles belong to the whole server; where this user may not create them, make them by hand and run this file's grants.

do $do$
declare
  v_role text;
begin
  -- Nobody gets anything by default, functions included.
  execute 'revoke all on schema {{schema}} from public';
  execute 'revoke all on all functions in schema {{schema}} from public';
  foreach v_role in array array['{{schema}}_producer', '{{schema}}_worker', '{{schema}}_operator', '{{schema}}_reader'] loop
    begin
      if not exists (select from pg_catalog.pg_roles r where r.rolname = v_role) then
        execute format('create role %I nologin', v_role);
      end if;
    exception
      when insufficient_privilege then
        raise notice 'taskq: role % was not created: this user may not create roles', v_role;
        continue;
      when duplicate_object or unique_violation then
        null;
    end;
    execute format('grant usage on schema {{schema}} to %I', v_role);
    execute format('grant execute on function {{schema}}.now(), {{schema}}.valid_name(text), {{schema}}.id_time(uuid), {{schema}}.node_name(integer, text, integer), {{schema}}.place_in_plan(integer, integer), {{schema}}.emit_word({{schema}}.runs), {{schema}}.held_in_round(uuid, integer, timestamptz), {{schema}}.receipt_seal(uuid, bigint, text, integer, integer, bigint, text) to %I', v_role);
  end loop;
end $do$;

do $do$
declare
  v_grant record;
begin
  for v_grant in
    select * from (values
      ('{{schema}}_producer', 'execute on function {{schema}}.enqueue(text, jsonb, text, integer, timestamptz, interval, timestamptz, integer, text, text, text, text, text[], jsonb, text), {{schema}}.enqueue_many(jsonb, integer[], text[], text[], text[], text, text[]), {{schema}}.ensure_policy(text, integer, jsonb), {{schema}}.ensure_limit(text, integer), {{schema}}.cancel(uuid, text, text), {{schema}}.send_signal(uuid, text, jsonb, text), {{schema}}.send_run_signal(uuid, text, jsonb, text), {{schema}}.store_plan(text), {{schema}}.start_run(text, jsonb, text, jsonb, uuid), {{schema}}.cancel_run(uuid, text, text), {{schema}}.pause_run(uuid, text, text, text), {{schema}}.resume_run(uuid, text, text), {{schema}}.grant_recovery(uuid, text, text, uuid), {{schema}}.set_work_budget(uuid, bigint, text, text)'),
      ('{{schema}}_producer', 'select on {{schema}}.jobs, {{schema}}.history, {{schema}}.all_jobs, {{schema}}.effects, {{schema}}.task_config, {{schema}}.policies, {{schema}}.schema_migrations, {{schema}}.plans, {{schema}}.runs, {{schema}}.nodes, {{schema}}.run_tree'),
      ('{{schema}}_worker', 'execute on all functions in schema {{schema}}'),
      ('{{schema}}_worker', 'select on all tables in schema {{schema}}'),
      ('{{schema}}_operator', 'execute on function {{schema}}.cancel(uuid, text, text), {{schema}}.send_signal(uuid, text, jsonb, text), {{schema}}.send_run_signal(uuid, text, jsonb, text), {{schema}}.retry(uuid, text, text), {{schema}}.resolve(uuid, boolean, jsonb, text, text), {{schema}}.resolve_attempt(uuid, bigint, boolean, jsonb, text, text), {{schema}}.reconcile(uuid, text, text), {{schema}}.pause_queue(text, text, text), {{schema}}.resume_queue(text, text, text), {{schema}}.drain(uuid, text, text), {{schema}}.steer_many(text, uuid[], text, text, jsonb), {{schema}}.settle_effect(text, text, text), {{schema}}.retry_effect(text, text, text), {{schema}}.resume_ordering(text, text, text), {{schema}}.set_limit(text, integer, text, text), {{schema}}.clear_limit(text, text, text), {{schema}}.cancel_run(uuid, text, text), {{schema}}.pause_run(uuid, text, text, text), {{schema}}.resume_run(uuid, text, text), {{schema}}.grant_recovery(uuid, text, text, uuid), {{schema}}.set_work_budget(uuid, bigint, text, text), {{schema}}.retry_run(uuid, text, text), {{schema}}.heal_run(uuid), {{schema}}.heal_runs(uuid, integer), {{schema}}.carry_on_run(uuid), {{schema}}.stop_children(uuid, integer), {{schema}}.check_invariants(text, timestamptz)'),
      ('{{schema}}_operator', 'select on all tables in schema {{schema}}'),
      ('{{schema}}_reader', 'execute on function {{schema}}.check_invariants(text, timestamptz)'),
      ('{{schema}}_reader', 'select on all tables in schema {{schema}}')) as g(role, what)
    where exists (select from pg_catalog.pg_roles r where r.rolname = g.role)
  loop
    execute format('grant %s to %I', v_grant.what, v_grant.role);
  end loop;
end $do$;

-- A worker settles what the laws allow and nothing else: what only these files or an operator call is not for it.
do $do$
begin
  if exists (select from pg_catalog.pg_roles r where r.rolname = '{{schema}}_worker') then
    execute 'revoke execute on function {{schema}}.finish({{schema}}.jobs, text, text, jsonb, jsonb), {{schema}}.finish_many(uuid[], text, jsonb), {{schema}}.note(text, text, text, text, jsonb), {{schema}}.enter_unknown({{schema}}.jobs, text, jsonb), {{schema}}.request_reconcile({{schema}}.jobs), {{schema}}.promise({{schema}}.history), {{schema}}.effect_job({{schema}}.history, jsonb, text, text), {{schema}}.promise_these({{schema}}.history, jsonb, text, text), {{schema}}.compensate({{schema}}.runs), {{schema}}.finish_run(uuid), {{schema}}.stop_rest(uuid, jsonb), {{schema}}.settle_run(uuid, boolean), {{schema}}.advance({{schema}}.runs, integer[], bigint[], text[], integer, boolean), {{schema}}.receipts(uuid, integer, text[], integer[], bigint[], integer[], text[]), {{schema}}.make_ready({{schema}}.runs, integer[]), {{schema}}.receipt(uuid, text, integer, bigint, integer, text), {{schema}}.lock_run_of(uuid), {{schema}}.lock_trees(uuid[], uuid[], boolean), {{schema}}.begin_child({{schema}}.runs, uuid, text, jsonb, boolean, boolean), {{schema}}.admit_map({{schema}}.runs, uuid, text, jsonb, jsonb, boolean), {{schema}}.write_items(uuid, integer), {{schema}}.advance_map(uuid, integer[], bigint[], text[], integer, boolean), {{schema}}.reopen_map({{schema}}.runs, jsonb), {{schema}}.admit_loop({{schema}}.runs, uuid, text, jsonb, jsonb), {{schema}}.advance_loop(uuid, integer[], bigint[], text[], integer, boolean), {{schema}}.reopen_loop({{schema}}.runs, jsonb), {{schema}}.release_parent({{schema}}.runs), {{schema}}.stop_run(uuid, jsonb), {{schema}}.admit_run(text, jsonb, text, jsonb, uuid, {{schema}}.runs, uuid), {{schema}}.reopen_run(uuid, jsonb, text, text), {{schema}}.may_reopen({{schema}}.runs), {{schema}}.lock_runs_of(uuid[]), {{schema}}.run_is_free(uuid), {{schema}}.retry_run(uuid, text, text), {{schema}}.prune_runs(integer), {{schema}}.prune_steps(integer), {{schema}}.suspend({{schema}}.jobs, bigint, jsonb), {{schema}}.end_sleeps({{schema}}.jobs), {{schema}}.bound_signals(uuid, integer, uuid), {{schema}}.give_signal(bigint), {{schema}}.return_signals(integer), {{schema}}.settle_effect(text, text, text), {{schema}}.retry_effect(text, text, text), {{schema}}.prune_effects(integer), {{schema}}.reopening({{schema}}.history), {{schema}}.tell_parent(uuid, uuid, uuid), {{schema}}.cancel_children(uuid, integer), {{schema}}.sweep_children(integer), {{schema}}.child_reopened(uuid, uuid, text, jsonb), {{schema}}.admit_emit({{schema}}.runs, uuid, text, jsonb, jsonb), {{schema}}.take_page(uuid), {{schema}}.ask_page(uuid, integer), {{schema}}.advance_emit(uuid, integer[], bigint[], text[], integer, boolean), {{schema}}.reopen_emit({{schema}}.runs), {{schema}}.lift_pauses(uuid[]), {{schema}}.lock_waiting(uuid[]), {{schema}}.open_budget({{schema}}.runs, bigint), {{schema}}.show_recovery(uuid), {{schema}}.tree_is_free(uuid), {{schema}}.note_event(uuid, text, bigint, text, jsonb), {{schema}}.note_fault({{schema}}.jobs, text, text, text, jsonb, integer), {{schema}}.launch({{schema}}.incidents, bigint), {{schema}}.pause_for(uuid, text, text, text), {{schema}}.hold_for(uuid, uuid, boolean), {{schema}}.write_facts({{schema}}.jobs, jsonb), {{schema}}.prune_incidents(integer), {{schema}}.take_budget({{schema}}.runs, integer), {{schema}}.give_back_budget({{schema}}.runs, integer),
      {{schema}}.enqueue_reconcile({{schema}}.jobs),
      {{schema}}.reconcile(uuid, text, text), {{schema}}.decide_unknown(uuid, bigint, boolean, jsonb, text, text, boolean, jsonb, text), {{schema}}.settle_step({{schema}}.jobs, boolean, jsonb, jsonb), {{schema}}.keep_effects(uuid, integer), {{schema}}.resolve_attempt(uuid, bigint, boolean, jsonb, text, text), {{schema}}.retry(uuid, text, text),
      {{schema}}.resolve(uuid, boolean, jsonb, text, text), {{schema}}.pause_queue(text, text, text), {{schema}}.resume_queue(text, text, text), {{schema}}.drain(uuid, text, text), {{schema}}.steer_many(text, uuid[], text, text, jsonb), {{schema}}.resume_ordering(text, text, text), {{schema}}.set_limit(text, integer, text, text), {{schema}}.clear_limit(text, text, text), {{schema}}.give_turn(text), {{schema}}.come_due(text[], integer), {{schema}}.take_ordering_keys(text[]), {{schema}}.prune_orderings(integer) from {{schema}}_worker';
  end if;
end $do$;

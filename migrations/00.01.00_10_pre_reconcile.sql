-- Reconciling: asking the outside world what became of an attempt whose outcome was never told.

create function {{schema}}.request_reconcile(p_job {{schema}}.jobs) returns uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
  return null;
end $$;
comment on function {{schema}}.request_reconcile({{schema}}.jobs) is
  'Enqueues the job that reconciles this unknown attempt, where its task has a hook for it; returns its id, or null.';

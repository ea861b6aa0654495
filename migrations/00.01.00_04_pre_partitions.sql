-- Partitions of history and ledger, one a day (UTC). Made ahead by the maintenance leader; an end that finds none calls
-- ensure_partitions in a transaction of its own and is sent again. There is no default partition.

create function {{schema}}.ensure_partitions(p_from date default null, p_to date default null) returns integer
  language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '2s' set timezone = 'UTC' as $$
declare
  v_parent text;
  v_day date;
  v_name text;
  v_found regclass;
  v_made integer := 0;
  v_from date := coalesce(p_from, ({{schema}}.now() at time zone 'UTC')::date - 1);
  v_to date;
begin
  select coalesce(p_to, ({{schema}}.now() at time zone 'UTC')::date + i.partitions_ahead) into v_to from {{schema}}.installation i;
  -- One at a time: a row lock, held to the end of this transaction.
  perform from {{schema}}.installation for update;
  foreach v_parent in array array['history', 'ledger'] loop
    for v_day in select d::date from generate_series(v_from::timestamp, v_to::timestamp, interval '1 day') d loop
      v_name := v_parent || '_' || to_char(v_day, 'YYYYMMDD');
      v_found := to_regclass(format('%I.%I', '{{schema}}', v_name));
      -- One that was detached by hand is put back, or no job could end on that day; one of a past day may stay where it is.
      continue when v_found is not null and (v_day < ({{schema}}.now() at time zone 'UTC')::date or exists (select from pg_inherits i where i.inhrelid = v_found));
      -- CREATE and ATTACH: PARTITION OF would lock the parent against all readers and writers.
      if v_found is null then
        execute format('create table %1$I.%2$I (like %1$I.%3$I including defaults including constraints including comments)', '{{schema}}', v_name, v_parent);
        execute format('comment on table %I.%I is %L', '{{schema}}', v_name, v_parent || ' of ' || v_day || ' (UTC)');
      end if;
      execute format('alter table %1$I.%2$I attach partition %1$I.%3$I for values from (%4$L) to (%5$L)',
        '{{schema}}', v_parent, v_name, v_day::timestamptz, (v_day + 1)::timestamptz);
      v_made := v_made + 1;
    end loop;
  end loop;
  return v_made;
end $$;
comment on function {{schema}}.ensure_partitions(date, date) is
  'Makes the daily partitions of history and ledger that are missing, from yesterday to partitions_ahead days ahead unless said otherwise. Returns how many it made.';

create function {{schema}}.ensure_today() returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
  v_day text := to_char({{schema}}.now() at time zone 'UTC', 'YYYYMMDD');
begin
  if (select count(*) from pg_inherits i where i.inhrelid in (
        to_regclass(format('%I.%I', '{{schema}}', 'history_' || v_day)), to_regclass(format('%I.%I', '{{schema}}', 'ledger_' || v_day)))) < 2 then
    perform {{schema}}.ensure_partitions();
  end if;
end $$;
comment on function {{schema}}.ensure_today() is
  'Makes partitions if that of today is missing, which is so when no worker has run for days. Called by what operators call, before it takes any lock.';

create view {{schema}}.partitions as
  -- A condition on the day may be put to every name in pg_class, before the join: most of them are none of a day.
  select p.relname::text as parent, c.relname::text as name,
         case when c.relname::text ~ '_[0-9]{8}$' then to_date(right(c.relname::text, 8), 'YYYYMMDD') end as day
    from pg_inherits i join pg_class c on c.oid = i.inhrelid join pg_class p on p.oid = i.inhparent
   where p.oid in ('{{schema}}.history'::regclass, '{{schema}}.ledger'::regclass);
comment on view {{schema}}.partitions is 'The daily partitions of history and ledger.';

create function {{schema}}.drop_expired_partition() returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
declare
  v_name text;
  v_parent text;
  v_limit date;
begin
  select (({{schema}}.now() - i.history_retention) at time zone 'UTC')::date into v_limit from {{schema}}.installation i;
  select p.name, p.parent into v_name, v_parent from {{schema}}.partitions p where p.day < v_limit order by p.day, p.parent limit 1;
  if v_name is null then
    return null;
  end if;
  -- DETACH locks the parent for an instant; with this lock_timeout a busy table makes us give up, not wait.
  execute format('alter table %1$I.%2$I detach partition %1$I.%3$I', '{{schema}}', v_parent, v_name);
  if v_parent = 'ledger' then
    execute format(
      'with gone as (select job_id, count(*)::int as n from %1$I.%2$I group by job_id)
       update %1$I.jobs j set pruned_attempts = j.pruned_attempts + g.n from gone g where j.id = g.job_id', '{{schema}}', v_name);
    execute format(
      'with gone as (select job_id, count(*)::int as n from %1$I.%2$I group by job_id)
       update %1$I.history h set pruned_attempts = h.pruned_attempts + g.n from gone g where h.id = g.job_id', '{{schema}}', v_name);
  end if;
  if v_parent = 'history' then
    -- How the job of an effect has ended is all that says whether the effect is settled.
    execute format(
      'update %1$I.effect_intents i set job_ended = h.status, error = coalesce(i.error, h.error) from %1$I.%2$I h where i.job_id = h.id', '{{schema}}', v_name);
  end if;
  execute format('drop table %I.%I', '{{schema}}', v_name);
  return v_name;
end $$;
comment on function {{schema}}.drop_expired_partition() is
  'Retention: drops the oldest partition that is past history_retention, noting pruned attempts on the jobs that had some in it, and on effects how their jobs in it had ended. Returns its name, or null when there is none. Raises lock_not_available when the table is busy: try again later.';

select {{schema}}.ensure_partitions();

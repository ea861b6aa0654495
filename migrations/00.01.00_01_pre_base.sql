-- The ground that everything else stands on: the one clock, ids, the rule for names, and the installation's settings.
-- Called by every other function; nothing here writes to a job.

create function {{schema}}.now() returns timestamptz
  language sql stable parallel safe
  set search_path = pg_catalog, pg_temp
  as $$ select clock_timestamp() $$;
comment on function {{schema}}.now() is
  'The one clock: every statement of taskq reads the time here, and tests replace it in their own database. It moves within a transaction, so read it after the locks that a decision needs.';

-- PostgreSQL 18 makes UUIDv7 itself, in order within a session; before it, 12 bits below the millisecond keep the order.
do $do$
begin
  if current_setting('server_version_num')::int >= 180000 then
    execute $f$ create function {{schema}}.new_id() returns uuid language sql volatile parallel safe
      as 'select pg_catalog.uuidv7()' $f$;
  else
    execute $f$ create function {{schema}}.new_id() returns uuid language plpgsql volatile parallel safe
      set search_path = pg_catalog, pg_temp as $b$
      declare
        v_us bigint := (extract(epoch from clock_timestamp()) * 1000000)::bigint;
        v_raw bytea := uuid_send(gen_random_uuid());
      begin
        v_raw := overlay(v_raw placing substring(int8send(v_us / 1000) from 3) from 1 for 6);
        v_raw := overlay(v_raw placing substring(int4send((28672 + ((v_us % 1000) * 4096 / 1000))::int) from 3) from 7 for 2);
        return encode(v_raw, 'hex')::uuid;
      end $b$ $f$;
  end if;
end $do$;
comment on function {{schema}}.new_id() is 'A new UUIDv7, made by the database so that ids sort by creation.';

create function {{schema}}.ids_from(p_first uuid, p_n integer) returns uuid language sql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$ select (left(replace(p_first::text, '-', ''), 24) || lpad(to_hex(p_n), 8, '0'))::uuid $$;
comment on function {{schema}}.ids_from(uuid, integer) is
  'The id of number n of those that are made together, from one new id: they sort by their numbers, also where two are made within the same microsecond.';

create function {{schema}}.id_time(p_id uuid) returns timestamptz
  language sql immutable strict parallel safe
  set search_path = pg_catalog, pg_temp
  as $$ select to_timestamp((('x' || translate(left(p_id::text, 13), '-', ''))::bit(48)::bigint) / 1000.0) $$;
comment on function {{schema}}.id_time(uuid) is
  'When a UUIDv7 was made. Look-ups in history use it (less a day) as a lower bound of the time of the end, so that older partitions are not read.';

create function {{schema}}.valid_name(p_name text) returns boolean
  language sql immutable parallel safe
  as $$ select p_name ~ '^[!-~]{1,128}$' $$;
comment on function {{schema}}.valid_name(text) is 'Names are 1 to 128 printable ASCII characters without spaces.';

create table {{schema}}.installation (
  only_row boolean primary key default true check (only_row),
  history_retention interval not null default interval '30 days' check (history_retention >= interval '1 day'),
  key_retention interval not null default interval '90 days' check (key_retention >= interval '1 day'),
  partitions_ahead integer not null default 14 check (partitions_ahead between 1 and 60),
  max_payload_bytes integer not null default 8388608 check (max_payload_bytes > 0),
  max_waiting_signals integer not null default 10000 check (max_waiting_signals > 0)
);
insert into {{schema}}.installation default values;
comment on table {{schema}}.installation is 'Settings of this installation, one row.';
comment on column {{schema}}.installation.only_row is 'Always true: there is one row.';
comment on column {{schema}}.installation.history_retention is 'How long finished jobs and ended attempts are kept; whole days, dropped by partition.';
comment on column {{schema}}.installation.key_retention is 'How long an idempotency key is remembered; longer than history_retention, so that keys outlive jobs.';
comment on column {{schema}}.installation.partitions_ahead is 'For how many days ahead partitions of history and ledger are made.';
comment on column {{schema}}.installation.max_payload_bytes is 'The largest payload, in bytes of its JSON text, that enqueue accepts.';
comment on column {{schema}}.installation.max_waiting_signals is 'How many signals to one job may wait to be taken; more are refused.';

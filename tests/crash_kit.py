"""A transition with its backend killed at each write, and then done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg
from sql import dump, violations

Conn = psycopg.Connection[Any]
Made = dict[str, Any]

MOST = 200
"""More writes than any transition makes."""

# The backend ends itself when the countdown of its session has run out: really killed, in the middle of the transition.
COUNTDOWN = """
create function public.count_down() returns trigger language plpgsql as $$
declare
  v_left integer := coalesce(nullif(current_setting('crash.left', true), '')::integer, -1);
begin
  if v_left = 0 then
    perform pg_terminate_backend(pg_backend_pid());
    perform pg_sleep(10);
  elsif v_left > 0 then
    perform set_config('crash.left', (v_left - 1)::text, false);
  end if;
  return null;
end $$
"""


def killed_at_each_write(
    conn: Conn,
    dsn: str,
    before: Callable[[Conn], Made],
    transition: Callable[[Conn, Made], None],
    *,
    tables: Sequence[str],
    shape: Callable[[Conn, Made], object],
    least: int,
) -> Made:
    """Kill it at each write: nothing is left; done again it gives, twice, the same ``shape``, and no law is broken.

    Args:
        conn: A connection that is not in autocommit.
        dsn: Of the same database, for the backends that are killed.
        before: Makes what comes before the transition.
        transition: What is killed; it is called anew for each kill.
        tables: Where writes are counted.
        shape: What it has led to, without ids and instants.
        least: The least number of writes that it must have been killed at.

    Returns:
        What ``before`` made, after the transition.
    """
    made = before(conn)
    conn.execute(COUNTDOWN)
    for table in tables:
        conn.execute(
            f"create trigger crash_here after insert or update or delete on taskq.{table}"
            " for each row execute function public.count_down()"
        )
    conn.commit()
    untouched = dump(conn)
    conn.commit()
    killed = 0
    for left in range(MOST):
        with psycopg.connect(dsn) as doomed:
            doomed.execute("select set_config('crash.left', %s, false)", (str(left),))
            try:
                transition(doomed, dict(made))
            except psycopg.OperationalError:
                killed += 1
                assert doomed.closed
            else:
                doomed.rollback()
                break
        assert dump(conn) == untouched
        conn.commit()
    assert least <= killed < MOST, killed
    with conn.transaction(force_rollback=True):
        transition(conn, made)
        once = shape(conn, made)
    transition(conn, made)
    assert shape(conn, made) == once
    assert violations(conn) == []
    return made

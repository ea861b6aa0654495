"""What a file that builds indexes outside a transaction left behind when it was cut off, and how to repair it.

CREATE INDEX CONCURRENTLY and REINDEX CONCURRENTLY leave an invalid index when they fail: every insert maintains it and
no query may use it. IF NOT EXISTS would take it for the real one, so it is dropped and built again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from taskq.migrate.files import strip_comments
from taskq.migrate.records import Connection, compose

_NAME = r'(?:"?[a-z_][a-z0-9_]*"?\.)?"?(?P<name>[a-z_][a-z0-9_$]*)"?'
_CREATE = re.compile(
    rf"^\s*create\s+(?:unique\s+)?index\s+(?:concurrently\s+)?(?:if\s+not\s+exists\s+)?{_NAME}\s+on\b", re.I
)
_REINDEX = re.compile(rf"^\s*reindex\s*(?:\([^)]*\))?\s*(?P<what>index|table)\s+concurrently\s+{_NAME}", re.I)

# Remnants of REINDEX CONCURRENTLY are named after the index, with _ccnew or _ccold and perhaps a number. The index of a
# partitioned table is invalid until all of its parts are attached, which is no damage: relkind I is left alone.
_INVALID = """\
select c.relname from pg_index i
  join pg_class c on c.oid = i.indexrelid join pg_class t on t.oid = i.indrelid
  join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %(schema)s and c.relkind = 'i' and not i.indisvalid
  and not exists (select from pg_inherits h where h.inhrelid = c.oid)
  and (regexp_replace(c.relname, '_cc(new|old)[0-9]*$', '') = any(%(names)s)
    or (t.relname = any(%(tables)s) and c.relname ~ '_cc(new|old)[0-9]*$'))
order by 1"""

_PRESENT = """\
select exists (select from pg_index i join pg_class c on c.oid = i.indexrelid
  join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %s and c.relname = %s and (i.indisvalid or c.relkind = 'I'))"""

_ALL_INVALID = """\
select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid join pg_namespace n on n.oid = c.relnamespace
where n.nspname = %s and c.relkind = 'i' and not i.indisvalid order by 1"""


class Indexes:
    """The indexes that the statements of one file build, as they stand in the database."""

    def __init__(self, conn: Connection, schema: str, statements: Sequence[str]) -> None:
        self._conn, self._schema = conn, schema
        self._names: set[str] = set()
        self._tables: set[str] = set()
        for statement in map(strip_comments, statements):
            if created := _CREATE.match(statement):
                self._names.add(created["name"])
            elif rebuilt := _REINDEX.match(statement):
                (self._names if rebuilt["what"].lower() == "index" else self._tables).add(rebuilt["name"])

    def repairs(self) -> list[str]:
        """The statements, each for a transaction of its own, that drop the invalid remnants."""
        values = {"schema": self._schema, "names": sorted(self._names), "tables": sorted(self._tables)}
        rows = self._conn.execute(_INVALID, values).fetchall()
        drop = "drop index concurrently if exists {schema}."
        return [compose(drop, self._schema).as_string(None) + f'"{row[0]}"' for row in rows]

    def is_built_by(self, statement: str) -> bool:
        """Whether the statement creates an index that is there already and valid."""
        created = _CREATE.match(strip_comments(statement))
        if created is None:
            return False
        row = self._conn.execute(_PRESENT, (self._schema, created["name"])).fetchone()
        return bool(row and row[0])


def invalid_indexes(conn: Connection, schema: str) -> list[str]:
    """The names of all invalid indexes of the schema, but for those of partitioned tables."""
    return [row[0] for row in conn.execute(_ALL_INVALID, (schema,)).fetchall()]

"""Checks of the schema: its migrations, who may use it, its indexes, partitions and dead rows."""

from __future__ import annotations

import psycopg

from taskq import migrate
from taskq.cli.checks import Check, Finding, Patient, fail, ok, warn
from taskq.cli.output import counted
from taskq.errors import MigrationError, SchemaBehind, SchemaNewer

__all__ = ["CHECKS", "migrations"]

DAYS_AHEAD = 3
"""Days for which there should be partitions, today included."""
DEAD_ROWS = 50_000
"""Dead rows of a table that are many, where they are more than the living."""
SEQUENCE_USED = 0.8


def migrations(patient: Patient) -> Finding:
    """Whether the schema is the one that this code needs."""
    try:
        rows = migrate.status(patient.dsn, patient.schema)
        migrate.check_compatible(patient.dsn, patient.schema)
    except SchemaBehind as exc:
        return fail(
            str(exc).partition("; run")[0],
            means="workers refuse to start, and what needs the missing part is refused",
            cure="taskq migrate up",
        )
    except SchemaNewer as exc:
        return fail(
            str(exc).splitlines()[0],
            means="this taskq is older than the schema, which no longer works with it",
            cure="install the release that the schema is for, on this machine and wherever workers run",
        )
    except MigrationError as exc:
        return fail(
            str(exc).splitlines()[0],
            means="files and database do not agree on what was applied; a file or a row was changed by hand",
            cure="taskq migrate verify",
        )
    except psycopg.errors.InsufficientPrivilege:
        return _not_readable(patient)
    applied = sum(row.state == "applied" for row in rows)
    odd = [row for row in rows if row.state in {"changed", "missing"}]
    if odd:
        return fail(
            f"{', '.join(f'{row.filename} is {row.state}' for row in odd)}",
            means="files and database do not agree on what was applied",
            cure="taskq migrate verify",
        )
    post = [row.filename for row in rows if row.state == "pending"]
    later = [row.filename for row in rows if row.state == "unknown"]
    more = f"; {len(post)} wait for 'taskq migrate up --post', once the old code is gone" if post else ""
    more += f"; {len(later)} are of a later release, and harmless to this one" if later else ""
    return ok(f"{applied} migrations are applied{more}")


def _not_readable(patient: Patient) -> Finding:
    return fail(
        "this user may not read the schema",
        means="nothing of it can be checked",
        cure=f"as the schema's owner: grant {patient.schema}_reader to THE_USER",
    )


def roles(patient: Patient) -> Finding:
    """Whether the roles exist, and what this user may do."""
    rows = patient.database.rows("roles")
    user, owner = rows[0]["user"], rows[0]["owner"]
    suffix = len(patient.schema) + 1
    absent = [row["role"] for row in rows if not row["found"]]
    if absent:
        return warn(
            f"the roles {', '.join(absent)} do not exist",
            means="only the owner of the schema can use it, so that applications and workers run as the owner",
            cure=f"{'; '.join(f'create role {role} nologin' for role in absent)}; then run the statements of the roles "
            "migration again (taskq migrate sql --all prints them)",
        )
    mine = [row["role"][suffix:] for row in rows if row["mine"]]
    if owner:
        return ok(f"{user} owns the schema, and may do everything")
    if not mine:
        return fail(
            f"{user} has none of the schema's roles",
            means="it may neither look nor act",
            cure=f"as the schema's owner: grant {patient.schema}_reader to {user}",
        )
    return ok(f"{user} has the roles {', '.join(mine)}")


def indexes(patient: Patient) -> Finding:
    """Whether an index was cut off while it was built."""
    rows = patient.database.rows("indexes")
    if not rows:
        return ok("all are valid")
    names = ", ".join(row["index"] for row in rows)
    return fail(
        f"invalid: {names}",
        means="an index whose building was cut off slows every write and serves no query, so claims may read the "
        "whole table",
        cure=f"taskq migrate up, if a migration that builds it is pending; else: "
        f"reindex index concurrently {patient.schema}.{rows[0]['index']}",
    )


def partitions(patient: Patient) -> Finding:
    """Whether ends find a partition, today and on the next days, and old partitions are dropped."""
    rows = patient.database.rows("partitions")
    days = min(row["days"] for row in rows)
    expired = sum(row["expired"] for row in rows)
    found = ", ".join(f"{row['parent']} for {row['days']} days" for row in rows)
    cure = f"start a worker, whose leader makes them; or at once: select {patient.schema}.ensure_partitions()"
    if days < DAYS_AHEAD:
        return (fail if days < 1 else warn)(
            f"{found}, today included",
            means="the end of a job needs the partition of its day; without one, each end has to make it first, "
            "and nobody who makes them ahead has been at work for long",
            cure=cure,
        )
    if expired:
        return warn(
            f"{counted(expired, 'partition')} past the retention and still there",
            means="they take up space; no leader is at work, or a reader of history is always in the way of the drop",
            cure="look for the checks 'leader' and 'transactions'; then wait half an hour, or: "
            f"select {patient.schema}.drop_expired_partition()",
        )
    return ok(f"{found}, today included")


def vacuum(patient: Patient) -> Finding:
    """Whether dead rows are cleaned."""
    settings = {row["name"]: row["setting"] for row in patient.database.rows("settings")}
    rows = patient.database.rows("vacuum")
    off = [row["table"] for row in rows if row["off"]]
    if "off" in (settings.get("autovacuum"), settings.get("track_counts")) or off:
        where = f"for {', '.join(off)}" if off else "on the whole server"
        cure = (
            "; ".join(f"alter table {patient.schema}.{name} reset (autovacuum_enabled)" for name in off)
            or "alter system set autovacuum = on; alter system set track_counts = on; select pg_reload_conf()"
        )
        return fail(
            f"autovacuum is off {where}",
            means="dead rows are never cleaned: claims get slower without end, and the disk fills up",
            cure=cure,
        )
    many = [row for row in rows if row["dead"] >= DEAD_ROWS and row["dead"] > row["live"]]
    if many:
        first = many[0]
        last = f"{first['last']:%Y-%m-%d %H:%M %Z}" if first["last"] else "never"
        return warn(
            f"{first['table']} has {first['dead']:,} dead rows for {first['live']:,} living (last vacuum: {last})",
            means="vacuum is held back, or does not keep up; every claim walks over the dead entries of the index",
            cure="see the checks 'transactions', 'prepared' and 'replication'; then: "
            f"vacuum {patient.schema}.{first['table']}",
        )
    most = rows[0] if rows else None
    return ok(f"at most {most['dead']:,} dead rows, in {most['table']}" if most else "no tables")


def sequences(patient: Patient) -> Finding:
    """Whether a sequence of the schema runs out of numbers."""
    rows = patient.database.rows("sequences", SEQUENCE_USED)
    if not rows:
        return ok("none is near its end")
    return fail(
        f"{rows[0]['name']} has used {rows[0]['used']:.0%} of its numbers",
        means="once they are used up, every insert that needs one fails",
        cure=f"alter sequence {patient.schema}.{rows[0]['name']} as bigint no maxvalue",
    )


def size(patient: Patient) -> Finding:
    """How large the tables are; never more than said, since SQL cannot see the disk."""
    rows = patient.database.rows("sizes")
    total = sum(row["bytes"] for row in rows)
    parts = [
        f"{row['table']} {_bytes(row['bytes'])}" + (f" in {row['parts']} partitions" if row["parts"] > 1 else "")
        for row in rows[:4]
    ]
    return ok(f"{_bytes(total)} in all: {', '.join(parts)}")


def _bytes(n: int) -> str:
    for unit, one in (("GB", 2**30), ("MB", 2**20)):
        if n >= one:
            return f"{n / one:.1f} {unit}"
    return f"{n / 2**10:.0f} kB"


CHECKS: dict[str, Check] = {
    "roles": roles,
    "indexes": indexes,
    "partitions": partitions,
    "vacuum": vacuum,
    "sequences": sequences,
    "size": size,
}

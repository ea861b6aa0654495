"""Checks of the server and of the way to it."""

from __future__ import annotations

import time
from typing import Any

from taskq.cli.checks import Check, Finding, Patient, fail, ok, span, warn

__all__ = ["CHECKS", "MINIMUM_VERSION"]

MINIMUM_VERSION = 150_000
"""The oldest server that taskq supports, as ``server_version_num``."""
CLOCK_DIFFERENCE = 1.0
"""Seconds that this machine's clock may differ."""
CROWDED, FULL = 0.8, 0.95
"""Shares of the connections in use."""
LONG, VERY_LONG = 300.0, 3_600.0
"""Seconds of a transaction that are long."""
MANY_XIDS = 1_000_000
"""Transactions for which somebody may hold back vacuum where the time is not known."""
HALF_USED, NEARLY_USED = 1_000_000_000, 1_600_000_000
"""Ages of the oldest transaction id; at about 2.1 billion the server stops to take writes."""
NOTIFICATIONS_FILL, NOTIFICATIONS_FULL = 0.1, 0.5
"""Shares of the queue of notifications that are in use."""


def _row(patient: Patient, query: str) -> dict[str, Any]:
    return patient.database.rows(query)[0]


def connection(patient: Patient) -> Finding:
    """Whether the server is one that taskq works with."""
    row = _row(patient, "server")
    found = f"PostgreSQL {row['version'].split()[0]}, up for {span(row['up_for'])}"
    if row["version_num"] < MINIMUM_VERSION:
        return fail(
            found,
            means=f"taskq needs PostgreSQL {MINIMUM_VERSION // 10_000} or later; its statements fail on this one",
            cure="upgrade the server, with pg_upgrade for example",
        )
    return ok(found)


def pooler(patient: Patient) -> Finding:
    """Whether a pooler shares the sessions of the server."""
    row = _row(patient, "server")
    if patient.database.backend_pid != row["pid"]:
        return warn(
            "a connection pooler stands in between",
            means="the CLI and the sync client work through it; workers, taskq dev and the async client refuse it, "
            "since they prepare statements and listen",
            cure="name the PostgreSQL server itself in the TASKQ_DSN of workers and async clients",
        )
    return ok("connected to the server itself")


def writable(patient: Patient) -> Finding:
    """Whether the server takes writes."""
    row = _row(patient, "server")
    if row["standby"]:
        return fail(
            "the server is a standby",
            means="it takes no writes, so nothing can be enqueued, claimed or ended here",
            cure="name the primary in the DSN; with several hosts in it, add target_session_attrs=read-write",
        )
    if row["read_only"]:
        return warn(
            "transactions are read-only unless they say otherwise",
            means="taskq's own sessions say otherwise, but an application cannot enqueue in transactions of its own; "
            "somebody, or a host that runs out of disk, set it so",
            cure="make space if the disk is full; then: alter database NAME reset default_transaction_read_only, and "
            "the same for the role and the server",
        )
    return ok("it takes writes")


def durability(patient: Patient) -> Finding:
    """Whether what was committed survives a crash."""
    settings = {row["name"]: row["setting"] for row in patient.database.rows("settings")}
    unsafe = [name for name in ("fsync", "full_page_writes") if settings.get(name) == "off"]
    if unsafe:
        return fail(
            f"{' and '.join(unsafe)} {'is' if len(unsafe) == 1 else 'are'} off",
            means="a crash of the machine can destroy the database, and with it jobs and their record",
            cure="; ".join(f"alter system set {name} = on" for name in unsafe) + "; select pg_reload_conf()",
        )
    if settings.get("synchronous_commit") == "off":
        return warn(
            "synchronous_commit is off",
            means="a crash of the server loses the last moments: jobs that were enqueued vanish, and jobs whose end "
            "was confirmed run again",
            cure="alter system set synchronous_commit = on; select pg_reload_conf(); look at the role's and the "
            "database's own settings too",
        )
    return ok("commits are durable")


def clock(patient: Patient) -> Finding:
    """Whether this machine and the database agree on the time."""
    sent = time.time()
    at = _row(patient, "clock")["at"].timestamp()
    received = time.time()
    apart = at - (sent + received) / 2
    if abs(apart) - (received - sent) / 2 > CLOCK_DIFFERENCE:
        return warn(
            f"this machine's clock is {span(abs(apart))} {'behind' if apart > 0 else 'ahead of'} the database's",
            means="taskq goes by the database's clock alone, so nothing of it is wrong; instants that people or "
            "programs compute here, such as run_at, are off by as much",
            cure="start a time service on both machines (timedatectl set-ntp true)",
        )
    return ok(f"{abs(apart) * 1000:.0f} ms apart; time zones do not matter")


def connections(patient: Patient) -> Finding:
    """Whether there is room for more sessions."""
    row = _row(patient, "connections")
    share = row["used"] / max(1, row["most"])
    found = f"{row['used']} of {row['most']} in use, {row['ours']} by taskq"
    if share < CROWDED:
        return ok(found)
    means = "when all are in use, workers that start or reconnect are refused, and may lose their leases"
    cure = (
        "find who opens so many (select application_name, count(*) from pg_stat_activity group by 1 order by 2 desc), "
        "give their pools a smaller size, or raise max_connections"
    )
    return (fail if share >= FULL else warn)(found, means=means, cure=cure)


def transactions(patient: Patient) -> Finding:
    """Whether a session holds back vacuum."""
    rows = patient.database.rows("transactions")
    old = [r for r in rows if (r["seconds"] or 0) >= LONG or (r["seconds"] is None and (r["xids"] or 0) >= MANY_XIDS)]
    if not old:
        longest = max((r["seconds"] or 0 for r in rows), default=0)
        return ok(f"the oldest open transaction has lasted {span(longest)}" if rows else "none is open for long")
    first = old[0]
    lasts = f"for {span(first['seconds'])}" if first["seconds"] is not None else f"for {first['xids']:,} transactions"
    who = f"pid {first['pid']} ({first['application_name'] or 'no application name'}, user {first['usename']})"
    found = f"{who} has been {first['state'] or 'in a transaction'} {lasts}"
    if len(old) > 1:
        found += f", and {len(old) - 1} more"
    return (fail if (first["seconds"] or 0) >= VERY_LONG else warn)(
        found,
        means="an open transaction keeps vacuum from cleaning the tables of this database: claims get slower all the "
        "time, and partitions that are past their retention cannot be dropped",
        cure=f"end it where it belongs, or: select pg_terminate_backend({first['pid']}); set "
        "idle_in_transaction_session_timeout so that it does not come back",
    )


def prepared(patient: Patient) -> Finding:
    """Whether a prepared transaction was forgotten."""
    rows = [row for row in patient.database.rows("prepared") if row["seconds"] >= LONG]
    if not rows:
        return ok("none was forgotten")
    first = rows[0]
    return (fail if first["seconds"] >= VERY_LONG else warn)(
        f"the prepared transaction {first['gid']!r} of {first['owner']} is {span(first['seconds'])} old",
        means="it keeps its locks and holds back vacuum until somebody ends it, also over a restart of the server",
        cure=f"ask whoever prepared it, then: rollback prepared '{first['gid']}' (or commit prepared)",
    )


def replication(patient: Patient) -> Finding:
    """Whether a slot or a standby holds something back."""
    slots, standbys = patient.database.rows("slots"), patient.database.rows("standbys")
    for row in slots:
        if row["wal_status"] == "lost" or not row["active"]:
            kept = f", and keeps {row['bytes'] / 2**20:,.0f} MB of WAL" if row["bytes"] is not None else ""
            state = "is lost" if row["wal_status"] == "lost" else "is not in use"
            return warn(
                f"the replication slot {row['slot_name']} {state}{kept}",
                means="a slot that nobody reads keeps WAL until the disk is full, and rows that vacuum would remove",
                cure=f"start its reader, or: select pg_drop_replication_slot('{row['slot_name']}')",
            )
    held = [(f"the slot {r['slot_name']}", r["xids"]) for r in slots]
    held += [(f"the standby {r['application_name']}", r["xids"]) for r in standbys]
    for who, xids in held:
        if (xids or 0) >= MANY_XIDS:
            return warn(
                f"{who} holds back vacuum for {xids:,} transactions",
                means="a long query on a standby with hot_standby_feedback keeps dead rows here, so claims get slower",
                cure="end the query on the standby, or turn hot_standby_feedback off there",
            )
    return ok(f"{len(slots)} slots and {len(standbys)} standbys with feedback hold nothing back")


def wraparound(patient: Patient) -> Finding:
    """Whether transaction ids run out."""
    row = _row(patient, "wraparound")
    age = max(row["xids"], row["mxids"])
    found = f"the oldest transaction id is {age:,} old, in the database {row['datname']}"
    if age < HALF_USED:
        return ok(found)
    return (fail if age >= NEARLY_USED else warn)(
        found,
        means="at about 2.1 billion the server stops to take writes; vacuum does not keep up, or is held back",
        cure=f"end old transactions, prepared ones and slots, then: vacuumdb --freeze --jobs 2 {row['datname']}",
    )


def notifications(patient: Patient) -> Finding:
    """Whether the queue of notifications fills up."""
    used = float(_row(patient, "notifications")["used"])
    found = f"the queue of notifications is {used:.0%} full"
    if used < NOTIFICATIONS_FILL:
        return ok(found)
    return (fail if used >= NOTIFICATIONS_FULL else warn)(
        found,
        means="a session that listens sits in a long transaction and reads nothing; once the queue is full, every "
        "commit that notifies fails, enqueue among them",
        cure="find the session (select pid, application_name, xact_start from pg_stat_activity order by xact_start "
        "limit 5) and end it: select pg_terminate_backend(PID)",
    )


CHECKS: dict[str, Check] = {
    "connection": connection,
    "pooler": pooler,
    "writable": writable,
    "durability": durability,
    "clock": clock,
    "connections": connections,
    "transactions": transactions,
    "prepared": prepared,
    "replication": replication,
    "wraparound": wraparound,
    "notifications": notifications,
}

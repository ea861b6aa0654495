"""Checks of the workers and of what waits for them."""

from __future__ import annotations

import shlex

from taskq.cli.checks import Check, Finding, Patient, fail, ok, span, warn
from taskq.cli.output import counted
from taskq.version import __version__

__all__ = ["CHECKS"]

UNNOTICED = 30.0
"""Seconds after which a lease that ran out should have been noticed by the leader."""
UNSERVED = 60.0
"""Seconds that due jobs may wait in a queue without a worker."""
BEHIND = 300.0
"""Seconds that due jobs may wait in a queue that is served."""
HALTED = 600.0
"""Seconds after which a halted ordering key with jobs behind it looks forgotten."""
PAUSED = 86_400.0
"""Seconds after which a pause with jobs behind it looks forgotten."""

UNKNOWN_FOR = 600.0
"""Seconds that an outcome may be unknown while no reconcile job asks about it."""


def workers(patient: Patient) -> Finding:
    """Whether workers are alive, and lost ones are noticed."""
    rows = patient.database.rows("workers")
    live = [row for row in rows if row["expired_for"] < 0]
    expired = [row for row in rows if row["expired_for"] >= UNNOTICED]
    lost = patient.database.rows("lost_workers")[0]
    if expired:
        first = max(expired, key=lambda row: float(row["expired_for"]))
        return fail(
            f"the lease of {first['name']} ran out {span(first['expired_for'])} ago, and nobody has declared it lost",
            means="its claims stay where they are until a leader settles them; no other worker runs, or time has "
            "just jumped",
            cure="start a worker; see the check 'leader'",
        )
    draining = sum(row["status"] == "draining" for row in live)
    found = f"{len(live)} at work" + (f", {draining} of them draining" if draining else "")
    if lost["n"]:
        return warn(
            f"{found}; {lost['n']} lost within the last hour, the last at {lost['last']:%H:%M:%S %Z}",
            means="a worker was killed, ran out of memory, was cut off or stood still for longer than its lease; its "
            "jobs went back to pending, or need a decision (see 'unknown')",
            cure="taskq workers list --all; read the end of its log, and look for the out-of-memory killer in the "
            "machine's",
        )
    return ok(found)


def claims(patient: Patient) -> Finding:
    """Whether jobs are stuck on workers that are gone."""
    row = patient.database.rows("orphans")[0]
    if not row["n"]:
        return ok("no job is claimed by a lost worker")
    return warn(
        f"{counted(row['n'], 'job')} claimed by workers that are lost or gone, the oldest for {span(row['oldest'])}",
        means="they do not run any more; the leader settles them within seconds, by their effect class",
        cure="look again in a minute; if they stay, start a worker, and look for duty.failed in the workers' logs",
    )


def leader(patient: Patient) -> Finding:
    """Whether somebody looks after lost workers, partitions and retention."""
    live = [row for row in patient.database.rows("workers") if row["expired_for"] < 0 and row["status"] == "live"]
    rows = patient.database.rows("leader")
    row = rows[0] if rows else None
    left = None if row is None else row["seconds_left"]
    if left is not None and left > 0 and row is not None:
        quiet = "; after a restart or a jump of the clock it declares nobody lost for one lease" if row["quiet"] else ""
        return ok(f"{row['name'] or row['holder']}{quiet}")
    if not live:
        return ok("nobody, since no worker runs")
    return (fail if left is None or left < -UNNOTICED else warn)(
        "nobody leads" + (f" for {span(-left)}" if left is not None else ""),
        means="lost workers are not declared so, deadlines are not kept, partitions not made or dropped",
        cure="look for duty.failed and database errors in the workers' logs; restart one: taskq workers drain NAME",
    )


def versions(patient: Patient) -> Finding:
    """Whether workers run the release that is installed here."""
    rows = [row for row in patient.database.rows("workers") if row["expired_for"] < 0]
    others = sorted({row["version"] for row in rows if row["version"] != __version__})
    if not others:
        return ok(f"{counted(len(rows), 'worker')} of release {__version__}, which this command is of")
    n = sum(row["version"] != __version__ for row in rows)
    return warn(
        f"{n} of {len(rows)} workers run {', '.join(others)}; this command is {__version__}",
        means="fine during a deploy; afterwards some machine was left out, or this one was",
        cure="taskq workers list shows which; restart those on the new release before taskq migrate up --post",
    )


def queues(patient: Patient) -> Finding:
    """Whether what is due is taken."""
    rows = patient.database.rows("queues")
    running = [row for row in rows if row["paused_for"] is None]
    unserved = [row for row in running if row["due"] and not row["workers"]]
    if unserved:
        first = unserved[0]
        return (fail if first["waiting_for"] >= UNSERVED else warn)(
            f"{first['queue']} has {counted(first['due'], 'due job')} and no worker, the oldest for "
            f"{span(first['waiting_for'])}"
            + (f"; so have {counted(len(unserved) - 1, 'more queue')}" if len(unserved) > 1 else ""),
            means="nothing of it runs until a worker serves the queue",
            cure=f"taskq worker APP --queue {first['queue']}",
        )
    behind = [row for row in running if row["due"] and row["waiting_for"] >= BEHIND]
    if behind:
        first = behind[0]
        return warn(
            f"{first['queue']} has {counted(first['due'], 'due job')}, the oldest for {span(first['waiting_for'])}, "
            f"and {counted(first['workers'], 'worker')}, with {counted(first['running'], 'job')} running",
            means="work comes in faster than it is done, bodies are stuck, workers do not know the task (see "
            "'stranded'), or their cohort is full (taskq limits list)",
            cure="start more workers or raise --concurrency; taskq jobs list --status running --order oldest shows "
            "bodies that take long",
        )
    forgotten = [row for row in rows if (row["paused_for"] or 0) >= PAUSED and row["due"]]
    if forgotten:
        first = forgotten[0]
        return warn(
            f"{first['queue']} is paused for {span(first['paused_for'])}, with {first['due']:,} due jobs",
            means="nothing of it runs until somebody resumes it",
            cure=f"taskq audit list --subject {first['queue']} shows who paused it and why; taskq queues resume "
            f"{first['queue']}",
        )
    paused = [row["queue"] for row in rows if row["paused_for"] is not None]
    return ok(
        f"{sum(row['due'] for row in rows):,} due, {sum(row['running'] for row in rows):,} running"
        + (f"; paused: {', '.join(paused)}" if paused else "")
    )


def stranded(patient: Patient) -> Finding:
    """Whether due jobs are of tasks that no live worker of their queue can run."""
    rows = patient.database.rows("stranded")
    if not rows:
        return ok("every due job of a served queue has a worker that knows its task")
    first = rows[0]
    level = f" of level {first['level']}" if first["level"] else ""
    return fail(
        f"{first['n']:,} due jobs of the task {first['task']}{level} in {first['queue']}, which no worker there can run"
        + (f"; {len(rows) - 1} more tasks are like it" if len(rows) > 1 else ""),
        means="the task was renamed or taken out of the app, was enqueued to a queue of another app, or needs a newer "
        "worker; the jobs wait for ever",
        cure=f"start a worker whose app has it; or, if it is gone for good: taskq jobs cancel --task {first['task']} "
        f"--queue {first['queue']}",
    )


def classes(patient: Patient) -> Finding:
    """Whether waiting jobs have the effect class that the code declares."""
    rows = patient.database.rows("other_class")
    if not rows:
        return ok("every waiting job has the effect class that its task declares")
    first = rows[0]
    return warn(
        f"{first['n']:,} waiting jobs of the task {first['task']} are {first['enqueued']}, and its code declares "
        f"{first['declared']}" + (f"; {len(rows) - 1} more are like it" if len(rows) > 1 else ""),
        means="a deploy changed the class; a job keeps the one that it was enqueued with, and workers of the new code "
        "hand it back each time",
        cure="let workers of the old code run them, or cancel them and enqueue the work anew: taskq jobs cancel "
        f"--task {first['task']} --status pending",
    )


def unknown(patient: Patient) -> Finding:
    """Whether outcomes wait for a decision."""
    row = patient.database.rows("unknown", UNKNOWN_FOR)[0]
    if not row["standing"]:
        asked = f"; {row['n']:,} unknown are new, or are asked about" if row["n"] else ""
        return ok(f"no outcome waits for a decision{asked}")
    failed = f"; of {row['exhausted']:,} the reconcile hook has failed for good" if row["exhausted"] else ""
    return warn(
        f"{counted(row['standing'], 'job')}, the oldest unknown for {span(row['oldest'])}: "
        f"{', '.join(row['ids'])}{failed}",
        means="their effect may have happened and nobody told; nothing runs them again by itself",
        cure=f"taskq jobs show {row['ids'][0]}; then: taskq jobs resolve {row['ids'][0]} --happened (or "
        "--did-not-happen) --reason WHAT_YOU_CHECKED; taskq jobs unknown lists them all",
    )


def suspects(patient: Patient) -> Finding:
    """Whether bodies seem to kill their workers."""
    row = patient.database.rows("suspects")[0]
    if not row["n"]:
        return ok("no waiting job was on a lost worker twice")
    return warn(
        f"{row['n']:,} waiting jobs were on a lost worker twice or more, of {', '.join(row['tasks'])}",
        means="their body may kill the worker, most often by its memory; each runs alone in an otherwise empty worker, "
        "which must be free for it",
        cure="look for the out-of-memory killer in the machine's log; taskq jobs cancel ID, if it is not wanted",
    )


def effects(patient: Patient) -> Finding:
    """Whether promised effects stand still."""
    rows = patient.database.rows("effects")
    if not rows:
        return ok("no effect has failed without being settled")
    counts = ", ".join(f"{row['n']:,} {row['what']}" for row in rows)
    first = rows[0]["first"]
    return fail(
        f"{counts}, such as {first}",
        means="what was promised for the end of a job was not done, and nothing does it by itself; the job cannot be "
        "reopened before that is settled",
        cure=f"taskq effects list --unsettled; then taskq effects retry {first}, or taskq effects settle {first} "
        "--reason WHAT_YOU_DID",
    )


def orderings(patient: Patient) -> Finding:
    """Whether halted ordering keys wait for somebody."""
    row = patient.database.rows("orderings", HALTED)[0]
    if not row["n"]:
        return ok("no ordering key has been halted for long")
    key = shlex.quote(row["keys"][0])
    return warn(
        f"{row['n']:,} ordering keys, the first for {span(row['oldest'])}: {', '.join(map(repr, row['keys']))}",
        means="a job of the key has failed or is unknown, its task says halt, and what is behind it is held",
        cure=f"taskq orderings list --halted; then taskq jobs retry the failed job, or: taskq orderings resume {key} "
        "--reason WHY_THE_REST_MAY_GO_ON; an unknown one: taskq jobs resolve",
    )


def runs(patient: Patient) -> Finding:
    """Whether every run goes on."""
    row = patient.database.rows("runs")[0]
    if not row["still"]:
        return ok(f"{counted(row['n'], 'run')} at work, and each has a job that carries it on")
    first = row["ids"][0]
    return fail(
        f"{row['still']:,} of {counted(row['n'], 'run')}: {', '.join(row['ids'])}",
        means="nothing of them is at work, and they have not ended; rows were restored, or written past the functions "
        "of taskq",
        cure=f"the worker that leads carries them on within minutes, and so does select {patient.schema}.heal_run("
        f"'{first}') of an operator"
        if row["healable"]
        else f"taskq runs tree {first}; then taskq runs cancel {first} and taskq runs retry {first}",
    )


def paused_runs(patient: Patient) -> Finding:
    """Whether a paused run was forgotten."""
    rows = patient.database.rows("paused_runs")
    if not rows:
        return ok("no run is paused")
    first = rows[0]
    found = f"{counted(len(rows), 'run')} paused"
    if first["paused_for"] < PAUSED:
        return ok(f"{found}, the longest for {span(first['paused_for'])}")
    return warn(
        f"{found}, {first['workflow']} {first['id']} for {span(first['paused_for'])}: {first['code']}, by "
        f"{first['actor']}: {first['reason']}",
        means="nothing of it starts until it is resumed, and deadlines go on counting",
        cure=f"taskq runs list --status paused; taskq runs resume {first['id']} --reason WHY, or taskq runs cancel",
    )


def incidents(patient: Patient) -> Finding:
    """Whether jobs wait for somebody to grant them one more recovery."""
    rows = patient.database.rows("incidents")
    if not rows:
        return ok("no job waits for a grant")
    first = rows[0]
    of = f"job {first['job']}" if first["run"] is None else f"job {first['job']} of run {first['run']}"
    return warn(
        f"{counted(len(rows), 'job')} held by incidents, {of} ({first['task']}) for {span(first['since'])}: "
        f"{first['code']}: {first['message']}",
        means="it is not begun again by itself; a run paused for it starts nothing, and deadlines go on counting",
        cure=f"taskq incidents show {first['id']}; then taskq incidents grant {first['id']} --reason WHY; all of "
        "them: taskq incidents list",
    )


def work_budgets(patient: Patient) -> Finding:
    """Whether runs wait since their work budget is spent."""
    rows = patient.database.rows("work_budgets")
    if not rows:
        return ok("no run waits for its work budget")
    first = rows[0]
    return warn(
        f"{counted(len(rows), 'run')} with a work budget that is spent, {first['workflow']} {first['id']} with "
        f"{counted(first['waiting'], 'node')} that {'waits' if first['waiting'] == 1 else 'wait'}: it may begin "
        f"{first['budget']}",
        means="it has begun as many bodies as its workflow allows; what is ready is given no job",
        cure=f"taskq runs tree {first['id']} shows what it did; then taskq runs budget {first['id']} NUMBER --reason "
        "WHY, or taskq runs cancel",
    )


def ahead(patient: Patient) -> Finding:
    """Whether the workers know what the plans of runs at work have yet to get through."""
    rows = patient.database.rows("ahead")
    if not rows:
        return ok("the workers know every task that runs at work have yet to get to")
    first = rows[0]
    return warn(
        f"{counted(first['runs'], 'run')} of {first['workflow']} will get to {first['node']}, and no worker of "
        f"{first['queue']} knows its task {first['task']}"
        + (f"; {len(rows) - 1} more are like it" if rows[1:] else ""),
        means="a deploy renamed the task or took it out; runs keep the plan that they began with, and wait there",
        cure=f"keep a worker of the release that has it until they are through; or taskq runs cancel "
        f"{first['first_run']}, and start it anew; select * from {patient.schema}.unserved_nodes shows all",
    )


def run_epochs(patient: Patient) -> Finding:
    """Whether jobs of runs can be claimed by the rules of runs."""
    row = patient.database.rows("run_epochs")[0]
    if not row["n"]:
        return ok("every job of a run has the epoch of its run")
    return fail(
        f"{counted(row['n'], 'job')} of runs without a run epoch: {', '.join(row['ids'])}",
        means="a release that knew no run epochs made them; no worker may run them, and their runs wait for them",
        cure=f"taskq runs cancel {row['run']}, then taskq runs retry {row['run']}, which gives what has not run a job "
        "of this release",
    )


CHECKS: dict[str, Check] = {
    "workers": workers,
    "claims": claims,
    "leader": leader,
    "versions": versions,
    "queues": queues,
    "stranded": stranded,
    "classes": classes,
    "unknown": unknown,
    "effects": effects,
    "suspects": suspects,
    "orderings": orderings,
    "runs": runs,
    "paused_runs": paused_runs,
    "incidents": incidents,
    "work_budgets": work_budgets,
    "ahead": ahead,
    "run_epochs": run_epochs,
}

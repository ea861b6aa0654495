"""The log events of taskq: read from the calls in the code, with what each means to people."""

from __future__ import annotations

import ast
from pathlib import Path

from taskq.telemetry.events import OF_ATTEMPT, OF_JOB

LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "exception": "error",
    "critical": "critical",
}
LOGGERS = ("log", "_log", "get_logger")

MEANING = {
    "database.refused": "the database answers and refuses; tried again, with growing pauses",
    "database.unavailable": "a connection failed; tried again, with growing pauses up to a few seconds",
    "duty.failed": "one duty of the leader failed; the others go on, and it is tried again at the next turn",
    "embedded.joined": "another process had started the embedded PostgreSQL",
    "embedded.not_stopped": "the embedded PostgreSQL could not be stopped",
    "embedded.settings_kept": "the embedded PostgreSQL runs with other settings, which stay",
    "embedded.started": "the embedded PostgreSQL was started",
    "embedded.stopped": "the embedded PostgreSQL was stopped by its last user",
    "exchange.unreadable": "an answer of the database could not be read; its ends are sent again, its claims released",
    "fault.armed": "a test has armed a fault in this process (`taskq.testing.faults`)",
    "fault.fired": "a fault that a test armed has struck",
    "limit.code_changed": "a deploy has changed what code says about a cohort: `was` and `limit`",
    "limit.operator_override": "an operator has set another limit for a cohort than this code has; theirs counts",
    "health.failed": "the health endpoint answers no more; the worker goes on",
    "health.listening": "where `/live` and `/ready` are answered",
    "incident.granted": "somebody has granted the job of an incident one more recovery",
    "job.abandoned": "a body could not be stopped in time; its job is handed back and the process ends",
    "job.after_commit": "a body did something after its `ctx.transaction()` had ended its job; it has no effect",
    "job.cancelled": "an attempt ended as cancelled",
    "job.claimed": "a job was claimed",
    "job.claim_not_proven": "a claim was not what this worker may run (`reason`); handed back, and said once",
    "job.claim_without_body": "the database had a claim that runs nowhere here; it was released",
    "job.effect_start_not_proven": "the answer to an effect start proved nothing; the body was not called",
    "job.commit_unconfirmed": "the answer to the COMMIT of a `ctx.transaction()` was lost; asked until it is known",
    "job.end_not_decided": "a defect: the end of a body could not be judged; it is recorded as a failure",
    "job.expired": "the leader ended a job that waited: its deadline passed, or its attempts were used up",
    "job.failed": "the job failed for good",
    "job.fenced_out": "an end changed nothing: the job had been taken away",
    "job.handed_back": "a claim whose body had not started was handed back",
    "job.not_prepared": "its preparation kept it from the attempt: released, held by an incident, or its run paused",
    "job.not_settled": "the leader could not settle one job, which stays as it was; the others go on",
    "job.outcome_not_proven": "what stands on record is not what was sent; nothing is reported as done or repeated",
    "job.outcome_not_stored": "PostgreSQL refused an outcome; the job ends with a minimal failure",
    "job.process_killed": "the child process of a body that did not stop was killed",
    "job.released": "an attempt whose body had started was handed back, no attempt used",
    "job.resolved": "a reconcile hook has answered, and the unknown outcome is resolved",
    "job.retry": "the body failed and is tried again",
    "job.retry_after": "the body raised RetryAfter",
    "job.runs_alone": "a job that was on two lost workers runs alone",
    "job.settled": "the leader settled the claim of a lost worker",
    "job.snooze": "the body raised Snooze",
    "job.step_told_late": "a side-effecting `step` was told after its attempt was over: `recorded`, so that the job "
    "goes on with it, or not, since somebody had decided before",
    "job.steps_left": "a body returned without having asked for these recorded `steps`: renamed, or gone",
    "job.succeeded": "a body returned",
    "job.suspended": "a body sleeps, or waits for a signal; its attempt ended, and none was used up",
    "job.stranded": "a job that this worker may not claim; left to others",
    "job.timeout_ignored": "a body goes on in spite of its timeout and holds its slot; it is cancelled again and again",
    "job.unknown": "the effect may have happened and its outcome is not known; it waits for a decision",
    "leader.lost": "another worker leads now",
    "leader.taken": "this worker leads: it looks after lost workers, partitions and retention",
    "lease.expiring": "renewal has failed for long; bodies are cancelled",
    "lease.lost": "a body still ran as the lease ran out; the process ends",
    "lease.not_renewed": "one renewal failed; tried again",
    "lease.renewed_again": "renewals are answered again in time",
    "listen.resumed": "notifications come again",
    "listen.unavailable": "no notifications; polling goes on",
    "loop.blocked": "something blocks the event loop; the stack says what",
    "loop.interrupted": "a body stopped the event loop, or called `sys.exit` in a task of its own; the worker goes on",
    "run.not_carried_on": "the database refused to carry a run on; others go on, and it is tried again",
    "run.budget_set": "this process has set the work budget of a run",
    "run.paused": "this process has paused a run, with this code",
    "run.resumed": "this process has let a paused run go on",
    "run.healed": "the leader carried on a run that stood still",
    "partition.busy": "retention gave up on a busy table, and tries again later",
    "partition.dropped": "retention dropped a day",
    "partitions.made": "partitions were made ahead",
    "policy.missing": "a job's policy is not stored; its task's own is used",
    "policy.unavailable": "policies could not be read; the tasks' own are used meanwhile",
    "policy.unreadable": "a stored policy cannot be understood; the task's own is used",
    "process.recycled": "a child process was replaced by a fresh one, after so many bodies or so much memory",
    "process.started": "a child process for bodies was started",
    "reconcile.enqueued": "an unknown outcome has a hook now; it is asked about",
    "reconcile.exhausted": "a hook is not called again; the outcome stays unknown until `taskq jobs resolve`",
    "reconcile.not_enqueued": "an unknown outcome cannot be asked about, since the policy of its hook is not stored",
    "reconcile.overtaken": "an unknown outcome was resolved otherwise while its hook was asked",
    "signals.taken": "a body changed what SIGTERM or SIGINT do in the worker, which takes them back",
    "supervisor.forcing": "a second signal: the processes are told to hand back what runs",
    "supervisor.hopeless": "no process was ever ready; the supervisor ends with the code of the first",
    "supervisor.process_ended": "a worker process ended",
    "supervisor.process_killed": "a worker process did not end in time, and was killed",
    "supervisor.process_started": "a worker process was started",
    "supervisor.replacing": "a worker process wants to be recycled; a successor is started",
    "supervisor.started": "a supervisor of several worker processes has started",
    "supervisor.stopped": "all worker processes have ended",
    "supervisor.stopping": "a signal: the worker processes are told to stop",
    "task.unknown": "jobs wait for a task that this worker does not know; told once a name",
    "worker.recycling": "so many bodies, or so much memory: the worker drains, and another takes its place",
    "worker.stopped_at_boot": "it was stopped before it had begun to claim",
    "worker.waits": "at boot: the database answers and takes no worker just now; tried again, with growing pauses",
    "worker.bodies_left": "the worker ends while bodies run that could not be stopped; the process must end",
    "worker.drain_requested": "an operator asked it to stop, with `taskq workers drain`",
    "worker.draining": "asked to stop; nothing more is claimed",
    "worker.failed": "a defect ended the worker while bodies ran",
    "worker.grace_over": "the grace is over; bodies are interrupted and handed back",
    "worker.lease_taken": "this worker was declared lost; bodies are stopped and it registers anew",
    "worker.lost": "the leader declared a worker lost",
    "worker.origin": "where taskq was imported from",
    "worker.outcomes_not_sent": "the worker ends with outcomes that the database has not confirmed",
    "worker.registered_anew": "the worker has a new registration",
    "worker.started": "registered, and claims",
    "worker.stopped": "stopped, with what it did",
    "worker.stuck_thread": "a thread outlived its timeout; the worker drains and ends",
}
ABOUT = {"of_job": OF_JOB, "of_attempt": OF_ATTEMPT, "about": ("name", "pid", "exit_code", "ran")}
"""Fields that are handed to a call as a whole, by the name under which they are; ``error`` comes where there is one."""


def events(package: Path) -> dict[str, tuple[str, list[str]]]:
    """Every event that the code logs: its levels and its fields, as the calls spell them out."""
    found: dict[str, tuple[str, list[str]]] = {}
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        chosen = {
            node.targets[0].id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _levels(node.value, {})
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args and (levels := _levels(node.func, chosen))):
                continue
            fields = [k.arg for k in node.keywords if k.arg and k.arg != "exc_info"]
            for keyword in node.keywords:
                if keyword.arg is None and isinstance(keyword.value, ast.Name):
                    fields = [*ABOUT.get(keyword.value.id, ()), *fields]
            for name in _names(node.args[0]):
                said, known = found.get(name, ("", []))
                every = {*said.split(" or "), *levels}
                order = " or ".join(dict.fromkeys(level for level in LEVELS.values() if level in every))
                found[name] = (order, known + [f for f in fields if f not in known])
    return dict(sorted(found.items()))


def _levels(node: ast.expr, chosen: dict[str, ast.expr]) -> list[str]:
    """The levels at which a call of this logs; none if it is no method of a logger, nor a name for one or two."""
    match node:
        case ast.Attribute(value=value, attr=attr) if _logger(value) in LOGGERS and attr in LEVELS:
            return [LEVELS[attr]]
        case ast.IfExp(body=one, orelse=other):
            return _levels(one, chosen) + _levels(other, chosen)
        case ast.Name(id=name) if name in chosen:
            return _levels(chosen[name], {})
    return []


def _logger(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.expr) -> list[str]:
    match node:
        case ast.Constant(value=str(name)):
            return [name]
        case ast.IfExp(body=one, orelse=other):
            return _names(one) + _names(other)
        case ast.JoinedStr(values=[ast.Constant(value="job."), _]):
            return ["job.retry", "job.retry_after", "job.snooze"]
    raise ValueError(f"an event whose name cannot be read: {ast.dump(node)}")

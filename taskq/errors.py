"""Every error that taskq raises on purpose, as one small tree.

Each message says what happened, what it means and what to do. The database's own refusals carry SQLSTATEs of class
``WF``; ``from_sqlstate`` maps each to the one exception that stands for it. Nothing here imports another part of taskq.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar
from uuid import UUID

MAX_MESSAGE = 2_000
MAX_TRACEBACK = 8_000
NO_RIGHTS_SQLSTATE = "42501"


class TaskQError(Exception):
    """The root of all errors of taskq; catch it to catch them all."""


class ConfigurationError(TaskQError):
    """A setting is missing or wrong; the message names the setting and the cure."""


class FaultInjected(TaskQError):
    """A fault that a test armed with ``taskq.testing.faults`` has struck; never raised otherwise."""


class NotDrained(TaskQError):
    """``taskq.testing.drain`` could not run all that is due; the message names what is left, and why where it can."""


class EmbeddedPostgresError(TaskQError):
    """The embedded PostgreSQL could not be found, started or reached."""


class MigrationError(TaskQError):
    """The schema and the migrations at hand do not agree, or a migration could not be applied."""


class MigrationChanged(MigrationError):
    """A frozen or applied migration file no longer has the content that was frozen or applied."""


class MigrationMissing(MigrationError):
    """A frozen migration file is not there."""


class MigrationUnknown(MigrationError):
    """A migration file is not frozen, or the database has one that this code never had."""


class MigrationReordered(MigrationError):
    """Migration files stand, or were applied, in another order than that of their names."""


class SchemaNewer(MigrationError):
    """The database has migrations of a later release than the code."""


class SchemaBehind(MigrationError):
    """The database lacks migrations that the code needs; the message names them in order, unless it lacks all."""


class MigrationLocked(MigrationError):
    """Another session holds a lock, or another runner the lease, that the migration needs."""


class MigrationFailed(MigrationError):
    """PostgreSQL refused a statement of a migration; nothing of that file's transaction remains."""


class DatabaseUnavailable(TaskQError):
    """PostgreSQL could not be reached or refused the login; the message names host, port and database."""


class DatabaseBusy(DatabaseUnavailable):
    """PostgreSQL answers and takes no connection just now: all are taken, or it is starting or stopping."""


# Declaring tasks and policies ----------------------------------------------------------------------


class TaskDefinitionError(TaskQError):
    """A function cannot be registered as a task; the message names what about it and the cure."""


class WiringError(TaskQError, TypeError):
    """A workflow function does what only a body can do, or a step stands outside of a workflow."""


class PlanError(TaskQError, ValueError):
    """The wiring of a workflow is wrong; found before anything is stored.

    Attributes:
        workflow: The workflow.
        faults: What is wrong, all of it.
    """

    def __init__(self, workflow: str, faults: Sequence[str]) -> None:
        self.workflow = workflow
        self.faults = tuple(faults)
        said = faults[0] if len(faults) == 1 else "".join(f"\n  {n}. {fault}" for n, fault in enumerate(faults, 1))
        super().__init__(f"workflow {workflow} cannot run: {said}")


class InvalidPolicy(TaskQError, ValueError):
    """A value of a policy is not valid; the message names the field and what it takes."""


class InvalidDuration(InvalidPolicy):
    """A duration cannot be read; the message shows it and what is accepted."""


class PoolerInBetween(ConfigurationError):
    """A connection pooler stands between taskq and PostgreSQL where a session of its own is needed."""


class SyncCallInEventLoop(TaskQError):
    """A blocking call was made where an event loop runs; the message names the call to await instead."""


class NotPermitted(TaskQError):
    """The database's user lacks the rights for this, and nothing was done; the message names the role to grant."""


class UnsupportedConnection(TaskQError, TypeError):
    """What was given as ``connection=`` is no connection that this call can use."""


class UnusableConnection(TaskQError):
    """The connection given as ``connection=`` is in a state in which it takes no statement; nothing was enqueued."""


# What the database refuses: one class for each SQLSTATE --------------------------------------------


class DatabaseRefusal(TaskQError):
    """The schema refused a statement.

    Attributes:
        sqlstate: The code of class WF.
        detail: What the database says about it, such as ``job_id``; empty when it gave nothing.
        hint: What to do, as the database puts it.
        job_id: The job that it is about, or None.
        run_id: The run that it is about, or None.
    """

    sqlstate: ClassVar[str] = ""

    def __init__(self, message: str, *, detail: Mapping[str, Any] | None = None, hint: str | None = None) -> None:
        super().__init__(f"{message}. {hint}" if hint else message)
        self.detail: dict[str, Any] = dict(detail or {})
        self.hint = hint
        self.job_id = _uuid_or_none(self.detail.get("job_id"))
        self.run_id = _uuid_or_none(self.detail.get("run_id"))


class WorkerNotCapable(DatabaseRefusal):
    """The job requires a capability level above the worker's."""

    sqlstate = "WF001"


class EpochNotAdvanced(DatabaseRefusal):
    """A claim epoch was not advanced by exactly one with a claim, or was changed without one."""

    sqlstate = "WF002"


class IllegalTransition(DatabaseRefusal):
    """No such transition of a job is listed; see ``taskq.transitions``."""

    sqlstate = "WF003"


class RecordIsAppendOnly(DatabaseRefusal):
    """History, ledger, audit and policies are never changed."""

    sqlstate = "WF004"


class TaskNotPublished(DatabaseRefusal):
    """No worker has published the task, and no policy was named."""

    sqlstate = "WF006"


class UniqueKeyHeld(DatabaseRefusal):
    """Another job holds the unique key; ``job_id`` names it. Nothing was enqueued."""

    sqlstate = "WF007"


class IdempotencyConflict(DatabaseRefusal):
    """The idempotency key was used for another request; ``job_id`` names that request's job."""

    sqlstate = "WF008"


class InvalidRequest(DatabaseRefusal):
    """A request is not valid: a name, a number or a size out of its bounds."""

    sqlstate = "WF009"


class JobNotFound(DatabaseRefusal):
    """There is no such job: never enqueued, not committed, or dropped by retention."""

    sqlstate = "WF011"


class WrongState(DatabaseRefusal):
    """The job is not in a status that allows this."""

    sqlstate = "WF012"


class AlreadyResolved(WrongState):
    """The outcome was unknown, and has been resolved before: by somebody else, by a hook, or by its own late end.

    Attributes:
        resolved_to: What the job became: ``succeeded``, ``failed``, ``cancelled`` or ``pending``.
        resolved_by: Who resolved it, as ``audit`` has it; None if that is not known.
        claim_epoch: The attempt.
    """

    sqlstate = "WF016"

    def __init__(self, message: str, *, detail: Mapping[str, Any] | None = None, hint: str | None = None) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.resolved_to: str | None = self.detail.get("resolved_to")
        self.resolved_by: str | None = self.detail.get("resolved_by")
        self.claim_epoch: int | None = self.detail.get("claim_epoch")


class StaleAttempt(WrongState):
    """What was said is about another attempt than the job's current one; nothing was changed.

    Attributes:
        claim_epoch: The attempt that it was about.
        current_epoch: The attempt that the job is at.
    """

    sqlstate = "WF017"

    def __init__(self, message: str, *, detail: Mapping[str, Any] | None = None, hint: str | None = None) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.claim_epoch: int | None = self.detail.get("claim_epoch")
        self.current_epoch: int | None = self.detail.get("current_epoch")


class PolicyNotFound(DatabaseRefusal):
    """There is no policy with that id."""

    sqlstate = "WF014"


class EffectsUnsettled(DatabaseRefusal):
    """The job is not reopened while terminal effects of its last end are not settled; ``detail`` has their keys."""

    sqlstate = "WF020"


class EffectNotFound(DatabaseRefusal):
    """There is no terminal effect with that key."""

    sqlstate = "WF021"


class SignalConflict(DatabaseRefusal):
    """Another payload was sent before under the key of this signal; nothing was sent."""

    sqlstate = "WF030"


class TooManySignals(DatabaseRefusal):
    """As many signals wait to be taken as the installation allows (``max_waiting_signals``); nothing was sent.

    Attributes:
        waiting: How many wait.
    """

    sqlstate = "WF040"

    def __init__(self, message: str, *, detail: Mapping[str, Any] | None = None, hint: str | None = None) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.waiting: int | None = self.detail.get("waiting")


class ChildrenTooDeep(DatabaseRefusal):
    """The body is the child of a child, 100 times over, and may start none of its own."""

    sqlstate = "WF041"


class ChildBehindParent(DatabaseRefusal):
    """The child has the ordering key of its parent, or of one above, and would wait for the job that waits for it."""

    sqlstate = "WF042"


class IncidentNotFound(DatabaseRefusal):
    """There is no such incident."""

    sqlstate = "WF043"


class GrantStale(DatabaseRefusal):
    """The incident is not what holds up its job, or goes on by itself: nothing was granted.

    Attributes:
        current: The incident that does hold it up, as text; None for none.
    """

    sqlstate = "WF044"

    def __init__(self, message: str, *, detail: Mapping[str, Any] | None = None, hint: str | None = None) -> None:
        super().__init__(message, detail=detail, hint=hint)
        self.current: str | None = self.detail.get("current")


class PlanConflict(DatabaseRefusal):
    """The run key was used for a run with another plan or input; ``run_id`` names that run."""

    sqlstate = "WF022"


class RunNotLive(DatabaseRefusal):
    """The job is a node's, and its run has ended, is being cancelled, or is at another epoch."""

    sqlstate = "WF023"


class PlanRefused(DatabaseRefusal):
    """A plan is not stored, cannot be stored, or was to be changed under a run."""

    sqlstate = "WF024"


class NotAList(DatabaseRefusal):
    """What a map was given is no list; the node has failed with this."""

    sqlstate = "WF031"


class TooManyItems(DatabaseRefusal):
    """A map was given more items than it may have; the node has failed with this."""

    sqlstate = "WF032"


class ResultsTooLarge(DatabaseRefusal):
    """The results, or outcomes, of a map are larger together than a payload may be; what takes them has failed."""

    sqlstate = "WF033"


class ItemsChanged(DatabaseRefusal):
    """A map that is retried was given other items than those that children of it have succeeded with."""

    sqlstate = "WF034"


class RunNotFound(DatabaseRefusal):
    """There is no such run: never admitted, not committed, or dropped by retention."""

    sqlstate = "WF025"


class RunWrongState(DatabaseRefusal):
    """The run is not in a status that allows this, or what its end promised is not settled."""

    sqlstate = "WF026"


class CohortFull(DatabaseRefusal):
    """As many jobs of the cohort run as its limit lets; `detail` has both. A claim leaves such a job waiting."""

    sqlstate = "WF027"


# How jobs end, and how attempts do -----------------------------------------------------------------


class PayloadError(TaskQError, TypeError):
    """Arguments that cannot be stored, or stored ones that do not fit the task.

    Attributes:
        path: Where: ``order_id``, ``x[1].y``; empty when it is about the whole.
    """

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class PayloadMisfit(PayloadError):
    """Stored arguments do not fit the task as this process has it: another version of it, or a hand, enqueued them.

    Attributes:
        reason: What does not fit, with its path.
    """

    def __init__(self, message: str, *, path: str = "", reason: str = "") -> None:
        super().__init__(message, path=path)
        self.reason = reason


class JobNotSucceeded(TaskQError):
    """What ``result()`` raises for a job that ended otherwise.

    Attributes:
        job_id: The job.
        error: What is on record: ``type``, ``message``, perhaps ``traceback``; empty when nothing is.
    """

    said: ClassVar[str] = "did not succeed"

    def __init__(self, job_id: UUID, error: Mapping[str, Any] | None = None) -> None:
        self.job_id = job_id
        self.error: dict[str, Any] = dict(error or {})
        kind, message = self.error.get("type"), self.error.get("message")
        super().__init__(f"job {job_id} {self.said}: {kind}: {message}" if kind else f"job {job_id} {self.said}")


class JobFailed(JobNotSucceeded):
    """The job failed for good; ``error`` is the last attempt's."""

    said = "failed"


class JobCancelled(JobNotSucceeded):
    """The job was cancelled; raised by ``result()``, and in a sync body by ``ctx.raise_if_cancelled()``."""

    said = "was cancelled"


class ResultNotKept(TaskQError):
    """The job has succeeded, and its result was not kept: its task says ``history="slim"``.

    Attributes:
        job_id: The job.
    """

    def __init__(self, job_id: UUID) -> None:
        self.job_id = job_id
        super().__init__(
            f"job {job_id} has succeeded, and its result was not kept, since its policy says history='slim'; declare "
            "the task with history='full' if its result is wanted, or ask for status() alone"
        )


class RunNotSucceeded(TaskQError):
    """What ``result()`` raises for a run that ended otherwise.

    Attributes:
        run_id: The run.
        error: What is on record: ``type``, ``message``, for a failure ``node`` and ``cause``; empty when nothing is.
    """

    said: ClassVar[str] = "did not succeed"

    def __init__(self, run_id: UUID, error: Mapping[str, Any] | None = None) -> None:
        self.run_id = run_id
        self.error: dict[str, Any] = dict(error or {})
        message = self.error.get("message")
        super().__init__(f"run {run_id} {self.said}: {message}" if message else f"run {run_id} {self.said}")


class RunFailed(RunNotSucceeded):
    """The run failed: a node did, and nothing handled that."""

    said = "failed"


class RunCancelled(RunNotSucceeded):
    """The run was cancelled; ``error["reason"]`` is what was given for it, None for nothing."""

    said = "was cancelled"


class ChildRunFailed(RunFailed):
    """What a node that stands for a child run fails with, once that run has failed."""


class ChildRunCancelled(RunCancelled):
    """What a node that stands for a child run fails with, once that run was cancelled by itself."""


class LoopExhausted(ChildRunFailed):
    """What the node of a loop fails with whose rounds, or whose time, were used up before a round was the end.

    Attributes:
        kind: ``"rounds"`` or ``"time"``; on record under that name, too.
        rounds: How many there were.
    """

    def __init__(self, run_id: UUID, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(run_id, error)
        self.kind: str = self.error.get("kind", "rounds")
        self.rounds: int = self.error.get("rounds", 0)


class ResultTimeout(TaskQError, TimeoutError):
    """The job had not finished within the given time; the message says what was seen of it."""


class FencedOut(TaskQError):
    """The attempt is no longer this worker's: the job was taken away; what was sent changed nothing."""


class ReconcileAnswerInvalid(TaskQError):
    """A reconcile hook returned what is no answer, or a result that is none of its task's; nothing was resolved."""


class OwnershipNotProven(TaskQError):
    """``ctx.assert_owned()`` could not ask the database, so nobody knows whether the attempt is still this worker's."""


class CheckpointConflict(TaskQError):
    """The checkpoint stands at another version than the one that was to be replaced; nothing was saved.

    Attributes:
        version: The version that stands; 0 for none yet.
        value: What it holds, in JSON's own types.
    """

    def __init__(self, message: str, *, version: int, value: Any) -> None:
        super().__init__(message)
        self.version = version
        self.value = value


class CheckpointNotLoaded(TaskQError):
    """The body asked for its checkpoint before it was loaded: ``await ctx.load_checkpoint()`` first."""


class SuspensionSwallowed(TaskQError):
    """The body returned although ``ctx.sleep`` or ``ctx.wait_for`` had suspended it: it has caught ``Suspended``.

    Catch ``Exception``, never ``BaseException``; or raise what was caught again.
    """


class StepRefused(TaskQError, ValueError):
    """A step of a durable body cannot be as it is asked for; its function was not called."""


class ChildFailed(TaskQError):
    """A child that the body started with ``ctx.child`` has failed, or was cancelled; later attempts are told the same.

    Attributes:
        name: The child.
        occurrence: Which child of that name, from 1.
        child_id: Its job, or run; None in a plain call.
        status: ``failed``, ``cancelled``, or ``gone`` where retention had dropped it before this body looked.
        error: What it failed with: ``type``, ``message`` and more.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str,
        occurrence: int,
        child_id: str | None,
        status: str,
        error: Mapping[str, Any],
    ) -> None:
        super().__init__(message)
        self.name = name
        self.occurrence = occurrence
        self.child_id = _uuid_or_none(child_id)
        self.status = status
        self.error = error


class StepFailed(TaskQError):
    """The function of a side-effecting step has failed, which ends the job unless the body catches it.

    Later attempts are told the same, and do not call it.

    Attributes:
        name: The step.
        occurrence: Which call of that name, from 1.
        error: What it failed with: ``type`` and ``message``.
    """

    def __init__(self, message: str, *, name: str, occurrence: int, error: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.name = name
        self.occurrence = occurrence
        self.error = error


class StepConflict(TaskQError):
    """Another value is recorded for a step than the one that its function has just given; the record stands.

    Attributes:
        name: The step.
        occurrence: Which call of that name, from 1.
    """

    def __init__(self, message: str, *, name: str, occurrence: int) -> None:
        super().__init__(message)
        self.name = name
        self.occurrence = occurrence


class StepMisfit(TaskQError):
    """What is recorded of a step does not fit what its function is annotated to return now; it was not called.

    Attributes:
        name: The step.
        occurrence: Which call of that name, from 1.
    """

    def __init__(self, message: str, *, name: str, occurrence: int) -> None:
        super().__init__(message)
        self.name = name
        self.occurrence = occurrence


class TransactionalStepUnsupported(TaskQError):
    """``ctx.transaction()`` cannot hold what it promises here, on no attempt; nothing of the block has run."""


class TransactionEndedInside(TaskQError):
    """The block of ``ctx.transaction()`` ended its own transaction, by COMMIT or ROLLBACK; the job was not completed.

    What the block had committed by itself stays. It is not tried again, which would do that twice.
    """


class CommitNotConfirmed(TaskQError):
    """The answer to the COMMIT of ``ctx.transaction()`` was lost, and nobody could be asked yet what became of it.

    Whatever the body does after that, the attempt ends by what the database says once it can be asked.
    """


class UnknownTask(TaskQError):
    """The application has no task of that name."""


class ResultNotStorable(TaskQError):
    """What the body returned cannot be stored as JSON; the message says where and why."""


class StepNotStorable(ResultNotStorable):
    """What a step gave cannot be stored as JSON; its function has run. The message says where and why."""


class AttemptTimeout(TaskQError):
    """The body ran longer than its timeout."""


class DeadlineExceeded(TaskQError):
    """The job's deadline passed before it could start, or start again."""


class RetryAfterExhausted(TaskQError):
    """The body raised ``RetryAfter`` more often than the policy's ``max_retry_afters``."""


class SnoozeExhausted(TaskQError):
    """The body raised ``Snooze`` more often than the policy's ``max_snoozes``."""


class RecoveryExhausted(TaskQError):
    """The job was with lost workers, or its effect did not happen, more often than the policy's ``max_recoveries``."""


class PreparationInvalid(TaskQError):
    """What a preparation has answered is none of its answers, or says something that cannot be."""


class PrerequisiteInvalid(TaskQError):
    """``Unmet`` names something that is no argument of the job, no node that it waits for and no check of the task."""


class NotProven(TaskQError):
    """The database's answer does not prove what the worker needs to know before it goes on.

    Attributes:
        reason: What does not fit, in a few words.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClaimNotProven(NotProven):
    """What was claimed is not what this worker asked for: its body is not called, and the claim is handed back."""


class EffectStartNotProven(NotProven):
    """Whether the attempt may start its effect was not answered beyond doubt: the body is not called."""


class OutcomeNotProven(NotProven):
    """What stands on record of an attempt is not what was sent: nothing is reported as done, nothing is repeated."""


class ProcessDied(TaskQError):
    """The child process of a body ended by itself: ``os._exit``, a crash in C code, or a kill from outside.

    Attributes:
        exit_code: What it exited with; None if a signal ended it.
        signal: The number of the signal that ended it; None if it exited.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, signal: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.signal = signal


class ProcessNotStarted(TaskQError):
    """No child process could be started for a body, or it could not import the task; the message says why."""


class UnsupportedInProcess(TaskQError, AttributeError):
    """A body in a child process asked its context for something that only the worker's own process can give."""


_BY_SQLSTATE: Mapping[str, type[DatabaseRefusal]] = {
    c.sqlstate: c for c in (*DatabaseRefusal.__subclasses__(), *WrongState.__subclasses__())
}


def from_sqlstate(exc: BaseException) -> TaskQError | None:
    """The exception that stands for a refusal of the database, or None if it is not one of ours.

    Args:
        exc: What asyncpg or psycopg raised.
    """
    state = getattr(exc, "sqlstate", None)
    if not isinstance(state, str) or not state.startswith("WF"):
        return None
    diag = getattr(exc, "diag", None)  # psycopg; asyncpg has the fields on the exception
    if diag is not None:
        message, detail, hint = diag.message_primary, diag.message_detail, diag.message_hint
    else:
        message = exc.args[0] if exc.args else type(exc).__name__
        detail, hint = getattr(exc, "detail", None), getattr(exc, "hint", None)
    kind = _BY_SQLSTATE.get(state)
    return kind(str(message), detail=_json_object(detail), hint=hint) if kind else None


def not_permitted(exc: BaseException, role: str) -> NotPermitted | None:
    """The error for a statement that the user has no rights for, or None if that is not what happened.

    Args:
        exc: What asyncpg or psycopg raised.
        role: The role that has what is needed, such as ``taskq_worker``.
    """
    if getattr(exc, "sqlstate", None) != NO_RIGHTS_SQLSTATE:
        return None
    said = str(exc).partition("\n")[0]  # psycopg shows the place in the statement below it
    return NotPermitted(
        f"the database's user may not do this ({said}); let somebody who may grant the role {role} to that user"
    )


def describe(exc: BaseException) -> dict[str, str]:
    """An error as the record keeps it: ``type``, ``message`` and, if there is one, ``traceback``; of a loop ``kind``.

    Never raises, whatever the exception's own methods do. What PostgreSQL cannot hold (NUL, lone surrogates) is
    replaced; a message is cut after 2,000 characters, of a traceback the last 8,000 are kept.
    """
    record = {"type": _clean(_kind(exc), 200), "message": _clean(_said(exc), MAX_MESSAGE)}
    # BaseException here and below: even a SystemExit of a property is no reason why a job cannot end.
    with suppress(BaseException):
        if isinstance(exc, LoopExhausted):
            record["kind"] = _clean(exc.kind, 200)
        if exc.__traceback__ is not None:
            told = "".join(traceback.format_exception(exc))
            record["traceback"] = _clean(told[-MAX_TRACEBACK:], MAX_TRACEBACK)
    return record


def _kind(value: object) -> str:
    """The name of a value's class, past anything that its metaclass makes of it."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name


def _said(exc: BaseException) -> str:
    try:
        return str(exc)
    except BaseException as second:
        return f"(its message could not be read: {_kind(second)})"


def _clean(text: str, limit: int) -> str:
    try:
        text = str.__str__(text)  # not a subclass with methods of its own
        text = text if len(text) <= limit else text[: limit - 1] + "…"
        return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")
    except BaseException:
        return "(unreadable)"


def _json_object(text: object) -> dict[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _uuid_or_none(value: object) -> UUID | None:
    try:
        return UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None

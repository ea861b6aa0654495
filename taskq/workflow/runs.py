"""Runs of workflows: how one is started, and what one looks like from outside.

A run is admitted by one statement, in the caller's transaction if a connection is given: its plan and policies are
stored before, in transactions of their own, so that an open one blocks nobody.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeAlias, TypedDict, TypeVar, cast
from uuid import UUID

from taskq.client.checks import check_grant, check_job_id, check_pause, check_signal, check_steering, check_work_budget
from taskq.client.requests import check_meta, check_run_key
from taskq.codec import decode_any
from taskq.db.pools import refuse_in_event_loop
from taskq.durations import Duration
from taskq.errors import InvalidRequest, PayloadError, RunNotFound
from taskq.telemetry import get_logger
from taskq.workflow.fit import shown

if TYPE_CHECKING:
    from taskq.app import TaskQ
    from taskq.codec import TaskCodec
    from taskq.policy import ExecutionPolicy
    from taskq.workflow.plan import Plan

__all__ = ["Admission", "BoundWorkflow", "NodeInfo", "NodeStatus", "Run", "RunInfo", "RunStatus", "RunUsing", "Starts"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
RunStatus: TypeAlias = Literal["running", "paused", "recovering", "succeeded", "failed", "cancelled"]
NodeStatus: TypeAlias = Literal[
    "waiting",
    "pending",
    "preparing",
    "running",
    "held",
    "unknown",
    "blocked",
    "skipped",
    "succeeded",
    "failed",
    "cancelled",
]
RunSignalAnswer: TypeAlias = Literal["given", "kept", "already"]
PauseRunAnswer: TypeAlias = Literal["paused", "already", "finished", "cancelling"]
GrantAnswer: TypeAlias = Literal["granted", "paused", "already"]
SetBudgetAnswer: TypeAlias = Literal["set", "already", "finished"]
ResumeRunAnswer: TypeAlias = Literal["resumed", "not_paused", "finished"]
CancelRunAnswer: TypeAlias = Literal["cancelled", "requested", "succeeded", "failed", "finished", "not_found"]


log = get_logger("workflow")


def _paused(run: UUID, code: str, answer: PauseRunAnswer) -> PauseRunAnswer:
    if answer == "paused":
        log.info("run.paused", run_id=str(run), code=code)
    return answer


def _granted(incident: UUID | str, answer: GrantAnswer) -> GrantAnswer:
    if answer != "already":
        log.info("incident.granted", incident=str(incident))
    return answer


def _budgeted(run: UUID, budget: int, answer: SetBudgetAnswer) -> SetBudgetAnswer:
    if answer == "set":
        log.info("run.budget_set", run_id=str(run), budget=budget)
    return answer


def _resumed(run: UUID, answer: ResumeRunAnswer) -> ResumeRunAnswer:
    if answer == "resumed":
        log.info("run.resumed", run_id=str(run))
    return answer


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node of a run as it was when the database was asked; the fields are columns of the view ``run_tree``.

    Attributes:
        job_id: Its own id, and that of its job once it has one.
        blocked_by: The node whose failure blocks it.
        waits_for: The nodes that it waits for, at most 100.
        child_run: The run that it stands for; it is ``held`` while that runs.
        child_status: How that run stands.
    """

    ix: int
    name: str
    task: str
    status: NodeStatus
    held_reason: str | None
    job_id: UUID
    claim_epoch: int | None
    attempt: int | None
    ready_at: datetime | None
    finished_at: datetime | None
    blocked_by: str | None
    waits_for: tuple[str, ...]
    error: Mapping[str, Any] | None
    child_run: UUID | None
    child_status: RunStatus | None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as it was when the database was asked; the fields are the columns of the table ``runs``.

    Attributes:
        parent_run: The run that it is a part of; None for one that was started by itself.
        parent_node: The name of the node of that run which it stands for.
        started_by: The job that started it, such as that of a terminal effect.
    """

    id: UUID
    workflow: str
    plan_hash: str
    run_key: str | None
    status: RunStatus
    created_at: datetime
    finished_at: datetime | None
    cancel_requested_at: datetime | None
    open_nodes: int
    run_epoch: int
    generation: int
    sequence: int
    parent_run: UUID | None
    parent_node: str | None
    started_by: UUID | None
    input: Mapping[str, Any]
    result: Any
    error: Mapping[str, Any] | None
    meta: Mapping[str, Any] | None

    @property
    def finished(self) -> bool:
        """Whether it has ended, unless somebody reopens it."""
        return self.finished_at is not None


@dataclass(frozen=True, slots=True)
class Admission:
    """One run that is to be admitted, its input already checked and encoded.

    Attributes:
        plan: Its plan.
        policies: What the plan's jobs point to, by id.
        input: The JSON text of its arguments by name.
        run_key: Its key, if it has one.
        meta: The JSON text of what travels with it, if anything does.
        connection: The caller's own connection, if one was given.
        started_by: The job that starts it, if one does.
    """

    plan: Plan
    policies: Mapping[str, ExecutionPolicy]
    input: str
    run_key: str | None = None
    meta: str | None = None
    connection: Any = None
    started_by: UUID | None = None

    def under(
        self, run_key: str | None, meta: str | None, connection: Any, started_by: UUID | None = None
    ) -> Admission:
        """The same under a key, with what travels with it, on a connection."""
        return Admission(self.plan, self.policies, self.input, run_key, meta, connection, started_by)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The statement's arguments, for either driver."""
        started_by = None if self.started_by is None else str(self.started_by)
        return (self.plan.hash, self.input, self.run_key, self.meta, started_by)


class RunUsing(TypedDict, total=False):
    """What a caller may say about a run: ``workflow.using(...)``.

    Attributes:
        run_key: The same key with the same plan and input is answered with the same run; anything else under that key
            raises ``PlanConflict``. 1 to 128 printable ASCII characters without spaces.
        meta: Data that travels with the run and with each of its jobs; at most 64 KiB as JSON.
        connection: The caller's own connection: the run is admitted or vanishes with its transaction. Of the kinds
            that ``enqueue`` takes.
    """

    run_key: str | None
    meta: Mapping[str, Any] | None
    connection: Any


class Run(Generic[R_co]):
    """The handle of a run; holds its id and asks the database about the rest.

    Attributes:
        id: The run's id.
        created: False if a run was there already under the same key.
    """

    __slots__ = ("_app", "_codec", "_in_transaction", "created", "id")

    def __init__(
        self,
        app: TaskQ,
        run_id: UUID,
        codec: TaskCodec | None = None,
        created: bool = True,
        in_transaction: bool = False,
    ) -> None:
        self.id = run_id
        self.created = created
        self._app = app
        self._codec = codec
        self._in_transaction = in_transaction

    async def result(self, timeout: Duration | None = None) -> R_co:
        """Wait until the run has ended; give what the workflow returned.

        Args:
            timeout: The longest wait; None for no limit.

        Raises:
            RunFailed: It failed; ``error`` names the node.
            RunCancelled: It was cancelled.
            PayloadError: It has succeeded, and its result is none of the type that the workflow is annotated to return:
                what it returns was skipped, for one.
            ResultTimeout: It had not ended in time.
            RunNotFound: There is no such run.
        """
        client = await self._app._open_async()
        return self._decode(await client.wait(self.id, timeout, may_appear=self._in_transaction, of="run"))

    def result_sync(self, timeout: Duration | None = None) -> R_co:
        """Like ``result``, for code without an event loop."""
        refuse_in_event_loop("result_sync")
        return self._decode(self._app._sync.wait(self.id, timeout, may_appear=self._in_transaction, of="run"))

    async def info(self) -> RunInfo:
        """All about it.

        Raises:
            RunNotFound: There is no such run, or its transaction has not committed.
        """
        return self._found(await (await self._app._open_async()).rows("run", str(self.id)))

    def info_sync(self) -> RunInfo:
        """Like ``info``, for code without an event loop."""
        refuse_in_event_loop("info_sync")
        return self._found(self._app._sync.rows("run", str(self.id)))

    async def nodes(self) -> list[NodeInfo]:
        """Its nodes, in the order of the plan."""
        return [_node_info(row) for row in await (await self._app._open_async()).rows("run_nodes", str(self.id))]

    def nodes_sync(self) -> list[NodeInfo]:
        """Like ``nodes``, for code without an event loop."""
        refuse_in_event_loop("nodes_sync")
        return [_node_info(row) for row in self._app._sync.rows("run_nodes", str(self.id))]

    async def cancel(self, reason: str | None = None, *, actor: str | None = None) -> CancelRunAnswer:
        """Cancel it, with all that waits of it, in one transaction; what runs is asked to.

        Args:
            reason: Why; it goes on the record.
            actor: Who; the database's user by default.

        Returns:
            ``cancelled``: it has ended. ``requested``: jobs of it still run, or their outcome is unknown. ``succeeded``
            or ``failed``: that is how it ended now. ``finished`` or ``not_found``: nothing was changed.
        """
        client = await self._app._open_async()
        return cast(CancelRunAnswer, await client.call("cancel_run", *check_steering(self.id, reason, actor, "run")))

    def cancel_sync(self, reason: str | None = None, *, actor: str | None = None) -> CancelRunAnswer:
        """Like ``cancel``, for code without an event loop."""
        refuse_in_event_loop("cancel_sync")
        answer = self._app._sync.call("cancel_run", *check_steering(self.id, reason, actor, "run"))
        return cast(CancelRunAnswer, answer)

    async def pause(self, reason: str, *, code: str = "operator", actor: str | None = None) -> PauseRunAnswer:
        """Pause it with its child runs: nothing of it starts until ``resume``; what runs goes on to its end.

        That end is applied as always: what it makes ready is held, and where it was the last, the run has ended.

        Args:
            reason: Why; it goes on the record, and is shown wherever the run is.
            code: A short name for the kind of reason, 1 to 128 printable ASCII characters without spaces.
            actor: Who; the database's user by default.

        Returns:
            ``paused``, or what it is and was left as: ``already`` paused, with the code that it has, ``finished``, or
            ``cancelling``.

        Raises:
            RunNotFound: There is no such run.
            InvalidRequest: There is no reason, or the code is none.
        """
        client = await self._app._open_async()
        answer = await client.call("pause_run", *check_pause(self.id, reason, actor, code))
        return _paused(self.id, code, cast(PauseRunAnswer, answer))

    def pause_sync(self, reason: str, *, code: str = "operator", actor: str | None = None) -> PauseRunAnswer:
        """Like ``pause``, for code without an event loop."""
        refuse_in_event_loop("pause_sync")
        answer = self._app._sync.call("pause_run", *check_pause(self.id, reason, actor, code))
        return _paused(self.id, code, cast(PauseRunAnswer, answer))

    async def resume(self, reason: str, *, actor: str | None = None) -> ResumeRunAnswer:
        """Let it go on with all that is paused below it: what the pause held is due when it was.

        Args:
            reason: Why; it goes on the record.
            actor: Who; the database's user by default.

        Returns:
            ``resumed``, or what it is and was left as: ``not_paused`` or ``finished``.

        Raises:
            RunNotFound: There is no such run.
            RunWrongState: A run above it is paused: resume that, the refusal names it.
            InvalidRequest: There is no reason.
        """
        client = await self._app._open_async()
        answer = await client.call("resume_run", *check_pause(self.id, reason, actor)[:3])
        return _resumed(self.id, cast(ResumeRunAnswer, answer))

    def resume_sync(self, reason: str, *, actor: str | None = None) -> ResumeRunAnswer:
        """Like ``resume``, for code without an event loop."""
        refuse_in_event_loop("resume_sync")
        answer = self._app._sync.call("resume_run", *check_pause(self.id, reason, actor)[:3])
        return _resumed(self.id, cast(ResumeRunAnswer, answer))

    async def grant(self, incident: UUID | str, reason: str, *, actor: str | None = None) -> GrantAnswer:
        """Grant the node of an incident exactly one more recovery; a pause that was for it is over.

        Args:
            incident: The incident, as ``taskq incidents list`` and the view ``open_incidents`` show it.
            reason: What was done about it; it goes on the record.
            actor: Who; the database's user by default.

        Returns:
            ``granted``; ``paused``, it is granted, and the run is paused for another reason, so resume it; or
            ``already``, one is granted and not used yet.

        Raises:
            IncidentNotFound: There is no such incident of this run.
            GrantStale: It is not what holds up its job any more, or it goes on by itself.
            InvalidRequest: There is no reason, or the id is none.
        """
        client = await self._app._open_async()
        answer = await client.call("grant_recovery", *check_grant(incident, reason, actor), str(self.id))
        return _granted(incident, cast(GrantAnswer, answer))

    def grant_sync(self, incident: UUID | str, reason: str, *, actor: str | None = None) -> GrantAnswer:
        """Like ``grant``, for code without an event loop."""
        refuse_in_event_loop("grant_sync")
        answer = self._app._sync.call("grant_recovery", *check_grant(incident, reason, actor), str(self.id))
        return _granted(incident, cast(GrantAnswer, answer))

    async def set_work_budget(self, budget: int, reason: str, *, actor: str | None = None) -> SetBudgetAnswer:
        """Set how many bodies it may begin in all, with the runs below it; what waits for that goes on.

        Args:
            budget: How many, those that it has begun included: 1 to 10,000,000. Fewer than it has begun stops it there.
            reason: Why; it goes on the record.
            actor: Who; the database's user by default.

        Returns:
            ``set``, or where nothing was changed: ``already``, it is so many; ``finished``, the run has ended.

        Raises:
            RunNotFound: There is no such run.
            RunWrongState: It was admitted without a work budget, or its budget is that of a run above it: set that.
            InvalidRequest: There is no reason, or the number cannot be.
        """
        client = await self._app._open_async()
        answer = await client.call("set_work_budget", *check_work_budget(self.id, budget, reason, actor))
        return _budgeted(self.id, budget, cast(SetBudgetAnswer, answer))

    def set_work_budget_sync(self, budget: int, reason: str, *, actor: str | None = None) -> SetBudgetAnswer:
        """Like ``set_work_budget``, for code without an event loop."""
        refuse_in_event_loop("set_work_budget_sync")
        answer = self._app._sync.call("set_work_budget", *check_work_budget(self.id, budget, reason, actor))
        return _budgeted(self.id, budget, cast(SetBudgetAnswer, answer))

    async def signal(self, name: str, payload: Any = None, *, key: str | None = None) -> RunSignalAnswer:
        """Send it a signal: to one of its nodes, or of its child runs, whose body waits with ``ctx.wait_for``, or will.

        The node that has waited longest is given it; where none waits it is kept for the run, also over a reopening,
        and given in order to the first body that asks. In a transaction of your own,
        ``select taskq.send_run_signal(id, name, payload, key)`` does the same.

        Args:
            name: What a body waits for.
            payload: JSON's own values, dataclasses and so on; 8 MiB of JSON at most.
            key: Sent again to the run under one key, it is there once.

        Returns:
            ``given`` to a node that waits, ``kept``, or ``already``: it was sent before under this key.

        Raises:
            RunNotFound: There is no such run.
            RunWrongState: It has ended.
            SignalConflict: Another payload was sent under this key.
            TooManySignals: 10,000 are kept already (``installation.max_waiting_signals``).
            PayloadError: The payload cannot be stored.
            InvalidRequest: The name or the key is not valid.
        """
        client = await self._app._open_async()
        answer = await client.call("send_run_signal", *check_signal(self.id, name, payload, key))
        return cast(RunSignalAnswer, answer)

    def signal_sync(self, name: str, payload: Any = None, *, key: str | None = None) -> RunSignalAnswer:
        """Like ``signal``, for code without an event loop."""
        refuse_in_event_loop("signal_sync")
        answer = self._app._sync.call("send_run_signal", *check_signal(self.id, name, payload, key))
        return cast(RunSignalAnswer, answer)

    async def retry(self, reason: str | None = None, *, actor: str | None = None) -> Literal["reopened"]:
        """Reopen it after it has failed or was cancelled: what did not succeed runs again.

        Raises:
            RunNotFound: There is no such run.
            RunWrongState: It has not failed, or what its end promised is not settled.
        """
        client = await self._app._open_async()
        await client.call("retry_run", *check_steering(self.id, reason, actor, "run"))
        return "reopened"

    def retry_sync(self, reason: str | None = None, *, actor: str | None = None) -> Literal["reopened"]:
        """Like ``retry``, for code without an event loop."""
        refuse_in_event_loop("retry_sync")
        self._app._sync.call("retry_run", *check_steering(self.id, reason, actor, "run"))
        return "reopened"

    def _found(self, rows: Sequence[Sequence[Any]]) -> RunInfo:
        if not rows:
            raise RunNotFound(
                f"there is no run {self.id}",
                detail={"run_id": str(self.id)},
                hint="It was started in a transaction that has not committed, or retention has dropped it.",
            )
        run_id, *values = rows[0]
        parent_run, parent_node, started_by = values[11:14]
        values[11:14] = _id(parent_run), parent_node, _id(started_by)
        values[14:] = map(decode_any, values[14:])  # input, result, error, meta
        return RunInfo(UUID(run_id), *values)

    def _decode(self, text: str | None) -> R_co:
        try:
            return cast(R_co, decode_any(text) if self._codec is None else self._codec.decode_result(text))
        except PayloadError as exc:
            if text != "null" or self._codec is None:
                raise
            raise PayloadError(
                f"run {self.id} has succeeded, and has no value: what its workflow returns was skipped, or is None; "
                f"annotate it to return {shown(self._codec.result_type)} | None, or return what is there in any case",
                path=exc.path,
            ) from exc

    def __repr__(self) -> str:
        return f"<Run {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)


def _node_info(row: Sequence[Any]) -> NodeInfo:
    (
        ix,
        name,
        task,
        status,
        held,
        job_id,
        epoch,
        attempt,
        ready_at,
        finished_at,
        blocked_by,
        waits_for,
        error,
        child,
        of,
    ) = row
    return NodeInfo(
        ix, name, task, status, held, UUID(job_id), epoch, attempt, ready_at, finished_at, blocked_by,
        tuple(waits_for or ()), decode_any(error), _id(child), of,
    )  # fmt: skip


def _id(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


class Starts(ABC, Generic[P, R]):
    """What workflows and bound workflows have in common."""

    __slots__ = ()

    @abstractmethod
    def _admission(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Admission: ...

    @property
    @abstractmethod
    def _app(self) -> TaskQ: ...

    @property
    @abstractmethod
    def _codec(self) -> TaskCodec: ...

    async def start(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Start a run with these arguments; give its handle.

        Raises:
            PayloadError: An argument is missing, unknown or cannot be stored; nothing was sent.
            PlanError: The workflow's wiring is wrong; every fault is named.
            PlanConflict: The run key was used for another plan or input.
            ConfigurationError: No database is named.
            DatabaseUnavailable: The database cannot be reached.
        """
        admission = self._admission(args, kwargs)
        run_id, created = await (await self._app._open_async()).start_run(admission)
        return Run(self._app, run_id, self._codec, created, admission.connection is not None)

    def start_sync(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]:
        """Like ``start``, for code without an event loop."""
        refuse_in_event_loop("start_sync")
        admission = self._admission(args, kwargs)
        run_id, created = self._app._sync.start_run(admission)
        return Run(self._app, run_id, self._codec, created, admission.connection is not None)

    def handle(self, run_id: UUID | str) -> Run[R]:
        """The handle of a run that was started before, elsewhere perhaps. Asks the database nothing.

        Raises:
            InvalidRequest: What was given is not the id of a run.
        """
        return Run(self._app, check_job_id(run_id, "run"), self._codec)


class BoundWorkflow(Starts[P, R]):
    """A workflow with options for its runs; made by ``workflow.using(...)``."""

    __slots__ = ("_connection", "_meta", "_of", "_run_key")

    def __init__(self, of: Starts[P, R], options: RunUsing) -> None:
        unknown = sorted(set(options) - set(RunUsing.__annotations__))
        if unknown:
            raise InvalidRequest(
                f"a run has no option {unknown[0]!r}; there are: {', '.join(sorted(RunUsing.__annotations__))}"
            )
        self._of = of
        self._run_key = check_run_key(options.get("run_key"))
        meta = options.get("meta")
        self._meta = None if meta is None else check_meta(meta)
        self._connection = options.get("connection")

    @property
    def _app(self) -> TaskQ:
        return self._of._app

    @property
    def _codec(self) -> TaskCodec:
        return self._of._codec

    def _admission(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Admission:
        return self._of._admission(args, kwargs).under(self._run_key, self._meta, self._connection)

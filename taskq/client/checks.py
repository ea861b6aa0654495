"""Checks of what callers hand to the application object: a mistake is named with its value and the cure.

Called by ``taskq.app``, ``taskq.tasks`` and the handles before anything is sent.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any
from uuid import UUID

from taskq.client.requests import JobRequest, check_text
from taskq.codec import encode_any
from taskq.errors import ConfigurationError, InvalidPolicy, InvalidRequest, PayloadError, TaskDefinitionError
from taskq.policy import PolicyLayer, check_name

if TYPE_CHECKING:
    from taskq.app import TaskQ

__all__ = [
    "check_database",
    "check_job_id",
    "check_layer",
    "check_pause",
    "check_queues",
    "check_requests",
    "check_resolution",
    "check_signal",
    "check_steering",
    "check_task_options",
    "check_work_budget",
]


def check_database(dsn: object, pool_size: object) -> tuple[str | None, int]:
    """Where an application's database is, if it says so, and how many connections it may open.

    Raises:
        ConfigurationError: The DSN is no text, or the size is no whole number from 1.
    """
    if dsn is not None and not isinstance(dsn, str):
        raise ConfigurationError(f"dsn is of type {type(dsn).__name__}; give its text, such as str(dsn)")
    if isinstance(pool_size, bool) or not isinstance(pool_size, int) or pool_size < 1:
        raise ConfigurationError(f"pool_size is {pool_size!r}; give a whole number from 1")
    return dsn, pool_size


MOST_BUDGET = 10_000_000
"""The largest work budget that is declared, or set."""
_NO_POLICY = ("name", "process", "reconcile", "reconcile_steps", "reconcile_retry")
"""Options of ``task()`` that are no part of the policy."""


def check_job_id(value: object, what: str = "job") -> UUID:
    """The id of a job, or of a run, of a UUID or of its text.

    Raises:
        InvalidRequest: It is neither.
    """
    if isinstance(value, UUID):
        return value
    try:
        if isinstance(value, str):
            return UUID(value)
    except ValueError:
        pass
    raise InvalidRequest(
        f"{_shown(value)} is not the id of a {what}; give a UUID or its text, such as {what}.id or "
        "'01999999-0000-7000-8000-000000000000'"
    )


def check_steering(job_id: object, reason: object, actor: object, what: str = "job") -> tuple[Any, ...]:
    """The arguments of cancel and retry, of a job or of a run.

    Raises:
        InvalidRequest: One is not valid.
    """
    said = (None if text is None else check_text(what, text) for what, text in (("reason", reason), ("actor", actor)))
    return str(check_job_id(job_id, what)), *said


def check_pause(run_id: object, reason: object, actor: object, code: object = "operator") -> tuple[Any, ...]:
    """The arguments of a pause; without the code those of resuming.

    Raises:
        InvalidRequest: One is not valid.
    """
    run, said, who = check_steering(run_id, reason, actor, "run")
    if said is None or not said.strip():
        raise InvalidRequest("a run is paused, and resumed, for a reason; say why, it goes on the record")
    try:
        return run, said, who, check_name("the code of a pause", code)
    except InvalidPolicy as exc:
        raise InvalidRequest(str(exc)) from None


def check_work_budget(run_id: object, budget: object, reason: object, actor: object) -> tuple[Any, ...]:
    """The arguments of setting a work budget.

    Raises:
        InvalidRequest: One is not valid.
    """
    run, said, who = check_steering(run_id, reason, actor, "run")
    if said is None or not said.strip():
        raise InvalidRequest("a work budget is set for a reason; say why, it goes on the record")
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= MOST_BUDGET:
        raise InvalidRequest(
            f"budget is {budget!r}; give how many bodies the run may begin in all, from 1 to {MOST_BUDGET:,}"
        )
    return run, budget, said, who


def check_grant(incident: object, reason: object, actor: object) -> tuple[Any, ...]:
    """The arguments of granting one more recovery.

    Raises:
        InvalidRequest: One is not valid.
    """
    wanted, said, who = check_steering(incident, reason, actor, "incident")
    if said is None or not said.strip():
        raise InvalidRequest("one more recovery is granted for a reason; say what was done, it goes on the record")
    return wanted, said, who


def check_signal(job_id: object, name: object, payload: object, key: object) -> tuple[str, str, str, str | None]:
    """The arguments of a signal.

    Raises:
        InvalidRequest: One is not valid.
        PayloadError: The payload cannot be stored.
    """
    try:
        named = check_name("the name of a signal", name)
    except InvalidPolicy as exc:
        raise InvalidRequest(str(exc)) from None
    if key is not None and not 1 <= len(check_text("key", key)) <= 512:
        raise InvalidRequest("the key of a signal has 1 to 512 characters, or is None")
    return str(check_job_id(job_id)), named, encode_any(payload, "payload"), None if key is None else str(key)


def check_resolution(
    job_id: object, happened: object, result: object, reason: object, actor: object, claim_epoch: object = None
) -> tuple[str, tuple[Any, ...]]:
    """The query that decides an outcome, of one attempt where its epoch is given, and its arguments.

    Raises:
        InvalidRequest: One is not valid.
        PayloadError: The result cannot be stored.
    """
    if not isinstance(happened, bool):
        raise InvalidRequest(f"happened is {_shown(happened)}; give True or False")
    job, *said = check_steering(job_id, reason, actor)
    if not happened and result is not None:
        raise InvalidRequest("a result is given, and the effect did not happen; give one with happened=True only")
    decided = (happened, encode_any(result, "result") if happened else None, *said)
    if claim_epoch is None:
        return "resolve", (job, *decided)
    if not isinstance(claim_epoch, int) or isinstance(claim_epoch, bool) or not 0 < claim_epoch < 2**63:
        raise InvalidRequest(f"claim_epoch is {_shown(claim_epoch)}; give the number of the attempt, or None")
    return "resolve_attempt", (job, claim_epoch, *decided)


def check_requests(app: TaskQ, requests: object) -> list[JobRequest[Any]]:
    """The requests as a list, each of a task of this application.

    Raises:
        InvalidRequest: One is no request, or belongs to another application.
        PayloadError: An iterator that makes them meets arguments that cannot be stored; the message says which job's.
    """
    if isinstance(requests, JobRequest) or not isinstance(requests, Iterable):
        raise InvalidRequest(f"enqueue_many takes a list of requests, not {_shown(requests)}; write [task.job(...)]")
    listed: list[Any] = []
    try:
        listed.extend(requests)
    except PayloadError as exc:
        raise PayloadError(f"item {len(listed)} of enqueue_many: {exc}", path=exc.path) from None
    for number, request in enumerate(listed):
        if not isinstance(request, JobRequest):
            name = getattr(request, "name", "task")
            raise InvalidRequest(
                f"item {number} of enqueue_many is {_shown(request)}, not a request; write {name}.job(...), with the "
                "arguments of the job"
            )
        if request.task._app is not app:
            raise InvalidRequest(
                f"item {number} of enqueue_many is a job of task {request.task.name!r}, which belongs to another "
                "TaskQ; enqueue it through the application that registered it"
            )
    return listed


def check_task_options(options: Mapping[str, Any]) -> PolicyLayer:
    """What a task's declaration says about the policy.

    Raises:
        TaskDefinitionError: There is no such option.
    """
    known = [f.name for f in fields(PolicyLayer)]
    for name in options:
        if name not in known:
            raise TaskDefinitionError(
                f"task() has no option {name!r}{did_you_mean(name, [*_NO_POLICY, *known])}; it knows "
                f"{', '.join([*_NO_POLICY, *known])}"
            )
    return PolicyLayer(**options)


def check_layer(what: str, layer: object) -> PolicyLayer:
    """A layer of the policy.

    Raises:
        InvalidPolicy: It is none.
    """
    if not isinstance(layer, PolicyLayer):
        raise InvalidPolicy(f"{what} is {_shown(layer)}; give a PolicyLayer, such as PolicyLayer(timeout='30s')")
    return layer


def check_queues(queues: object) -> dict[str, PolicyLayer]:
    """What queues say about the policy.

    Raises:
        InvalidPolicy: It is no mapping of names to layers.
    """
    if not isinstance(queues, Mapping):
        raise InvalidPolicy(
            f"queues is {_shown(queues)}; give a mapping such as {{'mail': PolicyLayer(timeout='30s')}}. It says only "
            "what a queue adds to the policy: queues need no declaration"
        )
    return {name: check_layer(f"queues[{name!r}]", layer) for name, layer in queues.items()}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint at the known name that is most like this one; empty if none is."""
    found = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # whatever a caller's own class does
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:79] + "…"

"""From effects as people declare them to what a policy promises: resolved against the tasks that they name.

Called by ``TaskQ.resolve_policy`` for each owner of effects. What an effect will run by is decided here, by the same
resolver as every other job, and then stands in the owner's policy.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from taskq.effects import MOST, PromisedEffect, Ref, TerminalEffect
from taskq.errors import InvalidPolicy, PayloadError, UnknownTask
from taskq.policy import ExecutionPolicy
from taskq.tasks import Task

if TYPE_CHECKING:
    from taskq.workflow.definition import Workflow

__all__ = ["lower", "policies_of"]


def lower(
    effects: tuple[TerminalEffect, ...], owner: Task[..., Any] | Workflow[..., Any], chain: tuple[str, ...] = ()
) -> tuple[PromisedEffect, ...]:
    """What a job of this task promises under these effects.

    Args:
        effects: What the nearest layer says.
        owner: The task whose jobs have them, or the workflow whose runs have.
        chain: The tasks whose effects led here.

    Raises:
        InvalidPolicy: An effect does not fit its task or its owner, two have one name, or they lead back to a task that
            they started from.
        UnknownTask: An effect names a task that is not registered (yet).
    """
    if isinstance(owner, Task):  # else it is a workflow, whose name no effect can lead back to
        chain = (*chain, owner.name)
    if len(effects) > MOST:
        raise InvalidPolicy(f"task {owner.name} has {len(effects)} effects, the limit is {MOST}; let one do several")
    names = [effect.name for effect in effects]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidPolicy(f"task {owner.name} has two effects named {twice[0]!r}; give one of them another name=")
    return tuple(sorted((_lower(effect, owner, chain) for effect in effects), key=lambda promise: promise.name))


def policies_of(policy: ExecutionPolicy) -> Iterator[tuple[str, ExecutionPolicy]]:
    """The policies that must be stored before this one can be used, and itself last; with their ids."""
    for effect in policy.effects:
        if effect.policy is not None:
            yield from policies_of(effect.policy)
    yield policy.id, policy


def _lower(
    effect: TerminalEffect, owner: Task[..., Any] | Workflow[..., Any], chain: tuple[str, ...]
) -> PromisedEffect:
    task = _task_of(effect, owner)
    if task.name in chain:
        path = " -> ".join((*chain[chain.index(task.name) :], task.name))
        raise InvalidPolicy(
            f"effects lead in a circle: {path}; a chain of effects must end. Take effect {effect.name} out, or give "
            "the last task effects=[]"
        )
    template = _template(effect, task, owner)
    policy = task.policy_within(chain)
    return PromisedEffect(
        name=effect.name,
        on=effect.on,
        task=task.name,
        queue=policy.queue,
        priority=policy.priority,
        max_attempts=policy.retry.max_attempts,
        effect_class=policy.effect_class,
        policy_id=policy.id,
        required_worker_schema=task.required_worker_schema,
        deadline=policy.deadline,
        payload=json.dumps(template, sort_keys=True),
        undoes=effect.undoes,
        policy=policy,
    )


def _task_of(effect: TerminalEffect, owner: Task[..., Any] | Workflow[..., Any]) -> Task[..., Any]:
    found = _named(effect, owner) if isinstance(effect.task, str) else effect.task
    if found._app is not owner._app:
        raise InvalidPolicy(
            f"effect {effect.name} of task {owner.name} is the task {found.name!r} of another TaskQ; an effect's "
            "task belongs to the same application"
        )
    if isinstance(found, Task):
        return found
    if not isinstance(owner, Task):
        _refuse_circle(found, owner)
    return found.start_task


def _named(effect: TerminalEffect, owner: Task[..., Any] | Workflow[..., Any]) -> Task[..., Any] | Workflow[..., Any]:
    name = str(effect.task)
    if isinstance(owner, Task) and name == owner.name:  # which may not be registered yet
        return owner
    if name not in owner._app.tasks and name in owner._app.workflows:
        return owner._app.workflows[name]
    try:
        return owner._app.get_task(name)
    except UnknownTask as exc:
        raise UnknownTask(f"effect {effect.name} of task {owner.name}: {exc}") from None


def _refuse_circle(found: Workflow[..., Any], owner: Workflow[..., Any]) -> None:
    """Refuse runs whose ends would start one another without end; what leads through nodes is bounded when it runs."""
    left, seen = [[owner.name, found.name]], {found.name}
    while left:
        path = left.pop()
        if path[-1] == owner.name:
            raise InvalidPolicy(
                f"effects of runs lead in a circle: {' -> '.join(path)}; a chain of effects must end. Start the next "
                "run from a task, which decides whether there is one"
            )
        for effect in owner._app.workflows[path[-1]].effects if path[-1] in owner._app.workflows else ():
            name = effect.task if isinstance(effect.task, str) else effect.task.name
            if not isinstance(effect.task, Task) and name not in seen:
                seen.add(name)
                left.append([*path, name])


def _template(
    effect: TerminalEffect, task: Task[..., Any], owner: Task[..., Any] | Workflow[..., Any]
) -> dict[str, Any]:
    where = f"effect {effect.name} of task {owner.name}"
    takes, open_ended = _parameters(task)
    for name in effect.payload:
        if name not in takes and not open_ended:
            known = ", ".join(takes) or "none"
            raise InvalidPolicy(f"{where}: {task.name} has no parameter {name!r}; it has: {known}")
    for name, parameter in takes.items():
        if parameter.default is parameter.empty and name not in effect.payload:
            raise InvalidPolicy(f"{where}: the payload lacks {name!r}, which {task.name} needs; give a value or a Ref")
    template: dict[str, Any] = {}
    for name, stored in effect.template:
        if isinstance(stored, Ref):
            template[name] = _reference(stored, owner, where)
            continue
        try:
            template[name] = {"value": json.loads(task.codec.encode_argument(name, effect.payload[name]))}
        except PayloadError as exc:
            raise InvalidPolicy(f"{where}: {exc}") from None
    return template


def _reference(ref: Ref, owner: Task[..., Any] | Workflow[..., Any], where: str) -> dict[str, Any]:
    if ref.kind != "arg":
        return {"of": ref.kind}
    takes, open_ended = _parameters(owner)
    parameter = takes.get(ref.name)
    if parameter is None and not open_ended:
        known = ", ".join(takes) or "none"
        raise InvalidPolicy(f"{where}: Ref.arg({ref.name!r}) is no parameter of {owner.name}; it has: {known}")
    if parameter is None or parameter.default is parameter.empty:
        return {"arg": ref.name}
    # Defaults are not written into payloads.
    try:
        return {"arg": ref.name, "default": json.loads(owner.codec.encode_argument(ref.name, parameter.default))}
    except PayloadError as exc:
        raise InvalidPolicy(f"{where}: the default of Ref.arg({ref.name!r}) cannot be stored: {exc}") from None


def _parameters(task: Task[..., Any] | Workflow[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """The parameters that arguments fill, and whether it takes others by name as well."""
    found = list(inspect.signature(task.fn).parameters.values())[task.takes_context :]
    named = {p.name: p for p in found if p.kind is not p.VAR_KEYWORD}
    return named, len(named) < len(found)

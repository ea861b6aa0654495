"""Declaring a reconcile hook: what fits its task, what does not, and what its hidden task looks like."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from taskq import (
    DidNotHappen,
    Happened,
    JobContext,
    PolicyLayer,
    Retry,
    StillUnknown,
    TaskDefinitionError,
    TaskQ,
    constant,
    exponential,
)
from taskq import ReconcileContext as Asked
from taskq.errors import InvalidDuration, InvalidPolicy
from taskq.reconcile_hooks import _Hook

if TYPE_CHECKING:
    from taskq import ReconcileContext

Hook = Callable[..., Any]


async def charge(ctx: JobContext, order: int, cents: int = 100, *, note: str | None = None) -> str:
    return f"{order} {cents}"


def declare(hook: object, fn: Callable[..., Any] = charge, **options: Any) -> TaskQ:
    app = TaskQ()
    app.task(name="charge", reconcile=hook, **options)(fn)
    return app


# What fits ------------------------------------------------------------------------------------------------------------


async def same(order: int, cents: int, note: str | None) -> Happened[str] | DidNotHappen:
    return DidNotHappen()


def told(ctx: ReconcileContext, order: int, cents: int = 5, *, note: str | None = None) -> StillUnknown:
    return StillUnknown()


def loose(order, cents, note, verbose=False):  # type: ignore[no-untyped-def]
    return DidNotHappen()


def anything(order: object, cents: Any, note: str | None) -> DidNotHappen:
    return DidNotHappen()


def rest(order: int, **more: Any) -> DidNotHappen:
    return DidNotHappen()


@pytest.mark.parametrize("hook", [same, told, loose, anything, rest, lambda order, cents, note: DidNotHappen()])
def test_a_hook_takes_the_parameters_of_its_task(hook: Hook) -> None:
    app = declare(hook)
    assert sorted(app.tasks) == ["charge", "charge:reconcile"]
    hidden = app.tasks["charge"].reconcile_task
    assert hidden is app.tasks["charge:reconcile"]
    assert hidden.reconcile_task is None
    assert hidden.is_async is (hook is same)


def test_a_hook_is_published_before_its_task() -> None:
    assert list(declare(same).tasks) == ["charge:reconcile", "charge"]


def test_a_hidden_task_is_pure_and_takes_nothing_of_the_policy_that_could_keep_it_from_asking() -> None:
    layer = PolicyLayer(deadline="1h", retry=Retry(1), priority=2, effect_class="idempotent")
    app = TaskQ(defaults=layer, queues={"pay": PolicyLayer(max_retry_afters=7, timeout="3s")})
    app.task(name="charge", queue="pay", reconcile=same)(charge)
    policy = app.tasks["charge:reconcile"].policy
    assert (policy.queue, policy.priority, policy.effect_class, policy.deadline) == ("pay", 9, "pure", None)
    assert (policy.timeout, policy.max_retry_afters) == (3.0, 7)
    assert policy.retry == Retry(20, exponential("5s", cap="1h"))
    assert app.tasks["charge:reconcile"].required_worker_schema is None


def test_its_retry_can_be_chosen() -> None:
    retry = Retry(3, constant("1s"))
    assert declare(same, reconcile_retry=retry).tasks["charge:reconcile"].policy.retry == retry
    with pytest.raises(InvalidPolicy, match="reconcile_retry is 3"):
        declare(same, reconcile_retry=3)
    with pytest.raises(TaskDefinitionError, match="give reconcile= as well"):
        TaskQ().task(reconcile_retry=retry)


def test_a_type_checker_is_told_of_every_option_with_a_hook_and_without() -> None:
    with_options = [set(inspect.signature(o).parameters) for o in typing.get_overloads(TaskQ.task)][-2:]
    assert with_options[0] == with_options[1]
    assert "reconcile" in with_options[0]


# What does not --------------------------------------------------------------------------------------------------------


def lacks(order: int, cents: int) -> DidNotHappen: ...  # type: ignore[empty-body]
def wants(order: int, cents: int, note: str | None, account: str) -> DidNotHappen: ...  # type: ignore[empty-body]
def differs(order: str, cents: int, note: str | None) -> DidNotHappen: ...  # type: ignore[empty-body]
def of_the_body(ctx: JobContext, order: int, cents: int, note: str | None) -> DidNotHappen: ...  # type: ignore[empty-body]
def late(order: int, ctx: Asked, cents: int, note: str | None) -> DidNotHappen: ...  # type: ignore[empty-body]
def placed(order: int, /, cents: int, note: str | None) -> DidNotHappen: ...  # type: ignore[empty-body]
def many(*order: int, cents: int, note: str | None) -> DidNotHappen: ...  # type: ignore[empty-body]
def yields(order: int, cents: int, note: str | None) -> Any:
    yield


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (
            lacks,
            r"its hook lacks does not take note; a hook takes the same parameters as its task \(order, cents, note\)",
        ),
        (wants, "its hook wants takes account, which the task does not"),
        (differs, "its hook differs takes order as str, and the task as int"),
        (of_the_body, "takes ctx: JobContext, which is the body's"),
        (late, "takes its context ctx elsewhere than first"),
        (placed, "takes order by position, and it is called by name"),
        (many, r"takes \*order by position"),
        (yields, "its hook is a generator"),
        (7, "reconcile is 7, which is no plain function"),
        (print, "which is no plain function"),
    ],
)
def test_a_hook_that_does_not_fit_is_refused_where_it_is_declared(hook: object, said: str) -> None:
    with pytest.raises(TaskDefinitionError, match=f"^task charge: .*{said}"):
        declare(hook)


def test_a_task_of_open_parameters_wants_a_hook_of_such() -> None:
    def opened(order: int, **more: str) -> None: ...

    with pytest.raises(TaskDefinitionError, match=r"does not take \*\*more"):
        declare(lambda order: DidNotHappen(), opened)
    assert declare(rest, opened).tasks["charge"].reconcile_task


def test_a_refused_hook_leaves_no_task_behind() -> None:
    app = TaskQ()
    with pytest.raises(TaskDefinitionError):
        app.task(reconcile=lacks)(charge)
    assert dict(app.tasks) == {}


def test_names_of_hooks_are_theirs_and_must_fit() -> None:
    with pytest.raises(TaskDefinitionError, match="names that end in :reconcile are those of hooks"):
        TaskQ().task(name="mine:reconcile")(charge)
    app = TaskQ()
    app.task(name="x" * 118, reconcile=same)(charge)
    with pytest.raises(TaskDefinitionError, match="at most 118 characters"):
        TaskQ().task(name="x" * 119, reconcile=same)(charge)


def test_answers_are_values() -> None:
    assert Happened(1) == Happened(1)
    assert StillUnknown().retry_in == "30s"
    with pytest.raises(FrozenInstanceError):
        Happened(1).result = 2  # type: ignore[misc]
    with pytest.raises(InvalidDuration):
        StillUnknown("soon")


# What it is told ------------------------------------------------------------------------------------------------------


def test_a_hook_sees_what_the_body_saw() -> None:
    since = datetime.now(UTC)
    for hook, fn in ((told, charge), (rest, charge)):
        task = declare(hook, fn).tasks["charge"]
        made = _Hook(
            task._app,
            task,
            hook,
            hook is told,
            inspect.signature(lambda order, cents=100, *, note=None: 0),
        )
        row = ('{"order": 7}', 2, 1, 1, since, "told")
        asked = made.question([row], UUID(int=5), 3)
        assert asked is not None
        about, args, kwargs = asked
        assert kwargs == {"order": 7, "cents": 100, "note": None}
        assert args == ((about,) if hook is told else ())
        assert (about.job_id, about.claim_epoch, about.attempt, about.generation) == (UUID(int=5), 3, 3, 1)
        assert (about.since, about.reason, about.task) == (since, "told", "charge")
        assert about.idempotency_key == f"{UUID(int=5)}:g1"
        assert made.question([], UUID(int=5), 3) is None

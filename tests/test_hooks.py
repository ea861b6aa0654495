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
from taskq.reconcile import Answer
from taskq.reconcile_hooks import _happened, _Hook, asked_by, is_hook

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
        row = ('{"order": 7}', 2, 1, 1, since, "told", None)
        asked = made.question([row], UUID(int=5), 3)
        assert asked is not None
        about, args, kwargs = asked
        assert kwargs == {"order": 7, "cents": 100, "note": None}
        assert args == ((about,) if hook is told else ())
        assert (about.job_id, about.claim_epoch, about.attempt, about.generation) == (UUID(int=5), 3, 3, 1)
        assert (about.since, about.reason, about.task) == (since, "told", "charge")
        assert (about.step, about.occurrence, about.idempotency_key) == (None, None, f"{UUID(int=5)}:g1")
        assert made.question([], UUID(int=5), 3) is None


# Of steps -------------------------------------------------------------------------------------------------------------


def of_steps(hooks: object, fn: Callable[..., Any] = charge, **options: Any) -> TaskQ:
    app = TaskQ()
    app.task(name="charge", reconcile_steps=hooks, **options)(fn)
    return app


def test_each_step_has_a_hidden_task_of_its_own_beside_that_of_the_body() -> None:
    retry = Retry(3, constant("1s"))
    app = of_steps({"pay": told, "mail:7": same}, reconcile=loose, reconcile_retry=retry)
    assert list(app.tasks) == ["charge:reconcile", "charge:reconcile:pay", "charge:reconcile:mail:7", "charge"]
    task = app.tasks["charge"]
    assert {step: hook.name for step, hook in task.reconcile_steps.items()} == {
        "pay": "charge:reconcile:pay",
        "mail:7": "charge:reconcile:mail:7",
    }
    pay, mail = task.reconcile_steps.values()
    assert (pay.is_async, mail.is_async) == (False, True)
    assert (pay.policy.effect_class, pay.policy.priority, pay.policy.retry) == ("pure", 9, retry)
    assert list(of_steps({}).tasks) == ["charge"]
    with pytest.raises(TaskDefinitionError, match="give reconcile= as well, or reconcile_steps="):
        of_steps({}, reconcile_retry=retry)


def plain(order: int) -> None: ...


def odd(ctx: Asked, **_: Any) -> Happened[Callable[[], int]] | DidNotHappen: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("hooks", "fn", "options", "said"),
    [
        ([same], charge, {}, "reconcile_steps is .*; give the hooks by the name of their step"),
        ({"pay": 7}, charge, {}, r"reconcile_steps\['pay'\] is 7, which is no plain function"),
        ({"pay": yields}, charge, {}, "its hook of step pay is a generator"),
        ({"pay": lacks}, charge, {}, "its hook lacks of step pay does not take note"),
        ({"pay": odd}, charge, {}, "what its hook of step pay finds is annotated"),
        ({"a b": same}, charge, {}, "a step of reconcile_steps is 'a b'"),
        ({"pay#2": same}, charge, {}, "'#' and a beginning like"),
        ({7: same}, charge, {}, "a step of reconcile_steps is 7"),
        ({"p" * 112: same}, charge, {}, "its name and that of step p+ have together at most 117 characters"),
        ({"pay": same}, plain, {}, "it takes no ctx: JobContext"),
        ({"pay": same}, charge, {"process": True}, r"it runs in a child process \(process=True\)"),
        ({"pay": same}, charge, {"effect_class": "side_effecting"}, "it is side_effecting.*reconcile="),
    ],
)
def test_a_hook_of_a_step_that_cannot_be_asked_is_refused_where_it_is_declared(
    hooks: object, fn: Callable[..., Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(TaskDefinitionError, match=f"^task charge: .*{said}"):
        of_steps(hooks, fn, **options)


def test_names_with_a_hook_of_a_step_in_them_are_theirs_and_tell_what_they_ask_about() -> None:
    with pytest.raises(TaskDefinitionError, match="and so are those with :reconcile: in them"):
        TaskQ().task(name="mine:reconcile:pay")(charge)
    asked = {"a": None, "a:reconcile": ("a", None), "a:reconcile:b:reconcile:c": ("a", "b:reconcile:c")}
    assert {name: asked_by(name) if is_hook(name) else None for name in asked} == asked


def test_a_hook_of_a_step_is_told_the_key_that_its_function_had() -> None:
    about = Asked(
        job_id=UUID(int=5),
        task="charge",
        claim_epoch=1,
        attempt=1,
        generation=1,
        key_generation=None,
        since=datetime.now(UTC),
        reason="told",
        step="pay",
        occurrence=2,
    )
    assert about.idempotency_key == f"{UUID(int=5)}:pay#2"


@pytest.mark.parametrize(
    ("declared", "gives"),
    [
        (Happened[int], int),
        (Answer[int], int),
        (Happened[int] | Happened[str] | StillUnknown, int | str),
        (DidNotHappen | StillUnknown, Any),
        (Happened, Any),
        (Answer, Any),
        (Any, Any),
    ],
)
def test_what_a_hook_declares_to_have_happened_is_known(declared: Any, gives: Any) -> None:
    assert _happened(declared) == gives

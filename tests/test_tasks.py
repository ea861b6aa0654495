"""Registering tasks, calling them plainly, and options of jobs; nothing here needs a database."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from taskq import JobContext, PolicyLayer, Retry, TaskQ, constant
from taskq.client.requests import build_batch
from taskq.errors import (
    ConfigurationError,
    InvalidPolicy,
    InvalidRequest,
    JobCancelled,
    PayloadError,
    TaskDefinitionError,
    UnknownTask,
)


@pytest.fixture
def app() -> TaskQ:
    return TaskQ("postgresql:///nowhere")


def test_a_task_is_named_after_its_function_and_called_plainly(app: TaskQ) -> None:
    @app.task
    async def double(n: int) -> int:
        """Twice n."""
        return 2 * n

    @app.task(name="shop.greet")
    def greet(ctx: JobContext, name: str) -> str:
        assert isinstance(ctx, JobContext)
        return f"{name} {ctx.attempt} {ctx.task}"

    assert dict(app.tasks) == {"double": double, "shop.greet": greet}
    assert asyncio.run(double(4)) == 8
    assert greet("Ada") == "Ada 1 shop.greet"
    assert (double.is_async, double.takes_context, double.__doc__) == (True, False, "Twice n.")
    assert (greet.is_async, greet.takes_context) == (False, True)
    assert greet.job("Ada").payload == '{"name":"Ada"}'
    assert app.get_task("double") is double
    with pytest.raises(UnknownTask, match="double, shop.greet"):
        app.get_task("treble")


def test_annotations_may_name_what_is_local(app: TaskQ) -> None:
    @dataclass
    class Local:
        n: int

    @app.task
    def task(x: Local) -> None: ...

    assert task.codec.decode(task.job(Local(1)).payload) == {"x": Local(1)}


def test_what_cannot_be_a_task_is_refused(app: TaskQ) -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def async_generator() -> AsyncIterator[int]:
        yield 1

    def star(*args: int) -> None: ...

    class Thing:
        def method(self) -> None: ...
        def __call__(self) -> None: ...

    @app.task
    def good() -> None: ...

    cases: list[tuple[Any, str]] = [
        (lambda: None, "lambda"),
        (generator, "generator"),
        (async_generator, "generator"),
        (star, r"\*args"),
        (Thing().method, "not a plain function"),
        (Thing(), "not a plain function"),
        (print, "not a plain function"),
        (good, "already"),
    ]
    for fn, said in cases:
        with pytest.raises(TaskDefinitionError, match=said):
            app.task(fn)
    with pytest.raises(TaskDefinitionError, match="two tasks are named 'good'"):
        app.task(name="good")(generator_free)
    with pytest.raises(InvalidPolicy, match="name of a task"):
        app.task(name="a b")(generator_free)
    with pytest.raises(InvalidPolicy, match="names no errors"):
        app.task(effect_class="side_effecting", max_attempts=2)(generator_free)
    assert list(app.tasks) == ["good"]


def generator_free() -> None: ...


def test_layers_of_app_queue_task_and_call() -> None:
    app = TaskQ(
        "postgresql:///nowhere",
        queue="general",
        defaults=PolicyLayer(timeout="1h", priority=2),
        queues={"mail": PolicyLayer(timeout="1m", priority=3)},
    )

    @app.task(retry=Retry(2, constant(1)))
    def plain() -> None: ...

    @app.task(queue="mail", priority=4)
    def mail() -> None: ...

    def seen(request: Any) -> tuple[Any, ...]:
        p = request.spec.policy
        return p.queue, p.timeout, p.priority, p.retry.max_attempts

    assert seen(plain.job()) == ("general", 3600, 2, 2)
    assert seen(mail.job()) == ("mail", 60, 4, 3)
    assert seen(plain.using(queue="mail", max_attempts=9).job()) == ("mail", 60, 3, 9)
    assert seen(mail.using(queue="other", timeout=None).job()) == ("other", None, 4, 3)
    assert seen(mail.using(priority=0).using(timeout=5).job()) == ("mail", 5, 0, 3)


def test_equal_specs_are_sent_once(app: TaskQ) -> None:
    @app.task
    def task(n: int) -> None: ...

    requests = [task.job(n) for n in range(3)]
    requests += [task.using(unique_key=f"k{n}").job(n) for n in range(3)]
    requests += [task.using(run_in=5, tags=["a"]).job(n) for n in range(3)]
    batch = build_batch(requests)
    assert batch.spec == [1, 1, 1, 1, 1, 1, 2, 2, 2]
    assert batch.unique_key == [None, None, None, "k0", "k1", "k2", None, None, None]
    assert batch.idempotency_key is None
    assert len(batch.policies) == 1
    # A call's own deadline is stamped on the row; it makes no policy of its own.
    late = task.using(deadline="90s").job(1)
    assert late.spec.policy_id == task.policy.id
    assert '"deadline_in": 90.0' in late.spec.text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run_in": 1, "run_at": datetime(2030, 1, 1)}, "both"),
        ({"run_at": datetime(2030, 1, 1)}, "time zone"),
        ({"deadline": datetime(2030, 1, 1)}, "time zone"),
        ({"run_at": "tomorrow"}, "run_at"),
        ({"run_at": datetime(1969, 12, 31, tzinfo=UTC)}, "run_at is .* from 1970"),
        ({"run_at": datetime.min.replace(tzinfo=UTC)}, "run_at is .* from 1970"),
        ({"deadline": datetime(9000, 1, 1, tzinfo=UTC)}, "deadline is .* to 8999"),
        ({"deadline": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))}, "deadline is .* to 8999"),
        ({"run_in": 1e18}, "100 years"),
        ({"deadline": 1e18}, "100 years"),
        ({"run_in": "soon"}, "soon"),
        ({"unique_scope": "s"}, "unique_key"),
        ({"unique_hold": 1}, "unique_key"),
        ({"idempotency_scope": "s"}, "idempotency_key"),
        ({"unique_key": ""}, "unique_key"),
        ({"unique_key": "x" * 513}, "512"),
        ({"unique_key": "a\0"}, "NUL"),
        ({"idempotency_key": 3}, "idempotency_key"),
        ({"unique_key": "k", "unique_scope": "a b"}, "unique_scope"),
        ({"on_conflict": "replace"}, "on_conflict"),
        ({"tags": "urgent"}, "tags"),
        ({"tags": [1]}, "tags"),
        ({"meta": {"a": float("nan")}}, "meta.a"),
        ({"meta": {"a": "x" * 70_000}}, "65536"),
        ({"priority": 10}, "priority"),
        ({"queue": "ü"}, "queue"),
        ({"colour": "red"}, "colour"),
        ({"effect_class": "pure"}, "effect_class"),
    ],
)
def test_options_are_checked_and_named(app: TaskQ, options: dict[str, Any], said: str) -> None:
    @app.task
    def task() -> None: ...

    with pytest.raises((InvalidRequest, InvalidPolicy, PayloadError), match=said):
        task.using(**options)


def test_an_unknown_option_and_a_wrong_default_are_named(app: TaskQ) -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: app.task(quue="x"),
            TaskDefinitionError,
            r"'quue' \(did you mean 'queue'\?\); it knows name, process, reconcile, reconcile_steps, reconcile_retry, "
            "queue",
        ),  # type: ignore[call-overload]
        (lambda: TaskQ(defaults={"timeout": 3}), InvalidPolicy, r"defaults is \{'timeout': 3\}; give a PolicyLayer"),  # type: ignore[arg-type]
        (lambda: TaskQ(queues=["a"]), InvalidPolicy, r"queues is \['a'\]; give a mapping"),  # type: ignore[arg-type]
        (lambda: TaskQ(queues={"a": 3}), InvalidPolicy, r"queues\['a'\] is 3; give a PolicyLayer"),  # type: ignore[dict-item]
    ]
    for call, kind, said in wrong:
        with pytest.raises(kind, match=said):
            call()


def test_requests_of_one_call_must_fit_together(app: TaskQ) -> None:
    @app.task
    def task() -> None: ...

    with pytest.raises(InvalidRequest, match="connections"):
        build_batch([task.using(connection=object()).job(), task.using(connection=object()).job()])
    with pytest.raises(InvalidRequest, match="on_conflict"):
        build_batch([task.using(unique_key="a", on_conflict=c).job() for c in ("raise", "existing")])
    assert build_batch([task.using(unique_key="a").job()], on_conflict="raise").on_conflict == "raise"


def test_without_a_database_the_first_use_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TASKQ_DSN", raising=False)
    monkeypatch.chdir(tmp_path)
    app = TaskQ()
    task = app.task(generator_free)
    with pytest.raises(ConfigurationError, match=r"TASKQ_DSN.*taskq dev"):
        task.enqueue_sync()
    with pytest.raises(ConfigurationError, match="TASKQ_DSN"):
        asyncio.run(task.enqueue())
    with pytest.raises(ConfigurationError, match="schema"):
        TaskQ(schema="My Schema")


def test_a_context_of_a_plain_call() -> None:
    ctx = JobContext.local("t")
    assert ctx.idempotency_key == ctx.idempotency_key == str(ctx.job_id)
    assert ctx.meta == {}
    ctx.raise_if_cancelled()
    ctx.cancel_requested = True
    with pytest.raises(JobCancelled, match=str(ctx.job_id)):
        ctx.raise_if_cancelled()
    ctx.logger.debug("seen")


def test_names_of_hidden_tasks_of_bodies_are_taken() -> None:
    app = TaskQ()

    @app.task
    async def part(n: int) -> int:
        return n

    def flow(n: int) -> int:
        return part.step(n)

    for declare in (app.task(name="taskq:collect"), app.workflow(name="taskq")):
        with pytest.raises(TaskDefinitionError, match="hidden task of maps and emits in durable bodies"):
            declare(flow)
    assert list(app.tasks) == ["part"]
    assert dict(app.workflows) == {}


CORPUS = Path(__file__).parent / "typing"


def test_types_are_those_of_the_function() -> None:
    """mypy --strict finds every line that is marked wrong in the corpus, and no other."""
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--hide-error-context",
            str(CORPUS),
        ],
        capture_output=True,
        text=True,
        cwd=CORPUS.parents[1],
        timeout=300,
        check=False,
    )
    found: dict[tuple[str, int], str] = {}
    for line in ran.stdout.splitlines():
        if ": error: " in line:
            place, _, said = line.partition(": error: ")
            page, number = place.split(":")[:2]
            at = (Path(page).name, int(number))
            found[at] = found.get(at, "") + said
    expected = {
        (page.name, n): line.partition("# E: ")[2]
        for page in CORPUS.glob("*.py")
        for n, line in enumerate(page.read_text().splitlines(), 1)
        if "# E: " in line
    }
    assert len(expected) > 80
    assert found.keys() == expected.keys(), ran.stdout + ran.stderr
    for at, code in expected.items():
        assert f"[{code}]" in found[at], found[at]
    assert (Path(sys.modules["taskq"].__file__ or "").parent / "py.typed").is_file()


def test_an_unknown_option_is_answered_with_all_that_there_are() -> None:
    app = TaskQ("postgresql://nobody@127.0.0.1:1/x")

    def body() -> None: ...

    with pytest.raises(TaskDefinitionError, match="it knows name, process, reconcile"):
        app.task(retries=5)(body)  # type: ignore[call-overload]
    with pytest.raises(TaskDefinitionError, match="did you mean 'process'"):
        app.task(proces=True)(body)  # type: ignore[call-overload]

"""Right and wrong calls for a type checker; a line that must be an error is marked with its code. Never run."""

from __future__ import annotations

from typing import assert_type

from taskq import (
    DidNotHappen,
    Happened,
    Job,
    JobContext,
    JobRequest,
    ReconcileContext,
    Retry,
    StillUnknown,
    TaskQ,
    exponential,
)

app = TaskQ()


@app.task(queue="mail", retry=Retry(max_attempts=5, backoff=exponential("1s", cap="1h")), timeout="30s")
async def send(a: int, b: str) -> float:
    return a * 1.0


@app.task
def plain(a: int, b: str = "x", *, loud: bool = False) -> list[int]:
    return [a]


@app.task
async def with_context(ctx: JobContext, a: int) -> str:
    return str(a)


@app.task(priority=3)
def sync_with_context(ctx: JobContext, a: int) -> None:
    return None


@app.task
async def nothing() -> None: ...


@app.task(priority="high")  # E: call-overload
async def wrong_option() -> None: ...


@app.task(colour="red")  # E: call-overload
async def unknown_option() -> None: ...


async def enqueue() -> None:
    job = await send.enqueue(1, "b")
    assert_type(job, Job[float])
    assert_type(await job.result(timeout="30s"), float)
    assert_type(await send.enqueue(a=1, b="b"), Job[float])
    await send.enqueue(1)  # E: call-arg
    await send.enqueue(1, bb="b")  # E: call-arg
    await send.enqueue("1", "b")  # E: arg-type
    await send.enqueue(1, "b", 2)  # E: call-arg
    await send.enqueue(b="b", a=None)  # E: arg-type
    await send.enqueue(1, b=2)  # E: arg-type
    whole: int = await job.result()  # E: assignment
    print(whole)
    text: str = await job.result()  # E: assignment
    print(text)


async def enqueue_with_context() -> None:
    assert_type(await (await with_context.enqueue(1)).result(), str)
    await with_context.enqueue()  # E: call-arg
    await with_context.enqueue("x")  # E: arg-type
    assert_type(await with_context(1), str)
    await with_context("x")  # E: arg-type
    await nothing.enqueue()
    await nothing.enqueue(1)  # E: call-arg


def enqueue_sync() -> None:
    job = plain.enqueue_sync(1, loud=True)
    assert_type(job, Job[list[int]])
    assert_type(job.result_sync(), list[int])
    plain.enqueue_sync(1, loud=1)  # E: arg-type
    plain.enqueue_sync(1, "x", True)  # E: call-arg
    sync_with_context.enqueue_sync(1)
    sync_with_context.enqueue_sync(a="1")  # E: arg-type
    assert_type(plain(1), list[int])
    plain("1")  # E: arg-type


async def options() -> None:
    bound = send.using(run_in="10m", unique_key="k", priority=3, tags=["a"], meta={"a": 1})
    assert_type(await bound.enqueue(1, "b"), Job[float])
    await bound.enqueue(1)  # E: call-arg
    assert_type(await bound.using(timeout=None).enqueue(1, "b"), Job[float])
    send.using(priority="high")  # E: arg-type
    send.using(colour="red")  # E: call-arg
    send.using(on_conflict="replace")  # E: arg-type


async def many() -> None:
    request = send.job(1, "b")
    assert_type(request, JobRequest[float])
    send.job(1)  # E: call-arg
    assert_type(await app.enqueue_many(send.job(n, "b") for n in range(3)), list[Job[float]])
    assert_type(app.enqueue_many_sync([request]), list[Job[float]])
    await app.enqueue_many([1])  # E: arg-type
    mixed: list[Job[object]] = await app.enqueue_many([send.job(1, "b"), plain.job(1), nothing.job()])
    await mixed[0].result()
    anything: Job[object] = await send.enqueue(1, "b")
    await anything.status()


# Reconcile hooks: what they say had happened is what the task returns.


def look_up(ctx: ReconcileContext, a: int) -> Happened[int] | DidNotHappen | StillUnknown:
    return Happened(a)


async def look_up_soon(a: int) -> Happened[int] | StillUnknown:
    return StillUnknown("1m")


def never_says(a: int) -> DidNotHappen | StillUnknown:
    return DidNotHappen()


@app.task(effect_class="side_effecting", reconcile=look_up)
async def hooked(ctx: JobContext, a: int) -> int:
    return a


@app.task(reconcile=look_up_soon, reconcile_retry=Retry(3))
def hooked_plain(a: int) -> int:
    return a


@app.task(reconcile=never_says, priority=3)
async def hooked_by_less(a: int) -> str:
    return str(a)


@app.task(reconcile=look_up)  # E: arg-type
async def hooked_wrongly(ctx: JobContext, a: int) -> str:
    return str(a)


@app.task(reconcile=look_up, reconcile_steps={"pay": look_up, "mail": never_says, "book": look_up_soon})
async def hooked_by_steps(ctx: JobContext, a: int) -> int:
    return a


@app.task(reconcile_steps={"pay": len})  # E: dict-item
async def hooked_by_no_answer(ctx: JobContext, a: int) -> int:
    return a


async def enqueue_hooked() -> None:
    assert_type(await hooked_by_steps.enqueue(1), Job[int])
    assert_type(await hooked.enqueue(1), Job[int])
    assert_type(await hooked_plain.enqueue(1), Job[int])
    assert_type(await hooked_by_less.enqueue(1), Job[str])

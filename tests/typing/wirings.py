"""Right and wrong wirings for a type checker; a line that must be an error is marked with its code. Never run."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, assert_type

import msgspec

from taskq import (
    JobContext,
    Outcome,
    Ref,
    Run,
    TaskQ,
    TerminalEffect,
    branch,
    collect,
    gather,
    or_skip,
    then,
)

app = TaskQ()


@dataclass
class Paid:
    receipt: str
    cents: int
    fee: int | None = None


class Parcel(msgspec.Struct):
    code: str
    weights: list[float]


class Way(enum.Enum):
    AIR = "air"
    SEA = "sea"


@app.task
async def reserve(order: int) -> str:
    return str(order)


@app.task(effect_class="side_effecting")
async def charge(ctx: JobContext, order: int, hold: str) -> Paid:
    return Paid(hold, order)


@app.task
def pack(order: int, *, gift: bool = False) -> Parcel:
    return Parcel(str(order), [])


@app.task
def way_of(order: int) -> Way:
    return Way.AIR


@app.task
def kind_of(order: int) -> Literal["big", "small"]:
    return "big"


@app.task
def is_paid(order: int) -> bool:
    return True


@app.task
def notify(order: int, text: str) -> None:
    return None


@app.task
def double(n: int) -> int:
    return 2 * n


@app.task
def total(ns: list[int]) -> int:
    return sum(ns)


@app.task
def both(pair: tuple[int, str]) -> str:
    return pair[1]


@app.task
def report(ends: list[Outcome[int]]) -> str:
    return str(ends)


@app.task
def after_all(end: Outcome[str]) -> str:
    return end.node


@app.workflow
def right(order: int, cents: int) -> str:
    hold = reserve.step(order)
    assert_type(hold, str)
    paid = charge.step(cents, hold)
    assert_type(paid, Paid)
    assert_type(paid.receipt, str)
    notify.step(order, paid.receipt)
    return hold


@app.workflow(name="other", on_failure="finish", receipts=50)
def other(n: int, text: str = "x") -> int:
    return double.step(n)


@app.workflow(effects=[TerminalEffect(other, payload={"n": 1}), TerminalEffect("other", payload={"n": 1})])
def with_children(order: int) -> str:
    n = other.child(order)
    assert_type(n, int)
    assert_type(other.node("kid", after=[n]).child(order, text="y"), int)
    other.child()  # E: call-arg
    other.child("x")  # E: arg-type
    other.child(order, 1)  # E: arg-type
    other.node("kid").child(order, txt="y")  # E: call-arg
    other.node("kid").child(reserve.step(order))  # E: arg-type
    notify.step(order, other.child(order))  # E: arg-type
    return other.child(order)  # E: return-value


# Arguments of steps.


@app.workflow
def wrong_arguments(order: int, note: str) -> str:
    hold = reserve.step(order)
    reserve.step()  # E: call-arg
    reserve.step(order, order)  # E: call-arg
    reserve.step(note)  # E: arg-type
    reserve.step(hold)  # E: arg-type
    reserve.step(ordr=order)  # E: call-arg
    charge.step(order)  # E: call-arg
    charge.step(hold, hold)  # E: arg-type
    charge.step(order, None)  # E: arg-type
    pack.step(order, True)  # E: call-arg
    pack.step(order, gift="yes")  # E: arg-type
    notify.step(order, pack.step(order))  # E: arg-type
    notify.step(order, way_of.step(order))  # E: arg-type
    double.step(reserve)  # E: arg-type
    double.step(1.5)  # E: arg-type
    return hold


# Parts of results.


@app.workflow
def wrong_parts(order: int) -> str:
    paid = charge.step(order, "hold")
    parcel = pack.step(order)
    assert_type(parcel.weights[0], float)
    notify.step(order, paid.cents)  # E: arg-type
    notify.step(order, paid.reciept)  # E: attr-defined
    double.step(paid.fee)  # E: arg-type
    double.step(paid["cents"])  # E: index
    double.step(parcel.weights[0])  # E: arg-type
    notify.step(order, parcel.weights["first"])  # E: call-overload
    notify.step(order, parcel.code.size)  # E: attr-defined
    return paid.receipt


# What a workflow returns.


@app.workflow
def wrong_result(order: int) -> int:
    return reserve.step(order)  # E: return-value


@app.workflow
def wrong_part_as_result(order: int) -> str:
    return charge.step(order, "x").cents  # E: return-value


@app.workflow
def wrong_lack_of_result(order: int) -> str:
    return notify.step(order, "x")  # E: return-value


# Options of nodes.


@app.workflow
def options(order: int) -> str:
    hold = reserve.node("hold", priority=7).step(order)
    assert_type(hold, str)
    undo = TerminalEffect(notify, payload={"order": Ref.arg("order")})
    paid = charge.node("deposit", after=[hold], compensate=undo, timeout="5s").step(order, hold)
    charge.node("late").step(order)  # E: call-arg
    charge.node("late", after=[hold]).step(hold, hold)  # E: arg-type
    charge.node(5)  # E: arg-type
    charge.node(priority="high")  # E: arg-type
    charge.node(colour="red")  # E: call-arg
    charge.node(after=5)  # E: arg-type
    charge.node(compensate=notify)  # E: arg-type
    return paid.receipt


# Fan-in.


@app.workflow
def fan_in(n: int) -> int:
    one, two = double.step(n), double.step(n)
    text = reserve.step(n)
    pair = gather(one, text)
    assert_type(pair, tuple[int, str])
    both.step(pair)
    both.step(gather(text, one))  # E: arg-type
    both.step(gather(one, two))  # E: arg-type
    assert_type(gather([one, two]), list[int])
    total.step(gather([one, two]))
    total.step([one, text])  # E: list-item
    total.step(gather(one, two))  # E: arg-type
    total.step(one)  # E: arg-type
    assert_type(gather(one, text, n), tuple[int, str, int])
    assert_type(gather(one, text, n, two), tuple[int, str, int, int])
    assert_type(gather(one, two, one, two, one, two), tuple[int, ...])
    gather()  # E: call-overload
    gather(one, two)[2]  # E: misc
    return total.step([one, two])


# What became of a step.


@app.workflow
def outcomes(n: int) -> str:
    number = double.step(n)
    text = reserve.step(n)
    assert_type(collect(number), Outcome[int])
    assert_type(or_skip(text), str)
    report.step([collect(number)])
    after_all.step(collect(text))
    report.step(collect(number))  # E: arg-type
    report.step([number])  # E: list-item
    after_all.step(collect(number))  # E: arg-type
    after_all.step(text)  # E: arg-type
    double.step(collect(number))  # E: arg-type
    double.step(collect(number).value)  # E: arg-type
    double.step(or_skip(text))  # E: arg-type
    notify.step(n, collect(text).reason)  # E: attr-defined
    return after_all.step(collect(text))


# Branches.


@app.workflow
def branches(n: int) -> int:
    way, kind, paid = way_of.step(n), kind_of.step(n), is_paid.step(n)
    number = branch(way, {Way.AIR: lambda: double.step(n), Way.SEA: lambda: double.step(n)})
    assert_type(number, int)
    branch(paid, {True: lambda: double.step(n), False: lambda: None})
    branch(paid, {True: lambda: double.step("x"), False: lambda: None})  # E: arg-type
    branch(paid, {True: double.step(n), False: lambda: None})  # E: arg-type
    branch(kind, {"big": lambda: double.step(n), "small": lambda: str(double.step())})  # E: call-arg
    branch(way, [lambda: double.step(n)])  # E: arg-type
    branch(way)  # E: call-arg
    notify.step(n, branch(paid, {True: lambda: double.step(n), False: lambda: double.step(n)}))  # E: arg-type
    return number


# Chains, and workflows inside of workflows.


@app.workflow
def chains(n: int) -> int:
    assert_type(then(double.step(n), double), int)
    assert_type(then(then(n, double), reserve), str)
    then(reserve.step(n), double)  # E: arg-type
    then(double.step(n), charge)  # E: arg-type
    then(double, n)  # E: arg-type
    assert_type(other(n), int)
    other()  # E: call-arg
    other("x")  # E: arg-type
    other(n, n)  # E: arg-type
    double.step(right(n, n))  # E: arg-type
    return other(n, "y")


# Workflows and runs.


@app.workflow(on_failure="stop")  # E: call-overload
def wrong_option(n: int) -> int:
    return double.step(n)


@app.workflow(retries=3)  # E: call-overload
def unknown_option(n: int) -> int:
    return double.step(n)


async def runs() -> None:
    run = await right.start(7, 1200)
    assert_type(run, Run[str])
    assert_type(await run.result(timeout=30), str)
    assert_type(other.start_sync(1), Run[int])
    assert_type(other.start_sync(1).result_sync(), int)
    assert_type(await other.using(run_key="k", meta={"a": 1}).start(1, text="y"), Run[int])
    await right.start(7)  # E: call-arg
    await right.start("7", 1200)  # E: arg-type
    await right.start(7, cent=1200)  # E: call-arg
    await other.using(run_key="k").start()  # E: call-arg
    other.using(run_key=7)  # E: arg-type
    other.using(key="k")  # E: call-arg
    number: int = await run.result()  # E: assignment
    print(number)
    await run.result(timeout=[])  # E: arg-type
    await run.cancel(5)  # E: arg-type

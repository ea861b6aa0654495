"""Right and wrong forks for a type checker; a line that must be an error is marked with its code. Never run."""

from __future__ import annotations

import enum
from typing import Literal, assert_type

from taskq import TaskQ, fork

app = TaskQ()


class Way(enum.Enum):
    AIR = "air"
    SEA = "sea"


@app.task
async def ways(order: int) -> set[Way]:
    return {Way.AIR}


@app.task
def kinds(order: int) -> list[Literal["mail", "sms"]]:
    return ["mail"]


@app.task
def send(order: int) -> str:
    return str(order)


@app.task
def cost(order: int) -> int:
    return order


@app.task
def tell(sent: dict[Way, str]) -> None: ...


@app.workflow
def right(order: int) -> None:
    sent = fork(ways.step(order), {Way.AIR: lambda: send.step(order), Way.SEA: lambda: send.step(order)})
    assert_type(sent, dict[Way, str])
    tell.step(sent)
    fork(kinds.step(order), {"mail": lambda: cost.step(order), "sms": lambda: None})


@app.workflow
def wrong(order: int) -> None:
    costs = fork(ways.step(order), {Way.AIR: lambda: cost.step(order)})
    by_kind = fork(kinds.step(order), {"mail": lambda: send.step(order)})
    tell.step(costs)  # E: arg-type
    tell.step(by_kind)  # E: arg-type
    fork(order, {1: lambda: None})  # E: arg-type
    fork(ways.step(order), {Way.AIR: send.step(order)})  # E: arg-type

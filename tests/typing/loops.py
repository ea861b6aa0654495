"""Right and wrong loops for a type checker; a line that must be an error is marked with its code. Never run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_type

from taskq import JobContext, Outcome, TaskQ, branch, collect

app = TaskQ()


@dataclass
class Draft:
    text: str
    good: bool
    word: Literal["done", "again"]


@app.task
async def write(topic: str) -> Draft:
    return Draft(topic, good=False, word="again")


@app.task
async def polish(ctx: JobContext, draft: Draft, style: str = "plain") -> Draft:
    return draft


@app.task
def shorten(draft: Draft) -> str:
    return draft.text


@app.task
def count(n: int, by: int) -> int:
    return n + by


@app.task
def tell(end: Outcome[Draft]) -> None: ...


@app.workflow
def reviewed(draft: Draft) -> Draft:
    return polish.step(draft)


@app.workflow
def right(topic: str) -> str:
    draft = write.step(topic)
    better = polish.loop(draft, until=lambda d: d.good, at_most=3, within="1h", also={"style": topic})
    assert_type(better, Draft)
    more = polish.node("more", priority=2).loop(
        better, until=lambda d: d.word, ends={"done": True, "again": False}, at_most=3, exhausted="give"
    )
    assert_type(more, Draft)
    assert_type(reviewed.loop(draft, until=lambda d: d.good, at_most=3), Draft)
    assert_type(reviewed.node("r").loop(draft, until=lambda d: d.good, at_most=3), Draft)
    tell.step(collect(more))
    return branch(more.good, {True: lambda: shorten.step(more), False: lambda: shorten.step(draft)})


@app.workflow
def wrong(topic: str) -> None:
    draft = write.step(topic)
    polish.loop(topic, until=lambda d: d.good, at_most=3)  # E: arg-type
    polish.loop(draft, until=lambda d: d.bad, at_most=3)  # E: attr-defined
    polish.loop(draft, until=lambda d: d.good)  # E: call-arg
    polish.loop(draft, at_most=3)  # E: call-arg
    polish.loop(draft, until=lambda d: d.good, at_most="3")  # E: arg-type
    polish.loop(draft, until=lambda d: d.good, at_most=3, exhausted="stop")  # E: arg-type
    polish.loop(draft, until=lambda d: d.good, at_most=3, ends={True: "yes"})  # E: dict-item
    shorten.step(count.loop(1, until=lambda n: n, at_most=3))  # E: arg-type
    reviewed.loop(topic, until=lambda d: d.good, at_most=3)  # E: arg-type


@app.workflow
def wrong_state(draft: Draft) -> None:
    shorten.loop(draft, until=lambda d: True, at_most=3)  # E: arg-type

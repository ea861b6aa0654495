"""Types of results, tasks that are never run, and what workflows of them come to."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

import msgspec
import pydantic
import pytest
from plan_kit import compiled, faults_of
from typing_extensions import TypeAliasType

from taskq import (
    TaskQ,
)
from taskq.errors import (
    WiringError,
)
from taskq.tasks import Task

T = TypeVar("T")


class Way(enum.Enum):
    AIR = "air"
    SEA = "sea"


class Word(enum.StrEnum):
    YES = "yes"
    NO = "no"


@dataclass
class Address:
    street: str
    zip: int


@dataclass
class Paid:
    receipt: str
    ok: bool
    address: Address | None
    way: Way
    lines: list[Address]
    notes: dict[str, Address]
    pair: tuple[int, Address]

    @property
    def short(self) -> str:
        return self.receipt[:3]

    def text(self) -> str:
        return self.receipt


@dataclass
class Page(Generic[T]):
    items: list[T]
    first: T | None
    one: T


class Parcel(msgspec.Struct, rename="camel"):
    tracking_code: str
    way_out: Way


class Row(msgspec.Struct, array_like=True):
    name: str
    count: int


class Bill(pydantic.BaseModel):
    total: int
    bill_to: Address = pydantic.Field(alias="billTo")
    sent_on: str = pydantic.Field(serialization_alias="sentOn")


class Box(pydantic.BaseModel, Generic[T]):
    inside: T


class Point(NamedTuple):
    x: int
    y: str


class Shape(TypedDict):
    name: str
    corners: list[Point]


UserId = NewType("UserId", int)
Kind = TypeAliasType("Kind", Literal["big", "small"])


def task(app: TaskQ, name: str, returns: Any = None, **takes: Any) -> Task[..., Any]:
    """A task that is never run."""

    namespace: dict[str, Any] = {}
    exec(f"def {name}({', '.join(takes)}): ...", namespace)
    body = namespace[name]
    body.__annotations__ = {**takes, "return": returns}
    made: Task[..., Any] = app.task(body)
    return made


def source(app: TaskQ, returns: Any, name: str = "source") -> Task[..., Any]:
    return task(app, name, returns)


def sink(app: TaskQ, takes: Any = Any, name: str = "sink") -> Task[..., Any]:
    return task(app, name, None, x=takes)


def wired(app: TaskQ, fn: Callable[[], Any], **options: Any) -> dict[str, Any]:
    return compiled(app, fn, **options)


def faults(app: TaskQ, fn: Callable[..., Any], **options: Any) -> list[str]:
    return faults_of(app.workflow(**options)(fn))


def refused(app: TaskQ, fn: Callable[..., Any]) -> str:
    made = app.workflow(name=f"refused-{len(app.workflows)}")(fn)
    with pytest.raises(WiringError) as caught:
        made.plan  # noqa: B018
    return str(caught.value)

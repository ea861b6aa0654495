"""The filters of ``taskq jobs``: the same flags for looking and for acting, and what they mean in the database."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from taskq.cli.complete import complete_queue, complete_task

if TYPE_CHECKING:
    from taskq.cli.database import Database

__all__ = ["STATUSES", "Filter", "QueueOption", "Selection", "TaskOption", "id_range", "with_filter"]

AT_WORK = ("pending", "running", "held", "unknown")
STATUSES = (*AT_WORK, "succeeded", "failed", "cancelled")
HELD_REASONS = ("signal", "limit", "ordering", "paused", "run", "child")


def _many(name: str, text: str, *short: str, **more: Any) -> Any:
    return typer.Option(f"--{name}", *short, help=text, show_default=False, **more)


StatusOption = Annotated[list[str] | None, _many("status", f"{', '.join(STATUSES)}; repeat it or separate by commas.")]
QueueOption = Annotated[
    list[str] | None, _many("queue", "A queue; may be repeated.", "-q", autocompletion=complete_queue)
]
TaskOption = Annotated[list[str] | None, _many("task", "A task; may be repeated.", autocompletion=complete_task)]
TagOption = Annotated[list[str] | None, _many("tag", "A tag that it has; repeated, it has them all.")]
WorkerOption = Annotated[str | None, typer.Option("--worker", help="Name or id of the worker of its last attempt.")]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", help="Finished, or made and unfinished, since: 2h, or an instant.", metavar="T"),
]
UntilOption = Annotated[str | None, typer.Option("--until", help="The same, but before.", metavar="T")]
OlderOption = Annotated[
    str | None, typer.Option("--older-than", help="Made longer ago than this, such as 1d.", metavar="T")
]
ErrorOption = Annotated[
    list[str] | None,
    _many(
        "error",
        "The type of its error, such as ValueError; of a job that waits again, of its last failure. May be repeated.",
    ),
]
HeldOption = Annotated[list[str] | None, _many("held", f"Why it is held: {', '.join(HELD_REASONS)}.")]
CancelOption = Annotated[
    bool | None,
    typer.Option("--cancel-requested/--no-cancel-requested", help="Cancelling was requested.", show_default=False),
]
OverdueOption = Annotated[bool, typer.Option("--overdue", help="Its deadline passed before it finished.")]
PrefixOption = Annotated[
    str | None, typer.Option("--id", help="Ids that begin so, 8 hex digits or more.", metavar="PREFIX")
]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs are meant, as the command line says it."""

    status: list[str] | None = field(default=None, metadata={"option": StatusOption})
    queue: list[str] | None = field(default=None, metadata={"option": QueueOption})
    task: list[str] | None = field(default=None, metadata={"option": TaskOption})
    tag: list[str] | None = field(default=None, metadata={"option": TagOption})
    worker: str | None = field(default=None, metadata={"option": WorkerOption})
    since: str | None = field(default=None, metadata={"option": SinceOption})
    until: str | None = field(default=None, metadata={"option": UntilOption})
    older_than: str | None = field(default=None, metadata={"option": OlderOption})
    error: list[str] | None = field(default=None, metadata={"option": ErrorOption})
    held: list[str] | None = field(default=None, metadata={"option": HeldOption})
    cancel_requested: bool | None = field(default=None, metadata={"option": CancelOption})
    overdue: bool = field(default=False, metadata={"option": OverdueOption})
    id: str | None = field(default=None, metadata={"option": PrefixOption})

    def given(self) -> dict[str, Any]:
        """The flags that were given, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) not in (None, [], False, ())}

    @property
    def is_empty(self) -> bool:
        """Whether it names no condition at all."""
        return not self.given() and self.cancel_requested is None

    def check(self) -> None:
        """Refuse what cannot be meant, before anything is connected to.

        Raises:
            typer.BadParameter: A value is none of its kind.
        """
        from taskq.cli.database import moment

        self.statuses(())
        if unknown := set(self.held or ()) - set(HELD_REASONS):
            raise typer.BadParameter(
                f"nothing is held for {sorted(unknown)[0]!r}; there are {', '.join(HELD_REASONS)}", param_hint="--held"
            )
        for text in (self.since, self.until):
            moment(text)
        if self.older_than is not None and moment(self.older_than)[1] is None:
            raise typer.BadParameter("--older-than takes a duration, such as 30m, 12h or 7d")
        if self.id is not None:
            id_range(self.id)

    def statuses(self, default: Sequence[str]) -> list[str]:
        """The statuses asked for, or ``default``.

        Raises:
            typer.BadParameter: There is no such status.
        """
        asked = [part.strip() for each in self.status or () for part in each.split(",")]
        if unknown := set(asked) - set(STATUSES):
            raise typer.BadParameter(f"there is no status {sorted(unknown)[0]!r}; there are {', '.join(STATUSES)}")
        return asked or list(default)

    def select(self, database: Database, *, statuses: Sequence[str] = (), frozen: bool = False) -> Selection:
        """Resolve it against the database: its clock, its workers.

        Args:
            database: Where.
            statuses: Those meant where none was asked for.
            frozen: Leave out what is made, or finishes, from now on.

        Raises:
            TaskQError: No worker has the name.
        """
        from taskq.cli.database import moment
        from taskq.errors import TaskQError

        now: datetime = database.value("now")

        def at(text: str | None) -> datetime | None:
            instant, ago = moment(text)
            return instant if ago is None else now - timedelta(seconds=ago)

        workers = None
        if self.worker is not None:
            workers = [row["id"] for row in database.rows("worker_ids", self.worker)]
            if not workers:
                raise TaskQError(f"there is no worker {self.worker!r}; see taskq workers list --all")
        low, high = id_range(self.id) if self.id is not None else (None, None)
        arguments = (
            self.statuses(statuses) or None,
            self.queue or None,
            self.task or None,
            self.tag or None,
            workers,
            at(self.since),
            at(self.until),
            self.error or None,
            self.held or None,
            self.cancel_requested,
            True if self.overdue else None,
            at(self.older_than),
            low,
            high,
            now if frozen else None,
        )
        said = self.given() | {"status": arguments[0]}
        said |= {name: value for name in ("since", "until", "older_than") if (value := at(getattr(self, name)))}
        return Selection(arguments, {k: v for k, v in said.items() if v is not None})


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter with every moment and worker resolved.

    Attributes:
        arguments: The parameters of the queries that select jobs, in their order.
        said: The conditions for the record, moments as instants.
    """

    arguments: tuple[Any, ...]
    said: dict[str, Any]


def id_range(prefix: str) -> tuple[str, str]:
    """The first and the last id that begin so.

    Raises:
        typer.BadParameter: It is no beginning of an id, or too short to mean one.
    """
    digits = prefix.strip().lower().replace("-", "")
    if not re.fullmatch(r"[0-9a-f]{8,32}", digits):
        raise typer.BadParameter(
            f"{prefix!r} is not the id of a job, such as 01999999-0000-7000-8000-000000000000, nor the beginning of "
            "one, of 8 hex digits or more"
        )
    return str(UUID(digits.ljust(32, "0"))), str(UUID(digits.ljust(32, "f")))


def with_filter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the flags of a filter in the place of its parameter ``chosen``."""
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=f.metadata["option"])
        for f in fields(Filter)
    ]

    @functools.wraps(function)
    def command(**given: Any) -> Any:
        chosen = Filter(**{f.name: given.pop(f.name) for f in fields(Filter)})
        chosen.check()
        return function(chosen=chosen, **given)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        parameters += options if parameter.name == "chosen" else [parameter.replace(kind=parameter.KEYWORD_ONLY)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command

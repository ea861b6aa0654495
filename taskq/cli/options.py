"""Options that many commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["DsnOption", "JsonOption", "LimitOption", "ReasonOption", "SchemaOption", "SinceOption", "TimeoutOption"]

DsnOption = Annotated[
    str | None, typer.Option("--dsn", help="The database [TASKQ_DSN].", metavar="URL", show_default=False)
]
SchemaOption = Annotated[
    str | None, typer.Option("--schema", help="The schema, taskq by default [TASKQ_SCHEMA].", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="The most rows to show.")]
ReasonOption = Annotated[str | None, typer.Option("--reason", help="Why; it goes on the record.", show_default=False)]
SinceOption = Annotated[
    str | None,
    typer.Option("--since", help="A duration before now, such as 2h, or an instant in ISO 8601.", metavar="T"),
]
TimeoutOption = Annotated[
    str | None,
    typer.Option(
        "--timeout", help="The longest wait, such as 90s; no limit by default.", metavar="DURATION", show_default=False
    ),
]
